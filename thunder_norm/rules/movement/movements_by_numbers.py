"""How results move that are taken from places, or put there, that numbers in a tensor say, for `norm_sensitivity("composed")` and "within".

The numbers may be those of the largest entries, and others for other inputs.  Near the data they are taken to turn out the same, so that these
operations are linear maps; for all inputs only what holds for any numbers is known.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core.composed import Call, Made, Term, is_fixed, moves, spread_of
from thunder_norm.core.local import is_within
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import has_norm
from thunder_norm.rules.movement.movements import rearranged
from thunder_norm.rules.movement.movements_nearby import Found, made_of, one_sample
from thunder_norm.trees import flat_tensors, map_tensors


def linear_nearby(call: Call) -> Found:
    """An operation that is linear in all that moves while the numbers are the same, of one sample: by its Jacobian."""
    moving = one_sample(call, flat_tensors((call.args, call.kwargs)))
    if moving is None:
        return None
    return made_of(call, moving, lambda plain: call.run(*map_tensors(plain, (call.args, call.kwargs))), [])


def _taken(call: Call) -> Found:
    """Entries by their numbers."""
    return rearranged(call) if is_within() else None


for _op in (torch.gather, torch.take, torch.take_along_dim):
    normed_op(_op).register_movement(_taken)


def _put(call: Call) -> Found:
    """Entries, or a number, put by their numbers: of several for one place the one that is there in the end, which gradients do not tell."""
    if not is_within() or call.given.get("reduce") is not None:
        return None
    value = call.given.get("value")
    if value is None or isinstance(value, torch.Tensor):
        return rearranged(call)
    args = (*(call.given[name] for name in ("input", "dim", "index")), 0.0)  # a number stays as it is
    return rearranged(Call(args, {}, call.given, call.results, call.body))


def _put_at(call: Call) -> Found:
    """The same at some places, or added to what is there."""
    return linear_nearby(call) if call.given.get("accumulate") else _put(call)


def _scatter_added(call: Call) -> Found:
    """Entries added by their numbers, of a source of which there may be more."""
    x, dim, index, source = (call.given.get(name) for name in ("input", "dim", "index", "src"))
    if not isinstance(source, torch.Tensor) or not isinstance(index, torch.Tensor):
        return None
    moving = one_sample(call, [x, source])
    if moving is None:
        return None
    # torch's gradients are of sources that are added as a whole; a scalar has no dimension to take a part of
    part = tuple(slice(n) for n in index.shape[: source.ndim])
    return made_of(call, moving, lambda plain: call.run((plain(x), dim, index, plain(source)[part]), {}), [])


for _op in (torch.scatter, torch.index_copy, torch.index_fill):
    normed_op(_op).register_movement(_put)
normed_op(torch.index_put).register_movement(_put_at)
normed_op(torch.scatter_add).register_movement(_scatter_added)


def _rows_by_number(call: Call, x: Any, dim: int, index: Any) -> Found:
    """Rows of x along a dimension that is none of the features: whichever they are, for other inputs too, all features are there in their order."""
    if is_within() and (these := rearranged(call)) is not None and None not in these:
        return these
    if not isinstance(index, torch.Tensor) or not is_fixed(index) or has_norm(index) or index.dtype is torch.bool:
        return rearranged(call)
    if not moves(x) or (spread := spread_of(x)) is None or (dim - x.ndim if dim >= 0 else dim) >= -spread.ndim:
        return None
    return [Made(spread.ndim, (Term(x, None, False),))]


@normed_op(torch.Tensor.__getitem__).register_movement
def getitem(call: Call) -> Found:
    """Slices, and what is at some places."""
    return _rows_by_number(call, call.args[0], 0, call.args[1] if len(call.args) > 1 else None)


@normed_op(torch.index_select).register_movement
def index_select(call: Call) -> Found:
    """What is at some places along a dimension."""
    return _rows_by_number(call, *(call.given[name] for name in ("input", "dim", "index")))


@normed_op(torch.index_add).register_movement
def index_add(call: Call) -> Found:
    """Rows of x with rows of another added: for all that is known of other inputs, all of these onto one."""
    if (nearby := linear_nearby(call)) is not None:
        return nearby
    x, dim, source, alpha = (call.given.get(name, 1) for name in ("input", "dim", "source", "alpha"))
    (y,) = call.results
    moving = [t for t in (x, source) if moves(t)]
    spreads = [spread_of(t) for t in moving]
    ndims = {s.ndim for s in spreads if s is not None}
    if None in spreads or len(ndims) != 1 or not y.ndim or not is_fixed(call.given["index"]):
        return None
    (ndim,), factor = ndims, abs(float(alpha)) * source.shape[dim]
    if (dim - y.ndim if dim >= 0 else dim) >= -ndim or not math.isfinite(factor):
        return None
    terms = [Term(x)] * moves(x) + [Term(source, None, False, factor)] * moves(source)
    return [Made(ndim, tuple(terms))]
