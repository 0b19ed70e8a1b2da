"""Writing what was recorded into the computation trace.

Each operation of the user's program becomes one composite bound symbol on *plain* proxies, named after the class and the
operation, with the recorded operations as its subsymbols.  Wrappers appear only as arguments and results of the three
symbols `flatten`, `unflatten` and `rebind`, which `boundary.lower` takes out of the computation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.op_names import op_key
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.autograd import Intermediate, is_grad_enabled, may_have_history
from thunder_norm.subclass.acquiring.effects import is_effect
from thunder_norm.subclass.acquiring.fallback import is_kept
from thunder_norm.subclass.acquiring.functional_forms import is_view, rewritten, without_history
from thunder_norm.subclass.acquiring.lengths import as_number
from thunder_norm.subclass.classes.protocol import WrapperSpec, beside_parts, is_of_wrappers
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.recording import aten
from thunder_norm.subclass.recording.record import Recorded, needed
from thunder_norm.tracing.hooks import disable_autocast
from thunder_norm.tracing.recording import gradients_recorded, print_without_module
from thunder_norm.tracing.translation import proxy_like
from thunder_norm.trees import flat_tensors
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core import prims
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol


class OperationId(NamedTuple):
    """The id of a composite: the class and the operation; see `register_implementation`."""

    cls: type | str  # a name for what belongs to no class
    op: str

    def __str__(self) -> str:
        return f"{self.cls if isinstance(self.cls, str) else self.cls.__name__}.{self.op}"


FLATTEN = Symbol(name="flatten", id="thunder_norm.flatten", is_prim=True, tags=(prims.OpTags.DONT_DCE,))
UNFLATTEN = Symbol(name="unflatten", id="thunder_norm.unflatten", is_prim=True, tags=(prims.OpTags.DONT_DCE,))
REBIND = Symbol(name="rebind", id="thunder_norm.rebind", is_prim=True, tags=(prims.OpTags.DONT_DCE,))

# ``(n,) = parameter_norm("fc.weight")``: the size given for a parameter; `boundary.lower` moves it to the prologue.
LEAF = Symbol(name="parameter_norm", id="thunder_norm.parameter_norm", is_prim=True, tags=(prims.OpTags.DONT_DCE,))


def mark(symbol: Symbol, *args: Any, output: Any = None) -> BoundSymbol:
    """One of these operations: called in a trace, as Thunder's ``check_traces`` does, it returns what it has returned."""
    return replace(symbol, meta=lambda *_: output).bind(*args, output=output)


def open_input(acquisition: Acquisition, proxy: SubclassProxy, x: torch.Tensor) -> None:
    """Write ``(x_a, x_b) = flatten(x)`` for an input wrapper, and ask the prologue to check its inner tensors."""
    spec = WrapperSpec.of(x)
    leaves = []
    acquisition.fakes.note_inside(spec.leaves(proxy.fake))
    for fake, real in zip(spec.leaves(proxy.fake), spec.leaves(x), strict=True):
        if acquisition.fakes.proxy_of(fake) is None:
            acquisition.fakes.inner[id(fake)] = real.requires_grad
            leaf = proxy_like(fake, requires_grad=real.requires_grad)
            acquisition.fakes.bind(fake, leaf, is_input=True)
            acquisition.integers.note_source(fake, real, leaf)
            acquisition.sizes.note_input(fake, real, leaf)
            if acquisition.autograd.is_running and real.requires_grad:
                acquisition.autograd.note_given(fake, is_leaf=not may_have_history(real))
        leaves.append(acquisition.fakes.proxy_of(fake))
    acquisition.wrappers.specs[id(proxy.fake)] = spec
    acquisition.wrappers.given[id(proxy.fake)] = spec.leaves(proxy.fake)
    acquisition.wrappers.structures[id(proxy.fake)] = (spec.contexts, spec.leaves(proxy.fake))
    acquisition.wrappers.leaves[id(proxy.fake)] = tuple(leaves)
    _append_top_level(mark(FLATTEN, proxy, output=tuple(leaves)))


def write_leaf(acquisition: Acquisition, name: str, fakes: Sequence[torch.Tensor], requires_grad: Sequence[bool]) -> None:
    """Write the scalars given for parameter `name` as further inputs of the computation."""
    proxies = tuple(proxy_like(f, requires_grad=r) for f, r in zip(fakes, requires_grad, strict=True))
    for fake, proxy in zip(fakes, proxies, strict=True):
        acquisition.fakes.bind(fake, proxy, is_input=True)
    _append_top_level(mark(LEAF, name, output=proxies))


