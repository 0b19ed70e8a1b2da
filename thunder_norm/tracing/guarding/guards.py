"""Guards of what a program asks of its surroundings and Thunder does not guard.

Thunder checks the tensors, numbers and strings that a program read before it runs its trace again.  It does not check that what was
None is None, how long a list is, which keys a dict has, which function, class, dtype, generator or member of an enum stands somewhere,
whether an attribute is there, or that one list stands at two places, of which it reads only one: a call with another mask, a longer list or
another activation silently ran the trace of the earlier call.

What is looked at is noted while the trace is acquired, with the way to it from the arguments and the jitted function; one operation of
the prologue looks at all of it again.  What the program itself has changed meanwhile is left out.
"""

from __future__ import annotations

import array
import bisect
import collections
import contextvars
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch

from thunder_norm.context_variables import setting
from thunder_norm.tracing import defaults
from thunder_norm.tracing.arguments import as_python_binds
from thunder_norm.tracing.compiled import given_to_compiler
from thunder_norm.tracing.guarding import overwritten, run_unseen, snapshots, stored
from thunder_norm.tracing.guarding.classes import MISSING, in_classes, is_answered_by_code
from thunder_norm.tracing.guarding.conditions import compiled, holds
from thunder_norm.tracing.guarding.looked_into import look_into
from thunder_norm.tracing.guarding.surroundings import ITERATORS, Surroundings
from thunder_norm.tracing.guarding.value_kinds import (
    EQUAL,
    GUARDED_BY_THUNDER,
    IDENTICAL,
    OPAQUE,
    SINGLE,
    STAND_ANYWHERE,
    ValueKinds,
)
from thunder_norm.tracing.guarding.ways import GONE, LEFT_OUT, Path, Ways, is_imported, is_of_call, path_of, roots_of
from thunder_norm.tracing.replacement import Replacement, Replacements
from thunder_norm.tracing.standard_library import is_known
from thunder.core import interpreter as thunders
from thunder.core import jit_ext
from thunder.core.interpreter import INTERPRETER_CALLBACKS, ProvenanceRecord, WrappedValue, interpreter_needs_wrap
from thunder.core.trace import get_tracectx

# So many traces of a program are kept for sizes and values that are asked for, before somebody is told.
MAX_TRACES = 16
CONTAINERS = (list, tuple, dict, collections.OrderedDict)
# functions in C that Thunder's own helpers give containers to, and that do not look at what is in them
_LOOK_INTO_NOTHING = frozenset(
    {
        object.__init__,
        hasattr,
        *(kind.__get__ for kind in (FunctionType, MethodDescriptorType, WrapperDescriptorType)),
        *(kind.__get__ for kind in (GetSetDescriptorType, MemberDescriptorType)),
    }
)
_BY_KEY = (dict.get, dict.__getitem__)
# what writes into what it is a method of
_CHANGING = frozenset(
    getattr(kind, name)
    for kind in (*CONTAINERS, set, collections.deque)
    for name in (
        *(
            "append appendleft extend extendleft insert sort reverse rotate update setdefault pop popleft popitem remove discard add".split()
        ),
        *("clear move_to_end __setitem__ __delitem__ __iadd__ __imul__ __ior__ __iand__ __isub__ __ixor__".split()),
    )
    if hasattr(kind, name)
)
_WITH_ITEMS = (list, dict, set, collections.deque)
_KEEPING = (SimpleNamespace.__init__, collections.defaultdict.__init__)  # what is given by name
_OPAQUE_NAMES = ("cython_function_or_method", "_lru_cache_wrapper")
_COMPARE = frozenset("__contains__ __getitem__ get pop index count remove discard".split())  # methods of containers
# what else hashes or compares what it is given first
_HASH = _COMPARE.union("__setitem__ __delitem__ setdefault add move_to_end fromkeys".split())
# what they ask of the objects that they are given
_ASKED = {
    **dict.fromkeys(_HASH, ("__eq__", "__hash__")),
    "join": ("__iter__", "__getitem__", "__len__"),
    **dict.fromkeys(("format", "__mod__"), ("__format__", "__str__", "__repr__", "__int__", "__float__", "__index__")),
}
# what iterates over what it is given, without the interpreter
_ITERATING = frozenset(
    {
        sum, set, frozenset, collections.deque, array.array, operator.countOf, operator.contains, operator.indexOf, operator.length_hint,
        *(v for v in vars(itertools).values() if isinstance(v, type)), itertools.chain.from_iterable, itertools.tee, bisect.bisect, bisect.bisect_left,
        *(v for kind in (set, frozenset, collections.deque) for v in vars(kind).values() if isinstance(v, MethodDescriptorType)),
    }
)  # fmt: skip
_OF_ITERABLES = ("__iter__", "__getitem__", "__len__", "__contains__")
_OF_VALUES = ("__eq__", "__hash__", "__lt__", "__gt__", "__le__", "__ge__", "__repr__", "__str__")
_OF_STATE = ("__reduce_ex__", "__repr__", "__str__", "repr", "dumps")  # of which some are of an object's attributes
_TENSOR_TYPE = type(torch.FloatTensor)
_NUMBERS = (int, float, complex, str, bytes)  # which of equal ones an object is nobody knows
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # which torch keeps of a module


