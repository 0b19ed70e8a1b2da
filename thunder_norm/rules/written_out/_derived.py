"""Rules that derive what a result is as a function of another tensor, and what that claims.

A rule written with `derives` returns a fact of `_forms`, not a norm.  Where the fact says more than the operation's own rule
(numbers of groups, which move with x: what they claim is about x, not about the operation before; and normalizations), the claim
is the fact's.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import distances, is_local
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.registry import normed_op
from thunder_norm.core.slots import hints_of
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, every_fact, moves_with, unconditional, with_fact
from thunder_norm.rules._lengths import least_length
from thunder_norm.rules._local import smallest_mean_square
from thunder_norm.rules._shared import Constant
from thunder_norm.rules.layers.normalization import normalized
from thunder_norm.rules.written_out import _forms as forms
from thunder_norm.rules.written_out._forms import Averaged, Form, Group, Inverse, Normalized, Reshaped, Root, own_form
from thunder_norm.scalars import times

Derived = Group | Reshaped | Normalized | None


@dataclass(frozen=True)
class Known:
    """An argument of an operation, as the function of `x` that it is: what derivations look at in place of a normed tensor."""

    tensor: NormedTensor
    fact: Group | Reshaped

    @property
    def form(self) -> Form | None:
        """It, where it is a form."""
        return self.fact if isinstance(self.fact, Form) else None

    @property
    def root(self) -> Root | None:
        """It, where it is a root."""
        return self.fact if isinstance(self.fact, Root) else None

    @property
    def inverse(self) -> Inverse | None:
        """It, where it is an inverse."""
        return self.fact if isinstance(self.fact, Inverse) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return self.tensor.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.tensor.dtype

    @property
    def is_source(self) -> bool:
        """Whether it is the tensor itself."""
        return isinstance(self.fact, Form) and self.fact.x.is_same(Source.of(self.tensor))


def derives(
    *ops: Callable, allow_plain_tensors: bool | Literal["constant"] = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers what a function derives from the arguments of operations: a conditional rule, where it is something.

    The function is written as a rule, with `Known` in place of a kind, and returns what the result is; None where that is nothing
    it knows.  It is asked for each tensor that all of these arguments are functions of: the arguments themselves among them.
    """

    def register(derive: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(derive)

        def condition(arguments: dict[str, Any]) -> bool:
            call = inspect.BoundArguments(signature, arguments)  # type: ignore[arg-type]
            return next(_derived(derive, call), None) is not None

        for op in ops:

            def rule(*args: Any, _op: Callable = op, **kwargs: Any) -> Any:
                call = signature.bind(*args, **kwargs)
                return _stated(_op, call, list(_derived(derive, call)))

            functools.update_wrapper(rule, derive)
            rule.__annotations__ = {name: RMSTensor if hint is Known else hint for name, hint in _hints(derive).items()}
            normed_op(op).register_norm(rule, when=condition, allow_plain_tensors=allow_plain_tensors)
        return derive

    return register


@functools.cache
def _hints(derive: Callable) -> dict[str, Any]:
    return hints_of(derive)


_ALTERNATIVES = 3  # of how many tensors one is said to be a function; the first ones are the furthest back


def _derived(derive: Callable[..., Any], call: inspect.BoundArguments) -> Iterator[Any]:
    """What is derived, for each tensor that the arguments are functions of."""
    given = {name: call.arguments[name] for name, hint in _hints(derive).items() if hint is Known}
    if not all(isinstance(x, RMSTensor) and isinstance(x._facts, Alternatives | None) for x in given.values()):
        return
    known = {name: facts_of(x) for name, x in given.items()}
    first, *others = known.values()
    for candidate in first:
        x = source_of(candidate)
        found = [next((f for f in facts if source_of(f).is_same(x)), None) for facts in (first, *others)]
        fitting = [f for f in found if f is not None]
        if len(fitting) == len(found):
            seen = {name: Known(t, f) for (name, t), f in zip(given.items(), fitting, strict=True)}
            asked = inspect.BoundArguments(call.signature, {**call.arguments, **seen})  # type: ignore[arg-type]
            found = derive(*asked.args, **asked.kwargs)
            if found is not None:
                yield found


def derivations(derive: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function that `derives` says of the result for these arguments."""
    return list(_derived(derive, inspect.signature(derive).bind(*args)))


def facts_of(x: torch.Tensor) -> list[Group | Reshaped]:
    """What x is as a function of others, and of itself; nothing of a plain tensor."""
    if not isinstance(x, RMSTensor):
        return []
    found = x._facts if isinstance(x._facts, Alternatives) else ()
    return [*(f for f in found if isinstance(f, Group | Reshaped)), own_form(x)]


def are_of_one(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are known as functions of one tensor."""
    return any(source_of(f).is_same(source_of(g)) for f in facts_of(a) for g in facts_of(b))


def source_of(fact: Group | Reshaped) -> Source:
    """The tensor that it is a function of."""
    return fact.root.x if isinstance(fact, Inverse) else fact.x


def with_facts(result: NormedTensor, found: Iterable[Any]) -> NormedTensor:
    """A rule's result, and what it is as a function of others."""
    return with_fact(result, Alternatives(list(found)[:_ALTERNATIVES]))


def _stated(op: Callable, call: inspect.BoundArguments, found: list[Any]) -> Any:
    """The rule's result for a call of which these derivations are known."""
    inputs = [name for name, value in call.arguments.items() if isinstance(value, NormedTensor)]
    normalizations = [f for f in found if isinstance(f, Normalized)]
    if normalizations:
        return normalization(normalizations[0], inputs)
    if isinstance(found[0], tuple):
        results = unconditional(op, *call.args, **call.kwargs)
        return tuple(with_facts(r, filter(None, fs)) for r, fs in zip(results, zip(*found, strict=True), strict=True))
    best = found[0]
    is_simple = isinstance(best, Averaged | Reshaped) or isinstance(best, Form) and (not best.is_of_groups or best.degree <= 1)
    if is_simple or not any(isinstance(f, Group) for name in inputs for f in every_fact(call.arguments[name])):
        result = unconditional(op, *call.args, **call.kwargs)
        return None if result is None else with_facts(result, found)  # a result without a norm: of bools
    value, lipschitz = _claims(best)
    return with_facts(moves_with(source_of(best), LinfTensor(value, elem_dims=()), lipschitz, *inputs), found)


def normalization(found: Normalized, inputs: Sequence[str]) -> NormedTensor:
    """x over its length: that of the normalization it is, times a number."""
    root = found.root
    x = root.x.tensor()
    x.perturbation_size = root.x.perturbation_size
    result = normalized(x, root.dims, root.divisor, root.is_centred)
    c = abs(found.factor) * root.slack
    scaled = type(result)._wrap(None, times(result.norm_size, c), None, result.elem_dims)  # type: ignore[arg-type]
    return moves_with(root.x, scaled, times((result._sensitivity or {})["input"], c), *inputs)


# -- what the numbers of groups claim -------------------------------------------------------------------------------------


def _claims(found: Group | Reshaped) -> tuple[torch.Tensor, Constant]:
    """(value, sensitivity to x) of a number for each group."""
    assert not isinstance(found, Averaged | Reshaped), "it has the claims of its operation"
    if isinstance(found, Form):
        return _claims_of_form(found)
    root = found.root if isinstance(found, Inverse) else found
    x, spread = root.x.tensor(), forms.factor_of_groups(root.x, root.dims)
    largest = root.divisor.at(times(x.norm_size, spread).square())
    if isinstance(found, Root):
        c = root.scale * root.slack
        return times(largest, c), c * spread
    c, smallest = abs(found.scale) * root.slack / root.scale, root.divisor.smallest
    if current_mode() != "bound":
        return c / largest, c * spread / largest.square()
    value = bounded(c / smallest if smallest else math.inf, x.norm_size)
    near = distances(x)
    length = None if near is None else root.divisor.at(smallest_mean_square(x, root.dims, root.is_centred, 1, *near))
    if length is not None and is_local(x):
        return value, c * spread / length.square()
    # of groups that are not 0; of those that are the inverse is infinite
    least = root.divisor.of_length(least_length(x, root.dims, root.is_centred))
    if length is None:
        return value, c * spread / least / least
    return value, c * spread / length.clamp(min=least).square()


def _claims_of_form(f: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``a s + b m^2 + c m + d``, at least `floor`.

    Value:       a n^2 + d for a variance (b = -a), or |a| n^2 + |b| n^2, + |c| n + |d|        (for n the largest RMS of a group)
    Sensitivity: (2 |a| + 2 |b|) n, 2 a n for a variance, + |c|; for x's norm over part of a group or more than it, to a group's RMS
    Source:      |m| <= n; s moves by mean(2 x u) <= 2 n |u|, a variance by mean(2 (x - m) u)
    """
    assert f.dims is not None, "there is a mean"
    spread = forms.factor_of_groups(f.x, f.dims)
    n = times(f.x.norm_size, spread)
    value, slope = torch.zeros_like(n), torch.zeros_like(n)
    is_variance = f.terms.get((0, 2, 0), 0.0) == -f.terms.get((0, 0, 1), 0.0)
    for (_, j, k), c in f.terms.items():
        degree = j + 2 * k
        if is_variance and (j, k) == (2, 0):
            continue
        value = value + n.pow(degree) * abs(c)
        slope = slope + n.pow(max(degree - 1, 0)) * (abs(c) * degree * spread)
    return value.clamp(min=abs(f.floor)) if math.isfinite(f.floor) else value, slope
