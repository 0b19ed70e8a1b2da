"""What a user has around a call that is told of its operations and of the tensors that autograd keeps: modes and hooks.

They are for the operations and tensors of the call.  While a program is compiled, and checked, others run, on what stands for tensors and has no data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode


@contextmanager
def without_hooks() -> Iterator[None]:
    """Have no hook be given what autograd keeps inside."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def has_modes() -> bool:
    """Whether operations are told to a `TorchDispatchMode`, as `FlopCounterMode`."""
    return torch._C._len_torch_dispatch_stack() > 0


@contextmanager
def without_modes() -> Iterator[None]:
    """Have no mode of a user's be told of operations: ours stay, and those that torch gives a place of their own, as `FakeTensorMode`."""
    modes = [m for m in _get_current_dispatch_mode_stack() if getattr(m, "_mode_key", None) is None] if has_modes() else []
    kept = [m for m in modes if type(m).__module__.partition(".")[0] == "thunder_norm"]
    _replace(modes, kept)
    try:
        yield
    finally:
        _replace(kept, modes)


def _replace(modes: list[TorchDispatchMode], others: list[TorchDispatchMode]) -> None:
    for _ in modes:
        _pop_mode()
    for mode in others:
        _push_mode(mode)
