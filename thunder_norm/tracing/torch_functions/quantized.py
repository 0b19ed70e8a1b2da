"""Quantized tensors: without data torch says that they are of the dtype that they are made from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of_user
from thunder.core.interpreter import WrappedValue, do_raise

_QUANTIZE = frozenset(map(id, (torch.quantize_per_tensor, torch.quantize_per_tensor_dynamic, torch.quantize_per_channel)))


def lookaside(fn: Any) -> Callable | None:
    """What to call instead of `fn`, if it makes a quantized tensor; None for all others."""
    return functools.partial(_refuse, fn.__name__) if id(fn) in _QUANTIZE else None


def _refuse(name: str, *_: WrappedValue, **__: WrappedValue) -> Any:
    return do_raise(
        UnsupportedOpError(
            with_details(
                f"torch.{name} inside a jitted function",
                at=location_of_user(),
                why="Thunder has no dtype for what it returns",
                instead="torch.fake_quantize_per_tensor_affine or fake_quantize_per_channel_affine, or quantize outside",
            )
        )
    )
