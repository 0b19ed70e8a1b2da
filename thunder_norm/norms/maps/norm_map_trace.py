"""Cutting a normed program down to its norms: the transform behind `build_norm_map`."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from thunder_norm.context_variables import setting
from thunder_norm.core.context import Mode
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.model_state.shards import spread_of
from thunder_norm.norms.autocast import keeping_autocast
from thunder_norm.norms.higher_order import Replay
from thunder_norm.norms.lifts.lifting import Otherwise
from thunder_norm.norms.lifts.parameters import tensor_names
from thunder_norm.norms.maps.conditions import Conditions, ValuesOfCall
from thunder_norm.norms.maps.refused_maps import depends_on_data, is_another_in_each_call
from thunder_norm.norms.maps.sources import OfArgument, OfAttribute, OfModel, Source
from thunder_norm.norms.normed_mode import NormAcquisition
from thunder_norm.norms.transform import NormTransform, is_norm_scalar
from thunder_norm.norms.without_data import has_no_data
from thunder_norm.subclass.acquiring.acquisition import LeafOrigin, WrapperOrigin
from thunder_norm.subclass.backward.side_effects import is_side_effect
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.crossing import boundary_operators, boundary_passes
from thunder_norm.tracing import own_changes
from thunder_norm.tracing.activity import depending
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.recording import declare_arguments
import thunder
from thunder.core import dtypes, prims
from thunder.core.devices import Device, DeviceType
from thunder.core.module import ThunderModule
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

_sizes: contextvars.ContextVar[dict[str, int] | None] = contextvars.ContextVar("thunder_norm_dynamic_sizes", default=None)


def sizes_of_call(sizes: dict[str, int]) -> contextlib.AbstractContextManager[None]:
    """Outputs wrapped inside the block get these sizes in their dynamic dimensions."""
    return setting(_sizes, sizes)


@dataclass(frozen=True)
class Given:
    """Norms given for parameters, and what holds for the others."""

    norms: Mapping[str, Any]
    otherwise: Otherwise
    in_call: tuple[str, ...]  # the names whose norms are given anew in each call, in order


@dataclass
class OutputShape:
    """Shape and dtype of one normed output, with the dimensions that follow a dynamic one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    follows: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # dim -> (name, factor, offset)
    made_last: torch.Tensor | None = field(default=None, repr=False, compare=False)

    def learn(self, other: OutputShape, variant: Any) -> None:
        """Find the dimensions that changed with one dynamic dimension: ``size = factor * dynamic + offset``."""
        step = variant.other_size - variant.size
        for d, (a, b) in enumerate(zip(self.shape, other.shape, strict=True)):
            if a != b:
                factor = (b - a) // step
                self.follows[d] = (variant.name, factor, a - factor * variant.size)

    def backing(self) -> torch.Tensor:
        """A meta tensor of this shape for the call at hand; `made_last` until the next one."""
        if not self.follows:
            if self.made_last is None:
                self.made_last = torch.empty(self.shape, dtype=self.dtype, device="meta")
            return self.made_last
        sizes = _sizes.get() or {}
        shape = list(self.shape)
        for d, (name, factor, offset) in self.follows.items():
            if name in sizes:
                shape[d] = factor * sizes[name] + offset
        self.made_last = made = torch.empty(shape, dtype=self.dtype, device="meta")
        return made


@dataclass
class Plan:
    """Where the inputs of the compiled computation come from, and what its outputs are."""

    sources: list[Source]
    moves: list[bool]  # which of them are perturbations
    moved: list[bool]  # which results depend on those
    outputs: list[OutputShape]
    fingerprint: str
    replay: Replay
    num_results: int
    conditions: Conditions | None = None  # on the values that the program asks for

    @property
    def all_sources(self) -> list[Source]:
        """What the program takes, and what it asks for."""
        return self.sources if self.conditions is None else [*self.sources, *self.conditions.sources]


