"""Subclasses that come with torch."""

from __future__ import annotations

import functools
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal import subclasses
from torch.testing._internal.common_subclass import SubclassWithTensorFactory
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

from .case import CONSTRUCTED, INPUT, PARAMETER, RETURNED, SEVERAL, case


def two(*shape: int, requires_grad: bool = False) -> TwoTensor:
    x = TwoTensor(torch.randn(shape), torch.randn(shape))
    return x.requires_grad_() if requires_grad else x


def wrapped(*shape: int, requires_grad: bool = False) -> WrapperSubclass:
    x = WrapperSubclass(torch.randn(shape))
    return x.requires_grad_() if requires_grad else x


def mlp(*sizes: int) -> nn.Module:
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def with_parameters(model: nn.Module, wrap, requires_grad: bool = True) -> nn.Module:
    """The model with every parameter replaced by a wrapper of it."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(wrap(p.detach()), requires_grad=requires_grad))
    return model


def two_of(t: torch.Tensor) -> TwoTensor:
    return TwoTensor(t, t.clone() * 0.5)


@case("TwoTensor, elementwise", INPUT, RETURNED, SEVERAL, backward=True)
def _():
    return lambda x, y: (x * y).sin() + x.exp() / 2, (two(3, 4, requires_grad=True), two(3, 4, requires_grad=True))


@case("TwoTensor into an MLP of plain parameters", INPUT, RETURNED, backward=True)
def _():
    return mlp(8, 16, 4), (two(3, 8, requires_grad=True),)


@case("TwoTensor parameters of an MLP", PARAMETER, RETURNED, SEVERAL, backward=True)
def _():
    return with_parameters(mlp(8, 16, 4), two_of), (torch.randn(3, 8),)


@case("TwoTensor constructed from plain inputs", CONSTRUCTED, RETURNED)
def _():
    return lambda a, b: F.softmax(TwoTensor(a, b) @ a.T, -1), (torch.randn(3, 4), torch.randn(3, 4))


@case("TwoTensor constructed, an inner tensor returned", CONSTRUCTED)
def _():
    def f(a, b):
        return (TwoTensor(a, b) * 2).tanh().a

    return f, (torch.randn(3, 4), torch.randn(3, 4))


@case("TwoTensor with plain tensors", INPUT, RETURNED, backward=True)
def _():
    return lambda x, p: F.layer_norm(x * p + p, (4,)), (two(3, 4), torch.randn(3, 4, requires_grad=True))


@case("TwoTensor, views and indexing", INPUT, RETURNED)
def _():
    return lambda x: (x.view(2, 6).t()[1:4], x.unsqueeze(0).expand(2, 3, 4), *x.split(2, -1)), (two(3, 4),)


@case("TwoTensor, attention", INPUT, RETURNED, SEVERAL, backward=True)
def _():
    return lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), (
        two(1, 5, 4, requires_grad=True),
        two(1, 5, 4, requires_grad=True),
    )


@case("TwoTensor, convolution and pooling", INPUT, PARAMETER, RETURNED, backward=True)
def _():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2))
    return with_parameters(model, two_of), (two(1, 2, 8, 8, requires_grad=True),)


@case("TwoTensor, in-place on an intermediate", INPUT, RETURNED)
def _():
    def f(x):
        y = x * 2
        y.add_(1).mul_(x)
        return y

    return f, (two(3, 4),)


@case("TwoTensor, slices assigned and views changed in place", INPUT, RETURNED, backward=True)
def _():
    def f(x):
        y = x * 2
        y[0] = 1.0
        y[:, 1:3].copy_(x[:, :2])
        y.t()[3].add_(x[:, 0])
        return y * x

    return f, (two(3, 4, requires_grad=True),)


@case("WrapperSubclass, elementwise", INPUT, RETURNED, backward=True)
def _():
    return lambda x: (x * x).cos().sum(-1), (wrapped(3, 4, requires_grad=True),)


@case("WrapperSubclass parameters of an MLP", PARAMETER, RETURNED, SEVERAL, backward=True)
def _():
    return with_parameters(mlp(8, 16, 4), WrapperSubclass), (torch.randn(3, 8),)


@case("WrapperSubclass, transformer encoder layer", INPUT, RETURNED, backward=True)
def _():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return layer, (wrapped(2, 3, 8, requires_grad=True),)


@case("WrapperSubclass constructed", CONSTRUCTED, RETURNED)
def _():
    return lambda a: WrapperSubclass(a).relu().cumsum(0), (torch.randn(3, 4),)


@case("WrapperSubclass, cross entropy", INPUT, RETURNED, backward=True)
def _():
    return lambda x, t: F.cross_entropy(x, t), (wrapped(4, 5, requires_grad=True), torch.tensor([0, 2, 1, 4]))


@case("ConstantExtraMetadataTensor", INPUT, RETURNED)
def _():
    cls = constant_metadata()
    return lambda x: x.sin() * 2, (cls(torch.randn(3, 4)),)


@functools.cache
def constant_metadata() -> type:
    """The class of the same name in torch's test_aot_autograd and test_subclasses, which is not importable from the package."""

    class ConstantExtraMetadataTensor(torch.Tensor):
        @staticmethod
        def __new__(cls, elem):
            return torch.Tensor._make_wrapper_subclass(cls, elem.shape, strides=elem.stride(), dtype=elem.dtype)

        def __init__(self, elem):
            self.elem, self.constant_attribute = elem, 4

        def __tensor_flatten__(self):
            return ["elem"], self.constant_attribute

        @staticmethod
        def __tensor_unflatten__(inner_tensors, meta, outer_size, outer_stride):
            out = ConstantExtraMetadataTensor(inner_tensors["elem"])
            out.constant_attribute = meta
            return out

        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs):
            attribute = next(x.constant_attribute for x in args if isinstance(x, cls))
            elems = [x.elem if isinstance(x, cls) else x for x in args]
            out = ConstantExtraMetadataTensor(func(*elems, **(kwargs or {})))
            out.constant_attribute = attribute
            return out

    return ConstantExtraMetadataTensor


