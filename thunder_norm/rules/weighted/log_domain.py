"""Recursions in the log domain, where minus infinity stands for a logarithm of 0, or infinity for a cost that nothing reaches.

    before = torch.cat([torch.full((1,), -math.inf), alpha[:-1]])
    alpha = torch.logsumexp(torch.stack([alpha, before]), 0) + score
    cost - torch.logsumexp(torch.stack([-left, -up, -diagonal]), 0)        # of costs that are infinite at the edges

The norm of what holds infinities says nothing of the other entries.  So joining remembers which entries these are, as setting aside does
(`Masked`, and `MaskedAbove` where they are plus infinity), multiples change one into the other, and of what is left in a row its largest
entry and the logarithm of its sum of exponentials are as large as that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.rules._facts import (
    Alternatives,
    Masked,
    MaskedAbove,
    every_fact,
    fact,
    has_infinity,
    ruled,
    unconditional,
    values_known,
)
from thunder_norm.rules._shared import SAME_DIMS, Number, argument, dims_tuple, over_dims_of
from thunder_norm.rules.weighted._infinities import (
    KINDS,
    Infinities,
    is_of_all_inputs,
    parts,
    stated,
    with_known,
)


def _joined(tensors: Any, kind: type[Infinities], infinity: float) -> tuple[list[NormedTensor], list[torch.Tensor]] | None:
    """The same of several; None if it is nowhere, or not known."""
    beside = next((t.norm_size for t in tensors if isinstance(t, NormedTensor)), None)
    found = [] if beside is None else [parts(t, kind, infinity, beside) for t in tensors]
    known = [f for f in found if f is not None]
    if not known or len(known) < len(found) or all(mask is None for _, mask in known):
        return None
    masks = [None if mask is None else values_known(mask) for _, mask in known]
    if any(mask is not None and seen is None for (_, mask), seen in zip(known, masks, strict=True)):
        return None
    return [x for x, _ in known], [_everywhere(m, x.shape) for m, (x, _) in zip(masks, known, strict=True)]


def _everywhere(mask: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
    with _disable_current_modes():
        return torch.zeros(tuple(shape), dtype=torch.bool) if mask is None else mask.cpu().expand(tuple(shape))


def _have_infinities(args: dict[str, Any]) -> bool:
    tensors = args["tensors"]
    if not isinstance(tensors, list | tuple) or not all(isinstance(t, RMSTensor) or _is_constant(t) for t in tensors):
        return False
    if not all(has_norm(t) for t in tensors) or any(is_local(t) for t in tensors if isinstance(t, NormedTensor)):
        return False
    return any(_joined(tensors, *kind) is not None for kind in KINDS)


def _is_constant(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and not isinstance(t, NormedTensor) and not isinstance(t, torch.nn.Parameter)


def _join(op: Callable) -> None:
    def rule(tensors: list[RMSTensor | torch.Tensor], dim: int = 0) -> NormedTensor:
        return unconditional(op, tensors, dim)

    rule.__name__ = rule.__qualname__ = f"{op.__name__}_with_infinities"
    rule.__doc__ = (
        f"""torch.{op.__name__}, of which some entries are constants of infinity: as ever; what the others are is remembered."""
    )
    normed_op(op).register_norm(
        rule, when=_have_infinities, allow_plain_tensors="constant", lift_dims={"tensors": over_dims_of("tensors")}
    )

    def facts(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        tensors, dim = argument(args, kwargs, 0, "tensors"), argument(args, kwargs, 1, "dim", default=0)
        if not _have_infinities({"tensors": tensors}):
            return out._facts
        found = [(kind, _joined(tensors, kind, infinity)) for kind, infinity in KINDS]
        return with_known(out, [_made(kind, op, op, f[0], f[1], dim, out) for kind, f in found if f is not None])

    normed_op(op).register_fact(facts)


def _made(kind: type[Infinities], op: Callable, of_masks: Callable, x: Any, mask: Any, *rest: Any) -> Infinities | None:
    """What an operation makes of entries that are not infinite, and where the others are then; the result is last."""
    *others, out = rest
    claim = ruled(op, (x, *others), {})
    if claim is None:
        return None
    with _disable_current_modes():
        mask = of_masks(mask, *others)
    return stated(kind, claim, mask, out)


for _op in (torch.cat, torch.stack):
    _join(_op)


def _padded(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """Infinity around x."""
    names = ("input", "pad", "mode", "value")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, value = given["input"], given.get("value")
    kind = next((k for k, infinity in KINDS if value == infinity), None)
    if kind is None or value is None or given.get("mode", "constant") != "constant" or is_local(x):
        return out._facts
    found = parts(x, kind, value, x.norm_size)
    if found is None:
        return out._facts
    mask = None if found[1] is None else values_known(found[1])
    if (mask is None) != (found[1] is None):
        return out._facts
    mask = _everywhere(mask, x.shape)
    pad = list(given["pad"])
    return with_known(out, [_made(kind, F.pad, lambda m, p: F.pad(m, p, value=True), found[0], mask, pad, out)])


normed_op(F.pad).register_fact(_padded)


# -- sums -----------------------------------------------------------------------------------------------------------------


def _is_beside_infinity(args: dict[str, Any]) -> bool:
    """Whether one operand is normed, and the other a constant with infinities."""
    a, b = args["input"], args["other"]
    x, c = (a, b) if isinstance(a, NormedTensor) else (b, a)
    return isinstance(x, RMSTensor) and not is_local(x) and has_infinity(c)


@normed_op(torch.add).register_norm(when=_is_beside_infinity, allow_plain_tensors="constant", lift_dims=SAME_DIMS)
def add(input: RMSTensor | torch.Tensor, other: RMSTensor | torch.Tensor, alpha: Number = 1) -> NormedTensor:
    """A sum with a constant that is infinite in part: as ever; what the other entries are is remembered."""
    return unconditional(torch.add, input, other, alpha)


@normed_op(torch.sub).register_norm(when=_is_beside_infinity, allow_plain_tensors="constant", lift_dims=SAME_DIMS)
def sub(input: RMSTensor | torch.Tensor, other: RMSTensor | torch.Tensor, alpha: Number = 1) -> NormedTensor:
    """A difference with a constant that is infinite in part: as ever; what the other entries are is remembered."""
    return unconditional(torch.sub, input, other, alpha)


def _sum(op: Callable) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    """Infinite where one of two is, if neither is infinite the other way."""

    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
        if argument(args, kwargs, 2, "alpha", default=1) != 1 or not all(isinstance(x, torch.Tensor) for x in (a, b)):
            return out._facts
        if any(is_local(x) for x in (a, b) if isinstance(x, NormedTensor)):
            return out._facts
        found = []
        for kind, infinity in KINDS:
            of_b = (kind, infinity) if op is torch.add else KINDS[kind is Masked]
            found_of = parts(a, kind, infinity, out.norm_size), parts(b, *of_b, out.norm_size)
            if None in found_of:
                return out._facts
            operands, masks = zip(*(p for p in found_of if p is not None), strict=True)
            mask = _either(masks, (a.shape, b.shape), out.shape)
            if mask is not None:
                found.append((kind, operands, mask))
        if len(found) != 1:
            return out._facts
        ((kind, operands, mask),) = found
        claim = ruled(op, operands, {})
        return out._facts if claim is None else with_known(out, [stated(kind, claim, mask, out)])

    return rule


def _either(masks: Sequence[torch.Tensor | None], shapes: Sequence[torch.Size], shape: torch.Size) -> torch.Tensor | None:
    """Where one of two is set; None if nowhere, or if that is not known."""
    given = [(m, of) for m, of in zip(masks, shapes, strict=True) if m is not None]
    if len(given) == 1 and given[0][1] == shape:
        return given[0][0]
    known = [values_known(m) for m, _ in given]
    if not known or None in [None if k is None else 0 for k in known]:
        return None
    with _disable_current_modes():
        return functools.reduce(torch.logical_or, (k.cpu().expand(tuple(shape)) for k in known if k is not None))


for _op in (torch.add, torch.sub):
    normed_op(_op).register_fact(_sum(_op))


# -- what is left where no entry is infinite ------------------------------------------------------------------------------


def _left_of(claim: tuple[NormedTensor, torch.Tensor | None], operands: Sequence[Any], names: Sequence[str]) -> NormedTensor:
    """A rule's result of entries none of which is infinite: NaN if an operand's norm is."""
    of, moved = claim
    spoilt = [bounded(0.0, x.norm_size) for x in operands if isinstance(x, NormedTensor)]
    out = type(of)._wrap(None, sum(spoilt, of.norm_size), moved, of.elem_dims)  # type: ignore[arg-type]
    out._sensitivity = dict.fromkeys(names, 0)
    return out


def _filled(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """Set aside once more: what is set aside by both."""
    given = dict(zip(("input", "mask", "value"), args, strict=False)) | kwargs
    x, made = given["input"], next((f for f in every_fact(out) if isinstance(f, Masked | MaskedAbove)), None)
    before = None if made is None or not is_of_all_inputs(x) else fact(x, type(made))
    masks = [] if before is None or made is None else [values_known(before.mask), values_known(made.mask)]
    if before is None or made is None or None in [None if m is None else 0 for m in masks] or x.shape != out.shape:
        return out._facts
    with _disable_current_modes():
        mask = functools.reduce(torch.logical_or, (m.cpu() for m in masks if m is not None))
    return Alternatives((type(made)(before.x, mask), *(f for f in every_fact(out) if f is not made)))


normed_op(torch.masked_fill).register_fact(_filled)


def _leaves_infinities(args: dict[str, Any]) -> bool:
    """Whether an index takes none of the infinite entries."""
    x = args["input"]
    known = every_fact(x) if is_of_all_inputs(x) else ()
    found = next((f for f in known if isinstance(f, Masked | MaskedAbove)), None)
    mask = None if found is None else values_known(found.mask)
    if mask is None or any(isinstance(i, torch.Tensor) for i in _indices(args["index"])):
        return False
    with _disable_current_modes():
        return not bool(mask.expand(tuple(x.shape))[args["index"]].any())


def _indices(index: Any) -> tuple:
    return index if isinstance(index, tuple) else (index,)


@normed_op(torch.Tensor.__getitem__).register_norm(when=_leaves_infinities)
def getitem(input: RMSTensor, index: Any) -> NormedTensor:
    """Entries none of which is infinite: as large as those that are not."""
    found = next(f for f in every_fact(input) if isinstance(f, Masked | MaskedAbove))
    claim = ruled(torch.Tensor.__getitem__, (found.x.moving(), index), {})
    return unconditional(torch.Tensor.__getitem__, input, index) if claim is None else _left_of(claim, (input,), ("input",))


# -- multiples ------------------------------------------------------------------------------------------------------------


def _scaled(op: Callable) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other", default=-1.0)
        x, c = (b, a) if isinstance(a, int | float) else (a, b)
        if not isinstance(c, int | float) or not 0 < abs(c) < math.inf or is_local(x) or x is b and op is torch.div:
            return out._facts
        found = next((f for f in every_fact(x) if isinstance(f, Masked | MaskedAbove)), None)
        if found is None or kwargs.get("rounding_mode") is not None or fact(out, Masked) or fact(out, MaskedAbove):
            return out._facts
        kind = type(found) if c > 0 else KINDS[isinstance(found, Masked)][0]
        others = () if op is torch.neg else (c,)
        return with_known(out, [_made(kind, op, lambda mask, *_: mask, found.x.moving(), found.mask, *others, out)])

    return rule


for _op in (torch.neg, torch.mul, torch.div):
    normed_op(_op).register_fact(_scaled(_op))


# -- log(e^a + e^b) -------------------------------------------------------------------------------------------------------


def _both(a: Any, b: Any) -> tuple[tuple[NormedTensor, torch.Tensor | None], torch.Tensor] | None:
    """What log(e^a + e^b) claims where a or b is left, and where neither is; None if that is all, or not known."""
    if any(isinstance(x, NormedTensor) and (is_local(x) or not isinstance(x, RMSTensor)) for x in (a, b)):
        return None
    found = _joined((a, b), Masked, -math.inf)
    if found is None:
        return None
    claim, moves = ruled(torch.logaddexp, tuple(found[0]), {}), ruled(torch.add, tuple(found[0]), {})
    if claim is None or moves is None or claim[0].elem_dims != moves[0].elem_dims:
        return None
    with _disable_current_modes():  # where one is left, the result is that one: it moves as far
        return (claim[0], moves[1]), torch.logical_and(*found[1])


def _is_left(args: dict[str, Any]) -> bool:
    found = _both(args["input"], args["other"])
    return found is not None and not bool(found[1].any())


@normed_op(torch.logaddexp).register_norm(when=_is_left, allow_plain_tensors="constant", lift_dims=SAME_DIMS)
def logaddexp(input: RMSTensor | torch.Tensor, other: RMSTensor | torch.Tensor) -> NormedTensor:
    """log(e^a + e^b), a or b minus infinity in part, and never both: the value of `logaddexp` of what is left, sensitivity 1 to each."""
    found = _both(input, other)
    assert found is not None, "the rule's condition has been checked"
    return _left_of(found[0], (input, other), ("input", "other"))


@normed_op(torch.logaddexp).register_norm(
    when=lambda args: _both(args["input"], args["other"]) is not None, allow_plain_tensors="constant", lift_dims=SAME_DIMS
)
def logaddexp_of_none(input: RMSTensor | torch.Tensor, other: RMSTensor | torch.Tensor) -> NormedTensor:
    """log(e^a + e^b), both minus infinity in part: as ever; what the other entries are is remembered."""
    return unconditional(torch.logaddexp, input, other)


def _added(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    found = _both(argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other"))
    return out._facts if found is None or not bool(found[1].any()) else with_known(out, [stated(Masked, *found, out)])


normed_op(torch.logaddexp).register_fact(_added)


# -- what is left of a row ------------------------------------------------------------------------------------------------


def _rows(op: Callable, kind: type[Infinities]) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    """Rows that are infinite everywhere stay so; the others have what the operation makes of the entries that are left."""

    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        x, dim = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "dim")
        found = fact(x, kind) if is_of_all_inputs(x) else None
        mask = None if found is None else values_known(found.mask)
        if found is None or mask is None or dim is None:
            return out._facts
        keepdim, dims = bool(argument(args, kwargs, 2, "keepdim", default=False)), dims_tuple(dim, x.ndim)
        with _disable_current_modes():
            rows = mask.expand(x.shape).all(dims, keepdim=keepdim)
            if not bool(rows.any()):
                return out._facts
        return with_known(out, [_made(kind, op, lambda m, *_: m, found.x.moving(), rows, dim, keepdim, out)])

    return rule


normed_op(torch.logsumexp).register_fact(_rows(torch.logsumexp, Masked))
normed_op(torch.amax).register_fact(_rows(torch.amax, Masked))
normed_op(torch.amin).register_fact(_rows(torch.amin, MaskedAbove))
