"""grad, value_and_grad, vjp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from thunder_norm.errors import TransformError, TransformTypeError, with_details
from thunder_norm.functions.acquisition import Program
from thunder_norm.functions.calls import (
    check_differentiable,
    check_fits,
    check_has_derivative,
    check_result,
    constructor,
    split_aux,
    without_derivative,
)
from thunder_norm.functions.interpreted import OpenWrapper, is_open, proxies_of
from thunder_norm.functions.programs import anew, is_complex, outputs_of, program_of, reaches, replayed
from thunder_norm.functions.reverse import Pullback as ProgramPullback
from thunder_norm.functions.reverse import evaluate_vjp
from thunder_norm.functions.transformed import Call, Transformed, shared
from thunder_norm.functions.wrappers_in_torchs import OfTorch, check_agrees
import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

Argnums = int | tuple[int, ...]


class Grad(Transformed):
    """The gradient of a function with a scalar result, with or without its value."""

    def __init__(self, function: Callable, argnums: Argnums, has_aux: bool, with_value: bool):
        self.name = "value_and_grad" if with_value else "grad"
        super().__init__(function)
        self.argnums = checked_argnums(argnums, self.name)
        self.has_aux = has_aux
        self.with_value = with_value

    def emit(self, call: Call) -> Any:
        """Write value and gradient."""
        inputs = Differentiated(call, self.argnums)
        program = call.acquire(moved=inputs.wrt, is_reverse=True)
        known = outputs_of(program.trace)
        num_losses = _num_losses(split_aux(program.result(known), self.has_aux, self.name)[0], self.name)
        inputs.check(program, num_losses)
        outs, pullback = inputs.evaluated(program)
        value, aux = split_aux(program.result(outs), self.has_aux, self.name)
        losses, others = outs[:num_losses], outs[num_losses:]  # the loss is the first of the results
        cotangents = [*map(ltorch.ones_like, losses), *[None] * len(others)]
        gradient = inputs.collected(pullback(cotangents))
        if self.with_value:
            return ((value, aux), gradient) if self.has_aux else (value, gradient)
        return (gradient, aux) if self.has_aux else gradient


class Differentiated:
    """The arguments with respect to which a call is differentiated."""

    def __init__(self, call: Call, argnums: Argnums):
        self.call = call
        self.argnums = argnums
        num_args = len(call.args)
        chosen = [_position(n, num_args, call.name) for n in ((argnums,) if isinstance(argnums, int) else argnums)]
        per_arg = [[v for v in tree_flatten(a)[0] if isinstance(v, TensorProxy)] for a in call.args]
        starts = [sum(len(t) for t in per_arg[:i]) for i in range(num_args)]
        self._indices = {i: range(starts[i], starts[i] + len(per_arg[i])) for i in chosen}
        self._chosen = chosen
        for i in chosen:
            for path, v in tree_flatten_with_path(call.args[i])[0]:
                what = f"{call.name}: argument {i}{keystr(path)}"
                check_differentiable(v, what, "be differentiated", "name the arguments to differentiate in argnums")
        wanted = {j for r in self._indices.values() for j in r}
        self._without = {j: v for i in chosen for j, v in self._without_derivative(i)}
        self.wrt = [j in wanted and j not in self._without for j in range(len(call.tensors))]

    def _without_derivative(self, i: int) -> Iterator[tuple[int, OpenWrapper]]:
        """The tensors of an argument that have no gradient in the wrapper they are of."""
        j = self._indices[i].start
        for v in tree_flatten(self.call.args[i], is_leaf=is_open)[0]:
            if is_open(v) and v.undifferentiated is not None:
                yield j + v.undifferentiated, v
            j += len(proxies_of(v))

    def check(self, program: Program, num_results: int) -> None:
        """Refuse a program whose first results depend on what has no gradient.

        Raises:
            TransformTypeError: they do.
            TransformError: it is a transform of torch's, whose derivatives of wrappers are others.
        """
        if isinstance(self.call.function, OfTorch):
            moving = [(p, q) for p, q, w in zip(self.call.tensors, program.trace.args, self.wrt, strict=False) if w]
            check_agrees(self.call.name, [self.call.args[i] for i in self._chosen], program.trace, moving)
        outs = outputs_of(program.trace)[:num_results]
        for j, v in self._without.items():
            if reaches(program.trace, program.trace.args[j], outs):
                raise without_derivative(
                    f"{self.call.name}: the gradient with respect to the values of a {v.class_name}",
                    "give the function its backing (.backing), a plain tensor, as the argument",
                )

    def evaluated(self, program: Program) -> tuple[tuple[Any, ...], ProgramPullback]:
        """Write the function's program; its results, and what pulls their cotangents back to the tensors of the call."""
        wrt = [*self.wrt, *[False] * len(program.captured)]
        return evaluate_vjp(program.trace, [*self.call.tensors, *program.captured], wrt)

    def collected(self, cotangents: Sequence[TensorProxy | None]) -> Any:
        """Cotangents of the tensors as the structure of the arguments they belong to; zeros where there is none."""
        found = []
        for i in self._chosen:
            spec = tree_flatten(self.call.args[i])[1]
            grads = [zeros_if_none(cotangents[j], self.call.tensors[j]) for j in self._indices[i]]
            found.append(tree_unflatten(grads, spec))
        return found[0] if isinstance(self.argnums, int) else tuple(found)


