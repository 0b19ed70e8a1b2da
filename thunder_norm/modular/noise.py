"""Noise adaptation: of a direction, how much is signal, for each unit of what a norm measures apart.

Momentum averages gradients, of which noise cancels and signal does not: the length of a direction D over the root of the mean square of
gradients G is 1 where all gradients agree, and about ``sqrt((1 - momentum) / (1 + momentum))`` where they are noise alone.  A step is
multiplied by it, unit by unit.  Factors are at most 1, so a step's norm does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thunder_norm.errors import NormMismatchError, with_details
from thunder_norm.model_state.shards import cut, local, placed
from thunder_norm.modular.distributed import Spread
from thunder_norm.modular.duality import Ball, OperatorBall
from thunder_norm.modular.moving import Moving
from thunder_norm.modular.orthogonal import SAFE, are_between, in_dtype
from thunder_norm.modular.roles import Role

# in an optimizer's state
_AVERAGE = "square_average"
_AVERAGE_WEIGHT = "square_average_weight"
_MOMENTUM_WEIGHT = "momentum_weight"


def unit_dims(ball: Ball, role: Role) -> tuple[int, ...] | None:
    """The dimensions, from the end, over which a unit's squares are summed; None of a parameter whose steps are whole.

    Of tables, gains and biases a unit is what their norm measures apart: a row, an entry, all of it.  Of a head (also a tied one) it is
    the row of one output; of a matrix or kernel that multiplies the program's inputs all of it.  Other matrices and kernels, between
    activations, take whole steps.
    """
    if not isinstance(ball.single, OperatorBall):
        return ball.elem_dims
    if role.role in ("head", "tied"):
        return ball.elem_dims[1:]
    return tuple(range(-len(role.shape), 0)) if role.is_first else None


@dataclass(frozen=True)
class Adaptation:
    """One parameter's, in one step.

    Attributes:
        dims: of its units.
        decay: of the average of squares.
        average: of squares of gradients, each unit's, what this rank has of it; changed by `factors`.
        average_weight: the sum of the weights that it is an average by, with those of this step.
        direction_weight: the same of the direction.
    """

    dims: tuple[int, ...]
    decay: float
    average: torch.Tensor
    average_weight: float
    direction_weight: float

    @staticmethod
    def of(m: Moving, state: dict[str, Any]) -> Adaptation | None:
        """That of a step which begins; None of a parameter that has none.

        Args:
            m: the parameter.
            state: the optimizer's of it.  Weights become those after this step; momentum that was there before them is taken to be long.
        """
        if m.unit_dims is None:
            state.pop(_MOMENTUM_WEIGHT, None)  # not that of what momentum goes on to be
            return None
        decay, momentum = float(m.group["noise_adaptation"]), float(m.group["momentum"])
        if _AVERAGE not in state:
            state[_AVERAGE], state[_AVERAGE_WEIGHT] = _zeros(m.parameter, m.unit_dims), 0.0
        state[_AVERAGE_WEIGHT] = decay * state[_AVERAGE_WEIGHT] + 1 - decay
        of_direction = 1.0
        if momentum:
            before = state.setdefault(_MOMENTUM_WEIGHT, 1.0 if "momentum_buffer" in state else 0.0)
            state[_MOMENTUM_WEIGHT] = weight = momentum * before + 1 - momentum
            of_direction = momentum * weight + 1 - momentum if m.group["nesterov"] else weight
        return Adaptation(m.unit_dims, decay, local(state[_AVERAGE]), state[_AVERAGE_WEIGHT], of_direction)

    def squares(self, t: torch.Tensor) -> torch.Tensor:
        """Of each unit the sum of squares, in float64; summed dimensions are kept."""
        t = t.abs() if t.is_complex() else t
        return _norms(t, self.dims).square_() if self.dims else t.double().square()

    def averages(self, pieces: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The average of each of a parameter's pieces."""
        return self.average.split([len(piece) for piece in pieces]) if len(pieces) > 1 else (self.average,)

    @property
    def bias(self) -> float:
        """What corrects a square of the direction over the average, for the weights that these are averages by."""
        return self.average_weight / self.direction_weight**2

    def factors(self, average: torch.Tensor, of_gradient: torch.Tensor, of_direction: torch.Tensor) -> torch.Tensor:
        """``min(1, |D| / sqrt(v))`` of units, D and v divided by their weights; 1 where v is 0.

        Args:
            average: those units' of the average, which changes.
            of_gradient: their sums of squares of the gradient.
            of_direction: of the direction.
        """
        average.lerp_(of_gradient, 1 - self.decay)
        return _factors(average, of_direction, self.bias)


def adapt(
    some: Sequence[Adaptation],
    averages: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
) -> None:
    """Multiply steps of one shape, that adapt along the same dimensions and with one decay, by the factors of their units."""
    first, biases = some[0], [a.bias for a in some]
    is_one_unit = averages[0].numel() == 1 and averages[0].device.type == "cpu"
    if len(some) == 1:
        of_gradient, of_direction = first.squares(gradients[0]), first.squares(directions[0])
        if is_one_unit:
            averages[0].lerp_(of_gradient, 1 - first.decay)
            steps[0].mul_(_factor(averages[0].item(), of_direction.item(), biases[0]))
            return
        factors = first.factors(averages[0], of_gradient, of_direction)
        steps[0].mul_(in_dtype(factors, steps[0].dtype))  # first: a product with float64 takes three times as long
        return
    of_gradients, of_directions = (first.squares(torch.stack(list(tensors))) for tensors in (gradients, directions))
    torch._foreach_lerp_(list(averages), list(of_gradients.unbind()), 1 - first.decay)
    if is_one_unit:
        of_each = zip((a.item() for a in averages), of_directions.flatten().tolist(), biases, strict=True)
        torch._foreach_mul_(list(steps), [_factor(*each) for each in of_each])
        return
    bias = biases[0] if len(set(biases)) == 1 else of_directions.new_tensor(biases).view(-1, *[1] * (of_directions.ndim - 1))
    factors = _factors(torch.stack(list(averages)), of_directions, bias).to(steps[0].dtype)
    torch._foreach_mul_(list(steps), list(factors.unbind()))


