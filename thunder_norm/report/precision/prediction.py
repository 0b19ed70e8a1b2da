"""A report of a program in low precision: what each operation's roundings do to the results, next to what they did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from thunder_norm.core.tensors import NormedTensor
from thunder_norm.norms.lifts.parameters import call_with
from thunder_norm.norms.undisturbed import Surroundings
from thunder_norm.report.precision.arriving import movers, shares
from thunder_norm.report.precision.formats import Formats
from thunder_norm.report.precision.roundings import Emulated, Point, Recorder
from thunder_norm.report.rows import Findings, LowPrecision, Rounding
from thunder_norm.report.runs import Program, Run
from thunder_norm.trees import map_tensors

_INPUTS = "inputs"


def in_precision(program: Program, precision: torch.dtype | Mapping[str, torch.dtype]) -> Findings:
    """The report of a program, with what low precision adds at each operation and how much of it arrives.

    A rounding moves an entry by at most half the spacing of numbers there.  Through the sensitivities of the report's scope that bounds
    how far the results move; through the derivatives at the data, and with roundings that are independent and uniform between minus and
    plus half a spacing, it says how far they do (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019).

    Raises:
        NormMismatchError: no such format.
        NormMapKeyError: a pattern that fits no operation.
    """
    formats = Formats(precision)
    backings = [x.backing for x in tree_flatten((program.args, program.kwargs))[0] if isinstance(x, NormedTensor)]
    run = program.run(lambda: Recorder(formats, backings))
    formats.check_used()
    findings = run.findings(program.scope)
    found = _shares(run)
    rows = tuple(replace(r, rounding=found.get(i)) for i, r in enumerate(findings.rows))
    parameters = {name: replace(r, rounding=found.get(name)) for name, r in findings.parameters.items()}
    measured = _measured(program, run, formats, backings)
    total = LowPrecision(
        formats={pattern: str(dtype).removeprefix("torch.") for pattern, dtype in formats.by_pattern.items()},
        bound=sum(s.arriving for s in found.values()),
        typical=math.hypot(*(s.arriving_typical for s in found.values())),
        measured=measured.largest,
        measured_typical=measured.typical,
        measured_by=measured.by,
        inputs=found.get(_INPUTS),
    )
    return replace(findings, rows=rows, parameters=parameters, precision=total)


def _shares(run: Run) -> dict[object, Rounding]:
    """By the place of an operation among the rows, by the name of a parameter, and for the inputs."""
    recorder = run.environment.arithmetic
    assert isinstance(recorder, Recorder)
    points = recorder.points
    moved = movers(run.environment, run.inputs, points)
    gains = iter(run.gains([x for tensors in moved for x, _ in tensors]))
    inputs = {id(x.backing) for x in run.inputs}
    last = max(len(run.environment.noted) - 1, 0)

    def place(point: Point) -> object:
        name = run.environment.lifting.name_of(point.source)
        if name in run.environment.lifted:
            return name
        return _INPUTS if id(point.source) in inputs else min(point.row, last)

    return shares(recorder, moved, [[next(gains) for _ in tensors] for tensors in moved], [y.backing for y in run.results], place)


@dataclass(frozen=True)
class _Measured:
    """How far the results of a program are from those it has in the dtypes it was given in."""

    by: str
    largest: float | None = None
    typical: float | None = None


def _measured(program: Program, run: Run, formats: Formats, inputs: Sequence[torch.Tensor]) -> _Measured:
    dtype = formats.single
    if dtype is None:
        again = program.run(lambda: Emulated(formats, inputs))
        return _difference(run.results, [y.backing for y in again.results], "emulated: operands and results are rounded")
    name = str(dtype).removeprefix("torch.")
    try:
        results = _run_in(program, dtype)
    except Exception as e:  # noqa: BLE001 - whatever PyTorch has against it, a report is about more than this
        return _Measured(f"not measured: in {name} the program raises {type(e).__name__}: {str(e).partition(chr(10))[0]}")
    return _difference(run.results, [results[i] for i in run.places if i < len(results)], f"run by PyTorch in {name}")


def _run_in(program: Program, dtype: torch.dtype) -> list[Any]:
    """The leaves of what the program returns with all tensors in a dtype."""
    cast: dict[int, torch.Tensor] = {}

    def low(t: torch.Tensor) -> torch.Tensor:
        plain = t.backing if isinstance(t, NormedTensor) else t.detach()
        return cast.setdefault(id(t), plain.to(dtype) if plain.is_floating_point() else plain)

    tensors = {name: low(t) for name, t in program.tensors.items()}
    args, kwargs = map_tensors(low, (program.args, program.kwargs))
    with Surroundings(program.model, args, kwargs).undisturbed(), torch.no_grad():
        return tree_flatten(call_with(program.model, tensors, args, kwargs))[0]


def _difference(exact: Sequence[NormedTensor], found: Sequence[Any], by: str) -> _Measured:
    if [y.shape for y in exact] != [getattr(y, "shape", None) for y in found]:
        return _Measured("not measured: the program returns something else in low precision")
    largest = squares = 0.0
    for y, low in zip(exact, found, strict=True):
        one, other = low.detach().to(y.backing.dtype), y.backing.detach()
        is_same = (one == other) | one.isnan() & other.isnan()  # infinities of masks, too
        difference = torch.where(is_same, 0.0, one - other)
        largest += type(y).of(difference, y.elem_dims).norm_size.item()
        squares += difference.double().square().mean().item() if difference.numel() else 0.0
    return _Measured(by, largest, math.sqrt(squares))
