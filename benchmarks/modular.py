"""The modular norm: dualize and steps of its optimizer against Muon, AdamW and Modula, and the time to derive its targets.

The parameters, gradients and buffers are those of GPT-2 from transformers.  Muon moves the matrices of the blocks, AdamW the rest, as
the documentation of Muon wants it.  Muon calculates in bfloat16, which few CPUs have instructions for: besides torch's own there is one
whose products are in float32.  "the products alone" are all matrix products that `dualize` calls, replayed on operands of the same
shapes and strides with nothing in between; "plain products alone" those of the five steps without savings.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import models, timing
from benchmarks.timing import Measured
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.modular.duality import OperatorBall

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def run(options: models.Options) -> list[dict[str, Any]]:
    found = []
    for shape in options.gpts:
        model = models.gpt2_of(shape)
        case = f"GPT-2, {shape.name}"
        found += _derivations(case, shape, options)
        found += _steps(case, model, options.rounds_of_steps if shape.width <= 256 else min(3, options.rounds_of_steps))
    if options.modula_python is not None:
        found += _modula(options)
    return found


# -- time to derive the targets ------------------------------------------------------------------------------------------------


def _derivations(case: str, shape: models.GPTShape, options: models.Options) -> list[dict[str, Any]]:
    def on(device: str) -> Callable[[], float]:
        model = models.gpt2_of(shape, device)
        tokens = torch.zeros(1, 64, dtype=torch.long, device=device)

        def first() -> float:
            started = time.perf_counter()
            ModularNorm(model, tokens, mode="modula", light=0.1)
            return time.perf_counter() - started

        return first

    makers = {"real": on("cpu"), "on the meta device": on("meta")}
    return timing.rows(f"{case}: targets derived", timing.once_in_turns(makers, options.first_calls), "real")


# -- steps ---------------------------------------------------------------------------------------------------------------------


def _steps(case: str, model: nn.Module, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn_like(p) / p.numel() ** 0.5
    norm = ModularNorm(model, torch.zeros(1, 64, dtype=torch.long), mode="modula", light=0.1)
    grads = {name: p.grad for name, p in model.named_parameters()}

    def dualize() -> None:
        norm.dualize(grads)

    muon, adamw_of_the_rest = _muon(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5)
    modular = ModularOptimizer(norm, lr=1e-5, momentum=0.95, nesterov=True, weight_decay=0.1)

    def muon_in_float32() -> None:
        with _muon_in_float32():
            muon.step()
        adamw_of_the_rest.step()

    candidates = {
        "ModularOptimizer.step": modular.step,
        "Muon in float32 + AdamW": muon_in_float32,
        "AdamW": adamw.step,
        "dualize": dualize,
        "the products of dualize alone": _replay(dualize),
        "plain products alone": _plain_products(norm, model),
    }
    measured = timing.in_turns(candidates, rounds, seconds=0, warm_up=1)
    rows = timing.rows(f"{case}: a step", measured, "Muon in float32 + AdamW")
    rows += [
        row | {"case": f"{case}: without a peer's arithmetic"}
        for row in timing.rows(
            "", _only(measured, "ModularOptimizer.step", "dualize", "plain products alone"), "plain products alone"
        )
    ]
    return rows + (_as_shipped(case, model) if max(p.shape[-1] for p in _matrices(model)) <= 1024 else [])


def _as_shipped(case: str, model: nn.Module) -> list[dict[str, Any]]:
    """One block, once: on a CPU without bfloat16 arithmetic that takes many seconds, and of width 768 minutes."""
    muon = torch.optim.Muon([p for name, p in model.named_parameters() if ".h.0." in name and p.ndim == 2], lr=1e-5)

    def in_float32() -> None:
        with _muon_in_float32():
            muon.step()

    measured = timing.in_turns({"Muon in float32": in_float32, "torch.optim.Muon": muon.step}, 2, seconds=0, warm_up=0)
    return timing.rows(f"{case}: Muon's arithmetic, one block", measured, "Muon in float32")


def _only(measured: Measured, *names: str) -> Measured:
    return Measured({name: measured.rounds[name] for name in names})


def _muon(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest: tables, head, biases and gains."""
    matrices = _matrices(model)
    is_matrix = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in is_matrix]
    return torch.optim.Muon(matrices, lr=1e-5), torch.optim.AdamW(rest, lr=1e-5)


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if ".h." in name and p.ndim == 2]


