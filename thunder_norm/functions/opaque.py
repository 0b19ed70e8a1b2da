"""Operations that Thunder cannot take apart: torch runs them, and torch.func transforms what torch runs.

``derived("jvp", operation)`` is the symbol that runs ``torch.func.jvp`` of an operation; it is such an operation itself, so that
transforms nest.  Its metadata follows from that of the operation, without running anything.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from thunder_norm.functions import drawn_again, recorded_layers, torch_calls, tried_views
from thunder_norm.functions.calls_apart import apart_from_autograd
from thunder_norm.functions.programs import flat_proxies, is_complex, is_differentiable
from thunder_norm.functions.registry import VjpRule, missing_rule
from thunder_norm.functions.thunder_rules import joint_of
from thunder_norm.functions.torch_calls import Forward
from thunder_norm.subclass.acquiring.fallback import made_for
from thunder_norm.tracing.calls import left_to_autograd
from thunder_norm.tracing.locations import location_of
from thunder_norm.tracing.torch_functions import random_numbers
from thunder_norm.tracing.translation import all_for_torch
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transforms import register_grad
from thunder.extend import OperatorExecutor

# Runs what is derived here.  Never in an executor list: only what is written here carries it.
opaque_executor = OperatorExecutor("thunder_norm_opaque", version="1")

_PLAIN = "_thunder_norm_plain"  # of what takes Thunder's dtypes and devices too: what it calls with torch's
_UNWRITTEN = frozenset({"empty_like"})  # its numbers are what was in memory


class Operation(NamedTuple):
    """An operation that torch runs.

    ``run(*args, **kwargs)`` takes torch tensors, ``meta(*args, **kwargs)`` proxies; the tensors of what both return, flattened,
    correspond.  `views` are the results that share memory with an argument, by the positions of both.  `forward` is what torch's
    forward mode of it is worth, and of what is derived from it.  What is there for its effect returns nothing
    that is used.  For `apart` see `Derivation`.
    """

    name: str
    run: Callable
    meta: Callable
    is_random: bool = False
    views: tuple[tuple[int, int], ...] = ()
    forward: Forward = Forward.RIGHT
    is_effect: bool = False
    apart: Callable | None = None


class Derivation(NamedTuple):
    """How a transform makes an operation of another one: `run`, `meta` and `apart` take those of the other one first.

    `apart` is `run` as a computation of its own, of which torch's autograd sees nothing; where it is None that is made of `run`, in walks
    through arguments and results.
    """

    run: Callable
    meta: Callable
    apart: Callable | None = None


_DERIVATIONS = {
    "jvp": Derivation(torch_calls.run_jvp, torch_calls.meta_jvp),
    "vjp": Derivation(torch_calls.run_vjp, torch_calls.meta_vjp),
    "vmap": Derivation(torch_calls.run_vmap, torch_calls.meta_vmap),
    "noting": Derivation(drawn_again.run_noting, drawn_again.meta_noting),
    "recording": Derivation(recorded_layers.run_recording, recorded_layers.meta_recording, recorded_layers.record),
    "pullback": Derivation(recorded_layers.run_pullback, recorded_layers.meta_pullback, recorded_layers.pull_back),
}
_symbols: dict[tuple[str, Operation], Symbol] = {}  # what was derived, by transform and operation
_operations: dict[Hashable, Operation] = {}  # what was derived, by the id of its symbol


def derived(transform: str, operation: Operation) -> Symbol:
    """The symbol for a transformed operation."""
    found = _symbols.get((transform, operation))
    return _register(transform, operation) if found is None else found


def _register(transform: str, operation: Operation) -> Symbol:
    how = _DERIVATIONS[transform]
    plain = getattr(operation.run, _PLAIN, operation.run)  # one conversion of the arguments is enough
    run, apart = functools.partial(how.run, plain), None if how.apart is None else functools.partial(how.apart, plain)
    if transform == "jvp":
        run = functools.partial(run, forward=operation.forward)
    meta = functools.partial(how.meta, operation.meta)
    forward, is_effect = operation.forward, operation.is_effect
    name = f"{transform}_{operation.name}"
    symbol = symbol_for(Operation(name, run, meta, operation.is_random, (), forward, is_effect, apart))
    _symbols[transform, operation] = symbol
    if transform == "recording":
        left_to_autograd.records(symbol, plain)
    return symbol


def symbol_for(operation: Operation, rule: VjpRule | None = None) -> Symbol:
    """A symbol for an operation that torch runs and Thunder has no symbol for; `rule` is its gradient in Thunder, if it is not torch's."""
    names = itertools.chain([operation.name], (f"{operation.name}_{i}" for i in itertools.count(1)))
    name = next(n for n in names if n not in opaque_executor.opmap)  # two operations may have one name
    run = _on_torch_types(operation.run)
    tags = [prims.OpTags.RANDOM_OP] if operation.is_random else []
    if operation.is_random or operation.is_effect:
        tags.append(prims.OpTags.DONT_DCE)
    called = operation.apart or apart_from_autograd(name, run)
    symbol = opaque_executor.register_operator(name, meta=operation.meta, fn=called, tags=tags or None)
    _operations[symbol.id] = operation._replace(name=name, run=run)
    if not tags:  # for Thunder's own automatic differentiation of a program that holds it
        register_grad(symbol, joint_of(rule or _torchs_rule(symbol, _operations[symbol.id])))
    return symbol


