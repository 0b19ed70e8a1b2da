"""Which kind a parameter has: that of the rule that consumes it; of several, the one in which the output moves least.

Every use of a parameter *wants* a kind: the one its rule's annotation names, over the dimensions the rule measures.  If all uses
want the same, that is the parameter's kind.  If they do not, one norm must serve them all, converted where it has to be, and
the choice is by ``sum_u c_u S_u``: S_u is the output's sensitivity to what use u gets, c_u the factor of the conversion to it.
Kinds are compared for the same tensor, so the sum is taken in units of its own norm in that kind: that of Gaussian entries,
which depends on the shape alone.  Inputs and other parameters have norm 1, and outputs are compared by their largest entry.
The choice is a property of the program: neither weights nor the sizes of inputs change it, and any choice is sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from thunder_norm.core import conversions
from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor
from thunder_norm.errors import NormMismatchError, ThunderNormError, with_details


@dataclass(frozen=True)
class NormSpec:
    """A norm: a kind over canonical elem_dims."""

    kind: type[NormedTensor]
    elem_dims: ed.Dims

    def __str__(self) -> str:
        return self.kind.__name__ if issubclass(self.kind, LinfTensor) else f"{self.kind.__name__} over dims {self.elem_dims}"

    def around(self, t: torch.Tensor, size: float) -> NormedTensor:
        """A tensor of that norm."""
        return self.kind._wrap(t, torch.full((), size, dtype=NORM_DTYPE), None, self.elem_dims)

    def factor(self, other: NormSpec, t: torch.Tensor) -> float | None:
        """What a conversion to `other` costs for a tensor of t's shape; None if there is none."""
        if self == other:
            return 1.0
        return conversions.factor(self.around(t, 1.0), other.kind, other.elem_dims)


@dataclass(frozen=True)
class Use:
    """One argument of one operation that is a parameter.

    Attributes:
        op: the operation.
        argument: its name in the rule.
        module: dotted path of the module whose forward called it.
        location: ``file.py:line:  text`` of the user's call.
        wanted: the norm in which its rule takes a plain tensor.
        rule: the rule that ran.
        factor: of the conversion from the parameter's norm to the one the rule got; None where there is none (then the rule
            measures the parameter itself).
        through: what was done with the parameter before, if it was not used as it is.
        is_with_activation: whether another argument has a norm that is not made of parameters alone.
        is_with_integers: whether another argument is of the integers that the program is given: of a table, which rows are taken.
    """

    op: str
    argument: str
    module: str
    location: str
    wanted: NormSpec
    rule: str
    factor: float | None = 1.0
    through: str = ""
    is_with_activation: bool = False
    is_with_integers: bool = False


@dataclass(frozen=True)
class Candidate:
    """One of the norms that are wanted, and how much the output moves if the parameter has it; None and why if it cannot."""

    wanted: NormSpec
    cost: float | None
    problem: str = ""