@dataclass
class Guards:
    """What one acquisition has looked at: for each way, what was there, and of two ways whether they led to one object."""

    roots: dict[str, Any]
    surroundings: Surroundings
    conditions: dict[tuple[Path, str, Any], Any] = field(default_factory=dict)
    meetings: dict[tuple[Path, Path], bool] = field(default_factory=dict)
    written: dict[int, tuple[Path, Any]] = field(default_factory=dict)  # containers of the function that the program writes into
    numbers: Any = None  # see `changing_numbers`
    known_numbers: Callable[[Any], Any] | None = None


_current: contextvars.ContextVar[Guards | None] = contextvars.ContextVar("thunder_norm_guards", default=None)
_note_called: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("thunder_norm_note_called", default=None)


@contextmanager
def noted(fn: Callable, args: tuple, kwargs: dict) -> Iterator[Surroundings]:
    """Note what the jitted function looks at meanwhile."""
    _KINDS.forget()
    surroundings = Surroundings(fn)
    with setting(_current, Guards(roots_of(fn, args, kwargs), surroundings)), REPLACEMENTS.in_place():
        yield surroundings


# -- noting -------------------------------------------------------------------------------------------------------------------


def note(wrapped: WrappedValue, kind: str, detail: Any, expected: Any) -> None:
    """Have later calls check a condition on a value that the program reads, one of `_CONDITIONS`."""
    note_at(wrapped.provenance, kind, detail, expected)


def note_at(record: ProvenanceRecord, kind: str, detail: Any, expected: Any) -> None:
    """The same of what is at a place."""
    guards = _current.get()
    if guards is not None:
        path = path_of(record)
        if path is not None:
            guards.conditions.setdefault((path, kind, detail), expected)


_KINDS = ValueKinds(IDENTICAL, (int, float, complex, str), torch.nn.Module, MethodType, snapshots.DATA, GUARDED_BY_THUNDER)
_AS_IDENTICAL, _AS_NUMBER, _AS_MODULE, _AS_METHOD, _AS_DATA, _, _AS_OTHERS = range(7)


