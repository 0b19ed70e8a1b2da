"""Operations on Gaussians, for the claims of mode "typical": how each is called, on what, and how far a claim may be off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm import RMSTensor
from thunder_norm.core.conversions import convert
from thunder_norm.core.dispatch import run_registered
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules.layers.recurrent import gru_layer, lstm_layer, rnn_tanh_layer

D = torch.float64


@dataclass(frozen=True)
class Sampled:
    """An operation on tensors of shape (draws, *shape), and how far its rule may be from them besides the sampling error."""

    call: Callable
    shapes: tuple[tuple[int, ...], ...] = ((4,),)
    kinds: tuple[type[NormedTensor], ...] = (RMSTensor, RMSTensor)
    sizes: tuple[tuple[float, ...], ...] = ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0))
    off: float = 1e-5  # the quadrature's error at a kink
    moves: bool = True  # whether its sensitivity is the gain of a random direction
    slots: tuple[int, ...] = (0,)


def _norm(f: Callable) -> Sampled:
    # of 16 entries; off by eps / n^2, which the rule leaves out of E[1 / r^2]
    return Sampled(lambda x: f(x), ((16,),), sizes=((0.5,), (1.7,)), off=1e-4)


def _onto(x: torch.Tensor, places: list[int]) -> torch.Tensor:
    """An index into the last dimension of x."""
    return torch.tensor(places).expand(*x.shape[:-1], -1)


def _as_rms(y: torch.Tensor) -> torch.Tensor:
    return convert(y, RMSTensor, (-1,)) if isinstance(y, NormedTensor) else y


def _triangular(**options: Any) -> Sampled:
    solve = lambda a, b: torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)  # noqa: E731
    return Sampled(solve, ((6, 6), (6, 2)), **{"sizes": ((0.3, 2.0), (0.5, 1.0)), **options})


def _factory(op: Callable) -> Sampled:
    """A factory, which meets no normed tensor by itself."""
    return Sampled(
        lambda x: run_registered(op, tuple(x.shape), {}) if isinstance(x, NormedTensor) else op(x.shape, dtype=D), moves=False
    )


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A product of two activations for each draw."""
    return (q.unsqueeze(-2) @ k.unsqueeze(-1)).squeeze(-1)


def _of_scores(f: Callable) -> list[Sampled]:
    return [Sampled(lambda q, k: f(_scores(q, k)), ((8,), (8,)), sizes=((1.0, 2.0), (0.5, 0.5)), slots=(0, 1))]


def _layer(layer: Callable, gates: int) -> list[Sampled]:
    """The last state of a recurrent layer from rest, without recurrent weights to speak of: its own test has them."""

    def last(x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], 2, dtype=D)
        weight = torch.full((2 * gates, 2), 1e-9, dtype=D)
        return layer(x.transpose(0, 1), *[state] * (1 + (gates == 4)), weight)[1]

    return [Sampled(last, ((1, 2 * gates),), sizes=((0.5,), (2.0,)), off=0.05)]


