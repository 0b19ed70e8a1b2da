"""What surrounds the rules in an eager run: lifts parameters by a policy, and notes operations, rules and uses of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm import op_names
from thunder_norm.core import context, conversions
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.norms.annotations import named_annotations
from thunder_norm.norms.constants import Constants
from thunder_norm.norms.inference import Candidate, Inferred, NormSpec, Use, disagree
from thunder_norm.norms.parameters import Derived, Leaves, Policy, canonical_dims, derivations, derived_norm, stated_kind
from thunder_norm.norms.plain_operations import Functions, Operations, Unknown
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


class EagerEnvironment(context.Environment):
    """Lifts parameters by a policy and notes every operation.

    Args:
        tensors: the tensors the model runs with, by parameter and buffer name.
        policy: as `NormTransform`'s parameters.
        model: whose parameters and annotations they are.
        perturbed: give every lifted parameter a perturbation_size that requires grad.
        otherwise: what holds for parameters a mapping does not name, "measured" or "unit".
        inferred: the norms chosen for parameters whose uses disagree.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        policy: Policy,
        model: torch.nn.Module,
        *,
        perturbed: bool = False,
        otherwise: str = "measured",
        inferred: Mapping[str, NormSpec] | None = None,
    ):
        self.is_unit = policy == "unit" or otherwise == "unit"
        self.leaves = None if isinstance(policy, str) else Leaves(policy)
        self.annotations = named_annotations(model)
        self.inferred = dict(inferred or {})
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.parameters = {id(t) for name, t in tensors.items() if name in parameters and t.is_floating_point()}
        self.names = {id(t): name for name, t in reversed(tensors.items())}
        if self.leaves is not None:  # of tied names the one a norm is given for
            self.names |= {id(t): name for name, t in tensors.items() if name in self.leaves}
        self.tensors = {name: t for t_id, name in self.names.items() for t in (tensors[name],) if id(t) == t_id}
        self.perturbed = perturbed
        self.noted: list[Noted] = []
        self.uses: dict[str, list[Use]] = {}
        self.candidates: dict[str, tuple[Candidate, ...]] = {}
        self.lifted: dict[str, NormedTensor] = {}
        self.derived: dict[int, tuple[torch.Tensor, Derived]] = {}
        self.unknown = Unknown()
        self.constants = Constants()
        self.module_path = [""]
        self._by_memory: dict[tuple, torch.Tensor] = {}
        self._num_indexed = 0
        self._cache: dict[tuple, NormedTensor] = {}
        # norms of parameters, and of what was made from them alone: their names, and the last operation
        self._of_parameters: dict[int, tuple[tuple[str, ...], str]] = {}
        self._made: list[NormedTensor] = []
        self._counts_uses = True
        self._call: tuple[Callable, tuple[Argument, ...]] | None = None
        self._lifts_of_derived: dict[str, NormSpec] | None = None  # while one is lifted: what is wanted of its parameters
        self._sources: dict[int, dict[str, NormSpec]] = {}  # the same, of tensors made from parameters

    def stated(self, name: str, t: torch.Tensor) -> NormSpec | None:
        """The norm somebody stated for a parameter, or that was chosen because its uses disagree."""
        stated = stated_kind(name, self.annotations, self.leaves)
        return self.inferred.get(name) if stated is None else NormSpec(stated[0], canonical_dims(*stated, t.ndim))

    def lift(self, t: torch.Tensor, kind: type[NormedTensor], elem_dims: tuple[int, ...] | None) -> NormedTensor:
        """The normed tensor for a plain one, by the policy."""
        with context.perturbations_recorded():
            return self._lift(t, kind, canonical_dims(kind, elem_dims, t.ndim))

    def _lift(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        name = self.names.get(id(t))
        if name is None:
            self.unknown.check(t, user_line())
            return self._lift_derived(t, kind, dims) if id(t) in self.derived else self._lift_constant(t, kind, dims)
        if self._lifts_of_derived is not None:
            self._lifts_of_derived[name] = NormSpec(kind, dims)
        key = (name, kind, dims, context.records_program())
        if key not in self._cache:
            normed = self._cache[key] = self._lift_parameter(t, name, kind, dims)
            normed._is_leaf_value = True
            self._of_parameters[id(normed)] = (name,), ""
        return self._cache[key]

    def _lift_constant(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        return kind._wrap(t, context.measured(kind, self.constants.value(t), dims).norm_size, None, dims)

    def run_real(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run an operation on plain tensors, and follow the values of constants through it."""
        result = func(*args, **kwargs)
        self.constants.follow(func, args, kwargs, result)
        return result

    def follow(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        """Follow the values of constants through an operation."""
        self.constants.follow(func, args, kwargs, result)

    def _lift_parameter(self, t: torch.Tensor, name: str, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        own = self.stated(name, t) or NormSpec(kind, dims)
        if self.leaves is not None and name in self.leaves:
            normed = self.leaves.normed(name, t, own.kind, own.elem_dims)
        elif self.is_unit and id(t) in self.parameters:
            normed = own.around(t, 1.0)
        else:
            normed = context.measured(kind, t, dims)  # exactly, in what is wanted
        first = self.lifted.get(name)
        if first is None:
            first = self.lifted[name] = (
                normed
                if isinstance(normed, own.kind) and normed.elem_dims == own.elem_dims
                else context.measured(own.kind, t, own.elem_dims)
            )
            if self.perturbed:
                first.perturbation_size = torch.zeros((), dtype=NORM_DTYPE, requires_grad=True)
        if self.perturbed and normed is not first:  # consumed in another kind: one leaf, converted
            factor = conversions.factor(first, type(normed), normed.elem_dims)
            if factor is None and self.stated(name, t) is not None:
                raise NormMismatchError(
                    f"parameter {name!r} has a norm in {NormSpec(type(first), first.elem_dims)}, which says nothing about its norm in "
                    f"{NormSpec(type(normed), normed.elem_dims)}, wanted here: state another kind (thunder_norm.annotate)"
                )
            normed.perturbation_size = first.perturbation_size * (1.0 if factor is None else factor)
        return conversions.convert(normed, kind, dims)

    def _lift_derived(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        """A tensor made from parameters alone: measured if they are, with the perturbation that theirs give it."""
        is_measured = self.is_measured(t)
        if is_measured and not self.perturbed:
            return context.measured(kind, t, dims)
        outer, lifts = self._lifts_of_derived, self._lifts_of_derived if self._lifts_of_derived is not None else {}
        self._lifts_of_derived = lifts
        try:
            normed = derived_norm(t, self.derived[id(t)][1], kind, dims)
        finally:
            self._lifts_of_derived = outer
        self._sources[id(t)] = dict(lifts)
        if not is_measured:
            return normed
        return kind._wrap(t, context.measured(kind, t, dims).norm_size, normed.perturbation_size, dims)

    def is_measured(self, t: torch.Tensor) -> bool:
        """Whether the norm of a parameter, or of a tensor made from parameters alone, is that of its data."""
        if id(t) in self.derived:
            return all(self.is_measured(v) for v in self.derived[id(t)][1].sources())
        name = self.names.get(id(t))
        is_given = self.leaves is not None and name is not None and name in self.leaves
        return not (is_given or self.is_unit and id(t) in self.parameters)

    def concerns(self, t: torch.Tensor) -> bool:
        """Whether a plain tensor is a floating parameter, or was made from parameters alone."""
        return id(t) in self.parameters or id(t) in self.derived

    def matters(self, t: torch.Tensor) -> bool:
        """Whether its norm is another than that of its data, or moves."""
        return self.perturbed or not self.is_measured(t)

    def derive(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """An operation on parameters alone: run plainly, and remembered."""
        result = func(*args, **kwargs)
        self.derived |= {id(t): (t, made) for t, made in derivations(func, args, kwargs, result)}
        return result

    def inside_function(self) -> contextlib.AbstractContextManager[Any]:
        """The calls of a torch function written in Python are those of the program."""
        return Functions(self)

    def inside_operation(self) -> contextlib.AbstractContextManager[Any]:
        """What torch's C++ code does to parameters."""
        return Operations(self)

    def location(self) -> str | None:
        """The user's line."""
        return user_line()

    def known(self, t: Any) -> Any:
        """The parameter, or tensor made from parameters, that `t` is by another name: ``w.data``, ``nn.Parameter(w)``, a deep copy of w."""
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or id(t) in self.names or id(t) in self.derived:
            return t
        if self._num_indexed != len(self.derived) + 1:
            self._num_indexed = len(self.derived) + 1
            originals = [*self.tensors.values(), *(t for t, _ in self.derived.values())]
            self._by_memory = {_memory(v): v for v in reversed(originals)}
        return self._by_memory.get(_memory(t), t)

    def copied(self, func: Callable, t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A deep copy; of a parameter, or of a tensor made from parameters, it is made from that."""
        result = func(t, *args, **kwargs)
        t = self.known(t)
        if id(t) in self.parameters or id(t) in self.derived:
            self.derived[id(result)] = result, Derived(torch.clone, (t,), {})
        return result

    def annotated(self, t: Any) -> Any:
        """A parameter as the kind stated or chosen for it; anything else as it is."""
        name = self.names.get(id(t)) if isinstance(t, torch.Tensor) else None
        if name is None:
            return t
        stated = stated_kind(name, self.annotations, self.leaves)
        if stated is None and (name not in self.inferred or self.is_measured(t)):
            return t
        try:
            own = self.stated(name, t)
            return self.lift(t, own.kind, own.elem_dims)
        except NormMismatchError as e:
            raise NormMismatchError(f"the norm stated for parameter {name!r} does not fit it: {e}") from e

    def note_call(self, op: Any, rule: Any, call: tuple[tuple, dict], given: dict[str, Any], prepared: dict[str, Any]) -> None:
        """Remember which rule runs and what it gets, and the parameters among that."""
        pairs = [pair for name in given for pair in _pairs(name, given[name], prepared[name])]
        if self._lifts_of_derived is None and self._counts_uses:
            for name, before, after in pairs:
                for parameter, use in self._uses(op, rule, call, given, name, before, after):
                    self.uses.setdefault(parameter, []).append(use)
        self._call = rule.fn, tuple(self._argument(*pair) for pair in pairs)

    def _argument(self, name: str, before: torch.Tensor, after: NormedTensor) -> Argument:
        taken = NormSpec(type(after), after.elem_dims)
        if isinstance(before, NormedTensor):
            own = NormSpec(type(before), before.elem_dims)
            return Argument(name, str(own), str(taken), own.factor(taken, before.backing))
        parameter = self.names.get(id(before))
        if parameter is None:
            return Argument(
                name, "a tensor made from parameters" if id(before) in self.derived else "a plain tensor", str(taken), 1.0
            )
        leaf = self.lifted[parameter]
        own = NormSpec(type(leaf), leaf.elem_dims)
        factor = 1.0 if self.is_measured(before) else own.factor(taken, before)
        return Argument(name, f"{parameter}, {'measured' if self.is_measured(before) else own}", str(taken), factor)

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
            if id(before) in self.derived:
                through = op_names.op_name(self.derived[id(before)][1].fn)
                wants = self._sources.get(id(before), {})
            else:
                parameter = self.names.get(id(before))
                wants = {} if parameter is None else {parameter: taken}
            own = {source: NormSpec(type(leaf), leaf.elem_dims) for source, leaf in self.lifted.items()}
            found = [(source, wanted, own[source].factor(wanted, self.tensors[source])) for source, wanted in wants.items()]
        key = op_names.op_key(op.body)
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
                ),
            )

    def run(self, func: Callable, args: Any, kwargs: Any) -> Any:
        """Run an operation on normed tensors; what it makes from parameters alone is no use of them, but stands for them."""
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        sources = [self._of_parameters.get(id(t)) for t in tensors]
        if not all(sources):
            return func(*args, **kwargs)
        was_counting, self._counts_uses = self._counts_uses, False
        try:
            result = func(*args, **kwargs)
        finally:
            self._counts_uses = was_counting
        names = tuple(dict.fromkeys(name for source in sources if source is not None for name in source[0]))
        for t in tree_flatten(result)[0]:
            if isinstance(t, NormedTensor) and id(t) not in self._of_parameters:
                self._made.append(t)  # alive, so that its id stays its own
                self._of_parameters[id(t)] = names, op_names.op_name(func)
        return result

    def disagreements(self) -> dict[str, list[NormSpec]]:
        """The parameters of unstated kind whose uses want different norms, and must have one: its size is given, or it moves."""
        found = {}
        for name, uses in self.uses.items():
            t = self.tensors[name]
            if self.stated(name, t) is None and (self.perturbed or not self.is_measured(t)):
                different = disagree([u.wanted for u in uses], t)
                if different:
                    found[name] = different
        return found

    def infer(self) -> dict[str, Inferred]:
        """The norm of each parameter that was used, and how it was found."""
        found = {}
        for name, uses in self.uses.items():
            leaf = self.lifted[name]
            found[name] = Inferred(
                name, NormSpec(type(leaf), leaf.elem_dims), tuple(uses), self._who_stated(name), self.candidates.get(name, ())
            )
        return found

    def _who_stated(self, name: str) -> str | None:
        if self.leaves is not None and name in self.leaves and self.leaves.kind(name) is not None:
            return "a norm of that kind was given for it"
        return "an annotation says so" if name in self.annotations else None

    def note(self, func: Callable, out: NormedTensor) -> None:
        """Remember the operation, its module and the user's line."""
        if self.perturbed and out.perturbation_size is not None:
            # an operation of sensitivity 1 hands on its argument's: a node of its own, to tell this result from the argument
            out.perturbation_size = out.perturbation_size.clone()
        rule, arguments = self._call or (None, ())
        self.noted.append(Noted(func, self.module_path[-1], user_line() or "", out, rule, arguments))

    def user_location(self) -> str | None:
        """The user's line, from the Python stack."""
        return user_line()


def _memory(t: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor's entries are, and in which order."""
    if t.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return (id(t),)
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype


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
