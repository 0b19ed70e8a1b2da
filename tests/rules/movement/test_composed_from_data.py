"""Bounds of movements away from the data alone, which certified radii are found by: chords, remainders, an adversary."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F

from tests.rules.movement import composed_programs as programs
from tests.rules.movement.test_composed_within import OPTIONS
from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor, certified_radii, norm_sensitivity, with_perturbation
from thunder_norm.core.composed import spread_of
from thunder_norm.core.ellipsoids import Ellipsoid
from thunder_norm.core.local import from_data
from thunder_norm.core.slopes import Away
from thunder_norm.rules.entrywise import slopes_within
from thunder_norm.rules.layers._attention_away import Moving, Rows
from thunder_norm.rules.layers._attention_together import Factors
from thunder_norm.rules.movement import movements_of_products

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # the oracle's Jacobians of fused attention
F64 = torch.float64


def claimed(f, point: torch.Tensor, radius: float, *, only_away: bool) -> float:
    """How far f moves at most, Euclidean, by a step of at most `radius` from a point [1, features]."""
    over, root = tuple(range(1 - point.ndim, 0)), math.sqrt(point[0].numel())
    x = with_perturbation(RMSTensor._wrap(point, RMSTensor.of(point, over).norm_size + radius / root, None, over), radius / root)
    with norm_sensitivity("within"), from_data() if only_away else contextlib.nullcontext():
        y = f(x)
    spread = spread_of(y)
    assert spread is not None and spread.ndim == y.ndim - 1, "all of the result is one row"
    return sum(v.ellipsoid.length.item() * v.root.size.item() for v in spread.parts) / radius


def found(f, point: torch.Tensor, radius: float, steps: int = 80) -> float:
    """The largest ``|f(x + d) - f(x)| / |d|`` that gradient ascent finds for |d| <= radius."""
    torch.manual_seed(seeded(1))
    d = torch.randn(48, *point.shape[1:], dtype=F64)
    shape = (-1, *[1] * (d.ndim - 1))
    d *= (radius * torch.linspace(0.02, 1, 48, dtype=F64) / d.flatten(1).norm(dim=1)).reshape(shape)
    d.requires_grad_()
    optimizer, best = torch.optim.Adam([d], lr=radius / 20), 0.0
    at = f(point)
    for _ in range(steps):
        lengths = d.flatten(1).norm(dim=1)
        near = d * (radius / lengths).clamp(max=1.0).reshape(shape)
        ratio = (f(point + near) - at).flatten(1).norm(dim=1) / near.flatten(1).norm(dim=1)
        best = max(best, ratio.max().item())
        optimizer.zero_grad()
        (-ratio.log().nan_to_num(neginf=0.0).sum()).backward()
        optimizer.step()
    return best


def ends_of(away: Away | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert away is not None
    return torch.minimum(away.below[0], away.above[0]), torch.maximum(away.below[1], away.above[1])


@pytest.mark.parametrize("op", slopes_within.functions(), ids=lambda op: op.__name__)
def test_chords_have_the_slopes_that_are_said(op):
    generator = torch.Generator().manual_seed(seeded(3))
    scale = torch.tensor([0.01, 0.3, 3.0, 30.0], dtype=F64)[torch.randint(4, (200,), generator=generator)]
    middle = torch.randn(200, generator=generator, dtype=F64) * scale
    distance = torch.rand(200, generator=generator, dtype=F64) * scale + 1e-3
    off = distance * torch.rand(200, generator=generator, dtype=F64) ** 8
    for given in OPTIONS.get(op, [{}]):
        least, largest = ends_of(slopes_within.chords(op, given, middle, off, distance - off, distance - off))
        # a point that is one of those the interval may be about, and others at some distance from it
        for share in (-1.0, 0.0, 1.0):
            c = middle + share * off
            u = middle + distance * torch.linspace(-1, 1, 402, dtype=F64)[:, None]
            far = (u - c).abs() > 1e-3 * distance
            chord = torch.where(far, (op(u, **given) - op(c, **given)) / torch.where(far, u - c, 1.0), 0.5 * (least + largest))
            rounding = 1e-7 + 1e-8 / distance
            assert (chord >= least - rounding).all() and (chord <= largest + rounding).all()
        exact = off < 1e-6 * distance
        width = (chord.amax(0) - chord.amin(0)).clamp(min=1e-2)
        assert ((chord.amin(0) - least)[exact] <= 0.15 * width[exact] + 0.02).double().mean() > 0.8
        # over the whole interval slopes are no nearer together
        steepest = slopes_within.of(op, given, middle - distance, middle + distance)
        assert (least >= steepest[0] - 1e-9).all() and (largest <= steepest[1] + 1e-9).all()


def test_a_relu_away_from_a_positive_number_is_half_as_uncertain():
    middle, off, distance = (torch.tensor([v], dtype=F64) for v in (1.0, 1e-9, 2.0))
    least, largest = ends_of(slopes_within.chords(F.relu, {}, middle, off, distance - off, distance - off))
    assert least.item() == pytest.approx(0.5, abs=1e-6) and largest.item() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(("seed", "radius"), crossed(range(10), [0.1, 1.0, 4.0]))
def test_no_adversary_gets_further(seed: int, radius: float):
    f = programs.program(seed)
    torch.manual_seed(seeded(seed))
    point = torch.randn(1, 6, dtype=F64)
    bound = claimed(f, point, radius, only_away=True)
    # where nothing moves rounding does
    assert found(f, point, radius) <= bound * (1 + 1e-6) + 1e-10
    # between any two points near it may be more, by a few multipliers less
    assert bound <= claimed(f, point, radius, only_away=False) * 1.05


CURVED = {
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "softmax": lambda x: F.linear(x.softmax(-1), 4 * torch.eye(6, dtype=F64)),
    "product": lambda x: x * x.tanh(),
    "attention": lambda x: F.scaled_dot_product_attention(
        *(t.reshape(-1, 3, 2) for t in (2 * x, 3 * x.roll(1, -1), x.flip(-1)))
    ).reshape(-1, 6),
}


def _split(x: torch.Tensor, heads: int = 1) -> torch.Tensor:
    """[.., tokens, features] by heads."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def _attention(seed: int, *, heads: int = 1, kv_heads: int | None = None, is_rotated: bool = False, **given):
    """Attention of 3 tokens of 4 numbers, its matrices drawn."""
    make = torch.Generator().manual_seed(seeded(seed))
    of_keys = 4 * (kv_heads or heads) // heads
    wq, wk, wv = (torch.randn(n, 4, generator=make, dtype=F64) for n in (4, of_keys, of_keys))
    angles = torch.outer(torch.arange(3, dtype=F64), torch.tensor([1.0, 0.3], dtype=F64)[: 2 // heads])

    def rotated(t: torch.Tensor) -> torch.Tensor:
        a, b = t.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (3, 4))
        q, k, v = _split(F.linear(x, wq), heads), *(_split(F.linear(x, w), kv_heads or heads) for w in (wk, wv))
        if is_rotated:
            q, k = rotated(q), rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads is not None, **given)
        return y.transpose(-2, -3).flatten(-3)

    return run


