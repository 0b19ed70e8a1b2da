"""A program is run in normed mode, operation by operation, and each becomes a row of a report."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.core.context import COMPOSED, Mode, Sensitivity
from thunder_norm.core.results import following_inside
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.norms.eager_environment import Arithmetic, EagerEnvironment, Noted
from thunder_norm.norms.lifts.lifting import Otherwise
from thunder_norm.norms.lifts.parameters import Policy, detached, tensor_names
from thunder_norm.norms.sensitivity import movement, with_perturbation
from thunder_norm.op_names import op_key
from thunder_norm.report.rows import Findings, ReportRow


class AsModule(torch.nn.Module):
    """A function as a module without parameters."""

    def __init__(self, fn: Callable):
        super().__init__()
        self.forward = fn


@dataclass(frozen=True)
class Program:
    """A program, what it is run with, and how.

    Attributes:
        model: the module.
        args: its arguments.
        kwargs: the same, by name.
        policy: of its parameters' norms.
        mode: of the rules.
        own: tensors in place of the model's own.
        otherwise: what holds for parameters that a mapping does not name.
        scope: for which inputs sensitivities hold.
        radius: with scope "within", how far the inputs may be from the data, in their norms.
        per: a dimension of results, for the actual norm at each of its indices.
    """

    model: torch.nn.Module
    args: tuple
    kwargs: dict
    policy: Policy
    mode: Mode
    own: Mapping[str, torch.Tensor]
    otherwise: Otherwise = "measured"
    scope: Sensitivity = "global"
    radius: float = 0.0
    per: int | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return {**tensor_names(self.model), **self.own}

    def run(self, arithmetic: Callable[[], Arithmetic] = Arithmetic) -> Run:
        """The program with parameters and inputs that carry perturbations."""
        tensors = self.tensors
        # one detached tensor for each: only norm scalars are differentiated
        copies = {id(t): detached(t) for t in tensors.values()}
        args, kwargs = tree_map(self._perturbed, (self.args, self.kwargs))
        with contextlib.nullcontext() if self.scope in COMPOSED else following_inside():
            result, environment = run_eagerly(
                self.model,
                args,
                kwargs,
                policy=self.policy,
                mode=self.mode,
                sensitivity=self.scope,
                tensors={name: copies[id(t)] for name, t in tensors.items()},
                perturbed=True,
                otherwise=self.otherwise,
                arithmetic=arithmetic,
            )
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, NormedTensor)]
        results = {i: y for i, y in enumerate(tree_flatten(result)[0]) if isinstance(y, NormedTensor)}
        return Run(inputs, list(results.values()), list(results), environment, self.per)

    def _perturbed(self, x: Any) -> Any:
        if not isinstance(x, NormedTensor) or x.perturbation_size is not None:
            return x
        if self.scope == "within":  # its norm is that of what it may become
            x = type(x)._wrap(x.backing, x.norm_size + self.radius, None, x.elem_dims)
        return with_perturbation(x, self.radius)


@dataclass(frozen=True)
class Run:
    """What a program was given, what it returned (and in which leaves of that), what was seen on the way, and in parts along what."""

    inputs: list[NormedTensor]
    results: list[NormedTensor]
    places: list[int]
    environment: EagerEnvironment
    per: int | None = None

    def gains(self, targets: Sequence[NormedTensor]) -> list[float]:
        """How far the results move, together, when one of these moves by 1."""
        by_rules, inside = (self._gains([getattr(t, name) for t in targets]) for name in ("perturbation_size", "_inside"))
        return [g + more for g, more in zip(by_rules, inside, strict=True)]

    def _gains(self, sizes: Sequence[torch.Tensor | None]) -> list[float]:
        moving = [movement(y) for y in self.results if _moves(y)]
        wanted = {i: size for i, size in enumerate(sizes) if size is not None and size.requires_grad}
        gains = [0.0] * len(sizes)
        if moving and wanted:
            grads = torch.autograd.grad(sum(moving), [*wanted.values()], allow_unused=True, retain_graph=True)
            for i, g in zip(wanted, grads, strict=True):
                gains[i] = 0.0 if g is None else g.item()
        return gains

    def from_inputs(self) -> list[float]:
        """How far each operation's result moves when all inputs move by 1."""
        sizes = [x.perturbation_size for x in self.inputs if _moves(x)]
        gains = []
        for y in (n.out for n in self.environment.noted):
            moved = _moves(y) and bool(sizes)
            found = torch.autograd.grad(movement(y), sizes, retain_graph=True, allow_unused=True) if moved else ()
            gains.append(sum(g.item() for g in found if g is not None))
        return gains

    def findings(self, scope: Sensitivity, radius: float = 0.0) -> Findings:
        """The rows of the operations and of the parameters."""
        noted, parameters = self.environment.noted, list(self.environment.lifted.items())
        gains = self.gains([n.out for n in noted] + [p for _, p in parameters])
        if scope in COMPOSED:
            gains[: len(noted)] = self.from_inputs()
        by_name = {
            name: _row(Noted(_parameter, name.rpartition(".")[0], "", p), g, None)
            for (name, p), g in zip(parameters, gains[len(noted) :], strict=True)
        }
        rows = tuple(_row(n, g, self.per) for n, g in zip(noted, gains, strict=False))
        return Findings(rows, by_name, self.environment.infer(), scope=scope, radius=radius if scope == "within" else None)


def _parameter() -> None:
    """Stands in for the operation in the rows of parameters."""


def _moves(y: NormedTensor) -> bool:
    return y.perturbation_size is not None and y.perturbation_size.requires_grad


def _row(noted: Noted, gain: float, per: int | None) -> ReportRow:
    out = noted.out
    size = out.norm_size.item()
    actual = None
    if out.backing.device.type != "meta":
        actual = type(out).of(out.backing, out.elem_dims).norm_size.item()
    key = op_key(noted.func)
    return ReportRow(
        op="parameter" if noted.func is _parameter else key if isinstance(key, str) else noted.func.__name__,
        module=noted.module,
        location=noted.location,
        kind=type(out).__name__,
        elem_dims=out.elem_dims,
        shape=tuple(out.shape),
        norm_size=size,
        sensitivity=gain,
        actual=actual,
        tightness=None if actual is None else _tightness(actual, size),
        rule=noted.rule,
        arguments=noted.arguments,
        parts=None if per is None else _parts(out, per),
    )


def _tightness(actual: float, bound: float) -> float | None:
    """None of 0 and 0, of which nothing is lost; 1 of infinity twice, as masked scores have it."""
    if actual == bound:
        return 1.0 if bound else None
    return actual / bound if bound else math.inf if actual > 0 else math.nan


def _parts(out: NormedTensor, per: int) -> tuple[float, ...] | None:
    """The norm of what a result has at each index of a dimension, over those of its elem_dims that the parts have."""
    dim = per + out.ndim if per < 0 else per
    dims = [d % out.ndim for d in out.elem_dims]
    remaining = tuple(d - (d > dim) for d in dims if d != dim)
    if not 0 <= dim < out.ndim or dims == [dim] or out.backing.device.type == "meta":
        return None
    try:
        return tuple(type(out).of(part, remaining).norm_size.item() for part in out.backing.unbind(dim))
    except NormMismatchError:  # operators need both of theirs
        return None