@dataclass(frozen=True)
class Inferred:
    """The norm of one parameter, and how it was found.

    Attributes:
        name: of the parameter, the first one if it is tied.
        norm: its kind and elem_dims.
        uses: the operations that consume it, in order.
        stated: who stated the kind, if somebody did.
        candidates: what its uses want, if they disagree and nobody stated a kind.
    """

    name: str
    norm: NormSpec
    uses: tuple[Use, ...]
    stated: str | None = None
    candidates: tuple[Candidate, ...] = ()

    @property
    def kind(self) -> type[NormedTensor]:
        """The kind."""
        return self.norm.kind

    @property
    def elem_dims(self) -> ed.Dims:
        """The dimensions the norm runs over."""
        return self.norm.elem_dims

    @property
    def reason(self) -> str:
        """Why it has this kind, in a sentence."""
        if self.stated is not None:
            return self.stated
        if not self.candidates:
            first = self.uses[0]
            text = f"rule {first.rule} takes {first.argument} of {first.op} so, in {first.module or 'the model'}"
            return text if len(self.uses) == 1 else f"{text}, and so do all {len(self.uses)} uses"
        if any(c.cost is None and not c.problem for c in self.candidates):
            return f"its uses disagree; {self.uses[0].op} comes first (without data their sensitivities are not known)"
        ranked = sorted((c for c in self.candidates if c.cost is not None), key=lambda c: c.cost)
        text = f"its uses disagree; sum c_u S_u, in units of its own norm, is least for {ranked[0].wanted} ({ranked[0].cost:.4g})"
        others = [f"{c.wanted}: {c.cost:.4g}" for c in ranked[1:]]
        others += [f"{c.wanted}: not possible, {c.problem}" for c in self.candidates if c.cost is None]
        return f"{text}; {', '.join(others)}"

    @property
    def warning(self) -> str | None:
        """What to know if uses disagree: which convert, at what cost; None if there is nothing to say."""
        different = list(dict.fromkeys(str(u.wanted) for u in self.uses))
        if len(different) < 2:
            return None
        paid = [f"{u.op} ({u.module or 'the model'}) x{u.factor:.4g}" for u in self.uses if u.factor not in (None, 1.0)]
        text = f"uses of {self.name} want {' and '.join(different)}"
        if paid:
            text += f"; converted: {', '.join(dict.fromkeys(paid))}"
        return text + ("" if self.stated else "; thunder_norm.annotate decides otherwise")

    def explain(self) -> str:
        """All of it as text: a line if there is nothing special about it."""
        if self.stated is None and self.warning is None:
            return f"{self.name}: {self.norm}, because {self.reason}"
        lines = [f"{self.name}: {self.norm}", f"  because {self.reason}"]
        if self.warning is not None:
            lines.append(f"  warning: {self.warning}")
        for use in self.uses:
            through = f" of {use.through}" if use.through else ""
            paid = "measured so" if use.factor is None else f"factor {use.factor:.4g}"
            lines.append(
                f"  used by {use.op}({use.argument}{through}) in {use.module or 'the model'}: rule {use.rule}, "
                f"wants {use.wanted}, {paid}"
            )
            if use.location:
                lines.append(f"    {use.location}")
        return "\n".join(lines)


def disagree(wants: Sequence[NormSpec], t: torch.Tensor) -> list[NormSpec]:
    """The different norms among those wanted of a tensor of t's shape, the first use's first; none if they are all one norm."""
    distinct: list[NormSpec] = []
    for wanted in wants:
        if not any(w.factor(wanted, t) == 1.0 == wanted.factor(w, t) for w in distinct):
            distinct.append(wanted)
    return distinct if len(distinct) > 1 else []


def reference_size(wanted: NormSpec, shape: Sequence[int]) -> float:
    """About the norm of a tensor of this shape with independent standard Gaussian entries.

    An operator's is ``(sqrt(out) + sqrt(in)) sqrt(in / out)``, the largest of m entries ``sqrt(2 log 2m)``.
    """
    if math.prod(shape) == 0:
        return 1.0
    if issubclass(wanted.kind, RMSToRMSTensor):
        d_out, d_in = (shape[d] for d in wanted.elem_dims)
        taps = math.prod(shape[2:]) if issubclass(wanted.kind, RMSToRMSConvTensor) else 1
        return taps * (math.sqrt(d_out) + math.sqrt(d_in)) * math.sqrt(d_in / d_out)
    n = ed.numel(shape, wanted.elem_dims)
    if n == 1:
        return math.sqrt(2 * math.log(2 * math.prod(shape)))
    if issubclass(wanted.kind, L1Tensor):
        return n * math.sqrt(2 / math.pi)
    return math.sqrt(n) if issubclass(wanted.kind, L2Tensor) else 1.0


# Runs the program with these norms for some parameters and 1 for the others; returns its result.
RunWith = Callable[[Mapping[str, NormedTensor]], Any]


