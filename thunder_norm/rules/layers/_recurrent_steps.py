"""One step of an LSTM, a GRU and an RNN, with the gates it goes by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]


class LSTMStep(NamedTuple):
    """What an LSTM has after a step: the states, the gates, and ``o tanh(c)``, which a projection makes the state of."""

    h: torch.Tensor
    c: torch.Tensor
    i: torch.Tensor
    f: torch.Tensor
    g: torch.Tensor
    o: torch.Tensor
    hidden: torch.Tensor


def lstm_step(
    a: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    projection: torch.Tensor | None = None,
) -> LSTMStep:
    """c <- s(f) c + s(i) tanh(g), h <- P s(o) tanh(c)."""
    i, f, g, o = (a + F.linear(h, weight, bias)).chunk(4, -1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    c = f * c + i * g
    hidden = o * torch.tanh(c)
    return LSTMStep(hidden if projection is None else F.linear(hidden, projection), c, i, f, g, o, hidden)


class GRUStep(NamedTuple):
    """What a GRU has after a step: the state, the gates, and ``W_n h + b_n`` of the state before."""

    h: torch.Tensor
    r: torch.Tensor
    z: torch.Tensor
    n: torch.Tensor
    of_state: torch.Tensor


def gru_step(a: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> GRUStep:
    """h <- (1 - z) tanh(a_n + r u_n) + z h, with r = s(a_r + u_r), z = s(a_z + u_z), u = W h + b."""
    (r, z, new), (r_h, z_h, new_h) = a.chunk(3, -1), F.linear(h, weight, bias).chunk(3, -1)
    z, r = torch.sigmoid(z + z_h), torch.sigmoid(r + r_h)
    n = torch.tanh(new + r * new_h)
    return GRUStep((1 - z) * n + z * h, r, z, n, new_h)


class ElmanStep(NamedTuple):
    """What an RNN has after a step."""

    h: torch.Tensor


def elman_step(
    activation: Activation, a: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> ElmanStep:
    """h <- f(a + W h + b)."""
    return ElmanStep(activation(a + F.linear(h, weight, bias)))


Step = TypeVar("Step", LSTMStep, GRUStep, ElmanStep)


def each_step(
    step: Callable[..., Step], gates: Iterable[torch.Tensor], states: tuple[torch.Tensor, ...], *weights: torch.Tensor | None
) -> Iterator[Step]:
    """All steps over a sequence of the input's parts, [batch, width] each; the first of what each leaves are the states of the next."""
    for a in gates:
        after = step(a, *states, *weights)
        states = tuple(after[: len(states)])
        yield after
