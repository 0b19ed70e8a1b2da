"""Transformed functions: what `grad`, `vmap` and the others return.

Called on tensors, a transformed function is compiled by ``thunder.jit``, which unpacks and guards its arguments and caches the
program by their metadata.  Met by Thunder's interpreter, be it in that compilation, in a user's ``thunder.jit`` or in another
transformed function, the call is a *lookaside*: the transform writes its program into the trace that is being acquired.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import thunder
import torch
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, _interpret_call, do_raise, wrap_const
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.transforms.autocast import disable_autocast
from torch.utils._pytree import TreeSpec, tree_flatten

from thunder_norm.errors import ThunderNormError, TransformError, TransformTypeError, with_details
from thunder_norm.functions import (  # noqa: F401 - some register lookasides
    acquisition,
    autograd,
    control_flow,
    functional_call,
    registry,
)
from thunder_norm.functions.acquisition import Interrupted, Program
from thunder_norm.functions.jitted_gradients import with_gradients
from thunder_norm.functions.levels import active_level
from thunder_norm.functions.readability import tidied
from thunder_norm.functions.wrappers import announce, closed, is_open
from thunder_norm.subclass import plain
from thunder_norm.subclass.broadcast import broadcast_scalars_of
from thunder_norm.subclass.interception import current_acquisition
from thunder_norm.subclass.reach import may_construct_wrappers
from thunder_norm.subclass.trace import leaf_proxies
from thunder_norm.tracing import hooks, lookasides
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.named_results import without_fields


class Call:
    """One call of a transformed function, met by the interpreter."""

    def __init__(self, transformed: WrappedValue, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]):
        self._transformed = transformed
        self._args = args
        self._kwargs = kwargs
        self.name: str = transformed.value.name
        self.result_specs: list[TreeSpec] = transformed.value.result_specs
        self.skipped = transformed.value.num_own_arguments
        values, self.kwargs = acquisition.values_of(args, kwargs)
        self.own, self.args = values[: self.skipped], values[self.skipped :]

    def acquire(
        self, function: str = "function", args: Sequence[Any] | None = None, shapes: Callable[..., Any] | None = None
    ) -> Program:
        """The attribute `function` of the transformed function as a flat program, for this call's arguments or for `args`."""
        wrapped = _interpret_call(getattr, self._transformed, wrap_const(function))
        if args is not None:
            given = tuple(acquisition.wrapped(a, self._transformed) for a in args)
            return acquisition.acquire(wrapped, self.name, given, {}, shapes)
        return acquisition.acquire(wrapped, self.name, self._args[self.skipped :], self._kwargs, shapes)

    @property
    def tensors(self) -> tuple[TensorProxy, ...]:
        """The tensors among the arguments, in the order of the arguments of `acquire`'s program."""
        return tuple(v for v in tree_flatten((self.args, self.kwargs))[0] if isinstance(v, TensorProxy))


