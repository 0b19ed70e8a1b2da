"""Polynomials of a matrix written out: Newton and Schulz's steps towards an orthogonal matrix, and others like them.

    A = X @ X.mT
    X = a * X + (b * A + c * A @ A) @ X

Product by product such a step multiplies norms, and five of them are beyond floats.  But each term is a product of X and X^T by turns, and
what their sum does to a singular value s of X is ``p(s) = a s + b s^3 + c s^5``: its largest modulus up to the largest singular value bounds
the result, and the largest slope how far it moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from thunder_norm.core.context import current_environment, current_mode
from thunder_norm.core.conversions import factor
from thunder_norm.core.kinds import RMSTensor, RMSToRMSTensor
from thunder_norm.core.nonfinite import spoiled
from thunder_norm.core.ranges import OfEntries
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.rules._facts import Alternatives, Source, every_fact, ruled
from thunder_norm.rules._shared import argument, rms
from thunder_norm.scalars import times

_LONGEST = 9  # of the products that are followed
_MATRIX = (-2, -1)
Coefficients = dict[int, float]  # by exponent


@dataclass(frozen=True, eq=False)
class Products(OfEntries):
    """A fact: a sum of products of X and X^T by turns, ``sum_k c_k X X^T X ...`` of k factors, or with X^T first.

    Attributes:
        source: X.
        writes: how often its memory had been written into.
        turned: whether X^T comes first.
        coefficients: c_k by k, which are all even or all odd.
    """

    source: Source
    writes: int
    turned: bool
    coefficients: Coefficients

    def is_of_same(self, other: Products) -> bool:
        """Whether both are of one X, whatever the norms that it was taken in."""
        is_one = self.source.backing is other.source.backing
        return self.writes == other.writes and (is_one or self.source.is_same(other.source))

    @property
    def ends_turned(self) -> bool:
        """Whether X^T comes last."""
        return self.turned ^ (next(iter(self.coefficients)) % 2 == 0)


@dataclass(frozen=True, eq=False)
class Spectral(OfEntries):
    """A fact: no singular value is larger."""

    size: torch.Tensor


def _is_matrix(x: Any) -> bool:
    return isinstance(x, RMSTensor | RMSToRMSTensor) and x.ndim >= 2 and min(x.shape[-2:]) > 1 and not is_complex(x)


def _known(x: Any) -> list[Products]:
    """A matrix as itself, and what is known of it."""
    if not _is_matrix(x):
        return []
    return [
        Products(Source.of(x), current_environment().writes_into(x.backing), False, {1: 1.0}),
        *(f for f in every_fact(x) if isinstance(f, Products)),
    ]


def _with(out: NormedTensor, found: Iterator[Any] | list[Any]) -> Any:
    more = tuple(found)
    return Alternatives((*every_fact(out), *more)) if more else out._facts


# -- which results are such sums ----------------------------------------------------------------------------------------------


def _transposed(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    x = argument(args, kwargs, 0, "input", "self")
    dims = [argument(args, kwargs, i, name, default=d) for i, name, d in ((1, "dim0", -2), (2, "dim1", -1))]
    if not _is_matrix(x) or {d % x.ndim - x.ndim for d in dims} != set(_MATRIX):
        return out._facts
    found = [replace(f, turned=not f.ends_turned) for f in _known(x)]
    return _with(out, [*found, *(f for f in every_fact(x) if isinstance(f, Spectral))])


def _of_a_matrix(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    return _transposed(args[:1], {}, out) if args and args[0].ndim == 2 else out._facts


for _op in (torch.transpose, torch.adjoint, *(getattr(torch.Tensor, name).__get__ for name in ("mT", "mH"))):
    normed_op(_op).register_fact(_transposed)
for _op in (torch.t, *(getattr(torch.Tensor, name).__get__ for name in ("T",))):
    normed_op(_op).register_fact(_of_a_matrix)


def _product(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other", "mat2")
    found = (_joined(f, g) for f in _known(a) for g in _known(b) if f.ends_turned != g.turned and f.is_of_same(g))
    return _with(out, (f for f in found if max(f.coefficients) <= _LONGEST))


def _joined(a: Products, b: Products) -> Products:
    found: Coefficients = {}
    for k, c in a.coefficients.items():
        for n, d in b.coefficients.items():
            found[k + n] = found.get(k + n, 0.0) + c * d
    return replace(a, coefficients=found)


for _op in (torch.matmul, torch.mm, torch.bmm):
    normed_op(_op).register_fact(_product)


def _multiple(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    x, c = (a, b) if isinstance(a, NormedTensor) else (b, a)
    return _with(out, [_times(f, c) for f in _known(x)]) if isinstance(c, int | float) and math.isfinite(c) else out._facts


def _share(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    x, c = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    is_number = isinstance(c, int | float) and c != 0 and kwargs.get("rounding_mode") is None
    return _with(out, [_times(f, 1 / c) for f in _known(x)]) if is_number else out._facts


def _times(f: Products, c: float) -> Products:
    return replace(f, coefficients={k: d * c for k, d in f.coefficients.items()})


normed_op(torch.mul).register_fact(_multiple)
normed_op(torch.div).register_fact(_share)


def _sums(args: tuple, kwargs: Mapping[str, Any], sign: int) -> Iterator[Products]:
    """What a sum or a difference is, where both are sums of products of one matrix."""
    a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    alpha = argument(args, kwargs, 2, "alpha", default=1)
    if not isinstance(alpha, int | float) or not _is_matrix(a) or not _is_matrix(b) or a.shape != b.shape:
        return
    for f in _known(a):
        for g in _known(b):
            is_alike = f.turned == g.turned and f.ends_turned == g.ends_turned and f.is_of_same(g)
            if is_alike and (added := _added(f, g, sign * alpha)).coefficients:
                yield added


def _added(a: Products, b: Products, c: float) -> Products:
    lengths = sorted({*a.coefficients, *b.coefficients})
    found = {k: a.coefficients.get(k, 0.0) + c * b.coefficients.get(k, 0.0) for k in lengths}
    return replace(a, coefficients={k: d for k, d in found.items() if d})


# -- their norms --------------------------------------------------------------------------------------------------------------


def _largest(p: Coefficients, s: torch.Tensor) -> torch.Tensor:
    """The largest modulus of a polynomial between 0 and s: at s, at 0, or where it is level before s."""
    dense = [p.get(k, 0.0) for k in range(max(p) + 1)]
    value = torch.zeros_like(s)
    for c in reversed(dense):
        value = value * s + c
    most = torch.where(value == value, value.abs(), math.inf).clamp(min=abs(dense[0]))
    slopes = [k * c for k, c in enumerate(dense)][1:]
    for root in numpy.roots(slopes[::-1]):
        if abs(root.imag) < 1e-9 * abs(root) and root.real > 0:
            level = abs(numpy.polyval(dense[::-1], root.real)) * (1 + 1e-9)
            most = torch.maximum(most, torch.where(s >= root.real * (1 - 1e-9), level, 0.0))
    return most


def _shifted(p: Coefficients) -> Coefficients:
    return {k - 1: c for k, c in p.items()}


def _slopes(p: Coefficients) -> Coefficients:
    return {k - 1: k * c for k, c in p.items()}


def _bounds(f: Products) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The largest singular value of a sum of products, its Frobenius norm, and how far it moves in that.

    Source: with the symmetric matrix ``H = [[0, X], [X^T, 0]]``, p(H) is made of p(X) and its transpose where p is odd, and of the even
    polynomials of X X^T and X^T X where it is even.  A function of symmetric matrices moves by its largest slope in the Frobenius norm, in
    which H moves by sqrt 2 times as much as X.
    """
    x, p = f.source.tensor(), f.coefficients
    rows, columns = x.shape[-2:]
    c = factor(x, RMSTensor, _MATRIX)
    assert c is not None, "both kinds have entries"
    over = c * math.sqrt(rows * columns)
    whole = times(x.norm_size, over)
    known = [t.size for t in f.source.facts if isinstance(t, Spectral)]
    if isinstance(x, RMSToRMSTensor) and getattr(x, "groups", 1) == 1 and x.elem_dims == _MATRIX:
        known.append(x.norm_size * math.sqrt(rows / columns))
    s = whole
    for size in known:
        s = torch.minimum(s, size)
    largest = _largest(p, s)
    size = torch.minimum(largest * math.sqrt(min(rows, columns)), whole * _largest(_shifted(p), s))
    moved = f.source.perturbation_size
    if moved is not None:
        is_even = next(iter(p)) % 2 == 0
        moved = times(moved, over) * _largest(_slopes(p), s) * (math.sqrt(2) if is_even else 1)
    return largest, size, moved


