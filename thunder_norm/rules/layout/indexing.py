"""Norm rules for taking a part of a tensor: slices, splits, indices, gathers.

Along a dimension the norm does not run over, a part is a subset of what the maximum is over.  Along one it does, all the energy
may sit in the part that is kept: factor sqrt(K / m) for m of K positions, sqrt K once the dimension is gone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import VectorKind, annotated, as_kind, negative, register_refusal, rms, root, scaled, spread
from thunder_norm.scalars import times


def _kept_factor(x: NormedTensor, dim: int, kept: int) -> float:
    """What it costs that only `kept` positions along `dim` (negative) remain.

    A sum over fewer entries is at most the sum.  A sub-matrix has ``sigma_max <= sigma_max(W)`` in other dimensions:
    sqrt(out / kept) for rows, sqrt(kept / in) for columns.
    """
    size = x.shape[dim]
    if kept in (0, size):
        return 1.0
    if isinstance(x, RMSToRMSTensor):
        if getattr(x, "groups", 1) > 1 and dim in x.elem_dims:
            raise NormMismatchError("the kernel of a grouped convolution cannot be sliced along its channels")
        if dim == x.elem_dims[0]:
            return spread(math.sqrt(size / kept))
        if dim == x.elem_dims[1]:
            return math.sqrt(kept / size)
        return kept / size if isinstance(x, RMSToRMSConvTensor) else 1.0
    return spread(math.sqrt(size / kept)) if isinstance(x, RMSTensor) and dim in x.elem_dims else 1.0


def part(
    x: NormedTensor,
    kept: dict[int, int],
    removed: Collection[int] = (),
    layout: Sequence[int | None] | None = None,
    name: str = "input",
) -> NormedTensor:
    """The result of keeping `kept` positions along some dimensions (negative) and indexing others away.

    Args:
        x: the normed tensor.
        kept: number of positions that remain along a dimension.
        removed: dimensions that are indexed, by a number or by tensors.
        layout: which dimension of x each one of the output is (see `elem_dims.place`); those that remain, in order, if None.
        name: the rule's name for x.
    """
    c = to_entries = 1.0
    if isinstance(x, RMSToRMSTensor) and set(removed) & set(x.elem_dims):
        x, to_entries = as_kind(x, RMSTensor, tuple(d for d in x.elem_dims if d not in removed))
    remaining = [d for d in x.elem_dims if d not in removed]
    dims = ed.place(remaining, ed.without(x.ndim, removed) if layout is None else layout)
    for dim, count in kept.items():
        c *= _kept_factor(x, dim, count)
    if isinstance(x, RMSTensor):
        c *= spread(root(ed.numel(x.shape, [d for d in x.elem_dims if d in removed])))
        return rms(times(x.norm_size, c), dims, sensitivity={name: c * to_entries})
    if isinstance(x, RMSToRMSConvTensor):
        c /= ed.numel(x.shape, removed)
    return scaled(x, c, dims, name)


# -- slices and splits ------------------------------------------------------------------------------------------------------


def _sliced(x: NormedTensor, dim: int, kept: int) -> NormedTensor:
    return part(x, {negative(dim, x.ndim): kept})


@normed_op(torch.ops.aten.slice.Tensor).register_norm
def slice_of(input: NormedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> NormedTensor:
    """Every step-th position from start to end along `dim`, m of K.

    Value:       n where the norm does not run over `dim`, sqrt(K / m) n where it does (attained: all energy in the slice)
    Sensitivity: the same factor
    """
    return _sliced(input, dim, len(range(*slice(start, end, step).indices(input.shape[dim]))))


@normed_op(torch.narrow).register_norm(allow_plain_tensors="constant")
def narrow(input: NormedTensor, dim: int, start: int | torch.Tensor, length: int) -> NormedTensor:
    """`length` positions from `start` along `dim`: as a slice."""
    return _sliced(input, dim, length)


@normed_op(torch.select).register_norm
def select(input: NormedTensor, dim: int, index: Any) -> NormedTensor:
    """One position along `dim`, which is dropped.  Value n, or sqrt(K) n from an RMS over `dim`; the same sensitivity."""
    return part(input, {}, (negative(dim, input.ndim),))


@normed_op(torch.unbind).register_norm
def unbind(input: NormedTensor, dim: int = 0) -> tuple:
    """All positions along `dim`, each as `select`."""
    return tuple(select(input, dim, i) for i in range(input.shape[dim]))


@normed_op(torch.split).register_norm
@normed_op(torch.ops.aten.unsafe_split.Tensor).register_norm
@normed_op(torch.ops.aten.split_with_sizes.default).register_norm
@normed_op(torch.ops.aten.unsafe_split_with_sizes.default).register_norm
def split(input: NormedTensor, split_size: int | Sequence[int], dim: int = 0) -> tuple:
    """Pieces along `dim`, each as a slice: value n, or sqrt(K / m) n for m of K positions of elem_dims (q, k, v: sqrt 3)."""
    size = input.shape[dim]
    if isinstance(split_size, int):
        sizes = [min(split_size, size - at) for at in range(0, size, split_size)] or [0]
    else:
        sizes = list(split_size)
    return tuple(_sliced(input, dim, kept) for kept in sizes)


@normed_op(torch.chunk).register_norm
def chunk(input: NormedTensor, chunks: int, dim: int = 0) -> tuple:
    """At most `chunks` equal pieces along `dim`: `split`."""
    return split(input, max(-(-input.shape[dim] // chunks), 1), dim)


@normed_op(torch.tensor_split).register_norm
def tensor_split(input: NormedTensor, indices_or_sections: int | Sequence[int], dim: int = 0) -> tuple:
    """Pieces along `dim`, as equal as possible or cut at indices: `split`."""
    size = input.shape[dim]
    if isinstance(indices_or_sections, int):
        small, larger = divmod(size, indices_or_sections)
        return split(input, [small + (i < larger) for i in range(indices_or_sections)], dim)
    cuts = [0, *indices_or_sections, size]
    return split(input, [len(range(size)[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)], dim)


def _split_by_data(input: NormedTensor, indices_or_sections: torch.Tensor, dim: int = 0) -> tuple:
    """By a tensor of indices: the shapes of the pieces depend on data."""
    raise NormMismatchError("the shapes of the pieces depend on data: give the indices as numbers")


register_refusal(normed_op(torch.tensor_split), _split_by_data)


# -- indices ----------------------------------------------------------------------------------------------------------------


def _is_number(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return item.ndim == 0 and item.dtype not in (torch.bool, torch.uint8)
    return isinstance(item, int) and not isinstance(item, bool)


def _consumed(item: Any) -> int:
    """How many dimensions of the tensor an index takes care of."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.ndim
    return 1


