"""Everything a program can reach and change: a copy of each place that holds something, to be compared and put back.

From modules and arguments the walk follows attributes, containers, classes, closures and the global names that the code mentions, in
modules too; of a class those methods that followed code names, ``forward`` first, and of one of the user's those that syntax calls and,
where code can make an object of it, those that do.  It stops at the standard library, torch and Thunder: what those keep is theirs, but for
objects that hold what is the program's, an optimizer's state say.
"""

from __future__ import annotations

import argparse
import collections
import dis
import functools
import operator
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_norm.user_code import is_installed

_LIBRARIES = (sys.stdlib_module_names | {"torch", "torchvision", "thunder", "thunder_norm", "numpy"}) - {"__main__"}
# Of libraries, with nothing in their objects but what the program has put there.
_HOLDING = (
    types.SimpleNamespace,
    argparse.Namespace,
    threading.local,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    torch.distributions.Distribution,
)
ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, slice, range)
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property, functools._lru_cache_wrapper)
_MAKING = ("__new__", "__init__", "__post_init__")
_WITHOUT_ATTRIBUTES = (dict, list, set, collections.deque)
_UNBOUND = object()


@dataclass(frozen=True)
class Place:
    """Something that holds values: what it held, and how to make it hold them again.

    Attributes:
        owner: the module, object, container, class, function or cell.
        held: by attribute or key, or in order.
        read: what it holds now, in the same form.
        write: makes it hold such values.
        at: the same place of another owner, if it is one of an object or a container.
        is_of_others: whether it is a global variable or a class of an installed package, or only found in one.
        cell: the one that it is, of a function.
        still_holds: a faster way to see that it holds the same objects than to read it; false says nothing.
    """

    owner: Any
    held: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]
    at: Callable[[Any], Place] | None = None
    is_of_others: bool = False
    cell: types.CellType | None = None
    still_holds: Callable[[], bool] | None = None

    @property
    def is_changed(self) -> bool:
        """Whether it holds other objects now, or in another order."""
        return not (self.still_holds is not None and self.still_holds()) and not is_same(self.held, self.read())

    @property
    def owners(self) -> Iterator[Any]:
        """What a program may know it as: the owner, or the dict of its variables."""
        yield self.owner
        if isinstance(self.owner, types.FunctionType) and self.cell is None:
            yield self.owner.__globals__
        if isinstance(self.owner, types.ModuleType):
            yield vars(self.owner)

    def named(self, key: Any) -> str:
        """What it holds under a key, for the program's author."""
        if isinstance(self.owner, types.FunctionType):
            is_global = isinstance(self.held, dict)
            return f"{key!r}, a variable" if is_global else f"a variable that {self.owner.__name__} closes over"
        is_container = isinstance(self.owner, dict | list | set | collections.deque) and self.at is not None
        return f"a {type(self.owner).__name__} that was there before" if is_container else f"{key!r} of {described(self.owner)}"

    def restore(self) -> None:
        """Let it hold what it held."""
        if self.is_changed:
            self.write(self.held)


def is_same(a: Any, b: Any) -> bool:
    """Whether two flat containers hold the same objects in the same order."""
    if len(a) != len(b):
        return False
    if isinstance(a, set):
        return a == b
    return all(map(operator.is_, a, b)) and (not isinstance(a, dict) or all(map(operator.is_, a.values(), b.values())))


def described(owner: Any) -> str:
    """What holds something, for the program's author."""
    name = owner.__qualname__ if isinstance(owner, type | types.FunctionType) else ""
    return f"{type(owner).__name__} {name}".strip()


def place_of_contents(value: Any) -> Place:
    """What a container holds."""
    read = functools.partial(contents, value)
    return Place(value, read(), read, functools.partial(refill, value), place_of_contents)


def place_of_attributes(value: Any) -> Place:
    """The ``__dict__`` of an object."""
    own = vars(value)
    return Place(value, dict(own), lambda: dict(own), functools.partial(refill, own), place_of_attributes)


def place_of_slots(value: Any) -> Place:
    """The slots of an object."""
    read = functools.partial(_read_slots, value, _all_slots(type(value)))
    return Place(value, read(), read, functools.partial(_write_slots, value), place_of_slots)


