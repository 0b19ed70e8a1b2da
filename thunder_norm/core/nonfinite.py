"""What is not a number, or not finite, stays so: a norm of NaN makes every norm that depends on it NaN.

A rule's formula may lose it: softmax's value is 1 whatever its input's norm, a `where` may choose the other side.  So while a rule
runs, `Followed` watches which of its arguments' sizes its value would be NaN with; `spoiled` does it for the rest, in the one place
where rules are run.

And a formula may make it: infinity less infinity, or times 0.  Of numbers that is a bound that is not known, infinite: `settled`, in
the same place, wherever there are numbers to see.  In a trace there are none; `norms.overflow` refuses what is NaN at its end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from thunder_norm.op_names import op_key

P = ParamSpec("P")
R = TypeVar("R")

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
    """`size`, but n if that is NaN or infinite: what is true for all finite tensors need not be for infinity (its cosine)."""
    return torch.where(n < math.inf, size, n)


def bounded(value: float | torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """A constant bound beside a norm n: it holds for infinite entries as well, and is NaN if n is."""
    return torch.where(n == n, value, n)


class _Instead(torch.autograd.Function):
    """Another number in the place of one, with the derivatives of that: of ``0 * infinity`` by the 0 it is infinite."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return other.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*grads, None)


def has_values(t: torch.Tensor) -> bool:
    """Whether there are numbers to see in a tensor."""
    return not (t.is_meta or isinstance(t, FakeTensor) or is_functorch_wrapped_tensor(t))


def settled(size: torch.Tensor, given: Iterable[torch.Tensor], value: float = math.inf) -> torch.Tensor:
    """A size that was computed, but `value` where it is NaN although nothing given is; as it is where there are no numbers to see."""
    if not has_values(size) or not (math.isnan(size.item()) if size.ndim == 0 else bool(size.isnan().any())):
        return size
    known = torch.ones_like(size, dtype=torch.bool)
    for n in given:
        known = known & (n == n).all().to(size.device)
    with torch.no_grad():
        other = torch.where(known & (size != size), torch.full_like(size, value), size)
    return _Instead.apply(size, other)


BEYOND_FLOATS = (
    "a constant of its bound is larger than the largest float64, or a number divided by one that is smaller than the smallest"
)


def of_floats(f: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """What `f` says; nothing where a number on its way is beyond the largest float, which Python makes an error of."""
    try:
        return f(*args, **kwargs)
    except ArithmeticError:
        return None
