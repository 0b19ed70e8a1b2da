"""What a tensor is as a function of another: polynomials of entries and of means over groups, their roots, and the inverses of those.

A *group* of x are its entries along some dimensions, as a normalization takes them together.  With ``m = mean x`` and
``s = mean x^2`` over the groups a `Form` is a polynomial ``sum c x^i m^j s^k``: ``x - x.mean()``, ``x.var()`` and
``(x * x).sum() / n + eps`` are forms however a program spells them, and equal ones have equal coefficients.  A `Root` is the
length that normalizations divide by, `Inverse` what they multiply with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.rules._facts import Source
from thunder_norm.rules._shared import refined
from thunder_norm.rules.layers.normalization import Divisor

Powers = tuple[int, int, int]  # of an entry, of its group's mean, of its group's mean square
Axes = tuple[int | None, ...]  # for each dimension of a tensor, which of x's it is (negative); None for a new one of size 1

_DEGREE = 3
ENTRY: Powers = (1, 0, 0)
_ENTRY_SQUARED: Powers = (2, 0, 0)
_MEAN: Powers = (0, 1, 0)
_MEAN_SQUARED: Powers = (0, 2, 0)
_MEAN_SQUARE: Powers = (0, 0, 1)
ONE: Powers = (0, 0, 0)


@dataclass(frozen=True, eq=False)
class Form:
    """A fact: a polynomial of x's entries and of their means over groups, or, without entries, the larger of it and `floor`.

    Attributes:
        x: the tensor it is made from.
        terms: coefficients by powers.
        dims: the dimensions of a group, None as long as there is no mean.
        axes: where x's dimensions are; x's own unless it is without entries.
        floor: for one without entries; minus infinity for none.
    """

    x: Source
    terms: Mapping[Powers, float]
    dims: ed.Dims | None
    axes: Axes
    floor: float = -math.inf

    @property
    def is_of_groups(self) -> bool:
        """Whether it is one number for each group."""
        return all(i == 0 for i, _, _ in self.terms)

    @property
    def is_of_entries(self) -> bool:
        """Whether it is a polynomial of the entries alone."""
        return all(j == 0 and k == 0 for _, j, k in self.terms)

    @property
    def degree(self) -> int:
        """The largest power of |x| in it."""
        return max((i + j + 2 * k for i, j, k in self.terms), default=0)

    def of_entry(self, power: int) -> float:
        """The coefficient of a power of the entries."""
        return self.terms.get((power, 0, 0), 0.0)


@dataclass(frozen=True, eq=False)
class Root:
    """A fact, a number for each group: ``scale * divisor(mean x^2)``, of x minus its mean if `is_centred`; `slack` for rounding."""

    x: Source
    dims: ed.Dims
    axes: Axes
    is_centred: bool
    scale: float
    divisor: Divisor
    slack: float = 1.0


@dataclass(frozen=True, eq=False)
class Inverse:
    """A fact: ``scale / root``."""

    root: Root
    scale: float

    @property
    def axes(self) -> Axes:
        """Where x's dimensions are."""
        return self.root.axes


@dataclass(frozen=True, eq=False)
class Averaged:
    """A fact: the mean of a form over `over`, some of the dimensions of its groups; over all of them it is a form again."""

    form: Form
    over: ed.Dims
    axes: Axes

    @property
    def x(self) -> Source:
        """The tensor it is made from."""
        return self.form.x


@dataclass(frozen=True, eq=False)
class Reshaped:
    """A fact: a form of entries, some of whose dimensions have become one: for each dimension, which of x's it is made of."""

    form: Form
    parts: tuple[ed.Dims, ...]

    @property
    def x(self) -> Source:
        """The tensor it is made from."""
        return self.form.x

    def axes(self, dims: ed.Dims, keepdim: bool) -> Axes | None:
        """Where x's dimensions are in a number for each group over `dims`; None where one of them is no dimension of x."""
        at = {d % len(self.parts) for d in dims}
        left = [() if i in at else part for i, part in enumerate(self.parts) if keepdim or i not in at]
        return None if any(len(part) > 1 for part in left) else tuple(part[0] if part else None for part in left)

    def own(self, dims: ed.Dims) -> ed.Dims:
        """The dimensions of x that these are."""
        return tuple(sorted(d for i in dims for d in self.parts[i]))


Group = Form | Root | Inverse | Averaged
_Polynomial = TypeVar("_Polynomial", bound=Form | Averaged)


# -- forms ----------------------------------------------------------------------------------------------------------------


def own_form(x: RMSTensor) -> Form:
    """x as a form of itself."""
    return Form(Source.of(x), {ENTRY: 1.0}, None, ed.every(x.ndim))


