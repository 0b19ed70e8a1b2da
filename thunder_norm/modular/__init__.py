"""The modular norm of a model, the duality maps of its parameters, and a monitor of training by their norms."""

from thunder_norm.modular.duality import Ball, ball
from thunder_norm.modular.monitoring import TrainingMonitor
from thunder_norm.modular.mup import mup_scales
from thunder_norm.modular.norm import ModularNorm
from thunder_norm.modular.optimizer import ModularOptimizer
from thunder_norm.modular.orthogonal import orthogonalize

__all__ = ["Ball", "ModularNorm", "ModularOptimizer", "TrainingMonitor", "ball", "mup_scales", "orthogonalize"]
