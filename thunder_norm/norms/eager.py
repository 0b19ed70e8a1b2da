"""Normed mode without Thunder: a model runs in plain PyTorch, and its parameters are lifted where they are consumed.

The same rules and the same policy for parameters as in a trace; `norm_report` runs this way, because it wants to see every
operation with its values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from thunder_norm import first_calls
from thunder_norm.core import context
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import InnerDerivativeError
from thunder_norm.model_state.initial_buffers import initial_buffers
from thunder_norm.norms.eager_environment import Arithmetic, EagerEnvironment
from thunder_norm.norms.flat_programs import FlatProgram
from thunder_norm.norms.lifts.eager_lifting import EagerLifting
from thunder_norm.norms.lifts.inference import Candidate, NormSpec, RunWith, choose
from thunder_norm.norms.lifts.lifting import Otherwise
from thunder_norm.norms.lifts.parameters import Policy, call_with, detached, tensor_names
from thunder_norm.norms.lifts.plain_operations import Functions
from thunder_norm.norms.undisturbed import Surroundings
from thunder_norm.trees import flat_tensors, map_tensors


@contextlib.contextmanager
def module_hooks(enter: Callable, leave: Callable, *, with_kwargs: bool = False) -> Iterator[None]:
    """Call ``enter(module, args)`` and ``leave(module, args, result)`` around the forward of every module, also of one that raises.

    Args:
        enter: called before.
        leave: called after; the result of one that raises is None.
        with_kwargs: ``leave(module, args, kwargs, result)`` instead; of one that raises torch gives no kwargs all the same.
    """
    module = torch.nn.modules.module
    handles = [
        module.register_module_forward_pre_hook(enter),
        module.register_module_forward_hook(leave, with_kwargs=with_kwargs, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
            # torch forgets these two, and would take every module for one with hooks from then on
            module._global_forward_hooks_always_called.pop(handle.id, None)
            module._global_forward_hooks_with_kwargs.pop(handle.id, None)


@contextlib.contextmanager
def _module_paths(model: torch.nn.Module, environment: EagerEnvironment) -> Iterator[None]:
    """Keep track of the module whose forward is running."""
    names = {id(m): name for name, m in model.named_modules()}

    def enter(module: torch.nn.Module, _: Any) -> None:
        environment.module_path.append(names.get(id(module), environment.module_path[-1]))

    def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
        environment.module_path.pop()

    with module_hooks(enter, leave):
        yield


def run_eagerly(
    model: torch.nn.Module,
    args: tuple,
    kwargs: dict,
    *,
    policy: Policy,
    mode: context.Mode,
    sensitivity: context.Sensitivity = "global",
    tensors: Mapping[str, torch.Tensor] | None = None,
    perturbed: bool = False,
    otherwise: Otherwise = "measured",
    values: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    arithmetic: Callable[[], Arithmetic] = Arithmetic,
) -> tuple[Any, EagerEnvironment]:
    """Run a model in normed mode in plain PyTorch; its result, and everything that was seen on the way.

    Args:
        model: any module.
        args: its arguments.
        kwargs: its keyword arguments.
        policy: as `NormTransform`'s parameters.
        mode: the mode of the rules.
        sensitivity: which sensitivities they state.
        tensors: tensors to run with in place of the model's own parameters and buffers.
        perturbed: whether lifted parameters carry a perturbation_size that requires grad.
        otherwise: what holds for parameters that a mapping does not name.
        values: buffers and arguments on meta that stand for tensors with data, each with that tensor.
        arithmetic: makes what computes the operations of one run.

    Raises:
        MissingNormRuleError: an operation has no rule.
        NormMismatchError: the uses of a parameter disagree about its norm, and none fits all.
    """
    own = {**tensor_names(model), **(tensors or {})}
    values = _with_initial_buffers(model, own, values)
    run = _Run(model, args, kwargs, policy, mode, own, otherwise, sensitivity, values, arithmetic)
    try:
        result, environment = run(perturbed=perturbed)
    except InnerDerivativeError as e:
        run = run.flattened(e)
        result, environment = run(perturbed=perturbed)
    chosen = run.choose(environment)
    if not chosen:
        return result, environment
    result, environment = run(perturbed=perturbed, inferred={name: wanted for name, (wanted, _) in chosen.items()})
    environment.candidates = {name: candidates for name, (_, candidates) in chosen.items()}
    return result, environment


def chosen_norms(
    model: torch.nn.Module, args: tuple, kwargs: dict, *, policy: Policy, mode: context.Mode, otherwise: Otherwise = "measured"
) -> dict[str, NormSpec]:
    """The norms of parameters of given size and no stated kind whose uses disagree, by a run that leaves nothing behind.

    Nothing is known (and nothing chosen) where the program does not run eagerly.

    Raises:
        NormMismatchError: none of the norms that the uses of a parameter want fits all of them.
    """
    own = tensor_names(model)
    run = _Run(model, args, kwargs, policy, mode, own, otherwise, values=_with_initial_buffers(model, own, ())).on_copies()
    try:
        _, environment = run()
    except Exception:  # noqa: BLE001 - whatever it is, the trace about to be acquired meets it too, at the user's line
        return {}
    return {name: wanted for name, (wanted, _) in run.choose(environment).items()}


def _with_initial_buffers(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], values: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What tensors on meta stand for: `values`, and those of buffers that the model's library can make anew."""
    known = {id(t) for t, _ in values}
    made = {id(t): (t, value) for name, value in initial_buffers(model).items() if (t := tensors[name]).is_meta}
    return [*values, *(pair for i, pair in made.items() if i not in known)]


