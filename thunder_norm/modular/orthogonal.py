"""Matrices with all singular values moved to 1, by matrix products and one inverse, by products alone, or exactly.

A step is ``x <- P x`` with a function P of the Gram matrix ``G = x x^T`` (of tall x, ``x <- x P`` of ``x^T x``): polynomials
``a + b G + c G^2``, Newton-Schulz steps, or ``b / c + (a - b / c) (1 + c G)^-1``, a step of QDWH.  All of these matrices are functions
of the first Gram matrix, so they commute: the Gram matrix after a step is ``P^2 G``, and the steps together are one matrix
``Q = P_n ... P_1``.  For x [m, n] with m much smaller than n it is cheaper to find Q by products [m, m], and Q x at the end.  A Gram
matrix has the squares of singular values; those of the smallest that count, 0.004 of the Frobenius norm, stand well above its rounding in
float32, and drown where products of float32 are rounded to fewer bits: then, and of few rows, all steps are taken on x itself.

In bfloat16 on a CPU the number of steps follows from the matrix: its first Gram matrix says more of the largest singular value than the Frobenius
norm of x does, and where it is at most 1 / 1.6 of that, four polynomials do for five.

A CPU inverts ``1 + c G`` of more than a few rows in the time of about two products in float32, and that stands for three of five polynomials.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Literal, NamedTuple, get_args

import torch
from torch._C._functorch import is_functorch_wrapped_tensor  # type: ignore[import]
from torch.autograd import forward_ad
from torch.autograd.forward_ad import unpack_dual

from thunder_norm.core.tensors import describe
from thunder_norm.errors import NormMismatchError

Method = Literal["newton_schulz", "newton_schulz_bf16", "svd"]


class _Polynomial(NamedTuple):
    """``a x + b x^3 + c x^5 + d x^7`` of singular values x."""

    a: float
    b: float
    c: float = 0.0
    d: float = 0.0

    @property
    def constant(self) -> float:
        """What of P is a multiple of 1."""
        return self.a

    def of_multiples(self, times: float) -> _Polynomial:
        """The polynomial of `times` singular values x."""
        return _Polynomial(self.a * times, self.b * times**3, self.c * times**5, self.d * times**7)

    def rest(self, gram: torch.Tensor, is_exact: bool = False) -> torch.Tensor:
        """What of P is not: ``b G + c G^2 + d G^3``."""
        if not self.d:
            return _symmetric(gram, gram, gram, self.b, self.c, is_exact) if self.c else gram * self.b
        return _symmetric(gram, _symmetric(gram, gram, gram, self.c, self.d, is_exact), gram, self.b, 1.0, is_exact)

    @property
    def products(self) -> int:
        """Of Gram matrices, that `rest` takes."""
        return bool(self.c) + bool(self.d)


class _Rational(NamedTuple):
    """``x (a + b x^2) / (1 + c x^2)`` of singular values x."""

    a: float
    b: float
    c: float

    @property
    def constant(self) -> float:
        """What of P is a multiple of 1."""
        return self.b / self.c

    def rest(self, gram: torch.Tensor, is_exact: bool = False) -> torch.Tensor:
        """What of P is not, ``(a - b / c) (1 + c G)^-1``: of a condition of at most 1 + c, symmetric to the last bit."""
        shifted = gram * self.c
        shifted.diagonal(dim1=-2, dim2=-1).add_(1)
        factor, _ = torch.linalg.cholesky_ex(shifted)
        if is_transformed(gram):  # forward mode of cholesky_inverse is wrong (docs/upstream.md)
            inverse = torch.cholesky_solve(torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device), factor)
        else:
            inverse = torch.cholesky_inverse(factor)
        return inverse * (self.a - self.b / self.c)

    @property
    def products(self) -> int:
        """Of Gram matrices, that `rest` takes."""
        return 0


# Steps for singular values in (0, 1]: each is the best uniform approximation of 1, of its degree, on what the step before makes of [0.004, 1], so
# that all together are the best of their degrees (Amsel, Persson, Musco and Gower, The Polar Express, 2025, arXiv 2505.16932, theorem 3.1).
# All but the last take what is 1.02 times as large, as there: beyond these intervals they grow fast, and rounding to bfloat16 leads there.
# The last is scaled to exceed 0.9995 nowhere.  Above 0.004 they end within 0.46 % of 1.
_QUINTICS = (
    _Polynomial(8.17743203, -23.1786491, 16.5051551),
    _Polynomial(3.90622537, -2.80049387, 0.512282929),
    _Polynomial(3.29209962, -2.37874867, 0.46763014),
    _Polynomial(2.30846941, -1.62969428, 0.391071522),
    _Polynomial(1.90558185, -1.29680374, 0.388660776),
)
# Four of [0.016, 1], above which they end within 0.54 % of 1, for 1.6 times matrices none of whose singular values exceed 1 / 1.6.
_ALIKE = 1.6
_FOUR_QUINTICS = (
    _Polynomial(7.70550363, -21.3898732, 15.1382308).of_multiples(_ALIKE),
    _Polynomial(3.31646594, -2.39594735, 0.469439089),
    _Polynomial(2.33151172, -1.64907957, 0.392963806),
    _Polynomial(1.90800438, -1.2998896, 0.388941704),
)
# Four of which one has degree 7, of [0.0115, 1], above which they end within 0.53 % of 1, for 1.15 times matrices none of whose singular values
# exceed 1 / 1.15: 13 products for the 15 of five quintics.
_NOT_ALONE = 1.15
_WITH_SEPTIC = (
    _Polynomial(7.87614913, -22.036256, 15.6320329).of_multiples(_NOT_ALONE),
    _Polynomial(4.52422957, -6.27647, 2.96123861, -0.423728747),
    _Polynomial(2.32969242, -1.64754569, 0.392809708),
    _Polynomial(1.90781016, -1.29964235, 0.388920371),
)
# The same with a first step of QDWH (Nakatsukasa, Bai and Gygi 2010, equation 3.12, of l = 0.004), of which 1 is the maximum and what [0.004, 1] becomes is [0.3845, 1];
# a quintic; a cubic, flat at 1.  Above 0.004 they end within 0.57 % of 1.
_WITH_INVERSE = (
    _Rational(100.01973438529728, 2451.2269494337065, 2550.246683819004),
    _Polynomial(3.06110679, -4.52317847, 2.52094874),
    _Polynomial(1.49838456, -0.498885055),
)
_Steps = tuple[_Polynomial | _Rational, ...]

_LARGE_IN_BFLOAT16 = 2**16  # entries of a matrix whose products take so long that the calls do not matter
_FEW = 64  # rows up to which calls take longer than the products that are saved, and in which what a step makes small would drown
_SMALL = 128  # rows up to which a batch is faster than one matrix after another, on a CPU too
_LARGE = 2**15  # entries of a matrix of which several leave a CPU's cache before they are multiplied again
# rows of a block that is worth a product of its own, on a CPU, where there are as many: of fewer the calls take longer than the products that are saved
_BLOCKS = {torch.bfloat16: (256, 2)}
_BLOCKS_OF_OTHERS = 64, 4
SAFE = 1e-14, 1e18  # norms whose squares float32 has; of entries 1e-5 times as large it has them, too
_NOTHING = contextlib.nullcontext()
_HAVE_SQUARES = 1e-8, 1e8  # Frobenius norms of matrices whose Gram matrices float32 has, and their squares


def orthogonalize(matrices: torch.Tensor, method: Method = "newton_schulz", size: float = 1.0) -> torch.Tensor:
    """The matrices [..., m, n] with all singular values (those that are 0 excepted) moved to `size`: ``U V^T`` of ``U S V^T``.

    Args:
        matrices: any number of them, real or complex; computed in float32 at least, returned in their own dtype.
        method: "newton_schulz": matrix products, on a CPU one inverse for most of them where there are more than 64 rows and columns; singular values come out up to 0.6 % too small,
            more if they were below 0.004 of the Frobenius norm (as "newton_schulz_bf16" where torch may round products of float32);
            differentiable.  "newton_schulz_bf16": the same with products in bfloat16, many times faster on
            devices with instructions for it (and slower on others); within 1 %, for those that were above 0.01 (on a CPU with as few products,
            12 to 15, as that takes, for all of a batch); complex matrices, which
            bfloat16 has none of, and on a CPU those of at most 64 rows or columns as "newton_schulz".  "svd": exact.
        size: the singular values of the result.

    Raises:
        NormMismatchError: an unknown method, or no matrices of floating-point numbers.
    """
    if method not in get_args(Method):
        raise NormMismatchError(f"method must be one of {', '.join(map(repr, get_args(Method)))}, got {method!r}")
    if not isinstance(matrices, torch.Tensor) or matrices.ndim < 2 or not (matrices.is_floating_point() or matrices.is_complex()):
        raise NormMismatchError(f"orthogonalize needs matrices [..., m, n] of floating-point numbers, got {describe(matrices)}")
    if not matrices.numel():
        return matrices.clone()
    with unrounded(matrices):
        return _orthogonalized(matrices, method, size)


def unrounded(t: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """No autocast, where a step is taken under it: it would round what is multiplied, of which small singular values make NaN."""
    if not torch._C._is_any_autocast_enabled() or not torch.amp.is_autocast_available(t.device.type):
        return _NOTHING
    return torch.autocast(t.device.type, enabled=False)


def _orthogonalized(matrices: torch.Tensor, method: Method, size: float) -> torch.Tensor:
    x = at_least_float32(matrices)
    if method == "svd":
        return (_polar(scaled(x, (-2, -1))) * size).to(matrices.dtype)
    is_turned = x.stride(-2) == 1  # by rows in memory, and so is the result
    x = x.mT if is_turned else x
    shape, x = x.shape, x.flatten(0, -3) if x.ndim > 3 else x
    if x.ndim > 2 and goes_alone(x, method):
        x = torch.stack([_moved(one, method, size) for one in x])
    else:
        x = _moved(x, method, size)
    x = x.view(shape) if x.ndim < len(shape) else x
    return in_dtype(x.mT if is_turned else x, matrices.dtype)


def goes_alone(matrices: torch.Tensor, method: Method = "newton_schulz") -> bool:
    """Whether matrices are orthogonalized one by one: on a CPU, unless they are small, a batch is no faster, and must be copied."""
    m, n = matrices.shape[-2:]
    if matrices.device.type != "cpu":
        return False
    if method == "newton_schulz_bf16" and _is_faster_in_bfloat16(matrices):
        return m * n > _LARGE_IN_BFLOAT16
    return min(m, n) > _SMALL or m * n >= _LARGE


def _moved(x: torch.Tensor, method: Method, size: float) -> torch.Tensor:
    """A matrix, or a batch of them, by products."""
    has_derivatives = (torch.is_grad_enabled() and x.requires_grad) or is_transformed(x)
    is_read = x.device.type == "cpu" and not has_derivatives  # numbers of it, while it is moved
    length = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) if is_read else None
    if length is None or not are_between(length, *_HAVE_SQUARES):
        x = scaled(x, (-2, -1))
        length = _length(x)
    if method == "newton_schulz_bf16" and _is_faster_in_bfloat16(x):
        return _as_often_as_needed(x, length, size) if is_read else _on_itself(x, length, _QUINTICS, size, torch.bfloat16)
    steps = _WITH_INVERSE if _has_fast_inverse(x) else _QUINTICS
    if has_derivatives or _is_on_itself(x, steps):
        return _on_itself(x, length, steps, size, x.dtype)
    return _on_gram(x, length, steps, size)


def is_transformed(x: torch.Tensor) -> bool:
    """Whether x is a function transform's, or has a tangent."""
    return is_functorch_wrapped_tensor(x) or (forward_ad._current_level >= 0 and unpack_dual(x).tangent is not None)