def choose(
    name: str, t: torch.Tensor, uses: Sequence[Use], wants: Sequence[NormSpec], run: RunWith, decided: Mapping[str, NormSpec]
) -> tuple[NormSpec, tuple[Candidate, ...]]:
    """The norm among `wants` for a parameter whose uses disagree, that of its largest entry if none of them fits, and what each costs.

    Args:
        name: the parameter.
        t: a tensor of its shape.
        uses: where it is used.
        wants: the different norms its uses want.
        run: runs the program.
        decided: what was chosen for other parameters already.

    Raises:
        NormMismatchError: neither they nor the norm of the largest entry can be converted to what all uses want.
    """
    unit = reference_size(wants[0], t.shape)
    others = {other: w.kind(1.0, elem_dims=w.elem_dims) for other, w in decided.items()}
    candidates = [_evaluate(name, w, reference_size(w, t.shape) / unit, run, others) for w in wants]
    possible = [c for c in candidates if not c.problem]
    if not possible:  # the largest entry bounds every other norm
        largest = NormSpec(LinfTensor, ())
        candidates.append(_evaluate(name, largest, reference_size(largest, t.shape) / unit, run, others))
        possible = [c for c in candidates if not c.problem]
    if not possible:  # the program's own problems, of one that serves all uses or of all: the data may answer them
        serving = [c for c in candidates if all(c.wanted.factor(w, t) is not None for w in wants)]
        serving = serving or (candidates if len({c.problem for c in candidates}) == 1 else [])
        possible = [replace(c, problem="") for c in serving[:1]]
    if not possible:
        raise NormMismatchError(
            with_details(
                f"the uses of parameter {name!r} disagree about its norm, and none of the norms can be converted to all of them",
                wanted="\n".join(f"{u.op}({u.argument}) wants {u.wanted}   {u.location}" for u in uses),
                problems="\n".join(f"{c.wanted}: {c.problem}" for c in candidates),
                instead="use a clone of the parameter in one of the places, or give norms in kinds that convert (thunder_norm.annotate)",
            )
        )
    known = [c.cost for c in possible if c.cost is not None]
    if len(known) < len(possible):  # without data: the first
        possible, candidates = possible[:1], [replace(c, cost=None) for c in candidates]
        return possible[0].wanted, tuple(candidates)
    least = min(known)
    best = next(c for c in possible if c.cost is not None and c.cost <= least * (1 + 1e-9))  # the first of equals
    return best.wanted, tuple(candidates)


@torch.enable_grad()
def _evaluate(name: str, wanted: NormSpec, size: float, run: RunWith, others: Mapping[str, NormedTensor]) -> Candidate:
    moved = torch.zeros((), dtype=NORM_DTYPE, requires_grad=True)
    leaf = wanted.kind(size, elem_dims=wanted.elem_dims, perturbation_size=moved)
    try:
        result = run({**others, name: leaf})
    except ThunderNormError as e:
        return Candidate(wanted, None, str(e).partition("\n")[0])
    moves = [_largest_entry(y) for y in tree_flatten(result)[0] if isinstance(y, NormedTensor)]
    moves = [d for d in moves if d is not None and d.requires_grad]
    if not moves:
        return Candidate(wanted, 0.0)
    if any(d.device.type == "meta" for d in moves):
        return Candidate(wanted, None)
    (gain,) = torch.autograd.grad(torch.stack([d.to(moved.device) for d in moves]).sum(), moved, allow_unused=True)
    cost = 0.0 if gain is None else gain.item() * size
    return Candidate(wanted, math.inf if math.isnan(cost) else cost)


def _largest_entry(y: NormedTensor) -> torch.Tensor | None:
    """How far the largest entry of an output moves (its own norm, where that says nothing about entries)."""
    if y.perturbation_size is None or conversions.factor(y, LinfTensor, ()) is None:
        return y.perturbation_size
    return conversions.convert(y, LinfTensor, ()).perturbation_size
