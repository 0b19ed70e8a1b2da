"""What a program is told about plain tensors, where Thunder's answer is not torch's.

Thunder has dtypes and devices of its own, which are unequal to torch's, its proxies are no tensors, and they have no strides.  A program
that asks would silently take another branch than in eager mode: ``if x.device == self.device``, ``if type(x) is torch.Tensor``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.errors import InnerDerivativeError, UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.backward import flags_of_inputs, tensor_hooks
from thunder_norm.subclass.backward.flags import detached_in_place
from thunder_norm.subclass.backward.given_attributes import attribute_of_input
from thunder_norm.subclass.interpreting import agreement
from thunder_norm.subclass.interpreting.attributes import address_refused, from_user
from thunder_norm.subclass.interpreting.operations import torch_callable
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.guarding.layouts import guard_layout, guard_put_off
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.provenances import wrapped_result
from thunder_norm.tracing.torch_functions import contexts, known_classes, sparse
import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    _interpret_call,
    default_lookaside,
    do_raise,
    interpreter_needs_wrap,
    make_opaque,
    unwrap,
    wrap_const,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx


def about_plain(acquisition: Acquisition | None, fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn`, if it asks for the dtype, device or type of a plain tensor, or makes a device."""
    if fn is torch.device:
        return interpreter_needs_wrap(torch.device) if from_user() else None
    if not args or type(args[0].value) is not TensorProxy:
        return None
    changed = None if acquisition is None else _of_another_shape(acquisition, args[0].value)
    if changed is not None and fn is len:
        return lambda obj: wrapped_result(len(changed), [obj.provenance])
    if changed is not None and fn is getattr and args[1].value in _SHAPE:
        return functools.partial(_as_it_is, changed)
    if fn is getattr and len(args) >= 2:
        answer = _METADATA.get(args[1].value)
        if answer is not None:
            return answer if from_user() else None
        if args[1].value == "real" and not dtypes.is_complex_dtype(args[0].value.dtype):
            return lambda obj, *_: obj
        if args[1].value == "T" and args[0].value.ndim < 2:  # of which Thunder's is the tensor itself
            return lambda obj, *_: _interpret_call(torch.Tensor.view_as, obj, obj)
        written_out = _WRITTEN_OUT.get(args[1].value)
        if acquisition is not None and (acquisition.fakes.follows_plain or acquisition.autograd.is_running):
            written_out = _VIEWS.get(args[1].value, written_out)
        if written_out is not None:
            return lambda obj, *_: _interpret_call(written_out, obj)
        if args[1].value == "requires_grad" and acquisition is not None and _is_written_in_order(acquisition):
            return functools.partial(_requires_grad, acquisition)
        if args[1].value == "is_leaf" and acquisition is not None and _is_written_in_order(acquisition):
            return functools.partial(_is_leaf, acquisition)
        if args[1].value in tensor_hooks.NAMES and acquisition is None:
            return tensor_hooks.refuse_unfollowed
        if args[1].value == "retain_grad":
            return tensor_hooks.retain_grad
        if args[1].value == "_base" and from_user():
            real = _real(acquisition, args[0])
            return functools.partial(_without_base, real) if real is not None and real._base is None else None
        if args[1].value in _ADDRESSES and from_user():
            return lambda obj, name, *_: do_raise(address_refused(name.value))
        if args[1].value in _PUT_OFF and from_user():
            return functools.partial(_asks_put_off, acquisition)
        asked = layout_of_plain if args[1].value in _LAYOUT else _how_stored if args[1].value in _STORED else None
        return functools.partial(asked, acquisition) if asked is not None and from_user() else None
    if (fn is torch.t or fn is torch.Tensor.t or fn is ltorch.t) and args[0].value.ndim < 2:  # as with "T"
        return lambda obj: _interpret_call(torch.Tensor.view_as, obj, obj)
    if fn in _ASKS_PUT_OFF and from_user():
        return functools.partial(_is_put_off, acquisition, fn.__name__)
    if fn is torch.Tensor.requires_grad_:
        return functools.partial(_require_grad, acquisition)
    if fn is torch.Tensor.detach_ or fn is torch.detach_:
        is_torchs = acquisition is not None and acquisition.autograd.is_running  # which detaches what stands for the tensor
        return None if is_torchs else functools.partial(detached_in_place, acquisition)
    if fn is hasattr and from_user():
        return functools.partial(_has_attribute, acquisition)
    if fn is type and len(args) == 1 and from_user():
        return functools.partial(_type, acquisition)
    if fn is isinstance and len(args) == 2 and args[1].value is not torch.Tensor and from_user():
        return functools.partial(_is_instance, acquisition)
    return None


_SHAPE = frozenset({"shape", "ndim", "size", "dim", "__len__"})


