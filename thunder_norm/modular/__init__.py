"""The modular norm of a model, and the duality maps of its parameters."""

from thunder_norm.modular.duality import Ball, ball, orthogonalize
from thunder_norm.modular.norm import ModularNorm
from thunder_norm.modular.optimizer import ModularOptimizer

__all__ = ["Ball", "ModularNorm", "ModularOptimizer", "ball", "orthogonalize"]
