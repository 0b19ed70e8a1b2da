"""Wrapper subclasses that the tests of the interpretation use; none knows anything of thunder_norm."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten


class OneTensor(torch.Tensor):
    """A wrapper of one inner tensor; what operations on it are, the classes that are made of it say."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, *args: Any):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])


class ScaleTensor(torch.Tensor):
    """``data * scale``: data of any dtype (int8 too), a 0-dim scale, a dtype to show and a label as context.

    Products with numbers stay in the class and change the scale; movements of data stay in the class; cos is refused; anything
    else gives a plain tensor.
    """

    data_: torch.Tensor
    scale: torch.Tensor
    label: str

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, label: str = "plain", dtype: torch.dtype = torch.float32):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, label: str = "plain", dtype: torch.dtype = torch.float32):
        self.data_, self.scale, self.label = data, scale, label

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:
        return f"ScaleTensor({self.data_}, {self.scale}, {self.label!r})"

    def __tensor_flatten__(self):
        return ["data_", "scale"], (self.label, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner, ctx, outer_size, outer_stride):
        return cls(inner["data_"], inner["scale"], *ctx)

    @classmethod
    def quantize(cls, x: torch.Tensor) -> ScaleTensor:
        """Symmetric int8 quantisation of a plain tensor."""
        scale = x.abs().amax() / 127
        return cls((x / scale).round().to(torch.int8), scale, "int8")

    def dequantize(self) -> torch.Tensor:
        return self.data_.to(torch.float32) * self.scale

    @property
    def doubled_scale(self) -> torch.Tensor:
        return self.scale * 2

    @property
    def is_labelled(self) -> bool:
        return self.label != "plain"

    def with_label(self, label: str) -> ScaleTensor:
        return ScaleTensor(self.data_, self.scale, label, self.dtype)

    def shifted(self, by: float, *, times: int = 1) -> torch.Tensor:
        """Python control flow around operations: interpreted, not run as one operation."""
        result = self.dequantize()
        for _ in range(times):
            result = result + by
        return result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.cos.default:
            raise NotImplementedError("cos of a ScaleTensor is not supported")
        if func in (aten.mul.Tensor, aten.div.Tensor) and isinstance(args[0], cls) and isinstance(args[1], int | float):
            x, number = args
            return cls(x.data_, func(x.scale, number), x.label, x.dtype)
        if func in (
            aten.view.default,
            aten.t.default,
            aten.detach.default,
            aten.transpose.int,
            aten.clone.default,
            aten.slice.Tensor,
        ):
            x, *rest = args
            return cls(func(x.data_, *rest, **kwargs), x.scale, x.label, x.dtype)
        args, kwargs = tree_map_only(cls, lambda x: x.dequantize().to(x.dtype), (args, kwargs))
        return func(*args, **kwargs)


class OpCounter(torch.Tensor):
    """A tensor whose context counts the operations behind it: two results of one class with different contexts."""

    value: torch.Tensor
    count: int

    @staticmethod
    def __new__(cls, value: torch.Tensor, count: int = 0):
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )

    def __init__(self, value: torch.Tensor, count: int = 0):
        self.value, self.count = value, count

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __tensor_flatten__(self):
        return ["value"], self.count

    @staticmethod
    def __tensor_unflatten__(inner, ctx, outer_size, outer_stride):
        return OpCounter(inner["value"], ctx)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        count = 1 + max(x.count for x in tree_leaves((args, kwargs)) if isinstance(x, OpCounter))
        args, kwargs = tree_map_only(OpCounter, lambda x: x.value, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, lambda t: OpCounter(t, count), func(*args, **kwargs))


