"""A monitor changes nothing: training with and without it is the same to the bit, and models can be copied, pickled and compiled."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from tests.modular import monitored
from tests.seeds import seeded
from thunder_norm.errors import DivergenceWarning, NormMismatchError
from thunder_norm.modular import ModularOptimizer, TrainingMonitor
import thunder

Loop = Callable[[nn.Module, torch.Tensor, Any, torch.optim.Optimizer], list[torch.Tensor]]


def plain(model: nn.Module, batch: torch.Tensor, loss: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return losses


def by_closure(model: nn.Module, batch: torch.Tensor, loss: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        return value

    return [optimizer.step(closure).detach() for _ in range(4)]


def accumulated(model: nn.Module, batch: torch.Tensor, loss: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    losses = []
    for i in range(8):
        value = loss(model, batch) / 2
        value.backward()
        losses.append(value.detach())
        if i % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def in_autocast(model: nn.Module, batch: torch.Tensor, loss: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return losses


def with_scaler(model: nn.Module, batch: torch.Tensor, loss: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The second step overflows, and is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    losses = []
    for i in range(4):
        optimizer.zero_grad()
        value = loss(model, batch)
        scaler.scale(value * (float("inf") if i == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.detach())
    return losses


def validated(model: nn.Module, batch: torch.Tensor, loss: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """With an evaluation, a frozen forward and a forward that fails between steps."""
    losses = []
    for _ in range(3):
        losses += plain(model, batch, loss, optimizer)[:1]
        with torch.no_grad():
            losses.append(loss(model.eval(), batch))
        model.train()
        with contextlib.suppress(Exception):
            model(batch, batch, batch)
        with contextlib.suppress(Exception):
            model(batch[..., :0])
    return losses


def decoder(**options: Any) -> tuple[nn.Module, torch.Tensor, Any]:
    """Of one block: what a monitor looks up of a model is traced, each block for itself."""
    return monitored.language_model(depth=1, **options)


def drop_out(make: Any) -> Any:
    return lambda: make(dropout=0.3)


def _run(make: Any, optimizer: Any, loop: Loop, every: int | None, dtype: torch.dtype | None) -> list[Any]:
    """What training leaves of a model of its own."""
    return next(_runs(make, optimizer, loop, [every], dtype))


def _runs(make: Any, optimizer: Any, loop: Loop, everies: Sequence[int | None], dtype: torch.dtype | None) -> Iterator[list[Any]]:
    """All that training leaves: losses, parameters, gradients, buffers, the optimizer's state, and random numbers after it.

    Once for each number of steps between records, from the same weights, with one monitor that is attached to optimizer after optimizer.
    """
    monitor, model = None, None
    for every in everies:
        torch.manual_seed(seeded(1))
        random.seed(seeded(1))
        np.random.seed(seeded(1))
        fresh, batch, loss = make()
        if dtype is not None:
            fresh, batch = fresh.to(dtype), batch.to(dtype) if batch.is_floating_point() else batch
        if model is None:
            model = fresh
        else:
            model.load_state_dict(fresh.state_dict())
            model.zero_grad()
        opt = optimizer(model, batch)
        if every is not None and monitor is None:
            monitor = TrainingMonitor(model, batch, every=every, optimizer=opt)
        elif every is not None:
            monitor.every, monitor.step = every, 0
            monitor.history.clear()
            monitor.attach(opt)
        losses = loop(model, batch, loss, opt)
        if monitor is not None:
            steps = [r["step"] for r in monitor.history]
            assert steps and steps == [n for n in range(steps[-1] + 1) if n % every == 0]
            assert all(r["parameters"] for r in monitor.history)
            monitor.remove()
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert not _get_current_function_mode_stack()
        assert not torch.nn.modules.module._has_any_global_hook()
        state = [v for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        rest = [torch.rand(3), torch.tensor(random.random()), torch.tensor(np.random.rand())]
        yield [t.detach().clone() for t in (*losses, *model.parameters(), *grads, *model.buffers(), *state, *rest)]


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda m, x: torch.optim.AdamW(m.parameters(), lr=0.01),
    "AdamW, fused": lambda m, x: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "SGD": lambda m, x: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": lambda m, x: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "LBFGS": lambda m, x: torch.optim.LBFGS(m.parameters(), max_iter=3),
    "Modular": lambda m, x: ModularOptimizer(m, x, lr=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, optimizer, loop, dtype",
    [
        (drop_out(decoder), "AdamW", plain, None),
        (drop_out(decoder), "SGD", accumulated, None),
        (drop_out(decoder), "AdamW", in_autocast, None),
        (decoder, "Modular", plain, None),
        (decoder, "AdamW, fused", with_scaler, None),
        (lambda: decoder(is_written_out=True), "Adagrad", by_closure, None),
        (decoder, "AdamW", plain, torch.bfloat16),
        (drop_out(monitored.perceptron), "SGD", validated, None),
        (drop_out(monitored.perceptron), "LBFGS", by_closure, torch.float64),
        (monitored.perceptron, "AdamW", with_scaler, None),
        (monitored.convolutional, "AdamW, fused", plain, None),
        (monitored.convolutional, "SGD", by_closure, None),
    ],
)
def test_training_is_the_same_to_the_bit(make, optimizer: str, loop: Loop, dtype: torch.dtype | None):
    alone = _run(make, OPTIMIZERS[optimizer], loop, None, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)
        for watched in _runs(make, OPTIMIZERS[optimizer], loop, (1, 3), dtype):
            assert len(watched) == len(alone)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(watched, alone, strict=True))


class WithFrozenEncoder(nn.Module):
    """Torch's own encoder, in eval mode and frozen, before a layer that trains: there it has a fused kernel."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).requires_grad_(False)
        self.decoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def train(self, mode: bool = True) -> WithFrozenEncoder:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.decoder(self.encoder(x))
        return self.attention(y, y, y)[0]


