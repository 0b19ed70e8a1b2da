"""Norm rules for operations that rename, merge, split or copy dimensions without changing an entry.

Almost all have value n and sensitivity 1; the work is in where elem_dims go.  See `thunder_norm.core.elem_dims` for the algebra.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import L1Tensor, L2Tensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import as_kind, dims_tuple, like, negative, own_dims, refuse, rms, scaled, spread


def sizes_of(sizes: tuple, named: dict[str, Any]) -> tuple:
    """The sizes, dimensions or repeats of a call: ``f(2, 3)``, ``f((2, 3))`` and ``f(size=(2, 3))`` alike."""
    given = sizes if not named else tuple(named.values())
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given


# -- reshape --------------------------------------------------------------------------------------------------------------


def reshaped(x: NormedTensor, shape: Sequence[int]) -> NormedTensor:
    """The result of reshaping x to `shape` (without -1).

    RMS: dimensions merged with elem_dims join them, which is free (a mean over more entries is at most the maximum).
    L1, L2: they are left out instead, which is free too (a sum over fewer entries).
    Operators: a split output dimension leaves blocks of rows; their heads become dimensions the maximum runs over.
    """
    if math.prod(shape) != x.numel():  # the program's mistake, not one of norms: as torch has it
        raise RuntimeError(f"shape {list(shape)} is invalid for input of size {x.numel()}")
    if isinstance(x, RMSToRMSTensor):
        return _reshaped_operator(x, shape)
    policy: ed.Policy = "coarsen" if isinstance(x, RMSTensor) else "refine"
    return scaled(x, 1, ed.reshape(x.elem_dims, x.shape, shape, policy).dims)


def _reshaped_operator(x: RMSToRMSTensor, shape: Sequence[int]) -> NormedTensor:
    """A block of rows of W has ``sigma_max <= sigma_max(W)``; stacked blocks, in sum of squares.

    With d_out rows split into blocks of d: factor sqrt(d_out / d); columns: sqrt(d / d_in); rows merged: 1; H columns merged: H.
    """
    c = 1.0
    if isinstance(x, RMSToRMSConvTensor):  # the maximum over taps of an operator norm, K times
        if x.groups > 1:
            raise NormMismatchError("the kernel of a grouped convolution cannot be reshaped")
        c = 1 / x.taps
    ends = [d % x.ndim for d in x.elem_dims]
    at: dict[int, int] = {}
    for old, new in ed.reshape_groups(x.shape, shape):
        sized_old, sized_new = [d for d in old if x.shape[d] != 1], [d for d in new if shape[d] != 1]
        here = [d for d in ends if d in sized_old]
        if not here:
            continue
        if len(here) > 1 or min(len(sized_old), len(sized_new)) != 1:
            return _reshaped_entries(x, shape)
        (end,) = here
        before, after = x.shape[end], shape[sized_new[-1]]
        at[end] = sized_new[-1]
        if end == ends[0]:
            c *= spread(math.sqrt(before / after)) if after < before else 1.0
        else:
            c *= math.sqrt(after / before) if after < before else after / before
    if len(at) < 2:
        return _reshaped_entries(x, shape)
    size = x.norm_size if c == 1 else x.norm_size * c
    return RMSToRMSTensor(size, elem_dims=tuple(at[d] - len(shape) for d in ends), sensitivity={"input": c})


def _reshaped_entries(x: RMSToRMSTensor, shape: Sequence[int]) -> RMSTensor:
    """An operator whose rows and columns do not survive, through the RMS of all its entries."""
    entries, c = as_kind(x, RMSTensor, x.elem_dims)
    dims = ed.reshape(entries.elem_dims, x.shape, shape).dims
    return rms(entries.norm_size, dims, sensitivity={"input": c})


def inferred(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """`shape` with its -1 replaced by the size that is left."""
    if any(not isinstance(n, int) for n in shape):
        raise NormMismatchError(f"a view of another dtype, or a shape that is not of numbers: {tuple(shape)}")
    if -1 not in shape:
        return tuple(shape)
    known = math.prod(n for n in shape if n != -1)
    return tuple(numel // max(known, 1) if n == -1 else n for n in shape)


@normed_op(torch.Tensor.view).register_norm
@normed_op(torch.reshape).register_norm
def reshape(input: NormedTensor, *shape: Any, **named: Any) -> NormedTensor:
    """The same entries in another shape.

    Value:       n, sensitivity 1: see `reshaped` for elem_dims and for operators
    Source:      the entries of a merged group are at most averaged over more of them
    """
    return reshaped(input, inferred(sizes_of(shape, named), input.numel()))


@normed_op(torch.Tensor.view_as).register_norm(allow_plain_tensors="constant")
@normed_op(torch.Tensor.reshape_as).register_norm(allow_plain_tensors="constant")
def reshape_as(input: NormedTensor, other: NormedTensor | torch.Tensor) -> NormedTensor:
    """`reshape` to the shape of another tensor."""
    return _ignoring_other(reshaped(input, other.shape))


def _ignoring_other(result: NormedTensor) -> NormedTensor:
    """The result with sensitivity 0 to `other`, of which only the shape or dtype matters."""
    assert result._sensitivity is not None
    result._sensitivity["other"] = 0
    return result


@normed_op(torch.flatten).register_norm
def flatten(input: NormedTensor, start_dim: int = 0, end_dim: int = -1) -> NormedTensor:
    """Dimensions start_dim to end_dim as one: `reshape`."""
    if input.ndim == 0:
        return reshaped(input, (1,))
    start, end = start_dim % input.ndim, end_dim % input.ndim
    return reshaped(input, (*input.shape[:start], math.prod(input.shape[start : end + 1]), *input.shape[end + 1 :]))


@normed_op(torch.ravel).register_norm
def ravel(input: NormedTensor) -> NormedTensor:
    """All dimensions as one: `reshape`."""
    return flatten(input)


@normed_op(torch.unflatten).register_norm
def unflatten(input: NormedTensor, dim: int, sizes: Sequence[int]) -> NormedTensor:
    """One dimension as several: `reshape`."""
    dim %= input.ndim
    return reshaped(input, (*input.shape[:dim], *inferred(sizes, input.shape[dim]), *input.shape[dim + 1 :]))


# -- permutations ---------------------------------------------------------------------------------------------------------


def _getter(name: str) -> Callable:
    """The function behind a property of torch.Tensor."""
    return getattr(torch.Tensor, name).__get__


def _permuted(x: NormedTensor, permutation: Sequence[int]) -> NormedTensor:
    return scaled(x, 1, ed.permute(x.elem_dims, permutation))


@normed_op(torch.permute).register_norm
def permute(input: NormedTensor, *dims: Any, **named: Any) -> NormedTensor:
    """Dimensions in another order.  Value n, sensitivity 1; elem_dims move along, an operator keeps which end is which."""
    return _permuted(input, [d % input.ndim for d in sizes_of(dims, named)])


@normed_op(torch.transpose).register_norm
def transpose(input: NormedTensor, dim0: int, dim1: int) -> NormedTensor:
    """Two dimensions exchanged: `permute`."""
    return _permuted(input, ed.swapped(input.ndim, dim0, dim1))


@normed_op(_getter("mT")).register_norm
@normed_op(_getter("mH")).register_norm
@normed_op(torch.adjoint).register_norm
def matrix_transpose(input: NormedTensor) -> NormedTensor:
    """The last two dimensions exchanged: `permute`."""
    return transpose(input, -2, -1)


@normed_op(torch.t).register_norm
@normed_op(_getter("T")).register_norm
@normed_op(_getter("H")).register_norm
@normed_op(torch.ops.aten.numpy_T.default).register_norm
def reversed_dims(input: NormedTensor) -> NormedTensor:
    """All dimensions in reverse order, a matrix transposed: `permute`."""
    return _permuted(input, range(input.ndim)[::-1])


@normed_op(torch.movedim).register_norm
def movedim(input: NormedTensor, source: int | tuple[int, ...], destination: int | tuple[int, ...]) -> NormedTensor:
    """Dimensions moved to other places: `permute`."""
    return _permuted(input, ed.moved(input.ndim, source, destination))


@normed_op(torch.flip).register_norm
def flip(input: NormedTensor, *dims: Any, **named: Any) -> NormedTensor:
    """The order of entries reversed along some dimensions.  Value n, sensitivity 1."""
    return scaled(input, 1)


@normed_op(torch.fliplr).register_norm
@normed_op(torch.flipud).register_norm
def flip_sides(input: NormedTensor) -> NormedTensor:
    """`flip` of one dimension."""
    return scaled(input, 1)


@normed_op(torch.rot90).register_norm
def rot90(input: NormedTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> NormedTensor:
    """Quarter turns: a `flip`, and for an odd number a `transpose`."""
    return transpose(input, dims[0], dims[1]) if k % 2 else scaled(input, 1)


@normed_op(torch.roll).register_norm
def roll(input: NormedTensor, shifts: int | Sequence[int], dims: Any = None) -> NormedTensor:
    """Entries shifted along dimensions.  Value n, sensitivity 1; without `dims` the tensor is rolled as a whole.

    Then groups of elem_dims do not survive: the norm becomes RMS over everything.
    """
    if (dims is not None and dims != () and dims != []) or input.ndim < 2:
        return scaled(input, 1)
    entries, c = as_kind(input, RMSTensor, tuple(range(-input.ndim, 0)))
    return like(entries, entries.norm_size, sensitivity={"input": c})


# -- dimensions of size 1 -------------------------------------------------------------------------------------------------


def _placed(x: NormedTensor, layout: Sequence[int | None]) -> NormedTensor:
    """The result over x's elem_dims where `layout` has them; an operator that loses an end is read through its entries."""
    dims = ed.place(x.elem_dims, layout)
    if not isinstance(x, RMSToRMSTensor) or len(dims) == 2:
        return scaled(x, 1, dims)
    entries, c = as_kind(x, RMSTensor, tuple(d for d in x.elem_dims if d in layout))
    return rms(entries.norm_size, ed.place(entries.elem_dims, layout), sensitivity={"input": c})


