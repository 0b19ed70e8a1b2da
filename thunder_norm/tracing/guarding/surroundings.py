"""What a program runs with and no way leads to from its arguments: code, attributes of classes, the state of the process.

``Module.forward = f``, ``f.__defaults__ = ...`` or ``torch.use_deterministic_algorithms(True)`` between two calls changes what the second one
does.  Each is noted once, however many objects have the class or call the function; what the standard library, torch or we have written is
taken to stay as it is, but for `forward`.
"""

from __future__ import annotations

import datetime
import dis
import functools
import itertools
import os
import random
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, GetSetDescriptorType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import AcquiredAnewWarning, UnsupportedOpError, with_details
from thunder_norm.random_states import remembered
from thunder_norm.tracing.guarding.classes import LIBRARIES, in_classes
from thunder_norm.tracing.guarding.snapshots import same_as
from thunder_norm.tracing.guarding.ways import is_of_others
from thunder_norm.tracing.locations import location_of_user
from thunder.core.interpreter import WrappedValue, get_interpreterruntimectx
from thunder.core.proxies import Proxy

_nothing = object()
_CODE = (FunctionType, property, staticmethod, classmethod)
_ENVIRONMENT = type(os.environ)
_READS = ("get_", "is_", "are_", "_get_", "_is_", "_are_")
# Thunder has its own guards of the first; the others say what a program is in the middle of.
_LEFT_OUT = (
    *("is_grad_enabled", "get_default_dtype", "is_autocast_enabled", "is_autocast_cpu_enabled"),
    *("_is_tracing", "_is_any_autocast_enabled", "_get_function_stack_at"),
)
_STATE = frozenset(
    f
    for name, f in vars(torch._C).items()
    if isinstance(f, BuiltinFunctionType) and name.startswith(_READS) and name not in _LEFT_OUT and "torch_function" not in name
)
# Their results are numbers of one call.
_CLOCKS = frozenset(
    {
        *(f for name, f in vars(time).items() if isinstance(f, BuiltinFunctionType) and ("time" in name or "counter" in name)),
        *(datetime.datetime.now, datetime.datetime.utcnow, os.urandom),
    }
)
# in C, or a generator's frame: what they have left is seen by asking alone
ITERATORS = (
    *(GeneratorType, type(iter([])), type(iter(())), type(iter({})), type(iter({}.items())), type(iter({}.values()))),
    *(type(iter(set())), type(iter(range(0))), type(iter("")), type(reversed([])), enumerate, map, filter, zip),
    *(value for value in vars(itertools).values() if isinstance(value, type) and issubclass(value, Iterator)),
)
_ASK_FOR_NO_ITEM = (isinstance, callable, hasattr, getattr, id)
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_PYTHONS = random.random.__self__
_DISPATCH = functools.singledispatch(lambda x: x).dispatch.__code__
_CALLING_A_MODULE = torch.nn.Module._call_impl.__code__
_INTERPRETER = get_interpreterruntimectx.__module__  # has functions that are interpreted, for ``x[i]`` and its likes
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass
class Surroundings:
    """What one acquisition has met.

    Attributes:
        jitted: the function or module.
        functions: each function that was interpreted, with its code and what its defaults were.
        attributes: each function, property or method that was looked up in a class, by class and name.
        orders: of each class of a user's in which something was looked up, in which order its bases are asked.
        absent: of each module of a user's, its globals and the names that its functions read and that are not among these: builtins, which
            a global would come before, and what is nowhere.
        states: of functions that read the state of the process, by function and arguments, whether they say the same.
        variables: of each context variable that the program sets, what it was before.
        drawn: of each generator that numbers were drawn from in Python, by identity, what sets it back to its state before.
        asked_iterator: where an iterator that was there before the call was asked for an item first.
        is_of_one_call: whether a function was called whose result is another in each call.
    """

    jitted: Any
    functions: dict[int, tuple[weakref.ref, Any, Callable[[Any], bool]]] = field(default_factory=dict)
    attributes: dict[tuple[type, str], Any] = field(default_factory=dict)
    orders: dict[type, tuple[type, ...]] = field(default_factory=dict)
    states: dict[tuple[Callable, tuple], Callable[[Any], bool]] = field(default_factory=dict)
    absent: dict[int, tuple[dict[str, Any], set[str]]] = field(default_factory=dict)
    variables: dict[ContextVar, Any] = field(default_factory=dict)
    drawn: dict[int, Callable[[], Any]] = field(default_factory=dict)
    asked_iterator: str | None = None
    is_of_one_call: bool = False

    def note_function(self, function: FunctionType, args: tuple[Any, ...]) -> None:
        """Note a function that is about to be interpreted."""
        if function.__code__ is _ENVIRONMENT.__getitem__.__code__ and len(args) == 2 and type(_value(args[1])) is str:
            self._note_state(os.environ.get, (_value(args[1]),))
        if function.__code__ is _DISPATCH:
            self._note_state(_registered, (function,))
        if function.__code__ is _CALLING_A_MODULE:
            self._note_state(_hooks_of_all_modules, ())
            if isinstance(self.jitted, torch.nn.Module) and _hooks_of_all_modules() != (None,):
                raise UnsupportedOpError(
                    with_details(
                        "a hook for all modules (torch.nn.modules.module.register_module_forward_hook) beside a jitted module",
                        why="torch runs it around the jitted module too, once more than in eager mode",
                        instead="jit a function that calls the module, or register the hook with the modules that it is for",
                    )
                )
        if id(function) not in self.functions and not is_of_others(function.__globals__):
            reference = weakref.ref(function)  # some are made by the program
            self.functions[id(function)] = reference, function.__code__, same_as(_defaults(function))
            names, absent = self.absent.setdefault(id(function.__globals__), (function.__globals__, set()))
            absent |= _variables(function.__code__).difference(names)

    def note_attribute(self, owner: type, name: str) -> None:
        """Note that `name` is looked up in a class, if it is code of a user's, and which bases the class has, if it is one."""
        if (owner, name) in self.attributes:
            return
        self.note_class(owner)
        found = in_classes(owner.__mro__, name, _nothing)
        if isinstance(found, _CODE) and (name == "forward" or not _is_of_library(owner.__mro__, name)):
            self.attributes[owner, name] = found

    def note_class(self, cls: type) -> None:
        """Note which bases a class has, which decide what is found in it."""
        if cls not in self.orders:
            self.orders[cls] = cls.__mro__

    def note_making(self, cls: type) -> None:
        """Note that an object is made of a class: what its metaclass says of that, and the class."""
        if type(cls) is not type:
            self.note_attribute(type(cls), "__call__")
        self.note_attribute(cls, "__init__")
        self.note_attribute(cls, "__new__")
        if not _is_others(cls) and in_classes(cls.__mro__, "__new__") is object.__new__:
            self._note_state(_is_made_by_object, (cls,))

    def note_above(self, classes: tuple[type, ...], name: str) -> None:
        """Note what ``super()`` finds under `name`: in which of the classes, in the order in which they are asked."""
        place = next((i for i, base in enumerate(classes) if name in vars(base)), len(classes))
        if place < len(classes):
            self.note_attribute(classes[place], name)
            self.note_data(classes[place:], name)
        self.note_absent(classes[:place], name)

    def note_absent(self, classes: tuple[type, ...], name: str) -> None:
        """Note that none of some classes has `name`, of those that a program may give it to."""
        asked = tuple(base for base in classes if base.__module__.partition(".")[0] not in LIBRARIES)
        if asked:
            self._note_state(in_classes, (asked, name))

    def note_data(self, classes: tuple[type, ...], name: str) -> None:
        """Note what is no code under `name` in the first of some classes that has it, which no way leads to.

        It is asked of an object that the program has made, or of what ``super()`` stands for.
        """
        found = in_classes(classes, name, _nothing)
        if (
            found is _nothing
            or hasattr(type(found), "__get__")
            or isinstance(found, torch.Tensor)
            or _is_of_library(classes, name)
        ):
            return
        self._note_state(in_classes, (classes, name))

    def note_of_class(self, cls: type, name: str) -> None:
        """Note what is no code under `name` in a class that no way leads to, as ``type(x)``: in it, or, as its name, of what all classes are."""
        if isinstance(in_classes(type(cls).__mro__, name), GetSetDescriptorType):
            if not _is_others(cls) and type(said := getattr(cls, name, None)) in (str, tuple):
                self._note_state(getattr, (cls, name, said))
        else:
            self.note_data(cls.__mro__, name)

    def note_descriptor(self, descriptor: Any) -> None:
        """Note what a descriptor written in Python holds: no way leads to what stands in a class."""
        if type(descriptor).__module__.partition(".")[0] not in LIBRARIES and hasattr(descriptor, "__dict__"):
            self._note_state(vars, (descriptor,))

    def note_call(self, function: Callable, given: tuple[Any, ...], named: dict[str, Any], is_own: Callable[[], bool]) -> None:
        """Note a function in C that reads the state of the process, or says something else in each call.

        Args:
            function: as it is about to be called.
            given: its arguments.
            named: those by name.
            is_own: says whether the program has made the first of them itself.
        """
        if isinstance(function, BuiltinFunctionType):
            is_of_class = function.__name__ == "__subclasses__" and isinstance(function.__self__, type)
            if is_of_class or (function in _STATE and all(isinstance(a, _PLAIN) for a in given)):
                self._note_state(function, given)
            elif (
                function in _CLOCKS and _module_that_calls() != "logging"
            ):  # a message is written when a trace is acquired, as by print
                self._note_drawn(function)
        elif isinstance(function, functools._lru_cache_wrapper):
            if not any(isinstance(v, Proxy) for v in (*given, *named.values())):
                self._note_state(_called_by_name, (function, given, tuple(named.items())))
        elif function in (ContextVar.set, ContextVar.reset) and given and not _is_in_library():
            self.variables.setdefault(given[0], given[0].get(_nothing))
        elif function is ContextVar.get and given and not _is_in_library():
            self._note_state(ContextVar.get, (given[0], None))
        elif given and isinstance(given[0], torch.Generator) and getattr(function, "__objclass__", None) is torch.Generator:
            if not is_own():
                self._note_drawn(function, given[0])
        elif given and isinstance(given[0], _GENERATORS) and (given[0] is _PYTHONS or not is_own()):
            self._note_drawn(function, given[0])

    def note_answer(self, function: Callable, given: tuple[Any, ...]) -> None:
        """Note what ``isinstance`` or ``issubclass`` says of what the program has made, or of a constant, for a class that says it itself."""
        self._note_state(function, given)

    def note_iterator(self, function: Callable) -> None:
        """Note a function in C that is given an iterator that was there before the call."""
        if function not in _ASK_FOR_NO_ITEM:
            self.asked_iterator = self.asked_iterator or location_of_user()
            self._note_of_one_call(
                "an iterator that was there before the call is asked for its next item in the jitted function",
                why="an iterator has each item once, and another in the next call",
                instead="give a list, or the item itself",
            )

    def note_reference(self, reference: weakref.ref) -> None:
        """Note a weak reference that is asked for its object by the program, and not by a library."""
        if not _is_in_library(but_for=("weakref", "_weakrefset")):
            self._note_of_one_call(
                "a weak reference is asked for its object in the jitted function",
                why="nothing sees whether the object is there in the next call, and as it was",
                instead="give the object itself, or keep it in an attribute",
            )

    def note_callers(self) -> None:
        """Note that the program looks at the frames outside of the jitted function."""
        self._note_of_one_call(
            "the jitted function looks at what called it (sys._getframe)",
            why="another caller may call it next, from another line",
            instead="give it what it looks for as an argument",
        )

    def _note_state(self, function: Callable, given: tuple) -> None:
        try:
            if (function, given) in self.states:
                return
            self.states[function, given] = same_as(function(*given))
        except Exception:  # noqa: BLE001 - the program is about to meet it
            return

    def undo(self) -> None:
        """Undo what the program has done in Python where no way leads to from its arguments, before it is acquired once more.

        Raises:
            UnsupportedOpError: it has taken an item out of an iterator, which nothing puts back.
        """
        for set_back in self.drawn.values():
            set_back()
        for variable, then in self.variables.items():
            if then is not _nothing and variable.get(_nothing) is not then:
                variable.set(then)
        if self.asked_iterator is not None:
            raise UnsupportedOpError(
                with_details(
                    "an iterator that was there before the call is asked for its next item in the jitted function",
                    at=self.asked_iterator,
                    why="the program has to be gone through twice, and an iterator has each item once",
                    instead="give a list, or the item itself",
                )
            )

    def _note_drawn(self, function: Callable, generator: Any = None) -> None:
        if generator is not None and id(generator) not in self.drawn:
            self.drawn[id(generator)] = remembered(generator)
        self._note_of_one_call(
            f"{function.__qualname__} is called in the jitted function",
            why="what it returns goes into the trace as a number, which the next call must not have",
            instead="draw with torch (torch.rand), or give the number as an argument",
        )

    def note_parameters_drawn(self, cls: type, set_back: Callable[[], Any]) -> None:
        """Note that a module was made, which has drawn its parameters from torch's own generators."""
        self.drawn.setdefault(id(torch.default_generator), set_back)
        self._note_of_one_call(
            f"{cls.__name__}, a module that draws its parameters, is made in the jitted function",
            why="it is made while the trace is acquired, and the next call draws others",
            instead="make the module outside of the function",
        )

    def _note_of_one_call(self, what: str, *, why: str, instead: str) -> None:
        if not self.is_of_one_call:
            self.is_of_one_call = True
            warnings.warn(
                with_details(f"{what}: its trace is acquired anew in each call", at=location_of_user(), why=why, instead=instead),
                AcquiredAnewWarning,
                stacklevel=3,
            )

    def has_changed_variable(self) -> bool:
        """Whether the program leaves another value in a context variable than it found there.

        Raises:
            UnsupportedOpError: it is a tensor, for which something else stands while a trace is acquired.
        """
        changed = {v: then for v, then in self.variables.items() if v.get(_nothing) is not then}
        for variable, then in changed.items():
            if any(isinstance(held, Proxy) for held in tree_leaves(variable.get())):
                variable.set(None if then is _nothing else then)
                raise UnsupportedOpError(
                    with_details(
                        f"a traced function leaves a tensor in the context variable {variable.name!r}",
                        why="it is set once, while the trace is acquired, and not in later calls",
                        instead="reset it before the function returns, or return the tensor",
                    )
                )
        return bool(changed)

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
                compared = f"{name(are_same)}({name(_defaults)}({'f' if is_local else name(function)}))"
                yield f"f is None or {compared}" if is_local else compared, f"the defaults of {what}"
        for found, absent in self.absent.values():
            if absent and found.keys().isdisjoint(absent):
                yield (
                    f"{name(found.keys())}.isdisjoint({name(absent)})",
                    "a builtin that the program names is, or what it named in vain,",
                )
        for cls, order in self.orders.items():
            if cls.__mro__ is order and not _is_others(cls):
                yield f"{name(cls)}.__mro__ is {name(order)}", f"what {cls.__qualname__} is derived from is"
        for (owner, key), found in self.attributes.items():
            if in_classes(owner.__mro__, key, _nothing) is found:
                yield _read(name(owner), key, found, name), f"{owner.__qualname__}.{key} is"
        for (function, given), are_same in self.states.items():
            if are_same(function(*given)):
                args = ", ".join(map(repr, given)) if all(isinstance(a, str | int) for a in given) else f"*{name(given)}"
                yield f"{name(are_same)}({name(function)}({args}))", f"{getattr(function, '__name__', function)} is"


