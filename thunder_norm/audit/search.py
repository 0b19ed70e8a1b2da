"""An adversary for norm rules, independent of the library's own norms.

A rule claims two things: ``|f(X)| <= V`` for all inputs in their balls, and ``|f(X + U) - f(X)| <= L_i |U|`` when input i
moves by U inside its ball.  `search` looks for inputs that break either claim, in float64: it starts from Gaussians, signs,
spikes and constants, and ascends with Frank-Wolfe steps (the ball's linear maximisation oracle) and gradient steps.
The slope along U is a quotient of differences, and its ascent in U with the oracle is a power iteration on the Jacobian.
Found / claimed is what comes back: a rule is sound if no ratio exceeds 1, and tight where the ratio reaches 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_norm.audit.ascent import Ascents
from thunder_norm.audit.balls import Ball, corners, norms, start
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import LooseRuleError, UnsoundRuleError

# What a search may find above a claim: nothing but rounding, which the slopes allow for themselves.
SOUND = 1 + 1e-6
# The relative half step of central differences.  Both ends stay in the ball, where a finite difference is bounded by the
# sensitivity as well: so a larger step costs no soundness, and a smaller one only what rounding may add.
_STEP = 1e-6
_HUGE = 1e100
# How often `check` searches, from other starts each time, before it calls a claim loose.
_ROUNDS = 12
# Shown in full, but for what differences cost.
_SHOWN = 1 - 1e-8
# What rounding may add to a difference of two results, relative to what they are made of: torch's Bessel functions err by four
# units in the last place, on either side.
_ROUNDING = 8 * torch.finfo(torch.float64).eps


@dataclass
class Found:
    """What `search` found, as found / claimed; NaN where the claim is beyond what can be searched.

    Attributes:
        value: of the norm of the result.
        sensitivity: of the sensitivity to each argument, by its name.
    """

    value: float
    sensitivity: dict[str, float] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether nothing found exceeds what was claimed."""
        return not any(r > SOUND for r in self._ratios)

    @property
    def lowest(self) -> float:
        """The loosest claim."""
        return min((r for r in self._ratios if not math.isnan(r)), default=1.0)

    @property
    def _ratios(self) -> tuple[float, ...]:
        return (self.value, *self.sensitivity.values())


@dataclass(frozen=True, eq=False)
class Witness:
    """Inputs, given by a formula, at which claims are attained: no search has to find them.

    Attributes:
        points: one tensor for each ball.  A tensor outside its ball is projected onto it.
        moves: for each ball the direction, of any length, in which its tensor is moved to show the sensitivity; None is the
            direction of its own point.
    """

    points: Sequence[torch.Tensor]
    moves: Sequence[torch.Tensor | None] | None = None

    def inside(self, balls: Sequence[Ball], radii: Sequence[float]) -> list[torch.Tensor]:
        """The points in the balls of these radii."""
        return [b.point(p.double(), r) for b, p, r in zip(balls, self.points, radii, strict=True)]

    def move(self, ball: Ball, k: int) -> torch.Tensor:
        """The direction in which ball number k is moved, of norm 1 (0 stays 0)."""
        given = None if self.moves is None else self.moves[k]
        u = (self.points[k] if given is None else given).double().expand(ball.shape)
        return u / ball.norm(u).clamp(min=1e-30)


# -- the searches -------------------------------------------------------------------------------------------------------


def search(
    call: Callable[..., torch.Tensor],
    balls: Sequence[Ball],
    *,
    restarts: int = 8,
    steps: int = 25,
    seed: int = 0,
    witnesses: Sequence[Witness | Sequence[torch.Tensor]] = (),
    sensitivity: bool = True,
    only: Sequence[str] | None = None,
    rounding: float = _ROUNDING,
) -> Found:
    """Search for the largest output norm and the largest sensitivities of ``call(*inputs)``, relative to what its rule claims.

    Args:
        call: the operation; called with one tensor for each ball, NormedTensor (to learn the claim) or plain float64.
        balls: the normed inputs, in the order of `call`'s arguments.
        restarts: number of starting points for each quantity.
        steps: most ascent steps from each.
        seed: of the starting points.
        witnesses: tried first, and starting points as well; tensors alone, one for each ball, are the points of a `Witness`.
        sensitivity: whether to search sensitivities as well.
        only: names of the balls whose sensitivity to search; all if None.
        rounding: relative error of the operation, more where its kernel cancels.
    """
    searching = _Searching(call, balls, steps, seed, sensitivity, only, rounding)
    searching.go_on(restarts, _as_witnesses(witnesses))
    return searching.found


