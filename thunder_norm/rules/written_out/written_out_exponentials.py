"""Softmax, the logistic function and softplus written out in exponentials.

    e = torch.exp(x - x.amax(-1, keepdim=True)); e / e.sum(-1, keepdim=True)
    torch.exp(x - torch.logsumexp(x, -1, keepdim=True))
    x / (1 + torch.exp(-x))
    torch.log1p(torch.exp(x))

Op by op an exponential is bounded by its largest entry, and a quotient of two of them not at all.  Here a difference remembers along
which dimensions it is x minus one number, an exponential of what it is one, and a sum over which dimensions: a quotient of the two is
the softmax it is, whatever the number that was subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.known_ranges import range_of
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.ranges import OfEntries, Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import (
    Alternatives,
    Lowered,
    Masked,
    SoftmaxOf,
    Source,
    every_fact,
    fact,
    moves_with,
    unconditional,
    with_fact,
)
from thunder_norm.rules._gaussian import second_moment_root
from thunder_norm.rules._set_aside import entries_left, of_those_left
from thunder_norm.rules._shared import SAME_DIMS, Number, dims_tuple, rms
from thunder_norm.rules.written_out._derived import are_of_one, with_facts
from thunder_norm.rules.written_out._forms import Form
from thunder_norm.rules.written_out.dual_variables import largest_of  # its rules of differences go before those here
from thunder_norm.rules.written_out.stretched import Stretched
from thunder_norm.rules.written_out.written_out_activations import Gate, logistic_gate, polynomials, product_with_gate

Dim = int | Sequence[int] | None


@dataclass(frozen=True, eq=False)
class Bounding:
    """A fact: for each group over `dims` a number that no entry of x exceeds: the largest, or more; log sum exp x if `is_log_sum`.

    The dimensions are still there with size 1, but for one that `is_reduced`.
    """

    x: Source
    dims: ed.Dims
    is_log_sum: bool
    is_reduced: bool = False


@dataclass(frozen=True, eq=False)
class Shifted:
    """A fact: x minus a number for each group over `dims`; log softmax of x if `is_log_softmax`."""

    x: Source
    dims: ed.Dims
    is_log_softmax: bool = False


@dataclass(frozen=True, eq=False)
class Exponential(OfEntries):
    """A fact: ``e^argument``, where the argument is x minus a number for each group over `dims` (None: it is x).

    `polynomials`: the argument as one of entries, of one or another tensor.
    """

    argument: Source
    polynomials: tuple[Form, ...]
    x: Source
    dims: ed.Dims | None


@dataclass(frozen=True, eq=False)
class ExponentialSum:
    """A fact: the sum of exponentials over `dims`, which are still there with size 1."""

    of: Exponential
    dims: ed.Dims


@dataclass(frozen=True, eq=False)
class OnePlusExponential:
    """A fact: ``1 + e^argument``."""

    of: Exponential


def _is_rms(args: dict[str, Any]) -> bool:
    return isinstance(args["input"], RMSTensor)


def _knows(kind: type, *names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda args: all(fact(args[name], kind) is not None for name in names)


# -- what is subtracted ---------------------------------------------------------------------------------------------------


@normed_op(torch.amax).register_norm(when=_is_rms)
def amax(input: RMSTensor, dim: Dim = None, keepdim: bool = False) -> NormedTensor:
    """The largest entry: as ever, and of what."""
    dims = dims_tuple(dim, input.ndim)
    result = of_those_left(torch.amax, input, Lowered, dims, keepdim)
    return _bounds(result, input, dims, keepdim)


@normed_op(torch.max).register_norm(when=lambda args: isinstance(args["dim"], int))
def max_along(input: RMSTensor, dim: int, keepdim: bool = False) -> tuple:
    """The largest entry: as ever, and of what."""
    dims = dims_tuple(dim, input.ndim)
    result, index = of_those_left(torch.max, input, Lowered, dim, keepdim)
    return _bounds(result, input, dims, keepdim), index


@normed_op(torch.logsumexp).register_norm(when=_is_rms)
def logsumexp(input: RMSTensor, dim: Any, keepdim: bool = False) -> NormedTensor:
    """log sum exp x: as ever, of the entries that are not set aside, and of what."""
    dims = dims_tuple(dim, input.ndim)
    return _bounds(of_those_left(torch.logsumexp, input, Lowered, dims, keepdim, by=torch.amax), input, dims, keepdim, True)


def _bounds(result: NormedTensor, x: NormedTensor, dims: ed.Dims, keepdim: bool, is_log_sum: bool = False) -> NormedTensor:
    if not keepdim and len(dims) > 1:
        return result
    return with_fact(result, Alternatives(Bounding(of, dims, is_log_sum, not keepdim) for of in sources_of(x)))


def _bounding(x: Any, of: Any) -> Bounding | None:
    return _bounding_one_of(x, [Source.of(of)]) if isinstance(of, NormedTensor) else None


def _bounding_one_of(x: Any, sources: list[Source]) -> Bounding | None:
    known = [f for f in every_fact(x) if isinstance(f, Bounding) and not f.is_reduced]
    return next((f for f in known if any(map(f.x.is_same, sources))), None)


@dataclass(frozen=True, eq=False)
class Beneath(OfEntries):
    """A fact: no entry is larger than x's: what is not negative was subtracted from x."""

    x: Source


