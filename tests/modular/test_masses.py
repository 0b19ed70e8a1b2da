"""Masses of parameters that nothing was said about: what is only added is light, whatever its shape and spelling."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTModel

from tests.seeds import seeded
from thunder_norm.modular import ModularNorm, ModularOptimizer, find_roles
from thunder_norm.modular.masses import ATTENTION, GATED, LIGHT, PLACES, TABLE


class Places(nn.Module):
    """Six activations of width 8, a parameter with a row for each of seven places, and a constant of its shape."""

    def __init__(self, use):
        super().__init__()
        self.stem, self.places, self.head = nn.Linear(4, 8), nn.Parameter(torch.randn(1, 7, 8)), nn.Linear(8, 2)
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.table = nn.Embedding(7, 8)
        self.register_buffer("constant", torch.randn(1, 7, 8))
        self.use = use

    def forward(self, x):
        return self.head(self.use(self, self.stem(x)))


def _in_place(m, y):
    y += m.places[:, :6]
    return y


ADDED = {
    "a slice": lambda m, y: y + m.places[:, :6],
    "in place": _in_place,
    "first, expanded": lambda m, y: m.places[:, 1:].expand(2, -1, -1) + y,
    "subtracted": lambda m, y: y - m.places[0, :6],
    "scaled": lambda m, y: y + 0.02 * m.places[:, :6],
    "resized": lambda m, y: y + F.interpolate(m.places.mT, 6, mode="linear").mT,
    "twice": lambda m, y: (y + m.places[:, :6]).relu() + m.places[:, :6],
    "the function": lambda m, y: torch.add(y, m.places[:, :6], alpha=2),
}
NOT_ADDED = {
    "a gain": lambda m, y: y * m.places[:, :6],
    "and multiplied": lambda m, y: (y + m.places[:, :6]) @ m.places[0, :6].T @ m.places[0, :6],
    "part of a matrix with a constant": lambda m, y: y @ (m.places + m.constant)[0].T @ m.constant[0],
    "part of a matrix with a parameter": lambda m, y: F.linear(F.linear(y, m.places[0]), (m.places[0] + m.table.weight).T),
    "tokens of its own": lambda m, y: torch.cat([m.places.expand(2, -1, -1), y], 1),
}


def _norm(use, **options):
    torch.manual_seed(seeded(0))
    return ModularNorm(Places(use), torch.randn(2, 6, 4), mode="typical", **options)


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.VanishingTargetWarning")  # of what a case leaves out
@pytest.mark.parametrize("name", [*ADDED, *NOT_ADDED])
def test_what_is_only_added_to_activations_is_light(name):
    norm = _norm((ADDED | NOT_ADDED)[name])
    assert norm.masses["places"] == (LIGHT if name in ADDED else 1.0)
    assert norm.masses["stem.weight"] == norm.masses["head.weight"] == norm.masses["table.weight"] == 1.0


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.VanishingTargetWarning")
def test_a_table_that_is_looked_up_is_heavy_and_the_same_rows_added_are_light():
    assert _norm(lambda m, y: y + m.table(torch.arange(6))).masses["table.weight"] == 1.0
    assert _norm(lambda m, y: y + m.table.weight[:6]).masses["table.weight"] == LIGHT


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.VanishingTargetWarning")
def test_what_is_said_counts_and_mode_modula_leaves_nothing_added_without_mass():
    added = ADDED["a slice"]
    assert _norm(added, masses={"places": 0.7}).masses["places"] == pytest.approx(0.7)
    assert _norm(added, light=0.25).masses["places"] == 0.25
    torch.manual_seed(seeded(0))
    modula = ModularNorm(Places(added), torch.randn(2, 6, 4), mode="modula")
    assert modula.masses["places"] == 1.0 and modula.masses["stem.bias"] == 0.0


def test_a_vision_transformer_has_light_positions_and_their_target_is_a_biass():
    torch.manual_seed(seeded(0))
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )
    model = ViTModel(config, add_pooling_layer=False)
    norm = ModularNorm(model, torch.randn(2, 3, 8, 8), mode="typical")
    positions, bias, kernel = "embeddings.position_embeddings", "embeddings.patch_embeddings.projection.bias", 1.0
    assert model.get_parameter(positions).shape == (1, 5, 16)
    assert norm.masses[positions] == norm.masses[bias] == LIGHT
    assert norm.masses[bias.replace("bias", "weight")] == kernel
    # an entry of either is an entry of the stream: a step moves both as far
    assert norm.targets[positions] == pytest.approx(norm.targets[bias])


class Tokens(nn.Module):
    """A table of ten rows of width 8, taken as a function of the integers given says, and a head."""

    def __init__(self, use):
        super().__init__()
        self.table, self.head, self.use = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False), use

    def forward(self, ids, mask=None):
        return self.head(self.use(self, ids, mask))


OF_TOKENS = {
    "module": lambda m, ids, mask: m.table(ids),
    "index": lambda m, ids, mask: m.table.weight[ids],
    "index_select": lambda m, ids, mask: torch.index_select(m.table.weight, 0, ids.flatten()),
    "shifted": lambda m, ids, mask: m.table(torch.cat([ids.new_zeros(2, 1), ids[:, :-1]], 1)),
    "replaced": lambda m, ids, mask: m.table(torch.where(ids > 5, 0, ids)),
    "masked": lambda m, ids, mask: m.table(ids.masked_fill(mask == 0, 1)),
    "other dtype": lambda m, ids, mask: m.table(ids.to(torch.int32).clamp(max=7)),
    "of pairs": lambda m, ids, mask: m.table((ids[:, 1:] * 3 + ids[:, :-1]) % 10),
    "bag": lambda m, ids, mask: F.embedding_bag(ids, m.table.weight),
    "twice": lambda m, ids, mask: m.table(ids) + m.table(ids.flip(1)),
    "scaled": lambda m, ids, mask: m.table(ids) * 8**0.5,
}
NOT_OF_TOKENS = {
    "positions": lambda m, ids, mask: m.table(torch.arange(ids.shape[1])),
    "positions along a mask": lambda m, ids, mask: m.table(mask.cumsum(1) - 1),
    "positions of what is no padding": lambda m, ids, mask: m.table(ids.ne(0).int().cumsum(1)),
    "tied": lambda m, ids, mask: F.linear(F.linear(m.table(ids), m.table.weight), m.head.weight.T),
    "made softer": lambda m, ids, mask: F.one_hot(ids, 10).float() @ m.table.weight,
}


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.VanishingTargetWarning")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", [*OF_TOKENS, *NOT_OF_TOKENS])
def test_a_table_of_which_tokens_choose_the_rows_has_a_mass_of_its_own(name, device):
    torch.manual_seed(seeded(0))
    ids, mask = torch.randint(10, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    model = Tokens((OF_TOKENS | NOT_OF_TOKENS)[name]).to(device)
    norms = {mode: ModularNorm(model, ids, mask, mode=mode) for mode in ("typical", "bound", "modula")}
    assert {mode: norm.masses["table.weight"] for mode, norm in norms.items()} == {
        "typical": TABLE if name in OF_TOKENS else 1.0,
        "bound": 1.0,
        "modula": 1.0,
    }
    assert norms["typical"].masses["head.weight"] == 1.0


AT_PLACES = {
    "by index": lambda m, ids, mask: m.table.weight[torch.arange(6)],
    "from a given place on": lambda m, ids, mask: m.table(torch.arange(3, 3 + ids.shape[1])),
    "for each sample": lambda m, ids, mask: m.table(torch.arange(ids.shape[1]).expand(ids.shape)),
}


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.VanishingTargetWarning")
@pytest.mark.parametrize("name", [*OF_TOKENS, *NOT_OF_TOKENS, *AT_PLACES])
def test_a_table_of_places_that_depend_on_no_input_may_have_a_mass_of_its_own(name):
    torch.manual_seed(seeded(0))
    args = torch.randint(10, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    model = Tokens((OF_TOKENS | NOT_OF_TOKENS | AT_PLACES)[name])
    is_at_places = name == "positions" or name in AT_PLACES
    assert find_roles(model, *args)["table.weight"].is_at_places == is_at_places
    adapted = ModularOptimizer(model, *args, lr=0.1, noise_adaptation=0.9).norm
    mass = TABLE if name in OF_TOKENS else 1.0
    for norm, of_places in ((adapted, PLACES), (ModularNorm(model, *args, mode="typical", places=2.0), 2.0)):
        assert norm.masses["table.weight"] == (of_places if is_at_places else mass)
        assert norm.masses["head.weight"] == 1.0
    assert ModularOptimizer(model, *args, lr=0.1).norm.masses["table.weight"] == mass


class Layer(nn.Module):
    """Attention, written out or torch's, beside an MLP."""

    def __init__(self, attend):
        super().__init__()
        self.qkv, self.q, self.k, self.v = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.both = nn.Linear(8, 32)
        self.attention, self.attend = nn.MultiheadAttention(8, 2, batch_first=True), attend

    def forward(self, x):
        x = x + self.attend(self, x)
        return x + self.down(self.up(x).relu())


