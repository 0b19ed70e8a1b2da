"""Where a program loses its targets: the operation that moves farthest when what it gets moves."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from thunder_norm.norms.eager_environment import Noted
from thunder_norm.norms.sensitivity import sensitivities
from thunder_norm.op_names import op_name


@dataclass(frozen=True)
class Loss:
    """An operation that makes perturbations larger, and how many times."""

    operation: str
    where: str
    factor: float

    def __str__(self) -> str:
        times = f"{self.factor:.2g} times as far" if math.isfinite(self.factor) else "without a bound"
        return f"{self.operation}, which moves {times} ({self.where})"

    @staticmethod
    def of(outputs: Any, noted: Sequence[Noted]) -> Loss | None:
        """Of the operations of a run that outputs depend on, the one that makes a perturbation largest; the first of several.

        How far it moves itself counts, and not how far the output does with it: between two operations that follow each other in
        time, and not in the graph, nothing may be lost.
        """
        moving = [n for n in noted if n.out.perturbation_size is not None and n.out.perturbation_size.requires_grad]
        ends = {n.out.perturbation_size.grad_fn for n in moving}
        found = sensitivities(outputs, [n.out for n in moving])
        steps = [(_largest_step(n.out.perturbation_size, ends), n) for s, n in zip(found, moving, strict=True) if s.item() != 0]
        factor, at = max(steps, key=lambda pair: pair[0], default=(0.0, None))
        if at is None or factor <= 1:
            return None
        return Loss(op_name(at.func), ", ".join(filter(None, (at.module, at.location))), factor)


def _largest_step(perturbation: torch.Tensor, ends: Container[Any]) -> float:
    """The largest derivative of an operation's perturbation by those that it was computed from; infinite if one is not finite.

    What autograd has recorded of the operation is walked through backward, and not past the results of others: a derivative by one of
    several arguments would have the way through the others in it.
    """
    if perturbation.grad_fn is None:
        return 0.0  # of what comes from nothing that moves (`new_zeros`)
    totals: dict[Any, float] = {}
    ways: list[tuple[Any, torch.Tensor]] = [(perturbation.grad_fn, torch.ones_like(perturbation))]
    while ways:
        node, weight = ways.pop()
        gradients = node.apply(weight) if isinstance(node, BackwardCFunction) else node(weight)
        for (before, _), g in zip(node.next_functions, gradients if isinstance(gradients, tuple) else (gradients,), strict=True):
            if before is None or g is None:
                continue
            if before in ends or not before.next_functions:
                totals[before] = totals.get(before, 0.0) + g.item()
            else:
                ways.append((before, g))
    return max((s if math.isfinite(s) else math.inf for s in totals.values()), default=0.0)
