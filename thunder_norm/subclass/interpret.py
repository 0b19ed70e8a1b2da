"""What Thunder's interpreter is told when it meets a wrapper subclass: operations, attributes, types and constructors."""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
import torch
import torch.utils.checkpoint
from thunder.core import devices, dtypes
from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    interpreter_needs_wrap,
    make_opaque,
    unwrap,
    wrap,
    wrap_const,
)
from thunder.core.jit_ext import get_jit_ctx, recursively_proxy
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.utils import is_hashable
from thunder.torch import _torch_to_thunder_function_map
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._pytree import tree_flatten

from thunder_norm.errors import UnsupportedOpError, UnsupportedSubclassError, with_details
from thunder_norm.registry import NormedOp
from thunder_norm.subclass import executors, trace
from thunder_norm.subclass.acquisition import Acquisition, data_dependent, is_grad_enabled, location_of_user, value_of
from thunder_norm.subclass.protocol import is_wrapper, is_wrapper_class, outer_metadata
from thunder_norm.subclass.proxy import SubclassProxy
from thunder_norm.subclass.record import recording

_INTERPRETER_MODULES = ("thunder.core.interpreter", "thunder.core.jit_ext")

# TensorProxy's methods are Thunder functions; torch's method of the same name is what runs on fakes.
_PROXY_METHODS = {
    id(f): name
    for cls in (TensorProxy, SubclassProxy)
    for name in dir(cls)
    if isinstance(f := getattr(cls, name), types.FunctionType)
}


