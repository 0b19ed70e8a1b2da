"""Transformed functions: what `grad`, `vmap` and the others return.

Called on tensors, a transformed function is compiled by ``thunder.jit``, which unpacks and guards its arguments and caches the
program by their metadata.  Met by Thunder's interpreter, be it in that compilation, in a user's ``thunder.jit`` or in another
transformed function, the call is a *lookaside* (see `calls`): the transform writes its program into the trace that is being acquired.

A compiled function runs without recording anything; if something it depends on requires grad, its results get a node of torch's
autograd whose backward is the `vjp` of the transformed function, itself a transformed function.  So nothing is spent on a backward
that nobody asks for, and gradients of any order are those of the transforms.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from thunder_norm.errors import TransformError, TransformTypeError, UnsupportedOpError, with_details
from thunder_norm.functions import registry
from thunder_norm.functions.acquisition import Call
from thunder_norm.functions.interpreted import is_open, opened_like, proxies_of
from thunder_norm.functions.programs import outputs_of
from thunder_norm.functions.reverse import evaluate_vjp
from thunder_norm.subclass.backward import side_effects
from thunder_norm.subclass.classes.protocol import WrapperSpec
from thunder_norm.subclass.classes.wrapper_scan import may_construct_wrappers
from thunder_norm.subclass.crossing.turns import with_all_draws
from thunder_norm.subclass.interpreting import plain, selections, sequences
from thunder_norm.tracing import hooks
from thunder_norm.tracing.torch_functions import random_numbers
from thunder_norm.wrapper_classes import is_wrapper
import thunder
from thunder.core import dtypes
from thunder.core.interpreter import WrappedValue
from thunder.core.jit_ext import JitCtx
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, get_tracectx


class _Ours(hooks.Participant):
    """Has the interpreter know, in compilations of ours without wrappers, that they are ours."""

    def surrounding(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        """What the function can reach is what it was if the acquisition fails."""
        return side_effects.watched(fn, args, kwargs)

    def write_epilogue(self, ctx: JitCtx, epilogue: TraceCtx, process: Callable[[], None]) -> None:
        """Write what the function has kept."""
        side_effects.write(ctx, epilogue, None, process)

    def result(self, value: WrappedValue, find: Callable[[WrappedValue], Any]) -> Any:
        """Objects that the function has made are made anew in each call."""
        return side_effects.result(value, find, get_tracectx())

    def lookaside(self, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Any:
        """Values that are asked for are refused by `interpreted`, for a function under a transform."""
        found = (
            selections.lookaside(fn, args, kwargs)
            or plain.about_plain(None, fn, args)
            or hooks.lookaside_for(fn, *args, **kwargs)
        )
        return sequences.given_plainly(found, fn, args, kwargs)

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, *, executors_list: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Have numbers be drawn that nobody uses: those that are drawn later are others."""
        return prologue_trace, with_all_draws(computation_trace), epilogue_trace


# What compiles a function whose arguments have wrappers in them, by a class of those.
_interpreters: dict[type[torch.Tensor], type[hooks.Participant]] = {}


def compiles(cls: type[torch.Tensor]) -> Callable[[type[hooks.Participant]], type[hooks.Participant]]:
    """Have a transform compile the functions under function transforms that are given a `cls`; the most derived class decides."""

    def enter(transform: type[hooks.Participant]) -> type[hooks.Participant]:
        _interpreters[cls] = transform
        return transform

    return enter


def check_function(function: Any, name: str, **details: str) -> None:
    """Refuse what cannot be called, given to what is called `name`.

    Raises:
        TransformTypeError: it cannot.
    """
    if not callable(function):
        raise TransformTypeError(with_details(f"{name} takes a function, got {type(function).__name__}", **details))


class Transformed:
    """A function of tensors made from another one by a transform.

    Subclasses write the transformed program in `emit`.
    """

    name = "transform"
    num_own_arguments = 0  # how many of the first arguments are the transform's, not the function's

    def __init__(self, function: Callable):
        check_function(function, self.name, instead=f"{self.name}(f)(x)")
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
                return run_interpreted(self, *args, **kwargs)

            found = thunder.jit(program, transforms=[transform()], disable_torch_autograd=True)  # `_Node` does that
            self._programs[transform] = found
        return found

    def compiled_for(self, wrappers: Sequence[torch.Tensor]) -> tuple[Callable, bool]:
        """The compiled function for arguments with these wrappers in them: subclasses are interpreted where there are some.

        And whether gradients go to their inner tensors whatever these require.
        """
        function = self.function
        while isinstance(function, Transformed):
            function = function.function
        may_construct = isinstance(function, types.FunctionType) and may_construct_wrappers(function)
        classes = {cls for v in wrappers for cls in type(v).__mro__} | ({torch.Tensor} if may_construct else set())
        fitting = [cls for cls in _interpreters if cls in classes]
        chosen = _interpreters[max(fitting, key=lambda cls: len(cls.__mro__))] if fitting else _Ours
        self._last = self._compiled(chosen)
        return self._last, chosen.goes_inside

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
        return _run(self, args, kwargs)

    @functools.cached_property
    def backward(self) -> Transformed:
        """Cotangents of the results, then the arguments, to those of the arguments and of what the function uses beside them."""
        return Backward(self)

    def __repr__(self) -> str:
        return f"{self.name}({getattr(self.function, '__qualname__', repr(self.function))})"


