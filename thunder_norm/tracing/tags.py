"""What is known of tensors of a trace beside Thunder's own tags; and which tags of Thunder's an operation has."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from thunder.core.proxies import ProxyTag
from thunder.core.symbol import BoundSymbol


class _Tag(ProxyTag):
    """Thunder's has no more than before."""


def _new(name: str) -> _Tag:
    _Tag.register_tag(name)
    return _Tag(name)


STANDS_FOR_GRADIENT = _new("STANDS_FOR_GRADIENT")
OF_ANY_LENGTH = _new("OF_ANY_LENGTH")  # an input that has not one shape in all calls, and so do results
LETS_SEE = _new("LETS_SEE")  # says of each row of a mask of attention whether it lets anything be seen
OF_A_CLASS = _new("OF_A_CLASS")  # an input of a class of a user's that does not dispatch


def has_any_tag(bsym: BoundSymbol, tags: Set[Any]) -> bool:
    """As `thunder.core.symbol.has_tags`, which makes a set of the tags of all that an operation consists of, whatever is asked."""
    if (of_symbol := bsym.sym.tags) and not tags.isdisjoint(of_symbol) or not tags.isdisjoint(bsym.tags):
        return True
    for inner in bsym.subsymbols:
        if has_any_tag(inner, tags):
            return True
    return False
