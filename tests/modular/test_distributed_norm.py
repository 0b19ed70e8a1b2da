"""The modular norm of sharded parameters, and checkpoints of several ranks."""

from __future__ import annotations

import copy
import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests import ROOT
from tests.distributed_models import (
    OPTIONS,
    TOKENS,
    Net,
    assert_same,
    everywhere,
    give,
    gradients,
    layouts,
    net,
    sharded,
    train,
    values,
)
from tests.ranks import run_ranks
from tests.seeds import seeded
from thunder_norm.errors import NormMismatchError
from thunder_norm.model_state.shards import local
from thunder_norm.modular import ModularNorm, ModularOptimizer

pytestmark = pytest.mark.slow  # ranks are forks of a server that imports torch first


# -- the norm --------------------------------------------------------------------------------------------------------------


def check_norm(initialized: dict, projected: dict, steps: dict, size: float) -> None:
    for mesh, *placements in list(layouts(dist.get_world_size()).values())[1::2]:
        model = sharded(net(), mesh, *placements)
        norm = ModularNorm(model, TOKENS, mode="typical", light=0.1)
        give(model, 0)
        grads = {name: p.grad for name, p in model.named_parameters()}
        found = norm.dualize(grads, 0.5)
        assert all(found[name].placements == g.placements for name, g in grads.items())
        assert_same({name: t.full_tensor() for name, t in found.items()}, steps, 1e-6)
        torch.testing.assert_close(norm(grads).item(), size)
        with pytest.raises(NormMismatchError, match="not differentiable"):
            norm.dualize({name: g.requires_grad_() for name, g in grads.items()})
        # seeds differ: all ranks draw the first one's numbers
        norm.initialize_(torch.Generator().manual_seed(seeded(dist.get_rank())))
        assert_same(values(model), initialized)
        before = torch.get_rng_state()
        norm.initialize_()
        assert torch.equal(before, torch.get_rng_state()) == (dist.get_rank() > 0)
        assert_same(everywhere(values(model))[0], values(model))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads.values(), strict=True):
                p.copy_(g)
        norm.project_()
        assert_same(values(model), projected, 1e-6)
        if dist.get_rank() == 0:
            local(next(model.parameters())).detach().view(-1)[0] = math.nan
        with pytest.raises(NormMismatchError, match="entries that are NaN"):
            norm.project_()


def blocks() -> nn.Sequential:
    """Of which the repeated ones share a mass."""
    return nn.Sequential(nn.Linear(6, 4), *(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))


def check_derivations(targets: dict, outputs: float, of_blocks: dict) -> None:
    """Frozen parameters count with the norm of their data; replicas start from the same."""
    model = frozen(net())
    for part in (model.hidden, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (4,)))
    model(TOKENS)  # leaves the root's parameters gathered
    norm = ModularNorm(model, TOKENS)
    assert norm.targets == pytest.approx(targets)
    assert norm.outputs.norm_size.item() == pytest.approx(outputs)
    model(TOKENS)
    norm.initialize_()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert norm({name: p.detach() for name, p in model.named_parameters() if p.requires_grad}).isfinite()
    model = blocks()
    for part in (model[2], model):
        fully_shard(part)
    assert ModularNorm(model, torch.randn(2, 6)).targets == pytest.approx(of_blocks)
    replica = nn.parallel.DistributedDataParallel(net())
    norm = ModularNorm(replica, TOKENS, mode="modula")
    norm.initialize_()
    assert_same(everywhere(values(replica))[0], values(replica))
    norm = copy.deepcopy(norm)  # which knows nothing of other ranks
    assert norm.process_group is None
    ModularOptimizer(norm, lr=0.1, process_group=dist.group.WORLD).norm.initialize_()
    assert_same(everywhere(values(norm.model))[0], values(norm.model))


def frozen(model: Net) -> Net:
    model.hidden[2].requires_grad_(False)
    return model


def test_a_norm_of_sharded_parameters_does_what_it_does_for_whole_ones():
    model = net()
    norm = ModularNorm(model, TOKENS, mode="typical", light=0.1)
    grads = gradients(model, 0)
    norm.initialize_(torch.Generator().manual_seed(seeded(0)))
    initialized = values(model)
    model.load_state_dict(grads)
    norm.project_()
    run_ranks(4, check_norm, initialized, values(model), norm.dualize(grads, 0.5), norm(grads).item())


def test_norms_are_derived_from_sharded_models():
    norm = ModularNorm(frozen(net()), TOKENS)
    run_ranks(4, check_derivations, norm.targets, norm.outputs.norm_size.item(), ModularNorm(blocks(), torch.randn(2, 6)).targets)


# -- checkpoints -----------------------------------------------------------------------------------------------------------


RESUMED = {**OPTIONS, "project": True, "masses": {"table.weight": 0.0}}


def started(model: nn.Module) -> ModularOptimizer:
    """An optimizer of another model: what it is to have comes from a checkpoint."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    if dist.is_initialized():
        for part in (model.hidden, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return ModularOptimizer(model, TOKENS, **RESUMED)


def check_saving(folder: Path) -> None:
    model = net()
    optimizer = started(model)
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.2
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / "sharded")
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")  # now: what is no DTensor in it is the optimizer's own
    after = train(model, optimizer, range(2, 4))
    if dist.get_rank() == 0:
        torch.save(after, folder / "after.pt")


def check_resuming(folder: Path) -> None:
    model = net()
    optimizer = started(model)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    saved = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(saved, checkpoint_id=folder / "sharded")
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    assert_resumed(model, optimizer, folder, 0.0 if dist.get_world_size() == 4 else 1e-6)
    # what one process saved without any of this
    model = net()
    optimizer = started(model)
    of_model, of_optimizer = torch.load(folder / "alone.pt")
    set_model_state_dict(model, of_model, options=StateDictOptions(full_state_dict=True))
    optimizer.load_state_dict(of_optimizer)
    assert_resumed(model, optimizer, folder, 1e-6)


def assert_resumed(model: nn.Module, optimizer: ModularOptimizer, folder: Path, tolerance: float) -> None:
    of_model, of_optimizer = torch.load(folder / "whole.pt")
    assert_same(values(model), of_model)
    state = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters() if optimizer.state[p]}
    assert_same(
        {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()},
        {name: t["momentum_buffer"] for name, t in of_optimizer["state"].items() if t},
    )
    assert "table.weight" not in state and len(state) == len(of_model) - 1
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert_same(train(model, optimizer, range(2, 4)), torch.load(folder / "after.pt"), tolerance)


def test_checkpoints_of_four_ranks_are_resumed_bit_for_bit_and_by_any_number_of_ranks(tmp_path):
    run_ranks(4, check_saving, tmp_path)
    model = net()
    optimizer = started(model)
    of_model, of_optimizer = torch.load(tmp_path / "whole.pt")
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "alone.pt")
    assert_resumed(model, optimizer, tmp_path, 1e-6)
    run_ranks(4, check_resuming, tmp_path)
    run_ranks(2, check_resuming, tmp_path)


def check_example(folder: Path) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "sharded_training.py"))["main"]
    common = ["--width", "24", "--batch", "32"]
    for steps in ("5", "10"):
        accuracy = main([*common, "--steps", steps, "--checkpoint", str(folder)])
    assert accuracy == main([*common, "--steps", "10"])
    assert 0.3 < accuracy < 1


def test_the_example_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(tmp_path):
    run_ranks(2, check_example, tmp_path / "checkpoint")
