"""Shapes, dtypes and devices that torch infers for operations of its own: once for what they follow from.

Thunder has torch run an operation that it has no formula for on tensors without data, each time that a trace has it: milliseconds, under a
mode that is made for it and reads the whole stack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy

_PLAIN = frozenset({int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.Size, devices.Device})
_PLAIN |= {dtypes.bool_, dtypes.signedinteger, dtypes.unsignedinteger, dtypes.floating, dtypes.complexfloating}


class Inferred:
    """`infer`, which is asked once for the same arguments.

    Args:
        infer: a function of proxies and numbers, whose results follow from shapes, dtypes, devices and numbers alone: an operation of
            torch's or ours, and none that a user registered, which may say something else in each call.
    """

    def __init__(self, infer: Callable):
        self.infer = infer
        self._known: dict[Any, tuple[type | None, list[dict[str, Any]]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked = _described(args, kwargs)
        if asked is not None and asked in self._known:
            kind, described = self._known[asked]
            proxies = [TensorProxy(**what) for what in described]
            return proxies[0] if kind is None else kind(proxies)
        found = self.infer(*args, **kwargs)
        proxies = [found] if type(found) is TensorProxy else found
        if asked is not None and type(proxies) in (list, tuple) and all(type(p) is TensorProxy for p in proxies):
            self._known[asked] = None if proxies is not found else type(found), [_description(p) for p in proxies]
        return found


def _described(args: tuple, kwargs: dict[str, Any]) -> Any:
    """All that the results follow from; None where there may be more."""
    leaves, spec = tree_flatten((args, kwargs))
    if not any(type(v) is TensorProxy for v in leaves) or not all(type(v) is TensorProxy or type(v) in _PLAIN for v in leaves):
        return None
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return None
    given = tuple([tuple(_description(v).values()) if type(v) is TensorProxy else (type(v), v) for v in leaves])
    return given, spec, torch.is_grad_enabled(), torch.get_default_dtype()


def _description(p: TensorProxy) -> dict[str, Any]:
    return {"shape": tuple(p.shape), "device": p.device, "dtype": p.dtype, "requires_grad": p.requires_grad}
