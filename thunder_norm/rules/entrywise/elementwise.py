"""Norm rules for functions of each entry that grow at most linearly: activations, absolute values.

For an RMS norm over N elements one entry may be as large as ``reach = sqrt(N) n`` (a spike), so a bound that depends on where
a function is evaluated is taken over ``|t| <= reach``.  Where ``f(sqrt t)^2`` is concave, Jensen gives the value f(n) whatever N.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import spoiled
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules import _local
from thunder_norm.rules._pointwise import pointwise, softplus_of, typical_pointwise
from thunder_norm.rules._shared import VectorKind, like, refuse_perturbation, root_sum_squares, scalar, scaled

_SQRT2 = math.sqrt(2)

# -- |f(x)| <= c |x| with Lipschitz constant c ----------------------------------------------------------------------------


@normed_op(F.relu).register_norm
def relu(input: VectorKind) -> VectorKind:
    """max(x, 0).

    Value:       n          (attained: x >= 0)
    Sensitivity: 1
    Source:      |f(x)| <= |x| and f is 1-Lipschitz, entry by entry
    """
    return scaled(input, 1)


@normed_op(F.relu).register_norm(mode="typical")
def relu_typical(input: RMSTensor) -> RMSTensor:
    """max(x, 0) of a Gaussian: half of the energy, value n / sqrt 2 and sensitivity 1 / sqrt 2."""
    return scaled(input, 1 / _SQRT2)


@normed_op(torch.abs).register_norm
def abs(input: VectorKind) -> VectorKind:
    """|x|.  Value n, sensitivity 1, both attained."""
    return scaled(input, 1)


@normed_op(torch.neg).register_norm
def neg(input: NormedTensor) -> NormedTensor:
    """-x.  Value n, sensitivity 1 in every kind: an isometry."""
    return scaled(input, 1)


@normed_op(torch.positive).register_norm
def positive(input: NormedTensor) -> NormedTensor:
    """x itself."""
    return scaled(input, 1)


@normed_op(torch.deg2rad).register_norm
def deg2rad(input: VectorKind) -> VectorKind:
    """x pi / 180.  Value and sensitivity that factor, attained."""
    return scaled(input, math.pi / 180)


@normed_op(torch.rad2deg).register_norm
def rad2deg(input: VectorKind) -> VectorKind:
    """x 180 / pi.  Value and sensitivity that factor, attained."""
    return scaled(input, 180 / math.pi)


@normed_op(F.leaky_relu).register_norm
def leaky_relu(input: VectorKind, negative_slope: float = 0.01) -> VectorKind:
    """max(x, 0) + a min(x, 0).  Value max(1, |a|) n and sensitivity max(1, |a|), attained on one side of 0."""
    return scaled(input, max(1.0, math.fabs(negative_slope)))


@normed_op(F.leaky_relu).register_norm(mode="typical")
def leaky_relu_typical(input: RMSTensor, negative_slope: float = 0.01) -> RMSTensor:
    """max(x, 0) + a min(x, 0) of a Gaussian: sqrt((1 + a^2) / 2) for both."""
    return scaled(input, math.sqrt((1 + negative_slope**2) / 2))


@normed_op(F.rrelu).register_norm
def rrelu(input: VectorKind, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> VectorKind:
    """leaky_relu with slopes between `lower` and `upper`.  Value and sensitivity by the steepest slope there can be.

    In training the sensitivity is that for the slopes drawn.  Torch draws one for each negative entry alone (on the CPU), so that under
    one seed an entry that changes its sign shifts the slopes of all that follow.
    """
    return scaled(input, max(1.0, math.fabs(lower), math.fabs(upper)))


@normed_op(torch.ops.aten._prelu_kernel.default).register_norm
@normed_op(F.prelu).register_norm
def prelu(input: RMSTensor, weight: LinfTensor) -> RMSTensor:
    """max(x, 0) + a min(x, 0) with a slope a for each channel.

    Value:       max(1, |a|) |x|        (attained: x on the steeper side)
    Sensitivity: max(1, |a|) to x, |x| to a
    """
    steepest = weight.norm_size.clamp(min=1.0)
    return like(input, input.norm_size * steepest, sensitivity={"input": steepest, "weight": input.norm_size})


@normed_op(torch.ops.aten._prelu_kernel.default).register_norm(mode="typical")
@normed_op(F.prelu).register_norm(mode="typical")
def prelu_typical(input: RMSTensor, weight: LinfTensor) -> RMSTensor:
    """prelu of a Gaussian: sqrt((1 + a^2) / 2) |x|, and |x| / sqrt 2 to the slope."""
    gain = root_sum_squares(scalar(1.0, weight.norm_size), weight.norm_size) / _SQRT2
    return like(input, input.norm_size * gain, sensitivity={"input": gain, "weight": input.norm_size / _SQRT2})


@normed_op(F.elu).register_norm
def elu(input: VectorKind, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> VectorKind:
    """x for x > 0, a (e^x - 1) below.

    Value:       max(1, |a|) n      (attained for a <= 1; towards 0 for a > 1)
    Sensitivity: max(1, |a|)        (attained: the slope at 0 from below is a)
    Raises NormMismatchError for ATen's input_scale < 0, which makes it grow exponentially.
    """
    if input_scale < 0:
        raise NormMismatchError(
            f"elu with input_scale = {input_scale} grows exponentially below 0: there is a bound for input_scale >= 0"
        )
    return scaled(input, math.fabs(scale) * max(1.0, math.fabs(alpha * input_scale)))


@normed_op(F.elu).register_norm(mode="typical")
def elu_typical(input: RMSTensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> RMSTensor:
    """elu of a Gaussian."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return scale * torch.where(x > 0, x, alpha * torch.expm1(input_scale * x))

    def slope(x: torch.Tensor) -> torch.Tensor:
        return scale * torch.where(x > 0, torch.ones_like(x), alpha * input_scale * torch.exp(input_scale * x))

    return typical_pointwise(input, f, slope)


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


