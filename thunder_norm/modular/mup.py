"""Learning rates and starts that transfer over width, in the maximal update parametrization (muP), from two widths of a model.

Source: Yang et al. 2022, "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer", table 3, and table 8
for tied embeddings.  With ``m = fan_in / base fan_in``, Adam:

=======  ==========================  ============  =============  ==================
role     dimensions that grow        lr            standard dev.  output multiplier
=======  ==========================  ============  =============  ==================
input    out (and vectors, tables)   1             1              1
hidden   in and out                  1 / m         1 / sqrt(m)    1
output   in                          1 / m         1 / m          1
tied     a table that is the head    1             1              1 / m
fixed    none                        1             1              1
=======  ==========================  ============  =============  ==================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_norm.core.kinds import RMSToRMSTensor
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMapKeyError, NormMismatchError, with_details
from thunder_norm.modular.monitoring.bounds import as_arguments
from thunder_norm.modular.monitoring.parameters import natural_norms
from thunder_norm.modular.unit_norms import UnitNorms
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.norms.lifts.inference import NormSpec
from thunder_norm.norms.lifts.parameters import tied_names

Role = Literal["input", "hidden", "output", "tied", "fixed"]

_HOLD_ANYTHING = ("torch.nn.modules.module", "torch.nn.modules.container")  # what a parameter in these is for they do not say


@dataclass(frozen=True)
class MupScale:
    """What muP multiplies for one parameter, relative to the base model.

    Attributes:
        role: input, hidden, output, tied (a table that is the head, too) or fixed (nothing of it grows).
        width: m, how many times as wide the side is that products with it sum over; 1 if none is.
        lr: times the base model's learning rate, of Adam.
        init_std: times the standard deviation that the base model's parameter starts with.
        output: times the result of the products with it: other than 1 for a tied table alone, whose logits the model must multiply itself.
    """

    role: Role
    width: float
    lr: float = 1.0
    init_std: float = 1.0
    output: float = 1.0


class MupScales(Mapping[str, MupScale]):
    """What `mup_scales` returns: parameter name -> `MupScale`; printed it is a table."""

    def __init__(self, model: torch.nn.Module, scales: dict[str, MupScale]):
        self._model, self._scales = model, scales

    def __getitem__(self, name: str) -> MupScale:
        return self._scales[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scales)

    def __len__(self) -> int:
        return len(self._scales)

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Groups for `torch.optim.AdamW`, one for each multiplier: parameters that require grad.

        Args:
            lr: the base model's learning rate.
            weight_decay: the base model's; where lr is divided by m it is multiplied by it, for AdamW decays by their product.
        """
        groups: dict[float, list[torch.nn.Parameter]] = {}
        for name, p in self._model.named_parameters():
            if p.requires_grad:
                groups.setdefault(self[name].lr, []).append(p)
        return [{"params": params, "lr": lr * by, "weight_decay": weight_decay / by} for by, params in groups.items()]

    def __repr__(self) -> str:
        rows = [("", "role", "m", "lr", "init std", "output")]
        for name, s in self.items():
            rows.append((name, s.role, *(f"{v:g}" for v in (s.width, s.lr, s.init_std, s.output))))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "where the width of attention heads grows, logits are to be q k / d, not q k / sqrt(d)"])


def mup_scales(model: torch.nn.Module, base_model: torch.nn.Module, example: Any = None) -> MupScales:
    """Multipliers of learning rates and starts with which what is best for a narrow model is so for a wide one.

    Which dimensions of a parameter grow is seen from both models; which of them is summed over, from the rules that consume it in the
    program: so a table of 27 tokens [27, width] is input, and a head of the same shape output.  The model is not changed.

    >>> def wide(n):
    ...     return torch.nn.Sequential(torch.nn.Linear(4, n), torch.nn.ReLU(), torch.nn.Linear(n, n), torch.nn.Linear(n, 2))
    >>> scales = mup_scales(wide(256), wide(64), torch.ones(1, 4))
    >>> [(scales[name].role, scales[name].lr) for name in ("0.weight", "2.weight", "3.weight", "3.bias")]
    [('input', 1.0), ('hidden', 0.25), ('output', 0.25), ('fixed', 1.0)]

    Args:
        model: the model to train; may be on the meta device.
        base_model: the same of another width, for which a learning rate is known; with data.
        example: a batch for the base model: an argument, a tuple of them, or a dict by name.  None: what a parameter is used for is
            taken from the module of torch that it is in.

    Raises:
        NormMapKeyError: the models have other parameters.
        NormMismatchError: a model is no module; a parameter has other numbers of dimensions in both, a table or vector two that grow, or is used as two
            operators that sum over different dimensions; or, without an example, one of a module that is not torch's grows in one
            dimension, which products may sum over or not (a class token, a transposed head).
        MissingNormRuleError: an operation has no rule; without an example none are needed.
    """
    for given in (model, base_model):
        if not isinstance(given, torch.nn.Module):
            raise NormMismatchError(f"mup_scales compares two torch.nn.Modules, got {type(given).__name__}")
    wide, base = dict(model.named_parameters()), dict(base_model.named_parameters())
    if wide.keys() != base.keys():
        different = sorted(wide.keys() ^ base.keys())
        raise NormMapKeyError(f"the models have other parameters, so they are not one of two widths: {', '.join(different[:4])}")
    if example is None:
        for name, p in base.items():
            _check_owner(base_model.get_submodule(name.rpartition(".")[0]), name, wide[name].shape, p.shape)
    wanted = _by_modules(base_model) if example is None else _by_program(base_model, example)
    return MupScales(model, {name: _scale(name, p.shape, base[name].shape, wanted[name]) for name, p in wide.items()})


