"""Operations on plain tensors beside wrappers: Thunder's own wherever it has them, recorded from torch where it has not.

Thunder lacks some (``x % 2``, ``linear`` with a weight of one dimension).  What C code does with tensors (``sum([x, y])``) never comes to
its interpreter.
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring import aliasing, values
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.arguments import is_in_place
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.backward.given_attributes import attribute_of_input
from thunder_norm.subclass.interpreting import agreement, plain
from thunder_norm.subclass.interpreting.operations import UNKNOWN_FACTORIES, operation_of, torch_callable
from thunder_norm.subclass.recording.einsum_strides import is_made_of_einsum
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.provenances import wrapped_result
from thunder_norm.tracing.shared_memory import aliases, replaced_memory, second_names, views_in_place
from thunder_norm.tracing.translation import for_torch
import thunder.torch as ltorch
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    wrap_const,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx

_VIEWS = (torch.Tensor.view, torch.Tensor.view_as)  # which some tensors of a shape have, and others not, as their strides are
_BY_PLACE = (torch.as_strided, torch.Tensor.as_strided)
_TORCHS = (
    torch.Tensor.unfold, torch.Tensor.exponential_, torch.nn.functional.gumbel_softmax, torch.rand_like, torch.randn_like,
    torch.bernoulli, torch.Tensor.bernoulli,
    *((torch.ops._c10d_functional.wait_tensor,) if torch.distributed.is_available() else ()),
)  # fmt: skip


def with_fallback(
    acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue], found: Any
) -> Any:
    """What Thunder calls for `fn`; torch's function runs and is recorded instead where Thunder knows none, raises, or returns something else.

    It does too where Thunder would decide by a number of tensors (``alpha``), which torch is told.  So do ``unfold``, as what stands for
    it elsewhere is no view, what draws other numbers in Thunder, or whatever the probabilities, and what waits for a collective, which
    Thunder leaves out.  What torch raises is raised.
    """
    if fn is getattr:
        return with_attributes(acquisition, found, args)
    torch_fn = torch_callable(fn)
    if torch_fn is None:
        return found
    if acquisition.num_levels and is_in_place(torch_fn) and (found is None or torch_fn in _TORCHS):
        return found  # a function under a transform is written anew without writes, which recorded ones are not
    if is_unknown(fn, (*args, *kwargs.values()), found) or torch_fn in _TORCHS:
        return functools.partial(_recorded, acquisition, torch_fn)
    if found is None or not callable(found):
        return found
    if torch_fn.__name__ in replaced_memory.NAMES:
        return with_new_memory(acquisition, found)
    if torch_fn.__name__ in views_in_place.NAMES:
        acquisition.fakes.strides.pop(args[0].value.name if args and isinstance(args[0].value, TensorProxy) else "", None)
        return found

    def call(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
        trace = get_jit_ctx().computation_trace
        scopes, lengths = list(trace.scopes), [len(s) for s in trace.scopes]
        wanted, same = agreement.of_torch(acquisition, torch_fn, args, kwargs)
        if isinstance(wanted, Exception):
            return do_raise(wanted)
        if torch_fn in _VIEWS and isinstance(wanted, torch.Tensor):
            _guard_view(acquisition, args[0], wanted)
            if is_made_of_einsum(args[0].value) and wanted.dtype is for_torch(args[0].value.dtype):
                return _interpret_call(_reshape, args[0], wrap_const(tuple(wanted.shape)))
        if torch_fn in _BY_PLACE:
            of = _laid_out(acquisition, args[0])
            if of is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
                return of
            args = (of, *args[1:])
        result = found(*args, **kwargs)
        is_raised = result is INTERPRETER_SIGNALS.EXCEPTION_RAISED
        decides = not is_raised and any(values.decides(b) for s, n in zip(scopes, lengths, strict=True) for b in s[n:])
        if not is_raised and not decides and is_in_place(torch_fn):
            return _written(acquisition, torch_fn, args[0], result)
        if not is_raised and not decides and agreement.agrees(result, wanted):
            agreement.note_strides(acquisition, result, wanted, (args, kwargs))
            return _handed_back(acquisition, torch_fn, args, kwargs, same, result)
        trace.scopes[:] = scopes  # a symbol whose meta function raises leaves its own scope behind
        for scope, length in zip(scopes, lengths, strict=True):
            del scope[length:]
        if agreement.is_constant(wanted):
            get_interpreterruntimectx().curexc = None
            return wrapped_result(wanted, [a.provenance for a in args])
        number = agreement.of_numbers(torch_fn, args, kwargs) if not is_raised else None
        if number is not None:
            return _interpret_call(_tensor, wrap_const(number.item()), wrap_const(number.dtype))
        return _recorded(acquisition, torch_fn, *args, **kwargs)

    return call


def _written(acquisition: Acquisition, torch_fn: Callable, target: WrappedValue, result: Any) -> Any:
    """What an operation in place returns: what it writes into.

    ``y[1:] *= x`` writes that into y again; under another name nothing reads the view after the write, which not all can follow.
    """
    if not isinstance(result.value, TensorProxy):
        return result
    if not torch_fn.__name__.startswith("__i") and not aliases.is_view(target.value):
        return target
    acquisition.fakes.keeps_strides(target.value, result.value)
    second_names.note(result.value, target.value)
    return result


def _handed_back(
    acquisition: Acquisition,
    torch_fn: Callable,
    args: tuple[WrappedValue, ...],
    kwargs: dict[str, WrappedValue],
    same: WrappedValue | None,
    result: Any,
) -> Any:
    """What an operation returns: its argument where it hands that back, unless it does as long as it lies as it does.

    Tensors without data do not show which put off a conjugation or a sign, and inputs that are not strided have strided ones for theirs.
    """
    if torch_fn is not torch.Tensor.contiguous and "memory_format" not in kwargs:
        if same is None or torch_fn.__name__ in _RESOLVING:
            return result
        real = acquisition.fakes.real_input(same.value)
        return result if real is not None and real.layout is not torch.strided else same
    if not isinstance(result.value, TensorProxy):
        return result
    of = args[0].value if args else None
    if not is_grad_enabled() and isinstance(of, TensorProxy) and acquisition.autograd.requires_grad(of):
        acquisition.fakes.guard_layouts()  # what is handed back keeps its history there, and another tensor has none
        return result if same is None else same
    second_names.note(result.value, None if same is None else same.value, acquisition.fakes.guard_layouts)
    return result


_RESOLVING = ("resolve_conj", "resolve_neg", "to_dense")


def is_unknown(fn: Callable, given: Iterable[WrappedValue], found: Any) -> bool:
    """Whether `fn` takes or makes plain tensors, and Thunder found nothing to call for it: its own complaint is of those given by position alone."""
    if found is None:
        return isinstance(fn, _OPAQUE) and (fn in UNKNOWN_FACTORIES or any(isinstance(v.value, TensorProxy) for v in given))
    return found is INTERPRETER_SIGNALS.EXCEPTION_RAISED


def _laid_out(acquisition: Acquisition, of: WrappedValue) -> Any:
    """A tensor whose elements the program takes by where they lie: what Thunder computes is laid out as in eager mode."""
    fakes = acquisition.fakes
    fakes.guard_layouts()
    if not isinstance(of.value, TensorProxy) or of.value.history is not None:
        return of
    agreement.stride_of(acquisition, of.value)
    known = fakes.laid_out(of.value)
    if known is None:
        return do_raise(plain.unplaced("as_strided"))
    if aliasing.is_dense(known):
        return _interpret_call(_in_order, of, wrap_const(aliasing.order(known)))
    has_diagonal = any(b.sym is ltorch.diagonal for b in get_jit_ctx().computation_trace.bound_symbols)
    if has_diagonal and agreement.has_history(acquisition, of.value):
        return do_raise(
            plain.unplaced("as_strided", "a diagonal that is differentiated is a copy in Thunder, without what lies between")
        )
    return of


def _in_order(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    if dims == tuple(range(x.ndim)):
        return x.contiguous()
    return x.permute(dims).contiguous().permute(sorted(range(x.ndim), key=dims.index))


def _guard_view(acquisition: Acquisition, of: WrappedValue, view: torch.Tensor) -> None:
    """Let the trace serve calls whose input has such a view: of another layout torch says that it has none, and Thunder copies."""
    if acquisition.fakes.real_input(of.value) is None or of.value.history is None or view.dtype is not for_torch(of.value.dtype):
        return
    shape = tuple(view.shape)

    def check(t: torch.Tensor) -> None:
        try:
            t.view(shape)
        except RuntimeError as e:
            raise GuardError(str(e)) from e

    bind = bindable("check_view", check)
    get_jit_ctx().add_constraint((lambda p: get_tracectx().bound_symbols.append(bind(p, output=None)), of.value))


def _reshape(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.reshape(x, shape)


def with_new_memory(acquisition: Acquisition, put: Callable) -> Callable:
    """What is called for ``x.data = value`` and ``x.set_(value)``: `put`, and x has the strides of the value then."""

    def call(obj: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        fakes, tensor = acquisition.fakes, obj.value
        value = next((a.value for a in (*args, *kwargs.values()) if isinstance(a.value, TensorProxy)), None)
        if isinstance(tensor, TensorProxy) and value is not None and acquisition.lets_stand_for(tensor, value):
            return wrap_const(None)
        known = fakes.known(tensor) if isinstance(tensor, TensorProxy) else None
        if known is not None and id(known) in fakes.inner:
            return do_raise(_without_memory("what is inside of a wrapper that is given", "the wrapper of the call would keep it"))
        if known is not None and (value is None or tuple(value.shape) != tuple(known.shape)):
            return do_raise(_without_memory("a tensor of another shape", "wrappers beside it know it with the shape it had"))
        stride = None if value is None else fakes.stride_of(value)
        result = put(obj, *args, **kwargs)
        if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED and isinstance(tensor, TensorProxy):
            fakes.strides.pop(tensor.name, None)
            fakes.strides |= {} if stride is None else {tensor.name: stride}
        return result

    return call


def _without_memory(what: str, why: str) -> UnsupportedOpError:
    details = with_details(
        f".data or set_() of {what}", at=location_of_user(), why=why, instead="write into it: tensor.copy_(value)"
    )
    return UnsupportedOpError(details)


def _tensor(number: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(number, dtype=dtype)


def keeping_history(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call for an operation that writes, under `torch.no_grad`, into a result that requires grad.

    In torch that keeps its history, with the gradients that it has; Thunder forgets it.
    """
    if is_grad_enabled() or not torch.is_grad_enabled() or not args or type(args[0].value) is not TensorProxy:
        return None
    proxy, torch_fn = args[0].value, torch_callable(fn)
    if torch_fn is None or not is_in_place(torch_fn) or proxy.history is not None or not acquisition.may_replace():
        return None
    return operation_of(acquisition, torch_fn) if acquisition.autograd.requires_grad(proxy) else None


