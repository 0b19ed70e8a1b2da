"""The modular norm of a model, and the duality maps of its parameters."""

from thunder_norm.modular.duality import Ball, ball, orthogonalize
from thunder_norm.modular.norm import ModularNorm

__all__ = ["Ball", "ModularNorm", "ball", "orthogonalize"]