@normed_op(torch.unsqueeze).register_norm
def unsqueeze(input: NormedTensor, dim: int) -> NormedTensor:
    """A new dimension of size 1, in no norm.  Value n, sensitivity 1."""
    return _placed(input, ed.with_new(input.ndim, dim))


@normed_op(torch.squeeze).register_norm
def squeeze(input: NormedTensor, dim: int | Sequence[int] | None = None) -> NormedTensor:
    """Dimensions of size 1 dropped.  Value n, sensitivity 1."""
    gone = [d for d in dims_tuple(dim, input.ndim) if input.shape[d] == 1]
    return _placed(input, ed.without(input.ndim, gone))


# -- copies ---------------------------------------------------------------------------------------------------------------


def expanded(x: NormedTensor, shape: Sequence[int]) -> NormedTensor:
    """The result of broadcasting x to `shape`: copies leave every mean and every maximum unchanged."""
    if isinstance(x, RMSToRMSTensor) and any(x.shape[d] != shape[d] for d in x.elem_dims):
        entries, c = as_kind(x, RMSTensor, x.elem_dims)
        return rms(entries.norm_size, entries.elem_dims, sensitivity={"input": c})
    return scaled(x, 1, ed.expand(x.elem_dims, x.shape, shape) if isinstance(x, L1Tensor | L2Tensor) else None)


