"""Attributes of plain tensors, of which Thunder's proxies know nothing: those that users give to them, and those that torch lets one set.

Whatever is set on a proxy is gone after the call: the tensor that it stands for is as it was.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.containers import take_proxies
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import MISSING, in_classes
from thunder_norm.tracing.guarding.snapshots import same_as
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.provenances import member_of_module, place_in_module
from thunder_norm.tracing.shared_memory import aliases, replaced_memory
from thunder_norm.tracing.shared_memory.version_counters import give_own
from thunder.core import interpreter as thunders
from thunder.core import jit_ext, prims
from thunder.core.dtypes import to_torch_dtype
from thunder.core.interpreter import INTERPRETER_SIGNALS, ProvenanceRecord, PseudoInst, WrappedValue, do_raise, wrap_const
from thunder.core.proxies import AnyProxy, Proxy, ProxyTag, TensorProxy
from thunder.core.trace import get_tracectx

_INSTEAD = {
    "requires_grad": "set it outside of the jitted function, or use tensor.detach()",
    "grad": "set it outside of the jitted function",
}


def is_users(obj: WrappedValue, name: WrappedValue) -> bool:
    """Whether it is an attribute that a user may have given to an input, or the program has set."""
    tensor = obj.original_value
    if type(obj.value) is TensorProxy and (own := _set_of(obj, name)) is not MISSING:
        return own is not None or not hasattr(torch.Tensor, name.value)
    if not isinstance(tensor, torch.Tensor) or type(name.value) is not str:
        return False
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return type(obj.value) is TensorProxy and name.value in vars(tensor) and guards.is_guarded(obj)
    return name.value not in obj.attribute_wrappers and not hasattr(type(tensor), name.value) and guards.is_guarded(obj)


def read(obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for `getattr` of what `is_users`."""
    if (own := _set_of(obj, name)) is not MISSING:
        found = MISSING if own is None else own.value
    else:
        found = vars(obj.original_value).get(name.value, MISSING)
        guards.note(obj, "has", name.value, found is not MISSING)
    if isinstance(own, WrappedValue):
        return own
    if found is MISSING:
        return default[0] if default else do_raise(AttributeError(f"'Tensor' object has no attribute {name.value!r}"))
    if not isinstance(found, torch.Tensor):
        guards.note(obj, "own attribute", name.value, same_as(found))
    if isinstance(found, torch.Tensor):
        return thunders.wrap_attribute(found, obj, name)
    proxy = obj.value
    return wrap_const(found) if proxy.history is None else _of_given(proxy, name.value, found)


def _of_given(proxy: TensorProxy, name: str, found: Any) -> WrappedValue:
    """What stands for what an input has under a name."""
    return wrap_const(found) if isinstance(found, _ALIKE) else held_by_given(proxy, name, found)


_ALIKE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    enum.Enum,
    FunctionType,
    BuiltinFunctionType,
    torch.dtype,
    torch.device,
)  # in each call that a guard lets in


class OwnDict(dict):
    """The attributes that a tensor has of its own, in the order in which it has got them; what is written into it the tensor has."""

    tensor: torch.Tensor

    def __setitem__(self, name: str, value: Any) -> None:
        _put(self.tensor, name, value)
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        dict.__delitem__(self, name)
        _drop(self.tensor, name)

    def update(self, /, *others: Any, **named: Any) -> None:
        for name, value in dict(*others, **named).items():
            self[name] = value

    def __ior__(self, other: Any) -> OwnDict:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self and default:
            return default[0]
        found = self[name]
        del self[name]
        return found

    def popitem(self) -> tuple[str, Any]:
        if not self:
            raise KeyError("popitem(): dictionary is empty")
        name = list(self)[-1]
        return name, self.pop(name)

    def clear(self) -> None:
        for name in list(self):
            del self[name]


def _put(tensor: torch.Tensor, name: str, value: Any) -> None:
    """Set an attribute of a tensor whatever its class says, for functions that are interpreted."""
    raise AssertionError("called while tracing only")


def _drop(tensor: torch.Tensor, name: str) -> None:
    """The same for deleting one."""
    raise AssertionError("called while tracing only")