def scaled(t: torch.Tensor, dims: int | tuple[int, ...]) -> torch.Tensor:
    """`t` with largest entry 1 along dims (or all zero): squares neither overflow nor vanish."""
    largest = t.detach().abs().amax(dims, keepdim=True)
    return t / largest.masked_fill_(largest == 0, 1)


def are_between(t: torch.Tensor, low: float, high: float) -> bool:
    """Whether all entries are numbers from `low` to `high`: read once."""
    if t.numel() == 1:
        return low <= t.item() <= high
    smallest, largest = torch.aminmax(t)
    return low <= smallest.item() and largest.item() <= high  # of NaN both are NaN


def at_least_float32(t: torch.Tensor) -> torch.Tensor:
    """`t`, in float32 if its dtype is smaller."""
    return t.float() if t.dtype.itemsize < 4 else t


def in_dtype(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`t` in a dtype: without a call where it has that, as it mostly has."""
    return t if t.dtype == dtype else t.to(dtype)


def _is_faster_in_bfloat16(x: torch.Tensor) -> bool:
    """Whether bfloat16 can hold x and its products take less time, which they do not where they are small, on a CPU whose units know it too."""
    return not x.is_complex() and (x.device.type != "cpu" or min(x.shape[-2:]) > _FEW)


def _has_fast_inverse(x: torch.Tensor) -> bool:
    """Whether the inverse of a Gram matrix takes less time than the products that it stands for, and has the bits that it needs."""
    return x.device.type == "cpu" and min(x.shape[-2:]) > _FEW and not _is_rounded(x)


def _is_on_itself(x: torch.Tensor, steps: _Steps) -> bool:
    """Whether steps are taken on x itself: of few rows (or columns), where that has no more multiplications, and where a Gram matrix has not its bits."""
    m, n = sorted(x.shape[-2:])
    wide, of_grams = 2 * n / m, sum(step.products for step in steps)  # in units of m^3
    on_itself, on_gram = len(steps) * wide + of_grams, wide + of_grams + 3 * (len(steps) - 1)
    return m < _FEW or on_itself <= on_gram or _is_rounded(x)


def _is_rounded(x: torch.Tensor) -> bool:
    """Whether torch may round what products in float32 multiply, to TF32 or bfloat16."""
    backend = torch.backends.cuda.matmul if x.is_cuda else torch.backends.mkldnn.matmul
    return x.dtype in (torch.float32, torch.complex64) and backend.fp32_precision not in ("ieee", "none")


def _as_often_as_needed(x: torch.Tensor, length: torch.Tensor, size: float) -> torch.Tensor:
    """Steps on x itself in bfloat16, as few as it needs, and no derivatives.

    Scalars that products are multiplied by are always the same: kernels are made for them, and kept.
    """
    whole = x.dtype
    x = torch.mul(x, length.reciprocal(), out=torch.empty_like(x, dtype=torch.bfloat16))
    gram = _symmetric(*_of_gram(x))
    # at least the largest singular value, also of rounded products, squared; at most 1
    largest = torch.linalg.vector_norm(gram, dim=(-2, -1), dtype=torch.float32).max().item() * (1 + 2**-7)
    *before, last = _FOUR_QUINTICS if largest <= _ALIKE**-2 else _WITH_SEPTIC if largest <= _NOT_ALONE**-2 else _QUINTICS
    for step in before:
        p = step.rest(gram)
        p.diagonal(dim1=-2, dim2=-1).add_(step.constant)  # a product without a sum takes a quarter less
        x = _product(*_in_order(p, x))
        gram = _symmetric(*_of_gram(x))
    return _sum(x, *_in_order(last.rest(gram), x), beta=last.constant * size, alpha=size).to(whole)  # not rounded with what p has


def _on_itself(x: torch.Tensor, length: torch.Tensor, steps: _Steps, size: float, dtype: torch.dtype) -> torch.Tensor:
    """Each step on x; differentiable."""
    whole = x.dtype
    if steps is _QUINTICS:
        x = (x / length).to(dtype)
    else:
        gram, length = _scaled_gram(x, length, steps)
        p = steps[0].rest(gram)
        p.diagonal(dim1=-2, dim2=-1).add_(steps[0].constant)
        x, steps = _product(*_in_order(p / length, x)), steps[1:]
    is_tall, has_blocks = _is_tall(x), _has_blocks(x, min(x.shape[-2:]))
    product, add = (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)
    last = len(steps) - 1
    for k, step in enumerate(steps):
        times = size if k == last else 1.0
        left, right = (x.mH, x) if is_tall else (x, x.mH)
        if has_blocks or not isinstance(step, _Polynomial) or step.d:
            p = step.rest(_symmetric(left, right))
        else:  # the same without a look at each product: of small matrices that takes as long as these
            gram = product(left, right)
            p = add(gram, gram, gram, beta=step.b, alpha=step.c) if step.c else gram * step.b
        x = add(x, *((x, p) if is_tall else (p, x)), beta=step.constant * times, alpha=times)
    return in_dtype(x, whole)


def _on_gram(x: torch.Tensor, length: torch.Tensor, steps: _Steps, size: float) -> torch.Tensor:
    """The steps as one matrix of the Gram matrix alone, in the dtype of x; nobody wants derivatives."""
    gram, length = _scaled_gram(x, length, steps)
    q = None
    for k, step in enumerate(steps):
        p = step.rest(gram, is_exact=True)
        if k < len(steps) - 1:
            once = _sum(
                gram, p, gram, beta=step.constant, alpha=1.0
            )  # rounding of an inverse is no function of the Gram matrix, and commutes with none
            gram = _symmetric(once, p, once, step.constant, is_exact=True)
        q = p if q is None else _sum(q, p, q, beta=step.constant, alpha=1.0)
        if k == 0:
            q.diagonal(dim1=-2, dim2=-1).add_(step.constant)
    assert q is not None
    return _product(*_in_order(q.mul_(size).div_(length), x))


def _scaled_gram(x: torch.Tensor, length: torch.Tensor, steps: _Steps) -> tuple[torch.Tensor, torch.Tensor]:
    """The smaller Gram matrix of ``x / length``, and length, at least the largest singular value: the one given, 1 of zeros, else the Frobenius norm.

    Before an inverse it is the root of the Gram matrix' Frobenius norm, which is at most that, and much less where singular values are alike.
    """
    gram = _symmetric(*_of_gram(x), is_exact=True)
    square = length.square() if steps is _QUINTICS else _length(gram)
    return gram / square, square.sqrt()


def _of_gram(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the smaller Gram matrix is the product of."""
    return (x.mH, x) if _is_tall(x) else (x, x.mH)


def _in_order(p: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A polynomial of the smaller Gram matrix and x, on the side where it is multiplied."""
    return (x, p) if _is_tall(x) else (p, x)


def _is_tall(x: torch.Tensor) -> bool:
    return x.shape[-2] > x.shape[-1]


def _length(x: torch.Tensor) -> torch.Tensor:
    """The Frobenius norm of each matrix, 1 of zeros."""
    length = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return length.masked_fill(length == 0, 1)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, y) if x.ndim == 2 else torch.bmm(x, y)


def _sum(plus: torch.Tensor, x: torch.Tensor, y: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    """``alpha x y + beta plus``."""
    return (torch.addmm if x.ndim == 2 else torch.baddbmm)(plus, x, y, beta=beta, alpha=alpha)


def _symmetric(
    x: torch.Tensor,
    y: torch.Tensor,
    plus: torch.Tensor | None = None,
    beta: float = 0.0,
    alpha: float = 1.0,
    is_exact: bool = False,
) -> torch.Tensor:
    """``alpha x y + beta plus``, which is symmetric (Hermitian): on a CPU only blocks on and above the diagonal are multiplied.

    With `is_exact` then symmetric to the last bit: where products of products are multiplied, what is not grows.
    """
    m = x.shape[-2]
    if not _has_blocks(x, m):
        return _product(x, y) if plus is None else _sum(plus, x, y, beta, alpha)
    blocks = m // _BLOCKS.get(x.dtype, _BLOCKS_OF_OTHERS)[0]
    found = x.new_empty(m, m) if plus is None else plus.clone()
    edges = [round(m * i / blocks) for i in range(blocks + 1)]
    for start, end in zip(edges, edges[1:], strict=False):
        found[start:end, start:].addmm_(x[start:end], y[:, start:], beta=beta, alpha=alpha)
        if end < m:
            found[end:, start:end].copy_(found[start:end, end:].mH)
        if is_exact:
            on_diagonal = found[start:end, start:end]
            on_diagonal.copy_((on_diagonal + on_diagonal.mH) / 2)
    return found


def _has_blocks(x: torch.Tensor, m: int) -> bool:
    """Whether a symmetric product [m, m] of tensors such as x is taken by blocks."""
    rows, least = _BLOCKS.get(x.dtype, _BLOCKS_OF_OTHERS)
    is_whole = x.device.type != "cpu" or x.ndim > 2 or x.requires_grad or (x.dtype == torch.bfloat16 and _has_tiles())
    return m // rows >= least and not is_whole


@functools.cache
def _has_tiles() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 (Intel's AMX), so fast that blocks take longer to copy than they save."""
    return torch.cpu._is_amx_tile_supported()


def _polar(x: torch.Tensor) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    # below it a singular value is rounding: its vectors are arbitrary
    threshold = s[..., :1] * max(x.shape[-2:]) * torch.finfo(x.dtype).eps
    return (u * (s > threshold).to(x.dtype).unsqueeze(-2)) @ vh
