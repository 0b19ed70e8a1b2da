"""What transforms of functions refuse, with the user's line and what to do; nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import thunder_norm.transforms as T
from tests.transform_oracles import assert_same
from thunder_norm.errors import (
    DataDependentError,
    MissingTransformRuleError,
    ThunderNormError,
    TransformError,
    TransformLevelError,
    TransformTypeError,
)
from thunder_norm.functions.registry import vjp_rules
import thunder

X = torch.tensor([1.0, 2.0, 3.0])
BUFFER = torch.ones(3)


def _branch(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x.sum()
    return -x.sum()


def _variance(x):
    return x.std(correction=x.detach().min().item())


def _changes_its_argument(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.sum()


def _changes_a_captured_tensor(x: torch.Tensor) -> torch.Tensor:
    BUFFER.add_(x)
    return BUFFER.sum()


def _changes_what_may_be_a_view(x):
    y = x * 2
    z = y.reshape(-1)
    y.mul_(3)
    return (z * y.reshape(-1)).sum()


def _leaks(x: torch.Tensor) -> torch.Tensor:
    leaked = []

    def inner(y: torch.Tensor) -> torch.Tensor:
        leaked.append(y)
        return (y * 2).sum()

    T.grad(inner)(x)
    return (leaked[0] * x).sum()


def _raises(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("mine")


scalar, vector = (lambda x: x.sum()), (lambda x: x * 2)

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "vector loss": (lambda: T.grad(vector)(X), TransformError, ["scalar", "shape (3,)", "vjp"]),
    "integer argument": (lambda: T.grad(scalar)(X.long()), TransformTypeError, ["argument 0", "int64"]),
    "integer inside a tree": (lambda: T.grad(lambda d: d["a"].sum())({"a": X, "b": X.long()}), TransformTypeError, ["'b'"]),
    "number as argument": (lambda: T.grad(scalar)(3.0), TransformTypeError, ["argument 0 is no tensor", "float"]),
    "number as loss": (lambda: T.grad(lambda x: 3.0)(X), TransformTypeError, ["scalar tensor", "float"]),
    "integer loss": (lambda: T.grad(lambda x: x.argmax())(X), TransformTypeError, ["floating point loss", "int64"]),
    "complex loss": (lambda: T.grad(lambda x: (x * 1j).sum())(X), TransformTypeError, ["real loss", "complex64"]),
    "jacobian of complex numbers": (lambda: T.jacrev(lambda x: x * 1j)(X), TransformTypeError, ["real results", "view_as_real"]),
    "jacobian by complex numbers": (lambda: T.jacfwd(torch.abs)(X * 1j), TransformTypeError, ["real arguments"]),
    "no forward mode": (
        lambda: T.jvp(lambda x: torch.heaviside(x, X), (X,), (X,)),
        MissingTransformRuleError,
        ["torch has no derivative"],
    ),
    "no second derivative": (
        lambda: T.hessian(lambda x: torch.vander(x).sum())(X),
        MissingTransformRuleError,
        ["torch has no derivative"],
    ),
    "tuple as loss": (lambda: T.grad(lambda x: (x.sum(), x))(X), TransformTypeError, ["has_aux=True"]),
    "argnums out of range": (lambda: T.grad(scalar, argnums=2)(X), TransformError, ["argnums 2", "1 positional"]),
    "argnums by keyword": (lambda: T.grad(scalar)(x=X), TransformError, ["argnums 0", "by position"]),
    "argnums of a wrong type": (lambda: T.grad(scalar, argnums="x"), TransformTypeError, ["argnums", "'x'"]),
    "argnums twice": (lambda: T.grad(scalar, argnums=(0, 0)), TransformError, ["different arguments"]),
    "no aux": (lambda: T.grad(scalar, has_aux=True)(X), TransformTypeError, ["has_aux=True", "tuple"]),
    "no function": (lambda: T.grad(X), TransformTypeError, ["takes a function", "Tensor"]),
    "cotangent of another shape": (lambda: T.vjp(vector, X)[1](X[:2]), TransformError, ["shape (3,)", "shape (2,)"]),
    "cotangent of another structure": (lambda: T.vjp(vector, X)[1]((X,)), TransformError, ["structure"]),
    "cotangent of another dtype": (lambda: T.vjp(vector, X)[1](X + 1j), TransformError, ["float32", "complex64"]),
    "vjp of nothing": (lambda: T.vjp(vector), TransformError, ["at least one primal"]),
    "vjp of a number": (lambda: T.vjp(lambda x: (x, 1), X), TransformTypeError, ["int", "result[1]"]),
    "tangent of another shape": (lambda: T.jvp(vector, (X,), (X[:2],)), TransformError, ["(3,)", "(2,)"]),
    "jacobian of integers": (lambda: T.jacrev(lambda x: x.argsort())(X), TransformTypeError, ["jacrev", "int64"]),
    "jacobian chunk": (lambda: T.jacfwd(vector, chunk_size=0), TransformError, ["chunk_size"]),
    "samples differ in number": (lambda: T.vmap(torch.add)(X, X[:2]), TransformError, ["3 in", "2 in"]),
    "in_dims out of range": (lambda: T.vmap(vector, in_dims=1)(X), TransformError, ["in_dims is 1", "shape (3,)"]),
    "in_dims of another structure": (lambda: T.vmap(vector, in_dims=(0, 0))(X), TransformError, ["in_dims"]),
    "condition": (lambda: T.grad(_branch)(X), DataDependentError, ["if x.sum() > 0", "torch.where"]),
    "condition under vmap": (lambda: T.vmap(_branch)(X[None]), DataDependentError, ["if x.sum() > 0", "vmap"]),
    "float()": (lambda: T.grad(lambda x: x.sum() * float(x[0]))(X), DataDependentError, ["float()"]),
    "number of a sample": (lambda: T.vmap(lambda x: x * x.sum().item())(X[None]), DataDependentError, ["item"]),
    "unknown correction": (lambda: T.grad(_variance)(X), DataDependentError, ["the correction of a variance"]),
    "unknown correction forward": (lambda: T.jvp(_variance, (X,), (X,)), DataDependentError, ["correction of a variance"]),
    "in place on the argument": (lambda: T.grad(_changes_its_argument)(X), TransformError, ["x.add_(1)", "clone"]),
    "in place on a captured tensor": (
        lambda: T.vmap(_changes_a_captured_tensor)(X[None]),
        TransformError,
        ["BUFFER.add_(x)", "clone"],
    ),
    "in place beside what may be a view": (
        lambda: T.grad(_changes_what_may_be_a_view)(X),
        TransformError,
        ["y.mul_(3)", "reshape"],
    ),
    "a leaked value": (lambda: T.grad(_leaks)(X), TransformLevelError, ["leaked[0] * x", "has_aux"]),
    "the user's own exception": (lambda: T.grad(_raises)(X), KeyError, ["mine"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, error, pieces = REFUSED[case]
    with pytest.raises(error) as caught:
        call()
    for piece in pieces:
        assert piece in str(caught.value)


@pytest.mark.parametrize(
    "case", ["condition", "in place on the argument", "a leaked value", "vector loss", "the user's own exception"]
)
def test_a_failed_transform_leaves_nothing_behind(case: str) -> None:
    call, error, _ = REFUSED[case]
    x = X.clone().requires_grad_()
    for _ in range(2):
        with pytest.raises(error):
            call()
        assert torch.is_grad_enabled() and torch._C._functorch.maybe_current_level() is None
    assert torch.equal(BUFFER, torch.ones(3)) and torch.equal(X, torch.tensor([1.0, 2.0, 3.0]))
    y = thunder.jit(lambda x: x.sin())(x)
    assert type(y) is torch.Tensor and y.requires_grad
    assert_same(T.grad(lambda x: x.sin().sum())(X), X.cos(), atol=1e-7)


def test_a_refusal_inside_a_jitted_function_may_be_caught() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        try:
            return T.grad(lambda x: x * 2)(x)
        except ThunderNormError:
            return T.grad(lambda x: (x * 2).sum())(x)

    assert_same(thunder.jit(f)(X), torch.full((3,), 2.0))


def test_a_condition_on_what_is_known_is_no_data_dependence() -> None:
    def f(x: torch.Tensor, flag: bool) -> torch.Tensor:
        return x.sum() if flag and x.ndim == 1 and x.shape[0] == 3 else x.prod()

    assert_same(T.grad(f)(X, True), torch.ones(3))
    assert_same(T.grad(f)(X, False), X.prod() / X)


MISFITS: dict[str, tuple[Callable, Callable, list[str]]] = {
    "too many dimensions": (lambda x: (x.sinh(), x), lambda x, g: (g * x)[None], ["another shape", "(1, 3)", "(3,)"]),
    "too few": (lambda x: (x.sinh(), x), lambda x, g: (g * x).sum(), ["another shape", "()"]),
    "as many elements": (lambda x: (x.sinh(), x), lambda x, g: (g * x)[:, None], ["another shape", "(3, 1)"]),
    "broadcast": (lambda x: (x.sinh(), x), lambda x, g: (g * x)[:1], ["another shape", "(1,)"]),
    "a number": (lambda x: (x.sinh(), x), lambda x, g: 2.0, ["something else than a tensor", "float"]),
    "two gradients": (lambda x: (x.sinh(), x), lambda x, g: (g, g), ["2 gradients", "1 argument"]),
    "by name": (lambda x: (x.sinh(), x), lambda x, g: {"x": g}, ["not by name"]),
    "another result": (lambda x: (x.sinh()[:2], x), lambda x, g: g, ["another result", "(2,)", "(3,)"]),
    "another dtype": (lambda x: (x.sinh().double(), x), lambda x, g: g, ["another result", "float64"]),
    "no pair": (lambda x: x.sinh(), lambda x, g: g, ["pair"]),
    "an error of its own": (lambda x: (x.sinh(), x), lambda x, g: g @ torch.ones(7), ["backward fails", "RuntimeError"]),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_vjp_rule_that_does_not_fit(case: str) -> None:
    forward, backward, pieces = MISFITS[case]
    T.register_vjp(torch.sinh)(forward, backward)
    try:
        with pytest.raises(TransformError) as caught:
            T.grad(lambda x: x.sinh().sum())(X)
        for piece in ("torch.sinh", "x.sinh().sum()", *pieces):
            assert piece in str(caught.value)
    finally:
        vjp_rules.remove(torch.sinh)


def test_gradients_are_not_lost_where_the_derivative_is_unknown() -> None:
    with pytest.raises(MissingTransformRuleError, match="zeta"):
        T.grad(lambda s: torch.special.zeta(s, X).sum())(X + 1)
    with pytest.raises(MissingTransformRuleError, match="zeta"):
        T.jvp(lambda s: torch.special.zeta(s, X).sum(), (X + 1,), (X,))


def test_what_a_trace_does_not_look_at_is_refused() -> None:
    def switched_off(x):
        with forward_ad._set_fwd_grad_enabled(False):
            return x**3

    programs = {
        "set_fwd_grad_enabled": lambda x: torch.func.jvp(switched_off, (x,), (x,)),
        "strict=True": lambda x: torch.func.jvp(torch.ones_like, (x,), (x,), strict=True),
    }
    for said, f in programs.items():
        with pytest.raises(ThunderNormError, match=said):
            thunder.jit(f, transforms=[T.NormTransform()])(torch.ones(2))
