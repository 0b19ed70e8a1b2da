"""What the rules of several families need: scaling, alignment of operands, constants, and refusals.

A rule runs while a trace is built, so sizes are only ever touched by torch operations on 0-dim tensors; shapes and numbers
are Python's.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode, current_sensitivity, norm_counts
from thunder_norm.core.conversions import convert, factor
from thunder_norm.core.kinds import LEAST_SQUARE, L1Tensor, L2Tensor, LinfTensor, RMSTensor
from thunder_norm.core.nonfinite import has_values
from thunder_norm.core.registry import NormedOp, NormRule
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import JumpError, NormMismatchError
from thunder_norm.scalars import square_root, times

# The kinds whose norm depends on the moduli of the entries only, and grows with them.
VectorKind = RMSTensor | L1Tensor | L2Tensor
Constant = float | torch.Tensor
Number = int | float
Kind = TypeVar("Kind", bound=NormedTensor)


def per_dim(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """A setting of a window, a kernel or a stride, for each of `count` dimensions, given as one number or as several."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def spread(factor: float) -> float:
    """What moving between elem_dims costs: `factor` for the worst tensor, nothing in modes without a guarantee.

    Mode "typical" describes independent entries, whose RMS is the same over any dimensions; Modula declares sensitivity 1
    for splitting and merging heads.
    """
    return factor if current_mode() == "bound" else 1.0


def like(x: Kind, size: Constant, elem_dims: ed.Dims | None = None, **claims: Any) -> Kind:
    """A rule's result of x's kind, over `elem_dims` of the output (x's own if None)."""
    dims = x.elem_dims if elem_dims is None else elem_dims
    return type(x)(size, elem_dims=() if isinstance(x, LinfTensor) else dims, **claims)


def scaled(x: Kind, c: Constant, elem_dims: ed.Dims | None = None, name: str = "input") -> Kind:
    """The result of a map linear in x (or 1-homogeneous and Lipschitz): value ``c |x|``, sensitivity c."""
    return like(x, times(x.norm_size, c), elem_dims, sensitivity={name: c})


def rms(size: Constant, elem_dims: ed.Dims, **claims: Any) -> RMSTensor:
    """A rule's result, RMS over `elem_dims`; over none it is the largest entry."""
    return RMSTensor(size, elem_dims=elem_dims, **claims) if elem_dims else LinfTensor(size, elem_dims=(), **claims)


def root_sum_squares(*terms: torch.Tensor) -> torch.Tensor:
    """``sqrt(sum t^2)`` with derivative 0, not NaN, where all terms are 0."""
    square = terms[0].square()
    for t in terms[1:]:
        square = square + t.square()
    if has_values(square) and not LEAST_SQUARE < square.item() < math.inf:
        scale = max(t.item() for t in terms)
        if 0 < scale < math.inf and scale != 1:
            return root_sum_squares(*(t / scale for t in terms)) * scale
    return square_root(square)


def squarable(n: torch.Tensor) -> torch.Tensor:
    """A norm whose square is a float64: for ``n / sqrt(n^2 + eps)``, which is 1 long before and would become 0."""
    return n.clamp(max=1e150)


