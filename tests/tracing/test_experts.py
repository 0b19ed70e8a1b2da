"""Experts of transformers whose inputs are the tokens sent to them: in traces every expert gets all tokens, and results are eager PyTorch's."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor, normed
from thunder_norm.transforms import NormTransform
import thunder

transformers = pytest.importorskip("transformers", minversion="5")  # before it experts are modules of their own
TOKENS, WIDTH, EXPERTS = 6, 8, 4


def made(model: str, name: str, *args, config: str = "", **options) -> nn.Module:
    """A class of a model of transformers, with a configuration in small; `config` is the part of it that it takes."""
    modeling, configuration = (importlib.import_module(f"transformers.models.{model}.{part}_{model}") for part in _PARTS)
    torch.manual_seed(seeded(0))
    made_with = getattr(configuration, name.replace("Experts", f"{config}Config"))(**options)
    found = getattr(modeling, name)(made_with, *args)
    for p in found.parameters():
        nn.init.normal_(p, std=0.3)
    return found.eval()


_PARTS = ("modeling", "configuration")


def chosen() -> tuple[torch.Tensor, torch.Tensor]:
    """Two experts for each token and their weights; the last expert gets none, the first one most."""
    first = torch.zeros(TOKENS, dtype=torch.long)
    first[3] = 1
    weights = torch.rand(TOKENS, 2, generator=torch.Generator().manual_seed(seeded(1)))
    return torch.stack([first, torch.full((TOKENS,), 2)], 1), weights


def switch():
    experts = made("switch_transformers", "SwitchTransformersExperts", d_model=WIDTH, d_ff=12, num_experts=EXPERTS)
    index, weights = chosen()
    routed = nn.functional.one_hot(index[:, :1], EXPERTS)
    routed[2] = 0  # beyond the expert's capacity
    return experts, (routed, weights[:, :1])


def nllb():
    experts = made("nllb_moe", "NllbMoeExperts", 12, d_model=WIDTH, num_experts=EXPERTS, moe_token_dropout=0.2)
    return experts, chosen()


def dbrx():
    return made("dbrx", "DbrxExperts", config="FFN", ffn_hidden_size=12, moe_num_experts=EXPERTS, hidden_size=WIDTH), chosen()


def longcat():
    options = {"hidden_size": WIDTH, "expert_ffn_hidden_size": 12, "n_routed_experts": EXPERTS - 2, "zero_expert_num": 2}
    return made("longcat_flash", "LongcatFlashExperts", **options), chosen()


def privacy_filter():
    options = {"hidden_size": WIDTH, "intermediate_size": 12, "num_local_experts": EXPERTS}
    return made("openai_privacy_filter", "OpenAIPrivacyFilterExperts", **options), chosen()


MODELS = {"Switch Transformers": switch, "NLLB-MoE": nllb, "DBRX": dbrx, "LongCat": longcat, "Privacy Filter": privacy_filter}


def tokens(name: str) -> torch.Tensor:
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seeded(2)))
    return x[None] if name == "DBRX" else x


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_eager_ones(name):
    results = []
    for wrap in (lambda m: m, lambda m: thunder.jit(m, transforms=[NormTransform()])):
        experts, (routing, weights) = MODELS[name]()
        x, weights = tokens(name).requires_grad_(), weights.requires_grad_()
        y = wrap(experts)(x, routing, weights)
        y.square().sum().backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in experts.parameters()]
        results.append([y, x.grad, weights.grad, *gradients])
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_norms_hold(name):
    experts, (routing, weights) = MODELS[name]()
    with torch.no_grad():
        expected = experts(tokens(name), routing, weights)
        y = normed(thunder.jit(experts, transforms=[NormTransform()]))(RMSTensor.of(tokens(name)), routing, weights)
    torch.testing.assert_close(y.backing, expected)
    assert actual_norm(y) <= y.norm_size * (1 + 1e-5)
