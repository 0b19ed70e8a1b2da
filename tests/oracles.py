"""An adversary for norm rules, independent of the library's own norms.

A rule claims two things: ``|f(X)| <= V`` for all inputs in their balls, and ``|f(X + U) - f(X)| <= L_i |U|`` when input i
moves by U inside its ball.  `search` looks for inputs that break either claim, in float64: it starts from Gaussians, signs,
spikes and constants, and ascends with Frank-Wolfe steps (the ball's linear maximisation oracle) and gradient steps.
It returns *found / claimed*: a rule is sound if no ratio exceeds 1, and tight where the ratio reaches 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from thunder_norm.tensors import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSConvTensor,
    RMSToRMSTensor,
)

Dims = tuple[int, ...]
# Above rounding: the searches use central differences of step 1e-6 in float64.
SOUND = 1 + 1e-5


@dataclass(frozen=True)
class Ball:
    """One normed input: all float64 tensors of `shape` whose `kind` norm over `elem_dims` is at most `norm_size`.

    `domain` optionally restricts it further: a total map from tensors to allowed tensors that does not increase the norm.
    """

    name: str
    kind: type[NormedTensor]
    shape: tuple[int, ...]
    norm_size: float = 1.0
    elem_dims: Dims | None = None
    domain: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def dims(self) -> Dims:
        """Canonical elem_dims."""
        return self.kind._wrap(torch.empty(self.shape, device="meta"), torch.ones(()), None, self.elem_dims).elem_dims

    def normed(self, backing: torch.Tensor, perturbation: float | None = None) -> NormedTensor:
        """The library's tensor for this ball."""
        return self.kind(self.norm_size, backing=backing, elem_dims=self.elem_dims, perturbation_size=perturbation)

    def norm(self, t: torch.Tensor) -> torch.Tensor:
        """The norm of `t`."""
        return norm(self.kind, t, self.dims)

    def point(self, t: torch.Tensor, radius: float) -> torch.Tensor:
        """The nearest we care to go: `t` inside the ball of `radius`, in the domain."""
        t = project(self.kind, t, self.dims, radius)
        return t if self.domain is None else self.domain(t)


