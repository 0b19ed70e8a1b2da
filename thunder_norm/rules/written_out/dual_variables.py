"""Normalization in the log domain, again and again: Sinkhorn's iterations, Gumbel-Sinkhorn, optimal transport with dual variables.

    m = (-cost + u[:, None] + v[None, :]) / eps
    u = eps * (log_mu - torch.logsumexp(m, 1)) + u
    x = x - torch.logsumexp(x, -1, keepdim=True)

Op by op u moves by what the last u moves, twice, and so on: 2^n after n iterations.  But log sum exp of x + c, c one number for each
row, is c plus that of x: the last u is not in the next one at all.  So what is made of a log sum exp remembers of which tensors it is
a sum (`LinearTerms`); terms that are the same for a row go past the next log sum exp, and a sum in which some cancel is as large, and
moves as far, as those that are left.  What is left of such a sum, less its own log sum exp, is at most 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.known_ranges import range_of
from thunder_norm.core.local import is_local
from thunder_norm.core.ranges import OfEntries, Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, every_fact, fact, unconditional
from thunder_norm.rules._shared import SAME_DIMS, Number, dims_tuple, refined
from thunder_norm.rules.written_out._derived import facts_of
from thunder_norm.rules.written_out._forms import ENTRY, ONE, Form
from thunder_norm.scalars import times

Axes = tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Atom:
    """What a term is a multiple of: a tensor, or the log sum exp of some terms over a dimension, with that dimension left as one of size 1.

    Attributes:
        size: its largest entry.
        moved: how far that moves.
        source: the tensor.
        of: the terms of which it is the log sum exp.
        dim: the dimension, negative.
        values: between which numbers its entries are.
    """

    size: torch.Tensor
    moved: torch.Tensor | None
    source: Source | None = None
    of: tuple[Term, ...] = ()
    dim: int = 0
    values: Range | None = None

    def is_same(self, other: Atom) -> bool:
        """Whether both are the same numbers with the same claims."""
        return self is other or self.source is not None and other.source is not None and self.source.is_same(other.source)


@dataclass(frozen=True, eq=False)
class Term:
    """A multiple of an atom; `axes`: which of its dimensions lies at each one of the sum's, None where it is the same along that."""

    atom: Atom
    factor: float
    axes: Axes


@dataclass(frozen=True, eq=False)
class LinearTerms(OfEntries):
    """A fact: a sum of terms and a number, some log sum exp among them."""

    terms: tuple[Term, ...]
    number: float = 0.0


_MOST = 32  # terms of one sum


def _atom(x: NormedTensor) -> Atom:
    c = refined(x, ())
    moved = None if x.perturbation_size is None else times(x.perturbation_size, c)
    return Atom(times(x.norm_size, c), moved, Source.of(x), values=range_of(x))


def _own(x: RMSTensor) -> LinearTerms:
    """A tensor as a multiple of the one that it is known to be a multiple of, and a number; of itself at least."""
    values = range_of(x)
    if values is not None and values.low == values.high and math.isfinite(values.low):
        return LinearTerms((), values.low)
    axes = tuple(None if n == 1 else d for d, n in zip(ed.every(x.ndim), x.shape, strict=True))
    for f in facts_of(x):
        if not isinstance(f, Form) or f.is_of_groups or not {p for p, c in f.terms.items() if c} <= {ENTRY, ONE}:
            continue
        if f.of_entry(1) and f.x.backing.shape == x.shape and not f.x.is_same(Source.of(x)):
            atom = replace(_atom(f.x.moving()), source=f.x)
            return LinearTerms((Term(atom, f.of_entry(1), axes),), f.terms.get(ONE, 0.0))
    return LinearTerms((Term(_atom(x), 1.0, axes),))


def _known(x: Any) -> LinearTerms | None:
    return None if not isinstance(x, RMSTensor) or is_local(x) or x.backing.is_complex() else fact(x, LinearTerms)


def _with(out: NormedTensor, found: LinearTerms | None) -> Any:
    if found is None or len(found.terms) > _MOST or fact(out, LinearTerms) is not None:
        return out._facts
    return Alternatives((*every_fact(out), found))


def _over(axes: Axes, ndim: int) -> Axes:
    return (None,) * (ndim - len(axes)) + axes


def _sum_of(a: LinearTerms, b: LinearTerms, scale: float, ndim: int) -> tuple[LinearTerms, bool]:
    """a + scale b, and whether any terms of both cancelled."""
    left = [replace(t, axes=_over(t.axes, ndim)) for t in a.terms]
    cancelled = False
    for t in b.terms:
        t = replace(t, factor=t.factor * scale, axes=_over(t.axes, ndim))
        at = next((i for i, s in enumerate(left) if s.axes == t.axes and s.atom.is_same(t.atom)), None)
        if at is None:
            left.append(t)
            continue
        factor = left[at].factor + t.factor
        cancelled |= abs(factor) < max(abs(left[at].factor), abs(t.factor))
        # what rounding leaves of a difference of equal numbers is none of the program's
        is_zero = math.isclose(left[at].factor, -t.factor, rel_tol=1e-9)
        left[at : at + 1] = [] if is_zero else [replace(t, factor=factor)]
    return LinearTerms(tuple(left), a.number + scale * b.number), cancelled


