"""Gradients of programs that draw random numbers: those of the numbers that their results were computed with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import thunder_norm.transforms as T
from tests.seeds import crossed, seeded
from thunder_norm.errors import DataDependentError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder

# Affine in their argument for the numbers drawn, with a constant that does not depend on it.
DROPOUTS: dict[str, Callable] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout1d": lambda x: F.dropout1d(x.reshape(2, 6, 1)),
    "dropout2d": lambda x: torch.nn.Dropout2d(0.5)(x.reshape(2, 6, 1, 1).expand(2, 6, 2, 2)),
    "dropout3d": lambda x: F.dropout3d(x.reshape(2, 6, 1, 1, 1).expand(2, 6, 2, 1, 2)),
}


@pytest.mark.parametrize(("name", "transform"), crossed(DROPOUTS, [NormTransform, SubclassTransform]))
def test_what_is_dropped_has_no_gradient_and_what_is_kept_has_its_factor(name: str, transform: Callable) -> None:
    jitted = thunder.jit(lambda x: DROPOUTS[name](x).sum(), transforms=[transform()])
    for seed in range(4):
        torch.manual_seed(seeded(seed))
        x = torch.rand(12).add(0.5).requires_grad_()
        value = jitted(x)
        (slope,) = torch.autograd.grad(value, x)
        torch.testing.assert_close((slope * x).sum(), value)


NUMBERS: dict[str, Callable] = {
    "randn": lambda: torch.randn(12),
    "randint": lambda: torch.randint(0, 9, (12,)),
    "poisson": lambda: torch.poisson(torch.full((12,), 3.0)),
    "bernoulli": lambda: torch.bernoulli(torch.full((12,), 0.5)),
}


@pytest.mark.parametrize("transform", [NormTransform, CheckpointTransform])
@pytest.mark.parametrize("name", [*DROPOUTS, *NUMBERS])
def test_what_is_computed_again_has_the_numbers_of_the_first_time(name: str, transform: Callable) -> None:
    def linear(x: torch.Tensor) -> torch.Tensor:
        return (DROPOUTS[name](x) if name in DROPOUTS else x * NUMBERS[name]()).sum()

    jitted = thunder.jit(lambda x: checkpoint(linear, x, use_reentrant=False), transforms=[transform()])
    torch.manual_seed(seeded(0))
    x = torch.rand(12).add(0.5).requires_grad_()
    value = jitted(x)
    (slope,) = torch.autograd.grad(value, x)
    torch.testing.assert_close((slope * x).sum(), value)


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_with_dropout_has_the_gradients_of_the_scores_that_it_keeps(need_weights: bool) -> None:
    """Linear in the values."""
    torch.manual_seed(seeded(0))
    attention = torch.nn.MultiheadAttention(8, 2, dropout=0.5, bias=False, batch_first=True)
    q, k, v = torch.randn(3, 2, 6, 8).unbind()
    jitted = thunder.jit(lambda v: attention(q, k, v, need_weights=need_weights)[0].sum(), transforms=[NormTransform()])
    v.requires_grad_()
    value = jitted(v)
    (slope,) = torch.autograd.grad(value, v)
    torch.testing.assert_close((slope * v).sum(), value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_moves_with_what_it_keeps(function: Callable) -> None:
    """a x + b of what is kept, and a constant of what is not."""
    p, low = 0.4, -1.7580993408473766
    a = ((1 - p) * (1 + p * low**2)) ** -0.5
    jitted = thunder.jit(lambda x: function(x, p, training=True), transforms=[NormTransform()])
    torch.manual_seed(seeded(0))
    x = torch.rand(40, 5).requires_grad_()
    y = jitted(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    is_kept = slope != 0
    assert 0 < is_kept.sum() < 200
    torch.testing.assert_close(slope, torch.where(is_kept, a, 0.0))
    torch.testing.assert_close(y, torch.where(is_kept, a * x, a * low) - a * low * p)


@pytest.mark.parametrize("hard", [False, True])
def test_gumbel_softmax_has_the_gradients_of_its_softmax_and_draws_by_the_shares(hard: bool) -> None:
    tau = 0.7
    jitted = thunder.jit(lambda x: F.gumbel_softmax(x, tau, hard), transforms=[NormTransform()])
    torch.manual_seed(seeded(0))
    scores, direction = torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0.3, -1.0, 2.0])
    x = scores.expand(40000, 3).clone().requires_grad_()
    y = jitted(x)
    (slope,) = torch.autograd.grad((y * direction).sum(), x)
    shares, expected = y.argmax(-1).bincount(minlength=3) / 40000, scores.softmax(0)
    assert ((shares - expected).abs() < 6 * (expected * (1 - expected) / 40000).sqrt()).all()
    if hard:
        torch.testing.assert_close(y.sort(-1).values, torch.tensor([0.0, 0.0, 1.0]).expand(40000, 3))
        assert slope.any(-1).float().mean() > 0.5
    else:
        torch.testing.assert_close(slope, y * (direction - (y * direction).sum(-1, keepdim=True)) / tau)


@pytest.mark.parametrize(
    "noise",
    [lambda: torch.randn(3), lambda: torch.randint(0, 9, (3,)), lambda: torch.normal(0.0, 1.0, (3,)), lambda: torch.rand(3)],
    ids=["randn", "randint", "normal", "rand"],
)
def test_second_derivatives_have_the_numbers_of_the_first(noise: Callable) -> None:
    jitted = thunder.jit(lambda x: ((x + noise()) ** 3).sum(), transforms=[NormTransform()])
    torch.manual_seed(seeded(0))
    x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    (first,) = torch.autograd.grad(jitted(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second**2, 12 * first.detach())  # (6 u)^2 of 3 u^2


@pytest.mark.parametrize("mask", [lambda: torch.randn(4) > 0, lambda: torch.randint(0, 2, (4,)).bool()], ids=["randn", "randint"])
def test_sizes_of_what_is_drawn_are_refused(mask: Callable) -> None:
    with pytest.raises(DataDependentError, match="random numbers"):
        thunder.jit(lambda x: x[mask()], transforms=[SubclassTransform()])(torch.ones(4))


DISTRIBUTIONS: dict[str, Callable] = {
    "normal": lambda x: torch.randn(3),
    "normal like": torch.randn_like,
    "integers": lambda x: torch.randint(0, 99, (3,)),
    "integers like": lambda x: torch.randint_like(x, 99),
    "permutations": lambda x: torch.randperm(3),
    "uniform": lambda x: torch.rand(3),
    "places": lambda x: torch.multinomial(x.exp(), 2)[:1],
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_numbers_of_one_distribution_are_drawn_each_time(name: str) -> None:
    """As torch draws them: what a function computes twice is computed once, but not what draws."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (DISTRIBUTIONS[name](x) - DISTRIBUTIONS[name](x))

    x = torch.linspace(0.5, 1.0, 3)
    found = []
    for vjp, grad, vmap in ((torch.func.vjp, torch.func.grad, torch.func.vmap), (T.vjp, T.grad, T.vmap)):
        torch.manual_seed(seeded(0))
        total = grad(lambda x: function(x).sum())
        each = vmap(total, randomness="different")(x.expand(2, 3)) if name != "integers like" else None
        found.append((vjp(function, x)[1](x), total(x), each, torch.rand(1)))
    torch.testing.assert_close(found[1], found[0])


