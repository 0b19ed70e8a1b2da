"""Random programs of operations on norms: an adversary ascends in float64 to exceed what is claimed of them.

Claimed are the norm of the result, how far it moves for all inputs within their norms (``global``, ``composed``), at the data
(``local``) and near them (``within``).
"""

from __future__ import annotations

import linecache
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    norm_sensitivity,
    sensitivities,
    with_perturbation,
)
from thunder_norm.audit import Ball, search
from thunder_norm.audit.balls import lmo, norm, norms, project
from thunder_norm.audit.search import Found
from thunder_norm.core.context import Sensitivity

from .bounds_expressions import EXPRESSIONS
from .program import Outcome, outcome_of

KINDS: dict[str, type[NormedTensor]] = {k.__name__: k for k in (RMSTensor, L2Tensor, L1Tensor, LinfTensor)}
_SHAPES = ((4,), (2, 3), (3, 4), (1, 5), (2, 1, 4), (2, 3, 4), (3, 4, 4), (2, 2, 3, 4), (1, 2, 4, 4), (1, 1))
_MOST_ENTRIES = 200
_HUGE = 1e30
_FUNCTION = re.compile(r"(?:torch|F|x)\.[\w.]+(?=\()|@")


def c(seed: int, *shape: int) -> torch.Tensor:
    """A constant."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def index(seed: int, high: int, *shape: int) -> torch.Tensor:
    """A constant of integers."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def mask(seed: int, *shape: int) -> torch.Tensor:
    """A constant of booleans, of which some rows are all true or all false."""
    drawn = c(seed, *shape) > 0
    return drawn if not shape or seed % 3 else drawn | (c(seed + 1, *shape[:-1], 1) > 0)


_NAMESPACE = {"torch": torch, "F": F, "c": c, "index": index, "mask": mask, "inf": math.inf}


