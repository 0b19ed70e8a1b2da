"""Sequences of several lengths in one batch, padded or packed as `torch.nn.utils.rnn` has them, of tensors and of what stands for them.

A packed sequence has the entries of the padded one that are no padding: each has its norm, and rules know it.  What a recurrent
function makes of it is what it makes of unpacked ones, as long as none of them ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.errors import UnsupportedOpError, with_details


def pad_sequence(
    pad: Callable,
    stack: Callable,
    sequences: Sequence[Any],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Any:
    """Sequences [length, ...] one beside the other, [longest, batch, ...] or [batch, longest, ...]: each is padded, then they are stacked.

    Args:
        pad: as `torch.nn.functional.pad`.
        stack: as `torch.stack`.
        sequences: of any lengths, alike in what follows.
        batch_first: which dimension of the result comes first.
        padding_value: what is put where a sequence is over.
        padding_side: "right", after a sequence, or "left".

    Raises:
        RuntimeError: no such side, in torch's words.
    """
    if padding_side not in ("left", "right"):
        raise RuntimeError(f"Expected padding_side to be one of left or right, but got {padding_side}.")
    longest = max(s.shape[0] for s in sequences)
    padded = []
    for s in sequences:
        missing = longest - s.shape[0]
        places = (missing, 0) if padding_side == "left" else (0, missing)
        padded.append(pad(s, (*[0, 0] * (s.ndim - 1), *places), value=padding_value) if missing else s)
    return stack(padded, 0 if batch_first else 1)


# -- packed: the entries that there are, step after step ------------------------------------------------------------------


def pack(input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that were padded, [longest, batch, ...], without what was put where one is over: as ``torch._VF._pack_padded_sequence``.

    Args:
        input: them, or [batch, longest, ...].
        lengths: of each, the longest first.
        batch_first: which of the two it is.

    Returns:
        The entries of all at the first step, then those of all that have a second one, ... [entries, ...]; and how many there are at each.
    """
    steps = input.transpose(0, 1) if batch_first else input
    sizes = batch_sizes(lengths.tolist(), *steps.shape[:2])
    parts = [steps[begin:end, :n].flatten(0, 1) for begin, end, n in _stretches(sizes)]
    return torch.cat(parts) if len(parts) > 1 else parts[0], torch.tensor(sizes)


def batch_sizes(lengths: list[int], steps: int, batch: int) -> list[int]:
    """How many sequences there are at each step.

    Raises:
        RuntimeError: the lengths do not fit, in torch's words.
        UnsupportedOpError: one is longer than the steps that there are; torch packs it, and reads past its end later.
    """
    if max(lengths, default=0) > steps:
        raise UnsupportedOpError(
            with_details(
                f"a sequence of length {max(lengths)} is packed, of a batch that is padded to {steps}",
                why="torch packs it as if it were longer than it is: what comes out later are entries of others",
                instead=f"lengths of at most {steps}; batch_first=True where the batch is the first dimension",
            )
        )
    found = torch._VF._pack_padded_sequence(torch.zeros(steps, batch), torch.tensor(lengths), False)[1]  # type: ignore[attr-defined]
    return found.tolist()


