"""What is known while one trace is acquired, and what a transform may decide about it.

An acquisition has the fakes and wrappers met (`fakes`), what torch's autograd follows (`autograd`), what was refused (`refused`), its
`phase`, and whether the program has wrappers (`presence`).
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.subclass.acquiring.aliasing import may_share_memory
from thunder_norm.subclass.acquiring.arguments import is_in_place, mapped, value_of
from thunder_norm.subclass.acquiring.autograd import Autograd, is_grad_enabled, may_have_history
from thunder_norm.subclass.acquiring.data_sizes import DataSizes, UnknownValueError
from thunder_norm.subclass.acquiring.equality import Equality
from thunder_norm.subclass.acquiring.fakes import Fakes, Wrappers
from thunder_norm.subclass.acquiring.integer_values import IntegerValues
from thunder_norm.subclass.acquiring.lengths import Lengths
from thunder_norm.subclass.acquiring.refused import Refused
from thunder_norm.subclass.acquiring.tape import Tape
from thunder_norm.subclass.acquiring.writes import Writes
from thunder_norm.subclass.acquiring.written_so_far import WrittenSoFar
from thunder_norm.subclass.classes.protocol import WrapperSpec
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent_on_wrapper
from thunder_norm.tracing.translation import for_torch
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


@dataclass(frozen=True)
class LeafOrigin:
    """An input of the computation that is a norm given for a parameter."""

    name: str
    index: int


@dataclass(frozen=True)
class WrapperOrigin:
    """An input of the computation that is an inner tensor of an input wrapper."""

    wrapper: torch.Tensor
    leaf_name: str


# Where the context of an acquisition, and then what is compiled, has its state.
ACQUISITION = "_thunder_norm_acquisition"


class Phase(enum.Enum):
    """How far an acquisition is."""

    WAITING = enum.auto()  # the interpreter has called nothing yet
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Presence(enum.IntEnum):
    """What is known of wrappers in the program; it only grows."""

    UNKNOWN = 0
    MENTIONED = 1  # the program's code names a wrapper class that it may construct
    EXPECTED = 2  # an argument or a parameter is one, although none was met yet
    MET = 3


@dataclass(frozen=True)
class StandIn:
    """A tensor in the place of a plain one that the program holds, as it has written into that, wrappers perhaps."""

    proxy: TensorProxy
    new: TensorProxy
    position: int  # from where on in the computation, by `fakes.num_made`
    is_written_too: bool = False  # the plain one has the same values, and goes on having them


class Opaque:
    """The objects that cannot be taken apart; see `opaque_objects`."""

    def __init__(self) -> None:
        self.is_run = False  # they are not refused
        self.is_met = False
        self.has_changed = False  # one was written into
        self.once: list[str] = []  # the calls that cannot be run again, to differentiate them
        self.plain: list[TensorProxy] = []  # plain tensors that may share memory with one
        self.examples: dict[str, torch.Tensor] = {}  # for plain proxies, by name


class Acquisition:
    """The state of one acquisition."""

    recorder_kind: Any = None  # what logs its operations, if it is not `record.Recorder`
    roles: Mapping[str, str] = MappingProxyType({})  # inner tensors that are called by their role: the attribute, a letter

    def __init__(self) -> None:
        self.phase = Phase.WAITING
        self.presence = Presence.UNKNOWN
        self.watches = False  # whether every call of the program must be looked at: there may be wrappers, or norms
        self.fakes = Fakes(self._watch)
        self.wrappers = Wrappers()
        self.writes = Writes(self.fakes)
        self.lengths = Lengths()
        self.integers = IntegerValues(self.fakes, self.lengths)
        self.sizes = DataSizes(self.fakes)
        self._written = WrittenSoFar()
        self.autograd = Autograd(self.fakes)
        self.refused = Refused()
        self.hooks_of_inputs: collections.OrderedDict[int, Any] = collections.OrderedDict()  # see `tensor_hooks`
        self.hooks_of_backward: list[Any] = []  # and of what it computes
        self.flags_asked: set[str] = set()  # names of tensors of which the program has asked whether they require grad
        self.flags_set: list[torch.Tensor] = []  # inputs that the program wants to require grad, see `flags_of_inputs`
        self.retained: list[tuple[torch.Tensor, str | None]] = []  # fakes that are to keep their gradients, and where it is said
        self.tape = Tape()
        self.finished_trace: TraceCtx | None = None  # the computation that was acquired
        self.equality = Equality()
        self.outcomes: dict[Any, Any] = {}  # of torch's operations on plain tensors; see `agreement`
        self.opaque = Opaque()
        self.turn: torch.Tensor | None = None  # of the last operation with effects
        self.is_transformed = False  # the program is a transformed function, which has its own place in torch's autograd
        self.num_levels = 0  # how many functions under function transforms are being interpreted, one in the other
        self.asks: Callable | None = None  # who knows the values of what it takes, where it is of one operation in a program
        self.origins: dict[str, LeafOrigin | WrapperOrigin] = {}  # filled when the traces are lowered
        self.stand_ins: dict[str, StandIn] = {}  # by name: plain proxies that the program holds, for which others stand by now
        self.fully_sharded: dict[int, Any] = {}  # how parameters are gathered of which the program sees the whole, by identity
        self.gathered: set[int] = set()  # the proxies of these, by identity
        self.of_functions: set[str] = set()  # plain results of operations that `__torch_function__` of a class did itself
        self.side_effect_guards: list[Any] = []  # the places that the program writes into hold what they held

    # -- what a transform may change ----------------------------------------------------------------------------------

    def begin(self, args: tuple, kwargs: dict) -> None:
        """Called once, with the arguments of the jitted function, before its first operation."""

    def run(self, recorder: Any, fn: Callable, args: Any, kwargs: Any) -> Any:
        """Run one operation on fakes while `recorder` logs."""
        return fn(*args, **kwargs)

    def fetching(self, names: Sequence[str]) -> Callable[[], tuple[torch.Tensor, ...]]:
        """What the prologue calls for inputs that are no arguments: all first tensors of these `names`, then all second ones."""
        raise NotImplementedError

    def wished_names(self, bsym: BoundSymbol) -> Iterator[tuple[TensorProxy, str]]:
        """Names for what an operation of the computation makes, besides those of inner tensors."""
        return iter(())

    def changing_with(self, tree: Any) -> list[torch.Tensor]:
        """Further wrappers that an operation on those in `tree` may change."""
        return []

    def write_hoisted(self, recorder: Any) -> None:
        """Write what must stand in the trace before the operation just recorded."""

    def beyond_no_grad(self) -> set[int]:
        """The fakes, by identity, that `torch.no_grad` is not about: what is computed from them is differentiated anyway."""
        return set()

    def kept(self, value: torch.Tensor) -> torch.Tensor:
        """What an attribute or a container of the user's holds when the program puts a wrapper there; called with fakes too."""
        return value

    def lets_stand_for(self, tensor: TensorProxy, value: TensorProxy) -> bool:
        """Whether a value stands for an input from here on, whose own memory the call leaves as it is; notes it if so."""
        return False

    def hindrance_to_new_memory(self, tensor: TensorProxy) -> str | None:
        """Why an input of the program may not be given other memory; None if it may."""
        return "the gradients of wrappers are followed through the memory it had" if self.autograd.is_running else None

    def hindrance_to_attributes(self, fake: torch.Tensor) -> str | None:
        """Why the attributes of a wrapper may not be set; None if they may."""
        return "a function under a transform does it" if self.num_levels or self.is_transformed else None

    def guards(self, inputs: Sequence[SubclassProxy]) -> list[Any]:
        """Bound symbols the prologue must run besides the checks of its inputs; `inputs` are the wrappers among these."""
        return [*self.side_effect_guards, *self.integers.guards(inputs), *self.sizes.guards()]

    @property
    def intercepts_plain(self) -> bool:
        """Whether operations on plain tensors may be taken over (`wants` says which)."""
        return self._follows_plain

    @property
    def _follows_plain(self) -> bool:
        """Whether plain tensors have more to them than Thunder knows: gradients of wrappers, or a value that was replaced."""
        return self.autograd.is_running or self.fakes.follows_plain or self.lengths.is_on

    def wants(self, fn: Callable, args: tuple, kwargs: dict) -> bool:
        """Whether an operation without wrappers among its (interpreter-wrapped) arguments is taken over."""
        if not self._follows_plain:
            return False
        values = tree_flatten(([value_of(a) for a in args], [value_of(v) for v in kwargs.values()]))[0]
        proxies = [v for v in values if isinstance(v, TensorProxy)]
        if any(p.name in self.fakes.replaced or self.lengths.is_symbol_in(self.fakes.known(p)) for p in proxies):
            return True
        if proxies and self.fakes.follows_memory and (is_in_place(fn) or may_share_memory(fn)):
            return True
        first = self.fakes.known(proxies[0]) if proxies else None
        is_followed = first is not None and (self.fakes.is_inside(first) or self.autograd.is_running)
        if is_in_place(fn) and first is not None and (is_followed or self.fakes.replaced):
            return True  # its other aliases only its fake knows
        if may_share_memory(fn) and is_followed:  # a view that may be written into
            return True
        return self.autograd.is_running and is_grad_enabled() and any(self.autograd.requires_grad(p) for p in proxies)

    @property
    def has_own_formulas(self) -> bool:
        """Whether gradients are others than torch's are of what an autograd function computes as a whole."""
        return False

    def computes_wrappers(self, function: Callable, given: Sequence[Any]) -> bool:
        """Whether a function that runs uninterpreted, or is transformed, and is given no wrapper is one of wrappers all the same."""
        return False

    def plain_call(self, fn: Callable, args: tuple, kwargs: dict) -> Callable[[], Any] | None:
        """What to do in place of an operation on wrappers that is none; None for all others.  `args` and `kwargs` hold proxies."""
        return None

    def meets_gradient(self, args: tuple, kwargs: dict) -> bool:
        """Whether torch's autograd has to start: a plain tensor that requires grad meets wrappers without any."""
        if self.num_levels or self.autograd.is_running or not is_grad_enabled():  # transforms differentiate inner tensors
            return False
        return self.autograd.meets_gradient(args, kwargs)

    def is_followed(self, values: Sequence[Any]) -> bool:
        """Whether torch's autograd has to follow a function of these that makes or takes wrappers: one of them requires grad."""
        is_torchs = is_grad_enabled() and not self.num_levels
        return is_torchs and any(isinstance(v, TensorProxy) and self.autograd.requires_grad(v) for v in values)

    # -- wrappers -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self.watches = True

    def note_presence(self, presence: Presence) -> None:
        """There are, or may be, wrappers: every call must be looked at."""
        self.presence = max(self.presence, presence)
        self.watches = True

    @property
    def is_finished(self) -> bool:
        """Whether its proxies mean nothing any more."""
        return self.phase is Phase.FINISHED

    def forget_inputs(self) -> None:
        """Let go of the tensors of the call at hand; what the backward knows of the acquisition lives as long as the trace."""
        self.fakes.forget_inputs()
        self.wrappers.forget_inputs()
        self.sizes.forget_inputs()
        self.origins.clear()
        self.hooks_of_inputs.update(dict.fromkeys(self.hooks_of_inputs))  # handles know them by their keys

    @property
    def has_wrappers(self) -> bool:
        """Whether there are wrappers in the program, by now."""
        return self.presence is Presence.MET

    @property
    def meets_wrappers(self) -> bool:
        """Whether there are wrappers in the program, as far as can be known by now."""
        return self.presence >= Presence.EXPECTED

    def register(self, proxy: SubclassProxy) -> SubclassProxy:
        """Remember the proxy of a fake wrapper, so that one wrapper has one proxy."""
        self.wrappers.add(proxy, is_inside=self.num_levels > 0)
        self.note_presence(Presence.MET)
        return proxy

    def fake_wrapper(self, x: torch.Tensor) -> torch.Tensor:
        """The wrapper `x` rebuilt over fake inner tensors."""
        spec = WrapperSpec.of(x)
        with torch.no_grad(), self.fakes.mode:
            fake = spec.build(self.integers.fakes_of(x, spec.leaves(x)))
        if self.autograd.is_running and spec.requires_grad:
            self.autograd.note_given(fake, is_leaf=not may_have_history(x))
        return fake

    # -- differentiation, changes in place, refusals ------------------------------------------------------------------

    def differentiate(self) -> None:
        """From now on torch's autograd runs on the fakes: there is a wrapper that requires grad."""
        if not (self.autograd.is_running or self.is_transformed):
            self.note_presence(Presence.MET)
            self.autograd.start()

    def starts_history(self, fake: torch.Tensor) -> bool:
        """Whether torch's autograd may start at a wrapper that the program has made; it does so from here on."""
        if self.num_levels or self.is_transformed:
            return False
        self.differentiate()
        with torch._C.DisableTorchFunctionSubclass():
            fake.requires_grad_()
        self.tape.tear()  # which has no such operation
        return True

    def follow_held(self, wrappers: Sequence[SubclassProxy]) -> None:
        """Have the program acquired again, with torch's autograd from its first operation on, if it put what requires grad into wrappers."""
        if not (self.num_levels or self.is_transformed) and any(self.autograd.holds_gradient(p.fake) for p in wrappers):
            self.autograd.starts_late = True
            self.differentiate()

    def note_writing(self, fn: Callable, args: tuple) -> None:
        """Torch's autograd started from a tensor of the program's, and must not, if `fn` writes into that: it counts as a leaf."""
        if self.autograd.is_running and args and type(args[0]) is TensorProxy and is_in_place(fn):
            is_started_from = any(not self.is_input(t) for t in self.autograd.sources_in_memory_of(self.fakes.known(args[0])))
            self.autograd.starts_late = self.autograd.starts_late or is_started_from

    def requires_grad(self, fake: torch.Tensor) -> bool:
        """Whether what a fake stands for requires grad where it is, as far as the trace knows it by now."""
        proxy = self.fakes.proxy_of(fake)
        if proxy is None or self.is_finished or self.num_levels or not is_grad_enabled():
            return False
        return self.autograd.requires_grad(proxy)

    def is_of_program(self, fake: torch.Tensor) -> bool:
        """Whether the program was given a fake or made it; the backward makes others."""
        return self.fakes.proxy_of(fake) is not None or id(fake) in self.autograd.intermediates

    def is_input(self, fake: torch.Tensor) -> bool:
        """Whether a fake stands for what the program was given, a wrapper or a plain tensor."""
        return id(fake) in self.wrappers.specs if is_wrapper(fake) else self.fakes.is_given(fake)

    def may_write_back(self, fake: torch.Tensor) -> bool:
        """Whether `fake` stands for an input, or is inside of one, that is not differentiated by Thunder; see `write_back`."""
        if id(fake) in self.fakes.inner:
            return self.autograd.is_running or not (self.fakes.inner[id(fake)] and is_grad_enabled())
        proxy = self.fakes.first_proxy_of(fake)
        if proxy is None or not self.may_replace():
            return False
        real = self.fakes.real_input(proxy)
        is_leaf = real is None or not may_have_history(real)
        return not (is_leaf and self.autograd.is_running and proxy.requires_grad and is_grad_enabled())

    def has_view(self, fake: torch.Tensor) -> bool:
        """Whether Thunder knows of a tensor that may share memory with what a plain fake stands for, or has changed it in place."""
        proxies = (self.fakes.first_proxy_of(fake), self.fakes.proxy_of(fake) if self.fakes.is_held(fake) else None)
        names = {named.name for p in proxies if p is not None for named in self.fakes.also_named(p)}
        if not names or self.is_finished:
            return False
        return not names.isdisjoint(self._written.by(get_jit_ctx().computation_trace.bound_symbols).viewed)

    def may_replace(self) -> bool:
        """Whether the program may change a plain tensor that it holds: all its later uses are met here, and mean the new value."""
        return not self.num_levels and len(get_jit_ctx().computation_trace.scopes) == 1

    def has_changed_plain(self) -> bool:
        """Whether the program changed a plain tensor in place so far: its proxy stands for another value since then."""
        trace = self.finished_trace if self.is_finished else get_jit_ctx().computation_trace
        return trace is None or self._written.by(trace.bound_symbols).anything

    def has_changed(self, t: torch.Tensor) -> bool:
        """Whether it changed one in whose memory the tensor may be that a fake stands for."""
        return self.has_changed_plain() and (self.is_finished or self.writes.into(t) > 0)

    def has_changed_integers(self) -> bool:
        """Whether one of these has no floating-point numbers: what was known of its values does not hold any more."""
        trace = self.finished_trace if self.is_finished else get_jit_ctx().computation_trace
        return trace is None or self._written.by(trace.bound_symbols).integers

    def ask(self, func: Callable, given: Sequence[torch.Tensor | NumberProxy]) -> Any:
        """What a function of tensors says of the values of some; see `DataSizes.ask`.

        Raises:
            UnknownValueError: the values cannot be computed.
        """
        if self.asks is not None:
            return self.asks(func, given)
        if self.is_finished or self.is_transformed or not self.may_replace():
            raise UnknownValueError("it is asked for in a function that is transformed, or in a region")
        numbers = guards.changing_numbers()
        if func is torch.Tensor.item and numbers is not None and numbers.note_used(*given):
            raise UnknownValueError("it is another in each call")  # and the program is acquired for the number itself
        return self.sizes.ask(func, given)

    def refuse(self, error: Exception) -> Exception:
        """Remember that this program cannot be traced; returns the error, with the user's line."""
        self.watches = True
        return self.refused.note(error)

    # -- arguments ----------------------------------------------------------------------------------------------------

    def have_stand_in(self, proxy: TensorProxy, new: TensorProxy, position: int, *, is_written_too: bool = False) -> None:
        """Have another tensor stand for a plain one from a position on, under all of the names that the program has for it."""
        for p in self.fakes.also_named(proxy):
            self.stand_ins[p.name] = StandIn(p, new, position, is_written_too)

    def note_plain_input(self, proxy: TensorProxy, real: torch.Tensor) -> None:
        """Remember the real tensor that the proxy of a plain input stands for, and what stands for it by now under its other names."""
        self.fakes.note_plain_input(proxy, real)
        found = next((s for p in self.fakes.also_named(proxy) if (s := self.stand_ins.get(p.name)) is not None), None)
        if found is not None:
            self.have_stand_in(proxy, found.new, found.position, is_written_too=found.is_written_too)

    def by_now(self, proxy: TensorProxy) -> TensorProxy:
        """What stands for a proxy that the program holds: another one, if it has written into its tensor."""
        while (found := self.stand_ins.get(proxy.name)) is not None:
            proxy = found.new
        return proxy

    def fake_of(self, proxy: TensorProxy) -> torch.Tensor:
        """The fake for a proxy; a plain proxy met for the first time gets one (and counts as an input)."""
        if isinstance(proxy, SubclassProxy):
            return proxy.fake
        fake = self.fakes.known(proxy)
        if fake is None:
            fake = self.integers.shared_fake(proxy)
        if fake is None:
            fake = self.fakes.new_for(proxy)
            if self.autograd.is_running:
                self.autograd.note_plain(fake, proxy)
        return fake

    def to_fake(self, value: Any) -> Any:
        """An argument as the user's torch function should see it: fakes for proxies, torch's types for Thunder's."""
        return mapped(value, self._leaf_to_fake)

    def _leaf_to_fake(self, value: Any) -> Any:
        if isinstance(value, TensorProxy):
            return self.fake_of(value)
        if isinstance(value, NumberProxy) and value.value is None:
            try:
                return self.ask(torch.Tensor.item, [value])
            except UnknownValueError as e:
                what = "a number read from a tensor was passed to an operation on a wrapper subclass"
                raise data_dependent_on_wrapper(what, why=str(e)) from e
        if is_wrapper(value):
            raise UnsupportedOpError(f"a {type(value).__name__} that is not an input of the jitted function is used inside it")
        return value.value if isinstance(value, NumberProxy) else for_torch(value)
