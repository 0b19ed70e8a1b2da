"""Does the best learning rate stay where it is when a model gets wider or deeper?

Sweeps of learning rates at four widths and three depths, three seeds each, for ModularOptimizer (with noise adaptation, too), AdamW and
torch.optim.Muon on six tasks (transfer_tasks.py).  Prints tables, in Markdown, writes all losses as JSON and draws them:

    python examples/learning_rate_transfer.py [--quick] [--tasks small mlp conv vit text gpt] [--results r.json] [--plot p.png]

The model, its initialisation (`ModularNorm.initialize_`, biases at 0), its batches, momentum 0.9, no weight decay and a learning rate that
falls linearly to 0 are the same for all.  ``--draw r.json`` draws and prints results of before; ``--variant`` changes one thing, on four models.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transfer_tasks import TASKS, Form
from transfer_views import Sweep, draw, load, save, tables

from thunder_norm.errors import GradientError
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.progress import track

SEEDS = 3
BETAS = (0.9, 0.95)  # of AdamW; its first is everybody's momentum, its second that of ModularOptimizer's squares
ADAMW_TO_MUON = 0.1  # learning rate of what Muon does not take, over Muon's


@dataclass(frozen=True)
class Variant:
    """One thing done in another way."""

    form: Form = Form()
    mode: Any = "typical"
    has_shared_mass: bool = True  # the residual blocks have the mass of one together, whatever their number
    initial: str = "norm 1"


VARIANTS = {
    "": Variant(),
    "mass 1 for each matrix": Variant(has_shared_mass=False),
    "mode modula": Variant(mode="modula"),
    "x + f(x), 1/sqrt(head)": Variant(form=Form(0.0, 0.5)),
    "torch's initialisation": Variant(initial="torch's"),
}


@dataclass(frozen=True)
class Run:
    """One training run, of which the final loss is kept."""

    task: str
    variant: str
    optimizer: str
    width: int
    depth: int
    lr: float
    seed: int
    steps: int


class _InFloat32(TorchFunctionMode):
    """Leaves out conversions to bfloat16: Muon's products in it take up to 20 times longer on processors without units for it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.to and kwargs.get("dtype") is torch.bfloat16:
            kwargs = kwargs | {"dtype": torch.float32}
        return args[0] if func is torch.Tensor.bfloat16 else func(*args, **kwargs)


class Muon:
    """torch.optim.Muon for the matrices and (flattened) kernels of the blocks, AdamW for the first and last layers and all vectors."""

    def __init__(self, model: nn.Module, lr: float):
        hidden = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim > 1]
        rest = [p for name, p in model.named_parameters() if not (name.startswith("blocks.") and p.ndim > 1)]
        self.flat = [(p, nn.Parameter(p.detach().flatten(1))) for p in hidden]  # the same memory
        self.muon = torch.optim.Muon([flat for _, flat in self.flat], lr=lr, momentum=BETAS[0], weight_decay=0)
        self.adamw = torch.optim.AdamW(rest, lr=ADAMW_TO_MUON * lr, betas=BETAS, weight_decay=0)
        self.param_groups = self.muon.param_groups + self.adamw.param_groups

    def step(self) -> None:
        for p, flat in self.flat:
            assert p.grad is not None
            flat.grad = p.grad.flatten(1)
        with _InFloat32():
            self.muon.step()
        self.adamw.step()


ADAPTED = "ModularOptimizer with noise adaptation"
OPTIMIZERS = {
    "ModularOptimizer": lambda norm, lr: ModularOptimizer(norm, lr=lr, momentum=BETAS[0], nesterov=True),
    ADAPTED: lambda norm, lr: ModularOptimizer(norm, lr=lr, momentum=BETAS[0], nesterov=True, noise_adaptation=BETAS[1]),
    "AdamW": lambda norm, lr: torch.optim.AdamW(norm.model.parameters(), lr=lr, betas=BETAS, weight_decay=0),
    "Muon": lambda norm, lr: Muon(norm.model, lr),
}
# powers of 2
GRIDS = {
    "mlp": {"ModularOptimizer": range(-3, 4), "AdamW": range(-9, -2), "Muon": range(-6, 0)},
    "conv": {"ModularOptimizer": range(0, 6), "AdamW": range(-7, 0), "Muon": range(-5, 2)},
    "text": {"ModularOptimizer": range(-2, 4), "AdamW": range(-9, -2), "Muon": range(-6, 1)},
}
GRIDS["small"] = GRIDS["mlp"]
GRIDS["vit"] = GRIDS["text"]
GRIDS["gpt"] = {"ModularOptimizer": range(-1, 3), "AdamW": range(-9, -4), "Muon": range(-5, 0)}
for of_task in GRIDS.values():
    of_task[ADAPTED] = of_task["ModularOptimizer"]
