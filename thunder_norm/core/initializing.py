"""Tensors of a norm that is given: what parameters start from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from thunder_norm.core.context import run_real
from thunder_norm.core.elem_dims import Dims
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, describe, unwatched
from thunder_norm.errors import NormMismatchError
from thunder_norm.numbered_generators import Numbered, numbered


def initialize(
    kind: type[NormedTensor],
    shape: int | Sequence[int],
    norm_size: float | torch.Tensor = 1.0,
    *,
    generator: torch.Generator | None = None,
    elem_dims: int | Iterable[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
) -> torch.Tensor:
    """A random tensor of norm exactly `norm_size`, up to rounding in its dtype: ``norm_size * U`` with a drawn U of norm 1.

    U is, in each kind (the same for every index of dimensions that its norm does not run over):

    - `RMSTensor`, `L2Tensor`, `L1Tensor`: a row of normal numbers divided by its norm, so uniform on the sphere of the first two;
    - `LinfTensor`: ones, which as gains or scales change nothing;
    - `RMSToRMSTensor` [out, in]: uniformly distributed semi-orthogonal matrices times ``sqrt(out / in)``: all singular values are equal;
    - `RMSToRMSConvTensor` [out, in, *taps]: such a matrix divided by the number of taps in every tap, for each group of channels.

    In normed mode, and of a NormedTensor as `norm_size`, the result is a NormedTensor of `kind` with that norm_size; it is
    differentiable in it there, as the plain result is.

    >>> w = initialize(RMSToRMSTensor, (3, 5), 2.0, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> (torch.linalg.svdvals(w) * (5 / 3) ** 0.5).tolist()  # doctest: +ELLIPSIS
    [2.0..., 2.0..., 2.0...]

    Args:
        kind: one of the six kinds, or a class derived from one (`RMSToRMSConvTensor.grouped(groups)`).
        shape: of the result.
        norm_size: a finite number >= 0, or a 0-dim floating tensor, whose absolute value the norm is then.
        generator: of the numbers, which are drawn on its device: without one on the CPU, so that they are the same for every `device`.
        elem_dims: the dimensions the norm runs over; the kind's default if None.
        dtype: of the result, a floating one; torch's default if None.
        device: of the result; torch's default if None.  On the meta device nothing is drawn.

    Raises:
        NormMismatchError: a kind with a norm of its own, elem_dims or groups that do not fit the shape, a norm_size that is no norm,
            or a dtype that is not a real floating one.
    """
    check_generator(generator)
    shape, dims = _checked(kind, shape, elem_dims)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise NormMismatchError(f"initialize needs a real floating dtype, got {dtype!r}")
    device = torch.get_default_device() if device is None else torch.device(device)
    _check_size(norm_size)
    drawn = unit(kind, shape, dims, generator, str(device))
    if isinstance(norm_size, NormedTensor) and not isinstance(drawn, NormedTensor):
        drawn = kind(1.0, backing=drawn, elem_dims=dims)
    return (drawn * norm_size).to(dtype)


@normed_op
def unit(kind: type[NormedTensor], shape: tuple[int, ...], elem_dims: Dims, generator: Any, device: str) -> torch.Tensor:
    """A random tensor of norm 1 in float64: see `initialize`."""
    return run_real(Drawing(kind, generator), (shape, elem_dims, device), {})


@dataclass(frozen=True)
class Drawing:
    """The function ``(shape, elem_dims, device) -> tensor`` that draws one; in a trace it is one operation.

    Attributes:
        kind: the kind in which the tensor has norm 1.
        generator: of the numbers.
    """

    kind: type[NormedTensor]
    generator: torch.Generator | None
    _numbered: Numbered = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.generator is not None:
            object.__setattr__(self, "_numbered", numbered(self.generator))

    tags = (torch.Tag.nondeterministic_seeded,)  # as torch's operations that draw numbers say it

    @property
    def __name__(self) -> str:
        """What the operation is called in traces, where each generator has a number."""
        if self.generator is None:
            return f"initialize_{self.kind.__name__}"
        return f"initialize_{self.kind.__name__}_from_generator_{self._numbered.number}"

    def __call__(self, shape: tuple[int, ...], elem_dims: Dims, device: str) -> torch.Tensor:
        """A tensor of norm 1, in float64."""
        if torch.device(device).type == "meta":
            return torch.empty(shape, dtype=torch.float64, device="meta")
        at = "cpu" if self.generator is None else self.generator.device
        with torch.no_grad(), unwatched():  # for those who watch calls it is one operation
            numbers = torch.randn(shape, generator=self.generator, dtype=torch.float64, device=at)
            return (_method(self.kind)(self.kind, numbers, elem_dims) if numbers.numel() else numbers).to(device)


def check_generator(generator: Any) -> None:
    """Refuse what is no generator; in a trace, also one that the program made.

    Raises:
        NormMismatchError: it is neither None nor a `torch.Generator`.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise NormMismatchError(f"generator must be a torch.Generator, got {describe(generator)}")


def _checked(kind: Any, shape: Any, elem_dims: Any) -> tuple[tuple[int, ...], Dims]:
    """The shape, and canonical elem_dims."""
    if not (isinstance(kind, type) and issubclass(kind, NormedTensor)) or _method(kind) is None:
        known = ", ".join(k.__name__ for k in _METHODS)
        given = kind.__name__ if isinstance(kind, type) else describe(kind)
        raise NormMismatchError(f"initialize draws tensors of {known} and of classes derived from them, got {given}")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape) if isinstance(shape, Sequence) else (None,)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes):
        raise NormMismatchError(f"a shape consists of integers >= 0, got {shape!r}")
    if elem_dims is None:
        elem_dims = kind.default_elem_dims(len(sizes))
    elif not isinstance(elem_dims, int | Iterable):
        raise NormMismatchError(f"elem_dims must be an int or several, got {elem_dims!r}")
    dims = kind._canonical((elem_dims,) if isinstance(elem_dims, int) else tuple(elem_dims), len(sizes))
    if issubclass(kind, RMSToRMSConvTensor) and sizes[dims[0]] % kind.groups:
        raise NormMismatchError(f"{sizes[dims[0]]} output channels cannot be in {kind.groups} groups of equal size")
    return sizes, dims


