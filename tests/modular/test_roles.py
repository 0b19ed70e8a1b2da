"""Roles of parameters, against the models' own configurations, and gradients that are zero outside of a block."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.models_zoo import MODELS as ZOO
from tests.models_zoo import built
from tests.models_zoo.case import tensors
from tests.modular.modular_models import TOKENS
from tests.seeds import LONG, named_seed
from thunder_norm.errors import NormMapKeyError, NormMismatchError
from thunder_norm.modular import find_roles, split
import thunder

# A tenth of the models, as for the table of them.
DRAWN = list(ZOO) if LONG else random.Random(named_seed("roles")).sample(list(ZOO), len(ZOO) // 10)

_IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 11, "use_cache": False, **_IDS}
_GROUPED = _SMALL | {"intermediate_size": 24, "num_key_value_heads": 2}
_NAMES = {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 8, "vocab_size": 11, "use_cache": False, **_IDS}


def _interleaved(sizes: list[int], repeats: int) -> list[list[int]]:
    """Indices of blocks of these sizes, repeated."""
    period, found, start = sum(sizes), [], 0
    for size in sizes:
        found.append([r * period + start + i for r in range(repeats) for i in range(size)])
        start += size
    return found


@dataclass(frozen=True)
class Known:
    """A model of transformers, and what its documentation says of one parameter: roles, indices, heads."""

    model: str
    config: str
    options: dict[str, Any]
    parameter: str
    blocks: list[tuple[str, list[int], int | None]]
    axis: int = 0


def _blocks(roles: list[str], indices: list[list[int]], heads: list[int | None]) -> list[tuple[str, list[int], int | None]]:
    return list(zip(roles, indices, heads, strict=True))


_QKV = ["query", "key", "value"]
_MLA = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_rope_head_dim": 4, "qk_nope_head_dim": 3, "v_head_dim": 2, "n_routed_experts": 4}
_MLA |= {"moe_intermediate_size": 12, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}
_MOE = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 4}
_MOE |= {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 1}
KNOWN = {
    "GPT-2": Known("GPT2LMHeadModel", "GPT2Config", _NAMES, "transformer.h.0.attn.c_attn.weight",
        _blocks(_QKV, _interleaved([16, 16, 16], 1), [4, 4, 4]), axis=1),
    "Llama": Known("LlamaForCausalLM", "LlamaConfig", _GROUPED, "model.layers.0.self_attn.k_proj.weight",
        _blocks(["key"], _interleaved([8], 1), [2])),
    "Phi-3": Known("Phi3ForCausalLM", "Phi3Config", _GROUPED, "model.layers.1.self_attn.qkv_proj.weight",
        _blocks(_QKV, _interleaved([16, 8, 8], 1), [4, 2, 2])),
    "Phi-3's MLP": Known("Phi3ForCausalLM", "Phi3Config", _GROUPED, "model.layers.1.mlp.gate_up_proj.weight",
        _blocks(["gate", "gated"], _interleaved([24, 24], 1), [None, None])),
    "GPT-NeoX": Known("GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL, "gpt_neox.layers.0.attention.query_key_value.weight",
        _blocks(_QKV, _interleaved([4, 4, 4], 4), [4, 4, 4])),
    "BLOOM": Known("BloomForCausalLM", "BloomConfig", _NAMES | {"hidden_size": 16}, "transformer.h.0.self_attention.query_key_value.bias",
        _blocks(_QKV, _interleaved([4, 4, 4], 4), [4, 4, 4])),
    "Falcon": Known("FalconForCausalLM", "FalconConfig", _SMALL | {"num_kv_heads": 2, "new_decoder_architecture": True},
        "transformer.h.0.self_attention.query_key_value.weight", _blocks(_QKV, _interleaved([8, 4, 4], 2), [4, 2, 2])),
    "CodeGen": Known("CodeGenForCausalLM", "CodeGenConfig", _NAMES | {"rotary_dim": 2}, "transformer.h.0.attn.qkv_proj.weight",
        _blocks(["query", "value", "key"], _interleaved([4, 4, 4], 4), [4, 4, 4])),
    "DeepSeek": Known("DeepseekV3ForCausalLM", "DeepseekV3Config", _GROUPED | _MLA, "model.layers.0.self_attn.kv_b_proj.weight",
        _blocks(["key", "value"], _interleaved([3, 2], 4), [4, 4])),
    "DeepSeek's shared key": Known("DeepseekV3ForCausalLM", "DeepseekV3Config", _GROUPED | _MLA,
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", _blocks(["", "key"], _interleaved([5, 4], 1), [None, 1])),
    "Mixtral's experts": Known("MixtralForCausalLM", "MixtralConfig", _GROUPED | {"num_local_experts": 4},
        "model.layers.0.mlp.experts.gate_up_proj", _blocks(["gate", "gated"], _interleaved([24, 24], 1), [None, None]), axis=1),
    "gpt-oss's experts": Known("GptOssForCausalLM", "GptOssConfig", _GROUPED | {"num_local_experts": 4, "head_dim": 4},
        "model.layers.0.mlp.experts.gate_up_proj", _blocks(["gate", "gate"], _interleaved([1, 1], 24), [None, None]), axis=2),
    "JetMoE": Known("JetMoeForCausalLM", "JetMoeConfig", _MOE, "model.layers.0.self_attention.kv_proj.weight",
        _blocks(["key", "value"], _interleaved([8, 8], 1), [2, 2])),
    "JetMoE's queries": Known("JetMoeForCausalLM", "JetMoeConfig", _MOE | {"num_experts_per_tok": 2},
        "model.layers.0.self_attention.experts.input_linear.weight", _blocks(["query"], _interleaved([8], 1), [2]), axis=1),
    "Mamba": Known("MambaForCausalLM", "MambaConfig", _SMALL | {"state_size": 3, "time_step_rank": 2},
        "backbone.layers.0.mixer.in_proj.weight",  # a function of the first half multiplies the state's inputs
        _blocks(["gate", "gate"], _interleaved([32, 32], 1), [None, None])),
}  # fmt: skip


def made(known: Known) -> nn.Module:
    """The model."""
    return getattr(transformers, known.model)(getattr(transformers, known.config)(**known.options)).eval()


@pytest.mark.parametrize("name", KNOWN)
def test_blocks_of_models_are_those_of_their_configurations(name):
    if name.endswith("experts"):
        pytest.importorskip("transformers", minversion="5")  # before it experts are modules of their own
    known = KNOWN[name]
    row = find_roles(made(known), TOKENS)[known.parameter]
    assert row.out_axis == known.axis and {b.axis for b in row.blocks} == {known.axis}
    assert [(b.role, b.indices.tolist(), b.heads) for b in row.blocks] == known.blocks


class _Seen(TorchFunctionMode):
    """What the first attention gets."""

    def __init__(self):
        self.tensors: tuple = ()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.scaled_dot_product_attention and not self.tensors:
            self.tensors = args[:3] or tuple((kwargs or {})[name] for name in ("query", "key", "value"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["GPT-2", "Phi-3", "GPT-NeoX", "Falcon", "DeepSeek"])
def test_what_an_attention_gets_moves_the_indices_of_its_block_alone(name):
    """Seeded in one head of the queries, keys or values, the gradient is zero but for the rows that the block says are that head's."""
    known = KNOWN[name]
    model = made(known)
    seen = _Seen()
    parameter = known.parameter.replace("layers.1.", "layers.0.")
    row = find_roles(model, TOKENS)[parameter]
    with seen:
        model(TOKENS)
    for block in row.blocks:
        tensor = seen.tensors[_QKV.index(block.role)]
        shared = tensor.shape[1] // block.heads  # keys and values may have been repeated for the queries that share them
        of_heads = block.indices.view(block.heads, -1)
        for head in range(block.heads):
            part = tensor[:, head * shared : (head + 1) * shared]
            (g,) = torch.autograd.grad(part.square().sum(), model.get_parameter(parameter), retain_graph=True)
            moved = g.movedim(known.axis, 0).flatten(1).abs().sum(1) > 0
            assert moved.nonzero().flatten().tolist() == sorted(of_heads[head].tolist())


