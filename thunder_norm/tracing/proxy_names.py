"""Names of the tensors that a program is given: each has one of its own, and it is a name in Python.

Thunder names the parameter ``weight`` of ``block.0`` `t_block_0_weight`, that of a module ``block_0`` as well, and one of the two is then
computed with in the place of both; that of ``block-0`` it names `t_block-0_weight`, which Python cannot read.  Then it names a tensor
as the first variable that it is stored in, and in the prologue an argument ``args``, or a parameter that a loop of torch's has in ``module``,
would stand where the prologue's own is meant; and an operation that is called by its name alone, ``eye = eye(4, 4)``, would be the tensor.
"""

from __future__ import annotations

import contextvars
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from thunder_norm.context_variables import setting
from thunder.core.proxies import Proxy, Variable
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

_named: contextvars.ContextVar[dict[str, torch.Tensor] | None] = contextvars.ContextVar("thunder_norm_named", default=None)


_OF_PROLOGUES = ("args", "kwargs", "fn", "obj", "module", "cache_info", "thunder")


def noted() -> AbstractContextManager[None]:
    """Note which tensors are named meanwhile."""
    return setting(_named, {})


def own_name(wanted: str | None, x: torch.Tensor, trace: TraceCtx) -> str | None:
    """What to call the proxy of `x` in a trace: the name that Thunder wants, or one like it."""
    named = _named.get()
    if wanted is None or named is None:
        return wanted
    base = re.sub(r"\W", "_", wanted)
    name = next(n for n in _numbered(base) if named.setdefault(n, x) is x)
    trace.names.discard(name)  # of a tensor that is met again
    return name


def is_of_prologues(name: str) -> bool:
    """Whether a prologue has the name for something of its own."""
    return name in _OF_PROLOGUES or name.startswith(("cache_info_", "check_"))


def drop_others_names(trace: TraceCtx, renamed: dict[Variable, Proxy]) -> None:
    """Leave tensors their own names that would have one which is none in Python, or that of an executor's operation in a trace.

    Those operations are called by their names alone; a test that pytest has rewritten stores into ``@py_assert1``.
    """
    called = set(_called(trace.bound_symbols))
    for variable in [v for v, p in renamed.items() if p.name in called or not p.name.isidentifier()]:
        del renamed[variable]


def _called(bsyms: Sequence[BoundSymbol]) -> Iterator[str]:
    for bsym in bsyms:
        if bsym.sym.executor is not None or bsym._call_ctx is not None:
            yield bsym.sym.name
        yield from _called(bsym.subsymbols)


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{i}" for i in itertools.count(1))
