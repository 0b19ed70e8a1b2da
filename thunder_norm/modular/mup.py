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

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from thunder_norm.core.kinds import RMSToRMSTensor
from thunder_norm.errors import NormMapKeyError, NormMismatchError, with_details
from thunder_norm.modular.following.mode import follow
from thunder_norm.modular.following.notes import Meeting
from thunder_norm.modular.monitoring.bounds import as_arguments
from thunder_norm.modular.monitoring.parameters import TRANSPOSED, natural_norms_by_module, owner_of

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

    Which dimensions of a parameter grow is seen from both models; which of them products sum over, from the program: so a table of 27
    tokens [27, width] is input, and a head of the same shape output.  The model is not changed.

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
        NormMismatchError: a model is no module; a parameter has other numbers of dimensions in both, a table or vector two that grow, or products
            sum over other dimensions in one place than in another, which makes it two things; or, without an example, one of a module that is
            not torch's grows in one dimension, which products may sum over or not (a class token, a transposed head).
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
            _check_owner(owner_of(base_model, name), name, wide[name].shape, p.shape)
    uses = _by_modules(base_model) if example is None else _by_program(base_model, example)
    groups = {name: _groups(owner_of(model, name), owner_of(base_model, name)) for name in base}
    return MupScales(model, {name: _scale(name, p.shape, base[name].shape, uses[name], groups[name]) for name, p in wide.items()})


@dataclass(frozen=True)
class _Use:
    """What a parameter is used for in one place.

    Attributes:
        summed: its axes that products sum over; none if it is in no product.
        is_table: whether it is one.
        groups: how many a transposed convolution has, whose inputs of all groups are along the axis that is summed over.
    """

    summed: frozenset[int] = frozenset()
    is_table: bool = False
    groups: int = 1

    def __str__(self) -> str:
        return "a table" if self.is_table else f"products that sum over {', '.join(map(str, sorted(self.summed))) or 'nothing'}"


def _check_owner(owner: torch.nn.Module, name: str, shape: torch.Size, base: torch.Size) -> None:
    """Refuse what only the program could tell: a parameter of a module that is not torch's, if what it grows by depends on its use.

    Where the last two dimensions grow alike, it is the same whichever of them products sum over.
    """
    ratios = {d - len(base): a / b for d, (a, b) in enumerate(zip(shape, base, strict=False)) if a != b}
    if len(shape) > 1 and not _is_known(owner) and ratios and (list(ratios) != [-2, -1] or len(set(ratios.values())) > 1):
        raise NormMismatchError(
            with_details(
                f"muP cannot tell what {name!r} is: {type(owner).__name__} is no layer of torch, and products may sum over what grows or not",
                shapes=f"{list(base)} -> {list(shape)}",
                instead="mup_scales(model, base_model, example), with a batch, which asks the program",
            )
        )


def _is_known(owner: torch.nn.Module) -> bool:
    return any(t.__module__.startswith("torch.nn.") and t.__module__ not in _HOLD_ANYTHING for t in type(owner).__mro__)


def _by_modules(model: torch.nn.Module) -> dict[str, list[_Use]]:
    """What each parameter is for in every module that has it."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, list[_Use]] = {name: [] for name in names.values()}
    for module, p, norm in natural_norms_by_module(model):
        is_table = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        summed = {norm.elem_dims[1] % p.ndim} if issubclass(norm.kind, RMSToRMSTensor) else ()
        if summed and isinstance(module, torch.nn.Bilinear):
            summed = {1, 2}
        found[names[id(p)]].append(_Use(frozenset(summed), is_table))
    return found


def _by_program(model: torch.nn.Module, example: Any) -> dict[str, list[_Use]]:
    """What the program uses each parameter for; where a parametrization makes that of it in ways that are not followed, its module says it."""
    args, kwargs = as_arguments(example)
    met, by_modules = follow(model, args, kwargs).met, _by_modules(model)
    return {
        name: _uses(met.get(name, ())) or (of_modules if ".parametrizations." in f".{name}" else [])
        for name, of_modules in by_modules.items()
    }


def _uses(met: Sequence[Meeting]) -> list[_Use]:
    tables = [_Use(is_table=True)] * any(m.op == "table" for m in met)
    convolutions = [_Use(frozenset({1 - m.out_axis}), groups=m.groups if m.out_axis else 1) for m in met if m.op == "convolution"]
    # a product with constants (the iteration of a spectral norm) says nothing where there are others, and one with another parameter
    # (of two matrices that are one) only what no product with activations does
    matrices = [m for m in met if m.op == "matrix"]
    of_any = [m for m in matrices if not m.is_of_constant] or matrices
    products = [m for m in of_any if m.summed] or [m for m in met if m.op == "factor" and m.summed]
    return list(dict.fromkeys([*tables, *convolutions, *(_Use(m.summed) for m in products)]))


def _groups(owner: torch.nn.Module, base: torch.nn.Module) -> float | None:
    """How many times as many groups a transposed convolution has; None where there is none, as a module."""
    return owner.groups / base.groups if isinstance(owner, TRANSPOSED) and isinstance(base, TRANSPOSED) else None


def _scale(name: str, shape: torch.Size, base: torch.Size, uses: Sequence[_Use], groups: float | None) -> MupScale:
    """By the dimensions that grow, and those that uses sum over."""
    if len(shape) != len(base):
        raise NormMismatchError(f"{name!r} has shape {list(shape)} in one model and {list(base)} in the other")
    grows = {d: a / b for d, (a, b) in enumerate(zip(shape, base, strict=True)) if a != b}
    if not grows:
        return MupScale("fixed", 1.0)
    is_table = any(use.is_table for use in uses)
    products = [use for use in uses if use.summed]
    found = {_of_product(grows, use.summed, is_table, groups or 1.0) for use in products} or {MupScale("input", 1.0)}
    # how many groups the wide model has, if no module of it says so, is not known
    is_unknown = groups is None and any(use.groups > 1 and use.summed & grows.keys() for use in products)
    if len(found) > 1 or is_unknown or (len(grows) > 1 and (is_table or not products)):
        raise NormMismatchError(
            with_details(
                f"muP has no role for {name!r}",
                shapes=f"{list(base)} -> {list(shape)}",
                used_as="; ".join(dict.fromkeys(map(str, uses))) or "neither a table nor in a product",
            )
        )
    return found.pop()


def _of_product(grows: Mapping[int, float], summed: frozenset[int], is_table: bool, groups: float) -> MupScale:
    width = math.prod(grows.get(axis, 1.0) for axis in summed) / groups
    if width == 1.0:
        return MupScale("input", 1.0)
    if is_table:
        return MupScale("tied", width, output=1 / width)
    if not grows.keys() <= summed:
        return MupScale("hidden", width, lr=1 / width, init_std=width**-0.5)
    return MupScale("output", width, lr=1 / width, init_std=1 / width)
