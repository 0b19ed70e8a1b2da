"""Orthogonalizing one matrix: our five steps, four of them on the Gram matrix of a wide matrix, against Muon's five in float32."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import models, timing
from benchmarks.modular import orthogonalize_as_muon
from thunder_norm.modular.orthogonal import orthogonalize

PEER = "Muon's five steps in float32"
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of torch.optim.Muon


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    torch.manual_seed(0)
    return [row for shape in options.matrices for row in _matrix(torch.randn(shape), options.rounds)]


@torch.no_grad()
def _matrix(g: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    candidates = {
        "orthogonalize": lambda: orthogonalize(g),
        PEER: lambda: orthogonalize_as_muon(g, _COEFFICIENTS, 5, 1e-7),
    }
    return timing.rows(f"matrix {list(g.shape)}", timing.in_turns(candidates, rounds), PEER)
