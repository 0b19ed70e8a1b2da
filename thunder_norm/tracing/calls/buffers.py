"""Where a value goes that a traced program has set as a buffer."""

from __future__ import annotations

from typing import Any

from thunder.core.module import ThunderModule

_OF_PROGRAM = "_thunder_norm_buffers"  # of a jitted module, by name


def put(module: Any, name: str, value: Any) -> None:
    """Set the buffer of a module, or of one inside of it: of the jitted module, or of one that a jitted function reaches.

    A transform may have put another in the place of a jitted module's buffer, which the module itself keeps then.
    """
    path, _, own = name.rpartition(".")
    if not isinstance(module, ThunderModule):
        module.get_submodule(path)._buffers[own] = value
        return
    buffers = module._model.get_submodule(path)._buffers
    if module._overrides_buffers.get(name) is buffers.get(own):
        buffers[own] = value
        vars(module).setdefault(_OF_PROGRAM, {})[name] = value
    module.set_buffer(name, value)


def is_of_program(module: ThunderModule, name: str, value: Any) -> bool:
    """Whether a program has set the buffer to `value`, in the module too: no transform has put it there."""
    return vars(module).get(_OF_PROGRAM, {}).get(name) is value
