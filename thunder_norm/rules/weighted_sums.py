"""Which results are sums by weights, and of what: from what is known of the arguments, operation by operation (`_combinations`).

Weights are tensors whose entries are not negative.  A rule here says nothing of norms; `weighted_means` has the quotients that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules import _weights as terms
from thunder_norm.rules._combinations import (
    Combination,
    InverseOfWeights,
    Sums,
    Weights,
    added,
    as_combinations,
    both,
    combinations_of,
    facts,
    is_zero,
    joined,
    weighted,
    weights_of,
)
from thunder_norm.rules._forms import reaxed
from thunder_norm.rules._shared import dims_tuple, negative
from thunder_norm.rules._weights import Term
from thunder_norm.rules.einsum import equation_labels
from thunder_norm.rules.ranges import argument
from thunder_norm.rules.ranges_of_activations import is_zero_constant

_FEW = 4  # of what is known about one tensor
Found = tuple[Sums, ...]
Rule = Callable[[tuple, Mapping[str, Any], NormedTensor], Found]


def _register(rule: Rule, *ops: Callable) -> None:
    for op in ops:
        normed_op(op).register_sums(rule)


def _input(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    return argument(args, kwargs, 0, "input", "self")


def _pair(args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    return _input(args, kwargs), argument(args, kwargs, 1, "other", "mat2", "vec")


def _few(found: Iterable[Sums]) -> Found:
    return tuple(found)[:_FEW]


# -- products and sums ----------------------------------------------------------------------------------------------------


def _product(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    a, b = _pair(args, kwargs)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        x, c = (a, b) if isinstance(a, torch.Tensor) else (b, a)
        return _multiple(x, c) if isinstance(c, int | float) else ()
    found: list[Sums] = []
    of_a, of_b = list(weights_of(a)), list(weights_of(b))
    for weights, x in ((of_a, b), (of_b, a)):
        if isinstance(x, NormedTensor) and not is_zero(x):
            found += [c for w in weights for c in weighted(w, x, out.shape) if w.term != terms.ZERO]
    found.sort(key=lambda c: -len(c.term.factors) if isinstance(c, Combination) else 0)
    return _few([*(both(v, w) for v in of_a[:1] for w in of_b[:1]), *found])


def _multiple(x: Any, c: float) -> Found:
    """c times what is known, for a number; of weights only where it is not negative."""
    found: list[Sums] = []
    for f in facts(x):
        if isinstance(f, Combination):
            found.append(replace(f, parts=tuple((source, factor * abs(c)) for source, factor in f.parts)))
        elif c > 0 and isinstance(f, Weights):
            found.append(replace(f, term=terms.multiple(f.term, c)))
        elif isinstance(f, InverseOfWeights):
            found.append(replace(f, scale=f.scale * abs(c)))
    return _few(found)


def _sum(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    a, b = _pair(args, kwargs)
    if argument(args, kwargs, 2, "alpha", default=1) != 1:
        return ()
    for x, c in ((a, b), (b, a)):
        if isinstance(c, int | float) and not isinstance(c, bool):
            return _few(replace(w, is_exact=False) for w in weights_of(x, exactly=False)) if c >= 0 else ()
        if is_zero(x) and isinstance(c, NormedTensor) and c.shape == out.shape:
            return _few(_all(c))
    if a.shape != b.shape:
        return ()
    found: list[Sums] = [joined(v, w, out.shape) for v in combinations_of(a) for w in combinations_of(b)]
    return _few([*found, *(added(v, w) for v in weights_of(a, exactly=False) for w in weights_of(b, exactly=False))])


_register(_product, torch.mul)
_register(_sum, torch.add)


def _quotient(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    a, b = _pair(args, kwargs)
    if kwargs.get("rounding_mode") is not None:
        return ()
    if isinstance(b, int | float):
        return _multiple(a, 1 / b) if b else ()
    return _inverse_of(b, abs(a)) if isinstance(a, int | float) else ()


def _inverse_of(x: Any, scale: float) -> Found:
    return _few(InverseOfWeights(w, scale) for w in weights_of(x, exactly=False))


_register(_quotient, torch.div)
_register(lambda args, kwargs, out: _inverse_of(_input(args, kwargs), 1.0), torch.reciprocal)


def _at_least(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """The larger of weights and a number: at least the weights."""
    if argument(args, kwargs, 2, "max") is not None:
        return ()
    return _few(replace(w, is_exact=False) for w in weights_of(_input(args, kwargs), exactly=False))


_register(_at_least, torch.clamp, torch.clamp_min)


def _averaged(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """A mean over dimensions."""
    share = out.numel() / max(_input(args, kwargs).numel(), 1)
    return tuple(
        replace(f, term=terms.multiple(f.term, share))
        for f in _over_dims(args, kwargs, out)
        if not isinstance(f, InverseOfWeights)
    )


def _over_dims(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """A sum over dimensions."""
    x = _input(args, kwargs)
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
    return _few([*found, *(replace(w, term=summed(w.term)) for w in weights_of(x, exactly=False))])


_register(_over_dims, torch.sum)
_register(_averaged, torch.mean)


def _kept(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """Entries of a tensor that is not negative, or multiples of them, and zeros: they move by the same share of themselves."""
    value = argument(args, kwargs, 2, "value", default=0.0)
    shares = [w.relative for w in weights_of(_input(args, kwargs), exactly=False)]
    return (Weights(terms.of_tensor(out), shares[0]),) if shares and value == 0 else ()


_register(_kept, torch.masked_fill)
_register(lambda args, kwargs, out: _kept(args[:1], {"input": kwargs.get("input")}, out), torch.tril, torch.triu, F.dropout)


# -- sums of products -----------------------------------------------------------------------------------------------------

Labels = list[int | str]


def _contracted(a: Any, b: Any, of_a: Labels, of_b: Labels, sizes: Mapping[str, int]) -> Found:
    """The sum of products over the labels that have a size."""
    found: list[Sums] = []
    for x, y, of_x, of_y in ((a, b, of_a, of_b), (b, a, of_b, of_a)):
        for w in weights_of(x):
            if isinstance(y, NormedTensor) and w.term != terms.ZERO:
                found += [_sum_of_products(w, c, y, of_x, of_y, sizes) for c in as_combinations(y)]
    for v in list(weights_of(a, exactly=False))[:2]:
        for w in list(weights_of(b, exactly=False))[:2]:
            product = both(v, w)
            found.append(replace(product, term=terms.contracted(v.term, w.term, of_a, of_b, sizes)))
    found.sort(key=lambda c: -len(c.term.factors) if isinstance(c, Combination) else -99)
    return _few(found)


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


_register(_matrices, torch.matmul, torch.bmm, torch.mm)


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


_register(_einsum, torch.einsum)


# -- the same numbers at other places -------------------------------------------------------------------------------------


def placed(x: Any, place: Mapping[int, int]) -> Found:
    """What is known of x, whose dimension d is the result's `place[d]`; one that is gone has size 1."""
    found: list[Sums] = []
    for f in _all(x):
        if isinstance(f, InverseOfWeights):
            found.append(replace(f, weights=replace(f.weights, term=f.weights.term.relabelled(place))))
        elif isinstance(f, Combination):
            dims = tuple(place[d] for d in f.elem_dims if d in place)
            found.append(replace(f, term=f.term.relabelled(place), elem_dims=dims))
        else:
            found.append(replace(f, term=f.term.relabelled(place)))
    return _few(found)