def _index_rank(item: Any) -> int:
    """Number of dimensions a tensor or nested list of indices adds; a mask is as good as its list of positions."""
    if isinstance(item, bool):
        return 1
    if isinstance(item, torch.Tensor):
        return 1 if item.dtype in (torch.bool, torch.uint8) else item.ndim
    if not isinstance(item, list | tuple):
        return 0
    return 1 if not item or isinstance(item[0], bool) else 1 + _index_rank(item[0])


def _indexed(x: NormedTensor, items: Sequence[Any]) -> NormedTensor:
    """The result of ``x[items]``: numbers, slices, None, Ellipsis and plain tensors (or lists) of integers or bools."""
    items = list(items)
    unnamed = x.ndim - sum(map(_consumed, items))
    dots = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items[dots : dots + 1] = [slice(None)] * unnamed
    kept: dict[int, int] = {}
    removed: list[int] = []
    # what the output consists of before the indices by tensors are put together: input dimensions, None for new ones, "*"
    layout: list[Any] = []
    rank, at = 0, 0
    for item in items:
        if item is None:
            layout.append(None)
        elif isinstance(item, slice):
            kept[at - x.ndim] = len(range(*item.indices(x.shape[at])))
            layout.append(at - x.ndim)
        elif _is_number(item):
            removed.append(at - x.ndim)
        else:
            removed += [d - x.ndim for d in range(at, at + _consumed(item))]
            rank = max(rank, _index_rank(item))
            layout.append("*")
        at += _consumed(item)
    if "*" in layout:
        first, last = layout.index("*"), len(layout) - 1 - layout[::-1].index("*")
        is_together = all(entry == "*" for entry in layout[first : last + 1])
        before = sum(entry != "*" for entry in layout[: first if is_together else 0])
        layout = [entry for entry in layout if entry != "*"]
        layout[before:before] = [None] * rank
    return part(x, kept, removed, layout)


@normed_op(torch.Tensor.__getitem__).register_norm
def getitem(input: NormedTensor, index: Any) -> NormedTensor:
    """x[index] with numbers, slices, None, Ellipsis and plain tensors of integers or bools.

    Value:       n; a factor sqrt(K / m) for each slice that keeps m of K positions of an RMS norm's elem_dims, sqrt(K) for each
                 of them that is indexed away
    Sensitivity: the same factor
    Source:      see the module: each factor is attained by a tensor with all its energy in the part
    """
    return _indexed(input, index if isinstance(index, tuple) else (index,))


normed_op(torch.Tensor.__getitem__).register_norm(
    annotated(getitem, index=torch.Tensor | list[torch.Tensor]), allow_plain_tensors="constant"
)


