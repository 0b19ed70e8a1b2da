"""Operations that Thunder does not know, or not with these arguments: in a transformed function torch runs them as a whole.

While a transformed function is acquired, an operation of torch is first Thunder's.  Where Thunder has none, or the one it has raises,
torch runs the call on tensors without data; what that gives is the metadata of an *opaque* operation (see `opaque`), which torch runs
and ``torch.func`` transforms.  In-place operations become an operation that returns the changed tensor and a copy of it into the old
one, as Thunder writes its own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_norm.errors import DataDependentError, ThunderNormError, UnsupportedOpError, with_details
from thunder_norm.functions.interpreted import active_level, requires_grad, wrapped
from thunder_norm.functions.opaque import Operation, opaque_executor, symbol_for
from thunder_norm.functions.programs import flat_proxies
from thunder_norm.functions.torch_calls import Forward, Trial, position_of, try_out
from thunder_norm.subclass.interpreting import agreement, operations, plain, selections, sequences
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent
from thunder_norm.tracing.translation import for_torch, proxy_like
import thunder
import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    do_raise,
    get_interpreterruntimectx,
    interpreter_needs_wrap,
    wrap_const,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import Symbol

# -- in the interpreter ---------------------------------------------------------------------------------------------------------


def lookaside(fn: Callable, args: Sequence[WrappedValue], kwargs: dict[str, WrappedValue], find: Callable[[], Any]) -> Any:
    """What the interpreter is to call for `fn`: what `find` finds, and torch where that is nothing or raises."""
    selected = selections.lookaside(fn, args, {})
    if selected is not None:
        return selected
    if fn is getattr:
        if args[1].value == "requires_grad" and type(args[0].value) is TensorProxy:
            answer = requires_grad(args[0].value)
            if answer is not None:
                return lambda *_: wrap_const(answer)
        return plain.about_plain(None, fn, args) or _computed_anew(find(), args)
    if fn is TensorProxy.__getattr__:
        return _attribute(find())
    if fn is torch.Tensor.requires_grad_:
        return lambda *_: do_raise(_of_autograd(fn.__name__))
    operation = operations.torch_callable(fn) or (fn if _is_torchs_own(fn) else None)
    if getattr(operation, "__name__", "") in _ASKED and all(type(a.value) is TensorProxy for a in args):
        return lambda *tensors: wrap_const(_ASKED[operation.__name__](*(t.value for t in tensors)))
    if getattr(operation, "__name__", "") in _UNBIASED and len(args) > 1 and type(args[1].value) is bool:
        return _run_by_torch(operation)
    found = None if operation in _DRAWN_BY_TORCH else find()
    if operation is None:
        return found
    if found is INTERPRETER_SIGNALS.EXCEPTION_RAISED:  # Thunder knows that it has none
        if _is_ours():
            return found
        get_interpreterruntimectx().curexc = None
        return _run_by_torch(operation)
    if found is None:
        given = (*args, *kwargs.values())
        is_called_on_tensors = not isinstance(fn, types.FunctionType) and any(_has_proxy(a.value) for a in given)
        return sequences.given_plainly(_run_by_torch(operation), fn, args, {}) if is_called_on_tensors else None
    return sequences.given_plainly(_first(found, operation), fn, args, {})


# Thunder's draws whatever the probabilities are, and other numbers.
_DRAWN_BY_TORCH = (torch.bernoulli, torch.Tensor.bernoulli)


# What torch tells of shapes and dtypes in calls, for which Thunder has operations that are run.
_ASKED: dict[str, Callable[..., Any]] = {
    "ndimension": lambda x: x.ndim,
    "nelement": lambda x: x.numel,
    "element_size": lambda x: dtypes.to_torch_dtype(x.dtype).itemsize,
    "is_signed": lambda x: dtypes.to_torch_dtype(x.dtype).is_signed,
    "is_same_size": lambda x, y: tuple(x.shape) == tuple(y.shape),
}


def _computed_anew(found: Any, args: Sequence[WrappedValue]) -> Any:
    """The lookup of an attribute, of a tensor each time anew: what ``c.T`` was in one level means nothing in the next."""
    if not callable(found) or not isinstance(args[0].value, TensorProxy):
        return found

    def look_up(obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
        obj.attribute_wrappers.pop(name.value, None)
        return found(obj, name, *default)

    return look_up


# Their second argument may be `unbiased`, a bool, which Thunder takes for a dimension.
_UNBIASED = frozenset({"std", "std_mean", "var", "var_mean"})


def _is_torchs_own(fn: Callable) -> bool:
    """Whether it is a function of torch that is written in C, ``torch._C._nn.leaky_relu_`` for instance."""
    owner = getattr(fn, "__self__", None)
    return type(fn) is types.BuiltinFunctionType and isinstance(owner, types.ModuleType) and owner.__name__.startswith("torch._C")


def _first(found: Callable, operation: Callable) -> Callable:
    """`found`, and torch where it raises; what torch refuses is refused."""

    def attempt(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
        if (refused := agreement.refused_integers(operation, args, kwargs)) is not None:
            return do_raise(refused)
        trace = get_jit_ctx().computation_trace
        scopes, written = list(trace.scopes), len(trace.peek_scope())
        result = found(*args, **kwargs)
        if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED or _is_ours():
            return result
        runtime = get_interpreterruntimectx()
        error, runtime.curexc = runtime.curexc, None
        trace.scopes[:] = scopes  # what was written before it raised, and where, is forgotten
        del trace.peek_scope()[written:]
        return _run_by_torch(operation, error)(*args, **kwargs)

    return attempt


def _is_ours() -> bool:
    return isinstance(get_interpreterruntimectx().curexc, ThunderNormError)


def _attribute(found: Callable) -> Callable:
    """The lookup of an attribute of a tensor, with those that only torch's tensors have."""

    def attempt(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
        result = found(*args, **kwargs)
        runtime = get_interpreterruntimectx()
        if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED or not isinstance(runtime.curexc, AttributeError):
            return result
        tensor, name = (a.value for a in args[:2])
        attribute = getattr(torch.Tensor, name, None) if isinstance(name, str) else None
        if attribute is None or name.startswith("_"):
            return result
        runtime.curexc = None
        if name in _OF_AUTOGRAD:
            return do_raise(_of_autograd(name))
        if isinstance(attribute, types.GetSetDescriptorType):
            return _run_by_torch(attribute.__get__)(args[0])
        return interpreter_needs_wrap(lambda *_: functools.partial(attribute, tensor))(*args)

    return attempt


# What torch's own autograd and memory know of a tensor: there is neither in a transformed function.
_OF_AUTOGRAD = frozenset(
    "backward data data_ptr detach_ grad grad_fn is_leaf output_nr register_hook register_post_accumulate_grad_hook requires_grad_ "
    "resize_ resize_as_ retain_grad retains_grad set_ share_memory_ storage untyped_storage".split()
)


def _of_autograd(name: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            f".{name} of a tensor in a function under {active_level()}",
            at=location_of_user(),
            why="the function is traced: its tensors have no memory yet, and torch's autograd does not see them",
            instead="grad, vjp or jvp of thunder_norm.transforms inside the function, or .detach() and operations that return new tensors",
        )
    )


