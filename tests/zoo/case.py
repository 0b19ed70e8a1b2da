"""What one row of the zoo is, and how eager's answer to it is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch.utils._pytree import tree_leaves

from tests.seeds import seeded

INPUT, PARAMETER, CONSTRUCTED, RETURNED, SEVERAL, OPAQUE = "input", "parameter", "constructed", "returned", "several", "opaque"
ROLES = (INPUT, PARAMETER, CONSTRUCTED, RETURNED, SEVERAL, OPAQUE)


@dataclass(frozen=True)
class Case:
    """A program that uses somebody's tensor subclass.

    `build` gives a function or module and its arguments; it is called anew for every run, under the same seed.  `roles` say
    where wrappers occur, and whether they are objects that cannot be taken apart, which is refused if nobody asks to run them.  With `backward`, eager has gradients for the tensors that require grad.  `forward_refusal` is a part of
    the message with which we refuse, None where we must agree with eager.  Without `roles` only plain tensors
    take part.  `since` is the first torchao that has what the program uses, `since_torch` the first torch of which that is known.
    """

    name: str
    build: Callable[[], tuple[Callable, tuple]]
    roles: tuple[str, ...]
    backward: bool = False
    forward_refusal: str | None = None
    since: str = ""
    since_torch: str = ""

    def __post_init__(self) -> None:
        assert set(self.roles) <= set(ROLES), self.roles

    @property
    def available(self) -> bool:
        """Whether the installed torch and torchao have it."""
        first = {"torchao": self.since, "torch": self.since_torch}
        return all(not v or Version(version(name)) >= Version(v) for name, v in first.items())

    @property
    def options(self) -> dict[str, Any]:
        """Those of the transform."""
        return {"opaque": "run"} if OPAQUE in self.roles else {}

    @property
    def works(self) -> tuple[bool, bool]:
        """Whether forward and backward agree with eager."""
        forward = self.forward_refusal is None
        return forward, forward and self.backward


ZOO: dict[str, Case] = {}


def case(name: str, *roles: str, **options: Any) -> Callable:
    """Add the decorated `build` to the zoo."""

    def add(build: Callable) -> Callable:
        assert name not in ZOO, name
        ZOO[name] = Case(name, build, roles, **options)
        return build

    return add


def built(entry: Case) -> tuple[Callable, tuple]:
    """Function and arguments, the same in every call."""
    torch.manual_seed(seeded(0))
    return entry.build()


def differentiable(function: Callable, args: tuple) -> list[torch.Tensor]:
    """The tensors that eager gives gradients to."""
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    return [t for t in (*parameters, *tree_leaves(args)) if isinstance(t, torch.Tensor) and t.requires_grad]


def gradients(function: Callable, args: tuple, call: Callable) -> tuple[Any, list[torch.Tensor | None]]:
    """The result of ``call(*args)`` and the gradients of `differentiable(function, args)` for fixed cotangents."""
    leaves = differentiable(function, args)
    result = call(*args)
    for t in tree_leaves(result):
        if not (isinstance(t, torch.Tensor) and t.requires_grad):
            continue
        if type(t) is torch.Tensor:
            t.backward(torch.linspace(-1, 1, t.numel()).to(t.dtype).view(t.shape), retain_graph=True)
        else:
            t.backward(torch.ones_like(t), retain_graph=True)
    return result, [t.grad for t in leaves]


def second_gradients(function: Callable, args: tuple, call: Callable) -> list[torch.Tensor | None] | None:
    """The gradients of the sums of gradients; None where these have none."""
    leaves = differentiable(function, args)
    results = [t for t in tree_leaves(call(*args)) if isinstance(t, torch.Tensor) and t.requires_grad]
    first = torch.autograd.grad(results, leaves, list(map(torch.ones_like, results)), create_graph=True, allow_unused=True)
    found = [g for g in first if g is not None and g.requires_grad]
    return list(torch.autograd.grad(found, leaves, list(map(torch.ones_like, found)), allow_unused=True)) if found else None
