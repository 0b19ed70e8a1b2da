"""Claims about the data at hand: inside ``norm_sensitivity("local")`` a rule gets tensors with the norms their entries have.

Inside ``norm_sensitivity("within")`` they are about all that is within a distance of it, each tensor's perturbation_size.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_norm.context_variables import setting
from thunder_norm.core.context import current_mode, current_sensitivity
from thunder_norm.core.kinds import L1Tensor, L2Tensor, RMSTensor
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor
from thunder_norm.trees import flat_tensors, map_tensors


@dataclass(frozen=True, eq=False)
class _State:
    """What the norm at the data was found from."""

    norm_size: torch.Tensor
    perturbation_size: torch.Tensor | None
    backing: torch.Tensor
    version: int | None
    facts: Any

    def is_same(self, other: _State) -> bool:
        return self.version == other.version and all(
            getattr(self, name) is getattr(other, name) for name in ("norm_size", "perturbation_size", "backing", "facts")
        )


# Of an operator the norm is a singular value: parameters are measured once, and nothing else often is one.
_MEASURED = (RMSTensor, L1Tensor, L2Tensor)


def is_local(*inputs: NormedTensor) -> bool:
    """Whether claims are to hold at the data alone, and there is some; bounds, so in mode "bound" only."""
    return (
        current_sensitivity() == "local"
        and current_mode() == "bound"
        and all(x.backing.device.type != "meta" and x.backing.numel() > 0 for x in inputs)
    )


def are_local(arguments: Mapping[str, Any]) -> bool:
    """Whether claims are to hold at the data alone, and all normed arguments have some: there the derivative says more than a range."""
    normed = [x for x in flat_tensors(list(arguments.values())) if isinstance(x, NormedTensor)]
    return bool(normed) and is_local(*normed)


def is_within() -> bool:
    """Whether claims are to hold for inputs within their perturbation_size of the data."""
    return current_sensitivity() == "within"


# Whether "within" is about what moves away from the data itself, not between any two points near it.
_from_data: contextvars.ContextVar[bool] = contextvars.ContextVar("thunder_norm_from_data", default=False)


def from_data() -> contextlib.AbstractContextManager[None]:
    """Claims inside "within" are about movements away from the data, as of a certified radius."""
    return setting(_from_data, True)


def is_from_data() -> bool:
    """Whether claims are about movements away from the data alone."""
    return is_within() and _from_data.get()


def away(x: NormedTensor) -> NormedTensor:
    """x as it moves away from the data alone, inside "within": how far, is less than any two points near it are apart by their constant."""
    return x if x._away is None else x._away


def distances(*inputs: NormedTensor) -> tuple[float, ...] | None:
    """How far from the data at hand, each in its own norm, claims are to hold; None if they are to for all tensors of a norm.

    At the data itself (`is_local`) it is 0, to first order; inside "within" the perturbation_size, with what rounding does to
    entries: a thousand units in the last place.  There a tensor that does not move stands for all of its norm, but for
    constants of the program, which are what they are.
    """
    if is_local(*inputs):
        return (0.0,) * len(inputs)
    if not is_within():
        return None
    found = tuple(_distance(away(x)) for x in inputs)
    return None if any(d is None for d in found) else tuple(d for d in found if d is not None)


def _distance(x: NormedTensor) -> float | None:
    if x._is_constant and x.perturbation_size is None:
        return 0.0
    if x.perturbation_size is None or not isinstance(x, _MEASURED) or x.backing.device.type == "meta" or not x.backing.numel():
        return None
    moved = (
        x.perturbation_size.item()
        + 1000 * torch.finfo(x.backing.dtype).eps * type(x).measure(x.backing.detach(), x.elem_dims).item()
    )
    return moved * (1 + 1e-9) if math.isfinite(moved) else None


def at_data(tree: Any) -> Any:
    """The same structure where every NormedTensor has the norm of its entries, if that is smaller: of x twice the same tensor."""
    if current_sensitivity() != "local":
        return tree
    return map_tensors(lambda x: _at_data(x) if isinstance(x, _MEASURED) and x.backing is not None else x, tree)


def _at_data(x: NormedTensor) -> NormedTensor:
    if not is_local(x):
        return x
    now = _State(x.norm_size, x.perturbation_size, x.backing, None if x.backing.is_inference() else x.backing._version, x._facts)
    if x._at_data is None or not x._at_data[0].is_same(now):
        out = type(x)._wrap(x.backing, _size(x), x.perturbation_size, x.elem_dims)
        out._facts, out._range, out._aliases, out._sums, out._inside = x._facts, x._range, x._aliases, x._sums, x._inside
        out._jump = x._jump
        out._at_data = replace(now, norm_size=out.norm_size, perturbation_size=out.perturbation_size), None
        x._at_data = now, out
    found = x._at_data[1]
    return x if found is None else found


def _size(x: NormedTensor) -> torch.Tensor:
    return scaled_to(x.norm_size, type(x).measure(x.backing.detach(), x.elem_dims).detach().to(NORM_DTYPE))


def scaled_to(n: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """n m / n with a constant m, where that is smaller than n: its derivatives are those of n, as if the data grew with it."""
    is_scaled = ~(m >= n) & ~n.isinf() & (n != 0)  # a NaN stays one
    ratio = torch.where(is_scaled, m / torch.where(is_scaled, n.detach(), torch.ones_like(m)), torch.ones_like(m))
    return torch.where(n.isinf(), m, n * ratio)
