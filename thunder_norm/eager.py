"""Normed mode without Thunder: a model runs in plain PyTorch, and its parameters are lifted where they are consumed.

The same rules and the same policy for parameters as in a trace; `norm_report` runs this way, because it wants to see every
operation with its values.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm import context, conversions, dispatch, registry
from thunder_norm.annotations import named_annotations
from thunder_norm.errors import NormMismatchError
from thunder_norm.parameters import (
    Derived,
    Leaves,
    Policy,
    derivations,
    derived_norm,
    refuse_mutation,
    stated_kind,
    tensor_names,
)
from thunder_norm.tensors import NORM_DTYPE, NormedTensor

_LIBRARIES = tuple(str(Path(m.__file__).parent) for m in (torch, dispatch) if m.__file__)


@dataclass(frozen=True)
class Noted:
    """One operation of an eager run: what, where, and its result."""

    func: Callable
    module: str
    location: str
    out: NormedTensor


class EagerEnvironment(context.Environment):
    """Lifts parameters by a policy and notes every operation.

    Args:
        tensors: the tensors the model runs with, by parameter and buffer name.
        policy: as `NormTransform`'s parameters.
        model: whose parameters and annotations they are.
        perturbed: give every lifted parameter a perturbation_size that requires grad.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        policy: Policy,
        model: torch.nn.Module,
        *,
        perturbed: bool = False,
    ):
        self.policy = policy
        self.leaves = None if isinstance(policy, str) else Leaves(policy)
        self.annotations = named_annotations(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.parameters = {id(t) for name, t in tensors.items() if name in parameters and t.is_floating_point()}
        self.names = {id(t): name for name, t in reversed(tensors.items())}
        if self.leaves is not None:  # of tied names the one a norm is given for
            self.names |= {id(t): name for name, t in tensors.items() if name in self.leaves}
        self.perturbed = perturbed
        self.noted: list[Noted] = []
        self.lifted: dict[str, NormedTensor] = {}
        self.derived: dict[int, tuple[torch.Tensor, Derived]] = {}
        self.module_path = [""]
        self._cache: dict[tuple, NormedTensor] = {}

    def lift(self, t: torch.Tensor, kind: type[NormedTensor], elem_dims: tuple[int, ...] | None) -> NormedTensor:
        """The normed tensor for a plain one, by the policy."""
        dims = kind._canonical(kind.default_elem_dims(t.ndim) if elem_dims is None else elem_dims, t.ndim)
        name = self.names.get(id(t))
        if name is None:
            return self._lift_derived(t, kind, dims) if id(t) in self.derived else kind.of(t, dims)
        key = (name, kind, dims)
        if key not in self._cache:
            self._cache[key] = self._lift_parameter(t, name, kind, dims)
            self._cache[key]._is_leaf_value = True
        return self._cache[key]

    def _lift_parameter(self, t: torch.Tensor, name: str, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        if self.leaves is not None and name in self.leaves:
            normed = self.leaves.normed(name, t, kind, dims)
        elif self.policy == "unit" and id(t) in self.parameters:
            normed = kind._wrap(t, torch.ones((), dtype=NORM_DTYPE), None, dims)
        else:
            normed = kind.of(t, dims)
        if self.perturbed:
            first = self.lifted.get(name)
            if first is None:
                normed.perturbation_size = torch.zeros((), dtype=NORM_DTYPE, requires_grad=True)
                first = self.lifted[name] = normed
            else:  # consumed in another kind: one leaf, converted
                factor = conversions.factor(first, type(normed), normed.elem_dims)
                normed.perturbation_size = first.perturbation_size * (1.0 if factor is None else factor)
        else:
            self.lifted.setdefault(name, normed)
        return conversions.convert(normed, kind, dims)

    def _lift_derived(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        """A tensor made from parameters alone: measured if they are, with the perturbation that theirs give it."""
        is_measured = self.is_measured(t)
        if is_measured and not self.perturbed:
            return kind.of(t, dims)
        normed = derived_norm(t, self.derived[id(t)][1], kind, dims)
        if not is_measured:
            return normed
        return kind._wrap(t, kind.of(t, dims).norm_size, normed.perturbation_size, dims)

    def is_measured(self, t: torch.Tensor) -> bool:
        """Whether the norm of a parameter, or of a tensor made from parameters alone, is that of its data."""
        if id(t) in self.derived:
            return all(self.is_measured(v) for v in self.derived[id(t)][1].sources())
        name = self.names.get(id(t))
        is_given = self.leaves is not None and name is not None and name in self.leaves
        return not (is_given or self.policy == "unit" and id(t) in self.parameters)

    def annotated(self, t: Any) -> Any:
        """A parameter as the kind it was annotated with; anything else as it is."""
        name = self.names.get(id(t)) if isinstance(t, torch.Tensor) else None
        stated = None if name is None else stated_kind(name, self.annotations, self.leaves)
        if stated is None:
            return t
        try:
            return self.lift(t, *stated)
        except NormMismatchError as e:
            raise NormMismatchError(f"the norm stated for parameter {name!r} does not fit it: {e}") from e

    def note(self, func: Callable, out: NormedTensor) -> None:
        """Remember the operation, its module and the user's line."""
        if self.perturbed and out.perturbation_size is not None:
            # an operation of sensitivity 1 hands on its argument's: a node of its own, to tell this result from the argument
            out.perturbation_size = out.perturbation_size.clone()
        self.noted.append(Noted(func, self.module_path[-1], user_line() or "", out))

    def user_location(self) -> str | None:
        """The user's line, from the Python stack."""
        return user_line()


def user_line() -> str | None:
    """``file.py:line:  text`` of the innermost Python frame outside torch and thunder_norm."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_LIBRARIES) and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.lineno}:  {frame.line}"
    return None


class EagerNormedMode(TorchFunctionMode):
    """Takes over operations on parameters that have a norm rule; NormedTensors find their rules by themselves."""

    def __init__(self, environment: EagerEnvironment):
        super().__init__()
        self.environment = environment

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        env = self.environment
        if any(isinstance(t, NormedTensor) for t in tensors):
            return func(*tree_map(env.annotated, args), **tree_map(env.annotated, kwargs))
        if not registry.has_rule(func) and (registry.is_metadata(func) or all(map(env.is_measured, tensors))):
            return func(*args, **kwargs)
        if not tensors:
            return dispatch.run_registered(func, args, kwargs) if dispatch.is_factory(func) else func(*args, **kwargs)
        concerns = [id(t) in env.parameters or id(t) in env.derived for t in tensors]
        if not any(concerns):
            return func(*args, **kwargs)
        if all(concerns):
            if not all(map(env.is_measured, tensors)):
                refuse_mutation(func, args, kwargs, user_line())
            result = func(*args, **kwargs)
            env.derived |= {id(t): (t, made) for t, made in derivations(func, args, kwargs, result)}
            return result
        if not registry.has_rule(func):
            return func(*args, **kwargs)
        return dispatch.run_registered(func, tree_map(env.annotated, args), tree_map(env.annotated, kwargs))


@contextlib.contextmanager
def _module_paths(model: torch.nn.Module, environment: EagerEnvironment) -> Iterator[None]:
    """Keep track of the module whose forward is running."""
    names = {id(m): name for name, m in model.named_modules()}

    def enter(module: torch.nn.Module, _: Any) -> None:
        environment.module_path.append(names.get(id(module), environment.module_path[-1]))

    def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
        environment.module_path.pop()

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_eagerly(
    model: torch.nn.Module,
    args: tuple,
    kwargs: dict,
    *,
    policy: Policy,
    mode: context.Mode,
    tensors: Mapping[str, torch.Tensor] | None = None,
    perturbed: bool = False,
) -> tuple[Any, EagerEnvironment]:
    """Run a model in normed mode in plain PyTorch; its result, and everything that was seen on the way.

    Args:
        model: any module.
        args: its arguments.
        kwargs: its keyword arguments.
        policy: as `NormTransform`'s parameters.
        mode: the mode of the rules.
        tensors: tensors to run with in place of the model's own parameters and buffers.
        perturbed: whether lifted parameters carry a perturbation_size that requires grad.

    Raises:
        MissingNormRuleError: an operation has no rule.
    """
    current = {**tensor_names(model), **(tensors or {})}
    environment = EagerEnvironment(current, policy, model, perturbed=perturbed)
    with (
        context.norm_mode(mode),
        context.environment(environment),
        _module_paths(model, environment),
        EagerNormedMode(environment),
    ):
        return torch.func.functional_call(model, current, args, kwargs), environment
