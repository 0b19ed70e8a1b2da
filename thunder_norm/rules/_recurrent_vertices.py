"""How the states of a GRU and an LSTM move, step by step, for all inputs: as vertices of `composed`'s graph.

A step is written so that what two gates share is there once, and every gate moves by the slopes that it has whatever the numbers are: sigmoids
are between 0 and 1 and have slopes in [0, 1/4], states are within known numbers.  For the difference of two runs, with D for diagonal
matrices of which only the range is known,

    GRU:   dp = da_n + D du_n + D dq_r,  D in [0, 1], [-u/4, u/4];      dn = D dp,  D in [0, 1]
           dh' = (dh + dn) / 2 + D (dh - dn) + D dq_z,                  D in [-1/2, 1/2], [-(1 + b)/4, (1 + b)/4]
    LSTM:  dc' = D dc + D dq_f + D dq_i + D dq_g,                       D in [0, 1], [-c/4, c/4], [-1/4, 1/4], [0, 1]
           dh' = D dc' + D dq_o,                                        D in [0, 1], [-tanh(c')/4, tanh(c')/4]

q_. being what sigmoids and tanhs are taken of, ``u_n = W_n h + b_n`` within u entry by entry, b >= 1 the largest entry of h, c that of c: it
grows by 1 in a step.  These are mean values over the way from one run to the other: ``h' = (h + n) / 2 + (z - 1/2) (h - n)`` keeps a
new state between the two that it is a mean of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from thunder_norm.core.composed import LARGEST, Root, Vertex
from thunder_norm.core.ellipsoids import Dense, LinearMap, Picked, Scaled

Terms = list[tuple[Vertex, LinearMap | None]]


@dataclass(frozen=True, eq=False)
class Layer:
    """Matrices and bias of a layer, by gates: W_ih, W_hh and b_hh, in double precision.

    Attributes:
        by_input: [H, width of x] each.
        by_state: [H, width of h] each.
        bias: b_hh, [H] each, or zeros.
        projection: [width of h, H], of an LSTM that has one.
        largest: the largest entry of the first state, of an LSTM of the first cell state.
    """

    by_input: Sequence[torch.Tensor]
    by_state: Sequence[torch.Tensor]
    bias: Sequence[torch.Tensor]
    projection: torch.Tensor | None
    largest: float


# One step, numbered from 0: the state and what else there is after it, from x and that before, which are None if nothing of them moves yet.
Step = Callable[[Layer, int, Vertex, "tuple[Vertex, ...] | None"], tuple[Vertex, ...]]


def gru_step(layer: Layer, number: int, x: Vertex, before: tuple[Vertex, ...] | None) -> tuple[Vertex, ...]:
    """The state after it."""
    (r, z, new), (r_h, z_h, new_h) = layer.by_input, layer.by_state
    h = None if before is None else before[0]
    size, bound = len(z), max(layer.largest, 1.0)
    u = (new_h.abs().sum(1) * bound + layer.bias[2].abs()).detach()
    p: Terms = [(x, Dense(new)), (_bend(_affine(x, r, h, r_h), -u / 4, u / 4), None)]
    if h is not None:
        p.append((_between(_sum(size, [(h, Dense(new_h))]), 0.0, 1.0), None))
    n = _between(_sum(size, p), 0.0, 1.0)
    half, sign = (Scaled(torch.tensor([c], dtype=torch.float64), size) for c in (0.5, -1.0))
    apart = _sum(size, [(n, sign), *([] if h is None else [(h, None)])])
    terms: Terms = [(n, half), *([] if h is None else [(h, half)])]
    terms.append((_between(apart, -0.5, 0.5), None))
    terms.append((_between(_affine(x, z, h, z_h), -(1 + bound) / 4, (1 + bound) / 4), None))
    return (_sum(size, terms),)


def lstm_step(layer: Layer, number: int, x: Vertex, before: tuple[Vertex, ...] | None) -> tuple[Vertex, ...]:
    """The state and the cell state after it."""
    h, c = before or (None, None)
    size, bound = len(layer.by_input[0]), layer.largest + number
    i, f, g, o = (_affine(x, w, h, v) for w, v in zip(layer.by_input, layer.by_state, strict=True))
    terms: Terms = [(_between(i, -0.25, 0.25), None), (_between(f, -bound / 4, bound / 4), None), (_between(g, 0.0, 1.0), None)]
    if c is not None:
        terms.append((_between(c, 0.0, 1.0), None))
    cell = _sum(size, terms)
    most = math.tanh(bound + 1) / 4
    state = _sum(size, [(_between(cell, 0.0, 1.0), None), (_between(o, -most, most), None)])
    if layer.projection is not None:
        state = _sum(len(layer.projection), [(state, Dense(layer.projection))])
    return state, cell


def sequence(step: Step, layer: Layer, inputs: Sequence[Vertex]) -> tuple[Vertex, ...] | None:
    """All states as one vector, in the order of the steps, and what the last step leaves, given how inputs move with one root.

    The states so far, what else the last step has left and the inputs still to come are one vertex, so that a step is the way from one
    to the next, with one ellipsoid of all of it together.  None if that is more entries than a row may have.
    """
    states: list[Vertex] = []
    besides: list[Vertex] = []
    left = list(inputs)
    for number in range(len(inputs)):
        if sum(v.size for v in (*states, *besides, *left)) > LARGEST:
            return None
        parts = _parts_of_one([*states, *besides, *left])
        states, besides, left = parts[:number], parts[number : -len(left)], parts[-len(left) :]
        state, *besides = step(layer, number, left.pop(0), (states[-1], *besides) if states else None)
        states.append(state)
    if sum(v.size for v in (*states, *besides)) > LARGEST:
        return None
    whole = _parts_of_one([*states, *besides])
    return _joined(whole[: len(states)]), *whole[len(states) - 1 :]


def in_reverse(v: Vertex, steps: int) -> Vertex:
    """The same with the last step first."""
    return _sum(v.size, [(v, Picked(torch.arange(v.size).reshape(steps, -1).flip(0).flatten()))])


def _joined(parts: Sequence[Vertex]) -> Vertex:
    """One vector after the other."""
    total = sum(v.size for v in parts)
    terms: Terms = []
    for v, end in zip(parts, itertools.accumulate(v.size for v in parts), strict=True):
        index = torch.full((total,), -1)
        index[end - v.size : end] = torch.arange(v.size)
        terms.append((v, Picked(index)))
    return _sum(total, terms)


def _parts_of_one(parts: Sequence[Vertex]) -> list[Vertex]:
    """The same vectors as parts of one vertex."""
    whole = _joined(parts)
    ends = itertools.accumulate(v.size for v in parts)
    return [_sum(v.size, [(whole, Picked(torch.arange(end - v.size, end)))]) for v, end in zip(parts, ends, strict=True)]


def _root(terms: Terms) -> Root:
    return terms[0][0].root


def _sum(size: int, terms: Terms) -> Vertex:
    return Vertex(_root(terms), size, terms=tuple(terms))


def _affine(x: Vertex, by_input: torch.Tensor, h: Vertex | None, by_state: torch.Tensor) -> Vertex:
    return _sum(len(by_input), [(x, Dense(by_input)), *([] if h is None else [(h, Dense(by_state))])])


def _bend(v: Vertex, low: torch.Tensor, high: torch.Tensor) -> Vertex:
    return Vertex(v.root, v.size, terms=((v, None),), slopes=(low, high))


def _between(v: Vertex, low: float, high: float) -> Vertex:
    return _bend(v, *(torch.full((v.size,), end, dtype=torch.float64) for end in (low, high)))