@contextlib.contextmanager
def no_values() -> Iterator[None]:
    """Tell libraries that values are not to be asked for: transformers 5 looks at positions unless ``torch.compiler.is_compiling()``.

    What torch.export does while it traces (torch/_export/utils.py, ``_compiling_state_context``).
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@dataclass(frozen=True)
class _Run:
    """A program and its arguments."""

    model: torch.nn.Module
    args: tuple
    kwargs: dict
    policy: Policy
    mode: context.Mode
    tensors: Mapping[str, torch.Tensor]
    otherwise: Otherwise
    sensitivity: context.Sensitivity = "global"
    values: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    arithmetic: Callable[[], Arithmetic] = Arithmetic
    flat: FlatProgram | None = None  # run in place of the model, which takes derivatives

    @functools.cached_property
    def surroundings(self) -> Surroundings:
        """What the program can change: looked for once, as each run leaves it as it was."""
        return Surroundings(self.model, self.args, self.kwargs)

    def __call__(
        self,
        *,
        perturbed: bool = False,
        inferred: Mapping[str, NormSpec] | None = None,
        surroundings: Surroundings | None = None,
    ) -> tuple[Any, EagerEnvironment]:
        lifting = EagerLifting(
            self.tensors,
            self.policy,
            self.model,
            perturbed=perturbed,
            otherwise=self.otherwise,
            inferred=inferred,
            values=self.values,
        )
        environment = EagerEnvironment(lifting, self.arithmetic(), flat_tensors(tree_leaves((self.args, self.kwargs))))
        with (
            (surroundings or self.surroundings).undisturbed(),
            context.norm_mode(self.mode),
            context.norm_sensitivity(self.sensitivity),
            context.environment(environment),
            _module_paths(self.model, environment),
            first_calls.shown("running", lambda: environment.module_path[-1]),
            no_values() if self.is_without_values else contextlib.nullcontext(),
        ):
            with Functions(environment):
                result = (self.flat or functools.partial(call_with, self.model))(self.tensors, self.args, self.kwargs)
                result = map_tensors(lifting.written.current, result)
            return map_tensors(environment.as_result, result) if perturbed else result, environment

    def flattened(self, error: InnerDerivativeError) -> _Run:
        """The same program with the operations of the derivatives that it takes written out.

        Raises:
            InnerDerivativeError: it cannot be.
        """
        with self.surroundings.undisturbed():
            return replace(self, flat=FlatProgram.of(self.model, self.tensors, self.args, self.kwargs, error))

    @property
    def is_without_values(self) -> bool:
        """Whether tensors of the program are on the meta device."""
        return any(t.is_meta for t in tree_leaves((self.args, self.kwargs, self.tensors)) if isinstance(t, torch.Tensor))

    def choose(self, environment: EagerEnvironment) -> dict[str, tuple[NormSpec, tuple[Candidate, ...]]]:
        """A norm for each parameter whose uses disagree, in the order in which they are used."""
        chosen: dict[str, tuple[NormSpec, tuple[Candidate, ...]]] = {}
        for name, wants in environment.disagreements().items():
            decided = {other: wanted for other, (wanted, _) in chosen.items()}
            uses = environment.uses[name]
            chosen[name] = choose(name, environment.lifting.tensors[name], uses, wants, self._with_norms(environment), decided)
        return chosen

    def on_copies(self) -> _Run:
        """The same program on detached parameters, and on copies of buffers, which it may change."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        copies = {id(t): t.detach().clone() if name in buffers else detached(t) for name, t in self.tensors.items()}
        values = [(copies.get(id(t), t), value) for t, value in self.values]
        return replace(self, tensors={name: copies[id(t)] for name, t in self.tensors.items()}, values=values)

    def _with_norms(self, environment: EagerEnvironment) -> RunWith:
        """The program with inputs and parameters of norm 1 but for those given."""
        lifting = environment.lifting
        stated = {name: lifting.stated(name, t) for name, t in lifting.tensors.items()}
        others = {name: w.kind(1.0, elem_dims=w.elem_dims) for name, w in stated.items() if w is not None}
        # which norm is chosen does not depend on the data
        copy = replace(self.on_copies(), otherwise="unit", sensitivity="global", arithmetic=Arithmetic)

        def run(norms: Mapping[str, NormedTensor]) -> Any:
            args, kwargs = tree_map(_of_norm_1, (self.args, self.kwargs))  # anew: a program may write into them
            program = replace(copy, args=args, kwargs=kwargs, policy={**others, **norms})
            with torch.enable_grad():
                return program(surroundings=self.surroundings)[0]

        return run


def _of_norm_1(x: Any) -> Any:
    return type(x)._wrap(x.backing, torch.ones_like(x.norm_size), None, x.elem_dims) if isinstance(x, NormedTensor) else x
