"""Training for certified radii: `LipschitzMargin` by composed bounds and by the product of norms, beside plain training and spectral norms."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import models
from thunder_norm import LipschitzMargin

METHOD = (
    "scikit-learn's digits, entries 0 to 1, a third of them for testing; ReLU nets 64-64-64-10; 300 steps of Adam on all training images at "
    "a rate of 0.003. Certified: the share of test images whose label is right and cannot change within a Euclidean distance, by composed "
    "constants of each pair of classes, whatever the net was trained with."
)
PEER = "cross entropy"
RADII = (0.25, 0.5, 1.0)
TRAINED = 0.5


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    steps = 20 if options.rounds < 10 else 300
    names = (PEER, "cross entropy, spectral norms", "LipschitzMargin, composed", "LipschitzMargin, product")
    rows = [_row(name, steps) for name in names]
    base = rows[0]["median_us"]
    return [{**row, "ratio": row["median_us"] / base, "ratio_of_minima": row["median_us"] / base} for row in rows]


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train with, and to test with."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    x, x_test, y, y_test = train_test_split(digits.data / 16, digits.target, test_size=1 / 3, random_state=0)
    return torch.from_numpy(x).float(), torch.from_numpy(y), torch.from_numpy(x_test).float(), torch.from_numpy(y_test)


def trained(name: str, steps: int) -> torch.nn.Module:
    """A net trained in one of the ways, in eval mode."""
    return _trained(name, steps)[0]


def _trained(name: str, steps: int) -> tuple[torch.nn.Module, float]:
    """The net, and the seconds of a step."""
    torch.manual_seed(0)
    x, y, _, _ = digits()
    layers = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 10)]
    if "spectral" in name:
        layers = [torch.nn.utils.parametrizations.spectral_norm(layer) for layer in layers]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss: Any = F.cross_entropy
    if "Margin" in name:
        loss = LipschitzMargin(model, x, TRAINED, sensitivity="composed" if "composed" in name else "global")
    started = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    seconds = (time.perf_counter() - started) / steps
    model.eval()
    plain = [_linear(m) if isinstance(m, torch.nn.Linear) else m for m in model.children()]  # with the weights as they are now
    return torch.nn.Sequential(*plain).requires_grad_(False), seconds


def _row(name: str, steps: int) -> dict[str, Any]:
    model, seconds = _trained(name, steps)
    x, _, x_test, y_test = digits()
    radii = LipschitzMargin(model, x, 0.0).radii(model(x_test), y_test)
    return {
        "case": "digits, 64-64-64-10", "candidate": name, "peer": PEER, "rounds": 1, "median_us": seconds * 1e6,
        "minimum_us": seconds * 1e6, "clean": (radii > 0).float().mean().item(),
        "certified": {str(r): (radii > r).float().mean().item() for r in RADII},
    }  # fmt: skip


def _linear(layer: torch.nn.Linear) -> torch.nn.Linear:
    found = torch.nn.Linear(layer.in_features, layer.out_features)
    with torch.no_grad():
        found.weight.copy_(layer.weight)
        found.bias.copy_(layer.bias)
    return found
