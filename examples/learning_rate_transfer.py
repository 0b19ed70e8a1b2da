"""Does the best learning rate stay where it is when a model gets wider or deeper?

Sweeps of learning rates at four widths and three depths, three seeds each, for ModularOptimizer (with noise adaptation, too), AdamW and
torch.optim.Muon on six tasks (transfer_tasks.py); ``--tasks gpt2 llama`` are models of transformers, on which AdamW is tried with muP's
multipliers, too.  Prints tables, in Markdown, writes all losses as JSON and draws them:

    python examples/learning_rate_transfer.py [--quick] [--tasks small mlp conv vit text gpt] [--results r.json] [--plot p.png]

Results are written as each model is done, and ``--resume`` goes on from there.

The model, its initialisation (`ModularNorm.initialize_`, biases at 0), its batches, momentum 0.9, no weight decay and a learning rate that
falls linearly to 0 are the same for all.  ``--draw r.json`` draws and prints results of before; ``--variant`` changes one thing, on four models.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
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
from thunder_norm.modular import ModularNorm, ModularOptimizer, mup_scales
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

    def __init__(self, model: nn.Module, lr: float, blocks: str = "blocks."):
        hidden = {name: p for name, p in model.named_parameters() if name.startswith(blocks) and p.ndim > 1}
        rest = [p for name, p in model.named_parameters() if name not in hidden]
        is_turned = {name: _has_outputs_last(model, name) for name in hidden}
        self.views = {p: (lambda t: t.mT) if is_turned[name] else (lambda t: t.flatten(1)) for name, p in hidden.items()}
        self.flat = [(p, nn.Parameter(view(p.detach()))) for p, view in self.views.items()]  # the same memory
        self.muon = torch.optim.Muon([flat for _, flat in self.flat], lr=lr, momentum=BETAS[0], weight_decay=0)
        self.adamw = torch.optim.AdamW(rest, lr=ADAMW_TO_MUON * lr, betas=BETAS, weight_decay=0)
        self.param_groups = self.muon.param_groups + self.adamw.param_groups

    def step(self) -> None:
        for p, flat in self.flat:
            assert p.grad is not None
            flat.grad = self.views[p](p.grad)
        with _InFloat32():
            self.muon.step()
        self.adamw.step()


def _has_outputs_last(model: nn.Module, name: str) -> bool:
    """Whether it is the matrix of a `Conv1D` of transformers."""
    return type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"


@lru_cache(maxsize=2)
def _mup(task: str, width: int, depth: int) -> dict[str, float]:
    """By what muP multiplies the learning rate of each parameter, from the narrowest model of a task on."""
    chosen, form = TASKS[task], Form()
    models = [chosen.model(w, depth, form) for w in (width, chosen.widths[0])]
    if width == chosen.widths[0]:
        return {name: 1.0 for name, _ in models[0].named_parameters()}
    x, _ = chosen.batch(torch.Generator().manual_seed(0))
    groups = mup_scales(*models, x).param_groups(lr=1.0, weight_decay=0.0)
    by_id = {id(p): g["lr"] for g in groups for p in g["params"]}
    return {name: by_id[id(p)] for name, p in models[0].named_parameters()}


def _adamw_with_mup(run: Run, norm: ModularNorm) -> torch.optim.Optimizer:
    multipliers = _mup(run.task, run.width, run.depth)
    groups = [{"params": [p], "lr": run.lr * multipliers[name]} for name, p in norm.model.named_parameters()]
    return torch.optim.AdamW(groups, betas=BETAS, weight_decay=0)


ADAPTED = "ModularOptimizer with noise adaptation"
MUP = "AdamW with muP"
OPTIMIZERS = {
    "ModularOptimizer": lambda run, norm: ModularOptimizer(norm, lr=run.lr, momentum=BETAS[0], nesterov=True),
    ADAPTED: lambda run, norm: ModularOptimizer(norm, lr=run.lr, momentum=BETAS[0], nesterov=True, noise_adaptation=BETAS[1]),
    "AdamW": lambda run, norm: torch.optim.AdamW(norm.model.parameters(), lr=run.lr, betas=BETAS, weight_decay=0),
    MUP: _adamw_with_mup,
    "Muon": lambda run, norm: Muon(norm.model, run.lr, TASKS[run.task].blocks),
}
# powers of 2
GRIDS = {
    "mlp": {"ModularOptimizer": range(-3, 4), "AdamW": range(-9, -2), "Muon": range(-6, 0)},
    "conv": {"ModularOptimizer": range(0, 6), "AdamW": range(-7, 0), "Muon": range(-5, 2)},
    "text": {"ModularOptimizer": range(-2, 4), "AdamW": range(-9, -2), "Muon": range(-6, 1)},
}
GRIDS["small"] = GRIDS["mlp"]
GRIDS["vit"] = GRIDS["text"]
for of_task in GRIDS.values():
    of_task[ADAPTED] = of_task["ModularOptimizer"]
GRIDS["gpt"] = {"ModularOptimizer": range(-1, 4), ADAPTED: range(0, 5), "AdamW": range(-9, -4), "Muon": range(-5, 0)}
GRIDS["gpt2"] = {ADAPTED: range(-2, 3), "AdamW": range(-9, -3), MUP: range(-6, -2), "Muon": range(-5, 0)}
GRIDS["llama"] = GRIDS["gpt2"]
FAR = range(-3, 4)  # for variants
DEFAULT = ("small", "mlp", "conv", "vit", "text", "gpt")  # tasks


@lru_cache(maxsize=2)
def _norm(task: str, variant: str, width: int, depth: int, is_adapted: bool = False) -> ModularNorm:
    """Of a model that all runs of this size begin anew with."""
    chosen, how = TASKS[task], VARIANTS[variant]
    model = chosen.model(width, depth, how.form)
    x, _ = chosen.batch(torch.Generator().manual_seed(0))
    repeated = {"blocks": chosen.blocks_mass * (1 if how.has_shared_mass else depth)}
    masses = repeated if how.mode == "modula" or not how.has_shared_mass else None
    by_role = {"attention": 0.5, "gated": 0.5, "places": 0.3} if is_adapted else {}
    return ModularNorm(model, x, masses=masses, light=0.1, **by_role, mode=how.mode)


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
    norm = _norm(run.task, run.variant, run.width, run.depth, run.optimizer == ADAPTED)
    model = norm.model
    initialize(norm, VARIANTS[run.variant].initial, run.seed)
    optimizer = OPTIMIZERS[run.optimizer](run, norm)
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
            narrow = min(task.widths[0], 32)
            sizes = [(narrow, task.depths[0]), (2 * narrow, task.depths[0])]
        elif variant:
            sizes = [sizes[0], (task.width, task.depths[0]), sizes[len(task.widths) - 1], sizes[-1]]
        for width, depth in sizes:
            for optimizer in optimizers:
                if optimizer not in GRIDS[name]:
                    continue
                powers = FAR if variant and optimizer == "ModularOptimizer" else GRIDS[name][optimizer]
                lrs = [2.0**power for power in powers]
                steps = 24 if is_quick else task.steps
                found.append(Sweep(name, variant, optimizer, width, depth, steps, lrs[1::3] if is_quick else lrs, ()))
    return found


def measured(sweeps: Sequence[Sweep], seeds: int, processes: int) -> Iterator[Sweep]:
    """The sweeps, each when it is run."""
    runs = [
        Run(s.task, s.variant, s.optimizer, s.width, s.depth, lr, seed, s.steps)
        for s in sweeps
        for lr in s.lrs
        for seed in range(seeds)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        losses = iter(track(pool.map(train, runs, chunksize=seeds), "training", len(runs)))
        for s in sweeps:
            yield replace(s, losses=[[next(losses) for _ in range(seeds)] for _ in s.lrs])


def _plan(s: Sweep) -> Sweep:
    """The sweep before it was run."""
    return replace(s, lrs=list(s.lrs), losses=())


def _ordered(sweeps: Iterable[Sweep]) -> list[Sweep]:
    order = [*DEFAULT, *(task for task in TASKS if task not in DEFAULT)]
    return sorted(sweeps, key=lambda s: order.index(s.task))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two small widths, few rates, one seed, few steps")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=DEFAULT)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--variant", choices=VARIANTS, default="")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, help="JSON to write; other sweeps that it has stay")
    parser.add_argument("--resume", action="store_true", help="run only what the results lack")
    parser.add_argument("--draw", type=Path, help="take the losses from this JSON, run nothing")
    parser.add_argument("--plot", type=Path, help="the picture")
    options = parser.parse_args()
    if options.draw:
        sweeps = load(options.draw)
    else:
        plan, seeds = planned(options.tasks, options.optimizers, options.variant, options.quick), 1 if options.quick else SEEDS
        kept = load(options.results) if options.results and options.results.exists() else []
        done = [s for s in kept if options.resume and _plan(s) in plan and len(s.losses[0]) == seeds]
        new = {(s.task, s.variant, s.optimizer) for s in plan}
        others = [s for s in kept if (s.task, s.variant, s.optimizer) not in new]
        found = list(done)
        for sweep in measured([s for s in plan if s not in map(_plan, done)], seeds, options.processes):
            found.append(sweep)
            if options.results:
                save(options.results, _ordered(others + found))
        sweeps = _ordered(others + found) if options.results else found
    print(tables(sweeps))
    if options.plot:
        draw(options.plot, sweeps)


if __name__ == "__main__":
    main()
