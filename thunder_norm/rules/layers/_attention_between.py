"""How much attention's derivative changes between tokens near the data: `_attention_away` for any two points, not the data and one of them.

At a point e away from the data, ``s_j = a_j(e) + b_j(e)`` the scores' moves there and ``g_j = exp(s_j) / Z`` what weights are multiplied by, a
move d has

    dy = sum_j p_j g_j (a_j(d) + c_j) (v'_j - y')  +  sum_j p_j g_j e_j(d),    c_j = s (dq . ek_j + eq . dk_j) less its mean,

``v'_j - y' = v_j - y + e_j - D`` with centred moves e_j of values and ``D = sum_j p_j (g_j - 1) (v_j - y + e_j)``.  As ``sum_j p_j a_j = 0`` and
``g_j - 1 = n_j s_j - k`` (n_j a slope of the exponential over Z, k at most the largest ``1 - 1 / Z``), what it is more than at the data is of second order

    sum_j p_j n_j a_j(e) a_j(d) (v_j - y),    sum_j p_j c_j (v_j - y),    sum_j p_j a_j(d) e_j(e),    sum_j p_j n_j a_j(e) e_j(d),

linear in ``u w^T``, e made of u and d of w: in ellipsoids as those of `Rows`, c being made of two such terms.  The rest is a ball.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from thunder_norm.core.ellipsoids import Ellipsoid, sum_of
from thunder_norm.rules.layers._attention_away import (
    FURTHEST,
    ROUNDED,
    Remainder,
    Rows,
    above,
    largest_quotient,
    middle_of,
    norm_of,
    norms_of,
    slope_of,
)


@dataclass(frozen=True, eq=False)
class Between(Rows):
    """All queries of all heads as rows, between any two points.

    Attributes:
        points: the same for all that points are away from the data, which is less than two of them are apart.
    """

    points: Rows

    def found(self) -> Remainder | None:
        """What is left; None where points are further than exponentials go."""
        tensors = (t for rows in (self, self.points) for t in (rows.cov, rows.query.cov, rows.key.cov, rows.value.cov))
        is_finite = all(bool(t.isfinite().all()) for t in tensors)
        return self.remainder() if is_finite and bool((self.points.most <= FURTHEST).all()) else None

    def remainder(self) -> Remainder:
        """What there is beside the derivative at the data, along a move that is as long as tokens move."""
        p, at = self.p, self.points
        b, most, e, moved = at.products, at.most, at.moved_apart(at.value), self.moved_apart(self.value)
        apart, damped, total = self.deviations.square().sum(-1).sqrt(), at.damped, at.total
        slope, width = middle_of(slope_of(-most) * (1 - damped)[:, None], largest_quotient(slope_of, most, p))
        least = (-most).exp() / (1 + total)[:, None]
        off = torch.maximum(largest_quotient(torch.exp, most, p) - 1, 1 - least).clamp(min=0) * ROUNDED

        second = (
            self.mapped(at.cov * self.cov, p * slope),
            self.of_products(p, key=at.key),
            at.of_products(p, key=self.key),
            self.of_values(torch.ones_like(p), value=at.value),
            at.of_values(slope, value=self.value),
        )
        within = functools.reduce(sum_of, (Ellipsoid.of(above(g)) for g in second))

        most_slope = slope + width
        wide, of_products = p * width * apart, p * most_slope * apart * b
        shift = self._shift(p * slope, wide, of_products, p * most_slope * most * e)
        shift = torch.minimum(shift, (p * off * (apart + e)).sum(-1))
        by_values, changed = p * off * e, p * off
        # of all that is multiplied by D, sum_j p_j (g_j - 1) a_j(d): by how much weights change, or as slopes times scores' moves
        of_shifts = (changed.sum(-1).sqrt(), at.form(p * most_slope.square()).sqrt() + norms_of(p.sqrt() * most_slope * b))
        length = self.of_first(damped / 2) + self.together(wide, at.form(wide).sqrt())
        length += self.together(of_products, of_products.sum(-1).sqrt()) + self.together(by_values, by_values.sum(-1).sqrt())
        length += min(self.together(w, shift * f) for w, f in zip((changed, p), of_shifts, strict=True))
        factors = p * (off * (apart + shift[:, None]) + (1 + off) * e)
        length += _of_products_alone(factors, self, at) + _of_products_alone(factors, at, self)
        length += _of_products_alone(p * slope * moved, at, at) + norm_of((p * width * most * moved).sum(-1))
        return Remainder((within,), length * ROUNDED, damped.reshape(*self.weights.shape[:-1], 1))

    def _shift(
        self, linear: torch.Tensor, wide: torch.Tensor, of_products: torch.Tensor, of_values: torch.Tensor
    ) -> torch.Tensor:
        """The largest |D| of each row, ``sum_j p_j n_j s_j (v_j - y + e_j)`` as centred deviations leave nothing of k: what is linear in a, and the rest."""
        at = self.points
        rows = at.own_rows(at.mapped(at.cov, linear))
        first = torch.linalg.eigvalsh((rows + rows.mT) / 2)[:, -1].clamp(min=0) + 1e-10 * rows.diagonal(dim1=1, dim2=2).sum(-1)
        return first.sqrt() + (wide.sum(-1) * at.form(wide)).sqrt() + (of_products + of_values).sum(-1)


def _of_products_alone(factors: torch.Tensor, of_query: Rows, of_key: Rows) -> float:
    """The length of ``s sum_j f_j (q . k_j)`` of all rows, q the move of a query and k_j of keys, less their mean.

    A row has at most its query's length times ``s sum_j f_j |k_j|``; all queries move together no further than the longest of their ellipsoid.
    """
    longest = torch.linalg.eigvalsh(of_query.query.cov)[-1].clamp(min=0).sqrt().item()
    by_row = (factors * of_key.by_queries).sum(-1)
    return min(norm_of(of_query.longest_queries * by_row), longest * by_row.amax().item() * ROUNDED)