def multiple(f: _Polynomial, c: float) -> _Polynomial | None:
    """c f."""
    if isinstance(f, Averaged):
        whole = multiple(f.form, c)
        return None if whole is None else replace(f, form=whole)
    if c < 0 and f.floor > -math.inf:
        return None
    return replace(f, terms={p: v * c for p, v in f.terms.items()}, floor=f.floor * c if f.floor > -math.inf else f.floor)


def shifted(f: Form, c: float) -> Form:
    """f + c."""
    return replace(f, terms={**f.terms, ONE: f.terms.get(ONE, 0.0) + c}, floor=f.floor + c)


def total(a: Form, b: Form, scale: float = 1.0) -> Form | None:
    """a + scale b, if they are of one x over the same groups."""
    common = _together(a, b)
    if common is None:
        return None
    powers = {*a.terms, *b.terms}
    terms = {p: a.terms.get(p, 0.0) + scale * b.terms.get(p, 0.0) for p in powers}
    return replace(common, terms={p: c for p, c in terms.items() if c != 0} or {ONE: 0.0})


def product(a: Form, b: Form) -> Form | None:
    """a b, if they are of one x over the same groups, and the degree stays small."""
    common = _together(a, b)
    if common is None or a.degree + b.degree > _DEGREE:
        return None
    terms: dict[Powers, float] = {}
    for p, v in a.terms.items():
        for q, w in b.terms.items():
            key = (p[0] + q[0], p[1] + q[1], p[2] + q[2])
            terms[key] = terms.get(key, 0.0) + v * w
    return replace(common, terms=terms)


def _together(a: Form, b: Form) -> Form | None:
    """The groups and dimensions of what is made of both; None if they do not go together."""
    if not a.x.is_same(b.x) or a.floor > -math.inf or b.floor > -math.inf:
        return None
    if a.dims is not None and b.dims is not None and a.dims != b.dims:
        return None
    if a.axes != b.axes and not (is_beside(a.axes, a.x) and is_beside(b.axes, b.x)):
        return None
    whole = b if a.is_of_groups and (not b.is_of_groups or len(b.axes) > len(a.axes)) else a
    return replace(whole, dims=a.dims if b.dims is None else b.dims)


def is_beside(axes: Axes, x: Source) -> bool:
    """Whether broadcasting against x puts each group's number beside its entries."""
    is_aligned = all(own in (None, at) for at, own in zip(range(-len(axes), 0), axes, strict=True))
    return is_aligned and len(axes) <= x.backing.ndim


def mean(f: Form | Averaged, dims: ed.Dims, keepdim: bool) -> Form | Averaged | None:
    """The mean over dimensions, of entries or of means over others before: ``x.mean(1).mean(2)`` is one over both."""
    before = _of_entries(f)
    if before is None:
        return None
    whole, over = before
    over = tuple(sorted({*over, *(d for d in (f.axes[i] for i in dims) if d is not None)}))
    at = {i % len(f.axes) for i in dims}
    axes: Axes = tuple(None if i in at else d for i, d in enumerate(f.axes) if keepdim or i not in at)
    if whole.dims is not None and whole.dims != over:
        return Averaged(whole, over, axes) if {*over} < {*whole.dims} else None
    terms: dict[Powers, float] = {}
    for (i, j, k), c in whole.terms.items():
        key = (0, j + (i == 1), k + (i == 2))
        terms[key] = terms.get(key, 0.0) + c
    return Form(f.x, terms, over, axes)


def _of_entries(f: Form | Averaged) -> tuple[Form, ed.Dims] | None:
    """The form, and the dimensions, of which it is the mean: so far of none, or of those of its groups."""
    if isinstance(f, Averaged):
        return f.form, f.over
    if not f.is_of_groups:
        return None if any(i > 2 for i, _, _ in f.terms) else (f, ())
    of_entries = {_MEAN: ENTRY, _MEAN_SQUARE: _ENTRY_SQUARED, ONE: ONE}
    if f.dims is None or f.floor > -math.inf or not f.terms.keys() <= of_entries.keys():
        return None
    return Form(f.x, {of_entries[p]: c for p, c in f.terms.items()}, None, ed.every(f.x.backing.ndim)), f.dims


def variance(f: Form, dims: ed.Dims, keepdim: bool, correction: float) -> Form | None:
    """The variance over `dims` of x, ``N / (N - correction)`` times the mean square of what is left without the mean."""
    dims = tuple(sorted(dims))
    count = ed.numel(f.x.backing.shape, dims)
    average = mean(f, dims, keepdim=True)
    centred = total(f, average, -1.0) if isinstance(average, Form) and f.degree == 1 and count > correction else None
    square = None if centred is None else product(centred, centred)
    found = None if square is None else mean(square, dims, keepdim)
    return multiple(found, count / (count - correction)) if isinstance(found, Form) else None