@dataclass(frozen=True, eq=False)
class DetachedFrom(OfEntries):
    """A fact: the same numbers as x, of which nothing is differentiated."""

    x: Source


def sources_of(x: NormedTensor) -> list[Source]:
    """A tensor, and what it was detached from: the same numbers."""
    return [Source.of(x), *(f.x for f in every_fact(x) if isinstance(f, DetachedFrom))]


def _detached(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    x = args[0] if args else kwargs["input"]
    if not isinstance(x, NormedTensor):
        return out._facts
    exponentials = [f for f in every_fact(x) if isinstance(f, Exponential)]
    return Alternatives((*every_fact(out), *map(DetachedFrom, sources_of(x)), *exponentials))


normed_op(torch.detach).register_fact(_detached)


@normed_op(torch.detach).register_norm(when=_knows(Bounding, "input"))
def detach(input: RMSTensor) -> NormedTensor:
    """The same numbers, and of what."""
    found = fact(input, Bounding)
    return with_fact(unconditional(torch.detach, input), found)


def _constant_dims(x: NormedTensor, by: NormedTensor | torch.Tensor) -> ed.Dims:
    """Along which dimensions of x what is subtracted is one number."""
    return tuple(d for d in ed.every(x.ndim) if -d > by.ndim or by.shape[d] == 1 != x.shape[d])


def _is_shift(args: dict[str, Any]) -> bool:
    """Whether a number for each group is subtracted, of which no more is known (a mean is the affair of `written_out_groups`)."""
    x, by = args["input"], args["other"]
    return args["alpha"] == 1 and x.ndim >= by.ndim and bool(_constant_dims(x, by)) and not are_of_one(x, by)


@normed_op(torch.sub).register_norm(when=_is_shift, allow_plain_tensors="constant", lift_dims=SAME_DIMS)
def sub_number_of_group(input: RMSTensor, other: RMSTensor | torch.Tensor, alpha: Number = 1) -> NormedTensor:
    """x minus a number for each group: as every difference, and that it is one."""
    result = unconditional(torch.sub, input, other, alpha)
    found = _bounding(other, input)
    return with_fact(result, Shifted(Source.of(input), _constant_dims(input, other), found is not None and found.is_log_sum))


def _less_its_log_sum(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """A log softmax is one, too, where another rule knows the difference better (`dual_variables`)."""
    given = dict(zip(("input", "other", "alpha"), args, strict=False)) | kwargs
    x, by = given["input"], given["other"]
    found = _bounding(by, x)
    if found is None or not found.is_log_sum or fact(out, Shifted) is not None or given.get("alpha", 1) != 1:
        return out._facts
    return Alternatives((*every_fact(out), Shifted(Source.of(x), _constant_dims(x, by), True)))


normed_op(torch.sub).register_fact(_less_its_log_sum)


def difference_of_largest(a: Any, b: Any) -> Range | None:
    """The range of x minus what no entry of it exceeds, or of what it is beneath; or the other way round."""
    if _is_no_larger(a, b):
        return Range(-float("inf"), 0.0)
    return Range(0.0, float("inf")) if _is_no_larger(b, a) else None


def _is_no_larger(a: Any, b: Any) -> bool:
    if not isinstance(a, NormedTensor) or not isinstance(b, NormedTensor):
        return False
    above = [f.x for f in every_fact(a) if isinstance(f, Beneath)]
    if _bounding_one_of(b, [Source.of(a), *above]) is not None:
        return True
    return bool(above) and a.shape == b.shape and any(map(Source.of(b).is_same, above))


@normed_op(F.log_softmax).register_norm(when=lambda args: isinstance(args["dim"], int))
def log_softmax(input: RMSTensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> NormedTensor:
    """log softmax: as ever, and of what."""
    return with_fact(unconditional(F.log_softmax, input, dim), Shifted(Source.of(input), dims_tuple(dim, input.ndim), True))


# -- exponentials and their sums ------------------------------------------------------------------------------------------


# no exponential of numbers of at most 0 is meant to be of larger ones than this, but of those that are masked: sums of decays over a chunk are smaller
_MASKED = 2000.0
_LARGE = 100.0  # beyond, a range says nothing of an exponential that is of use


def _decay(n: torch.Tensor) -> torch.Tensor:
    known = n < _MASKED
    one = bounded(1.0, n)
    return torch.where(known, second_moment_root(lambda x: torch.exp(-x.abs()), torch.where(known, n, one)), one)


def _largest(x: RMSTensor, found: Range | None) -> torch.Tensor | None:
    """What no exponential of an entry of x exceeds, where more is known than x's norm."""
    most = largest_of(x)
    if most is not None:
        return most.exp() + bounded(0.0, x.norm_size)
    return bounded(math.exp(found.high), x.norm_size) if found is not None and found.high < _LARGE else None


@normed_op(torch.exp).register_norm(when=_is_rms)
def exp(input: RMSTensor) -> NormedTensor:
    """e^x: as ever, and of what; for x of at most c, by what made it, value and sensitivity at most e^c.

    A log softmax gives the softmax: its value and sensitivity.
    Entries that are set aside (minus infinity) count as those they were before.
    Typical:     of x of at most 0, ``sqrt(E e^(-2 n |z|))`` for both: x is half of a Gaussian; 1 where n is that of a mask, and no farther than
                 in a jump where it is that of a constant x is multiplied by (`stretched`)
    Gap:         the norm of x does not count where its range does
    """
    shifted = fact(input, Shifted)
    if shifted is not None and shifted.is_log_softmax and len(shifted.dims) == 1:
        return _softmax(shifted.x, shifted.dims[0], "input")
    masked = fact(input, Masked)
    entries = input if masked is None else entries_left(masked, input)  # of what is set aside the exponential is 0
    found, result, n = range_of(input), unconditional(torch.exp, entries), entries.norm_size
    if masked is not None and is_local(input):  # the steepest slope is that of entries that are left
        slope = torch.minimum((result._sensitivity or {})["input"], (unconditional(torch.exp, input)._sensitivity or {})["input"])
        result = rms(result.norm_size, input.elem_dims, sensitivity={"input": slope})
    if current_mode() != "modula" and found is not None and found.high <= 0:
        if current_mode() == "typical":
            size = slope = _decay(n)
            if (stretched := fact(input, Stretched)) is not None:
                slope = torch.minimum(slope, stretched.slope(n))
        else:
            one = bounded(1.0, n)
            size, slope = torch.minimum(result.norm_size, one), torch.minimum((result._sensitivity or {})["input"], one)
        result = rms(size, input.elem_dims, sensitivity={"input": slope})
    elif current_mode() != "modula" and (largest := _largest(input, found)) is not None:
        size, slope = (torch.minimum(n, largest) for n in (result.norm_size, (result._sensitivity or {})["input"]))
        result = rms(size, input.elem_dims, sensitivity={"input": slope})
    own, known = Source.of(input), polynomials(input)
    facts = [] if shifted is None else [Exponential(own, known, shifted.x, shifted.dims)]
    return with_facts(result, [*facts, Exponential(own, known, own, None)])


@normed_op(torch.sum).register_norm(when=lambda args: args["keepdim"] is True and fact(args["input"], Exponential) is not None)
def sum_of_exponentials(
    input: RMSTensor, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> NormedTensor:
    """A sum: as ever, and of which exponentials."""
    found = fact(input, Exponential)
    assert found is not None, "the rule's condition has been checked"
    return with_fact(unconditional(torch.sum, input, dim, keepdim), ExponentialSum(found, dims_tuple(dim, input.ndim)))


def _is_softmax(args: dict[str, Any]) -> bool:
    a, total = fact(args["input"], Exponential), fact(args["other"], ExponentialSum)
    if a is None or total is None or len(total.dims) != 1 or not a.argument.is_same(total.of.argument):
        return False
    return a.dims is None or set(total.dims) <= set(a.dims)


@normed_op(torch.div).register_norm(when=lambda args: args["rounding_mode"] is None and _is_softmax(args))
def div_exponentials(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> NormedTensor:
    """e^(x - c) / sum e^(x - c): the softmax of x, whatever c is as long as it is one number for each group.

    Value, sensitivity: those of `softmax`, to x.
    """
    found, total = fact(input, Exponential), fact(other, ExponentialSum)
    assert found is not None and total is not None, "the rule's condition has been checked"
    return _softmax(found.x, total.dims[0], "input", "other")


def _softmax(x: Source, dim: int, *arguments: str) -> NormedTensor:
    result = unconditional(F.softmax, x.tensor(), dim)
    return with_fact(moves_with(x, result, (result._sensitivity or {})["input"], *arguments), SoftmaxOf(x, dim))


# -- logistic function and softplus ---------------------------------------------------------------------------------------


def _one_plus(x: RMSTensor, result: NormedTensor) -> NormedTensor:
    found = fact(x, Exponential)
    assert found is not None, "the rule's condition has been checked"
    return with_fact(result, OnePlusExponential(found))


@normed_op(torch.add).register_norm(when=lambda args: args["other"] * args["alpha"] == 1 and _knows(Exponential, "input")(args))
def add_one(input: RMSTensor, other: Number, alpha: Number = 1) -> NormedTensor:
    """e^x + 1: as every sum, and what it is."""
    return _one_plus(input, unconditional(torch.add, input, other, alpha))


@normed_op(torch.add).register_norm(when=lambda args: args["input"] == 1 == args["alpha"] and _knows(Exponential, "other")(args))
def one_plus(input: Number, other: RMSTensor, alpha: Number = 1) -> NormedTensor:
    """1 + e^x: as every sum, and what it is."""
    return _one_plus(other, unconditional(torch.add, input, other, alpha))


def _gate_of(divisor: NormedTensor) -> tuple[Source, Gate]:
    found = fact(divisor, OnePlusExponential)
    assert found is not None, "the rule's condition has been checked"
    return found.of.argument, logistic_gate(found.of.polynomials)


@normed_op(torch.reciprocal).register_norm(when=_knows(OnePlusExponential, "input"))
def reciprocal(input: RMSTensor) -> NormedTensor:
    """1 / (1 + e^x): the logistic function of -x.  Value, sensitivity: its own, to x."""
    x, gate = _gate_of(input)
    result = unconditional(torch.sigmoid, x.tensor(-1.0))
    return with_fact(moves_with(x, result, (result._sensitivity or {})["input"], "input"), gate)


@normed_op(torch.div).register_norm(
    when=lambda args: (
        args["rounding_mode"] is None
        and _knows(OnePlusExponential, "other")(args)
        and product_with_gate(args["input"], _gate_of(args["other"])[1]) is not None
    )
)
def div_by_one_plus(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> NormedTensor:
    """x / (1 + e^(-a x)): silu.  Value, sensitivity: its own, to x."""
    result = product_with_gate(input, _gate_of(other)[1])
    assert result is not None, "the rule's condition has been checked"
    return result


def _softplus(x: Source) -> NormedTensor:
    result = unconditional(F.softplus, x.tensor())
    return moves_with(x, result, (result._sensitivity or {})["input"], "input")


@normed_op(torch.log).register_norm(when=_knows(OnePlusExponential, "input"))
def log(input: RMSTensor) -> NormedTensor:
    """The softplus of x.  Value, sensitivity: its own, to x."""
    found = fact(input, OnePlusExponential)
    assert found is not None, "the rule's condition has been checked"
    return _softplus(found.of.argument)


@normed_op(torch.log1p).register_norm(when=_knows(Exponential, "input"))
def log1p(input: RMSTensor) -> NormedTensor:
    """The softplus of x.  Value, sensitivity: its own, to x."""
    found = fact(input, Exponential)
    assert found is not None, "the rule's condition has been checked"
    return _softplus(found.argument)