@contextlib.contextmanager
def _muon_in_float32() -> Iterator[None]:
    with mock.patch.object(torch.optim._muon, "_zeropower_via_newtonschulz", orthogonalize_as_muon):
        yield


def orthogonalize_as_muon(g: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """Muon's iteration, operation by operation, in the gradient's own dtype."""
    a, b, c = coefficients
    is_tall = g.size(0) > g.size(1)
    x = g.T if is_tall else g
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


# -- matrix products alone -----------------------------------------------------------------------------------------------------


class _Recorded(TorchDispatchMode):
    """The matrix products that are called, with the shapes and strides of their operands."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Any, list[tuple[tuple[int, ...], tuple[int, ...]]]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::").removesuffix("_") in _PRODUCTS:
            self.calls.append((func, [(tuple(a.shape), a.stride()) for a in args if isinstance(a, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


def _replay(call: Callable[[], Any]) -> Callable[[], Any]:
    """The products that `call` makes, without sums (`addmm` is `mm`), into memory that is there."""
    with _Recorded() as recorded:
        call()
    made: dict[Any, torch.Tensor] = {}

    def operand(i: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        if (i, shape, stride) not in made:
            made[i, shape, stride] = torch.empty_strided(shape, stride).normal_()
        return made[i, shape, stride]

    calls = []
    for _, operands in recorded.calls:
        a, b = (operand(i, *like) for i, like in enumerate(operands[-2:]))
        product = torch.mm if a.ndim == 2 else torch.bmm
        calls.append((product, a, b, operand(2, (*a.shape[:-1], b.shape[-1]), product(a, b).stride())))

    def replay() -> None:
        for product, a, b, out in calls:
            product(a, b, out=out)

    return replay


def _plain_products(norm: ModularNorm, model: nn.Module) -> Callable[[], Any]:
    """Three for each of five steps and each matrix: x x^T, its square, and that times x."""
    parts = []
    for name, p in model.named_parameters():
        if isinstance(norm.balls[name], OperatorBall) and norm.targets[name] > 0:
            m, n = sorted(p.shape)
            parts.append((torch.randn(m, n), torch.randn(m, m), torch.empty(m, m), torch.empty(m, n)))

    def products() -> None:
        for x, square, of_squares, of_x in parts:
            for _ in range(5):
                torch.mm(x, x.T, out=of_squares)
                torch.mm(square, square, out=of_squares)
                torch.mm(square, x, out=of_x)

    return products


# -- Modula --------------------------------------------------------------------------------------------------------------------

_SERVER = Path(__file__).parent / "modula_dualize.py"


def _modula(options: models.Options) -> list[dict[str, Any]]:
    """Both on one thread; Modula's process waits while the other is timed."""
    found = []
    for layers, width in options.modula_gpts:
        model = models.ModulaGPT(layers, width)
        norm = ModularNorm(model, torch.zeros(1, 32, dtype=torch.long), mode="modula", masses={"blocks": 5.0})
        grads = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        command = [str(options.modula_python), str(_SERVER), str(layers), str(width)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

            def ours(norm: ModularNorm = norm, grads: dict[str, torch.Tensor] = grads) -> float:
                started = time.perf_counter()
                norm.dualize(grads)
                return time.perf_counter() - started

            def theirs(server: subprocess.Popen = server) -> float:
                print(file=server.stdin, flush=True)
                answer = server.stdout.readline()
                if not answer:
                    raise RuntimeError(
                        f"{options.modula_python} cannot run {_SERVER.name}: it needs jax and modula, see its docstring"
                    )
                return float(answer)

            makers = {"dualize": ours, "Modula's dualize, jitted": theirs}
            for warm_up in makers.values():
                warm_up()
            measured = timing.once_in_turns(makers, options.rounds)
            server.stdin.close()
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        case = f"Modula's GPT of {layers} blocks, width {width}, {millions:.1f}M parameters"
        found += timing.rows(case, measured, "Modula's dualize, jitted")
    return found
