"""Values that Python's C code looks at whole: keys, elements of sets, what is compared and put in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thunder_norm.tracing.guarding import stored
from thunder_norm.tracing.guarding.ways import path_of
from thunder.core.interpreter import WrappedValue

# of what stands for a number in more calls than one, a function to call where the number itself is looked at
TOLD = "_thunder_norm_told_of_native_looks"


def look_into(values: Iterable[Any]) -> list[WrappedValue]:
    """Guard all that is in the containers among some values, which are given to something that looks at it natively.

    A container of the program's own may hold some that are given to it, as the key ``(name, sizes)`` does.

    Returns:
        what is no container, of those values and in them.
    """
    pending, seen, others = list(values), set(), []
    while pending:
        value = pending.pop()
        if not isinstance(value, WrappedValue) or id(value) in seen:
            continue
        if not stored.is_container(type(value.value)):
            others.append(value)
            continue
        seen.add(id(value))
        if path_of(value.provenance) is not None:
            value.track_items()
        items = value.item_wrappers or ()
        held = [*items.values()] if isinstance(items, dict) else items
        for v in held:
            own = getattr(getattr(v, "value", None), "__dict__", {})  # a proxy of a tensor answers more than that, or raises
            if TOLD in own:
                own[TOLD]()
        pending += held
    return others