def _heads(x):
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def _joined(x):
    return x.transpose(1, 2).flatten(2)


def _written_out(m, x):
    q, k, v = (_heads(f(x)) for f in (m.q, m.k, m.v))
    return m.out(_joined(((q @ k.mT) / 2).softmax(-1) @ v))


ATTENTIONS = {
    "written out": (_written_out, ("q.", "k.", "v.", "out")),
    "fused": (lambda m, x: m.out(_joined(F.scaled_dot_product_attention(*map(_heads, m.qkv(x).chunk(3, -1))))), ("qkv", "out")),
    "a module": (lambda m, x: m.attention(x, x, x, need_weights=False)[0], ("attention.in_proj", "attention.out_proj")),
    "gated": (
        lambda m, x: m.out(_joined(F.scaled_dot_product_attention(*map(_heads, m.qkv(x).chunk(3, -1)))) * m.q(x).sigmoid()),
        ("qkv", "out"),
    ),
    "with dropout": (
        lambda m, x: m.out(F.dropout(_joined(F.scaled_dot_product_attention(*map(_heads, m.qkv(x).chunk(3, -1)))))),
        ("qkv", "out"),
    ),
    "head by head": (
        lambda m, x: m.out(
            torch.cat(
                [(q @ k.mT).softmax(-1) @ v for q, k, v in zip(*(f(x).chunk(2, -1) for f in (m.q, m.k, m.v)), strict=True)], -1
            )
        ),
        ("q.", "k.", "v.", "out"),
    ),
    "a mean over tokens": (lambda m, x: m.out(m.v(x).mean(1, keepdim=True)), ()),
}


