"""The program with everything of norm 1: which norm each parameter has, and how far the output moves when it does.

In mode "typical" parameters are of the sizes that they start with (`start_size`) instead: there are no worst cases to be safe from.

The model runs once in normed mode with a perturbation for every parameter; one backward pass through these scalars gives all
sensitivities.  Weights are not needed: on the meta device they are never touched.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from thunder_norm.core.context import Mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.errors import NormMismatchError, with_details
from thunder_norm.model_state.initial_buffers import initial_buffers
from thunder_norm.model_state.shards import is_spread, whole, without_hooks
from thunder_norm.modular.losses import Loss
from thunder_norm.modular.masses import ParameterUses
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.norms.lifts.inference import NormSpec, Use
from thunder_norm.norms.lifts.parameters import as_parameter, call_with, canonical_dims, detached, tensor_names
from thunder_norm.norms.lifts.starts import typical_size
from thunder_norm.norms.sensitivity import sensitivities
from thunder_norm.trees import leaves_of_results

Values = list[tuple[torch.Tensor, torch.Tensor]]  # tensors on meta that stand for others, each with that


# Beyond it a step of norm 1 moves a parameter by less than a millionth, if a hundred have a share in it.
_LARGE = 1e4


@dataclass(frozen=True)
class UnitNorms:
    """What one run found.

    Attributes:
        norms: of every parameter, by its first name.
        sensitivities: of the output to it; 0 for one that is not used.
        inputs: positional and keyword arguments, with their norms.
        outputs: the outputs' norms.
        uses: what the program does with some parameters, by first name.
        loss: where most is lost, if sensitivities are so large that targets vanish.
    """

    norms: dict[str, NormSpec]
    sensitivities: dict[str, float]
    inputs: tuple[tuple, dict]
    outputs: Any
    uses: ParameterUses
    loss: Loss | None = None

    @staticmethod
    def of(model: torch.nn.Module, args: tuple, kwargs: dict, mode: Mode) -> UnitNorms:
        """Run a model with inputs and parameters of norm 1, or as large as they start; frozen ones as their data is, except in mode "modula".

        Raises:
            MissingNormRuleError: an operation has no rule.
            NormMismatchError: no norm of a parameter fits all of its uses, no output has a norm, or an argument has no shape.
        """
        # norms need values: also where new tensors would be on meta
        on_cpu = torch.device("cpu") if torch.get_default_device().type == "meta" else contextlib.nullcontext()
        with on_cpu, torch.inference_mode(False), torch.enable_grad(), without_hooks(model):
            return UnitNorms._of(model, args, kwargs, mode)

    @staticmethod
    def _of(model: torch.nn.Module, args: tuple, kwargs: dict, mode: Mode) -> UnitNorms:
        is_untouched = _is_on_meta(args, kwargs)
        tensors, values = _stand_ins(model, args, kwargs)
        is_meta = any(t.is_meta for t in tensors.values())
        args, kwargs = _of_norm_1(model, args, kwargs, values if is_meta else None)
        program = _Program(model, args, kwargs, mode, tensors, values)
        norms, found, uses, outputs, loss = program.run({})
        frozen = {} if is_untouched or mode == "modula" else _frozen(model, norms, tensors, mode)
        if frozen:
            norms, found, uses, outputs, loss = program.run(frozen)
        names = [name for name, _ in model.named_parameters()]
        return UnitNorms(
            {name: norms.get(name) or _default(tensors[name]) for name in names},
            {name: found.get(name, 0.0) for name in names},
            *tree_map(_without_backing, ((args, kwargs), outputs)),
            uses,
            loss,
        )


@dataclass(frozen=True)
class _Program:
    """What is run: a model with tensors in place of its own, and arguments."""

    model: torch.nn.Module
    args: tuple
    kwargs: dict
    mode: Mode
    tensors: dict[str, torch.Tensor]
    values: Values

    def run(
        self, given: Mapping[str, NormedTensor]
    ) -> tuple[dict[str, NormSpec], dict[str, float], ParameterUses, Any, Loss | None]:
        """One run: norms of the parameters that are used, sensitivities to them, how they are used, outputs, where they are lost."""
        outputs, environment = run_eagerly(
            self.model,
            self.args,
            self.kwargs,
            policy=given,
            mode=self.mode,
            tensors=self.tensors,
            perturbed=True,
            otherwise="start" if self.mode == "typical" else "unit",
            values=self.values,
        )
        tensors = self.tensors
        names = {id(tensors[name]): name for name, _ in self.model.named_parameters()}  # a tied one may have another name there
        leaves = {names[id(tensors[k])]: leaf for k, leaf in environment.lifted.items() if id(tensors[k]) in names}
        _check_known(self.model, outputs)
        found = {name: s.item() for name, s in sensitivities(outputs, leaves).items()}
        loss = None if all(s <= _LARGE for s in found.values()) else Loss.of(outputs, environment.noted)
        norms = {name: NormSpec(type(leaf), leaf.elem_dims) for name, leaf in leaves.items()}
        uses: dict[str, list[Use]] = {}
        for k, some in environment.uses.items():
            uses.setdefault(names.get(id(tensors[k]), k), []).extend(some)
        return norms, found, ParameterUses.of(uses), outputs, loss


def _check_known(model: torch.nn.Module, outputs: Any) -> None:
    """Refuse outputs whose norm depends on values that nobody has."""
    if any(y.norm_size.is_meta for y in leaves_of_results(outputs) if isinstance(y, NormedTensor)):
        known = initial_buffers(model)
        empty = [name for name, b in model.named_buffers() if b.is_meta and has_norm(b) and name not in known]
        raise NormMismatchError(
            with_details(
                "the norm of the output depends on the values of tensors on the meta device",
                buffers=", ".join(map(repr, empty[:4])) or None,
                instead="give buffers their values: parameters alone may be on meta",
            )
        )


def _without_backing(x: Any) -> Any:
    """A norm without data, and without the graph that led to it."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        result = copy.copy(x)
        for f in dataclasses.fields(x):  # past a frozen one's own __setattr__
            object.__setattr__(result, f.name, tree_map(_without_backing, getattr(x, f.name)))
        return result
    return type(x)._wrap(None, x.norm_size.detach(), None, x.elem_dims) if isinstance(x, NormedTensor) else x