def _wrap_callback(wrapped: WrappedValue) -> Any:
    value = wrapped.value
    if type(value) in (int, float) and (numbers := changing_numbers()) is not None and numbers.stand_in(wrapped):
        return None
    result = _original_wrap_callback(wrapped)  # it writes m.__dict__["a"] as m.a
    kind = _KINDS.of(value)
    if kind == _AS_IDENTICAL:
        note(wrapped, "is", None, value)
    elif kind == _AS_NUMBER:
        if not wrapped.provenance.ext_flag & jit_ext.EXT_FLAG_IS_PROXY_DERIVED:  # Thunder does not compare it
            note(wrapped, "same", None, snapshots.same_as(value))
        elif type(value) in (float, complex) and (value != value or 0 in (value.real, value.imag)):
            # Thunder compares it: 0.0 and -0.0 are equal, and nan is not
            note(wrapped, "written", None, repr(value))
    elif kind == _AS_MODULE:
        note(wrapped, "type", None, type(value))
    elif kind == _AS_METHOD:
        _note_method(wrapped, value)
    elif kind == _AS_DATA:
        path = path_of(wrapped.provenance)
        if path is not None and path[-1][1] not in _OF_MODULES:
            note(wrapped, "same", None, snapshots.same_as(value))
    elif kind == _AS_OTHERS:
        path = path_of(wrapped.provenance)
        if path is not None and (is_of_call(path) or type(value) not in CONTAINERS):  # of those the length is guarded, or keys
            note(wrapped, "type", None, type(value))
        if snapshots.is_closed(type(value)):
            note(wrapped, "same", None, snapshots.same_as(value))
    return result


def is_guarded(wrapped: WrappedValue) -> bool:
    """Whether there is a way to a value from the arguments or the jitted function: the program did not make it itself."""
    return path_of(wrapped.provenance) is not None


def found_at(record: ProvenanceRecord | None) -> Any:
    """What is at a place that can be reached from the arguments or the jitted function; None if it is no such place."""
    guards, path = _current.get(), None if record is None else path_of(record)
    found = None if guards is None or path is None else Ways(guards.roots).end(path)
    return None if found is LEFT_OUT or found is GONE else found


def _note_method(wrapped: WrappedValue, method: MethodType) -> None:
    """An object's method is its class's; one that is given to the object itself later goes before it."""
    path, guards = path_of(wrapped.provenance), _current.get()
    if guards is not None and path is not None and path[-1][0] == "attribute":
        name = path[-1][1]
        is_everybodys = method.__func__ is getattr(torch.nn.Module, name, None)
        is_of_class = in_classes(type(method.__self__).__mro__, name, None) is not None  # it may stand in a list or a cell
        if is_of_class and not is_everybodys and name not in getattr(method.__self__, "__dict__", (name,)):
            guards.conditions.setdefault((path[:-1], "not own", name), None)


def note_attribute(owner: WrappedValue, name: str) -> None:
    """Note that an attribute is read: what a class says of it, and what its own ``__getattr__`` does, holds while nothing else does."""
    guards, value = _current.get(), owner.value
    if guards is None:
        return
    if type(value) is super:
        above = value.__self_class__.__mro__ if value.__self_class__ is not None else ()
        above = above[above.index(value.__thisclass__) + 1 :] if value.__thisclass__ in above else ()
        guards.surroundings.note_above(above, name)
        return
    kind = value if isinstance(value, type) else type(value)
    guards.surroundings.note_attribute(kind, name)
    own = getattr(value, "__dict__", None)
    if kind is value and not is_guarded(owner):
        guards.surroundings.note_of_class(value, name)
    if kind is value or type(own) is not dict or name in own:
        return
    is_answered = getattr(kind, "__getattr__", None) not in (None, torch.nn.Module.__getattr__)
    is_absent = in_classes(kind.__mro__, name) is MISSING
    if is_answered and is_absent:
        guards.surroundings.note_absent(kind.__mro__, name)
    if not is_guarded(owner):
        guards.surroundings.note_data(kind.__mro__, name)
    elif is_answered and is_absent:
        note(owner, "not own", name, None)
    elif is_absent and not hasattr(value, name):
        note(owner, "has", name, False)


def note_descriptor(descriptor: Any) -> None:
    """Note that Python code of a descriptor says what an attribute is, or is told."""
    guards = _current.get()
    if guards is not None:
        guards.surroundings.note_descriptor(descriptor)


