"""How far a result moves: the perturbations of its arguments, times the sensitivities that a rule states."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from thunder_norm.core.context import records_program
from thunder_norm.core.nonfinite import settled
from thunder_norm.core.registry import NormedOp, NormRule
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import JumpError, NormMismatchError
from thunder_norm.trees import flat_tensors


def recorded(size: torch.Tensor) -> torch.Tensor:
    """A number made from norm sizes: their derivatives stop where the program's do, perturbations go on."""
    if records_program():
        return size
    # a fake stands for a size of the program being traced, which may require grad in a call
    return size.detach() if size.requires_grad or isinstance(size, FakeTensor) else size


Where = tuple[str, int | None]  # an argument: its name, and where it is in a list


def perturbation_of(
    op: NormedOp, rule: NormRule, bound: inspect.BoundArguments, result: NormedTensor, without: Collection[Where] = ()
) -> torch.Tensor | None:
    """``sum_i L_i(n) d_i`` over the arguments that carry a perturbation; None if none does (then nothing is computed)."""
    moving = [m for m in _moving(bound) if m[0] not in without]
    if not moving:
        return None
    if result._is_multilinear:
        sensitivity = _partial_derivatives(rule, bound, result, [where for where, _ in moving])
    elif result._sensitivity is None:
        raise NormMismatchError(
            f"the norm rule {rule.fn.__qualname__} for {op.__qualname__} states no sensitivity, but {moving[0][0][0]!r} carries "
            "a perturbation_size; return Kind(value, sensitivity={...}) or Kind(value, multilinear=True)"
        )
    else:
        sensitivity = result._sensitivity
    total = None
    for (name, index), perturbation in moving:
        constant = sensitivity.get(name) if index is None else sensitivity[name][index]
        if constant is None:
            raise NormMismatchError(
                f"the norm rule {rule.fn.__qualname__} for {op.__qualname__} states no sensitivity to {name!r}"
            )
        if not isinstance(constant, torch.Tensor) and constant == 0:
            continue
        if isinstance(constant, torch.Tensor):
            constant = recorded(constant)
        term = _times(perturbation, constant, bound)
        total = term if total is None else total + term
    return torch.zeros_like(result.norm_size) if total is None else total


def _times(perturbation: torch.Tensor, constant: float | torch.Tensor, bound: inspect.BoundArguments) -> torch.Tensor:
    """How far something moves by a constant that may be infinite, or not known: not at all where nothing moves."""
    if isinstance(constant, torch.Tensor):
        constant = settled(constant, numbers_given(bound))
        return settled(perturbation * constant, (perturbation, constant), 0.0)
    return perturbation if constant == 1 else settled(perturbation * constant, (perturbation,), 0.0)


def numbers_given(bound: inspect.BoundArguments) -> Iterator[torch.Tensor]:
    """What a rule computes with: the norms of normed arguments, and plain tensors (statistics, say)."""
    return (v.norm_size if isinstance(v, NormedTensor) else v for v in flat_tensors(bound.arguments))


def moving_sizes(bound: inspect.BoundArguments) -> Iterator[torch.Tensor]:
    """How far all arguments move that do."""
    return (perturbation for _, perturbation in _moving(bound))


