"""What Thunder interprets for Python's own questions: len, bool, in, not, iteration, arithmetic of numbers."""

from __future__ import annotations

import collections
import operator
from typing import Any

from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.member_dicts import has_attribute
from thunder_norm.tracing.native.elements import item, note_attribute
from thunder_norm.tracing.python import methods_of_classes
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import (
    BINARY_OP,
    INTERPRETER_SIGNALS,
    InterpreterStack,
    MutMappingWrapperMethods,
    ProvenanceRecord,
    PseudoInst,
    SequenceIter,
    SequenceWrapperMethods,
    WrappedValue,
    do_raise,
    wrap,
    wrap_const,
)

_handlers = thunders._default_opcode_handler_map
_lookasides = thunders._default_lookaside_map
_original_len = _lookasides[len]
_original_bool = _lookasides[bool]
_original_iter = _lookasides[iter]
_original_next = _lookasides[next]
_original_contains = _handlers["CONTAINS_OP"]
_original_not = _handlers["UNARY_NOT"]
_original_for_iter = _handlers["FOR_ITER"]
_original_binary_op = thunders._binary_op

_LENGTHS = {
    list: SequenceWrapperMethods.__len__,
    tuple: SequenceWrapperMethods.__len__,
    dict: MutMappingWrapperMethods.__len__,
    collections.OrderedDict: MutMappingWrapperMethods.__len__,
}


def _len(obj: WrappedValue) -> Any:
    length = _LENGTHS.get(type(obj.value))
    if length is not None:
        return length(obj)
    found = methods_of_classes.length(obj)
    return _original_len(obj) if found is None else found


_KNOW_THEIR_TRUTH = (type(None), int, float)


def truth(x: WrappedValue) -> WrappedValue | None:
    """``bool(x)`` of what no class of the program's has a say in; None of anything else."""
    value = x.value
    if value is True or value is False:
        return x
    kind = type(value)
    if kind in _KNOW_THEIR_TRUTH:
        return wrap(bool(value), provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=[x.provenance]))
    if kind in _LENGTHS:
        x.track_items()
    elif kind is not str:
        return None
    return wrap(bool(value), provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=[]))


def _bool(x: WrappedValue) -> Any:
    found = truth(x)
    if found is None:
        found = methods_of_classes.truth(x)
    return _original_bool(x) if found is None else found


def _contains(inst: Any, /, stack: InterpreterStack, **state: Any) -> Any:
    container, key = stack.getitem_wrapped(-1), stack.getitem_wrapped(-2)
    is_negated = inst.arg == 1  # not in
    if type(container.value) is dict and type(key.value) in (str, int):
        found: Any = has_attribute(container, key)
        if found is None:
            found = MutMappingWrapperMethods.__contains__(container, key)
        if is_negated:
            found = wrap(not found.value, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=[found.provenance]))
    else:
        found = methods_of_classes.membership(container, key)
        if found is None:
            return _original_contains(inst, stack=stack, **state)
        if is_negated and found is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            found = thunders._interpret_call(operator.not_, found)
    if found is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return found
    stack.pop_wrapped()
    stack.pop_wrapped()
    stack.append(found)
    return None


def _not(inst: Any, /, stack: InterpreterStack, **state: Any) -> Any:
    value = stack.getitem_wrapped(-1).value
    if value is not True and value is not False and value is not None:
        return _original_not(inst, stack=stack, **state)
    stack.append(not stack.pop())
    return None


def _iter(obj: WrappedValue, *sentinel: Any) -> Any:
    if not sentinel and type(obj.value) in (list, tuple):
        obj.track_items()
        return _iterator_of_sequence(obj)
    found = None if sentinel else methods_of_classes.iterator(obj)
    return _original_iter(obj, *sentinel) if found is None else found


