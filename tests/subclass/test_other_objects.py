"""Results in one memory that are several objects in eager mode: what is done to one of them outside is not seen at another."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from tests.seeds import seeded
from tests.subclasses import OneTensor, assert_same
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


class _Flagless(OneTensor):
    """Does not require grad, whatever is inside; what is done to it is done to what is inside, and no wrapper."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


HANDED_BACK = {
    "beside one around it": lambda x, w: (x, _Flagless(x)),
    "in one": lambda x, w: (_Flagless(x),),
    "in one, beside what is computed": lambda x, w: (_Flagless(x), x * 2, w * x),
    "in one of two": lambda x, w: (_Flagless(x * x), x, _Flagless(x)),
}


@pytest.mark.parametrize("name", HANDED_BACK)
def test_an_input_that_is_handed_back_is_the_very_tensor_with_gradients_of_its_own(name: str):
    program = HANDED_BACK[name]

    def outcome(call):
        torch.manual_seed(seeded(1))
        x = torch.randn(3, dtype=torch.float64, requires_grad=True)
        w = TwoTensor(torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)).requires_grad_()
        results = call(x, w)
        inner = [t.inner if isinstance(t, _Flagless) else t for t in results]
        torch.autograd.backward(
            [t for t in inner if not t.is_leaf], [t.detach() * 2 for t in inner if not t.is_leaf], retain_graph=True
        )
        return [t is x for t in inner], [t.requires_grad for t in (*results, *inner)], x.grad, w.grad

    jitted = thunder.jit(lambda x, w: program(x, w), transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(outcome(jitted), outcome(program))
