"""Where the records of a training monitor go, and which steps have one."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.modular import monitored
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import TrainingMonitor


def _trained(monitor: TrainingMonitor, model: nn.Module, batch: torch.Tensor, *optimizers: torch.optim.Optimizer, steps: int = 4):
    for _ in range(steps):
        monitored.square_loss(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _made(**options: Any) -> tuple[TrainingMonitor, nn.Sequential, torch.Tensor, torch.optim.Optimizer]:
    model, batch, _ = monitored.perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingMonitor(model, batch, optimizer=optimizer, **options), model, batch, optimizer


class Writer:
    def __init__(self):
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))


class Metrics:
    def __init__(self):
        self.rows: list[tuple[str, float, int]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows += [(name, value, step) for name, value in metrics.items()]


class Wandb(Metrics):
    log_metrics = None  # type: ignore[assignment]

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        Metrics.log_metrics(self, data, step)


def test_loggers_get_the_numbers_of_every_record():
    monitor, model, batch, optimizer = _made(every=2)
    writer, metrics, run, function = Writer(), Metrics(), Wandb(), Wandb()
    monitor.log_to(writer, "m/").log_to(metrics, "m/").log_to(run, "m/").log_to(function.log, "m/")
    _trained(monitor, model, batch, optimizer)
    assert [r["step"] for r in monitor.history] == [0, 2] and monitor.step == 4
    assert writer.rows == metrics.rows == run.rows == function.rows
    for record in monitor.history:
        given = {name: value for name, value, step in writer.rows if step == record["step"]}
        for name, numbers in record["parameters"].items():
            for what, value in numbers.items():
                assert given.pop(f"m/parameters/{name}/{what}") == value
        for name, numbers in record["activations"].items():
            for what, value in numbers.items():
                assert given.pop(f"m/activations/{name}/{what}") == value
        assert not given


def test_tensorboard_takes_them(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    monitor, model, batch, optimizer = _made(every=2)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        monitor.log_to(writer)
        _trained(monitor, model, batch, optimizer)
    assert list(tmp_path.iterdir())


def test_a_dataframe_has_a_row_for_each_record():
    monitor, model, batch, optimizer = _made(every=1, keep=3)
    _trained(monitor, model, batch, optimizer, steps=5)
    frame = monitor.dataframe()
    assert list(frame.index) == [2, 3, 4] and frame.index.name == "step"
    assert frame["parameters/0.weight/norm"].tolist() == [r["parameters"]["0.weight"]["norm"] for r in monitor.history]
    assert not frame.isna().any().any()


def test_an_error_of_a_logger_is_raised_and_the_record_kept():
    def refuse(numbers: dict[str, float], step: int) -> None:
        raise OSError("disk full")

    monitor, model, batch, optimizer = _made(every=1)
    monitor.log_to(refuse)
    for n in (1, 2):
        with pytest.raises(OSError, match="disk full"):
            _trained(monitor, model, batch, optimizer, steps=1)
        assert len(monitor.history) == monitor.step == n


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_live_table_is_for_terminals(is_terminal: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("THUNDER_NORM_PROGRESS", raising=False)
    monkeypatch.setenv("COLUMNS", "140")
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monitor, model, batch, optimizer = _made(every=1)
    stream.truncate(0)
    with monitor.live():
        _trained(monitor, model, batch, optimizer, steps=2)
    text = stream.getvalue()
    assert ("update / norm" in text and "0.weight" in text and "norm / bound" in text) if is_terminal else not text
    assert not monitor._subscribers


def test_after_remove_nothing_is_watched():
    monitor, model, batch, optimizer = _made(every=1)
    with monitor:
        _trained(monitor, model, batch, optimizer, steps=2)
    _trained(monitor, model, batch, optimizer, steps=2)
    assert len(monitor.history) == monitor.step == 2
    monitor.attach(optimizer)
    _trained(monitor, model, batch, optimizer, steps=1)
    assert len(monitor.history) == monitor.step == 3


def test_several_optimizers_make_one_step():
    model, batch, _ = monitored.perceptron()
    one, two = torch.optim.SGD(model[:1].parameters(), lr=0.1), torch.optim.AdamW(model[1:].parameters(), lr=0.1)
    monitor = TrainingMonitor(model, batch, every=1, optimizer=[one, two])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _trained(monitor, model, batch, one, two, steps=1)
    assert monitor.step == 1
    for name, p in model.named_parameters():
        moved = (p.detach() - before[name]).double()
        numbers = monitor.latest["parameters"][name]
        assert "gradient" in numbers
        if p.ndim == 2:
            size = torch.linalg.svdvals(moved).max().item() * (p.shape[1] / p.shape[0]) ** 0.5
            assert numbers["update"] == pytest.approx(size, rel=1e-4)


@pytest.mark.filterwarnings("error::thunder_norm.errors.MissingBoundsWarning")  # what derives norms anew is no forward to watch
def test_frozen_tied_and_added_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.inner, self.head = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 5, bias=False)
            self.head.weight = self.table.weight
            self.inner.bias.requires_grad_(False)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(self.table(i)))

    model, batch = Tied(), torch.arange(4)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    monitor = TrainingMonitor(model, batch, every=1, optimizer=optimizer)
    _trained(monitor, model, batch, optimizer, steps=1)
    found = monitor.latest["parameters"]
    assert set(found) == {"table.weight", "inner.weight", "inner.bias"}
    assert set(found["inner.bias"]) == {"norm"} and "update" in found["table.weight"]
    model.inner = nn.Sequential(model.inner, nn.Linear(8, 8))  # type: ignore[assignment]
    optimizer.add_param_group({"params": list(model.inner[1].parameters())})  # type: ignore[index]
    _trained(monitor, model, batch, optimizer, steps=2)
    found = monitor.latest["parameters"]
    assert set(found) == {"table.weight", "inner.0.weight", "inner.0.bias", "inner.1.weight", "inner.1.bias"}
    assert found["inner.1.weight"]["update"] > 0 and found["inner.1.weight"]["stable_rank"] > 1
    assert "inner.1" in monitor.latest["activations"]


def test_a_step_without_a_forward_is_noted():
    monitor, model, batch, optimizer = _made(every=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert "no forward" in monitor.latest["notes"][0]
    with pytest.raises(NormMismatchError, match="optimizer"):
        monitor.attach(None)
