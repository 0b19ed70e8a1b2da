"""The modular norm of a model, and the duality maps of its parameters."""

from thunder_norm.modular.duality import Ball, ball
from thunder_norm.modular.norm import ModularNorm
from thunder_norm.modular.optimizer import ModularOptimizer
from thunder_norm.modular.orthogonal import orthogonalize

__all__ = ["Ball", "ModularNorm", "ModularOptimizer", "ball", "orthogonalize"]