def views_of(bsym: BoundSymbol) -> dict[str, str]:
    """The results of an operation that share memory with an argument in torch, and the names of both."""
    tensors = flat_proxies((*bsym.args, *bsym.kwargs.values()))
    if not tensors:  # entering and leaving autocast among them: it is not to be tried out
        return {}
    own = _operations.get(bsym.sym.id)
    function = getattr(bsym.sym.meta, "__torchfn", None) or _torch_function(bsym.sym)
    made = made_for(bsym.sym)
    if own is not None:
        views = own.views
    elif made is not None and made.form != "gradient" and _may_return_view(made.function):
        kept = [i for i, is_used in enumerate(made.used) if is_used]
        found = tried_views.views(made.function, bsym.args, bsym.kwargs)
        views = [(kept.index(i), k) for i, k in found if i in kept]
    elif function is not None:
        try:
            views = tried_views.views(function, bsym.args, bsym.kwargs)
        except Exception:  # noqa: BLE001 - not the arguments that torch's function takes: what the operation consists of says it
            return {}
    else:
        return {}
    outs = flat_proxies(bsym.output)
    return {outs[i].name: tensors[k].name for i, k in views if i < len(outs)}


def _may_return_view(function: Callable) -> bool:
    """Whether an operation says that a result lies in the memory of an argument."""
    returns = function._schema.returns if isinstance(function, torch._ops.OpOverload) else ()
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def operation_of(bsym: BoundSymbol) -> Operation | None:
    """The operation that a bound symbol stands for, taken as a whole; None if torch is not what runs it."""
    sym = bsym.sym
    if sym.id in _operations:
        return _operations[sym.id]
    run = (
        (bsym._call_ctx or {}).get(sym.name)
        or getattr(sym.meta, "__torchfn", None)
        or _torch_function(sym)
        or _OF_PRIMS.get(sym.id)
    )
    if run is None:
        return None
    name = str(sym.id if isinstance(sym.id, str) else sym.name).replace(".", "_")
    return _operation(name, run, sym.meta, sym.name in _UNWRITTEN or random_numbers.draws_numbers(bsym))


def _embedding(
    indices: torch.Tensor,
    weight: torch.Tensor,
    *,
    padding_idx: int = -1,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if max_norm is not None:
        raise NotImplementedError("an embedding that renormalizes its weight is not differentiable")
    return torch.embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)


# Primitives of Thunder's that torch runs as a whole where we have no rule for their arguments.
_OF_PRIMS: dict[Hashable, Callable] = {
    prims.PrimIDs.EMBEDDING: _embedding,
    prims.PrimIDs.EMBEDDING_BACKWARD: torch.ops.aten.embedding_backward,
}


@functools.cache
def _operation(name: str, run: Callable, meta: Callable, is_random: bool) -> Operation:
    def alone(*args: Any, **kwargs: Any) -> Any:
        with tracectx(TraceCtx()):  # what Thunder would write for its parts is not wanted
            found = meta(*args, **kwargs)
        return tree_map(lambda v: TensorProxy(like=v) if isinstance(v, TensorProxy) else v, found)

    run = _on_torch_types(_by_name_where_needed(run, meta))
    return Operation(name, run, alone, is_random, forward=Forward.of(name))


