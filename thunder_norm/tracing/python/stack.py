"""Values that are moved on the interpreter's stack (``d[key] += 1``, ``y := x``): what stands for them is moved, and no other is made.

Thunder's own makes another of the value, which knows nothing of what is done to the first: of the copy of an object's dict that the program
works on there were two then.
"""

from __future__ import annotations

import dis
from typing import Any

from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterStack

_handlers = thunders._default_opcode_handler_map


def _copy(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> None:
    stack._stack.append(stack.getitem_wrapped(-inst.arg))


def _swap(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> None:
    held, place = stack._stack, -inst.arg
    held[-1], held[place] = held[place], held[-1]


REPLACEMENTS = (
    Replacement(_handlers, "COPY", _copy, "_copy_handler: stack.append(stack[-inst.arg])"),
    Replacement(_handlers, "SWAP", _swap, "_swap_handler: stack[-1] = other; stack[-i] = top"),
)
