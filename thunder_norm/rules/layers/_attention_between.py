"""How much attention's derivative changes between tokens near the data: `_attention_away` for any two points, not the data and one of them.

At a point e away from the data, ``s_j = a_j(e) + b_j(e)`` the scores' moves there and ``g_j = exp(s_j) / Z`` what weights are multiplied by, a
move d has

    dy = sum_j p_j g_j (a_j(d) + c_j) (v'_j - y')  +  sum_j p_j g_j e_j(d),    c_j = s (dq . ek_j + eq . dk_j) less its mean,

``v'_j - y' = v_j - y + e_j - D`` with centred moves e_j of values and ``D = sum_j p_j (g_j - 1) (v_j - y + e_j)``.  As ``sum_j p_j a_j = 0`` and
``g_j - 1 = n_j s_j - k`` (n_j a slope of the exponential over Z, k at most the largest ``1 - 1 / Z``), what it is more than at the data is of second order

    sum_j p_j n_j a_j(e) a_j(d) (v_j - y),    sum_j p_j c_j (v_j - y),    sum_j p_j a_j(d) e_j(e),    sum_j p_j n_j a_j(e) e_j(d),

linear in ``u w^T``, e made of u and d of w: in the ellipsoids of `Rows`, c being made of two such terms.  The rest is a ball.
"""

from __future__ import annotations

import functools

import torch

from thunder_norm.core.ellipsoids import Ellipsoid, sum_of
from thunder_norm.rules.layers._attention_away import (
    ROUNDED,
    Remainder,
    Rows,
    above,
    largest_quotient,
    middle_of,
    norm_of,
    slope_of,
)


class Between(Rows):
    """All queries of all heads as rows, between any two points."""

    def remainder(self) -> Remainder:
        """What there is beside the derivative at the data, along a move that is as long as tokens move."""
        p, b, most, e = self.p, self.products, self.most, self.moved_apart(self.value)
        apart, damped, total = self.deviations.square().sum(-1).sqrt(), self.damped, self.total
        slope, width = middle_of(slope_of(-most) * (1 - damped)[:, None], largest_quotient(slope_of, most, p))
        least = (-most).exp() / (1 + total)[:, None]
        off = torch.maximum(largest_quotient(torch.exp, most, p) - 1, 1 - least).clamp(min=0) * ROUNDED

        second = (
            self.of_powers(p * slope, 2),
            4 * self.of_products(p),
            self.of_values(torch.ones_like(p)),
            self.of_values(slope),
        )
        within = functools.reduce(sum_of, (Ellipsoid.of(above(g)) for g in second))

        shifted = (p * off * (apart + e)).sum(-1, keepdim=True)
        wide, of_products, of_values = p * width * apart, p * (slope + width) * apart * b, p * off * (e + shifted)
        length = self.of_first(damped / 2) + self.together(wide, self.form(wide).sqrt())
        length += self.together(of_products, of_products.sum(-1).sqrt()) + self.together(of_values, of_values.sum(-1).sqrt())
        length += 2 * self.of_products_alone(p * (off * apart + (1 + off) * (e + shifted)))
        length += self.of_products_alone(p * slope * e) + norm_of((p * width * most * e).sum(-1))
        return Remainder((within,), length * ROUNDED, damped.reshape(*self.weights.shape[:-1], 1))

    def of_products_alone(self, factors: torch.Tensor) -> float:
        """The length of ``s sum_j f_j (q . k_j)`` of all rows, q the move of a query and k_j of keys: one is at e, and of it d in the other's place.

        A row has at most its query's length times ``s sum_j f_j |k_j|``; all queries move together no further than the longest of their ellipsoid.
        """
        together = (
            torch.linalg.eigvalsh(self.query.cov)[-1].clamp(min=0).sqrt().item()
            * (factors * self.by_queries).sum(-1).amax().item()
        )
        return min(norm_of((factors * self.products).sum(-1)), together * ROUNDED)
