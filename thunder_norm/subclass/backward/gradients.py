"""Gradients on their way between torch's autograd and Thunder's: what they consist of, and what carries them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from sys import getrefcount
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.model_state.escapes import check_inner
from thunder_norm.subclass.acquiring.lengths import is_symbolic
from thunder_norm.subclass.acquiring.tape import Tape
from thunder_norm.subclass.backward.encoding import decode, encode
from thunder_norm.subclass.classes.jagged import is_jagged_class
from thunder_norm.subclass.classes.protocol import WrapperSpec, is_equal
from thunder_norm.subclass.recording.record import Recorded
from thunder_norm.tracing.calls.differentiated import Sources, with_sources
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core.proxies import TensorProxy


def leaves_of(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The plain tensors a tensor consists of."""
    return WrapperSpec.of(t).leaves(t) if is_wrapper(t) else (t,)


def detached(t: torch.Tensor) -> torch.Tensor:
    """`t` without history.  Integers have none: these stay the tensors that they are, by which nested tensors know their shape."""
    return t.detach() if t.is_floating_point() or t.is_complex() else t


def _moving_in(spec: WrapperSpec | None, leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The inner tensors that a gradient hands on: not the offsets, which it has from what it is the gradient of."""
    if spec is None or not any(spec.offsets):
        return leaves
    return tuple([t for t, is_offsets in zip(leaves, spec.offsets, strict=True) if not is_offsets])


def _offsets_in(spec: WrapperSpec | None, leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    if spec is None or not any(spec.offsets):
        return ()
    return tuple([t for t, is_offsets in zip(leaves, spec.offsets, strict=True) if is_offsets])


def _metadata(t: torch.Tensor) -> tuple:
    return tuple(t.shape), t.dtype, t.device


def is_like(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether a gradient can be handed on by the inner tensors themselves."""
    return [_metadata(t) for t in tensors] == [_metadata(t) for t in others] and all(t.is_floating_point() for t in tensors)


@dataclass(frozen=True)
class Structure:
    """What a gradient consists of: that of a plain tensor, or of a wrapper."""

    what: str  # whose gradient it is, for errors
    spec: WrapperSpec | None
    leaves: tuple[torch.Tensor, ...]  # fakes
    carried: tuple[torch.Tensor, ...]  # fakes of what autograd hands on for each of them, offsets left out; see `encoding`
    taken: tuple[int, ...] = ()  # which inner tensors of what it belongs to are its offsets: these very tensors

    @staticmethod
    def of(t: torch.Tensor, what: str, owner: torch.Tensor | None = None) -> Structure:
        """The structure of a fake; what is carried is computed here.

        Raises:
            UnsupportedOpError: it is a nested tensor whose offsets are not those of `owner`, what it is the gradient of.
        """
        leaves, spec = leaves_of(t), WrapperSpec.of(t) if is_wrapper(t) else None
        offsets = _offsets_in(spec, leaves)
        owned = {id(leaf): i for i, leaf in enumerate(() if owner is None else leaves_of(owner))}
        if owner is not None and not all(id(leaf) in owned for leaf in offsets):
            raise UnsupportedOpError(f"the gradient of {what} has other offsets than what it is the gradient of")
        taken = tuple([owned[id(leaf)] for leaf in offsets]) if owner is not None else ()
        return Structure(what, spec, leaves, tuple(map(encode, _moving_in(spec, leaves))), taken)

    def decoded(self) -> torch.Tensor:
        """A fake of the gradient that is computed from what is carried."""
        return self._wrapped(self._decoded(self.carried), _offsets_in(self.spec, self.leaves))

    def taken_from(self, owner: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Its offsets, which are those of what it is the gradient of."""
        return tuple([leaves_of(owner)[i] for i in self.taken]) if self.taken else ()

    def build(self, carried: tuple[torch.Tensor | None, ...], offsets: tuple[torch.Tensor, ...] = ()) -> torch.Tensor | None:
        """The gradient from what was handed on and its `offsets`; None if there is none, zeros where some are missing."""
        for t in carried:
            if t is None:
                if all(t is None for t in carried):
                    return None
                carried = tuple([_zeros(f) if t is None else t for t, f in zip(carried, self.carried, strict=True)])
                break
        gradient = self._wrapped(carried if self.is_carried_as_it_is else self._decoded(carried), offsets)
        if self.spec is not None:
            check_inner(gradient, self.spec.names, "the gradient of ", self.what)
        return gradient

    def shapes_for(self, owner: torch.Tensor) -> list[torch.Size]:
        """The shapes of what is carried, where it is the gradient of `owner`: of a nested tensor those of its own values."""
        if not any(map(is_symbolic, self.carried)):
            return [f.shape for f in self.carried]
        return [t.shape for t in _moving_in(self.spec, leaves_of(owner))]

    def builder(self) -> Callable[[Sequence[torch.Tensor | None]], torch.Tensor | None]:
        """`build` without offsets, as a function of as few steps as there can be: a backward calls one for each parameter."""
        spec, what = self.spec, self.what
        if spec is None or not (self.is_carried_as_it_is and spec.has_own_protocol):
            return lambda carried: self.build(tuple(carried))
        names, build = spec.names, spec.build

        def wrapped(carried: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
            for t in carried:
                if t is None:
                    return self.build(tuple(carried))
            gradient = build(carried)  # pyright: ignore[reportArgumentType] - none is None
            for name in names:
                if type(getattr(gradient, name)) is not torch.Tensor:
                    check_inner(gradient, names, "the gradient of ", what)
                    break
            return gradient

        return wrapped

    @functools.cached_property
    def is_carried_as_it_is(self) -> bool:
        """Whether what is handed on are the inner tensors themselves."""
        return all(f.is_floating_point() for f in self._moving)

    @functools.cached_property
    def _moving(self) -> tuple[torch.Tensor, ...]:
        return _moving_in(self.spec, self.leaves)

    def _decoded(self, carried: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple([decode(t, f.dtype) for t, f in zip(carried, self._moving, strict=True)])

    def _wrapped(self, moving: tuple[torch.Tensor, ...], offsets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self.spec is None:
            return moving[0]
        if not offsets:
            return self.spec.build(moving)
        one, other = iter(offsets), iter(moving)
        return self.spec.build(tuple([next(one if is_offsets else other) for is_offsets in self.spec.offsets]))

    @functools.cached_property
    def _expected(self) -> list[tuple]:
        return [(tuple([None if is_symbolic(n) else n for n in f.shape]), f.dtype) for f in self._moving]

    def open(self, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is handed on of a gradient that comes in.

        Raises:
            UnsupportedOpError: it is of another class or context than the trace was made for.
        """
        leaves = self._leaves_in(t)
        if leaves is None:
            cls = torch.Tensor if self.spec is None else self.spec.cls
            context = "" if self.spec is None or not self.spec.ctx else f" and the context {self.spec.ctx}"
            raise UnsupportedOpError(
                with_details(
                    f"the gradient of {self.what} is a {type(t).__name__}",
                    expected=f"{cls.__name__} with inner tensors of shapes {[tuple(f.shape) for f in self._moving]}{context}",
                    why="the backward was compiled for a gradient like torch.ones_like of the result",
                    instead="compute the loss inside the jitted function",
                )
            )
        return leaves if self.is_carried_as_it_is else tuple(map(encode, leaves))

    def is_like(self, t: torch.Tensor) -> bool:
        """Whether `open` takes a gradient that comes in."""
        return self._leaves_in(t) is not None

    def _leaves_in(self, t: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        if self.spec is None:
            leaves = None if is_wrapper(t) else (t,)
        elif self.spec.matches(t):
            leaves = _moving_in(self.spec, self.spec.leaves(t))
        elif type(t) is self.spec.cls and self._has_contexts_of(other := WrapperSpec.of(t)):
            leaves = _moving_in(other, leaves_of(t))
        elif type(t) is self.spec.cls and self._lies_otherwise(t):
            leaves = self._leaves_in(t.clone(memory_format=torch.contiguous_format))  # strides may be context: a DTensor's are
        else:
            leaves = None
        if leaves is None or [(tuple(x.shape), x.dtype) for x in leaves] == self._expected:  # most
            return leaves
        is_alike = len(leaves) == len(self._expected) and all(map(_is_as_expected, leaves, self._expected))
        return leaves if is_alike else None

    def _lies_otherwise(self, t: torch.Tensor) -> bool:
        """Whether a gradient is expanded, as that of a sum is, or transposed, and one that lies as a new tensor does is expected."""
        assert self.spec is not None
        is_known = t.shape == self.spec.shape and t.layout is torch.strided
        return is_known and not t.is_contiguous() and self.spec.stride == torch._prims_common.make_contiguous_strides_for(t.shape)

    def _has_contexts_of(self, other: WrapperSpec) -> bool:
        """Whether a gradient has what the backward was traced with; of nested tensors that are lengths, which a cotangent need not know."""
        assert self.spec is not None
        return is_jagged_class(self.spec.cls) or is_equal(self.spec.contexts, other.contexts)


def _is_as_expected(t: torch.Tensor, expected: tuple) -> bool:
    """Whether shape and dtype are these; a size that is None may be any."""
    shape, dtype = expected
    return t.dtype is dtype and t.ndim == len(shape) and all(e is None or n == e for n, e in zip(t.shape, shape, strict=True))


def _zeros(fake: torch.Tensor) -> torch.Tensor:
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)


def _owned(grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Tensors that nobody else has: torch adds later gradients to what is inside a wrapper's gradient, in place.

    What the backward hands on may be the inner tensor of another gradient, of the one that came in, or an input: that is copied.
    """
    if torch.is_grad_enabled():
        return grads
    references, uses, in_memory = _of_fresh_gradient()
    return [
        t
        if t is None
        or (getrefcount(t) <= references and t._use_count() <= uses and _in_memory(t.untyped_storage()._cdata) <= in_memory)  # type: ignore[attr-defined]
        else _copied(t)
        for t in grads
    ]


def _copied(t: torch.Tensor) -> torch.Tensor:
    """A copy that lies as the tensor does: expanded, if that is; torch copies a gradient that lies otherwise than what it belongs to."""
    strides = t.stride()
    if all(strides):
        return t.clone()
    shape = [n if s else min(n, 1) for n, s in zip(t.shape, strides, strict=True)]
    return t.as_strided(shape, strides).clone().expand(t.shape)


def _without_overlap(carried: list[torch.Tensor | None], dense: Sequence[bool]) -> None:
    """Have an entry for each element: torch adds to a gradient in place whose own strides say that it has."""
    for i, (t, is_dense) in enumerate(zip(carried, dense, strict=True)):
        if is_dense and t is not None and 0 in t.stride():
            carried[i] = t.contiguous()


@functools.cache
def _of_fresh_gradient() -> tuple[int, int, int]:
    """References in Python, references in C++, and tensors in its memory, of one just computed and seen from a list as in `_owned`."""
    (found,) = [(getrefcount(t), t._use_count(), _in_memory(t.untyped_storage()._cdata)) for t in [torch.ones(1) * 2]]  # type: ignore[attr-defined]
    return found


_in_memory = torch._C._storage_Use_Count  # type: ignore[attr-defined]


class Carriers:
    """What stands for the gradients of some inputs among the tensors that a program takes, with the way back from there.

    Called with these inputs, in each call of the program.
    """

    def __init__(self, gradients: Sequence[Structure]):
        self._gradients = [(g, len(g.carried)) for g in gradients]
        self._have_offsets = any(g.taken for g in gradients)
        self._made: tuple[torch.Tensor, ...] | None = None  # the same in every call

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        offsets = [g.taken_from(x) for (g, _), x in zip(self._gradients, inputs, strict=True)] if self._have_offsets else None
        return with_sources(self._stand_ins(inputs), Sources(inputs, functools.partial(self._gradients_of, offsets)))

    @functools.cached_property
    def _builders(self) -> list[tuple[Callable[[Sequence[torch.Tensor | None]], torch.Tensor | None], slice]]:
        """What builds each gradient, and from which of what is carried."""
        ends = list(accumulate(n for _, n in self._gradients))
        return [(g.builder(), slice(end - n, end)) for (g, n), end in zip(self._gradients, ends, strict=True)]

    def _stand_ins(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Tensors without data, of the metadata of what is carried."""
        if self._made is not None:
            return self._made
        fakes = [f for g, _ in self._gradients for f in g.carried]
        shapes = [s for (g, _), x in zip(self._gradients, inputs, strict=True) for s in g.shapes_for(x)]
        with torch.inference_mode(False):
            made = tuple(
                [
                    torch.empty_strided(s, (0,) * f.ndim, dtype=f.dtype, device=f.device)
                    for s, f in zip(shapes, fakes, strict=True)
                ]
            )
        # none of a mode that makes fake tensors, and each of the same size in every call
        if all(type(t) is torch.Tensor for t in made) and not any(map(is_symbolic, fakes)):
            self._made = made
        return made

    def _check_plain(self, carried: Sequence[torch.Tensor | None]) -> None:
        """Refuse wrappers in the place of what is inside of them."""
        for gradient, (_, place) in zip((g for g, _ in self._gradients), self._builders, strict=True):
            cls = None if gradient.spec is None else gradient.spec.cls
            if cls is not None and any(type(t) is cls for t in carried[place]):
                raise UnsupportedOpError(
                    with_details(
                        f"a gradient, a {cls.__name__}, arrives at a plain result of the jitted function, beside wrappers",
                        why="the backward was written for a plain one",
                        instead=f"a loss that has no {cls.__name__} for its gradient where it depends on plain results",
                    )
                )

    @functools.cached_property
    def _dense(self) -> list[bool]:
        """Which of what is carried a wrapper's own strides say of that it has an entry for each of its elements."""
        return [g.spec is not None and all(f.stride()) for g, _ in self._gradients for f in g.carried]

    def _gradients_of(self, offsets: list | None, carried: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        if any(type(t) is not torch.Tensor and t is not None for t in carried):
            self._check_plain(carried)
        _without_overlap(carried, self._dense)
        owned = _owned(carried)
        if offsets is None:
            return [build(owned[place]) for build, place in self._builders]
        remaining = iter(owned)
        return [g.build(tuple(islice(remaining, n)), o) for (g, n), o in zip(self._gradients, offsets, strict=True)]


class _Close(torch.autograd.Function):
    """From inner results to the wrapper around them; backwards, from its gradient to theirs."""

    @staticmethod
    def forward(ctx: Any, result: Result, spec: WrapperSpec, tape: Tape | None, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.result, ctx.num_leaves, ctx.tape = result, spec.num_leaves, tape
        ctx.set_materialize_grads(False)
        if tape is not None:
            ctx.num_own = len(tensors) - tape.num_inputs
            ctx.save_for_backward(*tensors[ctx.num_own :])
        return spec.build(tuple(map(detached, tensors[: spec.num_leaves])))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:
        result, tape = ctx.result, ctx.tape
        if tape is not None and (torch.is_grad_enabled() or (grad is not None and not result.tangent.is_like(grad))):
            found = (None,) * tape.num_inputs if grad is None else tape.gradients(result.fake, grad, ctx.saved_tensors)
            return None, None, None, *(None,) * ctx.num_own, *found
        grads = (None,) * len(result.tangent.carried) if grad is None else result.tangent.open(grad)
        others = () if tape is None else (None,) * tape.num_inputs
        return None, None, None, *((None,) * ctx.num_leaves if result.uses_carriers else ()), *grads, *others


@dataclass
class Source:
    """An input that gets a gradient."""

    fake: torch.Tensor
    gradient: Structure
    anchors: tuple[TensorProxy, ...] = ()  # what stands for it in Thunder's autograd

    @property
    def uses_carriers(self) -> bool:
        """Whether its gradient is handed on by carriers: not that of a plain tensor that is a plain tensor too."""
        return is_wrapper(self.fake) or self.gradient.spec is not None or not is_like(self.gradient.leaves, (self.fake,))


@dataclass
class Result:
    """An output that gets a gradient."""

    fake: torch.Tensor
    tangent: Structure
    uses_carriers: bool
    anchors: tuple[TensorProxy, ...] = ()

    def close(self, spec: WrapperSpec, tensors: tuple[torch.Tensor, ...], tape: Tape | None) -> torch.Tensor:
        """The wrapper around inner results, connected to Thunder's autograd; what the tape is given follows these."""
        with torch.enable_grad():
            return _Close.apply(self, spec, tape, *tensors)


@dataclass
class Segment:
    """What one node of torch's autograd graph did."""

    name: str
    log: list[Recorded] = field(default_factory=list)
