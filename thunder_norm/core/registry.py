"""The registry of norm rules, and multiple dispatch on the kinds their annotations name.

A rule is an ordinary function.  The annotations of its tensor arguments are its dispatch key; the first registered rule whose
every argument fits is the one.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from thunder_norm.core.context import Mode, check_mode, current_mode, inside_operation_of_ones_own
from thunder_norm.core.norm_rules import LiftDims, LiftKind, NormRule
from thunder_norm.core.programs import program_of
from thunder_norm.core.ranges import Range
from thunder_norm.core.running import runner
from thunder_norm.core.slots import Slot, hints_of
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.errors import NormMismatchError
from thunder_norm.op_names import METADATA, is_in_place, op_key
from thunder_norm.trees import flat_tensors

# From a call's arguments, and what gives the range of one of them, to the range of the result, or of each result.
RangeRule = Callable[[tuple, Mapping[str, Any], Callable[[Any], Range | None]], "Range | None"]


# From a call's arguments and its result to what is known about that as a sum.
SumsRule = Callable[[tuple, Mapping[str, Any], NormedTensor], tuple]
FactRule = Callable[[tuple, dict[str, Any], NormedTensor], Any]


class NormedOp:
    """An operation together with its norm rules; calling it runs the rule if an argument is normed, the body otherwise."""

    dispatches_on_wrappers = True  # so that a trace has it as one operation

    def __init__(self, key: Any, body: Callable):
        self.key = key
        self.body = body
        self.rules: list[NormRule] = []
        self._ordered: dict[tuple, list[NormRule]] = {}
        self._ordered_of: list[NormRule] = []
        self.range_rule: RangeRule | None = None
        self.range_caps = False
        self.sums_rule: SumsRule | None = None
        self.fact_rule: FactRule | None = None
        self.condition_rule: Callable[[tuple, dict[str, Any], Any], None] | None = None
        self.movement_rule: Callable | None = None
        self.is_factory = False  # a rule of it takes no NormedTensor: it makes a tensor whose norm no other's decides
        self.__name__ = getattr(body, "__name__", str(key))
        self.__qualname__ = getattr(body, "__qualname__", self.__name__)
        self.__module__ = getattr(body, "__module__", __name__)
        self.__doc__ = body.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_normed = any(isinstance(v, NormedTensor) for v in flat_tensors((args, kwargs)))
        if is_normed or (self.is_factory and runner().runs_model()):
            with inside_operation_of_ones_own():
                return runner().torch_function(self, args, kwargs)
        return self.body(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<NormedOp {self.__qualname__} with {len(self.rules)} rules>"

    def register_norm(
        self,
        rule: Callable | None = None,
        *,
        mode: Mode | None = None,
        allow_plain_tensors: bool | Literal["constant"] = False,
        lift_dims: Mapping[str, LiftDims] | None = None,
        lift_kinds: dict[str, LiftKind] | None = None,
        when: Callable[[dict[str, Any]], bool] | None = None,
        takes_complex: bool = False,
        wants_own_kinds: bool = False,
        takes_jumps: bool = False,
    ) -> Callable:
        """Register a norm rule; usable as ``@op.register_norm`` and ``@op.register_norm(...)``.

        Args:
            rule: the function.  Annotate every tensor argument with the kind it needs, name arguments as the operation does.
            mode: only for this mode; for all modes without a rule of their own if None.
            allow_plain_tensors: arguments annotated ``torch.Tensor`` take plain tensors as they are, parameters too, whose moves the rule
                then answers for; with "constant" none of which the norm counts, such as a parameter that moves: those do not fit.
            lift_dims: for a plain tensor in a normed slot, argument name -> function giving its elem_dims.
            lift_kinds: the same for its kind, where the annotated one is not exact enough.
            when: a condition on the arguments by name, as given; a rule with one goes before the others.
            takes_complex: it holds for complex tensors too; other rules do not meet them.
            wants_own_kinds: parameters that it makes another of are taken as annotated, not in the kind that is wanted of that.
            takes_jumps: it says how far its result moves where an argument jumps; other rules are not asked.

        Raises:
            NormMismatchError: the rule is no function, ``torch.Tensor`` in the annotations without `allow_plain_tensors`, no tensor
                annotation at all in a rule that takes arguments of unknown kind, an unknown mode or `allow_plain_tensors`.
        """
        if rule is not None and not callable(rule):
            raise NormMismatchError(f"norm rule for {self.__qualname__}: a rule is a function, got {rule!r}")
        if allow_plain_tensors is not True and allow_plain_tensors is not False and allow_plain_tensors != "constant":
            raise NormMismatchError(f'allow_plain_tensors must be True, False or "constant", got {allow_plain_tensors!r}')
        if mode is not None:
            check_mode(mode)
        if rule is None:
            return lambda fn: self.register_norm(
                fn,
                mode=mode,
                allow_plain_tensors=allow_plain_tensors,
                lift_dims=lift_dims,
                lift_kinds=lift_kinds,
                when=when,
                takes_complex=takes_complex,
                wants_own_kinds=wants_own_kinds,
                takes_jumps=takes_jumps,
            )
        signature = inspect.signature(rule)
        hints = hints_of(rule)
        slots = {name: Slot.of(hints.get(name, inspect.Parameter.empty)) for name in signature.parameters}
        if allow_plain_tensors == "constant":
            slots = {name: replace(slot, accepts_moving=False) for name, slot in slots.items()}
        plain = [name for name, slot in slots.items() if slot.accepts_plain]
        if plain and not allow_plain_tensors:
            raise NormMismatchError(
                f"norm rule for {self.__qualname__}: {plain} annotated torch.Tensor; "
                "annotate a kind, or register with allow_plain_tensors=True"
            )
        unknown = {*(lift_dims or ()), *(lift_kinds or ())} - set(slots)
        if unknown:
            raise NormMismatchError(f"norm rule for {self.__qualname__}: lifts for no argument of it: {sorted(unknown)}")
        lifts = lift_dims or {}, lift_kinds or {}
        self.rules.append(NormRule(rule, signature, slots, mode, *lifts, when, takes_complex, wants_own_kinds, takes_jumps))
        self.is_factory = any(not any(s.kinds for s in r.slots.values()) for r in self.rules)
        return rule

    def extend_to_complex(self, *names: str) -> None:
        """Say of rules registered before that they hold for complex tensors: of those named, or of all that have no condition."""
        self.rules = [
            replace(r, takes_complex=True) if (r.fn.__name__ in names if names else r.when is None and not r.is_refusal) else r
            for r in self.rules
        ]

    def register_range(self, rule: RangeRule, *, takes_complex: bool = False, caps: bool = False) -> RangeRule:
        """Register which entries a result has, given those of the arguments, real ones unless it `takes_complex`; usable as a decorator.

        Where it `caps`, norms by the norm rule are at most those of these entries.
        """

        def of_real(args: tuple, kwargs: Mapping[str, Any], of: Callable[[Any], Range | None]) -> Range | None:
            return None if _any_complex(args, kwargs) else rule(args, kwargs, of)

        self.range_rule, self.range_caps = rule if takes_complex else of_real, caps or self.range_caps
        return rule

    def register_sums(self, rule: SumsRule) -> SumsRule:
        """Register of which weights a result is a sum (`thunder_norm.rules.weighted.weighted_sums`); usable as a decorator."""
        self.sums_rule = rule
        return rule

    def register_fact(self, rule: FactRule) -> FactRule:
        """Register what is known about a result besides what its norm rule says: all its facts (`thunder_norm.rules._facts`).

        Of several rules of an operation each gets the facts that those before it have found.
        """
        earlier = self.fact_rule

        def after(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
            assert earlier is not None, "there is one before"
            out._facts = earlier(args, kwargs, out)
            return rule(args, kwargs, out)

        self.fact_rule = rule if earlier is None else after
        return rule

    def register_condition(self, rule: Callable[[tuple, dict[str, Any], Any], None]) -> None:
        """Register what looks at a result and at the arguments as the program gives them, where plain ones are plain.

        Of bools that a comparison gives, which have no facts (`thunder_norm.rules.known_ranges.conditions`), and of constants.
        """
        earlier = self.condition_rule

        def after(args: tuple, kwargs: dict[str, Any], out: Any) -> None:
            assert earlier is not None
            earlier(args, kwargs, out)
            rule(args, kwargs, out)

        self.condition_rule = rule if earlier is None else after

    def register_movement(self, rule: Callable) -> Callable:
        """Register how a result moves with the arguments, as a linear map or by slopes; usable as a decorator.

        It is `thunder_norm.core.composed.MovementRule`: from the `Call` to what each result's movement is made of.
        """
        self.movement_rule = rule
        return rule

    def _in_order(self, mode: Mode, with_conditions: bool, is_complex: bool) -> list[NormRule]:
        """The rules that may run, in the order in which they are tried."""
        if self._ordered_of != self.rules:
            self._ordered, self._ordered_of = {}, list(self.rules)
        found = self._ordered.get((mode, with_conditions, is_complex))
        if found is None:
            found = [r for r in self.rules if r.mode in (mode, None) and (with_conditions or r.when is None)]
            if is_complex:
                found = [r for r in found if r.takes_complex or r.is_refusal]
            found.sort(key=lambda r: (r.when is None, not r.takes_jumps, r.mode is None))
            self._ordered[mode, with_conditions, is_complex] = found
        return found

    def find(self, args: tuple, kwargs: dict, *, with_conditions: bool = True) -> tuple[NormRule, inspect.BoundArguments] | None:
        """The rule for these arguments.

        Exact kinds go before converted ones, then rules with a condition before the others, those that take jumps first, then those of the current mode.
        Complex tensors meet rules that say they hold for them.
        """
        on_by_default = _on_by_default(self.key)
        bindable = []
        arguments: dict[
            Hashable, dict[str, Any] | None
        ] = {}  # by what is bound: most rules of an operation name the same arguments
        for rule in self._in_order(current_mode(), with_conditions, _any_complex(args, kwargs)):
            if rule.form not in arguments:
                bound = rule.bind(args, kwargs, on_by_default)
                arguments[rule.form] = None if isinstance(bound, str) else bound.arguments
            given = arguments[rule.form]
            if given is None:
                continue
            bound = inspect.BoundArguments(rule.signature, given)
            if rule.fits(bound, converting=False):
                return rule, bound
            bindable.append((rule, bound))
        return next(((rule, bound) for rule, bound in bindable if rule.fits(bound, converting=True)), None)


def _any_complex(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor among the arguments has complex entries."""
    return any(is_complex(t) for t in flat_tensors((args, kwargs)))


