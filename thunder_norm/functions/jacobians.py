"""jacrev, jacfwd, hessian: one vmap of a pullback, or of a pushforward, over a basis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_norm.errors import TransformTypeError, with_details
from thunder_norm.functions.acquisition import Program
from thunder_norm.functions.batching import Randomness, check_batches, evaluate_in_chunks, with_batch
from thunder_norm.functions.calls import check_result, constructor, split_aux
from thunder_norm.functions.completion import eye
from thunder_norm.functions.forward import evaluate_jvp
from thunder_norm.functions.gradients import Argnums, Differentiated, checked_argnums, zeros_if_none
from thunder_norm.functions.interpreted import OpenWrapper, is_open
from thunder_norm.functions.programs import anew, described, is_complex, outputs_of, program_of
from thunder_norm.functions.transformed import Call, Transformed, shared
from thunder_norm.functions.wrappers_in_torchs import OfTorch, of_whole
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
import thunder.torch as ltorch
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx


class _Jacobian(Transformed):
    """What jacrev and jacfwd share."""

    is_reverse: bool

    def __init__(self, function: Callable, argnums: Argnums, has_aux: bool, chunk_size: int | None, randomness: Randomness):
        super().__init__(function)
        self.argnums = checked_argnums(argnums, self.name)
        self.has_aux = has_aux
        self.chunk_size = chunk_size
        self.randomness = randomness
        check_batches(self.name, randomness, chunk_size)

    @langctx(Languages.TORCH)
    def emit(self, call: Call) -> Any:
        """Write the Jacobian."""
        inputs = Differentiated(call, self.argnums)
        _check_real([t for t, w in zip(call.tensors, inputs.wrt, strict=True) if w], self.name, "argument")
        program = call.acquire(moved=inputs.wrt, is_reverse=self.is_reverse)
        result, _ = split_aux(program.result(outputs_of(program.trace)), self.has_aux, self.name)
        check_result(result, self.name, is_floating=True)
        _check_real(tree_flatten(result)[0], self.name, "result")
        num_results = len(tree_flatten(result)[0])
        inputs.check(program, num_results)
        outs, blocks = self.blocks(call, inputs, program, num_results)
        _, aux = split_aux(program.result(outs), self.has_aux, self.name)
        rows = [inputs.collected(row) for row in blocks]
        jacobian = self._of_wrappers(call, result, rows)
        return (jacobian, aux) if self.has_aux else jacobian

    def _of_wrappers(self, call: Call, result: Any, rows: list[Any]) -> Any:
        """The derivatives in the structure of the result; `rows` has those of each tensor in it, in the structure of the arguments.

        Raises:
            TransformTypeError: the result has a wrapper, whose Jacobian only torch's transforms have: a wrapper of those of its inner tensors.
        """
        remaining, outs = iter(rows), tree_flatten(result, is_leaf=is_open)[0]
        merged = []
        for out in outs:
            if not is_open(out):
                merged.append(next(remaining))
                continue
            if not isinstance(call.function, OfTorch) and not isinstance(call.function, _Jacobian):
                raise _wrapper_returned(self.name, out)
            of_inner = [next(remaining) for _ in out.leaves]
            merged.append(of_whole(self.name, of_inner))
        return tree_unflatten(merged, tree_flatten(result, is_leaf=is_open)[1])

    def blocks(
        self, call: Call, inputs: Differentiated, program: Program, num_results: int
    ) -> tuple[Sequence[Any], list[list[TensorProxy | None]]]:
        """The program's results, and for each the derivatives with respect to each tensor of the call, None if not asked for."""
        raise NotImplementedError

    def over_bases(self, trace: TraceCtx, inputs: Sequence[TensorProxy]) -> list[Sequence[TensorProxy]]:
        """The results of a linear program of `inputs`, and more, for each element of the standard basis of each input.

        The elements of the basis come first in the results.
        """
        counts = [math.prod(p.shape) for p in inputs]
        found = []
        for i, (count, p) in enumerate(zip(counts, inputs, strict=True)):
            basis = ltorch.reshape(eye(count, device=p.device, dtype=p.dtype), (count, *p.shape))
            given = [basis if j == i else ltorch.zeros_like(q) for j, q in enumerate(inputs)]
            args = [*given, *trace.args[len(inputs) :]]
            in_dims = [0 if j == i else None for j in range(len(args))]
            outs, out_dims = evaluate_in_chunks(trace, args, in_dims, count, self.randomness, self.chunk_size)
            found.append([with_batch(count, o, d) for o, d in zip(outs, out_dims, strict=True)])
        return found


