"""Classes of torch that do not follow the protocol of traceable wrapper subclasses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.testing._internal import common_subclass
from torch.testing._internal.common_subclass import DiagTensorBelow
from torch.testing._internal.composite_compliance import generate_cct_and_mode
from torch.testing._internal.logging_tensor import LoggingTensor, LoggingTensorReentrant

from .case import CONSTRUCTED, INPUT, OPAQUE, PARAMETER, RETURNED, SEVERAL, case


def logging(*shape: int, requires_grad: bool = False) -> LoggingTensor:
    return LoggingTensor(torch.randn(shape), requires_grad=requires_grad)


@case("LoggingTensor", OPAQUE, INPUT, RETURNED, backward=True)
def _():
    return lambda x: x.sin() * x + 1, (logging(3, 4, requires_grad=True),)


@case("LoggingTensor, views, lists and its element", OPAQUE, INPUT, RETURNED, SEVERAL)
def _():
    def f(x, y):
        return x.view(4, 3).t() @ torch.ones(4, 2), torch.stack([x, y])[0], list(x.split(2, -1)), x.elem * 2, -x > 2 * y

    return f, (logging(3, 4), logging(3, 4))


@case("LoggingTensor, changed in place", OPAQUE, INPUT, RETURNED)
def _():
    return lambda x: (x * 1, x.add_(1), x * 2, x.mul_(x), x + 0), (logging(3, 4),)


@case("LoggingTensor, dropout", OPAQUE, INPUT, RETURNED)
def _():
    return lambda x: F.dropout(x, 0.5) + torch.rand_like(x), (logging(3, 4),)


@case("LoggingTensor into a Linear", OPAQUE, INPUT, RETURNED, backward=True)
def _():
    return nn.Linear(4, 2), (logging(3, 4, requires_grad=True),)


@case("LoggingTensor as a parameter", OPAQUE, PARAMETER, RETURNED, backward=True)
def _():
    model = nn.Linear(4, 2, bias=False)
    model.weight = nn.Parameter(LoggingTensor(model.weight.detach()))
    return model, (torch.randn(3, 4, requires_grad=True),)


@case("LoggingTensor constructed", OPAQUE, CONSTRUCTED, RETURNED)
def _():
    return lambda a: LoggingTensor(a).cos().sum(), (torch.randn(3, 4),)


@case("DiagTensorBelow", OPAQUE, INPUT)
def _():
    return lambda x: x @ torch.ones(4, 4), (DiagTensorBelow(torch.randn(4)),)


@case("SparseTensor (common_subclass)", OPAQUE, INPUT, RETURNED)
def _():
    return lambda x: x + x, (common_subclass.SparseTensor.from_dense(torch.randn(3, 4).relu()),)


@case("WrapperTensorWithCustomSizes", OPAQUE, INPUT, RETURNED, backward=True)
def _():
    return lambda x: x.sin() * 2, (common_subclass.WrapperTensorWithCustomSizes(torch.randn(3, 4), requires_grad=True),)


@case("WrapperTensorWithCustomStrides", OPAQUE, INPUT, RETURNED, backward=True)
def _():
    return lambda x: x.sin() * 2, (common_subclass.WrapperTensorWithCustomStrides(torch.randn(3, 4), requires_grad=True),)


@case("LocalShardsWrapper", OPAQUE, INPUT, RETURNED)
def _():
    def f(x):
        return x.clone(), x.to(torch.float64), [s * 2 for s in x.local_shards()]

    return f, (LocalShardsWrapper([torch.randn(2, 3), torch.randn(2, 4)], [(0, 0), (0, 3)]),)


@case("CompositeCompliantTensor", OPAQUE, INPUT, RETURNED)
def _():
    return lambda x: (x.sin() * 2).view(-1), (_CCT(torch.randn(3, 4), _mode),)


_CCT, _mode = generate_cct_and_mode()


@case("LoggingTensorReentrant", OPAQUE, INPUT, RETURNED, backward=True)
def _():
    x = LoggingTensorReentrant(torch.randn(3, 4), requires_grad=True)
    return lambda x: (x.sin() * x + 1) @ torch.ones(4, 2), (x,)


@case("SwizzleTensor", OPAQUE, INPUT, since="0.18")
def _():
    from torchao.swizzle.swizzle_tensor import SwizzleTensor

    return lambda x: x.unswizzle() * 2, (SwizzleTensor(torch.randn(64, 32, dtype=torch.bfloat16)),)
