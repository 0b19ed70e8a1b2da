"""Numbers that are others from call to call: counters, temperatures, what a training loop sets or passes.

Thunder compares each number that a program reads, so that each is a trace of its own.  Where a number is another than when the program was
acquired before, it is acquired for all: the prologue makes a tensor of the number, and the program computes with its item.  Where it does
anything with that but arithmetic, comparisons and keeping it (a size, a key, text), it is acquired as before, for the number itself.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodDescriptorType, MethodType, SimpleNamespace, WrapperDescriptorType
from typing import Any

import torch

from thunder_norm.errors import AcquiredAnewWarning, UnsupportedOpError, with_details
from thunder_norm.tracing.guarding import attempts, guards
from thunder_norm.tracing.guarding.bindable import bindable, executor
from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.guarding.looked_into import TOLD
from thunder_norm.tracing.guarding.value_kinds import is_number_of_tensors
from thunder_norm.tracing.guarding.ways import NUMBER, Path, Ways, is_imported, path_of
from thunder_norm.tracing.lookasides import look_up
from thunder.core import dtypes
from thunder.core.compile_data import _compile_data, get_compile_data
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, _interpret_call, do_raise, wrap, wrap_const
from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, numberproxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, get_tracectx, tracectx
from thunder.core.transforms import register_grad
from thunder.torch import _torch_to_thunder_function_map, item

_SEEN, _THEMSELVES = "_thunder_norm_numbers_seen", "_thunder_norm_numbers_themselves"
_PAUSES = "_thunder_norm_numbers_pause"  # this once, all numbers are what they are
_HAS_WARNED = "_thunder_norm_numbers_has_warned"
_DTYPES: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64}


class _UsedItselfError(UnsupportedOpError):
    """A number that is another in each call is used for what it is."""


@dataclass
class ChangingNumbers:
    """Those of the acquisition at hand.

    Attributes:
        paths: the ways to them.
        refuse: notes an error of the acquisition, and returns it.
        ask: what a function says of some of them, which the trace is for from then on.
    """

    paths: set[Path]
    refuse: Callable[[Exception], Exception]
    ask: Callable[[Callable, list[NumberProxy]], Any]
    _known: dict[Path, NumberProxy] = field(default_factory=dict)
    _found: dict[Path, Any] = field(default_factory=dict)  # which number is there in the call at hand
    _sources: dict[str, frozenset[Path]] = field(default_factory=dict)  # which a number is made of, by its name
    _used: frozenset[Path] = frozenset()  # those that the program has used for what they are

    def give_up(self, cd: Any) -> None:
        """The program is acquired once more, and for the numbers themselves."""
        vars(cd).setdefault(_THEMSELVES, set()).update(self._used or self.paths)
        setattr(cd, _PAUSES, True)

    # -- reading ------------------------------------------------------------------------------------------------------

    def stand_in(self, wrapped: WrappedValue) -> bool:
        """Put something that stands for all numbers in the place of one, if it is among them."""
        origin = wrapped.provenance
        path = path_of(origin)
        if path not in self.paths:
            return False
        value = wrapped.value
        if path not in self._known:
            name = ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=NUMBER)
            held = torch.tensor(value, dtype=_DTYPES[type(value)])
            tensor = wrap(held, provenance=ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[origin, name]))
            self._known[path] = item(tensor.value)
            self._sources[self._known[path].name] = frozenset({path})
            setattr(self._known[path], TOLD, functools.partial(self._refuse, {path}, "it is looked at natively"))
        self._found.setdefault(path, value)
        wrapped.original_value, wrapped.value = value, self._known[path]
        wrapped.provenance = ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[])
        return True

    def check_in_place(self, ways: Ways) -> None:
        """Give up where the program has changed itself what the prologue makes a tensor of, and no epilogue does.

        Raises:
            UnsupportedOpError: it has.
        """
        for path, then in self._found.items():
            now = ways.end(path)
            if type(now) is not type(then) or (now != then and (now == now or then == then)):
                raise self._refuse({path}, "the program changes a number where it stands")

    # -- using --------------------------------------------------------------------------------------------------------

    def lookaside(self, fn: Callable, args: tuple, kwargs: dict, find: Callable[[], Any]) -> Any:
        """What to call instead of a function; None if it is interpreted, or called as it is.

        Args:
            fn: what the program calls.
            args: what it is called with.
            kwargs: the same by name.
            find: what would be called otherwise.
        """
        if not self._sources and not self._containers:
            return find()
        wrapped = (*args, *kwargs.values())
        values = [getattr(a, "value", a) for a in wrapped]
        given = [v for v in values if self._is_one(v)]
        looked_into = slice(1 if look_up(_TAKING_ONE, fn) else 0, None)
        hidden = [v for value in values[looked_into] for v in _parts(value) if self._is_one(v)]
        unread = [p for a in wrapped[looked_into] for p in self._held_in(a)] if self._containers else []
        if not given and not hidden and not unread:
            return find()
        if look_up(_HANDING_ON, fn) or _makes_cell(fn, values):
            return find()
        if not hidden and not unread and not kwargs:
            if fn is isinstance and len(values) == 2 and len(given) == 1 and given[0] is values[0]:
                return functools.partial(_of_class, _kind(values[0]))
            if (recorded := self.recorded(fn, values)) is not None:
                return recorded
            if _may_be_given(fn, values):
                return find()
            if len(args) == 2 and look_up(_OF_TENSORS, fn) and _are_tensors(values):
                return functools.partial(self._with_tensor, fn) if self._converts(values) else find()
        is_pythons = isinstance(fn, FunctionType | MethodType) or isinstance(
            in_classes(type(fn).__mro__, "__call__"), FunctionType
        )
        if is_pythons and not isinstance(fn, Symbol) and find() is None:  # it is interpreted
            return None
        self.note_used(*given, *hidden)
        return lambda *_, **__: do_raise(self._refuse({*unread}, f"{fn} is given a number that is another in each call"))

    def _refuse(self, paths: Iterable[Path], why: str) -> Exception:
        self._used = self._used.union(paths)
        return self.refuse(_UsedItselfError(why))

    def note_used(self, *values: Any) -> bool:
        """Note that values are used for what they are; whether there are numbers of these among them."""
        used = [self._sources[v.name] for v in values if self._is_one(v)]
        self._used = self._used.union(*used)
        return bool(used)

    @functools.cached_property
    def _containers(self) -> dict[Path, list[Path]]:
        """The ways to what holds numbers as items, at any depth, and to those in each: functions in C find the numbers of the call at hand there."""
        found: dict[Path, list[Path]] = {}
        for path in self.paths:
            for i in range(1, len(path)):
                if path[i][0] == "item":
                    found.setdefault(path[:i], []).append(path)
        return found

    def _held_in(self, given: Any) -> Iterable[Path]:
        if not isinstance(given, WrappedValue) or not isinstance(given.value, dict | list | tuple):
            return ()
        path = path_of(given.provenance)
        return () if path is None else self._containers.get(path, ())

    def _converts(self, values: list) -> bool:
        """Whether an integer meets a tensor of floating point, for which Thunder wants to know it: torch converts it."""
        is_of_floats = any(type(v) is TensorProxy and dtypes.is_float_dtype(v.dtype) for v in values)
        return is_of_floats and any(self._is_one(v) and _kind(v) is int for v in values)

    def _with_tensor(self, fn: Callable, *args: WrappedValue) -> Any:
        converted = [
            self._record(float, [a.value], float) if self._is_one(a.value) and _kind(a.value) is int else a for a in args
        ]
        return _interpret_call(wrap_const(fn), *converted)

    def operation(self, name: str, a: WrappedValue, b: WrappedValue) -> Any:
        """``a op b`` with such numbers, of which the interpreter would ask the class first; None for all else.

        Args:
            name: of the operation, as ``add``.
            a: the left operand.
            b: the right one.
        """
        if not (self._is_one(a.value) or self._is_one(b.value)) or name not in _OPERATORS:
            return None
        recorded = self.recorded(_OPERATORS[name][0], [a.value, b.value])
        if recorded is not None:
            return recorded()
        if type(b.value) is TensorProxy and (method := getattr(TensorProxy, f"__r{name}__", None)) in _OF_TENSORS:
            return _interpret_call(wrap_const(method), b, a)
        return None

    def _is_one(self, value: Any) -> bool:
        return isinstance(value, NumberProxy) and value.name in self._sources

    def recorded(self, fn: Callable, values: list) -> Callable | None:
        """What records Python's arithmetic with numbers, if `fn` is of it and the class of its result is known."""
        found = look_up(_ARITHMETIC, fn)
        if found is None or not all(_is_unknown(v) or type(v) in (int, float, bool) for v in values):
            return None
        function, kind_of = found
        operands = values[::-1] if getattr(fn, "__name__", "") in REFLECTED else values
        kind = kind_of(*operands)
        if kind is None:
            return None
        return lambda *_: self._record(function, operands, kind)

    def _record(self, function: Callable, operands: list, kind: type) -> Any:
        """Have the trace call a function of Python's numbers; where that raises, the program is told so."""
        unknown = [v for v in operands if _is_unknown(v)]
        raised: list[Exception] = []

        def error_of(*numbers: torch.Tensor) -> str:
            remaining = iter(numbers)
            try:
                function(*(next(remaining).item() if _is_unknown(v) else v for v in operands))
            except Exception as e:  # noqa: BLE001 - the program's
                raised.append(e)
                return repr(e)
            return ""

        if _may_raise(function, operands) and self.ask(error_of, unknown):
            return do_raise(raised[0])
        result = numberproxy(kind, None)
        get_tracectx().bound_symbols.append(_symbol(function).bind(*operands, output=result))
        self._sources[result.name] = frozenset().union(*(self._sources.get(v.name, ()) for v in unknown))
        return wrap(result, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[]))