class _Ours(hooks.Participant):
    """Has the interpreter know, in compilations of ours without wrappers, that they are ours."""

    def lookaside(self, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Any:
        """Values that are asked for are refused by `control_flow`, for a function under a transform."""
        return plain.about_plain(None, fn, args) or hooks.lookaside_for(fn, *args, **kwargs)


# What compiles a function whose arguments have wrappers in them, by a class of those.
_interpreters: dict[type[torch.Tensor], type[hooks.Participant]] = {}


def compiles(cls: type[torch.Tensor]) -> Callable[[type[hooks.Participant]], type[hooks.Participant]]:
    """Have a transform compile the functions under function transforms that are given a `cls`; the most derived class decides."""

    def enter(transform: type[hooks.Participant]) -> type[hooks.Participant]:
        _interpreters[cls] = transform
        return transform

    return enter


class Transformed:
    """A function of tensors made from another one by a transform.

    Subclasses write the transformed program in `emit`.
    """

    name = "transform"
    num_own_arguments = 0  # how many of the first arguments are the transform's, not the function's

    def __init__(self, function: Callable):
        if not callable(function):
            raise TransformTypeError(
                with_details(f"{self.name} takes a function, got {type(function).__name__}", instead=f"{self.name}(f)(x)")
            )
        self.function = function
        self._programs: dict[type[hooks.Participant], Callable] = {}
        self.result_specs: list[TreeSpec] = []  # the structures of results, by their number in what `_run` returns
        hooks.install()

    def emit(self, call: Call) -> Any:
        """Write the program for a call into the open trace and return the result, proxies in place of tensors."""
        raise NotImplementedError

    def _compiled(self, transform: type[hooks.Participant]) -> Callable:
        found = self._programs.get(transform)
        if found is None:

            def program(*args: Any, **kwargs: Any) -> Any:
                return _run(self, *args, **kwargs)

            found = thunder.jit(program, transforms=[transform()], disable_torch_autograd=True)  # `autograd` does that
            self._programs[transform] = found
        return found

    def compiled_for(self, wrappers: Sequence[torch.Tensor]) -> Callable:
        """The compiled function for arguments with these wrappers in them: subclasses are interpreted where there are some."""
        function = self.function
        while isinstance(function, Transformed):
            function = function.function
        may_construct = isinstance(function, types.FunctionType) and may_construct_wrappers(function)
        classes = {cls for v in wrappers for cls in type(v).__mro__} | ({torch.Tensor} if may_construct else set())
        fitting = [cls for cls in _interpreters if cls in classes]
        chosen = _interpreters[max(fitting, key=lambda cls: len(cls.__mro__))] if fitting else _Ours
        self._last = self._compiled(chosen)
        return self._last

    def __getattr__(self, name: str) -> Any:
        if name in ("_lc_cs", "_lc_cd") and "_last" in self.__dict__:  # for thunder.last_traces and its like
            return getattr(self._last, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def code(self) -> str:
        """The transformed program of the last call, as text: Python without what each operation consists of.

        Raises:
            TransformError: it has not been called yet.
        """
        if "_last" not in self.__dict__:
            raise TransformError(f"{self!r} has not been called yet")
        lines = str(thunder.last_traces(self._last)[0]).splitlines()
        begin = next(i for i, line in enumerate(lines) if line.startswith("def "))
        return "\n".join(line for line in lines[begin:] if not line.startswith("    #"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the transformed function on tensors.

        The result is connected to the arguments, and to parameters that the function uses, for torch's autograd, to any order.
        """
        return autograd.run(self, args, kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({getattr(self.function, '__qualname__', repr(self.function))})"


def _run(
    transformed: Transformed, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], int, tuple[torch.Tensor, ...], bool, str | None]:
    """Interpreted: a call of `transformed`, as the leaves of its result and the number of their structure.

    Thunder's programs return no instances of classes.  Then: what it uses beside its arguments that requires grad; whether it draws
    numbers; why the result cannot be connected for torch's autograd, if it cannot.
    """
    raise NotImplementedError


@lookasides.for_our(Transformed.__call__)
def _call(transformed: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    return _written(transformed, args, kwargs, _for_program, _for_thunders_autograd)


@lookasides.for_our(_run)
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
    if not any(p.requires_grad for b in bsyms for p in b.flat_proxy_args if isinstance(p, TensorProxy)):
        return bsyms
    return with_gradients(broadcast_scalars_of(bsyms, get_jit_ctx().computation_trace), get_jit_ctx().ad_hoc_executor)


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
    for proxy in interpreted.subclass_proxies():
        spec = interpreted.input_specs.get(id(proxy.fake))
        if spec is not None and spec.requires_grad and not {p.name for p in leaf_proxies(interpreted, proxy.fake)} <= given:
            return with_details(
                f"a function under {call.name} uses a {spec.cls.__name__} that requires grad and is not among its arguments",
                why="the result would not be connected to it",
                instead="pass it as an argument, or .detach() it, or call the function under torch.no_grad()",
            )
    return None


def _check_not_torchs() -> None:
    """Refuse to transform what torch's autograd differentiates: its operations are constants to any other transform."""
    interpreted = current_acquisition()
    if interpreted is not None and interpreted.differentiates:
        raise TransformError(
            with_details(
                "a transformed function in a program with wrappers that require grad",
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
        with acquisition.scope(trace) as bsyms, disable_autocast():
            _check_not_torchs()
            call = Call(transformed, args, kwargs)
            result = transformed.value.emit(call)
            _check_not_torchs()  # the function may have met the first such wrapper
            bsyms, result = tidied(bsyms, result)
            bsyms = prepare(bsyms)
            acquisition.name_printably(tree_flatten((call.own, call.tensors))[0])
    except Interrupted:
        return INTERPRETER_SIGNALS.EXCEPTION_RAISED
    except ThunderNormError as e:
        return do_raise(_with_line(e))
    except Exception as e:  # of a rule, or of Thunder's own checks: the user's to see, not a crash of the interpreter
        return do_raise(e)
    result = finish(call, bsyms, result)
    try:
        shown = closed(result)
    except ThunderNormError as e:
        return do_raise(_with_line(e))
    announce(shown, bsyms)
    trace.peek_scope().extend(bsyms)
    acquisition.reopen([*tree_flatten(result)[0], *(p for b in bsyms for p in b.flat_proxy_outs)])
    return acquisition.wrapped(shown, transformed)


def constructor(function: Callable) -> Callable:
    """Let the interpreter call what makes a transformed function instead of interpreting it."""
    use = hooks.first_use(function)

    @lookasides.for_our(use)
    @lookasides.for_our(function)
    def lookaside(target: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        values, options = acquisition.values_of(args, kwargs)
        try:
            made = acquisition.wrapped(function(target.value, *values, **options), target)
        except ThunderNormError as e:
            return do_raise(_with_line(e))
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
    inner = acquisition.wrapped(function, target)
    made.attribute_wrappers["function"] = inner
    _remember_function(inner, target)


_SHAREABLE = (types.BuiltinFunctionType, types.FunctionType)


@functools.lru_cache(maxsize=256)
def _shared(make: Callable, function: Callable, generation: int, *options: Any) -> Transformed:
    return make(function, *options)


def shared(make: Callable, function: Any, *options: Any) -> Any:
    """``make(function, *options)``, the same each time for a function that closes over nothing, so that it is compiled once."""
    if type(function) in _SHAREABLE and getattr(function, "__closure__", None) is None:
        try:
            hash(options)
        except TypeError:
            return make(function, *options)
        return _shared(make, function, registry.generation(), *options)
    return make(function, *options)


def draws_numbers(bsym: BoundSymbol) -> bool:
    """Whether an operation draws random numbers."""
    return has_tags(bsym, {prims.OpTags.RANDOM_OP}) or any(draws_numbers(s) for s in bsym.subsymbols)


def _with_line(error: ThunderNormError) -> ThunderNormError:
    location = location_of_user()
    if location is not None and "\n  at " not in str(error):
        error.args = (f"{error}\n  at  {location}", *error.args[1:])
    return error
