"""Five wrapper subclasses for random programs: none knows anything of thunder_norm.

Each says what it means (`dense`), has rules for the operations that keep to its kind, and becomes a plain tensor in all others, which
is what classes of this sort do.  In-place operations compute the new value and copy it into the inner tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

# Operations that move elements: the same for each inner tensor that has the shape of the whole.
MOVES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.unbind.int,
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.flip.default,
    aten.roll.default,
    aten.select_backward.default,
    aten.slice_backward.default,
)
JOINS = (aten.cat.default, aten.stack.default)
MAKERS = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default)


class Wrapper(torch.Tensor):
    """What the classes share: `INNER` names the inner tensors, `RULES` has a function for each operation that keeps to the kind."""

    INNER: ClassVar[tuple[str, ...]]
    RULES: ClassVar[dict[Any, Callable]]

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __tensor_flatten__(self):
        return list(self.INNER), None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(*(inner[name] for name in cls.INNER))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(str(getattr(self, name)) for name in self.INNER)})"

    def dense(self) -> torch.Tensor:
        """The plain tensor that this stands for."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return cls._in_place(func, args, kwargs)
        rule = cls.RULES.get(func)
        if rule is not None:
            return rule(func, *args, **kwargs)
        return func(*tree_map_only(cls, cls.dense, args), **tree_map_only(cls, cls.dense, kwargs))

    @classmethod
    def _in_place(cls, func, args, kwargs):
        target = args[0]
        name = func.overloadpacket.__name__.removesuffix("_")
        functional = getattr(getattr(aten, name), func._overloadname)
        result = functional(*args, **kwargs)
        if type(target) is not cls or type(result) is not cls:
            raise NotImplementedError(f"{func} takes a {cls.__name__} out of its kind")
        for inner in cls.INNER:
            getattr(target, inner).copy_(getattr(result, inner))
        return target


def each(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """The operation on each inner tensor, and the wrapper around the results; of lists, a list of wrappers."""
    cls = next(type(a) for a in (*args, *(args[0] if isinstance(args[0], list) else ())) if isinstance(a, Wrapper))
    results = []
    for name in cls.INNER:
        own = tree_map_only(cls, lambda x, name=name: getattr(x, name), args)
        results.append(func(*own, **kwargs))
    if isinstance(results[0], torch.Tensor):
        return cls(*results)
    return [cls(*parts) for parts in zip(*results, strict=True)]


def joined(func: Callable, tensors: list[torch.Tensor], dim: int = 0) -> Any:
    """cat and stack of wrappers of one class; with others among them, plain."""
    cls = next(type(t) for t in tensors if isinstance(t, Wrapper))
    if all(isinstance(t, cls) for t in tensors):
        return each(func, list(tensors), dim)
    return func([t.dense() if isinstance(t, cls) else t for t in tensors], dim)


def like_values(cls: type, x: torch.Tensor) -> dict[str, Any]:
    return {"strides": x.stride(), "dtype": x.dtype, "device": x.device}


# -- masked -----------------------------------------------------------------------------------------------------------


class Masked(Wrapper):
    """Values, of which only those count where the mask is true."""

    INNER = ("values_", "mask")

    @staticmethod
    def __new__(cls, values, mask):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, **like_values(cls, values))

    def __init__(self, values, mask):
        self.values_, self.mask = values, mask

    def dense(self):
        return torch.where(self.mask, self.values_, torch.zeros_like(self.values_))


def _masked_pointwise(func, *args, **kwargs):
    masks = [a.mask for a in args if isinstance(a, Masked)]
    values = func(*(a.values_ if isinstance(a, Masked) else a for a in args), **kwargs)
    return Masked(values, functools.reduce(torch.logical_and, masks).expand(values.shape).clone())


def _masked_make(func, x, *args, **kwargs):
    kwargs.pop("memory_format", None)
    return Masked(func(x.values_, *args, **kwargs), x.mask.clone())


