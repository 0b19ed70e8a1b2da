"""Which numbers the entries of a result can be.  `range_bounds` has the rules of operations that need to know.

Ranges hold for all tensors of the inputs' norms; what they say of an operation follows from the operation alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.ranges import Range, union
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._shared import argument, dims_tuple, negative
from thunder_norm.rules.written_out.written_out_exponentials import difference_of_largest

Of = Callable[[Any], Range | None]
Known = Range | None


def constant(c: float) -> Range:
    """Of one number."""
    return Range(c, c)


_ANY = Range()
_NOT_NEGATIVE = Range(0.0, math.inf)
_ZERO = Range(0.0, 0.0)


def _of_first(f: Callable[[Range], Known]) -> Callable[[tuple, Mapping[str, Any], Of], Known]:
    """The rule of an operation whose result's range follows from that of its first argument."""

    def rule(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
        return f(of(argument(args, kwargs, 0, "input", "self")) or _ANY)

    return rule


def _operands(first: Any, second: Any, of: Of) -> tuple[Range, Range] | None:
    """Of two operands, if something is known of both; a plain tensor is a constant, and looked at where that may matter."""
    first_is_plain = isinstance(first, torch.Tensor) and not isinstance(first, NormedTensor)
    found: dict[int, Range] = {}
    for i, x in ((1, second), (0, first)) if first_is_plain else ((0, first), (1, second)):
        r = of(x)
        if r is None or r.is_known_by_norms_alone:
            return None
        is_plain = isinstance(x, torch.Tensor) and not isinstance(x, NormedTensor)
        found[i] = replace(r, averaged=math.inf) if is_plain else r
    return found[0], found[1]


def _register(rule: Callable, ops: Iterable[Callable]) -> None:
    for op in ops:
        normed_op(op).register_range(rule)


# -- functions of an entry ------------------------------------------------------------------------------------------------


def exponential(x: float) -> float:
    """e^x, infinite beyond a float."""
    return math.exp(x) if x < 700 else math.inf


def softplus(x: float) -> float:
    """log(1 + e^x)."""
    return x + math.log1p(exponential(-x)) if x > 0 else math.log1p(exponential(x))


def _root(x: float) -> float:
    return math.sqrt(max(x, 0.0))


def _logistic(x: float) -> float:
    return 1 / (1 + exponential(-x))


def _around_half(r: Range) -> Range:
    """Between 0 and 1, as often above one half as below: at most as far from their mean as a mean of two squares is from its own."""
    return replace(r.of_entries(), averaged=max(r.averaged, 2.0))


def of_log_sigmoid(r: Range) -> Range:
    """Of log sigmoid(x)."""
    return r.image(lambda x: -softplus(-x), F.logsigmoid)


def _itself(x: Any) -> Any:
    return x


_OF_ENTRIES: dict[Callable, Callable[[Range], Known]] = {
    torch.exp: lambda r: r.image(exponential, torch.exp),
    torch.expm1: lambda r: r.image(lambda x: exponential(x) - 1, torch.expm1),
    torch.sigmoid: lambda r: _around_half(r.image(_logistic, torch.sigmoid)),
    torch.tanh: lambda r: r.image(math.tanh, torch.tanh),
    torch.erf: lambda r: r.image(math.erf, torch.erf),
    torch.sqrt: lambda r: r.between(0.0, math.inf).image(_root, torch.sqrt),
    torch.abs: lambda r: r.even_image(_itself, _itself),
    torch.square: lambda r: r.even_image(lambda x: x * x, torch.square),
    torch.neg: Range.negative,
    torch.relu: lambda r: r.between(0.0, math.inf),
    F.relu6: lambda r: r.between(0.0, 6.0),
    F.logsigmoid: of_log_sigmoid,
    torch.reciprocal: Range.inverse,
    torch.cosh: lambda r: replace(r.even_image(lambda x: math.cosh(x) if x < 700 else math.inf, torch.cosh), low=1.0),
    torch.sin: lambda r: Range(-1.0, 1.0),
    torch.cos: lambda r: Range(-1.0, 1.0),
}
for _op, _f in _OF_ENTRIES.items():
    normed_op(_op).register_range(_of_first(_f))

# The same entries at the same places.
_COPIES = (
    torch.clone, torch.detach, torch.Tensor.contiguous, torch.Tensor.to, torch.Tensor.float, torch.Tensor.double, torch.Tensor.type_as,
)  # fmt: skip
# The entries of the first argument, or some of them, or numbers between them.
_PICKS = (
    torch.Tensor.view, torch.reshape, torch.flatten, torch.unflatten, torch.permute, torch.transpose, torch.movedim, torch.t,
    torch.flip, torch.roll, torch.unsqueeze, torch.squeeze, torch.Tensor.expand, torch.broadcast_to, torch.Tensor.expand_as,
    torch.Tensor.repeat, torch.repeat_interleave, torch.Tensor.__getitem__, torch.index_select, torch.gather, torch.narrow, torch.select,
    torch.chunk, torch.split, torch.unbind, torch.sort, torch.amax, torch.amin, torch.diagonal,
)  # fmt: skip
_register(_of_first(lambda r: r), _COPIES)
_register(_of_first(Range.of_entries), _PICKS)


def _count(args: tuple, kwargs: Mapping[str, Any], at: int) -> int:
    """Over how many entries a reduction runs, by its `dim`."""
    x = argument(args, kwargs, 0, "input", "self")
    dim = argument(args, kwargs, at, "dim")
    return ed.numel(x.shape, dims_tuple(None if isinstance(dim, bool) else dim, x.ndim))


def _length(at: int) -> Callable[[tuple, Mapping[str, Any], Of], Known]:
    """Of a norm or a deviation, whose `dim` is the argument at `at`."""
    return lambda args, kwargs, of: _NOT_NEGATIVE.of_many(_count(args, kwargs, at))


_register(_length(1), (torch.var, torch.std))
_register(_length(2), (torch.norm, torch.linalg.norm, torch.linalg.vector_norm))


def _distance(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Between rows of so many entries."""
    return _NOT_NEGATIVE.of_many(argument(args, kwargs, 0, "x1", "input").shape[-1])


_register(_distance, (torch.cdist, torch.ops.aten._euclidean_dist.default, torch.ops.aten._cdist_forward.default))


def _mean(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    found = of(argument(args, kwargs, 0, "input", "self"))
    return None if found is None else found.of_many(_count(args, kwargs, 1))


normed_op(torch.mean).register_range(_mean)


def _largest(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """The k largest of N numbers that are not negative are at least k / N of their sum."""
    x, k = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "k")
    dim = negative(argument(args, kwargs, 2, "dim", default=-1), x.ndim)
    found = of(x)
    if (
        found is None
        or found.least_sum is None
        or found.least_sum[0] != dim
        or not argument(args, kwargs, 3, "largest", default=True)
    ):
        return None if found is None else found.of_entries()
    return Range(found.low, found.high, (dim, found.least_sum[1] * k / x.shape[dim]))


normed_op(torch.topk).register_range(_largest)


def clamped(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of ``clamp(input, min, max)``."""
    found = of(argument(args, kwargs, 0, "input", "self")) or _ANY
    low, high = argument(args, kwargs, 1, "min"), argument(args, kwargs, 2, "max")
    if all(end is None or isinstance(end, int | float) for end in (low, high)):
        return found.between(-math.inf if low is None else float(low), math.inf if high is None else float(high))
    found = found if low is None else found.larger(of(low) or _ANY)
    return found if high is None else found.smaller(of(high) or _ANY)


for _op in (torch.clamp, torch.clamp_min):
    normed_op(_op).register_range(clamped, caps=True)
normed_op(torch.clamp_max).register_range(
    lambda args, kwargs, of: clamped(
        (argument(args, kwargs, 0, "input", "self"), None, argument(args, kwargs, 1, "max")), {}, of
    ),
    caps=True,
)


def _power(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    base, exponent = of(argument(args, kwargs, 0, "input", "self")) or _ANY, argument(args, kwargs, 1, "exponent")
    if isinstance(exponent, torch.Tensor):
        return base.to_the(of(exponent) or _ANY) if base.low >= 0 else None
    if not isinstance(exponent, int | float) or exponent == 0:
        return None
    if exponent < 0:
        inverse = base.inverse()
        return None if inverse is None else raised(inverse, -exponent)
    return raised(base, exponent)


def raised(r: Range, p: float) -> Known:
    """Of powers by p > 0."""
    if p % 2 == 0:
        return r.even_image(lambda x: _raised(x, p), lambda x: x.pow(p))
    return r.image(lambda x: _raised(x, p), lambda x: x.pow(p)) if p % 2 == 1 or r.low >= 0 else None


def _raised(x: float, p: float) -> float:
    try:
        return x**p
    except OverflowError:
        return math.copysign(math.inf, x) if p % 2 == 1 else math.inf


_register(_power, (torch.pow, torch.float_power))


# -- of several -----------------------------------------------------------------------------------------------------------


def _with_sums(found: Range, x: Any, r: Range, factor: float, more: float = 0.0) -> Range:
    """With what multiples, and a number more, of numbers that are not negative sum up to."""
    if factor <= 0 or more < 0 or not isinstance(x, torch.Tensor):
        return found
    least, most = (None if s is None else (s[0], factor * s[1] + more * x.shape[s[0]]) for s in (r.least_sum, r.most_sum))
    return replace(found, least_sum=least, most_sum=most)


def _sum(args: tuple, kwargs: Mapping[str, Any], of: Of, sign: float = 1.0) -> Known:
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    x, other = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    found = _operands(x, other, of)
    if found is None or not isinstance(alpha, int | float):
        return None
    total = found[0].plus(found[1].scaled(sign * alpha))
    return _with_sums(total, x, found[0], 1.0, sign * alpha * other) if isinstance(other, int | float) else total


normed_op(torch.add).register_range(_sum, caps=True)


def _difference(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    return (len(args) < 3 and not kwargs.get("alpha") and difference_of_largest(a, b)) or _sum(args, kwargs, of, -1.0)


normed_op(torch.sub).register_range(_difference, caps=True)
normed_op(torch.rsub).register_range(
    lambda args, kwargs, of: _sum((argument(args, kwargs, 1, "other"), args[0], *args[2:]), kwargs, of, -1.0) if args else None,
    caps=True,
)


def _product(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    first, second = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    if first is second and isinstance(first, torch.Tensor):
        return (of(first) or _ANY).even_image(lambda x: x * x, torch.square)
    found = _operands(first, second, of)
    if found is None:
        return None
    product = found[0].times(found[1])
    return _with_sums(product, first, found[0], second) if isinstance(second, int | float) else product


normed_op(torch.mul).register_range(_product)


def _quotient(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    first, second = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    found = _operands(first, second, of)
    inverse = None if found is None or kwargs.get("rounding_mode") is not None else found[1].inverse()
    if found is None or inverse is None:
        return None
    quotient = found[0].times(inverse)
    return _with_sums(quotient, first, found[0], 1 / second) if isinstance(second, int | float) else quotient


normed_op(torch.div).register_range(_quotient)


def _joined(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    found = [of(t) for t in argument(args, kwargs, 0, "tensors")]
    return None if None in found else union(r for r in found if r is not None)


_register(_joined, (torch.cat, torch.stack))


def _larger(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    a, b = (of(argument(args, kwargs, i, *names)) or _ANY for i, names in enumerate((("input", "self"), ("other",))))
    return a.larger(b)


normed_op(torch.maximum).register_range(_larger)


def _largest_entry(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of N entries that sum up to s, at least s / N."""
    x, dim = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "dim", "axis")
    if isinstance(dim, torch.Tensor) or "other" in kwargs:
        return _larger(args, kwargs, of)
    found = of(x)
    if found is None or found.least_sum is None or found.least_sum[0] not in dims_tuple(dim, x.ndim):
        return None if found is None else found.of_entries()
    along, least = found.least_sum
    return replace(found.of_entries(), low=max(found.low, least / x.shape[along]))


_register(_largest_entry, (torch.max, torch.amax))  # of amax it says more than that it picks entries


def _chosen(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    found = [of(argument(args, kwargs, 1, "input", "self")), of(argument(args, kwargs, 2, "other"))]
    return None if None in found else union(r for r in found if r is not None)


normed_op(torch.where).register_range(_chosen)


def _filled(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    found = [of(argument(args, kwargs, 0, "input", "self")), of(argument(args, kwargs, 2, "value"))]
    return None if None in found else union(r for r in found if r is not None)


normed_op(torch.masked_fill).register_range(_filled)


def _padded(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """The entries, and what is put around them: one of them, or a constant."""
    found = of(argument(args, kwargs, 0, "input", "self"))
    value = kwargs.get("value", args[-1] if len(args) > 2 and not isinstance(args[-1], str) else None)  # after a mode, or none
    around = value or 0.0
    return None if found is None or not isinstance(around, int | float) else union([found, Range(around, around)])


_register(_padded, (F.pad, torch.constant_pad_nd))


def _summed(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Sums over D of entries that sum up to s along a dimension: over it too s for each of the others, else that much along it."""
    x = argument(args, kwargs, 0, "input", "self")
    found = of(x)
    if found is None:
        return None
    dims = dims_tuple(argument(args, kwargs, 1, "dim", "axis"), x.ndim)
    count = ed.numel(x.shape, dims)
    total = found.scaled(float(count)).of_many(count)
    if found.least_sum is not None:
        along, least = found.least_sum
        sums = least * ed.numel(x.shape, [d for d in dims if d != along])
        if along in dims:
            total = replace(total, low=max(total.low, sums))
        else:
            keepdim = argument(args, kwargs, 2, "keepdim", "keepdims", default=False)
            total = replace(total, least_sum=(along if keepdim else along + sum(d > along for d in dims), sums))
    return total


normed_op(torch.sum).register_range(_summed)


def _filled_with(at: int | None, value: float = 0.0) -> Callable[[tuple, Mapping[str, Any], Of], Known]:
    """Of a new tensor with one number in all entries: `value`, or the argument at `at`."""

    def rule(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
        found = value if at is None else argument(args, kwargs, at, "fill_value")
        return Range(float(found), float(found)) if isinstance(found, int | float) else None

    return rule


_register(_filled_with(None, 1.0), (torch.ones, torch.ones_like, torch.Tensor.new_ones))
_register(_filled_with(None, 0.0), (torch.zeros, torch.zeros_like, torch.Tensor.new_zeros))
_register(_filled_with(1), (torch.full, torch.full_like))
_register(_filled_with(2), (torch.Tensor.new_full,))
_register(lambda args, kwargs, of: Range(0.0, 1.0), (torch.rand, torch.rand_like, F.one_hot))


def _places(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of places along a dimension, or among all entries."""
    x = argument(args, kwargs, 0, "input", "self")
    dim = argument(args, kwargs, 1, "dim", default=None)
    return Range(0.0, max(x.numel() if dim is None else x.shape[dim] if x.ndim else 1, 1) - 1.0)


_register(_places, (torch.argmax, torch.argmin))


def _dropped(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    found = of(argument(args, kwargs, 0, "input"))
    p, is_training = argument(args, kwargs, 1, "p", default=0.5), argument(args, kwargs, 2, "training", default=True)
    if is_training is False:
        return found
    return None if found is None or not 0 <= p < 1 else union([_ZERO, found, found.scaled(1 / (1 - p))])


normed_op(F.dropout).register_range(_dropped)