def test_fused_kernels_are_those_that_run_without_a_monitor():
    def make() -> Any:
        return WithFrozenEncoder().train(), torch.randn(2, 5, 8), monitored.square_loss

    watched = _run(make, OPTIMIZERS["SGD"], plain, 1, None)
    alone = _run(make, OPTIMIZERS["SGD"], plain, None, None)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))


def test_models_and_optimizers_are_copied_and_pickled_while_they_are_watched():
    model, batch, loss = monitored.perceptron()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = TrainingMonitor(model, batch, every=1, optimizer=optimizer)
    plain(model, batch, loss, optimizer)
    records = len(monitor.history)
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"thunder_norm" not in pickle.dumps(model) and b"thunder_norm" not in buffer.getvalue()
    for other in (twin, loaded):
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
        plain(other, batch, loss, copy.deepcopy(torch.optim.SGD(other.parameters(), lr=0.1)))
    assert len(monitor.history) == records and b"thunder_norm" not in pickle.dumps(optimizer)


def attention() -> tuple[nn.Module, torch.Tensor, Any]:
    """Of plain Thunder, which takes seconds to trace a decoder."""
    return nn.Sequential(monitored.Attention(8, 2), nn.Linear(8, 3)), torch.randn(2, 5, 8), monitored.square_loss


