"""What of ``torch.func`` and ``torch.autograd`` a program that is being traced may use: ours, with torch's arguments and results.

Torch's work on tensors that are there; of a trace they know nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from thunder_norm.errors import TransformError, UnsupportedOpError, with_details
from thunder_norm.functions.custom import CustomOperation
from thunder_norm.functions.forward import jvp
from thunder_norm.functions.gradients import grad, value_and_grad, vjp
from thunder_norm.functions.interpreted import Levels, active_level, as_it_is, value_of, wrapped
from thunder_norm.functions.jacobians import hessian, jacfwd, jacrev
from thunder_norm.functions.programs import program_of
from thunder_norm.functions.vmap import vmap
from thunder_norm.functions.wrappers_in_torchs import OfTorch
from thunder_norm.subclass.acquisition import Acquisition
from thunder_norm.subclass.autograd import is_grad_enabled
from thunder_norm.subclass.operations import AUTOGRAD_APPLY, on_proxies
from thunder_norm.subclass.record import Recorded, recording
from thunder_norm.subclass.refused_backward import Refuse, untraceable_backward
from thunder_norm.subclass.trace import OperationId, composite
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.translation import proxy_like
from thunder_norm.trees import flat_tensors
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
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
    return vmap(func, in_dims, out_dims, randomness, chunk_size=chunk_size)


@_instead_of(torch.func.grad)
def _grad(func: Callable, argnums: Any = 0, has_aux: bool = False) -> Callable:
    return grad(OfTorch(func), argnums, has_aux)


@_instead_of(torch.func.grad_and_value)
def _grad_and_value(func: Callable, argnums: Any = 0, has_aux: bool = False) -> Callable:
    both = value_and_grad(OfTorch(func), argnums, has_aux)

    def turned(*args: Any, **kwargs: Any) -> tuple:
        value, gradient = both(*args, **kwargs)
        return gradient, value

    return turned


@_instead_of(torch.func.vjp)
def _vjp(func: Callable, *primals: Any, has_aux: bool = False) -> tuple:
    return vjp(OfTorch(func), *primals, has_aux=has_aux)


@_instead_of(torch.func.jvp)
def _jvp(func: Callable, primals: Any, tangents: Any, *, strict: bool = False, has_aux: bool = False) -> tuple:
    return jvp(OfTorch(func), primals, tangents, has_aux=has_aux)


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
    return jacrev(OfTorch(func), argnums, has_aux, chunk_size=chunk_size)


@_instead_of(torch.func.jacfwd)
def _jacfwd(func: Callable, argnums: Any = 0, has_aux: bool = False, *, randomness: str = "error") -> Callable:
    return jacfwd(OfTorch(func), argnums, has_aux, randomness=randomness)


@_instead_of(torch.func.hessian)
def _hessian(func: Callable, argnums: Any = 0) -> Callable:
    return hessian(OfTorch(func), argnums)


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

    slots = []
    for name, proxy in replacement.items():
        if proxy is not None:
            slot = _interpret_call(_attribute, module, wrap_const(name))
            if slot is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
                return slot
            slots.append((slot, proxy))
    positional = () if args is None or args.value is None else value_of(args, as_it_is)
    positional = positional if isinstance(positional, tuple) else (positional,)
    keyword = {} if kwargs is None or kwargs.value is None else value_of(kwargs, as_it_is)
    Levels.of(get_jit_ctx()).replaced.update(slot.value.name for slot, _ in slots if isinstance(slot.value, TensorProxy))
    with _standing_for(slots):
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
    """Interpreted: the tensor called `name`, found as the module's own code finds it."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def _named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


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


# -- torch.autograd.Function --------------------------------------------------------------------------------------------


