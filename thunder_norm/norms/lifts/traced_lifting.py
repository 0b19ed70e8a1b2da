"""Lifting in a trace: tensors are known by the proxies that fakes stand for, and lifts are written before the operation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core import by_data, conversions
from thunder_norm.core.kinds import LinfTensor
from thunder_norm.core.ranges import Range
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import MissingNormRuleError, NormMapKeyError, NormMismatchError, with_details
from thunder_norm.norms.lifts.annotations import Annotation, named_annotations
from thunder_norm.norms.lifts.inference import NormSpec
from thunder_norm.norms.lifts.lifting import Lifting, Location, Otherwise, unknown_norm
from thunder_norm.norms.lifts.parameters import Policy, derived_norm, kinds_on_the_way, tied_names
from thunder_norm.norms.lifts.plain_ranges import PlainRanges
from thunder_norm.norms.lifts.recorder import NormRecorder
from thunder_norm.norms.lifts.written_parameters import refused
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.acquiring.writes import has_memory
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.recording import trace
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.provenances import member_of_module
from thunder_norm.tracing.shared_memory.views import makes_view
from thunder.core import dtypes
from thunder.core.interpreter import ProvenanceRecord, PseudoInst
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.update_aliases import _is_inplace_op


class TracedLifting(Lifting):
    """Lifts the tensors of one acquisition, once per parameter and kind."""

    def __init__(self, acquisition: Acquisition, model: torch.nn.Module | None, policy: Policy, otherwise: Otherwise):
        annotations: Mapping[str, Annotation] = {} if model is None else named_annotations(model)
        super().__init__(policy, otherwise, annotations)
        self.tied: dict[str, tuple[str, ...]] = {} if model is None else tied_names(model)
        self._model = model
        self._members: dict[int, tuple[str, str]] | None = None  # the model's, by the identity of tensors
        self.lifted: dict[tuple, NormedTensor] = {}
        self._refused: dict[tuple, NormMismatchError | MissingNormRuleError] = {}  # of tensors made from parameters
        self._acquisition = acquisition
        self._writes = acquisition.writes
        self._plain_ranges = PlainRanges(acquisition, self._writes)
        self._first: dict[str, NormSpec] = {}  # what the first use of each parameter of given size wanted
        self._norm_of: dict[int, torch.Tensor] = {}  # by identity: the tensor that has the same values, and whose norm stands
        self._made_by: dict[str, str] = {}  # what plain operations made from parameters with given norms, and which ones
        self._of_changed: dict[str, torch.Tensor] = {}  # and from tensors that normed ones had changed in place
        self._num_followed = 0
        self._written_over: dict[int, tuple[set[int], Callable]] = {}  # by memory: what is known to be written, and by what

    # -- which tensors are parameters ---------------------------------------------------------------------------------

    def name_of(self, t: torch.Tensor) -> str | None:
        """The dotted name of the parameter or buffer a fake stands for: of several, the one a norm is given for."""
        proxy = self._acquisition.fakes.proxy_of(t)
        found = self._found_itself(t) if proxy is None else self.member(proxy)
        return None if found is None else self._given_name(found[1])

    def _found_itself(self, t: torch.Tensor) -> tuple[str, str] | None:
        """The same of a tensor of the model that a function which runs as a whole has found by itself."""
        if self._model is None or isinstance(t, FakeTensor):
            return None
        if self._members is None:
            self._members = _members(self._model)
        return self._members.get(id(t))

    def member(self, proxy: TensorProxy) -> tuple[str, str] | None:
        """("_parameters" | "_buffers", dotted name) of a parameter or buffer, whatever the way on which the program came to it.

        A module may also be in a list, or in an object that is no module: its tensors have the names that the model gives them, and
        none where it has none for them, as in eager runs.
        """
        history = proxy.history
        found = member_of_module(history) if isinstance(history, ProvenanceRecord) else None
        if self._model is None or (found is not None and found.root.inst is PseudoInst.INPUT_FN):
            return None if found is None or found.table == "_modules" else (found.table, ".".join(found.names))
        real = self._acquisition.fakes.real_input(proxy)
        return None if real is None else self._found_itself(real)

    def is_parameter(self, t: torch.Tensor) -> bool:
        """Whether a fake stands for a floating parameter, or is one that a function which runs as a whole has found by itself."""
        proxy = self._acquisition.fakes.proxy_of(t)
        if proxy is None:
            found = self._found_itself(t)
            return found is not None and found[0] == "_parameters" and (t.dtype.is_floating_point or t.dtype.is_complex)
        return self.is_parameter_proxy(proxy)

    def is_parameter_proxy(self, proxy: TensorProxy) -> bool:
        """Whether a proxy is a floating parameter of a module, or derived from parameters alone."""
        fake = self._acquisition.fakes.known(proxy)
        if fake is not None and id(fake) in self.derived:
            return True
        found = self.member(proxy)
        return found is not None and found[0] == "_parameters" and dtypes.is_inexact_dtype(proxy.dtype)

    def has_size_only(self, name: str) -> bool:
        """Whether a size is given for a parameter, and no kind."""
        name = self._given_name(name)
        return (self.otherwise != "measured" or self.is_given(name)) and self.stated_kind(name) is None

    def _given_name(self, name: str) -> str:
        """Of the names of a tied parameter, the one a norm is given for."""
        tied = self.tied.get(name, (name,))
        return next((n for n in tied if self.is_given(n)), tied[0])

    # -- what was made from parameters --------------------------------------------------------------------------------

    def take_norm_of(self, t: torch.Tensor, other: torch.Tensor) -> None:
        """Remember that `other` has the values of `t`, and gradients of its own: its norm is that of `t`, which moves as t does."""
        self._norm_of[id(other)] = t
        if self.concerns(t):
            self.remember(torch.clone, (t,), {}, other)

    def check_known(self, t: torch.Tensor, location: Location) -> None:
        """Refuse a tensor whose values depend on parameters with given norms in a way that no rule follows.

        Raises:
            MissingNormRuleError: it does.
        """
        super().check_known(t, location)
        proxy = self._acquisition.fakes.proxy_of(t)
        if proxy is None or id(t) in self.derived:
            return
        self._follow_made()
        if proxy.name in self._of_changed:
            self.unknown.check(self._of_changed[proxy.name], location)
        if proxy.name in self._made_by:
            raise unknown_norm(self._made_by[proxy.name], t, location())

    def _follow_made(self) -> None:
        """Note what plain operations made from tensors of unknown norm up to here."""
        bsyms = get_jit_ctx().computation_trace.bound_symbols
        for bsym in bsyms[self._num_followed :]:
            if isinstance(bsym.sym.id, trace.OperationId):
                continue
            made = [p.name for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy) and dtypes.is_inexact_dtype(p.dtype)]
            changed = next((t for p in bsym.flat_proxy_args if (t := self._changed_before(p)) is not None), None)
            if changed is not None:
                self._of_changed |= dict.fromkeys(made, changed)
            elif any(map(self._depends_on_given, bsym.flat_proxy_args)):
                self._made_by |= dict.fromkeys(made, bsym.sym.name)
        self._num_followed = len(bsyms)

    def _changed_before(self, p: Any) -> torch.Tensor | None:
        """The tensor that normed ones have changed in place, of which a plain one was made."""
        fake = self._acquisition.fakes.known(p) if isinstance(p, TensorProxy) else None
        return fake if fake is not None and self.unknown.was_changed(fake) else self._of_changed.get(getattr(p, "name", ""))

    def _depends_on_given(self, p: Any) -> bool:
        if not isinstance(p, TensorProxy):
            return False
        fake = self._acquisition.fakes.known(p)
        if fake is not None and fake in self.unknown:
            return True
        return p.name in self._made_by or self.is_parameter_proxy(p) and not self.is_measured(self._acquisition.fake_of(p))

    def is_of_buffers(self, t: torch.Tensor) -> bool:
        """As `Lifting` says, by the operations that the trace has."""
        proxy = self._acquisition.fakes.proxy_of(t)
        if proxy is None:
            return super().is_of_buffers(t)
        origins = [found and found[0] for found in map(self.member, _origins(proxy, with_writes=False))]
        return bool(origins) and all(table == "_buffers" for table in origins)

    def is_of_buffer(self, proxy: TensorProxy) -> bool:
        """Whether a proxy has the memory of a module's buffer."""
        return any(map(self.member, self._in_memory_of(proxy)))

    def change(self, fn: Callable, proxies: Sequence[TensorProxy]) -> None:
        """Remember that `fn` changed plain tensors in place by normed ones; what was made of them before stays what it was."""
        self._follow_made()
        for p in proxies:
            self.unknown.change(fn, self._acquisition.fake_of(p))

    def note_written_over(self, fn: Callable, tensors: Sequence[torch.Tensor]) -> None:
        """Results stand from now on for these tensors, which lie in one memory, perhaps that of a parameter.

        What else the model has in that memory, as a tied parameter under its other name, has a fake of its own.
        """
        for t in tensors:
            memory = self._memory_of_input(t)
            if memory is not None:
                known = self._written_over.setdefault(memory, (set(), fn))[0]
                known |= set(map(id, tensors))

    def _memory_of_input(self, t: torch.Tensor) -> int | None:
        proxy = self._acquisition.fakes.proxy_of(t)
        real = None if proxy is None else self._acquisition.fakes.real_input(proxy)
        return None if real is None or not has_memory(real) else real.untyped_storage()._cdata

    def _check_not_written_over(self, t: torch.Tensor) -> None:
        """Refuse a tensor of the model in whose memory the program has written by another name.

        Raises:
            UnsupportedOpError: it has.
        """
        known, fn = self._written_over.get(self._memory_of_input(t), (None, None)) if self._written_over else (None, None)
        if known is not None and id(t) not in known:
            raise refused(fn, t, location_of_user(), "it is used under another name, which shares its memory")

    def _in_memory_of(self, proxy: TensorProxy) -> list[TensorProxy]:
        """A proxy, and those that it was made of as a view or by an operation in place."""
        found = {proxy.name: proxy}
        for bsym in reversed(get_jit_ctx().computation_trace.bound_symbols):
            shares = _is_inplace_op(bsym) or makes_view(bsym)
            if shares and any(p.name in found for p in bsym.flat_proxy_outs):
                source = bsym.flat_proxy_args[0]
                found[source.name] = source
        return list(found.values())

    def range_of(self, t: torch.Tensor) -> Range | None:
        """As `Lifting` says, or by the operations that made a tensor of others."""
        return super().range_of(t) if self.concerns(t) else self._plain_ranges.of(t)

    # -- lifting ------------------------------------------------------------------------------------------------------

    def lift(self, recorder: NormRecorder, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        """The normed tensor for a plain one, by the policy; written once, and again after something was written into its memory."""
        self._check_not_written_over(t)
        if self._acquisition.fakes.proxy_of(t) is None and (id(t) not in self.derived or self.is_measured(t)):
            if self._found_itself(t) is not None and not self.is_measured(t):
                raise NormMismatchError(
                    with_details(
                        f"the parameter {self.name_of(t)}, whose norm is given, in a torch.autograd.Function that finds it by itself",
                        at=location_of_user(),
                        why="the trace knows there what it holds, and not what is given for it",
                        instead="give the function the parameter as an argument",
                    )
                )
            return kind.of(t, dims)  # a temporary of the operation being recorded
        if id(t) in self._norm_of and not self._writes.into(t):
            found = self.lift(recorder, self._norm_of[id(t)], kind, dims)
            out = kind._wrap(t, found.norm_size, found.perturbation_size, dims)
            out._facts = found._facts
            return out
        key = (id(t), kind, dims, is_grad_enabled(), self._writes.into(t))
        found = self.lifted.get(key)
        found = recorder.lifts.get(key) if found is None else found
        if found is None:
            found = recorder.lifts[key] = self._lift_once(key, recorder, t, kind, dims)
            found._is_leaf_value = True
        return found

    def _lift_once(
        self, key: tuple, recorder: NormRecorder, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]
    ) -> NormedTensor:
        """A new lift; one that was refused is refused again without asking the rules, which each way of making a tensor would.

        Raises:
            NormMismatchError, MissingNormRuleError: the rules of what made it say so.
        """
        key = (*key, by_data.is_allowed())
        if key in self._refused:
            raise self._refused[key].with_traceback(None)
        try:
            return self._new_lift(recorder, t, kind, dims)
        except (NormMismatchError, MissingNormRuleError) as e:
            if id(t) in self.derived:
                self._refused[key] = e
            raise

    def _new_lift(self, recorder: NormRecorder, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        size = self.size_of(t)
        if size == "measured":
            by_range = self._by_range(t, kind, dims)
            if by_range is not None:
                return recorder.hoist_norm(trace.OperationId(kind, "within"), lambda: by_range)
            return recorder.hoist_norm(trace.OperationId(kind, "of"), lambda: kind.of(t, dims))
        if size == "derived":
            for source in self.far_before(t):
                for own_kind, own_dims in kinds_on_the_way(source, kind, t, dims):
                    with contextlib.suppress(NormMismatchError, MissingNormRuleError):
                        self.lift(recorder, source, own_kind, own_dims)
            made = self.derived[id(t)][1]
            return recorder.hoist_norm(trace.OperationId(kind, "derived"), lambda: derived_norm(t, made, kind, dims))
        name = self.name_of(t)
        own = self.stated(name, t) or self._first.setdefault(name, NormSpec(kind, dims))
        if size == "given":
            return self._leaf(recorder, t, name, own, kind, dims)
        if size == "unit":
            return recorder.hoist_norm(trace.OperationId(kind, "unit"), lambda: _fit(own.around(t, 1.0), name, kind, dims))
        raise NormMapKeyError(
            with_details(
                f"normed_state_dict has no norm for {name!r}",
                at=location_of_user(),
                instead="add it, or build the norm map with parameters='measured' or 'unit'",
            )
        )

    def _by_range(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor | None:
        """A tensor that there are no values of, by the numbers that all its entries are between."""
        largest = self.largest_without_values(t)
        if largest is None:
            return None
        with contextlib.suppress(NormMismatchError):
            return conversions.convert(NormSpec(LinfTensor, ()).around(t, largest), kind, dims)
        return None

    def largest_without_values(self, t: torch.Tensor) -> float | None:
        """As `Lifting` says; a norm map has no values of what it makes of its arguments: ``(x > 0).float()`` of a normed x."""
        if self._acquisition.has_data or not self._is_without_values(t):
            return None
        found = self.range_of(t)
        return None if found is None or math.isinf(found.largest_modulus) else found.largest_modulus

    def _is_without_values(self, t: torch.Tensor) -> bool:
        """Whether it was made of a NormedTensor's entries, or of a tensor on the meta device that no operation has made."""
        proxy = self._acquisition.fakes.proxy_of(t)
        if proxy is None:
            return False
        origins = _origins(proxy, with_writes=True)
        if any(isinstance(p, SubclassProxy) for p in origins):
            return True
        given = [self._acquisition.fakes.real_input(p) for p in origins]
        return any(g is not None and g.is_meta for g in given)

    def _leaf(
        self, recorder: NormRecorder, t: torch.Tensor, name: str, own: NormSpec, kind: type[NormedTensor], dims: tuple[int, ...]
    ) -> NormedTensor:
        with _disable_current_modes():  # a bare tensor's value is looked at: it must not be negative
            real = self.leaves.tensors(name)
        with recorder.paused():
            fakes = tuple(torch.empty((), dtype=r.dtype, device=r.device) for r in real)
        recorder.leaves.append((name, fakes, tuple(r.requires_grad for r in real)))
        return _fit(self.leaves.normed(name, t, own.kind, own.elem_dims, fakes), name, kind, dims)


def _origins(proxy: TensorProxy, *, with_writes: bool) -> list[TensorProxy]:
    """The tensors that no operation of the trace made, of which one was made in the end; of wrappers' insides the wrappers.

    With what was written into the memory of one on the way, or without, so that a buffer is one whatever is written into it.
    """
    bsyms = get_jit_ctx().computation_trace.bound_symbols
    memory = _memories(bsyms)
    needed, wrappers = {proxy.name: proxy}, []
    for bsym in reversed(bsyms):
        is_write = with_writes and bool(bsym.flat_proxy_args) and bool(_is_inplace_op(bsym))
        writes = is_write and _memory(bsym.flat_proxy_args[0], memory) in {_memory(p, memory) for p in needed.values()}
        if writes or any(p.name in needed for p in bsym.flat_proxy_outs):
            given = _read_by(bsym)
            for p in bsym.flat_proxy_outs:
                needed.pop(p.name, None)
            if bsym.sym.id == trace.FLATTEN.id:
                wrappers += given
            else:
                needed |= {p.name: p for p in given}
    return [*needed.values(), *wrappers]


def _read_by(bsym: BoundSymbol) -> list[TensorProxy]:
    """The tensors that an operation is given, but those that it asks for their shape or dtype alone (``mask.type_as(x)``)."""
    given = [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
    if not bsym.subsymbols:
        return given
    inside = {p.name for b in bsym.subsymbols for p in _read_by(b)}
    return [p for p in given if p.name in inside]


def _memories(bsyms: Sequence[BoundSymbol]) -> dict[str, str]:
    """By name of a view, or of what a write returns, the name of what lies there first."""
    found: dict[str, str] = {}
    for bsym in bsyms:
        if bsym.flat_proxy_args and (_is_inplace_op(bsym) or makes_view(bsym)):
            first = _memory(bsym.flat_proxy_args[0], found)
            found |= {p.name: first for p in bsym.flat_proxy_outs if p.name != first}
    return found


def _memory(proxy: Any, memories: Mapping[str, str]) -> str:
    return memories.get(proxy.name, proxy.name)


def _fit(normed: NormedTensor, name: str, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
    try:
        return conversions.convert(normed, kind, dims)
    except NormMismatchError as e:
        raise NormMismatchError(f"the norm given for parameter {name!r} does not fit its use: {e}") from e


def _members(model: torch.nn.Module) -> dict[int, tuple[str, str]]:
    tables = ("_buffers", model.named_buffers), ("_parameters", model.named_parameters)
    return {id(t): (table, name) for table, named in tables for name, t in named()}
