"""In traces: buffers that a program writes normed tensors into; see `written_buffers` for eager programs.

Thunder writes the plain values, which outlive the call.  From then on a normed tensor stands for each proxy that the program has of the buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils._pytree import tree_map

from thunder_norm.core.tensors import NormedTensor, describe
from thunder_norm.errors import ThunderNormError, UnsupportedOpError, with_details
from thunder_norm.norms.lifts.traced_lifting import TracedLifting
from thunder_norm.norms.lifts.written_parameters import write_of
from thunder_norm.op_names import op_name
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.fakes import num_made
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.interpreting import operations
from thunder_norm.subclass.recording import trace
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.shared_memory.views import makes_view
import thunder.torch as ltorch
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.update_aliases import _is_inplace_op


def write(
    acquisition: Acquisition, lifting: TracedLifting, symbol: Callable, fn: Callable, args: tuple, kwargs: dict
) -> Callable[[], Any]:
    """What to do for an operation that writes into a buffer.

    Args:
        acquisition: the one at hand.
        lifting: that of the trace.
        symbol: Thunder's own.
        fn: what the program calls.
        args: the buffer, and the others.
        kwargs: the arguments by name.
    """
    target = args[0]

    def now(value: Any) -> Any:
        return acquisition.by_now(value) if isinstance(value, TensorProxy) else value

    def backing(value: Any) -> Any:
        by_now = now(value)
        return trace.leaf_proxies(acquisition, by_now.fake)[0] if isinstance(by_now, SubclassProxy) else value

    def written() -> Any:
        others, by_name = tree_map(now, (args[1:], kwargs))
        plain_others, plain_by_name = tree_map(backing, (args[1:], kwargs))
        new = None if _in_memory_of(target).of_parts(lifting) else _after(acquisition, fn, target, others, by_name)
        result = symbol(target, *plain_others, **plain_by_name)
        found = _in_memory_of(result if isinstance(result, TensorProxy) else target)
        whole = [target, *found.whole]
        if new is None:  # it may be that nobody asks for its norm
            lifting.change(fn, [*whole, *found.others])
            return result
        lifting.change(fn, found.others)
        position = num_made(get_jit_ctx().computation_trace.bound_symbols)
        for p in whole:
            acquisition.have_stand_in(p, new, position, is_written_too=True)
        return result

    return written


def _after(acquisition: Acquisition, fn: Callable, target: TensorProxy, others: tuple, by_name: dict) -> TensorProxy | None:
    """What stands for the buffer after a write; None where no rule says it.

    Raises:
        ThunderNormError: the same, where a normed tensor stands for it already.
    """
    stands = acquisition.by_now(target)
    if stands is not target:
        return operations.call(acquisition, fn, (stands, *others), by_name)
    found = write_of(fn, (target, *others), by_name)
    if found is None:
        return None
    with contextlib.suppress(ThunderNormError):
        new = operations.call(acquisition, found.operation, found.args, found.kwargs)
        if isinstance(new, SubclassProxy) and (new.shape, new.dtype) == (target.shape, target.dtype):
            return new
    return None


class _InMemory(NamedTuple):
    """What the program may hold of a buffer: all of it in the order that one at hand has, and others, parts of it perhaps."""

    whole: list[TensorProxy]
    others: list[TensorProxy]

    def of_parts(self, lifting: TracedLifting) -> bool:
        """Whether the one at hand is itself a part."""
        return any(map(lifting.member, self.others))


def _in_memory_of(target: TensorProxy) -> _InMemory:
    whole, found, size = {target.name}, {target.name: target}, 0
    while len(whole) + len(found) > size:
        size = len(whole) + len(found)
        for bsym in get_jit_ctx().computation_trace.bound_symbols:
            is_write = _is_inplace_op(bsym)
            if not (is_write or makes_view(bsym)):
                continue
            pair = {p.name: p for p in (bsym.flat_proxy_args[0], *bsym.flat_proxy_outs)}
            if not pair.keys().isdisjoint(found):
                found |= pair
            if not pair.keys().isdisjoint(whole) and (is_write or bsym.sym is ltorch.detach):
                whole |= pair.keys()
    return _InMemory([p for n, p in found.items() if n in whole], [p for n, p in found.items() if n not in whole])


def refuse_write_into_part(acquisition: Acquisition, fn: Callable, target: Any) -> None:
    """Refuse to write into a view of what stands for a buffer, which the buffer would not know.

    Raises:
        UnsupportedOpError: the program does.
    """
    if not isinstance(target, SubclassProxy) or not isinstance(target.fake, NormedTensor):
        return
    written = (s.new for s in acquisition.stand_ins.values() if s.is_written_too)
    standing = {id(p.fake) for p in written if isinstance(p, SubclassProxy)}
    if id(target.fake) not in standing and not standing.isdisjoint(map(id, target.fake.aliases())):
        raise UnsupportedOpError(
            with_details(
                f"in-place {op_name(fn)} on a view of a buffer that normed tensors were written into",
                called_with=describe(target.fake),
                at=location_of_user(),
                why="the buffer keeps plain values, and would not have these",
                instead="write into the buffer itself: self.buffer[i] = ...",
            )
        )