def _masked_sum(func, x, *args, **kwargs):
    values = func(x.dense(), *args, **kwargs)
    if func is aten.sum.default:
        return values
    dim, keepdim = args[0], args[1] if len(args) > 1 else False
    return Masked(values, x.mask.sum(dim, keepdim) > 0)


def _masked_mm(func, a, b):
    dense, masks = [t.dense() if isinstance(t, Masked) else t for t in (a, b)], []
    for t in (a, b):
        masks.append(t.mask if isinstance(t, Masked) else torch.ones_like(t, dtype=torch.bool))
    return Masked(func(*dense), func(*(m.to(torch.float32) for m in masks)) > 0)


POINTWISE = (
    *(getattr(aten, name).default for name in "sin cos exp tanh sigmoid neg abs relu sqrt log sgn reciprocal square erf".split()),
    *(getattr(aten, name).Tensor for name in "add sub mul div".split()),
    *(getattr(aten, name).Scalar for name in "add sub mul div".split()),
    aten.rsub.Scalar,
    aten.pow.Tensor_Scalar,
    aten.threshold_backward.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.clamp.default,
    aten._to_copy.default,
    aten.where.self,
)
Masked.RULES = (
    dict.fromkeys(MOVES, each)
    | dict.fromkeys(JOINS, joined)
    | dict.fromkeys((op for op in POINTWISE if op is not aten.where.self), _masked_pointwise)
    | dict.fromkeys(MAKERS, _masked_make)
    | dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), _masked_sum)
    | dict.fromkeys((aten.mm.default, aten.bmm.default), _masked_mm)
)


# -- dual numbers -----------------------------------------------------------------------------------------------------


class Dual(Wrapper):
    """A value and its derivative in one direction."""

    INNER = ("primal", "tangent")

    @staticmethod
    def __new__(cls, primal, tangent):
        return torch.Tensor._make_wrapper_subclass(cls, primal.shape, **like_values(cls, primal))

    def __init__(self, primal, tangent):
        self.primal, self.tangent = primal, tangent

    def dense(self):
        return self.primal


_SLOPES: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    aten.sin.default: torch.cos,
    aten.cos.default: lambda x: -torch.sin(x),
    aten.exp.default: torch.exp,
    aten.tanh.default: lambda x: 1 - torch.tanh(x) ** 2,
    aten.sigmoid.default: lambda x: torch.sigmoid(x) * (1 - torch.sigmoid(x)),
    aten.relu.default: lambda x: (x > 0).to(x.dtype),
    aten.abs.default: torch.sign,
    aten.log.default: torch.reciprocal,
    aten.sqrt.default: lambda x: 0.5 / torch.sqrt(x),
}


def _parts(x: Any) -> tuple[Any, Any]:
    return (x.primal, x.tangent) if isinstance(x, Dual) else (x, None)


def _dual_unary(func, x):
    return Dual(func(x.primal), _SLOPES[func](x.primal) * x.tangent)


def _dual_power(func, x, n):
    return Dual(func(x.primal, n), n * x.primal ** (n - 1) * x.tangent)


def _dual_sum_of_two(func, a, b, alpha=1):
    (p, dp), (q, dq) = _parts(a), _parts(b)
    primal = func(p, q, alpha=alpha)
    sign = -alpha if func in (aten.sub.Tensor, aten.sub.Scalar) else alpha
    parts = [t for t in (dp, None if dq is None else sign * dq) if t is not None]
    return Dual(primal, sum(parts[1:], parts[0]).expand(primal.shape))


def _dual_product(func, a, b):
    (p, dp), (q, dq) = _parts(a), _parts(b)
    primal = func(p, q)
    parts = [func(x, y) for x, y in ((dp, q), (p, dq)) if x is not None and y is not None]
    return Dual(primal, sum(parts[1:], parts[0]))


def _dual_quotient(func, a, b):
    (p, dp), (q, dq) = _parts(a), _parts(b)
    primal = func(p, q)
    tangent = torch.zeros_like(primal)
    if dp is not None:
        tangent = tangent + dp / q
    if dq is not None:
        tangent = tangent - primal * dq / q
    return Dual(primal, tangent)


