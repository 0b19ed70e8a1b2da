"""Special methods that functions in C call of the program's objects: ``x[i]``, ``range(n)``, ``round(o)``, ``hash(o)``, ``math.fsum(o)``.

Thunder calls these functions natively, so that nothing guards what the methods read: the number is asked for by the interpreter, before.
"""

from __future__ import annotations

import cmath
import functools
import math
import operator
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, GenericAlias
from typing import Any, NewType, is_typeddict

import torch

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import LIBRARIES, in_classes
from thunder_norm.tracing.lookasides import look_up
from thunder_norm.tracing.torch_functions.tensor_classes import own_operator
from thunder.core import interpreter as thunders
from thunder.core.interpreter import WrappedValue, make_opaque, wrap_const
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.torch import _torch_to_thunder_function_map

# Functions of an object, and the method that each calls with the other arguments.
_OF_AN_OBJECT: dict[Callable, str] = {
    abs: "__abs__",
    bytes: "__bytes__",
    dir: "__dir__",
    divmod: "__divmod__",
    hash: "__hash__",
    math.ceil: "__ceil__",
    math.floor: "__floor__",
    math.trunc: "__trunc__",
    pow: "__pow__",
    round: "__round__",
}
_REFLECTED = {divmod: "__rdivmod__", pow: "__rpow__"}
_OF_A_NUMBER: dict[Callable, str] = {
    bool: "__bool__",
    complex: "__complex__",
    float: "__float__",
    int: "__int__",
    operator.index: "__index__",
}
_OF_INTEGERS = frozenset({math.comb, math.factorial, math.gcd, math.isqrt, math.lcm, math.perm, range, bin, chr, hex, oct})
_OF_ITERABLES = frozenset({math.fsum, math.prod, getattr(math, "sumprod", math.prod), math.dist})
_SEQUENCES = (list, tuple, str, bytes, range)
_BY_INDEX = frozenset(vars(kind)["__getitem__"] for kind in _SEQUENCES) | {operator.getitem, operator.setitem, list.__setitem__}
_MATH = frozenset(f for module in (math, cmath) for f in vars(module).values() if isinstance(f, BuiltinFunctionType))
_BY_NUMBER = {kind.__getitem__ for kind in (str, bytes, bytearray, range)} | {bytes, bytearray}
_NOT_OF_TENSORS = ("__round__", "__trunc__")  # which have none of their own, and no number is asked for
_OF_TENSORS = ("__getitem__", "__setitem__")  # of operators of tensors, others ask the object for its reflected method


