"""Importing lightning-thunder with a torch that came after it.

Thunder 0.2.6, the newest release, names what torch 2.13 and 2.14 took away while it is imported, and fails.  `import_thunder` puts back for
the time of that import what is only named, and for good what Thunder works with; with an older torch, or a Thunder that needs neither,
nothing is touched.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

# Named in thunder/torch/default_torch_ops.py, in the list of operations that have no derivative; torch 2.13 has no named dimensions any more.
_REMOVED_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")


def import_thunder() -> ModuleType:
    """Thunder, imported."""
    _give_apply_a_function()
    with _removed_methods():
        return importlib.import_module("thunder")


@contextlib.contextmanager
def _removed_methods() -> Iterator[None]:
    missing = [name for name in _REMOVED_METHODS if not hasattr(torch.Tensor, name)]
    for name in missing:
        setattr(torch.Tensor, name, _missing(name))
    try:
        yield
    finally:
        for name in missing:
            delattr(torch.Tensor, name)


def _missing(name: str) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError(f"torch.Tensor.{name} does not exist in torch {torch.__version__}")

    method.__name__ = name
    return method


def _give_apply_a_function() -> None:
    """Let ``torch.autograd.Function.apply`` be a class method of Python again, as it was up to torch 2.13.

    Thunder knows calls of it by its ``__func__`` (thunder/core/jit_ext.py, ``register_general_jit_lookaside``), while a program is traced
    as well as when it is imported; since torch 2.14 it is one of C, which has none.
    """
    function = torch.autograd.Function
    if hasattr(function.apply, "__func__"):
        return
    native = torch._C._FunctionBase.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` and have autograd record it: torch's own."""
        return native.__get__(None, cls)(*args, **kwargs)

    function.apply = classmethod(apply)
