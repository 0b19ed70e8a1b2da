"""Attributes of inputs that are no tensors of the program: what autograd and Python know of the very tensor that is given."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.backward import tensor_hooks
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.provenances import wrapped_result
from thunder_norm.tracing.torch_functions.tensor_attributes import held_by_given
from thunder_norm.wrapper_classes import overrides_torch_function
from thunder.core.interpreter import WrappedValue
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx

_NUMBERS = frozenset({"is_leaf", "retains_grad", "output_nr", "_version", "name"})
_TENSORS = frozenset({"grad", "_base"})
_OBJECTS = frozenset({"grad_fn", "_backward_hooks", "_post_accumulate_grad_hooks"})
OF_THE_GIVEN = _NUMBERS | _TENSORS | _OBJECTS


def is_gradient_torchs(acquisition: Acquisition, fake: torch.Tensor) -> bool:
    """Whether ``.grad`` of a wrapper is what autograd has for it: a class with a ``__torch_function__`` is asked on the fake."""
    if not overrides_torch_function(type(fake)):
        return True
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), acquisition.fakes.mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one that is no leaf
        before, probe = fake.grad, torch.empty(fake.shape, dtype=fake.dtype, device=fake.device)
        try:
            fake.grad = probe
            with torch._C._EnableTorchFunction():
                is_handed_on = fake.grad is probe
                fake.grad = None
            return is_handed_on and fake.grad is None
        except Exception:  # noqa: BLE001 - what the class says to it
            return False
        finally:
            fake.grad = before


def attribute_of_input(real: torch.Tensor, obj: WrappedValue, name: str) -> Any:
    """An attribute of an input; the trace serves inputs of which it is the same."""
    answer = getattr(real, name)
    if obj.value.history is not None:
        get_jit_ctx().add_constraint((_check_of_attribute(name, answer), obj.value))
    return wrapped_result(answer, [obj.provenance])


@functools.cache
def _check_of_attribute(name: str, expected: Any) -> Callable[[TensorProxy], None]:
    """What writes the check that an attribute of an input is what it was into a prologue."""

    def check(t: torch.Tensor) -> None:
        found = getattr(t, name)
        if found is not expected and (expected is None or found != expected):
            raise GuardError(f"expected {name} to be {expected}, got {found}")

    bind = bindable(f"check_{name}", check)
    return lambda p: get_tracectx().bound_symbols.append(bind(p, output=None))


def of_wrapper(acquisition: Acquisition, obj: WrappedValue, name: str) -> Any:
    """What a wrapper that is an input says of itself, if its fake cannot know: None for all others.

    Raises:
        UnsupportedOpError: it is an object of the call at hand.
    """
    proxy = obj.value
    real = acquisition.fakes.real_input(proxy) if name in OF_THE_GIVEN else None
    if real is None or name in acquisition.wrappers.attributes.get(id(proxy.fake), ()):
        return None
    if name not in _TENSORS and _version_of(proxy) > 0 and name != "_version":
        return None  # the program has written into it: autograd has run on the fake since
    if overrides_torch_function(type(real)) and name not in _TENSORS:
        return attribute_of_input(real, obj, name)
    with torch._C.DisableTorchFunctionSubclass():
        if name == "_version":
            attribute_of_input(real, obj, name)
            return wrapped_result(real._version + _version_of(proxy), [obj.provenance])
        if name == "retains_grad" and tensor_hooks.is_retained(acquisition, proxy):
            return wrapped_result(True, [obj.provenance])
        found, is_changed = getattr(real, name), name in _OBJECTS and tensor_hooks.has_given(acquisition, real)
        if name in _NUMBERS or (found is None and not is_changed):
            return attribute_of_input(real, obj, name)
        if name in _TENSORS:
            return held_by_given(proxy, name, found)
    raise UnsupportedOpError(
        with_details(
            f".{name} of an input of the jitted function, a {type(proxy.fake).__name__}",
            at=location_of_user(),
            why="it is another object in each call",
            instead="look at it before the call",
        )
    )


def _version_of(proxy: SubclassProxy) -> int:
    """How often the program has written into a wrapper so far."""
    with torch._C.DisableTorchFunctionSubclass():
        return proxy.fake._version
