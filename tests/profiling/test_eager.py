"""Profiles of the program that PyTorch runs, against torch's own counters on a run: FLOPs, saved bytes, peak memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests import measured
from tests.profiling import profiled
from thunder_norm.errors import ProfileError, UnsupportedOpError
from thunder_norm.transforms import profile

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 32, "num_hidden_layers": 1}


def tokens():
    return {"input_ids": torch.randint(1, 32, (2, 8))}


def gpt2():
    config = tf.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=32, n_positions=16, use_cache=False)
    return tf.GPT2LMHeadModel(config), tokens()


def gpt2_without_kernel():
    config = tf.GPT2Config(
        n_layer=1, n_head=2, n_embd=32, vocab_size=32, n_positions=16, use_cache=False, attn_implementation="eager"
    )
    return tf.GPT2LMHeadModel(config), tokens()


def llama():
    config = tf.LlamaConfig(**SIZE, num_key_value_heads=2, max_position_embeddings=16, use_cache=False)
    model, inputs = tf.LlamaForCausalLM(config), tokens()
    if (
        int(tf.__version__.partition(".")[0]) >= 5
    ):  # which leaves a mask out that hides nothing, if it can see that: a profile has no values
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, 0] = 0
    return model, inputs


def bert():
    config = tf.BertConfig(**SIZE, max_position_embeddings=16, pad_token_id=None, attn_implementation="eager")
    return tf.BertModel(config), tokens()


def vit():
    config = tf.ViTConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=1, image_size=8, patch_size=4
    )
    return tf.ViTModel(config), {"pixel_values": torch.randn(2, 3, 8, 8)}


def resnet():
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return tf.ResNetModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


PROGRAMS = {
    f.__name__: f
    for f in (
        gpt2,
        gpt2_without_kernel,
        llama,
        bert,
        vit,
        resnet,
        profiled.convolutions,
        profiled.tied,
        profiled.mlp,
        profiled.encoder,
    )
}
# The CPU's convolutions keep copies of their operands in other layouts, which only they know of.
HAVE_WORKSPACES = {"resnet", "convolutions", "vit"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_profile_is_what_a_run_takes(name):
    model, inputs = PROGRAMS[name]()

    def run():
        return model(**inputs)

    def run_both():
        for p in model.parameters():
            p.grad = None
        measured.backward(run())

    found = profile(model, **inputs, backward=True, target="eager")
    assert all(p.grad is None for p in model.parameters())
    assert (found.forward_flops, found.backward_flops) == measured.flops(run)
    assert found.unknown == {}
    assert found.saved_bytes == measured.saved_bytes(run, [*model.parameters(), *model.buffers()])
    run_both()
    for p in model.parameters():
        p.grad = None
    peak = measured.peak_bytes(run_both)
    own = found.peak_bytes - found.resident_bytes
    if name in HAVE_WORKSPACES:
        assert own <= peak
    else:  # scalars that autograd makes for a moment are not there in a profile
        assert own <= peak <= own + 64


def test_attention_counts_the_same_with_and_without_the_kernel():
    """torch's counter misses the CPU's kernel: what ours says of it is what the products of the written-out attention take."""
    found = [profile(m, **x, target="eager").forward_flops for m, x in (gpt2(), gpt2_without_kernel())]
    assert found[0] == found[1]


def test_recurrence_counts_the_same_with_and_without_the_kernel():
    """The CPU runs a layer of an LSTM as one kernel; on meta torch's counter sees its products."""
    model, x = nn.LSTM(8, 16, num_layers=2, bidirectional=True), torch.randn(5, 2, 8, requires_grad=True)
    found = profile(model, x, backward=True, target="eager")
    traced = profile(model, x, backward=True)
    assert (traced.forward_flops, traced.backward_flops) == (found.forward_flops, found.backward_flops)
    with torch.device("meta"):
        model, x = nn.LSTM(8, 16, num_layers=2, bidirectional=True), torch.empty(5, 2, 8, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = model(x)[0].sum()
    with FlopCounterMode(display=False) as backward:
        out.backward()
    assert (found.forward_flops, found.unknown) == (forward.get_total_flops(), {})
    first = (
        4 * 2 * 2 * (4 * 16 * 16)
    )  # gradients of the zeros that each layer and direction starts from: only the kernel has them
    assert found.backward_flops == backward.get_total_flops() + first


def test_without_backward_nothing_is_saved():
    model, inputs = profiled.mlp()
    found = profile(model, **inputs, target="eager")
    assert (found.backward_flops, found.saved_bytes, found.backward_rows) == (0, 0, ())
    with torch.no_grad():
        assert found.peak_bytes - found.resident_bytes == measured.peak_bytes(lambda: model(**inputs))


def test_views_and_shared_storages_count_once():
    x = torch.randn(4, 6, requires_grad=True)

    def program(x):
        y = x.exp()  # saved: its own result
        return (y[0] * y[1]).sum() + (y.T @ y.flatten()[:4]).sum()  # saved: views of it

    found = profile(program, x, backward=True, target="eager")
    assert found.saved_bytes == x.nbytes == measured.saved_bytes(lambda: program(x), [])
    assert [r.output_bytes for r in found.rows if r.op in ("getitem", "T", "flatten")] == [0] * 5


def test_checkpoint_saves_its_inputs_and_computes_twice():
    layer = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    x = torch.randn(3, 8, requires_grad=True)

    def plain(x):
        return layer(x).sum()

    def saving(x):
        return checkpoint(layer, x, use_reentrant=False).sum()

    with_all, without = (profile(f, x, backward=True, target="eager") for f in (plain, saving))
    assert without.saved_bytes == x.nbytes < with_all.saved_bytes
    forward, backward = measured.flops(lambda: saving(x))
    assert (without.forward_flops, without.backward_flops) == (forward, backward)
    assert x.grad is None or (x.grad is not None and x.grad.shape == x.shape)


def test_rows_say_where_they_come_from():
    model, inputs = profiled.tied()
    found = profile(model, **inputs, backward=True, target="eager")
    attention = next(r for r in found.rows if r.op == "scaled_dot_product_attention")
    assert attention.module == "blocks.0"
    assert attention.location.startswith(profiled.__file__) and "F.scaled_dot_product_attention(q, k, v" in attention.location
    assert attention.shape == (2, 4, 8, 8) and attention.dtype == torch.float32
    first = next(r for r in found.rows if r.module == "blocks.0.mlp.0")
    assert (first.op, first.flops, first.backward_flops) == ("linear", 2 * 16 * 32 * 128, 2 * 2 * 16 * 32 * 128)
    assert "self.mlp(x)" in first.location
    derivative = [r for r in found.backward_rows if r.derivative_of == first.number]
    assert sum(r.flops for r in derivative) == first.backward_flops
    assert all(r.module == first.module and r.location == first.location for r in derivative)


def test_nothing_of_the_users_changes():
    model, inputs = profiled.convolutions()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    profile(model, **inputs, backward=True, target="eager")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert not torch.nn.modules.module._global_forward_hooks


class Constant(nn.Module):
    """Holds a table that is no buffer."""

    def __init__(self):
        super().__init__()
        self.tables = [torch.ones(4, 3)]

    def forward(self, x):
        return x @ self.tables[0]


@pytest.mark.parametrize("target", ["eager", "trace"])
def test_a_module_on_meta_may_hold_constants_there(target):
    with torch.device("meta"):
        model, x = Constant(), torch.empty(2, 4)
    assert (
        profile(model, x, target=target, device="cpu").flops == profile(Constant(), torch.ones(2, 4), target=target).flops == 48
    )


def test_a_module_may_hold_what_was_computed_from_its_parameters():
    """Pruning leaves a weight with a history on the module, which Python does not copy."""
    model, x = prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.4), torch.randn(2, 4)
    assert model.weight.grad_fn is not None
    found = profile(model, x, backward=True, target="eager")
    assert (found.forward_flops, found.backward_flops) == (48, 48) == measured.flops(lambda: model(x))


