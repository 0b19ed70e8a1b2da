"""What runs in each call: guards on given norms, building wrappers, programs without copies."""

from __future__ import annotations

import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import OpCounter
from thunder_norm import LinfTensor, RMSTensor, RMSToRMSTensor, with_perturbation
from thunder_norm.subclass.classes.protocol import WrapperSpec
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


def _names(trace) -> list[str]:
    return [b.sym.name for b in trace.bound_symbols]


def test_given_norms_are_read_anew_and_other_kinds_are_traced_anew():
    torch.manual_seed(seeded(0))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    given = {
        "0.weight": RMSToRMSTensor(2.0, norm_size_requires_grad=True),
        "0.bias": RMSTensor(1.0),
        "2.weight": torch.tensor(3.0, dtype=torch.float64),
        "2.bias": 0.5,
    }
    jitted = thunder.jit(model, transforms=[NormTransform(parameters=given)])
    x = RMSTensor(1.0, backing=torch.rand(2, 4))

    def norm() -> float:
        return jitted(x).norm_size.item()

    assert norm() == (1 * 2 + 1) * 3 + 0.5
    given["0.weight"] = RMSToRMSTensor(4.0, norm_size_requires_grad=True)
    given["2.bias"] = 1.5
    given["2.weight"].fill_(1.0)
    assert norm() == (1 * 4 + 1) * 1 + 1.5
    assert thunder.cache_misses(jitted) == 1

    given["0.bias"] = LinfTensor(2.0)
    assert norm() == (1 * 4 + 2) * 1 + 1.5
    assert thunder.cache_misses(jitted) == 2
    given["0.weight"] = RMSToRMSTensor(4.0)
    assert norm() == (1 * 4 + 2) * 1 + 1.5
    assert thunder.cache_misses(jitted) == 3
    given["2.weight"] = with_perturbation(RMSToRMSTensor(1.0))
    assert jitted(x).perturbation_size.requires_grad
    assert thunder.cache_misses(jitted) == 4
    given["2.weight"] = RMSToRMSTensor(1.0, elem_dims=(-2, -1))
    given["0.bias"] = RMSTensor(2.0)
    assert norm() == (1 * 4 + 2) * 1 + 1.5


def test_nested_wrappers_are_taken_apart_and_rebuilt():
    leaves = [torch.randn(2, 3) for _ in range(4)]
    x = TwoTensor(TwoTensor(leaves[0], leaves[1]), TwoTensor(leaves[2], leaves[3]))
    spec = WrapperSpec.of(x)
    assert [id(t) for t in spec.leaves(x)] == [id(t) for t in leaves]
    rebuilt = spec.build(spec.leaves(x))
    assert spec.matches(rebuilt) and rebuilt.b.a is leaves[2]
    assert not spec.matches(TwoTensor(leaves[0], leaves[1]))
    assert not spec.matches(TwoTensor(TwoTensor(leaves[0], leaves[1]), leaves[2]))


def test_a_linear_layer_on_a_wrapper_runs_as_one_linear_for_each_tensor():
    torch.manual_seed(seeded(0))
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4, bias=False))
    x = TwoTensor(torch.randn(3, 4), torch.randn(3, 4))
    jitted = thunder.jit(model, transforms=[SubclassTransform()])
    with torch.no_grad():
        y, expected = jitted(x), model(x)
    assert torch.equal(y.a, expected.a) and torch.equal(y.b, expected.b)
    names = _names(thunder.last_traces(jitted)[-1])
    assert names.count("linear") == 2 and "shallow_copy" not in names


def test_without_copies_gradients_are_the_same():
    torch.manual_seed(seeded(0))
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
    inner = torch.randn(3, 4, requires_grad=True)
    y = thunder.jit(model, transforms=[SubclassTransform()])(OpCounter(inner))
    found = torch.autograd.grad(y.value.square().sum(), [inner, *model.parameters()])
    expected = torch.autograd.grad(model(inner).square().sum(), [inner, *model.parameters()])
    torch.testing.assert_close(found, expected)


def test_a_copy_that_is_returned_beside_its_original_stays_another_tensor():
    def f(x: TwoTensor):
        y = x * 2
        return y, y.view_as(y), x

    x = TwoTensor(torch.randn(3), torch.randn(3))
    y, view, same = thunder.jit(f, transforms=[SubclassTransform()])(x)
    torch.testing.assert_close(view.a, y.a)
    assert same.a is x.a and same.b is x.b
