"""The tensors without data that a program is acquired with, and the proxies of the trace that they stand for.

A fake is known by identity; the tables keep it alive, so that an id never comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.model_state.escapes import tracing_mode
from thunder_norm.subclass.acquiring.shared_memory import SharedMemory
from thunder_norm.subclass.classes import jagged
from thunder_norm.subclass.classes.protocol import WrapperSpec
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.tracing.guarding.layouts import guard_layout
from thunder_norm.tracing.torch_functions.known_values import REPLACED
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core import devices, dtypes, prims
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol

aten = torch.ops.aten
_BATCH_NORMS = frozenset(
    {
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_no_training.default,
        aten._native_batch_norm_legit_functional.default,
        aten._batch_norm_with_update.default,
        aten._batch_norm_with_update_functional.default,
        aten._batch_norm_no_update.default,
    }
)


class _Mode(FakeTensorMode):
    """A mode in which ragged lengths are as in eager mode; torch's makes symbols of them, to be guarded by a compiler."""

    def create_symbolic_nested_int(self, **_: Any) -> torch.SymInt:
        return jagged.new_ragged()

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch's own answer says that a batch norm keeps the strides of what it is given; on a CPU its results are contiguous.

        For some operations it has none with a generator.
        """
        if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
            kwargs = {**kwargs, "generator": None}
        found: Any = super().dispatch(func, types, args, kwargs)
        if func not in _BATCH_NORMS or args[0].device.type != "cpu":
            return found
        normalized = found[0]
        laid_out = torch.empty_like(normalized, memory_format=torch._prims_common.suggest_memory_format(args[0]))
        return laid_out, *found[1:]


class Replaced(NamedTuple):
    """What became of a plain proxy whose tensor the program changed in place."""

    proxy: TensorProxy
    fake: torch.Tensor
    position: int  # by `num_made`; from there on the proxy means what the fake stands for


def num_made(bsyms: Sequence[BoundSymbol]) -> int:
    """How many of the operations are the program's and make something: a place in a trace, before passes add and remove others, and after."""
    return sum(bool(b.flat_proxy_outs) and b.sym.id not in _OF_PASSES for b in bsyms)


_OF_PASSES = frozenset({prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UPDATE_ALIASES})


