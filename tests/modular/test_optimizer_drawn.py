"""Drawn training runs of ModularOptimizer, whatever happens between two steps, against its formulas in numpy and float64."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests.fuzz.optimizer_truth import Followed
from tests.modular.drawn_models import DRAWN, Truth
from tests.modular.optimized import values
from tests.seeds import LONG, seeded
from thunder_norm.modular import ModularNorm, ModularOptimizer


def _followed(truth: Truth, target: float, value: np.ndarray) -> Followed:
    return Followed(truth.axes, truth.steepest, truth.nearest, target, value)


@dataclass
class Run:
    """A model in training, and what the formulas make of it."""

    what: str
    model: torch.nn.Module
    optimizer: ModularOptimizer
    draw: random.Random
    followed: dict[str, Followed] = field(default_factory=dict)
    skipped: int = 0

    def options(self, name: str) -> dict[str, Any] | None:
        """Of the group that has a parameter."""
        return next((group for group in self.optimizer.param_groups if name in group["param_names"]), None)


def _number(draw: random.Random, value: float) -> float | torch.Tensor:
    """As schedules and configurations have it: also as a tensor, of a dtype and shape that are not the parameters'."""
    return draw.choice([value, value, torch.tensor(value), torch.tensor([value], dtype=torch.float64)])


def _drawn_options(draw: random.Random) -> dict[str, Any]:
    noise = draw.choice([None, 0.0, 0.8])
    return {
        "lr": _number(draw, draw.choice([0.1, 0.3, 0.2, 0.0])),
        "momentum": _number(draw, draw.choice([0.0, 0.5, 0.9])),
        "nesterov": draw.random() < 0.5,
        "weight_decay": _number(draw, draw.choice([0.0, 0.0, 0.4])),
        "noise_adaptation": noise if noise is None else _number(draw, noise),
        "project": draw.random() < 0.25,
    }


@functools.cache
def _derived(what: str) -> tuple[torch.nn.Module, ModularNorm]:
    model, x = DRAWN[what].made()
    norm = ModularNorm(model, x, mode="typical", **DRAWN[what].options)
    assert norm.roles  # found before it is copied
    assert {name for name, target in norm.targets.items() if target} == DRAWN[what].truths.keys() - {"fixed"}
    return model, norm


def _model_and_norm(what: str, draw: random.Random) -> tuple[torch.nn.Module, ModularNorm]:
    """A copy of the one that was derived, with values of its own."""
    model, norm = copy.deepcopy(_derived(what))
    torch.manual_seed(seeded(draw.randrange(2**31)))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    return model, norm


def _started(what: str, draw: random.Random) -> Run:
    model, norm = _model_and_norm(what, draw)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    draw.shuffle(names)
    cut = draw.randrange(1, len(names))
    some, later = names[:cut], names[cut:]
    groups = [{"params": [(n, model.get_parameter(n)) for n in some]} | _drawn_options(draw)]
    optimizer = ModularOptimizer(
        norm, params=groups, method="svd", missing_grads="skip", nonfinite_grads="skip", **_drawn_options(draw)
    )
    if draw.random() < 0.7:
        optimizer.add_param_group({"params": [model.get_parameter(n) for n in later], **_drawn_options(draw)})
    truths, still = DRAWN[what].truths, Truth(np.zeros_like, np.copy)
    return Run(
        what,
        model,
        optimizer,
        draw,
        {name: _followed(truths.get(name, still), norm.targets[name], p.numpy()) for name, p in values(model).items()},
    )


def _resumed(run: Run) -> None:
    """From files, in a model and an optimizer that were otherwise."""
    file = io.BytesIO()
    torch.save((run.model.state_dict(), run.optimizer.state_dict()), file)
    file.seek(0)
    of_model, of_optimizer = torch.load(file, weights_only=True)
    model, norm = _model_and_norm(run.what, run.draw)
    groups = [{"params": [model.get_parameter(n) for n in g["param_names"]]} for g in run.optimizer.param_groups]
    other = _drawn_options(run.draw)
    optimizer = ModularOptimizer(norm, params=groups, method="svd", missing_grads="skip", nonfinite_grads="skip", **other)
    if run.draw.random() < 0.5:  # it has gone elsewhere
        for p in model.parameters():
            p.grad = torch.randn_like(p) if p.requires_grad else None
        optimizer.step()
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    run.model, run.optimizer = model, optimizer