@functools.cache
def _on_by_default(key: Any) -> frozenset[str]:
    """The arguments of an operation that are True if they are not given: by aten's schemas and Python's signatures."""
    if not isinstance(key, str):
        return frozenset()
    packet = getattr(torch.ops.aten, key, None)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()] if packet else []
    names = {a.name for schema in schemas for a in schema.arguments if a.has_default_value() and a.default_value is True}
    function = getattr(torch.nn.functional, key, None)
    if isinstance(function, types.FunctionType):
        names |= {p.name for p in inspect.signature(function).parameters.values() if p.default is True}
    return frozenset(names)


_registry: dict[Any, NormedOp] = {}


def normed_op(func: Callable) -> NormedOp:
    """The `NormedOp` of an operation of torch, or a new one for a function of the user's own (as a decorator).

    For a function of one's own the body is its implementation on plain tensors.

    Raises:
        NormMismatchError: it cannot be called, or is not hashable.
    """
    if not callable(func) and not hasattr(func, "__get__"):  # as the attribute torch.Tensor.T has
        raise NormMismatchError(f"normed_op is for functions and operations of torch, got {func!r}")
    key = key_of(func)
    if key is None:
        raise NormMismatchError(f"{func!r} cannot be a normed operation: it is not hashable")
    if key not in _registry:
        _registry[key] = NormedOp(key, func)
    return _registry[key]


