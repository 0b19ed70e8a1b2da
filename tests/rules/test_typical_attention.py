"""Attention and random matrices in mode "typical", against samples of Gaussians."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import RMSTensor, norm_mode

D = torch.float64


@pytest.mark.parametrize("size", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("keys", [2, 8])
def test_typical_attention_moves_as_gaussians_do(keys, size):
    """As two keys do exactly; of more, as their two largest logits do where logits are large, and where they are not at most that."""
    generator, width = torch.Generator().manual_seed(seeded(2)), 256  # so wide that logits are Gaussian

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(2000, *shape, dtype=D, generator=generator)

    q, k, v = math.sqrt(size) * random(1, width), math.sqrt(size) * random(keys, width), random(keys, width)
    for slot, move in ((0, random(1, width)), (1, random(keys, width))):
        given = [q, k, v]
        ahead, behind = (
            F.scaled_dot_product_attention(*(t + s * 1e-6 * move if i == slot else t for i, t in enumerate(given)))
            for s in (1, -1)
        )
        gain, error = root_mean_square_of(ahead - behind)
        with norm_mode("typical"):
            fused = F.scaled_dot_product_attention(*(
                RMSTensor(n, backing=t[:1], perturbation_size=float(i == slot))
                for i, (t, n) in enumerate(zip(given, (math.sqrt(size), math.sqrt(size), 1.0), strict=True))
            ))  # fmt: skip
            x, y, z = (
                RMSTensor(n, backing=t[:1], perturbation_size=float(i == slot))
                for i, (t, n) in enumerate(zip(given, (math.sqrt(size), math.sqrt(size), 1.0), strict=True))
            )
            written = ((x @ y.mT) / math.sqrt(width) + torch.zeros(1, keys, dtype=D)).softmax(-1) @ z
            summed = ((x * y).sum(-1) / math.sqrt(width)).softmax(-1).unsqueeze(-2) @ z  # as memory networks have it
        claim = fused.perturbation_size.item() * 2e-6
        assert claim == pytest.approx(gain, rel=6 * error + 0.02) if keys == 2 else gain * 0.95 < claim < 1.6 * gain
        assert written.perturbation_size.item() == pytest.approx(2 * fused.perturbation_size.item(), rel=1e-6)
        assert summed.perturbation_size.item() == pytest.approx(2 * fused.perturbation_size.item(), rel=1e-6)


def root_mean_square_of(t: torch.Tensor) -> tuple[float, float]:
    """It, and its relative standard error over the first dimension."""
    energies = t.square().flatten(1).mean(1)
    mean = energies.mean().item()
    return math.sqrt(mean), energies.std().item() / math.sqrt(len(energies)) / (2 * mean)


def test_a_mask_does_not_make_logits_large():
    """-1e9 added to some of the logits says nothing about how much the others differ."""
    with norm_mode("typical"):
        q, k = (RMSTensor(1.0, backing=torch.zeros(4, 16), perturbation_size=1.0) for _ in range(2))
        mask = torch.triu(torch.full((4, 4), -1e9), 1)
        open_ = (q @ k.mT / 4).softmax(-1).perturbation_size
        for masked in (q @ k.mT / 4 + mask, (mask + q @ k.mT * 0.25), (q @ k.mT / 4).masked_fill(mask < 0, -math.inf)):
            torch.testing.assert_close(masked.softmax(-1).perturbation_size, open_)
        # of logits that are no products nothing is known
        logits = RMSTensor(1e9, elem_dims=(), backing=torch.zeros(4, 4), perturbation_size=1.0)
        assert logits.softmax(-1).perturbation_size.item() == 1.0


@pytest.mark.parametrize("size", [0.5, 3.0, 12.0])
def test_scores_of_relative_positions_are_scores_along_both_axes(size):
    """As SAM and MViT v2 have them: for rows and for columns, added to those of the contents, and all that written back."""
    generator, width, samples = torch.Generator().manual_seed(seeded(5)), 256, 1000

    def logits(q, k, rows, columns):
        attention = q @ k.mT / 64  # small ones
        h = torch.einsum("bqc,hc->bqh", q, rows).unsqueeze(-1)
        w = torch.einsum("bqc,wc->bqw", q, columns).unsqueeze(-2)
        attention[:, :] = (attention.view(-1, 1, 4, 4) + h + w).view(-1, 1, 16)
        return attention

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=D, generator=generator)

    # a table for each sample, so that sizes are those of all tables
    q, k, rows, columns = (
        random(samples, 1, width),
        random(samples, 16, width),
        random(samples, 4, width),
        random(samples, 4, width),
    )
    scale = size / math.sqrt(width)

    def sampled(q):
        h, w = (torch.einsum("bqc,bhc->bqh", q, t) * scale for t in (rows, columns))
        return (q @ k.mT / 64 + (h.unsqueeze(-1) + w.unsqueeze(-2)).flatten(-2)).softmax(-1)

    move = random(samples, 1, width)
    weights = (sampled(q + 1e-6 * move) - sampled(q - 1e-6 * move)) @ random(samples, 16, width)
    gain, error = root_mean_square_of(weights / 2e-6)
    with norm_mode("typical"):
        x, y, a, b = (
            RMSTensor(n, backing=t, perturbation_size=float(i == 0))
            for i, (t, n) in enumerate(((q[:1], 1.0), (k[:1], 1.0), (rows[0], scale), (columns[0], scale)))
        )
        found = logits(x, y, a, b)
        moved, p = found.perturbation_size.item(), found.softmax(-1).perturbation_size.item()
    assert p > gain * (1 - 6 * error)  # of values of size 1
    assert p < moved * 1.0001 and (size < 10 or p < 6 * gain)  # twice `softmax_gain` at most, and for each of the two axes


@pytest.mark.parametrize(
    "elsewhere",
    [
        lambda t: t.view(2, 2, 3, 3).permute(1, 0, 2, 3),
        lambda t: t.unflatten(0, (2, 2)).transpose(0, 1).float(),
        lambda t: (t.view(2, 2, 3, 3) + torch.full((2, 1, 3, 3), -1e9)).view(-1, 3, 3),
        lambda t: torch.cat([t[:1], t[1:]]),
        lambda t: t.unsqueeze(0).expand(2, -1, -1, -1).clone(),
        lambda t: t + torch.zeros(3, 1),
    ],
)
def test_scores_are_scores_in_other_places(elsewhere):
    """Views as windowed attention makes them, masked in between."""
    with norm_mode("typical"):
        q, k = (RMSTensor(4.0, backing=torch.zeros(4, 3, 16), perturbation_size=1.0) for _ in range(2))
        t = q @ k.mT
        there = elsewhere(t)
        share = t.softmax(-1).perturbation_size / t.perturbation_size
        assert share < 0.5
        torch.testing.assert_close(there.softmax(-1).perturbation_size / there.perturbation_size, share)


def test_scores_of_rows_say_nothing_of_columns():
    """What is the same along a dimension does not tell logits apart there, and what was masked is not what was written."""
    with norm_mode("typical"):
        q, k = (RMSTensor(4.0, backing=torch.zeros(4, 3, 16), perturbation_size=1.0) for _ in range(2))
        small, large = q @ k.mT / 1000, q @ k.mT
        of_rows = small + large[:, :, :1]
        assert of_rows.softmax(-1).perturbation_size > 0.9 * of_rows.perturbation_size
        assert of_rows.softmax(-2).perturbation_size < 0.5 * of_rows.perturbation_size
        flat = of_rows.flatten(1).softmax(-1)
        assert flat.perturbation_size > 0.9 * of_rows.perturbation_size
        written = large.clone()
        written[:, 1:] = small[:, 1:]
        assert written.softmax(-1).perturbation_size > 0.9 * written.perturbation_size


def test_a_mask_does_not_make_decays_small():
    """The same of the exponential of numbers of at most 0."""
    with norm_mode("typical"):
        x = -RMSTensor(1.0, backing=torch.zeros(3, 4), perturbation_size=1.0).abs()
        decays = x.exp().norm_size.item()
        assert decays < 0.6
        for masked, size in ((-1e9, 1.0), (-math.inf, decays)):
            y = x.masked_fill(torch.eye(3, 4, dtype=torch.bool), masked).exp()
            assert (y.norm_size.item(), y.perturbation_size.item()) == (size, size)


def test_a_matrix_of_random_entries_multiplies_by_the_root_of_its_width():
    """As a kernel does, by the root of its width and its taps; the bound is the width."""
    generator = torch.Generator().manual_seed(seeded(4))
    w, x = 0.3 * torch.randn(32, 48, dtype=D, generator=generator), torch.randn(4000, 48, dtype=D, generator=generator)
    kernel, image = w.view(32, 16, 3), torch.randn(4000, 16, 3, dtype=D, generator=generator)
    for op, a, b in ((F.linear, x, w), (F.conv1d, image, kernel)):
        with norm_mode("typical"):
            rms = RMSTensor(0.3, elem_dims=tuple(range(-b.ndim, 0)), backing=b)
            claim = op(RMSTensor(1.0, elem_dims=(1 - a.ndim,) if a.ndim == 3 else (-1,), backing=a), rms).norm_size.item()
        assert claim == pytest.approx(op(a, b).square().mean().sqrt().item(), rel=0.08)


@pytest.mark.parametrize("n", [0.3, 1.0, 2.0])
def test_shares_of_logistic_scores_are_divided_by_what_they_typically_sum_up_to(n):
    """Renormalised scores of the best of some experts: against Gaussian logits, where the sum may be as small as one likes."""
    z = n * torch.randn(2000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(3)))
    best = torch.sigmoid(z).topk(2, dim=-1)[0]
    sampled = (best / (best.sum(-1, keepdim=True) + 1e-20)).square().mean().sqrt()
    with norm_mode("typical"):
        x = RMSTensor(n, backing=z, perturbation_size=1.0)
        scores = torch.sigmoid(x).topk(2, dim=-1)[0]
        shares = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    assert sampled / 2 <= shares.norm_size <= 4 * sampled
    assert shares.perturbation_size <= 4


@pytest.mark.parametrize("f", [torch.sigmoid, torch.tanh, torch.relu, F.gelu])
def test_of_what_is_infinite_functions_have_their_limit(f):
    """Scores that are masked with -inf, say."""
    with norm_mode("typical"):
        found = f(RMSTensor(math.inf, backing=torch.zeros(3), perturbation_size=1.0))
    torch.manual_seed(seeded(0))
    wanted = f(torch.randn(100_000).double() * 1e30).square().mean().sqrt()
    assert found.norm_size.item() == (math.inf if wanted > 1e20 else pytest.approx(wanted.item(), rel=0.01))
    assert math.isfinite(found.perturbation_size.item())


@pytest.mark.parametrize("n", [0.1, 1.0])
@pytest.mark.parametrize("longest", [1.0, 1e10])
def test_transparencies_of_long_intervals_move_as_jumps_do(n, longest):
    """exp(-density * length), as NeRF has it: the last interval is infinite, so to say, and what moves as far as a density is large moves it by 1."""
    generator, lengths = torch.Generator().manual_seed(seeded(6)), torch.tensor([0.5, longest], dtype=D)
    density, moved = (n * torch.randn(20_000, 2, dtype=D, generator=generator) for _ in range(2))

    def transparency(x):
        return torch.exp(-torch.relu(x) * lengths)

    sampled = (transparency(density + moved) - transparency(density)).square().mean(0).max().sqrt().item()
    with norm_mode("typical"):
        claim = transparency(RMSTensor(n, elem_dims=(), backing=density, perturbation_size=n)).perturbation_size.item()
    assert sampled / 2 < claim < 4 * sampled * max(n, 1 / n) ** 0.5


def test_a_factor_that_is_masked_does_not_make_transparencies_still():
    """-1e9 in some entries of what is multiplied says nothing of the others."""
    with norm_mode("typical"):
        x = RMSTensor(1.0, elem_dims=(), backing=torch.zeros(3, 4), perturbation_size=1.0).abs()
        masked = x.masked_fill(torch.eye(3, 4, dtype=torch.bool), 1e9)
        assert (-(masked * torch.full((4,), 2.0))).exp().perturbation_size.item() >= 1.0
