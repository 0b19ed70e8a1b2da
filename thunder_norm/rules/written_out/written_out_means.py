"""Normalizations written out: means, lengths and deviations over groups, and what leaves a function of x as it is."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, every_fact
from thunder_norm.rules._shared import dims_tuple
from thunder_norm.rules.layout.shape import inferred, sizes_of
from thunder_norm.rules.written_out import _forms as forms
from thunder_norm.rules.written_out._derived import Derived, Known, derives, facts_of
from thunder_norm.rules.written_out._forms import Averaged, Axes, Form, Inverse, Reshaped, Root

Dim = int | Sequence[int] | None


# -- means ----------------------------------------------------------------------------------------------------------------


def _of_groups(x: Known, dim: Dim, keepdim: bool, compute: Callable[[Form, ed.Dims], Any]) -> Form | None:
    """What is computed of groups of x's entries where these are in another shape."""
    f, dims = x.fact, dims_tuple(dim, x.ndim)
    axes = f.axes(dims, keepdim) if isinstance(f, Reshaped) else None
    if axes is None or not isinstance(f, Reshaped):
        return None
    found = compute(f.form, f.own(dims))
    return replace(found, axes=axes) if isinstance(found, Form) else None


def _mean(x: Known, dim: Dim, keepdim: bool) -> Form | Averaged | None:
    f = x.fact
    if isinstance(f, Reshaped):
        return _of_groups(x, dim, keepdim, lambda whole, dims: forms.mean(whole, dims, keepdim=True))
    return forms.mean(f, dims_tuple(dim, x.ndim), keepdim) if isinstance(f, Form | Averaged) else None


def _sum(x: Known, dim: Dim, keepdim: bool) -> Form | Averaged | None:
    """From the mean: so many times."""
    found = _mean(x, dim, keepdim)
    count = float(ed.numel(x.shape, dims_tuple(dim, x.ndim)))
    return None if found is None else forms.multiple(found, count)


def _sum_over(f: Form | Averaged | None) -> Form | None:
    """The sum over groups, from the mean of what is made of entries."""
    return forms.multiple(f, float(ed.numel(f.x.backing.shape, f.dims))) if isinstance(f, Form) and f.dims is not None else None


