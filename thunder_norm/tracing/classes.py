"""What stands in the classes of an object, as it stands there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

MISSING = object()
# What these have written is taken to stay as it is.
LIBRARIES = frozenset({"thunder_norm", "thunder", "torch", *sys.stdlib_module_names} - {"__main__"})


def in_classes(mro: Sequence[type], name: str, default: Any = MISSING) -> Any:
    """What the first of some classes that has `name` has under it, unbound."""
    return next((vars(base)[name] for base in mro if name in vars(base)), default)
