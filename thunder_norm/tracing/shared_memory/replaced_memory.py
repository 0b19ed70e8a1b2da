"""Tensors that a program has lie in other memory: ``x.data = value``, ``y.set_(value)``.

The object stays, and so does its history; from then on it is the value, and what is written into one is in the other.  What was read of it
before, a view or a detached tensor, stays in the memory it had.  A tensor that the program has made gets another name in the operations so
far, as in `views_in_place`.  That of an input stands in the prologue: a mark is left, behind which the value is put in its place once the
program is known, and the epilogue gives the memory of the value to the input of the call.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.context_variables import setting
from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.activity import depending_on_gradients
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.locations import at_line_of, location_of, location_of_user
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.recording import gradients_recorded, scope
from thunder_norm.tracing.shared_memory import aliases
from thunder_norm.tracing.shared_memory.histories import current, history_of
from thunder_norm.tracing.shared_memory.kept_by_autograd import keeps
from thunder_norm.tracing.shared_memory.memory import Memory
from thunder_norm.tracing.shared_memory.views import makes_view
from thunder_norm.tracing.shared_memory.views_in_place import names_of_one_object, renamed_so_far
import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.interpreter import WrappedValue, do_raise, unwrap, wrap_const
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import AnyProxy, Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.update_aliases import _is_inplace_op

NAMES = frozenset({"set_"})
_MARK = "thunder_norm.replaced_memory"

# In eager mode the backward of these computes with no argument, and of those with the other arguments alone.
_NEED_NOTHING = frozenset("add sub neg cat stack sum mean".split())
_NEED_THE_OTHERS = frozenset("linear matmul mm bmm mul conv1d conv2d conv3d embedding".split())

_mark = Symbol(name="replaced_memory_", id=_MARK, is_prim=False, meta=lambda tensor, value: None)


@dataclass(frozen=True)
class _Replaced:
    """An input, and the tensor in whose memory it lies after the call.

    Attributes:
        tensor: its proxy.
        given: one of the shape that it is given with.
        real: the input of the call at hand.
        owner: the object itself, in prologue and epilogue.
        value: in whose memory it lies.
        location: where the program says so.
    """

    tensor: TensorProxy
    given: TensorProxy
    real: torch.Tensor
    owner: AnyProxy
    value: TensorProxy
    location: str | None


_current: contextvars.ContextVar[dict[str, _Replaced]] = contextvars.ContextVar("thunder_norm_replaced_memory")


def noted() -> AbstractContextManager[None]:
    """Note what becomes of inputs meanwhile."""
    return setting(_current, {})


def is_replaced(proxy: TensorProxy) -> bool:
    """Whether the program has given an input another memory by now."""
    return proxy.name in _current.get({})


# -- while the program is acquired ----------------------------------------------------------------------------------------


def data_assigned(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    """Called for ``x.data = value`` with plain tensors."""
    return _put(obj, ".data of a tensor is set", value.value, by_set=False)


@langctx(Languages.TORCH)
def _set(obj: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    proxy, given, named = obj.value, [unwrap(a) for a in args], {k: unwrap(v) for k, v in kwargs.items()}
    value = given[0] if given else named.get("source")
    if type(proxy) is not TensorProxy or len(given) + len(named) > 1 or (value is None and (given or named)):
        return do_raise(_refused("set_() of a storage", "a trace knows tensors, and not the memory they lie in"))
    if value is None:
        value = ltorch.zeros(0, dtype=dtypes.to_torch_dtype(proxy.dtype), device=proxy.device)
    return _put(obj, "set_() of a tensor", value, by_set=True)


def _put(obj: WrappedValue, what: str, value: Any, by_set: bool) -> Any:
    try:
        _check(what, obj.value, value, by_set)
        trace = get_jit_ctx().computation_trace
        names = names_of_one_object(what, trace.peek_scope(), obj.value)
        if any(p.history is not None for p in names):
            _mark_input(what, trace, names, value, by_set)
        else:
            _rename(trace, what, names, value)
    except Exception as e:  # noqa: BLE001 - what torch says is the program's to handle
        return do_raise(e)
    return obj if by_set else wrap_const(None)


def _check(what: str, proxy: TensorProxy, value: Any, by_set: bool) -> None:
    if type(value) is not TensorProxy:
        raise _refused(f"{what} to a {type(value).__name__}", "the trace has a plain tensor there")
    if (value.dtype, value.device) != (proxy.dtype, proxy.device):
        raise _refused(
            f"{what} to one of another dtype or device", "the object would be another tensor for everybody who holds it"
        )
    trace = get_jit_ctx().computation_trace
    if len(trace.scopes) != 1:
        raise _refused(f"{what} in a region or in a function that is transformed", "the region has tensors of its own")
    if by_set and torch.is_grad_enabled() and {proxy.name, value.name} & depending_on_gradients(trace.bound_symbols):
        raise _refused(f"{what} that requires grad, or to one that does", "torch has no derivative of set_()")


def _rename(trace: TraceCtx, what: str, names: list[TensorProxy], value: TensorProxy) -> None:
    """Have a tensor of the program's be the value from here on."""
    made = {p.name for bsym in trace.peek_scope() for p in bsym.flat_proxy_outs}
    if any(p.name not in made for p in names):
        raise _refused(f"{what} from around the function", "the region has tensors of its own")
    active = depending_on_gradients(trace.peek_scope()) if torch.is_grad_enabled() else set()
    _check_not_needed(location_of_user(), trace.peek_scope(), {p.name for p in names}, active)
    for p in names:
        before = renamed_so_far(p)
        with gradients_recorded(True), scope(trace) as recorded:  # it keeps its history wherever the program does this
            after = ltorch.detach(before if value is p else value)
            after = current(history_of(before), after) if p.name in active else after
        _reshape(p, after)
        trace.peek_scope().extend(b.from_bsym_swap_proxies({variableify(after): p}) for b in recorded)