def _dual_gated(func, grad, x, *rest):
    """A formula of a backward, linear in the gradient; what it says of the derivative of its second argument is left out."""
    (g, dg), (p, _) = _parts(grad), _parts(x)
    return Dual(func(g, p, *rest), torch.zeros_like(g) if dg is None else func(dg, p, *rest))


def _dual_addmm(func, bias, a, b, *, beta=1, alpha=1):
    return bias * beta + torch.mm(a, b) * alpha


def _dual_make(func, x, *args, **kwargs):
    kwargs.pop("memory_format", None)
    made = func(x.primal, *args, **kwargs)
    return Dual(made, torch.zeros_like(made))


Dual.RULES = (
    dict.fromkeys(MOVES, each)
    | dict.fromkeys(JOINS, joined)
    | dict.fromkeys((aten.neg.default, aten._to_copy.default, aten.sum.default, aten.sum.dim_IntList), each)
    | dict.fromkeys((aten.mean.default, aten.mean.dim), each)
    | dict.fromkeys(_SLOPES, _dual_unary)
    | dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar), _dual_sum_of_two)
    | dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.mm.default, aten.bmm.default), _dual_product)
    | dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _dual_quotient)
    | dict.fromkeys((aten.threshold_backward.default,), _dual_gated)
    | dict.fromkeys(MAKERS, _dual_make)
    | {aten.pow.Tensor_Scalar: _dual_power, aten.addmm.default: _dual_addmm}
)


# -- intervals --------------------------------------------------------------------------------------------------------


class Interval(Wrapper):
    """All tensors between a lower and an upper one."""

    INNER = ("low", "high")

    @staticmethod
    def __new__(cls, low, high):
        return torch.Tensor._make_wrapper_subclass(cls, low.shape, **like_values(cls, low))

    def __init__(self, low, high):
        self.low, self.high = low, high

    def dense(self):
        return (self.low + self.high) / 2


def _ends(x: Any) -> tuple[Any, Any]:
    return (x.low, x.high) if isinstance(x, Interval) else (x, x)


def _interval_monotone(func, *args, **kwargs):
    return Interval(func(*(_ends(a)[0] for a in args), **kwargs), func(*(_ends(a)[1] for a in args), **kwargs))


def _interval_neg(func, x):
    return Interval(-x.high, -x.low)


def _interval_sub(func, a, b, alpha=1):
    (low, high), (b_low, b_high) = _ends(a), _ends(b)
    return Interval(func(low, b_high, alpha=alpha), func(high, b_low, alpha=alpha))


def _interval_mul(func, a, b):
    products = [func(x, y) for x in _ends(a) for y in _ends(b)]
    return Interval(functools.reduce(torch.minimum, products), functools.reduce(torch.maximum, products))


def _interval_mm(func, a, b):
    def middle(x):
        return x.dense() if isinstance(x, Interval) else x

    def radius(x):
        return (x.high - x.low) / 2 if isinstance(x, Interval) else torch.zeros_like(x)

    center = func(middle(a), middle(b))
    reach = func(middle(a).abs(), radius(b)) + func(radius(a), middle(b).abs() + radius(b))
    return Interval(center - reach, center + reach)


def _interval_make(func, x, *args, **kwargs):
    kwargs.pop("memory_format", None)
    return Interval(func(x.low, *args, **kwargs), func(x.high, *args, **kwargs))


Interval.RULES = (
    dict.fromkeys(MOVES, each)
    | dict.fromkeys(JOINS, joined)
    | dict.fromkeys((aten.neg.default,), _interval_neg)
    | dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _interval_sub)
    | dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _interval_mul)
    | dict.fromkeys((aten.mm.default, aten.bmm.default), _interval_mm)
    | dict.fromkeys(MAKERS, _interval_make)
    | dict.fromkeys(
        (
            *(getattr(aten, name).default for name in "exp tanh sigmoid relu sum mean amax amin _to_copy clamp".split()),
            aten.add.Tensor,
            aten.add.Scalar,
            aten.sum.dim_IntList,
            aten.mean.dim,
        ),
        _interval_monotone,
    )
)
