"""The example: what its numbers mean, that its peers are torch's, a quick run of all of it, and its page in the docs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import ROOT
from tests.forks import FORKS
from tests.seeds import seeded


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("learning_rate_transfer")


@pytest.fixture
def views(example):
    return importlib.import_module("transfer_views")


def as_a_script(printed: Path, *args: str) -> None:
    """In a process of its own."""
    script = ROOT / "examples" / "learning_rate_transfer.py"
    sys.argv = [str(script), *args]
    with printed.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(script), run_name="__main__")


def test_the_best_rate_is_the_bottom_of_a_parabola(views):
    lrs = [2.0**k for k in range(-4, 3)]
    curve = views.Curve(lrs, [math.exp(0.3 * (math.log2(lr) + 1.3) ** 2 - 2) for lr in lrs])
    assert curve.best == pytest.approx(-1.3) and curve.is_inside
    assert curve.at(-1.3) == pytest.approx(math.exp(-2)) and curve.at(0.4) == pytest.approx(math.exp(0.3 * 1.7**2 - 2))
    falling = views.Curve(lrs, [1 / lr for lr in lrs])
    assert falling.best == 2 and not falling.is_inside
    diverged = views.Curve([1.0, 2.0, 4.0], [2.0, 1.0, math.inf])
    assert diverged.best == 1 and diverged.at(0.8) == pytest.approx(2**0.2) and diverged.at(1.9) == math.inf


def test_spreads_and_what_moving_a_rate_costs(views):
    lrs = [2.0**k for k in range(-6, 7)]

    def sweep(width, *bottoms):  # one a seed
        losses = [[math.exp((math.log2(lr) - b) ** 2) for b in bottoms] for lr in lrs]
        return views.Sweep("mlp", "", "AdamW", width, 2, 1, lrs, losses)

    line = views.Line([sweep(16, 2.0, 2.0), sweep(32, 0.5, 1.5), sweep(64, -1.0, -1.0)])
    assert line.best == pytest.approx([2, 1, -1]) and line.spread == pytest.approx(3)
    assert line.moved == pytest.approx(math.exp(9)) and line.lowest[0] == pytest.approx(1)
    assert line.noise == pytest.approx(math.sqrt(2 * 0.5**2 / 3))


def test_muon_in_float32_is_torchs_up_to_the_rounding_of_bfloat16(example):
    torch.manual_seed(seeded(0))
    model = nn.ModuleDict({"blocks": nn.Linear(12, 24), "head": nn.Conv2d(24, 3, 3)})
    alone = nn.Parameter(model["blocks"].weight.detach().clone())
    before = alone.detach().clone()
    ours, torchs = example.Muon(model, 0.1), torch.optim.Muon([alone], lr=0.1, momentum=0.9, weight_decay=0)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    alone.grad = model["blocks"].weight.grad.clone()
    ours.step()
    torchs.step()
    step, wanted = model["blocks"].weight - before, alone - before
    assert 1e-5 * wanted.norm() < (step - wanted).norm() < 0.02 * wanted.norm()  # torch's is rounded to bfloat16
    assert [len(g["params"]) for g in ours.param_groups] == [1, 3]


def test_models_begin_at_norm_1_and_the_same_for_all_optimizers(example):
    norm = example._norm("text", "", 16, 2)
    example.initialize(norm, "norm 1", 5)
    first = {name: p.detach().clone() for name, p in norm.model.named_parameters()}
    sizes = {name: norm.balls[name].norm(p).item() for name, p in first.items()}
    assert all(size == pytest.approx(0 if name.endswith("bias") else 1, abs=1e-4) for name, size in sizes.items())
    example.initialize(norm, "norm 1", 6)
    example.initialize(norm, "norm 1", 5)
    assert all(torch.equal(p, first[name]) for name, p in norm.model.named_parameters())
    block = 6 + 0.1 * (2 + 2 * 2)  # six matrices; two biases, gains and biases of two layer norms
    assert norm.mass == pytest.approx(
        block + 4 + 2 + 0.1 * 3
    )  # characters; positions, the head; its bias and the last layer norm


@pytest.mark.parametrize("task", ["gpt2", "llama"])
def test_models_of_transformers_learn_with_every_optimizer(example, task):
    rates = {example.ADAPTED: 1.0, "AdamW": 2**-6, example.MUP: 2**-5, "Muon": 2**-3}
    assert set(rates) == set(example.GRIDS[task])
    for optimizer, lr in rates.items():
        assert example.train(example.Run(task, "", optimizer, 16, 2, lr, 0, 15)) < 0.85 * example.TASKS[task].chance, optimizer


@pytest.mark.parametrize("task", ["gpt2", "llama"])
def test_mups_multipliers_are_those_of_its_table(example, task):
    narrow, wide = (example._mup(task, width, 2) for width in (16, 64))
    assert set(narrow.values()) == {1.0}
    model = example.TASKS[task].model(64, 2, example.Form())
    for name, p in model.named_parameters():
        grows_inside = p.ndim > 1 and not any(
            part in name for part in ("wte", "wpe", "embed_tokens")
        )  # summed over: all but tables
        assert wide[name] == pytest.approx(1 / 4 if grows_inside else 1.0), name


def test_muon_gets_conv1ds_matrices_with_outputs_first(example):
    """Its step depends on which dimension is which."""
    torch.manual_seed(seeded(0))
    task = example.TASKS["gpt2"]
    model = task.model(16, 2, example.Form())
    up = model.model.transformer.h[0].mlp.c_fc.weight  # 16 inputs, 64 outputs
    separate = nn.Parameter(up.detach().T.clone())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    separate.grad = up.grad.T.clone()
    muon, alone = example.Muon(model, 0.1, task.blocks), torch.optim.Muon([separate], lr=0.1, momentum=0.9, weight_decay=0)
    muon.step()
    with example._InFloat32():
        alone.step()
    torch.testing.assert_close(up, separate.T, rtol=0, atol=1e-5)
    assert len(muon.flat) == 2 * 4


def test_a_sweep_that_was_cut_off_goes_on_where_it_was(example, views, tmp_path, monkeypatch, capsys):
    ran = []

    def measured(sweeps, seeds, processes):
        for s in sweeps:
            if len(ran) == 3:
                raise KeyboardInterrupt
            ran.append((s.optimizer, s.width))
            yield dataclasses.replace(s, losses=[[1.0 + abs(math.log2(lr) + 4)] * seeds for lr in s.lrs])

    monkeypatch.setattr(example, "measured", measured)
    options = ["--quick", "--tasks", "mlp", "--optimizers", "AdamW", "Muon", "--results", str(tmp_path / "r.json")]
    monkeypatch.setattr(sys, "argv", ["learning_rate_transfer.py", *options])
    with pytest.raises(KeyboardInterrupt):
        example.main()
    assert len(views.load(tmp_path / "r.json")) == len(ran) == 3
    first = list(ran)
    ran.clear()
    monkeypatch.setattr(sys, "argv", ["learning_rate_transfer.py", *options, "--resume"])
    example.main()
    planned = {(o, width) for o in ("AdamW", "Muon") for width in (16, 32)}
    assert len(ran) == 1 and {*first, *ran} == planned
    assert {(s.optimizer, s.width) for s in views.load(tmp_path / "r.json")} == planned
    assert "| digits, residual MLP | Muon |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_quick_run_learns_with_every_optimizer_and_is_drawn_again(example, views, tmp_path, monkeypatch, capsys):
    """Processes are forks of one that has the imports: the one that the first run trains in, and the second run, as a script.

    Of three tasks at both widths, of the others at the narrower one.
    """
    planned = example.planned

    def fewer(*args):
        sweeps = planned(*args)
        narrow = {task: min(s.width for s in sweeps if s.task == task) for task in example.DEFAULT}
        return [s for s in sweeps if s.task in ("small", "conv", "text") or s.width == narrow[s.task]]

    monkeypatch.setattr(example, "planned", fewer)
    monkeypatch.setattr(example.multiprocessing, "get_context", lambda method: FORKS)
    options = ("--quick", "--processes", 1, "--results", tmp_path / "r.json", "--plot", tmp_path / "p.png")
    monkeypatch.setattr(sys, "argv", ["learning_rate_transfer.py", *map(str, options)])
    example.main()
    printed = capsys.readouterr().out
    sweeps = views.load(tmp_path / "r.json")
    assert {(s.task, s.optimizer) for s in sweeps} == {(t, o) for t in example.DEFAULT for o in example.GRIDS[t]}
    for s in sweeps:
        lowest = min(v for row in s.losses for v in row)
        assert lowest < 0.8 * example.TASKS[s.task].chance, (s.task, s.optimizer, s.width, s.losses)
    assert (tmp_path / "p.png").stat().st_size > 10_000
    drawn = FORKS.Process(target=as_a_script, args=(tmp_path / "printed", "--draw", str(tmp_path / "r.json")))
    drawn.start()
    drawn.join()
    assert drawn.exitcode == 0 and (tmp_path / "printed").read_text() == printed


def test_the_docs_have_the_tables_of_the_results(example, views):
    path = ROOT / "docs" / "learning_rate_transfer.json"
    sweeps, page = views.load(path), path.with_suffix(".md").read_text(encoding="utf-8")
    depths = views.load(path.with_name("learning_rate_depths.json"))
    for part in ([s for s in sweeps if not s.variant], [s for s in sweeps if s.variant], depths):
        for table in views.tables(part).split("\n\n"):
            assert table and table in page
    assert all(len(row) == example.SEEDS for s in sweeps for row in s.losses)