def test_states_of_samples_are_drawn_from() -> None:
    """torch reads a state from where its memory begins."""
    torch.manual_seed(seeded(0))
    gradients = T.vmap(T.grad(lambda x: (x * torch.randint_like(x, 1 << 20)).sum()), randomness="different")(torch.ones(3, 2))
    assert len(set(gradients.flatten().tolist())) == 6


@pytest.mark.parametrize("hard", [False, True])
def test_tangents_of_gumbel_softmax_in_traced_programs_are_torch_s(hard: bool) -> None:
    def pushed(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda x: F.gumbel_softmax(x, hard=hard), (x,), (x.cos(),))[1]

    found = []
    for function in (pushed, thunder.jit(pushed, transforms=[SubclassTransform()])):
        torch.manual_seed(seeded(0))
        found.append(function(torch.linspace(0.1, 0.9, 4)))
    torch.testing.assert_close(found[1], found[0])
    assert found[0].abs().max() > 1e-3


def test_numbers_that_nobody_uses_are_drawn() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.randn(3)
        return (x + torch.randint(0, 9, (3,))) * torch.rand(3)

    x, found = torch.ones(3), []
    for jvp, vmap in ((torch.func.jvp, torch.func.vmap), (T.jvp, T.vmap)):
        torch.manual_seed(seeded(0))
        each = vmap(function, randomness="different")(x.expand(2, 3))
        found.append((jvp(lambda x, jvp=jvp: jvp(function, (x,), (x,))[1], (x,), (x,)), each, torch.rand(1)))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("rate", [1.0, 2.5])
def test_exponential_numbers_are_torch_s_where_nothing_is_differentiated(rate: float) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * x.detach().clone().exponential_(rate)).sum()

    def outcome(run: Callable) -> object:
        torch.manual_seed(seeded(0))
        return run()

    x = torch.ones(5)
    assert torch.equal(outcome(lambda: T.grad(program)(x)), outcome(lambda: torch.func.grad(program)(x)))
    ours, torchs = outcome(lambda: T.jvp(program, (x,), (x,))), outcome(lambda: torch.func.jvp(program, (x,), (x,)))
    torch.testing.assert_close(ours, torchs)


def test_native_dropout_outside_training_is_differentiated() -> None:
    x = torch.arange(6.0).requires_grad_()
    result, mask = thunder.jit(lambda x: torch.native_dropout(x * 2, 0.5, False), transforms=[SubclassTransform()])(x)
    (slope,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(result, 2 * x) and bool(mask.all()) and torch.equal(slope, torch.full((6,), 2.0))


OWN = torch.Generator()


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
def test_second_gradients_have_the_numbers_of_a_generator_of_the_programs(transform: Callable) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * torch.rand(4, generator=OWN) * torch.rand(4)).sum()

    def found(f: Callable) -> list[torch.Tensor]:
        OWN.manual_seed(seeded(1))
        torch.manual_seed(seeded(2))
        x = torch.arange(4.0).requires_grad_()
        value = f(x)
        after = [torch.rand(1, generator=OWN), torch.rand(1)]
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return [value, slope, *torch.autograd.grad(slope.sum(), x), *after, OWN.get_state(), torch.get_rng_state()]

    jitted = thunder.jit(f, transforms=[transform()])
    for _ in range(3):
        torch.testing.assert_close(found(jitted), found(f))
