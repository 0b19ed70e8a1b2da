"""Norm inference: the kind of each parameter, from the rules that consume it; what happens where they disagree."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.sizes import assert_same_size
from thunder_norm import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSConvTensor,
    RMSToRMSTensor,
    annotate,
    build_norm_map,
    norm_report,
    normed,
    normed_op,
    sensitivities,
    with_perturbation,
)
from thunder_norm.errors import NormMismatchError
from thunder_norm.norms.eager import chosen_norms, run_eagerly
from thunder_norm.norms.lifts.inference import NormSpec, disagree, reference_size
from thunder_norm.transforms import NormTransform
import thunder

ROWS, VOCABULARY, WIDTH = NormSpec(RMSTensor, (-1,)), 7, 6


class Tied(nn.Module):
    """GPT-2 in small: the table of token embeddings is the un-embedding too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


class Written(nn.Module):
    """The same with one name, and the table transposed by hand."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, ids):
        return F.embedding(ids, self.table) @ self.table.t()


class ShiftAndGain(nn.Module):
    """One vector that is added, which wants its RMS, and then multiplied by, which wants its largest entry."""

    def __init__(self, width):
        super().__init__()
        self.g = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return (x + self.g) * self.g


class Autoencoder(nn.Module):
    """One matrix in both directions."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 6))

    def forward(self, x):
        return F.linear(F.relu(F.linear(x, self.weight)), self.weight.t())


class SmoothTensor(NormedTensor):
    """A norm of which the library knows nothing."""

    @classmethod
    def measure(cls, t, elem_dims):
        return t.double().mean().abs()


