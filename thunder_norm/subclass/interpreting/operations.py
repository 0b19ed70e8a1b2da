"""Operations that a wrapper takes part in: which functions are some, and what running one writes into the trace."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves, tree_map

from thunder_norm.errors import UnsupportedOpError, UnsupportedSubclassError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.arguments import value_of
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.acquiring.data_sizes import UnknownValueError
from thunder_norm.subclass.acquiring.effects import SameValues
from thunder_norm.subclass.acquiring.fallback import is_kept
from thunder_norm.subclass.backward import flags, users_attributes
from thunder_norm.subclass.classes import jagged_operations
from thunder_norm.subclass.classes.protocol import is_of_wrappers
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.interpreting import executors
from thunder_norm.subclass.recording import lists, trace
from thunder_norm.subclass.recording.record import Recorded, in_autocast_region, recording
from thunder_norm.tracing.containers import take_proxies
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.shared_memory import second_names
from thunder_norm.tracing.torch_functions import known_classes
from thunder_norm.tracing.torch_functions.data_dependence import READS_DATA, data_dependent_on_wrapper
from thunder_norm.wrapper_classes import is_wrapper, overrides_torch_function
import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.interpreter import (
    WrappedValue,
    get_interpreterruntimectx,
    interpreter_needs_wrap,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.utils import is_hashable
from thunder.torch import _torch_to_thunder_function_map

# TensorProxy's methods are Thunder functions; torch's method of the same name is what runs on fakes.
_PROXY_METHODS = {
    id(f): name
    for cls in (TensorProxy, SubclassProxy)
    for name in dir(cls)
    if isinstance(f := getattr(cls, name), types.FunctionType)
}

# The interpreter takes bound methods apart: the class is the first argument.
AUTOGRAD_APPLY = torch.autograd.Function.apply.__func__


def torch_callable(fn: Callable) -> Callable | None:
    """The torch function the interpreter is about to call, or None if `fn` is Python it should look into."""
    if id(fn) in _OF_PYTHON:  # most calls
        return None
    if fn is abs:
        return torch.Tensor.abs
    name = _PROXY_METHODS.get(id(fn))
    if name is not None:
        return getattr(torch.Tensor, name, None)
    if type(fn) is types.FunctionType:
        return fn if _is_operation(fn) else None
    if is_of_wrappers(fn):
        return fn
    if isinstance(fn, Symbol):
        return _torch_of_symbol().get(fn.id)
    if isinstance(fn, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return fn
    if not is_hashable(fn) or not issubclass(torch.Tensor, getattr(fn, "__objclass__", torch.Tensor)):
        return None  # tuple.__getitem__, for instance
    if _is_operation(fn):
        return fn
    if not isinstance(fn, types.BuiltinFunctionType):
        return None
    is_private = fn.__name__ in vars(torch._C._VariableFunctionsClass)
    if is_private and getattr(torch._C._VariableFunctions, fn.__name__) == fn:
        return fn
    return fn if getattr(torch._C._nn, fn.__name__, None) is fn else None  # F.leaky_relu_


# Python's own that ask about objects; by what they are, because what is called may be an object that is not hashable.
_OF_PYTHON = frozenset(map(id, (getattr, hasattr, setattr, isinstance, type, len, bool)))


def _is_operation(fn: Callable) -> bool:
    return fn in _torchs() or fn in _torch_to_thunder_function_map or fn in RUN_WHOLE


# Methods of wrapper classes that are one operation of the program: what an autograd function inside takes from their surroundings is
# then what torch's autograd sees.
RUN_WHOLE: set[Callable] = set()


@functools.cache
def _torchs() -> frozenset:
    """What torch computes tensors with."""
    return _overridable() | _factories() | _on_lists()


@functools.cache
def operations() -> frozenset:
    """The functions a program without wrappers may meet its first one in."""
    own = {f for cls in (TensorProxy, SubclassProxy) for name in dir(cls) if id(f := getattr(cls, name)) in _PROXY_METHODS}
    makers = {torch.Tensor._make_wrapper_subclass, torch.Tensor._make_subclass, torch.utils.checkpoint.checkpoint, AUTOGRAD_APPLY}
    return frozenset(own | makers | _torchs() | {f for f in _torch_to_thunder_function_map if is_hashable(f)})


@functools.cache
def _overridable() -> frozenset:
    """Every function and method torch lets a tensor subclass override."""
    found = {f for functions in torch.overrides.get_overridable_functions().values() for f in functions}
    found |= {getattr(torch.Tensor, name) for name in dir(torch.Tensor) if callable(getattr(torch.Tensor, name, None))}
    object_level = {getattr(object, name) for name in dir(object)}
    hashable = {f for f in found if getattr(f, "__hash__", None) is not None}
    return frozenset(hashable - object_level - {torch.Tensor.__new__, torch.Tensor.__init__, torch.Tensor.__class__})


# Those of these functions that Thunder has nothing for.
UNKNOWN_FACTORIES = frozenset({torch.fft.fftfreq, torch.fft.rfftfreq})


@functools.cache
def _factories() -> frozenset:
    """torch's functions that make a tensor from none; it does not count them as overridable, nor those that set its state."""
    ignored = torch.overrides.get_ignored_functions()
    named = (f for f in ignored if getattr(torch, getattr(f, "__name__", ""), None) is f)
    return UNKNOWN_FACTORIES | {f for f in named if f.__module__ != "torch.random" and not f.__name__.startswith("set_")}