GATES = {
    "a sigmoid": (lambda m, x: m.out(m.q(x).sigmoid() * m.v(x)), ("q.", "v.")),
    "a softmax of features": (lambda m, x: m.out(m.q(x).softmax(-1) * m.v(x)), ("q.", "v.")),
    "none of both": (lambda m, x: m.out(m.q(x) * m.v(x)), ("q.", "v.")),
    "a gated unit": (lambda m, x: m.out(F.glu(torch.cat([m.q(x), m.v(x)], -1))), ("q.", "v.")),
    "scaled before": (lambda m, x: m.out(F.gelu(m.q(x)) * (3 * m.v(x))), ("q.", "v.")),
    "one gates two": (lambda m, x: m.out(m.q(x).sigmoid() * m.v(x) + m.q(x).tanh() * m.k(x)), ()),
    "halves": (lambda m, x: m.out(F.glu(m.qkv(x)[..., :16]) + m.q(x)), ()),
    "both in one": (lambda m, x: m.down(F.glu(m.both(x))), ("both.",)),
    "thirds": (lambda m, x: m.out(m.qkv(x).chunk(3, -1)[0] * m.qkv(x).chunk(3, -1)[1].tanh() + m.qkv(x).chunk(3, -1)[2]), ()),
    "a sum": (lambda m, x: m.out((m.q(x) + m.k(x)).sigmoid() * m.v(x)), ()),
    "of itself": (lambda m, x: m.out(m.q(x).sigmoid() * x), ()),
    "of another shape": (lambda m, x: m.out(m.q(x)[..., :1].sigmoid() * m.v(x)), ()),
}


@pytest.mark.parametrize("name", GATES)
def test_what_gates_one_thing_alone_and_what_it_gates_are_factors(name):
    attend, of_it = GATES[name]
    found = [role.name for role in find_roles(Layer(attend), torch.randn(2, 5, 8)) if role.is_factor]
    assert found == [f"{module}weight" for module in of_it]


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.VanishingTargetWarning")
def test_gates_and_what_they_gate_may_have_a_mass_of_their_own():
    model, x = Layer(lambda m, x: m.out(m.q(x).sigmoid() * m.v(x)) + m.down(F.glu(m.both(x)))), torch.randn(2, 5, 8)
    adapted = ModularOptimizer(model, x, lr=0.1, noise_adaptation=0.9).norm
    for norm, mass in ((adapted, GATED), (ModularOptimizer(model, x, lr=0.1).norm, 1.0), (ModularNorm(model, x, gated=3.0), 3.0)):
        masses = {name.removesuffix(".weight"): m for name, m in norm.masses.items() if name.endswith("weight")}
        assert masses == dict.fromkeys(masses, 1.0) | dict.fromkeys(("q", "v", "both"), mass)


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.VanishingTargetWarning")
@pytest.mark.parametrize("name", ATTENTIONS)
def test_what_attention_takes_and_what_takes_its_result_may_have_a_mass_of_its_own(name):
    torch.manual_seed(seeded(0))
    attend, of_it = ATTENTIONS[name]
    model, x = Layer(attend), torch.randn(2, 5, 8)
    adapted = ModularOptimizer(model, x, lr=0.1, noise_adaptation=0.9).norm
    plain = ModularOptimizer(model, x, lr=0.1).norm
    for norm, mass in ((adapted, ATTENTION), (plain, 1.0), (ModularNorm(model, x, attention=3.0), 3.0)):
        masses = norm.masses
        matrices = {name: m for name, m in masses.items() if name.endswith("weight")}
        found = {name: m for name, m in matrices.items() if name.startswith(of_it)} if of_it else {}
        assert set(found.values()) <= {mass} and (found or not of_it)
        assert {m for name, m in matrices.items() if name not in found} == {1.0}