@instead_of(_put)
def _(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    return _set_users(obj, name, value)


@instead_of(_drop)
def _(obj: WrappedValue, name: WrappedValue) -> Any:
    return deleted(obj, name)


def own_dict(obj: WrappedValue, *_: WrappedValue) -> WrappedValue:
    """Called for ``x.__dict__`` of a plain tensor: what is there in the call at hand, and what the program has set."""
    real, known = _given(obj), _known(obj)
    found = {} if real is None else dict(vars(real))
    if real is not None:
        guards.note_at(obj.value.history, "own attribute", "__dict__", same_as(found))
    for name, value in {} if known is None else known.values.items():
        found.pop(name, None) if value is None else found.update({name: value.value})
    are_set = {} if known is None else {name: w for name, w in known.values.items() if w is not None}
    items = {name: are_set.get(name) or _of_given(obj.value, name, found[name]) for name in found}
    wrapped = wrap_const(OwnDict({name: w.value for name, w in items.items()}))
    wrapped.value.tensor = obj.value
    thunders.populate_attribute_wrapper(wrapped, "tensor", obj)
    wrapped.track_items()
    wrapped.item_wrappers.update(items)
    return wrapped


def give(tensor: torch.Tensor, name: str, value: Any) -> None:
    """Set an attribute of a tensor, whatever its class says: the program has asked it."""
    if isinstance(in_classes(type(tensor).__mro__, name), _PLACES):
        with torch._C.DisableTorchFunctionSubclass():
            object.__setattr__(tensor, name, value)
    else:
        vars(tensor)[name] = value


def take(tensor: torch.Tensor, name: str) -> None:
    """Delete an attribute of a tensor, if it has it."""
    if isinstance(in_classes(type(tensor).__mro__, name), MemberDescriptorType):
        with contextlib.suppress(AttributeError):
            object.__delattr__(tensor, name)
    else:
        vars(tensor).pop(name, None)


_PLACES = (GetSetDescriptorType, MemberDescriptorType)  # of attributes that are in no ``__dict__``


def data_of(obj: WrappedValue, *_: WrappedValue) -> Any:
    """Called for ``x.data`` of a plain tensor: the same memory, and nothing that autograd knows of x."""
    data = thunders._interpret_call(_data, obj)
    if data is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        give_own(data.value)
    return data


def _data(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def is_unknown_gradient(obj: WrappedValue, name: WrappedValue) -> bool:
    """Whether it is ``x.grad`` of an input that has none for Thunder, whatever it has: it does not require grad, or a module has it."""
    proxy = obj.value
    if name.value != "grad" or type(proxy) is not TensorProxy or not isinstance(_given(obj), torch.Tensor):
        return False
    return (not proxy.requires_grad or _is_of_module(obj)) and _set_of(obj, name) is MISSING


def gradient_of(obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> WrappedValue:
    """Called for `getattr` of an `is_unknown_gradient`."""
    found = _given(obj).grad
    if found is None:
        guards.note_at(obj.value.history, "own attribute", name.value, same_as(None))
        return wrap_const(None)
    return held_by_given(obj.value, name.value, found)


def held_by_given(proxy: TensorProxy, name: str, found: Any) -> WrappedValue:
    """What stands for a tensor, or an object, that an input has as an attribute: one for the whole program, which may write into it."""
    assert proxy.history is not None
    known: dict[tuple[str, str], WrappedValue] = vars(jit_ext.get_jit_ctx()).setdefault(_OF_GIVEN, {})
    if (proxy.name, name) not in known:
        record = place_of_attribute(proxy.history, name)
        known[proxy.name, name] = thunders.wrap(found, provenance=record)
        guards.note_at(record, "is none", None, False)
    return known[proxy.name, name]


def place_of_attribute(history: ProvenanceRecord, name: str) -> ProvenanceRecord:
    """Where an attribute of a tensor is, that itself is at a place."""
    member = member_of_module(history)
    holder = history if member is None else place_in_module(member)
    # of what it knows for a tensor's Thunder finds no attributes in a call
    holder = ProvenanceRecord(
        holder.inst, inputs=holder.inputs, output_idx=holder.output_idx, output_key=holder.output_key, value=holder.value
    )
    attribute = ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=name)
    return ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[holder, attribute])


_OF_GIVEN = "_thunder_norm_attributes_of_given"  # of an acquisition; by the name of the input, and that of the attribute


def has(obj: WrappedValue, name: WrappedValue) -> WrappedValue:
    """Called for `hasattr` of what `is_users`."""
    if (own := _set_of(obj, name)) is not MISSING:
        return wrap_const(own is not None or hasattr(torch.Tensor, name.value))
    is_there = name.value in vars(obj.original_value)
    guards.note(obj, "has", name.value, is_there)
    return wrap_const(is_there)


def deleted(obj: WrappedValue, name: WrappedValue) -> Any:
    """Called for `delattr` of a plain tensor."""
    of_tensor, own = _of(obj), _set_of(obj, name)
    if own is MISSING and of_tensor.real is not None:
        is_there = name.value in vars(of_tensor.real)
        guards.note_at(obj.value.history, "has", name.value, is_there)
    else:
        is_there = isinstance(own, WrappedValue)
    if not is_there:
        return do_raise(AttributeError(f"'Tensor' object has no attribute {name.value!r}"))
    of_tensor.values[name.value] = None
    obj.attribute_wrappers.pop(name.value, None)
    vars(obj.value).pop(name.value, None)
    return wrap_const(None)


def numel_of_shape(shape: WrappedValue, name: WrappedValue, *default: WrappedValue) -> WrappedValue:
    """Called for ``x.shape.numel``: Thunder's shapes are tuples."""
    return wrap_const(
        MethodType(_numel, shape.value), provenance=ProvenanceRecord(PseudoInst.LOAD_ATTR, [shape.provenance, name.provenance])
    )


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for length in shape:
        n = n * length
    return n


def assignment(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Callable | None:
    """What to call for `setattr` of a plain tensor."""
    if not hasattr(torch.Tensor, name.value):
        return _refuse if _is_of_module(obj) else _set_users
    if name.value == "grad":
        return _set_gradient
    if _is_as_it_was(obj, name.value, value.value):
        return _keep
    if name.value == "requires_grad" and (value.value is True or not guards.is_guarded(obj)):
        return _set_flag
    if name.value in _WRITE_PART:
        return _written_into_part
    return replaced_memory.data_assigned if name.value == "data" else _refuse


@dataclass
class SetAttributes:
    """What a program has set of a plain tensor: the epilogue sets it of the tensor of each call.

    Attributes:
        proxy: stands for it.
        owner: the same, or stands for the object itself, where it was given.
        real: what was given in the call at hand.
        values: by name; None for one that is deleted.
    """

    proxy: TensorProxy
    owner: Proxy
    real: torch.Tensor | None
    values: dict[str, WrappedValue | None] = field(default_factory=dict)


def those_set(ctx: jit_ext.JitCtx) -> dict[str, SetAttributes]:
    """By the name of the proxy, what the program that is being acquired has set of plain tensors."""
    return vars(ctx).setdefault(_SET, {})


_SET = "_thunder_norm_set_attributes"


def _set_users(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    """Called for an attribute that torch has not."""
    if isinstance(value.value, torch.Tensor):  # a list or a dict with some stays what the program writes into
        take_proxies(value)
    of_tensor = _of(obj)
    of_tensor.values[name.value] = value
    if of_tensor.real is None:
        if name.value != "grad":  # of which Thunder has a property, which nobody reads
            object.__setattr__(obj.value, name.value, value.value)
        obj.attribute_wrappers[name.value] = value
    return wrap_const(None)


def _set_gradient(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    """Called for ``x.grad = value``; torch says to tensors without data what it would say to these."""
    empty = [v.value if not isinstance(v.value, TensorProxy) else _without_data(v.value) for v in (obj, value)]
    try:
        empty[0].grad = empty[1]
    except Exception as e:  # noqa: BLE001 - the program's to handle
        return do_raise(e)
    return _set_users(obj, name, value)


def _given(obj: WrappedValue) -> torch.Tensor | None:
    """The tensor of the call at hand that a proxy stands for; None for one that the program made."""
    return None if obj.value.history is None else guards.found_at(obj.value.history)


def _is_of_module(obj: WrappedValue) -> bool:
    return obj.value.history is not None and member_of_module(obj.value.history) is not None


def _without_data(p: TensorProxy) -> torch.Tensor:
    return torch.empty(p.shape, dtype=to_torch_dtype(p.dtype), device="meta")


def _of(obj: WrappedValue) -> SetAttributes:
    if (known := _known(obj)) is not None:
        return known
    found = those_set(jit_ext.get_jit_ctx())
    if obj.value.name not in found:
        real = _given(obj)
        tags = {ProxyTag.STATIC_MEMORY_LOCATION} if _is_of_module(obj) else None  # as Thunder marks what it gets from a module
        owner = obj.value if real is None else AnyProxy(real, history=obj.value.history, tags=tags)
        found[obj.value.name] = SetAttributes(obj.value, owner, real)
    return found[obj.value.name]


def _set_of(obj: WrappedValue, name: WrappedValue) -> Any:
    """What the program has set of a tensor; None if it has deleted that."""
    found = _known(obj)
    return MISSING if found is None else found.values.get(name.value, MISSING)


def _known(obj: WrappedValue) -> SetAttributes | None:
    """What the program has set of a tensor, at whichever of the places that it is given at; a trace serves calls in which it is at these."""
    found = those_set(jit_ext.get_jit_ctx())
    if not found or not isinstance(obj.value, TensorProxy) or obj.value.name in found or obj.value.history is None:
        return found.get(getattr(obj.value, "name", None))
    real = _given(obj)
    given = [s for s in found.values() if isinstance(s.real, torch.Tensor)] if isinstance(real, torch.Tensor) else []
    for other in given:
        if isinstance(real, torch.nn.Parameter) and isinstance(other.real, torch.nn.Parameter):  # of which a model may have many
            for proxy, tensor in ((obj.value, real), (other.proxy, other.real)):
                guards.note_at(proxy.history, "is", None, tensor)
        else:
            guards.note_meeting(obj.value.history, other.proxy.history, other.real is real)
    return next((s for s in given if s.real is real), None)


def _is_as_it_was(obj: WrappedValue, name: str, value: Any) -> bool:
    if name == "requires_grad":
        return value is obj.value.requires_grad
    if name == "data" and replaced_memory.is_replaced(obj.value):
        return False
    if name == "data":  # tensor.data += 1
        return type(value) is TensorProxy and _detached(aliases.written_tensor(value)) is aliases.written_tensor(obj.value)
    return name == "names" and value is None


def _detached(proxy: TensorProxy) -> TensorProxy | None:
    """What a tensor is the data of, which the program read in the same memory, and cast to the dtype that it has."""
    made = next((b for b in get_tracectx().bound_symbols if any(p.name == proxy.name for p in b.flat_proxy_outs)), None)
    if made is None:
        return None
    if made.sym.id == "torch.Tensor.to" and all(b.sym.id is prims.PrimIDs.SHALLOW_COPY for b in made.subsymbols):
        return _detached(aliases.written_tensor(made.args[0]))
    is_detach = made.sym.name.rpartition(".")[2] == "detach"  # "plain.detach" where operations on plain tensors are taken over
    return aliases.written_tensor(made.args[0]) if is_detach else None


def _set_flag(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    """Called for ``y.requires_grad = True``: the same as a call of the method."""
    result = thunders._interpret_call(torch.Tensor.requires_grad_, obj, value)
    return result if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED else wrap_const(None)


def _write_real(z: torch.Tensor, value: Any) -> None:
    z.real[...] = value


def _write_imag(z: torch.Tensor, value: Any) -> None:
    z.imag[...] = value


_WRITE_PART = {"real": _write_real, "imag": _write_imag}


def _written_into_part(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    """Called for ``z.real = value`` and ``z.imag = value``, which write into the tensor."""
    return thunders._interpret_call(_WRITE_PART[name.value], obj, value)


def _keep(*_: WrappedValue) -> WrappedValue:
    return wrap_const(None)


def _refuse(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    return do_raise(
        UnsupportedOpError(
            with_details(
                f"attribute {name.value!r} of a tensor is set",
                at=location_of_user(),
                why="the trace computes new tensors, the one given to the program would stay as it is",
                instead=_INSTEAD.get(name.value, "set it outside of the jitted function, or keep the value elsewhere"),
            )
        )
    )
