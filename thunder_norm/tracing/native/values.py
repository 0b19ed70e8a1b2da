"""Wrapped values, their provenance and the interpreter's stack: what is made some ten times for each opcode."""

from __future__ import annotations

from collections.abc import Sequence
from types import BuiltinFunctionType, CellType, FunctionType, MethodDescriptorType
from typing import Any, cast

from thunder_norm.tracing.guarding import guards, stored
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core import jit_ext
from thunder.core.interpreter import (
    INTERPRETER_CALLBACKS,
    InterpreterCompileCtx,
    InterpreterStack,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
)
from thunder.core.proxies import Proxy

_compile_ctx = thunders._interpretercompilectx.get
_runtime_ctx = thunders._interpreterruntimectx.get
_CONSTANT, _WRAP_CALLBACK = PseudoInst.CONSTANT, INTERPRETER_CALLBACKS.WRAP_CALLBACK
_CALLBACKS = "_thunder_norm_callbacks"  # of the context of a compilation, by their values: an enum's hash is a function of Python
# Of a constant of these the callback says that it is none of the program's inputs, and nothing else: no way leads to it
_PLAIN = frozenset(
    (str, int, float, bool, type(None), tuple, list, dict, object, type, BuiltinFunctionType, FunctionType, MethodDescriptorType)
) | {CellType}


def _record_init(
    self: ProvenanceRecord,
    inst: Any,
    inputs: list,
    output_idx: int = 0,
    output_key: Any = None,
    value: Any = None,
    ext_flag: int = 0,
) -> None:
    self.inst, self.inputs, self.output_idx, self.output_key, self.value = inst, [*inputs], output_idx, output_key, value
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
    callback = _callback(_compile_ctx(), _WRAP_CALLBACK)
    if callback is not None:
        callback(self)


_original_wrap = guards.thunders_wrap
_new = object.__new__
# exactly of these classes, of which no wrapper is found again
_SCALARS = frozenset((str, int, float, bool, type(None)))


def _wrap(value: Any, /, *, provenance: ProvenanceRecord) -> WrappedValue:
    if isinstance(value, WrappedValue):
        _follow(value)
        return _original_wrap(value, provenance=provenance)
    known = _runtime_ctx()._known_wrappers
    cached = known.get(id(value))
    if cached is not None:
        found = cached[0]()
        if found is not None:
            _follow(found)
            return _original_wrap(value, provenance=provenance)
        del known[id(value)]
    return WrappedValue(value, provenance=provenance)


def _follow(wrapped: WrappedValue) -> None:
    """Have something stand for each item of a list that C code has made longer or shorter: of ``catch_warnings(record=True)``, say."""
    if type(wrapped.value) is list and len(wrapped.value) != len(known := cast(list, wrapped.item_wrappers)):
        standing = {id(w.value): w for w in known if w is not None}
        native = ProvenanceRecord(PseudoInst.OPAQUE, [wrapped.provenance])
        known[:] = [standing.get(id(v)) or thunders.wrap(v, provenance=native) for v in wrapped.value]


def _wrap_const(value: Any, /, *, provenance: ProvenanceRecord | None = None) -> WrappedValue:
    if provenance is None:
        if type(value) in _SCALARS and jit_ext._jit_ctx.get(None) is not None:
            return _scalar(value)
        provenance = ProvenanceRecord(_CONSTANT, [], value=value)
    return thunders.wrap(value, provenance=provenance)


def _scalar(value: Any) -> WrappedValue:
    """The wrapper of a constant of which nobody has to be told, as the constructors make it."""
    record: Any = _new(ProvenanceRecord)
    record.inst, record.inputs, record.output_idx, record.output_key, record.value = _CONSTANT, [], 0, None, value
    record.ext_flag = jit_ext.EXT_FLAG_IS_PROXY_DERIVED
    made: Any = _new(WrappedValue)
    made.python_typ, made.has_item_tracking, made.value, made.provenance = type(value), False, value, record
    made.nothing = made.original_value = _new(object)
    if type(value) is str:
        made.item_wrappers = None
    else:
        made.item_wrappers, made.key_wrappers = {}, {}
    made.attribute_wrappers = {}
    return made


def _unwrap(value: Any, /) -> Any:
    return value.value if isinstance(value, WrappedValue) else value


_original_append = InterpreterStack.append
_NAMED_OR_WITH_ITEMS = (Proxy, tuple, list, dict)
_original_get_record = InterpreterStack.get_provenance_record


def _append(self: InterpreterStack, val: Any, /) -> None:
    if not isinstance(val, WrappedValue) or isinstance(val.value, (tuple, list, dict)):
        return _original_append(self, val)
    self.output_idx += 1
    self._stack.append(val)


