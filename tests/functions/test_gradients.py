"""grad, value_and_grad and vjp of functions of tensors, against torch.func in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import thunder_norm.transforms as T
from tests.seeds import seeded
from tests.transform_oracles import assert_same, float64
from thunder_norm import RMSTensor
import thunder


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.add_(x).mul_(x)
    y *= y.sum()
    z = y.clone()
    z.sub_(1)
    return (z * y).sum()


def _without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x * 2
    return (scale * x).sum() + (x.detach() * x).sum()


# Thunder's own gradients of the first ones are wrong, or raise, for tensors on the CPU: a 0-dim tensor meets others.
def _source_changes(x: torch.Tensor) -> torch.Tensor:
    source, y, z = x * 2, torch.zeros_like(x), x * 4
    y.copy_(source)
    z.copy_(source)
    source.add_(1)
    source.mul_(x)
    z.add_(x)
    return (y * source * z).sum()


def _several_names(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.add_(x)
    w = z.mul_(x)
    y.sub_(1)
    w.add_(y.clone() * x)
    return (y * z * w).sum()


SCALAR_FUNCTIONS = {
    "x / x.sum()": lambda x: (x / x.sum()).square().sum(),
    "x + x.sum()": lambda x: (x + x.sum()).square().sum(),
    "x * x.mean()": lambda x: (x * x.mean()).pow(3).sum(),
    "x - x.amax()": lambda x: (x - x.amax()).exp().sum(),
    "x / rms": lambda x: (x / x.square().mean().sqrt()).sin().sum(),
    "x / norm": lambda x: (x / torch.linalg.vector_norm(x)).sin().sum(),
    "pow of a sum": lambda x: (x.abs() ** x.sum().abs()).sum(),
    "maximum with the mean": lambda x: torch.maximum(x, x.mean()).square().sum(),
    "minimum with the mean": lambda x: torch.minimum(x.mean(), x).square().sum(),
    "where": lambda x: torch.where(x > 0, x, x.sum()).square().sum(),
    "0-dim on the left": lambda x: (x.sum() / x + x.prod() - x).square().sum(),
    "used twice": lambda x: (x * x + x).sum(),
    "softmax": lambda x: torch.softmax(x, 0)[0],
    "log_softmax": lambda x: F.log_softmax(x, 0)[1],
    "logsumexp": lambda x: torch.logsumexp(x, 0),
    "layer_norm": lambda x: F.layer_norm(x, (4,)).square().mul(x).sum(),
    "gelu": lambda x: F.gelu(x).sum(),
    "indexing": lambda x: (x[1:] * x[:-1]).sum() + x[2] ** 2,
    "cat and split": lambda x: torch.cat([a * i for i, a in enumerate(x.split(2), 1)]).square().sum(),
    "in place": _in_place,
    "in place, what was copied changes": _source_changes,
    "in place, by several names": _several_names,
    "no gradient": _without_gradient,
    "number": lambda x: (x * x.sum().item()).sum(),
    "unused": lambda x: torch.ones((), dtype=torch.float64) * 3,
    "an argument that torch does not differentiate by": lambda x: F.soft_margin_loss(x, torch.ones_like(x)),
    "through integers": lambda x: (x.floor() * x).sum(),
}


@pytest.mark.parametrize("name", SCALAR_FUNCTIONS)
def test_gradient_and_value(name: str) -> None:
    f = SCALAR_FUNCTIONS[name]
    x = float64(4)
    value, gradient = T.value_and_grad(f)(x)
    assert_same(value, f(x))
    assert_same(gradient, torch.func.grad(f)(x))


@pytest.mark.parametrize("name", ["x / x.sum()", "x / rms", "maximum with the mean", "where", "0-dim on the left", "layer_norm"])
def test_second_gradient(name: str) -> None:
    f = SCALAR_FUNCTIONS[name]
    x = float64(4)
    found = T.grad(lambda x: T.grad(f)(x).sin().sum())(x)
    assert_same(found, torch.func.grad(lambda x: torch.func.grad(f)(x).sin().sum())(x))


def _of_trees(params: dict, batch: tuple, scale: float = 1.0) -> Any:
    x, y = batch
    hidden = torch.tanh(x @ params["layers"][0] + params["bias"])
    error = hidden @ params["layers"][1] - y
    return scale * error.square().mean(), {"hidden": hidden}


def _trees() -> tuple[dict, tuple]:
    params = {"layers": [float64(3, 4), float64(4, 2)], "bias": float64(4)}
    return params, (float64(5, 3), float64(5, 2))


# What is written may have more dimensions than the part, of length 1: they count for none.
WRITTEN = {
    "a row": ((0,), (1, 2, 3)),
    "a row, two dimensions more": ((0,), (1, 1, 2, 3)),
    "an entry": ((0, 1, 2), (1,)),
    "an entry, two dimensions": ((0, 1, 2), (1, 1)),
    "a slice": ((slice(0, 1), 0), (1, 1, 3)),
    "rows": ((torch.tensor([0, 2]),), (1, 1, 2, 3)),
    "columns": ((slice(None), torch.tensor([0, 1])), (1, 4, 2, 1)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_values_written_with_more_dimensions(name: str) -> None:
    index, shape = WRITTEN[name]

    def f(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[index] = v * v
        return (y * y).sum()

    x, v = float64(4, 2, 3), float64(*shape)
    assert_same(T.grad(f, argnums=(0, 1))(x, v), torch.func.grad(f, argnums=(0, 1))(x, v))
    assert_same(T.hessian(f, argnums=1)(x, v), torch.func.hessian(f, argnums=1)(x, v))
    assert_same(T.jvp(f, (x, v), (v.sum() * x, v)), torch.func.jvp(f, (x, v), (v.sum() * x, v)))
    many = torch.stack([x, x.sin()]), torch.stack([v, v.cos()])
    assert_same(T.vmap(f)(*many), torch.stack([f(*given) for given in zip(*many, strict=True)]))
    recorded = [t.clone().requires_grad_() for t in (x, v)]
    thunder.jit(f, transforms=[T.NormTransform()])(*recorded).backward()
    assert_same(tuple(t.grad for t in recorded), torch.func.grad(f, argnums=(0, 1))(x, v))
    normed = thunder.jit(f, transforms=[T.NormTransform()])(RMSTensor.of(x), RMSTensor.of(v))
    assert_same(normed.backing, f(x, v))


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (1, 0)])
def test_trees_argnums_aux_and_keywords(argnums: Any) -> None:
    params, batch = _trees()
    found = T.grad(_of_trees, argnums=argnums, has_aux=True)(params, batch, scale=2.0)
    assert_same(found, torch.func.grad(_of_trees, argnums=argnums, has_aux=True)(params, batch, scale=2.0))


def test_value_and_aux() -> None:
    params, batch = _trees()
    gradient, (value, aux) = torch.func.grad_and_value(_of_trees, has_aux=True)(params, batch)
    assert_same(T.value_and_grad(_of_trees, has_aux=True)(params, batch), ((value, aux), gradient))


def test_aux_may_be_anything() -> None:
    x = float64(3)
    aux = {"number": 3, "text": "yes", "nothing": None, "shape": (3,)}
    assert_same(T.grad(lambda x: (x.sum(), {**aux, "shape": tuple(x.shape)}), has_aux=True)(x), (torch.ones_like(x), aux))


def test_an_argument_given_twice_stays_apart() -> None:
    x = float64(3)
    f = lambda a, b: (a * b * b).sum()  # noqa: E731
    assert_same(T.grad(f, argnums=(1, 0))(x, x), torch.func.grad(f, argnums=(1, 0))(x, x))


def test_what_an_inner_function_closes_over_is_constant_for_it_only() -> None:
    def f(transforms: Any) -> Any:
        return transforms.grad(lambda x: transforms.grad(lambda y: (y * y * x).sum())(x).sum())

    x = float64(3)
    assert_same(f(T)(x), f(torch.func)(x))


def test_no_perturbation_confusion() -> None:
    one = torch.tensor(1.0)
    assert T.grad(lambda x: x * T.grad(lambda y: x + y)(one))(one) == 1


class _Net(torch.nn.Module):
    """Tied weights, a buffer, and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 3, dtype=torch.float64)
        self.linear = torch.nn.Linear(3, 4, dtype=torch.float64)
        self.linear.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((4,), 0.5, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.linear(torch.tanh(self.embedding(tokens))) * self.scale * factor


def test_functional_call_with_tied_weights_buffers_and_the_module_itself() -> None:
    net, tokens = _Net(), torch.tensor([0, 2, 3])
    given = {k: v.detach() * 2 for k, v in net.named_parameters()} | {"scale": float64(4)}

    def loss(given: dict) -> torch.Tensor:
        outputs = functional_call(net, given, (tokens,), {"factor": 3.0})
        doubled = functional_call(net, ({"scale": given["scale"] * 2}, {}), tokens)
        return (outputs * doubled * net(tokens)).sum()

    assert_same(T.grad(loss)(given), torch.func.grad(loss)(given))


def test_a_module_is_a_function() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1), torch.nn.Flatten(0)).double()
    x = float64(2, 4)
    assert_same(T.vjp(net, x)[1](x[:, 0]), torch.func.vjp(net, x)[1](x[:, 0]))


