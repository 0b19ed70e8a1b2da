"""Calls of transformed functions that Thunder's interpreter meets: their programs are written into the trace being acquired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map

from thunder_norm.errors import InnerDerivativeTypeError, ThunderNormError, TransformError, TransformTypeError, with_details
from thunder_norm.functions import acquisition
from thunder_norm.functions.acquisition import Interrupted
from thunder_norm.functions.interpreted import active_level, announce, closed, is_open, values_of, wrapped
from thunder_norm.functions.missing_gradients import with_gradients
from thunder_norm.functions.programs import described, detach, is_differentiable
from thunder_norm.functions.readability import tidied
from thunder_norm.functions.transformed import Call, Transformed, run_interpreted
from thunder_norm.functions.writes.aliasing import views_in
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.crossing.broadcast import broadcast_scalars_of
from thunder_norm.subclass.interpreting.interception import current_acquisition
from thunder_norm.subclass.recording.trace import leaf_proxies
from thunder_norm.tracing import hooks, lookasides
from thunder_norm.tracing.activity import depending_on_gradients
from thunder_norm.tracing.hooks import disable_autocast
from thunder_norm.tracing.locations import with_users_line
from thunder_norm.tracing.recording import gradients_recorded, scope
from thunder_norm.tracing.torch_functions.named_results import without_fields
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, do_raise
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol


@lookasides.for_our(Transformed.__call__)
def _call(transformed: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    return _written(transformed, args, kwargs, _for_program, _for_thunders_autograd)


@lookasides.for_our(run_interpreted)
def _call_outermost(transformed: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    interpreted = current_acquisition()
    if interpreted is not None:
        interpreted.is_transformed = True
    with acquisition.grad_enabled():  # the call records nothing, which does not make constants of what it writes
        return _written(transformed, args, kwargs, _with_surroundings)


def _for_program(call: Call, bsyms: Sequence[BoundSymbol], result: Any) -> Any:
    """The result of a call in a user's program, which Thunder can return."""
    return result if active_level() is not None else without_fields(result)


def _for_thunders_autograd(bsyms: list[BoundSymbol]) -> list[BoundSymbol]:
    """The operations of a call as Thunder differentiates them right, if it is going to."""
    cd = get_compile_data()
    if active_level() is not None or cd.disable_torch_autograd_support or not cd.is_grad_enabled:
        return bsyms
    trace = get_jit_ctx().computation_trace
    differentiated = depending_on_gradients([b for written in (*trace.scopes[:-1], bsyms) for b in written])
    if differentiated.isdisjoint(p.name for b in bsyms for p in b.flat_proxy_args):
        return bsyms
    return with_gradients(broadcast_scalars_of(bsyms, trace), get_jit_ctx().ad_hoc_executor, trace)


def _with_surroundings(call: Call, bsyms: Sequence[BoundSymbol], result: Any) -> Any:
    given = {p.name for p in call.tensors}
    used_at_all = {p.name for b in bsyms for p in b.flat_proxy_args} | {
        p.name for p in tree_flatten(result)[0] if isinstance(p, TensorProxy)
    }
    acquisition.forget_replaced(used_at_all | given)
    used = {p.name: p for b in bsyms for p in b.flat_proxy_args if isinstance(p, TensorProxy) and p.history is not None}
    used |= {p.name: p for p in tree_flatten(result)[0] if isinstance(p, TensorProxy) and p.history is not None}
    captured = tuple(p for p in used.values() if p.requires_grad and p.name not in given)
    leaves, spec = tree_flatten(result, is_leaf=is_open)
    call.result_specs.append(spec)
    return tuple(leaves), len(call.result_specs) - 1, captured, any(draws_numbers(b) for b in bsyms), _hidden_wrappers(call)


def _hidden_wrappers(call: Call) -> str | None:
    """Wrappers that require grad and are no arguments: there is no telling what of the result depends on them."""
    interpreted = current_acquisition()
    if interpreted is None:
        return None
    given = {p.name for p in call.tensors}
    for proxy in interpreted.wrappers.proxies():
        spec = interpreted.wrappers.specs.get(id(proxy.fake))
        if spec is not None and spec.requires_grad and not {p.name for p in leaf_proxies(interpreted, proxy.fake)} <= given:
            return with_details(
                f"a function under {call.name} uses a {spec.cls.__name__} that requires grad and is not among its arguments",
                why="the result would not be connected to it",
                instead="pass it as an argument, or .detach() it, or call the function under torch.no_grad()",
            )
    return None


