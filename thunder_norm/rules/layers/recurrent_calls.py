"""Torch's recurrent functions as programs of one layer and direction at a time: `torch.lstm`, `torch.gru_cell` and the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm import padded_sequences
from thunder_norm.core import conversions
from thunder_norm.core.composed import Spread, is_composed, is_fixed, moves, moves_as, moves_within, spread_of, values
from thunder_norm.core.context import current_environment
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import is_within
from thunder_norm.core.programs import written_as
from thunder_norm.core.tensors import NormedTensor, unwatched
from thunder_norm.core.vertices import Vertex
from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.rules.layers import _recurrent_vertices
from thunder_norm.rules.layers._recurrent_slopes import Layer, Near
from thunder_norm.rules.layers._recurrent_steps import each_step, elman_step, gru_step, lstm_step
from thunder_norm.rules.layers.recurrent import gru_layer, lstm_layer, rnn_relu_layer, rnn_tanh_layer

Tensors = tuple[torch.Tensor, ...]

written_as(torch._VF._pack_padded_sequence)(padded_sequences.pack)
written_as(torch._VF._pad_packed_sequence)(padded_sequences.pad_packed)


_STEPS: dict[Any, Callable] = {
    lstm_layer: lstm_step,
    gru_layer: gru_step,
    rnn_tanh_layer: functools.partial(elman_step, torch.tanh),
    rnn_relu_layer: functools.partial(elman_step, torch.relu),
}


# Their steps say all there is.  Products of gates, one after the other, say less than how the whole step moves (`_recurrent_vertices`).
_OF_ONE_SLOPE = (rnn_tanh_layer, rnn_relu_layer)
_OF_GATES: dict[Any, tuple[_recurrent_vertices.Step, int]] = {
    gru_layer: (_recurrent_vertices.gru_step, 3),
    lstm_layer: (_recurrent_vertices.lstm_step, 4),
}


def _direction(layer: Callable, x: torch.Tensor, states: Sequence, weights: Sequence, is_reversed: bool, time: int) -> Tensors:
    """One direction of one layer: all states, as x has its steps along the dimension `time`, and the last ones."""
    w_ih, w_hh, b_ih, b_hh, *projection = weights
    gates = F.linear(x.transpose(0, time) if time else x, w_ih, b_ih)
    _check_batch(gates, states)
    out, *after = layer(gates.flip(0) if is_reversed else gates, *states, w_hh, b_hh, *projection)
    turned = out.flip(0) if is_reversed else out
    found = turned.transpose(0, time) if time else turned, *after
    if not is_composed():
        return found
    environment = current_environment()
    same = zip((out, turned, *found), (found[0], found[0], *found), strict=True)
    before = [(y.perturbation_size, now) for y, now in same if moves(y)]
    with environment.aside():
        is_moved = layer in _OF_GATES and _move_by_gates(found, layer, x, states, weights, is_reversed, time)
        if layer in _OF_ONE_SLOPE or is_within() and not is_moved:
            _move_by_steps(found, layer, x, states, weights, is_reversed, time)
    for size, now in before:
        environment.note_moved(size, now.perturbation_size)
    return found


def _check_batch(gates: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
    """Refuse states of another batch than the steps have: torch's kernel broadcasts them, the modules of `torch.nn` do not.

    Raises:
        UnsupportedOpError: that is the case.
    """
    batch = tuple(gates.shape[1:-1])
    if any(tuple(s.shape[:-1]) != batch for s in states):
        raise UnsupportedOpError(
            with_details(
                f"a recurrent function is called with steps of batch {batch} and states of {[tuple(s.shape[:-1]) for s in states]}",
                at=current_environment().user_location(),
                why="torch's kernel for CPUs broadcasts such states, the modules of torch.nn refuse them: norms are of one state for each sequence",
                instead="expand the states, or unsqueeze a single sequence, as torch.nn.LSTM does",
            )
        )


def _move_by_steps(
    found: Tensors, layer: Callable, x: torch.Tensor, states: Sequence, weights: Sequence, is_reversed: bool, time: int
) -> None:
    """What `_direction` has found moves as its steps one after the other do, whose matrices are composed."""
    w_ih, w_hh, b_ih, b_hh, *projection = weights
    inputs = x.unbind(time)
    parts = (F.linear(t, w_ih, b_ih) for t in (inputs[::-1] if is_reversed else inputs))
    hidden, last = [], states
    for step in each_step(_STEPS[layer], parts, tuple(states), w_hh, b_hh, *projection):
        hidden.append(step.h)
        last = step[: len(states)]
    by_steps = torch.stack(hidden[::-1] if is_reversed else hidden, time), *last
    for y, same in zip(found, by_steps, strict=True):
        if not moves(y) or not moves(same) or not (is_within() or _has_roots_of(same, x)):
            continue
        if conversions.factor(same, type(y), y.elem_dims) is not None:  # how far it moves is said in the norm that it has
            in_its_norm = conversions.convert(same, type(y), y.elem_dims)
            in_its_norm._spread = same._spread
            moves_as(y, in_its_norm)


def _move_by_gates(
    found: Tensors, layer: Callable, x: torch.Tensor, states: Sequence, weights: Sequence, is_reversed: bool, time: int
) -> bool:
    """What `_direction` has found moves as the gates at each step do, by x, the features of its rows in time, and by parameters; whether that is so."""
    results = [y for y in found if moves(y)]
    given = [t for t in (*states, *weights) if t is not None]
    if not moves(x) or not x.numel() or time != x.ndim - 2 or not all(map(is_fixed, given)) or len(results) < len(found):
        return False
    if not all(isinstance(y, RMSTensor) and y.elem_dims == (-1,) for y in results):
        return False
    inputs = x.unbind(time)
    spreads = [s for t in inputs if moves(t) and (s := spread_of(t)) is not None and s.ndim == 1]
    if len(spreads) < len(inputs) or not spreads:
        return False
    with (
        unwatched(),
        _disable_current_modes(),
    ):  # they are about the program, and this is thousands of operations on matrices of ours
        found_by_gates = _by_gates(
            layer, x, inputs, spreads[::-1] if is_reversed else spreads, states, weights, is_reversed, time
        )
    if found_by_gates is None:
        return False
    made, near = found_by_gates
    left = _by_parameters(layer, x, states, weights, is_reversed, time, near)
    with unwatched():
        for i, (y, size) in enumerate(zip(results, left, strict=True)):
            parts = [m[i] for m in made]
            if size is not None:
                parts.append(_recurrent_vertices.each_within(size, 1 if i else len(inputs), y.shape[-1]))
            turned = i == 0 and is_reversed
            moves_within(y, 1 if i else 2, [_recurrent_vertices.in_reverse(v, len(inputs)) for v in parts] if turned else parts)
    return True


def _by_gates(
    layer: Callable,
    x: NormedTensor,
    inputs: Sequence[torch.Tensor],
    order: Sequence[Spread],
    states: Sequence,
    weights: Sequence,
    is_reversed: bool,
    time: int,
) -> tuple[list[tuple[Vertex, ...]], Near | None] | None:
    """The vertices of all states and of the last ones for each root that x moves with, and what was known near the data; None if that is too much.

    Args:
        layer: the layer.
        x: the sequences.
        inputs: of each step.
        order: how these move, the first step's first.
        states: the first states.
        weights: those of the layer.
        is_reversed: whether it begins at the end.
        time: the dimension of the steps.
    """
    w_ih, w_hh, b_ih, b_hh, *projection = weights
    step, gates = _OF_GATES[layer]
    own = Layer(
        by_input=values(w_ih).chunk(gates),
        by_state=values(w_hh).chunk(gates),
        bias=(values(w_hh)[:, 0].detach() * 0 if b_hh is None else values(b_hh)).chunk(gates),
        input_bias=(values(w_ih)[:, 0].detach() * 0 if b_ih is None else values(b_ih)).chunk(gates),
        projection=values(projection[0]) if projection else None,
        largest=values(states[-1]).detach().abs().amax().item(),
    )
    if all(_has_roots_of(t, x) for t in inputs):
        by_root = [[v for s in order for v in s.parts if v.root is first.root] for first in order[0].parts]
    elif len({tuple(id(v.root.size) for v in s.parts) for s in order}) == 1:
        by_root = [_recurrent_vertices.at_once(parts) for parts in zip(*(s.parts for s in order), strict=True)]
    else:
        return None
    if any(len(of_root) < len(inputs) for of_root in by_root):
        return None
    near = _near(own, x, states, is_reversed, time) if is_within() else None
    made = _recurrent_vertices.sequence(step, own, near, by_root)
    return None if made is None else (made, near)


def _by_parameters(
    layer: Callable, x: NormedTensor, states: Sequence, weights: Sequence, is_reversed: bool, time: int, near: Near | None
) -> list[torch.Tensor | None]:
    """How far what `_direction` has found moves by the parameters, by the norm rule, near the data if that is asked for."""
    w_ih, w_hh, b_ih, b_hh, *projection = weights
    still = type(x)._wrap(x.backing, x.norm_size, None, x.elem_dims)
    gates = F.linear(still.transpose(0, time), w_ih, b_ih)
    found = layer(gates.flip(0) if is_reversed else gates, *states, w_hh, b_hh, *projection, near=near)
    return [y.perturbation_size for y in found]


def _near(layer: Layer, x: NormedTensor, states: Sequence[torch.Tensor], is_reversed: bool, time: int) -> Near:
    """The sequences at hand, in the order of the steps."""
    data = values(x.backing.detach())
    rows = [t.reshape(-1, t.shape[-1]) for t in data.unbind(time)]
    assert x.perturbation_size is not None
    largest = data.abs().amax().item() if data.numel() and x.perturbation_size.item() else 0.0
    slack = 1000 * torch.finfo(x.backing.dtype).eps * largest
    before = [values(s).detach().reshape(-1, s.shape[-1]) for s in states]
    return Near(layer, rows[::-1] if is_reversed else rows, slack, before)


def _has_roots_of(y: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether y moves with the roots of x alone: its rows are made of the same rows of x, and its steps are not added up one by one."""
    of_y, of_x = (spread_of(t) if moves(t) else None for t in (y, x))
    return of_y is not None and of_x is not None and {v.root for v in of_y.parts} <= {v.root for v in of_x.parts}


