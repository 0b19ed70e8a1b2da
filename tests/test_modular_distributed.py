"""ModularOptimizer and ModularNorm over several processes, against one process with the same gradients."""

from __future__ import annotations

import contextlib
import copy
import math
import runpy
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.seeds import seeded
from thunder_norm.core.kinds import RMSToRMSTensor
from thunder_norm.errors import GradientError, NormMismatchError
from thunder_norm.modular import ModularNorm, ModularOptimizer, duality
from thunder_norm.modular.distributed import _parts, _with_owners
from thunder_norm.modular.shards import local

pytestmark = pytest.mark.slow  # ranks are forks of a server that imports torch first

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

    def counting(matrices, *args):
        seen.extend([tuple(matrices.shape[-2:])] * math.prod(matrices.shape[:-2]))
        return original(matrices, *args)

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


@given(
    world=st.integers(1, 5),
    sides=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    is_whole=st.booleans(),
)
def test_no_rank_has_more_work_than_the_mean_and_the_costliest_matrix(world, sides, is_whole):
    ball = duality.ball(RMSToRMSTensor, (-2, -1), torch.Size((2, 2)))
    tensors = {str(i): torch.empty(sizes) for i, sizes in enumerate(sides)}
    parts = []
    for name, t in tensors.items():
        rows, columns = t.shape
        step = rows if is_whole else math.ceil(rows / world)
        boxes = [((min(r * step, rows), min((r + 1) * step, rows)), (0, columns)) for r in range(world)]
        parts += _parts(name, t, [((0, rows), (0, columns))] * world if is_whole else boxes, ball)
    owned = _with_owners(parts, dict.fromkeys(tensors, ball), world)
    loads = [sum(p.cost for p in owned if p.owner == rank) for rank in range(world)]
    assert [p.name for p in owned] == list(tensors) and all(p.owner in range(world) for p in owned)
    assert max(loads) <= sum(loads) / world + max(p.cost for p in owned)
    # a matrix of half the rows and columns is about an eighth of the work
    assert _parts("", torch.empty(40, 20), [((0, 40), (0, 20))], ball)[0].cost == 2 * 20 * 20 * 20 * 18 * 2


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
    norm = ModularNorm(exact(), TOKENS, mode="typical", light=0.1)
    model = nn.parallel.DistributedDataParallel(norm.model)
    return model, ModularOptimizer(norm, process_group=model.process_group, **OPTIONS), mine


def with_fully_shard(mine: torch.Tensor) -> tuple:
    model = exact()
    for part in (model.hidden, model.head, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (4,)))
    return model, ModularOptimizer(model, TOKENS, **OPTIONS), mine


def with_fully_shard_of_a_model_with_a_norm(mine: torch.Tensor) -> tuple:
    model = exact()
    norm = ModularNorm(model, TOKENS, mode="typical", light=0.1)
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


def check_partial_gradients(wanted: dict[str, torch.Tensor]) -> None:
    """Gradients that autograd left as terms of a sum are added up first."""
    mesh = init_device_mesh("cpu", (2,))
    model = sharded(net(), mesh, Shard(0))
    optimizer = ModularOptimizer(model, TOKENS, **OPTIONS)
    for step in range(2):
        for p, g in zip(model.parameters(), gradients(model, step).values(), strict=True):
            p.grad = DTensor.from_local(g / 2, mesh, [Partial()])
        optimizer.step()
    assert_same(values(model), wanted, 1e-6)


def test_gradients_may_be_placed_otherwise_than_parameters():
    run_ranks(2, check_partial_gradients, alone(range(2)))


# -- errors -------------------------------------------------------------------------------------------------------------


def spoil(model: nn.Module, optimizer: ModularOptimizer, how: str) -> None:
    """On one rank alone."""
    give(model, 0)
    rank = dist.get_rank()
    p = dict(model.named_parameters())["hidden.0.weight"]
    if how == "nan" and rank == 1:
        local(p.grad)[0, 0] = math.nan
    elif how == "missing" and rank == 2:
        p.grad = None
    elif how == "option" and rank == 3:
        optimizer.param_groups[0]["lr"] = -1.0


