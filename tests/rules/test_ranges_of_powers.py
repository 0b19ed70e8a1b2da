"""Between which numbers powers are whose exponents are tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, norm_mode
from thunder_norm.core.known_ranges import range_by_rule
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import normed_op

D = torch.float64
BASES = {
    "gate": torch.sigmoid,
    "softplus": F.softplus,
    "above 1": lambda x: 1 + x.square(),
    "square": torch.square,
    "clamped": lambda x: x.clamp(0.0, 3.0),
    "signed": torch.tanh,
}
EXPONENTS = {
    "sharpening": lambda y: 1 + F.softplus(y),
    "gate": torch.sigmoid,
    "negative": lambda y: -torch.sigmoid(y),
    "any": lambda y: y * 1.0,
    "from 0": torch.relu,
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_the_range_of_a_power_is_right(base, exponent):
    torch.manual_seed(seeded(0))
    x, y = (torch.cat([torch.randn(40, dtype=D) * 3, torch.zeros(2, dtype=D)]) for _ in range(2))
    a, b = BASES[base](LinfTensor.of(x, ())), EXPONENTS[exponent](LinfTensor.of(y, ()))
    a, b = a[:, None].expand(42, 42), b[None].expand(42, 42)
    with norm_mode("typical"):  # where each has a norm
        found = (a**b)._range or Range()
    powers = (a.backing**b.backing).nan_to_num(0.0, posinf=float("inf"))
    assert found.low - 1e-9 <= powers.min() and powers.max() <= found.high * (1 + 1e-9)
    assert found.says_something == (base != "signed")
    by_norms, n = range_by_rule(normed_op(torch.pow), (a, b), {}) or Range(), x.abs().max()
    low, high = by_norms.least_of(n), by_norms.most_of(n)
    assert low * (1 - 1e-9) <= powers.min() and powers.max() <= high * (1 + 1e-9)
    is_positive = base in ("gate", "softplus", "above 1")
    assert by_norms.is_well_above(0.0) == (low > 0) and (not is_positive or 0 < low <= high < float("inf"))
    assert not by_norms.is_above(low.item()) or low > by_norms.low


def test_weights_that_are_sharpened_have_a_sum():
    """The addresses of a neural Turing machine. Refused before: nothing kept their sum away from 0."""
    torch.manual_seed(seeded(0))
    w = RMSTensor.of(torch.randn(2, 6)).softmax(-1) ** (1 + F.softplus(RMSTensor.of(torch.randn(2, 1))))
    shares = w / (w.sum(-1, keepdim=True) + 1e-16)
    assert shares.norm_size <= 1 + 1e-6
    assert shares.backing.sum(-1).max() <= 1 + 1e-6
