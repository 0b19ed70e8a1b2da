"""Hooks that run with torch's autograd on fakes, while the backward of a program is traced: what they do to gradients is in it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import BackwardHook

from thunder_norm.errors import ThunderNormError, UnsupportedOpError, with_details
from thunder_norm.model_state.reachable import Reachable
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.classes.protocol import WrapperSpec
from thunder_norm.tracing.activity import depending
from thunder_norm.trees import flat_tensors
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx


@dataclass(eq=False)
class Hook:
    """A hook that a program gives.

    Attributes:
        on_examples: what it makes of zeros; None if nobody knows what to give it.
        at: where the program gives it.
    """

    on_examples: Callable[[], Any] | None
    at: str | None

    @property
    def keeps_zeros(self) -> bool:
        """Whether it makes zeros of zeros."""
        if self.on_examples is None:
            return False
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), _WithoutWrites():
                found = self.on_examples()
                return all(not t.any() for leaf in flat_tensors(found) for t in _leaves(leaf))
        except Exception:  # noqa: BLE001 - it needs other tensors than examples
            return False


class _WithoutWrites(TorchDispatchMode):
    """Nothing is written but what was made meanwhile: a hook may write into tensors of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and any(id(t) not in self._made for t in flat_tensors((args, kwargs))):
            raise UnsupportedOpError(f"{func} takes a tensor that was there before")
        found = func(*args, **kwargs)
        self._made.update((id(t), t) for t in flat_tensors(found))
        return found


@dataclass(eq=False)
class HookOfBackward(Hook):
    """A hook of what a program computes; `node` is of torch's graph, from where the gradient comes."""

    node: Any


def _leaves(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return WrapperSpec.of(t).leaves(t) if is_wrapper(t) else (t,)


def example(fake: Any, value: float) -> Any:
    """A real tensor like a fake, all of whose entries are `value`; anything else as it is."""
    if not isinstance(fake, torch.Tensor):
        return fake
    with torch.no_grad():
        made = tuple([torch.full(t.shape, value, dtype=t.dtype, device=t.device) for t in _leaves(fake)])
        return WrapperSpec.of(fake).build(made).detach() if is_wrapper(fake) else made[0]


def watching(hook: Callable, at: str | None, refusal: Callable[[str, str | None], Exception] | None = None) -> Callable:
    """The hook, run while the trace is acquired: of what it does, what it returns is in the trace; `refusal` is the error where it does more."""

    @functools.wraps(hook, updated=())
    def run(*gradients: Any, **named: Any) -> Any:
        before = Reachable((hook, getattr(hook, "__self__", None), *of_modules(hook)))
        try:
            found = hook(*gradients, **named)
        except Exception as e:
            if isinstance(e, ThunderNormError) or refusal is not None:  # it is a function that the program calls
                raise
            raise _raises(e, at) from e
        changed = [place for place in before.places if place.is_changed]
        for place in changed:
            place.restore()
        if changed:
            raise (refusal or _changes)(f"a {type(changed[0].owner).__name__}", at)
        return found

    return run


def _changes(what: str, at: str | None) -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            f"a hook changes {what}",
            at=at,
            why="it runs once, while the trace is acquired, and not in each backward",
            instead="let it return a gradient, and keep what it is given by torch.autograd.grad",
        )
    )


def _raises(error: Exception, at: str | None) -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            f"a hook raises {type(error).__name__}: {error}",
            at=at,
            why="it runs while the trace is acquired, on tensors without data, and not in each backward",
        )
    )


def of_modules(hook: Callable) -> list[Any]:
    """The program's own functions, where it is torch that calls them: hooks of a module's backward."""
    held = inspect.getclosurevars(hook).nonlocals.values() if isinstance(hook, types.FunctionType) else ()
    return [own for h in held if isinstance(h, BackwardHook) for own in (h.user_hooks, h.user_pre_hooks)]


def check_hooks(acquisition: Acquisition, outputs: Sequence[torch.Tensor]) -> None:
    """Where only results are differentiated that do not depend on a tensor its hook is not called; the trace calls it with zeros.

    Raises:
        UnsupportedOpError: one would make a gradient of these.
    """
    hooks = [(hook, hook.node) for hook in acquisition.hooks_of_backward]
    for fake in acquisition.autograd.sources.values():
        wrapper = acquisition.wrappers.proxy_of(fake)
        proxy = acquisition.fakes.first_proxy_of(fake) if wrapper is None else wrapper
        hooks += [(hook, _node(fake)) for hook in _of_input(acquisition, proxy)]
    roots = [_node(t) for t in outputs] if hooks else []
    for hook, node in hooks:
        _check(hook, [_leads_to(root, node) for root in roots])


def check_hooks_of_inputs(acquisition: Acquisition, trace: TraceCtx) -> None:
    """The same for the hooks of inputs where Thunder differentiates.

    Raises:
        UnsupportedOpError: it calls one with zeros that eager mode does not call.
    """
    inputs = [p for p in trace.args if isinstance(p, TensorProxy) and p.requires_grad]
    hooked = [(p, found) for p in inputs if (found := _of_input(acquisition, p))]
    if hooked:
        active = depending(trace, {p.name for p in inputs})
        results = [p.name for p in trace.bound_symbols[-1].args[0]["output"] if isinstance(p, TensorProxy) and p.name in active]
        for p, hooks in hooked:
            of_input = depending(trace, {p.name})
            for hook in hooks:
                _check(hook, [name in of_input for name in results])


def _of_input(acquisition: Acquisition, proxy: TensorProxy | None) -> list[Hook]:
    real = None if proxy is None else acquisition.fakes.real_input(proxy)
    return [a.hook for a in acquisition.hooks_of_inputs.values() if a.given is real] if real is not None else []


def _check(hook: Hook, are_dependent: Sequence[bool]) -> None:
    if any(are_dependent) and not all(are_dependent) and not hook.keeps_zeros:
        raise UnsupportedOpError(
            with_details(
                "a hook of a tensor that some results do not depend on",
                at=hook.at,
                why="it is not known to make zeros of zeros, and where those results alone are differentiated it must not be called",
                instead="return these results from a function of their own, or let the hook return zeros for zeros",
            )
        )


def _node(t: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(t).node


def _leads_to(root: Any, node: Any) -> bool:
    seen, pending = set(), [root]
    while pending:
        found = pending.pop()
        if found is node:
            return True
        if found is not None and found not in seen:
            seen.add(found)
            pending.extend(n for n, _ in found.next_functions)
    return False


def check_retained(acquisition: Acquisition, outputs: list[torch.Tensor]) -> None:
    """A result keeps the gradient that arrives at it from outside: there may be no part of it that comes from within, and no hook.

    Raises:
        UnsupportedOpError: another result depends on one that is to keep its gradient, or this has a hook.
    """
    hooked = [hook.node for hook in acquisition.hooks_of_backward]
    for fake, at in acquisition.retained:
        if all(fake is not t for t in outputs):
            continue
        node = _node(fake)
        if node in hooked or any(_leads_to(_node(t), node) for t in outputs if t is not fake):
            raise UnsupportedOpError(
                with_details(
                    "retain_grad() of a tensor that the program computes and returns",
                    at=at,
                    why="another result depends on it, or it has a hook: its gradient is put together inside of what is differentiated",
                    instead="return it from a function of its own, or ask torch.autograd.grad",
                )
            )
