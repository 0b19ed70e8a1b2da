"""Programs of Thunder that are called whether there is autocast or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

DEVICES = ("cpu", "cuda")


def keeping_autocast(program: Callable) -> Callable:
    """A program that Thunder compiled, leaving autocast as it was when it was called.

    Thunder runs its programs without autocast and then restores what was on when they were *compiled* (`no_autocast` in
    thunder/executors/torchex.py): it calls a program only where autocast is as it was then.  A norm map is called anywhere.
    """

    @functools.wraps(program)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = [torch.is_autocast_enabled(device) for device in DEVICES]
        try:
            return program(*args, **kwargs)
        finally:
            for device, was_enabled in zip(DEVICES, before, strict=True):
                torch.set_autocast_enabled(device, was_enabled)

    return run
