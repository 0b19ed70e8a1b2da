"""Sequences of several lengths in one batch, as `torch.nn.utils.rnn.pad_sequence` puts them, of tensors and of what stands for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


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
