"""Numbers that ``.item()`` makes, where Python asks what they are and not how large: classes, attributes, keys.

Thunder has a proxy for such a number, which is no ``float``, has a hash of its own, and none of a number's methods.  Of what depends on the
number itself the program is told for the call at hand, and the trace is for it (`reading`).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.data_sizes import UnknownValueError
from thunder_norm.tracing import standard_library
from thunder_norm.tracing.guarding.changing_numbers import REFLECTED, ChangingNumbers
from thunder_norm.tracing.guarding.value_kinds import is_number_of_tensors
from thunder_norm.tracing.lookasides import look_up
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent
from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    wrap,
    wrap_const,
)
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import Symbol

_OF_THUNDER = ("thunder.core.interpreter", "thunder.core.jit_ext")
# what hashes what it is given at a place; -1 for all of it
_HASHING: dict[Any, int] = {
    hash: 0,
    **{
        getattr(kind, name): 1
        for kind in (dict, OrderedDict)
        for name in ("__getitem__", "__setitem__", "__delitem__", "__contains__", "get", "pop", "setdefault")
    },
    **{kind.__contains__: 1 for kind in (set, frozenset)},
    **{getattr(set, name): 1 for name in ("add", "remove", "discard")},
    **dict.fromkeys(
        (set, frozenset, set.__init__, set.update, set.union, set.intersection, set.difference, frozenset.__new__), -1
    ),
}
_COUNTING = (
    itertools.repeat,
    itertools.islice,
    itertools.count,
    itertools.combinations,
    itertools.permutations,
    itertools.product,
)
# what takes a number at a place: how many, where, from where on
_TAKING: dict[Any, int] = {
    **dict.fromkeys((*_COUNTING, itertools.combinations_with_replacement), -1),
    **dict.fromkeys((dir, enumerate, deque, pow, divmod, bytes, bytearray, range.__contains__, deque.__init__, torch.Size), -1),
    **{getattr(list, name): 1 for name in ("pop", "insert", "__delitem__", "__setitem__", "__mul__", "__rmul__", "__imul__")},
    **dict.fromkeys(standard_library.AT_PLACES, 1),
    **{getattr(tuple, name): 1 for name in ("__mul__", "__rmul__")},
}
# what their methods in C take a number for, it is for what it is
_OF_VALUES = (str, bytes, bytearray, int, float, complex, slice)
# packages whose functions in C take it so
_OF_FUNCTIONS_OF_VALUES = frozenset(
    "_struct _json _decimal decimal _datetime datetime time binascii zlib numpy _random random".split()
)
_OPERATORS = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")},
    **{f"{name}": getattr(operator, name) for name in ("lshift", "rshift", "pos")},
    **{name: getattr(operator, f"{name}_") for name in ("and", "or")},
    "xor": operator.xor,
}
_ARITHMETIC: dict[int, Callable] = {
    id(method): function
    for name, function in _OPERATORS.items()
    for r in ("", "r")
    if (method := getattr(NumberProxy, f"__{r}{name}__", None)) is not None
}
_ALWAYS = (operator.floordiv, operator.mod, operator.pow)  # whatever the number is
_OF_TENSORS = (*_ALWAYS, operator.sub, operator.truediv)  # which Thunder has not with a number on the left
_OF_INTEGERS = (operator.truediv, operator.pos, operator.matmul)


def lookaside(
    acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]
) -> Callable | None:
    """What to call instead of `fn`, which asks for more than the proxy of a number among its arguments knows; None for all others."""
    if not args and not kwargs:
        return None
    if (operation := _ARITHMETIC.get(id(fn))) is not None:
        return _arithmetic(acquisition, operation, fn, [a.value for a in args])
    first = args[0].value if args else None
    if (
        is_number_of_tensors(first)
        and (fn is isinstance or fn is type or fn is getattr or fn is hasattr)
        and not _is_asked_by_thunder()
    ):
        if fn is isinstance and len(args) == 2:
            return lambda of, classes: wrap_const(isinstance(of.value.python_type(), classes.value))
        if fn is type and len(args) == 1:
            return lambda of: wrap_const(of.value.python_type)
        if fn is getattr and args[1].value == "__class__":
            return lambda of, *_: wrap_const(of.value.python_type)
        if (fn is getattr or fn is hasattr) and not (_is_special(args[1].value) and hasattr(NumberProxy, args[1].value)):
            return functools.partial(_call_with_known, acquisition, fn, 0)
        return None
    if fn is getattr:  # half of all calls
        return None
    place: Any = look_up(_HASHING, fn)
    if place is None:
        place = _place_of_number(fn)
    if place is None:
        return None
    looked_at = (*args, *kwargs.values()) if place < 0 else args[place : place + 1]
    return (
        functools.partial(_call_with_known, acquisition, fn, place) if any(_holds_unknown(a.value) for a in looked_at) else None
    )


def _is_special(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("__") and name.endswith("__")


def _place_of_number(fn: Any) -> int | None:
    """Where a function in C takes a number for what it is, be it in a list; -1 for anywhere, None for functions that know such a number, or keep it."""
    if isinstance(fn, FunctionType | MethodType | Symbol):  # interpreted, or Thunder's
        return None
    if (place := look_up(_TAKING, fn)) is not None:
        return place
    if getattr(fn, "__objclass__", None) in _OF_VALUES:
        return -1
    module = getattr(fn, "__module__", None) or type(fn).__module__
    return -1 if module.partition(".")[0] in _OF_FUNCTIONS_OF_VALUES else None


def _arithmetic(acquisition: Acquisition, operation: Callable, fn: Callable, values: list[Any]) -> Callable | None:
    """Arithmetic with a number that Thunder has not, or has another for: of an integer and a fraction, of a number and a list."""
    if not any(map(is_number_of_tensors, values)):
        return None
    kinds = {v.python_type if isinstance(v, NumberProxy) else type(v) for v in values}
    if any(isinstance(v, TensorProxy) for v in values):
        is_known = operation in _OF_TENSORS and (kinds != {float, TensorProxy} or operation in _ALWAYS)
        return functools.partial(_operated, acquisition, operation, fn) if is_known else None
    if not kinds <= {int, float, bool, complex}:
        return functools.partial(_operated, acquisition, operation, fn)
    if len(kinds) == 1 and operation not in _OF_INTEGERS:
        return None
    recorded = ChangingNumbers(set(), acquisition.refuse, acquisition.ask).recorded(fn, values)
    return recorded or functools.partial(_operated, acquisition, operation, fn)


def _operated(acquisition: Acquisition, operation: Callable, fn: Callable, *args: WrappedValue) -> Any:
    """What the operation is of known numbers."""
    is_reflected = getattr(fn, "__name__", "") in REFLECTED
    return _call_with_known(acquisition, operation, -1, *(args[::-1] if is_reflected else args))


def _is_asked_by_thunder() -> bool:
    """Whether the function that is interpreted is one of the interpreter's own, that looks for an operator's method."""
    frame = get_interpreterruntimectx().peek_frame_stack()
    return frame is not None and frame.module in _OF_THUNDER


def _holds_unknown(value: Any) -> bool:
    if type(value) is slice:
        value = (value.start, value.stop, value.step)
    elif type(value) is dict:
        value = list(value.values())
    return is_number_of_tensors(value) or (type(value) in (list, tuple) and any(map(_holds_unknown, value)))


def known(acquisition: Acquisition, value: Any) -> Any:
    """A value in which numbers stand for such proxies, also in lists, tuples, dicts and slices.

    Raises:
        UnknownValueError: the number cannot be computed.
    """
    if is_number_of_tensors(value):
        return acquisition.ask(torch.Tensor.item, [value])
    if not _holds_unknown(value):
        return value
    if type(value) is slice:
        return slice(*(known(acquisition, v) for v in (value.start, value.stop, value.step)))
    if type(value) is dict:
        return {k: known(acquisition, v) for k, v in value.items()}
    return type(value)(known(acquisition, v) for v in value)


def known_or_refused(acquisition: Acquisition, value: Any) -> Any:
    """The same for a key.

    Raises:
        DataDependentError: the number cannot be computed.
    """
    try:
        return known(acquisition, value)
    except UnknownValueError as e:
        raise acquisition.refuse(data_dependent("a key", why=str(e))) from e


def _call_with_known(acquisition: Acquisition, fn: Callable, place: int, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    def told(a: WrappedValue) -> WrappedValue:
        if not _holds_unknown(a.value):
            return a
        return wrap(known(acquisition, a.value), provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[a.provenance]))

    try:
        filled = [told(a) if place in (-1, i) else a for i, a in enumerate(args)]
        named = {name: told(a) if place == -1 else a for name, a in kwargs.items()}
    except UnknownValueError as e:
        return do_raise(acquisition.refuse(data_dependent("a key, or what a number knows of itself", why=str(e))))
    return _interpret_call(fn, *filled, **named)