@lookasides.instead_of(AUTOGRAD_APPLY)
def _apply(cls: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for ``cls.apply(*args)``."""
    return on_proxies(lambda *args, **kwargs: _FunctionCall(cls.value, args, kwargs).write())(*args, **kwargs)


class _FunctionCall:
    """One call of a ``torch.autograd.Function``: torch runs it, on fakes, and what its forward and backward did is written into the trace.

    So everything that a function may do with its ``ctx`` means what it means in torch: ``setup_context``, ``needs_input_grad``,
    ``mark_non_differentiable``, ``set_materialize_grads``, attributes, several results, arguments that are no tensors.  What is
    written is an operation with a rule of its own, so the function's backward holds under every transform.
    """

    def __init__(self, cls: type[torch.autograd.Function], args: tuple, kwargs: dict):
        self.cls = cls
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.proxies = list({v.name: v for v in self.leaves if isinstance(v, TensorProxy)}.values())
        self.acquisition = Acquisition()  # of the fakes of this call alone
        self.acquisition.num_levels = 1  # what has effects, or changes what the program holds, is no part of one operation
        self.fakes = {p.name: self._fake(p) for p in self.proxies}
        self.inputs = [self.fakes[p.name] for p in self.proxies]
        self.backward: list[Recorded] = []
        self.gradients: list[torch.Tensor | None] = [None] * len(self.inputs)
        with recording(self.acquisition) as recorder, torch.set_grad_enabled(is_grad_enabled()):
            self.result = self._run()
            self.forward, recorder.log = recorder.log, []
            self.outputs = list({id(t): t for t in flat_tensors(self.result)}.values())
            self._check_unchanged()
            with self.acquisition.fakes.mode, recorder.paused(), torch.no_grad():
                self.cotangents = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in self.outputs]
            try:
                self._go_backward()
                self.backward = recorder.log
            except Exception as e:  # noqa: BLE001 - the forward is right whatever the backward says
                self._refuse_backward(untraceable_backward(cls.__name__, None, e))

    def _fake(self, p: TensorProxy) -> torch.Tensor:
        fake = self.acquisition.fake_of(p)
        # of an input of the program it is known whether it requires grad, of all else it is not
        may_require = active_level() is not None or p.history is None or p.requires_grad
        is_differentiable = fake.is_floating_point() or fake.is_complex()
        return fake.requires_grad_(is_grad_enabled() and may_require and is_differentiable)

    def _run(self) -> Any:
        values = [self.fakes[v.name] if isinstance(v, TensorProxy) else self.acquisition.to_fake(v) for v in self.leaves]
        args, kwargs = tree_unflatten(values, self.spec)
        return self.cls.apply(*args, **kwargs)

    def _check_unchanged(self) -> None:
        if any(r.is_in_place and any(r.outputs[0] is t for t in self.inputs) for r in self.forward):
            raise UnsupportedOpError(
                with_details(
                    f"the forward of {self.cls.__name__} changes an argument in place",
                    at=location_of_user(),
                    instead="return a new tensor",
                )
            )

    def _go_backward(self) -> None:
        pairs = [(t, c) for t, c in zip(self.outputs, self.cotangents, strict=True) if t.requires_grad]
        sources = [t for t in self.inputs if t.requires_grad]
        if not pairs or not sources:
            return
        found = torch.autograd.grad([t for t, _ in pairs], sources, [c for _, c in pairs], allow_unused=True)
        of = {id(t): g for t, g in zip(sources, found, strict=True)}
        self.gradients = [of.get(id(t)) for t in self.inputs]

    def _refuse_backward(self, error: Exception) -> None:
        with self.acquisition.fakes.mode, torch.no_grad():
            self.gradients = [torch.empty_like(t) if t.requires_grad else None for t in self.inputs]
        gradients = tuple(g for g in self.gradients if g is not None)
        self.backward = [Recorded(Refuse(error, gradients), tuple(self.cotangents), {}, gradients, gradients)]

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self) -> Any:
        """Write the operation; returns the function's result with proxies in the place of fakes."""
        get_jit_ctx().computation_trace.set_current_source_location(
            *get_interpreterruntimectx().get_current_user_source_location()
        )
        produced = {id(t) for r in self.forward for t in r.outputs} | {id(t) for t in self.inputs}
        kept = {id(t): t for r in self.backward for t in r.inputs if id(t) in produced}
        kept |= {id(g): g for g in self.gradients if g is not None and id(g) in produced}
        saved = list(kept.values())
        gradients = [g for g in self.gradients if g is not None]
        operation = CustomOperation(
            self.cls.__name__,
            self._program("forward", self.forward, self.inputs, self.outputs),
            self._program("forward", self.forward, self.inputs, [*self.outputs, *saved]),
            self._program("backward", self.backward, [*saved, *self.cotangents], gradients),
            tuple(g is not None for g in self.gradients),
            len(self.outputs),
        )
        made = {id(t): p for t, p in zip(self.outputs, operation.symbol(*self.proxies), strict=True)}
        return tree_map(lambda v: made[id(v)] if isinstance(v, torch.Tensor) else v, self.result)

    def _program(
        self, part: str, log: Sequence[Recorded], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Any:
        """What `log` does as a flat program from `inputs` to `outputs`."""
        wanted = {id(t) for r in log for t in r.inputs} | {id(t) for t in outputs}
        symbol, _ = composite(OperationId(self.cls.__name__, part), log, inputs, outputs, wanted)
        formal = [proxy_like(t) for t in inputs]
        return program_of(lambda *args: symbol(*args), formal, hoists=False)
