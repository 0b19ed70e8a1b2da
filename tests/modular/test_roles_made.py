"""Roles where what is multiplied, or what multiplies, is made: learned queries, one-hot inputs, weights of several parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.modular.modular_models import D
from tests.seeds import seeded
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm, ModularOptimizer, QKClip, find_roles


class Attention(nn.Module):
    """Learned queries (`latents`), or those of the input, attend to what `embed` makes of the input."""

    def __init__(self, embed=lambda x: x, width=8, latents=0, layer=None):
        super().__init__()
        self.embed, self.first, self.layer = embed, nn.Linear(width, 8), layer
        self.latents = nn.Parameter(torch.randn(latents, 8)) if latents else None
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.first(self.embed(x))
        queries = x if self.latents is None else F.layer_norm(self.latents, (8,)).expand(len(x), -1, 8)
        if self.layer is not None:
            return self.head(self.layer(queries, x, x, need_weights=False)[0])
        q, k, v = (m(t).unflatten(-1, (2, 4)).transpose(1, 2) for m, t in ((self.q, queries), (self.k, x), (self.v, x)))
        return self.head(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def described(roles):
    return {r.name: (r.role, [(b.role, b.start, b.size, b.heads) for b in r.blocks], r.is_attended) for r in roles}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "embed, x, width",
    [
        (lambda i: F.one_hot(i, 11).float(), torch.arange(6).view(2, 3), 11),
        (lambda i: i.float() / 255, torch.zeros(2, 3, 8, dtype=torch.uint8), 8),
        (lambda i: i.to(torch.float32), torch.ones(2, 3, 8, dtype=torch.bool), 8),
        (lambda x: (x > 0).float(), torch.ones(2, 3, 8), 8),
    ],
    ids=["one-hot", "bytes", "bools", "comparisons"],
)
def test_numbers_made_of_integers_are_activations_as_others_are(embed, x, width, device):
    torch.manual_seed(seeded(0))
    expected = described(find_roles(Attention(width=width), torch.randn(2, 3, width)))
    found = described(find_roles(Attention(embed, width).to(device), x.to(device)))
    assert found == expected and found["q.weight"][1] == [("query", 0, 8, 2)] and found["head.weight"][0] == "head"


def test_learned_queries_are_a_table_and_their_projection_makes_queries():
    torch.manual_seed(seeded(0))
    x = torch.randn(2, 3, 8)
    expected, found = (described(find_roles(Attention(latents=n), x)) for n in (0, 3))
    assert found.pop("latents") == ("table", [], False) and found == expected
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    expected, found = (described(find_roles(Attention(latents=n, layer=layer), x)) for n in (0, 3))
    assert found.pop("latents") == ("table", [], False) and found == expected
    assert [b[0] for b in found["layer.in_proj_weight"][1]] == ["query", "key", "value"]


def test_a_head_of_learned_queries_has_the_rows_that_its_gradient_has():
    """Attention of a batch without tokens to see but the learned ones: what the first head returns depends on its own rows alone."""
    torch.manual_seed(seeded(0))
    model, x = Attention(latents=3).double(), torch.randn(2, 4, 8, dtype=torch.float64)
    (block,) = find_roles(model, x)["q.weight"].blocks
    kept = []
    hook = model.out.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    model(x)
    hook.remove()
    (g,) = torch.autograd.grad(kept[0][..., :4].square().sum(), model.q.weight)
    of_head = block.indices.view(block.heads, -1)[0]
    assert (g.abs().sum(1) > 0).nonzero().flatten().tolist() == of_head.tolist()


class ByHand(nn.Module):
    """``g v / |v|``, written out."""

    def __init__(self, v, dims):
        super().__init__()
        self.v, self.g, self.dims = nn.Parameter(v), nn.Parameter(torch.ones(len(v), *[1] * (v.ndim - 1))), dims

    def forward(self, x):
        w = self.g * self.v / self.v.norm(dim=self.dims, keepdim=True)
        return F.conv1d(x, w).tanh() if w.ndim == 3 else F.linear(x, w).tanh()


@pytest.mark.parametrize(
    "layer, plain, x, name, gain",
    [
        (parametrizations.weight_norm(nn.Linear(4, 6)), nn.Linear(4, 6), (3, 4), "original1", "original0"),
        (
            parametrizations.weight_norm(nn.Conv1d(4, 6, 3, groups=2)),
            nn.Conv1d(4, 6, 3, groups=2),
            (2, 4, 5),
            "original1",
            "original0",
        ),
        (ByHand(torch.ones(6, 4), -1), nn.Linear(4, 6), (3, 4), "v", "g"),
        (ByHand(torch.ones(6, 4, 3), (1, 2)), nn.Conv1d(4, 6, 3), (2, 4, 5), "v", "g"),
        (parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 4), (3, 4), "original", ""),
    ],
    ids=["linear", "conv", "by hand", "conv by hand", "orthogonal"],
)
@pytest.mark.parametrize("after", [nn.Softmax(-1), nn.Tanh()], ids=["hidden", "head"])
def test_what_a_weight_is_made_of_is_that_weight_and_its_gain(layer, plain, x, name, gain, after):
    expected = find_roles(nn.Sequential(plain, after), torch.randn(x))["0.weight"]
    found = {r.name.rpartition(".")[2]: r for r in find_roles(nn.Sequential(layer, after), torch.randn(x))}
    assert (found[name].role, found[name].groups) == (expected.role, expected.groups)
    assert not gain or found[gain].role == "gain"


def test_a_matrix_for_each_output_is_a_stack_and_a_mask_token_no_gain():
    torch.manual_seed(seeded(0))
    bilinear = find_roles(nn.Sequential(Both(), nn.Tanh()), torch.randn(2, 4))
    assert [r.role for r in bilinear] == ["stack", "bias"]
    assert (
        find_roles(Masked(), torch.randn(2, 3, 4), torch.tensor([[True, False, True], [False, False, True]]))["token"].role
        == "bias"
    )


@pytest.mark.parametrize(
    "of_several, roles",
    [
        (lambda x, a, b: torch.addcmul(b, a, x), ["gain", "bias"]),  # ResMLP's affine map, ConvNeXt V2's normalization
        (lambda x, a, b: torch.addcmul(b, a, x, value=-2), ["gain", "bias"]),
        (lambda x, a, b: (x + 1).addcmul_(x, a).add_(b), ["gain", "bias"]),
        (lambda x, a, b: torch.addcdiv(b, x, a), ["gain", "bias"]),
        (lambda x, a, b: torch.lerp(x, x.roll(1, 1), a) + b, ["gain", "bias"]),  # RWKV's token shift
        (lambda x, a, b: torch.lerp(x, b.expand_as(x), 0.5) * a, ["gain", "bias"]),
        (lambda x, a, b: torch.addr(torch.addbmm(b.expand(3, 4), x, torch.eye(4).expand(2, 4, 4)), x[0, :, 0], a), ["bias"] * 2),
    ],
)  # fmt: skip
def test_parameters_in_operations_of_several_are_what_they_are_in_their_parts(of_several, roles):
    class Affine(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x):
            return of_several(x, self.a, self.b)

    assert [r.role for r in find_roles(Affine(), torch.randn(2, 3, 4))] == roles


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Bilinear(4, 4, 6)

    def forward(self, x):
        return self.both(x, x)


class Masked(nn.Module):
    """As BEiT has it: a token in the places that a mask says."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))

    def forward(self, x, mask):
        w = mask.unsqueeze(-1).type_as(self.token)
        return x * (1 - w) + self.token * w