def open_inner_wrapper(acquisition: Acquisition, fake: torch.Tensor) -> SubclassProxy:
    """The proxy of a wrapper found inside another one (nested wrappers share their leaves)."""
    proxy = acquisition.register(SubclassProxy(fake, acquisition))
    leaves = acquisition.wrappers.leaves[id(fake)] = leaf_proxies(acquisition, fake)
    if not acquisition.num_levels:  # else it lives in a program of its own, and its result is announced when that is written
        _append_top_level(mark(UNFLATTEN, *leaves, output=proxy))
    return proxy


def _append_top_level(bsym: BoundSymbol) -> None:
    get_jit_ctx().computation_trace.bound_symbols.append(bsym)


def leaf_proxies(acquisition: Acquisition, wrapper: torch.Tensor) -> tuple[TensorProxy, ...]:
    """The proxies the leaves of a fake wrapper stand for now."""
    leaves = WrapperSpec.of(wrapper).leaves(wrapper)
    for t in leaves:
        if acquisition.fakes.proxy_of(t) is None and not isinstance(t, FakeTensor):
            acquisition.fakes.bind(t, aten.captured(t))
    acquisition.fakes.note_inside(leaves)
    proxies = tuple(acquisition.fakes.proxy_of(t) for t in leaves)
    if any(p is None for p in proxies):
        raise UnsupportedOpError(f"a {type(wrapper).__name__} holds a tensor that no traced operation produced")
    return proxies


def leaves_of_wrappers(acquisition: Acquisition, tree: Any) -> dict[int, tuple[torch.Tensor, tuple[int, ...]]]:
    """For each wrapper in `tree`, its identity and those of its leaves: to see afterwards what an operation mutated."""
    found = {}
    for x in tree_flatten(tree)[0]:
        if is_wrapper(x):
            spec = WrapperSpec.of(x)
            found[id(x)] = (x, tuple((id(t), id(acquisition.fakes.proxy_of(t))) for t in spec.leaves(x)))
    return found


def operation_id(fn: Callable, args: Any, kwargs: Any, result: Any) -> OperationId:
    """The class and the operation that the trace shows: of the first wrapper argument, else of the result."""
    wrappers = [x for x in flat_tensors((args, kwargs, result)) if is_wrapper(x)]
    cls = type(wrappers[0]) if wrappers else "plain"
    if isinstance(fn, type):
        return OperationId(fn, "new")
    if is_of_wrappers(fn):
        return OperationId(cls, fn.__name__)
    return OperationId(cls, name_of_operation(fn))


def name_of_operation(fn: Callable) -> str:
    """An operation's name in a trace: ``mul`` for ``torch.mul``, ``x * y`` and ``aten.mul.Tensor``."""
    key = op_key(fn)
    name = key if isinstance(key, str) else getattr(fn, "__name__", "call")
    name = name.split("::")[-1].split(".")[-1]
    if name == "__get__":
        name = getattr(fn.__self__, "__name__", "property")
    return name if name.isidentifier() else "call"


def write(
    acquisition: Acquisition, operation: OperationId, log: Sequence[Recorded], arguments: Any, result: Any, before: dict
) -> Any:
    """Write one operation: a composite for what was recorded, then one `unflatten` per wrapper it returned.

    Returns the result with proxies in place of fakes.
    """
    mutated = [x for x, leaves in before.values() if _leaf_ids(x) != tuple(i for i, _ in leaves)]
    returned = [x for x in flat_tensors(result) if id(x) not in before or not is_wrapper(x)]
    outputs = _unique(leaf for x in [*returned, *mutated] for leaf in _leaves(x))
    outputs += [t for x in [*returned, *(x for x, _ in before.values())] for t in _leaves_beside(x)]
    may_change = [leaf for x, _ in before.values() for leaf in _leaves(x)]
    outputs += [t for r in log if r.is_in_place for t in r.outputs if acquisition.fakes.proxy_of(t) is not None]
    if any(is_effect(r.func) for r in log):
        outputs.append(acquisition.turn)
    given = [t for x in flat_tensors(arguments) for t in _leaves(x)]
    emit_composite(acquisition, operation, log, _unique(outputs), given, may_change)
    if mutated or any(r.is_in_place for r in log):
        rebind(acquisition)
    return _to_proxies(acquisition, result)


