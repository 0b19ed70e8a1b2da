"""Hooks on the tensors that autograd keeps (``torch.autograd.graph.saved_tensors_hooks``), which a user has around a first call.

They are for the tensors of a call.  While a program is compiled, autograd keeps what stands for tensors and has no data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_hooks() -> Iterator[None]:
    """Have no hook be given what autograd keeps inside."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)
