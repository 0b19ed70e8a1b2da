"""Sweeps of learning rates: kept as JSON, summarized in tables, drawn."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transfer_tasks import TASKS


@dataclass(frozen=True)
class Sweep:
    """Learning rates tried on one model; ``losses[lr][seed]``, inf of a run that diverged."""

    task: str
    variant: str
    optimizer: str
    width: int
    depth: int
    steps: int
    lrs: Sequence[float]
    losses: Sequence[Sequence[float]]

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.depth

    def curve(self) -> Curve:
        """The geometric mean over seeds."""
        return Curve(self.lrs, [math.exp(sum(map(math.log, row)) / len(row)) for row in self.losses])

    def curves(self) -> list[Curve]:
        """One a seed."""
        return [Curve(self.lrs, losses) for losses in zip(*self.losses, strict=True)]


@dataclass(frozen=True)
class Curve:
    """Losses over learning rates, in octaves: between those tried, parabolas through three neighbours, of log loss over log rate."""

    lrs: Sequence[float]
    losses: Sequence[float]

    @property
    def best(self) -> float:
        """log2 of the best learning rate: the bottom of the parabola around the lowest loss, if it has both neighbours."""
        x, y = self._logs()
        i = min(range(len(y)), key=lambda j: y[j])
        around = y[max(i - 1, 0) : i + 2]
        if len(around) < 3 or not all(map(math.isfinite, around)):
            return x[i]
        left, middle, right = around
        return x[i] + (x[i + 1] - x[i]) * (left - right) / (2 * (left - 2 * middle + right) or 1)

    @property
    def is_inside(self) -> bool:
        """Whether the lowest loss is at neither end."""
        i = min(range(len(self.losses)), key=lambda j: self.losses[j])
        return 0 < i < len(self.losses) - 1

    def at(self, log_lr: float) -> float:
        """The loss there, inf next to a run that diverged; at the ends of the sweep beyond them."""
        x, y = self._logs()
        log_lr = min(max(log_lr, x[0]), x[-1])
        i = min(range(len(x)), key=lambda j: abs(x[j] - log_lr))
        points = [(x[j], y[j]) for j in range(max(i - 1, 0), min(i + 2, len(x))) if math.isfinite(y[j])]
        if not math.isfinite(y[i]):
            return math.inf
        total = 0.0
        for p, v in points:  # Lagrange's formula
            total += v * math.prod((log_lr - other) / (p - other) for other, _ in points if other != p)
        return math.exp(total)

    def _logs(self) -> tuple[list[float], list[float]]:
        return [math.log2(lr) for lr in self.lrs], [math.log(v) for v in self.losses]


def save(path: Path, sweeps: Iterable[Sweep]) -> None:
    """One line a sweep; null for a loss that is infinite."""
    lines = []
    for s in sweeps:
        losses = [[round(v, 6) if math.isfinite(v) else None for v in row] for row in s.losses]
        lines.append("  " + json.dumps(asdict(s) | {"losses": losses}))
    versions = json.dumps({"torch": torch.__version__})
    path.write_text(f'{{"versions": {versions}, "sweeps": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def load(path: Path) -> list[Sweep]:
    found = json.loads(path.read_text(encoding="utf-8"))["sweeps"]
    return [Sweep(**s | {"losses": [[math.inf if v is None else v for v in row] for row in s["losses"]]}) for s in found]


@dataclass(frozen=True)
class Line:
    """What the sweeps of one optimizer on one task say, of growing width or of growing depth."""

    sweeps: Sequence[Sweep]

    @property
    def best(self) -> list[float]:
        return [s.curve().best for s in self.sweeps]

    @property
    def spread(self) -> float:
        """Octaves between the smallest and the largest best learning rate."""
        return max(self.best) - min(self.best)

    @property
    def noise(self) -> float:
        """How far, in octaves, a best learning rate moves with the seed: the root mean square of its deviation, over all sizes."""
        squares = []
        for s in self.sweeps:
            best = torch.tensor([c.best for c in s.curves()])
            squares += (best - best.mean()).square().tolist()
        return math.sqrt(sum(squares) / max(len(squares) - len(self.sweeps), 1))

    @property
    def lowest(self) -> list[float]:
        """The losses at the best learning rates."""
        return [s.curve().at(s.curve().best) for s in self.sweeps]

    @property
    def moved(self) -> float:
        """The loss of the largest model at the best learning rate of the smallest."""
        return self.sweeps[-1].curve().at(self.best[0])


def lines(sweeps: Iterable[Sweep]) -> dict[tuple[str, str, str], tuple[Line, Line]]:
    """(task, variant, optimizer) -> sweeps over widths, sweeps over depths."""
    grouped: dict[tuple[str, str, str], list[Sweep]] = {}
    for s in sweeps:
        grouped.setdefault((s.task, s.variant, s.optimizer), []).append(s)
    found = {}
    for key, group in grouped.items():
        task = TASKS[key[0]]
        widths = sorted((s for s in group if s.depth == task.depths[0]), key=lambda s: s.width)
        width = min((s.width for s in group), key=lambda w: (w != task.width, w))
        depths = sorted((s for s in group if s.width == width), key=lambda s: s.depth)
        found[key] = Line(widths), Line(depths)
    return found


def tables(sweeps: Iterable[Sweep]) -> str:
    """Best learning rates (``!``: at an end of the sweep) and losses over widths, and over depths, in Markdown."""
    found = lines(sweeps)
    parts = []
    for i, (size, largest, smallest) in enumerate((("width", "widest", "narrowest"), ("depth", "deepest", "shallowest"))):
        heads = ("task", "optimizer", f"{size}s", "best lr", "spread in octaves", "seeds")
        heads = (*heads, "loss there", f"{largest} at the {smallest}'s lr")
        rows = [_row(key, pair[i], size) for key, pair in found.items() if len(pair[i].sweeps) > 1]
        parts += [_table(heads, rows)] if rows else []
    return "\n\n".join(parts)


def _row(key: tuple[str, str, str], line: Line, size: str) -> list[str]:
    task, variant, optimizer = key
    return [
        TASKS[task].title,
        f"{optimizer}, {variant}" if variant else optimizer,
        ", ".join(str(getattr(s, size)) for s in line.sweeps),
        ", ".join(f"{2**b:.2g}{'' if s.curve().is_inside else '!'}" for b, s in zip(line.best, line.sweeps, strict=True)),
        f"{line.spread:.2f}",
        f"± {line.noise:.2f}",
        ", ".join(f"{v:.3g}" for v in line.lowest),
        f"{line.moved:.3g}",
    ]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))


def draw(path: Path, sweeps: Iterable[Sweep]) -> None:
    """A row for each task, a column for each optimizer: loss over learning rate, lines for widths and depths."""
    import matplotlib

    if not os.environ.get("DISPLAY"):
        matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = lines(s for s in sweeps if not s.variant)
    tasks, optimizers = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 2))
    figure, axes = plt.subplots(
        len(tasks),
        len(optimizers),
        figsize=(4 * len(optimizers), 3 * len(tasks)),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row, task in zip(axes, tasks, strict=True):
        for ax, optimizer in zip(row, optimizers, strict=True):
            if (task, "", optimizer) not in found:
                continue
            widths, depths = found[task, "", optimizer]
            _draw_line(ax, widths, "width", plt.get_cmap("viridis"), "-")
            _draw_line(ax, Line(depths.sweeps[1:]), "depth", plt.get_cmap("autumn"), "--")
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.axhline(TASKS[task].chance, color="gray", lw=0.6, ls=":")
            ax.set_title(f"{TASKS[task].title}\n{optimizer}", fontsize=10)
            ax.grid(alpha=0.25)
            if optimizer == optimizers[-1]:
                ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        row[0].set_ylabel("final loss")
        lowest = min(v for pair in (found.get((task, "", o)) for o in optimizers) for v in _all_lowest(pair))
        row[0].set_ylim(0.85 * lowest, 1.05 * TASKS[task].chance)
    for ax in axes[-1]:
        ax.set_xlabel("learning rate")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _all_lowest(pair: tuple[Line, Line] | None) -> list[float]:
    return [v for line in pair or () for v in line.lowest]


def _draw_line(ax, line: Line, what: str, colours: Callable, style: str) -> None:
    for i, s in enumerate(line.sweeps):
        colour, curve = colours(0.1 + 0.75 * i / max(len(line.sweeps) - 1, 1)), s.curve()
        label = f"{what} {getattr(s, what)}" + (f", depth {s.depth}" if what == "width" else f", width {s.width}")
        ax.plot(curve.lrs, curve.losses, style, color=colour, lw=1.4, label=label)
        ax.plot(2**curve.best, curve.at(curve.best), "o", color=colour, ms=5)
