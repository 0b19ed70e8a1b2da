"""Executors for ``thunder.jit(executors=[...])``; one is made when its name is first asked for, `import thunder_norm` makes none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thunder_norm.executors.executor import executor as inductor

__all__ = ["inductor"]


def __getattr__(name: str) -> object:
    if name != "inductor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from thunder_norm.executors.executor import executor

    return executor