def test_inside_a_jitted_function() -> None:
    x = float64(3)
    transformed = T.grad(lambda x: x.sin().sum())
    for f in (lambda x: transformed(x) * 2, lambda x: T.grad(lambda y: y.sin().sum())(x) * 2):
        assert_same(thunder.jit(f)(x), x.cos() * 2)
    assert_same(thunder.jit(transformed)(x), x.cos())


def test_compiled_once_for_each_metadata() -> None:
    transformed = T.grad(lambda x, n: (x**n).sum())
    for x, n in ((float64(3), 2), (float64(3, seed=1), 2), (float64(4), 2), (float64(3), 3), (float64(4), 2)):
        assert_same(transformed(x, n), n * x ** (n - 1))
    assert thunder.cache_misses(transformed) == 3


def test_a_function_that_closes_over_nothing_is_compiled_once() -> None:
    assert T.grad(_without_gradient) is T.grad(_without_gradient)
    scale = 2.0
    assert T.grad(lambda x: x * scale) is not T.grad(lambda x: x * scale)


def test_gradients_are_recorded_inside_whatever_holds_outside() -> None:
    x = float64(3)
    with torch.no_grad():
        assert_same(T.grad(lambda x: (x * x).sum())(x), 2 * x)
    assert torch.is_grad_enabled()


