"""Python functions that prologues and epilogues call: guards, and what puts results where they belong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.guarding.guards import check_in_prologue
from thunder.core import prims
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.extend import OperatorExecutor

# Carries the operators; it is in no executor list.
executor = OperatorExecutor("thunder_norm_boundary", version="1")
_counter = itertools.count()


def bindable(name: str, fn: Callable) -> Callable:
    """A function that binds a one-off operator with given proxies as its output; its name gets a number.

    Called in a trace, as Thunder's ``check_traces`` does, the operator returns these.
    """
    name, bound = f"{name}_{next(_counter)}", [None]

    def with_call_ctx(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {name: fn}

    symbol = Symbol(
        name=name,
        meta=lambda *args, **kwargs: bound[0],
        id=name,
        is_prim=True,
        executor=executor,
        tags=(prims.OpTags.DONT_DCE,),
        _bind_postprocess=with_call_ctx,
    )

    def bind(*args: Any, output: Any, **kwargs: Any) -> BoundSymbol:
        bound[0] = output
        return symbol.bind(*args, output=output, **kwargs)

    return bind


def guard(name: str, check: Callable[[], bool]) -> BoundSymbol:
    """A prologue guard that does not depend on the inputs: raises when `check` is false."""

    def run() -> None:
        if not check():
            raise GuardError(name)

    return bindable(name, run)(output=None)


def guard_arguments(ctx: Any, check: Callable[[tuple, dict], bool]) -> None:
    """Have the prologue of the trace that is being acquired raise when ``check(args, kwargs)`` is false."""

    def run(args: tuple, kwargs: dict) -> None:
        if not check(args, kwargs):
            raise GuardError("what an argument holds is other than when the trace was acquired")

    check_in_prologue(ctx, bindable("check_argument", run))