@dataclass
class Found:
    """What `search` found, as found / claimed."""

    value: float
    sensitivity: dict[str, float] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether nothing found exceeds what was claimed."""
        return all(r <= SOUND for r in (self.value, *self.sensitivity.values()))

    @property
    def lowest(self) -> float:
        """The loosest claim."""
        return min((self.value, *self.sensitivity.values()))


# -- norms, their balls and linear maximisation oracles -----------------------------------------------------------------


def norm(kind: type[NormedTensor], t: torch.Tensor, dims: Dims) -> torch.Tensor:
    """The norm of a plain tensor, differentiable, 0-dim."""
    if t.numel() == 0:
        return t.new_zeros(())
    if issubclass(kind, RMSToRMSTensor):
        m, scale = _matrices(kind, t, dims)
        return torch.linalg.matrix_norm(m, 2).amax() * scale
    return _group_norm(kind, t, dims).amax()


def _group_norm(kind: type[NormedTensor], t: torch.Tensor, dims: Dims) -> torch.Tensor:
    if issubclass(kind, LinfTensor) or not dims:
        return t.abs()
    if issubclass(kind, L1Tensor):
        return t.abs().sum(dims, keepdim=True)
    squares = t.square().sum(dims, keepdim=True)
    if issubclass(kind, RMSTensor):
        squares = squares / math.prod(t.shape[d] for d in dims)
    elif not issubclass(kind, L2Tensor):
        raise TypeError(f"the oracle knows no norm for {kind.__name__}")
    return squares.clamp(min=1e-300).sqrt()


def _matrices(kind: type[RMSToRMSTensor], t: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, float]:
    """A stack of matrices [out, in] and the factor that turns a spectral norm into the kind's norm."""
    m = t.movedim(dims, (-2, -1))
    scale = math.sqrt(m.shape[-1] / m.shape[-2])
    if issubclass(kind, RMSToRMSConvTensor):
        taps = math.prod(m.shape[:-2])
        m = m.unflatten(-2, (kind.groups, m.shape[-2] // kind.groups))
        return m, taps * math.sqrt(m.shape[-1] / m.shape[-2])
    return m, scale


def _unmatrices(kind: type[RMSToRMSTensor], m: torch.Tensor, dims: Dims) -> torch.Tensor:
    if issubclass(kind, RMSToRMSConvTensor):
        m = m.flatten(-3, -2)
    return m.movedim((-2, -1), dims)


def lmo(kind: type[NormedTensor], g: torch.Tensor, dims: Dims) -> torch.Tensor:
    """The tensor of norm 1 with the largest inner product with `g`."""
    if issubclass(kind, RMSToRMSTensor):
        m, scale = _matrices(kind, g, dims)
        u, _, v = torch.linalg.svd(m, full_matrices=False)
        return _unmatrices(kind, u @ v / scale, dims)
    if issubclass(kind, LinfTensor) or not dims:
        return torch.where(g >= 0, 1.0, -1.0).to(g.dtype)
    if issubclass(kind, L1Tensor):
        flat, restore = _flatten_dims(g, dims)
        best = flat.abs().argmax(-1, keepdim=True)
        return restore(torch.zeros_like(flat).scatter(-1, best, flat.gather(-1, best).sign()))
    return g / _group_norm(kind, g, dims).clamp(min=1e-30)


def _flatten_dims(t: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    last = tuple(range(-len(dims), 0))
    moved = t.movedim(dims, last)
    return moved.flatten(-len(dims)), lambda flat: flat.reshape(moved.shape).movedim(last, dims)


def project(kind: type[NormedTensor], t: torch.Tensor, dims: Dims, radius: float) -> torch.Tensor:
    """`t` moved into the ball, one group at a time (a matrix: singular values clipped)."""
    if issubclass(kind, RMSToRMSTensor):
        m, scale = _matrices(kind, t, dims)
        u, s, v = torch.linalg.svd(m, full_matrices=False)
        return _unmatrices(kind, u * s.clamp(max=radius / scale).unsqueeze(-2) @ v, dims)
    if issubclass(kind, LinfTensor) or not dims:
        return t.clamp(-radius, radius)
    size = _group_norm(kind, t, dims)
    return torch.where(size > radius, t * (radius / size.clamp(min=1e-30)), t)


def fill(kind: type[NormedTensor], t: torch.Tensor, dims: Dims, radius: float) -> torch.Tensor:
    """`t` scaled so that every group (matrix) has exactly this norm."""
    if issubclass(kind, RMSToRMSTensor):
        m, scale = _matrices(kind, t, dims)
        largest = torch.linalg.matrix_norm(m, 2)[..., None, None].clamp(min=1e-30)
        return _unmatrices(kind, m / largest * (radius / scale), dims)
    return t * (radius / _group_norm(kind, t, dims).clamp(min=1e-30))


def start(ball: Ball, which: int, generator: torch.Generator) -> torch.Tensor:
    """A starting point of norm 1, one of eight sorts."""
    t = torch.randn(ball.shape, generator=generator, dtype=torch.float64)
    if issubclass(ball.kind, RMSToRMSTensor):
        m, _ = _matrices(ball.kind, t, ball.dims)
        rank_one = [m[..., :1] * m[..., :1, :], torch.ones_like(m), m[..., :1].sign() * m[..., :1, :].sign()]
        u, _, v = torch.linalg.svd(m, full_matrices=False)
        eye = torch.eye(*m.shape[-2:], dtype=m.dtype).expand_as(m)
        m = [m, *rank_one, u @ v, eye, rank_one[0], u @ v][which % 8]
        return fill(ball.kind, _unmatrices(ball.kind, m, ball.dims), ball.dims, 1.0)
    spike = torch.zeros_like(t)
    if t.numel():
        flat, restore = _flatten_dims(spike, ball.dims) if ball.dims else (spike.unsqueeze(-1), lambda f: f.squeeze(-1))
        at = torch.randint(flat.shape[-1], (*flat.shape[:-1], 1), generator=generator)
        spike = restore(flat.scatter(-1, at, 1.0)) * torch.where(t >= 0, 1.0, -1.0)
    first = spike.abs() if which % 8 == 6 else spike
    ones = torch.ones_like(t)
    t = [t, t.sign(), spike, ones, t.abs(), -ones, first, t + 2][which % 8]
    return fill(ball.kind, t, ball.dims, 1.0)


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
    claimed = _claims(call, balls, generator)
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
        best = max(
            _search_sensitivity(call, out_norm, balls, k, i, generator, steps, witnesses)
            for i in range(restarts + len(witnesses))
        )
        found.sensitivity[ball.name] = _ratio(best, claimed["sensitivity"][k])
    return found


def check(call: Callable[..., torch.Tensor], balls: Sequence[Ball], *, tight: float = 0.99, **options) -> Found:
    """`search`, and assert that nothing exceeds the claim and that everything reaches `tight` of it."""
    found = search(call, balls, **options)
    assert found.is_sound, f"unsound: found / claimed = {found}"
    assert found.lowest >= tight, f"not attained to {tight}: found / claimed = {found}"
    return found


@dataclass(frozen=True)
class Case:
    """One row of a table of rules: an operation, its inputs, and how much of each claim the search must attain."""

    name: str
    call: Callable[..., torch.Tensor]
    balls: tuple[Ball, ...]
    tight: float = 0.99
    options: dict = field(default_factory=dict)

    def check(self) -> Found:
        """Sound, and attained to `tight`."""
        return check(self.call, self.balls, tight=self.tight, **{"restarts": 8, "steps": 20, **self.options})

    def check_at(self, size: float) -> None:
        """With all norms `size`, possibly 0: finite sizes, no NaN in their derivatives."""
        sizes = [torch.tensor(size, dtype=torch.float64, requires_grad=True) for _ in self.balls]
        generator = torch.Generator().manual_seed(0)
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


def _claims(call: Callable, balls: Sequence[Ball], generator: torch.Generator) -> dict:
    points = [b.point(start(b, 0, generator) * b.norm_size, b.norm_size) for b in balls]
    out = call(*[b.normed(p) for b, p in zip(balls, points, strict=True)])
    constants = []
    for i in range(len(balls)):
        moved = call(*[b.normed(p, 1.0 if i == j else None) for j, (b, p) in enumerate(zip(balls, points, strict=True))])
        constants.append(0.0 if moved.perturbation_size is None else moved.perturbation_size.item())
    assert isinstance(out, NormedTensor), f"the operation returned {type(out).__name__}, no norm"
    return {"out": out, "value": out.norm_size.item(), "sensitivity": constants}


def _ratio(found: float, claimed: float) -> float:
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
    for step in range(steps):
        for gamma in (None, 1.0, 2 / (step + 2), 0.1, -0.3, -0.03):
            if gamma is None and first is None:
                continue
            moved = [
                _move(b, x, g, r, 1.0 if gamma is None else gamma) if gamma is not None or i == first else x
                for i, (b, x, g, r) in enumerate(zip(balls, points, grads, radii, strict=True))
            ]
            new_value, new_grads = _value_and_grads(f, moved)
            if new_value > value * (1 + 1e-9):
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
    leaves = [p.detach().requires_grad_() for p in points]
    value = f(leaves)
    if not value.requires_grad:
        return value.item(), [torch.zeros_like(p) for p in leaves]
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    return value.item(), [torch.zeros_like(p) if g is None else torch.nan_to_num(g) for g, p in zip(grads, leaves, strict=True)]


def _search_sensitivity(
    call: Callable,
    out_norm: Callable,
    balls: Sequence[Ball],
    k: int,
    restart: int,
    generator: torch.Generator,
    steps: int,
    witnesses: Sequence[Sequence[torch.Tensor]],
) -> float:
    """Largest ``|f(X + h u) - f(X - h u)| / (2 h)`` over X and unit u, for a small or a large h."""
    ball = balls[k]
    # X stays where X + h u and X - h u are both inside; a large h makes it a secant between two far points
    h = (1e-6, 1e-6, 1e-6, 0.3, 1.0)[restart % 5] * ball.norm_size or 1e-6
    radii = [max(b.norm_size - h, 0.0) if j == k else b.norm_size for j, b in enumerate(balls)]
    if restart < len(witnesses):
        points = [b.point(w.double(), r) for b, w, r in zip(balls, witnesses[restart], radii, strict=True)]
        h = 1e-6 * ball.norm_size or 1e-6
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
        return out_norm(call(*ahead).double() - call(*behind).double()) / (2 * h * size)

    return _ascend(
        slope,
        [*points, direction],
        [*balls, direction_ball],
        [*radii, 1.0],
        steps,
        first=len(points) if restart % 2 == 0 else None,
    )
