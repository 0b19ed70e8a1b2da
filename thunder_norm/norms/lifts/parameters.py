"""Parameters and buffers by name, the norms given and the kinds stated for them, and what is made from parameters alone.

`lifting` says what follows for a plain tensor that meets a normed one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from thunder_norm import op_names
from thunder_norm.core import by_data, context, conversions, dispatch, registry
from thunder_norm.core.kinds import LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.ranges import facts_of_entries
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor, describe
from thunder_norm.errors import MissingNormRuleError, NormMapKeyError, NormMismatchError, UnsupportedOpError, with_details
from thunder_norm.norms.lifts.annotations import Annotation
from thunder_norm.norms.sizes import Sizes
from thunder_norm.trees import flat_tensors, map_tensors

Policy = Literal["measured", "unit"] | Mapping[str, Any]


def check_policy(policy: Any) -> Policy:
    """`policy` itself, or an error that says what it may be."""
    if policy in ("measured", "unit") or isinstance(policy, Mapping):
        return policy
    raise NormMismatchError(f"parameters must be 'measured', 'unit' or a mapping from names to sizes, got {policy!r}")


def detached(t: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """The same data without a history, maybe elsewhere: of a parameter a parameter, as programs ask whether one is."""
    return as_parameter(t.detach() if device is None else t.detach().to(device), t)


def as_parameter(new: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A tensor without a history that stands for `t`: a parameter if that is one."""
    return torch.nn.Parameter(new, requires_grad=False) if isinstance(t, torch.nn.Parameter) else new


def tensor_names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by every dotted name they are reachable under (tied ones have several).

    Raises:
        NormMismatchError: those of a lazy module that has not been called yet have no shape.
    """
    found = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    lazy = [name for name, t in found.items() if is_lazy(t)]
    if lazy:
        raise NormMismatchError(
            with_details(
                "parameters of lazy modules have no norm before they have a shape",
                parameters=", ".join(map(repr, lazy[:4])),
                instead="call the model once, so that they are initialized",
            )
        )
    return found


def call_with(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], args: tuple, kwargs: dict) -> Any:
    """The result of a module with these tensors in place of its parameters and buffers.

    Raises:
        UnsupportedOpError: the module is a program of torch.jit, whose tensors cannot be replaced.
    """
    if isinstance(model, torch.nn.DataParallel):  # of several devices; here one computes everything
        inside = {name.removeprefix("module."): t for name, t in tensors.items()}
        return call_with(model.module, inside, args, kwargs)
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedOpError(
            with_details(
                f"a {type(model).__name__} has no norms",
                why="it is a compiled program of torch.jit: its operations and parameters cannot be looked at one by one",
                instead="the module that torch.jit.script or torch.jit.trace was given",
            )
        )
    return torch.func.functional_call(model, dict(tensors), args, kwargs)


def tied_names(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """For each name of a parameter or buffer, all names of the same tensor, the canonical one first."""
    groups: dict[int, list[str]] = {}
    names = tensor_names(model)
    for name, t in names.items():
        groups.setdefault(id(t), []).append(name)
    return {name: tuple(groups[id(t)]) for name, t in names.items()}


def check_names(mapping: Mapping[str, Any], model: Any, what: str) -> None:
    """Refuse names the model does not have.

    Raises:
        NormMapKeyError: lists the unknown names and those that are close to them; or there is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise NormMapKeyError(f"{what} given, but {describe(model)} is not a module")
    names = tensor_names(model)
    unknown = [name for name in mapping if name not in names]
    if unknown:
        import difflib

        close = sorted({c for name in unknown for c in difflib.get_close_matches(name, names, n=2)})
        noun = "a parameter or buffer" if len(unknown) == 1 else "parameters or buffers"
        raise NormMapKeyError(
            with_details(
                f"{what} names {noun} the model does not have",
                unknown=", ".join(map(repr, unknown)),
                did_you_mean=", ".join(map(repr, close)) or None,
                model=f"{type(model).__name__} with {len(names)} parameters and buffers",
            )
        )


def size_tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """norm_size and, if there is one, perturbation_size of a NormedTensor; of a bare size, itself as a tensor.

    Raises:
        NormMismatchError: the value cannot be a size.
    """
    with torch.enable_grad():  # a float32 size is converted: whether it requires grad is its own affair, in any context
        normed = value if isinstance(value, NormedTensor) else LinfTensor(value)
    if normed.perturbation_size is None:
        return (normed.norm_size,)
    return (normed.norm_size, normed.perturbation_size)


