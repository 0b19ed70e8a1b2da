"""``a is b`` of tensors: operations that return their tensor as it is return the same object, others do not."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

_PAIRS = {
    "in place": lambda y: (y.mul_(2), y),
    "in place, after others": lambda y: (y.add_(1).relu_(), y),
    "of a function in place": lambda y: (F.relu(y, inplace=True), y),
    "a function of two names": lambda y: (torch.relu_(y), y.add_(1)),
    "operator in place": lambda y: (y.__imul__(2), y),
    "out=": lambda y: (torch.add(y, 1, out=(o := torch.empty(4))), o),
    "copy_": lambda y: ((z := torch.zeros(4)).copy_(y), z),
    "cast to what it is": lambda y: (y.to(torch.float32), y),
    "cast to another": lambda y: (y.to(torch.float64), y),
    "cast with copy": lambda y: (y.to(torch.float32, copy=True), y),
    "float, cpu, type_as": lambda y: (y.float().cpu().type_as(y), y),
    "type": lambda y: (y.type(torch.float32), y),
    "byte": lambda y: (y.byte(), y),
    "dropout": lambda y: (F.dropout(y, 0.5), y),
    "dropout of none": lambda y: (F.dropout(y, 0.0), y),
    "dropout in evaluation": lambda y: (F.dropout(y, 0.5, False), y),
    "identity": lambda y: (torch.nn.Identity()(y), y),
    "positive": lambda y: (+y, y),
    "conj and real": lambda y: (y.conj().real, y),
    "conj of a complex one": lambda y: ((z := torch.complex(y, y)).conj(), z),
    "real of a complex one": lambda y: ((z := torch.complex(y, y)).real, z),
    "atleast_1d": lambda y: (torch.atleast_1d(y), y),
    "atleast_2d": lambda y: (torch.atleast_2d(y), y),
    "flatten": lambda y: (y.flatten(), y),
    "flatten of two": lambda y: (y[None].flatten(), y),
    "broadcast with a larger one": lambda y: (torch.broadcast_tensors(y, torch.ones(2, 4))[0], y),
    "view": lambda y: (y.view(4), y),
    "expand": lambda y: (y.expand(4), y),
    "detach": lambda y: (y.detach(), y),
    "clone": lambda y: (y.clone(), y),
    "contiguous": lambda y: (y.contiguous(), y),
    "contiguous of a transposed one": lambda y: ((z := y.view(2, 2).t()).contiguous(), z),
    "slice": lambda y: (y[:], y),
    "relu": lambda y: (F.relu(y), y),
    "repeat": lambda y: (y.repeat(1), y),
}


@pytest.mark.parametrize("pair", _PAIRS)
def test_is(pair: str) -> None:
    def f(x):
        a, b = _PAIRS[pair](x + 1)
        return a is b, a is not b, a is x, [a] == [a]

    x = torch.arange(4.0)
    assert thunder.jit(f, transforms=[NormTransform()])(x) == f(x)


def test_inputs_and_wrappers() -> None:
    def f(x):
        y = x.add_(1)
        return y is x, x.clone() is x, x.relu_() is y, x.detach() is x, x.to(torch.float32) is x

    for make in (lambda: torch.ones(3), lambda: TwoTensor(torch.ones(3), torch.ones(3))):
        assert thunder.jit(f, transforms=[SubclassTransform()])(make()) == f(make())


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_in_transforms(transform) -> None:
    def of_row(v):
        z = v.clone()
        y = z.mul_(2)
        return y.sum() if y is z else y.sum() * 100

    x = torch.ones(2, 3) if transform is torch.vmap else torch.ones(3)
    jf = thunder.jit(lambda x: transform(of_row)(x), transforms=[NormTransform()])
    torch.testing.assert_close(jf(x), transform(of_row)(x))


def _read_by_another_name(x, w, ws, held):
    torch._foreach_add_(ws, 1.0)
    return w * x, ws[0] * 3, held["w"] * 2


def _written_by_each_name(x, w, ws, held):
    found = []
    for names in ([w], ws[:1], [held["w"]]):
        before = w * 2
        torch._foreach_mul_(names, 2.0)
        found += [before, w + 1, ws[0] * 2, held["w"] - 1]
    return found


def _view_by_another_name(x, w, ws, held):
    part, whole = w[1:], held["w"].view(-1)
    torch._foreach_add_(ws, 1.0)
    whole.mul_(2)
    return part * 2, whole * 1, ws[0].sum()


def _returned_by_each_name(x, w, ws, held):
    torch._foreach_mul_([w], 3.0)
    return w, ws[0], held["w"], w is ws[0]


def _differentiated(x, w, ws, held):
    with torch.no_grad():
        torch._foreach_add_(ws, 1.0)
    return (w * x).sum() + (held["w"] ** 2).sum()


_OF_NAMES = [_read_by_another_name, _written_by_each_name, _view_by_another_name, _returned_by_each_name, _differentiated]


@pytest.mark.parametrize("f", _OF_NAMES, ids=lambda f: f.__name__)
def test_what_is_written_into_one_name_of_a_tensor_is_written_into_all(f):
    def outcome(jit):
        w, other = torch.arange(3.0).requires_grad_(f is _differentiated), torch.ones(3)
        ws, held, found = [w, other], {"w": w}, []
        jitted = jit(lambda x: f(x, w, ws, held))
        for n in range(2):
            results = jitted(torch.full((3,), n + 2.0))
            if f is _differentiated:
                results.backward()
                results = results.detach(), w.grad.clone()
            found += [t.clone() if isinstance(t, torch.Tensor) else t for t in (*results, w.detach(), other)]
        return found

    wanted = outcome(lambda g: g)
    for transform in (SubclassTransform, NormTransform):
        torch.testing.assert_close(outcome(lambda g: thunder.jit(g, transforms=[transform()])), wanted)  # noqa: B023 - called here
