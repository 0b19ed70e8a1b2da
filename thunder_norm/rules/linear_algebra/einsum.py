"""Norm rules for einsum: products of two tensors of any layout, sums of one, and products of more as products of two."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Mapping
from typing import Any

import torch

from thunder_norm.core.kinds import L2Tensor, LinfTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.core.programs import written_as
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._facts import is_plain
from thunder_norm.rules._shared import VectorKind, rms
from thunder_norm.rules.linear_algebra.contraction import Bound, contract, scaled
from thunder_norm.rules.linear_algebra.linear import batch_labels
from thunder_norm.rules.linear_algebra.logits import scores


def equation_labels(equation: str, *ndims: int) -> tuple[list[list[str]], list[str]]:
    """The labels of each input and of the output; an ellipsis becomes labels counted from the end."""
    inputs, arrow, out = equation.replace(" ", "").replace("...", ".").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ndims):
        raise NormMismatchError(f"einsum equation {equation!r} has {len(terms)} inputs, got {len(ndims)}")
    if not arrow:
        letters = sorted(set(inputs) - set(",."))
        out = ("." if "." in inputs else "") + "".join(c for c in letters if inputs.count(c) == 1)
    widths = [n - len(term.replace(".", "")) for n, term in zip(ndims, terms, strict=True)]

    def expand(term: str, width: int) -> list[str]:
        return [name for c in term for name in (batch_labels(width) if c == "." else (c,))]

    return [expand(t, w) for t, w in zip(terms, widths, strict=True)], expand(out, max(widths))


def _operator_labels(labels: list[str], other: list[str], out: list[str]) -> tuple[int, int] | None:
    """(out dim, in dim) of an einsum input read as an operator on the other one, heads before them; None if it is not one."""
    inner = [name for name in labels if name in other and name not in out]
    ends = [name for name in labels if name not in other and name in out]
    if len(inner) != 1 or not ends:
        return None
    return labels.index(ends[-1]) - len(labels), labels.index(inner[0]) - len(labels)


def _weight_dims(name: str, args: dict[str, Any]) -> tuple[int, int] | None:
    names = ("left", "right")
    (first, second), out = equation_labels(args["equation"], *(args[n].ndim for n in names))
    return _operator_labels(*((first, second) if name == "left" else (second, first)), out)


def _einsum_weight(name: str) -> dict[str, Any]:
    """Lift a plain input as the operator it is; where it is none, leave it to the rule for activations."""
    return {
        "lift_dims": {name: lambda t, args: _weight_dims(name, args)},
        "when": lambda args: not is_plain(args[name]) or _weight_dims(name, args) is not None,
    }


def _einsum(equation: str, left: NormedTensor, right: NormedTensor) -> NormedTensor:
    (a, b), out = equation_labels(equation, left.ndim, right.ndim)
    # what one input alone is summed over is kept first: a sum of K is at most K times the norm over all of them
    lonely = [name for mine, other in ((a, b), (b, a)) for name in mine if name not in other and name not in out]
    count = math.prod(t.shape[mine.index(n)] for t, mine in ((left, a), (right, b)) for n in lonely if n in mine)
    bound = contract(left, right, a, b, [*lonely, *out])
    dims = tuple(d for d in bound.elem_dims if -d <= len(out))
    kind = LinfTensor if issubclass(bound.kind, RMSTensor) and not dims else bound.kind
    result = scaled(Bound(kind, dims, bound.factor * max(count, 1)), left, right, ("left", "right"))
    return scores(result) if isinstance(left, RMSTensor) and isinstance(right, RMSTensor) else result


@normed_op(torch.einsum).register_norm(**_einsum_weight("right"))
def einsum(equation: str, left: RMSTensor | L2Tensor | RMSToRMSTensor, right: RMSToRMSTensor) -> NormedTensor:
    """A product of an activation and a weight, of any layout.

    right: an operator from its contracted dimension to its own one
    Value:        |y| <= |x| |W|, as `linear`
    Sensitivity:  |W|, |x|
    A sum over K elements of one input alone is K times that.
    Raises NormMismatchError for diagonals.
    """
    return _einsum(equation, left, right)


@normed_op(torch.einsum).register_norm(**_einsum_weight("left"))
def einsum_weight_first(equation: str, left: RMSToRMSTensor, right: RMSTensor | L2Tensor) -> NormedTensor:
    """The same with the weight first."""
    return _einsum(equation, left, right)


@normed_op(torch.einsum).register_norm
def einsum_activations(equation: str, left: VectorKind, right: VectorKind) -> NormedTensor:
    """A product of two activations, of any layout: as `matmul`, K the number of contracted elements."""
    return _einsum(equation, left, right)


@normed_op(torch.einsum).register_norm
def einsum_one(equation: str, input: RMSTensor) -> NormedTensor:
    """Transpose, or sum over dimensions of K elements.

    Value:        |y| <= K |x|      (attained by constants)
    Sensitivity:  K
    """
    (labels,), out = equation_labels(equation, input.ndim)
    if len(set(labels)) != len(labels):
        raise NormMismatchError(f"einsum {equation!r}: a diagonal has no norm rule here")
    count = math.prod(n for n, name in zip(input.shape, labels, strict=True) if name not in out)
    normed = {labels[d] for d in input.elem_dims}
    dims = tuple(i - len(out) for i, name in enumerate(out) if name in normed)
    return rms(input.norm_size * count, dims, sensitivity={"input": count})


def _entries(args: tuple, kwargs: Mapping[str, Any], of: Callable[[Any], Range | None]) -> Range | None:
    """Of sums of products, so many of them as there are elements that the result does not have."""
    equation, *operands = args
    found = [of(x) for x in operands]
    if not 0 < len(operands) <= 2 or None in found or not all(isinstance(x, torch.Tensor) for x in operands):
        return None
    terms, out = equation_labels(equation, *(x.ndim for x in operands))
    sizes = {name: n for x, term in zip(operands, terms, strict=True) for n, name in zip(x.shape, term, strict=True) if n != 1}
    count = math.prod(n for name, n in sizes.items() if name not in out)
    product = functools.reduce(Range.times, (r.of_entries() for r in found if r is not None))
    total = product.scaled(float(count)).of_many(count)
    return total if total.says_something else None


normed_op(torch.einsum).register_range(_entries)


def _has_many(args: tuple, _: dict) -> bool:
    return bool(args) and isinstance(args[0], str) and args[0].count(",") > 1


def _next(labels: list[str], rest: list[tuple[Any, list[str]]], out: list[str]) -> int:
    """Which tensor a product goes on with: one that takes a dimension away, so that matrices are what they are; else one that shares one."""

    def ends_here(place: int) -> bool:
        later = {name for i, (_, term) in enumerate(rest) if i != place for name in term} | set(out)
        return any(name in labels and name not in later for name in rest[place][1])

    places = range(len(rest))
    shared = (i for i in places if set(labels) & set(rest[i][1]))
    return next((i for i in places if ends_here(i)), next(shared, 0))


@written_as(torch.einsum, when=_has_many)
def einsum_in_pairs(equation: str, *operands: Any) -> torch.Tensor:
    """A product of three tensors or more, from the first: each with the next, as far as the others and the result have its dimensions."""
    tensors = list(operands[0]) if len(operands) == 1 else list(operands)
    terms, out = equation_labels(equation, *(t.ndim for t in tensors))
    letters = dict(zip(sorted({name for term in terms for name in term}), string.ascii_letters, strict=False))
    rest = list(zip(tensors, terms, strict=True))
    result, labels = rest.pop(0)
    while rest:
        tensor, term = rest.pop(_next(labels, rest, out))
        needed = {name for _, later in rest for name in later} | set(out)
        kept = [name for name in dict.fromkeys([*labels, *term]) if name in needed] if rest else out
        left, right, both = ("".join(letters[name] for name in names) for names in (labels, term, kept))
        result, labels = torch.einsum(f"{left},{right}->{both}", result, tensor), kept
    return result
