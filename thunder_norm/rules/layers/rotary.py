"""Rotary position embeddings written out: ``x * cos + rotate_half(x) * sin``, as in Llama.

Op by op the sum is one of two unrelated tensors, 1 + sqrt(2) times as large as x.  Here the halves of x remember what they are
halves of, and the sum is bounded as the block-diagonal map it is: a rotation of each pair of features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from thunder_norm.core.context import values_of
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, fact, is_plain, moves_with, unconditional, with_fact
from thunder_norm.rules._shared import rms


@dataclass(frozen=True, eq=False)
class Half:
    """A fact: the first or second half of x's last dimension, negated or not."""

    x: Source
    is_second: bool
    is_negated: bool = False


@dataclass(frozen=True, eq=False)
class Rotated:
    """A fact: ``cat((-x2, x1), -1)`` for the halves of x's last dimension."""

    x: Source


@dataclass(frozen=True, eq=False)
class Scaled:
    """A fact: x, or x rotated, times a plain tensor.  One of several: the product may be normalized, as what it is itself."""

    x: Source
    is_rotated: bool
    gain: torch.Tensor


def _which_half(index: Any, size: int) -> bool | None:
    """Whether an index takes the second half of a last dimension of `size`, or the first; None for other indices."""
    if not (isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice)) or size % 2:
        return None
    if not all(v is None or isinstance(v, int) for v in (index[1].start, index[1].stop, index[1].step)):
        return None
    return {(0, size // 2, 1): False, (size // 2, size, 1): True}.get(index[1].indices(size))


@normed_op(torch.Tensor.__getitem__).register_norm(
    when=lambda args: args["input"].ndim > 0 and _which_half(args["index"], args["input"].shape[-1]) is not None
)
def getitem_half(input: RMSTensor, index: Any) -> NormedTensor:
    """x[..., : d // 2] and x[..., d // 2 :]: as every slice, and which half it is."""
    is_second = bool(_which_half(index, input.shape[-1]))
    return with_fact(unconditional(torch.Tensor.__getitem__, input, index), Half(Source.of(input), is_second))


@normed_op(torch.neg).register_norm(when=lambda args: fact(args["input"], Half) is not None)
def neg_half(input: RMSTensor) -> NormedTensor:
    """-x: the same norm, and whose half it is."""
    half = fact(input, Half)
    assert half is not None, "the rule's condition has been checked"
    return with_fact(unconditional(torch.neg, input), replace(half, is_negated=not half.is_negated))


def _is_rotation(args: dict[str, Any]) -> bool:
    tensors, dim = args["tensors"], args["dim"]
    if len(tensors) != 2 or dim not in (-1, tensors[0].ndim - 1):
        return False
    second, first = (fact(t, Half) for t in tensors)
    if second is None or first is None:
        return False
    is_swapped = second.is_second and second.is_negated and not first.is_second and not first.is_negated
    return is_swapped and second.x.is_same(first.x)


@normed_op(torch.cat).register_norm(when=_is_rotation)
def cat_halves(tensors: list[RMSTensor], dim: int = 0) -> NormedTensor:
    """cat((-x2, x1), -1) of the halves of x.

    Value:        |x|    (an equality: the entries are x's)
    Sensitivity:  1 to x; the halves move with x only
    """
    half = fact(tensors[0], Half)
    assert half is not None, "the rule's condition has been checked"
    x = half.x.tensor()
    result = moves_with(half.x, rms(x.norm_size, x.elem_dims), 1)
    result._sensitivity = {"tensors": [0, 0]}
    return with_fact(result, Rotated(half.x))


def _scale(x: RMSTensor, gain: LinfTensor, result: NormedTensor) -> NormedTensor:
    rotated = fact(x, Rotated)
    if gain.perturbation_size is not None:
        return result
    source = Source.of(x) if rotated is None else rotated.x
    return with_fact(result, Alternatives([Scaled(source, rotated is not None, values_of(gain.backing))]))


@normed_op(torch.mul).register_norm(when=lambda args: is_plain(args["other"]))
def mul_plain(input: RMSTensor, other: LinfTensor) -> NormedTensor:
    """x times a plain tensor: as every gain, and which."""
    return _scale(input, other, unconditional(torch.mul, input, other))


@normed_op(torch.mul).register_norm(when=lambda args: is_plain(args["input"]))
def plain_mul(input: LinfTensor, other: RMSTensor) -> NormedTensor:
    """A plain tensor times x: as every gain, and which."""
    return _scale(other, input, unconditional(torch.mul, input, other))


def _is_rotary(kept: str, rotated: str) -> Callable[[dict[str, Any]], bool]:
    def condition(args: dict[str, Any]) -> bool:
        by_cos, by_sin = fact(args[kept], Scaled), fact(args[rotated], Scaled)
        if by_cos is None or by_sin is None or args["alpha"] != 1:
            return False
        is_pair = not by_cos.is_rotated and by_sin.is_rotated and by_cos.x.is_same(by_sin.x)
        # each pair of features is mixed: its norm must be one over both, and the gains must tell the two apart
        x, shape = by_cos.x, by_cos.x.backing.shape
        gains = by_cos.gain, by_sin.gain
        is_over_pairs = issubclass(x.kind, RMSTensor) and -1 in x.elem_dims and x.backing.ndim > 0
        if any(g.is_meta and not isinstance(g, FakeTensor) for g in gains):  # nobody knows what they are
            return False
        return is_pair and is_over_pairs and all(g.ndim <= len(shape) and g.ndim > 0 and g.shape[-1] == shape[-1] for g in gains)

    return condition


def _rotary(by_cos: Scaled, by_sin: Scaled) -> NormedTensor:
    """x * cos + rotate_half(x) * sin: the map [[c1, -s1], [s2, c2]] of each pair of features.

    Value:        s |x|, s^2 = max(c1^2 + s1^2, c2^2 + s2^2) + |c1 s2 - c2 s1|, 1 for a rotation    (attained then)
    Sensitivity:  s to x
    Source:       the squared singular values are those of M M^T: its diagonal plus its off-diagonal entry bounds them
    """
    x = by_cos.x.tensor()
    (c1, c2), (s1, s2) = (g.double().chunk(2, -1) for g in (by_cos.gain, by_sin.gain))
    diagonal = torch.maximum(c1.square() + s1.square(), c2.square() + s2.square())
    largest = (diagonal + (c1 * s2 - c2 * s1).abs()).amax().sqrt()
    return moves_with(by_cos.x, rms(x.norm_size * largest, x.elem_dims), largest, "input", "other")


def _facts_of(kept: NormedTensor, rotated: NormedTensor) -> tuple[Scaled, Scaled]:
    by_cos, by_sin = fact(kept, Scaled), fact(rotated, Scaled)
    assert by_cos is not None and by_sin is not None, "the rule's condition has been checked"
    return by_cos, by_sin


@normed_op(torch.add).register_norm(when=_is_rotary("input", "other"))
def add_rotated(input: RMSTensor, other: RMSTensor, alpha: int | float = 1) -> NormedTensor:
    """x * cos + rotate_half(x) * sin, see `_rotary`."""
    return _rotary(*_facts_of(input, other))


@normed_op(torch.add).register_norm(when=_is_rotary("other", "input"))
def rotated_add(input: RMSTensor, other: RMSTensor, alpha: int | float = 1) -> NormedTensor:
    """rotate_half(x) * sin + x * cos, see `_rotary`."""
    return _rotary(*_facts_of(other, input))
