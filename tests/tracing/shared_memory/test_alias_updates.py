"""Names after writes: eager mode's values, and a trace that grows with the program as the program does."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm.transforms import NormTransform
import thunder


def views_written(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    y = x * 1
    for i in range(n):
        y[i % 4].mul_(2).add_(x[0])
    return y, y.sum()


def a_tensor_written(x: torch.Tensor, n: int) -> torch.Tensor:
    y = x * 1
    for _ in range(n):
        y.add_(x).mul_(0.5)
    return y


def views_of_views(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    y = x * 1
    v = y
    for _ in range(n):
        v = v.t()
    v[0].add_(1)
    return y, v


def an_input_written(x: torch.Tensor, n: int) -> torch.Tensor:
    for i in range(n):
        x[i % 4] += x[(i + 1) % 4]
    return x.t() * 2


def a_view_is_read_late(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    y = x * 1
    first, kept = y[0], [y[i % 4] for i in range(n)]
    for i in range(n):
        y.t()[i % 4].mul_(1.5)
    return first + 0, y, kept[-1] * 2


@pytest.mark.parametrize("program", [views_written, a_tensor_written, views_of_views, an_input_written, a_view_is_read_late])
def test_writes_in_a_loop(program):
    """Values of eager mode; and the operations say as many names again where there are twice as many of them (2.1 at most, was 4 to 16)."""
    names = []
    for n in (20, 40):
        torch.manual_seed(seeded(n))
        x = torch.randn(4, 4)
        own, wanted = x.clone(), x.clone()
        jitted = thunder.jit(lambda x, n=n: program(x, n), transforms=[NormTransform()])
        torch.testing.assert_close((jitted(own), own), (program(wanted, n), wanted))
        trace = thunder.last_traces(jitted)[-1]
        names.append(sum(len(b.flat_proxy_args) + len(b.flat_proxy_outs) for b in trace.bound_symbols))
    if program is not a_view_is_read_late:  # of which all views are alive to the end
        assert names[1] <= 2.1 * names[0]
