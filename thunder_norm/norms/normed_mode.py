"""Normed mode: what happens to plain tensors while a program runs on normed ones.

In normed mode parameters are lifted when an operation consumes them, also where no other argument is normed (an embedding of
token ids).  Lifts are written into the trace before the operation that asked for them, once per parameter and kind.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.interpreter import ProvenanceRecord, PseudoInst
from thunder.core.jit_ext import EXT_FLAG_IS_MODULE, get_jit_ctx, get_parameter_or_buffer_or_submodule_name_and_root
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from thunder_norm.core import context, conversions, dispatch, registry
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.norms.annotations import Annotation, named_annotations
from thunder_norm.norms.eager import chosen_norms
from thunder_norm.norms.inference import NormSpec
from thunder_norm.norms.parameters import (
    Derived,
    Leaves,
    Policy,
    canonical_dims,
    derivations,
    derived_norm,
    refuse_mutation,
    stated_kind,
    tied_names,
)
from thunder_norm.norms.plain_operations import Functions, Operations, Unknown, unknown_norm
from thunder_norm.norms.recorder import LiftedParameter, NormRecorder, TracingEnvironment
from thunder_norm.subclass import trace
from thunder_norm.subclass.acquisition import Acquisition, value_of
from thunder_norm.subclass.autograd import is_grad_enabled
from thunder_norm.subclass.protocol import WrapperSpec, is_wrapper
from thunder_norm.subclass.proxy import SubclassProxy
from thunder_norm.subclass.record import Recorder
from thunder_norm.tracing.bindable import guard
from thunder_norm.tracing.guards import GuardError
from thunder_norm.tracing.locations import location_of_user

_is_normed_call: contextvars.ContextVar[bool] = contextvars.ContextVar("thunder_norm_is_normed_call", default=False)


def normed_call() -> contextlib.AbstractContextManager[None]:
    """Jitted functions called inside the block run in normed mode, whatever their inputs."""
    return context.setting(_is_normed_call, True)


def is_normed_call() -> bool:
    """Whether the call at hand was made through `normed`."""
    return _is_normed_call.get()


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
    ):
        super().__init__()
        self.tied: dict[str, tuple[str, ...]] = {} if model is None else tied_names(model)
        self.policy = policy
        self.leaves = None if isinstance(policy, str) else Leaves(policy)
        self.mode_of_rules = mode
        self.sensitivity = sensitivity
        self.annotations: dict[str, Annotation] = {} if model is None else named_annotations(model)
        self.is_normed_call = self.watches = is_normed_call()
        self._lifted: dict[tuple, NormedTensor] = {}
        self._derived: dict[int, Derived] = {}
        self._given_perturbations: set[int] = set()  # the fakes of those given for parameters
        self._kept: list[torch.Tensor] = []  # temporaries that were made from parameters: alive, so that their ids stay their own
        self.unknown = Unknown()
        self._made_by: dict[str, str] = {}  # what plain operations made from parameters with given norms, and which ones
        self._num_followed = 0
        self.lifted_parameters: list[LiftedParameter] = []
        self._model = model
        self._inferred: dict[str, NormSpec] = {}  # norms of parameters whose uses disagree
        self._first: dict[str, NormSpec] = {}  # what the first use of each parameter of given size wanted

    @property
    def intercepts_plain(self) -> bool:
        """Whether operations on parameters are taken over: in a normed call, or where there are NormedTensors."""
        return self.is_normed_call or self.meets_wrappers

    @property
    def is_unit(self) -> bool:
        """Whether parameters without a given norm have norm 1."""
        return self.policy == "unit"

    @property
    def measures(self) -> bool:
        """Whether parameters without a given norm are measured."""
        return not self.is_unit

    def begin(self, args: tuple, kwargs: dict) -> None:
        """Choose the norms of parameters of given size whose uses disagree, if there may be any: by an eager run."""
        if self._model is None or not (self.is_normed_call or any(map(_is_normed, _tensors((args, kwargs))))):
            return
        if not any(self._has_size_only(name) for name, p in self._model.named_parameters() if p.is_floating_point()):
            return
        otherwise = "measured" if self.measures else "unit"
        self._inferred = chosen_norms(self._model, args, kwargs, policy=self.policy, mode=self.mode_of_rules, otherwise=otherwise)

    def _has_size_only(self, name: str) -> bool:
        """Whether a size is given for a parameter, and no kind."""
        name = self._given_name(name)
        if self.measures and (self.leaves is None or name not in self.leaves):
            return False
        return stated_kind(name, self.annotations, self.leaves) is None

    def _given_name(self, name: str) -> str:
        """Of the names of a tied parameter, the one a norm is given for."""
        tied = self.tied.get(name, (name,))
        return next((n for n in tied if self.leaves is not None and n in self.leaves), tied[0])

    def stated(self, name: str, t: torch.Tensor) -> NormSpec | None:
        """The norm somebody stated for a parameter, or that was chosen because its uses disagree."""
        stated = stated_kind(name, self.annotations, self.leaves)
        return self._inferred.get(name) if stated is None else NormSpec(stated[0], canonical_dims(*stated, t.ndim))

    def check_measurable(self, name: str) -> None:
        """Raise if the parameter `name` must not be measured."""

    def kept(self, value: torch.Tensor) -> torch.Tensor:
        """A norm belongs to a call: what stays in the user's objects is the plain tensor."""
        return value.backing if isinstance(value, NormedTensor) else value

    def guards(self) -> list[Any]:
        """A trace is for calls through `normed` or for calls that are not."""
        expected = self.is_normed_call
        return [
            *super().guards(),
            guard(f"check_normed_call_is_{expected}", lambda: is_normed_call() is expected),
        ]

    def beyond_no_grad(self) -> set[int]:
        """Perturbations: a tensor moves as far under `torch.no_grad`, only derivatives of its norm stop there."""
        normed = [n for p in self.wrappers.proxies() for n in _normed_inside(p.fake)] + list(self._lifted.values())
        return {id(n.perturbation_size) for n in normed if n.perturbation_size is not None} | self._given_perturbations

    # -- which operations ---------------------------------------------------------------------------------------------

    def meets_gradient(self, args: tuple, kwargs: dict) -> bool:
        """Norms are differentiated by Thunder, as the plain tensors they are."""
        wrappers = [v.fake for v in tree_flatten((args, kwargs))[0] if isinstance(v, SubclassProxy)]
        return not any(map(_is_normed, wrappers)) and super().meets_gradient(args, kwargs)

    def wants(self, fn: Callable, args: tuple, kwargs: dict) -> bool:
        """Operations on parameters that have a norm rule, and factories that have one.

        Also those without a rule that make a tensor from parameters with given norms alone: its norm is not that of the data.
        """
        if not registry.has_rule(fn) and registry.is_metadata(fn):
            return False
        if super().wants(fn, args, kwargs):
            return True
        proxies = [
            v for v in tree_flatten(([value_of(a) for a in args], [value_of(v) for v in kwargs.values()]))[0] if _is_proxy(v)
        ]
        if not any(map(self.is_parameter, proxies)) and dispatch.is_factory(fn):
            return True
        is_mutation = registry.is_mutation(fn, {k: value_of(v) for k, v in kwargs.items()})
        if is_mutation or not registry.has_rule(fn):
            parameters = [self.fake_of(p) for p in proxies if self.is_parameter(p)]
            return len(parameters) == len(proxies) and not all(self.is_measured(t) for t in parameters)
        return any(self.is_parameter(p) for p in proxies)

    def is_parameter(self, proxy: TensorProxy) -> bool:
        """Whether a proxy is a floating parameter of a module, or derived from parameters alone."""
        fake = self.fakes.known(proxy)
        if fake is not None and id(fake) in self._derived:
            return True
        found = parameter_name(proxy)
        return found is not None and found[0] == "_parameters" and dtypes.is_float_dtype(proxy.dtype)

    def is_measured(self, t: torch.Tensor) -> bool:
        """Whether the norm of a parameter, or of a tensor made from parameters alone, is that of its data."""
        derived = self._derived.get(id(t))
        if derived is not None:
            return all(self.is_measured(v) for v in derived.sources())
        name = self.name_of(t)
        return not (name is not None and (self.is_unit or self.leaves is not None and name in self.leaves))

    def run(self, recorder: Recorder, fn: Callable, args: Any, kwargs: Any) -> Any:
        """Run one operation on fakes: by its norm rule, or plainly if it concerns parameters alone."""
        with (
            context.norm_mode(self.mode_of_rules),
            context.norm_sensitivity(self.sensitivity),
            context.environment(NormEnvironment(self, recorder)),
        ):
            args, kwargs = self._with_annotated(args), self._with_annotated(kwargs)
            tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
            if isinstance(fn, type) or any(is_wrapper(t) for t in tensors):  # a constructor says the norm itself
                return fn(*args, **kwargs)
            carries_no_norm = not self.intercepts_plain and not isinstance(fn, registry.NormedOp)
            if carries_no_norm:  # Thunder lacks the operation
                return fn(*args, **kwargs)
            if tensors and all(self.is_parameter_fake(t) for t in tensors):
                if not all(map(self.is_measured, tensors)):
                    refuse_mutation(fn, args, kwargs, location_of_user())
                return self.derive(recorder, fn, args, kwargs)
            return dispatch.run_registered(fn, args, kwargs)

    def is_parameter_fake(self, t: torch.Tensor) -> bool:
        """Whether a fake stands for a floating parameter, or was made from parameters alone."""
        proxy = self.fakes.proxy_of(t)
        return id(t) in self._derived or proxy is not None and self.is_parameter(proxy)

    def derive(self, recorder: Recorder, fn: Callable, args: tuple, kwargs: dict) -> Any:
        """An operation on parameters alone (a transpose, a cast): plain, but remembered."""
        body = fn.body if isinstance(fn, registry.NormedOp) else fn
        result = recorder.call(body, args, kwargs)
        for t, made in derivations(fn, args, kwargs, result):
            self._derived[id(t)] = made
            self._kept.append(t)
        return result

    def _with_annotated(self, values: Any) -> Any:
        if not self.annotations and not self._inferred and self.leaves is None:
            return values
        return torch.utils._pytree.tree_map(lambda v: self.annotated(v) if isinstance(v, torch.Tensor) else v, values)

    def annotated(self, t: torch.Tensor) -> torch.Tensor:
        """A parameter as the kind stated or chosen for it; any other tensor as it is."""
        name = None if is_wrapper(t) else self.name_of(t)
        if name is None:
            return t
        stated = stated_kind(name, self.annotations, self.leaves)
        if stated is None and (name not in self._inferred or self.is_measured(t)):
            return t
        try:
            own = self.stated(name, t)
            return context.lift(t, own.kind, own.elem_dims)
        except NormMismatchError as e:
            raise NormMismatchError(f"the norm stated for parameter {name!r} does not fit it: {e}") from e

    # -- lifting ------------------------------------------------------------------------------------------------------

    def name_of(self, t: torch.Tensor) -> str | None:
        """The dotted name of the parameter or buffer a fake stands for: of several, the one a norm is given for."""
        proxy = self.fakes.proxy_of(t)
        found = None if proxy is None else parameter_name(proxy)
        if found is None:
            return None
        return self._given_name(found[1])

    def lift(
        self, recorder: NormRecorder, t: torch.Tensor, kind: type[NormedTensor], elem_dims: tuple[int, ...] | None
    ) -> NormedTensor:
        """The normed tensor for a plain one, by this acquisition's policy; written once."""
        dims = canonical_dims(kind, elem_dims, t.ndim)
        self._check_known(t)
        if self.fakes.proxy_of(t) is None and (id(t) not in self._derived or self.is_measured(t)):
            return kind.of(t, dims)  # a temporary of the operation being recorded
        key = (id(t), kind, dims, is_grad_enabled())
        found = self._lifted.get(key)
        found = recorder.lifts.get(key) if found is None else found
        if found is None:
            found = recorder.lifts[key] = self._new_lift(recorder, t, kind, dims)
            found._is_leaf_value = True
        return found

    def _check_known(self, t: torch.Tensor) -> None:
        """Refuse a tensor whose values depend on parameters with given norms in a way that no rule follows.

        Raises:
            MissingNormRuleError: it does.
        """
        self.unknown.check(t, location_of_user())
        proxy = self.fakes.proxy_of(t)
        if proxy is None or id(t) in self._derived:
            return
        bsyms = get_jit_ctx().computation_trace.bound_symbols
        for bsym in bsyms[self._num_followed :]:
            if not isinstance(bsym.sym.id, trace.OperationId) and any(map(self._depends_on_given, bsym.flat_proxy_args)):
                made = (p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy) and dtypes.is_float_dtype(p.dtype))
                self._made_by |= dict.fromkeys((p.name for p in made), bsym.sym.name)
        self._num_followed = len(bsyms)
        if proxy.name in self._made_by:
            raise unknown_norm(self._made_by[proxy.name], t, location_of_user())

    def _depends_on_given(self, p: Any) -> bool:
        return isinstance(p, TensorProxy) and (
            p.name in self._made_by or self.is_parameter(p) and not self.is_measured(self.fake_of(p))
        )

    def _new_lift(self, recorder: NormRecorder, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        derived = self._derived.get(id(t))
        if derived is not None and not self.is_measured(t):
            return recorder.hoist_norm(trace.OperationId(kind, "derived"), lambda: derived_norm(t, derived, kind, dims))
        name = self.name_of(t)
        if name is not None:
            recorder.lifted_parameters.append(LiftedParameter(name, kind, dims))
            if not self.is_measured(t):
                own = self.stated(name, t) or self._first.setdefault(name, NormSpec(kind, dims))
            if self.leaves is not None and name in self.leaves:
                return self._leaf(recorder, t, name, own, kind, dims)
            if self.is_unit and self.is_parameter(self.fakes.proxy_of(t)):
                return recorder.hoist_norm(
                    trace.OperationId(kind, "unit"), lambda: self._fit(own.around(t, 1.0), name, kind, dims)
                )
            self.check_measurable(name)
        return recorder.hoist_norm(trace.OperationId(kind, "of"), lambda: kind.of(t, dims))

    def _leaf(
        self, recorder: NormRecorder, t: torch.Tensor, name: str, own: NormSpec, kind: type[NormedTensor], dims: tuple[int, ...]
    ) -> NormedTensor:
        with _disable_current_modes():  # a bare tensor's value is looked at: it must not be negative
            real = self.leaves.tensors(name)
        with recorder.paused():
            fakes = tuple(torch.empty((), dtype=r.dtype, device=r.device) for r in real)
        recorder.leaves.append((name, fakes, tuple(r.requires_grad for r in real)))
        return self._fit(self.leaves.normed(name, t, own.kind, own.elem_dims, fakes), name, kind, dims)

    def _fit(self, normed: NormedTensor, name: str, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        try:
            return conversions.convert(normed, kind, dims)
        except NormMismatchError as e:
            raise NormMismatchError(f"the norm given for parameter {name!r} does not fit its use: {e}") from e

    def fetching(self, names: Sequence[str]) -> Callable[[], tuple[torch.Tensor, ...]]:
        """What takes the norms given for parameters, all at once, if they are still of the same kinds."""
        given = self.leaves
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
        self._lifted.update(recorder.lifts)
        self.lifted_parameters.extend(recorder.lifted_parameters)


class NormEnvironment(TracingEnvironment):
    """Rules run on fakes, and plain tensors are lifted by the transform's policy."""

    acquisition: NormAcquisition

    def lift(self, t: torch.Tensor, kind: type[NormedTensor], elem_dims: tuple[int, ...] | None) -> NormedTensor:
        """The normed tensor for a plain one, by the transform's policy."""
        return self.acquisition.lift(self.recorder, t, kind, elem_dims)

    def inside_function(self) -> contextlib.AbstractContextManager[Any]:
        """The calls of a torch function written in Python are those of the program."""
        return Functions(self)

    def inside_operation(self) -> contextlib.AbstractContextManager[Any]:
        """What torch's C++ code does to parameters."""
        return Operations(self)

    # -- what `plain_operations` asks ---------------------------------------------------------------------------------

    @property
    def unknown(self) -> Unknown:
        """The tensors made from parameters and others by operations without a norm rule."""
        return self.acquisition.unknown

    def concerns(self, t: torch.Tensor) -> bool:
        """Whether a fake stands for a floating parameter, or was made from parameters alone."""
        return self.acquisition.is_parameter_fake(t)

    def known(self, t: Any) -> Any:
        """A tensor has one name in a trace."""
        return t

    def copied(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """A deep copy of a tensor: plain."""
        return func(*args, **kwargs)

    def matters(self, t: torch.Tensor) -> bool:
        """Whether its norm is another than that of its data."""
        return not self.acquisition.is_measured(t)

    def annotated(self, t: Any) -> Any:
        """A parameter as the kind stated for it; anything else as it is."""
        return self.acquisition.annotated(t) if isinstance(t, torch.Tensor) else t

    def run(self, func: Callable, args: Any, kwargs: Any) -> Any:
        """An operation on NormedTensors."""
        return func(*args, **kwargs)

    def derive(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """An operation on parameters alone: plain, but remembered."""
        return self.acquisition.derive(self.recorder, func, args, kwargs)

    def location(self) -> str | None:
        """The user's line."""
        return location_of_user()

    def follow(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        """A trace computes its constants when it runs."""


def _one() -> torch.Tensor:
    return torch.ones((), dtype=NORM_DTYPE)


def parameter_name(proxy: TensorProxy) -> tuple[str, str] | None:
    """("_parameters" | "_buffers", dotted name) if a proxy stands for a parameter or buffer of a module."""
    provenance = proxy.history
    if not isinstance(provenance, ProvenanceRecord) or provenance.inst is not PseudoInst.BINARY_SUBSCR:
        if not isinstance(provenance, ProvenanceRecord) or len(provenance.inputs) != 2:
            return None
    container = provenance.inputs[0]
    if (
        container.inst is not PseudoInst.LOAD_ATTR
        or container.inputs[1].inst is not PseudoInst.CONSTANT
        or container.inputs[1].value not in ("_parameters", "_buffers")
        or not container.inputs[0].ext_flag & EXT_FLAG_IS_MODULE
    ):
        return None
    where, name, _ = get_parameter_or_buffer_or_submodule_name_and_root(provenance)
    return where, ".".join(name)


def _is_normed(fake: torch.Tensor) -> bool:
    """Whether a wrapper is, or holds, a NormedTensor."""
    return next(_normed_inside(fake), None) is not None


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
