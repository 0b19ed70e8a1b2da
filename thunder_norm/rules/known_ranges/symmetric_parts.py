"""Matrices that stay away from singular ones by how they are made: ``I + A - A^T``, ``X X^T + c I``, kernels with noise on the diagonal.

    torch.linalg.solve(eye + a - a.T, eye - a + a.T)
    torch.linalg.inv(x.T @ x + 0.1 * eye)

A norm does not keep a matrix from being singular, but ``x^T A x >= c |x|^2`` does, c > 0: then ``|A x| >= c |x|``, also where A is not
symmetric.  Such numbers add up, and are multiplied with what a matrix is multiplied with: between which of them ``x^T A x / |x|^2`` stays goes along
with the range of A's entries (`Range.rayleigh`).  Of ``A - A^T`` it is 0, of ``X X^T`` not negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor  # type: ignore[import]
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core.context import current_environment
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._shared import argument
from thunder_norm.rules.known_ranges.ranges import Known, Of

Rule = Callable[[tuple, Mapping[str, Any], Of], Known]

_MOST_ROWS = 256  # of a constant whose eigenvalues are looked at
_NOT_NEGATIVE = Range(0.0, math.inf)


def _beside(op: Callable, rule: Callable[[tuple, Mapping[str, Any], Of], tuple[Range, bool] | None]) -> None:
    """What is known of the matrices that an operation makes, and whether they are symmetric, beside the range of their entries."""
    known = normed_op(op)
    of_entries = known.range_rule or (lambda args, kwargs, of: None)

    def both(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
        entries, found = of_entries(args, kwargs, of), rule(args, kwargs, of)
        return entries if found is None else replace(entries or Range(), rayleigh=found[0], is_symmetric=found[1])

    known.register_range(both)


def _square(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim >= 2 and x.shape[-1] == x.shape[-2]


def _backing(x: torch.Tensor) -> torch.Tensor:
    return x.backing if isinstance(x, NormedTensor) else x


def _are_transposed(a: Any, b: Any) -> bool:
    """Whether two matrices are each other's transpose, because they are views of the same numbers."""
    if not all(isinstance(x, torch.Tensor) and x.ndim >= 2 for x in (a, b)) or isinstance(a, NormedTensor) != isinstance(
        b, NormedTensor
    ):
        return False
    s, t = _backing(a), _backing(b)
    if not all(x.layout is torch.strided and not is_functorch_wrapped_tensor(x) for x in (s, t)):
        return False
    is_one_memory = s.untyped_storage()._cdata == t.untyped_storage()._cdata and s.storage_offset() == t.storage_offset()
    same = s.dtype == t.dtype and s.is_conj() == t.is_conj() and s.is_neg() == t.is_neg()
    return bool(is_one_memory and same and s.mT.shape == t.shape and s.mT.stride() == t.stride())


def _of_matrix(x: Any, of: Of) -> tuple[Range, bool] | None:
    """What is known of a matrix, by what made it or, of a constant, by its values."""
    if not _square(x):
        return None
    found = of(x)
    if found is not None and found.rayleigh is not None:
        return found.rayleigh, found.is_symmetric
    environment = current_environment()
    if isinstance(x, NormedTensor) or not x.is_floating_point() or x.shape[-1] > _MOST_ROWS or not environment.is_constant(x):
        return None
    values = environment.values_of(x)
    if type(values) not in (torch.Tensor, torch.nn.Parameter) or values.is_meta or not values.numel():
        return None
    with _disable_current_modes(), torch.no_grad():
        a = values.double()
        if not a.isfinite().all():
            return None
        eigenvalues = torch.linalg.eigvalsh((a + a.mT) / 2)
        return Range(float(eigenvalues.min()), float(eigenvalues.max())), torch.equal(a, a.mT)


