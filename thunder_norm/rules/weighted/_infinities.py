"""Which entries of a tensor are infinite, and what is known of the others: what the rules of the log domain share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Masked, MaskedAbove, Source, every_fact, fact, values_known

Infinities = Masked | MaskedAbove
KINDS: tuple[tuple[type[Infinities], float], ...] = ((Masked, -math.inf), (MaskedAbove, math.inf))


def is_of_all_inputs(x: Any) -> bool:
    """Whether it has a norm, and what is remembered is to hold for all tensors of it."""
    return isinstance(x, NormedTensor) and not is_local(x)


def parts(
    x: torch.Tensor, kind: type[Infinities], infinity: float, beside: torch.Tensor
) -> tuple[NormedTensor, torch.Tensor | None] | None:
    """The entries of x that are not `infinity`, as they were or as 0, and where it is (None: nowhere); None if that is not known.

    The norm of a constant is made as a number beside another norm, which a trace has.
    """
    if isinstance(x, NormedTensor):
        found = None if is_local(x) else fact(x, kind)
        return (x, None) if found is None else (found.x.moving(), found.mask)
    values = values_known(x)
    if values is None or values.is_complex():
        return None
    with _disable_current_modes():
        mask = values == infinity
        rest = values.masked_fill(mask, 0.0) if values.is_floating_point() else values.double()
        largest, is_set = float(rest.abs().amax()) if rest.numel() else 0.0, bool(mask.any())
    size = bounded(largest, torch.zeros_like(beside))
    return LinfTensor._wrap(rest, size, None, ()), mask if is_set else None


def stated(
    kind: type[Infinities], claim: tuple[NormedTensor, torch.Tensor | None], mask: torch.Tensor, out: NormedTensor
) -> Infinities | None:
    of, moved = claim
    if not isinstance(of, RMSTensor):
        return None
    return kind(Source(type(of), out.backing, of.norm_size, moved, of.elem_dims), mask)


def with_known(out: NormedTensor, found: list[Any]) -> Any:
    known = [f for f in found if f is not None]
    return Alternatives((*every_fact(out), *known)) if known else out._facts
