"""Attention at the tokens at hand, and at all that are near them: sensitivities, and how much they change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.tensors import NORM_DTYPE

_TINY = 1e-30
_MASKED = -1e30  # scores that no move reaches
_LEAST_WEIGHT = 1e-300
_FURTHEST = 600.0  # no exponential of a score's move is taken beyond
_ROUNDED = 16  # units in the last place that sums of squares and of products are off, at most


@dataclass(frozen=True)
class Moved:
    """How far tokens may be from the data, Euclidean, the one that moves most, and the entries of a mask."""

    query: float = 0.0
    key: float = 0.0
    value: float = 0.0
    mask: float = 0.0


@dataclass(frozen=True)
class Slopes:
    """Sensitivities of attention to its arguments, both ends in RMS over features and some heads, the worst token's."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class Nearby:
    """What ``y_i = sum_j p_ij v_j`` is made of, at most, for all tokens within some lengths of the data; s is the scale.

    Scores move by at most a_ij beside what all of a row have in common, so that weights become at most

        h_ij = 1 / (p_ij + e^(-a_ij) sum_(l != j) p_il e^(-a_il))

    times as large, and no less than the same with e^a for e^-a.  With Q, K, V, M for how far queries, keys, values and the mask move and c
    the mean of the keys ``a_ij = s (|q_i| K + Q max_j |k_j - c| + Q K) + M``, if nothing better is known; the weights of the data are
    multiplied by 1 + t_ij, |t_ij| bounded by these, at most e_i in a row, and

        |v_j - y_i| <= |v_j - y_i| at the data + 2 V + sum_l p_il |t_il| |v_l - y_i|,

    of which the sum is at most the largest ``|v_l - y_i|``, means being no further than that.  However much weights change,

        |Cov_p(v, v)|_2 <= r_i^2,    r_i = min(max_jl |v_j - v_l| / 2, max_j |v_j - y_i|) + V,

    as a number that is between two others has a variance of at most a quarter of the square of their distance (Popoviciu), v along any direction; and the
    variance is least about the mean.  So it is for the keys.

    Attributes:
        query, key, value: the data; keys and values less their means, which change no derivative.
        data: the weights there.
        scale: s.
        moved: the lengths.
        scores: a_ij, [..., i, j] or broadcast to it.
        weights: p_ij, [..., i, j].
        apart: |v_j - y_i|, likewise.
        furthest: the largest |v_j - y_i| at the data, [..., i, 1].
        spreads: r_i of the values and of the keys, [..., i, 1].
        lengths: |q_i|, [..., i, 1].
        grown: the largest h_ij of a row, [..., i, 1].
        changed: e_i, likewise.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    data: torch.Tensor
    scale: float
    moved: Moved
    scores: torch.Tensor
    weights: torch.Tensor
    apart: torch.Tensor
    furthest: torch.Tensor
    spreads: tuple[torch.Tensor, torch.Tensor]
    lengths: torch.Tensor
    grown: torch.Tensor
    changed: torch.Tensor

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        is_causal: bool,
        scale: float,
        moved: Moved,
        scores: torch.Tensor | None = None,
    ) -> Nearby:
        """All of it, given the data, with a mask that is added or says what is seen; the scale may be negative."""
        p, scale = weights_of(query, key, bias, is_causal, scale), abs(scale)
        # derivatives are by how far tokens are from each other: where all are far from 0 their squares would leave little of that
        key, value = (t - t.mean(-2, keepdim=True) for t in (key, value))
        apart, lengths = _from_means(p, value), query.square().sum(-1, keepdim=True).sqrt()
        furthest, of_keys = (torch.where(p > 0, t, 0.0).amax(-1, keepdim=True) for t in (apart, _from_means(p, key)))
        if scores is None:
            keys = key.square().sum(-1).sqrt().amax(-1)[..., None, None]
            scores = scale * (lengths * moved.key + moved.query * keys + moved.query * moved.key) + moved.mask
        most, least = _ratios(p, scores)
        change = torch.maximum(most - 1, 1 - least)
        apart = apart + 2 * moved.value + torch.minimum((p * change * apart).sum(-1, keepdim=True), furthest)
        grown, changed = (torch.where(p > 0, t, floor).amax(-1, keepdim=True) for t, floor in ((most, 1.0), (change, 0.0)))
        spreads = (
            torch.minimum(_widest(value) / 2, furthest) + moved.value,
            torch.minimum(_widest(key) / 2, of_keys) + moved.key,
        )
        return cls(
            query=query,
            key=key,
            value=value,
            data=p,
            scale=scale,
            moved=moved,
            scores=scores,
            weights=(p * most).clamp(max=1.0),
            apart=apart,
            furthest=furthest,
            spreads=spreads,
            lengths=lengths + moved.query,
            grown=grown,
            changed=changed,
        )

    def slopes(self, heads: ed.Dims) -> Slopes:
        """Sensitivities, h over `heads` (dims before -2).

        ``dy_i = s Cov_p(v, k) dq_i``, hence ``s |Cov_p(v, k)|_2``, the largest over heads: the map is diagonal in them.
        ``dy_i = s sum_j p_ij (v_j - y_i) (q_i . dk_j)``: with ``b_ij = p_ij |v_j - y_i|``, by Cauchy-Schwarz over j in each head,
        ``s (sum_j max_h |q_hi|^2 (sum_l b_hil) b_hij)^(1/2)``; and ``(sum_j max_h p_hij)^(1/2)`` by Jensen to the values.
        The spectral norm of a d x d covariance C is bounded by ``|(C^T C)^2|_F^(1/4)``, at most d^(1/8) too large.
        Memory: tokens x (d^2 + tokens) for each head; time: tokens^2 x d^2.

        Away from the data, with ``u^2 = |Cov_p(v, v)|_2`` and ``w^2 = |Cov_p(k, k)|_2`` there,

            |Cov_p(v, k)|_2 <= |Cov at the data|_2 + (e + e^2) u w + h^(1/2) (V w + u K) + V K

        by Cauchy-Schwarz, as a covariance is smallest about the mean; and at most the product of what values and keys are spread.  ``sum_l b_il`` is at
        most the largest |v_l - y_i| at the data and V, by the variance about that y_i.
        """
        covariance = _covariance(self.data, self.value, self.key)
        by_value, by_key = self.moved.value, self.moved.key
        if any((self.moved.query, by_key, by_value, self.moved.mask)):
            of_values, of_keys = (_covariance(self.data, t, t).sqrt() for t in (self.value, self.key))
            e, root = self.changed[..., 0], self.grown[..., 0].sqrt()
            covariance = covariance + (e + e.square()) * of_values * of_keys
            covariance = covariance + root * (by_value * of_keys + of_values * by_key) + by_value * by_key
            covariance = torch.minimum(covariance, (self.spreads[0] * self.spreads[1])[..., 0])
        weighted = self.weights * self.apart
        total = torch.minimum(weighted.sum(-1, keepdim=True), self.furthest + by_value)
        of_key = _largest_over(self.lengths.square() * total * weighted, heads).sum(-1).amax()
        of_each = (self.lengths * total).square()  # the sum over keys, of each head
        found = (
            self.scale * covariance.amax(),
            self.scale * torch.minimum(of_key, (of_each.sum(heads) if heads else of_each).amax()).sqrt(),
            _largest_over(self.weights, heads).sum(-1).amax().sqrt(),
        )
        return Slopes(*(t.to(NORM_DTYPE).nan_to_num(nan=math.inf) for t in found))

    def bend(self, by_root: Sequence[torch.Tensor]) -> tuple[list[float], float, float, float]:
        """How much derivatives change within the lengths moved, of y in any direction.

        A second derivative along e and d is at most, with ``A_i(e)^2 = sum_j p_ij a_ij(e)^2`` (a variance is smallest about the mean),

            B(e, d) + s (Q_e K_d + Q_d K_e) sum_j p_ij |v_j - y_i| + A(e) V_d + A(d) V_e:

        of weights ``p_j ((a_j - E a)(b_j - E b) - Cov(a, b))``, the covariance without effect as deviations from y have mean 0.  Of the
        first term, the sum of ``p_j |a_j - E a| |b_j - E b| |v_j - y|``, with ``|a_j - E a| <= c_j = a_j + sum_l p_l a_l``, B is the least of
        ``sum_j p_j c_j(e) c_j(d) |v_j - y|``, ``(sum_j p_j c_j(e)^2 |v_j - y|^2)^(1/2) A(d)`` and ``A(e) A(d) max_j |v_j - y|``.

        Args:
            by_root: for some causes how far each score moves by one of size 1, to first order at the data, [..., i, j].

        Returns:
            Lengths of all tokens of the result together: for each cause of size 1, and for the longest moves of one token of query, key
            and value in it.
        """
        s, by, p = self.scale, self.moved, self.weights
        deviation = (p * self.scores.square()).sum(-1).sqrt()
        furthest = torch.where(self.data > 0, self.apart, 0.0).amax(-1)
        centred = _centred(p, self.scores)
        by_score = torch.minimum((p * (centred * self.apart).square()).sum(-1).sqrt(), deviation * furthest)
        by_product = s * (by_score + by.value + (p * self.apart).sum(-1))
        found = []
        for a in by_root:
            own = (p * a.square()).sum(-1).sqrt()
            found.append(torch.minimum((p * centred * _centred(p, a) * self.apart).sum(-1), by_score * own) + by.value * own)
        found += [by.key * by_product, by.query * by_product, deviation]
        *causes, query, key, value = (t.square().sum().sqrt().nan_to_num(nan=math.inf).item() for t in found)
        return causes, query, key, value


def _centred(p: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """How far moves of scores are from their mean, at most."""
    return a + (p * a).sum(-1, keepdim=True)


def _ratios(p: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many times as large weights become at most, and at least, when scores move by that much up or down (`Nearby`)."""

    def of(a: torch.Tensor, sign: int) -> torch.Tensor:
        terms = p * a.exp()
        total = terms.sum(-1, keepdim=True)
        slack = 8 * torch.finfo(terms.dtype).eps * terms.shape[-1] * total
        return 1 / (p + a.exp() * (total - terms + sign * slack).clamp(min=0.0)).clamp(min=_LEAST_WEIGHT)

    # the least weights are e^-690: what moves further may leave nothing of the others
    dtype, p, is_far = p.dtype, p.double(), scores.double() > _FURTHEST
    a = scores.double().clamp(max=_FURTHEST)
    margin = 1 + 1e-9
    most = torch.where(is_far, 1 / p.clamp(min=_LEAST_WEIGHT), of(-a, -1)) * margin
    least = torch.where(is_far, 0.0, of(a, 1)) / margin
    return most.clamp(min=1.0, max=torch.finfo(dtype).max).to(dtype), least.clamp(max=1.0).to(dtype)