def rebind(acquisition: Acquisition) -> None:
    """Tell the trace of every wrapper, also those that share inner tensors, which proxies its leaves are now."""
    for proxy in acquisition.wrappers.proxies():
        leaves = leaf_proxies(acquisition, proxy.fake)
        if tuple(map(id, acquisition.wrappers.leaves[id(proxy.fake)])) != tuple(map(id, leaves)):
            if acquisition.num_levels and not acquisition.wrappers.is_inside(proxy.fake):
                raise UnsupportedOpError("a function under a transform changes a wrapper in place that it did not make")
            if acquisition.num_levels:
                acquisition.wrappers.leaves[id(proxy.fake)] = leaves
                continue
            acquisition.wrappers.leaves[id(proxy.fake)] = leaves
            _append_top_level(mark(REBIND, proxy, *leaves))


def emit_composite(
    acquisition: Acquisition,
    operation: OperationId,
    log: Sequence[Recorded],
    outputs: Sequence[torch.Tensor],
    arguments: Sequence[torch.Tensor] = (),
    may_change: Sequence[torch.Tensor] = (),
) -> None:
    """Write the recorded operations as one composite bound symbol and bind the fakes in `outputs` to its results.

    It takes what the operations use of `arguments` in this order, then what else they use.  So are those of `may_change` that the
    operations made.  Outputs the log did not produce (an
    input returned as it is) keep their proxies.  What an earlier operation computed on the way and torch's autograd kept, or a wrapper,
    although it is none of its leaves (a norm that a later rule asks for, or hands on as it is), is returned by that operation too, or
    computed again.
    """
    if acquisition.autograd.is_running:
        _return_too(acquisition, log, outputs)
    earlier = _made_before(acquisition, log, outputs)
    everything = log = [*earlier, *log]
    produced = {id(t) for r in log for t in r.outputs}
    outputs = _unique(t for t in (*outputs, *may_change) if id(t) in produced)
    if not (outputs or any(is_kept(r.func) for r in log) or _has_history(acquisition, log)):
        return
    if not acquisition.autograd.is_running:  # the backward may use everything
        log = needed(log, outputs, is_kept)
    produced = {id(t) for r in log for t in r.outputs}
    used = {id(t): t for r in log for t in r.inputs if acquisition.fakes.proxy_of(t) is not None}
    inputs = _unique([*(t for t in arguments if id(t) in used), *used.values()])

    wanted = {id(t) for t in outputs} | {id(t) for r in log for t in flat_tensors((r.args, r.kwargs))}
    if acquisition.autograd.is_running:
        wanted |= produced
    going_on = None if is_grad_enabled() else _going_on(acquisition, log)
    symbol, made = composite(
        operation, log, inputs, outputs, wanted, is_detached=acquisition.autograd.is_running, going_on=going_on
    )
    with nullcontext() if not going_on else gradients_recorded(True):
        results = symbol(*(acquisition.fakes.proxy_of(t) for t in inputs))
    for t, p in zip(outputs, results, strict=True):
        acquisition.fakes.bind(t, p)
    _note_bound(acquisition, earlier, outputs)
    for t in (t for r in log for t in r.outputs if acquisition.autograd.is_running):
        acquisition.autograd.intermediates[id(t)] = Intermediate(t, made[id(t)], symbol, outputs)
    written: set[int] = set()
    for recorded in reversed(everything):
        used_now = {id(t): _OVERWRITTEN if id(t) in written else acquisition.fakes.proxy_of(t) for t in recorded.inputs}
        acquisition.autograd.made_by |= {id(t): (recorded, used_now) for t in recorded.outputs if id(t) not in written}
        given_back = set() if recorded.is_in_place else {id(t) for t in recorded.inputs}
        written.update(id(t) for t in recorded.outputs if id(t) not in given_back)


def _has_history(acquisition: Acquisition, log: Sequence[Recorded]) -> bool:
    """Whether torch's autograd has recorded operations that a class, which had them to do in place, has done to something else.

    The wrapper is what it was, and has their history: the backward takes what they took.
    """
    return acquisition.autograd.is_running and is_grad_enabled() and any(t.requires_grad for r in log for t in r.inputs)