def factor_of_groups(x: Source, dims: ed.Dims) -> float:
    """How many times as large as x's norm the RMS of a group can be, and as x's movement that of a group."""
    it = x.tensor()
    return refined(it, tuple(d for d in it.elem_dims if d in dims))


# -- roots and inverses ---------------------------------------------------------------------------------------------------


def square_root(f: Form) -> Root | None:
    """sqrt f, where f is ``a mean x^2 + b``, of x or of x minus its mean, with a > 0 and b >= 0."""
    if f.dims is None or not f.terms.keys() <= {_MEAN_SQUARED, _MEAN_SQUARE, ONE}:
        return None
    a, b, rest = (f.terms.get(p, 0.0) for p in (_MEAN_SQUARE, _MEAN_SQUARED, ONE))
    is_centred = b != 0
    if a <= 0 or rest < 0 or is_centred and not math.isclose(a, -b, rel_tol=1e-9):
        return None
    floor = math.sqrt(f.floor / a) if f.floor > 0 else 0.0
    return Root(f.x, f.dims, f.axes, is_centred, math.sqrt(a), Divisor(rest / a, floor=floor))


def root_plus(r: Root, c: float) -> Root | None:
    """r + c, for c >= 0."""
    if c < 0:
        return None
    c /= r.scale
    floor = r.divisor.floor + c if r.divisor.floor else 0.0
    return replace(r, divisor=replace(r.divisor, shift=r.divisor.shift + c, floor=floor))


def at_least(f: Group | Reshaped, c: float) -> Group | None:
    """The larger of f and c."""
    if isinstance(f, Form) and f.is_of_groups:
        return replace(f, floor=max(f.floor, c))
    if isinstance(f, Root):
        return replace(f, divisor=replace(f.divisor, floor=max(f.divisor.floor, c / f.scale)))
    return None


def squared(r: Root) -> Form | None:
    """r^2, where it is a form again."""
    d = r.divisor
    if d.shift or d.floor or r.slack != 1:
        return None
    a = r.scale**2
    return Form(r.x, {_MEAN_SQUARE: a, ONE: a * d.eps} | ({_MEAN_SQUARED: -a} if r.is_centred else {}), r.dims, r.axes)


def reaxed(axes: Axes, old: Sequence[int], new: Sequence[int]) -> Axes | None:
    """Where x's dimensions are after a reshape that only adds and drops dimensions of size 1; None for others."""
    if [n for n in old if n != 1] != [n for n in new if n != 1]:
        return None
    left = iter([a for a, n in zip(axes, old, strict=True) if n != 1])
    return tuple(next(left) if n != 1 else None for n in new)


def merged(f: Form, new: Sequence[int]) -> Reshaped | None:
    """A form of entries in a shape that only makes dimensions one with those beside them; None for others."""
    old, parts, at, is_merged = tuple(f.x.backing.shape), [], 0, False
    if f.is_of_groups:
        return None
    for n in new:
        part, size = [], 1
        while size < n and at < len(old):
            part, size, at = [*part, at - len(old)] if old[at] > 1 else part, size * old[at], at + 1
        if size != n:
            return None
        is_merged |= len(part) > 1
        parts.append(tuple(part))
    return Reshaped(f, tuple(parts)) if is_merged else None


# -- quotients ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Normalized:
    """``factor * x / divisor(mean x^2)`` over the groups of `root`, of x or of x minus its mean; give or take the slack of the root."""

    root: Root
    factor: float


def quotient(numerator: Form, inverse: Inverse) -> Normalized | None:
    """A form times an inverse, where that is a normalization: the form is a multiple of x, or of x minus its mean.

    Divided by the length of x minus its mean, x itself has no bound: only the mean's own difference is proportional to it.
    """
    root = inverse.root
    if not numerator.x.is_same(root.x) or numerator.dims not in (None, root.dims) or not is_beside(root.axes, root.x):
        return None
    c = numerator.of_entry(1)
    if c == 0 or numerator.is_of_groups:
        return None
    others = {p: v for p, v in numerator.terms.items() if p != ENTRY and v != 0}
    is_centred = others.keys() == {_MEAN} and math.isclose(others[_MEAN], -c, rel_tol=1e-9)
    if others and not is_centred or root.is_centred and not is_centred:
        return None
    return Normalized(root, c * inverse.scale / root.scale)
