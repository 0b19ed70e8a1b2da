"""ModularOptimizer and ModularNorm over several processes, against one process with the same gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from thunder_norm.errors import GradientError, NormMismatchError
from thunder_norm.modular import ModularNorm, ModularOptimizer, duality
from thunder_norm.modular.distributed import Part, _with_owners
from thunder_norm.modular.shards import local
from thunder_norm.tensors import RMSToRMSTensor

OPTIONS = {"lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
TOKENS = torch.arange(24).reshape(4, 6) % 11


class Net(nn.Module):
    """A parameter of every kind, most of sizes that 4 does not divide: a table, kernels in groups, gains, stacked matrices, biases."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 10, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(10)
        self.heads = nn.Parameter(torch.randn(3, 10, 5))
        self.hidden = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(self.table(tokens).mT).mT)
        return self.head(self.hidden((x.unsqueeze(1) @ self.heads).mean(1)))


def net() -> Net:
    """The same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Net()


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=draw) for name, p in model.named_parameters()}


def give(model: nn.Module, step: int) -> None:
    """Gradients of that step, as the parameters are placed."""
    for (name, p), g in zip(model.named_parameters(), gradients(model, step).values(), strict=True):
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: p.detach().clone() for name, p in full.items()}


def train(model: nn.Module, optimizer: ModularOptimizer, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        give(model, step)
        optimizer.step()
    return values(model)


def alone(steps: range = range(3), **options) -> dict[str, torch.Tensor]:
    """Parameters after some steps in one process."""
    model = net()
    return train(model, ModularOptimizer(model, TOKENS, **{**OPTIONS, **options}), steps)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == wanted.keys()
    for name, t in found.items():
        torch.testing.assert_close(t, wanted[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of all matrices that this process orthogonalizes, one entry each."""
    seen: list[tuple[int, ...]] = []

    def counting(matrices, method="newton_schulz"):
        seen.extend([tuple(matrices.shape[-2:])] * math.prod(matrices.shape[:-2]))
        return original(matrices, method)

    original = duality.orthogonalize
    with mock.patch.object(duality, "orthogonalize", counting):
        yield seen


