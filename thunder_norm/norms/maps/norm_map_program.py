"""One program of a norm map: acquired, or built again from data, and how it is called."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from thunder_norm.core.context import Mode, perturbations_recorded, records_program
from thunder_norm.errors import NormMismatchError
from thunder_norm.norms.flat_programs import FlatModule
from thunder_norm.norms.higher_order import RunCompiled
from thunder_norm.norms.maps import encoding, norm_map_trace
from thunder_norm.norms.maps.conditions import ValuesOfCall
from thunder_norm.norms.maps.outputs import described, differ, finishing
from thunder_norm.norms.maps.scalars import FromVectors, Layout, OneByOne, Scalars
from thunder_norm.norms.maps.sources import OfModel
from thunder_norm.norms.norm_vector import VectorSizes
from thunder_norm.norms.normed_mode import normed_call
from thunder_norm.norms.sizes import Sizes
import thunder


@dataclass
class Program:
    """One acquired norm map, for one choice of kinds: a compiled function of scalars."""

    entry: Any
    plan: norm_map_trace.Plan
    static_epilogue_inputs: tuple
    scalars: Scalars | None  # the same computation on numbers

    @staticmethod
    def acquire(
        model: Callable,
        inputs: list[Any],
        spec: TreeSpec,
        policy: norm_map_trace.Given,
        values: ValuesOfCall,
        mode: Mode,
    ) -> Program:
        """Trace the model with `inputs` in place of its arguments; one that takes derivatives, with its operations written out."""
        try:
            return Program._acquired(model, inputs, spec, policy, values, mode)
        except Exception as e:  # noqa: BLE001 - raised again, but for one kind
            flat = FlatModule.of(model, *tree_unflatten(inputs, spec), e, keeps_state=False)
        return Program._acquired(flat, inputs, spec, policy, values, mode)

    @staticmethod
    def _acquired(
        model: Callable,
        inputs: list[Any],
        spec: TreeSpec,
        policy: norm_map_trace.Given,
        values: ValuesOfCall,
        mode: Mode,
    ) -> Program:
        transform = norm_map_trace.NormMapTransform(policy, values, mode, inputs)
        jitted = thunder.jit(model, transforms=[transform], executors=[])  # `Scalars` runs it: no kernel of a GPU has a part
        args, kwargs = tree_unflatten(inputs, spec)

        def run() -> Any:
            with normed_call():
                return jitted(*args, **kwargs)

        entry, static = norm_map_trace.capture(jitted, run, transform.planned)
        return Program(entry, transform.plan, static, Scalars.of(entry))

    def encoded(self) -> dict:
        """The program as JSON.

        Raises:
            SavedFileError: it has what cannot be saved.
        """
        return encoding.encode_program(self.entry, self.plan, self.static_epilogue_inputs)

    def encoded_for(self, tensors: Mapping[str, torch.Tensor]) -> dict | None:
        """The same, for use on these tensors; None if it cannot be saved, or reads others."""
        if any(tensors.get(name) is not t for name, t in encoding.tensors_read([self.plan]).items()):
            return None
        return encoding.or_none(self.encoded)

    @staticmethod
    def decoded(data: dict, tensors: Mapping[str, torch.Tensor], model: Callable) -> Program:
        """The program that `encoded` made this JSON of."""
        entry, plan, scalars = encoding.decode_program(data, tensors, model)
        return Program(entry, plan, (), scalars)

    def copied(self, memo: dict[int, Any]) -> Program:
        """The same program on the copies of the tensors that it reads."""
        sources = copy.deepcopy(self.plan.sources, memo)
        conditions = self.plan.conditions and self.plan.conditions.copied(memo)
        return replace(self, plan=replace(self.plan, sources=sources, conditions=conditions))

    def serves(self, leaves: list[Any]) -> bool:
        """Whether the values that it asked for are those of a call with these arguments.

        Raises:
            NormMismatchError: the call has no data there.
        """
        return self.plan.conditions is None or self.plan.conditions.hold(leaves)

    @functools.cached_property
    def reads_model(self) -> bool:
        """Whether it computes anything from parameters or buffers."""
        return any(isinstance(s, OfModel) for s in self.plan.all_sources)

    @property
    def trace(self) -> Any:
        """The last computation trace."""
        return self.entry.computation_traces[-1]

    def generalize(self, variant: Program, other: Any) -> None:
        """Learn from an acquisition at other sizes which output dimensions follow, and that no norm does.

        Raises:
            NormMismatchError: a norm depends on the size of a dynamic dimension.
        """
        if self.plan.fingerprint != variant.plan.fingerprint:
            raise NormMismatchError(
                f"the norm depends on the size of the dynamic dimension {other.name!r}: leave it out of dynamic_shapes"
            )
        if differ(self._returned(), variant._returned()):
            raise NormMismatchError(
                f"what the model returns beside norms depends on the size of the dynamic dimension {other.name!r}: leave it out of "
                "dynamic_shapes"
            )
        for own, theirs in zip(self.plan.outputs, variant.plan.outputs, strict=True):
            own.learn(theirs, other)

    def _returned(self) -> Any:
        return described(self._epilogue, self.plan.outputs, self.plan.num_results)

    @property
    def _epilogue(self) -> Callable[..., Any]:
        return functools.partial(self.entry.epilogue_fn, *self.static_epilogue_inputs)

    @functools.cached_property
    def _finish(self) -> Callable[..., Any]:
        return finishing(self._epilogue, self.plan.outputs, self.plan.num_results)

    def inputs(self, leaves: list[Any], given: Sizes | None) -> list[torch.Tensor]:
        """What the compiled computation takes, in order; under `torch.no_grad` only perturbations have a derivative."""
        pool = [] if given is None else [*given.norm_sizes, *given.perturbation_sizes]
        found = [pool[source] if type(source) is int else source(leaves) for source in self.plan.sources]
        return _recorded(found, self.plan.moves)

    def _carriers(self, leaves: list[Any], given: Sizes | None) -> tuple[Layout, list[float], Sequence[torch.Tensor]]:
        """The same, as few tensors as there are: vectors are not taken apart; and the entries of those, which were read already."""
        if not isinstance(given, VectorSizes) or given.entries is None:
            return _ONE_BY_ONE, [], self.inputs(leaves, given)
        layout, others, moves = self._beside_vectors
        found = [*given.vectors, *(source(leaves) for source in others)]
        return layout, given.entries, _recorded(found, [*(False, True)[: len(given.vectors)], *moves])

    @functools.cached_property
    def _handed_on(self) -> list[tuple[int, int]]:
        """The outputs that are inputs, by position: Thunder's backward leaves them out, as a caller would get the tensors themselves."""
        returned = self.trace.bound_symbols[-1].args[0]
        outputs = returned["output"] if isinstance(returned, dict) else returned
        positions = {p.name: i for i, p in enumerate(self.trace.args)}
        return [(i, positions[p.name]) for i, p in enumerate(outputs) if p.name in positions]

    @functools.cached_property
    def _beside_vectors(self) -> tuple[FromVectors, list[Any], list[bool]]:
        """Which entries the inputs are where sizes are given as vectors, and the other tensors, which follow those."""
        others = [(s, moves) for s, moves in zip(self.plan.sources, self.plan.moves, strict=True) if type(s) is not int]
        positions = itertools.count(-len(others))  # from the end: the program does not know how many names were given
        order = [s if type(s) is int else next(positions) for s in self.plan.sources]
        return FromVectors(order), [s for s, _ in others], [moves for _, moves in others]

    def __call__(self, leaves: list[Any], given: Sizes | None, sizes: dict[str, int]) -> Any:
        """Run on the scalars of the arguments."""
        with perturbations_recorded():
            if self.scalars is not None:
                layout, entries, carriers = self._carriers(leaves, given)
                result = self.scalars(self.plan.replay, layout, entries, carriers)
            else:
                layout, carriers = _ONE_BY_ONE, self.inputs(leaves, given)
                is_plain = self.entry.backward_fn is None
                run = (
                    self.entry.computation_fn if is_plain else functools.partial(RunCompiled.apply, self.entry, self.plan.replay)
                )
                result = run(*carriers)
            if self._handed_on and any([t.requires_grad for t in carriers]):
                inputs, result = layout.inputs(carriers), list(result)
                for i, source in self._handed_on:
                    result[i] = inputs[source].clone()
            result = _recorded(result, self.plan.moved)
        if not sizes:
            return self._finish(*result)
        with norm_map_trace.sizes_of_call(sizes):
            return self._finish(*result)


_ONE_BY_ONE = OneByOne()


def _recorded(tensors: Sequence[torch.Tensor], moves: Sequence[bool]) -> Sequence[torch.Tensor]:
    """`tensors` with the derivatives they have here: under `torch.no_grad` those of perturbations alone."""
    if records_program():
        return tensors
    return [t if is_moving else t.detach() for t, is_moving in zip(tensors, moves, strict=True)]
