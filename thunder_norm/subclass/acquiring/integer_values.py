"""What is known of the values of integer tensors while a trace is acquired: the offsets of nested tensors, and what is computed of these.

A class may ask for such a value (the longest of the sequences, to pad them all; the lengths, to split them): it is given that of the call
at hand, and the prologue of the trace then computes what was asked for again and compares.  Nothing is asked in most operations, so that
one trace serves all offsets; one that takes the sequences apart serves the lengths that it was acquired with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from thunder_norm.subclass.acquiring.fakes import Fakes
from thunder_norm.subclass.acquiring.lengths import Lengths
from thunder_norm.subclass.classes import jagged
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.trees import flat_tensors
from thunder.core import prims
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol

aten = torch.ops.aten

# A plain input for which another tensor stands: the prologue has to unpack it all the same, to look at it.
GIVEN_AGAIN = Symbol(
    name="given_again", meta=lambda *_: None, id="thunder_norm.given_again", is_prim=True, tags=(prims.OpTags.DONT_DCE,)
)

# What is made of more numbers than this is not followed, unless it comes from inputs.
_MAX_MADE = 4096


@dataclass(frozen=True, eq=False)
class Known:
    """An integer tensor, its value in the call at hand, and how it is computed."""

    value: torch.Tensor
    source: TensorProxy | None = None  # the input that it is
    func: Callable | None = None
    arguments: tuple[tuple, dict] = ((), {})  # with `Known` for tensors
    index: int = 0  # which of the results of `func` it is

    @property
    def operands(self) -> tuple[Known, ...]:
        """What it is computed from."""
        return tuple([v for v in torch.utils._pytree.tree_leaves(self.arguments) if isinstance(v, Known)])

    def sources(self) -> dict[str, TensorProxy]:
        """The inputs it is computed from, by name."""
        if self.source is not None:
            return {self.source.name: self.source}
        return {name: p for operand in self.operands for name, p in operand.sources().items()}

    def computed(self, inputs: Mapping[str, torch.Tensor], made: dict[int, torch.Tensor]) -> torch.Tensor:
        """Its value for these inputs; `made` remembers what was computed on the way."""
        if self.source is not None:
            return inputs[self.source.name]
        if self.func is None or self.func in _LIFTS:
            return self.value
        if id(self) not in made:
            args, kwargs = tree_map(lambda v: v.computed(inputs, made) if isinstance(v, Known) else v, self.arguments)
            made[id(self)] = flat_tensors(self.func(*args, **kwargs))[self.index]
        return made[id(self)]


_LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
_PARTS = (aten.unbind.int, aten.select.int)  # one number of many: all of them are asked for, as a rule


class IntegerValues:
    """The integer tensors of one acquisition whose values may be asked for, and which were."""

    def __init__(self, fakes: Fakes, lengths: Lengths) -> None:
        self.is_followed = False  # see `follow`
        self._fakes = fakes
        self._lengths = lengths
        self._known: dict[
            int, tuple[torch.Tensor, Known | None]
        ] = {}  # by the identity of fakes; None for what was changed in place
        self._read: dict[int, Known] = {}
        self._structures: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # offsets and lengths of inputs: the tensor, its fake
        self._given_again: list[tuple[TensorProxy, torch.Tensor]] = []  # plain inputs that are such tensors, and their fakes
        self._ragged: dict[int, torch.SymInt] = {}  # what stands for the ragged lengths of inputs

    def follow(self) -> None:
        """There are nested tensors in the program."""
        if not self.is_followed:
            jagged.prepare()
            self.is_followed = True

    # -- inputs -------------------------------------------------------------------------------------------------------

    def fakes_of(self, x: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Fakes for the inner tensors of an input; one tensor that says where the sequences of several inputs lie has one fake."""
        if not jagged.is_jagged_class(type(x)):
            return tuple([self._fakes.new(t) for t in leaves])
        self.follow()
        structure = {id(t) for t in jagged.structure_of(x).values()}
        ragged = self._ragged.setdefault(jagged.ragged_identity(x), jagged.new_ragged())
        for t in leaves:
            if id(t) in structure and id(t) not in self._structures:
                known = self._fakes.of_plain_input(t)
                self._structures[id(t)] = t, self._fakes.new(t) if known is None else known
        source = self._structures[id(jagged.ragged_source(x))][1]
        if source.nested_int_memo is None:
            source.nested_int_memo = ragged
        values = self._lengths.fake_of(x, self._fakes.mode) if self._lengths.is_on else self._fakes.new(leaves[0])
        return values, *(self._structures[id(t)][1] for t in leaves[1:])

    def shared_fake(self, proxy: TensorProxy) -> torch.Tensor | None:
        """The fake of a plain input that is met for the first time, if it is the offsets of an input or another plain input."""
        real = self._fakes.real_input(proxy) if self.is_followed else None
        if real is None or real.is_floating_point():
            return None
        fake = self._structures[id(real)][1] if id(real) in self._structures else self._fakes.of_plain_input(real)
        if fake is None:
            return None
        self._fakes.also(proxy, fake)
        get_jit_ctx().computation_trace.bound_symbols.append(GIVEN_AGAIN.bind(proxy, output=None))
        self._given_again.append((proxy, fake))
        return fake

    def note_source(self, fake: torch.Tensor, real: torch.Tensor, proxy: TensorProxy) -> None:
        """An input: its value is that of `real`."""
        if not real.is_floating_point() and not real.is_complex() and id(fake) not in self._known:
            with _disable_current_modes():
                self._known[id(fake)] = fake, Known(real.detach(), source=proxy)

    # -- operations ---------------------------------------------------------------------------------------------------

    def note(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        """An operation has run on fakes: what it makes of known integers is known."""
        outputs = flat_tensors(result)
        if not self.is_followed or not outputs or torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            return
        if any(t.is_floating_point() or t.is_complex() for t in outputs):
            return
        given = {id(t): self._of(t) if isinstance(t, FakeTensor) else _lifted(func, t) for t in flat_tensors((args, kwargs))}
        if any(known is None for known in given.values()) or (not given and sum(t.numel() for t in outputs) > _MAX_MADE):
            return
        arguments = tree_map(lambda v: given[id(v)] if isinstance(v, torch.Tensor) else v, (args, kwargs))
        real_args, real_kwargs = tree_map(lambda v: v.value if isinstance(v, Known) else v, arguments)
        with _disable_current_modes():
            values = flat_tensors(func(*real_args, **real_kwargs))
        for index, (fake, value) in enumerate(zip(outputs, values, strict=True)):
            self._known[id(fake)] = fake, Known(value, None, func, arguments, index)

    def forget(self, fake: torch.Tensor) -> None:
        """A tensor is changed in place, and with it those in its memory."""
        if not self.is_followed:
            return
        storage = fake.untyped_storage()._cdata
        known = [t for t, _ in self._known.values() if t.untyped_storage()._cdata == storage]
        self._known.update({id(t): (t, None) for t in (fake, *known)})

    def _of(self, fake: torch.Tensor) -> Known | None:
        if id(fake) in self._known:
            return self._known[id(fake)][1]
        proxy = self._fakes.proxy_of(fake) if id(fake) in self._fakes.inputs else None
        real = None if proxy is None or isinstance(proxy, SubclassProxy) else self._fakes.real_input(proxy)
        if real is None:
            return None
        self.note_source(fake, real, proxy)
        return self._known.get(id(fake), (fake, None))[1]

    def read(self, fake: torch.Tensor) -> int | bool | None:
        """The one value of a tensor that was asked for, and has to be the same when the trace is used again; None if it is not known."""
        known = self._of(fake) if self.is_followed else None
        if known is None:
            return None
        asked = known
        while asked.func in _PARTS:
            (asked,) = asked.operands
        self._read[id(asked)] = asked
        with _disable_current_modes():
            return known.value.item()

    # -- the prologue -------------------------------------------------------------------------------------------------

    def guards(self, wrappers: list[SubclassProxy]) -> list[BoundSymbol]:
        """Operations of the prologue: what was asked for is the same, and those of the input `wrappers` that fit together do so."""
        nested = [(p, p.fake) for p in wrappers if jagged.is_jagged_class(type(p.fake))]
        nested += [*self._given_again, *((p, f) for f, p in self._fakes.plain_inputs() if f.nested_int_memo is not None)]
        found = [self._check_fitting(nested)] if self.is_followed and len(nested) > 1 else []
        asked = [known for known in self._read.values() if known.sources()]
        if asked:
            found.append(self._check_values(asked))
        return found

    def _check_values(self, asked: list[Known]) -> BoundSymbol:
        sources = {name: p for known in asked for name, p in known.sources().items()}
        expected = [(known, known.value.clone()) for known in asked]

        def check(*tensors: torch.Tensor) -> None:
            inputs, made = dict(zip(sources, tensors, strict=True)), {}
            for known, value in expected:
                if not torch.equal(known.computed(inputs, made), value):
                    raise GuardError("offsets or lengths of a nested tensor are others than when the trace was acquired")

        return bindable("check_ragged_values", check)(*map(self._fakes.current, sources.values()), output=None)

    def _check_fitting(self, nested: list[tuple[TensorProxy, torch.Tensor]]) -> BoundSymbol:
        pattern = _pattern([fake for _, fake in nested])

        def check(*inputs: torch.Tensor) -> None:
            if _pattern(inputs) != pattern:
                raise GuardError("other nested tensors have offsets in common than when the trace was acquired")

        return bindable("check_common_offsets", check)(*(self._fakes.current(p) for p, _ in nested), output=None)


def _lifted(func: Callable, t: torch.Tensor) -> Known | None:
    """What ``torch.tensor([1, 2])`` lifts: numbers of the program."""
    return Known(t.detach().clone()) if func in _LIFTS else None


def _pattern(inputs: Any) -> list[int]:
    identities = [jagged.ragged_identity(x) for x in inputs]
    return [identities.index(i) for i in identities]