class Leaves:
    """The current sizes given for parameters: a mapping whose values may be replaced between calls.

    A value is a NormedTensor (its kind is then what the parameter is taken for), a number, or a 0-dim tensor.
    """

    def __init__(self, mapping: Mapping[str, Any]):
        self._mapping = mapping

    def __contains__(self, name: str) -> bool:
        return name in self._mapping

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def kind(self, name: str) -> type[NormedTensor] | None:
        """The kind a leaf asks for, or None if it is only a size."""
        value = self._mapping[name]
        return type(value) if isinstance(value, NormedTensor) else None

    def elem_dims(self, name: str) -> tuple[int, ...] | None:
        """The elem_dims a leaf asks for, or None for its kind's default."""
        value = self._mapping[name]
        return value.elem_dims if isinstance(value, NormedTensor) else None

    def tensors(self, name: str) -> tuple[torch.Tensor, ...]:
        """norm_size and, if the leaf has one, perturbation_size."""
        return size_tensors(self._mapping[name])

    def normed(
        self, name: str, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...], tensors: tuple | None = None
    ) -> NormedTensor:
        """The norm given for `name` around `t`: in its own kind, or in `kind` over `dims` if only a size was given.

        Args:
            name: the parameter.
            t: the tensor it stands for.
            kind: the kind the operation at hand wants.
            dims: the canonical elem_dims it wants.
            tensors: stand in for the given size and perturbation (fakes, while tracing).
        """
        size, *perturbation = self.tensors(name) if tensors is None else tensors
        own = self.kind(name)
        if own is not None:
            given = self.elem_dims(name)
            kind, dims = own, own._canonical(own.default_elem_dims(t.ndim) if given is None else given, t.ndim)
        return kind._wrap(t, size, perturbation[0] if perturbation else None, dims)

    def sizes(self, names: Iterable[str]) -> Sizes:
        """The sizes given for `names`, and what a trace relies on about them: it must be the same in the next call."""
        return Sizes(map(self._mapping.__getitem__, names))


def canonical_dims(kind: type[NormedTensor], elem_dims: tuple[int, ...] | None, ndim: int) -> tuple[int, ...]:
    """Canonical elem_dims of a kind for a tensor of `ndim` dimensions; its default if None."""
    return kind._canonical(kind.default_elem_dims(ndim) if elem_dims is None else elem_dims, ndim)


def stated_kind(
    name: str, annotations: Mapping[str, Annotation], leaves: Leaves | None
) -> tuple[type[NormedTensor], tuple[int, ...] | None] | None:
    """Kind and elem_dims somebody stated for a parameter: with the norm given for it, or by `annotate`; None if nobody did."""
    if leaves is not None and name in leaves:
        given = leaves.kind(name)
        if given is not None:
            return given, leaves.elem_dims(name)
    annotation = annotations.get(name)
    if annotation is None or annotation.kind is None:
        return None
    return annotation.kind, annotation.elem_dims