class Fakes:
    """Those of plain tensors, inner ones of wrappers among them.

    After a functionalised in-place operation a fake stands for the newer proxy.
    """

    def __init__(self, on_replaced: Callable[[], None] = lambda: None) -> None:
        self.mode = tracing_mode(_Mode)
        self.shared = SharedMemory(self.mode)
        self.follows_memory = False  # whether views of plain tensors, and writes into these, are recorded from the first on
        self.misses_memory = False  # whether the program needs that, and it is not
        self.has_plain_names = False  # whether the program holds, as plain tensors, some that lie in the memory of wrappers
        self.on_replaced = on_replaced  # called before a plain proxy that the program holds comes to stand for an older value
        self.inputs: set[int] = set()  # the fakes of inputs, and of what Thunder computed without us
        self.computed: set[int] = set()  # of these, the latter
        self.inner: dict[int, bool] = {}  # the leaves of input wrappers, and which require grad
        self.strides: dict[str, tuple[int, ...]] = {}  # of plain tensors, by proxy name, as far as torch says it
        self.unplaced: set[str] = set()  # the names of those of which it was looked for
        self.written: dict[int, torch.Tensor] = {}  # those of inputs that the program has written into
        self.replaced: dict[str, Replaced] = {}  # plain proxies that the program holds although their tensor has changed since
        self.user_names: dict[Variable, TensorProxy] = {}  # Thunder's table of proxies it names after the user's variables
        self.readable_names: dict[str, TensorProxy] = {}  # ours, by the name before; see `names`
        self._inside: set[int] = set()  # the storages of what is inside of wrappers
        self._held: dict[int, torch.Tensor] = {}  # those that the program may hold as plain tensors
        self._proxy_of: dict[int, tuple[FakeTensor, TensorProxy]] = {}
        self._first: dict[int, TensorProxy] = {}
        self._detached: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # those made by ``detach``, and views of these
        self._fake_of: dict[str, FakeTensor] = {}
        self._real_inputs: dict[int, torch.Tensor] = {}  # plain inputs by provenance, wrappers by their fakes
        self._given: list[TensorProxy] = []  # plain inputs that the program has met
        self._names: dict[
            int, list[TensorProxy]
        ] = {}  # of plain inputs, by the tensor: a parameter of a module is an optimizer's too

    def new(self, t: torch.Tensor) -> FakeTensor:
        """A fake with the metadata of the real plain tensor `t`, an input, in the memory that this shares with others."""
        if self.shared.holds(t):
            return self.shared.fake_of(t)
        with self.mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)

    def stride_of(self, proxy: TensorProxy) -> tuple[int, ...] | None:
        """The strides in eager mode of what a plain proxy stands for, as far as they are known."""
        known = self._fake_of.get(proxy.name)
        return self.strides.get(proxy.name) if known is None else known.stride()

    def laid_out(self, proxy: TensorProxy) -> FakeTensor | None:
        """A tensor that lies as what a plain proxy stands for does in eager mode; None where that is not known."""
        known, stride = self.known(proxy), self.strides.get(proxy.name)
        if known is not None or stride is None:
            return known
        with self.mode:
            return torch.empty_strided(_shape(proxy), stride, dtype=dtypes.to_torch_dtype(proxy.dtype))

    def is_of_thunder(self, proxy: TensorProxy) -> bool:
        """Whether an operation of Thunder's made what a plain proxy stands for, of which nobody knows where in a storage it is."""
        known = self.known(proxy)
        return known is None or id(known) in self.computed

    def keeps_strides(self, written: Any, result: Any) -> None:
        """What an operation writes into and what it returns for it is one tensor."""
        if isinstance(written, TensorProxy) and isinstance(result, TensorProxy):
            stride = self.stride_of(written)
            if stride is not None and written.shape == result.shape:
                self.strides.setdefault(result.name, stride)

    def new_for(self, proxy: TensorProxy) -> FakeTensor:
        """The fake of a plain proxy that is met for the first time, and counts as an input."""
        shape = _shape(proxy)
        dtype, device = dtypes.to_torch_dtype(proxy.dtype), devices.to_torch_device(proxy.device)
        stride = self.stride_of(proxy)
        real = self.real_input(proxy)
        same = next((fake for p in self.also_named(proxy) if (fake := self.known(p)) is not None), None)
        if same is not None:
            self.also(proxy, same)
            return same
        # a rule may be the first to meet it, while its operation is recorded: that the fake is made is no operation of the program
        with _disable_current_modes(), self.mode:
            if real is not None and self.shared.holds(real):
                fake = self.shared.fake_of(real)
            elif stride is None:
                fake = torch.empty(shape, dtype=dtype, device=device)
            else:
                fake = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        self.bind(fake, proxy, is_input=True)
        self.hold(fake)
        self._first[id(fake)] = proxy
        if proxy.history is None:
            self.computed.add(id(fake))
        return fake

    def bind(self, fake: FakeTensor, proxy: TensorProxy, *, is_input: bool = False) -> None:
        """From now on `fake` stands for `proxy`."""
        before = self.proxy_of(fake)
        if before is not None and before is not proxy and self.is_held(fake):
            self.on_replaced()
            for p in self.also_named(before):
                self._replace(p, fake)
        self._proxy_of[id(fake)] = (fake, proxy)
        self._fake_of[proxy.name] = fake
        if is_input:
            self.inputs.add(id(fake))

    def _replace(self, proxy: TensorProxy, fake: FakeTensor) -> None:
        ctx = get_jit_ctx()
        self.also(proxy, fake)
        self.replaced[proxy.name] = Replaced(proxy, fake, num_made(ctx.computation_trace.bound_symbols))
        setattr(ctx, REPLACED, self.replaced.keys())

    def is_given(self, fake: torch.Tensor) -> bool:
        """Whether a fake stands for an input, or is inside of one."""
        return id(fake) in self.inputs and id(fake) not in self.computed

    def proxy_of(self, fake: torch.Tensor) -> TensorProxy | None:
        """The proxy a plain fake stands for now."""
        found = self._proxy_of.get(id(fake))
        return found[1] if found is not None else None

    def first_proxy_of(self, fake: torch.Tensor) -> TensorProxy | None:
        """The plain proxy that a fake was made for; None for what was recorded."""
        return self._first.get(id(fake))

    def also(self, proxy: TensorProxy, fake: FakeTensor) -> None:
        """A plain input is the tensor that `fake` stands for under another name."""
        self._fake_of[proxy.name] = fake

    def also_named(self, proxy: TensorProxy) -> Sequence[TensorProxy]:
        """The proxies of all plain inputs that are the very tensor that `proxy` stands for, itself among them."""
        return self._names.get(id(self.real_input(proxy))) or [proxy]

    def plain_inputs(self) -> list[tuple[FakeTensor, TensorProxy]]:
        """The fakes of inputs that are no inner tensors, and their proxies."""
        return [(fake, p) for fake, p in self.pairs() if id(fake) in self.inputs and id(fake) not in self.inner]

    def of_plain_input(self, real: torch.Tensor) -> FakeTensor | None:
        """The fake of a plain input that is this very tensor."""
        return next((fake for fake, p in self.plain_inputs() if self.real_input(p) is real), None)

    def known(self, proxy: TensorProxy) -> FakeTensor | None:
        """The fake of a plain proxy, its strides those that the tensor has in eager mode; None where only Thunder computed it."""
        return self._fake_of.get(proxy.name)

    def pairs(self) -> list[tuple[FakeTensor, TensorProxy]]:
        """All fakes, and what they stand for."""
        return list(self._proxy_of.values())

    # -- names --------------------------------------------------------------------------------------------------------

    def current(self, proxy: TensorProxy) -> TensorProxy:
        """What a proxy of the acquisition is called in the finished trace."""
        proxy = self.user_names.get(variableify(proxy), proxy)
        return self.readable_names.get(proxy.name, proxy)

    def by_name(self) -> dict[str, torch.Tensor]:
        """The fakes of plain proxies by the names they have in the finished trace."""
        original = {p.name: variable.proxy.name for variable, p in self.user_names.items()}
        original |= {p.name: original.get(name, name) for name, p in self.readable_names.items()}
        return self._fake_of | {new: self._fake_of[old] for new, old in original.items() if old in self._fake_of}

    # -- memory -------------------------------------------------------------------------------------------------------

    def note_views(self, outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], *, are_detached: bool) -> None:
        """Remember of what an operation returned whether it, or what it is a view of, was detached."""
        sources = [t for t in inputs if id(t) in self._detached]
        for t in outputs if are_detached or sources else ():
            storage = t.untyped_storage()._cdata
            source = next((s for s in sources if s.untyped_storage()._cdata == storage), None)
            if are_detached or source is not None:
                self._detached[id(t)] = (t, t if are_detached or source is None else self._detached[id(source)][1])

    def detached_at(self, fake: torch.Tensor) -> torch.Tensor | None:
        """The result of ``detach`` that a fake is a view of, or is itself: autograd takes others in its memory for other tensors."""
        found = self._detached.get(id(fake))
        return found[1] if found is not None else None

    def hold(self, fake: torch.Tensor) -> None:
        """The program got hold of `fake` as a plain tensor."""
        self._held[id(fake)] = fake
        self.has_plain_names |= self.is_inside(fake)

    def is_held(self, fake: torch.Tensor) -> bool:
        """Whether the program may hold `fake` as a plain tensor; Thunder would not see it change."""
        return id(fake) in self._held

    def note_inside(self, leaves: Iterable[torch.Tensor]) -> None:
        """Remember where the inner tensors of a wrapper lie."""
        self._inside.update(t.untyped_storage()._cdata for t in leaves)
        self.has_plain_names |= any(map(self.is_held, leaves))

    @property
    def follows_plain(self) -> bool:
        """Whether plain tensors have more to them than Thunder knows: memory, or a value that was replaced."""
        return self.follows_memory or bool(self.replaced) or self.has_plain_names

    def is_inside(self, fake: torch.Tensor) -> bool:
        """Whether a plain tensor lies in the memory of what is inside of a wrapper, met by now or given."""
        storage = fake.untyped_storage()._cdata
        return storage in self._inside or self.shared.has(storage)

    # -- the real tensors ---------------------------------------------------------------------------------------------

    def note_input(self, key: Any, real: torch.Tensor) -> None:
        """Remember the real tensor an input proxy (by its history) or fake wrapper stands for."""
        self._real_inputs[id(key)] = real

    def note_plain_input(self, proxy: TensorProxy, real: torch.Tensor) -> None:
        """Remember the real tensor that the proxy of a plain input stands for, and how it lies in memory."""
        self.strides[proxy.name] = real.stride()
        self.note_input(proxy.history, real)
        self._given.append(proxy)
        names = self._names.setdefault(id(real), [])
        written = next((self.replaced[p.name].fake for p in names if p.name in self.replaced), None)
        names.append(proxy)
        if written is not None:
            self._replace(proxy, written)

    def guard_layouts(self) -> None:
        """Let the trace serve calls whose inputs lie in memory as those of this one: what the program has made of them by now may hang on it."""
        for proxy in self._given:
            if (real := self.real_input(proxy)) is not None:
                guard_layout(proxy, real, with_offset=False)
        self._given.clear()

    def real_input(self, proxy: TensorProxy) -> torch.Tensor | None:
        """The real tensor an input proxy stands for."""
        key = proxy.fake if isinstance(proxy, SubclassProxy) else proxy.history
        return self._real_inputs.get(id(key))

    def forget_inputs(self) -> None:
        """Let go of the real tensors: the fakes may live as long as the trace."""
        self._real_inputs.clear()
        self._given.clear()
        self._names.clear()

    def flag_given(self, proxy: TensorProxy) -> bool | None:
        """Whether the tensor of a plain proxy was given requiring grad, if it is an input, or inside of one, that has a fake."""
        fake = self.known(proxy)
        if fake is None or not self.is_given(fake):
            return None
        first = self.first_proxy_of(fake)
        real = None if first is None else self.real_input(first)
        return self.inner.get(id(fake)) if real is None else real.requires_grad

    def check_foreign(self, x: torch.Tensor) -> None:
        """Refuse to take one of these fakes for an input: it escaped in a result whose insides cannot be followed.

        Raises:
            UnsupportedOpError: `x` is one of them, or a wrapper around one.
        """
        leaves = WrapperSpec.of(x).leaves(x) if is_wrapper(x) else (x,)
        if any(isinstance(t, FakeTensor) and t.fake_mode is self.mode for t in leaves):
            raise UnsupportedOpError(
                "an operation on a wrapper subclass returned a tensor inside an object that cannot be followed"
            )