def _pair(args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    return argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other", "mat2")


def _is_known(x: Any, of: Of) -> bool:
    return _square(x) and (found := of(x)) is not None and found.rayleigh is not None


def _sum(sign: float) -> Callable[[tuple, Mapping[str, Any], Of], tuple[Range, bool] | None]:
    def rule(args: tuple, kwargs: Mapping[str, Any], of: Of) -> tuple[Range, bool] | None:
        a, b = _pair(args, kwargs)
        alpha = argument(args, kwargs, 2, "alpha", default=1)
        if not (_square(a) and _square(b) and a.shape[-1] == b.shape[-1]) or not isinstance(alpha, int | float):
            return None
        if sign * alpha == -1 and _are_transposed(a, b):
            return Range(0.0, 0.0), False
        if not _is_known(a, of) and not _is_known(b, of):
            return None
        first, second = _of_matrix(a, of), _of_matrix(b, of)
        if first is None or second is None:
            return None
        return first[0].plus(second[0].scaled(sign * alpha)), first[1] and second[1]

    return rule


def _of_number(x: Any, of: Of) -> Range | None:
    """Between which numbers one is that all entries of a matrix are multiplied with: one in all, or one for each matrix."""
    if isinstance(x, torch.Tensor) and tuple(x.shape[-2:]) not in ((), (1,), (1, 1)):
        return None
    return of(x)


def _product(args: tuple, kwargs: Mapping[str, Any], of: Of) -> tuple[Range, bool] | None:
    for a, c in (_pair(args, kwargs), _pair(args, kwargs)[::-1]):
        number = _of_number(c, of) if _square(a) else None
        found = None if number is None else _of_matrix(a, of)
        if number is not None and found is not None:
            return found[0].times(number.of_entries()), found[1]
    return None


def _quotient(args: tuple, kwargs: Mapping[str, Any], of: Of) -> tuple[Range, bool] | None:
    a, c = _pair(args, kwargs)
    number = _of_number(c, of) if _is_known(a, of) and kwargs.get("rounding_mode") is None else None
    inverse = None if number is None else number.of_entries().inverse()
    found = None if inverse is None else _of_matrix(a, of)
    return None if inverse is None or found is None else (found[0].times(inverse), found[1])


def _negative(args: tuple, kwargs: Mapping[str, Any], of: Of) -> tuple[Range, bool] | None:
    a = argument(args, kwargs, 0, "input", "self")
    found = _of_matrix(a, of) if _is_known(a, of) else None
    return None if found is None else (found[0].negative(), found[1])


def _with_its_transpose(args: tuple, kwargs: Mapping[str, Any], of: Of) -> tuple[Range, bool] | None:
    """``X X^T``."""
    return (_NOT_NEGATIVE, True) if _are_transposed(*_pair(args, kwargs)) else None


def _by_rows(args: tuple, kwargs: Mapping[str, Any], of: Of) -> tuple[Range, bool] | None:
    """``X X^T``, as `linear` has it."""
    x, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
    return (_NOT_NEGATIVE, True) if x is weight and argument(args, kwargs, 2, "bias") is None else None


def _transposed(args: tuple, kwargs: Mapping[str, Any], of: Of) -> tuple[Range, bool] | None:
    """Of the transpose it is the same."""
    a = argument(args, kwargs, 0, "input", "self")
    places = {d % a.ndim for d in (*args[1:], *kwargs.values()) if isinstance(d, int)} if isinstance(a, torch.Tensor) else set()
    if not _is_known(a, of) or (places and places != {a.ndim - 1, a.ndim - 2}) or (not places and a.ndim > 2):
        return None
    return _of_matrix(a, of)


def _of_each(args: tuple, kwargs: Mapping[str, Any], of: Of) -> tuple[Range, bool] | None:
    """The same matrices, transposed."""
    a = argument(args, kwargs, 0, "input", "self")
    return _of_matrix(a, of) if _is_known(a, of) else None


def _on_diagonal(args: tuple, kwargs: Mapping[str, Any], of: Of) -> tuple[Range, bool] | None:
    """Of diagonal matrices it is what is there."""
    v = argument(args, kwargs, 0, "input", "self")
    found = of(v) if len(args) + len(kwargs) == 1 and isinstance(v, torch.Tensor) else None
    return None if found is None or found.is_known_by_norms_alone else (found.of_entries(), True)


def _of_vector(args: tuple, kwargs: Mapping[str, Any], of: Of) -> tuple[Range, bool] | None:
    """The same, of one matrix; of a matrix `diag` takes the diagonal."""
    return _on_diagonal(args, kwargs, of) if argument(args, kwargs, 0, "input", "self").ndim == 1 else None


_beside(torch.add, _sum(1.0))
_beside(torch.sub, _sum(-1.0))
_beside(torch.mul, _product)
_beside(torch.div, _quotient)
_beside(torch.neg, _negative)
for _op in (torch.matmul, torch.mm, torch.bmm):
    _beside(_op, _with_its_transpose)
_beside(F.linear, _by_rows)
for _op in (torch.transpose, torch.t, torch.Tensor.T):
    _beside(_op, _transposed)  # type: ignore[arg-type]
for _op in (torch.Tensor.mT, torch.adjoint):
    _beside(_op, _of_each)  # type: ignore[arg-type]
_beside(torch.diag, _of_vector)
_beside(torch.diag_embed, _on_diagonal)
