"""The norms of many parameters with their sizes in one tensor, which a norm map reads at once and differentiates at once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor, _for_autograd, describe
from thunder_norm.errors import NormMismatchError
from thunder_norm.norms.sizes import Sizes


class NormVector(Mapping[str, Any]):
    """A ``normed_state_dict`` whose sizes are the entries of one tensor.

    Of a dict a norm map reads each 0-dim size, and autograd visits each in the backward pass; of a vector both happen once,
    whatever the number of parameters.  It is a mapping too, and may stand wherever such a dict may.

    >>> norms = NormVector({"0.weight": RMSToRMSTensor(2.0), "0.bias": RMSTensor(0.5)}, requires_grad=True)
    >>> norm_map(x, normed_state_dict=norms).norm_size.backward()
    >>> norms.norm_sizes.grad  # one entry for each name, in order

    Args:
        norms: parameter or buffer name -> NormedTensor, or a bare size (a number or a 0-dim tensor), as in a normed_state_dict.  The
            vector is computed from sizes that require grad, and is a tensor of its own otherwise.
        requires_grad: make `norm_sizes` a leaf that requires grad.

    Raises:
        NormMismatchError: no mapping, a value that cannot be a norm, only some norms have a perturbation_size, sizes are on several devices, or
            requires_grad is asked for where a size requires grad already.
    """

    def __init__(self, norms: Mapping[str, Any], *, requires_grad: bool = False):
        if not isinstance(norms, Mapping):
            raise NormMismatchError(f"a NormVector is made of a mapping from names to norms, got {describe(norms)}")
        self._positions = {name: i for i, name in enumerate(norms)}
        given = Sizes(norms.values())
        # of a bare size nothing is known but that
        self._likes = [(type(v), v.backing, v.elem_dims) if isinstance(v, NormedTensor) else None for v in norms.values()]
        self._signatures: dict[Any, tuple] = {}
        self._norm_sizes = _stacked(given.norm_sizes, "norm_size")
        perturbations = [d for d in given.perturbation_sizes if d is not None]
        if 0 < len(perturbations) < len(self):
            missing = [name for name, d in zip(norms, given.perturbation_sizes, strict=True) if d is None]
            raise NormMismatchError(
                f"a NormVector has perturbation sizes for all of its norms or for none, not for {missing[0]!r}"
            )
        self._perturbation_sizes = _stacked(perturbations, "perturbation_size") if perturbations else None
        if requires_grad:
            if self._norm_sizes.requires_grad:
                raise NormMismatchError("requires_grad is for norms that do not require grad; these do already")
            self._norm_sizes.requires_grad_()

    @property
    def norm_sizes(self) -> torch.Tensor:
        """The bounds, a float64 tensor of shape [n], in the order of the names."""
        return self._norm_sizes

    @property
    def perturbation_sizes(self) -> torch.Tensor | None:
        """How far each parameter may move, in the same order; None where nothing is said about it."""
        return self._perturbation_sizes

    def with_sizes(self, norm_sizes: torch.Tensor, perturbation_sizes: torch.Tensor | None = None) -> NormVector:
        """Norms of the same names and kinds whose sizes are these, for instance those computed from other parameters.

        Args:
            norm_sizes: a floating tensor of shape [n], differentiable; stored as float64.
            perturbation_sizes: the same, or None for norms that have none.

        Raises:
            NormMismatchError: they are no such tensors.
        """
        if perturbation_sizes is not None and None in self._likes:
            raise NormMismatchError("bare sizes have no perturbation sizes")
        new = copy.copy(self)
        new._norm_sizes = self._as_vector(norm_sizes, "norm_sizes")
        new._perturbation_sizes = (
            None if perturbation_sizes is None else self._as_vector(perturbation_sizes, "perturbation_sizes")
        )
        new._signatures = {}
        return new

    def _as_vector(self, given: Any, name: str) -> torch.Tensor:
        is_tensor = isinstance(given, torch.Tensor) and not isinstance(given, NormedTensor)
        if not is_tensor or given.shape != (len(self),) or not given.is_floating_point():
            raise NormMismatchError(f"{name} must be a floating tensor of shape [{len(self)}], got {describe(given)}")
        return _for_autograd(given if given.dtype is NORM_DTYPE else given.to(NORM_DTYPE))

    # -- as a mapping -------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        i = self._positions[name]
        return self._normed(i, self._norm_sizes[i], None if self._perturbation_sizes is None else self._perturbation_sizes[i])

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def _normed(self, i: int, norm_size: torch.Tensor, perturbation_size: torch.Tensor | None) -> Any:
        if perturbation_size is not None:
            perturbation_size._is_entry = True
        if self._likes[i] is None:
            return norm_size
        kind, backing, elem_dims = self._likes[i]
        return kind._wrap(backing, norm_size, perturbation_size, elem_dims)

    @property
    def signature(self) -> tuple:
        """What a program relies on about these norms: that of a dict of them."""
        key = tuple([(v.requires_grad, v.device) for v in self.vectors])
        if key not in self._signatures:
            with torch.inference_mode(False), torch.enable_grad():  # where views require grad as their base does
                self._signatures[key] = Sizes(self.values()).signature
        return self._signatures[key]

    @property
    def vectors(self) -> list[torch.Tensor]:
        """The tensors that sizes are entries of."""
        return [v for v in (self._norm_sizes, self._perturbation_sizes) if v is not None]

    def __repr__(self) -> str:
        return f"NormVector({', '.join(self)}; norm_sizes={self._norm_sizes})"


class VectorSizes(Sizes):
    """The sizes in a `NormVector`, which are taken apart only where somebody asks for each.

    Raises:
        NormMismatchError: an entry is negative, or there are not as many as names.
    """

    entries: list[float] | None

    def __init__(self, norms: NormVector):
        self.vectors = norms.vectors
        self.entries = None  # of all vectors, where they can be read
        if all([type(v) in _PLAIN and v.is_cpu for v in self.vectors]):
            self.entries = []
            for v in self.vectors:
                read = v.tolist()
                _check_entries(norms, read)
                self.entries += read
        self.signature = norms.signature
        self._num_names = len(norms)

    @functools.cached_property
    def norm_sizes(self) -> list[torch.Tensor]:
        """One 0-dim tensor for each name."""
        return list(self.vectors[0].unbind())

    @functools.cached_property
    def perturbation_sizes(self) -> list[torch.Tensor | None]:
        """The same, None for each where there are none."""
        return list(self.vectors[1].unbind()) if len(self.vectors) > 1 else [None] * self._num_names


def _check_entries(norms: NormVector, entries: list[float]) -> None:
    if len(entries) != len(norms):
        raise NormMismatchError(f"a NormVector of {len(norms)} names has {len(entries)} sizes: its tensor was resized")
    if min(0.0, *entries) < 0:  # NaN is none of them, wherever it stands: the comparison starts with a number
        name, size = next((name, size) for name, size in zip(norms, entries, strict=True) if size < 0)
        raise NormMismatchError(f"sizes of norms must be >= 0, got {size} for {name!r}")


def is_entry(perturbation_size: torch.Tensor) -> bool:
    """Whether it is an entry of a `NormVector` that was asked for by name: what a norm map returns depends on the vector alone."""
    return getattr(perturbation_size, "_is_entry", False)


def sizes_of(norms: Mapping[str, Any]) -> Sizes:
    """The sizes in a normed_state_dict."""
    return VectorSizes(norms) if isinstance(norms, NormVector) else Sizes(norms.values())


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _stacked(sizes: list[torch.Tensor], what: str) -> torch.Tensor:
    if len({t.device for t in sizes}) > 1:
        raise NormMismatchError(f"a NormVector has each {what} on one device, got {sorted({str(t.device) for t in sizes})}")
    with torch.inference_mode(False):  # it is for any context
        return torch.stack(sizes) if sizes else torch.zeros(0, dtype=NORM_DTYPE)
