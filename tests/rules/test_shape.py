"""Shapes, indices, joins, masks, casts and patches: norms against adversarial inputs, dims against torch's own shapes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import L1Tensor, L2Tensor, LinfTensor, NormedTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor, norm_mode
from thunder_norm.audit import Ball, Case, norm, start
from thunder_norm.errors import MissingNormRuleError, NormMismatchError, UnsupportedOpError
from thunder_norm.transforms import NormTransform
import thunder

R, INF, L1, L2, OP, CONV = RMSTensor, LinfTensor, L1Tensor, L2Tensor, RMSToRMSTensor, RMSToRMSConvTensor
D = torch.float64


def x(*shape, n=1.0, dims=None, kind=R, name="x"):
    return Ball(name, kind, shape, n, dims)


def y(*shape, n=0.6, dims=None, kind=R):
    return Ball("y", kind, shape, n, dims)


picks = torch.tensor([2, 0, 2])
mask = torch.tensor([[True, False, True, True], [False, False, True, False]])
own_picks = torch.tensor([[[0, 1, 2, 0], [2, 2, 1, 0]], [[1, 0, 0, 2], [0, 0, 0, 0]]])

RESHAPES = [
    Case("split heads", lambda t: t.view(2, 3, 2, 4), (x(2, 3, 8),)),
    Case("merge heads", lambda t: t.reshape(2, 3, -1), (x(2, 3, 2, 4),)),
    Case("flatten everything", lambda t: t.flatten(), (x(2, 3, 4),)),
    Case("flatten a part", lambda t: t.flatten(1), (x(2, 3, 4, dims=(-2,)),)),
    Case("unflatten", lambda t: t.unflatten(1, (2, -1)), (x(2, 4, 3, dims=(-2,)),)),
    Case("mixed groups", lambda t: t.view(2, 3, 8), (x(2, 6, 4),)),
    Case("l1, whole", lambda t: t.view(3, 2, 2), (x(3, 4, kind=L1),)),
    Case("l1, merged", lambda t: t.view(12), (x(3, 4, kind=L1),)),
    Case("l2, mixed", lambda t: t.view(2, 6), (x(3, 4, kind=L2),)),
    Case("view_as", lambda t: t.view_as(torch.ones(4, 3)), (x(3, 4, kind=INF),)),
    Case("ravel", torch.ravel, (x(3, 4, dims=(-2, -1)),)),
    Case("rows of an operator", lambda t: t.view(2, 3, 4), (x(6, 4, kind=OP),)),
    Case("columns of an operator", lambda t: t.view(4, 2, 3), (x(4, 6, kind=OP),)),
    Case("three parts, heads", lambda t: t.view(3, 2, 2, 3), (x(12, 3, kind=OP),)),
    Case("merged rows", lambda t: t.view(6, 4), (x(2, 3, 4, kind=OP),)),
    Case("merged columns", lambda t: t.reshape(4, 6), (x(4, 2, 3, kind=OP, dims=(0, 2)),)),
    Case("an operator's entries", lambda t: t.flatten(), (x(3, 4, kind=OP),)),
    Case("an operator's entries, mixed", lambda t: t.view(2, 6), (x(3, 4, kind=OP),), 0.8),
    Case("a kernel's patches", lambda t: t.flatten(1), (x(3, 2, 4, kind=CONV),)),
]  # fmt: skip

PERMUTATIONS = [
    Case("permute", lambda t: t.permute(2, 0, 1), (x(2, 3, 4),)),
    Case("transpose", lambda t: t.transpose(-1, 1), (x(2, 3, 4, dims=(-2,)),)),
    Case("transposed operator", lambda t: t.t(), (x(3, 5, kind=OP),)),
    Case("operator with heads", lambda t: t.movedim(0, -1), (x(2, 3, 4, kind=OP),)),
    Case("transposed kernel", lambda t: t.transpose(0, 1), (x(3, 2, 4, kind=CONV),)),
    Case("T", lambda t: t.T, (x(3, 4),)),
    Case("mT", lambda t: t.mT, (x(2, 3, 4),)),
    Case("swapaxes", lambda t: t.swapaxes(0, 1), (x(3, 4, kind=L1),)),
    Case("movedim of two", lambda t: torch.movedim(t, (0, 2), (2, 1)), (x(2, 3, 4),)),
    Case("flip", lambda t: t.flip(-1), (x(3, 4),)),
    Case("roll", lambda t: t.roll(1, 0), (x(3, 4, kind=L1),)),
    Case("roll everything", lambda t: t.roll(1), (x(3, 4),)),
    Case("rot90", lambda t: torch.rot90(t, 1, (0, 1)), (x(3, 4),)),
    Case("unsqueeze", lambda t: t.unsqueeze(-1), (x(3, 4),)),
    Case("unsqueezed operator", lambda t: t.t().unsqueeze(1), (x(3, 4, kind=OP),)),
    Case("squeeze", lambda t: t.squeeze(), (x(3, 1, 4, dims=(-3, -2)),)),
    Case("squeeze one", lambda t: t.squeeze(1), (x(1, 1, 4),)),
    Case("squeezed operator", lambda t: t.squeeze(0), (x(1, 4, kind=OP),)),
    Case("expand", lambda t: t.expand(5, 3, -1), (x(3, 4),)),
    Case("expand elem_dims", lambda t: t.expand(3, 4), (x(3, 1),)),
    Case("expand l1", lambda t: t.expand(3, 4), (x(3, 1, kind=L1),)),
    Case("expand an operator", lambda t: t.expand(3, 4), (x(1, 4, kind=OP),)),
    Case("expand_as", lambda t: t.expand_as(torch.ones(2, 3, 4)), (x(3, 1),)),
    Case("broadcast_to", lambda t: torch.broadcast_to(t, (2, 3, 4)), (x(3, 4),)),
    Case("repeat", lambda t: t.repeat(2, 1, 2), (x(3, 4),)),
    Case("repeat l1", lambda t: t.repeat(2, 3), (x(3, 4, kind=L1),)),
    Case("repeat l2", lambda t: t.repeat(2, 3), (x(3, 4, kind=L2),)),
    Case("repeat rows", lambda t: t.repeat(2, 1), (x(3, 4, kind=OP),)),
    Case("repeat columns", lambda t: t.repeat(1, 2), (x(3, 4, kind=OP),)),
    Case("repeat a kernel", lambda t: t.repeat(2, 3, 2), (x(2, 2, 3, kind=CONV),)),
    Case("tile", lambda t: t.tile(2), (x(3, 4, dims=(-2,)),)),
    Case("repeat_interleave", lambda t: t.repeat_interleave(2, -1), (x(3, 4),)),
    Case("repeat_interleave by counts", lambda t: t.repeat_interleave(picks + 1, 0), (x(3, 4),)),
]  # fmt: skip

PARTS = [
    Case("slice", lambda t: t[..., 1:3], (x(3, 4),)),
    Case("slice of other dims", lambda t: t[1:], (x(3, 4),)),
    Case("strided slice", lambda t: t[:, ::3], (x(3, 7),)),
    Case("slice l1", lambda t: t[:, 1:], (x(3, 4, kind=L1),)),
    Case("slice rows", lambda t: t[1:], (x(3, 4, kind=OP),)),
    Case("slice columns", lambda t: t[:, 1:], (x(3, 4, kind=OP),)),
    Case("slice taps", lambda t: t[..., 1:], (x(3, 2, 4, kind=CONV),)),
    Case("slice input channels", lambda t: t[:, :2], (x(3, 4, 2, kind=CONV),)),
    Case("select", lambda t: t[:, 1], (x(3, 4),)),
    Case("select of other dims", lambda t: t.select(1, 0), (x(2, 3, 4),)),
    Case("select l1", lambda t: t[1], (x(3, 4, kind=L1),)),
    Case("select a row", lambda t: t[1], (x(3, 4, kind=OP),)),
    Case("select a column", lambda t: t[:, 1], (x(3, 4, kind=OP),)),
    Case("select an entry", lambda t: t[1, 2], (x(3, 4, kind=OP),)),
    Case("select a head", lambda t: t[1], (x(2, 3, 4, kind=OP),)),
    Case("select a tap", lambda t: t[..., 0], (x(3, 2, 4, kind=CONV),)),
    Case("narrow", lambda t: t.narrow(-1, 1, 2), (x(3, 4),)),
    Case("split", lambda t: t.split(2, -1)[1], (x(3, 6),)),
    Case("split sizes", lambda t: torch.split(t, [1, 5], dim=-1)[0], (x(3, 6),)),
    Case("chunk", lambda t: t.chunk(4, -1)[0], (x(3, 6),)),
    Case("chunked operator", lambda t: t.chunk(3)[2], (x(6, 4, kind=OP),)),
    Case("tensor_split", lambda t: t.tensor_split(4, -1)[0], (x(3, 6),)),
    Case("tensor_split at", lambda t: t.tensor_split((1, 4), -1)[1], (x(3, 6),)),
    Case("unbind", lambda t: t.unbind(-1)[1], (x(3, 4),)),
    Case("iterate", lambda t: list(t)[1], (x(3, 4),)),
    Case("mask", lambda t: t[mask], (x(2, 4),)),
    Case("mask of other dims", lambda t: t[:, mask], (x(2, 2, 4, 3),)),
    Case("indices", lambda t: t[picks], (x(3, 4),)),
    Case("indices along elem_dims", lambda t: t[:, picks], (x(2, 3),)),
    Case("two indices", lambda t: t[picks[:2], :, torch.tensor([[1], [0]])], (x(3, 2, 4),)),
    Case("two indices apart", lambda t: t[0, :, picks], (x(2, 5, 3, dims=(-2,)),)),
    Case("index a list", lambda t: t[[0, 1], ..., None], (x(3, 4),)),
    Case("index a row of an operator", lambda t: t[picks], (x(3, 4, kind=OP),)),
    Case("aten index", lambda t: torch.ops.aten.index(t, [None, picks]), (x(2, 3, 4),)),
    Case("index_select", lambda t: t.index_select(-1, picks), (x(2, 3),)),
    Case("index_select, each once", lambda t: t.index_select(-1, torch.tensor([3, 1])), (x(2, 4),)),
    Case("index_select of other dims", lambda t: t.index_select(0, picks), (x(3, 4),)),
    Case("index_select l1", lambda t: t.index_select(1, picks), (x(2, 3, kind=L1),)),
    Case("gather", lambda t: t.gather(1, own_picks), (x(2, 3, 4),)),
    Case("gather along elem_dims", lambda t: t.gather(-1, torch.tensor([[1, 1], [0, 3], [2, 0]])), (x(3, 4),)),
    Case("gather fewer", lambda t: t.gather(1, own_picks[..., :2]), (x(2, 3, 4),), 0.9),
    Case("gather from one entry", lambda t: t.gather(0, torch.tensor([0])), (x(),)),
    Case("take_along_dim", lambda t: torch.take_along_dim(t, torch.tensor([[1], [0], [3]]), -1), (x(3, 4),)),
    Case("take", lambda t: t.take(picks), (x(3, 4),)),
    Case("masked_select", lambda t: t.masked_select(mask), (x(2, 4),)),
    Case("diagonal", lambda t: t.diagonal(0, -2, -1), (x(2, 3, 4),)),
    Case("diagonal of other dims", lambda t: t.diagonal(0, 0, 1), (x(2, 3, 4),)),
]  # fmt: skip

JOINS = [
    Case("cat", lambda a, b: torch.cat([a, b]), (x(3, 4), y(2, 4))),
    Case("cat along elem_dims", lambda a, b: torch.cat([a, b], -1), (x(3, 4), y(3, 2))),
    Case("cat, largest entries", lambda a, b: torch.cat([a, b], -1), (x(3, 4, kind=INF), y(3, 2))),
    Case("cat different dims", lambda a, b: torch.cat([a, b], -1), (x(3, 4), y(3, 2, dims=(-2,))), 0.5),
    Case("cat of single entries", lambda a, b: torch.cat([a, b], -1), (x(3, 1), y(3, 1))),
    Case("cat l1", lambda a, b: torch.cat([a, b], -1), (x(3, 4, kind=L1), y(3, 2, kind=L1))),
    Case("cat l1 of other dims", lambda a, b: torch.cat([a, b], 0), (x(3, 4, kind=L1), y(3, 4, kind=L1))),
    Case("cat l2", lambda a, b: torch.cat([a, b], -1), (x(3, 4, kind=L2), y(3, 2, kind=L2))),
    Case("cat rows", lambda a, b: torch.cat([a, b], 0), (x(3, 4, kind=OP), y(2, 4, kind=OP))),
    Case("cat columns", lambda a, b: torch.cat([a, b], 1), (x(3, 4, kind=OP), y(3, 2, kind=OP))),
    Case("cat heads", lambda a, b: torch.cat([a, b], 0), (x(1, 3, 4, kind=OP), y(2, 3, 4, kind=OP))),
    Case("cat plain", lambda a: torch.cat([a, torch.ones(3, 2, dtype=D)], -1), (x(3, 4),)),
    Case("cat the empty", lambda a: torch.cat([torch.zeros(0, dtype=D), a], -1), (x(3, 4),)),
    Case("stack", lambda a, b: torch.stack([a, b], 1), (x(3, 4), y(3, 4))),
    Case("stack last", lambda a, b: torch.stack([a, b], -1), (x(3, 4), y(3, 4))),
    Case("stack operators", lambda a, b: torch.stack([a, b], 1), (x(3, 4, kind=OP), y(3, 4, kind=OP))),
    Case("stack l1", lambda a, b: torch.stack([a, b], 1), (x(3, 4, kind=L1), y(3, 4, kind=L1))),
    Case("hstack", lambda a, b: torch.hstack([a, b]), (x(3, 4), y(3, 4))),
    Case("pad", lambda a: F.pad(a, (1, 2)), (x(3, 4),)),
    Case("pad other dims", lambda a: F.pad(a, (0, 0, 1, 2)), (x(3, 4),)),
    Case("pad a value", lambda a: F.pad(a, (1, 2), value=-0.7), (x(3, 4),)),
    Case("pad a large value around", lambda a: F.pad(a, (1, 2, 0, 1), value=1.7), (x(3, 4),)),
    Case("crop", lambda a: F.pad(a, (-1, 2)), (x(3, 4),)),
    Case("pad reflect", lambda a: F.pad(a, (2, 1), mode="reflect"), (x(3, 4),)),
    Case("pad replicate", lambda a: F.pad(a, (2, 1), mode="replicate"), (x(3, 4),)),
    Case("pad circular", lambda a: F.pad(a, (2, 1), mode="circular"), (x(1, 3, 4),)),
    Case("pad circular over other dims", lambda a: F.pad(a, (2, 1), mode="circular"), (x(1, 3, 4, dims=(-2,)),)),
    Case("pad replicate and crop", lambda a: F.pad(a, (-4, 5), mode="replicate"), (x(3, 4),)),
    Case("pad circular and crop", lambda a: F.pad(a, (-2, 3), mode="circular"), (x(1, 3, 5),)),
    Case("pad l1", lambda a: F.pad(a, (1, 2)), (x(3, 4, kind=L1),)),
    Case("pad l1 by a value", lambda a: F.pad(a, (1, 0), value=0.7), (x(3, 4, kind=L1),), 0.9),
    Case("crop l1", lambda a: F.pad(a, (-1, 2)), (x(3, 4, kind=L1),)),
    Case("pad l2 circular", lambda a: F.pad(a, (2, 1), mode="circular"), (x(1, 3, 4, kind=L2),)),
    Case("crop an operator", lambda a: F.pad(a, (-1, 0)), (x(3, 4, kind=OP),), 0.5),
    Case("pad an operator", lambda a: F.pad(a, (1, 2, 0, 1)), (x(3, 4, kind=OP),)),
    Case("pad a kernel", lambda a: F.pad(a, (1, 1, 0, 2)), (x(3, 2, 4, kind=CONV),)),
    Case("tril", torch.tril, (x(3, 4),)),
    Case("triu l1", lambda a: a.triu(1), (x(3, 4, kind=L1),)),
    Case("tril of an operator", torch.tril, (x(3, 4, kind=OP),), 0.8),
    Case("masked_fill", lambda a: a.masked_fill(mask, -0.7), (x(2, 4),), 0.9),
    Case("masked_fill, largest entry", lambda a: a.masked_fill(mask, 3.0), (x(2, 4, kind=INF),)),
    Case("masked_fill rows", lambda a: a.masked_fill(mask[:, 1:2], 0.7), (x(2, 4),), 0.99),
    Case("masked_fill by a tensor", lambda a: a.masked_fill(mask, torch.tensor(0.5, dtype=D)), (x(2, 4),), 0.9),
    Case("masked_fill, l1", lambda a: a.masked_fill(mask, -0.7), (x(2, 4, kind=L1),), 0.7),
    Case("masked_fill rows, l2", lambda a: a.masked_fill(mask[:, :1], 0.3), (x(2, 4, kind=L2),)),
    Case("masked_fill zero, l1", lambda a: a.masked_fill(mask, 0), (x(2, 4, kind=L1),)),
]  # fmt: skip

COPIES = [
    Case("clone", torch.clone, (x(3, 4, kind=OP),)),
    Case("contiguous", lambda t: t.t().contiguous(), (x(3, 4),)),
    Case("dropout in eval", lambda t: F.dropout(t, 0.5, False), (x(3, 4),)),
    Case("alpha_dropout in eval", lambda t: F.alpha_dropout(t, 0.5, False), (x(3, 4),)),
    Case("channel_shuffle", lambda t: torch.channel_shuffle(t, 2), (x(1, 4, 2, dims=(-2,)),)),
    Case("windows", lambda t: t.unfold(-1, 3, 1), (x(2, 6),)),
    Case("windows of other dims", lambda t: t.unfold(1, 2, 1), (x(2, 5, 3),)),
    Case("patches", lambda t: F.unfold(t, 2), (x(2, 3, 3, 3, dims=(-3,)),)),
    Case("patches, padded", lambda t: F.unfold(t, (2, 1), padding=1, stride=2), (x(2, 3, 3, 3, dims=(-3,)),), 0.7),
    Case("patches of an image", lambda t: F.unfold(t, 2), (x(1, 2, 3, 3, dims=(-3, -2, -1)),)),
    Case("pixel_shuffle", lambda t: F.pixel_shuffle(t, 2), (x(1, 8, 2, 2, dims=(-3,)),)),
    Case("pixel_shuffle, one position dim", lambda t: F.pixel_shuffle(t, 2), (x(1, 8, 2, 2, dims=(-3, -2)),)),
    Case("pixel_shuffle, image", lambda t: F.pixel_shuffle(t, 2), (x(1, 8, 2, 2, dims=(-3, -2, -1)),)),
    Case("pixel_shuffle, positions", lambda t: F.pixel_shuffle(t, 2), (x(1, 8, 2, 2, dims=(-2,)),)),
    Case("pixel_unshuffle", lambda t: F.pixel_unshuffle(t, 2), (x(1, 2, 4, 2, dims=(-3,)),)),
    Case("pixel_unshuffle, image", lambda t: F.pixel_unshuffle(t, 2), (x(1, 2, 4, 2, dims=(-3, -2, -1)),)),
    Case("pixel_unshuffle, rows", lambda t: F.pixel_unshuffle(t, 2), (x(1, 2, 4, 2, dims=(-2,)),)),
]  # fmt: skip

COPIES_OF_VIEWS = [
    Case("view_copy", lambda t: torch.view_copy(t, (12,)), (x(3, 4),)),
    Case("permute_copy", lambda t: torch.permute_copy(t, (2, 0, 1)), (x(2, 3, 4),)),
    Case("transpose_copy", lambda t: torch.transpose_copy(t, 0, 1), (x(3, 4, kind=OP),)),
    Case("t_copy", lambda t: torch.t_copy(t), (x(3, 4),)),
    Case("expand_copy", lambda t: torch.expand_copy(t, (2, -1, 4)), (x(3, 4),)),
    Case("squeeze_copy", lambda t: torch.squeeze_copy(t), (x(3, 1, 4),)),
    Case("squeeze_copy of one", lambda t: torch.squeeze_copy(t, 1), (x(3, 1, 4, dims=(0, 2)),)),
    Case("unsqueeze_copy", lambda t: torch.unsqueeze_copy(t, 1), (x(3, 4),)),
    Case("select_copy", lambda t: torch.select_copy(t, 1, 0), (x(3, 4),)),
    Case("slice_copy", lambda t: torch.slice_copy(t, 1, 0, 2), (x(3, 4),)),
    Case("unbind_copy", lambda t: torch.unbind_copy(t, 1)[2], (x(3, 4),)),
    Case("split_copy", lambda t: torch.split_copy(t, 2, 1)[0], (x(3, 4),)),
    Case("split_with_sizes_copy", lambda t: torch.split_with_sizes_copy(t, [1, 3], 1)[1], (x(3, 4),)),
    Case("diagonal_copy", lambda t: torch.diagonal_copy(t), (x(3, 4),)),
]  # fmt: skip

CASES = [*RESHAPES, *PERMUTATIONS, *PARTS, *JOINS, *COPIES, *COPIES_OF_VIEWS]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_claims_are_differentiable_at_zero(case):
    case.check_at(0.0, seeded())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_real_values_and_shapes_are_those_of_torch(case):
    generator = torch.Generator().manual_seed(seeded(0))
    points = [start(b, 0, generator) for b in case.balls]
    normed = case.call(*[b.normed(p) for b, p in zip(case.balls, points, strict=True)])
    expected = case.call(*points)
    assert torch.equal(normed.backing, expected)
    assert normed.shape == expected.shape


# -- any index, any shape -------------------------------------------------------------------------------------------------------

mask_2d = torch.eye(3, dtype=torch.bool)
INDICES = [
    (0,), (slice(1, None),), (None, 0), (Ellipsis, 0), (slice(None), None, 1), (picks,), (slice(None), picks), (picks, picks),
    (Ellipsis, picks), (picks, slice(None), picks), (0, Ellipsis, picks), (torch.tensor(1), picks), (None, picks, None),
    (picks[:, None], picks), (slice(None), picks[:, None], picks), ([1, 0],), (True,), (mask_2d,),
    (0, slice(None), mask_2d[0]), (mask_2d[0], Ellipsis, 1), (slice(None, None, 2), Ellipsis, slice(0, 1)), (Ellipsis, None),
    (picks, 1), (1, picks, 0), (slice(None), 1, picks),
]  # fmt: skip


@pytest.mark.parametrize("kind", [R, L1], ids=lambda k: k.__name__)
@pytest.mark.parametrize("index", INDICES, ids=range(len(INDICES)))
def test_any_index_is_sound(index, kind):
    index = index[0] if len(index) == 1 else index
    generator = torch.Generator().manual_seed(seeded(0))
    for size in (0, 1, 2, 3):
        for dims in itertools.combinations((-3, -2, -1), size):
            ball = x(3, 3, 3, dims=dims, kind=kind)
            for sort in (0, 2, 3, 2, 2):
                t = start(ball, sort, generator)
                out = ball.normed(t)[index]
                assert torch.equal(out.backing, t[index])
                assert norm(type(out), out.backing, out.elem_dims) <= out.norm_size * (1 + 1e-9)


SHAPES = [(12,), (3, 4), (4, 3), (2, 6), (2, 2, 3), (3, 2, 2), (1, 12), (3, 1, 4), (2, 3, 2, 1)]


@pytest.mark.parametrize("kind", [R, L1, L2, OP], ids=lambda k: k.__name__)
@pytest.mark.parametrize("old", SHAPES, ids=str)
def test_any_reshape_is_sound(old, kind):
    generator = torch.Generator().manual_seed(seeded(0))
    sizes = (2,) if kind is OP else (0, 1, 2)
    for new, dims in itertools.product(SHAPES, [d for k in sizes for d in itertools.permutations(range(-len(old), 0), k)]):
        ball = x(*old, dims=dims, kind=kind)
        for sort in (0, 2, 3, 1):
            out = ball.normed(start(ball, sort, generator)).reshape(new)
            assert norm(type(out), out.backing, out.elem_dims) <= out.norm_size * (1 + 1e-9), (new, dims)


# -- what is not searched -----------------------------------------------------------------------------------------------------


def test_split_has_as_many_pieces_as_torch():
    t = torch.randn(3, 7)
    for f in (lambda a: a.split(3, 1), lambda a: a.chunk(4, 1), lambda a: a.tensor_split(5, 1), lambda a: a.unbind(1)):
        pieces = f(R.of(t))
        assert all(isinstance(p, NormedTensor) for p in pieces)
        assert [p.shape for p in pieces] == [p.shape for p in f(t)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_is_within_the_claim(dtype):
    generator = torch.Generator().manual_seed(seeded(0))
    worst = 0.0
    for kind in (R, INF, L1, OP):
        ball = x(40, 50, kind=kind)
        for sort in range(8):
            out = ball.normed(start(ball, sort, generator)).to(dtype)
            size = norm(kind, out.backing.double(), out.elem_dims)
            assert size <= out.norm_size
            worst = max(worst, size.item())
    assert worst > 1


def test_casts():
    a = R(1.0, backing=torch.ones(3, 4), perturbation_size=1.0)
    assert a.double().norm_size.item() == a.to(torch.float32).norm_size.item() == a.to("cpu").norm_size.item() == 1.0
    half = torch.ones(1).half()
    for f in (lambda t: t.half(), lambda t: t.to(half), lambda t: t.type_as(half), lambda t: t.type(torch.float16),
              lambda t: t.to("cpu", torch.float16), lambda t: t.to(dtype=torch.float16)):  # fmt: skip
        assert f(a).dtype is torch.float16
        assert f(a).norm_size.item() == 1 + 2**-11
        assert f(a).perturbation_size.item() == 1.0
    assert a.to(R(1.0, backing=torch.ones(1).half(), perturbation_size=9.0)).perturbation_size.item() == 1.0
    with pytest.raises(NormMismatchError, match="int64"):
        a.to(torch.int64)


@pytest.mark.parametrize("f", [F.dropout, F.dropout1d, lambda t, *a: torch.native_dropout(t, *a)[0], torch.dropout])
def test_dropout_bounds_every_mask(f):
    ball = x(2, 3, 4)
    generator = torch.Generator().manual_seed(seeded(0))
    for _ in range(20):
        out = f(ball.normed(start(ball, 2, generator), 1.0), 0.6, True)
        assert out.norm_size.item() == out.perturbation_size.item() == pytest.approx(2.5)
        assert norm(R, out.backing, out.elem_dims) <= out.norm_size + 1e-9
    assert f(ball.normed(torch.ones(2, 3, 4), 1.0), 0.6, False).norm_size.item() == 1.0
    with norm_mode("typical"):
        assert f(ball.normed(torch.ones(2, 3, 4)), 0.6, True).norm_size.item() == pytest.approx(math.sqrt(2.5))


def test_alpha_dropout_bounds_every_mask():
    ball = x(2, 3, 4)
    for sort, p in itertools.product(range(8), (0.2, 0.9)):
        out = F.alpha_dropout(ball.normed(start(ball, sort, torch.Generator().manual_seed(seeded(sort)))), p, True)
        assert norm(R, out.backing, out.elem_dims) <= out.norm_size + 1e-9


def test_modula_heads_cost_nothing():
    a = R(1.0, backing=torch.zeros(2, 12), perturbation_size=1.0)
    for mode in ("modula", "typical"):
        with norm_mode(mode):
            q, _, v = a.chunk(3, -1)
            assert q.perturbation_size.item() == v.norm_size.item() == 1.0


def test_dimensions_of_size_one_do_not_matter():
    a = R(1.0, backing=torch.zeros(3, 1, 4))
    assert a[:, 0].norm_size.item() == 1.0
    assert R(1.0, backing=torch.zeros(3, 1))[:, 0].norm_size.item() == 1.0


REFUSED = [
    lambda a: a[:, :3].as_strided((2,), (3,)),
    lambda a: a.repeat_interleave(torch.tensor([1, 2, 0, 1]), -1),
    lambda a: a.view(torch.int32),
    lambda a: a.__setitem__(0, 1.0),
]


@pytest.mark.parametrize("f", REFUSED, ids=range(len(REFUSED)))
def test_what_has_no_bound_is_refused(f):
    with pytest.raises((NormMismatchError, MissingNormRuleError, UnsupportedOpError)):
        f(R(1.0, backing=torch.ones(3, 4)))


MASKED = {
    "expand_as": lambda x, mask: x.masked_fill(mask[:1].expand_as(x), 0.0),
    "view_as": lambda x, mask: x.masked_fill(mask.reshape(6).view_as(x), 0.0),
    "reshape_as": lambda x, mask: x.masked_fill(mask.reshape(6).reshape_as(x), 0.0),
    "type_as": lambda x, mask: x * mask.type_as(x),
    "to": lambda x, mask: x * mask.to(x),
    "integers": lambda x, mask: x * (mask.long() * 3).expand_as(x).type_as(x),
    "remainder": lambda x, mask: x * ((mask.long() + 7) % 3),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_and_integers_in_the_shape_or_dtype_of_a_normed_tensor_stay_plain(name):
    f, mask = MASKED[name], torch.tensor([[True, False, True], [True, True, False]])
    x = R.of(torch.randn(2, 3))
    for run in (f, thunder.jit(f, transforms=[NormTransform()])):
        y = run(x, mask)
        torch.testing.assert_close(y.backing, f(x.backing, mask), rtol=0, atol=0)
        assert R.of(y.backing).norm_size <= y.norm_size * (1 + 1e-6)


@pytest.mark.parametrize("kind", [RMSTensor, RMSToRMSTensor])
def test_a_shape_of_another_size_is_torchs_error(kind):
    x = kind(1.0, backing=torch.zeros(2, 6))
    for call in (lambda x: x.reshape(5, 2), lambda x: x.view(3, 3), lambda x: x.unflatten(-1, (4, 2))):
        with pytest.raises(RuntimeError):
            call(x)


SPELLINGS = {
    "reshape": lambda s: s.reshape(*s.shape, 1),
    "reshape to a tuple": lambda s: s.reshape((*s.shape, 1)),
    "reshape by name": lambda s: torch.reshape(s, shape=(8, 6)),
    "permute": lambda s: s.permute(1, 0, 2),
    "permute to a tuple": lambda s: torch.permute(s, (1, 0, 2)),
    "movedim": lambda s: s.movedim(0, 1),
    "expand": lambda s: s.expand(3, 2, 4, 6),
    "broadcast_to": lambda s: torch.broadcast_to(s, (3, 2, 4, 6)),
    "view": lambda s: s.view(8, 6),
    "repeat": lambda s: s.repeat(2, 1, 1),
    "squeeze": lambda s: s[:1].squeeze(0),
    "flatten": lambda s: s.flatten(1, 2),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_gates_in_every_spelling_of_another_shape(name):
    """Squeeze and excitation has ``s.reshape(*s.shape, 1, 1)`` of a sigmoid."""
    torch.manual_seed(seeded(0))
    data = torch.randn(2, 4, 6, dtype=D)

    def f(x):
        return SPELLINGS[name](torch.sigmoid(x)) * 2

    expected = f(data)
    for g in (f, thunder.jit(f, transforms=[NormTransform()])):
        found = g(RMSTensor.of(data))
        torch.testing.assert_close(found.backing, expected)
        assert type(found).of(expected, elem_dims=found.elem_dims).norm_size <= found.norm_size * (1 + 1e-6)