def zeros_if_none(cotangent: TensorProxy | None, like: TensorProxy) -> TensorProxy:
    """A cotangent, zeros written out where there is none."""
    return ltorch.zeros_like(like) if cotangent is None else cotangent


def checked_argnums(argnums: Any, name: str) -> Argnums:
    """The positions of the arguments to differentiate.

    Raises:
        TransformTypeError: they are neither an int nor a tuple of ints.
        TransformError: there is none, or one is named twice.
    """
    if isinstance(argnums, list):
        argnums = tuple(argnums)
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise TransformTypeError(with_details(f"{name}: argnums must be an int or a tuple of ints", got=repr(argnums)))
    if not numbers or len(set(numbers)) != len(numbers):
        raise TransformError(with_details(f"{name}: argnums must name different arguments, at least one", got=repr(argnums)))
    return argnums


def _position(n: int, num_args: int, name: str) -> int:
    if not -num_args <= n < num_args:
        raise TransformError(
            with_details(
                f"{name}: argnums {n} is out of range",
                got=f"{num_args} positional argument{'s' * (num_args != 1)}",
                instead="give the arguments to differentiate by position, not by keyword",
            )
        )
    return n % num_args


def _num_losses(loss: Any, name: str) -> int:
    """How many tensors a loss is: one, or the inner tensors of a wrapper, each with a cotangent of 1."""
    check_has_derivative(loss, name)
    if isinstance(loss, OpenWrapper):
        if all(isinstance(p, TensorProxy) and p.ndim == 0 and dtypes.is_inexact_dtype(p.dtype) for p in loss.leaves):
            return len(loss.leaves)
        inner = ", ".join(f"{dtypes.to_torch_dtype(p.dtype)} {tuple(p.shape)}" for p in loss.leaves)
        raise TransformTypeError(
            with_details(
                f"{name} needs a function that returns a scalar",
                got=f"a {loss.class_name} of {inner}",
                instead="return one of its inner tensors, reduced (.sum(), .mean())",
            )
        )
    if not isinstance(loss, TensorProxy):
        raise TransformTypeError(
            with_details(
                f"{name} needs a function that returns a scalar tensor",
                got=f"a {type(loss).__name__}",
                instead="has_aux=True if it returns (loss, aux)" if isinstance(loss, tuple) else None,
            )
        )
    if loss.ndim != 0:
        raise TransformError(
            with_details(
                f"{name} needs a function that returns a scalar",
                got=f"a tensor of shape {tuple(loss.shape)}",
                instead="reduce it (.sum(), .mean()), or use vjp with a cotangent, or jacrev",
            )
        )
    if not dtypes.is_inexact_dtype(loss.dtype):
        raise TransformTypeError(with_details(f"{name} needs a floating point loss", got=str(dtypes.to_torch_dtype(loss.dtype))))
    if is_complex(loss):
        raise TransformTypeError(
            with_details(f"{name} needs a real loss", got=str(dtypes.to_torch_dtype(loss.dtype)), instead=".real, .abs(), or vjp")
        )
    return 1


