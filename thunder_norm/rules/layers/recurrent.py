"""Norm rules for recurrent layers: LSTM, GRU and RNN, one direction of one layer each, over a whole sequence.

Step by step the gates' products would be bounded by norms of both factors, as if any two could be large at the same entries.  Over
a whole sequence more is known: gates lie in (0, 1), states of an LSTM grow by at most 1 in a step, those of a GRU stay within 1.

H is the width, T the number of steps; g, b and n are the norms of the gates' input, of the bias and of a state, w of the recurrent
weight.  A step's pre-activations a are in one tensor, of which a gate's part has at most ``sqrt(gates)`` times the RMS.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch

from thunder_norm.core.kinds import LinfTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._shared import as_kind, root_sum_squares, scalar
from thunder_norm.rules.layers import _recurrent_local
from thunder_norm.rules.layers._recurrent_slopes import Near
from thunder_norm.rules.layers._recurrent_steps import Activation, each_step, elman_step, gru_step, lstm_step

Tensors = tuple[torch.Tensor, ...]
# Steps are taken together in so many blocks, each with the largest constant in it: a longer sequence is no longer trace.
_BLOCKS = 16


def geometric(p: torch.Tensor, count: int) -> Tensors:
    """``p^count`` and ``1 + p + ... + p^(count - 1)``, by doubling."""
    power, total = torch.ones_like(p), torch.zeros_like(p)
    for bit in bin(count)[2:]:
        power, total = power * power, total * (1 + power)
        if bit == "1":
            power, total = power * p, total * p + 1
    return power, total


def per_step(x: RMSTensor) -> tuple[torch.Tensor, float]:
    """A bound on the RMS of each step's entries, and its derivative to the norm."""
    converted, c = as_kind(x, RMSTensor, (-1,))
    return converted.norm_size, c


def _largest(x: RMSTensor) -> torch.Tensor:
    return as_kind(x, LinfTensor, ())[0].norm_size


