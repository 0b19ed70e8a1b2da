"""Thunder's passes: what its pure functions find out again and again of symbols and containers, while one program is compiled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from thunder_norm.tracing.native import bound_symbols, claims, elementwise, flattening, printing, proxies, symbols
from thunder_norm.tracing.replacement import Replacement, Replacements
import thunder.torch
from thunder.core import codeutils, prims, symbol, transform_common, transforms, utils, vjp_utils
from thunder.core.symbol import Symbol
from thunder.executors import torch_compile


def forget_signatures() -> None:
    """Look again at what functions take: it may have been changed since."""
    _parameters.cache_clear()


class _Parameters:
    """What a function takes."""

    def __init__(self, signature: inspect.Signature):
        parameters = list(signature.parameters.values())
        of_kind = {k: [(p.name, p.default) for p in parameters if p.kind is k] for k in inspect._ParameterKind}
        self.by_position = of_kind[inspect.Parameter.POSITIONAL_ONLY] + of_kind[inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self.num_unnamed = len(of_kind[inspect.Parameter.POSITIONAL_ONLY])
        self.by_name = of_kind[inspect.Parameter.KEYWORD_ONLY]
        self.takes_more_by_position = bool(of_kind[inspect.Parameter.VAR_POSITIONAL])
        self.takes_more_by_name = bool(of_kind[inspect.Parameter.VAR_KEYWORD])

    def bound(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """As `inspect.Signature.bind` with defaults; None if that raises an error or may do something else."""
        count, given = len(self.by_position), len(args)
        if given == count and not kwargs and not self.by_name:  # most operations
            return args, {}
        if given > count and not self.takes_more_by_position:
            return None
        rest = dict(kwargs)
        # given by position, or to be given so
        taken = self.by_position[min(given, self.num_unnamed) : max(given, self.num_unnamed)]
        if rest and any(name in rest for name, _ in taken):
            return None
        positional = (*args[:count], *[rest.pop(name, default) for name, default in self.by_position[given:]], *args[count:])
        named = {name: rest.pop(name, default) for name, default in self.by_name}
        is_missing = any(v is inspect.Parameter.empty for v in (*positional, *named.values()))
        return None if rest and not self.takes_more_by_name or is_missing else (positional, named | rest)


@functools.lru_cache(maxsize=4096)
def _parameters(function: Callable) -> _Parameters:
    inner: Any = function
    while type(inner) is FunctionType and "__signature__" not in vars(inner) and "__wrapped__" in vars(inner):
        inner = inner.__wrapped__
    is_symbol = type(inner) is Symbol and not any(hasattr(inner, name) for name in ("__wrapped__", "__signature__"))
    inner = Symbol.__call__ if is_symbol else inner
    if type(inner) is not FunctionType or "__signature__" in vars(inner):
        return _Parameters(inspect.signature(function))
    by_name = inner.__kwdefaults__ or {}
    defaults = [len(by_name), *by_name, *by_name.values(), *(inner.__defaults__ or ())]
    known = _of_definitions.get(inner.__code__)
    if known is None or list(map(id, known[0])) != list(map(id, defaults)):
        known = _of_definitions[inner.__code__] = defaults, _Parameters(inspect.signature(function if is_symbol else inner))
    return known[1]


# What functions take says their definition, and what defaults it had: composites of many operations are functions of a few definitions.
_of_definitions: dict[CodeType, tuple[list[Any], _Parameters]] = {}


def _normalize(self: Symbol, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
    assert self.meta is not None
    try:
        found = _parameters(self.meta).bound(args, kwargs)
    except TypeError:  # not hashable
        found = None
    if found is not None:
        return found
    bound = inspect.signature(self.meta).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


REPLACEMENTS = Replacements(
    (
        Replacement(Symbol, "normalize", _normalize, "Symbol.normalize, which inspects the signature for each operation"),
        Replacement(
            symbol,
            "tree_flatten_with_dataclass",
            flattening.flatten_with_dataclass,
            "the same, which looks for dataclasses first",
        ),
        *(
            Replacement(
                module, "tree_flatten", flattening.flatten, "the same, which makes a set of types and asks for torch.distributed"
            )
            for module in (symbol, codeutils, utils, prims, transforms, transform_common, vjp_utils, torch_compile, thunder.torch)
        ),
        *bound_symbols.REPLACEMENTS,
        *claims.REPLACEMENTS,
        *printing.REPLACEMENTS,
        *proxies.REPLACEMENTS,
        *elementwise.REPLACEMENTS,
        *symbols.REPLACEMENTS,
    )
)
