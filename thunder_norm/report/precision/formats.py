"""Floating-point formats, and which operation of a program works in which."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from thunder_norm.errors import NormMapKeyError, NormMismatchError, with_details

# Operations whose operands may have 8 bits: the sums are longer numbers. Where the argument that is added stands, and its name.
_PRODUCTS: dict[str, int | None] = {
    "linear": 2, "conv1d": 2, "conv2d": 2, "conv3d": 2, "conv_transpose1d": 2, "conv_transpose2d": 2, "conv_transpose3d": 2,
    "bilinear": 3, "addmm": 0, "addbmm": 0, "baddbmm": 0, "addmv": 0, "addr": 0, "matmul": None, "mm": None, "bmm": None,
    "mv": None, "dot": None, "vdot": None, "inner": None, "outer": None, "einsum": None, "tensordot": None, "chain_matmul": None,
    "multi_dot": None, "linalg_multi_dot": None,
}  # fmt: skip
_ADDED_NAMES = {0: "input", 2: "bias", 3: "bias"}
_LEAST_AMAX = 1e-12  # torchao.float8.float8_utils.EPS


@dataclass(frozen=True)
class Format:
    """The numbers that a torch dtype has."""

    dtype: torch.dtype

    @property
    def digits(self) -> int:
        """Binary digits of a number, the leading one included: the unit roundoff is ``2^-digits``."""
        return 1 - round(math.log2(torch.finfo(self.dtype).eps))

    @property
    def is_scaled(self) -> bool:
        """Whether a tensor is divided by a number of its own first, so that its largest entry is the largest of the format.

        Those of 8 bits, as torchao's tensorwise float8 has them, which counts a largest entry as 1e-12 at least.
        """
        return self.dtype.itemsize == 1

    def rounded(self, t: torch.Tensor) -> torch.Tensor:
        """The nearest numbers of the format, in a tensor of the dtype that `t` has."""
        scale = self._scale(t)
        return (t / scale).to(self.dtype).to(t.dtype) * scale if self.is_scaled else t.to(self.dtype).to(t.dtype)

    def half_spacing(self, t: torch.Tensor) -> torch.Tensor:
        """How far the entries may be from the nearest number: half the spacing of numbers there, infinite beyond the largest."""
        scale = self._scale(t)
        size = (t.detach() / scale).abs().double()
        info = torch.finfo(self.dtype)
        exponent = torch.frexp(size.clamp_min(info.smallest_normal)).exponent
        found = torch.ldexp(torch.ones_like(size), exponent - 1 - self.digits) * scale
        found = torch.minimum(found, size * scale)  # what is below the smallest number becomes 0
        return torch.where(self.rounded(t).isfinite() | ~t.isfinite(), found, torch.inf)

    def _scale(self, t: torch.Tensor) -> torch.Tensor | float:
        if not self.is_scaled or t.numel() == 0:
            return 1.0
        return t.detach().abs().amax().clamp_min(_LEAST_AMAX) / torch.finfo(self.dtype).max


_HALF = Format(torch.bfloat16)


class Formats:
    """Which operation works in which format.

    Args:
        precision: a dtype for all, or dtypes by patterns (`fnmatch`) of operations and of dotted module paths, of which the last that
            fits counts.

    Raises:
        NormMismatchError: nothing, not a dtype of floating-point numbers, or of numbers that have no digits.
    """

    def __init__(self, precision: torch.dtype | Mapping[str, torch.dtype]):
        self.by_pattern = dict(precision) if isinstance(precision, Mapping) else {"*": precision}
        if not self.by_pattern:
            raise NormMismatchError("precision is empty: a dtype, or dtypes by patterns of operations and modules")
        for pattern, dtype in self.by_pattern.items():
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype in _WITHOUT_DIGITS:
                raise NormMismatchError(
                    with_details(
                        f"precision of {pattern!r} is {dtype!r}",
                        instead="torch.bfloat16, torch.float16, torch.float32, torch.float64 or one of torch's formats of 8 bits",
                    )
                )
        self._used: set[str] = set()

    @property
    def single(self) -> torch.dtype | None:
        """The dtype in which PyTorch can run the whole program: that of all operations, if it has more than 8 bits."""
        dtypes = {*self.by_pattern.values()}
        dtype = next(iter(dtypes)) if set(self.by_pattern) == {"*"} else None
        return None if dtype is None or Format(dtype).is_scaled else dtype

    def of(self, op: str, module: str) -> Format | None:
        """The format of an operation; None where nothing is said of it, or where numbers stay as PyTorch computes them."""
        found = None
        for pattern, dtype in self.by_pattern.items():
            if fnmatch.fnmatchcase(op, pattern) or fnmatch.fnmatchcase(module, pattern):
                self._used.add(pattern)
                found = dtype
        return None if found is None or found in (torch.float32, torch.float64) else Format(found)

    def check_used(self) -> None:
        """Refuse patterns that fit nothing.

        Raises:
            NormMapKeyError: one fits no operation of the program.
        """
        unused = [p for p in self.by_pattern if p not in self._used]
        if "*" in unused:
            raise NormMapKeyError(
                with_details(
                    "precision: no operation of the program is followed, as nothing is normed", instead="RMSTensor.of(x)"
                )
            )
        if unused:
            raise NormMapKeyError(
                f"precision: no operation of the program, and no module, is named {', '.join(map(repr, unused))}"
            )


_WITHOUT_DIGITS = {getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)}


def of_result(form: Format) -> Format:
    """The format of the result of an operation in a format: matrix products of 8 bits return bfloat16, as ``torch._scaled_mm``."""
    return _HALF if form.is_scaled else form


def of_operands(form: Format, op: str) -> Format:
    """The format of its operands: 8 bits in matrix products alone."""
    return form if op in _PRODUCTS else of_result(form)


def added(op: str, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """The argument of a matrix product that is no factor of it: a bias."""
    place = _PRODUCTS.get(op)
    if place is None:
        return None
    return args[place] if place < len(args) else kwargs.get(_ADDED_NAMES[place])
