"""How many floating point operations a kernel takes, and where formulas for further operations are registered.

Formulas of the contractions (matrix products, convolutions, attention) are those of ``torch.utils.flop_counter``; those that it lacks
are below.  By its convention (``count="matmul"``) nothing else counts; ``count="all"`` adds an estimate for everything that computes.
An operation of neither kind is unknown: it counts zero, and the profile lists it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch.utils import flop_counter

from thunder_norm.errors import ProfileError
from thunder_norm.trees import flat_tensors
from thunder.core.symbol import Symbol

Count = Literal["matmul", "all"]
COUNTS: tuple[Count, ...] = ("matmul", "all")
Rule = TypeVar("Rule", bound=Callable[..., int])

aten = torch.ops.aten

_rules: dict[Any, Callable[..., int]] = {}


def register_flop_rule(op: Any, *, override: bool = False) -> Callable[[Rule], Rule]:
    """Tell how many floating point operations a call of `op` takes.

    >>> import torch
    >>> @torch.library.custom_op("docs::scaled_outer", mutates_args=())
    ... def scaled_outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    ...     return 2 * torch.outer(x, y)
    >>> @register_flop_rule(scaled_outer)
    ... def scaled_outer_flops(x, y, *, out):
    ...     return 2 * out.numel()

    Args:
        op: an operation of ``torch.library`` or ``torch.ops``, a torch function (a rule for a function replaces those of the kernels
            that it runs), a Thunder symbol, or the id of one.
        override: replace the rule that `op` has.

    The rule takes what `op` takes, with placeholders without data in place of tensors, and the result as ``out``.

    Raises:
        ProfileError: `op` has a rule already, or is nothing that a program can call; the rule is no function.
    """
    key = op_of(op)

    def register(rule: Rule) -> Rule:
        if not callable(rule):
            raise ProfileError(f"a FLOP rule is a function, got {rule!r}")
        if not override and (key in _rules or key in flop_counter.flop_registry):
            raise ProfileError(f"{name_of(key)} has a FLOP rule already; register_flop_rule(..., override=True) replaces it")
        _rules[key] = rule
        return rule

    return register


def op_of(op: Any) -> Any:
    """What rules are looked up by: all overloads of an operation are one, and so are a symbol and its id."""
    if isinstance(op, torch.library.CustomOpDef):
        op = op._opoverload
    if isinstance(op, torch._ops.OpOverload):
        return op.overloadpacket
    if isinstance(op, Symbol):
        return op.id
    if callable(op) or isinstance(op, str) or getattr(op, "__module__", "").startswith("thunder"):
        return op
    raise ProfileError(f"rules are for operations, functions and Thunder symbols, got {op!r}")


def name_of(op: Any) -> str:
    """Readable name of an operation."""
    if isinstance(op, torch._ops.OpOverload):
        op = op.overloadpacket
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name.replace("::", ".")
    return getattr(op, "__name__", None) or str(op)


def own_flops(op: Any, args: tuple, kwargs: dict, out: Any) -> int | None:
    """What the rule registered for exactly this operation says; None if there is none."""
    try:
        rule = _rules.get(op_of(op))
    except (ProfileError, TypeError):  # nothing that a rule can be for
        return None
    return None if rule is None else int(rule(*args, **kwargs, out=out))


def kernel_flops(func: Any, args: tuple, kwargs: dict, out: Any, count: Count) -> int | None:
    """FLOPs of one kernel; None if nothing is known about it."""
    packet = func.overloadpacket
    found = own_flops(func, args, kwargs, out)
    if found is not None:
        return found
    formula = flop_counter.flop_registry.get(packet)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=out))
    estimate = _estimate(func, args, out)
    return estimate if estimate is None or count == "all" else 0


def has_rule(func: Any) -> bool:
    """Whether the FLOPs of exactly this operation are known."""
    return func.overloadpacket in _rules or func.overloadpacket in flop_counter.flop_registry


# -- contractions that torch's counter has no formula for ---------------------------------------------------------------


def _unless_torch_counts(op: Any) -> Callable[[Rule], Rule]:
    """Register a rule for an operation that the installed torch has no formula for: newer ones have more."""
    return (lambda rule: rule) if op in flop_counter.flop_registry else register_flop_rule(op)


@_unless_torch_counts(aten._scaled_dot_product_flash_attention_for_cpu)
def _cpu_attention(query: Any, key: Any, value: Any, *args: Any, out: Any, **kwargs: Any) -> int:
    return flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape)


@_unless_torch_counts(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, out: Any, **kwargs: Any) -> int:
    return flop_counter.sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


@register_flop_rule(aten.convolution_backward, override=True)
def _convolution_backward(*args: Any, out: Any) -> int:
    """torch's formula, which counts the gradient of a grouped kernel as if every input channel met every output channel."""
    *others, groups, mask = args
    formula = flop_counter.flop_registry[aten.convolution_backward]
    of_input = formula(*others, groups, [mask[0], False, False], out_val=out)
    of_weight = formula(*others, groups, [False, mask[1], False], out_val=out)
    return of_input + of_weight // groups


