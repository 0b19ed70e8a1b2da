"""A sample of an operation with balls in the places of its tensors, of kinds that a rule takes: a case for the search."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_norm.audit.balls import Ball
from thunder_norm.audit.cases import Case
from thunder_norm.core import dispatch
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.core.registry import NormedOp, NormRule, _on_by_default
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError

# Magnitudes of norms: beyond them float64 has less to say than the formulas.
SIZES = (1.0, 1e-3, 1e3)


@dataclass(frozen=True)
class Sample:
    """One call of an operation on plain tensors."""

    fn: Callable
    args: tuple
    kwargs: dict

    def call(self) -> Any:
        """Its result."""
        return self.fn(*self.args, **self.kwargs)


# What a slot's tensor is: RMS over the dimensions that a function of their number gives (over none it is the largest entry), or
# which of the other kinds that the slot takes.
SETTINGS: tuple[Callable[[int], tuple[int, ...]] | int, ...] = (
    lambda ndim: (-1,) if ndim else (),
    1,
    lambda ndim: tuple(range(-ndim, 0)),
    lambda ndim: (),
    2,
    lambda ndim: (-ndim,) if ndim else (),
    lambda ndim: (-2,) if ndim >= 2 else (-1,) if ndim else (),
    3,
)
_ANY = (RMSTensor, L1Tensor, L2Tensor, RMSToRMSTensor)


Kinds = tuple[type[NormedTensor], ...]


@dataclass(frozen=True)
class Places:
    """Where a sample has tensors that a rule takes as normed ones, the kinds that may stand there, and the results to look at."""

    sample: Sample
    leaves: list
    spec: Any
    positions: tuple[int, ...]
    kinds: list[Kinds]
    outputs: dict[int, torch.dtype]


def places_of(op: NormedOp, rule: NormRule, sample: Sample) -> Places | None:
    """Those of a sample, None where it has none."""
    bound = rule.bind(sample.args, sample.kwargs, _on_by_default(op.key))
    if isinstance(bound, str):
        return None
    leaves, spec = tree_flatten((sample.args, sample.kwargs))
    kinds = {id(leaf): kind for leaf, kind in normed_leaves(rule, bound)}
    positions = tuple(i for i, leaf in enumerate(leaves) if id(leaf) in kinds)
    if not positions:
        return None
    return Places(sample, leaves, spec, positions, [kinds[id(leaves[i])] for i in positions], _outputs(sample))


def balls_of(of: Places, setting: int, index: int) -> tuple[Ball, ...] | None:
    """The balls of a setting; None if a tensor has no such norm."""
    balls = []
    for j, (i, kinds) in enumerate(zip(of.positions, of.kinds, strict=True)):
        over = _kind_over(kinds, of.leaves[i].ndim, setting)
        if over is None:
            return None
        size = SIZES[(index + setting + j * (index // 3)) % len(SIZES)]
        balls.append(Ball(f"{j}", over[0], tuple(of.leaves[i].shape), size, over[1]))
    return tuple(balls)


def case_of(op: NormedOp, rule: NormRule, of: Places, balls: tuple[Ball, ...], output: int, index: int, is_forced: bool) -> Case:
    """The case in which a sample's tensors are in these balls."""

    def call(*points: torch.Tensor) -> Any:
        values = list(of.leaves)
        for i, point in zip(of.positions, points, strict=True):
            values[i] = point
        args, kwargs = tree_unflatten(values, of.spec)
        if is_forced and any(isinstance(p, NormedTensor) for p in points):
            results = _apply(op, rule, of.sample.fn, args, kwargs)
        else:
            results = of.sample.fn(*args, **kwargs)
        return tree_flatten(results)[0][output]

    title = ", ".join(f"{b.kind.__name__}{list(b.dims)} {b.norm_size:g}" for b in balls)
    name = f"{op.__name__} {index}: {title}" + (f", output {output}" if output else "")
    # a sensitivity is one of exact arithmetic: rounding to a lower precision is no Lipschitz map
    options = {} if of.outputs[output] in (torch.float64, torch.complex128) else {"sensitivity": False}
    return Case(name, call, balls, 0.0, options)


def _apply(op: NormedOp, rule: NormRule, fn: Callable, args: tuple, kwargs: dict) -> Any:
    bound = rule.bind(args, kwargs, _on_by_default(op.key))
    if isinstance(bound, str) or not rule.fits(bound, converting=True):
        raise NormMismatchError("the rule does not take these arguments")
    return dispatch.apply_rule(op, rule, bound, fn, args, kwargs)


def _outputs(sample: Sample) -> dict[int, torch.dtype]:
    """Which of the results to look at: further pieces of a list are like the first ones."""
    results = tree_flatten(sample.call())[0]
    floating = {
        i: r.dtype for i, r in enumerate(results) if isinstance(r, torch.Tensor) and (r.is_floating_point() or r.is_complex())
    }
    return dict(itertools.islice(floating.items(), 2))


def normed_leaves(rule: NormRule, bound: inspect.BoundArguments) -> Iterator[tuple[torch.Tensor, Kinds]]:
    """The tensors of a call that are in normed slots, and the kinds that those take."""
    for name, value in bound.arguments.items():
        slot = rule.slots[name]
        is_several = isinstance(value, list | tuple) and (
            slot.is_list or bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        )
        for leaf in value if is_several else (value,):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and slot.kinds:
                yield leaf, slot.kinds


def _kind_over(kinds: Kinds, ndim: int, setting: int) -> tuple[type[NormedTensor], tuple[int, ...] | None] | None:
    """The kind and elem_dims for a slot that takes `kinds`; None if a tensor of `ndim` dimensions has no such norm."""
    if kinds[0] is NormedTensor:
        kinds = _ANY
    chosen = SETTINGS[setting]
    kind = kinds[chosen % len(kinds)] if isinstance(chosen, int) else kinds[0]
    if kind is RMSTensor:
        dims = (-1,)[:ndim] if isinstance(chosen, int) else chosen(ndim)
        return (RMSTensor, dims) if dims else (LinfTensor, None)
    return (kind, None) if len(kind.default_elem_dims(ndim)) <= ndim else None
