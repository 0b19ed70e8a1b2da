"""Matrices with all singular values moved to 1, by matrix products alone or exactly.

A step of Newton-Schulz is ``x <- P x`` with a polynomial ``P = a + b G + c G^2`` of the Gram matrix ``G = x x^T``.  All of these matrices
are polynomials of the first Gram matrix, so they commute: the Gram matrix after a step is ``P^2 G``, and the steps together are one
matrix ``Q = P_5 ... P_1``.  For x [m, n] with m much smaller than n it is cheaper to find Q by products [m, m], and Q x at the end.  A Gram
matrix has the squares of singular values, though, and in float32 those below 0.003 drown in its rounding: the first step, which
makes small ones 8 times as large, is taken on x itself.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from thunder_norm.errors import NormMismatchError

Method = Literal["newton_schulz", "newton_schulz_bf16", "svd"]

# Quintic steps a x + b x^3 + c x^5 for singular values in (0, 1]: each is the best uniform approximation of 1, of its degree, on what the
# step before makes of [0.004, 1], so that the five together are the best five (Amsel, Persson, Musco and Gower, The Polar Express, 2025,
# arXiv 2505.16932, theorem 3.1).  All but the last take what is 1.02 times as large, as there: beyond these intervals they grow fast, and rounding
# to bfloat16 leads there.  The last is scaled to exceed 0.9995 nowhere.  Above 0.004 they end within 0.46 % of 1.
_QUINTICS = (
    (8.17743203, -23.1786491, 16.5051551),
    (3.90622537, -2.80049387, 0.512282929),
    (3.29209962, -2.37874867, 0.46763014),
    (2.30846941, -1.62969428, 0.391071522),
    (1.90558185, -1.29680374, 0.388660776),
)

_LEAST = 1e-17  # no matrix that is not 0 has such a norm: its largest entry is 1
_FEW = 64  # rows whose singular values may be so large that the first step makes small ones of some, which drown in a Gram matrix
_SMALL = 128  # rows up to which a batch is faster than one matrix after another, on a CPU too
_LARGE = 2**15  # entries of a matrix of which several leave a CPU's cache before they are multiplied again
_BLOCK = 64  # rows of a block that is worth a product of its own, on a CPU, where there are
_BLOCKS = 4  # as many: of fewer the calls take longer than the products that are saved


def orthogonalize(matrices: torch.Tensor, method: Method = "newton_schulz", size: float = 1.0) -> torch.Tensor:
    """The matrices [..., m, n] with all singular values (those that are 0 excepted) moved to `size`: ``U V^T`` of ``U S V^T``.

    Args:
        matrices: any number of them, real or complex; computed in float32 at least, returned in their own dtype.
        method: "newton_schulz": matrix products alone; singular values come out up to 0.5 % too small, more if they were below 0.004 of
            the Frobenius norm; differentiable.  "newton_schulz_bf16": the same with products in bfloat16, many times faster on
            devices with instructions for it (and slower on others); within 1 %, for those that were above 0.01; complex matrices, which
            bfloat16 has none of, as "newton_schulz".  "svd": exact.
        size: the singular values of the result.

    Raises:
        NormMismatchError: an unknown method.
    """
    if method not in get_args(Method):
        raise NormMismatchError(f"method must be one of {', '.join(map(repr, get_args(Method)))}, got {method!r}")
    if not matrices.numel():
        return matrices.clone()
    x = scaled(at_least_float32(matrices), (-2, -1))
    if method == "svd":
        return (_polar(x) * size).to(matrices.dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mH if is_tall else x  # the Gram matrix is the smaller one
    shape, x = x.shape, x.flatten(0, -3) if x.ndim > 2 else x
    if method == "newton_schulz_bf16" and not x.is_complex():
        x = _on_itself(x, torch.bfloat16).to(x.dtype) * size
    elif torch.is_grad_enabled() and x.requires_grad:
        x = _on_itself(x, x.dtype) * size
    elif x.ndim > 2 and goes_alone(x):
        x = torch.stack([_by_products(one, size) for one in x])
    else:
        x = _by_products(x, size)
    x = x.view(shape)
    return (x.mH if is_tall else x).to(matrices.dtype)


def goes_alone(matrices: torch.Tensor) -> bool:
    """Whether matrices are orthogonalized one by one: on a CPU, unless they are small, a batch is no faster, and must be copied."""
    m, n = matrices.shape[-2:]
    return matrices.device.type == "cpu" and (min(m, n) > _SMALL or m * n >= _LARGE)


def scaled(t: torch.Tensor, dims: int | tuple[int, ...]) -> torch.Tensor:
    """`t` with largest entry 1 along dims (or all zero): squares neither overflow nor vanish."""
    d = t.detach()
    if d.is_complex():
        largest = d.abs().amax(dims, keepdim=True)
    else:
        largest = torch.maximum(d.amax(dims, keepdim=True), -d.amin(dims, keepdim=True))
    return t / largest.masked_fill_(largest == 0, 1)


def at_least_float32(t: torch.Tensor) -> torch.Tensor:
    """`t`, in float32 if its dtype is smaller."""
    return t.float() if t.dtype.itemsize < 4 else t


def _on_itself(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each on x itself, three products; wide matrices, differentiable."""
    x = (x / _positive(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True))).to(dtype)
    product_and_sum = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in _QUINTICS:
        gram = x @ x.mH
        x = product_and_sum(x, product_and_sum(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _by_products(x: torch.Tensor, size: float) -> torch.Tensor:
    """As few products as is safe, for wide matrices whose derivatives nobody wants."""
    on_x = _steps_on_x(*x.shape[-2:])
    for k in range(on_x):
        gram = _symmetric(x, x.mH)
        if k == 0:
            norm = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1).sqrt().clamp(min=_LEAST)[..., None, None]
            gram = gram.div_(norm).div_(norm)
            x = _polynomial(gram, k).div_(norm) @ x
        else:
            p = _polynomial(gram, k)
            x = (p.mul_(size) if k == len(_QUINTICS) - 1 else p) @ x
    if on_x == len(_QUINTICS):
        return x
    gram, q = _symmetric(x, x.mH), None
    for k in range(on_x, len(_QUINTICS)):
        p = _polynomial(gram, k)
        q = p if q is None else _symmetric(q, p)
        if k < len(_QUINTICS) - 1:
            gram = _symmetric(p, _symmetric(p, gram))
    return q.mul_(size) @ x


def _steps_on_x(m: int, n: int) -> int:
    """1 or all, whichever has fewer multiplications, in units of m^3; all of few rows."""
    steps = len(_QUINTICS)
    all_on_x = steps * (2 * n / m + 1)
    gram_alone = 4 * n / m + 4 * steps - 6
    return steps if m < _FEW or all_on_x <= gram_alone else 1


def _polynomial(gram: torch.Tensor, k: int) -> torch.Tensor:
    """The step's P from its Gram matrix."""
    a, b, c = _QUINTICS[k]
    p = _symmetric(gram, gram, gram, b, c)
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return p


def _symmetric(
    x: torch.Tensor, y: torch.Tensor, plus: torch.Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> torch.Tensor:
    """``alpha x y + beta plus``, which is symmetric (Hermitian): on a CPU only blocks on and above the diagonal are multiplied."""
    m = x.shape[-2]
    blocks = m // _BLOCK
    if blocks < _BLOCKS or x.device.type != "cpu" or x.ndim > 2:
        if plus is None:
            return torch.mm(x, y) if x.ndim == 2 else torch.bmm(x, y)
        return (torch.addmm if x.ndim == 2 else torch.baddbmm)(plus, x, y, beta=beta, alpha=alpha)
    found = x.new_empty(m, m) if plus is None else plus.clone()
    edges = [round(m * i / blocks) for i in range(blocks + 1)]
    for start, end in zip(edges, edges[1:], strict=False):
        found[start:end, start:].addmm_(x[start:end], y[:, start:], beta=beta, alpha=alpha)
        found[end:, start:end].copy_(found[start:end, end:].mH)
        on_diagonal = found[start:end, start:end]  # symmetric to the last bit: what is not grows in later products
        on_diagonal.copy_((on_diagonal + on_diagonal.mH) / 2)
    return found


def _polar(x: torch.Tensor) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    # below it a singular value is rounding: its vectors are arbitrary
    threshold = s[..., :1] * max(x.shape[-2:]) * torch.finfo(x.dtype).eps
    return (u * (s > threshold).to(x.dtype).unsqueeze(-2)) @ vh


def _positive(size: torch.Tensor) -> torch.Tensor:
    return torch.where(size > 0, size, torch.ones_like(size))
