"""Models that are built on the meta device whole: norms are those of the model with data, whose buffers its library fills in."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from tests.seeds import LONG, seeded
from thunder_norm import RMSTensor, build_norm_map, norm_report
from thunder_norm.errors import NormMismatchError
from thunder_norm.model_state.initial_buffers import initial_buffers, with_initial_buffers
from thunder_norm.modular import ModularNorm

_SMALL = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=20,
    head_dim=8,
)


def _llama() -> nn.Module:
    return transformers.LlamaModel(transformers.LlamaConfig(**_SMALL))


def _gemma() -> nn.Module:
    return transformers.Gemma2Model(transformers.Gemma2Config(**_SMALL))


class _Beside(nn.Module):
    """A model of transformers in another one, with a table that nobody can make anew unless it is given."""

    def __init__(self, table: bool = False):
        super().__init__()
        self.body, self.head = _llama(), nn.Linear(16, 4)
        if table:
            self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = self.head(self.body(tokens).last_hidden_state)
        return y * self.table if hasattr(self, "table") else y


def _with_and_without_data(make) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seeded(0))
    with torch.device("meta"):
        empty = make().eval()
    if int(transformers.__version__.partition(".")[0]) < 5:
        try:
            empty(torch.zeros(1, 2, dtype=torch.long, device="meta"))
        except RuntimeError as e:
            pytest.skip(f"eager mode does not run the model of transformers {transformers.__version__} on meta: {e}")
    return make().eval(), empty


_MODELS = {"Llama": _llama, "Gemma 2": _gemma, "in another model": _Beside}


@pytest.mark.parametrize("mode", ["bound", "typical", "modula"])
@pytest.mark.parametrize("name", _MODELS)
def test_modular_norms_are_those_of_the_model_with_data(name, mode):
    real, empty = _with_and_without_data(_MODELS[name])
    tokens = torch.arange(5)[None]
    found, wanted = ModularNorm(empty, tokens.to("meta"), mode=mode), ModularNorm(real, tokens.to("meta"), mode=mode)
    assert found.targets == pytest.approx(wanted.targets, rel=1e-4)
    assert all(b.is_meta for b in empty.buffers())


@pytest.mark.parametrize("name", ["Llama", "Gemma 2"] if LONG else ["Llama"])
def test_norm_maps_and_their_reports_are_those_of_the_model_with_data(name):
    real, empty = _with_and_without_data(_MODELS[name])
    embedded = torch.empty(1, 5, 16, device="meta")
    before = dict(empty.named_buffers())
    maps = [build_norm_map(m, inputs_embeds=embedded, parameters="unit") for m in (empty, real)]
    for size in (1.0, 3.0, 1.0):
        found, wanted = (m(inputs_embeds=RMSTensor(size)).last_hidden_state.norm_size.item() for m in maps)
        assert found == pytest.approx(wanted, rel=1e-4)
    found, wanted = (norm_report(m).rows[-1].norm_size for m in maps)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert all(b is before[n] and b.is_meta for n, b in empty.named_buffers())
    with torch.device("meta"):
        empty.rotary_emb = type(empty.rotary_emb)(empty.config)  # another one without data
    assert maps[0](inputs_embeds=RMSTensor(1.0)).last_hidden_state.norm_size.item() == pytest.approx(
        maps[1](inputs_embeds=RMSTensor(1.0)).last_hidden_state.norm_size.item(), rel=1e-4
    )


def test_timms_buffers_are_made_by_timm():
    timm = pytest.importorskip("timm")
    real, empty = _with_and_without_data(lambda: timm.create_model("levit_128s", num_classes=4))
    found = initial_buffers(empty)
    wanted = {n: b for n, b in real.named_buffers() if n in found}
    assert found and all(torch.equal(found[n], b) for n, b in wanted.items())
    lacking = {
        n for m, module in empty.named_modules() for k in module._non_persistent_buffers_set for n in [f"{m}.{k}" if m else k]
    }
    assert set(found) == lacking


@pytest.mark.parametrize("name", _MODELS)
def test_values_are_those_of_the_model_with_data_and_nothing_else_is_touched(name):
    real, empty = _with_and_without_data(_MODELS[name])
    empty.half()
    versions = {n: (id(t), t._version) for n, t in [*empty.named_parameters(), *empty.named_buffers()]}
    state = torch.get_rng_state()
    found = initial_buffers(empty)
    assert torch.equal(torch.get_rng_state(), state)
    assert {n: (id(t), t._version) for n, t in [*empty.named_parameters(), *empty.named_buffers()]} == versions
    wanted = dict(real.half().named_buffers())
    assert found.keys() == wanted.keys() and all(
        torch.equal(found[n], b) and b.dtype == found[n].dtype for n, b in wanted.items()
    )
    with with_initial_buffers(empty):
        assert all(torch.equal(b, wanted[n]) for n, b in empty.named_buffers())
    assert all(b.is_meta for b in empty.buffers())


def test_what_nobody_makes_anew_is_refused_by_name_until_it_has_values():
    _, empty = _with_and_without_data(lambda: _Beside(table=True))
    tokens = torch.zeros(1, 5, dtype=torch.long, device="meta")
    assert "table" not in initial_buffers(empty)
    with pytest.raises(NormMismatchError, match=r"buffers  'table'\n"):
        ModularNorm(empty, tokens, mode="modula")
    empty.table = torch.arange(4.0)
    assert len(ModularNorm(empty, tokens, mode="modula").targets) == len(list(empty.parameters()))


def test_a_model_with_data_has_no_buffers_to_be_made():
    real, _ = _with_and_without_data(_llama)
    assert initial_buffers(real) == {} == initial_buffers(nn.BatchNorm1d(3).to("meta")) == initial_buffers(lambda x: x)
