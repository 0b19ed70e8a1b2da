"""What is in nested lists, tuples, dicts and whatever else torch knows as a pytree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

ATOMS = frozenset(
    {int, float, complex, bool, str, type(None), slice, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def flat_tensors(tree: Any) -> tuple[torch.Tensor, ...]:
    """The tensors in a tree, in order."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return tuple(found)


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    # torch's own walk, in Python too, costs ten times as much for the arguments of an operation
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif kind is tuple or kind is list:
        for v in tree:
            if type(v) not in ATOMS:
                _collect(v, found)
    elif kind is dict:
        for v in tree.values():
            _collect(v, found)
    elif kind not in ATOMS:
        found.extend(v for v in tree_leaves(tree) if isinstance(v, torch.Tensor))


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same tree with what `function` makes of each tensor in its place."""
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if kind is tuple or kind is list:
        return kind([v if type(v) in ATOMS else map_tensors(function, v) for v in tree])
    if kind is dict:
        return {k: map_tensors(function, v) for k, v in tree.items()}
    if kind in ATOMS:
        return tree
    return tree_map(lambda v: function(v) if isinstance(v, torch.Tensor) else v, tree)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with what `function` makes of each leaf, as ``tree_map``, in a tenth of the time for arguments of an operation."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([map_leaves(function, v) for v in tree])
    if kind is dict:
        return {k: map_leaves(function, v) for k, v in tree.items()}
    return function(tree) if kind in ATOMS or isinstance(tree, torch.Tensor) else tree_map(function, tree)


def of_plain_classes(tree: Any) -> Any:
    """The same tree with lists and tuples for what derives from them, which torch's operations take and its pytrees may not know."""
    if isinstance(tree, list | tuple):
        return (list if isinstance(tree, list) else tuple)(map(of_plain_classes, tree))
    return {k: of_plain_classes(v) for k, v in tree.items()} if type(tree) is dict else tree


def leaves_of_results(tree: Any) -> list[Any]:
    """The leaves of what a program returns: of dataclasses too, which torch's pytrees know only once they are registered."""
    found: list[Any] = []
    for leaf in tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += leaves_of_results([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
        else:
            found.append(leaf)
    return found
