"""Distances, cosines, covariances, products of vectors, local response: norms against adversarial inputs; what divides is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import LinfTensor, RMSTensor, build_norm_map, norm_mode, normed
from thunder_norm.audit import Ball, Case, norm
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

R, INF = RMSTensor, LinfTensor
D = torch.float64


def x(*shape, dims=None, kind=R, size=1.0):
    return Ball("x", kind, shape, size, dims)


def y(*shape, dims=None, kind=R, size=0.6, name="y"):
    return Ball(name, kind, shape, size, dims)


def dist(p):
    return lambda a, b: torch.dist(a, b, p)


def cdist(p):
    return lambda a, b: torch.cdist(a, b, p)


def pdist(p=2.0):
    return lambda a: F.pdist(a, p)


def cosine(**kwargs):
    return lambda a, b: F.cosine_similarity(a, b, **kwargs)


def cov(**kwargs):
    return lambda a: torch.cov(a, **kwargs)


def response(*args, **kwargs):
    return lambda a: F.local_response_norm(a, *args, **kwargs)


# a row and its negative
OPPOSITE = {"witnesses": [(torch.tensor([[1.0], [-1.0], [1.0]], dtype=D).expand(3, 4),)]}
PAIR = {"witnesses": [(torch.tensor([[1.0], [-1.0], [0.0]], dtype=D).expand(3, 4) * math.sqrt(1.5),)]}
MORE = {"restarts": 16, "steps": 40}

CASES = [
    Case("dist", dist(2), (x(2, 3), y(2, 3))),
    Case("dist broadcast", dist(2), (x(2, 3), y(3, dims=(0,)))),
    Case("dist 1", dist(1), (x(2, 3, dims=(0, 1)), y(2, 3))),
    Case("dist 1.5", dist(1.5), (x(2, 3), y(2, 3)), options=MORE),
    Case("dist 3", dist(3), (x(4, dims=(0,)), y(4, dims=(0,)))),
    Case("dist inf", dist(float("inf")), (x(2, 3), y(2, 3, kind=INF))),
    Case("cdist", cdist(2.0), (x(3, 4), y(2, 4))),
    Case("cdist 1", cdist(1.0), (x(3, 4), y(2, 4))),
    Case("cdist inf", cdist(float("inf")), (x(3, 4, kind=INF), y(2, 4, kind=INF))),
    Case("cdist batch, all", cdist(2.0), (x(2, 3, 4, dims=(1, 2)), y(2, 2, 4))),
    Case("pdist", pdist(), (x(3, 4),), options=OPPOSITE),
    Case("pdist 1", pdist(1.0), (x(3, 4),), options=OPPOSITE),
    Case("pdist all", pdist(), (x(3, 4, dims=(0, 1)),), options=PAIR),
    Case("pdist inf", pdist(float("inf")), (x(3, 4, kind=INF),), options=OPPOSITE),
    Case("cosine", cosine(eps=0.5), (x(3, 4), y(3, 4))),
    Case("cosine, small", cosine(eps=10.0), (x(3, 4), y(3, 4))),
    Case("cosine along", cosine(dim=0, eps=3.0), (x(4, 2, dims=(0,)), y(4, 2, dims=(0,)))),
    Case("cov", cov(), (x(3, 4),)),
    Case("cov entries", cov(correction=0), (x(3, 4, kind=INF),)),
    Case("cov of one", cov(), (x(5),)),
    # the observation with the largest weight is not the one with all the energy
    Case("cov weighted", cov(fweights=torch.tensor([1, 2, 1, 3])), (x(2, 4),), 0.4),
    Case(
        "cov weighted twice", cov(fweights=torch.tensor([1, 2, 1]), aweights=torch.tensor([0.5, 1, 1], dtype=D)), (x(2, 3),), 0.4
    ),
    Case("local_response_norm", response(3), (x(1, 4, 2, dims=(1,)),)),
    Case("local_response_norm, strong", response(3, alpha=1.0, k=2.0), (x(1, 4, 2, kind=INF, size=0.05),)),
    # alpha n^2 beside k makes the value smaller and the slope larger than at 0, where they are attained
    Case("local_response_norm, large", response(2, alpha=1.0, beta=0.5), (x(1, 4, 2, kind=INF),), 0.4),
    Case("cross", lambda a, b: torch.cross(a, b, dim=1), (x(2, 3), y(2, 3))),
    Case("cross entries", torch.linalg.cross, (x(2, 3, kind=INF), y(2, 3, kind=INF)), options=MORE),
    Case("cross all", torch.linalg.cross, (x(2, 3, dims=(0, 1)), y(2, 3, dims=(0, 1))), options=MORE),
    Case("cross beside", lambda a, b: torch.cross(a, b), (x(3, 2), y(3, 2)), options=MORE),
    Case("cross broadcast", torch.linalg.cross, (x(1, 3), y(4, 3))),
    Case(
        "addr",
        lambda a, b, c: torch.addr(a, b, c, beta=0.5, alpha=-2),
        (x(2, 3, dims=(0, 1)), y(2), y(3, size=0.8, name="z")),
        options=MORE,
    ),
    Case(
        "addbmm",
        lambda a, b, c: torch.addbmm(a, b, c, beta=0.5, alpha=2),
        (x(2, 3, kind=INF), y(2, 2, 4), y(2, 4, 3, dims=(1,), size=0.8, name="z")),
        options=MORE,
    ),
    Case("fill", lambda a, b: torch.fill(a, b), (x(2, 3), y(kind=INF))),
    Case("linspace", lambda a, b: torch.linspace(a, b, 4, dtype=D), (x(kind=INF), y(kind=INF))),
]
NO_DERIVATIVE = {"linspace"}


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in NO_DERIVATIVE], ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())
    case.check_at(0.0, seeded())


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("kind, dims", [(R, (-1,)), (R, (0,)), (INF, ()), (R, (0, 1))])
def test_renorm_is_within_its_value_and_has_no_sensitivity(p, kind, dims):
    for a in (torch.randn(3, 4), torch.eye(3, 4), torch.ones(3, 4), 0.01 * torch.randn(3, 4)):
        out = torch.renorm(kind.of(a.double(), dims), p, 0, 0.7)
        assert torch.equal(out.backing, torch.renorm(a.double(), p, 0, 0.7))
        assert norm(type(out), out.backing, out.elem_dims) <= out.norm_size * (1 + 1e-9)
    with pytest.raises(NormMismatchError, match="jumps"):
        torch.renorm(kind(1.0, backing=torch.ones(3, 4), elem_dims=dims, perturbation_size=1.0), p, 0, 0.7)


@pytest.mark.parametrize("width", [4, 8, 32])
@pytest.mark.parametrize("power", [1, 2, 3])
def test_typical_distances_are_those_of_independent_rows(power, width):
    """And they move as far as Gaussian movements of both make them."""
    draw = torch.Generator().manual_seed(seeded(0))
    a, b, u, v = (scale * torch.randn(300, width, generator=draw, dtype=D) for scale in (0.7, 1.1, 1.0, 1.0))
    with norm_mode("typical"):
        x, y = (LinfTensor(n, backing=t, perturbation_size=1.0) for n, t in ((0.7, a), (1.1, b)))
        found = torch.cdist(x, y) ** power
    squares = (a[:, None] - b[None]).square().sum(-1)
    assert found.norm_size.item() == pytest.approx(squares.pow(power).mean().sqrt().item(), rel=0.15)
    moved = torch.func.jvp(lambda a, b: (a[:, None] - b[None]).square().sum(-1) ** (power / 2), (a, b), (u, v))[1]
    size = moved.square().mean().sqrt().item()
    assert size * 0.85 <= found.perturbation_size.item() <= size * 2  # both movements are added


def test_renorm_attains_its_value():
    a = torch.ones(3, 4, dtype=D)
    for p in (2.0, 3.0):
        out = torch.renorm(R.of(a), p, 0, 0.7)
        assert norm(R, out.backing, out.elem_dims).item() == pytest.approx(out.norm_size.item(), rel=1e-6)
    out = torch.renorm(R.of(torch.eye(3, 4, dtype=D)), 1.0, 0, 0.3)
    assert norm(R, out.backing, out.elem_dims).item() == pytest.approx(out.norm_size.item(), rel=1e-6)


def test_linspace_lies_between_its_ends():
    start, end = torch.tensor(-2.0), torch.tensor(1.0)
    for given in ((INF.of(start), INF.of(end)), (INF.of(start), 1.0), (-2.0, INF.of(end)), (start, INF.of(end))):
        out = torch.linspace(*given, 4)
        assert torch.equal(out.backing, torch.linspace(-2.0, 1.0, 4))
        assert out.norm_size.item() == 2.0
    moved = torch.linspace(INF(2.0, backing=start, perturbation_size=0.5), INF(1.0, backing=end, perturbation_size=0.25), 4)
    assert moved.perturbation_size.item() == 0.75
    assert torch.linspace(INF.of(start), INF.of(end), 4, dtype=torch.int64).tolist() == [-2, -1, 0, 1]


def test_batch_norms_by_any_name_are_the_same():
    a, mean, var = torch.randn(4, 3, 2, dtype=D), torch.zeros(3, dtype=D), torch.ones(3, dtype=D)
    expected = F.batch_norm(R.of(a), None, None, training=True)
    aten = torch.ops.aten
    for out in (
        torch._native_batch_norm_legit(R.of(a), None, None, mean.clone(), var.clone(), True, 0.1, 1e-5)[0],
        torch._native_batch_norm_legit(R.of(a), None, None, True, 0.1, 1e-5)[0],
        aten._native_batch_norm_legit_functional.default(R.of(a), None, None, mean, var, True, 0.1, 1e-5)[0],
        aten._batch_norm_with_update(R.of(a), None, None, mean.clone(), var.clone(), 0.1, 1e-5)[0],
    ):
        torch.testing.assert_close(out.backing, expected.backing)
        assert out.norm_size == expected.norm_size and out.elem_dims == expected.elem_dims
    evaluated = torch._native_batch_norm_legit(R.of(a), None, None, mean, var, False, 0.1, 1e-5)[0]
    assert evaluated.norm_size == F.batch_norm(R.of(a), mean, var).norm_size


def test_in_place_constants():
    out = R.of(torch.ones(2, 3)) * 2
    assert out.zero_().norm_size.item() == 0 and out.backing.abs().max() == 0
    assert (R.of(torch.ones(2, 3)) * 2).fill_(-3.0).norm_size.item() == 3


REFUSED = {
    "corrcoef": (lambda a: torch.corrcoef(a), "cov"),
    "dist 0.5": (lambda a: torch.dist(a, a, 0.5), "not a norm"),
    "cdist 0": (lambda a: torch.cdist(a, a, 0.0), "not a norm"),
    "pdist 0": (lambda a: F.pdist(a, 0.0), "not a norm"),
    "cosine with a negative eps": (lambda a: F.cosine_similarity(a, a, eps=-1.0), "eps > 0"),
    "cov of one observation": (lambda a: torch.cov(a[:, :1]), "divides by zero"),
    "local_response_norm without k": (lambda a: F.local_response_norm(a[None], 2, k=0.0), "k > 0"),
    "resize_": (lambda a: (a * 1).resize_(2, 2), "reshape"),
    "resize_as_": (lambda a: (a * 1).resize_as_(torch.ones(2, 2)), "reshape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_bound_is_refused(name):
    call, why = REFUSED[name]
    with pytest.raises(NormMismatchError, match=why):
        call(R.of(torch.ones(3, 3)))


COVARIANCES = {
    "of rows": lambda x: torch.cov(x),
    "of columns, uncorrected": lambda x: x.mT.cov(correction=0),
    "of one": lambda x: torch.cov(x[0]),
    "weighted": lambda x: torch.cov(x, fweights=torch.tensor([1, 2, 1, 3, 1]), aweights=torch.linspace(0.5, 2.0, 5).to(x.dtype)),
}


@pytest.mark.parametrize("name", COVARIANCES)
def test_covariances_in_a_trace_are_torchs_and_have_the_norm_of_eager_mode(name):
    """torch looks at a value there, which a trace with norms does not have."""
    torch.manual_seed(seeded(0))
    f, x = COVARIANCES[name], torch.randn(3, 5, dtype=torch.float64)
    found, eager = normed(thunder.jit(f, transforms=[NormTransform()]))(RMSTensor.of(x)), f(RMSTensor.of(x))
    torch.testing.assert_close(found.backing, f(x))
    assert found.norm_size.item() == pytest.approx(eager.norm_size.item())
    assert actual_norm(found) <= found.norm_size * (1 + 1e-9)


class Covariances(torch.nn.Module):
    """Pooled by a covariance of features."""

    def __init__(self):
        super().__init__()
        self.features, self.head = torch.nn.Linear(6, 3), torch.nn.Linear(9, 2)

    def forward(self, x):
        return self.head(torch.cov(self.features(x).T).flatten())


def test_a_model_with_a_covariance_in_every_way():
    torch.manual_seed(seeded(1))
    m, x = Covariances(), torch.randn(4, 6)
    jm = thunder.jit(m, transforms=[NormTransform()])
    torch.testing.assert_close(jm(x), m(x))
    found = normed(jm)(RMSTensor.of(x))
    torch.testing.assert_close(found.backing, m(x))
    found.backing.sum().backward()
    of_trace = [p.grad.clone() for p in m.parameters()]
    m.zero_grad()
    m(x).sum().backward()
    torch.testing.assert_close(of_trace, [p.grad for p in m.parameters()])
    on_meta = build_norm_map(Covariances().to("meta"), x.to("meta"), parameters="unit")(RMSTensor(1.0))
    assert on_meta.norm_size.item() == pytest.approx(ModularNorm(m, x).outputs.norm_size.item())
