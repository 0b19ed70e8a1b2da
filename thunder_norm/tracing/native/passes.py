"""Thunder's passes: what its pure functions find out again and again of symbols and containers, while one program is compiled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import optree

from thunder_norm.tracing.native import bound_symbols, claims, printing
from thunder_norm.tracing.replacement import Replacement, Replacements
import thunder.torch
from thunder.core import codeutils, pytree, symbol, utils
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.pytree import OPTREE_NAMESPACE
from thunder.core.symbol import Symbol
from thunder.executors import torch_compile

_PLAIN = (tuple, list, dict)
_original_flatten = pytree.tree_flatten
_original_flatten_with_dataclass = pytree.tree_flatten_with_dataclass
_OF_A_LEAF = pytree.tree_flatten(0)[1]


@functools.lru_cache(maxsize=4096)
def _signature(function: Callable) -> inspect.Signature:
    return inspect.signature(function)


def forget_signatures() -> None:
    """Look again at what functions take: it may have been changed since."""
    _signature.cache_clear()
    _parameters.cache_clear()


class _Parameters:
    """What a function takes, where that is nothing but named parameters."""

    def __init__(self, signature: inspect.Signature):
        parameters = list(signature.parameters.values())
        self.of_kind = {k: [(p.name, p.default) for p in parameters if p.kind is k] for k in inspect._ParameterKind}
        self.by_position = self.of_kind[inspect.Parameter.POSITIONAL_ONLY] + self.of_kind[inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self.num_unnamed = len(self.of_kind[inspect.Parameter.POSITIONAL_ONLY])
        self.by_name = self.of_kind[inspect.Parameter.KEYWORD_ONLY]
        self.are_all_named = len(self.by_position) + len(self.by_name) == len(parameters)

    def bound(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """As `inspect.Signature.bind` with defaults; None if that raises an error or may do something else."""
        if not self.are_all_named or not self.num_unnamed <= len(args) <= len(self.by_position):
            return None
        rest = dict(kwargs)
        positional = (*args, *[rest.pop(name, default) for name, default in self.by_position[len(args) :]])
        named = {name: rest.pop(name, default) for name, default in self.by_name}
        is_missing = any(v is inspect.Parameter.empty for v in (*positional, *named.values()))
        return None if rest or is_missing else (positional, named)


@functools.lru_cache(maxsize=4096)
def _parameters(function: Callable) -> _Parameters:
    return _Parameters(_signature(function))


def _normalize(self: Symbol, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
    assert self.meta is not None
    try:
        found = _parameters(self.meta).bound(args, kwargs)
    except TypeError:  # not hashable
        found, signature = None, inspect.signature(self.meta)
    else:
        signature = _signature(self.meta)
    if found is not None:
        return found
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _flatten(args: Any, namespace: str = OPTREE_NAMESPACE) -> Any:
    if type(args) not in _PLAIN:
        return _original_flatten(args, namespace=namespace)
    return optree.tree_flatten(args, none_is_leaf=True, namespace=namespace)


def _flatten_with_dataclass(tree: Any) -> Any:
    if isinstance(tree, (TensorProxy, NumberProxy)):
        return [tree], _OF_A_LEAF
    if type(tree) not in _PLAIN:
        return _original_flatten_with_dataclass(tree)
    found = optree.tree_flatten(tree, none_is_leaf=True, namespace=OPTREE_NAMESPACE)
    is_to_be_registered = any(hasattr(kind, "__dataclass_fields__") for kind in {*map(type, found[0])})
    return _original_flatten_with_dataclass(tree) if is_to_be_registered else found


REPLACEMENTS = Replacements(
    (
        Replacement(Symbol, "normalize", _normalize, "Symbol.normalize, which inspects the signature for each operation"),
        Replacement(
            symbol, "tree_flatten_with_dataclass", _flatten_with_dataclass, "the same, which looks for dataclasses first"
        ),
        *(
            Replacement(module, "tree_flatten", _flatten, "the same, which makes a set of types and asks for torch.distributed")
            for module in (symbol, codeutils, utils, torch_compile, thunder.torch)
        ),
        *bound_symbols.REPLACEMENTS,
        *claims.REPLACEMENTS,
        *printing.REPLACEMENTS,
    )
)
