"""How the states of a GRU and an LSTM move, step by step: as vertices of `composed`'s graph.

A step is written so that what two gates share is there once, and every gate moves by the slopes that it has whatever the numbers are: sigmoids
are between 0 and 1 and have slopes in [0, 1/4], states are within known numbers.  For the difference of two runs, with D for diagonal
matrices of which only the range is known,

    GRU:   dp = da_n + D du_n + D dq_r,  D in [0, 1], [-u/4, u/4];      dn = D dp,  D in [0, 1]
           dh' = (dh + dn) / 2 + D (dh - dn) + D dq_z,                  D in [-1/2, 1/2], [-(1 + b)/4, (1 + b)/4]
    LSTM:  dc' = D dc + D dq_f + D dq_i + D dq_g,                       D in [0, 1], [-c/4, c/4], [-1/4, 1/4], [0, 1]
           dh' = D dc' + D dq_o,                                        D in [0, 1], [-tanh(c')/4, tanh(c')/4]

q_. being what sigmoids and tanhs are taken of, ``u_n = W_n h + b_n`` within u entry by entry, b >= 1 the largest entry of h, c that of c: it
grows by 1 in a step.  These are mean values over the way from one run to the other: ``h' = (h + n) / 2 + (z - 1/2) (h - n)`` keeps a
new state between the two that it is a mean of.  Near the data the ranges are smaller (`_recurrent_slopes`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from thunder_norm.core.ellipsoids import Dense, Ellipsoid, LinearMap, Picked, Scaled
from thunder_norm.core.slopes import Slopes
from thunder_norm.core.vertices import LARGEST, Root, Vertex
from thunder_norm.rules.layers._recurrent_slopes import GRUSlopes, Layer, LSTMSlopes, Near, gru_everywhere, lstm_everywhere

Terms = list[tuple[Vertex, LinearMap | None]]

# Entries of all states that are kept in one ellipsoid: the price is their cube for each step.
_MOST_AT_ONCE = 150
# Of lengths whose squares are numbers.
_LEAST, _MOST = 1e-120, 1e120

# What a step is given by one root: x, and the state and what else there is before it, or None if nothing of them moves yet.
Given = tuple[Vertex, "tuple[Vertex, ...] | None"]
# One step, numbered from 0: the state and what else there is after it, for each root.
Step = Callable[[Layer, "Near | None", int, Sequence[Given]], list[tuple[Vertex, ...]]]


def gru_step(layer: Layer, near: Near | None, number: int, given: Sequence[Given]) -> list[tuple[Vertex, ...]]:
    """The state after it, for each root."""
    (r, z, new), (r_h, z_h, new_h) = layer.by_input, layer.by_state
    size, gates = len(z), []
    for x, before in given:
        h = None if before is None else before[0]
        of_h = None if h is None else _sum(size, [(h, Dense(new_h))])
        gates.append((_affine(x, r, h, r_h), _affine(x, z, h, z_h), _sum(size, [(x, Dense(new))]), of_h, h))
    if near is None:
        slopes = gru_everywhere(layer, number)
    elif number < len(near.found):
        slopes = near.found[number]
    else:
        *of_gates, states = zip(*gates, strict=True)
        slopes = near.gru([_reached(parts, size) for parts in of_gates], _reached(_as_sums(states), size))
    return [_gru_state(size, slopes, *parts) for parts in gates]


def _gru_state(
    size: int, slopes: GRUSlopes, of_r: Vertex, of_z: Vertex, of_x: Vertex, of_h: Vertex | None, h: Vertex | None
) -> tuple[Vertex, ...]:
    p: Terms = [(of_x, None), (_bend(of_r, *slopes.r), None)]
    if of_h is not None:
        p.append((_bend(of_h, *slopes.u), None))
    n = _bend(_sum(size, p), *slopes.n)
    half, sign = (Scaled(torch.tensor([c], dtype=torch.float64), size) for c in (0.5, -1.0))
    apart = _sum(size, [(n, sign), *([] if h is None else [(h, None)])])
    terms: Terms = [(n, half), *([] if h is None else [(h, half)])]
    terms.append((_bend(apart, *slopes.apart), None))
    terms.append((_bend(of_z, *slopes.z), None))
    return (_sum(size, terms),)


def lstm_step(layer: Layer, near: Near | None, number: int, given: Sequence[Given]) -> list[tuple[Vertex, ...]]:
    """The state and the cell state after it, for each root."""
    size, gates = len(layer.by_input[0]), []
    for x, before in given:
        h, c = before or (None, None)
        gates.append((*(_affine(x, w, h, v) for w, v in zip(layer.by_input, layer.by_state, strict=True)), c))
    if near is None:
        slopes = lstm_everywhere(layer, number)
    elif number < len(near.found):
        slopes = near.found[number]
    else:
        *of_gates, cells = zip(*gates, strict=True)
        slopes = near.lstm([_reached(parts, size) for parts in of_gates], _reached(_as_sums(cells), size))
    return [_lstm_state(layer, slopes, *parts) for parts in gates]


def _lstm_state(
    layer: Layer, slopes: LSTMSlopes, i: Vertex, f: Vertex, g: Vertex, o: Vertex, c: Vertex | None
) -> tuple[Vertex, ...]:
    size = len(layer.by_input[0])
    terms: Terms = [(_bend(i, *slopes.i), None), (_bend(f, *slopes.f), None), (_bend(g, *slopes.g), None)]
    if c is not None:
        terms.append((_bend(c, *slopes.cell), None))
    cell = _sum(size, terms)
    state = _sum(size, [(_bend(cell, *slopes.new_cell), None), (_bend(o, *slopes.o), None)])
    if layer.projection is not None:
        state = _sum(len(layer.projection), [(state, Dense(layer.projection))])
    return state, cell


def _reached(parts: Sequence[Vertex | None], size: int) -> torch.Tensor:
    """How far each entry moves by all roots together."""
    return torch.stack([_reach(v, size) for v in parts]).sum(0)


def _as_sums(parts: Sequence[Vertex | None]) -> list[Vertex | None]:
    return [v and _sum(v.size, [(v, None)]) for v in parts]


def _reach(v: Vertex | None, size: int) -> torch.Tensor:
    """How far each entry of a sum of linear maps of parts of one vertex moves; not at all if there is none."""
    if v is None:
        return torch.zeros(size, dtype=torch.float64)
    matrix, base = torch.zeros((), dtype=torch.float64), v
    for part, c in v.terms:
        ((base, picked),) = part.terms
        assert picked is not None, "it is a part"
        rows = picked.times(torch.eye(base.size, dtype=torch.float64))
        matrix = matrix + (rows if c is None else c.times(rows) * c.scale)
    e, size_of_root = base.ellipsoid, v.root.size.detach().item()
    squares = ((matrix @ e.cov) * matrix).sum(1).detach() + 1e-12 * matrix.detach().square().sum(1)
    return e.scale * size_of_root * squares.clamp(min=0).sqrt() * (1 + 1e-9)


def sequence(step: Step, layer: Layer, near: Near | None, by_root: Sequence[Sequence[Vertex]]) -> list[tuple[Vertex, ...]] | None:
    """For each root all states as one vector, in the order of the steps, and what the last step leaves, given how the inputs move with it.

    The states so far, what else the last step has left and the inputs still to come are one vertex, so that a step is the way from one
    to the next, with one ellipsoid of all of it together.  None if that is more entries than a row may have.  Long ones go `one_by_one`, whose
    price is that of the steps.
    """
    count = len(by_root[0])
    entries = count * len(layer.by_input[0])
    # of one sequence that does not move each step is one linear map, and all are exact
    is_at_rest = near is not None and len(near.inputs[0]) == 1 and not any(v[0].root.size.detach().item() for v in by_root)
    if _MOST_AT_ONCE < entries <= LARGEST and not is_at_rest and (found := one_by_one(step, layer, near, by_root)) is not None:
        return found
    so_far = [_SoFar([], [], list(inputs)) for inputs in by_root]
    for number in range(count):
        if any(s.size > LARGEST for s in so_far):
            return None
        so_far = [s.of_one(number) for s in so_far]
        given = [(s.left.pop(0), (s.states[-1], *s.besides) if s.states else None) for s in so_far]
        for s, (state, *besides) in zip(so_far, step(layer, near, number, given), strict=True):
            s.states.append(state)
            s.besides[:] = besides
    if any(s.size > LARGEST for s in so_far):
        return None
    wholes = [s.of_one(count) for s in so_far]
    return [(_joined(s.states), s.states[-1], *s.besides) for s in wholes]


@dataclass(frozen=True)
class _SoFar:
    """The states so far, what else the last step has left, and the inputs still to come."""

    states: list[Vertex]
    besides: list[Vertex]
    left: list[Vertex]

    @property
    def size(self) -> int:
        return sum(v.size for v in (*self.states, *self.besides, *self.left))

    def of_one(self, number: int) -> _SoFar:
        """The same as parts of one vertex, after so many steps."""
        parts = _parts_of_one([*self.states, *self.besides, *self.left])
        end = len(parts) - len(self.left)
        return _SoFar(parts[:number], parts[number:end], parts[end:])


def one_by_one(
    step: Step, layer: Layer, near: Near | None, by_root: Sequence[Sequence[Vertex]]
) -> list[tuple[Vertex, ...]] | None:
    """As `sequence`, with no more of the past than the last state: as many small ellipsoids as there are steps.

    Let inputs be in an ellipsoid of blocks Q_t, one for each step, and what is left by a step, h_t, within P_t given those so far:
    ``h_t^T P_t^-1 h_t <= sum_(s <= t) x_s^T Q_s^-1 x_s``.  As a step is a linear map of both (which one, is not known), what it makes of the
    ellipsoid of the blocks P_t and Q_(t + 1) says the same of t + 1 (a storage function: Willems, "Dissipative dynamical systems", 1972).
    All states together are in that of the blocks ``P_t / c_t`` for numbers c_t that add up to 1; half of it is the last one's, which is what
    most programs go on with.  None if the blocks of the inputs are not apart, or numbers are too large or small.
    """
    blocks = [_blocks_of(inputs) for inputs in by_root]
    states: list[list[Ellipsoid]] = [[] for _ in by_root]
    sizes: list[int] = []
    for number in range(len(by_root[0])):
        given = []
        for inputs, of_root, so_far in zip(by_root, blocks, states, strict=True):
            if of_root is None:
                return None
            block = of_root[number]
            whole = Ellipsoid.of(torch.block_diag(_whole(so_far[-1]), block) if so_far else block)
            *before, x = _picked(Vertex(inputs[0].root, len(whole.cov), given=whole), [*sizes, len(block)])
            given.append((x, tuple(before) or None))
        for after, so_far in zip(step(layer, near, number, given), states, strict=True):
            sizes = [v.size for v in after]
            so_far.append(_joined(after).ellipsoid)
            if not _LEAST < so_far[-1].scale < _MOST:
                return None
    found = []
    for inputs, of_root in zip(by_root, states, strict=True):
        of_states = [_whole(e)[: sizes[0], : sizes[0]] for e in of_root]
        all_states = torch.block_diag(*(c * w for c, w in zip(of_states, _shares(len(of_states)), strict=True)))
        root, last = inputs[0].root, Vertex(inputs[0].root, sum(sizes), given=of_root[-1])
        found.append((Vertex(root, len(all_states), given=Ellipsoid.of(all_states)), *_picked(last, sizes)))
    return found


def _shares(count: int) -> list[float]:
    """By what ellipsoids of steps are larger in one of all of them: half of it is the last one's."""
    return [2.0 * (count - 1)] * (count - 1) + [2.0 if count > 1 else 1.0]