@functools.cache
def _on_lists() -> frozenset:
    """torch's functions that do one thing to each tensor of a list; it does not count them as overridable."""
    return frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_"))


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


def operation_of(acquisition: Acquisition, fn: Callable) -> Callable:
    """The interpreter's lookaside that runs `fn` on fakes and writes one composite bound symbol."""
    return on_proxies(lambda *args, **kwargs: call(acquisition, fn, args, kwargs))


def operation_with_history(acquisition: Acquisition, fn: Callable, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for a function that makes wrappers of plain tensors, which torch's autograd follows if these require grad."""
    take_proxies(*args, **kwargs)
    if acquisition.is_followed(tree_leaves(([value_of(a) for a in args], [value_of(v) for v in kwargs.values()]))):
        acquisition.differentiate()
    return operation_of(acquisition, fn)(*args, **kwargs)


def on_proxies(function: Callable) -> Callable:
    """The interpreter's lookaside that runs `function`, as it is, on the values of its arguments, with proxies for tensors."""
    wrapped_call = interpreter_needs_wrap(function)

    def with_proxies(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
        take_proxies(*args, **kwargs)
        return wrapped_call(*args, **kwargs)

    return with_proxies


def operation_on_first(acquisition: Acquisition, fn: Callable) -> Callable:
    """The same for an attribute: ``getattr(x, name)`` is ``fn(x)``."""
    return lambda obj, name, *default: operation_of(acquisition, fn)(obj)


def call(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> Any:
    """Run `fn` for real on fakes, write what happened into the trace, and return proxies for its results.

    Raises:
        whatever `fn` or the class's ``__torch_dispatch__`` raises, and UnsupportedOpError where it cannot be written down.
    """
    runtime = get_interpreterruntimectx()
    get_jit_ctx().computation_trace.set_current_source_location(*runtime.get_current_user_source_location())
    try:
        result = _call(acquisition, fn, args, kwargs)
        return _handed_back(acquisition, fn, result, (*args, *kwargs.values()))
    except (DynamicOutputShapeException, DataDependentOutputException) as e:
        known = _with_integers_known(acquisition, (args, kwargs))
        if known is not None:
            return call(acquisition, fn, *known)
        raise acquisition.refuse(data_dependent_on_wrapper(f"what {e.func} returns depends on the values of a tensor")) from e
    except (UnsupportedOpError, UnsupportedSubclassError) as e:
        raise acquisition.refuse(e)  # noqa: B904 - the same exception
    except RuntimeError as e:
        if not any(text in str(e) for text in READS_DATA):
            raise
        raise acquisition.refuse(data_dependent_on_wrapper(f"{getattr(fn, '__name__', fn)} reads values of a tensor")) from e


def _handed_back(acquisition: Acquisition, fn: Callable, result: Any, given: tuple) -> Any:
    """What an operation returns: its argument where it hands that back, as which what is written into it is known by then.

    ``y[1:] *= x`` writes that into y again; under another name nothing reads the view after the write.
    """
    if type(result) is not TensorProxy or (made := acquisition.fakes.known(result)) is None:
        return result
    same = next((p for p in given if type(p) is TensorProxy and p is not result and acquisition.fakes.known(p) is made), None)
    if same is None:
        return result
    if not fn.__name__.startswith("__i"):
        return same
    second_names.note(result, same)
    return result


def _with_integers_known(acquisition: Acquisition, arguments: tuple[tuple, dict]) -> tuple[tuple, dict] | None:
    """Arguments with numbers for plain integer tensors without dimensions, sizes for instance; None if there are none, or not known."""
    found: list[Any] = []

    def known(v: Any) -> Any:
        if type(v) is not TensorProxy or v.ndim or not dtypes.is_exact_dtype(v.dtype):
            return v
        found.append(v)
        return acquisition.ask(torch.Tensor.item, [acquisition.fake_of(v)])

    try:
        filled = tree_map(known, arguments)
    except UnknownValueError:
        return None
    return filled if found else None


def _call(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> Any:
    if fn is torch.Tensor.__iter__:
        return iter(_call(acquisition, torch.Tensor.unbind, args, kwargs))
    if flags.is_set(acquisition, fn, args, kwargs):
        return args[0]
    beside = users_attributes.give_tensors(acquisition, (args, kwargs)) if acquisition.wrappers.beside else []
    if not isinstance(fn, type) and acquisition.meets_gradient((*args, beside), kwargs):
        acquisition.follow_held([v for v in tree_leaves((args, kwargs)) if isinstance(v, SubclassProxy)])
        acquisition.differentiate()
    acquisition.note_writing(fn, args)
    plainly = acquisition.plain_call(fn, args, kwargs)
    if plainly is not None:
        return plainly()
    fake_args, fake_kwargs = acquisition.to_fake(args), acquisition.to_fake(kwargs)
    noted = given = (fake_args, fake_kwargs)
    if isinstance(fn, type):  # the object may keep a list or dict of the program's
        fake_args, fake_kwargs = given = tuple(map(users_attributes.with_own_data, (args, kwargs), noted))
    run = lists.instead_of(jagged_operations.instead_of(fn, fake_args, fake_kwargs), fake_args)
    before = trace.leaves_of_wrappers(acquisition, (given, acquisition.changing_with(given)))
    rule = None
    if acquisition.autograd.is_running and not isinstance(fn, type):
        rule = executors.grad_rule(trace.operation_id(fn, fake_args, fake_kwargs, None))
    with recording(acquisition) as recorder:
        if rule is None:
            result = acquisition.run(recorder, run, fake_args, fake_kwargs)
        else:
            result = acquisition.run(recorder, executors.run_with_rule, (rule, recorder, fn, fake_args, fake_kwargs), {})
    is_to_start = kwargs.get("requires_grad") is True and is_wrapper(result) and not isinstance(fn, type)
    if is_to_start and not acquisition.starts_history(result):
        what = f"requires_grad=True of a {type(result).__name__} made in the program"
        raise UnsupportedOpError(with_details(what, at=location_of_user(), instead="make it before the call, and give it"))
    if rule is not None or acquisition.num_levels or _in_autocast() or any(map(_is_of_one_run, recorder.log)):
        acquisition.tape.tear()
    acquisition.tape.note(fn, *noted, result, is_grad_enabled())
    acquisition.write_hoisted(recorder)
    operation = trace.operation_id(fn, fake_args, fake_kwargs, result)
    made = trace.write(acquisition, operation, recorder.log, (fake_args, fake_kwargs), result, before)
    _check_no_class_is_met((args, kwargs), made)
    # within several levels torch may differentiate a wrapper at another one, and does not ask its class
    is_own = acquisition.num_levels == 1 and not any(acquisition.wrappers.is_inside(x) for x, _ in before.values())
    if is_own and not (recorder.has_met_wrappers or isinstance(fn, type) or any(r.is_in_place for r in recorder.log)):
        acquisition.of_functions.update(p.name for p in tree_leaves(made) if type(p) is TensorProxy)
    return made


def _check_no_class_is_met(given: Any, made: Any) -> None:
    """Refuse an operation that has wrappers, and tensors of classes that do not dispatch, which a trace has as plain ones."""
    of = known_classes.asked_first([given])
    if of is None:
        return
    kinds = [type(p.fake) for p in tree_leaves((given, made)) if isinstance(p, SubclassProxy)]
    answers = not overrides_torch_function(of) and any(map(overrides_torch_function, kinds))  # torch's own leaves it to these
    if kinds and not answers:
        kind = kinds[0].__name__
        raise UnsupportedSubclassError(
            with_details(
                f"a tensor of class {of.__name__} is put into a {kind}, or meets one",
                at=location_of_user(),
                why=f"wrappers are followed with plain tensors inside, and nobody asks what {of.__name__} says of their operations",
                instead="x.as_subclass(torch.Tensor)",
            )
        )


def catch_up(acquisition: Acquisition, fakes: Sequence[torch.Tensor]) -> None:
    """Write what inputs are that the program comes upon after it has written into their memory."""
    if not acquisition.fakes.written:
        return
    with recording(acquisition) as recorder:
        for fake in fakes:
            recorder.renew_late(fake)
    if recorder.log:
        operation = trace.OperationId("plain", "written_by_now")
        trace.write(acquisition, operation, recorder.log, (), None, {})


def _in_autocast() -> bool:
    return in_autocast_region() or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def _is_of_one_run(record: Recorded) -> bool:
    """Whether an operation draws random numbers, or does more than return tensors and check them."""
    return is_kept(record.func) and not isinstance(record.func, SameValues)