FAR = range(-3, 4)  # for variants
DEFAULT = ("small", "mlp", "conv", "vit", "text", "gpt")  # tasks


@lru_cache(maxsize=2)
def _norm(task: str, variant: str, width: int, depth: int) -> ModularNorm:
    """Of a model that all runs of this size begin anew with."""
    chosen, how = TASKS[task], VARIANTS[variant]
    model = chosen.model(width, depth, how.form)
    x, _ = chosen.batch(torch.Generator().manual_seed(0))
    repeated = {"blocks": chosen.blocks_mass * (1 if how.has_shared_mass else depth)}
    masses = repeated if how.mode == "modula" or not how.has_shared_mass else None
    return ModularNorm(model, x, masses=masses, light=0.1, mode=how.mode)


@torch.no_grad()
def initialize(norm: ModularNorm, initial: str, seed: int) -> None:
    if initial == "norm 1":
        norm.initialize_(torch.Generator().manual_seed(seed), zero_biases=True)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for module in norm.model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()


def train(run: Run) -> float:
    """The loss at the end, inf if the run diverges."""
    task = TASKS[run.task]
    norm = _norm(run.task, run.variant, run.width, run.depth)
    model = norm.model
    initialize(norm, VARIANTS[run.variant].initial, run.seed)
    optimizer = OPTIMIZERS[run.optimizer](norm, run.lr)
    full = [(group, group["lr"]) for group in optimizer.param_groups]
    random = torch.Generator().manual_seed(run.seed)
    for i in range(run.steps):
        for group, lr in full:
            group["lr"] = lr * (1 - i / run.steps)
        loss = _loss(model, *task.batch(random))
        if not loss.item() < 1e4:
            return math.inf
        model.zero_grad()
        loss.backward()
        try:
            optimizer.step()
        except GradientError:  # one that is not finite
            return math.inf
    with torch.no_grad():
        final = _loss(model, *task.judged()).item()
    return final if final < 1e4 else math.inf


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def planned(tasks: Sequence[str], optimizers: Sequence[str], variant: str, is_quick: bool) -> list[Sweep]:
    """The sweeps, without losses."""
    found = []
    for name in tasks:
        task = TASKS[name]
        sizes = [(width, task.depths[0]) for width in task.widths] + [(task.width, depth) for depth in task.depths[1:]]
        if is_quick:
            sizes = [(width, task.depths[0]) for width in task.widths[:2]]
        elif variant:
            sizes = [sizes[0], (task.width, task.depths[0]), sizes[len(task.widths) - 1], sizes[-1]]
        for width, depth in sizes:
            for optimizer in optimizers:
                powers = FAR if variant and optimizer == "ModularOptimizer" else GRIDS[name][optimizer]
                lrs = [2.0**power for power in powers]
                steps = 30 if is_quick else task.steps
                found.append(Sweep(name, variant, optimizer, width, depth, steps, lrs[1::2] if is_quick else lrs, ()))
    return found


def measured(sweeps: Sequence[Sweep], seeds: int, processes: int) -> list[Sweep]:
    """The sweeps, run."""
    runs = [
        Run(s.task, s.variant, s.optimizer, s.width, s.depth, lr, seed, s.steps)
        for s in sweeps
        for lr in s.lrs
        for seed in range(seeds)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        losses = iter(list(track(pool.map(train, runs, chunksize=seeds), "training", len(runs))))
    return [replace(s, losses=[[next(losses) for _ in range(seeds)] for _ in s.lrs]) for s in sweeps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two widths, one seed, few steps")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=DEFAULT)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--variant", choices=VARIANTS, default="")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, help="JSON to write; other sweeps that it has stay")
    parser.add_argument("--draw", type=Path, help="take the losses from this JSON, run nothing")
    parser.add_argument("--plot", type=Path, help="the picture")
    options = parser.parse_args()
    if options.draw:
        sweeps = load(options.draw)
    else:
        plan = planned(options.tasks, options.optimizers, options.variant, options.quick)
        sweeps = measured(plan, 1 if options.quick else SEEDS, options.processes)
        if options.results:
            kept = load(options.results) if options.results.exists() else []
            new = {(s.task, s.variant, s.optimizer) for s in sweeps}
            sweeps = [s for s in kept if (s.task, s.variant, s.optimizer) not in new] + sweeps
            sweeps.sort(key=lambda s: DEFAULT.index(s.task))
            save(options.results, sweeps)
    print(tables(sweeps))
    if options.plot:
        draw(options.plot, sweeps)


if __name__ == "__main__":
    main()