# -- written by hand -------------------------------------------------------------------------------------------------------


class Split(nn.Module):
    """One matrix, whose product is split in some way."""

    def __init__(self, how, out=12, width=4):
        super().__init__()
        self.how, self.qkv, self.out = how, nn.Linear(width, out), nn.Linear(4, 4)

    def forward(self, x):
        q, k, v = self.how(self.qkv(x))
        return self.out((q @ k.mT).softmax(-1) @ v).tanh()


def _einops(y):
    import einops

    return einops.rearrange(y, "b t (n d) -> n b t d", n=3)


WAYS = {
    "chunk": (lambda y: y.chunk(3, -1), [4, 4, 4], 1),
    "split": (lambda y: y.split([4, 4, 4], -1), [4, 4, 4], 1),
    "tensor_split": (lambda y: y.tensor_split(3, -1), [4, 4, 4], 1),
    "slices": (lambda y: (y[..., :4], y[..., 4:8], y[..., 8:]), [4, 4, 4], 1),
    "narrow": (lambda y: [y.narrow(-1, i, 4) for i in (0, 4, 8)], [4, 4, 4], 1),
    "unflatten": (lambda y: y.unflatten(-1, (3, 4)).unbind(-2), [4, 4, 4], 1),
    "select": (lambda y: [y.view(*y.shape[:2], 4, 3)[:, :, :, i] for i in range(3)], [1, 1, 1], 4),
    "permute": (lambda y: y.reshape(*y.shape[:2], 3, 4).permute(2, 0, 1, 3), [4, 4, 4], 1),
    "einops": (_einops, [4, 4, 4], 1),
    "index": (lambda y: [y[..., [i, i + 3, i + 6, i + 9]] for i in range(3)], [1, 1, 1], 4),
    "strided": (lambda y: [y[..., i::3] for i in range(3)], [1, 1, 1], 4),
    "swapped": (lambda y: y.transpose(0, 1).contiguous().transpose(0, 1).flip(0).chunk(3, -1), [4, 4, 4], 1),
    "rotated": (lambda y: [torch.cat([-t[..., 2:], t[..., :2]], -1) + t * 2 for t in y.chunk(3, -1)], [4, 4, 4], 1),
    "halves": (
        lambda y: [torch.cat([a * 3 - b, b * 3 + a], -1) for a, b in (t.chunk(2, -1) for t in y.chunk(3, -1))],
        [4, 4, 4],
        1,
    ),
    "complex": (
        lambda y: [
            torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (2, 2))) * torch.tensor(1j)).flatten(-2)
            for t in y.chunk(3, -1)
        ],
        [4, 4, 4],
        1,
    ),
    "in a buffer": (lambda y: _written(y), [4, 4, 4], 1),
    "normalized": (lambda y: [nn.functional.layer_norm(t, (4,)) for t in y.chunk(3, -1)], [4, 4, 4], 1),
}


