"""What random programs that write into wrappers are made of, and what is seen of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as the programs call it
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor


def r() -> torch.Tensor:
    """A random tensor, of the one shape that all inputs have."""
    return torch.randn(3, 3, dtype=torch.float64)


NAMES: dict[str, Any] = {"torch": torch, "F": F, "TwoTensor": TwoTensor, "WrapperSubclass": WrapperSubclass, "r": r}

# How an input is made; {x} is one before it, {p} a leaf that requires grad.
GIVEN = [
    "TwoTensor(r(), r())",
    "TwoTensor(r(), r())",
    "TwoTensor(r(), r())",
    "WrapperSubclass(r())",
    "TwoTensor(TwoTensor(r(), r()), TwoTensor(r(), r()))",
    "r()",
    "{x}",
    "{x}",
    "TwoTensor({x}.a, {x}.b)",
    "TwoTensor({x}.b, r())",
    "TwoTensor(r(), {x}.a)",
    "{x}.t()",
    "{x}[1:]",
    "{x}[:2]",
    "{x}.a",
    "{x}.detach()",
    "{p} * 1",
    "{p} * 2",
    "TwoTensor(r(), r()).requires_grad_()",
    "TwoTensor(r(), r()).requires_grad_()",
    "r().requires_grad_()",
]
# What gets a name: views, tensors inside, and results.
MAKES = [
    "{a}[0]",
    "{a}[1:]",
    "{a}[:, 1]",
    "{a}.t()",
    "{a}.view(-1)",
    "{a}.unsqueeze(0)",
    "{a}.chunk(2)[0]",
    "{a}.split(1)[1]",
    "{a}.unbind(0)[0]",
    "{a}.diagonal()",
    "{a}.expand(2, 3, 3)",
    "{a}.data",
    "{a}.detach()",
    "{a}.a",
    "{a}.b",
    "{a} * 2",
    "{a} * {b}",
    "{a}.clone()",
    "{a}.sin()",
    "{a}.view_as({b})",
    "{a}.reshape(9)",
    "TwoTensor({a}.detach(), {b}.detach())",
    "torch.empty_like({a}).copy_({b})",
]
# {t} is written into, {o} another one, {k} a number.
WRITES = [
    "{t}.mul_({k})",
    "{t}.add_({o})",
    "{t}.mul_({o})",
    "{t} += {o}",
    "{t}.copy_({o})",
    "{t}[0] = {k}",
    "{t}[0] *= {k}",
    "{t}[...] = {o}",
    "{t}[:, 0] = {o}[:, 1]",
    "{t}[0].copy_({o}[1])",
    "{t}.t().add_({o})",
    "{t}.zero_()",
    "{t}.fill_({k})",
    "{t}.clamp_(min={k})",
    "{t}.lerp_({o}, 0.3)",
    "{t}.data.mul_({k})",
    "{t}.data = {t}.data * {k}",
    "{t}.detach().sub_({o})",
    "{t}.a.mul_({k})",
    "{t}.b[0] = {k}",
    "{t}.a.copy_({o}.b)",
    "{t}.masked_fill_({t} > 0, {k})",
    "torch.mul({t}, {k}, out={t})",
    "torch.add({t}, {o}, out={t})",
    "torch._foreach_mul_([{t}], {k})",
    "F.relu({t}, inplace=True)",
    "torch.nn.init.constant_({t}, {k})",
    "{t}.index_add_(0, torch.tensor([0]), {o}[:1])",
    "{t}.requires_grad_()",
    "{t}.detach_()",
    "{t}.t_()",
    "{t}.unsqueeze_(0)",
]


def is_wrapper(x: Any) -> bool:
    """Whether a tensor is taken apart."""
    return hasattr(x, "__tensor_flatten__")


def inside(x: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors inside."""
    return [t for name in x.__tensor_flatten__()[0] for t in inside(getattr(x, name))] if is_wrapper(x) else [x]


def tensors_in(values: Iterable[Any]) -> bool:
    """Whether all are tensors."""
    return all(isinstance(v, torch.Tensor) for v in values)


def seen(t: torch.Tensor, with_history: bool = True) -> tuple:
    """Class, metadata and place in autograd of a tensor, and its values.

    Without gradients torch says of some views of what requires grad that they do.
    """
    values = [u.detach().clone() for u in inside(t)]
    return type(t).__name__, tuple(t.shape), t.dtype, (t.requires_grad, t.is_leaf) if with_history else None, values
