"""The profile: every operation of a program with its FLOPs and bytes, and what they add up to."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thunder_norm.profiling import chrome, pictures, roofline, views
from thunder_norm.profiling.recorder import Recorder, backward_flops
from thunder_norm.profiling.totals import Measured, Target

# Rows of a profile that is printed; `table(max_rows=None)` has all.
MAX_ROWS = 100


@dataclass(frozen=True, repr=False)
class Profile(Measured):
    """What `profile` returns: `Measured`, and ways to look at it."""

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

    def roofline(self, device: str | roofline.Device) -> roofline.Roofline:
        """The least time of each operation on a device.

        >>> import torch
        >>> from thunder_norm.transforms import Device, profile
        >>> p = profile(torch.nn.Linear(8, 4), torch.ones(2, 8), target="eager")
        >>> round(p.roofline(Device("slow", peak_flops=128, bandwidth=1e9)).seconds, 6)
        1.0

        Args:
            device: "H200", "H100", "A100" (datasheets), "CPU" (measured), or a `Device`, for instance of `measure_gpu` or `measure_cpu`.

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
