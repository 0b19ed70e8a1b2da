"""What is not a number, or not finite, stays so: a norm of NaN makes every norm that depends on it NaN.

A rule's formula may lose it: softmax's value is 1 whatever its input's norm, a `where` may choose the other side.  So while a rule
runs, `Followed` watches which of its arguments' sizes its value would be NaN with; `spoiled` does it for the rest, in the one place
where rules are run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from thunder_norm.op_names import op_key

# What is NaN wherever one of its operands is.
_HAND_ON = frozenset(
    "add sub rsub mul div rdiv neg abs square sqrt rsqrt reciprocal exp exp2 expm1 log log1p log2 sin cos asin acos atan sinh cosh "
    "tanh asinh acosh atanh erf erfc sigmoid softplus relu hardsigmoid silu gelu lgamma special_erfcx special_ndtr special_log_ndtr special_i0e special_i1 special_i1e i0 "
    "maximum minimum clamp clamp_min clamp_max amax sum mean stack to clone detach double expand reshape view".split()
)
_ORDER = frozenset(("gt", "lt", "ge", "le", "eq"))  # False where one of their operands is NaN

_Names = frozenset[int]
_NONE: _Names = frozenset()


@functools.cache
def _key(func: Callable) -> Any:
    return op_key(func)


class Followed(TorchFunctionMode):
    """Follows 0-dim tensors through a formula: which of them make a result NaN if they are NaN."""

    def __init__(self, sizes: Iterable[torch.Tensor]):
        super().__init__()
        # with the tensors, which keeps their ids their own
        self._reached: dict[int, tuple[torch.Tensor, _Names]] = {id(n): (n, frozenset((id(n),))) for n in sizes}
        self._false_at: dict[int, tuple[torch.Tensor, _Names]] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is bool or not isinstance(result, torch.Tensor):
            return result
        key = _key(func)
        if key in _HAND_ON:
            found = self._of_any(args)
        elif key == "pow" and isinstance(args[1], int | float) and args[1] != 0:  # x^0 is 1
            found = self._of(args[0])
        elif key == "where" and len(args) == 3:
            condition, a, b = args
            found = self._of(b) & (self._of(a) | self._false_at.get(id(condition), (None, _NONE))[1])
        elif key in _ORDER:
            if names := self._of_any(args):
                self._false_at[id(result)] = result, names
            return result
        else:
            return result
        if found:
            self._reached[id(result)] = result, found
        return result

    def _of(self, value: Any) -> _Names:
        return self._reached.get(id(value), (None, _NONE))[1]

    def _of_any(self, values: Iterable[Any]) -> _Names:
        found = _NONE
        for v in values:
            found |= self._of_any(v) if isinstance(v, list | tuple) else self._of(v)
        return found

    def makes_nan(self, n: torch.Tensor, result: torch.Tensor) -> bool:
        """Whether `result` is known to be NaN if `n` is."""
        return id(n) in self._of(result)


def spoiled(size: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """`size`, but NaN if n is NaN or infinite: what is true for all finite tensors need not be for infinity (its cosine)."""
    return size + (n - n)


def bounded(value: float | torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """A constant bound beside a norm n: it holds for infinite entries as well, and is NaN if n is."""
    return torch.where(n == n, value, n)
