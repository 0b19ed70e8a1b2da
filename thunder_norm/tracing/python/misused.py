"""What Python raises an error for, and Thunder lets pass, asserts or fails at.

``f(*5)``, a call of what is no function, ``len()``, ``isinstance(x, 5)``, ``exec("1 +")``.
"""

from __future__ import annotations

import dis
import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from thunder_norm.errors import ThunderNormError
from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.lookasides import look_up
from thunder_norm.tracing.replacement import Replacement
from thunder_norm.tracing.torch_functions import class_members
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterStack, Py_NULL, WrappedValue, do_raise, wrap_const
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy

_handlers = thunders._default_opcode_handler_map
_thunders_call_ex = _handlers["CALL_FUNCTION_EX"]
_thunders_unpack_ex, _thunders_delete_global = _handlers["UNPACK_EX"], _handlers["DELETE_GLOBAL"]
_thunders_load_name = _handlers["LOAD_NAME"]
_EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED
_WITH_NAMES = 1
_FUNCTION_BELOW = (
    2 if "CALL_KW" in dis.opmap else 1
)  # where the function is, counted from its arguments: a null is between from Python 3.13 on


def _delete_global(inst: dis.Instruction, /, **state: Any) -> Any:
    result = _thunders_delete_global(inst, **state)
    ctx = thunders.get_interpreterruntimectx()
    if result is _EXCEPTION_RAISED and isinstance(ctx.curexc, KeyError):
        ctx.curexc = None
        return do_raise(NameError(f"name {inst.argval!r} is not defined", name=inst.argval))
    return result


def _load_name(inst: dis.Instruction, /, **state: Any) -> Any:
    """A name in the body of a class, or in text that is run; Thunder's error has other words than Python's."""
    result = _thunders_load_name(inst, **state)
    ctx = thunders.get_interpreterruntimectx()
    if result is _EXCEPTION_RAISED and type(ctx.curexc) is NameError and str(ctx.curexc).startswith("name="):
        ctx.curexc = None
        return do_raise(NameError(f"name {inst.argval!r} is not defined", name=inst.argval))
    return result


