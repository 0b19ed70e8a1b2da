"""The slopes that the gates of a GRU and an LSTM have in one step: for all inputs, and for inputs near the data at hand.

Each gate's part in what a step leaves is a slope times how far it moves; over the way from one run to another the slopes are means, so that they
stay between the least and the largest that the numbers of both runs allow.  Near the data these are intervals around what gates and states are
there, as wide as the ellipsoid of all that a step is made of says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from thunder_norm.rules.entrywise import slopes_within

# The least and the largest of each entry, [H].
Interval = tuple[torch.Tensor, torch.Tensor]
_ROUNDED = 1e-12


class LSTMSlopes(NamedTuple):
    """Of the new cell state by the old one and by what gates f, i and g are taken of; of the new state by the new cell state and o."""

    cell: Interval
    f: Interval
    i: Interval
    g: Interval
    new_cell: Interval
    o: Interval


class GRUSlopes(NamedTuple):
    """Of what n is taken of by u and by what r is taken of; of n; of the new state by h - n, less 1/2, and by what z is taken of."""

    u: Interval
    r: Interval
    n: Interval
    apart: Interval
    z: Interval


@dataclass(frozen=True, eq=False)
class Layer:
    """Matrices and bias of a layer, by gates: W_ih, W_hh and their biases, in double precision.

    Attributes:
        by_input: [H, width of x] each.
        by_state: [H, width of h] each.
        bias: b_hh, [H] each, or zeros.
        input_bias: b_ih, likewise.
        projection: [width of h, H], of an LSTM that has one.
        largest: the largest entry of the first state, of an LSTM of the first cell state.
    """

    by_input: Sequence[torch.Tensor]
    by_state: Sequence[torch.Tensor]
    bias: Sequence[torch.Tensor]
    input_bias: Sequence[torch.Tensor]
    projection: torch.Tensor | None
    largest: float


def _all(like: torch.Tensor, low: float, high: float) -> Interval:
    return torch.full_like(like, low), torch.full_like(like, high)


def lstm_everywhere(layer: Layer, number: int) -> LSTMSlopes:
    """Of any numbers; the cell state grows by 1 in a step."""
    like, bound = layer.by_input[0][:, 0].detach(), layer.largest + number
    most = math.tanh(bound + 1) / 4
    quarter, one = _all(like, -0.25, 0.25), _all(like, 0.0, 1.0)
    return LSTMSlopes(one, _all(like, -bound / 4, bound / 4), quarter, one, one, _all(like, -most, most))


def gru_everywhere(layer: Layer, number: int) -> GRUSlopes:
    """Of any numbers; a new state is between the old one and n."""
    like, bound = layer.by_input[0][:, 0].detach(), max(layer.largest, 1.0)
    u = (layer.by_state[2].abs().sum(1) * bound + layer.bias[2].abs()).detach()
    most = (1 + bound) / 4
    return GRUSlopes(_all(like, 0.0, 1.0), (-u / 4, u / 4), _all(like, 0.0, 1.0), _all(like, -0.5, 0.5), _all(like, -most, most))


def _times(a: Interval, b: Interval) -> Interval:
    ends = torch.stack([x * y for x in a for y in b])
    return ends.amin(0), ends.amax(0)


def _both(a: Interval, b: Interval) -> Interval:
    """What is in both, of what is near one end of the other that end."""
    low, high = torch.maximum(a[0].nan_to_num(nan=-math.inf), b[0]), torch.minimum(a[1].nan_to_num(nan=math.inf), b[1])
    return torch.minimum(low, b[1]), torch.maximum(high, b[0])


def _wider(a: Interval) -> Interval:
    return a[0] - _ROUNDED * (1 + a[0].abs()), a[1] + _ROUNDED * (1 + a[1].abs())


def _growing(f, a: Interval) -> Interval:
    return _wider((f(a[0]), f(a[1])))


def _slope(f, a: Interval) -> Interval:
    found = slopes_within.of(f, {}, *a)
    assert found is not None, "of sigmoid and tanh they are known"
    return found


def steepest(a: Interval) -> torch.Tensor:
    """The largest magnitude of each entry."""
    return torch.maximum(a[0].abs(), a[1].abs())


@dataclass(eq=False)
class Near:
    """A sequence at the data at hand, step by step.

    Attributes:
        layer: the layer.
        inputs: of each step, [rows, width of x].
        slack: what rounding may have done to them.
        states: before the next step, [rows, H] each: the state, of an LSTM the cell state too.
        found: the slopes of the steps before that.
    """

    layer: Layer
    inputs: Sequence[torch.Tensor]
    slack: float
    states: list[torch.Tensor]
    found: list[Any] = field(default_factory=list)

    def _at(self, moved: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Interval]]:
        """What gates are taken of, [rows, H] each, and between which numbers it is if it moves as far as that."""
        x, h, layer = self.inputs[len(self.found)], self.states[0], self.layer
        parts = zip(layer.by_input, layer.by_state, layer.bias, layer.input_bias, strict=True)
        at = [(x @ w.T + b + h @ v.T + c).detach() for w, v, b, c in parts]
        slack = [self.slack * w.detach().abs().sum(1) for w in layer.by_input]
        return at, [_around(t, m + s) for t, m, s in zip(at, moved, slack, strict=True)]

    def lstm(self, moved: Sequence[torch.Tensor], cell_moved: torch.Tensor) -> LSTMSlopes:
        """Of the next step, given how far what gates i, f, g and o are taken of moves, and the cell state."""
        (i, f, g, o), (of_i, of_f, of_g, of_o) = self._at(moved)
        c = self.states[1]
        by_cell = _growing(torch.sigmoid, of_f)
        by_f = _times(_around(c, cell_moved), _slope(torch.sigmoid, of_f))
        by_i = _times(_growing(torch.tanh, of_g), _slope(torch.sigmoid, of_i))
        by_g = _times(_growing(torch.sigmoid, of_i), _slope(torch.tanh, of_g))
        slopes = (by_i, by_f, by_g, by_cell)
        new_moved = torch.stack([steepest(s) * m for s, m in zip(slopes, (*moved[:3], cell_moved), strict=True)]).sum(0)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        of_cell = _around(c, new_moved + self.slack)
        hidden = o.sigmoid() * c.tanh()
        self.states = [hidden if self.layer.projection is None else hidden @ self.layer.projection.detach().T, c]
        by_new = _times(_growing(torch.sigmoid, of_o), _slope(torch.tanh, of_cell))
        by_o = _times(_growing(torch.tanh, of_cell), _slope(torch.sigmoid, of_o))
        near = (by_cell, by_f, by_i, by_g, by_new, by_o)
        self.found.append(LSTMSlopes(*map(_both, near, lstm_everywhere(self.layer, len(self.found)))))
        return self.found[-1]

    def gru(self, moved: Sequence[torch.Tensor], state_moved: torch.Tensor) -> GRUSlopes:
        """Of the next step, given how far what r, z are taken of, ``W_n x`` and u move, and the state."""
        (r, z, _), (of_r, of_z, _) = self._at([*moved[:2], moved[2]])
        h, layer = self.states[0], self.layer
        u = (h @ layer.by_state[2].T + layer.bias[2]).detach()
        of_u = _around(u, moved[3])
        by_u, by_r = _growing(torch.sigmoid, of_r), _times(of_u, _slope(torch.sigmoid, of_r))
        a = (self.inputs[len(self.found)] @ layer.by_input[2].T + layer.input_bias[2]).detach() + r.sigmoid() * u
        slack = self.slack * layer.by_input[2].detach().abs().sum(1)
        p_moved = moved[2] + steepest(by_u) * moved[3] + steepest(by_r) * moved[0] + slack
        by_n = _slope(torch.tanh, _around(a, p_moved))
        n = a.tanh()
        by_z = _times(_around(h - n, state_moved + steepest(by_n) * p_moved), _slope(torch.sigmoid, of_z))
        low, high = _growing(torch.sigmoid, of_z)
        self.states = [(1 - z.sigmoid()) * n + z.sigmoid() * h]
        near = (by_u, by_r, by_n, (low - 0.5, high - 0.5), by_z)
        self.found.append(GRUSlopes(*map(_both, near, gru_everywhere(self.layer, len(self.found)))))
        return self.found[-1]


def _around(t: torch.Tensor, moved: torch.Tensor) -> Interval:
    return _wider((t.amin(0) - moved, t.amax(0) + moved))
