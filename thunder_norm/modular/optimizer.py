"""Steepest descent under the modular norm, as a `torch.optim.Optimizer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from thunder_norm.core.context import Mode
from thunder_norm.core.tensors import describe
from thunder_norm.errors import NormMapKeyError, NormMismatchError, with_details
from thunder_norm.model_state.shards import check_placement, is_spread, local, placed, reshard
from thunder_norm.modular.block_balls import Blocks
from thunder_norm.modular.distributed import Spread
from thunder_norm.modular.masses import ATTENTION, GATED, LIGHT, PLACES
from thunder_norm.modular.moving import (
    Gradients,
    Moving,
    OnBadGradient,
    check_added,
    check_choice,
    check_decay,
    check_foreign_options,
    check_gradient,
    check_options,
    check_replaced,
    check_saved,
    check_unfrozen,
    momentum_buffer,
    projections,
    restore_momentum,
    shift,
    smoothed,
)
from thunder_norm.modular.noise import Adaptation, adapt, adapt_everywhere, check_saved_shapes, restore, unit_dims
from thunder_norm.modular.norm import ModularNorm
from thunder_norm.modular.orthogonal import Method
from thunder_norm.modular.steepest import Batches, nearest, nonfinite, steepest_batch, steepest_steps


class ModularOptimizer(torch.optim.Optimizer):
    """Each step moves all parameters by an update of modular norm ``lr``, along which the loss falls most.

    For a parameter W with gradient G, momentum buffer B and target t (see `ModularNorm.targets`)::

        B <- momentum * B + (1 - momentum) * G
        D  = momentum * B + (1 - momentum) * G if nesterov else B
        W <- (1 - lr * t * weight_decay) * W - lr * t * lmo(D)

    ``lmo`` is the duality map of the parameter's own norm (`thunder_norm.modular.duality`): matrices, the taps of kernels too, are
    orthogonalized, those of one shape in one batch; rows of tables are normalized; gains move by their sign.  To first order, and for
    inputs and parameters of norm 1, the output moves by ``lr`` at most (of mode "bound"; of "typical", about), whatever the width and
    depth, and repeated blocks share one mass: this is why a learning rate transfers between them.  Decay is decoupled and as large as the step: a parameter's norm tends to at most ``1 / weight_decay``.

    With ``noise_adaptation=b`` a step is multiplied, unit by unit, by how much of its direction is signal, ``min(1, |D| / sqrt(v))`` with::

        v <- b * v + (1 - b) * |G|^2

    in Euclidean norms, D and v divided by the sums of the weights that they are averages by (as Adam's bias correction).  Units are rows of
    tables and of heads (one for each output), entries of gains, whole biases, and whole matrices and kernels that multiply the program's
    inputs; those between activations take whole steps (see `ModularNorm.roles`).  Factors are at most 1, so ``lr`` bounds the modular
    norm of a step as before; decay is not multiplied.

    Over several processes (DistributedDataParallel, `fully_shard`, any DTensors) each matrix is orthogonalized by one rank, all by all
    ranks together, and all ranks move alike: `step` is collective, and so is an error.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> x = torch.randn(3, 4)
    >>> optimizer = ModularOptimizer(model, x, lr=0.1)
    >>> model(x).square().mean().backward()
    >>> optimizer.step()

    Args:
        model: the module, or its `ModularNorm`, derived before.
        *example_args: arguments that say shapes and dtypes, as for `ModularNorm`.
        lr: the modular norm of a step; often 0.01 to 1.
        momentum: share of the past in each direction, 0 <= momentum < 1.
        nesterov: look one step ahead.
        weight_decay: decoupled, as above.
        masses: which share of a step parameters get, as for `ModularNorm`; biases, gains and scales have 0.1 unless it says otherwise, with
            noise adaptation in mode "typical" the matrices of attention 1/2, gates and what they gate, and learned positions 0.3.
        mode: whose sensitivities; see `ModularNorm`.  "typical", the default, has those of random inputs and suits models as they are;
            "modula" models in Modula's form (residual branches scaled by 1 / depth, attention by 1 / width of a head); "bound" is safe
            for all inputs, but its steps vanish in deep networks with normalizations.
        blocks: step by blocks where a matrix is several in one, as for `ModularNorm`.
        params: what to move, instead of all parameters that require grad: parameters or (name, parameter), or groups of them with
            options of their own (lr, momentum, nesterov, weight_decay, noise_adaptation, project).
        noise_adaptation: b above, 0 <= b < 1, often 0.95; None for steps that know nothing of noise.
        project: after each step, move parameters to the nearest ones of norm at most 1 (matrices: an SVD).
        missing_grads: what to do when a parameter that the output depends on has no gradient: "error", or "skip" the parameter.
        nonfinite_grads: what to do when a gradient has NaN or infinite entries: "error", or "skip" the whole step, counted in
            `skipped_steps`.
        method: how matrices are orthogonalized, "newton_schulz", "newton_schulz_bf16" (several times faster on GPUs) or "svd"
            (exact); see `orthogonalize`.
        process_group: ranks that have the same in parameters that are no DTensors, and get the same gradients; by default those of
            DistributedDataParallel if `model` is, or was when the norm was derived, wrapped in it.
        **example_kwargs: as `example_args`, by name.

    Attributes:
        norm: the modular norm.  ``optimizer.norm.initialize_(zero_biases=True)`` starts the model at norm 1.
        skipped_steps: how many steps were skipped because of gradients that are not finite; in a `state_dict`, too.

    Raises:
        GradientError: (by `step`) a gradient is missing, sparse or not finite; parameters and state are as before.
        NormMapKeyError: a parameter the norm does not know.
        NormMismatchError: an option out of its range, or of another optimizer; and as for `ModularNorm`.

    Source: Large et al. 2024, "Scalable Optimization in the Modular Norm"; Bernstein and Newhouse 2024, "Modular Duality in Deep
    Learning".  Noise: Zhang, Liu and Schaeffer 2026, "Adam Improves Muon: Adaptive Moment Estimation with Orthogonalized Momentum", who
    adapt matrices between activations, as wholes (NAMO) or by columns (NAMO-D).  Decay in units of the step: Pethick et al. 2025, "Training Deep Learning Models with Norm-Constrained LMOs".
    """

    def __init__(
        self,
        model: torch.nn.Module | ModularNorm,
        *example_args: Any,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        noise_adaptation: float | None = None,
        masses: Mapping[str, float] | None = None,
        mode: Mode | None = None,
        blocks: Blocks = False,
        params: Iterable[Any] | None = None,
        project: bool = False,
        missing_grads: OnBadGradient = "error",
        nonfinite_grads: OnBadGradient = "error",
        method: Method = "newton_schulz",
        process_group: torch.distributed.ProcessGroup | None = None,
        **example_kwargs: Any,
    ):
        if isinstance(model, ModularNorm):
            if example_args or example_kwargs or masses is not None or mode is not None or blocks is not False:
                raise NormMismatchError(
                    "a ModularNorm is complete: example arguments, masses, mode and blocks are given when it is derived"
                )
            self.norm = model
        else:
            if not isinstance(model, torch.nn.Module):
                raise NormMismatchError(f"ModularOptimizer needs a torch.nn.Module or a ModularNorm, got {describe(model)}")
            check_foreign_options(example_kwargs, inspect.signature(type(self)).parameters, model)
            is_whole = noise_adaptation is None or mode not in (None, "typical")
            by_role = {} if is_whole else {"attention": ATTENTION, "gated": GATED, "places": PLACES}
            said: dict[str, Any] = {
                "masses": masses,
                "light": LIGHT,
                **by_role,
                "mode": mode or "typical",
                "blocks": blocks,
            }
            self.norm = ModularNorm(model, *example_args, **said, **example_kwargs)
        self.missing_grads: OnBadGradient = check_choice(missing_grads, "missing_grads", OnBadGradient)
        self.nonfinite_grads: OnBadGradient = check_choice(nonfinite_grads, "nonfinite_grads", OnBadGradient)
        self.method: Method = check_choice(method, "method", Method)
        self.skipped_steps = 0
        if process_group is not None:
            self.norm.process_group = process_group  # so that replicas also start from the same
        reshard(self.norm.model)
        self._known = {id(p): name for name, p in self.norm.model.named_parameters()}
        self._frozen: list[tuple[str, torch.Tensor]] | None = None  # what is left alone, where all else is moved
        if params is None:
            params = [(name, p) for name, p in self.norm.model.named_parameters() if p.requires_grad]
            self._frozen = [(name, p) for name, p in self.norm.model.named_parameters() if not p.requires_grad]
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "project": project}
        defaults["noise_adaptation"] = noise_adaptation
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model with options of their own.

        Raises:
            NormMapKeyError: a parameter the norm does not know.
            NormMismatchError: an option out of its range.
        """
        if isinstance(param_group, dict) and "params" in param_group:
            given = param_group["params"]
            is_one = isinstance(given, torch.Tensor)
            if not isinstance(given, set):  # which torch refuses: it has no order
                named = [self._named(p) for p in ([given] if is_one else given)]
                param_group = param_group | {"params": named, "param_names": []}  # torch leaves them out of an empty group
            check_foreign_options(param_group.keys() - self.defaults, self.defaults, self.norm.model)
            check_options(self.defaults | param_group)
            if (self.defaults | param_group)["noise_adaptation"] is not None:
                _ = self.norm.roles  # found now, with its errors, rather than in the first step
        super().add_param_group(param_group)
        self._spread: Spread | None = None
        self._batches = Batches(self.method)
        self._is_spread = self.norm.process_group is not None or any(is_spread(p) for g in self.param_groups for p in g["params"])

    def _named(self, given: Any) -> Any:
        """(first name, parameter), under which groups and errors name it."""
        said, p = given if isinstance(given, tuple) else (None, given)
        if not isinstance(p, torch.Tensor):
            return given
        if id(p) not in self._known:
            raise NormMapKeyError(
                with_details(
                    f"the modular norm does not know {'a parameter' if said is None else repr(said)}: {describe(p)}",
                    model=type(self.norm.model).__name__,
                    instead="parameters must be those of the model the norm was derived from; after replacing one (by a layer of "
                    "another size, .to(...) of a copy, ...) make a new optimizer",
                )
            )
        check_placement(self._known[id(p)], p)
        return self._known[id(p)], p

    def _named_in(self, group: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """(first name, parameter) of a group, from which some may have been taken by hand."""
        return [(self._known.get(id(p)) or self._named(p)[0], p) for p in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters.

        Args:
            closure: evaluates the model anew, calls `backward` and returns the loss, which is returned.

        Raises:
            GradientError: a gradient is missing, sparse or not finite; nothing was changed.
            NormMismatchError: a learning rate or another option of a group has left its range; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            found = self._gradients_everywhere() if self._is_spread else self._gradients()
            check_replaced(found.missing, self._known, self.norm.model)
            found.check_missing(self.missing_grads)
            if not found.are_finite(self.nonfinite_grads):
                self.skipped_steps += 1
                return loss
            for p in found.still:
                self.state[p]  # an entry for each, however empty: torch.distributed.checkpoint refuses parameters without
            states = [self.state[m.parameter] for m in found.moving]
            if self._spread is not None:
                self._move_everywhere(self._spread, found.moving, states)
                return loss
            moving = found.moving
            for positions in self._batches.of([(m.ball, m.gradient) for m in moving], [id(m.group) for m in moving]):
                self._move([moving[i] for i in positions], [states[i] for i in positions])
        return loss

    def _gradients(self) -> Gradients:
        """What this process sees, options and gradients checked."""
        moving, still, missing, norm = [], [], [], self.norm
        for group in self.param_groups:
            check_options(group)
            first, is_adapted = len(moving), group["noise_adaptation"] is not None
            for name, p in self._named_in(group):
                target, gradient = norm.targets[name], p.grad
                if gradient is None:
                    if target > 0 and p.requires_grad:
                        missing.append(name)
                    continue
                check_gradient(name, p, gradient, norm.shapes[name])
                if name in norm.frozen:
                    raise NormMismatchError(
                        f"{name!r} was frozen when the norm was derived, and has mass 0: make a new optimizer now that it trains"
                    )
                if target > 0:
                    units = self._unit_dims(name, group) if is_adapted else None
                    moving.append(Moving(name, p, local(p), local(gradient), norm.balls[name], target, group, units))
                else:
                    still.append(p)
            check_decay(moving[first:])
        if self._frozen is not None:
            check_unfrozen(self._frozen, self.param_groups)
            check_added(norm.model, self._known, missing)
        return Gradients(moving, still, missing, nonfinite({m.name: m.gradient for m in moving}))

    def _gradients_everywhere(self) -> Gradients:
        """What any rank sees: a gradient that is missing or not finite on one counts for all, and so does an error."""
        if self._spread is None:
            parameters = dict(chain.from_iterable(map(self._named_in, self.param_groups)))
            self._spread = Spread.of(parameters, self.norm.balls, self.norm.process_group)
        assert self._spread is not None
        found, error = Gradients([], [], [], []), None
        try:
            found = self._gradients()
        except Exception as e:  # noqa: BLE001 - raised by `agree`, together with all ranks
            error = e
        missing, bad = self._spread.agree(error, found.missing, found.nonfinite)
        # after they agreed, because to place a gradient as its parameter takes all ranks
        moving = [
            m._replace(gradient=local(placed(m.parameter.grad, m.parameter))) for m in found.moving if m.name not in missing
        ]
        return Gradients(moving, found.still, missing, [name for name in bad if name not in missing])

    def _unit_dims(self, name: str, group: Mapping[str, Any]) -> tuple[int, ...] | None:
        return None if group["noise_adaptation"] is None else unit_dims(self.norm.balls[name], self.norm.roles[name])

    def _move(self, moving: list[Moving], states: list[dict[str, Any]]) -> None:
        """Move parameters of one ball, shape and group.

        Tables on a CPU go through all operations piece by piece: their pieces stay in its cache.
        """
        group, ball, sizes = moving[0].group, moving[0].ball, [m.size for m in moving]
        adaptations = [Adaptation.of(*each) for each in zip(moving, states, strict=True)]
        alike: dict[tuple[int, ...], list[tuple[int, Adaptation, Sequence[torch.Tensor]]]] = {}
        for i, a in enumerate(adaptations):
            if a is not None:
                alike.setdefault(a.dims, []).append((i, a, a.averages(ball.pieces(moving[i].gradient))))
        gradients = [m.gradient for m in moving]
        past = [momentum_buffer(*each) for each in zip(moving, states, strict=True)] if group["momentum"] else gradients
        whole = [m.data for m in moving], gradients, past
        is_whole = len(ball.pieces(gradients[0])) == 1
        rounds = [whole] if is_whole else zip(*(zip(*map(ball.pieces, some), strict=True) for some in whole), strict=True)
        for at, of_each in enumerate(rounds):
            parameters, gradients, past = map(list, of_each)
            directions = smoothed(group, gradients, past)
            steps = steepest_batch(ball, directions, sizes, self.method)
            for adapted in alike.values():
                positions, some, averages = zip(*adapted, strict=True)
                chosen = [[tensors[i] for i in positions] for tensors in (gradients, directions, steps)]
                adapt(some, [pieces[at] for pieces in averages], *chosen)
            shift(group, parameters, steps, sizes)
        for m, p in projections(moving, lambda outside: nearest([(m.ball, m.data) for m in outside])):
            m.data.copy_(p)

    def _move_everywhere(self, spread: Spread, moving: list[Moving], states: list[dict[str, Any]]) -> None:
        """Move all parameters at once: the exchanges between processes are few and large."""

        def mapped(
            some: list[Moving], tensors: list[torch.Tensor], work: Callable[..., list[torch.Tensor]], can_fail: bool
        ) -> list[torch.Tensor]:
            def of_parts(at: list[int], parts: list[torch.Tensor]) -> list[torch.Tensor]:
                return work([some[i] for i in at], parts)

            return spread.map([m.name for m in some], tensors, of_parts, can_fail)

        def steepest(some: list[Moving], parts: list[torch.Tensor]) -> list[torch.Tensor]:
            return steepest_steps([(m.ball, t, m.size) for m, t in zip(some, parts, strict=True)], self.method)

        def projected(some: list[Moving], parts: list[torch.Tensor]) -> list[torch.Tensor]:
            return nearest([(m.ball, t) for m, t in zip(some, parts, strict=True)])

        adapted = [Adaptation.of(*each) for each in zip(moving, states, strict=True)]
        past = [momentum_buffer(m, s) if m.group["momentum"] else m.gradient for m, s in zip(moving, states, strict=True)]
        directions = [smoothed(m.group, [m.gradient], [b])[0] for m, b in zip(moving, past, strict=True)]
        steps = mapped(moving, directions, steepest, can_fail=self.method == "svd")
        adapt_everywhere(spread, moving, adapted, directions, steps)
        for m, step in zip(moving, steps, strict=True):
            shift(m.group, [m.data], [step], [m.size])
        for m, p in projections(moving, lambda outside: mapped(outside, [m.data for m in outside], projected, can_fail=True)):
            m.data.copy_(p)

    def state_dict(self) -> dict[str, Any]:
        """As other optimizers of torch have it, with `skipped_steps`."""
        return super().state_dict() | {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load buffers, options of groups and `skipped_steps`, as saved by `state_dict`.

        Raises:
            NormMapKeyError: it is of other parameters, or of the same in another order; nothing was changed.
            NormMismatchError: it is of an optimizer that has other options, or of parameters of other shapes; nothing was changed.
        """
        groups = [[name for name, _ in self._named_in(group)] for group in self.param_groups]
        check_saved(state_dict["param_groups"], groups, self.defaults.keys() - {"noise_adaptation"})
        # one saved before there was noise adaptation says nothing of it
        kept = [{"noise_adaptation": group["noise_adaptation"]} for group in self.param_groups]
        saved_groups = [*map(dict.__or__, kept, state_dict["param_groups"]), *state_dict["param_groups"][len(kept) :]]
        if any(group["noise_adaptation"] is not None for group in saved_groups):
            _ = self.norm.roles  # with its errors, before anything changes
        for own, group in zip(self.param_groups, saved_groups, strict=False):  # torch says so where there are others
            for i, (name, p) in zip(group["params"], self._named_in(own), strict=False):
                check_saved_shapes(name, state_dict["state"].get(i, {}), p, self._unit_dims(name, group))
        super().load_state_dict(state_dict | {"param_groups": saved_groups})
        # torch.distributed.checkpoint leaves it out, and one saved before did not have it
        self.skipped_steps = state_dict.get("skipped_steps", self.skipped_steps)
        for group, names in zip(self.param_groups, groups, strict=True):
            group["param_names"] = names
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = ((group, name, p) for group in self.param_groups for name, p in self._named_in(group))
        for i, (group, name, p) in zip(saved, own, strict=True):  # saved by one process, or with other shards
            state = self.state[p] if p in self.state else {}
            restore_momentum(state, state_dict["state"].get(i, {}), p)
            restore(state, state_dict["state"].get(i, {}), p, self._unit_dims(name, group))

    def __getstate__(self) -> dict[str, Any]:
        # without the process group, which cannot be copied: a copy is of one process, where nothing is sharded
        kept = ("norm", "missing_grads", "nonfinite_grads", "method", "skipped_steps", "_frozen")
        return super().__getstate__() | {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # which torch puts there, and no group that was saved has
        for group in self.param_groups:
            group.setdefault("noise_adaptation", None)  # pickled before there was any
        self.__dict__.setdefault("_frozen", None)  # the same
        self._known = {id(p): name for name, p in self.norm.model.named_parameters()}
        self._spread, self._batches = None, Batches(self.method)
        self._is_spread = any(is_spread(p) for group in self.param_groups for p in group["params"])
