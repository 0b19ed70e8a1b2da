"""Contexts of torch that a program enters, and what it asks of those that it is in.

Thunder keeps track of whether gradients are recorded, but asks the process, where tracing changes nothing: ``torch.no_grad()`` inside
``torch.no_grad()`` would put gradients on again as it is left.  Inference mode would be that of the process while it traces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, _interpret_call, do_raise, wrap, wrap_const
from thunder.core.jit_ext import general_jit_lookaside as thunders_lookaside

_INFERENCE = "_thunder_norm_inference_modes"  # of compile data: those that the program is in
_HAS_MET_INFERENCE = "_thunder_norm_inference_met"  # of compile data: whether anything so far was made in one that is on


@dataclass
class _InferenceMode:
    """One that the program has entered: whether it is on, the grad mode before it, and the grad mode that the program has set inside."""

    is_on: bool
    before: bool
    is_grad_enabled: bool


def begin() -> None:
    """Begin an acquisition, in no context that an earlier one left by an error, but in those around the call."""
    is_enabled = torch.is_grad_enabled()
    around = [_InferenceMode(True, is_enabled, is_enabled)] if torch.is_inference_mode_enabled() else []
    setattr(get_compile_data(), _INFERENCE, around)
    setattr(get_compile_data(), _HAS_MET_INFERENCE, bool(around))


def check_left() -> None:
    """Refuse a program that ends in another grad mode than it began in.

    Raises:
        UnsupportedOpError: it does.
    """
    before, after = torch.is_grad_enabled(), _grad_mode()
    if after is not before:
        raise UnsupportedOpError(
            with_details(
                f"torch.set_grad_enabled({after}) inside a jitted function, which ends with it",
                why="a trace changes nothing outside of it: the calls that use it again would leave the mode as it was",
                instead=f"with torch.set_grad_enabled({after}): ..., or set it around the call",
            )
        )


def _entered() -> list[_InferenceMode]:
    return getattr(get_compile_data(), _INFERENCE)


def has_met_inference() -> bool:
    """Whether tensors may have been made in inference mode by now; calls in that mode are other ones for a program that asks it."""
    if (met := guards.surroundings()) is not None:
        met.note_call(torch.is_inference_mode_enabled, (), {}, lambda: False)
    return getattr(get_compile_data(), _HAS_MET_INFERENCE)


def _grad_mode() -> bool:
    """The grad mode that the program is in."""
    entered = _entered()
    return entered[-1].is_grad_enabled if entered and entered[-1].is_on else get_compile_data().is_grad_enabled


@instead_of(torch.is_grad_enabled)
def _is_grad_enabled() -> Any:
    return _constant(_grad_mode())


@instead_of(torch.is_inference_mode_enabled)
def _is_inference_mode_enabled() -> Any:
    entered = _entered()
    return _constant(entered[-1].is_on if entered else torch.is_inference_mode_enabled())


@instead_of(torch.inference_mode.__enter__)
def _enter_inference_mode(mode: WrappedValue) -> Any:
    """Gradients are recorded where inference mode is off, as torch does it."""
    cd = get_compile_data()
    # asked as the program would: an object that it has made has no attributes of its own here
    is_on = _interpret_call(getattr, mode, wrap_const("mode")).value
    entered, before = _entered(), cd.is_grad_enabled
    entered.append(_InferenceMode(False, before, not is_on))
    result = _interpret_call(torch._C._set_grad_enabled, wrap_const(not is_on))
    entered[-1].is_on = is_on
    if is_on:
        setattr(cd, _HAS_MET_INFERENCE, True)
    return result


@instead_of(torch.inference_mode.__exit__)
def _leave_inference_mode(mode: WrappedValue, *error: WrappedValue) -> Any:
    left = _entered().pop()
    return _interpret_call(torch._C._set_grad_enabled, wrap_const(left.before))


@instead_of(torch._C._set_grad_enabled)
def _set_grad_enabled(is_enabled: WrappedValue) -> Any:
    """Inside inference mode nothing is recorded, whatever the grad mode."""
    entered = _entered()
    met = None if torch.is_grad_enabled() else guards.surroundings()
    if met is not None:  # a trace for calls without gradients serves those in inference mode too, unless the program records some
        met.note_call(torch.is_inference_mode_enabled, (), {}, lambda: False)
    if not (entered and entered[-1].is_on):
        thunders = thunders_lookaside(torch._C._set_grad_enabled, is_enabled)
        assert thunders is not None
        return thunders(is_enabled)
    entered[-1].is_grad_enabled = bool(is_enabled.value)
    return wrap_const(None)


def _constant(value: Any) -> WrappedValue:
    return wrap(value, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[]))


@instead_of(torch.autograd.profiler.record_function.__enter__)
def _enter_label(label: WrappedValue) -> Any:
    """Labels of a profile are of calls, and a program is not run while it is traced."""
    return label


@instead_of(torch.autograd.profiler.record_function.__exit__)
def _leave_label(label: WrappedValue, *error: WrappedValue) -> Any:
    return wrap_const(None)


@instead_of(torch.autograd.graph.saved_tensors_hooks.__enter__)
def _enter_hooks(hooks: WrappedValue) -> Any:
    """On the CPU a tensor has the same values; what others make of it nobody sees before the backward."""
    if isinstance(hooks.value, torch.autograd.graph.save_on_cpu):
        return wrap_const(None)
    return do_raise(
        UnsupportedOpError(
            with_details(
                f"{type(hooks.value).__name__} inside a jitted function",
                at=location_of_user(),
                why="what is saved for the backward is chosen after the program is traced, and saved outside of the hooks",
                instead="enter the hooks around the call; torch.utils.checkpoint, or CheckpointTransform, for less memory",
            )
        )
    )


@instead_of(torch.autograd.graph.saved_tensors_hooks.__exit__)
def _leave_hooks(hooks: WrappedValue, *error: WrappedValue) -> Any:
    return wrap_const(None)


def _refuse(fn: Callable, what: str, why: str, instead: str) -> None:
    @instead_of(fn)
    def _(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
        return do_raise(
            UnsupportedOpError(with_details(f"{what} inside a jitted function", at=location_of_user(), why=why, instead=instead))
        )


_DEFAULT_DTYPE = (
    "the program is traced once: later calls would not set it, and the dtypes of the trace are those of the default before",
    "set it before the call, or give dtype= where tensors are made",
)
_refuse(torch.set_default_tensor_type, "torch.set_default_tensor_type", *_DEFAULT_DTYPE)


@instead_of(torch.set_default_dtype)
def _set_default_dtype(dtype: WrappedValue) -> Any:
    """The default of the call at hand is part of a trace."""
    if dtype.value is torch.get_default_dtype():
        return wrap_const(None)
    what = "torch.set_default_dtype inside a jitted function"
    why, instead = _DEFAULT_DTYPE
    return do_raise(UnsupportedOpError(with_details(what, at=location_of_user(), why=why, instead=instead)))


for _fn in (torch.random.fork_rng, torch.manual_seed, torch.seed, torch.get_rng_state, torch.set_rng_state):
    _refuse(
        _fn,
        f"torch.{'random.' if _fn is torch.random.fork_rng else ''}{_fn.__name__}",
        "the program is traced once: later calls would go on with the random numbers of the process",
        "seed or fork outside the call, or give the drawn numbers as arguments",
    )


@instead_of(torch._C._set_fwd_grad_enabled)
def _set_fwd_grad_enabled(is_enabled: WrappedValue) -> Any:
    """Derivatives of a trace are made of its operations, which do not look at this switch."""
    if is_enabled.value:
        return wrap_const(None)
    what, why = "set_fwd_grad_enabled(False) inside a jitted function", "derivatives of a trace do not look at it"
    return do_raise(UnsupportedOpError(with_details(what, at=location_of_user(), why=why, instead="x.detach()")))


_refuse(
    torch.autograd.forward_ad.enter_dual_level,
    "torch.autograd.forward_ad",
    "a trace has no tangents beside its tensors",
    "torch.func.jvp, or thunder_norm.transforms.jvp",
)
