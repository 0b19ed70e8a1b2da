"""What is known of the tensors of a program that runs, and what was seen in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from thunder_norm.modular.following.attentions import Attention
from thunder_norm.modular.following.strands import (
    MOST,
    Followed,
    Scale,
    Use,
    Written,
    assembled,
    most_at_once,
    of_parameter,
    used,
)


@dataclass(frozen=True)
class Meeting:
    """How a parameter meets activations.

    Attributes:
        op: the operation.
        groups: of a convolution.
        out_axis: of a convolution, the parameter's axis of output channels.
        is_first: whether what it multiplies depends on no parameter.
        is_attended: whether what it multiplies is what an attention returns.
        summed: the parameter's axes that a product sums over.
        is_of_constant: whether what it multiplies depends on no parameter and no input.
        is_at_places: whether what is looked up depends on no input: the places of tokens.
    """

    op: str
    groups: int = 1
    out_axis: int = 0
    is_first: bool = False
    is_attended: bool = False
    summed: frozenset[int] = frozenset()
    is_of_constant: bool = False
    is_at_places: bool = False


@dataclass(frozen=True, eq=False)
class Call:
    """One operation that ran.

    Attributes:
        name: of the operation, without overload, and the same in place.
        func: the overload.
        args: what it got.
        kwargs: and by name.
        tensors: the tensors among these, each with what was known of it before.
        out: what it returned.
    """

    name: str
    func: Any
    args: tuple
    kwargs: dict
    tensors: list[tuple[torch.Tensor, Followed | None]]
    out: Any

    def state(self, t: Any) -> Followed | None:
        """What was known of an argument."""
        return next((state for other, state in self.tensors if other is t), None)

    @property
    def states(self) -> list[Followed]:
        """Those of the arguments that are no constants."""
        return [state for _, state in self.tensors if state is not None]


class _Reached:
    """Memory that was reached: what is in it depends on something."""

    def __init__(self) -> None:
        self._memory: dict[Any, StorageWeakRef] = {}
        self._next_look = 64

    def __contains__(self, t: torch.Tensor) -> bool:
        memory = self._memory.get(t.untyped_storage()._cdata) if t.layout == torch.strided else None
        return memory is not None and not memory.expired()

    def add(self, t: Any) -> None:
        """A tensor, and all that share memory with it."""
        if isinstance(t, torch.Tensor) and t.layout == torch.strided:
            self._memory[t.untyped_storage()._cdata] = StorageWeakRef(t.untyped_storage())
        if len(self._memory) > self._next_look:
            self._memory = {key: memory for key, memory in self._memory.items() if not memory.expired()}
            self._next_look = 2 * len(self._memory) + 64


class Notes:
    """What is known of tensors, and what was seen.

    Args:
        parameters: by name, the tensors that the program runs with.
        inputs: tensors that it gets; floating ones are activations, others constants.

    Attributes:
        uses: of parameters and their products, in order.
        met: name -> how the parameter met activations.
        attentions: in order.
        shapes: of the parameters.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]):
        self.uses: list[Use] = []
        self.met: dict[str, list[Meeting]] = {}
        self.attentions: list[Attention] = []
        self._multiplied: list[Sequence[list[Use]]] = []
        self.shapes = {name: t.shape for name, t in parameters.items()}
        self._states: dict[Any, tuple[StorageWeakRef, Followed]] = {}
        self._memory: dict[Any, StorageWeakRef] = {}
        self._next_look = 64
        self._written: dict[Any, list[Written]] = {}
        self._of_parameters, self._of_inputs = _Reached(), _Reached()
        for t in parameters.values():
            self._of_parameters.add(t)
        for t in inputs:
            self._of_inputs.add(t)
            if t.is_floating_point() or t.is_complex():
                self.note(t, Followed())
        for name, t in parameters.items():
            self.note(t, of_parameter(name, t.shape))

    def state(self, t: Any) -> Followed | None:
        """What is known of a tensor; None of constants."""
        if not isinstance(t, torch.Tensor) or t.layout != torch.strided:
            return None
        key = _key(t)
        held = self._states.get(key)
        if held is not None and not held[0].expired():
            return held[1]
        memory = self._memory.get(key[0])
        if memory is None or memory.expired():
            return None
        # a part of what is known, that nothing was noted of
        return assembled(t, self._written[key[0]]) if key[0] in self._written else Followed()

    def depend(self, results: Iterable[Any], given: Sequence[torch.Tensor]) -> None:
        """What an operation made depends on parameters, and on inputs, if something that it was given does."""
        for reached in (self._of_parameters, self._of_inputs):
            if any(t in reached for t in given):
                for t in results:
                    reached.add(t)

    def is_dependent(self, t: torch.Tensor) -> bool:
        """Whether a tensor depends on parameters."""
        return t in self._of_parameters

    def is_constant(self, t: torch.Tensor) -> bool:
        """Whether a tensor depends on no parameter and no input."""
        return t not in self._of_parameters and t not in self._of_inputs

    def operands(self, given: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, Followed | None]]:
        """What is known of the tensors that an operation is given.

        Numbers that were integers or comparisons of the inputs (one-hot tokens, bytes, masks) are activations to parameters.
        """
        found = [(t, self.state(t)) for t in given]
        if all(state is None or state.is_parameter for _, state in found) and any(state is not None for _, state in found):
            return [(t, Followed() if state is None and self._is_of_inputs(t) else state) for t, state in found]
        return found

    def _is_of_inputs(self, t: torch.Tensor) -> bool:
        return (t.is_floating_point() or t.is_complex()) and t in self._of_inputs

    def before_change(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor is about to change in place: the scores that it has are kept.  As it is now."""
        state = self.state(t)
        if state is None or state.score is None or t.is_meta:
            return t
        self.note(t, replace(state, score=replace(state.score, raw=state.score.raw.clone())))
        return t.clone()

    def after_change(self, t: torch.Tensor, scale: Scale) -> None:
        """A tensor has changed in place: others that share its memory are no more multiples of what they come from than it is."""
        cdata, own = t.untyped_storage()._cdata, _key(t)
        for key, (memory, state) in list(self._states.items()) if scale < Scale.PRODUCTS else ():
            if key[0] == cdata and key != own and not memory.expired():
                self._states[key] = memory, replace(state, scale=min(state.scale, scale))

    def note(self, t: torch.Tensor, state: Followed) -> None:
        """From now on this is known of a tensor.  What has too many terms is followed no further."""
        is_of_many = len(state.strands) > MOST and most_at_once([s.entries for s in state.strands]) > MOST
        if is_of_many or any(len(s.labels) > MOST for s in state.strands):
            self.use(state, "sum")
            state = replace(state, strands=(), scale=Scale.NOTHING)
        key, memory = _key(t), StorageWeakRef(t.untyped_storage())
        self._states[key], self._memory[key[0]] = (memory, state), memory
        if len(self._states) > self._next_look:  # labels of tensors that are gone take memory
            self._states = {k: held for k, held in self._states.items() if not held[0].expired()}
            self._next_look = 2 * len(self._states) + 64

    def write(self, t: torch.Tensor, state: Followed) -> None:
        """A part of a buffer, of which nothing was known, is this from now on."""
        key = t.untyped_storage()._cdata
        memory = self._memory.get(key)
        if memory is None or memory.expired():
            self._written[key] = []
        self._memory[key] = StorageWeakRef(t.untyped_storage())
        self._written.setdefault(key, []).append((t.storage_offset(), t.shape, t.stride(), state))

    def is_written(self, t: torch.Tensor) -> bool:
        """Whether a tensor is of a buffer that is written part by part."""
        return self.state(t) is not None and t.untyped_storage()._cdata in self._written

    def use(self, state: Followed | None, op: str) -> list[Use]:
        """An operation takes what is in a tensor."""
        found = [] if state is None else used(state, op, self.shapes)
        self.uses += found
        return found

    def multiply(self, operands: Sequence[list[Use]]) -> None:
        """Activations are multiplied entry by entry, gates and what they gate, of which these are the uses."""
        self._multiplied.append(operands)

    @property
    def factors(self) -> list[frozenset[str]]:
        """Of each product of gates and what they gate, if each is one matrix' product alone: the names of these."""
        found = []
        for operands in self._multiplied:
            names = [
                {u.name for u in uses if u.kind == "weight" and all(rows.any() for rows in u.rows.values())} for uses in operands
            ]
            if all(len(some) == 1 for some in names) and all(u.op in ("gate", "gated") for uses in operands for u in uses):
                found.append(frozenset[str]().union(*names))
        return found

    def meet(self, state: Followed, meeting: Meeting) -> None:
        """Parameters meet activations; those that are gains or biases of others already have met these."""
        for strand in state.strands:
            if strand.kind == "itself":
                self.met.setdefault(strand.name, []).append(meeting)

    def finish(self, outputs: Any) -> None:
        """The program returns this."""
        for t in tree_leaves(outputs):
            state = self.state(t)
            self.use(state, "output")
            for use in state.reduced if state is not None and t.ndim == 0 else ():
                use.op = "loss"


def _key(t: torch.Tensor) -> Any:
    """What tensors that are the same part of the same memory have in common: views are made anew on their way to the program."""
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype
