"""How far outputs move when inputs do: composed bounds against the product of norms, ECLipsE-Fast and the largest Jacobian found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F

from benchmarks import models, timing
from thunder_norm import RMSTensor, norm_sensitivity, sensitivities, with_perturbation

METHOD = (
    "All from Euclidean length to Euclidean length, in double precision. Random networks are those of ECLipsE's tables, by its recipe: normal "
    "matrices whose norms are drawn from [0.4, 1.8] (numpy's generator, seeded with 7 width + 13 layers), relu, input 4 and output 1. "
    "Nets for scikit-learn's digits are trained by Adam for 200 steps on all of them. The recurrent nets are torch's at their start, over "
    "sequences of 8 steps of 8 numbers. No search: `search_steps=0`. Found: the largest Jacobian at 256 points, normal ones or digits."
)
PEER, QUICK = "ECLipsE-Fast", "composed, no search"
_SAMPLES = 256


@dataclass(frozen=True)
class Case:
    """A network, samples of its input [samples, ...], and its matrices if it is a chain of them with relu between."""

    name: str
    model: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    chain: list[torch.Tensor] | None = None


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    depths = (2, 5) if options.rounds < 10 else (2, 5, 20, 100)
    cases = [
        *(_random(80, layers) for layers in depths),
        _residual(),
        _digits(64, 64, 10),
        _digits(64, 64, 64, 10),
        _digits(64, *[64] * 6, 10),
        _convolutions(),
        _recurrent("RNN", lambda: torch.nn.RNN(8, 16, batch_first=True)),
        _recurrent("RNN of 2 layers, both directions", lambda: torch.nn.RNN(8, 16, 2, batch_first=True, bidirectional=True)),
        _recurrent("GRU", lambda: torch.nn.GRU(8, 16, batch_first=True)),
        _recurrent("LSTM", lambda: torch.nn.LSTM(8, 16, batch_first=True)),
    ]
    return [row for case in cases for row in _rows(case)]


def _rows(case: Case) -> list[dict[str, Any]]:
    candidates: dict[str, Callable[[], float]] = {
        "composed": lambda: bound(case, "composed"),
        "product": lambda: bound(case, "global"),
    }
    chain = case.chain
    if chain is not None:
        candidates[PEER] = lambda: eclipse_fast(chain)
        candidates[QUICK] = lambda: bound(case, "composed", 0)
    measured = timing.in_turns(candidates, 3, seconds=0, warm_up=1)
    rows = timing.rows(case.name, measured, PEER if chain is not None else "product")
    return [{**row, "bound": candidates[row["candidate"]](), "found": found(case)} for row in rows]


def bound(case: Case, sensitivity: Any, search_steps: int | None = None) -> float:
    """What is claimed of any two inputs."""
    x = with_perturbation(RMSTensor.of(case.x[:2], tuple(range(1 - case.x.ndim, 0))))
    with norm_sensitivity(sensitivity, search_steps=search_steps):
        y = case.model(x)
    return sensitivities(y, x).item() * math.sqrt(y[0].numel() / case.x[0].numel())


def eclipse_fast(weights: list[torch.Tensor]) -> float:
    """``M_i = L I - L^2/4 W M_(i-1)^-1 W^T`` with ``L = 2 / lambda_max(W M_(i-1)^-1 W^T)``."""
    q = weights[0] @ weights[0].T
    for w in weights[1:]:
        factor = 2 / torch.linalg.eigvalsh(q)[-1]
        q = w @ torch.linalg.inv(factor * torch.eye(len(q), dtype=q.dtype) - factor**2 / 4 * q) @ w.T
    return torch.linalg.eigvalsh(q)[-1].sqrt().item()


def found(case: Case) -> float:
    """The largest Jacobian norm over the samples."""
    jacobian = torch.func.jacrev(lambda x: case.model(x[None])[0])
    return max(torch.linalg.matrix_norm(jacobian(x).flatten(1), 2).item() for x in case.x)


def _random(width: int, layers: int) -> Case:
    numbers = numpy.random.RandomState(7 * width + 13 * layers)
    sizes, weights = [4, *[width] * (layers - 1), 1], []
    for a, b in zip(sizes, sizes[1:], strict=False):
        norm, w = numbers.uniform(0.4, 1.8), numbers.randn(b, a)
        weights.append(torch.from_numpy(norm * w / numpy.linalg.norm(w, 2)))
    return Case(f"random, {layers} x {width}", _perceptron(weights), torch.from_numpy(numbers.randn(_SAMPLES, 4)), weights)


def _perceptron(weights: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        for w in weights[:-1]:
            x = F.relu(F.linear(x, w))
        return F.linear(x, weights[-1])

    return forward


def _residual(width: int = 32, blocks: int = 8) -> Case:
    numbers = numpy.random.default_rng(7 * width + 13 * blocks)
    pairs = [
        [torch.from_numpy(numbers.standard_normal((width, width)) / math.sqrt(width)) for _ in range(2)] for _ in range(blocks)
    ]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for a, b in pairs:
            x = x + F.linear(F.relu(F.linear(x, a)), b) / 2
        return x

    return Case(
        f"residual, {blocks} blocks of width {width}", forward, torch.from_numpy(numbers.standard_normal((_SAMPLES, width)))
    )


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.from_numpy(digits.images / 16.0), torch.from_numpy(digits.target)


def trained(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.nn.Module:
    """The model after 200 steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def _digits(*sizes: int) -> Case:
    torch.manual_seed(0)
    images, y = _data()
    x = images.flatten(1)
    layers: list[torch.nn.Module] = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [torch.nn.Linear(a, b).double(), torch.nn.ReLU()]
    model = trained(torch.nn.Sequential(*layers[:-1]), x, y)
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return Case(f"digits, {'-'.join(map(str, sizes))}", model, x[:_SAMPLES], weights)


def _convolutions() -> Case:
    torch.manual_seed(0)
    images, y = _data()
    x = images[:, None]
    features = [torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.AvgPool2d(2), torch.nn.Conv2d(8, 16, 3, padding=1)]
    model = torch.nn.Sequential(
        *features, torch.nn.ReLU(), torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(64, 10)
    ).double()
    return Case("digits, 2 convolutions", trained(model, x, y), x[:_SAMPLES])


def _recurrent(name: str, make: Callable[[], torch.nn.RNNBase]) -> Case:
    torch.manual_seed(0)
    layer = make().double().requires_grad_(False)
    head = torch.nn.Linear(layer.hidden_size * (1 + layer.bidirectional), 1).double().requires_grad_(False)
    x = torch.randn(_SAMPLES, 8, 8, dtype=torch.float64)
    return Case(name, lambda x: head(layer(x)[0][:, -1]), x)