def _factors(average: torch.Tensor, of_direction: torch.Tensor, bias: float | torch.Tensor) -> torch.Tensor:
    found = of_direction.div(average).mul_(bias).sqrt_()
    return torch.where(average > 0, found, 1.0).clamp_(max=1.0)


def _factor(average: float, of_direction: float, bias: float) -> float:
    """The same of one unit, by numbers, to the last bit: of small tensors each call takes longer than what it does."""
    return min(math.sqrt(of_direction / average * bias), 1.0) if average > 0 else 1.0


def adapt_everywhere(
    spread: Spread,
    moving: Sequence[Moving],
    adapted: Sequence[Adaptation | None],
    directions: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
) -> None:
    """Multiply steps by the factors of units, whose squares are summed over all shards.  Collective."""
    of_shards = {
        m.name: torch.stack([a.squares(m.gradient), a.squares(d)])
        for m, a, d in zip(moving, adapted, directions, strict=True)
        if a is not None
    }
    shapes = {m.name: _of_units(m.parameter.shape, dims) for m in moving if (dims := m.unit_dims)}
    sums = of_shards | _summed(spread, {name: of_shards[name] for name in shapes}, shapes)
    for m, a, step in zip(moving, adapted, steps, strict=True):
        if a is not None:
            factors = a.factors(a.average, *sums[m.name]).to(step.dtype)
            step.mul_(cut(factors.expand(m.parameter.shape), m.parameter) if a.dims else factors)


def check_saved_shapes(name: str, saved: Mapping[str, Any], m: torch.Tensor, dims: tuple[int, ...] | None) -> None:
    """Refuse what was saved of a parameter that has another shape now, or other units.

    Raises:
        NormMismatchError: it is of another shape.
    """
    for what, shape in (("momentum_buffer", m.shape), (_AVERAGE, None if dims is None else _of_units(m.shape, dims))):
        t = saved.get(what)
        if t is not None and shape is not None and t.shape != shape:
            raise NormMismatchError(
                with_details(
                    f"the loaded state of {name!r} is of another shape",
                    saved=f"{what} {list(t.shape)}",
                    wanted=f"{list(shape)}, for a parameter {list(m.shape)}",
                )
            )


def restore(state: dict[str, Any], saved: Mapping[str, Any], m: torch.Tensor, dims: tuple[int, ...] | None) -> None:
    """Put the average of squares into a parameter's state as it was saved: torch gives what it loads the dtype of the parameter."""
    average = saved.get(_AVERAGE)
    if average is not None:
        average = average.to(local(m).device, copy=True)
        state[_AVERAGE] = placed(average, m) if dims == () else average


def _norms(t: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Euclidean norms, in float64: by sums in it, or by sums in float32, which a CPU has sooner, where no square overflows or vanishes."""
    if t.device.type == "cpu" and t.dtype == torch.float32 and t.numel():  # an empty shard has no largest entry
        found = torch.linalg.vector_norm(t, dim=dims, keepdim=True)
        if are_between(found, *SAFE):
            return found.double()
        is_unsafe = (found < SAFE[0]) | (found > SAFE[1])
        if not torch.linalg.vector_norm(t, math.inf, dim=dims, keepdim=True)[is_unsafe].any():
            return found.double()
    return torch.linalg.vector_norm(t, dim=dims, keepdim=True, dtype=torch.float64)


def _zeros(p: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Of units that are entries placed as the parameter, of others whole on every rank."""
    if not dims:
        return torch.zeros_like(p, dtype=torch.float64, memory_format=torch.preserve_format)
    return torch.zeros(_of_units(p.shape, dims), dtype=torch.float64, device=local(p).device)


def _of_units(shape: torch.Size, dims: tuple[int, ...]) -> torch.Size:
    """The shape of a parameter's units."""
    return torch.Size(1 if d in dims else size for d, size in enumerate(shape, -len(shape)))


def _summed(spread: Spread, of_shards: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Sums over all of a parameter, from each rank's over its shard; one reduction for all parameters of a team."""
    found: dict[str, torch.Tensor] = {}
    for team in spread.teams:
        whole = {name: t.new_zeros((2, *shapes[name])) for name, t in of_shards.items() if name in team.parts}
        for name, t in whole.items():
            for piece, ranks in (item for part in team.parts[name] for item in part.pieces.items()):
                if ranks[0] == team.rank:  # replicas count once
                    at = [slice(*along) if size > 1 else slice(None) for along, size in zip(piece, shapes[name], strict=True)]
                    t[(slice(None), *at)] = of_shards[name]
        if team.group is not None and whole:
            together = torch.cat([t.flatten() for t in whole.values()])
            dist.all_reduce(together, group=team.group)
            parts = together.split([t.numel() for t in whole.values()])
            whole = {name: part.view(t.shape) for (name, t), part in zip(whole.items(), parts, strict=True)}
        found |= whole
    return found
