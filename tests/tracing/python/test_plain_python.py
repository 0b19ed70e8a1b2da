"""Plain Python in traced programs does what it does in eager mode: lists, dicts, callbacks, operators, classes and exceptions."""

from __future__ import annotations

import collections
import operator

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


def _of_nothing():
    class Named:
        value = nothing  # noqa: F821

    return Named


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
    "the length of nothing": lambda x: len(),
    "the length of two": lambda x: len([x], [x]),
    "the length of a generator": lambda x: len(i for i in range(3)),
    "an instance of a number": lambda x: isinstance(x, 5),
    "an instance of numbers in tuples": lambda x: isinstance(1, (str, (5,))),
    "an instance of nothing": lambda x: isinstance(x),
    "the next of nothing": lambda x: next(),
    "the type of nothing": lambda x: type(),
    "an attribute without a name": lambda x: getattr(x),
    "an attribute without a value": lambda x: setattr(x),
    "an attribute of a number": lambda x: hasattr(x, 5),
    "a number enumerated": lambda x: enumerate(5),
    "nothing enumerated": lambda x: enumerate(),
    "globals of a number": lambda x: globals(5),
    "a program that is none": lambda x: exec("1 +"),
    "a number as a program": lambda x: exec(5),
    "names of a program in a list": lambda x: eval("x", [x]),  # noqa: S307
    "names of statements in a list": lambda x: exec("x", [x]),  # noqa: S102
    "a program with too much": lambda x: eval("x", {}, {}, x),  # noqa: S307
    "a name of nothing in a program": lambda x: eval("x * nothing", {"x": x}),  # noqa: S307
    "a name of nothing in a class": lambda x: _of_nothing(),
    "tensors joined": lambda x: operator.concat(x, x),
    "a tensor joined to itself": lambda x: operator.iconcat(x, x),
    "a list joined to a tensor": lambda x: operator.concat([x], x),
    "numbers joined": lambda x: operator.iconcat(3, 2),
    "one thing joined": lambda x: operator.concat([x]),
}


@pytest.mark.parametrize("name", _MISUSED)
def test_what_python_refuses_it_refuses_in_its_words(name):
    with pytest.raises((TypeError, NameError, SyntaxError)) as expected:
        _MISUSED[name](torch.ones(2))
    with pytest.raises(expected.type) as found:
        thunder.jit(_MISUSED[name], transforms=[NormTransform()])(torch.ones(2))
    assert str(found.value) == str(expected.value)


def test_a_program_handles_what_python_refuses():
    def program(x):
        made = []
        for refused in (lambda: isinstance(x, 5), lambda: len(), lambda: exec("1 +"), lambda: operator.concat(x, x)):
            try:
                refused()
            except (TypeError, SyntaxError):
                made.append(x * (len(made) + 2))
        return operator.concat(made, [x])

    x = torch.ones(2)
    found = thunder.jit(program, transforms=[NormTransform()])(x)
    assert len(found) == 5
    assert all(torch.equal(a, b) for a, b in zip(found, program(x), strict=True))


@pytest.mark.parametrize(
    "use",
    [
        lambda d, n: d.rotate(n),
        lambda d, n: collections.deque.rotate(d, -n),
        lambda d, n: d.insert(n, d[n] * 5),
        lambda d, n: d.__delitem__(n),
        lambda d, n: d.__imul__(n),
    ],
)
def test_a_deque_is_told_numbers_of_tensors(use):
    def program(x, n):
        made = collections.deque([x, x * 2, x * 3])
        use(made, n.item())
        return tuple(made)

    jf = thunder.jit(program, transforms=[NormTransform()])
    for n in (2, 1):
        given = torch.tensor([1.0, 3.0]), torch.tensor(n)
        assert all(torch.equal(a, b) for a, b in zip(jf(*given), program(*given), strict=True))


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_lists_of_bools_are_masks_of_what_requires_grad(transform):
    def program(x):
        return x[:, [True, False, True]], x[[False, True], 0], x[..., [True, False, False]]

    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    found, expected = thunder.jit(program, transforms=[transform()])(x), program(x)
    torch.testing.assert_close(found, expected)
    (found, expected) = (torch.autograd.grad([y.square().sum() for y in of], x) for of in (found, expected))
    torch.testing.assert_close(found, expected)
