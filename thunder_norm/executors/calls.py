"""Calls of a region: which compiled function fits the inputs at hand, asked of C++, and a new one where none does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard

from thunder_norm import first_calls
from thunder_norm.executors.graphs import Boxed, Function, compiled
from thunder_norm.executors.plans import Layout, NotCompilable, Tensors
from thunder_norm.tracing.guarding.tensor_checks import check_like

_MOST_VARIANTS = 16  # of a region: for inputs of other strides, or in another state of the process
_lock = threading.RLock()  # inductor compiles for one at a time

_modes = torch._C._len_torch_dispatch_stack
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Traits:
    """What is known of a region before it is compiled."""

    place: str  # "region 2 of 5"
    layouts: tuple[Layout, ...]  # of its results
    has_backward: bool
    described: Callable[[], str | None] = lambda: None  # all that it does, as text


@dataclass(eq=False)
class _Variant:
    fits: Callable[..., bool]
    is_same_state: Callable[[], bool]
    run: Boxed


class RegionCall:
    """A region as a function of tensors: compiled when it is first called, and again for inputs that look otherwise.

    Where nothing compiled can be right, its operations run one by one: in a program that records gradients of them, under a
    ``TorchDispatchMode``, with fake tensors or those of ``torch.func``.
    """

    def __init__(self, plain: Function, traits: Traits):
        self.plain, self.traits = plain, traits
        self.variants: list[_Variant] = []
        self._by_key: dict[Any, Boxed | None] = {}
        self.call, self.freeing = self._make_calls()
        setattr(self.call, "freeing", self.freeing)  # noqa: B010

    def _make_calls(self) -> tuple[Function, Boxed]:
        """The region as a function of tensors, and of a list of them, which it empties."""
        current: tuple[Callable[..., bool], Callable[[], bool], Any] = (_never, _never, None)
        modes, other = _modes, self._other

        def use(variant: _Variant) -> None:
            nonlocal current
            current = variant.fits, variant.is_same_state, variant.run

        def region(*inputs: torch.Tensor) -> Tensors:
            return freeing(list(inputs))

        def freeing(inputs: list[torch.Tensor]) -> Tensors:
            fits, is_same_state, run = current  # at once: another thread may come to use another
            if fits(*inputs) and is_same_state() and not modes():
                return run(inputs)
            return other(inputs)

        self._use = use
        return region, freeing

    def _other(self, inputs: list[torch.Tensor]) -> Tensors:
        if not _are_plain(inputs):
            return self.plain(*inputs)
        if torch.is_grad_enabled():
            if any(t.requires_grad for t in inputs):
                return self.plain(*inputs)
            with torch.no_grad():
                return self.freeing(inputs)
        for variant in self.variants:
            if variant.is_same_state() and variant.fits(*inputs):
                self._use(variant)
                return variant.run(inputs)
        run = self._run_for(inputs) or self._one_by_one
        variant = _Variant(_guards(inputs), GlobalStateGuard().check, run)
        self.variants = [variant, *self.variants[: _MOST_VARIANTS - 1]]
        self._use(variant)
        return run(inputs)

    def _run_for(self, inputs: list[torch.Tensor]) -> Boxed | None:
        """What is compiled for such inputs; None if the region is to run as it is."""
        key = _key(inputs)
        with _lock:
            if key in self._by_key:
                return self._by_key[key]
            if len(self._by_key) >= _MOST_VARIANTS:
                return None
            self._by_key[key] = self._compiled(inputs)
            return self._by_key[key]

    def _one_by_one(self, inputs: list[torch.Tensor]) -> Tensors:
        return self.plain(*inputs)

    def _compiled(self, inputs: list[torch.Tensor]) -> Boxed | None:
        with first_calls.shown("compiling", lambda: self.traits.place):
            try:
                return compiled(self.plain, inputs, self.traits.layouts, self.traits.has_backward, self.traits.described())
            except NotCompilable:
                return None


def _never(*inputs: Any) -> bool:
    return False


def _are_plain(inputs: Sequence[Any]) -> bool:
    """Whether these are tensors with memory, and nothing listens to what is done with them."""
    if _modes() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(type(t) in _PLAIN and not torch._is_functional_tensor(t) and not t.is_conj() and not t.is_neg() for t in inputs)


def _guards(inputs: Tensors) -> Callable[..., bool]:
    return check_like(inputs, [t.size() for t in inputs], [t.stride() for t in inputs])


def _key(inputs: Tensors) -> tuple:
    """What a compiled function depends on."""
    tensors = tuple((t.size(), t.stride(), t.dtype, t.device) for t in inputs)
    return tensors, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
