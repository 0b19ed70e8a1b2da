"""The table of all rules in docs/: what each one claims, in its own words, and how much of it a search attained."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thunder_norm.audit.rules import Effort, Record, Searched, identity, op_title, section
from thunder_norm.core.registry import NormedOp, NormRule, registered_ops

_HEADER = """# Norm rules

Every rule of the library: {rules} rules of {ops} operations, and {refusals} reasons to refuse others, or some of their arguments.
Written by `make audit`, which searches for tensors that exceed a claim; do not edit.

- **kinds**: the norms of the arguments (`RMS` takes `Linf` as well; others are converted where there is a sound conversion).
- **value**: the bound on the output's norm, n = |x| for short. **sensitivity**: Lipschitz constants, argument by argument.
- **attained**: found / claimed in the cases of a rule, the smallest, the median and the largest; 1 is a bound that no other can improve
  on; less is a formula that is loose for a case's norms, shapes or other arguments, or a search that ended too early. A case counts with
  the loosest of its sensitivities. "-" has nothing to attain: the reason is in the last column.
- Attained to 0.99, value and sensitivity: by the best case in {best} of {searched} rules that were searched, by the median case in
  {median}, by every case in {every}.
- Found: {cases} searches, {effort}; float64, sizes from 1e-3 to 1e3; the largest ratio of all is {largest}.
  ({environment})

| operation | rule | file | kinds | value | sensitivity | attained: value | attained: sensitivity | cases | mode | remarks |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def write(
    folder: Path, records: Sequence[Record], effort: Effort, environment: dict[str, str], *, keep_others: bool = False
) -> None:
    """Write audit.json, what was found, and rules.md; `keep_others` keeps what audit.json says of other rules."""
    folder.mkdir(exist_ok=True)
    path, rules = folder / "audit.json", list(records)
    if keep_others and path.exists():
        searched = {r.op for r in rules}
        rules += [r for r in kept(path).rules if r.op not in searched]
    lines = (json.dumps(_as_json(r)) for r in sorted(rules, key=_key))
    head = json.dumps({"environment": environment, "effort": asdict(effort)})
    path.write_text(f'{head[:-1]}, "rules": [\n' + ",\n".join(lines) + "\n]}\n")
    (folder / "rules.md").write_text(render(path))


@dataclass(frozen=True)
class Kept:
    """What an audit.json says."""

    environment: dict[str, str]
    effort: Effort
    rules: list[Record]


def kept(path: Path) -> Kept:
    """Read an audit.json."""
    content = json.loads(path.read_text())
    return Kept(content["environment"], Effort(**content["effort"]), [_from_json(r) for r in content["rules"]])


def _as_json(record: Record) -> dict[str, Any]:
    searches = [[s.case, *(None if math.isnan(r) else round(r, 6) for r in (s.value, *s.sensitivity))] for s in record.searches]
    return asdict(record) | {"searches": searches}


def _from_json(record: dict[str, Any]) -> Record:
    searches = [(case, [math.nan if r is None else r for r in ratios]) for case, *ratios in record["searches"]]
    return Record(**record | {"searches": [Searched(case, value, tuple(slopes)) for case, (value, *slopes) in searches]})


def _key(record: Record) -> tuple[str, str, str, str]:
    return record.op, record.rule, record.file, record.kinds


def render(audited: Path) -> str:
    """The table for the rules registered now and what `audited` (an audit.json) says about them."""
    content = kept(audited)
    found = {_key(r): r for r in content.rules}
    rows, refusals, rules, ops = [], [], 0, set()
    for op in sorted(registered_ops().values(), key=lambda o: op_title(o).lower()):
        for rule in library_rules(op):
            if rule.is_refusal:
                refusals.append(f"| {op_title(op)} | {_cell(refusal_reason(rule))} |")
                continue
            rules += 1
            ops.add(op.key)
            names = identity(op, rule)
            rows.append(_row(names, rule, found.get(names)))
    effort = content.effort
    head = _HEADER.format(
        rules=rules,
        ops=len(ops),
        refusals=len(refusals),
        **_attained_to(0.99, content.rules),
        cases=sum(r.cases for r in content.rules),
        effort=f"at most {effort.cases} cases of a rule from torch's samples, {effort.restarts} restarts of {effort.steps} steps",
        largest=f"{max(r.largest for r in content.rules):.7f}",
        environment=", ".join(f"{k} {v}" for k, v in content.environment.items()),
    )
    tail = "\n\n## Refused\n\n| operation | why |\n| --- | --- |\n" + "\n".join(refusals) + "\n"
    return head + "\n".join(rows) + tail


def _attained_to(tight: float, records: Sequence[Record]) -> dict[str, int]:
    """How many rules were searched, and of how many the best, the median and every case attain that much of all claims."""
    spreads = [(_spread(r.values), _spread(r.slopes)) for r in records if r.cases]
    counts = {
        name: sum(all(s is None or s[place] >= tight for s in both) for both in spreads)
        for place, name in enumerate(("every", "median", "best"))
    }
    return counts | {"searched": len(spreads)}


def _spread(ratios: Sequence[float]) -> tuple[float, float, float] | None:
    """The smallest, the median and the largest of the ratios that are known."""
    known = [r for r in ratios if not math.isnan(r)]
    return (min(known), statistics.median(known), max(known)) if known else None


def library_rules(op: NormedOp) -> list[NormRule]:
    """The rules of an operation that are the library's, not of a program that uses it."""
    return [r for r in op.rules if r.fn.__module__.startswith("thunder_norm.rules")]


def _row(names: tuple[str, ...], rule: NormRule, record: Record | None) -> str:
    doc = rule.fn.__doc__ or ""
    value, sensitivity, gap = (section(doc, name) for name in ("Value", "Sensitivity", "Gap"))
    attained, remark = ["-", "-", "-"], gap
    if rule.mode not in (None, "bound"):
        remark = remark or "checked by sampling"
    elif record is None:
        remark = "not searched"
    elif record.cases:
        attained = [_shown(record.values), _shown(record.slopes), str(record.cases)]
    else:
        remark = record.note
    if not value:
        value = _first_sentence(doc)
    cells = (*names, value, sensitivity, *attained, rule.mode or "all", remark)
    return f"| {' | '.join(map(_cell, cells))} |"


def _shown(ratios: Sequence[float]) -> str:
    spread = _spread(ratios)
    return "-" if spread is None else ", ".join(f"{r:.3f}" for r in spread)


def _first_sentence(doc: str) -> str:
    return re.sub(r"\s+", " ", doc.strip().partition("\n\n")[0])


def refusal_reason(rule: NormRule) -> str:
    """What a refusal raises."""
    return section(rule.fn.__doc__ or "", "Refused") or _first_sentence(rule.fn.__doc__ or "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
