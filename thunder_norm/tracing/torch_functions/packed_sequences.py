"""Packed sequences in traces: programs of their steps, whose batch sizes are numbers there.

Lengths are values: those of an input are guarded as others are.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm import padded_sequences
from thunder_norm.tracing.lookasides import instead_of
from thunder.core.interpreter import WrappedValue, _interpret_call, interpreter_needs_wrap

instead_of(padded_sequences.batch_sizes)(interpreter_needs_wrap(padded_sequences.batch_sizes))


@instead_of(torch.nn.utils.rnn.invert_permutation)
def _invert(permutation: WrappedValue) -> Any:
    """Torch writes into memory that nothing is known of, as values of what a trace makes are worked out."""
    return permutation if permutation.value is None else _interpret_call(torch.argsort, permutation)


def lookaside(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn`, if it packs sequences or takes packed ones; None for all others."""
    if type(fn) is not types.BuiltinFunctionType or fn not in _WRITTEN:
        return None
    program, is_asked = _WRITTEN[fn]
    return functools.partial(_interpret_call, program) if is_asked(*(a.value for a in args)) else None


def _of_packed(function: Callable) -> Callable:
    return lambda *args: padded_sequences.recurrent(function, *args)


# functions, what is interpreted in their place, and whether it is for these arguments
_WRITTEN: dict[Any, tuple[Callable, Callable[..., bool]]] = {
    torch._VF._pack_padded_sequence: (padded_sequences.pack, lambda *_: True),  # type: ignore[attr-defined]
    torch._VF._pad_packed_sequence: (padded_sequences.pad_packed, lambda *_: True),  # type: ignore[attr-defined]
    **{f: (_of_packed(f), padded_sequences.is_packed) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}