def note_identity(a: WrappedValue, b: WrappedValue, is_one: bool) -> None:
    """Note what ``a is b`` says."""
    guards, path, other = _current.get(), path_of(a.provenance), path_of(b.provenance)
    if guards is None or isinstance(a.value, _NUMBERS) or isinstance(b.value, _NUMBERS):
        return
    if path is not None and other is not None:
        if path != other:
            guards.meetings.setdefault((path, other), is_one)
    elif path is not None or other is not None:
        known, constant = (a, b) if other is None else (b, a)
        if constant.value is None and known.value is not None:  # what is None is guarded as such
            note(known, "is none", None, is_one)


def note_meeting(record: ProvenanceRecord, other: ProvenanceRecord, is_one: bool) -> bool:
    """Have later calls find one object at two places, or two; False if they would not know where to look."""
    guards, path, second = _current.get(), path_of(record), path_of(other)
    if guards is None or path is None or second is None:
        return False
    guards.meetings.setdefault((path, second), is_one)
    return True


def note_none(asked: WrappedValue) -> None:
    """Note that it matters whether something is None."""
    if asked.value is not None:  # what is None is guarded as such
        note(asked, "is none", None, False)


def telling_called(note_called: Callable[[FunctionType], None]) -> AbstractContextManager[None]:
    """Have `note_called` told each function of Python's that is about to be interpreted."""
    return setting(_note_called, note_called)


def _run_function(compilectx: Any, runtimectx: Any, fn: WrappedValue, /, *args: Any, **kwargs: Any) -> Any:
    guards = _current.get()
    if guards is not None:
        guards.surroundings.note_function(fn.value, args)
        if (note_called := _note_called.get()) is not None:
            note_called(fn.value)
        given = given_to_compiler(fn)
        if given is not None:
            return thunders._interpret_call(given, *args, **kwargs)
        fn, args, kwargs = defaults.found_in(fn, args, kwargs)
    result = _original_run_function(compilectx, runtimectx, fn, *args, **kwargs)
    return as_python_binds(result, runtimectx, fn.value, len(args), kwargs)


def _wrap(value: Any, /, *, provenance: ProvenanceRecord) -> WrappedValue:
    """Note where one object stands at two places: the program would look at only one of them."""
    found = thunders_wrap(value, provenance=provenance)
    if found is value or found.provenance is provenance:
        return found
    guards, path = _current.get(), path_of(provenance)
    if guards is None or path is None:
        return found
    if isinstance(value, IDENTICAL):
        guards.conditions.setdefault((path, "is", None), value)
    elif isinstance(value, EQUAL):
        guards.conditions.setdefault((path, "same", None), snapshots.same_as(value))
    elif isinstance(value, (torch.nn.Module, torch.Tensor)) or not isinstance(value, STAND_ANYWHERE):
        other = path_of(found.provenance)
        if other is not None and path != other:
            guards.meetings[path, other] = True
    return found


def note_call(fn: Callable, args: tuple[WrappedValue, ...], kwargs: Mapping[str, WrappedValue] = MappingProxyType({})) -> None:
    """Note what a call that is interpreted looks at: whether attributes and keys are there, and what functions in C are given."""
    if fn is getattr and len(args) == 2:
        return  # more than half of all calls: what is read is noted where it is wrapped
    if (fn is hasattr or (fn is getattr and len(args) == 3)) and type(args[1].value) is str:
        obj = args[0].value
        is_special = thunders.DUNDER_PATTERN.match(args[1].value)  # the interpreter itself asks for those
        if is_special or isinstance(obj, (torch.Tensor, jit_ext.Proxy)) or path_of(args[0].provenance) is None:
            return
        if not is_answered_by_code(obj, args[1].value):  # what that reads is noted where it is interpreted
            note(args[0], "has", args[1].value, hasattr(obj, args[1].value))
    elif fn in _BY_KEY and len(args) >= 2 and isinstance(args[0].value, dict) and type(args[1].value) in (str, int):
        _note_key(args[0], args[1].value, is_asked=fn is dict.get)
    elif isinstance(fn, OPAQUE) or type(fn).__name__ in _OPAQUE_NAMES:
        _note_opaque(fn, args, kwargs)
        if fn in _CHANGING:
            _note_written(args[0])
            overwritten.note_method(fn, args)
        elif fn in _KEEPING:
            for held in (part for a in kwargs.values() for part in (a, *_items(a))):
                _note_container(held)
    elif fn is torch.Tensor or type(fn) is _TENSOR_TYPE:
        look_into(args)
    elif isinstance(fn, type) and (met := surroundings()) is not None:
        met.note_making(fn)
        run_unseen.note_given(fn, args, kwargs)
    elif run_unseen.is_of_c(fn):
        run_unseen.note_given(fn, args, kwargs)
    if type(fn) in _OF_C and fn in _ITERATING:
        _note_states(args, _OF_ITERABLES)
    elif fn is str:
        _note_states(args, ())  # methods of classes are interpreted


