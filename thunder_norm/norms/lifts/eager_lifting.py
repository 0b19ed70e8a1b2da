"""Lifting in an eager program: tensors are known by identity, and their norms are there at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from thunder_norm.core import by_data, context, conversions
from thunder_norm.core.ranges import facts_of_entries
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor, has_norm
from thunder_norm.errors import MissingNormRuleError, NormMismatchError
from thunder_norm.norms.lifts.annotations import named_annotations
from thunder_norm.norms.lifts.constants import Constants
from thunder_norm.norms.lifts.inference import NormSpec
from thunder_norm.norms.lifts.lifting import Lifting, Otherwise, memory_of
from thunder_norm.norms.lifts.parameters import Derived, Policy, derived_norm, kinds_on_the_way
from thunder_norm.norms.lifts.starts import start_size


class EagerLifting(Lifting):
    """Lifts the tensors a model runs with.

    Args:
        tensors: by parameter and buffer name.
        policy: as `NormTransform`'s parameters.
        model: whose parameters and annotations they are.
        perturbed: give every lifted parameter a perturbation_size that requires grad.
        otherwise: what holds for parameters a mapping does not name, "measured", "unit" or "start" (`start_size`).
        inferred: the norms chosen for parameters whose uses disagree.
        values: tensors on meta that stand for others, each with what it stands for.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        policy: Policy,
        model: torch.nn.Module,
        *,
        perturbed: bool = False,
        otherwise: Otherwise = "measured",
        inferred: Mapping[str, NormSpec] | None = None,
        values: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ):
        super().__init__(policy, otherwise, named_annotations(model), inferred)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.parameters = {id(t) for name, t in tensors.items() if name in parameters and has_norm(t)}
        self.names = {id(t): name for name, t in reversed(tensors.items())}
        if self.leaves is not None:  # of tied names the one a norm is given for
            self.names |= {id(t): name for name, t in tensors.items() if name in self.leaves}
        self.tensors = {name: t for t_id, name in self.names.items() for t in (tensors[name],) if id(t) == t_id}
        self.perturbed = perturbed
        self.constants = Constants()
        for t, value in values:
            self.constants.know(t, value)
        self.lifted: dict[str, NormedTensor] = {}  # each parameter as it was lifted first
        self.wanted_of_sources: dict[int, dict[str, NormSpec]] = {}  # of tensors made from parameters: what is wanted of those
        self._wanted_now: dict[str, NormSpec] | None = None  # the same, while one is lifted
        self._cache: dict[tuple, NormedTensor] = {}
        # of tensors made from parameters: their norm, or why there is none, and what is wanted of the parameters
        self._cache_of_derived: dict[tuple, tuple[NormedTensor | Exception, dict[str, NormSpec]]] = {}
        self._by_memory: dict[tuple, torch.Tensor] = {}
        self._num_indexed = 0

    # -- which tensors are parameters ---------------------------------------------------------------------------------

    def name_of(self, t: torch.Tensor) -> str | None:
        """The dotted name of a parameter or buffer: of several, the one a norm is given for."""
        return self.names.get(id(t))

    def is_parameter(self, t: torch.Tensor) -> bool:
        """Whether a plain tensor is a floating parameter."""
        return id(t) in self.parameters

    def known(self, t: Any) -> Any:
        """The parameter, or tensor made from parameters, that `t` is by another name: ``w.data``, ``nn.Parameter(w)``, a deep copy of w."""
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or id(t) in self.names or id(t) in self.derived:
            return t
        if self._num_indexed != len(self.derived) + 1:
            self._num_indexed = len(self.derived) + 1
            originals = [*self.tensors.values(), *(t for t, _ in self.derived.values())]
            self._by_memory = {memory_of(v): v for v in reversed(originals)}
        return self._by_memory.get(memory_of(t), t)

    def plain_tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers, and what was made from parameters so far."""
        yield from self.tensors.values()
        yield from (t for t, _ in self.derived.values())

    def norms_of_derived(self, t: torch.Tensor) -> list[NormedTensor]:
        """A tensor made from parameters, in each norm that it was lifted in."""
        found = [normed for (t_id, *_), (normed, _) in self._cache_of_derived.items() if t_id == id(t)]
        return [normed for normed in found if isinstance(normed, NormedTensor)]

    def copied(self, func: Callable, t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A deep copy; of a parameter, or of a tensor made from parameters, it is made from that."""
        result = func(t, *args, **kwargs)
        t = self.known(t)
        if self.concerns(t):
            self.derived[id(result)] = result, Derived(torch.clone, (t,), {})
        return result

    # -- lifting ------------------------------------------------------------------------------------------------------

    @property
    def is_inside_derived(self) -> bool:
        """Whether a tensor made from parameters is being lifted: what its rules lift is no use of its own."""
        return self._wanted_now is not None

    def matters(self, t: torch.Tensor) -> bool:
        """Whether its norm is another than that of its data, or moves."""
        return self.perturbed or super().matters(t)

    def lift(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        """The normed tensor for a plain one, by the policy; one for each parameter and kind, and another after its data changed."""
        name = self.name_of(t)
        if name is None:
            return self._lift_derived(t, kind, dims) if id(t) in self.derived else self._lift_constant(t, kind, dims)
        if self._wanted_now is not None:
            self._wanted_now[name] = NormSpec(kind, dims)
        key = (name, kind, dims, context.records_program())
        if key not in self._cache or self._has_changed(t, self._cache[key]):
            normed = self._cache[key] = self._lift_parameter(t, name, kind, dims)
            normed._is_leaf_value = True
        return self._cache[key]

    def _has_changed(self, t: torch.Tensor, lifted: NormedTensor) -> bool:
        """Whether the program wrote something else into a tensor whose norm is that of its data."""
        if self.perturbed and self.is_parameter(t) or self.size_of(t) != "measured":  # writing into those is refused
            return False
        return bool(self._measured(t, type(lifted), lifted.elem_dims).norm_size != lifted.norm_size)

    def _lift_constant(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        return self._measured(t, kind, dims)

    def _measured(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        """A tensor with the norm of its data, or of what it stands for."""
        value = self.constants.value(t)
        normed = context.measured(kind, value, dims)
        return normed if value is t else kind._wrap(t, normed.norm_size, None, dims)

    def _lift_parameter(self, t: torch.Tensor, name: str, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        own = self.stated(name, t) or NormSpec(kind, dims)
        size = self.size_of(t)
        if size == "given":
            normed = self.leaves.normed(name, t, own.kind, own.elem_dims)
        elif size == "unit":
            normed = own.around(t, 1.0)
            normed._least = 1.0  # on the sphere: as `initialize` draws it, each group has it
        elif size == "start":
            normed = own.around(t, start_size(own, t.shape))
        else:
            normed = self._measured(t, kind, dims)  # exactly, in what is wanted
        first = self.lifted.get(name)
        if first is None:
            first = self.lifted[name] = (
                normed
                if isinstance(normed, own.kind) and normed.elem_dims == own.elem_dims
                else self._measured(t, own.kind, own.elem_dims)
            )
            if self.perturbed:
                first.perturbation_size = torch.zeros((), dtype=NORM_DTYPE, requires_grad=True)
        if self.perturbed and normed is not first:  # consumed in another kind: one leaf, converted
            normed.perturbation_size = self._converted_perturbation(name, t, first, normed)
        return conversions.convert(normed, kind, dims)

    def _converted_perturbation(self, name: str, t: torch.Tensor, first: NormedTensor, normed: NormedTensor) -> torch.Tensor:
        """How far a parameter moves in the kind of `normed`, if it is `first` that says how far it moves."""
        factor = conversions.factor(first, type(normed), normed.elem_dims)
        if factor is None and self.stated(name, t) is not None:
            raise NormMismatchError(
                f"parameter {name!r} has a norm in {NormSpec(type(first), first.elem_dims)}, which says nothing about its norm in "
                f"{NormSpec(type(normed), normed.elem_dims)}, wanted here: state another kind (thunder_norm.annotate)"
            )
        return first.perturbation_size * (1.0 if factor is None else factor)

    def _lift_derived(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        """A tensor made from parameters alone: measured if they are, with the perturbation that theirs give it."""
        is_measured = self.is_measured(t)
        if is_measured and not self.perturbed:
            return self._measured(t, kind, dims)
        for source in self.far_before(t):
            for own_kind, own_dims in kinds_on_the_way(source, kind, t, dims):
                with contextlib.suppress(NormMismatchError, MissingNormRuleError):
                    self._derived_once(source, own_kind, own_dims)
        normed = self._derived_once(t, kind, dims)
        if not is_measured:
            return normed
        return _same_entries(kind._wrap(t, self._measured(t, kind, dims).norm_size, normed.perturbation_size, dims), normed)

    def _derived_once(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        """Its norm by the rules of what made it, which are asked once: a program may use a tensor many times.

        Raises:
            NormMismatchError, MissingNormRuleError: those rules say so, each time.
        """
        key = (id(t), kind, dims, context.records_program(), by_data.is_allowed())
        if key not in self._cache_of_derived:
            outer, wanted = self._wanted_now, {}
            self._wanted_now = wanted
            try:
                found = derived_norm(t, self.derived[id(t)][1], kind, dims)
            except (NormMismatchError, MissingNormRuleError) as e:
                found = e
            finally:
                self._wanted_now = outer
            self._cache_of_derived[key] = found, wanted
        found, wanted = self._cache_of_derived[key]
        if self._wanted_now is not None:
            self._wanted_now.update(wanted)
        if isinstance(found, Exception):
            raise found
        self.wanted_of_sources[id(t)] = dict(wanted)
        return _same_entries(type(found)._wrap(t, found.norm_size, found.perturbation_size, found.elem_dims), found)


def _same_entries(x: NormedTensor, of: NormedTensor) -> NormedTensor:
    """x, of which is known what is known of the entries of another."""
    x._facts = facts_of_entries(of._facts)
    return x
