"""Gradients of one function of torch's, where no transform looks on: by torch's autograd, without ``torch.func``.

Torch has kernels for whole layers (`torch.lstm`), of which ``torch.func`` differentiates the steps, in three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from thunder_norm.trees import flat_tensors

# A profile counts what a program does by running it on fakes: there it has to do what it does on tensors.
PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def records_alone() -> bool:
    """Whether torch's autograd may record what is done now, and nobody else does: no transform of ``torch.func``, no forward mode.

    In inference mode nothing is recorded.
    """
    return peek_interpreter_stack() is None and forward_ad._current_level < 0 and not torch.is_inference_mode_enabled()


def nothing_transforms(tree: Any) -> bool:
    """Whether torch's autograd `records_alone` what is done with the tensors in a tree.

    They are torch's own, without a history, and not of inference mode.
    """
    return records_alone() and all([type(t) in PLAIN and not (t.requires_grad or t.is_inference()) for t in flat_tensors(tree)])


def pulled_back(
    function: Callable[..., Sequence[torch.Tensor]], points: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """As ``torch.func.vjp(function, *points)[1](cotangents)``, while gradients are enabled: zeros where nothing depends on a point."""
    leaves = [t.detach().requires_grad_() for t in points]
    pairs = [(t, g) for t, g in zip(function(*leaves), cotangents, strict=True) if t.requires_grad]
    if not pairs:
        return tuple(map(torch.zeros_like, points))
    results, received = zip(*pairs, strict=True)
    return torch.autograd.grad(results, leaves, received, allow_unused=True, materialize_grads=True)