def _run_by_torch(operation: Callable, error: BaseException | None = None) -> Callable:
    """The interpreter's lookaside that writes an operation which torch runs.  `error` is what Thunder said to it."""
    return operations.on_proxies(lambda *args, **kwargs: write(operation, args, kwargs, error))


@lookasides.instead_of(thunder.jit)
def _jit_inside(fn: WrappedValue | None = None, **options: WrappedValue) -> Any:
    """``thunder.jit(f)`` in a program that is being traced is `f`: it becomes a part of that program."""
    if fn is None:
        return interpreter_needs_wrap(lambda: _itself)()
    return fn


def _itself(function: Callable) -> Callable:
    return function


# -- what is written --------------------------------------------------------------------------------------------------------------


def write(function: Callable, args: tuple, kwargs: dict, error: BaseException | None = None) -> Any:
    """Write a call of one of torch's functions as an operation that torch runs; its result, proxies in place of tensors.

    Raises:
        DataDependentError: the shapes of its results depend on values.
        UnsupportedOpError: it cannot be written down.
        `error`, or what torch raises, where torch does not take these arguments either.
    """
    trace = get_jit_ctx().computation_trace
    trace.set_current_source_location(*get_interpreterruntimectx().get_current_user_source_location())
    leaves, spec = tree_flatten((args, kwargs))
    leaves = [_for_thunder(v) for v in leaves]
    if not all(isinstance(v, _KNOWN) or v is Ellipsis or v is None for v in leaves):
        raise _unsupported(function, "an argument that cannot stand in a trace") from error
    args, kwargs = tree_unflatten(leaves, spec)
    try:
        function, trial = _tried(function, args, kwargs)
    except (DynamicOutputShapeException, DataDependentOutputException) as e:
        raise data_dependent(f"the result of {_name(function)}", str(active_level()), location_of_user()) from e
    except Exception as e:
        raise error or e from e
    is_effect = trial.result is None and not trial.changed
    if is_effect:
        function = _for_its_effect(function)
        trial = try_out(function, args, kwargs)
    returned, returned_spec = tree_flatten(trial.result)
    if not all(isinstance(v, (torch.Tensor, *_KNOWN, *_CONSTANTS)) or v is None for v in returned):
        raise _unsupported(function, "a result that cannot stand in a trace")
    inputs = flat_proxies((args, kwargs))
    outs = _symbol(function, trial.changed, trial.views, is_effect)(*args, **kwargs)
    num_new = len(outs) - len(trial.changed)
    changed = {k: ltorch.copy_(inputs[k], out) for k, out in zip(trial.changed, outs[num_new:], strict=True)}
    new = iter(outs[:num_new])
    for i, v in enumerate(returned):
        if isinstance(v, torch.Tensor):
            position = position_of(v)
            returned[i] = next(new) if position is None or position not in changed else changed[position]
    return tree_unflatten(returned, returned_spec)


