"""Maxima over windows of what was padded with minus infinity: ``F.max_pool2d(F.pad(x, pad, value=-inf), 3, 2)``.

That is how a padding is written which is not the same on both sides ("same" padding of TensorFlow's models).  The padded tensor has no
norm; but it remembers the norm that it would have with zeros around x (`Framed`), and no maximum is minus infinity where every window
takes a position of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, every_fact, fact, ruled
from thunder_norm.rules.reducing.pooling import sliding


@dataclass(frozen=True, eq=False)
class Framed:
    """Minus infinity around x: as it would be with zeros there, and how many positions are before and after those of x, the last dimension first."""

    x: Source
    frame: tuple[tuple[int, int], ...]


def _framed(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    names = ("input", "pad", "mode", "value")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("value") != -math.inf or given.get("mode", "constant") != "constant":
        return out._facts
    counts = [int(n) for n in given["pad"]]
    claim = ruled(F.pad, (given["input"], counts), {})
    if claim is None or not isinstance(claim[0], RMSTensor) or min(counts, default=0) < 0:
        return out._facts
    zeros, moved = claim
    source = Source(type(zeros), out.backing, zeros.norm_size, moved, zeros.elem_dims)
    return Alternatives((*every_fact(out), Framed(source, tuple(zip(counts[::2], counts[1::2], strict=True)))))


normed_op(F.pad).register_fact(_framed)


def _takes_some(dims: int) -> Callable[[dict[str, Any]], bool]:
    def holds(args: dict[str, Any]) -> bool:
        """Whether every window takes a position that is not in the frame."""
        x = args["input"]
        found = fact(x, Framed)
        if found is None or any(left or right for left, right in found.frame[dims:]):
            return False
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        windows = sliding(x.shape[-dims:], *(args[name] for name in names))
        return all(
            any(left <= i < w.size - right for i in taken)
            for w, (left, right) in zip(reversed(windows), found.frame, strict=False)
            for taken in w.taken
        )

    return holds


def _register(dims: int) -> None:
    pools = getattr(torch, f"max_pool{dims}d")

    def framed_max_pool(
        input: RMSTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> NormedTensor:
        """Maximum over windows of x with minus infinity around it, a position of x in each.

        Value:       that of `max_pool` of x with zeros around it, whose windows have entries no smaller
        Sensitivity: the same
        """
        found = fact(input, Framed)
        assert found is not None, "the rule's condition has been checked"
        claim = ruled(pools, (found.x.moving(), kernel_size, stride, padding, dilation, ceil_mode), {})
        assert claim is not None, "x has an RMS norm"
        of_x, moved = claim
        out = type(of_x)._wrap(None, of_x.norm_size, moved, of_x.elem_dims)  # type: ignore[arg-type]
        out._sensitivity = {"input": 0}
        return out

    framed_max_pool.__name__ = f"framed_max_pool{dims}d"
    normed_op(pools).register_norm(framed_max_pool, when=_takes_some(dims))


for _dims in (1, 2, 3):
    _register(_dims)
