"""Ways from the arguments, the jitted function and modules that it imports to what a program looks at, by attributes and items."""

from __future__ import annotations

import enum
import sys
from collections import deque
from types import BuiltinFunctionType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import numpy as np
import torch

from thunder_norm.tracing.guarding import stored
from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.provenances import TensorKey, key_itself
from thunder_norm.user_code import is_installed
from thunder.core.interpreter import ProvenanceRecord, PseudoInst

Path = tuple[tuple[str, Any], ...]

LEFT_OUT = object()
GONE = object()
_KEY = "_thunder_norm_key"  # of the provenance of an item
MEMORY = "_thunder_norm_memory"  # no attribute, but the tensor in the memory of an array, where no way goes on
NUMBER = "_thunder_norm_number"  # no attribute either, but the tensor that a prologue makes of a number
_MODULE = "_thunder_norm_module"  # of the provenance of a module that the program imports, its name
_KEYS = (str, int)
# of dicts alone: another that is equal finds the same item
_KEYS_OF_DICTS = (
    *(type(None), bool, float, complex, bytes, torch.dtype, torch.device, torch.Size, np.dtype),
    *(type, enum.Enum, FunctionType, BuiltinFunctionType),
)
_METHODS = (FunctionType, classmethod, staticmethod, GetSetDescriptorType, MemberDescriptorType)
# whose globals are as they are
_OF_OTHERS = frozenset({"thunder_norm", *sys.stdlib_module_names} - {"__main__"})


# Compared one by one: an enum's hash is a function of Python, and this is asked several times for each value of a program.
_ARGS, _KWARGS, _FN = PseudoInst.INPUT_ARGS, PseudoInst.INPUT_KWARGS, PseudoInst.INPUT_FN
_ATTRIBUTE, _ITEM, _CONSTANT, _OPAQUE = PseudoInst.LOAD_ATTR, PseudoInst.BINARY_SUBSCR, PseudoInst.CONSTANT, PseudoInst.OPAQUE


def path_of(record: ProvenanceRecord) -> Path | None:
    """The way to a value, by what Thunder's interpreter knows of where it comes from; None if the program made it."""
    steps: list[tuple[str, Any]] = []
    while (inst := record.inst) is _ATTRIBUTE or inst is _ITEM:
        inputs = record.inputs
        if len(inputs) != 2:
            return None
        if inputs[1].inst is _CONSTANT and type(key := inputs[1].value) in _KEYS:
            if key is MEMORY or key is NUMBER:
                return None
        elif (key := getattr(record, _KEY, LEFT_OUT)) is LEFT_OUT:
            return None
        steps.append(("attribute" if inst is _ATTRIBUTE else "item", key))
        record = inputs[0]
    if inst is _OPAQUE and (module := getattr(record, _MODULE, None)) is not None:
        return (("modules", None), ("item", module), *reversed(steps))
    root = "args" if inst is _ARGS else "kwargs" if inst is _KWARGS else "fn" if inst is _FN else None
    return None if root is None else ((root, None), *reversed(steps))


def roots_of(fn: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """What ways begin at, by name."""
    return {"fn": fn, "args": args, "kwargs": kwargs, "modules": sys.modules}


def is_of_call(path: Path) -> bool:
    """Whether what a way leads to comes with the call, and was not there before it."""
    return path[0][0] in ("args", "kwargs")


def is_imported(path: Path) -> bool:
    """Whether a way begins at a module that the program imports."""
    return path[0][0] == "modules"


def imported(name: str) -> ProvenanceRecord:
    """Where a module that the program imports comes from: no way that Thunder knows."""
    # Thunder's `is_created_during_tracing` asks for the function that was called
    record = ProvenanceRecord(_OPAQUE, inputs=[ProvenanceRecord(_CONSTANT, inputs=[], value=name)])
    setattr(record, _MODULE, name)
    return record


def is_another_key(key: Any) -> bool:
    """Whether a key of a dict is no number or word, and is found again by what it is."""
    return type(key) not in _KEYS and _is_lasting(key)


def note_key(record: ProvenanceRecord, key: Any) -> None:
    """Note under which key an item stands, where Thunder would look for the key in the program."""
    setattr(record, _KEY, TensorKey(key) if isinstance(key, torch.Tensor) else key)


def _is_lasting(key: Any) -> bool:
    if type(key) is tuple:
        return all(type(k) in _KEYS or _is_lasting(k) for k in key)
    return isinstance(key, _KEYS_OF_DICTS) and key == key


class Ways:
    """The ends of ways, as things stand now; each step is made once.

    Attributes:
        roots: what ways begin at, by name.
    """

    def __init__(self, roots: dict[str, Any]):
        self.roots = roots
        self._passed: dict[Path, Any] = {}

    def end(self, path: Path) -> Any:
        """What is at the end of a way; LEFT_OUT if user code runs on it, GONE if an item on it is not stored."""
        return self._step(path, is_last=True, is_code=False)

    def end_of_code(self, path: Path) -> Any:
        """The same for a function or class; LEFT_OUT also if it is a method of a class."""
        return self._step(path, is_last=True, is_code=True)

    def _step(self, path: Path, *, is_last: bool, is_code: bool) -> Any:
        if len(path) == 1:
            return self.roots[path[0][0]]
        before = path[:-1]
        if before not in self._passed:
            self._passed[before] = self._step(before, is_last=False, is_code=False)
        value, (step, key) = self._passed[before], path[-1]
        if value is LEFT_OUT or value is GONE:
            return value
        return _item(value, key) if step == "item" else _attribute(value, key, len(path), is_last=is_last, is_code=is_code)


def _item(value: Any, key: Any) -> Any:
    if not isinstance(value, (dict, list, deque)) and type(value) is not tuple:
        return LEFT_OUT
    try:
        return stored.item(value, key_itself(key))
    except (KeyError, IndexError, TypeError):  # the last: a key of a dict, where a list or tuple is now
        return GONE


def _attribute(value: Any, key: str, length: int, *, is_last: bool, is_code: bool) -> Any:
    """An attribute; its way has `length` steps with the root."""
    if (
        (key == "__dict__" and not is_last and isinstance(value, torch.nn.Module))
        or (key == "__func__" and is_last)
        or (length > 2 and isinstance(value, FunctionType) and is_of_others(value.__globals__))
    ):
        return LEFT_OUT  # what is read of a __dict__ has a shorter way; code that others wrote stays as it is
    if key not in getattr(value, "__dict__", ()) and not key.startswith("__"):
        found = in_classes(type(value).__mro__, key, None)
        if hasattr(type(found), "__get__") and (not isinstance(found, _METHODS) or (is_code and is_last)):
            return LEFT_OUT  # a property, which runs code; or a method
    try:
        return getattr(value, key)
    except Exception:  # noqa: BLE001 - user code
        return LEFT_OUT


def is_of_others(names: dict[str, Any]) -> bool:
    """Whether the globals of a function are those of a library."""
    return names.get("__name__", "").partition(".")[0] in _OF_OTHERS or is_installed(names.get("__file__"))
