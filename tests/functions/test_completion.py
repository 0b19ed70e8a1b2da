"""In transformed functions torch runs what Thunder has no operation for, or not with these arguments; in-place is no exception."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.transform_oracles import assert_same, float64
from thunder_norm.errors import DataDependentError, TransformError, UnsupportedOpError
from thunder_norm.transforms import NormTransform, SubclassTransform, grad, hessian, jacfwd, jvp, vjp, vmap
import thunder

VECTOR, MATRIX = float64(3), float64(3, 3)


def check(f: Callable, x: torch.Tensor) -> None:
    """The function agrees with torch.func under reverse and forward mode, both ways around, and under vmap."""
    assert_same(grad(f)(x), torch.func.grad(f)(x))
    assert_same(jvp(grad(f), (x,), (x.cos(),)), torch.func.jvp(torch.func.grad(f), (x,), (x.cos(),)))
    batch = torch.stack([x, 0.5 * x])
    assert_same(vmap(grad(f))(batch), torch.stack([torch.func.grad(f)(sample) for sample in batch]))


UNKNOWN = {
    "a factory": lambda x: (x * torch.linspace(0, 1, 3, dtype=x.dtype)).sum(),
    "indices": lambda x: x[torch.tril_indices(3, 3)[0]].square().sum(),
    "a mode": lambda x: F.pad(x[None], (1, 1), mode="reflect").square().sum(),
    "an argument left out": lambda x: torch.take_along_dim(x, torch.tensor([0, 2])).square().sum(),
    "a list of results": lambda x: torch.gradient(x)[0].square().sum(),
    "a method's spelling": lambda x: x.tile(2, 2).square().sum(),
    "values are checked": lambda x: torch.quantile(x, 0.3) ** 2,
    "values of an argument are checked": lambda x: F.gaussian_nll_loss(x, x.cos(), x.exp()),
    "a static mask inside": lambda x: torch.combinations(x).prod(1).sum(),
    "unbiased in the place of a dimension": lambda x: torch.std(x, False) + x.var(True),
    "a method and a function of one name": lambda x: (x[:, None] * x).unfold(0, 2, 1).square().sum(),
    "a branch on the dtype": lambda x: (x.sin() if x.dtype.is_floating_point else x).sum(),
    "a function of torch._C": lambda x: F.leaky_relu_(x * 2).square().sum(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_torch_runs_what_thunder_does_not_know(name: str):
    check(UNKNOWN[name], VECTOR)


def test_an_attribute_that_only_torchs_tensors_have():
    check(lambda x: (x.mH @ x).square().sum(), MATRIX)


def in_place(body: str) -> Callable:
    """A function of a matrix `x` that makes a copy of it, `t`, and does `body`."""
    names: dict = {"torch": torch}
    exec("def f(x):\n    t = x.clone()\n" + "".join(f"    {s}\n" for s in body.split("; ")) + "    return (t * x).sum()", names)
    return names["f"]


VIEWS = (
    "t[0] += t[1]",
    "t[..., 0] *= 2",
    "t.T.mul_(0.5)",
    "t.select(-1, 0).zero_()",
    "torch.diagonal(t).mul_(2)",
    "t[1:][0].exp_()",
    "t.view(-1).mul_(2)",
    "t[:2, 1:] -= x[1:, :2]",
    "a = t[0]; b = t[:, 0]; a.mul_(2); t = t * b.sum()",
    "a = t[0]; a.mul_(2); a.add_(1); t[1] = a",
    "a = t[0]; t.mul_(2); t = t + a",
    "t.fill_diagonal_(2)",
    "t.index_fill_(0, torch.tensor([0]), 0.3)",
    "t[[0, 1]] = 0.5",
    "t[t > 0] = 0.1",
    "t[torch.tensor([0, 2])] *= 2",
    "u = t; u += 1; t = t * u",
)


@pytest.mark.parametrize("body", VIEWS)
def test_changes_of_views_are_changes_of_what_they_are_views_of(body: str):
    check(in_place(body), MATRIX)


@pytest.mark.parametrize(
    "body", ["t.reshape(-1).mul_(2)", "t.flatten()[0].mul_(2)", "t.detach().mul_(2)", "t.chunk(3)[0].mul_(2)"]
)
def test_what_is_a_view_only_sometimes_is_refused(body: str):
    with pytest.raises(TransformError, match="may share memory"):
        grad(in_place(body))(MATRIX)


def test_an_argument_is_not_changed_through_a_view():
    with pytest.raises(TransformError, match="did not make"):
        grad(lambda x: x[0].mul_(2).sum())(MATRIX)


def test_new_values_do_not_take_the_names_of_others():
    """Those of views taken again once had names of the surroundings."""
    f = in_place("a = t[0]; b = t[:, 0]; a.mul_(2); t = t * b.sum()")
    wanted = torch.func.grad(lambda y: torch.func.grad(f)(y).sin().sum())(MATRIX)
    assert_same(vmap(grad(lambda y: grad(f)(y).sin().sum()))(torch.stack([MATRIX] * 2))[0], wanted)


def test_what_depends_on_values_is_refused():
    with pytest.raises(DataDependentError, match="test_completion.py"):
        grad(lambda x: x[x > 0].cumsum(0).sum())(VECTOR)
    with pytest.raises(DataDependentError):
        grad(lambda x: torch.masked_select(x, x > 0).sum())(VECTOR)


@pytest.mark.parametrize("use", [lambda x: x.sum().backward(), lambda x: x.requires_grad_()])
def test_torchs_autograd_and_memory_are_refused_inside(use: Callable):
    def f(x: torch.Tensor) -> torch.Tensor:
        use(x * 1)
        return x.sum()

    with pytest.raises(UnsupportedOpError, match="test_completion.py"):
        grad(f)(VECTOR)


def test_a_call_that_torch_does_not_take_either_raises():
    with pytest.raises(RuntimeError, match="size|shape"):
        grad(lambda x: (x @ torch.ones(4, dtype=x.dtype)).sum())(VECTOR)


_REFUSED: dict[str, tuple[Callable, torch.Tensor]] = {
    "integers divided in place": (lambda x: x.clone().div_(2), torch.tensor([1, 2])),
    "numbers added to bools in place": (lambda x: x.clone().add_(1), torch.tensor([True, False])),
    "fractions times integers in place": (lambda x: x.clone().mul_(0.5), torch.tensor([1, 2])),
    "integers in addcdiv": (lambda x: torch.addcdiv(x, x, x + 1), torch.tensor([1, 2])),
    "the length of integers": (lambda x: F.normalize(x, dim=0), torch.tensor([1, 2])),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_torch_refuses_of_integers_is_refused(name: str):
    """Thunder computes it."""
    f, x = _REFUSED[name]
    with pytest.raises((RuntimeError, NotImplementedError)) as torchs:
        torch.func.vmap(f)(x[None])
    for ours in (lambda: vmap(f)(x[None]), lambda: grad(lambda w: w * f(x).sum())(torch.ones(()))):
        with pytest.raises(torchs.type) as found:
            ours()
        assert str(found.value) == str(torchs.value)


@pytest.mark.parametrize("transforms", [(), (SubclassTransform,), (NormTransform,)])
def test_jit_inside_a_transformed_function_is_the_function(transforms: tuple):
    def inside(x: torch.Tensor) -> torch.Tensor:
        return thunder.jit(lambda y: y.sin().prod(), transforms=[t() for t in transforms])(x)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.sin().prod()

    assert_same(grad(inside)(VECTOR), torch.func.grad(plain)(VECTOR))
    assert_same(jacfwd(lambda x: vjp(inside, x)[1](x[0]))(VECTOR), jacfwd(lambda x: vjp(plain, x)[1](x[0]))(VECTOR))
    assert_same(thunder.jit(lambda x: hessian(inside)(x))(VECTOR), torch.func.hessian(plain)(VECTOR))