_OVERWRITTEN = object()  # what stood for an input of an operation that one after it, of the same composite, wrote into


def _return_too(acquisition: Acquisition, log: Sequence[Recorded], outputs: Sequence[torch.Tensor]) -> None:
    """Have composites that are written already return what they made on the way and `log` uses, or `outputs` has."""
    autograd, produced = acquisition.autograd, {id(t) for r in log for t in r.outputs}
    for t in _unique([*(t for r in log for t in r.inputs), *outputs]):
        found = autograd.intermediates.get(id(t))
        if found is None or id(t) in produced or acquisition.fakes.proxy_of(t) is not None:
            continue
        autograd.check_known((t,))
        for scope in get_jit_ctx().computation_trace.scopes:
            for i in (i for i, bsym in enumerate(scope) if bsym.sym is found.composite):
                if all(p is not found.proxy for p in scope[i].flat_args):
                    found.returned.append(t)
                    found.proxy.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
                    scope[i] = scope[i].from_bsym(output=(*scope[i].output, found.proxy))
                acquisition.fakes.bind(t, found.proxy)


def _note_bound(acquisition: Acquisition, earlier: Sequence[Recorded], outputs: Sequence[torch.Tensor]) -> None:
    """What was made inside of an earlier composite and has a proxy only now did not change meanwhile."""
    again = {id(t) for r in earlier for t in r.outputs}
    bound = {id(t): acquisition.fakes.proxy_of(t) for t in outputs if id(t) in again}
    for _, used in acquisition.autograd.made_by.values() if bound else ():
        used.update({i: p for i, p in bound.items() if i in used and used[i] is None})


def _made_before(acquisition: Acquisition, log: Sequence[Recorded], outputs: Sequence[torch.Tensor]) -> list[Recorded]:
    """The operations inside earlier composites that made what `log` uses, or one of `outputs`.

    Nothing was changed in place since, or they stay unknown.
    """
    known = {id(t) for r in log for t in r.outputs}
    earlier: list[Recorded] = []

    def visit(used: Sequence[torch.Tensor]) -> None:
        for t in used:
            if id(t) in known or acquisition.fakes.proxy_of(t) is not None or id(t) not in acquisition.autograd.made_by:
                continue
            maker, used_then = acquisition.autograd.made_by[id(t)]
            is_changed = any(
                acquisition.fakes.proxy_of(i) is not used_then[id(i)] or acquisition.has_changed(i) for i in maker.inputs
            )
            if not (is_changed or maker.is_in_place or is_kept(maker.func)):
                known.update(id(o) for o in maker.outputs)
                visit(maker.inputs)
                earlier.append(maker)

    for recorded in log:
        visit(recorded.inputs)
    visit(outputs)
    return earlier


def _going_on(acquisition: Acquisition, log: Sequence[Recorded]) -> set[int]:
    """Of operations recorded under `torch.no_grad`, those whose derivatives it does not concern, by identity."""
    reached = acquisition.beyond_no_grad()
    # what is written into keeps its history, and so does what becomes another view of its memory
    found = {id(r) for r in log if is_effect(r.func) or r.func is rewritten or (r.is_in_place and is_view(r.func))}
    for recorded in log if reached else ():
        if any(id(t) in reached for t in recorded.inputs):
            found.add(id(recorded))
            reached = reached | {id(t) for t in recorded.outputs}
    return found


