"""`NormTransform` in programs with wrappers of other classes and no norms: they are those of eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform
import thunder


def two(*shape: int) -> TwoTensor:
    return TwoTensor(torch.randn(shape), torch.randn(shape))


class Scaled(nn.Module):
    """What is computed from parameters and a plain input meets a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.linear(x) * self.scale
        return h * w, (self.scale.exp() + 1) * w, h.sin(), torch.layer_norm(h, (4,), self.scale)


class OldWeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.weight_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(w), self.linear(x) * w, self.linear(x)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("make", [Scaled, OldWeightNorm])
def test_results_and_gradients_are_those_of_eager_mode(make: Callable[[], nn.Module], requires_grad: bool) -> None:
    torch.manual_seed(seeded(0))
    model, x, inner = make(), torch.randn(3, 4), torch.randn(2, 3, 4)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    found = []
    for call in (model, jitted, jitted):
        model.zero_grad()
        w = TwoTensor(inner[0].clone(), inner[1].clone()).requires_grad_(requires_grad)
        results = call(x, w)
        torch.autograd.backward(results, [torch.ones_like(t.detach()) for t in results])
        tensors = [*results, w.grad, *(p.grad for p in model.parameters())]
        found.append([(type(t).__name__, [t.a.detach(), t.b.detach()] if isinstance(t, TwoTensor) else t) for t in tensors])
    for own in found[1:]:
        assert [name for name, _ in own] == [name for name, _ in found[0]]
        torch.testing.assert_close([t for _, t in own], [t for _, t in found[0]])
    assert thunder.cache_misses(jitted) == 1


@pytest.mark.parametrize("program", [lambda n, w: n * w, lambda n, w: w + n, lambda n, w: nn.functional.linear(n, w)])
def test_a_norm_that_meets_a_wrapper_is_refused(program: Callable) -> None:
    torch.manual_seed(seeded(0))
    with pytest.raises(UnsupportedOpError, match="of a RMSTensor and a TwoTensor"):
        thunder.jit(program, transforms=[NormTransform()])(RMSTensor.of(torch.randn(4, 4)), two(4, 4))


def test_norms_beside_wrappers_are_norms() -> None:
    torch.manual_seed(seeded(0))
    norm, w = RMSTensor.of(torch.randn(3, 4)), two(3, 4)
    found, other = thunder.jit(lambda n, w: (n * 2, w * 2), transforms=[NormTransform()])(norm, w)
    torch.testing.assert_close([found.norm_size, other.a], [norm.norm_size * 2, w.a * 2])
