"""The dicts that hold the attributes of objects and the members of modules: of those that were there before, a program changes copies.

The epilogue of each call then does to the objects what the program did to the copies.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from thunder_norm.tracing.guarding import guards
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, wrap
from thunder.core.jit_ext import EXT_FLAG_IS_MODULE_MEMBER_DICT, JitCtx, get_jit_ctx

MEMBERS = ("_parameters", "_buffers", "_modules")
HELD_IN_COPIES = ("__dict__", *MEMBERS)
_HAS_WRITTEN = "_thunder_norm_has_written"


def note_written() -> None:
    """Note that the program sets or deletes an attribute of what was there before it."""
    setattr(get_jit_ctx(), _HAS_WRITTEN, True)


def has_written(ctx: JitCtx | None = None) -> bool:
    """Whether it, or the program of `ctx`, has set or deleted one by now, or stored something in such a dict."""
    ctx = get_jit_ctx() if ctx is None else ctx
    return getattr(ctx, _HAS_WRITTEN, False) or bool(ctx._additional_outputs)


def note_member_dict(held: WrappedValue) -> None:
    """Have what is stored in a dict written when the program has run."""
    held.provenance.ext_flag |= EXT_FLAG_IS_MODULE_MEMBER_DICT


def is_copy(held: WrappedValue | None) -> TypeGuard[WrappedValue]:
    """Whether the program works on a copy of a dict."""
    return held is not None and held.original_value is not held.nothing


def holds_attributes(held: WrappedValue) -> bool:
    """Whether it is the ``__dict__`` of an object."""
    origin = held.provenance
    return origin.inst is PseudoInst.LOAD_ATTR and origin.inputs[1].value == "__dict__"


def has_attribute(held: WrappedValue, key: WrappedValue) -> WrappedValue | None:
    """What ``key in vars(obj)`` is, which depends on no other attribute; None for all other dicts and keys."""
    if not holds_attributes(held) or type(held.value) is not dict or type(key.value) is not str or held.has_item_tracking:
        return None
    is_there = key.value in held.value
    before: Any = held.original_value if is_copy(held) else held.value
    if (key.value in before) is is_there:  # otherwise the program has set or deleted it
        guards.note(held, "contains", key.value, is_there)
    return wrap(is_there, provenance=ProvenanceRecord(PseudoInst.CONTAINS_OP, inputs=[held.provenance, key.provenance]))


def store(held: WrappedValue, key: WrappedValue, value: WrappedValue) -> None:
    """Have the program store something in a copy of the attributes of an object, and in the object when it has run.

    What else is in there is not looked at: a trace that the call only writes does not depend on what was there, nor on other attributes.
    """
    if not is_copy(held):
        held.register_proxy(dict(held.value))
        for name, method in held.attribute_wrappers.items():
            method.register_proxy(getattr(held.value, name))
    get_jit_ctx()._additional_outputs[held].append((PseudoInst.STORE_SUBSCR, held, key, value))
    held.value[key.value] = value.value
    held.key_wrappers[key.value] = key
    held.item_wrappers[key.value] = value  # type: ignore[index]


def work_on_copy(held: WrappedValue) -> None:
    """Have the program take something out of a copy, if it is such a dict."""
    origin = held.provenance
    if not origin.ext_flag & EXT_FLAG_IS_MODULE_MEMBER_DICT or origin.inst is not PseudoInst.LOAD_ATTR:
        return
    if origin.inputs[1].value not in HELD_IN_COPIES:
        return
    ctx = get_jit_ctx()
    if not is_copy(held):
        ctx.proxify(held)
    ctx._additional_outputs[held]  # noqa: B018 - of which the epilogue looks what became
