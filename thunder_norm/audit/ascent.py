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
        for gamma in (None, 1.0, 2 / (step + 2), 0.1, -0.3, -0.03):
            if gamma is None and first is None:
                continue
            moved = [
                _move(b, x, g, r, 1.0 if gamma is None else gamma) if gamma is not None or i == first else x
                for i, (b, x, g, r) in enumerate(zip(balls, points, grads, radii, strict=True))
            ]
            new_value, gradient = _value_and_gradient(f, moved)
            # a result that overflows says nothing
            if math.inf > new_value > value * (1 + 1e-9):
                break
        else:
            break
        points, value, grads = moved, new_value, gradient()
    return value


def _move(ball: Ball, x: torch.Tensor, g: torch.Tensor, radius: float, gamma: float) -> torch.Tensor:
    """A Frank-Wolfe step (gamma > 0) or a projected gradient step of relative length -gamma."""
    if not g.abs().max() > 0:
        return x
    if gamma > 0:
        x = (1 - gamma) * x + gamma * radius * lmo(ball.kind, g, ball.dims)
    else:
        x = x - gamma * radius * g / g.abs().max()
    return ball.point(x, radius)


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
