"""Subclasses of torch.distributed beyond sharded tensors on one dimension: partial sums, meshes of two dimensions, what is under way."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from .case import CONSTRUCTED, INPUT, PARAMETER, RETURNED, SEVERAL, case
from .torch_cases import mesh

SINCE = "2.15"


def local(*placements: Placement, shape: tuple[int, ...] = (3, 4), requires_grad: bool = False) -> DTensor:
    """A DTensor on a mesh of as many dimensions as there are placements."""
    x = DTensor.from_local(torch.randn(shape), mesh(*[1] * len(placements)), placements, run_check=False)
    return x.detach().requires_grad_(requires_grad)


@case("DTensor, partial sums", INPUT, RETURNED, SEVERAL, backward=True)
def _():
    x, y = (local(Partial(), requires_grad=True) for _ in "xy")
    return lambda x, y: ((x + y) * 2, x.sum(), x.redistribute(placements=[Replicate()]).sin()), (x, y)


@case("DTensor, partial averages and maxima", INPUT, RETURNED, SEVERAL)
def _():
    x, y = local(Partial("avg")), local(Partial("max"))
    return lambda x, y: (x.full_tensor(), y.redistribute(placements=[Replicate()]), x.to_local()), (x, y)


@case("DTensor, a mesh of two dimensions", INPUT, RETURNED, SEVERAL, backward=True)
def _():
    x, w = local(Shard(0), Replicate(), requires_grad=True), local(Replicate(), Shard(1), shape=(4, 2), requires_grad=True)
    return lambda x, w: (x @ w).redistribute(placements=[Shard(0), Replicate()]).relu(), (x, w)


@case("DTensor parameters on a mesh of two dimensions", INPUT, PARAMETER, RETURNED, SEVERAL, backward=True)
def _():
    model = nn.Linear(4, 6)
    for name, p in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(p.detach(), mesh(1, 1), [Replicate(), Shard(0)])))
    return model, (local(Shard(0), Replicate()),)


@case("DTensor on a part of another's mesh", INPUT, CONSTRUCTED, RETURNED, since_torch=SINCE)
def _():
    def f(x, y):
        part = x.device_mesh["second"]
        return DTensor.from_local(y, part, [Shard(0)], run_check=False) * part.size(), x * x.device_mesh["first", "second"].ndim

    return f, (local(Shard(0), Replicate()), torch.randn(3, 4))


@case("DTensor, local_map", INPUT, CONSTRUCTED, RETURNED, SEVERAL, backward=True)
def _():
    in_placements = ([Shard(0)], [Replicate()])
    product = local_map(lambda a, b: a @ b, out_placements=[Shard(0)], in_placements=in_placements, device_mesh=mesh())
    args = local(Shard(0), requires_grad=True), local(Replicate(), shape=(4, 2), requires_grad=True)
    return lambda x, w: product(x, w).relu(), args


@case("DTensor, placements of the local tensor's gradient", INPUT, backward=True)
def _():
    return lambda x: x.to_local(grad_placements=[Partial()]).sin(), (local(Replicate(), requires_grad=True),)


@case("DTensor, random and in place", INPUT, RETURNED)
def _():
    return lambda x: (F.dropout(x, 0.5) + torch.rand_like(x), x.mul_(2), x.sum()), (local(Shard(0)),)


@case("AsyncCollectiveTensor", INPUT, RETURNED)
def _():
    mesh()
    return lambda x: (x * 2, x.view(-1), x.view(4, 3)[1:], x.wait() + 1), (AsyncCollectiveTensor(torch.randn(3, 4)),)


@case("AsyncCollectiveTensor of a collective", CONSTRUCTED, RETURNED, since_torch=SINCE)
def _():
    mesh()

    def f(x):
        reduced = collectives.all_reduce(x, "sum", dist.group.WORLD)
        gathered = collectives.all_gather_tensor(x, 0, dist.group.WORLD)
        return reduced, reduced + 1, gathered.view(-1) * 2, reduced[1:].t()

    return f, (torch.randn(3, 4),)


@case("AsyncCollectiveTensor, waited for", CONSTRUCTED, since_torch=SINCE)
def _():
    mesh()

    def f(x):
        scattered = collectives.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)
        return collectives.wait_tensor(scattered), scattered * 2

    return f, (torch.randn(3, 4),)


@case("AsyncCollectiveTensor, differentiated", CONSTRUCTED, backward=True, since_torch=SINCE)
def _():
    mesh()

    def f(x):
        gathered = collectives.all_gather_tensor_autograd(x * 2, 0, dist.group.WORLD)
        return (collectives.reduce_scatter_tensor_autograd(gathered * 3, "sum", 0, dist.group.WORLD) * x).sin()

    return f, (torch.randn(3, 4, requires_grad=True),)


@case("LocalTensor", INPUT, RETURNED, backward=True, since_torch=SINCE)
def _():
    from torch.distributed._local_tensor import LocalTensor

    x = LocalTensor({rank: torch.randn(3, 4) for rank in range(2)}).requires_grad_()
    return lambda x: (x * 2 + 1).sin() @ x.t(), (x,)
