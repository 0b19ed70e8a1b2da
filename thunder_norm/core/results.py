"""What becomes of a rule's results: they get the backings that the operation made, and say how far they move."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.context_variables import setting
from thunder_norm.core import by_data, conversions
from thunder_norm.core.context import current_mode, measured
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import at_data
from thunder_norm.core.nonfinite import Followed, bounded, settled, spoiled
from thunder_norm.core.perturbations import arguments_of, moving_sizes, numbers_given, perturbation_of, recorded
from thunder_norm.core.registry import NormedOp, NormRule
from thunder_norm.core.tensors import NormedTensor, describe, has_norm
from thunder_norm.errors import NormMismatchError
from thunder_norm.trees import flat_tensors, map_tensors


def handing_on(result: Any, bound: inspect.BoundArguments, sizes: Sequence[tuple[str, torch.Tensor]], followed: Followed) -> Any:
    """A rule's result whose norms are NaN if, and only if, an argument's is whose values matter (its sensitivity is not 0)."""
    if isinstance(result, list | tuple):
        return [handing_on(r, bound, sizes, followed) for r in result]
    if isinstance(result, NormedTensor):
        sensitivity = result._sensitivity or {}
        said = result.norm_size  # what was followed; what is put in its place was not
        for name, n in sizes:
            constant = sensitivity.get(name)
            matters = not (isinstance(constant, int | float) and constant == 0)
            if matters and not followed.makes_nan(n, said):
                result.norm_size = spoiled(result.norm_size, n)
        result.norm_size = settled(result.norm_size, numbers_given(bound))
    return result


def attach(op: NormedOp, rule: NormRule, bound: inspect.BoundArguments, result: Any, real: Any, args: tuple, kwargs: dict) -> Any:
    """Give each NormedTensor of a rule's result its backing and its perturbation_size."""
    if isinstance(result, list | tuple):
        if not isinstance(real, list | tuple) or len(real) != len(result):
            raise NormMismatchError(f"norm rule for {op.__qualname__} returned {len(result)} results, the operation did not")
        attached = [
            _of_any_size(r, bound) if n is None else attach(op, rule, bound, n, r, args, kwargs)
            for n, r in zip(result, real, strict=True)
        ]
        # lists, tuples, and torch.return_types with their fields
        return type(real)(attached)
    if not isinstance(result, NormedTensor):
        return real if result is None else result
    if not isinstance(real, torch.Tensor):
        raise NormMismatchError(f"norm rule for {op.__qualname__} returned a norm for {describe(real)}")
    size = recorded(_size_of_nothing(result, real, bound))
    # a rule that knows where all of its arguments come from may state the result's movement itself
    perturbation = perturbation_of(op, rule, bound, result) if result.perturbation_size is None else result.perturbation_size
    if perturbation is not None:
        perturbation = settled(perturbation, (*numbers_given(bound), *moving_sizes(bound)))
    if current_mode() == "modula":
        size = bounded(1.0, size)
    kind = type(result)
    if kind is RMSTensor and result.elem_dims == ():
        kind = LinfTensor
    out = kind._wrap(real, size, perturbation, result.elem_dims)
    out._facts = result._facts
    out._jump = None if perturbation is None else result._jump
    track_aliases(out, real, args, kwargs)
    return out


def _of_any_size(real: Any, bound: inspect.BoundArguments) -> Any:
    """One of several results, of which the rule says nothing (the statistics of a normalization): plain it would be a constant."""
    arguments = normed_in(list(bound.arguments.values()))
    if not isinstance(real, torch.Tensor) or not has_norm(real) or not real.numel() or not arguments:
        return real
    unknown = recorded(torch.full_like(arguments[0].norm_size, math.inf))
    moves = any(x.perturbation_size is not None for x in arguments)
    return LinfTensor._wrap(real, unknown, unknown.clone() if moves else None, ())


def _size_of_nothing(result: NormedTensor, real: torch.Tensor, bound: inspect.BoundArguments) -> torch.Tensor:
    """A rule's size for its result; the norm that this has where it has entries and no argument of a norm has any: then they are constants.

    A formula for the mean of something, or the largest, says nothing of these, and torch's may be no number.
    """
    arguments = normed_in(list(bound.arguments.values()))
    if not arguments or any(x.numel() for x in arguments) or not real.numel() or real.is_meta:
        return result.norm_size
    return measured(type(result), real, result.elem_dims).norm_size


def normed_in(tree: Any) -> list[NormedTensor]:
    """The normed tensors of a structure."""
    return [x for x in flat_tensors(tree) if isinstance(x, NormedTensor)]


