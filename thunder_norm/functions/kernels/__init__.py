"""Gradients that torch has a kernel for, in programs that no executor fuses: eager's numbers, each in one call.

Thunder takes such an operation apart where it differentiates, into up to thirty calls forward and as many backward.  Here the operation stays
what it is, and its gradient is the kernel that torch's own formula calls (``tools/autograd/derivatives.yaml`` in torch's source).  A rule says
of a call whether it is for it; other calls go the way of all operations.
"""

from thunder_norm.functions.kernels import (  # noqa: F401 - registers the rules
    activations,
    attention,
    convolutions,
    filling,
    normalizations,
    views,
)
from thunder_norm.functions.kernels.normalizations import KeepingBatchNorm, batch_norm_apart
from thunder_norm.functions.kernels.registry import arguments_of, has_any, joint_of, wanted
from thunder_norm.functions.kernels.registry import operations as KERNELS

__all__ = ["KERNELS", "KeepingBatchNorm", "arguments_of", "batch_norm_apart", "has_any", "joint_of", "wanted"]
