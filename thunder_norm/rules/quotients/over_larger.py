"""Quotients of a tensor and a number that no entry of it exceeds: its largest modulus, the sum of its moduli, and more than that.

    x / x.abs().sum(-1, keepdim=True).clamp(min=1e-6)
    x / x.abs().amax(-1, keepdim=True)
    x / (x.norm(p=1, dim=-1, keepdim=True) + 1e-6)
    gates = F.relu(x);  gates / (gates.sum(-1, keepdim=True) + 1e-6)

By the norms at hand alone such a quotient is as large as x over what little keeps the divisor from 0; entry by entry it is at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import conversions
from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode, run_real
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.local import are_local, is_local
from thunder_norm.core.nonfinite import spoiled
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, every_fact, moves_with
from thunder_norm.rules._lengths import least_length
from thunder_norm.rules._shared import argument, as_kind, dims_tuple, refined, scalar
from thunder_norm.rules.written_out import _forms as forms
from thunder_norm.rules.written_out._forms import Form, is_beside
from thunder_norm.rules.written_out.written_out_exponentials import Bounding
from thunder_norm.scalars import times

_MEAN, _ONE = (0, 1, 0), (0, 0, 0)


@dataclass(frozen=True, eq=False)
class Modulus:
    """A fact: it is ``|x|``, entry by entry."""

    x: Source


@dataclass(frozen=True, eq=False)
class AllBelow:
    """A fact about a number: no entry of x exceeds it."""

    x: Source


@dataclass(frozen=True)
class _Over:
    """What a divisor is of the numerator.

    Attributes:
        dims: over which it is one number.
        sum_over: how many times the sum of moduli it is, at least; None where it is only known to be at least the largest.
        least: what it is at least.
        moves_at_most: the Lipschitz constant of the quotient times `least`, in the norm of the sum.
    """

    dims: ed.Dims
    sum_over: float | None
    least: float
    moves_at_most: float = 2.0


def _is_of(found: Source, x: RMSTensor) -> bool:
    """Whether it is |x|, or x itself, which has no negative entries."""
    own = Source.of(x)
    moduli = any(isinstance(f, Modulus) and f.x.is_same(own) for f in found.facts)
    return moduli or (known_range(x).low >= 0 and found.is_same(own))


def _by_mean(f: Form, x: RMSTensor) -> _Over | None:
    """Of ``a mean |x| + b``, or the larger of it and a number."""
    a, b = f.terms.get(_MEAN, 0.0), f.terms.get(_ONE, 0.0)
    if f.dims is None or not set(f.terms) <= {_MEAN, _ONE} or not (a > 0 and b >= 0) or not is_beside(f.axes, f.x):
        return None
    count = max(ed.numel(x.shape, f.dims), 1)
    least = b if b > 0 else a * least_length(x, f.dims) / math.sqrt(count)  # |x|_1 >= |x|_2
    is_smooth = b > 0 and f.floor <= b
    return _Over(f.dims, a / count, max(least, f.floor), 1.0 if is_smooth else 2.0)


def _found(args: Mapping[str, Any]) -> _Over | None:
    x, divisor = args["input"], args["other"]
    if (
        current_mode() != "bound"
        or args["rounding_mode"] is not None
        or not (isinstance(x, RMSTensor) and isinstance(divisor, RMSTensor))
    ):
        return None
    if is_local(x, divisor) or x.shape != torch.broadcast_shapes(x.shape, divisor.shape):
        return None
    for f in every_fact(divisor):
        if not isinstance(f, Form | Bounding | AllBelow) or not _is_of(f.x, x):
            continue
        if isinstance(f, Form):
            found = _by_mean(f, x)
            if found is not None and conversions.factor(x, L1Tensor, found.dims) is not None:
                return found
        elif isinstance(f, AllBelow) or not (f.is_reduced or f.is_log_sum):
            dims = ed.every(x.ndim) if isinstance(f, AllBelow) else f.dims
            return _Over(dims, None, max(known_range(divisor).low, least_length(x, dims)))  # the largest is no less than the mean
    return None


@normed_op(torch.div).register_norm(when=lambda args: _found(args) is not None)
def div(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> NormedTensor:
    """x over l, which is at least the largest modulus of each group, or a times the sum of the moduli.

    Value:       1 entry by entry; 1 / a in the L1 norm of the groups       (attained: one entry, where x is large)
    Sensitivity: 1 / c to x and to l, c the least of l; 2 / c to x in the L1 norm, 1 / c where c is added to the sum
    Source:      ``d(x / l) = dx / l - (x / l) dl / l``;  with ``l = s + c``, s the sum, ``(c + 2 s) / (c + s)^2 <= 1 / c``
    Gap:         the norm of x, where it is small, keeps it from being as large as l
    """
    found = _found({"input": input, "other": other, "rounding_mode": None})
    assert found is not None, "the rule's condition has been checked"
    n = input.norm_size
    if found.sum_over is None:
        c = refined(input, ())
        size = spoiled(times(n, c / found.least).clamp(max=1.0), n)
        return LinfTensor(size, elem_dims=(), sensitivity={"input": c / found.least, "other": refined(other, ()) / found.least})
    c = conversions.factor(input, L1Tensor, found.dims)
    assert c is not None, "the rule's condition has been checked"
    size = spoiled(times(n, c / found.least).clamp(max=1 / found.sum_over), n)
    result = L1Tensor(size, elem_dims=found.dims)
    return moves_with(Source.of(input), result, c * found.moves_at_most / found.least, "input", "other")


def _is_other_length(args: Mapping[str, Any]) -> bool:
    return args["p"] != 2 and args["p"] >= 1 and args["eps"] > 0 and not are_local(args)


def _over_dim(t: torch.Tensor, args: dict[str, Any]) -> ed.Dims:
    return ed.canonical(args["dim"], t.ndim) if t.ndim else ()


@normed_op(F.normalize).register_norm(when=_is_other_length, lift_dims={"input": _over_dim})
def normalize(input: L2Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> L2Tensor:
    """y = x / max(|x|_p, eps) over `dim` of N entries, p >= 1 and another than 2, infinite too.

    input, output: L2 over `dim`;  q = 1 / 2 - 1 / p
    Value:       min(N^max(q, 0), |x| / eps)      (attained: one entry for q < 0, a constant for q > 0)
    Sensitivity: 2 N^|q| / eps
    Mode "typical": N^q, and N^q / |x|, where all entries are about as large
    Source:      |dy|_p <= 2 |dx|_p / max(|x|_p, eps); ``|y|_2 <= N^max(q, 0) |y|_p`` (Hoelder)
    Gap:         above eps a move along x counts nothing
    """
    x, c = as_kind(input, L2Tensor, _over_dim(input, {"dim": dim}))
    count, q = float(max(x.numel_normed, 1)), 0.5 - 1 / p
    n = x.norm_size
    if current_mode() != "bound":
        size = spoiled(scalar(count**q, n), n)
        return L2Tensor(size, elem_dims=x.elem_dims, sensitivity={"input": c * size / n.clamp(min=eps)})
    size = spoiled(times(n, 1 / eps).clamp(max=count ** max(q, 0.0)), n)
    return L2Tensor(size, elem_dims=x.elem_dims, sensitivity={"input": c * 2 * count ** abs(q) / eps})


# -- what no entry exceeds ------------------------------------------------------------------------------------------------


def _modulus(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    x = argument(args, kwargs, 0, "input", "self")
    return Alternatives((*every_fact(out), Modulus(Source.of(x)))) if isinstance(x, RMSTensor) else out._facts


def _largest_of_all(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    x = argument(args, kwargs, 0, "input", "self")
    is_whole = isinstance(x, RMSTensor) and not out.ndim and len(args) + len(kwargs) == 1
    return Alternatives((*every_fact(out), AllBelow(Source.of(x)))) if is_whole else out._facts


def _length(order: str, of_matrices: bool = False) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    """A p-norm of groups is the sum of their moduli for p = 1, and no entry's modulus exceeds it for any p >= 1."""

    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        x, p = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, order)
        dim, keepdim = argument(args, kwargs, 2, "dim"), argument(args, kwargs, 3, "keepdim", default=False)
        if current_mode() != "bound" or not isinstance(x, RMSTensor) or not isinstance(p, int | float) or not p >= 1 or p == 2:
            return out._facts
        dims = dims_tuple(dim, x.ndim)
        if out.dtype != x.dtype or of_matrices and len(dims) != 1:
            return out._facts
        own = Source.of(x)
        moduli = replace(own, backing=run_real(torch.abs, (x.backing,), {}), facts=Alternatives((Modulus(own),)))
        if p == 1:
            mean = forms.mean(Form(moduli, {forms.ENTRY: 1.0}, None, ed.every(x.ndim)), dims, bool(keepdim))
            found = None if mean is None else forms.multiple(mean, float(ed.numel(x.shape, dims)))
        elif out.ndim == 0:
            found = AllBelow(moduli)
        else:
            found = Bounding(moduli, dims, False, not keepdim) if keepdim or len(dims) == 1 else None
        return out._facts if found is None else Alternatives((*every_fact(out), found))

    return rule


