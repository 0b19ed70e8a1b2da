"""Proving rules: every case of a rule searched, and what was found kept beside what the rule says."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thunder_norm.audit.cases import Case
from thunder_norm.audit.samples import cases_of, rule_of, rules_run, runs_without_norm
from thunder_norm.audit.search import SOUND, Found, search
from thunder_norm.core.registry import NormedOp, NormRule, Slot, normed_op, registered_ops
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError, ThunderNormError, UnsoundRuleError


@dataclass(frozen=True)
class Effort:
    """How much to search: cases of a rule, and for each of their quantities restarts and steps, from starts of this seed."""

    cases: int
    restarts: int
    steps: int
    seed: int = 0


QUICK = Effort(cases=2, restarts=3, steps=6)  # about a second
LONG = Effort(cases=8, restarts=6, steps=20)


# Relative errors of kernels that cancel: the root of |x|^2 + |y|^2 - 2 x y loses half of the digits.
_ROUNDING = {"_euclidean_dist": 2e-8}


@dataclass(frozen=True)
class Searched:
    """One case of a rule that was searched.

    Attributes:
        case: its name.
        value: output norm found / claimed; NaN where the claim is beyond what can be searched.
        sensitivity: the same for the sensitivity to each normed argument, by its place.
    """

    case: str
    value: float
    sensitivity: tuple[float, ...] = ()

    @property
    def slope(self) -> float:
        """The loosest sensitivity; NaN if there is none."""
        return min((r for r in self.sensitivity if not math.isnan(r)), default=math.nan)

    @property
    def largest(self) -> float:
        """The largest of all ratios."""
        return max((r for r in (self.value, *self.sensitivity) if not math.isnan(r)), default=0.0)


@dataclass
class Record:
    """What searches found about one rule.

    Attributes:
        op: the operation.
        rule: the rule's name.
        file: the last part of the name of its module.
        kinds: of its arguments, which tell it from others of that name.
        searches: what was found, case by case.
        note: why there are no cases, if there are none.
        failures: cases whose search ended with an error, and the error.
    """

    op: str
    rule: str
    file: str = ""
    kinds: str = ""
    searches: list[Searched] = field(default_factory=list)
    note: str = ""
    failures: list[str] = field(default_factory=list)

    def add(self, case: Case, found: Found) -> None:
        """Take in one search."""
        self.searches.append(Searched(case.name, found.value, tuple(found.sensitivity.values())))

    @property
    def cases(self) -> int:
        """How many were searched."""
        return len(self.searches)

    @property
    def values(self) -> list[float]:
        """Output norm found / claimed, case by case."""
        return [s.value for s in self.searches]

    @property
    def slopes(self) -> list[float]:
        """The loosest sensitivity, case by case."""
        return [s.slope for s in self.searches]

    @property
    def value(self) -> float:
        """The largest output norm found / claimed, over all cases."""
        return _largest(self.values)

    @property
    def sensitivity(self) -> dict[str, float]:
        """The same for the sensitivity to each normed argument, by its place."""
        places = itertools.zip_longest(*(s.sensitivity for s in self.searches), fillvalue=math.nan)
        return {str(place): _largest(ratios) for place, ratios in enumerate(places)}

    @property
    def worst(self) -> str:
        """The case with the largest ratio."""
        return max(self.searches, key=lambda s: s.largest).case if self.searches else ""

    @property
    def largest(self) -> float:
        """The largest of all ratios."""
        return max((self.value, *self.sensitivity.values()))

    @property
    def is_sound(self) -> bool:
        """Whether no search exceeded a claim, or failed."""
        return self.largest <= SOUND and not self.failures

    def __str__(self) -> str:
        title = f"{self.op}, {self.rule}: "
        if self.failures:
            return f"{title}FAILED, {'; '.join(self.failures)}"
        if not self.cases:
            return title + (self.note or "no arguments to try it with; pass cases")
        verdict = "sound" if self.is_sound else f"UNSOUND in {self.worst!r}"
        ratios = [f"value {self.value:.4f}", *(f"sensitivity to argument {k} {v:.4f}" for k, v in self.sensitivity.items())]
        return f"{title}{verdict}, {self.cases} cases; attained: {', '.join(ratios)}"


def _largest(ratios: Iterable[float]) -> float:
    return max((r for r in ratios if not math.isnan(r)), default=0.0)


@dataclass(frozen=True)
class Audit:
    """What `audit` returns: a record for each rule.  It prints as a line for each."""

    records: tuple[Record, ...]

    @property
    def is_sound(self) -> bool:
        """Whether no search exceeded a claim."""
        return all(r.is_sound for r in self.records)

    def __str__(self) -> str:
        return "\n".join(map(str, self.records))


def audit(op: Callable, *, cases: Sequence[Case] = (), effort: Effort = QUICK) -> Audit:
    """Search for inputs that exceed what the norm rules of an operation claim (mode "bound").

    Args:
        op: the operation, or a function decorated with `normed_op`.
        cases: further cases.  Others are found: arguments from torch's operator database, or tensors in the places that a
            rule's annotations name.
        effort: `QUICK`, `LONG`, or another.

    Raises:
        NormMismatchError: the operation has no rules.
        UnsoundRuleError: something was found that exceeds a claim by more than 1e-6; its `audit` says what.
    """
    target = normed_op(op)
    rules = auditable(target)
    if not rules:
        raise NormMismatchError(f"{target.__qualname__} has no norm rules to audit")
    own = by_rule(cases)
    found = Audit(tuple(audit_rule(target, rule, own.get(id(rule), ()), effort) for rule in rules))
    if not found.is_sound:
        raise UnsoundRuleError(f"a norm rule claims too little\n{found}", found)
    return found


def auditable(op: NormedOp) -> list[NormRule]:
    """The rules of an operation that claim something for all tensors."""
    return [r for r in op.rules if r.mode in (None, "bound") and not r.is_refusal]


def all_rules() -> Iterator[tuple[NormedOp, NormRule]]:
    """Every registered rule that can be audited."""
    for op in registered_ops().values():
        for rule in auditable(op):
            yield op, rule


def by_rule(cases: Iterable[Case]) -> Mapping[int, list[Case]]:
    """Cases by the identity of the rule whose claim they try."""
    found: dict[int, list[Case]] = {}
    for case in cases:
        rule = rule_of(case)
        if rule is not None:
            found.setdefault(id(rule), []).append(case)
    return found


def steps_of(cases: Iterable[Case]) -> set[int]:
    """The identities of rules that run as steps of a program whose last rule states the bound of the whole."""
    return {id(r) for case in cases for r in rules_run(case)[:-1] if r.when is not None}


def audit_rule(op: NormedOp, rule: NormRule, own_cases: Sequence[Case] = (), effort: Effort = QUICK) -> Record:
    """Search the cases of one rule."""
    return searched(op, rule, [*own_cases[: 2 * effort.cases], *cases_of(op, rule, effort.cases)], effort)


def searched(op: NormedOp, rule: NormRule, cases: Sequence[Case], effort: Effort) -> Record:
    """Search these cases of one rule."""
    record = Record(*identity(op, rule))
    options = {"rounding": _ROUNDING[record.op]} if record.op in _ROUNDING else {}
    for case in cases:
        try:
            record.add(case, search_case(replace(case, options=options | case.options), effort))
        except Exception as e:  # noqa: BLE001 - nothing that was found before is lost
            record.failures.append(f"{case.name}: {type(e).__name__}: {str(e).partition(chr(10))[0]}")
    if not record.cases:
        record.note = runs_without_norm(op, rule) or section(rule.fn.__doc__ or "", "Untried")
    return record


def kinds_of(rule: NormRule) -> str:
    """The tensor arguments of a rule and the kinds they take."""
    return ", ".join(f"{name}: {_slot(slot)}" for name, slot in rule.slots.items() if slot.kinds or slot.accepts_plain)


def _slot(slot: Slot) -> str:
    names = [_kind(k) for k in slot.kinds] + (["plain"] if slot.accepts_plain else [])
    return ("list of " if slot.is_list else "") + " or ".join(names) + (" or none" if slot.is_optional else "")


def _kind(kind: type[NormedTensor]) -> str:
    return "any" if kind is NormedTensor else kind.__name__.removesuffix("Tensor")


def identity(op: NormedOp, rule: NormRule) -> tuple[str, str, str, str]:
    """The names that tell a rule from all others: operation, rule (numbered if there are several of that name), file, kinds."""

    def names(r: NormRule) -> tuple[str, str, str]:
        return r.fn.__name__, r.fn.__module__.rpartition(".")[2], kinds_of(r)

    name, file, kinds = names(rule)
    before = [r for r in op.rules[: _position(op, rule)] if names(r) == names(rule)]
    return op_title(op), f"{name} {len(before) + 1}" if before else name, file, kinds


def _position(op: NormedOp, rule: NormRule) -> int:
    return next(i for i, r in enumerate(op.rules) if r is rule)


def op_title(op: NormedOp) -> str:
    """The name of an operation in tables."""
    return op.key if isinstance(op.key, str) else op.__qualname__


def search_case(case: Case, effort: Effort) -> Found:
    """`search`, of values alone where the rule refuses perturbations."""
    options: dict[str, Any] = {"steps": effort.steps, **case.options, "restarts": effort.restarts, "seed": effort.seed}
    with warnings.catch_warnings():  # of torch about its own samples, hundreds of times
        warnings.simplefilter("ignore")
        try:
            return search(case.call, case.balls, **options)
        except ThunderNormError:
            return search(case.call, case.balls, **{**options, "sensitivity": False})


def section(doc: str, name: str) -> str:
    """What a docstring says under ``name:``, on one line."""
    lines = doc.expandtabs().splitlines()
    for i, line in enumerate(lines):
        match = re.match(rf"(\s*)(?:Value and )?{name}:\s*(.*)", line)
        if match is None:
            continue
        indent, text = len(match[1]), [match[2]]
        for further in lines[i + 1 :]:
            # text that goes on is indented further than the name of the section
            if not further.strip() or len(further) - len(further.lstrip()) <= indent:
                break
            text.append(further.strip())
        return re.sub(r"\s+", " ", " ".join(text))
    return ""
