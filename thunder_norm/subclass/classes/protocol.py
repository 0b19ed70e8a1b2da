"""Which tensor subclasses can be interpreted, and the checked way into and out of their instances."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedSubclassError, with_details
from thunder_norm.subclass.classes import jagged
from thunder_norm.tracing.guarding.tensor_checks import check_like
from thunder_norm.wrapper_classes import (
    PROTOCOL,
    check_stable,
    dispatches,
    flattened,
    inner_tensors,
    is_wrapper,
    keeps_to_itself,
    unflattened,
)

_opaque_objects = sys.modules.get("torch._library.opaque_object")  # torch 2.9 has none


def is_opaque_type(cls: type) -> bool:
    """Whether torch takes objects of a class as they are, for parts of tensors and arguments of operations."""
    asks = (getattr(_opaque_objects, name, None) for name in ("is_custom_class", "is_opaque_type"))
    ask = next((a for a in asks if a is not None), None)
    return ask is not None and bool(ask(cls))


def beside_parts(x: torch.Tensor) -> dict[str, Any]:
    """The attributes of a wrapper that its class does not put it together with, by name; none of a nested tensor's, which are torch's."""
    own = {} if keeps_to_itself(type(x)) or jagged.is_jagged_class(type(x)) else getattr(x, "__dict__", {})
    parts = flattened(x)[0] if own else {}
    return {name: value for name, value in own.items() if name not in parts}


def check_supported(x: torch.Tensor) -> None:
    """Refuse a tensor whose class dispatches in Python but cannot be taken apart.

    Raises:
        UnsupportedSubclassError: says which part of the protocol is missing.
    """
    cls = type(x)
    if cls in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        if x.is_nested:
            raise UnsupportedSubclassError(
                with_details("a nested tensor of the strided layout cannot be interpreted", instead="layout=torch.jagged")
            )
        return
    if not dispatches(cls) or is_wrapper(x):
        return
    if isinstance(x, torch._subclasses.FakeTensor):
        return
    missing = [name for name in PROTOCOL if not hasattr(cls, name)]
    raise UnsupportedSubclassError(
        with_details(
            f"{cls.__module__}.{cls.__qualname__} cannot be interpreted",
            missing=", ".join(missing),
            needed="a class made with torch.Tensor._make_wrapper_subclass that defines __torch_dispatch__, __tensor_flatten__ and "
            "__tensor_unflatten__",
            instead='thunder_norm.transforms.register_flatten says for a class how it is taken apart; with SubclassTransform(opaque="run") '
            "torch runs its operations on the objects themselves",
        )
    )


def taken_apart(x: torch.Tensor) -> tuple[tuple[str, ...], Any]:
    """The names of a wrapper's inner tensors, and its context.

    Since torch 2.13 a class may name objects of what torch calls opaque types among its tensors (DTensor its device mesh); they are
    static, so that the context has them.
    """
    if jagged.is_jagged_class(type(x)):
        return jagged.taken_apart(x)
    inner, ctx = flattened(x)
    others = {name: v for name, v in inner.items() if not isinstance(v, torch.Tensor)}
    if not others or not all(is_opaque_type(type(v)) for v in others.values()):
        return tuple(inner), ctx
    return tuple(name for name in inner if name not in others), _WithObjects(ctx, others)


class _WithObjects(NamedTuple):
    """A context, and the objects among what a class names as its tensors."""

    ctx: Any
    objects: dict[str, Any]


@dataclass(frozen=True)
class WrapperSpec:
    """All that is static about a wrapper: what a cached trace must find again in its inputs."""

    cls: type
    names: tuple[str, ...]
    ctx: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    inner: tuple[WrapperSpec | None, ...]  # None for a plain tensor, whose metadata Thunder checks

    _looks_alike = None  # a check in C++, once there was a wrapper to make it of

    def __reduce__(self) -> tuple:
        return WrapperSpec, tuple([getattr(self, f.name) for f in fields(self)])

    @staticmethod
    def of(x: torch.Tensor) -> WrapperSpec:
        """The spec of a wrapper instance.

        Raises:
            UnsupportedSubclassError: an inner attribute is missing or not a tensor.
        """
        check_stable(x)
        names, ctx = taken_apart(x)
        held = flattened(x)[0]
        if any(isinstance(v, torch.Tensor) for v in tree_leaves(ctx)):
            raise UnsupportedSubclassError(
                with_details(
                    f"the context of {type(x).__qualname__} holds a tensor",
                    why="a trace serves all inputs of an equal context, and the values of a tensor may change",
                    instead="let __tensor_flatten__ name it as an inner tensor",
                )
            )
        inner = []
        for name in names:
            t = held[name]
            if not isinstance(t, torch.Tensor):
                raise UnsupportedSubclassError(
                    f"{type(x).__qualname__} is taken apart into {name!r}, which is {type(t).__name__}, not a tensor"
                )
            check_supported(t)
            if not is_wrapper(t) and t.layout is not torch.strided:
                raise UnsupportedSubclassError(
                    f"{name!r} of a {type(x).__qualname__} has layout {t.layout}: only strided ones are taken"
                )
            inner.append(WrapperSpec.of(t) if is_wrapper(t) else None)
        shape, stride, requires_grad = outer_metadata(x)
        return WrapperSpec(type(x), names, ctx, shape, stride, requires_grad, tuple(inner))

    @property
    def contexts(self) -> list:
        """The context, and those of the wrappers inside."""
        return [self.ctx, *(spec.contexts for spec in self.inner if spec is not None)]

    def matches(self, x: Any) -> bool:
        """Whether `x` is a wrapper of exactly this spec (inner plain tensors are not looked at)."""
        if type(x) is not self.cls:
            return False
        names, ctx = x.__tensor_flatten__() if self.has_own_protocol else taken_apart(x)  # pyright: ignore[reportAttributeAccessIssue]
        if tuple(names) != self.names or not is_equal(ctx, self.ctx):
            return False
        looks_alike = self._looks_alike
        if (looks_alike is None or not looks_alike(x)) and not self._is_outside_of(x):
            return False
        return not self.is_nested or all(
            spec is None or spec.matches(t) for t, spec in zip(inner_tensors(x, self.names), self.inner, strict=True)
        )

    def _is_outside_of(self, x: torch.Tensor) -> bool:
        """Whether shape, stride and requires_grad are those of a wrapper; later ones like it are known by one call of C++."""
        if outer_metadata(x) != (self.shape, self.stride, self.requires_grad):
            return False
        if self.has_own_protocol and self.stride:
            vars(self)["_looks_alike"] = check_like([x], [self.shape], [self.stride])
        return True

    @functools.cached_property
    def is_nested(self) -> bool:
        """Whether there are wrappers inside."""
        return any(spec is not None for spec in self.inner)

    def leaves(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The plain tensors inside `x`, wrappers inside wrappers opened, in flatten order."""
        if not self.is_nested:
            return tuple(inner_tensors(x, self.names))
        found: list[torch.Tensor] = []
        for t, spec in zip(inner_tensors(x, self.names), self.inner, strict=True):
            found.extend((t,) if spec is None else spec.leaves(t))
        return tuple(found)

    def build(self, leaves: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The wrapper around `leaves`; the inverse of `leaves`.

        Raises:
            UnsupportedSubclassError: what puts it together gives another class.
        """
        inner: dict[str, torch.Tensor] = dict(zip(self.names, leaves, strict=False))
        if self.has_own_protocol and not self.is_nested:  # most: a backward builds one for each parameter
            built = self.cls.__tensor_unflatten__(inner, self.ctx, self._size, self.stride)  # pyright: ignore[reportAttributeAccessIssue]
            return built if type(built) is self.cls else self._of_own_class(built)
        if self.is_nested:
            remaining = iter(leaves)
            for name, spec in zip(self.names, self.inner, strict=True):
                own = tuple(next(remaining) for _ in range(1 if spec is None else spec.num_leaves))
                inner[name] = own[0] if spec is None else spec.build(own)
        ctx = self.ctx
        if jagged.is_jagged_class(self.cls):
            return jagged.built(self.cls, inner, ctx)
        if isinstance(ctx, _WithObjects):
            inner, ctx = {**inner, **ctx.objects}, ctx.ctx
        return self._of_own_class(unflattened(self.cls, inner, ctx, self._size, self.stride))

    @functools.cached_property
    def has_own_protocol(self) -> bool:
        """Whether the class itself takes its instances apart, into tensors alone, and puts them together."""
        has_others = jagged.is_jagged_class(self.cls) or isinstance(self.ctx, _WithObjects)
        return not has_others and all(hasattr(self.cls, name) for name in PROTOCOL)

    @functools.cached_property
    def _size(self) -> torch.Size:
        return torch.Size(self.shape)

    def _of_own_class(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not self.cls:
            raise UnsupportedSubclassError(
                f"a {self.cls.__qualname__} was put together as a {type(x).__qualname__}: __tensor_unflatten__ must rebuild its class"
            )
        return x

    @functools.cached_property
    def num_leaves(self) -> int:
        """Number of plain tensors inside."""
        return sum(1 if spec is None else spec.num_leaves for spec in self.inner)

    @functools.cached_property
    def offsets(self) -> tuple[bool, ...]:
        """For each leaf whether it says where the sequences of a nested tensor lie."""
        own = jagged.is_jagged_class(self.cls)
        parts = (
            (own and name != "_values",) if spec is None else spec.offsets
            for name, spec in zip(self.names, self.inner, strict=True)
        )
        return tuple(is_offsets for part in parts for is_offsets in part)

    def leaf_names(self) -> tuple[str, ...]:
        """A dotted-with-underscores name for each leaf, for readable traces."""
        found: list[str] = []
        for name, spec in zip(self.names, self.inner, strict=True):
            found.extend((name,) if spec is None else (f"{name}_{leaf}" for leaf in spec.leaf_names()))
        return tuple(found)


def outer_metadata(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Shape, stride and requires_grad of the wrapper itself, without running its ``__torch_function__``."""
    with torch._C.DisableTorchFunctionSubclass():
        requires_grad = x.requires_grad
        if jagged.is_jagged_class(type(x)):
            return *jagged.metadata(x), requires_grad
        shape = x.shape
        stride = x.stride() if x.layout is torch.strided else ()
    if not _INT.issuperset(map(type, shape)):
        raise UnsupportedSubclassError(
            f"{type(x).__qualname__} has a symbolic shape {tuple(shape)}: only static shapes are supported"
        )
    return tuple(shape), tuple(stride), requires_grad


_INT = frozenset({int})


def is_equal(a: Any, b: Any) -> bool:
    """Equality of contexts that never raises: contexts that cannot be compared are taken to be different."""
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # noqa: BLE001 - a context may hold anything, for instance a tensor
        return False


def is_of_wrappers(fn: Any) -> bool:
    """Whether `fn` is an operation of a library's own: it dispatches on wrappers itself, and on plain tensors is its ``body``."""
    return getattr(type(fn), "dispatches_on_wrappers", False)