class NormMapTransform(NormTransform):
    """`NormTransform` that keeps only what the norms of the outputs need."""

    hands_back_inputs = False  # what it is given has placeholders in it

    def __init__(self, given: Given, values: ValuesOfCall, mode: Mode, inputs: Sequence[Any]):
        super().__init__(parameters=given.norms, mode=mode)
        self._given = given
        self._values = values
        self._inputs = list(inputs)
        self.plan: Plan

    def planned(self) -> Plan:
        """What the acquired program is.

        Raises:
            NormMismatchError: no NormedTensor was met in it.
        """
        if not hasattr(self, "plan"):
            raise NormMismatchError("nothing in the model has a norm: give a NormedTensor for one of its arguments")
        return self.plan

    def transform_module(self, model: ThunderModule) -> None:
        """Remember the module; names were checked by the norm map."""
        super().transform_module(model)
        self._model = model._model

    def new_acquisition(self) -> NormAcquisition:
        """The state for one acquisition."""
        acquisition = NormAcquisition(self._given.norms, self.mode, self._model, otherwise=self._given.otherwise)
        acquisition.has_data = False  # a norm map is of all tensors within their norms
        acquisition.sizes.hindrance = functools.partial(self._hindrance, acquisition)
        return acquisition

    def _hindrance(self, acquisition: NormAcquisition, p: TensorProxy, real: torch.Tensor) -> str | None:
        """Why the values of an input are not known.

        A norm map has those of plain arguments, and of what it reads of the model beside parameters.
        """
        if has_no_data(real):
            return "it is computed from a tensor on the meta device: give one with data, the model may stay on meta"
        found = acquisition.lifting.member(p)
        if id(acquisition.fakes.known(p)) in acquisition.fakes.inner:
            return "it is computed from a NormedTensor, which stands for all tensors within its norm"
        if found is not None and (found[0] == "_parameters" or acquisition.lifting.is_given(found[1])):
            return f"it is computed from {found[1]!r}, of which a norm map has the norm"
        if found is None and self._position_of(real) is not None and all(t is not real for t in self._values.arguments):
            return "it is computed from an argument on the meta device, which may be given with data, or with dynamic dimensions"
        return self._values.hindrance()

    def transform_lowered(self, acquisition: NormAcquisition, traces: boundary_passes.Traces) -> boundary_passes.Traces:
        """Return only norms, drop what they do not need, and give outputs meta backings."""
        prologue, computation, epilogue = traces
        received = boundary_passes.results_and_received(computation, epilogue)
        epilogue = _without_side_effects(boundary_passes.of_values_alone(epilogue), [r for _, r in received])
        kept = {p.name for p in epilogue.args if isinstance(p, TensorProxy)}
        backings = {b.args[0].name for b in epilogue.bound_symbols if _wraps_normed(b)}
        norms = [p for p, r in received if is_norm_scalar(p) and r.name in kept - backings]
        computation = _with_values(boundary_passes.computing_only(_reading_values_alone(computation), norms))
        outputs: list[OutputShape] = []
        epilogue = _wrap_norms_only(epilogue, outputs)
        own = {} if self._model is None else tensor_names(self._model)
        sources = [self._source(acquisition, p, own) for p in computation.args]
        moves = [_is_perturbation(acquisition.origins.get(p.name)) for p in computation.args]
        prologue = _return_only(prologue, computation.args)
        fingerprint = "\n".join(str(b) for b in computation.bound_symbols)
        results = computation.bound_symbols[-1].args[0]["output"]
        conditions = self._conditions(acquisition, own)
        active = depending(computation, {p.name for p, is_moving in zip(computation.args, moves, strict=True) if is_moving})
        self.plan = Plan(
            sources,
            moves,
            [p.name in active for p in results],
            outputs,
            fingerprint,
            Replay(computation, results),
            len(results),
            conditions,
        )
        return prologue, computation, epilogue

    def _source(self, acquisition: NormAcquisition, p: TensorProxy, own: dict[str, torch.Tensor]) -> Source:
        origin = acquisition.origins.get(p.name)
        if isinstance(origin, LeafOrigin):
            return self._given.in_call.index(origin.name) + origin.index * len(self._given.in_call)
        if isinstance(origin, WrapperOrigin):
            position = next(i for i, v in enumerate(self._inputs) if v is origin.wrapper)
            attribute = origin.leaf_name
            if attribute == "backing":
                raise depends_on_data("the values of an input", f"{p.name}: {p.type_string()}")
            return OfArgument(position, attribute)
        found = acquisition.lifting.member(p)
        if found is not None and self._model is not None:
            tensor = own[found[1]]
            if has_no_data(tensor):
                raise depends_on_data(f"the values of {found[1]!r}, which is on the meta device", f"{p.name}: {p.type_string()}")
            return OfModel(found[1], spread_of(tensor))
        given = acquisition.fakes.real_input(p)
        if given is None or given.is_meta:
            raise depends_on_data("the values of a plain tensor", f"{p.name}: {p.type_string()}")
        position = self._position_of(given)
        return OfAttribute.of(given, self._model) if position is None else OfArgument(position)

    def _conditions(self, acquisition: NormAcquisition, own: dict[str, torch.Tensor]) -> Conditions | None:
        given, check = acquisition.sizes.conditions()
        if not given:
            return None
        sources = [self._source(acquisition, acquisition.fakes.current(g.proxy), own) for g in given]
        return Conditions(sources, [g.real.detach().clone() for g in given], check)

    def _position_of(self, t: torch.Tensor) -> int | None:
        return next((i for i, v in enumerate(self._inputs) if v is t), None)


