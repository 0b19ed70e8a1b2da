"""Norm maps and reports of models whose parameters are sharded are those of the same models in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.distributed_models import TOKENS, Net, assert_same, net, sharded
from tests.ranks import run_ranks
from thunder_norm import RMSTensor, build_norm_map, load_norm_map, norm_report
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

pytestmark = pytest.mark.slow  # ranks are forks of a server that imports torch first

TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])
ROW = ("op", "kind", "elem_dims", "shape", "norm_size", "sensitivity", "actual", "module")


def tied() -> Net:
    """Two names of one parameter, and one of no derivative."""
    model = net()
    model.hidden[4].weight = model.hidden[2].weight
    model.head.weight.requires_grad_(False)
    return model


def with_fully_shard() -> Net:
    model = tied()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.hidden, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(TOKENS)  # leaves the root's parameters gathered
    return model


def with_tensor_parallel() -> Net:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(net(), mesh, {"hidden.0": ColwiseParallel(), "hidden.2": RowwiseParallel()})


def with_dtensors() -> Net:
    return sharded(net(), init_device_mesh("cpu", (dist.get_world_size(),)), Shard(1))


WAYS: dict[Callable[[], Net], Callable[[], Net]] = {with_fully_shard: tied, with_tensor_parallel: net, with_dtensors: net}


def norms_of(model: nn.Module) -> dict[str, Any]:
    """Sizes of outputs by what parameters are, and the derivatives of the one where they are measured."""
    norm_map = build_norm_map(model, TOKENS)
    measured = norm_map(TOKENS).norm_size
    measured.backward()
    found = {"measured": measured.item(), "given": norm_map(TOKENS, normed_state_dict=dict.fromkeys(GIVEN, 2.0)).norm_size.item()}
    found["unit"] = build_norm_map(model, TOKENS, parameters="unit")(TOKENS).norm_size.item()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    found["after a step"] = norm_map(TOKENS).norm_size.item()
    return found


GIVEN = [name for name, _ in net().named_parameters()]


def rows(report: Any) -> list[tuple]:
    both = [*report.rows, *report.parameters.values()]
    found = [tuple(getattr(row, attribute) for attribute in ROW) for row in both]
    return [tuple(round(v, 5) if isinstance(v, float) else v for v in row) for row in found]


def reports_of(model: nn.Module) -> list[tuple]:
    norm_map = build_norm_map(model, TOKENS)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    return [*rows(norm_report(jitted, TOKENS)), *rows(norm_report(norm_map, TOKENS))]


class Whole(NamedTuple):
    """What a model says of itself in one process."""

    reports: list[tuple]
    norms: dict[str, Any]
    targets: dict[str, float]
    grads: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Whole:
        reports, norms, targets = reports_of(model), norms_of(model), ModularNorm(model, TOKENS).targets
        return cls(reports, norms, targets, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def _is_copied_whole(p: DTensor) -> bool:
    """Whether torch may spread the gradient of a leaf otherwise: torch 2.9 replicates what it copies of shards of several sizes."""
    return TORCH < (2, 10) and p.to_local().numel() * dist.get_world_size() != p.numel()


def check(folder: Path, wholes: dict[str, Whole]) -> None:
    for shard, one_process in WAYS.items():
        model, whole = shard(), wholes[one_process.__name__]
        before = None if shard is with_dtensors else model(TOKENS)
        tensors = {id(p) for p in model.parameters() if isinstance(p, DTensor)}
        for found, expected in zip(reports_of(model), whole.reports, strict=True):
            assert found == expected, f"{shard.__name__}: {found} is not {expected}"
        assert norms_of(model) == pytest.approx(whole.norms, rel=1e-6)
        assert ModularNorm(model, TOKENS).targets == pytest.approx(whole.targets)
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        placed = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
        for name, p in placed.items():
            assert not p.requires_grad or grads[name].placements == p.placements or _is_copied_whole(p), name
        full = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
        assert_same(full, whole.grads, 1e-5)
        # what was done to the model is undone
        with torch.no_grad():
            for p in model.parameters():
                p.div_(1.5)
        if before is not None:
            torch.testing.assert_close(model(TOKENS), before)
            for module in model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
        assert {id(p) for p in model.parameters() if isinstance(p, DTensor)} >= tensors
    check_sharding_afterwards(folder)
    with pytest.raises(UnsupportedOpError, match="normed call of a module whose parameters are sharded"):
        thunder.jit(with_tensor_parallel().hidden, transforms=[NormTransform()])(RMSTensor(1.0, backing=torch.ones(2, 5)))


def check_sharding_afterwards(folder: Path) -> None:
    """A norm map reads the parameters that its model has by now; a file has whole ones."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6))
    norm_map = build_norm_map(model, torch.ones(2, 6))
    assert norm_map(RMSTensor(1.0)).norm_size.item() == pytest.approx(1.0)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.no_grad():
        model[0].weight.to_local().mul_(3.0 if dist.get_rank() == 0 else 2.0)
    assert norm_map(RMSTensor(1.0)).norm_size.item() == pytest.approx(3.0)
    model(torch.ones(2, 6))  # leaves gathered tensors in the places of the parameters
    assert norm_map(RMSTensor(1.0)).norm_size.item() == pytest.approx(3.0)
    path = folder / f"of rank {dist.get_rank()}"
    norm_map.save(path)
    assert load_norm_map(path)(RMSTensor(1.0)).norm_size.item() == pytest.approx(3.0)
    assert load_norm_map(path).tensors["0.weight"].shape == (6, 6)
    with torch.no_grad():
        model[0].weight.to_local().mul_(2.0 if dist.get_rank() == 0 else 4.0)
    assert load_norm_map(path, model)(RMSTensor(1.0)).norm_size.item() == pytest.approx(8.0)


def test_two_processes_have_the_norms_of_one(tmp_path):
    run_ranks(2, check, tmp_path, {f.__name__: Whole.of(f()) for f in dict.fromkeys(WAYS.values())})


def test_a_norm_map_reads_the_parameters_that_its_model_has_by_now():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    norm_map = build_norm_map(model, torch.ones(2, 3))

    def expected() -> float:
        return math.prod(torch.linalg.matrix_norm(model[i].weight.detach().double(), 2).item() for i in (0, 2))

    def found() -> float:
        return norm_map(RMSTensor(1.0)).norm_size.item()

    assert found() == pytest.approx(expected(), rel=1e-6)
    model[0].weight = nn.Parameter(3 * model[0].weight.detach())
    assert found() == pytest.approx(expected(), rel=1e-6)
    model.load_state_dict({name: 2 * t for name, t in model.state_dict().items()}, assign=True)
    assert found() == pytest.approx(expected(), rel=1e-6)
    model[2].weight = model[0].weight  # tied
    assert found() == pytest.approx(expected(), rel=1e-6)
    model[2] = nn.Linear(3, 3, bias=False, dtype=torch.float64)  # untied
    model[0].double()
    assert found() == pytest.approx(expected(), rel=1e-6)
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    assert not norm_map(RMSTensor(1.0)).norm_size.requires_grad
    model[2].weight.requires_grad_()
    norm_map(RMSTensor(1.0)).norm_size.backward()
    assert model[2].weight.grad is not None and model[0].weight.grad is None