def _default(t: torch.Tensor) -> NormSpec:
    return NormSpec(RMSTensor, canonical_dims(RMSTensor, None, t.ndim))


def _frozen(
    model: torch.nn.Module, norms: Mapping[str, NormSpec], tensors: Mapping[str, torch.Tensor], mode: Mode
) -> dict[str, NormedTensor]:
    """The frozen parameters that have data, as large as they are."""
    found = {name: whole(p.detach()) for name, p in model.named_parameters() if name in norms and not p.requires_grad}
    sizes = {
        name: typical_size(norms[name], p) if mode == "typical" else norms[name].kind.of(p, norms[name].elem_dims).norm_size
        for name, p in found.items()
        if p.device.type != "meta"
    }
    return {name: norms[name].around(tensors[name], size.item()) for name, size in sizes.items()}


def _is_on_meta(args: tuple, kwargs: dict) -> bool:
    given = [x.backing if isinstance(x, NormedTensor) else x for x in tree_flatten((args, kwargs))[0]]
    return any(isinstance(x, torch.Tensor) and x.device.type == "meta" for x in given)


def _stand_ins(model: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[dict[str, torch.Tensor], Values]:
    """Tensors to run with, the parameters' data and copies of buffers, which the model may change; and what those on meta stand for.

    On meta if any of them or any input is, or if any parameter is sharded: no rank has its data.
    """
    names = tensor_names(model)
    is_meta = _is_on_meta(args, kwargs) or any(is_spread(t) or t.is_meta for t in names.values())
    buffers = {id(b) for b in model.buffers()}

    def stand_in(t: torch.Tensor) -> torch.Tensor:
        if is_spread(t):
            return as_parameter(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), t)
        if is_meta:
            return detached(t, "meta")
        return t.detach().clone() if id(t) in buffers else detached(t)

    made = {id(t): stand_in(t) for t in names.values()}
    with_data = {id(t): t for t in names.values() if is_meta and id(t) in buffers and not t.is_meta and not is_spread(t)}
    return {name: made[id(t)] for name, t in names.items()}, [(made[i], t.detach()) for i, t in with_data.items()]


