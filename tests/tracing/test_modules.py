"""torch.nn layers through Thunder: real mode is Thunder's own program, normed mode is eager mode's, and sound."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.sizes import assert_same_size
from thunder_norm import RMSTensor, normed, sensitivities, with_perturbation
from thunder_norm.transforms import NormTransform
import thunder

SOUND = 1 + 1e-5
TOKEN_SHAPE, IMAGE_SHAPE = (2, 5, 8), (2, 4, 6, 6)
ACTIVATIONS = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Mish,
    nn.Hardswish,
    nn.Identity,
)
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(8, 3), TOKEN_SHAPE, (-1,)),
    "Bilinear": (lambda: Square(nn.Bilinear(8, 8, 3)), TOKEN_SHAPE, (-1,)),
    "Conv1d": (lambda: nn.Conv1d(5, 3, 3, padding=1), TOKEN_SHAPE, (-2,)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), IMAGE_SHAPE, (-3,)),
    "Conv2d, groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), IMAGE_SHAPE, (-3,)),
    "LayerNorm": (lambda: nn.LayerNorm(8), TOKEN_SHAPE, (-1,)),
    "RMSNorm": (lambda: nn.RMSNorm(8), TOKEN_SHAPE, (-1,)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), IMAGE_SHAPE, (-3, -2, -1)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), IMAGE_SHAPE, (-3,)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGE_SHAPE, (-3,)),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), IMAGE_SHAPE, (-3,)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(1), IMAGE_SHAPE, (-3,)),
    "Flatten": (lambda: nn.Flatten(), IMAGE_SHAPE, (-3,)),
    "Dropout": (lambda: nn.Dropout(0.5), TOKEN_SHAPE, (-1,)),
    "PReLU": (lambda: nn.PReLU(), TOKEN_SHAPE, (-1,)),
    "Softmax": (lambda: nn.Softmax(-1), TOKEN_SHAPE, (-1,)),
    "MultiheadAttention": (lambda: SelfAttention(), TOKEN_SHAPE, (-1,)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), TOKEN_SHAPE, (-1,)),
    **{
        f.__name__: (f, TOKEN_SHAPE, (-1,)) for f in ACTIVATIONS
    },
}  # fmt: skip


class Square(nn.Module):
    """Both inputs of a bilinear layer from one."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x, x)


class SelfAttention(nn.Module):
    """Queries, keys and values from one input."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.fixture
def no_fused_encoder():
    """Without gradients torch's encoder layer runs a fused kernel that Thunder does not know."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(was_enabled)


@pytest.mark.usefixtures("no_fused_encoder")
@pytest.mark.parametrize("name", MODULES)
def test_torch_modules(name):
    build, shape, dims = MODULES[name]
    module = build().eval().requires_grad_(False)
    t = torch.randn(shape)
    expected = module(t)
    jitted = thunder.jit(module, transforms=[NormTransform()])
    torch.testing.assert_close(jitted(t), expected)
    x = with_perturbation(RMSTensor.of(t, dims))
    y = jitted(x)
    want = module(x)
    assert type(y) is type(want) and y.elem_dims == want.elem_dims
    assert_same_size(y.norm_size, want.norm_size)
    assert_same_size(y.perturbation_size, want.perturbation_size)
    torch.testing.assert_close(y.backing, expected)
    assert type(y).of(expected, y.elem_dims).norm_size <= y.norm_size * SOUND
    s = sensitivities(y, [x])[0]
    assert torch.isfinite(s)
    for _ in range(3):
        direction = torch.randn(shape, dtype=torch.float64)
        direction *= 1e-5 / RMSTensor.of(direction, dims).norm_size
        double = copy.deepcopy(module).double()
        moved = double(t.double() + direction) - double(t.double())
        assert type(y).of(moved, y.elem_dims).norm_size <= 1e-5 * s * (1 + 1e-3)


def test_embedding():
    module = nn.Embedding(11, 8)
    ids = torch.tensor([[1, 5], [10, 0]])
    jitted = thunder.jit(module, transforms=[NormTransform()])
    assert torch.equal(jitted(ids), module(ids))
    y = normed(jitted)(ids)
    assert type(y) is RMSTensor and y.shape == (2, 2, 8)
    assert y.norm_size.item() == pytest.approx(RMSTensor.of(module.weight.detach()).norm_size.item(), rel=1e-6)