def of_bias(x: RMSTensor | None, like: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The same of a bias, nothing of none."""
    return (torch.zeros_like(like), 0.0) if x is None else per_step(x)


def outcome(size: torch.Tensor, sensitivity: dict[str, torch.Tensor], given: Mapping[str, object]) -> RMSTensor:
    """A state's norm; sensitivities to the arguments that there are."""
    return RMSTensor(size, elem_dims=(-1,), sensitivity={k: v for k, v in sensitivity.items() if given[k] is not None})


def _is_at_data(given: Mapping[str, NormedTensor | None]) -> bool:
    return is_local(*(x for x in given.values() if x is not None))


def _times(moves: Mapping[str, torch.Tensor], costs: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Sensitivities to norms, from those to sizes at each step and what these cost."""
    return {k: v * costs.get(k, 1.0) for k, v in moves.items()}


# -- LSTM ----------------------------------------------------------------------------------------------------------------------


@normed_op
def lstm_layer(
    gates: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    projection: torch.Tensor | None = None,
    near: Near | None = None,
) -> Tensors:
    """One direction of an LSTM over a sequence, from the input's part of the gates.

    Args:
        gates: ``W_ih x + b_ih``, [T, batch, 4 H], in torch's order: input, forget, cell, output.
        h: the first state, [batch, H], or as wide as the projection makes it.
        c: the first cell state, [batch, H].
        weight: W_hh, [4 H, width of h].
        bias: b_hh, [4 H].
        projection: W_hr, [width of h, H].
        near: where the steps are known to be: sensitivities are for that.

    Returns:
        All states [T, batch, width of h], the last state, the last cell state.
    """
    after = list(each_step(lstm_step, gates.unbind(0), (h, c), weight, bias, projection))
    return torch.stack([s.h for s in after]), *after[-1][:2]


@lstm_layer.register_norm
def _lstm_layer(
    gates: RMSTensor,
    h: RMSTensor,
    c: RMSTensor,
    weight: RMSToRMSTensor,
    bias: RMSTensor | None = None,
    projection: RMSToRMSTensor | None = None,
    near: Near | None = None,
) -> tuple:
    """c <- s(f) c + s(i) tanh(g), h <- P s(o) tanh(c), with s the sigmoid and P a projection of norm r, else r = 1.

    Value:       c: n_c + T tanh(2 (g + w max(n_h, r) + b)); h: r tanh of that
    Sensitivity: m_T of ``m_t = m_(t-1) + k_t (d_a + w r m_(t-1))``, k_t = 2 sqrt(1 + 2/16 + C_t^2 / 16), C_t = C_0 + t - 1 the largest
                 entry of c; times r for h
    Gap:         the slopes of the four gates and the growth of c cannot all be largest at once, and at every step
    Local:       the gates' own slopes, step by step (`_recurrent_local.lstm`); or those between which they are (`lstm_between`)
    Source:      ``|d c'| <= |d c| + C/4 |d f| + 1/4 |d i| + |d g|``, ``|d h'| <= |d c'| + 1/4 |d o|``, Cauchy-Schwarz over the gates
    """
    (g, c_g), (n_h, c_h), (n_c, c_c) = (per_step(x) for x in (gates, h, c))
    w, (b, c_b), steps = weight.norm_size, of_bias(bias, g), gates.shape[0]
    r = torch.ones_like(g) if projection is None else projection.norm_size
    n = torch.maximum(n_h, r)
    size = n_c + steps * torch.tanh(2 * (g + w * n + b))
    given = {"gates": gates, "h": h, "c": c, "weight": weight, "bias": bias, "projection": projection}
    costs = {"gates": c_g, "h": c_h, "c": c_c, "bias": c_b}
    if near is not None or _is_at_data(given):
        if near is None:
            found = _recurrent_local.lstm(gates, h, c, weight, bias, projection)
        else:
            found = _recurrent_local.lstm_between(near.found, n, weight, projection)
        sizes = (r * torch.tanh(size), r * torch.tanh(size), size)
        return tuple(outcome(n, _times(moves, costs), given) for n, moves in zip(sizes, found, strict=True))
    largest = _largest(c)

    def slope(step: int) -> torch.Tensor:
        return 0.5 * (18 + (largest + step).square()).sqrt()

    first = slope(0)
    rest, total = torch.ones_like(g), first
    after_first = torch.zeros_like(g)
    for begin, end in _blocks(steps):
        k = slope(end - 1)
        power, sum_of_powers = geometric(1 + k * w * r, end - begin)
        rest, total = rest * power, total * power + k * sum_of_powers
        after_first = after_first * power + k * sum_of_powers
    moves = {
        "gates": total,
        "h": rest * first * w,
        "c": rest,
        "weight": total * n,
        "bias": total,
        "projection": after_first * w,
    }
    moves = _times(moves, costs)
    of_state = {k: r * v for k, v in moves.items()}
    of_state["projection"] = of_state["projection"] + torch.tanh(size)
    state = [outcome(r * torch.tanh(size), of_state, given) for _ in range(2)]
    return *state, outcome(size, moves, given)


def _blocks(steps: int) -> list[tuple[int, int]]:
    """Steps 1 .. T - 1, a few together."""
    length = max(1, math.ceil((steps - 1) / _BLOCKS))
    return [(begin, min(begin + length, steps)) for begin in range(1, steps, length)]


# -- GRU -----------------------------------------------------------------------------------------------------------------------


@normed_op
def gru_layer(
    gates: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    near: Near | None = None,
) -> Tensors:
    """One direction of a GRU over a sequence, from the input's part of the gates.

    Args:
        gates: ``W_ih x + b_ih``, [T, batch, 3 H], in torch's order: reset, update, new.
        h: the first state, [batch, H].
        weight: W_hh, [3 H, H].
        bias: b_hh, [3 H].
        near: where the steps are known to be: sensitivities are for that.

    Returns:
        All states [T, batch, H], and the last.
    """
    states = [s.h for s in each_step(gru_step, gates.unbind(0), (h,), weight, bias)]
    return torch.stack(states), states[-1]


@gru_layer.register_norm
def _gru_layer(
    gates: RMSTensor,
    h: RMSTensor,
    weight: RMSToRMSTensor,
    bias: RMSTensor | None = None,
    near: Near | None = None,
) -> tuple:
    """h <- (1 - z) tanh(a_n + r u_n) + z h, with r = s(a_r + u_r), z = s(a_z + u_z), u = W h + b.

    Value:       min(M, sqrt(1 + n^2), n + T tanh(sqrt 3 (g + w n' + b))), M = max(1, largest entry of h), n' = min(M, sqrt(1 + n^2))
    Sensitivity: m_T of ``m_t = m_(t-1) + q (d_a + w m_(t-1))``, q = sqrt 3 sqrt(1 + (U^2 + (M + 1)^2) / 16), U the largest entry of u_n
    Gap:         the slopes of the three gates cannot all be largest at once, and at every step
    Local:       the gates' own slopes, step by step (`_recurrent_local.gru`); or those between which they are (`gru_between`)
    Source:      ``|d h'| <= |d h| + |d a_n| + |d u_n| + U/4 |d r| + (M + 1)/4 |d z|``, Cauchy-Schwarz over the gates
    """
    (g, c_g), (n_h, c_h) = per_step(gates), per_step(h)
    w, (b, c_b), steps = weight.norm_size, of_bias(bias, g), gates.shape[0]
    bound = _largest(h).clamp(min=1.0)
    n = torch.minimum(bound, root_sum_squares(n_h, scalar(1.0, n_h)))
    size = torch.minimum(n, n_h + steps * torch.tanh(math.sqrt(3) * (g + w * n + b)))
    given = {"gates": gates, "h": h, "weight": weight, "bias": bias}
    costs = {"gates": c_g, "h": c_h, "bias": c_b}
    if near is not None or _is_at_data(given):
        if near is None:
            found = _recurrent_local.gru(gates, h, weight, bias)
        else:
            found = _recurrent_local.gru_between(near.found, n, weight)
        return tuple(outcome(size, _times(moves, costs), given) for moves in found)
    entry = math.sqrt(3 * h.shape[-1]) * (w * n + b)
    q = math.sqrt(3) * (1 + (entry.square() + (bound + 1).square()) / 16).sqrt()
    power, total = geometric(1 + q * w, steps)
    moves = _times({"gates": q * total, "h": power, "weight": q * total * n, "bias": q * total}, costs)
    return outcome(size, moves, given), outcome(size, moves, given)


# -- RNN -----------------------------------------------------------------------------------------------------------------------


def _elman(
    activation: Activation,
    gates: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> Tensors:
    states = [s.h for s in each_step(functools.partial(elman_step, activation), gates.unbind(0), (h,), weight, bias)]
    return torch.stack(states), states[-1]


@normed_op
def rnn_tanh_layer(gates: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Tensors:
    """One direction of an RNN, ``h <- tanh(a + W h + b)``: all states [T, batch, H] and the last; arguments as `gru_layer`'s."""
    return _elman(torch.tanh, gates, h, weight, bias)


@normed_op
def rnn_relu_layer(gates: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Tensors:
    """One direction of an RNN, ``h <- relu(a + W h + b)``: all states [T, batch, H] and the last; arguments as `gru_layer`'s."""
    return _elman(torch.relu, gates, h, weight, bias)


def _elman_rule(gates: RMSTensor, h: RMSTensor, weight: RMSToRMSTensor, bias: RMSTensor | None, is_bounded: bool) -> tuple:
    (g, c_g), (n_h, c_h) = per_step(gates), per_step(h)
    w, (b, c_b), steps = weight.norm_size, of_bias(bias, g), gates.shape[0]
    # of the states before the last; the first one's share is largest at the first step or at the last
    reach = _reach(n_h, g + b, w, steps - 1)
    if is_bounded:
        reach = torch.minimum(reach, n_h.clamp(min=1.0))
    size = torch.tanh(g + b + w * reach) if is_bounded else g + b + w * reach
    given = {"gates": gates, "h": h, "weight": weight, "bias": bias}
    costs = {"gates": c_g, "h": c_h, "bias": c_b}
    if _is_at_data(given):
        activation, slope = (torch.tanh, _slope_of_tanh) if is_bounded else (torch.relu, _slope_of_relu)
        found = _recurrent_local.elman(activation, slope, gates, h, weight, bias)
        return tuple(outcome(size, _times(moves, costs), given) for moves in found)
    _, total = geometric(w, steps)
    share, _ = geometric(w.clamp(min=1.0), steps - 1)
    moves = _times({"gates": total, "h": w * share, "weight": total * reach, "bias": total}, costs)
    return outcome(size, moves, given), outcome(size, moves, given)


def _slope_of_tanh(state: torch.Tensor) -> torch.Tensor:
    return 1 - state.square()


def _slope_of_relu(state: torch.Tensor) -> torch.Tensor:
    return (state > 0).to(state.dtype)


def _reach(n: torch.Tensor, a: torch.Tensor, w: torch.Tensor, steps: int) -> torch.Tensor:
    """At least ``n_t`` of ``n_t = a + w n_(t-1)`` for all t <= steps."""
    share, _ = geometric(w.clamp(min=1.0), steps)
    return share * n + geometric(w, steps)[1] * a


@rnn_tanh_layer.register_norm
def _rnn_tanh_layer(gates: RMSTensor, h: RMSTensor, weight: RMSToRMSTensor, bias: RMSTensor | None = None) -> tuple:
    """h <- tanh(a + W h + b).

    Value:       tanh(g + b + w n'), n' the largest of the states before: at most max(1, n), and what `rnn_relu_layer` says of them
    Sensitivity: 1 + w + ... + w^(T - 1) to the gates and b, times n' to W; w max(1, w)^(T - 1) to h
    Gap:         tanh has slope 1 at 0 only, and all steps are rarely the worst at once
    Local:       the steepest slope of each step (`_recurrent_local.elman`)
    """
    return _elman_rule(gates, h, weight, bias, is_bounded=True)


@rnn_relu_layer.register_norm
def _rnn_relu_layer(gates: RMSTensor, h: RMSTensor, weight: RMSToRMSTensor, bias: RMSTensor | None = None) -> tuple:
    """h <- relu(a + W h + b).

    Value:       (g + b) (1 + w + ... + w^(T - 1)) + w max(1, w)^(T - 1) n      (attained by constants where w >= 1)
    Sensitivity: 1 + w + ... + w^(T - 1) to the gates and b, times the largest of the states before to W; w max(1, w)^(T - 1) to h
    Gap:         where w < 1 the first state matters at the first step only, the others at the last
    Local:       steps at which no unit is open hand nothing on (`_recurrent_local.elman`)
    """
    return _elman_rule(gates, h, weight, bias, is_bounded=False)
