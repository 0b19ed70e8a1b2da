"""A jitted function that several threads call: what Thunder keeps of the call at hand is of each thread by itself.

Thunder notes in one place of a jitted function whether gradients are recorded, compiles by it, and sets torch's mode to it after a call: a
thread without gradients had others compile programs that have none, and turned gradients off in them.
"""

from __future__ import annotations

import threading

from thunder.common import CompileData


class OfThreads(CompileData):
    """Compile data whose `is_grad_enabled` each thread sets for itself."""

    _modes: threading.local

    @property
    def is_grad_enabled(self) -> bool:
        """Whether the program records gradients where it is now."""
        return getattr(self._modes, "is_grad_enabled", True)

    @is_grad_enabled.setter
    def is_grad_enabled(self, is_enabled: bool) -> None:
        self._modes.is_grad_enabled = is_enabled


def divide(data: CompileData) -> None:
    """Make compile data those of several threads."""
    is_enabled = vars(data).pop("is_grad_enabled", True)
    vars(data)["_modes"] = threading.local()
    data.__class__ = OfThreads
    data.is_grad_enabled = is_enabled
