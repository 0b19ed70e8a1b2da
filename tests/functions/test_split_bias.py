"""Biases added by operations of their own, against eager in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm import RMSTensor
from thunder_norm.transforms import NormTransform, SplitBiasTransform, SubclassTransform
import thunder
from thunder.core.symbol import BoundSymbol


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


PROGRAMS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...], str]] = {
    "linear": (F.linear, ((2, 5, 3), (4, 3), (4,)), "linear"),
    "linear, keyword": (lambda x, w, b: F.linear(x, w, bias=b), ((2, 3), (4, 3), (4,)), "linear"),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1, dilation=2), ((2, 4, 9), (6, 4, 3), (6,)), "conv1d"),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, groups=2), ((2, 4, 7, 7), (6, 2, 3, 3), (6,)), "conv2d"),
    "conv2d, same": (lambda x, w, b: F.conv2d(x, w, bias=b, padding="same"), ((4, 7, 7), (6, 4, 3, 3), (6,)), "conv2d"),
    "conv3d": (lambda x, w, b: torch.conv3d(x, w, b), ((2, 2, 4, 5, 4), (3, 2, 2, 2, 2), (3,)), "conv3d"),
    "conv_transpose1d": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2),
        ((2, 4, 5), (4, 6, 3), (6,)),
        "conv_transpose1d",
    ),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1, groups=2),
        ((2, 4, 5, 5), (4, 3, 3, 3), (6,)),
        "conv_transpose2d",
    ),
    "conv_transpose2d, no batch": (
        lambda x, w, b: torch.conv_transpose2d(x, w, bias=b),
        ((4, 5, 5), (4, 3, 3, 3), (3,)),
        "conv_transpose2d",
    ),
    "conv_transpose3d": (F.conv_transpose3d, ((1, 2, 3, 3, 3), (2, 3, 2, 2, 2), (3,)), "conv_transpose3d"),
    "addmm": (torch.addmm, ((4,), (2, 3), (3, 4)), "addmm"),
    "addmm, alpha and beta": (
        lambda b, x, y: torch.addmm(b, x, y, alpha=-0.5, beta=3),
        ((2, 4), (2, 3), (3, 4)),
        "addmm",
    ),
    "addmm, method": (lambda b, x, y: b.addmm(x, y, alpha=2), ((2, 1), (2, 3), (3, 4)), "addmm"),
    "addmm, keywords": (lambda b, x, y: torch.addmm(input=b, mat1=x, mat2=y, beta=0.5), ((4,), (2, 3), (3, 4)), "addmm"),
    "addmm, scalar bias": (lambda b, x, y: torch.addmm(b, x, y, beta=2), ((), (2, 3), (3, 4)), "addmm"),
    "addbmm": (torch.addbmm, ((2, 4), (5, 2, 3), (5, 3, 4)), "addbmm"),
    "addbmm, alpha and beta": (
        lambda b, x, y: torch.addbmm(b, x, y, alpha=0.3, beta=-2),
        ((4,), (5, 2, 3), (5, 3, 4)),
        "addbmm",
    ),
    "baddbmm": (torch.baddbmm, ((5, 2, 4), (5, 2, 3), (5, 3, 4)), "baddbmm"),
    "baddbmm, alpha and beta": (
        lambda b, x, y: torch.baddbmm(b, x, y, alpha=0.3, beta=-2),
        ((4,), (5, 2, 3), (5, 3, 4)),
        "baddbmm",
    ),
}


def top_level(program: Any) -> list[BoundSymbol]:
    """The operations of the program before it is differentiated, as first rewritten."""
    trace = next(t for t in thunder.last_traces(program) if "Biases added" in str(t.get_provenance()))
    return [b for b in trace.bound_symbols if b.source_filename is not None]


def results(f: Callable, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a function returns, and the gradients of a weighted sum of it."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    out = f(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    (out * weights).sum().backward()
    return [out, *(t.grad for t in inputs)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients_are_those_of_eager(name: str) -> None:
    f, shapes, operation = PROGRAMS[name]
    inputs = [rand(*s) for s in shapes]
    jf = thunder.jit(lambda *args: f(*args), transforms=[SplitBiasTransform()])
    for found, expected in zip(results(jf, inputs), results(f, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    names = [b.sym.name for b in top_level(jf)]
    assert "add" in names
    assert operation not in names or not operation.endswith("mm")
    for bsym in top_level(jf):
        assert bsym.source_filename == __file__  # the user's line stays


def test_only_operations_with_a_bias_change() -> None:
    def f(x, w, k, m):
        y = F.linear(x, w)
        z = F.conv1d(y[None], k)
        return torch.addmm(m, z[0], z[0].mT, beta=0)

    inputs = rand(3, 5), rand(4, 5), rand(2, 3, 2), torch.full((2, 2), float("nan"), dtype=torch.float64)
    plain, split = thunder.jit(f), thunder.jit(f, transforms=[SplitBiasTransform()])
    torch.testing.assert_close(split(*inputs), f(*inputs))  # with beta=0 torch does not look at the nan
    plain(*inputs)
    assert str(thunder.last_traces(split)[-1]).count("=") == str(thunder.last_traces(plain)[-1]).count("=")
    with pytest.raises(StopIteration):
        top_level(split)


def test_integers() -> None:
    def f(b, x, y):
        return torch.addbmm(b, x, y, alpha=2, beta=3)

    inputs = torch.arange(8).reshape(2, 4), torch.arange(30).reshape(5, 2, 3), torch.arange(60).reshape(5, 3, 4)
    inputs = tuple(t.to(torch.int32) for t in inputs)
    found = thunder.jit(f, transforms=[SplitBiasTransform()])(*inputs)
    assert found.dtype == torch.int32 and torch.equal(found, f(*inputs))


def test_a_module_with_shared_bias_and_one_without() -> None:
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(4, 4, bias=i != 2) for i in range(3))
            self.b.bias = self.a.bias

        def forward(self, x):
            return self.c(F.relu(self.b(F.relu(self.a(x)))))

    model, x = Model().double(), rand(3, 4)
    jm = thunder.jit(model, transforms=[SplitBiasTransform()])
    jm(x).square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-12)
    assert [b.sym.name for b in top_level(jm)].count("add") == 2


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("operation", [F.linear, F.conv1d, torch.baddbmm], ids=lambda f: f.__name__)
def test_under_autocast(operation: Callable, where: str) -> None:
    shapes = {F.linear: ((2, 3), (4, 3), (4,)), F.conv1d: ((2, 3, 5), (4, 3, 2), (4,))}
    inputs = [torch.randn(s) for s in shapes.get(operation, ((5, 2, 4), (5, 2, 3), (5, 3, 4)))]

    def f(*args):
        if where == "outside":
            return operation(*args)
        with torch.autocast("cpu", torch.bfloat16):
            return operation(*args)

    split = thunder.jit(f, transforms=[SplitBiasTransform()])
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "outside"):
        expected, found = f(*inputs), split(*inputs)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("first", [True, False])
def test_with_norms(first: bool) -> None:
    def f(x, w, b):
        return F.linear(x, w, b).relu()

    x, w, b = rand(5, 4), rand(3, 4).requires_grad_(), rand(3).requires_grad_()
    both = [SplitBiasTransform(), NormTransform()] if first else [NormTransform(), SplitBiasTransform()]
    jf = thunder.jit(f, transforms=both)
    torch.testing.assert_close(jf(x, w, b), f(x, w, b), rtol=1e-12, atol=1e-12)
    found, expected = jf(RMSTensor.of(x), w, b), f(RMSTensor.of(x), w, b)  # traced, and by plain PyTorch
    torch.testing.assert_close(found.backing, expected.backing, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.norm_size, expected.norm_size)
    for g, h in zip(torch.autograd.grad(found.norm_size, (w, b)), torch.autograd.grad(expected.norm_size, (w, b)), strict=True):
        torch.testing.assert_close(g, h)
    assert "torch.nn.functional.linear(x_backing, w, None)" in str(thunder.last_traces(jf)[-1])


@pytest.mark.parametrize(
    ("operation", "first", "requires_grad"),
    [(F.linear, True, True), (F.linear, False, False), (F.conv_transpose2d, False, True), (F.conv_transpose2d, True, False)],
)
def test_with_wrapper_subclasses(operation: Callable, first: bool, requires_grad: bool) -> None:
    shapes = ((2, 3), (4, 3), (4,)) if operation is F.linear else ((2, 3, 4, 4), (3, 4, 2, 2), (4,))
    a, w, b = (rand(*s) for s in shapes)
    both = [SplitBiasTransform(), SubclassTransform()] if first else [SubclassTransform(), SplitBiasTransform()]

    def f(x, w, b):
        return operation(x, w, b) * 2

    def run(g):
        x = TwoTensor(a.clone(), 2 * a)
        x.requires_grad_(requires_grad)
        out = g(x, w, b)
        if requires_grad:
            out.sum().backward()
        return out, x.grad

    jf = thunder.jit(f, transforms=both)
    (found, grad), (expected, expected_grad) = run(jf), run(f)
    torch.testing.assert_close(found.a, expected.a, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.b, expected.b, rtol=1e-12, atol=1e-12)
    if requires_grad:
        torch.testing.assert_close(grad.a, expected_grad.a)
        torch.testing.assert_close(grad.b, expected_grad.b)
    assert "None" in str(thunder.last_traces(jf)[-1])
