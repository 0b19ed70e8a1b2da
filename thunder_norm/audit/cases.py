"""Cases: operations and inputs at which their rules are searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from thunder_norm.audit.balls import Ball, start
from thunder_norm.audit.search import Found, check, evaluate
from thunder_norm.errors import UnsoundRuleError


@dataclass(frozen=True)
class Case:
    """One row of a table of rules: an operation, its inputs, and how much of each claim the search must attain.

    Attributes:
        name: what messages call it.
        call: takes a tensor for each ball, in order, and returns one.
        balls: the inputs: see `Ball`.
        tight: the part of each claim that must be found, at most 1.
        options: further arguments of `check`, by name.
    """

    name: str
    call: Callable[..., torch.Tensor]
    balls: tuple[Ball, ...]
    tight: float = 0.99
    options: dict = field(default_factory=dict)

    def evaluate(self) -> Found:
        """What formulas alone show, see `evaluate`."""
        options = {name: self.options[name] for name in ("witnesses", "sensitivity", "only") if name in self.options}
        return evaluate(self.call, self.balls, **options)

    def check(self, seed: int = 0) -> Found:
        """Sound, and attained to `tight`; `seed` is that of the search's starting points."""
        return check(self.call, self.balls, tight=self.tight, **{"restarts": 8, "steps": 20, "seed": seed, **self.options})

    def check_at(self, size: float, seed: int = 0) -> None:
        """With all norms `size`, possibly 0: finite sizes, no NaN in their derivatives."""
        sizes = [torch.tensor(size, dtype=torch.float64, requires_grad=True) for _ in self.balls]
        generator = torch.Generator().manual_seed(seed)
        inputs = [
            b.kind(n, backing=start(b, 0, generator) * size, elem_dims=b.elem_dims, perturbation_size=1.0)
            for b, n in zip(self.balls, sizes, strict=True)
        ]
        out = self.call(*inputs)
        for claim in (out.norm_size, out.perturbation_size):
            if not torch.isfinite(claim):
                raise UnsoundRuleError(f"{self.name}: {claim.item()} is claimed of inputs of norm {size:g}")
            if claim.requires_grad:
                grads = torch.autograd.grad(claim, sizes, allow_unused=True, retain_graph=True)
                if not all(g is None or torch.isfinite(g) for g in grads):
                    raise UnsoundRuleError(
                        f"{self.name}: a claim for inputs of norm {size:g} has derivatives that are not finite"
                    )
