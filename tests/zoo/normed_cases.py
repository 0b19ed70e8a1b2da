"""Our own NormedTensor, as what another class holds."""

from __future__ import annotations

import torch
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm import RMSTensor

from .case import INPUT, RETURNED, case


def normed(*shape: int) -> RMSTensor:
    return RMSTensor(2.0, backing=torch.randn(shape))


@case("TwoTensor(NormedTensor)", INPUT, RETURNED)
def _():
    return lambda x: x * 3 + x, (TwoTensor(normed(3, 4), normed(3, 4)),)


@case("NormedTensor", INPUT, RETURNED)
def _():
    return lambda x, w: (x @ w.T).relu(), (normed(3, 4), torch.randn(5, 4))