def _by_name_where_needed(run: Callable, meta: Callable) -> Callable:
    """`run`, which may take by name alone what Thunder's symbol takes by position, as torch.argsort does ``stable``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except TypeError as e:
            if "positional argument" not in str(e) or not args:
                raise
        names = list(inspect.signature(meta).parameters)
        return run(args[0], **dict(zip(names[1:], args[1:], strict=False)), **kwargs)

    return call


@functools.cache
def _by_id() -> dict[Hashable, Callable]:
    """Torch's functions by the id of their symbols; a function of a module before a method of torch.Tensor."""
    known = [
        (f, s)
        for f, s in ltorch._torch_to_thunder_function_map.items()
        if isinstance(s, Symbol) and s.id is not None and callable(f)  # a few have names instead
    ]
    known.sort(key=lambda pair: str(pair[1].id).rpartition(".")[2] != getattr(pair[0], "__name__", ""))
    found: dict[Hashable, Callable] = {}
    for function, symbol in known:
        found.setdefault(symbol.id, function)
    return found


def _torch_function(sym: Symbol) -> Callable | None:
    if not isinstance(sym.id, str):
        return None
    value: Any = torch
    for part in sym.id.split(".")[1:]:
        value = getattr(value, part, None)
    return value if callable(value) and sym.id.startswith("torch.") and value is not torch else _by_id().get(sym.id)


def _on_torch_types(run: Callable) -> Callable:
    """`run` for arguments in which Thunder's dtypes and devices may stand, as they do after all passes but one."""

    def on_torch_types(*args: Any, **kwargs: Any) -> Any:
        return plain(*all_for_torch(args), **all_for_torch(kwargs))

    plain = getattr(run, _PLAIN, run)
    setattr(on_torch_types, _PLAIN, plain)
    return on_torch_types


def fallbacks(trace: TraceCtx) -> list[tuple[str, str | None]]:
    """The operations of a transformed trace that are transformed by torch.func when they run, with the user's line.

    >>> import torch
    >>> import thunder_norm, thunder
    >>> fallbacks(thunder.trace()(lambda x: x + 1, torch.ones(2)))
    []
    """
    found = []
    for bsym in trace.bound_symbols:
        if bsym.sym.id in _operations:
            found.append((bsym.sym.name, location_of(bsym)))
    return found


def is_opaque(bsym: BoundSymbol) -> bool:
    """Whether an operation is one that Thunder or we had registered for torch to run: it has neither parts nor rules of its own.

    Relies on ``thunder.torch.meta_adaptor`` keeping the function it stands for.
    """
    return bsym.sym.id in _operations or (not bsym.subsymbols and hasattr(bsym.sym.meta, "__torchfn"))


# Thunder's parts of these multiply padding of minus infinity with zeros.
_WHOLE = frozenset(f"torch.nn.functional.max_pool{n}d" for n in (1, 2, 3))


# What they compute of complex numbers is not defined (an order), not implemented in torch (convolution, pad), or a real mean.
_OF_REAL_NUMBERS = frozenset(
    getattr(prims.PrimIDs, name) for name in ("AMAX", "AMIN", "MAXIMUM", "MINIMUM", "CONVOLUTION", "PAD", "VAR_MEAN")
)


def has_parts_of_real_numbers(bsym: BoundSymbol) -> bool:
    """Whether an operation on complex numbers consists of parts that are for real ones, as Thunder's logsumexp does."""
    if bsym.sym.id in _OF_REAL_NUMBERS:
        return any(map(is_complex, bsym.flat_proxy_args))
    return any(map(has_parts_of_real_numbers, bsym.subsymbols))


def is_whole(bsym: BoundSymbol) -> bool:
    """Whether an operation is not what its parts compute, so that all of it is torch's to run and to transform."""
    return bsym.sym.id in _WHOLE or has_parts_of_real_numbers(bsym)


# What takes long to run again for its gradient: what torch's autograd recorded of it stays.
_LAYERS = random_numbers.RECURRENT | {"multi_head_attention_forward"}


