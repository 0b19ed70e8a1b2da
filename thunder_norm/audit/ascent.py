"""Ascents in balls: Frank-Wolfe steps (the ball's linear maximisation oracle) and projected gradient steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from thunder_norm.audit.balls import Ball, lmo


def ascend(
    f: Callable, points: list[torch.Tensor], balls: Sequence[Ball], radii: list[float], steps: int, first: int | None = None
) -> float:
    """Largest f found from `points` by Frank-Wolfe and gradient steps that stay in the balls; `first` moves alone first."""
    value, gradient = _value_and_gradient(f, points)
    if not math.isfinite(value):
        return 0.0
    grads = gradient()
    for step in range(steps):
        moves = [_moves(b, x, g, r) for b, x, g, r in zip(balls, points, grads, radii, strict=True)]
        for gamma in (None, 1.0, 2 / (step + 2), 0.1, -0.3, -0.03):
            if gamma is None and first is None:
                continue
            moved = [
                move(1.0 if gamma is None else gamma) if gamma is not None or i == first else x
                for i, (move, x) in enumerate(zip(moves, points, strict=True))
            ]
            new_value, gradient = _value_and_gradient(f, moved)
            # a result that overflows says nothing
            if math.inf > new_value > value * (1 + 1e-9):
                break
        else:
            break
        points, value, grads = moved, new_value, gradient()
    return value


def _moves(ball: Ball, x: torch.Tensor, g: torch.Tensor, radius: float) -> Callable[[float], torch.Tensor]:
    """Frank-Wolfe steps from `x` (gamma > 0, at most 1) and projected gradient steps of relative length -gamma."""
    largest = g.abs().max()
    if not largest > 0:
        return lambda gamma: x
    furthest: list[torch.Tensor] = []

    def move(gamma: float) -> torch.Tensor:
        if gamma < 0:
            return ball.point(x - gamma * radius * g / largest, radius)
        if not furthest:
            furthest.append(radius * lmo(ball.kind, g, ball.dims))
        between = torch.lerp(x, furthest[0], gamma)  # in the ball, which is convex
        return between if ball.domain is None else ball.domain(between)

    return move


def _value_and_gradient(f: Callable, points: list[torch.Tensor]) -> tuple[float, Callable[[], list[torch.Tensor]]]:
    """The value, and how to get its gradients: most points that are tried are not gone to."""
    leaves = [p.detach().contiguous().requires_grad_() for p in points]
    try:
        value = f(leaves)
    except RuntimeError as e:
        if not _has_no_derivative(e):
            raise
        return f([p.detach() for p in points]).item(), lambda: [torch.zeros_like(p) for p in points]

    def gradient() -> list[torch.Tensor]:
        if not value.requires_grad:
            return [torch.zeros_like(p) for p in leaves]
        try:
            grads = torch.autograd.grad(value, leaves, allow_unused=True)
        except RuntimeError as e:
            if not _has_no_derivative(e):
                raise
            return [torch.zeros_like(p) for p in points]  # the starting points alone
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]  # embedding(sparse=True)
        return [torch.zeros_like(p) if g is None else torch.nan_to_num(g) for g, p in zip(dense, leaves, strict=True)]

    return value.item(), gradient


def _has_no_derivative(error: RuntimeError) -> bool:
    """Whether torch says so of an operation."""
    return any(word in str(error) for word in ("derivative", "autograd formula"))
