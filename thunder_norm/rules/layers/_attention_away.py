"""How far attention is from its derivative at the tokens at hand, for tokens that move away from these: what is left after first order.

For a query let ``y = sum_j p_j v_j`` at the data, ``d_j`` the moves of the scores, less their mean by the weights p, and ``e_j`` those of the
values.  With ``Z = sum_j p_j exp(d_j)``, which is at least 1 (Jensen), and ``phi(t) = exp(t) - 1 - t``,

    y' - y = (1 / Z) sum_j p_j (d_j + phi(d_j)) (v_j - y)  +  sum_j p_j e_j  +  (1 / Z) sum_j p_j (exp(d_j) - 1) (e_j - sum_l p_l e_l).

Let all move by a vector u of at most unit length, ``d_j = a_j(u) + b_j`` with a_j linear and ``b_j = s dq . dk_j``, less its mean.  With k the
largest that ``1 - 1 / Z`` may be the first order ``sum_j p_j a_j (v_j - y)`` counts ``1 - k / 2`` times, give or take k / 2, and what is of second
order is linear in ``u u^T``, whose entries have at most unit length together:

    sum_j p_j m_j a_j^2 (v_j - y),    (1 - k / 2) sum_j p_j b_j (v_j - y),    sum_j p_j n_j a_j (e_j - sum_l p_l e_l).

m and n are the middles of what ``phi(t) / (t^2 Z) - l t`` and ``(exp(t) - 1) / (t Z) - o t`` may be for ``|t| <= |d_j|``, ``Z >= 1 + p_j phi(t)``, with
slopes l and o.  So each of the three is in an ellipsoid: a linear map C of ``u u^T`` in that of ``C C^T``, which has ``(a_i . a_j)^2`` where ``a_i . a_j`` is
that of the scores.  Where it is known what all are of u, they are one (`_attention_together`).  Of third order ``sum_j p_j l_j a_j^3 (v_j - y)`` and
``sum_j p_j o_j a_j^2 (e_j - sum_l p_l e_l)`` likewise, in ``(a_i . a_j)^3`` for one.  The widths of what m and n are the middles of, and products of three or
more that are small, are an ellipsoid of each row, or a ball.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from thunder_norm.core.ellipsoids import Ellipsoid, sum_of
from thunder_norm.rules.layers._attention_together import Factors

# Pieces in which the largest of a quotient is looked for.
_PIECES, _FINE_PIECES = 16, 64
# Of the width that a quotient has, what has to be left of it beside a slope.
_TILTED = 0.7
ROUNDED = 1 + 1e-9
# Scores that move further say nothing of weights.
FURTHEST = 30.0


@dataclass(frozen=True, eq=False)
class Moving:
    """A tensor's data, expanded to the heads of the result, and the covariance of its entries [n, n], n all of them.

    Attributes:
        data: [..., tokens, features].
        cov: of the entries of all heads, tokens and features.
        factor: what the entries are of the vector that queries, keys and values all move by, [entries, n]; None where that is not known.
    """

    data: torch.Tensor
    cov: torch.Tensor
    factor: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        data: torch.Tensor,
        within: Ellipsoid | None,
        heads: Sequence[int],
        repeats: int = 1,
        factor: torch.Tensor | None = None,
    ) -> Moving:
        """Of a tensor that moves within an ellipsoid, or does not; each head used by `repeats` of the result."""
        numbers = torch.arange(data.numel()).reshape(data.shape)
        if repeats > 1:
            numbers = numbers.repeat_interleave(repeats, -3)
        numbers = numbers.expand(*heads, *data.shape[-2:])
        index = numbers.flatten()
        cov = torch.zeros(len(index), len(index), dtype=data.dtype) if within is None else _absolute(within)[index][:, index]
        return cls(data.flatten()[numbers], cov, None if factor is None else factor[index])

    @property
    def by_head(self) -> torch.Tensor:
        """The data, [heads, tokens, features]."""
        return self.data.reshape(-1, *self.data.shape[-2:])

    @property
    def by_token(self) -> torch.Tensor:
        """The covariance, [tokens of all heads, features, tokens of all heads, features]."""
        n, d = math.prod(self.data.shape[:-1]), self.data.shape[-1]
        return self.cov.reshape(n, d, n, d)


def _absolute(e: Ellipsoid) -> torch.Tensor:
    return e.cov.detach() * (e.scale * ROUNDED) * (e.scale * ROUNDED)


@dataclass(frozen=True, eq=False)
class Remainder:
    """What is left after first order.

    Attributes:
        within: ellipsoids of all entries of the result, [heads, queries, features], that add up.
        length: of what there is besides, in any direction.
        damped: k of each query, [..., queries, 1]: the first order by the scores counts ``1 - k / 2`` times.
    """

    within: tuple[Ellipsoid, ...]
    length: float
    damped: torch.Tensor

    @property
    def longest(self) -> float:
        """The longest that it may be."""
        return sum(e.length.item() for e in self.within) + self.length


@dataclass(frozen=True, eq=False)
class Rows:
    """All queries of all heads as rows r [rows], keys as j.

    Attributes:
        query: queries.
        key: keys.
        value: values.
        weights: p, [..., queries, keys].
        scores: an ellipsoid of the a_j, all of them, ``sum_j p_j a_j = 0`` in each row.
        scale: s, not negative.
    """

    query: Moving
    key: Moving
    value: Moving
    weights: torch.Tensor
    scores: Ellipsoid
    scale: float

    def found(self) -> Remainder | None:
        """What is left; None where that is further than exponentials go."""
        is_finite = all(bool(t.isfinite().all()) for t in (self.cov, self.query.cov, self.key.cov, self.value.cov))
        return self.remainder() if is_finite and bool((self.most <= FURTHEST).all()) else None

    def remainder(self) -> Remainder:
        """What is left."""
        b, apart, e = self.products, self.deviations.square().sum(-1).sqrt(), self.moved_apart(self.value)
        p, first, damped = self.p, self.first, self.damped
        middle, tilt, half = self.fitted(lambda t: _bend(t) / 2)
        slope, rise, width = self.fitted(slope_of)
        within = functools.reduce(sum_of, (Ellipsoid.of(above(g)) for g in self.second_order(middle, slope)))
        third = (self.of_powers(p * tilt, 3), self.of_values(rise, 2))

        wide, bent, of_values = p * half * apart, p * (middle.abs() + tilt * (1.5 * first + b)) * apart, p * width * e
        by_products = p * (slope.abs() + width + rise * (2 * first + b)) * b
        left = (
            (
                self.of_first(damped / 2),
                self.by_rows((damped / 2).square()[:, None, None] * self.own_rows(self.mapped(self.cov, p))),
            ),
            (norm_of(damped / 2 * (p * apart * b).sum(-1)), self.by_rows(self.along_deviations(damped[:, None] / 2 * p * b))),
            (
                self.together(of_values, of_values.sum(-1).sqrt()) + norm_of((by_products * e).sum(-1)),
                self.by_rows(self.along_values(p * width * first + by_products)),
            ),
            self.of_either_sign(wide, bent),
        )
        length, rest = 0.0, [Ellipsoid.of(above(g)) for g in third]
        for of_any, of_these in left:
            if of_these.diagonal().mean().item() < of_any * of_any:
                rest.append(Ellipsoid.of(above(of_these)))
            else:
                length += of_any
        return Remainder((within, functools.reduce(sum_of, rest)), length * ROUNDED, damped.reshape(*self.weights.shape[:-1], 1))

    def second_order(self, middle: torch.Tensor, slope: torch.Tensor) -> Sequence[torch.Tensor]:
        """Covariances whose ellipsoids hold, added up, what is of second order, given m and n."""
        p, of_products = self.p, self.p * (1 - self.damped / 2)[:, None]
        apart = (self.of_powers(p * middle, 2), self.of_products(of_products), self.of_values(slope))
        found = [t.factor for t in (self.query, self.key, self.value)]
        tokens = (self.query, self.key, self.value)
        if any(f is None for f in found):
            return apart
        by = Factors(*(f.reshape(*t.by_head.shape, -1) for f, t in zip(found, tokens, strict=True) if f is not None))
        if not by.is_small:
            return apart
        shape = (self.weights.shape[:-2].numel(), *self.weights.shape[-2:])
        c = p * slope
        one_by_one = torch.diag_embed(c) - p[:, :, None] * c[:, None, :]
        together = by.second_order(
            by.scores(self.query.by_head, self.key.by_head, p.reshape(shape), self.scale),
            self.deviations.reshape(*shape, -1),
            (p * middle).reshape(shape),
            self.scale * of_products.reshape(shape),
            one_by_one.reshape(*shape, -1),
        )
        lengths = (sum(math.sqrt(max(g.diagonal().sum().item(), 0.0)) for g in gs) for gs in ((together,), apart))
        return (together,) if next(lengths) <= next(lengths) else apart

    def own_rows(self, cov: torch.Tensor) -> torch.Tensor:
        """Of the covariance of all entries that of each row's, [rows, features, features]."""
        rows = torch.arange(len(self.p))
        return cov.reshape(len(rows), -1, len(rows), cov.shape[0] // len(rows))[rows, :, rows]

    def along_deviations(self, most: torch.Tensor) -> torch.Tensor:
        """Of ``sum_j t_j (v_j - y)`` in each row, ``|t_j|`` at most `most`: by Cauchy-Schwarz ``sum_j most_j`` times the sum of those of one, most_j times."""
        v = self.deviations
        return most.sum(-1)[:, None, None] * torch.einsum("rj,rjx,rjy->rxy", most, v, v)

    def along_values(self, most: torch.Tensor) -> torch.Tensor:
        """The same of ``sum_j t_j (e_j - sum_l p_l e_l)``."""
        moves = self.apart(self.value).flatten(0, 1)
        return most.sum(-1)[:, None, None] * torch.einsum("rj,rjxy->rxy", most, moves)

    def by_rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """Of all rows, each in an ellipsoid of its own: of the blocks over shares that add up to 1, as their lengths."""
        lengths = blocks.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=0).sqrt()
        shares = (lengths + 1e-6 * lengths.sum()).clamp(min=1e-300)
        return torch.block_diag(*(blocks * (shares.sum() / shares)[:, None, None])) * ROUNDED

    @functools.cached_property
    def bent(self) -> torch.Tensor:
        """The largest ``phi(t) / (t^2 Z)``."""
        return largest_quotient(lambda t: _bend(t) / 2, self.most, self.p)

    def fitted(self, f: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers m, l and h with ``f(t) / Z`` within h of ``m + l t`` for all moves t of each score; f is positive and grows.

        The slope l is that of f between the ends, where that leaves much less than none.
        """
        secant = (f(self.most) - f(-self.most)) / (2 * self.most).clamp(min=1e-3) * (1 - self.damped / 2)[:, None]
        tilted, flat = (self.beside(f, slope) for slope in (secant, torch.zeros_like(secant)))
        is_tilted = tilted[1] < _TILTED * flat[1]
        middle, half = (torch.where(is_tilted, *pair) for pair in zip(tilted, flat, strict=True))
        return middle, torch.where(is_tilted, secant, 0.0), half

    def beside(self, f: Callable[[torch.Tensor], torch.Tensor], slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The middle of what ``f(t) / Z - slope t`` may be, and half the width: piece by piece by the ends that are furthest, ``slope >= 0``."""
        ends = torch.linspace(-1, 1, 2 * _FINE_PIECES + 1, dtype=self.p.dtype)[:, None, None] * self.most
        start, end = ends[:-1], ends[1:]
        phi = torch.minimum(torch.expm1(start) - start, torch.expm1(end) - end).clamp(min=0)  # 0 is an end of two pieces
        high = (f(end) * ROUNDED / (1 + self.p * phi) - slope * start).amax(0)
        low = (f(start) / ROUNDED * (1 - self.damped)[:, None] - slope * end).amin(0)
        return (low + high) / 2, (high - low).clamp(min=0) / 2 + 1e-9 * (high.abs() + slope * self.most)

    @functools.cached_property
    def total(self) -> torch.Tensor:
        """The largest ``Z - 1`` of each row."""
        return (self.p * (torch.expm1(self.most) - self.most)).sum(-1)

    @functools.cached_property
    def damped(self) -> torch.Tensor:
        """k, the largest ``1 - 1 / Z`` of each row."""
        w = self.p * self.bent
        by_moves = (self.form(w).sqrt() + (w * self.products.square()).sum(-1).sqrt()).square()
        return torch.minimum(by_moves, self.total / (1 + self.total)).nan_to_num(nan=1.0).clamp(max=1.0) * ROUNDED

    @property
    def p(self) -> torch.Tensor:
        return self.weights.flatten(0, -2)

    @functools.cached_property
    def cov(self) -> torch.Tensor:
        """Of the a_j, [rows, keys, rows, keys]."""
        return _absolute(self.scores).reshape(*self.p.shape, *self.p.shape)

    @functools.cached_property
    def own(self) -> torch.Tensor:
        """Of the a_j of each row, [rows, keys, keys]."""
        rows = torch.arange(len(self.p))
        return self.cov[rows, :, rows]

    @functools.cached_property
    def first(self) -> torch.Tensor:
        """The largest ``|a_j|``."""
        return self.own.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt() * ROUNDED

    @functools.cached_property
    def most(self) -> torch.Tensor:
        """The largest ``|d_j|``, of keys that are seen."""
        return torch.where(self.p > 0, self.first + self.products, 0.0)

    @functools.cached_property
    def deviations(self) -> torch.Tensor:
        """``v_j - y``, [rows, keys, features]."""
        y = self.weights @ self.value.data
        return (self.value.data.unsqueeze(-3) - y.unsqueeze(-2)).flatten(0, -3)

    @functools.cached_property
    def products(self) -> torch.Tensor:
        """The largest ``|b_j|``."""
        return self.longest_queries[:, None] * self.by_queries

    @functools.cached_property
    def longest_queries(self) -> torch.Tensor:
        """How far each row's query moves at most, [rows]."""
        n = torch.arange(len(self.p))
        return torch.linalg.eigvalsh(self.query.by_token[n, :, n])[..., -1].clamp(min=0).sqrt()

    @functools.cached_property
    def by_queries(self) -> torch.Tensor:
        """How much ``|b_j|`` grows with the length that the row's query moves."""
        return self.scale * self.moved_apart(self.key) * ROUNDED

    def moved_apart(self, t: Moving) -> torch.Tensor:
        """How far keys or values move at most, less their mean by the weights, [rows, keys]."""
        return torch.linalg.eigvalsh(self.apart(t))[..., -1].clamp(min=0).sqrt().flatten(0, 1)

    def apart(self, t: Moving) -> torch.Tensor:
        """The covariance of keys or values less their mean by the weights, [heads, queries, keys, features, features]."""
        heads, (count, d) = math.prod(t.data.shape[:-2]), t.data.shape[-2:]
        p, n = self.weights.reshape(heads, -1, count), torch.arange(heads)
        cov = t.cov.reshape(heads, count, d, heads, count, d)[n, :, :, n]
        mixed = torch.einsum("hil,hjxly->hijxy", p, cov)
        own = cov.diagonal(dim1=1, dim2=3).movedim(-1, 1).unsqueeze(1)
        apart = own - mixed - mixed.mT + torch.einsum("him,himxy->hixy", p, mixed).unsqueeze(2)
        rounded = 1e-13 * (own.diagonal(dim1=-2, dim2=-1).sum(-1).amax(-1, keepdim=True) + 1e-300)
        return (apart + apart.mT) / 2 + rounded[..., None, None] * torch.eye(d, dtype=t.cov.dtype)

    def form(self, w: torch.Tensor) -> torch.Tensor:
        """The largest ``sum_j w_j a_j^2`` of each row."""
        root = w.sqrt()
        return torch.linalg.eigvalsh(root[:, :, None] * self.own * root[:, None])[..., -1].clamp(min=0) * ROUNDED

    def together(self, w: torch.Tensor, factors: torch.Tensor) -> float:
        """The length of all rows of ``factor (sum_j w_j a_j^2)^(1/2)``; of ``sum_j w_j a_j^2`` where the factors are the largest of its root."""
        root = (factors.square()[:, None] * w).flatten().sqrt()
        cov = self.cov.reshape(len(root), len(root))
        return torch.linalg.eigvalsh(root[:, None] * cov * root)[-1].clamp(min=0).sqrt().item() * ROUNDED

    def mapped(self, cov: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        """The covariance of ``sum_j c_j t_j (v_j - y)``, all entries of the result, for a t_j in each row of covariance `cov`."""
        c = coefficients[:, :, None] * self.deviations
        half = torch.einsum("rjqk,qky->rjqy", cov.reshape(*self.p.shape, *self.p.shape), c)
        return torch.einsum("rjx,rjqy->rxqy", c, half).flatten(2).flatten(0, 1)

    def of_powers(self, coefficients: torch.Tensor, n: int) -> torch.Tensor:
        """Of ``sum_j c_j a_j^n (v_j - y)``: linear in products of n entries of u, which have at most unit length together."""
        return self.mapped(self.cov**n, coefficients)

    def of_products(self, coefficients: torch.Tensor, key: Moving | None = None) -> torch.Tensor:
        """Of ``sum_j c_j b_j (v_j - y)``, c_j a multiple of p_j, so that the mean of b has no effect; keys may move as others do."""
        heads = self.weights.shape[:-2].numel()
        q, k = self.query.by_token, (key or self.key).by_token
        q = q.reshape(heads, -1, q.shape[1], heads, len(self.p) // heads, q.shape[1])
        k = k.reshape(heads, -1, k.shape[1], heads, self.p.shape[1], k.shape[1])
        cov = self.scale**2 * torch.einsum("gixhky,gjxhly->gijhkl", q, k)
        return self.mapped(cov, coefficients)

    def of_values(self, slopes: torch.Tensor, n: int = 1, value: Moving | None = None) -> torch.Tensor:
        """Of ``sum_j p_j s_j a_j^n (e_j - sum_l p_l e_l)``: of ``sum_j (p_j s_j a_j^n - p_j sum_l p_l s_l a_l^n) e_j``; values may move as others do."""
        c = self.p * slopes
        m = torch.diag_embed(c) - self.p[:, :, None] * c[:, None, :]
        cov = torch.einsum("rjl,rlqk,qmk->rjqm", m, self.cov**n, m)
        heads = self.weights.shape[:-2].numel()
        cov = cov.reshape(heads, -1, cov.shape[1], heads, len(cov) // heads, cov.shape[1])
        v = (value or self.value).by_token
        v = v.reshape(heads, -1, v.shape[1], heads, self.p.shape[1], v.shape[1])
        return torch.einsum("gijhkl,gjxhly->gixhky", cov, v).flatten(3).flatten(0, 2)

    def of_either_sign(self, wide: torch.Tensor, bent: torch.Tensor) -> tuple[float, torch.Tensor]:
        """The length of ``sum_j t_j (v_j - y) / |v_j - y|`` of all rows, and a covariance of it, ``|t_j| <= wide_j d_j^2 + bent_j (2 |a_j b_j| + b_j^2)``.

        With X^2 the largest ``sum_j |t_j|`` of a row, by Cauchy-Schwarz ``(w . sum_j t_j n_j)^2 <= sum_j |t_j| sum_j |t_j| (w . n_j)^2`` for unit vectors
        n_j; so the rows are together in J times the ellipsoid of the blocks ``X^2 sum_j T_j n_j n_j^T``, T_j the largest |t_j| and J the
        largest sum over rows of ``sum_j |t_j| / X^2``, which all of them have at once.
        """
        b, first = self.products, self.first
        on_wide, on_bent = ((w * b.square()).sum(-1).sqrt() for w in (wide, bent))
        length = self.together(wide, self.form(wide).sqrt()) + 2 * self.together(wide, on_wide) + norm_of(on_wide.square())
        length += 2 * self.together(bent, on_bent) + norm_of(on_bent.square())

        squares = (self.form(wide).sqrt() + on_wide).square() + (2 * self.form(bent).sqrt() + on_bent) * on_bent
        inverse = 1 / squares.sqrt().clamp(min=1e-150)
        at_once = (self.together(wide, inverse) + norm_of(on_wide * inverse)) ** 2
        at_once += (2 * self.together(bent, inverse) + norm_of(on_bent * inverse)) * norm_of(on_bent * inverse)
        most = wide * self.most.square() + bent * (2 * first + b) * b
        unit = self.deviations / self.deviations.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-300)
        blocks = squares[:, None, None] * torch.einsum("rj,rjx,rjy->rxy", most, unit, unit)
        return length, min(at_once, len(squares)) * torch.block_diag(*blocks) * ROUNDED

    def of_first(self, factors: torch.Tensor) -> float:
        """The length of ``f sum_j p_j a_j (v_j - y)`` of all rows."""
        return math.sqrt(max(torch.linalg.eigvalsh(above(self.mapped(self.cov, factors[:, None] * self.p)))[-1].item(), 0.0))


def above(cov: torch.Tensor) -> torch.Tensor:
    """A covariance that is not below the exact one, whatever was rounded: sums of terms of the sizes of its diagonal."""
    cov = (cov + cov.mT) / 2
    return cov + 1e-10 * cov.diagonal().amax().clamp(min=0) * torch.eye(len(cov), dtype=cov.dtype)


def norm_of(t: torch.Tensor) -> float:
    return t.square().sum().sqrt().item()


def norms_of(t: torch.Tensor) -> torch.Tensor:
    """Of each row."""
    return t.square().sum(-1).sqrt()


def _bend(t: torch.Tensor) -> torch.Tensor:
    """``2 phi(t) / t^2``, growing in t."""
    series = 1 + t / 3 + t * t / 12 + t**3 / 60
    return torch.where(t.abs() < 1e-3, series, 2 * (torch.expm1(t) - t) / torch.where(t.abs() < 1e-3, 1.0, t).square())


def slope_of(t: torch.Tensor) -> torch.Tensor:
    """``(exp(t) - 1) / t``, growing in t."""
    return torch.where(t.abs() < 1e-8, 1 + t / 2, torch.expm1(t) / torch.where(t.abs() < 1e-8, 1.0, t))


def largest_quotient(f: Callable[[torch.Tensor], torch.Tensor], most: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The largest ``f(t) / (1 + p phi(t))`` for t up to `most`, f growing: piece by piece by the larger end of one and the smaller of the other."""
    ends = torch.linspace(0, 1, _PIECES + 1, dtype=p.dtype)[:, None, None] * most
    phi = torch.expm1(ends[:-1]) - ends[:-1]
    return (f(ends[1:]) / (1 + p * phi)).amax(0) * ROUNDED


def middle_of(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of an interval the middle, and half of its width, rounded up."""
    return (low + high) / 2, (high - low).clamp(min=0) / 2 + 1e-9 * high