@normed_op(torch.Tensor.expand).register_norm
@normed_op(torch.broadcast_to).register_norm
def expand(input: NormedTensor, *size: Any, implicit: bool = False, **named: Any) -> NormedTensor:
    """x broadcast to a shape (-1: as it is).  Value n, sensitivity 1; elem_dims stay."""
    sizes = sizes_of(size, named)
    shape = [input.shape[i - len(sizes)] if n == -1 else n for i, n in enumerate(sizes)]
    return expanded(input, shape)


@normed_op(torch.Tensor.expand_as).register_norm(allow_plain_tensors="constant")
def expand_as(input: NormedTensor, other: NormedTensor | torch.Tensor) -> NormedTensor:
    """`expand` to the shape of another tensor."""
    return _ignoring_other(expanded(input, other.shape))


def _repeated(x: NormedTensor, repeats: dict[int, int]) -> NormedTensor:
    """x with r copies of itself along each dimension (negative): a mean stays, a sum grows, rows repeat and columns add."""
    if isinstance(x, RMSToRMSConvTensor) and x.groups > 1:
        raise NormMismatchError("the kernel of a grouped convolution cannot be repeated")
    if isinstance(x, RMSTensor):
        return scaled(x, 1)
    if isinstance(x, RMSToRMSConvTensor):
        return scaled(x, math.prod(repeats.values()) / repeats.get(x.elem_dims[0], 1))
    if isinstance(x, RMSToRMSTensor):
        return scaled(x, repeats.get(x.elem_dims[1], 1))
    c = math.prod(repeats.get(d, 1) for d in own_dims(x))
    return scaled(x, c if isinstance(x, L1Tensor) else math.sqrt(c), own_dims(x))


@normed_op(torch.Tensor.repeat).register_norm
@normed_op(torch.tile).register_norm
def repeat(input: NormedTensor, *repeats: Any, **named: Any) -> NormedTensor:
    """Copies side by side.

    Value:       n for RMS and the largest entry; r n for an L1 norm over a dimension repeated r times (L2: sqrt r)
    Sensitivity: the same factor
    """
    counts = sizes_of(repeats, named)
    return _repeated(input, {i - len(counts): r for i, r in enumerate(counts)})


@normed_op(torch.repeat_interleave).register_norm(allow_plain_tensors="constant")
def repeat_interleave(
    input: NormedTensor, repeats: int | torch.Tensor, dim: int | None = None, output_size: int | None = None
) -> NormedTensor:
    """Each entry along `dim` repeated.  As `repeat`; a tensor of counts only where the norm does not run over `dim`."""
    if isinstance(repeats, torch.Tensor):
        if dim is None or negative(dim, input.ndim) in input.elem_dims:
            raise NormMismatchError("repeat_interleave by a tensor of counts along a dimension of elem_dims: use a number")
        return scaled(input, 1)
    if dim is not None:
        return _repeated(input, {negative(dim, input.ndim): repeats})
    if input.ndim != 1:
        raise NormMismatchError("repeat_interleave without dim flattens: flatten first")
    return _repeated(input, {-1: repeats})


for _copy, _rule in (
    (torch.view_copy, reshape),
    (torch.permute_copy, permute),
    (torch.transpose_copy, transpose),
    (torch.t_copy, reversed_dims),
    (torch.expand_copy, expand),
    (torch.squeeze_copy, squeeze),
    (torch.unsqueeze_copy, unsqueeze),
):
    normed_op(_copy).register_norm(_rule)


for _op in (torch.as_strided_copy, torch.as_strided_scatter):
    refuse(
        normed_op(_op),
        f"{_op.__name__} may overlap or skip entries in any way, so no norm of the result is known; use slices, unfold or reshape",
    )