def _written(y):
    found = []
    for t in y.chunk(3, -1):
        buffer = t.new_empty(t.shape)
        buffer[..., :2] = t[..., 2:]
        buffer[..., 2:] = t[..., :2]
        found.append(buffer)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_blocks_are_found_however_a_product_is_split(way, device):
    how, sizes, repeats = WAYS[way]
    model = Split(how).to(device)
    roles = find_roles(model, torch.randn(2, 3, 4, device=device))
    for name in ("qkv.weight", "qkv.bias"):
        assert [(b.role, b.indices.tolist()) for b in roles[name].blocks] == list(
            zip(_QKV, _interleaved(sizes, repeats), strict=True)
        )
    assert [roles[n].role for n in ("qkv.weight", "qkv.bias", "out.weight", "out.bias")] == ["matrix", "bias", "head", "bias"]


def test_a_matrix_that_is_cut_itself_has_blocks_too():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(12, 4))

        def forward(self, x):
            q, k, v = (x @ w.T for w in self.w.chunk(3))
            return ((q @ k.mT).softmax(-1) @ v).exp().mean()

    row = find_roles(Cut(), torch.randn(2, 3, 4))["w"]
    assert [(b.role, b.start, b.size) for b in row.blocks] == [("query", 0, 4), ("key", 4, 4), ("value", 8, 4)]


