"""Sums, means and losses over what a mask selects, and operations on each of its rows, computed with all that it leaves out.

A program here takes the mask, then what the function takes, with all entries in the place of what is selected.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from thunder_norm.subclass.acquiring.arguments import value_of
from thunder_norm.subclass.interpreting.whole import beside, mean, total
from thunder.core.interpreter import WrappedValue, wrap_const
from thunder.core.proxies import TensorProxy

# -- over the selected entries, or rows -----------------------------------------------------------------------------------


def sum_over(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``x[mask].sum(0)``."""
    return torch.where(beside(mask, x), x, torch.zeros_like(x)).sum(tuple(range(mask.ndim)))


def mean_over(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``x[mask].mean(0)``; neither sum nor number need fit into a low precision."""
    dtype = x.dtype
    x = x.float() if dtype in (torch.float16, torch.bfloat16) else x
    return (sum_over(mask, x) / mask.sum().to(x.dtype)).to(dtype)


def logsumexp_over(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``x[mask].logsumexp(0)``."""
    return torch.where(beside(mask, x), x, torch.full_like(x, -math.inf)).logsumexp(tuple(range(mask.ndim)))


_OVER_ROWS: dict[str, Callable] = {"sum": sum_over, "mean": mean_over, "logsumexp": logsumexp_over}
_OVER_ALL: dict[str, Callable] = {"sum": lambda mask, x: total(x, mask), "mean": lambda mask, x: mean(x, mask)}

# -- losses -----------------------------------------------------------------------------------------------------------------

_ENTRYWISE = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
)  # fmt: skip


def _of_entries(loss: Callable) -> Callable:
    def reduced(mask: torch.Tensor, *args: Any, reduction: str = "mean", **kwargs: Any) -> torch.Tensor:
        each = loss(*args, **kwargs, reduction="none")
        return total(each, mask) if reduction == "sum" else mean(each, mask)

    return reduced


def _of_classes(loss: Callable) -> Callable:
    """Of rows of scores and a class for each: the mean is that over the weights of the classes, without those to ignore."""

    def reduced(
        mask: torch.Tensor,
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        **kwargs: Any,
    ) -> torch.Tensor:
        rows = input.flatten(0, mask.ndim - 1)
        if target.is_floating_point():  # probabilities
            each = loss(rows, target.flatten(0, mask.ndim - 1), weight=weight, reduction="none", **kwargs)
            found = total(each.reshape(mask.shape), mask)
            return found if reduction == "sum" else found / mask.sum().to(each.dtype)
        if target.ndim > mask.ndim:
            raise RuntimeError("0D or 1D target tensor expected, multi-target not supported")
        classes = torch.where(mask, target, torch.full_like(target, ignore_index)).flatten()
        each = loss(rows, classes, weight=weight, ignore_index=ignore_index, reduction="none", **kwargs)
        if reduction == "sum":
            return each.sum()
        counted = (classes != ignore_index).to(each.dtype)
        if weight is not None:
            counted = counted * weight[torch.where(classes == ignore_index, torch.zeros_like(classes), classes)]
        return each.sum() / counted.sum()

    return reduced


OF_CLASSES: dict[str, Callable] = {"cross_entropy": F.cross_entropy, "nll_loss": F.nll_loss}
LOSSES: dict[str, tuple[Callable, inspect.Signature]] = {
    **{f.__name__: (_of_entries(f), inspect.signature(f)) for f in _ENTRYWISE},
    **{name: (_of_classes(f), inspect.signature(f)) for name, f in OF_CLASSES.items()},
}


# -- on each row ------------------------------------------------------------------------------------------------------------

# with a dimension, or several, which are the second argument if they have no name
_ALONG_ROWS = frozenset("sum mean logsumexp softmax log_softmax amax amin cumsum".split())


def _along(name: str) -> Callable:
    return lambda mask, x, dim, **options: getattr(x, name)(dim=dim, **options)


# -- which one it is --------------------------------------------------------------------------------------------------------

NAMES = _ALONG_ROWS | LOSSES.keys()


class Reduction(NamedTuple):
    """What to run in the place of a call, after the mask, and whether it leaves rows that are selected."""

    program: Callable
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_along_rows: bool = False

    def operands(self, known: Container[str], dense_of: Callable) -> tuple[list[Any], dict[str, Any]] | None:
        """The arguments with all entries in the place of what is selected; None where that is not known, or another tensor meets them.

        Args:
            known: the names of what stands for what is selected.
            dense_of: all entries, or None.
        """

        def operand(argument: WrappedValue, name: str | None = None) -> WrappedValue | None:
            if not isinstance(argument.value, TensorProxy) or name == "weight":
                return argument
            return dense_of(argument) if argument.value.name in known else None

        args, kwargs = [operand(a) for a in self.args], {n: operand(a, n) for n, a in self.kwargs.items()}
        return None if any(v is None for v in (*args, *kwargs.values())) else (args, kwargs)


def reduction_of(
    name: str, num_own_dims: int, args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]
) -> Reduction | None:
    """What to run for a call of a function, by its name; None where the size of what is selected decides more than a sum's.

    Args:
        name: of `NAMES`.
        num_own_dims: how many dimensions an entry of the mask selects at once.
        args: what it is called with.
        kwargs: its named arguments.
    """
    if name in LOSSES:
        return _loss(name, num_own_dims, args, kwargs)
    x, *rest = args
    options = dict(kwargs)
    if len(rest) > 1 or (rest and "dim" in options):
        return None
    dim = rest[0] if rest else options.pop("dim", None)
    if dim is None or dim.value is None:
        return None if options or name not in _OVER_ALL else Reduction(_OVER_ALL[name], (x,), {})
    dims = _dims_of_rows(value_of(dim), num_own_dims)
    if dims == (0,):
        return None if options or name not in _OVER_ROWS else Reduction(_OVER_ROWS[name], (x,), {})
    if dims is None:
        return None
    return Reduction(_along(name), (x, wrap_const(dims[0] if len(dims) == 1 else dims)), options, True)


def _loss(name: str, num_own_dims: int, args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]) -> Reduction | None:
    program, signature = LOSSES[name]
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # torch says why
        return None
    is_old = any(given.pop(n).value is not None for n in ("size_average", "reduce") if n in given)
    reduction = given["reduction"].value if "reduction" in given else "mean"
    if is_old or reduction not in ("mean", "sum") or (name in OF_CLASSES and num_own_dims != 1):
        return None
    return Reduction(program, (), given)


def _dims_of_rows(dim: Any, num_own_dims: int) -> tuple[int, ...] | None:
    """Dimensions of what a mask selects, counted from the end, if all are of its rows; (0,) where they are the selected rows; else None."""
    dims = tuple(dim) if isinstance(dim, list | tuple) else (dim,)
    if not dims or not all(type(d) is int for d in dims):
        return None
    from_end = tuple(d - num_own_dims - 1 if d >= 0 else d for d in dims)
    if from_end == (-num_own_dims - 1,):
        return (0,)
    return from_end if all(-num_own_dims <= d < 0 for d in from_end) else None
