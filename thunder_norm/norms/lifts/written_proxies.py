"""In traces: what a program writes into constants and into tensors made from parameters; see `written_constants` for eager programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.core import registry
from thunder_norm.core.context import current_environment
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.norms.lifts.traced_lifting import TracedLifting
from thunder_norm.norms.lifts.written_parameters import refused, sharing_memory, values_after, write_of
from thunder_norm.op_names import op_key
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.fakes import num_made
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.interpreting import operations
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.shared_memory.views import makes_view
from thunder_norm.tracing.shared_memory.writes import targets
from thunder_norm.tracing.torch_functions.known_values import memory_of, steps_of
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.torch import _torch_to_thunder_function_map


def with_current(
    acquisition: Acquisition,
    concerns: Callable[[torch.Tensor], bool],
    moves: Callable[[TensorProxy], bool],
    fn: Callable,
    args: tuple,
    kwargs: dict,
) -> tuple[tuple, dict] | None:
    """Arguments with what stands for constants by now that others were written into, or are to be by this operation.

    None where there is nothing to replace.

    Args:
        acquisition: the one at hand.
        concerns: whether a fake is a parameter, or was made of parameters alone: such a one is no constant.
        moves: whether a proxy is such a one, and its norm another than that of its data: it may be written into a constant.
        fn: the operation.
        args: its arguments, with proxies for tensors.
        kwargs: its keyword arguments.
    """
    target = args[0] if args else None
    is_write = registry.is_mutation(fn, kwargs) and _has((args[1:], kwargs), lambda p: _is_normed(p) or moves(p))
    if is_write and _may_be_written(acquisition, concerns, target):
        made = _constant_of(target)
        if made is None:
            return None
        _stand_in(acquisition, made)
    leaves = tree_flatten((args, kwargs))[0]
    if not any(isinstance(v, TensorProxy) and v.name in acquisition.stand_ins for v in leaves):
        return None

    def current(v: Any) -> Any:
        return acquisition.by_now(v) if isinstance(v, TensorProxy) else v

    return tree_map(current, (args, kwargs))


def write(
    acquisition: Acquisition, lifting: TracedLifting, has_data: bool, fn: Callable, args: tuple, kwargs: dict
) -> Callable[[], Any] | None:
    """What to do for an operation that writes into a parameter, or into a tensor made from some, as `written_parameters` has it; None for all others.

    A parameter itself is written where its norm is that of its data, by Thunder, which is measured again from then on.  Where there is no
    data, in a norm map, a result stands for it as for others: its next call finds the parameter that it was given.

    Args:
        acquisition: the one at hand.
        lifting: that of the trace.
        has_data: whether the program is run on data.
        fn: the operation.
        args: its arguments, with proxies for tensors.
        kwargs: its keyword arguments.
    """
    found = write_of(fn, args, kwargs)
    target = args[0] if args else None
    if found is None or not _is_plain(target) or not lifting.concerns(acquisition.fake_of(target)):
        return None
    fake, fakes = acquisition.fake_of(target), acquisition.fakes
    tensors = [fake, *sharing_memory(fake, [t for t, _ in fakes.pairs()])]
    is_of_given = any(map(fakes.is_given, tensors))
    if is_of_given and has_data:
        symbol = thunder_symbol(fn)
        others = [v for v in tree_flatten((args[1:], kwargs))[0] if isinstance(v, TensorProxy)]
        are_measured = not any(map(lifting.matters, tensors)) and not any(
            _is_normed(p) or _matters(lifting, acquisition, p) for p in others
        )
        if symbol is not None and are_measured and not any(p.name in acquisition.stand_ins for p in (target, *others)):
            return lambda: symbol(*args, **kwargs)

    def written() -> TensorProxy:
        handles = [fakes.proxy_of(t) for t in tensors]
        if is_of_given and has_data:
            raise refused(
                fn, fake, location_of_user(), "it shares its memory with a parameter, whose next call would find it changed"
            )
        if _has_unknown_views(handles):
            raise refused(fn, fake, location_of_user(), "it shares its memory with a tensor that Thunder made")

        def run(operation: Callable, *args: Any, **kwargs: Any) -> Any:
            return operations.call(acquisition, operation, args, kwargs)

        after = values_after(found, tensors, handles, run, lambda p: _memory(acquisition, p), location_of_user())
        position = _position()
        lifting.note_written_over(fn, tensors)
        changed = [(before, new) for before, new in zip(handles, after, strict=True) if before is not new]
        for before, new in changed:
            acquisition.have_stand_in(before, new, position)
        return target

    return written


def replace(acquisition: Acquisition, lifting: TracedLifting, target: TensorProxy, value: TensorProxy) -> bool:
    """Have a value stand for a parameter from here on, and for no other tensor in its memory (``w.data = value``); whether it can.

    Args:
        acquisition: the one at hand.
        lifting: that of the trace.
        target: what may be a parameter, or made from some.
        value: what its data becomes.
    """
    if not lifting.concerns(acquisition.fake_of(target)):
        return False
    if (tuple(value.shape), value.dtype, value.device) != (tuple(target.shape), target.dtype, target.device):
        return False
    if acquisition.by_now(value) is not acquisition.by_now(target):
        acquisition.have_stand_in(target, acquisition.by_now(value), _position())
    return True


def _matters(lifting: TracedLifting, acquisition: Acquisition, proxy: TensorProxy) -> bool:
    return lifting.is_parameter_proxy(proxy) and lifting.matters(acquisition.fake_of(proxy))


def thunder_symbol(fn: Callable) -> Callable | None:
    """What Thunder has for an operation in place."""
    own = getattr(torch.Tensor, str(op_key(fn)), fn)  # of ``t -= x``
    return _torch_to_thunder_function_map.get(fn, _torch_to_thunder_function_map.get(own))


def _position() -> int:
    """Where the computation is by now."""
    return num_made(get_jit_ctx().computation_trace.bound_symbols)


def _memory(acquisition: Acquisition, proxy: TensorProxy) -> torch.Tensor:
    fake = acquisition.fake_of(proxy)
    return fake.backing if isinstance(fake, NormedTensor) else fake


def _has_unknown_views(proxies: Sequence[TensorProxy]) -> bool:
    """Whether an operation that was not met made a view of one of the tensors, which would stay what it was."""
    names = {p.name for p in proxies}
    views = (b for b in get_jit_ctx().computation_trace.bound_symbols if makes_view(b))
    return any(b.flat_proxy_args[0].name in names and b.flat_proxy_outs[0].name not in names for b in views)


def _is_plain(proxy: Any) -> bool:
    return isinstance(proxy, TensorProxy) and not isinstance(proxy, SubclassProxy)


def written_constant(t: torch.Tensor) -> NormedTensor:
    """What stands for a constant from here on."""
    return current_environment().written_constant(t)  # type: ignore[attr-defined]


def without_values(t: torch.Tensor) -> NormedTensor:
    """The same for a tensor that nothing was written into yet: zeros, as one must do with anything."""
    environment = current_environment()
    return environment.written_constant(environment.run_real(torch.zeros_like, (t,), {}))  # type: ignore[attr-defined]


def _has(tree: Any, is_one: Callable[[TensorProxy], bool]) -> bool:
    return any(isinstance(v, TensorProxy) and is_one(v) for v in tree_flatten(tree)[0])


def _is_normed(proxy: TensorProxy) -> bool:
    return isinstance(proxy, SubclassProxy) and isinstance(proxy.fake, NormedTensor)


def _may_be_written(acquisition: Acquisition, concerns: Callable[[torch.Tensor], bool], proxy: Any) -> bool:
    """Whether it is a plain tensor that no normed tensor stands for yet."""
    if not _is_plain(proxy) or proxy.name in acquisition.stand_ins:
        return False
    fake = acquisition.fake_of(proxy)
    return has_norm(fake) and not concerns(fake)


class _Made(NamedTuple):
    """A constant in memory of its own, and what gave the program other names for its memory, in order: views, and writes, which return what they write into."""

    proxy: TensorProxy
    by: BoundSymbol
    others: list[BoundSymbol]


def _stand_in(acquisition: Acquisition, made: _Made) -> None:
    """Have a normed tensor stand for a constant from here on, and the same views of that one for each of its views."""
    is_empty = made.by.sym.name.startswith("empty") and not any(map(targets, made.others))
    lift = without_values if is_empty else written_constant
    stand_ins = {made.proxy.name: operations.call(acquisition, lift, (made.proxy,), {})}
    position = _position()
    acquisition.have_stand_in(made.proxy, stand_ins[made.proxy.name], position)
    for bsym in made.others:
        new = stand_ins[bsym.args[0].name]
        if _selects(bsym) == "view":
            new = operations.call(acquisition, torch.Tensor.__getitem__, (new, bsym.args[1]), {})
        for p in bsym.flat_proxy_outs:
            stand_ins[p.name] = new
            acquisition.have_stand_in(p, new, position)


def _constant_of(proxy: TensorProxy) -> _Made | None:
    """The constant of which a tensor is the whole or a part; None where something else may know its memory, as what a view is of does.

    ``out[i] += v`` is three operations: ``part = out[i]``, which is a view or, by tensors of indices, a copy; ``part += v``; and ``out[i] = part``.
    """
    others = _other_names(proxy)
    made_by = _made_and_used(proxy)[0]
    if others is None or made_by is None or made_by.sym.id == prims.PrimIDs.UNPACK_TRIVIAL:
        return None
    if made_by.args and _names_again(made_by, made_by.args[0]):
        return _constant_of(made_by.args[0])
    if made_by.sym is ltorch.getitem:
        whole = _constant_of(made_by.args[0])
        return whole and _Made(proxy, made_by, others)
    memory = memory_of(steps_of([made_by]))
    is_new = made_by.sym in _LIKE or all(memory.root(p.name) != memory.root(proxy.name) for p in made_by.flat_proxy_args)
    return _Made(proxy, made_by, others) if is_new else None


def _other_names(proxy: TensorProxy) -> list[BoundSymbol] | None:
    """The operations that gave the program other names for a tensor's memory so far; None where one may have that is not followed."""
    found = []
    for bsym in _made_and_used(proxy)[1]:
        if _names_again(bsym, proxy):
            found.append(bsym)
            for p in bsym.flat_proxy_outs:
                more = _other_names(p)
                if more is None:
                    return None
                found += more
        elif _selects(bsym) != "copy" or bsym.args[0].name != proxy.name:
            memory = memory_of(steps_of([bsym]))
            if any(t.name == proxy.name for t in targets(bsym)) or any(
                memory.root(p.name) == memory.root(proxy.name) for p in bsym.flat_proxy_outs
            ):
                return None
    return found


