"""Attributes that a program sets or deletes on objects that were there before: those that Thunder does not write, or writes otherwise.

Thunder lets a program work on copies of the dicts of objects, and writes at the end what was stored in them, if it is a tensor, a number or a
tuple and was set as an attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.ways import Ways, path_of
from thunder_norm.tracing.member_dicts import HELD_IN_COPIES, MEMBERS
from thunder.core.interpreter import PseudoInst, WrappedValue
from thunder.core.proxies import AnyProxy, Proxy


@dataclass(frozen=True)
class Attribute:
    """What the program leaves in an object."""

    owner: Proxy | None  # None for the jitted module
    name: str
    value: WrappedValue | None  # None where there is nothing any more
    kind: str = "__dict__"  # the dict that holds it, or one of a module's members

    def put(self, values: list) -> None:
        """Set it on the object of the call at hand."""
        owner, value = values
        getattr(owner, self.kind)[self.name] = value


@dataclass(frozen=True)
class _Deleted(Attribute):
    """What it takes out of one: an attribute, or a member of a module."""

    def put(self, values: list) -> None:
        """Take it out of the object of the call at hand."""
        getattr(values[0], self.kind).pop(self.name, None)


@dataclass(frozen=True)
class _Ordered(Attribute):
    """The order in which a module holds its members, after one was taken out and put in again."""

    names: tuple[str, ...] = ()

    def put(self, values: list) -> None:
        """Have the module of the call at hand hold them in that order."""
        held = getattr(values[0], self.kind)
        for name in self.names:
            held[name] = held.pop(name)


def deleted(ctx: Any) -> Iterator[Attribute]:
    """What is in no dict any more at the end of the program; Thunder writes what it was set to before."""
    ways = Ways(guards.roots())
    for modified, modifications in ctx._additional_outputs.items():
        modifications[:] = [m for m in modifications if m[2].value in modified.value]
    written = {
        id(held.provenance.inputs[0]) for held, stored in ctx._additional_outputs.items() if stored and held.provenance.inputs
    }
    for modified, modifications in ctx._additional_outputs.items():
        origin = modified.provenance
        kind = origin.inputs[1].value if origin.inst is PseudoInst.LOAD_ATTR else None
        if kind not in HELD_IN_COPIES:
            continue
        owner = origin.inputs[0]
        gone = [name for name in modified.original_value if name not in modified.value]
        if owner.inst is PseudoInst.INPUT_FN:
            proxy = None
        elif isinstance(getattr(owner, "proxy", None), Proxy):
            proxy = owner.proxy
            if not gone and id(owner) not in written and kind == "__dict__":
                del owner.proxy  # of which nothing is left that the prologue fetches it for
        elif (path := path_of(owner)) is None:
            continue  # the program has made the object
        elif gone or (modifications and kind != "_buffers") or _new_order(modified):  # which Thunder does not write
            proxy = owner.proxy = AnyProxy(ways.end(path), history=owner)
        else:
            continue
        yield from (_Deleted(proxy, name, None, kind) for name in gone)


def _new_order(held: WrappedValue) -> tuple[str, ...]:
    """The names of the members of a module, where they are in another order than without what the program took out of between."""
    if held.provenance.inputs[1].value not in MEMBERS:
        return ()
    before, after = held.original_value, tuple(held.value)
    as_before = (*(name for name in before if name in held.value), *(name for name in after if name not in before))
    return after if after != as_before else ()


def forget_owners(ctx: Any) -> None:
    """Have the prologue fetch the owners where it needs them: what it reads of them before is read without what stands for them here."""
    for modified in ctx._additional_outputs:
        for origin in modified.provenance.inputs[:1]:
            if hasattr(origin, "proxy"):
                origin.proxy = None


def taken(ctx: Any) -> Iterator[Attribute]:
    """What is set that Thunder writes only if it is a tensor or number, or in a tuple of its own: it is not told of that any more."""
    for modified, modifications in ctx._additional_outputs.items():
        origin = modified.provenance
        if origin.inst is not PseudoInst.LOAD_ATTR:
            continue
        owner, kind = getattr(origin.inputs[0], "proxy", None), origin.inputs[1].value
        is_known = isinstance(owner, Proxy) or (origin.inputs[0].inst is PseudoInst.INPUT_FN and kind in MEMBERS)
        if kind not in HELD_IN_COPIES or not is_known:
            continue
        last = {key.value: value for _, _, key, value in modifications}
        is_thunders = Proxy | int | float | None if kind in ("__dict__", "_buffers") else ()
        ours = {name: v for name, v in last.items() if not isinstance(v.value, is_thunders)}
        yield from (Attribute(owner, name, v, kind) for name, v in ours.items())
        modifications[:] = [m for m in modifications if m[2].value not in ours]
        if names := _new_order(modified):
            yield _Ordered(owner, "", None, kind, names)
