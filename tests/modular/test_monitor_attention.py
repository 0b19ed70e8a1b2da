"""Attention logits of a training monitor, against those computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.modular import monitored
from tests.seeds import seeded
from thunder_norm.modular import TrainingMonitor
from thunder_norm.modular.monitoring.attention import sdpa_logits


def _watched(model: nn.Module, *batch: torch.Tensor) -> dict[str, list[float]]:
    """The largest logits of one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainingMonitor(model, every=1, optimizer=optimizer) as monitor:
        y = model(*batch)
        (y[0] if isinstance(y, tuple) else y).square().sum().backward()
        optimizer.step()
    return monitor.latest["attention"]


def _by_hand(q: torch.Tensor, k: torch.Tensor, *, scale: float | None = None, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The largest logit of each head of [batch, heads, length, width] in float64, pair by pair."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    logits = scale * torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double())
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else logits + mask
    return logits.amax((0, 2, 3))


def _tensors(keys: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seeded(0))
    return torch.randn(2, 4, 6, 8), torch.randn(2, 4, keys, 8), torch.randn(2, 4, keys, 8)


@pytest.mark.parametrize("options", [{}, {"scale": -0.7}, {"is_causal": True}, {"dropout_p": 0.5}])
def test_of_the_function(options: dict[str, Any]):
    q, k, v = _tensors()
    mask = torch.ones(6, 6, dtype=torch.bool).tril() if options.get("is_causal") else None
    found = sdpa_logits(q, k, v, **options)
    torch.testing.assert_close(found.double(), _by_hand(q, k, scale=options.get("scale"), mask=mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 9), (2, 1, 6, 9), (2, 4, 6, 9), (1, 9), (2, 1, 1, 9)])
@pytest.mark.parametrize("is_bool", [True, False])
def test_of_the_function_with_masks(shape: tuple[int, ...], is_bool: bool):
    q, k, v = _tensors(keys=9)
    mask = torch.rand(shape) > 0.3 if is_bool else torch.randn(shape)
    expected = _by_hand(q, k, mask=mask.expand(2, 4, 6, 9))
    torch.testing.assert_close(sdpa_logits(q, k, v, mask).double(), expected, rtol=1e-5, atol=1e-5)


def test_of_the_function_with_fewer_heads_of_keys_and_in_parts(monkeypatch: pytest.MonkeyPatch):
    q, k, v = _tensors()
    expected = _by_hand(q, k[:, :2].repeat_interleave(2, 1))
    for entries in (1 << 24, 100):  # all at once, and some queries at a time
        monkeypatch.setattr("thunder_norm.modular.monitoring.attention._ENTRIES", entries)
        found = sdpa_logits(q, k[:, :2], v[:, :2], enable_gqa=True)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_written_out", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_of_a_language_model_however_attention_is_written(is_written_out: bool, dtype: torch.dtype):
    torch.manual_seed(seeded(1))
    model = monitored.LanguageModel(is_written_out=is_written_out).to(dtype)
    tokens = torch.randint(20, (4, 12))
    entered: dict[str, tuple[torch.Tensor, ...]] = {}
    handles = [
        block.attn.register_forward_pre_hook(lambda m, a, i=i: entered.__setitem__(f"blocks.{i}.attn", m.split(a[0])))
        for i, block in enumerate(model.blocks)
    ]
    model(tokens)
    for handle in handles:
        handle.remove()
    found = _watched(model, tokens)
    assert set(found) == set(entered)
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    tolerance = 0.02 if dtype is torch.bfloat16 else 1e-5  # what is written out is rounded to half precision
    for name, (q, k, _) in entered.items():
        torch.testing.assert_close(
            torch.tensor(found[name], dtype=torch.float64), _by_hand(q, k, mask=causal), rtol=tolerance, atol=tolerance
        )