def _of_another_shape(acquisition: Acquisition, proxy: TensorProxy) -> torch.Tensor | None:
    """The fake of a tensor that became another view of its memory in place, while torch's autograd followed it."""
    if proxy.name not in acquisition.fakes.replaced:
        return None
    fake = acquisition.fakes.known(proxy)
    return None if fake is None or tuple(fake.shape) == tuple(proxy.shape) else fake


def _as_it_is(fake: torch.Tensor, obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    found = getattr(fake, name.value)
    return wrapped_result(make_opaque(found) if callable(found) else found, [obj.provenance, name.provenance])


def _dtype(obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    return wrapped_result(dtypes.to_torch_dtype(obj.value.dtype), [obj.provenance, name.provenance])


def _device(obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    return wrapped_result(devices.to_torch_device(obj.value.device), [obj.provenance, name.provenance])


def _class(obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    return _type(None, obj)


def _shape(obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    return wrapped_result(torch.Size(obj.value.shape), [obj.provenance, name.provenance])


def _size(obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    shape = torch.Size(obj.value.shape)
    return wrapped_result(make_opaque(lambda dim=None: shape if dim is None else shape[dim]), [obj.provenance, name.provenance])


_METADATA = {"dtype": _dtype, "device": _device, "shape": _shape, "size": _size, "__class__": _class}


def _adjoint(x: torch.Tensor) -> torch.Tensor:
    if x.ndim not in (0, 2):
        raise RuntimeError(f"tensor.H is only supported on matrices (2-D tensors). Got {x.ndim}-D tensor.")
    return x.conj() if x.ndim == 0 else x.mT.conj()


# Attributes that are operations, and that Thunder's tensors lack.
_WRITTEN_OUT = {"H": _adjoint, "mH": lambda x: x.mT.conj()}
# Thunder's tensors have these, but no operation that is seen to make a view
_VIEWS = {
    "T": lambda x: x.permute(*range(x.ndim - 1, -1, -1)),
    "mT": lambda x: x.transpose(-2, -1) if x.ndim else x,
    "real": torch.real,
    "imag": torch.imag,
}


def _type(acquisition: Acquisition | None, obj: WrappedValue) -> Any:
    """Called for ``type(t)``."""
    real = _real(acquisition, obj)
    if real is not None:
        _guard_type(obj, real)
    return wrapped_result(_class_of(real, obj), [obj.provenance])


def _is_instance(acquisition: Acquisition | None, obj: WrappedValue, cls: WrappedValue) -> Any:
    """Called for ``isinstance(t, cls)``."""
    real, expected = _real(acquisition, obj), unwrap(cls)
    if real is not None:
        _guard_type(obj, real)
    return wrapped_result(isinstance(_example(real, obj), expected), [obj.provenance, cls.provenance])


def _class_of(real: torch.Tensor | None, obj: WrappedValue) -> type:
    """The class of an input, or of a result."""
    return known_classes.class_of(obj.value) if real is None else type(real)


def _example(real: torch.Tensor | None, obj: WrappedValue) -> torch.Tensor:
    """An input itself, or what stands for a result: of which ``torch.FloatTensor`` it is an instance hangs on its dtype and device."""
    if real is not None:
        return real
    with _disable_current_modes():
        return known_classes.example(obj.value, known_classes.class_of(obj.value))


def _has_attribute(acquisition: Acquisition | None, obj: WrappedValue, name: WrappedValue) -> Any:
    """Called for ``hasattr(t, name)``."""
    real = _real(acquisition, obj)
    found = hasattr(known_classes.class_of(obj.value) if real is None else real, unwrap(name))
    if real is not None and type(real) not in (torch.Tensor, torch.nn.Parameter):
        guards.note(obj, "has", unwrap(name), found)
    return wrapped_result(found, [obj.provenance, name.provenance])


def _real(acquisition: Acquisition | None, obj: WrappedValue) -> torch.Tensor | None:
    """The input that a proxy stands for; None for a result."""
    if isinstance(obj.original_value, torch.Tensor):
        return obj.original_value
    return None if acquisition is None else acquisition.fakes.real_input(obj.value)


def _guard_type(obj: WrappedValue, real: torch.Tensor) -> None:
    """Let the trace serve inputs of this type only; Thunder's own check takes a parameter for a tensor."""
    if obj.value.history is not None:
        get_jit_ctx().add_constraint((_check_of_type(type(real)), obj.value))


@functools.cache
def _check_of_type(expected: type) -> Callable[[TensorProxy], None]:
    """What writes the check that an input is of exactly this type into a prologue."""

    def check(t: torch.Tensor) -> None:
        if type(t) is not expected:
            raise GuardError(f"expected a {expected.__name__}, got a {type(t).__name__}")

    bind = bindable("check_type", check)
    return lambda p: get_tracectx().bound_symbols.append(bind(p, output=None))


def _is_written_in_order(acquisition: Acquisition) -> bool:
    """Whether all operations so far are in the computation; inside a region or a transformed function they are not yet."""
    return not acquisition.num_levels and len(get_jit_ctx().computation_trace.scopes) == 1


def _of_unrecorded_view(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue) -> UnsupportedOpError | None:
    if not (from_user() and acquisition.autograd.is_of_unrecorded_view(obj.value)):
        return None
    return UnsupportedOpError(
        with_details(
            f".{name.value} of a view made without gradients of a tensor that requires grad",
            at=location_of_user(),
            why="torch says that the view requires grad, and records nothing of it; of what may be a copy it depends on strides",
            instead=f"ask for .{name.value} of the tensor that it is a view of",
        )
    )


def _requires_grad(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    if (refused := _of_unrecorded_view(acquisition, obj, name)) is not None:
        return do_raise(refused)
    acquisition.flags_asked.add(obj.value.name)
    return wrapped_result(acquisition.autograd.requires_grad(obj.value), [obj.provenance, name.provenance])


def _is_leaf(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    if (refused := _of_unrecorded_view(acquisition, obj, name)) is not None:
        return do_raise(refused)
    acquisition.flags_asked.add(obj.value.name)
    real, has_history = _real(acquisition, obj), acquisition.autograd.requires_grad(obj.value)
    if real is None or has_history != real.requires_grad:  # the program has written into it what requires grad
        is_leaf = obj.value.name in acquisition.autograd.started or not has_history
        return wrapped_result(is_leaf, [obj.provenance, name.provenance])
    return attribute_of_input(real, obj, unwrap(name))


# What says how a plain tensor is stored: of all that Thunder computes the same.
_STORED: dict[str, Callable[[TensorProxy], Any]] = {
    **dict.fromkeys(("is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested", "retains_grad"), lambda p: False),
    **dict.fromkeys(
        ("is_ipu", "is_maia", "is_mps", "is_mtia", "is_vulkan", "is_xla"), lambda p: False
    ),  # Thunder has no such device
    "layout": lambda p: torch.strided,
    "is_cpu": lambda p: p.device.type == "cpu",
    "is_cuda": lambda p: p.device.type == "cuda",
    "is_meta": lambda p: p.device.type == "meta",
    "is_xpu": lambda p: p.device.type == "xpu",
    "itemsize": lambda p: dtypes.to_torch_dtype(p.dtype).itemsize,
    "nbytes": lambda p: math.prod(p.shape) * dtypes.to_torch_dtype(p.dtype).itemsize,
    "name": lambda p: None,
}


_SPARSE = ("is_sparse", "is_sparse_csr", "layout")


def _how_stored(acquisition: Acquisition | None, obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    real = _real(acquisition, obj)
    if name.value == "retains_grad" and acquisition is not None and tensor_hooks.is_retained(acquisition, obj.value):
        return wrapped_result(True, [obj.provenance, name.provenance])
    if real is None:
        if name.value in _SPARSE and sparse.may_be_sparse(obj.value):
            return do_raise(sparse.refused(name.value))
        return wrapped_result(_STORED[unwrap(name)](obj.value), [obj.provenance, name.provenance])
    return attribute_of_input(real, obj, unwrap(name))


def _without_base(real: torch.Tensor, obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    return attribute_of_input(real, obj, name.value)


_ADDRESSES = ("data_ptr", "untyped_storage", "_typed_storage", "storage", "is_shared", "is_pinned")


def _require_grad(
    acquisition: Acquisition | None, obj: WrappedValue, requires_grad: WrappedValue | None = None
) -> WrappedValue | Any:
    """Called for ``t.requires_grad_()``: a tensor made in the program may start a history there, whose gradients nobody can ask for.

    An input keeps what it was given with, unless `flags_of_inputs` can set it first, and so does what is inside of one.
    """
    wanted = True if requires_grad is None else bool(requires_grad.value)
    given = None if acquisition is None else acquisition.fakes.flag_given(obj.value)
    is_known = acquisition is not None and _is_written_in_order(acquisition)
    has = acquisition.autograd.requires_grad(obj.value) if is_known else obj.value.requires_grad
    has = has if given is None else given
    if has == wanted:
        return obj
    real = _real(acquisition, obj)
    if given is not None or real is not None:
        if is_known and wanted and real is not None and flags_of_inputs.may_be_set(acquisition, obj.value, real):
            acquisition.flags_set.append(real)
            return obj  # what the program does next says whether it sets others; then it is acquired anew
        error = with_details(
            f"requires_grad_({wanted}) of an input of the jitted function, for which it is {has}",
            at=location_of_user(),
            why="what is differentiated is known before the program runs",
            instead="call it before the jitted function",
        )
        return do_raise(InnerDerivativeError(error))
    if has:
        return do_raise(RuntimeError("you can only change requires_grad flags of leaf variables."))
    if not dtypes.is_inexact_dtype(obj.value.dtype):
        return do_raise(RuntimeError("only Tensors of floating point dtype can require gradients"))
    if is_known and not acquisition.is_transformed:
        acquisition.autograd.note_started(obj.value)
        known_classes.note_leaf(obj.value)
    return obj


def starting_history(acquisition: Acquisition, fn: Callable, kwargs: dict[str, WrappedValue], found: Any) -> Any:
    """What to call for ``torch.ones(3, requires_grad=True)`` and its like: `found`, which knows no such argument."""
    asked = kwargs.get("requires_grad")
    if asked is None or asked.value is not True or not callable(found) or torch_callable(fn) is None:
        return found

    def call(*args: WrappedValue, requires_grad: WrappedValue, **kwargs: WrappedValue) -> Any:
        made = found(*args, **kwargs)
        is_plain = isinstance(made, WrappedValue) and type(made.value) is TensorProxy
        return _require_grad(acquisition, made) if is_plain else made

    return call


def unplaced(name: str, why: str = "what Thunder computes may lie elsewhere than in eager mode") -> UnsupportedOpError:
    """The error for what hangs on how a tensor lies in memory, of which nobody knows it."""
    return UnsupportedOpError(with_details(f"{name}() of a plain tensor that is no input", at=location_of_user(), why=why))


_LAYOUT = ("stride", "is_contiguous", "storage_offset")


def layout_of_plain(acquisition: Acquisition | None, obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for the stride, contiguity and storage offset of a plain tensor, of which Thunder's proxies know nothing."""
    asked = unwrap(name)
    real = _real(acquisition, obj)
    if real is None and acquisition is not None:
        agreement.stride_of(acquisition, obj.value)
    known = real if real is not None or acquisition is None else acquisition.fakes.laid_out(obj.value)
    if real is not None:
        guard_layout(obj.value, real, with_offset=True)
    elif known is not None:
        acquisition.fakes.guard_layouts()
    if known is None and asked == "is_contiguous":  # nobody knows more than Thunder, which has no other layouts
        return (default_lookaside(getattr) or getattr)(obj, name, *default)
    if known is None or (asked == "storage_offset" and real is None and acquisition.fakes.is_of_thunder(obj.value)):
        return do_raise(unplaced(asked))
    stride, offset = known.stride(), known.storage_offset()

    def answer(*args: Any, **kwargs: Any) -> Any:
        if asked == "storage_offset":
            return offset
        if asked == "stride":
            dim = args[0] if args else kwargs.get("dim")
            return stride if dim is None else stride[dim]
        return known.is_contiguous(*args, **kwargs)

    return wrapped_result(make_opaque(answer), [obj.provenance, name.provenance])


_PUT_OFF = ("is_conj", "is_neg", "is_inference")
_ASKS_PUT_OFF = [getattr(holder, name) for holder in (torch, torch.Tensor) for name in _PUT_OFF]


def asked_of_inference(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call where a program asks whether a wrapper was made in inference mode; None of all else."""
    if fn is getattr and len(args) == 2 and unwrap(args[1]) == "is_inference":
        return functools.partial(_asks_put_off, acquisition)
    is_asked = fn is torch.is_inference or fn is torch.Tensor.is_inference
    return functools.partial(_is_put_off, acquisition, "is_inference") if is_asked else None


def _asks_put_off(acquisition: Acquisition | None, obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    found = _is_put_off(acquisition, unwrap(name), obj)
    return found if found is INTERPRETER_SIGNALS.EXCEPTION_RAISED else wrap_const(make_opaque(lambda: found.value))


def _is_put_off(acquisition: Acquisition | None, asked: str, obj: WrappedValue) -> Any:
    """Called where a program asks whether torch has put off the conjugation of a plain tensor, or its sign, or what autograd knows of it.

    Thunder never does, and has no tensors that were made in inference mode.
    """
    real = _real(acquisition, obj)
    if real is not None:
        found = getattr(real, asked)()
        guard_put_off(obj.value, asked, found)
        return wrap_const(found)
    if asked == "is_inference" and not contexts.has_met_inference():
        return wrap_const(False)
    if asked == "is_conj" and not dtypes.is_complex_dtype(obj.value.dtype):
        return wrap_const(False)
    return do_raise(
        UnsupportedOpError(
            with_details(
                f"{asked}() of a tensor that is no input",
                at=location_of_user(),
                why="torch puts off conjugations, signs and, in inference mode, histories; Thunder does not",
                instead="ask for it outside of the jitted function",
            )
        )
    )
