"""Groups for other people's optimizers, against the same optimizers of models whose matrices are separate."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.modular.modular_models import TOKENS
from tests.seeds import seeded
from thunder_norm.errors import GradientError, NormMapKeyError, NormMismatchError
from thunder_norm.modular import find_roles, param_groups

D = torch.float64


class Fused(nn.Module):
    """Queries, keys and values in one projection."""

    def __init__(self, projection=nn.Linear, how=lambda y: y.split([8, 4, 4], -1)):
        super().__init__()
        self.how = how
        self.qkv = Conv1D(16, 6) if projection is Conv1D else nn.Linear(6, 16)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        q, k, v = self.how(self.qkv(x))
        return self.head((q @ torch.cat([k, k], -1).mT).softmax(-1) @ v)


class Separate(nn.Module):
    """The same with three projections."""

    def __init__(self, fused: Fused):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(6, n) for n in (8, 4, 4))
        self.head = copy.deepcopy(fused.head)
        w = fused.qkv.weight if isinstance(fused.qkv, nn.Linear) else fused.qkv.weight.mT
        with torch.no_grad():
            for layer, rows, bias in zip(self.projections, w.split([8, 4, 4]), fused.qkv.bias.split([8, 4, 4]), strict=True):
                layer.weight.copy_(rows)
                layer.bias.copy_(bias)

    def forward(self, x):
        q, k, v = (layer(x) for layer in self.projections)
        return self.head((q @ torch.cat([k, k], -1).mT).softmax(-1) @ v)


def _optimizers(groups):
    muon = [g for g in groups if g["algorithm"] == "muon"]
    adamw = [g for g in groups if g["algorithm"] == "adamw"]
    return torch.optim.Muon(muon, lr=0.1), torch.optim.AdamW(adamw, lr=0.01)


def _train(model, optimizers, accumulate=1):
    generator = torch.Generator().manual_seed(seeded(0))
    for _ in range(4):
        model.zero_grad()
        for _ in range(accumulate):
            x = torch.randn(5, 7, 6, dtype=D, generator=generator)
            model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("projection", [nn.Linear, Conv1D])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_muon_of_blocks_is_muon_of_separate_matrices(projection, accumulate):
    torch.manual_seed(seeded(0))
    fused = Fused(projection).to(D)
    separate = Separate(fused).to(D)
    groups = param_groups(fused, torch.randn(5, 7, 6), split=True)
    assert groups[0]["param_names"] == ["qkv.weight[0:8]", "qkv.weight[8:12]", "qkv.weight[12:16]"]
    assert [tuple(p.shape) for p in groups[0]["params"]] == [(8, 6), (4, 6), (4, 6)]
    _train(fused, _optimizers(groups), accumulate)
    _train(separate, _optimizers(param_groups(separate, torch.randn(5, 7, 6))), accumulate)
    x = torch.randn(5, 7, 6, dtype=D)
    torch.testing.assert_close(fused(x), separate(x), rtol=1e-3, atol=1e-4)  # Muon multiplies in bfloat16
    w = fused.qkv.weight if projection is nn.Linear else fused.qkv.weight.mT
    for layer, rows in zip(separate.projections, w.split([8, 4, 4]), strict=True):
        torch.testing.assert_close(rows, layer.weight, rtol=1e-3, atol=1e-3)


def test_muon_of_the_whole_is_another():
    """What a split changes: orthogonalized as one, the queries' part of an update is no orthogonal matrix."""
    torch.manual_seed(seeded(0))
    fused = Fused().to(D)
    before = fused.qkv.weight.detach().clone()
    (muon, _) = _optimizers(param_groups(fused, torch.randn(5, 7, 6)))
    fused(torch.randn(5, 7, 6, dtype=D)).square().mean().backward()
    muon.step()
    s = torch.linalg.svdvals((fused.qkv.weight - before)[:8])
    assert s[0] > 3 * s[-1]


