"""How normalizations move near the data: by their Jacobian there, and by what is left after first order (`movements_nearby` has the plan).

Of a group, centred where that belongs to it, ``f(z) = n^(1/2) Z / |Z|`` with the number ``(n eps)^(1/2)`` as one more entry of Z.  Let
``rho = |Z|`` at the data and u the unit vector there; a move h has the part ``a = u . h`` along it and the rest ``P h = h - a u``, of length b.
Then ``l^2 = |Z + h|^2 = (rho + a)^2 + b^2``, and over ``n^(1/2)``

    f(z + h) - f(z) - P h / rho = (1 / l - 1 / rho) P h - (1 - (rho + a) / l) u.

Along u it is at most ``b^2 / (2 (rho - a)^2)``, one direction of each group.  The rest is ``-a P h / rho^2``, linear in ``h h^T``: where h = L v is
in the ellipsoid of ``K = L L^T`` it is in that of ``(A o K + K u u^T K) / (2 rho^4)``, A the numbers ``u_g^T K u_g'`` of all pairs of groups (as
``v v^T`` has at most unit length, and a symmetric matrix is what counts).  What there is of third order is ``e P h`` with a number e in
``[-b^2 / (2 (rho - a)^3), a^2 / (rho^2 (rho - a))]``: the middle goes with the first order.

Between any two points near the data the derivative at a point e away along a move d is, but for ``P d / rho``,

    -(e_u P d + d_u P e) / rho^2 + (that of third order) + (b_e / l^2) (at most |d|) u,

linear in ``v w^T``, e made of v and d of w: with E and D for K in the ellipsoid of

    (A_E o D + A_D o E + D u u^T E + E u u^T D) / rho^4

from both sides times P; of third order there are, beside e P d, at most ``|(rho + a) / l^3 - 1 / rho^2| |d_u| P e`` and ``b_e b_d / l^3 P e``.  A ball in each group, by ``|D^2 f(z)[h, h]| <= 2 / 3^(1/2) |h|^2 / rho^2``, is taken where it is smaller.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.composed import Call, is_fixed, values
from thunder_norm.core.ellipsoids import Ellipsoid, sum_of
from thunder_norm.core.local import is_from_data
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.core.within import moved
from thunder_norm.rules.movement.movements_nearby import (
    Found,
    Function,
    Together,
    groups_of,
    made_of,
    near,
    one_sample,
    points_near,
)

# |D^2 f(z)[h, h]| for f(z) = z / sqrt(|z|^2 + c) is at most this times |h|^2 / (|z|^2 + c): the largest of
# t ((b^2 + 3 a^2 (1 - t^2))^2 + 4 a^2 b^2)^(1/2) with a^2 + b^2 = 1, t = |z| / (|z|^2 + c)^(1/2) <= 1.
_OF_UNIT_VECTORS = 2 / math.sqrt(3) * (1 + 1e-9)
_ROUNDED = 1 + 1e-9
# Of rho: movements along u that leave less of it are too far.
_LEAST = 0.05


@dataclass(frozen=True, eq=False)
class _Groups:
    """Groups of entries, each normalized by itself.

    Attributes:
        numbers: the features of each, [groups, n].
        constant: what is added to squares of lengths.
        size: the length that a group is given.
        gain: the factor of each feature of the result, [features].
        is_centred: whether means are taken off.
    """

    numbers: torch.Tensor
    constant: float
    size: float
    gain: torch.Tensor
    is_centred: bool

    def centred(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        return t - t.mean(dim, keepdim=True) if self.is_centred else t

    def of(self, x: NormedTensor, by: Together) -> tuple[Ellipsoid, torch.Tensor, torch.Tensor] | None:
        """What is left after first order, how much of it the parts of a movement reach, and what the first order is multiplied by, [features].

        None if groups come too near to 0.
        """
        z = self.centred(values(x.backing.detach()).reshape(-1)[self.numbers], -1)
        index = self.numbers.flatten()
        lengths = (z.square().sum(-1) + self.constant).sqrt()
        if not bool((lengths > 0).all()):
            return None

        def within(e: Ellipsoid) -> _Moves:
            size = e.scale * _ROUNDED
            cov = (e.cov.detach() * size * size)[index][:, index].reshape(*self.numbers.shape, *self.numbers.shape)
            return _Moves(self.centred(self.centred(cov, 1), 3), z / lengths[:, None])

        moves = points = within(by.within(near(x).parts))
        if not is_from_data() and (found := points_near(x)) is not None:
            points = within(*found)
        if not bool(moves.cov.isfinite().all()) or not bool(points.cov.isfinite().all()):
            return None
        left, total = _Left(lengths, z.norm(dim=-1), self.constant, moves, points, is_from_data()), moved(near(x))
        ball = left.by_length(
            moves.furthest if is_from_data() else total.detach().double().square().item() * _ROUNDED, self.is_centred
        )
        tried = [(ball, total / total.detach()), (left.by_direction(), by.reached)]
        known = [(self._with_gain(f[0]), reached, f[1]) for f, reached in tried if f is not None]
        if not known:
            return None
        least, reached, factor = min(known, key=lambda r: _size(r[0]) * r[1].detach().double().square().square().item())
        scale = torch.ones_like(self.gain)
        scale[index] = factor[:, None].expand(self.numbers.shape).flatten()
        return least, reached, scale

    def _with_gain(self, e: Ellipsoid) -> Ellipsoid:
        """In the order of the features, each times its gain."""
        back = self.numbers.flatten().argsort()
        return Ellipsoid.of(e.cov[back][:, back] * self.gain[:, None] * self.gain, e.scale * self.size * _ROUNDED)


def _size(e: Ellipsoid) -> float:
    """``tr P^4``, its root: near that of the longest vector."""
    square = e.scale * e.scale  # infinite where it is no number
    return (e.cov @ e.cov).square().sum().sqrt().item() * square * square


@dataclass(frozen=True, eq=False)
class _Moves:
    """How groups move.

    Attributes:
        cov: of the moves, centred, [groups, n, groups, n].
        u: Z over its length, without the last entry, [groups, n].
    """

    cov: torch.Tensor
    u: torch.Tensor

    @functools.cached_property
    def own(self) -> torch.Tensor:
        """The covariance of each group's moves, [groups, n, n]."""
        g = torch.arange(len(self.u))
        return self.cov[g, :, g]

    @functools.cached_property
    def across(self) -> torch.Tensor:
        """b, at most."""
        return torch.linalg.eigvalsh(self.own)[:, -1].clamp(min=0).sqrt() * _ROUNDED

    @functools.cached_property
    def furthest(self) -> float:
        """The square of the length of all moves together."""
        return torch.linalg.eigvalsh(_matrix(self.cov))[-1].clamp(min=0).item() * _ROUNDED

    @functools.cached_property
    def onto(self) -> torch.Tensor:
        """``K u`` of all groups by all, [groups, n, groups]."""
        return torch.einsum("gjhk,hk->gjh", self.cov, self.u)

    @functools.cached_property
    def pairs(self) -> torch.Tensor:
        """A, [groups, groups]."""
        return torch.einsum("gj,gjh->gh", self.u, self.onto)

    @functools.cached_property
    def along(self) -> torch.Tensor:
        """a, at most."""
        return self.pairs.diagonal().clamp(min=0).sqrt() * _ROUNDED

    def mixed(self, other: _Moves) -> torch.Tensor:
        """``A o K' + K u u^T K'``, K' the covariance of others, [groups, n, groups, n]."""
        return self.pairs[:, None, :, None] * other.cov + self.onto[..., None] * other.onto[..., None].permute(2, 3, 0, 1)


