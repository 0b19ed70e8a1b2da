"""custom_vjp: a function with a reverse rule of its own, under every transform."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch.utils._pytree import PyTree, tree_flatten

from thunder_norm.errors import TransformError, TransformTypeError, with_details
from thunder_norm.functions.acquisition import Program
from thunder_norm.functions.batching import evaluate_vmap, with_batch
from thunder_norm.functions.calls import constructor
from thunder_norm.functions.programs import (
    anew,
    apart,
    flat_program,
    operations_of,
    outputs_of,
    program_of,
    renewed_program,
    replayed,
)
from thunder_norm.functions.registry import VjpRule
from thunder_norm.functions.reverse import evaluate_vjp
from thunder_norm.functions.thunder_rules import joint_of
from thunder_norm.functions.transformed import Call, Transformed
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.recording import print_without_module
import thunder.torch as ltorch
from thunder.core.interpreter import WrappedValue, do_raise, wrap_const
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx


class CustomVjp(Transformed):
    """A function that is differentiated by `fwd` and `bwd`."""

    name = "custom_vjp"
    fwd: Callable | None = None
    bwd: Callable | None = None

    def defvjp(self, fwd: Callable, bwd: Callable) -> None:
        """Say how the function is differentiated.

        Args:
            fwd: takes the function's arguments, returns ``(result, saved)``: the function's result and what `bwd` needs.
            bwd: ``bwd(saved, cotangents)`` takes what was saved and cotangents in the structure of the result, and returns a tuple with
                a gradient for each positional argument, in its structure, or None for zero.

        Raises:
            TransformTypeError: one of them is no function.
        """
        for f, what in ((fwd, "fwd"), (bwd, "bwd")):
            if not callable(f):
                raise TransformTypeError(with_details(f"custom_vjp: {what} is no function", got=f"a {type(f).__name__}"))
        self.fwd, self.bwd = fwd, bwd

    def emit(self, call: Call) -> Any:
        """Write one operation that carries the rule."""
        if self.fwd is None:
            raise TransformError(with_details(f"{self!r} has no rule yet", instead="f.defvjp(fwd, bwd)"))
        value = call.acquire()
        forward = call.acquire("fwd")
        result, saved = self._split(forward, value)
        backward = call.acquire("bwd", args=[saved, result])
        wanted = self._gradients(call, backward)
        captured = {p.name: p for program in (value, forward, backward) for p in program.captured}
        operation = CustomOperation(
            getattr(self.function, "__name__", "custom"),
            _closed(value, captured.values()),
            _closed(forward, captured.values()),
            _closed(backward, captured.values(), [g for g in wanted if g is not None]),
            tuple(g is not None for g in wanted),
            len(outputs_of(value.trace)),
        )
        return value.result(operation.symbol(*call.tensors, *captured.values()))

    def _split(self, forward: Program, value: Program) -> tuple[Any, Any]:
        pair = forward.result(outputs_of(forward.trace))
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TransformTypeError(
                with_details(f"{self!r}: fwd must return a tuple (result, what bwd needs)", got=f"a {type(pair).__name__}")
            )
        expected = value.result(outputs_of(value.trace))
        if _described(pair[0]) != _described(expected):
            raise TransformError(
                with_details(
                    f"{self!r}: the function and its fwd return different things",
                    function=_described(expected),
                    fwd=_described(pair[0]),
                )
            )
        return pair

    def _gradients(self, call: Call, backward: Program) -> list[TensorProxy | None]:
        """The gradient that bwd returns for each tensor of the call."""
        found = backward.result(outputs_of(backward.trace))
        found = tuple(found) if isinstance(found, list | tuple) else (found,)
        if len(found) != len(call.args):
            raise TransformError(
                with_details(
                    f"{self!r}: bwd must return a tuple with a gradient, or None, for each positional argument",
                    got=f"{len(found)} for {len(call.args)} arguments",
                )
            )
        gradients: list[TensorProxy | None] = []
        for i, (g, arg) in enumerate(zip(found, call.args, strict=True)):
            tensors = [v for v in tree_flatten(arg)[0] if isinstance(v, TensorProxy)]
            if g is None:
                gradients.extend([None] * len(tensors))
                continue
            if _described(g) != _described(arg):
                raise TransformError(
                    with_details(
                        f"{self!r}: the gradient that bwd returns for argument {i} does not fit it",
                        argument=_described(arg),
                        gradient=_described(g),
                    )
                )
            gradients.extend(v for v in tree_flatten(g)[0] if isinstance(v, TensorProxy))
        return gradients + [None] * (len(call.tensors) - len(gradients))


@dataclass(eq=False, repr=False)
class CustomOperation:
    """One call of a function with a rule of its own, as an operation: it is the id of its symbol, and carries its rules.

    Its programs are flat.  `value` and `forward` take the function's tensors and then what it closes over; `value` returns the results,
    `forward` the results and then what is saved.  `backward` takes what is saved, a cotangent for each result, and what is closed over;
    it returns a gradient for each tensor that `has_gradient`.  `saved_from` has for positions of what is saved whether it is a result, and
    which result or argument it is, where that is known and counts.  An operation may return what is saved, too (`returns_saved`): `backward`
    takes cotangents of the first `num_pulled` results alone.
    """

    name: str
    value: TraceCtx
    forward: TraceCtx
    backward: TraceCtx
    has_gradient: tuple[bool, ...]
    num_results: int
    saved_from: Mapping[int, tuple[bool, int]] = field(default_factory=dict)
    num_pulled: int | None = None
    returns_saved: bool = False

    def __post_init__(self) -> None:
        self.num_pulled = self.num_results if self.num_pulled is None else self.num_pulled
        self.symbol = Symbol(name=self.name, meta=self._meta, id=self, _bind_postprocess=print_without_module)
        self.rules = {
            "vjp": VjpRule(self._augmented, self._pulled, self._check_active),
            "jvp": self._pushed,
            "batching": self._batched,
        }
        # Thunder's own differentiation, of a program under a user's thunder.jit, asks executors for rules
        get_jit_ctx().ad_hoc_executor.register_implementation(
            self.symbol, execution_transform=self._meta, grad_transform=joint_of(self.rules["vjp"])
        )

    def __repr__(self) -> str:
        return self.name

    def _check_active(self, args: tuple, active: Set[str]) -> None:
        """Refuse to differentiate with respect to what the function closes over: its rule says nothing of that.

        Raises:
            TransformError: it is to be.
        """
        for p in args[len(self.has_gradient) :]:
            if p.name in active:
                raise TransformError(
                    with_details(
                        f"{self.name}, a custom_vjp, closes over {p.name}, which is being differentiated",
                        why="its rule has gradients for arguments only",
                        instead="pass the tensor as an argument, or detach() it",
                    )
                )

    def _meta(self, *tensors: TensorProxy) -> tuple[TensorProxy, ...]:
        return tuple(apart(replayed(self.value, tensors), tensors))

    def _augmented(self, *tensors: TensorProxy) -> tuple[tuple, tuple]:
        found = replayed(self.forward, tensors)
        return tuple(apart(found[: self.num_results], tensors)), (found[self.num_results :], tensors[len(self.has_gradient) :])

    def _pulled(self, saved: tuple, *cotangents: TensorProxy) -> tuple[TensorProxy | None, ...]:
        kept, captured = saved
        found = iter(replayed(self.backward, [*kept, *cotangents[: self.num_pulled], *captured]))
        return *(next(found) if has else None for has in self.has_gradient), *[None] * len(captured)

    def _pushed(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[tuple, tuple]:
        """The tangent ``J u`` as the transpose of ``ct -> J^T ct``, which is what `backward` computes."""
        count = len(self.has_gradient)
        if any(t is not None for t in tangents[count:]):
            raise TransformError(
                with_details(f"{self.name}, a custom_vjp, closes over a tensor that moves", instead="pass it as an argument")
            )
        results, (kept, captured) = self._augmented(*primals)
        zeros = [ltorch.zeros_like(r) for r in results]
        wrt = [*[False] * len(kept), *[True] * len(zeros), *[False] * len(captured)]
        _, transpose = evaluate_vjp(renewed_program(self.backward), [*kept, *zeros, *captured], wrt)
        moving = [t for t, has in zip(tangents[:count], self.has_gradient, strict=True) if has]
        return results, transpose(moving)[len(kept) : len(kept) + len(zeros)]

    def _batched(self, axis_size: int, in_dims: Sequence[int | None], *tensors: TensorProxy) -> tuple[tuple, int]:
        """The same function of a batch: its function, fwd and bwd are batched."""
        count, num_pulled = len(self.has_gradient), self.num_pulled
        assert num_pulled is not None, "set when it was made"

        def all_batched(outs: Sequence[Any], dims: Sequence[int | None]) -> list[TensorProxy]:
            return [with_batch(axis_size, o, d) for o, d in zip(outs, dims, strict=True)]

        def value(*args: TensorProxy) -> list[TensorProxy]:
            return all_batched(*evaluate_vmap(self.value, args, in_dims, axis_size))

        saved_dims: list[int | None] = []

        def forward(*args: TensorProxy) -> list[TensorProxy]:
            outs, dims = evaluate_vmap(self.forward, args, in_dims, axis_size)
            results = all_batched(outs[:num_pulled], dims[:num_pulled])
            saved, saved_dims[:] = list(outs[num_pulled:]), dims[num_pulled:]
            if self.returns_saved:
                saved, saved_dims[:] = all_batched(saved, saved_dims), [0] * len(saved)
            for i, (is_result, of) in self.saved_from.items():
                if is_result:
                    saved[i], saved_dims[i] = results[of], 0
            return [*results, *saved]

        of_value = program_of(value, anew(tensors), hoists=False)
        of_forward = program_of(forward, anew(tensors), hoists=False)
        found = outputs_of(of_forward)
        received = anew([*found[num_pulled:], *found[:num_pulled]])
        captured = anew(tensors[count:])

        def backward(*args: TensorProxy) -> list[TensorProxy]:
            dims = [*saved_dims, *[0] * num_pulled, *in_dims[count:]]
            grads, grad_dims = evaluate_vmap(self.backward, args, dims, axis_size)
            wanted = [d for d, has in zip(in_dims, self.has_gradient, strict=False) if has]
            return [
                ltorch.sum(with_batch(axis_size, g, d), 0) if w is None else with_batch(axis_size, g, d)
                for g, d, w in zip(grads, grad_dims, wanted, strict=True)
            ]

        of_backward = program_of(backward, [*received, *captured], hoists=False)
        programs = of_value, of_forward, of_backward
        more = self.saved_from, num_pulled, self.returns_saved
        batched = type(self)(self.name, *programs, self.has_gradient, self.num_results, *more)
        return batched.symbol(*tensors), 0


@dataclass(eq=False, repr=False)
class TorchOperation(CustomOperation):
    """A ``torch.autograd.Function``: derivatives of higher order are those of its backward, never of its forward.

    What it saves of its arguments and results is these, and so has their history; what it has computed besides is a constant.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._keeping = self
        if not self.returns_saved:
            num_all = len(outputs_of(self.forward))
            programs = self.forward, self.forward, self.backward
            self._keeping = TorchOperation(
                self.name, *programs, self.has_gradient, num_all, self.saved_from, self.num_pulled, returns_saved=True
            )

    def _augmented(self, *tensors: TensorProxy) -> tuple[tuple, tuple]:
        outs = self._keeping.symbol(*tensors)
        saved = list(outs[self.num_pulled :])
        for i, (is_result, of) in self.saved_from.items():
            saved[i] = outs[of] if is_result else tensors[of]
        return tuple(outs[: self.num_results]), (saved, tensors[len(self.has_gradient) :])


