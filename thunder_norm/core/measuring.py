"""The operator norm of matrices in a tensor, as one operation: remembered, fast, and differentiable to any order.

For tensors coarser than float64 it is computed by `spectral`, once for each content (`remembered`).  Where the whole derivative is
asked for (of higher order, forward mode, `torch.func`), or somebody watches the operations of torch, it is torch's own norm, through
the singular value decomposition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from thunder_norm.core import spectral
from thunder_norm.core.remembered import Remembered

F = TypeVar("F", bound=Callable[..., Any])

_RESULT = torch.float64
_COARSE = frozenset({torch.float32, torch.float16, torch.bfloat16})
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LEAST = 4096  # numbers in a tensor: below that the decomposition takes no longer than all else


class _Measured(NamedTuple):
    """A largest singular value, the matrix that has it, and its singular vector on the smaller side (None: not known)."""

    value: float
    index: int
    vector: torch.Tensor | None


_measured: Remembered[_Measured] = Remembered()
_extremes: Remembered[tuple[_Measured, float]] = Remembered()


def takes_any_precision(measure: F) -> F:
    """Mark a kind's `measure` as one that takes tensors of half precision as they are; others get them as float32."""
    measure.takes_any_precision = True  # type: ignore[attr-defined]
    return measure


def takes_complex(measure: F) -> F:
    """Mark a kind's `measure` as one that takes complex tensors; of others they are refused."""
    measure.takes_complex = True  # type: ignore[attr-defined]
    return measure


def operator_norm(t: torch.Tensor, elem_dims: tuple[int, int], groups: int = 1) -> torch.Tensor:
    """Largest singular value of the matrices [out, in] over `elem_dims` in `t`: a 0-dim float64 tensor, the maximum over all.

    It is NaN or infinite if an entry is.  The derivative is ``u v^T`` for the singular vectors of the largest value.

    Args:
        t: a floating tensor, real or complex, not empty.
        elem_dims: the output and the input dimension.
        groups: into how many matrices, each with as many outputs, the output dimension is cut.
    """
    if t.layout is not torch.strided:
        t = t.to_dense()
    if _is_taken_apart(t):
        return _by_decomposition(t, elem_dims, groups)
    is_differentiated = t.requires_grad and torch.is_grad_enabled()
    if is_differentiated and t.dtype not in _COARSE:
        return _by_decomposition(t, elem_dims, groups)
    found = _look_up(t.detach(), elem_dims, groups)
    if found is None:
        return _by_decomposition(t, elem_dims, groups)
    if is_differentiated:
        return _OperatorNorm.apply(t, found, elem_dims, groups)
    return _as_tensor(found, t)


def _on_fakes(t: torch.Tensor, elem_dims: tuple[int, int], groups: int = 1) -> torch.Tensor:
    """A number that depends on `t`, and is one of the same kind, where there are no values."""
    return t.abs().amax().to(_RESULT)


operator_norm.on_fakes = _on_fakes  # type: ignore[attr-defined]


def _is_taken_apart(t: torch.Tensor) -> bool:
    """Whether there is more to a call than its result and first derivatives, or nothing to gain."""
    return (
        type(t) not in _PLAIN
        or t.device.type not in ("cpu", "cuda")
        or t.layout is not torch.strided
        or t.numel() < _LEAST
        or not (t.dtype in _COARSE or t.dtype is torch.float64)
        or _len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._functorch.is_functorch_wrapped_tensor(t)
        or torch.autograd.forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
    )


def _by_decomposition(t: torch.Tensor, elem_dims: tuple[int, int], groups: int) -> torch.Tensor:
    wide = t.float() if t.dtype.itemsize < 4 else t
    entry = wide.abs().amax()
    is_finite = entry < math.inf
    # no algorithm takes NaN or infinite entries: the norm is then theirs
    values = torch.linalg.matrix_norm(torch.where(is_finite, _matrices(wide, elem_dims, groups), 0.0), 2)
    return torch.where(is_finite, values.amax(), entry).to(_RESULT)