@pytest.mark.parametrize("mode", ["bound", "typical"])
def test_what_projects_learned_queries_is_an_operator_and_steps_keep_the_promise(mode):
    torch.manual_seed(seeded(0))
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    model = Attention(latents=3).double()
    norm, plain = ModularNorm(model, x, mode=mode), ModularNorm(Attention().double(), x, mode=mode)
    for name in ("q.weight", "k.weight", "v.weight", "out.weight", "q.bias"):
        assert (norm.balls[name].kind, norm.balls[name].elem_dims) == (plain.balls[name].kind, plain.balls[name].elem_dims)
    if mode == "bound":
        norm.initialize_(torch.Generator().manual_seed(seeded(0)))
        x = x / x.square().mean(-1).sqrt().amax()
        before = model(x)
        before.square().sum().backward()
        step = norm.dualize({name: p.grad for name, p in model.named_parameters()}, method="svd")
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += 1e-6 * step[name]
        moved = (model(x) - before).square().mean(-1).sqrt().amax() / 1e-6
        assert 0 < moved <= 1 + 1e-4


class Mixed(nn.Module):
    """Heads whose scores, or probabilities, a matrix mixes (CaiT's talking heads), or learned values (external attention)."""

    def __init__(self, before, after, learned=False):
        super().__init__()
        self.qkv, self.out, self.last, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.before, self.after = (nn.Linear(2, 2) if given else None for given in (before, after))
        self.values = nn.Linear(3, 4) if learned else None

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT
        if self.before is not None:
            scores = self.before(scores.movedim(1, -1)).movedim(-1, 1)
        p = scores.softmax(-1)
        if self.after is not None:
            p = self.after(p.movedim(1, -1)).movedim(-1, 1)
        y = p @ v if self.values is None else self.values(p)
        return self.head(self.last(self.out(y.transpose(1, 2).flatten(2)).relu()))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_heads_that_a_matrix_mixes_have_queries_keys_and_values(before, after):
    torch.manual_seed(seeded(0))
    roles = find_roles(Mixed(before, after), torch.randn(2, 3, 8))
    assert [(b.role, b.start, b.size, b.heads) for b in roles["qkv.weight"].blocks] == [
        ("query", 0, 8, 2), ("key", 8, 8, 2), ("value", 16, 8, 2)
    ]  # fmt: skip
    assert [r.name for r in roles if r.is_attended] == ["out.weight"]


