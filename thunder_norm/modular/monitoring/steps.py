"""The steps of optimizers, watched from outside by their hooks: what they move, and by which gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thunder_norm.errors import NormMismatchError

Tensors = dict[int, torch.Tensor]  # by the id of the parameter they belong to


class Steps:
    """Watches optimizers that together make one step, which is over when the last of them has moved.

    Args:
        optimizers: in the order in which they step.
        is_sampled: whether this step is looked at.
        before: called before the first one moves in a step that is sampled.
        gradients: called with parameters and their gradients, as an optimizer uses them.
        after: called at the end of a step, with what parameters were before; empty if it is not sampled.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        is_sampled: Callable[[], bool],
        before: Callable[[], None],
        gradients: Callable[[Tensors], None],
        after: Callable[[Tensors], None],
    ):
        self._optimizers = [_inside(optimizer) for optimizer in optimizers]
        self._is_sampled, self._before, self._gradients, self._after = is_sampled, before, gradients, after
        self._old: Tensors = {}
        self._stepping: set[int] = set()
        self._handles = [handle for optimizer in self._optimizers for handle in self._hooks(optimizer)]

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._old = [], {}

    def _hooks(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        return [optimizer.register_step_pre_hook(self._enter), optimizer.register_step_post_hook(self._leave)]

    @torch.no_grad()
    def _enter(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if not self._is_sampled():
            return
        was_interrupted = id(optimizer) in self._stepping  # it raised: what it may have moved is no step
        if was_interrupted or not self._old:
            self._before()
        self._stepping.add(id(optimizer))
        for p in _parameters(optimizer):
            if was_interrupted or id(p) not in self._old:
                self._old[id(p)] = p.detach().clone()
        if _closure(args, kwargs) is None:
            self._gradients(_unscaled(optimizer))

    @torch.no_grad()
    def _leave(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if id(optimizer) in self._stepping:
            self._stepping.discard(id(optimizer))
            if _closure(args, kwargs) is not None:  # it has evaluated the model itself
                self._gradients(_unscaled(optimizer))
        if optimizer is self._optimizers[-1]:
            old, self._old = self._old, {}
            self._after(old)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _closure(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("closure")


def _unscaled(optimizer: torch.optim.Optimizer) -> Tensors:
    """The gradients; those that a fused optimizer is to unscale itself, as it does."""
    scale = getattr(optimizer, "grad_scale", None)
    found = {id(p): p.grad for p in _parameters(optimizer) if p.grad is not None}
    return found if scale is None else {i: g / scale.to(g.device) for i, g in found.items()}


def _inside(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that steps: wrappers of libraries hold it."""
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer) and inner.optimizer is not inner:
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise NormMismatchError(
            f"optimizer must be a torch.optim.Optimizer, or a sequence of them, got {type(optimizer).__name__}"
        )
    return inner
