"""Running an operation on fake wrappers and logging what reaches the inner tensors.

The user's own ``__torch_dispatch__`` runs, on fakes, under a dispatch mode that sees exactly the operations on plain tensors.
In-place operations are functionalised as they are logged: the mutated fake is the result of the functional variant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.model_state.shards import DTensor
from thunder_norm.subclass.acquiring import aliasing
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.autocast import Regions, UnderAutocast, regions, regions_of
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.acquiring.data_sizes import UnknownValueError
from thunder_norm.subclass.acquiring.effects import Effect, OfOperator, SameValues, with_effects
from thunder_norm.subclass.acquiring.functional_forms import LIKE, Drawn, declared, rewritten, with_generator, without_history
from thunder_norm.subclass.acquiring.lengths import is_ragged
from thunder_norm.subclass.recording.lists import is_on_lists, with_lists
from thunder_norm.subclass.recording.writing import Writing
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent_on_wrapper
from thunder_norm.trees import flat_tensors
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core import dtypes
from thunder.core.compile_data import get_compile_data

aten = torch.ops.aten

_ASSIGNING = frozenset({aten.index_put.default, aten.index_put_.default})
_BY_PLACE = frozenset({aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default})
_WAITING = {torch.ops._c10d_functional.wait_tensor.default} if torch.distributed.is_available() else frozenset()

# How large a constant tensor may be to be written into the trace as numbers.
MAX_CONSTANT_NUMEL = 4096


@dataclass(frozen=True)
class Recorded:
    """One operation on plain fakes: what was called, with what, and the tensors it returned.

    Attributes:
        is_constant: torch's function has it in a region of its own without gradients, as ``gaussian_nll_loss`` bounds variances in one.
    """

    func: Callable
    args: tuple
    kwargs: dict
    outputs: tuple[torch.Tensor, ...]
    result: Any
    is_in_place: bool = False
    is_constant: bool = False

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors among its arguments."""
        return flat_tensors((self.args, self.kwargs))


def needed(
    log: Sequence[Recorded], results: Iterable[torch.Tensor], always: Callable[[Callable], bool] = lambda func: False
) -> list[Recorded]:
    """The recorded operations that `results` depend on, and those whose function is `always` needed."""
    wanted = {id(t) for t in results}
    kept = []
    for recorded in reversed(log):
        if always(recorded.func) or any(id(t) in wanted for t in recorded.outputs):
            kept.append(recorded)
            wanted.update(map(id, recorded.inputs))
    return kept[::-1]


class Step:
    """Stands for the function of a recorded operation that writes itself into the trace."""

    def emit(self, *args: Any) -> tuple[Any, ...]:
        """Write the operation for proxies `args`; returns proxies for its outputs."""
        raise NotImplementedError


