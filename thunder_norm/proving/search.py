"""An adversary for norm rules, independent of the library's own norms.

A rule claims two things: ``|f(X)| <= V`` for all inputs in their balls, and ``|f(X + U) - f(X)| <= L_i |U|`` when input i
moves by U inside its ball.  `search` looks for inputs that break either claim, in float64: it starts from Gaussians, signs,
spikes and constants, and ascends with Frank-Wolfe steps (the ball's linear maximisation oracle) and gradient steps.
The slope along U is a quotient of differences, and its ascent in U with the oracle is a power iteration on the Jacobian.
Found / claimed is what comes back: a rule is sound if no ratio exceeds 1, and tight where the ratio reaches 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from thunder_norm.errors import LooseRuleError, UnsoundRuleError
from thunder_norm.proving.balls import Ball, lmo, norm, start
from thunder_norm.tensors import NormedTensor

# What a search may find above a claim: nothing but rounding, which the slopes allow for themselves.
SOUND = 1 + 1e-6
# The relative half step of central differences.  Both ends stay in the ball, where a finite difference is bounded by the
# sensitivity as well: so a larger step costs no soundness, and a smaller one only what rounding may add.
_STEP = 1e-6
_HUGE = 1e100
_EPS = torch.finfo(torch.float64).eps


@dataclass
class Found:
    """What `search` found, as found / claimed; NaN where the claim is beyond what can be searched."""

    value: float
    sensitivity: dict[str, float] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether nothing found exceeds what was claimed."""
        return not any(r > SOUND for r in self._ratios)

    @property
    def lowest(self) -> float:
        """The loosest claim."""
        return min((r for r in self._ratios if not math.isnan(r)), default=1.0)

    @property
    def _ratios(self) -> tuple[float, ...]:
        return (self.value, *self.sensitivity.values())


# -- the searches -------------------------------------------------------------------------------------------------------


def search(
    call: Callable[..., torch.Tensor],
    balls: Sequence[Ball],
    *,
    restarts: int = 8,
    steps: int = 25,
    seed: int = 0,
    witnesses: Sequence[Sequence[torch.Tensor]] = (),
    sensitivity: bool = True,
    only: Sequence[str] | None = None,
) -> Found:
    """Search for the largest output norm and the largest sensitivities of ``call(*inputs)``, relative to what its rule claims.

    Args:
        call: the operation; called with one tensor for each ball, NormedTensor (to learn the claim) or plain float64.
        balls: the normed inputs, in the order of `call`'s arguments.
        restarts: number of starting points for each quantity.
        steps: most ascent steps from each.
        seed: of the starting points.
        witnesses: further starting points, tuples with one tensor for each ball.
        sensitivity: whether to search sensitivities as well.
        only: names of the balls whose sensitivity to search; all if None.
    """
    generator = torch.Generator().manual_seed(seed)
    claimed = _claims(call, balls, generator, sensitivity)
    out_kind, out_dims = type(claimed["out"]), claimed["out"].elem_dims

    def out_norm(t: torch.Tensor) -> torch.Tensor:
        return norm(out_kind, t.double(), out_dims)

    radii = [b.norm_size for b in balls]

    def size(points: list[torch.Tensor]) -> torch.Tensor:
        return out_norm(call(*points))

    best = 0.0
    for i in range(restarts + len(witnesses)):
        if i < len(witnesses):
            points = [b.point(w.double(), b.norm_size) for b, w in zip(balls, witnesses[i], strict=True)]
        else:
            points = [b.point(start(b, _sort(i, j), generator) * b.norm_size, b.norm_size) for j, b in enumerate(balls)]
        best = max(best, _ascend(size, points, balls, radii, steps))
    found = Found(_ratio(best, claimed["value"]))
    if not sensitivity:
        return found
    for k, ball in enumerate(balls):
        if only is not None and ball.name not in only:
            continue
        # what rounding of inputs and of results may add to a difference, whatever cancels on the way
        carried = sum(c * b.norm_size for c, b in zip(claimed["sensitivity"], balls, strict=True))
        rounding = 4 * _EPS * (claimed["value"] + carried)
        best = max(
            _search_sensitivity(call, out_norm, balls, k, i, generator, steps, witnesses, rounding)
            for i in range(restarts + len(witnesses))
        )
        found.sensitivity[ball.name] = _ratio(best, claimed["sensitivity"][k])
    return found


