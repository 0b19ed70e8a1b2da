"""What is differentiated while a trace is acquired: by torch's autograd, which may run on the fakes, and by Thunder, as far as is known.

`differentiation` makes the gradients of what torch's autograd has followed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.fakes import Fakes
from thunder_norm.subclass.classes.protocol import WrapperSpec, outer_metadata
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.tracing import activity
from thunder_norm.tracing.shared_memory.recorded_writes import Histories
from thunder_norm.tracing.shared_memory.views import makes_view
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core.compile_data import get_compile_data
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol


class _Computed(torch.autograd.Function):
    """Makes a tensor one that was computed before the program, into which it may write."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise AssertionError("gradients end here")


class _Reading(torch.autograd.Function):
    """Reads a tensor, without an operation that its class would be asked for."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise AssertionError("nobody asks for it")


class _Start(NamedTuple):
    """Where the gradients of a tensor arrive, and what keeps the graph that this is in."""

    edge: GradientEdge
    read: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Start:
        read = _Reading.apply(tensor)
        return cls(GradientEdge(*read.grad_fn.next_functions[0]), read)


class Intermediate(NamedTuple):
    """What a composite makes: a fake and its proxy in there, and what the composite returns, which may become more."""

    fake: torch.Tensor
    proxy: TensorProxy
    composite: Symbol
    returned: list[torch.Tensor]


_NO_VIEWS = frozenset({"contiguous", "resolve_conj", "resolve_neg"})  # what they return is what they were given, or a copy


class Autograd:
    """Torch's autograd on the fakes of one acquisition: it runs as soon as there is a wrapper that requires grad."""

    def __init__(self, fakes: Fakes) -> None:
        self.is_running = False
        self.is_from_the_first = False  # it runs, and did before the program met any tensor
        self.starts_late = False  # what was computed before it ran should have gone through it
        self.is_asked = False  # and the program itself asks for derivatives, in a call without autograd too
        self.sources: dict[int, torch.Tensor] = {}  # the fakes it starts from, by identity
        self._starts: dict[int, _Start] = {}  # where gradients arrive that are for these as they were given
        self.intermediates: dict[int, Intermediate] = {}  # fakes inside composites, by identity
        self.outdated: dict[int, torch.Tensor] = {}  # of these, what is not known any more: something in their memory was changed
        # the recorded operation that made a fake, and the proxies of its arguments then, see `trace.emit_composite`
        self.made_by: dict[int, tuple[Any, dict[int, Any]]] = {}
        self.started: dict[str, TensorProxy] = {}  # plain tensors that the program made, and said that they require grad
        self._fakes = fakes
        self._active: set[str] = set()  # proxies that depend differentiably on an input, as Thunder sees it
        self._views: set[str] = set()  # views of these that were made without gradients, and what depends on them
        self._num_scanned = 0
        self._memory = Histories()

    def start(self) -> None:
        """Run from now on, from the plain tensors as well that Thunder would differentiate."""
        self.is_running, self.is_from_the_first = True, not self._fakes.pairs()
        # operations on a wrapper by now were differentiated through to what is inside
        self.starts_late = self.starts_late or any(self._fakes.inner.values())
        for fake, proxy in self._fakes.pairs():
            self.note_plain(fake, proxy)

    def note_given(self, fake: torch.Tensor, is_leaf: bool) -> None:
        """An input wrapper requires grad, or what is inside of one, which operations on the wrapper do not see."""
        self._start_from(fake, is_leaf)

    def _start_from(self, fake: torch.Tensor, is_leaf: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            if is_leaf:
                fake.requires_grad_()
            else:  # before the program, whose writes the version counts
                with torch.autograd._unsafe_preserve_version_counter(fake):
                    _Computed.apply(fake, torch.empty((), requires_grad=True))
            self._starts[id(fake)] = _Start.of(fake)
        self.sources[id(fake)] = fake

    def note_made_leaf(self, fake: torch.Tensor) -> None:
        """A wrapper that the program has made is to get gradients, as an input does."""
        with torch.enable_grad():
            self._starts[id(fake)] = _Start.of(fake)

    def sources_in_memory_of(self, fake: torch.Tensor | None) -> list[torch.Tensor]:
        """The plain tensors it starts from that lie in the memory of a fake."""
        storage = None if fake is None else fake.untyped_storage()._cdata
        return [t for t in self.sources.values() if not is_wrapper(t) and t.untyped_storage()._cdata == storage]

    def start_of(self, fake: torch.Tensor) -> GradientEdge:
        """Where the gradients arrive of a source as it was given, whatever was written into it since."""
        return self._starts[id(fake)].edge

    def has_recorded(self, fake: torch.Tensor) -> bool:
        """Whether autograd has recorded a write into an input: it has another history since."""
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            if not fake.requires_grad:
                return False
            start = self._starts.get(id(fake))
            return start is None or _Start.of(fake).edge != start.edge

    def note_plain(self, fake: torch.Tensor, proxy: TensorProxy) -> None:
        """A plain tensor is met, which requires grad where Thunder would differentiate it."""
        has_gradient = fake.dtype.is_floating_point or fake.dtype.is_complex
        is_candidate = not fake.requires_grad and has_gradient and id(fake) not in self._fakes.inner
        if is_candidate and self._is_active(proxy):
            real = self._fakes.real_input(proxy)
            self._start_from(fake, is_leaf=real is not None and real.is_leaf)

    def requires_grad(self, proxy: TensorProxy) -> bool:
        """Whether the tensor a proxy stands for requires grad, for torch or for Thunder."""
        if isinstance(proxy, SubclassProxy):
            return outer_metadata(proxy.fake)[2]
        fake = self._fakes.known(proxy) if self.is_running else None
        return self._is_active(proxy) if fake is None else fake.requires_grad

    def note_started(self, proxy: TensorProxy) -> None:
        """Note that the program has a history start at a plain tensor that it made."""
        if self.is_running:
            fake = self._fakes.known(proxy)
            with torch._C.DisableTorchFunctionSubclass():
                (self._fakes.new_for(proxy) if fake is None else fake).requires_grad_()
        self.requires_grad(proxy)  # what came before does not depend on it
        self.started[proxy.name] = proxy
        self._active.add(proxy.name)

    def check_known(self, used: Iterable[torch.Tensor]) -> None:
        """Refuse a backward that needs a tensor of which nobody knows what it is since something was written into its memory.

        Raises:
            UnsupportedOpError: it does.
        """
        if any(id(t) in self.outdated for t in used):
            raise UnsupportedOpError(
                with_details(
                    "a backward that computes with what was written into a tensor that it keeps",
                    why="what the tensor is since is not known: several lie in its memory, of other dtypes or of parts of it",
                    instead="write into a clone",
                )
            )

    def detached(self, proxy: TensorProxy) -> None:
        """Note that the program has detached a plain tensor in place."""
        if self._is_active(proxy):
            self._active.discard(proxy.name)

    def meets_gradient(self, args: tuple, kwargs: dict) -> bool:
        """Whether wrappers meet a plain tensor that requires grad, beside them or inside: what eager has of gradients is the class's."""
        proxies = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, TensorProxy)]
        wrappers = [p.fake for p in proxies if isinstance(p, SubclassProxy)]
        if not wrappers or any(map(self._is_inside_differentiated, wrappers)):
            return False
        return any(map(self.requires_grad, proxies)) or any(map(self.holds_gradient, wrappers))

    def holds_gradient(self, wrapper: torch.Tensor) -> bool:
        """Whether the program put plain tensors that require grad into a wrapper, while this did not run.

        In eager mode the wrapper has a flag of its own then, if its class says so, and what the class makes of the tensors has no history.
        """
        if self.is_running or any(self._fakes.inner.values()):
            return False
        return any(p is not None and self.requires_grad(p) for p in self._leaves(wrapper))

    def _is_inside_differentiated(self, wrapper: torch.Tensor) -> bool:
        """Whether Thunder differentiates what is inside of a wrapper, as a given one holds tensors that require grad."""
        is_active = (p is None or p.requires_grad or self.requires_grad(p) for p in self._leaves(wrapper))
        return any(self._fakes.inner.values()) and any(is_active)

    def _leaves(self, wrapper: torch.Tensor) -> list[TensorProxy | None]:
        return [self._fakes.proxy_of(t) for t in WrapperSpec.of(wrapper).leaves(wrapper)]

    def _is_active(self, proxy: TensorProxy) -> bool:
        """Whether Thunder would differentiate what a plain proxy stands for."""
        if proxy.history is not None and proxy.requires_grad:
            return True
        bsyms = get_jit_ctx().computation_trace.bound_symbols
        for bsym in bsyms[self._num_scanned :]:
            inputs = (p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy))
            self._active.update(p.name for p in inputs if p.history is not None and p.requires_grad)
            activity.propagate(bsym, self._active)
            self._active |= self._memory.after(bsym, self._active)
            self._note_views(bsym)
        self._num_scanned = len(bsyms)
        return proxy.name in self._active

    def _note_views(self, bsym: BoundSymbol) -> None:
        """Note views that are made under `torch.no_grad`: torch says that these require grad where their tensor does, and gives them no history."""
        if self._views:
            activity.propagate(bsym, self._views)
        made = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy) and ProxyTag.DETACHED_AUTOGRAD_GRAPH in p.tags]
        if bsym.sym.name not in _NO_VIEWS and made and makes_view(bsym) and not activity.has_no_history(bsym):
            of = {p.name for p in bsym.flat_proxy_args}
            if not of.isdisjoint(self._active | self._views):
                self._views.update(p.name for p in made)

    def is_of_unrecorded_view(self, proxy: TensorProxy) -> bool:
        """Whether a tensor is a view that was made without gradients of what requires grad, or may be, or is computed from one."""
        if self.is_running:
            return False  # torch's autograd knows
        return not self._is_active(proxy) and proxy.name in self._views


def may_have_history(x: torch.Tensor) -> bool:
    """Whether autograd may record a write into an input: it is no leaf, or view of one, that requires grad."""
    return not any(t.requires_grad and t.is_leaf for t in (x, view_root(x)))


def view_root(x: torch.Tensor) -> torch.Tensor:
    """The tensor that one is a view of, or itself."""
    with torch._C.DisableTorchFunctionSubclass():
        base = x._base if x._is_view() else None
    return x if base is None else base


def is_grad_enabled() -> bool:
    """Whether the program being traced is in a region that records gradients."""
    cd = get_compile_data()
    return torch.is_grad_enabled() if cd is None else cd.is_grad_enabled
