"""``copy.copy`` of a wrapper: another object around the very tensors, lists and objects that the wrapper holds."""

from __future__ import annotations

import copy
from typing import Any

from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.backward.users_attributes import DATA
from thunder_norm.subclass.classes.protocol import beside_parts
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.interpreting.operations import operation_of
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, _interpret_call, wrap_const


def another(acquisition: Acquisition, x: WrappedValue) -> Any:
    """Called where torch makes another object of what a wrapper holds, with no operation.

    What the fake of an input holds are copies of its lists and objects; so these are set again, as the program finds them.
    """
    copied = operation_of(acquisition, copy.copy)(x)
    held = _held(acquisition, x.value)
    if copied is INTERPRETER_SIGNALS.EXCEPTION_RAISED or not held:
        return copied
    return _interpret_call(_with_held, copied, x, wrap_const(held))


def _with_held(copied: Any, x: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        object.__setattr__(copied, name, getattr(x, name))
    return copied


def _held(acquisition: Acquisition, proxy: SubclassProxy) -> tuple[str, ...]:
    """The attributes of a wrapper that are neither data nor the tensors that it is put together of."""
    real = acquisition.fakes.real_input(proxy)
    are_set = acquisition.wrappers.attributes.get(id(proxy.fake), ())
    given = {} if real is None else {name: value for name, value in beside_parts(real).items() if name not in are_set}
    return tuple(name for name, value in (given | beside_parts(proxy.fake)).items() if not isinstance(value, DATA))