def _matrices(t: torch.Tensor, elem_dims: tuple[int, int], groups: int) -> torch.Tensor:
    """The matrices in `t` as the last two dimensions of a view."""
    last = t.movedim(elem_dims, (-2, -1))
    return last if groups == 1 else last.unflatten(-2, (groups, last.shape[-2] // groups))


def stacked(t: torch.Tensor, elem_dims: tuple[int, int], groups: int) -> torch.Tensor:
    """The matrices [out, in] in `t`, one after the other, as `operator_norm` takes them: three dimensions."""
    matrices = _matrices(t, elem_dims, groups)
    return matrices.reshape(-1, *matrices.shape[-2:])


def _look_up(t: torch.Tensor, elem_dims: tuple[int, int], groups: int) -> _Measured | None:
    """What is known of a detached tensor, measured now if it is not remembered; None if an entry is not finite."""

    def measure(before: _Measured | None) -> _Measured:
        if t.dtype is torch.float64:
            return _Measured(_by_decomposition(t, elem_dims, groups).item(), 0, None)
        start = None if before is None else before.vector
        return _Measured(*spectral.largest_singular_value(stacked(t, elem_dims, groups), start))

    # a mode that watches calls (`TorchFunctionMode`) sees one operation, not what it consists of
    unwatched = torch._C.DisableTorchFunction()
    with unwatched, torch.no_grad(), torch.autocast(t.device.type, enabled=False):
        return _measured.get(t, (elem_dims, groups), measure)


@torch.no_grad()
def extreme_singular_values(t: torch.Tensor, elem_dims: tuple[int, int], groups: int = 1) -> tuple[float, float] | None:
    """The largest and the smallest singular value of all matrices in a plain real tensor, not empty; None if an entry is not finite.

    The largest is remembered as `operator_norm` has it: whoever asks for that next has it at once.
    """

    def measure(before: tuple[_Measured, float] | None) -> tuple[_Measured, float]:
        matrices = stacked(t, elem_dims, groups)
        if t.dtype not in _COARSE:  # float64 and complex numbers
            values = torch.linalg.svdvals(matrices)
            return _Measured(values.amax().item(), 0, None), values.amin().item()
        top, largest, smallest = spectral.extreme_singular_values(matrices, None if before is None else before[0].vector)
        return _Measured(largest, 0, None) if top is None else _Measured(*top), smallest

    t, question = t.detach(), (elem_dims, groups)
    is_plain = not _is_taken_apart(t)
    with torch._C.DisableTorchFunction(), torch.autocast(t.device.type, enabled=False):
        found = _extremes.get(t, question, measure) if is_plain else None
        if found is not None:
            _measured.get(t, question, lambda _: found[0])
        elif not t.isfinite().all():
            return None
        else:  # entries so large that their sums are not finite are measured as others are, but not remembered
            found = measure(None)
    return found[0].value, min(found[1], found[0].value)


def _as_tensor(found: _Measured, t: torch.Tensor) -> torch.Tensor:
    return torch.full((), found.value, dtype=_RESULT, device=t.device)


class _OperatorNorm(torch.autograd.Function):
    """The norm that was measured, with its derivative in the tensor."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, found: _Measured, elem_dims: tuple[int, int], groups: int) -> torch.Tensor:
        ctx.save_for_backward(t)
        ctx.found, ctx.elem_dims, ctx.groups = found, elem_dims, groups
        return _as_tensor(found, t)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """From the singular vectors; through the decomposition where a graph is asked for, in which they depend on the tensor."""
        (t,) = ctx.saved_tensors
        is_zero = ctx.found.value == 0  # there no vectors are better than others: the decomposition says which
        if torch.is_grad_enabled() or is_zero:
            with torch.enable_grad():
                at = t if t.requires_grad else t.detach().requires_grad_()
                norm = _by_decomposition(at, ctx.elem_dims, ctx.groups)
            (found,) = torch.autograd.grad(norm, at, grad, create_graph=torch.is_grad_enabled())
            return found, None, None, None
        found = ctx.found
        if found.vector is None:  # whoever measured it asked for the value alone
            with torch._C.DisableTorchFunction(), torch.autocast(t.device.type, enabled=False):
                found = _Measured(*spectral.largest_singular_value(stacked(t, ctx.elem_dims, ctx.groups)))
        return (grad * _derivative(t, found, ctx.elem_dims, ctx.groups)).to(t.dtype), None, None, None


def _derivative(t: torch.Tensor, found: _Measured, elem_dims: tuple[int, int], groups: int) -> torch.Tensor:
    """``u v^T`` in the place of the matrix that has the largest singular value, zero elsewhere: float32."""
    result = torch.zeros(t.shape, dtype=torch.float32, device=t.device)
    matrix, place = _at(t, found.index, elem_dims, groups), _at(result, found.index, elem_dims, groups)
    if matrix.shape[0] > matrix.shape[1]:
        matrix, place = matrix.mT, place.mT
    other = spectral.other_vector(matrix, found.vector)
    place.copy_(torch.outer(found.vector.float(), (other / torch.linalg.vector_norm(other)).float()))
    return result


def _at(t: torch.Tensor, index: int, elem_dims: tuple[int, int], groups: int) -> torch.Tensor:
    """A view of the matrix of that number."""
    matrices = _matrices(t, elem_dims, groups)
    position: list[int] = []
    for size in reversed(matrices.shape[:-2]):
        index, i = divmod(index, size)
        position.insert(0, i)
    return matrices[tuple(position)]
