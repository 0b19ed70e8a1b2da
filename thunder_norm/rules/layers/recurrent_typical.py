"""Recurrent layers in mode "typical": gates, states and perturbations as independent Gaussians, whose energies add.

Of a gate's pre-activation of size s, ``s = g + w n + b`` as the layers before it keep aligned values, with z a standard normal:

    Q = E sigmoid(s z)^2,   S = E sigmoid'(s z)^2,   T = E tanh(s z)^2,   D = E tanh'(s z)^2

A state's energy is followed for a few steps, in which it comes close to what it stays at: each keeps at most Q < 1/2 of it where
gates are open as often as closed.  A perturbation grows by ``p`` in energy with each step, and those of several steps, which one
parameter moves together, add up: ``G = 1 + p^(1/2) + ... + p^((steps - 1) / 2)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from thunder_norm.core.kinds import RMSTensor, RMSToRMSTensor
from thunder_norm.rules._gaussian import second_moment_root
from thunder_norm.rules._shared import root_sum_squares
from thunder_norm.rules.layers.recurrent import (
    geometric,
    gru_layer,
    lstm_layer,
    of_bias,
    outcome,
    per_step,
    rnn_tanh_layer,
)

_STEPS = 4  # a state's energy is then within a sixteenth of what it stays at


def _tanh_slope(x: torch.Tensor) -> torch.Tensor:
    return 1 - torch.tanh(x).square()


def _sigmoid_slope(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


def _energy(f: Callable[[torch.Tensor], torch.Tensor], n: torch.Tensor) -> torch.Tensor:
    return second_moment_root(f, n).square()


@dataclass(frozen=True)
class _Gates:
    """Q, S, T and D, at the sizes of the gates and of what the hyperbolic tangent is taken of."""

    open: torch.Tensor
    slope: torch.Tensor
    candidate: torch.Tensor
    candidate_slope: torch.Tensor

    @staticmethod
    def of(s: torch.Tensor, of_candidate: torch.Tensor) -> _Gates:
        """At these sizes."""
        return _Gates(
            _energy(torch.sigmoid, s),
            _energy(_sigmoid_slope, s),
            _energy(torch.tanh, of_candidate),
            _energy(_tanh_slope, of_candidate),
        )


# -- LSTM ----------------------------------------------------------------------------------------------------------------------


@lstm_layer.register_norm(mode="typical")
def _lstm_layer_typical(
    gates: RMSTensor,
    h: RMSTensor,
    c: RMSTensor,
    weight: RMSToRMSTensor,
    bias: RMSTensor | None = None,
    projection: RMSToRMSTensor | None = None,
) -> tuple:
    """c <- s(f) c + s(i) tanh(g), h <- P s(o) tanh(c), with P a projection of norm r, else r = 1.

    Value:       of c the root of C, ``C <- Q (C + T)``;  of h that of r^2 Q E tanh(c)^2
    Sensitivity: sqrt(K) G to the gates and b, times |h| to W;  K = (C + T) S + Q D,  p = Q + K (w r)^2 e,
                 e = Q E tanh'(c)^2 + S E tanh(c)^2 / K;  times r sqrt(e) for h
    Source:      dc' = f dc + c s' df + tanh s' di + i tanh' dg,  dh = o tanh' dc' + tanh s' do
    """
    (g, c_g), (n_h, c_h), (n_c, c_c) = (per_step(x) for x in (gates, h, c))
    w, (b, c_b), steps = weight.norm_size, of_bias(bias, g), gates.shape[0]
    r = torch.ones_like(g) if projection is None else projection.norm_size
    n, cell, largest = n_h, n_c, n_h
    for _ in range(min(steps, _STEPS)):
        s = g + w * n + b
        at = _Gates.of(s, s)
        cell = (at.open * (cell.square() + at.candidate)).sqrt()
        of_cell = _energy(torch.tanh, cell)
        n = r * (at.open * of_cell).sqrt()
        largest = torch.maximum(largest, n)
    gain = (cell.square() + at.candidate) * at.slope + at.open * at.candidate_slope
    to_state = at.open * _energy(_tanh_slope, cell) + at.slope * of_cell / gain
    kept = (at.open + gain * (w * r).square() * to_state).sqrt()
    power, total = geometric(kept, steps)
    projected = (at.open * of_cell).sqrt()
    moves = {
        "gates": gain.sqrt() * total * c_g,
        "h": gain.sqrt() * w * power / kept * c_h,
        "c": power * c_c,
        "weight": gain.sqrt() * total * largest,
        "bias": gain.sqrt() * total * c_b,
        "projection": gain.sqrt() * (total - power / kept) * w * projected,
    }
    given = {"gates": gates, "h": h, "c": c, "weight": weight, "bias": bias, "projection": projection}
    of_state = {k: r * to_state.sqrt() * v for k, v in moves.items()}
    of_state["projection"] = of_state["projection"] + projected
    state = [outcome(n, of_state, given) for _ in range(2)]
    return *state, outcome(cell, moves, given)


# -- GRU -----------------------------------------------------------------------------------------------------------------------


@gru_layer.register_norm(mode="typical")
def _gru_layer_typical(gates: RMSTensor, h: RMSTensor, weight: RMSToRMSTensor, bias: RMSTensor | None = None) -> tuple:
    """h <- (1 - z) tanh(a_n + r u_n) + z h, with r = s(a_r + u_r), z = s(a_z + u_z), u = W h + b.

    Value:       the root of N, ``N <- Q (N + T)``, T at the size (g^2 + Q u^2)^(1/2)
    Sensitivity: sqrt(K + Q D) G to the gates, sqrt(K + Q^2 D) G to b, times |h| to W;
                 K = (N + T) S + Q D S u^2,  p = Q + (K + Q^2 D) w^2
    Source:      dh' = z dh + (h - n) s' dz + (1 - z) tanh' (da_n + r du_n + u_n s' dr)
    """
    (g, c_g), (n_h, c_h) = per_step(gates), per_step(h)
    w, (b, c_b), steps = weight.norm_size, of_bias(bias, g), gates.shape[0]
    n, largest = n_h, n_h
    for _ in range(min(steps, _STEPS)):
        u = w * n + b
        s = g + u
        at = _Gates.of(s, root_sum_squares(g, second_moment_root(torch.sigmoid, s) * u))
        n = (at.open * (n.square() + at.candidate)).sqrt()
        largest = torch.maximum(largest, n)
    through = at.open * at.candidate_slope
    common = (n.square() + at.candidate) * at.slope + through * at.slope * u.square()
    by_gates, by_state = common + through, common + at.open * through
    power, total = geometric((at.open + by_state * w.square()).sqrt(), steps)
    moves = {
        "gates": by_gates.sqrt() * total * c_g,
        "h": power * c_h,
        "weight": by_state.sqrt() * total * largest,
        "bias": by_state.sqrt() * total * c_b,
    }
    given = {"gates": gates, "h": h, "weight": weight, "bias": bias}
    return outcome(n, moves, given), outcome(n, moves, given)


# -- RNN -----------------------------------------------------------------------------------------------------------------------


def _elman(
    activation: Callable[[torch.Tensor], torch.Tensor],
    slope: Callable[[torch.Tensor], torch.Tensor],
    arguments: tuple[RMSTensor, RMSTensor, RMSToRMSTensor, RMSTensor | None],
) -> tuple:
    gates, h, weight, bias = arguments
    (g, c_g), (n_h, c_h) = per_step(gates), per_step(h)
    w, (b, c_b), steps = weight.norm_size, of_bias(bias, g), gates.shape[0]
    n, largest = n_h, n_h
    for _ in range(min(steps, _STEPS)):
        s = g + w * n + b
        n = second_moment_root(activation, s)
        largest = torch.maximum(largest, n)
    k = second_moment_root(slope, s)
    power, total = geometric(k * w, steps)
    moves = {"gates": k * total * c_g, "h": power * c_h, "weight": k * total * largest, "bias": k * total * c_b}
    given = {"gates": gates, "h": h, "weight": weight, "bias": bias}
    return outcome(n, moves, given), outcome(n, moves, given)


@rnn_tanh_layer.register_norm(mode="typical")
def _rnn_tanh_layer_typical(gates: RMSTensor, h: RMSTensor, weight: RMSToRMSTensor, bias: RMSTensor | None = None) -> tuple:
    """h <- tanh(a + W h + b).

    Value:       T^(1/2), at s of the step before
    Sensitivity: D^(1/2) G to the gates and b, times |h| to W;  p = D w^2
    """
    return _elman(torch.tanh, _tanh_slope, (gates, h, weight, bias))
