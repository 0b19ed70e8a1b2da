"""Parameters, buffers and modules that a user has replaced in a model since it was jitted.

A ``ThunderModule`` keeps what the model held when it was made, and goes on with that.  Eager goes on with what the model holds, and so do
calls here: what was replaced is put where Thunder looks for it, unless a transform has put something of its own there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thunder_norm.errors import TransformError, with_details
from thunder_norm.tracing.calls import buffers
from thunder.core.module import ThunderModule


@dataclass
class _Entry:
    """What stands in a model under a name."""

    table: dict[str, Any]  # of the module that holds it
    key: str
    value: Any
    name: str


class Watched:
    """What a model held when it was jitted, and when it was looked at since."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._look()
        self._at_first = self._held()

    def _look(self) -> None:
        self._entries = {
            kind: [
                _Entry(table, key, value, f"{prefix}.{key}" if prefix else key)
                for prefix, module in self._model.named_modules(remove_duplicate=False)
                if not isinstance(
                    module, torch.jit.ScriptModule
                )  # which has no tables of its own, and is refused where it is called
                for table in (getattr(module, kind),)
                for key, value in table.items()
            ]
            for kind in _OVERRIDES
        }
        self._places = [(e.table, e.key, e.value) for entries in self._entries.values() for e in entries]

    def _held(self) -> dict[str, dict[str, Any]]:
        return {kind: {e.name: e.value for e in entries} for kind, entries in self._entries.items()}

    def is_unchanged(self) -> bool:
        """Whether the model holds what it held; asked in each call."""
        for table, key, value in self._places:  # noqa: SIM110 - a generator takes twice as long
            if table.get(key) is not value:
                return False
        return True

    def follow(self, jitted: ThunderModule) -> None:
        """Have the jitted model use what the model holds now.

        Raises:
            TransformError: a transform had put something else in its place.
        """
        members = vars(jitted)
        before = members.get(_FOLLOWED, self._at_first)
        self._look()
        followed = self._held()
        for kind, now in followed.items():
            used = getattr(jitted, _OVERRIDES[kind])
            for name in [n for n in used if n in before[kind] and now.get(n) is not before[kind][n]]:
                if used[name] is before[kind][name] or buffers.is_of_program(jitted, name, used[name]):
                    _put(used, name, now.get(name))
                elif used[name] is not now.get(name):
                    raise TransformError(
                        with_details(
                            f"{name} of the model was replaced after a transform of thunder.jit had put another in its place",
                            why="what the transform made of it is not made again",
                            instead="call thunder.jit again, or copy the values into the old one (with torch.no_grad(): p.copy_(...))",
                        )
                    )
        jitted._module_cache = dict(self._model.named_modules())
        members[_FOLLOWED] = followed


# Of a jitted module: what the model held that it was made to use, put back with it after a run that is to change nothing.
_FOLLOWED = "_thunder_norm_followed"
# Where a ThunderModule keeps what a module keeps.
_OVERRIDES = {"_parameters": "_overrides_parameters", "_buffers": "_overrides_buffers", "_modules": "_module_cache"}


def _put(used: dict[str, Any], name: str, value: Any) -> None:
    if value is None:  # or nothing: what is not there is asked of the model
        del used[name]
    else:
        used[name] = value