@constructor
def grad(function: Callable, argnums: Argnums = 0, has_aux: bool = False) -> Callable:
    """The gradient of a function with a scalar result.

    ``grad(f)(x)`` has the structure and shapes of x: the derivatives of ``f(x)`` with respect to each entry.

    Args:
        function: takes tensors, in tuples, lists and dicts if it likes, and returns a 0-dim floating point tensor.
        argnums: which positional arguments to differentiate: an int, or a tuple of ints for a tuple of gradients.
        has_aux: `function` returns ``(loss, aux)``; the result is then ``(gradient, aux)``.

    Raises:
        TransformError: the result is no scalar, or `argnums` do not fit.
        TransformTypeError: an argument to differentiate, or the result, is no floating point tensor.
        DataDependentError: `function` makes a number of a tensor.
        MissingTransformRuleError: an operation on the way has no rule.

    >>> import torch
    >>> grad(lambda x: (x / x.sum()).square().sum())(torch.tensor([1.0, 3.0]))
    tensor([-0.3750,  0.1250])
    """
    return shared(Grad, function, argnums, has_aux, False)


@constructor
def value_and_grad(function: Callable, argnums: Argnums = 0, has_aux: bool = False) -> Callable:
    """The value of a function with a scalar result together with its gradient: ``(value, gradient)``; see `grad`.

    With `has_aux` it is ``((value, aux), gradient)``.

    >>> import torch
    >>> value_and_grad(lambda x: x**3)(torch.tensor(2.0))
    (tensor(8.), tensor(12.))
    """
    return shared(Grad, function, argnums, has_aux, True)


# -- vjp: the result of a function, and a function that pulls cotangents back ------------------------------------------


class PullbackProgram(Transformed):
    """The backward of one program: a function of the cotangents and of what the forward program saved."""

    name = "vjp"

    def __init__(self, trace: TraceCtx, expected: list[TensorProxy | None], out_spec: TreeSpec, in_spec: TreeSpec):
        super().__init__(_no_function)
        self.trace = trace
        self.expected = expected
        self.out_spec = out_spec
        self.in_spec = in_spec

    def emit(self, call: Call) -> Any:
        """Write the backward once more."""
        cotangents, saved = call.args
        leaves = self.checked(cotangents)
        return tree_unflatten(replayed(self.trace, [*leaves, *saved]), self.in_spec)

    def checked(self, cotangents: Any) -> list[TensorProxy]:
        """The cotangents of the floating point results.

        Raises:
            TransformError: they do not fit the results.
        """
        given, spec = tree_flatten_with_path(cotangents)
        if spec != self.out_spec:
            raise TransformError(
                with_details("vjp: cotangents and result differ in structure", result=self.out_spec, cotangents=spec)
            )
        found = []
        for (path, ct), e in zip(given, self.expected, strict=True):
            if e is None:
                continue
            ct = _in_precision_of(ct, e)
            check_fits(ct, e, f"vjp: the cotangent{keystr(path)}", "result")
            found.append(ct)
        return found