def _trained(make: Callable, compile_it: Callable, every: int | None) -> tuple[list[torch.Tensor], TrainingMonitor | None]:
    torch.manual_seed(seeded(2))
    model, batch, loss = make()
    compiled = compile_it(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = None if every is None else TrainingMonitor(compiled, batch, every=every, optimizer=optimizer)
    losses = plain(compiled, batch, loss, optimizer)
    return [*losses, *model.parameters()], monitor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "compile_it"),
    [(decoder, lambda m: torch.compile(m, backend="aot_eager")), (attention, thunder.jit)],
    ids=["torch.compile", "thunder"],
)
def test_compiled_models_are_watched_as_plain_programs(make, compile_it):
    watched, monitor = _trained(make, compile_it, 2)
    alone, _ = _trained(make, compile_it, None)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))
    _, in_eager_mode = _trained(make, lambda model: model, 2)
    assert monitor is not None and in_eager_mode is not None and len(monitor.history) == 3
    for one, other in zip(monitor.history, in_eager_mode.history, strict=True):
        assert set(one["activations"]) == set(other["activations"]) and set(one["attention"]) == set(other["attention"])
        assert one["activations"] and one["attention"]
        for name, numbers in one["activations"].items():
            assert numbers["norm"] == pytest.approx(other["activations"][name]["norm"], rel=1e-4)


def test_buffers_and_dropout_of_compiled_models_are_left_alone():
    def trained(every: int | None) -> list[Any]:
        torch.manual_seed(seeded(3))
        model, batch, loss = monitored.perceptron(dropout=0.3)
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if every:
            TrainingMonitor(compiled, batch, every=every, optimizer=optimizer)
        return [*plain(compiled, batch, loss, optimizer), *model.parameters(), *model.buffers(), torch.rand(2)]

    assert all(torch.equal(a, b) for a, b in zip(trained(1), trained(None), strict=True))


def test_parts_compiled_inside_are_refused_unless_forwards_are_not_watched():
    model, batch, loss = monitored.perceptron()
    model[0].compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NormMismatchError, match="compiled inside"):
        TrainingMonitor(model, batch, optimizer=optimizer)
    monitor = TrainingMonitor(model, batch, every=1, optimizer=optimizer, activations=False)
    plain(model, batch, loss, optimizer)
    assert len(monitor.history) == 5 and not monitor.latest["activations"] and not monitor.latest["notes"]


def test_a_forward_that_is_interrupted_leaves_no_mode_behind():
    class Interrupted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.stops = nn.Linear(4, 4), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.stops:
                raise KeyboardInterrupt
            return self.inner(x)

    model, batch = Interrupted(), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainingMonitor(model, every=1, optimizer=optimizer)
    with pytest.raises(KeyboardInterrupt):
        model(batch)
    model.stops = False
    plain(model, batch, monitored.square_loss, optimizer)
    assert set(monitor.history[0]["activations"]) == {"inner", "(model)"} and not _get_current_function_mode_stack()
    model.stops = True
    with pytest.raises(KeyboardInterrupt):
        model(batch)
    with torch.device("cpu"):  # another mode above the one that was left
        monitor.remove()
    assert not _get_current_function_mode_stack()


def test_steps_that_raise_are_no_steps():
    model, batch, loss = monitored.perceptron()
    optimizer = ModularOptimizer(model, batch, lr=0.1)
    monitor = TrainingMonitor(model, batch, every=1, optimizer=optimizer)
    before = copy.deepcopy(model.state_dict())
    for weight in (float("nan"), 1.0):
        optimizer.zero_grad()
        (weight * loss(model, batch)).backward()
        if weight != weight:
            with pytest.raises(ValueError, match="NaN"):
                optimizer.step()
            assert monitor.step == 0 and not monitor.history
            continue
        optimizer.step()
    moved = (model[0].weight - before["0.weight"]).detach().double()
    size = torch.linalg.svdvals(moved).max().item() * (6 / 16) ** 0.5
    assert monitor.latest["parameters"]["0.weight"]["update"] == pytest.approx(size, rel=1e-4) and monitor.step == 1


def test_checkpointed_forwards_are_seen_once():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(F.relu(checkpoint(self.inner, x, use_reentrant=False)))

    def make() -> Any:
        return Checkpointed(), torch.randn(3, 4), monitored.square_loss

    assert all(
        torch.equal(a, b)
        for a, b in zip(
            _run(make, OPTIMIZERS["SGD"], plain, 1, None), _run(make, OPTIMIZERS["SGD"], plain, None, None), strict=True
        )
    )
