"""What a region computes the second time: the same numbers, and no side effects.

Random operations: the first time an operation also returns the state of the generator it draws from, the second time it draws from
that state, and leaves the generator alone.  What is kept is the state, not what was drawn.  In-place operations on tensors of the
surroundings happen the first time only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.functions.drawn_again import drawing_from, state_of, state_proxy
from thunder_norm.functions.opaque import noted
from thunder_norm.functions.programs import is_differentiable
from thunder_norm.functions.registry import decomposed, drawing_kernels
from thunder_norm.functions.writes.aliasing import VIEWS, as_written, in_memory_of, writes_into
from thunder_norm.subclass.crossing.turns import after
from thunder_norm.subclass.recording.trace import keep_only
from thunder_norm.tracing.locations import location_of
from thunder_norm.tracing.recording import scope
from thunder_norm.tracing.shared_memory.writes import copies_in
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
from thunder_norm.trees import flat_tensors
from thunder.core import devices, dtypes, prims
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import get_tracectx
from thunder.core.transform_common import NON_FUNCTIONAL_OPS
from thunder.core.transforms import register_grad
from thunder.extend import OperatorExecutor

executor = OperatorExecutor("thunder_norm_replays", version="1")  # in no executor list: its operations carry it


REGION = "thunder_norm.checkpoint"  # the id of a region, whose insides are looked at too

Split = tuple[list[BoundSymbol], list[BoundSymbol]]


class Memory(NamedTuple):
    """What a tensor of the surroundings lies in that the program writes into while a region runs or later."""

    root: str  # the name of an argument of the program
    is_differentiated: bool


class Runs(NamedTuple):
    """What a region does the first and the second time, and the results of each."""

    first: list[BoundSymbol]
    first_outs: list[Proxy]
    second: list[BoundSymbol]
    second_outs: list[Proxy]
    kept: dict[str, Proxy]  # names of copies that the first makes for the second, and what they are copies of


def replayable(
    bsyms: Sequence[BoundSymbol],
    outs: Sequence[Proxy],
    rebuilt: Callable[[BoundSymbol, Sequence[BoundSymbol]], BoundSymbol],
    changing: Mapping[str, Memory] = MappingProxyType({}),
) -> Runs:
    """What to run the first time, and what the second time.

    The second may use what the first makes: states of generators, what random operations drew whose state cannot be set, and copies of
    what is written into tensors of the surroundings by then.

    Args:
        bsyms: the operations of a region.
        outs: their results.
        rebuilt: makes a region inside with other operations.
        changing: tensors that it takes, by name, whose memory is written while it runs, or later.

    Raises:
        UnsupportedOpError: a tensor is changed that others share memory with.
    """
    if not changing and not any(_needs_care(b) for b in bsyms):
        return Runs(list(bsyms), list(outs), list(bsyms), list(outs), {})
    splitter = _Splitter(bsyms, rebuilt, changing)
    first, second = splitter.split_all(bsyms)
    first_outs, second_outs = splitter.named(outs)
    return Runs(first, first_outs, _needed(second, second_outs, rebuilt), second_outs, splitter.copied)


def with_effects(bsyms: Sequence[BoundSymbol], outs: Sequence[Proxy]) -> list[Proxy]:
    """Results of the first run that need all that it draws and writes: recorded in the open trace.

    Relies on ``thunder.transforms.autodiff``: what no result of a rule needs is put off until after the forward, and left out where no
    gradient comes.
    """
    needed = {p.name for b in keep_only(bsyms, {p.name for p in outs}) for p in b.flat_proxy_outs}
    effects = [b for b in bsyms if b.sym.id is PrimIDs.COPY_ or draws_numbers(b)]
    unneeded = [p for b in effects if needed.isdisjoint(p.name for p in b.flat_proxy_outs) for p in b.flat_proxy_outs]
    first = next((p for p in outs if isinstance(p, TensorProxy)), None)
    if first is None or not unneeded:
        return list(outs)
    later = after(first, *unneeded)
    return [later if p is first else p for p in outs]


def _needs_care(bsym: BoundSymbol) -> bool:
    return draws_numbers(bsym) or bool(copies_in(bsym))


class _Splitter:
    """Writes into tensors of the region become new values; those into tensors of the surroundings are left out the second time.

    What is read of memory of the surroundings that is written is read from a copy, both times: the second finds what the first has found.
    """

    def __init__(
        self,
        bsyms: Sequence[BoundSymbol],
        rebuilt: Callable[[BoundSymbol, Sequence[BoundSymbol]], BoundSymbol],
        changing: Mapping[str, Memory],
    ):
        self.rebuilt = rebuilt
        self.made = {name for b in bsyms for name in _names(b)}
        self.sharing: set[str] = set()  # tensors with views, and views
        self.values: dict[Variable, Proxy] = {}  # what is in a tensor of the region that was written into
        self.values_again: dict[Variable, Proxy] = {}  # the second time
        self.memory = dict(changing)  # of tensors of the surroundings, and of views of what is written in the region
        self.written = {name for name, _ in writes_into(bsyms, {name: m.root for name, m in changing.items()})}
        self.given = frozenset(changing)
        self.copies: dict[str, dict[str, TensorProxy]] = {}  # by root, then by name: what was read since it was written last
        self.copied: dict[str, Proxy] = {}

    def named(self, outs: Sequence[Proxy]) -> tuple[list[Proxy], list[Proxy]]:
        """Results as they are called the first and the second time."""
        return tuple([values.get(variableify(p), p) for p in outs] for values in (self.values, self.values_again))

    def split(self, bsym: BoundSymbol) -> Split:
        if bsym.sym.id in VIEWS and isinstance(bsym.args[0], TensorProxy):
            self.sharing.update((bsym.args[0].name, bsym.output.name))
        if bsym.sym.id != REGION and self._is_view_of_surroundings(bsym):
            return [_swapped(bsym, self.values)], []  # what reads it reads a copy
        if not _needs_care(bsym):
            if bsym.sym.id == REGION and any(p.name in self.memory for p in bsym.flat_proxy_args):
                first, second = self.split_all(bsym.subsymbols)
                return first, [self._region(bsym, second)]
            return self._reading_copies([bsym], [bsym])
        if bsym.sym.id is PrimIDs.COPY_:
            return self._write(bsym)
        drawing = _draws().get(bsym.sym.id)
        if drawing is not None:
            return self._reading_copies(*drawing(bsym))
        # of what torch runs as a whole the gradient would be that of other numbers; Thunder's parts of a dropout draw others than torch
        parts = decomposed(bsym)
        if parts is not None:
            sharing = set(self.sharing)
            runs = self.split_all(parts)
            self.sharing = sharing  # of views in a decomposition the program knows nothing
            return runs
        if bsym.subsymbols:
            first, second = self.split_all(bsym.subsymbols)
            return first, [self._region(bsym, second)] if bsym.sym.id == REGION else second
        return self._reading_copies(*_noted(bsym))

    def split_all(self, bsyms: Sequence[BoundSymbol]) -> Split:
        first: list[BoundSymbol] = []
        second: list[BoundSymbol] = []
        for bsym in bsyms:
            once, again = self.split(bsym)
            first += once
            second += again
        return first, second

    def _region(self, bsym: BoundSymbol, second: Sequence[BoundSymbol]) -> BoundSymbol:
        """A region inside; what a tensor holds once it was written into must get out of it."""
        made = {name for b in second for name in _names(b)}
        outs = [self.values_again.get(variableify(p), p) for p in bsym.flat_proxy_outs]
        given_out = {p.name: p for p in (*outs, *self.values_again.values()) if p.name in made}
        return self.rebuilt(bsym.from_bsym(output=tuple(given_out.values())), second)

    def _is_view_of_surroundings(self, bsym: BoundSymbol) -> bool:
        found = {
            out: self.memory[base]
            for out, base in in_memory_of(bsym).items()
            if base in self.memory and self.memory[base].root in self.written
        }
        self.memory |= found
        if any(m.is_differentiated for m in found.values()):
            raise refused(bsym, "a view is taken, in a checkpointed region, of what is written without autograd")
        return bool(found) and not _needs_care(bsym)

    def _reading_copies(self, first: Sequence[BoundSymbol], second: Sequence[BoundSymbol]) -> Split:
        with scope(get_tracectx()) as made:
            read = {variableify(p): self._copy(p, b) for b in first for p in b.flat_proxy_args if p.name in self.memory}
        values, values_again = self.values | read, self.values_again | read
        return [*made, *(_swapped(b, values) for b in first)], [_swapped(b, values_again) for b in second]

    def _copy(self, p: TensorProxy, bsym: BoundSymbol) -> TensorProxy:
        """What a tensor holds that is written later, or was."""
        root, is_differentiated = self.memory[p.name]
        if is_differentiated and p.name not in self.given:
            raise refused(
                bsym, f"{p.name}, which lies in memory that is written without autograd, is used in a checkpointed region"
            )
        copies = self.copies.setdefault(root, {})
        if p.name not in copies:
            copies[p.name] = prims.clone(p)
            self.copied[copies[p.name].name] = p
        return copies[p.name]

    def _write(self, bsym: BoundSymbol) -> Split:
        source, target, *_ = bsym.args
        memory = self.memory.get(target.name)
        if memory is None and target.name in self.sharing:
            raise refused(bsym, f"{target.name}, which shares memory with others, is changed in place in a checkpointed region")
        (expanded, once), (expanded_again, again) = (
            _written(values.get(variableify(source), source), target) for values in (self.values, self.values_again)
        )
        if memory is not None:
            self.copies.pop(memory.root, None)
            self.memory[bsym.output.name] = memory
            return [*expanded, bsym.from_bsym(args=(once, target, *bsym.args[2:]))], []
        self.values |= _values(self.values, bsym, once)
        self.values_again |= _values(self.values_again, bsym, again)
        if target.name in self.made:
            return expanded, expanded_again
        return [*expanded, bsym.from_bsym(args=(once, target, *bsym.args[2:]))], expanded_again


def _written(value: TensorProxy, target: TensorProxy) -> tuple[list[BoundSymbol], TensorProxy]:
    """What a copy of `value` leaves in `target`, and the operation that makes it, if it takes one."""
    with scope(get_tracectx()) as made:
        value = as_written(value, target)
    return made, value


def _values(known: dict[Variable, Proxy], write: BoundSymbol, value: Proxy) -> dict[Variable, Proxy]:
    """What is to be put for the target of a write, and for all that stood for it."""
    target = variableify(write.args[1])
    stale = [v for v, p in known.items() if variableify(p) == target]
    return dict.fromkeys([variableify(write.output), target, *stale], value)


def _swapped(bsym: BoundSymbol, values: dict[Variable, Proxy]) -> BoundSymbol:
    return bsym.from_bsym_swap_proxies(values, skip_output=True) if values else bsym


def refused(bsym: BoundSymbol, headline: str) -> UnsupportedOpError:
    """The error for a write that cannot be in a region."""
    return UnsupportedOpError(
        with_details(
            headline,
            at=location_of(bsym),
            why="the region is run again in the backward, and would find what it has written itself, or not find it",
            instead="use the operation that returns a new tensor, or leave it out of the region",
        )
    )


def _names(bsym: BoundSymbol) -> set[str]:
    return {p.name for p in bsym.flat_proxy_outs}.union(*(_names(s) for s in bsym.subsymbols))


def _needed(
    bsyms: Sequence[BoundSymbol],
    outs: Sequence[Proxy],
    rebuilt: Callable[[BoundSymbol, Sequence[BoundSymbol]], BoundSymbol],
) -> list[BoundSymbol]:
    wanted = {p.name for p in outs}
    kept = []
    for bsym in reversed(bsyms):
        used = tuple(p for p in bsym.flat_proxy_outs if p.name in wanted)
        if used:
            if bsym.sym.id == REGION and len(used) < len(bsym.flat_proxy_outs):
                bsym = rebuilt(bsym.from_bsym(output=used), bsym.subsymbols)
            wanted.update(p.name for p in bsym.flat_proxy_args)
            kept.append(bsym)
    return kept[::-1]


# -- random operations ------------------------------------------------------------------------------------------------


def _drawing(name: str, meta: Callable[..., TensorProxy], run: Callable[..., torch.Tensor]) -> Callable[[BoundSymbol], Split]:
    """How a random operation is split: the first time it returns the state too, the second time it starts from that."""

    def meta_with_state(*args: Any, **kwargs: Any) -> tuple[TensorProxy, TensorProxy]:
        with scope(get_tracectx()):
            result = meta(*args, **kwargs)
        return result, state_proxy(result.device)

    def draw(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        state = state_of(_device(args, kwargs))
        return run(*args, **kwargs), state

    def meta_again(state: TensorProxy, *args: Any, **kwargs: Any) -> TensorProxy:
        with scope(get_tracectx()):
            return meta(*args, **kwargs)

    def redraw(state: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with drawing_from(state, _device(args, kwargs)):
            return run(*args, **kwargs)

    first = executor.register_operator(
        f"draw_{name}", meta=meta_with_state, fn=draw, tags=(OpTags.RANDOM_OP, OpTags.DONT_RECOMPUTE_IN_BACKWARD)
    )
    again = executor.register_operator(f"redraw_{name}", meta=meta_again, fn=redraw)
    NON_FUNCTIONAL_OPS.add(first.id)
    for symbol in (first, again):  # no gradient, whatever the tensor whose shape they take has
        register_grad(symbol.id, _constant(symbol))

    def split(bsym: BoundSymbol) -> Split:
        state, args, kwargs = state_proxy(bsym.output.device), bsym.args, bsym.kwargs
        drawn = first.bind(*args, **kwargs, output=(bsym.output, state))
        return [located_at(drawn, bsym)], [located_at(again.bind(state, *args, **kwargs, output=bsym.output), bsym)]

    return split


def _constant(symbol: Symbol) -> Callable:
    def rule(*args: Any, **kwargs: Any) -> Any:
        return symbol(*args, **kwargs)

    return rule


def _device(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    """Where numbers are drawn: on a device that is given, or that of a tensor."""
    return flat_tensors(args)[0].device if "device" not in kwargs else devices.to_torch_device(kwargs["device"])


def _noted(bsym: BoundSymbol) -> Split:
    """A random operation that torch runs as a whole; what no state tells it to draw again is kept.

    Raises:
        UnsupportedOpError: it is such a one, and has a gradient.
    """
    symbols = noted(bsym)
    if symbols is not None:
        first, again = symbols
        state, args, kwargs = state_proxy(bsym.flat_proxy_args[0].device), bsym.args, bsym.kwargs
        drawn = first.bind(args, kwargs, output=(state, bsym.output))
        return [located_at(drawn, bsym)], [located_at(again.bind(state, *args, **kwargs, output=bsym.output), bsym)]
    if any(map(is_differentiable, bsym.flat_proxy_args)) and any(map(is_differentiable, bsym.flat_proxy_outs)):
        raise UnsupportedOpError(
            with_details(
                f"{bsym.sym.name} draws numbers in a checkpointed region",
                at=location_of(bsym),
                why="it has a gradient, for which it would run again, and no state of a generator tells it what to draw",
                instead="leave it out of the region",
            )
        )
    return [bsym], []


def located_at(bsym: BoundSymbol, original: BoundSymbol) -> BoundSymbol:
    """An operation where another was written."""
    return bsym.from_bsym(source_filename=original.source_filename, source_positions=original.source_positions)


def _meta(shape: Sequence[int], *args: Any, device: devices.Device, dtype: dtypes.dtype) -> TensorProxy:
    return TensorProxy(shape=tuple(shape), device=device, dtype=dtype)


def _uniform(shape: Sequence[int], low: float, high: float, *, device: Any, dtype: Any) -> torch.Tensor:
    return _empty(shape, device, dtype).uniform_(low, high)


def _randn(shape: Sequence[int], *, device: Any, dtype: Any) -> torch.Tensor:
    return _empty(shape, device, dtype).normal_()


def _empty(shape: Sequence[int], device: Any, dtype: Any) -> torch.Tensor:
    return torch.empty(tuple(shape), device=devices.to_torch_device(device), dtype=dtypes.to_torch_dtype(dtype))


@functools.cache
def _draws() -> dict[Any, Callable[[BoundSymbol], Split]]:
    """How to take apart what draws random numbers, by primitive, or by what is carried out by a kernel of ours."""
    return {
        PrimIDs.UNIFORM: _drawing("uniform", _meta, _uniform),
        PrimIDs.RANDN: _drawing("randn", _meta, _randn),
        **{symbol.id: _drawing(symbol.name, symbol.meta, kernel) for symbol, kernel in drawing_kernels.items()},
    }