def _reshape(p: TensorProxy, like: TensorProxy) -> None:
    """While a program is interpreted: it has another shape."""
    _take_shape(p, like)
    wrap_const(p).attribute_wrappers.clear()  # what the interpreter remembers of it: x.shape


def _take_shape(p: TensorProxy, like: TensorProxy) -> None:
    p._shape, p._ndim, p._numel = like._shape, like._ndim, like._numel


def _mark_input(what: str, trace: TraceCtx, names: list[TensorProxy], value: TensorProxy, by_set: bool) -> None:
    root = next(p for p in names if p.history is not None)
    real = aliases.given_as(root)
    if by_set:
        raise _refused("set_() of an input", "autograd counts it as a change, and the epilogue can do it without autograd alone")
    if not isinstance(real, torch.Tensor):
        raise _refused(what, "nobody knows which input it is")
    if len(names) > 1 and tuple(value.shape) != tuple(root.shape):
        raise _refused(f"{what} to one of another shape, after it was written into", "it has several names in the trace by then")
    with gradients_recorded(False):
        detached = ltorch.detach(value)
    with scope(trace):
        copied = prims.copy_.bind(detached, root, grad_enabled=False, output=TensorProxy(like=root))
    # whoever asks in the meantime is told that something is written into all that the object is called
    trace.peek_scope().append(_mark.bind(names[0], detached, output=None, subsymbols=(copied,)))
    bsym = trace.peek_scope()[-1]
    bsym.args = (*names, detached)
    found = _current.get()
    before = found.get(root.name)
    given = TensorProxy(like=root) if before is None else before.given
    owner = AnyProxy(real, history=root.history) if before is None else before.owner
    found[root.name] = _Replaced(root, given, real, owner, detached, location_of_user())
    _reshape(root, detached)


def _refused(what: str, why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            what,
            at=location_of_user(),
            why=why,
            instead="write into it, tensor.copy_(value) under torch.no_grad(), or go on with a tensor of another name",
        )
    )


# -- once it is known -----------------------------------------------------------------------------------------------------


