"""`initialize`: tensors of a given norm, drawn as torch draws; plain, normed, and in traces."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder_norm.transforms as transforms
from tests.seeds import seeded
from thunder_norm import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSConvTensor,
    RMSToRMSTensor,
    build_norm_map,
    initialize,
    norm_report,
    normed,
)
from thunder_norm.errors import NormMismatchError, TransformError, UnsupportedOpError
from thunder_norm.modular import ModularNorm
import thunder

D = torch.float64


def _rms(t: torch.Tensor) -> torch.Tensor:
    return t.square().mean(-1).sqrt()


def _operators(t: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(t) * math.sqrt(t.shape[-1] / t.shape[-2])


# kind, shape, elem_dims -> every norm of which the tensor's is the maximum; by torch, in float64
CASES = {
    "rows": (RMSTensor, (3, 5), None, _rms),
    "a vector": (RMSTensor, 7, None, _rms),
    "columns": (RMSTensor, (3, 5), 0, lambda t: _rms(t.mT)),
    "several dimensions": (RMSTensor, (3, 4, 5), (0, 2), lambda t: t.square().mean((0, 2)).sqrt()),
    "signs": (RMSTensor, (3, 5), (), torch.abs),
    "a scalar": (RMSTensor, (), None, torch.abs),
    "Euclidean": (L2Tensor, (3, 5), None, lambda t: torch.linalg.vector_norm(t, dim=-1)),
    "absolute": (L1Tensor, (2, 3, 5), -2, lambda t: t.abs().sum(-2)),
    "gains": (LinfTensor, (5,), None, torch.abs),
    "wide": (RMSToRMSTensor, (3, 5), None, _operators),
    "tall, for each head": (RMSToRMSTensor, (2, 7, 3), None, _operators),
    "transposed": (RMSToRMSTensor, (3, 5), (-1, -2), lambda t: _operators(t.mT)),
    "kernel": (RMSToRMSConvTensor, (6, 4, 3, 3), None, lambda t: 9 * _operators(t.permute(2, 3, 0, 1))),
    "kernel of groups": (
        RMSToRMSConvTensor.grouped(2),
        (6, 4, 3),
        None,
        lambda t: 3 * _operators(t.permute(2, 0, 1).unflatten(1, (2, 3))),
    ),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(seeded(0))


@pytest.mark.parametrize("name", CASES)
def test_each_norm_is_exactly_the_given_one(name):
    kind, shape, dims, norms = CASES[name]
    t = initialize(kind, shape, 2.5, elem_dims=dims, dtype=D)
    assert t.shape == torch.Size([shape] if isinstance(shape, int) else shape)
    torch.testing.assert_close(norms(t), torch.full_like(norms(t), 2.5), rtol=1e-13, atol=0)
    assert kind.of(t, dims).norm_size.item() == pytest.approx(2.5, rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rows", "wide", "kernel"])
def test_other_dtypes_have_it_up_to_rounding(name, dtype):
    kind, shape, dims, norms = CASES[name]
    t = initialize(kind, shape, 0.5, elem_dims=dims, dtype=dtype)
    assert t.dtype is dtype
    wide = norms(t.to(D))
    torch.testing.assert_close(wide, torch.full_like(wide, 0.5), rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_dtype_and_device_are_torchs_defaults_unless_they_are_given():
    before = torch.get_default_dtype()
    torch.set_default_dtype(D)
    try:
        assert initialize(RMSTensor, (2, 3)).dtype is D
    finally:
        torch.set_default_dtype(before)
    assert initialize(RMSTensor, (2, 3)).dtype is before
    state = torch.get_rng_state()
    with torch.device("meta"):
        t = initialize(RMSToRMSTensor, (2, 3))
    assert t.is_meta and t.shape == (2, 3)
    assert initialize(RMSTensor, (2, 3), device="meta").is_meta
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
def test_what_has_no_entries_is_empty(shape):
    kind = RMSToRMSTensor if len(shape) == 2 else RMSTensor
    assert initialize(kind, shape).shape == shape


def test_numbers_come_from_the_generator():
    def drawn(generator: torch.Generator | None) -> torch.Tensor:
        return initialize(RMSTensor, (4, 5), generator=generator, dtype=D)

    numbers = torch.randn(4, 5, dtype=D, generator=torch.Generator().manual_seed(seeded(1)))
    expected = numbers / _rms(numbers)[:, None]
    torch.testing.assert_close(drawn(torch.Generator().manual_seed(seeded(1))), expected, rtol=1e-14, atol=1e-14)
    torch.manual_seed(seeded(1))
    torch.testing.assert_close(drawn(None), expected, rtol=1e-14, atol=1e-14)


def test_semi_orthogonal_matrices_are_uniform():
    """Of a uniform orthogonal matrix each entry has mean 0 and mean square 1 / n, and the trace has mean square 1."""
    generator = torch.Generator().manual_seed(seeded(2))
    q = torch.stack([initialize(RMSToRMSTensor, (4, 4), generator=generator, dtype=D) for _ in range(4000)])
    assert q.mean(0).abs().max() < 5 * 0.5 / math.sqrt(4000)
    torch.testing.assert_close(q.square().mean(0), torch.full((4, 4), 0.25, dtype=D), rtol=0, atol=5 * 0.25 / math.sqrt(4000))
    assert q.diagonal(dim1=-2, dim2=-1).sum(-1).square().mean().item() == pytest.approx(1, abs=5 * 1.5 / math.sqrt(4000))


def test_the_modular_norms_start_is_drawn_by_it():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))
    norm = ModularNorm(model, torch.randn(3, 6)).initialize_(torch.Generator().manual_seed(seeded(3)))
    generator = torch.Generator().manual_seed(seeded(3))
    for name, p in model.named_parameters():
        spec = norm.norms[name]
        expected = initialize(spec.kind, p.shape, generator=generator, elem_dims=spec.elem_dims, dtype=D)
        assert torch.equal(p, expected.to(p.dtype)), name


# -- sizes that are tensors --------------------------------------------------------------------------------------------------


def test_the_result_is_differentiable_in_its_size():
    size = torch.tensor(1.5, dtype=D, requires_grad=True)

    def f(n: torch.Tensor) -> torch.Tensor:
        return initialize(RMSToRMSTensor, (3, 4), n, generator=torch.Generator().manual_seed(seeded(0)), dtype=D)

    assert torch.autograd.gradcheck(f, (size,))
    (g,) = torch.autograd.grad(f(size).square().sum(), size)
    assert g.item() == pytest.approx(2 * 1.5 * 3 * 3 / 4, rel=1e-12)  # three singular values sqrt(3 / 4)


def test_of_a_normed_size_it_is_normed():
    size = LinfTensor(2.0, backing=torch.tensor(-1.0, dtype=D), norm_size_requires_grad=True, perturbation_size=0.5)
    w = initialize(RMSToRMSTensor, (3, 4), size, dtype=D)
    assert type(w) is RMSToRMSTensor and w.elem_dims == (-2, -1) and w.shape == (3, 4)
    assert w.norm_size.item() == 2 and w.perturbation_size.item() == 0.5
    assert RMSToRMSTensor.of(w.backing).norm_size.item() == pytest.approx(1, rel=1e-13)
    w.norm_size.backward()
    assert size.norm_size.grad.item() == 1


# -- in models and traces ------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A linear map, then one of a drawn matrix whose size is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, dtype=D))
        self.size = nn.Parameter(torch.tensor(1.5, dtype=D))
        self.generator = torch.Generator().manual_seed(seeded(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = initialize(RMSToRMSTensor, (5, 4), self.size, generator=self.generator, dtype=x.dtype, device=x.device)
        return F.linear(F.linear(x, self.w), drawn)


def _eagerly(model: Model, x: torch.Tensor, calls: int) -> list[torch.Tensor]:
    model.generator.manual_seed(seeded(6))
    found = [model(x) for _ in range(calls)]
    model.generator.manual_seed(seeded(6))
    return found


def test_a_traced_program_draws_what_eager_draws():
    model, x = Model(), torch.randn(2, 3, dtype=D)
    jm = thunder.jit(model, transforms=[transforms.NormTransform()])
    expected = _eagerly(model, x, 3)
    (wanted,) = torch.autograd.grad(expected[0].sum(), model.size)
    for n in range(3):
        y = jm(x)
        torch.testing.assert_close(y, expected[n], rtol=1e-13, atol=1e-13)
        if n == 0:
            (g,) = torch.autograd.grad(y.sum(), model.size)
            torch.testing.assert_close(g, wanted, rtol=1e-12, atol=1e-12)
    assert not torch.equal(expected[0], expected[1])
    assert thunder.cache_misses(jm) == 1


@pytest.mark.parametrize("name", CASES)
def test_a_traced_program_draws_every_kind(name):
    kind, shape, dims, _ = CASES[name]

    def f(size: torch.Tensor) -> torch.Tensor:
        return initialize(kind, shape, size, elem_dims=dims)

    jf = thunder.jit(f, transforms=[transforms.NormTransform()])
    size = torch.tensor(0.75)
    torch.manual_seed(seeded(7))
    expected = f(size), f(size)
    torch.manual_seed(seeded(7))
    torch.testing.assert_close((jf(size), jf(size)), expected, rtol=1e-6, atol=1e-7)
    torch.manual_seed(seeded(7))
    y = normed(jf)(size)
    assert isinstance(y, kind) and y.elem_dims == kind.of(expected[0], dims).elem_dims
    torch.testing.assert_close(y.backing, expected[0], rtol=1e-6, atol=1e-7)
    assert y.norm_size.item() == pytest.approx(0.75, rel=1e-6)


def test_another_generator_in_its_place_is_drawn_from():
    model, x = Model(), torch.randn(2, 3, dtype=D)
    jm = thunder.jit(model, transforms=[transforms.NormTransform()])
    jm(x)
    model.generator = torch.Generator().manual_seed(seeded(8))
    y = jm(x)
    model.generator.manual_seed(seeded(8))
    torch.testing.assert_close(y, model(x), rtol=1e-13, atol=1e-13)

    jf = thunder.jit(lambda g, n: initialize(RMSTensor, (3,), n, generator=g, dtype=D), transforms=[transforms.NormTransform()])
    for seed in (9, 10):
        found = jf(torch.Generator().manual_seed(seeded(seed)), torch.ones(()))
        expected = initialize(RMSTensor, (3,), generator=torch.Generator().manual_seed(seeded(seed)), dtype=D)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_norms_of_a_model_follow_from_its_size():
    model, x = Model(), torch.randn(2, 3, dtype=D)
    jm = thunder.jit(model, transforms=[transforms.NormTransform()])
    (expected,) = _eagerly(model, x, 1)
    y = jm(RMSTensor.of(x))
    assert isinstance(y, RMSTensor)
    torch.testing.assert_close(y.backing, expected, rtol=1e-13, atol=1e-13)
    rest = RMSTensor.of(x).norm_size.item() * RMSToRMSTensor.of(model.w.detach()).norm_size.item()
    assert y.norm_size.item() == pytest.approx(1.5 * rest, rel=1e-6)
    y.norm_size.backward()
    assert model.size.grad.item() == pytest.approx(rest, rel=1e-6)
    assert normed(jm)(x).norm_size.item() == pytest.approx(1.5 * rest, rel=1e-6)


def test_norm_maps_reports_and_the_modular_norm_know_it():
    model, x = Model(), torch.randn(2, 3, dtype=D)
    norms = {"size": LinfTensor(3.0), "w": RMSToRMSTensor(0.5)}
    assert build_norm_map(model, x)(RMSTensor(2.0), normed_state_dict=norms).norm_size.item() == pytest.approx(3.0)
    assert build_norm_map(model.to("meta"), x.to("meta"))(RMSTensor(2.0), normed_state_dict=norms).norm_size.item() == 3.0
    assert ModularNorm(Model().to("meta"), x.to("meta")).sensitivities == pytest.approx({"size": 1.0, "w": 1.0})
    model = Model()
    state = model.generator.get_state()
    report = norm_report(thunder.jit(model, transforms=[transforms.NormTransform()]), RMSTensor.of(x))
    assert [row.kind for row in report.rows if row.op == "mul"] == ["RMSToRMSTensor"]
    assert torch.equal(model.generator.get_state(), state)


def test_function_transforms_differentiate_and_draw():
    def f(n: torch.Tensor) -> torch.Tensor:
        return initialize(RMSTensor, (3,), n, dtype=D).square().sum()

    assert transforms.grad(f)(torch.tensor(2.0, dtype=D)).item() == pytest.approx(12, rel=1e-12)
    drawn = transforms.vmap(lambda n: initialize(RMSTensor, (4,), n, dtype=D), randomness="different")(torch.arange(3.0, dtype=D))
    torch.testing.assert_close(_rms(drawn), torch.arange(3.0, dtype=D), rtol=1e-13, atol=0)
    with pytest.raises(TransformError, match="randomness"):
        transforms.vmap(f)(torch.ones(2, dtype=D))


# -- refused -------------------------------------------------------------------------------------------------------------------


class OwnTensor(NormedTensor):
    """A kind with a norm of its own."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: initialize(OwnTensor, (3,)), "OwnTensor"),
        (lambda: initialize(NormedTensor, (3,)), "NormedTensor"),
        (lambda: initialize("rms", (3,)), "got str"),
        (lambda: initialize(RMSTensor, (3, -1)), "integers >= 0"),
        (lambda: initialize(RMSTensor, 2.5), "integers >= 0"),
        (lambda: initialize(RMSTensor, (True, 2)), "integers >= 0"),
        (lambda: initialize(RMSTensor, (3,), -1.0), "norm_size"),
        (lambda: initialize(RMSTensor, (3,), math.inf), "norm_size"),
        (lambda: initialize(RMSTensor, (3,), math.nan), "norm_size"),
        (lambda: initialize(RMSTensor, (3,), torch.ones(2)), "0-dim"),
        (lambda: initialize(RMSTensor, (3,), torch.tensor(1)), "floating"),
        (lambda: initialize(RMSTensor, (3,), dtype=torch.int32), "dtype"),
        (lambda: initialize(RMSTensor, (3,), dtype=torch.complex64), "dtype"),
        (lambda: initialize(RMSTensor, (3,), elem_dims=1), "out of range"),
        (lambda: initialize(RMSTensor, (3,), elem_dims="rows"), "elem_dims"),
        (lambda: initialize(RMSTensor, (3,), elem_dims=0.5), "elem_dims"),
        (lambda: initialize(RMSToRMSTensor, (3,)), "elem_dims"),
        (lambda: initialize(RMSToRMSTensor, (3, 4), elem_dims=-1), "elem_dims"),
        (lambda: initialize(RMSToRMSConvTensor.grouped(2), (3, 4, 3)), "groups"),
        (lambda: initialize(RMSTensor, (3,), generator=3), "generator"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(NormMismatchError, match=message):
        call()


def test_a_generator_that_a_traced_program_makes_is_refused():
    def f(n: torch.Tensor) -> torch.Tensor:
        return initialize(RMSTensor, (3,), n, generator=torch.Generator().manual_seed(seeded(3)))

    jf = thunder.jit(f, transforms=[transforms.NormTransform()])
    for run in (jf, normed(jf)):
        with pytest.raises(UnsupportedOpError, match="that the traced program makes"):
            run(torch.ones(()))


@pytest.mark.parametrize("name", ["manual_seed", "seed", "set_state"])
def test_a_generator_that_a_traced_program_seeds_is_refused(name):
    generator = torch.Generator()
    args = {"manual_seed": (3,), "seed": (), "set_state": (generator.get_state(),)}[name]

    def f(n: torch.Tensor) -> torch.Tensor:
        getattr(generator, name)(*args)
        return initialize(RMSTensor, (3,), n, generator=generator)

    with pytest.raises(UnsupportedOpError, match=f"torch.Generator.{name} in a traced program"):
        thunder.jit(f, transforms=[transforms.NormTransform()])(torch.ones(()))


def test_errors_are_the_same_in_a_trace():
    jf = thunder.jit(lambda n: initialize(RMSTensor, (3,), n, elem_dims=2), transforms=[transforms.NormTransform()])
    with pytest.raises(NormMismatchError, match="out of range"):
        jf(torch.ones(()))