# Rules that need more than one argument, or other than the defaults; the others are called as ``op(x)``.
BY_OPERATION: dict[str, list[Sampled]] = {
    "pow": [Sampled(lambda x: 1.3**x), Sampled(lambda x: 0.5**x, sizes=((0.5,), (1.0,)))],
    "leaky_relu": [Sampled(lambda x: F.leaky_relu(x, 0.1))],
    "linalg_solve_triangular": [
        _triangular(slots=(1,)),
        # entries of a solution depend on each other: its means stand for them
        _triangular(slots=(0,), sizes=((0.05, 2.0), (0.2, 1.0)), off=0.05),
    ],
    "prelu": [Sampled(lambda x: F.prelu(x, torch.tensor([0.3], dtype=D)))],
    "_prelu_kernel": [Sampled(lambda x: torch.ops.aten._prelu_kernel(x, torch.tensor([0.3], dtype=D)))],
    "elu": [Sampled(F.elu), Sampled(lambda x: F.elu(x, 2.0))],
    "celu": [Sampled(lambda x: F.celu(x, 0.5))],
    "gelu": [Sampled(F.gelu), Sampled(lambda x: F.gelu(x, approximate="tanh"))],
    "softplus": [Sampled(F.softplus), Sampled(lambda x: F.softplus(x, beta=2.0))],
    "log_sigmoid": [Sampled(F.logsigmoid)],
    # their moments grow like e^(2 n^2): n <= 1, where 1e5 draws still tell them, and beyond 1 they grow as n
    **{name: [Sampled(getattr(torch, name), sizes=((0.3,), (0.7,)))] for name in ("exp", "expm1", "exp2", "sinh", "cosh")},
    "i0": [Sampled(torch.i0, sizes=((0.3,), (0.9,)))],
    **{
        f"special_{name}": [Sampled(getattr(torch.special, name), sizes=((0.3,), (0.9,)))]
        for name in ("i1", "modified_bessel_i0", "modified_bessel_i1")
    },
    "lstm_layer": _layer(lstm_layer, 4),
    "gru_layer": _layer(gru_layer, 3),
    "rnn_tanh_layer": _layer(rnn_tanh_layer, 1),
    "mul": _of_scores(lambda s: s * 3) + _of_scores(lambda s: 3 * s),
    "div": _of_scores(lambda s: s / 3),
    "add": _of_scores(lambda s: s + torch.zeros(1, dtype=D)),
    "masked_fill": _of_scores(lambda s: s.masked_fill(torch.zeros(1, dtype=torch.bool), 0.0)),
    "randn_like": [Sampled(torch.randn_like, moves=False)],
    "randn": [_factory(torch.randn)],
}
# Functions that ask for the mode themselves.
BY_FUNCTION: dict[str, list[Sampled]] = {
    "normalization.normalized": [
        _norm(lambda x: F.layer_norm(x, (16,), eps=1e-5)),
        _norm(lambda x: F.rms_norm(x, (16,), eps=1e-5)),
        _norm(lambda x: F.group_norm(x.unflatten(-1, (2, 8)), 1, eps=1e-5)),
        _norm(lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)),
    ],
    "_lengths.inverse_length": [_norm(lambda x: _as_rms(F.normalize(x, dim=-1)))],
    "powers.pow": [
        Sampled(lambda x: x**3, sizes=((0.5,), (2.0,))),
        Sampled(lambda x: x**4, sizes=((1.0,),)),
        Sampled(torch.square),
        Sampled(lambda x: x * x),
        Sampled(lambda x: x**2),
    ],
    # the gain of the largest of several is 1: it moves with one of them
    "reductions._extremum": [Sampled(lambda x: x.amax(-1), ((9,),)), Sampled(lambda x: x.amin((-1, -2)), ((2, 3),))],
    "pooling._maximum": [
        Sampled(lambda x: F.max_pool1d(x, 3), ((2, 6),)),
        Sampled(lambda x: F.adaptive_max_pool1d(x, 2), ((1, 8),)),
    ],
    "selections.one_of": [
        # how they move where both do: `tests/rules/test_typical_choices.py`
        Sampled(torch.maximum, ((4,), (4,)), moves=False, sizes=((1.0, 1.0), (0.5, 2.0)), off=1e-4),
        Sampled(
            lambda x, y: torch.where(torch.tensor([True, False, False, True]), x, y),
            ((4,), (4,)),
            moves=False,
            sizes=((1.0, 2.0),),
        ),
    ],
    "masking._dropout": [Sampled(lambda x: F.dropout(x, 0.3, True)), Sampled(lambda x: F.dropout1d(x, 0.3, True), ((2, 2),))],
    "limits.clamp": [
        Sampled(lambda x: x.clamp(-0.5, 1.0)),
        Sampled(lambda x: x.clamp(min=0.2)),
        Sampled(F.relu6, sizes=((1.0,), (6.0,))),
        Sampled(F.hardtanh),
    ],
    "contraction._inner": _of_scores(lambda s: s),
    "logits.scores": _of_scores(lambda s: s),
    "_shared.with_bias": [Sampled(lambda x, b: torch.addmm(b, x, torch.eye(4, dtype=D)), ((4,), (4,)), slots=(0, 1))],
    "replacing._added": [
        # all onto one row, and onto rows of their own
        Sampled(lambda x, y: torch.index_add(x, 1, torch.tensor([1, 1, 1]), y), ((2, 4), (3, 4)), slots=(0, 1)),
        Sampled(lambda x, y: torch.index_add(x, 1, torch.tensor([3, 0, 2]), y, alpha=-2), ((4, 2), (3, 2)), slots=(0, 1)),
        Sampled(lambda x, y: torch.scatter_add(x, -1, _onto(x, [0, 2, 2, 1]), y), ((3,), (5,)), slots=(0, 1)),
    ],
    # constants of one magnitude: its size is that of the largest product
    "stretched._product": [Sampled(lambda x: x * torch.tensor([2.0, -2.0, 2.0, -2.0], dtype=D))],
    "reductions.vector_norm": [Sampled(lambda x: x.norm(dim=-1), ((8,),))],
    "distances._apart": [
        Sampled(torch.cdist, ((3, 8), (2, 8)), sizes=((0.7, 1.1),), slots=(0, 1)),
        Sampled(lambda x, y: torch.cdist(x, y).square(), ((3, 8), (2, 8)), sizes=((0.7, 1.1),), slots=(0, 1)),
    ],
    "_least_moduli.smallest": [
        Sampled(lambda x, y: x / (y.norm(dim=-1, keepdim=True) + 1e-9), ((4,), (16,)), sizes=((1.0, 2.0), (0.5, 0.5))),
    ],
    "written_out_exponentials.exp": [Sampled(lambda x: torch.exp(-x.abs()))],
    # what is not that of Gaussians, whose inverse has no second moment: tests/rules/test_typical_quotients.py
    "_least_moduli.is_near_its_norm": [],
    # shares of shares: tests/rules/test_shares_again.py
    "_combinations.over_own_sum": [],
    "around_numbers._is_followed": [],  # tests/rules/test_around_numbers.py has what is followed, and its sizes
    "around_numbers.size_of_sum": [],
    # how it moves: tests/rules/test_typical_choices.py; its size is a bound
    "log_sums._log_of_sum": [],
    # what moves a softmax: tests/rules/test_typical_attention.py
    "attention._attention": [],
    "softmax._softmax": [],
    "factories.rand": [_factory(torch.rand)],
    "factories.rand_like": [Sampled(torch.rand_like, moves=False)],
}
# Operations without a rule for this mode, whose own is also the typical one (norm_rules.md 1.5), and conversions, which cost nothing.
INHERITED: dict[str, Sampled] = {
    "abs": Sampled(torch.abs),
    "neg": Sampled(torch.neg),
    "scale": Sampled(lambda x: -3 * x / 2),
    "chunk": Sampled(lambda x: x.chunk(2, -1)[1]),
    "select": Sampled(lambda x: x.select(-1, 1)),
    "heads": Sampled(lambda x: x.reshape(-1, 2, 2).transpose(0, 1)),
    "permute": Sampled(lambda x: x.mT, ((3, 2),)),
    "cat": Sampled(lambda x, y: torch.cat([x, y], -1), ((4,), (2,)), moves=False, sizes=((1.0, 2.0),)),
    "gain": Sampled(torch.mul, ((4,), (4,)), slots=(0, 1), sizes=((1.0, 2.0),)),
    "glu": Sampled(lambda x, y: F.silu(x) * y, ((4,), (4,)), slots=(0, 1), sizes=((1.0, 2.0),)),
    "pixel_shuffle": Sampled(lambda x: F.pixel_shuffle(x, 2), ((4, 1, 1),)),
    "unfold": Sampled(lambda x: x.unfold(-1, 2, 1)),
    "gather": Sampled(lambda x: torch.gather(x, -1, torch.zeros(x.shape, dtype=torch.long))),
}
