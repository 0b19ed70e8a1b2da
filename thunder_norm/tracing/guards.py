"""Guards of what a program asks of its surroundings and Thunder does not guard.

Thunder checks the tensors, numbers and strings that a program read before it runs its trace again.  It does not check that what was
None is None, how long a list is, which keys a dict has, which function, class, dtype, generator or member of an enum stands somewhere,
whether an attribute is there, or that one list stands at two places, of which it reads only one: a call with another mask, a longer list or
another activation silently ran the trace of the earlier call.

What is looked at is noted while the trace is acquired, with the way to it from the arguments and the jitted function; one operation of
the prologue looks at all of it again.  What the program itself has changed meanwhile is left out.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from thunder_norm.tracing.replacement import Replacement, Replacements
from thunder_norm.tracing.standard_library import is_known
from thunder_norm.tracing.ways import LEFT_OUT, Path, Ways
from thunder.core import interpreter as thunders
from thunder.core import jit_ext
from thunder.core.interpreter import INTERPRETER_CALLBACKS, InterpreterStack, ProvenanceRecord, PseudoInst, WrappedValue
from thunder.core.trace import get_tracectx

_ROOTS = {PseudoInst.INPUT_ARGS: "args", PseudoInst.INPUT_KWARGS: "kwargs", PseudoInst.INPUT_FN: "fn"}
_STEPS = {PseudoInst.LOAD_ATTR: "attribute", PseudoInst.BINARY_SUBSCR: "item"}
_OPAQUE = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
_IDENTICAL = (type(None), type, torch.dtype, enum.Enum, FunctionType, BuiltinFunctionType, torch.Generator)
_GUARDED_BY_THUNDER = (
    torch.Tensor,
    torch.nn.Module,
    int,
    float,
    complex,
    str,
    slice,
    torch.device,
    MethodType,
    ModuleType,
    *_OPAQUE,
)
_CONTAINERS = (list, tuple, dict, collections.OrderedDict)
# functions in C that Thunder's own helpers give containers to, and that do not look at what is in them
_LOOK_INTO_NOTHING = frozenset(
    {
        object.__init__,
        hasattr,
        *(kind.__get__ for kind in (FunctionType, MethodDescriptorType, WrapperDescriptorType)),
        *(kind.__get__ for kind in (GetSetDescriptorType, MemberDescriptorType)),
    }
)
# what it is is guarded wherever it stands
_STAND_ANYWHERE = (*_IDENTICAL, *_GUARDED_BY_THUNDER, bytes, CodeType, CellType)
_MOST_KEYS = 256


@dataclass
class Guards:
    """What one acquisition has looked at: for each way, what was there, and which ways led to one object (in order, as keys)."""

    roots: dict[str, Any]
    conditions: dict[tuple[Path, str, Any], Any] = field(default_factory=dict)
    meetings: dict[tuple[Path, Path], None] = field(default_factory=dict)


_current: contextvars.ContextVar[Guards | None] = contextvars.ContextVar("thunder_norm_guards", default=None)


@contextmanager
def noted(fn: Callable, args: tuple, kwargs: dict) -> Iterator[None]:
    """Note what the jitted function looks at meanwhile."""
    token = _current.set(Guards({"fn": fn, "args": args, "kwargs": kwargs}))
    try:
        with REPLACEMENTS.in_place():
            yield
    finally:
        _current.reset(token)


# -- noting -------------------------------------------------------------------------------------------------------------------


def _path(record: ProvenanceRecord) -> Path | None:
    root = _ROOTS.get(record.inst) if isinstance(record.inst, PseudoInst) else None
    if root is not None:
        return ((root, None),)
    step = _STEPS.get(record.inst) if isinstance(record.inst, PseudoInst) else None
    if step is None or len(record.inputs) != 2 or record.inputs[1].inst is not PseudoInst.CONSTANT:
        return None
    key, before = record.inputs[1].value, _path(record.inputs[0])
    return None if before is None or type(key) not in (str, int) else (*before, (step, key))


def note(wrapped: WrappedValue, kind: str, detail: Any, expected: Any) -> None:
    """Have later calls check a condition on a value that the program reads, one of `_CONDITIONS`."""
    guards = _current.get()
    if guards is not None:
        path = _path(wrapped.provenance)
        if path is not None:
            guards.conditions.setdefault((path, kind, detail), expected)


def _wrap_callback(wrapped: WrappedValue) -> Any:
    value = wrapped.value
    result = _original_wrap_callback(wrapped)  # it writes m.__dict__["a"] as m.a
    if isinstance(value, _IDENTICAL):
        note(wrapped, "is", None, value)
    elif isinstance(value, torch.nn.Module):
        note(wrapped, "type", None, type(value))
    elif isinstance(value, MethodType) and isinstance(value.__self__, torch.nn.Module):
        _note_method(wrapped, value)
    elif not isinstance(value, _GUARDED_BY_THUNDER):
        path = _path(wrapped.provenance)
        if path is not None and path[0][0] != "fn":  # of its own surroundings a program knows the types
            note(wrapped, "type", None, type(value))
    return result


def is_guarded(wrapped: WrappedValue) -> bool:
    """Whether there is a way to a value from the arguments or the jitted function: the program did not make it itself."""
    return _path(wrapped.provenance) is not None


def _note_method(wrapped: WrappedValue, method: MethodType) -> None:
    """A module's method is its class's; one that is given to the object itself later goes before it."""
    path, guards = _path(wrapped.provenance), _current.get()
    if guards is not None and path is not None and path[-1][0] == "attribute":
        name = path[-1][1]
        is_everybodys = method.__func__ is getattr(torch.nn.Module, name, None)
        if not is_everybodys and name not in vars(method.__self__):
            guards.conditions.setdefault((path[:-1], "not own", name), None)


def _wrap(value: Any, /, *, provenance: ProvenanceRecord) -> WrappedValue:
    """Note where one object stands at two places: the program would look at only one of them."""
    found = _original_wrap(value, provenance=provenance)
    if found is not value and found.provenance is not provenance and not isinstance(value, _STAND_ANYWHERE):
        guards = _current.get()
        path, other = _path(provenance), _path(found.provenance)
        if guards is not None and path is not None and other is not None and path != other:
            if isinstance(value, _CONTAINERS) or "fn" not in (path[0][0], other[0][0]) or path[0] != other[0]:
                guards.meetings[path, other] = None
    return found


def _populate_item_wrappers(obj: WrappedValue) -> None:
    if not obj.has_item_tracking and type(obj.value) in _CONTAINERS:
        if not isinstance(obj.value, dict):
            note(obj, "length", None, (type(obj.value), len(obj.value)))
        elif not obj.value:
            note(obj, "no keys", None, type(obj.value))
        elif len(obj.value) <= _MOST_KEYS:
            note(obj, "keys", None, (type(obj.value), tuple(obj.value)))
    _original_populate(obj)


def _compare_op(inst: Any, /, stack: InterpreterStack, **state: Any) -> Any:
    look_into((stack.getitem_wrapped(-1), stack.getitem_wrapped(-2)))
    return _original_compare_op(inst, stack=stack, **state)


def look_into(args: tuple[Any, ...]) -> None:
    """Guard all that is in the containers among some values, which are given to something that looks at it natively."""
    for a in args:
        if isinstance(a, WrappedValue) and type(a.value) in _CONTAINERS and _path(a.provenance) is not None:
            a.track_items()
            look_into(tuple(a.item_wrappers.values() if isinstance(a.item_wrappers, dict) else a.item_wrappers))


def note_call(fn: Callable, args: tuple[WrappedValue, ...]) -> None:
    """Note what a call that is interpreted looks at: whether attributes and keys are there, and what functions in C are given."""
    if (fn is hasattr or (fn is getattr and len(args) == 3)) and type(args[1].value) is str:
        obj = args[0].value
        is_special = thunders.DUNDER_PATTERN.match(args[1].value)  # the interpreter itself asks for those
        if not is_special and not isinstance(obj, (torch.Tensor, jit_ext.Proxy)) and _path(args[0].provenance) is not None:
            note(args[0], "has", args[1].value, hasattr(obj, args[1].value))
    elif fn is dict.get and len(args) >= 2 and type(args[0].value) is dict and type(args[1].value) in (str, int):
        note(args[0], "contains", args[1].value, args[1].value in args[0].value)
    elif isinstance(fn, _OPAQUE) and any(type(a.value) in _CONTAINERS for a in args):
        if not _looks_into_nothing(fn) and not is_known(fn):
            look_into(args)


def _looks_into_nothing(fn: Callable) -> bool:
    try:
        return fn in _LOOK_INTO_NOTHING
    except TypeError:  # a method of what is not hashable
        return False


# -- checking -----------------------------------------------------------------------------------------------------------------


def add(ctx: Any, bind: Callable[[Callable[[tuple, dict], None]], Callable]) -> None:
    """Have the prologue check what was noted; `bind` makes a function that writes such a check."""
    guards = _current.get()
    if guards is None:
        return
    ways = Ways(guards.roots)
    check = _compiled(ways, _kept(guards, ways), _still_meeting(guards, ways))
    if check is None:
        return
    check_in_prologue(ctx, bind(check))


def check_in_prologue(ctx: Any, check: Callable) -> None:
    """Have the prologue of the trace that is being acquired call what ``check(args, kwargs, output=None)`` writes."""

    def emit() -> None:
        prologue = get_tracectx()
        given, by_name = (b.output for b in prologue.bound_symbols if b.sym.name == "unpack_trivial")
        prologue.bound_symbols.append(check(given, by_name, output=None))

    ctx.add_constraint((emit,))


def _kept(guards: Guards, ways: Ways) -> list[tuple[Path, str, Any, Any]]:
    """The conditions that hold after the acquisition too, and are of what may change."""
    kept = []
    for (path, kind, detail), expected in guards.conditions.items():
        is_code = kind == "is" and not isinstance(expected, (type(None), torch.dtype, enum.Enum))
        found = ways.end_of_code(path) if is_code else ways.end(path)
        if found is not LEFT_OUT and _holds(found, kind, detail, expected):
            kept.append((path, kind, detail, expected))
    return kept


def _still_meeting(guards: Guards, ways: Ways) -> list[tuple[Path, Path]]:
    """The ways that lead to one object after the acquisition too."""
    found = [(pair, [ways.end(path) for path in pair]) for pair in guards.meetings]
    return [pair for pair, (one, other) in found if one is other and one is not LEFT_OUT]


# What is checked, of a value, what was noted of it, and an attribute or key.
_CONDITIONS = {
    "is": "{value} is {expected}",
    "type": "type({value}) is {expected}",
    "length": "type({value}) is {expected}[0] and len({value}) == {expected}[1]",
    "keys": "type({value}) is {expected}[0] and tuple({value}) == {expected}[1]",
    "no keys": "type({value}) is {expected} and not {value}",
    "contains": "({detail!r} in {value}) is {expected}",
    "own item": "dict.__getitem__({value}, {detail!r}) == {expected}",
    "not own": "{detail!r} not in {value}.__dict__",
    "has": "hasattr({value}, {detail!r}) is {expected}",
}


@functools.cache
def _code(kind: str, detail: Any) -> CodeType:
    return compile(_CONDITIONS[kind].format(value="value", expected="expected", detail=detail), "<condition>", "eval")


def _holds(value: Any, kind: str, detail: Any, expected: Any) -> bool:
    return eval(_code(kind, detail), {"value": value, "expected": expected})  # noqa: S307 - of names and literals alone


def _compiled(
    ways: Ways, conditions: list[tuple[Path, str, Any, Any]], meetings: list[tuple[Path, Path]]
) -> Callable[[tuple, dict], None] | None:
    """A function that raises a GuardError if a condition does not hold, or two ways lead to two objects."""
    if not conditions and not meetings:
        return None
    names: dict[Path, str] = {}
    constants: dict[str, Any] = {"fn": ways.roots["fn"], "_GuardError": GuardError}
    lines: list[str] = []

    def place(path: Path) -> str:
        if len(path) == 1:
            return path[0][0]
        if path not in names:
            before, (step, key) = place(path[:-1]), path[-1]
            if step == "attribute" and _is_of_instance(ways.end(path[:-1]), key):
                before, step = entries(path[:-1], before), "item"
            names[path] = name = f"v{len(names)}"
            lines.append(f"{name} = {before}[{key!r}]" if step == "item" else f"{name} = {_attribute(before, key)}")
        return names[path]

    def entries(path: Path, owner: str) -> str:
        of_owner = (*path, ("attribute", "__dict__"))
        if of_owner not in names:
            names[of_owner] = f"v{len(names)}"
            lines.append(f"{names[of_owner]} = {owner}.__dict__")
        return names[of_owner]

    for path, kind, detail, expected in conditions:
        value, constant = place(path), f"c{len(constants)}"
        constants[constant] = expected
        condition = _CONDITIONS[kind].format(value=value, expected=constant, detail=detail)
        lines.append(f"if not ({condition}): raise _GuardError({_described(path)!r})")
    for path, other in meetings:
        lines.append(f"if {place(path)} is not {place(other)}: raise _GuardError({_described(path)!r})")
    source = "def check(args, kwargs):\n" + "".join(f"    {line}\n" for line in lines)
    exec(compile(source, "<guards of thunder_norm>", "exec"), constants)  # noqa: S102 - of names and literals alone
    return constants["check"]


def _is_of_instance(owner: Any, key: str) -> bool:
    """Whether an attribute of a module stands in its ``__dict__`` and nowhere else: reading it there is three times as fast."""
    cls = type(owner)
    return (
        isinstance(owner, torch.nn.Module)
        and cls.__getattribute__ is object.__getattribute__
        and key in vars(owner)
        and not hasattr(cls, key)
    )


def _attribute(value: str, key: str) -> str:
    return f"{value}.{key}" if key.isidentifier() and not key.startswith("__") else f"getattr({value}, {key!r})"


def _described(path: Path) -> str:
    parts = [f"[{key!r}]" if step == "item" else f".{key}" for step, key in path[1:]]
    return f"{path[0][0]}{''.join(parts)} is not what it was when the trace was acquired"


class GuardError(Exception):
    """What the program runs with is other than what its trace was acquired with: another trace is needed."""


_handlers = thunders._default_opcode_handler_map
_original_wrap_callback = jit_ext._general_jit_wrap_callback
_original_populate = thunders.populate_item_wrappers
_original_wrap = thunders.wrap
_original_compare_op = _handlers["COMPARE_OP"]

REPLACEMENTS = Replacements(
    (
        Replacement(
            jit_ext.general_jit_callbacks, INTERPRETER_CALLBACKS.WRAP_CALLBACK, _wrap_callback, "_general_jit_wrap_callback"
        ),
        Replacement(
            thunders, "populate_item_wrappers", _populate_item_wrappers, "populate_item_wrappers, which looks into a container"
        ),
        Replacement(thunders, "wrap", _wrap, "wrap, which finds the wrapper of an object that it has seen elsewhere"),
        Replacement(_handlers, "COMPARE_OP", _compare_op, "_compare_op_handler, which compares values natively"),
    )
)