def _is_empty(value: Any) -> bool:
    """Whether it is a container that holds nothing, and has no attributes."""
    is_plain = type(value) in _WITHOUT_ATTRIBUTES or type(value) is collections.OrderedDict and not vars(value)
    return is_plain and not value


class Reachable:
    """The places reachable from some roots, and the tensors, random generators and caches in them.

    Args:
        roots: modules, functions, arguments.
        follows_code: whether to look into classes and functions, and not only into objects.
        skips_empty: whether to leave out containers that hold nothing, as most of those of a module: a walk of a fifth of the time.
    """

    def __init__(self, roots: Iterable[Any], *, follows_code: bool = True, skips_empty: bool = False):
        self.follows_code, self.skips_empty = follows_code, skips_empty
        self.places: list[Place] = []
        self.tensors: list[torch.Tensor] = []
        self.generators: list[Any] = []
        self.caches: list[Any] = []
        self._entering: dict[type, _Enter | None] = {}  # what `_way_into` says of the classes it met
        self.cells: set[int] = set()  # the identities of those that functions close over
        self._seen: dict[int, Any] = {}  # kept alive: an id stays its object's
        self._made: set[int] = set()  # classes that code may make objects of
        self._inner: set[types.CodeType] = set()  # of functions that followed code makes
        self._variables: collections.defaultdict[int, set[str]] = collections.defaultdict(
            set
        )  # of modules, by their dicts: their places
        self._named: set[str] = {"forward", "__call__"}  # by code that may run
        self._methods: dict[str, list[Any]] = {}  # that no code has named so far
        self._of_others: list[Any] = []  # what global variables of installed packages hold: followed last
        self._is_among_others = False
        self._follow_first(list(roots))

    def _follow_first(self, found: list[Any]) -> None:
        self._is_among_others = False
        self._follow(found)
        self._is_among_others = True
        self._follow(self._of_others)

    def _follow(self, pending: list[Any]) -> None:
        while pending:
            value = pending.pop()
            cls = type(value)
            if cls not in self._entering:
                self._entering[cls] = self._way_into(cls)
            enter = self._entering[cls]
            if enter is None:
                continue
            if issubclass(cls, type):
                pending.extend(self._making(value))
            if id(value) in self._seen:
                continue
            if self.skips_empty and _is_empty(value):
                continue
            self._seen[id(value)] = value
            pending.extend(enter(self, value))

    @property
    def known(self) -> Iterable[int]:
        """The identities of everything that was reached."""
        return self._seen.keys()

    def follow_called(self, fn: types.FunctionType) -> None:
        """Follow a function that is about to be called, where nothing that was followed has named it: ``getattr(model, "_" + kind)()``."""
        if id(fn) not in self._seen and fn.__code__ not in self._inner:
            self._follow_first([fn])

    def follow_held(self, value: Any) -> None:
        """Follow a value that the program is about to have, where nothing that was followed has led to it."""
        if id(value) not in self._seen:
            self._follow_first([value])

    def _way_into(self, cls: type) -> _Enter | None:
        """What notes the places in a value of a class and returns what they hold; None if there is nothing in it."""
        if issubclass(cls, ATOMS):
            return None
        for base, enter in _WAYS:
            if issubclass(cls, base):
                return enter
        if cls.__module__.startswith("numpy.random") and hasattr(cls, "bit_generator"):
            return Reachable._enter_generator
        if is_of_library(cls):
            return Reachable._attributes if issubclass(cls, _HOLDING) else _enter_nothing
        return _enter_nothing if issubclass(cls, types.ModuleType) else Reachable._enter_object

    def _enter_tensor(self, value: torch.Tensor) -> Iterable[Any]:
        self.tensors.append(value)
        return [v for v in getattr(value, "__dict__", {}).values() if not isinstance(v, torch.Tensor)]

    def _enter_cache(self, value: Any) -> Iterable[Any]:
        self.caches.append(value)
        return (value.__wrapped__,)

    def _enter_generator(self, value: Any) -> Iterable[Any]:
        self.generators.append(value)
        return ()

    def _note(
        self, owner: Any, held: Any, read: Callable[[], Any], write: Callable[[Any], None], still_holds: Callable[[], bool]
    ) -> None:
        self._add(Place(owner, held, read, write, is_of_others=_is_installed(owner), still_holds=still_holds))

    def _add(self, place: Place) -> None:
        self.places.append(replace(place, is_of_others=True) if self._is_among_others else place)

    def _enter_container(self, value: Any) -> Iterable[Any]:
        self._add(place := place_of_contents(value))
        held = place.held.values() if isinstance(place.held, dict) else place.held
        return held if type(value) in _WITHOUT_ATTRIBUTES else [*held, *self._attributes(value)]

    def _enter_object(self, value: Any) -> Iterable[Any]:
        return [*self._attributes(value), *self._enter_type(type(value))]

    def _attributes(self, value: Any) -> Iterable[Any]:
        own = getattr(value, "__dict__", None)
        found: list[Any] = []
        if type(own) is dict:
            self._add(place_of_attributes(value))
            found.extend(own.values())
        if _all_slots(type(value)):
            self._add(place_of_slots(value))
            found.extend(v for v in self.places[-1].held.values() if v is not _UNBOUND)
        return found

    def _enter_type(self, cls: type) -> Iterable[Any]:
        """The class of an object, or a base of one: nothing says that the program makes another object of it."""
        if id(cls) in self._seen:
            return ()
        self._seen[id(cls)] = cls
        return self._enter_class(cls)

    def _enter_class(self, cls: type) -> Iterable[Any]:
        """The attributes of a class and of its bases, and the functions that are its methods."""
        if not self.follows_code or is_of_library(cls):
            return ()

        def read() -> dict[str, Any]:
            return {name: v for name, v in vars(cls).items() if not _is_special(name)}

        held, are_called = read(), not _is_installed(cls)
        is_called_by_torch = issubclass(cls, torch.autograd.Function)  # by no name that code mentions: forward, backward
        still_holds = functools.partial(_has_attributes, cls, held, len(vars(cls)))
        self._note(cls, held, read, functools.partial(_write_attributes, cls, read), still_holds)
        found = [v for base in (*cls.__bases__, type(cls)) for v in self._enter_type(base)]
        for name, v in vars(cls).items():
            if not isinstance(v, _METHODS):
                found.extend([v] if name in held else ())
            elif name in self._named or is_called_by_torch or (are_called and _is_special(name) and name not in _MAKING):
                found.append(v)
            else:
                self._methods.setdefault(name, []).append(v)
        return found

    def _making(self, cls: type) -> Iterable[Any]:
        """What runs where the program makes an object of a class."""
        if not self.follows_code or id(cls) in self._made:
            return ()
        self._made.add(id(cls))
        bases = [base for base in cls.__mro__ if not is_of_library(base) and not _is_installed(base)]
        return [vars(base)[name] for base in bases for name in _MAKING if name in vars(base)]

    def _enter_function(self, fn: types.FunctionType) -> Iterable[Any]:
        """Global variables it mentions, variables it closes over, default arguments and attributes."""
        if not self.follows_code or is_of_library(fn):
            return ()
        self._inner.update(c for c in _codes(fn.__code__) if c is not fn.__code__)
        named = [n for n in _names(fn.__code__) if n not in self._named]
        self._named.update(named)
        called = [m for n in named for m in self._methods.pop(n, ())]
        names = [n for n in _names(fn.__code__) if n in fn.__globals__ or n in _stored(fn.__code__, _STORE_GLOBALS)]
        variables = [v for v in self._note_variables(fn, fn.__globals__, names).values() if v is not _UNBOUND]
        variables.extend(self._in_modules(variables, fn.__code__))
        found: list[Any] = [] if _is_installed(fn) else variables
        self._of_others.extend(variables if _is_installed(fn) else ())
        for cell in fn.__closure__ or ():
            if id(cell) not in self.cells:  # of a function that is called later it may hold something else by then
                self.cells.add(id(cell))
                read_cell, write_cell = functools.partial(_read_cell, cell), functools.partial(_write_cell, cell)
                self._add(Place(fn, _read_cell(cell), read_cell, write_cell, is_of_others=_is_installed(fn), cell=cell))
            found.extend(_read_cell(cell))
        return [*found, *called, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values(), fn.__dict__]

    def _note_variables(self, owner: Any, own: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """Variables of a module, each in one place: of a function that is called later they may hold something else by then.

        Of an owner without one there is a place too: it is looked at as well.
        """
        new = [n for n in names if n not in self._variables[id(own)]]
        self._variables[id(own)].update(new)
        read = functools.partial(_read_globals, own, new)
        held = read()
        self._note(owner, held, read, functools.partial(_write_globals, own), functools.partial(_has_globals, own, held))
        return _read_globals(own, names)

    def _in_modules(self, variables: Iterable[Any], code: types.CodeType) -> list[Any]:
        """What modules among some variables have under names that code mentions, as in ``settings.limits``."""
        pending, modules, found = list(variables), set[int](), list[Any]()
        while pending:
            module = pending.pop()
            is_users = type(module) is types.ModuleType and not (is_of_library(module) or _is_installed(module))
            if not is_users or id(module) in modules:
                continue
            modules.add(id(module))
            own, stored = vars(module), _stored(code, _STORE_ATTRIBUTES)
            held = self._note_variables(module, own, [n for n in _names(code) if n in own or n in stored])
            pending.extend(held.values())
            found.extend(held.values())
        return found


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def is_of_library(value: Any) -> bool:
    """Whether a class, function or module is of the standard library, torch or another that the walk does not follow."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if module is None and isinstance(value, types.FunctionType):
        return False  # of code that was compiled by itself: its globals have no name
    return (module if isinstance(module, str) else "builtins").partition(".")[0] in _LIBRARIES


def _is_installed(value: Any) -> bool:
    """Whether a class, function or module is of an installed package."""
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
    return is_installed(getattr(module, "__file__", None))


def _functions_of_property(value: Any) -> Iterable[Any]:
    return [f for f in (getattr(value, n, None) for n in ("fget", "fset", "func")) if f is not None]


def _referent(proxy: Any) -> Iterable[Any]:
    try:
        return (proxy.__repr__.__self__,)
    except ReferenceError:
        return ()


_Enter = Callable[[Reachable, Any], Iterable[Any]]

_WAYS: tuple[tuple[type | tuple[type, ...], _Enter], ...] = (
    (torch.Tensor, Reachable._enter_tensor),
    ((dict, list, set, collections.deque), Reachable._enter_container),
    (tuple, lambda found, value: tuple.__iter__(value)),
    (frozenset, lambda found, value: frozenset.__iter__(value)),
    (types.FunctionType, Reachable._enter_function),
    (torch.nn.Module, Reachable._enter_object),
    (type, Reachable._enter_class),
    (types.MethodType, lambda found, method: (method.__self__, method.__func__)),
    ((staticmethod, classmethod), lambda found, method: (method.__func__,)),
    ((property, functools.cached_property), lambda found, value: _functions_of_property(value)),
    (functools.partial, lambda found, partial: (partial.func, partial.args, partial.keywords)),
    (functools._lru_cache_wrapper, Reachable._enter_cache),
    ((torch.Generator, random.Random), Reachable._enter_generator),
    (weakref.ProxyTypes, lambda found, proxy: _referent(proxy)),
)


def _enter_nothing(found: Reachable, value: Any) -> Iterable[Any]:
    return ()


def contents(container: Any) -> Any:
    """A copy, by the methods of the container's builtin class: those of its own class may do anything."""
    if isinstance(container, collections.OrderedDict):  # whose order is its own
        return dict(collections.OrderedDict.items(container))
    if isinstance(container, dict):
        return dict(dict.items(container))
    base = next(base for base in (set, list, collections.deque) if isinstance(container, base))
    return (set if base is set else list)(base.__iter__(container))


def refill(owner: Any, held: Any) -> None:
    """Make a container hold these values, by the methods of its builtin class."""
    if isinstance(owner, list):
        list.__setitem__(owner, slice(None), held)
    elif isinstance(owner, collections.OrderedDict):
        collections.OrderedDict.clear(owner)
        for k, v in held.items():
            collections.OrderedDict.__setitem__(owner, k, v)
    elif isinstance(owner, dict):
        dict.clear(owner)
        dict.update(owner, held)
    elif isinstance(owner, set):
        set.clear(owner)
        set.update(owner, held)
    else:
        collections.deque.clear(owner)
        collections.deque.extend(owner, held)


def slots_of(cls: type) -> Iterator[str]:
    """The names of the slots that a class itself declares."""
    slots = vars(cls).get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        if not name.startswith("__"):
            yield name


_slots_of_classes: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _all_slots(cls: type) -> tuple[str, ...]:
    """The names of the slots of a class and its bases, but for those of libraries; found once, as slots are made with the class."""
    found = _slots_of_classes.get(cls)
    if found is None:
        found = tuple(name for base in cls.__mro__ if not is_of_library(base) for name in slots_of(base))
        _slots_of_classes[cls] = found
    return found


def _read_slots(value: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(value, name, _UNBOUND) for name in names}


def _write_slots(value: Any, held: dict[str, Any]) -> None:
    for name, v in held.items():
        if v is not _UNBOUND:
            object.__setattr__(value, name, v)
        elif hasattr(value, name):
            object.__delattr__(value, name)


def _write_attributes(cls: type, read: Callable[[], dict[str, Any]], held: dict[str, Any]) -> None:
    for name in read().keys() - held.keys():
        type.__delattr__(cls, name)
    for name, v in held.items():
        if vars(cls).get(name, _UNBOUND) is not v:
            type.__setattr__(cls, name, v)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from _codes(c)


@functools.lru_cache(maxsize=10_000)
def _names(code: types.CodeType) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for c in _codes(code) for name in c.co_names))


