"""How far the results of one operation are from exact ones in a format, by running it on operands that are numbers of the format.

One rounding of a result is at most half a spacing.  More than that is what an operation does that PyTorch writes in several (each rounds), or
that rounds numbers of the program first: of ``x + 1002.1`` the number becomes 1004 in bfloat16, of ``x * 1002.1`` it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.random_states import remembered
from thunder_norm.report.precision.formats import Format
from thunder_norm.trees import flat_tensors, map_leaves, map_tensors

# Operands nearby that are tried: whether few entries happen to be numbers of the format, and what several roundings add up to.
_NEARBY = 4
_FEW = 64
# What longer numbers round is less than this part of half a spacing.
_SLACK = 0.01


@dataclass(frozen=True)
class Error:
    """Of each entry of a result.

    Attributes:
        most: at most.
        likely: half a spacing for one rounding at the data, and of what is more than that its size, times sqrt(3).
    """

    most: torch.Tensor
    likely: torch.Tensor


@dataclass(frozen=True)
class Tried:
    """What trials showed of one result.

    Attributes:
        inexact: which entries are no numbers of the format, at the data.
        may_be: which may be none where operands are others than at the data, as roundings before move them.
        beyond: what there is beyond one rounding, at most.
        seen: the largest error that is beyond one rounding; 0 where there is none.
    """

    inexact: torch.Tensor
    may_be: torch.Tensor
    beyond: torch.Tensor
    seen: torch.Tensor

    def error(self, y: torch.Tensor, form: Format) -> Error | None:
        """The error of a result with these values; None if there is none."""
        if not (self.may_be.any() or self.beyond.any()):
            return None
        half = form.half_spacing(y)
        most = torch.where(self.may_be, half, 0.0) + self.beyond
        return Error(most, torch.where(self.inexact, half, 0.0).maximum(self.seen * 3**0.5))


@contextmanager
def drawn_again(args: tuple, kwargs: dict) -> Iterator[None]:
    """Set the generators that an operation draws from back afterwards: torch's own, and those among its arguments."""
    devices = {t.device for t in flat_tensors((args, kwargs)) if t.device.type == "cuda"}
    own = [g for g in tree_leaves((args, kwargs)) if isinstance(g, torch.Generator)]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        for generator in own:
            stack.callback(remembered(generator))
        yield


