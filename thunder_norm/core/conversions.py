"""Sound conversions between kinds and elem_dims: the same tensor, a (possibly larger) norm in another kind.

All constants are attained: a spike, a constant, or a rank-one matrix shows each of them.  The modes without a guarantee have those of
independent Gaussian entries instead.
"""

from __future__ import annotations

import math

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.ranges import facts_of_entries
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError

_KINDS = (RMSTensor, L1Tensor, L2Tensor, RMSToRMSTensor)  # of others, which a user defines, nothing is known


def factor(x: NormedTensor, kind: type[NormedTensor], elem_dims: ed.Dims) -> float | None:
    """Smallest known c with ``||t||_(kind, elem_dims) <= c ||t||_x`` for all tensors of x's shape; None if there is none.

    ``rms_E' <= sqrt(numel(E - E')) rms_E``,  ``l2_E = sqrt(N) rms_E``,  ``rms_E <= l1_E / sqrt(N) `` (spike),
    ``l1_E <= N rms_E`` (constant), ``l1_E' <= numel(E' - E) l1_E``.  A matrix [out, in] of operator norm n has rows of RMS
    ``<= n sqrt(out) / in``; a matrix whose entries, rows or columns have RMS <= n has operator norm ``<= in n`` (Frobenius
    bounds the spectral norm); l1 and l2 norms are read as RMS first.  A kernel is K such matrices, of which the largest counts K times.

    Other modes than "bound" describe independent entries: their RMS is the same over any dimensions; a matrix of them, of RMS r,
    multiplies independent inputs by ``r sqrt(in)`` and a kernel of K taps by ``r sqrt(K in)``, as ``E |W x|^2 = in r^2 |x|^2``.
    """
    if not (isinstance(x, _KINDS) and issubclass(kind, _KINDS)):
        return None
    if issubclass(kind, RMSToRMSTensor):
        return None if x.ndim < 2 else _to_operator(x, kind, elem_dims)
    if isinstance(x, RMSToRMSTensor):
        return _from_operator(x, kind, elem_dims)
    dims = x.elem_dims
    if isinstance(x, L1Tensor) and issubclass(kind, L1Tensor):
        return float(ed.numel(x.shape, [d for d in elem_dims if d not in dims]))
    if isinstance(x, L1Tensor) and kind is LinfTensor:
        return 1.0
    return _via_rms(x, kind, elem_dims)


def _via_rms(x: NormedTensor, kind: type[NormedTensor], elem_dims: ed.Dims) -> float:
    n_from, n_to = x.numel_normed, ed.numel(x.shape, elem_dims)
    if n_from == 0 or n_to == 0:
        return 1.0
    from_rms = 1.0 if issubclass(kind, RMSTensor) else math.sqrt(n_to) if issubclass(kind, L2Tensor) else n_to
    return _to_rms(x) * _between_dims(x, elem_dims) * from_rms


def _to_rms(x: NormedTensor) -> float:
    return 1.0 if isinstance(x, RMSTensor) else 1 / math.sqrt(max(x.numel_normed, 1))


def _between_dims(x: NormedTensor, elem_dims: ed.Dims) -> float:
    return ed.rms_factor(x.shape, x.elem_dims, elem_dims) if current_mode() == "bound" else 1.0


def _to_operator(x: NormedTensor, kind: type[NormedTensor], elem_dims: ed.Dims) -> float | None:
    out_dim, in_dim = elem_dims
    if isinstance(x, RMSToRMSTensor):
        to_kernel = issubclass(kind, RMSToRMSConvTensor) and not isinstance(x, RMSToRMSConvTensor)
        same_family = to_kernel or isinstance(x, RMSToRMSConvTensor) == issubclass(kind, RMSToRMSConvTensor)
        same_groups = getattr(x, "groups", 1) == getattr(kind, "groups", 1)
        if not same_family or not same_groups or set(x.elem_dims) != set(elem_dims):
            return None
        # read the other way round, sigma_max is the same and the ratio of the dimensions turns over
        turned = 1.0 if x.elem_dims == elem_dims else x.shape[in_dim] / x.shape[out_dim]
        return turned * _taps_together(_taps(x, elem_dims)) if to_kernel else turned
    to_rms = _to_rms(x)
    if issubclass(kind, RMSToRMSConvTensor):
        return to_rms * _to_kernel(x, kind, elem_dims)
    if set(ed.nontrivial(x.shape, x.elem_dims)) <= {out_dim, in_dim}:
        return to_rms * (float(x.shape[in_dim]) if current_mode() == "bound" else math.sqrt(x.shape[in_dim]))
    return None


