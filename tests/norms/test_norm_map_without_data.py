"""Norm maps of models of which a part is on the meta device: parameters without data, buffers and arguments with theirs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, build_norm_map
from thunder_norm.errors import NormMismatchError


def conv_net() -> nn.Sequential:
    """Its norm depends on the running statistics, two buffers."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    model[1].running_var.fill_(4.0)
    model[1].running_mean.fill_(0.5)
    return model


def parameters_on_meta(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(p.to("meta")))
    return model


def test_buffers_with_data_beside_parameters_without():
    """Batch norm of norm 1 over channels: an affine map by 1 / 2, of a value of norm 1 + 1 minus 0.5 in each channel."""
    model = parameters_on_meta(conv_net())
    before = {name: (id(t), t.device.type) for name, t in model.state_dict(keep_vars=True).items()}
    x = RMSTensor(1.0, elem_dims=(1,))
    y = build_norm_map(model, torch.empty(2, 3, 8, 8, device="meta"), parameters="unit")(x)
    same = build_norm_map(conv_net(), torch.empty(2, 3, 8, 8), parameters="unit")(x)
    assert y.norm_size.item() == pytest.approx(same.norm_size.item(), rel=1e-12)
    assert y.norm_size.item() == pytest.approx((2 + 0.5) / 2 + 1, rel=1e-4)  # eps is 1e-5
    assert {name: (id(t), t.device.type) for name, t in model.state_dict(keep_vars=True).items()} == before


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return (x * torch.view_as_complex(self.parts)).real + self.parts.view(-1)[:3]


def test_parameters_and_inputs_without_data_may_be_taken_for_complex_numbers():
    found = [build_norm_map(model, torch.empty(2, 3), parameters="unit") for model in (parameters_on_meta(Complex()), Complex())]
    on_meta, with_data = (y(LinfTensor(1.0)).norm_size.item() for y in found)
    assert on_meta == pytest.approx(with_data)
    pairs = build_norm_map(lambda x: torch.view_as_complex(x).real, torch.empty(3, 2))
    assert pairs(LinfTensor(1.0)).norm_size.item() == pytest.approx(2**0.5)


def test_a_parameter_without_data_is_not_measured():
    model = parameters_on_meta(conv_net())
    norm_map = build_norm_map(model, torch.empty(2, 3, 8, 8, device="meta"), parameters="measured")
    with pytest.raises(NormMismatchError, match="values of '0.bias', which is on the meta device"):
        norm_map(RMSTensor(1.0, elem_dims=(1,)))
    assert model[0].bias.is_meta


def test_tied_parameters_are_one():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4, bias=False)).eval()
    model[2].weight = model[0].weight
    expected = build_norm_map(model, torch.empty(2, 4))(RMSTensor(1.0), normed_state_dict={"0.weight": 2.0})
    parameters_on_meta(model)
    model[2].weight = model[0].weight
    found = build_norm_map(model, torch.empty(2, 4, device="meta"))(RMSTensor(1.0), normed_state_dict={"0.weight": 2.0})
    assert found.norm_size.item() == pytest.approx(expected.norm_size.item(), rel=1e-12)
    assert found.norm_size.item() == pytest.approx(4, rel=1e-4)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, mask):
        return (x * self.scale).masked_fill(~mask, 0.0)


def test_an_argument_with_data():
    """The mask's shape alone matters, or its values: of a model without buffers whose parameters are on meta."""
    mask = torch.tensor([True, False, True, True])
    norm_map = build_norm_map(parameters_on_meta(Masked()), torch.empty(2, 4, device="meta"), mask, parameters="unit")
    assert norm_map(LinfTensor(3.0), mask).norm_size.item() == 3


class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("r", torch.ones(4))

    def forward(self, x):
        torch.mul(self.r, 0.5, out=self.r)
        half = torch.zeros(4).lerp_(torch.ones(4), 0.5)  # a constant whose values are asked for
        return x * half


def test_a_map_of_a_module_that_writes_with_out():
    model = Halved()
    assert build_norm_map(model, torch.empty(2, 4))(LinfTensor(3.0)).norm_size.item() == 1.5
    assert torch.equal(model.r, torch.ones(4))


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, labels):
        return (self.linear(x) * labels.float()[:, None]).sum(-1)


