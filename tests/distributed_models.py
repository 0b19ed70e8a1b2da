"""Models, ranks and comparisons that tests over several processes share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.seeds import seeded
from thunder_norm.modular import ModularOptimizer

OPTIONS = {"lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "noise_adaptation": 0.9}


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
        torch.manual_seed(seeded(7))
        return Net()


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seeded(step))
    return {name: torch.randn(p.shape, generator=draw) for name, p in model.named_parameters()}


def give(model: nn.Module, step: int) -> None:
    """Gradients of that step, as the parameters are placed."""
    for p, g in zip(model.parameters(), gradients(model, step).values(), strict=True):
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: p.detach().clone() for name, p in full.items()}


def train(model: nn.Module, optimizer: ModularOptimizer, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        give(model, step)
        optimizer.step()
    return values(model)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == wanted.keys()
    for name, t in found.items():
        torch.testing.assert_close(t, wanted[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


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


def fit(model: nn.Module, optimizer: ModularOptimizer, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
    return values(model)
