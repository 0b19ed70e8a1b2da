"""Wrapper subclasses of numbers, as people write them for their own ends; none knows anything of thunder_norm.

Quantities with units, uncertain numbers, complex numbers as two reals, logarithms and signs, dual numbers whose tangent may be missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

MOVES = frozenset(
    "view _unsafe_view t transpose permute expand unsqueeze squeeze select slice detach alias clone flip select_backward "
    "slice_backward _reshape_alias".split()
)


def plain(cls: type, func: Any, args: tuple, kwargs: dict) -> Any:
    return func(*tree_map_only(cls, lambda x: x.dense(), args), **tree_map_only(cls, lambda x: x.dense(), kwargs))


class Quantity(torch.Tensor):
    """Values with a unit, exponents of base units by name: products multiply units, sums of different units raise."""

    @staticmethod
    def __new__(cls, value, unit=()):
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
        )

    def __init__(self, value, unit=()):
        self.value, self.unit = value, tuple(sorted(dict(unit).items()))

    def __repr__(self):
        return f"Quantity({self.value}, {self.unit})"

    def dense(self):
        return self.value

    def __tensor_flatten__(self):
        return ["value"], {"unit": self.unit}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["value"], context["unit"])

    @staticmethod
    def joined(a, b, sign):
        exponents = dict(a)
        for name, e in b:
            exponents[name] = exponents.get(name, 0) + sign * e
        return tuple((n, e) for n, e in exponents.items() if e)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        units = [a.unit for a in args if isinstance(a, Quantity)]
        values = tree_map_only(Quantity, lambda x: x.value, (args, kwargs))
        first, second = (*args, None, None)[:2]
        a, b = getattr(first, "unit", ()), getattr(second, "unit", ())
        name = func.overloadpacket.__name__
        if name in ("add", "sub", "add_", "sub_", "maximum", "minimum"):
            if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and a != b:
                raise TypeError(f"cannot {name} {dict(a)} and {dict(b)}")
            unit = a
        elif name in ("mul", "mm", "bmm", "dot", "mv"):
            unit = cls.joined(a, b, 1)
        elif name in ("div",):
            unit = cls.joined(a, b, -1)
        elif name in ("sqrt",):
            unit = tuple((n, e / 2) for n, e in a)
        elif name == "pow" and isinstance(second, (int, float)):
            unit = tuple((n, e * second) for n, e in a)
        elif name in ("exp", "log", "sin", "cos", "sigmoid", "tanh"):
            if a:
                raise TypeError(f"{name} of {dict(a)}")
            unit = ()
        else:
            unit = units[0] if units else ()
        out = func(*values[0], **values[1])
        if func._schema.is_mutable:
            return first
        return tree_map_only(torch.Tensor, lambda t: cls(t, unit), out)


class Uncertain(torch.Tensor):
    """Mean and variance of independent numbers; sums add variances, products to first order."""

    @staticmethod
    def __new__(cls, mean, variance):
        return torch.Tensor._make_wrapper_subclass(cls, mean.shape, dtype=mean.dtype, device=mean.device)

    def __init__(self, mean, variance):
        self.mean_, self.variance_ = mean, variance

    def __repr__(self):
        return f"Uncertain({self.mean_}, {self.variance_})"

    def dense(self):
        return self.mean_

    def deviation(self):
        return self.variance_.sqrt()

    def __tensor_flatten__(self):
        return ["mean_", "variance_"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["mean_"], inner["variance_"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__

        def parts(x):
            return (x.mean_, x.variance_) if isinstance(x, cls) else (x, 0.0)

        if name in ("add", "sub"):
            (m, v), (n, w) = parts(args[0]), parts(args[1])
            mean = func(m, n, **kwargs)
            return cls(mean, (v + w) * torch.ones_like(mean))
        if name == "mul":
            (m, v), (n, w) = parts(args[0]), parts(args[1])
            mean = m * n
            return cls(mean, (m * m) * w + (n * n) * v + v * w + torch.zeros_like(mean))
        if name in ("exp", "sin", "tanh", "sigmoid", "cos"):
            x, y = args[0].mean_, func(args[0].mean_)
            slopes = {
                "exp": torch.exp,
                "sin": torch.cos,
                "cos": lambda t: -t.sin(),
                "tanh": lambda t: 1 - t.tanh() ** 2,
                "sigmoid": lambda t: t.sigmoid() * (1 - t.sigmoid()),
            }
            s = slopes[name](x)
            return cls(y, args[0].variance_ * s * s)
        if name in ("sum", "mean"):
            k = 1.0 if name == "sum" else args[0].numel() / func(args[0].mean_, *args[1:], **kwargs).numel()
            total = aten.sum.dim_IntList if func in (aten.mean.dim, aten.sum.dim_IntList) else aten.sum.default
            return cls(func(args[0].mean_, *args[1:], **kwargs), total(args[0].variance_, *args[1:], **kwargs) / k**2)
        if name in MOVES:
            return cls(*(func(t, *args[1:], **kwargs) for t in (args[0].mean_, args[0].variance_)))
        if name in ("zeros_like", "ones_like"):
            return cls(func(args[0].mean_, **kwargs), torch.zeros_like(args[0].variance_))
        if name in ("add_", "mul_", "sub_", "copy_"):
            (m, v), other = parts(args[0]), args[1]
            new = other if name == "copy_" else getattr(aten, name[:-1]).Tensor(args[0], other)
            m.copy_(parts(new)[0])
            v.copy_(torch.zeros_like(v) + parts(new)[1])
            return args[0]
        return plain(cls, func, args, kwargs)


class Pairs(torch.Tensor):
    """Complex numbers as two real tensors; complex outside."""

    @staticmethod
    def __new__(cls, re, im):
        dtype = torch.complex128 if re.dtype is torch.float64 else torch.complex64
        return torch.Tensor._make_wrapper_subclass(cls, re.shape, dtype=dtype, device=re.device)

    def __init__(self, re, im):
        self.re, self.im = re, im

    def __repr__(self):
        return f"Pairs({self.re}, {self.im})"

    def dense(self):
        return torch.complex(self.re, self.im)

    def __tensor_flatten__(self):
        return ["re", "im"], ()

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["re"], inner["im"])

    @classmethod
    def of(cls, x):
        return x if isinstance(x, cls) else cls(x.real, x.imag) if torch.is_complex(x) else cls(x, torch.zeros_like(x))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if name in ("add", "sub") and len(tensors) == 2:
            a, b = map(cls.of, args[:2])
            return cls(func(a.re, b.re, **kwargs), func(a.im, b.im, **kwargs))
        if name in ("mul", "mm") and len(tensors) == 2:
            a, b = map(cls.of, args[:2])
            return cls(func(a.re, b.re) - func(a.im, b.im), func(a.re, b.im) + func(a.im, b.re))
        if name == "mul" and isinstance(args[1], (int, float)):
            return cls(args[0].re * args[1], args[0].im * args[1])
        if name in ("conj", "_conj", "_conj_physical", "conj_physical"):
            return cls(args[0].re, -args[0].im)
        if name == "abs":
            return (args[0].re ** 2 + args[0].im ** 2).sqrt()
        if name == "real":
            return args[0].re
        if name == "imag":
            return args[0].im
        if name == "view_as_real":
            return torch.stack([args[0].re, args[0].im], -1)
        if name == "neg" or name == "sum" or name in MOVES or name in ("zeros_like",):
            kwargs.pop("dtype", None)
            return cls(*(func(t, *args[1:], **kwargs) for t in (args[0].re, args[0].im)))
        return plain(cls, func, args, kwargs)


class LogNumbers(torch.Tensor):
    """Logarithms of absolute values, and signs: products are sums."""

    @staticmethod
    def __new__(cls, log, sign):
        return torch.Tensor._make_wrapper_subclass(cls, log.shape, dtype=log.dtype, device=log.device)

    def __init__(self, log, sign):
        self.logs, self.signs = log, sign

    def __repr__(self):
        return f"LogNumbers({self.logs}, {self.signs})"

    @classmethod
    def of(cls, x):
        return x if isinstance(x, cls) else cls(x.abs().log(), x.sign())

    def dense(self):
        return self.signs * self.logs.exp()

    def __tensor_flatten__(self):
        return ["logs", "signs"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["logs"], inner["signs"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        x = args[0]
        if name in ("mul", "div") and all(isinstance(a, torch.Tensor) for a in args[:2]):
            a, b = map(cls.of, args[:2])
            return cls(a.logs + b.logs if name == "mul" else a.logs - b.logs, a.signs * b.signs)
        if name == "neg":
            return cls(x.logs, -x.signs)
        if name == "sqrt":
            return cls(x.logs / 2, x.signs)
        if name == "prod" and len(args) == 1:
            return cls(x.logs.sum(), x.signs.prod())
        if name == "log":
            return x.logs
        if name in MOVES:
            return cls(func(x.logs, *args[1:], **kwargs), func(x.signs, *args[1:], **kwargs))
        if name == "mul_":
            y = cls.of(args[1]) if isinstance(args[1], torch.Tensor) else cls.of(torch.full_like(x.logs, args[1]))
            x.logs.add_(y.logs)
            x.signs.mul_(y.signs)
            return x
        return plain(cls, func, args, kwargs)


class Jet(torch.Tensor):
    """A number and its tangent, which may be missing: then it does not move."""

    @staticmethod
    def __new__(cls, primal, tangent=None):
        return torch.Tensor._make_wrapper_subclass(cls, primal.shape, dtype=primal.dtype, device=primal.device)

    def __init__(self, primal, tangent=None):
        self.primal, self.tangent = primal, tangent

    def __repr__(self):
        return f"Jet({self.primal}, {self.tangent})"

    def dense(self):
        return self.primal

    def __tensor_flatten__(self):
        return ["primal", "tangent"] if self.tangent is not None else ["primal"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["primal"], inner.get("tangent"))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__

        def parts(x):
            return (x.primal, x.tangent) if isinstance(x, cls) else (x, None)

        (p, t) = parts(args[0])
        if name in ("add", "sub"):
            q, s = parts(args[1])
            out = func(p, q, **kwargs)
            moved = [m for m in (t, None if s is None else s if name == "add" else -s) if m is not None]
            return cls(out, sum(moved[1:], moved[0]) * torch.ones_like(out) if moved else None)
        if name in ("mul", "mm"):
            q, s = parts(args[1])
            moved = ([func(t, q)] if t is not None else []) + ([func(p, s)] if s is not None else [])
            return cls(func(p, q), sum(moved[1:], moved[0]) if moved else None)
        slopes = {"sin": torch.cos, "cos": lambda x: -x.sin(), "exp": torch.exp, "neg": lambda x: -torch.ones_like(x)}
        if name in slopes:
            return cls(func(p), None if t is None else t * slopes[name](p))
        if name == "sum" or name in MOVES:
            return cls(func(p, *args[1:], **kwargs), None if t is None else func(t, *args[1:], **kwargs))
        if name in ("zeros_like", "ones_like"):
            return cls(func(p, **kwargs))
        return plain(cls, func, args, kwargs)
