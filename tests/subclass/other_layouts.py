"""Wrapper subclasses that keep numbers in another way, as people write them; none knows anything of thunder_norm.

Groups quantised with scales and zero points, values and indices, factors, lazy transposes, named dimensions, a count of what was done,
and one whose operations in place put another tensor into it.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map_only

from tests.subclass.other_numbers import plain

aten = torch.ops.aten


class GroupQuantized(torch.Tensor):
    """Integers in groups along the last dimension, a scale and a zero point for each group: (q - zero) * scale."""

    @staticmethod
    def __new__(cls, q, scale, zero, group, dtype=torch.float32):
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=dtype, device=q.device)

    def __init__(self, q, scale, zero, group, dtype=torch.float32):
        self.q, self.scale, self.zero, self.group = q, scale, zero, group

    def __repr__(self):
        return f"GroupQuantized({self.q}, {self.scale}, {self.zero}, {self.group})"

    @classmethod
    def quantize(cls, x, group=2):
        g = x.detach().unflatten(-1, (-1, group))
        low, high = g.amin(-1), g.amax(-1)
        scale = (high - low).clamp(min=1e-6) / 255
        zero = (-low / scale).round().clamp(-128, 127)
        q = ((g / scale[..., None]).round() + zero[..., None] - 128).clamp(-128, 127).to(torch.int8)
        return cls(q.flatten(-2), scale, zero - 128, group, x.dtype)

    def dense(self):
        g = self.q.unflatten(-1, (-1, self.group)).to(self.dtype)
        return ((g - self.zero[..., None]) * self.scale[..., None]).flatten(-2)

    def __tensor_flatten__(self):
        return ["q", "scale", "zero"], (self.group, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["q"], inner["scale"], inner["zero"], *context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("detach", "clone", "alias"):
            x = args[0]
            return cls(func(x.q), func(x.scale), func(x.zero), x.group, x.dtype)
        if name == "mul" and not isinstance(args[1], torch.Tensor):
            x = args[0]
            return cls(x.q, x.scale * args[1], x.zero, x.group, x.dtype)
        if name == "_to_copy":
            x = args[0]
            return cls(x.q, x.scale, x.zero, x.group, kwargs.get("dtype", x.dtype))
        if name == "copy_":
            new = args[1] if isinstance(args[1], cls) else cls.quantize(args[1], args[0].group)
            for a in ("q", "scale", "zero"):
                getattr(args[0], a).copy_(getattr(new, a))
            return args[0]
        if func._schema.is_mutable:
            return args[0].copy_(getattr(aten, name[:-1])(args[0].dense(), *args[1:], **kwargs))
        return plain(cls, func, args, kwargs)


class Scattered(torch.Tensor):
    """Values at indices [n, dims], zeros elsewhere."""

    @staticmethod
    def __new__(cls, values, indices, size):
        return torch.Tensor._make_wrapper_subclass(cls, tuple(size), dtype=values.dtype, device=values.device)

    def __init__(self, values, indices, size):
        self.values_, self.indices_ = values, indices

    def __repr__(self):
        return f"Scattered({self.values_}, {self.indices_})"

    def dense(self):
        zeros = torch.zeros(self.shape, dtype=self.values_.dtype)
        return zeros.index_put(tuple(self.indices_.unbind(-1)), self.values_, accumulate=True)

    def __tensor_flatten__(self):
        return ["values_", "indices_"], {"size": tuple(self.shape)}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["values_"], inner["indices_"], context["size"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        x = args[0]
        if name in ("neg", "detach", "clone", "alias", "abs") or (
            name in ("mul", "div") and not isinstance(args[1], torch.Tensor)
        ):
            return cls(func(x.values_, *args[1:], **kwargs), x.indices_, x.shape)
        if name == "t":
            return cls(x.values_, x.indices_.flip(-1), tuple(reversed(x.shape)))
        if name == "add" and all(isinstance(a, cls) for a in args[:2]):
            y = args[1]
            return cls(torch.cat([x.values_, y.values_]), torch.cat([x.indices_, y.indices_]), x.shape)
        if name == "mm" and isinstance(x, cls) and not isinstance(args[1], cls):
            i, j = x.indices_.unbind(-1)
            rows = x.values_[:, None] * args[1][j]
            return torch.zeros(x.shape[0], args[1].shape[1], dtype=rows.dtype).index_add(0, i, rows)
        if name == "sum" and len(args) == 1:
            return x.values_.sum()
        if name == "mul_":
            x.values_.mul_(args[1])
            return x
        return plain(cls, func, args, kwargs)


class Factors(torch.Tensor):
    """The matrix U V^T."""

    @staticmethod
    def __new__(cls, u, v):
        return torch.Tensor._make_wrapper_subclass(cls, (u.shape[0], v.shape[0]), dtype=u.dtype, device=u.device)

    def __init__(self, u, v):
        self.u, self.v = u, v

    def __repr__(self):
        return f"Factors({self.u}, {self.v})"

    @property
    def rank(self):
        return self.u.shape[1]

    def dense(self):
        return self.u @ self.v.t()

    def __tensor_flatten__(self):
        return ["u", "v"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["u"], inner["v"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        x = args[0]
        if name == "t":
            return cls(x.v, x.u)
        if name in ("detach", "clone", "alias"):
            return cls(func(x.u), func(x.v))
        if name == "mm":
            y = args[1]
            if isinstance(x, cls) and isinstance(y, cls):
                return cls(x.u, y.v @ (x.v.t() @ y.u).t())
            return x.u @ (x.v.t() @ y) if isinstance(x, cls) else (x @ y.u) @ y.v.t()
        if name == "add" and all(isinstance(a, cls) for a in args[:2]):
            return cls(torch.cat([x.u, args[1].u], 1), torch.cat([x.v, args[1].v], 1))
        if name == "mul" and not isinstance(args[1], torch.Tensor):
            return cls(x.u * args[1], x.v)
        if name == "addmm":
            return func(x.dense() if isinstance(x, cls) else x, *(a.dense() if isinstance(a, cls) else a for a in args[1:]))
        return plain(cls, func, args, kwargs)


class Transposed(torch.Tensor):
    """A matrix that is transposed when something other than a product asks for it."""

    @staticmethod
    def __new__(cls, inner, is_transposed=False):
        shape = tuple(reversed(inner.shape)) if is_transposed else tuple(inner.shape)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner, is_transposed=False):
        self.inner, self.is_transposed = inner, is_transposed

    def __repr__(self):
        return f"Transposed({self.inner}, {self.is_transposed})"

    def dense(self):
        return self.inner.t().contiguous() if self.is_transposed else self.inner

    def __tensor_flatten__(self):
        return ["inner"], self.is_transposed

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"], context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        x = args[0]
        if name == "t" or (name == "transpose" and {args[1] % 2, args[2] % 2} == {0, 1}):
            return cls(x.inner, not x.is_transposed)
        if name in ("detach", "clone", "alias", "neg", "sin", "exp", "cos"):
            return cls(func(x.inner), x.is_transposed)
        if name in ("add", "mul") and all(isinstance(a, cls) for a in args[:2]) and x.is_transposed == args[1].is_transposed:
            return cls(func(x.inner, args[1].inner, **kwargs), x.is_transposed)
        if name in ("add", "mul") and not isinstance(args[1], torch.Tensor):
            return cls(func(x.inner, args[1], **kwargs), x.is_transposed)
        if name in ("add_", "mul_"):
            other = args[1]
            if isinstance(other, cls):
                other = other.dense().t() if x.is_transposed else other.dense()
            elif isinstance(other, torch.Tensor):
                other = other.t() if x.is_transposed else other
            func(x.inner, other)
            return x
        return plain(cls, func, args, kwargs)


class Named(torch.Tensor):
    """Dimensions have names, which functions take in place of numbers: `__torch_function__` translates, `__torch_dispatch__` computes."""

    @staticmethod
    def __new__(cls, inner, dims):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )

    def __init__(self, inner, dims):
        self.inner, self.dims = inner, tuple(dims)

    def __repr__(self):
        return f"Named({self.inner}, {self.dims})"

    def dense(self):
        return self.inner

    def renamed(self, **names):
        return Named(self.inner, [names.get(d, d) for d in self.dims])

    def __tensor_flatten__(self):
        return ["inner"], self.dims

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"], context)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        first = next((a for a in args if isinstance(a, cls)), None)
        if first is not None and first is args[0]:
            rest = [first.dims.index(a) if isinstance(a, str) and a in first.dims else a for a in args[1:]]
            args = (first, *rest)
            if isinstance(kwargs.get("dim"), str):
                kwargs["dim"] = first.dims.index(kwargs["dim"])
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        named = [a for a in args if isinstance(a, cls)]
        x = named[0] if named else None
        out = func(*tree_map_only(cls, lambda t: t.inner, args), **tree_map_only(cls, lambda t: t.inner, kwargs))
        if func._schema.is_mutable:
            return args[0]
        if not isinstance(out, torch.Tensor) or x is None:
            return out
        if name == "mm":
            a, b = args[:2]
            return cls(out, (getattr(a, "dims", ("row", "col"))[0], getattr(b, "dims", ("row", "col"))[1]))
        if name in ("t", "transpose"):
            i, j = (0, 1) if name == "t" else (d % x.ndim for d in args[1:3])
            dims = list(x.dims)
            dims[i], dims[j] = dims[j], dims[i]
            return cls(out, dims)
        if name in ("sum", "mean") and len(args) > 1 and args[1] is not None and out.ndim < x.ndim:
            gone = {d % x.ndim for d in args[1]}
            return cls(out, [d for i, d in enumerate(x.dims) if i not in gone])
        if name == "select":
            return cls(out, [d for i, d in enumerate(x.dims) if i != args[1] % x.ndim])
        if out.ndim == x.ndim:
            return cls(out, x.dims)
        wide = max(named, key=lambda t: t.ndim)
        return cls(out, wide.dims if wide.ndim == out.ndim else [f"d{i}" for i in range(out.ndim)])


class Counted(torch.Tensor):
    """Values, and how many operations made them: part of the context, so that it is another one after each."""

    @staticmethod
    def __new__(cls, inner, count=0, tags=()):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner, count=0, tags=()):
        self.inner, self.count, self.tags = inner, count, list(tags)

    def __repr__(self):
        return f"Counted({self.inner}, {self.count}, {self.tags})"

    def dense(self):
        return self.inner

    def __tensor_flatten__(self):
        return ["inner"], {"count": self.count, "tags": tuple(self.tags)}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"], **context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        counts = [a.count for a in args if isinstance(a, cls)]
        tags = [t for a in args if isinstance(a, cls) for t in a.tags]
        out = func(*tree_map_only(cls, lambda t: t.inner, args), **tree_map_only(cls, lambda t: t.inner, kwargs))
        if func._schema.is_mutable:
            args[0].count += 1
            return args[0]
        if func in (aten.detach.default, aten.alias.default):
            return cls(out, args[0].count, args[0].tags)
        return tree_map_only(torch.Tensor, lambda t: cls(t, max(counts, default=0) + 1, sorted(set(tags))), out)


class Replacing(torch.Tensor):
    """Its operations in place compute another inner tensor and hold that."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"Replacing({self.inner})"

    def dense(self):
        return self.inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        values, named = tree_map_only(cls, lambda t: t.inner, (args, kwargs))
        if func._schema.is_mutable and isinstance(args[0], cls):
            if name == "copy_":
                args[0].inner = args[1].inner if isinstance(args[1], cls) else args[1].clone()
            else:
                args[0].inner = getattr(getattr(aten, name[:-1]), func._overloadname)(*values, **named)
            return args[0]
        return tree_map_only(torch.Tensor, cls, func(*values, **named))
