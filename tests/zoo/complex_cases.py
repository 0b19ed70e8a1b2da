"""Torch's complex numbers as two real tensors, and its classes of tests of the compiler."""

from __future__ import annotations

import torch
from torch import nn
from torch.testing._internal.custom_tensor import ConstantExtraMetadataTensor, CustomTensorPlainOut

from .case import CONSTRUCTED, INPUT, PARAMETER, RETURNED, SEVERAL, case

SINCE = "2.15"


def complex_(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    from torch._subclasses.complex_tensor import ComplexTensor

    x = ComplexTensor.from_interleaved(torch.randn(shape, dtype=torch.complex64))
    return x.detach().requires_grad_(requires_grad)


@case("ComplexTensor, elementwise", INPUT, RETURNED, SEVERAL, since_torch=SINCE)
def _():
    return lambda x, y: (x * y).sin() + x.exp(), (complex_(3, 4), complex_(3, 4))


@case("ComplexTensor, matrix product", INPUT, SEVERAL, backward=True, since_torch=SINCE)
def _():
    return lambda x, y: (x @ y).abs().sum(), (complex_(3, 4, requires_grad=True), complex_(4, 2, requires_grad=True))


@case("ComplexTensor, real and imaginary parts", INPUT, RETURNED, since_torch=SINCE)
def _():
    return lambda x: (x.real * 2, x.imag + 1, x.as_interleaved(), x.conj(), x.angle(), torch.view_as_real(x)), (complex_(3, 4),)


@case("ComplexTensor, views, reductions and in place", INPUT, RETURNED, since_torch=SINCE)
def _():
    return lambda x: (x.t().reshape(-1)[2:], x.clone().mul_(2), torch.cat([x, x]), x.mean(), x.prod(), x == x), (complex_(3, 4),)


@case("ComplexTensor parameter of a Linear", INPUT, PARAMETER, RETURNED, since_torch=SINCE)
def _():
    model = nn.Linear(4, 2, bias=False)
    model.weight = nn.Parameter(complex_(2, 4))
    return model, (complex_(3, 4),)


@case("ComplexTensor constructed", CONSTRUCTED, backward=True, since_torch=SINCE)
def _():
    from torch._subclasses.complex_tensor import ComplexTensor

    return lambda z: (ComplexTensor.from_interleaved(z) * 2).abs(), (
        torch.randn(3, 4, dtype=torch.complex64, requires_grad=True),
    )


class Shifted(nn.Module):
    """A plain parameter and one of `CustomTensorPlainOut`."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.ones(3, 4))
        self.custom = nn.Parameter(CustomTensorPlainOut(torch.randn(3, 4), torch.randn(3, 4)))

    def forward(self, x):
        return x + 2 * self.plain + self.custom


@case("CustomTensorPlainOut parameter", PARAMETER, backward=True)
def _():
    return Shifted(), (torch.randn(3, 4),)


@case("CustomTensorPlainOut constructed", CONSTRUCTED, RETURNED)
def _():
    def f(a, b):
        return CustomTensorPlainOut(a, b).get_elem() * 2, CustomTensorPlainOut(a, b) + a, CustomTensorPlainOut(a, b)

    return f, (torch.randn(3, 4), torch.randn(3, 4))


@case("ConstantExtraMetadataTensor of torch's tests, its methods", INPUT, RETURNED, backward=True)
def _():
    def f(x):
        metadata = x.get_complicated_metadata()
        return x * metadata.foo, x + metadata.bar

    return f, (ConstantExtraMetadataTensor(torch.randn(3, 4)).requires_grad_(),)


@case("ConstantExtraMetadataTensor of torch's tests, changed", INPUT, RETURNED)
def _():
    def f(x):
        x.add_constant(2)
        x.constant_attribute += 1
        return x * x.constant_attribute, x

    return f, (ConstantExtraMetadataTensor(torch.randn(3, 4)),)