@dataclass(frozen=True)
class Derived:
    """How a tensor was made from parameters alone: the operation, and which of its results it is (None for the only one).

    A constant that multiplied them is there as the gain that it was then.
    """

    fn: Callable
    args: tuple
    kwargs: dict
    index: int | None = None

    def sources(self) -> list[torch.Tensor]:
        """The tensors it was made from."""
        return [t for t in flat_tensors((self.args, self.kwargs)) if not isinstance(t, NormedTensor)]

    def wants_own_kinds(self, kind: type[NormedTensor]) -> bool:
        """Whether the kind wanted of it says nothing about theirs: an operator of them makes vectors of vectors (learned queries, projected)."""
        op = registry.find_op(registry.key_of(self.fn))
        if op is None:
            return False
        may_want = [rule for rule in op.rules if rule.wants_own_kinds]
        if any(rule.when is None for rule in may_want):
            return True
        found = None if issubclass(kind, RMSToRMSTensor) and not may_want else op.find(self.args, self.kwargs)
        if found is not None and found[0].wants_own_kinds:
            return True
        if issubclass(kind, RMSToRMSTensor):
            return False
        slots = () if found is None else found[0].slots.values()
        return any(slot.kinds and all(issubclass(k, RMSToRMSTensor) for k in slot.kinds) for slot in slots)

    def norm(self, lift: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """What the operation's rule makes of the norms that `lift` gives its tensors."""
        args, kwargs = map_tensors(lambda t: t if isinstance(t, NormedTensor) else lift(t), (self.args, self.kwargs))
        result = dispatch.run_registered(self.fn, args, kwargs)
        return result if self.index is None else result[self.index]


def refuse_mutation(fn: Callable, args: tuple, kwargs: dict, location: str | None) -> None:
    """Refuse to change a tensor made from parameters: its own norm would silently stay what it was.

    Raises:
        UnsupportedOpError: `fn` works in place.
    """
    if registry.is_mutation(fn, kwargs):
        raise UnsupportedOpError(
            with_details(
                f"in-place {op_names.op_name(fn)} on a tensor made from parameters",
                called_with=describe(args),
                at=location,
                instead="use the out-of-place operation and assign its result",
            )
        )


def derivations(fn: Callable, args: tuple, kwargs: dict, result: Any) -> Iterator[tuple[torch.Tensor, Derived]]:
    """The tensors an operation on parameters alone made (one that is an argument itself it did not make)."""
    given = {id(v) for v in tree_flatten((args, kwargs))[0]}
    several = isinstance(result, list | tuple)
    for i, t in enumerate(result if several else (result,)):
        if isinstance(t, torch.Tensor) and id(t) not in given:
            yield t, Derived(fn, args, kwargs, i if several else None)


def _converted(found: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
    """What an operation made, in the kind wanted; where it is a program of others, these have made a plain tensor of plain ones."""
    return conversions.convert(found, kind, dims) if isinstance(found, NormedTensor) else context.lift(found, kind, dims)


def derived_norm(t: torch.Tensor, derived: Derived, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
    """The norm of a tensor made from parameters alone: lift those, and send the norm through the operation's own rule.

    They are lifted in the kind wanted for the result (a product of operators is one); or, where no rule takes them so or the rule wants
    its own kinds, as the rule wants them, and the result is converted.

    Args:
        t: the tensor.
        derived: how it was made.
        kind: the kind wanted for `t`.
        dims: the canonical elem_dims wanted.

    Raises:
        NormMismatchError: the result has no sound conversion to `kind`.
    """
    wanted = RMSTensor if kind is NormedTensor else kind

    def as_its_rule_wants(lift: Callable[[torch.Tensor], torch.Tensor] = lambda v: v) -> NormedTensor:
        return _converted(derived.norm(lift), wanted, dims)

    def by_entries() -> NormedTensor:  # what has no rule says nothing about kinds
        return as_its_rule_wants(lambda v: context.lift(v, RMSTensor, None))

    try:
        with by_data.by_rules_alone():
            result = as_its_rule_wants() if derived.wants_own_kinds(wanted) else _derived_in(derived, wanted, dims)
    except (NormMismatchError, MissingNormRuleError) as first:
        result, why = None, first
        without = contextlib.nullcontext()  # at the data, where no rule bounds it
        for rules, way in ((by_data.by_rules_alone(), as_its_rule_wants), (without, as_its_rule_wants), (without, by_entries)):
            try:
                with rules:
                    result = way()
                break
            except (NormMismatchError, MissingNormRuleError) as second:
                # that the kind wanted of the result has no rule says nothing about its sources
                why = second if isinstance(first, MissingNormRuleError) else first
        if result is None:
            raise why from None
    out = wanted._wrap(t, result.norm_size, result.perturbation_size, dims)
    out._facts = facts_of_entries(result._facts)
    return out


def _derived_in(derived: Derived, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
    """The norm of the result, from its sources' in the same kind."""
    source = derived.sources()[0]
    # a vector that becomes a matrix is no operator yet
    source_kind = RMSTensor if len(kind.default_elem_dims(source.ndim)) > source.ndim else kind
    default = source_kind.default_elem_dims(source.ndim)
    choice = source_kind, default

    def chosen(v: torch.Tensor, own: tuple[type[NormedTensor], tuple[int, ...]]) -> tuple[type[NormedTensor], Any]:
        # a scalar beside a matrix is no operator
        return own[0] if v.ndim >= len(default) else RMSTensor, own[1] if v.ndim >= len(default) else None

    if (
        len(default) == 2
    ):  # a transposed matrix wants (in, out) of its source, one whose rows are the entries of a kernel wants a kernel
        one = torch.ones((), dtype=NORM_DTYPE)
        kernels = [(RMSToRMSConvTensor, RMSToRMSConvTensor.default_elem_dims(source.ndim))]
        has_kernels = source_kind is RMSToRMSTensor and source.ndim > 2
        for tried in (choice, (source_kind, default[::-1]), *(kernels if has_kernels else ())):
            with context.environment(context.Environment()):  # only to see what becomes of the dimensions
                beside = replace(
                    derived,
                    args=map_tensors(
                        lambda v: v._wrap(v.backing, one, None, ()) if isinstance(v, NormedTensor) else v, derived.args
                    ),
                )
                result = beside.norm(lambda v, own=tried: chosen(v, own)[0]._wrap(v, one, None, chosen(v, own)[1]))
            if isinstance(result, kind) and result.elem_dims == dims:
                choice = tried
                break
    return _converted(derived.norm(lambda v: context.lift(v, *chosen(v, choice))), kind, dims)


def kinds_on_the_way(
    source: torch.Tensor, kind: type[NormedTensor], t: torch.Tensor, dims: tuple[int, ...]
) -> Iterator[tuple[type[NormedTensor], tuple[int, ...]]]:
    """The kinds that `derived_norm` most likely lifts in what t was made from, some operations before: those of t, as far as they fit.

    Lifted in these from the first to the last, no tensor needs more than the one before it.
    """
    wanted = RMSTensor if kind is NormedTensor else kind
    own = RMSTensor if len(wanted.default_elem_dims(source.ndim)) > source.ndim else wanted
    default = canonical_dims(own, None, source.ndim)
    fits = source.ndim == t.ndim and own is wanted
    yield own, dims if fits else default
    if len(default) == 2:
        yield own, (dims if fits else default)[::-1]