@normed_op(F.selu).register_norm
def selu(input: VectorKind) -> VectorKind:
    """Scaled elu.  Value 1.758 n (attained as n -> 0), sensitivity 1.758 = scale alpha, the slope at 0 from below."""
    return scaled(input, _SELU_ALPHA * _SELU_SCALE)


@normed_op(F.selu).register_norm(mode="typical")
def selu_typical(input: RMSTensor) -> RMSTensor:
    """Selu of a Gaussian: made so that n = 1 stays 1."""
    return elu_typical(input, _SELU_ALPHA, _SELU_SCALE)


@normed_op(F.celu).register_norm
def celu(input: VectorKind, alpha: float = 1.0) -> VectorKind:
    """x for x > 0, a (e^(x/a) - 1) below, a > 0.  Value n, sensitivity 1: the slope at 0 is 1 on both sides.

    Raises NormMismatchError for a <= 0, where it grows exponentially.
    """
    _check_celu(alpha)
    return scaled(input, 1)


def _check_celu(alpha: float) -> None:
    if alpha <= 0:
        raise NormMismatchError(f"celu with alpha = {alpha} grows exponentially below 0: there is a bound for alpha > 0")


@normed_op(F.celu).register_norm(mode="typical")
def celu_typical(input: RMSTensor, alpha: float = 1.0) -> RMSTensor:
    """celu of a Gaussian."""
    _check_celu(alpha)
    return elu_typical(input, alpha, 1.0, 1 / alpha)


@normed_op(F.softshrink).register_norm
def softshrink(input: VectorKind, lambd: float = 0.5) -> VectorKind:
    """x moved towards 0 by lambda.  Value n (not attained, lambda is lost), sensitivity 1."""
    return scaled(input, 1)


@normed_op(F.tanhshrink).register_norm
def tanhshrink(input: VectorKind) -> VectorKind:
    """x - tanh x.  Value n and sensitivity 1, attained as n grows: the slope is tanh^2."""
    return scaled(input, 1)


# -- x g(x) with an increasing gate g: the chord to a spike is the envelope -------------------------------------------------