class Jacrev(_Jacobian):
    """The Jacobian, row by row."""

    name = "jacrev"
    is_reverse = True

    def blocks(
        self, call: Call, inputs: Differentiated, program: Program, num_results: int
    ) -> tuple[Sequence[Any], list[list[TensorProxy | None]]]:
        """One pullback for each result."""
        outs, pullback = inputs.evaluated(program)
        wanted = [j for j, w in enumerate(inputs.wrt) if w]
        found = []
        for i, out in enumerate(outs[:num_results]):

            def back(ct: TensorProxy, i: int = i) -> list[TensorProxy]:
                grads = pullback([ct if k == i else None for k in range(len(outs))])
                return [zeros_if_none(grads[j], call.tensors[j]) for j in wanted]

            (columns,) = self.over_bases(program_of(back, anew([out])), [out])
            row: list[TensorProxy | None] = [None] * len(call.tensors)
            for j, column in zip(wanted, columns, strict=True):
                row[j] = ltorch.reshape(column, (*out.shape, *call.tensors[j].shape))
            found.append(row)
        return outs, found


class Jacfwd(_Jacobian):
    """The Jacobian, column by column."""

    name = "jacfwd"
    is_reverse = False

    def blocks(
        self, call: Call, inputs: Differentiated, program: Program, num_results: int
    ) -> tuple[Sequence[Any], list[list[TensorProxy | None]]]:
        """One pushforward for each input."""
        values = [*call.tensors, *program.captured]
        wanted = [j for j, w in enumerate(inputs.wrt) if w]
        found: list[list[TensorProxy | None]] = [[None] * len(call.tensors) for _ in range(num_results)]
        outs: list[Any] = []

        def push(moving: Sequence[int], tangents: Sequence[TensorProxy], renew: bool) -> list[TensorProxy]:
            given = dict(zip(moving, tangents, strict=True))
            results, moved = evaluate_jvp(program.trace, values, [given.get(k) for k in range(len(values))], renew=renew)
            outs[:] = results
            aux = [v for v in results[num_results:] if isinstance(v, TensorProxy)]
            return [*(zeros_if_none(t, v) for v, t in zip(results[:num_results], moved, strict=False)), *aux]

        # one input at a time has fewer operations, but draws random numbers anew
        together = any(draws_numbers(b) for b in program.trace.bound_symbols)
        aux: list[TensorProxy] | None = None
        for moving in [wanted] if together else [[j] for j in wanted]:
            fresh = anew(values[j] for j in moving)
            trace = program_of(lambda *t, m=moving: push(m, t, renew=m[0] != wanted[0]), fresh)
            columns = self.over_bases(trace, [values[j] for j in moving])
            for j, k in ((j, k) for j in moving for k in range(num_results)):
                column = columns[moving.index(j)][k]
                found[k][j] = ltorch.reshape(ltorch.movedim(column, 0, -1), (*column.shape[1:], *values[j].shape))
            if aux is None:  # the same for each element of a basis, as torch.func takes it
                aux = next(([ltorch.select(a, 0, 0) for a in c[num_results:]] for c in columns if c and c[0].shape[0]), None)
        if aux is None:  # no basis has an element
            outs[:], _ = evaluate_jvp(program.trace, values, [None] * len(values))
        else:
            rest = iter(aux)
            outs[num_results:] = [next(rest) if isinstance(v, TensorProxy) else v for v in outs[num_results:]]
        return outs, found