def lesser(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The lesser of two bounds on how far something moves: a or b itself, or of each leaf that moves what one of them says of it.

    As these move one after the other, what is true of each alone may be taken from either.  Of bounds of 0 it is the one that grows less.
    """
    by_a, by_b = _parts_of(a), _parts_of(b)
    leaves = list(dict.fromkeys((*by_a, *by_b)))
    if len(leaves) < 2 and (a.item() or b.item()):
        return a if a.item() <= b.item() else b
    of_a, of_b = _rates(a, leaves), _rates(b, leaves)
    if of_a is None or of_b is None:
        return a if a.item() <= b.item() else b
    pairs = list(zip(of_a, of_b, strict=True))
    if all(r.item() <= s.item() * (1 + 1e-9) for r, s in pairs):
        return a
    if all(s.item() <= r.item() for r, s in pairs):
        return b
    chosen = (r if r.item() <= s.item() else s for r, s in pairs)
    return functools.reduce(torch.add, (leaf * rate for leaf, rate in zip(leaves, chosen, strict=True)))


def _rates(size: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """How fast a size grows with each leaf that it is a sum of multiples of; None if it is not."""
    if not leaves or not size.requires_grad:
        rates = [torch.zeros_like(size) for _ in leaves]
    else:
        found = torch.autograd.grad(size, leaves, create_graph=True, allow_unused=True)
        rates = [torch.zeros_like(size) if r is None else r for r in found]
    total = sum(leaf.item() * r.item() for leaf, r in zip(leaves, rates, strict=True))
    return rates if abs(total - size.item()) <= 1e-6 * size.item() else None


def _parts_of(size: torch.Tensor) -> list[torch.Tensor]:
    """The perturbation_sizes that a size is made of."""
    if size.is_leaf:
        return [size] if size.requires_grad else []
    left, seen, found = [size.grad_fn], set(), {}
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and leaf.ndim == 0:  # matrices are leaves too
            found[leaf] = None
        left += [n for n, _ in node.next_functions]
    return [*found]


@dataclass(frozen=True, eq=False)
class Rest:
    """What a norm rule says of the arguments that nothing better is known of.

    Attributes:
        op: the operation.
        rule: its rule.
        bound: what the rule got.
        results: the normed results, as the rule made them.
    """

    op: NormedOp
    rule: NormRule
    bound: inspect.BoundArguments
    results: Sequence[NormedTensor]

    def of(self, given: Mapping[str, Any], known: Collection[int]) -> list[torch.Tensor | None] | None:
        """How far each result moves by the arguments that are not known; None if the rule does not say it argument by argument.

        Args:
            given: the arguments by name, as they were given.
            known: the identities of those that are.
        """
        slots: set[Where] = {(name, None) for name, value in given.items() if id(value) in known}
        slots |= {
            (name, i)
            for name, value in given.items()
            if isinstance(value, list | tuple)
            for i, v in enumerate(value)
            if id(v) in known
        }
        left = [perturbation_of(self.op, self.rule, self.bound, r, slots) for r in self.results]
        own = [r.perturbation_size is not None for r in self.results]
        return None if any(is_own and m is not None for is_own, m in zip(own, left, strict=True)) else left


def _moving(bound: inspect.BoundArguments) -> Iterator[tuple[Where, torch.Tensor]]:
    """The perturbations that arguments carry: (name, index in a list or None), perturbation_size."""
    for where, x in arguments_of(bound):
        if isinstance(x, NormedTensor) and x.perturbation_size is not None:
            yield where, x.perturbation_size


def arguments_of(bound: inspect.BoundArguments) -> Iterator[tuple[Where, Any]]:
    """The arguments of a call, those in lists each by itself."""
    for name, value in bound.arguments.items():
        if isinstance(value, list | tuple):
            yield from (((name, i), v) for i, v in enumerate(value))
        else:
            yield (name, None), value


def _partial_derivatives(rule: NormRule, bound: inspect.BoundArguments, result: NormedTensor, slots: list) -> dict[str, Any]:
    """Partial derivatives of a value affine in each norm size: ``V(.., 1, ..) - V(.., 0, ..)``, exact and differentiable."""
    if any(index is not None for _, index in slots):
        raise NormMismatchError("multilinear=True is for tensor arguments; state the sensitivities of a list of tensors")

    def value(name: str, size: float) -> torch.Tensor:
        x = bound.arguments[name]
        at = type(x)._wrap(x.backing, torch.full_like(x.norm_size, size), None, x.elem_dims)
        changed = inspect.BoundArguments(bound.signature, {**bound.arguments, name: at})
        return rule.run(changed).norm_size

    return {name: value(name, 1.0) - value(name, 0.0) for name, _ in slots}


# -- what jumps --------------------------------------------------------------------------------------------------------------

# How far a sign moves is asked of what is made of it next.  A factor that is 0 where the sign changes makes the jump good, as
# ``relu(|u| - t)`` does in soft thresholding, and the rule that sees both says so (`register_norm(takes_jumps=True)`); whatever else is
# made of it is refused, with the line of the jump.


def refuse_jumps(tensors: Iterable[NormedTensor]) -> None:
    """Refuse to say how far something moves that is made of these.

    Raises:
        JumpError: one of them jumps.
    """
    for x in tensors:
        if x._jump is not None:
            raise x._jump


def with_details_of_jumps(results: Iterable[NormedTensor], describe: Callable[[NormMismatchError], str]) -> None:
    """Let what results that jump are refused with have the details of their call."""
    for y in results:
        if y._jump is not None:
            y._jump = JumpError(describe(y._jump))
