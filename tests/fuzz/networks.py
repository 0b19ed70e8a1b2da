"""Random whole networks: an adversary ascends in float64, over pairs of inputs and over Jacobians, to exceed what is claimed of them.

Claimed are the norm of the result and how far it moves, for all inputs within their norms (``global``, ``composed``), at the data (``local``)
and near them (``within``).
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from thunder_norm import NormedTensor, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.audit import Ball
from thunder_norm.audit.balls import norm, norms, project
from thunder_norm.core.context import Sensitivity

from . import network_functions as more
from .bounds import KINDS, operator_norm
from .network_parts import IMAGES, PARTS, ROWS, SEQUENCES, TOKENS
from .program import Outcome, outcome_of

Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Network:
    """Parts, one after the other.

    Attributes:
        parts: their names, and of each the number that it is made by.
        shape: of the input.
        kind: the kind of its norm.
        dims: the dimensions it runs over.
        style: what its parameters are like.
        scope: what sensitivity is claimed.
        size: about how large entries of the input are.
        radius: how far claims of "within" reach, times the norm of the input.
        dtype: of the network, whose claims are searched in float64.
        seed: of data, style and search.
    """

    parts: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    kind: str
    dims: tuple[int, ...]
    style: str
    scope: Sensitivity
    size: float
    radius: float
    dtype: torch.dtype
    seed: int

    def model(self) -> nn.Module:
        """In eval mode."""
        width = self.shape[1] if len(self.shape) == 4 else self.shape[-1]
        with torch.random.fork_rng(devices=[]):
            made = []
            for name, number in self.parts:
                torch.manual_seed(number)
                made.append(_PARTS[name](random.Random(number), width))
            _STYLES[self.style](nn.Sequential(*made), random.Random(self.seed))
        return nn.Sequential(*made).to(self.dtype).eval().requires_grad_(False)

    def run(self) -> Outcome:
        """The claims, against what is found."""
        with sdpa_kernel(SDPBackend.MATH):  # others have no second derivatives
            return self._run()

    def _run(self) -> Outcome:
        model, generator = self.model(), torch.Generator().manual_seed(self.seed)
        exact = copy.deepcopy(model).double()
        x = (torch.randn(self.shape, generator=generator) * self.size).to(self.dtype)
        centre, kind = x.double(), KINDS[self.kind]
        if not exact(centre).isfinite().all():
            return Outcome("no oracle", "no numbers")
        own = kind.of(x, self.dims).norm_size.item()
        is_near = self.scope in ("local", "within")
        radius = self.radius * max(own, 1e-3) if self.scope == "within" else 0.0 if is_near else own
        try:
            with norm_sensitivity(self.scope):
                given = with_perturbation(kind(own + (radius if is_near else 0.0), backing=x, elem_dims=self.dims), radius)
                out = model(given)
                if out.perturbation_size is None:
                    return Outcome("no oracle", "depends on nothing")
                claimed = sensitivities(out, given).item()
        except Exception as e:  # noqa: BLE001 - an outcome
            return outcome_of(e)
        if math.isnan(claimed) or math.isnan(out.norm_size.item()):
            return Outcome("wrong", "a claim is NaN")
        ball = Ball("x", kind, self.shape, own, self.dims)
        largest, steepest = _ascend(exact, ball, centre if is_near else torch.zeros_like(centre), radius, out, self.seed)
        slack = 1e-6 if self.dtype == torch.float64 else 1e-4
        if largest > out.norm_size.item() * (1 + 10 * slack) + 1e-100:
            return Outcome("wrong", f"value: found {largest}, claimed {out.norm_size.item()}")
        if steepest > claimed * (1 + slack) + 1e-12 * largest + 1e-100:
            return Outcome("wrong", f"{self.scope}: found {steepest}, claimed {claimed}")
        return Outcome("right", f"found {steepest:.3g}, claimed {claimed:.3g}")

    def smaller(self) -> Iterable[Network]:
        """With fewer parts, then simpler ones."""
        for i in range(len(self.parts)):
            yield replace(self, parts=self.parts[:i] + self.parts[i + 1 :])
        if self.style != "plain":
            yield replace(self, style="plain")
        if self.size != 1.0:
            yield replace(self, size=1.0)
        if self.dtype != torch.float64:
            yield replace(self, dtype=torch.float64)
        if self.scope == "composed":
            yield replace(self, scope="global")

    def source(self) -> str:
        """What can be pasted."""
        return f"import torch\nfrom tests.fuzz.networks import Network\n\nnetwork = {self!r}\nprint(network.model(), network.run())\n"

    def labels(self) -> Sequence[str]:
        """The parts, their style, the kind of norms and what is claimed."""
        return sorted({name for name, _ in self.parts} | {self.style, self.kind, self.scope})


# -- the adversary -----------------------------------------------------------------------------------------------------------


def _ascend(f: Function, ball: Ball, centre: torch.Tensor, radius: float, out: NormedTensor, seed: int) -> tuple[float, float]:
    """The largest |f(a)|, and the largest of |J(a) u| / |u| and |f(b) - f(a)| / |b - a|, that are found within the radius of the centre."""
    generator = torch.Generator().manual_seed(seed)
    of = lambda t: norms(type(out), t.unsqueeze(0), out.elem_dims).squeeze(0)  # noqa: E731

    def drawn(size: float) -> torch.Tensor:
        return torch.randn(centre.shape, generator=generator, dtype=torch.float64) * size

    def near(t: torch.Tensor) -> torch.Tensor:
        return centre + project(ball.kind, t.detach() - centre, ball.dims, radius)

    largest = steepest = 0.0
    for start in range(5):
        a = near(centre + drawn(radius * 10.0 ** -(start % 4)))
        largest = max(largest, of(f(a)).item())
        jacobian = torch.autograd.functional.jacobian(f, a)
        if isinstance(jacobian, torch.Tensor) and jacobian.isfinite().all():
            steepest = max(steepest, operator_norm(jacobian, ball, out, generator))
        if not radius:
            break
        b = near(a + drawn(radius * 10.0 ** -(start % 3)))
        for _ in range(25):
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            at_a, at_b = f(a), f(b)
            largest = max(largest, of(at_a).item(), of(at_b).item())
            apart = norm(ball.kind, b - a, ball.dims)
            if apart.item() < 1e-6 * radius:
                break
            ratio = (of(at_b - at_a) - 1e-13 * (of(at_a) + of(at_b))) / apart  # less what rounding does
            steepest = max(steepest, ratio.item()) if math.isfinite(ratio.item()) else steepest
            if not ratio.requires_grad:
                break
            steps = torch.autograd.grad(ratio, (a, b), allow_unused=True, materialize_grads=True)
            if not all(g.isfinite().all() and g.any() for g in steps):
                break
            a, b = (near(t.detach() + 0.2 * radius * g / g.abs().max()) for t, g in zip((a, b), steps, strict=True))
    return largest, steepest


# -- drawing -----------------------------------------------------------------------------------------------------------------


def _plain(model: nn.Module, pick: random.Random) -> None:
    """As torch starts them."""


def _scaled(model: nn.Module, pick: random.Random) -> None:
    for p in model.parameters():
        p.data *= 10 ** pick.uniform(-4, 2)


def _mixed(model: nn.Module, pick: random.Random) -> None:
    for p in model.parameters():
        p.data *= 10 ** pick.uniform(-1, 1.3)


def _saturated(model: nn.Module, pick: random.Random) -> None:
    for p in model.parameters():
        if p.ndim == 1:
            p.data += torch.randn_like(p) * pick.choice([3, 30])


def _dead(model: nn.Module, pick: random.Random) -> None:
    for p in model.parameters():
        if p.ndim == 1:
            p.data -= pick.choice([1, 5])


_PARTS = PARTS | more.PARTS
_STYLES = {"plain": _plain, "scaled": _scaled, "mixed": _mixed, "saturated": _saturated, "dead": _dead}


# the tables of parts that a network of a family is drawn from
OF_FAMILIES = {
    "rows": [ROWS, more.ROWS],
    "tokens": [ROWS, TOKENS, TOKENS, more.ROWS, more.TOKENS],
    "sequences": [SEQUENCES, more.SEQUENCES, ROWS, more.ROWS],
    "images": [IMAGES, more.IMAGES],
}


def draw(pick: random.Random) -> Network:
    """A network of at most four parts."""
    d, batch, length = pick.choice([4, 6]), pick.choice([1, 1, 2, 3]), pick.choice([1, 2, 3, 4])
    family = pick.choice(["rows", "rows", "tokens", "tokens", "sequences", "images"])
    shape = {"rows": (batch, d), "images": (batch, 2, pick.choice([3, 4]), 3)}.get(family, (batch, length, d))
    of = OF_FAMILIES[family]
    parts = tuple((pick.choice(list(pick.choice(of))), pick.randrange(10**6)) for _ in range(pick.choice([1, 2, 3, 4])))
    kind = pick.choice(["RMSTensor", "RMSTensor", "L2Tensor", "LinfTensor"])
    whole = tuple(range(1 - len(shape), 0))
    dims = () if kind == "LinfTensor" else whole if family == "images" else pick.choice([(-1,), whole])
    return Network(
        parts,
        shape,
        kind,
        dims,
        pick.choice(["plain", "plain", *_STYLES]),
        pick.choice(["global", "composed", "local", "within", "within", "within"]),
        10.0 ** pick.choice([-4, -2, -1, 0, 0, 0, 0, 1, 4]),
        pick.choice([0.0, 1e-4, 1e-2, 0.1, 0.3, 1.0]),
        pick.choice([torch.float64, torch.float64, torch.float32]),
        pick.randrange(10**6),
    )