def run_interpreted(
    transformed: Transformed, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], int, tuple[torch.Tensor, ...], bool, str | None]:
    """Interpreted: a call of `transformed`, as the leaves of its result and the number of their structure.

    Thunder's programs return no instances of classes.  Then: what it uses beside its arguments that requires grad; whether it draws
    numbers; why the result cannot be connected for torch's autograd, if it cannot.

    Raises:
        UnsupportedOpError: it is run by Python.
    """
    raise UnsupportedOpError(
        with_details(
            f"a call of {transformed!r} where torch follows operations as they run",
            why="what is around the call (torch.func, dual numbers, a TorchFunctionMode) is told of the operations of an eager program, and "
            "this one is compiled whole",
            instead="the transform of torch.func, or call it outside",
        )
    )


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


class Backward(Transformed):
    """Cotangents of the results, then the arguments, to those of the arguments and of what the function uses beside them.

    Wrappers have wrappers as cotangents, or, if the second argument says so, one for each inner tensor.
    """

    num_own_arguments = 2

    def __init__(self, transformed: Transformed):
        super().__init__(transformed)
        self.name = transformed.name

    def emit(self, call: Call) -> Any:
        program = call.acquire()
        cotangents, opens = call.own
        inputs = [*call.tensors, *program.captured]
        given = tree_flatten((call.args, call.kwargs), is_leaf=is_open)[0]
        wrt = [p.requires_grad or (is_open(v) and v.requires_grad) for v in given for p in proxies_of(v)]
        wrt = [w and dtypes.is_inexact_dtype(p.dtype) for w, p in zip(wrt, call.tensors, strict=True)]
        wrt += [isinstance(p, TensorProxy) and p.requires_grad and dtypes.is_inexact_dtype(p.dtype) for p in program.captured]
        outs, pullback = evaluate_vjp(program.trace, inputs, wrt)
        results = tree_flatten(program.result(outputs_of(program.trace)), is_leaf=is_open)[0]
        found = iter(pullback(cotangents if opens else opened_like(results, cotangents)))
        gradients: list[Any] = []
        for v in given:
            own = [next(found) for _ in proxies_of(v)]
            gradients += own if opens or not is_open(v) else [v.gradient(own)]
        captured = [(p, g) for p, g, w in zip(program.captured, found, wrt[len(call.tensors) :], strict=True) if w]
        # the results keep every operation that draws numbers, in the order of the forward
        return tuple(gradients), tuple(g for _, g in captured), tuple(p for p, _ in captured), outs


# -- in torch's autograd ------------------------------------------------------------------------------------------------


@dataclass
class _EagerCall:
    """One call of a transformed function on tensors."""

    transformed: Transformed
    spec: TreeSpec
    leaves: list[Any]  # of the arguments; those that autograd keeps are None
    positions: list[int]  # of what autograd keeps among them
    num_inputs: int  # of the node, what the function uses beside its arguments not counted
    opens: bool  # whether the inner tensors of wrappers are inputs and results of the node, in place of the wrappers
    rng_states: random_numbers.States | None
    is_connected: list[bool]  # of each result: not those that the function returns as it found them