class Read(nn.Module):
    """A state that is read by products of activations, as of Mamba, and a router after it."""

    def __init__(self):
        super().__init__()
        self.b, self.c, self.out, self.router = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        state = (x[..., None] * self.b(x)[..., None, :]).cumsum(1)
        y = self.out((state @ self.c(x)[..., None]).squeeze(-1))
        return self.router(x + y).softmax(-1)


def test_a_softmax_after_products_of_activations_is_no_attention():
    model, x = Read(), torch.randn(2, 3, 8)
    assert not find_roles(model, x).of_attention
    with pytest.raises(NormMismatchError, match="no attention is found"):
        QKClip(model, x)


class Gate(nn.Module):
    def __init__(self, how, sizes=1):
        super().__init__()
        self.up, self.down, self.how = nn.Linear(8, int(16 * sizes)), nn.Linear(8, 8), how

    def forward(self, x):
        return self.down(self.how(self.up(x))).exp()


def _gated_attention(y):
    q, k, v, gate = y.chunk(4, -1)
    return nn.functional.scaled_dot_product_attention(q, k, v) * gate.sigmoid()


@pytest.mark.parametrize(
    "how, wanted",
    [
        (nn.functional.glu, ["gated", "gate"]),
        (lambda y: nn.functional.glu(y.mT, 1).mT, ["gated", "gate"]),
        (_gated_attention, ["query", "key", "value", "gate"]),
    ],
)
def test_gates_of_attention_and_of_torchs_own_function_are_blocks(how, wanted):
    roles = find_roles(Gate(how, len(wanted) // 2), torch.randn(2, 3, 8))
    for name in ("up.weight", "up.bias"):
        assert [(b.role, b.start) for b in roles[name].blocks] == [(role, 8 * i) for i, role in enumerate(wanted)]


def test_what_follows_learned_values_is_no_attention():
    torch.manual_seed(seeded(0))
    roles = find_roles(Mixed(False, False, learned=True), torch.randn(2, 3, 8))
    assert [b.role for b in roles["qkv.weight"].blocks][:2] == ["query", "key"]
    assert all(b.role == "" for name in ("out.weight", "last.weight", "head.weight") for b in roles[name].blocks)
    assert roles["head.weight"].role == "head"


class Slots(nn.Module):
    """Slots compete for inputs: the softmax is over queries, and then what each has is divided by its sum (slot attention)."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, slots, x):
        p = torch.einsum("bid,bjd->bij", self.q(slots), self.k(x)).softmax(1) + 1e-8
        return self.out(torch.einsum("bjd,bij->bid", self.v(x), p / p.sum(-1, keepdim=True)))


def test_keys_are_what_values_are_summed_by_whatever_the_softmax_is_over():
    torch.manual_seed(seeded(0))
    roles = find_roles(Slots(), torch.randn(2, 3, 8), torch.randn(2, 5, 8))
    assert [(r.name, r.blocks[0].role) for r in roles if r.name.endswith("weight")] == [
        ("q.weight", "query"), ("k.weight", "key"), ("v.weight", "value"), ("out.weight", "")
    ]  # fmt: skip
    assert roles["out.weight"].is_attended


@pytest.mark.parametrize(
    "how, wanted",
    [
        (lambda q, k, v: ((q[:, :, None] * k[:, None]).sum(-1, keepdim=True).softmax(2) * v[:, None]).sum(2), ["query", "key", "value"]),
        (lambda q, k, v: ((k[:, None] * q[:, :, None]).sum(-1).softmax(-1)[..., None] * v[:, None]).sum(-2), ["query", "key", "value"]),
        (lambda q, k, v: (q * k).sum(-1, keepdim=True).sigmoid() * v, []),  # each row with one other
        (lambda q, k, v: (q * k).sum(-1).softmax(-1)[..., None] * v, []),
    ],
    ids=["kept", "keys first", "no softmax", "one key each"],
)  # fmt: skip
def test_products_entry_by_entry_that_are_summed_are_attentions_where_each_query_meets_several_keys(how, wanted):
    roles = find_roles(Gate(lambda y: how(*y.chunk(3, -1)), 1.5), torch.randn(2, 3, 8))
    assert [b.role for b in roles["up.weight"].blocks if b.role in ("query", "key", "value")] == wanted
    assert roles["down.weight"].is_attended == bool(wanted) and not roles["up.weight"].is_factor


class Patches(nn.Module):
    """A kernel that multiplies patches which do not overlap, as a convolution or by hand."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.w, self.head = nn.Parameter(torch.randn(6, 4, 2, 2, dtype=D)), nn.Linear(6, 7, dtype=D)

    def forward(self, x):
        return self.head(self.how(x, self.w).flatten(2).mT)


def _cut_out(x):
    """[batch, rows, columns, channels * 2 * 2]."""
    return x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)


@pytest.mark.parametrize(
    "how",
    [
        lambda x, w: F.linear(_cut_out(x), w.flatten(1)).movedim(-1, 1),
        lambda x, w: (_cut_out(x) @ w.reshape(6, -1).T).movedim(-1, 1),
        lambda x, w: w.view(6, -1) @ F.unfold(x, 2, stride=2),
        lambda x, w: torch.einsum("bhwk,ok->bohw", _cut_out(x), w.flatten(1)),
    ],
)
def test_a_kernel_that_multiplies_patches_is_that_of_a_convolution(how):
    torch.manual_seed(seeded(0))
    by_hand, convolved = Patches(how), Patches(lambda x, w: F.conv2d(x, w, stride=2))
    convolved.load_state_dict(by_hand.state_dict())
    x = torch.randn(2, 4, 6, 6, dtype=D)
    torch.testing.assert_close(by_hand(x), convolved(x))
    role = find_roles(by_hand, x)["w"]
    assert (role.role, role.out_axis) == ("convolution", 0)
    before = by_hand.w.detach().clone()
    for model in (by_hand, convolved):
        optimizer = ModularOptimizer(model, x, lr=0.1, momentum=0.0, method="svd")
        model(x).square().mean().backward()
        optimizer.step()
        # each tap moves by an operator of norm target / taps
        values = torch.linalg.svdvals((model.w - before).detach().movedim((0, 1), (-2, -1)))
        torch.testing.assert_close(values, torch.full_like(values, 0.1 * optimizer.norm.targets["w"] / 4 * (6 / 4) ** 0.5))