@functools.cache
def _for_its_effect(function: Callable) -> Callable:
    """A function that returns nothing as one that returns an empty tensor: Thunder leaves out what has no result, whatever its tags."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        function(*args, **kwargs)
        return torch.empty(0, dtype=torch.bool)

    return run


def _tried(function: Callable, args: tuple, kwargs: dict) -> tuple[Callable, Trial]:
    """The trial of a function, or of the method of its name, which may be called in other ways: ``x.tile(2, 3)``."""
    try:
        return function, try_out(function, args, kwargs)
    except Exception:
        method = getattr(torch.Tensor, getattr(function, "__name__", ""), None)
        if method is None:
            raise
        return method, try_out(method, args, kwargs)


_KNOWN = (TensorProxy, NumberProxy, bool, int, float, complex, str, slice, dtypes.dtype, devices.Device, torch.memory_format)
_CONSTANTS = (torch.Size, torch.layout, torch.dtype, torch.device)


def _unsupported(function: Callable, why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            f"{_name(function)} cannot be used in a function under {active_level()}",
            at=location_of_user(),
            why=f"it has {why}",
            instead="other operations of torch, or what does not depend on the function's arguments computed outside",
        )
    )


@functools.cache
def _symbol(function: Callable, changed: tuple[int, ...], views: tuple[tuple[int, int], ...], is_effect: bool) -> Symbol:
    run = functools.partial(_run, function, changed)
    meta = functools.partial(_meta, function)
    name = _name(function).replace(".", "_")
    is_random, forward = name.removesuffix("_") in _DRAWS, Forward.of(name.removesuffix("_"))
    return symbol_for(Operation(name, run, meta, is_random, views, forward, is_effect))


_DRAWS = frozenset(
    "_sample_dirichlet _standard_gamma bernoulli cauchy exponential geometric log_normal normal random uniform".split()
)


def _run(function: Callable, changed: tuple[int, ...], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The results that are no arguments changed in place, then those arguments as they are afterwards."""
    leaves, spec = tree_flatten((args, kwargs))
    positions = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]
    for k in changed:
        leaves[positions[k]] = leaves[positions[k]].clone()
    new = [leaves[positions[k]] for k in changed]
    args, kwargs = tree_unflatten(leaves, spec)
    result = tree_flatten(function(*args, **kwargs))[0]
    if function is torch.linalg.lstsq:
        _check_rank(args[0], *result)
    return *(t for t in result if isinstance(t, torch.Tensor) and not any(t is n for n in new)), *new


