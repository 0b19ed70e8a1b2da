"""How far inputs may move before a label may change: certified radii, beside interval bounds, CROWN and bounds for all inputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import bounds, margins, models
from thunder_norm import LipschitzMargin, certified_radii

METHOD = (
    "Nets for scikit-learn's digits, entries 0 to 1, trained by Adam for 200 steps (the second by LipschitzMargin, 300 steps); mean certified radius, "
    "Euclidean, of test images whose label is right, and the shares of them that are certified at some radii. Interval bounds (IBP: exact in the "
    "first layer) and CROWN (Zhang et al., NeurIPS 2018: backward linear bounds of each pair of logits, of each hidden layer too) are written "
    "by hand for chains of matrices, as auto_LiRPA 0.3 does not import with this torch. Found: gradient ascent changes the label."
)
PEER = "within a radius"
_HALVINGS = 10
_RADII = (0.1, 0.25, 0.5)
# Of the attack: how many radii, 5 % apart, and steps of ascent at each.
_RADII_TRIED, _STEPS = 109, 30


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    count = 3 if options.rounds < 10 else 30
    x, y, x_test, y_test = margins.digits()
    perceptron, deep = (bounds.trained(_perceptron(hidden), x, y) for hidden in (2, 4))
    safe = margins.trained("LipschitzMargin, composed", 20 if options.rounds < 10 else 300)
    convolutions = bounds.trained(_convolutions(), x.unflatten(1, (1, 8, 8)), y)
    transformer = bounds.trained(_Transformer(), x, y)
    rows = []
    for name, model, shape, images in (
        ("64-64-64-10", perceptron, (64,), count),
        ("64-64-64-10, LipschitzMargin", safe, (64,), count),
        ("64-64-64-64-64-10", deep, (64,), count),
        ("2 convolutions", convolutions, (1, 8, 8), max(count // 10, 1)),
        ("transformer block", transformer, (64,), max(count // 3, 1)),
    ):
        is_right = model(x_test.reshape(-1, *shape)).argmax(-1) == y_test
        given, target = x_test[is_right][:images].reshape(-1, *shape), y_test[is_right][:images]
        rows += _rows(name, model, given, target)
    return rows


def _rows(case: str, model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[dict[str, Any]]:
    candidates: dict[str, Callable[[], torch.Tensor]] = {
        PEER: lambda: certified_radii(model, x, target),
        "all inputs": lambda: LipschitzMargin(model, x, 0.0).radii(model(x), target).double(),
    }
    weights = [(m.weight, m.bias) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    if case.startswith("64-"):
        candidates["CROWN"] = lambda: _each(weights, x, target, crown)
        candidates["IBP"] = lambda: _each(weights, x, target, ibp)
    candidates["found"] = lambda: _attacked(model, x, target)
    rows = []
    for name, call in candidates.items():
        started = time.perf_counter()
        with torch.enable_grad():
            radii = call()
        seconds = (time.perf_counter() - started) / len(x)
        size = {
            "radius": radii.mean().item(),
            "certified": {str(r): (radii > r).double().mean().item() for r in _RADII},
            "images": len(x),
        }
        rows.append({"case": case, "candidate": name, "peer": PEER, "rounds": 1, "median_us": seconds * 1e6, **size})
    return [{**r, "minimum_us": r["median_us"], **_ratios(r, rows[0])} for r in rows]


def _ratios(row: dict[str, Any], peer: dict[str, Any]) -> dict[str, float]:
    return {"ratio": row["median_us"] / peer["median_us"], "ratio_of_minima": row["median_us"] / peer["median_us"]}


def _perceptron(hidden: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(hidden) for m in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))


def _convolutions() -> torch.nn.Module:
    torch.manual_seed(0)
    features = [torch.nn.Conv2d(1, 8, 3, padding=1, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3, padding=1, stride=2)]
    return torch.nn.Sequential(*features, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 10))


class _Transformer(torch.nn.Module):
    """Patches of 2 x 8, one block, the mean of the tokens."""

    def __init__(self, width: int = 16):
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.head = torch.nn.Linear(16, width), torch.nn.Linear(width, 10)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.patches(x.unflatten(-1, (4, 16)))
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v))
        return self.head(h.mean(-2))


Layers = list[tuple[torch.Tensor, torch.Tensor]]
Bounds = tuple[torch.Tensor, torch.Tensor]


def _each(weights: Layers, x: torch.Tensor, target: torch.Tensor, least: Callable[..., torch.Tensor]) -> torch.Tensor:
    return torch.tensor([_largest(lambda r, i=i: least(weights, x[i], r, int(target[i])), 1.0) for i in range(len(x))])


def _largest(least: Callable[[float], torch.Tensor], high: float) -> float:
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if (least(middle) > 0).all() else (low, middle)
    return low


def _differences(weights: Layers, target: int) -> Layers:
    """The last layer as that of the target's logit minus each other one."""
    w, b = weights[-1]
    others = [j for j in range(len(b)) if j != target]
    return [*weights[:-1], (w[target] - w[others], b[target] - b[others])]


