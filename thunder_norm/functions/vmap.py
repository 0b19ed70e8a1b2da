"""vmap: a function of one sample as a function of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import PyTree, TreeSpec, _broadcast_to_and_flatten, keystr, tree_flatten, tree_flatten_with_path

import thunder_norm.functions.rules  # noqa: F401 - registers the rules
from thunder_norm.errors import TransformError, TransformTypeError, with_details
from thunder_norm.functions.acquisition import Program
from thunder_norm.functions.batching import Randomness, check_batches, evaluate_in_chunks, with_batch
from thunder_norm.functions.calls import constructor
from thunder_norm.functions.transformed import Call, Transformed, shared
from thunder_norm.functions.wrappers_in_torchs import OfTorch, check_maps
import thunder.torch as ltorch
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import TensorProxy

Dims = Any  # an int, None, or a tree of them that is a prefix of the arguments or of the result


class Vmap(Transformed):
    """A function applied to each sample of a batch."""

    name = "vmap"

    def __init__(self, function: Callable, in_dims: Dims, out_dims: Dims, randomness: Randomness, chunk_size: int | None):
        super().__init__(function)
        _check_options(in_dims, out_dims, randomness, chunk_size)
        self.in_dims = in_dims
        self.out_dims = out_dims
        self.randomness = randomness
        self.chunk_size = chunk_size

    @langctx(Languages.TORCH)
    def emit(self, call: Call) -> Any:
        """Write the program for the whole batch, or for one chunk after the other."""
        dims, axis_size = self._dims_of(call)
        leaves = tree_flatten((call.args, call.kwargs))[0]
        in_dims = [d for d, v in zip(dims, leaves, strict=True) if isinstance(v, TensorProxy)]
        program = call.acquire(shapes=lambda i, p: _without(p.shape, dims[i]), moved=[d is not None for d in in_dims])
        values = [*call.tensors, *program.captured]
        in_dims += [None] * len(program.captured)
        results, found = evaluate_in_chunks(program.trace, values, in_dims, axis_size, self.randomness, self.chunk_size)
        out_dims = _flat_out_dims(self.out_dims, program)
        return program.result([_placed(*r, axis_size) for r in zip(results, found, out_dims, strict=True)])

    def _dims_of(self, call: Call) -> tuple[list[int | None], int]:
        """The batch dimension of each leaf of the call's arguments, not negative, and the number of samples."""
        paths, spec = tree_flatten_with_path(call.args)
        if not call.args:
            raise TransformError(with_details("vmap needs at least one positional argument", instead="vmap(f)(x)"))
        dims = _prefix(self.in_dims, spec)
        if dims is None:
            raise TransformError(
                with_details(
                    f"vmap: in_dims {self.in_dims} does not fit the arguments",
                    expected=f"an int, or a tuple of {len(call.args)} that are None, ints, or structured as the argument",
                    got=f"arguments of structure {_described(call.args)}",
                )
            )
        if isinstance(call.function, OfTorch):
            check_maps(call.args, dims)
        found = [_checked_dim(d, v, _path(path)) for d, (path, v) in zip(dims, paths, strict=True)]
        sizes = {_path(path): int(v.shape[d]) for d, (path, v) in zip(found, paths, strict=True) if d is not None}
        if not sizes:
            raise TransformError(
                with_details(
                    "vmap has nothing to map over", got=f"in_dims {self.in_dims}", expected="an int for at least one tensor"
                )
            )
        if len(set(sizes.values())) > 1:
            raise TransformError(
                with_details(
                    "vmap: the arguments have different numbers of samples",
                    got=", ".join(f"{size} in {what}" for what, size in sizes.items()),
                    expected="the same size along each dimension named in in_dims",
                )
            )
        return found + [None] * len(tree_flatten(call.kwargs)[0]), next(iter(sizes.values()))


def _check_options(in_dims: Dims, out_dims: Dims, randomness: Any, chunk_size: Any) -> None:
    if not (isinstance(in_dims, tuple | list) or _is_int(in_dims)):
        raise TransformError(
            with_details(
                f"vmap: in_dims is {in_dims!r}", expected="an int, or a tuple with an entry for each positional argument"
            )
        )
    for name, dims in (("in_dims", in_dims), ("out_dims", out_dims)):
        for d in tree_flatten(dims)[0]:
            if not (d is None or _is_int(d)):
                raise TransformTypeError(with_details(f"vmap: {name} must be made of ints and None", got=repr(d)))
    check_batches("vmap", randomness, chunk_size)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prefix(dims: Dims, spec: TreeSpec) -> list[int | None] | None:
    """`dims` for each leaf of a structure, None if it does not fit."""
    if isinstance(dims, list):
        dims = tuple(dims)
    return _broadcast_to_and_flatten(dims, spec)


