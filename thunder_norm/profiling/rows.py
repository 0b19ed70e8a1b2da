"""A row of a profile, the kernels in it, and where in the user's program it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Phase = Literal["forward", "backward"]


class Place(NamedTuple):
    """Where an operation was called: dotted path of the module, and ``file.py:line:  text`` of the user's line."""

    module: str
    location: str


NOWHERE = Place("", "")


@dataclass(frozen=True)
class Kernel:
    """One operation as torch runs it.

    Attributes:
        op: its name.
        flops: floating point operations; None if nothing is known about it.
        bytes_read: of its arguments.
        bytes_written: of its results, and of arguments that it changes.
        dtype: what it computes in.
    """

    op: str
    flops: int | None
    bytes_read: int
    bytes_written: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ProfileRow:
    """One operation of a profiled program: a call of a torch function, or a bound symbol of a trace.

    Attributes:
        number: its place in the schedule.
        op: the operation.
        phase: "forward" or "backward".
        module: dotted path of the module whose forward called it.
        location: ``file.py:line:  text`` of the user's call.
        shape: of its (first) result.
        dtype: of its (first) result.
        flops: floating point operations.
        backward_flops: those of its derivative; of a backward operation, its own.
        bytes_read: what its kernels read.
        bytes_written: what its kernels write.
        output_bytes: storages that it makes and returns; a view makes none.
        temporary_bytes: storages that it makes and frees.
        parameter_bytes: parameters and buffers among its arguments.
        saved_bytes: storages that it makes and the backward needs.
        live_bytes: all storages alive when it is done, with parameters and inputs.
        peak_bytes: the most that was alive while it ran.
        kernels: what torch runs for it; views are none.
        derivative_of: the number of the forward operation that a backward operation differentiates, if that is known.
        is_fused: whether its kernels run as one, so that bytes are those at its boundary.
    """

    number: int
    op: str
    phase: Phase
    module: str
    location: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    flops: int
    backward_flops: int
    bytes_read: int
    bytes_written: int
    output_bytes: int
    temporary_bytes: int
    parameter_bytes: int
    saved_bytes: int
    live_bytes: int
    peak_bytes: int
    kernels: tuple[Kernel, ...] = ()
    derivative_of: int | None = None
    is_fused: bool = False

    @property
    def forward_flops(self) -> int:
        """FLOPs of a forward operation; 0 for a backward one."""
        return self.flops if self.phase == "forward" else 0

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of its kernels that count zero because nothing is known about them."""
        return tuple(dict.fromkeys(k.op for k in self.kernels if k.flops is None))
