"""Transformers in their usual spellings, within a radius: at the data the Jacobian's norm, and near it no more than needs be."""

from __future__ import annotations

import contextlib
import functools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import L2Tensor, RMSTensor, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.core.local import from_data
from thunder_norm.transforms import NormTransform
import thunder

F64 = torch.float64
TOKENS, WIDTH, HEADS = 3, 8, 2
_LATER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


def _by_products(q, k, v, mask):
    return mask(q @ k.mT).softmax(-1).type_as(q) @ v


def _by_labels(q, k, v, mask):
    weights = F.softmax(mask(torch.einsum("bhid,bhjd->bhij", q, k)), dim=-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def _by_batches(q, k, v, mask):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return torch.bmm(mask(torch.bmm(q, k.transpose(1, 2))).softmax(-1).to(v.dtype), v).unflatten(0, (1, HEADS))


MASKS = {
    "none": lambda s: s,
    "infinite": lambda s: s.masked_fill(_LATER, -math.inf),
    "finite": lambda s: s.masked_fill(_LATER, -1e9),
    "chosen": lambda s: torch.where(_LATER, torch.finfo(F64).min, s),
    "added": lambda s: s + torch.zeros(TOKENS, TOKENS, dtype=F64).masked_fill(_LATER, -math.inf),
}
CASES = [(_by_products, mask) for mask in MASKS] + [(_by_labels, "infinite"), (_by_batches, "finite")]


def _program(attention, mask: str, is_crossed: bool, layers: int = 1):
    make = torch.Generator().manual_seed(seeded(3))
    drawn = [torch.randn(5, WIDTH, WIDTH, generator=make, dtype=F64) / math.sqrt(WIDTH) for _ in range(layers)]
    queries = torch.randn(1, TOKENS, WIDTH, generator=make, dtype=F64)

    def heads(t):
        return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def f(x):
        for wq, wk, wv, wo, w in drawn:
            h = F.layer_norm(x, (WIDTH,))
            asked = queries if is_crossed else h
            q, k, v = (heads(t) for t in (asked @ wq, h @ wk, h @ wv))
            x = x + attention(q, k, v, MASKS[mask]).transpose(1, 2).flatten(2) @ wo
            x = x + F.gelu(x @ w)
        return x

    return f


def _claimed(f, x: torch.Tensor, radius: float) -> float:
    over = tuple(range(-x.ndim, 0))
    leaf = with_perturbation(RMSTensor._wrap(x, RMSTensor.of(x, over).norm_size + radius, None, over), radius)
    with norm_sensitivity("within"):
        y = f(leaf)
    assert y.elem_dims == over
    return sensitivities(y, leaf).item()


def _point() -> torch.Tensor:
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seeded(4)), dtype=F64)


