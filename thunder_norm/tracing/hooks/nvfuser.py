"""``thunder.executors.nvfuserex_impl``: nvFuser, whose wheels for torch 2.10 no longer have the package of its older bindings."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence

from thunder_norm.tracing.hooks.replaced import replaces

_impl = sys.modules.get("thunder.executors.nvfuserex_impl")  # imported where there are CUDA and nvFuser

if _impl is not None and importlib.util.find_spec("nvfuser") is None:

    @replaces(
        _impl,
        "compute_contiguity",
        "shape",
        "stride",
        lines="to_runtime_descriptors: compute_contiguity(arg.shape, arg.stride())",
    )
    @functools.lru_cache(maxsize=2048)
    def _contiguity(shape: Sequence[int], stride: Sequence[int]) -> tuple[tuple, tuple]:
        """Which dimensions are contiguous, and the order of strides: Thunder's own function fails, it imports what is not there."""
        contiguous, order = _impl.nvfuser.compute_tensor_descriptor(shape, stride)
        return tuple(contiguous), tuple(order)
