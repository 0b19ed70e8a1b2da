"""Programs that convert modules, or make some, while they run, and modules that get their parameters then."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import normed
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder


def _jit(f):
    return thunder.jit(f, transforms=[NormTransform()])


CONVERSIONS = {
    "to": lambda m: m.to(torch.float32),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
    "to the device of an input": lambda m: m.to("cpu", torch.float32),
    "of everything": lambda m: m.type(torch.float32),
}


class Converting(torch.nn.Module):
    def __init__(self, convert):
        super().__init__()
        self.fc, self.convert = torch.nn.Linear(4, 4), convert

    def forward(self, x):
        self.fc = self.convert(self.fc)
        return self.fc(x)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_that_change_nothing(name):
    model, x = Converting(CONVERSIONS[name]), torch.randn(2, 4)
    expected = model(x)
    for jitted in (_jit(model), normed(_jit(model))):
        for _ in range(2):
            found = jitted(x)
            torch.testing.assert_close(getattr(found, "backing", found), expected)


def test_conversions_that_change_something_are_refused():
    with pytest.raises(UnsupportedOpError, match="convert the module before"):
        _jit(Converting(lambda m: m.double()))(torch.randn(2, 4).double())


class Making(torch.nn.Module):
    """Makes modules in each call, and sets a string on one inside it."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.ReLU()
        self.inner.kind = "first"

    def forward(self, x):
        if self.inner.kind == "first":
            self.inner.kind = "later"
            return x
        normalize = torch.nn.LayerNorm(x.shape[-1], elementwise_affine=False)
        return torch.nn.Sequential(normalize, torch.nn.Softmax(dim=-1))(self.inner(x))


@pytest.mark.parametrize("mode", ["real", "normed"])
def test_modules_without_parameters_are_made_in_a_call(mode):
    torch.manual_seed(seeded(1))
    model, other = Making(), Making()
    jitted = _jit(model)
    call = normed(jitted) if mode == "normed" else jitted
    for _ in range(3):
        x = torch.randn(3, 4)
        found, expected = call(x), other(x)
        torch.testing.assert_close(getattr(found, "backing", found), expected)
        assert model.inner.kind == other.inner.kind == "later"


def test_parameters_of_modules_made_in_a_call_are_refused():
    with pytest.raises((UnsupportedOpError, NotImplementedError)):
        _jit(lambda x: torch.nn.Linear(4, 4)(x))(torch.randn(2, 4))


@pytest.mark.parametrize("transform", [SubclassTransform, CheckpointTransform])
@pytest.mark.parametrize("is_called", [False, True], ids=["jitted", "called"])
def test_a_lazy_module_is_refused_until_it_has_been_called(transform, is_called):
    """What is refused draws no random numbers; a call of the module itself gives it its parameters, and the jitted one has them."""
    model, x = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d()), torch.ones(3, 2)
    jitted = thunder.jit((lambda x: model(x)) if is_called else model, transforms=[transform()])
    state = torch.get_rng_state()
    with pytest.raises(UnsupportedOpError, match="lazy module(.|\n)*call the module itself once"):
        jitted(x)
    assert torch.equal(torch.get_rng_state(), state) and isinstance(model[0], torch.nn.LazyLinear)
    model(x)
    model.eval()
    torch.testing.assert_close(jitted(x), model(x))