SEEN = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 1, 1]], dtype=torch.bool)
ATTENTION = {
    "one head": {},
    "heads": {"heads": 2},
    "grouped": {"heads": 2, "kv_heads": 1},
    "causal": {"is_causal": True},
    "masked": {"heads": 2, "attn_mask": SEEN},
    "bias": {"attn_mask": 2.0 * SEEN.double()},
    "negative scale": {"scale": -0.9},
    "rotary": {"heads": 2, "is_rotated": True},
    "sharp": {"scale": 2.0},
}


@pytest.mark.parametrize(("name", "radius"), crossed(ATTENTION, [0.02, 0.2, 0.7]))
def test_attention_of_any_kind_gets_no_further(name: str, radius: float):
    f = _attention(10 + len(name), **ATTENTION[name])
    torch.manual_seed(seeded(14))
    point = torch.randn(1, 12, dtype=F64)
    bound = claimed(f, point, radius, only_away=True)
    jacobian = torch.linalg.matrix_norm(torch.func.jacrev(lambda x: f(x[None])[0])(point[0]), 2).item()
    reached = max(found(f, point, radius), jacobian if radius < 0.1 else 0.0)
    assert reached <= bound * (1 + 1e-6)
    assert bound <= claimed(f, point, radius, only_away=False) * (1 + 1e-5)
    assert radius > 0.1 or bound <= 1.5 * reached


