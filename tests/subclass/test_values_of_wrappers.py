"""Values of wrappers that a program asks for are eager mode's, whatever they are, in loops and conditions, with gradients too."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import crossed, seeded
from tests.subclasses import asserted
from thunder_norm.transforms import SubclassTransform
import thunder


def _grown(x):
    while x.abs().sum() < 40:
        x = x * 2
    return x


PROGRAMS = {
    "condition": lambda x: x * 2 if x.sum() > 0 else x * 3,
    "condition on a number": lambda x: x * 2 if x.sum() else x,
    "not": lambda x: x if not (x.mean() > 0) else x * 4,
    "and, or": lambda x: x * 2 if x.sum() > 0 and x.max() < 2 or x.min() < -2 else x,
    "while": _grown,
    "assert": asserted,
    "float": lambda x: x * float(x.detach().sum()),
    "int": lambda x: x * int(x.detach().sum()),
    "complex": lambda x: x * complex(x.detach().sum()).real,
    "range": lambda x: [x * i for i in range(1 + int(x.detach().abs().sum()))][-1],
    "of several values": lambda x: x if x > 0 else x * 2,
}
CLASSES = {
    "TwoTensor": lambda t: TwoTensor(t, t.clone()),
    "WrapperSubclass": WrapperSubclass,
    "WrapperSubclass of a TwoTensor": lambda t: WrapperSubclass(TwoTensor(t, t.clone())),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("name", "cls"), crossed(PROGRAMS, CLASSES))
def test_they_are_those_of_eager_mode(name, cls, requires_grad):
    def outcome(f, data):
        x = CLASSES[cls](data.clone()).requires_grad_(requires_grad)
        try:
            y = f(x)
        except (RuntimeError, AssertionError) as e:
            return type(e), str(e).splitlines()[0]
        if requires_grad:
            y.sum().backward()
        return [t.sum().item() for t in ((y.detach(), x.grad) if requires_grad else (y,))]

    jitted = thunder.jit(PROGRAMS[name], transforms=[SubclassTransform()])
    torch.manual_seed(seeded(0))
    data = torch.randn(4).sign() * (torch.rand(4) + 0.5)
    for given in (data.abs(), -data.abs(), data.abs(), data, torch.zeros(4) + (0.001 if name == "while" else 0)):
        assert outcome(jitted, given) == outcome(PROGRAMS[name], given)


class Unhashable:
    """A callable that compares, and so has no hash: what it is called with may be a wrapper."""

    def __eq__(self, other):
        return self is other

    def __call__(self, x):
        return x * 2


def test_an_object_without_a_hash_is_called_with_a_wrapper():
    torch.manual_seed(seeded(0))
    x, double = TwoTensor(torch.randn(3), torch.randn(3)), Unhashable()
    y, expected = thunder.jit(lambda x: double(x) + 1, transforms=[SubclassTransform()])(x), x * 2 + 1
    assert torch.equal(y.a, expected.a) and torch.equal(y.b, expected.b)
