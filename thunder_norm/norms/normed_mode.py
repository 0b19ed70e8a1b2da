"""Normed mode: what happens to plain tensors while a program runs on normed ones.

In normed mode parameters are lifted when an operation consumes them, also where no other argument is normed (an embedding of
token ids).  Lifts are written into the trace before the operation that asked for them, once per parameter and kind.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from thunder_norm.core import bodies, context, dispatch, in_place, registry
from thunder_norm.core.programs import without_values
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.model_state.reachable import Reachable
from thunder_norm.model_state.shards import is_spread
from thunder_norm.norms import autograd_functions
from thunder_norm.norms.eager import chosen_norms
from thunder_norm.norms.lifts import buffer_proxies, plain_views, written_proxies
from thunder_norm.norms.lifts.lifting import Otherwise
from thunder_norm.norms.lifts.parameters import Policy, refuse_mutation
from thunder_norm.norms.lifts.plain_operations import LiftingEnvironment, run_plainly
from thunder_norm.norms.lifts.recorder import NormRecorder
from thunder_norm.norms.lifts.traced_lifting import TracedLifting
from thunder_norm.norms.lifts.written_parameters import refused
from thunder_norm.rules.known_ranges import windows
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.arguments import value_of
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.classes.protocol import WrapperSpec
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.interpreting import operations
from thunder_norm.subclass.recording import trace
from thunder_norm.subclass.recording.record import Recorder, in_autocast_region
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.guarding.bindable import guard
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.torch_functions import known_values
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core.interpreter import WrappedValue
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.torch import _torch_to_thunder_function_map

_is_normed_call: contextvars.ContextVar[bool] = contextvars.ContextVar("thunder_norm_is_normed_call", default=False)


def normed_call() -> contextlib.AbstractContextManager[None]:
    """Jitted functions called inside the block run in normed mode, whatever their inputs."""
    return context.setting(_is_normed_call, True)


def is_normed_call() -> bool:
    """Whether the call at hand was made through `normed`."""
    return _is_normed_call.get()


def holds_norms(model: torch.nn.Module | None, args: tuple, kwargs: dict) -> bool:
    """Whether a call is given NormedTensors, or the model has some."""
    of_model = () if model is None else (*model.parameters(), *model.buffers())
    return any(map(_is_normed, (*of_model, *_tensors((args, kwargs)))))


class NormAcquisition(Acquisition):
    """An acquisition whose operations run under norm rules."""

    recorder_kind = NormRecorder
    roles = {"norm_size": "n", "perturbation_size": "d"}

    def __init__(
        self,
        policy: Policy,
        mode: context.Mode,
        model: torch.nn.Module | None,
        sensitivity: context.Sensitivity = "global",
        otherwise: Otherwise = "measured",
    ):
        super().__init__()
        self.lifting = TracedLifting(self, model, policy, otherwise)
        self.policy = policy
        self.mode_of_rules = mode
        self.sensitivity = sensitivity
        self.is_normed_call = self.watches = is_normed_call()
        self._given_perturbations: set[int] = set()  # the fakes of those given for parameters
        self._meets_norms = False  # there are NormedTensors, as far as can be known by now; other wrappers are none
        self._model = model
        self.has_data = True  # that of the call at hand, beside norms

    @property
    def intercepts_plain(self) -> bool:
        """Whether operations on plain tensors are taken over: where parameters have norms, or for what `SubclassTransform` does."""
        return self._has_norms or super().intercepts_plain

    @property
    def _has_norms(self) -> bool:
        """Whether operations on parameters give norms: in a normed call, or where there are NormedTensors."""
        return self.is_normed_call or self._meets_norms

    def lets_stand_for(self, tensor: TensorProxy, value: TensorProxy) -> bool:
        """In a norm map, whose parameters stay what they were."""
        if self.has_data or not self._has_norms or type(tensor) is not TensorProxy:
            return False
        return written_proxies.replace(self, self.lifting, tensor, value)

    def hindrance_to_new_memory(self, tensor: TensorProxy) -> str | None:
        """A norm that is given, or inferred, is known of what a tensor was; one that is measured is of what it is by then."""
        if self._has_norms and not (self.has_data and self.lifting.is_measured(self.fake_of(tensor))):
            return "it has a norm, of what was in it before"
        return super().hindrance_to_new_memory(tensor)

    def hindrance_to_attributes(self, fake: torch.Tensor) -> str | None:
        """Norms are what their rules say."""
        return "it is a norm of a call" if _is_normed(fake) else super().hindrance_to_attributes(fake)

    def register(self, proxy: SubclassProxy) -> SubclassProxy:
        """Notices NormedTensors besides."""
        self._meets_norms = self._meets_norms or _is_normed(proxy.fake)
        return super().register(proxy)

    def begin(self, args: tuple, kwargs: dict) -> None:
        """Choose the norms of parameters of given size whose uses disagree, if there may be any: by an eager run."""
        is_given_norms = holds_norms(None, args, kwargs)
        self._meets_norms = is_given_norms or holds_norms(self._model, (), {})
        if self._model is None or not (self.is_normed_call or is_given_norms):
            return
        _refuse_spread(self._model)
        if not any(self.lifting.has_size_only(name) for name, p in self._model.named_parameters() if has_norm(p)):
            return
        otherwise = "measured" if self.lifting.otherwise == "measured" else "unit"
        self.lifting.inferred = chosen_norms(
            self._model, args, kwargs, policy=self.policy, mode=self.mode_of_rules, otherwise=otherwise
        )

    def kept(self, value: torch.Tensor) -> torch.Tensor:
        """A norm belongs to a call: what stays in the user's objects is the plain tensor."""
        return value.backing if isinstance(value, NormedTensor) else value

    def guards(self, inputs: Sequence[SubclassProxy]) -> list[Any]:
        """A trace is for calls through `normed` or for calls that are not."""
        expected = self.is_normed_call
        return [
            *super().guards(inputs),
            guard(f"check_normed_call_is_{expected}", lambda: is_normed_call() is expected),
        ]

    def beyond_no_grad(self) -> set[int]:
        """Perturbations: a tensor moves as far under `torch.no_grad`, only derivatives of its norm stop there."""
        normed = [n for p in self.wrappers.proxies() for n in _normed_inside(p.fake)] + list(self.lifting.lifted.values())
        return {id(n.perturbation_size) for n in normed if n.perturbation_size is not None} | self._given_perturbations

    # -- which operations ---------------------------------------------------------------------------------------------

    def meets_gradient(self, args: tuple, kwargs: dict) -> bool:
        """Norms are differentiated by Thunder, as the plain tensors they are."""
        wrappers = [v.fake for v in tree_flatten((args, kwargs))[0] if isinstance(v, SubclassProxy)]
        return not any(map(_is_normed, wrappers)) and super().meets_gradient(args, kwargs)

    def follow_held(self, wrappers: Sequence[SubclassProxy]) -> None:
        """As `meets_gradient`."""
        super().follow_held([p for p in wrappers if not _is_normed(p.fake)])

    def is_followed(self, values: Sequence[Any]) -> bool:
        """As `meets_gradient`."""
        return not any(map(autograd_functions.is_normed, values)) and super().is_followed(values)

    def wants(self, fn: Callable, args: tuple, kwargs: dict) -> bool:
        """Operations on parameters that have a norm rule, and factories that have one.

        Also those without a rule that make a tensor from parameters with given norms alone: its norm is not that of the data.
        """
        fn = torch.Tensor.unbind if fn is torch.Tensor.__iter__ else fn
        if not registry.has_rule(fn) and registry.is_metadata(fn):
            return False
        if super().wants(fn, args, kwargs):
            return True
        if not self._has_norms:
            return False
        proxies = [
            v for v in tree_flatten(([value_of(a) for a in args], [value_of(v) for v in kwargs.values()]))[0] if _is_proxy(v)
        ]
        if any(p.name in self.stand_ins for p in proxies):
            return True
        if not any(map(self.lifting.is_parameter_proxy, proxies)) and dispatch.is_factory(fn):
            return True
        is_mutation = registry.is_mutation(fn, {k: value_of(v) for k, v in kwargs.items()})
        if is_mutation and proxies and self.lifting.is_parameter_proxy(proxies[0]):
            target = self.fake_of(proxies[0])
            if id(target) in self.lifting.derived or not self.lifting.is_measured(target):
                return True
        if is_mutation and any(map(self._moves, proxies[1:])):
            return True
        if windows.are_known() and not is_mutation and any(windows.is_indicator(self.fake_of(p)) for p in proxies):
            return True
        if not is_mutation and not registry.has_rule(fn) and _composite_body(fn) is not None:
            return any(map(self.lifting.is_parameter_proxy, proxies))
        if is_mutation or not registry.has_rule(fn):
            parameters = [self.fake_of(p) for p in proxies if self.lifting.is_parameter_proxy(p)]
            is_followed = len(parameters) == len(proxies) or (bodies.is_composite(fn) and not is_mutation)
            return is_followed and not all(self.lifting.is_measured(t) for t in parameters)
        return any(self.lifting.is_parameter_proxy(p) for p in proxies)

    def _moves(self, proxy: TensorProxy) -> bool:
        """Whether the norm of a parameter, or of what was made from some, is not that of its data, or has derivatives to keep."""
        if isinstance(proxy, SubclassProxy) or not self.lifting.is_parameter_proxy(proxy):
            return False
        return is_grad_enabled() or not self.lifting.is_measured(self.fake_of(proxy))

    @property
    def has_own_formulas(self) -> bool:
        """Norms have those of their rules."""
        return self._has_norms

    def computes_wrappers(self, function: Callable, given: Sequence[Any]) -> bool:
        """Where it is given parameters, or can reach some, as those of a module, and parameters have norms."""
        if not self._has_norms:
            return False
        if any(_is_proxy(v) and self.lifting.is_parameter_proxy(v) for v in given):
            return True
        others = [v for v in given if not isinstance(v, TensorProxy)]
        return any(isinstance(t, torch.nn.Parameter) for t in Reachable((function, *others)).tensors)

    def plain_call(self, fn: Callable, args: tuple, kwargs: dict) -> Callable[[], Any] | None:
        """With what stands for constants by now, where there are any; or a buffer that normed tensors change in place.

        That one, a running mean, is written plainly too.
        """
        function = autograd_functions.function_of(fn)
        given = tree_flatten((args, kwargs))[0]
        if function is not None and (any(map(autograd_functions.is_normed, given)) or self.computes_wrappers(function, given)):
            return lambda: autograd_functions.apply(self, function, args, kwargs)
        is_mutation = registry.is_mutation(fn, {}) or fn is torch.Tensor.copy_
        target = args[0] if args else None
        symbol = written_proxies.thunder_symbol(fn) if is_mutation else None
        if symbol is not None and self._is_buffer(target):
            return buffer_proxies.write(self, self.lifting, symbol, fn, args, kwargs)
        if is_mutation:
            buffer_proxies.refuse_write_into_part(self, fn, target)
        current = written_proxies.with_current(self, self.lifting.concerns, self._moves, fn, args, kwargs)
        if current is not None:
            return functools.partial(self._call_with_current, fn, args, *current)
        return written_proxies.write(self, self.lifting, self.has_data, fn, args, kwargs)

    def _call_with_current(self, fn: Callable, args: tuple, current: tuple, kwargs: dict) -> Any:
        """What an operation returns of what stands for its arguments by now: where it hands one back, the argument itself."""
        found = operations.call(self, fn, current, kwargs)
        return next((given for given, by_now in zip(args, current, strict=True) if found is by_now), found)

    def _is_buffer(self, target: Any) -> bool:
        """Whether a proxy is a plain one with the memory of a buffer."""
        if not isinstance(target, TensorProxy) or isinstance(target, SubclassProxy):
            return False
        return not self.lifting.concerns(self.fake_of(target)) and self.lifting.is_of_buffer(target)

    def run(self, recorder: Recorder, fn: Callable, args: Any, kwargs: Any) -> Any:
        """Run one operation on fakes: by its norm rule, or plainly if it concerns parameters alone."""
        context.not_composed(context.current_sensitivity(), "a trace")
        environment = NormEnvironment(self.lifting, recorder)
        with (
            context.norm_mode(self.mode_of_rules),
            context.norm_sensitivity(self.sensitivity),
            context.environment(environment),
        ):
            args, kwargs = environment.annotated((args, kwargs))
            tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
            if isinstance(fn, type):  # which says the norm itself
                return fn(*args, **kwargs)
            if autograd_functions.is_forward(fn):  # operations that may have rules
                with environment.inside_function():
                    return fn(*args, **kwargs)
            if wrappers := [t for t in tensors if is_wrapper(t)]:
                _refuse_mixture(fn, wrappers)
                return fn(*args, **kwargs)
            if not self._has_norms and not isinstance(fn, registry.NormedOp):  # Thunder lacks the operation
                return fn(*args, **kwargs)
            if tensors and self.lifting.concerns(tensors[0]):
                refuse_mutation(fn, args, kwargs, location_of_user())  # what is derived would stay what it was, its value too
            body = None if registry.has_rule(fn) else _composite_body(fn)
            if body is not None:  # what it calls may have rules
                with environment.inside_function():
                    return body(*args, **kwargs)
            if tensors and all(self.lifting.concerns(t) for t in tensors):
                return environment.derive(fn, args, kwargs)
            if registry.is_mutation(fn, kwargs) and any(map(self.lifting.concerns, tensors)):
                raise refused(fn, tensors[0], location_of_user(), "parameters are written into it, and others may look at it")
            if not any(map(self.lifting.concerns, tensors)) and not (registry.has_rule(fn) and dispatch.is_factory(fn)):
                return run_plainly(environment, fn, args, kwargs, tensors)
            return environment.beside_others(fn, args, kwargs)

    # -- lifting ------------------------------------------------------------------------------------------------------

    def fetching(self, names: Sequence[str]) -> Callable[[], tuple[torch.Tensor, ...]]:
        """What takes the norms given for parameters, all at once, if they are still of the same kinds."""
        given = self.lifting.leaves
        expected = given.sizes(names).signature

        def fetch() -> tuple[torch.Tensor, ...]:
            sizes = given.sizes(names)
            if sizes.signature != expected or not sizes.are_scalars():
                raise GuardError("a norm given for a parameter is of another kind now")
            return (*sizes.norm_sizes, *sizes.perturbation_sizes)

        return fetch

    def wished_names(self, bsym: BoundSymbol) -> Iterator[tuple[TensorProxy, str]]:
        """A measured norm is called after what it is measured of."""
        if isinstance(bsym.sym.id, trace.OperationId) and bsym.sym.id.op == "of" and len(bsym.args) == 1:
            (source,) = bsym.args
            for p in bsym.flat_proxy_outs:
                yield p, f"{source.name}_norm_size" if source.name.startswith("t_") else "n"

    def changing_with(self, tree: Any) -> list[torch.Tensor]:
        """The normed tensors in the storages of those in `tree`: an in-place operation changes them all."""
        normed = [v for v in tree_flatten(tree)[0] if isinstance(v, NormedTensor)]
        return list({id(x): x for v in normed for x in v.aliases()}.values())

    def write_hoisted(self, recorder: NormRecorder) -> None:
        """Write the leaves and lifts the operation just recorded asked for."""
        for name, fakes, requires_grad in recorder.leaves:
            trace.write_leaf(self, name, fakes, requires_grad)
            self._given_perturbations.update(map(id, fakes[1:]))
        for name, log, outputs in recorder.hoisted:
            trace.emit_composite(self, name, log, outputs)
        self.lifting.lifted.update(recorder.lifts)


