"""How results move near the data where they are curved: softmax, products of what moves; `movements_of_attention` and `movements_of_normalizations` go on.

Inside ``norm_sensitivity("within")`` such a result y = f(x) of one sample moves by ``J d``, J its Jacobian at the data, exactly known, and by
``(J(z) - J) d`` for points z within the distance, a *remainder* that is no longer than the second derivative's bound there, times the
distance, times |d|.  What goes by J keeps its ellipsoid, together with what it is added to; the remainder may have any direction.  At
radius 0 there is none, and as the distance grows the norm rule says more, which has one constant for all points near the data.
Of movements away from the data alone (`from_data`) the remainder is half as long: ``f(x + d) = f(x) + J d + int (1 - t) D^2 f(x + t d)[d, d] dt``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from thunder_norm.core.composed import Call, Made, Spread, Term, is_fixed, moves, spread_of, values
from thunder_norm.core.ellipsoids import Dense, Ellipsoid, sum_of
from thunder_norm.core.local import from_data, is_from_data, is_within
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.core.vertices import LARGEST, Root, Vertex, all_reasons
from thunder_norm.core.within import away_from_data, moved
from thunder_norm.rules._shared import dims_tuple
from thunder_norm.trees import flat_tensors, map_tensors

Found = Sequence[Made | None] | None
# An operation, given what takes an argument to a plain tensor.
Function = Callable[[Callable[[Any], Any]], torch.Tensor]


def one_sample(call: Call, tensors: Sequence[Any]) -> list[NormedTensor] | None:
    """The arguments that move, if they are among `tensors`, each is one row of features, and all other normed ones are fixed."""
    moving = call.moving
    given = {id(t) for t in tensors}
    others = [t for t in flat_tensors((call.args, call.kwargs)) if not is_fixed(t) and not moves(t)]
    if not is_within() or others or not moving or any(id(x) not in given for x in moving):
        return None
    spreads = [spread_of(x) for x in moving]
    if any(s is None or s.parts[0].size != x.numel() for s, x in zip(spreads, moving, strict=True)):
        return None
    return moving


def near(x: Any) -> Spread:
    """How one of these moves."""
    spread = spread_of(x)
    assert spread is not None, "`one_sample` has looked"
    return spread


# The share of what does not move but might (parameters of a report), in what moves at once; and that of what moves so little that the
# squares of its numbers are none.
_AT_REST, _NEARLY_AT_REST = 1e-3, 1e-100


@dataclass(frozen=True, eq=False)
class Together:
    """How what moves for several reasons moves at once.

    Attributes:
        sizes: of each root; of one that does not move, but might, some that is small.
        shares: c_r of each root r, which add up to 1: what moves by all of them is in the ellipsoid of ``sum_r P_r / c_r``, and by one alone in
            ``c_r^(1/2)`` times that.
        is_at_once: whether what moves moves at once, as far as it does: away from the data, and where it moves with one leaf, in proportion.  Between any
            two points they may move one after the other otherwise.
        reached: how much of it they reach: 1 where they move at once.
    """

    sizes: dict[Root, float]
    shares: dict[Root, float]
    is_at_once: bool
    reached: torch.Tensor

    @classmethod
    def of(cls, parts: Sequence[Vertex]) -> Together | None:
        """Of these parts of what moves; None where none does, or further than there are numbers."""
        sizes = {v.root: v.root.size.detach().item() for v in parts}
        lengths: dict[Root, float] = dict.fromkeys(sizes, 0.0)
        for v in parts:
            lengths[v.root] += v.ellipsoid.length.item()
        total = sum(n * sizes[r] for r, n in lengths.items())
        if not 0 < total < math.inf or not all(0 < n < math.inf for n in lengths.values()):
            return None
        resting = [r for r, n in sizes.items() if lengths[r] * n <= _NEARLY_AT_REST * total]
        shares = {r: n * sizes[r] / total * (1 - _AT_REST * len(resting)) for r, n in lengths.items()}
        shares.update(dict.fromkeys(resting, _AT_REST))
        sizes.update({r: _AT_REST * total / lengths[r] for r in resting})
        reasons = all_reasons(r for r in sizes if r not in resting)
        is_at_once = is_from_data() or reasons is not None and len(reasons) == 1
        moving = 1 - _AT_REST * len(resting)
        factors = {r: c / moving if is_at_once and r not in resting else math.sqrt(c) for r, c in shares.items()}
        reached = functools.reduce(torch.add, (r.size * (f / sizes[r]) for r, f in factors.items()))
        return cls(sizes, shares, is_at_once and not resting, reached)

    def within(self, parts: Sequence[Vertex]) -> Ellipsoid:
        """An ellipsoid that all of a movement is in."""
        found = [(v.ellipsoid.times(self.sizes[v.root]), self.shares[v.root]) for v in parts]
        if self.is_at_once or is_from_data() or len(self.shares) == 1:
            return functools.reduce(sum_of, (e for e, _ in found))
        scale = max(e.scale for e, _ in found)
        if not scale:  # what it is wanted for does not move with any of them: the scores of a single key
            return found[0][0]
        return Ellipsoid.of(functools.reduce(torch.add, (e.cov * ((e.scale / scale) ** 2 / c) for e, c in found)), scale)


def as_points(x: Any) -> Any:
    """x as points near the data move away from it, which is less than two of them are apart: the same features."""
    if not moves(x) or x._away is None:
        return x
    spread = spread_of(x._away)
    return x._away if spread is not None and spread.ndim == near(x).ndim else x


def points_near(*tensors: NormedTensor) -> tuple[Ellipsoid, ...] | None:
    """Ellipsoids of all that these are away from the data; None where that is not known by numbers."""
    spreads = [away_from_data(x, near(x)) for x in tensors]
    with from_data():
        by = Together.of([v for s in spreads for v in s.parts])
        return None if by is None else tuple(by.within(s.parts) for s in spreads)


def linear(moving: Sequence[NormedTensor], f: Function) -> tuple[Term, ...] | None:
    """The Jacobian of f at the data, of at most as many results as a row may have; None if it has no derivative there."""
    at = {id(x): values(x.backing.detach()).clone().requires_grad_() for x in moving}

    def plain(t: Any) -> Any:
        if id(t) in at:
            return at[id(t)]
        return values(t.detach()) if isinstance(t, torch.Tensor) and t.is_floating_point() else t

    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        out = f(plain).reshape(-1)
        if len(out) > LARGEST:
            return None
        units = torch.eye(len(out), dtype=out.dtype)
        rows = torch.autograd.grad(out, list(at.values()), units, is_grads_batched=True, materialize_grads=True)
    matrices = [r.reshape(len(out), -1) for r in rows]
    if not all(bool(m.isfinite().all()) for m in matrices):
        return None
    return tuple(Term(x, Dense(m)) for x, m in zip(moving, matrices, strict=True))


def by_jacobian(call: Call, moving: Sequence[NormedTensor], f: Function, besides: torch.Tensor) -> Found:
    """The Jacobian at the data, and a remainder of any direction, `besides` for any two points near the data."""
    if not bool(besides.isfinite()):
        return None
    return made_of(call, moving, f, [(Ellipsoid.ball(call.results[0].numel(), 0.5 if is_from_data() else 1.0), besides)])


def made_of(call: Call, moving: Sequence[NormedTensor], f: Function, besides: Sequence[tuple[Ellipsoid, torch.Tensor]]) -> Found:
    """The derivative of f at the data, and what there is besides."""
    y = call.results[0]
    batch = min(x.ndim - near(x).ndim for x in moving)
    if any(n != 1 for n in y.shape[:batch]):
        return None
    terms = linear(moving, f)
    return None if terms is None else [Made(y.ndim - batch, terms, tuple(besides)), *[None] * (len(call.results) - 1)]


def groups_of(x: NormedTensor, dims: Sequence[int]) -> torch.Tensor:
    """The features of each group, by their numbers: over `dims`, negative."""
    numbers = torch.arange(x.numel()).reshape(x.shape).movedim(tuple(dims), tuple(range(-len(dims), 0)))
    return numbers.reshape(-1, math.prod(x.shape[d] for d in dims))


# -- softmax --------------------------------------------------------------------------------------------------------------


@normed_op(F.softmax).register_movement
@normed_op(torch.ops.aten._softmax.default).register_movement
def softmax(call: Call) -> Found:
    """Its second derivative is ``p ((a - E a)(b - E b) - Cov(a, b))``, of length ``2 (Var a Var b)^(1/2) <= min(1, 2 max p) |a| |b|``."""
    return _of_logits(call, torch.softmax, lambda count, largest: min(1.0, 2 * largest))


@normed_op(F.log_softmax).register_movement
@normed_op(torch.ops.aten._log_softmax.default).register_movement
def log_softmax(call: Call) -> Found:
    """Its second derivative is ``-Cov(a, b)`` in each of n entries, of length ``n^(1/2) (Var a Var b)^(1/2) <= n^(1/2) min(1/2, max p) |a| |b|``."""
    return _of_logits(call, torch.log_softmax, lambda count, largest: math.sqrt(count) * min(0.5, largest))


@normed_op(torch.logsumexp).register_movement
def logsumexp(call: Call) -> Found:
    """Its second derivative is ``Cov(a, b)``, at most ``min(1/2, max p) |a| |b|``."""
    keepdim = call.given.get("keepdim", False)
    return _of_logits(call, lambda t, dim: torch.logsumexp(t, dim, keepdim), lambda count, largest: min(0.5, largest))


def _of_logits(call: Call, f: Callable[..., torch.Tensor], curvature: Callable[[int, float], float]) -> Found:
    """`f` over some dimensions of logits, its second derivative bounded given their number and the largest weight there may be."""
    x = call.given["input"]
    moving = one_sample(call, [x])
    if moving is None or not x.ndim:
        return None
    groups = groups_of(x, dims_tuple(call.given["dim"], x.ndim))
    r = moved(away_from_data(x, near(x)), groups).detach().item()
    # of two logits the difference moves by at most sqrt(2) r
    largest = values(x.backing.detach()).flatten()[groups].softmax(-1).amax().item() * math.exp(min(math.sqrt(2) * r, 700.0))
    besides = curvature(groups.shape[1], largest) * r * moved(near(x))
    return by_jacobian(call, moving, lambda plain: f(plain(x), call.given["dim"]), besides)


# -- deviations -----------------------------------------------------------------------------------------------------------


@normed_op(torch.var).register_movement
def var(call: Call) -> Found:
    """``|P x|^2 / (n - c)``, P x less its mean, c the correction: its second derivative is at most ``2 |a| |b| / (n - c)``."""
    return _of_deviations(call, lambda r, shortest, count: 2 * r / count)


@normed_op(torch.std).register_movement
def std(call: Call) -> Found:
    """The root of that: at most ``|a| |b| / (|P x| (n - c)^(1/2))``, P x at least as long as at the data less how far it moves."""
    return _of_deviations(
        call, lambda r, shortest, count: r / ((shortest - r) * math.sqrt(count)) if shortest > r * (1 + 1e-9) else math.inf
    )


def _of_deviations(call: Call, change: Callable[[float, float, float], float]) -> Found:
    """`change` is how much a group's derivative changes, given how far it moves, the shortest ``|P x|`` at the data, and ``n - c``."""
    x, dim = call.given["input"], call.given.get("dim")
    moving = one_sample(call, [x])
    if moving is None or not x.ndim:
        return None
    is_flag = isinstance(dim, bool)  # var(x, unbiased)
    correction = call.given.get("correction", dim if is_flag else call.given.get("unbiased", 1))
    groups = groups_of(x, dims_tuple(None if is_flag else dim, x.ndim))
    count = groups.shape[1] - float(1 if correction is None else correction)
    if not count > 0:
        return None
    at = values(x.backing.detach()).flatten()[groups]
    shortest = (at - at.mean(-1, keepdim=True)).square().sum(-1).sqrt().amin().item()
    r = moved(away_from_data(x, near(x)), groups).detach().item()
    besides = change(r, shortest, count) * (1 + 1e-9) * moved(near(x))
    return by_jacobian(call, moving, lambda plain: call.run(*map_tensors(plain, (call.args, call.kwargs))), besides)