class _Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: dict) -> Any:
        return {"sine": x.sin() * w["w"], "square": (x * x).sum()}, x + 1


def test_vjp_of_trees_any_number_of_times() -> None:
    x, w = float64(3), {"w": float64(3, seed=1)}
    out, pullback, aux = T.vjp(_Pair(), x, w, has_aux=True)
    expected, expected_pullback, expected_aux = torch.func.vjp(_Pair(), x, w, has_aux=True)
    assert_same((out, aux), (expected, expected_aux))
    for ct in ({"sine": x, "square": torch.tensor(2.0).double()}, {"sine": w["w"], "square": x.sum()}):
        assert_same(pullback(ct), expected_pullback(ct))


def test_cotangents_of_another_precision_are_taken_in_that_of_the_result() -> None:
    x = torch.tensor([0.3, -1.2], dtype=torch.float64)

    def f(x):
        return x.float().sin(), x.cos()

    cotangents = torch.tensor([0.5, 2.0], dtype=torch.bfloat16), torch.tensor([0.3, 0.7])
    torch.testing.assert_close(T.vjp(f, x)[1](cotangents), torch.func.vjp(f, x)[1](cotangents))


def test_vjp_inside_transforms_and_jit() -> None:
    x, m = float64(4), float64(3, 4)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(m @ x)

    def jacobian(transforms: Any) -> torch.Tensor:
        return transforms.vmap(transforms.vjp(f, x)[1])(torch.eye(3).double())

    assert_same(jacobian(T), jacobian(torch.func))
    assert_same(thunder.jit(lambda x, ct: T.vjp(f, x)[1](ct))(x, m[:, 0]), torch.func.vjp(f, x)[1](m[:, 0]))


DROPOUTS = [(F.dropout1d, (30, 7)), (F.dropout2d, (20, 3, 2, 2)), (F.dropout3d, (30, 2, 2, 2)), (F.alpha_dropout, (50,))]