def _of_norm_1(model: torch.nn.Module, args: tuple, kwargs: dict, values: Values | None) -> tuple[tuple, dict]:
    """The arguments, floating tensors with norm 1; if norms are given, they alone count.

    With `values` on meta, as the model is: what other tensors (indices, masks) stand for is added to them.

    Raises:
        NormMismatchError: a NormedTensor without a backing.
    """
    leaves, spec = tree_flatten((args, kwargs))
    is_given = any(isinstance(x, NormedTensor) for x in leaves)
    for x in leaves:
        if isinstance(x, NormedTensor) and not x.finalized:
            raise NormMismatchError(
                f"an example argument needs a shape: {type(x).__name__}(..., backing=...), which may be on meta"
            )
    if values is not None:
        given, leaves = leaves, [_on_meta(x) for x in leaves]
        values += [(y, x) for x, y in zip(given, leaves, strict=True) if _is_plain(x) and not x.is_meta]
    leaves = [_constant(x) if isinstance(x, NormedTensor) else x for x in leaves]
    if not is_given:
        plain = {i: x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and not _is_plain(x)}
        norms = _natural_norms(model, leaves, spec, plain)
        leaves = [norms[i].around(x, 1.0) if i in norms else x for i, x in enumerate(leaves)]
    return tree_unflatten(leaves, spec)


def _is_plain(x: Any) -> bool:
    """Whether it is a tensor that gets no norm of its own: indices, masks, sparse matrices, which are operators at hand."""
    return isinstance(x, torch.Tensor) and not isinstance(x, NormedTensor) and (not has_norm(x) or x.layout is not torch.strided)


def _on_meta(x: Any) -> Any:
    if isinstance(x, NormedTensor):
        return type(x)._wrap(x.backing.to("meta"), x.norm_size, x.perturbation_size, x.elem_dims)
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def _constant(x: NormedTensor) -> NormedTensor:
    return type(x)._wrap(x.backing, x.norm_size.detach().clone(), None, x.elem_dims)


def _natural_norms(model: torch.nn.Module, leaves: list, spec: Any, plain: dict[int, torch.Tensor]) -> dict[int, NormSpec]:
    """For each floating input the norm that the first operation on it wants of a parameter in its place, if one is known."""
    default = {i: _default(x) for i, x in plain.items()}
    if not plain:
        return default
    inputs = _InputsAsParameters(model, [_on_meta(x) for x in leaves], spec, plain)
    try:
        _, environment = run_eagerly(inputs, (), {}, policy="measured", mode="bound")
    except Exception:  # noqa: BLE001 - a program that needs values: the run with them says what is wrong, if anything is
        return default
    first = {int(name.removeprefix("input_")): uses[0].wanted for name, uses in environment.uses.items()}
    return default | {i: wanted for i, wanted in first.items() if issubclass(wanted.kind, RMSTensor)}


class _InputsAsParameters(torch.nn.Module):
    """A model without data whose parameters are constants and whose inputs are parameters."""

    def __init__(self, model: torch.nn.Module, leaves: list, spec: Any, plain: dict[int, torch.Tensor]):
        super().__init__()
        self._model = (model,)  # in a tuple: none of its parameters is one of this module
        self._tensors = {name: detached(t, "meta") for name, t in tensor_names(model).items()}
        self._leaves, self._spec = leaves, spec
        for i in plain:
            self.register_parameter(f"input_{i}", torch.nn.Parameter(leaves[i].detach(), requires_grad=False))

    def forward(self) -> Any:
        leaves = [self._parameters.get(f"input_{i}", x) for i, x in enumerate(self._leaves)]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return call_with(self._model[0], self._tensors, args, kwargs)
