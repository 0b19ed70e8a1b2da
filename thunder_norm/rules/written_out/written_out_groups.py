"""Normalizations written out: any program that computes ``x / sqrt(mean x^2 + eps)``, however it is spelled.

    x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + eps)
    x / torch.einsum("...d,...d->...", x, x)[..., None].sqrt().clamp(min=eps)

Op by op this has no useful bound: a norm says nothing about how small a mean square is, and a quotient forgets that both parts
come from one x.  So each operation here and in `written_out_means` says which function of x its result is, as far as that is a
polynomial of x and of its means over groups, a root of one, or an inverse of that (`_forms`), and the quotient's bound follows
from what it is.  Where the chain is broken, the facts are gone and the general rules apply.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.ranges import nearest
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import unconditional
from thunder_norm.rules._shared import Number, broadcast
from thunder_norm.rules.written_out import _forms as forms
from thunder_norm.rules.written_out._derived import Derived, Known, derivations, derives, with_facts
from thunder_norm.rules.written_out._forms import Averaged, Form, Group, Inverse, Normalized, Reshaped, Root

# -- polynomials ----------------------------------------------------------------------------------------------------------


@derives(torch.square)
def square(input: Known) -> Derived:
    """x^2: as every square, and what it is of x."""
    if input.root is not None:
        return forms.squared(input.root)
    return None if input.form is None else forms.product(input.form, input.form)


@normed_op(torch.mul).register_norm(when=lambda args: args["input"] is args["other"])
def mul_self(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """x x: as a square; half of its sensitivity belongs to each factor."""
    result = unconditional(torch.square, input)
    half = (result._sensitivity or {})["input"] * 0.5
    result._sensitivity = {"input": half, "other": half}
    return with_facts(result, derivations(square, input))


@derives(torch.mul)
def mul(input: Known, other: Known) -> Derived:
    """A product of two functions of one x; of x and an inverse of its length, see `normalized`."""
    for a, b in ((input, other), (other, input)):
        if a.form is not None and b.inverse is not None:
            return _quotient(a, b.inverse, b)
    if input.form is None or other.form is None:
        return None
    return _fits(forms.product(input.form, other.form), input, other)


def _fits(f: Form | None, *operands: Known) -> Form | None:
    """f, unless broadcasting has made more of its entries than x has."""
    if f is None or f.is_of_groups or broadcast(*(t.shape for t in operands)) == tuple(f.x.backing.shape):
        return f
    return None


def _quotient(x: Known, inverse: Inverse, divisor: Known) -> Normalized | None:
    found = None if x.form is None else forms.quotient(x.form, inverse)
    return found if found and broadcast(x.shape, divisor.shape) == tuple(found.root.x.backing.shape) else None


@derives(torch.div)
def div(input: Known, other: Known) -> Derived:
    """x over a function of it that is its length, see `normalized`."""
    return None if other.root is None else _quotient(input, Inverse(other.root, 1.0), other)


@derives(torch.mul)
def mul_number(input: Known, other: Number) -> Derived:
    """c x: as every multiple, and that it is one."""
    return _multiple(input.fact, float(other))


@derives(torch.mul)
def number_mul(input: Number, other: Known) -> Derived:
    """c x: as every multiple, and that it is one."""
    return _multiple(other.fact, float(input))


@derives(torch.div)
def div_number(input: Known, other: Number) -> Derived:
    """x / c: as every multiple, and that it is one."""
    return _multiple(input.fact, 1 / other) if other else None


@derives(torch.neg)
def neg(input: Known) -> Derived:
    """-x: as every multiple, and that it is one."""
    return _multiple(input.fact, -1.0)


def _multiple(f: Group | Reshaped, c: float) -> Group | None:
    if isinstance(f, Form | Averaged):
        return forms.multiple(f, c)
    if isinstance(f, Inverse):
        return replace(f, scale=f.scale * c)
    return replace(f, scale=f.scale * c) if isinstance(f, Root) and c > 0 else None


@derives(torch.add)
def add(input: Known, other: Known, alpha: Number = 1) -> Derived:
    """a + c b, for two functions of one x: as every sum, and what it is."""
    return _sum(input, other, float(alpha))


@derives(torch.sub)
def sub(input: Known, other: Known, alpha: Number = 1) -> Derived:
    """a - c b, for two functions of one x: as every sum, and what it is."""
    return _sum(input, other, -float(alpha))


@derives(torch.rsub)
def rsub(input: Known, other: Known, alpha: Number = 1) -> Derived:
    """b - c a, for two functions of one x: as every sum, and what it is."""
    return _sum(other, input, -float(alpha))


def _sum(a: Known, b: Known, scale: float) -> Derived:
    if a.form is None or b.form is None:
        return None
    return _fits(forms.total(a.form, b.form, scale), a, b)


@derives(torch.add)
def add_number(input: Known, other: Number, alpha: Number = 1) -> Derived:
    """f + c: as every sum, and what it is of x."""
    return _shifted(input, float(other * alpha), 1.0)


@derives(torch.add)
def number_add(input: Number, other: Known, alpha: Number = 1) -> Derived:
    """c + f: as every sum, and what it is of x."""
    return _shifted(other, float(input), float(alpha))


@derives(torch.sub)
def sub_number(input: Known, other: Number, alpha: Number = 1) -> Derived:
    """f - c: as every sum, and what it is of x.

    Gap:         as the last step of a program of two tensors (a density) it has the bound of the whole
    """
    return _shifted(input, -float(other * alpha), 1.0)


@derives(torch.rsub)
def rsub_number(input: Known, other: Number, alpha: Number = 1) -> Derived:
    """c - f: as every sum, and what it is of x."""
    return _shifted(input, float(other), -float(alpha))


def _shifted(x: Known, c: float, scale: float) -> Derived:
    scaled, c = _multiple(x.fact, scale), _in_dtype(c, x)
    if isinstance(scaled, Root):
        return forms.root_plus(scaled, c)
    return forms.shifted(scaled, c) if isinstance(scaled, Form) else None


def _in_dtype(c: float, x: Known) -> float:
    """A number as x's dtype has it beside 0, where a small one is 0."""
    return c if nearest(c, x.dtype) else 0.0


