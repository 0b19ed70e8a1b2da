"""What attention leaves of second order where queries, keys and values are known to move by one vector u: one quadratic form for each entry.

Of movements whose ellipsoids are known one by one, each of three terms (`_attention_away`) is bounded for vectors of its own, and their bounds add
up.  With ``dq = L_q u``, ``dk = L_k u`` and ``dv = L_v u`` what they make together is ``u^T C u`` for each entry of the result, C symmetric: linear in ``u u^T``,
whose entries have at most unit length, so that all entries are in the ellipsoid of the products of their C.  What cancels does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Numbers in all matrices C.
_MOST = 2**23


@dataclass(frozen=True, eq=False)
class Factors:
    """What moves are made of, by heads of the result.

    Attributes:
        query: L_q, [heads, queries, features, n].
        key: L_k, [heads, keys, features, n].
        value: L_v, [heads, keys, features, n].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def is_small(self) -> bool:
        """Whether there is room for the matrices of all entries."""
        heads, queries, _, n = self.query.shape
        return heads * queries * self.value.shape[2] * n * n <= _MOST

    def scores(self, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
        """The moves of scores to first order, less their mean by the weights, [heads, queries, keys, n]."""
        a = torch.einsum("hidn,hjd->hijn", self.query, key) + torch.einsum("hid,hjdn->hijn", query, self.key)
        return scale * (a - torch.einsum("hij,hijn->hin", weights, a).unsqueeze(2))

    def second_order(
        self,
        scores: torch.Tensor,
        deviations: torch.Tensor,
        of_squares: torch.Tensor,
        of_products: torch.Tensor,
        of_values: torch.Tensor,
    ) -> torch.Tensor:
        """The covariance of all entries, [heads, queries, features] of both sides.

        Args:
            scores: as above.
            deviations: of values from the result, [heads, queries, keys, features].
            of_squares: of ``a_j^2 (v_j - y)``, [heads, queries, keys].
            of_products: of ``(dq . dk_j) (v_j - y)``.
            of_values: of ``a_j dv_j``: numbers c for ``sum_j c_jl a_l``, [heads, queries, keys, keys].
        """
        weighted = (of_squares[..., None] * deviations).mT[..., None] * scores.unsqueeze(2)
        bent = weighted.mT @ scores.unsqueeze(2)
        keys = torch.einsum("hij,hijx,hjdn->hixdn", of_products, deviations, self.key)
        bent = bent + torch.einsum("hidm,hixdn->hixmn", self.query, keys)
        bent = bent + torch.einsum("hijm,hjxn->hixmn", of_values @ scores, self.value)
        c = ((bent + bent.mT) / 2).flatten(3).flatten(0, 2)
        return c @ c.mT
