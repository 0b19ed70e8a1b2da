"""What a program runs with and no way leads to from its arguments: code, attributes of classes, the state of the process.

``Module.forward = f``, ``f.__defaults__ = ...`` or ``torch.use_deterministic_algorithms(True)`` between two calls changes what the second one
does.  Each is noted once, however many objects have the class or call the function; what the standard library, torch or we have written is
taken to stay as it is, but for `forward`.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from thunder_norm.tracing.classes import in_classes
from thunder_norm.tracing.snapshots import same_as
from thunder_norm.tracing.ways import is_of_others
from thunder.core.interpreter import WrappedValue

_nothing = object()
_CODE = (FunctionType, property, staticmethod, classmethod)
_LIBRARIES = frozenset({"thunder_norm", "thunder", "torch", *sys.stdlib_module_names} - {"__main__"})
_ENVIRONMENT = type(os.environ)
_READS = ("get_", "is_", "are_", "_get_", "_is_", "_are_")
# Thunder has its own guards of the first; the others say what a program is in the middle of.
_LEFT_OUT = ("is_grad_enabled", "get_default_dtype", "_is_tracing", "_is_any_autocast_enabled")
_STATE = frozenset(
    f
    for name, f in vars(torch._C).items()
    if isinstance(f, BuiltinFunctionType) and name.startswith(_READS) and name not in _LEFT_OUT and "torch_function" not in name
)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass
class Surroundings:
    """What one acquisition has met.

    Attributes:
        functions: each function that was interpreted, with its code and what its defaults were.
        attributes: each function, property or method that was looked up in a class, by class and name.
        states: what functions that read the state of the process said, by function and arguments.
    """

    functions: dict[int, tuple[weakref.ref, Any, Callable[[Any], bool]]] = field(default_factory=dict)
    attributes: dict[tuple[type, str], Any] = field(default_factory=dict)
    states: dict[tuple[Callable, tuple], Any] = field(default_factory=dict)

    def note_function(self, function: FunctionType, args: tuple[Any, ...]) -> None:
        """Note a function that is about to be interpreted."""
        if function.__code__ is _ENVIRONMENT.__getitem__.__code__ and len(args) == 2 and type(_value(args[1])) is str:
            self.states.setdefault((os.environ.get, (_value(args[1]),)), os.environ.get(_value(args[1])))
        if id(function) not in self.functions and not is_of_others(function.__globals__):
            reference = weakref.ref(function)  # some are made by the program
            self.functions[id(function)] = reference, function.__code__, same_as(_defaults(function))

    def note_attribute(self, owner: type, name: str) -> None:
        """Note that `name` is looked up in a class, if it is code of a user's."""
        if (owner, name) in self.attributes:
            return
        found = in_classes(owner.__mro__, name, _nothing)
        if isinstance(found, _CODE) and (name == "forward" or not _is_of_library(owner, name)):
            self.attributes[owner, name] = found

    def note_call(self, function: Callable, args: tuple[WrappedValue, ...]) -> None:
        """Note a function that reads the state of the process."""
        if not isinstance(function, BuiltinFunctionType) or function not in _STATE:
            return
        given = tuple(a.value for a in args)
        if (function, given) not in self.states and all(isinstance(a, _PLAIN) for a in given):
            try:
                found = function(*given)
            except Exception:  # noqa: BLE001 - the program is about to meet it
                return
            if isinstance(found, _PLAIN):
                self.states[function, given] = found

    def conditions(self, names: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """What has to hold in later calls, as expressions, and what each is of; the names in them go into `names`."""

        def name(value: Any) -> str:
            found = f"s{len(names)}"
            names[found] = value
            return found

        for reference, code, are_same in self.functions.values():
            function = reference()
            if function is None or function.__code__ is not code or not are_same(_defaults(function)):
                continue
            # one that stands in a module or a class is kept; of one that was made by another, what it closes over would be
            is_local = "<locals>" in function.__qualname__
            read = f"(f := {name(reference)}()) is None or f" if is_local else name(function)
            what = f"{function.__qualname__} is"
            yield f"{read}.__code__ is {name(code)}", what
            if function.__defaults__ or function.__kwdefaults__:
                yield f"{name(are_same)}({name(_defaults)}({'f' if is_local else name(function)}))", f"the defaults of {what}"
        for (owner, key), found in self.attributes.items():
            if in_classes(owner.__mro__, key, _nothing) is found:
                yield _read(name(owner), key, found, name), f"{owner.__qualname__}.{key} is"
        for (function, given), found in self.states.items():
            if function(*given) == found:
                args = ", ".join(map(repr, given)) if all(isinstance(a, str | int) for a in given) else f"*{name(given)}"
                yield f"{name(function)}({args}) == {name(found)}", f"{getattr(function, '__name__', function)} is"


def _value(x: Any) -> Any:
    return x.value if isinstance(x, WrappedValue) else x


def _defaults(function: FunctionType | None) -> Any:
    return None if function is None else (function.__defaults__, function.__kwdefaults__)


def _is_of_library(owner: type, name: str) -> bool:
    base = next(b for b in owner.__mro__ if name in vars(b))
    return base.__module__.partition(".")[0] in _LIBRARIES


def _read(owner: str, key: str, found: Any, name: Callable[[Any], str]) -> str:
    """Whether a class has under `key` what it had: read as an attribute, which Python has a cache for."""
    if isinstance(found, classmethod):
        return f"getattr({owner}.{key}, '__func__', None) is {name(found.__func__)}"
    return f"{owner}.{key} is {name(found.__func__ if isinstance(found, staticmethod) else found)}"
