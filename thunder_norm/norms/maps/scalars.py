"""Norm arithmetic on numbers: a compiled computation of scalars as Python functions on floats, connected to autograd.

A tensor costs a microsecond to make and another to read.  What a norm map computes are a few hundred numbers, so they become
tensors at both ends alone; how they lie in the tensors that a call has is the `Layout`.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from thunder_norm.norms.higher_order import Replay
from thunder_norm.norms.scalar_fusion import as_function_of_floats

_item = torch.Tensor.item


class Layout(Protocol):
    """Where the inputs of a computation lie in the tensors that carry them."""

    def values(self, carriers: Sequence[torch.Tensor]) -> Sequence[float]:
        """The inputs as numbers, in order."""
        ...

    def inputs(self, carriers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs as 0-dim tensors, in order, with a graph to their carriers."""
        ...

    def gradients(self, found: Sequence[float | None], carriers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """The gradient of each carrier, from those of the inputs."""
        ...


class OneByOne:
    """Each input is a 0-dim tensor of its own."""

    def values(self, carriers: Sequence[torch.Tensor]) -> Sequence[float]:
        """The inputs as numbers."""
        return tuple(map(_item, carriers))

    def inputs(self, carriers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The carriers themselves."""
        return carriers

    def gradients(self, found: Sequence[float | None], carriers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """0-dim tensors, all made at once."""
        tensors = iter(_tensors([g for g in found if g is not None]))
        return [None if g is None else next(tensors) for g in found]


class FromVectors:
    """The inputs are entries of vectors, which are the first carriers, or 0-dim tensors, which follow.

    Args:
        order: for each input its position among the entries of all vectors; for those that are no entries, negative numbers up to -1.
    """

    def __init__(self, order: Sequence[int]):
        self._order = tuple(order)
        self._others = [i for i, position in enumerate(order) if position < 0]  # the inputs that are carriers themselves

    def values(self, carriers: Sequence[torch.Tensor]) -> Sequence[float]:
        """The inputs as numbers: each carrier is read once."""
        entries: list[float] = []
        for c in carriers:
            entries += c.tolist() if c.ndim else [c.item()]
        return tuple([entries[i] for i in self._order])

    def inputs(self, carriers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The entries of the carriers."""
        entries = [e for c in carriers for e in (c.unbind() if c.ndim else (c,))]
        return [entries[i] for i in self._order]

    def gradients(self, found: Sequence[float | None], carriers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """One vector for each vector, 0 where an entry is no input, and what was found for each of the others."""
        lengths = [len(c) for c in carriers if c.ndim]
        entries = [0.0] * sum(lengths)
        for i, g in zip(self._order, found, strict=True):
            if g is not None and i >= 0:
                entries[i] += g  # one entry may be several inputs
        gradients: list[torch.Tensor | None] = []
        for length in lengths:
            gradients.append(_vector(entries[:length]))
            del entries[:length]
        return gradients + [None if found[i] is None else _scalar(found[i]) for i in self._others]


class Scalars:
    """A compiled computation all of whose inputs, outputs and intermediates are numbers."""

    def __init__(self, forward: Callable, backward: Callable | None):
        self.forward = forward
        self.backward = backward

    @staticmethod
    def of(entry: Any) -> Scalars | None:
        """That of Thunder's cache entry, or None if it handles anything but CPU scalars."""
        forward = as_function_of_floats(entry.computation_traces[-1])
        backward = None if entry.backward_fn is None else as_function_of_floats(entry.backward_traces[-1])
        if forward is None or entry.backward_fn is not None and backward is None:
            return None
        return Scalars(forward, backward)

    def __call__(self, replay: Replay, layout: Layout, carriers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run on the tensors that carry the inputs, connected to autograd if there is a backward."""
        if self.backward is not None:
            return RunScalars.apply(self, replay, layout, *carriers)
        return _tensors(self.forward(*layout.values(carriers)))


class RunScalars(torch.autograd.Function):
    """`RunCompiled` for `Scalars`: what is saved for the backward are numbers."""

    @staticmethod
    def forward(ctx: Any, scalars: Scalars, replay: Replay, layout: Layout, *carriers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs for the inputs in `carriers`."""
        values = layout.values(carriers)
        for_autograd, saved = scalars.forward(*values)
        ctx.scalars, ctx.replay, ctx.layout, ctx.saved, ctx.values = scalars, replay, layout, saved, values
        ctx.carriers = carriers  # none of them is an output: no cycle
        return _tensors(for_autograd["output"])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        """The compiled gradients, or torch's own with a graph if one is asked for.

        Raises:
            RuntimeError: a graph is asked for, and an input was changed in place meanwhile.
        """
        if not torch.is_grad_enabled():
            found = ctx.scalars.backward(ctx.saved, tuple(map(_item, grads)))
            return (None, None, None, *ctx.layout.gradients(found, ctx.carriers))
        if _bits(ctx.layout.values(ctx.carriers)) != _bits(ctx.values):
            raise RuntimeError(
                "a norm_size was modified by an inplace operation after the norm that is differentiated was computed"
            )
        return (None, None, None, *ctx.replay.gradients(ctx.carriers, grads, ctx.layout.inputs))


def _bits(values: Sequence[float]) -> bytes:
    """What tells numbers apart: NaN is itself."""
    return struct.pack(f"{len(values)}d", *values)


def _tensors(values: Sequence[float]) -> Sequence[torch.Tensor]:
    """0-dim float64 tensors, all made at once."""
    return (_scalar(values[0]),) if len(values) == 1 else _vector(values).unbind()


def _scalar(value: float) -> torch.Tensor:
    return torch.scalar_tensor(value, dtype=torch.float64, device="cpu")


def _vector(values: Sequence[float]) -> torch.Tensor:
    """A float64 tensor; `torch.tensor` looks at each number three times."""
    return torch.frombuffer(array.array("d", values), dtype=torch.float64) if values else torch.zeros(0, dtype=torch.float64)