def each_within(size: torch.Tensor, steps: int, width: int) -> Vertex:
    """States of some steps, each of which moves so far in RMS, as one vector."""
    root, shares = Root(size), torch.tensor(_shares(steps), dtype=torch.float64)
    cov = torch.diag(shares.repeat_interleave(width) * width)
    return Vertex(root, steps * width, given=Ellipsoid.of(cov))


def _blocks_of(inputs: Sequence[Vertex]) -> list[torch.Tensor] | None:
    """The covariances of the inputs of all steps, if they are parts of one vector whose ellipsoid has no others."""
    whole = _joined(inputs).ellipsoid
    if not _LEAST < whole.scale < _MOST:
        return None
    cov, blocks, end = _whole(whole), [], 0
    for v in inputs:
        blocks.append(cov[end : end + v.size, end : end + v.size])
        end += v.size
    off = (cov - torch.block_diag(*blocks)).abs().amax().item()
    return blocks if off == 0 else None


def _whole(e: Ellipsoid) -> torch.Tensor:
    return e.cov * (e.scale * e.scale)


def _picked(whole: Vertex, sizes: Sequence[int]) -> list[Vertex]:
    """A vector's parts, one after the other."""
    ends = itertools.accumulate(sizes)
    return [_sum(n, [(whole, Picked(torch.arange(end - n, end)))]) for n, end in zip(sizes, ends, strict=True)]