@pytest.mark.parametrize("dropout, shape", [*DROPOUTS, (F.feature_alpha_dropout, (20, 3, 2))])
def test_dropouts_of_which_torch_has_only_formulas_that_draw_again(dropout: Callable, shape: tuple[int, ...]) -> None:
    """Entries with one gradient are dropped together; kept and dropped ones are the affine functions that torch's are."""

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = dropout(x, 0.4, True)
        return y.sum(), y

    def maps(value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return torch.stack([gradient.flatten(), (value - gradient * x).flatten()], 1).round(decimals=9).unique(dim=0)

    torch.manual_seed(seeded(0))
    x = float64(*shape)
    gradient, y = T.grad(loss, has_aux=True)(x)
    leaf = x.clone().requires_grad_()
    expected = dropout(leaf, 0.4, True)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(maps(y, gradient), maps(expected.detach(), expected_gradient))
    channel_dims = tuple(i for i in range(x.ndim) if expected_gradient.std(i).max() == 0)
    assert all(gradient.std(i).max() == 0 for i in channel_dims)


def test_random_numbers_of_forward_and_pullback_are_the_same() -> None:
    x = torch.ones(1000)
    value, gradient = T.value_and_grad(lambda x: (F.dropout(x, 0.5) * x).sum())(x)
    assert value == gradient.sum() / 2
    out, pullback = T.vjp(lambda x: F.dropout(x, 0.5), x)
    assert torch.equal(pullback(x)[0], out)


@pytest.mark.parametrize("inside", [False, True])
def test_a_gradient_is_no_tensor_that_was_given(inside):
    """Who changes it in place would change the argument: torch multiplies the argument by one."""
    w, x = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])

    def gradients(w, x):
        of_w, of_both = torch.func.grad(product), torch.func.grad(product, argnums=(0, 1))
        return of_w(w, x), *of_both(w, x), torch.func.vjp(lambda v: v * 1, w)[1](x)[0]

    def product(w, x):
        return (w * x).sum()

    if inside:
        found = thunder.jit(gradients, transforms=[T.SubclassTransform()])(w, x)
    else:
        found = (T.grad(product)(w, x), *T.grad(product, argnums=(0, 1))(w, x), T.vjp(lambda v: v * 1, w)[1](x)[0])
    torch.testing.assert_close(found, gradients(w, x))
    memory = {t.untyped_storage().data_ptr() for t in (w, x)}
    assert all(g.untyped_storage().data_ptr() not in memory for g in found)


_FILLED_BY_TENSORS: dict[str, Callable] = {
    "an entry": lambda x, i: x.index_fill(0, i, x[0]),
    "a sum": lambda x, i: torch.index_fill(x.detach(), 0, i, x.sum()),
    "in place": lambda x, i: (x * 2).index_fill_(0, i, x[1]),
}


@pytest.mark.parametrize("name", _FILLED_BY_TENSORS)
def test_places_filled_by_a_tensor_that_is_differentiated(name: str) -> None:
    """Torch's own derivative of it looks for places that are named twice."""
    f, x, i = _FILLED_BY_TENSORS[name], float64(3).requires_grad_(), torch.tensor([2, 0, 2])
    found, wanted = (torch.autograd.grad(g(x, i).sin().sum(), x)[0] for g in (thunder.jit(f, transforms=[T.NormTransform()]), f))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("is_differentiated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_torchs(dtype, is_differentiated):
    """Thunder's symbol for them is executed in bfloat16 alone, and takes no argument by torch's name."""
    torch.manual_seed(seeded(0))
    ends = torch.tensor([2, 5, 6], dtype=torch.int32)
    given = [torch.randn(s, dtype=dtype, requires_grad=is_differentiated) for s in ((6, 16), (3, 16, 8))]
    program = lambda x, w: torch._grouped_mm(x, w, offs=ends).square()  # noqa: E731
    got, want = thunder.jit(program, transforms=[T.NormTransform()])(*given), program(*given)
    torch.testing.assert_close(got, want)
    if is_differentiated:
        torch.testing.assert_close(torch.autograd.grad(got.sum(), given), torch.autograd.grad(want.sum(), given))
