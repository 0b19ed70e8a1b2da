"""Wrapper classes as people write them, for programs that `torch.compile` runs as one graph."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class Rounding(enum.Enum):
    NEAREST = "nearest"
    DOWN = "down"


@dataclass(frozen=True)
class Config:
    """What a quantised tensor keeps besides its tensors."""

    bits: int = 8
    rounding: Rounding = Rounding.NEAREST
    granularity: tuple[int, ...] = (1,)


class Affine(torch.Tensor):
    """Integers with a scale, and zero points or none, dequantised where an operation is not known."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, config: Config, dtype: torch.dtype):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, config: Config, dtype: torch.dtype):
        self.int_data, self.scale, self.zero, self.config = data, scale, zero, config

    def __tensor_flatten__(self):
        names = ["int_data", "scale"] + ([] if self.zero is None else ["zero"])
        return names, (self.config, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["int_data"], inner["scale"], inner.get("zero"), *context)

    @classmethod
    def from_float(cls, x: torch.Tensor, config: Config = Config(), symmetric: bool = True) -> Affine:
        top = 2 ** (config.bits - 1) - 1
        if symmetric:
            scale, zero = x.abs().amax(-1, keepdim=True) / top, None
            q = x / scale
        else:
            low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
            scale = (high - low) / (2 * top)
            zero = low + top * scale
            q = (x - zero) / scale
        q = q.round() if config.rounding is Rounding.NEAREST else q.floor()
        return cls(q.clamp(-top, top).to(torch.int8), scale, zero, config, x.dtype)

    def dequantize(self) -> torch.Tensor:
        x = self.int_data.to(self.dtype) * self.scale
        return x if self.zero is None else x + self.zero

    @property
    def is_symmetric(self) -> bool:
        return self.zero is None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, w, b = (*args, None)[:3]
            if type(w) is cls and w.is_symmetric and not isinstance(x, cls):
                y = F.linear(x, w.int_data.to(x.dtype)) * w.scale.view(-1)
                return y if b is None else y + b
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            x = args[0]
            zero = None if x.zero is None else func(x.zero)
            return cls(func(x.int_data), func(x.scale), zero, x.config, x.dtype)
        if func is aten.t.default and args[0].scale.shape[0] == 1:
            x = args[0]
            return cls(func(x.int_data), func(x.scale), None if x.zero is None else func(x.zero), x.config, x.dtype)
        if func is aten.copy_.default and isinstance(args[0], cls):
            x, y = args
            y = y if isinstance(y, cls) else cls.from_float(y, x.config, x.is_symmetric)
            x.int_data.copy_(y.int_data)
            x.scale.copy_(y.scale)
            if x.zero is not None:
                x.zero.copy_(y.zero)
            return x
        args, kwargs = tree_map(lambda a: a.dequantize() if isinstance(a, cls) else a, (args, kwargs))
        return func(*args, **kwargs)


class Tagged(torch.Tensor):
    """A tensor with a tag that operations join; any number of tags, in the order in which they came."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, tags: tuple[str, ...] = ()):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: torch.Tensor, tags: tuple[str, ...] = ()):
        self.inner, self.tags = inner, tags

    def __tensor_flatten__(self):
        return ["inner"], {"tags": self.tags}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Tagged(inner["inner"], context["tags"])

    def with_tag(self, tag: str) -> Tagged:
        return Tagged(self.inner, (*self.tags, tag))

    @staticmethod
    def joined(values: Any) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for v in values:
            if isinstance(v, Tagged):
                found.update(dict.fromkeys(v.tags))
        return tuple(found)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        flat = [a for x in args for a in (x if isinstance(x, (list, tuple)) else [x])]
        tags = cls.joined(flat)
        unwrapped = tree_map(lambda a: a.inner if isinstance(a, cls) else a, (args, kwargs or {}))
        out = func(*unwrapped[0], **unwrapped[1])
        wrapped = tree_map(lambda t: cls(t, tags) if isinstance(t, torch.Tensor) else t, out)
        return torch.utils._python_dispatch.return_and_correct_aliasing(func, args, kwargs or {}, wrapped)


class Triple(torch.Tensor):
    """Three tensors of one shape, of which the outer one is the first; the others follow with weights."""

    weights = (1.0, 0.5, 0.25)

    @staticmethod
    def __new__(cls, *parts: torch.Tensor):
        first = parts[0]
        return torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=first.dtype, device=first.device
        )

    def __init__(self, *parts: torch.Tensor):
        self.x, self.y, self.z = parts

    def __tensor_flatten__(self):
        return ["x", "y", "z"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["x"], inner["y"], inner["z"])

    @classmethod
    def repeated(cls, t: torch.Tensor) -> Triple:
        return cls(*(t * w for w in cls.weights))

    def total(self) -> torch.Tensor:
        return self.x + self.y + self.z

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        outs = []
        for name in ("x", "y", "z"):
            own = tree_map(lambda a, name=name: getattr(a, name) if isinstance(a, cls) else a, (args, kwargs or {}))
            outs.append(func(*own[0], **own[1]))
        if isinstance(outs[0], torch.Tensor):
            wrapped = cls(*outs)
        elif isinstance(outs[0], (list, tuple)):
            wrapped = type(outs[0])(cls(*ts) for ts in zip(*outs, strict=True))
        else:
            return outs[0]
        return torch.utils._python_dispatch.return_and_correct_aliasing(func, args, kwargs or {}, wrapped)


class Weighted(Triple):
    """A class that derives from another one, with other weights."""

    weights = (1.0, 2.0, 3.0)