def _closed(program: Program, captured: Iterable[Proxy], outs: Sequence[Any] | None = None) -> TraceCtx:
    """The program with `captured`, which includes what it captures, as its last arguments; its results are `outs`, if given."""
    trace = program.trace
    outs = outputs_of(trace) if outs is None else outs
    return flat_program([*trace.args[: program.num_args], *captured], operations_of(trace), outs)


def _described(tree: PyTree) -> str:
    leaves, spec = tree_flatten(tree)
    tensors = ", ".join(f"{v.dtype}{list(v.shape)}" if isinstance(v, TensorProxy) else type(v).__name__ for v in leaves)
    return tensors if len(leaves) == 1 and spec.is_leaf() else f"{spec}: {tensors}"


@constructor
def custom_vjp(function: Callable) -> CustomVjp:
    """A function with a reverse rule of its own, given by ``f.defvjp(fwd, bwd)``.

    Usable as a decorator.  The rule holds under every transform, in any order: `vmap` batches the function, fwd and bwd; `jvp` uses the
    transpose of bwd; derivatives of higher order differentiate fwd and bwd.

    Raises (when called):
        TransformError: there is no rule, what fwd or bwd return does not fit, or a tensor is differentiated that the function closes over.

    >>> import torch
    >>> @custom_vjp
    ... def clipped(x):
    ...     return x * 1.0
    >>> clipped.defvjp(lambda x: (x * 1.0, None), lambda saved, ct: (ct.clamp(-1, 1),))
    >>> from thunder_norm.transforms import grad
    >>> grad(lambda x: (5 * clipped(x)).sum())(torch.zeros(2))
    tensor([1., 1.])
    """
    return CustomVjp(function)


@lookasides.for_our(CustomVjp.defvjp)
def _defvjp(custom: WrappedValue, fwd: WrappedValue, bwd: WrappedValue) -> Any:
    """A rule given while a program is traced: the function is one of that program's own."""
    try:
        custom.value.defvjp(fwd.value, bwd.value)
    except TransformTypeError as e:
        return do_raise(e)
    custom.attribute_wrappers["fwd"], custom.attribute_wrappers["bwd"] = fwd, bwd
    return wrap_const(None)
