"""Which numbers the entries of activations, sums of products, scatters, averages and running products can be: further rules as in `ranges`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core.context import current_environment, values_of
from thunder_norm.core.ranges import Range, union
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._shared import dims_tuple
from thunder_norm.rules.ranges import Known, Of, argument

_ZERO = Range(0.0, 0.0)


def _register(rule: Callable[[tuple, Mapping[str, Any], Of], Known], *ops: Callable) -> None:
    for op in ops:
        normed_op(op).register_range(rule)


def _first(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Range:
    return of(argument(args, kwargs, 0, "input", "self")) or Range()


def _said(r: Range) -> Known:
    return r if r.says_something else None


# -- functions of an entry ------------------------------------------------------------------------------------------------


def _increasing(f: Callable[..., float], *options: tuple[str, float]) -> Callable[[tuple, Mapping[str, Any], Of], Known]:
    """Of a function that increases with each entry where its options, by name and default, are not negative."""

    def rule(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
        given = [argument(args, kwargs, i, name, default=default) for i, (name, default) in enumerate(options, 1)]
        if not all(isinstance(c, int | float) and c >= 0 for c in given):
            return None
        return _said(_first(args, kwargs, of).image(lambda x: f(x, *given)))

    return rule


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 700 else math.inf


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


_register(_increasing(_elu, ("alpha", 1.0)), F.elu)
_register(_increasing(_celu, ("alpha", 1.0)), F.celu)
_register(_increasing(_selu), F.selu)
_register(_increasing(lambda x, slope: x if x > 0 else 0.0 if slope == 0 else slope * x, ("negative_slope", 0.01)), F.leaky_relu)
_register(_increasing(_softsign), F.softsign)
_register(_increasing(_exp2), torch.exp2)
_register(_increasing(math.atan), torch.atan)
_register(_increasing(_sinh), torch.sinh)
_register(_increasing(lambda x: math.log1p(x) if x > -1 else -math.inf), torch.log1p)
_register(_increasing(lambda x: math.log(x) if x > 0 else -math.inf), torch.log)
_register(_increasing(lambda x: min(max(x, 0.0), 1.0)), F.hardsigmoid)


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
    r = _first(args, kwargs, of)
    return Range(r.high**-0.5 if r.high > 0 else 0.0, r.low**-0.5 if r.low > 0 else math.inf)


_register(_rsqrt, torch.rsqrt)


# -- of several -----------------------------------------------------------------------------------------------------------


def _smaller(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    a, b = (of(argument(args, kwargs, i, *names)) or Range() for i, names in enumerate((("input", "self"), ("other",))))
    return _said(Range(min(a.low, b.low), min(a.high, b.high)))


def _smallest(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of entries, or of the smaller one of two tensors' entries."""
    if isinstance(argument(args, kwargs, 1, "dim", "axis"), torch.Tensor) or "other" in kwargs:
        return _smaller(args, kwargs, of)
    return _said(_first(args, kwargs, of).of_entries())


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
    return _said(r.of_entries().times(s.of_entries()).scaled(float(count)).of_many(count))


_register(_products, torch.matmul, torch.bmm, torch.mm, torch.mv, torch.dot)


def _with_products(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """a + c b d, entry by entry."""
    a, b, d = (of(argument(args, kwargs, i, *names)) for i, names in enumerate((("input", "self"), ("tensor1",), ("tensor2",))))
    c = argument(args, kwargs, 3, "value", default=1)
    if a is None or b is None or d is None or not isinstance(c, int | float):
        return None
    return _said(a.plus(b.times(d).scaled(float(c))))


_register(_with_products, torch.addcmul)


def range_of_constant(t: torch.Tensor) -> Known:
    """Of a plain tensor whose values are known by now: the zeros that a program adds to."""
    if isinstance(t, NormedTensor) or not current_environment().is_constant(t):
        return None
    t = values_of(t)
    if isinstance(t, NormedTensor | FakeTensor) or t.is_meta or not t.numel() or t.is_complex():
        return None
    with _disable_current_modes():
        low, high = t.detach().aminmax()
        return Range(float(low), float(high))


def is_zero_constant(t: torch.Tensor) -> bool:
    """Whether it is a plain tensor whose values are known by now, and 0."""
    found = range_of_constant(t)
    return found is not None and found.low == found.high == 0


def _added_at(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of sums of entries of two tensors, any number of the second's: the sign that both have."""
    x = argument(args, kwargs, 0, "input", "self")
    a, b = of(x) or range_of_constant(x) or Range(), of(argument(args, kwargs, 3, "src", "source")) or Range()
    if kwargs.get("alpha", 1) != 1:
        return None
    return _said(Range(a.low if a.low >= 0 <= b.low else -math.inf, a.high if a.high <= 0 >= b.high else math.inf))


_register(_added_at, torch.scatter_add, torch.index_add)


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
_register(lambda args, kwargs, of: _said(_first(args, kwargs, of).of_entries()), _MT, _T)


def _running_product(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    r = _first(args, kwargs, of)
    if r.low < 0:
        return None
    return Range(0.0 if r.low < 1 else 1.0, 1.0 if r.high <= 1 else math.inf)


_register(_running_product, torch.cumprod, torch.prod)


def _log_sum(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """At least the largest entry, at most log N more."""
    x, r = argument(args, kwargs, 0, "input", "self"), _first(args, kwargs, of)
    count = math.prod(x.shape[d] for d in dims_tuple(argument(args, kwargs, 1, "dim", "axis"), x.ndim))
    return _said(Range(r.low + math.log(count), r.high + math.log(count))) if count else None


_register(_log_sum, torch.logsumexp)


def _or_zero(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of entries, of zeros that were put beside them, and of averages of these."""
    return _said(union([_first(args, kwargs, of), _ZERO]))


def _averaged(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of averages of entries, and of zeros around them."""
    padding = argument(args, kwargs, 3, "padding", default=0)
    around = any(padding) if isinstance(padding, tuple | list) else padding
    if kwargs.get("divisor_override") or len(args) > 6 and args[6]:
        return None
    r = _first(args, kwargs, of).of_entries()
    return _said(union([r, _ZERO]) if around or argument(args, kwargs, 4, "ceil_mode", default=False) else r)


def _entries(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of entries, or of averages of some."""
    return _said(_first(args, kwargs, of).of_entries())


_register(_or_zero, torch.tril, torch.triu, F.unfold)
_register(_averaged, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_register(_entries, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d)
