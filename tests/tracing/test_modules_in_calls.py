"""Programs that convert modules, or make some, while they run, and modules that get their parameters then."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import assert_same
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
def test_a_lazy_module_gets_its_parameters_in_the_first_call(transform, is_called):
    """The same as in eager mode from the same random numbers, with what the first batch leaves in batch norm, and gradients."""
    found = []
    for is_jitted in (False, True):
        torch.manual_seed(seeded(0))
        model = torch.nn.Sequential(
            torch.nn.LazyConv1d(4, 2), torch.nn.LazyBatchNorm1d(), torch.nn.Flatten(), torch.nn.LazyLinear(2)
        )
        x = torch.randn(3, 2, 5)
        function = functools.partial(_called_with, model) if is_called else model
        call = thunder.jit(function, transforms=[transform()]) if is_jitted else model
        results = call(x), call(x)
        assert [type(m) for m in model] == [torch.nn.Conv1d, torch.nn.BatchNorm1d, torch.nn.Flatten, torch.nn.Linear]
        found.append(
            [*results, *torch.autograd.grad(results[1].square().sum(), list(model.parameters())), *model.state_dict().values()]
        )
    torch.testing.assert_close(*found)


def _called_with(model, x):
    return model(x)


def test_a_lazy_module_with_what_it_is_called_with():
    class Scaled(LazyModuleMixin, torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.calls = torch.nn.UninitializedParameter(), 0

        def initialize_parameters(self, x, *, scale=1.0):
            if self.has_uninitialized_params():
                with torch.no_grad():
                    self.w.materialize(x.shape[1:])
                    self.w.fill_(scale)

        def forward(self, x, *, scale=1.0):
            self.calls += 1
            return x * self.w

    model, x = Scaled(), TwoTensor(torch.ones(2, 3), torch.zeros(2, 3))
    jitted = thunder.jit(lambda x: model(x, scale=3.0), transforms=[SubclassTransform()])
    assert_same([jitted(x), jitted(x)], [x * 3, x * 3])
    assert model.calls == 2


def test_a_lazy_module_after_random_numbers_is_refused_until_it_has_been_called():
    """What is refused draws no random numbers; a call of the module itself gives it its parameters, and the jitted one has them."""
    model, x = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.LazyLinear(4)), torch.ones(3, 2)
    jitted = thunder.jit(model, transforms=[SubclassTransform()])
    state = torch.get_rng_state()
    with pytest.raises(UnsupportedOpError, match="lazy module(.|\n)*call the module itself once"):
        jitted(x)
    assert torch.equal(torch.get_rng_state(), state) and isinstance(model[1], torch.nn.LazyLinear)
    model(x)
    model.eval()
    torch.testing.assert_close(jitted(x), model(x))