@derives(torch.pow)
def pow(input: Known, exponent: Number) -> Derived:
    """Squares and cubes, roots and inverses of functions of x."""
    if exponent == 2:
        return square(input)
    if exponent == 3 and input.form is not None:
        twice = forms.product(input.form, input.form)
        return None if twice is None else forms.product(twice, input.form)
    if exponent == 0.5:
        return _root(input)
    if exponent == -0.5:
        return _inverse(_root(input))
    return _inverse(input.root) if exponent == -1 else None


# -- roots and inverses ---------------------------------------------------------------------------------------------------


def _root(x: Known) -> Root | None:
    return None if x.form is None or not x.form.is_of_groups else forms.square_root(x.form)


def _inverse(root: Root | None) -> Inverse | None:
    return None if root is None else Inverse(root, 1.0)


@derives(torch.sqrt)
def sqrt(input: Known) -> Derived:
    """The root of a mean square: a length, which moves no more than x does."""
    return _root(input)


@derives(torch.rsqrt)
def rsqrt(input: Known) -> Derived:
    """1 / sqrt(mean x^2 + eps).  Value 1 / sqrt(eps), attained at x = 0."""
    return _inverse(_root(input))


@derives(torch.reciprocal)
def reciprocal(input: Known) -> Derived:
    """1 / a length of x."""
    return _inverse(input.root)


@derives(torch.clamp)
def clamp(input: Known, min: Number | None = None, max: Number | None = None) -> Derived:
    """A length, or a mean square, of at least a number."""
    return clamp_min(input, min) if max is None and min is not None else None


@derives(torch.clamp_min)
def clamp_min(input: Known, min: Number) -> Derived:
    """A length, or a mean square, of at least a number."""
    return None if min < 0 else forms.at_least(input.fact, _in_dtype(float(min), input))
