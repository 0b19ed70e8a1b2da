"""``python -m thunder_norm.audit my_rules.py``: search for inputs that break the norm rules a module registers.

Modules are given by name or as files.  Their rules are found by themselves, and `Case`s in lists at their top level are tried as
well.  ``--all`` takes every registered rule, the library's included; the exit status is 1 if a rule claims too little.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import platform
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console

from thunder_norm._versions import __version__
from thunder_norm.audit import table
from thunder_norm.audit.cases import Case
from thunder_norm.audit.rules import LONG, QUICK, Effort, Record, all_rules, audit_rule, by_rule, op_title, steps_of
from thunder_norm.core.registry import NormedOp, NormRule
from thunder_norm.progress import track

# What the workers, forked from this process, take their tasks from: functions cannot be sent to them.
_tasks: list[tuple[NormedOp, NormRule, Sequence[Case]]] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m thunder_norm.audit", description=__doc__)
    parser.add_argument("modules", nargs="*", help="modules or files that register rules, or hold cases")
    parser.add_argument("--all", action="store_true", help="every registered rule, not only those of the modules")
    parser.add_argument("--only", metavar="OPS", help="of these only the rules of operations in a comma separated list")
    parser.add_argument("--long", action="store_true", help="search long")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to use")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="DIR",
        help="write audit.json and rules.md, the table of all rules, there (with --only, what they have of others stays)",
    )
    options = parser.parse_args(arguments)
    if options.write and not options.all:
        parser.error("--write is for the table of all rules: use it with --all")

    known = {id(rule) for _, rule in all_rules()}
    modules = [_import(name) for name in options.modules]
    cases = list({id(case): case for module in modules for case in cases_in(module)}.values())
    own = by_rule(cases)
    chosen = [(o, r) for o, r in all_rules() if options.all or id(r) not in known or id(r) in own]
    if options.only:
        chosen = [(o, r) for o, r in chosen if op_title(o) in options.only.split(",")]
    if not chosen:
        parser.error("no rules: name a module that registers some, or use --all")
    _tasks[:] = [(o, r, own.get(id(r), ())) for o, r in chosen]
    effort = LONG if options.long else QUICK
    steps = steps_of(cases)
    records = []
    console = Console()
    for (_, rule), record in zip(chosen, _run(effort, options.jobs), strict=True):
        if not record.cases and not record.note and id(rule) in steps:
            record.note = "a step of a program; the bound of the whole is tried"
        if not record.is_sound or not options.all:
            console.print(str(record), style="" if record.is_sound else "bold red", highlight=False, soft_wrap=True)
        records.append(record)
    is_sound = all(r.is_sound for r in records)
    console.print(f"{len(records)} rules, {sum(r.cases for r in records)} cases: {'sound' if is_sound else 'UNSOUND'}")
    if options.write:
        table.write(options.write, records, effort, _environment(), keep_others=bool(options.only))
    return 0 if is_sound else 1


def cases_in(module: ModuleType) -> Iterator[Case]:
    """The cases in lists and tuples at the top level of a module."""
    for value in vars(module).values():
        if isinstance(value, Case):
            yield value
        elif isinstance(value, list | tuple):
            yield from (v for v in value if isinstance(v, Case))


def _import(name: str) -> ModuleType:
    """A module by its name, or by its file: with the packages that it is in, as pytest does."""
    path = Path(name)
    if path.suffix == ".py":
        root, name = path.resolve().parent, path.stem
        while (root / "__init__.py").exists():
            root, name = root.parent, f"{root.name}.{name}"
        sys.path.insert(0, str(root))
    return importlib.import_module(name)


def _run(effort: Effort, jobs: int) -> Iterator[Record]:
    if jobs <= 1:
        yield from track((audit_rule(*task, effort) for task in _tasks), "searching", len(_tasks))
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        results = pool.map(_audit_task, range(len(_tasks)), [effort] * len(_tasks))
        yield from track(results, "searching", len(_tasks))


def _audit_task(index: int, effort: Effort) -> Record:
    torch.set_num_threads(1)
    return audit_rule(*_tasks[index], effort)


def _environment() -> dict[str, str]:
    return {"thunder_norm": __version__, "torch": torch.__version__, "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
