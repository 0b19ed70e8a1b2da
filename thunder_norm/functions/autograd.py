"""Transformed functions in torch's autograd.

A transformed function runs without recording anything; if something it depends on requires grad, its results get a node whose
backward is the `vjp` of the transformed function, itself a transformed function.  So nothing is spent on a backward that nobody
asks for, and gradients of any order are those of the transforms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from thunder_norm.errors import TransformError
from thunder_norm.subclass.protocol import WrapperSpec, is_wrapper


class Differentiable(Protocol):
    """A transformed function, as torch's autograd has to know it."""

    result_specs: list[TreeSpec]

    @property
    def backward(self) -> Callable:
        """Its vjp: cotangents of the results, whether wrappers are open, then the arguments."""
        ...

    def compiled_for(self, wrappers: Sequence[torch.Tensor]) -> tuple[Callable, bool]:
        """The compiled function, and whether gradients go to inner tensors whatever these require."""
        ...


@dataclass
class _EagerCall:
    """One call of a transformed function on tensors."""

    transformed: Differentiable
    spec: TreeSpec
    leaves: list[Any]  # of the arguments; those that autograd keeps are None
    positions: list[int]  # of what autograd keeps among them
    num_inputs: int  # of the node, what the function uses beside its arguments not counted
    opens: bool  # whether the inner tensors of wrappers are inputs and results of the node, in place of the wrappers
    rng_states: list[Any] | None
    is_connected: list[bool]  # of each result: not those that the function returns as it found them


def run(transformed: Differentiable, args: tuple, kwargs: dict) -> Any:
    """Call a transformed function on tensors."""
    tensors = _tensors_in(args, kwargs)
    wrappers = [t for t in tensors if type(t) not in _PLAIN and is_wrapper(t)]
    compiled, goes_inside = transformed.compiled_for(wrappers)
    if not torch.is_grad_enabled():
        found, number, *_ = compiled(*args, **kwargs)
        return tree_unflatten(found, transformed.result_specs[number])
    rng_states = _rng_states()
    has_containers = any(not isinstance(v, torch.Tensor) and type(v) not in _LEAVES for v in (*args, *kwargs.values()))
    if has_containers and any(t.requires_grad for t in tensors):
        # containers of the call's own: what the function reads of the same ones in its surroundings has gradients of its own
        args, kwargs = tree_unflatten(*tree_flatten((args, kwargs)))
    with torch.no_grad():
        found, number, captured, is_random, refusal = compiled(*args, **kwargs)
    result = tree_unflatten(found, transformed.result_specs[number])
    opens = _opens(wrappers, goes_inside)
    inputs = [inner for t in tensors for inner in _inner(t)] if opens else tensors
    if refusal:
        raise TransformError(refusal)
    if not any(t.requires_grad for t in (*inputs, *captured)):
        return result
    leaves, spec = tree_flatten((args, kwargs))
    positions = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and not (opens and is_wrapper(v))]
    kept = [None if i in positions else v for i, v in enumerate(leaves)]
    call = _EagerCall(transformed, spec, kept, positions, len(inputs), opens, rng_states if is_random else None, [])
    return _connected(call, result, inputs, captured)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _opens(wrappers: Sequence[torch.Tensor], goes_inside: bool) -> bool:
    """Whether gradients flow into inner tensors: those of some wrapper require grad, or all are asked for, and no wrapper does."""
    if not wrappers or any(t.requires_grad for t in wrappers):
        return False
    return goes_inside or any(inner.requires_grad for t in wrappers for inner in _inner(t))


def _inner(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return WrapperSpec.of(t).leaves(t) if is_wrapper(t) else (t,)


def _connected(call: _EagerCall, result: Any, inputs: Sequence[torch.Tensor], captured: Sequence[torch.Tensor]) -> Any:
    """The result, its tensors connected to `inputs` and `captured`."""
    outs, out_spec = tree_flatten(result)
    own = {id(t) for t in captured}  # what the function returns as it found it is that
    specs = [WrapperSpec.of(v) if call.opens and isinstance(v, torch.Tensor) and is_wrapper(v) else None for v in outs]
    tensors = [
        (inner, id(v) not in own)
        for v, s in zip(outs, specs, strict=True)
        if isinstance(v, torch.Tensor)
        for inner in ((v,) if s is None else s.leaves(v))
    ]
    call.is_connected = [connects for _, connects in tensors]
    computed = [t for t, connects in tensors if connects]
    found = iter(_Node.apply(call, computed, *inputs, *captured)) if computed else iter(())
    for i, (v, s) in enumerate(zip(outs, specs, strict=True)):
        if isinstance(v, torch.Tensor) and id(v) not in own:
            outs[i] = next(found) if s is None else s.build(tuple(next(found) for _ in s.leaves(v)))
    return tree_unflatten(outs, out_spec)


def _tensors_in(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors among arguments in the order of ``tree_flatten``, which takes ten times as long to find them."""
    found: list[torch.Tensor] = []
    remaining: list[Any] = [kwargs, args]
    while remaining:
        v = remaining.pop()
        kind = type(v)
        if isinstance(v, torch.Tensor):
            found.append(v)
        elif kind is tuple or kind is list:
            remaining.extend(reversed(v))
        elif kind is dict:
            remaining.extend(reversed(v.values()))
        elif kind not in _LEAVES:
            leaves = tree_flatten(v)[0]
            found.extend(t for t in leaves if isinstance(t, torch.Tensor))
    return found


_LEAVES = (int, float, bool, str, type(None))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _EagerCall, computed: Sequence[torch.Tensor], *tensors: torch.Tensor) -> tuple:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        given = {id(t) for t in tensors}
        outs = tuple(t.view_as(t) if id(t) in given else t for t in computed)
        ctx.mark_non_differentiable(*(t for t in outs if not (t.is_floating_point() or t.is_complex())))
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple:
        call: _EagerCall = ctx.call
        inputs, captured = ctx.saved_tensors[: call.num_inputs], ctx.saved_tensors[call.num_inputs :]
        leaves = list(call.leaves)
        if call.opens:
            plain = iter(t for t, is_plain in zip(inputs, _is_plain(call), strict=True) if is_plain)
        else:
            plain = iter(inputs)
        for i in call.positions:
            leaves[i] = next(plain)
        args, kwargs = tree_unflatten(leaves, call.spec)
        given = iter(cotangents)
        of_results = tuple(next(given) if connects else None for connects in call.is_connected)
        with _rng_restored(call.rng_states):
            of_args, of_captured, found, _ = call.transformed.backward(of_results, call.opens, *args, **kwargs)
        by_identity = {id(t): g for t, g in zip(found, of_captured, strict=True)}
        gradients = [*of_args, *(by_identity.get(id(t)) for t in captured)]
        return None, None, *(g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad[2:], strict=True))


def _is_plain(call: _EagerCall) -> list[bool]:
    """Of each input of a node that opens wrappers: whether it is no inner tensor."""
    found = []
    for i, v in enumerate(call.leaves):
        found += [True] if i in call.positions else [False] * len(_inner(v)) if isinstance(v, torch.Tensor) else []
    return found


def _rng_states() -> list[Any]:
    return [torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None]


@contextlib.contextmanager
def _rng_restored(states: Sequence[Any] | None) -> Iterator[None]:
    """The backward computes the forward again: with the numbers it drew, without disturbing what is drawn later."""
    if states is None:
        yield
        return
    current = _rng_states()
    _set_rng_states(states)
    try:
        yield
    finally:
        _set_rng_states(current)


def _set_rng_states(states: Sequence[Any]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state_all(states[1])
