"""What of ``torch.func`` and ``torch.autograd`` a program that is being traced may use: ours, with torch's arguments and results.

Torch's work on tensors that are there; of a trace they know nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch._functorch.vmap import vmap_impl

from thunder_norm.errors import TransformError, with_details
from thunder_norm.functions import by_torch
from thunder_norm.functions.forward import jvp
from thunder_norm.functions.gradients import grad, value_and_grad, vjp
from thunder_norm.functions.interpreted import Levels, as_it_is, value_of, wrapped
from thunder_norm.functions.jacobians import hessian, jacfwd, jacrev
from thunder_norm.functions.vmap import vmap
from thunder_norm.functions.wrappers_in_torchs import OfTorch
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.provenances import is_made_natively
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    _interpret_call,
    do_raise,
    wrap_const,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy


def _instead_of(transform: Callable) -> Callable[[Callable], Callable]:
    """Have the interpreter go into the decorated function instead of torch's."""

    def enter(own: Callable) -> Callable:
        def lookaside(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
            return _interpret_call(own, *args, **kwargs)

        lookasides.instead_of(transform)(lookaside)
        return own

    return enter


@_instead_of(torch.vmap)
def _vmap(
    func: Callable, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error", *, chunk_size: int | None = None
) -> Callable:
    return by_torch.transformed(torch.vmap, _of_torch(vmap), func, in_dims, out_dims, randomness, chunk_size=chunk_size)


@_instead_of(torch.func.grad)
def _grad(func: Callable, argnums: Any = 0, has_aux: bool = False) -> Callable:
    return by_torch.transformed(torch.func.grad, _of_torch(grad), func, argnums, has_aux)


def _of_torch(ours: Callable) -> Callable:
    """Our transform of what torch's is given."""
    return lambda func, *options, **named: ours(OfTorch(func), *options, **named)


@_instead_of(torch.func.grad_and_value)
def _grad_and_value(func: Callable, argnums: Any = 0, has_aux: bool = False) -> Callable:
    return by_torch.transformed(torch.func.grad_and_value, _gradient_first, func, argnums, has_aux)


def _gradient_first(func: Callable, argnums: Any, has_aux: bool) -> Callable:
    both = value_and_grad(OfTorch(func), argnums, has_aux)

    def turned(*args: Any, **kwargs: Any) -> tuple:
        value, gradient = both(*args, **kwargs)
        return gradient, value

    return turned


@_instead_of(eager_transforms.grad_impl)
def _grad_made_before(func: Callable, argnums: Any, has_aux: bool, args: tuple, kwargs: dict) -> Any:
    """A call of what ``torch.func.grad`` gave before the program was traced, ``thunder.jit(torch.func.grad(f))``."""
    return _grad(func, argnums, has_aux)(*args, **kwargs)


@_instead_of(eager_transforms.grad_and_value_impl)
def _grad_and_value_made_before(func: Callable, argnums: Any, has_aux: bool, args: tuple, kwargs: dict) -> Any:
    return _grad_and_value(func, argnums, has_aux)(*args, **kwargs)


@_instead_of(vmap_impl)
def _vmap_made_before(
    func: Callable, in_dims: Any, out_dims: Any, randomness: str, chunk_size: int | None, *args: Any, **kwargs: Any
) -> Any:
    return _vmap(func, in_dims, out_dims, randomness, chunk_size=chunk_size)(*args, **kwargs)


def _refused(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """A call of what ``torch.func.jacrev`` and its like gave before the program was traced: its inside works on tensors that are there."""
    return do_raise(
        TransformError(
            with_details(
                "a traced program calls a function that torch.func.jacrev, jacfwd or hessian made outside of it",
                at=location_of_user(),
                why="what torch made works on tensors with values, and a trace has none",
                instead="call the transform in the traced program, thunder.jit(lambda x: torch.func.jacrev(f)(x)), or use thunder_norm.transforms.jacrev(f)",
            )
        )
    )


for _function in (eager_transforms._vjp_with_argnums, eager_transforms._jvp_with_argnums):
    lookasides.instead_of(_function)(_refused)


@_instead_of(torch.func.vjp)
def _vjp(func: Callable, *primals: Any, has_aux: bool = False) -> tuple:
    if not by_torch.is_followed(func, primals, {}):
        return vjp(OfTorch(func), *primals, has_aux=has_aux)

    def pullback(*cotangents: Any, **named: Any) -> Any:
        return by_torch.run(_pullback_of, func, (has_aux,), {}, (primals, cotangents), named)

    result, *aux = by_torch.run(_result_of, func, (has_aux,), {}, primals, {})
    return (result, pullback, *aux)


def _result_of(func: Callable, has_aux: bool) -> Callable:
    def result(*primals: Any) -> tuple:
        found = torch.func.vjp(func, *primals, has_aux=has_aux)
        return (found[0], *found[2:])

    return result


def _pullback_of(func: Callable, has_aux: bool) -> Callable:
    return lambda primals, cotangents, **named: torch.func.vjp(func, *primals, has_aux=has_aux)[1](*cotangents, **named)


@_instead_of(torch.func.jvp)
def _jvp(func: Callable, primals: Any, tangents: Any, *, strict: bool = False, has_aux: bool = False) -> tuple:
    if strict:
        raise TransformError(
            with_details(
                "torch.func.jvp with strict=True in a traced program",
                why="derivatives of a trace are zeros where a result does not depend on the arguments, and no error",
                instead="strict=False",
            )
        )
    if by_torch.is_followed(func, (primals, tangents), {}):
        return by_torch.run(_jvp_of, func, (has_aux,), {}, (primals, tangents), {})
    return jvp(OfTorch(func), primals, tangents, has_aux=has_aux)


def _jvp_of(func: Callable, has_aux: bool) -> Callable:
    return lambda primals, tangents: torch.func.jvp(func, primals, tangents, has_aux=has_aux)


@_instead_of(torch.func.linearize)
def _linearize(func: Callable, *primals: Any) -> tuple:
    return func(*primals), lambda *tangents: jvp(OfTorch(func), primals, tangents)[1]


@_instead_of(torch.func.jacrev)
def _jacrev(
    func: Callable,
    argnums: Any = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable:
    return by_torch.transformed(torch.func.jacrev, _of_torch(jacrev), func, argnums, has_aux=has_aux, chunk_size=chunk_size)


@_instead_of(torch.func.jacfwd)
def _jacfwd(func: Callable, argnums: Any = 0, has_aux: bool = False, *, randomness: str = "error") -> Callable:
    return by_torch.transformed(torch.func.jacfwd, _of_torch(jacfwd), func, argnums, has_aux, randomness=randomness)


@_instead_of(torch.func.hessian)
def _hessian(func: Callable, argnums: Any = 0) -> Callable:
    return by_torch.transformed(torch.func.hessian, _of_torch(hessian), func, argnums)


# -- functional_call: a module with other tensors in place of its parameters and buffers --------------------------------


@lookasides.instead_of(torch.func.functional_call)
def _functional_call(
    module: WrappedValue,
    parameter_and_buffer_dicts: WrappedValue,
    args: WrappedValue | None = None,
    kwargs: WrappedValue | None = None,
    *,
    tie_weights: WrappedValue | None = None,
    strict: WrappedValue | None = None,
) -> Any:
    given = value_of(parameter_and_buffer_dicts, as_it_is)
    tensors: dict[str, Any] = {}
    for mapping in given if isinstance(given, tuple | list) else (given,):
        tensors.update(mapping)
    is_tied = tie_weights is None or bool(tie_weights.value)
    is_strict = strict is not None and bool(strict.value)
    known = dict(_named_tensors(module.value))
    try:
        _check_names(tensors, known, is_strict)
    except TransformError as e:
        return do_raise(e)
    replaced = {id(known[name]): p for name, p in tensors.items()} if is_tied else {}
    replacement = {name: tensors.get(name, replaced.get(id(t))) for name, t in known.items()}

    is_made = is_made_natively(module.provenance)  # its own tensors are no inputs of the trace
    held, slots = [], []
    for name, proxy in replacement.items():
        if proxy is None:
            continue
        path, _, last = name.rpartition(".")
        table = "_parameters" if last in module.value.get_submodule(path)._parameters else "_buffers"
        slot = _interpret_call(_attribute, module, wrap_const(f"{path}.{table}".lstrip(".") if is_made else name))
        if slot is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return slot
        if is_made:
            held.append((slot, last, wrapped(proxy, module)))
        else:
            slots.append((slot, proxy))
    positional = () if args is None or args.value is None else value_of(args, as_it_is)
    positional = positional if isinstance(positional, tuple) else (positional,)
    keyword = {} if kwargs is None or kwargs.value is None else value_of(kwargs, as_it_is)
    Levels.of(get_jit_ctx()).replaced.update(slot.value.name for slot, _ in slots if isinstance(slot.value, TensorProxy))
    with _standing_for(slots), _held(held):
        result = _interpret_call(
            module, *(wrapped(a, args) for a in positional), **{k: wrapped(v, kwargs) for k, v in keyword.items()}
        )
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED or not _holds_any(result, [slot for slot, _ in slots]):
            return result
        value = value_of(result, as_it_is)
    return wrapped(value, module)  # a parameter that the module returns is what was given for it


def _holds_any(result: WrappedValue, slots: list[WrappedValue]) -> bool:
    if any(result is slot for slot in slots):
        return True
    if not isinstance(result.value, list | tuple | dict):
        return False
    result.track_items()
    items = result.item_wrappers.values() if isinstance(result.item_wrappers, dict) else result.item_wrappers
    return any(_holds_any(item, slots) for item in items)


def _attribute(module: torch.nn.Module, name: str) -> Any:
    """Interpreted: the tensor called `name`, or a table of tensors, found as the module's own code finds it."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def _named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


@contextlib.contextmanager
def _held(entries: list[tuple[WrappedValue, str, WrappedValue]]) -> Iterator[None]:
    """Have tables of a module that the program has made hold these values, for the program and for the interpreter."""
    saved = [(table, name, table.value[name], table.item_wrappers.get(name)) for table, name, _ in entries]
    for table, name, new in entries:
        table.value[name], table.item_wrappers[name] = new.value, new
        table.key_wrappers.setdefault(name, wrap_const(name))
    try:
        yield
    finally:
        for table, name, value, wrapper in saved:
            table.value[name] = value
            if wrapper is None:
                del table.item_wrappers[name], table.key_wrappers[name]
            else:
                table.item_wrappers[name] = wrapper


@contextlib.contextmanager
def _standing_for(slots: list[tuple[WrappedValue, TensorProxy]]) -> Iterator[None]:
    saved = [slot.value for slot, _ in slots]
    for slot, proxy in slots:
        slot.value = proxy
    try:
        yield
    finally:
        for (slot, _), value in zip(slots, saved, strict=True):
            slot.value = value


def _check_names(tensors: Mapping[str, Any], known: Mapping[str, torch.Tensor], is_strict: bool) -> None:
    unknown = [name for name in tensors if name not in known]
    missing = [name for name in known if name not in tensors] if is_strict else []
    if unknown or missing:
        raise TransformError(
            with_details(
                "functional_call: names do not fit the module",
                unknown=", ".join(unknown) or None,
                missing=", ".join(missing) or None,
                at=location_of_user(),
            )
        )
