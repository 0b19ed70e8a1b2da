"""Operations that choose entries by their order, of a tensor some entries of which were set aside: what is left of it counts.

Whether enough entries are left is what the operation itself says of the mask: a largest entry of those that are left is 1, and so is
the k-th largest if there are k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core.context import run_real, values_of
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Lowered, Raised, fact, unconditional

Run = Callable[[Callable, tuple, dict[str, Any]], Any]


def run_on_values(op: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation on plain tensors that have values, which a trace need not have."""
    with _disable_current_modes():
        return op(*args, **kwargs)


def of_any_strides(method: Callable) -> Callable:
    """The same operation for tensors that may lie in memory otherwise than the program's own, where a view needs a copy."""
    return torch.Tensor.reshape if method is torch.Tensor.view else method


def is_set_somewhere(find: Callable[[Run, Any], torch.Tensor], mask: torch.Tensor) -> bool | torch.Tensor | None:
    """Whether what `find` makes of a mask is set somewhere: of one that a trace has no values of a tensor; None if nobody knows."""
    values = values_of(mask)
    if values.is_meta or isinstance(values, NormedTensor):
        return None
    if isinstance(values, FakeTensor):
        return run_real(torch.any, (find(run_real, mask),), {})
    return bool(run_on_values(torch.any, (find(run_on_values, values),), {}))


def less_unless(is_set: bool | torch.Tensor | None, size: torch.Tensor, less: torch.Tensor) -> torch.Tensor:
    """A size, or the lesser one where something is not set."""
    if isinstance(is_set, torch.Tensor):
        return torch.where(is_set, size, less)
    return less if is_set is False else size


def _missing(op: Callable, kind: type[Lowered | Raised], shape: torch.Size, args: tuple, kwargs: dict[str, Any]) -> Callable:
    """Where an operation would take entries that were set aside."""
    is_lowered = issubclass(kind, Lowered)

    def find(run: Run, mask: torch.Tensor) -> torch.Tensor:
        shown = run(torch.Tensor.expand, (mask, shape), {})
        if is_lowered:
            shown = run(torch.logical_not, (shown,), {})
        found = run(op, (run(torch.Tensor.to, (shown, torch.float32), {}), *args), kwargs)
        found = found[0] if isinstance(found, tuple) else found
        return run(torch.lt, (found, 1.0), {}) if is_lowered else run(torch.gt, (found, 0.0), {})

    return find


def entries_left(masked: Lowered | Raised, x: NormedTensor) -> NormedTensor:
    """The tensor that x was before some of its entries were set aside; its norm is NaN where that of x is."""
    before = masked.x.tensor()
    before.norm_size = before.norm_size + bounded(0.0, x.norm_size)
    return before


def of_those_left(
    op: Callable, x: NormedTensor, kind: type[Lowered | Raised], *args: Any, by: Callable | None = None, **kwargs: Any
) -> Any:
    """What an operation makes of the entries that were not set aside, if it takes none of the others; `by`: one that takes the same.

    At the data it moves as it does there, and is no larger than that.
    """
    masked = fact(x, kind)
    if masked is not None and set(masked.x.elem_dims) != set(
        x.elem_dims
    ):  # sensitivities would be to another norm than x moves in
        masked = None
    is_short = None if masked is None else is_set_somewhere(_missing(by or op, kind, x.shape, args, kwargs), masked.mask)
    if masked is None or is_short is None or is_short is True:
        return unconditional(op, x, *args, **kwargs)
    left = entries_left(masked, x)
    left.norm_size = less_unless(is_short, x.norm_size, left.norm_size)
    result = unconditional(op, left, *args, **kwargs)
    if not is_local(x):
        return result
    there = unconditional(op, x, *args, **kwargs)
    (size, *_), (made, *_) = (r if isinstance(r, tuple) else (r,) for r in (result, there))
    made.norm_size = torch.minimum(made.norm_size, size.norm_size)
    return there
