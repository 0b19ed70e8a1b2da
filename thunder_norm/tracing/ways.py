"""Ways from the arguments and the jitted function to what a program looks at, by attributes and items."""

from __future__ import annotations

import inspect
import sys
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch

from thunder.core.interpreter import ProvenanceRecord, PseudoInst

Path = tuple[tuple[str, Any], ...]

LEFT_OUT = object()
_METHODS = (FunctionType, classmethod, staticmethod, GetSetDescriptorType, MemberDescriptorType)
# whose globals are as they are
_OF_OTHERS = frozenset({"thunder_norm", *sys.stdlib_module_names} - {"__main__"})


_ROOTS = {PseudoInst.INPUT_ARGS: "args", PseudoInst.INPUT_KWARGS: "kwargs", PseudoInst.INPUT_FN: "fn"}
_STEPS = {PseudoInst.LOAD_ATTR: "attribute", PseudoInst.BINARY_SUBSCR: "item"}


def path_of(record: ProvenanceRecord) -> Path | None:
    """The way to a value, by what Thunder's interpreter knows of where it comes from; None if the program made it."""
    root = _ROOTS.get(record.inst) if isinstance(record.inst, PseudoInst) else None
    if root is not None:
        return ((root, None),)
    step = _STEPS.get(record.inst) if isinstance(record.inst, PseudoInst) else None
    if step is None or len(record.inputs) != 2 or record.inputs[1].inst is not PseudoInst.CONSTANT:
        return None
    key, before = record.inputs[1].value, path_of(record.inputs[0])
    return None if before is None or type(key) not in (str, int) else (*before, (step, key))


class Ways:
    """The ends of ways, as things stand now; each step is made once.

    Attributes:
        roots: what ways begin at, by name.
    """

    def __init__(self, roots: dict[str, Any]):
        self.roots = roots
        self._passed: dict[Path, Any] = {}

    def end(self, path: Path) -> Any:
        """What is at the end of a way; LEFT_OUT if user code runs on it."""
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
        if value is LEFT_OUT:
            return LEFT_OUT
        return _item(value, key) if step == "item" else _attribute(value, key, len(path), is_last=is_last, is_code=is_code)


def _item(value: Any, key: Any) -> Any:
    if not isinstance(value, (dict, list)) and type(value) is not tuple:
        return LEFT_OUT
    try:
        return value[key]
    except (KeyError, IndexError):
        return LEFT_OUT


def _attribute(value: Any, key: str, length: int, *, is_last: bool, is_code: bool) -> Any:
    """An attribute; its way has `length` steps with the root."""
    if (
        (key == "__dict__" and isinstance(value, torch.nn.Module))
        or (key == "__func__" and is_last)
        or (length > 2 and isinstance(value, FunctionType) and is_of_others(value.__globals__))
    ):
        return LEFT_OUT  # what is read of a __dict__ has a shorter way; code that others wrote stays as it is
    found = inspect.getattr_static(type(value), key, None)
    is_of_class = key not in getattr(value, "__dict__", ()) and not key.startswith("__") and hasattr(type(found), "__get__")
    if is_of_class and (not isinstance(found, _METHODS) or (is_code and is_last)):
        return LEFT_OUT  # a property, which runs code; or a method
    try:
        return getattr(value, key)
    except Exception:  # noqa: BLE001 - user code
        return LEFT_OUT


def is_of_others(names: dict[str, Any]) -> bool:
    """Whether the globals of a function are those of a library."""
    file = names.get("__file__") or ""
    return names.get("__name__", "").partition(".")[0] in _OF_OTHERS or "site-packages" in file
