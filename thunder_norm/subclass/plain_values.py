"""Running what Thunder has written for plain tensors so far on the inputs of the call at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from thunder_norm.subclass.fallback import is_kept, made_for
from thunder_norm.tracing.random_numbers import draws_numbers
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors import pythonex, torchex
from thunder.executors.passes import transform_for_execution


def made_of(p: TensorProxy | NumberProxy, program: Sequence[BoundSymbol]) -> tuple[list[BoundSymbol], list[TensorProxy]]:
    """The operations of a program that `p` comes from, in order, and the tensors that these are given."""
    wanted, found = {p.name: p}, []
    for bsym in reversed(program):
        made = [o.name for o in bsym.flat_proxy_outs if o.name in wanted]
        if made and not _hands_over(bsym):
            found.append(bsym)
            for name in made:
                del wanted[name]
            wanted |= {a.name: a for a in bsym.flat_proxy_args}
    return found[::-1], list(wanted.values())


def _hands_over(bsym: BoundSymbol) -> bool:
    """Whether what it returns is given: an input that is named, or the inner tensors of one."""
    if bsym.sym.id in ("thunder_norm.flatten", "thunder_norm.parameter_norm"):
        return True
    given = {a.name for a in bsym.flat_proxy_args}
    return all(o.name in given for o in bsym.flat_proxy_outs)


def are_the_same_each_time(bsyms: Iterable[BoundSymbol]) -> bool:
    """Whether operations draw no random numbers, read no memory that nothing was written into, and do no more than return tensors."""
    return not any(map(_is_of_one_run, _parts(bsyms)))


def _parts(bsyms: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    for bsym in bsyms:
        yield bsym
        yield from _parts(bsym.subsymbols)


def _is_of_one_run(bsym: BoundSymbol) -> bool:
    made = made_for(bsym.sym)
    if draws_numbers(bsym) or is_unwritten(bsym.sym.name):
        return True
    return made is not None and (is_kept(made.function) or is_unwritten(getattr(made.function, "__name__", "")))


def is_unwritten(name: str) -> bool:
    """Whether an operation of this name returns memory into which nothing was written."""
    return name.partition(".")[0] in _UNWRITTEN


_UNWRITTEN = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())


def compiled(p: TensorProxy | NumberProxy, operations: list[BoundSymbol], inputs: list[TensorProxy]) -> Callable[..., Any]:
    """A function from tensors for `inputs` to that for `p`, every operation run by torch."""
    trace = TraceCtx()
    trace.args, trace.kwargs = tuple(inputs), {}
    trace._siginfo = SigInfo("plain_values")
    trace._siginfo.args = [(a.name, None) for a in inputs]
    trace.names.update(o.name for bsym in _parts(operations) for o in (*bsym.flat_proxy_outs, *bsym.flat_proxy_args))
    with tracectx(trace):
        for a in inputs:
            prims.unpack_trivial(a, name=a.name)
        trace.bound_symbols.extend(operations)
        prims.python_return(p)
    return transform_for_execution(trace, (torchex.ex, pythonex.ex)).python_callable()


_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def as_tensor(number: complex) -> torch.Tensor:
    """A number as a tensor without dimensions, as exactly as Python has it."""
    return torch.tensor(number, dtype=_DTYPES[type(number)])