def test_gates_of_recurrent_cells_are_blocks():
    lstm = find_roles(nn.LSTM(6, 5, 2, bidirectional=True), torch.randn(3, 2, 6))
    for row in lstm:
        assert [(b.start, b.size) for b in row.blocks] == [(0, 5), (5, 5), (10, 5), (15, 5)]
    x, state = torch.randn(3, 2, 6), torch.zeros(1, 2, 5)
    for gru, args in (  # a state that is not given, or is constant, in the first step and in the last
        (nn.GRU(6, 5), [x]),
        (nn.GRU(6, 5), [x[:1]]),
        (nn.GRU(6, 5), [x[:1], state]),
        (nn.GRUCell(6, 5), [x[0]]),
        (nn.GRUCell(6, 5), [x[0], state[0]]),
    ):
        for row in find_roles(gru, *args):
            assert [(b.start, b.size) for b in row.blocks] == [(0, 5), (5, 5), (10, 5)]


@pytest.mark.parametrize("written", ["softmax", "shifted", "exp"])
def test_sinks_beside_scores_are_biases(written):
    class Sinking(Split):
        def __init__(self):
            super().__init__(WAYS["chunk"][0])
            self.sinks = nn.Parameter(torch.randn(2))

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            logits = torch.cat([q @ k.mT, self.sinks.view(1, -1, 1, 1).expand(*q.shape[:-1], 1)], -1)
            if written == "softmax":
                shares = logits.softmax(-1)
            else:
                powers = (logits - logits.amax(-1, keepdim=True) if written == "shifted" else logits).exp()
                shares = powers / powers.sum(-1, keepdim=True)
            return self.out((shares[..., :-1] @ v).transpose(1, 2).flatten(2))

    roles = find_roles(Sinking(), torch.randn(2, 3, 4))
    assert roles["sinks"].role == "bias"
    assert [b.role for b in roles["qkv.weight"].blocks] == _QKV


def test_what_is_taken_as_a_whole_is_one_block():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(approximate="tanh"), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    assert not any(row.is_split for row in find_roles(model, torch.randn(3, 4)))
    assert [b.role for b in find_roles(model, torch.randn(3, 4))["0.weight"].blocks] == [""]


def test_fused_projections_of_torch_and_timm():
    timm = pytest.importorskip("timm")
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=5)
    roles = find_roles(vit, torch.randn(2, 3, 32, 32))
    found = [(b.role, b.start, b.size, b.heads) for b in roles["blocks.0.attn.qkv.weight"].blocks]
    assert found == [(role, i * 192, 192, 3) for i, role in enumerate(_QKV)]
    assert {n: roles[n].role for n in ("cls_token", "pos_embed", "patch_embed.proj.weight", "head.weight")} == {
        "cls_token": "bias", "pos_embed": "table", "patch_embed.proj.weight": "convolution", "head.weight": "head"
    }  # fmt: skip
    x = torch.randn(3, 2, 8)
    for model, args in ((nn.MultiheadAttention(8, 2), (x, x, x)), (nn.MultiheadAttention(8, 2), (x, x[:1], x[:1]))):
        for name in ("in_proj_weight", "in_proj_bias"):
            found = [(b.role, b.start, b.size, b.heads) for b in find_roles(model, *args)[name].blocks]
            assert found == [(role, i * 8, 8, 2) for i, role in enumerate(_QKV)]


def test_convolutions_know_their_groups():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 16, 1, groups=8)
            self.d, self.scale = nn.ConvTranspose2d(16, 4, 2, groups=2), nn.Parameter(torch.ones(4, 1, 1))

        def forward(self, x):
            return self.d(self.c(self.b(self.a(x)))).relu() * self.scale

    roles = find_roles(Net(), torch.randn(2, 4, 6, 6))
    assert [(r.role, r.groups) for r in roles if r.name.endswith("weight")] == [
        ("convolution", 1), ("convolution", 2), ("depthwise", 8), ("convolution", 2)
    ]  # fmt: skip
    assert roles["scale"].role == "gain"