def _length(f, x: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(torch.autograd.functional.jacobian(f, x).reshape(x.numel(), -1), 2).item()


@pytest.mark.parametrize("is_crossed", [False, True])
@pytest.mark.parametrize(("attention", "mask"), CASES, ids=lambda c: c if isinstance(c, str) else c.__name__)
def test_at_the_data_it_is_the_norm_of_the_jacobian_however_attention_is_spelled(attention, mask, is_crossed):
    f, x = _program(attention, mask, is_crossed), _point()
    assert _claimed(f, x, 0.0) == pytest.approx(_length(f, x), rel=1e-6)


@pytest.mark.parametrize("is_crossed", [False, True])
def test_near_the_data_no_point_is_steeper_and_the_claim_is_near_the_jacobian(is_crossed):
    f, x = _program(_by_products, "infinite", is_crossed, layers=2), _point()
    claimed = _claimed(f, x, 1e-4)
    make = torch.Generator().manual_seed(seeded(5))
    for _ in range(5):
        d = torch.randn(x.shape, generator=make, dtype=F64)
        assert _length(f, x + d * 1e-4 / d.square().mean().sqrt()) <= claimed * (1 + 1e-9)
    assert claimed <= 1.5 * _length(f, x)


@pytest.mark.parametrize("is_last", [False, True])
def test_of_many_reasons_to_move_those_that_move_furthest_are_kept_apart(is_last):
    """A movement along one direction, which a matrix then takes to 0, beside many small ones."""
    make = torch.Generator().manual_seed(seeded(7))
    far, *others = (with_perturbation(RMSTensor.of(torch.randn(1, 4, generator=make, dtype=F64))) for _ in range(20))
    along, across = torch.diag(torch.tensor([1.0, 0, 0, 0])).double(), torch.diag(torch.tensor([0, 1.0, 1, 1])).double()
    with norm_sensitivity("composed"):
        terms = [1e-3 * t for t in others]
        terms.insert(len(terms) if is_last else 0, far @ along)
        y = functools.reduce(torch.add, terms) @ across
    assert sensitivities(y, far).item() <= 1e-5
    assert 1e-3 <= sensitivities(y, others[0]).item() * (1 + 1e-9) <= 1.2e-3


def test_a_mask_that_other_inputs_have_otherwise_may_have_any_slope():
    """Where both of what is chosen from meet, the condition turns out another way nearby: relu, spelled three ways."""
    x = torch.tensor([[-0.01, 1.0, -1.0]], dtype=F64)
    for f in (
        lambda x: x.masked_fill(x < 0, 0.0),
        lambda x: torch.where(x < 0, 0.0, x),
        lambda x: torch.where(x < 0, 0.25 * x, x) - 0.25 * x.clamp_max(0.0),
    ):
        steep = torch.tensor([[1.0, 1.0, 0.0]], dtype=F64)  # the first one may turn positive
        assert _claimed(lambda x, f=f: f(x) * torch.tensor([[5.0, 1.0, 9.0]], dtype=F64), x, 0.02) >= (5 * steep).max().item()


def test_what_several_rows_have_masked_otherwise_moves_in_those_that_have_it():
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seeded(6)), dtype=F64)
    mask, w = torch.tensor([[True, False, False, True], [False, False, True, True]]), torch.diag(torch.arange(1.0, 5.0)).double()
    leaf = with_perturbation(RMSTensor._wrap(x, RMSTensor.of(x, (-1,)).norm_size + 1e-3, None, (-1,)), 1e-3)
    with norm_sensitivity("within"):
        y = leaf.masked_fill(mask, 1e6) @ w
    assert sensitivities(y, leaf).item() == pytest.approx(3.0, rel=1e-6)  # of the third in the first row; the last has none


# -- attention written out ------------------------------------------------------------------------------------------------