def test_experts_are_matrices_one_by_one():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.head = nn.Parameter(torch.randn(3, 5, 4, dtype=D)), nn.Linear(5, 2, dtype=D)

        def forward(self, x):
            return self.head(torch.einsum("bi,eoi->beo", x, self.w).tanh().sum(1))

    model = Experts()
    assert find_roles(model, torch.randn(2, 4, dtype=D))["w"].role == "stack"
    groups = param_groups(model, torch.randn(2, 4, dtype=D), split=True)
    assert groups[0]["param_names"] == ["w[0]", "w[1]", "w[2]"]
    (muon, _) = _optimizers(groups)
    before = model.w.detach().clone()
    model(torch.randn(6, 4, dtype=D)).square().sum().backward()
    expected = [nn.Parameter(w.clone()) for w in before]
    for e, g in zip(expected, model.w.grad, strict=True):
        e.grad = g.clone()
    torch.optim.Muon(expected, lr=0.1).step()
    muon.step()
    torch.testing.assert_close(model.w, torch.stack(list(expected)), rtol=1e-3, atol=1e-3)
    assert [g["algorithm"] for g in param_groups(model, torch.randn(2, 4, dtype=D))] == [
        "adamw",
        "adamw",
    ]  # torch's Muon takes matrices


class Heads(nn.Module):
    """Weights of three dimensions, whose axes (d of the input, h of heads, k of one head) come in any order."""

    SIZES = {"d": 6, "h": 3, "k": 4}

    def __init__(self, axes):
        super().__init__()
        self.axes = axes
        self.before = nn.Linear(6, 6)
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn([self.SIZES[a] for a in axes])) for _ in range(4))

    def forward(self, x):
        x = self.before(x)
        q, k, v = (torch.einsum(f"btd,{self.axes}->bthk", x, w) for w in (self.q, self.k, self.v))
        y = torch.einsum("bhts,bshk->bthk", torch.einsum("bthk,bshk->bhts", q, k).softmax(-1), v)
        return torch.einsum(f"bthk,{self.axes}->btd", y, self.o)


@pytest.mark.parametrize("axes", ["hkd", "hdk", "dhk"])
def test_heads_are_matrices_one_by_one_whichever_axis_they_are(axes):
    torch.manual_seed(seeded(0))
    model, x = Heads(axes).to(D), torch.randn(2, 5, 6, dtype=D)
    groups = param_groups(model, x, split=True)
    leaves = {name: p for g in groups for name, p in zip(g["param_names"], g["params"], strict=True)}
    y = torch.einsum(f"btd,{axes}->bthk", x, model.q)
    for head in range(3):
        torch.testing.assert_close(x @ leaves[f"q[{head}]"].mT, y[:, :, head])
    wanted = torch.einsum(f"bthk,{axes}->btd", y, model.o)
    torch.testing.assert_close(sum(y[:, :, head] @ leaves[f"o[{head}]"].mT for head in range(3)), wanted)


def test_every_parameter_that_trains_is_in_one_group():
    config = GPT2Config(
        n_layer=2, n_embd=8, n_head=2, n_positions=8, vocab_size=11, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    model.transformer.wpe.weight.requires_grad_(False)
    for for_ in ("muon", "dion", "dion2", "nordion2", "normuon", "emerging", "adamw"):
        groups = param_groups(model, TOKENS, for_=for_)
        names = [name for g in groups for name in g["param_names"]]
        assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
        assert all(model.get_parameter(n) is p for g in groups for n, p in zip(g["param_names"], g["params"], strict=True))
    matrices = {n for g in param_groups(model, TOKENS) if g["algorithm"] == "muon" for n in g["param_names"]}
    assert matrices == {n for n, p in model.named_parameters() if ".c_" in n and p.ndim == 2}
    light = [g for g in param_groups(model, TOKENS, for_="adamw") if g.get("weight_decay") == 0.0]
    assert {model.get_parameter(n).ndim for g in light for n in g["param_names"]} == {1}
    for own in ("dion", "dion2", "nordion2", "normuon"):  # each optimizer of that package refuses the others' names
        assert {g["algorithm"] for g in param_groups(model, TOKENS, for_=own)} == {own, "adamw"}


def test_groups_go_through_a_saved_state(tmp_path):
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False}
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=11,
            **ids,
        )
    )
    muon, _ = _optimizers(param_groups(model, TOKENS))
    model(TOKENS).logits.square().mean().backward()
    muon.step()
    torch.save(muon.state_dict(), tmp_path / "state.pt")
    again, _ = _optimizers(param_groups(model, TOKENS))
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    (group,) = again.param_groups
    blocks = dict(zip(group["param_names"], group["blocks"], strict=True))
    assert [b["heads"] for b in blocks["model.layers.0.self_attn.q_proj.weight"]] == [4]
    assert [b["heads"] for b in blocks["model.layers.0.self_attn.k_proj.weight"]] == [2]