def _iterator_of_sequence(sequence: WrappedValue) -> WrappedValue:
    """``SequenceIter(sequence)``: an object of what `object.__new__` is given, with what its ``__init__`` sets."""
    new, kind, options = (wrap_const(v).provenance for v in (SequenceIter.__new__, SequenceIter, {}))
    given = ProvenanceRecord(PseudoInst.BUILD_TUPLE, inputs=[kind, sequence.provenance])
    provenance = ProvenanceRecord(PseudoInst.OPAQUE, inputs=[new, given, options])
    iterator = wrap(SequenceIter(sequence.value), provenance=provenance)
    iterator.attribute_wrappers |= {"s": sequence, "next_pos": wrap_const(0), "is_reversed": wrap_const(False)}
    return iterator


_UNKNOWN, _EXHAUSTED = object(), object()


def _next_of_sequence(iterator: WrappedValue) -> Any:
    """The next element of a list or tuple: _UNKNOWN for another iterator, _EXHAUSTED at the end."""
    it = iterator.value
    sequence = iterator.attribute_wrappers.get("s")
    if type(it) is not SequenceIter or sequence is None or sequence.value is not it.s or it.is_reversed:
        return _UNKNOWN
    if type(it.s) not in (list, tuple) or type(it.next_pos) is not int:
        return _UNKNOWN
    sequence.track_items()
    if it.next_pos >= len(it.s):
        return _EXHAUSTED
    found = item(sequence, it.next_pos)
    if found is None:
        return _UNKNOWN
    it.next_pos += 1
    position = wrap(it.next_pos, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=[]))
    note_attribute(iterator, wrap_const("next_pos"), position)
    return found


def _next(iterator: WrappedValue, *default: Any) -> Any:
    found = _next_of_sequence(iterator)
    if found is _UNKNOWN:
        kind = type(iterator.value)
        if in_classes(kind.__mro__, "__next__", None) is None:
            return do_raise(TypeError(f"{kind.__name__!r} object is not an iterator"))
        return _original_next(iterator, *default)
    if found is _EXHAUSTED:
        return default[0] if default else do_raise(StopIteration())
    return found


def _for_iter(inst: Any, /, stack: InterpreterStack, inst_ptr: int, **state: Any) -> Any:
    found = _next_of_sequence(stack.getitem_wrapped(-1))
    if found is _UNKNOWN or found is _EXHAUSTED:  # what follows the last is Thunder's, and differs between Pythons
        return _original_for_iter(inst, stack=stack, inst_ptr=inst_ptr, **state)
    stack.append(found)
    return None


_ARITHMETIC = {
    BINARY_OP.ADD: operator.add,
    BINARY_OP.SUB: operator.sub,
    BINARY_OP.MUL: operator.mul,
    BINARY_OP.TRUEDIV: operator.truediv,
    BINARY_OP.FLOORDIV: operator.floordiv,
    BINARY_OP.MOD: operator.mod,
    BINARY_OP.POW: operator.pow,
}
_NUMBERS = (int, float)


def _binary_op(stack: InterpreterStack, op: BINARY_OP, a: Any, b: Any) -> Any:
    compute = _ARITHMETIC.get(op)
    if compute is None or type(a.value) not in _NUMBERS or type(b.value) not in _NUMBERS:
        return _original_binary_op(stack, op, a, b)
    try:
        result = compute(a.value, b.value)
    except Exception as e:  # noqa: BLE001 - the program's
        return do_raise(e)
    stack.append(result)
    return None


REPLACEMENTS = (
    Replacement(_lookasides, len, _len, "impl in _len_lookaside"),
    Replacement(_lookasides, bool, _bool, "impl in _bool_lookaside"),
    Replacement(_lookasides, iter, _iter, "nosentinel_impl in _iter_lookaside, and SequenceIter.__init__"),
    Replacement(_lookasides, next, _next, "impl in _next_lookaside, and SequenceIter.__next__"),
    Replacement(_handlers, "CONTAINS_OP", _contains, "impl in _contains_op_handler"),
    Replacement(_handlers, "UNARY_NOT", _not, "impl in _unary_not_handler"),
    Replacement(_handlers, "FOR_ITER", _for_iter, "_next_impl in _for_iter_handler"),
    Replacement(thunders, "_binary_op", _binary_op, "outofplace_impl in _binary_op"),
)
