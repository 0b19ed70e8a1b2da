"""What a prologue checks is what Thunder's own comparison of each check with all before it keeps, in the same order."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from tests.seeds import seeded
from thunder_norm.tracing.native.constraints import REPLACEMENTS
from thunder.core import devices, dtypes, jit_ext
from thunder.core.proxies import AnyProxy, StringProxy, TensorProxy, variableify
from thunder.core.trace import TraceCtx, tracectx

_thunders = REPLACEMENTS[0].original
_ours = REPLACEMENTS[0].native


def _drawn(generator: random.Random) -> list[tuple]:
    with tracectx(TraceCtx()):
        tensors = [TensorProxy(f"t{i}", shape=(2,), device=devices.cpu, dtype=dtypes.float32) for i in range(4)]
        others = [AnyProxy(torch.device("cpu"), name="d"), StringProxy("x", name="s")]
    functions = [
        jit_ext.clang.check_tensor_shape_and_metadata,
        jit_ext.clang.check_literal_like,
        jit_ext.clang.check_string_value,
    ]
    constants = [1, 1.0, 2, "x", torch.device("cpu"), None, torch.float32]
    found = []
    for _ in range(80):
        kind = generator.randrange(4)
        if kind == 0:
            found.append((functions[0], generator.choice(tensors)))
        elif kind == 1:
            found.append((generator.choice(functions[1:]), generator.choice([*tensors, *others]), generator.choice(constants)))
        elif kind == 2:
            found.append((functions[0], generator.choice(tensors), generator.choice(tensors)))
        else:
            found.append((generator.choice([print, len]),))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_each_check_is_kept_once(seed):
    given = _drawn(random.Random(seeded(seed)))
    one, other = SimpleNamespace(_constraints=[]), SimpleNamespace(_constraints=[])
    for n, constraint in enumerate(given):
        _thunders(one, constraint)
        _ours(other, constraint)
        if n == 40:  # others remove some, and replace them
            for ctx in (one, other):
                ctx._constraints[:] = [tuple(c) for c in ctx._constraints[3:]]
        if n == 60:
            for ctx in (one, other):
                ctx._constraints = ctx._constraints[:-2]
        assert len(one._constraints) == len(other._constraints)
    assert all(a is b for a, b in zip(one._constraints, other._constraints, strict=True))
    assert len(one._constraints) < len(given)


def test_inputs_are_found_by_name():
    """As a list finds them: the first of those that are equal, which are those of one name."""
    with tracectx(TraceCtx()):
        tensors = [TensorProxy(f"t{i}", shape=(2,), device=devices.cpu, dtype=dtypes.float32) for i in range(4)]
    with tracectx(TraceCtx()):
        again = [TensorProxy(f"t{i}", shape=(2,), device=devices.cpu, dtype=dtypes.float32) for i in range(6)]
    variables = [variableify(t) for t in (tensors[2], tensors[0], again[0], tensors[3])]
    order = {"t2": 1, "t0": 0, "t3": 0}
    named = REPLACEMENTS[1].native(variables, key=lambda v: order[v.proxy.name])
    plain = sorted(variables, key=lambda v: order[v.proxy.name])
    assert all(a is b for a, b in zip(named, plain, strict=True))
    for t in again:
        v = variableify(t)
        assert (v in named) == (v in plain)
        if v in plain:
            assert named.index(v) == plain.index(v)
    assert REPLACEMENTS[1].native([3, 1, 2]) == [1, 2, 3]