def lookaside(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> Callable | None:
    """What to call instead of interpreting `fn`, if a wrapper takes part in the call; None to leave it to Thunder.

    `args` and `kwargs` are the interpreter's wrapped values.
    """
    first = args[0].value if args else None
    if acquisition.has_wrappers or acquisition.expects_wrappers:
        if isinstance(first, SubclassProxy):
            found = _about_wrapper(acquisition, fn, args)
            if found is not None:
                return found
        found = _beside_wrappers(acquisition, fn, args)
        if found is not None:
            return found
    elif asks_for_dtype(fn, args):
        return metadata_of_plain
    if fn in _ASKS_FOR_COMPILER and acquisition.watches:  # Thunder says yes; what runs in the end are eager's kernels
        return lambda: wrap_const(False)
    if id(fn) in _MAKERS:
        return functools.partial(_refuse_make_wrapper, acquisition, fn)
    if isinstance(fn, type):
        return _operation(acquisition, fn) if is_wrapper_class(fn) else None
    if fn is importlib.util.find_spec:  # asked to choose kernels; interpreting Python's import system takes half a minute
        return interpreter_needs_wrap(fn)
    if getattr(fn, "__module__", "") == "torch.distributed.tensor._api" and fn in _torch_to_thunder_function_map:
        return _operation(acquisition, fn)  # Thunder has some methods of DTensor, for proxies of its own
    if fn is _APPLY:
        return _autograd_function(acquisition, args, kwargs)
    if fn is torch.utils.checkpoint.checkpoint and (acquisition.differentiates or _has_wrapper(args, kwargs)):
        # what is recomputed is a matter of memory, not of values
        return lambda function, *inputs, **options: _interpret_call(function, *inputs)
    if _has_wrapper(args, kwargs):
        if fn in _ASKS_FOR_OVERRIDES:  # torch's modules leave their fused inference kernels where a subclass takes part
            return functools.partial(_has_override, acquisition, fn)
        torch_fn = torch_callable(fn)
        return None if torch_fn is None else _operation(acquisition, torch_fn)
    if isinstance(fn, torch._ops.OpOverload | torch._ops.OpOverloadPacket) and fn not in _torch_to_thunder_function_map:
        return _operation(acquisition, fn)  # Thunder knows few of them, and asks for custom ones to be registered
    if isinstance(fn, NormedOp):
        if acquisition.intercepts_plain and acquisition.wants(fn, args, kwargs):
            return _operation(acquisition, fn)
        return functools.partial(_interpret_call, fn.body)  # on plain tensors it is its body
    if _is_aten(fn):  # which Thunder does not know by that name
        return _operation(acquisition, fn)
    if acquisition.intercepts_plain:
        if fn is getattr and isinstance(first, TensorProxy) and args[1].value in _TRANSPOSES:
            torch_fn, args = getattr(torch.Tensor, args[1].value).__get__, args[:1]
            return _operation_on_first(acquisition, torch_fn) if acquisition.wants(torch_fn, args, kwargs) else None
        torch_fn = torch_callable(fn)
        if torch_fn is not None and acquisition.wants(torch_fn, args, kwargs):
            return _operation(acquisition, torch_fn)
    if acquisition.value_read is None and isinstance(first, TensorProxy) and torch_callable(fn) in _READS_VALUES:
        acquisition.value_read = data_dependent("the value of a tensor was asked for (.item() or .tolist())")
    return None


_ASKS_FOR_COMPILER = (torch.compiler.is_compiling, torch._dynamo.is_compiling)
_MAKERS = frozenset(map(id, (torch.Tensor._make_wrapper_subclass, torch.Tensor._make_subclass)))
_TRANSPOSES = ("T", "mT", "H", "mH")
_READS_VALUES = (torch.Tensor.item, torch.Tensor.tolist)


def _about_wrapper(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What Python itself asks of a wrapper: attributes, types, truth."""
    if fn is getattr and len(args) >= 2:
        return functools.partial(_getattr, acquisition)
    if fn is hasattr:
        return functools.partial(_hasattr, acquisition)
    if fn in (setattr, delattr, object.__setattr__, object.__delattr__):
        return functools.partial(_refuse_setattr, acquisition)
    if fn is isinstance:
        return _isinstance
    if fn is type and len(args) == 1:
        return _type_of
    if fn in (bool, float, int, complex):
        return functools.partial(_refuse_value, acquisition, fn)
    return None


def _beside_wrappers(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """Where Thunder's answers about plain tensors are wrong or late, they must not decide what a program with wrappers does."""
    if fn in _FUNCTORCH_LEVELS:
        return functools.partial(_refuse_functorch, acquisition)
    if fn is torch.device:  # Thunder makes one of its own, which is unequal to torch's
        return interpreter_needs_wrap(torch.device)
    if not args or type(args[0].value) is not TensorProxy:
        return None
    if asks_for_dtype(fn, args, ("dtype", "device")):
        return metadata_of_plain
    if fn is getattr and len(args) >= 2 and unwrap(args[1]) in _LAYOUT and acquisition.layout_of(args[0].value) is not None:
        return functools.partial(_layout_of_plain, acquisition)
    if fn is type and len(args) == 1 and _from_user():
        return functools.partial(_type_of_plain, acquisition)
    if fn in (bool, float, int, complex) or torch_callable(fn) in _READS_VALUES:
        return functools.partial(_refuse_value, acquisition, fn)
    return None


# The interpreter takes bound methods apart: the class is the first argument.
_APPLY = torch.autograd.Function.apply.__func__


def _autograd_function(acquisition: Acquisition, args: tuple, kwargs: dict) -> Callable | None:
    """Run an autograd function on fakes if it takes a wrapper, or makes one of what it takes.

    If what it takes requires grad, its backward is torch's affair, and so is that of all that follows.
    """
    apply, given = unwrap(args[0]).apply, args[1:]
    if not _has_wrapper(given, kwargs) and not (acquisition.differentiates and acquisition.wants(apply, given, kwargs)):
        recursively_proxy(*given, **kwargs)
        if not _makes_wrappers(acquisition, apply, given, kwargs):
            return None
    values = tree_flatten(([value_of(a) for a in given], [value_of(v) for v in kwargs.values()]))[0]
    if is_grad_enabled() and any(isinstance(v, TensorProxy) and acquisition.requires_grad(v) for v in values):
        acquisition.differentiate()
    return lambda cls, *inputs, **options: _operation(acquisition, apply)(*inputs, **options)


def _makes_wrappers(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> bool:
    with recording(acquisition) as recorder:
        try:
            values = acquisition.to_fake(([value_of(a) for a in args], {k: value_of(v) for k, v in kwargs.items()}))
            result = fn(*values[0], **values[1])
        except Exception:  # noqa: BLE001 - if there were wrappers the real run meets it again, otherwise Thunder does
            return recorder.has_met_wrappers
    return recorder.has_met_wrappers or any(is_wrapper(v) for v in tree_flatten(result)[0])


def asks_for_dtype(fn: Callable, args: tuple[WrappedValue, ...], names: tuple[str, ...] = ("dtype",)) -> bool:
    """Whether the program asks a plain tensor for its dtype, or another of `names`."""
    return fn is getattr and len(args) >= 2 and type(args[0].value) is TensorProxy and unwrap(args[1]) in names and _from_user()


def _has_wrapper(args: tuple, kwargs: dict) -> bool:
    # asked at every call of the program being traced: no generators, and one look at each type
    for a in args:
        may_hold = _may_hold_wrapper(type(a.value))
        if may_hold and may_hold(a.value):
            return True
    return bool(kwargs) and _has_wrapper(tuple(kwargs.values()), {})


@functools.cache
def _may_hold_wrapper(cls: type) -> Callable[[Any], bool] | None:
    """How to see whether a value of this class is or holds a wrapper; None if it cannot."""
    if issubclass(cls, TensorProxy):
        return (lambda value: True) if issubclass(cls, SubclassProxy) else None
    if issubclass(cls, list | tuple):
        return lambda value: any(_holds_wrapper(unwrap(v)) for v in value)
    return is_wrapper if issubclass(cls, torch.Tensor) and cls is not torch.Tensor else None  # not a proxy yet


def _holds_wrapper(value: Any) -> bool:
    may_hold = _may_hold_wrapper(type(value))
    return may_hold is not None and may_hold(value)


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
    if not is_hashable(fn) or not issubclass(torch.Tensor, getattr(fn, "__objclass__", torch.Tensor)):
        return None  # tuple.__getitem__, for instance
    if fn in _overridable() or fn in _factories() or fn in _torch_to_thunder_function_map:
        return fn
    is_private = isinstance(fn, types.BuiltinFunctionType) and getattr(torch._C._VariableFunctions, fn.__name__, None) == fn
    return fn if is_private else None


def _is_aten(fn: Callable) -> bool:
    if isinstance(fn, torch._ops.OpOverloadPacket):
        return fn._qualified_op_name.startswith(("aten::", "prims::"))
    return isinstance(fn, torch._ops.OpOverload) and fn.namespace in ("aten", "prims")


@functools.cache
def operations() -> frozenset:
    """The functions a program without wrappers may meet its first one in."""
    own = {f for cls in (TensorProxy, SubclassProxy) for name in dir(cls) if id(f := getattr(cls, name)) in _PROXY_METHODS}
    makers = {torch.Tensor._make_wrapper_subclass, torch.Tensor._make_subclass, torch.utils.checkpoint.checkpoint, _APPLY}
    return frozenset(own | makers | _overridable() | _factories() | {f for f in _torch_to_thunder_function_map if is_hashable(f)})


@functools.cache
def _overridable() -> frozenset:
    """Every function and method torch lets a tensor subclass override."""
    found = {f for functions in torch.overrides.get_overridable_functions().values() for f in functions}
    found |= {getattr(torch.Tensor, name) for name in dir(torch.Tensor) if callable(getattr(torch.Tensor, name, None))}
    object_level = {getattr(object, name) for name in dir(object)}
    hashable = {f for f in found if getattr(f, "__hash__", None) is not None}
    return frozenset(hashable - object_level - {torch.Tensor.__new__, torch.Tensor.__init__, torch.Tensor.__class__})


@functools.cache
def _factories() -> frozenset:
    """torch's functions that make a tensor from none; it does not count them as overridable."""
    ignored = torch.overrides.get_ignored_functions()
    return frozenset(f for f in ignored if getattr(torch, getattr(f, "__name__", ""), None) is f)


@functools.cache
def _torch_of_symbol() -> dict[Any, Callable]:
    found = {s.id: f for f, s in reversed(list(_torch_to_thunder_function_map.items())) if isinstance(s, Symbol)}
    # some functions are mapped to a wrapper that looks for DTensors first; a symbol's id is its name in torch
    for symbol in vars(ltorch).values():
        if isinstance(symbol, Symbol) and isinstance(symbol.id, str) and symbol.id.startswith("torch."):
            function = _named(symbol.id)
            if function is not None:
                found.setdefault(symbol.id, function)
    return found


def _named(path: str) -> Callable | None:
    """The torch function of that name: as a method, if it is one, because Thunder's symbols take sizes as methods do."""
    method = getattr(torch.Tensor, path.removeprefix("torch."), None)
    if method is not None:
        return method
    found: Any = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name, None)
    return found


def _operation(acquisition: Acquisition, fn: Callable) -> Callable:
    """The interpreter's lookaside that runs `fn` on fakes and writes one composite bound symbol."""
    wrapped_call = interpreter_needs_wrap(lambda *args, **kwargs: call(acquisition, fn, args, kwargs))

    def with_proxies(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
        recursively_proxy(*args, **kwargs)
        return wrapped_call(*args, **kwargs)

    return with_proxies


def _operation_on_first(acquisition: Acquisition, fn: Callable) -> Callable:
    """The same for an attribute: ``getattr(x, name)`` is ``fn(x)``."""
    return lambda obj, name, *default: _operation(acquisition, fn)(obj)


def call(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> Any:
    """Run `fn` for real on fakes, write what happened into the trace, and return proxies for its results.

    Raises:
        whatever `fn` or the class's ``__torch_dispatch__`` raises, and UnsupportedOpError where it cannot be written down.
    """
    runtime = get_interpreterruntimectx()
    get_jit_ctx().computation_trace.set_current_source_location(*runtime.get_current_user_source_location())
    try:
        acquisition.check_cache_option()
        return _call(acquisition, fn, args, kwargs)
    except (DynamicOutputShapeException, DataDependentOutputException) as e:
        raise acquisition.refuse(data_dependent(f"what {e.func} returns depends on the values of a tensor")) from e
    except (UnsupportedOpError, UnsupportedSubclassError) as e:
        raise acquisition.refuse(e)  # noqa: B904 - the same exception


def _call(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> Any:
    if fn is torch.Tensor.__iter__:
        return iter(_call(acquisition, torch.Tensor.unbind, args, kwargs))
    if not isinstance(fn, type) and acquisition.meets_gradient(args, kwargs):
        acquisition.differentiate()
    fake_args, fake_kwargs = acquisition.to_fake(args), acquisition.to_fake(kwargs)
    before = trace.leaves_of_wrappers(acquisition, (fake_args, fake_kwargs))
    rule = None
    if acquisition.differentiates and not isinstance(fn, type):
        rule = executors.grad_rule(trace.operation_id(fn, fake_args, fake_kwargs, None))
    with recording(acquisition) as recorder:
        if rule is None:
            result = acquisition.run(recorder, fn, fake_args, fake_kwargs)
        else:
            result = acquisition.run(recorder, executors.run_with_rule, (rule, recorder, fn, fake_args, fake_kwargs), {})
    acquisition.write_hoisted(recorder)
    operation = trace.operation_id(fn, fake_args, fake_kwargs, result)
    return trace.write(acquisition, operation, recorder.log, (fake_args, fake_kwargs), result, before)


# -- attributes and types ---------------------------------------------------------------------------------------------


def _result(value: Any, inst_inputs: list) -> WrappedValue:
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
    except (UnsupportedOpError, UnsupportedSubclassError) as e:
        return do_raise(acquisition.refuse(e))
    except Exception as e:  # noqa: BLE001 - what the property raises is the program's to handle
        return do_raise(e)
    return _result(value, [obj.provenance, name.provenance])


def _hasattr(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue) -> Any:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), acquisition.mode:
        value = hasattr(obj.value.fake, unwrap(name))
    return _result(value, [obj.provenance, name.provenance])


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
            if name in _METADATA_ATTRIBUTES and not _overrides_torch_function(cls):
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


def _overrides_torch_function(cls: type) -> bool:
    own = cls.__torch_function__
    return own is not torch._C._disabled_torch_function_impl and getattr(own, "__func__", None) is not _DEFAULT_TORCH_FUNCTION


_DEFAULT_TORCH_FUNCTION = torch.Tensor.__torch_function__.__func__


def to_value(acquisition: Acquisition, value: Any) -> Any:
    """A value read from a fake wrapper, as the interpreter should see it."""
    if is_wrapper(value):
        return acquisition.subclass_proxy(value) or trace.open_inner_wrapper(acquisition, value)
    if isinstance(value, FakeTensor):
        proxy = acquisition.proxy_of(value)
        if proxy is None:
            raise UnsupportedOpError("an attribute holds a tensor that __tensor_flatten__ does not name")
        if acquisition.differentiates and acquisition.inner_fakes.get(id(value)):
            raise UnsupportedOpError(
                with_details(
                    "an inner tensor that requires grad is used beside wrappers that require grad",
                    at=location_of_user(),
                    instead="give it to the function as an argument of its own",
                )
            )
        acquisition.hold(value)
        return proxy
    return value


_ASKS_FOR_OVERRIDES = (
    torch.overrides.has_torch_function,
    torch.overrides.has_torch_function_unary,
    torch.overrides.has_torch_function_variadic,
)


def _has_override(acquisition: Acquisition, fn: Callable, *args: WrappedValue) -> Any:
    values = (tuple(unwrap(v) for v in a.value) if type(a.value) in (list, tuple) else a.value for a in args)
    return _result(fn(*(acquisition.to_fake(v) for v in values)), [a.provenance for a in args])


def _isinstance(obj: WrappedValue, cls: WrappedValue) -> Any:
    result = isinstance(obj.value.fake, unwrap(cls))
    return _result(result, [obj.provenance, cls.provenance])


def _type_of(obj: WrappedValue) -> Any:
    # the interpreter itself looks operators up on the type and must find the proxy's
    result = type(obj.value.fake) if _from_user() else type(obj.value)
    return _result(result, [obj.provenance])


def _compare(name: str, a: SubclassProxy, b: Any) -> Any:
    """A comparison: the interpreter evaluates it natively, where an exception would be taken for a crash."""
    acquisition = a.acquisition
    try:
        return call(acquisition, getattr(torch.Tensor, name), (a, b), {})
    except Exception as e:  # noqa: BLE001 - raised at the interpreter's next call
        acquisition.pending = e
        return a


def _native(name: str, proxy: SubclassProxy, *args: Any) -> Any:
    """A special method that C code (sum, max, operator.add, ...) calls on a proxy."""
    if name in _COMPARISONS and not proxy.is_live:  # after the acquisition a proxy is only ever compared for identity
        return (proxy is args[0]) == (name == "__eq__")
    if name in _CONVERSIONS:
        what = "used as a condition" if name == "__bool__" else f"turned into a Python {name.strip('_')}"
        raise proxy.acquisition.refuse(data_dependent(f"a {type(proxy.fake).__name__} was {what}"))
    if name in _COMPARISONS:
        return _compare(name, proxy, *args)
    return call(proxy.acquisition, getattr(torch.Tensor, name), (proxy, *args), {})


_COMPARISONS = frozenset("__lt__ __le__ __gt__ __ge__ __eq__ __ne__".split())
_CONVERSIONS = frozenset("__bool__ __int__ __float__ __complex__ __index__".split())

SubclassProxy.run_special_method = staticmethod(_native)


# -- beside wrappers --------------------------------------------------------------------------------------------------


def metadata_of_plain(obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    """Torch's dtype or device of a plain tensor: Thunder's own are unequal to the torch ones they stand for."""
    proxy = obj.value
    value = dtypes.to_torch_dtype(proxy.dtype) if unwrap(name) == "dtype" else devices.to_torch_device(proxy.device)
    return _result(value, [obj.provenance, name.provenance])


_LAYOUT = ("stride", "is_contiguous", "storage_offset")


def _layout_of_plain(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    # Thunder's proxies know nothing of strides; a fake made by torch does
    fake = acquisition.layout_of(obj.value)
    stride, offset = fake.stride(), fake.storage_offset()

    def answer(*args: Any, **kwargs: Any) -> Any:
        if unwrap(name) == "storage_offset":
            return offset
        if unwrap(name) == "stride":
            dim = args[0] if args else kwargs.get("dim")
            return stride if dim is None else stride[dim]
        return fake.is_contiguous(*args, **kwargs)

    return _result(make_opaque(answer), [obj.provenance, name.provenance])


def _type_of_plain(acquisition: Acquisition, obj: WrappedValue) -> Any:
    real = acquisition.real_input(obj.value)
    return _result(torch.Tensor if real is None else type(real), [obj.provenance])


# -- refusals ---------------------------------------------------------------------------------------------------------


def _refuse_value(acquisition: Acquisition, fn: Callable, obj: WrappedValue, *args: Any, **kwargs: Any) -> Any:
    cls = type(obj.value.fake).__name__ if isinstance(obj.value, SubclassProxy) else "tensor"
    if fn is bool:
        what = f"a {cls} was used as a condition"
    elif isinstance(fn, type):
        what = f"a {cls} was turned into a Python {fn.__name__}"
    else:
        what = f"the value of a {cls} was asked for (.item() or .tolist())"
    return do_raise(acquisition.refuse(data_dependent(what)))


def _refuse_setattr(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    return do_raise(
        acquisition.refuse(
            UnsupportedOpError(
                with_details(
                    f"attribute {unwrap(name)!r} of a {type(obj.value.fake).__name__} is set or deleted",
                    at=location_of_user(),
                    instead="make a new instance",
                )
            )
        )
    )


def _refuse_make_wrapper(acquisition: Acquisition, fn: Callable, *args: Any, **kwargs: Any) -> Any:
    return do_raise(
        acquisition.refuse(
            UnsupportedSubclassError(
                with_details(
                    f"torch.Tensor.{fn.__name__} is called in the jitted function",
                    at=location_of_user(),
                    why="what it makes has no inner tensors yet",
                    instead="call the class, whose constructor runs as one operation; the class must define __torch_dispatch__, "
                    "__tensor_flatten__ and __tensor_unflatten__",
                )
            )
        )
    )


def _refuse_functorch(acquisition: Acquisition, *args: Any, **kwargs: Any) -> Any:
    return do_raise(
        acquisition.refuse(
            UnsupportedOpError(
                with_details(
                    "a torch.func transform is applied inside a jitted function that meets wrapper subclasses",
                    at=location_of_user(),
                    why="torch.func needs tensors, and while a trace is acquired there are proxies",
                    instead="use the function transforms of thunder_norm.transforms",
                )
            )
        )
    )


_FUNCTORCH_LEVELS = tuple(
    getattr(torch._C._functorch, f"_{name}_increment_nesting")
    for name in ("grad", "vmap", "jvp", "func")
    if hasattr(torch._C._functorch, f"_{name}_increment_nesting")
)


# -- inputs -----------------------------------------------------------------------------------------------------------


def proxy_for_input(acquisition: Acquisition, x: torch.Tensor, name: str | None, history: Any) -> SubclassProxy:
    """The proxy of a wrapper the jitted function was given, opened into its inner tensors in the trace.

    Raises:
        UnsupportedSubclassError: the wrapper breaks its protocol.
        UnsupportedOpError: the function was jitted with an option that wrappers exclude.
    """
    acquisition.check_cache_option()
    if outer_metadata(x)[2] and torch.is_grad_enabled():  # not Thunder's flag: x may be met in a no_grad region first
        acquisition.differentiate()
    fake = acquisition.fake_wrapper(x)
    acquisition.note_input(fake, x)
    if getattr(x, "_is_param", False):
        fake._is_param = True
    proxy = acquisition.register(SubclassProxy(fake, acquisition, name=name, history=history))
    trace.open_input(acquisition, proxy, x)
    return proxy