def check(call: Callable[..., torch.Tensor], balls: Sequence[Ball], *, tight: float = 0.99, **options) -> Found:
    """`search`, and insist that nothing exceeds the claim and that everything reaches `tight` of it.

    Raises:
        UnsoundRuleError: a claim is too small.
        LooseRuleError: a claim is further from what was found than `tight` says.
    """
    found = search(call, balls, **options)
    if not found.is_sound:
        raise UnsoundRuleError(f"unsound: found / claimed = {found}", found)
    if found.lowest < tight:
        raise LooseRuleError(f"not attained to {tight}: found / claimed = {found}", found)
    return found


@dataclass(frozen=True)
class Case:
    """One row of a table of rules: an operation, its inputs, and how much of each claim the search must attain."""

    name: str
    call: Callable[..., torch.Tensor]
    balls: tuple[Ball, ...]
    tight: float = 0.99
    options: dict = field(default_factory=dict)

    def check(self, seed: int = 0) -> Found:
        """Sound, and attained to `tight`; `seed` is that of the search's starting points."""
        return check(self.call, self.balls, tight=self.tight, **{"restarts": 8, "steps": 20, "seed": seed, **self.options})

    def check_at(self, size: float, seed: int = 0) -> None:
        """With all norms `size`, possibly 0: finite sizes, no NaN in their derivatives."""
        sizes = [torch.tensor(size, dtype=torch.float64, requires_grad=True) for _ in self.balls]
        generator = torch.Generator().manual_seed(seed)
        inputs = [
            b.kind(n, backing=start(b, 0, generator) * size, elem_dims=b.elem_dims, perturbation_size=1.0)
            for b, n in zip(self.balls, sizes, strict=True)
        ]
        out = self.call(*inputs)
        for claim in (out.norm_size, out.perturbation_size):
            assert torch.isfinite(claim), claim
            if claim.requires_grad:
                grads = torch.autograd.grad(claim, sizes, allow_unused=True, retain_graph=True)
                assert all(g is None or torch.isfinite(g) for g in grads), grads


def _claims(call: Callable, balls: Sequence[Ball], generator: torch.Generator, sensitivity: bool) -> dict:
    points = [b.point(start(b, 0, generator) * b.norm_size, b.norm_size) for b in balls]
    out = call(*[b.normed(p) for b, p in zip(balls, points, strict=True)])
    if not isinstance(out, NormedTensor):
        raise TypeError(f"the operation returned {type(out).__name__}, no norm")
    constants = []
    for i in range(len(balls) if sensitivity else 0):
        moved = call(*[b.normed(p, 1.0 if i == j else None) for j, (b, p) in enumerate(zip(balls, points, strict=True))])
        constants.append(0.0 if moved.perturbation_size is None else moved.perturbation_size.item())
    return {"out": out, "value": out.norm_size.item(), "sensitivity": constants}


def _ratio(found: float, claimed: float) -> float:
    if claimed > _HUGE:  # its square is not a number any more
        return math.nan
    if claimed == 0:
        return 1.0 if found < 1e-12 else math.inf
    return found / claimed