def _path(path: Any) -> str:
    """How a message calls a leaf of the arguments."""
    return f"argument {path[0].idx}{keystr(path[1:])}"


def _described(tree: PyTree) -> str:
    if isinstance(tree, tuple | list):
        inside = ", ".join(map(_described, tree))
        return f"({inside})" if isinstance(tree, tuple) else f"[{inside}]"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{k!r}: {_described(v)}" for k, v in tree.items()) + "}"
    return f"tensor{tuple(tree.shape)}" if isinstance(tree, TensorProxy) else type(tree).__name__


def _checked_dim(dim: int | None, value: Any, what: str) -> int | None:
    if dim is None:
        return None
    if not isinstance(value, TensorProxy):
        raise TransformError(
            with_details(
                f"vmap: in_dims is {dim} for {what}, which is no tensor",
                got=f"a {type(value).__name__}",
                instead="in_dims None for what is the same for all samples",
            )
        )
    if not -value.ndim <= dim < value.ndim:
        raise TransformError(
            with_details(
                f"vmap: in_dims is {dim} for {what}, which has no such dimension",
                got=f"a tensor of shape {tuple(value.shape)}",
                expected=f"{-value.ndim} <= in_dims < {value.ndim}" if value.ndim else "None: it has no dimension to map over",
            )
        )
    return dim % value.ndim


def _without(shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
    return tuple(shape) if dim is None else (*shape[:dim], *shape[dim + 1 :])


def _flat_out_dims(out_dims: Dims, program: Program) -> list[int | None]:
    """`out_dims` for each tensor that the function returns."""
    dims = _prefix(out_dims, program.out_spec)
    if dims is None:
        raise TransformError(
            with_details(
                f"vmap: out_dims {out_dims} does not fit what the function returns",
                expected="an int, or one for each result, structured as the result",
                got=f"a result of {len(program.out_leaves)} leaves",
            )
        )
    for d, v in zip(dims, program.out_leaves, strict=True):
        if d is not None and not isinstance(v, TensorProxy):
            raise TransformTypeError(
                with_details(
                    f"vmap: the function returns a {type(v).__name__} where out_dims is {d}",
                    expected="a tensor",
                    instead="out_dims None for results that are no tensors",
                )
            )
    return [d for d, v in zip(dims, program.out_leaves, strict=True) if isinstance(v, TensorProxy)]


def _placed(value: TensorProxy, dim: int | None, wanted: int | None, axis_size: int) -> TensorProxy:
    """A result with its batch dimension where `out_dims` says."""
    if wanted is None:
        if dim is None:
            return value
        raise TransformError(
            with_details(
                "vmap: out_dims is None for a result that is different for each sample",
                got=f"a result of shape {_without(value.shape, dim)} for each of {axis_size} samples",
                expected="the dimension that the samples are to have in it",
            )
        )
    value = with_batch(axis_size, value, dim)
    if not -value.ndim <= wanted < value.ndim:
        raise TransformError(
            with_details(
                f"vmap: out_dims is {wanted}, and the result has no such dimension",
                got=f"a result of rank {value.ndim - 1} for each sample",
                expected=f"{-value.ndim} <= out_dims < {value.ndim}",
            )
        )
    wanted %= value.ndim
    return ltorch.movedim(value, 0, wanted) if wanted else value


@constructor
def vmap(
    function: Callable,
    in_dims: Dims = 0,
    out_dims: Dims = 0,
    randomness: Randomness = "error",
    *,
    chunk_size: int | None = None,
) -> Callable:
    """The function applied to each sample of a batch, as one program without a loop.

    For ``y = vmap(f)(x)``: ``y[i] = f(x[i])``.  Inside `function` the batch dimension is not there: shapes are those of one sample.

    Args:
        function: takes and returns tensors, in tuples, lists and dicts if it likes.
        in_dims: the dimension of the samples in each positional argument: an int, or a tuple of ints, of None (the same for
            all samples) and of structures of these like the argument.  Keyword arguments are the same for all samples.
        out_dims: the dimension of the samples in each result.
        randomness: what a random operation does: raise ("error"), draw for each sample ("different") or once for all ("same").
        chunk_size: how many samples at a time; needs less memory, gives the same.

    Raises:
        TransformError: `in_dims` or `out_dims` do not fit, numbers of samples differ, or a random operation with "error".
        TransformTypeError: dimensions that are no ints, or a result that is no tensor.
        DataDependentError: `function` makes a number of a batched tensor.

    >>> import torch
    >>> x, w = torch.arange(6.0).reshape(3, 2), torch.tensor([1.0, 10.0])
    >>> vmap(torch.dot, in_dims=(0, None))(x, w)
    tensor([10., 32., 54.])
    """
    return shared(Vmap, function, in_dims, out_dims, randomness, chunk_size)
