"""Wrappers at which a history starts in the program: it has made them, and they require grad, ``nn.Parameter(wrapper)`` say.

What is computed from one requires grad, and nothing that the program was given has a gradient of it.  Where the leaf itself is returned, or kept,
its gradients arrive in it as in eager mode: it is made before the program runs, without its values, so that the program can be connected
with it as with an input, and is filled at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.lengths import is_symbolic
from thunder_norm.subclass.classes.jagged import is_jagged_class
from thunder_norm.subclass.classes.protocol import WrapperSpec, outer_metadata
from thunder_norm.wrapper_classes import is_wrapper


def is_made_leaf(acquisition: Acquisition, fake: torch.Tensor) -> bool:
    """Whether a wrapper has a history that starts at itself, in the program."""
    if not is_wrapper(fake) or acquisition.is_input(fake) or not outer_metadata(fake)[2]:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return fake.is_leaf


def reached_leaves(
    acquisition: Acquisition, returned: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Those of what the program returns on which others of its `outputs` depend.

    Raises:
        UnsupportedOpError: one cannot be made before the program runs.
    """
    leaves = {id(t): t for t in returned if is_made_leaf(acquisition, t)}
    if not leaves:
        return []
    with torch._C.DisableTorchFunctionSubclass():
        pending, seen, found = [t.grad_fn for t in outputs if t.grad_fn is not None], set(), {}
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                pending += [n for n, _ in node.next_functions if n is not None]
                if id(leaf := getattr(node, "variable", None)) in leaves:
                    found[id(leaf)] = leaf
    for leaf in found.values():
        spec = WrapperSpec.of(leaf)
        if is_jagged_class(spec.cls) or any(map(is_symbolic, spec.leaves(leaf))):
            raise UnsupportedOpError(
                with_details(
                    f"a {spec.cls.__name__} that the program made, and that requires grad, is returned beside what is computed from it",
                    why="its lengths are not known before the program runs",
                    instead="give it to the function as an argument",
                )
            )
    return list(found.values())


def empty_leaf(fake: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What makes a leaf without values, in each call."""
    spec = WrapperSpec.of(fake)
    inner = [(f.shape, f.stride(), f.dtype, f.device) for f in spec.leaves(fake)]

    def make() -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            made = spec.build(tuple([torch.empty_strided(s, t, dtype=d, device=where) for s, t, d, where in inner]))
            return made.requires_grad_()

    return make


def filled(leaf: torch.Tensor, made: torch.Tensor) -> Any:
    """The leaf, with all that the wrapper holds that the program has made."""
    vars(leaf).update(vars(made))
    for name in WrapperSpec.of(made).names:
        if name not in vars(made):
            setattr(leaf, name, getattr(made, name))
    return leaf


class _Started(torch.autograd.Function):
    """A wrapper with a history that starts here."""

    @staticmethod
    def forward(ctx: Any, build: Callable[[], torch.Tensor], start: torch.Tensor) -> torch.Tensor:
        return build()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None


def with_own_history(build: Callable[[], torch.Tensor], *, is_leaf: bool) -> torch.Tensor:
    """A wrapper that requires grad, with a history that leads to nothing the program was given."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        return build().requires_grad_() if is_leaf else _Started.apply(build, torch.empty((), requires_grad=True))
