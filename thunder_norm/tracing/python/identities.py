"""Which tensor is which object: what ``is``, `id` and hashes go by, and with them dicts and sets of tensors.

What stands for a tensor in a trace is one object from the operation that makes it to the end, and what operations hand back; so its place in
memory tells it from others as that of a tensor does.  No number of it may leave the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.guarding import guards, tensor_keys
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.provenances import member_of_module
from thunder_norm.tracing.replacement import Replacement
from thunder_norm.tracing.shared_memory import second_names
from thunder_norm.tracing.shared_memory.aliases import given_as
from thunder.core import interpreter as thunders
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import WrappedValue, do_raise, wrap_const
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy

_OF_COMPUTED = "_thunder_norm_identity_of_computed"  # of compile data: whether it was asked
_ASKED = "_thunder_norm_identities_asked"  # the inputs of which the program has asked it
_OF_ONE_KEY = frozenset(
    "__getitem__ __setitem__ __delitem__ __contains__ get pop setdefault move_to_end add remove discard".split()
)
_HASHING = (dict, set, frozenset)


def is_one(a: WrappedValue, b: WrappedValue) -> bool:
    """Whether two values of the interpreter are one object, or stand for one."""
    if a.value is b.value:
        return True
    if isinstance(a.value, TensorProxy) and isinstance(b.value, TensorProxy):
        _note_asked(a.value, b.value)
    return object_behind(a) is object_behind(b)


def _note_asked(*proxies: TensorProxy) -> None:
    if any(p.history is None for p in proxies):
        vars(get_compile_data())[_OF_COMPUTED] = True


def taken_of_computed() -> bool:
    """Whether programs have asked, since this was called last, which object something is that they have computed."""
    return vars(get_compile_data()).pop(_OF_COMPUTED, False)


def object_behind(x: WrappedValue) -> Any:
    """The object that a value of the interpreter stands for."""
    if x.original_value is not x.nothing:
        return x.original_value
    if not isinstance(x.value, TensorProxy) or not second_names.is_noted(x.value):
        return x.value
    same = second_names.handed_back(x.value)
    given = given_as(same)
    return same if given is None else given


def lookaside(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn`, if it asks which object a tensor is, or looks for one in what was there before the call."""
    if fn is id and len(args) == 1 and isinstance(args[0].value, TensorProxy):
        return lambda x: wrap_const(_place(x))
    if args and _is_looked_for(fn, args):
        return _looked_up(fn, args)
    return None


def _place(x: WrappedValue) -> int:
    """A parameter's is that of the model, which may have noted it; of others it is of the call."""
    _note_asked(x.value)
    p = second_names.handed_back(x.value)
    real = given_as(p)
    first = _first_of(p)
    return id(real) if isinstance(real, torch.nn.Parameter) else id(first)


def _first_of(p: TensorProxy) -> TensorProxy:
    """Of an input that is given at several places the proxy that was asked first; later calls have the same inputs at the same places."""
    real = given_as(p)
    if real is None or p.history is None:
        return p
    if isinstance(real, torch.nn.Parameter):
        guards.note_at(p.history, "is", None, real)
    asked: dict[str, tuple[TensorProxy, torch.Tensor]] = vars(get_jit_ctx()).setdefault(_ASKED, {})
    first = p
    if p.name not in asked:
        for other, tensor in asked.values():
            if not (isinstance(tensor, torch.nn.Parameter) and isinstance(real, torch.nn.Parameter)):
                guards.note_meeting(p.history, other.history, tensor is real)
        asked[p.name] = p, real
    return next((other for other, tensor in asked.values() if tensor is real), first)


def _is_looked_for(fn: Callable, args: tuple[WrappedValue, ...]) -> bool:
    owner, name = getattr(fn, "__objclass__", None), getattr(fn, "__name__", None)
    if not isinstance(owner, type) or not issubclass(owner, _HASHING) or not isinstance(args[0].value, _HASHING):
        return False
    hashed = args[1:2] if name in _OF_ONE_KEY else args[1:] if not issubclass(owner, dict) else ()
    return any(_holds_tensor(a.value) for a in hashed) and guards.is_guarded(args[0])


def _looked_up(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable:
    """What to call where a dict or set is asked for a tensor: a tensor of the model is looked up itself, and later calls must have the same."""
    real = _of_model(args[1].value) if fn.__name__ in _OF_ONE_KEY else None
    if real is None:
        return lambda *_: do_raise(_from_before())
    guards.note_at(args[1].value.history, "is", None, real)
    return functools.partial(_look_up, fn, real)


def _look_up(fn: Callable, real: torch.Tensor, asked: WrappedValue, key: WrappedValue, *rest: WrappedValue) -> Any:
    if not isinstance(asked.value, dict):
        return thunders._interpret_call(fn, asked, tensor_keys.as_key(key, real), *rest)
    asked.track_items()
    tensor_keys.note_looked_up(asked, key, real)
    found = thunders._interpret_call(fn, asked, tensor_keys.as_key(key, real), *rest)
    if real in asked.key_wrappers:
        asked.key_wrappers[real] = key
    return found


def _of_model(key: Any) -> torch.Tensor | None:
    """The parameter or buffer that a key is; None for what comes and goes with each call."""
    real = given_as(key) if isinstance(key, TensorProxy) and key.history is not None else None
    is_lasting = isinstance(real, torch.nn.Parameter) or (real is not None and member_of_module(key.history) is not None)
    return real if is_lasting and guards.found_at(key.history) is real else None


@instead_of(thunders.MappingKeysIterator.__next__)
def _next_key(iterator: WrappedValue) -> Any:
    """The next key of a dict, or what stands for the tensor that it is."""
    try:
        key = next(iterator.value._underlying_key_iterator)
    except Exception as e:  # noqa: BLE001 - the end, or a dict that changes meanwhile: the program's
        return do_raise(e)
    return tensor_keys.standing_for(iterator.attribute_wrappers["_mapping"], key)


def _holds_tensor(value: Any) -> bool:
    if type(value) in (tuple, list, set, frozenset):
        return any(map(_holds_tensor, value))
    return isinstance(value, TensorProxy)


def _hash(p: TensorProxy) -> int:
    _note_asked(p)
    if _first_of(second_names.handed_back(p)) is not p:
        what = "the hash of a tensor that has two names in the trace: it is given twice, or x += y or x.contiguous() returned it"
        why = "Python finds a key by what stands for it, which is another object under the other name"
        raise UnsupportedOpError(with_details(what, at=location_of_user(), why=why, instead="id(tensor) as the key"))
    return id(p)


def _from_before() -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            "a tensor is looked for, or put, as a key in a dict or set that was there before the call",
            at=location_of_user(),
            why="it is no parameter or buffer of a module: another call has another tensor, which is no such key",
            instead="a name or a position as key, or a dict that the program makes itself",
        )
    )


REPLACEMENTS = (Replacement(TensorProxy, "__hash__", _hash, "class TensorProxy, which has __eq__ and so no hash"),)