def test_scion_gets_norms_by_role():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 5))
    found = {n: g["norm"] for g in param_groups(model, torch.randn(2, 3, 4, 4), for_="scion") for n in g["param_names"]}
    assert found == {
        "0.weight": "SpectralConv", "3.weight": "Spectral", "5.weight": "Sign", **dict.fromkeys(("0.bias", "3.bias", "5.bias"), "BiasRMS")
    }  # fmt: skip
    text = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
    (table,) = [g for g in param_groups(text, TOKENS, for_="scion") if g["norm"] == "ColNorm"]
    assert table["param_names"] == ["0.weight"] and table["norm_kwargs"] == {"transpose": True}


class Routed(nn.Module):
    """Experts with fused gates, of which a call may leave all but one out."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 8) for _ in range(2))
        self.down, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, only=None):
        gated = (e(x).chunk(2, -1) for i, e in enumerate(self.experts) if only in (None, i))
        return self.head(self.down(sum(torch.sigmoid(a) * b for a, b in gated)))


def _routed():
    model, x = Routed(), torch.randn(5, 4)
    muon, _ = _optimizers(param_groups(model, x, split=True))
    leaves = dict(zip(muon.param_groups[0]["param_names"], muon.param_groups[0]["params"], strict=True))
    assert list(leaves)[:2] == ["experts.0.weight[0:4]", "experts.0.weight[4:8]"]
    model(x, 0).sum().backward()
    muon.step()
    return model, x, muon, leaves["experts.0.weight[0:4]"]


@pytest.mark.parametrize("how", ["step", "closure", "by name", "nothing reached"])
def test_what_a_backward_leaves_out_is_not_stepped(how):
    model, x, muon, _ = _routed()
    before = [e.weight.detach().clone() for e in model.experts]

    def closure():
        model.zero_grad()
        loss = model(x, 1).sum() if how != "nothing reached" else model.head(x).sum()
        loss.backward()
        return loss

    if how in ("closure", "nothing reached"):
        muon.step(closure)
    elif how == "by name":
        muon.step(closure=closure)
    else:
        closure()
        muon.step()
    assert model.experts[0].weight.grad is None
    assert torch.equal(model.experts[0].weight, before[0])
    assert torch.equal(model.experts[1].weight, before[1]) == (how == "nothing reached")


def test_blocks_have_the_gradient_of_their_parameter_after_a_backward_and_in_a_step():
    """Clipping and GradScaler read gradients before the step: an overflow that stayed would have it skip all steps."""
    model, x, muon, leaf = _routed()
    leaf.grad.fill_(torch.inf)
    model.zero_grad()
    model(x, 1).sum().backward()
    assert leaf.grad is None
    model(x, 0).sum().backward()
    p, given = model.get_parameter("experts.0.weight"), leaf.grad
    assert p.grad is not None
    p.grad = p.grad / 2
    muon.step()
    assert torch.equal(leaf.grad, torch.div(given, 2))
    muon.zero_grad()
    muon.step()
    assert leaf.grad is None and p.grad is not None
    leaf.grad = own = torch.ones_like(leaf)
    model.zero_grad()
    muon.step()
    assert leaf.grad is own


def test_groups_that_are_garbage_leave_nothing_behind():
    from torch.optim import optimizer

    model, x = Routed(), torch.randn(5, 4)
    gc.collect()
    hooks = set(optimizer._global_optimizer_pre_hooks)
    groups = param_groups(model, x, split=True)
    assert len(optimizer._global_optimizer_pre_hooks) >= len(hooks)
    model(x).sum().backward()
    del groups
    gc.collect()
    p = model.experts[0].weight
    assert not p._post_accumulate_grad_hooks and not p._backward_hooks
    assert set(optimizer._global_optimizer_pre_hooks) <= hooks
    model.to(D)
    model.zero_grad()
    groups = param_groups(model, x.to(D), split=True)  # the old ones' hooks would say that it has been moved
    model(x.to(D)).sum().backward()
    assert all(leaf.grad is not None for g in groups for leaf in g["params"])
    del model, p
    gc.collect()
    assert set(optimizer._global_optimizer_pre_hooks) <= hooks


# -- what is refused -------------------------------------------------------------------------------------------------------


def test_clearing_blocks_alone_is_noticed():
    fused, x = Fused(), torch.randn(2, 3, 6)
    muon, _ = _optimizers(param_groups(fused, x, split=True))
    fused(x).sum().backward()
    muon.zero_grad(set_to_none=False)
    assert fused.qkv.weight.grad.abs().sum() == 0
    fused(x).sum().backward()
    muon.zero_grad()
    with pytest.raises(GradientError, match="'qkv.weight' has been added to one that its optimizer had cleared"):
        fused(x).sum().backward()
    fused.zero_grad()
    fused(x).sum().backward()
    assert muon.param_groups[0]["params"][0].grad.data_ptr() == fused.qkv.weight.grad.data_ptr()
    fused.to(D)
    fused.zero_grad()
    with pytest.raises(GradientError, match="moved or replaced since its groups were made"):
        fused(x.to(D)).sum().backward()


def test_clearing_blocks_alone_is_noticed_where_gradients_have_graphs():
    """Their sums are new tensors."""
    fused, x = Fused(), torch.randn(2, 3, 6)
    muon, _ = _optimizers(param_groups(fused, x, split=True))
    for _ in range(2):
        fused(x).sum().backward(create_graph=True)
    muon.zero_grad()
    with pytest.raises(GradientError, match="'qkv.weight' has been added to one that its optimizer had cleared"):
        fused(x).sum().backward(create_graph=True)
    fused.zero_grad()
    fused(x).sum().backward(create_graph=True)
    torch.autograd.grad(fused(x).sum(), fused.qkv.weight)
    assert torch.equal(muon.param_groups[0]["params"][0].grad, fused.qkv.weight.grad[:8])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), lambda t: torch.save(t, io.BytesIO())]
)
def test_a_copy_of_blocks_is_refused_as_it_would_move_nothing(copied):
    how = functools.partial(torch.split, split_size_or_sections=[8, 4, 4], dim=-1)
    fused, x = Fused(how=how), torch.randn(2, 3, 6)
    muon, adamw = _optimizers(param_groups(fused, x, split=True))
    with pytest.raises(NormMismatchError, match=r"of 'qkv.weight' is a part of it(.|\n)*param_groups of the copied"):
        copied((fused, muon))
    copied((fused, adamw))
    fused(x).sum().backward()
    muon.step()
    other = copy.deepcopy(fused)  # as the message says
    again, _ = _optimizers(param_groups(other, x, split=True))
    again.load_state_dict(copy.deepcopy(muon.state_dict()))
    for model, optimizer in ((fused, muon), (other, again)):
        model.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert torch.equal(fused.qkv.weight, other.qkv.weight)


class Alternating(nn.Module):
    """A projection whose parts alternate: heads of queries, keys and values; or gates and what they gate, row by row."""

    def __init__(self, of_gates, width=6):
        super().__init__()
        self.of_gates, self.up, self.down = of_gates, nn.Linear(width, 24, bias=False), nn.Linear(12 if of_gates else 8, 3)

    def forward(self, x):
        y = self.up(x)
        if self.of_gates:
            return self.down(y[..., ::2].sigmoid() * y[..., 1::2])
        q, k, v = (t.transpose(1, 2) for t in y.unflatten(-1, (2, 3, 4)).unbind(-2))
        return self.down(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "of_gates, split, names",
    [
        (True, True, ["up.weight[0:23:2]", "up.weight[1:24:2]"]),
        (True, "heads", ["up.weight[0:23:2]", "up.weight[1:24:2]"]),
        (False, "heads", [f"up.weight[{i}:{i + 4}]" for i in (0, 12, 4, 16, 8, 20)]),
    ],
)
def test_muon_of_parts_that_alternate_is_muon_of_their_rows(of_gates, split, names):
    torch.manual_seed(seeded(0))
    model, x = Alternating(of_gates).to(D), torch.randn(2, 5, 6, dtype=D)
    groups = param_groups(model, x, split=split)
    assert groups[0]["param_names"] == names
    muon, _ = _optimizers(groups)
    rows = [slice(*map(int, name.partition("[")[2][:-1].split(":"))) for name in names]
    assert sorted(i for r in rows for i in range(24)[r]) == list(range(24))
    separate = [nn.Parameter(model.up.weight.detach()[r].clone()) for r in rows]
    other = torch.optim.Muon(separate, lr=0.1)
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
        for p, r in zip(separate, rows, strict=True):
            p.grad = model.up.weight.grad[r].clone()
        muon.step()
        other.step()
    for p, r in zip(separate, rows, strict=True):
        torch.testing.assert_close(model.up.weight[r], p, rtol=1e-3, atol=1e-3)  # Muon multiplies in bfloat16


def test_heads_that_alternate_are_refused_whole_and_have_their_own_leaves():
    x = torch.randn(2, 5, 6)
    with pytest.raises(NormMismatchError, match="of 'up.weight' alternate(.|\n)*split='heads', which has them head by head"):
        param_groups(Alternating(False), x, split=True)
    with pytest.raises(NormMismatchError, match="split must be True, False or 'heads', got 'head'"):
        param_groups(Alternating(False), x, split="head")
    apart = nn.MultiheadAttention(6, 2, bias=False)
    names = [n for g in param_groups(apart, x, x, x, split="heads") for n in g["param_names"]]
    assert names[:5] == [f"in_proj_weight[{i}:{j}]" for i, j in ((0, 3), (3, 6), (6, 9), (9, 12), (12, 18))]


def test_what_cannot_be_grouped_is_refused():
    x = torch.randn(2, 3, 6)
    with pytest.raises(NormMismatchError, match="for_ must be one of 'muon'"):
        param_groups(Fused(), x, for_="adam")
    with pytest.raises(NormMapKeyError, match="no parameter is named"):
        param_groups(Fused(), x, roles={"kqv": "head"})
    alternating = Fused(how=lambda y: (y.view(*y.shape[:2], 4, 4)[..., :2].flatten(-2), y[..., 2::4], y[..., 3::4]))
    assert [str(b) for b in find_roles(alternating, x)["qkv.weight"].blocks][0].startswith("query 0:2 of every 4")
    with pytest.raises(NormMismatchError, match="alternate, so they are no views of two dimensions"):
        param_groups(alternating, x, split=True)
    assert param_groups(alternating, x)[0]["blocks"][0][0]["period"] == 4
    with pytest.raises(NormMismatchError, match="Scion has no norm for"):
        param_groups(nn.Sequential(nn.Linear(6, 4), nn.LayerNorm((3, 4))), x, for_="scion")
