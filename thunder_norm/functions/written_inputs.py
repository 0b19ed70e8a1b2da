"""Inputs that a differentiated program writes into: what is read later has the value after the writing, and the input's gradients."""

from __future__ import annotations

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.functions.opaque import opaque_executor
from thunder_norm.functions.registry import register_vjp
from thunder_norm.tracing.locations import location_of
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol


def _like(*args: TensorProxy) -> TensorProxy:
    return TensorProxy(like=args[0], requires_grad=False)


# The gradients of `current` go to the history of an input; it lies in the memory of the input, whatever is written there.
history_of = opaque_executor.register_operator("history", meta=_like, fn=lambda tensor: tensor.view_as(tensor))
current = opaque_executor.register_operator("current", meta=_like, fn=lambda history, value: value.detach())
register_vjp(history_of)(lambda tensor: (history_of(tensor), None), lambda saved, ct: (ct,))
register_vjp(current)(lambda history, value: (current(history, value), None), lambda saved, ct: (ct, None))


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
