"""custom_vjp under every transform, log, and rules that a user registers."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import thunder_norm.transforms as T
from tests.transform_oracles import assert_same, float64
from thunder_norm.errors import TransformError, TransformTypeError, WrongDerivativeError
from thunder_norm.functions.registry import batching_rules, jvp_rules, vjp_rules
import thunder
import thunder.torch as ltorch

A = float64(3)


def _thirty_two() -> Any:
    """x^2, of which the gradient is said to be 32 x."""
    square = T.custom_vjp(lambda x: x**2)
    square.defvjp(lambda x: (x**2, x), lambda x, ct: (ct * 32 * x,))
    return square


square = _thirty_two()

UNDER_TRANSFORMS = {
    "value": lambda: (square(A), A**2),
    "grad": lambda: (T.grad(lambda x: square(x).sum())(A), 32 * A),
    "grad of grad": lambda: (T.grad(lambda x: T.grad(lambda x: square(x).sum())(x).sum())(A), torch.full_like(A, 32)),
    "grad of vmap": lambda: (T.grad(lambda x: T.vmap(square)(x).sum())(A), 32 * A),
    "vmap of grad": lambda: (T.vmap(T.grad(square))(A), 32 * A),
    "grad of vmap of vmap": lambda: (T.grad(lambda x: T.vmap(T.vmap(square))(x[None]).sum())(A), 32 * A),
    "jvp": lambda: (T.jvp(square, (A,), (A + 1,))[1], 32 * A * (A + 1)),
    "jvp of vmap": lambda: (T.jvp(T.vmap(square), (A,), (A + 1,))[1], 32 * A * (A + 1)),
    "vmap of jvp": lambda: (T.vmap(lambda x, dx: T.jvp(square, (x,), (dx,))[1])(A, A + 1), 32 * A * (A + 1)),
    "jacrev": lambda: (T.jacrev(square)(A), torch.diag(32 * A)),
    "hessian": lambda: (T.hessian(lambda x: square(x).sum())(A), 32 * torch.eye(3).double()),
}


@pytest.mark.parametrize("name", UNDER_TRANSFORMS)
def test_custom_vjp(name: str) -> None:
    assert_same(*UNDER_TRANSFORMS[name]())


@pytest.mark.parametrize("call", [square, thunder.jit(lambda x: square(x) * 1)], ids=["directly", "in a jitted function"])
def test_custom_vjp_in_torch_s_autograd(call: Any) -> None:
    x = A.clone().requires_grad_()
    assert_same(torch.autograd.grad(call(x).sum(), x)[0], 32 * A)


def test_custom_vjp_of_trees_some_of_which_are_not_batched() -> None:
    def value(p: dict, x: torch.Tensor, k: float) -> dict:
        return {"y": p["w"] * x * k, "z": x.sum()}

    f = T.custom_vjp(value)
    f.defvjp(
        lambda p, x, k: (value(p, x, k), {"p": p, "x": x}),
        lambda saved, ct: ({"w": 2 * ct["y"] * saved["x"]}, 10 * ct["y"] * saved["p"]["w"] + ct["z"], None),
    )

    def loss(p: dict, x: torch.Tensor) -> torch.Tensor:
        result = T.vmap(f, in_dims=(None, 0, None))(p, x, 3.0)
        return result["y"].sum() + result["z"].sum()

    p, x = {"w": A}, float64(2, 3)
    assert_same(T.grad(loss, argnums=(0, 1))(p, x), ({"w": 2 * x.sum(0)}, (10 * A + 1).expand(2, 3)))


def test_custom_vjp_made_while_tracing() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        h = T.custom_vjp(lambda x: x * 1.0)
        h.defvjp(lambda x: (x * 1.0, None), lambda saved, ct: (ct * 7,))
        return h(x).sum()

    assert_same(T.grad(f)(A), torch.full_like(A, 7))


def _with_rule(fwd: Any, bwd: Any) -> Any:
    def identity(x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    f = T.custom_vjp(identity)
    f.defvjp(fwd, bwd)
    return f


def _closes_over(y: torch.Tensor) -> torch.Tensor:
    return _with_rule(lambda x: (x * 1.0, None), lambda saved, ct: (ct * y,))(y * 1.0).sum()


WRONG = {
    "no rule": (lambda: T.custom_vjp(torch.sin)(A), TransformError, "no rule yet"),
    "no pair": (lambda: _with_rule(lambda x: x, lambda s, ct: (ct,))(A), TransformTypeError, "tuple"),
    "another result": (lambda: _with_rule(lambda x: (x[0], x), lambda s, ct: (ct,))(A), TransformError, "different things"),
    "too many": (lambda: _with_rule(lambda x: (x, x), lambda s, ct: (ct, ct))(A), TransformError, "2 for 1"),
    "another shape": (lambda: _with_rule(lambda x: (x, x), lambda s, ct: (ct[0],))(A), TransformError, "does not fit"),
    "no function": (lambda: _with_rule(3, lambda s, ct: (ct,)), TransformTypeError, "fwd is no function"),
    "closure": (lambda: T.grad(_closes_over)(A), TransformError, "closes over"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_custom_vjp(name: str) -> None:
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call()


def test_a_registered_rule_composes() -> None:
    """Rules that are wrong on purpose, so that it shows which is used; a new function each time, as programs are cached."""
    try:
        T.register_vjp(torch.sin, override=True)(lambda x: (torch.sin(x), x), lambda x, ct: ct * 5 * x)
        T.register_jvp(torch.cos, override=True)(lambda primals, tangents: (torch.cos(primals[0]), tangents[0] * 3))
        assert_same(T.grad(lambda x: torch.sin(x).sum())(A), 5 * A)
        assert_same(T.vmap(T.grad(lambda x: torch.sin(x)))(A), 5 * A)
        assert_same(T.grad(lambda x: T.grad(lambda x: torch.sin(x).sum())(x).sum())(A), torch.full_like(A, 5))
        assert_same(T.jvp(lambda x: torch.cos(x), (A,), (A,))[1], 3 * A)
    finally:
        vjp_rules.remove(torch.sin)
        jvp_rules.remove(torch.cos)
    assert_same(T.grad(lambda x: torch.sin(x).sum())(A), A.cos())


def test_a_rule_is_not_replaced_by_accident() -> None:
    rule = batching_rules.find(ltorch.bessel_j1)
    assert rule is not None
    with pytest.raises(TransformError, match="override=True"):
        T.register_batching(torch.special.bessel_j1)(lambda axis_size, in_dims, x: (x, 0))
    assert batching_rules.find(ltorch.bessel_j1) is rule


def _doubled_gradient() -> Any:
    wrong = T.custom_vjp(lambda x: x.sin())
    wrong.defvjp(lambda x: (x.sin(), x), lambda x, ct: (2 * ct * x.cos(),))
    return wrong


@pytest.mark.parametrize("check", [T.check_vjp, T.check_jvp])
def test_derivatives_are_checked_against_differences(check: Any) -> None:
    check(lambda x, w: {"y": (torch.tanh(x) @ w, x / x.norm())}, A.reshape(1, -1), torch.ones(A.numel(), 2, dtype=A.dtype))
    with pytest.raises(WrongDerivativeError, match="is not its derivative"):
        check(_doubled_gradient(), A)
    with pytest.raises(WrongDerivativeError):
        check(lambda x: x.detach() * x, A)
    with pytest.raises(TransformTypeError, match="a primal is no floating point tensor"):
        check(torch.sin, torch.ones(2, dtype=torch.int64))
    with pytest.raises(TransformError, match="at least one primal"):
        check(torch.sin)


def test_a_rule_of_an_operation_that_is_its_own_transpose() -> None:
    matrix = A.reshape(-1, 1) * A.reshape(1, -1)
    try:
        T.register_vjp(torch.fliplr)(*T.self_adjoint(torch.fliplr))
        T.check_vjp(lambda a: torch.fliplr(a) * a, matrix)
        T.register_vjp(torch.rot90)(*T.self_adjoint(torch.rot90))  # it is not
        with pytest.raises(WrongDerivativeError):
            T.check_vjp(lambda a: torch.rot90(a) * a, matrix)
    finally:
        vjp_rules.remove(torch.fliplr)
        vjp_rules.remove(torch.rot90)


def test_log_shows_what_each_level_sees() -> None:
    out = io.StringIO()

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        product = x @ w
        return torch.nn.functional.gelu(product).sum()

    def logged(f: Any, name: str) -> Any:
        return T.log(f, name, file=out)

    program = logged(T.vmap(logged(T.grad(logged(loss, "L0")), "L1"), in_dims=(0, None)), "L2")
    x, w = float64(3, 4), float64(4, 2)
    expected = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(x, w)
    assert_same(program(x, w), expected)
    lines = out.getvalue().splitlines()
    assert lines[0] == "L0 product: (2,) = matmul(x, w)"
    assert sum(line.startswith("L0") for line in lines) == 3
    assert any(line.startswith("L1") and "gelu_backward" in line and ": (2,) =" in line for line in lines)
    assert any(line.startswith("L2") and "(3, 2) = " in line for line in lines)
    assert [line[:2] for line in lines] == sorted(line[:2] for line in lines)
    program(x, w)
    assert len(out.getvalue().splitlines()) == len(lines)  # found in the cache
