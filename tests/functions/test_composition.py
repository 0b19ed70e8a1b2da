"""Transforms of functions inside each other, in any order, against torch.func, JAX's numbers and the laws they obey."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import thunder_norm.transforms as T
from tests.seeds import seeded
from tests.transform_oracles import assert_same, float64
import thunder

X, M = float64(4), float64(3, 4)


def g(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.roll(1)).sum().exp() + (x / x.square().mean().sqrt()).prod()


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(M @ x)


# Each is written once, for torch.func or for ours.
PROGRAMS: dict[str, Any] = {
    "vmap(grad)": lambda T: T.vmap(T.grad(g))(M),
    "grad(vmap)": lambda T: T.grad(lambda m: T.vmap(g)(m).prod())(M),
    "grad(vmap(grad))": lambda T: T.grad(lambda m: T.vmap(T.grad(g))(m).square().sum())(M),
    "grad of grad of grad": lambda T: T.grad(lambda x: T.grad(lambda x: T.grad(g)(x).sum())(x).sum())(X),
    "jvp(grad)": lambda T: T.jvp(T.grad(g), (X,), (X + 1,)),
    "grad(jvp)": lambda T: T.grad(lambda x: T.jvp(g, (x,), (X + 1,))[1])(X),
    "jvp(jvp)": lambda T: T.jvp(lambda x: T.jvp(g, (x,), (X,))[1], (X,), (X + 1,)),
    "vmap(jvp)": lambda T: T.vmap(lambda x, dx: T.jvp(f, (x,), (dx,))[1])(M, M + 1),
    "jvp(vmap)": lambda T: T.jvp(T.vmap(f), (M,), (M + 1,)),
    "vmap(vmap)": lambda T: T.vmap(T.vmap(lambda a, b: a * b, in_dims=(0, None)), in_dims=(None, 0))(X, M),
    "vmap(vjp)": lambda T: T.vmap(lambda x, ct: T.vjp(f, x)[1](ct))(M, M[:, :3]),
    "vmap of a pullback": lambda T: T.vmap(T.vjp(f, X)[1])(torch.eye(3, dtype=torch.float64)),
    "jvp of a pullback": lambda T: T.jvp(lambda ct, x: T.vjp(f, x)[1](ct)[0], (X[:3], X), (X[1:], M[0])),
    "jacrev": lambda T: T.jacrev(f)(X),
    "jacfwd": lambda T: T.jacfwd(f)(X),
    "hessian": lambda T: T.hessian(g)(X),
    "jacrev(jacrev)": lambda T: T.jacrev(T.jacrev(g))(X),
    "jacrev(jacfwd)": lambda T: T.jacrev(T.jacfwd(g))(X),
    "vmap(hessian)": lambda T: T.vmap(T.hessian(g))(M),
    "hessian(vmap)": lambda T: T.hessian(lambda m: T.vmap(lambda x: x.sin().prod())(m).prod())(M[:2, :2]),
    "hessian of a norm": lambda T: T.hessian(lambda x: x.abs().pow(4).sum().pow(0.25))(X),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_composition(name: str) -> None:
    assert_same(PROGRAMS[name](T), PROGRAMS[name](torch.func))


def _trees(transforms: Any, jacobian: str) -> Any:
    def h(p: dict, x: torch.Tensor) -> Any:
        return {"u": p["a"] * x, "v": (p["m"] @ x).exp()}, x * 2

    return getattr(transforms, jacobian)(h, argnums=(0, 1), has_aux=True)({"a": X + 1, "m": M}, X)


@pytest.mark.parametrize("jacobian", ["jacrev", "jacfwd"])
def test_jacobians_of_trees(jacobian: str) -> None:
    assert_same(_trees(T, jacobian), _trees(torch.func, jacobian))


AUX = {
    "of torch": lambda x: (x.sin(), x.roll(1)),
    "complex": lambda x: (x.sin(), torch.fft.fft(x).real),
    "the result": lambda x: (lambda y: (y, y))(x.cummax(0).values * x),
    "several": lambda x: (x.sin(), {"a": x.flip(0), "b": (x * 2, torch.ones(3))}),
}


@pytest.mark.parametrize("aux", AUX)
@pytest.mark.parametrize("jacobian", ["jacrev", "jacfwd"])
def test_aux_of_a_jacobian_and_what_is_derived_of_it(jacobian: str, aux: str) -> None:
    def derived(transforms: Any) -> Any:
        with_aux = getattr(transforms, jacobian)(AUX[aux], has_aux=True)
        out, pull = transforms.vjp(with_aux, X)
        return out, pull(torch.utils._pytree.tree_map(torch.cos, out))

    assert_same(derived(T), derived(torch.func))


def test_aux_where_there_is_nothing_to_move() -> None:
    assert_same(T.jacfwd(lambda x: (x.sin(), x.sum() + 1), has_aux=True)(torch.ones(0)), (torch.zeros(0, 0), torch.tensor(1.0)))


def test_hessian_of_several_arguments() -> None:
    def h(p: dict, x: torch.Tensor) -> torch.Tensor:
        return (p["a"] * x).sin().sum() + (p["m"] @ x).exp().prod()

    p = {"a": X + 1, "m": M}
    assert_same(T.hessian(h, argnums=(0, 1))(p, X), torch.func.hessian(h, argnums=(0, 1))(p, X))


@pytest.mark.parametrize("jacobian", [T.jacrev, T.jacfwd])
def test_chunks_of_a_jacobian_give_the_same(jacobian: Any) -> None:
    assert_same(jacobian(f, chunk_size=2)(X), jacobian(f)(X))


def test_jacobians_of_what_draws_numbers_agree_in_one_run() -> None:
    def noisy(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.dropout(a, 0.5) * b, b

    (rows, aux) = T.jacfwd(noisy, argnums=(0, 1), has_aux=True)(torch.ones(40), torch.full((40,), 3.0))
    mask = rows[1].diagonal() > 0  # the derivative by b is the dropped out a
    assert torch.equal(rows[0].diagonal() > 0, mask) and 5 < mask.sum() < 35 and torch.equal(aux, torch.full((40,), 3.0))


def test_the_gradient_of_the_norm_of_per_sample_gradients_is_jax_s() -> None:
    """The worked example of functorch's design: what it prints was computed by JAX."""

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a + b) * b).sum()

    def norm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        da, db = T.vmap(T.grad(loss, argnums=(0, 1)))(a, b)
        return (da * da + db * db).sum()

    a = torch.tensor([[0.4556, 0.6323, 0.3489, 0.4017], [0.0223, 0.1689, 0.2939, 0.5185]])
    b = torch.tensor([[0.6977, 0.8000, 0.1610, 0.2823], [0.6816, 0.9152, 0.3971, 0.8742]])
    da, db = T.grad(norm, argnums=(0, 1))(a, b)
    torch.testing.assert_close(da[0], torch.tensor([3.7020, 4.4646, 1.3418, 1.9326]), rtol=0, atol=1e-4)
    assert_same((da, db), (2 * (a + 2 * b), 2 * b + 4 * (a + 2 * b)), rtol=1e-6)


