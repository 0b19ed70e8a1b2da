"""The modular norm of a model: one norm for an update of all parameters, in which a step of size 1 moves the output by at most 1.

``||D|| = max_k (M / m_k) S_k ||D_k||_k`` over the parameters k of mass m_k > 0, with M the sum of all masses and S_k the output's
sensitivity to parameter k.  Then, to first order, the output moves by at most ``sum_k S_k ||D_k||_k <= sum_k (m_k / M) ||D|| = ||D||``, and
parameter k contributes at most the fraction ``m_k / M``.

Source: Large et al. 2024, "Scalable Optimization in the Modular Norm"; here for any graph, by the sum over its paths.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from thunder_norm import first_calls
from thunder_norm.core.context import Mode, check_mode
from thunder_norm.core.initializing import check_generator
from thunder_norm.core.tensors import NORM_DTYPE, describe, has_norm
from thunder_norm.errors import NormMapKeyError, NormMismatchError, VanishingTargetWarning, some_of, with_details
from thunder_norm.model_state.shards import around, cut, is_spread, local, reshard, whole
from thunder_norm.modular.block_balls import Blocks, asked_for, blocked, roles_given
from thunder_norm.modular.blocks import Block
from thunder_norm.modular.distributed import Spread
from thunder_norm.modular.duality import Ball, RMSBall, ball
from thunder_norm.modular.losses import Loss
from thunder_norm.modular.masses import assign_masses, light_mass, repetitions, role_masses
from thunder_norm.modular.orthogonal import Method
from thunder_norm.modular.roles import Roles, find_roles
from thunder_norm.modular.steepest import nearest, nonfinite, steepest_steps
from thunder_norm.modular.unit_norms import UnitNorms
from thunder_norm.modular.wrappers import unwrapped
from thunder_norm.norms.lifts.inference import NormSpec
from thunder_norm.norms.lifts.parameters import tied_names
from thunder_norm.scalars import is_number

_VANISHING = 1e-6  # the part of a step that counts as none


_OF_STEPS = (  # a surrogate gradient, of which the norms know nothing
    "what a comparison decides moves with nothing, whatever backward a torch.autograd.Function gives it; "
    "of soft + (hard - soft).detach() soft counts"
)


class ModularNorm:
    """The modular norm of a model, and what steepest descent under it needs.

    Inputs and parameters have norm at most 1, the latter each in its natural kind (`annotate` decides otherwise); in mode "typical"
    parameters are as large as they start, and frozen ones as they are (`thunder_norm.norms.lifts.starts`); these keep the norm of their data
    in mode "bound". A parameter that the program divides by its own length (weight normalization) has norm 1 in each group of entries that its norm runs
    over, as `initialize_` draws it.  Nothing in the model changes until `project_` or `initialize_` is called.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.ReLU(), torch.nn.Linear(8, 2, bias=False))
    >>> norm = ModularNorm(model, torch.randn(3, 4))
    >>> norm.targets
    {'0.weight': 0.5, '2.weight': 0.5}

    Args:
        model: any module that runs in normed mode; on the meta device no weights are touched.  Of one that `thunder.jit`,
            `torch.compile` or DistributedDataParallel made, the module inside; names of both are understood.  Parameters may be
            sharded (`fully_shard`, or any DTensors); the norm is that of the whole ones, also if it is derived before.
        *example_args: arguments that say shapes and dtypes.  A floating tensor is taken to have norm 1, in the norm that the first
            operation on it wants (RMS over the last dimension if it wants none); if any argument is a NormedTensor, those say
            which norms inputs have, and a plain tensor stands for itself.
        masses: parameter name, module path or pattern -> mass: see `thunder_norm.modular.masses`.
        light: the mass of a bias, gain or scale, or of what is only added, that `masses` says nothing about; 0.1, and in mode "modula" 0,
            unless it is given.
        attention: the mass of a matrix that makes queries, keys or values, or multiplies attention's result, that `masses` says nothing about.
        gated: the same of a gate, and of what it gates, or of the matrix that is both.
        places: the same of a table that is looked up at places which depend on no input (learned positions).
        mode: "bound" (the output moves by at most the norm of an update), "typical" or "modula".
        blocks: whether a matrix (or bias) that is several in one, as the program takes it (see `find_roles`), has the largest of the
            blocks' norms as its own, and each block a steepest step of its own; "heads": queries and keys head by head, too.  A mapping
            or table of roles says which blocks there are.  Its mass, sensitivity and target stay those of the whole, which is sound: no
            smaller norm than that of the whole.
        **example_kwargs: as `example_args`, by name.

    Attributes:
        model: the model, the one inside if it was wrapped.
        process_group: ranks that hold the same in parameters that are not sharded: those of DistributedDataParallel if the model was
            wrapped in it, or an optimizer's.
        mode: the mode.
        first_names: every name of a parameter, those of tied ones and of a wrapped model included -> its first name in the model.
        frozen: the parameters that did not require grad.
        shapes: of the parameters, by first name.
        norms: kind and elem_dims of each parameter's norm; a tied parameter has one, under its first name, here and below.
        inputs: the arguments, positional and by name, as NormedTensors without data.
        outputs: the norms in which the output's movement is measured; their norm_size is the bound on the output itself.
        sensitivities: S_k, how far the output (of several: the sum of their norms) moves if the parameter moves by 1.
        masses: m_k.
        balls: the unit ball of each parameter's norm, with its duality map.
        blocks: name -> the blocks of a parameter that has several, if they were asked for.
        targets: ``m_k / (M S_k)``, the norm of the parameter's part of a step of norm 1; 0 where m_k or S_k is.  In mode "typical" an
            S_k below 1 / r, for one of r repeated blocks (1 for others), counts as that: derivatives at small parameters hold for small
            steps, and many that shrink multiply up when they grow together.

    Warns:
        VanishingTargetWarning: a target is below 1e-6, or a parameter of positive mass is unreached; it names the operation that most
            is lost in.

    Raises:
        MissingNormRuleError: an operation has no rule.
        NormMapKeyError: `masses` names what the model does not have.
        NormMismatchError: no bound on how far the output moves with a parameter that has mass, masses that cannot all hold, unknown heads,
            or blocks that were asked for where a norm does not allow them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *example_args: Any,
        masses: Mapping[str, float] | None = None,
        light: float | None = None,
        attention: float = 1.0,
        gated: float = 1.0,
        places: float = 1.0,
        mode: Mode = "bound",
        blocks: Blocks = False,
        **example_kwargs: Any,
    ):
        if not isinstance(model, torch.nn.Module):
            raise NormMismatchError(f"ModularNorm needs a torch.nn.Module, got {describe(model)}")
        given, (model, self.process_group) = model, unwrapped(model)
        reshard(model)
        self.model, self.mode = model, check_mode(mode)
        with first_calls.shown("modular norm"):
            found = UnitNorms.of(model, example_args, example_kwargs, self.mode)
        names = tied_names(model)
        tied = {name: names[name] for name, _ in model.named_parameters()}
        self.norms: dict[str, NormSpec] = found.norms
        self.inputs: tuple[tuple, dict] = found.inputs
        self.outputs: Any = found.outputs
        self.sensitivities: dict[str, float] = found.sensitivities
        light = light_mass(light, self.mode)
        self._examples, self._roles = (example_args, example_kwargs), roles_given(blocks, model, example_args, example_kwargs)
        of_roles = attention, gated, places
        by_role = role_masses(self.roles, *of_roles) if any(not is_number(mass) or mass != 1 for mass in of_roles) else {}
        self.masses: dict[str, float] = assign_masses(model, masses, found.norms, tied, light, self.mode, found.uses, by_role)
        self.frozen: frozenset[str] = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
        self._check_bounded(found.loss)
        self._repeats = repetitions(model, tied) if self.mode == "typical" else {}
        self.targets: dict[str, float] = {name: self._target(name) for name in self.masses}
        self.first_names: dict[str, str] = {name: first for first, all_names in tied.items() for name in all_names}
        by_id = {id(p): name for name, p in model.named_parameters()}
        self.first_names |= {k: by_id[id(p)] for k, p in given.named_parameters(remove_duplicate=False) if id(p) in by_id}
        self._spreads: dict[Any, Spread | None] = {}
        self.shapes: dict[str, torch.Size] = {name: p.shape for name, p in model.named_parameters()}
        self.balls: dict[str, Ball] = {name: ball(w.kind, w.elem_dims, self.shapes[name]) for name, w in found.norms.items()}
        several = {}
        if blocks is not False:
            asked = asked_for(blocks, self.roles)
            several = blocked(self.balls, self.shapes, self.roles, per_head=blocks == "heads", asked=asked)
        self.blocks: dict[str, tuple[Block, ...]] = {name: of_it for name, (of_it, _) in several.items()}
        self.balls |= {name: of_blocks for name, (_, of_blocks) in several.items()}
        self._say_what_vanishes(found.loss)

    def _say_what_vanishes(self, loss: Loss | None) -> None:
        """Warn of parameters that a step does not move, or hardly, and name the operation that most is lost in."""
        tiny = sorted((t, name) for name, t in self.targets.items() if 0 < t < _VANISHING)
        if not tiny and not self.unreached:
            return
        instead = "mode='typical' has expected sizes in place of bounds for all inputs" if tiny and self.mode == "bound" else None
        said = [f"{len(tiny)} by less than {_VANISHING:g}, for the output may move that far with them"] if tiny else []
        said += [f"{len(self.unreached)} not at all, for no output depends on them"] if self.unreached else []
        text = with_details(
            f"of {len(self.targets)} parameters a step of norm 1 moves " + ", and ".join(said),
            least=", ".join(f"{name!r} {t:.2g}" for t, name in tiny[:3]) or None,
            unreached=", ".join(map(repr, self.unreached[:3])) or None,
            steps=_OF_STEPS if self.unreached else None,
            lost_in=loss if tiny else None,
            instead=instead,
        )
        warnings.warn(text, VanishingTargetWarning, stacklevel=3)

    @property
    def roles(self) -> Roles:
        """What each parameter is in the program: see `find_roles`.

        Raises:
            NormMismatchError: of a copy, which has no example arguments, if it was not asked for before.
        """
        if self._roles is None:
            if self._examples is None:
                raise NormMismatchError(
                    "a copy of a norm has no example arguments: ask for its roles before, or find_roles(model, ...)"
                )
            self._roles = find_roles(self.model, *self._examples[0], **self._examples[1])
        return self._roles

    @property
    def mass(self) -> float:
        """M, the sum of all masses."""
        return math.fsum(self.masses.values())

    @property
    def unreached(self) -> tuple[str, ...]:
        """The parameters of positive mass that no output depends on: their targets are 0."""
        return tuple(name for name, s in self.sensitivities.items() if s == 0 and self.masses[name] > 0)

    def _check_bounded(self, loss: Loss | None) -> None:
        unbounded = [name for name, s in self.sensitivities.items() if not math.isfinite(s) and self.masses[name] > 0]
        if unbounded:
            raise NormMismatchError(
                with_details(
                    f"how far the output moves with {unbounded[0]!r} has no bound for all inputs and parameters of norm 1"
                    if self.mode == "bound"
                    else f"how far the output moves with {unbounded[0]!r} is not finite in mode {self.mode!r}",
                    parameters=some_of(unbounded),
                    lost_in=loss,
                    instead="norm_report(model, ...) shows the operation; mass 0 leaves a parameter out"
                    + ("; mode='typical' has expected sizes in place of bounds" if self.mode == "bound" else ""),
                )
            )

    def _counted(self, name: str) -> float:
        """The sensitivity that counts: S_k, or the least of mode "typical"."""
        s, repeats = self.sensitivities[name], self._repeats.get(name)
        return max(s, 1 / repeats) if repeats and s > 0 else s

    def _target(self, name: str) -> float:
        mass, s = self.masses[name], self._counted(name)
        return mass / (self.mass * s) if mass > 0 and s > 0 else 0.0

    def __call__(self, updates: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """The modular norm of an update, a 0-dim float64 tensor, differentiable in it.

        Args:
            updates: parameter name -> how far it moves; those left out, or None, do not.  Infinite if one that has mass 0 moves
                and the output with it.  Collective if they are DTensors, which every rank gathers.

        Raises:
            NormMapKeyError: an unknown name, or two names of one parameter.
            NormMismatchError: a tensor of another shape, of integers, or with an entry that is not finite.
        """
        given = self._checked(updates, "updates")
        sizes = [self._share(self.first_names[name], t) for name, t in given.items()]
        if not sizes:
            return torch.zeros((), dtype=NORM_DTYPE)
        return torch.stack([size.to(sizes[0].device) for size in sizes]).amax()

    def _share(self, name: str, update: torch.Tensor) -> torch.Tensor:
        """``(M / m_k) S_k ||D_k||_k``."""
        size = self.balls[name].norm(whole(update))
        mass, s = self.masses[name], self._counted(name)
        if mass > 0 or s == 0:
            return size * (self.mass * s / mass if mass > 0 else 0.0)
        return torch.where(size > 0, torch.full_like(size, math.inf), torch.zeros_like(size))

    def dualize(
        self, grads: Mapping[str, torch.Tensor | None], target_norm: float = 1.0, *, method: Method = "newton_schulz"
    ) -> dict[str, torch.Tensor]:
        """The update of modular norm `target_norm` along which the loss rises most: subtract it from the parameters.

        ``target_norm * targets[k] * lmo(grads[k])`` for each parameter (see `thunder_norm.modular.duality`); matrices of one shape in
        one batch.  Zero where the gradient or the target is.

        Args:
            grads: parameter name -> gradient; one that is None is left out of the result.  Of DTensors each matrix is orthogonalized
                by one rank, and the result is sharded as they are, and not differentiable; collective.
            target_norm: the size of the step.
            method: how operators are orthogonalized: see `orthogonalize`.

        Raises:
            NormMapKeyError: as for `__call__`.
            NormMismatchError: as for `__call__`, or a target_norm that is negative or not finite.
        """
        if not (isinstance(target_norm, int | float) and 0 <= target_norm < math.inf):
            raise NormMismatchError(f"target_norm must be a finite number >= 0, got {target_norm!r}")
        given = self._checked(grads, "grads")
        sizes = {name: target_norm * self.targets[self.first_names[name]] for name in given}
        moving = [name for name, size in sizes.items() if size > 0]
        balls = [self.balls[self.first_names[name]] for name in moving]

        def steepest(at: Sequence[int], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return steepest_steps([(balls[i], t, sizes[moving[i]]) for i, t in zip(at, parts, strict=True)], method)

        steps = self._mapped(steepest, {name: given[name] for name in moving}, can_fail=method == "svd")
        found = dict(zip(moving, steps, strict=True))
        return {name: found[name] if name in found else torch.zeros_like(g) for name, g in given.items()}

    def _mapped(
        self,
        work: Callable[[list[int], list[torch.Tensor]], list[torch.Tensor]],
        tensors: Mapping[str, torch.Tensor],
        can_fail: bool,
    ) -> list[torch.Tensor]:
        """What `work` makes of tensors at positions; of sharded ones each on one rank, as shards."""
        spread = self._spread({self.first_names[name]: t for name, t in tensors.items()})
        if spread is None:
            return work(list(range(len(tensors))), list(tensors.values()))
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()):
            raise NormMismatchError(
                "what is made of shards on several ranks is not differentiable: detach them, or use no_grad()"
            )
        shards = spread.map([self.first_names[name] for name in tensors], [local(t) for t in tensors.values()], work, can_fail)
        return [around(shard, t) for shard, t in zip(shards, tensors.values(), strict=True)]

    def _spread(self, tensors: Mapping[str, torch.Tensor], group: Any = None) -> Spread | None:
        """How they are spread over ranks, by first name."""
        if group is None and not any(map(is_spread, tensors.values())):
            return None
        key = group, tuple((name, getattr(t, "device_mesh", None), getattr(t, "placements", None)) for name, t in tensors.items())
        if key not in self._spreads:
            self._spreads[key] = Spread.of(tensors, self.balls, group)
        return self._spreads[key]

    @torch.no_grad()
    def project_(self) -> ModularNorm:
        """Move every parameter that is not frozen to the nearest tensor of norm at most 1, in place; collective if they are sharded.

        Raises:
            NormMismatchError: a parameter is on the meta device, or has an entry that is not finite.
        """
        parameters = self._changeable()
        self._check_finite(parameters, "parameters")
        balls = [self.balls[name] for name in parameters]

        def projected(at: Sequence[int], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return nearest([(balls[i], t) for i, t in zip(at, parts, strict=True)])

        for p, new in zip(parameters.values(), self._mapped(projected, parameters, can_fail=True), strict=True):
            local(p).copy_(local(new))
        return self

    @torch.no_grad()
    def initialize_(self, generator: torch.Generator | None = None, *, zero_biases: bool = False) -> ModularNorm:
        """Draw every parameter that is not frozen anew, of norm exactly 1 (up to rounding in its dtype), in place.

        Operators become semi-orthogonal matrices times ``sqrt(out / in)``, kernels such in every tap, tables, biases and other tensors
        of an RMS norm random rows of norm 1, tensors of a largest entry (gains, scales) ones.  Collective if parameters are sharded, or
        replicated (`process_group`): all ranks draw the first one's numbers.

        Args:
            generator: of random numbers.
            zero_biases: start one-dimensional parameters of an RMS norm at 0 instead, as is usual to train from.

        Raises:
            NormMismatchError: a parameter is on the meta device, or no generator of torch's.
        """
        check_generator(generator)

        def drawn(name: str, p: torch.Tensor, random: torch.Generator | None) -> torch.Tensor:
            is_bias = p.ndim == 1 and isinstance(self.balls[name].single, RMSBall)
            return torch.zeros(p.shape) if zero_biases and is_bias else self.balls[name].draw(p.shape, random, p.is_complex())

        parameters = self._changeable()
        spread = self._spread(parameters, self.process_group)
        with contextlib.nullcontext(generator) if spread is None else spread.same_random(generator) as random:
            for name, p in parameters.items():
                local(p).copy_(cut(drawn(name, p, random), p))
        return self

    def _changeable(self) -> dict[str, torch.Tensor]:
        reshard(self.model)
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        on_meta = [name for name, p in parameters.items() if p.device.type == "meta"]
        if on_meta:
            raise NormMismatchError(f"parameters on the meta device have no data to change: {', '.join(map(repr, on_meta[:4]))}")
        return parameters

    def _checked(self, tensors: Mapping[str, torch.Tensor | None], what: str) -> dict[str, torch.Tensor]:
        """The tensors that are there, if all fit the parameters they are given for."""
        if not isinstance(tensors, Mapping):
            raise NormMismatchError(f"{what} must be a mapping from parameter names to tensors, got {type(tensors).__name__}")
        given = {name: t for name, t in tensors.items() if t is not None}
        self._check_names(tensors, what)
        for name, t in given.items():
            shape = self.shapes[self.first_names[name]]
            if not isinstance(t, torch.Tensor) or t.layout != torch.strided or not has_norm(t) or t.shape != shape:
                layout = "" if not isinstance(t, torch.Tensor) or t.layout == torch.strided else f" ({t.layout})"
                raise NormMismatchError(
                    f"{what}[{name!r}] must be a dense floating tensor of shape {list(shape)}, got {describe(t)}{layout}"
                )
        self._check_finite(given, what)
        return given

    def _check_finite(self, tensors: Mapping[str, torch.Tensor], what: str) -> None:
        first_names = {self.first_names[name]: name for name in tensors}
        bad = nonfinite({name: local(t) for name, t in tensors.items()})
        spread = self._spread({first: tensors[name] for first, name in first_names.items()})
        if spread is not None:
            (found,) = spread.agree(None, [self.first_names[name] for name in bad])
            bad = [first_names[first] for first in found]
        if bad:
            raise NormMismatchError(f"{what} with entries that are NaN or infinite: {', '.join(map(repr, bad[:4]))}")

    def _check_names(self, names: Iterable[str], what: str) -> None:
        unknown = [name for name in names if name not in self.first_names]
        if unknown:
            import difflib

            close = sorted({c for name in unknown for c in difflib.get_close_matches(str(name), self.first_names, n=2)})
            raise NormMapKeyError(
                with_details(
                    f"{what} names {'a parameter' if len(unknown) == 1 else 'parameters'} the modular norm does not know",
                    unknown=", ".join(map(repr, unknown)),
                    did_you_mean=", ".join(map(repr, close)) or None,
                )
            )
        seen: dict[str, str] = {}
        for name in names:
            first = self.first_names[name]
            if first in seen:
                raise NormMapKeyError(f"{what} names one tied parameter twice: {seen[first]!r} and {name!r}")
            seen[first] = name

    def __getstate__(self) -> dict[str, Any]:
        # process groups cannot be copied or pickled
        return self.__dict__ | {"process_group": None, "_spreads": {}, "_examples": None}

    def __repr__(self) -> str:
        unreached = f", not reached: {', '.join(self.unreached)}" if self.unreached else ""
        return f"ModularNorm({type(self.model).__name__}, {len(self.targets)} parameters, mode {self.mode!r}{unreached})"
