"""Hooks that a program gives to tensors, ``x.register_hook(f)`` and its like.

Those of inputs are given to the very tensors of the call, once the program has run: autograd calls them with the whole gradient, wherever
it comes from.  Those of what a program computes run with torch's autograd on fakes, and what they do is part of the backward.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from thunder_norm.errors import ThunderNormError, UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.backward import side_effects
from thunder_norm.subclass.backward.hooks_of_backward import Hook, HookOfBackward, example, of_modules, watching
from thunder_norm.subclass.backward.recipes import Call, NotMakeableError, OfEachCall, Recipe, Step, holds_proxies
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.provenances import wrapped_result
from thunder.core.interpreter import WrappedValue, do_raise, interpreter_needs_wrap
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import AnyProxy, Proxy, ProxyTag, TensorProxy
from thunder.core.trace import TraceCtx, tracectx

_RETAIN = torch.Tensor.retain_grad
_METHODS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, _RETAIN)
NAMES = frozenset(method.__name__ for method in _METHODS)
_OF_NODES = frozenset({"register_hook", "register_prehook"})
_BUILT_IN = (types.BuiltinMethodType, types.MethodDescriptorType)


class Handle(OfEachCall, RemovableHandle):
    """What the program gets for a hook.

    Args:
        hooks: those of inputs.
        take_off: takes the hook of what the program computes off, as long as the program runs; None for one of an input.
    """

    described = "the handle of a hook of what the program computes"

    def __init__(self, hooks: dict[int, Any], take_off: Callable[[], None] | None = None):
        super().__init__(hooks)
        self.take_off = take_off
        self.is_made = take_off is None

    def remove(self) -> None:
        """The program takes the hook off again."""
        if self.take_off is not None:
            self.take_off()
        super().remove()
        # in each call one that has nothing to remove
        self.in_call, self.is_made = RemovableHandle(collections.OrderedDict()), True


instead_of(Handle.remove)(interpreter_needs_wrap(Handle.remove))


class _Attached(NamedTuple):
    """What is done to an input of the call at hand, here `given`: `attach` takes it and the values of the proxies that the hook holds."""

    fn: Callable
    given: torch.Tensor
    owner: Proxy
    held: dict[str, Proxy]
    attach: Callable[[torch.Tensor, dict[str, Any]], None]
    hook: Hook


def lookaside(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of a method that gives a tensor a hook, or a node of torch's autograd."""
    if args and isinstance(args[0].value, TensorProxy) and any(fn is m for m in _METHODS):
        return functools.partial(_attached, acquisition, fn)
    if type(fn) in _BUILT_IN and fn.__name__ in _OF_NODES:
        owner = args[0].value if type(fn) is types.MethodDescriptorType and args else getattr(fn, "__self__", None)
        if isinstance(owner, torch.autograd.graph.Node):
            return functools.partial(_on_node, acquisition, fn)
    return None


def is_retained(acquisition: Acquisition, proxy: TensorProxy) -> bool:
    """Whether the program has had a tensor keep its gradient."""
    real = acquisition.fakes.real_input(proxy)
    if real is not None:
        return _RETAIN in _given(acquisition, real)
    return any(acquisition.fake_of(proxy) is fake for fake, _ in acquisition.retained)


def has_given(acquisition: Acquisition, real: torch.Tensor) -> bool:
    """Whether the program has given an input hooks, and not taken them off."""
    return bool(_given(acquisition, real))


def _given(acquisition: Acquisition, real: torch.Tensor) -> list[Callable]:
    return [attached.fn for attached in acquisition.hooks_of_inputs.values() if attached.given is real]


