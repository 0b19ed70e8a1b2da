"""``thunder.core.symbol``: what a trace has of an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder_norm.tracing.hooks.participants import has_part
from thunder_norm.tracing.hooks.replaced import replaces
from thunder_norm.tracing.shared_memory.views import makes_view
from thunder.core import transform_common, update_aliases
from thunder.core.symbol import BoundSymbol

_original_is_view = update_aliases._is_view_creation_op

if hasattr(transform_common, "dce_bsyms"):  # from Thunder's nightly 0.2.7 on
    _original_dce = transform_common.dce_bsyms

    @replaces(
        transform_common,
        "dce_bsyms",
        "bsyms",
        "output",
        "needed_proxies",
        lines="Symbol.__call__: subsymbols = dce_bsyms(subsymbols, result)",
    )
    def _dce(bsyms: list[BoundSymbol], output: Any, *needed: Any) -> Sequence[BoundSymbol]:
        """The steps of an operation that has just been written: all of them, as in Thunder 0.2.6.

        The nightly drops those whose results the operation's own do not need: the comparison by which `torch.add` decides what to do
        with an ``alpha`` from ``.item()``, and what a backward part of a composite uses.  `dce` itself says what is needed besides.
        """
        return bsyms if not needed and has_part() else _original_dce(bsyms, output, *needed)


@replaces(
    update_aliases,
    "_is_view_creation_op",
    "bsym",
    lines="insert_alias_updates: if _is_inplace_op(bsym) or _is_view_creation_op(bsym), where its list of views is asked",
)
def _is_view_creation(bsym: BoundSymbol) -> bool:
    """Whether an operation makes a view: Thunder's list lacks some, and what is written through them would be lost."""
    return makes_view(bsym) if has_part() else _original_is_view(bsym)