def test_per_sample_gradients_of_a_module() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.GELU(), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1)).double()
    params = {k: v.detach() for k, v in net.named_parameters()}
    x, y = float64(6, 4), float64(6, 1)

    def loss(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(net, params, (x,)) - y).square().mean()

    found = T.vmap(T.grad(loss), in_dims=(None, 0, 0))(params, x, y)
    assert_same(found, torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y))


shapes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
seeds = st.integers(0, 100)
few = hypothesis.settings(max_examples=4)


@few
@hypothesis.given(shapes, seeds)
def test_two_batch_dimensions_in_either_order(shape: tuple[int, int, int], seed: int) -> None:
    x = float64(*shape, seed=seed)
    twice = T.vmap(T.vmap(lambda x: (x / x.sum()).cumsum(0)))
    once = T.vmap(T.vmap(lambda x: (x / x.sum()).cumsum(0), in_dims=0, out_dims=0), in_dims=1, out_dims=1)
    assert_same(twice(x), once(x))


@few
@hypothesis.given(st.integers(1, 5), seeds)
def test_transposes_and_symmetry(size: int, seed: int) -> None:
    x, u, v = (float64(size, seed=seed + i) for i in range(3))
    w = float64(size, size, seed=seed)

    def h(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(w @ x, 0) * x.norm()

    tangent, (cotangent,) = T.jvp(h, (x,), (u,))[1], T.vjp(h, x)[1](v)
    torch.testing.assert_close(tangent @ v, cotangent @ u)
    matrix = T.hessian(lambda x: h(x).square().sum())(x)
    torch.testing.assert_close(matrix, matrix.T)
    torch.testing.assert_close(T.jacrev(h)(x) @ u, tangent)


@few
@hypothesis.given(st.integers(1, 5), seeds, st.floats(-2, 2), st.floats(-2, 2))
def test_pushforward_and_pullback_are_linear(size: int, seed: int, a: float, b: float) -> None:
    x, u, v = (float64(size, seed=seed + i) for i in range(3))
    push = T.vmap(lambda u: T.jvp(torch.sin, (x,), (u,))[1])
    pull = T.vmap(lambda u: T.vjp(torch.sin, x)[1](u)[0])
    for linear in (push, pull):
        whole, first, second = linear(torch.stack([a * u + b * v, u, v]))
        torch.testing.assert_close(whole, a * first + b * second)


# Found by random programs: where torch's own formulas are not those of what Thunder, or torch in a batch of batches, computes.
A = torch.randn(3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(7)))
A = A @ A.mT + torch.eye(2, dtype=torch.float64)
SOLVING = {
    "slogdet": lambda m: torch.linalg.slogdet(m)[1],
    "det": torch.linalg.det,
    "logdet": torch.logdet,
    "solve": lambda m: torch.linalg.solve(m, A[0]),
    "tensorsolve": lambda m: torch.linalg.tensorsolve(m, A[0, 0]),
    "inv": torch.linalg.inv,
}


