"""Which results are sums by weights, and of what: from what is known of the arguments, operation by operation (`_combinations`).

Weights are tensors whose entries are not negative.  A rule here says nothing of norms; `weighted_means` has the quotients that use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.known_ranges import range_of_constant
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Source
from thunder_norm.rules._shared import argument, dims_tuple, refined
from thunder_norm.rules.known_ranges.ranges_of_activations import is_zero_constant
from thunder_norm.rules.linear_algebra.einsum import equation_labels
from thunder_norm.rules.weighted import _weights as terms
from thunder_norm.rules.weighted._combinations import (
    STILL,
    Combination,
    InverseOfWeights,
    Relative,
    Sums,
    Weights,
    added,
    as_combinations,
    both,
    combinations_of,
    facts,
    is_zero,
    joined,
    over_own_sum,
    own_sum,
    times_factor,
    weighted,
    weights_of,
    with_number,
)
from thunder_norm.rules.weighted._weights import Term

_FEW = 4  # of what is known about one tensor
Found = tuple[Sums, ...]
Rule = Callable[[tuple, Mapping[str, Any], NormedTensor], Found]


def register(rule: Rule, *ops: Callable) -> None:
    """Register what a rule says of operations' results."""
    for op in ops:
        normed_op(op).register_sums(rule)