def _raised(number: Callable[[tuple, dict[str, Any]], Any]) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    """What is added to, or taken where it is larger, leaves it as large as entries are."""

    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        x, c = argument(args, kwargs, 0, "input", "self"), number(args, kwargs)
        if not isinstance(c, int | float) or not c >= 0 or not isinstance(x, NormedTensor):
            return out._facts
        found = [f for f in every_fact(x) if isinstance(f, AllBelow) or isinstance(f, Bounding) and not f.is_log_sum]
        return Alternatives((*every_fact(out), *found)) if found else out._facts

    return rule


normed_op(torch.abs).register_fact(_modulus)
normed_op(torch.norm).register_fact(_length("p"))
normed_op(torch.linalg.vector_norm).register_fact(_length("ord"))
normed_op(torch.linalg.norm).register_fact(_length("ord", of_matrices=True))
for _op in (torch.max, torch.amax):
    normed_op(_op).register_fact(_largest_of_all)
normed_op(torch.add).register_fact(_raised(lambda args, kwargs: argument(args, kwargs, 1, "other")))
normed_op(torch.clamp_min).register_fact(_raised(lambda args, kwargs: argument(args, kwargs, 1, "min")))
normed_op(torch.clamp).register_fact(
    _raised(lambda args, kwargs: argument(args, kwargs, 1, "min") if argument(args, kwargs, 2, "max") is None else None)
)