def everywhere(own) -> list:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def sharded(model: nn.Module, mesh, *placements) -> nn.Module:
    """Every parameter a DTensor; of fewer dimensions than a Shard says, along its last one."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            fit = [Shard(min(x.dim, p.ndim - 1)) if isinstance(x, Shard) else x for x in placements]
            module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, fit)))
    return model


def layouts(world: int) -> dict[str, tuple]:
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    found = {f"{p} on a line": (line, p) for p in (Shard(0), Shard(1), Replicate())}
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        found |= {f"{pair} on a square": (square, *pair) for pair in ((Replicate(), Shard(0)), (Shard(0), Shard(1)))}
    return found


# -- steps --------------------------------------------------------------------------------------------------------------


def check_layouts(wanted: dict[str, torch.Tensor], count: list) -> None:
    for what, (mesh, *placements) in layouts(dist.get_world_size()).items():
        model = sharded(net(), mesh, *placements)
        with counted() as seen:
            found = train(model, ModularOptimizer(model, TOKENS, **OPTIONS), range(2))
        assert_same(found, wanted, 1e-6)
        assert sorted(shape for shapes in everywhere(seen) for shape in shapes) == count, what


@pytest.mark.parametrize("world", [2, 4])
def test_steps_of_dtensors_are_those_of_one_process_and_orthogonalize_each_matrix_once(world):
    with counted() as seen:
        wanted = alone(range(2))
    assert len(seen) == 2 * (2 * 3 + 3 + 4)  # steps, of groups and taps, heads, and other matrices
    run_ranks(world, check_layouts, wanted, sorted(seen))


def check_projection(wanted: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(net(), mesh, Replicate(), Shard(0))
    with mock.patch.object(torch.linalg, "svd", wraps=torch.linalg.svd) as svd:
        optimizer = ModularOptimizer(model, TOKENS, project=True, method="svd", **OPTIONS)
        assert_same(train(model, optimizer, range(2)), wanted, 1e-5)
        matrices = [tuple(call.args[0].shape) for call in svd.call_args_list]
    assert sum(math.prod(shape[:-2]) for shapes in everywhere(matrices) for shape in shapes) == 2 * 2 * (2 * 3 + 3 + 4)
    mesh = init_device_mesh("cpu", (4,))
    model = sharded(net(), mesh, Shard(0))
    optimizer = ModularOptimizer(model, TOKENS, project=True, lr=0.0)
    before = values(model)
    assert_same(train(model, optimizer, range(1)), before)  # a step of size 0 does not project either


def test_projections_and_exact_steps_are_done_once():
    run_ranks(4, check_projection, alone(range(2), project=True, method="svd"))


# -- training -----------------------------------------------------------------------------------------------------------


def fit(model: nn.Module, optimizer: ModularOptimizer, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
    return values(model)


def exact() -> Net:
    return net().double()


def with_ddp(mine: torch.Tensor) -> tuple:
    model = nn.parallel.DistributedDataParallel(exact())
    return model, ModularOptimizer(model, TOKENS, **OPTIONS), mine


def with_ddp_around_a_model_with_a_norm(mine: torch.Tensor) -> tuple:
    norm = ModularNorm(exact(), TOKENS, mode="modula", light=0.1)
    model = nn.parallel.DistributedDataParallel(norm.model)
    return model, ModularOptimizer(norm, process_group=model.process_group, **OPTIONS), mine


def with_fully_shard(mine: torch.Tensor) -> tuple:
    model = exact()
    for part in (model.hidden, model.head, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (4,)))
    return model, ModularOptimizer(model, TOKENS, **OPTIONS), mine


def with_fully_shard_of_a_model_with_a_norm(mine: torch.Tensor) -> tuple:
    model = exact()
    norm = ModularNorm(model, TOKENS, mode="modula", light=0.1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return model, ModularOptimizer(norm, **OPTIONS), mine


def with_tensor_parallel(mine: torch.Tensor) -> tuple:
    model = exact()
    parallelize_module(model.hidden, init_device_mesh("cpu", (4,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, ModularOptimizer(model, TOKENS, process_group=dist.group.WORLD, **OPTIONS), TOKENS


def with_fully_shard_and_tensor_parallel(mine: torch.Tensor) -> tuple:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = exact()
    parallelize_module(model, mesh["tensor"], {"hidden.2": ColwiseParallel(), "hidden.4": RowwiseParallel()})
    fully_shard(model.hidden, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, ModularOptimizer(model, TOKENS, **OPTIONS), TOKENS.view(2, 2, 6)[mesh.get_local_rank("data")]


WAYS = [
    with_ddp,
    with_ddp_around_a_model_with_a_norm,
    with_fully_shard,
    with_fully_shard_of_a_model_with_a_norm,
    with_tensor_parallel,
    with_fully_shard_and_tensor_parallel,
]


def check_training(wanted: dict[str, torch.Tensor], count: list) -> None:
    for way in WAYS:
        model, optimizer, tokens = way(TOKENS[dist.get_rank()][None])
        with counted() as seen:
            found = fit(model, optimizer, tokens)
        assert_same({name.removeprefix("module."): t for name, t in found.items()}, wanted, 1e-6)
        if way is not with_fully_shard_and_tensor_parallel:  # there ranks beside each other have parameters of their own
            assert sorted(shape for shapes in everywhere(seen) for shape in shapes) == count, way
        assert optimizer.norm.targets.keys() == wanted.keys()


def test_models_that_torch_distributes_train_as_in_one_process():
    model = exact()
    with counted() as seen:
        wanted = fit(model, ModularOptimizer(model, TOKENS, **OPTIONS), TOKENS)
    run_ranks(4, check_training, wanted, sorted(seen))