_STORE_GLOBALS = frozenset({dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]})
_STORE_ATTRIBUTES = frozenset({dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"]})


@functools.lru_cache(maxsize=10_000)
def _stored(code: types.CodeType, opcodes: frozenset[int]) -> frozenset[str]:
    """The names that the code assigns by some instructions: of what may not be there yet."""
    storing = [c for c in _codes(code) if not opcodes.isdisjoint(c.co_code[::2])]
    return frozenset(i.argval for c in storing for i in dis.get_instructions(c) if i.opcode in opcodes)


def _read_globals(variables: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: variables.get(name, _UNBOUND) for name in names}


def _has_globals(variables: dict[str, Any], held: dict[str, Any]) -> bool:
    return all(variables.get(name, _UNBOUND) is v for name, v in held.items())


def _has_attributes(cls: type, held: dict[str, Any], count: int) -> bool:
    """Whether a class has these, and as many attributes as it had with them."""
    attributes = vars(cls)
    return len(attributes) == count and all(attributes.get(name, _UNBOUND) is v for name, v in held.items())


def _write_globals(variables: dict[str, Any], held: dict[str, Any]) -> None:
    for name, v in held.items():
        if v is not _UNBOUND:
            variables[name] = v
        else:
            variables.pop(name, None)


def _read_cell(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


def _write_cell(cell: types.CellType, held: tuple[Any, ...]) -> None:
    if held:
        (cell.cell_contents,) = held
    else:
        del cell.cell_contents


def ways_to(roots: dict[str, Any]) -> dict[int, tuple[tuple[str, Any], ...]]:
    """By identity, a way to each value that some roots hold: the root's name, then attributes and keys."""
    found: dict[int, tuple[tuple[str, Any], ...]] = {}
    pending = collections.deque((value, ((name, None),)) for name, value in roots.items())
    while pending:
        value, way = pending.popleft()
        if isinstance(value, torch.Tensor):
            own = getattr(value, "__dict__", {}).items()
            pending.extend((v, (*way, ("attribute", n))) for n, v in own if not isinstance(v, torch.Tensor))
            continue
        if isinstance(value, (type, *ATOMS)) or id(value) in found:
            continue
        found[id(value)] = way
        if isinstance(value, dict):
            pending.extend((v, (*way, ("item", k))) for k, v in dict.items(value) if type(k) in (str, int))
        elif isinstance(value, list | tuple | collections.deque):
            base = next(base for base in (list, tuple, collections.deque) if isinstance(value, base))
            pending.extend((v, (*way, ("item", i))) for i, v in enumerate(base.__iter__(value)))
        if isinstance(value, types.ModuleType | types.FunctionType):
            continue
        own = getattr(value, "__dict__", None)
        names = [*own] if type(own) is dict else []
        names += [n for cls in type(value).__mro__ if not is_of_library(cls) for n in slots_of(cls) if hasattr(value, n)]
        pending.extend((own[n] if type(own) is dict and n in own else getattr(value, n), (*way, ("attribute", n))) for n in names)
    return found