@dataclass(frozen=True, eq=False)
class _Left:
    """What is left after first order of ``Z / |Z|``.

    Attributes:
        rho: |Z|.
        lengths: without the last entry.
        constant: the last entry's square.
        moves: the moves.
        points: how far from the data is where they begin.
        is_from_data: whether that is the data; otherwise they are between any two points near it.
    """

    rho: torch.Tensor
    lengths: torch.Tensor
    constant: float
    moves: _Moves
    points: _Moves
    is_from_data: bool

    def by_length(self, furthest: float, is_centred: bool) -> tuple[Ellipsoid, torch.Tensor] | None:
        """A ball in each group g: of lengths at most ``c_g |h_g|`` the squares over ``c_g^2 R^2`` add up to 1, `furthest` being R^2."""
        across, n = self.points.across, self.moves.u.shape[1]
        square = (self.lengths - across).clamp(min=0).square() + self.constant
        if not bool((square > 0).all()):
            return None
        rate = _OF_UNIT_VECTORS * across / square * (0.5 if self.is_from_data else 1.0)
        eye = torch.eye(n, dtype=self.rho.dtype) - (1 / n if is_centred else 0.0)
        cov = torch.block_diag(*((rate.square() * furthest)[:, None, None] * eye))
        return (Ellipsoid.of(cov), torch.ones_like(self.rho)) if bool(cov.isfinite().all()) else None

    def by_direction(self) -> tuple[Ellipsoid, torch.Tensor] | None:
        """By what is along u and what is not; None if that may be nearly all of u."""
        moves, points, rho = self.moves, self.points, self.rho
        along, b = points.along, points.across
        least = rho - along
        if not bool((least > _LEAST * rho).all()):
            return None
        low, high = -b.square() / (2 * least**3), along.square() / (rho.square() * least)
        of_u = b / least.square()
        parts = [self._of_rest((high - low) / 2, moves)]
        if self.is_from_data:
            second, of_u = moves.mixed(moves) / 2, of_u / 2
        else:
            second = points.mixed(moves) + moves.mixed(points)
            is_falling = least > b
            lowest = torch.where(is_falling, (rho + along) / ((rho + along).square() + b.square()) ** 1.5, 0.0)
            off = torch.maximum(1 / least.square() - 1 / rho.square(), 1 / rho.square() - lowest)
            parts.append(self._of_rest(off * moves.along + b * moves.across / least**3, points))
        second = self._apart(second) * (1 / rho.square())[:, None, None, None] * (1 / rho.square())[None, None, :, None]
        parts += [_above(_matrix(second)), self._of_u(of_u)]
        if not all(bool(c.isfinite().all()) for c in parts):
            return None
        return functools.reduce(sum_of, map(Ellipsoid.of, parts)), 1 + rho * (low + high) / 2

    def _apart(self, t: torch.Tensor) -> torch.Tensor:
        """P from both sides."""
        u = self.moves.u
        t = t - u[:, :, None, None] * torch.einsum("gj,gjhk->ghk", u, t)[:, None]
        return t - torch.einsum("gjhk,hk->gjh", t, u)[..., None] * u

    def _of_rest(self, factors: torch.Tensor, moves: _Moves) -> torch.Tensor:
        """Of moves, each group's times a number of at most its factor: blocks that are no less than all of the covariance make one of them."""
        count, n = moves.u.shape
        eye = torch.eye(n, dtype=moves.u.dtype)
        blocks = count * moves.own
        if moves.furthest * count * n < blocks.diagonal(dim1=1, dim2=2).sum().item():
            blocks = moves.furthest * eye.expand(count, n, n)
        projection = eye - moves.u[:, :, None] * moves.u[:, None, :]
        return _above(torch.block_diag(*(factors.square()[:, None, None] * (projection @ blocks @ projection))))

    def _of_u(self, factors: torch.Tensor) -> torch.Tensor:
        """Of multiples of u by at most ``factor |h|`` in each group."""
        u, weights = self.moves.u, factors.square() * self.moves.furthest * _ROUNDED
        return torch.block_diag(*(weights[:, None, None] * u[:, :, None] * u[:, None, :]))