def first(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The first argument of a call."""
    return argument(args, kwargs, 0, "input", "self", "a", "x", "x1")


def _pair(args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    return first(args, kwargs), argument(args, kwargs, 1, "other", "mat2", "vec")


def few(found: Iterable[Sums]) -> Found:
    """The first of what is known."""
    return tuple(found)[:_FEW]


def everything(x: Any) -> list[Sums]:
    """Everything that is known of a tensor, as weights too."""
    return [*(f for f in facts(x) if not isinstance(f, Weights)), *weights_of(x, exactly=False)]


def _by_share(factor: Callable[..., float]) -> Rule:
    """Of a positive function of each entry, the slope of whose logarithm is at most a factor: it moves by that share of itself."""

    def rule(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
        x, rate = first(args, kwargs), factor(args, kwargs)
        if not isinstance(x, RMSTensor) or not rate > 0:
            return ()
        share = STILL if x.perturbation_size is None else Relative(Source.of(x), refined(x, ()) * rate)
        return (Weights(terms.of_tensor(out), share),)

    return rule


register(_by_share(lambda args, kwargs: 1.0), torch.sigmoid)
register(_by_share(lambda args, kwargs: float(argument(args, kwargs, 1, "beta", default=1.0))), F.softplus)
register(_by_share(lambda args, kwargs: 2.0), F.softmax)  # d log p_j = dx_j - sum p dx


# -- products and sums ----------------------------------------------------------------------------------------------------


def _product(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    a, b = _pair(args, kwargs)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        x, c = (a, b) if isinstance(a, torch.Tensor) else (b, a)
        return _multiple(x, c) if isinstance(c, int | float) else ()
    if not isinstance(a, NormedTensor) or not isinstance(b, NormedTensor):
        return _by_constant(*((a, b) if isinstance(a, NormedTensor) else (b, a)), out)
    found: list[Sums] = []
    of_a, of_b = list(weights_of(a)), list(weights_of(b))
    for weights, x in ((of_a, b), (of_b, a)):
        if not is_zero(x):
            found += [c for w in weights for c in weighted(w, x, out.shape) if w.term != terms.ZERO]  # type: ignore[arg-type]
    found.sort(key=lambda c: -len(c.term.factors) if isinstance(c, Combination) else 0)
    of_products = [
        times_factor(c, g, out.shape) for x, g in ((a, b), (b, a)) for c in combinations_of(x) if isinstance(g, RMSTensor)
    ]
    return few([*(both(v, w) for v in of_a[:1] for w in of_b[:1]), *found[: _FEW - 2], *of_products[:1], *found[_FEW - 2 :]])


def _by_constant(x: Any, c: torch.Tensor, out: NormedTensor) -> Found:
    """What is known of weights times a plain tensor whose values are known and not negative: they move by the same share of themselves."""
    found = range_of_constant(c)
    if found is None or not 0 <= found.low <= found.high < math.inf:
        return ()
    return few(replace(w, term=terms.of_tensor(out) if found.high else terms.ZERO) for w in weights_of(x))


def _multiple(x: Any, c: float) -> Found:
    """c times what is known, for a number; of weights only where it is not negative."""
    found: list[Sums] = []
    for f in everything(x):
        if isinstance(f, Combination):
            found.append(replace(f, parts=tuple((source, factor * abs(c)) for source, factor in f.parts)))
        elif c > 0 and isinstance(f, Weights):
            found.append(replace(f, term=terms.multiple(f.term, c)))
        elif isinstance(f, InverseOfWeights):
            found.append(replace(f, scale=f.scale * abs(c)))
    return few(found)


def _sum(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    a, b = _pair(args, kwargs)
    if argument(args, kwargs, 2, "alpha", default=1) != 1:
        return ()
    for x, c in ((a, b), (b, a)):
        if isinstance(c, int | float) and not isinstance(c, bool):
            return few(with_number(x, out)) if c >= 0 and isinstance(x, NormedTensor) else ()
        if (
            (is_zero(x) or isinstance(x, torch.Tensor) and is_zero_constant(x))
            and isinstance(c, NormedTensor)
            and c.shape == out.shape
        ):
            return few(everything(c))
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.shape != b.shape:
        return ()
    found: list[Sums] = [joined(v, w, out.shape) for v in combinations_of(a) for w in combinations_of(b)]
    return few([*found, *(added(v, w) for v in weights_of(a, exactly=False) for w in weights_of(b, exactly=False))])


register(_product, torch.mul)
register(_sum, torch.add)


def _quotient(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    a, b = _pair(args, kwargs)
    if kwargs.get("rounding_mode") is not None:
        return ()
    if isinstance(b, int | float):
        return _multiple(a, 1 / b) if b else ()
    if isinstance(a, int | float):
        return _inverse_of(b, abs(a))
    shares = (over_own_sum(w.relative, dims, other.is_exact) for dims, w, other, _ in own_sum(a, b))
    return tuple(Weights(terms.of_tensor(out), share) for share in shares if share is not None)[:1]


def _inverse_of(x: Any, scale: float) -> Found:
    return few(InverseOfWeights(w, scale) for w in weights_of(x, exactly=False))


register(_quotient, torch.div)
register(lambda args, kwargs, out: _inverse_of(first(args, kwargs), 1.0), torch.reciprocal)


def _at_least(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """The larger of weights and a number: at least the weights."""
    if argument(args, kwargs, 2, "max") is not None:
        return ()
    return few(replace(w, is_exact=False) for w in weights_of(first(args, kwargs), exactly=False))


register(_at_least, torch.clamp, torch.clamp_min)


def _averaged(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """A mean over dimensions."""
    share = out.numel() / max(first(args, kwargs).numel(), 1)
    return tuple(
        replace(f, term=terms.multiple(f.term, share))
        for f in _over_dims(args, kwargs, out)
        if not isinstance(f, InverseOfWeights)
    )


def _over_dims(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """A sum over dimensions."""
    x = first(args, kwargs)
    dims = dims_tuple(argument(args, kwargs, 1, "dim", "axis"), x.ndim)
    keepdim = bool(argument(args, kwargs, 2, "keepdim", "keepdims", default=False))
    left = [d for d in range(-x.ndim, 0) if d not in dims]
    place = {d: d if keepdim else i - len(left) for i, d in enumerate(left)}

    def summed(term: Term) -> Term:
        return terms.summed(term, dims, x.shape, keepdim)

    found: list[Sums] = []
    for c in combinations_of(x):
        c = c.over(tuple(d for d in c.elem_dims if d not in dims), x.shape)
        found.append(replace(c, term=summed(c.term), elem_dims=tuple(place[d] for d in c.elem_dims)))
    return few([*found, *(replace(w, term=summed(w.term)) for w in weights_of(x, exactly=False))])


register(_over_dims, torch.sum)
register(_averaged, torch.mean)


def _kept(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """Entries of a tensor that is not negative, or multiples of them, and zeros: they move by the same share of themselves."""
    value = argument(args, kwargs, 2, "value", default=0.0)
    shares = [w.relative for w in weights_of(first(args, kwargs), exactly=False)]
    return (Weights(terms.of_tensor(out), shares[0]),) if shares and value == 0 else ()


register(_kept, torch.masked_fill)
register(lambda args, kwargs, out: _kept(args[:1], {"input": kwargs.get("input")}, out), torch.tril, torch.triu, F.dropout)


# -- sums of products -----------------------------------------------------------------------------------------------------

Labels = list[int | str]


def _contracted(a: Any, b: Any, of_a: Labels, of_b: Labels, sizes: Mapping[str, int]) -> Found:
    """The sum of products over the labels that have a size."""
    found: list[Sums] = []
    for x, y, of_x, of_y in ((a, b, of_a, of_b), (b, a, of_b, of_a)):
        for w in weights_of(x):
            if isinstance(y, NormedTensor) and w.term != terms.ZERO:
                found += [_sum_of_products(w, c, y, of_x, of_y, sizes) for c in as_combinations(y)]  # type: ignore[arg-type]
    for v in list(weights_of(a, exactly=False))[:2]:
        for w in list(weights_of(b, exactly=False))[:2]:
            product = both(v, w)
            found.append(replace(product, term=terms.contracted(v.term, w.term, of_a, of_b, sizes)))
    found.sort(key=lambda c: -len(c.term.factors) if isinstance(c, Combination) else -99)
    return few(found)


def _sum_of_products(
    w: Weights, c: Combination, y: NormedTensor, of_w: Labels, of_y: Labels, sizes: Mapping[str, int]
) -> Combination:
    """The weights in the place of `of_w`, what is combined, y, in that of `of_y`."""
    varying = {of_w[d] for d in w.term.labels}
    kept = [d for d in c.elem_dims if isinstance(of_y[d], int) and of_y[d] not in varying]
    places = tuple(place for d in kept if isinstance(place := of_y[d], int))
    term = terms.contracted(w.term, c.term, of_w, of_y, sizes)
    return replace(
        c.over(tuple(kept), y.shape), term=term, elem_dims=places, relative=both(w, Weights(c.term, c.relative)).relative
    )


def _matrices(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """A product of matrices."""
    a, b = _pair(args, kwargs)
    if a.ndim < 2 or b.ndim < 2:
        return ()
    of_a: Labels = [*range(-a.ndim, -1), "k"]
    of_b: Labels = [*range(-b.ndim, -2), "k", -1]
    return _contracted(a, b, of_a, of_b, {"k": a.shape[-1]})


register(_matrices, torch.matmul, torch.bmm, torch.mm)


def _einsum(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """An einsum of two."""
    equation, *operands = args
    if len(operands) != 2 or not all(isinstance(x, torch.Tensor) for x in operands):
        return ()
    of_operands, of_out = equation_labels(equation, *(x.ndim for x in operands))
    if any(len(set(labels)) != len(labels) for labels in of_operands):
        return ()
    place: dict[str, int] = {name: i - len(of_out) for i, name in enumerate(of_out)}
    sizes: dict[str, int] = {}
    for x, labels in zip(operands, of_operands, strict=True):
        for name, n in zip(labels, x.shape, strict=True):
            if name not in place:
                sizes[name] = max(n, sizes.get(name, 1))
    (a, b), (of_a, of_b) = operands, ([place.get(name, name) for name in labels] for labels in of_operands)
    return _contracted(a, b, of_a, of_b, sizes)


register(_einsum, torch.einsum)