class Overriding(torch.Tensor):
    """A class with a ``__torch_function__`` of its own: it knows softplus, and linear without its bias."""

    value: torch.Tensor

    @staticmethod
    def __new__(cls, value: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )

    def __init__(self, value: torch.Tensor):
        self.value = value

    def __tensor_flatten__(self):
        return ["value"], None

    @staticmethod
    def __tensor_unflatten__(inner, ctx, outer_size, outer_stride):
        return Overriding(inner["value"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.softplus:
            return Overriding(args[0].value * 100)
        if func is torch.nn.functional.linear:
            args = args[:2]
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Overriding, lambda x: x.value, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Overriding, func(*args, **kwargs))


class InheritedUnflatten(TwoTensor):
    """Rebuilt by its parent's ``__tensor_unflatten__``, as a TwoTensor: breaks the protocol."""


class WithoutFlatten(torch.Tensor):
    """Dispatches in Python, but cannot be taken apart."""

    value: torch.Tensor

    @staticmethod
    def __new__(cls, value: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)

    def __init__(self, value: torch.Tensor):
        self.value = value

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(WithoutFlatten, lambda x: x.value, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, WithoutFlatten, func(*args, **kwargs))


class Dispatching(torch.Tensor):
    """A non-wrapper subclass (it has storage of its own) with a ``__torch_dispatch__``."""

    @staticmethod
    def __new__(cls, value: torch.Tensor):
        return torch.Tensor._make_subclass(cls, value)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def two(*shape: int, dtype: torch.dtype = torch.float32) -> TwoTensor:
    return TwoTensor(torch.randn(*shape, dtype=dtype), torch.randn(*shape, dtype=dtype))


def nested(*shape: int) -> TwoTensor:
    return TwoTensor(two(*shape), two(*shape))


def leaves(x: Any) -> list[torch.Tensor]:
    """The plain tensors in a tree of tensors and wrappers."""
    found: list[torch.Tensor] = []
    for t in tree_leaves(x):
        if isinstance(t, torch.Tensor) and hasattr(t, "__tensor_flatten__"):
            found.extend(leaves([getattr(t, name) for name in t.__tensor_flatten__()[0]]))
        elif isinstance(t, torch.Tensor):
            found.append(t)
    return found


def _held(x: torch.Tensor) -> dict[str, Any]:
    """All attributes of an instance whose class does not say what it holds."""
    slots = [name for cls in type(x).__mro__ for name in getattr(cls, "__slots__", ())]
    own = {name: value for name, value in vars(x).items() if not name.startswith("_sym_")}  # torch's caches
    return {**own, **{name: getattr(x, name) for name in slots if hasattr(x, name)}}


def _assert_same_nested(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same values, in the same places of the same memory layout; one ragged length is never another's, so numbers are left out."""
    assert got.layout is want.layout and got.dtype is want.dtype and got.dim() == want.dim()
    if want.layout is torch.jagged:
        assert got._ragged_idx == want._ragged_idx and got.requires_grad == want.requires_grad
        assert got.values().stride() == want.values().stride()
        assert_same([got.offsets(), got.lengths(), got.values()], [want.offsets(), want.lengths(), want.values()])
        for name in {"min", "max"} if want.lengths() is None else ():
            remembered = getattr(got, f"_maybe_{name}_seqlen")
            assert remembered is None or remembered == getattr(want, f"_get_{name}_seqlen")()
    assert_same(list(got.unbind()), list(want.unbind()))


def assert_same(got: Any, want: Any) -> None:
    """Equal types, metadata, contexts and inner values, throughout a tree."""
    if isinstance(want, torch.Tensor):
        assert type(got) is type(want)
        if want.is_nested:
            return _assert_same_nested(got, want)
        assert got.shape == want.shape and got.dtype == want.dtype and got.device == want.device
        if hasattr(want, "__tensor_flatten__"):
            (names, ctx), (expected_names, expected_ctx) = got.__tensor_flatten__(), want.__tensor_flatten__()
            assert list(names) == list(expected_names) and ctx == expected_ctx
            for name in names:
                assert_same(getattr(got, name), getattr(want, name))
        elif type(want).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            assert_same(_held(got), _held(want))
        elif want.is_floating_point() and want.element_size() == 1:
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        else:
            with torch._C.DisableTorchFunctionSubclass():  # a class may say that none is equal
                plain = got.as_subclass(torch.Tensor), want.as_subclass(torch.Tensor)
            torch.testing.assert_close(*plain, rtol=1e-6, atol=1e-7, equal_nan=True)
    elif isinstance(want, dict):
        assert type(got) is type(want) and list(got) == list(want)
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, list | tuple):
        assert type(got) is type(want) and len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_same(g, w)
    elif hasattr(want, "__dataclass_fields__"):
        assert type(got) is type(want)
        for name in want.__dataclass_fields__:
            assert_same(getattr(got, name), getattr(want, name))
    else:
        assert type(got) is type(want) and got == want


def asserted(x):
    """Here, as pytest writes the asserts of test modules anew: what they call can reach the whole session, which is walked."""
    assert x.sum() > 0, "negative"
    return x * 2
