"""Gradients that the executor `inductor` brings along, against eager mode: their formulas, operation by operation, without a compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from tests.executors.test_calls import OneByOne, jit
from tests.seeds import seeded
from thunder_norm.executors import graphs, members
from thunder_norm.executors.plans import Layout
import thunder


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 6), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("how", ["training", "eval", "plain", "without statistics", "bfloat16"])
def test_batch_norms_have_eagers_gradients_and_statistics(how: str, shape: tuple[int, ...]) -> None:
    classes = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    norm = classes[len(shape)](3, affine=how != "plain", track_running_stats=how != "without statistics", momentum=0.3)
    torch.manual_seed(seeded(len(shape)))
    for p in norm.parameters():
        nn.init.normal_(p, 1.0, 0.3)
    x, other = torch.randn(shape, dtype=torch.float64) * 2 + 1, torch.randn(shape, dtype=torch.float64)
    dtype, tolerance = (torch.bfloat16, 5e-2) if how == "bfloat16" else (torch.float64, 1e-9)
    norm.to(torch.float32 if how == "bfloat16" else dtype).train(how != "eval")
    mine, theirs = copy.deepcopy(norm), copy.deepcopy(norm)
    jitted = jit(mine)
    for _ in range(2):
        found = [x.to(dtype).requires_grad_() for _ in range(2)]
        for f, t in zip((jitted, theirs), found, strict=True):
            with OneByOne():
                ((f(t).tanh() + t) * other.to(dtype)).sum().backward()
        assert_close(found[0].grad, found[1].grad, rtol=tolerance, atol=tolerance)
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance, msg=name)
    for (name, b), c in zip(mine.named_buffers(), theirs.buffers(), strict=True):
        assert_close(b, c, rtol=tolerance, atol=tolerance, msg=name)


class _NormalizedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.linear(self.norm(x)) + self.norm.running_var
        return self.norm(between) + self.norm.running_mean


def test_statistics_are_read_between_and_after_batch_norms() -> None:
    mine = _NormalizedTwice().double()
    theirs, x = copy.deepcopy(mine), torch.randn(5, 3, dtype=torch.float64)
    jitted = jit(mine)
    for _ in range(2):
        with OneByOne():
            found = [f(x) for f in (jitted, theirs)]
            gradients = [
                torch.autograd.grad(y.tanh().square().sum(), list(m.parameters()))
                for y, m in zip(found, (mine, theirs), strict=True)
            ]
        assert_close(*found)
        assert_close(*gradients)
    assert_close(dict(mine.named_buffers()), dict(theirs.named_buffers()))


def test_both_gradients_of_a_convolution_are_one_operation_where_both_are_wanted() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3))
    jitted = jit(model)
    with OneByOne():
        jitted(torch.randn(1, 2, 7, 7)).sum().backward()
    names = [b.sym.name for r in thunder.last_backward_traces(jitted)[-1].bound_symbols for b in (r, *r.subsymbols)]
    assert (names.count("convolution_gradients"), names.count("convolution_weight_gradient")) == (1, 1)  # none of the input
    assert "convolution_input_gradient" not in names


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_leaves_have_the_strides_and_values_of_eager(memory_format: torch.memory_format) -> None:
    torch.manual_seed(seeded(3))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3, groups=1))
    model.double().to(memory_format=memory_format)
    theirs = copy.deepcopy(model)
    jitted = jit(model)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    found = [x.clone().requires_grad_() for _ in range(2)]
    for _ in range(2):
        for f, t in zip((jitted, theirs), found, strict=True):
            f(t).square().sum().backward()
    for mine, other in zip((found[0], *model.parameters()), (found[1], *theirs.parameters()), strict=True):
        assert_close(mine.grad, other.grad)
        assert mine.grad is not None and mine.grad.stride() == mine.stride()


@pytest.mark.parametrize("inplace", [False, True])
def test_relu_has_eagers_value_and_gradient_where_a_number_is_none(inplace: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.relu(x * 2, inplace=inplace) * 3

    found = []
    for g in (jit(f), f):
        x = torch.tensor([-1.0, 0.0, 2.0, float("nan"), float("inf"), -0.0], requires_grad=True)
        with OneByOne():
            y = g(x)
            y.backward(torch.arange(1.0, 7.0))
        found.append((y, x.grad))
    assert_close(*found, equal_nan=True)


class Convolutions(nn.Module):
    """Weights that are parameters, used twice, computed, returned, of several groups, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((6, 4, 3, 3), (6, 6, 3, 3), (6, 6, 1, 1), (6, 2, 3, 3), (6, 5, 2, 2))
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape) / 3) for shape in shapes])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w = self.weights
        x = F.relu(F.conv2d(x, w[0], padding=1))
        x = F.conv2d(F.conv2d(x, w[1], padding=1).tanh(), w[1], stride=2)
        x = F.conv2d(x, w[2] - w[2].mean((1, 2, 3), keepdim=True))
        return F.conv_transpose2d(F.conv2d(x, w[3], groups=3).sin(), w[4]), w[0] * 2


@pytest.mark.slow
def test_convolutions_whose_weights_are_kept_for_the_backward_have_eagers_gradients() -> None:
    torch.manual_seed(seeded(4))
    model = Convolutions()
    theirs = copy.deepcopy(model)
    jitted = jit(model)
    x = torch.randn(2, 4, 9, 9)
    for _ in range(2):
        for f in (jitted, theirs):
            image, weight = f(x)
            (image.square().sum() + weight.sin().sum()).backward()
        with torch.no_grad():
            for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
                assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
                assert p.grad is not None and p.grad.is_contiguous()
                p.add_(1e-3)
                q.add_(1e-3)


