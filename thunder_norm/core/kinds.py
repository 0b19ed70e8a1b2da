"""The kinds of normed tensors: which norm, over which dimensions by default, and how a tensor's is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.measuring import operator_norm, takes_any_precision, takes_complex
from thunder_norm.core.nonfinite import has_values
from thunder_norm.core.running import runner
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor, is_complex
from thunder_norm.errors import NormMismatchError
from thunder_norm.scalars import largest, square_root, times

_BLOCK = 2**18  # entries that are measured at once


class RMSTensor(NormedTensor):
    """Root mean square over `elem_dims`, maximum over the rest: ``sqrt(mean(t ** 2))``.

    Over the last dimension of an embedding table it is the l1-to-RMS operator norm, the largest row RMS.
    Arguments and errors are those of `NormedTensor`.
    """

    @classmethod
    @takes_complex
    def measure(cls, t: torch.Tensor, elem_dims: ed.Dims) -> torch.Tensor:
        def largest_mean(t: torch.Tensor) -> torch.Tensor:
            squares = _moduli(t).to(NORM_DTYPE).square()  # the square of a number of t's own dtype may be beyond it
            # a trace has the mean as sum and quotient, whose last bit differs
            return largest(squares.sum(elem_dims) / ed.numel(t.shape, elem_dims) if elem_dims else squares)

        return _root_of_largest(largest_mean, t, elem_dims)


class LinfTensor(RMSTensor):
    """Largest absolute entry: RMS over no dimension, maximum over all.  `elem_dims` is always ``()``.

    Arguments and errors are those of `NormedTensor`.
    """

    @classmethod
    def default_elem_dims(cls, ndim: int) -> ed.Dims:
        return ()

    @classmethod
    def _canonical(cls, dims: ed.Dims, ndim: int) -> ed.Dims:
        ed.canonical(dims, ndim)  # refuses dimensions that do not exist
        return ()

    @classmethod
    @takes_complex
    def measure(cls, t: torch.Tensor, elem_dims: ed.Dims) -> torch.Tensor:
        return largest(t.abs())


class L2Tensor(NormedTensor):
    """Euclidean length over `elem_dims`, maximum over the rest: ``sqrt(sum(t ** 2))``.

    Arguments and errors are those of `NormedTensor`.
    """

    @classmethod
    @takes_complex
    def measure(cls, t: torch.Tensor, elem_dims: ed.Dims) -> torch.Tensor:
        def largest_sum(t: torch.Tensor) -> torch.Tensor:
            squares = _moduli(t).to(NORM_DTYPE).square()  # as for RMSTensor
            return largest(squares.sum(elem_dims) if elem_dims else squares)

        return _root_of_largest(largest_sum, t, elem_dims)


class L1Tensor(NormedTensor):
    """Sum of absolute entries over `elem_dims`, maximum over the rest: ``sum(|t|)``.

    Arguments and errors are those of `NormedTensor`.
    """

    @classmethod
    @takes_complex
    def measure(cls, t: torch.Tensor, elem_dims: ed.Dims) -> torch.Tensor:
        return largest(t.abs().sum(elem_dims) if elem_dims else t.abs())


class RMSToRMSTensor(NormedTensor):
    """Operator norm of a matrix from RMS to RMS: ``sigma_max(W) * sqrt(in / out)``, maximum over the other dimensions.

    `elem_dims` is the *ordered* pair (output dimension, input dimension), (-2, -1) by default: transposing a matrix swaps the
    pair, and the operator it stands for stays the same.  Other arguments and errors are those of `NormedTensor`.
    """

    @classmethod
    def default_elem_dims(cls, ndim: int) -> ed.Dims:
        return (-2, -1)

    @classmethod
    def _canonical(cls, dims: ed.Dims, ndim: int) -> ed.Dims:
        if len(dims) != 2:
            raise NormMismatchError(f"{cls.__name__} needs elem_dims (output dim, input dim), got {dims}")
        return ed.canonical_ordered(dims, ndim)

    @property
    def out_features(self) -> int:
        """Size of the output dimension."""
        return self.shape[self.elem_dims[0]]

    @property
    def in_features(self) -> int:
        """Size of the input dimension."""
        return self.shape[self.elem_dims[1]]

    @classmethod
    @takes_complex
    @takes_any_precision
    def measure(cls, t: torch.Tensor, elem_dims: ed.Dims) -> torch.Tensor:
        stretch = runner().run_real(operator_norm, (t, elem_dims), {})
        return times(stretch, math.sqrt(t.shape[elem_dims[1]] / t.shape[elem_dims[0]]))


class RMSToRMSConvTensor(RMSToRMSTensor):
    """Norm of a convolution kernel [out, in, *taps] from RMS over channels to RMS over channels, maximum over positions.

    ``K * max_k sigma_max(W_k) * sqrt(in / out)`` with K the number of taps.
    For a grouped convolution each group is an operator of its own, [out / groups, in / groups], and the maximum runs over
    groups too: construct with `RMSToRMSConvTensor.grouped(groups)`.  Arguments and errors are those of `NormedTensor`; `elem_dims`
    are (-4, -3) for images, output and input channels.
    """

    groups: ClassVar[int] = 1
    _by_groups: ClassVar[dict[int, type[RMSToRMSConvTensor]]] = {}

    @classmethod
    def grouped(cls, groups: int) -> type[RMSToRMSConvTensor]:
        """The kind for kernels of a convolution with that many groups."""
        if groups == 1:
            return RMSToRMSConvTensor
        if groups not in cls._by_groups:
            name = f"RMSToRMSConvTensor_groups{groups}"
            body = {"groups": groups, "__doc__": cls.__doc__, "__module__": __name__}
            cls._by_groups[groups] = type(name, (RMSToRMSConvTensor,), body)
        return cls._by_groups[groups]

    @classmethod
    def default_elem_dims(cls, ndim: int) -> ed.Dims:
        return (-ndim, 1 - ndim)

    @property
    def taps(self) -> int:
        """Number of kernel positions K."""
        return math.prod(self.shape) // (self.out_features * self.in_features)

    @classmethod
    @takes_complex
    @takes_any_precision
    def measure(cls, t: torch.Tensor, elem_dims: ed.Dims) -> torch.Tensor:
        out_features, in_features = (t.shape[d] for d in elem_dims)
        if out_features % cls.groups:
            raise NormMismatchError(f"a kernel for {out_features} channels is not one of {cls.groups} groups")
        taps = t.numel() // (out_features * in_features)
        stretch = runner().run_real(operator_norm, (t, elem_dims, cls.groups), {})
        return times(stretch, taps * math.sqrt(in_features * cls.groups / out_features))


# Below, the square of an entry has lost digits.
LEAST_SQUARE = 1e-290


def _root_of_largest(of: Callable[[torch.Tensor], torch.Tensor], t: torch.Tensor, elem_dims: ed.Dims) -> torch.Tensor:
    """The root of the largest of what slices of `t` have, a sum of squares; of `t` over its largest entry where squares are no floats."""
    square = _in_parts(of, t, elem_dims)
    is_double = t.dtype in (torch.float64, torch.complex128)
    if is_double and t.numel() and has_values(square) and not LEAST_SQUARE < square.item() < math.inf:
        scale = t.detach().abs().amax()
        if 0 < scale.item() < math.inf:
            return square_root(_in_parts(of, t / scale, elem_dims)) * scale
    return square_root(square)


def _in_parts(of: Callable[[torch.Tensor], torch.Tensor], t: torch.Tensor, elem_dims: ed.Dims) -> torch.Tensor:
    """The largest of what slices of `t` have.

    An embedding table in float64 would be written to memory and read again twice, a few rows of it stay in the processor's cache.
    """
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.numel() <= _BLOCK:
        return of(t)  # in a trace too
    if -t.ndim in elem_dims or (t.requires_grad and torch.is_grad_enabled()):
        return of(t)
    return torch.stack([of(rows) for rows in t.split(max(1, _BLOCK * len(t) // t.numel()))]).amax()


def _moduli(t: torch.Tensor) -> torch.Tensor:
    """Real numbers of the same size: the moduli of complex ones."""
    return t.abs() if is_complex(t) else t


def __getattr__(name: str) -> Any:
    """The kinds of grouped kernels by name: pickles, in which classes are names, come from processes that had made them."""
    prefix, _, groups = name.partition("_groups")
    if prefix == RMSToRMSConvTensor.__name__ and groups.isdecimal():
        return RMSToRMSConvTensor.grouped(int(groups))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
