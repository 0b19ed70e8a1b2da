"""Modules that a program imports where it runs (``from settings import rates``): what it reads of a user's is looked at in each call.

Thunder takes what an import in a function returns for the program's own, of which it guards nothing.  What a module lacks it imports as a
module of that name, and gives its package.
"""

from __future__ import annotations

import dis
import sys
from types import ModuleType
from typing import Any

from thunder_norm.tracing.guarding.ways import imported, is_of_others, path_of
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterStack, WrappedValue, wrap_const

_handlers = thunders._default_opcode_handler_map
_thunders_import = _handlers["IMPORT_NAME"]


def _import(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
    result = _thunders_import(inst, stack=stack, **state)
    if result is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return result
    _note_imported(stack.getitem_wrapped(-1))
    return result


def _note_imported(module: WrappedValue) -> None:
    if isinstance(module.value, ModuleType) and not is_of_others(vars(module.value)) and path_of(module.provenance) is None:
        name = module.value.__name__
        if sys.modules.get(name) is module.value:
            module.provenance = imported(name)


def _import_from(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
    """``from module import name``: an attribute, or a module that is on its way, and an ImportError where there is neither."""
    module, name = stack.getitem_wrapped(-1), inst.argval
    found = thunders._interpret_call(getattr, module, wrap_const(name))
    ctx = thunders.get_interpreterruntimectx()
    if found is not thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED or not isinstance(ctx.curexc, AttributeError):
        return thunders.check_and_append(stack, found)
    ctx.curexc = None
    taken: dict[str, Any] = {}
    try:
        exec(f"from {module.value.__name__} import {name}", taken)  # Python's own error, whose words depend on its version
    except Exception as e:  # noqa: BLE001 - whatever the import raises
        return thunders.do_raise(e)
    value = wrap_const(taken[name])
    _note_imported(value)
    return stack.append(value)


REPLACEMENTS = (
    Replacement(_handlers, "IMPORT_NAME", _import, "_import_name_handler: what the import returns is opaque"),
    Replacement(_handlers, "IMPORT_FROM", _import_from, "impl in _import_from_handler: return __import__(fullname)"),
)
