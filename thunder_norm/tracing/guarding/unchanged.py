"""What modules hold, checked again only where one of them holds something else: Python counts what is put into a dict.

A module of 16 layers has some 500 conditions (hooks, flags, sizes), nearly all of the dicts of its modules.  Each dict has a version, another
one whenever anything in it is set or deleted; where the versions are those of a call in which all conditions held, they hold.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.guards import dict_version

from thunder_norm.tracing.guarding.classes import MISSING, in_classes
from thunder_norm.tracing.guarding.ways import Path, Ways

FEWEST = 3  # modules: the conditions of two are asked in the time that it takes to ask for versions

UNCHANGED = "_thunder_norm_unchanged"  # of a check that asks an `Unchanged`

_MOST_CHANGES = 16  # in a row: a program that sets an attribute in each call is asked for its conditions alone
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: an object of such a class may get another class
_dict_of = attrgetter("__dict__")


class _Object:
    """Like any other."""


@functools.cache
def are_attributes_counted() -> bool:
    """Whether the ``__dict__`` of an object has another version when an attribute is set: from Python 3.13 on it hears nothing of it."""
    tried = _Object()
    tried.attribute = 0  # type: ignore[attr-defined]
    before = dict_version(tried.__dict__)
    tried.attribute = 1  # type: ignore[attr-defined]
    return dict_version(tried.__dict__) != before


class Holders(NamedTuple):
    """What conditions are of.

    Attributes:
        modules: modules, whose ``__dict__`` and class decide.
        dicts: other dicts.
        empty: dicts that have to be empty.
    """

    modules: tuple[torch.nn.Module, ...]
    dicts: tuple[dict, ...]
    empty: tuple[dict, ...]


class _Held(NamedTuple):
    """Holders, as they were when all conditions held."""

    modules: tuple[torch.nn.Module, ...]
    classes: tuple[type, ...]
    versions: tuple[int, ...]
    dicts: tuple[dict, ...]
    versions_of_dicts: tuple[int, ...]
    empty: tuple[dict, ...]

    @staticmethod
    def of(found: Holders) -> _Held:
        modules, dicts, empty = found
        versions = tuple(map(dict_version, map(_dict_of, modules)))
        return _Held(modules, tuple(map(type, modules)), versions, dicts, tuple(map(dict_version, dicts)), empty)

    def stays(self) -> bool:
        modules, classes, versions, dicts, versions_of_dicts, empty = self
        return (
            tuple(map(dict_version, map(_dict_of, modules))) == versions
            and tuple(map(type, modules)) == classes
            and tuple(map(dict_version, dicts)) == versions_of_dicts
            and not any(empty)
        )


class Unchanged:
    """Conditions of what modules hold, as a function that raises if one does not hold.

    Attributes:
        held: another object whenever something has changed; None if that is not known.
    """

    def __init__(self, read: Callable[[], tuple[tuple, tuple, tuple]], check: Callable[[], None]):
        """Of two functions.

        Args:
            read: gives what the conditions are of.
            check: asks all of them, and raises.
        """
        self._read, self._check = read, check
        self.held: _Held | None = None
        self._changes = 0

    def __call__(self) -> None:
        """Raise what `check` raises."""
        held = self.held
        if held is not None and held.stays():
            self._changes = 0
            return
        self.held = None
        if self._changes > _MOST_CHANGES:
            self._check()
            return
        self._changes += 1
        now = _Held.of(Holders(*self._read()))  # before it is asked: meanwhile another thread may set something
        self._check()
        self.held = now

    def holds(self, module: Any) -> bool:
        """Whether the ``__dict__`` and the class of a module are watched."""
        return self.held is not None and any(m is module for m in self.held.modules)


class Decided:
    """Which conditions of a program are decided by what its modules hold.

    Attributes:
        modules: ways to modules that decide.
        of_classes: attributes that no module has itself, and its class has: by class and name.
    """

    def __init__(self, ways: Ways):
        self._ways = ways
        self.modules: dict[Path, None] = {}
        self._dicts: dict[Path, None] = {}
        self._empty: dict[Path, None] = {}
        self._are_modules: dict[Path, bool] = {}
        self.of_classes: dict[tuple[type, str], Any] = {}

    def takes(self, path: Path, kind: str, expected: Any) -> bool:
        """Whether a condition is one of them, which is noted."""
        value = self._ways.end(path)
        if self._is_module(path):
            taken = kind in ("type", "is", "is none", "not own")
            return taken and self._note_module(path)
        if len(path) < 2 or path[-1][0] != "attribute" or not self._is_module(path[:-1]):
            return False
        owner, key = self._ways.end(path[:-1]), path[-1][1]
        if not is_of_instance(owner, key):
            return kind == "is" and self._note_of_class(type(owner), key, path, expected)
        if kind in ("keys", "length") and type(value) is dict:
            self._dicts[path] = None
        elif kind == "no keys" and type(value) in (dict, OrderedDict):
            self._empty[path] = None
        elif kind not in ("is", "is none") and not (kind == "type" and not type(value).__flags__ & _HEAP_TYPE):
            return False
        return self._note_module(path[:-1])

    def holders(self) -> tuple[dict[Path, None], ...]:
        """Ways to what decides, in the order of `Holders`."""
        return self.modules, self._dicts, self._empty

    def _is_module(self, path: Path) -> bool:
        """Whether a way goes from module to module, from the jitted one on."""
        found = self._are_modules.get(path)
        if found is None:
            found = self._are_modules[path] = self._goes_by_modules(path)
        return found

    def _goes_by_modules(self, path: Path) -> bool:
        if path[0][0] != "fn" or not is_plain_module(self._ways.end(path)):
            return False
        if len(path) == 1:
            return True
        step, key = path[-1]
        to_modules = path[:-1]
        return (
            step == "item"
            and type(key) is str
            and len(path) > 2
            and to_modules[-1] == ("attribute", "_modules")
            and type(self._ways.end(to_modules)) is dict
            and self._is_module(to_modules[:-1])
        )

    def _note_module(self, path: Path) -> bool:
        while path not in self.modules:
            self.modules[path] = None
            if len(path) > 1:
                self._dicts[path[:-1]] = None
                path = path[:-2]
        return True

    def _note_of_class(self, cls: type, key: str, path: Path, expected: Any) -> bool:
        found = in_classes(cls.__mro__, key)
        if found is MISSING or found is not expected or hasattr(type(found), "__get__") or type(cls) is not type:
            return False
        if key in vars(self._ways.end(path[:-1])):
            return False
        self.of_classes[cls, key] = expected
        return self._note_module(path[:-1])


def is_plain_module(value: Any) -> bool:
    """Whether this is a module whose attributes are read as Python reads them."""
    return isinstance(value, torch.nn.Module) and type(value).__getattribute__ is object.__getattribute__


def is_of_instance(owner: Any, key: str) -> bool:
    """Whether an attribute of a module stands in its ``__dict__`` and nowhere else: reading it there is three times as fast."""
    return is_plain_module(owner) and key in vars(owner) and not hasattr(type(owner), key)
