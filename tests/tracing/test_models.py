"""Unchanged models of transformers, from small configurations with random weights."""

import contextlib
import importlib

import pytest
import torch
import transformers as tf

from tests.seeds import LONG, seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor, build_norm_map, norm_report, normed, sensitivities, with_perturbation
from thunder_norm.core import kinds
from thunder_norm.transforms import NormTransform
import thunder

SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}


def gpt2():
    config = tf.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=False)
    return tf.GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 32, (2, 6))}


def llama():
    config = tf.LlamaConfig(**SIZE, num_hidden_layers=1, num_key_value_heads=1, max_position_embeddings=16, use_cache=False)
    return tf.LlamaForCausalLM(config), {"input_ids": torch.randint(0, 32, (2, 6))}


def bert():
    config = tf.BertConfig(**SIZE, num_hidden_layers=1, max_position_embeddings=16, attn_implementation="eager")
    return tf.BertModel(config), {"input_ids": torch.randint(0, 32, (2, 6))}


def vit():
    config = tf.ViTConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, image_size=8, patch_size=4
    )
    return tf.ViTModel(config), {"pixel_values": torch.randn(2, 3, 8, 8)}


def resnet():
    config = tf.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    return tf.ResNetModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


MODELS = {f.__name__: f for f in (gpt2, llama, bert, vit, resnet)}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", MODELS if LONG else ["llama", "resnet"])
def test_model_runs_in_both_modes(name):
    """Real mode is PyTorch's; normed mode is sound; norms have derivatives and sensitivities to every parameter."""
    torch.manual_seed(seeded(0))
    model, inputs = MODELS[name]()
    model.eval()
    jm = thunder.jit(model, transforms=[NormTransform()])
    with torch.no_grad():
        eager, real, y = model(**inputs)[0], jm(**inputs)[0], normed(jm)(**inputs)[0]
    torch.testing.assert_close(real, eager)
    torch.testing.assert_close(y.backing, real)
    assert torch.isfinite(y.norm_size) and actual_norm(y) <= y.norm_size * (1 + 1e-6)
    for seed in range(3):
        with torch.no_grad():
            z = normed(jm)(**random_like(inputs, seed))[0]
        assert actual_norm(z) <= z.norm_size * (1 + 1e-6)
    assert thunder.cache_misses(jm) == 2  # one in real mode, one in normed mode

    report = norm_report(jm, **inputs)
    assert report.rows[-1].norm_size > 0 and all(
        r.tightness is None or r.tightness != r.tightness or r.tightness <= 1 + 1e-5 for r in report
    )
    leaves = {
        n: with_perturbation(getattr(kinds, row.kind)(row.norm_size, elem_dims=row.elem_dims, norm_size_requires_grad=True))
        for n, row in report.parameters.items()
    }
    norm_map = build_norm_map(model, parameters="measured", **inputs)
    out = norm_map(**inputs, normed_state_dict=leaves)[0]
    out.norm_size.backward(retain_graph=True)
    assert all(leaf.norm_size.grad is None or torch.isfinite(leaf.norm_size.grad) for leaf in leaves.values())
    found = sensitivities(out, leaves)
    assert all(torch.isfinite(s) and s >= 0 for s in found.values())
    assert sum(bool(s > 0) for s in found.values()) > len(found) / 2
    if name != "gpt2":  # GPT-2's tied table is measured as a matrix, given as rows
        torch.testing.assert_close(out.norm_size.item(), y.norm_size.item(), rtol=1e-6, atol=0)


@pytest.fixture
def collector_in_a_context_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What plain Thunder needs to trace models of transformers 5 (docs/upstream.md), and our transforms do not."""
    with contextlib.suppress(ImportError):  # before 4.57 there is none
        monkeypatch.setattr(
            importlib.import_module("transformers.utils.output_capturing"), "is_torchdynamo_compiling", lambda: False
        )


@pytest.mark.parametrize("name", MODELS if LONG else ["resnet"])
def test_real_mode_is_plain_thunder(name, collector_in_a_context_variable):
    torch.manual_seed(seeded(0))
    model, inputs = MODELS[name]()
    model.eval()
    with torch.no_grad():
        ours, plain = (thunder.jit(model, transforms=t) for t in ([NormTransform()], []))
        assert torch.equal(ours(**inputs)[0], plain(**inputs)[0])
    # a shape is a `torch.Size` for us, and an operation for Thunder, which nothing uses
    names = [[b.sym.name for b in thunder.last_traces(jm)[0].bound_symbols if b.sym.name != "shape"] for jm in (ours, plain)]
    assert names[0] == names[1]


def random_like(inputs, seed):
    g = torch.Generator().manual_seed(seeded(seed))
    return {
        k: torch.randn(v.shape, generator=g) * 3 if v.is_floating_point() else torch.randint(0, 32, v.shape, generator=g)
        for k, v in inputs.items()
    }


def test_derivative_to_the_norm_of_an_input():
    torch.manual_seed(seeded(0))
    model, _ = vit()
    jm = thunder.jit(model.eval(), transforms=[NormTransform()])
    x = RMSTensor(2.0, backing=torch.randn(1, 3, 8, 8).clamp(-1, 1), elem_dims=(1,), norm_size_requires_grad=True)
    y = jm(pixel_values=with_perturbation(x)).last_hidden_state
    assert y.perturbation_size is not None
    (g,) = torch.autograd.grad(y.norm_size, x.norm_size)
    assert torch.isfinite(g) and g >= 0
