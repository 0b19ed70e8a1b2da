"""A write through whatever view of an input, by attribute, by a function or by an operation that may do nothing, is one into the input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm.transforms import NormTransform, SplitBiasTransform, SubclassTransform
import thunder

_VIEWS = {
    "T": lambda t: t.T,
    "mT": lambda t: t.mT,
    "H": lambda t: t.H,
    "a row of T": lambda t: t.T[0],
    "T of T": lambda t: t.T.T,
    "data.T": lambda t: t.data.T,
    "mT, unsqueezed": lambda t: t.mT.unsqueeze(0),
    "moveaxis": lambda t: t.moveaxis(0, 1),
    "ravel": lambda t: t.ravel(),
    "atleast_3d": lambda t: torch.atleast_3d(t),
    "dsplit": lambda t: torch.dsplit(t[None], 1)[0],
    "as_strided": lambda t: torch.as_strided(t, (2,), (2,)),
    "type_as": lambda t: t.type_as(t),
    "cpu": lambda t: t.cpu(),
    "dropout of nothing": lambda t: F.dropout(t, 0.5, False),
    "conj of real numbers": lambda t: torch.conj(t),
}
_WRITES = {
    "mul_": lambda v, c: v.mul_(2),
    "copy_": lambda v, c: v.copy_(c),
    "assigned": lambda v, c: v.__setitem__(0, c),
    "out": lambda v, c: torch.sin(v, out=v),
}


def _run(f, requires_grad, count=1):
    torch.manual_seed(seeded(0))
    given = [torch.randn(3, 3, requires_grad=requires_grad) for _ in range(count)]
    results = f(given, torch.tensor(0.3))
    made = torch.autograd.grad(sum(r.sin().sum() for r in results), given) if requires_grad else ()
    return [t.detach() for t in (*results, *given)], made


@pytest.mark.parametrize(("write", "requires_grad"), [("out", False), *((write, True) for write in _WRITES)])
def test_what_is_written_through_a_view_is_in_the_input(write, requires_grad):
    def f(given, c):
        results = []
        for x, view in zip(given, _VIEWS.values(), strict=True):
            results.append(x * 2)
            with torch.no_grad():
                _WRITES[write](view(x), c)
            results.append(x * x.detach())
        return results

    expected = _run(f, requires_grad, len(_VIEWS))
    found = _run(thunder.jit(f, transforms=[SubclassTransform()]), requires_grad, len(_VIEWS))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("transform", [NormTransform, SplitBiasTransform])
def test_tied_weights_are_written_through_their_transpose_under_every_transform(transform):
    def f(given, c):
        (x,) = given
        with torch.no_grad():
            x.T.copy_(x.T * c)
        return x.sin(), x * 2

    torch.testing.assert_close(_run(thunder.jit(f, transforms=[transform()]), True), _run(f, True))


def test_a_view_of_a_result_is_written_through_an_attribute():
    def f(x):
        y = x * 3
        v = y.T
        torch.sin(v, out=v)
        w = y.mT
        w += 1
        return y.exp(), v

    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    torch.testing.assert_close(thunder.jit(f, transforms=[SubclassTransform()])(x), f(x))


_WITHOUT_AUTOGRAD = {
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0]), x[:1].detach().clone()),
    "index_put_": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(3.0)),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0]), 5.0),
}


@pytest.mark.parametrize("write", _WITHOUT_AUTOGRAD)
def test_an_input_that_is_returned_after_a_write_is_itself(write):
    def f(given, c):
        (x,) = given
        with torch.no_grad():
            _WITHOUT_AUTOGRAD[write](x)
        return x, x * 2

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    torch.testing.assert_close(_run(jf, True), _run(f, True))
    x = torch.ones(2, 2, requires_grad=True)
    assert jf([x], None)[0] is x


def test_what_a_written_tensor_gives_an_input_is_followed():
    def f(x, c):
        with torch.no_grad():
            x += 1
        c.copy_(x.sum())
        return c

    found = []
    for run in (f, thunder.jit(f, transforms=[SubclassTransform()])):
        leaf = torch.ones(2, requires_grad=True)
        c = torch.zeros(2)
        assert run(leaf.sin(), c) is c
        found.append((c.detach(), torch.autograd.grad(c.sum(), leaf)[0]))
    torch.testing.assert_close(found[1], found[0])
