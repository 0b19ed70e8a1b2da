"""What a program detached keeps a history of its own when the memory that it shares is written into, with autograd and without, as in eager PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder


def detached_after_a_write(x):
    a = x * 2
    with torch.no_grad():
        a.mul_(0.3)
    v = a.detach()
    a.pow_(2)
    return a, v


def data_before_a_write(x):
    a = x * 2
    v = a.data
    with torch.no_grad():
        a.fill_(0.3)
    a.pow_(2)
    return a, v


def row_of_what_was_detached(x):
    a = x.sin()
    with torch.no_grad():
        a.add_(0.5)
    v = a.detach()[1]
    a.mul_(x)
    return a, v


def detached_twice(x):
    a = x.sin()
    with torch.no_grad():
        a.add_(0.5)
    v, w = a.detach(), a.detach()
    w.mul_(3)
    return a, v, w


def assigned_to_a_part_of_what_was_detached(x):
    a = x.sin()
    v = a.detach()
    a.mul_(0.3)
    v[0] = 2.0
    with torch.no_grad():
        a.mul_(0.3)
    return a, v


def seen_without_autograd(x):
    a = x * 2
    with torch.no_grad():
        v = a.view(-1)
    w = v.data
    w.mul_(0.3)
    return a, v, w


def data_of_data(x):
    a = x * 2
    v = a.data
    with torch.no_grad():
        w = a[0]
        v.detach().pow_(2)
    return a, v, w


def row_written_without_autograd(x):
    a = x * 2
    v = a.data
    a.add_(x.sum())
    w = a[0]
    with torch.no_grad():
        w.mul_(0.3)
    return a, v, w, v.view(-1)


PROGRAMS = (
    detached_after_a_write,
    data_before_a_write,
    row_of_what_was_detached,
    detached_twice,
    assigned_to_a_part_of_what_was_detached,
    seen_without_autograd,
    data_of_data,
    row_written_without_autograd,
)


def _results(f):
    torch.manual_seed(seeded(0))
    x = torch.randn(2, 3, requires_grad=True)
    results = f(x)
    total = sum((t * k).sum() for k, t in enumerate(results, 1))
    return [t.detach().clone() for t in results], torch.autograd.grad(total, x)[0]


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform, CheckpointTransform])
@pytest.mark.parametrize("f", PROGRAMS)
def test_what_was_detached_gets_the_values_and_no_history(f, transform):
    torch.testing.assert_close(_results(thunder.jit(f, transforms=[transform()])), _results(f))
