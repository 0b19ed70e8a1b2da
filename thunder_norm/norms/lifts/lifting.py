"""Lifting: how a plain tensor becomes a normed one where an operation meets it, the same in eager programs and in traces.

What is lifted with which size (`Lifting.size_of`):

========================================================  ==================================================================
a parameter or buffer that a norm is given for            "given": that norm
any other floating parameter                              "measured", "unit", "start" or "required", as the policy says
made from parameters alone                                "measured" if they all are; else "derived": their norms, sent through
                                                          the rules of the operations that made it
made from parameters and others, without a rule           refused where the norm of such a parameter is not that of its data
anything else (buffers, constants)                        "measured"
========================================================  ==================================================================

In which kind: the one stated for it, with its norm or by `annotate`; or the one chosen because its uses disagree; or the one the
operation at hand wants.  What is wanted in another kind is converted, and a measured norm is measured in the kind that is wanted.

An eager program computes lifts at once (`eager_lifting`), a trace has them written before the operation (`traced_lifting`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from thunder_norm.core import registry
from thunder_norm.core.known_ranges import range_by_rule
from thunder_norm.core.ranges import Range
from thunder_norm.core.tensors import NormedTensor, describe, has_norm
from thunder_norm.errors import MissingNormRuleError, UnsupportedOpError, with_details
from thunder_norm.norms.lifts.annotations import Annotation
from thunder_norm.norms.lifts.inference import NormSpec
from thunder_norm.norms.lifts.parameters import Derived, Leaves, Policy, canonical_dims, derivations, stated_kind
from thunder_norm.norms.lifts.written_constants import WrittenConstants
from thunder_norm.op_names import op_name
from thunder_norm.trees import flat_tensors

Location = Callable[[], str | None]
# What holds for a parameter that no norm is given for.
Otherwise = Literal["measured", "unit", "start", "required"]
Size = Literal["given", "measured", "unit", "start", "required", "derived"]

_DEEP = 50  # steps from a parameter to a tensor: the norm of each takes some calls of Python's stack


class Lifting:
    """The policy, and what it needs to know about the tensors of one run or one trace.

    Args:
        policy: as `NormTransform`'s parameters.
        otherwise: what holds for parameters that a mapping does not name.
        annotations: what was said about parameters, by every dotted name.
        inferred: the norms chosen for parameters whose uses disagree.
    """

    def __init__(
        self,
        policy: Policy,
        otherwise: Otherwise,
        annotations: Mapping[str, Annotation],
        inferred: Mapping[str, NormSpec] | None = None,
    ):
        self.leaves = None if isinstance(policy, str) else Leaves(policy)
        self.otherwise: Otherwise = policy if isinstance(policy, str) else otherwise
        self.annotations = annotations
        self.inferred = dict(inferred or {})
        self.derived: dict[int, tuple[torch.Tensor, Derived]] = {}  # by identity: the tensors are kept alive
        self._is_measured: dict[int, bool] = {}  # of tensors in `derived`
        self._ranges: dict[int, Range | None] = {}
        self._asked_for: set[int] = set()
        self._of_buffers: dict[int, torch.Tensor] = {}  # what was made from buffers alone, by identity, kept alive
        self.unknown = Unknown()
        self.written = WrittenConstants()

    # -- which tensors are parameters: eager programs and traces know it in their own ways ----------------------------

    def name_of(self, t: torch.Tensor) -> str | None:
        """The dotted name of a parameter or buffer: of several, the one a norm is given for."""
        raise NotImplementedError

    def is_parameter(self, t: torch.Tensor) -> bool:
        """Whether a plain tensor is a floating parameter."""
        raise NotImplementedError

    def known(self, t: Any) -> Any:
        """The parameter, or tensor made from parameters, that `t` is by another name; anything else as it is."""
        return t

    def plain_tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers, and what was made from parameters so far."""
        raise NotImplementedError

    def copied(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """A deep copy of a tensor, which stands for what it is a copy of if that is a parameter."""
        return func(*args, **kwargs)

    # -- the policy ---------------------------------------------------------------------------------------------------

    def size_of(self, t: torch.Tensor) -> Size:
        """Where the size of a plain tensor's norm comes from."""
        if id(t) in self.derived:
            for v in self.made_before(t, self._is_measured):
                self._is_measured[id(v)] = all(map(self.is_measured, self.derived[id(v)][1].sources()))
            return "measured" if self._is_measured[id(t)] else "derived"
        name = self.name_of(t)
        if name is None:
            return "measured"
        if self.is_given(name):
            return "given"
        return "measured" if self.otherwise in ("unit", "start") and not self.is_parameter(t) else self.otherwise

    def is_given(self, name: str) -> bool:
        """Whether a norm is given for a parameter or buffer."""
        return self.leaves is not None and name in self.leaves

    def is_measured(self, t: torch.Tensor) -> bool:
        """Whether the norm of a plain tensor is that of its data."""
        return self.size_of(t) == "measured"

    def matters(self, t: torch.Tensor) -> bool:
        """Whether the norm of a parameter, or of a tensor made from parameters alone, is another than that of its data, or moves."""
        return not self.is_measured(t)

    def moves(self, t: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, or made from parameters alone, and `matters`."""
        return self.concerns(t) and self.matters(t)

    def concerns(self, t: torch.Tensor) -> bool:
        """Whether a plain tensor is a floating parameter, or was made from parameters alone."""
        return id(t) in self.derived or self.is_parameter(t)

    def is_of_buffers(self, t: torch.Tensor) -> bool:
        """Whether a plain tensor is a buffer, or was made from buffers alone."""
        return id(t) in self._of_buffers or self.name_of(t) is not None and not self.concerns(t)

    def note_of_buffers(self, tensors: Sequence[torch.Tensor], result: Any) -> None:
        """Note what an operation on plain tensors made, if these are all of buffers."""
        if tensors and all(map(self.is_of_buffers, tensors)):
            self._of_buffers.update({id(t): t for t in flat_tensors(result)})

    def stated(self, name: str, t: torch.Tensor) -> NormSpec | None:
        """The norm somebody stated for a parameter, or that was chosen because its uses disagree."""
        stated = self.stated_kind(name)
        return self.inferred.get(name) if stated is None else NormSpec(stated[0], canonical_dims(*stated, t.ndim))

    def stated_kind(self, name: str) -> tuple[type[NormedTensor], tuple[int, ...] | None] | None:
        """Kind and elem_dims somebody stated for a parameter; None if nobody did."""
        return stated_kind(name, self.annotations, self.leaves)

    def has_stated_kinds(self) -> bool:
        """Whether some parameters may be taken for another kind than the operation at hand wants."""
        return bool(self.annotations or self.inferred) or self.leaves is not None

    def is_taken_as_stated(self, t: torch.Tensor, name: str) -> bool:
        """Whether an operation gets a parameter as the kind stated or chosen for it, whatever it wants."""
        return self.stated_kind(name) is not None or name in self.inferred and not self.is_measured(t)

    def who_stated(self, name: str) -> str | None:
        """Who stated the kind of a parameter, in a sentence; None if nobody did."""
        if self.leaves is not None and name in self.leaves and self.leaves.kind(name) is not None:
            return "a norm of that kind was given for it"
        return "an annotation says so" if name in self.annotations else None

    # -- what was made from parameters --------------------------------------------------------------------------------

    def remember(self, fn: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        """Note the results of an operation on parameters alone; a view of a view that has all of a tensor again is that tensor."""
        for t, made in derivations(fn, args, kwargs, result):
            whole = self._seen_again(t, made)
            self.derived[id(t)] = t, made if whole is None else Derived(torch.clone, (whole,), {})

    def _seen_again(self, t: torch.Tensor, made: Derived | None) -> torch.Tensor | None:
        """The tensor, of those that t was made from one after the other, that has the same entries in the same memory."""
        while made is not None and len(sources := made.sources()) == 1:
            if memory_of(sources[0]) == memory_of(t):
                return sources[0]
            made = self.derived.get(id(sources[0]), (None, None))[1]
        return None

    def made_before(self, t: torch.Tensor, done: Container[int]) -> Iterator[torch.Tensor]:
        """What a tensor was made from one after the other, and itself at last: each after its sources, of which `done` has the ids.

        A loop, as programs make tensors in more steps than Python calls, and each once, as they use them more than once.
        """
        stack: list[torch.Tensor] = [t]
        seen: set[int] = set()
        while stack:
            sources = self.derived[id(stack[-1])][1].sources() if id(stack[-1]) in self.derived else []
            missing = [v for v in sources if id(v) in self.derived and id(v) not in seen and id(v) not in done]
            if missing:
                stack.extend(missing)
                continue
            v = stack.pop()
            if id(v) not in seen and id(v) not in done:
                seen.add(id(v))
                yield v

    def far_before(self, t: torch.Tensor) -> list[torch.Tensor]:
        """What a tensor was made from in so many steps that each is to be lifted by itself, the first one first; else nothing."""
        before = list(self.made_before(t, self._asked_for))
        self._asked_for.update(map(id, before))
        return before[:-1] if len(before) > _DEEP else []

    def range_of(self, t: torch.Tensor) -> Range | None:
        """Between which numbers the entries of a tensor made from parameters are, by the operations that made it."""
        if id(t) not in self.derived:
            return None
        for v in self.made_before(t, self._ranges):
            self._ranges[id(v)] = self._range_by_rule(v, self.derived[id(v)][1])
        return self._ranges[id(t)]

    def largest_without_values(self, t: torch.Tensor) -> float | None:
        """The largest modulus that entries of a plain tensor may have, by its range, where there are no values to measure; None where there are."""
        return None

    def _range_by_rule(self, t: torch.Tensor, made: Derived) -> Range | None:
        op = registry.find_op(registry.key_of(made.fn))
        found = None if op is None else range_by_rule(op, made.args, made.kwargs)
        return None if found is None else found.rounded(t.dtype)

    def check_known(self, t: torch.Tensor, location: Location) -> None:
        """Refuse a tensor whose values depend on parameters in a way that no rule follows.

        Raises:
            MissingNormRuleError: they do, and the norms of those parameters are not that of their data.
        """
        self.unknown.check(t, location)


def memory_of(t: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor's entries are, and in which order."""
    if t.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return (id(t),)
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype


class Unknown:
    """Tensors made from parameters and other tensors by operations without a norm rule: nobody knows their norm."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, Callable]] = {}
        self._changed: dict[int, tuple[torch.Tensor, Callable]] = {}  # by memory: views change too

    def __contains__(self, t: torch.Tensor) -> bool:
        return id(t) in self._made

    def add(self, func: Callable, args: Any, result: Any) -> None:
        """Remember the floating results of `func`; what is no argument of it came from it."""
        given = {id(v) for v in flat_tensors(args)}
        for t in flat_tensors(result):
            if has_norm(t) and id(t) not in given:
                self._made[id(t)] = t, func

    def change(self, func: Callable, t: torch.Tensor) -> None:
        """Remember that `func` changed a plain tensor in place by normed ones."""
        self._made[id(t)] = self._changed[_memory(t)] = t, func

    def was_changed(self, t: torch.Tensor) -> bool:
        """Whether it, or what has its memory, was changed in place by normed tensors."""
        return _memory(t) in self._changed

    def check(self, t: torch.Tensor, location: Location) -> None:
        """Refuse to take the values of such a tensor for its norm.

        Raises:
            MissingNormRuleError: `t` is one.
            UnsupportedOpError: `t` was changed in place by a normed tensor.
        """
        changed = self._changed.get(_memory(t))
        if changed is not None:
            func = op_name(changed[1])
            raise UnsupportedOpError(
                with_details(
                    f"a {describe(t)} is used after in-place {func} with a NormedTensor",
                    at=location(),
                    why="it is a plain tensor, and its norm would silently be that of the values at hand",
                    instead="assign the result of the out-of-place operation: self.mean = 0.9 * self.mean + 0.1 * x.mean(0)",
                )
            )
        if t in self:
            raise unknown_norm(op_name(self._made[id(t)][1]), t, location())


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)


def unknown_norm(operation: str, t: torch.Tensor, location: str | None) -> MissingNormRuleError:
    """The error for a tensor that an operation without a norm rule made from a parameter and other tensors."""
    return MissingNormRuleError(
        with_details(
            f"no norm rule for {operation}, which made a {describe(t)} of a parameter and of other tensors",
            at=location,
            why="the parameter's norm is given, or moves, and that of the result would silently be that of its values",
            to_add_one=f"@thunder_norm.normed_op({operation}).register_norm",
        )
    )
