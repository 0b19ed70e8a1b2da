"""What a prologue reads of modules and compares with a constant: read again only where something in these modules was set.

The guards of the same program ask whether it was (`guarding.unchanged`); what they have found serves here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import dict_version

from thunder_norm.tracing.guarding.unchanged import UNCHANGED, Unchanged, is_of_instance
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol

_COMPARISONS = ("check_number_type_and_value", "check_string_value", "check_none")
_DATA = (bool, int, float, str, type(None))


def unchanged_of(bsyms: Sequence[BoundSymbol]) -> Unchanged | None:
    """What the guards in a prologue ask of modules; None if they ask condition by condition."""
    functions = (f for b in bsyms for f in (b._call_ctx or {}).values())
    return next((u for f in functions if (u := getattr(f, UNCHANGED, None)) is not None), None)


class ModuleAttributes:
    """Which of the bound symbols of a prologue read and compare attributes of modules alone, and whether they need to run.

    Attributes:
        bsyms: these, in their order: modules that nothing else needs, attributes, and comparisons.
        modules: the names of all modules whose attributes are read.
        root: what the jitted module is called.
    """

    def __init__(self, unchanged: Unchanged, bsyms: Sequence[BoundSymbol], root: str, table: Mapping[str, torch.nn.Module]):
        """Of a prologue.

        Args:
            unchanged: what its guards ask of modules.
            bsyms: of the prologue.
            root: what the jitted module is called in it.
            table: where Thunder keeps the modules in that.
        """
        self.root, self._unchanged = root, unchanged
        self._seen: tuple[Any, Any, int] = (None, None, 0)
        modules = {
            b.output.name: table[b.args[1]]
            for b in bsyms
            if b.sym.id is PrimIDs.UNPACK_SUBMODULE and _name(b.args[0]) == root and unchanged.holds(table.get(b.args[1]))
        }
        reads = {b.output.name: b for b in bsyms if b.sym.id is PrimIDs.UNPACK_ATTR and _reads_data(b, modules)}
        used = {p.name for b in bsyms if b.sym.name not in _COMPARISONS for p in b.flat_proxy_args}
        reads = {name: b for name, b in reads.items() if name not in used}
        self.modules = list({b.args[0].name: None for b in reads.values()})
        used = {p.name for b in bsyms if _name(b.output) not in reads for p in b.flat_proxy_args}
        inside = {*reads, *(name for name in self.modules if name not in used)}
        self.bsyms = [b for b in bsyms if _name(b.output) in inside or (b.sym.name in _COMPARISONS and _name(b.args[0]) in reads)]

    def changed(self, table: Any) -> tuple[Any, Any, int] | None:
        """None if nothing was set since the comparisons were true; otherwise what to note when they are."""
        held, version = self._unchanged.held, dict_version(table)
        seen = self._seen
        if held is seen[0] and held is not None and table is seen[1] and version == seen[2]:
            return None
        return held, table, version

    def note(self, now: tuple[Any, Any, int], modules: Sequence[torch.nn.Module]) -> None:
        """The comparisons are true of these modules."""
        held = now[0]
        if held is not None and {id(m) for m in held.modules}.issuperset(map(id, modules)):
            self._seen = now


def _name(value: Any) -> str | None:
    return value.name if isinstance(value, Proxy) else None


def _reads_data(bsym: BoundSymbol, modules: Mapping[str, torch.nn.Module]) -> bool:
    source, key = bsym.args[:2]
    module = modules.get(_name(source) or "")
    return module is not None and is_of_instance(module, key) and type(vars(module)[key]) in _DATA