@functools.lru_cache(maxsize=10_000)
def _variables(code: CodeType) -> frozenset[str]:
    """The names of globals and builtins that a code object reads."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def _is_others(cls: type) -> bool:
    """Whether a class is of a library: its bases are taken to stay as they are."""
    module = sys.modules.get(cls.__module__)
    return cls.__module__.partition(".")[0] in LIBRARIES or (module is not None and is_of_others(vars(module)))


def _is_made_by_object(cls: type) -> bool:
    return cls.__new__ is object.__new__


def _registered(dispatch: FunctionType) -> tuple[Any, ...]:
    """For which classes ``functools.singledispatch`` has which functions."""
    cells = dict(zip(dispatch.__code__.co_freevars, dispatch.__closure__ or (), strict=True))
    return tuple(cells["registry"].cell_contents.items())


def _called_by_name(function: Callable, given: tuple, named: tuple[tuple[str, Any], ...]) -> Any:
    return function(*given, **dict(named))


def _hooks_of_all_modules() -> tuple[Any, ...]:
    """Those that torch runs around the forward of each module, in their order; without torch's own, which count or name modules."""
    found = torch.nn.modules.module
    if not found._global_forward_pre_hooks and not found._global_forward_hooks:  # asked in each call
        return (None,)
    hooks = (*found._global_forward_pre_hooks.values(), None, *found._global_forward_hooks.values())
    return tuple(h for h in hooks if (getattr(h, "__module__", None) or "").partition(".")[0] != "torch")