def test_a_function_may_close_over_tensors():
    weight = nn.Parameter(torch.randn(5, 3))
    weight.grad = torch.full_like(weight, 7.0)
    found = profile(lambda x: F.linear(x, weight).sum(), torch.randn(2, 3), backward=True, target="eager")
    assert (found.forward_flops, found.backward_flops) == (60, 60)
    assert type(weight.grad) is torch.Tensor and torch.equal(weight.grad, torch.full_like(weight, 7.0))


def test_meta_stands_for_a_real_device():
    """Llama asks for autocast on its input's device, and there is none on meta."""
    model, inputs = llama()
    real = profile(model, **inputs, backward=True, target="eager")
    on_meta = model.to("meta")
    given = {name: t.to("meta") for name, t in inputs.items()}
    found = profile(on_meta, **given, backward=True, target="eager", device="cpu")
    assert (found.flops, found.saved_bytes, found.peak_bytes) == (real.flops, real.saved_bytes, real.peak_bytes)


def test_a_program_that_needs_values_is_refused_with_its_line():
    def program(x):
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(UnsupportedOpError, match=r"test_eager.py:\d+:  if x.sum\(\) > 0"):
        profile(program, torch.ones(3), target="eager")


def test_transforms_inside_are_counted_and_with_a_backward_refused():
    def program(x):
        return torch.func.grad(lambda v: (v @ v.T).sum())(x) @ x.T

    x = torch.randn(3, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        program(x)
    assert profile(program, x, target="eager").flops == counter.get_total_flops()
    with pytest.raises(UnsupportedOpError, match=r"test_eager.py:\d+:  return torch.func.grad"):
        profile(program, x, backward=True, target="eager")


def test_a_backward_of_nothing_is_refused():
    with pytest.raises(ProfileError, match="requires grad"):
        profile(torch.exp, torch.ones(3), backward=True, target="eager")


def test_groups_count_as_convolutions_of_their_own():
    """torch's counter multiplies the gradient of a grouped kernel by the number of groups."""
    x, weight = torch.randn(2, 8, 9, 9, requires_grad=True), nn.Parameter(torch.randn(16, 2, 3, 3))

    def grouped(x):
        return F.conv2d(x, weight, groups=4, stride=2).sum()

    def separate(x):
        pairs = zip(x.chunk(4, 1), weight.chunk(4), strict=True)
        return torch.cat([F.conv2d(part, kernel, stride=2) for part, kernel in pairs], 1).sum()

    found = profile(grouped, x, backward=True, target="eager")
    with FlopCounterMode(display=False) as forward:
        result = separate(x)
    with FlopCounterMode(display=False) as backward:
        result.backward()
    assert (found.forward_flops, found.backward_flops) == (forward.get_total_flops(), backward.get_total_flops())