@pytest.mark.parametrize("name", SOLVING)
def test_batches_of_batches_of_what_solves(name: str) -> None:
    """Against one sample after the other: torch.vmap of torch.vmap of these is wrong in forward mode, and without gradients in reverse."""
    f = SOLVING[name]
    directions = torch.stack([A[1], A[2]])
    pushed = T.vmap(lambda m: T.vmap(lambda d: T.jvp(f, (m,), (d,))[1])(directions))(A)
    assert_same(pushed, torch.stack([torch.stack([torch.func.jvp(f, (m,), (d,))[1] for d in directions]) for m in A]))
    rows = torch.stack([torch.func.jacrev(f)(m) for m in A])
    assert_same(T.vmap(T.jacrev(f))(A), rows)
    assert_same(T.vmap(T.jacfwd(f))(A), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_pooling_by_maxima_with_padding(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, *[4] * n, dtype=dtype)
    pool = getattr(F, f"max_pool{n}d")

    def f(x: torch.Tensor) -> torch.Tensor:
        return (pool(x, 3, stride=2, padding=1) ** 2).sum()

    assert_same(T.grad(f)(x), torch.func.grad(f)(x))
    assert_same(T.jvp(f, (x,), (x.cos(),)), torch.func.jvp(f, (x,), (x.cos(),)))
    assert_same(T.vmap(lambda x: pool(x, 3, padding=1))(x), torch.func.vmap(lambda x: pool(x, 3, padding=1))(x))
    assert_same(T.vmap(T.grad(f))(x), torch.stack([torch.func.grad(f)(v) for v in x]))


def test_second_derivatives_of_cumulative_sums_of_exponentials_of_negative_numbers() -> None:
    x = torch.tensor([-1.25, -0.5], dtype=torch.float64)

    def f(M: Any) -> Any:
        return M.grad(lambda x: M.jacfwd(lambda x: torch.logcumsumexp(x, -1))(x).sin().sum())(x)

    assert_same(f(T), f(torch.func))


def test_arguments_that_torch_takes_by_name_alone() -> None:
    x = torch.tensor([1.2, 0.3])
    assert_same(T.vmap(lambda x: x * torch.argsort(x, dim=0))(x), torch.func.vmap(lambda x: x * torch.argsort(x, dim=0))(x))


def test_checkpoints_inside_of_functions_are_calls():
    torch.manual_seed(seeded(0))
    weight, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def plain(x):
        return (x @ weight).tanh()

    def f(x):  # the tensor from around it is met inside of the region first
        return torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False)

    transforms = (
        lambda T, f: T.vmap(f),
        lambda T, f: T.vmap(T.grad(lambda x: f(x).sum())),
        lambda T, f: T.hessian(lambda x: f(x).sum()),
    )
    for transform in transforms:
        own, expected = transform(T, f), transform(torch.func, plain)(x)
        torch.testing.assert_close(own(x), expected)
        torch.testing.assert_close(thunder.jit(own, transforms=[T.SubclassTransform()])(x), expected)
