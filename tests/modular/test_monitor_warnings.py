"""What a training monitor warns of: growth that precedes divergence, and nothing in runs that learn."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from tests.modular import monitored
from tests.seeds import crossed, seeded
from thunder_norm.errors import DeadWeightWarning, DivergenceWarning, NormMismatchError
from thunder_norm.modular import ModularOptimizer, TrainingMonitor
from thunder_norm.modular.monitoring.growth import Growth

_TEXT = [ord(c) - 97 if c != " " else 26 for c in "the quick brown fox jumps over the lazy dog " * 50]
_TOKENS = torch.tensor(_TEXT)
_IMAGES, _LABELS = (torch.tensor(t) for t in load_digits(return_X_y=True))
_IMAGES = _IMAGES.float() / 8 - 1


def _texts() -> tuple[torch.Tensor, ...]:
    return (torch.stack([_TOKENS[i : i + 12] for i in torch.randint(len(_TOKENS) - 12, (16,))]),)


def _digits() -> tuple[torch.Tensor, ...]:
    at = torch.randint(len(_IMAGES), (64,))
    return _IMAGES[at], _LABELS[at]


def _classes(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(images), labels)


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 24, batch_first=True), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.view(-1, 8, 8))[0][:, -1])


class LowRank(nn.Module):
    """Adapters of a frozen model, one of which starts at zero."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = _perceptron().requires_grad_(False), nn.Linear(64, 4), nn.Linear(4, 10)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def _small() -> nn.Module:
    """From so small a start that it grows exponentially at first."""
    model = _perceptron()
    for p in model.parameters():
        nn.init.normal_(p, std=1e-3)
    return model


def _convolutional() -> nn.Module:
    head = [nn.Flatten(), nn.Linear(288, 10)]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *head)


Run = tuple[Callable[[], nn.Module], Any, Any, Callable[[nn.Module], torch.optim.Optimizer]]


def _language(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


HEALTHY: dict[str, Run] = {
    "language model, AdamW": (
        lambda: monitored.LanguageModel(tokens=27),
        _texts,
        _language,
        lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3),
    ),
    "perceptron, SGD": (_perceptron, _digits, _classes, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
    "small start, Adam": (_small, _digits, _classes, lambda m: torch.optim.Adam(m.parameters(), lr=3e-3)),
    "convolutions, AdamW": (_convolutional, _digits, _classes, lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3)),
    "recurrent, RMSprop": (Recurrent, _digits, _classes, lambda m: torch.optim.RMSprop(m.parameters(), lr=3e-3)),
    "low rank adapters, AdamW": (
        LowRank,
        _digits,
        _classes,
        lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2),
    ),
    "perceptron, modular": (_perceptron, _digits, _classes, lambda m: ModularOptimizer(m, _IMAGES[:1], lr=0.3)),
}

DIVERGING: dict[str, tuple[Run, str]] = {
    "attention": (
        (lambda: monitored.LanguageModel(tokens=27), _texts, _language, lambda m: torch.optim.AdamW(m.parameters(), lr=0.15)),
        r"largest attention logit of head \d of 'blocks",
    ),
    "everything": (
        (_perceptron, _digits, lambda m, x, y: m(x).square().mean(), lambda m: torch.optim.SGD(m.parameters(), lr=100.0)),
        "norm of parameter",
    ),
}


def _said(run: Run, every: int, steps: int) -> tuple[list[str], float, float]:
    """The warnings of a run, its first loss and its last."""
    make, batches, loss, optimize = run
    torch.manual_seed(seeded(0))
    model = make()
    optimizer, values = optimize(model), []
    with warnings.catch_warnings(record=True) as caught, TrainingMonitor(model, every=every, optimizer=optimizer):
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            value = loss(model, *batches())
            value.backward()
            optimizer.step()
            values.append(value.item())
            if not math.isfinite(values[-1]):
                break
    return (
        [str(w.message) for w in caught if issubclass(w.category, DeadWeightWarning | DivergenceWarning)],
        values[0],
        values[-1],
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "every"), crossed(HEALTHY, [1, 10]))
def test_runs_that_learn_are_not_warned_of(name: str, every: int):
    said, first, last = _said(HEALTHY[name], every, 60 if every == 1 else 150)
    assert last < 0.9 * first and not said


@pytest.mark.parametrize("name", DIVERGING)
def test_runs_that_diverge_are_warned_of_before_they_do(name: str):
    run, expected = DIVERGING[name]
    said, _, _ = _said(run, 1, 40)
    assert re.search(expected, " ".join(said)) and "grew from" in said[0] and "steps (to step" in said[0]
    assert len(said) < 30  # not one at each step and for each parameter


def _record(step: int, **numbers: Any) -> dict[str, Any]:
    return {"step": step, "parameters": {}, "activations": {}, "attention": {}, "notes": [], **numbers}


def _judged(values: list[float], what: str) -> list[int]:
    """The samples at which something is said of a number with these values."""
    growth = Growth()
    found = []
    for i, v in enumerate(values):
        parts = {"parameters": {"w": {"norm": v}}, "activations": {"m": {"norm": v}}, "attention": {"a": [0.1, v]}}
        if growth.judge(_record(50 * i, **{what: parts[what]})):
            found.append(i)
    return found


@pytest.mark.parametrize("what", ["parameters", "activations"])
def test_powers_of_the_step_number_are_not_warned_of_and_exponentials_are(what: str):
    for power in (0.5, 1, 2, 3):
        for start in (0, 1, 5):
            # all numbers are below what is said at once: the law alone decides
            assert _judged([90.0 * ((start + k) / (start + 30)) ** power for k in range(30)], what) == []
    assert _judged([5.0 * 1.5**k for k in range(30)], what)
    assert _judged([200.0 * (1 + 0.1 * math.sin(k)) for k in range(30)], what) == []