def _is_unknown(value: Any) -> bool:
    """Whether it is such a number, or the item of another tensor."""
    return is_number_of_tensors(value) and value.python_type in _DTYPES


def _of_class(kind: type, _: WrappedValue, classes: WrappedValue) -> WrappedValue:
    return wrap_const(isinstance(kind(), classes.value))


def _parts(value: Any) -> Iterator[Any]:
    """What is in a container that is given."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for v in value:
            yield v
            yield from _parts(v)


# -- arithmetic ---------------------------------------------------------------------------------------------------------------


def _kind(value: Any) -> type:
    return value.python_type if isinstance(value, NumberProxy) else int if type(value) is bool else type(value)


def _joint(*values: Any) -> type:
    return int if all(_kind(v) is int for v in values) else float


def _one(*values: Any) -> type | None:
    kinds = {_kind(v) for v in values}
    return kinds.pop() if len(kinds) == 1 and not any(type(v) is bool for v in values) else None


def _of_power(a: Any, b: Any) -> type | None:
    """A power of a negative number may be complex, and one of an integer to a negative one a fraction."""
    if not isinstance(a, NumberProxy):
        return float if type(a) is float and a > 0 else None
    return _kind(a) if type(b) is int and b >= 0 else None


def _may_raise(function: Callable, operands: list) -> bool:
    if function in _DIVIDING:
        return isinstance(operands[1], NumberProxy) or operands[1] == 0
    if function in _CONVERTING:
        return _kind(operands[0]) is float
    return function not in _NEVER_RAISING


def _float(*_: Any) -> type:
    return float


def _int(*_: Any) -> type:
    return int


_OPERATORS: dict[str, tuple[Callable, Callable]] = {
    "add": (operator.add, _joint),
    "sub": (operator.sub, _joint),
    "mul": (operator.mul, _joint),
    "truediv": (operator.truediv, _float),
    "floordiv": (operator.floordiv, _joint),
    "mod": (operator.mod, _joint),
    "pow": (operator.pow, _of_power),
}
REFLECTED = frozenset(f"__r{name}__" for name in _OPERATORS)
_ARITHMETIC: dict[Any, tuple[Callable, Callable]] = {
    **{operator_: of for operator_, of in ((of[0], of) for of in _OPERATORS.values())},
    **{getattr(NumberProxy, f"__{r}{name}__"): of for name, of in _OPERATORS.items() for r in ("", "r")},
    **{fn: (operator.neg, _one) for fn in (operator.neg, NumberProxy.__neg__)},
    **{fn: (operator.pos, _one) for fn in (operator.pos, NumberProxy.__pos__)},
    **{fn: (operator.abs, _one) for fn in (operator.abs, abs, NumberProxy.__abs__)},
    **{fn: (fn, _one) for fn in (max, min)},
    **{fn: (fn, _float) for fn in (float, math.exp, math.log, math.sqrt, math.sin, math.cos, math.tanh)},
    **{fn: (fn, _int) for fn in (int, math.floor, math.ceil)},
}


_DIVIDING = (operator.truediv, operator.floordiv, operator.mod)
_CONVERTING = (int, math.floor, math.ceil)  # which know no infinity
_NEVER_RAISING = (operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs, abs, max, min, float)


@functools.cache
def _symbol(function: Callable) -> Symbol:
    """The operation of a trace that calls a function of Python's numbers."""
    name = f"python_{function.__name__}"

    def with_call_ctx(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {name: function}

    def meta(*args: Any) -> NumberProxy:
        return numberproxy(_ARITHMETIC[function][1](*args), None)

    symbol = Symbol(
        name=name, meta=meta, id=f"thunder_norm.{name}", is_prim=True, executor=executor, _bind_postprocess=with_call_ctx
    )
    register_grad(symbol.id, symbol)
    return symbol


# -- what may be given them ---------------------------------------------------------------------------------------------------

_COMPARING = (operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge)
_OF_PYTHON = [getattr(kind, f"__{r}{name}__") for kind in (int, float) for name in _OPERATORS for r in ("", "r")]
# the last of which say that they know no such number
_ASKING: dict[Any, Any] = dict.fromkeys((bool, operator.truth, operator.not_, *_COMPARING, *_OF_PYTHON), True)
# the last of which make a list of what a call is given, and bind a method, where Thunder's interpreter spells that out
_HANDING_ON: dict[Any, Any] = dict.fromkeys(
    (
        *(torch.nn.Module._wrapped_call_impl, torch.nn.Module._call_impl),
        *(list.extend, MethodDescriptorType.__get__, WrapperDescriptorType.__get__),
    ),
    True,
)
_MAKING: dict[Any, Any] = dict.fromkeys((type.__call__, CellType.__new__, object.__init__), True)
# what takes one thing of a container, or none
_TAKING_ONE: dict[Any, Any] = dict.fromkeys(
    (
        *(
            getattr,
            hasattr,
            isinstance,
            type,
            len,
            dict.get,
            dict.__getitem__,
            dict.__contains__,
            list.__getitem__,
            tuple.__getitem__,
        ),
        *(dict.__setitem__, list.__setitem__, list.append, dict.keys, dict.__len__, dict.__iter__, list.__len__),
    ),
    True,
)
_UNARY = ("__neg__", "__pos__")
_SETTING = (setattr, object.__setattr__, SimpleNamespace.__setattr__, dict.__setitem__, list.__setitem__)
_WITH_TENSORS = (
    *(torch.add, torch.sub, torch.mul, torch.div, torch.true_divide),
    *(torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge),
)
_OPERATORS_OF_TENSORS = [f"__{r}{name}__" for name in ("add", "sub", "mul", "truediv") for r in ("", "r")]
_OF_TENSORS: dict[Any, Any] = {
    known: True
    for fn in (
        *_WITH_TENSORS,
        *(getattr(torch.Tensor, fn.__name__) for fn in _WITH_TENSORS),
        *(getattr(torch.Tensor, name) for name in _OPERATORS_OF_TENSORS),
        *(getattr(TensorProxy, name) for name in _OPERATORS_OF_TENSORS),
    )
    for known in (fn, _torch_to_thunder_function_map.get(fn))
    if known is not None
}


def _may_be_given(fn: Callable, values: list) -> bool:
    if (fn is getattr or fn is hasattr) and len(values) == 2:
        return values[1] in _UNARY
    if fn in _SETTING:
        return len(values) == 3 and not isinstance(values[0], Proxy) and not isinstance(values[1], Proxy)
    if fn is list.append:
        return len(values) == 2
    return bool(look_up(_ASKING, fn))


def _makes_cell(fn: Callable, values: list) -> bool:
    """Whether a variable of a function is put into a cell, which Thunder's interpreter spells out."""
    if look_up(_MAKING, fn):
        return values[0] is CellType or type(values[0]) is CellType
    return fn is CellType


def _are_tensors(values: list) -> bool:
    """Whether they are tensors and numbers alone."""
    return all(type(v) is TensorProxy or isinstance(v, NumberProxy | int | float) for v in values)


# -- one acquisition ----------------------------------------------------------------------------------------------------------


def begin(refuse: Callable[[Exception], Exception], ask: Callable[[Callable, list[NumberProxy]], Any]) -> None:
    """Acquire the program for all numbers that are others than when it was acquired before; see `ChangingNumbers`."""
    cd = get_compile_data()
    found = vars(cd)
    if found.pop(_PAUSES, False):
        return
    seen, themselves = found.get(_SEEN, {}), found.get(_THEMSELVES, set())
    ways = Ways(guards.roots())
    others = {path for path, value in seen.items() if _is_another(ways.end(path), value)}
    _warn_of_many(found, others & themselves)
    changing = others - themselves
    if changing:
        numbers = ChangingNumbers(changing, refuse, ask)
        attempts.begin(functools.partial(numbers.give_up, cd))
        guards.stand_in_for_numbers(numbers)


def _warn_of_many(found: dict[str, Any], used: set[Path]) -> None:
    """Say that a number is used for what it is, once there is a trace for each of so many."""
    _, stats = _compile_data.get()
    if not used or stats is None or len(stats.interpreter_cache) < guards.MAX_TRACES or found.get(_HAS_WARNED):
        return
    found[_HAS_WARNED] = True
    names = sorted({f"{key!r}" if step == "item" else str(key) for step, key in (path[-1] for path in used)})
    warnings.warn(
        with_details(
            f"a number that the program reads ({', '.join(names)}) is another in each of many calls: each was acquired anew",
            why="the program uses it for what it is (a size, a key, text, what a function in C is given), so that each number is another trace",
            instead="a tensor or buffer, where it enters operations; arithmetic and comparisons with the number itself need one trace",
        ),
        AcquiredAnewWarning,
        stacklevel=2,
    )


def note(constraints: Iterable[tuple]) -> None:
    """Note the numbers that a trace is for."""
    seen = vars(get_compile_data()).setdefault(_SEEN, {})
    for c in constraints:
        is_number = len(c) == 3 and isinstance(c[1], Proxy) and type(c[2]) in _DTYPES
        if is_number and (path := _way(c[1])) is not None and type(seen.get(path)) is not type(c[2]):
            seen[path] = c[2]


def _way(p: Proxy) -> Path | None:
    """The way to a number, where a prologue finds it: to what the program imports none goes."""
    path = None if p.history is None else path_of(p.history)
    return None if path is None or is_imported(path) else path


def _is_another(now: Any, then: Any) -> bool:
    return type(now) is type(then) and now != then and (type(now) is float or -(2**63) <= now < 2**63)


def made_tensors(prologue: TraceCtx) -> TraceCtx:
    """The prologue, in which a tensor is made of a number where it looks for one."""
    if not any(map(_looks_for_one, prologue.bound_symbols)):
        return prologue
    new = from_trace(prologue)
    with tracectx(new):
        new.bound_symbols = [
            bindable("tensor_of_number", _MAKERS[b.output.dtype])(b.args[0], output=b.output) if _looks_for_one(b) else b
            for b in prologue.bound_symbols
        ]
    return new


def _looks_for_one(bsym: BoundSymbol) -> bool:
    return bsym.sym.id is PrimIDs.UNPACK_ATTR and bsym.args[1] == NUMBER


def _tensor_of(kind: type, value: Any) -> torch.Tensor:
    if type(value) is not kind:
        raise GuardError(f"a {type(value).__name__} where there was a {kind.__name__} when the trace was acquired")
    try:
        return torch.tensor(value, dtype=_DTYPES[kind])
    except (RuntimeError, OverflowError) as e:
        raise GuardError("a number that is larger than those of the trace") from e


_MAKERS = {dtypes.int64: functools.partial(_tensor_of, int), dtypes.float64: functools.partial(_tensor_of, float)}
