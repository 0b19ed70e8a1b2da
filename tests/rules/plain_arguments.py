"""A check that several families of rules share: any one of an operation's arguments may be a plain tensor."""

from __future__ import annotations

import torch

from tests.seeds import seeded
from thunder_norm import NormedTensor
from thunder_norm.audit import Case, norm, start


def check_plain_arguments(case: Case) -> None:
    """With each argument plain in turn, the others (and one that is alone) normed, the result is torch's and within its norm."""
    points = [start(b, 0, torch.Generator().manual_seed(seeded(i))) * b.norm_size for i, b in enumerate(case.balls)]
    expected = case.call(*points)
    for plain in range(len(points)):
        is_plain = [i == plain and len(points) > 1 for i in range(len(points))]
        given = [p if is_it else b.normed(p) for is_it, b, p in zip(is_plain, case.balls, points, strict=True)]
        out = case.call(*given)
        assert isinstance(out, NormedTensor) and torch.equal(out.backing, expected)
        assert norm(type(out), expected, out.elem_dims) <= out.norm_size * (1 + 1e-9)
