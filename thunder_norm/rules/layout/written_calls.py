"""Calls that torch writes in others: operators with a number on their left, and what puts tensors or sequences beside each other.

A parameter alone keeps its norm through them: ``1 / self.scale``, ``2**self.log_scale``, ``torch.hstack([self.a, self.b])``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.programs import written_as
from thunder_norm.core.tensors import has_norm
from thunder_norm.padded_sequences import pad_sequence
from thunder_norm.rules._shared import by_norm


@written_as(torch.Tensor.__rtruediv__)
def over(self: torch.Tensor, other: Any) -> torch.Tensor:
    """``other / self``."""
    return self.reciprocal() * other


@written_as(torch.Tensor.__rpow__)
def to_the_power(self: torch.Tensor, other: Any) -> torch.Tensor:
    """``other ** self``."""
    return torch.pow(other, self)


@written_as(torch.addcdiv, when=by_norm(2, "tensor2"))
def add_quotient(input: torch.Tensor, tensor1: torch.Tensor, tensor2: torch.Tensor, *, value: float = 1) -> torch.Tensor:
    """``input + value * tensor1 / tensor2``, where values of the divisor are not known."""
    return input + value * (tensor1 / tensor2)


@written_as(torch.hstack)
def hstack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Beside each other: along the second dimension, or the only one."""
    rows = [t if t.ndim else t.unsqueeze(0) for t in tensors]
    return torch.cat(rows, 0 if rows[0].ndim == 1 else 1)


@written_as(torch.vstack, torch.row_stack)
def vstack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Below each other."""
    return torch.cat([t if t.ndim > 1 else t.reshape(1, -1) for t in tensors], 0)


@written_as(torch.column_stack)
def column_stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As columns beside each other."""
    return torch.cat([t if t.ndim > 1 else t.reshape(-1, 1) for t in tensors], 1)


def _is_of_integers_too(args: tuple, kwargs: dict) -> bool:
    tensors = args[0] if args else kwargs.get("tensors", ())
    return any(has_norm(t) for t in tensors) and not all(has_norm(t) for t in tensors)


def _of_one_dtype(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors])
    return [t if has_norm(t) else t.to(dtype) for t in tensors]


@written_as(torch.cat, when=_is_of_integers_too)
def cat_with_integers(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Beside integers or bools, a mask beside what it masks: as the numbers that torch makes of them."""
    return torch.cat(_of_one_dtype(tensors), dim)


@written_as(torch.stack, when=_is_of_integers_too)
def stack_with_integers(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """The same along a new dimension."""
    return torch.stack(_of_one_dtype(tensors), dim)


@written_as(torch.linalg.multi_dot)
def multi_dot(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The product of matrices, the first and the last perhaps vectors."""
    product = tensors[0]
    for t in tensors[1:]:
        product = product @ t
    return product


@written_as(torch.chain_matmul)
def chain_matmul(*matrices: torch.Tensor, out: None = None) -> torch.Tensor:
    """The product of matrices."""
    return multi_dot(matrices)


written_as(torch._C._nn.pad_sequence)(functools.partial(pad_sequence, F.pad, torch.stack))  # type: ignore[attr-defined]


@written_as(F.gumbel_softmax)
def gumbel_softmax(logits: torch.Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> torch.Tensor:
    """A softmax of logits and noise that nothing moves; the largest entry alone where it is `hard`, which moves as the softmax does."""
    noise = -torch.empty(logits.shape, dtype=logits.dtype, device=logits.device).exponential_().log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    largest = F.one_hot(soft.detach().argmax(dim), logits.shape[dim]).movedim(-1, dim).to(logits.dtype)
    return largest - soft.detach() + soft
