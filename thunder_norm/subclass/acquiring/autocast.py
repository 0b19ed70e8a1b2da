"""Operators of others under ``torch.autocast``: what they call is in the precision of the region, as in eager mode.

Torch's own operations are recorded below autocast, with the casts that it has put around them.  It puts none around an operator that is
written in Python and says nothing of autocast: that is on when its implementation runs, and casts what this calls.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.op_names import identifier

Regions = tuple[tuple[str, torch.dtype], ...]  # of each device where autocast is on, the dtype

_WITHOUT = frozenset({"aten", "prims", "prim"})


def regions() -> Regions:
    """Where autocast is on at this point."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))


def regions_of(func: Any, around: Regions, classes: Iterable[type]) -> Regions:
    """Of the regions `around` an operation those that are left to its implementation: torch has none on while one of `classes` dispatches."""
    return () if not around or func.namespace in _WITHOUT or _dispatches(classes) else around


@contextlib.contextmanager
def autocast_on(found: Regions) -> Iterator[None]:
    """Autocast is on in these regions inside the block."""
    with contextlib.ExitStack() as stack:
        for device, dtype in found:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
        yield


def suffix(found: Regions) -> str:
    """What names of operations in traces end in that run there."""
    return "".join(f"_autocast_{device}_{str(dtype).removeprefix('torch.')}" for device, dtype in found)


@dataclass(frozen=True)
class UnderAutocast:
    """An operator, run in regions of autocast: no argument of it, so that it has an operation of its own in each.

    Attributes:
        func: somebody's operator.
        regions: where autocast is on.
    """

    func: torch._ops.OpOverload
    regions: Regions

    @property
    def __name__(self) -> str:
        """What the operation is called in traces."""
        return identifier(self.func) + suffix(self.regions)

    @property
    def tags(self) -> list[torch.Tag]:
        """Those of the operator."""
        return self.func.tags

    @property
    def overloadpacket(self) -> Any:
        """The operators of that name."""
        return self.func.overloadpacket

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the operator returns there."""
        with autocast_on(self.regions):
            return self.func(*args, **kwargs)


def _dispatches(classes: Iterable[type]) -> bool:
    """Whether the ``__torch_dispatch__`` of one of some classes has called the operation at hand."""
    codes = {getattr(inspect.unwrap(c.__torch_dispatch__), "__code__", None) for c in classes}
    if not codes or None in codes:  # written in C
        return bool(codes)
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None
