"""Between any two points near the data: what attention and normalizations leave after first order, searched by gradient ascent."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.core.ellipsoids import Dense, Ellipsoid, Picked
from thunder_norm.core.slopes import between
from thunder_norm.core.vertices import Root, Vertex, linear_map_of_fewer
from thunder_norm.rules.layers._attention_away import Moving, Rows
from thunder_norm.rules.layers._attention_between import Between
from thunder_norm.rules.movement.movements_nearby import Together
from thunder_norm.rules.movement.movements_of_normalizations import _Left, _Moves

F64 = torch.float64
ROOTS = 7  # entries of what all moves are made of

Left = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def searched(left: Left, seed: int, steps: int = 40, starts: int = 48) -> torch.Tensor:
    """What is left, [tried, entries], at points u along moves w of at most unit length, that gradient ascent makes long."""
    make = torch.Generator().manual_seed(seeded(seed))
    u, w = (torch.randn(starts, ROOTS, generator=make, dtype=F64, requires_grad=True) for _ in range(2))
    optimizer, tried = torch.optim.Adam([u, w], lr=0.08), []
    for _ in range(steps):
        tried.append(left(*(t / t.norm(dim=1, keepdim=True).clamp(min=1.0) for t in (u, w))))
        optimizer.zero_grad()
        (-tried[-1].norm(dim=1).log().nan_to_num(neginf=0.0).sum()).backward()
        optimizer.step()
    return torch.cat(tried).detach()


def check_directions(reached: torch.Tensor, within: Ellipsoid, length: float, seed: int) -> None:
    """No move is further in any direction than an ellipsoid and a length together."""
    make = torch.Generator().manual_seed(seeded(seed))
    directions = torch.cat([torch.randn(200, reached.shape[1], dtype=F64, generator=make), reached[:: len(reached) // 50]])
    directions = F.normalize(directions, dim=1)
    most = (directions * (directions @ within.cov)).sum(1).clamp(min=0).sqrt() * within.scale + length
    assert ((directions @ reached.mT).abs().amax(1) <= most * (1 + 1e-6) + 1e-12).all()


def _attention(seed: int, factor: float, away: float) -> tuple[Between, Callable[..., torch.Tensor]]:
    """Attention whose tokens move by linear maps of a vector, and the operation at one, of scores alone or of all tokens.

    Points are `away` times as far from the data as two of them are from each other.
    """
    make = torch.Generator().manual_seed(seeded(seed))
    heads, queries, keys, d = 1 + seed % 2, 3, 4, 2

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=F64)

    q, k, v = draw(heads, queries, d) * 2, draw(heads, keys, d) * 2, draw(heads, keys, d)
    roots = [draw(t.numel(), ROOTS) * factor / ROOTS**0.5 for t in (q, k, v)]
    seen = (torch.arange(keys) <= torch.arange(queries)[:, None] + 1) | torch.tensor(seed % 3 != 0)

    def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT / d**0.5).masked_fill(~seen, -math.inf).softmax(-1)

    p = weights(q, k)

    def run(u: torch.Tensor, only_scores: bool = False) -> torch.Tensor:
        dq, dk, dv = ((r @ u).reshape(t.shape) for r, t in zip(roots, (q, k, v), strict=True))
        return (weights(q + dq, k + dk) @ (v if only_scores else v + dv)).flatten()

    def scores(u: torch.Tensor) -> torch.Tensor:
        dq, dk = (r @ u for r in roots[:2])
        a = (dq.reshape(q.shape) @ k.mT + q @ dk.reshape(k.shape).mT) / d**0.5
        return (a - (p * a).sum(-1, keepdim=True)).flatten()

    a = torch.func.jacrev(scores)(torch.zeros(ROOTS, dtype=F64))

    def rows(by: float) -> tuple[Moving, Moving, Moving, torch.Tensor, Ellipsoid, float]:
        query, key, value = (Moving.of(t, Ellipsoid.of(r @ r.mT, by), (heads,)) for t, r in zip((q, k, v), roots, strict=True))
        return query, key, value, p, Ellipsoid.of(a @ a.mT, by), d**-0.5

    return Between(*rows(1.0), Rows(*rows(away))), run


@pytest.mark.parametrize("away", [1.0, 0.3])
@pytest.mark.parametrize(("seed", "factor"), crossed(range(6), [0.03, 0.3, 1.0]))
def test_what_attentions_derivative_changes_by_is_in_its_ellipsoid_and_ball(seed: int, factor: float, away: float):
    rows, run = _attention(seed, factor, away)
    said = rows.found()
    assert said is not None
    zero = torch.zeros(ROOTS, dtype=F64)
    by = said.damped.expand(rows.value.data.shape[0], -1, rows.value.data.shape[-1]).reshape(-1, 1)
    jacobian = torch.func.jacrev(run)(zero) - by / 2 * torch.func.jacrev(lambda u: run(u, True))(zero)
    reached = searched(
        lambda u, w: torch.func.vmap(lambda u, w: torch.func.jvp(run, (away * u,), (w,))[1] - jacobian @ w)(u, w), seed
    )
    assert reached.norm(dim=1).max().item() <= said.longest * (1 + 1e-9)
    (within,) = said.within
    check_directions(reached, within, said.length, seed)
    # with a fifth of it the search gets further
    assert factor > 0.1 or reached.norm(dim=1).max().item() >= 0.2 * said.longest


@pytest.mark.parametrize("is_from_data", [True, False])
@pytest.mark.parametrize(("seed", "factor"), crossed(range(6), [0.03, 0.3, 0.8]))
def test_what_a_normalization_leaves_is_in_its_ellipsoid(seed: int, factor: float, is_from_data: bool):
    make = torch.Generator().manual_seed(seeded(seed))
    groups, n, constant = 3, 4, (0.0, 0.5)[seed % 2]
    z = torch.randn(groups, n, generator=make, dtype=F64)
    z = z * (1 + torch.rand(groups, 1, generator=make, dtype=F64)) / z.norm(dim=1, keepdim=True)
    root = torch.randn(groups * n, ROOTS, generator=make, dtype=F64)
    root *= factor / torch.linalg.matrix_norm(root, 2)
    if seed % 3 == 0:  # moves that are along what there is, for the most part
        root[:, 0] = z.flatten() * factor / z.norm()
        root[:, 1:] *= 0.2
    at = root  # how far points are from the data
    if not is_from_data and seed % 2:
        at = torch.randn(groups * n, ROOTS, generator=make, dtype=F64)
        at *= factor / 2 / torch.linalg.matrix_norm(at, 2)
    rho = (z.square().sum(-1) + constant).sqrt()
    moves, points = (_Moves((r @ r.mT).reshape(groups, n, groups, n), z / rho[:, None]) for r in (root, at))
    left = _Left(rho, z.norm(dim=-1), constant, moves, points, is_from_data)

    def run(move: torch.Tensor) -> torch.Tensor:
        moved = z + move.reshape(z.shape)
        return (moved / (moved.square().sum(-1, keepdim=True) + constant).sqrt()).flatten()

    zero = torch.zeros(groups * n, dtype=F64)
    own = torch.func.jacrev(run)(zero)

    def beside(jacobian: torch.Tensor, u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if is_from_data:
            return run(root @ u) - run(zero) - jacobian @ (root @ u)
        return torch.func.jvp(run, (at @ u,), (root @ w,))[1] - jacobian @ (root @ w)

    for said in (left.by_length(moves.furthest, False), left.by_direction()):
        if said is None:
            continue
        within, by = said
        jacobian = by[:, None].expand(groups, n).reshape(-1, 1) * own
        reached = searched(lambda u, w, j=jacobian: torch.func.vmap(lambda u, w: beside(j, u, w))(u, w), seed, steps=25)
        check_directions(reached, within, 0.0, seed)
        assert factor > 0.1 or reached.norm(dim=1).max().item() >= 0.1 * within.length.item()


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.unflatten(-1, (count, -1)).transpose(-2, -3)


def _block(seed: int, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A transformer block of random matrices."""
    make = torch.Generator().manual_seed(seeded(seed))
    tokens, width = 3, 4
    heads, shared = (2, 1) if kind == "grouped heads" else (2, 2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=F64) / shape[-1] ** 0.5

    q, k, v, out = draw(width, width), draw(width * shared // 2, width), draw(width * shared // 2, width), draw(width, width)
    up, down, gain = draw(6, width), draw(width, 6), draw(width) + 1
    angles = torch.arange(tokens).double()[:, None]
    cos, sin = angles.cos().expand(tokens, width // heads), angles.sin().expand(tokens, width // heads)

    def turned(t: torch.Tensor) -> torch.Tensor:
        return t * cos + torch.cat([-t[..., 1:], t[..., :1]], -1) * sin if kind == "rotary" else t

    def attend(x: torch.Tensor) -> torch.Tensor:
        query, key, value = (_heads(x @ t.mT, n) for t, n in ((q, heads), (k, shared), (v, shared)))
        y = F.scaled_dot_product_attention(
            turned(query), turned(key), value, is_causal=kind == "causal", enable_gqa=kind == "grouped heads"
        )
        return y.transpose(-2, -3).flatten(-2) @ out.mT

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (width,), gain) if kind == "rotary" else F.layer_norm(x, (width,), gain)

    def run(x: torch.Tensor) -> torch.Tensor:
        if kind == "after":
            x = norm(x + attend(x))
            return norm(x + F.gelu(x @ up.mT) @ down.mT)
        x = x + attend(norm(x))
        return x + F.gelu(norm(x) @ up.mT) @ down.mT

    return run


def _steepest(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, radius: float, steps: int = 30) -> float:
    """The largest ``|J(z) d| / |d|`` at points z within the radius of x, by differences, that gradient ascent finds."""
    torch.manual_seed(seeded(2))
    e, d = (torch.randn(12, *x.shape[1:], dtype=F64, requires_grad=True) for _ in range(2))
    optimizer, best = torch.optim.Adam([e, d], lr=0.1), 0.0

    def lengths(t: torch.Tensor) -> torch.Tensor:
        return t.flatten(1).norm(dim=1)[:, None, None]

    for _ in range(steps):
        z, unit = x + e * radius / lengths(e).clamp(min=1.0), 1e-5 * d / lengths(d)
        ratio = lengths(f(z + unit) - f(z - unit)).flatten() / 2e-5
        best = max(best, ratio.max().item())
        optimizer.zero_grad()
        (-ratio.log().sum()).backward()
        optimizer.step()
    return best


@pytest.mark.parametrize(
    ("kind", "radius"), crossed(["before", "after", "causal", "grouped heads", "rotary"], [0.003, 0.03, 0.1])
)
def test_transformer_blocks_are_no_steeper_nearby(kind: str, radius: float):
    torch.manual_seed(seeded(3))
    f, x = _block(len(kind), kind), torch.randn(1, 3, 4, dtype=F64)
    moved = radius / math.sqrt(x.numel())
    given = with_perturbation(RMSTensor._wrap(x.clone(), RMSTensor.of(x, (-2, -1)).norm_size + moved, None, (-2, -1)), moved)
    with norm_sensitivity("within"):
        y = f(given)
    bound = sensitivities(y, given).item()
    found = _steepest(f, x, radius)
    assert found <= bound * (1 + 1e-6)
    assert radius > 0.01 or bound <= 1.5 * found


PAIRS = {
    "normalization of a sum": lambda a, b: F.layer_norm(a + 2 * b.flip(-1), (4,)),
    "product": lambda a, b: a * b,
    "product of sums": lambda a, b: (a - b) * (a.flip(-1) + b),
    "attention": lambda a, b: F.scaled_dot_product_attention(2 * a, b, a + b),
    "normalized attention": lambda a, b: F.rms_norm(F.scaled_dot_product_attention(a, b, b) + a, (4,)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("radii", [(0.3, 0.03), (0.02, 0.3), (0.3, 0.0)])
def test_of_two_inputs_each_moves_no_further_by_itself(name: str, radii: tuple[float, float]):
    torch.manual_seed(seeded(6))
    f, points = PAIRS[name], [torch.randn(1, 3, 4, dtype=F64) for _ in radii]
    moved = [r / math.sqrt(12) for r in radii]
    given = [
        with_perturbation(RMSTensor._wrap(x.clone(), RMSTensor.of(x, (-2, -1)).norm_size + m, None, (-2, -1)), m)
        for x, m in zip(points, moved, strict=True)
    ]
    with norm_sensitivity("within"):
        y = f(*given)
    for i, x in enumerate(given):
        bound = sensitivities(y, x).item()
        found = 0.0
        for _ in range(60):
            near = [
                p + r * F.normalize(torch.randn(12, dtype=F64), dim=0).reshape(p.shape)
                for p, r in zip(points, radii, strict=True)
            ]
            jacobian = torch.autograd.functional.jacobian(
                lambda t, near=near, i=i: f(*near[:i], t, *near[i + 1 :]), near[i], vectorize=True
            )
            found = max(found, torch.linalg.matrix_norm(jacobian.reshape(12, 12), 2).item())
        assert found <= bound * (1 + 1e-6)


def _vertex(size: int, radius: float, reasons: frozenset[torch.Tensor] | None) -> Vertex:
    return Vertex(Root(torch.tensor(radius, dtype=F64), reasons), size, given=Ellipsoid.ball(size, 1.0))


def test_what_moves_with_one_input_moves_at_once():
    """Three vectors of lengths 1, 2 and 3: all in proportion to an input, or each by itself while others rest."""
    a, b = (torch.tensor(1.0, requires_grad=True) for _ in range(2))
    for reasons, reached in (
        ([{a}, {a}, {a}], 1.0),
        ([{a}, {a}, {b}], sum(math.sqrt(r / 6) for r in (1, 2, 3))),
        ([{a}, {a}, None], sum(math.sqrt(r / 6) for r in (1, 2, 3))),
        ([{a, b}] * 3, sum(math.sqrt(r / 6) for r in (1, 2, 3))),
    ):
        parts = [_vertex(4, r, None if s is None else frozenset(s)) for r, s in zip((1.0, 2.0, 3.0), reasons, strict=True)]
        together = Together.of(parts)
        assert together is not None
        assert together.reached.item() == pytest.approx(reached)
        assert together.within(parts).length.item() >= 6 * (1 - 1e-12)


def test_what_is_a_map_of_fewer_entries_is_known_as_that():
    make = torch.Generator().manual_seed(seeded(4))
    first, others = _vertex(3, 1.0, None), torch.randn(5, 3, generator=make, dtype=F64)
    middle = Vertex(first.root, 5, terms=((first, Dense(others)),))
    picks = [Picked(torch.tensor(n)) for n in ([0, -1, -1, 2, -1, 1, 3], [-1, 4, 0, 1, 1, -1, 2])]
    last = Vertex(first.root, 7, terms=tuple((middle, c) for c in picks))
    found = linear_map_of_fewer(last)
    assert found is not None
    base, matrix = found
    assert base is middle
    torch.testing.assert_close(matrix, sum(c.times(torch.eye(5, dtype=F64)) for c in picks))
    bent = Vertex(first.root, 5, terms=((middle, None),), slopes=between(0.0, 1.0, 5))
    of_bent = linear_map_of_fewer(Vertex(first.root, 7, terms=tuple((bent, c) for c in picks)))
    assert of_bent is not None
    assert of_bent[0] is bent
    assert linear_map_of_fewer(bent) is None
