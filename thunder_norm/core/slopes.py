"""Between which numbers the slopes of functions of each entry are, and what is asked of these again and again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from thunder_norm.core.ellipsoids import EPSILON

# Of the steepest: slopes that differ by no more are one but for rounding; and are taken for one and what is left out.
_ONE, _NARROW = 1e-9, 0.5


@dataclass(frozen=True, eq=False)
class Away:
    """A function g of how far each entry moves away from where it is, constants [n].

    Attributes:
        down: how far down they move.
        up: how far up.
        slopes: the least and the largest slope in between.
        below: the least and the largest ``g(d) / d`` for d < 0.
        above: the same for d > 0.
        first: between which numbers it is at the lower end.
        last: the same at the upper end.
    """

    down: torch.Tensor
    up: torch.Tensor
    slopes: tuple[torch.Tensor, torch.Tensor]
    below: tuple[torch.Tensor, torch.Tensor]
    above: tuple[torch.Tensor, torch.Tensor]
    first: tuple[torch.Tensor, torch.Tensor]
    last: tuple[torch.Tensor, torch.Tensor]

    @property
    def negative(self) -> Away:
        """Of ``-g``."""
        return Away(self.down, self.up, *((-high, -low) for low, high in self._pairs))

    def of_row(self, i: int) -> Away:
        """One of several, [rows, n] each."""
        return Away(self.down[i], self.up[i], *((low[i], high[i]) for low, high in self._pairs))

    @property
    def _pairs(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        return self.slopes, self.below, self.above, self.first, self.last


@dataclass(frozen=True, eq=False)
class Slopes:
    """Each entry is multiplied by a number between its `low` and its `high`, [n] each, float64; they may require grad.

    Of the movements of one row away from the data alone more is known, `away`.
    """

    low: torch.Tensor
    high: torch.Tensor
    away: Away | None = None

    def __len__(self) -> int:
        return self.low.shape[0]

    @cached_property
    def moduli(self) -> torch.Tensor:
        """The steepest slope of each entry, without its sign."""
        return torch.maximum(self.low.abs(), self.high.abs())

    @cached_property
    def most(self) -> float:
        """The largest of these, NaN if one is; 0 of none."""
        return self.moduli.amax().item() if len(self) else 0.0

    @cached_property
    def steepest(self) -> torch.Tensor | None:
        """The steepest slope, if it is the same of all entries."""
        return self.moduli[0] if len(self) and bool((self.moduli == self.moduli[0]).all()) else None

    @cached_property
    def is_linear(self) -> bool:
        """Whether each entry has one slope, but for rounding."""
        return not len(self) or (self.high - self.low).amax().item() <= _ONE * self.most

    @cached_property
    def is_narrow(self) -> bool:
        """Whether the slopes of each entry are so near each other that it is one of them that counts."""
        return not len(self) or (self.high - self.low).amax().item() <= _NARROW * self.most

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all entries have slopes between the same two numbers."""
        return all(t.amin().item() == t.amax().item() for t in (self.low, self.high))

    @cached_property
    def scale(self) -> float:
        """The steepest slope, which may be too steep for its square to be a number."""
        return max(self.most, 1e-300)

    @cached_property
    def middle(self) -> torch.Tensor:
        """Of the slopes divided by `scale`."""
        return self.low / self.scale / 2 + self.high / self.scale / 2

    @cached_property
    def half(self) -> torch.Tensor:
        """Half the width of the slopes divided by `scale`, rounded up."""
        return self.high / self.scale / 2 - self.low / self.scale / 2 + 4 * EPSILON

    @cached_property
    def tau(self) -> torch.Tensor:
        """``h / (|m| + h)``, at least 1e-6: next to nothing of entries with one slope; 1 where there is no slope but 0."""
        middle = self.middle.abs()
        return torch.where(self.half > 0, self.half / (middle + self.half).clamp(min=1e-300), 1.0).clamp(min=1e-6)

    @cached_property
    def ratio(self) -> float:
        """``m^2 / h^2``, the middle one where entries differ: each counts by its h^2."""
        if self.is_uniform:
            return (self.middle[0].item() / max(self.half[0].item(), 1e-150)) ** 2
        weights = self.half.square()
        return ((self.middle.square() * weights).sum() / (weights * weights).sum().clamp(min=1e-300)).item()

    @cached_property
    def is_from_zero(self) -> bool:
        """Whether those of the first entry are from 0 to another number."""
        half = self.half[0].item()
        return 0 <= half - abs(self.middle[0].item()) <= 1e-12 * half

    @cached_property
    def is_steep(self) -> bool:
        """Whether the slopes of some entry are further from each other than from 0."""
        return bool((self.half > 1.01 * self.middle.abs()).any())


@lru_cache(maxsize=256)
def between(low: float, high: float, size: int) -> Slopes:
    """The same two numbers for that many entries: an activation's, which many layers have."""
    return Slopes(*(torch.full((size,), float(s), dtype=torch.float64, device="cpu") for s in (low, high)))
