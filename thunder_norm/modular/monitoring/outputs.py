"""Where a training monitor's records go: loggers, a table on the terminal, a dataframe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from thunder_norm import progress
from thunder_norm.errors import NormMismatchError
from thunder_norm.tables import pandas_for

Record = dict[str, Any]
Log = Callable[[dict[str, float], int], None]

_ROWS = 12  # of a live table


def flat(record: Record) -> dict[str, float]:
    """The numbers of a record by names with slashes.

    >>> flat({"step": 3, "parameters": {"w": {"norm": 1.0}}, "activations": {}, "attention": {"attn": [0.5, 2.0]}, "notes": []})
    {'parameters/w/norm': 1.0, 'attention/attn/0': 0.5, 'attention/attn/1': 2.0}
    """
    found: dict[str, float] = {}
    for part in ("parameters", "activations"):
        for name, numbers in record[part].items():
            found |= {f"{part}/{name}/{what}": value for what, value in numbers.items()}
    for name, heads in record["attention"].items():
        found |= {f"attention/{name}/{i}": value for i, value in enumerate(heads)}
    return found


def log_function(target: Any, prefix: str) -> Log:
    """How numbers go to a logger.

    Raises:
        NormMismatchError: it is no logger that is known.
    """
    named: Callable[[dict[str, float]], dict[str, float]] = lambda numbers: {prefix + name: v for name, v in numbers.items()}  # noqa: E731
    if hasattr(target, "add_scalar"):

        def add(numbers: dict[str, float], step: int) -> None:
            for name, value in named(numbers).items():
                target.add_scalar(name, value, step)

        return add
    for method in ("log_metrics", "log"):
        if callable(getattr(target, method, None)):
            log = getattr(target, method)
            return lambda numbers, step: log(named(numbers), step=step)
    if callable(target):
        return lambda numbers, step: target(named(numbers), step=step)
    raise NormMismatchError(
        f"log_to needs a function log(numbers, step=...) such as wandb.log, or an object with add_scalar, log_metrics or log, got {target!r}"
    )


def dataframe(records: Sequence[Record]) -> Any:
    """A pandas DataFrame with a row for each record, by step.

    Raises:
        ImportError: pandas is not installed.
    """
    pandas = pandas_for("TrainingMonitor.dataframe")
    index = pandas.Index([r["step"] for r in records], name="step", dtype="int64")
    return pandas.DataFrame([flat(r) for r in records], index=index)


@contextlib.contextmanager
def live_table(subscribe: Callable[[Callable[[Record], None]], Callable[[], None]]) -> Iterator[None]:
    """A table of the last record on standard error while the block runs; silent where progress is not shown."""
    if not progress.is_shown():
        yield
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False) as live:
        stop = subscribe(lambda record: live.update(table(record), refresh=True))
        try:
            yield
        finally:
            stop()


def table(record: Record) -> Any:
    """A rich table of the parameters that move most for their size, the heads of the largest logits, and the tightest layers."""
    from rich.table import Table

    found = Table("", "norm", "update", "update / norm", "gradient", "stable rank", title=f"step {record['step']}")
    moving = sorted(record["parameters"].items(), key=lambda item: -item[1].get("ratio", 0.0))
    for name, n in moving[:_ROWS]:
        found.add_row(name, *(_short(n.get(what)) for what in ("norm", "update", "ratio", "gradient", "stable_rank")))
    heads = [(value, f"{name} head {i}") for name, values in record["attention"].items() for i, value in enumerate(values)]
    for value, name in sorted(heads, reverse=True)[:3]:
        found.add_row(f"{name}: largest logit", _short(value))
    tight = [(n["tightness"], name) for name, n in record["activations"].items() if "tightness" in n]
    if tight:
        value, name = max(tight)
        found.add_row(f"{name}: norm / bound", _short(value))
    return found


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
