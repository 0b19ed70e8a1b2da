"""Gradients that are asked for more than once of one call, with and without a history."""

from collections.abc import Callable

import pytest
import torch


def gradients_of_a_kept_graph(call: Callable, x: torch.Tensor, once_freed: str) -> list[torch.Tensor]:
    """First and second derivatives of the sum of ``call(x)``, again and again, until the graph is freed; `once_freed` is the error then."""
    y = call(x)
    found = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2)]
    for _ in range(2):
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found += [gradient.detach(), *torch.autograd.grad(gradient.sum(), x, retain_graph=True)]
    y.sum().backward()
    with pytest.raises(RuntimeError, match=once_freed):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    return [*found, x.grad]