def _check_size(size: Any) -> None:
    if isinstance(size, torch.Tensor):
        if size.ndim or not size.is_floating_point():
            raise NormMismatchError(f"norm_size must be a 0-dim floating tensor or a number, got {describe(size)}")
    elif isinstance(size, bool) or not isinstance(size, Real) or not 0 <= float(size) < math.inf:
        raise NormMismatchError(f"norm_size must be a finite number >= 0 or a 0-dim floating tensor, got {size!r}")


def _rows(on_sphere: Callable[[torch.Tensor], torch.Tensor]) -> _Method:
    """Scaling rows, of which elem_dims are the last dimension."""

    def draw(kind: type[NormedTensor], numbers: torch.Tensor, dims: Dims) -> torch.Tensor:
        if not dims:
            return on_sphere(numbers.unsqueeze(-1)).squeeze(-1)
        last = tuple(range(-len(dims), 0))
        moved = numbers.movedim(dims, last)
        return on_sphere(moved.flatten(-len(dims))).reshape(moved.shape).movedim(last, dims)

    return draw


def _of_length(rows: torch.Tensor, length: float) -> torch.Tensor:
    rows = rows / rows.abs().amax(-1, keepdim=True)
    return rows * (length / torch.linalg.vector_norm(rows, dim=-1, keepdim=True))


def _operators(kind: type[NormedTensor], numbers: torch.Tensor, dims: Dims) -> torch.Tensor:
    """All singular values ``sqrt(out / in)``."""
    matrices = numbers.movedim(dims, (-2, -1))
    return (_semi_orthogonal(matrices) * math.sqrt(matrices.shape[-2] / matrices.shape[-1])).movedim((-2, -1), dims)


def _kernels(kind: type[RMSToRMSConvTensor], numbers: torch.Tensor, dims: Dims) -> torch.Tensor:
    """All singular values of each group in each tap ``sqrt(out / groups / in) / taps``."""
    per_tap = numbers.movedim(dims, (-2, -1))
    matrices = per_tap.unflatten(-2, (kind.groups, per_tap.shape[-2] // kind.groups))
    largest = math.sqrt(matrices.shape[-2] / matrices.shape[-1]) / math.prod(per_tap.shape[:-2])
    return (_semi_orthogonal(matrices) * largest).flatten(-3, -2).movedim((-2, -1), dims)


def _semi_orthogonal(gaussian: torch.Tensor) -> torch.Tensor:
    """Uniformly distributed semi-orthogonal matrices from Gaussian ones.

    Source: Mezzadri 2007, "How to generate random matrices from the classical compact groups".
    """
    is_wide = gaussian.shape[-2] < gaussian.shape[-1]
    q, r = torch.linalg.qr(gaussian.mT if is_wide else gaussian)
    signs = r.diagonal(dim1=-2, dim2=-1).sign()
    q = q * torch.where(signs == 0, torch.ones_like(signs), signs).unsqueeze(-2)
    return q.mT if is_wide else q


_Method = Callable[[Any, torch.Tensor, Dims], torch.Tensor]

_METHODS: dict[type[NormedTensor], _Method] = {
    RMSToRMSConvTensor: _kernels,  # subclasses before their base classes
    RMSToRMSTensor: _operators,
    LinfTensor: _rows(torch.ones_like),
    RMSTensor: _rows(lambda rows: _of_length(rows, math.sqrt(rows.shape[-1]))),
    L2Tensor: _rows(lambda rows: _of_length(rows, 1.0)),
    L1Tensor: _rows(lambda rows: rows / rows.abs().sum(-1, keepdim=True)),
}


def _method(kind: type[NormedTensor]) -> Any:
    """What draws tensors of a kind; None if its norm is one of its own."""
    return next((draw for known, draw in _METHODS.items() if issubclass(kind, known)), None)
