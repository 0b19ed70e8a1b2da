"""What surrounds the rules in an eager run: notes operations, rules and uses of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from thunder_norm import op_names
from thunder_norm.core import context
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.norms.lifts.eager_lifting import EagerLifting
from thunder_norm.norms.lifts.given_integers import GivenIntegers
from thunder_norm.norms.lifts.inference import Candidate, Inferred, NormSpec, Use, disagree
from thunder_norm.norms.lifts.parameters import canonical_dims
from thunder_norm.norms.lifts.plain_operations import LiftingEnvironment
from thunder_norm.norms.lifts.written_buffers import WrittenBuffers
from thunder_norm.rules import _again
from thunder_norm.trees import flat_tensors
from thunder_norm.user_code import user_line


@dataclass(frozen=True)
class Argument:
    """One normed argument of a rule: as it was given, as the rule got it, and the factor of the conversion between them."""

    name: str
    given: str
    taken: str
    factor: float | None


@dataclass(frozen=True)
class Noted:
    """One operation of an eager run: what, where, its result, the rule that ran and what it got."""

    func: Callable
    module: str
    location: str
    out: NormedTensor
    rule: Callable | None = None
    arguments: tuple[Argument, ...] = ()


class Arithmetic:
    """How an eager run computes the operations on plain tensors: as PyTorch does."""

    def run(self, environment: EagerEnvironment, func: Callable, args: tuple, kwargs: dict) -> Any:
        """The result of one."""
        return func(*args, **kwargs)


class EagerEnvironment(LiftingEnvironment):
    """Lifts parameters by a policy and notes every operation."""

    lifting: EagerLifting

    def __init__(self, lifting: EagerLifting, arithmetic: Arithmetic | None = None, arguments: Iterable[torch.Tensor] = ()):
        super().__init__(lifting)
        self.buffers = WrittenBuffers(lifting, [t for t in lifting.tensors.values() if id(t) not in lifting.parameters])
        self.arithmetic = arithmetic or Arithmetic()
        self._integers = GivenIntegers(arguments)
        self.noted: list[Noted] = []
        self.uses: dict[str, list[Use]] = {}
        self.candidates: dict[str, tuple[Candidate, ...]] = {}
        self.module_path = [""]
        # norms of parameters, and of what was made from them alone: their names, and the last operation
        self._of_parameters: dict[int, tuple[tuple[str, ...], str]] = {}
        self._made: list[NormedTensor] = []
        self._counts_uses = self._notes = True
        self._call: tuple[Callable, tuple[Argument, ...]] | None = None

    @property
    def lifted(self) -> dict[str, NormedTensor]:
        """Each parameter that was used, as it was lifted first."""
        return self.lifting.lifted

    def lift_over(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        """The normed tensor for a plain one, by the policy."""
        with context.perturbations_recorded():
            normed = self.lifting.lift(t, kind, dims)
        name = self.lifting.name_of(t)
        if name is not None:
            self._of_parameters[id(normed)] = (name,), ""
        return normed

    def as_result(self, t: torch.Tensor) -> torch.Tensor:
        """What a program returns, with a norm also where it is a parameter, or made from parameters alone: it moves with those."""
        if isinstance(t, NormedTensor) or not self.lifting.concerns(t):
            return t
        leaf = self.lifted.get(self.lifting.name_of(t) or "")
        kind, dims = (RMSTensor, None) if leaf is None else (type(leaf), leaf.elem_dims)
        return self.lift(t, kind, dims)

    def run_real(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run an operation on plain tensors, and follow the values of constants, and given integers, through it."""
        result = func(*args, **kwargs)
        self.follow(func, args, kwargs, result)
        return result

    def run_operation(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """The same for an operation of the program, as its operations are computed in this run."""
        result = self.arithmetic.run(self, func, args, kwargs)
        self.follow(func, args, kwargs, result)
        return result

    def run_body(self, body: Callable, args: tuple, kwargs: dict) -> Any:
        """What an operation of ours does, computed as one operation."""
        return self.arithmetic.run(self, body, args, kwargs)

    def changes(self, t: Any) -> bool:
        """What is written into parameters, and into tensors made from them, is followed."""
        return type(t) in (torch.Tensor, torch.nn.Parameter) and self.lifting.concerns(t)

    def values_of(self, t: torch.Tensor) -> torch.Tensor:
        """A constant with its values, if they are known."""
        return self.lifting.constants.value(t)

    def counts_by_values(self, t: torch.Tensor) -> bool:
        """A constant's values, and those of a buffer: a run sees no others, and where its norm is given they are not its own."""
        return self.is_constant(t) or self.lifting.is_of_buffers(t) and t not in self.lifting.unknown and self.is_measured(t)

    def follow(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        """Follow the values of constants, and given integers, through an operation."""
        super().follow(func, args, kwargs, result)
        self.lifting.constants.follow(func, args, kwargs, result)
        self._integers.follow(func, args, kwargs, result)

    def note_call(self, op: Any, rule: Any, call: tuple[tuple, dict], given: dict[str, Any], prepared: dict[str, Any]) -> None:
        """Remember which rule runs and what it gets, and the parameters among that."""
        pairs = [pair for name in given for pair in _pairs(name, given[name], prepared[name])]
        if not self.lifting.is_inside_derived and self._counts_uses:
            for name, before, after in pairs:
                for parameter, use in self._uses(op, rule, call, given, name, before, after):
                    self.uses.setdefault(parameter, []).append(use)
        self._call = rule.fn, tuple(self._argument(*pair) for pair in pairs)

    def _argument(self, name: str, before: torch.Tensor, after: NormedTensor) -> Argument:
        taken = NormSpec(type(after), after.elem_dims)
        if isinstance(before, NormedTensor):
            own = NormSpec(type(before), before.elem_dims)
            return Argument(name, str(own), str(taken), own.factor(taken, before.backing))
        parameter = self.lifting.name_of(before)
        if parameter is None:
            is_derived = id(before) in self.lifting.derived
            return Argument(name, "a tensor made from parameters" if is_derived else "a plain tensor", str(taken), 1.0)
        own = self._norm_of(parameter)
        if self.lifting.is_measured(before):
            return Argument(name, f"{parameter}, measured", str(taken), 1.0)
        return Argument(name, f"{parameter}, {own}", str(taken), own.factor(taken, before))

    def _norm_of(self, parameter: str) -> NormSpec:
        """The norm in which a parameter was lifted first."""
        leaf = self.lifted[parameter]
        return NormSpec(type(leaf), leaf.elem_dims)

    def _uses(
        self, op: Any, rule: Any, call: tuple, given: dict, name: str, before: torch.Tensor, after: NormedTensor
    ) -> Iterator[tuple[str, Use]]:
        """The parameters an argument is, or is made of, and what is wanted of them."""
        taken = NormSpec(type(after), after.elem_dims)
        through = ""
        if isinstance(before, NormedTensor):
            names, through = self._of_parameters.get(id(before), ((), ""))
            natural = (_natural(op, call, before) if names else None) or taken
            factor = NormSpec(type(before), before.elem_dims).factor(taken, before.backing)
            found = [(source, natural, factor) for source in names]
        else:
            if id(before) in self.lifting.derived:
                through = op_names.op_name(self.lifting.derived[id(before)][1].fn)
                wants = self.lifting.wanted_of_sources.get(id(before), {})
            else:
                parameter = self.lifting.name_of(before)
                wants = {} if parameter is None else {parameter: taken}
            tensors = self.lifting.tensors
            found = [(name, wanted, self._norm_of(name).factor(wanted, tensors[name])) for name, wanted in wants.items()]
        key = op_names.op_key(op.body)
        others = [t for t in flat_tensors(given) if t is not before]
        is_with_activation = any(isinstance(t, NormedTensor) and id(t) not in self._of_parameters for t in others)
        for source, wanted, factor in found:
            yield (
                source,
                Use(
                    op=key if isinstance(key, str) else op.__name__,
                    argument=name,
                    module=self.module_path[-1],
                    location=user_line() or "",
                    wanted=wanted,
                    rule=rule.fn.__name__,
                    factor=factor,
                    through=through,
                    is_with_activation=is_with_activation,
                    is_with_integers=any(t in self._integers for t in others),
                ),
            )

    def run(self, func: Callable, args: Any, kwargs: Any) -> Any:
        """Run an operation on normed tensors; what it makes from parameters alone is no use of them, but stands for them."""
        tensors = flat_tensors((args, kwargs))
        sources = [self._of_parameters.get(id(t)) for t in tensors]
        if not all(sources):
            return func(*args, **kwargs)
        was_counting, self._counts_uses = self._counts_uses, False
        try:
            result = func(*args, **kwargs)
        finally:
            self._counts_uses = was_counting
        names = tuple(dict.fromkeys(name for source in sources if source is not None for name in source[0]))
        for t in flat_tensors(result):
            if isinstance(t, NormedTensor) and id(t) not in self._of_parameters:
                self._made.append(t)  # alive, so that its id stays its own
                self._of_parameters[id(t)] = names, op_names.op_name(func)
        return result

    def disagreements(self) -> dict[str, list[NormSpec]]:
        """The parameters of unstated kind whose uses want different norms, and must have one: its size is given, or it moves."""
        found = {}
        for name, uses in self.uses.items():
            t = self.lifting.tensors[name]
            if self.lifting.stated(name, t) is None and self.lifting.matters(t):
                different = disagree([u.wanted for u in uses], t)
                if different:
                    found[name] = different
        return found

    def infer(self) -> dict[str, Inferred]:
        """The norm of each parameter that was used, and how it was found."""
        found = {}
        for name, uses in self.uses.items():
            stated, candidates = self.lifting.who_stated(name), self.candidates.get(name, ())
            found[name] = Inferred(name, self._norm_of(name), tuple(uses), stated, candidates)
        return found

    def note(self, func: Callable, out: NormedTensor) -> None:
        """Remember the operation, its module and the user's line."""
        if not self._notes:
            return
        if self.lifting.perturbed and out.perturbation_size is not None:
            # an operation of sensitivity 1 hands on its argument's: a node of its own, to tell this result from the argument; one of
            # sensitivity 0 (a sign) begins anew
            moved = out.perturbation_size.clone()
            _again.moves_by(out, moved if moved.requires_grad else moved.requires_grad_())
        rule, arguments = self._call or (None, ())
        # as it is now, whatever is written into it later
        now = type(out)._wrap(out.backing, out.norm_size, out.perturbation_size, out.elem_dims)
        now._inside = out._inside
        self.noted.append(Noted(func, self.module_path[-1], user_line() or "", now, rule, arguments))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Operations inside are no rows, and no uses of parameters."""
        before = self._counts_uses, self._notes
        self._counts_uses = self._notes = False
        try:
            yield
        finally:
            self._counts_uses, self._notes = before

    def note_moved(self, before: torch.Tensor | None, now: torch.Tensor | None) -> None:
        """Rows of results that moved by the one move by the other."""
        for noted in self.noted:
            if before is not None and noted.out.perturbation_size is before:
                noted.out.perturbation_size = now

    def user_location(self) -> str | None:
        """The user's line, from the Python stack."""
        return user_line()


def _pairs(name: str, before: Any, after: Any) -> Iterator[tuple[str, torch.Tensor, NormedTensor]]:
    """The tensors of one argument that the rule gets as normed ones, before and after that."""
    if isinstance(after, NormedTensor):
        yield name, before, after
    elif isinstance(after, list | tuple):
        for i, (b, a) in enumerate(zip(before, after, strict=True)):
            yield from _pairs(f"{name}[{i}]", b, a)
    elif isinstance(after, dict):
        for key, a in after.items():
            yield from _pairs(key, before[key], a)


def _natural(op: Any, call: tuple[tuple, dict], normed: NormedTensor) -> NormSpec | None:
    """What `op` would lift the plain tensor to that was given as `normed`; None if no rule would."""
    t = normed.backing
    found = op.find(*tree_map(lambda v: t if v is normed else v, call))
    if found is None:
        return None
    rule, bound = found
    name = next((n for n, v in bound.arguments.items() if v is t), None)
    if name is None or not rule.slots[name].kinds or rule.slots[name].accepts_plain:
        return None
    kind, dims = rule.wanted(name, t, dict(bound.arguments))
    return NormSpec(kind, canonical_dims(kind, dims, t.ndim))
