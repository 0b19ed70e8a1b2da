"""What profiles and budgets say of a GPU before a program runs, beside what its allocator and its clock say when it does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_cases import EAGER, THUNDER, Amount, transformers_models
from thunder_norm.errors import CheckpointError
from thunder_norm.transforms import DEVICES, CheckpointTransform, NormTransform, measure_cpu, measure_gpu, profile
import thunder

BUDGETS = (0.8, 0.6)  # of the peak without regions


@dataclass(frozen=True)
class Prediction:
    """A quantity in a unit, as said before and as measured; None where it was not measured."""

    case: str
    candidate: str
    predicted: float
    measured: float | None
    unit: str

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": None if self.measured is None else self.predicted / self.measured}


class WithLoss(nn.Module):
    """A model and the mean square of its logits, in float32."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).logits.float().square().mean()


def peaks(amount: Amount) -> Iterator[Prediction]:
    """The most memory that is alive in forward and backward: of eager, of Thunder's program, and with regions for a budget; budgets that cannot be kept have no row."""
    for described in transformers_models(amount).values():
        torch.manual_seed(0)
        name, model, x = described.name, WithLoss(described.make()), described.example()
        resident = sum(t.nbytes for t in {*model.parameters(), *model.buffers(), x})

        def measured(f: Callable[[Any], Any], model: nn.Module = model, x: Any = x, resident: int = resident) -> float | None:
            def call() -> None:
                model.zero_grad(set_to_none=True)
                f(x).backward()

            found = amount.device.peak(call, lambda: model.zero_grad(set_to_none=True))
            return None if found is None else (found + resident) / 2**20

        eager = profile(model, x, backward=True, target="eager")
        yield Prediction(f"{name}: peak", EAGER, eager.peak_bytes / 2**20, measured(model), "MiB")
        jitted = thunder.jit(model, transforms=[NormTransform()])
        found = measured(jitted)  # before the profile, which is that of the program that ran
        plain = profile(jitted, x, backward=True).peak_bytes
        yield Prediction(f"{name}: peak", THUNDER, plain / 2**20, found, "MiB")
        for share in BUDGETS:
            transform = CheckpointTransform(memory_budget=int(share * plain))
            try:
                found = measured(thunder.jit(model, transforms=[NormTransform(), transform]))
            except CheckpointError:  # no choice of regions keeps to it
                continue
            assert transform.report is not None
            yield Prediction(
                f"{name}: peak", f"a budget of {share:.0%} of that", transform.report.peak_bytes / 2**20, found, "MiB"
            )


def speeds(amount: Amount) -> Iterator[Prediction]:
    """The two speeds of a roofline, of the datasheet and measured."""
    if not amount.device.is_cuda:
        found, preset = measure_cpu(size=256, repeats=1), DEVICES["CPU"]
    else:
        found = measure_gpu(amount.device.name, size=1024 if amount.is_quick else 8192)
        preset = next((d for name, d in DEVICES.items() if name in found.name), None)
        if preset is None:
            return
    assert not isinstance(found.peak_flops, float | int)
    for dtype, flops in found.peak_flops.items():
        name = str(dtype).removeprefix("torch.")
        yield Prediction(f"speeds of {preset.name}", f"products of {name}", preset.peak(dtype) / 1e12, flops / 1e12, "TFLOP/s")
    yield Prediction(f"speeds of {preset.name}", "a copy", preset.bandwidth / 1e12, found.bandwidth / 1e12, "TB/s")


def least_times(amount: Amount) -> Iterator[Prediction]:
    """The roofline of the device as measured, beside the time that eager takes: what it says is the least."""
    device = measure_gpu(amount.device.name) if amount.device.is_cuda else measure_cpu(size=256, repeats=1)
    for described in transformers_models(amount).values():
        torch.manual_seed(0)
        name, model, x = described.name, WithLoss(described.make()), described.example()
        for backward in (False, True):

            def call(model: nn.Module = model, x: Any = x, backward: bool = backward) -> None:
                with torch.set_grad_enabled(backward):
                    loss = model(x)
                if backward:
                    loss.backward()

            call()
            measured = min(amount.device.clock(call, 3) for _ in range(amount.rounds))
            least = profile(model, x, backward=backward, target="eager").roofline(device).seconds
            what = "forward and backward" if backward else "forward"
            yield Prediction(f"{name}: least time", f"{EAGER}, {what}", least * 1e3, measured * 1e3, "ms")


CASES: dict[str, Callable[[Amount], Iterator[Prediction]]] = {"speeds": speeds, "least_times": least_times, "peaks": peaks}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, case by case."""
    lines = []
    for case, of in itertools.groupby(rows, lambda row: row["case"]):
        lines.append(case)
        for row in of:
            measured = "" if row["measured"] is None else f"{row['measured']:12.4g} measured  {row['ratio']:6.3f} of it"
            lines.append(f"  {row['candidate']:<40} {row['predicted']:12.4g} {row['unit']:<8} predicted {measured}".rstrip())
    return "\n".join(lines)
