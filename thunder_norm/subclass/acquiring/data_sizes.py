"""Sizes that are values, and values that a program asks for.

They are computed from the inputs of the call at hand while a trace is acquired, and again before each use.

What an operation like `nonzero` returns for tensors without data is not known, nor which way a condition goes.  So the operations of the
program that its arguments come from run on the real inputs of the call, and the prologue of the trace runs them again: where a size or
an answer is another, the trace does not serve the call, and the program is acquired anew.  Nothing of this happens in programs without
such an operation.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from thunder_norm.errors import AcquiredAnewWarning, UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring import plain_values
from thunder_norm.subclass.acquiring.answers import Answer
from thunder_norm.subclass.acquiring.fakes import Fakes
from thunder_norm.subclass.acquiring.fallback import is_kept
from thunder_norm.subclass.acquiring.integer_values import GIVEN_AGAIN
from thunder_norm.subclass.acquiring.plain_parts import Parts
from thunder_norm.subclass.acquiring.recomputation import Call, Place, as_recorded, checking
from thunder_norm.subclass.acquiring.sized import Sized, like, sizes_of
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.guards import MAX_TRACES, use_for_one_call
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.trees import flat_tensors, map_tensors
from thunder.core.compile_data import _compile_data
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol


@dataclass(frozen=True, eq=False)
class _Value:
    """One of the tensors that an operation returned."""

    step: _Step
    index: int


@dataclass(frozen=True, eq=False)
class _Met:
    """A tensor that no recorded operation made: an input, or what Thunder computed; as it is after so many writes into plain tensors."""

    fake: torch.Tensor
    writes: int
    is_as_met: bool  # nothing has become of it that only its fake knows


@dataclass(frozen=True, eq=False)
class GivenInput:
    """An input of the computation, and the tensor that it is in the call at hand."""

    proxy: TensorProxy
    real: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Step:
    """An operation, its tensors replaced by what they are known by."""

    number: int  # operations run in this order
    func: Callable
    arguments: tuple[tuple, dict]
    written: plain_values.Written | None = None  # by Thunder, if it is what that makes one value of

    def operands(self) -> Iterator[_Value | _Met | GivenInput]:
        """What it takes."""
        return (v for v in tree_leaves(self.arguments) if isinstance(v, _OPERANDS))

    def run(self, value: Callable[[Any], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors that it returns, with these values for what it takes."""
        return flat_tensors(_called(self.func, self.arguments, value))


_OPERANDS = (_Value, _Met, GivenInput)
_OF_ONE_RUN = "it is computed from random numbers, from memory into which nothing was written, or by an operator that does more than return tensors"


class UnknownValueError(Exception):
    """Why a value is not known."""


def _called(func: Callable, arguments: tuple[tuple, dict], value: Callable[[Any], torch.Tensor]) -> Any:
    args, kwargs = tree_map(lambda v: value(v) if isinstance(v, _OPERANDS) else v, arguments)
    return func(*args, **kwargs)


