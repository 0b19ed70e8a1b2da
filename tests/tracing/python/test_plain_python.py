"""Plain Python in traced programs does what it does in eager mode: lists, dicts, callbacks, operators, classes and exceptions."""

from __future__ import annotations

import pytest
import torch

from tests.tracing.python.plain_programs import PROGRAMS
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_it_does_in_eager_mode(name):
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    jf = thunder.jit(PROGRAMS[name], transforms=[NormTransform()])
    expected = PROGRAMS[name](x)
    torch.testing.assert_close(jf(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(jf(x), expected, rtol=0, atol=0)  # the prologue agrees
    assert thunder.cache_misses(jf) == 1


def test_what_a_callback_reads_is_guarded():
    class Ranked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.order = {"a": 2, "b": 1}

        def forward(self, x):
            return x * (3 if sorted(["a", "b"], key=lambda n: self.order[n])[0] == "a" else 5)

    m = Ranked()
    jm = thunder.jit(m, transforms=[NormTransform()])
    x = torch.ones(2)
    assert torch.equal(jm(x), m(x))
    m.order["b"] = 3
    assert torch.equal(jm(x), m(x))


def test_a_list_of_the_model_that_is_looked_into_is_guarded():
    class Chosen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.names = ["a", "b", "a"]

        def forward(self, x):
            return x * self.names.index("a", 1) + self.names.count("b")

    m = Chosen()
    jm = thunder.jit(m, transforms=[NormTransform()])
    x = torch.ones(2)
    assert torch.equal(jm(x), m(x))
    m.names[1] = "a"
    assert torch.equal(jm(x), m(x))


def _unbound(x):
    del z  # noqa: F821 - that is what Python says, too
    z = 1
    return x * z


def _unbound_after_a_first(x):
    z = x
    del z
    del z  # noqa: F821
    return x


def _sum(*values):
    return sum(values)


_MISUSED = {
    "a variable that is not bound yet": _unbound,
    "a variable that is deleted twice": _unbound_after_a_first,
    "a number for arguments": lambda x: _sum(*5),
    "nothing called": lambda x: (lambda f: f(x))(None),
    "nothing called with a list": lambda x: (lambda f: f(*[x]))(None),
    "a number of a tensor called": lambda x: x.sum().item()(x),
    "a number of a tensor indexed": lambda x: x.sum().item()[0],
}


@pytest.mark.parametrize("name", _MISUSED)
def test_what_python_refuses_it_refuses_in_its_words(name):
    with pytest.raises((TypeError, UnboundLocalError)) as expected:
        _MISUSED[name](torch.ones(2))
    with pytest.raises(expected.type) as found:
        thunder.jit(_MISUSED[name], transforms=[NormTransform()])(torch.ones(2))
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_lists_of_bools_are_masks_of_what_requires_grad(transform):
    def program(x):
        return x[:, [True, False, True]], x[[False, True], 0], x[..., [True, False, False]]

    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    found, expected = thunder.jit(program, transforms=[transform()])(x), program(x)
    torch.testing.assert_close(found, expected)
    (found, expected) = (torch.autograd.grad([y.square().sum() for y in of], x) for of in (found, expected))
    torch.testing.assert_close(found, expected)