def _value(x: Any) -> Any:
    return x.value if isinstance(x, WrappedValue) else x


def _defaults(function: FunctionType | None) -> Any:
    return None if function is None else (function.__defaults__, function.__kwdefaults__)


def _is_in_library(but_for: tuple[str, ...] = ()) -> bool:
    """Whether the statement that is interpreted is of a library: Thunder's own context variables are others while it interprets.

    Of some modules it is that which calls them.
    """
    return is_of_others(_names_that_call(but_for))


def _module_that_calls() -> str:
    return _names_that_call().get("__name__", "")


def _names_that_call(but_for: tuple[str, ...] = ()) -> dict[str, Any]:
    """The global names of the statement that is interpreted."""
    frames = (_value(frame.globals) for frame in reversed(get_interpreterruntimectx().frame_stack))
    return next((names for names in frames if names.get("__name__") not in (_INTERPRETER, *but_for)), {})


def _is_of_library(classes: Iterable[type], name: str) -> bool:
    base = next(b for b in classes if name in vars(b))
    return base.__module__.partition(".")[0] in LIBRARIES


def _read(owner: str, key: str, found: Any, name: Callable[[Any], str]) -> str:
    """Whether a class has under `key` what it had: read as an attribute, which Python has a cache for."""
    if isinstance(found, classmethod):
        return f"getattr({owner}.{key}, '__func__', None) is {name(found.__func__)}"
    return f"{owner}.{key} is {name(found.__func__ if isinstance(found, staticmethod) else found)}"
