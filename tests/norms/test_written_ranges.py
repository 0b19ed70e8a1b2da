"""Norm maps of programs that write into constants what comparisons and indices decide: between the numbers that were there and those that are written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thunder_norm import RMSTensor, build_norm_map
from thunder_norm.errors import NormMismatchError


def zeros(x):
    return torch.zeros(len(x), 12, device=x.device)


def scattered(x, s):
    one_hot = zeros(x)
    one_hot.scatter_(1, s.argmin(1).unsqueeze(1), 1)
    return one_hot


def at_index(x, s):
    o = zeros(x)
    o[torch.arange(len(x), device=x.device), s.argmin(1)] = 5.0
    return o


def through_a_view(x, s):
    o = zeros(x)
    rows = o[:2]
    rows += (s > 0)[:2].float() * 3
    return o * 1.0


def seen_by_a_view(x, s):
    o = zeros(x)
    rows = o[:, :]
    o.masked_fill_(s > 0, -4.0)
    return rows * 2.0


def again_and_again(x, s):
    m = (s > 0).float()
    for _ in range(3):
        m += m
    return m


def then_copied(x, s):
    o = zeros(x)
    o.copy_((s > 0) * 3.0)
    o.mul_(-2)
    return o.clamp_(max=1.0)


def before_it_was_written(x, s):
    o = zeros(x)
    before = o + 1.0
    o.fill_(9.0)
    return before * (s > 0).float()


WRITES = {
    f.__name__: (f, largest)
    for f, largest in (
        (scattered, 1.0),
        (at_index, 5.0),
        (through_a_view, 3.0),
        (seen_by_a_view, 8.0),
        (again_and_again, 8.0),
        (then_copied, 6.0),
        (before_it_was_written, 10.0),  # of what is there before a write and after it
    )
}


class Codes(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write, self.codes = write, nn.Parameter(torch.eye(12, 8))

    def forward(self, x):
        return self.write(x, x @ self.codes.t()) @ self.codes


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_within_its_numbers(name):
    write, largest = WRITES[name]
    module = Codes(write)
    x = torch.randn(4, 8)
    found = build_norm_map(module, x, parameters="measured")(RMSTensor.of(x)).norm_size.item()
    with torch.no_grad():
        assert found >= max(module(x * c).square().mean(-1).sqrt().max().item() for c in (-1.0, 0.1, 1.0)) * (1 - 1e-6)
    rows_of_largest = largest * module.codes.detach().new_ones(4, 12)  # all entries as large as they may be, in any operator norm
    assert found <= rows_of_largest.norm() * torch.linalg.matrix_norm(module.codes.detach(), 2) + 1e-6


def as_other_numbers(x, s):
    o = zeros(x)
    o.view(torch.int32).copy_((s > 0).int() * 1_000_000_000)
    return o


def test_what_is_written_as_other_numbers_is_refused():
    x = torch.randn(4, 8)
    with pytest.raises(NormMismatchError, match="depends on the values"):
        build_norm_map(Codes(as_other_numbers), x)(RMSTensor.of(x))