def torch_vjp_rule(bsym: BoundSymbol, active: Container[str]) -> VjpRule | None:
    """The vjp rule of an operation that torch runs: torch's formula, run by ``torch.func``; None if torch is not what runs it.

    It gives gradients to the tensors named in `active`: torch refuses to differentiate by some arguments of some operations.

    What draws numbers runs again for its gradient, from the state of the generator that it drew them from.

    Raises:
        MissingTransformRuleError: it draws numbers, and is no operation that draws the same from the same state.
    """
    operation = operation_of(bsym)
    if operation is None:
        return None
    if not operation.is_random:
        is_layer = bsym.sym.name in _LAYERS
        return _torchs_rule(bsym.sym, operation, active, is_recorded=is_layer)
    if not _draws_from_a_state(bsym, operation):
        raise missing_rule(
            bsym, "vjp", "draws numbers and ", why="torch's formula for its gradient would run it again, with other numbers"
        )
    noting = derived("noting", operation)
    again = _again(operation)

    def symbol(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return noting(args, kwargs)

    return _torchs_rule(symbol, again, active, is_noted=True)


def noted(bsym: BoundSymbol) -> tuple[Symbol, Symbol] | None:
    """For an operation that draws numbers and that torch runs: ``state, result = first(args, kwargs)`` and ``again(state, *args, **kwargs)``.

    None if it is no such operation, or none that draws the same from the same state.
    """
    operation = operation_of(bsym)
    if operation is None or not operation.is_random or not _draws_from_a_state(bsym, operation):
        return None
    return derived("noting", operation), _symbol_again(operation)


@functools.cache
def _symbol_again(operation: Operation) -> Symbol:
    return symbol_for(_again(operation))


def _draws_from_a_state(bsym: BoundSymbol, operation: Operation) -> bool:
    """Whether an operation that draws numbers draws the same from the same state of the generator of the device of a tensor it takes."""
    return operation.name not in _UNWRITTEN and bool(flat_proxies((bsym.args, bsym.kwargs))) and not _keeps_a_state(bsym)


def _keeps_a_state(bsym: BoundSymbol) -> bool:
    """Whether torch's kernel draws from a state of its own: recurrent ones of cuDNN."""
    return bsym.sym.name in random_numbers.RECURRENT and flat_proxies(bsym.args)[0].device.type == "cuda"


@functools.cache
def _again(operation: Operation) -> Operation:
    """The same operation with the numbers of a state, which comes first."""
    run = functools.partial(drawn_again.run_again, operation.run)
    meta = functools.partial(drawn_again.meta_again, operation.meta)
    return Operation(f"{operation.name}_again", run, meta, forward=operation.forward)


class _TorchsRule(VjpRule):
    """Its gradients come with the tensors they are for."""

    takes_missing = True

    def paired(self, args: tuple, kwargs: dict, gradients: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return list(gradients)


def _torchs_rule(
    symbol: Callable,
    operation: Operation,
    active: Container[str] | None = None,
    is_noted: bool = False,
    is_recorded: bool = False,
) -> VjpRule:
    """`symbol` runs the operation.

    If it `is_noted`, it returns first a state, which `operation` takes first; if it `is_recorded`, what it was stays for the gradient.
    """

    def wanted_of(args: tuple, kwargs: dict) -> tuple[list[TensorProxy], tuple[bool, ...]]:
        inputs = [p for p in flat_proxies((args, kwargs)) if is_differentiable(p)]
        return inputs, tuple(active is None or p.name in active for p in inputs)

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, tuple]:
        held = ()
        if is_recorded:
            first, result = derived("recording", operation)(wanted_of(args, kwargs)[1], args, kwargs)
            held = (first,)
        else:
            result = symbol(*args, **kwargs)
        if is_noted:
            state, result = result
            args = (state, *args)
        return result, (held, args, kwargs, tuple(map(is_differentiable, flat_proxies(result))))

    def backward(saved: tuple, *cotangents: TensorProxy) -> list[tuple[TensorProxy, TensorProxy]]:
        held, args, kwargs, mask = saved
        inputs, wanted = wanted_of(args, kwargs)
        received = tuple(ct for ct, m in zip(cotangents, mask, strict=True) if m)
        gradients = derived("pullback" if held else "vjp", operation)(*held, args, kwargs, received, wanted)
        return list(zip([p for p, w in zip(inputs, wanted, strict=True) if w], gradients, strict=True))

    return _TorchsRule(forward, backward)