class SmoothAndGain(nn.Module):
    """A parameter of which no norm that its uses want says anything about the other, nor does its largest entry about both."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return smoothed(x, self.weight), x * self.weight


@normed_op
def smoothed(x, weight):
    return x * weight.mean()


@smoothed.register_norm
def _smoothed(x: RMSTensor, weight: SmoothTensor) -> RMSTensor:
    return RMSTensor(
        x.norm_size * weight.norm_size, elem_dims=x.elem_dims, sensitivity={"x": weight.norm_size, "weight": x.norm_size}
    )


class KernelAndMatrix(nn.Module):
    """A kernel whose taps are also matrices: the norm of either says nothing about the other, that of its largest entry of both."""

    def __init__(self, use):
        super().__init__()
        self.weight, self.use = nn.Parameter(torch.randn(3, 3, 3, 3)), use

    def forward(self, x):
        return F.conv2d(x, self.weight), self.use(x, self.weight)


IDS = torch.tensor([[0, 1, 6], [2, 2, 5]])


def jit(model: nn.Module, **options) -> Callable:
    return thunder.jit(model, transforms=[NormTransform(**options)])


def inferred(model: nn.Module, *args, **options):
    return norm_report(jit(model, **options), *args).inferred


# -- which kind, and why --------------------------------------------------------------------------------------------------


def test_a_tied_embedding_is_known_by_its_rows_and_logits_by_their_largest_entry():
    model = Tied()
    found = inferred(model, IDS, parameters="unit")["embedding.weight"]
    assert (found.kind, found.elem_dims) == (RMSTensor, (-1,))
    assert [(u.op, u.module, u.wanted, u.rule, u.factor) for u in found.uses] == [
        ("embedding", "embedding", ROWS, "embedding", 1.0),
        ("linear", "head", NormSpec(RMSToRMSTensor, (-2, -1)), "linear_rows", 1.0),
    ]
    # by hand, logits by their largest entry.  Rows of RMS 1: both uses move them by d.  Operator norm r, that of Gaussian
    # entries: rows are at most r sqrt(V) / d, each use moves the logits' RMS by that, their largest entry by sqrt(V) more
    r = (math.sqrt(VOCABULARY) + math.sqrt(WIDTH)) * math.sqrt(WIDTH / VOCABULARY)
    rows, operator = found.candidates
    assert rows.cost == pytest.approx(2 * WIDTH) and rows.wanted == ROWS
    assert operator.cost == pytest.approx(r * 2 * (r * math.sqrt(VOCABULARY) / WIDTH) * math.sqrt(VOCABULARY))
    assert operator.wanted == NormSpec(RMSToRMSTensor, (-2, -1)) and operator.cost > rows.cost
    assert "its uses disagree; sum c_u S_u" in found.reason and "least for RMSTensor over dims (-1,) (12)" in found.reason
    y = run_eagerly(model, (IDS,), {}, policy="unit", mode="bound")[0]
    assert type(y) is LinfTensor and y.norm_size.item() == WIDTH


def test_the_bound_of_a_tied_embedding_is_attained_and_its_sensitivity_holds():
    torch.manual_seed(seeded(3))
    model = Tied().double()
    report = norm_report(jit(model, parameters={"head.weight": 2.0}), IDS)
    row = report.parameters["head.weight"]
    assert (row.kind, row.norm_size) == ("RMSTensor", 2.0)
    constant = {"head.weight": torch.full((VOCABULARY, WIDTH), 2.0, dtype=torch.float64)}
    with torch.no_grad():
        assert torch.func.functional_call(model, constant, (IDS,)).abs().max().item() == report.rows[-1].norm_size == 24
        worst = 0.0
        for i in range(200):  # weights and directions within their balls, towards the constant ones
            mix = i / 200
            w, d = (mix * torch.ones(VOCABULARY, WIDTH).double() + (1 - mix) * torch.randn(VOCABULARY, WIDTH) for _ in range(2))
            w *= 2 / RMSTensor.of(w).norm_size
            d *= 1e-5 / RMSTensor.of(d).norm_size
            before, after = (torch.func.functional_call(model, {"head.weight": v}, (IDS,)) for v in (w, w + d))
            worst = max(worst, ((after - before).abs().max() / 1e-5).item())
    assert 0.95 * row.sensitivity < worst <= row.sensitivity * (1 + 1e-4)


def test_the_first_use_does_not_decide_if_another_kind_moves_the_output_less():
    width, x = 256, RMSTensor.of(torch.randn(3, 256))
    model = ShiftAndGain(width)
    found = inferred(model, x, parameters="unit")["g"]
    assert [u.wanted for u in found.uses] == [ROWS, NormSpec(LinfTensor, ())] and found.norm == NormSpec(LinfTensor, ())
    assert [u.factor for u in found.uses] == [1.0, 1.0]
    # by hand: y = (x + g) g, all of RMS; from its largest entry m nothing is lost, its RMS alone costs sqrt(N) in the product
    m, n = math.sqrt(2 * math.log(2 * width)), math.sqrt(width)
    rms, largest = found.candidates
    assert largest.cost == pytest.approx(m * (1 + m + m) * n) and rms.cost == pytest.approx((n * (1 + 1) + n) * n)
    y = run_eagerly(model, (x,), {}, policy="unit", mode="bound")[0]
    assert y.norm_size.item() == pytest.approx(x.norm_size.item() + 1)


def test_uses_that_agree_need_no_choice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

        def forward(self, x):
            return F.linear(F.linear(x, self.weight, self.bias), self.weight) + self.bias

    found = inferred(Twice(), RMSTensor.of(torch.randn(2, 6)), parameters="unit")
    assert {name: (i.kind, i.elem_dims) for name, i in found.items()} == {
        "weight": (RMSToRMSTensor, (-2, -1)),
        "bias": (RMSTensor, (-1,)),
    }
    assert all(i.candidates == () and i.warning is None and len(i.uses) == 2 for i in found.values())
    assert found["weight"].explain() == (
        "weight: RMSToRMSTensor over dims (-2, -1), because rule linear takes weight of linear so, in the model, "
        "and so do all 2 uses"
    )


def test_norms_that_are_the_same_number_do_not_disagree():
    t = torch.empty(4, 1)
    assert disagree([NormSpec(RMSTensor, (-1,)), NormSpec(LinfTensor, ())], t) == []
    wants = [NormSpec(RMSTensor, (-1,)), NormSpec(LinfTensor, ()), NormSpec(RMSTensor, (-1,))]
    assert disagree(wants, torch.empty(4, 3)) == wants[:2]
    assert disagree([], t) == []


@pytest.mark.parametrize("mode", ["bound", "typical", "modula"])
def test_the_choice_is_made_in_every_mode(mode):
    y, environment = run_eagerly(Tied(), (IDS,), {}, policy="unit", mode=mode)
    z = normed(jit(Tied(), parameters="unit", mode=mode))(IDS)
    assert environment.infer()["embedding.weight"].norm == ROWS
    assert type(y) is type(z)
    assert_same_size(y.norm_size, z.norm_size)


@pytest.mark.parametrize(
    ("wanted", "shape"),
    [
        (NormSpec(RMSTensor, (-1,)), (3, 400)),
        (NormSpec(RMSTensor, (-2, -1)), (30, 40)),
        (NormSpec(L1Tensor, (-1,)), (2, 400)),
        (NormSpec(L2Tensor, (-1,)), (2, 400)),
        (NormSpec(LinfTensor, ()), (300, 40)),
        (NormSpec(RMSToRMSTensor, (-2, -1)), (300, 40)),
        (NormSpec(RMSToRMSTensor, (-1, -2)), (300, 40)),
        (NormSpec(RMSToRMSConvTensor, (-4, -3)), (60, 40, 3, 2)),
    ],
)
def test_reference_sizes_are_norms_of_gaussian_tensors(wanted, shape):
    generator = torch.Generator().manual_seed(seeded(0))
    draws = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(10))
    measured = [wanted.kind.of(t, wanted.elem_dims).norm_size.item() for t in draws]
    assert reference_size(wanted, shape) == pytest.approx(sum(measured) / len(measured), rel=0.2)
    assert reference_size(wanted, (0, *shape[1:])) == 1


# -- the same everywhere --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [Tied, Written, Autoencoder, lambda: ShiftAndGain(256)], ids=["tied", "by hand", "both", "gain"]
)
@pytest.mark.parametrize("policy", ["unit", "number", "measured"])
def test_eager_traced_and_norm_map_runs_choose_alike(model, policy):
    model = model()
    name, p = next(iter(model.named_parameters()))
    x = torch.randn(2, p.shape[-1])
    given, of_trace = (IDS, IDS) if p.shape == (VOCABULARY, WIDTH) else (RMSTensor.of(x), RMSTensor.of(x))
    parameters = {name: 1.5} if policy == "number" else policy
    with torch.no_grad():
        y, _ = run_eagerly(model, (given,), {}, policy=parameters, mode="bound")
        z = normed(jit(model, parameters=parameters))(of_trace)
        norm_map = build_norm_map(model, IDS if given is IDS else x, parameters=parameters)
        w = norm_map(given)
    for other in (z, w):
        assert type(other) is type(y) and other.elem_dims == y.elem_dims
        assert other.norm_size.item() == pytest.approx(y.norm_size.item(), rel=1e-12)
    report = norm_report(norm_map)
    assert report.rows[-1].norm_size == pytest.approx(y.norm_size.item(), rel=1e-6)


def test_a_leaf_of_the_inferred_norm_gives_the_reports_sensitivity():
    torch.manual_seed(seeded(4))
    for model in (Tied(), Written(), Autoencoder()):
        given = IDS if not isinstance(model, Autoencoder) else RMSTensor.of(torch.randn(2, 6))
        report = norm_report(jit(model, parameters="unit"), given)
        ((name, row),) = report.parameters.items()
        found = report.inferred[name]
        leaf = with_perturbation(found.kind(1.0, elem_dims=found.elem_dims))
        y = normed(jit(model, parameters={name: leaf}))(given)
        assert sensitivities(y, [leaf])[0].item() == pytest.approx(row.sensitivity, rel=1e-12)
        assert y.norm_size.item() == pytest.approx(report.rows[-1].norm_size, rel=1e-12)


def test_measured_parameters_are_measured_in_what_each_use_wants_and_move_as_one():
    """Measuring costs no conversion; a movement is known in one norm only."""
    torch.manual_seed(seeded(5))
    model = Tied().double()
    report = norm_report(jit(model), IDS)
    weight = model.head.weight.detach()
    rows, operator = RMSTensor.of(weight).norm_size, RMSToRMSTensor.of(weight).norm_size
    looked_up = RMSTensor.of(weight[IDS]).norm_size  # the largest row may be none of these
    assert looked_up * operator * (1 - 1e-12) <= report.rows[-1].norm_size <= rows * operator * (1 + 1e-12)
    row, found = report.parameters["embedding.weight"], report.inferred["embedding.weight"]
    assert (row.kind, row.norm_size) == ("RMSTensor", pytest.approx(rows.item())) and found.norm == ROWS
    assert [u.factor for u in found.uses] == [1.0, float(WIDTH)]
    assert (operator + WIDTH * looked_up) * (1 - 1e-6) <= row.sensitivity <= (operator + WIDTH * rows) * (1 + 1e-6)
    with torch.no_grad():
        for _ in range(50):
            d = torch.randn_like(weight)
            d *= 1e-5 / RMSTensor.of(d).norm_size
            moved = torch.func.functional_call(model, {"head.weight": weight + d}, (IDS,)) - model(IDS)
            assert RMSTensor.of(moved).norm_size <= 1e-5 * row.sensitivity * (1 + 1e-4)


def test_where_the_program_does_not_run_eagerly_the_first_use_decides(monkeypatch):
    monkeypatch.setattr("thunder_norm.norms.normed_mode.chosen_norms", lambda *args, **kwargs: {})
    y = normed(jit(Tied(), parameters="unit"))(IDS)
    # rows of RMS 1 as the operator that linear's rule wants: at most `in`
    assert type(y) is RMSTensor and y.norm_size.item() == WIDTH


def test_without_data_the_first_of_the_norms_that_fit_is_taken():
    class WithBuffer(Tied):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, ids):
            return self.head(self.embedding(ids) * self.scale)

    with torch.device("meta"):
        tied, model = Tied(), WithBuffer()
    assert chosen_norms(tied, (IDS.to("meta"),), {}, policy="unit", mode="bound") == {"embedding.weight": ROWS}
    _, environment = run_eagerly(model, (IDS.to("meta"),), {}, policy="unit", mode="bound")
    found = environment.infer()["embedding.weight"]
    assert found.norm == ROWS and [c.cost for c in found.candidates] == [None, None]
    assert found.reason == "its uses disagree; embedding comes first (without data their sensitivities are not known)"


def test_choosing_leaves_nothing_behind():
    class Noisy(Tied):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, ids):
            return self.head(F.dropout(self.norm(self.embedding(ids)), 0.5))

    model = Noisy()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.random.get_rng_state()
    assert chosen_norms(model, (IDS,), {}, policy="unit", mode="bound") == {"embedding.weight": ROWS}
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


# -- what was stated goes first, what cannot be is said -------------------------------------------------------------------


def test_an_annotation_decides_and_the_explanation_says_so():
    model = Tied()
    annotate(model.head, weight=RMSToRMSTensor)
    report = norm_report(jit(model, parameters="unit"), IDS, explain=True)
    found = report.inferred["embedding.weight"]
    assert found.norm == NormSpec(RMSToRMSTensor, (-2, -1)) and found.candidates == () and found.reason == "an annotation says so"
    assert report.rows[-1].kind == "RMSTensor"
    given = inferred(Tied(), IDS, parameters={"head.weight": RMSTensor(2.0)})["head.weight"]
    assert given.norm == ROWS and given.reason == "a norm of that kind was given for it"


@pytest.mark.parametrize(
    "use",
    [torch.matmul, lambda x, w: F.linear(x, w[0, 1]), lambda x, w: F.conv2d(x, w[:, :1], groups=3)],
    ids=["matmul", "linear", "groups"],
)
def test_where_the_norms_of_two_uses_do_not_convert_the_largest_entry_bounds_both(use):
    model, x = KernelAndMatrix(use), RMSTensor.of(torch.randn(3, 3, 3, 3), (1,))
    with torch.no_grad():
        largest = model.weight.abs().max().item()
        for result in jit(model, parameters={"weight": largest})(x), jit(model)(x):
            for y in result:
                assert type(y).of(y.backing, y.elem_dims).norm_size <= y.norm_size * (1 + 1e-6)


def test_a_parameter_of_which_no_norm_fits_all_uses_is_refused_with_what_each_wants():
    model, x = SmoothAndGain(), RMSTensor.of(torch.randn(2, 3))
    for call in (
        lambda: norm_report(jit(model), x),
        lambda: jit(model, parameters="unit")(x),
        lambda: run_eagerly(model, (x,), {}, policy="unit", mode="bound"),
        lambda: build_norm_map(model, torch.empty(2, 3), parameters="unit")(RMSTensor(1.0)),
    ):
        with pytest.raises(NormMismatchError) as e:
            call()
        message = str(e.value)
        assert "the uses of parameter 'weight' disagree about its norm" in message
        assert "smoothed(weight) wants SmoothTensor" in message and "mul(other) wants LinfTensor" in message
        assert "return smoothed(x, self.weight), x * self.weight" in message and "instead" in message


# -- the explanation ------------------------------------------------------------------------------------------------------


def test_the_explanation_says_which_rule_what_it_got_and_what_that_cost():
    model = Tied()
    report = norm_report(jit(model), IDS, explain=True)
    text = report.explain()
    for part in (
        "1 of 1 parameters have uses that disagree about their norm",
        "embedding.weight: RMSTensor over dims (-1,)\n  because its uses disagree",
        "warning: uses of embedding.weight want RMSTensor over dims (-1,) and RMSToRMSTensor over dims (-2, -1); "
        f"converted: linear (head) x{WIDTH}; thunder_norm.annotate decides otherwise",
        "used by embedding(weight) in embedding: rule embedding, wants RMSTensor over dims (-1,), factor 1",
        f"used by linear(weight) in head: rule linear, wants RMSToRMSTensor over dims (-2, -1), factor {WIDTH}",
        "return self.head(self.embedding(ids))",
        "2. linear in head: RMSTensor[-1]",
        "rule linear.linear: y = x W^T + b.",
        "value        |y| <= |x| |W| + |b|      (attained: rank-one W, b along W x)".replace("      (", " ("),
        "sensitivity  |W|, |x|, 1",
        "weight: embedding.weight, measured, taken as RMSToRMSTensor over dims (-2, -1), factor 1",
    ):
        assert part in text, part
    assert text in str(report) and str(report).startswith(report.table()[:20])
    plain = norm_report(jit(model), IDS)
    assert str(plain) == plain.table() and plain.explain() == text


def test_conversions_of_activations_are_in_the_explanation():
    report = norm_report(thunder.jit(F.silu, transforms=[NormTransform()]), L2Tensor.of(torch.randn(2, 4)))
    assert "input: L2Tensor over dims (-1,), taken as RMSTensor over dims (-1,), factor 0.5" in report.explain()


def test_lists_of_tensors_are_explained_one_by_one():
    def f(x):
        return torch.cat([x, 2 * x], 0)

    report = norm_report(thunder.jit(f, transforms=[NormTransform()]), RMSTensor.of(torch.randn(2, 4)))
    assert [a.name for a in report.rows[-1].arguments] == ["tensors[0]", "tensors[1]"]
