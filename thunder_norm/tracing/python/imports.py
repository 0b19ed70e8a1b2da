"""Modules that a program imports where it runs (``from settings import rates``): what it reads of a user's is looked at in each call.

Thunder takes what an import in a function returns for the program's own, of which it guards nothing.
"""

from __future__ import annotations

import dis
import sys
from types import ModuleType
from typing import Any

from thunder_norm.tracing.guarding.ways import imported, is_of_others, path_of
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterStack

_handlers = thunders._default_opcode_handler_map
_thunders_import = _handlers["IMPORT_NAME"]


def _import(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
    result = _thunders_import(inst, stack=stack, **state)
    if result is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return result
    module = stack.getitem_wrapped(-1)
    if isinstance(module.value, ModuleType) and not is_of_others(vars(module.value)) and path_of(module.provenance) is None:
        name = module.value.__name__
        if sys.modules.get(name) is module.value:
            module.provenance = imported(name)
    return result


REPLACEMENTS = (Replacement(_handlers, "IMPORT_NAME", _import, "_import_name_handler: what the import returns is opaque"),)
