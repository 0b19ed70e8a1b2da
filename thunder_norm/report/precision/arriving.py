"""How much of the roundings of a program arrives at its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError, with_details
from thunder_norm.norms.eager_environment import EagerEnvironment
from thunder_norm.report.precision.roundings import TYPICAL, Point, Recorder
from thunder_norm.report.rows import Rounding

# Random directions in the space of the results, of which the variance is estimated.
_DIRECTIONS = 16


# A normed tensor, and how far its entries move.
Moved = tuple[NormedTensor, torch.Tensor]


def movers(environment: EagerEnvironment, inputs: Sequence[NormedTensor], points: Sequence[Point]) -> list[list[Moved]]:
    """For each point the normed tensors that stand for what moves by it, and how far they do: none where the program does not follow it."""
    lifting = environment.lifting
    of_tensor = {id(x.backing): [x] for x in inputs} | {id(n.out.backing): [n.out] for n in reversed(environment.noted)}

    def of(t: torch.Tensor) -> list[NormedTensor]:
        name = lifting.name_of(t)
        if name is not None:
            return [lifting.lifted[name]] if name in lifting.lifted else []
        return of_tensor.get(id(t)) or lifting.norms_of_derived(t)

    return [[(x, error) for t, error in p.passed_on or [(p.source, p.error.most)] for x in of(t)] for p in points]


def shares(
    recorder: Recorder,
    moved: Sequence[Sequence[Moved]],
    gains: Sequence[Sequence[float]],
    results: Sequence[torch.Tensor],
    place_of: Callable[[Point], object],
) -> dict[object, Rounding]:
    """What is added and what arrives, summed for each place that points have.

    Args:
        recorder: has the points.
        moved: for each the tensors that move by it, and how far.
        gains: for each of those the sensitivity of the results to it.
        results: of the program, in the graph of derivatives.
        place_of: whose rounding one is.
    """
    absorbed = [recorder.is_absorbed(p, results) for p in recorder.points]
    variances = _variances(recorder.points, absorbed, results)
    found: dict[object, list[tuple[str, float, float, float, float]]] = {}
    rows = zip(recorder.points, absorbed, moved, gains, variances, strict=True)
    for point, is_absorbed, tensors, sensitivities, variance in rows:
        added = max((_size(x, error) for x, error in tensors), default=math.nan)
        sizes = [_size(x, torch.where(error.isinf(), 0.0, error) if is_absorbed else error) for x, error in tensors]
        # beyond the largest number nothing is of first order
        arriving = sum((s * g if g or math.isfinite(s) else s for s, g in zip(sizes, sensitivities, strict=True)), start=0.0)
        if arriving == 0 and variance > 0:  # inside of what is known as a whole (a normalization written out) no rule follows it
            arriving = math.inf
        typical = point.error.likely.double().square().mean().sqrt().item() * TYPICAL
        name = str(point.dtype).removeprefix("torch.")
        found.setdefault(place_of(point), []).append((name, added, typical, arriving, variance))
    return {place: _together(parts) for place, parts in found.items()}


def _size(x: NormedTensor, error: torch.Tensor) -> float:
    """An error in the norm of what moves by it."""
    return type(x).of(error.reshape(x.shape).to(x.dtype), x.elem_dims).norm_size.item()


def _together(parts: list[tuple[str, float, float, float, float]]) -> Rounding:
    names, added, typical, arriving, variances = zip(*parts, strict=True)
    return Rounding(tuple(dict.fromkeys(names)), sum(added), math.hypot(*typical), sum(arriving), math.sqrt(sum(variances)))


def _variances(points: Sequence[Point], absorbed: Sequence[bool], results: Sequence[torch.Tensor]) -> list[float]:
    """For each point the mean square, over the entries of the results, of the error that its roundings make.

    ``E_v sum_j (J^T v)_j^2 s_j^2`` for random signs v and standard deviations s_j of the entries' roundings (Hutchinson 1989).  Infinity that makes
    a difference, as that in a softmax of others, does so whatever the derivative is.

    Raises:
        NormMismatchError: PyTorch's derivative of an operation fails.
    """
    results = [y for y in results if y.requires_grad]
    found = [0.0] * len(points)
    if not results or not points:
        return found
    generator = torch.Generator().manual_seed(0)
    for _ in range(_DIRECTIONS):
        signs = [_signs(y, generator) for y in results]
        try:
            grads = torch.autograd.grad(results, [p.tensor for p in points], signs, retain_graph=True, allow_unused=True)
        except RuntimeError as e:
            raise _without_derivatives(e) from e
        for i, (p, is_absorbed, g) in enumerate(zip(points, absorbed, grads, strict=True)):
            if g is not None:
                parts = (g.double() * p.error.likely * TYPICAL).square()
                is_none = (g == 0) & (p.error.likely.isfinite() | is_absorbed)
                found[i] += torch.where(is_none, 0.0, parts.nan_to_num(nan=math.inf)).sum().item() / _DIRECTIONS
    return found


def _without_derivatives(error: RuntimeError) -> NormMismatchError:
    return NormMismatchError(
        with_details(
            "precision: PyTorch has no derivatives of this program, which say how far roundings go",
            why=str(error).partition("\n")[0],
            instead="norm_report without precision",
        )
    )


def _signs(y: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    bits = torch.randint(2, y.shape, generator=generator, dtype=torch.int8)
    return (bits.to(y.device, y.dtype) * 2 - 1) / math.sqrt(max(y.numel(), 1))
