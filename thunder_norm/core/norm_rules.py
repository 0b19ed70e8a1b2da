"""A norm rule: what it takes, by the annotations of its arguments, and how a call's arguments become those."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_norm.core import conversions
from thunder_norm.core.context import Mode, lift
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import at_data
from thunder_norm.core.nonfinite import of_floats
from thunder_norm.core.slots import Slot
from thunder_norm.core.tensors import NormedTensor

# Arguments that do not change a norm: a rule need not name them.  (One that is None, or False where torch's default is not
# True, need not be named either.)
_NORM_NEUTRAL = frozenset(
    {"inplace", "_stacklevel", "memory_format", "non_blocking", "pin_memory", "layout", "device", "cudnn_enable", "cudnn_enabled"}
)

# What torch's functions take by NumPy's names as well, and methods of tensors by theirs.
_OTHER_NAMES = {
    "self": "input",
    "axis": "dim",
    "axis0": "dim0",
    "axis1": "dim1",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
    "indices": "indices_or_sections",
    "sections": "indices_or_sections",
}

# From the plain argument and all bound arguments to the elem_dims it should be lifted over (None: the kind's default).
LiftDims = Callable[[torch.Tensor, dict[str, Any]], "tuple[int, ...] | None"]
# The same for the kind it should be lifted to, a subclass of the slot's (None: the slot's own).
LiftKind = Callable[[torch.Tensor, dict[str, Any]], "type[NormedTensor] | None"]


@dataclass(frozen=True)
class NormRule:
    """One registered norm rule of an operation."""

    fn: Callable
    signature: inspect.Signature
    slots: dict[str, Slot]
    mode: Mode | None
    lift_dims: Mapping[str, LiftDims] = field(default_factory=dict)
    lift_kinds: dict[str, LiftKind] = field(default_factory=dict)
    when: Callable[[dict[str, Any]], bool] | None = None
    takes_complex: bool = False  # what it says holds for complex numbers as well, whose norm is that of their moduli
    wants_own_kinds: bool = False  # what is wanted of its result says nothing about the kinds of its arguments
    takes_jumps: bool = False  # it says how far its result moves though an argument jumps (`perturbations.refuse_jumps`)
    is_refusal = False  # it only says why there is no rule

    def bind(self, args: tuple, kwargs: dict, on_by_default: frozenset[str] = frozenset()) -> inspect.BoundArguments | str:
        """The call's arguments by the rule's own names, or why they do not fit its signature.

        `on_by_default` are the names of the operation's arguments that are True if not given.
        """
        names = self.signature.parameters
        takes_any = self._takes_any
        kwargs = {(k if k in names else _OTHER_NAMES.get(k, k)): v for k, v in kwargs.items()}
        if not takes_any:
            kwargs = {
                k: v
                for k, v in kwargs.items()
                if k in names or not (k in _NORM_NEUTRAL or v is None or v is False and k not in on_by_default)
            }
        arguments = self._in_order(args, kwargs)
        if arguments is not None:
            return inspect.BoundArguments(self.signature, arguments)
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            return str(e)
        bound.apply_defaults()
        return bound

    @functools.cached_property
    def form(self) -> Hashable:
        """What decides how a call's arguments are bound: two rules with the same one have the same."""
        return tuple((p.name, p.kind, type(p.default), id(p.default)) for p in self.signature.parameters.values())

    @functools.cached_property
    def _takes_any(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self.signature.parameters.values())

    @functools.cached_property
    def _positional(self) -> tuple[str, ...] | None:
        """The arguments that may be given in order; None if the signature has others than those and ones given by name alone."""
        parameters = self.signature.parameters.values()
        if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
            return None
        return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    def _in_order(self, args: tuple, kwargs: dict) -> dict[str, Any] | None:
        """What `inspect.Signature.bind` and its defaults give, at a fifth of the price; None where it has more to say."""
        if self._positional is None or len(args) > len(self._positional):
            return None
        parameters = self.signature.parameters
        given = dict(zip(self._positional, args, strict=False))
        if any(name in given or name not in parameters for name in kwargs):
            return None
        given |= kwargs
        arguments = {name: given.get(name, p.default) for name, p in parameters.items()}
        return arguments if len(given) == len(parameters) or _ABSENT not in map(id, arguments.values()) else None

    def fits(self, bound: inspect.BoundArguments, *, converting: bool) -> bool:
        """Whether every argument fits its slot, and all of them the rule's condition."""
        named = _named_values(bound) if self._positional is None else bound.arguments.items()
        for name, value in named:
            if not self.slots[name].fits(value, converting=converting):
                return False
        return self.when is None or bool(of_floats(self.when, bound.arguments))

    def wanted(self, name: str, t: torch.Tensor, given: dict[str, Any]) -> tuple[type[NormedTensor], tuple[int, ...] | None]:
        """The kind and the elem_dims (None: the kind's default) this rule lifts the plain tensor `t` to."""
        dims = self.lift_dims[name](t, given) if name in self.lift_dims else None
        kind = self.lift_kinds[name](t, given) if name in self.lift_kinds else None
        kind = kind or self.slots[name].kinds[0]
        return RMSTensor if kind is NormedTensor else kind, dims

    def prepare(self, bound: inspect.BoundArguments) -> inspect.BoundArguments:
        """Lift plain tensors and convert kinds so that each argument is what the rule's annotation says."""
        given = dict(bound.arguments)

        def prepare(name: str, value: Any) -> Any:
            slot = self.slots[name]
            if isinstance(value, list | tuple) and slot.is_list:
                return (list if isinstance(value, list) else tuple)(prepare(name, v) for v in value)  # of a named tuple too
            if isinstance(value, NormedTensor):
                if isinstance(value, slot.kinds):
                    return value
                if slot.takes_constant(value):
                    return value.backing
                exact = (self.lift_kinds[name](value, given),) if name in self.lift_kinds else ()
                kind = next(k for k in (*exact, *slot.kinds) if conversions.can_convert(value, k))
                converted = conversions.convert(value, kind)
                # another norm of the same entries may be far smaller than what is known from this one
                return converted if converted.norm_size is value.norm_size else at_data(converted)
            if isinstance(value, torch.Tensor) and slot.kinds and not slot.takes_as_it_is(value):
                return lift(value, *self.wanted(name, value, given))
            return value

        if self._positional is not None:
            for name, value in given.items():
                bound.arguments[name] = prepare(name, value)
            return bound
        for name, value in given.items():
            parameter = self.signature.parameters[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(prepare(name, v) for v in value)
            elif parameter.kind is parameter.VAR_KEYWORD:
                bound.arguments[name] = {k: prepare(name, v) for k, v in value.items()}
            else:
                bound.arguments[name] = prepare(name, value)
        return bound

    def run(self, prepared: inspect.BoundArguments) -> Any:
        """What the rule says of arguments that are prepared for it."""
        if self._is_called_by_name:
            return self.fn(**prepared.arguments)
        return self.fn(*prepared.args, **prepared.kwargs)

    @functools.cached_property
    def _is_called_by_name(self) -> bool:
        """Whether all arguments may be given by name, which `inspect.BoundArguments` has them by; not to what stands for a function."""
        return self._positional is not None and type(self.fn) is types.FunctionType and not hasattr(self.fn, "__wrapped__")


_ABSENT = id(inspect.Parameter.empty)


def _named_values(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((name, v) for v in value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((name, v) for v in value.values())
        else:
            yield name, value