def _in_precision_of(cotangent: Any, result: TensorProxy) -> Any:
    """A real cotangent of another precision is taken in that of its result, as torch's autograd does."""
    both = (cotangent, result)
    is_real = all(isinstance(v, TensorProxy) and dtypes.is_float_dtype(v.dtype) for v in both)
    return ltorch.to(cotangent, dtype=result.dtype) if is_real and cotangent.dtype != result.dtype else cotangent


class _Forward(Transformed):
    """The result of a function, what its backward needs, and a key to it in `pullbacks`."""

    name = "vjp"

    def __init__(self, function: Callable, has_aux: bool):
        super().__init__(function)
        self.has_aux = has_aux
        self.pullbacks: dict[int, PullbackProgram] = {}

    def emit(self, call: Call) -> Any:
        if not call.args:
            raise TransformError(with_details("vjp needs at least one primal", instead="vjp(f, x)"))
        inputs = Differentiated(call, tuple(range(len(call.args))))
        program = call.acquire(moved=inputs.wrt, is_reverse=True)
        known, _ = split_aux(program.result(outputs_of(program.trace)), self.has_aux, self.name)
        check_result(known, self.name)
        inputs.check(program, len(tree_flatten(known)[0]))
        outs, pullback = inputs.evaluated(program)
        result, aux = split_aux(program.result(outs), self.has_aux, self.name)
        leaves, out_spec = tree_flatten(result)
        floating = [dtypes.is_inexact_dtype(v.dtype) for v in leaves]
        fresh = anew(v for v, f in zip(leaves, floating, strict=True) if f)
        rest = [None] * (len(outs) - len(leaves))

        def back(*cotangents: TensorProxy) -> Sequence[TensorProxy]:
            given = iter(cotangents)
            found = pullback([*(next(given) if f else None for f in floating), *rest])
            return tree_flatten(inputs.collected(found))[0]

        trace = program_of(back, fresh)
        expected = [v if f else None for v, f in zip(leaves, floating, strict=True)]
        key = len(self.pullbacks)
        self.pullbacks[key] = PullbackProgram(trace, expected, out_spec, tree_flatten(call.args)[1])
        return result, aux, tuple(trace.args[len(fresh) :]), key


class Pullback:
    """Pulls cotangents of a result back: ``pullback(cotangents)`` is a tuple with a gradient for each primal."""

    def __init__(self, program: PullbackProgram, saved: tuple[Any, ...]):
        self._program = program
        self._saved = saved

    def __call__(self, cotangents: Any) -> Any:
        """The gradients of the primals for cotangents with the structure, shapes and dtypes of the result."""
        return self._program(cotangents, self._saved)


def vjp(function: Callable, *primals: Any, has_aux: bool = False) -> Any:
    """The result of a function, and a function that pulls cotangents back to its arguments.

    ``out, pullback = vjp(f, x)``; ``pullback(ct)`` is the tuple ``(J^T ct,)`` with J the Jacobian of f at x, one entry for each
    primal.  It may be called any number of times, and be transformed itself.

    Args:
        function: takes and returns floating point tensors, in tuples, lists and dicts if it likes.
        primals: its arguments.
        has_aux: `function` returns ``(out, aux)``; the result is then ``(out, pullback, aux)``.

    Raises:
        TransformError: (the pullback) cotangents do not have the structure, shapes and dtypes of the result.
        TransformTypeError: a primal, or the result, is no floating point tensor.

    >>> import torch
    >>> out, pullback = vjp(torch.sin, torch.zeros(2))
    >>> out, pullback(torch.tensor([1.0, 2.0]))
    (tensor([0., 0.]), (tensor([1., 2.]),))
    """
    forward = _forward_of(function, has_aux)
    out, aux, saved, key = forward(*primals)
    pullback = Pullback(forward.pullbacks[key], saved)
    return (out, pullback, aux) if has_aux else (out, pullback)


@constructor
def _forward_of(function: Callable, has_aux: bool) -> _Forward:
    return shared(_Forward, function, has_aux)


def _no_function(*args: Any) -> Any:
    raise NotImplementedError
