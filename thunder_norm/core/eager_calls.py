"""An eager call of a module on normed tensors keeps plain tensors: a norm belongs to the call.

Nothing of ours surrounds ``model(RMSTensor.of(x))``.  Its first operation looks for the outermost module call on the Python stack, notes
what the module and its parts hold, and leaves an object among that call's own variables; when the call ends, Python drops it, and what the module has
taken in meanwhile is replaced by what it describes.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.core.tensors import NormedTensor
from thunder_norm.model_state.reachable import Reachable

_CALL = torch.nn.Module._wrapped_call_impl.__code__
_state = threading.local()


class _EndOfCall:
    """Lives as long as a module call; then the module's own things are plain again."""

    def __init__(self, module: torch.nn.Module, given: Any):
        self.module = module
        own = {
            id(v) for v in tree_leaves(given) if isinstance(v, NormedTensor)
        }  # arguments may be kept before anything is computed
        self.before = Reachable((module,), follows_code=False, skips_empty=True)  # kept: an id stays its object's
        self.known = set(self.before.known) - own
        _state.is_watched = True

    def __del__(self) -> None:
        _state.is_watched = False
        if not sys.is_finalizing():
            keep_plain(self.module, self.known)


def note_operation() -> None:
    """Called with each operation on normed tensors in eager mode; looks at the stack at the first of a call."""
    if getattr(_state, "is_watched", False):
        return
    outermost = None
    for frame in _frames():
        if frame.f_code is _CALL:
            outermost = frame
    if outermost is not None:
        variables = outermost.f_locals
        own = variables["kwargs"]  # a dict of that call alone, which it has already handed on
        own[_EndOfCall.__name__] = _EndOfCall(variables["self"], (variables["args"], dict(own)))


def _frames() -> Iterator[types.FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def keep_plain(root: Any, known: set[int]) -> None:
    """Replace the normed tensors reachable from `root`, but for those known, by their backings."""

    def plain(v: Any) -> Any:
        if isinstance(v, NormedTensor):
            return v if id(v) in known or not v.finalized else v.backing
        if isinstance(v, tuple) and any(plain(x) is not x for x in v):
            return type(v)(*map(plain, v)) if hasattr(v, "_fields") else type(v)(map(plain, v))
        return v

    for place in Reachable((root,), follows_code=False, skips_empty=True).places:
        held = place.held
        if all(plain(v) is v for v in (held.values() if isinstance(held, dict) else held)):
            continue
        place.write({k: plain(v) for k, v in held.items()} if isinstance(held, dict) else type(held)(map(plain, held)))
