"""Projections and starts under the modular norm, masses, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import ROOT
from tests.modular.modular_models import (
    FAMILIES,
    D,
    largest_rms,
    mlp,
    operator_norm,
)
from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, RMSToRMSTensor, annotate
from thunder_norm.errors import MissingNormRuleError, NormMapKeyError, NormMismatchError, ThunderNormError
from thunder_norm.modular import ModularNorm

# -- project_ and initialize_ ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_initialized_parameters_have_norm_exactly_1(name):
    model, x = FAMILIES[name].make(), FAMILIES[name].x
    norm = ModularNorm(model, x)
    assert norm.initialize_(torch.Generator().manual_seed(seeded(1))) is norm
    for k, p in model.named_parameters():
        if p.ndim == 4:
            groups = 2 if k == "2.weight" else 1
            taps = p.permute(2, 3, 0, 1).unflatten(2, (groups, -1))
            size = 9 * operator_norm(taps.to(D))
        elif issubclass(norm.norms[k].kind, RMSToRMSTensor):
            size = operator_norm(p.to(D))
        else:
            size = largest_rms(p.to(D), norm.norms[k].elem_dims)
        assert size.item() == pytest.approx(1, abs=1e-6), k
    before = {k: p.clone() for k, p in model.named_parameters()}
    norm.initialize_(torch.Generator().manual_seed(seeded(1)))
    assert all(torch.equal(p, before[k]) for k, p in model.named_parameters())
    norm.initialize_(torch.Generator().manual_seed(seeded(1)), zero_biases=True)
    for k, p in model.named_parameters():
        is_bias = p.ndim == 1 and norm.norms[k].kind is RMSTensor
        assert torch.equal(p, torch.zeros_like(p)) if is_bias else p.count_nonzero() > 0, k


def test_a_projection_changes_only_what_is_too_large():
    model = mlp()
    norm = ModularNorm(model, torch.randn(3, 6)).initialize_()
    with torch.no_grad():
        model[0].weight *= 0.5
        model[2].weight[0] *= 7
        model[4].bias *= 3
    before = {k: p.clone() for k, p in model.named_parameters()}
    norm.project_()
    for k, p in model.named_parameters():
        assert (operator_norm(p) if p.ndim == 2 else largest_rms(p, (-1,))) <= 1 + 1e-5, k
    assert torch.equal(model[0].weight, before["0.weight"])
    torch.testing.assert_close(model[4].bias, before["4.bias"] / 3)
    assert all(p.requires_grad and p.grad_fn is None for p in model.parameters())


# -- masses ----------------------------------------------------------------------------------------------------------------


def test_biases_and_gains_are_light_and_modula_has_none():
    model, x = nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 4), nn.LayerNorm(4)), torch.randn(3, 6)
    light = {"0.weight": 1, "0.bias": 0.1, "1.weight": 1, "1.bias": 0.1, "2.weight": 0.1, "2.bias": 0.1}
    assert ModularNorm(model, x).masses == light
    assert ModularNorm(model, x, mode="modula").masses == {k: math.floor(m) for k, m in light.items()}


def masses_of(masses: Mapping[str, float] | None, model: nn.Module | None = None) -> dict[str, float]:
    return ModularNorm(
        model or nn.Sequential(mlp(), nn.ReLU(), nn.Linear(4, 6), mlp(bias=False)), torch.randn(3, 6), masses=masses
    ).masses


def test_a_scope_shares_its_mass_in_proportion_from_the_inside_out():
    found = masses_of({"": 10.0, "0": 6.0, "0.2.weight": 4.0, "*.bias": 0.0})
    # by hand: 0 has 1 + 4 + 1, scaled to 6; with 2 (1) and 3 (3) that makes 10, scaled to 10
    assert found == pytest.approx({
        **{f"0.{i}.weight": m for i, m in ((0, 1), (2, 4), (4, 1))},
        **{f"0.{i}.bias": 0 for i in (0, 2, 4)},
        "2.weight": 1, "2.bias": 0, **{f"3.{i}.weight": 1 for i in (0, 2, 4)},
    })  # fmt: skip
    assert masses_of({"2": 2.0, "2.weight": 5.0, "2.bias": 0.0})["2.weight"] == 2.0
    assert masses_of({"": 1.0, "3": 2.0})["3.0.weight"] == pytest.approx(2 / 3 / (3.3 + 1.1 + 2))
    assert sum(masses_of({"": 1.0, "3": 2.0}).values()) == pytest.approx(1)


class Block(nn.Module):
    def __init__(self, width: int = 6):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


@pytest.mark.parametrize("depth", [2, 5])
def test_repeated_blocks_have_the_mass_of_one(depth):
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(*(Block() for _ in range(depth))), nn.Linear(6, 4))
    norm = ModularNorm(model, torch.randn(3, 4))
    of_blocks = {name: m for name, m in norm.masses.items() if name.startswith("1.")}
    assert sum(of_blocks.values()) == pytest.approx(2.1)
    assert len(set(of_blocks.values())) == 2  # of a matrix, of a bias
    assert norm.masses["0.weight"] == norm.masses["2.weight"] == 1
    assert ModularNorm(model, torch.randn(3, 4), masses={"1": 4.0}).masses["1.0.up.weight"] == pytest.approx(4 / 2.1 / depth)
    assert ModularNorm(model, torch.randn(3, 4), mode="modula").masses["1.0.up.weight"] == 1


def test_stacks_in_stacks_share_twice_and_other_modules_do_not():
    inner = [nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.Linear(6, 6))]
    norm = ModularNorm(nn.Sequential(*inner, nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(3, 6))
    named = {name: norm.masses[name] for name in ("0.0.up.weight", "1.1.up.weight", "2.0.up.weight", "2.1.weight", "3.weight")}
    assert list(named.values()) == [0.25, 0.25, 1, 1, 1]


def test_annotated_masses_hold_unless_the_call_says_otherwise():
    model = mlp()
    annotate(model[2], mass=4.0)
    assert masses_of(None, model)["2.weight"] == pytest.approx(4 / 1.1)
    assert masses_of({"2": 0.5}, model)["2.bias"] == pytest.approx(0.05 / 1.1)


def test_in_mode_modula_a_bias_can_have_mass():
    found = ModularNorm(mlp(), torch.randn(3, 6), masses={"0.bias": 0.25}, mode="modula").masses
    assert found["0.bias"] == 0.25 and found["2.bias"] == 0


@pytest.mark.parametrize(
    "masses, error, message",
    [
        ({"0.wieght": 1.0}, NormMapKeyError, "did you mean"),
        ({"*.gain": 1.0}, NormMapKeyError, r"'\*.gain'"),
        ({"1": 1.0}, NormMapKeyError, "'1'"),
        ({3: 1.0}, NormMapKeyError, "masses names 3"),
        ({"0": -1.0}, NormMismatchError, "must be a number >= 0, got -1"),
        ({"0": math.nan}, NormMismatchError, "must be a number >= 0"),
        ({"0": math.inf}, NormMismatchError, "must be a number >= 0"),
        ({"0": "heavy"}, NormMismatchError, "got 'heavy'"),
        ([("0", 1.0)], NormMismatchError, "mapping"),
        ({"0": 1.0, "*.weight": 5.0}, NormMismatchError, "neither is part of the other"),
        ({"0": 1.0, "0.weight": 0, "0.bias": 0}, NormMismatchError, "all of its parameters have mass 0"),
    ],
)
def test_masses_that_make_no_sense_are_refused(masses, error, message):
    with pytest.raises(error, match=message):
        ModularNorm(mlp(), torch.randn(3, 6), masses=masses)


# -- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"0.wieght": torch.ones(9, 6)}, NormMapKeyError, "(?s)does not know.*'0.wieght'.*'0.weight'"),
        ({"0.wieght": None}, NormMapKeyError, "does not know"),
        ({"0.weight": torch.ones(6, 9)}, NormMismatchError, r"shape \[9, 6\], got Tensor\[6, 9\]"),
        ({"0.weight": torch.ones(9, 6, dtype=torch.long)}, NormMismatchError, "floating"),
        ({"0.weight": torch.ones(9, 6).to_sparse()}, NormMismatchError, "dense .*sparse_coo"),
        ({"0.weight": 1.0}, NormMismatchError, "got float"),
        ({"0.weight": torch.full((9, 6), math.nan)}, NormMismatchError, "NaN or infinite: '0.weight'"),
        ({"0.bias": torch.full((9,), math.inf)}, NormMismatchError, "NaN or infinite: '0.bias'"),
        ([torch.ones(9, 6)], NormMismatchError, "must be a mapping"),
    ],
)
def test_bad_updates_and_gradients_are_refused_by_name(given, error, message):
    norm = ModularNorm(mlp(), torch.randn(3, 6))
    for f, what in ((norm, "updates"), (norm.dualize, "grads")):
        with pytest.raises(error, match=message) as e:
            f(given)
        assert what in str(e.value) and isinstance(e.value, ThunderNormError)


def test_other_mistakes_are_errors_of_ours():
    norm = ModularNorm(mlp(), torch.randn(3, 6))
    for size in (-1.0, math.nan, math.inf, "1"):
        with pytest.raises(NormMismatchError, match="target_norm"):
            norm.dualize({}, size)
    with torch.no_grad():
        norm.model[0].weight[0, 0] = math.nan
    with pytest.raises(NormMismatchError, match="'0.weight'"):
        norm.project_()
    with pytest.raises(NormMismatchError, match="needs a shape"):
        ModularNorm(mlp(), RMSTensor(1.0))
    with pytest.raises(NormMismatchError, match="torch.nn.Module"):
        ModularNorm(torch.relu, torch.randn(3))
    with pytest.raises(NormMismatchError, match="mode"):
        ModularNorm(mlp(), torch.randn(3, 6), mode="loose")  # type: ignore[arg-type]

    class Solves(nn.Linear):
        def forward(self, x):
            return torch.detach_copy(super().forward(x))

    with pytest.raises(MissingNormRuleError, match="detach_copy"):
        ModularNorm(Solves(6, 3), torch.randn(3, 6))


def test_annotations_decide_kinds():
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    annotate(model[0], weight=LinfTensor)
    norm = ModularNorm(model, torch.randn(3, 6))
    assert norm.norms["0.weight"].kind is LinfTensor and norm.sensitivities["0.weight"] == pytest.approx(6)
    step = norm.dualize({"0.weight": torch.randn(4, 6)})["0.weight"]
    torch.testing.assert_close(step.abs(), torch.full((4, 6), 1 / 6))


def test_gradient_descent_on_norms_finds_the_scale_of_residual_branches():
    """The example's answer by hand: a branch that adds b of what it gets has b / (1 + b) of the output's norm; its share is 1 / (2 L)."""
    path = ROOT / "examples" / "optimise_norms.py"
    spec = importlib.util.spec_from_file_location("optimise_norms", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with torch.device("meta"):
        model, x = example.network(8, 2), torch.empty(1, 64)
    sizes = example.Sizes(model, x)
    assert sizes.loss() > 0.1
    assert example.optimise(sizes, 8)[-1] < 1e-8
    assert sizes.ratios()[0].item() == pytest.approx(1, abs=1e-3)
    for i in range(2):
        added = sum(log for name, log in sizes.logs.items() if name.startswith(f"1.{i}.")).exp()
        assert added.item() == pytest.approx(1 / 3, abs=1e-3)


class Rotary(nn.Module):
    """Rotary embeddings of positions, written out as in Llama: a table of frequencies is its buffer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.register_buffer("frequencies", 1 / 10.0 ** (torch.arange(4) / 4))

    def forward(self, ids):
        x = self.tokens(ids)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.frequencies.to(ids.device)
        cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
        return self.head(x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin)


def test_a_model_without_data_knows_its_table_of_rotations():
    model, ids = Rotary(), torch.zeros(2, 3, dtype=torch.long)
    on_meta = copy.deepcopy(model).to("meta")
    on_meta.register_buffer("frequencies", model.frequencies)
    expected = ModularNorm(model, ids).sensitivities
    assert expected["head.weight"] == pytest.approx(1.0)  # a rotation of each pair
    for m, i in ((on_meta, ids), (on_meta, ids.to("meta")), (model, ids.to("meta"))):
        assert ModularNorm(m, i).sensitivities == pytest.approx(expected)
    assert on_meta.frequencies is model.frequencies and not model.frequencies.is_meta


def test_values_that_nobody_has_are_refused():
    with pytest.raises(NormMismatchError, match="buffers *'frequencies'"):
        ModularNorm(Rotary().to("meta"), torch.zeros(2, 3, dtype=torch.long, device="meta"))
