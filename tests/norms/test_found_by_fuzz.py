"""Programs that random search found wrong, in their smallest form, each with its relatives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from tests.transform_oracles import assert_same, float64
from thunder_norm import transforms as T
from thunder_norm.errors import DataDependentError
from thunder_norm.functions.torch_calls import try_out
import thunder

X, Y = float64(3), float64(3) + 0.3
MATRIX = float64(5, 3)
SYMMETRIC = float64(3, 3) + float64(3, 3).T
TABLE = float64(4, 2)


def _loss(f: Callable) -> Callable:
    return lambda *args: sum((k + 1) * v.sin().sum() for k, v in enumerate(tree_leaves(f(*args))))


# -- what a function with a rule of its own returns -------------------------------------------------------------------------------

_RETURNED = {
    "one tensor twice": lambda x, y: (lambda t: {"a": t, "b": t, "c": x})(x * y),
    "an argument": lambda x, y: x,
    "an argument twice": lambda x, y: (x, x),
    "arguments in another order": lambda x, y: (y, x),
    "a view of an argument": lambda x, y: (x.view(3, 1), x),
}


@pytest.mark.parametrize("returned", _RETURNED)
def test_each_result_of_a_custom_function_has_a_cotangent_of_its_own(returned: str) -> None:
    f = _RETURNED[returned]
    custom = T.custom_vjp(f)
    custom.defvjp(lambda x, y: (f(x, y), (x, y)), lambda saved, ct: T.vjp(f, *saved)[1](ct))
    for transformed in (
        lambda M, g: M.grad(_loss(g), (0, 1))(X, Y),
        lambda M, g: M.jvp(_loss(g), (X, Y), (Y, X)),
        lambda M, g: M.jvp(M.grad(_loss(g)), (X, Y), (Y, X))[1],
        lambda M, g: M.vmap(M.grad(_loss(g)))(torch.stack([X, Y]), torch.stack([Y, X])),
        lambda M, g: M.hessian(g)(X, Y),
    ):
        assert_same(transformed(T, custom), transformed(torch.func, f))


def test_what_a_custom_function_computes_of_a_constant_is_computed_in_each_of_its_programs() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x @ (MATRIX.T @ MATRIX).mT.T

    custom = T.custom_vjp(f)
    custom.defvjp(lambda x: (f(x), x), lambda saved, ct: T.vjp(f, saved)[1](ct))
    assert_same(T.hessian(_loss(custom))(X), torch.func.hessian(_loss(f))(X))


# -- formulas of torch's ------------------------------------------------------------------------------------------------------------


def test_eigenvalues_are_differentiated_without_the_eigenvectors() -> None:
    def values(a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigh(a).eigenvalues

    def f(M: object, a: torch.Tensor) -> torch.Tensor:
        return M.grad(lambda b: M.jvp(values, (b,), (b @ b.T,))[1].sin().sum())(a)

    assert_same(f(T, SYMMETRIC), f(torch.func, SYMMETRIC))


def test_a_modulus_of_zero_has_derivatives_of_zero() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x * torch.tensor([0.0, 1.0, 2.0]), x * 0.0).abs()

    custom = T.custom_vjp(f)  # its tangent is the transpose of the backward, which divides by the modulus
    custom.defvjp(lambda x: (f(x), x), lambda saved, ct: T.vjp(f, saved)[1](ct))
    for transform in ("jacfwd", "jacrev", "hessian"):
        assert_same(getattr(T, transform)(custom)(X), getattr(torch.func, transform)(f)(X))


@pytest.mark.parametrize("order", [0, 1, 2, 3, float("inf")])
@pytest.mark.parametrize("dim", [-2, -1, (0, -2), 1])
def test_norms_over_dimensions_of_size_1_have_the_shape_that_torch_runs(order: float, dim: int | tuple) -> None:
    t = float64(2, 1, 3)

    def f(t: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(t, order, dim=dim).sin()

    assert [tuple(o.shape) for o in try_out(torch.linalg.vector_norm, (t, order, dim), {}).outs] == [tuple(f(t).shape)]
    for transformed in (lambda M: M.jacfwd(f)(t), lambda M: M.grad(lambda t: f(t).sum())(t), lambda M: M.vmap(f)(t[None])):
        assert_same(transformed(T), transformed(torch.func))


# -- least squares ------------------------------------------------------------------------------------------------------------------

_LEAST_SQUARES = {
    "tall": lambda a, b: torch.linalg.lstsq(a, b).solution,
    "wide": lambda a, b: torch.linalg.lstsq(a.T, b[:3])[0],
    "square": lambda a, b: torch.linalg.lstsq(a[:3], b[:3]).solution,
    "residuals": lambda a, b: torch.linalg.lstsq(a, b, driver="gelsd").residuals,
    "a batch": lambda a, b: torch.linalg.lstsq(torch.stack([a, a * 2]), torch.stack([b, b.sin()])).solution,
}


@pytest.mark.parametrize("kind", _LEAST_SQUARES)
def test_least_squares(kind: str) -> None:
    f, b = _LEAST_SQUARES[kind], float64(5, 2)
    for transformed in (
        lambda M: M.grad(_loss(f), (0, 1))(MATRIX, b),
        lambda M: M.jvp(M.grad(_loss(f)), (MATRIX, b), (MATRIX.cos(), b))[1],
        lambda M: M.vmap(M.grad(_loss(f)), (0, None))(torch.stack([MATRIX, MATRIX.cos()]), b),
    ):
        assert_same(transformed(T), transformed(torch.func))


def test_residuals_that_torch_does_not_return_are_refused() -> None:
    with pytest.raises(DataDependentError, match="full rank"):
        T.grad(lambda a: torch.linalg.lstsq(a, a, driver="gelsd").residuals.sum())(torch.ones_like(MATRIX))


# -- empty tensors, adjoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "weights"), [((1, 3, 0), (3, 0)), ((0, 2, 3), (3, 3)), ((2, 2, 3), (0, 3)), ((0,), (3, 0))])
def test_linear_layers_of_nothing(given: tuple, weights: tuple) -> None:
    args = float64(*given), float64(*weights), float64(weights[0])

    def f(*args: torch.Tensor) -> torch.Tensor:
        return F.linear(*args).square().sum()

    assert_same(T.grad(f, (0, 1, 2))(*args), torch.func.grad(f, (0, 1, 2))(*args))
    assert_same(T.jvp(T.grad(f, 1), args, args)[1], torch.func.jvp(torch.func.grad(f, 1), args, args)[1])


@pytest.mark.parametrize("transform", [T.SubclassTransform, T.NormTransform])
def test_adjoints_and_operations_that_thunder_lacks_run_in_plain_programs(transform: type) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x, x.sin())
        return (z @ z.mH).real + (z.H.imag * (torch.arange(3) % 2)).sum() + x.mT.H

    x = SYMMETRIC.clone().requires_grad_()
    found = thunder.jit(f, transforms=[transform()])(x)
    torch.testing.assert_close(found, f(SYMMETRIC))
    found.sin().sum().backward()
    torch.testing.assert_close(x.grad, torch.func.grad(lambda x: f(x).sin().sum())(SYMMETRIC))
    assert_same(T.grad(lambda x: f(x).sin().sum())(SYMMETRIC), x.grad)


# -- embeddings ---------------------------------------------------------------------------------------------------------------------

_EMBEDDINGS = {
    "a row of padding": {"padding_idx": 1},
    "counted from the end": {"padding_idx": -1},
    "scaled": {"scale_grad_by_freq": True},
    "both": {"padding_idx": -3, "scale_grad_by_freq": True},
}


@pytest.mark.parametrize("options", _EMBEDDINGS)
def test_gradients_of_embeddings(options: str) -> None:
    rows = torch.tensor([[1, 3, 0], [1, 2, 3]])

    def f(table: torch.Tensor) -> torch.Tensor:
        return F.embedding(rows, table, **_EMBEDDINGS[options]).sin().sum()

    table = TABLE.clone().requires_grad_()
    f(table).backward()
    tables = torch.stack([TABLE, TABLE.cos()], -1)
    assert_same(T.grad(f)(TABLE), table.grad)
    assert_same(T.vmap(T.grad(f), -1)(tables), torch.func.vmap(torch.func.grad(f), -1)(tables))
    assert_same(T.hessian(f)(TABLE), torch.func.hessian(f)(TABLE))
    for transform in (T.SubclassTransform, T.NormTransform):
        leaf = TABLE.clone().requires_grad_()
        thunder.jit(f, transforms=[transform()])(leaf).backward()
        assert_same(leaf.grad, table.grad)


# -- Thunder's differentiation around ours --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [torch.isfinite, lambda t: t.flip(-1), lambda t: t.index_add(0, torch.tensor([0]), t[:1])])
def test_thunder_differentiates_around_a_jacobian_what_it_has_no_gradient_of(last: Callable) -> None:
    layer = torch.nn.LayerNorm(3, dtype=torch.float64)
    x = float64(2, 3)

    def f(M: object, weight: torch.Tensor) -> torch.Tensor:
        def inside(weight: torch.Tensor) -> torch.Tensor:
            t = functional_call(layer, {"weight": weight}, (x,))
            return t * t * last(t)

        return M.jacrev(inside)(weight)

    found = thunder.jit(lambda weight: f(T, weight))(X)
    found.sin().sum().backward()
    ours, layer.bias.grad = layer.bias.grad, None
    wanted = f(torch.func, X)
    assert_same(found.detach(), wanted.detach())
    wanted.sin().sum().backward()
    assert_same(ours, layer.bias.grad)


def test_results_beside_integers_without_dimensions_are_differentiated() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky_ex(x @ x.T + 3 * torch.eye(3, dtype=x.dtype)).L.sin().sum()

    leaf = SYMMETRIC.clone().requires_grad_()
    thunder.jit(f, transforms=[T.SubclassTransform()])(leaf).backward()
    assert_same(leaf.grad, torch.func.grad(f)(SYMMETRIC))


@pytest.mark.parametrize("transform", [T.SubclassTransform, T.NormTransform])
def test_tensors_given_by_name_are_differentiated(transform: type) -> None:
    weights = float64(3)

    def f(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, x2=weights.exp() * x.detach().cos()).sum()

    x, w = MATRIX.clone().requires_grad_(), weights.clone().requires_grad_()
    thunder.jit(f, transforms=[transform()])(x, w).backward()
    assert_same((x.grad, w.grad), torch.func.grad(f, (0, 1))(MATRIX, weights))


def test_zeros_without_memory_are_made_tensors() -> None:
    """Forward mode returns them; what Thunder saves is asked for its address."""
    x = float64(1, 3)

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.l1_loss(torch.linalg.vecdot(x, x.cos(), dim=0), Y)

    assert_same(T.vjp(T.hessian(f), x)[1](T.hessian(f)(x)), torch.func.vjp(torch.func.hessian(f), x)[1](torch.func.hessian(f)(x)))


# -- modules and containers -----------------------------------------------------------------------------------------------------------


class _Returning(torch.nn.Module):
    def __init__(self, returned: Callable) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(Y.clone())
        self.returned = returned

    def forward(self, x: torch.Tensor) -> object:
        return self.returned(self.weight, x)


@pytest.mark.parametrize("returned", [lambda w, x: w, lambda w, x: (w, x), lambda w, x: {"a": w * x, "b": [w, x]}])
def test_a_parameter_that_a_module_returns_is_what_functional_call_was_given(returned: Callable) -> None:
    module = _Returning(returned)

    def f(x: torch.Tensor, weight: torch.Tensor) -> object:
        return functional_call(module, {"weight": weight}, (x,))

    for transformed in (
        lambda M: M.jacfwd(f, (0, 1))(X, X * 2),
        lambda M: M.jacrev(f, (0, 1))(X, X * 2),
        lambda M: M.vmap(f)(torch.stack([X, Y]), torch.stack([Y, X])),
    ):
        assert_same(transformed(T), transformed(torch.func))


@pytest.mark.parametrize("make", [lambda x: {"x": x}, lambda x: [x], lambda x: (x,)])
def test_a_container_given_and_closed_over_has_both_gradients(make: Callable) -> None:
    def gradient(M: object) -> torch.Tensor:
        leaf = X.clone().requires_grad_()
        given = make(leaf)
        key = "x" if isinstance(given, dict) else 0
        found = M.grad(lambda y: y[key].sin().sum() * given[key].sum())(given)[key]
        found.square().sum().backward()
        return leaf.grad

    assert_same(gradient(T), gradient(torch.func))


# -- kernels in other dtypes ----------------------------------------------------------------------------------------------------------

_LAYERS = {
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "silu": F.silu,
    "mse_loss": lambda x: F.mse_loss(x, torch.full_like(x, 0.5)),
    "cross_entropy": lambda x: F.cross_entropy(x.reshape(-1, 4), torch.zeros(x.numel() // 4, dtype=torch.long)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", _LAYERS)
def test_kernels_in_other_dtypes(layer: str, dtype: torch.dtype) -> None:
    """On a CPU others run than in double precision, which may broadcast nothing."""
    f, x = _LAYERS[layer], float64(3, 4).to(dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.1, "atol": 0.05}
    for transformed in (
        lambda M: M.jacrev(f)(x),
        lambda M: M.jacrev(f)(x[0]),
        lambda M: M.vmap(M.grad(lambda x: f(x).sum()))(x[:, None]),
        lambda M: M.jvp(f, (x,), (x,))[1],
    ):
        found, wanted = transformed(T), transformed(torch.func)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, **tolerance)


def test_a_backward_that_uses_nothing_of_what_was_saved():
    def writes(x):
        out = torch.zeros_like(x)
        for i in range(3):
            out[i] = x[i] * i
        return out

    def tangent(x):
        return T.jvp(writes, (x,), (x * 0.5,))[1]

    f = T.custom_vjp(tangent)
    f.defvjp(lambda x: (tangent(x), (x,)), lambda saved, ct: T.vjp(tangent, *saved)[1](ct))
    x = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    (found,) = torch.autograd.grad(thunder.jit(f, transforms=[T.NormTransform()])(x).real.sum(), x)
    torch.testing.assert_close(found, torch.tensor([0, 0.5, 1.0], dtype=torch.complex128))


@pytest.mark.parametrize(
    "f", [lambda x: torch.std_mean(x)[1], lambda x: torch.linalg.slogdet(x)[1], lambda x: torch.var_mean(x)[0]]
)
def test_results_without_dimensions_that_nothing_uses(f):
    x = torch.randn(3, 3, dtype=torch.float64).requires_grad_()
    (wanted,) = torch.autograd.grad(f(x), x)
    (found,) = torch.autograd.grad(thunder.jit(f, transforms=[T.SubclassTransform()])(x), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_normalize_of_a_row_of_zeros(p):
    weights = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)

    def f(x):
        return (F.normalize(x, p) * weights).sum()

    x = torch.randn(3, 4, dtype=torch.float64)
    x[1] = 0
    wanted = torch.func.grad(f)(x)
    torch.testing.assert_close(T.grad(f)(x), wanted)
    leaf = x.clone().requires_grad_()
    thunder.jit(f, transforms=[T.SubclassTransform()])(leaf).backward()
    torch.testing.assert_close(leaf.grad, wanted)


_AT_ZEROS = {
    "prod": lambda x: x.prod(1),
    "prod of all": lambda x: torch.prod(x),
    "cumprod": lambda x: x.cumprod(1),
    "a power": lambda x: x**x,
    "atan2": lambda x: torch.atan2(x, 0 * x),
    "norm": lambda x: x.norm(3, 1),
    "std": lambda x: (0 * x).std(1),
}


@pytest.mark.parametrize("name", _AT_ZEROS)
@pytest.mark.parametrize("num_zeros", [1, 4])
def test_gradients_at_zeros_are_torchs(name, num_zeros):
    def f(x):
        out = _AT_ZEROS[name](x)
        return (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()

    x = torch.rand(2, 4, dtype=torch.float64) + 0.5
    x[0, :num_zeros] = 0
    wanted = torch.func.grad(f)(x)
    if name == "atan2":
        wanted = wanted.nan_to_num(0.0)  # torch 2.9 has no number at the origin
    torch.testing.assert_close(T.grad(f)(x), wanted)
    leaf = x.clone().requires_grad_()
    thunder.jit(f, transforms=[T.SubclassTransform()])(leaf).backward()
    torch.testing.assert_close(leaf.grad, wanted)


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_rounded_quotients_by_zero_have_no_slope(mode: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.div(1.0, x, rounding_mode=mode).nan_to_num(0, 0, 0) * x

    x, cotangent = torch.tensor([-1.0, 0.0, 2.5], requires_grad=True), torch.ones(3)
    expected = torch.autograd.grad(f(x), x, cotangent)
    assert expected[0].isfinite().all()
    assert_same(torch.autograd.grad(thunder.jit(f, transforms=[T.SubclassTransform()])(x), x, cotangent), expected)
    assert_same(T.grad(lambda x: f(x).sum())(x.detach()), expected[0])