def write(epilogue: TraceCtx, hindrance: Callable[[TensorProxy], str | None] = lambda tensor: None) -> None:
    """Have the epilogue give the inputs of the call their memory.

    Args:
        epilogue: the trace that runs when the computation is through.
        hindrance: why the program cannot do this to an input; None if it can.

    Raises:
        UnsupportedOpError: there is a hindrance, and an input whose memory is replaced.
    """
    for found in _current.get().values():
        if (why := hindrance(found.tensor)) is not None:
            raise UnsupportedOpError(
                with_details(
                    ".data of a tensor is set",
                    at=found.location,
                    why=why,
                    instead="write into it: tensor.copy_(value), under torch.no_grad()",
                )
            )
        tensor = found.tensor
        _take_shape(tensor, found.given)  # the operations before took it as it was given
        found.owner.tags.update(tensor.tags & {ProxyTag.STATIC_MEMORY_LOCATION})
        epilogue.names.add(found.owner.name)
        with tracectx(epilogue):
            epilogue.bound_symbols.append(bindable("set_data", _set_data)(found.owner, found.value, output=None))


def replaced_inputs(computation: TraceCtx) -> set[str]:
    """The names of the inputs of a program just acquired whose memory is another once the epilogue has run."""
    ways = [replaced.tensor.history for replaced in _current.get().values()]
    return {p.name for p in computation.args if isinstance(p, TensorProxy) and any(p.history is way for way in ways)}


def guard(prologue: TraceCtx, computation: TraceCtx) -> None:
    """Let the prologue see that what is given other memory is given once: the object would be it everywhere.

    Raises:
        UnsupportedOpError: it is given twice.
    """
    inputs = [p for p in computation.args if isinstance(p, TensorProxy)]
    for replaced in _current.get().values():
        others = [p for p in inputs if p.history is not replaced.tensor.history]
        if any(aliases.given_as(p) is replaced.real for p in others):
            why = "the same tensor is given to the program at another place, which would have to be another from there on, too"
            raise UnsupportedOpError(
                with_details(".data of a tensor is set", at=replaced.location, why=why, instead="give it to the program once")
            )
        with tracectx(prologue):
            check = bindable("check_given_once", _check_given_once)(replaced.owner, *others, output=None)
            prologue.bound_symbols.insert(-1, check)


def _check_given_once(tensor: torch.Tensor, *others: torch.Tensor) -> None:
    if any(t is tensor for t in others):
        raise GuardError("a tensor whose memory is replaced is given twice")


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data = value.detach()


def replaces_memory(trace: TraceCtx) -> bool:
    """Whether a tensor gets other memory in a program, as by ``t.data = value``."""
    return any(b.sym.id == _MARK for b in trace.bound_symbols)


def resolved(trace: TraceCtx) -> TraceCtx:
    """A program in which the values stand for the tensors whose memory was replaced, from there on.

    Raises:
        UnsupportedOpError: a backward would compute with the new values in eager mode, or a value with a history of its own is written into.
    """
    if not replaces_memory(trace) and not any(b.sym.name == "current" for b in trace.bound_symbols):
        return trace
    new, swaps, earlier = from_trace(trace), dict[Variable, Proxy](), dict[str, str | None]()
    is_differentiated = torch.is_grad_enabled()
    active = depending_on_gradients(trace.bound_symbols) if is_differentiated else set()
    roots = {b.args[0].name for b in trace.bound_symbols if b.sym.id == _MARK}
    for bsym in trace.bound_symbols:
        if bsym.sym.name == "current":
            _check_same_shape(bsym, *bsym.args, active)
        if bsym.sym.id != _MARK:
            new.bound_symbols.append(bsym.from_bsym_swap_proxies(swaps) if swaps else bsym)
            continue
        *names, value = bsym.args
        root, *_ = held = _swapped(names, swaps)
        held_names = {p.name for p in held}
        lies_apart = _lies_apart(new.bound_symbols, held_names, roots)
        _check_not_needed(location_of(bsym), new.bound_symbols, held_names, active, lies_apart)
        if is_differentiated and not lies_apart:
            earlier |= dict.fromkeys(_views_of(new.bound_symbols, held_names), location_of(bsym))
        after = value
        if is_differentiated and any(p.name in active for p in names):
            _check_same_shape(bsym, root, value, active)
            with tracectx(new), at_line_of(new, bsym):
                after = current(history_of(root), value)
            active |= {after.name}
        swaps |= {variableify(p): after for p in names}
    _check_not_written(new.bound_symbols)
    for view, at in earlier.items():
        _check_not_needed(at, new.bound_symbols, {view}, active)
    return new