def _run(transformed: Transformed, args: tuple, kwargs: dict) -> Any:
    """Call a transformed function on tensors."""
    tensors = _tensors_in(args, kwargs)
    wrappers = [t for t in tensors if type(t) not in _PLAIN and is_wrapper(t)]
    compiled, goes_inside = transformed.compiled_for(wrappers)
    if not torch.is_grad_enabled():
        found, number, *_ = compiled(*args, **kwargs)
        return tree_unflatten(found, transformed.result_specs[number])
    rng_states = random_numbers.states()
    has_containers = any(not isinstance(v, torch.Tensor) and type(v) not in _LEAVES for v in (*args, *kwargs.values()))
    if has_containers and any(t.requires_grad for t in tensors):
        # containers of the call's own: what the function reads of the same ones in its surroundings has gradients of its own
        args, kwargs = tree_unflatten(*tree_flatten((args, kwargs)))
    with torch.no_grad():
        found, number, captured, is_random, refusal = compiled(*args, **kwargs)
    result = tree_unflatten(found, transformed.result_specs[number])
    opens = _opens(wrappers, goes_inside)
    inputs = [inner for t in tensors for inner in _inner(t)] if opens else tensors
    if refusal:
        raise TransformError(refusal)
    if not any(t.requires_grad for t in (*inputs, *captured)):
        return result
    leaves, spec = tree_flatten((args, kwargs))
    positions = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and not (opens and is_wrapper(v))]
    kept = [None if i in positions else v for i, v in enumerate(leaves)]
    call = _EagerCall(transformed, spec, kept, positions, len(inputs), opens, rng_states if is_random else None, [])
    return _connected(call, result, inputs, captured)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _opens(wrappers: Sequence[torch.Tensor], goes_inside: bool) -> bool:
    """Whether gradients flow into inner tensors: those of some wrapper require grad, or all are asked for, and no wrapper does."""
    if not wrappers or any(t.requires_grad for t in wrappers):
        return False
    return goes_inside or any(inner.requires_grad for t in wrappers for inner in _inner(t))


def _inner(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return WrapperSpec.of(t).leaves(t) if is_wrapper(t) else (t,)


def _connected(call: _EagerCall, result: Any, inputs: Sequence[torch.Tensor], captured: Sequence[torch.Tensor]) -> Any:
    """The result, its tensors connected to `inputs` and `captured`."""
    outs, out_spec = tree_flatten(result)
    own = {id(t) for t in captured}  # what the function returns as it found it is that
    specs = [WrapperSpec.of(v) if call.opens and isinstance(v, torch.Tensor) and is_wrapper(v) else None for v in outs]
    tensors = [
        (inner, id(v) not in own)
        for v, s in zip(outs, specs, strict=True)
        if isinstance(v, torch.Tensor)
        for inner in ((v,) if s is None else s.leaves(v))
    ]
    call.is_connected = [connects for _, connects in tensors]
    computed = [t for t, connects in tensors if connects]
    found = iter(_Node.apply(call, computed, *inputs, *captured)) if computed else iter(())
    for i, (v, s) in enumerate(zip(outs, specs, strict=True)):
        if isinstance(v, torch.Tensor) and id(v) not in own:
            outs[i] = next(found) if s is None else s.build(tuple(next(found) for _ in s.leaves(v)))
    return tree_unflatten(outs, out_spec)


def _tensors_in(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors among arguments in the order of ``tree_flatten``, which takes ten times as long to find them."""
    found: list[torch.Tensor] = []
    remaining: list[Any] = [kwargs, args]
    while remaining:
        v = remaining.pop()
        kind = type(v)
        if isinstance(v, torch.Tensor):
            found.append(v)
        elif kind is tuple or kind is list:
            remaining.extend(reversed(v))
        elif kind is dict:
            remaining.extend(reversed(v.values()))
        elif kind not in _LEAVES:
            leaves = tree_flatten(v)[0]
            found.extend(t for t in leaves if isinstance(t, torch.Tensor))
    return found


_LEAVES = (int, float, bool, str, type(None))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _EagerCall, computed: Sequence[torch.Tensor], *tensors: torch.Tensor) -> tuple:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        given = {id(t) for t in tensors}
        outs = tuple(t.view_as(t) if id(t) in given else t for t in computed)
        ctx.mark_non_differentiable(*(t for t in outs if not (t.is_floating_point() or t.is_complex())))
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple:
        call: _EagerCall = ctx.call
        inputs, captured = ctx.saved_tensors[: call.num_inputs], ctx.saved_tensors[call.num_inputs :]
        leaves = list(call.leaves)
        if call.opens:
            plain = iter(t for t, is_plain in zip(inputs, _is_plain(call), strict=True) if is_plain)
        else:
            plain = iter(inputs)
        for i in call.positions:
            leaves[i] = next(plain)
        args, kwargs = tree_unflatten(leaves, call.spec)
        given = iter(cotangents)
        of_results = tuple(next(given) if connects else None for connects in call.is_connected)
        with random_numbers.restored(call.rng_states):  # the backward computes the forward again
            of_args, of_captured, found, _ = call.transformed.backward(of_results, call.opens, *args, **kwargs)
        by_identity = {id(t): g for t, g in zip(found, of_captured, strict=True)}
        gradients = [*of_args, *(by_identity.get(id(t)) for t in captured)]
        return None, None, *(g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad[2:], strict=True))


def _is_plain(call: _EagerCall) -> list[bool]:
    """Of each input of a node that opens wrappers: whether it is no inner tensor."""
    found = []
    for i, v in enumerate(call.leaves):
        found += [True] if i in call.positions else [False] * len(_inner(v)) if isinstance(v, torch.Tensor) else []
    return found
