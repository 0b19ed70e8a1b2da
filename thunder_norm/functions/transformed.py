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

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from thunder_norm.errors import TransformError, TransformTypeError, with_details
from thunder_norm.functions import acquisition, autograd, registry
from thunder_norm.functions.acquisition import Program
from thunder_norm.functions.programs import flat_proxies, outputs_of
from thunder_norm.functions.reverse import evaluate_vjp
from thunder_norm.functions.wrappers import OpenWrapper, is_open, proxies_of, values_of, wrapped
from thunder_norm.subclass import plain
from thunder_norm.subclass.wrapper_scan import may_construct_wrappers
from thunder_norm.tracing import hooks
import thunder
import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.interpreter import WrappedValue, _interpret_call, wrap_const
from thunder.core.proxies import TensorProxy


class _Ours(hooks.Participant):
    """Has the interpreter know, in compilations of ours without wrappers, that they are ours."""

    def lookaside(self, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Any:
        """Values that are asked for are refused by `levels`, for a function under a transform."""
        return plain.about_plain(None, fn, args) or hooks.lookaside_for(fn, *args, **kwargs)


# What compiles a function whose arguments have wrappers in them, by a class of those.
_interpreters: dict[type[torch.Tensor], type[hooks.Participant]] = {}


def compiles(cls: type[torch.Tensor]) -> Callable[[type[hooks.Participant]], type[hooks.Participant]]:
    """Have a transform compile the functions under function transforms that are given a `cls`; the most derived class decides."""

    def enter(transform: type[hooks.Participant]) -> type[hooks.Participant]:
        _interpreters[cls] = transform
        return transform

    return enter


class Call:
    """One call of a transformed function, met by the interpreter."""

    def __init__(self, transformed: WrappedValue, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]):
        self._transformed = transformed
        self._args = args
        self._kwargs = kwargs
        self.name: str = transformed.value.name
        self.result_specs: list[TreeSpec] = transformed.value.result_specs
        self.skipped = transformed.value.num_own_arguments
        values, self.kwargs = values_of(args, kwargs)
        self.own, self.args = values[: self.skipped], values[self.skipped :]

    def acquire(
        self, function: str = "function", args: Sequence[Any] | None = None, shapes: Callable[..., Any] | None = None
    ) -> Program:
        """The attribute `function` of the transformed function as a flat program, for this call's arguments or for `args`."""
        found = _interpret_call(getattr, self._transformed, wrap_const(function))
        if args is not None:
            given = tuple(wrapped(a, self._transformed) for a in args)
            return acquisition.acquire(found, self.name, given, {}, shapes)
        return acquisition.acquire(found, self.name, self._args[self.skipped :], self._kwargs, shapes)

    @property
    def tensors(self) -> tuple[TensorProxy, ...]:
        """The tensors among the arguments, in the order of the arguments of `acquire`'s program."""
        return flat_proxies((self.args, self.kwargs))


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
                return run_interpreted(self, *args, **kwargs)

            found = thunder.jit(program, transforms=[transform()], disable_torch_autograd=True)  # `autograd` does that
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
        return autograd.run(self, args, kwargs)

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
    """
    raise NotImplementedError


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
        wrt = [p.requires_grad or _requires_grad(v) for v in given for p in proxies_of(v)]
        wrt = [w and dtypes.is_inexact_dtype(p.dtype) for w, p in zip(wrt, call.tensors, strict=True)]
        wrt += [isinstance(p, TensorProxy) and p.requires_grad and dtypes.is_inexact_dtype(p.dtype) for p in program.captured]
        outs, pullback = evaluate_vjp(program.trace, inputs, wrt)
        results = tree_flatten(program.result(outputs_of(program.trace)), is_leaf=is_open)[0]
        found = iter(pullback(cotangents if opens else _opened_like(results, cotangents)))
        gradients: list[Any] = []
        for v in given:
            own = [next(found) for _ in proxies_of(v)]
            gradients += own if opens or not is_open(v) else [_wrapped(v, own)]
        captured = [(p, g) for p, g, w in zip(program.captured, found, wrt[len(call.tensors) :], strict=True) if w]
        # the results keep every operation that draws numbers, in the order of the forward
        return tuple(gradients), tuple(g for _, g in captured), tuple(p for p, _ in captured), outs


def _requires_grad(v: Any) -> bool:
    return is_open(v) and v.structure.spec.requires_grad


def _wrapped(wrapper: OpenWrapper, gradients: Sequence[TensorProxy | None]) -> OpenWrapper | None:
    """The gradient of a wrapper; zeros where an inner tensor has none."""
    if not _requires_grad(wrapper):
        return None
    filled = [ltorch.zeros_like(p) if g is None else g for g, p in zip(gradients, wrapper.leaves, strict=True)]
    return OpenWrapper(filled, wrapper.structure)


def _opened_like(results: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """A cotangent for each tensor of the results, of those for each tensor or wrapper."""
    given = iter(cotangents)
    found: list[Any] = []
    for v in results:
        if is_open(v):
            ct = next(given)
            if ct is not None and not (is_open(ct) and len(ct.leaves) == len(v.leaves)):
                raise TransformError(
                    with_details(
                        f"the gradient that reached a {v.class_name} is none", got=f"a {getattr(ct, 'class_name', 'tensor')}"
                    )
                )
            found += [None] * len(v.leaves) if ct is None else ct.leaves
        elif isinstance(v, TensorProxy):
            found.append(next(given))
    return found
