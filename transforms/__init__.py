"""What goes into ``thunder.jit(..., transforms=[...])``, transforms of functions, and what looks at programs before they run."""

from thunder_norm.functions import again as _again  # noqa: F401 - says how jitted programs are differentiated again
from thunder_norm.functions import autograd_functions, torch_autograd, torch_transforms  # noqa: F401 - have lookasides
from thunder_norm.functions.custom import custom_vjp
from thunder_norm.functions.debugging import check_jvp, check_vjp, log
from thunder_norm.functions.forward import jvp
from thunder_norm.functions.gradients import grad, value_and_grad, vjp
from thunder_norm.functions.jacobians import hessian, jacfwd, jacrev
from thunder_norm.functions.jitted import SubclassTransform
from thunder_norm.functions.registry import register_batching, register_jvp, register_vjp, self_adjoint
from thunder_norm.functions.vmap import vmap
from thunder_norm.norms.maps.function_of_sizes import function_of_sizes
from thunder_norm.norms.transform import NormTransform
from thunder_norm.profiling.flops import register_flop_rule
from thunder_norm.profiling.roofline import DEVICES, Device, measure_cpu, measure_gpu
from thunder_norm.profiling.shapes import register_shape_rule
from thunder_norm.transforms.biases import SplitBiasTransform, split_bias
from thunder_norm.transforms.checkpointing import CheckpointTransform, checkpoint, checkpoint_functions
from thunder_norm.transforms.lookasides import register_lookaside
from thunder_norm.transforms.profiling import ProfileTransform, profile
from thunder_norm.wrapper_classes import register_flatten

__all__ = [
    "CheckpointTransform",
    "DEVICES",
    "Device",
    "NormTransform",
    "ProfileTransform",
    "SplitBiasTransform",
    "SubclassTransform",
    "check_jvp",
    "check_vjp",
    "checkpoint",
    "checkpoint_functions",
    "custom_vjp",
    "function_of_sizes",
    "grad",
    "hessian",
    "jacfwd",
    "jacrev",
    "jvp",
    "log",
    "measure_cpu",
    "measure_gpu",
    "profile",
    "register_batching",
    "register_flatten",
    "register_flop_rule",
    "register_jvp",
    "register_lookaside",
    "register_shape_rule",
    "register_vjp",
    "self_adjoint",
    "split_bias",
    "value_and_grad",
    "vjp",
    "vmap",
]
