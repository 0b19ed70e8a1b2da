"""What a report consists of."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from thunder_norm.core.context import Sensitivity
from thunder_norm.norms.eager_environment import Argument
from thunder_norm.norms.lifts.inference import Inferred
from thunder_norm.report.rules import RuleName


@dataclass(frozen=True)
class Rounding:
    """What one operation, one parameter or the inputs add to the error of a program in low precision, to first order.

    Attributes:
        dtypes: the formats it rounds to.
        added: how far its roundings move its result and operands at most, in their norms, the sum of all.
        added_typical: their root mean square over all entries, for errors that are uniform between minus and plus half a spacing.
        arriving: how far the results of the program move by that at most, in their norms: added times sensitivity, inside of
            what has one rule as a whole (a normalization written out) times that of each operation up to its result.  Infinite beyond
            the largest number, unless infinity there makes no difference (a mask of softmax).
        arriving_typical: the root mean square over the entries of the results (the length of that of all results).
    """

    dtypes: tuple[str, ...]
    added: float
    added_typical: float
    arriving: float
    arriving_typical: float


# Errors within this factor of each other are as predicted.
_NEAR = 3.0


@dataclass(frozen=True)
class LowPrecision:
    """A program in low precision: what is predicted of its results, and what it does.

    Attributes:
        formats: the dtypes by pattern.
        bound: how far the results move at most, in their norms, to first order; the sum of what arrives.
        typical: the root mean square of their error over all entries, for independent roundings.
        measured: how far they moved, in their norms; None if that is not known.
        measured_typical: the root mean square of their error.
        measured_by: what was run for that, or why nothing could be.
        inputs: what rounding the inputs adds.
    """

    formats: Mapping[str, str]
    bound: float
    typical: float
    measured: float | None
    measured_typical: float | None
    measured_by: str
    inputs: Rounding | None

    @property
    def remark(self) -> str | None:
        """What to make of a measured error that is not the predicted one: beyond the bound, or by more than a factor of 3; None of others."""
        if self.measured is None or self.measured_typical is None:
            return None
        if self.measured_typical > _NEAR * self.typical or self.measured > self.bound:
            return "more than predicted: operations round inside, or beyond first order"
        if self.measured_typical * _NEAR < self.typical:
            return "less than predicted: longer numbers in between, or errors that cancel"
        return None


@dataclass(frozen=True)
class ReportRow:
    """One operation.

    Attributes:
        op: the operation.
        module: dotted path of the module whose forward called it.
        location: ``file.py:line:  text`` of the user's call.
        kind: which norm.
        elem_dims: the dimensions it runs over.
        shape: of the result.
        norm_size: bound on the result's norm.
        sensitivity: of the model's output to a perturbation of this result (0 if it does not depend on it); of this result to the
            inputs in a report of scope "composed" or "within".
        actual: the result's own norm, where there is data.
        tightness: actual / norm_size, at most 1 in mode "bound"; 1 where both are infinite, None where both are 0, NaN where either is.
        rule: the rule that gave the norm.
        arguments: its normed arguments, with the factors of their conversions.
        rounding: what it adds to the error of the program in low precision, if that was asked for and it rounds.
        parts: the actual norm of what the result has at each index of the dimension that was asked for (`per`), over the other
            elem_dims; None if it has no such dimension, or no other elem_dims, or is an operator between this one and another.
    """

    op: str
    module: str
    location: str
    kind: str
    elem_dims: tuple[int, ...]
    shape: tuple[int, ...]
    norm_size: float
    sensitivity: float
    actual: float | None
    tightness: float | None
    rule: Callable | None = None
    arguments: tuple[Argument, ...] = ()
    rounding: Rounding | None = None
    parts: tuple[float, ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The rule by its name: rules are not what their modules have under it."""
        return {**self.__dict__, "rule": RuleName.of(self.rule)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """With the rule that has the name here."""
        name = state["rule"]
        self.__dict__.update(state, rule=None if name is None else name.find())

    def __deepcopy__(self, memo: dict[int, Any]) -> ReportRow:
        """Itself: nothing in it changes."""
        return self

    __copy__ = functools.partialmethod(__deepcopy__, {})


def is_nan(row: ReportRow) -> bool:
    """Whether the norm of a result, or its data, is NaN."""
    return math.isnan(row.norm_size) or row.actual is not None and math.isnan(row.actual)


def is_infinite(row: ReportRow) -> bool:
    """Whether the norm of a result, or its data, is infinite."""
    return math.isinf(row.norm_size) or row.actual is not None and math.isinf(row.actual)


@dataclass(frozen=True, repr=False)
class Findings:
    """What a report has found.

    Attributes:
        rows: the operations in order of execution.
        parameters: the same for parameters, by name.
        inferred: for each parameter its kind, what uses it, and why it has that kind.
        explains: whether the printed report has explanations under the table.
        scope: "local" if each operation is bounded at the data of this run, from the norms of its arguments and to first order;
            "global" if norms and sensitivities hold for all inputs of the given norms; "composed" if they do for the parameters of
            this run, and the rows of operations have the sensitivity of their result to the inputs, not that of the output to it;
            "within" is that for inputs within `radius` of the data.
        precision: the program in low precision, if that was asked for.
        radius: how far inputs may be from the data, in their norms, in a report of scope "within".
    """

    rows: tuple[ReportRow, ...]
    parameters: Mapping[str, ReportRow]
    inferred: Mapping[str, Inferred] = field(default_factory=dict)
    explains: bool = False
    scope: Sensitivity = "global"
    precision: LowPrecision | None = None
    radius: float | None = None

    def __iter__(self) -> Iterator[ReportRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def first_nan(self) -> ReportRow | None:
        """The first operation whose result's norm, or data, is NaN."""
        return next((r for r in self.rows if is_nan(r)), None)

    @property
    def first_infinite(self) -> ReportRow | None:
        """The first operation whose result's norm, or data, is infinite."""
        return next((r for r in self.rows if is_infinite(r)), None)
