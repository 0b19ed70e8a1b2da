"""What rules remember about a result beyond its norm: from which tensor, and how, it was made.

A program that writes a function out in elementary operations loses what ties them together: in ``x * sigmoid(x)`` both factors
come from one x, which no bound on a product of two tensors can see.  Rules with a condition attach a fact to each step
(`with_fact`), and the last one, which finds that all its arguments were made from one x, gives the bound of the whole.  A step that
no such rule knows gives a result without facts, and the general rules apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.composed import Spread, spread_of
from thunder_norm.core.context import COMPOSED, current_sensitivity, values_of
from thunder_norm.core.conversions import factor
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import is_within
from thunder_norm.core.perturbations import perturbation_of
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules import _again
from thunder_norm.rules._shared import Constant
from thunder_norm.scalars import times

F = TypeVar("F")


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor as it was when something was made from it: it may be changed in place afterwards."""

    kind: type[NormedTensor]
    backing: torch.Tensor
    norm_size: torch.Tensor
    perturbation_size: torch.Tensor | None
    elem_dims: ed.Dims
    least: float = 0.0
    facts: Alternatives = field(default_factory=lambda: NOTHING)
    spread: Spread | None = None
    away: NormedTensor | None = None

    @staticmethod
    def of(x: NormedTensor) -> Source:
        """The tensor as it is now."""
        spread = spread_of(x) if current_sensitivity() in COMPOSED and x.perturbation_size is not None else None
        as_now = x.norm_size, x.perturbation_size, x.elem_dims, x._least
        return Source(type(x), x.backing, *as_now, every_fact(x), spread, x._away)

    def moving(self) -> Any:
        """It again, without facts, and how it moves."""
        out = self.kind._wrap(self.backing, self.norm_size, self.perturbation_size, self.elem_dims)
        out._spread, out._away = self.spread, self.away
        return out

    def is_same(self, other: Source) -> bool:
        """Whether both are the same values with the same claims, or were computed alike from such."""
        if self.kind is not other.kind or self.elem_dims != other.elem_dims:
            return False
        is_one = self.backing is other.backing
        if is_one and self.norm_size is other.norm_size and self.perturbation_size is other.perturbation_size:
            return True
        if is_one:
            return False
        made = _again.made_as(self.backing, (self.norm_size, self.perturbation_size))
        return made is not None and made is _again.made_as(other.backing, (other.norm_size, other.perturbation_size))

    def tensor(self, scale: float = 1.0) -> Any:
        """It again, or a multiple of it, its norm that many times: without facts, its backing only for the shape unless a rule looks.

        Inside "within" it moves as far, so that rules know how far it may be from the data.
        """
        backing = self.backing if scale == 1 or current_sensitivity() not in ("local", "within") else self.backing * scale
        moved = None if self.perturbation_size is None or not is_within() else times(self.perturbation_size.detach(), abs(scale))
        out = self.kind._wrap(backing, times(self.norm_size, abs(scale)), moved, self.elem_dims)
        out._least = self.least * abs(scale)
        if scale == 1 and is_within():
            out._spread, out._away = self.spread, self.away
        return out


@dataclass(frozen=True, eq=False)
class Filled:
    """Some entries of a tensor are one entry, which may be a NaN that stands for none."""

    kept: torch.Tensor  # which entries are others
    is_number: torch.Tensor  # whether that one is a number
    norm_size: torch.Tensor  # of the entries that are numbers


@dataclass(frozen=True, eq=False)
class Lowered:
    """Some entries of a tensor were set aside, where a plain mask is set: none is larger than x there, or than 0.  The others are those of x.

    They are numbers that are not positive and do not move, or x less numbers that are not negative: the tensor moves no farther than x.
    The largest of some is, in modulus, no larger than one of x, if one of those left is among them.
    """

    x: Source
    mask: torch.Tensor


class Masked(Lowered):
    """These are minus infinity."""


@dataclass(frozen=True, eq=False)
class Raised:
    """The same of numbers that are not negative, or added to x, and of least entries."""

    x: Source
    mask: torch.Tensor


class MaskedAbove(Raised):
    """These are plus infinity."""


@dataclass(frozen=True, eq=False)
class ProductOf:
    """The product, entry by entry, of two tensors that are not made from one."""

    a: Source
    b: Source


