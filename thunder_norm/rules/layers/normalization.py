"""Normalizations: layer_norm, rms_norm, group_norm, batch_norm, instance_norm, normalize.

All but `normalize` map x, perhaps centred, to ``x / sqrt(mean x^2 + eps)``.  Nothing bounds the mean square from below, hence a
sensitivity of 1 / sqrt(eps): it is attained at small x, and no smaller constant holds for all tensors of a norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import L2Tensor, LinfTensor, RMSTensor
from thunder_norm.core.local import distances, is_from_data
from thunder_norm.core.nonfinite import spoiled
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._lengths import inverse_length, least_length
from thunder_norm.rules._local import data, smallest_mean_square
from thunder_norm.rules._shared import Constant, as_kind, rms, root_sum_squares, scalar, spread, squarable, with_bias
from thunder_norm.scalars import square_root, times


@dataclass(frozen=True)
class Divisor:
    """What a normalization divides by, ``max(sqrt(q + eps) + shift, floor)`` at a mean square q; none is negative.

    With r^2 = q it is between its value at 0 and r plus that, and ``q / divisor(q)^2`` increases and is concave in q: its derivative
    ``(eps / sqrt(q + eps) + shift) / divisor^3``, and ``1 / floor^2`` before, decreases.
    """

    eps: float
    shift: float = 0.0
    floor: float = 0.0

    @property
    def smallest(self) -> float:
        """Its value at 0."""
        return self.of_length(0.0)

    def of_length(self, length: float) -> float:
        """Its value for a group of that RMS."""
        return max(math.hypot(math.sqrt(self.eps), length) + self.shift, self.floor)

    def at(self, mean_square: torch.Tensor) -> torch.Tensor:
        """Its value."""
        q = mean_square + self.eps
        d = q.sqrt() if self.eps > 0 else square_root(q)
        d = d + self.shift if self.shift else d
        return d.clamp(min=self.floor) if self.floor else d


def normalized(input: RMSTensor, dims: ed.Dims, divisor: Divisor, is_centred: bool, groups: int = 1) -> RMSTensor:
    """The rule's result for ``x / divisor(mean x^2)`` over `dims` in `groups`, x minus its mean there if `is_centred`.

    input: RMS over E (converted to E and `dims`, for free);  output: the same;  g = divisor, sqrt(q + eps) mostly
    Value:        n / g(n^2), n = |x|            (concave in the mean square, hence also for a mean over several groups)
    Sensitivity:  1 / g(0), 1 / sqrt(eps) mostly (the Jacobian (I - x x^T g' / (N r g)) / g at x = 0); 1 / g(l^2) for the least RMS l that
                  a group can have (`least_length`): that is what counts where g(0) = 0
    Local:        1 / g(r^2) of the group with the smallest mean square r^2 of the data (centred if x is), less how far it moves inside "within";
                  of moves away from the data itself no more than 2 / g(r^2) at the data, however far they go: with z at the data
                  |x / g(x) - z / g(z)| <= |x - z| / g(z) + |x| |1 / g(x) - 1 / g(z)|, and g is 1-Lipschitz in the RMS, which is at most g
                  (Dunkl and Williams 1964, "A simple norm inequality", for g = |x|)
    Mode "typical": E[1 / r^2] = N' / ((N' - 2) n^2) of a Gaussian with N' degrees of freedom, see `_typical`.  Mode "modula": 1.
    Raises NormMismatchError where eps < 0.  Where g(0) = 0 the claims are about groups that are not 0: of those that are the result is NaN.
    """
    if divisor.eps < 0:
        raise NormMismatchError(f"a normalization with eps = {divisor.eps} < 0 may divide by zero or a NaN: use eps > 0")
    elem_dims = tuple(sorted({*input.elem_dims, *dims}))
    n = input.norm_size
    count = ed.numel(input.shape, dims) // groups
    if count <= is_centred:  # a number minus itself
        return rms(spoiled(torch.zeros_like(n), n), elem_dims, sensitivity={"input": 0})
    within = squarable(n)
    length = divisor.at(within.square())
    size = spoiled(within / length if divisor.smallest else (n > 0).to(n.dtype), n)
    shortest = divisor.of_length(least_length(input, dims, is_centred, groups))
    lipschitz: Constant = 1 / shortest
    freedom = count - is_centred
    if current_mode() == "modula":
        lipschitz = 1.0
    elif current_mode() == "typical":
        lipschitz = _typical(freedom, length, shortest)
    elif (near := distances(input)) is not None:
        length = divisor.at(smallest_mean_square(input, dims, is_centred, groups, *near))
        lipschitz = 1 / (length.clamp(min=shortest) if near[0] else length)
        if is_from_data():
            lipschitz = torch.minimum(lipschitz, 2 / divisor.at(smallest_mean_square(input, dims, is_centred, groups, 0.0)))
    return rms(size, elem_dims, sensitivity={"input": lipschitz})


def _typical(freedom: int, length: torch.Tensor, shortest: float) -> torch.Tensor:
    """How far a Gaussian with so many degrees of freedom moves where it is normalized, by its size and the least that it is divided by.

    Of N > 2, N - 1 of which move: ``sqrt((N - 1) / (N - 2)) / n``.  Of 2, one of which does, the root of
    ``E[1 / (r^2 + eps)] / 2 = e^u E1(u) / (2 n^2) <= log(1 + 1 / u) / (2 n^2)``, u = eps / n^2.  One has a sign alone, which moves by
    1 / n, as what jumps does.
    """
    if freedom > 2:
        return math.sqrt((freedom - 1) / (freedom - 2)) / length
    ratio = torch.log1p((length / shortest).square()) / 2 if freedom == 2 else torch.ones_like(length)
    return ratio.clamp(min=1.0).sqrt() / length


def _affine(
    x: RMSTensor,
    weight: LinfTensor | None,
    bias: RMSTensor | None,
    shape: Sequence[int],
    dims: ed.Dims,
    is_centred_across: bool = False,
) -> RMSTensor:
    """x times a gain plus a bias, both along `dims` of x's `shape`, as the rule's result.

    If x has mean zero over dimensions across which gain and bias are constant, x and the bias are orthogonal.
    """
    value, sensitivity = x.norm_size, dict(x._sensitivity or {})
    if weight is not None:
        sensitivity = {"input": weight.norm_size * sensitivity["input"], "weight": value}
        value = value * weight.norm_size
    if bias is not None:
        # the bias seen as a tensor of x's rank: it varies along `dims` only
        its_dims = tuple(d for d, own in zip(dims, range(-len(dims), 0), strict=True) if own in bias.elem_dims)
        c = spread(ed.rms_factor(shape, ed.nontrivial(shape, its_dims), x.elem_dims))
        sensitivity["bias"] = c
        size = times(bias.norm_size, c)
        value = root_sum_squares(value, size) if is_centred_across else with_bias(value, size)
    return rms(value, x.elem_dims, sensitivity=sensitivity)


def _all_dims(t: torch.Tensor, args: dict[str, Any]) -> ed.Dims:
    return tuple(range(-t.ndim, 0))


_LIFT_BIAS: dict[str, Any] = {"lift_dims": {"bias": _all_dims}}


@normed_op(F.layer_norm).register_norm(**_LIFT_BIAS)
def layer_norm(
    input: RMSTensor,
    normalized_shape: Sequence[int],
    weight: LinfTensor | None = None,
    bias: RMSTensor | None = None,
    eps: float = 1e-5,
) -> RMSTensor:
    """y = g (x - mean x) / sqrt(var x + eps) + b over the last dimensions.

    input: RMS;  weight: largest entry;  bias: RMS over all of it;  output: RMS over E and the normalized dimensions
    Value:        |y| <= v |g| + |b|, v = n / sqrt(n^2 + eps), n = |x|      (attained: centred x, b along it)
    Sensitivity:  |g| / sqrt(eps) (attained at constant x),  v,  1
    """
    dims = tuple(range(-len(normalized_shape), 0))
    return _affine(normalized(input, dims, Divisor(eps), is_centred=True), weight, bias, input.shape, dims)


@normed_op(torch.ops.aten.native_layer_norm.default).register_norm(**_LIFT_BIAS)
def _native_layer_norm(
    input: RMSTensor, normalized_shape: Sequence[int], weight: LinfTensor | None, bias: RMSTensor | None, eps: float
) -> tuple[NormedTensor | None, ...]:
    """`layer_norm`; ATen also returns mean and rstd."""
    return layer_norm(input, normalized_shape, weight, bias, eps), None, None


@normed_op(F.rms_norm).register_norm
def rms_norm(
    input: RMSTensor, normalized_shape: Sequence[int], weight: LinfTensor | None = None, eps: float | None = None
) -> RMSTensor:
    """y = g x / sqrt(mean x^2 + eps) over the last dimensions; eps is the dtype's resolution if not given.

    input: RMS;  weight: largest entry;  output: RMS over E and the normalized dimensions
    Value:        |y| <= v |g|, v = n / sqrt(n^2 + eps), n = |x|            (attained everywhere on the sphere)
    Sensitivity:  |g| / sqrt(eps) (attained at x = 0),  v
    """
    dims = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine(normalized(input, dims, Divisor(eps), is_centred=False), weight, None, input.shape, dims)


@normed_op(torch.ops.aten._fused_rms_norm.default).register_norm
def _fused_rms_norm(
    input: RMSTensor, normalized_shape: Sequence[int], weight: LinfTensor | None, eps: float | None
) -> tuple[NormedTensor | None, ...]:
    """`rms_norm`; ATen also returns rstd."""
    return rms_norm(input, normalized_shape, weight, eps), None


# -- over channels --------------------------------------------------------------------------------------------------------


def _channel(input: NormedTensor) -> int:
    return 1 - input.ndim


@normed_op(F.group_norm).register_norm
def group_norm(
    input: RMSTensor, num_groups: int, weight: LinfTensor | None = None, bias: RMSTensor | None = None, eps: float = 1e-5
) -> RMSTensor:
    """`layer_norm` over the channels of a group and all positions; gain and bias per channel.

    input: [batch, channels, *space], RMS;  output: RMS over channels and positions (and E): a mean over groups
    Value:        |y| <= v |g| + |b|, v = n / sqrt(n^2 + eps), n = |x|      (attained as layer_norm's)
    Sensitivity:  |g| / sqrt(eps),  v,  1
    """
    dims = tuple(range(_channel(input), 0))
    x = normalized(input, dims, Divisor(eps), is_centred=True, groups=num_groups)
    return _affine(x, weight, bias, input.shape, (_channel(input),))


@normed_op(torch.ops.aten.native_group_norm.default).register_norm
def _native_group_norm(
    input: RMSTensor,
    weight: LinfTensor | None,
    bias: RMSTensor | None,
    N: Any,
    C: Any,
    HxW: Any,
    group: int,
    eps: float,
) -> tuple[NormedTensor | None, ...]:
    """`group_norm`; ATen also returns mean and rstd."""
    return group_norm(input, group, weight, bias, eps), None, None


def _over_batch(input: RMSTensor, dims: ed.Dims, weight: LinfTensor | None, bias: RMSTensor | None, eps: float) -> RMSTensor:
    return _affine(normalized(input, dims, Divisor(eps), is_centred=True), weight, bias, input.shape, (_channel(input),), True)


def _fixed(
    input: RMSTensor, mean: torch.Tensor, var: torch.Tensor, weight: LinfTensor | None, bias: RMSTensor | None, eps: float
) -> RMSTensor:
    """With given statistics a normalization is affine: (x - m) s, s = 1 / sqrt(var + eps)."""
    inverse = (var.double() + eps).rsqrt()
    shift = (mean.double() * inverse).abs()
    # the shift varies with the channel alone
    by_channel = _channel(input) in input.elem_dims
    largest = inverse.amax()
    shift = shift.square().mean().sqrt() if by_channel else shift.amax()
    x = rms(input.norm_size * largest + shift, input.elem_dims, sensitivity={"input": largest})
    return _affine(x, weight, bias, input.shape, (_channel(input),))


def _no_statistics() -> NormMismatchError:
    return NormMismatchError("a normalization by given statistics needs running_mean and running_var")


@normed_op(F.batch_norm).register_norm(allow_plain_tensors="constant")
def batch_norm(
    input: RMSTensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: LinfTensor | None = None,
    bias: RMSTensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> RMSTensor:
    """Normalization of each channel over the batch, by its own or by given statistics.

    input: [batch, channels, *space], RMS over any E;  weight: largest entry;  bias: RMS over channels
    Evaluation, with s = 1 / sqrt(running_var + eps) and the plain statistics' own norms:
      Value:        |y| <= (|x| max s + |running_mean s|) |g| + |b|, over E    (attained if the largest s, g and shift coincide)
      Sensitivity:  max s |g|,  |x| max s + |running_mean s|,  1
    Training: `layer_norm` over all dimensions but the channels; output RMS over E and those:
      Value:        |y| <= sqrt(v^2 |g|^2 + |b|^2), v = n / sqrt(n^2 + eps), n = |x|    (centred x and the bias are orthogonal)
      Sensitivity:  |g| / sqrt(eps),  v,  1
    """
    if input.ndim < 2:
        raise NormMismatchError(f"batch_norm needs an input [batch, channels, ...], got shape {tuple(input.shape)}")
    if training:
        dims = tuple(d for d in range(-input.ndim, 0) if d != _channel(input))
        return _over_batch(input, dims, weight, bias, eps)
    if running_mean is None or running_var is None:
        raise _no_statistics()
    return _fixed(input, running_mean, running_var, weight, bias, eps)


@normed_op(F.instance_norm).register_norm(allow_plain_tensors="constant")
def instance_norm(
    input: RMSTensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: LinfTensor | None = None,
    bias: RMSTensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> RMSTensor:
    """`layer_norm` of each channel over positions, or `batch_norm` by given statistics; see there."""
    if use_input_stats:
        return _over_batch(input, tuple(range(2 - input.ndim, 0)), weight, bias, eps)
    return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)


@normed_op(torch.ops.aten.native_batch_norm.default).register_norm(allow_plain_tensors="constant")
@normed_op(torch.ops.aten._native_batch_norm_legit.default).register_norm(allow_plain_tensors="constant")
def _native_batch_norm(
    input: RMSTensor,
    weight: LinfTensor | None,
    bias: RMSTensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[NormedTensor | None, ...]:
    """`batch_norm`; ATen also returns the statistics."""
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps), None, None


@normed_op(torch.ops.aten._native_batch_norm_legit.no_stats).register_norm
def _native_batch_norm_no_stats(
    input: RMSTensor, weight: LinfTensor | None, bias: RMSTensor | None, training: bool, momentum: float, eps: float
) -> tuple[NormedTensor | None, ...]:
    """`batch_norm` by the input's own statistics, which there is nothing to compare with."""
    return batch_norm(input, None, None, weight, bias, True, momentum, eps), None, None


@normed_op(torch.ops.aten._native_batch_norm_legit_functional.default).register_norm(allow_plain_tensors="constant")
def _native_batch_norm_functional(
    input: RMSTensor,
    weight: LinfTensor | None,
    bias: RMSTensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[NormedTensor | None, ...]:
    """`batch_norm`; ATen also returns the statistics, old and new."""
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps), None, None, None, None


@normed_op(torch.ops.aten._batch_norm_with_update.default).register_norm(allow_plain_tensors="constant")
def _batch_norm_with_update(
    input: RMSTensor,
    weight: LinfTensor | None,
    bias: RMSTensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[NormedTensor | None, ...]:
    """`batch_norm` in training; ATen also returns the statistics."""
    return batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps), None, None, None


@normed_op(torch.ops.aten._native_batch_norm_legit_no_training.default).register_norm(allow_plain_tensors="constant")
def _native_batch_norm_no_training(
    input: RMSTensor,
    weight: LinfTensor | None,
    bias: RMSTensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[NormedTensor | None, ...]:
    """`batch_norm` in evaluation."""
    return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps), None, None


# -- to the unit sphere ---------------------------------------------------------------------------------------------------


def _over_dim(t: torch.Tensor, args: dict[str, Any]) -> ed.Dims:
    return ed.canonical(args["dim"], t.ndim) if t.ndim else ()


@normed_op(F.normalize).register_norm(lift_dims={"input": _over_dim}, wants_own_kinds=True)
def normalize(input: L2Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> L2Tensor:
    """y = x / max(|x|_2, eps) over `dim`.

    input: L2 over `dim`;  output: the same
    Value:        min(1, |x| / eps)
    Sensitivity:  1 / eps    (attained below eps: projection onto a ball, scaled);  local: 1 / max(|x|, eps), x the shortest, twice
                  that at most for moves away from the data (`normalized`);
                  1 / max(l, eps) for the least length l that x can have (`least_length`): that is what counts where eps = 0
    Mode "typical": that of a Gaussian's length, as in `normalized`; of one or two entries 1 / |x|.  Mode "modula": 1.
    Raises NormMismatchError for other p, and for eps < 0.
    """
    if p != 2 or eps < 0:
        raise NormMismatchError(f"normalize has a norm rule for p = 2 and eps >= 0, got p = {p}, eps = {eps}")
    dims = ed.canonical(dim, input.ndim) if input.ndim else ()
    x, c = as_kind(input, L2Tensor, dims)
    one = scalar(1.0, x.norm_size)
    value = spoiled(torch.minimum(x.norm_size / eps, one) if eps else (x.norm_size > 0) * one, x.norm_size)
    count = ed.numel(input.shape, dims)
    least = least_length(input, dims) * math.sqrt(max(count, 1))
    lipschitz: Constant = inverse_length(x.norm_size, least, count, eps)
    if current_mode() == "modula":
        lipschitz = 1.0
    elif (near := distances(input)) is not None and dims:
        shortest = data(input).square().sum(dims).sqrt().amin().to(value.dtype) - c * near[0]
        lipschitz = 1 / shortest.clamp(min=max(eps, least) if near[0] else eps)
        if is_from_data():
            lipschitz = torch.minimum(lipschitz, 2 / (shortest + c * near[0]).clamp(min=eps))
    return L2Tensor(value, elem_dims=dims, sensitivity={"input": c * lipschitz})