def _scaled(x: LinearTerms, c: float) -> LinearTerms:
    return LinearTerms(tuple(replace(t, factor=t.factor * c) for t in x.terms), x.number * c)


def _claims(terms: Iterable[Term], number: float, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """How large a sum of terms is, and how far it moves."""
    size, moved = torch.full_like(like, abs(number)), None
    for t in terms:
        size = size + times(t.atom.size, abs(t.factor))
        if t.atom.moved is not None:
            by = times(t.atom.moved, abs(t.factor))
            moved = by if moved is None else moved + by
    return size, moved


# -- log sum exp ----------------------------------------------------------------------------------------------------------


def _log_sum(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    x = given["input"]
    if not isinstance(x, RMSTensor) or is_local(x) or x.ndim == 0 or not isinstance(out, RMSTensor):
        return out._facts
    dims = dims_tuple(given["dim"], x.ndim)
    if len(dims) != 1 or x.shape[dims[0]] < 2:
        return out._facts
    (dim,) = dims
    known = _known(x) or _own(x)
    inside = tuple(t for t in known.terms if t.axes[dim] is not None)
    outside = [t for t in known.terms if t.axes[dim] is None]
    if not inside:
        return out._facts
    if outside or known.number:
        size, moved = _claims(inside, math.log(x.shape[dim]), x.norm_size)
        atom = Atom(size, moved, of=inside, dim=dim)
    else:
        atom = replace(_atom(out), of=inside, dim=dim)
    axes = tuple(None if d == dim or n == 1 else d for d, n in zip(ed.every(x.ndim), x.shape, strict=True))
    terms = (Term(atom, 1.0, axes), *outside)
    if not given.get("keepdim", False):
        at = x.ndim + dim
        terms = tuple(replace(t, axes=t.axes[:at] + t.axes[at + 1 :]) for t in terms)
    return _with(out, LinearTerms(terms, known.number))


normed_op(torch.logsumexp).register_fact(_log_sum)


# -- sums and multiples ---------------------------------------------------------------------------------------------------


def _added(a: Any, b: Any, alpha: Any, shape: Sequence[int]) -> tuple[LinearTerms, bool] | None:
    """a + alpha b, where one of them is made of a log sum exp."""
    if not isinstance(alpha, int | float) or (_known(a) is None and _known(b) is None):
        return None
    first, second = _as_terms(a), _as_terms(b)
    return None if first is None or second is None else _sum_of(first, second, float(alpha), len(shape))


def _as_terms(x: Any) -> LinearTerms | None:
    if isinstance(x, int | float):
        return LinearTerms((), float(x))
    return _known(x) or _own(x) if isinstance(x, RMSTensor) and not is_local(x) else None


def _shape(a: Any, b: Any) -> torch.Size:
    return torch.broadcast_shapes(*(x.shape for x in (a, b) if isinstance(x, torch.Tensor)))


def _operands(op: Callable, args: tuple, kwargs: Any) -> tuple[Any, Any, Any]:
    """a, b and c of what an operation computes, which is a + c b."""
    given = dict(zip(("input", "other", "alpha"), args, strict=False)) | dict(kwargs)
    a, b, alpha = given.get("input", given.get("self")), given["other"], given.get("alpha", 1)
    if op is torch.rsub:
        a, b = b, a
    return a, b, alpha if op is torch.add or not isinstance(alpha, int | float) else -alpha


def largest_of(x: Any) -> torch.Tensor | None:
    """What no entry of x exceeds, where x is a sum of terms less the log sum exp of some: what the others are at most."""
    known = _known(x)
    if known is None:
        return None
    for t in known.terms:
        left = _without([s for s in known.terms if s is not t], t, x.shape) if t.atom.of and t.factor < 0 else None
        if left is not None:
            highs = [((s.atom.values or Range()).scaled(s.factor).high, s) for s in left]
            bounded_by_norm = [s for high, s in highs if not math.isfinite(high)]
            number = known.number + sum(high for high, _ in highs if math.isfinite(high))
            return _claims(bounded_by_norm, 0.0, x.norm_size)[0] + number
    return None


def _without(terms: Sequence[Term], log_sum: Term, shape: Sequence[int]) -> list[Term] | None:
    """The terms but those of which `log_sum` is minus the log sum exp; None if they are not all there."""
    atom, ndim = log_sum.atom, len(shape)
    place: dict[int | None, int | None] = {None: None}
    place |= {own: d for d, own in zip(ed.every(ndim), log_sum.axes, strict=True) if own is not None}
    free = [d for d, own in zip(ed.every(ndim), log_sum.axes, strict=True) if own is None and shape[d] != 1]
    if len(free) != 1:
        return None
    place[atom.dim] = free[0]
    left = list(terms)
    for t in atom.of:
        axes: list[int | None] = [None] * ndim
        for own, at in zip(t.axes, ed.every(len(t.axes)), strict=True):
            if own is None:
                continue
            if at not in place or (to := place[at]) is None:
                return None
            axes[to] = own
        wanted = -log_sum.factor * t.factor
        found = next(
            (
                s
                for s in left
                if s.axes == tuple(axes) and s.atom.is_same(t.atom) and math.isclose(s.factor, wanted, rel_tol=1e-9)
            ),
            None,
        )
        if found is None:
            return None
        left.remove(found)
    return left


def _register(op: Callable) -> None:
    def cancels(args: dict[str, Any]) -> bool:
        a, b, alpha = _operands(op, (), args)
        found = _added(a, b, alpha, _shape(a, b))
        return found is not None and found[1]

    def rule(input: RMSTensor, other: RMSTensor, alpha: Number = 1) -> NormedTensor:
        ordinary = unconditional(op, input, other, alpha)
        a, b, factor = _operands(op, (input, other, alpha), {})
        found = _added(a, b, factor, _shape(a, b))
        assert found is not None, "the rule's condition has been checked"
        size, moved = _claims(found[0].terms, found[0].number, input.norm_size)
        # what is infinite does not cancel
        size = torch.where(ordinary.norm_size < math.inf, size, ordinary.norm_size)
        out = LinfTensor._wrap(None, size, moved, ())  # type: ignore[arg-type]
        out._sensitivity = {"input": 0, "other": 0}
        return out

    rule.__name__ = rule.__qualname__ = f"{op.__name__}_of_terms"
    rule.__doc__ = f"""torch.{op.__name__} of sums of which some terms cancel, made of log sum exp.

    Value:       sum_i |c_i| |t_i|_inf of the terms that are left, of log sum exp over N entries of some with sum_j |c_j| |t_j|_inf + log N
    Sensitivity: |c_i| to each, and so on to what they are made of
    """
    normed_op(op).register_norm(rule, when=cancels, lift_dims=SAME_DIMS)

    def facts(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        a, b, alpha = _operands(op, args, kwargs)
        found = _added(a, b, alpha, out.shape)
        return out._facts if found is None else _with(out, found[0])

    normed_op(op).register_fact(facts)


for _op in (torch.add, torch.sub, torch.rsub):
    _register(_op)


def _multiple(op: Callable) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        given = dict(zip(("input", "other"), args, strict=False)) | kwargs
        a, b = given.get("input", given.get("self")), given.get("other", -1.0)
        x, c = (b, a) if isinstance(a, int | float) and op is torch.mul else (a, b)
        known = _known(x)
        if known is None or not isinstance(c, int | float) or c == 0 or not math.isfinite(c) or kwargs.get("rounding_mode"):
            return out._facts
        return _with(out, _scaled(known, 1 / c if op is torch.div else float(c)))

    return rule


for _op in (torch.neg, torch.mul, torch.div):
    normed_op(_op).register_fact(_multiple(_op))


# -- other places ---------------------------------------------------------------------------------------------------------

_STRIDES = (10007, 20011, 30011, 40009, 50021, 60013)


def laid_out(method: Callable, args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """The facts about a view, or a copy: what is known of the sum of terms that it is, in its places."""
    known = _known(args[0]) if args else None
    if known is None or args[0].ndim > len(_STRIDES):
        return out._facts
    places = _places(method, args, kwargs, out)
    if places is None:
        return out._facts
    terms = (replace(t, axes=tuple(None if at is None else t.axes[at] for at in places)) for t in known.terms)
    return _with(out, LinearTerms(tuple(terms), known.number))


def _places(method: Callable, args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> list[int | None] | None:
    """Where each dimension of the result was; None for one that is the same along it.  None if it is no view of all entries."""
    x = args[0]
    if x.shape == out.shape and method in (torch.Tensor.to, torch.Tensor.float, torch.Tensor.double, torch.Tensor.clone):
        return list(range(x.ndim))
    if any(isinstance(a, torch.Tensor) for a in args[1:]):
        return None
    strides = _STRIDES[: x.ndim]
    with _disable_current_modes():
        try:
            seen = method(torch.empty_strided(tuple(x.shape), strides, device="meta"), *args[1:], **kwargs)
        except (RuntimeError, TypeError):
            return None
    if tuple(seen.shape) != tuple(out.shape) or seen.storage_offset():
        return None
    places: list[int | None] = []
    for n, stride in zip(seen.shape, seen.stride(), strict=True):
        if n == 1 or stride == 0:
            places.append(None)
        elif stride in strides and x.shape[strides.index(stride)] == n:
            places.append(strides.index(stride))
        else:
            return None
    kept = [p for p in places if p is not None]
    return places if len(set(kept)) == len(kept) == sum(n != 1 for n in x.shape) else None