@dataclass(frozen=True)
class Bounded:
    """Statements on inputs x and z.

    Attributes:
        statements: of a program that leaves its result in x.
        shape: of x, and of z.
        kind: the kind of their norms.
        dims: the dimensions these run over.
        sizes: the norms.
        scope: what sensitivity is claimed.
        seed: of the data and the search.
    """

    statements: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str
    dims: tuple[int, ...]
    sizes: tuple[float, float]
    scope: Sensitivity
    seed: int

    def function(self) -> Callable[..., Any]:
        """The program."""
        text = "def f(x, z):\n" + "".join(f"    {s}\n" for s in self.statements) + "    return x\n"
        name, scope = f"<bounds {abs(hash(text))}>", dict(_NAMESPACE)
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), scope)
        return scope["f"]

    @property
    def uses_both(self) -> bool:
        """Whether the second input is used."""
        return any(re.search(r"\bz\b", s) for s in self.statements)

    def balls(self) -> list[Ball]:
        """What the inputs may be."""
        return [Ball(n, KINDS[self.kind], self.shape, s, self.dims) for n, s in zip("xz", self.sizes, strict=True)]

    def run(self) -> Outcome:
        """The claims, against what is found."""
        f = self.function()
        balls = self.balls()
        generator = torch.Generator().manual_seed(self.seed)
        points = [
            b.point(torch.randn(b.shape, generator=generator, dtype=torch.float64) * b.norm_size, b.norm_size) for b in balls
        ]
        try:
            plain = f(*(p.clone() for p in points))
        except Exception as e:  # noqa: BLE001 - what torch does not do, nobody has to
            return Outcome("no oracle", f"{type(e).__name__}: {e}")
        if not isinstance(plain, torch.Tensor) or plain.is_complex() or not plain.is_floating_point():
            return Outcome("no oracle", "no numbers")
        try:
            out = f(*(b.normed(p) for b, p in zip(balls, points, strict=True)))
            if not isinstance(out, NormedTensor):
                return Outcome("no oracle", "depends on nothing")
            if math.isnan(out.norm_size.item()):
                return Outcome("wrong", "the norm is NaN")
            found = search(f, balls, restarts=8, steps=12, seed=self.seed, sensitivity=False)
            if not found.is_sound:
                return Outcome("wrong", f"value: found / claimed = {found.value}, claimed {out.norm_size.item()}")
            moved = self._moved(f, balls, points)
        except Exception as e:  # noqa: BLE001 - an outcome
            return outcome_of(e)
        if any(math.isnan(r) for r in moved.sensitivity.values()) and self._claims_nan(f, balls, points):
            return Outcome("wrong", "a sensitivity is NaN")
        if not moved.is_sound:
            return Outcome("wrong", f"{self.scope}: found / claimed = {moved.sensitivity}")
        return Outcome("right", f"{found.value:.2f} {moved.sensitivity}")

    def _moved(self, f: Callable, balls: Sequence[Ball], points: Sequence[torch.Tensor]) -> Found:
        with norm_sensitivity(self.scope):
            if self.scope in ("global", "composed"):
                only = "xz" if self.uses_both else "x"
                return search(f, balls, restarts=8, steps=12, seed=self.seed, only=only)
            return self._near(f, balls[0], points)

    def _claims_nan(self, f: Callable, balls: Sequence[Ball], points: Sequence[torch.Tensor]) -> bool:
        with norm_sensitivity(self.scope):
            x = with_perturbation(balls[0].normed(points[0]))
            return math.isnan(sensitivities(f(x, balls[1].normed(points[1])), x).item())

    def _near(self, f: Callable, ball: Ball, points: Sequence[torch.Tensor]) -> Found:
        """At the data, or within a radius of them: the steepest of slopes from the data and of Jacobians nearby."""
        x, z = points
        radius = 0.0 if self.scope == "local" else (0.0, 1e-3, 0.3)[self.seed % 3] * max(ball.norm_size, 0.1)
        size = max(ball.norm_size, ball.norm(x).item()) + radius
        given = with_perturbation(ball.kind(size, backing=x, elem_dims=ball.elem_dims), radius)
        out = f(given, z)
        if not isinstance(out, NormedTensor) or out.perturbation_size is None:
            return Found(1.0, {"x": 0.0})
        claimed = sensitivities(out, given).item()
        if not claimed < _HUGE:
            return Found(1.0, {"x": math.nan})
        found = _steepest(lambda t: f(t, z), ball, x, radius, out, self.seed)
        rounding = 1e-9 * max(1.0, out.norm_size.item())
        return Found(1.0, {"x": 1.0 if found <= claimed + rounding else found / claimed if claimed else math.inf})

    def smaller(self) -> Iterable[Bounded]:
        """With fewer statements, then with simpler inputs."""
        for i in range(len(self.statements)):
            yield replace(self, statements=self.statements[:i] + self.statements[i + 1 :])
        if self.sizes != (1.0, 1.0):
            yield replace(self, sizes=(1.0, 1.0))
        if self.scope == "composed":
            yield replace(self, scope="global")

    def source(self) -> str:
        """What can be pasted."""
        return (
            "from tests.fuzz.bounds import Bounded\n\n"
            f"program = {self!r}\nprint(program.run())\n# " + "\n# ".join(self.statements) + "\n"
        )

    def labels(self) -> Sequence[str]:
        """The functions, the kind of norms and what is claimed."""
        return sorted({m for s in self.statements for m in _FUNCTION.findall(s)} | {self.scope, self.kind})


def _steepest(
    f: Callable[[torch.Tensor], torch.Tensor], ball: Ball, x: torch.Tensor, radius: float, out: NormedTensor, seed: int
) -> float:
    """The largest of |J(x') u| / |u| and |f(x') - f(x)| / |x' - x| that ascents find, over x' within the radius of x."""
    generator = torch.Generator().manual_seed(seed)
    largest = 0.0
    of = lambda t: norms(type(out), t.unsqueeze(0), out.elem_dims).squeeze(0)  # noqa: E731
    base = f(x)
    if not base.numel():
        return largest
    rounding = 100 * torch.finfo(base.dtype).eps * of(base)  # of the difference of two results
    if radius:
        for start in range(6):
            d = project(
                ball.kind,
                torch.randn(x.shape, generator=generator, dtype=torch.float64) * radius * 10.0**-start,
                ball.dims,
                radius,
            )
            for _ in range(25):
                d = d.detach().requires_grad_()
                size = norm(ball.kind, d, ball.dims)
                if size.item() < 1e-7 * radius:
                    break
                ratio = (of(f(x + d) - base) - rounding) / size
                largest = max(largest, ratio.item()) if math.isfinite(ratio.item()) else largest
                if not ratio.requires_grad:
                    break
                (g,) = torch.autograd.grad(ratio, d, allow_unused=True)
                if g is None or not g.isfinite().all() or not g.any():
                    break
                d = project(ball.kind, d.detach() + 0.3 * size.item() * g / g.abs().max(), ball.dims, radius)
    for start in range(8 if radius else 3):
        at = x + project(
            ball.kind, torch.randn(x.shape, generator=generator, dtype=torch.float64) * radius * (start > 2), ball.dims, radius
        )
        at = at.detach()
        jacobian = torch.autograd.functional.jacobian(f, at)
        if not isinstance(jacobian, torch.Tensor) or not jacobian.isfinite().all():
            continue
        largest = max(largest, operator_norm(jacobian, ball, out, generator))
    return largest


