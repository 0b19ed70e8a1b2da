"""What code reads that a program comes to by syntax, by classes, or by functions in C is looked at before a trace is used again."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import crossed
from tests.tracing.guarding.reached_code import STATES, WAYS, reaching
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


@pytest.mark.parametrize(("way", "state", "transform"), crossed(WAYS, STATES, [SubclassTransform, NormTransform]))
def test_a_call_reads_what_it_reads_in_eager_mode(way, state, transform):
    (program, change), (expected, expected_change) = reaching(way, state), reaching(way, state)
    jitted = thunder.jit(program, transforms=[transform()])
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    results = []
    for _ in range(2):
        for f in (jitted, expected):
            y = f(x)
            results.append((y, *torch.autograd.grad(y.sum(), x)))
        change(), expected_change()
    before, expected_before, after, expected_after = results
    torch.testing.assert_close(before, expected_before)
    torch.testing.assert_close(after, expected_after)
    assert not all(map(torch.equal, expected_before, expected_after))  # or nothing has been compared


def test_the_name_of_a_class_and_what_patterns_match_are_looked_at():
    class Point:
        __match_args__ = ("x", "y")
        x, y = 2.0, 3.0

    point = Point()

    def program(t):
        match point:
            case Point(found):
                return t * found * len(type(point).__name__)

    jitted, t = thunder.jit(program, transforms=[SubclassTransform()]), torch.ones(2)
    assert torch.equal(jitted(t), program(t))
    Point.__match_args__ = ("y", "x")
    assert torch.equal(jitted(t), program(t))
    Point.__name__ = "Position"
    assert torch.equal(jitted(t), program(t))


def test_a_global_that_was_missed_is_used_once_it_is_there():
    names: dict = {}
    exec("def program(x):\n    try:\n        return x * scale\n    except NameError:\n        return x + 1", names)
    jitted, x = thunder.jit(names["program"], transforms=[SubclassTransform()]), torch.ones(2)
    assert torch.equal(jitted(x), x + 1)
    names["scale"] = 3.0
    assert torch.equal(jitted(x), 3 * x)
