"""Instructions of Python that no function of its does the work of, run as they are on values."""

from __future__ import annotations

import builtins
import dis
import functools
from collections.abc import Callable
from types import FunctionType


@functools.cache
def natively(num_operands: int, name: str, argument: int = 0, module: str | None = None) -> Callable:
    """A function of a module that runs an instruction, which takes one or two operands from the stack and leaves its result there."""
    # Where an operator is, the instruction fits in; of the two units of an addition the second holds what Python notes of it.
    written, replaced = (
        ((lambda x: +x), ("CALL_INTRINSIC_1", "UNARY_POSITIVE")) if num_operands == 1 else ((lambda x, y: x + y), ("BINARY_OP",))
    )
    begin = next(i.offset for i in dis.get_instructions(written) if i.opname in replaced)
    code = bytearray(written.__code__.co_code)
    code[begin : begin + 2] = dis.opmap[name], argument
    if num_operands == 2:
        code[begin + 2 : begin + 4] = dis.opmap["NOP"], 0
    return FunctionType(written.__code__.replace(co_code=bytes(code)), {"__name__": module, "__builtins__": builtins})