def _logistic_gate_slope(x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


@pointwise(F.silu, f=F.silu, slope=_logistic_gate_slope)
def silu(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """x s(x), s the logistic function.

    Value:       n s(reach)         (attained: a spike)
    Sensitivity: the slope at min(reach, 2.399), at most 1.09984; attained
    Source:      f(x) / x = s(x) increases, so the chord to the spike is the concave envelope
    """
    return n * torch.sigmoid(reach), _logistic_gate_slope(reach.clamp(max=2.3993572805154676))


def _gelu_gate(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1 + torch.erf(x / _SQRT2))


def _gelu_slope(x: torch.Tensor) -> torch.Tensor:
    return _gelu_gate(x) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


_GELU_TANH_SCALE, _GELU_TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu_tanh_gate(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1 + torch.tanh(_GELU_TANH_SCALE * (x + _GELU_TANH_CUBIC * x * x * x)))


def _gelu_tanh_slope(x: torch.Tensor) -> torch.Tensor:
    gate = _gelu_tanh_gate(x)
    return gate + 2 * x * gate * (1 - gate) * _GELU_TANH_SCALE * (1 + 3 * _GELU_TANH_CUBIC * x * x)


@normed_op(F.gelu).register_norm
def gelu(input: RMSTensor, approximate: str = "none") -> RMSTensor:
    """x Phi(x), or its tanh approximation.

    Value:       n Phi(reach)       (attained: a spike)
    Sensitivity: the slope at min(reach, sqrt 2), at most 1.12890 (tanh: at 1.41850, 1.12899); attained
    Source:      Phi increases, so the chord to the spike is the concave envelope
    """
    n = input.norm_size
    reach = n * math.sqrt(input.numel_normed)
    if approximate == "none":
        gate, derivative, steepest = _gelu_gate, _gelu_slope, _SQRT2
    else:
        gate, derivative, steepest = _gelu_tanh_gate, _gelu_tanh_slope, 1.4185039629878893
    slope = _local.slope(input, derivative) if is_local(input) else derivative(reach.clamp(max=steepest))
    return like(input, n * gate(reach), sensitivity={"input": slope})


@normed_op(F.gelu).register_norm(mode="modula")
def gelu_modula(input: RMSTensor, approximate: str = "none") -> RMSTensor:
    """GELU as Modula has it: its GeLU divides by 1.1289 and declares sensitivity 1."""
    return like(input, input.norm_size, sensitivity={"input": 1.1289})


@normed_op(F.gelu).register_norm(mode="typical")
def gelu_typical(input: RMSTensor, approximate: str = "none") -> RMSTensor:
    """GELU of a Gaussian."""
    if approximate == "none":
        return typical_pointwise(input, lambda x: x * _gelu_gate(x), _gelu_slope)
    return typical_pointwise(input, lambda x: x * _gelu_tanh_gate(x), _gelu_tanh_slope)


def _mish_slope(x: torch.Tensor) -> torch.Tensor:
    gate = torch.tanh(softplus_of(x))
    return gate + x * torch.sigmoid(x) * (1 - gate * gate)


@pointwise(F.mish, f=F.mish, slope=_mish_slope)
def mish(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """x tanh(softplus x).

    Value:       n tanh(softplus(reach))    (attained: a spike)
    Sensitivity: the slope at min(reach, 1.4906), at most 1.08850; attained
    """
    return n * torch.tanh(softplus_of(reach)), _mish_slope(reach.clamp(max=1.4905711794854284))


def _hardswish_slope(x: torch.Tensor) -> torch.Tensor:
    inside = (2 * x + 3) / 6
    return torch.where(x >= 3, torch.ones_like(x), torch.where(x <= -3, torch.zeros_like(x), inside))


@pointwise(F.hardswish, f=F.hardswish, slope=_hardswish_slope)
def hardswish(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """x clip((x + 3) / 6, 0, 1).

    Value:       n min(1, (reach + 3) / 6)      (attained: a spike)
    Sensitivity: (2 min(reach, 3) + 3) / 6, at most 1.5; attained below 3
    """
    inside = reach.clamp(max=3.0)
    return n * (inside + 3) / 6, (2 * inside + 3) / 6


# -- f(sqrt t)^2 concave: Jensen gives f(n) ---------------------------------------------------------------------------------


@pointwise(torch.sigmoid, f=torch.sigmoid, slope=lambda x: torch.sigmoid(x) * torch.sigmoid(-x))
def sigmoid(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """1 / (1 + e^-x).  Value s(n), attained by the constant n; sensitivity 1/4, attained at 0."""
    return torch.sigmoid(n), 0.25


@pointwise(torch.tanh, f=torch.tanh, slope=lambda x: torch.cosh(x).square().reciprocal())
def tanh(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """tanh x.  Value tanh n, attained by the constant n; sensitivity 1, attained at 0."""
    return torch.tanh(n), 1


@pointwise(F.softsign, f=lambda x: x / (1 + torch.abs(x)), slope=lambda x: (1 + torch.abs(x)).reciprocal().square())
def softsign(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """x / (1 + |x|).  Value n / (1 + n), attained by the constant n; sensitivity 1, attained at 0."""
    return n / (1 + n), 1


@pointwise(torch.erf, f=torch.erf, slope=lambda x: 2 / math.sqrt(math.pi) * torch.exp(-x * x))
def erf(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """erf x.  Value erf n, attained by the constant n; sensitivity 2 / sqrt(pi), attained at 0."""
    return torch.erf(n), 2 / math.sqrt(math.pi)


@pointwise(torch.erfc, f=lambda x: 1 - torch.erf(x), slope=lambda x: 2 / math.sqrt(math.pi) * torch.exp(-x * x))
def erfc(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """1 - erf x.  Value 1 + erf n, attained by the constant -n; sensitivity 2 / sqrt(pi), attained at 0."""
    return 1 + torch.erf(n), 2 / math.sqrt(math.pi)


@pointwise(torch.atan, f=torch.atan, slope=lambda x: (1 + x * x).reciprocal())
def atan(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """arctan x.  Value atan n, attained by the constant n; sensitivity 1, attained at 0."""
    return torch.atan(n), 1


@pointwise(torch.asinh, f=torch.asinh, slope=lambda x: (1 + x * x).rsqrt())
def asinh(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """arsinh x.  Value asinh n, attained by the constant n; sensitivity 1, attained at 0."""
    return torch.asinh(n), 1


@pointwise(torch.sin, f=torch.sin, slope=torch.cos)
def sin(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """Sine, value that of min(n, pi / 2), attained by a constant; sensitivity 1, attained at 0."""
    return spoiled(torch.sin(n.clamp(max=math.pi / 2)), n), 1


@pointwise(torch.cos, f=torch.cos, slope=torch.sin)
def cos(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """Cosine.  Value 1, attained at 0; sensitivity sin(min(reach, pi / 2)), attained."""
    return torch.ones_like(n), torch.sin(reach.clamp(max=math.pi / 2))


_STEEPEST_SINC = 0.6626049068863423  # where |d sinc| is largest, 1.370336


def sinc_slope(x: torch.Tensor) -> torch.Tensor:
    """The derivative of sinc."""
    away = torch.where(torch.abs(x) < 1e-4, torch.full_like(x, 1e-4), x)  # around 0 it is -pi^2 x / 3
    slope = (torch.cos(math.pi * away) - torch.sin(math.pi * away) / (math.pi * away)) / away
    return torch.where(torch.abs(x) < 1e-4, -(math.pi**2) / 3 * x, slope)


@pointwise(torch.sinc, f=torch.sinc, slope=sinc_slope)
def sinc(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """sin(pi x) / (pi x).  Value 1, attained at 0; sensitivity the slope at min(reach, 0.66260), at most 1.37034, attained."""
    return torch.ones_like(n), torch.abs(sinc_slope(reach.clamp(max=_STEEPEST_SINC)))


@pointwise(F.hardsigmoid, f=F.hardsigmoid, slope=lambda x: torch.where(torch.abs(x) < 3, 1 / 6, 0.0).to(x.dtype))
def hardsigmoid(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """clip(1/2 + x / 6, 0, 1).  Value min(1, 1/2 + n / 6), attained by the constant n; sensitivity 1/6."""
    return (0.5 + n / 6).clamp(max=1.0), 1 / 6


# -- softplus ---------------------------------------------------------------------------------------------------------------


_SOFTPLUS_THRESHOLD = 20.0  # torch's default


@normed_op(F.softplus).register_norm
def softplus(input: RMSTensor, beta: float = 1.0, threshold: float = _SOFTPLUS_THRESHOLD) -> RMSTensor:
    """log(1 + e^(b x)) / b; for b < 0 it is minus that of -b and -x.

    Value:       the least of log(1 + e^(b reach)) / b (attained for LinfTensor), log(2) / b + n and
                 sqrt(n^2 + 0.73172 / b^2) (attained to 0.98)
    Sensitivity: s(b reach), at most 1; attained.  None for a threshold below 20, where torch's jump to x is more than rounding
    Source:      sup_x softplus(x)^2 - x^2 = 0.7317155801; softplus is 1-Lipschitz with value log 2 at 0
    """
    if threshold < _SOFTPLUS_THRESHOLD:
        refuse_perturbation(F.softplus, input)
    n, beta = input.norm_size, math.fabs(beta)
    reach = n * math.sqrt(input.numel_normed) * beta
    value = torch.minimum(softplus_of(reach) / beta, (n.square() + 0.7317155802 / beta**2).sqrt())
    value = torch.minimum(value, n + math.log(2) / beta)
    # beyond `threshold` torch returns x itself, whose slope is 1
    return like(input, value, sensitivity={"input": torch.where(reach > threshold, 1.0, torch.sigmoid(reach))})


@normed_op(F.softplus).register_norm(mode="typical")
def softplus_typical(input: RMSTensor, beta: float = 1.0, threshold: float = 20.0) -> RMSTensor:
    """softplus of a Gaussian."""
    return typical_pointwise(input, lambda x: softplus_of(beta * x) / beta, lambda x: torch.sigmoid(beta * x))


@normed_op(F.logsigmoid).register_norm
def log_sigmoid(input: RMSTensor) -> RMSTensor:
    """log s(x) = -softplus(-x): value and sensitivity of `softplus`."""
    return softplus(input, 1.0, math.inf)


@normed_op(F.logsigmoid).register_norm(mode="typical")
def log_sigmoid_typical(input: RMSTensor) -> RMSTensor:
    """log s(x) of a Gaussian: as `softplus`."""
    return softplus_typical(input)
