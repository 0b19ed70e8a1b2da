"""Wrapped values, their provenance and the interpreter's stack: what is made some ten times for each opcode."""

from __future__ import annotations

from collections.abc import Sequence
from types import BuiltinFunctionType, CellType, FunctionType, MethodDescriptorType
from typing import Any

from thunder_norm.tracing.guarding import stored
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core import jit_ext
from thunder.core.interpreter import INTERPRETER_CALLBACKS, InterpreterStack, ProvenanceRecord, PseudoInst, WrappedValue

_compile_ctx = thunders._interpretercompilectx.get
_runtime_ctx = thunders._interpreterruntimectx.get
_CONSTANT = PseudoInst.CONSTANT
_CALLBACK = "_thunder_norm_wrap_callback"
# Of a constant of these the callback says that it is none of the program's inputs, and nothing else: no way leads to it
_PLAIN = frozenset(
    (str, int, float, bool, type(None), tuple, list, dict, object, type, BuiltinFunctionType, FunctionType, MethodDescriptorType)
) | {CellType}


def _post_init(self: ProvenanceRecord) -> None:
    inputs = self.inputs = self.inputs.copy()
    flags = 0
    if inputs:
        flags = inputs[0].ext_flag
        for record in inputs:
            flags &= record.ext_flag
    self.ext_flag = flags


_ITEMS, _STORED_ITEMS, _UNKNOWN_ITEMS, _KEYS = "items", "stored items", "unknown items", "keys"
_kinds: dict[type, str] = {}


def forget_types() -> None:
    """Look again at what classes are: one may have been registered as a sequence since."""
    _kinds.clear()


def _kind(value: Any) -> str:
    found = _kinds.get(type(value))
    if found is None:
        if isinstance(value, (list, tuple)):
            found = _STORED_ITEMS if stored.has_own(type(value), "__len__") else _ITEMS
        else:
            found = _UNKNOWN_ITEMS if isinstance(value, Sequence) else _KEYS
        if value.__class__ is type(value):  # otherwise each may say something else of itself
            _kinds[type(value)] = found
    return found


def _wrapped_init(self: WrappedValue, value: Any, /, *, provenance: ProvenanceRecord) -> None:
    self.python_typ = type(value)
    self.nothing = self.original_value = object()
    self.has_item_tracking = False
    self.value = value
    kind = _kind(value)
    if kind is _KEYS:
        self.item_wrappers = {}
        self.key_wrappers = {}
    elif kind is _STORED_ITEMS:
        self.item_wrappers = [None] * stored.length(value)
    else:
        self.item_wrappers = [None] * len(value) if kind is _ITEMS else None
    self.attribute_wrappers = {}
    self.provenance = provenance
    if provenance.inst is _CONSTANT:
        provenance.value = value
        if type(value) in _PLAIN and jit_ext._jit_ctx.get(None) is not None:
            provenance.ext_flag |= jit_ext.EXT_FLAG_IS_PROXY_DERIVED
            if type(value) is not str:
                _runtime_ctx().cache_wrapper(self)
            return
    _runtime_ctx().cache_wrapper(self)
    ctx = _compile_ctx()
    try:
        callback = getattr(ctx, _CALLBACK)
    except AttributeError:
        callback = ctx.callback(INTERPRETER_CALLBACKS.WRAP_CALLBACK)
        setattr(ctx, _CALLBACK, callback)
    if callback is not None:
        callback(self)


_original_get_record = InterpreterStack.get_provenance_record


def _get_record(self: InterpreterStack, value: Any, key: Any = None) -> Any:
    if isinstance(value, WrappedValue) and (key is None or type(key) is int):
        self.output_idx += 1
        # of lists and dicts it asserts that their items are known
        return thunders.wrap(value, provenance=value.provenance) if isinstance(value.value, (list, dict)) else value
    return _original_get_record(self, value, key)


class _CurrentInstruction:
    """While it is entered, what is pushed comes from the instruction."""

    __slots__ = ("inst", "stack")

    def __init__(self, stack: InterpreterStack, inst: Any) -> None:
        self.stack = stack
        self.inst = inst

    def __enter__(self) -> None:
        stack = self.stack
        assert stack.provenance_inst is None and stack.provenance_inputs is None
        stack.provenance_inst = self.inst
        stack.provenance_inputs = []
        stack.output_idx = 0

    def __exit__(self, *error: object) -> None:
        self.stack.provenance_inst = self.stack.provenance_inputs = None


def _set_current(self: InterpreterStack, inst: Any) -> _CurrentInstruction:
    return _CurrentInstruction(self, inst)


# What is asked for at each value: without a function of Python's around it.
_CONTEXTS = (
    (thunders, "get_interpretercompilectx", _compile_ctx),
    (thunders, "get_interpreterruntimectx", _runtime_ctx),
    (jit_ext, "get_interpreterruntimectx", _runtime_ctx),
    (jit_ext, "get_jit_ctx", jit_ext._jit_ctx.get),
)

REPLACEMENTS = (
    *(Replacement(module, name, get, f"{name}, which calls it") for module, name, get in _CONTEXTS),
    Replacement(ProvenanceRecord, "__post_init__", _post_init, "ProvenanceRecord.__post_init__, without its type checks"),
    Replacement(WrappedValue, "__init__", _wrapped_init, "WrappedValue.__init__; a class is asked once whether it is a sequence"),
    Replacement(InterpreterStack, "get_provenance_record", _get_record, "the record of a value that has one is not made"),
    Replacement(InterpreterStack, "set_cur_instruction", _set_current, "the same, without a generator"),
)
