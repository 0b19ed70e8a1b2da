"""What a profile consists of, and what its rows add up to."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from thunder_norm.errors import ProfileError, with_details
from thunder_norm.profiling.flops import Count
from thunder_norm.profiling.rows import ProfileRow

Target = Literal["eager", "trace"]
TARGETS: tuple[Target, ...] = ("eager", "trace")


@dataclass(frozen=True)
class ModuleTotals:
    """What a module and its submodules take.

    Attributes:
        module: dotted path; "" is the whole program.
        operations: how many, forward.
        forward_flops: FLOPs forward.
        backward_flops: FLOPs backward.
        bytes_moved: read and written, in both.
        saved_bytes: made there, and kept for the backward.
    """

    module: str
    operations: int
    forward_flops: int
    backward_flops: int
    bytes_moved: int
    saved_bytes: int


@dataclass(frozen=True, repr=False)
class Measured:
    """What a profile has counted.

    Attributes:
        rows: the operations of the forward, in order.
        backward_rows: those of the backward, in order.
        target: which program: "eager", as PyTorch runs it, or "trace", as Thunder does.
        count: what counts as a FLOP: "matmul", as in torch.utils.flop_counter, or "all".
        parameter_bytes: storages of parameters.
        buffer_bytes: storages of buffers.
        input_bytes: storages of the inputs.
        saved_bytes: storages that are kept from the forward for the backward, without parameters and buffers.
        saved_input_bytes: what of them belongs to inputs.
        saved_parameter_bytes: parameters and buffers that the backward needs.
    """

    rows: tuple[ProfileRow, ...]
    backward_rows: tuple[ProfileRow, ...]
    target: Target
    count: Count
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    saved_bytes: int
    saved_input_bytes: int
    saved_parameter_bytes: int

    @property
    def schedule(self) -> tuple[ProfileRow, ...]:
        """All operations in the order in which they run."""
        return self.rows + self.backward_rows

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward."""
        return sum(r.flops for r in self.rows)

    @property
    def backward_flops(self) -> int:
        """FLOPs of the backward."""
        return sum(r.flops for r in self.backward_rows)

    @property
    def flops(self) -> int:
        """FLOPs of both."""
        return self.forward_flops + self.backward_flops

    @property
    def resident_bytes(self) -> int:
        """What is there before the program starts: parameters, buffers, inputs."""
        return self.parameter_bytes + self.buffer_bytes + self.input_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at any time, with parameters, buffers and inputs."""
        return max((r.peak_bytes for r in self.schedule), default=self.resident_bytes)

    @property
    def peak_row(self) -> ProfileRow | None:
        """The operation during which that is so."""
        return max(self.schedule, key=lambda r: r.peak_bytes, default=None)

    @property
    def unknown(self) -> dict[str, int]:
        """The kernels that count zero FLOPs because nothing is known about them, and how often each runs."""
        return dict(Counter(k.op for r in self.schedule for k in r.kernels if k.flops is None))

    def __iter__(self) -> Iterator[ProfileRow]:
        return iter(self.schedule)

    def __len__(self) -> int:
        return len(self.schedule)

    def by_module(self, depth: int | None = None) -> dict[str, ModuleTotals]:
        """Totals of each module with its submodules, down to a depth; "" is the whole program.

        Raises:
            ProfileError: depth is negative.
        """
        if depth is not None and depth < 0:
            raise ProfileError(f"depth must be >= 0, got {depth}")
        found: dict[str, list[int]] = {"": [0] * 5}
        for row in self.schedule:
            parts = row.module.split(".") if row.module else []
            for n in range(len(parts) + 1 if depth is None else min(len(parts), depth) + 1):
                totals = found.setdefault(".".join(parts[:n]), [0] * 5)
                own = (row.phase == "forward", row.forward_flops, 0 if row.phase == "forward" else row.flops)
                for i, v in enumerate((*own, row.bytes_read + row.bytes_written, row.saved_bytes)):
                    totals[i] += v
        return {name: ModuleTotals(name, *totals) for name, totals in found.items()}

    def select(self, module: str) -> tuple[ProfileRow, ...]:
        """The operations of a module and its submodules, by dotted path.

        Raises:
            ProfileError: there are none.
        """
        rows = tuple(r for r in self.schedule if module == "" or r.module == module or r.module.startswith(f"{module}."))
        if not rows:
            close = difflib.get_close_matches(module, sorted({r.module for r in self.schedule}), n=3)
            raise ProfileError(
                with_details(
                    f"no operation of the profile is in module {module!r}", did_you_mean=", ".join(map(repr, close)) or None
                )
            )
        return rows
