"""What goes into ``thunder.jit(..., transforms=[...])``."""

from thunder_norm.transforms.norm import NormTransform
from thunder_norm.transforms.subclass import SubclassTransform

__all__ = ["NormTransform", "SubclassTransform"]