def _left_after_first_order(seed: int, factor: float, is_together: bool):
    """Attention of tokens that move within an ellipsoid: what is said to be left, and moves that a search finds, [tried, tokens, features].

    Args:
        seed: of the tokens.
        factor: how far they move.
        is_together: whether it is told what all of them are of one vector.
    """
    make = torch.Generator().manual_seed(seeded(seed))
    heads, queries, keys, d = 1 + seed % 2, 3, 4, 2

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=F64)

    q, k, v = draw(heads, queries, d) * 2, draw(heads, keys, d) * 2, draw(heads, keys, d)
    roots = [draw(t.numel(), 7) * factor / 7**0.5 for t in (q, k, v)]
    p = (q @ k.mT / d**0.5).softmax(-1)

    def scores(u: torch.Tensor) -> torch.Tensor:
        dq, dk = (r @ u for r in roots[:2])
        a = (dq.reshape(q.shape) @ k.mT + q @ dk.reshape(k.shape).mT) / d**0.5
        return (a - (p * a).sum(-1, keepdim=True)).flatten()

    a = torch.func.jacrev(scores)(torch.zeros(7, dtype=F64))
    moving = (
        Moving.of(t, Ellipsoid.of(r @ r.mT), (heads,), factor=r if is_together else None)
        for t, r in zip((q, k, v), roots, strict=True)
    )
    said = Rows(*moving, p, Ellipsoid.of(a @ a.mT), d**-0.5).found()
    assert said is not None

    def run(u: torch.Tensor, only_scores: bool = False) -> torch.Tensor:
        dq, dk, dv = (r @ u for r in roots)
        moved_v = v if only_scores else v + dv.reshape(v.shape)
        return F.scaled_dot_product_attention(q + dq.reshape(q.shape), k + dk.reshape(k.shape), moved_v)

    zero = torch.zeros(7, dtype=F64)
    jacobian = torch.func.jacrev(run)(zero) - said.damped[..., None] / 2 * torch.func.jacrev(lambda u: run(u, True))(zero)

    def left(u: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda u: run(u) - run(zero) - jacobian @ u)(u)

    u = draw(64, 7).requires_grad_()
    optimizer, tried = torch.optim.Adam([u], lr=0.05), []
    for _ in range(60):
        near = u / u.norm(dim=1, keepdim=True).clamp(min=1.0)
        tried.append(left(near))
        optimizer.zero_grad()
        (-tried[-1].flatten(1).norm(dim=1).log().nan_to_num(neginf=0.0).sum()).backward()
        optimizer.step()
    return said, torch.cat(tried).detach().flatten(1)


