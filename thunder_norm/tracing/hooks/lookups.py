"""What is called instead of a function on plain tensors: what a user registered, what we have, what Thunder has."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from thunder_norm.tracing import lookasides
from thunder_norm.tracing.torch_functions import opaque_functions, torch_semantics
from thunder.core import jit_ext
from thunder.core.interpreter import default_lookaside

_IS_OF_USER = "_thunder_norm_is_of_user"  # of a lookaside

thunders_lookaside = jit_ext.general_jit_lookaside


def lookaside_for(fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """What is called instead of `fn` on plain tensors where we have a part: ours, or Thunder's, with the results that torch has."""
    if fn is getattr and (found := _getattr_for(args)) is not None:
        return found
    own = _of_user(fn) or lookasides.of_thunder_norm(fn) or torch_semantics.lookaside(fn, args) or lookasides.of_others(fn)
    if own is None and lookasides.is_pythons(fn):
        return default_lookaside(fn, *args, **kwargs)
    own = own or opaque_functions.refused_method(fn, args)
    found = own or thunders_lookaside(fn, *lookasides.shown_to_thunder(fn, args), **_named_for_thunder(kwargs))
    if own is None and found is not None and type(fn) is types.BuiltinFunctionType:
        return opaque_functions.with_tensors_alone(fn, found)
    return found


def _getattr_for(args: tuple[Any, ...]) -> Callable | None:
    """The same for `getattr`, more than half of all that is called: no table of ours has it.  None where an executor has another."""
    found = jit_ext._general_jit_lookaside_map[getattr]
    mended = None if hasattr(found, _IS_OF_USER) else torch_semantics.lookaside(getattr, args)
    if mended is not None:
        return mended
    ctx = jit_ext._jit_ctx.get()
    return None if getattr in ctx._executor_lookasides or getattr in ctx.ad_hoc_executor._lookasides else found


def _named_for_thunder(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name as Thunder can be given them: it looks at the values alone, and takes one of the name ``fn`` for its own."""
    return {f"given_{name}": value for name, value in kwargs.items()} if "fn" in kwargs else kwargs


def _of_user(fn: Callable) -> Callable | None:
    found = lookasides.look_up(jit_ext._general_jit_lookaside_map, fn)
    return found if hasattr(found, _IS_OF_USER) else None


def register_for_all(fn: Callable, lookaside: Callable) -> None:
    """Have every compilation call `lookaside` instead of `fn`, also those without a transform of ours."""
    setattr(lookaside, _IS_OF_USER, True)
    jit_ext.register_general_jit_lookaside(fn)(lookaside)


def is_replaced_for_all(fn: Callable) -> bool:
    """Whether Thunder, a user or we have something to call instead of `fn`."""
    return fn in jit_ext._general_jit_lookaside_map or lookasides.is_registered(fn)
