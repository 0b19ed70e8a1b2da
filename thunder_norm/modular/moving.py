"""What a step of the optimizer moves: parameters with their gradients and balls, and what is checked of them."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from thunder_norm.errors import GradientError, NormMapKeyError, NormMismatchError, with_details
from thunder_norm.model_state.shards import local, placed
from thunder_norm.modular.duality import Ball
from thunder_norm.modular.wrappers import unwrapped

OnBadGradient = Literal["error", "skip"]


class Moving(NamedTuple):
    """A parameter that a step moves, by ``group["lr"] * target`` in its own norm; of one that is sharded, this rank's shard.

    Attributes:
        name: its first name.
        parameter: the parameter, whole.
        data: what this rank has of it.
        gradient: the same of its gradient.
        ball: of its norm.
        target: of its norm.
        group: its group's options.
        unit_dims: of the units by whose noise its steps are multiplied (see `thunder_norm.modular.noise`); None if they are not.
    """

    name: str
    parameter: torch.Tensor
    data: torch.Tensor
    gradient: torch.Tensor
    ball: Ball
    target: float
    group: dict[str, Any]
    unit_dims: tuple[int, ...] | None = None

    @property
    def size(self) -> float:
        """How far it moves, in its own norm."""
        return float(self.group["lr"]) * self.target


@dataclass(frozen=True)
class Gradients:
    """What there is to move, parameters of target 0, names of those that have no gradient, and of those with one not finite."""

    moving: list[Moving]
    still: list[torch.Tensor]
    missing: list[str]
    nonfinite: list[str]

    def check_missing(self, choice: OnBadGradient) -> None:
        """Refuse a step without a gradient of each parameter, unless they are to be skipped.

        Raises:
            GradientError: one is missing.
        """
        if self.missing and choice == "error":
            raise GradientError(
                with_details(
                    f"no gradient for {', '.join(map(repr, self.missing[:4]))}" if self.moving else "no parameter has a gradient",
                    instead="missing_grads='skip' leaves parameters alone that a loss did not reach"
                    if self.moving
                    else "call backward() on a loss before step(); an optimizer made before fully_shard(model) has the parameters of then",
                )
            )

    def are_finite(self, choice: OnBadGradient) -> bool:
        """Whether a step can be taken.

        Raises:
            GradientError: it cannot, and is not to be skipped.
        """
        if self.nonfinite and choice == "error":
            raise GradientError(
                with_details(
                    f"gradients with entries that are NaN or infinite: {', '.join(map(repr, self.nonfinite[:4]))}",
                    instead="nonfinite_grads='skip' leaves such steps out",
                )
            )
        return not self.nonfinite


_INSTEAD = {
    "maximize": "negate the loss",
    "betas": "momentum=beta_1, and noise_adaptation=beta_2 if steps are to be shortened where gradients are noise",
}


def check_foreign_options(names: Iterable[str], own: Collection[str], model: torch.nn.Module) -> None:
    """Refuse options of other optimizers, and misspelled ones, among keyword arguments: the model may take any name and say nothing.

    Args:
        names: of keyword arguments, or options of a group.
        own: options that there are.
        model: which gets the arguments.

    Raises:
        NormMismatchError: one that the model's `forward` does not name is an option of an optimizer of torch, or nearly one of `own`.
    """
    inside, _ = unwrapped(model)
    named = inspect.signature(inside.forward).parameters
    for name in names:
        if name in own or name in named and named[name].kind is not inspect.Parameter.VAR_KEYWORD:
            continue
        close = difflib.get_close_matches(name, own, n=1, cutoff=0.85)
        if name in _options_of_torch() or close:
            raise NormMismatchError(
                with_details(
                    f"ModularOptimizer has no option {name!r}, and {type(inside).__name__}.forward no argument of that name",
                    did_you_mean=repr(close[0]) if close else None,
                    instead=None if close else _INSTEAD.get(name, "leave it out"),
                    otherwise="an argument that the model hands on goes to ModularNorm(model, ...), which this takes in place of the model",
                )
            )


@functools.cache
def _options_of_torch() -> frozenset[str]:
    """What the optimizers of torch take."""
    optimizers = (f for f in vars(torch.optim).values() if isinstance(f, type) and issubclass(f, torch.optim.Optimizer))
    return frozenset(name for f in optimizers for name in inspect.signature(f).parameters) - {"params", "defaults"}


def check_options(group: Mapping[str, Any]) -> None:
    """Refuse options of a group that are out of their range.

    Raises:
        NormMismatchError: one is.
    """
    for name, is_right, what in (
        ("lr", lambda v: 0 <= v < math.inf, "a number >= 0"),
        ("momentum", lambda v: 0 <= v < 1, "a number >= 0 and < 1"),
        ("weight_decay", lambda v: 0 <= v < math.inf, "a number >= 0"),
        ("noise_adaptation", lambda v: 0 <= v < 1, "None or a number >= 0 and < 1"),
    ):
        value = group[name]
        is_optional = name == "noise_adaptation"
        if is_optional and value is None:
            continue
        is_number = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        is_number = is_number and not (is_optional and value is False)  # which says "none", not 0
        if not is_number or not is_right(float(value)):
            raise NormMismatchError(f"{name} must be {what}, got {value!r}")
    for name in ("nesterov", "project"):
        if not isinstance(group[name], bool):
            raise NormMismatchError(f"{name} must be True or False, got {group[name]!r}")


def check_choice(value: Any, name: str, choices: Any) -> Any:
    """The value of an option, one of the strings of a `Literal`.

    Raises:
        NormMismatchError: it is none of them.
    """
    if value not in get_args(choices):
        raise NormMismatchError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}")
    return value


def check_saved(saved: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], options: AbstractSet[str]) -> None:
    """Refuse saved groups that are of other parameters, or of another optimizer.

    Args:
        saved: what a `state_dict` has for groups.
        names: the names of this optimizer's parameters, by group.
        options: that a group must have.

    Raises:
        NormMapKeyError: a parameter has another name.
        NormMismatchError: a group has not all options.
    """
    for own, group in zip(names, saved, strict=False):
        for name, other in zip(own, group.get("param_names", ()), strict=False):
            if not _is_one_name(name, str(other)):
                raise NormMapKeyError(f"the loaded state is of {other!r} where this optimizer has {name!r}")
    for group in saved:
        if missing := sorted(options - group.keys()):
            raise NormMismatchError(
                f"the loaded state is of another optimizer: its groups have no {', '.join(map(repr, missing))}, but "
                f"{', '.join(sorted(map(repr, group.keys() - {'params', 'param_names'} - options))) or 'nothing else'}"
            )


_OF_WRAPPERS = frozenset(["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"])


def _is_one_name(name: str, other: str) -> bool:
    """Whether names may be those of one parameter, in a model and in one that is wrapped, or has wrapped parts; prefixes do not count."""
    short, long = sorted(([part for part in n.split(".") if part not in _OF_WRAPPERS] for n in (name, other)), key=len)
    return long[len(long) - len(short) :] == short


def check_decay(moving: Sequence[Moving]) -> None:
    """Refuse a decay that would turn a parameter of one group around.

    Raises:
        NormMismatchError: it takes more of the parameter than there is.
    """
    if not moving or not moving[0].group["weight_decay"]:
        return
    m = max(moving, key=lambda m: m.target)
    if m.size * (decay := float(m.group["weight_decay"])) > 1:
        raise NormMismatchError(
            f"lr {float(m.group['lr']):g} * target {m.target:g} of {m.name!r} * weight_decay {decay:g} exceeds 1: the "
            "parameter would change its sign and grow; lower one of them"
        )


def check_gradient(name: str, p: torch.Tensor, g: torch.Tensor, shape: torch.Size) -> None:
    """Refuse a gradient that is sparse, and one of another shape than the parameter had when the norm was derived.

    Raises:
        GradientError: it is sparse.
        NormMismatchError: it has, or the parameter has, that other shape.
    """
    if g.shape != shape or p.shape != shape:
        raise NormMismatchError(
            with_details(
                f"{name!r} had the shape {list(shape)} when the norm was derived, and has {list(p.shape)} now",
                gradient=f"{list(g.shape)}" if g.shape != p.shape else None,
                instead="make a new optimizer for a model of other sizes",
            )
        )
    if g.layout != torch.strided:
        raise GradientError(
            f"the gradient of {name!r} is sparse ({g.layout}): its norm is over whole rows, so it must be dense (sparse=False)"
        )


def check_unfrozen(frozen: Iterable[tuple[str, torch.Tensor]], groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse to leave behind what was frozen when an optimizer of all parameters was made, and trains now.

    Args:
        frozen: (name, parameter) of those that were.
        groups: of the optimizer.

    Raises:
        NormMismatchError: one of them has a gradient, and is in no group.
    """
    for name, p in frozen:
        if p.requires_grad and p.grad is not None and not any(p is other for group in groups for other in group["params"]):
            raise NormMismatchError(
                with_details(
                    f"{name!r} was frozen when the optimizer was made, which does not move it, and has a gradient now",
                    instead="make a new optimizer when parameters begin to train; where another one moves it, give this one params=[...]",
                )
            )


