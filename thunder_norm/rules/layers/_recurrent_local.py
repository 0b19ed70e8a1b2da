"""Recurrent layers at the data at hand: each step's slopes are those of its gates.

A step's Jacobian to the gates' input and to the state before is made of diagonal matrices, known from the data, and of the recurrent
weight W, of norm w.  Movements of the states, in RMS, are followed from step to step; d is that of ``a_t + W h_(t-1) + b``, which is
``d_a + w m_(t-1) + n_(t-1) d_W + d_b``, with n the norm of the state at the data.  All coefficients are the largest of the batch and of
a state's entries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor
from thunder_norm.rules._local import data
from thunder_norm.rules.layers._recurrent_slopes import GRUSlopes, LSTMSlopes, steepest
from thunder_norm.rules.layers._recurrent_steps import Activation, each_step, elman_step, gru_step, lstm_step

# The sensitivity of all states, of the last ones, by the names of arguments.
Moves = dict[str, torch.Tensor]


def lstm(
    gates: NormedTensor,
    h: NormedTensor,
    c: NormedTensor,
    weight: NormedTensor,
    bias: NormedTensor | None,
    projection: NormedTensor | None,
) -> tuple[Moves, Moves, Moves]:
    """Of all states, the last state and the last cell state.

    ``m_c <- max f m_c + 2 U d`` and ``m_h <- r (max (e f) m_c + 2 V d) + n_q d_P``, with ``e = o tanh'(c')``, ``q = o tanh(c')``,
    ``u = (g i (1 - i), c f (1 - f), i (1 - g^2))``, ``v = tanh(c') o (1 - o)``, U = max |u| and V = max |(e u, v)| for one entry.
    """
    found, before = [], (_exact(h), _exact(c))
    for s in each_step(lstm_step, _exact(gates).unbind(0), before, *_data(weight, bias, projection)):
        tanh = torch.tanh(s.c)
        e = s.o * (1 - tanh.square())
        u = (s.g * s.i * (1 - s.i)).square() + (before[1] * s.f * (1 - s.f)).square() + (s.i * (1 - s.g.square())).square()
        v = (tanh * s.o * (1 - s.o)).square()
        both = (e.square() * u + v).sqrt()
        found.append([_largest(x) for x in (s.f, u.sqrt(), e * s.f, both)] + [_longest(before[0]), _longest(s.hidden)])
        before = s.h, s.c
    f, u, e, v, n, q = _columns(found)
    w, r = weight.norm_size, torch.ones_like(weight.norm_size) if projection is None else projection.norm_size
    zero = torch.zeros_like(f)
    moved = _followed(
        [
            [f, 2 * u * w, 2 * u, 2 * u * n, 2 * u, zero],
            [r * e, 2 * r * v * w, 2 * r * v, 2 * r * v * n, 2 * r * v, q],
        ]
    )
    names = ("c", "h", "gates", "weight", "bias", "projection")
    return _named(names, moved[:, 1].amax(0)), _named(names, moved[-1, 1]), _named(names, moved[-1, 0])


def gru(gates: NormedTensor, h: NormedTensor, weight: NormedTensor, bias: NormedTensor | None) -> tuple[Moves, Moves]:
    """Of all states and the last.

    ``m <- max z m + 3^(1/2) (A d_a + B (w m + n d_W + d_b))``, A the largest length of ``a = ((1 - z) n' u_n r (1 - r), (h - n) z (1 - z),
    (1 - z) n')``, n' = 1 - n^2, and B of the same with the last one times r.
    """
    found, before = [], _exact(h)
    for s in each_step(gru_step, _exact(gates).unbind(0), (before,), *_data(weight, bias)):
        new = (1 - s.z) * (1 - s.n.square())
        others = (new * s.of_state * s.r * (1 - s.r)).square() + ((before - s.n) * s.z * (1 - s.z)).square()
        a, b = (others + new.square()).sqrt(), (others + (new * s.r).square()).sqrt()
        found.append([_largest(x) for x in (s.z, a, b)] + [_longest(before)])
        before = s.h
    z, a, b, n = _columns(found)
    a, b = math.sqrt(3) * a, math.sqrt(3) * b
    return _of_one_state([z + b * weight.norm_size, a, b * n, b])


def lstm_between(
    steps: Sequence[LSTMSlopes], n: torch.Tensor, weight: NormedTensor, projection: NormedTensor | None
) -> tuple[Moves, Moves, Moves]:
    """As `lstm`, for all that has slopes between these, of states of RMS n at most."""
    w = weight.norm_size
    one, zero = torch.ones_like(w), torch.zeros_like(w)
    r, found = one if projection is None else projection.norm_size, []
    for step in steps:
        cell, f, i, g, new, o = (steepest(s).to(w.device) for s in step)
        u = f.square() + i.square() + g.square()
        found.append([t.amax() for t in (cell, u.sqrt(), new * cell, (new.square() * u + o.square()).sqrt())])
    f, u, e, v = _columns(found)
    of_none, of_one = zero.expand_as(f), one.expand_as(f)
    moved = _followed(
        [[f, 2 * u * w, 2 * u, 2 * u * n, 2 * u, of_none], [r * e, 2 * r * v * w, 2 * r * v, 2 * r * v * n, 2 * r * v, of_one]]
    )
    names = ("c", "h", "gates", "weight", "bias", "projection")
    return _named(names, moved[:, 1].amax(0)), _named(names, moved[-1, 1]), _named(names, moved[-1, 0])


def gru_between(steps: Sequence[GRUSlopes], n: torch.Tensor, weight: NormedTensor) -> tuple[Moves, Moves]:
    """As `gru`, for all that has slopes between these, of states of RMS n at most."""
    found = []
    for step in steps:
        u, r, new, _, z = (steepest(s).to(n.device) for s in step)
        low, high = (t.to(n.device) for t in step.apart)
        new = new * torch.maximum((0.5 - low).abs(), (0.5 - high).abs())
        others = (new * r).square() + z.square()
        kept = torch.maximum((0.5 + low).abs(), (0.5 + high).abs())
        found.append([t.amax() for t in (kept, (others + new.square()).sqrt(), (others + (new * u).square()).sqrt())])
    z, a, b = _columns(found)
    a, b = math.sqrt(3) * a, math.sqrt(3) * b
    return _of_one_state([z + b * weight.norm_size, a, b * n, b])


def elman(
    activation: Activation,
    slope: Callable[[torch.Tensor], torch.Tensor],
    gates: NormedTensor,
    h: NormedTensor,
    weight: NormedTensor,
    bias: NormedTensor | None,
) -> tuple[Moves, Moves]:
    """Of all states and the last: ``m <- D d``, D the steepest slope, which is that of the state made (`slope`)."""
    found, before = [], _exact(h)
    for s in each_step(functools.partial(elman_step, activation), _exact(gates).unbind(0), (before,), *_data(weight, bias)):
        found.append([_largest(slope(s.h)), _longest(before)])
        before = s.h
    d, n = _columns(found)
    return _of_one_state([d * weight.norm_size, d, d * n, d])


def _of_one_state(coefficients: Sequence[torch.Tensor]) -> tuple[Moves, Moves]:
    moved, names = _followed([coefficients])[:, 0], ("h", "gates", "weight", "bias")
    return _named(names, moved.amax(0)), _named(names, moved[-1])


def _data(*weights: NormedTensor | None) -> list[torch.Tensor | None]:
    return [None if w is None else _exact(w) for w in weights]


def _exact(x: NormedTensor) -> torch.Tensor:
    """In double precision: of a gate that is closed there is something left."""
    return data(x).to(NORM_DTYPE)


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax()


def _longest(x: torch.Tensor) -> torch.Tensor:
    return RMSTensor.measure(x, (-1,))


def _columns(rows: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """What was found of each step, by what it is: [T] each."""
    return [torch.stack(column).to(NORM_DTYPE) for column in zip(*rows, strict=True)]


def _named(names: Sequence[str], moved: torch.Tensor) -> Moves:
    return dict(zip(names, moved.unbind(0), strict=True))


def _followed(coefficients: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Movements after each step, [T, states, states + sources], of recursions ``m_i <- sum_j A_ij m_j + sum_s B_is d_s``.

    All products of the first matrices are found at once, from those of half as many.

    Args:
        coefficients: for each state those of the states and of the sources, [T] each.
    """
    rows = torch.stack([torch.stack(list(row), -1) for row in coefficients], 1)
    steps, states, size = rows.shape
    constant = torch.eye(size, dtype=rows.dtype, device=rows.device)[states:].expand(steps, -1, -1)
    products, shift = torch.cat([rows, constant], 1), 1
    while shift < steps:
        later = (products[shift:] @ products[:-shift]).nan_to_num(nan=math.inf, posinf=math.inf)  # 0 times infinity
        products, shift = torch.cat([products[:shift], later]), 2 * shift
    return products[:, :states]
