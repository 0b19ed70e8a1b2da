"""Watches a program run on tensors without data: its operations become rows, the kernels in them are counted."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.profiling import flops, shapes
from thunder_norm.profiling.memory import Block, Memory, nbytes, tensors_of, total
from thunder_norm.profiling.rows import NOWHERE, Kernel, Phase, Place, ProfileRow


class Step:
    """An operation that runs, or has run."""

    def __init__(self, op: str, phase: Phase, place: Place, derivative_of: int | None = None):
        self.op, self.phase, self.place, self.derivative_of = op, phase, place, derivative_of
        self.kernels: list[Kernel] = []
        self.flops: int | None = None  # what a rule for the operation says, in place of its kernels'
        self.is_fused = False
        self.made: list[Block] = []
        self.outputs: list[Block] = []
        self.temporaries = self.parameter_bytes = self.live_bytes = self.peak_bytes = 0
        self.shape: tuple[int, ...] = ()
        self.dtype: torch.dtype | None = None
        self.boundary: tuple[int, int] = (0, 0)  # of a fusion: what it reads and writes
        self.live_before = 0

    def finish(self, memory: Memory, given: Any, result: Any) -> None:
        """Note what can be seen only now."""
        first = next(tensors_of(result), None)
        if first is not None:
            self.shape, self.dtype = tuple(first.shape), first.dtype
        own = {id(b) for b in self.made}
        self.outputs = [b for b in memory.blocks(result) if id(b) in own]
        self.temporaries = sum(b.nbytes for b in self.made if not b.is_alive)
        self.parameter_bytes = total(b for b in memory.blocks(given) if b.kind in ("parameter", "buffer"))
        self.live_bytes, self.peak_bytes = memory.live_bytes, memory.peak_bytes

    def join(self, kernel: str) -> None:
        """Let what was seen as several kernels be one: what they hand each other is never stored."""
        made = [b.nbytes for b in self.made if b.is_alive]
        first, flops_of_all = self.kernels[0], [k.flops for k in self.kernels if k.flops is not None]
        self.kernels = [Kernel(kernel, sum(flops_of_all), 2 * sum(made), sum(made), first.dtype)]
        self.temporaries = 0
        self.peak_bytes = max(self.live_before + sum(made), self.live_bytes)

    @property
    def total_flops(self) -> int:
        """By the rule for the operation, else the sum over its kernels."""
        return sum(k.flops or 0 for k in self.kernels) if self.flops is None else self.flops

    def row(self, number: int, backward_flops: int) -> ProfileRow:
        """The row for a report, once it is known what was saved."""
        read, written = self.boundary
        kernels = self.kernels if self.flops is None else [replace(k, flops=k.flops or 0) for k in self.kernels]
        return ProfileRow(
            number,
            self.op,
            self.phase,
            *self.place,
            self.shape,
            self.dtype,
            self.total_flops,
            self.total_flops if self.phase == "backward" else backward_flops,
            read if self.is_fused else sum(k.bytes_read for k in kernels),
            written if self.is_fused else sum(k.bytes_written for k in kernels),
            total(self.outputs),
            self.temporaries,
            self.parameter_bytes,
            total(b for b in self.made if b.is_saved),
            self.live_bytes,
            self.peak_bytes,
            tuple(kernels),
            self.derivative_of,
            self.is_fused,
        )


class Recorder(TorchDispatchMode):
    """The steps of a program, with the storages alive.

    Args:
        count: which operations count as FLOPs, see `thunder_norm.profiling.flops`.
    """

    def __init__(self, count: flops.Count):
        super().__init__()
        self.count: flops.Count = count
        self.memory = Memory()
        self.steps: list[Step] = []
        self.saved: dict[int, Block] = {}
        self._step: Step | None = None
        self._kernel: str | None = None  # what the step at hand really is, see `begin`

    @contextlib.contextmanager
    def step(self, op: str, phase: Phase, place: Place, derivative_of: int | None = None) -> Iterator[Step]:
        """What runs inside the block is one operation; call its `finish` before the block ends."""
        outer, self._step = self._step, Step(op, phase, place, derivative_of)
        self.memory.start_step()
        try:
            yield self._step
            self.steps.append(self._step)
        finally:
            self._step = outer

    def begin(self, op: str, phase: Phase, place: Place, derivative_of: int | None = None, kernel: str | None = None) -> None:
        """A step that ends when the next begins; for what is seen only by its kernels.

        With `kernel`, torch really runs one of that name, and shows its parts to us only.
        """
        self.end()
        self._step = Step(op, phase, place, derivative_of)
        self._kernel = kernel
        self.memory.start_step()
        self._step.live_before = self.memory.live_bytes

    def end(self) -> None:
        """Finish what `begin` began."""
        step, self._step = self._step, None
        if step is None:
            return
        step.finish(self.memory, (), ())
        if step.kernels:
            self.steps.append(step)
            if self._kernel is not None:
                step.join(self._kernel)

    def save(self, t: torch.Tensor) -> torch.Tensor:
        """Note that the backward needs a tensor; returns it, as a hook for saved tensors does."""
        for found in tensors_of(t):
            block = self._seen(found)
            block.is_saved = True
            self.saved[id(block)] = block
        return t

    def stand_for(self, name: str, step: Step, given: Any, result: Any) -> None:
        """Take `result` for that of an operation that did not run: one kernel that nothing is known about."""
        read, written = (sum(map(nbytes, tensors_of(tree))) for tree in (given, result))
        step.made.extend(block for block, is_new in map(self.memory.see, tensors_of(result)) if is_new)
        dtype = next((t.dtype for t in tensors_of((given, result))), torch.float32)
        step.kernels.append(Kernel(name, None, read, written, dtype))

    def _seen(self, t: torch.Tensor) -> Block:
        """The block of a tensor; one that the program did not make is a parameter or constant that it closes over."""
        return self.memory.see(t, "parameter" if isinstance(t, torch.nn.Parameter) else "input")[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about metadata
            return func(*args, **kwargs)
        if _is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        is_given, result = shapes.apply(func, args, kwargs)
        if not is_given:
            result = self._run(func, args, kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func.namespace in ("aten", "prims"):
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except Exception as e:
            raise UnsupportedOpError(
                with_details(
                    f"{flops.name_of(func)} does not run on tensors without data",
                    at=(self._step.place.location or None) if self._step is not None else None,
                    to_say_what_it_returns="@thunder_norm.transforms.register_shape_rule(op), or torch.library.register_fake",
                )
            ) from e

    def _note(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        new = [t for t in tensors_of(result) if self.memory.find(t) is None]
        is_mutation = func._schema.is_mutable
        if not new and not is_mutation and any(True for _ in tensors_of(result)):
            return  # a view
        step = self._step
        if step is None:  # neither a torch function nor part of a backward: a custom function's inside
            with self.step(flops.name_of(func), "forward", NOWHERE) as step:
                self._add(step, func, args, kwargs, result, is_mutation)
                step.finish(self.memory, (args, kwargs), result)
        else:
            self._add(step, func, args, kwargs, result, is_mutation)

    def _add(self, step: Step, func: Any, args: tuple, kwargs: dict, result: Any, is_mutation: bool) -> None:
        read, dtype = 0, None
        for t in {id(t): t for t in tensors_of((args, kwargs))}.values():
            read += nbytes(t)
            if isinstance(t, torch.nn.Parameter):
                self._seen(t)
            if dtype is None and t.is_floating_point():
                dtype = t.dtype
        written = 0
        for t in tensors_of(result):
            block, is_new = self.memory.see(t)
            if is_new:
                step.made.append(block)
            if is_new or is_mutation:
                written += nbytes(t)
            dtype = dtype or t.dtype
            if dtype is not None and not dtype.is_floating_point:
                dtype = t.dtype
        if step.dtype is None:
            step.shape, step.dtype = next(((tuple(t.shape), t.dtype) for t in tensors_of(result)), ((), None))
        counted = flops.kernel_flops(func, args, kwargs, result, self.count)
        step.kernels.append(Kernel(flops.name_of(func), counted, read, written, dtype or torch.float32))


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an operation is made of others, and only arrives here because autograd is off altogether."""
    return func._can_decompose() and not flops.has_rule(func)


def backward_flops(steps: list[Step]) -> dict[int, int]:
    """For each forward step by number, the FLOPs of the backward steps that differentiate it."""
    found: dict[int, int] = defaultdict(int)
    for s in steps:
        if s.phase == "backward" and s.derivative_of is not None:
            found[s.derivative_of] += s.total_flops
    return found
