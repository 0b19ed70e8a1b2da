"""Unpooling, pooling at random places, cubic interpolation, grid_sample: norms against adversarial inputs; derivatives are refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, norm_mode
from thunder_norm.audit import Ball, Case
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules.reducing.resampling import cubic_gain
from thunder_norm.transforms import NormTransform
import thunder

R, INF = RMSTensor, LinfTensor
D = torch.float64


def x(*shape, dims=None, kind=R, size=1.0):
    return Ball("x", kind, shape, size, dims)


def grid(*shape, kind=INF, dims=None):
    return Ball("grid", kind, shape, 1.2, dims)


places = torch.tensor([[[[0, 3], [8, 10]], [[5, 2], [9, 15]], [[5, 3], [8, 10]]]])
one_place = torch.zeros(1, 3, 2, 2, dtype=torch.long) + torch.tensor([[0, 1], [4, 5]])
one_place = torch.stack([one_place[0].roll(i, -1) if i < 2 else one_place[0] for i in range(3)])[:, 0][None]
line = torch.tensor([[[0, 2, 5], [1, 3, 4]]])
samples = torch.tensor([[[0.3, 0.6], [0.1, 0.9], [0.5, 0.5]]], dtype=D)
cube_samples = torch.tensor([[[0.3, 0.6, 0.2], [0.1, 0.9, 0.4]]], dtype=D)
half_way = torch.zeros(1, 1, 1, 2, dtype=D)
anywhere = torch.linspace(-1.2, 1.2, 18, dtype=D).reshape(1, 3, 3, 2)
MORE = {"restarts": 16, "steps": 40}
# the position next to a corner of the image from which both neighbours differ by 2
CORNER = torch.ones(1, 1, 4, 4, dtype=D)
CORNER[..., 1, 1] = -1
# (several times: each begins with another direction of the grid)
AT_CORNER = {"witnesses": 6 * [(CORNER, torch.full((1, 1, 1, 2), -0.2501, dtype=D))]}


def unpool(count, indices, *args, **kwargs):
    op = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}[count]
    return lambda a: op(a, indices, *args, **kwargs)


def fractional(*args, **kwargs):
    return lambda a: F.fractional_max_pool2d(a, *args, **kwargs)


def interpolate(**kwargs):
    return lambda a: F.interpolate(a, mode="bicubic", **kwargs)


def best_image(call, *shape):
    """Signs of the weights of that position of the result whose weights have the largest sum of moduli."""
    a = torch.zeros(1, 1, *shape[-2:], dtype=D, requires_grad=True)
    weights = torch.stack([torch.autograd.grad(y, a, retain_graph=True)[0][0] for y in call(a).flatten()])
    return weights[weights.abs().sum((1, 2, 3)).argmax()].sign().expand(shape)


def cubic(name, ball, **kwargs):
    """The image is the witness of the value, and as the map is linear of the sensitivity, where the search needs its own luck."""
    call = interpolate(**kwargs)
    return Case(name, call, (ball,), 0.75, options={"witnesses": [(best_image(call, *ball.shape),)]})


def sample(at, **kwargs):
    return lambda a: F.grid_sample(a, at, align_corners=kwargs.pop("align_corners", False), **kwargs)


def sample_both(**kwargs):
    return lambda a, g: F.grid_sample(a, g, **{"align_corners": False, **kwargs})


def affine(size, align_corners):
    return lambda theta: F.affine_grid(theta, size, align_corners=align_corners)


def framed(dims, *pad, **options):
    """The largest in windows of what is padded with minus infinity, as timm and others write a padding of one side."""
    pool = getattr(F, f"max_pool{dims}d")
    return lambda t: pool(F.pad(t, pad, value=-math.inf), 3, **options)


CASES = [
    Case("framed line", framed(1, 0, 1, stride=2), (x(1, 2, 5, kind=INF),)),
    Case("framed image", framed(2, 0, 1, 1, 0, stride=2), (x(1, 2, 4, 4, kind=INF),)),
    Case("framed image, RMS of channels", framed(2, 1, 1, 0, 1, stride=2), (x(1, 3, 4, 4, dims=(-3,)),), 0.7),
    Case("framed volume", framed(3, 0, 1, 1, 1, 1, 0, stride=2), (x(1, 1, 2, 3, 3, kind=INF),)),
    Case("max_unpool2d", unpool(2, places, 2), (x(1, 3, 2, 2, dims=(1, 2, 3)),)),
    Case("max_unpool2d of a size", unpool(2, places, 2, output_size=(5, 5)), (x(1, 3, 2, 2, dims=(1, 2, 3)),)),
    Case("max_unpool2d entries", unpool(2, places, (2, 2), (2, 2)), (x(1, 3, 2, 2, kind=INF),)),
    Case("max_unpool2d channels", unpool(2, one_place, 2), (x(1, 3, 2, 2, dims=(1,)),), 0.8, MORE),
    Case("max_unpool1d", unpool(1, line, 2), (x(1, 2, 3, dims=(1, 2)),)),
    Case(
        "max_unpool3d",
        unpool(3, torch.arange(4).reshape(1, 2, 2, 1, 1) * 3, 2, output_size=(4, 2, 2)),
        (x(1, 2, 2, 1, 1, dims=(2,)),),
    ),
    Case("max_unpool2d aten", lambda a: torch.ops.aten.max_unpool2d.default(a, places, [4, 6]), (x(1, 3, 2, 2, dims=(1, 2, 3)),)),
    Case("fractional_max_pool2d entries", fractional(2, 3, _random_samples=samples), (x(1, 3, 5, 5, kind=INF),)),
    # the windows of the channels, placed at random, share fewer positions than they might
    Case("fractional_max_pool2d channels", fractional(2, 3, _random_samples=samples), (x(1, 3, 5, 5, dims=(1,)),), 0.8, MORE),
    # an entry is in 4 windows at most by their distances, and in fewer by chance
    Case("fractional_max_pool2d all", fractional(2, 3, _random_samples=samples), (x(1, 3, 5, 5, dims=(1, 2, 3)),), 0.45),
    Case("fractional_max_pool2d apart", fractional(2, 2, _random_samples=samples), (x(1, 3, 4, 4, dims=(1, 2, 3)),)),
    Case(
        "fractional_max_pool2d ratio",
        lambda a: F.fractional_max_pool2d(a, 2, output_ratio=(0.5, 0.5), return_indices=True, _random_samples=samples)[0],
        (x(1, 3, 4, 4, dims=(1, 2, 3)),),
    ),
    Case(
        "fractional_max_pool3d",
        lambda a: F.fractional_max_pool3d(a, 2, 2, _random_samples=cube_samples),
        (x(1, 2, 4, 4, 4, kind=INF),),
    ),
    cubic("bicubic smaller", x(1, 2, 8, 8, kind=INF), size=(4, 4), align_corners=False),
    cubic("bicubic larger", x(1, 2, 5, 4, dims=(1,)), scale_factor=1.7, align_corners=False),
    cubic("bicubic corners", x(1, 1, 4, 7, kind=INF), size=(6, 3), align_corners=True),
    cubic("bicubic antialias", x(1, 1, 8, 5, kind=INF), size=(3, 9), align_corners=False, antialias=True),
    Case("affine_grid", affine((1, 1, 2, 3), True), (x(1, 2, 3, size=1.4),)),
    Case("affine_grid, inside", affine((1, 1, 2, 3), False), (x(1, 2, 3),)),
    Case("affine_grid, entries", affine((1, 1, 2, 3), False), (x(1, 2, 3, kind=INF),)),
    Case("affine_grid of a volume", affine((1, 1, 1, 2, 3), False), (x(1, 3, 4),)),
    Case("affine_grid, matrices", affine((1, 1, 2, 2), True), (x(1, 2, 3, dims=(-2, -1)),), 0.5),
    Case("grid_sample, moving", sample_both(), (x(1, 1, 4, 4, kind=INF), grid(1, 1, 1, 2)), options=AT_CORNER),
    Case("grid_sample, corners", sample_both(align_corners=True), (x(1, 1, 4, 4, kind=INF), grid(1, 1, 1, 2)), 0.9, AT_CORNER),
    # in RMS over the two coordinates both would have to move by sqrt(2) times as much
    Case(
        "grid_sample, rms grid",
        sample_both(padding_mode="reflection"),
        (x(1, 1, 4, 4, kind=INF), grid(1, 1, 1, 2, kind=R)),
        0.65,
        AT_CORNER,
    ),
    Case("grid_sample", sample(anywhere), (x(1, 2, 4, 3, dims=(1,)),)),
    Case("grid_sample border", sample(anywhere, padding_mode="border"), (x(1, 2, 4, 3, kind=INF),)),
    Case("grid_sample nearest", sample(anywhere, mode="nearest"), (x(1, 2, 4, 3, dims=(1,)),)),
    Case("grid_sample bicubic", sample(half_way, mode="bicubic"), (x(1, 1, 4, 4, kind=INF),)),
    Case("grid_sample 3d", sample(torch.zeros(1, 1, 1, 2, 3, dtype=D)), (x(1, 2, 3, 3, 3, dims=(1,)),)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())
    case.check_at(0.0, seeded())


@pytest.mark.parametrize("size, out", [(8, 4), (4, 8), (5, 7), (7, 5), (6, 1), (3, 10)])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("antialias", [False, True])
def test_cubic_gains_are_those_of_torchs_weights(size, out, align_corners, antialias):
    eye = torch.eye(size, dtype=D)[None, :, None].expand(1, size, size, size)
    weights = F.interpolate(eye, (size, out), mode="bicubic", align_corners=align_corners, antialias=antialias)[0, :, 0]
    gain = cubic_gain(size, out, align_corners, None, antialias)
    assert gain == pytest.approx(weights.abs().sum(0).max().item(), rel=1e-9)


def test_cubic_gains_with_a_scale_are_those_of_torchs_weights():
    eye = torch.eye(5, dtype=D)[None, :, None].expand(1, 5, 5, 5)
    weights = F.interpolate(eye, scale_factor=(1, 1.5), mode="bicubic", align_corners=False)[0, :, 0]
    assert cubic_gain(5, 7, False, 1.5, False) == pytest.approx(weights.abs().sum(0).max().item(), rel=1e-9)


@pytest.mark.parametrize("options", [{"mode": "nearest"}, {"mode": "bilinear", "align_corners": True}, {"mode": "bicubic"}])
def test_sizes_that_a_program_computes(options):
    image, sizes = RMSTensor.of(torch.randn(1, 2, 4, 5), 1), torch.tensor([3, 7])
    out, expected = (F.interpolate(image, size=size, **options) for size in (tuple(sizes), (3, 7)))
    assert torch.equal(out.norm_size, expected.norm_size) and torch.equal(out.backing, expected.backing)
    assert F.pad(image, (0, sizes[0], 1, 0)).norm_size == F.pad(image, (0, 3, 1, 0)).norm_size


def test_a_plain_image_is_measured_where_its_grid_is_normed():
    image, at = torch.randn(1, 2, 4, 4), torch.rand(1, 3, 3, 2)
    out = F.grid_sample(image, INF.of(at), align_corners=False)
    assert torch.equal(out.backing, F.grid_sample(image, at, align_corners=False))
    torch.testing.assert_close(out.norm_size, image.square().mean(1).sqrt().max().double())


def test_a_grid_that_moves_is_refused_where_the_image_jumps():
    at = LinfTensor(1.0, backing=torch.zeros(1, 1, 1, 2), perturbation_size=1.0)
    with pytest.raises(NormMismatchError, match="bilinear"):
        F.grid_sample(R.of(torch.ones(1, 1, 3, 3)), at, mode="nearest", align_corners=False)


@pytest.mark.parametrize("mode", ["bound", "typical"])
@pytest.mark.parametrize("dims", [(-3,), (-1,), (-3, -2, -1)])
def test_a_frame_of_minus_infinity_is_one_of_zeros_to_a_maximum(mode, dims):
    """Infinite before, and with it all targets of models with such a stem in mode "typical"."""
    y = R(1.5, backing=torch.zeros(1, 3, 6, 6), elem_dims=dims, perturbation_size=0.1)
    with norm_mode(mode):
        found, zeros = (F.max_pool2d(F.pad(y, (0, 1, 1, 0), value=v), 3, 2) for v in (-math.inf, 0.0))
    assert (found.norm_size, found.perturbation_size) == (zeros.norm_size, zeros.perturbation_size)
    f = thunder.jit(lambda t: F.max_pool2d(F.pad(t, (0, 1, 1, 0), value=-math.inf), 3, 2), transforms=[NormTransform()])
    with norm_mode("bound"):
        traced, eager = f(y), F.max_pool2d(F.pad(y, (0, 1, 1, 0)), 3, 2)
    assert traced.norm_size.item() == pytest.approx(eager.norm_size.item())


@pytest.mark.parametrize("pad", [(0, 3), (0, 0, 0, 0, 1, 0)])
def test_a_window_of_nothing_else_is_infinite(pad):
    """Three positions added behind, or a channel."""
    y = F.max_pool2d(F.pad(R(1.0, backing=torch.zeros(1, 3, 6, 6), elem_dims=(-3,)), pad, value=-math.inf), 3)
    assert y.backing.isinf().any() and y.norm_size.isinf()


def test_derivatives_are_refused():
    a = R.of(torch.ones(1, 1, 4, 4))
    out, indices = F.max_pool2d(torch.ones(1, 1, 4, 4), 2, return_indices=True)
    with pytest.raises(NormMismatchError, match="sensitivities"):
        torch.ops.aten.max_pool2d_with_indices_backward.default(R.of(out), a, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
    with pytest.raises(NormMismatchError, match="sensitivities"):
        torch._softmax_backward_data(torch.ones(1, 1, 4, 4), a, -1, torch.float32)
