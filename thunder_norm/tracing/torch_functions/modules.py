"""What a program does with its modules while it runs: conversions that change nothing, and modules that it makes.

``self.classifier = self.classifier.to(self.dtype)`` gives the same module with the same parameters where they have that dtype already.
Torch's code works that out with the values of parameters, of which a trace has none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.member_dicts import has_written
from thunder_norm.tracing.torch_functions.random_numbers import States, draws_numbers, have_drawn_since, set_states, states
from thunder.core import devices, dtypes
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    do_raise,
    interpreter_needs_wrap,
    unwrap,
    wrap_const,
    wrapped_build_tuple,
)
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, get_tracectx

# What torch keeps of a module beside what a ThunderModule has of it.
_KEPT = frozenset(vars(torch.nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}


def asking_users(prologue: TraceCtx) -> TraceCtx:
    """A prologue that asks the user's module about its hooks: a ThunderModule has hooks of its own."""
    users = {b.output.name: b.args[0] for b in prologue.bound_symbols if b.sym.id is PrimIDs.UNPACK_THUNDER_MODULE}
    if not users:
        return prologue
    new = from_trace(prologue)
    new.bound_symbols = [_asking(b, users) for b in prologue.bound_symbols]
    return new


def _asking(bsym: BoundSymbol, users: dict[str, Proxy]) -> BoundSymbol:
    if bsym.sym.id is not PrimIDs.UNPACK_ATTR or bsym.args[1] not in _KEPT or bsym.args[0].name not in users:
        return bsym
    return bsym.from_bsym(args=(users[bsym.args[0].name], *bsym.args[1:]))


@instead_of(torch.nn.Module._apply)
def _apply(module: WrappedValue, fn: WrappedValue, recurse: WrappedValue | None = None) -> Any:
    """Called by ``to``, ``float``, ``half``, ``double``, ``bfloat16``, ``type``, ``cpu`` and ``cuda``."""
    if _changes_nothing(module.value, unwrap(fn)):
        return module
    return do_raise(
        UnsupportedOpError(
            with_details(
                f"the parameters or buffers of a {type(module.value).__name__} are converted in the jitted function",
                at=location_of_user(),
                why="a module has its parameters before a trace is acquired, and keeps them",
                instead="convert the module before it is jitted",
            )
        )
    )


@instead_of(torch.nn.Module.named_parameters)
def _named_parameters(module: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """In the order that torch has: Thunder goes through a set of names, whose order is another in each process."""
    return _named_members(module, "named_parameters", "_parameters", args, kwargs)


@instead_of(torch.nn.Module.named_buffers)
def _named_buffers(module: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    return _named_members(module, "named_buffers", "_buffers", args, kwargs)


def _named_members(module: WrappedValue, method: str, table: str, args: tuple, kwargs: dict[str, WrappedValue]) -> Any:
    given = inspect.signature(getattr(torch.nn.Module, method)).bind(module.value, *map(unwrap, args), **_unwrapped(kwargs))
    given.apply_defaults()
    _, prefix, recurse, remove_duplicate = given.args
    names = frozenset(name for name, _ in getattr(module.value, method)(*given.args[1:]))
    may_have_joined = remove_duplicate and has_written()
    return _interpret_call(_members, module, *map(wrap_const, (table, prefix, recurse, remove_duplicate, names, may_have_joined)))


def _members(
    module: torch.nn.Module,
    table: str,
    prefix: str,
    recurse: bool,
    remove_duplicate: bool,
    names: frozenset[str],
    may_have_joined: bool,
) -> Iterator[tuple[str, Any]]:
    """``Module._named_members``, interpreted; which members are there twice is in `names`: torch keeps a set of tensors."""
    modules = module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate) if recurse else [(prefix, module)]
    seen: list[Any] = []  # what the program has made one since
    for before, inner in modules:
        for key, value in getattr(inner, table).items():
            name = before + ("." if before else "") + key
            if name in names and not (may_have_joined and any(value is v for v in seen)):
                seen.append(value)
                yield name, value


def _unwrapped(kwargs: dict[str, WrappedValue]) -> dict[str, Any]:
    return {unwrap(name): unwrap(value) for name, value in kwargs.items()}


@instead_of(torch._C._nn._parse_to)
def _parse_to(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """What ``module.to(tensor)`` asks C code for: the tensor's dtype and device, of which what stands for it tells."""
    try:
        found = torch._C._nn._parse_to(*map(_like, args), **{name: _like(v) for name, v in kwargs.items()})
    except Exception as e:  # noqa: BLE001 - torch's own
        return do_raise(e)
    return wrapped_build_tuple([wrap_const(v) for v in found])


def _like(wrapped: WrappedValue) -> Any:
    value = wrapped.value
    if not isinstance(value, TensorProxy):
        return value
    return torch.empty(0, dtype=dtypes.to_torch_dtype(value.dtype), device=devices.to_torch_device(value.device))


@torch.no_grad()
def _changes_nothing(module: torch.nn.Module, fn: Callable) -> bool:
    return all(fn(t) is t for t in (*module.parameters(), *module.buffers()))


def making(fn: Any, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call for a class of modules: the class itself, which is not interpreted; None for anything else, and for what holds tensors.

    What it holds is made once, when the trace is acquired; Thunder refuses parameters that come from nowhere.
    """
    if not isinstance(fn, type) or not issubclass(fn, torch.nn.Module):
        return None
    if any(map(_holds_proxies, tree_leaves([unwrap(a) for a in (*args, *kwargs.values())]))):
        return None
    return functools.partial(_made, fn)


def _holds_proxies(value: Any) -> bool:
    """Whether a value is a tensor of the program, or a module that the program has made of some."""
    if not isinstance(value, torch.nn.Module):
        return isinstance(value, Proxy)
    tables = (table for m in value.modules() for table in (vars(m), m._parameters, m._buffers))
    return any(isinstance(v, Proxy) for table in tables for v in table.values())


def _made(cls: type, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    before = states()
    made = interpreter_needs_wrap(cls)(*args, **kwargs)
    if have_drawn_since(before):
        _note_drawn(cls, before)
    if made is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        made.provenance = ProvenanceRecord(PseudoInst.NEW, inputs=[wrap_const(cls).provenance])
    return made


def _note_drawn(cls: type, before: States) -> None:
    """Parameters of a new module were drawn, which happens while the trace is acquired: in each call anew, before what the trace draws.

    Raises:
        UnsupportedOpError: the trace draws some before them.
    """
    if any(map(draws_numbers, get_tracectx().bound_symbols)):
        raise UnsupportedOpError(
            with_details(
                f"{cls.__name__}, a module that a traced function makes, draws its parameters after other random numbers",
                at=location_of_user(),
                why="the module is made while the trace is acquired, and the other numbers are drawn when it runs",
                instead="make the module outside of the function",
            )
        )
    surroundings = guards.surroundings()
    if surroundings is not None:
        surroundings.note_parameters_drawn(cls, functools.partial(set_states, before))
