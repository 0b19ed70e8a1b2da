"""How objects that a program makes and hands out, in its result or in a place of the user's, are made anew by the epilogue in each call.

Thunder's interpreter runs Python, so an object that the program makes (a cache of keys and values) exists once, and holds what stands for
tensors.  A `Recipe` says how to make one like it from the tensors of a call: an instance of the class without running its ``__init__``, with
what it holds, one object at two places being one again.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import logging
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from thunder_norm.model_state.reachable import ATOMS as _VALUES
from thunder_norm.model_state.reachable import Reachable, contents, is_of_library, refill, slots_of
from thunder_norm.subclass.backward import made_by_c
from thunder_norm.tracing.guarding.snapshots import is_place
from thunder_norm.tracing.torch_functions import tensor_attributes
from thunder_norm.tracing.translation import for_torch
from thunder.core.baseutils import ProxyInterface
from thunder.core.proxies import NumberProxy, Proxy, StringProxy

ATOMS = (*_VALUES, type(...), enum.Enum)
_CODE = (type, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ModuleType)
_SHARED = (
    logging.Logger,
    torch.finfo,
    torch.layout,
    torch.memory_format,
)  # alike for every call
# Values that nobody can change: one of a call is as good as one of another.
_CONSTANT = (
    bytes,
    range,
    re.Pattern,
    types.GenericAlias,
    types.UnionType,
    torch.iinfo,
    fractions.Fraction,
    decimal.Decimal,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    pathlib.PurePath,
    uuid.UUID,
    np.generic,
    np.dtype,
)
_HEAP_TYPE = 1 << 9  # in ``__flags__`` of a class: written in Python
CONTAINERS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque)
_BASES = (object, types.SimpleNamespace, *CONTAINERS)


@dataclass
class Call:
    """One call of the program: the values of the proxies, by name, and what has been made so far, by what it is made after."""

    given: dict[str, Any]
    made: dict[int, Any] = field(default_factory=dict)


Step = Callable[[Call], Any]


class NotMakeableError(Exception):
    """A value cannot be made anew; `value` is it."""

    def __init__(self, value: Any):
        super().__init__(type(value).__qualname__)
        self.value = value


def base_of(cls: type) -> type:
    """The most derived base that is not written in Python: what its instances are to C."""
    return next(c for c in cls.__mro__ if c in _BASES or c is tuple or not c.__flags__ & _HEAP_TYPE)


@functools.cache
def _is_written_in_python(cls: type) -> bool:
    """Whether an instance is what its base is, and attributes: `object.__new__` refuses to make one with more in it."""
    try:
        base_of(cls).__new__(cls)
    except TypeError:
        return False
    return True


class OfEachCall:
    """An object of ours that stands for one that torch makes in each call.

    Attributes:
        in_call: that of the call at hand.
        is_made: whether there is one in each call.
        described: what it is, for errors.
    """

    in_call: Any = None
    is_made = True
    described = ""


class Recipe:
    """How to make values anew in each call.

    Args:
        known: identities of what was there before the trace, which stays what it is.
        outside: the proxy of an object that another operation makes, or that an argument holds; None to make it here.
        is_strict: whether to refuse what nobody knows how to make, also if it holds nothing of the call.
    """

    def __init__(self, known: Container[int], outside: Callable[[Any], Proxy | None] = lambda v: None, *, is_strict: bool = True):
        self.known = known
        self.outside = outside
        self.is_strict = is_strict
        self.arguments: dict[str, Proxy] = {}
        self.objects: list[Any] = []  # instances and containers that are made here, and that other values may hold as well
        self._steps: dict[int, Step] = {}

    def of(self, value: Any) -> Step:
        """What makes this value.

        Raises:
            NotMakeableError: it, or what it holds, cannot be made anew.
        """
        if isinstance(value, ProxyInterface):
            return self._argument(value)
        value = for_torch(value)
        if (isinstance(value, ATOMS + _CODE + _SHARED) and type(value) is not tuple) or _is_alike(value) or is_constant(value):
            return lambda call: value
        if id(value) in self._steps:
            return self._steps[id(value)]
        elsewhere = self.outside(value)
        if elsewhere is not None:
            return self._argument(elsewhere)
        if isinstance(value, OfEachCall):
            if not value.is_made:
                raise NotMakeableError(value)
            self.objects.append(value)
            self._steps[id(value)] = lambda call: value.in_call
            return self._steps[id(value)]
        if isinstance(value, tensor_attributes.OwnDict):
            self.objects.append(value)
            owner = self.of(value.tensor)
            return self._once(value, lambda call: vars(owner(call)))
        if isinstance(value, tuple):
            return self._tuple(value)
        if id(value) in self.known:
            return lambda call: value
        if isinstance(value, types.MethodType):
            owner = self.of(value.__self__)
            return lambda call: types.MethodType(value.__func__, owner(call))
        if isinstance(value, functools.partial) and holds_proxies(value):
            function, args, kwargs = self.of(value.func), self.of(value.args), self._named(value.keywords)
            return self._once(value, lambda call: functools.partial(function(call), *args(call), **kwargs(call)))
        if isinstance(value, types.FunctionType) and holds_proxies(value):
            return self.function(value)
        if is_made_by_class(value):
            return self._object(value)
        if (parts := made_by_c.iterator_parts(value)) is not None:
            make, sequence, place = parts
            given = self.of(sequence)
            self.objects.append(value)
            return self._once(value, lambda call: made_by_c.iterated(make, given(call), place))
        if made_by_c.is_exception(value):
            return self._exception(value)
        if made_by_c.is_standing_in(value):
            raise NotMakeableError(value)
        is_shared = isinstance(value, types.FunctionType | frozenset) or not self.is_strict
        if is_shared and not holds_proxies(value):
            return lambda call: value
        raise NotMakeableError(value)

    def _argument(self, p: Any) -> Step:
        if isinstance(p, NumberProxy | StringProxy) and p.value is not None:
            return lambda call: p.value
        self.arguments[p.name] = p
        return lambda call: call.given[p.name]

    def _tuple(self, value: tuple) -> Step:
        cls, items = type(value), list[Step]()
        if cls.__module__ == "torch.return_types":
            step = self._once(value, lambda call: cls([item(call) for item in items]))  # pyright: ignore[reportCallIssue]
        elif base_of(cls) is tuple:
            step = self._once(value, lambda call: _with_attributes(tuple.__new__(cls, [i(call) for i in items]), own, call))
        else:
            raise NotMakeableError(value)
        items += [self.of(v) for v in tuple.__iter__(value)]  # which may hold the tuple
        own = self._named(getattr(value, "__dict__", None) or {})
        return step

    def _exception(self, value: BaseException) -> Step:
        parts = list[Step]()
        self.objects.append(value)
        step = self._once(value, lambda call: made_by_c.exception(value, *[part(call) for part in parts]))
        parts += [self.of(value.args), self._named(vars(value)), self.of((value.__cause__, value.__context__))]
        return step

    def _once(self, value: Any, make: Step) -> Step:
        """What makes a value that cannot be made empty first."""
        key = id(value)

        def step(call: Call) -> Any:
            if key not in call.made:
                made = make(call)
                call.made.setdefault(key, made)  # what it holds may have made it
            return call.made[key]

        self._steps[key] = step
        return step

    @property
    def makes(self) -> Iterable[int]:
        """The identities of the objects that are made here."""
        return self._steps.keys()

    def function(self, value: types.FunctionType) -> Step:
        """A function that the program defines: made with empty cells first, as what it closes over may be the function itself."""
        cells, key = value.__closure__ or (), id(value)

        def step(call: Call) -> Any:
            if key not in call.made:
                new = [(cell, id(cell) not in call.made) for cell in cells]
                closure = tuple([call.made.setdefault(id(cell), types.CellType()) for cell in cells])
                made = call.made[key] = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, closure)
                made.__defaults__, made.__kwdefaults__ = defaults(call), by_name(call) or None
                made.__dict__.update(value.__dict__)
                for cell, is_new in new:
                    if is_new and id(cell) in contents_of:
                        call.made[id(cell)].cell_contents = contents_of[id(cell)](call)
            return call.made[key]

        self._steps[key] = step
        contents_of = {id(cell): self.of(cell.cell_contents) for cell in cells if _is_filled(cell)}
        defaults, by_name = self.of(value.__defaults__), self._named(value.__kwdefaults__ or {})
        return step

    def _named(self, values: dict[str, Any]) -> Step:
        steps = {name: self.of(v) for name, v in values.items()}
        return lambda call: {name: step(call) for name, step in steps.items()}

    def _object(self, value: Any) -> Step:
        """An instance, or a container: made empty first, so that what it holds may hold it."""
        cls, base, key = type(value), base_of(type(value)), id(value)
        parts: dict[str, Any] = {}

        def step(call: Call) -> Any:
            if key not in call.made:
                made = call.made[key] = base.__new__(cls)
                if base is collections.deque:
                    collections.deque.__init__(made, (), value.maxlen)
                if base is collections.defaultdict:
                    made.default_factory = value.default_factory
                _fill(made, {name: part(call) for name, part in parts.items()})
            return call.made[key]

        self._steps[key] = step
        if cls not in (list, dict):  # a trace writes these down itself
            self.objects.append(value)
        if base in CONTAINERS:
            parts["contents"] = self._contents(value)
        own = getattr(value, "__dict__", None)
        if type(own) is dict:
            parts["attributes"] = self._contents(own)
        if slots := _in_slots(value):
            parts["slots"] = self._contents(slots)
        return step

    def _contents(self, container: Any) -> Step:
        held = contents(container)
        if isinstance(held, dict):
            pairs = [(self.of(k), self.of(v)) for k, v in held.items()]
            return lambda call: {k(call): v(call) for k, v in pairs}
        items, kind = [self.of(v) for v in held], type(held)
        return lambda call: kind(item(call) for item in items)


def attributes_of(value: Any) -> dict[str, Any]:
    """What an instance has for attributes of its own."""
    own = getattr(value, "__dict__", None)
    return (own if type(own) is dict else {}) | _in_slots(value)


def _in_slots(value: Any) -> dict[str, Any]:
    return {n: getattr(value, n) for c in type(value).__mro__ for n in slots_of(c) if hasattr(value, n)}


def _is_alike(value: Any) -> bool:
    """Whether a value is one that never changes, so that which one of equal ones it is makes no difference."""
    if type(value) is frozenset:
        return all(isinstance(v, ATOMS) for v in value)
    return is_place(value)


def is_constant(value: Any) -> bool:
    """Whether a value is of a class of Python's or NumPy's whose instances never change, and that Thunder's traces cannot write down."""
    if type(value) is frozenset:
        return _is_alike(value)
    is_record = isinstance(value, np.void)  # which can be written into
    return isinstance(value, _CONSTANT) and is_of_library(type(value)) and not is_record


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading an empty one is an error
    except ValueError:
        return False
    return True


