"""The modular norm of a model, the duality maps of its parameters, and a monitor of training by their norms."""

from thunder_norm.modular.blocks import Block, split
from thunder_norm.modular.duality import Ball, ball
from thunder_norm.modular.monitoring import TrainingMonitor
from thunder_norm.modular.mup import mup_scales
from thunder_norm.modular.norm import ModularNorm
from thunder_norm.modular.optimizer import ModularOptimizer
from thunder_norm.modular.orthogonal import orthogonalize
from thunder_norm.modular.param_groups import param_groups
from thunder_norm.modular.qk_clip import Clipped, QKClip
from thunder_norm.modular.roles import Role, Roles, find_roles

__all__ = [
    "Ball",
    "Block",
    "Clipped",
    "ModularNorm",
    "ModularOptimizer",
    "QKClip",
    "Role",
    "Roles",
    "TrainingMonitor",
    "ball",
    "find_roles",
    "mup_scales",
    "orthogonalize",
    "param_groups",
    "split",
]
