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
from thunder.core.interpreter import PseudoInst, WrappedValue
from thunder.core.proxies import AnyProxy, Proxy


@dataclass(frozen=True)
class Attribute:
    """What the program leaves in an object."""

    owner: Proxy | None  # None for the jitted module
    name: str
    value: WrappedValue | None  # None where there is nothing any more

    def put(self, values: list) -> None:
        """Set it on the object of the call at hand."""
        owner, value = values
        vars(owner)[self.name] = value


@dataclass(frozen=True)
class _Deleted(Attribute):
    """What it takes out of one: an attribute, or a buffer of a module."""

    kind: str  # the dict that holds it

    def put(self, values: list) -> None:
        """Take it out of the object of the call at hand."""
        getattr(values[0], self.kind).pop(self.name, None)


def deleted(ctx: Any) -> Iterator[Attribute]:
    """What is in no dict any more at the end of the program; Thunder writes what it was set to before."""
    ways = Ways(guards.roots())
    for modified, modifications in ctx._additional_outputs.items():
        modifications[:] = [m for m in modifications if m[2].value in modified.value]
        origin = modified.provenance
        kind = origin.inputs[1].value if origin.inst is PseudoInst.LOAD_ATTR else None
        if kind not in ("__dict__", "_buffers"):
            continue
        owner = origin.inputs[0]
        gone = [name for name in modified.original_value if name not in modified.value]
        if owner.inst is PseudoInst.INPUT_FN:
            proxy = None
        elif isinstance(getattr(owner, "proxy", None), Proxy):
            proxy = owner.proxy
            if not gone and not modifications and kind == "__dict__":
                del owner.proxy  # of which nothing is left that the prologue fetches it for
        elif (path := path_of(owner)) is None:
            continue  # the program has made the object
        elif gone or (modifications and kind == "__dict__"):  # which Thunder does not write for ``vars(o)[name] = value``
            proxy = owner.proxy = AnyProxy(ways.end(path), history=owner)
        else:
            continue
        yield from (_Deleted(proxy, name, None, kind) for name in gone)


def forget_owners(ctx: Any) -> None:
    """Have the prologue fetch the owners where it needs them: what it reads of them before is read without what stands for them here."""
    for modified in ctx._additional_outputs:
        for origin in modified.provenance.inputs[:1]:
            if hasattr(origin, "proxy"):
                origin.proxy = None


def taken(ctx: Any) -> Iterator[Attribute]:
    """What is set that Thunder writes only if it is a tensor or number, or in a tuple of its own: it is not told of that any more."""
    for modified, modifications in ctx._additional_outputs.items():
        owner = getattr(modified.provenance.inputs[0], "proxy", None) if modified.provenance.inputs else None
        is_dict = modified.provenance.inst is PseudoInst.LOAD_ATTR and modified.provenance.inputs[1].value == "__dict__"
        if not is_dict or not isinstance(owner, Proxy):
            continue
        last = {key.value: value for _, _, key, value in modifications}
        ours = {name: v for name, v in last.items() if not isinstance(v.value, Proxy | int | float | None)}
        yield from (Attribute(owner, name, v) for name, v in ours.items())
        modifications[:] = [m for m in modifications if m[2].value not in ours]
