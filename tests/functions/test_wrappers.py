"""Transformed functions of wrapper subclasses in torch's autograd: connected as eager is, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_flatten

import thunder_norm.transforms as T
from tests.compiled_classes import Affine
from tests.transform_oracles import assert_same, float64
from thunder_norm import RMSTensor
from thunder_norm.errors import TransformError, TransformTypeError
import thunder

A = float64(3, 4)
W = float64(4)


def two() -> Any:
    return TwoTensor(A.clone(), A * 2).requires_grad_()


def _cubes(t: torch.Tensor) -> torch.Tensor:
    return (t * t * t).sum()


def test_gradients_of_wrappers_are_differentiated_again() -> None:
    t = two()
    gradient = T.grad(_cubes)(t)
    (second,) = torch.autograd.grad(gradient.sum(), t)
    assert type(second) is TwoTensor
    assert_same((gradient.a, gradient.b, second.a, second.b), (3 * A**2, 12 * A**2, 6 * A, 12 * A))


def test_several_wrappers_one_of_which_requires_no_grad() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).sin()

    fixed, t, expected = TwoTensor(A, A), two(), two()
    T.vmap(f)(t, fixed).sum().backward()
    f(expected, fixed).sum().backward()
    assert_same((t.grad.a, t.grad.b), (expected.grad.a, expected.grad.b))


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "in jit"])
def test_a_plain_tensor_that_requires_grad_meets_wrappers(transform: str) -> None:
    w = W.clone().requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (TwoTensor(x, x) * w).a.square().sum()

    programs = {
        "grad": T.grad(loss),
        "vmap": T.vmap(loss),
        "jvp": lambda x: T.jvp(loss, (x,), (x,))[1],
        "in jit": thunder.jit(lambda x: T.grad(loss)(x), transforms=[T.SubclassTransform()]),
    }
    expected = {
        "grad": lambda x, w: 2 * x * w * w,
        "vmap": lambda x, w: (x * w).square().sum(1),
        "jvp": lambda x, w: 2 * (x * w).square().sum(),
        "in jit": lambda x, w: 2 * x * w * w,
    }
    found, known = programs[transform](A), expected[transform](A, w)
    assert_same(found, known)
    assert_same(torch.autograd.grad(found.sin().sum(), w), torch.autograd.grad(known.sin().sum(), w))


def test_sizes_of_norms_are_connected() -> None:
    weight = float64(5, 4).requires_grad_()
    x = RMSTensor(torch.tensor(2.0, dtype=torch.float64, requires_grad=True), backing=A)

    def size(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(F.linear(x, weight)).norm_size ** 3

    gradient = T.grad(size)(x).norm_size
    (expected,) = torch.autograd.grad(size(x), x.norm_size, create_graph=True)
    assert_same(gradient, expected)
    assert_same(*(torch.autograd.grad(g, [x.norm_size, weight]) for g in (gradient, expected)))
    batched = T.vmap(lambda t: torch.tanh(t) * 3)(TwoTensor(A, A))
    assert not batched.requires_grad


def test_parameters_beside_the_arguments_are_connected_to_any_order() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    parameters = list(net.parameters())

    def derivatives(f: Any) -> list:
        found, loss = [], f(A).square().sum()
        for _ in range(3):
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            found += gradients
            loss = sum(g.square().sum() for g in gradients)
        return found

    assert_same(derivatives(T.vmap(net)), derivatives(net))
    p = W.clone().requires_grad_()
    assert T.vmap(lambda x: (x.sum(), p), out_dims=(0, None))(A)[1] is p


def _gradient_without_a_graph(t: Any) -> Any:
    with torch.no_grad():
        return T.grad(_cubes)(t)


def test_what_would_lose_gradients_is_refused() -> None:
    hidden = two()
    with pytest.raises(TransformError, match="a TwoTensor that requires grad and is not among its arguments"):
        T.grad(lambda x: (x * hidden).sum())(TwoTensor(A, A))
    with torch.no_grad():
        assert_same(T.grad(lambda x: (x * hidden).sum())(TwoTensor(A, A)).b, 2 * A)
    jitted = thunder.jit(lambda t: T.grad(_cubes)(t), transforms=[T.SubclassTransform()])
    with pytest.raises(TransformError, match="wrappers that require grad"):
        jitted(two())
    met_inside = thunder.jit(lambda x: T.grad(lambda x: (x * hidden).a.sum())(x), transforms=[T.SubclassTransform()])
    with pytest.raises(TransformError, match="wrappers that require grad"):
        met_inside(A)
    with pytest.raises(TransformError, match="wrappers that require grad"):
        thunder.jit(_gradient_without_a_graph, transforms=[T.SubclassTransform()])(two())
    assert_same(jitted(two().detach()).a, 3 * A**2)


BESIDE_QUANTISED: dict[str, Callable] = {
    "grad": lambda w, x: torch.func.grad(lambda v: F.linear(v, w).sin().sum())(x),
    "grad and value": lambda w, x: torch.func.grad_and_value(lambda v: (F.linear(v, w, v.sum(-1)[:1]) ** 2).mean())(x),
    "vjp": lambda w, x: torch.func.vjp(lambda v: F.linear(v, w).sin(), x)[1](x[:, :4]),
    "jvp": lambda w, x: torch.func.jvp(lambda v: F.linear(v, w).sin(), (x,), (x * 2,)),
    "jacrev": lambda w, x: torch.func.jacrev(lambda v: F.linear(v, w).sum(0))(x),
}


@pytest.mark.parametrize("name", BESIDE_QUANTISED)
def test_torchs_derivatives_of_plain_tensors_where_a_class_has_the_operation_itself(name: str) -> None:
    """Its ``__torch_function__`` multiplies by its integers: torch differentiates that."""
    f, w, x = BESIDE_QUANTISED[name], Affine.from_float(float64(4, 6)), float64(2, 6)
    jitted = thunder.jit(f, transforms=[T.SubclassTransform()])
    for _ in range(2):
        assert_same(jitted(w, x), f(w, x))


def test_what_torch_differentiates_has_no_inner_tensors() -> None:
    f, w = (lambda w, x: torch.func.grad(lambda v: (v * w).a.sum())(x)), TwoTensor(A, 2 * A)
    for g in (f, thunder.jit(f, transforms=[T.SubclassTransform()])):
        with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'a'"):
            g(w, A)


OF_WRAPPERS: dict[str, Callable] = {
    "entry by entry": lambda v: v.sin() * 2,
    "a number": lambda v: v.square().sum(),
    "a product": lambda v: v @ torch.ones(6, 2, dtype=v.dtype),
    "all entries": lambda v: v.softmax(-1) * v.sum(),
    "parts": lambda v: torch.cat([v[:1], v[1:] * v[:-1]]),
    "several": lambda v: {"a": v.sin(), "b": [v.sum(0)]},
    "itself": lambda v: v,
}


@pytest.mark.parametrize("jacobian", [torch.func.jacrev, torch.func.jacfwd])
@pytest.mark.parametrize("name", OF_WRAPPERS)
def test_torchs_jacobian_of_a_wrapper_is_a_wrapper(name: str, jacobian: Callable) -> None:
    f = OF_WRAPPERS[name]

    def program(x: torch.Tensor) -> Any:
        return jacobian(f)(x), jacobian(lambda u, v: f(u * v), argnums=(0, 1))(x, x + 1)

    x = TwoTensor(float64(2, 6), float64(2, 6))
    if torch.__version__ < (2, 15):  # torch 2.11 gives some such wrappers a storage on meta, and refuses that
        try:
            program(x)
        except RuntimeError as e:
            pytest.skip(f"eager mode of torch {torch.__version__}: {e}")
    jitted = thunder.jit(program, transforms=[T.SubclassTransform()])
    for _ in range(2):
        leaves, wanted = tree_flatten(jitted(x))[0], tree_flatten(program(x))[0]
        assert [type(t) for t in leaves] == [type(t) for t in wanted]
        for found, eager in zip(leaves, wanted, strict=True):
            assert_same(found.a, eager.a)
            assert_same(found.b, eager.b)


def test_our_jacobian_of_a_wrapper_is_refused() -> None:
    with pytest.raises(TransformTypeError, match="jacrev of a function that returns a TwoTensor"):
        thunder.jit(lambda x: T.jacrev(torch.sin)(x), transforms=[T.SubclassTransform()])(TwoTensor(A, A))


class Halved(TwoTensor):
    """Its ``__torch_function__`` multiplies by one of its tensors, what torch asks of it afterwards goes to both."""

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["a"], inner["b"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.mul and isinstance(args[1], cls) and not isinstance(args[0], cls):
            return args[0] * args[1].a / 2
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_torchs_derivatives_of_a_wrapper_around_those_of_a_plain_tensor() -> None:
    """Torch does not ask ``__torch_function__`` of what it differentiates."""

    def outer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda u: torch.func.grad(lambda v: v.mul(u).sin().sum())(x).sum())(w)

    def inner(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda v: v.mul(w).sin().sum())(x)

    w = Halved(A.clone(), 2 * A)
    assert_same(thunder.jit(inner, transforms=[T.SubclassTransform()])(w, A), inner(w, A))
    found, expected = thunder.jit(outer, transforms=[T.SubclassTransform()])(w, A), outer(w, A)
    assert_same((found.a, found.b), (expected.a, expected.b))


_OF_PLAIN_TENSORS = {
    "a mask": lambda x, t: x * torch.vmap(lambda i: torch.vmap(lambda j: i >= j)(torch.arange(4)))(torch.arange(3)),
    "grad": lambda x, t: x * torch.func.grad(lambda t: (t * t).sum())(t),
    "jacrev": lambda x, t: x + torch.func.jacrev(lambda t: (t * t).sum(0))(t).sum(),
    "jvp": lambda x, t: torch.func.jvp(torch.sin, (t,), (t,))[1] * x,
}


@pytest.mark.parametrize("name", _OF_PLAIN_TENSORS)
def test_of_plain_tensors_beside_wrappers_that_require_grad(name: str) -> None:
    f, t = _OF_PLAIN_TENSORS[name], torch.randn(3, 4)
    gradients = []
    for program in (f, thunder.jit(f, transforms=[T.SubclassTransform()])):
        x = TwoTensor(t, t + 1).requires_grad_()
        result = program(x, t)
        result.sum().backward()
        gradients.append((result.a, result.b, x.grad.a, x.grad.b))
    torch.testing.assert_close(*gradients)