class Wrappers:
    """The fake wrappers, by identity, with the one proxy that each has."""

    def __init__(self) -> None:
        self.leaves: dict[int, tuple[TensorProxy, ...]] = {}  # of each wrapper, as the trace knows them
        self.specs: dict[int, WrapperSpec] = {}  # of input wrappers: what the prologue must find
        self.given: dict[int, tuple[torch.Tensor, ...]] = {}  # and the fakes of what was inside of them then
        self.structures: dict[
            int, tuple[list, tuple[torch.Tensor, ...]]
        ] = {}  # their contexts, and what is inside after the call
        self.before: dict[int, dict[str, Any]] = {}  # and all their attributes
        self.parts: dict[int, tuple[torch.Tensor, Any]] = {}  # of wrappers inside of them what stands there, and where from
        self.beside: dict[
            int, dict[str, tuple[Any, Any]]
        ] = {}  # and those that hold tensors, which no operation has seen yet: what they are, and where the wrapper is from
        self.taken: dict[tuple[int, str], Any] = {}  # what stands for these in the interpreter, by wrapper and name
        self.handed_out: dict[
            int, tuple[Any, str]
        ] = {}  # by their dict, objects in attributes that the program has read, and the names of these
        self.attributes: dict[
            int, dict[str, tuple[Any, Any]]
        ] = {}  # what the program has set of each wrapper; see `set_attributes`
        self._proxies: dict[int, SubclassProxy] = {}
        self._inside: set[int] = set()  # those made in functions under function transforms

    def forget_inputs(self) -> None:
        """Let go of the real tensors."""
        self.parts.clear()
        self.beside.clear()
        self.taken.clear()

    def add(self, proxy: SubclassProxy, is_inside: bool) -> None:
        """Remember the proxy of a fake wrapper; `is_inside` says that a function under function transforms made it."""
        self._proxies[id(proxy.fake)] = proxy
        if is_inside:
            self._inside.add(id(proxy.fake))

    def proxy_of(self, fake: torch.Tensor) -> SubclassProxy | None:
        """The proxy made for a fake wrapper, if there is one."""
        return self._proxies.get(id(fake))

    def proxies(self) -> tuple[SubclassProxy, ...]:
        """Those of all wrappers met so far."""
        return tuple(self._proxies.values())

    def inputs(self) -> list[SubclassProxy]:
        """Those of the wrappers that the program was given."""
        return [self._proxies[i] for i in self.specs]

    def is_inside(self, fake: torch.Tensor) -> bool:
        """Whether a function under function transforms made it."""
        return id(fake) in self._inside

    def spec_of(self, proxy: SubclassProxy) -> WrapperSpec:
        """What the prologue must find in the input a proxy stands for (the interpreter may have renamed it)."""
        return self.specs[id(proxy.fake)]


def _shape(proxy: TensorProxy) -> tuple[int, ...]:
    return tuple(int(s.value) if isinstance(s, NumberProxy) else int(s) for s in proxy.shape)


def fake_of(p: Any, fakes: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The fake of what a finished trace has; `fakes` are those of plain proxies by name."""
    if isinstance(p, SubclassProxy):
        return p.fake
    return fakes.get(p.name) if isinstance(p, TensorProxy) else None