def _get_record(self: InterpreterStack, value: Any, key: Any = None) -> Any:
    if isinstance(value, WrappedValue) and (key is None or type(key) is int):
        self.output_idx += 1
        # of lists and dicts it asserts that their items are known
        return thunders.wrap(value, provenance=value.provenance) if isinstance(value.value, (list, dict)) else value
    return _original_get_record(self, value, key)


_original_update_name = jit_ext._maybe_update_proxy_name
_original_callback = InterpreterCompileCtx.callback


def _update_name(orig_value: Any, name: str, is_internal: bool | None = None) -> None:
    if isinstance(_unwrap(orig_value), Proxy):
        _original_update_name(orig_value, name, is_internal)


def _callback(self: InterpreterCompileCtx, id: Any) -> Any:
    try:
        known = getattr(self, _CALLBACKS)
    except AttributeError:
        known = {}
        setattr(self, _CALLBACKS, known)
    try:
        return known[id._value_]
    except KeyError:
        found = known[id._value_] = _original_callback(self, id)
        return found


_TENSOR = jit_ext.EXT_FLAG_IS_TENSOR_PROXY
# By id: an enum's hash and value are functions of Python
_OF_INPUTS = frozenset(id(inst) for inst in PseudoInst if inst.value in jit_ext._input_provenance_inst)
_original_should_register = jit_ext.should_register_for_prologue


def _should_register(pr: ProvenanceRecord, _toplevel: bool = True) -> bool:
    inst = pr.inst
    if type(inst) is not PseudoInst or inst is _CONSTANT:
        return _original_should_register(pr, _toplevel)
    if pr.ext_flag & _TENSOR or id(inst) not in _OF_INPUTS or not pr.inputs and _toplevel:
        return False
    for record in pr.inputs:
        if not _should_register(record, False):
            return False
    return True


_handlers = thunders._default_opcode_handler_map
_original_load_fast = _handlers["LOAD_FAST"]


def _load_fast(inst: Any, /, stack: InterpreterStack, co: Any, frame: Any, **state: Any) -> Any:
    value = frame.localsplus[inst.arg]
    if not isinstance(value, WrappedValue) or isinstance(value.value, _NAMED_OR_WITH_ITEMS):
        return _original_load_fast(inst, stack=stack, co=co, frame=frame, **state)
    stack.output_idx += 1
    stack._stack.append(value)
    return None


_original_store_fast = _handlers["STORE_FAST"]


def _load_const(inst: Any, /, stack: InterpreterStack, co: Any, **state: Any) -> None:
    value = co.co_consts[inst.arg]
    if type(value) not in _SCALARS:
        return stack.append(thunders.wrap_const(value))
    stack.output_idx += 1
    return stack._stack.append(_scalar(value))


def _store_fast(inst: Any, /, stack: InterpreterStack, co: Any, frame: Any, **state: Any) -> Any:
    value = stack._stack[-1]
    if not isinstance(value, WrappedValue) or isinstance(value.value, Proxy):
        return _original_store_fast(inst, stack=stack, co=co, frame=frame, **state)
    frame.localsplus[inst.arg] = stack._stack.pop()
    return None


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
    Replacement(ProvenanceRecord, "__init__", _record_init, "ProvenanceRecord.__post_init__, without its type checks"),
    Replacement(guards, "thunders_wrap", _wrap, "wrap, which looks for the wrapper of a value that it has seen"),
    Replacement(thunders, "wrap_const", _wrap_const, "wrap_const, of which most are names and numbers"),
    *(Replacement(module, "unwrap", _unwrap, "unwrap, which calls a method of the wrapper") for module in (thunders, jit_ext)),
    Replacement(InterpreterStack, "append", _append, "append of what has no items"),
    Replacement(InterpreterCompileCtx, "callback", _callback, "callback, which looks by an enum's hash"),
    Replacement(jit_ext, "should_register_for_prologue", _should_register, "the same of what is no constant"),
    Replacement(jit_ext, "_maybe_update_proxy_name", _update_name, "the same of what is no proxy"),
    Replacement(_handlers, "LOAD_CONST", _load_const, "_load_const_handler, whose callback hands on what it is given"),
    Replacement(_handlers, "STORE_FAST", _store_fast, "_store_fast_handler of what is no proxy, and gets no name"),
    *(
        Replacement(_handlers, name, _load_fast, "_load_fast_check_handler, where there is nothing to check or to name")
        for name in ("LOAD_FAST", "LOAD_FAST_CHECK")
        if name in _handlers
    ),
    Replacement(WrappedValue, "__init__", _wrapped_init, "WrappedValue.__init__; a class is asked once whether it is a sequence"),
    Replacement(InterpreterStack, "get_provenance_record", _get_record, "the record of a value that has one is not made"),
    Replacement(InterpreterStack, "set_cur_instruction", _set_current, "the same, without a generator"),
)
