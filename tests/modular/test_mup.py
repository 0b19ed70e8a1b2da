"""muP's multipliers against the published table, and sizes of activations over widths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.modular import monitored
from tests.seeds import seeded
from thunder_norm.errors import NormMapKeyError, NormMismatchError
from thunder_norm.modular import mup_scales


def _model(width: int) -> monitored.LanguageModel:
    return monitored.LanguageModel(width=width, heads=width // 8, depth=2)


@pytest.mark.parametrize("has_example", [True, False])
def test_a_transformer_has_the_multipliers_of_table_3(has_example: bool):
    scales = mup_scales(_model(64), _model(16), torch.zeros(1, 12, dtype=torch.long) if has_example else None)
    m = 4.0
    for name, _ in _model(16).named_parameters():
        scale = scales[name]
        found = scale.role, scale.lr, scale.init_std, scale.output
        if name == "head.weight":  # variance 1 / fan_in^2, Adam's lr 1 / fan_in
            assert found == ("output", 1 / m, 1 / m, 1.0)
        elif name.startswith(("emb", "pos")) or name.endswith("bias") or "ln" in name:  # 1, 1
            assert found == ("input", 1.0, 1.0, 1.0), name
        else:  # variance 1 / fan_in, Adam's lr 1 / fan_in
            assert found == ("hidden", 1 / m, m**-0.5, 1.0), name
    assert "q k / d" in repr(scales) and "blocks.0.attn.qkv.weight" in repr(scales)


def test_tied_embeddings_have_table_8():
    def tied(width: int) -> nn.Module:
        model = _model(width)
        model.head.weight = model.emb.weight
        return model

    for example in (None, torch.zeros(1, 12, dtype=torch.long)):
        scale = mup_scales(tied(64), tied(16), example)["emb.weight"]
        assert (scale.role, scale.lr, scale.init_std, scale.output) == ("tied", 1.0, 1.0, 0.25)


def test_an_input_is_told_from_an_output_of_the_same_shape_by_its_use():
    class Both(nn.Module):
        """Weights [in, out] as GPT-2's."""

        def __init__(self, width: int):
            super().__init__()
            self.first, self.last = nn.Parameter(torch.randn(3, width)), nn.Parameter(torch.randn(3, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.first).relu() @ self.last.T

    scales = mup_scales(Both(32), Both(8), torch.randn(2, 3))
    assert (scales["first"].role, scales["last"].role) == ("input", "output")


def test_groups_are_those_of_adamw():
    model = _model(64)
    scales = mup_scales(model, _model(16))
    model.pos.weight.requires_grad_(False)
    groups = scales.param_groups(0.01, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups)
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert found[id(model.head.weight)] == pytest.approx((0.0025, 0.4))
    assert found[id(model.emb.weight)] == pytest.approx((0.01, 0.1)) and id(model.pos.weight) not in found
    assert len(found) == len(list(model.parameters())) - 1


def test_a_model_on_meta_and_the_same_width():
    with torch.device("meta"):
        wide = _model(64)
    assert mup_scales(wide, _model(16))["head.weight"].role == "output"
    assert all(s.role == "fixed" and s.lr == s.init_std == 1 for s in mup_scales(_model(16), _model(16)).values())


def test_errors():
    with pytest.raises(NormMapKeyError, match="other parameters"):
        mup_scales(_model(16), monitored.LanguageModel(width=16, depth=1))

    class Vectors(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.table = nn.Embedding(width, width)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.table(i)

    with pytest.raises(NormMismatchError, match="no role for 'table.weight'"):
        mup_scales(Vectors(8), Vectors(4))

    class Tokens(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.token, self.mix = nn.Parameter(torch.ones(1, 1, width)), nn.Parameter(torch.ones(width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.token) @ self.mix

    with pytest.raises(NormMismatchError, match="cannot tell what 'token' is: Tokens is no layer of torch(.|\n)*with a batch"):
        mup_scales(Tokens(8), Tokens(4))
    scales = mup_scales(Tokens(8), Tokens(4), torch.ones(2, 3, 4))
    assert (scales["token"].role, scales["mix"].role) == ("input", "hidden")


def _moved(width: int, has_scales: bool, base: nn.Module) -> float:
    """How far the logits move in five steps of AdamW."""
    torch.manual_seed(seeded(1))
    model, tokens = _model(width), torch.randint(20, (8, 12))
    scales = mup_scales(model, base)
    groups = scales.param_groups(0.02) if has_scales else [{"params": list(model.parameters()), "lr": 0.02}]
    if has_scales:
        starts = dict(base.named_parameters())
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim > 1:
                    p.normal_(std=starts[name].std().item() * scales[name].init_std)
    before = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    with torch.no_grad():
        return (model(tokens) - before(tokens)).square().mean().sqrt().item()


@pytest.mark.slow
def test_logits_move_as_far_at_all_widths_with_the_scales_and_farther_without():
    torch.manual_seed(seeded(0))
    base = _model(64)
    widths = (64, 512)
    narrow, wide = (_moved(w, True, base) for w in widths)
    print(f"with scales {narrow:.3g} {wide:.3g}", end="; ")
    assert 0.5 < wide / narrow < 2
    narrow, wide = (_moved(w, False, base) for w in widths)
    print(f"without {narrow:.3g} {wide:.3g}")
    assert wide / narrow > 2.5


class _Program(nn.Module):
    """A program of some parameters or modules."""

    def __init__(self, forward: Callable[..., torch.Tensor], **parts: Any):
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self._forward(self, *args)


class _Twice(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return 2 * w


def _twice(module: nn.Module) -> nn.Module:
    nn.utils.parametrize.register_parametrization(module, "weight", _Twice())
    return module


_weight_norm = nn.utils.parametrizations.weight_norm
_spectral_norm = nn.utils.parametrizations.spectral_norm
_orthogonal = nn.utils.parametrizations.orthogonal


def _attention(n: int) -> nn.Module:
    attention = nn.MultiheadAttention(n, 2, kdim=5, vdim=5, add_bias_kv=True, batch_first=True)
    return _Program(lambda m, x, y: m.attention(x, y, y)[0], attention=attention)


# model of a width, arguments for it, how many products each output of the parameter's is a sum of, and whether the outputs grow in number
# (None: not without an example).  All from the definitions of the layers.
_FAN_INS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Any], str, Callable[[int], int], bool | None]] = {
    "convolution": (lambda n: nn.Conv2d(n, n, 3), lambda n: torch.randn(1, n, 5, 5), "weight", lambda n: 9 * n, True),
    "of groups": (lambda n: nn.Conv1d(n, 4, 3, groups=2), lambda n: torch.randn(1, n, 5), "weight", lambda n: 3 * n // 2, False),
    "of each channel": (lambda n: nn.Conv1d(n, n, 3, groups=n), lambda n: torch.randn(1, n, 5), "weight", lambda n: 3, True),
    "transposed": (lambda n: nn.ConvTranspose2d(n, 3, 3), lambda n: torch.randn(1, n, 5, 5), "weight", lambda n: 9 * n, False),
    "transposed, of groups": (
        *(lambda n: nn.ConvTranspose1d(n, 4, 3, groups=2), lambda n: torch.randn(1, n, 5)),
        *("weight", lambda n: 3 * n // 2, False),
    ),
    "transposed, of groups, input": (
        *(lambda n: nn.ConvTranspose1d(4, n, 3, groups=2), lambda n: torch.randn(1, 4, 5)),
        *("weight", lambda n: 6, True),
    ),
    "transposed, of each channel": (
        *(lambda n: nn.ConvTranspose1d(n, n, 3, groups=n), lambda n: torch.randn(1, n, 5)),
        *("weight", lambda n: 3, True),
    ),
    "bilinear": (
        *(lambda n: _Program(lambda m, x: m.layer(x, x), layer=nn.Bilinear(n, n, n)), lambda n: torch.randn(2, n)),
        *("layer.weight", lambda n: n * n, True),
    ),
    "bilinear, one side": (
        *(lambda n: nn.Bilinear(n, 3, 2), lambda n: (torch.randn(2, n), torch.randn(2, 3))),
        *("weight", lambda n: 3 * n, False),
    ),
    "over two dimensions": (
        *(lambda n: _Program(lambda m, x: torch.tensordot(x, m.w, 2), w=torch.randn(n, n, 3)), lambda n: torch.randn(2, n, n)),
        *("w", lambda n: n * n, None),
    ),
    "of a view": (
        *(
            lambda n: _Program(lambda m, x: x.flatten(1) @ m.w.flatten(0, 1), w=torch.randn(n, n, 3)),
            lambda n: torch.randn(2, n, n),
        ),
        *("w", lambda n: n * n, None),
    ),
    "heads put together": (
        lambda n: _Program(lambda m, x: torch.einsum("bhd,hdo->bo", x.unflatten(-1, (-1, 4)), m.w), w=torch.randn(n // 4, 4, n)),
        *(lambda n: torch.randn(2, n), "w", lambda n: n, None),
    ),
    "two in one": (
        *(lambda n: _Program(lambda m, x: x @ (m.b @ m.a).mT, a=torch.randn(n // 4, n), b=torch.randn(n, n // 4)),),
        *(lambda n: torch.randn(2, n), "b", lambda n: n // 4, True),
    ),
    "the other of two in one": (
        *(lambda n: _Program(lambda m, x: x @ (m.b @ m.a).mT, a=torch.randn(n // 4, n), b=torch.randn(n, n // 4)),),
        *(lambda n: torch.randn(2, n), "a", lambda n: n, True),
    ),
    "both ways": (
        *(lambda n: _Program(lambda m, x: (x @ m.w.T).relu() @ m.w, w=torch.randn(n, n)), lambda n: torch.randn(2, n)),
        *("w", lambda n: n, True),
    ),
    "tokens of keys": (_attention, lambda n: (torch.randn(2, 3, n), torch.randn(2, 3, 5)), "attention.bias_k", lambda n: 1, True),
    "keys of another width": (
        *(_attention, lambda n: (torch.randn(2, 3, n), torch.randn(2, 3, 5))),
        *("attention.k_proj_weight", lambda n: 5, True),
    ),
    "gains of several dimensions": (
        *(lambda n: nn.LayerNorm([3, n]), lambda n: torch.randn(2, 3, n), "weight", lambda n: 1, True),
    ),
    "normalized": (
        *(lambda n: _weight_norm(nn.Conv1d(n, n, 3)), lambda n: torch.randn(2, n, 5)),
        *("parametrizations.weight.original1", lambda n: 3 * n, True),
    ),
    "lengths": (
        *(lambda n: _weight_norm(nn.Conv1d(n, n, 3)), lambda n: torch.randn(2, n, 5)),
        *("parametrizations.weight.original0", lambda n: 1, True),
    ),
    "spectral norm": (
        *(lambda n: _spectral_norm(nn.Linear(n, n)), lambda n: torch.randn(2, n)),
        *("parametrizations.weight.original", lambda n: n, True),
    ),
    "orthogonal": (
        *(lambda n: _orthogonal(nn.Linear(n, n)), lambda n: torch.randn(2, n)),
        *("parametrizations.weight.original", lambda n: n, True),
    ),
    "a kernel that is made": (
        *(lambda n: _twice(nn.ConvTranspose2d(n, 3, 3)), lambda n: torch.randn(2, n, 5, 5)),
        *("parametrizations.weight.original", lambda n: 9 * n, False),
    ),
    "a table that is made": (
        *(lambda n: _twice(nn.Embedding(7, n)), lambda n: torch.zeros(2, dtype=torch.long)),
        *("parametrizations.weight.original", lambda n: 1, True),
    ),
    "a vector of weights": (
        *(lambda n: _Program(lambda m, x: x @ m.w, w=torch.randn(n)), lambda n: torch.randn(2, n), "w", lambda n: n, None),
    ),
}


@pytest.mark.parametrize("case", _FAN_INS)
def test_multipliers_go_by_how_many_products_are_summed(case: str):
    make, arguments, name, fan_in, grows = _FAN_INS[case]
    m = fan_in(32) / fan_in(8)
    is_hidden = grows or case == "heads put together"
    wanted = (1.0, 1.0) if m == 1 else (1 / m, m**-0.5) if is_hidden else (1 / m, 1 / m)
    example = arguments(8)
    for given in [example] if grows is None else [example, None]:
        scale = mup_scales(make(32), make(8), given)[name]
        assert (scale.width, scale.lr, scale.init_std) == (m, *wanted), given


def test_what_a_transposed_convolution_of_unknown_groups_sums_over_is_refused():
    def made(n: int) -> nn.Module:
        return _Program(lambda m, x: F.conv_transpose1d(x, m.w, groups=2), w=torch.randn(n, 4, 3))

    with pytest.raises(NormMismatchError, match="no role for 'w'"):
        mup_scales(made(32), made(8), torch.randn(1, 8, 5))
    with pytest.raises(NormMismatchError, match="cannot tell what 'w' is"):
        mup_scales(made(32), made(8))
