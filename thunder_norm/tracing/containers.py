"""Lists and dicts of a program: what it does to one after an operation took it.

Thunder writes a list that an operation is given into the trace itself: what the program appends or puts there afterwards changes the
operation (``fs = [x]; y = torch.cat(fs); fs.append(y)``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thunder_norm.tracing.guarding.contents import OF_NUMBERS
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.replacement import Replacement, Replacements
from thunder.core import interpreter
from thunder.core.interpreter import SequenceIter, WrappedValue
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol

_original_bind = Symbol.bind
_thunders_reversed = interpreter._reversed_lookaside


def _bind(self: Symbol, *args: Any, output: Any, **kwargs: Any) -> BoundSymbol:
    """The bound symbol, with lists and dicts of its own."""
    kwargs = {name: value if name == "subsymbols" else _copied(value) for name, value in kwargs.items()}
    return _original_bind(self, *map(_copied, args), output=_copied(output), **kwargs)


def _copied(x: Any) -> Any:
    kind = type(x)
    if kind is list or kind is tuple:
        return kind(map(_copied, x))
    return {k: _copied(v) for k, v in x.items()} if kind is dict else x


KEPT = Replacements((Replacement(Symbol, "bind", _bind, "Symbol.__call__: bsym = self.bind(*args, **kwargs, output=result"),))


@instead_of(vars)
def _vars(*objects: WrappedValue) -> Any:
    """``vars(obj)``: Thunder calls it natively, so that nothing guards what is in it."""
    if not objects:
        return interpreter._interpret_call(locals)
    return interpreter._interpret_call(_dict_of, objects[0])


def _dict_of(obj: Any) -> Any:
    try:
        return obj.__dict__
    except AttributeError:
        raise TypeError("vars() argument must have __dict__ attribute") from None


@instead_of(reversed)
def _reversed(sequence: WrappedValue) -> Any:
    """``reversed(module_list)``: Thunder asks for a Sequence or a method, Python for a length and items alone.  Of a tensor it is a copy."""
    if isinstance(sequence.value, TensorProxy | torch.Tensor):
        return interpreter._interpret_call(lambda t: t.flip(0) if t.dim() else t, sequence)
    kind = type(sequence.value)
    is_like_a_sequence = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    if isinstance(sequence.value, Sequence | Mapping) or hasattr(kind, "__reversed__") or not is_like_a_sequence:
        return _thunders_reversed(sequence)
    return interpreter._interpret_call(lambda s: SequenceIter(s, is_reversed=True), sequence)


def take_proxies(*args: WrappedValue, **kwargs: WrappedValue) -> None:
    """Have proxies stand for the tensors among arguments, and for the lists and dicts that hold some.

    Thunder's own (``recursively_proxy``) looks into a dict's keys for its items.
    """
    for v in (*args, *kwargs.values()):
        _take_proxies(v)


def _take_proxies(v: WrappedValue) -> bool:
    """Whether one stands for it now."""
    is_container = isinstance(v.value, Sequence | dict) and not isinstance(v.value, (str, range, deque, *OF_NUMBERS))
    if is_container:
        v.track_items()
        items = v.item_wrappers.values() if isinstance(v.item_wrappers, dict) else v.item_wrappers
        needs_one = any([_take_proxies(item) for item in items])
    else:
        needs_one = isinstance(v.value, torch.Tensor)
    if needs_one:
        get_jit_ctx().proxify(v)
    return v.original_value is not v.nothing
