"""Classes derived from torch.Tensor without a ``__torch_dispatch__``: eager's answers, or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant, causal_lower_right, causal_upper_left
from torchvision import tv_tensors

from tests.seeds import seeded
from tests.subclass import vector_kinds
from tests.subclasses import assert_same
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


class _Doubling(torch.Tensor):
    factor = 2.0

    def double(self):  # torch's converts to float64
        return self * self.factor

    def scaled(self, by, *, shift=0.0):
        return torch.Tensor.mul(self, by) + shift

    @property
    def half(self):
        return self / 2

    @classmethod
    def three(cls):
        return cls.factor + 1

    @staticmethod
    def four():
        return 4.0


class _Quadrupling(_Doubling):
    factor = 4.0


class _Shifted(torch.Tensor):
    def __add__(self, other):
        return torch.mul(self, other)


class _Flipped(torch.Tensor):
    def __lt__(self, other):
        return torch.gt(self, other)


_READ = {
    "method that torch has": lambda x: x.double(),
    "method": lambda x: x.scaled(3.0, shift=1.0),
    "bound": lambda x: [f(2.0) for f in [x.scaled]][0],
    "property": lambda x: x.half,
    "class attribute": lambda x: torch.mul(x, x.factor),
    "class and static methods": lambda x: torch.mul(x, x.three() + x.four()),
    "metadata": lambda x: torch.mul(x, x.shape[0] + x.ndim),
}


@pytest.mark.parametrize("name", _READ)
def test_what_a_class_adds_is_used(name):
    torch.manual_seed(seeded(0))
    program, x = _READ[name], torch.randn(3)
    jf = thunder.jit(program, transforms=[SubclassTransform()])
    for cls in (_Doubling, _Quadrupling, _Doubling):
        torch.testing.assert_close(jf(x.as_subclass(cls)), program(x.as_subclass(cls)))
    if name == "method that torch has":
        torch.testing.assert_close(jf(x), x.double())


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
@pytest.mark.parametrize("cls", [_Shifted, _Flipped])
def test_operators_written_anew(cls, transform):
    x = torch.ones(2).as_subclass(cls)
    for program in (lambda x: x + 1, lambda x: x < 1, lambda x: x.sum()):
        assert_same(thunder.jit(program, transforms=[transform()])(x), program(x))


_MADE = {
    "method": lambda x: x.as_subclass(_Doubling).double(),
    "method, by its class": lambda x: torch.Tensor.as_subclass(x * 1, _Doubling).double(),
    "class": lambda x: _Doubling(x).double(),
    "of another library": lambda x: tv_tensors.Image(x) * 2,
    "_make_subclass": lambda x: torch.Tensor._make_subclass(_Doubling, x).double(),
}


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
@pytest.mark.parametrize("name", _MADE)
def test_tensors_of_such_a_class_are_made(name, transform):
    x = torch.ones(2, 2)
    assert_same(thunder.jit(_MADE[name], transforms=[transform()])(x), _MADE[name](x))


_GIVEN = causal_lower_right(4, 6)
_BIASED = {
    "lower right": lambda q, k: F.scaled_dot_product_attention(q, k, k, causal_lower_right(4, 6)),
    "upper left": lambda q, k: F.scaled_dot_product_attention(q, k, k, attn_mask=causal_upper_left(4, 6), scale=0.3),
    "by its class": lambda q, k: F.scaled_dot_product_attention(q, k, k, CausalBias(CausalVariant.LOWER_RIGHT, 4, 6)),
    "of a closure": lambda q, k: F.scaled_dot_product_attention(q, k, k, attn_mask=_GIVEN),
}


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
@pytest.mark.parametrize("name", _BIASED)
def test_causal_biases(name, transform):
    torch.manual_seed(seeded(1))
    q, k = torch.randn(1, 2, 4, 8, requires_grad=True), torch.randn(1, 2, 6, 8)
    results = [f(q, k) for f in (_BIASED[name], thunder.jit(_BIASED[name], transforms=[transform()]))]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*[torch.autograd.grad(r.square().sum(), q)[0] for r in results])


def test_another_causal_bias_is_another_trace():
    jf = thunder.jit(lambda q, k, bias: F.scaled_dot_product_attention(q, k, k, bias), transforms=[SubclassTransform()])
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    for bias in (causal_lower_right(4, 6), causal_upper_left(4, 6), causal_lower_right(4, 6), torch.zeros(4, 6)):
        torch.testing.assert_close(jf(q, k, bias), F.scaled_dot_product_attention(q, k, k, bias))


@pytest.mark.parametrize("kind", [vector_kinds.POINT, vector_kinds.DIRECTION])
@pytest.mark.parametrize("program", [lambda x: x.other(), lambda x: x.other().other().other()])
def test_objects_that_methods_of_an_input_name_stay_what_they_are(program, kind):
    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        x = vector_kinds.Vector(torch.ones(3), kind)
        want, got = program(x), jitted(x)
        assert type(got) is vector_kinds.Vector and got.kind is want.kind
        assert torch.equal(got.as_subclass(torch.Tensor), want.as_subclass(torch.Tensor))
