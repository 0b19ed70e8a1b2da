"""The states of random generators that a program holds: torch's, Python's and NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def state_of(generator: Any) -> Any:
    """The state of a generator, to compare."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if hasattr(generator, "bit_generator"):
        return str(generator.bit_generator.state)
    return str(generator.get_state()) if hasattr(generator, "get_state") else generator.getstate()


def remembered(generator: Any) -> Callable[[], Any]:
    """What sets a generator back to the state it has now."""
    if hasattr(generator, "bit_generator"):
        state = generator.bit_generator.state
        return lambda: setattr(generator.bit_generator, "state", state)
    if hasattr(generator, "get_state"):  # torch's, and NumPy's of old
        state = generator.get_state()
        return lambda: generator.set_state(state)
    state = generator.getstate()
    return lambda: generator.setstate(state)
