"""A profile as a picture: memory over the schedule, and FLOPs by module."""

from __future__ import annotations

from typing import Any

from thunder_norm.profiling.totals import Measured
from thunder_norm.profiling.views import flops_text


def figure(report: Measured) -> Any:
    """See `Profile.plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("Profile.plot needs matplotlib: pip install 'thunder_norm[plot]'") from e
    drawn = Figure(figsize=(11, 7), layout="constrained")
    above, below = drawn.subplots(2, 1)
    _draw_memory(above, report)
    _draw_flops(below, report)
    return drawn


def _draw_memory(axes: Any, report: Measured) -> None:
    rows = report.schedule
    unit, name = _unit(report.peak_bytes)
    steps = range(len(rows))
    axes.fill_between(steps, [r.live_bytes / unit for r in rows], step="post", alpha=0.4, label="alive after each operation")
    axes.step(steps, [r.peak_bytes / unit for r in rows], where="post", lw=1, label="at most during it")
    axes.axhline(report.resident_bytes / unit, color="gray", lw=0.7, ls="--", label="parameters, buffers, inputs")
    if report.backward_rows:
        axes.axvline(len(report.rows), color="black", lw=0.7)
        axes.annotate(" backward", (len(report.rows), report.peak_bytes / unit), va="top")
    axes.set(title="Memory over the schedule", xlabel="operation", ylabel=name, ylim=(0, None))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)


def _unit(largest: int) -> tuple[int, str]:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return 1024**power, name
    return 1, "bytes"


def _draw_flops(axes: Any, report: Measured) -> None:
    """Modules over their submodules, as wide as their share."""
    totals = {name: t.forward_flops + t.backward_flops for name, t in report.by_module().items()}
    children: dict[str, list[str]] = {}
    for name in totals:
        if name:
            children.setdefault(name.rpartition(".")[0], []).append(name)
    whole = totals[""] or 1
    colours = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")

    def draw(name: str, start: float, depth: int) -> None:
        share = totals[name] / whole
        if share <= 0:
            return
        colour = colours[hash_of(name) % len(colours)]
        axes.barh(-depth, share, left=start, height=0.95, color=colour, edgecolor="white", lw=0.5)
        if share > 0.04:
            label = (
                f"{name.rpartition('.')[2] or 'program'}\n{flops_text(totals[name])}FLOPs"
                if share > 0.12
                else name.rpartition(".")[2]
            )
            axes.text(start + share / 2, -depth, label, ha="center", va="center", fontsize=7, clip_on=True)
        for child in children.get(name, ()):
            draw(child, start, depth + 1)
            start += totals[child] / whole

    draw("", 0.0, 0)
    axes.set(title="FLOPs by module", xlim=(0, 1), yticks=[], xlabel="share")


def hash_of(name: str) -> int:
    """The same number for the same name in every process, and for blocks that differ in their number only."""
    return sum(map(ord, "".join(c for c in name.rpartition(".")[2] if not c.isdigit())))