@_unless_torch_counts(aten.dot)
@_unless_torch_counts(aten.vdot)
def _dot(x: Any, y: Any, *, out: Any) -> int:
    return 2 * x.numel()


@_unless_torch_counts(aten.mv)
def _mv(matrix: Any, vector: Any, *, out: Any) -> int:
    return 2 * matrix.numel()


@_unless_torch_counts(aten.addmv)
def _addmv(bias: Any, matrix: Any, vector: Any, *, out: Any, **kwargs: Any) -> int:
    return 2 * matrix.numel()


@_unless_torch_counts(aten.addbmm)
def _addbmm(bias: Any, left: Any, right: Any, *, out: Any, **kwargs: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


@_unless_torch_counts(aten._trilinear)
def _trilinear(*args: Any, out: Any, **kwargs: Any) -> int:
    """torch.bilinear, as the sum of the products of three broadcast tensors."""
    expanded = zip(args[:3], args[3:6], strict=True)
    shapes = [_unsqueezed(t.shape, dims) for t, dims in expanded]
    return 2 * math.prod(torch.broadcast_shapes(*shapes))


@_unless_torch_counts(aten.mkldnn_rnn_layer)
def _cpu_recurrence(input: Any, weight: Any, recurrent: Any, *args: Any, out: Any, **kwargs: Any) -> int:
    """A layer of an LSTM on the CPU, in one direction: input is [time, batch, in]; both matrices, at each time."""
    return 2 * input.shape[0] * input.shape[1] * (weight.numel() + recurrent.numel())


@_unless_torch_counts(aten.mkldnn_rnn_layer_backward)
def _cpu_recurrence_backward(input: Any, weight: Any, recurrent: Any, *args: Any, out: Any, **kwargs: Any) -> int:
    """Both factors of each product."""
    return 2 * _cpu_recurrence(input, weight, recurrent, out=out)


def _unsqueezed(shape: Any, dims: Any) -> list[int]:
    shape = list(shape)
    for d in dims:
        shape.insert(d, 1)
    return shape


# -- estimates for everything else ----------------------------------------------------------------------------------------

# Operations for each entry of the largest tensor among arguments and results.
_PER_ENTRY = {
    "_softmax": 5, "_log_softmax": 5, "_safe_softmax": 5, "_softmax_backward_data": 4, "_log_softmax_backward_data": 4,
    "native_layer_norm": 8, "native_layer_norm_backward": 14, "_fused_rms_norm": 5, "_fused_rms_norm_backward": 10,
    "native_group_norm": 8, "native_group_norm_backward": 14, "native_batch_norm": 8, "native_batch_norm_backward": 14,
    "_native_batch_norm_legit": 8, "_native_batch_norm_legit_no_training": 4, "_native_batch_norm_legit_functional": 8,
    "batch_norm_backward": 14, "_batch_norm_with_update": 8, "cudnn_batch_norm": 8, "cudnn_batch_norm_backward": 14,
    "native_dropout": 2, "native_dropout_backward": 2, "logsumexp": 3, "logcumsumexp": 3, "cumsum": 1, "cumprod": 1, "linalg_vector_norm": 2,
    "nll_loss_forward": 1, "nll_loss_backward": 1, "nll_loss2d_forward": 1, "nll_loss2d_backward": 1, "mse_loss": 3,
    "mse_loss_backward": 3, "smooth_l1_loss": 4, "smooth_l1_loss_backward": 4, "huber_loss": 4, "binary_cross_entropy": 6,
    "binary_cross_entropy_backward": 6, "max_pool2d_with_indices": 1, "max_pool3d_with_indices": 1, "avg_pool2d": 1, "avg_pool3d": 1,
    "_adaptive_avg_pool2d": 1, "_adaptive_avg_pool3d": 1, "adaptive_max_pool2d": 1, "_adaptive_avg_pool2d_backward": 1,
    "max_pool2d_with_indices_backward": 1, "max_pool3d_with_indices_backward": 1, "avg_pool2d_backward": 1, "var_mean": 5, "upsample_bilinear2d": 8, "upsample_bilinear2d_backward": 8,
    "upsample_nearest2d": 0, "upsample_nearest2d_backward": 1, "max": 1, "min": 1, "norm": 2, "_cdist_forward": 3, "count_nonzero": 1,
    "embedding_dense_backward": 1, "embedding_backward": 1, "index_add": 1, "index_add_": 1, "scatter_add": 1, "scatter_add_": 1,
    "index_put": 1, "index_put_": 1, "_index_put_impl_": 1, "scatter_reduce": 1, "_foreach_add": 1, "_foreach_mul": 1, "topk": 1, "sort": 1,
    "argsort": 1, "median": 1, "kthvalue": 1, "mode": 1, "sum": 1, "mean": 1, "amax": 1, "amin": 1, "prod": 1, "var": 4, "std": 5, "any": 1,
    "all": 1, "argmax": 1, "argmin": 1, "aminmax": 1, "trace": 1, "linear_backward": 0, "glu": 4, "glu_backward": 6, "cummax": 1, "cummin": 1,
    "prelu": 1, "_prelu_kernel": 1, "_prelu_kernel_backward": 2, "rrelu_with_noise": 2, "celu": 3, "roll": 0, "isin": 1, "bucketize": 1,
}  # fmt: skip

# They move data, make it, or ask for metadata.
_MOVES = frozenset(
    "cat stack copy copy_ _to_copy clone embedding index index_select gather scatter scatter_ take masked_select masked_scatter "
    "masked_scatter_ fill fill_ zero zero_ empty empty_like empty_strided new_empty new_empty_strided full full_like new_full zeros "
    "zeros_like new_zeros ones ones_like new_ones arange linspace logspace eye scalar_tensor lift_fresh lift_fresh_copy lift tril triu "
    "tril_indices triu_indices constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d flip repeat "
    "repeat_interleave _unsafe_view _reshape_alias contiguous split_with_sizes_copy select_backward slice_backward "
    "select_scatter slice_scatter diagonal_backward diagonal_scatter as_strided_scatter unfold_backward im2col col2im pixel_shuffle "
    "pixel_unshuffle nonzero _local_scalar_dense item _assert_async _assert_tensor_metadata sym_size detach detach_ alias set_ resize_ "
    "resize_as_ one_hot channel_shuffle _pin_memory is_pinned _fused_sdp_choice promote_types result_type index_fill index_fill_ "
    "index_copy index_copy_ reflection_pad1d_backward reflection_pad2d_backward max_unpool2d native_channel_shuffle "
    "block_diag cartesian_prod record_stream _efficientzerotensor unbind_copy rot90 upsample_nearest1d upsample_nearest3d".split()
)


def _estimate(func: Any, args: tuple, out: Any) -> int | None:
    """One operation for each entry of a pointwise result and of what a reduction reads, more where `_PER_ENTRY` says so."""
    name = func.overloadpacket.__name__
    if func.is_view or name in _MOVES or name.endswith("_copy") or torch.Tag.nondeterministic_seeded in func.tags:
        return _PER_ENTRY.get(name, 0) * _largest((args, out))
    if name in _PER_ENTRY:
        return _PER_ENTRY[name] * _largest((args, out))
    if torch.Tag.pointwise in func.tags:
        return sum(t.numel() for t in flat_tensors(out))
    if getattr(torch.Tag, "reduction", None) in func.tags:  # torch 2.9 has no such tag
        return _largest(args)
    return None


def _largest(tree: Any) -> int:
    return max((t.numel() for t in flat_tensors(tree)), default=0)