def _is_perturbation(origin: LeafOrigin | WrapperOrigin | None) -> bool:
    if isinstance(origin, LeafOrigin):
        return origin.index == 1
    return origin is not None and origin.leaf_name == "perturbation_size"


def _reading_values_alone(trace: TraceCtx) -> TraceCtx:
    """The trace with the steps of operations of which a result needs no data of some argument.

    They ask it for its shape or dtype alone (`ones_like`, `type_as`), or another result is what needs it (a `torch.autograd.Function`).
    """

    def steps(bsym: BoundSymbol) -> list[BoundSymbol]:
        given, made = ({p.name for p in ps} for ps in (bsym.flat_proxy_args, bsym.flat_proxy_outs))
        found = [step for sub in bsym.subsymbols for step in steps(sub)]
        needs: dict[str, set[str]] = {}
        for step in found:
            read = set().union(*({p.name} | needs.get(p.name, set()) for p in step.flat_proxy_args))
            needs |= {p.name: read for p in step.flat_proxy_outs}
        is_made = made - given <= needs.keys()
        return found if found and is_made and not all(given <= needs.get(name, given) for name in made) else [bsym]

    new = from_trace(trace)
    new.bound_symbols = [step for bsym in trace.bound_symbols for step in steps(bsym)]
    return new


def _with_values(trace: TraceCtx) -> TraceCtx:
    """The trace with constants that it makes on the meta device made on the CPU: there they have values."""
    made = {p.name: p for b in trace.bound_symbols for p in _all_outputs(b) if p.device.devicetype is DeviceType.META}
    if not made:
        return trace
    swapped = {variableify(p): _on_cpu(p) for p in made.values()}

    def rewritten(bsym: BoundSymbol) -> BoundSymbol:
        new = bsym.from_bsym_swap_proxies(swapped)
        args, kwargs = tree_map(_on_cpu, (new.args, new.kwargs))
        return new.from_bsym(args=args, kwargs=kwargs, subsymbols=tuple(map(rewritten, bsym.subsymbols)))

    new = from_trace(trace)
    *body, returned = trace.bound_symbols
    new.bound_symbols = [
        *(b if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL else rewritten(b) for b in body),
        returned.from_bsym_swap_proxies(swapped),
    ]
    return new


def _all_outputs(bsym: BoundSymbol) -> Iterator[TensorProxy]:
    if bsym.sym.id != prims.PrimIDs.UNPACK_TRIVIAL:
        yield from (p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy))
        for sub in bsym.subsymbols:
            yield from _all_outputs(sub)


def _on_cpu(value: Any) -> Any:
    """A proxy, a device or anything else, on the CPU if it is on meta."""
    cpu = Device("cpu")
    if isinstance(value, Device):
        return cpu if value.devicetype is DeviceType.META else value
    if isinstance(value, str | torch.device) and str(value) == "meta":
        return torch.device("cpu")
    if not isinstance(value, TensorProxy) or value.device.devicetype is not DeviceType.META:
        return value
    moved = copy.copy(value)  # of the same name
    moved._device = cpu
    return moved


def _return_only(trace: TraceCtx, arguments: Sequence[Any]) -> TraceCtx:
    new = from_trace(trace)
    *body, returned = trace.bound_symbols
    (_, to_epilogue) = returned.args[0]
    new.bound_symbols = [*body, returned.from_bsym(args=((tuple(arguments), to_epilogue),))]
    return new


