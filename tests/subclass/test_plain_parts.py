"""Programs that ask for values again and again: each operation is compiled and run once for all that is asked."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm.subclass.acquiring import plain_parts
from thunder_norm.transforms import NormTransform
import thunder


def until_small(x):
    steps = 0
    while (x.abs().max() > 0.1).item():
        x = x / 2 + 0.01
        steps += 1
    return x * steps


def of_other_values(x):
    a, b = x.exp(), x.cos()
    found = []
    if a.sum() > 0:
        found.append(a)
    if b.sum() > 0:
        found.append(b * 2)
    c = a * b
    if (c.sum() + b.sum()).item() > -1e9:
        found.append(c)
    if x.sum() < 1e9:
        found.append(x)
    return torch.stack(found).sum(0)


def after_writes(x):
    y = x.exp()
    steps = 0
    while y.sum() < 100:
        y.mul_(2)
        if y.max() > 3:
            y = y + 1
        steps += 1
    return y + steps


def of_numbers(x):
    total = 0.0
    for i in range(4):
        n = (x[i] * 10).sum().item()
        if n + total > 0:
            total = total + n
    return x + total


@pytest.mark.parametrize("program", [until_small, of_other_values, after_writes, of_numbers])
def test_programs_that_ask_again_and_again_are_eager_mode_s(program):
    jitted = thunder.jit(program, transforms=[NormTransform()])
    for seed in range(4):
        torch.manual_seed(seeded(seed))
        x = torch.randn(4, 3) * (seed + 1)
        for _ in range(2):
            torch.testing.assert_close(jitted(x), program(x.clone()))


def test_each_operation_is_compiled_and_run_once(monkeypatch):
    compiled, ran = [], []
    of_operations = plain_parts.compiled

    def counted(wanted, operations, inputs):
        function = of_operations(wanted, operations, inputs)
        compiled.append(len(operations))

        def run(*given):
            ran.append(len(operations))
            return function(*given)

        return run

    monkeypatch.setattr(plain_parts, "compiled", counted)

    def program(x, n):
        for _ in range(n):
            x = x * 2 + 1
            if x.sum().item() > 1e9:
                return x
        return x

    found = []
    for n in (8, 16):
        x = torch.ones(3)
        torch.testing.assert_close(thunder.jit(program, transforms=[NormTransform()])(x, n), program(x, n))
        assert sum(ran) == sum(compiled)
        found.append(sum(compiled))
        compiled.clear()
        ran.clear()
    assert found[1] == 2 * found[0] > 0