@pytest.mark.parametrize(
    "layer, x, axis",
    [
        (nn.Linear(1, 8), (4, 1), 0),
        (nn.Linear(8, 1), (4, 8), 0),
        (nn.Conv2d(3, 8, 1), (1, 3, 4, 4), 0),
        (nn.Conv2d(1, 8, (3, 1)), (1, 1, 4, 4), 0),
        (nn.ConvTranspose2d(3, 8, 1), (1, 3, 4, 4), 1),
        (nn.ConvTranspose1d(3, 1, 2), (1, 3, 4), 1),
    ],
)
def test_dimensions_of_size_1_are_not_taken_for_that_of_the_outputs(layer, x, axis):
    assert find_roles(nn.Sequential(layer, nn.Tanh()), torch.randn(x))["0.weight"].out_axis == axis


@pytest.mark.parametrize("multiple", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_convolution_of_each_channel_by_itself_leaves_channels_where_they_are(multiple, device):
    class Net(nn.Module):  # as Restormer's, and Mamba's
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Conv2d(4, 24, 1), nn.Linear(8 * multiple, 3)
            self.each = nn.Conv2d(24, 24 * multiple, 3, padding=1, groups=24)

        def forward(self, x):
            q, k, v = (t.flatten(2) for t in self.each(self.qkv(x)).chunk(3, 1))
            return self.out(((nn.functional.normalize(q) @ nn.functional.normalize(k).mT).softmax(-1) @ v).mT)

    roles = find_roles(Net().to(device), torch.randn(2, 4, 5, 5, device=device))
    for name, size in (("qkv.weight", 8), ("qkv.bias", 8), ("each.bias", 8 * multiple)):
        assert [(b.role, b.start, b.size) for b in roles[name].blocks] == [
            ("query", 0, size), ("key", size, size), ("value", 2 * size, size)
        ]  # fmt: skip


def test_heads_and_ties_are_known_by_what_takes_them():
    class Language(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.table, self.norm, self.head = nn.Embedding(11, 4), nn.LayerNorm(4), nn.Linear(4, 11, bias=False)
            self.unused = nn.Linear(4, 4)
            if tied:
                self.head.weight = self.table.weight

        def forward(self, ids, with_loss=False):
            y = 30 * torch.tanh(self.head(self.norm(self.table(ids))) / 30)
            return nn.functional.cross_entropy(y.flatten(0, 1), ids.flatten()) if with_loss else {"logits": y}

    for with_loss in (False, True):
        roles = find_roles(Language(False), TOKENS, with_loss=with_loss)
        assert [r.role for r in roles] == ["table", "gain", "bias", "head", "unused", "unused"]
    tied = find_roles(Language(True), TOKENS)
    assert tied["table.weight"].role == "tied" and tied["head.weight"] is tied["table.weight"]
    assert tied["table.weight"].names == ("table.weight", "head.weight")


def test_a_program_that_asks_for_values_runs_with_them():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.count = nn.Linear(4, 8), nn.Parameter(torch.ones(4))
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            a, b = self.a(x).chunk(2, -1)
            return a.sigmoid() * b if x.sum() > -1e9 else x * self.count

    model = Asks()
    roles = find_roles(model, torch.randn(3, 4))
    assert [b.role for b in roles["a.weight"].blocks] == ["gate", "gated"] and roles["count"].role == "unused"
    assert model.steps == 0 and model.a.weight.grad is None


# -- the table -------------------------------------------------------------------------------------------------------------


def test_the_table_is_printed_indexed_and_changed():
    roles = find_roles(Split(WAYS["chunk"][0]), torch.randn(2, 3, 4))
    assert len(roles) == 4 and [r.name for r in roles] == ["qkv.weight", "qkv.bias", "out.weight", "out.bias"]
    assert "query 0:4, 1 head; key 4:8, 1 head; value 8:12, 1 head" in str(roles) and "<td>qkv.weight</td>" in roles._repr_html_()
    assert "out.weight" in roles and "nothing" not in roles
    assert list(roles.to_dataframe()["role"]) == ["matrix", "bias", "head", "bias"]
    changed = roles.changed({"out.weight": "matrix", "qkv.weight": split([8, 4], roles=["query", "value"])})
    assert changed["out.weight"].role == "matrix" and roles["out.weight"].role == "head"
    assert [(b.role, b.size) for b in changed["qkv.weight"].blocks] == [("query", 8), ("value", 4)]
    assert find_roles(Split(WAYS["chunk"][0]), torch.randn(2, 3, 4), roles={"*.bias": "gain"})["qkv.bias"].role == "gain"


@pytest.mark.parametrize(
    "given, error, says",
    [
        ({"qvk.weight": "head"}, NormMapKeyError, "did you mean  *'qkv.weight'"),
        ({"nothing.*": "head"}, NormMapKeyError, "no parameter is named, or fits, 'nothing"),
        ({"out.weight": "embedding"}, NormMismatchError, "a role is one of matrix, head, table"),
        ({"out.bias": "matrix"}, NormMismatchError, r"'out.bias' of shape \[4\] cannot be a matrix"),
        ({"out.weight": "convolution"}, NormMismatchError, "cannot be a convolution"),
        ({"qkv.weight": split([8, 8])}, NormMismatchError, "every index along one axis once"),
        ({"qkv.weight": [split([4, 8])[0]]}, NormMismatchError, "every index along one axis once"),
        ({"qkv.weight": 3}, NormMismatchError, "a name or a sequence of blocks"),
    ],
)
def test_impossible_roles_are_refused(given, error, says):
    with pytest.raises(error, match=says):
        find_roles(Split(WAYS["chunk"][0]), torch.randn(2, 3, 4), roles=given)


def test_blocks_are_views_and_can_be_written():
    t = torch.arange(24.0).view(12, 2)
    for blocks in (split([4, 2, 6]), find_roles(Split(WAYS["strided"][0]), torch.randn(2, 3, 4))["qkv.weight"].blocks):
        rebuilt = torch.full_like(t, math.nan)
        for b in blocks:
            assert torch.equal(b.of(t), t[b.indices]) and b.view(t).untyped_storage()._cdata == t.untyped_storage()._cdata
            b.write(rebuilt, b.of(t))
        assert torch.equal(rebuilt, t)
    with pytest.raises(NormMismatchError, match="sizes of blocks"):
        split([4, 0])
    with pytest.raises(NormMismatchError, match="2 blocks were given 1 roles"):
        split([4, 4], roles=["query"])


def test_of_a_wrapped_model_they_are_those_of_the_model_inside():
    model, x = Split(WAYS["chunk"][0]), torch.randn(2, 3, 4)
    expected = str(find_roles(model, x))
    for wrapped in (torch.compile(model), nn.DataParallel(model), thunder.jit(model)):
        assert str(find_roles(wrapped, x)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_what_is_unused_has_no_gradient_in_any_model_of_the_zoo(name):
    try:
        of_zoo = built(ZOO[name])
    except AttributeError as e:
        assert re.match(r"module (transformers|timm|torchvision)\S* has no attribute", str(e))
        pytest.skip("a model that this version does not have yet")
    try:
        result = of_zoo()
    except Exception:  # noqa: BLE001
        pytest.skip("does not run here")
    roles = find_roles(of_zoo.module, *of_zoo.args, **of_zoo.kwargs)
    assert [r.name for r in roles] == [n for n, _ in of_zoo.module.named_parameters()]
    floating = [t for t in tensors(result) if (t.is_floating_point() or t.is_complex()) and t.requires_grad]
    if floating:
        sum(t.abs().sum() for t in floating).backward()
    for name, p in of_zoo.module.named_parameters():
        row = roles[name]
        if row.role == "unused":
            assert p.grad is None, name
        if row.is_split:
            assert sorted(i for b in row.blocks for i in b.indices.tolist()) == list(range(p.shape[row.out_axis])), name