def _check_not_torchs(call: Call, written: Sequence[BoundSymbol], result: Any) -> None:
    """Refuse to transform what torch's autograd differentiates, or a class has its own formulas for.

    The operations of the call are constants to torch's autograd, which is right for plain tensors without gradients.
    """
    interpreted = current_acquisition()
    if interpreted is None or not (interpreted.autograd.is_running or interpreted.meets_wrappers):
        return
    inside = {p.name for w in interpreted.wrappers.proxies() for p in leaf_proxies(interpreted, w.fake)}
    named = [*call.tensors, *tree_flatten(result)[0], *(p for b in written for p in b.flat_proxy_args)]
    used = [p for p in named if isinstance(p, TensorProxy)]
    if not interpreted.autograd.is_running:
        returns_wrapper = any(map(is_open, tree_flatten(result, is_leaf=is_open)[0]))
        if returns_wrapper and is_grad_enabled() and any(map(interpreted.autograd.requires_grad, used)):
            interpreted.autograd.starts_late = True  # the wrapper has a history, which its class makes of what requires grad
        return
    if any(p.name in inside or (is_grad_enabled() and interpreted.autograd.requires_grad(p)) for p in used):
        raise TransformError(
            with_details(
                "a transformed function of wrappers, or of what requires grad, in a program with wrappers that require grad",
                why="gradients of the program are torch's, through the wrappers' own formulas, and those of the function would not be",
                instead="call the transformed function outside thunder.jit, or the program with wrappers detached or under torch.no_grad()",
            )
        )


def _written(
    transformed: WrappedValue,
    args: tuple,
    kwargs: dict,
    finish: Callable[[Call, Sequence[BoundSymbol], Any], Any],
    prepare: Callable[[list[BoundSymbol]], list[BoundSymbol]] = lambda bsyms: bsyms,
) -> Any:
    """Write the program of a call into the open trace; its result, for the interpreter."""
    trace = get_jit_ctx().computation_trace
    try:
        with scope(trace) as written, disable_autocast():
            call = Call(transformed, args, kwargs)
            bsyms, result = _emitted(lambda: transformed.value.emit(call), written)
            _check_not_torchs(call, written, result)
            bsyms = prepare(bsyms)
            acquisition.name_printably(tree_flatten((call.own, call.tensors))[0])
    except Interrupted:
        return INTERPRETER_SIGNALS.EXCEPTION_RAISED
    except ThunderNormError as e:
        return do_raise(with_users_line(e))
    except Exception as e:  # of a rule, or of Thunder's own checks: the user's to see, not a crash of the interpreter
        return do_raise(e)
    result = finish(call, bsyms, result)
    try:
        shown = closed(result)
    except ThunderNormError as e:
        return do_raise(with_users_line(e))
    announce(shown, bsyms)
    trace.peek_scope().extend(bsyms)
    acquisition.reopen([*tree_flatten(result)[0], *(p for b in bsyms for p in b.flat_proxy_outs)])
    return wrapped(shown, transformed)


def _emitted(emit: Callable[[], Any], bsyms: list[BoundSymbol]) -> tuple[list[BoundSymbol], Any]:
    """What `emit` writes, tidied, and its result.

    Under ``torch.no_grad()`` the operations have derivatives all the same, which a transform takes of what it has written itself; what
    comes out of it is a constant there.
    """
    is_recorded = is_grad_enabled()
    with gradients_recorded(True):
        written = emit()
        tidy, result = tidied(bsyms, written)
        result = _apart_from_given(bsyms, tidy, written, result)
    if is_recorded:
        return tidy, result
    made, kept = ({o.name for b in operations for o in b.flat_proxy_outs} for operations in (bsyms, tidy))
    constants = []

    def constant(p: Any, of: Any) -> Any:
        if not isinstance(p, TensorProxy) or of.name not in made:
            return p
        with scope(
            get_jit_ctx().computation_trace
        ) as copies:  # of what was given, where an operation was left out that does nothing
            p = p if p.name in kept else prims.shallow_copy(p)
        tidy.extend(copies)
        constants.append(p.name)
        return p

    result = tree_map(constant, result, written)
    detach([o for b in tidy for o in b.flat_proxy_outs if o.name in constants])
    return tidy, result


def _apart_from_given(written: list[BoundSymbol], tidy: list[BoundSymbol], before: Any, result: Any) -> Any:
    """The result, with copies of what was given where torch computes a tensor of its own: the gradient x of ``(w * x).sum()``."""
    makers = {o.name: b for b in written for o in b.flat_proxy_outs if all(o.name != a.name for a in b.flat_proxy_args)}
    kept, copies = {o.name for b in tidy for o in b.flat_proxy_outs}, dict[str, TensorProxy]()

    def apart(p: Any, of: Any) -> Any:
        if not isinstance(p, TensorProxy) or p.name in kept:
            return p
        root = of.name
        while root in makers and (viewed := views_in(makers[root]).get(root)) is not None:
            root = viewed
        if root not in makers:
            return p
        if of.name not in copies:
            with scope(get_jit_ctx().computation_trace) as copying:
                copies[of.name] = prims.clone(p)
            tidy.extend(copying)
        return copies[of.name]

    return tree_map(apart, result, before)