class Recorder(Writing):
    """Logs operations on plain fakes; leaves operations on wrappers to the wrappers."""

    def __init__(self, acquisition: Acquisition):
        super().__init__()
        self.acquisition = acquisition
        self.log: list[Recorded] = []
        self.hoisted: list[tuple[Any, list[Recorded], list[torch.Tensor]]] = []
        self.has_met_wrappers = False
        self.last_on_wrappers: tuple[Any, str] | None = None  # the last operation given to a class, and the class's name
        self._constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # fakes whose values are known
        self.turn: torch.Tensor | None = None
        self.is_differentiated = torch.is_grad_enabled()  # around the call: the program's regions are Thunder's affair
        self._is_paused = False
        self.autocast: Regions = ()  # around the operation at hand
        self._dispatching: set[type] = set()  # the classes that were given operations

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:  # a third of what reaches this
            return args[0].fake_device
        kwargs = kwargs or {}
        tensors = flat_tensors((args, kwargs))
        wrapper = next((t for t in tensors if is_wrapper(t)), None)
        if wrapper is not None:
            self.has_met_wrappers = True
            self.last_on_wrappers = func, type(wrapper).__name__
            self._dispatching.add(type(wrapper))
            return self._told_of_wrappers(func, types, args, kwargs)
        if self._is_paused:
            return func(*args, **kwargs)
        self.is_inside_no_grad = self._has_switched_off_gradients()
        if func in (aten._local_scalar_dense.default, aten.item.default):
            if id(args[0]) in self._constants:  # the operation made it of numbers
                with _disable_current_modes():
                    return self._constants[id(args[0])][1].item()
            known = None if self.acquisition.has_changed_integers() else self.acquisition.integers.read(args[0])
            if known is not None:
                return known
            if self._take_for_equal(args[0]):
                return True
            try:
                return self.acquisition.ask(torch.Tensor.item, [args[0]])
            except UnknownValueError as e:
                what = "the value of a tensor was asked for (.item(), bool(), int() or a condition)"
                raise data_dependent_on_wrapper(what, why=str(e)) from None
        func = declared(func, args)
        if is_on_lists(func):
            func, args = with_lists(func, args)
        if func in _ASSIGNING and self.acquisition.autograd.is_running:
            self._note_masks(args[1])
        autocast = regions_of(func, self.autocast, self._dispatching)
        effect = with_effects(func, autocast)
        if effect is not None:
            return self._record_operator(effect, args, kwargs)
        if func._schema.is_mutable:
            self.acquisition.equality.forget()
            if func is not aten.detach_.default:  # which torch.tensor itself calls
                self._constants.clear()
            return self._record_in_place(func, args, kwargs)
        if func is aten.detach.default and self._has_just_made(args[0]):
            return args[0]
        if func in _BY_PLACE:
            args = (self._laid_out(args[0]), *args[1:])
        func = UnderAutocast(func, autocast) if autocast else func
        try:
            result = _run_on_fakes(func, args, kwargs)
        except DataDependentOutputException:
            return self._answer(func, args, kwargs)
        except DynamicOutputShapeException:
            if not self._may_be_sized:
                raise
            func, args, result = self.acquisition.sizes.run(func, args, kwargs, self.acquisition.asks)
        if func in LIKE:
            func, args, kwargs = self._drawn_like(func, args, kwargs, result)
        self._append(func, args, kwargs, result)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            self.acquisition.equality.note(func, args, kwargs, result)
        self.acquisition.integers.note(func, args, kwargs, result)
        if isinstance(result, torch.Tensor):
            self._note_constant(func, args, kwargs, tensors, result)
        return result

    def _told_of_wrappers(self, func: Any, types: Sequence[type], args: tuple, kwargs: dict) -> Any:
        """What the classes of wrappers say, of which each is told of the others: plain tensors are of no class there, and fakes are."""
        if any(cls is DTensor for cls in types):  # torch does in C++ what it would say
            return NotImplemented
        classes = tuple([cls for cls in types if not issubclass(cls, FakeTensor)])
        for cls in classes:
            with self:
                result = cls.__torch_dispatch__(func, classes, args, kwargs)
            if result is not NotImplemented:
                return result
        told = "\n".join(f"  - tensor subclass {cls}" for cls in classes)
        raise TypeError(
            f"Multiple dispatch failed for 'torch._ops.{func}'; all __torch_dispatch__ handlers returned NotImplemented:\n\n{told}\n\n"
            "For more information, try re-running with TORCH_LOGS=not_implemented"
        )

    def _laid_out(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor whose elements the program takes by where they lie: as in eager mode, which hangs on how inputs lie."""
        self.acquisition.fakes.guard_layouts()
        if id(t) not in self.acquisition.fakes.computed or not aliasing.is_dense(t):
            return t
        return self.call(aliasing.laid_out, (t, aliasing.order(t)), {})

    def _drawn_like(self, func: Any, args: tuple, kwargs: dict, result: torch.Tensor) -> tuple[Any, tuple, dict]:
        """What is recorded for ``rand_like``: in the order of a result that lies in memory as in eager mode."""
        self.acquisition.fakes.guard_layouts()
        if result.is_contiguous() and kwargs.get("memory_format") is None:
            return func, args, kwargs
        kwargs = {name: v for name, v in kwargs.items() if name != "memory_format"}
        return Drawn(func), (args[0], tuple(result.stride()), *args[1:]), kwargs

    def _note_masks(self, indices: Sequence[torch.Tensor | None]) -> None:
        """Find out where masks come from as long as that is known: the backward may take as many elements as each has."""
        for t in indices:
            if t is not None and t.dtype is torch.bool and self._may_be_sized:
                self.acquisition.sizes.why_unknown(t)

    def _answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What an operation says of two tensors, or more, for the inputs of the call at hand: whether they are equal."""
        num_tensors = sum(isinstance(a, torch.Tensor) for a in args)
        others = args[num_tensors:]
        try:
            return self.acquisition.ask(lambda *tensors: func(*tensors, *others, **kwargs), args[:num_tensors])
        except UnknownValueError as e:
            raise data_dependent_on_wrapper(f"what {func} returns depends on the values of a tensor", why=str(e)) from None

    def _note_constant(self, func: Any, args: tuple, kwargs: dict, tensors: list[torch.Tensor], result: torch.Tensor) -> None:
        """Remember the value of what is computed from ``torch.tensor([1, 2, 3])`` alone: Python may ask for it."""
        if func is aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            self._constants[id(result)] = (result, args[0])
        elif torch.Tag.nondeterministic_seeded in func.tags:
            return
        elif tensors and all(id(t) in self._constants for t in tensors) and result.numel() <= MAX_CONSTANT_NUMEL:
            reals = tree_map(lambda v: self._constants[id(v)][1] if isinstance(v, torch.Tensor) else v, (args, kwargs))
            with _disable_current_modes():
                self._constants[id(result)] = (result, func(*reals[0], **reals[1]))

    def _has_just_made(self, t: torch.Tensor) -> bool:
        """Whether a factory made `t` last: torch.empty and its like detach what they return, which would seem to be a view."""
        last = self.log[-1] if self.log else None
        if last is None or not any(t is out for out in last.outputs):
            return False
        return not last.inputs

    def _take_for_equal(self, result: torch.Tensor) -> bool:
        """Whether `result` says that two tensors are equal; where that is not known, they are compared in each call."""
        compared = self.acquisition.equality.compared(result)
        if compared is None or self.acquisition.num_levels:
            return False
        if self.acquisition.has_changed_plain() or not self.acquisition.equality.are_same(*compared):
            self._record_effect(SameValues(location_of_user()), compared, {}, lambda: None)
            self.acquisition.equality.take_for_same(*compared)
        return True

    def _record_operator(self, effect: OfOperator, args: tuple, kwargs: dict) -> Any:
        self.acquisition.equality.forget()
        self._constants.clear()
        written = list({id(t): t for t in effect.written_tensors(args, kwargs)}.values())
        for t in written:
            self._check_may_mutate(effect.func, t, flat_tensors((args, kwargs)))
        if len(written) > 1 and len({t.untyped_storage()._cdata for t in written}) < len(written):
            raise UnsupportedOpError(with_details(f"{effect.func} writes into tensors that share memory", at=location_of_user()))
        run = UnderAutocast(effect.func, effect.regions) if effect.regions else effect.func
        return self._record_effect(effect, args, kwargs, lambda: _run_on_fakes(run, args, kwargs), written)

    def _record_effect(
        self, effect: Effect, args: tuple, kwargs: dict, run: Callable[[], Any], written: Sequence[torch.Tensor] = ()
    ) -> Any:
        """Log an operation with effects, that `run` runs, after those before it; `written` have changed when it is done."""
        if self.acquisition.num_levels:
            raise UnsupportedOpError(
                with_details(
                    f"{effect.__name__}, which does more than return tensors, in a function that is transformed",
                    at=location_of_user(),
                    why="a transformed function is a function of its arguments",
                )
            )
        holder = self if self.acquisition.is_finished else self.acquisition  # the backward has turns of its own
        before = holder.turn
        if before is None:
            before = self.call(aten.zeros.default, ([0],), {"dtype": torch.bool})
        with self.paused():
            holder.turn = turn = before.clone()
            result = run()
        aliases = {id(t): self._aliases(t) for t in written}
        returned = [t for t in flat_tensors(result) if all(t is not w for w in written)]
        with self.paused():  # autograd knows nothing of what is written: that keeps its history
            values = [t.clone() if self._has_history_of_thunders(t) else t for t in written]
        outputs = (turn, *returned, *values)
        self._note(effect, (before, *args), kwargs, outputs, result, is_in_place=bool(written))
        for t, value in zip(written, values, strict=True):
            if value is not t:
                self._note(rewritten, (t, self.call(without_history, (value,), {})), {}, (t,), t, is_in_place=True)
            self._renew(aliases[id(t)], t, are_detached=value is not t)
        return result

    def call(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run `func` on plain fakes and log it as one operation, whatever it decomposes into; a function of ours may say what it makes of fakes."""
        try:
            with self.paused():
                result = getattr(func, "on_fakes", func)(*args, **kwargs)
        except DynamicOutputShapeException:
            if not self._may_be_sized:
                raise
            func, args, result = self.acquisition.sizes.run(func, args, kwargs, self.acquisition.asks)
        self._append(func, args, kwargs, result)
        return result

    @property
    def _may_be_sized(self) -> bool:
        """Whether sizes may be taken from the inputs of the call: the operation at hand runs on these, and in each call once."""
        acquisition = self.acquisition
        is_over = acquisition.is_finished and not acquisition.sizes.are_known  # the first backward is recorded before
        return acquisition.asks is not None or not (acquisition.num_levels or is_over or acquisition.is_transformed)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside the block are not logged."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def hoist(self, operation: Any, make: Callable[[], Any], outputs_of: Callable[[Any], list[torch.Tensor]]) -> Any:
        """Run `make` and keep its log apart: it is written before the operation at hand, as an operation of its own."""
        outer, self.log = self.log, []
        try:
            result = make()
        finally:
            own, self.log = self.log, outer
        self.hoisted.append((operation, own, outputs_of(result)))
        return result

    def _note(
        self, func: Callable, args: tuple, kwargs: dict, outputs: tuple[torch.Tensor, ...], result: Any, is_in_place: bool = False
    ) -> None:
        func, args, kwargs = self.acquisition.lengths.late(*with_generator(func, args, kwargs))
        self.acquisition.sizes.note(func, args, kwargs, outputs)
        if not is_in_place:
            is_detach = func is aten.detach.default
            self.acquisition.fakes.note_views(outputs, flat_tensors((args, kwargs)), are_detached=is_detach)
        is_constant = self.is_inside_no_grad and func is not rewritten
        self.log.append(Recorded(func, args, kwargs, outputs, result, is_in_place, is_constant))

    def _append(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        outputs = flat_tensors(result)
        inputs = set(map(id, flat_tensors((args, kwargs))))
        if outputs and all(id(t) in inputs for t in outputs):
            return  # nothing happened: a cast to the same dtype, contiguous() of a contiguous tensor
        self._note(func, args, kwargs, outputs, result)


def _run_on_fakes(func: Any, args: tuple, kwargs: dict) -> Any:
    """What an operator returns for tensors without data; what waits for a tensor returns it, and its schema says nothing of that.

    Raises:
        UnsupportedOpError: a custom operator does not say it, or it computes with a ragged length as if that were a number.
    """
    if any(is_ragged(a) for a in args if isinstance(a, torch.SymInt)) and torch.Tag.pointwise in func.tags:
        raise UnsupportedOpError(
            with_details(
                f"{func} of a ragged length",
                at=location_of_user(),
                why="it stands for a length of each sequence, and is no number",
                instead="compute with x.offsets().diff()",
            )
        )
    if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
        return func(*args, **kwargs)
    if func in _WAITING:
        return aten.alias.default(args[0])
    try:
        return func(*args, **kwargs)
    except RuntimeError as e:
        if not isinstance(e, UnsupportedOperatorException) and "fake impl" not in str(e):
            raise
        raise UnsupportedOpError(
            with_details(
                f"{func} does not say what it returns for tensors without data",
                at=location_of_user(),
                needed="torch.library.register_fake for it",
            )
        ) from e


@contextlib.contextmanager
def recording(acquisition: Acquisition) -> Iterator[Recorder]:
    """Run operations on fakes inside the block and log them.

    Where only inner tensors are differentiated no fake requires grad: that is Thunder's, on the operations written into the trace.
    """
    recorder = (acquisition.recorder_kind or Recorder)(acquisition)
    # also before there is anything to differentiate: what is written later into a view taken now is seen if that was taken with gradients
    with torch.set_grad_enabled(is_grad_enabled()), autocasting():
        recorder.autocast = regions()
        with acquisition.fakes.mode, recorder:
            yield recorder


def in_autocast_region() -> bool:
    """Whether the program itself has switched autocast on around the operation at hand."""
    return any(enabled for _, _, enabled in autocast_regions())


def autocast_regions() -> tuple[tuple[str, Any, bool], ...]:
    """For each device the innermost of these regions: its dtype, and whether autocast is on there."""
    cd = get_compile_data()
    found = {} if cd is None else {device: (dtype, enabled) for device, dtype, enabled in cd.autocast_stack.stack}
    return tuple((device, dtype, enabled) for device, (dtype, enabled) in found.items())


@contextlib.contextmanager
def autocasting() -> Iterator[None]:
    """The autocast regions of the program around the operation at hand; Thunder keeps their stack without entering them."""
    with contextlib.ExitStack() as stack:
        for device, dtype, enabled in autocast_regions():
            dtype = dtypes.to_torch_dtype(dtype)
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield
