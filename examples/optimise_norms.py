"""Optimise the norms of weights and the scale factors of a residual network by gradient descent, without data or weights.

    python examples/optimise_norms.py [--depth 6] [--width 512] [--steps 8] [--plot norms.png]

A step of norm t_k = m_k / (M S_k) for each parameter k moves the output by at most 1 (the modular norm).  Here every parameter's own norm
n_k is made proportional to t_k, so that one relative step size suits all of them, and the output's norm is made 1.  A norm map gives
the output's norm and the sensitivities S_k as functions of all n_k and of the branches' scale factors, and both are differentiable
in them.  Masses: 1 for the first layer, 1 for the last, 1 for all branches together.  The answer is known: every branch adds
1 / (2 depth - 1) of what it gets, the scale that residual networks need for their steps not to depend on their depth.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from thunder_norm import RMSTensor, RMSToRMSTensor, build_norm_map, sensitivities
from thunder_norm.modular import ModularNorm
from thunder_norm.progress import track

F64 = torch.float64


class Branch(nn.Module):
    """x + scale * down(relu(up(x)))."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.scale * self.down(nn.functional.relu(self.up(x)))


def network(width: int, depth: int) -> nn.Sequential:
    branches = nn.Sequential(*(Branch(width) for _ in range(depth)))
    return nn.Sequential(nn.Linear(64, width, bias=False), branches, nn.Linear(width, 10, bias=False))


class Sizes:
    """The norms of all weights and the scale factors, as logarithms, and what follows from them."""

    def __init__(self, model: nn.Module, x: torch.Tensor):
        self.norm_map = build_norm_map(model, x)
        self.masses = ModularNorm(model, x, masses={"1": 1.0, "*.scale": 0.0}).masses
        random = torch.Generator().manual_seed(0)
        self.logs = {k: torch.randn((), dtype=F64, generator=random).div(2).requires_grad_() for k in self.masses}
        self.moving = [name for name, mass in self.masses.items() if mass > 0]

    def output(self) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The output's norm, every weight's, and the output's sensitivity to it."""
        sizes = {name: log.exp() for name, log in self.logs.items()}
        leaves = {
            k: RMSToRMSTensor(sizes[k], perturbation_size=torch.zeros((), dtype=F64, requires_grad=True)) for k in self.moving
        }
        y = self.norm_map(RMSTensor(1.0), normed_state_dict={**sizes, **leaves})
        return y.norm_size, sizes, sensitivities(y, leaves)

    def ratios(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output's norm, and for each weight ``n_k / t_k`` without the constant M: its norm over the step it may take."""
        size, sizes, found = self.output()
        return size, torch.stack([sizes[k] * found[k] / self.masses[k] for k in self.moving])

    def loss(self) -> torch.Tensor:
        """How far the logarithms of the ratios are from equal, and that of the output's norm from 0."""
        size, ratios = self.ratios()
        return ratios.log().var(correction=0) + size.log() ** 2


def optimise(sizes: Sizes, steps: int) -> list[float]:
    """Gradient descent on the logarithms (L-BFGS, which needs few steps where curvatures differ); the losses on the way."""
    optimizer = torch.optim.LBFGS(sizes.logs.values(), max_iter=4, max_eval=40, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sizes.loss()
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in track(range(steps), "optimising")]


def plot(path: Path, names: list[str], before: torch.Tensor, after: torch.Tensor, losses: list[float]) -> None:
    import matplotlib

    if not os.environ.get("DISPLAY"):
        matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(2, 1), layout="constrained")
    for values, label in ((before, "random sizes"), (after, "optimised")):
        left.semilogy(range(len(names)), values, "o-", label=label)
    left.set_xticks(range(len(names)), names, rotation=90)
    left.set_ylabel("norm / allowed step")
    left.legend()
    right.semilogy(losses)
    right.set_xlabel("step")
    right.set_ylabel("loss")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plot", type=Path, help="a picture of both, before and after")
    options = parser.parse_args()
    with torch.device("meta"):
        model, x = network(options.width, options.depth), torch.empty(1, 64)
    sizes = Sizes(model, x)
    norm_before, before = (t.detach() for t in sizes.ratios())
    losses = optimise(sizes, options.steps)
    norm, after = (t.detach() for t in sizes.ratios())
    table = Table(title=f"{options.depth} branches; output norm {norm_before.item():.3g} before, {norm.item():.4f} after")
    for column in ("parameter", "norm", "norm / step before", "after"):
        table.add_column(column, justify="left" if column == "parameter" else "right")
    by_name = dict(zip(sizes.moving, zip(before.tolist(), after.tolist(), strict=True), strict=True))
    for name, log in sizes.logs.items():
        table.add_row(name, f"{log.exp().item():.4f}", *(f"{v:.3g}" for v in by_name.get(name, ())))
    Console().print(table)
    print(
        f"loss {losses[0]:.3g} -> {losses[-1]:.3g}; largest over smallest norm / step {before.max() / before.min():.3g}", end=" "
    )
    print(f"-> {after.max() / after.min():.4f}")
    added = [sum(log.item() for name, log in sizes.logs.items() if name.startswith(f"1.{i}.")) for i in range(options.depth)]
    shares = ", ".join(f"{math.exp(a):.4f}" for a in added)
    print(f"branches add {shares} of what they get; 1 / (2 depth - 1) = {1 / (2 * options.depth - 1):.4f}")
    if options.plot:
        plot(options.plot, sizes.moving, before, after, losses)


if __name__ == "__main__":
    main()
