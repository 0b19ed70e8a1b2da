"""Transforms of functions over norm maps, normed tensors and wrapper subclasses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

import thunder_norm.transforms as T
from tests.transform_oracles import assert_same, float64
from thunder_norm import RMSTensor, RMSToRMSTensor, build_norm_map, norm_report
from thunder_norm.errors import TransformError, TransformTypeError, UnsupportedOpError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)) * self.up(x))


def _norm_map() -> Any:
    with torch.device("meta"):
        return build_norm_map(Block(), torch.empty(4, 8, device="meta"), parameters="unit")


def _size(norm_map: Any, x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return norm_map(RMSTensor(x), normed_state_dict={"up.weight": RMSToRMSTensor(up)}).norm_size


def test_norm_maps_batched_and_differentiated() -> None:
    norm_map = _norm_map()
    function, sizes = T.function_of_sizes(norm_map, RMSTensor(1.5), normed_state_dict={"up.weight": RMSToRMSTensor(2.0)})
    assert len(sizes) == 2
    assert_same(function(sizes)[0], _size(norm_map, torch.tensor(1.5), torch.tensor(2.0)))

    batch = {name: torch.stack([t, 2 * t, 0.5 * t]) for name, t in sizes.items()}
    loop = torch.stack([_size(norm_map, 1.5 * k, 2.0 * k) for k in torch.tensor([1.0, 2.0, 0.5])])
    assert_same(T.vmap(function)(batch)[0], loop)

    given = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.5, 2.0)]
    gradient = torch.autograd.grad(_size(norm_map, *given), given, create_graph=True)
    found = T.grad(lambda s: function(s)[0])(sizes)
    assert_same(list(found.values()), [g.detach() for g in gradient])
    rows = [torch.autograd.grad(g, given, retain_graph=True, allow_unused=True) for g in gradient]
    hessian = T.hessian(lambda s: function(s)[0])(sizes)
    assert_same([[v for v in row.values()] for row in hessian.values()], [list(row) for row in rows])
    tangents = {name: torch.ones_like(t) for name, t in sizes.items()}
    assert_same(T.jvp(function, (sizes,), (tangents,))[1][0], sum(gradient).detach())


def test_a_norm_map_s_function_names_its_inputs() -> None:
    function, sizes = T.function_of_sizes(_norm_map(), RMSTensor(1.5))
    with pytest.raises(TransformError, match=next(iter(sizes))):
        function({})


A, B, W = float64(3, 4), float64(3, 4, seed=1), float64(4, 4)


def _on_two(t: TwoTensor) -> TwoTensor:
    return torch.tanh(t @ W) * 2 + t


def _made_inside(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    t = _on_two(TwoTensor(a, b))
    return t.a, t.b


def _plain(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ W) * 2 + x


def test_vmap_of_a_program_of_wrappers() -> None:
    found = T.vmap(_on_two)(TwoTensor(A, B))
    assert type(found) is TwoTensor
    assert_same((found.a, found.b), (_plain(A), _plain(B)))
    assert_same(T.vmap(_made_inside)(A, B), (_plain(A), _plain(B)))


def test_gradients_of_a_program_of_wrappers() -> None:
    gradient = T.grad(lambda t: _on_two(t).a.square().sum())(TwoTensor(A, B))
    assert type(gradient) is TwoTensor
    expected = torch.func.grad(lambda x: _plain(x).square().sum())(A)
    assert_same((gradient.a, gradient.b), (expected, torch.zeros_like(B)))
    per_sample = T.vmap(T.grad(lambda a, b: _made_inside(a, b)[0].square().sum()))(A, B)
    assert_same(per_sample, expected)


def test_a_loss_may_be_a_wrapper() -> None:
    def loss(t: torch.Tensor) -> torch.Tensor:
        return (t * t.sum()).square().mean()

    t = TwoTensor(A, B)
    found, expected = T.grad(loss)(t), torch.func.grad(loss)(t)
    assert_same((found.a, found.b), (expected.a, expected.b))
    with pytest.raises(TransformTypeError, match=r"a TwoTensor of torch.float64 \(3, 4\)"):
        T.grad(lambda t: t * 2)(t)


DERIVATIVES = {
    "grad": lambda f, x: T.grad(lambda x: f(x).sum())(x),
    "torch.func.grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "value_and_grad": lambda f, x: T.value_and_grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: T.vjp(f, x)[1](x),
    "jvp": lambda f, x: T.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: T.jacrev(f)(x),
    "jacfwd": lambda f, x: T.jacfwd(f)(x),
    "hessian": lambda f, x: T.hessian(lambda x: f(x).sum())(x),
    "of another argument": lambda f, x: T.grad(lambda w: f(x * w).sum())(W[0]),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_derivative_of_a_norm_is_no_norm_of_the_derivative(derivative) -> None:
    """At 0 the slope of tanh is 1, that of its norm at 3 is 0.04: a result that says so would be wrong."""
    x = RMSTensor(3.0, backing=torch.zeros(1, 4, dtype=torch.float64))
    jitted = thunder.jit(lambda x: DERIVATIVES[derivative](torch.tanh, x), transforms=[NormTransform()])
    with pytest.raises(TransformTypeError, match="a function that returns a (RMS|Linf)Tensor(.|\n)*no rule says them"):
        jitted(x)


def test_derivatives_of_a_backing_and_of_a_norm_beside_norms() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple:
        y, (by_backing, aux) = x @ w, T.grad(lambda w: ((x @ w).backing.sin().sum(), x @ w), has_aux=True)(w)
        return y, by_backing, aux, T.grad(lambda w: (x @ w).norm_size)(w)

    x = RMSTensor(2.0, backing=A)
    y, by_backing, aux, by_norm = thunder.jit(f, transforms=[NormTransform()])(x, W)
    assert_same(by_backing, torch.func.grad(lambda w: (A @ w).sin().sum())(W))
    assert_same(aux.norm_size, y.norm_size)
    w = W.clone().requires_grad_()
    assert_same(by_norm, torch.autograd.grad((x @ w).norm_size, w)[0])
    with pytest.raises(TransformTypeError, match="with respect to the values of a RMSTensor"):
        thunder.jit(T.grad(lambda x: x.backing.sum()), transforms=[NormTransform()])(x)


def test_wrappers_around_a_transformed_function_in_a_jitted_one() -> None:
    def f(t: TwoTensor, s: torch.Tensor) -> tuple[TwoTensor, torch.Tensor]:
        doubled = T.vmap(lambda t: t * 2)(t * s) + t
        return doubled, T.grad(lambda s: (t * s).b.sum())(s)

    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    s = torch.tensor(3.0, dtype=torch.float64)
    found, gradient = jitted(TwoTensor(A, B), s)
    assert_same((found.a, found.b, gradient), (7 * A, 7 * B, B.sum()))


def test_gradient_of_a_norm() -> None:
    def size(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(F.linear(x, W)).norm_size ** 2

    gradient = T.grad(size)(RMSTensor(2.0, backing=A))
    x = RMSTensor(2.0, backing=A, norm_size_requires_grad=True)
    assert type(gradient) is RMSTensor
    assert_same(gradient.norm_size, torch.autograd.grad(size(x), x.norm_size)[0])


class _OneStep(torch.nn.Module):
    """An inner step of torch.func's, as in meta-learning."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gradient = torch.func.grad(lambda w: (x @ w).square().sum())(self.weight)
        return x @ (self.weight - 0.1 * gradient)


class _Curved(_OneStep):
    """A second derivative of each sample, as in physics-informed networks: torch writes its basis entry by entry."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.func.hessian(lambda x: (x @ self.weight).tanh().sum()))(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: model(x),
        lambda model, x: torch.func.vmap(lambda w: torch.func.jvp(lambda v: x @ v, (w,), (w,))[0])(torch.ones(3, 4, 4)),
    ],
    ids=["eager", "vmap"],
)
def test_norms_inside_functions_that_torch_transforms_are_refused(call) -> None:
    with pytest.raises(UnsupportedOpError, match=r"torch\.(func|vmap)"):
        call(_OneStep(), RMSTensor.of(torch.ones(2, 4)))


@pytest.mark.parametrize("model", [_OneStep, _Curved])
def test_reports_follow_what_torch_transforms(model) -> None:
    x = torch.linspace(-1.0, 1.0, 8).view(2, 4)
    rows = norm_report(thunder.jit(model(), transforms=[NormTransform()]), x).rows
    assert rows[-1].actual == pytest.approx(model()(x).square().mean(-1).max().sqrt().item(), rel=1e-4)
    assert rows[-1].actual <= rows[-1].norm_size * (1 + 1e-5)
