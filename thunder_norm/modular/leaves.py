"""Gradients of leaves that are parts of parameters: whatever becomes of a parameter's gradient, an optimizer of its parts steps with that."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from thunder_norm.errors import GradientError, NormMismatchError, with_details


def hand_on_gradients(name: str, p: torch.Tensor, leaves: Sequence[torch.Tensor], places: Sequence[Callable]) -> None:
    """Give leaves their parts of a parameter's gradient, as long as there are any: views of it, so that clipping clips them."""
    handing = _HandsOn(name, p, places)
    gone = functools.partial(_gone, weakref.ref(handing))
    handing.leaves = [weakref.ref(leaf, gone) for leaf in leaves]
    handing.handles = [p.register_hook(handing.before), p.register_post_accumulate_grad_hook(handing)]
    _alive.add(handing)
    for leaf in leaves:
        leaf._part_of = _PartOf(name)  # type: ignore[attr-defined]


class _PartOf:
    """Goes where its tensor goes: a copy of that shares no memory with a parameter, or gets no gradients, and would never be moved."""

    def __init__(self, name: str):
        self.name = name

    def __reduce_ex__(self, protocol: Any) -> Any:  # of copies and pickles
        raise NormMismatchError(
            with_details(
                f"what param_groups(split=True) gives of {self.name!r} is a part of it, and a copy would be a part of nothing",
                instead="param_groups of the copied or loaded model, and load_state_dict of a new optimizer",
            )
        )


class _HandsOn:
    """What the hooks of one parameter do.  They are the only ones that hold it, and it holds neither the parameter nor its leaves."""

    def __init__(self, name: str, p: torch.Tensor, places: Sequence[Callable]):
        self.name, self.p, self.places = name, weakref.ref(p), list(places)
        self.leaves: list[weakref.ref[torch.Tensor]] = []
        self.handles: list[RemovableHandle] = []
        self.last: StorageWeakRef | None = None
        self.adds = False

    @torch.compiler.disable  # compiled autograd would trace the hooks
    def before(self, _: torch.Tensor) -> None:
        """Ahead of the accumulation; after it, one into a new tensor (create_graph=True) looks like a first gradient."""
        p = self.p()
        self.adds = p is not None and p.grad is not None and self._is_handed_on(p.grad)

    @torch.compiler.disable
    def __call__(self, p: torch.Tensor) -> None:
        grad = p.grad
        assert grad is not None
        if self._is_elsewhere(p):
            raise GradientError(f"{self.name!r} has been moved or replaced since its groups were made: make them anew")
        if self.adds and any(leaf.grad is None for leaf, _ in self._parts()):
            raise GradientError(
                with_details(
                    f"the gradient of {self.name!r} has been added to one that its optimizer had cleared",
                    instead="model.zero_grad(), which clears the parameter's: an optimizer of its blocks clears theirs alone",
                )
            )
        self._hand_on(grad)
        _alive.agree_in_backward()

    def agree(self) -> None:
        """Leaves have the gradient that the parameter has now.  What they were given by others stays, and what was cleared."""
        p = self.p()
        given = [leaf for leaf, _ in self._parts() if leaf.grad is not None and self._is_handed_on(leaf.grad)]
        if p is None or not given:
            return
        if p.grad is None:
            for leaf in given:
                leaf.grad = None
        elif not self._is_handed_on(p.grad) and not self._is_elsewhere(p):
            self._hand_on(p.grad)

    def _hand_on(self, grad: torch.Tensor) -> None:
        self.last = StorageWeakRef(grad.untyped_storage())
        for leaf, place in self._parts():
            leaf.grad = place(grad)

    def _parts(self) -> Iterator[tuple[torch.Tensor, Callable]]:
        for ref, place in zip(self.leaves, self.places, strict=True):
            leaf = ref()
            if leaf is not None:
                yield leaf, place

    def _is_handed_on(self, grad: torch.Tensor) -> bool:
        """Whether a gradient is in the memory of the last that leaves were given; an address alone may be another's by now."""
        return self.last is not None and not self.last.expired() and self.last.cdata == grad.untyped_storage()._cdata

    def _is_elsewhere(self, p: torch.Tensor) -> bool:
        return any(leaf.untyped_storage()._cdata != p.untyped_storage()._cdata for leaf, _ in self._parts())


def _gone(handing: weakref.ref[_HandsOn], _: Any) -> None:
    """A leaf is garbage: with the last, the parameter is as it was before it had any."""
    of = handing()
    if of is not None and not any(leaf() is not None for leaf in of.leaves):
        for handle in of.handles:
            handle.remove()


class _Alive:
    """All that hand on gradients.  A parameter that a backward does not reach calls no hook: others have to look.

    Each backward does for whoever reads gradients before the step (clipping, `GradScaler`), each step for gradients that were cleared or
    replaced since; a step's closure runs after the hook of the step, so it is followed by another look.
    """

    def __init__(self) -> None:
        self.refs: dict[int, weakref.ref[_HandsOn]] = {}
        self.handle: RemovableHandle | None = None
        self.backward = -1

    def add(self, handing: _HandsOn) -> None:
        key = id(handing)
        self.refs[key] = weakref.ref(handing, lambda _: self._drop(key))
        if self.handle is None:
            self.handle = register_optimizer_step_pre_hook(self._before_step)

    def _drop(self, key: int) -> None:
        self.refs.pop(key, None)
        if not self.refs and self.handle is not None:
            self.handle.remove()
            self.handle = None

    def agree(self) -> None:
        for ref in list(self.refs.values()):
            handing = ref()
            if handing is not None:
                handing.agree()

    def agree_in_backward(self) -> None:
        """With the first gradient of each backward: those that it is yet to accumulate are handed on then."""
        backward = torch._C._current_graph_task_id()
        if backward != self.backward:
            self.backward = backward
            self.agree()

    def _before_step(self, _: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.agree()
        closures = [*args[1:2], *(kwargs[k] for k in ("closure",) if k in kwargs)]
        if not closures or not callable(closures[0]):
            return args, kwargs

        @functools.wraps(closures[0])
        def closure(*a: Any, **k: Any) -> Any:
            loss = closures[0](*a, **k)
            self.agree()
            return loss

        return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


_alive = _Alive()
