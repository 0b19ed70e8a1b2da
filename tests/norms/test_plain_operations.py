"""Operations on parameters alone: the parameter stays reached, its norm is the given one, or the program is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor, RMSToRMSTensor, build_norm_map, norm_report, normed, sensitivities, with_perturbation
from thunder_norm.errors import MissingNormRuleError, ThunderNormError, UnsupportedOpError
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.norms.lifts import traced_lifting
from thunder_norm.transforms import NormTransform
import thunder


class Attention(nn.Module):
    def __init__(self, call=None, **options):
        super().__init__()
        self.call = call or {}
        self.inner = nn.MultiheadAttention(8, 2, **{"batch_first": True, **options})

    def forward(self, q, k, v):
        return self.inner(q, k, v, **self.call)[0]


class Used(nn.Module):
    """A function of x and of parameters."""

    def __init__(self, f, *shape, count=1):
        super().__init__()
        self.f = f
        self.w = nn.ParameterList([nn.Parameter(0.3 * torch.randn(*shape)) for _ in range(count)])

    def forward(self, x):
        return self.f(x, *self.w)


X, Y = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
_T = lambda t: t.transpose(0, 1)  # noqa: E731
ATTENTION = {
    "cross": (lambda: Attention(), (X, Y, Y)),
    "without weights": (lambda: Attention({"need_weights": False}), (X, Y, Y)),
    "weights of each head": (lambda: Attention({"average_attn_weights": False}), (X, Y, Y)),
    "three inputs": (lambda: Attention(), (X, Y, Y + 1)),
    "key is query": (lambda: Attention(), (X, X, X + 1)),
    "value is query": (lambda: Attention(), (X, X + 1, X)),
    "self": (lambda: Attention(), (X, X, X)),
    "self, evaluation": (lambda: Attention().eval(), (X, X, X)),
    "cross, evaluation": (lambda: Attention({"need_weights": False}).eval(), (X, Y, Y)),
    "separate weights": (lambda: Attention(kdim=6, vdim=10), (X, torch.randn(2, 4, 6), torch.randn(2, 4, 10))),
    "learned key and value": (lambda: Attention(add_bias_kv=True), (X, Y, Y)),
    "learned key and value, self": (lambda: Attention(add_bias_kv=True), (X, X, X)),
    "zero key": (lambda: Attention(add_zero_attn=True), (X, Y, Y)),
    "tokens first": (lambda: Attention(batch_first=False), (_T(X), _T(Y), _T(Y))),
    "no bias": (lambda: Attention(bias=False), (X, Y, Y)),
    "unbatched": (lambda: Attention(), (X[0], Y[0], Y[0])),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, dropout=0.0), (X, Y)),
    "decoder layer, norm first": (lambda: nn.TransformerDecoderLayer(8, 2, 16, norm_first=True).eval(), (_T(X), _T(Y))),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (X,)),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True, dropout=0.0), (X, Y)),
}
USES = {
    "chunk": (lambda x, w: F.linear(x, w.chunk(2)[0]) + F.linear(x, w.chunk(2)[1]), (16, 8)),
    "split": (lambda x, w: F.linear(x, w.split([4, 12])[1]), (16, 8)),
    "slice": (lambda x, w: F.linear(x, w[:4]), (16, 8)),
    "columns": (lambda x, w: F.linear(x[..., :4], w[:, :4]), (16, 8)),
    "index": (lambda x, w: F.linear(x, w[torch.tensor([0, 2, 2])]), (16, 8)),
    "select": (lambda x, w: x @ w[1], (2, 8, 8)),
    "unflatten": (lambda x, w: F.linear(x, w.unflatten(0, (2, 8))[1]), (16, 8)),
    "permute": (lambda x, w: x @ w.permute(1, 0), (16, 8)),
    "transposed": (lambda x, w: x @ w.T, (16, 8)),
    "view": (lambda x, w: torch.einsum("btd,hed->bthe", x, w.view(2, 4, 8)), (8, 8)),
    "expand": (lambda x, w: x * w.expand(2, 5, 8), (8,)),
    "repeat": (lambda x, w: x * w.repeat(4), (2,)),
    "tril": (lambda x, w: F.linear(x, w.tril()), (8, 8)),
    "times a mask": (lambda x, w: F.linear(x, w * torch.ones(8, 8).tril()), (8, 8)),
    "beside a constant": (lambda x, w: F.linear(x, torch.cat([w, torch.ones(2, 8)])), (4, 8)),
    "sigmoid": (lambda x, w: x * torch.sigmoid(w), (8,)),
    "cast": (lambda x, w: F.linear(x.double(), w.double()), (8, 8)),
    "diagonal": (lambda x, w: F.linear(x, torch.diag(w)), (8,)),
    "written into zeros": (lambda x, w: F.linear(x, torch.zeros(8, 8).index_put((torch.arange(8), torch.arange(8)), w)), (8,)),
    "mean": (lambda x, w: x + w.mean(0), (8, 8)),
    "concatenated": (lambda x, a, b: F.linear(x, torch.cat([a, b])), (4, 8), 2),
    "stacked": (lambda x, a, b: F.linear(x, torch.stack([a, b]).sum(0)), (4, 8), 2),
    "product": (lambda x, a, b: F.linear(x, a @ b), (8, 8), 2),
    "outer product": (lambda x, a, b: F.linear(x, torch.outer(a, b)), (8,), 2),
    "einsum": (lambda x, w: torch.einsum("btd,hde->bthe", x, w), (2, 8, 4)),
    "cell": (lambda x, w, v: torch.rnn_tanh_cell(x[0], x[0], w, v), (8, 8), 2),
}
PROGRAMS = {**ATTENTION, **{n: (lambda f=f, s=s, c=c: Used(f, *s, count=(*c, 1)[0]), (X,)) for n, (f, s, *c) in USES.items()}}


@pytest.mark.parametrize("name", PROGRAMS)
def test_reached_are_the_parameters_that_have_a_gradient(name):
    make, inputs = PROGRAMS[name]
    torch.manual_seed(seeded(0))
    model = make()
    model(*inputs).square().sum().backward()
    have = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    norm = ModularNorm(model, *inputs)
    reached = {n for n, s in norm.sensitivities.items() if s > 0}
    # a bias that moves all keys alike moves no softmax: a bound on the packed projection does not see it
    assert have <= reached and all("bias" in n for n in reached - have)
    report = norm_report(thunder.jit(model, transforms=[NormTransform()]), *map(RMSTensor.of, inputs))
    assert {n for n, row in report.parameters.items() if row.sensitivity > 0} == reached


@pytest.mark.parametrize("name", [n for i, n in enumerate(PROGRAMS) if i % 3 == 0 or n == "three inputs"])
def test_map_of_unit_norms_does_not_depend_on_values(name):
    make, inputs = PROGRAMS[name]
    torch.manual_seed(seeded(0))
    model = make()
    found = []
    for _ in range(2):
        norm_map = build_norm_map(model, *inputs, parameters="unit")
        found.append(norm_map(*(RMSTensor(1.0) for _ in inputs)).norm_size.item())
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(7.3).add_(0.1)
    assert found[0] == found[1]


def test_modular_optimizer_moves_the_projections_of_cross_attention():
    torch.manual_seed(seeded(0))
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    optimizer = ModularOptimizer(layer, X, Y, lr=0.1)
    assert optimizer.norm.unreached == ()
    before = {n: p.detach().clone() for n, p in layer.named_parameters()}
    layer(X, Y).square().mean().backward()
    optimizer.step()
    assert all((p - before[n]).abs().max() > 0 for n, p in layer.named_parameters() if p.grad.abs().max() > 1e-9)


def test_norm_given_for_a_packed_projection_counts():
    torch.manual_seed(seeded(0))
    model = Attention({"need_weights": False})
    norm_map = build_norm_map(model, X, Y, Y, parameters="unit")
    bounds, moves = [], []
    for size in (1.0, 50.0):
        p = with_perturbation(RMSToRMSTensor(size))
        out = norm_map(*[RMSTensor(1.0)] * 3, normed_state_dict={"inner.in_proj_weight": p})
        bounds.append(out.norm_size.item())
        moves.append(sensitivities(out, p).item())
    assert bounds[1] > 20 * bounds[0] and moves[1] > moves[0] > 0


@pytest.mark.parametrize(
    ("use", "shape", "error"),
    [
        (lambda x, w: F.linear(x, torch.ormqr(w, torch.ones(8), torch.eye(8))), (8, 8), MissingNormRuleError),
        (lambda x, w: F.linear(x, w.clone().t_()), (8, 8), UnsupportedOpError),
    ],
)
def test_what_loses_the_norm_of_a_parameter_is_refused(use, shape, error):
    model = Used(use, *shape)
    for run in (
        lambda: ModularNorm(model, X),
        lambda: build_norm_map(model, X, parameters="unit")(RMSTensor(1.0)),
        lambda: norm_report(thunder.jit(model, transforms=[NormTransform()]), RMSTensor.of(X)),
    ):
        with pytest.raises(error):
            run()
    if error is MissingNormRuleError:  # measured, and nothing moves: its values are its norm
        thunder.jit(model, transforms=[NormTransform()])(RMSTensor.of(X))


def test_the_error_says_which_operation_and_where():
    model = Used(lambda x, w: x @ torch.ormqr(w, torch.ones(8), torch.eye(8)), 8, 8)
    for run in (lambda: ModularNorm(model, X), lambda: build_norm_map(model, X, parameters="unit")(RMSTensor(1.0))):
        with pytest.raises(
            ThunderNormError,
            match=r"no norm rule for .*ormqr, which made a Tensor\[8, 8\][\s\S]*test_plain_operations.py",
        ):
            run()


def test_a_function_written_in_python_meets_parameters_and_plain_inputs():
    """Its operations find their rules where no argument is normed: attention of a plain input, whose parameters move."""
    torch.manual_seed(seeded())
    m = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    report = norm_report(thunder.jit(m, transforms=[NormTransform()]), X)
    assert set(report.parameters) == {name for name, _ in m.named_parameters()}
    assert all(0 < r.sensitivity < float("inf") for r in report.parameters.values())
    assert all(r.actual <= r.norm_size * (1 + 1e-5) for r in report.rows)


class Scaled(nn.Module):
    """A weight over a number that buffers and it make, as spectral_norm has it; over the modulus of a parameter in the next layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("u", nn.functional.normalize(torch.randn(5), dim=0))
        self.register_buffer("v", nn.functional.normalize(torch.randn(6), dim=0))

    def forward(self, x):
        u, v = self.u.clone(), self.v.clone()
        sigma = torch.dot(u, torch.mv(self.first.weight, v))
        return F.linear(
            F.relu(F.linear(x, self.first.weight / sigma, self.first.bias)),
            self.last.weight / (self.last.bias.abs().sum() * u[0]),
        )