def check_added(model: torch.nn.Module, known: Mapping[int, str], missing: Collection[str]) -> None:
    """Refuse to leave behind what an optimizer of all parameters does not know: what was added, or untied, after it was made.

    Args:
        model: as it is.
        known: id -> name of all that were the model's when the optimizer was made.
        missing: names of those that have no gradient; if they have been replaced, `check_replaced` says so.

    Raises:
        NormMismatchError: one has a gradient.
    """
    if _has_only(model, known):
        return
    for name, p in model.named_parameters():
        if id(p) not in known and p.grad is not None and p.requires_grad and name not in missing:
            raise NormMismatchError(
                with_details(
                    f"{name!r} is new since the optimizer was made, which does not move it, and has a gradient",
                    instead="make a new optimizer when a model gets other parameters; where another one moves it, give this one params=[...]",
                )
            )


def _has_only(model: torch.nn.Module, known: Mapping[int, str]) -> bool:
    """Whether all parameters of a model are known: without their names, which take four times as long, in every step."""
    seen, waiting = {model}, [model]
    for module in waiting:
        for p in module._parameters.values():
            if p is not None and id(p) not in known:
                return False
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return True


def check_replaced(missing: Iterable[str], known: Mapping[int, str], model: torch.nn.Module) -> None:
    """Refuse to go on with parameters that have no gradient because the model has others by now.

    Args:
        missing: their names.
        known: id -> name of all that were the model's when the optimizer was made.
        model: as it is.

    Raises:
        GradientError: one has been replaced by one that trains, maybe one that it was tied to.
    """
    for name in missing:
        of, _, attribute = name.rpartition(".")
        try:
            now = getattr(model.get_submodule(of), attribute, None)
        except AttributeError:  # taken out
            continue
        if isinstance(now, torch.nn.Parameter) and known.get(id(now)) != name and now.requires_grad:
            raise GradientError(
                with_details(
                    f"{name!r} has been replaced since the optimizer was made, and what the model has now would not be moved",
                    instead="an optimizer that was made before fully_shard(model), to_empty(), load_state_dict(assign=True), another layer "
                    "in place of one, or a tie, has the parameters of then: make a new one",
                )
            )