def test_a_weight_that_may_be_copied_is_the_very_weight_or_a_copy_of_it() -> None:
    """What leaves a region for the backward alone; another result of the same weight is the weight."""

    def f(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        return [torch.convolution(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1).sin(), weight, weight]

    inputs = torch.randn(2, 8, 6, 6), torch.randn(4, 8, 3, 3)
    layouts = [Layout.AS_IN_TORCH, Layout.ANY_OF_A_COPY, Layout.AS_IN_TORCH]
    found = graphs.compiled(f, inputs, layouts, True)(list(inputs))
    assert_close(found, f(*inputs), check_stride=False, rtol=1e-4, atol=1e-4)
    assert found[0].stride() == f(*inputs)[0].stride() and found[2] is inputs[1]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.linalg.norm(x) * x.cos(),
        lambda x: torch.std_mean(x[:0])[1] * 2 + x.sin(),
        lambda x: x[:0].mean() + x.exp(),
    ],
    ids=["a norm", "the mean of nothing", "the same, as one operation"],
)
def test_what_inductor_has_other_code_for_is_eagers(f) -> None:
    torch.manual_seed(seeded(0))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    jitted = jit(f)
    found = jitted(x)  # compiled
    assert_close(found, f(x), equal_nan=True)
    slopes = [torch.autograd.grad(y.nan_to_num().sum(), x)[0] for y in (found, f(x))]
    assert_close(*slopes, equal_nan=True)
    traces = (thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1])
    inside = [b for t in traces for r in t.bound_symbols if r.sym.is_fusion for b in r.subsymbols]
    assert inside and all(0 not in p.shape for b in inside for p in (*b.flat_proxy_args, *b.flat_proxy_outs))


@pytest.mark.parametrize("broadcast", ["none", "last", "rows", "all"])
@pytest.mark.parametrize("factors", [{}, {"beta": 0.5, "alpha": -3}, {"beta": 0}, {"alpha": 0.25}], ids=str)
def test_products_that_are_added_have_eagers_gradients(broadcast: str, factors: dict) -> None:
    torch.manual_seed(seeded(0))
    shapes = {"none": (3, 5), "last": (5,), "rows": (3, 1), "all": ()}
    given = [torch.randn(s, dtype=torch.float64) for s in (shapes[broadcast], (3, 4), (4, 5))]

    def f(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.addmm(c.sin(), a.cos(), b.sin(), **factors).tanh()

    jitted = jit(f)
    mine, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    with OneByOne():
        found, expected = jitted(*mine), f(*theirs)
        found.sum().backward()
    expected.sum().backward()
    assert_close(found, expected)
    for p, q in zip(mine, theirs, strict=True):
        assert_close(p.grad, q.grad)
    names = [b.sym.name for r in thunder.last_backward_traces(jitted)[-1].bound_symbols for b in (r, *r.subsymbols)]
    assert not any(name.endswith("_vjp") for name in names)


def test_products_that_are_added_have_eagers_gradients_as_methods_where_one_wants_none_and_in_bfloat16() -> None:
    torch.manual_seed(seeded(0))
    given = [torch.randn(s).bfloat16() for s in ((5,), (3, 4), (4, 5))]
    jitted = jit(lambda c, a, b: c.addmm(a, b, alpha=2).float().square())
    mine, theirs = ([t.clone().requires_grad_(t is not given[1]) for t in given] for _ in range(2))
    with OneByOne():
        jitted(*mine).sum().backward()
    theirs[0].addmm(theirs[1], theirs[2], alpha=2).float().square().sum().backward()
    assert mine[1].grad is None
    for p, q in ((mine[0], theirs[0]), (mine[2], theirs[2])):
        assert_close(p.grad, q.grad, rtol=5e-2, atol=5e-1)


def test_complex_products_that_are_added_have_eagers_gradients() -> None:
    torch.manual_seed(seeded(0))
    given = [torch.randn(s, dtype=torch.complex128) for s in ((5,), (3, 4), (4, 5))]
    jitted = jit(lambda c, a, b: torch.view_as_real(torch.addmm(c, a, b)).square())
    mine, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    with OneByOne():
        jitted(*mine).sum().backward()
    torch.view_as_real(torch.addmm(*theirs)).square().sum().backward()
    for p, q in zip(mine, theirs, strict=True):
        assert_close(p.grad, q.grad)


def _without_a_rule(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cummax(x * 2, 1)[0].sin().sum() + torch.kthvalue(x * y, 2, 1)[0].exp().sum()


def _gradients_by_torch_func(f: Callable) -> list[str]:
    """The gradients by ``torch.func`` that are in no region, after the result was compared with eager mode."""
    torch.manual_seed(seeded(0))
    inputs = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    jitted = jit(f)
    for _ in range(2):
        with OneByOne():
            found = torch.autograd.grad(jitted(*inputs), inputs)
        assert_close(found, torch.autograd.grad(f(*inputs), inputs))
    return [b.sym.name for b in thunder.last_backward_traces(jitted)[-1].bound_symbols if "vjp_" in b.sym.name]


@pytest.mark.parametrize("can_be", [True, False])
def test_gradients_by_torch_func_are_in_regions_where_they_can_be_compiled(can_be: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_be:
        monkeypatch.setattr(members, "is_compilable", lambda *given: False)
    assert (_gradients_by_torch_func(_without_a_rule) == []) is can_be


def test_what_draws_numbers_or_depends_on_values_cannot_be_compiled() -> None:
    like = [((3,), torch.float32, torch.device("cpu"))]
    assert graphs.is_compilable(lambda t: (t * 2, t[1:]), like)
    for function in (torch.bernoulli, lambda t: t * t.sum().item(), lambda t: t[t > 0], lambda t: t if t.sum() > 0 else -t):
        assert not graphs.is_compilable(lambda t, function=function: (function(t).sum(),), like)