def _matrix(cov: torch.Tensor) -> torch.Tensor:
    return cov.flatten(2).flatten(0, 1)


def _above(cov: torch.Tensor) -> torch.Tensor:
    """A covariance that is not below the exact one, whatever was rounded."""
    cov = (cov + cov.mT) / 2
    return cov + 1e-11 * cov.diagonal().amax().clamp(min=0) * torch.eye(len(cov), dtype=cov.dtype)


def normalized(
    call: Call, x: Any, numbers: Callable[[NormedTensor], torch.Tensor], eps: float, gain: Any, is_centred: bool, f: Function
) -> Found:
    """``f(x)``, groups of n entries that get the length ``n^(1/2)``, each entry times its gain, which broadcasts to x."""
    moving = one_sample(call, [x])
    if moving is None or gain is not None and not is_fixed(gain) or not eps >= 0:
        return None
    groups = numbers(x)
    count = groups.shape[1]
    of_entries = torch.ones((), dtype=torch.float64) if gain is None else values(gain.detach())
    of_entries = of_entries.expand(x.shape).reshape(-1).abs()
    return _made(call, moving, _Groups(groups, count * eps, math.sqrt(count), of_entries, is_centred), f)


def _made(call: Call, moving: list[NormedTensor], groups: _Groups, f: Function) -> Found:
    (x,) = moving
    total, by = moved(near(x)), Together.of(near(x).parts)
    if not total.item() > 0:  # to first order alone
        return made_of(call, moving, f, [(Ellipsoid.ball(x.numel(), 0.0), total)])
    found = groups.of(x, by) if by is not None else None
    if found is None:
        return None
    within, reached, scale = found
    shape = call.results[0].shape
    return made_of(call, moving, lambda plain: scale.reshape(shape) * f(plain), [(within, reached)])


