"""What a program does with its modules while it runs: conversions that change nothing, and modules that it makes.

``self.classifier = self.classifier.to(self.dtype)`` gives the same module with the same parameters where they have that dtype already.
Torch's code works that out with the values of parameters, of which a trace has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of
from thunder.core.interpreter import WrappedValue, do_raise, interpreter_needs_wrap, unwrap
from thunder.core.proxies import Proxy


@instead_of(torch.nn.Module._apply)
def _apply(module: WrappedValue, fn: WrappedValue, recurse: WrappedValue | None = None) -> Any:
    """Called by ``to``, ``float``, ``half``, ``double``, ``bfloat16``, ``type``, ``cpu`` and ``cuda``."""
    if _changes_nothing(module.value, unwrap(fn)):
        return module
    return do_raise(
        UnsupportedOpError(
            with_details(
                f"the parameters or buffers of a {type(module.value).__name__} are converted in the jitted function",
                at=location_of_user(),
                why="a module has its parameters before a trace is acquired, and keeps them",
                instead="convert the module before it is jitted",
            )
        )
    )


@torch.no_grad()
def _changes_nothing(module: torch.nn.Module, fn: Callable) -> bool:
    return all(fn(t) is t for t in (*module.parameters(), *module.buffers()))


def making(fn: Any, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call for a class of modules: the class itself, which is not interpreted; None for anything else.

    What it holds is made once, when the trace is acquired; Thunder refuses parameters that come from nowhere.
    """
    if not isinstance(fn, type) or not issubclass(fn, torch.nn.Module):
        return None
    if any(isinstance(v, Proxy) for v in tree_leaves([unwrap(a) for a in (*args, *kwargs.values())])):
        return None
    return interpreter_needs_wrap(fn)
