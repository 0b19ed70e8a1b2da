"""Programs on DTensors and sharded modules, each run by all ranks and compared with eager mode there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_leaves

from tests.seeds import seeded
from thunder_norm.transforms import SubclassTransform
import thunder

# A function, or None where the first argument is the module; and what makes its arguments, the same in every call.
Program = tuple[Callable | None, Callable[[], tuple]]
PLACEMENTS = {"Shard(0)": Shard(0), "Shard(1)": Shard(1), "Replicate": Replicate()}


def placed(mesh: DeviceMesh, placement: Any, *shape: int, requires_grad: bool = True) -> DTensor:
    return distribute_tensor(torch.randn(shape), mesh, [placement]).detach().requires_grad_(requires_grad)


def own(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    """Of each rank another."""
    return torch.randn(shape).add_(dist.get_rank()).requires_grad_(requires_grad)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


def with_parameters(model: nn.Module, mesh: DeviceMesh, placement: Any) -> nn.Module:
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [placement])))
    return model


def fully_sharded(model: nn.Sequential, mesh: DeviceMesh, *, each: bool = False, **options: Any) -> nn.Module:
    for module in (model[0], model[2]) if each else ():
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def programs(mesh: DeviceMesh) -> dict[str, Program]:
    return dict([*_products(mesh), *_redistributions(mesh), *_operations(mesh), *_made(mesh), *_modules(mesh)])


def _products(mesh: DeviceMesh) -> Iterator[tuple[str, Program]]:
    for a, first in PLACEMENTS.items():
        for b, second in PLACEMENTS.items():
            args = lambda p=first, q=second: (placed(mesh, p, 4, 6), placed(mesh, q, 6, 8))  # noqa: E731
            yield f"{a} @ {b}", (lambda x, y: (x @ y).relu() * 2, args)
        args = lambda p=first: (placed(mesh, Replicate(), 5, 6), placed(mesh, p, 8, 6), placed(mesh, Replicate(), 8))  # noqa: E731
        yield f"linear with a weight of {a}", (F.linear, args)


def _redistributions(mesh: DeviceMesh) -> Iterator[tuple[str, Program]]:
    for a, first in PLACEMENTS.items():
        for b, second in PLACEMENTS.items():
            program = lambda x, q=second: (x * 2).redistribute(placements=[q]) + 1  # noqa: E731
            yield f"{a} to {b}", (program, lambda p=first: (placed(mesh, p, 5, 6),))
        yield f"full_tensor of {a}", (lambda x: (x * 2).full_tensor() + 1, lambda p=first: (placed(mesh, p, 5, 3),))
        yield f"to_local of {a}", (lambda x: (x * 2).to_local() + 1, lambda p=first: (placed(mesh, p, 5, 3),))


def _operations(mesh: DeviceMesh) -> Iterator[tuple[str, Program]]:
    x = lambda: (placed(mesh, Shard(0), 4, 6),)  # noqa: E731
    yield "sum", (lambda x: x.sum(), x)
    yield "a sum over ranks", (lambda x: x.sum().full_tensor(), x)
    yield "softmax over ranks", (lambda x: x.softmax(0), x)
    yield "layer_norm", (lambda x: F.layer_norm(x, (6,)), x)
    yield "in-place on an input", (lambda x: x.mul_(2) + 1, lambda: (placed(mesh, Shard(0), 4, 6, requires_grad=False),))
    targets = lambda: distribute_tensor(torch.arange(4), mesh, [Shard(0)])  # noqa: E731
    yield "cross entropy", (F.cross_entropy, lambda: (*x(), targets()))


def _made(mesh: DeviceMesh) -> Iterator[tuple[str, Program]]:
    def made(placement: Any, to: Any) -> Callable:
        return lambda a: (DTensor.from_local(a, mesh, [placement]).redistribute(placements=[to]) * 2).to_local()

    for requires_grad in (False, True):
        args = lambda r=requires_grad: (own(4, 4, requires_grad=r),)  # noqa: E731
        with_or_without = "with" if requires_grad else "without"
        yield f"from_local, gathered, {with_or_without} gradient", (made(Shard(0), Replicate()), args)
        yield f"from_local, reduced, {with_or_without} gradient", (made(Partial(), Replicate()), args)
        yield f"from_local, scattered, {with_or_without} gradient", (made(Partial(), Shard(0)), args)
        yield f"from_local, returned, {with_or_without} gradient", (lambda a: DTensor.from_local(a * 2, mesh, [Shard(0)]), args)


def _modules(mesh: DeviceMesh) -> Iterator[tuple[str, Program]]:
    for name, placement in PLACEMENTS.items():
        build = lambda p=placement: (with_parameters(mlp(), mesh, p), placed(mesh, Shard(0), 4, 6))  # noqa: E731
        if name != "Shard(1)":  # a bias has one dimension
            yield f"an MLP with parameters of {name}", (None, build)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    yield "a tensor-parallel MLP", (None, lambda: (parallelize_module(mlp(), mesh, plan), torch.randn(4, 6)))
    table = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(output_layouts=Replicate())}
    embedding = lambda: nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 4))  # noqa: E731
    yield (
        "a tensor-parallel embedding",
        (None, lambda: (parallelize_module(embedding(), mesh, table), torch.arange(8).view(2, 4))),
    )
    yield "fully_shard", (None, lambda: (fully_sharded(mlp(), mesh), own(4, 6)))
    yield "fully_shard of each layer", (None, lambda: (fully_sharded(mlp(), mesh, each=True), own(4, 6, requires_grad=True)))
    policies = {
        "of parameters and reductions": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "of parameters, inputs and outputs": MixedPrecisionPolicy(torch.float64, output_dtype=torch.float32),
        "of parameters alone": MixedPrecisionPolicy(torch.float64, cast_forward_inputs=False),
    }
    for name, policy in policies.items():
        dtype = None if policy.cast_forward_inputs else policy.param_dtype
        half = lambda p=policy, d=dtype: (fully_sharded(mlp(), mesh, each=True, mp_policy=p), own(4, 6).to(d))  # noqa: E731
        yield f"fully_shard with dtypes {name}", (None, half)
    hybrid = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("copies", "shards"))
    yield "fully_shard on two dimensions", (None, lambda: (fully_sharded(mlp(), hybrid, each=True), own(4, 6)))


def jit(f: Callable) -> Callable:
    return thunder.jit(f, transforms=[SubclassTransform()])


def _called(program: Program, function: Callable | None) -> tuple[Callable, tuple, list[torch.Tensor]]:
    """The function, its arguments, and all that gets a gradient; a module is made once."""
    torch.manual_seed(seeded(0))
    given, make = program
    made = make()
    f, args = (given, made) if given is not None else (function or made[0], made[1:])
    parameters = list(f.parameters()) if isinstance(f, nn.Module) else []
    return f, args, [t for t in (*parameters, *tree_leaves(args)) if isinstance(t, torch.Tensor) and t.requires_grad]


def _with_gradients(call: Callable, args: tuple, leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    for t in leaves:
        t.grad = None
    result = call(*args)
    if result.requires_grad:
        result.backward(torch.ones_like(result))
    return [result.detach(), *(t.grad for t in leaves), *args]


def compare(program: Program) -> tuple[int, int]:
    """Two calls, the second from the cache: results, gradients and what became of the arguments are eager's."""
    eager, ours = _called(program, None)[0], _called(program, None)[0]
    jitted = jit(ours)
    for _ in range(2):
        f, args, leaves = _called(program, eager)
        want = _with_gradients(f, args, leaves)
        _, args, leaves = _called(program, ours)
        got = _with_gradients(jitted, args, leaves)
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_same_shards(g, w)
    return thunder.cache_misses(jitted), thunder.cache_hits(jitted)


def assert_same_shards(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    assert (got is None) == (want is None) and isinstance(got, DTensor) == isinstance(want, DTensor)
    if isinstance(want, DTensor):
        assert (got.placements, got.shape, got.stride()) == (want.placements, want.shape, want.stride())
        got, want = got.to_local(), want.to_local()
    if want is not None:
        torch.testing.assert_close(got + 0, want + 0)  # which waits for what eager mode has still under way


def outcome(program: Program) -> tuple[int, int] | str:
    """What `compare` says, or what went wrong."""
    try:
        return compare(program)
    except Exception as e:  # noqa: BLE001 - all programs are told of at once; every rank meets the same
        return f"{type(e).__name__}: {e}"


def runs(program: Program) -> bool:
    """Whether eager mode runs a program, forward and backward."""
    f, args, leaves = _called(program, None)
    try:
        _with_gradients(f, args, leaves)
    except Exception:  # noqa: BLE001 - torch's errors are of many kinds
        return False
    return True


def compare_all(turns: slice) -> dict[str, Any]:
    """Of each of these programs how often it was traced and served from the cache, or what went wrong."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: outcome(program) for name, program in list(programs(mesh).items())[turns]}
