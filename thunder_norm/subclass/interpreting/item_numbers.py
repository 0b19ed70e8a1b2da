"""Numbers that ``.item()`` makes, where Python asks what they are and not how large: classes, attributes, keys.

Thunder has a proxy for such a number, which is no ``float``, has a hash of its own, and none of a number's methods.  Of what depends on the
number itself the program is told for the call at hand, and the trace is for it (`reading`).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.data_sizes import UnknownValueError
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
from thunder.core.proxies import NumberProxy

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


def lookaside(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn`, which asks for more than the proxy of a number among its arguments knows; None for all others."""
    if not args:
        return None
    first = args[0].value
    if is_number_of_tensors(first) and (fn is isinstance or fn is type or fn is getattr) and not _is_asked_by_thunder():
        if fn is isinstance and len(args) == 2:
            return lambda of, classes: wrap_const(isinstance(of.value.python_type(), classes.value))
        if fn is type and len(args) == 1:
            return lambda of: wrap_const(of.value.python_type)
        if fn is getattr and args[1].value == "__class__":
            return lambda of, *_: wrap_const(of.value.python_type)
        if fn is getattr and not hasattr(NumberProxy, args[1].value):
            return functools.partial(_with_numbers, acquisition, fn, 0)
        return None
    if fn is getattr:  # half of all calls
        return None
    place: Any = look_up(_HASHING, fn)
    if place is None:
        return None
    looked_at = args if place < 0 else args[place : place + 1]
    return functools.partial(_with_numbers, acquisition, fn, place) if any(_holds_unknown(a.value) for a in looked_at) else None


def _is_asked_by_thunder() -> bool:
    """Whether the function that is interpreted is one of the interpreter's own, that looks for an operator's method."""
    frame = get_interpreterruntimectx().peek_frame_stack()
    return frame is not None and frame.module in _OF_THUNDER


def _holds_unknown(value: Any) -> bool:
    return is_number_of_tensors(value) or (type(value) in (list, tuple) and any(map(_holds_unknown, value)))


def known(acquisition: Acquisition, value: Any) -> Any:
    """A value in which numbers stand for such proxies, also in lists and tuples.

    Raises:
        UnknownValueError: the number cannot be computed.
    """
    if is_number_of_tensors(value):
        return acquisition.ask(torch.Tensor.item, [value])
    return type(value)(known(acquisition, v) for v in value) if type(value) in (list, tuple) and _holds_unknown(value) else value


def known_or_refused(acquisition: Acquisition, value: Any) -> Any:
    """The same for a key.

    Raises:
        DataDependentError: the number cannot be computed.
    """
    try:
        return known(acquisition, value)
    except UnknownValueError as e:
        raise acquisition.refuse(data_dependent("a key", why=str(e))) from e


def _with_numbers(acquisition: Acquisition, fn: Callable, place: int, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    filled = list(args)
    try:
        for i, a in enumerate(args):
            if place in (-1, i) and _holds_unknown(a.value):
                filled[i] = wrap(
                    known(acquisition, a.value), provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[a.provenance])
                )
    except UnknownValueError as e:
        return do_raise(acquisition.refuse(data_dependent("a key, or what a number knows of itself", why=str(e))))
    return _interpret_call(fn, *filled, **kwargs)