def smoothed(group: Mapping[str, Any], gradients: list[torch.Tensor], past: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients, smoothed by momentum; updates the buffers."""
    momentum = float(group["momentum"])
    if not momentum:
        return gradients
    torch._foreach_lerp_(past, gradients, 1 - momentum)
    return list(torch._foreach_lerp(gradients, past, momentum)) if group["nesterov"] else past


def momentum_buffer(m: Moving, state: dict[str, Any]) -> torch.Tensor:
    """This process's part of the momentum buffer, in the dtype of the gradients, which is not always that of the parameter."""
    buffer = state.get("momentum_buffer")
    if buffer is None or buffer.dtype != m.gradient.dtype:
        buffer = torch.zeros_like(m.parameter) if buffer is None else buffer
        state["momentum_buffer"] = buffer = buffer.to(m.gradient.dtype)
    return local(buffer)


def restore_momentum(state: dict[str, Any], saved: Mapping[str, Any], p: torch.Tensor) -> None:
    """Put a momentum buffer where its parameter is, as it was saved: torch gives what it loads the dtype of the parameter."""
    if "momentum_buffer" in state:
        buffer, kept = state["momentum_buffer"], saved.get("momentum_buffer")
        if kept is not None and kept.dtype != buffer.dtype:
            buffer = kept.to(local(p).device, copy=True)
        state["momentum_buffer"] = placed(buffer, p)


def shift(group: Mapping[str, Any], parameters: list[torch.Tensor], steps: list[torch.Tensor], sizes: list[float]) -> None:
    """Decay, and a step."""
    if decay := float(group["weight_decay"]):  # a tensor would be multiplied in its own dtype and shape
        torch._foreach_mul_(parameters, [1 - size * decay for size in sizes])
    torch._foreach_sub_(parameters, steps)


def projections(
    moving: list[Moving], nearest_to: Callable[[list[Moving]], list[torch.Tensor]]
) -> Iterable[tuple[Moving, torch.Tensor]]:
    """The parameters that are projected, and where to; after a step of size 0, which moves nothing at all, there are none."""
    outside = [m for m in moving if m.group["project"] and m.size > 0]  # torch.distributed.checkpoint makes such steps
    return zip(outside, nearest_to(outside), strict=True) if outside else ()
