"""torch.masked.MaskedTensor, which does not say how it is taken apart."""

from __future__ import annotations

import torch
from torch.masked import MaskedTensor, as_masked_tensor, masked_tensor

from .case import CONSTRUCTED, INPUT, RETURNED, SEVERAL, case


def masked(*shape: int, requires_grad: bool = False, mask: torch.Tensor | None = None) -> MaskedTensor:
    mask = torch.rand(shape) > 0.5 if mask is None else mask
    return masked_tensor(torch.randn(shape), mask.clone(), requires_grad=requires_grad)


@case("MaskedTensor", INPUT, RETURNED, backward=True)
def _():
    return lambda x: x * 2, (masked(3, 4, requires_grad=True),)


@case("MaskedTensor, reductions", INPUT, RETURNED)
def _():
    def f(x):
        return x.sum(), x.sum(-1), torch.mean(x, 0), x.amax(1, keepdim=True), x.argmin(-1), x.prod(0), x > 0

    return f, (masked(3, 4),)


@case("MaskedTensor, products of its own and their sum", INPUT, RETURNED, backward=True)
def _():
    return lambda x: (x.sin() * x).sum(-1), (masked(3, 4, requires_grad=True),)


@case("MaskedTensor, two of one mask", INPUT, RETURNED, SEVERAL, backward=True)
def _():
    x = masked(3, 4, requires_grad=True)
    return lambda x, y: x * y + x, (x, masked(3, 4, requires_grad=True, mask=x._masked_mask))


@case("MaskedTensor, torch.where", INPUT, RETURNED, SEVERAL, backward=True)
def _():
    return torch.where, (torch.rand(3, 4) > 0.5, masked(3, 4, requires_grad=True), masked(3, 4, requires_grad=True))


@case("MaskedTensor, views and softmax", INPUT, RETURNED)
def _():
    return lambda x: (x.view(4, 3).t(), x.reshape(-1)[1:3], x.softmax(-1), x + torch.ones(4)), (masked(3, 4),)


@case("MaskedTensor, data, mask and to_tensor", INPUT)
def _():
    return lambda x: (x.get_data() + 1, ~x.get_mask(), x.exp().to_tensor(0.0)), (masked(3, 4),)


@case("MaskedTensor constructed", CONSTRUCTED, RETURNED, backward=True)
def _():
    def f(data, mask):
        return as_masked_tensor(data, mask).sin().sum()

    return f, (torch.randn(3, 4, requires_grad=True), torch.rand(3, 4) > 0.5)
