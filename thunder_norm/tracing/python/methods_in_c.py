"""Calls of methods in C of an object (``stream.write``), which the interpreter takes for calls of a function of its class with the object."""

from __future__ import annotations

from types import BuiltinMethodType, MethodDescriptorType, MethodWrapperType, ModuleType, WrapperDescriptorType
from typing import Any

from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import WrappedValue, unwrap, wrap_const

_original_dispatch = thunders._call_dispatch
_EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED


def call_dispatch(compilectx: Any, runtimectx: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method in C as Thunder does, and leave all else to it."""
    called = unwrap(fn)
    if not isinstance(called, BuiltinMethodType | MethodWrapperType):
        return _original_dispatch(compilectx, runtimectx, fn, *args, **kwargs)
    obj = called.__self__
    if (
        obj is None
        or isinstance(obj, type | ModuleType)
        or thunders.is_pycapsule(obj)
        or (unbound := _unbound(called, obj)) is None
    ):
        return _original_dispatch(compilectx, runtimectx, fn, *args, **kwargs)
    owner = thunders._interpret_call(getattr, fn if isinstance(fn, WrappedValue) else wrap_const(fn), wrap_const("__self__"))
    return owner if owner is _EXCEPTION_RAISED else thunders._interpret_call(wrap_const(unbound), owner, *args, **kwargs)


def _unbound(method: Any, obj: Any) -> Any:
    """The function of a class that a method is, which another class may have under the same name (``super().append``).

    Thunder binds it to the object without its class: that of a class that a module in C makes when it is imported, as all of `io`
    from Python 3.12 on, reads where nothing is then, and the process ends.
    """
    kind, name = type(obj), method.__name__
    for base in kind.mro()[1:]:
        found = getattr(base, name, None)
        if isinstance(found, WrapperDescriptorType | MethodDescriptorType) and found.__get__(obj, kind) == method:
            return found
    return getattr(kind, name, None)


REPLACEMENTS = (
    Replacement(thunders, "_call_dispatch", call_dispatch, "_call_dispatch: unbound_fn_candidate.__get__(slf) == fn"),
)