@dataclass(frozen=True, eq=False)
class SoftmaxOf:
    """The softmax of x along a dimension."""

    x: Source
    dim: int


class Alternatives(tuple):
    """Several facts about one tensor, those about where it comes from first."""


NOTHING = Alternatives()


def every_fact(x: Any) -> Alternatives:
    """The facts about x; none if x is no normed tensor."""
    found = x._facts if isinstance(x, NormedTensor) else None
    return found if isinstance(found, Alternatives) else NOTHING if found is None else Alternatives((found,))


def fact(x: Any, kind: type[F]) -> F | None:
    """The first fact of that kind about x, if x is a normed tensor and there is one."""
    return next((f for f in every_fact(x) if isinstance(f, kind)), None)


def with_fact(result: NormedTensor, what: Any) -> NormedTensor:
    """A rule's result with a fact about it."""
    result._facts = what
    return result


def unconditional(op: Callable, *args: Any, **kwargs: Any) -> Any:
    """What the rules without a condition say: sensitivities to the arguments as they are, whatever they are converted to."""
    found = normed_op(op).find(args, kwargs, with_conditions=False)
    if found is None:
        raise NormMismatchError("there is no norm rule for these kinds")
    rule, bound = found
    given = dict(bound.arguments)
    prepared = rule.prepare(bound)
    factors = {name: c for name, x in given.items() if (c := _converted_by(x, prepared.arguments[name])) != 1}
    result = rule.run(prepared)
    for y in result if isinstance(result, list | tuple) else (result,):
        if isinstance(y, NormedTensor) and y._sensitivity is not None:
            y._sensitivity = {name: _times(c, factors.get(name, 1.0)) for name, c in y._sensitivity.items()}
    return result


def ruled(op: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[NormedTensor, torch.Tensor | None] | None:
    """What the rules without a condition say, and how far the result moves; None if there is none for these kinds."""
    known = normed_op(op)
    found = known.find(args, kwargs, with_conditions=False)
    if found is None:
        return None
    own, bound = found
    prepared = own.prepare(bound)
    result = own.run(prepared)
    return result, perturbation_of(known, own, prepared, result)


def _converted_by(x: Any, prepared: Any) -> Any:
    """How many times as far as x an argument moves that a rule got in its place; for each of a list."""
    if isinstance(x, list | tuple):
        return [_converted_by(given, got) for given, got in zip(x, prepared, strict=True)]
    return factor(x, type(prepared), prepared.elem_dims) if isinstance(x, NormedTensor) and x is not prepared else 1.0


def _times(constant: Any, by: Any) -> Any:
    if isinstance(constant, list | tuple):
        return [_times(c, b) for c, b in zip(constant, by if isinstance(by, list) else [by] * len(constant), strict=True)]
    return times(constant, by)


def moves_with(source: Source, result: NormedTensor, lipschitz: Constant, *arguments: str) -> NormedTensor:
    """A rule's result that moves with `source` alone, by `lipschitz` times as much; its `arguments` were made from it."""
    moved = None if source.perturbation_size is None else times(source.perturbation_size, lipschitz)
    out = type(result)._wrap(None, result.norm_size, moved, result.elem_dims)  # type: ignore[arg-type]
    out._sensitivity = dict.fromkeys(arguments, 0)
    return out


def is_plain(x: Any) -> bool:
    """Whether x is a plain floating tensor."""
    return isinstance(x, torch.Tensor) and not isinstance(x, NormedTensor) and has_norm(x)


def is_rms(*values: Any) -> bool:
    """Whether all are normed tensors of RMS kind."""
    return all(isinstance(v, RMSTensor) for v in values)


def values_known(t: torch.Tensor) -> torch.Tensor | None:
    """A plain tensor's values, if they are known by now."""
    values = values_of(t)
    return None if isinstance(values, FakeTensor | NormedTensor) or values.is_meta else values


def has_infinity(x: Any) -> bool:
    """Whether a plain constant, the values of which are known by now, is infinite somewhere."""
    values = (
        values_known(x)
        if isinstance(x, torch.Tensor) and not isinstance(x, NormedTensor | torch.nn.Parameter) and has_norm(x)
        else None
    )
    if values is None:
        return False
    with _disable_current_modes():
        return bool(values.isinf().any())
