"""The table of all rules in docs/: what each one claims, in its own words, and how much of it a search attained."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from thunder_norm.audit.rules import Effort, Record, identity, op_title, section
from thunder_norm.core.registry import NormedOp, NormRule, registered_ops

_HEADER = """# Norm rules

Every rule of the library: {rules} rules of {ops} operations, and {refusals} reasons to refuse others, or some of their arguments.
Written by `make audit`, which searches for tensors that exceed a claim; do not edit.

- **kinds**: the norms of the arguments (`RMS` takes `Linf` as well; others are converted where there is a sound conversion).
- **value**: the bound on the output's norm, n = |x| for short. **sensitivity**: Lipschitz constants, argument by argument.
- **attained**: the largest output norm found / claimed; the smallest over arguments of the largest slope found / claimed. 1 is a
  bound that no other can improve on. "-" has nothing to attain: the reason is in the last column.
- Found: {cases} searches, {effort}; float64, sizes from 1e-3 to 1e3; the largest ratio of all is {largest}.
  ({environment})

| operation | rule | file | kinds | value | sensitivity | attained: value, sensitivity | mode | remarks |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def write(
    folder: Path, records: Sequence[Record], effort: Effort, environment: dict[str, str], *, keep_others: bool = False
) -> None:
    """Write audit.json, what was found, and rules.md; `keep_others` keeps what audit.json says of other rules."""
    folder.mkdir(exist_ok=True)
    path, rules = folder / "audit.json", [_rounded(asdict(r)) for r in records]
    if keep_others and path.exists():
        searched = {r["op"] for r in rules}
        rules += [r for r in json.loads(path.read_text())["rules"] if r["op"] not in searched]
    content = {"environment": environment, "effort": asdict(effort), "rules": rules}
    path.write_text(json.dumps(content, indent=1) + "\n")
    (folder / "rules.md").write_text(render(path))


def _key(record: dict) -> tuple[str, str, str, str]:
    return record["op"], record["rule"], record["file"], record["kinds"]


def _rounded(record: dict) -> dict:
    record["value"] = round(record["value"], 6)
    record["sensitivity"] = {k: round(v, 6) for k, v in record["sensitivity"].items()}
    return record


def render(audited: Path) -> str:
    """The table for the rules registered now and what `audited` (an audit.json) says about them."""
    content = json.loads(audited.read_text())
    found = {_key(r): r for r in content["rules"]}
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
    effort = content["effort"]
    head = _HEADER.format(
        rules=rules,
        ops=len(ops),
        refusals=len(refusals),
        cases=sum(r["cases"] for r in content["rules"]),
        effort=f"at most {effort['cases']} cases of a rule from torch's samples, {effort['restarts']} restarts of {effort['steps']} steps",
        largest=f"{max(max([r['value'], *r['sensitivity'].values()]) for r in content['rules']):.7f}",
        environment=", ".join(f"{k} {v}" for k, v in content["environment"].items()),
    )
    tail = "\n\n## Refused\n\n| operation | why |\n| --- | --- |\n" + "\n".join(refusals) + "\n"
    return head + "\n".join(rows) + tail


def library_rules(op: NormedOp) -> list[NormRule]:
    """The rules of an operation that are the library's, not of a program that uses it."""
    return [r for r in op.rules if r.fn.__module__.startswith("thunder_norm.rules")]


def _row(names: tuple[str, ...], rule: NormRule, record: dict | None) -> str:
    doc = rule.fn.__doc__ or ""
    value, sensitivity, gap = (section(doc, name) for name in ("Value", "Sensitivity", "Gap"))
    attained, remark = "-", gap
    if rule.mode in (None, "bound"):
        if record is None:
            remark = "not searched"
        elif record["cases"]:
            slopes = list(record["sensitivity"].values())
            attained = f"{record['value']:.3f}" + (f", {min(slopes):.3f}" if slopes else "")
        else:
            remark = record["note"]
    else:
        remark = remark or "checked by sampling"
    if not value:
        value = _first_sentence(doc)
    cells = (*names, value, sensitivity, attained, rule.mode or "all", remark)
    return f"| {' | '.join(map(_cell, cells))} |"


def _first_sentence(doc: str) -> str:
    return re.sub(r"\s+", " ", doc.strip().partition("\n\n")[0])


def refusal_reason(rule: NormRule) -> str:
    """What a refusal raises."""
    return section(rule.fn.__doc__ or "", "Refused") or _first_sentence(rule.fn.__doc__ or "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