_OF_C = (type, BuiltinFunctionType, MethodDescriptorType)


def _note_written(given: WrappedValue) -> None:
    guards, path = _current.get(), path_of(given.provenance)
    if guards is not None and isinstance(given.value, _WITH_ITEMS) and path is not None and not is_of_call(path):
        guards.written.setdefault(id(given.value), (path, given.value))


def way_to_written(container: Any) -> Path | None:
    """The way from the jitted function to a list, dict, set or deque that the program writes into: in a later call another may stand there."""
    guards = _current.get()
    return guards.written.get(id(container), (None, None))[0] if guards is not None else None


def keep_written(followed: set[int]) -> None:
    """Let the trace serve calls alone in which the containers that the program has written into stand where they stood.

    Args:
        followed: the identities of those for which the trace writes into whatever stands there.
    """
    guards = _current.get()
    for way, container in () if guards is None else guards.written.values():
        if id(container) not in followed:
            guards.conditions.setdefault((way, "itself", None), container)


def _note_container(given: WrappedValue) -> None:
    """Note that a list or dict of the jitted function is held by an object made in C: it is that one, not its place."""
    guards, path = _current.get(), path_of(given.provenance)
    if guards is not None and isinstance(given.value, _WITH_ITEMS) and path is not None and not is_of_call(path):
        guards.conditions.setdefault((path, "itself", None), given.value)


def _note_states(given: Iterable[WrappedValue], asked: tuple[str, ...]) -> None:
    """Note all attributes of objects that Python's C code is given, where it runs code of their classes, unseen."""
    for a in given:
        for part in (a, *_items(a)):
            run_unseen.note_methods(type(part.value), asked)
            if _has_code_for(type(part.value), asked):
                note(part, "own state", None, snapshots.same_as(vars(part.value)))


def look_at_keys(values: Sequence[WrappedValue]) -> None:
    """Guard all that is in some keys or elements, which Python hashes and compares."""
    look_into(values)
    _note_states(values, _ASKED["add"])


def look_whole(values: Iterable[Any]) -> None:
    """Guard all of some values, and of what is in them, that Python's C code compares, hashes or writes out."""
    given = list(values)
    inside = [v for v in look_into(given) if type(v.value) is SimpleNamespace or all(v is not g for g in given)]
    _note_states(inside, _OF_VALUES)


def _note_opaque(fn: Callable, args: tuple[WrappedValue, ...], kwargs: Mapping[str, WrappedValue]) -> None:
    guards = _current.get()
    if guards is not None:
        if len(args) > 1 and isinstance(args[0].value, dict) and isinstance(args[1].value, weakref.ref):
            guards.surroundings.note_reference(args[1].value)  # of a WeakKeyDictionary
        given, named = tuple(a.value for a in args), {k: v.value for k, v in kwargs.items()}
        guards.surroundings.note_call(fn, given, named, lambda: not is_guarded(args[0]))
        if any([isinstance(a.value, ITERATORS) and is_guarded(a) for a in args]):
            guards.surroundings.note_iterator(fn)
    name = getattr(fn, "__name__", None)
    asked = _ASKED.get(name, ())
    if asked:
        _note_states(args[1:], asked)
    if name in _HASH:
        look_whole(args[1:2])
    if name in _OF_STATE:
        _note_states(args, _OF_VALUES)
    run_unseen.note_given(fn, args, kwargs)
    for a in args:
        run_unseen.note_methods(type(a.value), ("__torch_function__",))
    if any([stored.is_container(type(a.value)) for a in args]) and not (_looks_into_nothing(fn) or is_known(fn)):
        look_whole(args)