def with_bias(size: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The size of a result and a bias: their sum, or in mode "typical", where they are independent, ``sqrt(a^2 + b^2)``."""
    return root_sum_squares(size, bias) if current_mode() == "typical" else size + bias


def maximum(sizes: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest of several sizes."""
    largest = sizes[0]
    for size in sizes[1:]:
        largest = torch.maximum(largest, size)
    return largest


def scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """A constant size beside `like`."""
    return torch.full_like(like, value)


# -- several operands -----------------------------------------------------------------------------------------------------


def broadcast(*shapes: Iterable[int]) -> tuple[int, ...]:
    """The shape that tensors of these shapes broadcast to."""
    given = [tuple(s) for s in shapes]
    ndim = max(map(len, given))
    padded = [(1,) * (ndim - len(s)) + s for s in given]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def own_dims(x: NormedTensor) -> ed.Dims:
    """elem_dims of x along which it can vary: copies along a dimension of size 1 leave every mean and maximum unchanged."""
    return ed.nontrivial(x.shape, x.elem_dims)


def refined(x: NormedTensor, elem_dims: ed.Dims) -> float:
    """Factor for an RMS operand x once its norm runs over `elem_dims` of a shape x broadcasts to."""
    return spread(ed.rms_factor(x.shape, own_dims(x), elem_dims))


def align(shape: Sequence[int], *operands: NormedTensor) -> tuple[ed.Dims, list[float]]:
    """elem_dims in which RMS operands broadcast to `shape` can be compared, and the factor each of them pays."""
    target, _ = ed.align(shape, *(own_dims(x) for x in operands))
    # the name of an operand's own elem_dims, where dimensions of size 1 make no difference
    named = next((x.elem_dims for x in operands if ed.is_same(shape, x.elem_dims, target)), target)
    return named, [refined(x, named) for x in operands]


def over_dims_of(*names: str) -> Callable[[torch.Tensor, dict[str, Any]], ed.Dims]:
    """For `lift_dims`: measure a plain tensor over the elem_dims of the first normed argument among `names`."""

    def dims(t: torch.Tensor, arguments: dict[str, Any]) -> ed.Dims:
        for name in names:
            values = arguments[name]
            for value in values if isinstance(values, list | tuple) else (values,):
                if isinstance(value, NormedTensor):
                    return tuple(d for d in value.elem_dims if -d <= t.ndim)
        return (-1,) if t.ndim else ()

    return dims


# The `lift_dims` of an operation on two tensors: a plain one is measured over the dims of the other.
SAME_DIMS = {"input": over_dims_of("other"), "other": over_dims_of("input")}


def annotated(rule: Callable, **kinds: Any) -> Callable:
    """A copy of `rule` for other kinds of its arguments (and the result, as ``returns``)."""
    copy = types.FunctionType(rule.__code__, rule.__globals__, rule.__name__, rule.__defaults__, rule.__closure__)
    copy.__kwdefaults__, copy.__doc__, copy.__qualname__ = rule.__kwdefaults__, rule.__doc__, rule.__qualname__
    copy.__annotations__ = {**rule.__annotations__, **{("return" if k == "returns" else k): v for k, v in kinds.items()}}
    return copy


def is_constant_along(t: torch.Tensor, dims: ed.Dims) -> bool:
    """Whether a tensor that is broadcast cannot vary along these dimensions (negative) of the result."""
    return all(-d > t.ndim or t.shape[d] == 1 for d in dims)


def as_kind(x: NormedTensor, kind: type[NormedTensor], elem_dims: ed.Dims) -> tuple[NormedTensor, float]:
    """x converted, and the factor: sensitivities to the converted x must be multiplied by it.

    Raises:
        NormMismatchError: there is no sound conversion.
    """
    target = convert(x, kind, elem_dims)
    c = factor(x, kind, target.elem_dims)
    assert c is not None, "convert has refused already"
    if isinstance(x, RMSTensor) and issubclass(kind, RMSTensor):
        c = spread(c)
    return kind._wrap(x.backing, times(x.norm_size, c), None, target.elem_dims), c


# -- numbers --------------------------------------------------------------------------------------------------------------


def dims_tuple(dim: int | Sequence[int] | None, ndim: int) -> ed.Dims:
    """A `dim` argument as torch takes it, canonical; all dimensions for None and for an empty list."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(-ndim, 0))
    if ndim == 0:  # torch allows -1 and 0 on a scalar
        return ()
    return ed.canonical(tuple(dim) if not isinstance(dim, int) else dim, ndim)


def negative(dim: int, ndim: int) -> int:
    """A dimension counted from the end."""
    return dim if dim < 0 else dim - ndim


def root(n: float) -> float:
    """Square root of a number; 1 for a tensor without elements, whose norm is 0 whatever the factor."""
    return math.sqrt(n) if n > 0 else 1.0


# -- refusals -------------------------------------------------------------------------------------------------------------


_Whatever = NormedTensor | torch.Tensor | list[NormedTensor | torch.Tensor] | Any


@dataclass(frozen=True)
class _Refusal(NormRule):
    """A rule that only says why there is none; any registered rule that takes the arguments goes first."""

    is_refusal = True

    def fits(self, bound: Any, *, converting: bool) -> bool:
        return converting and super().fits(bound, converting=True)


def register_refusal(op: NormedOp, signature_of: Callable) -> None:
    """Register `signature_of`, which raises NormMismatchError, as a last resort: a user's own rule wins over it."""
    op.register_norm(signature_of, allow_plain_tensors="constant")
    rule = op.rules.pop()
    op.rules.append(_Refusal(rule.fn, rule.signature, rule.slots, rule.mode, rule.lift_dims))


def is_typical(args: dict[str, Any] | None = None) -> bool:
    """Whether expected sizes are asked for, of all tensors of some norms, in place of bounds: the condition of a rule, whatever it is given."""
    return current_mode() != "bound" and current_sensitivity() == "global"


def argument(args: tuple, kwargs: Mapping[str, Any], at: int, *names: str, default: Any = None) -> Any:
    """An argument of a call, by its place or one of its names."""
    if len(args) > at:
        return args[at]
    return next((kwargs[name] for name in names if name in kwargs), default)


def refuse(op: NormedOp, reason: str, error: type[NormMismatchError] = NormMismatchError) -> None:
    """Make `op` raise an error with `reason` on normed tensors no other rule takes."""

    def refused(*args: _Whatever, **kwargs: _Whatever) -> NormedTensor:
        raise error(reason)

    refused.__doc__ = reason
    register_refusal(op, refused)


def refuse_perturbation(op: Callable, *inputs: RMSTensor) -> None:
    """An operation that jumps has no sensitivity.

    Raises:
        JumpError: an input carries a perturbation_size.
    """
    if any(x.perturbation_size is not None for x in inputs):
        raise _jumps(op)


def _jumps(op: Callable) -> JumpError:
    return JumpError(f"{op.__name__} jumps: how far its result moves is not bounded by how far its input does")


def jumping(op: Callable, input: RMSTensor, size: Constant) -> RMSTensor:
    """The result of a function of entries that jumps where they are 0: what it is multiplied by may be 0 there, too."""
    result = like(input, size, sensitivity={"input": math.inf})
    result._jump = _jumps(op)
    return result


def by_norm(at: int, name: str) -> Callable[[tuple, dict], bool]:
    """The condition that of an argument, by its place or its name, the norm counts, not its values."""
    return lambda args, kwargs: norm_counts(args[at] if len(args) > at else kwargs.get(name))


def is_moving(t: Any) -> bool:
    """Whether it is a plain tensor whose values are not all that it may be: a parameter, or what was made from some."""
    return norm_counts(t) and not isinstance(t, NormedTensor)