_OPAQUE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def with_attributes(acquisition: Acquisition, found: Any, args: tuple[WrappedValue, ...]) -> Any:
    """What Thunder calls for ``getattr(x, name)``; where x is a plain tensor without such an attribute in Thunder, what torch has."""
    is_of_plain = bool(args) and type(args[0].value) is TensorProxy and callable(found)
    return functools.partial(_read_attribute, acquisition, found) if is_of_plain else found


def _read_attribute(acquisition: Acquisition, found: Callable, obj: WrappedValue, name: WrappedValue, *default: Any) -> Any:
    """The attribute of a tensor: as Thunder has it, one that the user has set on an input (``nn.Buffer``'s too), torch's method."""
    result = found(obj, name, *default)
    is_unknown = result is INTERPRETER_SIGNALS.EXCEPTION_RAISED or (bool(default) and result is default[0])
    if not is_unknown or not isinstance(get_interpreterruntimectx().curexc, AttributeError | None):
        return result
    real = acquisition.fakes.real_input(obj.value)
    if real is not None and name.value in vars(real) and isinstance(vars(real)[name.value], bool | int | float | str | None):
        get_interpreterruntimectx().curexc = None
        return attribute_of_input(real, obj, name.value)
    if not hasattr(torch.Tensor, name.value):
        return result
    get_interpreterruntimectx().curexc = None
    method = getattr(torch.Tensor, name.value)
    if not callable(method):
        node = _node_of(acquisition, obj.value, real) if name.value == "grad_fn" else _UNKNOWN
        if node is not _UNKNOWN:
            if real is not None and real.requires_grad:
                attribute_of_input(real, obj, "is_leaf")  # in other calls too
            return wrapped_result(node, [obj.provenance, name.provenance])
        return do_raise(
            UnsupportedOpError(
                with_details(f".{name.value} of a plain tensor", at=location_of_user(), **_INSTEAD.get(name.value, {}))
            )
        )
    return wrapped_result(types.MethodType(method, obj.value), [obj.provenance, name.provenance])


