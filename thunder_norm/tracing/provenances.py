"""Where values come from, as Thunder's interpreter writes it down."""

from __future__ import annotations

from typing import Any

from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, wrap


def wrapped_result(value: Any, inst_inputs: list) -> WrappedValue:
    """A value as the interpreter takes it from what is called instead of a function."""
    return wrap(value, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=inst_inputs))


def provenance_of(way: tuple[tuple[str, Any], ...]) -> ProvenanceRecord:
    """A way from the arguments as Thunder's prologue follows it."""
    record = ProvenanceRecord(_ROOTS[way[0][0]], inputs=[])
    for step, key in way[1:]:
        inst = PseudoInst.LOAD_ATTR if step == "attribute" else PseudoInst.BINARY_SUBSCR
        record = ProvenanceRecord(inst, inputs=[record, ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=key)])
    return record


_ROOTS = {"args": PseudoInst.INPUT_ARGS, "kwargs": PseudoInst.INPUT_KWARGS}


def walked(way: tuple[tuple[str, Any], ...], args: tuple, kwargs: dict) -> Any:
    """What is at the end of a way from the arguments of a call."""
    value: Any = args if way[0][0] == "args" else kwargs
    for step, key in way[1:]:
        value = getattr(value, key) if step == "attribute" else value[key]
    return value
