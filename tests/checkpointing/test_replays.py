"""What a region computes again: the numbers that it drew, as eager PyTorch draws them, and what it wrote into what was there before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.seeds import crossed, seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.functions import opaque
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder

pytestmark = pytest.mark.filterwarnings("ignore::thunder_norm.errors.WrittenOnceWarning")

TRANSFORMS = {
    "regions": lambda: [CheckpointTransform()],
    "norms": lambda: [NormTransform()],
    "wrappers": lambda: [SubclassTransform()],
    "both": lambda: [NormTransform(), CheckpointTransform()],
}


def region(function: Callable, *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


def call(function: Callable, *args: Any) -> Any:
    return function(*args)


class Once(nn.Module):
    """A function with a weight, a buffer and an LSTM, in a region, or in one that is in another."""

    seen: torch.Tensor

    def __init__(self, function: Callable, run: Callable, is_nested: bool):
        super().__init__()
        self.function, self.run, self.is_nested = function, run, is_nested
        self.w = nn.Parameter(torch.rand(8) + 0.5)
        self.register_buffer("seen", torch.ones(8) / 2)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x):
            return self.function(self, x)

        def outer(x):
            return self.run(inner, x.sin() * self.w).cos() + x

        return self.run(outer, x) if self.is_nested else self.run(inner, x * self.w) * self.w


def ran(function: Callable, run: Callable, is_nested: bool, transforms: Callable | None) -> list[torch.Tensor | None]:
    torch.manual_seed(seeded(0))
    model = Once(function, run, is_nested)
    called = model if transforms is None else thunder.jit(model, transforms=transforms())
    found: list[torch.Tensor | None] = []
    for _ in range(2):
        x = torch.randn(3, 8, requires_grad=True)
        out = called(x)
        out.square().sum().backward()
        found += [out.detach(), x.grad, *(p.grad for p in model.parameters()), model.seen.clone()]
        model.zero_grad()
    return [*found, torch.rand(2)]


def check(function: Callable, is_nested: bool, transforms: str) -> None:
    found, expected = ran(function, region, is_nested, TRANSFORMS[transforms]), ran(function, call, is_nested, None)
    for ours, eagers in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eagers, rtol=1e-3, atol=1e-4)


DRAWS = {
    "dropout": lambda m, x: F.dropout(x, 0.4),
    "dropout in place": lambda m, x: F.dropout(x * 2, 0.4, True, True),
    "dropout of everything": lambda m, x: F.dropout(x, 1.0) + x,
    "channels": lambda m, x: F.dropout1d(x, 0.4),
    "alpha": lambda m, x: F.alpha_dropout(x, 0.4, True),
    "rrelu": lambda m, x: F.rrelu(x, 0.1, 0.4, True),
    "gumbel": lambda m, x: F.gumbel_softmax(x),
    "attention": lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0],
    "recurrent": lambda m, x: m.lstm(x)[0],
    "recurrent, times x": lambda m, x: m.lstm(x)[0] * x,
    "gamma": lambda m, x: torch._standard_gamma(x.exp()) * x,
    "fractional maxima": lambda m, x: F.fractional_max_pool2d(x[None, None], 2, output_size=(2, 7)).mean() * x,
    "normal": lambda m, x: x * torch.randn_like(x) + torch.rand(8),
    "permutation": lambda m, x: x[:, torch.randperm(8)],
    "bernoulli": lambda m, x: torch.bernoulli(x.detach().sigmoid()) * x,
}


@pytest.mark.parametrize(("draw", "is_nested", "transforms"), crossed(DRAWS, [False, True], TRANSFORMS))
def test_random_operations_draw_what_eager_mode_draws(draw: str, is_nested: bool, transforms: str) -> None:
    check(DRAWS[draw], is_nested, transforms)


def twice(m: Once, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        m.seen.add_(x.detach().mean(0))
        x = x.sin() * m.w
    return x


def replaced(m: Once, x: torch.Tensor) -> torch.Tensor:
    m.seen.copy_(x.detach().mean(0))
    return x * m.w * m.seen


def filled(m: Once, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.seen.copy_(x.mean())
    return x * m.w * m.seen


def of_another_dtype(m: Once, x: torch.Tensor) -> torch.Tensor:
    m.seen.copy_(x.detach().double().mean(0))
    return x * m.seen


def averaged(m: Once, x: torch.Tensor) -> torch.Tensor:
    m.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    m.seen.clamp_(max=0.2)
    return x * m.w


def for_nobody(m: Once, x: torch.Tensor) -> torch.Tensor:
    def inner(x):
        m.seen.add_(torch.rand(8))
        F.dropout(x, 0.5)
        return x.sin()

    return m.run(inner, x).detach() * x + torch.rand(8)


def handed_back(m: Once, x: torch.Tensor) -> torch.Tensor:
    def inner(x):
        m.seen.copy_(x.detach().mean(0))
        torch.rand(3)
        return x

    return m.run(inner, x) * m.w + torch.rand(8)


WRITES = (twice, replaced, filled, of_another_dtype, averaged, for_nobody, handed_back)


@pytest.mark.parametrize(("write", "transforms"), crossed(WRITES, TRANSFORMS))
def test_a_buffer_that_a_region_writes_into_is_read_as_it_is_then(write: Callable, transforms: str) -> None:
    check(write, False, transforms)


def scaled(m: Once, x: torch.Tensor) -> torch.Tensor:
    y, mean = region(lambda x: (x.sin() * m.w, x.mean()), x) if m.run is region else (x.sin() * m.w, x.mean())
    return y * mean.detach()


def beside(m: Once, x: torch.Tensor) -> torch.Tensor:
    side = []

    def inner(x):
        side.extend([x.detach(), x.detach().mean(0)])
        return x * 1.5

    return m.run(lambda x: m.run(inner, x) * m.w, x) * side[0] * side[1]


def of_complex_numbers(m: Once, x: torch.Tensor) -> torch.Tensor:
    z = m.run(lambda z: z * z.conj() + z.sin(), torch.complex(x, x * m.w))
    return m.run(lambda z: (z * 1j).real + z.abs(), z)


@pytest.mark.parametrize(("is_nested", "transforms"), crossed([False, True], TRANSFORMS))
def test_complex_numbers_in_and_out_of_regions_have_gradients(is_nested: bool, transforms: str) -> None:
    check(of_complex_numbers, is_nested, transforms)


@pytest.mark.parametrize(("is_nested", "transforms"), crossed([False, True], TRANSFORMS))
def test_what_is_detached_may_get_out_beside_the_result(is_nested: bool, transforms: str) -> None:
    check(beside, is_nested, transforms)


@pytest.mark.parametrize(("is_nested", "transforms"), crossed([False, True], TRANSFORMS))
def test_a_result_without_dimensions_may_be_detached(is_nested: bool, transforms: str) -> None:
    check(scaled, is_nested, transforms)


def test_what_draws_from_no_state_that_can_be_set_is_refused_where_it_has_a_gradient(monkeypatch) -> None:
    monkeypatch.setattr(opaque, "_keeps_a_state", lambda bsym: True)  # as recurrent layers of cuDNN do
    with pytest.raises(UnsupportedOpError, match=r"(?s)lstm draws numbers in a checkpointed region.*rnn\.py"):
        ran(DRAWS["recurrent"], region, False, TRANSFORMS["regions"])
