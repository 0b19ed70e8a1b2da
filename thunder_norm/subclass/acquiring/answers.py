"""What a program has asked tensors for, asked again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.tracing.guarding.conditions import GuardError


@dataclass(frozen=True)
class Answer:
    """What a function says of tensors has to be what it said while the trace was acquired."""

    func: Callable

    def __call__(self, expected: Any, *args: torch.Tensor) -> tuple[()]:
        """Ask again.

        Raises:
            GuardError: the answer is another.
        """
        if not _is_same(self.func(*args), expected):
            raise GuardError("a value that the program asks for is another than when the trace was acquired")
        return ()


def _is_same(found: Any, expected: Any) -> bool:
    """Whether two numbers, or lists of them, are the same for a program that asked for them: also their signs, and what is no number."""
    return repr(found) == repr(expected)
