"""Norm arithmetic on numbers: a compiled computation of scalars as Python functions on floats, connected to autograd.

A tensor costs a microsecond to make and another to read.  What a norm map computes are a few hundred numbers, so they become
tensors at both ends alone; how they lie in the tensors that a call has is the `Layout`.  On a GPU each operation would be a kernel:
numbers come from there at once, and go back at once.
"""

from __future__ import annotations

import array
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from thunder_norm.norms.higher_order import Replay
from thunder_norm.norms.scalar_fusion import as_function_of_floats
from thunder.core import devices
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

_item = torch.Tensor.item


class Layout(Protocol):
    """Where the inputs of a computation lie in the tensors that carry them."""

    def values(self, carriers: Sequence[torch.Tensor], entries: list[float]) -> Sequence[float]:
        """The inputs as numbers, in order; `entries` are those of the first carriers, as far as somebody has read them."""
        ...

    def inputs(self, carriers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs as 0-dim tensors, in order, with a graph to their carriers."""
        ...

    def gradients(self, found: Sequence[float | None], carriers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """The gradient of each carrier, from those of the inputs."""
        ...


class OneByOne:
    """Each input is a 0-dim tensor of its own."""

    def values(self, carriers: Sequence[torch.Tensor], entries: list[float]) -> Sequence[float]:
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
        self._in_order = _all_of(self._order)
        self._of_input: dict[int, Callable | None] = {}  # by the number of entries: see `_inverse`

    def values(self, carriers: Sequence[torch.Tensor], entries: list[float]) -> Sequence[float]:
        """The inputs as numbers: each carrier is read once."""
        if not entries:
            entries = [e for c in carriers if c.ndim for e in c.tolist()]
        return self._in_order([*entries, *[c.item() for c in carriers if not c.ndim]])

    def inputs(self, carriers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The entries of the carriers."""
        entries = [e for c in carriers for e in (c.unbind() if c.ndim else (c,))]
        return [entries[i] for i in self._order]

    def gradients(self, found: Sequence[float | None], carriers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """One vector for each vector, 0 where an entry is no input, and what was found for each of the others."""
        lengths = [len(c) for c in carriers if c.ndim]
        entries = self._of_entries(found, sum(lengths))
        gradients: list[torch.Tensor | None] = []
        for length in lengths:
            gradients.append(_vector(entries[:length]))
            entries = entries[length:]
        return gradients + [None if found[i] is None else _scalar(found[i]) for i in self._others]

    def _of_entries(self, found: Sequence[float | None], number: int) -> Sequence[float]:
        """The gradient of each entry."""
        if number not in self._of_input:
            self._of_input[number] = _inverse(self._order, number)
        of_input = self._of_input[number]
        if of_input is not None and None not in found:
            return of_input([*found, 0.0])
        entries = [0.0] * number
        for i, g in zip(self._order, found, strict=True):
            if g is not None and i >= 0:
                entries[i] += g  # one entry may be several inputs
        return entries


def _all_of(positions: Sequence[int]) -> Callable[[Sequence[float]], Sequence[float]]:
    """A function that picks what is at these positions."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda values: tuple([values[i] for i in positions])


def _inverse(order: Sequence[int], number: int) -> Callable[[Sequence[float]], Sequence[float]] | None:
    """From what belongs to each input, and what belongs to none, to what belongs to each of `number` entries; None if one is several."""
    used = [i for i in order if i >= 0]
    if len(set(used)) < len(used):
        return None
    inputs = {entry: i for i, entry in enumerate(order)}
    return _all_of([inputs.get(entry, len(order)) for entry in range(number)])


class Scalars:
    """A compiled computation all of whose inputs, outputs and intermediates are numbers.

    Args:
        forward: of numbers.
        backward: of what was saved, and of cotangents; None if nothing is differentiated.
        devices: where the outputs are; None if no input and no output is on a GPU.
    """

    def __init__(self, forward: Callable, backward: Callable | None, devices: Sequence[torch.device] | None = None):
        self.forward = forward
        self.backward = backward
        self.devices = devices

    @staticmethod
    def of(entry: Any) -> Scalars | None:
        """That of Thunder's cache entry, or None if it handles anything but scalars."""
        trace = entry.computation_traces[-1]
        forward = as_function_of_floats(trace)
        backward = None if entry.backward_fn is None else as_function_of_floats(entry.backward_traces[-1])
        if forward is None or entry.backward_fn is not None and backward is None:
            return None
        return Scalars(forward, backward, _devices(trace))

    def __call__(
        self, replay: Replay, layout: Layout, entries: list[float], carriers: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Run on the tensors that carry the inputs, connected to autograd if there is a backward."""
        if self.backward is not None:
            return RunScalars.apply(self, replay, layout, entries, *carriers)
        return self.placed(self.forward(*layout.values(self.here(carriers), entries)))

    def here(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors, to be read."""
        return tensors if self.devices is None else _moved(tensors, [_CPU] * len(tensors))

    def placed(self, values: Sequence[float]) -> Sequence[torch.Tensor]:
        """The outputs, where they belong."""
        found = _tensors(values)
        return found if self.devices is None else tuple(_moved(found, self.devices))


class RunScalars(torch.autograd.Function):
    """`RunCompiled` for `Scalars`: what is saved for the backward are numbers."""

    @staticmethod
    def forward(
        ctx: Any, scalars: Scalars, replay: Replay, layout: Layout, entries: list[float], *carriers: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The outputs for the inputs in `carriers`."""
        values = layout.values(scalars.here(carriers), entries)
        for_autograd, saved = scalars.forward(*values)
        ctx.scalars, ctx.replay, ctx.layout, ctx.saved, ctx.values = scalars, replay, layout, saved, values
        ctx.carriers = carriers  # none of them is an output: no cycle
        return scalars.placed(for_autograd["output"])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        """The compiled gradients, or torch's own with a graph if one is asked for.

        Raises:
            RuntimeError: a graph is asked for, and an input was changed in place meanwhile.
        """
        scalars, carriers = ctx.scalars, ctx.carriers
        if not torch.is_grad_enabled():
            found = ctx.layout.gradients(scalars.backward(ctx.saved, tuple(map(_item, scalars.here(grads)))), carriers)
            return (None, None, None, None, *(found if scalars.devices is None else _moved(found, [c.device for c in carriers])))
        if _bits(ctx.layout.values(scalars.here(carriers), [])) != _bits(ctx.values):
            raise RuntimeError(
                "a norm_size was modified by an inplace operation after the norm that is differentiated was computed"
            )
        return (None, None, None, None, *ctx.replay.gradients(carriers, grads, ctx.layout.inputs))


_CPU = torch.device("cpu")


def _devices(trace: TraceCtx) -> Sequence[torch.device] | None:
    """Where the outputs of a computation are, if not all that it takes and returns is on the CPU."""
    returned = trace.bound_symbols[-1].args[0]
    outputs = returned["output"] if isinstance(returned, dict) else returned
    found = [devices.to_torch_device(p.device) for p in outputs]
    taken = (p for b in trace.bound_symbols if b.sym.id is PrimIDs.UNPACK_TRIVIAL for p in b.flat_proxy_outs)
    given = {p.device.devicetype for p in taken if isinstance(p, TensorProxy)}
    return None if {d.type for d in found} <= {"cpu"} and given <= {devices.DeviceType.CPU} else found


def _moved(tensors: Sequence[torch.Tensor | None], places: Sequence[torch.device]) -> list[torch.Tensor | None]:
    """Tensors on other devices; 0-dim ones that have the same way go together."""
    found = list(tensors)
    together: dict[tuple[torch.device, torch.device], list[int]] = {}
    for i, (t, place) in enumerate(zip(tensors, places, strict=True)):
        if t is None or t.device == place:
            continue
        if t.ndim:
            found[i] = t.to(place)
        else:
            together.setdefault((t.device, place), []).append(i)
    for (_, place), positions in together.items():
        for i, t in zip(positions, torch.stack([found[i] for i in positions]).to(place).unbind(), strict=True):
            found[i] = t
    return found


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
