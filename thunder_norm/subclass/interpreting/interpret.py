"""What Thunder's interpreter is told when it meets a wrapper subclass: operations, attributes, types and constructors."""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.functional import one_hot
from torch.utils._pytree import tree_flatten

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.model_state.reachable import Reachable
from thunder_norm.subclass.acquiring import values
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.arguments import value_of
from thunder_norm.subclass.backward import side_effects, users_attributes
from thunder_norm.subclass.classes.protocol import WrapperSpec, is_of_wrappers, outer_metadata
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.interpreting import (
    copied,
    jagged_makers,
    opaque_lookasides,
    random_generators,
    reading,
    set_attributes,
)
from thunder_norm.subclass.interpreting.attributes import (
    ASKS_FOR_OVERRIDES,
    above,
    has_attribute,
    has_override,
    is_above,
    is_instance,
    read_above,
    read_attribute,
    read_own,
    type_of,
)
from thunder_norm.subclass.interpreting.held_tensors import held_by, refused
from thunder_norm.subclass.interpreting.operations import (
    AUTOGRAD_APPLY,
    call,
    catch_up,
    on_proxies,
    operation_of,
    operation_on_first,
    operation_with_history,
    torch_callable,
)
from thunder_norm.subclass.interpreting.plain import about_plain, asked_of_inference
from thunder_norm.subclass.interpreting.plain_operations import of_operator, written_out
from thunder_norm.subclass.interpreting.refusals import (
    FUNCTORCH_LEVELS,
    is_derivative,
    refuse_derivative,
    refuse_functorch,
    refuse_make_wrapper,
    refuse_value,
)
from thunder_norm.subclass.recording import trace
from thunder_norm.subclass.recording.record import recording
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.containers import take_proxies
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.python import copies
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent_on_wrapper
from thunder_norm.wrapper_classes import is_wrapper, is_wrapper_class, overrides_torch_function
from thunder.core.interpreter import (
    WrappedValue,
    _interpret_call,
    do_raise,
    interpreter_needs_wrap,
    unwrap,
    wrap_const,
)
from thunder.core.proxies import TensorProxy
from thunder.torch import _torch_to_thunder_function_map