def check_agreement() -> None:
    for placement in (Shard(0), None):  # None: plain tensors, as under DistributedDataParallel
        for how, error, text in (
            ("nan", GradientError, "NaN or infinite: 'hidden.0.weight'"),
            ("missing", GradientError, "no gradient for 'hidden.0.weight'"),
            ("option", NormMismatchError, "lr must be a number >= 0, got -1.0"),
        ):
            model = net() if placement is None else sharded(net(), init_device_mesh("cpu", (4,)), placement)
            before = values(model)
            optimizer = ModularOptimizer(model, TOKENS, process_group=dist.group.WORLD, **OPTIONS)
            spoil(model, optimizer, how)
            with pytest.raises(error, match=text) as caught:
                optimizer.step()
            assert ("rank 3" in str(caught.value)) == (how == "option" and dist.get_rank() != 3)
            assert_same(values(model), before)
            assert not optimizer.state
            optimizer.param_groups[0]["lr"] = OPTIONS["lr"]
            assert_same(train(model, optimizer, range(2)), alone(range(2)), 1e-6)  # as if nothing had been


def check_skipping() -> None:
    for placement in (Shard(0), None):
        for how in ("nan", "missing"):
            model = net() if placement is None else sharded(net(), init_device_mesh("cpu", (4,)), placement)
            before = values(model)
            options = {"missing_grads": "skip", "nonfinite_grads": "skip", "process_group": dist.group.WORLD}
            optimizer = ModularOptimizer(model, TOKENS, **options, **OPTIONS)
            spoil(model, optimizer, how)
            optimizer.step()
            after = values(model)
            still = {name for name, t in after.items() if torch.equal(t, before[name])}
            assert optimizer.skipped_steps == (how == "nan")
            assert still == (set(before) if how == "nan" else {"hidden.0.weight"})


def check_refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = net()
    norm = ModularNorm(model, TOKENS, mode="modula")
    model.head.weight = nn.Parameter(DTensor.from_local(model.head.weight.detach(), mesh, [Partial()]))
    with pytest.raises(NormMismatchError, match="'head.weight' has placements .*were not added up"):
        ModularOptimizer(norm, lr=0.1)
    with pytest.raises(NormMismatchError, match="this process is not in the process group") if dist.get_rank() else _nothing():
        model = net()
        optimizer = ModularOptimizer(model, TOKENS, lr=0.1, process_group=dist.new_group([0]))
        train(model, optimizer, range(1))
    model = net()
    optimizer = ModularOptimizer(model, TOKENS, lr=0.1)
    fully_shard(model, mesh=mesh)
    model(TOKENS).sum().backward()
    with pytest.raises(GradientError, match="made before fully_shard"):
        optimizer.step()


_nothing = contextlib.nullcontext


def test_all_ranks_raise_what_one_finds_and_nothing_moves():
    run_ranks(4, check_agreement)


def test_all_ranks_skip_what_one_must():
    run_ranks(4, check_skipping)


def test_what_cannot_be_right_is_refused():
    run_ranks(2, check_refusals)
    flattened = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # which needs an accelerator
    nn.Module.__init__(flattened)
    with pytest.raises(NormMismatchError, match=r"use fully_shard\(model\)"):
        ModularNorm(nn.Sequential(flattened), TOKENS)


# -- the norm -----------------------------------------------------------------------------------------------------------


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


# -- checkpoints --------------------------------------------------------------------------------------------------------

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
    after = train(model, optimizer, range(2, 4))
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
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
    main = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "sharded_training.py"))["main"]
    common = ["--width", "24", "--batch", "32"]
    for steps in ("5", "10"):
        accuracy = main([*common, "--steps", steps, "--checkpoint", str(folder)])
    assert accuracy == main([*common, "--steps", "10"])
    assert 0.3 < accuracy < 1


def test_the_example_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(tmp_path):
    run_ranks(2, check_example, tmp_path / "checkpoint")