# -- products of what moves -----------------------------------------------------------------------------------------------


def bilinear(
    call: Call, a: Any, b: Any, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul, longer: float = 1.0
) -> Found:
    """A product of two tensors that both move, no longer than `longer` times both lengths: of matrices it is 1 (Cauchy-Schwarz).

    Its derivative changes by ``e_a d_b + d_a e_b`` for moves e of the point: by ``|e_a| |d_b| + |d_a| |e_b|`` at most.
    """
    moving = one_sample(call, [a, b])
    if moving is None or not (moves(a) and moves(b)):
        return None
    at_a, at_b = (moved(away_from_data(x, near(x))).detach() for x in (a, b))
    besides = (at_a * moved(near(b)) + at_b * moved(near(a))) * longer
    return by_jacobian(call, moving, lambda plain: product(plain(a), plain(b)), besides)


def entrywise(call: Call, a: Any, b: Any) -> Found:
    """The same entry by entry: ``e_a d_b + d_a e_b``, or ``d_a d_b`` of moves away from the data alone.

    With ``e_a = A u`` and ``d_b = B w``, u and w of at most unit length, ``e_a d_b`` is linear in ``u w^T``: in the ellipsoid of ``A A^T o B B^T``, entry by
    entry; of e it is that of moves away from the data, which is less than that of two points.  Broadcast, an entry is there as often as it is used.
    """
    moving = one_sample(call, [a, b])
    if moving is None or not (moves(a) and moves(b)):
        return None
    (y,) = call.results

    def run(plain: Callable[[Any], Any]) -> torch.Tensor:
        return plain(a) * plain(b)

    entries = [moved(away_from_data(x, near(x)), torch.arange(x.numel())[:, None]).detach() for x in (a, b)]
    lengths = [moved(near(x)) * math.sqrt(y.numel() / x.numel()) for x in (a, b)]
    besides = entries[0] * lengths[1] + entries[1] * lengths[0]
    by = Together.of([v for x in moving for v in near(x).parts])
    if by is None or y.numel() > LARGEST:
        return by_jacobian(call, moving, run, besides)
    index = [torch.arange(x.numel()).reshape(x.shape).expand(y.shape).flatten() for x in (a, b)]

    def product(of_a: Ellipsoid, of_b: Ellipsoid) -> Ellipsoid:
        cov = of_a.cov.detach()[index[0]][:, index[0]] * of_b.cov.detach()[index[1]][:, index[1]]
        return Ellipsoid.of(cov + torch.diag(1e-12 * cov.diagonal()), of_a.scale * of_b.scale)

    of_a, of_b = (by.within(near(x).parts) for x in (a, b))
    if is_from_data():
        of_both = product(of_a, of_b)
    else:
        at_a, at_b = points_near(a, b) or (of_a, of_b)
        of_both = sum_of(product(at_a, of_b), product(of_a, at_b))
    if not of_both.length.item() * by.reached.item() <= besides.item() * (0.5 if is_from_data() else 1.0) * (1 + 1e-9):
        return by_jacobian(call, moving, run, besides)
    return made_of(call, moving, run, [(of_both, by.reached)])


def glu(call: Call) -> Found:
    """``a sigmoid(b)``: its second derivative is ``s'(b) (e_a d_b + d_a e_b) + a s''(b) e_b d_b``, of entries ``|s'| <= 1/4``, ``|s''| <= 3^(1/2) / 18``."""
    x, dim = call.given["input"], call.given.get("dim", -1)
    moving = one_sample(call, [x])
    if moving is None or not isinstance(dim, int) or not x.ndim:
        return None
    dim = dim - x.ndim if dim >= 0 else dim
    first, second = torch.arange(x.numel()).reshape(x.shape).chunk(2, dim)
    r = moved(away_from_data(x, near(x)), torch.stack([first.flatten(), second.flatten()], 1)).detach().item()
    largest = values(x.backing.detach()).chunk(2, dim)[0].abs().amax().item() + r
    rate = (0.25 + largest * math.sqrt(3) / 18) * (1 + 1e-9)
    return by_jacobian(call, moving, lambda plain: F.glu(plain(x), dim), rate * r * moved(near(x)))
