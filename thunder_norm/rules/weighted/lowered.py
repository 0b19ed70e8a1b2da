"""Entries that numbers of one sign stand below: where a mask times such a number is added, or none is put in the place of nothing.

tokens - 1e9 * is_padding[..., None].float()
exp(u - u.square().sum(-1, keepdim=True) / 2 - u.amax(-1, keepdim=True))
F.relu(torch.full((nodes, width), -1e9).scatter_reduce(0, index, messages, "amax"))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from thunder_norm.core.context import current_environment, run_real, values_of
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.known_ranges import known_range, range_of, range_of_constant
from thunder_norm.core.local import is_local
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Lowered, Raised, Source, every_fact, fact, is_plain, ruled, unconditional
from thunder_norm.rules._set_aside import Run, entries_left, is_set_somewhere, less_unless, run_on_values
from thunder_norm.rules._shared import SAME_DIMS, Number
from thunder_norm.rules.weighted._infinities import with_known
from thunder_norm.rules.written_out.written_out_exponentials import Beneath, sources_of

# -- sums -----------------------------------------------------------------------------------------------------------------


def _of_one_sign(c: torch.Tensor) -> Range | None:
    """Between which numbers a plain constant is, of which some may be 0 and others are finite and on one side of it."""
    if not is_plain(c) or not c.ndim or not current_environment().is_constant(c):
        return None
    found = known_range(c)
    if found.low < 0 < found.high:
        found = range_of_constant(c) or found
    ends = found.low, found.high
    return found if 0 in ends and ends != (0, 0) and all(map(math.isfinite, ends)) else None


def _seen(find: Callable[[Run, torch.Tensor], torch.Tensor], t: torch.Tensor) -> torch.Tensor:
    """What is found of a tensor: of its values, if they are known."""
    values = values_of(t)
    is_known = not isinstance(values, FakeTensor) and not values.is_meta
    return find(run_on_values, values) if is_known else find(run_real, t)


def _operands(args: dict[str, Any]) -> tuple[RMSTensor, torch.Tensor, Range] | None:
    """What numbers of one sign are added to or subtracted from, these, and between which numbers they are."""
    a, b, alpha = args["input"], args["other"], args["alpha"]
    x, c = (a, b) if isinstance(a, NormedTensor) else (b, a)
    if not isinstance(x, RMSTensor) or not isinstance(c, torch.Tensor) or isinstance(c, NormedTensor) or alpha != 1:
        return None
    found = _of_one_sign(c) if torch.broadcast_shapes(x.shape, c.shape) == x.shape else None
    return None if found is None else (x, c, found)


def _has_operands(args: dict[str, Any]) -> bool:
    return _operands(args) is not None


@normed_op(torch.add).register_norm(when=_has_operands, allow_plain_tensors="constant", lift_dims=SAME_DIMS)
def add(input: RMSTensor | torch.Tensor, other: RMSTensor | torch.Tensor, alpha: Number = 1) -> NormedTensor:
    """A sum with numbers of one sign, or 0: as ever; where they are not 0 is remembered."""
    return unconditional(torch.add, input, other, alpha)


@normed_op(torch.sub).register_norm(when=_has_operands, allow_plain_tensors="constant", lift_dims=SAME_DIMS)
def sub(input: RMSTensor | torch.Tensor, other: RMSTensor | torch.Tensor, alpha: Number = 1) -> NormedTensor:
    """A difference from numbers of one sign, or 0: as ever; where they are not 0 is remembered."""
    return unconditional(torch.sub, input, other, alpha)


def _sum(op: Callable) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        given = dict(zip(("input", "other", "alpha"), args, strict=False)) | kwargs
        found = _operands({"alpha": 1} | given)
        if found is None or op is torch.sub and found[0] is not given["input"]:
            return out._facts
        x, c, within = found
        kind = Raised if (within.low >= 0) == (op is torch.add) else Lowered
        return with_known(out, [kind(Source.of(x), _seen(lambda run, t: run(torch.ne, (t, 0), {}), c))])

    return rule


for _op in (torch.add, torch.sub):
    normed_op(_op).register_fact(_sum(_op))


def _less(op: Callable) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    """What a number or tensor was subtracted from that is nowhere negative: no entry is larger than before."""

    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        given = dict(zip(("input", "other", "alpha"), args, strict=False)) | kwargs
        a, b = given["input"], given["other"]
        if given.get("alpha", 1) != 1:
            return out._facts
        found = []
        for x, by in ((a, b),) if op is torch.sub else ((a, b), (b, a)):
            within = range_of(by) if isinstance(x, RMSTensor) and x.shape == out.shape else None
            if within is not None and (within.low >= 0 if op is torch.sub else within.high <= 0):
                found += [*map(Beneath, sources_of(x)), *(f for f in every_fact(x) if isinstance(f, Beneath))]
        return Alternatives((*every_fact(out), *found)) if found else out._facts

    return rule


for _op in (torch.add, torch.sub):
    normed_op(_op).register_fact(_less(_op))


# -- what is positive of them ---------------------------------------------------------------------------------------------


@normed_op(F.relu).register_norm(when=lambda args: fact(args["input"], Lowered) is not None)
def relu(input: RMSTensor) -> NormedTensor:
    """max(x, 0) of entries some of which are lower than those of another tensor, or than 0: no larger than its, and it moves as ever."""
    lowered = fact(input, Lowered)
    assert lowered is not None, "the rule's condition has been checked"
    result = unconditional(F.relu, input)
    less = unconditional(F.relu, entries_left(lowered, input))
    result.norm_size = torch.minimum(result.norm_size, less.norm_size) if less.elem_dims == result.elem_dims else result.norm_size
    return result


# -- largest entries of groups --------------------------------------------------------------------------------------------


def _untouched(op: Callable, shape: torch.Size, dim: int, source: torch.Size) -> Callable[[Run, torch.Tensor], torch.Tensor]:
    """Where an index leaves a tensor as it is."""

    def find(run: Run, index: torch.Tensor) -> torch.Tensor:
        zeros, ones = (run(torch.full, (tuple(s), c), {"device": index.device}) for s, c in ((shape, 0.0), (source, 1.0)))
        return run(torch.lt, (run(op, (zeros, dim, index, ones, "amax"), {}), 1.0), {})

    return find


def _is_filled(args: dict[str, Any]) -> bool:
    """Whether the largest (least) entries of groups go beside numbers that are not positive (negative)."""
    filled, source = args["input"], args["src"] if "src" in args else args["source"]
    if not is_plain(filled) or not current_environment().is_constant(filled) or not isinstance(source, RMSTensor):
        return False
    found = known_range(filled)
    found = (range_of_constant(filled) or found) if found.low < 0 < found.high else found
    return args["reduce"] == "amax" and found.high <= 0 or args["reduce"] == "amin" and 0 <= found.low


def _of_source(
    op: Callable, filled: torch.Tensor, dim: int, index: torch.Tensor, source: RMSTensor, reduce: str
) -> tuple[NormedTensor, torch.Tensor | None]:
    """What the entries are that come from the source."""
    nothing = RMSTensor._wrap(filled, torch.zeros_like(source.norm_size), None, source.elem_dims)
    found = ruled(op, (nothing, dim, index, source, reduce), {})
    assert found is not None, "there is a rule for these kinds"
    return found


def _largest_of_groups(
    op: Callable, filled: torch.Tensor, dim: int, index: torch.Tensor, source: RMSTensor, reduce: str, include_self: bool
) -> NormedTensor:
    """As ever; no larger than entries of the source, if some go everywhere."""
    result = unconditional(op, filled, dim, index, source, reduce, include_self=include_self)
    is_left = is_set_somewhere(_untouched(op, filled.shape, dim, source.shape), index)
    less, _ = _of_source(op, filled, dim, index, source, reduce)
    if type(less) is type(result) and less.elem_dims == result.elem_dims:
        result.norm_size = less_unless(is_left, result.norm_size, less.norm_size)
    return result


@normed_op(torch.scatter_reduce).register_norm(when=_is_filled, allow_plain_tensors="constant")
def scatter_reduce(
    input: torch.Tensor, dim: int, index: torch.Tensor, src: RMSTensor, reduce: str, *, include_self: bool = True
) -> NormedTensor:
    """The largest (least) entries of groups beside numbers that are not positive (negative): as ever, of the source if some go everywhere."""
    return _largest_of_groups(torch.scatter_reduce, input, dim, index, src, reduce, include_self)


@normed_op(torch.index_reduce).register_norm(when=_is_filled, allow_plain_tensors="constant")
def index_reduce(
    input: torch.Tensor, dim: int, index: torch.Tensor, source: RMSTensor, reduce: str, *, include_self: bool = True
) -> NormedTensor:
    """The same by rows."""
    return _largest_of_groups(torch.index_reduce, input, dim, index, source, reduce, include_self)


def _beside_numbers(op: Callable) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    """Where no entry goes it stays a number, below (above) which the others need not be."""

    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        last = "src" if op is torch.scatter_reduce else "source"
        given = dict(zip(("input", "dim", "index", last, "reduce"), args, strict=False)) | kwargs
        if not _is_filled(given):
            return out._facts
        filled, dim, index, source, reduce = (given[name] for name in ("input", "dim", "index", last, "reduce"))
        claim, moved = _of_source(op, filled, dim, index, source, reduce)
        mask = _seen(_untouched(op, out.shape, dim, source.shape), index)
        backing = run_real(torch.masked_fill, (out.backing, mask, 0.0), {}) if is_local(out) else out.backing
        kind = Lowered if reduce == "amax" else Raised
        return with_known(out, [kind(Source(type(claim), backing, claim.norm_size, moved, claim.elem_dims), mask)])

    return rule


for _op in (torch.scatter_reduce, torch.index_reduce):
    normed_op(_op).register_fact(_beside_numbers(_op))