def _check_owner(owner: torch.nn.Module, name: str, shape: torch.Size, base: torch.Size) -> None:
    """Refuse what only the program could tell: a parameter of a module that is not torch's, if what it grows by depends on its use."""
    is_known = any(t.__module__.startswith("torch.nn.") and t.__module__ not in _HOLD_ANYTHING for t in type(owner).__mro__)
    ratios = [a / b for a, b in zip(shape, base, strict=False) if a != b]
    if len(shape) > 1 and not is_known and ratios and (len(ratios) < 2 or len(set(ratios)) > 1):
        raise NormMismatchError(
            with_details(
                f"muP cannot tell what {name!r} is: {type(owner).__name__} is no layer of torch, and products may sum over what grows or not",
                shapes=f"{list(base)} -> {list(shape)}",
                instead="mup_scales(model, base_model, example), with a batch, which asks the program",
            )
        )


def _by_modules(model: torch.nn.Module) -> dict[str, list[NormSpec]]:
    """The norm of each parameter in every module that has it."""
    norms, names = natural_norms(model), tied_names(model)
    found = {name: [norm] for name, norm in norms.items()}
    for name, p in model.named_parameters():
        for other in names[name][1:]:
            owner = model.get_submodule(other.rpartition(".")[0])
            found[name].append(_only(natural_norms(owner), owner, p))
    return found


def _only(norms: dict[str, NormSpec], owner: torch.nn.Module, p: torch.Tensor) -> NormSpec:
    return next(norms[name] for name, own in owner.named_parameters() if own is p)


def _by_program(model: torch.nn.Module, example: Any) -> dict[str, list[NormSpec]]:
    """The norms that the uses of each parameter want."""
    args, kwargs = as_arguments(example)
    unit = UnitNorms.of(model, args, kwargs, "typical")
    leaves, structure = tree_flatten((args, kwargs))
    norms, _ = tree_flatten(unit.inputs)
    normed = [_around(x, norm) for x, norm in zip(leaves, norms, strict=True)]
    args, kwargs = tree_unflatten(normed, structure)
    _, environment = run_eagerly(model, args, kwargs, policy="unit", mode="typical", otherwise="unit")
    by_any_name = {other: name for name, _ in model.named_parameters() for other in tied_names(model)[name]}
    found = {name: [norm] for name, norm in unit.norms.items()}
    for name, uses in environment.uses.items():
        if name in by_any_name:
            found[by_any_name[name]] += [use.wanted for use in uses]
    return found


def _around(x: Any, norm: Any) -> Any:
    if not isinstance(norm, NormedTensor) or norm.elem_dims is None:
        return x
    return NormSpec(type(norm), norm.elem_dims).around(x.backing if isinstance(x, NormedTensor) else x, 1.0)


def _scale(name: str, shape: torch.Size, base: torch.Size, wanted: list[NormSpec]) -> MupScale:
    """By the dimensions that grow, and those that uses sum over."""
    if len(shape) != len(base):
        raise NormMismatchError(f"{name!r} has shape {list(shape)} in one model and {list(base)} in the other")
    grows = {d - len(shape): a / b for d, (a, b) in enumerate(zip(shape, base, strict=True)) if a != b}
    operators = {norm.elem_dims for norm in wanted if issubclass(norm.kind, RMSToRMSTensor)}
    if not grows:
        return MupScale("fixed", 1.0)
    is_table = any(not issubclass(norm.kind, RMSToRMSTensor) for norm in wanted)
    summed = {dims[1] for dims in operators}
    if len(summed) > 1 or (len(grows) > 1 and (is_table or not operators)):
        raise NormMismatchError(
            with_details(
                f"muP has no role for {name!r}",
                shapes=f"{list(base)} -> {list(shape)}",
                used_as=", ".join(dict.fromkeys(map(str, wanted))),
            )
        )
    width = grows.get(next(iter(summed)), 1.0) if summed else 1.0
    if width == 1.0:
        return MupScale("input", 1.0)
    if is_table:
        return MupScale("tied", width, output=1 / width)
    if len(grows) > 1:
        return MupScale("hidden", width, lr=1 / width, init_std=width**-0.5)
    return MupScale("output", width, lr=1 / width, init_std=1 / width)