@derives(torch.mean)
def mean(input: Known, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Derived:
    """Mean over D of a function of x, or over others of such means.  Of x^2 the value is n^2, n the largest RMS over D."""
    return _mean(input, dim, keepdim)


@derives(torch.sum)
def sum(input: Known, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Derived:
    """Sum over D of a function of x: |D| times its mean."""
    return _sum(input, dim, keepdim)


def _length(x: Known, dim: Dim, keepdim: bool) -> Root | None:
    f = x.form
    if f is None or f.is_of_groups:
        return None
    square = forms.product(f, f)
    total = None if square is None else _sum_over(forms.mean(square, dims_tuple(dim, x.ndim), keepdim))
    return None if total is None else forms.square_root(total)


@derives(torch.linalg.vector_norm)
def vector_norm(
    input: Known, ord: float = 2, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Derived:
    """Euclidean length over D: as every norm, and of what."""
    return _length(input, dim, keepdim) if ord == 2 else None


@derives(torch.linalg.norm)
def linalg_norm(
    input: Known, ord: float | str | None = None, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Derived:
    """Euclidean length over D: as every norm, and of what."""
    is_vector = isinstance(dim, int) or dim is not None and len(dim) == 1
    return _length(input, dim, keepdim) if ord in (None, "fro") or ord == 2 and is_vector else None


@derives(torch.norm)
def norm(
    input: Known, p: float | str | None = "fro", dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Derived:
    """Euclidean length over D: as every norm, and of what."""
    return _length(input, dim, keepdim) if p in (None, "fro", 2) else None


def _variance(x: Known, dim: Dim, correction: float, keepdim: bool) -> Form | None:
    f = x.form
    if isinstance(x.fact, Reshaped):
        return _of_groups(x, dim, keepdim, lambda whole, dims: forms.variance(whole, dims, True, correction))
    if f is None or f.is_of_groups:
        return None
    return forms.variance(f, dims_tuple(dim, x.ndim), keepdim, correction)


def _deviation(x: Known, dim: Dim, correction: float, keepdim: bool) -> Root | None:
    found = _variance(x, dim, correction, keepdim)
    return None if found is None else forms.square_root(found)


def _register_variance(op: Callable, compute: Callable[..., Any], doc: str) -> None:
    """torch has three signatures: of a dimension and unbiased, of a dimension and correction, of unbiased alone."""

    def by_unbiased(input: Known, dim: Dim, unbiased: bool = True, keepdim: bool = False) -> Any:
        if isinstance(dim, bool):
            return compute(input, None, float(dim), False)
        return compute(input, dim, float(unbiased), keepdim)

    def of_all(input: Known, unbiased: bool = True) -> Any:
        return compute(input, None, float(unbiased), False)

    def by_correction(input: Known, dim: Dim = None, *, correction: float | None = 1, keepdim: bool = False) -> Any:
        return compute(input, dim, 1.0 if correction is None else float(correction), keepdim)

    for fn in (by_unbiased, of_all, by_correction):
        fn.__doc__, fn.__name__, fn.__qualname__ = doc, op.__name__, op.__name__
        derives(op)(fn)


def _with_mean(compute: Callable[..., Derived]) -> Callable[..., Any]:
    def pair(x: Known, dim: Dim, correction: float, keepdim: bool) -> tuple[Derived, Derived] | None:
        first = compute(x, dim, correction, keepdim)
        return None if first is None else (first, _mean(x, dim, keepdim))

    return pair


_register_variance(torch.var, _variance, "Variance over D: as every variance, and of what.")
_register_variance(torch.std, _deviation, "Standard deviation over D: as every deviation, and of what.")
_register_variance(torch.var_mean, _with_mean(_variance), "`var` and `mean`, and of what.")
_register_variance(torch.std_mean, _with_mean(_deviation), "`std` and `mean`, and of what.")


@derives(torch.einsum)
def einsum(equation: str, left: Known, right: Known) -> Derived:
    """Sums of products of two functions of x, entry by entry: "...d,...d->..."."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    labels = first.replace("...", "")
    is_along = first == second and len(set(labels)) == len(labels) and set(output.replace("...", "")) <= set(labels)
    if not is_along or left.form is None or right.form is None or not output:
        return None
    left_over = first
    for label in set(labels) - set(output):
        left_over = left_over.replace(label, "")
    if left_over != output:  # in another order, or beside another end of the ellipsis
        return None
    square = forms.product(left.form, right.form)
    if square is None or square.is_of_groups:
        return None
    # labels stand for dimensions from either end of the ellipsis
    before, _, after = first.partition("...")
    at = dict(zip(before, range(-left.ndim, 0), strict=False)) | dict(
        zip(reversed(after), range(-1, -left.ndim - 1, -1), strict=False)
    )
    return _sum_over(forms.mean(square, tuple(sorted(at[c] for c in labels if c not in output)), keepdim=False))


# -- what leaves it as it is ----------------------------------------------------------------------------------------------


@derives(torch.clone, torch.detach, torch.Tensor.contiguous, torch.ops.aten.alias.default, torch.alias_copy)
def copy(input: Known) -> Derived:
    """The same numbers: as every copy, and of what."""
    return input.fact


def _cast(x: Known, dtype: torch.dtype | None) -> Derived:
    """x as another dtype: the same function of x, a number of a group up to rounding."""
    found = x.fact
    bits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
    source, target = bits.get(x.dtype), bits.get(x.dtype if dtype is None else dtype)
    if source is None or target is None:
        return None
    if target >= source:
        return found
    slack = 1 / (1 - 2.0**-target)
    if isinstance(found, Inverse):
        return replace(found, root=replace(found.root, slack=found.root.slack * slack))
    return replace(found, slack=found.slack * slack) if isinstance(found, Root) else None


@derives(torch.Tensor.to, torch.ops.aten._to_copy.default)
def to(input: Known, *args: Any, **kwargs: Any) -> Derived:
    """x in another dtype or on another device: as every cast, and of what."""
    if any(isinstance(v, torch.Tensor) for v in (*args, *kwargs.values())):
        return None
    return _cast(input, next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)), None))


@derives(torch.Tensor.to, torch.Tensor.type_as, allow_plain_tensors="constant")
def type_as(input: Known, other: NormedTensor | torch.Tensor, *args: Any, **kwargs: Any) -> Derived:
    """x in the dtype of another tensor: as every cast, and of what."""
    return _cast(input, other.dtype)


@derives(torch.Tensor.type)
def type_of(input: Known, dtype: torch.dtype, **kwargs: Any) -> Derived:
    """x in another dtype: as every cast, and of what."""
    return _cast(input, dtype) if isinstance(dtype, torch.dtype) else None


@derives(torch.ops.prims.convert_element_type.default)
def convert_element_type(input: Known, dtype: torch.dtype) -> Derived:
    """x in another dtype: as every cast, and of what."""
    return _cast(input, dtype)


def _register_cast(name: str, dtype: torch.dtype) -> None:
    def rule(input: Known) -> Derived:
        return _cast(input, dtype)

    rule.__name__ = rule.__qualname__ = name
    rule.__doc__ = f"x as {dtype}: as every cast, and of what."
    derives(getattr(torch.Tensor, name))(rule)


for _name, _dtype in (("float", torch.float32), ("double", torch.float64), ("half", torch.float16), ("bfloat16", torch.bfloat16)):
    _register_cast(_name, _dtype)


# -- where its dimensions are ---------------------------------------------------------------------------------------------


def _placed(x: Known, axes: Axes | None) -> Derived:
    """The number of each group that x is, with x's dimensions at other places."""
    f = x.fact
    if axes is None or isinstance(f, Reshaped) or isinstance(f, Form) and not f.is_of_groups:
        return None
    return replace(f, root=replace(f.root, axes=axes)) if isinstance(f, Inverse) else replace(f, axes=axes)


def _axes(x: Known) -> Axes:
    """Where x's dimensions are, of which none is where some have become one."""
    return (None,) * x.ndim if isinstance(x.fact, Reshaped) else x.fact.axes


def _laid_out(x: Known, layout: Sequence[int | None]) -> Derived:
    return _placed(x, tuple(None if d is None else _axes(x)[d] for d in layout))


def _reshaped(x: Known, shape: Sequence[int]) -> Derived:
    if tuple(shape) == x.shape:
        return x.fact
    return _placed(x, forms.reaxed(_axes(x), x.shape, shape))


@derives(torch.unsqueeze)
def unsqueeze(input: Known, dim: int) -> Derived:
    """A number for each group, and which groups."""
    return _laid_out(input, ed.with_new(input.ndim, dim))


@derives(torch.squeeze)
def squeeze(input: Known, dim: Dim = None) -> Derived:
    """A number for each group, and which groups."""
    return _laid_out(input, ed.without(input.ndim, [d for d in dims_tuple(dim, input.ndim) if input.shape[d] == 1]))


@derives(torch.Tensor.view, torch.reshape)
def reshape(input: Known, *shape: Any, **named: Any) -> Derived:
    """A number for each group, and which groups, where only dimensions of size 1 come and go."""
    sizes = sizes_of(shape, named)
    if not all(isinstance(n, int) for n in sizes):
        return None
    return _reshaped(input, inferred(sizes, math.prod(input.shape)))


def _merged(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Any:
    if not args or not isinstance(args[0], RMSTensor) or not isinstance(out._facts, Alternatives | None):
        return out._facts
    of = [f for f in facts_of(args[0]) if isinstance(f, Form)] if out.ndim < args[0].ndim else []
    found = [r for f in of if (r := forms.merged(f, out.shape)) is not None]
    return Alternatives((*every_fact(out), *found)) if found else out._facts


for _op in (torch.Tensor.view, torch.reshape, torch.flatten):
    normed_op(_op).register_fact(_merged)


@derives(torch.Tensor.view_as, torch.Tensor.reshape_as, allow_plain_tensors="constant")
def reshape_as(input: Known, other: NormedTensor | torch.Tensor) -> Derived:
    """A number for each group, and which groups."""
    return _reshaped(input, tuple(other.shape))


@derives(torch.Tensor.__getitem__)
def getitem(input: Known, index: Any) -> Derived:
    """A number for each group, and which groups, where the index only adds dimensions."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is Ellipsis or isinstance(i, slice) and i == slice(None) for i in items):
        return None
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    left = input.ndim - builtins.sum(isinstance(i, slice) for i in items)
    items[at : at + 1] = [slice(None)] * left
    dims = iter(ed.every(input.ndim))
    return _laid_out(input, [None if i is None else next(dims) for i in items])


def _expanded(x: Known, shape: Sequence[int]) -> Derived:
    new = len(shape) - x.ndim
    own = zip(_axes(x), x.shape, shape[new:], strict=True)
    return _placed(x, (None,) * new + tuple(a if n == wanted else None for a, n, wanted in own))


@derives(torch.Tensor.expand, torch.broadcast_to)
def expand(input: Known, *size: Any, implicit: bool = False, **named: Any) -> Derived:
    """A number for each group, and which groups."""
    sizes = sizes_of(size, named)
    return _expanded(input, [input.shape[i - len(sizes)] if n == -1 else n for i, n in enumerate(sizes)])


@derives(torch.Tensor.expand_as, allow_plain_tensors="constant")
def expand_as(input: Known, other: NormedTensor | torch.Tensor) -> Derived:
    """A number for each group, and which groups."""
    return _expanded(input, tuple(other.shape))
