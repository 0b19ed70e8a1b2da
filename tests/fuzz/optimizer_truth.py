"""What is known of the parameters of a drawn model by construction, and the formulas of steepest descent under their norms, in numpy and float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Cut:
    """Rows of a parameter that are one block; its role, None where it is not known, and the rows of each of its heads."""

    role: str | None
    rows: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Known:
    """What is known of one parameter.

    Attributes:
        role: as `find_roles` names it; None where a program may be read in two ways.
        norm: "matrix" (singular values), "rows" (RMS over the last dimension), "entries" (the largest one), "" if it is not known.
        axes: of a matrix, those of its outputs and inputs; of a vector the one that is cut.
        groups: of a kernel.
        is_kernel: whether dimensions that are no axes are taps.
        cuts: its blocks; none if it is one.
        mass: "heavy", "light", "added", "tokens", "attention", "gated", "places", or "" if it is not known.
        is_first: whether it multiplies the program's input.
        is_trained: whether it is not frozen.
    """

    role: str | None
    norm: str = ""
    axes: tuple[int, int] = (0, 1)
    groups: int = 1
    is_kernel: bool = False
    cuts: tuple[Cut, ...] = ()
    mass: str = ""
    is_first: bool = False
    is_trained: bool = True

    def pieces(self, blocks: Any) -> tuple[tuple[int, ...], ...]:
        """The rows that are stepped by themselves, with ``blocks=`` of the norm."""
        if blocks is False or self.groups > 1:
            return ()
        found: list[tuple[int, ...]] = []
        for cut in self.cuts:
            found += cut.heads if blocks == "heads" and cut.role in ("query", "key") and len(cut.heads) > 1 else (cut.rows,)
        return tuple(found)

    def units(self, shape: tuple[int, ...], blocks: Any) -> Iterator[np.ndarray]:
        """The places of every matrix or vector that the norm is the largest of."""
        at, pieces = np.arange(math.prod(shape)).reshape(shape), self.pieces(blocks)
        if self.norm == "entries":
            yield from at.reshape(-1, 1)
        elif self.norm == "rows":
            yield from (at[list(rows)] for rows in pieces) if pieces else at.reshape(-1, shape[-1] if shape else 1)
        else:
            for one in np.moveaxis(at, self.axes, (-2, -1)).reshape(-1, *(shape[axis] for axis in self.axes)):
                yield from (one[list(rows)] for rows in pieces) if pieces else np.split(one, self.groups)

    def axes_of(self, ndim: int) -> tuple[int, ...]:
        """The axes of a matrix of so many dimensions."""
        return tuple(axis % ndim for axis in self.axes)

    def taps(self, shape: tuple[int, ...]) -> int:
        """By how many a kernel's matrices share the norm."""
        return math.prod(n for axis, n in enumerate(shape) if axis not in self.axes) if self.is_kernel else 1

    def each(self, t: np.ndarray, blocks: Any, f: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """A tensor with `f` of each unit in its place."""
        found = t.flatten()
        for at in self.units(t.shape, blocks):
            found[at] = f(t.reshape(-1)[at])
        return found.reshape(t.shape)

    def steepest(self, t: np.ndarray, blocks: Any) -> np.ndarray:
        """The step of norm 1."""
        return self.each(t, blocks, lambda unit: steepest(unit) / self.taps(t.shape))

    def nearest(self, t: np.ndarray, blocks: Any) -> np.ndarray:
        """The tensor of norm at most 1."""
        return self.each(t, blocks, lambda unit: nearest(unit, 1 / self.taps(t.shape)))

    def size(self, t: np.ndarray, blocks: Any) -> float:
        """The norm."""
        return max((size(t.reshape(-1)[at]) for at in self.units(t.shape, blocks)), default=0.0) * self.taps(t.shape)

    @property
    def noise_axes(self) -> tuple[int, ...] | None:
        """Of noise adaptation: the axes over which the squares of a unit are summed; None of what takes whole steps."""
        if self.norm != "matrix":
            return (-1,) if self.norm == "rows" else ()
        if self.role in ("head", "tied"):
            return self.axes[1:]
        return (0, 1, 2, 3) if self.is_first else None


def size(unit: np.ndarray) -> float:
    """Of a matrix from RMS to RMS, of a vector the RMS."""
    if unit.ndim == 2:
        return float(np.linalg.norm(unit, 2) * math.sqrt(unit.shape[1] / unit.shape[0]))
    return float(np.sqrt(np.mean(unit**2)))


def steepest(unit: np.ndarray) -> np.ndarray:
    """Of a matrix ``U V^T sqrt(out / in)``, of a vector itself over its RMS."""
    if unit.ndim == 2:
        u, s, v = np.linalg.svd(unit, full_matrices=False)
        return u @ ((s > 1e-10 * s[0])[:, None] * v) * math.sqrt(unit.shape[0] / unit.shape[1])
    length = size(unit)
    return unit / length if length else unit * 0


def nearest(unit: np.ndarray, limit: float) -> np.ndarray:
    """The nearest of norm at most `limit`."""
    if unit.ndim == 2:
        u, s, v = np.linalg.svd(unit, full_matrices=False)
        return u @ (np.minimum(s, limit * math.sqrt(unit.shape[0] / unit.shape[1]))[:, None] * v)
    return unit * limit / max(limit, size(unit))


@dataclass
class Followed:
    """One parameter in training by the formulas of `ModularOptimizer`."""

    axes: tuple[int, ...] | None  # along which noise is summed, if it is adapted to
    steepest: Callable[[np.ndarray], np.ndarray]
    nearest: Callable[[np.ndarray], np.ndarray]
    target: float
    value: np.ndarray
    buffer: np.ndarray | None = None
    weight: float | None = None  # the sum of the weights that the buffer is an average by, while noise is adapted to
    average: np.ndarray | float = 0.0
    average_weight: float = 0.0
    steps: list[np.ndarray] = field(default_factory=list)

    def step(self, g: np.ndarray, options: Mapping[str, Any]) -> None:
        """Momentum, noise, decay, the steepest step, the projection."""
        size, momentum = float(options["lr"]) * self.target, float(options["momentum"])
        before, direction, of_direction = self.buffer, g, 1.0
        if momentum:
            self.buffer = momentum * (0 if before is None else before) + (1 - momentum) * g
            direction = momentum * self.buffer + (1 - momentum) * g if options["nesterov"] else self.buffer
        factor: np.ndarray | float = 1.0
        if options["noise_adaptation"] is None or self.axes is None:
            self.weight = None
        else:
            decay = float(options["noise_adaptation"])
            if momentum:
                past = (0.0 if before is None else 1.0) if self.weight is None else self.weight
                self.weight = momentum * past + 1 - momentum
                of_direction = momentum * self.weight + 1 - momentum if options["nesterov"] else self.weight
            self.average = decay * self.average + (1 - decay) * _squares(g, self.axes)
            self.average_weight = decay * self.average_weight + 1 - decay
            signal, noise = _squares(direction, self.axes) / of_direction**2, self.average / self.average_weight
            factor = np.minimum(1, np.sqrt(np.divide(signal, noise, out=np.ones_like(signal), where=noise > 0)))
        self.steps.append(-size * factor * self.steepest(direction))
        self.value = (1 - size * float(options["weight_decay"])) * self.value + self.steps[-1]
        if options["project"] and size:
            self.value = self.nearest(self.value)


def in_training(known: Known, blocks: Any, target: float, value: np.ndarray) -> Followed:
    """A parameter of which this is known, in training."""
    axes = None if known.noise_axes is None else tuple(axis for axis in known.noise_axes if axis < value.ndim)
    return Followed(axes, partial(known.steepest, blocks=blocks), partial(known.nearest, blocks=blocks), target, value)


def _squares(t: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return np.sum(abs(t) ** 2, axes, keepdims=True) if axes else abs(t) ** 2
