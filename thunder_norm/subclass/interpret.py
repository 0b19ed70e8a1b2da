"""What Thunder's interpreter is told when it meets a wrapper subclass: operations, attributes, types and constructors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import (
    PseudoInst,
    ProvenanceRecord,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    interpreter_needs_wrap,
    unwrap,
    wrap,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.utils import is_hashable
from torch._subclasses.fake_tensor import FakeTensor

from thunder_norm.dispatch import NormedOp, has_rule
from thunder_norm.errors import ThunderNormError, UnsupportedOpError, UnsupportedSubclassError, with_details
from thunder_norm.subclass import trace
from thunder_norm.subclass.acquisition import Acquisition, location_of_user
from thunder_norm.subclass.protocol import is_wrapper, is_wrapper_class
from thunder_norm.subclass.proxy import SubclassProxy
from thunder_norm.subclass.record import data_dependent, recording

_INTERPRETER_MODULES = ("thunder.core.interpreter", "thunder.core.jit_ext")

# TensorProxy's methods are Thunder functions; torch's method of the same name is what runs on fakes.
_PROXY_METHODS = {id(f): name for name in dir(TensorProxy) if isinstance(f := getattr(TensorProxy, name), types.FunctionType)}


def lookaside(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> Callable | None:
    """What to call instead of interpreting `fn`, if a wrapper takes part in the call; None to leave it to Thunder.

    `args` and `kwargs` are the interpreter's wrapped values.
    """
    if fn is getattr and len(args) >= 2 and isinstance(args[0].value, SubclassProxy):
        return functools.partial(_getattr, acquisition)
    if fn is isinstance and isinstance(args[0].value, SubclassProxy):
        return _isinstance
    if fn is type and len(args) == 1 and isinstance(args[0].value, SubclassProxy):
        return _type_of
    if fn in (bool, float, int) and args and isinstance(args[0].value, SubclassProxy):
        return functools.partial(_refuse_value, fn)
    if isinstance(fn, type):
        if not is_wrapper_class(fn):
            return None
        return _operation(acquisition, fn)
    if acquisition.has_wrappers and _has_wrapper(args, kwargs):
        if _is_autograd_function(fn):
            return _refuse_autograd_function
        torch_fn = torch_callable(fn)
        return None if torch_fn is None else _operation(acquisition, torch_fn)
    if isinstance(fn, NormedOp):
        if acquisition.intercepts_plain and acquisition.wants(fn, args, kwargs):
            return _operation(acquisition, fn)
        return functools.partial(_interpret_call, fn.body)  # on plain tensors it is its body
    if acquisition.intercepts_plain:
        torch_fn = torch_callable(fn)
        if torch_fn is not None and acquisition.wants(torch_fn, args, kwargs):
            return _operation(acquisition, torch_fn)
    return None


def _is_autograd_function(fn: Callable) -> bool:
    owner = getattr(fn, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and fn.__name__ == "apply"


def _refuse_autograd_function(*args: Any, **kwargs: Any) -> Any:
    return do_raise(
        UnsupportedOpError(
            with_details(
                "a torch.autograd.Function is applied to a wrapper subclass",
                at=location_of_user(),
                why="its backward would have to be dispatched to the class",
            )
        )
    )


def _has_wrapper(args: tuple, kwargs: dict) -> bool:
    return any(_holds_wrapper(a.value) for a in args) or any(_holds_wrapper(v.value) for v in kwargs.values())


def _holds_wrapper(value: Any) -> bool:
    if isinstance(value, SubclassProxy):
        return True
    return type(value) in (list, tuple) and any(_holds_wrapper(unwrap(v)) for v in value)


def torch_callable(fn: Callable) -> Callable | None:
    """The torch function the interpreter is about to call, or None if `fn` is Python it should look into."""
    name = _PROXY_METHODS.get(id(fn))
    if name is not None:
        return getattr(torch.Tensor, name, None)
    if isinstance(fn, NormedOp):
        return fn
    if isinstance(fn, Symbol):
        return _torch_of_symbol().get(fn.id)
    if isinstance(fn, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return fn
    if not is_hashable(fn):
        return None
    # factories take no tensor, so torch does not count them as overridable
    return fn if fn in _overridable() or has_rule(fn) else None


@functools.cache
def _overridable() -> frozenset:
    """Every function and method torch lets a tensor subclass override."""
    found = {f for functions in torch.overrides.get_overridable_functions().values() for f in functions}
    found |= {getattr(torch.Tensor, name) for name in dir(torch.Tensor) if callable(getattr(torch.Tensor, name, None))}
    object_level = {getattr(object, name) for name in dir(object)}
    hashable = {f for f in found if getattr(f, "__hash__", None) is not None}
    return frozenset(hashable - object_level - {torch.Tensor.__new__, torch.Tensor.__init__, torch.Tensor.__class__})


@functools.cache
def _torch_of_symbol() -> dict[Any, Callable]:
    from thunder.torch import _torch_to_thunder_function_map

    return {s.id: f for f, s in reversed(list(_torch_to_thunder_function_map.items())) if isinstance(s, Symbol)}


def _operation(acquisition: Acquisition, fn: Callable) -> Callable:
    """The interpreter's lookaside that runs `fn` on fakes and writes one composite bound symbol."""

    def run(*args: Any, **kwargs: Any) -> Any:
        runtime = get_interpreterruntimectx()
        get_jit_ctx().computation_trace.set_current_source_location(*runtime.get_current_user_source_location())
        return call(acquisition, fn, args, kwargs)

    wrapped_run = interpreter_needs_wrap(run)

    def with_proxies(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
        from thunder.core.jit_ext import recursively_proxy

        recursively_proxy(*args, **kwargs)
        return wrapped_run(*args, **kwargs)

    return with_proxies


def call(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> Any:
    """Run `fn` for real on fakes, write what happened into the trace, and return proxies for its results.

    Raises:
        whatever `fn` or the class's ``__torch_dispatch__`` raises, and UnsupportedOpError where it cannot be written down.
    """
    fake_args, fake_kwargs = acquisition.to_fake(args), acquisition.to_fake(kwargs)
    before = trace.leaves_of_wrappers(acquisition, (fake_args, fake_kwargs))
    with recording(acquisition) as recorder:
        result = acquisition.run(recorder, fn, fake_args, fake_kwargs)
    acquisition.write_hoisted(recorder)
    name = trace.operation_name(fn, fake_args, fake_kwargs, result)
    return trace.write(acquisition, name, recorder.log, result, before)


# -- attributes and types ---------------------------------------------------------------------------------------------


def _result(value: Any, inst_inputs: list, fn: Callable) -> WrappedValue:
    return wrap(value, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=inst_inputs))


def _from_user() -> bool:
    frame = get_interpreterruntimectx().peek_frame_stack()
    return frame is None or frame.module not in _INTERPRETER_MODULES


def _getattr(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    proxy, attribute = obj.value, unwrap(name)
    try:
        value = attribute_of(acquisition, proxy, attribute)
    except AttributeError as e:
        return default[0] if default else do_raise(e)
    except ThunderNormError as e:
        return do_raise(e)
    return _result(value, [obj.provenance, name.provenance], getattr)


def attribute_of(acquisition: Acquisition, proxy: SubclassProxy, name: str) -> Any:
    """``x.name`` for a wrapper: metadata and context as constants, inner tensors as proxies, methods bound to the proxy.

    Raises:
        AttributeError: the class has no such attribute.
        UnsupportedOpError: reading it runs something that cannot be traced.
    """
    fake = proxy.fake
    cls = type(fake)
    if name == "__class__":
        return cls
    if name == "__dict__":
        raise UnsupportedOpError(f"__dict__ of a {cls.__name__} is not available while tracing; read the attributes by name")
    if name in ("data", "grad"):
        raise UnsupportedOpError(f".{name} of a {cls.__name__} is not available while tracing")
    for base in cls.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            if isinstance(found, staticmethod):
                return found.__func__
            if isinstance(found, classmethod):
                return types.MethodType(found.__func__, cls)
            if isinstance(found, property) and base is not torch.Tensor:
                return call(acquisition, found.fget, (proxy,), {})
            if name in _METADATA_ATTRIBUTES:
                break
            if isinstance(found, types.GetSetDescriptorType | property):
                return call(acquisition, found.__get__, (proxy,), {})
            if callable(found):
                return types.MethodType(found, proxy)
            break
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), acquisition.mode:
        value = getattr(fake, name)
    return to_value(acquisition, value)


_METADATA_ATTRIBUTES = frozenset(
    "shape dtype device layout ndim requires_grad is_cuda is_cpu is_meta is_leaf names itemsize nbytes is_nested is_sparse "
    "is_quantized grad_fn retains_grad is_mkldnn is_mps is_xpu is_xla".split()
)


def to_value(acquisition: Acquisition, value: Any) -> Any:
    """A value read from a fake wrapper, as the interpreter should see it."""
    if is_wrapper(value):
        return acquisition.subclass_proxy(value) or trace.open_inner_wrapper(acquisition, value)
    if isinstance(value, FakeTensor):
        proxy = acquisition.proxy_of(value)
        if proxy is None:
            raise UnsupportedOpError("an attribute holds a tensor that __tensor_flatten__ does not name")
        return proxy
    if isinstance(value, torch.Size):
        return tuple(value)
    return value


def _isinstance(obj: WrappedValue, cls: WrappedValue) -> Any:
    result = isinstance(obj.value.fake, unwrap(cls))
    return _result(result, [obj.provenance, cls.provenance], isinstance)


def _type_of(obj: WrappedValue) -> Any:
    # the interpreter itself looks operators up on the type and must find the proxy's
    result = type(obj.value.fake) if _from_user() else type(obj.value)
    return _result(result, [obj.provenance], type)


def _refuse_value(fn: type, obj: WrappedValue, *_: Any) -> Any:
    what = "used as a condition" if fn is bool else f"turned into a Python {fn.__name__}"
    return do_raise(data_dependent(f"a {type(obj.value.fake).__name__} was {what}"))


def _compare(name: str, a: SubclassProxy, b: Any) -> Any:
    try:
        acquisition = a.acquisition
    except ReferenceError:  # after the acquisition a proxy is only ever compared for identity
        return (a is b) == (name == "__eq__")
    return call(acquisition, getattr(torch.Tensor, name), (a, b), {})


SubclassProxy.compare = staticmethod(_compare)


def proxy_for_input(acquisition: Acquisition, x: torch.Tensor, name: str | None, history: Any) -> SubclassProxy:
    """The proxy of a wrapper the jitted function was given, opened into its inner tensors in the trace.

    Raises:
        UnsupportedSubclassError: the wrapper itself requires grad.
    """
    _check_requires_grad(x)
    fake = acquisition.fake_wrapper(x)
    acquisition.note_input(fake, x)
    if getattr(x, "_is_param", False):
        fake._is_param = True
    proxy = acquisition.register(SubclassProxy(fake, acquisition, name=name, history=history))
    trace.open_input(acquisition, proxy, x)
    return proxy


def _check_requires_grad(x: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        requires_grad = x.requires_grad
    cd = get_compile_data()
    if requires_grad and (cd is None or cd.is_grad_enabled):
        raise UnsupportedSubclassError(
            with_details(
                f"a {type(x).__qualname__} that requires grad itself is an input of the jitted function",
                why="gradients are computed for inner tensors; the gradient of a wrapper needs its backward dispatched to the class",
                at=location_of_user(),
                instead="call it under torch.no_grad(), or give a wrapper that does not require grad (x.detach())",
            )
        )