@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize(("seed", "factor"), crossed(range(8), [0.03, 0.3, 1.0]))
def test_what_attention_leaves_after_first_order_is_in_its_ellipsoids_and_ball(seed: int, factor: float, is_together: bool):
    said, reached = _left_after_first_order(seed, factor, is_together)
    assert reached.norm(dim=1).max().item() <= said.longest * (1 + 1e-9)
    # in every direction: |w . left| <= |w| of the ellipsoid, and the length
    directions = F.normalize(
        torch.randn(200, reached.shape[1], dtype=F64, generator=torch.Generator().manual_seed(seeded(seed))), dim=1
    )
    directions = torch.cat([directions, F.normalize(reached[:: len(reached) // 50], dim=1)])
    most = sum((directions * (directions @ e.cov)).sum(1).sqrt() * e.scale for e in said.within) + said.length
    assert ((directions @ reached.mT).abs().amax(1) <= most * (1 + 1e-9)).all()
    assert factor > 0.1 or reached.norm(dim=1).max().item() >= (0.6 if is_together else 0.3) * said.longest


@pytest.mark.parametrize("is_together", [False, True])
def test_no_less_is_left_than_is_said(is_together: bool):
    # with half of what is said of second order the search above gets further
    said, reached = _left_after_first_order(2, 0.03, is_together)
    second, third = (e.length.item() for e in said.within)
    assert reached.norm(dim=1).max().item() > (0.6 if is_together else 0.3) * second + third + said.length


def test_what_queries_keys_and_values_move_by_together_is_less_than_by_themselves(monkeypatch: pytest.MonkeyPatch):
    f = _attention(10, heads=2)
    torch.manual_seed(seeded(14))
    point = torch.randn(1, 12, dtype=F64)
    jacobian = torch.linalg.matrix_norm(torch.func.jacrev(lambda x: f(x[None])[0])(point[0]), 2).item()
    together = claimed(f, point, 0.05, only_away=True)
    monkeypatch.setattr(Factors, "is_small", False)
    assert jacobian < together
    assert together - jacobian < 0.9 * (claimed(f, point, 0.05, only_away=True) - jacobian)


@pytest.mark.parametrize("name", CURVED)
@pytest.mark.parametrize("radius", [0.01, 0.1, 0.4])
def test_what_is_curved_has_half_a_remainder(name: str, radius: float):
    torch.manual_seed(seeded(4))
    point = torch.randn(1, 6, dtype=F64) * 1.5
    f = CURVED[name]
    bound = claimed(f, point, radius, only_away=True)
    between = claimed(f, point, radius, only_away=False)
    jacobian = torch.linalg.matrix_norm(torch.func.jacrev(lambda x: f(x[None])[0])(point[0]), 2).item()
    assert max(found(f, point, radius), jacobian) <= bound * (1 + 1e-6) <= between * (1 + 1e-5)
    if radius == 0.01:
        assert bound - jacobian <= 0.51 * (between - jacobian) + 1e-3 * jacobian


@pytest.mark.parametrize("broken", ["none", "chords", "remainders", "products"])
def test_the_adversary_finds_what_claims_too_little(broken: str, monkeypatch: pytest.MonkeyPatch):
    f = CURVED["product"] if broken in ("remainders", "products") else F.relu
    point, radius = torch.full((1, 6), -0.1 if f is F.relu else 0.3, dtype=F64), 1.0
    if broken == "chords":
        half = torch.zeros(1, 6, dtype=F64), torch.full((1, 6), 0.5, dtype=F64)
        monkeypatch.setattr(slopes_within, "chords", lambda *args: Away(args[-2], args[-1], half, half, half, half, half))
    elif broken == "remainders":
        from thunder_norm.rules.movement import movements_nearby

        made_of = movements_nearby.made_of
        monkeypatch.setattr(
            movements_nearby,
            "made_of",
            lambda call, moving, f, besides: made_of(call, moving, f, [(e, n * 0) for e, n in besides]),
        )
    elif broken == "products":  # of one entry, and of second order by little: that is then an interval of slopes
        point, radius = point[:, :1], 0.05
        monkeypatch.setattr(movements_of_products, "_between", lambda x, spread: movements_of_products._at_data(x, spread))
    assert (found(f, point, radius) > claimed(f, point, radius, only_away=True) * 1.0001) == (broken != "none")


def test_certified_radii_are_larger_than_by_any_two_points_and_hold():
    torch.manual_seed(seeded(5))
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 24), torch.nn.ReLU(), torch.nn.Linear(24, 24), torch.nn.ReLU(), torch.nn.Linear(24, 4)
    )
    net = net.double()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    x = torch.randn(6, 8, dtype=F64)
    target = net(x).argmax(-1)
    radii = certified_radii(net, x, target)
    for point, c, radius in zip(x, target, radii.tolist(), strict=True):
        d = torch.randn(200, 8, dtype=F64, requires_grad=True)
        optimizer = torch.optim.Adam([d], lr=0.05)
        for _ in range(100):
            logits = net(point + radius * F.normalize(d, dim=-1))
            others = logits.masked_fill(F.one_hot(c, 4).bool(), -math.inf).amax(-1)
            margin = logits[:, c] - others
            assert margin.min().item() > -1e-9
            optimizer.zero_grad()
            margin.sum().backward()
            optimizer.step()
