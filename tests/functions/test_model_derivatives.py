"""Derivatives and sensitivities of whole models, to a normed input and to every parameter.

Acquiring a trace of a transformers model takes seconds: models have one layer, and all tests of a model share one trace.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import thunder_norm
from tests.seeds import seeded
from thunder_norm import NormedTensor, RMSTensor, norm_report, sensitivities, with_perturbation
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.transforms import NormTransform
import thunder

transformers = pytest.importorskip("transformers")
WIDTH, TOKENS = 16, 5
SOUND = 1 + 1e-5


def language_model(config: Any, cls: type) -> tuple[nn.Module, str, tuple[int, ...], tuple[int, ...]]:
    return cls(config), "inputs_embeds", (2, TOKENS, WIDTH), (-1,)


def gpt2():
    options = {"vocab_size": 11, "n_positions": 8, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "use_cache": False}
    return language_model(transformers.GPT2Config(**options, attn_implementation="eager"), transformers.GPT2LMHeadModel)


def llama():
    options = {"vocab_size": 11, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "use_cache": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**options, **heads, attn_implementation="sdpa")
    return language_model(config, transformers.LlamaForCausalLM)


def bert():
    options = {"vocab_size": 11, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.BertConfig(**options, num_attention_heads=2, attn_implementation="eager")
    return language_model(config, transformers.BertModel)


def vit():
    options = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**options, image_size=8, patch_size=4, attn_implementation="sdpa")
    return transformers.ViTModel(config), "pixel_values", (2, 3, 8, 8), (-3,)


def resnet():
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    return transformers.ResNetModel(config), "pixel_values", (2, 3, 16, 16), (-3,)


BUILDERS: dict[str, Callable] = {f.__name__: f for f in (gpt2, llama, bert, vit, resnet)}


@dataclass
class Run:
    """One model and what came out of it."""

    model: nn.Module
    argument: str
    jitted: Callable
    leaves: dict[str, NormedTensor]
    x: RMSTensor
    report: Any
    expected: torch.Tensor  # by PyTorch alone
    y: NormedTensor

    def sample(self) -> torch.Tensor:
        """Another input of the same norm."""
        t = torch.randn(self.x.shape)
        return t * (self.x.norm_size.item() / RMSTensor.of(t, self.x.elem_dims).norm_size.item())


@functools.cache
def run(name: str) -> Run:
    """Build a model with random weights and run it in every way."""
    torch.manual_seed(seeded(0))
    model, argument, shape, dims = BUILDERS[name]()
    model.eval().requires_grad_(False)
    with torch.no_grad():
        for p in model.parameters():  # biases and gains as a trained model has them
            p.add_(0.1 * torch.randn_like(p))
    t = torch.randn(shape)
    size = RMSTensor.of(t, dims).norm_size.item()
    x = with_perturbation(RMSTensor(size, backing=t, elem_dims=dims, norm_size_requires_grad=True))
    report = norm_report(thunder.jit(model, transforms=[NormTransform()]), **{argument: RMSTensor.of(t, dims)})
    leaves = {
        name: with_perturbation(
            getattr(thunder_norm, row.kind)(row.norm_size, elem_dims=row.elem_dims, norm_size_requires_grad=True)
        )
        for name, row in report.parameters.items()
    }
    expected = model(**{argument: t})[0]
    jitted = thunder.jit(model, transforms=[NormTransform(parameters=leaves)])
    y = jitted(**{argument: x})[0]
    return Run(model, argument, jitted, leaves, x, report, expected, y)


pytestmark = pytest.mark.slow
each_model = pytest.mark.parametrize("name", BUILDERS)


@each_model
def test_the_norm_is_finite_and_bounds_the_actual_output(name):
    r = run(name)
    assert r.y.norm_size.ndim == 0 and torch.isfinite(r.y.norm_size) and r.y.norm_size > 0
    torch.testing.assert_close(r.y.backing, r.expected)
    assert type(r.y).of(r.expected, r.y.elem_dims).norm_size <= r.y.norm_size * SOUND
    misses = thunder.cache_misses(r.jitted)
    for _ in range(5):
        t = r.sample()
        x = with_perturbation(type(r.x)(r.x.norm_size, backing=t, elem_dims=r.x.elem_dims))
        y = r.jitted(**{r.argument: x})[0]
        assert torch.equal(y.norm_size, r.y.norm_size)
        actual = r.model(**{r.argument: t})[0]
        assert type(y).of(actual, y.elem_dims).norm_size <= y.norm_size * SOUND
    assert thunder.cache_misses(r.jitted) == misses


@each_model
def test_every_operation_is_within_its_bound(name):
    rows = run(name).report.rows
    finite = [row for row in rows if row.norm_size <= torch.finfo(torch.float32).max]
    assert all(row.tightness is None or row.tightness <= SOUND for row in finite)
    assert len(finite) >= len(rows) - 2  # scores masked twice overflow to -inf


@each_model
def test_derivatives_to_the_input_and_every_parameter(name):
    """Those of eager mode; every parameter the output depends on takes part."""
    r = run(name)
    tables = {n for n, _ in r.model.named_parameters() if "embed_tokens" in n or "word_embeddings" in n}  # inputs are embedded
    masks = {"embeddings.mask_token"}
    assert {n for n, _ in r.model.named_parameters()} - tables - masks == set(r.leaves) - tables
    wanted = [r.x.norm_size, *(leaf.norm_size for leaf in r.leaves.values())]
    got = torch.autograd.grad(r.y.norm_size, wanted, retain_graph=True, allow_unused=True, materialize_grads=True)
    assert all(torch.isfinite(g) and g >= 0 for g in got)
    result, _ = run_eagerly(r.model, (), {r.argument: r.x}, policy=r.leaves, mode="bound")
    want = torch.autograd.grad(result[0].norm_size, wanted, allow_unused=True, materialize_grads=True)
    # norms are float64, but for what is measured of llama's float32 tables of cosines, which a trace makes anew
    exact, derivatives = ((1e-7, 0), (1e-7, 1e-8)) if name == "llama" else ((1e-12, 0), (1e-9, 1e-12))
    torch.testing.assert_close(result[0].norm_size, r.y.norm_size, rtol=exact[0], atol=exact[1])
    for n, g, w in zip(["input", *r.leaves], got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=derivatives[0], atol=derivatives[1], msg=lambda m, n=n: f"{n}: {m}")


@each_model
def test_sensitivities_to_the_input_and_every_parameter(name):
    r = run(name)
    found = sensitivities(r.y, {"input": r.x, **r.leaves})
    assert all(torch.isfinite(s) and s >= 0 for s in found.values())
    assert found["input"] > 0 and sum(s > 0 for s in found.values()) >= len(found) // 2


@each_model
def test_first_order_moves_stay_within_the_sensitivities(name):
    """||f(x, W + D) - f(x, W)|| <= S ||D|| for small D, in float64."""
    r = run(name)
    found = sensitivities(r.y, {"input": r.x, **r.leaves})
    model = copy.deepcopy(r.model).double()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    t = r.x.backing.double()

    def output(changed: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, changed, (), {r.argument: x})[0]

    before = output({}, t)
    for n, leaf in {"input": r.x, **r.leaves}.items():
        old = t if n == "input" else tensors[n]
        for _ in range(3):
            direction = torch.randn_like(old)
            dims = leaf.elem_dims
            direction *= 1e-4 / type(leaf).of(direction, dims).norm_size
            after = output({}, t + direction) if n == "input" else output({n: old + direction}, t)
            moved = type(r.y).of(after - before, r.y.elem_dims).norm_size
            assert moved <= 1e-4 * found[n] * (1 + 1e-2) + 1e-13, n
