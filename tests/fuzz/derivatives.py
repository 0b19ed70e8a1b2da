"""Derivatives: functions of one to five operations under nests of one to four transforms, against `torch.func`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .derivative_programs import Derivative, Step
from .level_writing import Level, is_inexact
from .nests import DIFFERENTIATES, INNER, ORDERS
from .operations import COMPLEX, LEAVING, REAL, Operation
from .oracles import OTHER_ORDER, TORCH
from .truth import Truth, check_fit, difference, executed, in_double
from .writing import Redraw, Writer, tensor_text

_HIGHEST_ORDER = 4
_SHAPES = ((3,), (2, 3), (3, 3), (2,), (2, 2), (), (2, 1, 3), (4,), (1, 3), (3, 2))


def draw(random: random.Random) -> Derivative:
    """A program that some oracle can run, at a point where it is smooth."""
    for _ in range(200):
        try:
            program = _levelled(_function(random), random)
            _check_smooth(program)
            return program
        except Redraw:
            continue
    raise AssertionError("200 programs in a row could not be run by any oracle")


def _function(pick: random.Random) -> Derivative:
    dtype = pick.choices(["torch.float64", "torch.float32", "torch.complex128"], [75, 15, 10])[0]
    args = {"x0": tensor_text(pick.choice(_SHAPES), pick, dtype)}
    values = executed([f"x0 = {args['x0']}"], TORCH)
    values = {"x0": values["x0"]}
    constants: dict[str, str] = {}
    steps: list[Step] = []
    for _ in range(pick.choice([1, 1, 2, 2, 3, 4, 5])):
        _add_step(args, constants, steps, values, pick, dtype)
    last = steps[-1].target
    if values[last].is_complex() and pick.random() < 0.8:
        _add_step(args, constants, steps, values, pick, dtype, LEAVING)
        last = steps[-1].target
    results = [last]
    container = pick.choices(["tensor", "tuple", "list", "dict", "pair", "nested"], [70, 8, 5, 8, 4, 5])[0]
    if container != "tensor":
        results = [pick.choice([s.target for s in steps] + list(args)), last]
    structure = "plain"
    if pick.random() < 0.25:
        structure = pick.choice(["dict", "tuple", "list", "module", "dict", "pair"])
    if structure == "pair" and len(args) != 2 or structure == "module" and (len(args) < 2 or dtype == "torch.complex128"):
        structure = "plain"
    return Derivative(
        tuple(args.items()), tuple(constants.items()), tuple(steps), tuple(results), (), structure, container, dtype
    )


def _add_step(
    args: dict[str, str],
    constants: dict[str, str],
    steps: list[Step],
    values: dict[str, Any],
    pick: random.Random,
    dtype: str,
    among: Sequence[Operation] | None = None,
) -> None:
    """Add an operation of the value so far."""
    for _ in range(60):
        x = steps[-1].target if steps and pick.random() < 0.85 else pick.choice(list(values))
        if among is not None:
            x = steps[-1].target
        value = values[x]
        if not is_inexact(value) or value.numel() > 60:
            continue
        family = among or pick.choice(COMPLEX if value.is_complex() else _weighted(REAL, pick))
        operation = pick.choice(family)
        target = f"t{len(steps)}"
        names = {*args, *constants, *values}
        try:
            writer = Writer(x, {n: v for n, v in values.items() if isinstance(v, torch.Tensor)}, len(args), names, pick, dtype)
            lines = writer.write(pick.choice(operation.spellings), target)
            new = [f"{n} = {t}" for n, t in writer.new_args.items()]
            for n, t in writer.new_constants.items():
                new += t.splitlines() if "\n" in t else [f"{n} = {t}"]
            made = executed(new, TORCH)
            found = executed(lines, TORCH | values | made)[target]
            if not isinstance(found, torch.Tensor) or found.numel() > 60 or not is_inexact(found):
                continue
            check_fit(found)
        except Exception:  # noqa: BLE001, S112 - it does not fit this value; another one will
            continue
        args |= writer.new_args
        constants |= writer.new_constants
        values[target] = found
        values |= {n: made[n] for n in (*writer.new_args,)}
        steps.append(Step(operation.label, target, tuple(lines), x))
        return
    raise Redraw


def _weighted(families: tuple, pick: random.Random) -> tuple:
    """Families as often as they have operations, the large ones a little less."""
    return tuple(pick.choices(families, [len(f) ** 0.7 for f in families], k=1))


def _levelled(program: Derivative, pick: random.Random) -> Derivative:
    """The program under a nest of one to four levels, at least one of which differentiates."""
    depth = pick.choice([1, 2, 2, 3, 3, 4])
    for _ in range(12):
        if len(program.levels) == depth:
            break
        is_last = len(program.levels) == depth - 1
        kinds = [k for k in INNER for _ in range(1 if k in ("both orders", "custom_vjp") else 2)]
        kind = pick.choice([*kinds, "autograd", "autograd"] if is_last else kinds)
        if is_last and not any(level.kind in DIFFERENTIATES for level in program.levels):
            kind = pick.choice(DIFFERENTIATES)
        candidate = replace(program, levels=(*program.levels, Level(kind, pick.randrange(10**6))))
        if sum(ORDERS[level.kind] for level in candidate.levels) > _HIGHEST_ORDER:
            continue
        try:
            data, lines = candidate.written
            check_fit(Truth(data, lines, candidate.dtype).first)
        except Redraw:
            continue
        program = candidate
    if not any(level.kind in DIFFERENTIATES for level in program.levels):
        raise Redraw
    return program


def _check_smooth(program: Derivative) -> None:
    """Refuse a program at a kink, a tie or a pole: where moving the arguments a little changes the result a lot.

    Raises:
        Redraw: it is.
    """
    data, lines = program.written
    names = ", ".join(name for name, _ in program.args)
    results = []
    for shift in (0.0, 1e-7, -1e-7):
        moved = [f"{names}, = [v * (1 + {shift}) + {shift} * torch.rand(v.shape, dtype=v.dtype) for v in ({names},)]"]
        for transforms in (TORCH, OTHER_ORDER):
            try:
                results.append(executed([*in_double(data), *moved, *in_double(lines)], transforms)["result"])
            except Exception:  # noqa: BLE001, S112
                continue
            break
    if len(results) < 3 or any(difference(r, results[0], 1e-4, dtypes=False) is not None for r in results[1:]):
        raise Redraw
