"""Results in one memory that are several objects in eager mode: what is done to one of them outside is not seen at another."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm.transforms import SubclassTransform
import thunder

PROGRAMS = {
    "detached input": lambda x: (x.detach(), x.detach()),
    "data of an input": lambda x: (x.data,),
    "made, and detached": lambda x: ((y := x * 2), y.detach()),
    "detached, and what is inside": lambda x: ((y := x * 2).detach(), y.a),
    "plain, of an input": lambda x: (x.a, x.a.detach()),
    "plain, of what is made": lambda x: ((y := x * 2).a, y.a.detach()),
    "aliases": lambda x: (torch.ops.aten.alias(x), torch.ops.aten.alias(x * 2)),
    "what is inside of several": lambda x: (TwoTensor(x.a, x.b), TwoTensor(x.b, x.a), TwoTensor(y := x.a * 2, y), y),
    "a view, put together": lambda x: (TwoTensor(x.a.detach(), x.b.view(3)),),
}


def _plain(*given):
    return [t for v in given for t in ((v.a, v.b) if isinstance(v, TwoTensor) else (v,))]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_result_is_the_object_that_it_is_in_eager_mode(name: str, requires_grad: bool):
    program = PROGRAMS[name]

    def outcome(call):
        torch.manual_seed(seeded(0))
        x = TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_(requires_grad)
        found = _plain(x, *call(x))
        objects = [[a is b for b in found] for a in found]
        memory = [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in found] for a in found]
        return objects, memory, [t.detach().tolist() for t in found]

    jitted = thunder.jit(lambda x: program(x), transforms=[SubclassTransform()])
    want = outcome(program)
    assert outcome(jitted) == want
    assert outcome(jitted) == want


def test_a_flag_that_is_set_outside_is_not_set_on_the_input():
    x = TwoTensor(torch.ones(3), torch.ones(3))
    y = thunder.jit(lambda x: x.detach(), transforms=[SubclassTransform()])(x)
    y.a.requires_grad_()
    assert not x.a.requires_grad
