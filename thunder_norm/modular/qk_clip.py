"""QK-clip: heads whose attention logits grow too large have their queries and keys scaled down after a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from thunder_norm.core.tensors import describe
from thunder_norm.errors import NormMismatchError, with_details
from thunder_norm.model_state.shards import is_spread
from thunder_norm.modular.following.heads import Entry, Head, Owners, Scaled, components, heads_of, powers
from thunder_norm.modular.following.mode import follow, follow_with_data
from thunder_norm.modular.following.notes import Notes
from thunder_norm.modular.wrappers import unwrapped


@dataclass(frozen=True)
class Clipped:
    """A head that was clipped.

    Attributes:
        head: the parameters of its queries, and its number.
        largest: its largest logit, as it was.
        gamma: what its logits were multiplied by.
    """

    head: str
    largest: float
    gamma: float


class QKClip:
    """Keeps the attention logits of every head at or below tau, whatever the optimizer.

    A head whose largest logit S exceeds tau has ``gamma = tau / S``, its queries are multiplied by ``gamma^alpha`` and its keys by
    ``gamma^(1 - alpha)``, by multiplying the rows of weights and biases that they are made of.  Keys that several heads share (grouped
    queries, the rotary part in latent attention) stay what they are, as those with a parameter among their tokens (``add_bias_kv``), and the
    queries, there, are multiplied by gamma: logits of other heads do not change.

    Normalized queries and keys are as large as their gains (and the biases beside them), which are multiplied instead: of gains for each
    head as above, and gains that several heads share by the least gamma of these, which then holds for all of them.  Which entries of
    which parameters those are is found by following the program (see `find_roles`): rotary embeddings, fused projections of any layout,
    biases, gains that are ``1 + w``, temperatures that are ``exp(min(w, cap))``, weight normalization and written-out softmaxes are understood.  Parameters that are frozen while others
    train stay what they are: the queries of frozen keys take all of gamma, and a sum with a frozen term (LoRA's) is not scaled.

    >>> attention = torch.nn.MultiheadAttention(8, 2)
    >>> x = torch.randn(3, 1, 8)
    >>> clip = QKClip(attention, x, x, x, tau=0.01)
    >>> clip.num_heads
    2
    >>> clipped = clip.step_(100 * x, 100 * x, x)
    >>> bool(clip.largest_logits(100 * x, 100 * x, x).amax() < 0.010001)
    True

    Logits are those of queries and keys, scaled as the program scales them, where its masks let them count; what it adds to them (position
    biases) or does with them then (soft caps) is left out.  To know them the model runs once without gradients, as it is, in the
    mode it is in.

    Args:
        model: any module with attentions; of a wrapped one, the module inside.
        *example_args: arguments that say shapes and dtypes, as for `find_roles`.
        tau: the largest logit allowed; Kimi K2 has 100.
        alpha: the queries' share.
        process_group: ranks that hold the same parameters and get other inputs: they clip alike, by the largest logit of all.  By default
            those of DistributedDataParallel, if the model is wrapped in it.
        **example_kwargs: as `example_args`, by name.

    Attributes:
        tau: as given; it may be changed.
        alpha: as given.
        num_heads: how many different heads there are.
        fixed: the names of those that nothing scales: queries and keys that are normalized without gains (as Llama 4's in layers with
            rotary embeddings), clamped, frozen, or have constants added.  They stay what they are, and a step is refused if one exceeds tau.

    Raises:
        NormMismatchError: no attention is found (kernels of one's own are not looked into), its heads are not known, none can be scaled
            (queries and keys that are normalized without gains), or some not without others (rows that are used elsewhere), tau or alpha
            is out of its range, or parameters are sharded.

    Source: Kimi Team 2025, "Kimi K2: Open Agentic Intelligence", section 2.1, for projections; gains are ours.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *example_args: Any,
        tau: float = 100.0,
        alpha: float = 0.5,
        process_group: Any = None,
        **example_kwargs: Any,
    ):
        if not isinstance(model, torch.nn.Module):
            raise NormMismatchError(f"QKClip needs a torch.nn.Module, got {describe(model)}")
        for name, value, high in (("tau", tau, math.inf), ("alpha", alpha, 1.0)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not (0 <= value <= high and math.isfinite(value)) or (name == "tau" and value == 0):
                raise NormMismatchError(f"{name} must be a number {'> 0' if name == 'tau' else 'from 0 to 1'}, got {value!r}")
        self._given = model
        self._model, group = unwrapped(model)
        self._group = group if process_group is None else process_group
        self.tau, self.alpha = float(tau), float(alpha)
        spread = [name for name, p in self._model.named_parameters() if is_spread(p)]
        if spread:
            raise NormMismatchError(f"QKClip needs whole parameters, and {spread[0]!r} is sharded")
        tensors = [
            x for x in (*tree_leaves((example_args, example_kwargs)), *self._model.parameters()) if isinstance(x, torch.Tensor)
        ]
        run = follow if any(t.is_meta for t in tensors) else follow_with_data
        plan = _Plan.of(run(self._model, example_args, example_kwargs), _frozen(self._model))
        self.num_heads = len(plan.heads)
        self.fixed = tuple(plan.heads[h].name for h in plan.fixed)
        self._last: tuple[tuple, dict] | None = None

    def largest_logits(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The largest logit of each head for these arguments, [num_heads], in float64; over all ranks.  Collective with a process group.

        Raises:
            NormMismatchError: as the class, for the program as it runs with these.
        """
        return self._run(args, kwargs)[1]

    @torch.no_grad()
    def step_(self, *args: Any, **kwargs: Any) -> list[Clipped]:
        """Clip the heads whose logits exceed tau for these arguments, and those that share gains with them, in place; which those are.

        Args:
            *args: the model's arguments; without any, those of its last call, once the clip is attached.
            **kwargs: and by name.

        Raises:
            NormMismatchError: as the class; a logit is not finite, or exceeds tau in a head that is `fixed`; or there are no arguments.  Nothing
                was changed.
        """
        if not args and not kwargs:
            if self._last is None:
                raise NormMismatchError(
                    "step_() needs the model's arguments, or attach(optimizer) and a call of the model before"
                )
            args, kwargs = self._last
        plan, largest = self._run(args, kwargs)
        over = [h for h in plan.fixed if largest[h] > self.tau]
        if torch.isnan(largest).any() or (largest == math.inf).any():
            bad = [head.name for head, s in zip(plan.heads, largest.tolist(), strict=True) if not s < math.inf]
            raise NormMismatchError(f"logits that are NaN or infinite, of {bad[0]}: nothing can scale them down")
        if over:
            raise NormMismatchError(
                with_details(
                    f"logits up to {largest[over].max():.4g} exceed tau = {self.tau:g}, and nothing scales them: {plan.heads[over[0]].name}",
                    instead="a tau that is above what queries and keys which are normalized without gains can reach",
                )
            )
        factors: dict[Entry, float] = {}
        gammas: dict[int, float] = {}
        sizes = largest.tolist()
        for some in plan.together:
            gamma = self.tau / max(self.tau, *(sizes[h] for h in some))
            if gamma < 1:
                gammas |= dict.fromkeys(some, gamma)
                of_each = powers(plan.heads, some, plan.owners, self.alpha)
                factors |= {entry: gamma**power for entry, power in of_each.items()}
        _multiply(dict(self._model.named_parameters()), factors, plan.scaled)
        return [Clipped(plan.heads[h].name, sizes[h], gammas[h]) for h in sorted(gammas)]

    def attach(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Clip after every step of an optimizer, for the arguments of the model's last call in training; handles with `remove()`.

        The model is called with its own `__call__`; the last arguments are kept.
        """

        def remember(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            has_data = not any(isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves((args, kwargs)))
            if module.training and has_data:  # others run it without, to learn something about it
                self._last = args, kwargs

        def clip(*_: Any) -> None:
            if self._last is not None:
                self.step_()

        return [
            self._given.register_forward_pre_hook(remember, with_kwargs=True),
            optimizer.register_step_post_hook(clip),
        ]

    def _run(self, args: tuple, kwargs: dict) -> tuple[_Plan, torch.Tensor]:
        """What the model does with arguments, and the largest logit of each head."""
        notes = follow_with_data(self._model, args, kwargs)
        plan = _Plan.of(notes, _frozen(self._model))
        of_each = [a.largest for a in notes.attentions if a.largest is not None]
        if len(of_each) < len(notes.attentions):
            raise NormMismatchError("the logits of an attention cannot be told from what is done with them before the softmax")
        largest = torch.stack([torch.stack([of_each[a][i] for a, i in head.at]).amax() for head in plan.heads])
        if self._group is not None:
            device = next(self._model.parameters()).device
            shared = largest.to(device)
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
            largest = shared.cpu()
        return plan, largest


@dataclass(frozen=True, eq=False)
class _Plan:
    """The heads of a run, those that are multiplied together, those that nothing multiplies, and who has which entries."""

    heads: list[Head]
    together: list[tuple[int, ...]]
    fixed: list[int]
    scaled: Scaled
    owners: Owners

    @staticmethod
    def of(notes: Notes, frozen: frozenset[str]) -> _Plan:
        if not notes.attentions:
            raise NormMismatchError(
                with_details(
                    "no attention is found: no softmax of products of activations",
                    distances="logits -|q - k|^2 are at most 0 whatever the weights: no tau is exceeded, and there is nothing to clip",
                    instead="attentions of torch (scaled_dot_product_attention), or written out; kernels of one's own are not looked into",
                )
            )
        heads, scaled = heads_of(notes, frozen), Scaled.of(notes)
        owners = Owners.of(heads, notes, scaled.axes, frozen)
        together = components(heads, owners)
        return _Plan(heads, together, sorted({*range(len(heads))}.difference(*together)), scaled, owners)


def _frozen(model: torch.nn.Module) -> frozenset[str]:
    """The parameters that stay what they are because others train and they do not; of a model that does not train, none."""
    frozen = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
    return frozen if any(p.requires_grad for p in model.parameters()) else frozenset()


def _multiply(parameters: Mapping[str, torch.Tensor], factors: Mapping[Entry, float], scaled: Scaled) -> None:
    """Multiply entries of parameters, with what the program adds to them; all others stay to the last bit."""
    of_each: dict[str, dict[int, float]] = {}
    for (name, at), factor in factors.items():
        of_each.setdefault(name, {})[at] = factor
    for name, entries in of_each.items():
        p = parameters[name]
        shape = [size if d in scaled.axes[name] else 1 for d, size in enumerate(p.shape)]
        flat = torch.ones(math.prod(shape), dtype=torch.float64)
        flat[list(entries)] = torch.tensor(list(entries.values()), dtype=torch.float64)
        factor = flat.view(shape).to(p.device)
        p.copy_(torch.where(factor == 1, p, scaled.made[name].multiplied(p, factor)))
