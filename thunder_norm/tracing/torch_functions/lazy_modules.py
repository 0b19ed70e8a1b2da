"""Lazy modules (``nn.LazyLinear``), whose parameters get their shapes from the first input: they get them before a trace is acquired.

The program is gone through until it calls one.  What that has done is undone, the module is given its parameters as torch does it, and
the program is acquired from the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.guarding.ways import path_of
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
from thunder_norm.tracing.translation import for_torch
from thunder_norm.trees import map_leaves
from thunder.core import devices
from thunder.core.interpreter import WrappedValue, unwrap, wrap_const
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx


@dataclass
class Uninitialized(Exception):
    """A module that the program calls has no shapes for its parameters yet."""

    module: Any
    given: tuple
    named: dict[str, Any]

    def initialize(self) -> None:
        """Do what the module does in its first call, for inputs of these shapes."""
        with _disable_current_modes(), torch.enable_grad():
            self.module._infer_parameters(self.module, self.given, self.named)


def called_in(error: BaseException | None) -> Uninitialized | None:
    """What an acquisition failed for, if it is such a module."""
    return error if error is None or isinstance(error, Uninitialized) else called_in(error.__cause__)


@instead_of(LazyModuleMixin._infer_parameters)
def _infer(module: WrappedValue, _: WrappedValue, args: WrappedValue, kwargs: WrappedValue | None = None) -> Any:
    if path_of(module.provenance) is None:  # one that the program has made: its parameters are refused
        return wrap_const(None)
    if any(map(draws_numbers, get_tracectx().bound_symbols)):
        raise UnsupportedOpError(
            with_details(
                f"{type(module.value).__name__}, a lazy module, gets its parameters after other random numbers were drawn",
                at=location_of_user(),
                why="a module has its parameters before a trace is acquired, and the other numbers are drawn when it runs",
                instead="call the module itself once, with an input like those to come",
            )
        )
    raise Uninitialized(module.value, *_on_meta((unwrap(args), {} if kwargs is None else unwrap(kwargs))))


def _on_meta(tree: Any) -> Any:
    """Arguments for a function of torch's: for proxies tensors without numbers."""

    def made(v: Any) -> Any:
        if isinstance(v, TensorProxy):
            return torch.empty(tuple(map(int, v.shape)), dtype=for_torch(v.dtype), device="meta")
        return torch.device("meta") if isinstance(v, devices.Device) else for_torch(v)

    return map_leaves(made, tree)