def _covariance(p: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``|Cov_p(a, b)|_2`` of each row of weights, or more (`_spectral_bound`)."""
    outer = (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2)
    means = ((p @ a).unsqueeze(-1) * (p @ b).unsqueeze(-2)).flatten(-2)
    rounded = _ROUNDED * torch.finfo(p.dtype).eps * _longest(a) * _longest(b)
    return _spectral_bound((p @ outer - means).unflatten(-1, (a.shape[-1], b.shape[-1]))) + rounded


def _longest(t: torch.Tensor) -> torch.Tensor:
    """Of the tokens, [..., 1]."""
    return t.square().sum(-1).amax(-1, keepdim=True).sqrt()


def _from_means(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """How far each token is from their mean by each row of weights, [..., i, j]."""
    return _apart(p @ t, t)


def _widest(t: torch.Tensor) -> torch.Tensor:
    """How far two tokens are from each other, at most, [..., 1, 1]."""
    return _apart(t, t).amax((-2, -1), keepdim=True)


def _apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``|a_i - b_j|``, [..., i, j], and what rounding may have done to it."""
    squares = a.square().sum(-1).unsqueeze(-1) + b.square().sum(-1).unsqueeze(-2)
    rounded = _ROUNDED * torch.finfo(squares.dtype).eps
    return ((1 + rounded) * squares - 2 * (a @ b.transpose(-1, -2))).clamp(min=0).sqrt()


def weights_of(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, is_causal: bool, scale: float) -> torch.Tensor:
    """The weights, 0 of keys that a query does not see alone: others have the least that is left of them, which scores may outgrow."""
    scores = scale * (query @ key.transpose(-1, -2))
    if bias is not None:
        scores = torch.where(bias, scores, -math.inf) if bias.dtype == torch.bool else scores + bias
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = torch.where(seen, scores, -math.inf)
    # a row that sees nothing has no weights
    weights = scores.softmax(-1).nan_to_num(nan=0.0)
    return torch.where(scores > _MASKED, weights.clamp(min=max(_LEAST_WEIGHT, torch.finfo(weights.dtype).tiny)), weights)


def _largest_over(t: torch.Tensor, dims: ed.Dims) -> torch.Tensor:
    return t.amax(dims) if dims else t


def _spectral_bound(matrices: torch.Tensor) -> torch.Tensor:
    frobenius = matrices.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=_TINY)
    unit = matrices / frobenius
    gram = unit.transpose(-1, -2) @ unit
    return (gram @ gram).square().sum((-2, -1)).sqrt().sqrt().sqrt() * frobenius[..., 0, 0]