def reference_asked(reference: weakref.ref) -> Callable:
    """What to call for a weak reference: no way leads to what it refers to, and whether that is still there nobody sees."""
    if (guards := _current.get()) is not None:
        guards.surroundings.note_reference(reference)
    return interpreter_needs_wrap(lambda: reference())


def callers_asked() -> None:
    """Note that the program looks at what called the jitted function."""
    if (guards := _current.get()) is not None:
        guards.surroundings.note_callers()


def _items(given: WrappedValue) -> Iterator[WrappedValue]:
    """What is in a tuple or dict that a function in C is given."""
    items = given.item_wrappers if type(given.value) in (tuple, dict) else None
    yield from (v for v in (items.values() if isinstance(items, dict) else items or ()) if isinstance(v, WrappedValue))


@functools.lru_cache(maxsize=4096)
def _has_code_for(kind: type, asked: tuple[str, ...]) -> bool:
    """Whether a function in C that is given an object of this class runs Python code that reads its attributes."""
    found = (in_classes(kind.__mro__, name, None) for name in asked)
    return kind is SimpleNamespace or (
        kind.__dictoffset__ != 0 and not kind.__module__.startswith("torch") and any(isinstance(f, FunctionType) for f in found)
    )


def _note_key(mapping: WrappedValue, key: str | int, *, is_asked: bool) -> None:
    """Note whether a key is there; of one that is looked up and there, the item is guarded."""
    try:
        is_there = stored.contains(mapping.value, key)
    except Exception:  # noqa: BLE001 - of a key that it is compared with; the program is about to meet it
        return
    if is_asked or not is_there:
        note(mapping, "stored key" if stored.has_own(type(mapping.value), "__contains__") else "contains", key, is_there)


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
    check = compiled(ways, _kept(guards, ways), _still_meeting(guards, ways), guards.surroundings)
    if check is None:
        return
    check_in_prologue(ctx, bind(check))


def stand_in_for_numbers(numbers: Any) -> None:
    """Have `numbers` stand in for those that it knows to be others from call to call; see `changing_numbers`."""
    if (guards := _current.get()) is not None:
        guards.numbers = numbers


def tell_numbers(known: Callable[[Any], Any]) -> None:
    """Have `known` say of a value of the program which it is in the call at hand, where there are numbers of tensors in it."""
    if (guards := _current.get()) is not None:
        guards.known_numbers = known


def known_numbers() -> Callable[[Any], Any] | None:
    """What says it in the acquisition at hand; None if nobody does."""
    return guards.known_numbers if (guards := _current.get()) is not None else None


def changing_numbers() -> Any:
    """What stands in for numbers in the acquisition at hand; None if nothing does."""
    return guards.numbers if (guards := _current.get()) is not None else None


def surroundings() -> Surroundings | None:
    """What the acquisition at hand has met of what no way leads to."""
    return guards.surroundings if (guards := _current.get()) is not None else None


def roots() -> dict[str, Any]:
    """What ways begin at in the acquisition at hand."""
    return guards.roots if (guards := _current.get()) is not None else {}


def is_of_one_call() -> bool:
    """Whether the trace that is being acquired holds what is another in each call: no other call may use it."""
    guards = _current.get()
    return guards is not None and guards.surroundings.is_of_one_call


def use_for_one_call() -> None:
    """Let no other call use the trace that is being acquired."""
    if (guards := _current.get()) is not None:
        guards.surroundings.is_of_one_call = True