def _last(shape: Any) -> Callable[[NormedTensor], torch.Tensor]:
    return lambda x: groups_of(x, tuple(range(-len(shape), 0)))


@normed_op(F.layer_norm).register_movement
@normed_op(torch.ops.aten.native_layer_norm.default).register_movement
def layer_norm(call: Call) -> Found:
    """Centred, over the last dimensions."""
    x, shape, weight, bias = call.given["input"], call.given["normalized_shape"], call.given.get("weight"), call.given.get("bias")
    eps = call.given.get("eps", 1e-5)
    if bias is not None and not is_fixed(bias):
        return None
    return normalized(
        call, x, _last(shape), eps, weight, True, lambda plain: F.layer_norm(plain(x), shape, plain(weight), plain(bias), eps)
    )


@normed_op(F.rms_norm).register_movement
def rms_norm(call: Call) -> Found:
    """The same about 0."""
    x, shape, weight, eps = call.given["input"], call.given["normalized_shape"], call.given.get("weight"), call.given.get("eps")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return normalized(call, x, _last(shape), eps, weight, False, lambda plain: F.rms_norm(plain(x), shape, plain(weight), eps))


def _by_channel(t: Any, x: NormedTensor) -> Any:
    return t.reshape(-1, *[1] * (x.ndim - 2)) if is_fixed(t) and t is not None else t


@normed_op(F.group_norm).register_movement
def group_norm(call: Call) -> Found:
    """Groups of channels of one sample."""
    x, groups, weight, bias = call.given["input"], call.given["num_groups"], call.given.get("weight"), call.given.get("bias")
    eps = call.given.get("eps", 1e-5)
    if bias is not None and not is_fixed(bias) or not groups or x.shape[0] != 1:
        return None

    def run(plain: Callable[[Any], Any]) -> torch.Tensor:
        return F.group_norm(plain(x), groups, plain(weight), plain(bias), eps)

    numbers = lambda x: torch.arange(x.numel()).reshape(groups, -1)  # noqa: E731
    return normalized(call, x, numbers, eps, _by_channel(weight, x), True, run)


@normed_op(F.instance_norm).register_movement
def instance_norm(call: Call) -> Found:
    """Each channel of one sample; by given statistics it has a norm rule."""
    given = call.given
    x, weight, bias, eps = given["input"], given.get("weight"), given.get("bias"), given.get("eps", 1e-5)
    if bias is not None and not is_fixed(bias) or not given.get("use_input_stats", True) or x.ndim < 2 or x.shape[0] != 1:
        return None

    def run(plain: Callable[[Any], Any]) -> torch.Tensor:
        return F.instance_norm(plain(x), None, None, plain(weight), plain(bias), True, 0.0, eps)

    numbers = lambda x: torch.arange(x.numel()).reshape(x.shape[1], -1)  # noqa: E731
    return normalized(call, x, numbers, eps, _by_channel(weight, x), True, run)


@normed_op(F.normalize).register_movement
def normalize(call: Call) -> Found:
    """To length 1 over a dimension, where no group comes near eps."""
    x, dim, eps = call.given["input"], call.given.get("dim", 1), call.given.get("eps", 1e-12)
    moving = one_sample(call, [x])
    if moving is None or call.given.get("p", 2.0) != 2 or not isinstance(dim, int) or not x.ndim:
        return None
    numbers = groups_of(x, (dim - x.ndim if dim >= 0 else dim,))
    lengths = values(x.backing.detach()).reshape(-1)[numbers].norm(dim=-1)
    if lengths.amin().item() - moved(near(x), numbers).detach().item() * _ROUNDED <= eps:
        return None
    groups = _Groups(numbers, 0.0, 1.0, torch.ones(x.numel(), dtype=torch.float64), False)
    return _made(call, moving, groups, lambda plain: F.normalize(plain(x), dim=dim, eps=eps))
