"""What long runs found, kept in tests/fuzz/results, and the table of it in docs/fuzz.md."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch

import thunder

from .program import KINDS
from .runner import SUBJECTS, Report, as_ranges, module_of, of_ranges

RESULTS = Path(__file__).parent / "results"
TABLE = Path(__file__).resolve().parents[2] / "docs" / "fuzz.md"

_HEADER = """# Random programs

What `make fuzz` found last. Written by it; do not edit. `python -m tests.fuzz --help` says how to run one subject or one program;
each program is drawn from its subject, the seed and its number alone.

- **derivatives**: functions of one to five operations under one to four transforms, against `torch.func`, and against differences
  of values or the other order of differentiation where that fails.
- **op_db**: second derivatives of each differentiable operator of torch's database in float64, first ones in complex128.
- **modules**: random modules with norms: bounds against actual norms, reached parameters against torch's gradients, the model untouched.
- **wrappers**: random programs with tensor subclasses, against eager mode.
- **changes**: modules of which something changes between two calls (an attribute, a default, a hook, a dtype, a mode), against eager mode.
- **writes**: modules that write into parameters, buffers and constants, and into views of them: results, gradients, the state afterwards and
  bounds, against eager mode.
- **wrapper_writes**: programs that write into wrappers, into views of them and into what is inside, of inputs that may be one object or lie in
  one memory: results, what inputs hold and who sees it, histories and gradients, against eager mode.
- **made_wrappers**: random programs with wrapper classes that are drawn too (what they keep and how, contexts, ways to dispatch, members): values, types,
  gradients, memory that results share with inputs, and a third call with inputs or a class that are changed, against eager mode.
- **bounds**: operations on norms: an adversary ascends in float64 to exceed the norm, and how far results move for all inputs, at the data,
  and near them.
- **networks**: whole networks on norms (perceptrons, attention, convolutions, recurrent and graph layers, normalizations, gates): an adversary ascends
  over pairs of inputs and over Jacobians.
- **real**: modules on plain tensors, with contexts, Python, dtypes, views and writes: what two or three calls return and leave behind, against
  eager mode.
- **draws**: functions that draw random numbers, under one to three transforms and in traced programs: results and the state of the generator,
  against `torch.func` from the same state.
- **regions**: modules with checkpointed regions in each other and in turn, that draw random numbers and write into buffers: results, gradients,
  numbers drawn and buffers, against the module without regions in eager mode.
- **python**: structured programs of Python around tensors (functions, generators, exceptions, context managers, classes, in each other): what three
  calls return or raise and what their arguments and the module hold afterwards, against Python.
- **refusals**: operations whose kernels look at values (labels, positions, pivots, lengths), called with such that torch takes and such that it
  refuses: what it refuses is refused in each call.
- **state**: modules that keep things (attributes, buffers, counters, lists and dicts, set, changed and deleted): what three calls return and
  what is in all objects afterwards, against eager mode.
- **optimizers**: models that know which rows of which parameter are which block, head or table: roles, groups, steps of the optimizer whatever
  happens between them, bounds of the modular norm, saved states, clipped logits and the monitor, against formulas in numpy.
- **maps**: what is computed from traces of modules: norm maps (sizes on data and without, at dynamic sizes, their derivatives, copies and files),
  reports, sensitivities, profiles (FLOPs, bytes, peak memory, against torch's counters and the storages alive in a run), memory budgets, and
  transforms of traces with each other, against eager mode.
- **calls**: how compiled modules are called and what surrounds it: contexts and modes, ways to give arguments, threads, transforms of torch around
  calls, copies, hooks, exceptions and changes between them: results, gradients, all state and modes afterwards, against eager mode.

"wrong" does not agree, "error" is an exception that is none of ours, "refused" an error of `thunder_norm.errors`, "no oracle" a
program for which torch has no answer, or two.

| subject | seed | programs | right | wrong | error | refused | no oracle | operations | hours | torch, thunder |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def write(report: Report) -> None:
    """Keep the results of a run in place of what was kept of its subject, and write the table again."""
    RESULTS.mkdir(exist_ok=True)
    _keep(report.subject, report.as_json())
    module = module_of(report.subject)
    if hasattr(module, "keep"):
        module.keep(report)


def add(report: Report) -> None:
    """Put the results of a run to what is kept of its subject and seed; programs that were found before get their new place."""
    before = kept().get(report.subject)
    if before is None or before["seed"] != report.seed:
        write(report)
    else:
        _keep(report.subject, together(before, report.as_json()))


def together(before: dict, new: dict) -> dict:
    """The results of two runs, `new` those of other programs of the seed, or of some that were found before."""
    old, again = set(of_ranges(before["indices"])), set(of_ranges(new["indices"]))
    replaced = [f for f in before["found"] if f["index"] in again]
    twice = (old & again) - {f["index"] for f in replaced}
    if twice:
        raise ValueError(f"programs {as_ranges(twice)} of {new['subject']} were counted already")
    counts, operations = Counter(before["counts"]), {label: Counter(c) for label, c in before["operations"].items()}
    counts.update(new["counts"])
    for label, c in new["operations"].items():
        operations.setdefault(label, Counter()).update(c)
    for f in replaced:
        counts[f["kind"]] -= 1
        for label in f["labels"]:
            operations[label][f["kind"]] -= 1
    return before | {
        "programs": len(old | again),
        "indices": as_ranges(old | again),
        "seconds": before["seconds"] + new["seconds"],
        "counts": {kind: counts[kind] for kind in KINDS},
        "operations": {label: {k: n for k, n in operations[label].items() if n} for label in sorted(operations)},
        "refusals": dict((Counter(before["refusals"]) + Counter(new["refusals"])).most_common()),
        "found": [f for f in before["found"] if f["index"] not in again] + new["found"],
    }


def _keep(subject: str, content: dict) -> None:
    versions = {"torch": torch.__version__.split("+")[0], "thunder": thunder.__version__}
    (RESULTS / f"{subject}.json").write_text(json.dumps(content | versions, indent=1) + "\n")
    TABLE.write_text(render())


def kept() -> dict[str, dict]:
    """The results that are kept, for each subject."""
    paths = {subject: RESULTS / f"{subject}.json" for subject in SUBJECTS}
    return {subject: json.loads(path.read_text()) for subject, path in paths.items() if path.exists()}


def render() -> str:
    """The table of the results that are kept, then what was refused and what each operation came to."""
    results = kept()
    text = _HEADER
    for subject, r in results.items():
        counts = " | ".join(str(r["counts"][kind]) for kind in KINDS)
        text += f"| {subject} | {r['seed']} | {r['programs']} | {counts} | {len(r['operations'])} | "
        text += f"{r['seconds'] / 3600:.1f} | {r['torch']}, {r['thunder']} |\n"
    for subject, r in results.items():
        if r["refusals"]:
            text += f"\n## Refused: {subject}\n\n| programs | why |\n| --- | --- |\n"
            text += "".join(f"| {n} | {_cell(headline)} |\n" for headline, n in r["refusals"].items())
    for subject, r in results.items():
        text += (
            f"\n## Operations: {subject}\n\n"
            + ", ".join(f"{name} {sum(c.values())}" for name, c in r["operations"].items())
            + "\n"
        )
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
