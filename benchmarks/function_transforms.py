"""Transforms of functions: ours with Thunder's own executors, with `executors.inductor` and with Thunder's executor of torch.compile, and
torch.func in eager and under torch.compile.

Per-sample gradients of an MLP and of a small transformer, Jacobians of the MLP by both modes, Hessian-vector products of both models, a
Hessian, each by the same function of the library's transforms; over batch sizes, in float32, without autograd.  Results are checked equal
before anything is timed.  Whatever compiles gets each batch size anew (static shapes) and an empty cache: that takes most of the time of
the suite.  Thunder's executor of torch.compile gets one batch size of each function.  Without a C++ compiler torch.compile's backend is
aot_eager, and the candidate's name says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks import models, timing
from thunder_norm import executors, transforms
import thunder

EAGER = "torch.func"
BACKEND = "inductor" if shutil.which(os.environ.get("CXX", "g++")) else "aot_eager"
OURS, FUSED = "thunder_norm", "thunder_norm, executors.inductor"
THUNDERS = f"thunder_norm, torch.compile({BACKEND}) executor"
COMPILED = f"torch.compile({BACKEND}) of torch.func"


class Block(nn.Module):
    """Attention and an MLP, each after a layer norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, width = x.shape
        q, k, v = (t.view(length, self.heads, -1).transpose(0, 1) for t in self.qkv(self.before_attention(x)).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        attended = torch.softmax(scores, -1) @ v
        x = x + self.projection(attended.transpose(0, 1).reshape(length, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Transformer(nn.Module):
    """A block of width 32 with 2 heads; from 16 positions to one of 10 classes."""

    def __init__(self, width: int = 32, heads: int = 2, blocks: int = 1):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(x)).mean(0))


def mlp() -> nn.Module:
    """Three layers, from 32 numbers to one of 10 classes."""
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Case:
    """What is measured: a function made of a library's transforms, and its arguments for a batch size."""

    name: str
    make: Callable[[Any], Callable]  # takes torch.func or thunder_norm.transforms
    arguments: Callable[[int], tuple]
    batch_sizes: tuple[int, ...]
    thunders_sizes: tuple[int, ...]  # of those, for which Thunder's executor of torch.compile is measured too
    is_jitted: bool = False  # a function that calls transforms, where others are made by them: ours is to be compiled by name

    def candidates(self, batch_size: int) -> dict[str, Callable[[], Any]]:
        """A call of each candidate; ours and torch.compile's are new ones."""
        arguments = self.arguments(batch_size)
        eager, ours = self.make(torch.func), self.make(transforms)
        if self.is_jitted:
            ours = thunder.jit(ours, transforms=[transforms.SubclassTransform()])
        functions = {EAGER: eager, OURS: ours}
        torch._dynamo.reset()
        if BACKEND == "inductor":
            functions[FUSED] = thunder.jit(self.make(transforms), executors=[executors.inductor])
            if batch_size in self.thunders_sizes:
                functions[THUNDERS] = thunder.jit(self.make(transforms), executors=["torchcompile"])
        functions[COMPILED] = torch.compile(eager, backend=BACKEND, fullgraph=True, dynamic=False)
        return {name: lambda f=f: f(*arguments) for name, f in functions.items()}


def _per_sample(
    name: str, model: nn.Module, shape: tuple[int, ...], batch_sizes: tuple[int, ...], thunders_sizes: tuple[int, ...]
) -> Case:
    parameters, loss = loss_of(model)

    def arguments(batch_size: int) -> tuple:
        return (parameters, *samples(batch_size, shape))

    def make(library: Any) -> Callable:
        return library.vmap(library.grad(loss), in_dims=(None, 0, 0))

    return Case(f"per-sample gradients, {name}", make, arguments, batch_sizes, thunders_sizes)


def _jacobian(which: str, batch_sizes: tuple[int, ...]) -> Case:
    model = mlp()
    parameters = _parameters(model)

    def output(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,))

    def make(library: Any) -> Callable:
        return library.vmap(getattr(library, which)(output, argnums=1), in_dims=(None, 0))

    return Case(f"{which}, MLP", make, lambda n: (parameters, samples(n, (32,))[0]), batch_sizes, batch_sizes)


def _hessian_vector(name: str, model: nn.Module, shape: tuple[int, ...], batch_sizes: tuple[int, ...]) -> Case:
    parameters, loss = loss_of(model)
    direction = tree_map(torch.randn_like, parameters)

    def make(library: Any) -> Callable:
        losses = library.vmap(loss, in_dims=(None, 0, 0))

        def hessian_vector(parameters: Any, direction: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            gradient = library.grad(lambda p: losses(p, x, y).mean())
            return library.jvp(gradient, (parameters,), (direction,))[1]

        return hessian_vector

    def arguments(batch_size: int) -> tuple:
        return (parameters, direction, *samples(batch_size, shape))

    return Case(f"Hessian-vector product, {name}", make, arguments, batch_sizes, batch_sizes, is_jitted=True)


def _hessian() -> Case:
    def energy(x: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(x, 0) + (x[1:] - x[:-1] ** 2).square().sum()

    return Case(
        "hessian of a function of 16 numbers", lambda library: library.hessian(energy), lambda n: (torch.randn(16),), (1,), (1,)
    )


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def loss_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], Callable]:
    """A model's parameters, and the loss of one sample as a function of them."""

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    return _parameters(model), loss


def samples(batch_size: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random samples of this shape, and their classes."""
    return torch.randn(batch_size, *shape), torch.randint(10, (batch_size,))


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    sizes = options.sample_batches
    one = sizes[len(sizes) // 2 :][:1]
    torch.manual_seed(0)
    cases = [
        _per_sample("MLP", mlp(), (32,), sizes, one),
        _per_sample("transformer", Transformer(), (16, 32), sizes, one),
        _jacobian("jacrev", one),
        _jacobian("jacfwd", one),
        _hessian_vector("MLP", mlp(), (32,), one),
        _hessian_vector("transformer", Transformer(), (16, 32), one),
        _hessian(),
    ]
    return [row for case in cases for size in case.batch_sizes for row in _measured(case, size, options.rounds)]


def _measured(case: Case, batch_size: int, rounds: int) -> list[dict[str, Any]]:
    """The first calls of a case and its calls, for one batch size."""
    with torch.no_grad(), _empty_caches():
        candidates = case.candidates(batch_size)
        first: dict[str, list[float]] = {}
        results = {}
        for name, call in candidates.items():
            started = time.perf_counter()
            results[name] = call()
            first[name] = [time.perf_counter() - started]
        check_equal(results)
        calls = timing.in_turns(candidates, rounds)
    what = f"{case.name}, batch {batch_size}" if len(case.batch_sizes) > 1 or batch_size > 1 else case.name
    return [*timing.rows(f"{what}: first call", timing.Measured(first), EAGER), *timing.rows(f"{what}: call", calls, EAGER)]


@contextlib.contextmanager
def _empty_caches() -> Iterator[None]:
    """torch.compile finds nothing that an earlier process has left on the disk."""
    saved = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
            if saved is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = saved


def check_equal(results: dict[str, Any]) -> None:
    """All candidates return the same tensors.

    Raises:
        AssertionError: they do not.
    """
    for found in results.values():
        torch.testing.assert_close(tree_leaves(found), tree_leaves(results[EAGER]), rtol=1e-4, atol=1e-5)
