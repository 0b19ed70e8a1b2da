"""Layer norms, group norms and batch norms, which keep mean and ``r = (var + eps)^-1/2`` of what they normalize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from thunder_norm.functions.kernels.registry import Joint, are_floats, given, kernels, like, like_wanted, operations, put
import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy

aten = torch.ops.aten

_PRECISE = (dtypes.float32, dtypes.float64)  # of others the kernels keep statistics in dtypes of their own


def _layer_norm_meta(a: TensorProxy, shape: Sequence[int], *rest: Any) -> tuple[TensorProxy, ...]:
    rows = (*a.shape[: a.ndim - len(shape)], *[1] * len(shape))
    return like(a), *(TensorProxy(like=a, shape=rows, requires_grad=False) for _ in range(2))


def _run_layer_norm_gradient(
    g: torch.Tensor,
    a: torch.Tensor,
    shape: Sequence[int],
    mean: torch.Tensor,
    r: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: list[bool],
) -> tuple[torch.Tensor, ...]:
    return given(aten.native_layer_norm_backward(g, a, shape, mean, r, weight, bias, mask), mask)


_layer_norm_forward = operations.register_operator("layer_norm", meta=_layer_norm_meta, fn=torch.native_layer_norm)
_layer_norm_gradient = operations.register_operator(
    "layer_norm_gradient",
    meta=lambda g, a, shape, mean, r, weight, bias, mask: like_wanted((a, weight, bias), mask),
    fn=_run_layer_norm_gradient,
)


@kernels(ltorch.layer_norm)
def _layer_norm_rule(
    wanted: Callable[[Any], bool],
    a: TensorProxy,
    shape: Sequence[int],
    weight: TensorProxy | None,
    bias: TensorProxy | None,
    eps: float,
) -> Joint | None:
    """``y = (a - m) r weight + bias`` with mean m and ``r = (var + eps)^-1/2`` over the last dimensions, both kept."""
    if a.dtype not in _PRECISE or not are_floats(a, weight, bias):
        return None
    mask = [wanted(a), wanted(weight), wanted(bias)]

    def joint(a: TensorProxy, shape: Sequence[int], *rest: Any) -> TensorProxy:
        weight, bias, eps = rest
        out, mean, r = _layer_norm_forward(a, tuple(shape), weight, bias, eps)
        found = _layer_norm_gradient(prims.get_grad(out), a, tuple(shape), mean, r, weight, bias, mask)
        put((a, weight, bias), mask, found)
        return out

    return joint


def _laid_out(t: torch.Tensor, as_is: torch.Tensor) -> torch.Tensor:
    """As torch lays out what it gives to kernels of group norms: channels last where the input is, on the CPU."""
    if t.is_contiguous() and t is as_is:
        return t
    return t.contiguous(memory_format=suggest_memory_format(as_is) if t.device.type == "cpu" else torch.contiguous_format)


def _group_sizes(a: torch.Tensor) -> tuple[int, int, int]:
    return a.shape[0], a.shape[1], a.shape[2:].numel()


def _run_group_norm(
    a: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, groups: int, eps: float
) -> tuple[torch.Tensor, ...]:
    return aten.native_group_norm(_laid_out(a, a), weight, bias, *_group_sizes(a), groups, eps)


def _run_group_norm_gradient(
    g: torch.Tensor,
    a: torch.Tensor,
    mean: torch.Tensor,
    r: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    mask: list[bool],
) -> tuple[torch.Tensor, ...]:
    g, a = _laid_out(g, a), _laid_out(a, a)
    return given(aten.native_group_norm_backward(g, a, mean, r, weight, *_group_sizes(a), groups, mask), mask)


def _group_norm_meta(a: TensorProxy, weight: Any, bias: Any, groups: int, eps: float) -> tuple[TensorProxy, ...]:
    return like(a), *(TensorProxy(like=a, shape=(a.shape[0], groups), requires_grad=False) for _ in range(2))


_group_norm_forward = operations.register_operator("group_norm", meta=_group_norm_meta, fn=_run_group_norm)
_group_norm_gradient = operations.register_operator(
    "group_norm_gradient",
    meta=lambda g, a, mean, r, weight, bias, groups, mask: like_wanted((a, weight, bias), mask),
    fn=_run_group_norm_gradient,
)


@kernels(ltorch.group_norm)
def _group_norm_rule(
    wanted: Callable[[Any], bool], a: TensorProxy, groups: int, weight: TensorProxy | None, bias: TensorProxy | None, eps: float
) -> Joint | None:
    """A layer norm of each group of channels (dimension 1), then weight and bias of each channel."""
    if a.dtype not in _PRECISE or not are_floats(a, weight, bias):
        return None
    mask = [wanted(a), wanted(weight), wanted(bias)]

    def joint(a: TensorProxy, groups: int, *rest: Any) -> TensorProxy:
        weight, bias, eps = rest
        out, mean, r = _group_norm_forward(a, weight, bias, groups, eps)
        found = _group_norm_gradient(prims.get_grad(out), a, mean, r, weight, bias, groups, mask)
        put((a, weight, bias), mask, found)
        return out

    return joint


def _run_batch_norm(
    a: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, ...]:
    return aten._native_batch_norm_legit.no_stats(a, weight, bias, True, 0.0, eps)


def _run_batch_norm_keeping(
    a: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    return aten._native_batch_norm_legit_functional(a, weight, bias, running_mean, running_var, True, momentum, eps)


def _run_batch_norm_gradient(g: torch.Tensor, a: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    weight, bias, running_mean, running_var, mean, r, training, eps, mask = rest
    found = aten.native_batch_norm_backward(g, a, weight, running_mean, running_var, mean, r, training, eps, mask)
    return given(found, mask)


def _of_channels(a: TensorProxy) -> TensorProxy:
    return TensorProxy(like=a, shape=(a.shape[1],), requires_grad=False)


_batch_norm_forward = operations.register_operator(
    "batch_norm", meta=lambda a, *rest: (like(a), _of_channels(a), _of_channels(a)), fn=_run_batch_norm
)
_batch_norm_keeping = operations.register_operator(
    "batch_norm_keeping",
    meta=lambda a, *rest: (like(a), *(_of_channels(a) for _ in range(4))),
    fn=_run_batch_norm_keeping,
)
_batch_norm_in_use = operations.register_operator(
    "batch_norm_in_use",
    meta=lambda a, *rest: like(a),
    fn=lambda a, mean, var, weight, bias, eps: torch.nn.functional.batch_norm(a, mean, var, weight, bias, False, 0.0, eps),
)
_batch_norm_gradient = operations.register_operator(
    "batch_norm_gradient",
    meta=lambda g, a, weight, bias, *rest: like_wanted((a, weight, bias), rest[-1]),
    fn=_run_batch_norm_gradient,
)


@kernels(ltorch.batch_norm)
def _batch_norm_rule(
    wanted: Callable[[Any], bool],
    a: TensorProxy,
    running_mean: TensorProxy | None,
    running_var: TensorProxy | None,
    weight: TensorProxy | None,
    bias: TensorProxy | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Joint | None:
    """``y = (a - m) r weight + bias``, with mean m and ``r = (var + eps)^-1/2`` of each channel: the batch's, or in use the given ones.

    Those of a batch that are to be kept are another matter (`batch_norm_apart`).
    """
    statistics = [t for t in (running_mean, running_var) if t is not None]
    is_known = (training is True and not statistics) or (training is False and len(statistics) == 2)
    is_plain = a.dtype in _PRECISE and are_floats(a, *statistics, weight, bias)
    if not (is_known and is_plain) or any(t.requires_grad for t in statistics):
        return None
    mask = [wanted(a), wanted(weight), wanted(bias)]

    def joint(a: TensorProxy, *rest: Any) -> TensorProxy:
        running_mean, running_var, weight, bias, _, _, eps = rest
        mean = r = None
        if training:
            out, mean, r = _batch_norm_forward(a, weight, bias, eps)
        else:
            out = _batch_norm_in_use(a, running_mean, running_var, weight, bias, eps)
        statistics = running_mean, running_var, mean, r
        found = _batch_norm_gradient(prims.get_grad(out), a, weight, bias, *statistics, training, eps, mask)
        put((a, weight, bias), mask, found)
        return out

    return joint


@dataclass(frozen=True)
class KeepingBatchNorm:
    """A batch norm in training and what its running statistics become, of one kernel, as eager has them.

    Nothing is written: it returns both beside the result.  They are no part of what is differentiated, and the gradient does not ask for
    the statistics that are written over.

    Attributes:
        momentum: of the running statistics.
        eps: what is added to the variances.
        mask: which of a, weight, bias get gradients.
    """

    momentum: float
    eps: float
    mask: Sequence[bool]

    @staticmethod
    def of(wanted: Callable[[Any], bool], arguments: tuple) -> tuple[KeepingBatchNorm, tuple] | None:
        """It and its tensors, of all arguments of a batch norm; None of another call, and of one whose kernel has statistics in a dtype of its own."""
        a, running_mean, running_var, weight, bias, training, momentum, eps = arguments
        if not _keeps_plain_statistics(a, running_mean, running_var, training) or a.dtype not in _PRECISE:
            return None
        if not are_floats(a, running_mean, weight, bias) or not all(type(n) in (int, float) for n in (momentum, eps)):
            return None
        mask = [wanted(a), wanted(weight), wanted(bias)]
        return KeepingBatchNorm(momentum, eps, mask), (a, running_mean, running_var, weight, bias)

    def __call__(self, *tensors: TensorProxy | None) -> tuple[TensorProxy, ...]:
        """The result, and the next running mean and variance."""
        out, _, _, *statistics = _batch_norm_keeping(*tensors, self.momentum, self.eps)
        return out, *statistics

    def joint(self, *tensors: TensorProxy | None) -> tuple[TensorProxy, ...]:
        """The same with the gradients of a, weight and bias."""
        a, _, _, weight, bias = tensors
        out, mean, r, *statistics = _batch_norm_keeping(*tensors, self.momentum, self.eps)
        found = _batch_norm_gradient(prims.get_grad(out), a, weight, bias, None, None, mean, r, True, self.eps, list(self.mask))
        put((a, weight, bias), self.mask, found)
        return out, *statistics


def batch_norm_apart(arguments: tuple) -> TensorProxy | None:
    """Write a batch norm of these arguments, all of them, without the statistics that it is to keep; None where it keeps none.

    What writes them is no part of what is differentiated: a rule's copies into inputs would be put off to the end of the program, and a
    second derivative would ask for what they wrote over.
    """
    a, running_mean, running_var, weight, bias, training, momentum, eps = arguments
    if not _keeps_plain_statistics(a, running_mean, running_var, training):
        return None
    return ltorch.batch_norm(a, None, None, weight, bias, True, momentum, eps)


def _keeps_plain_statistics(a: TensorProxy, running_mean: Any, running_var: Any, training: Any) -> bool:
    statistics = [t for t in (running_mean, running_var) if t is not None]
    is_keeping = training is True and len(statistics) == 2 and not any(t.requires_grad for t in statistics)
    return is_keeping and are_floats(a, *statistics)
