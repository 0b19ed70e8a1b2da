"""Convolutions: bounds against adversarial images and kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import rules  # noqa: F401
from thunder_norm.audit import Ball, Case, check
from thunder_norm.core.kinds import LinfTensor, RMSTensor, RMSToRMSConvTensor
from thunder_norm.errors import NormMismatchError

R, CONV = RMSTensor, RMSToRMSConvTensor
FEW = {"restarts": 5, "steps": 14, "seed": seeded()}


def image(*shape, dims=(-3,), n=1.3, kind=R):
    return Ball("image", kind, shape, n, dims)


def kernel(*shape, n=0.7, groups=1, dims=None):
    return Ball("kernel", CONV.grouped(groups), shape, n, dims)


def bias(*shape, kind=R):
    return Ball("bias", kind, shape, 0.5)


TRANSPOSED = (-3, -4)
WHOLE = (-3, -2, -1)


def conv(**options):
    return lambda x, w, *b: F.conv2d(x, w, *b, **options)


def transposed(**options):
    return lambda x, w: F.conv_transpose2d(x, w, **options)


CASES = [
    Case("1d with bias", F.conv1d, (image(2, 3, 6, dims=(-2,)), kernel(4, 3, 3), bias(4)), options=FEW),
    Case(
        "1d strided, largest entries",
        lambda x, w, b: F.conv1d(x, w, b, 2, 1),
        (image(2, 3, 6, dims=(), kind=LinfTensor), kernel(4, 3, 3), bias(4)),
        options=FEW,
    ),
    Case("2d", conv(), (image(1, 2, 6, 5), kernel(2, 2, 3, 2)), 0.97, FEW),
    Case("2d padded, strided, dilated", conv(stride=2, padding=1, dilation=2), (image(1, 2, 7, 6), kernel(2, 2, 2, 2)), 0.9, FEW),
    Case("2d groups", conv(stride=2, padding=1, groups=2), (image(1, 4, 6, 5), kernel(6, 2, 3, 2, groups=2)), 0.9, FEW),
    Case("2d depthwise", conv(groups=3), (image(1, 3, 4, 4), kernel(3, 1, 2, 2, groups=3)), 0.95, FEW),
    Case("2d without a batch, same padding", conv(padding="same"), (image(2, 4, 5), kernel(6, 2, 3, 3)), 0.9, FEW),
    Case("3d", F.conv3d, (image(1, 2, 3, 3, 3, dims=(-4,)), kernel(2, 2, 2, 2, 2)), 0.95, FEW),
    Case("mean over positions, boundary only", conv(padding=1), (image(1, 2, 6, 5, dims=WHOLE), kernel(2, 2, 3, 2)), 0.8, FEW),
    Case("mean over positions, stride = kernel", conv(stride=2), (image(1, 2, 6, 4, dims=WHOLE), kernel(2, 2, 2, 2)), 0.95, FEW),
    Case("mean over positions, overlapping", conv(stride=2), (image(1, 2, 7, 7, dims=WHOLE), kernel(2, 2, 3, 3)), 0.75, FEW),
    Case(
        "mean over one of two dimensions",
        conv(stride=2, padding=1),
        (image(1, 2, 6, 5, dims=(-3, -1)), kernel(2, 2, 3, 2)),
        0.88,
        FEW,
    ),
    Case("transposed", transposed(), (image(1, 2, 4, 3), kernel(2, 3, 3, 2, dims=TRANSPOSED)), 0.95, FEW),
    Case(
        "transposed, strided",
        transposed(stride=2, padding=1, output_padding=1),
        (image(1, 2, 4, 3), kernel(2, 3, 3, 2, dims=TRANSPOSED)),
        0.98,
        FEW,
    ),
    Case("transposed, kernel read the other way round", transposed(stride=2), (image(1, 2, 4, 3), kernel(2, 3, 3, 2)), 0.98, FEW),
    Case(
        "transposed, stride over kernel",
        transposed(stride=3),
        (image(1, 2, 3, 3), kernel(2, 3, 2, 2, dims=TRANSPOSED)),
        0.98,
        FEW,
    ),
    Case("transposed, groups", transposed(stride=2, groups=2), (image(1, 4, 4, 3), kernel(4, 3, 3, 2, groups=2)), 0.98, FEW),
    Case(
        "transposed, mean over positions",
        transposed(stride=2),
        (image(1, 2, 4, 3, dims=WHOLE), kernel(2, 3, 3, 2, dims=TRANSPOSED)),
        0.9,
        FEW,
    ),
    Case(
        "transposed, mean over positions, stride = kernel",
        transposed(stride=2),
        (image(1, 2, 3, 3, dims=WHOLE), kernel(2, 3, 2, 2, dims=TRANSPOSED)),
        0.98,
        FEW,
    ),
    Case(
        "ATen's name",
        lambda x, w: torch.ops.aten.convolution(x, w, None, [2], [1], [1], False, [0], 1),
        (image(1, 2, 6, dims=(-2,)), kernel(4, 2, 2)),
        0.95,
        FEW,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())


@pytest.mark.parametrize("size", [0.0, 2.0])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_claims_are_differentiable(case, size):
    case.check_at(size, seeded())


def real(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(0)))


KERNEL, IN_GROUPS, ADJOINT, ADJOINT_IN_GROUPS = real(4, 2, 3, 2), real(6, 2, 3, 2), real(2, 4, 3, 2), real(4, 3, 3, 2)
IMAGE = real(1, 4, 4, 3)
PLAIN = [
    ("kernel", lambda x: F.conv2d(x, KERNEL), image(1, 2, 4, 4)),
    ("kernel in groups", lambda x: F.conv2d(x, IN_GROUPS, groups=2), image(1, 4, 4, 4)),
    ("transposed kernel", lambda x: F.conv_transpose2d(x, ADJOINT, stride=2), image(1, 2, 4, 4)),
    ("transposed kernel in groups", lambda x: F.conv_transpose2d(x, ADJOINT_IN_GROUPS, groups=2), image(1, 4, 3, 3)),
    ("image", lambda w: F.conv2d(IMAGE, w), kernel(3, 4, 1, 1)),
]


@pytest.mark.parametrize("name, call, ball", PLAIN, ids=[p[0] for p in PLAIN])
def test_plain_tensor_is_lifted_soundly(name, call, ball):
    check(call, [ball], tight=0.3, **FEW)


def test_plain_kernel_in_groups_is_measured_by_groups():
    weight = real(6, 2, 3)
    out = F.conv1d(RMSTensor(1.0, backing=real(1, 4, 5), elem_dims=(-2,)), weight, groups=2)
    blocks = weight.unflatten(0, (2, 3)).movedim(-1, 0)
    expected = 3 * torch.linalg.matrix_norm(blocks, 2).amax() * (2 / 3) ** 0.5
    assert out.norm_size.item() == pytest.approx(expected.item())


def test_kernel_for_other_groups_is_refused():
    with pytest.raises(NormMismatchError, match="groups"):
        F.conv1d(R(1.0, backing=real(1, 4, 5), elem_dims=(-2,)), CONV(1.0, backing=real(4, 2, 3)), groups=2)


def test_pointwise_convolution_agrees_with_linear():
    weight, x = real(4, 3), real(2, 5, 3)
    by_conv = F.conv1d(R.of(x.transpose(1, 2), (-2,)), weight.unsqueeze(-1))
    assert by_conv.norm_size.item() == pytest.approx(F.linear(R.of(x), weight).norm_size.item())