def _polynomial(args: Mapping[str, Any], sign: int) -> Products | None:
    """The shortest of what is known that has several terms."""
    if current_mode() == "modula":
        return None
    given = args["input"], args["other"]
    found = [
        f for f in _sums(given, {"alpha": args["alpha"]}, sign) if len(f.coefficients) > 1 and max(f.coefficients) <= _LONGEST
    ]
    return min(found, key=lambda f: max(f.coefficients), default=None)


def _summed(op: Callable, f: Products, input: Any, other: Any, alpha: Any) -> NormedTensor:
    found = ruled(op, (input, other), {"alpha": alpha})
    largest, size, moved = _bounds(f)
    shape = input.shape[-2:]
    n = size / math.sqrt(math.prod(shape))
    moved = None if moved is None else moved / math.sqrt(math.prod(shape))
    if found is not None and isinstance(found[0], RMSTensor) and set(found[0].elem_dims) <= set(_MATRIX):
        n = torch.minimum(n, found[0].norm_size)
        moved = torch.minimum(moved, found[1]) if moved is not None and found[1] is not None else moved
    out = type(rms(n, _MATRIX))._wrap(None, spoiled(n, f.source.norm_size), moved, _MATRIX)  # type: ignore[arg-type]
    out._sensitivity = {"input": 0, "other": 0}
    out._facts = Alternatives((Spectral(largest), f))
    return out


@normed_op(torch.add).register_norm(when=lambda args: _polynomial(args, 1) is not None)
def add(input: NormedTensor, other: NormedTensor, *, alpha: Any = 1) -> NormedTensor:
    """A polynomial p of a matrix X that moves by d in the Frobenius norm.

    Value:       ``sqrt(rank) max |p(s)|`` over singular values s up to X's largest, or ``max |p(s) / s|`` times X's own norm
    Sensitivity: ``max |p'(s)| d``
    Source:      `_bounds`
    Gap:         all singular values need not be those at which p is largest or steepest
    """
    f = _polynomial({"input": input, "other": other, "alpha": alpha}, 1)
    assert f is not None, "the rule's condition has been checked"
    return _summed(torch.add, f, input, other, alpha)


@normed_op(torch.sub).register_norm(when=lambda args: _polynomial(args, -1) is not None)
def sub(input: NormedTensor, other: NormedTensor, *, alpha: Any = 1) -> NormedTensor:
    """The same of a difference.

    Gap:         all singular values need not be those at which p is largest or steepest
    """
    f = _polynomial({"input": input, "other": other, "alpha": alpha}, -1)
    assert f is not None, "the rule's condition has been checked"
    return _summed(torch.sub, f, input, other, alpha)