def _check_rank(matrix: torch.Tensor, solution: torch.Tensor, residuals: torch.Tensor, _: Any, singular: torch.Tensor) -> None:
    """Refuse least squares without residuals where a matrix of full rank has some: the program was traced for those.

    Raises:
        DataDependentError: the matrix has not full rank, and the driver is one that finds it out.
    """
    if matrix.shape[-2] > matrix.shape[-1] and singular.numel() and solution.numel() and not residuals.numel():
        raise DataDependentError(
            with_details(
                "least squares of a matrix that has not full rank",
                why="torch returns no residuals then, and the function was traced once for all values",
                instead='driver="gelsy", which never returns any',
            )
        )


def _meta(function: Callable, *args: Any, **kwargs: Any) -> tuple[TensorProxy, ...]:
    trial = try_out(function, args, kwargs)
    proxies = flat_proxies((args, kwargs))
    return *map(proxy_like, trial.outs), *(TensorProxy(like=proxies[k], requires_grad=False) for k in trial.changed)


def _has_proxy(value: Any) -> bool:
    return isinstance(value, TensorProxy) or (isinstance(value, list | tuple) and any(map(_has_proxy, value)))


def _for_thunder(v: Any) -> Any:
    if isinstance(v, torch.dtype):
        return dtypes.to_dtype(v)
    return devices.to_device(v) if isinstance(v, torch.device) else v


def _name(function: Callable) -> str:
    if getattr(function, "__name__", "") == "__get__":  # a property of torch.Tensor
        return f"Tensor.{function.__self__.__name__}"
    return getattr(function, "__name__", "operation")


# -- torch.eye, which Thunder has not: also the standard basis of Jacobians --------------------------------------------


def _eye_meta(n: int, m: int, *, device: str, dtype: torch.dtype) -> TensorProxy:
    return TensorProxy(shape=(n, m), device=devices.to_device(device), dtype=dtypes.to_dtype(dtype), requires_grad=False)


def _eye(n: int, m: int, *, device: str, dtype: Any) -> torch.Tensor:
    return torch.eye(n, m, device=device, dtype=for_torch(dtype))


_EYE = opaque_executor.register_operator("eye", meta=_eye_meta, fn=_eye)


def eye(n: int, m: int | None = None, *, device: Any = None, dtype: Any = None) -> TensorProxy:
    """Write the identity matrix of n rows and m columns into the open trace."""
    device = torch.get_default_device() if device is None else devices.to_torch_device(device)
    dtype = torch.get_default_dtype() if dtype is None else dtypes.to_torch_dtype(dtype)
    return _EYE(int(n), int(n if m is None else m), device=str(device), dtype=dtype)


@lookasides.instead_of(torch.eye)
def _torch_eye(
    n: WrappedValue,
    m: WrappedValue | None = None,
    *,
    device: WrappedValue | None = None,
    dtype: WrappedValue | None = None,
    layout: WrappedValue | None = None,
    requires_grad: WrappedValue | None = None,
) -> Any:
    filename, positions = get_interpreterruntimectx().get_current_user_source_location()
    get_jit_ctx().computation_trace.set_current_source_location(filename, positions)
    values = [None if w is None else w.value for w in (m, device, dtype)]
    return wrapped(eye(n.value, values[0], device=values[1], dtype=values[2]), n)
