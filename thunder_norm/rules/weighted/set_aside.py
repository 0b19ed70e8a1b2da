"""What is set aside (minus infinity), and largest entries, on the way to an exponential.

    d = torch.where(mask, b[:, None] - b[None], -inf) + gate
    m = torch.maximum(before, d.max(-1).values)[..., None]
    torch.exp(d - m)

The norm of what is set aside says nothing of the other entries: a sum remembers what it was before (`Masked`, `Lowered`), and what changes places
too.  A number that no entry exceeds (`Bounding`) stays one where it grows, and where a dimension is put in that it was the largest over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from thunder_norm.core.context import run_real, values_of
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules import _again
from thunder_norm.rules._facts import Alternatives, Lowered, Raised, Source, every_fact, fact, ruled
from thunder_norm.rules._set_aside import of_any_strides, run_on_values
from thunder_norm.rules._shared import argument
from thunder_norm.rules.known_ranges.partial_sums import place_put_in
from thunder_norm.rules.weighted import largest_of_groups
from thunder_norm.rules.written_out.dual_variables import laid_out
from thunder_norm.rules.written_out.written_out_exponentials import Beneath, Bounding


def _masked(x: Any) -> Lowered | Raised | None:
    return fact(x, Lowered) or fact(x, Raised)


def _made(
    op: Callable,
    method: Callable,
    found: Lowered | Raised,
    args: tuple,
    kwargs: dict[str, Any],
    mask: torch.Tensor,
    out: NormedTensor,
) -> Any:
    """The facts about a result, and what an operation makes of the entries that were not set aside: at the data, of their values."""
    claim = ruled(op, args, kwargs)
    if claim is None or not issubclass(type(claim[0]), RMSTensor):
        return out._facts
    result, moved = claim
    backing = (
        run_real(of_any_strides(method), (found.x.backing, *other_arguments(op, args)), kwargs) if is_local(out) else out.backing
    )
    source = Source(type(result), backing, result.norm_size, moved, result.elem_dims)
    return Alternatives((*every_fact(out), type(found)(source, mask)))


# -- largest entries ------------------------------------------------------------------------------------------------------


def _larger(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """The larger of two: no entry of either exceeds it, nor what was no larger than one of them."""
    pair = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    given = [x for x in pair if isinstance(x, RMSTensor) and x.shape == out.shape]
    known = [replace(f, is_log_sum=False) for x in given for f in every_fact(x) if isinstance(f, Bounding)]
    return Alternatives((*every_fact(out), *known, *(Bounding(Source.of(x), (), False) for x in given)))


normed_op(torch.maximum).register_fact(_larger)


def _larger_of_two(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """``torch.max(a, b)`` is the larger of two as well."""
    return _larger(args, kwargs, out) if isinstance(argument(args, kwargs, 1, "other"), torch.Tensor) else out._facts


normed_op(torch.max).register_fact(_larger_of_two)


def _cut_off(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """``relu(x)`` and ``x.clamp(min=c)`` are no less than x, entry by entry."""
    x = argument(args, kwargs, 0, "input", "self")
    least, most = argument(args, kwargs, 1, "min"), argument(args, kwargs, 2, "max")
    if not isinstance(x, RMSTensor) or x.shape != out.shape or most is not None or isinstance(least, NormedTensor):
        return out._facts
    return Alternatives((*every_fact(out), Bounding(Source.of(x), (), False)))


for _op in (torch.relu, torch.clamp, torch.clamp_min):
    normed_op(_op).register_fact(_cut_off)


def _smaller(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """The smaller of two is no larger than either."""
    pair = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    given = [x for x in pair if isinstance(x, RMSTensor) and x.shape == out.shape]
    return Alternatives((*every_fact(out), *(Beneath(Source.of(x)) for x in given)))


normed_op(torch.minimum).register_fact(_smaller)


def _put_in(op: Callable, args: tuple, ndim: int) -> int | None:
    """Where an operation puts in a dimension of size 1, if it does nothing else: a negative number."""
    at = args[1] if len(args) == 2 else None
    if op is torch.unsqueeze:
        return None if not isinstance(at, int) else at - ndim if at >= 0 else at
    return place_put_in(at, ndim) if op is torch.Tensor.__getitem__ else None


def moved(op: Callable, method: Callable, args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """What is known of a tensor whose entries changed places, or of largest entries in their old places."""
    out._facts = _moved(op, method, args, kwargs, out)
    return laid_out(method, args, kwargs, out)


def other_arguments(op: Callable, args: tuple) -> tuple:
    """The arguments after the first: a squeeze of all dimensions says None by not being given."""
    return () if op is torch.squeeze and args[1:] == (None,) else args[1:]


def _laid_out_alike(
    op: Callable, method: Callable, found: Bounding, args: tuple, kwargs: dict[str, Any], out: NormedTensor
) -> Bounding | None:
    """Of numbers that no entry exceeds, entry by entry: where both are moved alike, as the program moves them, they do so still."""
    x = found.x.moving()
    if found.dims or found.is_reduced or x.shape != args[0].shape or not issubclass(found.x.kind, RMSTensor):
        return None
    claim = ruled(op, (x, *args[1:]), kwargs)
    if claim is None or not isinstance(claim[0], RMSTensor):
        return None
    backing = run_real(of_any_strides(method), (found.x.backing, *other_arguments(op, args)), kwargs)
    there = type(claim[0])._wrap(backing, claim[0].norm_size, claim[1], claim[0].elem_dims)
    _again.note(op)((x, *args[1:]), kwargs, there)
    return replace(found, x=Source.of(there))


def _moved(op: Callable, method: Callable, args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    masked = _masked(args[0]) if args else None
    is_indexed = op is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor)
    if is_indexed:
        out._facts = largest_of_groups.chosen(args[0], 0, args[1], out)
    if masked is not None:
        mask, real = masked.mask, values_of(masked.mask)
        run = run_real
        if not isinstance(real, FakeTensor) and not real.is_meta and not any(isinstance(a, torch.Tensor) for a in args[1:]):
            mask, run = real, run_on_values  # which the trace of a program need not have
        mask = run(torch.Tensor.expand, (mask, args[0].shape), {})
        if op not in (torch.Tensor.to, torch.Tensor.float, torch.Tensor.double, torch.clone, torch.Tensor.contiguous):
            mask = run(of_any_strides(method), (mask, *other_arguments(op, args)), kwargs)
        return _made(op, method, masked, (masked.x.moving(), *args[1:]), kwargs, mask, out)
    if is_indexed:
        return out._facts
    found = [f for f in every_fact(args[0]) if isinstance(f, Bounding)] if args else []
    if not found:
        return out._facts
    laid_out_alike = (_laid_out_alike(op, method, f, args, kwargs, out) for f in found)
    out._facts = Alternatives((*every_fact(out), *(f for f in laid_out_alike if f is not None)))
    if out.ndim != args[0].ndim + 1:
        return out._facts
    place = _put_in(op, args, out.ndim)
    restored = [replace(f, is_reduced=False) for f in found if f.is_reduced and f.dims == (place,)]
    return Alternatives((*every_fact(out), *restored))