def lookaside(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> Callable | None:
    """What to call instead of interpreting `fn`, if a wrapper takes part in the call; None to leave it to Thunder.

    `args` and `kwargs` are the interpreter's wrapped values.
    """
    first = args[0].value if args else None
    if fn is super and acquisition.meets_wrappers:
        found = above(*args)
        return None if found is None else lambda *_: found
    if is_above(first) and fn is getattr:
        return functools.partial(read_above, acquisition)
    if acquisition.opaque.is_run:
        found = opaque_lookasides.lookaside(acquisition, fn, args, kwargs)
        if found is not None:
            return found
    if acquisition.meets_wrappers:
        if isinstance(first, SubclassProxy):
            found = _about_wrapper(acquisition, fn, args)
            if found is not None:
                return found
        found = _beside_wrappers(acquisition, fn, args) or written_out(fn)
        if found is not None:
            return found
    else:
        found = about_plain(acquisition, fn, args) or (written_out(fn) if acquisition.intercepts_plain else of_operator(fn, args))
        if found is not None:
            return found
    if fn is setattr and isinstance(first, torch.nn.Module) and len(args) == 3 and _is_held(acquisition, *args):
        return lambda *_: wrap_const(None)
    if fn is one_hot and (body := _ONE_HOT.get(_num_classes(args, kwargs))) is not None:
        return functools.partial(_interpret_call, body)
    if fn is torch._dynamo.is_compiling and acquisition.watches:  # asked where Inductor's kernels differ from eager's
        return lambda: wrap_const(False)
    if type(fn) in _FUNCTIONS and fn in jagged_makers.MAKERS:
        return functools.partial(jagged_makers.make, acquisition, fn)
    if (drawn := random_generators.lookaside(acquisition, fn, args, kwargs)) is not None:
        return drawn
    if id(fn) in _MAKERS:
        return functools.partial(refuse_make_wrapper, acquisition, fn)
    if fn in values.TEXTS and _has_wrapper(args, kwargs):
        return functools.partial(_refuse_text, acquisition)
    if isinstance(fn, type):
        if not is_wrapper_class(fn):
            return None
        side_effects.note_read(fn, may_change=True)
        return operation_of(acquisition, fn)
    if fn is importlib.util.find_spec:  # asked to choose kernels; interpreting Python's import system takes half a minute
        return interpreter_needs_wrap(fn)
    if getattr(fn, "__module__", "") == "torch.distributed.tensor._api" and fn in _torch_to_thunder_function_map:
        # Thunder has some methods of DTensor, for proxies of its own
        return functools.partial(operation_with_history, acquisition, fn)
    if fn is AUTOGRAD_APPLY:
        return _autograd_function(acquisition, args, kwargs)
    if fn is torch.utils.checkpoint.checkpoint and (
        acquisition.autograd.is_running or acquisition.intercepts_plain or _has_wrapper(args, kwargs)
    ):
        return _without_checkpoint
    if is_derivative(fn) and fn is not torch.autograd.grad:
        return functools.partial(refuse_derivative, acquisition)
    return _operation(acquisition, fn, args, kwargs)


def _operation(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> Callable | None:
    """What to call instead of an operation of torch or of the user's; None where Thunder's own is right, or `fn` is none."""
    first = args[0].value if args else None
    if _has_wrapper(args, kwargs):
        if fn in ASKS_FOR_OVERRIDES:  # torch's modules leave their fused inference kernels where a subclass takes part
            return functools.partial(has_override, acquisition, fn)
        torch_fn = torch_callable(fn)
        return None if torch_fn is None else operation_of(acquisition, torch_fn)
    if isinstance(fn, torch._ops.OpOverload | torch._ops.OpOverloadPacket) and fn not in _torch_to_thunder_function_map:
        return operation_of(acquisition, fn)  # Thunder knows few of them, and asks for custom ones to be registered
    if is_of_wrappers(fn):
        if acquisition.intercepts_plain and acquisition.wants(fn, args, kwargs):
            return operation_of(acquisition, fn)
        return functools.partial(_interpret_call, fn.body)  # on plain tensors it is its body
    if acquisition.intercepts_plain:
        if fn is getattr and isinstance(first, TensorProxy) and args[1].value in _TRANSPOSES:
            torch_fn, args = getattr(torch.Tensor, args[1].value).__get__, args[:1]
            return operation_on_first(acquisition, torch_fn) if acquisition.wants(torch_fn, args, kwargs) else None
        torch_fn = torch_callable(fn)
        if torch_fn is not None and acquisition.wants(torch_fn, args, kwargs):
            return operation_of(acquisition, torch_fn)
    if not acquisition.refused.has_read_value and isinstance(first, TensorProxy) and torch_callable(fn) in _READS_VALUES:
        found = reading.lookaside(acquisition, fn, args, ".item()") if acquisition.watches else None
        if found is not None:
            return found
        acquisition.refused.note_value_read(
            data_dependent_on_wrapper("the value of a tensor was asked for (.item() or .tolist())")
        )
    return None


def _is_held(acquisition: Acquisition, module: WrappedValue, name: WrappedValue, value: WrappedValue) -> bool:
    """Whether a parameter is assigned to itself after a write that was recorded (``self.weight *= 2``): it has another proxy since."""
    if name.value not in module.value._parameters or type(value.value) is not TensorProxy:
        return False
    known, held = acquisition.fakes.known(value.value), _interpret_call(getattr, module, name)
    is_tensor = isinstance(held, WrappedValue) and type(held.value) is TensorProxy
    return known is not None and is_tensor and acquisition.fakes.known(held.value) is known


def _one_hot_of_all_classes(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Without a number of classes torch looks at the values, and leaves it to those of its tensors that have none to refuse negative ones."""
    num_classes = int(tensor.max()) + 1
    if num_classes < 1:
        raise RuntimeError("Class values must be non-negative.")
    return one_hot(tensor, num_classes)


def _one_hot_of_no_class(tensor: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Torch refuses all tensors, those that have no values excepted."""
    raise RuntimeError("Class values must be smaller than num_classes.")


def _num_classes(args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Any:
    """What a plain tensor's `one_hot` is given; None of others."""
    if not args or type(args[0].value) is not TensorProxy:
        return None
    given = args[1] if len(args) > 1 else kwargs.get("num_classes")
    return -1 if given is None else TensorProxy if isinstance(given.value, TensorProxy) else value_of(given)


def _one_hot_of_so_many(tensor: torch.Tensor, num_classes: torch.Tensor) -> torch.Tensor:
    return one_hot(tensor, int(num_classes))


_ONE_HOT = {-1: _one_hot_of_all_classes, 0: _one_hot_of_no_class, TensorProxy: _one_hot_of_so_many}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_MAKERS = frozenset(map(id, (torch.Tensor._make_wrapper_subclass, torch.Tensor._make_subclass)))
_TRANSPOSES = ("T", "mT", "H", "mH")
_READS_VALUES = (torch.Tensor.item, torch.Tensor.tolist)


def _about_wrapper(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What Python itself asks of a wrapper: attributes, types, truth."""
    about_inference = asked_of_inference(acquisition, fn, args)
    if about_inference is not None and not overrides_torch_function(args[0].value.class_of_wrapper):
        return about_inference
    if fn is getattr and len(args) >= 2:
        return functools.partial(read_attribute, acquisition)
    if fn is object.__getattribute__:
        return functools.partial(read_own, acquisition)
    if fn is hasattr:
        return functools.partial(has_attribute, acquisition)
    if fn in (setattr, delattr, object.__setattr__, object.__delattr__):
        return functools.partial(set_attributes.lookaside, acquisition, fn)
    if fn is isinstance:
        return is_instance
    if fn is type and len(args) == 1:
        return type_of
    if fn is copies.another:
        return functools.partial(copied.another, acquisition)
    if type(fn) is type and fn in _NUMBERS:  # C code asks the tensor for it; a callable object may have no hash
        return functools.partial(_interpret_call, _NUMBERS[fn])
    return None


_NUMBERS: dict[Any, Callable] = {
    bool: lambda x: torch.is_nonzero(x),
    float: lambda x: float(x.item()),
    int: lambda x: int(x.item()),
    complex: lambda x: complex(x.item()),
}


def _beside_wrappers(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """Where Thunder's answers about plain tensors are wrong or late, they must not decide what a program with wrappers does."""
    if fn in FUNCTORCH_LEVELS:
        return functools.partial(refuse_functorch, acquisition)
    found = about_plain(acquisition, fn, args)
    if found is not None:
        return found
    what = values.needed_for(fn, args)
    if what is not None and not values.asks_for_size(fn, args) and not _has_wrapper(args, {}):
        found = reading.lookaside(acquisition, fn, args, what)
        if found is not None:
            return found
    if fn is torch.arange and any(isinstance(a.value, TensorProxy) for a in args):
        return functools.partial(_refuse_range, acquisition)
    if not args or type(args[0].value) is not TensorProxy:
        return None
    if fn in (bool, float, int, complex) or torch_callable(fn) in _READS_VALUES:
        return reading.lookaside(acquisition, fn, args, ".item()") or functools.partial(refuse_value, acquisition, fn)
    return None


def _refuse_text(acquisition: Acquisition, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called where Python writes what a wrapper is."""
    return do_raise(
        acquisition.refuse(data_dependent_on_wrapper("the text of a wrapper was asked for (f'{x}', str(x), repr(x))"))
    )


def _refuse_range(acquisition: Acquisition, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for `torch.arange` from or to the value of a tensor."""
    return do_raise(acquisition.refuse(data_dependent_on_wrapper("torch.arange was given a tensor, whose value says the length")))


def _autograd_function(acquisition: Acquisition, args: tuple, kwargs: dict) -> Callable | None:
    """Run an autograd function on fakes if it takes a wrapper, or makes one of what it takes.

    If what it takes requires grad, its backward is torch's affair, and so is that of all that follows.
    """
    apply, given = unwrap(args[0]).apply, args[1:]
    function, arguments = apply.__self__, ([value_of(a) for a in given], {k: value_of(v) for k, v in kwargs.items()})
    values = tree_flatten(arguments)[0]
    try:
        held = held_by(function, arguments)
    except UnsupportedOpError as e:
        error = acquisition.refuse(e)
        return lambda *_, **__: do_raise(error)
    makes_wrappers = acquisition.computes_wrappers(function, values)
    holds_wrappers = held is not None and any(isinstance(p, SubclassProxy) for p in held.proxies)
    if not (makes_wrappers or holds_wrappers or _has_wrapper(given, kwargs)) and not (
        acquisition.autograd.is_running and acquisition.wants(apply, given, kwargs)
    ):
        take_proxies(*given, **kwargs)
        if held is not None or not _makes_wrappers(acquisition, apply, given, kwargs):
            return lookasides.of_others(AUTOGRAD_APPLY)
    if not makes_wrappers and acquisition.is_followed([*values, *(held.proxies if held is not None else ())]):
        acquisition.differentiate()
    if held is not None and acquisition.has_own_formulas:
        error = acquisition.refuse(refused(function, next(v for v in values if callable(v))))
        return lambda *_, **__: do_raise(error)

    side_effects.note_read(function, *[v for v in values if callable(v)], by_identity=True)

    def run(*inputs: Any, **options: Any) -> Any:
        if held is None:
            return call(acquisition, apply, inputs, options)

        def whole(held_values: list[Any], inputs: tuple, options: dict) -> Any:
            return held.apply(function, inputs, options, held_values)

        whole.__name__ = function.__name__
        return call(acquisition, whole, (list(held.proxies), inputs, options), {})

    return lambda cls, *inputs, **options: on_proxies(run)(*inputs, **options)


_CHECKPOINT_OPTIONS = frozenset("use_reentrant context_fn determinism_check debug preserve_rng_state early_stop".split())


def _without_checkpoint(function: WrappedValue, *inputs: WrappedValue, **options: WrappedValue) -> Any:
    """Called for `torch.utils.checkpoint.checkpoint`: what is recomputed is a matter of memory, not of values."""
    own = {name: v for name, v in options.items() if name not in _CHECKPOINT_OPTIONS}
    return _interpret_call(function, *inputs, **own)


def _makes_wrappers(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> bool:
    given = [value_of(a) for a in args], {k: value_of(v) for k, v in kwargs.items()}
    before, turn = Reachable((fn, given)).places, acquisition.turn
    with recording(acquisition) as recorder:
        try:
            values = acquisition.to_fake(given)
            result = fn(*values[0], **values[1])
        except Exception:  # noqa: BLE001 - if there were wrappers the real run meets it again, otherwise Thunder does
            return recorder.has_met_wrappers
        finally:
            acquisition.turn = turn  # the real run does it again
            for place in before:
                place.restore()
    return recorder.has_met_wrappers or any(is_wrapper(v) for v in tree_flatten(result)[0])


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


def proxy_for_input(acquisition: Acquisition, x: torch.Tensor, name: str | None, history: Any) -> SubclassProxy:
    """The proxy of a wrapper the jitted function was given, opened into its inner tensors in the trace.

    Raises:
        UnsupportedSubclassError: the wrapper breaks its protocol.
    """
    if outer_metadata(x)[2] and torch.is_grad_enabled():  # not Thunder's flag: x may be met in a no_grad region first
        acquisition.differentiate()
    for known in acquisition.wrappers.inputs():  # one object has one proxy: what is written into it has one history
        if acquisition.fakes.real_input(known) is x and guards.note_meeting(known.history, history, True):
            return known
    fake = acquisition.fake_wrapper(x)
    acquisition.fakes.note_input(fake, x)
    if getattr(x, "_is_param", False):
        fake._is_param = True
    users_attributes.take_over(acquisition, fake, x, history)
    proxy = acquisition.register(SubclassProxy(fake, acquisition, name=name, history=history))
    trace.open_input(acquisition, proxy, x)
    catch_up(acquisition, WrapperSpec.of(fake).leaves(fake))
    return proxy