def _sort(restart: int, argument: int) -> int:
    """Which sort of start: the same for all arguments first, then mixed."""
    return restart if restart < 4 else restart + argument * (restart // 4)


def _ascend(
    f: Callable, points: list[torch.Tensor], balls: Sequence[Ball], radii: list[float], steps: int, first: int | None = None
) -> float:
    """Largest f found from `points` by Frank-Wolfe and gradient steps that stay in the balls; `first` moves alone first."""
    value, grads = _value_and_grads(f, points)
    if not math.isfinite(value):
        return 0.0
    for step in range(steps):
        for gamma in (None, 1.0, 2 / (step + 2), 0.1, -0.3, -0.03):
            if gamma is None and first is None:
                continue
            moved = [
                _move(b, x, g, r, 1.0 if gamma is None else gamma) if gamma is not None or i == first else x
                for i, (b, x, g, r) in enumerate(zip(balls, points, grads, radii, strict=True))
            ]
            new_value, new_grads = _value_and_grads(f, moved)
            # a result that overflows says nothing
            if math.inf > new_value > value * (1 + 1e-9):
                break
        else:
            break
        points, value, grads = moved, new_value, new_grads
    return value


def _move(ball: Ball, x: torch.Tensor, g: torch.Tensor, radius: float, gamma: float) -> torch.Tensor:
    """A Frank-Wolfe step (gamma > 0) or a projected gradient step of relative length -gamma."""
    if not g.abs().max() > 0:
        return x
    if gamma > 0:
        x = (1 - gamma) * x + gamma * radius * lmo(ball.kind, g, ball.dims)
    else:
        x = x - gamma * radius * g / g.abs().max()
    return ball.point(x, radius)


def _value_and_grads(f: Callable, points: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    leaves = [p.detach().contiguous().requires_grad_() for p in points]
    try:
        value = f(leaves)
        if not value.requires_grad:
            return value.item(), [torch.zeros_like(p) for p in leaves]
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
    except RuntimeError as e:
        if not any(word in str(e) for word in ("derivative", "autograd formula")):
            raise
        # torch has none for this operation: the starting points alone
        return f([p.detach() for p in points]).item(), [torch.zeros_like(p) for p in points]
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]  # embedding(sparse=True)
    return value.item(), [torch.zeros_like(p) if g is None else torch.nan_to_num(g) for g, p in zip(dense, leaves, strict=True)]


def _search_sensitivity(
    call: Callable,
    out_norm: Callable,
    balls: Sequence[Ball],
    k: int,
    restart: int,
    generator: torch.Generator,
    steps: int,
    witnesses: Sequence[Sequence[torch.Tensor]],
    rounding: float,
) -> float:
    """Largest ``|f(X + h u) - f(X - h u)| / (2 h)`` over X and unit u, for a small or a large h."""
    ball = balls[k]
    # X stays where X + h u and X - h u are both inside; a large h makes it a secant between two far points
    h = (_STEP, _STEP, _STEP, 0.3, 1.0)[restart % 5] * ball.norm_size or _STEP
    radii = [max(b.norm_size - h, 0.0) if j == k else b.norm_size for j, b in enumerate(balls)]
    if restart < len(witnesses):
        points = [b.point(w.double(), r) for b, w, r in zip(balls, witnesses[restart], radii, strict=True)]
        h = _STEP * ball.norm_size or _STEP
    else:
        i = restart - len(witnesses)
        # many constants are largest near zero, or where nothing has saturated yet
        shrink = (1.0, 1.0, 1e-3, 0.3)[i % 4]
        points = [
            b.point(start(b, _sort(i, j), generator) * r * (shrink if j == k else 1.0), r)
            for j, (b, r) in enumerate(zip(balls, radii, strict=True))
        ]
    direction = start(ball, restart + restart // 3, generator)
    direction_ball = Ball("direction", ball.kind, ball.shape, 1.0, ball.elem_dims)

    def slope(inputs: list[torch.Tensor]) -> torch.Tensor:
        *xs, u = inputs
        x, size = xs[k], direction_ball.norm(u).clamp(min=1e-12)
        ahead, behind = ([*xs[:k], x + s * h * u, *xs[k + 1 :]] for s in (1, -1))
        end, begin = call(*ahead).double(), call(*behind).double()
        return (out_norm(end - begin) - rounding) / (2 * h * size)

    return _ascend(
        slope,
        [*points, direction],
        [*balls, direction_ball],
        [*radii, 1.0],
        steps,
        first=len(points) if restart % 2 == 0 else None,
    )
