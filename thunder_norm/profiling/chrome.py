"""A profile in the JSON format that chrome://tracing and Perfetto read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thunder_norm.profiling.roofline import Roofline, Timed
from thunder_norm.profiling.totals import Measured

_SHORTEST = 1e-3  # microseconds: what takes no time is drawn as well


def trace(report: Measured, timed: Roofline) -> dict[str, Any]:
    """Complete events for modules and operations, counters for memory; times in microseconds."""
    names = {0: "modules", 1: "operations"}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"{report.target} program on {timed.device.name}"}},
        *({"name": "thread_name", "ph": "M", "pid": 0, "tid": t, "args": {"name": n}} for t, n in names.items()),
    ]
    events.extend(_events(timed))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _events(timed: Roofline) -> Iterator[dict[str, Any]]:
    now = 0.0
    opened: list[tuple[str, float]] = []  # modules with their starts, outermost first
    for t in timed.rows:
        parts = t.row.module.split(".") if t.row.module else []
        path = [".".join(parts[: n + 1]) for n in range(len(parts))]
        yield from _closed(opened, path, now)
        opened.extend((name, now) for name in path[len(opened) :])
        duration = max(t.seconds * 1e6, _SHORTEST)
        yield {
            "name": t.row.op,
            "cat": t.row.phase,
            "ph": "X",
            "ts": now,
            "dur": duration,
            "pid": 0,
            "tid": 1,
            "args": _details(t),
        }
        yield {"name": "memory", "ph": "C", "ts": now, "pid": 0, "args": {"bytes": t.row.peak_bytes}}
        now += duration
        yield {"name": "memory", "ph": "C", "ts": now, "pid": 0, "args": {"bytes": t.row.live_bytes}}
    yield from _closed(opened, [], now)


def _closed(opened: list[tuple[str, float]], path: list[str], now: float) -> Iterator[dict[str, Any]]:
    """The events of modules that are left when `path` is entered."""
    kept = 0
    while kept < min(len(opened), len(path)) and opened[kept][0] == path[kept]:
        kept += 1
    while len(opened) > kept:
        name, start = opened.pop()
        yield {
            "name": name.rpartition(".")[2],
            "ph": "X",
            "ts": start,
            "dur": now - start,
            "pid": 0,
            "tid": 0,
            "args": {"module": name},
        }


def _details(t: Timed) -> dict[str, Any]:
    row = t.row
    return {
        "module": row.module,
        "line": row.location,
        "shape": list(row.shape),
        "flops": row.flops,
        "bytes read": row.bytes_read,
        "bytes written": row.bytes_written,
        "saved": row.saved_bytes,
        "bound": t.bound,
    }


def write(found: dict[str, Any], path: str | Path) -> None:
    """Write a trace to a file."""
    Path(path).write_text(json.dumps(found))