def pad_packed(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The way back, as ``torch._VF._pad_packed_sequence``.

    Args:
        data: [entries, ...], step after step.
        batch_sizes: how many there are at each.
        batch_first: whether the result is [batch, total_length, ...], or [total_length, batch, ...].
        padding_value: what is put where a sequence is over.
        total_length: how many steps the result has, at least those that there are.

    Returns:
        The sequences, and their lengths.
    """
    sizes = batch_sizes.tolist()
    batch, steps = sizes[0], len(sizes)
    value = padding_value if data.is_floating_point() or data.is_complex() else int(padding_value)
    trailing = [0, 0] * (data.ndim - 1)
    parts = []
    for part, (_, end, n) in zip(_split(data, sizes), _stretches(sizes), strict=True):
        missing = (0, batch - n, 0, total_length - steps if end == steps else 0)
        parts.append(F.pad(part, (*trailing, *missing), value=value) if any(missing) else part)
    padded = torch.cat(parts) if len(parts) > 1 else parts[0]
    lengths = torch.tensor([sum(n > i for n in sizes) for i in range(batch)])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def is_packed(input: Any, batch_sizes: Any, hx: Any, params: Any, *settings: Any) -> bool:
    """Whether these are a recurrent function's arguments for a packed sequence: else the fourth says whether there are biases."""
    return isinstance(params, list | tuple)


def recurrent(
    function: Callable,
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple:
    """`torch.lstm`, or another recurrent function, of a packed sequence: of the sequences that go on, as long as none of them ends.

    Args:
        function: it is called with a part of each layer and direction in turn.
        data: [entries, features], step after step.
        batch_sizes: how many there are at each.
        hx: as the function takes it.
        params: of all layers.
        has_biases: whether there are some among them.
        num_layers: the same.
        dropout: between layers.
        train: whether there is any.
        bidirectional: whether each layer has a second direction, in which each sequence begins where it ends.

    Returns:
        The states at all entries, [entries, directions * width], and the last ones, [layers * directions, batch, width], of each kind.
    """
    sizes = batch_sizes.tolist()
    states = tuple(hx) if isinstance(hx, list | tuple) else (hx,)
    directions = 2 if bidirectional else 1
    per_cell = len(params) // (num_layers * directions)
    last = [[] for _ in states]
    for i in range(num_layers):
        results = []
        for d in range(directions):
            at = i * directions + d
            weights = list(params[at * per_cell : (at + 1) * per_cell])

            def run(part, given, weights=weights):
                given = [s.unsqueeze(0) for s in given]
                out, *after = function(
                    part, given if len(given) > 1 else given[0], weights, has_biases, 1, 0.0, train, False, False
                )
                return out, [s.squeeze(0) for s in after]

            direction = _backward if d else _forward
            out, after = direction(run, _split(data, sizes), [s[at] for s in states])
            results.append(out)
            for kept, state in zip(last, after, strict=True):
                kept.append(state)
        data = torch.cat(results, -1) if bidirectional else results[0]
        if dropout and train and i < num_layers - 1:
            data = F.dropout(data, dropout, training=True)
    return data, *[torch.stack(of_kind) for of_kind in last]


def _stretches(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """First step, the one after the last, and how many sequences there are between, as long as none of them ends."""
    ends = [t for t in range(1, len(sizes)) if sizes[t] != sizes[t - 1]]
    return [(begin, end, sizes[begin]) for begin, end in zip([0, *ends], [*ends, len(sizes)], strict=True)]


def _split(data: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Entries as [steps, batch, ...], for each stretch."""
    parts, at = [], 0
    for begin, end, n in _stretches(sizes):
        parts.append(data[at : at + (end - begin) * n].unflatten(0, (end - begin, n)))
        at += (end - begin) * n
    return parts


def _forward(run: Callable, parts: list[torch.Tensor], states: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """States at all entries, and those after the last of each sequence."""
    outs, ended = [], []
    for part in parts:
        n = part.shape[1]
        if n < states[0].shape[0]:
            ended.insert(0, [s[n:] for s in states])
            states = [s[:n] for s in states]
        out, states = run(part, states)
        outs.append(out.flatten(0, 1))
    last = [torch.cat(of_kind) for of_kind in zip(states, *ended, strict=True)] if ended else states
    return torch.cat(outs) if len(outs) > 1 else outs[0], last


def _backward(run: Callable, parts: list[torch.Tensor], states: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same from the ends: shorter sequences join those that have begun."""
    outs, now = [], [s[:0] for s in states]
    for part in reversed(parts):
        begun, n = now[0].shape[0], part.shape[1]
        now = [torch.cat([s, first[begun:n]]) if begun else first[:n] for s, first in zip(now, states, strict=True)]
        out, now = run(part.flip(0), now)
        outs.insert(0, out.flip(0).flatten(0, 1))
    return torch.cat(outs) if len(outs) > 1 else outs[0], now
