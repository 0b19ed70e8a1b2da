"""Losses of tensors that broadcast: each entry of a tensor counts as often as it is met, and lengths are those of what torch sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import crossed, seeded
from thunder_norm import L1Tensor, LinfTensor, NormedTensor, RMSTensor
from thunder_norm.audit import Ball, search


def _rows(t: torch.Tensor) -> torch.Tensor:
    return t.softmax(-1) if t.ndim else t.sigmoid()


_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]] = {
    "mse_loss": lambda x, t, r: F.mse_loss(x, t, reduction=r),
    "huber_loss": lambda x, t, r: F.huber_loss(x, t, reduction=r),
    "kl_div": lambda x, t, r: F.kl_div(x, _rows(t), reduction=r),
    "kl_div of logarithms": lambda x, t, r: F.kl_div(x, _rows(t).log(), reduction=r, log_target=True),
    "cosine_embedding_loss": lambda x, t, r: F.cosine_embedding_loss(x, t, torch.ones(t.shape[:1]), reduction=r),
    "triplet_margin_loss": lambda x, t, r: F.triplet_margin_loss(x, t, t * 2 + 1, reduction=r),
    "multilabel_soft_margin_loss": lambda x, t, r: F.multilabel_soft_margin_loss(x, t.sigmoid(), reduction=r),
    "soft_margin_loss": lambda x, t, r: F.soft_margin_loss(x, t.sign(), reduction=r),
}
_CASES = [(name, reduction) for name in _LOSSES for reduction in ("sum", "mean", "none")] + [("kl_div", "batchmean")]
_SHAPES = [
    ((1, 4), (3, 4)),
    ((4,), (3, 4)),
    ((3, 1), (3, 4)),
    ((3, 4), (3, 1)),
    ((3, 4), (4,)),
    ((2, 1, 4), (3, 4)),
    ((), (3,)),
    ((), ()),
]


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize(("loss", "kind"), crossed(_CASES, [RMSTensor, LinfTensor]))
def test_an_adversary_finds_nothing_beyond_the_bound(loss: tuple[str, str], kind: type[NormedTensor]):
    name, reduction = loss
    tried = 0
    for shape, other in _SHAPES:
        torch.manual_seed(seeded(0))
        target, x = torch.randn(other, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
        f = lambda x, t=target: _LOSSES[name](x, t, reduction)  # noqa: E731
        try:
            f(x)
        except (RuntimeError, IndexError):  # torch has no such loss
            continue
        ball = Ball("x", kind, shape, 1.0, (-1,) if shape and kind is RMSTensor else ())
        found = search(f, [ball], restarts=4, steps=12, seed=seeded(0))
        assert found.is_sound, (shape, other, found)
        tried += 1
    assert tried >= 2


def test_sensitivities_of_a_product_are_to_its_arguments_whatever_they_are_converted_to():
    balls = [Ball("a", L1Tensor, (2, 1, 4), 1.0, (-3,)), Ball("b", RMSTensor, (2, 1, 4), 1.0, (-3,))]
    for f in (lambda a, b: a * b, lambda a, b: a.softmax(-3) * b):
        assert search(f, balls, restarts=8, steps=20, seed=seeded(0)).is_sound
