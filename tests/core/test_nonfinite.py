"""NaN is NaN, infinite is infinite: in every norm, after every rule, in every way a program is run."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.core.first_cases import first_cases
from tests.seeds import LONG, part, seeded
from thunder_norm import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    RMSTensor,
    RMSToRMSConvTensor,
    RMSToRMSTensor,
    build_norm_map,
    norm_mode,
    norm_report,
    norm_sensitivity,
    normed,
    normed_op,
    sensitivities,
    with_perturbation,
)
from thunder_norm.audit.balls import start
from thunder_norm.audit.rules import all_rules, identity
from thunder_norm.core.nonfinite import Followed
from thunder_norm.errors import NormMismatchError, ThunderNormError
from thunder_norm.transforms import NormTransform
import thunder

KINDS = [RMSTensor, LinfTensor, L1Tensor, L2Tensor, RMSToRMSTensor, RMSToRMSConvTensor, RMSToRMSConvTensor.grouped(2)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAN, INF = math.nan, math.inf


# -- measured norms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_measured_norm_of_nan_is_nan_and_of_infinity_infinite(kind, dtype):
    for entries, wanted in (((NAN, 1), NAN), ((INF, 1), INF), ((-INF, 1), INF), ((INF, NAN), NAN), ((NAN, 0), NAN)):
        t = torch.zeros(4, 4, dtype=dtype)
        t[1, 2], t[3, 3] = entries
        assert kind.of(t).norm_size.item() == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize("kind", [RMSTensor, L1Tensor, L2Tensor, LinfTensor], ids=lambda k: k.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_measured_norm_is_finite_and_not_zero_where_squares_overflow(kind, dtype):
    for scale in (2.0**100, 2.0**-100):  # exact in both, with squares beyond them
        t = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=dtype)
        assert kind.of(t * scale).norm_size.item() == pytest.approx(kind.of(t).norm_size.item() * scale, rel=1e-6)


@pytest.mark.parametrize("factor", [1e-300, 1e-200, 1e-155, 1e160, 1e300])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_measured_norm_in_double_precision_does_not_hang_on_squares(kind, factor):
    torch.manual_seed(seeded(0))
    t = torch.randn(4, 4, dtype=torch.float64)
    assert kind.of(t * factor).norm_size.item() == pytest.approx(kind.of(t).norm_size.item() * factor, rel=1e-12, abs=0)


@pytest.mark.parametrize("kind", [RMSTensor, L2Tensor], ids=lambda k: k.__name__)
def test_an_empty_row_in_double_precision_is_measured(kind):
    assert not kind.measure(torch.zeros(2, 0, dtype=torch.float64), (-1,)) > 0


@pytest.mark.parametrize("kind", KINDS[:5], ids=lambda k: k.__name__)
def test_measured_norm_has_finite_derivatives_at_zero(kind):
    t = torch.zeros(3, 4, requires_grad=True)
    (g,) = torch.autograd.grad(kind.of(t).norm_size, t)
    assert g.isfinite().all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_measured_norm_has_the_derivative_of_differences(kind):
    t = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: kind.of(t).norm_size, (t,))


def test_a_size_given_as_a_number_is_no_nan_and_one_computed_may_be():
    with pytest.raises(NormMismatchError, match="got nan"):
        RMSTensor(NAN)
    assert RMSTensor(torch.tensor(NAN)).norm_size.isnan()
    assert RMSTensor(INF).norm_size.item() == INF


# -- every rule -----------------------------------------------------------------------------------------------------------


@functools.cache
def _cases():
    """A case of each rule of the library (other tests register some of their own), with a point in each ball."""
    found = []
    for op, rule in all_rules():
        if not rule.fn.__module__.startswith("thunder_norm."):
            continue
        for case in first_cases(op, rule):
            generator = torch.Generator().manual_seed(seeded(0))
            points = [b.point(start(b, 0, generator) * b.norm_size, b.norm_size).contiguous() for b in case.balls]
            found.append((identity(op, rule)[:2], case, points))
    return found


def _norm(y):
    return type(y).of(y.backing, y.elem_dims).norm_size.item()


# Their results have nothing to do with the values of this argument, only with its shape and dtype.
_VALUES_DO_NOT_MATTER = {
    *(("view_as", 1), ("reshape_as", 1), ("expand_as", 1), ("to", 1), ("type_as", 1), ("fill", 0), ("zero", 0), ("copied", 0)),
    *((name, 0) for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")),
}


@pytest.mark.slow
def test_every_rule_hands_on_a_norm_that_is_nan():
    tried, lost = 0, []
    for (op, rule), case, points in _cases():
        for i in range(len(points)):
            inputs = [b.normed(p) for b, p in zip(case.balls, points, strict=True)]
            inputs[i].norm_size = torch.tensor(NAN, dtype=torch.float64)
            tried += 1
            is_nan = case.call(*inputs).norm_size.isnan().item()
            if is_nan == ((op, i) in _VALUES_DO_NOT_MATTER):
                lost.append((op, rule, i))
    assert tried > 450
    of_others = "multilabel_margin_loss_forward", "lu_unpack"  # a result is of the targets, or of pivots
    assert [x for x in lost if x[0] not in of_others] == []


@pytest.mark.slow
def test_no_claim_falls_where_the_square_of_a_norm_is_no_float():
    fallen = []
    for (op, rule), case, points in _cases():
        for i in range(len(points)):
            inputs = [b.normed(p) for b, p in zip(case.balls, points, strict=True)]
            sizes = []
            for factor in (1.0, 1e160):
                inputs[i].norm_size = case.balls[i].normed(points[i]).norm_size * factor
                sizes.append(case.call(*inputs).norm_size.item())
            if not sizes[1] >= sizes[0] * (1 - 1e-9):
                fallen.append((op, rule, i, sizes))
    assert fallen == []


_MOVED = (0.0, 1.0, INF)  # one of them with each series of sizes: all would take minutes
_EXTREME = (0.0, 5e-324, 1e-300, 1e-3, 1.0, 1e3, 1e300, INF)


def _sizes_of(points, i, extreme):
    """Sizes of the arguments: all of them, or the i-th beside others of 1, or a few beside others of 0 and infinity."""
    for rest in (1.0, 0.0, INF) if i is not None and len(points) > 1 else (1.0,):
        given = extreme if rest == 1 else (0.0, 1.0, INF)
        yield [tuple(size if i in (None, j) else rest for j in range(len(points))) for size in given]


@pytest.mark.slow
@pytest.mark.parametrize("mode, sensitivity", [("bound", "global"), ("typical", "global"), ("bound", "composed")])
def test_no_rule_makes_nan_of_sizes_or_falls(mode, sensitivity):
    """Whatever sizes norms and perturbations have: a number, infinity, or an error of ours; and a bound of more is no less."""
    wrong = []
    is_compared = mode == "bound" and sensitivity == "global"
    turn = itertools.cycle((0.0, INF) if is_compared else (0.0, 1.0, INF))
    extreme = _EXTREME if is_compared or LONG else [size for size in _EXTREME if size not in (1e-3, 1e3)]  # where nothing ends
    drawn = part(str(rule) for rule, *_ in _cases())
    for (op, rule), case, points in (case for case in _cases() if str(case[0]) in drawn):
        found_once = functools.cache(functools.partial(_found, case, points, mode, sensitivity))  # a fifth is asked for again
        for i in (*range(len(points)), *[None] * (len(points) > 1)):
            for sizes in _sizes_of(points, i, extreme):
                for moved in _MOVED if LONG else (next(turn), *[1.0] * is_compared):
                    before = (0.0, 0.0, 0.0)
                    for given in sizes:
                        if (found := found_once(given, moved)) is None:
                            continue
                        is_less = any(y < x * (1 - 1e-9) for x, y in zip(before, found, strict=True) if x < INF)
                        falls = is_compared and moved == 1 and is_less
                        if any(map(math.isnan, found)) or min(found) < 0 or falls:
                            wrong.append((op, rule, given, moved, found, before if falls else None))
                        before = found
    assert wrong == []


def _found(case, points, mode, sensitivity, sizes, moved):
    """Norm, perturbation and sensitivity to the first argument of a case; None where it is refused."""
    inputs = [b.normed(p) for b, p in zip(case.balls, points, strict=True)]
    for x, size in zip(inputs, sizes, strict=True):
        x.norm_size = torch.tensor(size, dtype=torch.float64)
    with norm_mode(mode), norm_sensitivity(sensitivity):
        try:
            leaves = [with_perturbation(x, moved) for x in inputs]
            y = case.call(*leaves)
        except ThunderNormError:
            return None
    movement = torch.zeros(()) if y.perturbation_size is None else y.perturbation_size
    return y.norm_size.item(), movement.item(), sensitivities(y, leaves[0]).item()


# Masks are minus infinity: softmax's bound is that of rows that are not masked everywhere, and do not overflow.
_SOFTMAX = {"softmax", "softmin", "_softmax", "_safe_softmax"}
_MASKS = {"scaled_dot_product_attention": 3}  # the argument that is one


@pytest.mark.slow
@pytest.mark.parametrize("value", [NAN, INF])
def test_no_rule_bounds_data_that_is_not_finite(value):
    wrong = []
    for (op, rule), case, points in _cases():
        for i in range(len(points)):
            data = [p.clone() for p in points]
            if data[i].numel() == 0 or (value == value and (op in _SOFTMAX or _MASKS.get(op) == i)):
                continue
            data[i].view(-1)[0] = value
            try:
                y = case.call(*(b.kind.of(t, b.elem_dims) for b, t in zip(case.balls, data, strict=True)))
            except RuntimeError as e:  # torch has no singular values, or eigenvalues, for it
                if not isinstance(e, torch.linalg.LinAlgError) and "infs or NaNs" not in str(e):
                    raise
                continue
            actual, claimed = _norm(y), y.norm_size.item()
            if math.isfinite(claimed) and not actual <= claimed * (1 + 1e-6) + 1e-12:
                wrong.append((op, rule, i, actual, claimed))
            elif math.isnan(value) and math.isnan(actual) and not math.isnan(claimed):
                wrong.append((op, rule, i, actual, claimed))
    assert wrong == []


@pytest.mark.parametrize("op", [torch.sigmoid, torch.tanh, torch.sign, torch.atan, F.hardtanh, F.relu6, lambda x: x.softmax(-1)])
def test_a_bound_that_infinite_entries_keep_is_finite(op):
    size = op(RMSTensor(INF, backing=torch.randn(2, 4))).norm_size.item()
    assert 0 < size < 10


@pytest.mark.parametrize("mode", ["bound", "typical"])
@pytest.mark.parametrize(
    "op",
    [
        lambda x: x / (x.abs().sum(-1, keepdim=True) + 1e-3),
        lambda x: x / x.abs().max().clamp(min=1e-3),
        lambda x: x / (x.abs().amax(-1, keepdim=True) + 1e-3),
        *(lambda x, p=p: F.normalize(x, p=p) for p in (1.0, 2.0, 3.0, INF)),
    ],
)
def test_infinite_over_infinite_has_no_bound(op, mode):
    for value, wanted in ((INF, INF), (NAN, NAN)):
        x = torch.ones(2, 4)
        x[0, 0] = value
        assert op(x).isnan().any()
        with norm_mode(mode):
            assert op(RMSTensor.of(x)).norm_size.item() == pytest.approx(wanted, nan_ok=True)


def test_attention_with_a_mask_of_minus_infinity_is_bounded():
    q = RMSTensor.of(torch.randn(2, 3, 4))
    for mask in (torch.tensor([0.0, -INF, 0.0]), LinfTensor.of(torch.tensor([[0.0, -INF, 0.0]]))):
        y = F.scaled_dot_product_attention(q, q, q, mask)
        assert y.norm_size.item() == pytest.approx(q.norm_size.item())
    y = F.scaled_dot_product_attention(RMSTensor(INF, backing=q.backing), q, q)
    assert not y.norm_size.isfinite()


@pytest.mark.parametrize("is_traced", [False, True])
def test_entries_that_a_mask_drops_do_not_count(is_traced):
    def median(x, mask):
        return torch.where(mask, x, torch.full((), NAN)).nanmedian(1).values

    f = thunder.jit(median, transforms=[NormTransform()]) if is_traced else median
    x, mask = torch.ones(2, 3), torch.tensor([[True, True, False], [False, True, False]])
    assert f(LinfTensor.of(x), mask).norm_size.item() == 1
    assert f(LinfTensor.of(x), mask & torch.tensor([[True], [False]])).norm_size.isnan()  # a row without entries
    assert f(LinfTensor.of(torch.where(mask, NAN, x)), mask).norm_size.isnan()


def test_an_addend_times_zero_is_not_read():
    x = RMSTensor.of(torch.full((2, 2), NAN))
    for op, a, b in ((torch.addr, torch.ones(2), torch.ones(2)), (torch.addmm, torch.eye(2), torch.eye(2))):
        y = op(x, a, b, beta=0)
        assert _norm(y) <= y.norm_size.item() * (1 + 1e-6)
        assert op(x, a, b).norm_size.isnan()


def test_the_logarithm_of_a_sum_of_infinite_entries_is_infinite():
    x = RMSTensor.of(torch.tensor([1.0, -INF]))
    assert torch.logaddexp(x, x).norm_size.item() == INF
    assert torch.logaddexp(x, RMSTensor.of(torch.tensor([1.0, NAN]))).norm_size.isnan()


def test_a_rule_of_the_users_that_forgets_its_input_is_nan_too():
    @normed_op
    def squash(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return x.cos() * by.cos()

    @squash.register_norm
    def _(x: RMSTensor, by: RMSTensor) -> RMSTensor:
        return LinfTensor(1.0, sensitivity={"x": 1.0, "by": 1.0})

    x, nan = RMSTensor.of(torch.randn(3)), RMSTensor.of(torch.tensor([1.0, NAN, 1.0]))
    assert squash(x, x).norm_size.item() == 1.0
    for args in ((x, nan), (nan, x), (nan, nan)):
        assert squash(*args).norm_size.isnan()
        assert thunder.jit(squash, transforms=[NormTransform()])(*args).norm_size.isnan()


def test_followed_knows_what_makes_a_formula_nan():
    a, b = torch.tensor(2.0), torch.tensor(3.0)
    formulas = {
        "product": (lambda: a * b, {a, b}),
        "chosen when NaN": (lambda: torch.where(a > 0, b, a), {a}),
        "lost when NaN": (lambda: torch.where(a > 0, a, torch.zeros_like(a)), set()),
        "both sides": (lambda: torch.where(a < b, a * b, b * a + 1), {a, b}),
        "constant": (lambda: torch.full_like(a, 1.0), set()),
        "to no power": (lambda: a.pow(0), set()),
        "to a power": (lambda: a.pow(2) + torch.ones_like(b), {a}),
        "clamped": (lambda: a.clamp(min=0, max=1), {a}),
        "replaced": (lambda: torch.nan_to_num(a), set()),
        "largest": (lambda: torch.maximum(a, b).sqrt(), {a, b}),
        "largest that is a number": (lambda: torch.fmax(a, b), set()),
    }
    for name, (formula, wanted) in formulas.items():
        with Followed((a, b)) as followed:
            result = formula()
        assert {n for n in (a, b) if followed.makes_nan(n, result)} == wanted, name
    for n in (a, b):  # and it is what torch does
        old, _ = n.clone(), n.fill_(NAN)
        for name, (formula, wanted) in formulas.items():
            assert n not in wanted or formula().isnan(), name
        n.copy_(old)


# -- programs -------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.conv, self.bn = nn.Conv1d(4, 4, 3, padding=1, groups=2), nn.BatchNorm1d(4)

    def forward(self, x, ids):
        h = self.norm(self.up(x).softmax(-1)) + self.table(ids)
        return self.bn(self.conv(h.clamp(-1, 1)).cos())


WHERE = ["x", *(name for name, t in Net().eval().state_dict().items() if t.is_floating_point())]


@pytest.fixture(scope="module")
def jitted():
    """The model in each way a trace is made, its tensors to be changed in place."""
    torch.manual_seed(seeded(0))
    model = Net().eval()
    options = {"trace": {}, "local": {"sensitivity": "local"}, "typical": {"mode": "typical"}}
    traced = {name: thunder.jit(model, transforms=[NormTransform(**kwargs)]) for name, kwargs in options.items()}
    x, ids = torch.randn(2, 4, 8), torch.randint(6, (2, 4))
    return model, x, ids, traced, build_norm_map(model, x, ids)


@pytest.mark.parametrize("where", WHERE)
def test_nan_anywhere_is_nan_in_every_mode(jitted, where):
    model, x, ids, traced, norm_map = jitted
    target = x if where == "x" else model.state_dict()[where]
    before = target.clone()
    with torch.no_grad():
        target.view(-1)[-1] = NAN
        target[(0,) * target.ndim] = NAN
    try:
        given = RMSTensor.of(x)
        found = {name: jm(given, ids).norm_size for name, jm in traced.items()}
        found |= {"eager": model(given, ids).norm_size, "norm map": norm_map(given, ids).norm_size}
        assert {name for name, n in found.items() if not n.isnan()} == set()
        leaf = with_perturbation(given)
        assert sensitivities(traced["trace"](leaf, ids), leaf).isnan()
        report = norm_report(traced["trace"], given, ids)
        assert report.first_nan is not None and report.first_infinite is None
        assert math.isnan(report.first_nan.norm_size)
        module = "up" if where == "x" else where.rpartition(".")[0]
        assert report.first_nan.module == module
        text = " ".join(report.table(width=200).split())
        assert f"first NaN: {report.first_nan.op} in {module}, test_nonfinite.py" in text or "modules" in text
        if where in dict(model.named_parameters()):
            assert f"NaN parameters: {where}" in text
        assert math.isnan(report.rows[-2].sensitivity)
    finally:
        target.copy_(before) if where == "x" else target.data.copy_(before)


def test_nothing_of_it_is_said_of_finite_norms(jitted):
    model, x, ids, traced, norm_map = jitted
    report = norm_report(traced["trace"], RMSTensor.of(x), ids)
    assert report.first_nan is None and report.first_infinite is None
    assert "first" not in report.table(width=200)


def test_report_says_where_data_overflowed_though_no_norm_did():
    class Overflow(nn.Module):
        def forward(self, x):
            return (x * 200).sigmoid() + (x * x)

    x = torch.full((4,), 300.0, dtype=torch.float16)
    report = norm_report(thunder.jit(Overflow(), transforms=[NormTransform()]), RMSTensor.of(x))
    assert report.first_infinite.op == "mul" and math.isfinite(report.first_infinite.norm_size)
    assert report.first_infinite is report.rows[2] and report.first_infinite.actual == INF


def test_infinite_parameter_is_infinite_and_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.fill_(0.5)  # what meets the infinite weight is not 0, and no NaN
        model[0].bias.fill_(0.5)
        model[2].weight[1, 1] = -INF
    jm = thunder.jit(model, transforms=[NormTransform()])
    x = RMSTensor.of(torch.ones(3, 4))
    assert jm(x).norm_size.item() == model(x).norm_size.item() == INF
    report = norm_report(jm, x)
    assert (report.first_infinite.op, report.first_infinite.module, report.first_nan) == ("linear", "2", None)
    assert "infinite parameters: 2.weight" in report.table()


def test_nan_is_nan_in_modulas_mode_and_without_inputs():
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[1, 1] = NAN
    ids = torch.tensor([1])
    with norm_mode("modula"):
        assert model[1](RMSTensor.of(torch.tensor([1.0, 2, 3, NAN]))).norm_size.isnan()
        assert model[1](RMSTensor.of(torch.ones(4))).norm_size.item() == 1
    assert normed(thunder.jit(model, transforms=[NormTransform()]))(ids).norm_size.isnan()


def test_poisoning_adds_nothing_to_traces_of_formulas_that_hand_nan_on():
    """Two or three scalar operations for what a formula forgets, none where it does not."""

    def scalars(f):
        jm = thunder.jit(f, transforms=[NormTransform()])
        jm(RMSTensor.of(torch.randn(3, 4)))
        (composite,) = [b for b in thunder.last_traces(jm)[0].bound_symbols if b.sym.name.startswith("RMSTensor")]
        return [b.sym.name for b in composite.subsymbols if b.flat_proxy_outs[0].ndim == 0]

    assert scalars(lambda x: x * 2) == ["mul"]
    assert scalars(lambda x: x.softmax(-1)) == ["eq", "full", "where"]
    assert [name for name in scalars(lambda x: x.cos()) if name in ("lt", "where")] == ["lt", "where"]


_OF_NOTHING = {
    "mean": lambda x: x.mean(-1),
    "mean of all": lambda x: x.mean(),
    "logsumexp": lambda x: x.logsumexp(-1),
    "nanmean": lambda x: x.nanmean(-1),
    "sum": lambda x: x.sum(-1),
    "product": lambda x: x.prod(-1),
    "mse_loss": lambda x: F.mse_loss(x, x * 0),
    "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", _OF_NOTHING)
@pytest.mark.parametrize("kind", [RMSTensor, LinfTensor, L2Tensor])
def test_what_is_computed_of_no_entries_has_the_norm_that_it_has(name, kind):
    """Torch's mean of nothing is no number, and its logsumexp minus infinity; formulas for means of something said 1."""
    f, t = _OF_NOTHING[name], torch.zeros(2, 0)
    y = f(t)
    for found in (f(kind(1.0, backing=t)), thunder.jit(f, transforms=[NormTransform()])(kind(1.0, backing=t))):
        wanted = type(found).of(y, found.elem_dims).norm_size
        torch.testing.assert_close(found.norm_size, wanted, equal_nan=True)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_statistics_that_no_rule_bounds_are_no_constants(is_jitted):
    def f(x):
        y, mean, rstd = torch.native_layer_norm(x, (4,), None, None, 1e-5)
        return y, y * rstd, mean

    x = RMSTensor(1.0, backing=torch.ones(2, 4), perturbation_size=0.1)
    y, product, mean = (thunder.jit(f, transforms=[NormTransform()]) if is_jitted else f)(x)
    assert y.norm_size <= 1 and all(z.norm_size == z.perturbation_size == math.inf for z in (product, mean))
