"""DTensors of several processes: what each rank gets, forward and backward, is what eager mode gives it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks import run_ranks
from tests.seeds import LONG, seeded
from tests.subclass.drawn_dtensors import compare_drawn
from tests.subclass.dtensor_programs import compare_all, fully_sharded, jit, mlp, own, placed
from tests.subclasses import assert_same
from thunder_norm.errors import UnsupportedOpError
import thunder

_ALL = slice(None)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "turns"), [(2, _ALL if LONG else slice(0, None, 2)), (4, _ALL if LONG else slice(1, None, 2))])
def test_programs_on_several_ranks_are_eager_s(world: int, turns: slice):
    """On two or on four by turns; on both where nothing is left out."""
    for rank, found in enumerate(run_ranks(world, compare_all, turns)):
        assert len(found) > 5
        wrong = {name: outcome for name, outcome in found.items() if outcome != (1, 1)}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2,), (1, 2)])
def test_drawn_programs_are_eager_s(mesh: tuple[int, ...]):
    numbers = range(60) if LONG else range(12)
    for rank, found in enumerate(run_ranks(2, compare_drawn, numbers, mesh)):
        assert len(found) > len(numbers) / 2
        wrong = {number: outcome for number, outcome in found.items() if outcome != (1, 1)}
        assert not wrong, f"rank {rank}: {wrong}"


def test_redistributions_are_collectives_of_the_trace():
    assert all(run_ranks(2, _has_collectives))


def _has_collectives() -> bool:
    mesh = init_device_mesh("cpu", (2,))
    jf = jit(lambda x: x.redistribute(placements=[Replicate()]).to_local() * 2)
    jf(placed(mesh, Shard(0), 4, 6, requires_grad=False))
    return "all_gather_into_tensor" in str(thunder.last_traces(jf)[-1])


def test_what_is_not_traced_is_refused_on_every_rank():
    for messages in run_ranks(2, _refusals):
        for message, expected in zip(messages, ("distribute_tensor", "are not reduced", "gathered already"), strict=True):
            assert expected in message


def _refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    accumulating = fully_sharded(mlp(), mesh)
    accumulating.set_requires_gradient_sync(False)
    whole = fully_sharded(mlp(), mesh)
    whole.unshard()
    found = []
    for program, x in (
        (lambda a: distribute_tensor(a, mesh, [Shard(0)]) * 2, own(4, 4)),
        (accumulating, own(4, 6)),
        (whole, own(4, 6)),
    ):
        with pytest.raises(UnsupportedOpError) as refused:
            jit(program)(x)
        found.append(str(refused.value))
    return found


def test_a_fully_sharded_module_trains_as_in_eager_mode():
    for ours, eager in run_ranks(2, _trained):
        torch.testing.assert_close(ours, eager)


def _trained() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for is_ours in (True, False):
        torch.manual_seed(seeded(0))
        model = fully_sharded(mlp(), mesh, each=True)
        call = jit(model) if is_ours else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            torch.manual_seed(seeded(10 * step + dist.get_rank()))
            call(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if is_ours:
            assert thunder.cache_misses(call) == 1
        model.reshard()
        found.append([p.full_tensor().detach() for p in model.parameters() if isinstance(p, DTensor)])
    assert len(found[0]) == len(found[1]) == 4
    return found[0], found[1]


def test_how_gradients_are_reduced_is_asked_in_each_call():
    assert all(run_ranks(2, _asked_again))


def _asked_again() -> bool:
    model = fully_sharded(mlp(), init_device_mesh("cpu", (2,)))
    call, x = jit(model), own(4, 6)
    call(x)
    model.set_requires_gradient_sync(False)
    with pytest.raises(UnsupportedOpError, match="are not reduced"):
        call(x)
    model.set_requires_gradient_sync(True)
    call(x)
    return thunder.cache_hits(call) == 1


@pytest.fixture
def alone():
    """A mesh of this process, which is a group by itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_placements_are_compared_and_returned(alone: DeviceMesh):
    """They are objects of C++: which dimension one shards is no attribute that Python code reads."""

    def f(x, held):
        d = DTensor.from_local(x, alone, held["p"], run_check=False)
        asked = d.placements, d.placements[0].is_shard(), d.placements[0] == Shard(0), d.redistribute(placements=[Replicate()])
        return d * 2, asked, {held["p"][0]: held["p"]}

    jitted, x = jit(f), torch.randn(4, 6)
    for _ in range(2):
        for placement in (Shard(0), Shard(1), Replicate()):
            assert_same(jitted(x, {"p": [placement]}), f(x, {"p": [placement]}))
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (3, 3)