def at_once(inputs: Sequence[Vertex]) -> list[Vertex]:
    """Inputs of all steps, each in an ellipsoid of its own of a root of the same size, as parts of one vector in an ellipsoid.

    That of T blocks ``T P_t``: of T numbers of at most 1 the squares over T add up to at most 1.
    """
    cov = torch.block_diag(*(v.ellipsoid.cov * (v.ellipsoid.scale * v.ellipsoid.scale * len(inputs)) for v in inputs))
    whole = Vertex(Root(inputs[0].root.size), len(cov), given=Ellipsoid.of(cov))
    return _picked(whole, [v.size for v in inputs])


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
    return Vertex(_root(terms), total, terms=tuple(terms), is_kept_whole=True)


def _parts_of_one(parts: Sequence[Vertex]) -> list[Vertex]:
    """The same vectors as parts of one vertex."""
    return _picked(_joined(parts), [v.size for v in parts])


def _root(terms: Terms) -> Root:
    return terms[0][0].root


def _sum(size: int, terms: Terms) -> Vertex:
    return Vertex(_root(terms), size, terms=tuple(terms))


def _affine(x: Vertex, by_input: torch.Tensor, h: Vertex | None, by_state: torch.Tensor) -> Vertex:
    return _sum(len(by_input), [(x, Dense(by_input)), *([] if h is None else [(h, Dense(by_state))])])


def _bend(v: Vertex, low: torch.Tensor, high: torch.Tensor) -> Vertex:
    return Vertex(v.root, v.size, terms=((v, None),), slopes=Slopes(low, high))
