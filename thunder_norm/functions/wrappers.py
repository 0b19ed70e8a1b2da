"""Wrapper subclasses in transformed functions: a wrapper is a container of its inner tensors.

Under `SubclassTransform` the interpreter has a `SubclassProxy` for a wrapper.  Transforms work on its inner tensors: what goes in and
out of a transformed function is opened, a pytree like any other, and closed again where the user's program sees it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import (
    GetAttrKey,
    register_pytree_node,
    tree_flatten,
    tree_map,
)

from thunder_norm.errors import TransformTypeError, with_details
from thunder_norm.subclass.protocol import WrapperSpec, is_equal
from thunder_norm.subclass.proxy import SubclassProxy
from thunder_norm.subclass.trace import UNFLATTEN, leaf_proxies
from thunder.core import devices, dtypes
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, wrap
from thunder.core.proxies import TensorProxy


@dataclasses.dataclass(frozen=True, eq=False)
class _Structure:
    """What a wrapper is beside its inner tensors."""

    spec: WrapperSpec
    shapes: tuple[tuple[int, ...], ...]  # of the inner tensors
    acquisition: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Structure):
            return False
        same = self.spec.cls is other.spec.cls and self.spec.names == other.spec.names
        return same and is_equal(self.spec.ctx, other.spec.ctx)

    def __hash__(self) -> int:
        return hash((self.spec.cls, self.spec.names))

    def __repr__(self) -> str:
        return self.spec.cls.__name__


class OpenWrapper:
    """The inner tensors of a wrapper."""

    def __init__(self, leaves: Sequence[Any], structure: _Structure):
        self.leaves = tuple(leaves)
        self.structure = structure

    @staticmethod
    def of(proxy: SubclassProxy) -> OpenWrapper:
        """A wrapper of the interpreted program, opened."""
        leaves = leaf_proxies(proxy.acquisition, proxy.fake)
        shapes = tuple(tuple(p.shape) for p in leaves)
        given = proxy.acquisition.wrappers.specs.get(id(proxy.fake))  # fakes never require grad here
        spec = dataclasses.replace(WrapperSpec.of(proxy.fake), requires_grad=given is not None and given.requires_grad)
        return OpenWrapper(leaves, _Structure(spec, shapes, proxy.acquisition))

    @property
    def class_name(self) -> str:
        """The wrapper's class."""
        return self.structure.spec.cls.__name__

    def close(self) -> SubclassProxy:
        """A wrapper around these inner tensors, for the interpreted program.

        Raises:
            TransformTypeError: something else than tensors has come in their place.
        """
        acquisition, spec = self.structure.acquisition, self.structure.spec
        if not all(isinstance(p, TensorProxy) for p in self.leaves):
            raise TransformTypeError(
                with_details(f"a {self.class_name} cannot be put together", got=", ".join(type(p).__name__ for p in self.leaves))
            )
        shape = self._shape()
        stride = spec.stride if shape == spec.shape else torch.empty(shape, device="meta").stride()
        spec = dataclasses.replace(spec, shape=shape, stride=stride, requires_grad=False)
        fakes = tuple(_fake_of(acquisition, p) for p in self.leaves)
        with torch.no_grad(), acquisition.fakes.mode:
            fake = spec.build(fakes)
        proxy = acquisition.register(SubclassProxy(fake, acquisition))
        acquisition.wrappers.leaves[id(fake)] = tuple(self.leaves)
        return proxy

    def _shape(self) -> tuple[int, ...]:
        """The shape of the wrapper: it changes as that of an inner tensor which has the same."""
        spec = self.structure.spec
        for before, p in zip(self.structure.shapes, self.leaves, strict=True):
            if before == spec.shape:
                return tuple(p.shape)
        return spec.shape


def _fake_of(acquisition: Any, p: TensorProxy) -> torch.Tensor:
    known = acquisition.fakes.known(p)
    if known is None:
        with acquisition.fakes.mode:
            dtype, device = dtypes.to_torch_dtype(p.dtype), devices.to_torch_device(p.device)
            known = torch.empty(tuple(p.shape), dtype=dtype, device=device)
        acquisition.fakes.bind(known, p)
    return known


def opened(value: Any) -> Any:
    """A value of the interpreted program, wrappers opened."""
    return OpenWrapper.of(value) if isinstance(value, SubclassProxy) else value


def closed(tree: Any) -> Any:
    """The tree as the interpreted program sees it."""
    if not any(isinstance(v, OpenWrapper) for v in tree_flatten(tree, is_leaf=is_open)[0]):
        return tree
    return tree_map(lambda v: v.close() if isinstance(v, OpenWrapper) else v, tree, is_leaf=is_open)


def announce(tree: Any, bsyms: list) -> None:
    """Tell the trace of the wrappers in a result, whose inner tensors `bsyms` make."""
    for v in tree_flatten(tree)[0]:
        if isinstance(v, SubclassProxy) and not v.acquisition.num_levels:
            bsyms.append(UNFLATTEN.bind(*leaf_proxies(v.acquisition, v.fake), output=v))


def is_open(v: Any) -> bool:
    """Whether a value is a wrapper, opened: as ``is_leaf`` of a tree, for the values of the user's program."""
    return isinstance(v, OpenWrapper)


def proxies_of(v: Any) -> tuple[TensorProxy, ...]:
    """The tensors of one value of the user's program: none, one, or the inner ones of a wrapper."""
    return v.leaves if is_open(v) else (v,) if isinstance(v, TensorProxy) else ()


def _with_keys(wrapper: OpenWrapper) -> tuple[list, _Structure]:
    names = wrapper.structure.spec.leaf_names()
    return [(GetAttrKey(n), v) for n, v in zip(names, wrapper.leaves, strict=True)], wrapper.structure


register_pytree_node(
    OpenWrapper,
    lambda wrapper: (list(wrapper.leaves), wrapper.structure),
    OpenWrapper,
    serialized_type_name="thunder_norm.OpenWrapper",
    to_dumpable_context=str,
    from_dumpable_context=str,
    flatten_with_keys_fn=_with_keys,
)


# -- values of the interpreter -----------------------------------------------------------------------------------------


def values_of(args: Sequence[WrappedValue], kwargs: dict[str, WrappedValue]) -> tuple[tuple, dict]:
    """Arguments as the interpreter has them, as values: proxies in place of tensors, containers included."""
    return tuple(value_of(a) for a in args), {k: value_of(v) for k, v in kwargs.items()}


def value_of(w: WrappedValue) -> Any:
    """A value with the proxies that Thunder has for its tensors; numbers on the way are guarded as Thunder does it."""
    value = w.value
    if isinstance(value, list | tuple):
        w.track_items()
        items = [value_of(i) for i in w.item_wrappers]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        w.track_items()
        new = copy.copy(value)
        for k, item in w.item_wrappers.items():
            new[k] = value_of(item)
        return new
    return opened(value)


def wrapped(value: Any, like: WrappedValue | None = None) -> WrappedValue:
    """A value that a transformed function makes, for the interpreter."""
    inputs = [] if like is None else [like.provenance]
    return wrap(closed(value), provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=inputs))