def lookaside(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, if it would call such a method of a user's class; None for all others."""
    if isinstance(fn, GenericAlias):
        return lambda *given, **named: thunders._interpret_call(
            _of_alias, wrap_const(fn), wrap_const(fn.__origin__), *given, **named
        )
    if isinstance(fn, NewType):
        return lambda value: value
    if isinstance(fn, type) and is_typeddict(fn):
        return lambda *given, **named: thunders._interpret_call(dict, *given, **named)
    if not args:
        return None
    if fn is hasattr and isinstance(args[0].value, TensorProxy) and args[1].value == "__contains__":
        return lambda *_: wrap_const(True)  # Thunder's tensors have none, and it would look at one row after the other
    if fn is operator.contains and isinstance(args[0].value, TensorProxy):
        return lambda *given: thunders._interpret_call(lambda container, value: value in container, *given)
    if isinstance(fn, FunctionType):
        return None
    if fn is reversed and (turned := own_operator(args[0], "__reversed__")) is not None:
        return lambda x: thunders._interpret_call(wrap_const(turned), x)
    if fn is callable and own_operator(args[0], "__call__") is not None:
        return lambda _: wrap_const(True)
    if (found := _of_own_class(fn, args)) is not None:
        return found
    name = look_up(_OF_AN_OBJECT, fn)
    method = None if name is None else _own(type(args[0].value), name)
    if (
        name is not None
        and method is None
        and (of_tensor := own_operator(args[0], name)) not in (None, getattr(torch.Tensor, name, None))
    ):
        return lambda *given: thunders._interpret_call(wrap_const(of_tensor), *given)
    if method is not None and not kwargs:
        guards.note_attribute(args[0], name)
        return lambda *given: thunders._interpret_call(_called, wrap_const(fn), wrap_const(method), *given)
    if name in _NOT_OF_TENSORS and isinstance(args[0].value, TensorProxy) and not hasattr(torch.Tensor, name):
        return lambda *_, **__: thunders.do_raise(TypeError(f"type Tensor doesn't define {name} method"))
    written = _written_out(fn, (*args, *kwargs.values()))
    if written is not None:
        return lambda *given, **named: thunders._interpret_call(written, *given, **named)
    number = _number_for(fn, args)
    if number is not None:
        return lambda *given, **named: thunders._interpret_call(_of_numbers, wrap_const(fn), wrap_const(number), *given, **named)
    asked = _asked_for(fn)
    if asked is None or not any(_holds(v, asked) for v in (*args, *kwargs.values())):
        return None
    convert = _listed if asked == "__iter__" else functools.partial(_as_numbers, asked)
    new = [_converted(a, asked, convert) for a in args]
    named = {k: _converted(v, asked, convert) for k, v in kwargs.items()}
    failed = next((v for v in (*new, *named.values()) if v is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED), None)
    return lambda *_, **__: failed or thunders._interpret_call(fn, *new, **named)


def _of_own_class(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call for a number that the class of a tensor makes of it, or that stands left of one: ``bool(x)``, ``divmod(2, x)``."""
    converts = look_up(_OF_A_NUMBER, fn)
    if converts is not None and len(args) == 1 and (method := own_operator(args[0], converts)) is not None:
        return lambda x: thunders._interpret_call(_made_by, wrap_const(fn), wrap_const(converts), wrap_const(method), x)
    reflected = look_up(_REFLECTED, fn)
    is_of_number = reflected is not None and len(args) == 2 and isinstance(args[0].value, int | float | complex)
    if is_of_number and (method := own_operator(args[1], reflected)) is not None:
        return lambda a, b: thunders._interpret_call(wrap_const(method), b, a)
    return None


def _number_for(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What a function of numbers makes of the tensors that it is given, of ``math`` and its like; None for all others.

    Thunder takes it for an operation on tensors, and what it says of random ones for the number.
    """
    if look_up(_NUMBERED, fn) is None or not any(_is_of_tensors(v) for a in args for v in _parts(a)):
        return None
    return operator.index if fn in _OF_INTEGERS or fn in _BY_NUMBER else complex if fn.__module__ == "cmath" else float


def _written_out(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """Products in Python, which of tensors are tensors."""
    written = look_up(_WRITTEN_OUT, fn)
    return written if written is not None and any(_is_of_tensors(v) for a in args for v in _parts(a)) else None


def is_compared_by_own_method(fn: Any) -> bool:
    """Whether what is called is an object whose class says what it is equal to: it is looked for in no table."""
    return _own(type(fn), "__eq__") is not None


def _asked_for(fn: Callable) -> str | None:
    """The method that `fn` calls of objects that stand for its arguments."""
    if isinstance(fn, Symbol):
        return "__index__" if not fn.name.startswith("__") or fn.name in _OF_TENSORS else None
    try:
        if fn in _OF_INTEGERS or fn in _BY_INDEX:
            return "__index__"
        if fn in _OF_ITERABLES:
            return "__iter__"
        if fn in _MATH:
            return "__float__"
    except TypeError:  # not hashable
        return None
    name = getattr(fn, "__name__", "")
    if name.startswith("__") and name not in _OF_TENSORS:
        return None
    is_torchs = look_up(_torch_to_thunder_function_map, fn) is not None
    is_torchs = is_torchs or getattr(torch.Tensor, name, None) is fn or getattr(TensorProxy, name, None) is fn
    return "__index__" if is_torchs else None


def _own(kind: type, name: str) -> FunctionType | None:
    """What a class that a user wrote has under the name of a special method."""
    found = in_classes(kind.__mro__, name, None) if _is_users(kind) else None
    return found if isinstance(found, FunctionType) else None


@functools.lru_cache(maxsize=4096)
def _is_users(kind: type) -> bool:
    return not issubclass(kind, Proxy | torch.Tensor) and kind.__module__.partition(".")[0] not in LIBRARIES


def _parts(value: Any) -> Iterator[Any]:
    value = value.value if isinstance(value, WrappedValue) else value
    if type(value) is slice:
        yield from (value.start, value.stop, value.step)
    elif type(value) in (list, tuple):
        for v in value:
            yield from _parts(v)
    else:
        yield value


def _holds(value: Any, name: str) -> bool:
    return any(_own(type(v), name) is not None for v in _parts(value))


def _converted(given: WrappedValue, name: str, convert: Callable) -> Any:
    return thunders._interpret_call(convert, given) if _holds(given, name) else given


# -- interpreted --------------------------------------------------------------------------------------------------------------


def _called(fn: Callable, method: Callable, value: Any, *others: Any) -> Any:
    found = method(value, *others)
    if found is NotImplemented and others:
        a, b = type(value), type(others[0])
        found = getattr(b, _reflected_of(fn))(others[0], value) if a is not b else found
        if found is NotImplemented:
            raise TypeError(f"unsupported operand type(s) for {fn.__name__}(): {a.__name__!r} and {b.__name__!r}")
    return sorted(found) if fn is dir else found


def _made_by(kind: Any, name: str, method: Callable, value: Any) -> Any:
    said = method(value)
    kind = kind if isinstance(kind, type) else int
    if not isinstance(said, kind):
        raise TypeError(f"{name} should return {kind.__name__}, returned {type(said).__name__}")
    return said


def _of_alias(alias: GenericAlias, origin: type, *args: Any, **kwargs: Any) -> Any:
    """What a call of ``list[int]`` does: its class makes the object, which is told if it has room for it."""
    made = origin(*args, **kwargs)
    try:
        made.__orig_class__ = alias
    except (AttributeError, TypeError):
        pass
    return made


def _of_numbers(fn: Callable, number: Callable, *args: Any, **options: Any) -> Any:
    return fn(*[_numbers_in(number, list(a) if _is_iterated(fn, a) else a) for a in args], **options)


def _product(values: Any, /, *, start: Any = 1) -> Any:
    for v in values:
        start = start * v
    return start


def _sum_of_products(p: Any, q: Any, /) -> Any:
    total = 0
    for a, b in zip(p, q, strict=True):
        total = total + a * b
    return total


def _numbers_in(number: Callable, value: Any) -> Any:
    if _is_value_of_tensors(value):
        return number(value)
    if type(value) is slice:
        return slice(_numbers_in(number, value.start), _numbers_in(number, value.stop), _numbers_in(number, value.step))
    return [_numbers_in(number, v) for v in value] if type(value) in (list, tuple) else value


def _listed(values: Any) -> Any:
    return list(values)


def _as_numbers(name: str, value: Any) -> Any:
    if isinstance(value, slice):
        return slice(_as_numbers(name, value.start), _as_numbers(name, value.stop), _as_numbers(name, value.step))
    if type(value) is tuple:
        return tuple([_as_numbers(name, v) for v in value])
    if type(value) is list:
        return [_as_numbers(name, v) for v in value]
    return (float(value) if name == "__float__" else operator.index(value)) if _stands_for_number(value, name) else value


def _is_of_tensors(value: Any) -> bool:
    """Whether it is a tensor, or a number that ``item()`` has made of one."""
    return isinstance(value, TensorProxy) or (isinstance(value, NumberProxy) and value.value is None)


_is_value_of_tensors = make_opaque(_is_of_tensors)


@make_opaque
def _is_iterated(fn: Callable, value: Any) -> bool:
    return fn in _OF_ITERABLES and isinstance(value, TensorProxy) and value.ndim > 0


@make_opaque
def _reflected_of(fn: Callable) -> str:
    return _REFLECTED[fn]


@make_opaque
def _stands_for_number(value: Any, name: str) -> bool:
    return _own(type(value), name) is not None


_WRITTEN_OUT: dict[Callable, Callable] = {math.prod: _product}
if hasattr(math, "sumprod"):
    _WRITTEN_OUT[math.sumprod] = _sum_of_products
_NUMBERED = dict.fromkeys((_MATH | _OF_INTEGERS | _BY_NUMBER) - set(_WRITTEN_OUT), True)
