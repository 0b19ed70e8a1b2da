"""Norms and movements at the data at hand: of every operation of torch's database, and of programs, never below what happens."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D_
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from tests.seeds import named_seed, seeded
from thunder_norm import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    norm_report,
    norm_sensitivity,
    sensitivities,
    with_perturbation,
)
from thunder_norm.audit import norm
from thunder_norm.core import by_data
from thunder_norm.errors import MissingNormRuleError, NormMismatchError, ThunderNormError
from thunder_norm.rules.entrywise.polynomials import FAMILIES
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
STEP = 1e-6


def data(*shape, low=0.2):
    generator = torch.Generator().manual_seed(seeded(3))
    return torch.rand(*shape, dtype=D, generator=generator) + low


def measured(y: NormedTensor) -> float:
    return norm(type(y), y.backing.double(), y.elem_dims).item()


def jacobian_size(f, x: torch.Tensor, out_dims) -> float:
    """Largest length of ``J u`` in the RMS over `out_dims` for u of entries +-1, all of them: the norm from the largest entry."""
    jacobian = torch.autograd.functional.jacobian(f, x).flatten(-x.ndim)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=D)] * x.numel())
    moved = torch.einsum("...i,si->s...", jacobian, signs.reshape(-1, x.numel()))
    return moved.square().mean(out_dims).sqrt().amax().item() if out_dims else moved.abs().amax().item()


# -- functions that have no bound for all inputs, or no rule ------------------------------------------------------------------

UNBOUNDED = {
    "a / b": lambda x: x / x.flip(-1),
    "1 / x": lambda x: 1 / x,
    "a number for each row": lambda x: x / x.sum(-1, keepdim=True),
    "sqrt": torch.sqrt,
    "log": torch.log,
    "x^-1.5": lambda x: x**-1.5,
    "x^y": lambda x: x ** x.flip(-1),
    "standardized": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "logit": torch.logit,
    "lgamma": torch.lgamma,
}
WITHOUT_RULE = {
    "inverse": lambda x: torch.linalg.inv(x + torch.eye(3, dtype=D)),
    "determinant": torch.linalg.det,
    "singular values": torch.linalg.svdvals,
    "solve": lambda x: torch.linalg.solve(torch.eye(3, dtype=D) + x, x),
}


# An epsilon keeps a program from dividing by 0, and says nothing of the data, which is far from it.
GUARDED = {
    "1 / x": lambda x: 1 / x.clamp(min=1e-30),
    "reciprocal": lambda x: (x.square() + 1e-30).reciprocal(),
    "x^-4": lambda x: x.clamp(min=1e-30) ** -4,
    "x^0.5": lambda x: x.clamp(min=1e-30) ** 0.5,
    "x^y": lambda x: x.clamp(min=1e-30) ** x,
    "root of a sum": lambda x: (x.square() + 1e-30).sqrt(),
    "root of what has a sign": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: x.clamp(min=1e-30).rsqrt(),
    "log": lambda x: x.clamp(min=1e-30).log(),
    "log1p": lambda x: (-x * 0.5).clamp(min=-1 + 1e-12).log1p(),
    "xlogy": lambda x: torch.xlogy(x.clamp(min=1e-30), x.clamp(min=1e-30)),
    "a number times log": lambda x: torch.xlogy(-2.0, x.clamp(min=1e-30)),
    "a number to its power": lambda x: 2.0 ** (300 * x),
}


@pytest.mark.parametrize("name", GUARDED)
def test_at_the_data_a_range_is_no_bound_of_a_slope(name):
    f, t = GUARDED[name], data(2, 3)
    x = with_perturbation(LinfTensor.of(t))
    with norm_sensitivity("local"):
        y = f(x)
    exact = jacobian_size(f, t, y.elem_dims)
    assert exact * (1 - 1e-9) <= sensitivities(y, x).item() <= 12 * exact  # two operations, each with the worst of its entries
    assert y.norm_size.item() >= measured(y) * (1 - 1e-9)


def test_at_the_data_a_loss_of_cosines_has_no_slope_of_vectors_next_to_0():
    t, other, labels = data(3, 4), data(3, 4).flip(0), torch.tensor([1, -1, 1])

    def loss(x):
        return F.cosine_embedding_loss(x, other, labels)

    x = with_perturbation(LinfTensor.of(t))
    with norm_sensitivity("local"):
        found = sensitivities(loss(x), x).item()
    assert jacobian_size(loss, t, ()) <= found <= 2 / t.norm(dim=-1).min() * (1 + 1e-9)


def test_at_the_data_a_cosine_turns_as_its_shorter_vector_says():
    t, other = data(3, 4), data(3, 4).flip(0)
    x = with_perturbation(RMSTensor.of(t))
    with norm_sensitivity("local"):
        y = torch.cosine_similarity(x, other, dim=-1)
    slopes = torch.func.vmap(torch.func.grad(lambda a, b: torch.cosine_similarity(a, b, dim=-1)))(t, other)
    assert slopes.norm(dim=-1).max() * 2 <= sensitivities(y, x).item() <= 2 / t.norm(dim=-1).min() * (1 + 1e-9)


DRAWN = {
    "gamma": lambda x: D_.Gamma(x[..., 0], x[..., 1]).rsample(),
    "inverse gamma": lambda x: D_.InverseGamma(x[..., 0], x[..., 1]).rsample(),
    "beta": lambda x: D_.Beta(x[..., 0], x[..., 1]).rsample(),
    "Dirichlet": lambda x: D_.Dirichlet(x).rsample(),
    "Student's t": lambda x: D_.StudentT(x[..., 0], x[..., 1], x[..., 2]).rsample(),
    "Fisher-Snedecor": lambda x: D_.FisherSnedecor(x[..., 0], x[..., 1]).rsample(),
    "Weibull": lambda x: D_.Weibull(x[..., 0], x[..., 1]).rsample(),
    "Pareto": lambda x: D_.Pareto(x[..., 0], x[..., 1]).rsample(),
    "Kumaraswamy": lambda x: D_.Kumaraswamy(x[..., 0], x[..., 1]).rsample(),
}
COUNTS = torch.tensor([1.0, 3.0], dtype=D)
LIKELIHOODS = {
    "Weibull": lambda x: D_.Weibull(x[..., 0], x[..., 1]).log_prob(COUNTS),
    "Pareto": lambda x: D_.Pareto(x[..., 0] / 9, x[..., 1]).log_prob(COUNTS),
    "Kumaraswamy": lambda x: D_.Kumaraswamy(x[..., 0], x[..., 1]).log_prob(COUNTS / 4),
    "negative binomial": lambda x: D_.NegativeBinomial(x[..., 0], logits=x[..., 1]).log_prob(COUNTS),
    "inverse gamma": lambda x: D_.InverseGamma(x[..., 0], x[..., 1]).log_prob(COUNTS),
    "binomial": lambda x: D_.Binomial(4, logits=x[..., 0]).log_prob(COUNTS),
}


@pytest.mark.parametrize("name", [*DRAWN, *(f"likelihood: {name}" for name in LIKELIHOODS)])
def test_distributions_move_at_the_data_as_torch_differentiates_them(name):
    f = DRAWN[name] if name in DRAWN else LIKELIHOODS[name.removeprefix("likelihood: ")]
    t = data(2, 3, low=0.7)
    x = with_perturbation(LinfTensor.of(t))
    torch.manual_seed(seeded(0))
    with norm_sensitivity("local"):
        y = f(x)
    torch.manual_seed(seeded(0))  # the same draw
    exact = jacobian_size(f, t, y.elem_dims)
    # the derivatives of terms may cancel, which the bound does not know
    assert exact * (1 - 1e-6) <= sensitivities(y, x).item() <= 100 * (exact + 10)
    assert y.norm_size.item() >= measured(y) * (1 - 1e-9)


@pytest.mark.parametrize("name", [*UNBOUNDED, *WITHOUT_RULE])
def test_the_derivative_at_the_data_bounds_what_no_rule_does(name):
    f, t = {**UNBOUNDED, **WITHOUT_RULE}[name], data(3, 3) * 0.6
    x = with_perturbation(LinfTensor.of(t))
    with norm_sensitivity("local"):
        y = f(x)
    torch.testing.assert_close(y.backing, f(t), rtol=1e-12, atol=1e-12)
    assert measured(y) <= y.norm_size.item() * (1 + 1e-9)
    found, least = sensitivities(y, x).item(), jacobian_size(f, t, y.elem_dims)
    assert least * (1 - 1e-9) <= found <= least * 12  # a few operations, each with the worst of its entries
    elsewhere = with_perturbation(LinfTensor.of(t))
    if name in ("determinant", "singular values"):  # of all within a norm there is a bound too, larger ones
        assert least * (1 - 1e-9) <= sensitivities(f(elsewhere), elsewhere).item() < math.inf
        return
    if name == "standardized":  # by a deviation as small as the dtype allows
        assert sensitivities(f(elsewhere), elsewhere).item() > 1e100
        return
    with pytest.raises((NormMismatchError, MissingNormRuleError)):
        f(elsewhere)


@pytest.mark.parametrize("name", ["1 / x", "sqrt", "log", "x^-1.5", "logit"])
def test_of_a_function_of_each_entry_it_is_the_steepest_slope(name):
    f, t = UNBOUNDED[name], data(3, 4) * 0.7
    (slope,) = torch.autograd.grad(f(leaf := t.clone().requires_grad_()).sum(), leaf)
    for kind, dims in ((LinfTensor, ()), (RMSTensor, (-1,)), (RMSTensor, (-2, -1)), (RMSTensor, (-2,))):
        x = with_perturbation(kind.of(t, dims))
        with norm_sensitivity("local"):
            y = f(x)
        assert (type(y), y.elem_dims) == (kind, dims)
        assert y.norm_size.item() == pytest.approx(measured(y), rel=1e-12)
        assert sensitivities(y, x).item() == pytest.approx(slope.abs().max().item(), rel=1e-12)


@pytest.mark.parametrize("kind", [LinfTensor, RMSTensor, L2Tensor, L1Tensor])
def test_of_a_linear_map_without_a_rule_it_is_the_operator_norm(kind):
    matrix = torch.randn(3, 5, dtype=D, generator=torch.Generator().manual_seed(seeded(1)))
    t = data(5)
    x = with_perturbation(kind.of(t))

    linear = torch.library.custom_op(f"thunder_norm_tests::linear_{kind.__name__.lower()}", mutates_args=())(_times(matrix))
    linear.register_autograd(lambda ctx, g: g @ matrix)
    with norm_sensitivity("local"):
        y = linear(x)
    spectral = torch.linalg.matrix_norm(matrix, 2).item()
    expected = {
        RMSTensor: spectral * math.sqrt(5 / 3),
        L2Tensor: spectral / math.sqrt(3),
        L1Tensor: spectral / math.sqrt(3),
    }.get(kind)
    if expected is None:
        expected = jacobian_size(lambda t: matrix @ t, t, ())
    assert sensitivities(y, x).item() == pytest.approx(expected, rel=1e-9)


def _times(matrix):
    def linear(x: torch.Tensor) -> torch.Tensor:
        return matrix @ x

    return linear


def test_what_jumps_what_is_drawn_and_what_is_too_large_is_refused():
    x = with_perturbation(RMSTensor.of(data(3, 4)))
    large = with_perturbation(RMSTensor.of(data(64, 64)))
    assert large.numel() ** 2 > by_data.LARGEST
    with norm_sensitivity("local"):
        for f in (lambda: torch.fmod(x, 0.3), lambda: torch.div(x, 0.3, rounding_mode="floor"), lambda: torch.linalg.inv(large)):
            with pytest.raises(ThunderNormError):
                f()
        drawn = x * torch.randn_like(x)
        assert measured(drawn) <= drawn.norm_size.item() * (1 + 1e-9)


STEPS = (
    (torch.sign, 0.0), (torch.sgn, 0.0), (torch.angle, 0.0), (torch.trunc, 1.0), (torch.floor, 1.0), (torch.ceil, 1.0), (torch.frac, 1.0),
    (lambda t: torch.fake_quantize_per_tensor_affine(t, 0.5, 1, -40, 30), 0.25), (lambda t: torch.fake_quantize_per_channel_affine(
        t, torch.tensor([0.5, 0.1, 0.3, 0.7]), torch.zeros(4, dtype=torch.int32), 1, -40, 30), 0.25),
    (torch.round, 0.5), (lambda t: torch.round(t, decimals=2), 0.125), (lambda t: F.hardshrink(t, 0.1), -0.1), (lambda t: F.threshold(t, 0.3, 2.0), 0.3),
)  # fmt: skip


@pytest.mark.parametrize(("f", "jump"), STEPS, ids=[getattr(f, "__name__", "") for f, _ in STEPS])
@pytest.mark.parametrize("is_traced", (False, True))
def test_steps_move_as_between_their_jumps_and_without_a_bound_at_one(f, jump, is_traced):
    t = data(3, 4)
    x = with_perturbation(RMSTensor.of(t))
    at_jump = with_perturbation(RMSTensor.of(torch.cat((t[:2], torch.tensor([[jump, 0.1, 0.2, 0.4]], dtype=D)))))
    call = thunder.jit(f, transforms=[NormTransform(sensitivity="local")]) if is_traced else f
    with norm_sensitivity("local"):
        assert sensitivities(call(x), x).item() == pytest.approx(jacobian_size(f, t, (-1,)), abs=1e-9)
        assert sensitivities(call(at_jump), at_jump).item() == math.inf


def test_integers_are_taken_to_turn_out_the_same():
    """An int8 code times its scale moves with the scale; a row that an integer names moves with the table alone."""
    t, table = data(3, 4), data(9, 2)
    f = lambda x: (x * 9).round().to(torch.int8).to(D) * x.abs().amax(-1, keepdim=True)  # noqa: E731
    x = with_perturbation(RMSTensor.of(t))
    with pytest.raises(NormMismatchError):
        f(x)
    with norm_sensitivity("local"):
        y, rows = f(x), table[(x.sigmoid() * 8).long()]
        assert sensitivities(y, x).item() >= jacobian_size(f, t, (-1,)) > 1
        assert measured(y) <= y.norm_size.item() * (1 + 1e-9)
    assert type(rows) is torch.Tensor


# -- every operation of torch's database ----------------------------------------------------------------------------------------

OPS = [op for op in op_db if op.supports_dtype(D, "cpu") and not op.name.startswith(("sparse", "jiterator"))]
RANDOM = (
    "rand",
    "dropout",
    "empty",
    "bernoulli",
    "rrelu",
    "normal",
    "multinomial",
    "cauchy",
    "exponential",
    "geometric",
    "uniform",
)


def moved(f, tree, direction):
    return f(tree_map(lambda v: v + STEP * direction[id(v)] if id(v) in direction else v, tree))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.name}.{op.variant_test_name}".strip("."))
def test_no_operation_has_or_moves_more_than_is_claimed(op):
    for sample in [s for s, _ in zip(op.sample_inputs("cpu", D), range(2), strict=False)]:
        given = {id(t): t for t in tree_leaves(sample.input) if isinstance(t, torch.Tensor) and t.dtype == D and t.numel()}
        if not given or any(name in op.name for name in RANDOM):
            continue
        normed = {i: with_perturbation(RMSTensor.of(t, (-1,) if t.ndim else ())) for i, t in given.items()}

        def f(tree, sample=sample):
            return op.op(tree, *sample.args, **sample.kwargs)

        try:
            with norm_sensitivity("local"):
                out = f(tree_map(lambda v, normed=normed: normed.get(id(v), v), sample.input))
        except ThunderNormError:
            continue
        check_movement(f, sample.input, given, normed, [y for y in tree_leaves(out) if isinstance(y, NormedTensor)])


@pytest.mark.parametrize("x", [-3.7, -0.4, 0.3, 1.7])
def test_what_torch_has_no_derivative_of_moves_all_the_same(x):
    degree = torch.tensor(3.0, dtype=D)
    functions = [
        *(functools.partial(f, n=n) for f in FAMILIES for n in (3, degree)),
        torch.special.airy_ai,
        torch.special.spherical_bessel_j0,
    ]
    for f in functions:
        at = torch.tensor(x, dtype=D)
        try:
            with norm_sensitivity("local"):
                moving = with_perturbation(RMSTensor.of(at))
                allowed = sensitivities(f(moving), moving).item()
        except ThunderNormError:  # of a degree that is a tensor
            continue
        slope = ((f(at + STEP) - f(at - STEP)) / (2 * STEP)).abs().item()
        assert slope <= allowed * (1 + 1e-3) + 1e-3


def test_what_counts_entries_does_not_move():
    with norm_sensitivity("local"):
        x = with_perturbation(RMSTensor.of(torch.tensor([0.1, 0.3, 0.6, 0.8], dtype=D)))
        assert sensitivities(torch.histc(x, 2, 0.0, 1.0), x).item() == 0


def check_movement(f, tree, given, normed, results):
    generator = torch.Generator().manual_seed(named_seed("movement"))
    plain = [t for t in tree_leaves(f(tree)) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if len(plain) != len(results):
        return
    for y, at in zip(results, plain, strict=True):
        if at.numel() and at.isfinite().all() and y.norm_size.isfinite():
            assert norm(type(y), at.double(), y.elem_dims).item() <= y.norm_size.item() * (1 + 1e-6) + 1e-12
    for _ in range(3):
        direction = {i: torch.randn(t.shape, dtype=D, generator=generator) for i, t in given.items()}
        direction = {i: u / norm(RMSTensor, u, normed[i].elem_dims).clamp(min=1e-9) for i, u in direction.items()}
        there, back = (
            [t for t in tree_leaves(moved(f, tree, {i: s * u for i, u in direction.items()})) if isinstance(t, torch.Tensor)]
            for s in (1, -1)
        )
        there, back = ([t for t in ts if t.is_floating_point()] for ts in (there, back))
        for y, at, a, b in zip(results, plain, there, back, strict=True):
            forward, backward = (a - at) / STEP, (at - b) / STEP
            smooth = (forward - backward).abs() <= 1e-3 * (1 + forward.abs())  # no kink is met
            if not at.numel() or not smooth.all() or y.perturbation_size is None or not y.norm_size.isfinite():
                continue  # logdet has a NaN in a branch that is not taken
            allowed = sum(sensitivities(y, x).item() for x in normed.values())
            assert norm(type(y), forward.double(), y.elem_dims).item() <= allowed * (1 + 2e-3) + 1e-3


# -- programs -----------------------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Convolutions, of which each gives up some of its bound."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = F.silu(layer(x))
        return x


PROGRAMS = {
    "convolutions": (lambda: Deep(3), (2, 4, 5, 5)),
    "a perceptron": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6)), (3, 6)),
    "a transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_bounded_at_the_data_alike_in_both_modes(name):
    build, shape = PROGRAMS[name]
    torch.manual_seed(seeded(0))
    model, t = build().double(), data(*shape)
    dims = (1,) if len(shape) == 4 else (-1,)
    x = with_perturbation(RMSTensor.of(t, dims))
    with norm_sensitivity("local"):
        eager = model(x)
    traced = thunder.jit(model, transforms=[NormTransform(sensitivity="local")])(x)
    everywhere = model(x)
    for y in (eager, traced):
        assert measured(y) <= y.norm_size.item() * (1 + 1e-9)
        assert y.norm_size <= everywhere.norm_size * (1 + 1e-9) and y.perturbation_size <= everywhere.perturbation_size * (
            1 + 1e-9
        )
    assert traced.norm_size.item() == pytest.approx(eager.norm_size.item(), rel=1e-6)
    assert sensitivities(traced, x).item() == pytest.approx(sensitivities(eager, x).item(), rel=1e-6)
    u = torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seeded(2)))
    u = u / norm(RMSTensor, u, dims)
    moved = (model(t + STEP * u) - model(t)) / STEP
    assert norm(RMSTensor, moved, eager.elem_dims).item() <= sensitivities(eager, x).item()


def test_what_one_operation_gives_up_is_not_multiplied_by_the_next():
    torch.manual_seed(seeded(0))
    model, x = Deep(12).double(), RMSTensor.of(data(2, 4, 5, 5), (1,))
    with norm_sensitivity("local"):
        local = model(x)
    actual = measured(local)
    assert actual <= local.norm_size.item() * (1 + 1e-9) <= actual * 30
    assert model(x).norm_size.item() > 1000 * local.norm_size.item()


@pytest.mark.parametrize("run", [lambda f: f, lambda f: thunder.jit(f, transforms=[NormTransform(sensitivity="local")])])
def test_the_norm_moves_as_if_the_data_grew_with_it(run):
    n = torch.tensor(5.0, dtype=D, requires_grad=True)
    x = RMSTensor(n, backing=data(3, 4))  # of a norm below 5
    with norm_sensitivity("local"):
        y = run(lambda x: 3 * torch.relu(x))(x)
    assert y.norm_size.item() == pytest.approx(3 * RMSTensor.of(x.backing).norm_size.item())
    (slope,) = torch.autograd.grad(y.norm_size, n)
    assert slope.item() == pytest.approx(y.norm_size.item() / 5)


def test_what_was_changed_in_place_is_measured_anew():
    with norm_sensitivity("local"):
        y = 2 * RMSTensor.of(data(3, 4))
        before = (y + 0).norm_size.item()
        y.mul_(0.5)
        assert (y + 0).norm_size.item() == pytest.approx(before / 2)
        y.zero_()
        assert (y + 0).norm_size.item() == 0


@pytest.mark.parametrize("size", [0.0, math.inf, math.nan])
def test_norms_that_are_no_positive_number(size):
    x = RMSTensor(torch.tensor(size, dtype=D, requires_grad=True), backing=torch.zeros(2, 3) if size == 0 else torch.ones(2, 3))
    with norm_sensitivity("local"):
        y = x * 2
    assert y.norm_size.item() == pytest.approx({0.0: 0.0, math.inf: 2.0}.get(size, math.nan), nan_ok=True)
    if size == 0:
        (slope,) = torch.autograd.grad(y.norm_size, x.norm_size)
        assert slope.item() == 2


# -- the report ---------------------------------------------------------------------------------------------------------------------


def test_a_report_is_local_where_there_is_data():
    model, t = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(3, 4)

    def scope(x=t, sensitivity=None, **options):
        jm = thunder.jit(model, transforms=[NormTransform(**options)])
        return norm_report(jm, RMSTensor.of(x) if not x.is_meta else RMSTensor(1.0, backing=x), sensitivity=sensitivity).scope

    assert scope() == scope(sensitivity="local") == "local"
    assert scope(sensitivity="global") == scope(parameters="unit") == scope(mode="typical") == "global"
    assert scope(parameters="unit", sensitivity="local") == "local"
    with pytest.raises(NormMismatchError, match="global"):
        scope(sensitivity="here")


def test_a_report_says_of_each_operation_what_it_gives_up():
    torch.manual_seed(seeded(0))
    jm = thunder.jit(Deep(12), transforms=[NormTransform()])
    x = RMSTensor.of(data(2, 4, 5, 5).float(), (1,))
    local, everywhere = norm_report(jm, x), norm_report(jm, x, sensitivity="global")
    assert all(0.02 < row.tightness <= 1 + 1e-5 for row in local)
    assert everywhere.rows[-1].tightness < 1e-4