_UNKNOWN = object()
_INSTEAD = {
    "grad_fn": {
        "why": "torch's autograd gets its graph when the trace runs",
        "instead": "a hook of a tensor (x.register_hook), where a module has one for its backward (register_full_backward_hook)",
    }
}


def _node_of(acquisition: Acquisition, proxy: TensorProxy, real: torch.Tensor | None) -> Any:
    """The node of torch's graph that has made a tensor, None if none has, `_UNKNOWN` where that cannot be said.

    Of what is computed, torch's autograd knows it where it follows the program on fakes, as it does from the second acquisition on.
    """
    if real is not None:
        is_as_given = real.is_leaf and acquisition.autograd.requires_grad(proxy) == real.requires_grad  # and not written into
        return None if is_as_given else _UNKNOWN
    if acquisition.num_levels or acquisition.is_transformed or len(get_jit_ctx().computation_trace.scopes) > 1:
        return _UNKNOWN
    if not acquisition.autograd.requires_grad(proxy):
        return None
    if not acquisition.autograd.is_running:
        acquisition.autograd.starts_late = True
        return _UNKNOWN
    with torch._C.DisableTorchFunctionSubclass():
        return acquisition.fake_of(proxy).grad_fn


def _recorded(acquisition: Acquisition, torch_fn: Callable, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    get_interpreterruntimectx().curexc = None  # what Thunder said; torch's function says what is wrong, if anything is
    return operation_of(acquisition, torch_fn)(*args, **kwargs)


# -- what C code does -------------------------------------------------------------------------------------------------


def written_out(fn: Callable) -> Callable | None:
    """A Python function that does what a builtin does with tensors, and is interpreted."""
    try:
        own = _WRITTEN_OUT.get(fn)
    except TypeError:  # not hashable
        return None
    return None if own is None else functools.partial(_interpret_call, own)


def of_operator(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """The same for a function of ``operator`` that is given a tensor: natively it would ask what stands for that, which knows less than torch."""
    if not isinstance(fn, types.BuiltinFunctionType) or fn.__module__ != "_operator":
        return None
    return written_out(fn) if any(type(a.value) is TensorProxy for a in args) else None


def _sum(values: Iterable[Any], /, start: Any = 0) -> Any:
    for value in values:
        start = start + value
    return start


def _prod(values: Iterable[Any], /, *, start: Any = 1) -> Any:
    for value in values:
        start = start * value
    return start


_MISSING = object()


def _reduce(function: Callable, values: Iterable[Any], initial: Any = _MISSING, /) -> Any:
    remaining = iter(values)
    if initial is _MISSING:
        initial = next(remaining)
    for value in remaining:
        initial = function(initial, value)
    return initial


_WRITTEN_OUT: dict[Any, Callable] = {
    sum: _sum,
    math.prod: _prod,
    functools.reduce: _reduce,
    operator.add: lambda a, b: a + b,
    operator.sub: lambda a, b: a - b,
    operator.mul: lambda a, b: a * b,
    operator.truediv: lambda a, b: a / b,
    operator.floordiv: lambda a, b: a // b,
    operator.mod: lambda a, b: a % b,
    operator.pow: lambda a, b: a**b,
    operator.matmul: lambda a, b: a @ b,
    operator.and_: lambda a, b: a & b,
    operator.or_: lambda a, b: a | b,
    operator.xor: lambda a, b: a ^ b,
    operator.lshift: lambda a, b: a << b,
    operator.rshift: lambda a, b: a >> b,
    operator.eq: lambda a, b: a == b,
    operator.ne: lambda a, b: a != b,
    operator.lt: lambda a, b: a < b,
    operator.le: lambda a, b: a <= b,
    operator.gt: lambda a, b: a > b,
    operator.ge: lambda a, b: a >= b,
    operator.pos: lambda a: +a,
    operator.invert: lambda a: ~a,
    operator.neg: lambda a: -a,
    operator.abs: lambda a: abs(a),
    operator.getitem: lambda a, b: a[b],
}