@pytest.mark.parametrize("spelling", ["by hand", "torch"])
def test_what_buffers_and_measured_parameters_make_is_measured(spelling):
    """It divides: no norm of a matrix keeps ``u^T W v`` away from 0, but it is a number here."""
    torch.manual_seed(seeded(0))
    module = Scaled() if spelling == "by hand" else nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)).eval()
    x = torch.randn(4, 6)
    found = normed(thunder.jit(module, transforms=[NormTransform()]))(RMSTensor.of(x))
    with torch.no_grad():
        expected = module(RMSTensor.of(x))  # what is made without x is made plainly there
    torch.testing.assert_close(found.backing, module(x))
    torch.testing.assert_close(found.norm_size, expected.norm_size)


def test_an_argument_beside_measured_parameters_has_its_norm():
    """It is an input, whatever the parameters are: the result has a norm."""
    module = nn.Linear(6, 3)
    found = normed(thunder.jit(module, transforms=[NormTransform()]))(torch.randn(4, 6))
    assert isinstance(found, RMSTensor)


def test_a_refusal_is_found_once(monkeypatch):
    """Each step of a chain asks for its source in several kinds: what is refused of that is asked for no more."""
    calls = []
    found = traced_lifting.derived_norm
    monkeypatch.setattr(traced_lifting, "derived_norm", lambda *args: (calls.append(args), found(*args))[1])

    def chain(x, w):
        for _ in range(6):
            w = (w / w.abs().sum()).clamp(-1, 1)
        return F.linear(x, w)

    with pytest.raises(ThunderNormError, match="div"):
        build_norm_map(Used(chain, 8, 8), torch.randn(2, 8), parameters="unit")(RMSTensor(1.0))
    assert 0 < len(calls) < 300