def _with_attributes(made: tuple, own: Step, call: Call) -> tuple:
    for name, value in own(call).items():
        object.__setattr__(made, name, value)
    return made


def _fill(made: Any, parts: dict[str, Any]) -> None:
    if "contents" in parts:
        refill(made, parts["contents"])
    if "attributes" in parts:
        made.__dict__.update(parts["attributes"])
    for name, value in parts.get("slots", {}).items():
        object.__setattr__(made, name, value)


def is_made_by_class(value: Any) -> bool:
    """Whether a value is an instance that can be made from its class and what it holds, or a container."""
    cls = type(value)
    is_of_interpreter = cls.__module__.partition(".")[0] == "thunder"
    if is_of_interpreter or isinstance(value, torch.nn.Module) or base_of(cls) not in _BASES:
        return False
    if not _is_written_in_python(cls):
        return False
    is_known = cls in _BASES or cls.__module__ == "collections" or dataclasses.is_dataclass(value)
    return is_known or not is_of_library(cls) or holds_proxies(value)


class _Proxies(Reachable):
    """What stands for tensors in some values."""

    def __init__(self, roots: Iterable[Any]):
        self.found: list[Any] = []
        super().__init__(roots)

    def _way_into(self, cls: type) -> Any:
        if issubclass(cls, (ProxyInterface, FakeTensor, OfEachCall)):
            return _Proxies._enter_found
        if cls.__module__ == "thunder.core.interpreter":  # what stands for an iterator
            return lambda found, value: [*getattr(value, "__dict__", {}).values()]
        return super()._way_into(cls)

    def _enter_found(self, value: Any) -> Any:
        self.found.append(value)
        return ()


def holds_proxies(value: Any) -> bool:
    """Whether anything that stands for a value of the call can be reached from `value`."""
    return bool(_Proxies([value]).found)