def operator_norm(jacobian: torch.Tensor, ball: Ball, out: NormedTensor, generator: torch.Generator) -> float:
    """What power iteration finds of max |J u| over |u| = 1, in these norms."""
    flat, best = jacobian.reshape(-1, math.prod(ball.shape)), 0.0
    for _ in range(3):
        u = torch.randn(ball.shape, generator=generator, dtype=torch.float64)
        u = u / norm(ball.kind, u, ball.dims)
        for _ in range(20):
            u = u.detach().requires_grad_()
            value = norm(
                type(out), (flat @ u.reshape(-1)).reshape(jacobian.shape[: jacobian.ndim - len(ball.shape)]), out.elem_dims
            )
            best = max(best, value.item())
            (g,) = torch.autograd.grad(value, u)
            if not g.any():
                break
            u = lmo(ball.kind, g, ball.dims)
    return best


# -- drawing -----------------------------------------------------------------------------------------------------------------


def draw(pick: random.Random) -> Bounded:
    """A program of at most eight statements that torch runs."""
    shape = pick.choice(_SHAPES)
    kind = pick.choice(["RMSTensor", "RMSTensor", "RMSTensor", "LinfTensor", "L2Tensor", "L1Tensor"])
    dims = tuple(sorted(pick.sample(range(-len(shape), 0), pick.choice([1, 1, 1, min(2, len(shape)), len(shape)]))))
    if pick.random() < 0.5:
        dims = (-1,)
    scope: Sensitivity = pick.choice(["global", "global", "composed", "composed", "local", "within"])
    if scope == "within" and pick.random() < 0.6:  # one sample, with a norm over all of it: it goes by its Jacobian
        kind, batch = pick.choice(["RMSTensor", "L2Tensor"]), pick.choice([0, 1])
        shape = (1,) * batch + shape
        dims = tuple(range(batch - len(shape), 0))
    # a finite step leaves a ball that is a point
    sizes = (pick.choice([0.0 if scope in ("local", "within") else 0.1, 1e-3, 0.3, 1.0, 1.0, 5.0]), pick.choice([0.3, 1.0]))
    program = Bounded((), shape, kind, () if kind == "LinfTensor" else dims, sizes, scope, pick.randrange(10**6))
    now = c(program.seed, *shape)
    x, z = now, c(program.seed + 1, *shape)
    for _ in range(pick.choice([1, 2, 3, 4, 5, 6, 8])):
        for _ in range(12):
            longer = replace(program, statements=(*program.statements, statement(pick, tuple(now.shape))))
            try:
                made = longer.function()(x.clone(), z.clone())
            except Exception:  # noqa: BLE001 - it does not fit
                continue
            fits = isinstance(made, torch.Tensor) and made.dtype == torch.float64 and made.numel() <= _MOST_ENTRIES
            if fits and made.isfinite().all() and (made.numel() or pick.random() < 0.1):
                program, now = longer, made
                break
    return program


def statement(pick: random.Random, shape: tuple[int, ...]) -> str:
    """One statement for a result of this shape."""
    text = pick.choice(EXPRESSIONS)
    n = shape[-1] if shape else 1
    dims = [pick.randrange(-len(shape), len(shape)) for _ in range(2)] if shape else [0, 0]
    values = {
        "d": dims[0],
        "e": dims[1],
        "nd": shape[dims[0]] if shape else 1,
        "ch": shape[1] if len(shape) > 1 else 1,
        "n": n,
        "r": shape[-2] if len(shape) > 1 else 1,
        "m": pick.randint(1, 5),
        "k": pick.choice([-1.5, -0.5, 0.3, 0.7, 2.0]),
        "p": pick.randint(0, 2),
        "q": pick.randint(1, 3),
        "s": pick.randrange(1000),
        "shape": ", ".join(map(str, shape)) or "1",
        "last": shape[-pick.randint(1, max(len(shape), 1)) :],
        "ndim": len(shape),
    }
    made = text.format(**values)
    form = pick.choice(
        [
            "x = {}",
            "x = {}",
            "x = {}",
            "x = {}",
            "x = x + {}",
            "x = x - {} * 0.5",
            "x = {} * torch.sigmoid(x)",
            "x = {} + z",
            "x = {} * z",
        ]
    )
    return made if " = " in made else form.format(made)
