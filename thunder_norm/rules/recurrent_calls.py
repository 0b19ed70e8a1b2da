"""Torch's recurrent functions as programs of one layer and direction at a time: `torch.lstm`, `torch.gru_cell` and the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.context import current_environment
from thunder_norm.core.programs import written_as
from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.rules.recurrent import gru_layer, lstm_layer, rnn_relu_layer, rnn_tanh_layer

Tensors = tuple[torch.Tensor, ...]


def refuse_packed(location: str | None) -> UnsupportedOpError:
    """The error for a packed sequence."""
    return UnsupportedOpError(
        with_details(
            "a packed sequence in a traced program, or of normed tensors",
            at=location,
            why="its entries are those of several sequences in an order that depends on data, and a norm over them means nothing",
            instead="give the recurrent layer the padded sequence (batch_first or not), and mask its result",
        )
    )


@written_as(torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence)
def _packed(*args: Any, **kwargs: Any) -> Any:
    raise refuse_packed(current_environment().user_location())


def _cell(layer: Callable, x: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[Any]) -> Tensors:
    """One step of a layer: the states after it."""
    w_ih, w_hh, b_ih, b_hh = weights
    _, *after = layer(F.linear(x, w_ih, b_ih).unsqueeze(0), *states, w_hh, b_hh)
    return tuple(after)


@written_as(torch.lstm_cell)
def lstm_cell(input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """As `torch.lstm_cell`."""
    return _cell(lstm_layer, input, hx, (w_ih, w_hh, b_ih, b_hh))


def _cell_of(layer: Callable) -> Callable:
    return lambda input, hx, w_ih, w_hh, b_ih=None, b_hh=None: _cell(layer, input, (hx,), (w_ih, w_hh, b_ih, b_hh))[0]


def _direction(layer: Callable, x: torch.Tensor, states: Sequence, weights: Sequence, is_reversed: bool) -> Tensors:
    """One direction of one layer, [T, batch, features] to [T, batch, H] and the last states."""
    w_ih, w_hh, b_ih, b_hh, *projection = weights
    gates = F.linear(x, w_ih, b_ih)
    out, *after = layer(gates.flip(0) if is_reversed else gates, *states, w_hh, b_hh, *projection)
    return out.flip(0) if is_reversed else out, *after


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
    x = x.transpose(0, 1) if batch_first else x
    last: list[list[torch.Tensor]] = [[] for _ in hx]
    for i in range(num_layers):
        results = []
        for d in range(directions):
            at = i * directions + d
            weights: list[Any] = list(params[at * per_cell : (at + 1) * per_cell])
            if not has_biases:
                weights[2:2] = [None, None]
            out, *after = _direction(layer, x, [s.select(0, at) for s in hx], weights, d == 1)
            results.append(out)
            for kept, state in zip(last, after, strict=True):
                kept.append(state)
        x = results[0] if len(results) == 1 else torch.cat(results, -1)
        if dropout and train and i < num_layers - 1:
            x = F.dropout(x, dropout, training=True)
    return (x.transpose(0, 1) if batch_first else x), *(torch.stack(states) for states in last)


def _unpacked(args: tuple) -> None:
    """Torch has one function for packed sequences too: then the second argument is a tensor of batch sizes."""
    if isinstance(args[3], list | tuple):
        raise refuse_packed(current_environment().user_location())


@written_as(torch.lstm)
def lstm(input, hx, params, *settings):
    """As `torch.lstm`."""
    _unpacked((input, hx, params, *settings))
    return _stack(lstm_layer, input, hx, params, *settings)


def _of_one_state(layer: Callable) -> Callable:
    def run(input, hx, params, *settings):
        _unpacked((input, hx, params, *settings))
        return _stack(layer, input, (hx,), params, *settings)

    return run


for _layer, _function, _of_cell in (
    (gru_layer, torch.gru, torch.gru_cell),
    (rnn_tanh_layer, torch.rnn_tanh, torch.rnn_tanh_cell),
    (rnn_relu_layer, torch.rnn_relu, torch.rnn_relu_cell),
):
    written_as(_function)(_of_one_state(_layer))
    written_as(_of_cell)(_cell_of(_layer))
