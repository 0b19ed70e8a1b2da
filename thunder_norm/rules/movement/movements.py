"""How results move with the arguments where they are linear in them, for `norm_sensitivity("composed")`.

Three ways to find the linear map of a row: an operation that only moves entries is shown their numbers; one that acts on each sample
of a batch is shown the unit vectors; sums and multiples are written down.  What comes from other rows is no longer the same row, and
weighted sums of rows stay within the ellipsoid times the sum of the absolute weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.composed import Call, Made, Spread, Term, is_fixed, moves, parts_of, spread_of, values
from thunder_norm.core.ellipsoids import Dense, Multiple, Picked, Repeated, Scaled
from thunder_norm.core.local import is_within
from thunder_norm.core.registry import normed_op
from thunder_norm.core.slopes import Slopes, between
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.core.vertices import LARGEST, Root, Vertex
from thunder_norm.core.within import rounded_by
from thunder_norm.rules.layout.writing import copied, with_entries
from thunder_norm.rules.movement import movements_nearby, movements_of_attention
from thunder_norm.trees import flat_tensors, map_tensors

Found = Sequence[Made | None] | None

# -- entries that change their places -----------------------------------------------------------------------------------


def rearranged(call: Call) -> Found:
    """An operation whose result's entries are some of its arguments', in another order, or 0: seen on their numbers, from 1 on."""
    moving = call.moving
    tensors = flat_tensors((call.args, call.kwargs))
    # numbers in a tensor may be those of the largest entries, others for other inputs; near the data they are taken to turn out the same
    if any(spread_of(x) is None for x in moving) or not (is_within() or all(has_norm(t) for t in tensors)):
        return None
    starts, count = {}, 1
    for x in moving:
        starts[id(x)] = count
        count += x.numel()

    def numbered(t: torch.Tensor) -> torch.Tensor:
        if id(t) in starts:
            return torch.arange(starts[id(t)], starts[id(t)] + t.numel(), dtype=torch.float64).reshape(t.shape)
        return t if not has_norm(t) and not t.is_floating_point() else torch.zeros(t.shape, dtype=torch.float64)

    results = call.run(*map_tensors(numbered, (call.args, call.kwargs)))
    results = results if isinstance(results, list | tuple) else (results,)
    if len(results) != len(call.results):
        return None
    return [_from_numbers(y, r.long(), [(x, starts[id(x)]) for x in moving]) for y, r in zip(call.results, results, strict=True)]


def _from_numbers(y: NormedTensor, numbers: torch.Tensor, moving: Sequence[tuple[NormedTensor, int]]) -> Made | None:
    counts = dict.fromkeys((len(y.elem_dims), 1, *range(2, y.ndim + 1)))
    for ndim in (n for n in counts if n <= y.ndim):
        size = math.prod(y.shape[y.ndim - ndim :])
        if 0 < size <= LARGEST:
            rows = numbers.reshape(-1, size)
            there = [(x, start) for x, start in moving if ((rows >= start) & (rows < start + x.numel())).any()]
            terms = [_picked(x, rows - start) for x, start in there or moving[:1]]
            if terms and all(t is not None for t in terms):
                return Made(ndim, tuple(t for t in terms if t is not None), of=tuple(x for x, _ in moving))
    return None


def _picked(x: NormedTensor, index: torch.Tensor) -> Term | None:
    """The term of x, given which entry of x each is [rows, features]; None unless every row takes the same features, of one row of x."""
    spread = spread_of(x)
    assert spread is not None
    size = spread.parts[0].size
    is_x = (index >= 0) & (index < x.numel())
    features = torch.where(is_x, index % size, -1)
    rows = torch.where(is_x, index // size, -1)
    if not len(index) or (features != features[0]).any():
        return None
    there = rows[:, features[0] >= 0]
    if there.numel() and (there != there[:, :1]).any():
        return None
    keeps_rows = len(rows) * size == x.numel() and (not there.numel() or bool((there[:, 0] == torch.arange(len(rows))).all()))
    is_same = len(features[0]) == size and bool((features[0] == torch.arange(size)).all())
    return Term(x, None if is_same else Picked(features[0]), keeps_rows)


_REARRANGING = (
    torch.Tensor.view, torch.reshape, torch.flatten, torch.unflatten, torch.permute, torch.transpose, torch.t, torch.movedim,
    torch.flip, torch.fliplr, torch.flipud, torch.rot90, torch.roll, torch.unsqueeze, torch.squeeze, torch.ravel, torch.adjoint,
    torch.Tensor.expand, torch.broadcast_to, torch.Tensor.repeat, torch.tile, torch.repeat_interleave,
    torch.Tensor.view_as, torch.Tensor.reshape_as, torch.Tensor.expand_as,
    torch.ops.aten.slice.Tensor, torch.narrow, torch.select, torch.unbind, torch.split, torch.chunk, torch.tensor_split,
    torch.ops.aten.split_with_sizes.default, torch.Tensor.unfold, F.unfold, torch.block_diag,
    torch.cat, torch.stack, torch.diagonal, torch.diag, torch.diag_embed, torch.tril, torch.triu, torch.channel_shuffle,
    torch.pixel_shuffle, torch.pixel_unshuffle, *(getattr(torch.Tensor, n).__get__ for n in ("T", "mT", "H", "mH")),
)  # fmt: skip
for _op in _REARRANGING:
    normed_op(_op).register_movement(rearranged)


@normed_op(F.pad).register_movement
@normed_op(torch.constant_pad_nd).register_movement
def pad(call: Call) -> Found:
    """With zeros, or with entries there are."""
    is_moved = call.given.get("mode", "constant") != "constant" or not call.given.get("value")
    return rearranged(call) if is_moved else None


def _written(call: Call) -> Found:
    """A tensor after a write into a part of it that has numbers or slices for its place: a number that is written stays as it is."""
    names = {"value": 0.0} if not isinstance(call.given.get("value", 0.0), torch.Tensor) else {}
    args = tuple(names.get("value", a) if i == 2 else a for i, a in enumerate(call.args))
    kwargs = {k: names.get(k, a) for k, a in call.kwargs.items()}
    return rearranged(Call(args, kwargs, call.given, call.results, call.body))


with_entries.register_movement(_written)
for _op in (copied, torch.slice_scatter, torch.select_scatter, torch.diagonal_scatter):
    normed_op(_op).register_movement(rearranged)


def unchanged(call: Call) -> Found:
    """The tensor itself, by another name, in another dtype, which may be that of another one, or as a copy."""
    x = call.given.get("input")
    if not moves(x) or x.shape != call.results[0].shape or (spread := spread_of(x)) is None:
        return None
    return [Made(spread.ndim, (Term(x),), of=tuple(call.moving))]


for _op in (
    torch.Tensor.to, torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default, torch.Tensor.type,
    torch.Tensor.type_as, torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16,
    torch.Tensor.cpu, torch.Tensor.cuda, torch.clone, torch.Tensor.contiguous, torch.Tensor.detach, torch.positive,
    torch.alias_copy, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default,
    torch.Tensor.resolve_conj, torch.Tensor.resolve_neg, torch.nan_to_num,
):  # fmt: skip
    normed_op(_op).register_movement(unchanged)


def _undropped(call: Call) -> Found:
    training = call.given.get("training", call.given.get("train", True))
    return unchanged(call) if call.given.get("p", 0.5) == 0 or training is False else None


for _op in (torch.dropout, torch.feature_dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout):
    normed_op(_op).register_movement(_undropped)


# -- linear maps of each sample -----------------------------------------------------------------------------------------


def by_unit_vectors(call: Call, x: NormedTensor) -> tuple[Dense, tuple[int, ...]] | None:
    """The matrix of an operation that acts on each sample of a batch, all but x fixed, and the shape of a sample of the result."""
    spread = spread_of(x)
    if spread is None or [id(t) for t in flat_tensors((call.args, call.kwargs)) if not is_fixed(t)] != [id(x)]:
        return None
    features, size = x.shape[x.ndim - spread.ndim :], spread.parts[0].size
    units = torch.eye(size, dtype=torch.float64).reshape(size, *features)

    def run(t: torch.Tensor) -> torch.Tensor:
        def given(a: torch.Tensor) -> torch.Tensor:
            return t if a is x else values(a) if a.is_floating_point() else a

        return call.run(*map_tensors(given, (call.args, call.kwargs)))

    out = run(units) - run(torch.zeros_like(units[:1]))
    matrix = out.reshape(size, -1).T
    # an operation that was told another dtype has rounded the matrix to it
    if not 0 < len(matrix) <= LARGEST or matrix.dtype is not torch.float64 or not matrix.isfinite().all():
        return None
    return Dense(matrix), tuple(out.shape[1:])


def _of_samples(call: Call, x: Any, *, has_batch: bool = False) -> Found:
    """The operation is linear in x, row by row; with `has_batch` only if x is one batch of samples."""
    if not moves(x) or not (spread := spread_of(x)) or not spread.ndim or has_batch and x.ndim != spread.ndim + 1:
        return None
    found = by_unit_vectors(call, x)
    if found is None:
        return None
    matrix, shape = found
    (y,) = call.results
    if tuple(y.shape) != (*x.shape[: x.ndim - spread.ndim], *shape):
        return None
    return [Made(len(shape), (Term(x, matrix),))]


@normed_op(F.linear).register_movement
def linear(call: Call) -> Found:
    """x W^T, W as it is."""
    x, weight = call.given["input"], call.given["weight"]
    if weight.ndim != 2:
        return None
    spread = spread_of(x) if moves(x) else None
    others_are_fixed = is_fixed(weight) and is_fixed(call.given.get("bias"))
    if spread is None or not others_are_fixed:
        return _of_samples(call, x)
    return _by_matrix(x, spread, values(weight))


def _by_matrix(x: NormedTensor, spread: Spread, weight: torch.Tensor) -> Found:
    """``x W^T`` of the last dimension of x, whatever others its features have."""
    count = spread.parts[0].size // x.shape[-1] if spread.ndim and x.shape[-1] else 0
    if not 0 < count * len(weight) <= LARGEST:
        return None
    matrix = Dense(weight) if count == 1 else Repeated(weight, count)
    return [Made(spread.ndim, (Term(x, matrix),))] if math.isfinite(matrix.scale) else None


def matmul(call: Call) -> Found:
    """x W row by row, or W x, which sums rows; of samples whose features are matrices both are exact."""
    x = call.given.get("input")
    other = next((call.given[name] for name in ("other", "mat2", "vec") if name in call.given), None)
    if x is None or other is None:
        return None
    if moves(x) and is_within() and (by_scores := movements_of_attention.by_weights(call, x, other)) is not None:
        return by_scores
    if moves(x) and moves(other):
        return movements_nearby.bilinear(call, x, other)
    moving, fixed = (x, other) if moves(x) else (other, x)
    spread = spread_of(moving) if moves(moving) and is_fixed(fixed) else None
    if spread is None or min(moving.ndim, fixed.ndim) < 1:
        return None
    if moving is x and fixed.ndim == 2:
        return _by_matrix(x, spread, values(fixed).mT)
    if moving is other and other.ndim == 1 and x.ndim == 2:
        return _by_matrix(other, spread, values(x))
    call = Call((x, other), {}, call.given, call.results, torch.matmul)  # `mm` and `bmm` have no samples of matrices
    is_for_each = _is_for_each(fixed, spread) and (moving is x or spread.ndim > 1)  # it adds up rows, and no samples
    if is_for_each and (by_sample := _of_samples(call, moving)) is not None:
        return by_sample
    if min(x.ndim, other.ndim) < 2:
        return None
    return (
        _by_one_matrix(call, x, values(other))
        if moving is x
        else _summing_rows(call, other, values(x).abs().sum(-1).max().item())
    )


def _is_for_each(fixed: torch.Tensor, spread: Spread) -> bool:
    """Whether a tensor that is broadcast has nothing for one sample that it has not for all."""
    return fixed.ndim <= spread.ndim or (fixed.ndim == spread.ndim + 1 and fixed.shape[0] == 1)


def _by_one_matrix(call: Call, x: NormedTensor, matrices: torch.Tensor) -> Found:
    """x W row by row, W the same for all that there are matrices for."""
    (y,), one = call.results, matrices.flatten(0, -3)[:1]
    spread = spread_of(x)
    if spread is None or spread.ndim != 1 or x.shape[:-1] != y.shape[:-1] or not len(one) or (matrices != one).any():
        return None
    matrix = Dense(one[0].mT)
    return [Made(1, (Term(x, matrix),))] if math.isfinite(matrix.scale) and 0 < matrix.size <= LARGEST else None


def _summing_rows(call: Call, x: NormedTensor, factor: float) -> Found:
    """Rows that are sums of rows of x, with absolute weights that add up to `factor` at most.

    A norm over several rows knows more of them together.
    """
    (y,), spread = call.results, spread_of(x)
    if spread is None or spread.ndim != 1 or not set(y.elem_dims) <= {-1} or not math.isfinite(factor):
        return None
    return [Made(1, (Term(x, None, False, factor),))]


normed_op(torch.matmul).register_movement(matmul)
normed_op(torch.mm).register_movement(matmul)
normed_op(torch.bmm).register_movement(matmul)
normed_op(torch.mv).register_movement(matmul)


def addmm(call: Call) -> Found:
    """c + x W, c and W as they are."""
    return _of_samples(call, call.given.get("mat1"), has_batch=True)


def _of_batch(call: Call) -> Found:
    return _of_samples(call, call.given.get("input"), has_batch=True)


def _convolved(call: Call) -> Found:
    x, weight = call.given.get("input"), call.given["weight"]
    is_image = moves(x) and (spread := spread_of(x)) is not None and spread.ndim == weight.ndim - 1
    return _of_batch(call) if is_image else None


for _op in (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d):
    normed_op(_op).register_movement(_convolved)
for _op in (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.interpolate):
    normed_op(_op).register_movement(_of_batch)


@normed_op(F.batch_norm).register_movement
def batch_norm(call: Call) -> Found:
    """By given statistics: a multiple of each channel."""
    return None if call.given.get("training") else _of_batch(call)


def _reduced(call: Call, is_mean: bool) -> Found:
    """Sums and means over features, or over rows."""
    x, dims = call.given.get("input"), call.given.get("dim")
    if not moves(x) or (spread := spread_of(x)) is None or dims is None:
        return None
    dims = {d - x.ndim if d >= 0 else d for d in ((dims,) if isinstance(dims, int) else dims)}
    if dims and all(d >= -spread.ndim for d in dims):
        return _by_negative_dims(call, x, tuple(sorted(dims)))
    if any(d >= -spread.ndim for d in dims) or not dims:
        return None
    factor = 1.0 if is_mean else float(math.prod(x.shape[d] for d in dims))
    return [Made(spread.ndim, (Term(x, None, False, factor),))]


def _by_negative_dims(call: Call, x: NormedTensor, dims: tuple[int, ...]) -> Found:
    """The same with dimensions counted from the end, so that they are those of a sample too."""
    # and in double precision whatever dtype the result has: ATen's sums state the one that they have anyway
    rest = {k: v for k, v in call.kwargs.items() if k not in ("dim", "axis", "input", "dtype")}
    if len(call.args) > 2:
        rest["keepdim"] = call.args[2]
    return _of_samples(Call((x, dims), rest, call.given, call.results, call.body), x)


@normed_op(torch.cumsum).register_movement
def cumsum(call: Call) -> Found:
    """Sums of the first entries along a dimension of the features, or of the first rows."""
    x, dim = call.given.get("input"), call.given.get("dim")
    if not moves(x) or not x.ndim or not isinstance(dim, int) or (spread := spread_of(x)) is None:
        return None
    dim = dim - x.ndim if dim >= 0 else dim
    if dim >= -spread.ndim:  # counted from the end it is that of a sample too, and of any dtype in double precision
        return _of_samples(Call((x, dim), {}, call.given, call.results, call.body), x)
    return [Made(spread.ndim, (Term(x, None, False, float(x.shape[dim])),))]


normed_op(torch.mean).register_movement(lambda call: _reduced(call, True))
normed_op(torch.sum).register_movement(lambda call: _reduced(call, False))


# -- sums and multiples -------------------------------------------------------------------------------------------------


def _summed(of: Callable[[float], tuple[float, float]]) -> Callable[[Call], Found]:
    """``a input + b other``, a and b from alpha."""

    def rule(call: Call) -> Found:
        (y,) = call.results
        by_input, by_other = of(float(call.given.get("alpha", 1)))
        pairs = ((call.given.get("input"), by_input), (call.given.get("other"), by_other))
        moving = [(x, factor) for x, factor in pairs if moves(x)]
        spreads = [spread_of(x) for x, _ in moving]
        whole = [s.ndim for (x, _), s in zip(moving, spreads, strict=True) if s is not None and x.shape == y.shape]
        if not whole or None in spreads:
            return None
        terms = [_placed(x, factor, y, whole[0]) for x, factor in moving]
        return None if None in terms else [Made(whole[0], tuple(t for t in terms if t is not None))]

    return rule


def _placed(x: NormedTensor, factor: float, y: NormedTensor, ndim: int) -> Term | None:
    """x times a number as it is added to others to make y, broadcast."""
    size = math.prod(y.shape[y.ndim - ndim :])
    spread = spread_of(x)
    if x.shape == y.shape and spread is not None and spread.ndim == ndim:
        return Term(x, None if factor == 1 else Scaled(torch.tensor([factor], dtype=torch.float64), size))
    numbers = torch.arange(x.numel()).reshape(x.shape).expand(y.shape).reshape(-1, size)
    term = _picked(x, numbers)
    if term is None or factor == 1:
        return term
    assert not isinstance(term.how, Slopes), "entries are picked"
    return Term(x, Multiple(term.how, factor, size), term.keeps_rows)


def chosen(a: Any, b: Any, y: NormedTensor, condition: torch.Tensor) -> Found:
    """``b + D (a - b)``, each entry of D from 0 to 1, of two that move or are fixed; D as it is where one of them is a number that the other is not near.

    Where they do not meet, a condition that turns out another way is a jump, which is in no bound.
    """
    moving = [x for x in (a, b) if moves(x)]
    spreads = [spread_of(x) for x in moving]
    whole = [s.ndim for x, s in zip(moving, spreads, strict=True) if s is not None and x.shape == y.shape]
    if not whole or None in spreads:
        return None
    ndim, size = whole[0], math.prod(y.shape[y.ndim - whole[0] :])
    apart, own = ([_placed(x, f, y, ndim) for x, f in pairs if moves(x)] for pairs in (((a, 1.0), (b, -1.0)), ((b, 1.0),)))
    if any(t is None or not t.keeps_rows for t in (*apart, *own)):
        return None
    slopes = _shares(a, b, y, ndim, condition)
    if torch.equal(slopes.low, slopes.high) and len(moving) == 1 and moving[0].shape == y.shape:
        factors = slopes.low if moving[0] is a else 1 - slopes.low
        return [Made(ndim, (Term(moving[0], Scaled(factors, size)),))]
    bent = [Vertex(v.root, size, terms=((v, None),), slopes=slopes) for v in parts_of([t for t in apart if t is not None], size)]
    by_root: dict[Root, list[Vertex]] = {}
    for v in (*parts_of([t for t in own if t is not None], size), *bent):
        by_root.setdefault(v.root, []).append(v)
    parts = [vs[0] if len(vs) == 1 else Vertex(root, size, terms=tuple((v, None) for v in vs)) for root, vs in by_root.items()]
    return [Made(ndim, (), parts=tuple(parts), of=tuple(moving))]


def _shares(a: Any, b: Any, y: NormedTensor, ndim: int, condition: torch.Tensor) -> Slopes:
    """D of each feature: between 0 and 1 for other inputs, and near the data where a and b may be the same number or rows have other conditions."""
    size = math.prod(y.shape[y.ndim - ndim :])
    rows = condition.to(device="cpu", dtype=torch.float64).expand(y.shape).reshape(-1, size)
    if not is_within() or a is b or not len(rows):
        return between(0.0, 1.0, size)
    (low, high), (other_low, other_high) = (_stays_between(t, y.shape, size) for t in (a, b))
    are_apart = (low > other_high) | (high < other_low)
    return Slopes(torch.where(are_apart, rows.amin(0), 0.0), torch.where(are_apart, rows.amax(0), 1.0))


def _stays_between(t: Any, shape: Sequence[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Between which numbers each feature of t stays near the data, broadcast."""
    if not isinstance(t, NormedTensor):
        rows = values(torch.as_tensor(t, dtype=torch.float64)).expand(shape).reshape(-1, size)
        return rows.amin(0), rows.amax(0)
    rows, spread = values(t.backing.detach()).expand(shape).reshape(-1, size), spread_of(t)
    assert spread is not None, "`chosen` has looked"
    furthest = sum(v.ellipsoid.entry.item() * v.root.size.item() for v in spread.parts) * (1 + 1e-9) + rounded_by(t)
    return rows.amin(0) - furthest, rows.amax(0) + furthest


normed_op(torch.add).register_movement(_summed(lambda alpha: (1.0, alpha)))
normed_op(torch.sub).register_movement(_summed(lambda alpha: (1.0, -alpha)))
normed_op(torch.rsub).register_movement(_summed(lambda alpha: (-alpha, 1.0)))
