"""What regions write into tensors that were there before, and what is asked of tensors in them: against the program without regions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.seeds import seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder

TRANSFORMS = {
    "norms": lambda: [NormTransform()],
    "regions": lambda: [CheckpointTransform()],
    "both": lambda: [NormTransform(), CheckpointTransform()],
    "regions first": lambda: [CheckpointTransform(), SubclassTransform()],
}
PROGRAMS: list[Callable] = []


def program(function: Callable) -> Callable:
    PROGRAMS.append(function)
    return function


def region(function: Callable, *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


def call(function: Callable, *args: Any) -> Any:
    return function(*args)


def counted(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    n.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x.sin()


def scaled(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    n.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x * n


@program
def without_gradients(x, n, run):
    with torch.no_grad():
        y = run(counted, x, n)
    return x + y


@program
def for_nobody(x, n, run):
    _ = run(counted, x, n) * 2
    return x * 2


@program
def alone(x, n, run):
    run(lambda x: n.add_(x.detach().mean(0)), x)
    return x


@program
def read_later(x, n, run):
    _ = run(counted, x, n) * 2
    return x.exp() * n


@program
def handed_out(x, n, run):
    return run(counted, x, n), n, n * 2


@program
def written_later(x, n, run):
    y = run(scaled, x, n).detach()
    n.add_(1)
    return x * y


@program
def written_between(x, n, run):
    n.add_(1)
    y = run(scaled, x, n).detach()
    run(lambda x, n: n.add_(x.detach().sum(0)), x, n)
    return x * y + n


@program
def read_before(x, n, run):
    y = run(lambda x, n: (x + n).sin(), x, n)
    n.mul_(2)
    return y


@program
def read_before_by_a_view(x, n, run):
    v = n.view(2, 2)
    y = run(lambda x: (x + v[0, 0]).sin(), x)
    n.mul_(2)
    return y


@program
def read_before_it_is_written_in_another(x, n, run):
    y = run(lambda x, n: run(lambda x, n: (x + n).sin(), x, n).exp(), x, n)
    return run(lambda x, n: (n.mul_(2), x.cos())[1], y, n)


@program
def read_before_a_part_is_written(x, n, run):
    y = run(lambda x, n: (x + n).sin(), x, n)
    n[:2].mul_(2)
    return y


@program
def parts(x, n, run):
    def inside(x):
        n[1:] += 1
        n[:1] += 2
        return (x + n).sin()

    return run(inside, x)


@program
def views(x, n, run):
    v = n[1:]

    def inside(x):
        z = (x[:, 1:] + v).sin()
        v.mul_(2)
        w = z + v
        n.add_(1)
        return (w * 1.5 + v).cos()

    return run(inside, x)


@program
def view_of_a_view(x, n, run):
    v = n.view(2, 2)
    y = run(lambda x, n: (n.view(2, 2)[0].mul_(2), x * n)[1], x, n)
    return y * v.sum()


@program
def view_handed_out(x, n, run):
    def inside(x):
        v = n[1:]
        z = (x[:, 1:] + v).sin()
        v.mul_(2)
        n[0] = 5
        return ((z + v) * 1.5 + n.sum()).cos(), v

    y, v = run(inside, x)
    return y + v


@program
def nested(x, n, run):
    def inner(x):
        n.add_(1)
        return (x + n).sin()

    def inside(x):
        y = run(inner, x)
        n.mul_(2)
        return run(inner, y) + n

    y = run(inside, x)
    n.zero_()
    return y


@program
def again_and_again(x, n, run):
    y = run(lambda x: (x + n[None]).sin(), x)
    for _ in range(2):
        n.mul_(1.5)
        y = run(lambda y: (y * 2 + n).sin(), y)
    return y


@program
def by_positions(x, n, run):
    def inside(x):
        n[n > 0.6] = 0.7
        n.index_add_(0, torch.tensor([0, 1]), x.detach()[0, :2])
        n.scatter_(0, torch.tensor([2]), 4.0)
        return (x + n).sin()

    return run(inside, run(inside, x)) + n


@program
def of_the_program(x, n, run):
    y = x * 2
    w = run(lambda y: y[:1].mul_(n) * 2, y)
    z = run(lambda y: (y + 1).sin(), y)
    with torch.no_grad():
        y.mul_(3)
    return z + w + y


@program
def behind_autograd(x, n, run):
    y = x * 1
    z = run(lambda y: (y + 1).sin(), y)
    y.detach().mul_(3)
    return z + run(lambda x: (x + 1).sin(), x) + x.detach().mul_(3)


@program
def data(x, n, run):
    def inside(y):
        y.data = y.data * 2
        return y + 1

    return run(inside, x * 2)


@program
def asked(x, n, run):
    def inside(x):
        y = x * 2
        with torch.no_grad():
            z = y.exp()
        made = torch.zeros(3, 4)
        made[0] = x[0]
        y = y * 3 if y.requires_grad and not z.requires_grad else y
        y = y * 5 if made.requires_grad else y
        return y if y.is_leaf or y.grad_fn is None else y * 7

    return run(inside, x)


@program
def hooked(x, n, run):
    def inside(x):
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda g: g * 2)
        return y.sin()

    return run(inside, x)


@program
def drawn_in_place(x, n, run):
    return run(lambda x: x + torch.empty(4).exponential_() * torch.empty_like(x).normal_() + torch.rand(4).bernoulli_(0.5), x)


@program
def viewed_before_it_is_written(x, n, run):
    y = run(lambda x: x * n[1:].sum(), x)
    with torch.no_grad():
        n.copy_(y.amax(0))
    return y


@program
def views_of_what_is_written_without_autograd(x, n, run):
    y = run(lambda x: (x[:2] + x.to(x.dtype)[1:]).sin(), x)
    x.detach().mul_(0.5)
    return y


@program
def parts_without_gradients(x, n, run):
    def inside(x):
        n[1:] += x.detach()[0, 1:]
        n[:1] += 2
        return x.sin()

    with torch.no_grad():
        run(inside, x)
    return x * 2 + run(inside, x).detach()


@program
def of_complex_numbers(x, n, run):
    def inside(x):
        z = torch.complex(x, x.cos())
        if z.grad_fn is None:
            z = z * 2
        return (z * 1j).imag + z.real

    return run(inside, x)


@program
def drawn_with_what_is_written(x, n, run):
    y = run(lambda x: x.sin() * torch.bernoulli(n) + torch.poisson(n * 3) * torch.normal(n, n.abs()), x)
    n.mul_(0.5)
    return y * run(lambda x: x.cos() * torch.bernoulli(n.clamp(0, 1)), x)


def ran(function: Callable, requires_grad: bool) -> list[Any]:
    torch.manual_seed(seeded(0))
    n, found = torch.ones(4) / 2, []
    for _ in range(3):
        x = (torch.arange(1.0, 13.0).view(3, 4) / 7).requires_grad_(requires_grad)
        given = x * 1
        results = function(given, n)
        results = list(results) if isinstance(results, tuple) else [results]
        loss = torch.stack([r.sum() for r in results]).sum()
        if loss.requires_grad:
            loss.backward()
        found += [*(r.detach().clone() for r in results), x.grad, n.clone(), given.detach(), [r is n for r in results]]
    return [*found, torch.rand(2)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("transforms", TRANSFORMS)
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_a_program_with_regions_is_the_program_without(function: Callable, transforms: str, requires_grad: bool) -> None:
    expected = ran(lambda x, n: function(x, n, call), requires_grad)
    found = ran(thunder.jit(lambda x, n: function(x, n, region), transforms=TRANSFORMS[transforms]()), requires_grad)
    for ours, eagers in zip(found, expected, strict=True):
        if isinstance(eagers, torch.Tensor):
            torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-5)
        else:
            assert ours == eagers


def test_a_view_of_what_is_written_without_autograd_is_refused() -> None:
    def inside(x):
        z = (x[:2] + 1).sin()
        with torch.no_grad():
            x.mul_(2)
        return z

    x = torch.rand(3, 4).requires_grad_()
    before = x.detach().clone()
    with pytest.raises(UnsupportedOpError, match="view.*\n.*test_written_in_regions.py"):
        thunder.jit(lambda x: region(inside, x * 1), transforms=[CheckpointTransform()])(x)
        thunder.jit(lambda x: region(inside, x), transforms=[CheckpointTransform()])(x)
    torch.testing.assert_close(x.detach(), before)


def test_sizes_in_regions_hang_on_values() -> None:
    def chosen(x):
        return x[torch.nonzero(x.detach() > 0.5)[:, 0]] * x.detach().max()

    j = thunder.jit(lambda x: region(chosen, x), transforms=[NormTransform(), CheckpointTransform()])
    for n in (3, 5):
        x = torch.linspace(-1, 1, n).requires_grad_()
        y = x.detach().clone().requires_grad_()
        j(x).sum().backward()
        chosen(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


def test_the_first_of_our_functions_that_a_program_calls_may_be_checkpoint() -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore'); import thunder_norm, thunder, torch\n"
        "from thunder_norm.transforms import checkpoint\n"
        "x = torch.ones(2, requires_grad=True)\n"
        "thunder.jit(lambda x: checkpoint(lambda x: x.sin().exp())(x) * 2)(x).sum().backward()\n"
        "assert torch.allclose(x.grad, 2 * x.cos() * x.sin().exp())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