@torch.no_grad()
def ibp(weights: Layers, x: torch.Tensor, radius: float, target: int) -> torch.Tensor:
    """Least differences of logits by intervals."""
    middle, half = x, None
    for i, (w, b) in enumerate(_differences(weights, target)):
        half = radius * w.norm(dim=1) if half is None else w.abs() @ half
        middle = w @ middle + b
        if i < len(weights) - 1:
            low, high = (middle - half).relu(), (middle + half).relu()
            middle, half = (low + high) / 2, (high - low) / 2
    assert half is not None
    return middle - half


@torch.no_grad()
def crown(weights: Layers, x: torch.Tensor, radius: float, target: int) -> torch.Tensor:
    """Least differences of logits by backward linear bounds, of hidden layers too."""
    layers, known = _differences(weights, target), []
    for i in range(len(layers)):
        w, b = layers[i]
        low = _backward(layers[:i], known, w, b, x, radius)
        if i == len(layers) - 1:
            return low
        known.append((low, -_backward(layers[:i], known, -w, -b, x, radius)))
    raise AssertionError


def _backward(
    layers: Layers, known: list[Bounds], a: torch.Tensor, c: torch.Tensor, x: torch.Tensor, radius: float
) -> torch.Tensor:
    """The least of ``a h + c``, h the hidden layer after `layers`."""
    for (w, b), (low, high) in zip(reversed(layers), reversed(known), strict=True):
        is_open = (low < 0) & (high > 0)
        steep = torch.where(is_open, high / (high - low).clamp_min(1e-12), (low >= 0).to(high))
        shallow = torch.where(is_open, (high > -low).to(high), steep)
        shift = torch.where(is_open, -steep * low, 0.0)
        c = c + a.clamp(max=0) @ shift
        a = a.clamp(min=0) * shallow + a.clamp(max=0) * steep
        c, a = c + a @ b, a @ w
    return a @ x + c - radius * a.norm(dim=1)


def _attacked(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The least of some radii at which gradient ascent finds another label: for each other class by itself, in ever shorter steps."""
    classes = model(x).shape[1]
    start, label = x.repeat_interleave(classes, 0), target.repeat_interleave(classes)
    other = torch.arange(classes).repeat(len(x))
    found = torch.full((len(x),), 2.0, dtype=torch.float64)
    for radius in torch.logspace(math.log10(2.0), -2, _RADII_TRIED).tolist():
        moved = start.clone()
        for i in range(_STEPS):
            moved.requires_grad_()
            z = model(moved)
            gaps = z.gather(1, other[:, None]) - z.gather(1, label[:, None])
            (g,) = torch.autograd.grad(gaps.sum(), moved)
            step = moved.detach() + radius / (3 + i / 4) * g / _length(g) - start
            moved = start + step * (radius / _length(step)).clamp_max(1.0)
        is_changed = (model(moved).argmax(1) != label).reshape(-1, classes).any(1)
        found[is_changed] = radius
    return found


def _length(t: torch.Tensor) -> torch.Tensor:
    return t.flatten(1).norm(dim=1).clamp_min(1e-12).reshape(-1, *[1] * (t.ndim - 1))