SEEN = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 1], [0, 1, 1, 1]], dtype=torch.bool)
ALIBI = -0.5 * (torch.arange(4)[:, None] - torch.arange(4)).abs().double()
# How a program says what is not seen, and what attention in one operation is told.
SPELLED = {
    "no mask": (lambda s: s, None),
    "filled": (lambda s: s.masked_fill(~SEEN, -1e9), SEEN),
    "filled with the least number": (lambda s: s.masked_fill(~SEEN, torch.finfo(s.dtype).min), SEEN),
    "filled with minus infinity": (lambda s: s.masked_fill(~SEEN, -math.inf), SEEN),
    "chosen": (lambda s: torch.where(SEEN, s, -1e9), SEEN),
    "a sum": (lambda s: s + (~SEEN).double() * -1e9, SEEN),
    "a sum with minus infinity": (lambda s: s + torch.zeros(4, 4, dtype=s.dtype).masked_fill(~SEEN, -math.inf), SEEN),
    "a bias": (lambda s: s + ALIBI, ALIBI),
}
WRITTEN = {
    "softmax": lambda s, v: s.softmax(-1) @ v,
    "exponentials": lambda s, v: ((e := (s - s.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True)) @ v,
    "einsum": lambda s, v: torch.einsum("...ij,...jd->...id", s.softmax(-1), v),
    "bmm": lambda s, v: torch.bmm(s.flatten(0, 1).softmax(-1), v.flatten(0, 1)).unflatten(0, (1, 2)),
}


def _self_attention(seed, size, weighted=None, mask=None):
    """Two heads of width 3, of tokens of 6 entries, written out or in one operation."""
    generator = torch.Generator().manual_seed(seeded(seed))
    w = torch.randn(3, 6, 6, generator=generator, dtype=torch.float64) / 6**0.5

    def f(x):
        q, k, v = ((x @ m).unflatten(-1, (2, 3)).transpose(-3, -2) for m in w)
        if weighted is None:
            y = F.scaled_dot_product_attention(q, k, v, mask)
        else:
            spelled, of_scores = weighted
            y = spelled(of_scores(q @ k.mT / 3**0.5), v)
        return y.transpose(-3, -2).flatten(-2)

    return f, size * torch.randn(1, 4, 6, generator=generator, dtype=torch.float64)


def _bound(f, x, sensitivity, radius, is_from_data=False):
    with from_data() if is_from_data else contextlib.nullcontext(), norm_sensitivity(sensitivity):
        x = with_perturbation(L2Tensor(L2Tensor.of(x, (-2, -1)).norm_size + radius, backing=x, elem_dims=(-2, -1)), radius)
        y = f(x)
    return sensitivities(y, x).item(), functools.partial(type(y).measure, elem_dims=y.elem_dims)


def _searched(f, x, size, radius, is_from_data=False):
    """The steepest Jacobian, or the longest move, that ascent finds within a distance, in a norm of results."""
    generator, best = torch.Generator().manual_seed(seeded(7)), 0.0
    for _ in range(2 if radius else 1):
        d = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        u = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        for _ in range(15):
            d = radius * d / d.norm()
            d.requires_grad_()
            u = (u / u.norm()).detach().requires_grad_()
            moved = size(f(x + d) - f(x)) / radius if is_from_data else size(torch.func.jvp(f, (x + d,), (u,))[1])
            by_d, by_u = torch.autograd.grad(moved, (d, u), allow_unused=True, materialize_grads=True)
            best = max(best, moved.item())
            d = (d + radius * by_d / by_d.norm().clamp(min=1e-30)).detach()
            u = (0.1 * u + by_u / by_u.norm().clamp(min=1e-30)).detach()
    return best


@pytest.mark.parametrize(
    ("written", "mask"), [*(("softmax", m) for m in SPELLED), *((w, "filled") for w in WRITTEN if w != "softmax")]
)
def test_attention_that_is_written_out_is_bounded_as_attention(written, mask):
    of_scores, as_mask = SPELLED[mask]
    for sensitivity, radius, is_from_data, factor in (
        ("local", 0.0, False, 4.0),
        ("within", 0.2, False, 1.6),
        ("within", 0.2, True, 1.6),
    ):
        f, x = _self_attention(1, 2.0, (WRITTEN[written], of_scores))
        in_one, _ = _self_attention(1, 2.0, None, as_mask)
        torch.testing.assert_close(f(x), in_one(x))
        found, size = _bound(f, x, sensitivity, radius, is_from_data)
        assert _searched(f, x, size, radius, is_from_data) <= found * (1 + 1e-9)
        assert found <= factor * _bound(in_one, x, sensitivity, radius, is_from_data)[0]


@pytest.mark.parametrize("name", ["in one", "written out"])
@pytest.mark.parametrize("radius", [0.05, 0.5])
@pytest.mark.parametrize("batch", [1, 2])
def test_keys_and_values_that_are_constants_are_as_they_are(name, radius, batch):
    generator = torch.Generator().manual_seed(seeded(4))
    k, v = (torch.randn(1, 2, 5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    x = torch.randn(batch, 2, 4, 3, generator=generator, dtype=torch.float64)
    moved = radius / 3**0.5

    def f(q):
        if name == "in one":
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT / 3**0.5).softmax(-1) @ v

    with norm_sensitivity("within"):
        given = with_perturbation(RMSTensor(RMSTensor.of(x).norm_size + moved, backing=x), moved)
        y = f(given)
    assert y.elem_dims == (-1,)
    claimed = sensitivities(y, given).item()
    # a token at a time: the derivative is s Cov_p(v, k), of norm s |v - v'| |k - k'| / 4 at most
    widest = torch.cdist(k, k).amax((-2, -1)) * torch.cdist(v, v).amax((-2, -1)) / (4 * 3**0.5)
    assert claimed <= widest.max().item() * (1 + 1e-6) or name == "written out" and claimed <= 2 * widest.max().item()
    drawn = torch.randn(50, *x.shape, generator=generator, dtype=torch.float64)
    points = x + radius * drawn / drawn.norm(dim=-1, keepdim=True)
    p = (points @ k.mT / 3**0.5).softmax(-1)
    covariances = p.unsqueeze(-2) * v.mT.unsqueeze(-3) @ k.unsqueeze(-3) - (p @ v).unsqueeze(-1) * (p @ k).unsqueeze(-2)
    assert torch.linalg.matrix_norm(covariances, 2).max().item() / 3**0.5 <= claimed * (1 + 1e-9)


def test_a_trace_of_attention_written_out_is_one_for_all_values():
    f, x = _self_attention(1, 1.0, (WRITTEN["softmax"], SPELLED["filled with minus infinity"][0]))
    traced = thunder.jit(f, transforms=[NormTransform(sensitivity="local")])
    for size in (1.0, 3.0):
        given = with_perturbation(RMSTensor.of(size * x), 1.0)
        with norm_sensitivity("local"):
            expected = f(given).perturbation_size
        torch.testing.assert_close(traced(given).perturbation_size, expected, rtol=1e-6, atol=0.0)
    assert thunder.cache_misses(traced) == 1