def check(
    call: Callable[..., torch.Tensor], balls: Sequence[Ball], *, tight: float = 0.99, restarts: int = 8, **options: Any
) -> Found:
    """`search`, and insist that nothing exceeds the claim and that everything reaches `tight` of it.

    What reaches it is shown first by formulas: the witnesses given and the corners of the balls, which need no search.  Where they
    do not, a search does, from `restarts` starting points up to 12 times: one point shows that a bound is attained, whichever
    start leads there, and whether it is found is not to hang on a single path, which rounding changes.  Where they do, one search
    from `restarts` points asks whether anything exceeds the claim, and leaves the ascents whose pace does not lead there.

    Raises:
        UnsoundRuleError: a claim is too small.
        LooseRuleError: a claim is further from what was found than `tight` says.
    """
    witnesses = _as_witnesses(options.pop("witnesses", ()))
    searching = _Searching(call, balls, **{"steps": 25, "seed": 0, "sensitivity": True, "only": None, **options})
    searching.evaluate(witnesses, enough=tight)
    for _ in range(_ROUNDS):
        searching.go_on(restarts, witnesses, below=tight)
        found = searching.found
        if not found.is_sound:
            raise UnsoundRuleError(f"unsound: found / claimed = {found}", found)
        if found.lowest >= tight:
            return found
    raise LooseRuleError(f"not attained to {tight}: found / claimed = {found}", found)


def evaluate(
    call: Callable[..., torch.Tensor],
    balls: Sequence[Ball],
    *,
    witnesses: Sequence[Witness | Sequence[torch.Tensor]] = (),
    sensitivity: bool = True,
    only: Sequence[str] | None = None,
) -> Found:
    """What formulas alone show of the claims: at the witnesses and at the corners of the balls, without a search."""
    searching = _Searching(call, balls, 0, 0, sensitivity, only)
    searching.evaluate(_as_witnesses(witnesses))
    return searching.found


def _as_witnesses(given: Sequence[Witness | Sequence[torch.Tensor]]) -> list[Witness]:
    return [w if isinstance(w, Witness) else Witness(w) for w in given]


