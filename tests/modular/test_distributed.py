"""ModularOptimizer and ModularNorm over several processes, against one process with the same gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.distributed_models import (
    OPTIONS,
    TOKENS,
    Net,
    assert_same,
    everywhere,
    fit,
    give,
    gradients,
    layouts,
    net,
    sharded,
    train,
    values,
)
from tests.ranks import run_ranks
from thunder_norm.core.kinds import RMSToRMSTensor
from thunder_norm.errors import GradientError, NormMismatchError
from thunder_norm.model_state.shards import local, whole
from thunder_norm.modular import ModularNorm, ModularOptimizer, duality
from thunder_norm.modular.distributed import _parts, _with_owners

pytestmark = pytest.mark.slow  # ranks are forks of a server that imports torch first


def alone(steps: range = range(3), **options) -> dict[str, torch.Tensor]:
    """Parameters after some steps in one process."""
    model = net()
    return train(model, ModularOptimizer(model, TOKENS, **{**OPTIONS, **options}), steps)


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


# -- steps -----------------------------------------------------------------------------------------------------------------


def averages(model: nn.Module, optimizer: ModularOptimizer) -> dict[str, torch.Tensor]:
    """Of squares of gradients, those of noise adaptation."""
    states = {name: optimizer.state[p] for name, p in model.named_parameters()}
    return {name: whole(state["square_average"]) for name, state in states.items() if "square_average" in state}


def check_layouts(wanted: dict[str, torch.Tensor], wanted_averages: dict[str, torch.Tensor], count: list) -> None:
    for what, (mesh, *placements) in layouts(dist.get_world_size()).items():
        model = sharded(net(), mesh, *placements)
        with counted() as seen:
            optimizer = ModularOptimizer(model, TOKENS, **OPTIONS)
            found = train(model, optimizer, range(2))
        assert_same(found, wanted, 1e-6)
        assert_same(averages(model, optimizer), wanted_averages, 1e-6)
        assert sorted(shape for shapes in everywhere(seen) for shape in shapes) == count, what


@pytest.mark.parametrize("world", [2, 4])
def test_steps_of_dtensors_are_those_of_one_process_and_orthogonalize_each_matrix_once(world):
    model = net()
    optimizer = ModularOptimizer(model, TOKENS, **OPTIONS)
    with counted() as seen:
        wanted = train(model, optimizer, range(2))
    assert len(seen) == 2 * (2 * 3 + 3 + 4)  # steps, of groups and taps, heads, and other matrices
    run_ranks(world, check_layouts, wanted, averages(model, optimizer), sorted(seen))


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
    assert _parts("", torch.empty(40, 20), [((0, 40), (0, 20))], ball)[0].cost == 2 * 20 * 20 * 20 * 15 * 2


# -- training --------------------------------------------------------------------------------------------------------------


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


# -- errors ----------------------------------------------------------------------------------------------------------------


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
    with pytest.raises(GradientError, match="was made before fully_shard"):
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