class Two(nn.Module):
    """Attentions of 2 heads and of 3, in one module."""

    def __init__(self, first: int):
        super().__init__()
        self.qkv, self.first = nn.ModuleList(nn.Linear(12, 36) for _ in range(2)), first

    def split(self, i: int, x: torch.Tensor) -> list[torch.Tensor]:
        heads = (self.first, 5 - self.first)[i]
        return [t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in self.qkv[i](x).chunk(3, -1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(2):
            x = x + F.scaled_dot_product_attention(*self.split(i, x)).transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize("first", [2, 3])
def test_of_several_attentions_of_one_module_all_are_kept(first: int):
    torch.manual_seed(seeded(0))
    model, x = Two(first), torch.randn(2, 5, 12)
    wanted, y = [], x
    for i in range(2):
        q, k, v = model.split(i, y)
        wanted.append(_by_hand(q, k).tolist())
        y = y + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainingMonitor(model, every=1, optimizer=optimizer) as monitor:
        for _ in range(2):  # batches of one step
            model(x).square().sum().backward()
        optimizer.step()
    found = monitor.latest["attention"]
    assert list(found) == ["(model)", f"(model), {5 - first} heads"]
    assert [heads == pytest.approx(w, rel=1e-4) for heads, w in zip(found.values(), wanted, strict=True)] == [True, True]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("is_masked", [True, False])
def test_of_torchs_own_module(need_weights: bool, is_masked: bool):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(5, 5, dtype=torch.bool).triu(1) if is_masked else None
            return self.attention(x, x, x, need_weights=need_weights, attn_mask=mask)[0]

    torch.manual_seed(seeded(2))
    model, x = Own(), torch.randn(3, 5, 8)
    weights, biases = model.attention.in_proj_weight.chunk(3), model.attention.in_proj_bias.chunk(3)
    q, k = (F.linear(x, weights[i], biases[i]).view(3, 5, 2, 4).transpose(1, 2) for i in range(2))
    expected = _by_hand(q, k, mask=torch.ones(5, 5, dtype=torch.bool).tril() if is_masked else None)
    found = torch.tensor(_watched(model, x)["attention"], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


SPELLINGS = {
    "@, masked_fill_": lambda q, k: (q @ k.mT / 2).masked_fill_(_future(q), -1e9).softmax(-1),
    "matmul, mask added": lambda q, k: F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.5 + _future(q) * -1e9, dim=-1),
    "einsum, where": lambda q, k: torch.softmax(
        torch.where(_future(q), torch.tensor(-1e9), torch.einsum("bhqd,bhkd->bhqk", q, k).mul(0.5)), 3
    ),
    "scaled query": lambda q, k: torch.softmax((0.5 * q) @ k.mT - _future(q) * 1e9, dim=-1, dtype=torch.float32),
    "bmm": lambda q, k: F.softmax(
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(2, 4, 6, 6).mul_(0.5).masked_fill(_future(q), -1e9).float(), dim=-1
    ),
    "baddbmm": lambda q, k: (
        torch.baddbmm(_future(q) * -1e9, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.5).unflatten(0, (2, 4)).softmax(dim=-1)
    ),
    "in place": lambda q, k: _in_place(q, k).softmax(-1),
    "exponentials": lambda q, k: _normalized(_in_place(q, k).exp()),
    "shifted exponentials": lambda q, k: _normalized((s := _in_place(q, k)).sub(s.max(-1, keepdim=True).values).float().exp_()),
    "exponentials of logarithms": lambda q, k: torch.exp((s := _in_place(q, k)) - torch.logsumexp(s, -1, keepdim=True)),
    "shifted softmax": lambda q, k: ((s := _in_place(q, k)) - s.amax(-1, keepdim=True).detach()).softmax(-1),
    "module": lambda q, k: nn.Softmax(dim=-1)(q @ k.mT / 2 + (_future(q) * -1e9).expand(4, 6, 6)),
}


def _future(q: torch.Tensor) -> torch.Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)


def _normalized(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _in_place(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    scores /= 2
    scores += _future(q) * -1e9
    return scores


class Written(nn.Module):
    def __init__(self, weights: Any):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.weights = weights

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.weights(self.scale * q, k) @ v


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_of_attention_that_is_written_out(spelling: str):
    q, k, v = _tensors()
    found = torch.tensor(_watched(Written(SPELLINGS[spelling]), q, k, v)["(model)"], dtype=torch.float64)
    torch.testing.assert_close(found, _by_hand(q, k, scale=0.5, mask=~_future(q)), rtol=1e-5, atol=1e-5)


OTHERS = {
    "classes": lambda m, x: F.softmax(m.inner(x), dim=-1),
    "a product with a parameter": lambda m, x: F.softmax(x @ m.inner.weight.T, dim=-1),
    "a product with what a parameter became": lambda m, x: F.softmax(x @ (2 * m.inner.weight).t().contiguous(), dim=-1),
    "logits whose shift was in place": lambda m, x: (y := m.inner(x) @ x.mT).sub_(y.detach().amax(-1, keepdim=True)).exp(),
    "shifted logits that became others": lambda m, x: (((y := m.inner(x) @ x.mT) - y.amax(-1, keepdim=True)) / 2).exp(),
    "over other dimensions": lambda m, x: (m.inner(x) @ x.mT).softmax(-2),
    "what a nonlinear layer made of a product": lambda m, x: F.layer_norm(m.inner(x) @ x.mT, (5,)).softmax(-1),
    "a vote over pairs of two dimensions": lambda m, x: (m.inner(x[0]) @ x[0].mT).softmax(-1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_of_what_is_no_attention(name: str):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return OTHERS[name](self, x)

    assert _watched(Other(), torch.randn(3, 5, 8)) == {}


def test_not_a_number_is_seen_and_vmap_is_let_through():
    q, k, v = _tensors()
    q[0, 1, 2, 3] = math.nan
    found = _watched(Written(lambda q, k: (q @ k.mT).softmax(-1)), q, k, v)["(model)"]
    assert [math.isnan(x) for x in found] == [False, True, False, False]

    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.vmap(lambda *x: F.scaled_dot_product_attention(*x))(self.scale * q, k, v)

    assert _watched(Mapped(), *_tensors()) == {}