def _wrapper_returned(name: str, wrapper: OpenWrapper) -> TransformTypeError:
    return TransformTypeError(
        with_details(
            f"{name} of a function that returns a {wrapper.class_name}",
            why="each of its inner tensors has derivatives with respect to each tensor of the arguments",
            instead=f"torch.func.{name}, which has the derivatives of the whole; or return the inner tensors",
        )
    )


def _check_real(tensors: Sequence[TensorProxy], name: str, what: str) -> None:
    """A matrix of derivatives says nothing of a function of complex numbers that is not holomorphic; nor has torch.func one."""
    for t in tensors:
        if is_complex(t):
            raise TransformTypeError(
                with_details(
                    f"{name} needs real {what}s",
                    got=f"a tensor of {described(t)}",
                    instead="torch.view_as_real and torch.view_as_complex, or jvp and vjp, which take complex numbers",
                )
            )


@constructor
def jacrev(
    function: Callable,
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    chunk_size: int | None = None,
    randomness: Randomness = "same",
) -> Callable:
    """The Jacobian of a function, computed backwards: one pullback for each entry of the result, all at once.

    ``jacrev(f)(x)`` has the shape ``(*f(x).shape, *x.shape)``: the derivative of each entry of the result with respect to each of x;
    where the result or the argument is a tree of tensors it is a tree of results' structure with trees of the argument's.

    Args:
        function: takes and returns floating point tensors, in tuples, lists and dicts if it likes.
        argnums: which positional arguments to differentiate: an int, or a tuple of ints.
        has_aux: `function` returns ``(result, aux)``; so does this.
        chunk_size: how many rows at a time; needs less memory, gives the same.
        randomness: as for `vmap`, for what is drawn in the backward; numbers drawn in `function` are the same for all rows.

    Raises:
        TransformTypeError: an argument to differentiate, or the result, is no real floating point tensor.
        TransformError: `argnums`, `chunk_size` or `randomness` do not fit.

    >>> import torch
    >>> jacrev(torch.sin)(torch.zeros(2))
    tensor([[1., 0.],
            [0., 1.]])
    """
    return shared(Jacrev, function, argnums, has_aux, chunk_size, randomness)


@constructor
def jacfwd(
    function: Callable,
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    chunk_size: int | None = None,
    randomness: Randomness = "same",
) -> Callable:
    """The Jacobian of a function, computed forwards: one pushforward for each entry of the argument, all at once.

    The same as `jacrev`, which see; cheaper where the argument is smaller than the result.

    >>> import torch
    >>> jacfwd(lambda x: x.square().sum())(torch.tensor([1.0, 2.0]))
    tensor([2., 4.])
    """
    return shared(Jacfwd, function, argnums, has_aux, chunk_size, randomness)


@constructor
def hessian(function: Callable, argnums: Argnums = 0) -> Callable:
    """The matrix of second derivatives of a function: the Jacobian, forwards, of its Jacobian, backwards.

    ``hessian(f)(x)`` has the shape ``(*f(x).shape, *x.shape, *x.shape)``.

    Raises:
        TransformTypeError: an argument to differentiate, or the result, is no floating point tensor.
        TransformError: `argnums` do not fit.

    >>> import torch
    >>> hessian(lambda x: x[0] ** 2 * x[1])(torch.tensor([1.0, 2.0]))
    tensor([[4., 2.],
            [2., 0.]])
    """
    return shared(_hessian, function, argnums)


def _hessian(function: Callable, argnums: Argnums) -> Jacfwd:
    return Jacfwd(Jacrev(function, argnums, False, None, "same"), argnums, False, None, "same")
