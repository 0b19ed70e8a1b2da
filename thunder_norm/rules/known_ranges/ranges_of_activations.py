"""Which numbers the entries of activations, sums of products, scatters, averages and running products can be: further rules as in `ranges`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.known_ranges import range_of_constant
from thunder_norm.core.ranges import Range, union
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._shared import argument, dims_tuple, negative
from thunder_norm.rules.known_ranges.ranges import Known, Of, constant, exponential, of_log_sigmoid, raised, softplus

_ZERO = Range(0.0, 0.0)


def _register(rule: Callable[[tuple, Mapping[str, Any], Of], Known], *ops: Callable) -> None:
    for op in ops:
        normed_op(op).register_range(rule)


def _first(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Range:
    return of(argument(args, kwargs, 0, "input", "self")) or Range()


# -- functions of an entry ------------------------------------------------------------------------------------------------


def _increasing(
    f: Callable[..., float],
    *options: tuple[str, float],
    of_ends: Callable[..., torch.Tensor] | None = None,
    above: float = -math.inf,
) -> Callable[[tuple, Mapping[str, Any], Of], Known]:
    """Of a function that increases with each entry where its options, by name and default, are not negative.

    `of_ends` is the same for tensors, where it increases strictly: beyond `above`, and with options that are not 0.
    """

    def rule(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
        given = [argument(args, kwargs, i, name, default=default) for i, (name, default) in enumerate(options, 1)]
        if not all(isinstance(c, int | float) and c >= 0 for c in given):
            return None
        r = _first(args, kwargs, of)
        is_strict = all(given) and (above == -math.inf or r.is_above(above))
        return r.image(lambda x: f(x, *given), functools.partial(_called, of_ends, given) if of_ends and is_strict else None)

    return rule


def _called(f: Callable[..., torch.Tensor], options: list[float], x: torch.Tensor) -> torch.Tensor:
    return f(x, *options)


def _elu(x: float, alpha: float) -> float:
    return x if x > 0 else alpha * math.expm1(x)


def _celu(x: float, alpha: float) -> float:
    return x if x > 0 or alpha == 0 else alpha * math.expm1(x / alpha)


def _selu(x: float) -> float:
    return 1.0507009873554805 * _elu(x, 1.6732632423543772)


def _softsign(x: float) -> float:
    return math.copysign(1.0, x) if math.isinf(x) else x / (1 + abs(x))


def _exp2(x: float) -> float:
    return 2.0**x if x < 1000 else math.inf


def _sinh(x: float) -> float:
    return math.sinh(x) if abs(x) < 700 else math.copysign(math.inf, x)


def _leaky(x: float, slope: float) -> float:
    return x if x > 0 else 0.0 if slope == 0 else slope * x


def _logarithm(base: float) -> Callable[[float], float]:
    return lambda x: math.log(x) / math.log(base) if x > 0 else -math.inf


_register(_increasing(_elu, ("alpha", 1.0), of_ends=F.elu), F.elu)
_register(_increasing(_celu, ("alpha", 1.0), of_ends=F.celu), F.celu)
_register(_increasing(_selu, of_ends=F.selu), F.selu)
_register(_increasing(_leaky, ("negative_slope", 0.01), of_ends=F.leaky_relu), F.leaky_relu)
_register(_increasing(_softsign, of_ends=F.softsign), F.softsign)
_register(_increasing(_exp2, of_ends=torch.exp2), torch.exp2)
_register(_increasing(math.atan, of_ends=torch.atan), torch.atan)
_register(_increasing(math.asinh, of_ends=torch.asinh), torch.asinh)
_register(_increasing(_sinh, of_ends=torch.sinh), torch.sinh)
_register(_increasing(lambda x: math.log1p(x) if x > -1 else -math.inf, of_ends=torch.log1p, above=-1.0), torch.log1p)
for _log, _base in ((torch.log, math.e), (torch.log2, 2.0), (torch.log10, 10.0)):
    _register(_increasing(_logarithm(_base), of_ends=_log, above=0.0), _log)
_register(_increasing(lambda x: min(max(x / 6 + 0.5, 0.0), 1.0)), F.hardsigmoid)


def _softplus_range(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    found = of(argument(args, kwargs, 0, "input"))
    beta = argument(args, kwargs, 1, "beta", default=1.0)
    if not isinstance(beta, int | float) or beta <= 0:
        return None
    return (found or Range()).image(
        lambda x: softplus(beta * x) / beta if abs(x) < math.inf else max(x, 0.0), lambda x: F.softplus(x * beta) / beta
    )


_register(_softplus_range, F.softplus)


def _softmax(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """At least e^(l - h) / N of entries between l and h."""
    x, dim = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "dim")
    logarithm = _log_softmax(args, kwargs, of)
    total = (negative(dim, x.ndim), 1.0) if isinstance(dim, int) and x.ndim else None
    return replace(logarithm.image(exponential, torch.exp), least_sum=total, most_sum=total)


def _log_softmax(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Range:
    """Of N > 1 entries that differ by d at most, between -d - log N and -log(1 + (N - 1) e^(-d))."""
    x, dim = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "dim")
    if not isinstance(dim, int) or not x.ndim or x.shape[dim] < 2:
        return Range(-math.inf, 0.0)
    r, count = (of(x) or Range()).of_entries(), x.shape[dim]
    differences = r.plus(r.negative())
    low = differences.plus(constant(-math.log(count)))
    high = of_log_sigmoid(differences.plus(constant(-math.log(count - 1))))
    return replace(low, high=high.high, most=high.most, averaged=1.0)


_register(_softmax, torch.softmax)
_register(_log_softmax, torch.log_softmax)


def _gate(lowest: float) -> Callable[[tuple, Mapping[str, Any], Of], Known]:
    """Of x times what is between 0 and 1: at least its least value, and of x's sign."""

    def rule(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
        r = _first(args, kwargs, of)
        return Range(0.0 if r.low >= 0 else lowest, max(r.high, 0.0))

    return rule


# their least values, rounded down
_register(_gate(-0.1701), F.gelu)
_register(_gate(-0.2785), F.silu)
_register(_gate(-0.3089), F.mish)
_register(_gate(-0.375), F.hardswish)


def _hardtanh(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    low, high = argument(args, kwargs, 1, "min_val", default=-1.0), argument(args, kwargs, 2, "max_val", default=1.0)
    return _first(args, kwargs, of).between(float(low), float(high))


_register(_hardtanh, F.hardtanh)
_register(lambda args, kwargs, of: Range(-1.0, 1.0), torch.sign, torch.cosine_similarity, F.normalize)
_register(lambda args, kwargs, of: Range(0.0, 1.0), F.softmin)


def _rsqrt(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    inverse = _first(args, kwargs, of).between(0.0, math.inf).inverse()
    return Range(0.0, math.inf) if inverse is None else raised(inverse, 0.5)


_register(_rsqrt, torch.rsqrt)


# -- of several -----------------------------------------------------------------------------------------------------------


def _smaller(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    a, b = (of(argument(args, kwargs, i, *names)) or Range() for i, names in enumerate((("input", "self"), ("other",))))
    return a.smaller(b)


def _smallest(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of entries, or of the smaller one of two tensors' entries."""
    if isinstance(argument(args, kwargs, 1, "dim", "axis"), torch.Tensor) or "other" in kwargs:
        return _smaller(args, kwargs, of)
    return _first(args, kwargs, of).of_entries()


_register(_smaller, torch.minimum)
_register(_smallest, torch.min)


def _products(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of sums of products of a row and a column."""
    names = (("input", "self"), ("other", "mat2", "vec", "tensor"))
    a, b = (argument(args, kwargs, i, *n) for i, n in enumerate(names))
    r, s = of(a), of(b)
    if r is None or s is None:
        return None
    count = a.shape[-1]
    return r.of_entries().times(s.of_entries()).scaled(float(count)).of_many(count)


_register(_products, torch.matmul, torch.bmm, torch.mm, torch.mv, torch.dot)


def _with_products(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """a + c b d, entry by entry."""
    a, b, d = (of(argument(args, kwargs, i, *names)) for i, names in enumerate((("input", "self"), ("tensor1",), ("tensor2",))))
    c = argument(args, kwargs, 3, "value", default=1)
    if a is None or b is None or d is None or not isinstance(c, int | float):
        return None
    return a.plus(b.times(d).scaled(float(c)))


_register(_with_products, torch.addcmul)


def is_zero_constant(t: torch.Tensor) -> bool:
    """Whether it is a plain tensor whose values are known by now, and 0."""
    found = None if isinstance(t, NormedTensor) else range_of_constant(t)
    return found is not None and found.low == found.high == 0


def _added_at(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of sums of entries of two tensors, any number of the second's: the sign that both have."""
    x = argument(args, kwargs, 0, "input", "self")
    a, b = of(x) or Range(), of(argument(args, kwargs, 3, "src", "source")) or Range()
    if kwargs.get("alpha", 1) != 1:
        return None
    return Range(a.low if a.low >= 0 <= b.low else -math.inf, a.high if a.high <= 0 >= b.high else math.inf)


_register(_added_at, torch.scatter_add, torch.index_add)


def _replaced_by(place: int, *names: str) -> Callable[[tuple, Mapping[str, Any], Of], Known]:
    """Of entries some of which are replaced by a number, or those of another tensor."""

    def rule(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
        found = [of(argument(args, kwargs, 0, "input", "self")), of(argument(args, kwargs, place, *names))]
        return None if None in found or kwargs.get("reduce") is not None else union(r for r in found if r is not None)

    return rule


_register(_replaced_by(3, "src", "value"), torch.scatter)
_register(_replaced_by(3, "value", "source"), torch.index_fill, torch.index_copy)


def _made_of(value: float | None) -> Callable[[tuple, Mapping[str, Any], Of], Known]:
    """Of a new tensor with one number in all entries: `value`, or the second argument."""

    def rule(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
        c = argument(args, kwargs, 2, "fill_value") if value is None else value
        return Range(float(c), float(c)) if isinstance(c, int | float) else None

    return rule


_register(_made_of(0.0), torch.Tensor.new_zeros)
_register(_made_of(1.0), torch.Tensor.new_ones)
_register(_made_of(None), torch.Tensor.new_full)
_MT, _T = (vars(torch._C.TensorBase)[name].__get__ for name in ("mT", "T"))
_register(lambda args, kwargs, of: _first(args, kwargs, of).of_entries(), _MT, _T)


def _running_product(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    r = _first(args, kwargs, of)
    if r.low < 0:
        return None
    x, dim = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "dim")
    count = float(x.shape[dim] if isinstance(dim, int) and not isinstance(dim, bool) and x.ndim else x.numel())
    low, high = r.between(0.0, 1.0), r.between(1.0, math.inf)  # a factor 1 is none
    least, most = (raised(end, count) or end for end in (low, high)) if count else (low, high)
    return replace(least, high=max(most.high, 1.0), most=most.most, averaged=1.0, least_sum=None, most_sum=None)


for _op in (torch.cumprod, torch.prod):
    normed_op(_op).register_range(_running_product, caps=True)


def _log_sum(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """At least the largest entry, at most log N more."""
    x, r = argument(args, kwargs, 0, "input", "self"), _first(args, kwargs, of)
    count = math.prod(x.shape[d] for d in dims_tuple(argument(args, kwargs, 1, "dim", "axis"), x.ndim))
    return r.of_entries().plus(constant(math.log(count))) if count else None


_register(_log_sum, torch.logsumexp)


def or_zero(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of entries, of zeros that were put beside them, and of averages of these."""
    return union([_first(args, kwargs, of), _ZERO])


def _averaged(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of averages of entries, and of zeros around them."""
    padding = argument(args, kwargs, 3, "padding", default=0)
    around = any(padding) if isinstance(padding, tuple | list) else padding
    if kwargs.get("divisor_override") or len(args) > 6 and args[6]:
        return None
    r = _first(args, kwargs, of).of_entries()
    return union([r, _ZERO]) if around or argument(args, kwargs, 4, "ceil_mode", default=False) else r


def _entries(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of entries, or of averages of some."""
    return _first(args, kwargs, of).of_entries()


_register(or_zero, torch.tril, torch.triu, F.unfold)
_register(_averaged, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_register(_entries, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d)
