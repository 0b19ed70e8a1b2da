"""Determinants, and typical sizes of their logarithms, as normalizing flows have them.

In mode "bound" logarithms have no norm, unless what made a matrix keeps it away from singular ones (`symmetric_parts`).  Typically it is a
multiple of an orthogonal one.
"""

from __future__ import annotations

import torch

from thunder_norm.core.kinds import RMSTensor, RMSToRMSTensor
from thunder_norm.core.local import are_local
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import is_typical, refuse, rms
from thunder_norm.rules.linear_algebra.inverses import keeps_away, smallest_singular_value
from thunder_norm.scalars import times

_TINY = 1e-30


def _logdet(x: NormedTensor) -> RMSTensor:
    """``sqrt((N log n)^2 + N)``, and N / n.

    Source:      d log |det W| = tr(W^-1 dW), at most N |W^-1| |dW|, for W of N singular values of about n
    """
    n, count = x.norm_size.clamp(min=_TINY), x.shape[-1]
    size = (times(n.log(), float(count)).square() + count).sqrt()
    return rms(size, (), sensitivity={"input": times(n.reciprocal(), float(count))})


@normed_op(torch.det).register_norm(when=lambda args: not are_local(args))
@normed_op(torch.linalg.det).register_norm(when=lambda args: not are_local(args))
def det(A: RMSToRMSTensor) -> RMSTensor:  # noqa: N803
    """det A, of N rows and columns.

    A: operator norm n
    Value:       n^N              (attained: n I)
    Sensitivity: N n^(N - 1)      (attained there, along I)
    Source:      the modulus is the product of the singular values, all at most n; ``d det A = tr(adj(A) dA)``, the singular values of
                 adj(A) are products of N - 1 of A's
    Raises NormMismatchError where the operator is not from the last two dimensions to themselves.
    """
    if {*A.elem_dims} != {-2, -1}:
        raise NormMismatchError(f"a determinant is one of matrices in the last two dimensions, got {A.elem_dims}")
    count = A.shape[-1]
    n = A.norm_size
    return rms(n.pow(count), (), sensitivity={"A": count * n.pow(max(count - 1, 0))})


def _logdet_away(x: NormedTensor) -> RMSTensor:
    """``N max(|log c|, |log n|)``, and N / c, for ``|x^T W x| >= c |x|^2`` of N rows.

    Source:      all singular values are between c and n; d log |det W| = tr(W^-1 dW)
    """
    c, count = smallest_singular_value(x), float(x.shape[-1])
    size = torch.maximum(c.log().abs(), x.norm_size.clamp(min=_TINY).log().abs())
    return rms(times(size, count), (), sensitivity={"input": times(c.reciprocal(), count)})


@normed_op(torch.linalg.slogdet).register_norm(when=keeps_away("A"))
def linalg_slogdet_away(A: RMSToRMSTensor) -> tuple:  # noqa: N803
    """The sign, which has no norm, and log |det A|, for ``|x^T A x| >= c |x|^2``.

    Value:       ``N max(|log c|, |log n|)``      (attained: c I, or n I)
    Sensitivity: N / c                            (attained: c I, along I)
    Gap:         where A is c I what made it need not be able to move it
    """
    return None, _renamed(_logdet_away(A))


@normed_op(torch.slogdet).register_norm(when=keeps_away("input"))
def slogdet_away(input: RMSToRMSTensor) -> tuple:
    """The sign, which has no norm, and log |det W|, for ``|x^T W x| >= c |x|^2``: `linalg_slogdet_away`.

    Gap:         that of `linalg_slogdet_away`
    """
    return None, _logdet_away(input)


@normed_op(torch.logdet).register_norm(when=keeps_away("input"))
def logdet_away(input: RMSToRMSTensor) -> RMSTensor:
    """log det W, for ``|x^T W x| >= c |x|^2``: `linalg_slogdet_away`.

    Gap:         that of `linalg_slogdet_away`
    """
    return _logdet_away(input)


@normed_op(torch.linalg.slogdet).register_norm(when=is_typical)
def linalg_slogdet(A: RMSToRMSTensor) -> tuple:  # noqa: N803
    """`slogdet`.

    Untried:     in mode "bound" it does not apply
    """
    return None, _renamed(_logdet(A))


def _renamed(result: RMSTensor) -> RMSTensor:
    result._sensitivity = {"A": (result._sensitivity or {})["input"]}
    return result


@normed_op(torch.slogdet).register_norm(when=is_typical)
def slogdet(input: RMSToRMSTensor) -> tuple:
    """The sign, which has no norm, and log |det W|.  Typical: ``sqrt((N log n)^2 + N)``, and N / n.

    Untried:     in mode "bound" it does not apply
    """
    return None, _logdet(input)


@normed_op(torch.logdet).register_norm(when=is_typical)
def logdet(input: RMSToRMSTensor) -> RMSTensor:
    """log det W.  Typical: ``sqrt((N log n)^2 + N)``, and N / n.

    Untried:     in mode "bound" it does not apply
    """
    return _logdet(input)


_SINGULAR = (
    "a norm does not keep a matrix away from singular ones; norm_report's default, at the data, and mode='typical' have a size"
)
refuse(normed_op(torch.slogdet), _SINGULAR)
refuse(normed_op(torch.logdet), _SINGULAR)
refuse(normed_op(torch.linalg.slogdet), _SINGULAR)
