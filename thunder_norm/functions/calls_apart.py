"""Calls of torch's functions of which torch's autograd sees nothing, and what torch says where it has no derivative of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.errors import MissingTransformRuleError, with_details
from thunder_norm.trees import map_tensors


def apart_from_autograd(name: str, run: Callable) -> Callable:
    """`run` as a computation of its own, of which torch's autograd records nothing, though it may enable gradients inside.

    It raises MissingTransformRuleError where torch has no formula.
    """

    def apart(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(detached, (args, kwargs))
        try:
            return map_tensors(_of_its_own, run(*args, **kwargs))
        except (NotImplementedError, RuntimeError) as e:
            if not any(reason in str(e) for reason in _HAS_NO_DERIVATIVE):
                raise
            raise MissingTransformRuleError(
                with_details(
                    f"{name}: torch has no derivative of this operation",
                    why=str(e),
                    to_add_one="thunder_norm.transforms.register_vjp and register_jvp; see CONTRIBUTING.md",
                )
            ) from e

    return apart


# what torch says
_HAS_NO_DERIVATIVE = (
    "not implemented",
    "not differentiable",
    "is not supported",
    "Trying to use forward AD",
    "has been modified by an inplace operation",
    "which is not computed when mode",  # linalg.qr without Q
    "it is ill-defined",  # a loss that depends on the phases of eigenvectors
    "input_is_complex == grad_is_complex",  # a formula that returns a complex gradient of a real tensor
    "must override the setup_context",  # a custom operator's registered gradient, which torch.func cannot go through
)


def _of_its_own(t: torch.Tensor) -> torch.Tensor:
    """A result as any tensor: forward mode returns zeros without memory, which Thunder asks for the address of."""
    return torch.zeros_like(t, memory_format=torch.contiguous_format) if t._is_zerotensor() else detached(t)


def detached(t: torch.Tensor) -> torch.Tensor:
    """A tensor without a history."""
    return t.detach() if t.requires_grad else t
