"""What is known of tensors as sums by weights, where their entries are at other places: `weighted_sums` of layouts, indices, running sums."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_environment
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._shared import argument, negative
from thunder_norm.rules.known_ranges.ranges_of_activations import is_zero_constant
from thunder_norm.rules.weighted import _weights as terms
from thunder_norm.rules.weighted._combinations import Combination, InverseOfWeights, Sums, combinations_of, is_zero, weights_of
from thunder_norm.rules.weighted._weights import Term
from thunder_norm.rules.weighted.weighted_sums import Found, everything, few, first, register
from thunder_norm.rules.written_out._forms import reaxed

# -- the same numbers at other places -------------------------------------------------------------------------------------


def placed(x: Any, place: Mapping[int, int]) -> Found:
    """What is known of x, whose dimension d is the result's `place[d]`; one that is gone has size 1."""
    found: list[Sums] = []
    for f in everything(x):
        if isinstance(f, InverseOfWeights):
            found.append(replace(f, weights=replace(f.weights, term=f.weights.term.relabelled(place))))
        elif isinstance(f, Combination):
            dims = tuple(place[d] for d in f.elem_dims if d in place)
            found.append(replace(f, term=f.term.relabelled(place), elem_dims=dims))
        else:
            found.append(replace(f, term=f.term.relabelled(place)))
    return few(found)


def _same(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    return few(everything(first(args, kwargs)))


register(
    _same,
    torch.clone,
    torch.detach,
    torch.Tensor.contiguous,
    torch.Tensor.to,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.type_as,
)


def _by_layout(layout: Sequence[int | None]) -> dict[int, int]:
    return {d: i - len(layout) for i, d in enumerate(layout) if d is not None}


def _dim(args: tuple, kwargs: Mapping[str, Any], at: int, *names: str) -> int | None:
    """A dimension that a call names, negative."""
    dim, x = argument(args, kwargs, at, *names), first(args, kwargs)
    return negative(dim, x.ndim) if isinstance(dim, int) and isinstance(x, torch.Tensor) and x.ndim else None


def _unsqueezed(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    x, dim = first(args, kwargs), argument(args, kwargs, 1, "dim")
    return placed(x, _by_layout(ed.with_new(x.ndim, dim))) if isinstance(dim, int) else ()


def _reshaped(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """Where only dimensions of size 1 come and go; also by an index that only adds some."""
    x = first(args, kwargs)
    axes = reaxed(tuple(ed.every(x.ndim)), x.shape, out.shape)
    return () if axes is None else placed(x, _by_layout(axes))


def _indexed(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """An index that only adds dimensions, or chooses along one."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if all(i is None or i is Ellipsis or isinstance(i, slice) and i == slice(None) for i in index):
        return _reshaped(args, kwargs, out)
    if len(index) == 1 and isinstance(index[0], torch.Tensor) and index[0].ndim == 1 and index[0].dtype == torch.int64:
        rows = rows_of(index[0], -args[0].ndim, args[0].ndim)
        return () if rows is None else _mapped(args[0], ("entries", rows[0]), rows[1], -args[0].ndim, out)
    return ()


def _permuted(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    x = first(args, kwargs)
    dims = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:] or kwargs.get("dims", ())
    return placed(x, _by_layout([negative(d, x.ndim) for d in dims])) if len(dims) == x.ndim else ()


def _transposed(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    one, other = _dim(args, kwargs, 1, "dim0", "axis0"), _dim(args, kwargs, 2, "dim1", "axis1")
    return () if one is None or other is None else _exchanged(first(args, kwargs), one, other)


def _exchanged(x: Any, one: int, other: int) -> Found:
    layout = list(ed.every(x.ndim))
    layout[one], layout[other] = layout[other], layout[one]
    return placed(x, _by_layout(layout))


def _expanded(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """Copies along dimensions are no other numbers."""
    return few(everything(first(args, kwargs)))


register(_unsqueezed, torch.unsqueeze)
register(_reshaped, torch.squeeze, torch.Tensor.view, torch.reshape)
register(_indexed, torch.Tensor.__getitem__)
register(_permuted, torch.permute)
register(_transposed, torch.transpose)
register(lambda args, kwargs, out: _exchanged(first(args, kwargs), -2, -1), torch.Tensor.mT.__get__)  # type: ignore[attr-defined]
register(_expanded, torch.Tensor.expand, torch.broadcast_to, torch.Tensor.expand_as)


# -- linear maps along one dimension --------------------------------------------------------------------------------------


def _mapped(x: Any, key: Hashable, keeps: Any, dim: int, out: NormedTensor) -> Found:
    """A linear map along one dimension whose coefficients are not negative."""

    def image(term: Term) -> Term:
        return terms.mapped(term, key, keeps, dim)

    found: list[Sums] = []
    for c in combinations_of(x):
        c = c.over(tuple(d for d in c.elem_dims if d != dim), x.shape)
        found.append(replace(c, term=image(c.term)))
    return few([*found, *(replace(w, term=image(w.term)) for w in weights_of(x, exactly=False))])


def _cumulative(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    dim = _dim(args, kwargs, 1, "dim", "axis")
    return () if dim is None else _mapped(first(args, kwargs), ("cumsum",), None, dim, out)


def rows_of(index: Any, dim: int, ndim: int) -> tuple[Hashable, Any] | None:
    """Which entries along a dimension an index names, the same for all of the others; None where it is not the same."""
    if not isinstance(index, torch.Tensor) or index.is_inference():
        return None
    identity, laid_out = current_environment().place_of(index)
    strides = laid_out.stride()
    if index.ndim == 1:
        stride = strides[0]
    elif index.ndim == ndim and all(
        n == 1 or step == 0 for d, (n, step) in enumerate(zip(index.shape, strides, strict=True)) if d != dim % ndim
    ):
        stride = strides[dim]
    else:
        return None
    return (identity, laid_out.storage_offset(), stride, index.shape[dim if index.ndim > 1 else 0]), index


def _chosen(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """Entries along one dimension."""
    x, dim = first(args, kwargs), _dim(args, kwargs, 1, "dim", "axis")
    rows = None if dim is None else rows_of(argument(args, kwargs, 2, "index"), dim, x.ndim)
    if dim is None or rows is None or any(out.shape[d] != x.shape[d] for d in range(-x.ndim, 0) if d != dim):
        return ()
    return _mapped(x, ("entries", rows[0]), rows[1], dim, out)


def _added_at(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """Entries along one dimension added to zeros."""
    x, dim = first(args, kwargs), _dim(args, kwargs, 1, "dim", "axis")
    rows = None if dim is None else rows_of(argument(args, kwargs, 2, "index"), dim, x.ndim)
    source = argument(args, kwargs, 3, "source", "src")
    if dim is None or rows is None or kwargs.get("alpha", 1) != 1 or not (is_zero(x) or is_zero_constant(x)):
        return ()
    if rows[1].ndim > 1 and rows[1].shape != source.shape:
        return ()
    return _mapped(source, ("added", rows[0], x.shape[dim]), rows[1], dim, out)


def _reduced_at(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """The same by a reduction to sums."""
    kwargs = {name: value for name, value in kwargs.items() if name != "include_self"}
    return _added_at(args, kwargs, out) if argument(args, kwargs, 4, "reduce") == "sum" else ()


register(_cumulative, torch.cumsum)
register(_chosen, torch.index_select, torch.gather)
register(_added_at, torch.index_add, torch.scatter_add)
register(_reduced_at, torch.scatter_reduce)