def _taps(x: NormedTensor, elem_dims: ed.Dims) -> int:
    out_dim, in_dim = elem_dims
    return math.prod(x.shape) // max(x.shape[out_dim] * x.shape[in_dim], 1)


def _taps_together(taps: int) -> float:
    """How many times the norm of one tap's operator they have together."""
    return float(taps) if current_mode() == "bound" else math.sqrt(taps)


def _to_kernel(x: NormedTensor, kind: type[RMSToRMSConvTensor], elem_dims: ed.Dims) -> float:
    """Of K taps each is a matrix, in each group, of operator norm ``<= in`` times the RMS of its entries."""
    out_dim, in_dim = elem_dims
    taps = _taps_together(_taps(x, elem_dims))
    if current_mode() != "bound":
        return taps * math.sqrt(x.shape[in_dim])
    of_group = math.sqrt(kind.groups) if out_dim in x.elem_dims else 1.0
    return taps * x.shape[in_dim] * ed.rms_factor(x.shape, x.elem_dims, elem_dims) * of_group


def _from_operator(x: RMSToRMSTensor, kind: type[NormedTensor], elem_dims: ed.Dims) -> float | None:
    if isinstance(x, RMSToRMSConvTensor) or not issubclass(kind, RMSTensor):
        return None
    out_dim, in_dim = x.elem_dims
    d_out, d_in = x.out_features, x.in_features
    inside = set(elem_dims)
    if {out_dim, in_dim} <= inside:
        return math.sqrt(min(d_out, d_in)) / d_in
    if in_dim in inside:
        return math.sqrt(d_out) / d_in
    if out_dim in inside:
        return 1 / math.sqrt(d_in)
    return math.sqrt(d_out / d_in)


def can_convert(x: NormedTensor, kind: type[NormedTensor]) -> bool:
    """Whether x has a sound conversion to `kind` over that kind's natural elem_dims for x."""
    return factor(x, kind, natural_dims(x, kind)) is not None


def natural_dims(x: NormedTensor, kind: type[NormedTensor]) -> ed.Dims:
    """The elem_dims to convert to when only the kind matters: x's own where they make sense for `kind`."""
    if issubclass(kind, LinfTensor) or issubclass(kind, RMSToRMSTensor) or isinstance(x, RMSToRMSTensor):
        return (
            kind._canonical(kind.default_elem_dims(x.ndim), x.ndim) if x.ndim >= 2 or not issubclass(kind, RMSToRMSTensor) else ()
        )
    return x.elem_dims


def convert(x: NormedTensor, kind: type[NormedTensor], elem_dims: ed.Dims | None = None) -> NormedTensor:
    """x as a `kind` over `elem_dims`: same backing, norm_size and perturbation_size multiplied by `factor`; what is known of entries stays.

    Raises:
        NormMismatchError: there is no sound conversion.
    """
    dims = natural_dims(x, kind) if elem_dims is None else kind._canonical(elem_dims, x.ndim)
    if type(x) is kind and x.elem_dims == dims:
        return x
    c = factor(x, kind, dims)
    if c is None:
        raise NormMismatchError(
            f"no conversion from {type(x).__name__} over dims {x.elem_dims} to {kind.__name__} over dims {dims}"
        )
    size = x.norm_size if c == 1 else x.norm_size * c
    perturbation = x.perturbation_size if c == 1 or x.perturbation_size is None else x.perturbation_size * c
    out = kind._wrap(x.backing, size, perturbation, dims)
    out._range, out._facts = x._range, facts_of_entries(x._facts)
    out._spread, out._is_of_parameters = x._spread, x._is_of_parameters
    out._inside = x._inside if c == 1 or x._inside is None else x._inside * c
    out._away = None if x._away is None else convert(x._away, kind, dims)
    return out