def _views_of(bsyms: Iterable[BoundSymbol], names: set[str]) -> set[str]:
    """The names of what has been taken of a tensor, whose backward takes it again: of the object, which has other memory by then."""
    found: set[str] = set()
    for bsym in bsyms:
        if makes_view(bsym) and bsym.flat_proxy_args and bsym.flat_proxy_args[0].name in names | found:
            found |= {p.name for p in bsym.flat_proxy_outs} - names
    return found


def _swapped(proxies: Iterable[TensorProxy], swaps: dict[Variable, Proxy]) -> list[Any]:
    return [swaps.get(variableify(p), p) for p in proxies]


def _lies_apart(bsyms: Iterable[BoundSymbol], names: set[str], roots: set[str]) -> bool:
    """Whether tensors lie in no memory in which an input was given that has another since, or will have."""
    memory = Memory()
    for bsym in bsyms:
        is_same = makes_view(bsym) or _is_inplace_op(bsym) or bsym.sym.name in ("detach", "current")
        given = [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
        if is_same and given:
            memory.join([given[-1 if bsym.sym.name == "current" else 0].name, *(p.name for p in bsym.flat_proxy_outs)])
    return {memory.root(n) for n in names}.isdisjoint(map(memory.root, roots))


def _check_not_needed(
    at: str | None, before: Iterable[BoundSymbol], names: set[str], active: set[str], lies_apart: bool = False
) -> None:
    """Refuse what in eager mode changes what a backward computes with: autograd keeps the object, and not its memory.

    Where it `lies_apart`, in memory that the trace itself computes, a backward that keeps a view of the object, or nothing of it, finds that there.
    """
    for bsym in before:
        given = [p.name for p in bsym.flat_proxy_args]
        is_linear = bsym.sym.name in _NEED_THE_OTHERS and sum(n in names for n in given) == 1
        needs = not is_linear or any(n in active for n in given if n not in names)
        is_active = any(p.name in active for p in bsym.flat_proxy_outs) and bsym.sym.name not in _NEED_NOTHING
        if names.isdisjoint(given) or not (needs and is_active) or bsym.sym.name == "history" or makes_view(bsym):
            continue
        if bsym.sym.name == "current" or (lies_apart and not keeps(bsym, names)):
            continue
        raise UnsupportedOpError(
            with_details(
                ".data is set of a tensor that a backward needs",
                at=at,
                why=f"it, or a view of it, is used in {bsym.sym.name}, whose backward computes with what is in it when it runs",
                instead="set it before its first use, or use a clone of it before",
            )
        )


def _check_same_shape(bsym: BoundSymbol, history: TensorProxy, value: TensorProxy, active: set[str]) -> None:
    """Refuse a tensor whose gradients would have another shape than what it was computed to."""
    if tuple(history.shape) != tuple(value.shape) and history.name in active:
        raise UnsupportedOpError(
            with_details(
                ".data of a tensor that requires grad is set to a tensor of another shape",
                at=location_of(bsym),
                why="its gradients would have that shape, and what it was computed from has the old one",
                instead="go on with a tensor of another name",
            )
        )


def _check_not_written(bsyms: list[BoundSymbol]) -> None:
    """Refuse writes into the memory of values that have the history of others: the two are apart in a trace."""
    memory = Memory()
    shared: set[str] = set()
    for bsym in bsyms:
        given = [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
        if bsym.sym.name == "current":
            memory.join([bsym.args[1].name, *(p.name for p in bsym.flat_proxy_outs)])
            shared.add(memory.root(bsym.args[1].name))
        elif given and _is_inplace_op(bsym) and memory.root(given[0].name) in shared:
            raise UnsupportedOpError(
                with_details(
                    f"in-place {bsym.sym.name} on a tensor whose .data was set, or on what it was set to",
                    at=location_of(bsym),
                    why="they lie in one memory, and one of them has a history that the other one has not",
                    instead="write before the assignment, or assign a clone: x.data = value.clone()",
                )
            )
        if given and (_is_inplace_op(bsym) or makes_view(bsym)):
            memory.join([given[0].name, *(p.name for p in bsym.flat_proxy_outs)])


instead_of(torch.Tensor.set_)(_set)
