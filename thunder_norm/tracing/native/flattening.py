"""Thunder's flattening of containers, which makes a set of types and asks for torch.distributed each time it is called."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import optree
import torch

from thunder.core import devices, dtypes, pytree
from thunder.core.proxies import (
    AnyProxy,
    CollectionProxy,
    ComplexProxy,
    FloatProxy,
    IntegerProxy,
    NumberProxy,
    Proxy,
    StringProxy,
    TensorProxy,
)
from thunder.core.pytree import OPTREE_NAMESPACE

_PLAIN = (tuple, list, dict)
_PROXIES = (TensorProxy, NumberProxy)
_LEAVES = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, devices.Device, dtypes.floating, dtypes.bool_}
)
# Whose instances are leaves, and no dataclasses: nearly all that symbols are given.
_KNOWN = _LEAVES | {
    Proxy,
    TensorProxy,
    NumberProxy,
    IntegerProxy,
    FloatProxy,
    ComplexProxy,
    StringProxy,
    AnyProxy,
    CollectionProxy,
}
_KNOWN |= {dtypes.signedinteger, dtypes.unsignedinteger, dtypes.complexfloating, type}
_original_flatten = pytree.tree_flatten
_original_flatten_with_dataclass = pytree.tree_flatten_with_dataclass
_OF_A_LEAF = pytree.tree_flatten(0)[1]


def flatten(args: Any, namespace: str = OPTREE_NAMESPACE) -> Any:
    """As `thunder.core.pytree.tree_flatten`."""
    if type(args) in _PLAIN:
        return optree.tree_flatten(args, none_is_leaf=True, namespace=namespace)
    if isinstance(args, _PROXIES) or type(args) in _LEAVES:
        return [args], _OF_A_LEAF
    return _original_flatten(args, namespace=namespace)


def flatten_with_dataclass(tree: Any) -> Any:
    """As `thunder.core.pytree.tree_flatten_with_dataclass`."""
    if isinstance(tree, _PROXIES) or type(tree) in _LEAVES:
        return [tree], _OF_A_LEAF
    if type(tree) not in _PLAIN:
        return _original_flatten_with_dataclass(tree)
    found = optree.tree_flatten(tree, none_is_leaf=True, namespace=OPTREE_NAMESPACE)
    if _KNOWN.issuperset(map(type, found[0])):
        return found
    is_to_be_registered = any(hasattr(kind, "__dataclass_fields__") for kind in {*map(type, found[0])})
    return _original_flatten_with_dataclass(tree) if is_to_be_registered else found


def leaves_of(values: Collection[Any]) -> list[Any] | None:
    """The leaves of values that are leaves, or tuples and lists of some; None where they may be others, which Thunder's tree knows."""
    if _KNOWN.issuperset(map(type, values)):
        return list(values)
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _KNOWN:
            found.append(value)
            continue
        inner = leaves_of(value) if kind is tuple or kind is list else None
        if inner is None:
            return None
        found += inner
    return found
