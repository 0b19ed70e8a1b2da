"""The operations of programs by name: Thunder's own, those its executors run in torch, and functions of tensors that torch has.

An operation is written as a name and found again in this table, never by what a file says about it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.core.measuring import operator_norm
from thunder_norm.errors import SavedFileError, with_details
from thunder_norm.functions.kernels import KERNELS
from thunder_norm.subclass.acquiring import fallback
from thunder_norm.subclass.recording.aten import WRITTEN
from thunder_norm.tracing.guarding.bindable import executor as boundary_executor
from thunder_norm.tracing.torch_functions.torch_semantics import clamp
import thunder.clang as clang
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.symbol import Symbol
from thunder.executors.pythonex import ex as python_executor
from thunder.executors.torchex import ex as torch_executor

# Beside those that compute: what unpacks, lets go of and returns values.
_BOOKKEEPING = frozenset(
    {
        prims.PrimIDs.UNPACK_TRIVIAL,
        prims.PrimIDs.UNPACK_SEQUENCE,
        prims.PrimIDs.UNPACK_EMPTY_DICT,
        prims.PrimIDs.DEL,
        prims.PrimIDs.RETURN,
        prims.PrimIDs.SHALLOW_COPY,
    }
)
_IN_PYTHON = frozenset(
    "clear_mutable_collection add sub mul div neg abs pow eq ne ge gt le lt floordiv fmod mod convert_element_type".split()
)


def name_of(symbol: Symbol) -> list:
    """What stands for an operation in a file.

    Raises:
        SavedFileError: it is none of the table.
    """
    name = _found_again(symbol)
    if name is not None:
        return name
    raise SavedFileError(
        with_details(
            f"the operation {symbol.name} cannot be saved",
            id=symbol.id,
            executor=getattr(symbol.executor, "name", None),
            why="it is none of torch's or Thunder's that are known by name: a function of your own, or fused by an executor",
        )
    )


def is_known(symbol: Symbol) -> bool:
    """Whether an operation is in the table."""
    return _found_again(symbol) is not None


def _found_again(symbol: Symbol) -> list | None:
    name = _name(symbol)
    try:
        return name if name is not None and symbol_named(name) == symbol else None
    except SavedFileError:
        return None


def _name(symbol: Symbol) -> list | None:
    made = fallback.made_for(symbol)
    if made is not None:
        name = _name_of_function(made.function)
        return None if name is None else ["function", name, list(made.used), made.form]
    if symbol.executor is not None:
        table = next((name for name, executor in _EXECUTORS.items() if symbol.executor is executor), None)
        return None if table is None else [table, symbol.name]
    if isinstance(symbol.id, prims.PrimIDs):
        return ["prim", symbol.id.name]
    return ["thunder", symbol.id] if isinstance(symbol.id, str) else None


_EXECUTORS = {"torch": torch_executor, "python": python_executor, "boundary": boundary_executor, "kernels": KERNELS}


def symbol_named(name: list) -> Symbol:
    """The operation that a name in a file stands for.

    Raises:
        SavedFileError: there is none.
    """
    table, *key = name
    found = _FIND[table](*key) if table in _FIND else None
    if found is None:
        raise SavedFileError(f"the file has an operation that is not known here: {' '.join(map(str, name))}")
    return found


def is_executable(symbol: Symbol) -> bool:
    """Whether a program that runs may have the operation, and not only one that is compiled before."""
    return symbol.executor is not None or symbol.id in _BOOKKEEPING


def _prim(name: str) -> Symbol | None:
    found = _prims().get(name)
    known = found is not None and (found.id in _BOOKKEEPING or found.id in torch_executor.implmap)
    return found if known else None


@functools.cache
def _prims() -> dict[str, Symbol]:
    return {v.id.name: v for v in vars(prims).values() if isinstance(v, Symbol) and isinstance(v.id, prims.PrimIDs)}


@functools.cache
def _thunder() -> dict[str, Symbol]:
    found = [clamp, *vars(ltorch).values(), *ltorch._torch_to_thunder_function_map.values(), *vars(clang).values()]
    return {v.id: v for v in found if isinstance(v, Symbol) and isinstance(v.id, str)}


def _function(name: str, used: list, form: str) -> Symbol | None:
    function = _functions().get(name) or _overload(name)
    if function is None or not used or not all(type(u) is bool for u in used) or form not in fallback.FORMS:
        return None
    return fallback.symbol_for(fallback.Made(function, tuple(used), form), WRITTEN)


_FIND: dict[Any, Callable[..., Symbol | None]] = {
    "torch": lambda name: torch_executor.opmap.get(name),
    "python": lambda name: python_executor.opmap.get(name) if name in _IN_PYTHON else None,
    "boundary": lambda name: boundary_executor.opmap.get(name) if name == "release_saved" else None,
    "kernels": lambda name: KERNELS.opmap.get(name),
    "prim": _prim,
    "thunder": lambda name: _thunder().get(name),
    "function": _function,
}


# -- functions that Thunder has no symbol for -----------------------------------------------------------------------------

_OWN: dict[str, Callable] = {"thunder_norm.operator_norm": operator_norm}


@functools.cache
def _functions() -> dict[str, Callable]:
    """Ours, and those that torch lets tensor subclasses override: of tensors, not of files or processes; none that works in place."""
    found = dict(_OWN)
    for functions in torch.overrides.get_overridable_functions().values():
        for function in functions:
            name = torch.overrides.resolve_name(function) or ""
            parts = name.removesuffix(".__get__").split(".")
            if parts[0] == "torch" and not parts[-1].startswith("_") and not parts[-1].endswith("_"):
                found[name] = function
    return found


def _name_of_function(function: Callable) -> str | None:
    if isinstance(function, torch._ops.OpOverload):
        name = str(function)
        return name if _overload(name) is function else None
    own = next((name for name, f in _OWN.items() if f is function), None)
    name = torch.overrides.resolve_name(function) if own is None else own
    return name if name is not None and _functions().get(name) == function else None


def _overload(name: str) -> Callable | None:
    """An overload of aten that is an elementary one in torch's own list: a function of tensors, without effects."""
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != "aten":
        return None
    packet = getattr(torch.ops.aten, parts[1], None) if parts[1].isidentifier() else None
    found = getattr(packet, parts[2], None) if parts[2].isidentifier() else None
    if not isinstance(found, torch._ops.OpOverload) or found._schema.is_mutable:
        return None
    return found if {torch.Tag.core, torch.Tag.pointwise} & set(found.tags) else None
