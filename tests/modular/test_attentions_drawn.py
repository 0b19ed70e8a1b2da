"""Blocks and heads that are found in drawn attentions, and what a clip does to them, against what is known by construction."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.modular.drawn_attentions import DrawnAttention
from tests.seeds import LONG, seeded
from thunder_norm.modular import QKClip, find_roles

NUM = 400 if LONG else 40
NAMES = {"q": "query", "k": "key", "v": "value"}


def drawn(number: int) -> tuple[DrawnAttention, tuple[torch.Tensor, ...]]:
    torch.manual_seed(seeded(number))
    model = DrawnAttention(number)
    return model, model.inputs


@pytest.mark.parametrize("number", range(NUM))
def test_blocks_and_heads_are_those_of_the_construction(number):
    model, inputs = drawn(number)
    roles = find_roles(model, *inputs)
    for name, (axis, parts) in model.rows().items():
        for part, rows in parts.items():
            found = [b for b in roles[name].blocks if b.role == NAMES[part]]
            heads = [of for b in found for of in b.of_heads or ()]
            where = name, part, [str(b) for b in roles[name].blocks], model.how
            assert all(b.axis == axis for b in found), where
            assert sorted(sorted(of.indices.tolist()) for of in heads) == sorted(sorted(of) for of in rows.tolist()), where
            assert len(found) == 1 or model.how["logits"] == "heads apart" and len(found) == len(rows), where


@pytest.mark.parametrize("number", range(NUM))
@torch.no_grad()
def test_a_clip_multiplies_the_logits_of_heads_above_tau_and_nothing_else(number):
    model, inputs = drawn(number)
    alpha = (0.25, 0.5, 1.0, 0.0)[number % 4]
    model.looks = True
    model(*inputs)
    before, values = model.seen
    model.looks = False
    largest = before.amax((0, 2, 3))
    clip = QKClip(model, *inputs, alpha=alpha)
    torch.testing.assert_close(clip.largest_logits(*inputs).sort().values, largest.sort().values)
    clip.tau = largest.amax().item() / 2 if len(largest) == 1 else largest.sort().values[-2:].mean().item()
    old = copy.deepcopy(dict(model.named_parameters()))
    clipped = clip.step_(*inputs)
    gammas = torch.where(largest > clip.tau, clip.tau / largest, 1.0)
    assert [c.gamma for c in sorted(clipped, key=lambda c: c.gamma)] == pytest.approx(gammas[gammas < 1].sort().values.tolist())
    model.looks = True
    model(*inputs)
    after, still = model.seen
    torch.testing.assert_close(after, before * gammas.view(-1, 1, 1), rtol=1e-9, atol=1e-9)
    assert torch.equal(after[:, gammas == 1], before[:, gammas == 1]) and torch.equal(still, values)
    sharing = model.heads // model.groups
    powers = {"q": alpha if sharing == 1 else 1.0, "k": 1 - alpha if sharing == 1 else 0.0}
    for name, (axis, parts) in model.rows().items():
        factors = torch.ones(old[name].shape[axis], dtype=old[name].dtype)
        for part, power in powers.items():
            for h, rows in enumerate(parts.get(part, ())):
                factors[rows] = gammas[h] ** power
        factors = factors.view([-1 if d == axis else 1 for d in range(old[name].ndim)])
        torch.testing.assert_close(model.get_parameter(name).data, old[name] * factors, rtol=1e-12, atol=0)
    others = [name for name in old if name not in model.rows()]
    assert all(torch.equal(model.get_parameter(name), old[name]) for name in others)