def _unpack_ex(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
    """``a, *b = values``, which raises a StopIteration in Thunder where there are too few."""
    assert inst.arg is not None
    values = stack.getitem_wrapped(-1)
    if not isinstance(values.value, Iterable) and not hasattr(type(values.value), "__getitem__"):
        return do_raise(TypeError(f"cannot unpack non-iterable {type(values.value).__name__} object"))
    found = thunders._interpret_call(_enough, values, wrap_const((inst.arg & 0xFF) + (inst.arg >> 8)))
    if found is _EXCEPTION_RAISED:
        return found
    stack.pop_wrapped()
    stack.append(found)
    return _thunders_unpack_ex(inst, stack=stack, **state)


def _enough(values: Iterable, fewest: int) -> Any:
    found = values if type(values) in (list, tuple) else list(values)
    if len(found) < fewest:
        raise ValueError(f"not enough values to unpack (expected at least {fewest}, got {len(found)})")
    return found


def _call_ex(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
    assert inst.arg is not None
    place = 2 if inst.arg & _WITH_NAMES else 1
    args, wrapped = stack.getitem_wrapped(-place).value, stack.getitem_wrapped(-place - _FUNCTION_BELOW)
    fn = wrapped.value
    if place == 2 and not all(isinstance(name, str) for name in stack.getitem_wrapped(-1).value):
        return do_raise(TypeError("keywords must be strings"))
    if not isinstance(args, Iterable):
        return do_raise(TypeError(f"{_shown(fn)} argument after * must be an iterable, not {type(args).__name__}"))
    if isinstance(fn, TensorProxy):  # which says nothing of calls; its class may
        method = class_members.call_of(wrapped)
        if method is _EXCEPTION_RAISED:
            return method
        stack[-place - _FUNCTION_BELOW] = method
    elif (error := not_callable(fn)) is not None:
        return do_raise(error)
    return _thunders_call_ex(inst, stack=stack, **state)


def called_shown(stack: InterpreterStack, place: int) -> str:
    """The function of a call by ``*`` and ``**`` as Python writes it into errors; its arguments are at `place`, counted from the top."""
    return _shown(stack.getitem_wrapped(-place - _FUNCTION_BELOW).value)


def _shown(fn: Any) -> str:
    """A function as Python writes it into errors."""
    name = getattr(fn, "__qualname__", None)
    if name is None:
        return str(fn)
    module = getattr(fn, "__module__", None)
    return f"{name}()" if module in (None, "builtins") else f"{module}.{name}()"


def lookaside(fn: Any) -> Callable | None:
    """What to call instead of something that cannot be called."""
    error = not_callable(fn)
    return None if error is None else lambda *_, **__: do_raise(error)


def not_callable(fn: Any) -> TypeError | None:
    """The error of Python's for a call of `fn`, if it cannot be called."""
    if callable(fn):
        return None
    kind = fn.python_type if isinstance(fn, NumberProxy) else type(fn)
    return TypeError(f"{kind.__name__!r} object is not callable")


# Functions that Thunder, or we, have something to call instead of, and whether that fails as they do where it is given as many arguments.
_REFUSING = {
    **dict.fromkeys(
        (len, next, getattr, setattr, type, enumerate, zip, globals, locals, operator.concat, operator.iconcat), False
    ),
    **dict.fromkeys((isinstance, issubclass, hasattr, super, exec, eval), True),
}
_RUNNING = (exec, eval)
_SOURCES = (str, bytes, bytearray, memoryview, CodeType)


def refusing(fn: Any, instead: Any) -> Any:
    """What is called instead of a function of Python's, with the errors of that one for arguments that it does not take."""
    if not callable(instead) or look_up(_REFUSING, fn) is None:
        return instead
    return functools.partial(_called, fn, instead)


def _called(fn: Callable, instead: Callable, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    if fn is zip:
        error = late_error(fn, args, kwargs)
    else:
        error = _of_first(fn, args[0].value) if args else _of_none(fn)
    if error is not None:
        return do_raise(error)
    try:
        return instead(*args, **kwargs)
    except ThunderNormError:
        raise
    except (TypeError, ValueError, SyntaxError) as e:
        fits = _fits(instead, args, kwargs)
        if fits and not _REFUSING[fn]:
            raise
        return do_raise(e if fits else _natively(fn, args, kwargs) or e)


def _of_first(fn: Callable, value: Any) -> TypeError | None:
    """The error of a first argument that is looked at later, or never."""
    if fn in _RUNNING and not isinstance(value, _SOURCES):
        return TypeError(f"{fn.__name__}() arg 1 must be a string, bytes or code object")
    if fn is not enumerate or _is_iterable(value):
        return None
    return TypeError(f"{type(value).__name__!r} object is not iterable")


def _of_none(fn: Callable) -> RuntimeError | None:
    """The error of ``super()`` in a function that takes no argument, or has it no more; Thunder takes any variable for the object."""
    if fn is not super:
        return None
    frame = thunders.get_interpreterruntimectx().frame_stack[-1]
    if not frame.code.co_argcount:
        return RuntimeError("super(): no arguments")
    return RuntimeError("super(): arg[0] deleted") if isinstance(frame.localsplus[0], Py_NULL) else None


def _is_iterable(value: Any) -> bool:
    if isinstance(value, Proxy):
        return not isinstance(value, NumberProxy)
    return any(in_classes(type(value).__mro__, name, None) is not None for name in ("__iter__", "__getitem__"))


def late_error(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> TypeError | None:
    """The error of a function that makes an iterator, whose arguments what is called instead looks at when it is asked for an item."""
    if all(a.value is None or callable(a.value) or _is_iterable(a.value) for a in args):
        return None
    return _natively(fn, args, kwargs)


def _fits(instead: Callable, args: tuple, kwargs: dict) -> bool:
    try:
        inspect.signature(instead).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _natively(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> TypeError | None:
    """What a function says of so many arguments, before it does anything."""
    try:
        fn(*(a.value for a in args), **{name: a.value for name, a in kwargs.items()})
    except TypeError as e:
        return e
    return None


REPLACEMENTS = (
    Replacement(_handlers, "DELETE_GLOBAL", _delete_global, "_delete_global_handler: frame_globals.__delitem__(name)"),
    Replacement(_handlers, "LOAD_NAME", _load_name, '_load_name_handler: NameError(f"{name=} is not defined")'),
    Replacement(_handlers, "UNPACK_EX", _unpack_ex, "_unpack_ex_handler: results.append(next(it))"),
    Replacement(_handlers, "CALL_FUNCTION_EX", _call_ex, "_call_function_ex_handler: assert wrapped_isinstance(args, Iterable)"),
)
