"""The profile: every operation of a program with its FLOPs and bytes, and what they add up to."""

from __future__ import annotations

import difflib
import io
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thunder_norm.errors import ProfileError, with_details
from thunder_norm.profiling import chrome, pictures, roofline, views
from thunder_norm.profiling.flops import Count
from thunder_norm.profiling.recorder import Recorder, backward_flops
from thunder_norm.profiling.rows import ProfileRow

Target = Literal["eager", "trace"]
TARGETS: tuple[Target, ...] = ("eager", "trace")

# Rows of a profile that is printed; `table(max_rows=None)` has all.
MAX_ROWS = 100


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
class Profile:
    """What `profile` returns.

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

    @staticmethod
    def of(recorder: Recorder, target: Target, resident: Mapping[str, int]) -> Profile:
        """The profile of what a recorder has seen."""
        backward = backward_flops(recorder.steps)
        rows = [step.row(n, backward.get(n, 0)) for n, step in enumerate(recorder.steps)]
        saved = {kind: sum(b.nbytes for b in recorder.saved.values() if b.kind == kind) for kind in _KINDS}
        return Profile(
            tuple(r for r in rows if r.phase == "forward"),
            tuple(r for r in rows if r.phase == "backward"),
            target,
            recorder.count,
            resident["parameter"],
            resident["buffer"],
            resident["input"],
            saved["result"] + saved["input"],
            saved["input"],
            saved["parameter"] + saved["buffer"],
        )

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

    def roofline(self, device: str | roofline.Device) -> roofline.Roofline:
        """The least time of each operation on a device.

        >>> import torch
        >>> from thunder_norm.transforms import Device, profile
        >>> p = profile(torch.nn.Linear(8, 4), torch.ones(2, 8), target="eager")
        >>> round(p.roofline(Device("slow", peak_flops=128, bandwidth=1e9)).seconds, 6)
        1.0

        Args:
            device: "H200", "A100" (datasheets), "CPU" (measured), or a `Device`, for instance of `measure_cpu`.

        Raises:
            ProfileError: there is no such preset.
        """
        return roofline.roofline(self.schedule, device)

    def table(self, *, width: int = 160, max_rows: int | None = None, backward: bool = False) -> str:
        """The operations as a text table, and the totals under it.

        Args:
            width: in characters; a narrow table has fewer columns.
            max_rows: how many operations to show, half of them from the end; all if None.
            backward: show the operations of the backward too.

        Raises:
            ProfileError: max_rows is negative.
        """
        from rich.console import Console

        console = Console(file=io.StringIO(), width=width)
        console.print(views.rich_table(self, max_rows, width, backward))
        totals = [textwrap.fill(line, width, subsequent_indent="  ") for line in self.summary().splitlines()]
        return "\n".join([console.file.getvalue() + totals[0], *totals[1:], ""])  # type: ignore[attr-defined]

    def summary(self) -> str:
        """The totals in a few lines."""
        return views.summary(self)

    def __str__(self) -> str:
        return self.table(max_rows=MAX_ROWS)

    def __repr__(self) -> str:
        return f"<Profile of the {self.target} program: {len(self.rows)} operations forward, {len(self.backward_rows)} backward>"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield views.rich_table(self, MAX_ROWS, options.max_width, False)
        yield self.summary()

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each operation, forward and backward (needs pandas, the extra `dataframe`).

        Raises:
            ImportError: pandas is not installed.
        """
        return views.dataframe(self)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw memory over the schedule, and FLOPs by module (needs matplotlib, the extra `plot`).

        Args:
            path: where to save the picture; if None it is only returned.

        Returns:
            The matplotlib figure: above, what is alive after and at most during each operation; below, modules over their
            submodules, as wide as their share of the FLOPs.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = pictures.figure(self)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    def to_chrome_trace(self, path: str | Path | None = None, *, device: str | roofline.Device = "H200") -> dict[str, Any]:
        """The schedule in the JSON format of chrome://tracing and Perfetto: modules, operations, memory.

        Args:
            path: a file to write it to.
            device: operations take their least time on it (`roofline`).

        Raises:
            ProfileError: there is no such device.
        """
        found = chrome.trace(self, roofline.roofline(self.schedule, device))
        if path is not None:
            chrome.write(found, path)
        return found


_KINDS = ("parameter", "buffer", "input", "result")