@case("SubclassWithTensorFactory", INPUT, RETURNED, backward=True)
def _():
    return lambda x: (x * 2).relu(), (SubclassWithTensorFactory(torch.randn(3, 4)).requires_grad_(),)


@case("SubclassWithTensorFactory constructed", CONSTRUCTED, RETURNED)
def _():
    return lambda a: SubclassWithTensorFactory(a) + 1, (torch.randn(3, 4),)


@case("TwoTensor(TwoTensor)", INPUT, RETURNED, backward=True)
def _():
    def nested() -> TwoTensor:
        return TwoTensor(two(3, 4), two(3, 4)).requires_grad_()

    return lambda x, y: (x * y).tanh() @ x.T, (nested(), nested())


@case("WrapperSubclass(TwoTensor)", INPUT, RETURNED, backward=True)
def _():
    return lambda x: F.gelu(x) * x, (WrapperSubclass(two(3, 4)).requires_grad_(),)


@case("TwoTensor(WrapperSubclass) constructed", CONSTRUCTED, RETURNED)
def _():
    return lambda a: TwoTensor(WrapperSubclass(a), WrapperSubclass(a * 2)).exp(), (torch.randn(3, 4),)


@case("TwoTensor, checkpointed", INPUT, RETURNED, backward=True)
def _():
    from torch.utils.checkpoint import checkpoint

    return lambda x: checkpoint(lambda y: (y * y).sin(), x, use_reentrant=False), (two(3, 4, requires_grad=True),)


@case("TwoTensor in dicts and lists", INPUT, RETURNED, SEVERAL)
def _():
    return lambda d: {"sum": d["all"][0] + d["all"][1], "all": [x * 2 for x in d["all"]]}, ({"all": [two(3), two(3)]},)


@case("DTensor, matrix product", INPUT, RETURNED, SEVERAL, backward=True)
def _():
    from torch.distributed.tensor import Shard, distribute_tensor

    x, y = (distribute_tensor(torch.randn(4, 4), mesh(), [Shard(dim)]).requires_grad_() for dim in (0, 1))
    return lambda x, y: (x @ y).relu() * 2, (x, y)


@case("DTensor parameters of a Linear", PARAMETER, SEVERAL, backward=True)
def _():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh(), [Shard(0)]))
    model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), mesh(), [Shard(0)]))
    return model, (distribute_tensor(torch.randn(3, 4), mesh(), [Replicate()]),)


@case("DTensor redistributed, its local tensor returned", INPUT)
def _():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = distribute_tensor(torch.randn(4, 4), mesh(), [Shard(0)])
    return lambda x: (x * 2).redistribute(placements=[Replicate()]).to_local() + 1, (x,)


@case("DTensor.from_local", CONSTRUCTED, RETURNED)
def _():
    from torch.distributed.tensor import DTensor, Shard

    device_mesh = mesh()
    return lambda a: DTensor.from_local(a, device_mesh, [Shard(0)]) * 2, (torch.randn(4, 4),)


def mesh(*sizes: int):
    """A device mesh of this one process, of one dimension if nothing else is said; tests/subclass/test_zoo.py ends the process group that it makes."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.FileStore(tempfile.mktemp(), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return dist.init_device_mesh("cpu", sizes or (1,), mesh_dim_names=("first", "second")[: len(sizes) or 1])


assert subclasses.WrapperSubclass is WrapperSubclass