def write_operations(emit: Callable[[], Any], like: WrappedValue) -> Any:
    """Write what `emit` does into the open trace, as Thunder differentiates it right; its result, for the interpreter."""
    trace = get_jit_ctx().computation_trace
    try:
        with scope(trace) as bsyms, disable_autocast():
            bsyms, result = _emitted(emit, bsyms)
            bsyms = _for_thunders_autograd(bsyms)
    except ThunderNormError as e:
        return do_raise(with_users_line(e))
    except Exception as e:  # torch's own words for a mistake
        return do_raise(e)
    trace.peek_scope().extend(bsyms)
    return wrapped(result, like)


def constructor(function: Callable) -> Callable:
    """Let the interpreter call what makes a transformed function instead of interpreting it."""
    use = hooks.first_use(function)

    @lookasides.for_our(use)
    @lookasides.for_our(function)
    def lookaside(target: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        values, options = values_of(args, kwargs)
        try:
            made = wrapped(function(target.value, *values, **options), target)
        except ThunderNormError as e:
            return do_raise(with_users_line(e))
        _remember_function(made, target)
        return made

    return use


def _remember_function(made: WrappedValue, target: WrappedValue) -> None:
    """Have the interpreter know the user's function, where it comes from and what it closes over, as that of a transformed function.

    A transformed function may be one of a transformed function of the user's, as a Hessian is.
    """
    acquisition.keep(made)
    function = made.value.function
    if function is target.value:
        made.attribute_wrappers["function"] = target
        return
    inner = wrapped(function, target)
    made.attribute_wrappers["function"] = inner
    _remember_function(inner, target)


# -- what goes in, and what comes out -----------------------------------------------------------------------------------


def check_differentiable(value: Any, what: str, verb: str, otherwise: str) -> None:
    """Refuse what has no derivative.

    Args:
        value: a leaf of the arguments.
        what: how a message calls it.
        verb: what it cannot do then: "be differentiated", "move".
        otherwise: what to do with it instead.

    Raises:
        TransformTypeError: it is no floating point tensor.
    """
    if not isinstance(value, TensorProxy):
        raise TransformTypeError(
            with_details(
                f"{what} is no tensor and cannot {verb}",
                got=f"a {type(value).__name__}",
                instead=f"torch.tensor(...) for a number; {otherwise}",
            )
        )
    if not is_differentiable(value):
        raise TransformTypeError(
            with_details(
                f"{what} is not floating point and cannot {verb}",
                got=f"a tensor of {described(value)}",
                instead=f"{otherwise}, or convert it with .to(torch.float32)",
            )
        )


def check_fits(given: Any, like: TensorProxy, what: str, of: str) -> None:
    """Refuse a tangent or a cotangent that has not the shape and the dtype of what it is one of.

    Raises:
        TransformTypeError: it is no tensor.
        TransformError: it does not fit.
    """
    if not isinstance(given, TensorProxy):
        raise TransformTypeError(with_details(f"{what} is no tensor", got=f"a {type(given).__name__}"))
    if described(given) != described(like):
        raise TransformError(with_details(f"{what} does not fit its {of}", **{of: described(like)}, got=described(given)))


def check_result(result: Any, name: str, *, is_floating: bool = False) -> None:
    """Refuse a function whose result has leaves that are no tensors.

    Raises:
        TransformTypeError: it has, or, where they are to be, they are not floating point.
    """
    check_has_derivative(result, name)
    for path, v in tree_flatten_with_path(result)[0]:
        if not isinstance(v, TensorProxy) or (is_floating and not is_differentiable(v)):
            got = f"a tensor of {described(v)}" if isinstance(v, TensorProxy) else f"a {type(v).__name__}"
            raise TransformTypeError(
                with_details(
                    f"{name} needs a function that returns {'floating point ' * is_floating}tensors",
                    got=f"{got} at result{keystr(path)}",
                    instead="has_aux=True if it returns (tensors, aux)",
                )
            )


def check_has_derivative(result: Any, name: str) -> None:
    """Refuse to differentiate a wrapper that says something of its inner tensor which does not hold for the derivative.

    Raises:
        TransformTypeError: there is one in `result`.
    """
    for v in tree_flatten(result, is_leaf=is_open)[0]:
        if is_open(v) and v.undifferentiated is not None:
            raise without_derivative(
                f"{name} of a function that returns a {v.class_name}", "return its backing (.backing), or the norm (.norm_size)"
            )


def without_derivative(what: str, instead: str) -> InnerDerivativeTypeError:
    """The error for a derivative that no wrapper can hold."""
    return InnerDerivativeTypeError(
        with_details(
            what,
            why="a derivative is another function, with norms of its own, and no rule says them",
            instead=instead,
        )
    )


def split_aux(result: Any, has_aux: bool, name: str) -> tuple[Any, Any]:
    """The differentiable part of a function's result, and the rest.

    Raises:
        TransformTypeError: `has_aux` says that there are two parts, but there are not.
    """
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        raise TransformTypeError(
            with_details(
                f"{name} with has_aux=True needs a function that returns a tuple (result, aux)", got=f"a {type(result).__name__}"
            )
        )
    return result
