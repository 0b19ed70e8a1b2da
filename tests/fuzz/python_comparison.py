"""Whether what one program returned, raised or left behind is what another did: the same types, values, structure, and the same objects in the same places.

The two are of two modules of one text.  No method of the program's own is asked.
"""

from __future__ import annotations

import collections
import enum
import functools
import re
import types
from collections.abc import Iterator
from typing import Any

import torch

_ADDRESS = re.compile(r"0x[0-9a-f]+|structured_\d+|torch\.float\d+")
_PLAIN = (int, float, complex, str, bytes, type(None), type(...), type(NotImplemented))
_WITHOUT_IDENTITY = (*_PLAIN, tuple, frozenset, types.FunctionType, types.BuiltinFunctionType, types.MethodType, range, slice)


class Difference(Exception):
    """Where two values differ, and in what."""


def differing(found: Any, expected: Any, place: str = "") -> None:
    """Compare two values.

    Raises:
        Difference: they are not the same.
    """
    _Comparison().compare(found, expected, place)


def state_of(scope: dict[str, Any]) -> dict[str, Any]:
    """What the variables of a module hold, of its classes and functions their own."""
    held = {k: v for k, v in scope.items() if not k.startswith("__") and not isinstance(v, types.ModuleType)}
    return {k: _of_definition(v) if isinstance(v, type | types.FunctionType) else v for k, v in held.items()}


def _of_definition(made: Any) -> Any:
    own = {k: v for k, v in vars(made).items() if not (k.startswith("_") or callable(v) or hasattr(v, "__get__"))}
    return (own, made.__defaults__, made.__kwdefaults__) if isinstance(made, types.FunctionType) else own


class _Comparison:
    def __init__(self):
        self.of_found: dict[int, Any] = {}
        self.of_expected: dict[int, Any] = {}

    def compare(self, found: Any, expected: Any, place: str) -> None:
        if type(found).__name__ != type(expected).__name__ or (
            type(found).__module__ != type(expected).__module__ and "structured_" not in type(found).__module__
        ):
            raise Difference(f"{place}: {_shown(found)}, not {_shown(expected)}")
        if not isinstance(expected, _WITHOUT_IDENTITY):
            before = self.of_found.get(id(found)), self.of_expected.get(id(expected))
            if before != (None, None):
                if before[0] is None or before[1] is None or before[0][1] is not expected or before[1][1] is not found:
                    raise Difference(f"{place}: another object, {_shown(found)} at {[b and b[2] for b in before]}")
                return
            self.of_found[id(found)] = (found, expected, place)
            self.of_expected[id(expected)] = (expected, found, place)
        if isinstance(expected, torch.Tensor):
            return self._tensors(found, expected, place)
        for name, a, b in _parts(found, expected, place):
            self.compare(a, b, f"{place}{name}")

    def _tensors(self, found: torch.Tensor, expected: torch.Tensor, place: str) -> None:
        a, b = found.detach(), expected.detach()
        is_same = (a.shape, a.dtype) == (b.shape, b.dtype) and torch.allclose(a, b, equal_nan=True)
        if not is_same:
            raise Difference(f"{place}: {a.dtype} {a.tolist()}, not {b.dtype} {b.tolist()}")


def _parts(found: Any, expected: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """What is in both, in pairs; raises what they differ in otherwise."""

    def same(a: Any, b: Any) -> None:
        if not (a == b or (a != a and b != b)):
            raise Difference(f"{place}: {_shown(found)}, not {_shown(expected)}")

    if isinstance(expected, type):
        return same(found.__qualname__, expected.__qualname__)
    if isinstance(expected, enum.Enum):
        return same(found.name, expected.name)
    if isinstance(expected, BaseException):
        same(_plain(str(found)), _plain(str(expected)))
        for name in ("args", "__notes__", "__cause__", "__dict__"):
            yield f".{name}", getattr(found, name, None), getattr(expected, name, None)
        return
    kind = next((k for k in _BASES if isinstance(expected, k)), None)
    if kind in _PLAIN:
        same(_plain(kind.__str__(found)), _plain(kind.__str__(expected)))
    elif kind is types.FunctionType:
        same(found.__qualname__, expected.__qualname__)
        yield from ((f".{n}", getattr(found, n), getattr(expected, n)) for n in ("__defaults__", "__kwdefaults__", "__dict__"))
        yield ".__closure__", _contents(found), _contents(expected)
    elif kind is types.MethodType:
        yield ".__func__", found.__func__, expected.__func__
        yield ".__self__", found.__self__, expected.__self__
    elif kind is functools.partial:
        yield ".func", (found.func, found.args, found.keywords), (expected.func, expected.args, expected.keywords)
    elif kind in (set, frozenset):
        same(sorted(map(_key, kind.__iter__(found))), sorted(map(_key, kind.__iter__(expected))))
    elif kind in (collections.OrderedDict, dict, types.MappingProxyType):
        pairs = [list(kind.items(v)) for v in (found, expected)]
        same(len(pairs[0]), len(pairs[1]))
        for (a, p), (b, q) in zip(*pairs, strict=True):
            yield ".key", a, b
            yield f"[{_shown(b)}]", p, q
    elif kind in (list, tuple, collections.deque):
        pairs = [list(kind.__iter__(v)) for v in (found, expected)]
        same(len(pairs[0]), len(pairs[1]))
        yield from ((f"[{n}]", a, b) for n, (a, b) in enumerate(zip(*pairs, strict=True)))
    elif kind is slice:
        yield ".ends", (found.start, found.stop, found.step), (expected.start, expected.stop, expected.step)
    elif kind is not None:
        same(_plain(repr(found)), _plain(repr(expected)))
    for name in ("__dict__", *_slots(expected)):
        a, b = (_own(v, name) for v in (found, expected))
        if isinstance(b, dict) and kind is not types.FunctionType or name != "__dict__":
            yield f".{name}", a, b


_BASES = (
    *(
        int,
        float,
        complex,
        str,
        bytes,
        type(None),
        list,
        tuple,
        collections.OrderedDict,
        dict,
        set,
        frozenset,
        collections.deque,
        slice,
        functools.partial,
    ),
    *(types.FunctionType, types.MethodType, types.MappingProxyType, bytearray, range, torch.dtype, torch.device),
)


def _own(obj: Any, name: str) -> Any:
    try:
        return object.__getattribute__(obj, name)
    except AttributeError:
        return None


def _slots(obj: Any) -> list[str]:
    found = [vars(kind).get("__slots__", ()) for kind in type(obj).__mro__ if "structured_" in kind.__module__]
    return [name for names in found for name in ((names,) if isinstance(names, str) else names) if name != "__dict__"]


def _contents(f: types.FunctionType) -> list[Any]:
    found = []
    for cell in f.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append("empty")
    return found


def _key(value: Any) -> str:
    return f"{type(value).__name__} {value!r}" if isinstance(value, _PLAIN) else type(value).__name__


def _plain(text: str) -> str:
    return _ADDRESS.sub("", text)


def _shown(value: Any) -> str:
    try:
        return _plain(f"{value!r} of {type(value).__name__}")[:120]
    except BaseException:  # noqa: BLE001 - the program's own
        return f"an object of {type(value).__name__}"
