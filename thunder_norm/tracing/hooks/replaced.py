"""Putting our functions in the place of Thunder's: once, with the first use of a transform of ours."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from thunder_norm.errors import VersionError
from thunder.core import interpreter


@dataclass
class Replaced:
    """The global `name` of a module of Thunder's, or a method of a class, which `function` stands in for.

    Attributes:
        module: Thunder's module, or class.
        name: of the global.
        takes: the parameters of Thunder's own function.
        lines: the upstream lines that call it, as we need it (lightning-thunder 0.2.6).
        original: Thunder's own function.
        function: ours.
    """

    module: ModuleType | type
    name: str
    takes: tuple[str, ...]
    lines: str
    original: Callable
    function: Callable

    @property
    def place(self) -> str:
        """Where it is, in words: the module, then the name in it."""
        if isinstance(self.module, type):
            return f"{self.module.__module__} {self.module.__qualname__}.{self.name}"
        return f"{self.module.__name__} {self.name}"


REPLACED: list[Replaced] = []


def replaces(module: ModuleType | type, name: str, *takes: str, lines: str) -> Callable[[Callable], Callable]:
    """Have the decorated function stand in for a global of Thunder's from the first use on; see `Replaced`."""

    def enter(function: Callable) -> Callable:
        REPLACED.append(Replaced(module, name, takes, lines, getattr(module, name), function))
        return function

    return enter


def check_patch_points() -> None:
    """Verify that the installed Thunder has the globals we replace, with the signatures we rely on.

    Raises:
        VersionError: it does not.
    """
    for r in REPLACED:
        found = tuple(inspect.signature(r.original).parameters)
        if found != r.takes:
            raise VersionError(f"{r.place}, of {r.lines}, takes {found}, expected {r.takes}")


def install() -> None:
    """Put the functions in place, once; a compilation that is under way asks them from here on."""
    if getattr(REPLACED[0].module, REPLACED[0].name) is REPLACED[0].function:
        return
    check_patch_points()
    under_way = interpreter.get_interpretercompilectx_if_available()
    for r in REPLACED:
        setattr(r.module, r.name, r.function)
        if under_way is not None and under_way._fn_lookaside is r.original:
            under_way._fn_lookaside = r.function


_install_natively = interpreter.make_opaque(install)  # Thunder's interpreter runs it as it is


def first_use(function: Callable) -> Callable:
    """Have a call of `function` put the hooks in place first, also where Thunder's interpreter makes the call."""

    @functools.wraps(function)
    def use(*args: Any, **kwargs: Any) -> Any:
        _install_natively()
        return function(*args, **kwargs)

    return use