@normed_op(torch.ops.aten.index.Tensor).register_norm(allow_plain_tensors="constant")
@normed_op(torch.ops.aten._unsafe_index.Tensor).register_norm(allow_plain_tensors="constant")
def index(input: NormedTensor, indices: list[torch.Tensor]) -> NormedTensor:
    """x[indices], None for dimensions that stay as they are: `getitem`."""
    return _indexed(input, [slice(None) if item is None else item for item in indices])


@normed_op(torch.index_select).register_norm(allow_plain_tensors="constant")
def index_select(input: NormedTensor, dim: int, index: torch.Tensor) -> NormedTensor:
    """m positions along `dim`, chosen by a plain tensor of integers.

    Value:       n where the norm does not run over `dim`; sqrt(mu K / m) n where it does and the position chosen most often
                 is chosen mu times (attained: all energy there)
    Sensitivity: the same factor
    """
    gone = negative(dim, input.ndim)
    m = index.numel()
    if gone not in input.elem_dims or m == 0:
        return part(input, {})
    if not isinstance(input, RMSTensor) or m > _MOST_COMPARED or index.device.type == "meta" or current_mode() != "bound":
        return part(input, {}, (gone,), ed.every(input.ndim))
    flat = index.reshape(-1)
    most_often = (flat.unsqueeze(0) == flat.unsqueeze(1)).sum(0).amax().to(input.norm_size)
    c = (most_often * (input.shape[gone] / m)).sqrt()
    return scaled(input, c)


_MOST_COMPARED = 4096  # beyond, counting by comparison would cost more than it is worth


@normed_op(torch.gather).register_norm(allow_plain_tensors="constant")
def gather(input: RMSTensor, dim: int, index: torch.Tensor, sparse_grad: bool = False) -> RMSTensor:
    """out[i, e] = x[index[i, e], e]: for each output entry a position of its own along `dim` (of K).

    Value:       sqrt(min(K, N)) n if the norm runs over N entries elsewhere (attained: each picks its own slice); sqrt(K) n if it
                 runs over `dim`, and over the rest of elem_dims afterwards; sqrt(K_d / m_d) for each of them that is cut to m_d
    Sensitivity: the same factor
    """
    if input.ndim == 0:
        return scaled(input, 1)
    gone = negative(dim, input.ndim)
    positions = input.shape[gone]
    others = tuple(d for d in input.elem_dims if d != gone)
    c = math.prod(_kept_factor(input, d, index.shape[d]) for d in others)
    if gone in input.elem_dims:
        c *= spread(root(positions))
    else:
        c *= spread(root(min(positions, ed.numel(index.shape, others))))
    return rms(times(input.norm_size, c), others, sensitivity={"input": c})


@normed_op(torch.take).register_norm(allow_plain_tensors="constant")
def take(input: RMSTensor, index: torch.Tensor) -> LinfTensor:
    """Entries by their position in the flattened tensor: by the largest entry, value sqrt(N) n."""
    return _entries(input)


@normed_op(torch.masked_select).register_norm(allow_plain_tensors="constant")
def masked_select(input: RMSTensor, mask: torch.Tensor) -> LinfTensor:
    """Entries where a plain mask is set, as a vector: by the largest entry, value sqrt(N) n."""
    return _entries(input)


def _entries(x: RMSTensor) -> LinfTensor:
    entries, c = as_kind(x, LinfTensor, ())
    return LinfTensor(entries.norm_size, elem_dims=(), sensitivity={"input": c})


@normed_op(torch.channel_shuffle).register_norm
def channel_shuffle(input: NormedTensor, groups: int) -> NormedTensor:
    """Channels in another order.  Value n, sensitivity 1."""
    return scaled(input, 1)


@normed_op(torch.diagonal).register_norm
def diagonal(input: VectorKind, offset: int = 0, dim1: int = 0, dim2: int = 1) -> NormedTensor:
    """Entries whose indices along two dimensions agree, as a new last dimension.

    Value:       n from the largest entry; sqrt(K) n for each of the two dimensions (of size K) that is in elem_dims
    """
    gone = (negative(dim1, input.ndim), negative(dim2, input.ndim))
    return part(input, {}, gone, [*ed.without(input.ndim, gone), None])


# -- copies in the place of views ---------------------------------------------------------------------------------------------

for _copy, _rule in (
    (torch.narrow_copy, narrow),
    (torch.select_copy, select),
    (torch.slice_copy, slice_of),
    (torch.unbind_copy, unbind),
    (torch.split_copy, split),
    (torch.split_with_sizes_copy, split),
    (torch.diagonal_copy, diagonal),
):
    normed_op(_copy).register_norm(allow_plain_tensors="constant")(_rule)
