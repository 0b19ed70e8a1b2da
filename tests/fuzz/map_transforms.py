"""What has to hold for a random module under several transforms of traces at once, in each order, and with transforms of functions inside."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from thunder_norm import normed
from thunder_norm.errors import CheckpointError
from thunder_norm.transforms import (
    CheckpointTransform,
    NormTransform,
    ProfileTransform,
    SplitBiasTransform,
    SubclassTransform,
    grad,
)
import thunder

from .map_costs import same_program
from .map_models import Case, normed_leaves
from .map_norms import _same
from .plain_modules import Wrong, is_floating

TRANSFORMS: dict[str, Callable[[], Any]] = {
    "norm": NormTransform,
    "checkpoint": CheckpointTransform,
    "checkpoint blocks": lambda: CheckpointTransform("every block"),
    "budget": lambda: CheckpointTransform(memory_budget=10**7),
    "split": SplitBiasTransform,
    "profile": ProfileTransform,
    "subclass": SubclassTransform,
}


def split(case: Case) -> None:
    """A bias added by an operation of its own changes nothing."""
    same_program(case, thunder.jit(case.build(), transforms=[SplitBiasTransform()]), "SplitBiasTransform()")


def composed(case: Case) -> None:
    """Several transforms, in an order: the program is the module; in normed mode it has the sizes of NormTransform alone."""
    random = Random(case.program.base.seed)
    names = random.sample(sorted(TRANSFORMS), random.choice([2, 2, 3]))
    jm = _jitted(case, names)
    if jm is None:
        names = [n for n in names if n != "checkpoint blocks"]
        jm = _jitted(case, names)
    same_program(case, jm, f"transforms {names}")
    if "norm" not in names:
        return
    args, kwargs = case.normed()
    both = []
    for transforms in (names, ["norm"]):
        jm = _jitted(case, transforms)
        with case.program.base._defaults(case.program.base.seed + 2):
            both.append(normed(jm)(*args, **kwargs))
    _same(f"normed, transforms {names}", *both)
    for ours, theirs in zip(*map(normed_leaves, both), strict=True):
        if not case.agree(ours.backing.detach(), theirs.backing.detach()):
            raise Wrong(f"normed, transforms {names}: values {ours.backing}, not {theirs.backing}")


def differentiated(case: Case) -> None:
    """`grad` of the module inside of a program with transforms, and of the module with them, is torch's gradient."""
    args, kwargs = case.arguments()
    flat, structure = tree_flatten((args, kwargs))
    which = next((i for i, t in enumerate(flat) if is_floating(t)), None)
    if which is None:
        return

    generator = torch.Generator().manual_seed(case.program.base.seed)
    weights = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in case.leaves if is_floating(t)]

    def total(model: Any, x: torch.Tensor) -> torch.Tensor:
        a, k = torch.utils._pytree.tree_unflatten([x if i == which else t for i, t in enumerate(flat)], structure)
        leaves = [t for t in tree_flatten(model(*a, **k))[0] if is_floating(t)]
        return sum((t * w).sum() for t, w in zip(leaves, weights, strict=True))

    x = flat[which].detach().requires_grad_()
    seed = case.program.base.seed + 2
    model = case.build()
    with case.program.base._defaults(seed):
        value = total(model, x)
    if not value.requires_grad:
        return
    (expected,) = torch.autograd.grad(value, x, allow_unused=True, materialize_grads=True)
    random = Random(case.program.base.seed)
    names = random.sample(["norm", "checkpoint", "split", "profile", "subclass"], random.choice([1, 2]))
    model = case.build()
    x = x.detach()
    if random.random() < 0.5:
        what, f = (
            f"grad inside of transforms {names}",
            thunder.jit(lambda x: grad(lambda x: total(model, x))(x), transforms=_made(names)),
        )
    else:
        what, f = "grad", grad(lambda x: total(model, x))
    with case.program.base._defaults(seed):
        found = f(x)
    if not case.agree(found.detach(), expected):
        raise Wrong(
            f"{what}: off by {(found - expected).abs().max().item():.3g} of {expected.abs().max().item():.3g}: {found}, not {expected}"
        )


def _made(names: list[str]) -> list[Any]:
    return [TRANSFORMS[n]() for n in names]


def _jitted(case: Case, names: list[str]) -> Any:
    try:
        return thunder.jit(case.build(), transforms=_made(names))
    except CheckpointError:  # the module has no blocks
        return None


CHECKS: dict[str, Callable[[Case], None]] = {"split": split, "composed": composed, "differentiated": differentiated}