def has_changed_array() -> bool:
    """Whether a numpy array is another after the acquisition than when the program read it: C code writes into the user's own."""
    return any(not is_same(array) for _, array, is_same in _arrays())


def arrays_that_were_there() -> list[np.ndarray]:
    """The numpy arrays that the program has read, and that were there before the call."""
    return [array for _, array, _ in _arrays()]


def let_change(arrays: Iterable[np.ndarray]) -> None:
    """Have later calls take arrays with other numbers, in the same shape and dtype, for the same."""
    guards, ids = _current.get(), {id(array) for array in arrays}
    if guards is not None and ids:
        for key, array, _ in list(_arrays()):
            if id(array) in ids:
                guards.conditions[key] = snapshots.array_like(array)


def _arrays() -> Iterator[tuple[tuple[Path, str, Any], np.ndarray, Callable[[Any], bool]]]:
    """What is guarded of numpy arrays: the key of the condition, the array, and whether it is the same."""
    guards = _current.get()
    if guards is None:
        return
    ways = Ways(guards.roots)
    for key, is_same in guards.conditions.items():
        if key[1] == "same" and snapshots.is_of_array(is_same) and isinstance(found := ways.end(key[0]), np.ndarray):
            yield key, found, is_same


def check_in_prologue(ctx: Any, check: Callable) -> None:
    """Have the prologue of the trace that is being acquired call what ``check(args, kwargs, output=None)`` writes."""

    def emit() -> None:
        prologue = get_tracectx()
        given, by_name = (b.output for b in prologue.bound_symbols if b.sym.name == "unpack_trivial")
        prologue.bound_symbols.append(check(given, by_name, output=None))

    ctx.add_constraint((emit,))


def has_changed_imported() -> bool:
    """Whether something that the program has read of a module that it imports is another after the acquisition."""
    guards = _current.get()
    if guards is None:
        return False
    of_imported = {key: expected for key, expected in guards.conditions.items() if is_imported(key[0])}
    ways = Ways(guards.roots)
    return any(_holds_by_now(key, expected, ways) is False for key, expected in of_imported.items())


def _holds_by_now(key: tuple[Path, str, Any], expected: Any, ways: Ways) -> bool | None:
    """Whether a condition holds; None where no way leads to what it is of."""
    path, kind, detail = key
    is_code = kind == "is" and not isinstance(expected, SINGLE)
    found = ways.end_of_code(path) if is_code else ways.end(path)
    return None if found is LEFT_OUT or found is GONE else holds(found, kind, detail, expected)


def _kept(guards: Guards, ways: Ways) -> list[tuple[Path, str, Any, Any]]:
    """The conditions that hold after the acquisition too, and are of what may change."""
    return [(*key, expected) for key, expected in guards.conditions.items() if _holds_by_now(key, expected, ways)]


def _still_meeting(guards: Guards, ways: Ways) -> list[tuple[Path, Path, bool]]:
    """The pairs of ways of which the same can be said after the acquisition."""
    found = [(*pair, is_one, *(ways.end(path) for path in pair)) for pair, is_one in guards.meetings.items()]
    return [
        (a, b, is_one)
        for a, b, is_one, one, other in found
        if all(v is not LEFT_OUT and v is not GONE for v in (one, other)) and (one is other) is is_one
    ]


_original_wrap_callback = jit_ext._general_jit_wrap_callback
thunders_wrap = thunders.wrap
_original_run_function = thunders._setup_frame_and_run_python_function

REPLACEMENTS = Replacements(
    (
        Replacement(
            jit_ext.general_jit_callbacks, INTERPRETER_CALLBACKS.WRAP_CALLBACK, _wrap_callback, "_general_jit_wrap_callback"
        ),
        Replacement(thunders, "wrap", _wrap, "wrap, which finds the wrapper of an object that it has seen elsewhere"),
        Replacement(
            thunders,
            "_setup_frame_and_run_python_function",
            _run_function,
            "the same, which takes code and defaults of a function for what they are",
        ),
    )
)
