"""Backwards that are told which results have no gradients (``ctx.set_materialize_grads(False)``): in a trace these have gradients of zero.

What such a backward leaves out for None is nothing but what would be zero, in almost all of them.  One that does something else then
has no gradient that a trace knows: which results have gradients shows when torch comes to the backward.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_flatten

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.recording.record import Recorded, Recorder

_lock = threading.RLock()  # what is in the place of torch's own is taken away by the thread that has put it there
_NOTHING_ELSE = frozenset({"zeros", "zeros_like", "new_zeros", "detach"})  # of what was saved


@contextmanager
def noting() -> Iterator[list[bool]]:
    """What functions say meanwhile of whether they are to be given zeros."""
    noted: list[bool] = []

    def set_materialize_grads(ctx: Any, value: bool) -> None:
        noted.append(value)
        own(ctx, value)

    with _lock:
        own = FunctionCtx.set_materialize_grads
        FunctionCtx.set_materialize_grads = set_materialize_grads
        try:
            yield noted
        finally:
            FunctionCtx.set_materialize_grads = own


def check(
    cls: type, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], sources: Sequence[torch.Tensor], recorder: Recorder
) -> None:
    """Run the backward for some of the results, where the recorder has what it does for all, and log nothing more.

    Raises:
        UnsupportedOpError: it does something that it does not do for all.
    """
    log = recorder.log
    known = Counter(map(_key, log))
    alone = [[pair] for pair in pairs]
    others = [[p for p in pairs if p is not pair] for pair in pairs] if len(pairs) > 2 else []
    for given in [*alone, *others]:
        recorder.log = []
        try:
            torch.autograd.grad([t for t, _ in given], sources, [c for _, c in given], allow_unused=True, retain_graph=True)
            found = Counter(
                _key(r) for r in recorder.log if getattr(r.func, "_overloadpacket", r.func).__name__ not in _NOTHING_ELSE
            )
        except Exception:  # noqa: BLE001 - it is not written for None, and raises in torch too
            continue
        finally:
            recorder.log = log
        if not found <= known:
            raise UnsupportedOpError(
                with_details(
                    f"the backward of {cls.__name__}, which has set_materialize_grads(False), is another function for missing gradients",
                    why="in a trace results that nobody differentiates have gradients of zero",
                    instead="let it compute the same as for zeros, or leave set_materialize_grads(False) out",
                )
            )


def _key(r: Recorded) -> tuple:
    given = tree_flatten((r.args, r.kwargs))[0]
    return r.func, tuple(repr(v) for v in given if not isinstance(v, torch.Tensor))