def library_op(name: str) -> NormedOp:
    """The `NormedOp` of an operation that another library adds to ``torch.ops``, by its qualified name: the library need not be there."""
    namespace, operation = name.split("::")

    def body(*args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(torch.ops, namespace), operation)(*args, **kwargs)

    body.__name__ = body.__qualname__ = operation
    body.__module__ = f"torch.ops.{namespace}"
    return _registry.setdefault(name, NormedOp(name, body))


def registered_ops() -> dict[Any, NormedOp]:
    """All operations that have norm rules, by key."""
    return dict(_registry)


def has_rule(func: Callable) -> bool:
    """Whether any norm rule is registered for the operation, or a program of such operations."""
    key = key_of(func)
    op = _registry.get(key)
    return op is not None and bool(op.rules) or program_of(key, (), {}) is not None


def key_of(func: Callable) -> Any:
    """The registry key of an operation, None for what cannot be one."""
    key = func.key if isinstance(func, NormedOp) else op_key(func)
    if type(key) is str:
        return key
    try:
        hash(key)
    except TypeError:
        return None
    return key


def find_op(key: Any) -> NormedOp | None:
    """The operation registered under a key."""
    return _registry.get(key)


def is_metadata(func: Callable) -> bool:
    """Whether an operation asks for a property of a tensor that has nothing to do with its values."""
    return key_of(func) in METADATA


def is_mutation(func: Callable, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes its first argument."""
    key = key_of(func)
    return kwargs.get("inplace") is True or isinstance(key, str) and is_in_place(key)