class OneHot(Labelled):
    def forward(self, x, labels):
        return (self.linear(x) * F.one_hot(labels, 3).float()).sum(-1)


def test_values_of_an_argument_on_meta_that_a_norm_depends_on_are_asked_for():
    """Torch's "Tensor.item() cannot be called on meta tensors" before."""
    torch.manual_seed(seeded(0))
    labels = torch.randint(1, 3, (2,))
    for model in (Labelled().to("meta"), Labelled()):
        norm_map = build_norm_map(model, torch.empty(2, 4, device="meta"), labels.to("meta"), parameters="unit")
        with pytest.raises(NormMismatchError, match="depends on the values of"):
            norm_map(RMSTensor(1.0), labels.to("meta"))
        assert norm_map(RMSTensor(1.0), labels).norm_size > 0


def test_values_that_all_are_between_two_numbers_are_not_asked_for():
    torch.manual_seed(seeded(0))
    labels = torch.randint(0, 3, (2,))
    norm_map = build_norm_map(OneHot().to("meta"), torch.empty(2, 4, device="meta"), labels.to("meta"), parameters="unit")
    without, with_data = (norm_map(RMSTensor(1.0), given).norm_size for given in (labels.to("meta"), labels))
    assert with_data <= without < 2 * with_data


MASKED = {
    "in place of a number": lambda x: x * (x > 0.1).float(),
    "in the divisor": lambda x: x / (1 + (x > 0).to(x.dtype).sum(-1, keepdim=True)),
    "of a length": lambda x: x * (x.norm(dim=-1, keepdim=True) < 3).float(),
    "of two": lambda x: x * ((x > 0) & (x.flip(-1) < 1)).double().float(),
    "a share": lambda x: x * (x > 0).float().mean(0),
}


@pytest.mark.parametrize("f", MASKED.values(), ids=MASKED)
def test_masks_of_normed_tensors_are_between_0_and_1(f):
    torch.manual_seed(seeded(0))
    bound = build_norm_map(f, torch.empty(3, 5, device="meta"))(RMSTensor(1.0)).norm_size
    x = RMSTensor.of(F.normalize(torch.randn(50, 3, 5), dim=-1) * 5**0.5)
    assert 0 < f(x.backing).square().mean(-1).sqrt().max() <= bound * (1 + 1e-6) <= 1 + 1e-5


PLACES = {
    "straight through": lambda y: F.one_hot(y.argmax(-1), 4) + y - y.detach(),
    "chosen": lambda y: y * F.one_hot(y.argmax(-1), 4).to(y),
    "beside": lambda y: y + y.argmin(-1, keepdim=True),
    "among all": lambda y: y - y.argmax().to(y.dtype),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_of_entries_that_a_program_finds_have_a_size_without_values(name):
    """Discrete latents (Dreamer's); the values of the input were asked for."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0])  # of norm 1 from RMS to RMS

        def forward(self, x):
            return PLACES[name](F.linear(x, self.weight))

    torch.manual_seed(seeded(0))
    model = Model()
    bound = build_norm_map(Model().to("meta"), torch.empty(2, 4, device="meta"), parameters="unit")(RMSTensor(1.0))
    for _ in range(10):
        y = model(F.rms_norm(torch.randn(2, 4), (4,)))
        assert type(bound).of(y.detach(), bound.elem_dims).norm_size <= bound.norm_size * (1 + 1e-6) < 10


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "write",
    [lambda x: F.celu(x, inplace=True), lambda x: x.add_(1).mul_(2), lambda x: (x.view(-1).mul_(3), x)[1], lambda x: x.relu_()],
)
def test_an_argument_may_be_written_into(write, device):
    """What stands for it has one entry in memory."""
    found = build_norm_map(write, torch.empty(2, 6, device=device))(LinfTensor(2.0))
    x = torch.full((2, 6), 2.0)
    assert found.norm_size.item() == pytest.approx(LinfTensor.of(write(x)).norm_size.item())