def _refuse_spread(model: torch.nn.Module) -> None:
    spread = [name for name, p in model.named_parameters() if is_spread(p)]
    if spread:
        raise UnsupportedOpError(
            with_details(
                "a normed call of a module whose parameters are sharded",
                parameters=", ".join(map(repr, spread[:3])) + (", ..." if spread[3:] else ""),
                why="the norm of a parameter is that of the whole one, and the program of a rank has a part of it",
                instead="norm_report(jitted, ...) and build_norm_map(model, ...), which gather them",
            )
        )


class NormEnvironment(LiftingEnvironment):
    """Rules run on fakes: a real operation is recorded as one operation, and so is every lift."""

    lifting: TracedLifting

    def __init__(self, lifting: TracedLifting, recorder: NormRecorder):
        super().__init__(lifting)
        self.recorder = recorder

    def run_real(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run `func` on plain fakes and record it as one operation.

        In an autocast region of the program what is below autocast is recorded, its casts too: the trace runs without autocast.  Where
        torch's autograd follows the program what is below that is recorded: a backward uses what an operation has kept for it.
        """
        written = without_values(func)
        if written is not None:
            return written(*args, **kwargs)
        is_ours = (getattr(func, "__module__", None) or "").startswith("thunder_norm")  # a norm, of nothing that autocast narrows
        is_taken_apart = self.recorder.acquisition.autograd.is_running or (in_autocast_region() and not is_ours)
        return func(*args, **kwargs) if is_taken_apart else self.recorder.call(func, args, kwargs)

    def lift_over(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        """The normed tensor for a plain one, by the transform's policy."""
        return self.lifting.lift(self.recorder, t, kind, dims)

    def derive(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """An operation on parameters alone (a transpose, a cast): plain, but remembered."""
        in_place.refuse_out(func, kwargs)
        body = func.body if isinstance(func, registry.NormedOp) else func
        result = self.run_real(body, args, kwargs)
        self.lifting.remember(func, args, kwargs, result)
        return result

    def values_of(self, t: torch.Tensor) -> torch.Tensor:
        """A constant with its values, if the program made it of numbers alone."""
        proxy = self.recorder.acquisition.fakes.proxy_of(t)
        with _disable_current_modes():
            found = None if proxy is None else known_values.value_of(proxy)
        return t if found is None else found

    def place_of(self, t: torch.Tensor) -> tuple[Hashable, torch.Tensor]:
        """The tensor that a view which Thunder made is of."""
        proxy = self.recorder.acquisition.fakes.proxy_of(t)
        found = None if proxy is None else plain_views.place_of(proxy)
        return super().place_of(t) if found is None else found

    def writes_into(self, t: torch.Tensor) -> int:
        """By the operations of the trace: a fake is not written into."""
        return self.recorder.acquisition.writes.into(t)

    def user_location(self) -> str | None:
        """The user's line the interpreter is at."""
        return location_of_user()


def _composite_body(fn: Callable) -> Callable | None:
    """What a torch function written in Python does, if Thunder has it as one operation and does not look into it."""
    return bodies.python_body(fn) if fn in _torch_to_thunder_function_map else None


def _is_normed(fake: torch.Tensor) -> bool:
    """Whether a wrapper is, or holds, a NormedTensor."""
    return next(_normed_inside(fake), None) is not None


def _refuse_mixture(fn: Callable, wrappers: Sequence[torch.Tensor]) -> None:
    normed = next((t for t in wrappers if isinstance(t, NormedTensor)), None)
    other = next((t for t in wrappers if not _is_normed(t)), None)
    if normed is not None and other is not None:
        raise UnsupportedOpError(
            with_details(
                f"{getattr(fn, '__name__', fn)} of a {type(normed).__name__} and a {type(other).__name__}",
                at=location_of_user(),
                why="norm rules know plain tensors and norms",
                instead="make a plain tensor of the second, or leave norms out of this call",
            )
        )


def _normed_inside(fake: torch.Tensor) -> Iterator[NormedTensor]:
    """A NormedTensor itself, or those that another wrapper holds."""
    if isinstance(fake, NormedTensor):
        yield fake
    elif is_wrapper(fake):
        for name in WrapperSpec.of(fake).names:
            yield from _normed_inside(getattr(fake, name))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [v for v in tree_flatten(tree)[0] if isinstance(v, torch.Tensor)]


def _is_proxy(value: Any) -> bool:
    return isinstance(value, TensorProxy)


@lookasides.instead_of(NormedTensor.requires_grad_)
def _requires_grad(x: WrappedValue, requires_grad: WrappedValue | None = None) -> WrappedValue:
    """A traced program asks for it of a result (transformers 5, of its embedding's): norms have derivatives in any case."""
    return x