class Trials:
    """Runs one operation, on operands of a format.

    Args:
        func: the operation.
        args: its arguments, with `kwargs`.
        kwargs: see `args`.
        form: the format of its results.
        given: the format that an operand comes in; None of constants, which stay as they are.
        moves: whether an operand is another one in low precision than at the data, rounded.
    """

    def __init__(
        self,
        func: Callable,
        args: tuple,
        kwargs: dict,
        form: Format,
        given: Callable[[torch.Tensor], Format | None],
        moves: Callable[[torch.Tensor], bool],
    ):
        self._func, self._args, self._kwargs, self._form, self._given = func, args, kwargs, form, given
        self._moving = {id(t) for t in flat_tensors((args, kwargs)) if given(t) is not None and moves(t)}

    def results(self) -> list[Tried | None]:
        """What is found of each result; None of those that are not rounded."""
        with torch.no_grad():
            exact = self._run(self._rounded)
            found = [_Found(y, self._form) if is_rounded(y) else None for y in exact]
            self._compare(found, exact, self._in_format(self._rounded))
            is_open = any(f is not None and f.is_open for f in found)
            is_several = any(f is not None and f.seen.any() for f in found)
            few = sum(y.numel() for y in exact) < _FEW and not all(y._is_view() for y in exact)
            if self._moving and (is_several or few and not is_open):
                is_open |= self._try_nearby(found, is_several)
            numbers = self._with_rounded_numbers(exact)
        may_move = bool(self._moving) and is_open
        return [None if f is None else f.tried(may_move, c) for f, c in zip(found, numbers, strict=True)]

    def _try_nearby(self, found: list[_Found | None], is_several: bool) -> bool:
        """Look at operands nearby as well: whether results are not all numbers of the format there, and what several roundings add up to."""
        generator = torch.Generator().manual_seed(0)
        is_open = False
        for _ in range(_NEARBY):
            near = {id(t): self._nearby(t, generator) for t in flat_tensors((self._args, self._kwargs)) if id(t) in self._moving}

            def operand(t: torch.Tensor, near: dict[int, torch.Tensor] = near) -> torch.Tensor:
                return near[id(t)] if id(t) in near else self._rounded(t)

            exact = self._run(operand)
            if [y.shape for y in exact] != [f.shape if f is not None else y.shape for f, y in zip(found, exact, strict=True)]:
                continue
            is_open |= any(bool(_inexact(y, self._form).any()) for y in exact if is_rounded(y))
            if is_several:
                self._compare(found, exact, self._in_format(operand))
            elif is_open:
                break
        return is_open

    def _compare(self, found: list[_Found | None], exact: tuple[torch.Tensor, ...], low: tuple[torch.Tensor, ...] | None) -> None:
        if low is not None and [y.shape for y in low] == [y.shape for y in exact]:
            for f, y, z in zip(found, exact, low, strict=True):
                if f is not None and z.dtype == self._form.dtype:
                    f.compare(y, z)

    def _with_rounded_numbers(self, exact: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
        """How far the results move where numbers of the program are rounded first, as some operations of PyTorch do, on some machines."""
        dtype = self._form.dtype

        def rounded(leaf: Any) -> Any:
            if type(leaf) is float:
                return torch.tensor(leaf, dtype=torch.float64).to(dtype).item()
            if isinstance(leaf, torch.Tensor) and leaf.ndim == 0 and is_rounded(leaf) and self._given(leaf) is None:
                return leaf.detach().to(dtype).to(leaf.dtype)
            return leaf

        args, kwargs = map_leaves(rounded, (self._args, self._kwargs))
        if _same_leaves((args, kwargs), (self._args, self._kwargs)):
            return [None] * len(exact)
        before = torch.get_rng_state()
        with drawn_again(args, kwargs):
            try:
                moved = flat_tensors(self._func(*map_tensors(self._rounded, args), **map_tensors(self._rounded, kwargs)))
            except (RuntimeError, ValueError):  # none that it takes: 0 for 1e-12
                return [None] * len(exact)
            draws = not torch.equal(torch.get_rng_state(), before)
        if draws or [y.shape for y in moved] != [y.shape for y in exact]:
            return [None] * len(exact)
        return [(z - y).abs().double().nan_to_num(0.0, 0.0) if is_rounded(y) else None for y, z in zip(exact, moved, strict=True)]

    def _run(self, operand: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with drawn_again(self._args, self._kwargs):
            return flat_tensors(self._func(*map_tensors(operand, self._args), **map_tensors(operand, self._kwargs)))

    def _in_format(self, operand: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
        """The results as PyTorch computes them in the dtype; None where it does not, or operands are numbers of 8 bits."""

        def low(t: torch.Tensor) -> torch.Tensor:
            form = self._given(t)
            return operand(t) if form is None else operand(t).to(form.dtype)

        if any(f is not None and f.is_scaled for f in map(self._given, flat_tensors((self._args, self._kwargs)))):
            return None
        try:
            return self._run(low)
        except Exception:  # noqa: BLE001 - whatever PyTorch has against the dtype
            return None

    def _rounded(self, t: torch.Tensor) -> torch.Tensor:
        form = self._given(t)
        return t.detach().clone() if form is None else form.rounded(t.detach())  # copies, which may be written into

    def _nearby(self, t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        form = self._given(t)
        assert form is not None
        rounded = form.rounded(t.detach())
        steps = torch.randint(-1, 2, t.shape, generator=generator).to(t.device)
        half = form.half_spacing(rounded)
        moved = form.rounded(rounded + (2 * half * steps).to(t.dtype))
        return torch.where(half.isfinite() & moved.isfinite(), moved, rounded)


class _Found:
    """What trials show of one result."""

    def __init__(self, exact: torch.Tensor, form: Format):
        self.form, self.shape = form, exact.shape
        self.inexact = _inexact(exact, form)
        self.half = form.half_spacing(exact)
        self.seen = torch.zeros_like(self.half)

    @property
    def is_open(self) -> bool:
        """Whether the result is not all numbers of the format, of such operands."""
        return bool(self.inexact.any())

    def compare(self, exact: torch.Tensor, low: torch.Tensor) -> None:
        """See how far the result of a run in the format is off, where that is more than one rounding."""
        off = (low.double() - exact.double()).abs()
        off = torch.where(exact.isfinite(), off.nan_to_num(torch.inf), 0.0)
        is_beyond = off > self.form.half_spacing(exact) * (1 + _SLACK)
        self.seen = torch.maximum(self.seen, torch.where(is_beyond, off, 0.0))

    def tried(self, may_move: bool, numbers: torch.Tensor | None) -> Tried:
        """All of it, and what rounded numbers move."""
        is_beyond = self.seen > 0
        beyond = torch.where(is_beyond, self.seen + self.half, 0.0)
        beyond = beyond if numbers is None else torch.maximum(beyond, numbers)
        may_be = torch.ones_like(self.inexact) if may_move else self.inexact | is_beyond
        return Tried(self.inexact, may_be, beyond, self.seen)


def is_rounded(t: torch.Tensor) -> bool:
    """Whether a tensor is one of numbers that a format rounds."""
    return t.is_floating_point() and t.layout == torch.strided


def _inexact(y: torch.Tensor, form: Format) -> torch.Tensor:
    return (form.rounded(y) != y) & ~y.isnan()


def _same_leaves(one: Any, other: Any) -> bool:
    return all(a is b or type(a) is float and a == b for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True))
