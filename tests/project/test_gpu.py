"""On a CUDA device: executors claim the operations of real mode, norms are fused, results are those of the CPU.

With nvFuser the regions are its own; without it those of Thunder's torch.compile executor, which is then asked for.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm import RMSTensor, build_norm_map
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder
from thunder.executors.nvfuserex import nvfuser_version

pytestmark = pytest.mark.gpu

HAS_NVFUSER = nvfuser_version() is not None
EXECUTORS: Any = None if HAS_NVFUSER else ["torchcompile", "sdpa"]
REGION = "nvFusion" if HAS_NVFUSER else "TorchCompile"
DEVICE = "cuda"


class Block(nn.Module):
    """What the README's main example is: a normalization, two linears, a residual."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + 0.5 * self.down(nn.functional.gelu(self.up(self.norm(x))))


def regions(jitted: Any) -> list[Any]:
    """The fused regions of the program that runs."""
    return [b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name.startswith(REGION)]


def operations(bound_symbol: Any) -> list[str]:
    inner = [name for s in bound_symbol.subsymbols for name in operations(s)]
    return [bound_symbol.sym.name, *inner]


@pytest.fixture
def block() -> tuple[nn.Module, torch.Tensor]:
    return Block().to(DEVICE), torch.randn(8, 64, device=DEVICE)


def test_operations_of_real_mode_are_claimed_as_without_the_transform(block):
    model, x = block
    ours = thunder.jit(model, transforms=[NormTransform()], executors=EXECUTORS)
    plain = thunder.jit(model, executors=EXECUTORS)
    torch.testing.assert_close(ours(x), plain(x))
    torch.testing.assert_close(ours(x).cpu(), copy.deepcopy(model).cpu()(x.cpu()), rtol=1e-4, atol=1e-4)
    assert regions(ours)
    assert [operations(r) for r in regions(ours)] == [operations(r) for r in regions(plain)]


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_norm_arithmetic_is_where_its_sizes_are(block, device):
    """On the GPU it is inside fusions; on the CPU it is Python's, and no region of nvFuser's returns a number of it."""
    model, x = block
    size = torch.tensor(2.0, dtype=torch.float64, device=device)
    jm = thunder.jit(model, transforms=[NormTransform(parameters="unit")], executors=EXECUTORS)
    y = jm(RMSTensor(size, backing=x))
    on_cpu = thunder.jit(copy.deepcopy(model).cpu(), transforms=[NormTransform(parameters="unit")])(
        RMSTensor(2.0, backing=x.cpu())
    )
    assert y.norm_size.item() == pytest.approx(on_cpu.norm_size.item(), rel=1e-12) and y.norm_size.device.type == device
    torch.testing.assert_close(y.backing.cpu(), on_cpu.backing, rtol=1e-4, atol=1e-4)
    for b in thunder.last_traces(jm)[-1].bound_symbols:
        on = {str(p.device) for p in b.flat_proxy_outs if _is_norm(p)}
        if on and b.flat_proxy_args and HAS_NVFUSER:  # of torch.compile's regions some results may be on the CPU
            assert on == {"cpu"} if b.sym.name.startswith("NormFusion") else b.sym.name.startswith(REGION) and "cpu" not in on


def _is_norm(p: Any) -> bool:
    return getattr(p, "ndim", None) == 0 and getattr(p, "dtype", None) == thunder.dtypes.float64


@pytest.mark.parametrize("depth", [4, 32])
def test_a_norm_map_launches_few_kernels_whatever_its_depth(depth):
    model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.ReLU()))).to(DEVICE)
    norm_map = build_norm_map(model, torch.randn(2, 16, device=DEVICE), parameters="unit")
    size = RMSTensor(torch.tensor(2.0, dtype=torch.float64, device=DEVICE))
    norm_map(size)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        norm_map(size)
        torch.cuda.synchronize()
    kernels = sum(e.count for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA)
    assert kernels <= 10, profile.key_averages().table()


def test_wrappers_agree_with_eager_dispatch():
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).to(DEVICE)
    x = TwoTensor(torch.randn(4, 32, device=DEVICE), torch.randn(4, 32, device=DEVICE))
    jm = thunder.jit(model, transforms=[SubclassTransform()], executors=EXECUTORS)
    found, expected = jm(x), model(x)
    torch.testing.assert_close((found.a, found.b), (expected.a, expected.b))
    assert regions(jm)


def test_cuda_graphs_compose_with_our_transforms(block):
    from thunder.transforms.cudagraph import CUDAGraphTransform

    model, x = block
    model = model.requires_grad_(False)
    plain = thunder.jit(model, transforms=[NormTransform(parameters="unit")], executors=EXECUTORS)
    jm = thunder.jit(model, transforms=[NormTransform(parameters="unit"), CUDAGraphTransform()], executors=EXECUTORS)
    for size, backing in ((2.0, x), (2.0, x), (3.0, x.flip(0)), (5.0, x)):  # warm-up, capture, replays
        y, expected = jm(RMSTensor(size, backing=backing)), plain(RMSTensor(size, backing=backing))
        torch.testing.assert_close(y.backing, expected.backing)
        assert y.norm_size.item() == pytest.approx(expected.norm_size.item(), rel=1e-12)


def test_an_optimizer_step_is_that_of_the_cpu(block):
    model, x = block
    on_cpu = copy.deepcopy(model).cpu()
    for m, inputs in ((model, x), (on_cpu, x.cpu())):
        optimizer = ModularOptimizer(ModularNorm(m, inputs, light=0.1, mode="modula"), lr=0.1, method="svd")
        m(inputs).square().mean().backward()
        optimizer.step()
    for (name, p), q in zip(model.named_parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
