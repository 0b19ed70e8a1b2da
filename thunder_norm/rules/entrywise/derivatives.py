"""Operations that are derivatives of others: refused.

They are what autograd makes of a program, not a part of it: a norm is carried through the program, and how its result moves with
an input is the sensitivity.  A program that takes derivatives itself is run with the operations of these written out.
"""

from __future__ import annotations

import torch

from thunder_norm.core.registry import normed_op
from thunder_norm.errors import InnerDerivativeNormError
from thunder_norm.rules._shared import refuse

_DERIVATIVES = (
    "_softmax_backward_data", "_log_softmax_backward_data", "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward", "avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward",
    "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "native_layer_norm_backward",
    "native_group_norm_backward", "native_batch_norm_backward", "convolution_backward", "embedding_dense_backward",
    "gelu_backward", "silu_backward", "mish_backward", "sigmoid_backward", "tanh_backward", "threshold_backward",
    "elu_backward", "hardswish_backward", "hardsigmoid_backward", "hardtanh_backward", "leaky_relu_backward",
    "log_sigmoid_backward", "softplus_backward", "softshrink_backward", "hardshrink_backward", "logit_backward",
    "glu_backward", "nll_loss_backward", "nll_loss2d_backward", "mse_loss_backward", "smooth_l1_loss_backward",
    "huber_loss_backward", "binary_cross_entropy_backward", "native_dropout_backward", "grid_sampler_2d_backward",
    "grid_sampler_3d_backward", "upsample_nearest2d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
    "_cdist_backward", "_pdist_backward", "slice_backward", "select_backward", "diagonal_backward", "unfold_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "reflection_pad2d_backward", "replication_pad2d_backward",
)  # fmt: skip

for _name in _DERIVATIVES:
    refuse(
        normed_op(getattr(torch.ops.aten, _name).default),
        f"{_name} is part of a derivative: norms are carried through the program itself, and how far its result moves with an "
        "input is what thunder_norm.sensitivities says",
        InnerDerivativeNormError,
    )
