"""Operations of torch's whose results have sizes that are values: how many entries of a mask are true, how many numbers differ.

A trace has numbers for sizes.  So what stands in a log, and in the trace, for such an operation takes the sizes that its results are to
have, and checks them whenever it runs; see `data_sizes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.errors import DataDependentError, with_details
from thunder_norm.op_names import identifier
from thunder_norm.trees import flat_tensors

Sizes = tuple[tuple[int, ...], ...]


class OtherSizesError(DataDependentError):
    """An operation returns tensors of other sizes than the trace was acquired with."""


@dataclass(frozen=True)
class Sized:
    """An operation with the sizes of its results as its first argument."""

    func: Any
    dtypes: tuple[torch.dtype, ...]  # of its results

    @property
    def __name__(self) -> str:
        named = "_".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        own = str(self.func) if isinstance(self.func, torch._ops.OpOverload) else self.func.__name__
        return identifier(f"{own}_{named}")

    @property
    def tags(self) -> Any:
        """Those that torch has for the operation."""
        return getattr(self.func, "tags", ())

    def __call__(self, sizes: Sizes, *args: Any, **kwargs: Any) -> Any:
        """Run the operation; of tensors without data, what it is known to return.

        Raises:
            OtherSizesError: the results have other sizes.
        """
        given = flat_tensors((args, kwargs))
        if any(isinstance(t, FakeTensor) for t in given):
            return tuple([given[0].new_empty(s, dtype=dtype) for s, dtype in zip(sizes, self.dtypes, strict=True)])
        result = self.func(*args, **kwargs)
        found = sizes_of(result)
        if found != tuple(map(tuple, sizes)):
            raise OtherSizesError(
                with_details(
                    f"{self.func} returns tensors of sizes {list(map(list, found))}",
                    expected=f"{list(map(list, sizes))}, as the prologue of the trace found them",
                    why="the operations before it gave other numbers there, by rounding perhaps, or a tensor was changed meanwhile",
                )
            )
        return result


# their first argument is what is selected from, whatever it holds
_SELECT = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.repeat_interleave.self_Tensor,
    torch.Tensor.__getitem__,
    torch.masked_select,
    torch.Tensor.masked_select,
)


def like(first: Any, func: Any) -> Any:
    """What stands for the first argument of an operation where only sizes are asked for: a zero for all of what is selected from."""
    if func not in _SELECT:
        return first
    with _disable_current_modes():
        return torch.zeros((), dtype=first.dtype, device=first.device).expand(first.shape)


def sizes_of(result: Any) -> Sizes:
    """The sizes of all tensors that an operation returned."""
    return tuple([tuple(t.shape) for t in flat_tensors(result)])