def _names_again(bsym: BoundSymbol, proxy: TensorProxy) -> bool:
    """Whether what an operation returns is this tensor, into which it writes, or a view of it by indexing."""
    if not bsym.args or not isinstance(bsym.args[0], TensorProxy) or bsym.args[0].name != proxy.name:
        return False
    if _selects(bsym) == "view":
        return True
    is_given_once = [p.name for p in bsym.flat_proxy_args].count(proxy.name) == 1
    is_written_alone = {t.name for t in targets(bsym)} == {proxy.name}
    return (
        is_given_once
        and is_written_alone
        and all(isinstance(p, TensorProxy) and p.shape == proxy.shape for p in bsym.flat_proxy_outs)
    )


def _made_and_used(proxy: TensorProxy) -> tuple[BoundSymbol | None, list[BoundSymbol]]:
    """What made a tensor, and what it was given to."""
    bsyms = [b for scope in get_jit_ctx().computation_trace.scopes for b in scope]
    made = [b for b in bsyms if any(p.name == proxy.name for p in b.flat_proxy_outs)]
    uses = [b for b in bsyms if any(p.name == proxy.name for p in b.flat_proxy_args)]
    return (made[-1] if made and made[-1] not in uses else None), uses


def _selects(bsym: BoundSymbol) -> Literal["view", "copy"] | None:
    """Whether an operation is one of indexing, and its result a view; None where it is another, or it depends on more than types."""
    if bsym.sym is not ltorch.getitem:
        return None
    index = bsym.args[1]
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, TensorProxy) and i.ndim > 0 or isinstance(i, list) for i in items):
        return "copy"
    plain = all(i is None or i is Ellipsis or isinstance(i, slice) or type(i) is int for i in items)
    return "view" if plain else None


# what takes a tensor for its shape, type and device alone
_LIKE = (
    ltorch.zeros_like, ltorch.ones_like, ltorch.full_like, ltorch.empty_like, ltorch.new_zeros, ltorch.new_ones, ltorch.new_full, ltorch.new_empty
)  # fmt: skip