def composite(
    operation: OperationId,
    log: Sequence[Recorded],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    wanted: set[int],
    *,
    is_detached: bool = False,
    going_on: set[int] | None = None,
) -> tuple[Symbol, dict[int, TensorProxy]]:
    """The symbol that replays `log` on proxies for `inputs` and returns those for `outputs`.

    Of operations under `torch.no_grad` the derivatives of those in `going_on` are recorded all the same.

    Also returns a table, filled when the symbol is called, of the proxies of everything in `wanted`, by identity.  Results of
    a detached symbol are constants for Thunder's automatic differentiation.
    """
    made: dict[int, TensorProxy] = {}

    def meta(*proxies: TensorProxy) -> tuple[TensorProxy, ...]:
        # Rebuilt from the actual arguments each time: passes may run a symbol's meta function again.
        env = {id(t): p for t, p in zip(inputs, proxies, strict=True)}

        def to_proxy(t: torch.Tensor, write: Callable[[torch.Tensor], TensorProxy]) -> TensorProxy:
            found = env.get(id(t))
            if found is None:
                if isinstance(t, FakeTensor):
                    raise UnsupportedOpError("an operation uses a tensor that the trace did not produce")
                found = env[id(t)] = write(t)
            return found

        with disable_autocast():  # recorded operations are already below autocast
            for recorded in log:
                # what torch.tensor has just made is numbers; what was there before may change before the next call
                write = aten.constant if recorded.func in aten.LIFTS else aten.captured
                used = tuple(id(t) in wanted for t in recorded.outputs)
                is_constant = recorded.is_constant or recorded.func is without_history
                has_gradient = False if is_constant else id(recorded) in going_on if going_on else None
                with nullcontext() if has_gradient is None else gradients_recorded(has_gradient):
                    emitted = aten.emit(recorded, functools.partial(to_proxy, write=write), used)
                env |= {id(t): p for t, p in zip(recorded.outputs, emitted, strict=True)}
        made.update(env)
        if not is_detached:
            return tuple(_attached(env[id(t)]) for t in outputs)
        results = tuple(prims.shallow_copy(p) if any(p is q for q in proxies) else p for p in (env[id(t)] for t in outputs))
        for p in results:
            p.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        return results

    return Symbol(name=str(operation), meta=meta, id=operation, _bind_postprocess=print_without_module), made


def _attached(p: TensorProxy) -> TensorProxy:
    """An output of a composite: Thunder takes a symbol for constant when any of its outputs is tagged as detached."""
    return prims.shallow_copy(p) if ProxyTag.DETACHED_AUTOGRAD_GRAPH in p.tags else p


def keep_only(bsyms: Sequence[BoundSymbol], wanted: set[str]) -> list[BoundSymbol]:
    """Dead code elimination that looks into composites: only what the proxies named in `wanted` need.

    Composites stay, with fewer arguments, results and subsymbols.
    """
    wanted = set(wanted)
    kept: list[BoundSymbol] = []
    for bsym in reversed(bsyms):
        if not any(p.name in wanted for p in bsym.flat_proxy_outs):
            continue
        if isinstance(bsym.sym.id, OperationId):
            subsymbols = keep_only(bsym.subsymbols, wanted)
            made = {p.name for b in subsymbols for p in b.flat_proxy_outs}
            used = {p.name: p for b in subsymbols for p in b.flat_proxy_args if p.name not in made}
            outputs = tuple(p for p in bsym.flat_proxy_outs if p.name in wanted)
            bsym = bsym.from_bsym(args=tuple(used.values()), output=outputs, subsymbols=subsymbols)
        wanted.update(p.name for p in bsym.flat_proxy_args)
        kept.append(bsym)
    return kept[::-1]


def _leaves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return WrapperSpec.of(x).leaves(x) if is_wrapper(x) else (x,)


def _leaves_beside(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors in attributes that the class of a wrapper does not put it together with: they are set after the call."""
    for value in beside_parts(x).values() if is_wrapper(x) else ():
        for t in flat_tensors(value):
            yield from (leaf for leaf in _leaves(t) if isinstance(leaf, FakeTensor))


def _leaf_ids(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(id(t) for t in _leaves(x))


def _unique(tensors: Any) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())


def _to_proxies(acquisition: Acquisition, result: Any) -> Any:
    if is_wrapper(result):
        known = acquisition.wrappers.proxy_of(result)
        return known if known is not None else open_inner_wrapper(acquisition, result)
    if isinstance(result, torch.Tensor):
        acquisition.fakes.hold(result)
        proxy = acquisition.fakes.proxy_of(result)
        return proxy if proxy is not None else _constant_result(result)
    if type(result).__module__ == "torch.return_types":
        return type(result)([_to_proxies(acquisition, v) for v in result])
    if isinstance(result, torch.Size):
        return as_number(result)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(_to_proxies(acquisition, v) for v in result))
    if isinstance(result, tuple | list):
        converted = [_to_proxies(acquisition, v) for v in result]
        return converted if isinstance(result, list) else tuple(converted)
    if isinstance(result, dict):
        return {k: _to_proxies(acquisition, v) for k, v in result.items()}
    return as_number(result)


def _constant_result(t: torch.Tensor) -> TensorProxy:
    if isinstance(t, FakeTensor):
        raise UnsupportedOpError("an operation on a wrapper returned a tensor that no recorded operation produced")
    return aten.captured(t)
