"""How large parameters start: against torch's modules as they are built, and against models that take steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.core.test_modes import Residual
from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.modular import ModularNorm
from thunder_norm.norms.lifts.inference import NormSpec
from thunder_norm.norms.lifts.starts import start_size, typical_size

MATRIX, KERNEL = NormSpec(RMSToRMSTensor, (-2, -1)), NormSpec(RMSToRMSConvTensor, (-4, -3))
VECTOR, GAIN = NormSpec(RMSTensor, (-1,)), NormSpec(LinfTensor, ())

LAYERS = {
    "narrow": (lambda: nn.Linear(64, 512, bias=False), (4096, 64), MATRIX),
    "wide": (lambda: nn.Linear(512, 64, bias=False), (4096, 512), MATRIX),
    "kernel": (lambda: nn.Conv2d(32, 64, 3, bias=False), (64, 32, 10, 10), KERNEL),
    "depthwise": (lambda: nn.Conv2d(256, 256, 5, groups=256, bias=False), (16, 256, 16, 16), KERNEL),
}


@pytest.mark.parametrize("name", LAYERS)
def test_independent_inputs_grow_as_much_as_torchs_own_layers_make_them(name):
    make, shape, norm = LAYERS[name]
    torch.manual_seed(seeded(0))
    layer = make().double()
    gain = layer(torch.randn(shape, dtype=torch.float64)).square().mean().sqrt().item()
    assert start_size(norm, layer.weight.shape) == pytest.approx(gain, rel=0.05)


@pytest.mark.parametrize("layer", [nn.LayerNorm(32), nn.BatchNorm2d(32), nn.Embedding(500, 32)], ids=lambda m: type(m).__name__)
def test_gains_and_tables_start_as_torchs_do(layer):
    norm = VECTOR if isinstance(layer, nn.Embedding) else GAIN
    assert start_size(norm, layer.weight.shape) == pytest.approx(layer.weight.square().mean().sqrt().item(), rel=0.05)


@pytest.mark.parametrize("width", [16, 64, 256])
def test_biases_start_within_a_factor_of_three(width):
    torch.manual_seed(seeded(0))
    bias = nn.Linear(width, 4096).bias
    assert 1 / 3 < start_size(VECTOR, bias.shape) / bias.square().mean().sqrt().item() < 3


class Summed(nn.Module):
    """A residual stream without normalization, in which gains follow each sum, as MobileBERT has it."""

    def __init__(self, depth: int, width: int = 16):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.gains = nn.ParameterList(torch.ones(width) for _ in range(depth))

    def forward(self, x):
        for up, down, gain in zip(self.up, self.down, self.gains, strict=True):
            x = (x + down(torch.relu(up(x)))) * gain
        return x


@pytest.mark.parametrize("depth", [4, 12])
def test_the_typical_size_of_a_stream_is_near_that_of_a_model_as_it_is_built(depth):
    """Parameters of norm 1 would have it grow by almost 2 in each block."""
    torch.manual_seed(seeded(0))
    model = Summed(depth, 64).double()
    x = torch.randn(256, 64, dtype=torch.float64)
    measured = model(x).square().mean().sqrt().item()
    found = ModularNorm(model, x, mode="typical").outputs.norm_size.item()
    assert measured / 2 < found < measured * 1.35**depth


def test_frozen_parameters_keep_their_size():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    nn.init.eye_(model[1].weight).data.mul_(5)
    model[1].weight.requires_grad_(False)
    assert ModularNorm(model, torch.ones(2, 4), mode="typical").sensitivities["0.weight"] == pytest.approx(5)


@pytest.mark.parametrize("name", LAYERS)
def test_a_frozen_layer_is_as_large_as_what_it_makes_of_independent_inputs(name):
    """By operator norms, worst cases, a frozen trunk of twelve convolutions was 1e7 times as large as it is."""
    make, shape, norm = LAYERS[name]
    torch.manual_seed(seeded(0))
    layer = make().double()
    layer.weight.data *= 1 + torch.rand(len(layer.weight), *[1] * (layer.weight.ndim - 1))
    gain = layer(torch.randn(shape, dtype=torch.float64)).square().mean().sqrt().item()
    assert typical_size(norm, layer.weight).item() == pytest.approx(gain, rel=0.05)


def test_what_is_before_a_frozen_trunk_moves():
    """As where the transformer of a DETR, or an adapter, trains beside it."""
    torch.manual_seed(seeded(0))
    trunk = nn.Sequential(*(m for _ in range(8) for m in (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.ReLU())))
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), trunk, nn.Conv2d(8, 2, 1, bias=False))
    nothing_frozen = ModularNorm(model, torch.randn(1, 3, 5, 5), mode="typical")
    trunk.requires_grad_(False)
    frozen = ModularNorm(model, torch.randn(1, 3, 5, 5), mode="typical")
    for name in ("0.weight", "2.weight"):
        assert frozen.sensitivities[name] == pytest.approx(nothing_frozen.sensitivities[name], rel=0.5)


def test_typical_sensitivities_count_as_no_less_than_a_blocks_share():
    """A branch of one of L repeated blocks may be scaled by 1 / L; anything smaller counts as that, in steps and in their norm."""
    blocks = (Residual(nn.Sequential(nn.Linear(6, 6, False), nn.ReLU(), nn.Linear(6, 6, False)), 1 / 40) for _ in range(4))
    norm = ModularNorm(nn.Sequential(*blocks, nn.Linear(6, 6, False)), torch.randn(3, 6), mode="typical")
    assert all(s < 1 / 40 for name, s in norm.sensitivities.items() if name != "4.weight")
    assert norm.mass == pytest.approx(3) and norm.sensitivities["4.weight"] < 1
    assert norm.targets == pytest.approx(dict.fromkeys(norm.targets, 1 / 3))
    update = {"4.weight": torch.eye(6) / 3, "0.block.0.weight": torch.eye(6) / 6}
    assert norm(update).item() == pytest.approx(1) and norm({"0.block.0.weight": torch.eye(6) / 6}).item() == pytest.approx(0.5)
