"""Where values come from, as Thunder's interpreter writes it down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, wrap
from thunder.core.jit_ext import EXT_FLAG_IS_MODULE, get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx


def wrapped_result(value: Any, inst_inputs: list) -> WrappedValue:
    """A value as the interpreter takes it from what is called instead of a function."""
    return wrap(value, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=inst_inputs))


@dataclass(frozen=True, eq=False, repr=False)
class TensorKey:
    """A tensor as a step of a way: ways are compared, and tensors say of each of their entries whether it is equal."""

    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorKey) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)

    def __repr__(self) -> str:
        return f"a {type(self.tensor).__name__}"


def key_itself(key: Any) -> Any:
    """What a step of a way looks up."""
    return key.tensor if type(key) is TensorKey else key


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
    return walked_from(args if way[0][0] == "args" else kwargs, way)


def walked_from(root: Any, way: tuple[tuple[str, Any], ...]) -> Any:
    """What is at the end of a way from its root."""
    for step, key in way[1:]:
        root = getattr(root, key) if step == "attribute" else root[key_itself(key)]
    return root


def is_made_natively(provenance: ProvenanceRecord | None) -> bool:
    """Whether a value is, or is a part of, what a function or class made that the interpreter did not look into."""
    if provenance is None:
        return False
    return provenance.inst in (PseudoInst.OPAQUE, PseudoInst.NEW) or any(map(is_made_natively, provenance.inputs[:1]))


def without_unused(constraints: list[tuple], program: TraceCtx) -> list[tuple]:
    """What a prologue is to check, without tensors of modules that the program has made, and does not use: no call has them.

    Functions of modules look for names among them: ``.eval()`` of one that `torch.func.functional_call` gives its tensors.
    """
    used = {p.name for bsym in program.bound_symbols for p in bsym.flat_proxy_args}
    return [c for c in constraints if not any(_is_unused(v, used) for v in c[1:])]


def _is_unused(value: Any, used: set[str]) -> bool:
    return isinstance(value, TensorProxy) and value.name not in used and is_made_natively(value.history)


class Member(NamedTuple):
    """A parameter, buffer or module of a module."""

    table: str  # "_parameters", "_buffers" or "_modules"
    names: list[str]  # the way to it from `root`, through "_modules"
    root: ProvenanceRecord  # no member of another module: the jitted module, or one that a list or another object has


def member_of_module(provenance: ProvenanceRecord) -> Member | None:
    """The member that a value is; None if it is none."""
    last = _step(provenance)
    if last is None:
        return None
    table, name, root = last
    names = [name]
    while (step := _step(root)) is not None and step[0] == "_modules":
        names.insert(0, step[1])
        root = step[2]
    return Member(table, names, root)


def place_in_module(member: Member) -> ProvenanceRecord:
    """Where a prologue finds a tensor of a module that no computation takes: Thunder's own way there ends at what a computation is given."""
    found = _as_given(member.root)
    for i, name in enumerate(member.names):
        table = "_modules" if i < len(member.names) - 1 else member.table
        found = ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[found, _constant(table)])
        found = ProvenanceRecord(PseudoInst.BINARY_SUBSCR, inputs=[found, _constant(name)])
    return found


def _constant(word: str) -> ProvenanceRecord:
    return ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=word)


def _as_given(module: ProvenanceRecord) -> ProvenanceRecord:
    """Where a module itself is, not what Thunder has for it; one record for the jitted one, as its name in a prologue is one."""
    if module.inst is PseudoInst.INPUT_FN:
        return vars(get_jit_ctx()).setdefault(_ROOT, ProvenanceRecord(PseudoInst.INPUT_FN, inputs=[]))
    found = ProvenanceRecord(module.inst, inputs=module.inputs, output_idx=module.output_idx, output_key=module.output_key)
    found.ext_flag = 0
    return found


_ROOT = "_thunder_norm_root_as_given"  # of an acquisition


def is_parameter_of_module(provenance: ProvenanceRecord | None) -> bool:
    """Whether a value is what a module has for one of its parameters."""
    member = None if provenance is None else member_of_module(provenance)
    return member is not None and member.table == "_parameters"


def _step(provenance: ProvenanceRecord) -> tuple[str, str, ProvenanceRecord] | None:
    """The table and the name that a value has in a module, and that module."""
    if provenance.inst is not PseudoInst.BINARY_SUBSCR:
        return None
    table, name = provenance.inputs
    if table.inst is not PseudoInst.LOAD_ATTR or name.inst is not PseudoInst.CONSTANT:
        return None
    module, attribute = table.inputs
    if attribute.inst is not PseudoInst.CONSTANT or attribute.value not in _TABLES or not module.ext_flag & EXT_FLAG_IS_MODULE:
        return None
    return attribute.value, name.value, module


_TABLES = ("_parameters", "_buffers", "_modules")