def track_aliases(out: NormedTensor, real: torch.Tensor, args: tuple, kwargs: dict) -> None:
    """Note which arguments a result shares its storage with."""
    storage = _storage_id(real)
    if storage is None:
        return
    for other in flat_tensors((args, kwargs)):
        if isinstance(other, NormedTensor) and _storage_id(other.backing) == storage:
            together = [*other._aliases, *out._aliases] or [weakref.ref(other)]
            together.append(weakref.ref(out))
            for x in (ref() for ref in together):
                if x is not None:
                    x._aliases = together


def _storage_id(t: torch.Tensor) -> int | None:
    return t.untyped_storage()._cdata if t.layout is torch.strided else None


# -- what happens since the tensors that a result is known as a function of ------------------------------------------------

# A normalization that is written out moves with its input alone.  Where each operation adds something of its own, as roundings do, what is
# added in between counts too: it is followed from operation to operation by itself, and joins a result that moves with a source.
_follows_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("thunder_norm_follows_inside", default=False)


def following_inside() -> contextlib.AbstractContextManager[None]:
    """Inside the block results move by what happens to intermediate ones of what is known as a whole (`NormedTensor._inside`), too."""
    return setting(_follows_inside, True)


def follow_inside(
    op: NormedOp, func: Callable, args: tuple, kwargs: dict, made: Any, stated: Sequence, results: Sequence
) -> None:
    """Let results move by what happened to arguments since the tensors that these are known as functions of.

    Args:
        op: the operation.
        func: it, as it was called.
        args: its arguments.
        kwargs: the same, by name.
        made: what it returned on plain tensors.
        stated: the normed results, as the rule made them.
        results: the same, attached.
    """
    if not _follows_inside.get():
        return
    args, kwargs = at_data((args, kwargs))
    has_more = any(x._inside is not None for x in normed_in((args, kwargs)))
    moved = _moved_inside(op, func, args, kwargs, made, results) if has_more else [None] * len(results)
    for y, by_rule, more in zip(results, stated, moved, strict=True):
        if more is not None and by_rule.perturbation_size is not None and y.perturbation_size is not None:
            y.perturbation_size = y.perturbation_size + more
        if y.perturbation_size is not None and (y._facts is not None or op.sums_rule is not None):
            own = torch.zeros_like(y.norm_size, requires_grad=True)  # what happens to this one
            y._inside = own if more is None else more + own


def _moved_inside(
    op: NormedOp, func: Callable, args: tuple, kwargs: dict, made: Any, results: Sequence[NormedTensor]
) -> list[torch.Tensor | None]:
    """How far each result moves, in its norm, by what happened inside: as the operation does whatever its arguments are functions of."""
    copies: dict[int, NormedTensor] = {}
    sizes = [x._inside for x in normed_in((args, kwargs)) if x._inside is not None]

    def copy(x: Any) -> Any:
        if not isinstance(x, NormedTensor):
            return x
        if id(x) not in copies:
            copies[id(x)] = out = type(x)._wrap(x.backing, x.norm_size, x._inside, x.elem_dims)
            out._range, out._least = x._range, x._least
        return copies[id(x)]

    args, kwargs = map_tensors(copy, (args, kwargs))
    found: Sequence[NormedTensor] | None
    try:
        found = _by_rule(op, args, kwargs, results)
    except NormMismatchError:
        found = None
    if found is None:
        body = func.body if isinstance(func, NormedOp) else func
        args, kwargs = map_tensors(lambda t: t if isinstance(t, NormedTensor) else t.detach(), (args, kwargs))
        found = by_data.known_of(func, args, kwargs, body, made)
    if found is None or len(found) != len(results):
        return [_unknown(sizes)] * len(results)
    return [
        _unknown(sizes)
        if conversions.factor(known, type(y), y.elem_dims) is None
        else conversions.convert(known, type(y), y.elem_dims).perturbation_size
        for y, known in zip(results, found, strict=True)
    ]


def _unknown(sizes: Sequence[torch.Tensor]) -> torch.Tensor:
    """How far something moves of which nothing is known: infinitely, where one of these does."""
    return settled(sum(sizes, start=torch.zeros(())) * math.inf, sizes, 0.0)


def _by_rule(op: NormedOp, args: tuple, kwargs: dict, results: Sequence[NormedTensor]) -> list[NormedTensor] | None:
    """The results as the rule for these arguments has them, which may be of other kinds."""
    found = op.find(args, kwargs)
    if found is None:
        return None
    rule, bound = found
    still = {where for where, x in arguments_of(bound) if not isinstance(x, NormedTensor) or x.perturbation_size is None}
    prepared = rule.prepare(bound)
    known = normed_in(rule.run(prepared))
    if len(known) != len(results):
        return None
    moved = [perturbation_of(op, rule, prepared, r, still) if r.perturbation_size is None else r.perturbation_size for r in known]
    return [type(r)._wrap(y.backing, r.norm_size, m, r.elem_dims) for r, y, m in zip(known, results, moved, strict=True)]
