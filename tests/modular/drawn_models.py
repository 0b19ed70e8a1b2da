"""Models for drawn training runs, and what each of their parameters is, by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.modular.balls import Case
from tests.modular.optimized import UNITS, Model, lmo, made, project
from thunder_norm import LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor

C128 = torch.complex128


@dataclass(frozen=True)
class Truth:
    """What the optimizer has to do with one parameter.

    Attributes:
        steepest: of a direction, the step of norm 1.
        nearest: of a value, the nearest of norm at most 1.
        axes: of a unit's entries; None of what takes whole steps.
    """

    steepest: Callable[[np.ndarray], np.ndarray]
    nearest: Callable[[np.ndarray], np.ndarray]
    axes: tuple[int, ...] | None = None

    @staticmethod
    def of(case: Case, axes: tuple[int, ...] | None = None, rows: Sequence[Sequence[int]] = ()) -> Truth:
        """By the norm of a case; with `rows`, of each of these blocks of the first dimension by itself."""

        def each(f: Callable[[torch.Tensor], torch.Tensor], t: np.ndarray) -> np.ndarray:
            whole = torch.as_tensor(t).clone()
            for some in rows or [range(len(t)) if t.ndim else ...]:
                at = some if some is ... else list(some)
                whole[at] = case.each(whole[at], f)
            return whole.numpy()

        return Truth(partial(each, case.steepest), partial(each, case.nearest), axes)


@dataclass(frozen=True)
class Drawn:
    """A model, its arguments, and the truth of each parameter that a step moves."""

    made: Callable[[], tuple[nn.Module, torch.Tensor]]
    truths: dict[str, Truth]
    options: dict[str, Any]


class Kernels(nn.Module):
    """All sorts of kernels, in channels_last; scales without dimensions, an empty parameter, one that nothing uses."""

    def __init__(self):
        super().__init__()
        self.stem, self.grouped = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1, groups=2)
        self.depthwise, self.pointwise = nn.Conv2d(6, 6, (1, 3), padding=(0, 1), groups=6), nn.Conv2d(6, 8, 1)
        self.transposed, self.head = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.Linear(6, 5)
        self.scale, self.one = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1))
        self.empty, self.unused = nn.Parameter(torch.zeros(0, 8)), nn.Parameter(torch.ones(3))
        self.to(torch.float64, memory_format=torch.channels_last)

    def forward(self, x):
        x = self.pointwise(torch.relu(self.depthwise(torch.relu(self.grouped(torch.relu(self.stem(x)))))))
        return self.head((self.transposed(x * self.scale) * self.one).mean((-1, -2)))


class Phases(nn.Module):
    """Complex numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.gain = nn.Linear(6, 8, dtype=C128), nn.Parameter(torch.ones(8, dtype=C128))
        self.between, self.head = nn.Linear(8, 8, bias=False, dtype=C128), nn.Linear(8, 3, dtype=C128)

    def forward(self, x):
        x = self.first(x) * self.gain
        return self.head(self.between(x) + x)


class Blocks(nn.Module):
    """A tied table, positions, attention from one matrix (four heads, two for keys), gates in halves and in turns, experts."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.RMSNorm(8)
        self.positions, self.experts = nn.Parameter(torch.randn(1, 5, 8)), nn.Parameter(torch.randn(3, 8, 8))
        self.qkv, self.out = nn.Linear(8, 16), nn.Linear(8, 8, bias=False)
        self.halves, self.turns, self.down = nn.Linear(8, 24, bias=False), nn.Linear(8, 24), nn.Linear(12, 8, bias=False)
        self.double()

    def forward(self, i):
        x = self.table(i) + self.positions
        q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in self.qkv(self.norm(x)).split([8, 4, 4], -1))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, gated = self.halves(x).chunk(2, -1)
        x = x + self.down(torch.sigmoid(gate) * gated)
        in_turns = self.turns(x).unflatten(-1, (12, 2))
        x = x + self.down(torch.sigmoid(in_turns[..., 0]) * in_turns[..., 1])
        return torch.einsum("btd,edh->bteh", x, self.experts).mean(2) @ self.table.weight.T


def _kernel(shape: tuple[int, ...], groups: int = 1, dims: tuple[int, int] = (-4, -3)) -> Case:
    return Case(RMSToRMSConvTensor.grouped(groups) if groups > 1 else RMSToRMSConvTensor, dims, shape, groups)


_MATRIX, _ROWS, _ENTRIES = Case(RMSToRMSTensor, (-2, -1), ()), Case(RMSTensor, (-1,), ()), Case(LinfTensor, (), ())
_BIAS, _GAIN, _WHOLE, _HEAD = Truth.of(_ROWS, (0,)), Truth.of(_ENTRIES, ()), Truth.of(_MATRIX), Truth.of(_MATRIX, (1,))
_FIRST = Truth.of(_MATRIX, (0, 1))
_OF_QKV = [*(range(i, i + 2) for i in range(0, 12, 2)), range(12, 16)]  # heads of queries and keys, values
_TURNS = [range(0, 24, 2), range(1, 24, 2)]
DRAWN = {
    "vectors": Drawn(
        made,
        {name: Truth(partial(lmo, name), partial(project, name), UNITS.get(name)) for name, _ in Model().named_parameters()},
        {},
    ),
    "kernels": Drawn(
        lambda: (Kernels(), torch.randn(2, 3, 6, 6, dtype=torch.float64)),
        {
            "stem.weight": Truth.of(_kernel((4, 3, 3, 3)), (0, 1, 2, 3)),
            "grouped.weight": Truth.of(_kernel((6, 2, 3, 3), 2)),
            "depthwise.weight": Truth.of(_kernel((6, 1, 1, 3), 6)),
            "pointwise.weight": Truth.of(_kernel((8, 6, 1, 1))),
            "transposed.weight": Truth.of(_kernel((8, 6, 2, 2), dims=(-3, -4))),
            **{f"{name}.bias": _BIAS for name in ("stem", "grouped", "depthwise", "pointwise", "transposed", "head")},
            "head.weight": _HEAD,
            "scale": _GAIN,
            "one": _GAIN,
        },
        {},
    ),
    "phases": Drawn(
        lambda: (Phases(), torch.randn(4, 6, dtype=C128)),
        {"first.weight": _FIRST, "first.bias": _BIAS, "gain": _GAIN, "between.weight": _WHOLE}
        | {"head.weight": _HEAD, "head.bias": _BIAS},
        {},
    ),
    "blocks": Drawn(
        lambda: (Blocks(), torch.arange(10).view(2, 5)),
        {
            "table.weight": Truth.of(_ROWS, (1,)),
            "norm.weight": _GAIN,
            "positions": Truth.of(_ROWS, (2,)),
            "experts": Truth.of(Case(RMSToRMSTensor, (-1, -2), ())),
            "qkv.weight": Truth.of(_MATRIX, rows=_OF_QKV),
            "qkv.bias": Truth.of(_ROWS, (0,), _OF_QKV),
            "halves.weight": Truth.of(_MATRIX, rows=[range(12), range(12, 24)]),
            "turns.weight": Truth.of(_MATRIX, rows=_TURNS),
            "turns.bias": Truth.of(_ROWS, (0,), _TURNS),
            "out.weight": _WHOLE,
            "down.weight": _WHOLE,
        },
        {"blocks": "heads"},
    ),
}
