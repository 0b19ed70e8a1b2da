"""Run every family of models: ``python -m tests.families --source transformers --save families.json``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

COLUMNS = ("typical", "bound", "real", "normed", "report", "norm_map")


def main() -> None:
    from tests.models_zoo.case import TIMM, TORCHVISION, TRANSFORMERS
    from tests.models_zoo.columns import COLUMNS as ALL

    from . import families

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", choices=(TRANSFORMERS, TIMM, TORCHVISION), default=TRANSFORMERS)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these families alone")
    parser.add_argument("--columns", default=",".join(COLUMNS), help=f"of {', '.join(ALL)}")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=120, help="for each family")
    parser.add_argument(
        "--save", type=Path, help="a file of the results, to which further runs add; those in it are not run again"
    )
    options = parser.parse_args()
    rows: dict[str, Any] = json.loads(options.save.read_text()) if options.save and options.save.exists() else {}
    names = [n for n in options.only or families(options.source) if options.only or n not in rows]
    for number, (name, row, seconds) in enumerate(_rows(options, names), 1):
        rows[name] = row
        print(f"{number}/{len(names)} {_line(name, row)} ({seconds:.0f} s)", flush=True)
        if options.save:
            options.save.write_text(json.dumps(rows, indent=1))
    print(_causes(rows))


def _rows(options: argparse.Namespace, names: list[str]) -> Iterable[tuple[str, dict[str, Any], float]]:
    from tests.models_zoo.runner import NotRunError, made

    from . import family
    from .warm import warm

    warm(options.source)

    def row(name: str) -> tuple[str, dict[str, Any], float]:
        start = time.perf_counter()
        try:
            found = made(family(options.source, name), options.columns.split(","), options.seconds)
        except NotRunError as e:
            found = {"not_run": str(e)}
        return name, found, time.perf_counter() - start

    with ThreadPoolExecutor(options.jobs) as pool:
        yield from pool.map(row, names)


def _failures(row: dict[str, Any]) -> dict[str, str]:
    return {column: figures["error"] for column, figures in row.items() if "error" in figures}


def _line(name: str, row: dict[str, Any]) -> str:
    if "not_run" in row:
        return f"{name}: not run: {row['not_run'][:300]}"
    failures = _failures(row)
    said = "; ".join(f"{column}: {error}" for column, error in failures.items()) or "all"
    return f"{name}: {len(row) - 1 - len(failures)} of {len(row) - 1}: {said}"


def _causes(rows: dict[str, Any]) -> str:
    """The errors, those that most families have first."""
    families: dict[str, list[str]] = {}
    for name, row in rows.items():
        for error in dict.fromkeys(_failures(row).values()) if "not_run" not in row else ["not run in eager PyTorch"]:
            families.setdefault(error, []).append(name)
    lines = [f"{len(names)}: {error}: {', '.join(names)}" for error, names in sorted(families.items(), key=lambda i: -len(i[1]))]
    whole = sum(1 for row in rows.values() if "not_run" not in row and not _failures(row))
    return "\n".join([*lines, f"{whole} of {len(rows)} families pass in all columns"])


if __name__ == "__main__":
    main()