class _Searching:
    """A search that can go on: the claims, and the largest output norm and slopes found so far."""

    def __init__(
        self,
        call: Callable,
        balls: Sequence[Ball],
        steps: int,
        seed: int,
        sensitivity: bool,
        only: Sequence[str] | None,
        rounding: float = _ROUNDING,
    ):
        self.call, self.balls, self.steps, self.rounding = call, balls, steps, rounding
        self.generator = torch.Generator().manual_seed(seed)
        self.claimed = _claims(call, balls, self.generator, sensitivity)
        self.moved = [k for k, b in enumerate(balls) if sensitivity and (only is None or b.name in only)]
        self.restarts = 0
        self.value, self.slopes = 0.0, dict.fromkeys(self.moved, 0.0)

    @property
    def found(self) -> Found:
        """What was found, relative to the claims."""
        return Found(self._value_ratio(), {self.balls[k].name: self._slope_ratio(k) for k in self.moved})

    def _value_ratio(self) -> float:
        return _ratio(self.value, self.claimed["value"])

    def _slope_ratio(self, k: int) -> float:
        return _ratio(self.slopes[k], self.claimed["sensitivity"][k])

    # -- by formulas --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, witnesses: Sequence[Witness], enough: float = 1.0) -> None:
        """Take in the witnesses and the corners of the balls, until that much of a claim is shown."""
        enough = min(enough, _SHOWN)
        radii = [b.norm_size for b in self.balls]
        for witness in (*witnesses, *_corner_witnesses(self.balls)):
            if self._value_ratio() >= enough:
                break
            points = [x.unsqueeze(0) for x in witness.inside(self.balls, radii)]
            self.value = _larger(self.value, self._out_norms(self._called(points)).item())
        for k, ball in enumerate(self.balls):
            if k not in self.moved:
                continue
            h, radii = self._half_step(k, _STEP)
            slope, directions = self._slope(k, torch.tensor([h], dtype=torch.float64)), corners(ball)
            for witness in (*witnesses, *_corner_witnesses(self.balls, alone=k)):
                points = witness.inside(self.balls, radii)
                for u in [witness.move(ball, k), *([] if witness in witnesses else directions)]:
                    if self._slope_ratio(k) < enough:
                        stacks = [x.unsqueeze(0) for x in (*points, u)]
                        self.slopes[k] = _larger(self.slopes[k], slope(stacks, torch.zeros(1, dtype=torch.int64)).item())

    # -- by ascents ---------------------------------------------------------------------------------------------------------

    def go_on(self, restarts: int, witnesses: Sequence[Witness], below: float = math.inf) -> None:
        """Search the quantities of which less than `below` is found, and all of them the first time, from further starts.

        The witnesses count among the starting points of the first time.  Of what is found already, a search asks whether something
        exceeds the claim: an ascent whose pace does not lead there ends.
        """
        first = self.restarts
        starts = range(first, first + restarts) if first else range(restarts + len(witnesses))
        self.restarts = starts.stop
        if first == 0 or self._value_ratio() < below:
            goal = SOUND * self.claimed["value"] if self._value_ratio() >= below else None
            self.value = max(self.value, self._largest_value(starts, witnesses, goal))
        for k in self.moved:
            if first == 0 or self._slope_ratio(k) < below:
                goal = SOUND * self.claimed["sensitivity"][k] if self._slope_ratio(k) >= below else None
                self.slopes[k] = max(self.slopes[k], self._largest_slope(k, starts, witnesses, goal))

    def _largest_value(self, starts: Sequence[int], witnesses: Sequence[Witness], goal: float | None) -> float:
        radii = [b.norm_size for b in self.balls]
        points = []
        for restart in starts:
            if restart < len(witnesses):
                points.append(witnesses[restart].inside(self.balls, radii))
            else:
                points.append(self._start([_sort(restart, j) for j in range(len(self.balls))], radii, radii))
        ascents = Ascents(self.balls, _stacked_radii([radii] * len(points)), torch.zeros(len(points), dtype=torch.bool))
        return ascents.climb(lambda points, which: self._norms_at(points), _stacked(points), self.steps, goal)

    def _largest_slope(self, k: int, starts: Sequence[int], witnesses: Sequence[Witness], goal: float | None) -> float:
        """Largest ``|f(X + h u) - f(X - h u)| / (2 h)`` over X and unit u, for a small or a large h."""
        ball = self.balls[k]
        points, radii, steps, alone_first = [], [], [], []
        for restart in starts:
            witness = witnesses[restart] if restart < len(witnesses) else None
            # a large h makes it a secant between two far points
            h, inside = self._half_step(k, _STEP if witness else (_STEP, _STEP, _STEP, 0.3, 1.0)[restart % 5])
            if witness:
                at = witness.inside(self.balls, inside)
            else:
                i = restart - len(witnesses)
                # many constants are largest near zero, or where nothing has saturated yet
                shrink = (1.0, 1.0, 1e-3, 0.3)[i % 4]
                sizes = [r * (shrink if j == k else 1.0) for j, r in enumerate(inside)]
                at = self._start([_sort(i, j) for j in range(len(self.balls))], sizes, inside)
            directions = [start(ball, restart + restart // 3, self.generator), *([witness.move(ball, k)] if witness else [])]
            points += [[*at, u] for u in directions]
            radii += [[*inside, 1.0]] * len(directions)
            steps += [h] * len(directions)
            alone_first += [restart % 2 == 0] * len(directions)
        ascents = Ascents([*self.balls, _directions(ball)], _stacked_radii(radii), torch.tensor(alone_first))
        return ascents.climb(self._slope(k, torch.tensor(steps, dtype=torch.float64)), _stacked(points), self.steps, goal)

    def _start(self, sorts: Sequence[int], sizes: Sequence[float], radii: Sequence[float]) -> list[torch.Tensor]:
        """A starting point of each ball's, of these sorts and sizes, in the balls of these radii."""
        several = zip(self.balls, sorts, sizes, radii, strict=True)
        return [b.point(start(b, sort, self.generator) * size, r) for b, sort, size, r in several]

    # -- both ---------------------------------------------------------------------------------------------------------------

    def _called(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The operation's results at stacks of inputs: called once for each, with tensors that share no memory."""
        return torch.stack(self._results(inputs))

    def _results(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [_doubled(self.call(*[x.clone() for x in one])) for one in zip(*[x.unbind() for x in inputs], strict=True)]

    def _norms_at(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norms of the operation's results, whose shapes may depend on values (distinct rows)."""
        results = self._results(inputs)
        if all(r.shape == results[0].shape for r in results):
            return self._out_norms(torch.stack(results))
        return torch.cat([self._out_norms(r.unsqueeze(0)) for r in results])

    def _out_norms(self, t: torch.Tensor) -> torch.Tensor:
        return norms(type(self.claimed["out"]), t, self.claimed["out"].elem_dims)

    def _half_step(self, k: int, relative: float) -> tuple[float, list[float]]:
        """The length h of a half step of input k, and radii for which X + h u and X - h u are both in the ball."""
        h = relative * self.balls[k].norm_size or _STEP
        return h, [max(b.norm_size - h, 0.0) if j == k else b.norm_size for j, b in enumerate(self.balls)]

    def _slope(self, k: int, h: torch.Tensor) -> Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]:
        """The slopes at stacks of inputs X along the last one of its arguments, with half steps `h`, of which some are asked for."""
        # what rounding of inputs and of results may add to a difference, whatever cancels on the way
        carried = sum(c * b.norm_size for c, b in zip(self.claimed["sensitivity"], self.balls, strict=True))
        rounding = self.rounding * (self.claimed["value"] + carried)
        directions = _directions(self.balls[k])

        def slope(inputs: list[torch.Tensor], which: torch.Tensor) -> torch.Tensor:
            *xs, u = inputs
            x, size = xs[k], norms(directions.kind, u, directions.dims).clamp(min=1e-12)
            move = h[which].reshape(-1, *[1] * (u.ndim - 1)) * u
            end, begin = (self._called([*xs[:k], x + s * move, *xs[k + 1 :]]) for s in (1, -1))
            return (self._out_norms(end - begin) - rounding) / (2 * h[which] * size)

        return slope


def _stacked(points: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack([p.double() for p in several]) for several in zip(*points, strict=True)]


def _stacked_radii(radii: Sequence[Sequence[float]]) -> list[torch.Tensor]:
    return [torch.tensor(several, dtype=torch.float64) for several in zip(*radii, strict=True)]


def _doubled(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.complex128) if t.is_complex() else t.double()


def _directions(ball: Ball) -> Ball:
    return Ball("direction", ball.kind, ball.shape, 1.0, ball.elem_dims)


def _corner_witnesses(balls: Sequence[Ball], alone: int | None = None) -> Iterator[Witness]:
    """The same corner of each ball, with all signs; `alone` near 0, where many slopes are largest; another corner of the first."""
    several = [corners(b) for b in balls]
    most, flipped = max(map(len, several)), min(len(balls), 3)
    plans = [(0, 1.0, signs) for signs in itertools.product((1.0, -1.0), repeat=flipped)]
    plans += [(0, 1e-3, (1.0,))] if alone is not None else []
    plans += [(other, 1.0, (sign,)) for other in (1, 2) for sign in (1.0, -1.0)] if len(balls) > 1 else []
    for (other, near, signs), which in itertools.product(plans, range(most)):
        points = []
        for j, (b, c) in enumerate(zip(balls, several, strict=True)):
            size = b.norm_size * (signs[j] if j < len(signs) else 1.0) * (near if j == alone else 1.0)
            points.append(c[(which + other * (j == 0)) % len(c)] * size)
        yield Witness(points)


def _claims(call: Callable, balls: Sequence[Ball], generator: torch.Generator, sensitivity: bool) -> dict:
    points = [b.point(start(b, 0, generator) * b.norm_size, b.norm_size) for b in balls]
    out = call(*[b.normed(p) for b, p in zip(balls, points, strict=True)])
    if not isinstance(out, NormedTensor):
        raise TypeError(f"the operation returned {type(out).__name__}, no norm")
    constants = []
    for i in range(len(balls) if sensitivity else 0):
        moved = call(*[b.normed(p, 1.0 if i == j else None) for j, (b, p) in enumerate(zip(balls, points, strict=True))])
        constants.append(0.0 if moved.perturbation_size is None else moved.perturbation_size.item())
    return {"out": out, "value": out.norm_size.item(), "sensitivity": constants}


def _larger(a: float, b: float) -> float:
    """The larger one; a result that overflows, or is none, says nothing."""
    return max(a, b) if math.isfinite(b) else a


def _ratio(found: float, claimed: float) -> float:
    if claimed > _HUGE:  # its square is not a number any more
        return math.nan
    if claimed == 0:
        return 1.0 if found < 1e-12 else math.inf
    return found / claimed


def _sort(restart: int, argument: int) -> int:
    """Which sort of start: the same for all arguments first, then mixed."""
    return restart if restart < 4 else restart + argument * (restart // 4)