def _copied(run: Run) -> None:
    run.model, run.optimizer = copy.deepcopy((run.model, run.optimizer))


def _pickled(run: Run) -> None:
    run.model, run.optimizer = pickle.loads(pickle.dumps((run.model, run.optimizer)))


def _option_changed(run: Run) -> None:
    """As schedules do."""
    group, name = run.draw.choice(run.optimizer.param_groups), run.draw.choice(list(_drawn_options(run.draw)))
    group[name] = _drawn_options(run.draw)[name]


def _memory_changed(run: Run) -> None:
    """A parameter in memory of another order."""
    p = run.draw.choice([p for p in run.model.parameters() if p.ndim > 1])
    p.data = p.data.transpose(0, -1).contiguous().transpose(0, -1)


def _frozen_or_not(run: Run) -> None:
    p = run.draw.choice([p for n, p in run.model.named_parameters() if n != "fixed"])
    p.requires_grad_(not p.requires_grad)


EVENTS: list[Callable[[Run], None]] = [
    _resumed,
    _copied,
    _pickled,
    _option_changed,
    _option_changed,
    _memory_changed,
    _frozen_or_not,
    lambda run: None,
]


def _gradients(run: Run) -> dict[str, torch.Tensor]:
    """Of the parameters that have one: of any size, some entries or all of them 0, in any memory."""
    found = {}
    for name, p in run.model.named_parameters():
        if not p.requires_grad or run.draw.random() < 0.1:
            continue
        g = torch.randn_like(p) * 10 ** run.draw.uniform(-6, 3)
        if g.ndim and run.draw.random() < 0.2:
            g = g.transpose(0, -1).contiguous().transpose(0, -1) if g.ndim > 1 else g[:1].expand_as(g)
        if name == "table.weight":  # tokens that were not met
            g = g * (torch.rand(len(g), 1) < 0.5)
        found[name] = torch.zeros_like(g) if run.draw.random() < 0.05 else g
    return found


def _step(run: Run) -> None:
    """One step of the optimizer in a way that there is, and of the formulas."""
    gradients = _gradients(run)
    moved = [name for name in gradients if run.followed[name].target]
    is_bad = bool(moved) and run.draw.random() < 0.1
    if is_bad:
        worst = run.draw.choice(moved)
        gradients[worst] = gradients[worst].clone()
        gradients[worst][(0,) * gradients[worst].ndim] = math.nan

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        run.model.zero_grad()
        for name, g in gradients.items():
            run.model.get_parameter(name).grad = g.clone()
        return torch.ones(())

    ways = ["closure", "plain", "scaled"]  # torch's scaler has no complex numbers
    way = run.draw.choice(ways[: 2 if any(g.is_complex() for g in gradients.values()) else 3])
    if way == "closure":
        assert run.optimizer.step(closure) == 1
    else:
        closure()
    if way == "plain":
        run.optimizer.step()
    if way == "scaled":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(torch.ones(()))
        for p in run.model.parameters():
            p.grad = None if p.grad is None else p.grad * scaler.get_scale()
        if any(name in gradients for group in run.optimizer.param_groups for name in group["param_names"]):
            scaler.step(run.optimizer)
    is_seen = is_bad and run.options(worst) is not None
    run.skipped += is_seen and way != "scaled"  # otherwise the scaler leaves it out, and the optimizer is not asked
    for name, g in gradients.items():
        if not is_seen and (options := run.options(name)) is not None:
            run.followed[name].step(g.numpy(), options)


@pytest.mark.parametrize("what, case", [(w, case) for w in DRAWN for case in range(100 if LONG else 6 if w == "vectors" else 2)])
def test_training_is_that_of_the_formulas_whatever_happens_between_steps(what, case):
    draw = random.Random(seeded(case))
    run = _started(what, draw)
    for step in range(8):
        event = draw.choice(EVENTS)
        event(run)
        _step(run)
        for name, p in values(run.model).items():
            expected = run.followed[name].value
            np.testing.assert_allclose(p.numpy(), expected, rtol=0, atol=1e-9, err_msg=f"{name}, step {step}, {event}")
    assert run.optimizer.skipped_steps == run.skipped