class DataSizes:
    """Where the tensors of one acquisition come from, and the operations whose sizes are values."""

    def __init__(self, fakes: Fakes) -> None:
        self._fakes = fakes
        self._made: dict[int, tuple[torch.Tensor, _Value]] = {}  # by the identity of fakes
        self._given: dict[int, GivenInput] = {}  # inputs, by the identity of their fakes
        # what Thunder computed or wrote into, None where it is as it was given: by the identity of fakes and the writes before
        self._plain: dict[tuple[int, int], _Step | None] = {}
        self._program = plain_values.ProgramSoFar()
        self._parts = Parts()
        self._numbers = itertools.count(1)
        self._sized: list[_Step] = []
        self._has_warned = False
        self.are_known = True  # whether there is a call at hand
        self.hindrance = _no_data  # why the values of an input are not known; None where they are
        self._results: dict[int, tuple[torch.Tensor, ...]] = {}  # of operations by their numbers, for the inputs at hand

    def note_input(self, fake: torch.Tensor, real: torch.Tensor, proxy: TensorProxy) -> None:
        """An inner tensor of an input."""
        self._given[id(fake)] = GivenInput(proxy, real)

    def forget_inputs(self) -> None:
        """Let go of the inputs at hand, and of what was computed from them."""
        self.are_known = False
        for known in (self._given, self._plain, self._results):
            known.clear()
        self._parts.forget_results()

    def note(self, func: Callable, args: tuple, kwargs: dict, outputs: Sequence[torch.Tensor]) -> None:
        """An operation was recorded; what it writes into is a result of its own from now on."""
        step = _Step(next(self._numbers), func, map_tensors(self._operand, (args, kwargs)))
        if isinstance(func, Sized):
            given = (args[0], like(args[1], func.func), *args[2:])
            self._sized.append(_Step(step.number, func, map_tensors(self._operand, (given, kwargs))))
        self._made.update({id(t): (t, _Value(step, index)) for index, t in enumerate(outputs)})

    def _operand(self, t: torch.Tensor) -> Any:
        if not isinstance(t, FakeTensor):
            return t
        found = self._made.get(id(t))
        if found is not None:
            return found[1]
        first = self._fakes.first_proxy_of(t)
        return _Met(t, self._program.num_writes(), first is None or first is self._fakes.proxy_of(t))

    # -- the call at hand ---------------------------------------------------------------------------------------------

    def run(self, func: Any, args: tuple, kwargs: dict, asks: Callable | None = None) -> tuple[Sized, tuple, Any]:
        """What stands for an operation whose sizes are values, what it is called with, and fakes of what it returns.

        Args:
            func: the operation.
            args: what it is called with.
            kwargs: the same, by name.
            asks: who knows the values of tensors, where that is another acquisition; see `ask`.

        Raises:
            UnsupportedOpError: the values of its arguments cannot be computed.
        """
        given = (like(args[0], func), *args[1:])
        try:
            if asks is not None:
                return self._sized_by(asks, func, args, (given, kwargs))
            result = self._result(_Step(next(self._numbers), func, map_tensors(self._operand, (given, kwargs))))
        except UnknownValueError as e:
            raise UnsupportedOpError(
                with_details(
                    f"data-dependent control flow: what {func} returns depends on the values of a tensor",
                    at=location_of_user(),
                    why=str(e),
                    instead="use torch.where, or compute it outside the jitted function",
                )
            ) from None
        self._warn_of_many(f"the size of what {func} returns", "torch.where(mask, x, 0), or what else keeps its size")
        sized = Sized(func, tuple([t.dtype for t in flat_tensors(result)]))
        return sized, (sizes_of(result), *args), map_tensors(self._fakes.new, result)

    def _sized_by(self, asks: Callable, func: Any, args: tuple, given: tuple[tuple, dict]) -> tuple[Sized, tuple, Any]:
        """The same, by what another acquisition says of the sizes: it has the trace that the operation is a part of."""
        leaves, spec = tree_flatten(given)
        at = [i for i, v in enumerate(leaves) if isinstance(v, FakeTensor)]
        known = [None if isinstance(v, FakeTensor) else v for v in leaves]
        form: list[Any] = []  # of what it returns

        def sizes(*tensors: torch.Tensor) -> list[list[int]]:
            values = list(known)
            for i, t in zip(at, tensors, strict=True):
                values[i] = t
            own_args, own_kwargs = tree_unflatten(values, spec)
            result, returned = tree_flatten(func(*own_args, **own_kwargs))
            form[:] = tuple([t.dtype for t in result]), returned
            return [list(t.shape) for t in result]

        found = tuple(map(tuple, asks(sizes, [leaves[i] for i in at])))
        dtypes, returned = form
        sized = Sized(func, dtypes)
        return sized, (found, *args), tree_unflatten(sized(found, *args), returned)

    def ask(self, func: Callable, given: Sequence[torch.Tensor | NumberProxy]) -> Any:
        """What a function of tensors says of some, or of numbers made of their values; the trace serves calls in which it says the same.

        Args:
            func: returns a number, or a list of numbers.
            given: fakes, and numbers of the trace at hand.

        Raises:
            UnknownValueError: the values cannot be computed.
            Exception: what `func` raises.
        """
        operands = [_Value(self._number(v), 0) if isinstance(v, NumberProxy) else self._operand(v) for v in given]
        answer = self._result(_Step(next(self._numbers), func, (tuple(operands), {})))
        self._warn_of_many(
            "a value that the program asks for", "torch.where(condition, a, b), or an operation on the tensor itself"
        )
        self._sized.append(_Step(next(self._numbers), Answer(func), ((answer, *operands), {})))
        return answer

    def _result(self, step: _Step) -> Any:
        """What an operation returns in the call at hand.

        Raises:
            UnknownValueError: the values of its arguments cannot be computed.
        """
        needed_now = self._checked(step)
        with _disable_current_modes(), as_recorded():
            for needed in needed_now:
                if needed is not step:
                    self._results[needed.number] = needed.run(self._value)
            return _called(step.func, step.arguments, self._value)

    def why_unknown(self, t: torch.Tensor) -> str | None:
        """Why the values of a fake are not known in the call at hand; None if they are."""
        try:
            self._checked(_Step(next(self._numbers), torch.Tensor.sum, ((self._operand(t),), {})))
        except UnknownValueError as e:
            return str(e)
        return None

    def _checked(self, step: _Step) -> list[_Step]:
        if not self.are_known:
            raise UnknownValueError(_NO_VALUE)
        return self._needed([step], self._results)

    def _place(self, proxy: TensorProxy) -> Any:
        real = self._fakes.real_input(proxy)
        return proxy.name if real is None or isinstance(real, FakeTensor) or real.is_meta else real.untyped_storage()._cdata

    def _warn_of_many(self, what: str, instead: str) -> None:
        """Each trace is looked at, and kept: the first ones alone are."""
        _, stats = _compile_data.get()
        if stats is None or len(stats.interpreter_cache) < MAX_TRACES or self._has_warned:
            return
        self._has_warned = True
        use_for_one_call()
        warnings.warn(
            with_details(
                f"{what} was another in {MAX_TRACES} calls: further ones are acquired anew in each call",
                at=location_of_user(),
                why="a trace has numbers for sizes and for values that are asked for, so that each of them is another trace",
                instead=instead,
            ),
            AcquiredAnewWarning,
            stacklevel=2,
        )

    def _value(self, operand: _Value | _Met | GivenInput) -> torch.Tensor:
        if isinstance(operand, _Value):
            return self._results[operand.step.number][operand.index]
        found = self._origin(operand)
        return self._results[found.number][0] if isinstance(found, _Step) else found.real

    def as_function(self, func: Callable, given: Sequence[torch.Tensor]) -> tuple[Callable, list[torch.Tensor]]:
        """A function of tensors of what no recorded operation made, and the fakes of these.

        Raises:
            UnknownValueError: an operation on the way makes something else each time.
        """
        last = _Step(next(self._numbers), func, (tuple(map(self._operand, given)), {}))
        steps = self._needed([last], origin=lambda _: None)
        met = list({id(v.fake): v.fake for step in steps for v in step.operands() if isinstance(v, _Met)}.values())

        def function(*tensors: torch.Tensor) -> Any:
            of_met, results = dict(zip(map(id, met), tensors, strict=True)), dict[int, tuple[torch.Tensor, ...]]()

            def value(v: Any) -> torch.Tensor:
                return results[v.step.number][v.index] if isinstance(v, _Value) else of_met[id(v.fake)]

            for step in steps[:-1]:
                results[step.number] = step.run(value)
            return _called(func, last.arguments, value)

        return function, met

    def _needed(
        self, steps: Sequence[_Step], known: Mapping[int, Any] = MappingProxyType({}), origin: Callable | None = None
    ) -> list[_Step]:
        """These steps and those that their arguments come from, in order, down to what is known, or to what no step of these made.

        Raises:
            UnknownValueError: one of them makes something else each time.
        """
        origin = origin or self._origin
        found: dict[int, _Step] = {}
        pending = list(steps)
        while pending:
            step = pending.pop()
            if step.number in found or step.number in known:
                continue
            if is_kept(step.func) or plain_values.is_unwritten(getattr(step.func, "__name__", "")) or not callable(step.func):
                raise UnknownValueError(_OF_ONE_RUN)
            if getattr(step.func, "namespace", "").startswith("_c10d"):
                raise UnknownValueError(
                    "it is computed by several processes, of which one may acquire its program anew and others not"
                )
            found[step.number] = step
            origins = [v.step if isinstance(v, _Value) else origin(v) for v in step.operands()]
            pending.extend(origin for origin in origins if isinstance(origin, _Step))
        return sorted(found.values(), key=lambda step: step.number)

    # -- where a tensor comes from ------------------------------------------------------------------------------------

    def _origin(self, operand: _Met | GivenInput) -> GivenInput | _Step:
        """The input that a tensor is, or the operation that it is the result of.

        Raises:
            UnknownValueError: it has no values.
        """
        if isinstance(operand, GivenInput):
            return operand
        if not operand.is_as_met:
            raise UnknownValueError("it is computed from a plain tensor that the program has written into")
        fake = operand.fake
        proxy = self._fakes.first_proxy_of(fake)
        if proxy is None and id(fake) not in self._given:
            raise UnknownValueError(_NO_VALUE)
        key = id(fake), operand.writes
        if proxy is not None and key not in self._plain:
            if not self._program.is_open:  # in the backward: what is not known by now
                raise UnknownValueError(_NO_VALUE)
            made = self._program.made(proxy, self._place, before=operand.writes)
            written = plain_values.Written(proxy, made, lambda found: found)
            self._plain[key] = self._of_written(written) if made.operations else None
        if (found := self._plain.get(key)) is not None:
            return found
        if id(fake) not in self._given:
            self._given[id(fake)] = self._input(proxy)
        return self._with_data(self._given[id(fake)])

    def _input(self, proxy: TensorProxy) -> GivenInput:
        """The input of the computation that a proxy stands for."""
        real = self._fakes.real_input(proxy)
        given = next((g for g in self._given.values() if g.proxy.name == proxy.name), None)
        if real is None and given is None:
            raise UnknownValueError(_NO_VALUE)
        get_jit_ctx().computation_trace.bound_symbols.append(GIVEN_AGAIN.bind(proxy, output=None))
        return self._with_data(given if real is None else GivenInput(proxy, real))

    def _with_data(self, given: GivenInput) -> GivenInput:
        why = self.hindrance(given.proxy, given.real)
        if why is not None:
            raise UnknownValueError(why)
        return given

    def _number(self, number: NumberProxy) -> _Step:
        """What Thunder wrote for a number that is made of values, as one operation on inputs that returns a tensor."""
        made = self._program.made(number, self._place)
        return self._of_written(plain_values.Written(number, made, plain_values.as_tensor))

    def _of_written(self, written: plain_values.Written) -> _Step:
        proxy, made, as_tensor = written
        trace = get_jit_ctx().computation_trace
        if len(trace.scopes) != 1:
            raise UnknownValueError("it is computed from plain tensors in a region")
        if torch._C._is_any_autocast_enabled():
            raise UnknownValueError("it is computed from plain tensors under autocast, which is not applied yet")
        if any(type(p) is not TensorProxy for p in made.given):
            raise UnknownValueError(_NO_VALUE)
        if not plain_values.are_the_same_each_time(made.operations, proxy):
            raise UnknownValueError(_OF_ONE_RUN)
        if written.may_be_joined:
            run, given = self._parts.function(proxy, made)
        else:
            run, given = plain_values.runnable(proxy, made, self._place), made.given
        if run is None:
            raise UnknownValueError("the program has written into memory that several of its inputs share")
        inputs = tuple([self._input(p) for p in given])
        return _Step(-next(self._numbers), lambda *tensors: as_tensor(run(*tensors)), (inputs, {}), written)

    # -- the prologue -------------------------------------------------------------------------------------------------

    def guards(self) -> list[BoundSymbol]:
        """Operations of the prologue: the sizes of results that are values are those that the trace was acquired with."""
        if not self._sized:
            return []
        given, check = self.conditions()
        return [bindable("check_sizes", check)(*(self._fakes.current(g.proxy) for g in given), output=None)]

    def conditions(self) -> tuple[list[GivenInput], Callable[..., None]]:
        """The inputs on whose values the trace depends, and what to call with those of another call.

        It raises a GuardError where a size or an answer is another than while the trace was acquired.
        """
        self._results.clear()
        self._parts.forget_results()
        steps = self._needed(self._sized)
        joined = [step for step in steps if step.written is not None and step.written.may_be_joined]
        together = _joined(joined) if len(joined) > 1 else None
        where = {} if together is None else {step.number: Place(together.number, i) for i, step in enumerate(joined)}
        if together is not None:
            steps = [together, *(step for step in steps if step.number not in where)]
        given: dict[str, GivenInput] = {}

        def place(operand: Any) -> Place:
            origin = operand.step if isinstance(operand, _Value) else self._origin(operand)
            if isinstance(origin, _Step):
                if origin.number in where:
                    return where[origin.number]
                return Place(origin.number, operand.index if isinstance(operand, _Value) else 0)
            given[origin.proxy.name] = origin
            return Place(0, list(given).index(origin.proxy.name))

        # nothing of this call stays with the trace
        arguments = [tree_map(lambda v: place(v) if isinstance(v, _OPERANDS) else v, step.arguments) for step in steps]
        calls = [Call(step.number, step.func, args, kwargs) for step, (args, kwargs) in zip(steps, arguments, strict=True)]
        return list(given.values()), checking(calls)


def _joined(steps: Sequence[_Step]) -> _Step:
    """Those that Thunder wrote as one, whose results are theirs."""
    run, proxies = plain_values.joined([step.written for step in steps if step.written is not None])
    inputs = {v.proxy.name: v for step in steps for v in step.operands() if isinstance(v, GivenInput)}
    return _Step(steps[0].number, run, (tuple([inputs[p.name] for p in proxies]), {}))


_NO_VALUE = "it is computed from a tensor whose value is not known while the trace is acquired"


def _no_data(proxy: TensorProxy, real: torch.Tensor) -> str | None:
    is_without = isinstance(real, FakeTensor) or real.is_meta
    return "it is computed from a tensor without data" if is_without else None
