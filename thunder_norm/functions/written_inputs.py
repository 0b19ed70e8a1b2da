"""Inputs that a differentiated program writes into: what is read later has the value after the writing, and the input's gradients."""

from __future__ import annotations

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of
from thunder.core.symbol import BoundSymbol


def is_recorded(copy: BoundSymbol) -> bool:
    """Whether autograd records a copy: outside of `torch.no_grad`."""
    return bool(copy.kwargs.get("grad_enabled", copy.args[2] if len(copy.args) > 2 else True))


def without_history(writer: BoundSymbol, what: str) -> UnsupportedOpError:
    """An error: the backward could not follow a change that autograd records."""
    return UnsupportedOpError(
        with_details(
            f"in-place {writer.sym.name} on {what}",
            at=location_of(writer),
            why="what is written into an input has no derivative here",
            instead="use the out-of-place operation, or clone the input first",
        )
    )