def _without_side_effects(trace: TraceCtx, received: Sequence[Any]) -> TraceCtx:
    """The epilogue without what the program writes into its module, and what is `received` for that: a norm map has norms only."""
    body = [b for b in trace.bound_symbols if not is_side_effect(b)]
    used = {p.name for b in body for p in b.flat_proxy_args if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL}
    body = [b for b in body if not _wraps_normed(b) or b.output.name in used]
    used = {p.name for b in body for p in b.flat_proxy_args if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL}
    unused = {p.name for p in received if isinstance(p, TensorProxy)} - used
    new = from_trace(trace)
    new.bound_symbols = [b for b in body if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL or b.output.name not in unused]
    new.args = tuple(p for p in trace.args if not isinstance(p, TensorProxy) or p.name not in unused)
    declare_arguments(new, "epilogue")
    return new


def _wrap_norms_only(trace: TraceCtx, outputs: list[OutputShape]) -> TraceCtx:
    """The epilogue with each normed output wrapped around a meta backing, and with meta tensors for plain ones: there is no data."""
    new = from_trace(trace)
    new.bound_symbols = []
    dropped: set[str] = set()
    for bsym in trace.bound_symbols:
        if _wraps_normed(bsym):
            backing, *leaves = bsym.args
            dropped.add(backing.name)
            new.bound_symbols.append(boundary_operators.wrap_output(bsym.output, leaves, _wrapper_of_norms(bsym.output, outputs)))
        else:
            new.bound_symbols.append(bsym)
    needed = {p.name for b in new.bound_symbols if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL for p in b.flat_proxy_args}
    plain = [p for p in trace.args if isinstance(p, TensorProxy) and not is_norm_scalar(p) and p.name in needed]
    if plain and not outputs:
        raise NormMismatchError(
            "the model returns plain tensors alone; a norm map has no data to compute them from: "
            + ", ".join(p.type_string() for p in plain)
        )
    gone = (dropped - needed) | {p.name for p in plain}
    new.bound_symbols = [*(_without_data(p, outputs) for p in plain)] + [
        b for b in new.bound_symbols if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL or b.output.name not in gone
    ]
    new.args = tuple(p for p in trace.args if not isinstance(p, TensorProxy) or p.name not in gone)
    declare_arguments(new, "epilogue")
    return new


def _wraps_normed(bsym: BoundSymbol) -> bool:
    """Whether an operation of an epilogue makes a NormedTensor, of its backing (which may be 0-dim float64 too) and its sizes."""
    return isinstance(bsym.output, SubclassProxy) and isinstance(bsym.output.fake, NormedTensor) and bool(bsym.args)


def _without_data(proxy: TensorProxy, outputs: list[OutputShape]) -> BoundSymbol:
    shape = OutputShape(tuple(proxy.shape), dtypes.to_torch_dtype(proxy.dtype))
    outputs.append(shape)
    return bindable("without_data", shape.backing)(output=proxy)


def _wrapper_of_norms(proxy: SubclassProxy, outputs: list[OutputShape]) -> Callable[..., NormedTensor]:
    fake = proxy.fake
    shape = OutputShape(tuple(fake.shape), fake.dtype)
    outputs.append(shape)
    kind, dims = type(fake), fake.elem_dims

    def wrap(norm_size: torch.Tensor, perturbation_size: torch.Tensor | None = None) -> NormedTensor:
        return kind._wrap(shape.backing(), norm_size, perturbation_size, dims)

    return wrap


def capture(jitted: Callable, run: Callable[[], Any], plan: Callable[[], Plan]) -> tuple[Any, tuple]:
    """Compile by running once; the cache entry, and what its prologue sends past the computation to the epilogue.

    The latter is seen by running once more with an epilogue that looks at its arguments.  Raises UnsupportedOpError where the program
    is another one in each call.
    """
    with own_changes.made_once():
        run()
    cache = thunder.compile_stats(jitted).interpreter_cache
    if not cache:
        raise is_another_in_each_call()
    entry = cache[-1]
    seen: list[tuple] = []

    def spy(*args: Any) -> Any:
        seen.append(args)
        return entry.epilogue_fn(*args)

    cache[-1] = entry._replace(epilogue_fn=spy)
    try:
        run()
    finally:
        cache[-1] = entry
    entry = entry._replace(
        computation_fn=keeping_autocast(entry.computation_fn),
        backward_fn=entry.backward_fn and keeping_autocast(entry.backward_fn),
        epilogue_fn=keeping_autocast(entry.epilogue_fn),
    )
    return entry, seen[0][: len(seen[0]) - plan().num_results]