def retain_grad(obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    """Called for ``x.retain_grad`` of a plain tensor, a method that Thunder's proxies lack."""
    return wrapped_result(types.MethodType(_RETAIN, obj.value), [obj.provenance, name.provenance])


def refuse_unfollowed(obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    """Called for these methods of a plain tensor where torch's autograd follows nothing."""
    error = UnsupportedOpError(
        with_details(
            f"{name.value} in a traced function of which torch's autograd follows nothing",
            at=location_of_user(),
            instead="call it outside of that function (of grad, vmap and their like too), or add SubclassTransform() to its transforms",
        )
    )
    return do_raise(error)


def _attached(acquisition: Acquisition, fn: Callable, obj: WrappedValue, hook: WrappedValue | None = None) -> Any:
    hooks = () if hook is None else (hook.value,)
    try:
        if acquisition.num_levels or len(get_jit_ctx().computation_trace.scopes) > 1:
            raise _transformed(fn)
        real = acquisition.fakes.real_input(obj.value)
        if real is None:
            handle = _on_computed(acquisition, fn, obj.value, *hooks)
        else:
            handle = _on_input(acquisition, fn, obj, real, *hooks)
    except ThunderNormError as e:
        return do_raise(acquisition.refuse(e))
    except Exception as e:  # noqa: BLE001 - what torch says is the program's to handle
        return do_raise(e)
    return wrapped_result(handle, [obj.provenance])


def _on_node(acquisition: Acquisition, fn: Callable, *args: WrappedValue) -> Any:
    """Called for the hooks of nodes of torch's autograd, which runs on fakes; ``register_full_backward_hook`` gives modules such."""
    *node, hook = [a.value for a in args]
    if holds_proxies(hook):
        what = "of a node of the graph, with a function that holds tensors of the program's"
        return do_raise(acquisition.refuse(_refusal(fn, what, "give the tensor a hook")))
    acquisition.tape.tear()
    side_effects.note_read(hook, *of_modules(hook))
    attached = fn(*node, watching(hook, location_of_user()))
    owner = node[0] if node else fn.__self__  # pyright: ignore[reportFunctionMemberAccess]
    handle = _on_fakes(acquisition, attached, HookOfBackward(None, location_of_user(), owner))
    return wrapped_result(handle, [a.provenance for a in args])


def _refusal(fn: Callable, what: str, instead: str) -> UnsupportedOpError:
    return UnsupportedOpError(with_details(f"{fn.__name__} {what}", at=location_of_user(), instead=instead))


def _transformed(fn: Callable) -> UnsupportedOpError:
    return _refusal(fn, "in a function that is transformed, or in a region", "call it outside of that function")


# -- inputs -------------------------------------------------------------------------------------------------------------------


def _on_input(acquisition: Acquisition, fn: Callable, obj: WrappedValue, real: torch.Tensor, *hooks: Any) -> Handle | None:
    with torch.enable_grad():
        like = torch.empty((), requires_grad=real.requires_grad)
        fn(like if real.is_leaf else like * 1, *hooks)  # raises what torch does
    if fn is _RETAIN and real.is_leaf:
        return None
    held, make = _made(fn, hooks, shares=False)
    registered = acquisition.hooks_of_inputs
    handle = Handle(registered)

    def attach(given: torch.Tensor, values: dict[str, Any]) -> None:
        handle.in_call = fn(given, *make(Call(values)))

    def on_examples() -> Any:
        (hook,) = make(_call_with_examples(acquisition, held))
        return watching(hook, location_of_user())(example(acquisition.fake_of(obj.value), 0.0))

    is_of_gradient = fn is torch.Tensor.register_hook  # others do what they do to the input itself
    # Thunder's prologue takes parameters that are tagged so; the tensor itself would live as long as the trace
    owner = AnyProxy(torch.Tensor, history=obj.provenance, tags={ProxyTag.STATIC_MEMORY_LOCATION})
    registered[handle.id] = _Attached(
        fn, real, owner, held, attach, Hook(on_examples if is_of_gradient else None, location_of_user())
    )
    return None if fn is _RETAIN else handle


class FunctionRecipe(Recipe):
    """How to make a hook, or another function for torch to call: those that the program defines have variables of their own in each call.

    Args:
        shares: whether a container of the program's may be another one to the hook.
    """

    def __init__(self, *, shares: bool):
        super().__init__(side_effects.known_before(), is_strict=False)
        self._shares = shares

    def of(self, value: Any) -> Step:
        if id(value) in self.known or id(value) in self._steps:
            return super().of(value)
        if isinstance(value, types.FunctionType) and value.__closure__ is not None:
            return self.function(value)
        if isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, _CONTAINERS):  # seen.append
            owner = self.of(value.__self__)
            return lambda call: getattr(owner(call), value.__name__)
        if isinstance(value, _CONTAINERS) and not self._shares:
            raise NotMakeableError(value)
        return super().of(value)


_CONTAINERS = (dict, list, set, collections.deque)


def _made(fn: Callable, hooks: tuple[Any, ...], *, shares: bool) -> tuple[dict[str, Proxy], Step]:
    """The proxies that hooks hold, and what makes these hooks of the values of those."""
    recipe = FunctionRecipe(shares=shares)
    try:
        step = recipe.of(hooks)
    except NotMakeableError as e:
        kind = type(e.value).__qualname__
        raise _refusal(fn, f"with a function that holds a {kind} of the program's", "let it hold what is there before") from None
    return recipe.arguments, step


def write(acquisition: Acquisition, epilogue: TraceCtx) -> None:
    """Have the epilogue give inputs the hooks that the program has not taken off again.

    Raises:
        UnsupportedOpError: the program has written into one, so that it stands for two tensors of torch's graph.
    """
    for fn, given, owner, held, attach, hook in acquisition.hooks_of_inputs.values():
        if not given.is_leaf and _is_written(acquisition, given):
            what, instead = "of an input that the program writes into", "give the hook before the call, or write into a clone"
            raise UnsupportedOpError(with_details(f"{fn.__name__} {what}", at=hook.at, instead=instead))
        with tracectx(epilogue):
            epilogue.bound_symbols.append(_attaching(owner, held, attach))


def _is_written(acquisition: Acquisition, real: torch.Tensor) -> bool:
    same = [p.fake for p in acquisition.wrappers.proxies() if acquisition.fakes.real_input(p) is real]
    same += [fake for fake, p in acquisition.fakes.plain_inputs() if acquisition.fakes.real_input(p) is real]
    with torch._C.DisableTorchFunctionSubclass():
        return any(fake._version > 0 for fake in same)


def _attaching(owner: Proxy, held: dict[str, Proxy], attach: Callable[[torch.Tensor, dict[str, Any]], None]) -> Any:
    def run(given: torch.Tensor, *values: Any) -> None:
        attach(given, dict(zip(held, values, strict=True)))

    return bindable("attach_hook", run)(owner, *held.values(), output=None)


# -- what the program computes ------------------------------------------------------------------------------------------------


def _on_computed(acquisition: Acquisition, fn: Callable, proxy: TensorProxy, *hooks: Any) -> Handle | None:
    if not acquisition.autograd.requires_grad(proxy) or fn not in (torch.Tensor.register_hook, _RETAIN):
        with torch.enable_grad():
            fn(torch.empty((), requires_grad=acquisition.autograd.requires_grad(proxy)) * 1, *hooks)  # an error of torch's
    if not acquisition.autograd.is_running:
        acquisition.autograd.starts_late = True  # the program is acquired again, but for a transformed one
        raise _transformed(fn)
    fake = acquisition.fake_of(proxy)
    if fn is _RETAIN:
        acquisition.retained.append((fake, location_of_user()))
        return None
    held, make = _made(fn, hooks, shares=True)
    side_effects.note_read(*hooks)
    (hook,) = make(Call({name: acquisition.to_fake(p) for name, p in held.items()}))
    run = watching(hook, location_of_user())
    with torch._C.DisableTorchFunctionSubclass():
        attached = fn(fake, run)
        node = torch.autograd.graph.get_gradient_edge(fake).node
    if held:
        acquisition.tape.tear()
    else:
        acquisition.tape.note(fn, (fake, hook), {}, None, is_grad_enabled())

    def on_examples() -> Any:
        return watching(*make(_call_with_examples(acquisition, held)), location_of_user())(example(fake, 0.0))

    return _on_fakes(acquisition, attached, HookOfBackward(on_examples, location_of_user(), node))


def _call_with_examples(acquisition: Acquisition, held: dict[str, Proxy]) -> Call:
    return Call({name: example(acquisition.to_fake(p), 0.5) for name, p in held.items()})


def _on_fakes(acquisition: Acquisition, attached: RemovableHandle, hook: HookOfBackward) -> Handle:
    acquisition.hooks_of_backward.append(hook)

    def take_off() -> None:
        acquisition.tape.tear()
        acquisition.hooks_of_backward.remove(hook)
        attached.remove()

    return Handle(acquisition.hooks_of_inputs, take_off)