def test_heads_are_warned_of_above_fifty_alone():
    assert _judged([2.0**k for k in range(6)], "attention") == []  # up to 32
    assert _judged([2.0**k for k in range(8)], "attention") == [6, 7]
    assert _judged([60.0, 61, 62, 63, 64, 65, 66], "attention") == []
    assert _judged([1.0, 700.0], "attention") == [1]


def test_it_is_said_again_when_it_has_doubled():
    assert _judged([5.0 * 1.3**k for k in range(20)], "attention") == [9, 12, 15, 18]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_said_once_until_it_is_finite(bad: float):
    model, batch, loss = monitored.perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = TrainingMonitor(model, batch, every=1, optimizer=optimizer)
    counts = []
    for is_bad in (False, True, True, False, True):
        optimizer.zero_grad()
        loss(model, batch).backward()
        if is_bad:
            gradient = model.get_parameter("4.weight").grad
            assert gradient is not None
            gradient[0, 0] = bad
        kept = model[4].weight.detach().clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        with torch.no_grad():
            model[4].weight.copy_(kept)
        counts.append(sum(issubclass(w.category, DivergenceWarning) and "the gradient of" in str(w.message) for w in caught))
        assert math.isnan(monitor.latest["parameters"]["4.weight"]["gradient"]) == is_bad
    assert counts == [0, 1, 0, 0, 1]


def test_warnings_are_switched_off():
    model, batch, loss = monitored.perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    TrainingMonitor(model, batch, every=1, optimizer=optimizer, warn=False)
    (loss(model, batch) * math.nan).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DivergenceWarning)
        optimizer.step()


def _watched(
    model: nn.Module, steps: int, monitor: TrainingMonitor, optimizer: torch.optim.Optimizer, start: int = 0
) -> list[str]:
    """What is said in some steps, whose batches are numbered."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(start, start + steps):
            torch.manual_seed(seeded(i))
            optimizer.zero_grad()
            _classes(model, *_digits()).backward()
            optimizer.step()
    return [str(w.message) for w in caught if issubclass(w.category, DeadWeightWarning | DivergenceWarning)]


@pytest.mark.parametrize("every", [1, 3])
def test_weights_behind_units_that_are_never_active_are_named_once(every):
    torch.manual_seed(seeded(0))
    model = _perceptron()
    with torch.no_grad():
        model[2].bias.fill_(-1e3)  # behind it nothing is active
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = TrainingMonitor(model, every=every, optimizer=optimizer)
    dead = [name for name, p in model.named_parameters() if name[0] in "02"] + ["4.weight"]
    assert _watched(model, 5 * every, monitor, optimizer) == []
    (text,) = _watched(model, 5 * every, monitor, optimizer)
    assert text.startswith(
        f"the gradient of {dead[0]!r} and of {len(dead) - 1} more was 0 in the last 6 samples (to step {5 * every})"
    )
    with torch.no_grad():
        model[2].bias.fill_(0.0)
    assert _watched(model, 2 * every, monitor, optimizer) == []
    with torch.no_grad():
        model[2].bias.fill_(-1e3)
    assert len(_watched(model, 8 * every, monitor, optimizer)) == 1


def test_what_starts_at_zero_and_what_all_have_is_not_dead():
    torch.manual_seed(seeded(0))
    adapted = LowRank()
    optimizer = torch.optim.SGD(adapted.parameters(), lr=0.1)
    assert _watched(adapted, 9, TrainingMonitor(adapted, every=1, optimizer=optimizer), optimizer) == []
    model = _perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainingMonitor(model, every=1, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeadWeightWarning)
        for _ in range(9):  # nothing is learnt any more
            optimizer.zero_grad()
            (0 * model(torch.randn(2, 64)).sum()).backward()
            optimizer.step()
    assert len(monitor.history) == 9


def test_a_resumed_monitor_records_and_warns_as_one_that_goes_on(tmp_path):
    def begun() -> tuple[nn.Module, torch.optim.Optimizer, TrainingMonitor]:
        torch.manual_seed(seeded(0))
        model = _perceptron()
        with torch.no_grad():
            model[0].bias.fill_(-1e3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return model, optimizer, TrainingMonitor(model, every=2, optimizer=optimizer)

    model, optimizer, monitor = begun()
    said = _watched(model, 18, monitor, optimizer)
    first, its_optimizer, stopped = begun()
    before = _watched(first, 7, stopped, its_optimizer)
    torch.save({"model": first.state_dict(), "monitor": stopped.state_dict()}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    second, its_optimizer, resumed = begun()
    second.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["monitor"])
    after = _watched(second, 11, resumed, its_optimizer, start=7)
    assert before + after == said and len(said) == 1
    assert resumed.step == 18 and list(resumed.history) == list(monitor.history)


def test_a_state_of_something_else_is_refused():
    monitor = TrainingMonitor(_perceptron(), every=2)
    with pytest.raises(NormMismatchError, match="this has momentum"):
        monitor.load_state_dict({"momentum": 1})
    state = monitor.state_dict() | {"history": [{"step": 0, "parameters": {"somewhere.weight": {}}}]}
    with pytest.raises(NormMismatchError, match="no parameter 'somewhere.weight'"):
        monitor.load_state_dict(state)
    assert monitor.step == 0 and not monitor.history
