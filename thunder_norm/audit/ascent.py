"""Ascents in balls: Frank-Wolfe steps (the ball's linear maximisation oracle) and projected gradient steps, from many points at once.

A *stack* of points has one more dimension in front, the number of the ascent.  Each ascent goes its own way, as if it were alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from thunder_norm.audit.balls import Ball, lmo

# What is climbed: the values, one for each ascent, at stacks of points; and which of the ascents they are of.
Function = Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]
# Lengths of steps, tried in turn (Frank-Wolfe steps, and of gradients where negative); None moves one ball alone.
_FAR, _NEAR = (None, 1.0), (0.1, -0.3, -0.03)
# An ascent that has a goal goes on while this many times its last gain, in each step that is left, would lead there.
_SPEEDING_UP = 2.0


@dataclass(frozen=True)
class Ascents:
    """Where ascents go: one ball for each stack of points, with a radius for each ascent.

    Attributes:
        balls: in which the points stay.
        radii: for each ball its radius in each ascent.
        alone_first: ascents in which the last ball's point moves alone first, where that helps.
    """

    balls: Sequence[Ball]
    radii: Sequence[torch.Tensor]
    alone_first: torch.Tensor

    def climb(self, f: Function, points: list[torch.Tensor], steps: int, goal: float | None = None) -> float:
        """Largest f found from any of `points`; a value that overflows says nothing.

        With a `goal` an ascent ends where its pace does not lead there.
        """
        value, gradient = _value_and_gradient(f, points, torch.arange(len(self.alone_first)))
        going = value.isfinite().nonzero().flatten()
        best = value[going].max().item() if len(going) else 0.0
        value, points, grads = value[going], [p[going] for p in points], [g[going] for g in gradient()]
        before = torch.zeros(len(self.alone_first), dtype=torch.float64)
        for left in reversed(range(steps)):
            if not len(going):
                break
            before[going] = value
            moved = self._step(f, going, value, points, grads, steps - 1 - left)
            if moved is None:
                break
            going, value, points, grads = moved
            best = max(best, value.max().item())
            if goal is not None:
                near = (value + _SPEEDING_UP * left * (value - before[going]) >= goal).nonzero().flatten()
                going, value, points, grads = going[near], value[near], [p[near] for p in points], [g[near] for g in grads]
        return best

    def _step(
        self,
        f: Function,
        going: torch.Tensor,
        value: torch.Tensor,
        points: list[torch.Tensor],
        grads: list[torch.Tensor],
        step: int,
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]] | None:
        """Each of the ascents goes where the first of the lengths leads that increases its value; the others have ended."""
        moves = [_Moves(b, x, g, r[going]) for b, x, g, r in zip(self.balls, points, grads, self.radii, strict=True)]
        waiting, gone = torch.arange(len(going)), []
        for gamma in (*_FAR, 2 / (step + 2), *_NEAR):
            trying = waiting[self.alone_first[going[waiting]]] if gamma is None else waiting
            if not len(trying):
                continue
            if gamma is None:
                moved = [*(x[trying] for x in points[:-1]), moves[-1](1.0, trying)]
            else:
                moved = [move(gamma, trying) for move in moves]
            new_value, gradient = _value_and_gradient(f, moved, going[trying])
            better = new_value.isfinite() & (new_value > value[trying] * (1 + 1e-9))
            if better.any():
                gone.append((trying[better], new_value[better], [m[better] for m in moved], [g[better] for g in gradient()]))
                left = torch.ones(len(going), dtype=torch.bool)
                left[torch.cat([which for which, *_ in gone])] = False
                waiting = waiting[left[waiting]]
        if not gone:
            return None
        which, values, moved, new_grads = zip(*gone, strict=True)
        together = [[torch.cat(several) for several in zip(*stacks, strict=True)] for stacks in (moved, new_grads)]
        return going[torch.cat(which)], torch.cat(values), *together


class _Moves:
    """Frank-Wolfe steps from `x` (gamma > 0, at most 1) and projected gradient steps of relative length -gamma."""

    def __init__(self, ball: Ball, x: torch.Tensor, g: torch.Tensor, radii: torch.Tensor):
        self.ball, self.x, self.g = ball, x, g
        self.radii = _as_factors(radii, x)
        self.largest = _as_factors(g.abs().reshape(len(g), -1).amax(1) if g.numel() else radii * 0, x)
        self.furthest: torch.Tensor | None = None

    def __call__(self, gamma: float, which: torch.Tensor) -> torch.Tensor:
        x, largest = self.x[which], self.largest[which]
        if gamma < 0:
            direction = self.g[which] / torch.where(largest > 0, largest, 1.0)
            moved = self.ball.point(x - gamma * self.radii[which] * direction, self.radii[which], stacked=True)
        else:
            if self.furthest is None:
                self.furthest = self.radii * lmo(self.ball.kind, self.g, self.ball.dims, stacked=True)
            moved = self.ball.allowed(torch.lerp(x, self.furthest[which], gamma), stacked=True)  # in the ball, which is convex
        return torch.where(largest > 0, moved, x)


def _as_factors(numbers: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return numbers.reshape(-1, *[1] * (t.ndim - 1))


def _value_and_gradient(
    f: Function, points: list[torch.Tensor], which: torch.Tensor
) -> tuple[torch.Tensor, Callable[[], list[torch.Tensor]]]:
    """The values, and how to get their gradients: most points that are tried are not gone to."""
    leaves = [p.detach().contiguous().requires_grad_() for p in points]
    try:
        value = f(leaves, which)
    except RuntimeError as e:
        if not _has_no_derivative(e):
            raise
        return f([p.detach() for p in points], which), lambda: [torch.zeros_like(p) for p in points]

    def gradient() -> list[torch.Tensor]:
        if not value.requires_grad:
            return [torch.zeros_like(p) for p in leaves]
        try:
            grads = torch.autograd.grad(value, leaves, torch.ones_like(value), allow_unused=True)
        except RuntimeError as e:
            if not _has_no_derivative(e):
                raise
            return [torch.zeros_like(p) for p in points]  # the starting points alone
        return [torch.zeros_like(p) if g is None else torch.nan_to_num(g) for g, p in zip(grads, leaves, strict=True)]

    return value.detach(), gradient


def _has_no_derivative(error: RuntimeError) -> bool:
    """Whether torch says so of an operation, or has none at these matrices."""
    return isinstance(error, torch.linalg.LinAlgError) or any(
        word in str(error) for word in ("derivative", "autograd formula", "eigenvectors")
    )
