"""Losses of all sorts in every reduction: bounds against adversarial inputs, torch's names and numbers for reductions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor
from thunder_norm.audit import Ball, Case, start
from thunder_norm.errors import NormMismatchError

R, INF = RMSTensor, LinfTensor
D = torch.float64
REDUCTIONS = ("mean", "sum", "none")


def x(*shape, n=1.5, dims=None, kind=R):
    return Ball("x", kind, shape, n, dims)


def y(*shape, n=0.6, dims=None, kind=R):
    return Ball("y", kind, shape, n, dims)


def z(*shape, n=0.4, dims=None, kind=R):
    return Ball("z", kind, shape, n, dims)


signs = torch.tensor([[1.0, -1.0, -1.0, 1.0], [-1.0, 1.0, 1.0, -1.0]], dtype=D)
one_sided = -torch.ones(2, 4, dtype=D)
scales = torch.tensor([[0.5, -2.0, 1.0, 0.2]], dtype=D).expand(2, 4)
bits = (signs + 1) / 2
labels = torch.tensor([1, 0])
pairs = torch.tensor([[2, 0, -1, -1], [1, 3, -1, -1]])  # two of four classes
of_pairs = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]], dtype=D)
class_weights = torch.tensor([0.5, 2.0, 2.0, 1.0], dtype=D)
weights = torch.tensor([[0.5, 2.0, 1.0, 1.0], [1.0, 1.0, 3.0, 0.1]], dtype=D)
counts = torch.tensor([[0.0, 3.0, 1.0, 0.0], [0.0, 0.0, 3.0, 2.0]], dtype=D)
shifted_counts = counts - 1
variances = torch.tensor([[2.0, 2.0, 2.0, 2.0]], dtype=D).expand(2, 4)
wrong = {"witnesses": [[-1.5 * signs]]}
right = {"witnesses": [[1.5 * signs]]}
wrong_scaled = {"witnesses": [[-1.5 * scales.sign()]]}
miscounted = {"witnesses": [[torch.where(counts < 1.5, 1.5, -1.5)]]}
apart = {"witnesses": [[1.5 * torch.ones(2, 4, dtype=D), -0.6 * torch.ones(2, 4, dtype=D)], [-1.5 * signs, 0.6 * signs]]}
ones = torch.ones(2, 4, dtype=D)
TRIPLET = {"witnesses": [[-ones[0], ones[0], -ones[0]]]}
onto_labels = torch.full((2, 4), -1.0, dtype=D).scatter(1, labels[:, None], 1.0)
MARGIN = {"witnesses": [[-onto_labels], [-1.5 * onto_labels], [-onto_labels - 0.5 * onto_labels.clamp(min=0) * 4]]}
MULTILABEL = {"witnesses": [[1 - 2 * of_pairs]]}
aligned = torch.tensor([[1, 1, 1], [2, 1, 2]])


def reduced(loss):
    """The loss in every reduction; not reduced, it is given the largest entry of x."""
    return [lambda *a, reduction=r: loss(*a, reduction=reduction) for r in REDUCTIONS]


def every_reduction(name, loss, *balls, tight=0.99, options=None):
    """`tight` for a mean, a sum and no reduction, or for all of them."""
    each = tight if isinstance(tight, tuple) else (tight,) * 3
    return [Case(f"{name}, {r}", f, balls, t, options or {}) for r, f, t in zip(REDUCTIONS, reduced(loss), each, strict=True)]


LARGEST = x(2, 4, kind=INF)
# in the reductions of torch; RMS and the largest entry
CASES = [
    *every_reduction("mse_loss", F.mse_loss, x(2, 4), y(2, 4), tight=0.98, options=apart),
    *every_reduction("l1_loss", F.l1_loss, x(2, 4), y(2, 4), options=apart),
    *every_reduction("smooth_l1_loss", F.smooth_l1_loss, x(2, 4), y(2, 4), options=apart),
    *every_reduction("huber_loss", F.huber_loss, x(2, 4), y(2, 4), options=apart),
    *every_reduction("soft_margin_loss", lambda a, **o: F.soft_margin_loss(a, signs, **o), x(2, 4), options=wrong),
    # the largest factor counts for all entries
    *every_reduction("soft_margin_loss, scaled", lambda a, **o: F.soft_margin_loss(a, scales, **o), LARGEST, tight=(0.4, 0.4, 0.99), options=wrong_scaled),
    *every_reduction("multilabel_soft_margin", lambda a, **o: F.multilabel_soft_margin_loss(a, bits, **o), x(2, 4), options=wrong),
    *every_reduction("multilabel_soft_margin, entries", lambda a, **o: F.multilabel_soft_margin_loss(a, bits, **o), LARGEST, options=wrong),
    # the largest of the weights counts for all of them
    *every_reduction(
        "multilabel_soft_margin, weights", lambda a, **o: F.multilabel_soft_margin_loss(a, bits, class_weights, **o), LARGEST, tight=(0.55, 0.55, 0.65), options=wrong
    ),
    *every_reduction("bce with logits", lambda a, **o: F.binary_cross_entropy_with_logits(a, bits, **o), x(2, 4), options=wrong),
    *every_reduction(
        "bce with logits, positive weights",
        lambda a, **o: F.binary_cross_entropy_with_logits(a, torch.ones(2, 4, dtype=D), pos_weight=2 * torch.ones(4, dtype=D), **o),
        x(2, 4),
    ),
    *every_reduction("multi_margin", lambda a, **o: F.multi_margin_loss(a, labels, **o), x(2, 4), options=MARGIN),
    *every_reduction("multi_margin, entries", lambda a, **o: F.multi_margin_loss(a, labels, **o), LARGEST, options=MARGIN),
    *every_reduction("multi_margin squared", lambda a, **o: F.multi_margin_loss(a, labels, p=2, **o), x(2, 4), tight=0.95, options=MARGIN),
    *every_reduction(
        "multi_margin squared, entries", lambda a, **o: F.multi_margin_loss(a, labels, 2, 0.3, **o), LARGEST, options=MARGIN
    ),
    *every_reduction(
        "multi_margin, weights",
        lambda a, **o: F.multi_margin_loss(a, torch.tensor([1, 2]), weight=class_weights, **o),
        LARGEST,
        options={"witnesses": [[-1.5 * torch.full((2, 4), -1.0).scatter(1, torch.tensor([[1], [2]]), 1.0)]]},
    ),
    # two of four classes make 4 pairs, one of them twice 6
    *every_reduction("multilabel_margin", lambda a, **o: F.multilabel_margin_loss(a, pairs, **o), x(2, 4), tight=0.57, options=MULTILABEL),
    *[
        case
        for name, ball in (("multilabel_margin, one label", x(2, 4)), ("multilabel_margin, entries", LARGEST))
        for case in every_reduction(
            name, lambda a, **o: F.multilabel_margin_loss(a, torch.tensor([[1, -1, -1, -1], [0, -1, -1, -1]]), **o), ball, options=MARGIN
        )
    ],
    *every_reduction(
        "multilabel_margin, one label twice",
        lambda a, **o: F.multilabel_margin_loss(a, torch.tensor([[1, 1, -1, -1], [0, 0, -1, -1]]), **o),
        LARGEST,
        options=MARGIN,
    ),
    *every_reduction("bce with logits, no probabilities", lambda a, **o: F.binary_cross_entropy_with_logits(a, signs, **o), x(2, 4), tight=0.5, options=wrong),
    *every_reduction("hinge_embedding", lambda a, **o: F.hinge_embedding_loss(a, one_sided, **o), x(2, 4)),
    *every_reduction(
        "hinge_embedding, both labels", lambda a, **o: F.hinge_embedding_loss(a, signs, margin=-0.5, **o), x(2, 4), tight=(0.7, 0.7, 0.99), options=right
    ),
    *every_reduction("margin_ranking", lambda a, b, **o: F.margin_ranking_loss(a, b, signs, 0.3, **o), x(2, 4), y(2, 4), tight=0.9, options=apart),
    *every_reduction(
        "margin_ranking, negative margin",
        lambda a, b, **o: F.margin_ranking_loss(a, b, signs, -0.3, **o),
        x(2, 4), y(2, 4), tight=(0.83, 0.83, 0.9), options=apart,
    ),
    *every_reduction("poisson_nll", lambda a, **o: F.poisson_nll_loss(a, torch.zeros(2, 4, dtype=D), **o), LARGEST),
    # a mean counts every entry for the worst of them: where the count is 0, and where it is 3, x = n and x = -n are
    *every_reduction("poisson_nll, counts", lambda a, **o: F.poisson_nll_loss(a, counts, **o), LARGEST, tight=(0.7, 0.7, 0.99), options=miscounted),
    *every_reduction("poisson_nll, full", lambda a, **o: F.poisson_nll_loss(a, counts, full=True, **o), LARGEST, tight=(0.7, 0.7, 0.99), options=miscounted),
    *every_reduction("poisson_nll, not counts", lambda a, **o: F.poisson_nll_loss(a, shifted_counts, **o), LARGEST, tight=(0.7, 0.7, 0.99), options=miscounted),
    *every_reduction(
        "gaussian_nll", lambda a, b, **o: F.gaussian_nll_loss(a, b, variances, full=True, **o), x(2, 4), y(2, 4), tight=0.96, options=apart
    ),
    *every_reduction("gaussian_nll with a number", lambda a, b, **o: F.gaussian_nll_loss(a, b, 1.5, **o), x(2, 4), y(2, 4), tight=0.96, options=apart),
    # the smallest variance and the largest logarithm count for all entries
    *every_reduction("gaussian_nll, unequal", lambda a, b, **o: F.gaussian_nll_loss(a, b, weights, **o), x(2, 4), y(2, 4), tight=(0.5, 0.5, 0.95)),
]  # fmt: skip
CASES += [
    *[
        Case(f"cosine_embedding, {r}", f, (x(2, 4), y(2, 4)), 0.99, {"witnesses": [[ones, -ones]], "sensitivity": False})
        for r, f in zip(REDUCTIONS, reduced(lambda a, b, **o: F.cosine_embedding_loss(a, b, torch.tensor([1, 1]), **o)), strict=True)
    ],
    Case("cosine_embedding, next to 0", lambda a, b: F.cosine_embedding_loss(a, b, torch.tensor([1]), reduction="none"), (x(1, 4, n=1e-9), y(1, 4, n=1.0)), 0.99, {"only": ["x"]}),
    Case(
        "cosine_embedding, apart",
        lambda a, b: F.cosine_embedding_loss(a, b, torch.tensor(-1), -1.5),
        (x(4), y(4)),
        0.99,
        {"witnesses": [[ones[0], ones[0]]], "sensitivity": False},
    ),
    *every_reduction(
        "ctc, many alignments",
        lambda a, **o: F.ctc_loss(a, torch.ones(2, 1, dtype=torch.long), (3, 3), (1, 1), **o),
        x(3, 2, 3, kind=INF),
        tight=0.8,
    ),
    *every_reduction(
        "ctc, one alignment",
        lambda a, **o: F.ctc_loss(a, torch.tensor([[1, 2, 1]]), (3,), (3,), **o),
        x(3, 1, 3, n=50.0, kind=INF),
        tight=0.97,
    ),
    Case("nll_loss_nd", lambda a: torch.ops.aten.nll_loss_nd(a, labels), (x(2, 4, kind=INF),)),
    Case("nll_loss2d", lambda a: torch.ops.aten.nll_loss2d(a, labels[:, None, None], None, 2), (x(2, 4, 1, 1, kind=INF),)),
    Case("cross_entropy_loss", lambda a: torch.ops.aten.cross_entropy_loss(a, labels), (x(2, 4, kind=INF),), 0.97, MARGIN),
    Case("ctc, rows", lambda a: F.ctc_loss(a, torch.tensor([[1]]), (3,), (1,)), (x(3, 1, 3),), 0.6),
    *every_reduction(
        "triplet_margin", F.triplet_margin_loss, x(2, 4), y(2, 4), z(2, 4), tight=0.97, options={"witnesses": [[-ones, ones, -ones]]}
    ),
    *[
        Case(f"triplet_margin, p={p}", lambda a, b, c, p=p: F.triplet_margin_loss(a, b, c, p=p), (x(4), y(4), z(4)), 0.98, TRIPLET)
        for p in (1.0, 3.0, math.inf)
    ],
    Case("triplet_margin, entries", lambda a, b, c: F.triplet_margin_loss(a, b, c), (x(4, kind=INF), y(4, kind=INF), z(4, kind=INF)), 0.9, TRIPLET),
    Case("triplet_margin, swap", lambda a, b, c: F.triplet_margin_loss(a, b, c, swap=True), (x(4), y(4), z(4)), 0.98, TRIPLET),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())
    case.check_at(0.0, seeded())


# -- names of reductions ----------------------------------------------------------------------------------------------------


FLAGS = [
    ({"size_average": False}, "sum"),
    ({"size_average": True}, "mean"),
    ({"reduce": False}, "none"),
    ({"size_average": False, "reduce": False}, "none"),
    ({"size_average": False, "reduction": "mean"}, "sum"),
]
BY_NAME = {
    "mse_loss": lambda a, **o: F.mse_loss(a, signs, **o),
    "l1_loss": lambda a, **o: F.l1_loss(a, signs, **o),
    "smooth_l1_loss": lambda a, **o: F.smooth_l1_loss(a, signs, **o),
    "kl_div": lambda a, **o: F.kl_div(a, weights, **o),
    "cross_entropy": lambda a, **o: F.cross_entropy(a, labels, **o),
    "nll_loss": lambda a, **o: F.nll_loss(a, labels, **o),
    "bce with logits": lambda a, **o: F.binary_cross_entropy_with_logits(a, bits, **o),
    "soft_margin_loss": lambda a, **o: F.soft_margin_loss(a, signs, **o),
    "multilabel_soft_margin_loss": lambda a, **o: F.multilabel_soft_margin_loss(a, bits, **o),
    "multi_margin_loss": lambda a, **o: F.multi_margin_loss(a, labels, **o),
    "multilabel_margin_loss": lambda a, **o: F.multilabel_margin_loss(a, pairs, **o),
    "hinge_embedding_loss": lambda a, **o: F.hinge_embedding_loss(a, signs, **o),
    "margin_ranking_loss": lambda a, **o: F.margin_ranking_loss(a, scales, signs, **o),
    "cosine_embedding_loss": lambda a, **o: F.cosine_embedding_loss(a, scales, torch.tensor([1, -1]), **o),
    "triplet_margin_loss": lambda a, **o: F.triplet_margin_loss(a, scales, signs, **o),
    "poisson_nll_loss": lambda a, **o: F.poisson_nll_loss(a, counts, **o),
}


@pytest.mark.filterwarnings("ignore:.*size_average")
@pytest.mark.parametrize("flags, meant", FLAGS, ids=str)
@pytest.mark.parametrize("name", BY_NAME)
def test_deprecated_flags_mean_a_reduction(name, flags, meant):
    point = start(LARGEST, 0, torch.Generator().manual_seed(seeded(0))) * 1.5
    by_flags, by_name = (
        BY_NAME[name](LARGEST.normed(point, 1.0), **flags),
        BY_NAME[name](LARGEST.normed(point, 1.0), reduction=meant),
    )
    assert torch.equal(by_flags.backing, BY_NAME[name](point, **flags))
    assert by_flags.norm_size == by_name.norm_size
    assert by_flags.perturbation_size == by_name.perturbation_size


ATEN = {
    "mse_loss": (F.mse_loss, (signs,), ()),
    "huber_loss": (F.huber_loss, (signs,), (0.5,)),
    "smooth_l1_loss": (F.smooth_l1_loss, (signs,), (0.5,)),
    "nll_loss": (F.nll_loss, (labels, class_weights), ()),
    "cross_entropy_loss": (F.cross_entropy, (labels, class_weights), (-100,)),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, (bits, weights, class_weights), ()),
    "kl_div": (F.kl_div, (weights,), ()),
    "soft_margin_loss": (F.soft_margin_loss, (signs,), ()),
    "multi_margin_loss": (F.multi_margin_loss, (labels, 2, 0.5, class_weights), ()),
    "multilabel_margin_loss": (F.multilabel_margin_loss, (pairs,), ()),
    "hinge_embedding_loss": (F.hinge_embedding_loss, (signs, 0.5), ()),
    "margin_ranking_loss": (F.margin_ranking_loss, (scales, signs, 0.5), ()),
    "triplet_margin_loss": (F.triplet_margin_loss, (scales, signs, 1.0, 2.0, 1e-6, True), ()),
    "cosine_embedding_loss": (F.cosine_embedding_loss, (scales, torch.tensor([1, -1]), 0.5), ()),
    "poisson_nll_loss": (F.poisson_nll_loss, (counts, True, True, 1e-8), ()),
}
BY_KEYWORD = {"binary_cross_entropy_with_logits": ("weight", "pos_weight"), "huber_loss": ("delta",), "smooth_l1_loss": ("beta",)}


@pytest.mark.parametrize("number, reduction", enumerate(("none", "mean", "sum")))
@pytest.mark.parametrize("name", ATEN)
def test_the_aten_operation_says_the_same(name, number, reduction):
    function, given, after = ATEN[name]
    point = start(LARGEST, 0, torch.Generator().manual_seed(seeded(0))) * 1.5
    in_aten = getattr(torch.ops.aten, name)(LARGEST.normed(point, 1.0), *given, number, *after)
    names = iter(BY_KEYWORD.get(name, ()))
    options = {"reduction": reduction}
    if name == "binary_cross_entropy_with_logits":
        options |= dict(zip(names, given[1:], strict=True))
        given = given[:1]
    elif name in BY_KEYWORD:
        options |= dict(zip(names, after, strict=True))
    elif name == "poisson_nll_loss":
        options, given = options | {"full": True}, given[:1]
    out = function(LARGEST.normed(point, 1.0), *given, **options)
    assert torch.equal(in_aten.backing, out.backing)
    assert in_aten.norm_size == out.norm_size
    assert in_aten.perturbation_size == out.perturbation_size


def weighted(loss, weight):
    return lambda a, **o: loss(a, torch.zeros(2, 4, dtype=D), weight=weight, **o)


lopsided = torch.full((2, 4), 1e-4, dtype=D)
lopsided[1, 2] = 3.0
SPIKE = {"witnesses": [[lopsided]], "only": []}
WEIGHTED = [
    # torch divides the weights out of a mean of squares, but not out of one of Huber's (and 2.11 forgets those of l1_loss
    # on the way to any tensor subclass)
    *every_reduction("weighted mse", weighted(F.mse_loss, lopsided), LARGEST, tight=(0.99, 0.12, 0.99), options=SPIKE),
    *every_reduction("weighted huber", weighted(F.huber_loss, lopsided), LARGEST, tight=(0.12, 0.12, 0.99), options=SPIKE),
    *every_reduction("weighted mse, RMS", weighted(F.mse_loss, lopsided), x(2, 4), tight=(0.99, 0.45, 0.99), options=SPIKE),
    *every_reduction("equally weighted huber", weighted(F.huber_loss, 3 * ones), x(2, 4), tight=0.98),
]


@pytest.mark.parametrize("case", WEIGHTED, ids=lambda c: c.name)
def test_weighted_regression(case):
    case.check(seeded())


REFUSED = [
    (lambda a: F.binary_cross_entropy(a, bits), "with_logits"),
    (lambda a: F.poisson_nll_loss(a, counts, log_input=False), "log_input=True"),
    (lambda a: F.poisson_nll_loss(R(1.0, backing=a.backing), counts), "LinfTensor"),
    (lambda a: F.gaussian_nll_loss(a, signs, a), "variances"),
    (lambda a: F.soft_margin_loss(a, a), "labels"),
    (lambda a: F.kl_div(a, a), "plain"),
    (lambda a: F.binary_cross_entropy_with_logits(a, bits, weight=a), "weights"),
    (lambda a: F.triplet_margin_loss(a, a, a, p=0.5), "triangle"),
]


@pytest.mark.parametrize("f, why", REFUSED, ids=[why for _, why in REFUSED])
def test_what_has_no_bound_is_refused(f, why):
    with pytest.raises(NormMismatchError, match=why):
        f(INF(1.0, backing=bits))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("are_tensors", [False, True])
def test_ctc_loss_is_infinite_where_a_target_has_no_alignment_and_only_there(reduction, are_tensors):
    generator = torch.Generator().manual_seed(seeded(0))
    seen = set()
    for i in range(60):
        steps, samples = 1 + i % 5, 1 + i % 3
        lengths = torch.randint(0, 4, (samples,), generator=generator).tolist()
        inputs = torch.randint(1, steps + 1, (samples,), generator=generator).tolist()
        x = torch.randn(steps, samples, 3, generator=generator).log_softmax(-1)
        padded = torch.randint(1, 3, (samples, max(*lengths, 1)), generator=generator)
        together = torch.cat([row[:n] for row, n in zip(padded, lengths, strict=True)])
        if are_tensors:
            inputs, lengths = torch.tensor(inputs), torch.tensor(lengths)
        for targets in (padded, together):
            for zero_infinity in (False, True):
                options = {"reduction": reduction, "zero_infinity": zero_infinity}
                actual = F.ctc_loss(x, targets, inputs, lengths, **options).max()
                claimed = F.ctc_loss(INF.of(x), targets, inputs, lengths, **options).norm_size
                assert actual <= claimed * (1 + 1e-5) and actual.isinf() == claimed.isinf(), (i, options)
                seen.add((zero_infinity, claimed.isinf().item()))
    assert seen == {(False, False), (False, True), (True, False)}
