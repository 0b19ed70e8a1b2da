"""Writes into views of tensors that a program has made: gradients, what a backward keeps of them, and regions that have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.seeds import seeded
from thunder_norm import executors
from thunder_norm.transforms import NormTransform, grad, jvp
import thunder


@pytest.fixture(autouse=True)
def _quick_kernels() -> Iterator[None]:
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 1}):
        yield


# Of a tensor of (4, 6), and for complex ones of (4, 6) or their parts.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "column": lambda t: t[:, 1],
    "steps": lambda t: t[1::2, ::3],
    "ellipsis and None": lambda t: t[..., None, 2],
    "0-dim index": lambda t: t[torch.tensor(2)],
    "row": lambda t: t.select(0, 3),
    "narrow": lambda t: torch.narrow(input=t, dim=1, start=2, length=3),
    "transposed part": lambda t: t.t()[2:4],
    "diagonal": lambda t: t.diagonal(1),
    "reshaped": lambda t: t.view(2, 12)[:, 5],
    "moved": lambda t: t.unsqueeze(0).movedim(0, -1).squeeze(-1)[0],
}
_OF_COMPLEX: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "real part": lambda t: t.real,
    "imaginary part": lambda t: t.imag[1],
    "as real numbers": lambda t: torch.view_as_real(t)[..., 0],
    "column": lambda t: t[:, 1],
}
EXECUTORS: dict[str, Callable[[], dict[str, Any]]] = {
    "Thunder's": lambda: {},
    "inductor": lambda: {"executors": [executors.inductor]},
}


def _written(*views: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A program that writes twice into views of what it makes: what depends on the tensor before, and onto what was written."""

    def f(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        total = x * 0
        for view in views:
            y = x * 2
            before = y.clone().cos()
            view(y).copy_(view(x).sin() * v)
            view(y).add_(before.real.sum())
            total = total + y * before + view(y).real.sum()
        return total.abs().square()

    return f


def _gradients(f: Callable, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in given]
    result = f(*leaves)
    generator = torch.Generator().manual_seed(seeded(3))
    return result.detach(), *torch.autograd.grad(
        result, leaves, torch.rand(result.shape, generator=generator, dtype=result.dtype)
    )


def _assert_gradients_are_eagers(f, *given):
    assert_close(_gradients(thunder.jit(f, transforms=[NormTransform()]), *given), _gradients(f, *given))


@pytest.mark.parametrize("name", VIEWS)
def test_gradients_through_a_write_into_a_view(name: str):
    torch.manual_seed(seeded(0))
    f = _written(VIEWS[name])
    _assert_gradients_are_eagers(f, torch.randn(4, 6, dtype=torch.float64), torch.randn((), dtype=torch.float64))


def test_gradients_through_writes_into_views_in_regions():
    torch.manual_seed(seeded(0))
    f = _written(*VIEWS.values())
    given = torch.randn(4, 6, dtype=torch.float64), torch.randn((), dtype=torch.float64)
    jitted = thunder.jit(f, transforms=[NormTransform()], executors=[executors.inductor])
    assert_close(_gradients(jitted, *given), _gradients(f, *given))
    assert not [b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name.startswith("write_")]


@pytest.mark.parametrize("name", _OF_COMPLEX)
def test_gradients_through_a_write_into_a_part_of_complex_numbers(name: str):
    torch.manual_seed(seeded(1))
    f = _written(_OF_COMPLEX[name])
    _assert_gradients_are_eagers(f, torch.randn(4, 4, dtype=torch.complex128), torch.randn((), dtype=torch.float64))


@pytest.mark.parametrize("view", [lambda t: t.view(-1)[1:9], lambda t: torch.view_as_real(t)[..., 1], lambda t: t.view(3, 4)])
def test_a_cotangent_may_lie_otherwise_than_what_was_written(view: Callable):
    """Columns first, and conjugated without having been computed."""

    def f(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x * 1
        view(y).mul_(v.real)
        return y.t().conj()

    torch.manual_seed(seeded(5))
    given = torch.randn(4, 3, dtype=torch.complex128), torch.randn((), dtype=torch.complex128)
    assert_close(_gradients(thunder.jit(f, transforms=[NormTransform()]), *given), _gradients(f, *given))


@pytest.mark.parametrize("name", ["column", "steps", "diagonal"])
def test_derivatives_of_derivatives_through_a_write(name: str):
    torch.manual_seed(seeded(2))
    f, x, v = _written(VIEWS[name]), torch.randn(4, 6, dtype=torch.float64), torch.randn((), dtype=torch.float64)

    def slope(transforms: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return transforms.grad(lambda v: f(x, v).sum())

    assert_close(grad(slope(_Ours))(v), torch.func.grad(slope(torch.func))(v))
    assert_close(jvp(slope(_Ours), (v,), (v,)), torch.func.jvp(slope(torch.func), (v,), (v,)))


class _Ours:
    grad = staticmethod(grad)


def _filled(x: torch.Tensor) -> torch.Tensor:
    states, h = x.new_zeros(8, 16), x[:, 0]
    for i in range(16):
        h = torch.tanh(h + x[:, i])
        states[:, i].copy_(h)
    return states


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_loop_that_fills_a_tensor_keeps_none_of_its_states(executor: str):
    """As eager mode it keeps the results of tanh, 8 numbers a step; all states of all steps would be 16 times that."""
    torch.manual_seed(seeded(4))
    jitted = thunder.jit(_filled, transforms=[NormTransform()], **EXECUTORS[executor]())
    x = torch.randn(8, 16)
    assert_close(_gradients(jitted, x), _gradients(_filled, x))
    forward, backward = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    assert sum(math.prod(p.shape) for p in forward.bound_symbols[-1].args[1][0]) <= 2 * 8 * 16
    if executor == "inductor":
        for trace in (forward, backward):
            assert sum(b.sym.is_fusion for b in trace.bound_symbols) == 1
            assert not [b for b in trace.bound_symbols if b.sym.name.startswith("write_")]


@pytest.mark.parametrize("layer", [torch.nn.functional.batch_norm, torch.nn.functional.instance_norm])
def test_running_statistics_that_a_program_makes_have_no_gradient(layer: Callable):
    def program(x: torch.Tensor) -> torch.Tensor:
        mean, var = torch.zeros(3), torch.ones(3)
        result = layer(x, mean, var, None, None, True)
        return (result.sin() * mean[:, None] + var[:, None]).sum() + mean.square().sum()

    seeded(0)
    x = torch.randn(4, 3, 5, requires_grad=True)
    (expected,) = torch.autograd.grad(program(x), x)
    (found,) = torch.autograd.grad(thunder.jit(program, transforms=[NormTransform()])(x), x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad(program)(x), expected)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_each_element_of_what_a_number_is_copied_into_has_its_own_memory(requires_grad: bool) -> None:
    class Copying(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(4))

        def forward(self, x):
            self.seen = self.seen * 0.5
            self.seen.copy_(x.detach().mean())
            made = torch.zeros(3, 4)
            made.copy_(x.mean())
            return made

    ours, eagers = Copying(), Copying()
    jm = thunder.jit(ours, transforms=[NormTransform()])
    for k in range(3):  # what was stored is written into again
        x = torch.arange(12.0).view(3, 4) + k
        found, expected = jm(x.clone().requires_grad_(requires_grad)), eagers(x.clone().requires_grad_(requires_grad))
        assert_close(found, expected)
        assert found.stride() == expected.stride()
        assert_close(ours.seen, eagers.seen)
        assert ours.seen.stride() == eagers.seen.stride()
        found.detach()[0] = 5.0
        expected.detach()[0] = 5.0
        assert_close(found, expected)
