"""Normalizations whose gain comes before the division.

    self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)
    self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

Python multiplies first: what is divided is a product of two tensors, one of which is of the x that the divisor is the length of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import run_real
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import is_local, is_within
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, every_fact, ruled
from thunder_norm.rules._shared import broadcast
from thunder_norm.rules.written_out import _forms as forms
from thunder_norm.rules.written_out._derived import facts_of, normalization
from thunder_norm.rules.written_out._forms import ENTRY, Form, Inverse, Normalized, Root


@dataclass(frozen=True, eq=False)
class _Gained:
    """A fact: the product, entry by entry, of a tensor and a gain, which may have been a parameter or a plain constant."""

    of: Source
    gain: Source


def _gained(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Any:
    factors = [t for t in (*args, *kwargs.values()) if isinstance(t, RMSTensor)]
    if len(factors) != 2 or factors[0] is factors[1] or not isinstance(out._facts, Alternatives | None):
        return out._facts
    a, b = map(Source.of, factors)
    pairs = [_Gained(a, b), _Gained(b, a)]
    return Alternatives((*every_fact(out), *pairs))


normed_op(torch.mul).register_fact(_gained)


@dataclass(frozen=True, eq=False)
class _Found:
    """A gain times a normalization: of what, by which operation with what."""

    normalized: Normalized
    of: Source
    gain: torch.Tensor


def _factors(product: torch.Tensor) -> Iterator[tuple[Source, torch.Tensor]]:
    """What a product may be a gain times of, and the gain."""
    for f in every_fact(product):
        if isinstance(f, _Gained):
            yield f.of, f.gain.moving()


def _forms_of(x: Source) -> Iterator[Form]:
    if issubclass(x.kind, RMSTensor):
        yield from (f for f in x.facts if isinstance(f, Form))
        yield Form(x, {ENTRY: 1.0}, None, ed.every(x.backing.ndim))


def _with_gain(product: torch.Tensor, divisor: torch.Tensor, inverses: Iterable[Inverse]) -> _Found | None:
    """The normalization that a product and an inverse are; None for others."""
    for inverse in inverses:
        for of, gain in _factors(product):
            for form in _forms_of(of):
                found = forms.quotient(form, inverse)
                if found and broadcast(of.backing.shape, divisor.shape) == tuple(found.root.x.backing.shape):
                    return _Found(found, of, gain)
    return None


def _over(input: torch.Tensor, other: torch.Tensor) -> _Found | None:
    """Of a product over a length."""
    return _with_gain(input, other, [Inverse(f, 1.0) for f in facts_of(other) if isinstance(f, Root)])


def _by(product: torch.Tensor, inverse: torch.Tensor) -> _Found | None:
    """Of a product times the inverse of a length."""
    return _with_gain(product, inverse, [f for f in facts_of(inverse) if isinstance(f, Inverse)])


def _times_gain(op: Callable, found: _Found | None, other: NormedTensor) -> NormedTensor:
    """The normalization times the gain: as any product of the two, of which neither is made from the other."""
    names = "input", "other"
    assert found is not None, "as the condition says"
    normalized, x = normalization(found.normalized, names), found.normalized.root.x
    looks = is_within() or is_local(x.moving())
    values = run_real(op, (found.of.backing, other.backing), {}) if looks else x.backing
    given = type(normalized)._wrap(values, normalized.norm_size, normalized.perturbation_size, normalized.elem_dims)
    product = ruled(torch.mul, (given, found.gain), {})
    assert product is not None, "the two had a product before"
    result, moved = product
    out = type(result)._wrap(None, result.norm_size, moved, result.elem_dims)  # type: ignore[arg-type]
    out._sensitivity = dict.fromkeys(names, 0)
    return out


@normed_op(torch.div).register_norm(when=lambda args: _over(args["input"], args["other"]) is not None)
def div(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """g x / (length of x): the gain times the normalization, see `normalized`."""
    return _times_gain(torch.div, _over(input, other), other)


@normed_op(torch.mul).register_norm(when=lambda args: _by(args["input"], args["other"]) is not None)
def mul(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """g x / (length of x), by the inverse of the length: the gain times the normalization, see `normalized`."""
    return _times_gain(torch.mul, _by(input, other), other)


@normed_op(torch.mul).register_norm(when=lambda args: _by(args["other"], args["input"]) is not None)
def inverse_mul(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """The same in the other order."""
    return _times_gain(torch.mul, _by(other, input), input)