def _cell(layer: Callable, x: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[Any]) -> Tensors:
    """One step of a layer: the states after it."""
    return _direction(layer, x.unsqueeze(0), states, weights, False, 0)[1:]


@written_as(torch.lstm_cell)
def lstm_cell(input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """As `torch.lstm_cell`."""
    return _cell(lstm_layer, input, hx, (w_ih, w_hh, b_ih, b_hh))


def _cell_of(layer: Callable) -> Callable:
    return lambda input, hx, w_ih, w_hh, b_ih=None, b_hh=None: _cell(layer, input, (hx,), (w_ih, w_hh, b_ih, b_hh))[0]


def _dropped(x: torch.Tensor, dropout: float, time: int) -> torch.Tensor:
    """Dropout between layers, drawn in the order of torch's kernels: step by step, whichever dimension the caller has first."""
    steps = x.transpose(0, time).contiguous() if time else x
    dropped = F.dropout(steps, dropout, training=True)
    return dropped.transpose(0, time) if time else dropped


def _stack(
    layer: Callable,
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Tensors:
    """All layers, and the last states of each, stacked as torch stacks them."""
    directions = 2 if bidirectional else 1
    per_cell = len(params) // (num_layers * directions)
    last: list[list[torch.Tensor]] = [[] for _ in hx]
    for i in range(num_layers):
        results = []
        for d in range(directions):
            at = i * directions + d
            weights: list[Any] = list(params[at * per_cell : (at + 1) * per_cell])
            if not has_biases:
                weights[2:2] = [None, None]
            out, *after = _direction(layer, x, [s.select(0, at) for s in hx], weights, d == 1, int(batch_first))
            results.append(out)
            for kept, state in zip(last, after, strict=True):
                kept.append(state)
        x = results[0] if len(results) == 1 else torch.cat(results, -1)
        if dropout and train and i < num_layers - 1:
            x = _dropped(x, dropout, int(batch_first))
    return x, *(torch.stack(states) for states in last)


@written_as(torch.lstm)
def lstm(*args):
    """As `torch.lstm`."""
    return padded_sequences.recurrent(torch.lstm, *args) if padded_sequences.is_packed(*args) else _stack(lstm_layer, *args)


def _of_one_state(layer: Callable, function: Callable) -> Callable:
    def run(*args):
        if padded_sequences.is_packed(*args):
            return padded_sequences.recurrent(function, *args)
        input, hx, *rest = args
        return _stack(layer, input, (hx,), *rest)

    return run


for _layer, _function, _of_cell in (
    (gru_layer, torch.gru, torch.gru_cell),
    (rnn_tanh_layer, torch.rnn_tanh, torch.rnn_tanh_cell),
    (rnn_relu_layer, torch.rnn_relu, torch.rnn_relu_cell),
):
    written_as(_function)(_of_one_state(_layer, _function))
    written_as(_of_cell)(_cell_of(_layer))
