"""Of which of several kinds a value is, looked up by its type."""

from __future__ import annotations

from typing import Any


class ValueKinds:
    """Kinds of values in order, each a class or a tuple of them as `isinstance` takes it; the number after the last is any other's."""

    def __init__(self, *kinds: Any):
        self._kinds = kinds
        self._of_types: dict[type, int] = {}

    def of(self, value: Any) -> int:
        """The number of the first kind that it is of."""
        found = self._of_types.get(type(value))
        if found is None:
            found = next((i for i, kind in enumerate(self._kinds) if isinstance(value, kind)), len(self._kinds))
            if value.__class__ is type(value):  # otherwise each may say something else of itself
                self._of_types[type(value)] = found
        return found

    def forget(self) -> None:
        """Look again at what classes are: one may have been registered with an abstract one since, and they are kept alive."""
        self._of_types.clear()