def _all(x: Any) -> list[Sums]:
    """Everything that is known of a tensor, as weights too."""
    return [*(f for f in facts(x) if not isinstance(f, Weights)), *weights_of(x, exactly=False)]


def _same(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    return _few(_all(_input(args, kwargs)))


_register(
    _same,
    torch.clone,
    torch.detach,
    torch.Tensor.contiguous,
    torch.Tensor.to,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.type_as,
)


def _by_layout(layout: Sequence[int | None]) -> dict[int, int]:
    return {d: i - len(layout) for i, d in enumerate(layout) if d is not None}


def _unsqueezed(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    x = _input(args, kwargs)
    return placed(x, _by_layout(ed.with_new(x.ndim, argument(args, kwargs, 1, "dim"))))


def _reshaped(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """Where only dimensions of size 1 come and go; also by an index that only adds some."""
    x = _input(args, kwargs)
    axes = reaxed(tuple(ed.every(x.ndim)), x.shape, out.shape)
    return () if axes is None else placed(x, _by_layout(axes))


def _indexed(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """An index that only adds dimensions, or chooses along one."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if all(i is None or i is Ellipsis or isinstance(i, slice) and i == slice(None) for i in index):
        return _reshaped(args, kwargs, out)
    if len(index) == 1 and isinstance(index[0], torch.Tensor) and index[0].ndim == 1 and index[0].dtype == torch.int64:
        return _mapped(args[0], ("entries", id(index[0])), index[0], -args[0].ndim, out)
    return ()


def _permuted(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    x = _input(args, kwargs)
    dims = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:] or kwargs["dims"]
    return placed(x, _by_layout([negative(d, x.ndim) for d in dims]))


def _transposed(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    x = _input(args, kwargs)
    first, second = (
        negative(argument(args, kwargs, i, name, default=d), x.ndim) for i, name, d in ((1, "dim0", -2), (2, "dim1", -1))
    )
    layout = list(ed.every(x.ndim))
    layout[first], layout[second] = layout[second], layout[first]
    return placed(x, _by_layout(layout))


def _expanded(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """Copies along dimensions are no other numbers."""
    return _few(_all(_input(args, kwargs)))


_register(_unsqueezed, torch.unsqueeze)
_register(_reshaped, torch.squeeze, torch.Tensor.view, torch.reshape)
_register(_indexed, torch.Tensor.__getitem__)
_register(_permuted, torch.permute)
_register(_transposed, torch.transpose, torch.Tensor.mT.__get__)
_register(_expanded, torch.Tensor.expand, torch.broadcast_to, torch.Tensor.expand_as)


# -- linear maps along one dimension --------------------------------------------------------------------------------------


def _mapped(x: Any, key: Hashable, keeps: Any, dim: int, out: NormedTensor) -> Found:
    """A linear map along one dimension whose coefficients are not negative."""

    def image(term: Term) -> Term:
        return terms.mapped(term, key, keeps, dim)

    found: list[Sums] = []
    for c in combinations_of(x):
        c = c.over(tuple(d for d in c.elem_dims if d != dim), x.shape)
        found.append(replace(c, term=image(c.term)))
    return _few([*found, *(replace(w, term=image(w.term)) for w in weights_of(x, exactly=False))])


def _cumulative(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    x = _input(args, kwargs)
    return _mapped(x, ("cumsum",), None, negative(argument(args, kwargs, 1, "dim"), x.ndim), out)


def _chosen(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    x, index = _input(args, kwargs), argument(args, kwargs, 2, "index")
    return _mapped(x, ("entries", id(index)), index, negative(argument(args, kwargs, 1, "dim"), x.ndim), out)


def _added_at(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Found:
    """Rows added to zeros at indices."""
    x, dim, index, source = (argument(args, kwargs, i, n) for i, n in enumerate(("input", "dim", "index", "source")))
    if kwargs.get("alpha", 1) != 1 or not (is_zero(x) or is_zero_constant(x)):
        return ()
    dim = negative(dim, x.ndim)
    return _mapped(source, ("added", id(index), x.shape[dim]), index, dim, out)


_register(_cumulative, torch.cumsum)
_register(_chosen, torch.index_select)
_register(_added_at, torch.index_add)
