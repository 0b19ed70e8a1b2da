"""Models that others wrote: a random tenth of docs/models.md is as it says, and how its rows are made."""

from __future__ import annotations

import importlib.util
import math
import os
import random
import time

import pytest
import torch
from torch import nn

from tests.models_zoo import MODELS, Model, page
from tests.models_zoo.case import WRITTEN
from tests.models_zoo.outcomes import outcome
from tests.seeds import LONG, named_seed

# Columns that need no trace, and that are traced; of each one is looked at for a model that is drawn, in long runs all of the first.
QUICK, TRACED = ("bound", "typical", "modula", "steps"), ("norm_map", "normed", "real", "report")


def drawn() -> list[tuple[str, tuple[str, ...]]]:
    """A tenth of the models, and columns of each: a traced one of any sort in long runs, else what takes longest of what takes least."""
    generator, rows = random.Random(named_seed("models_zoo")), page.load()
    names = sorted(generator.sample(sorted(MODELS), len(MODELS) // 10))
    if LONG:
        return [(name, (*QUICK, generator.choice(TRACED))) for name in names]
    lightest = sorted(names, key=lambda name: rows.get(name, {}).get("real", {}).get("took", math.inf))
    return [(name, (QUICK[i % len(QUICK)], TRACED[i * len(TRACED) // len(names)])) for i, name in enumerate(lightest)]


def is_current() -> bool:
    """Whether the file's rows were made with the versions that are installed."""
    return all(importlib.util.find_spec(p) for p in ("torchvision", "timm")) and page.versions() == page.installed()


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.skipif(not is_current(), reason="docs/models.json has the outcomes of other versions")
@pytest.mark.parametrize(("name", "columns"), drawn())
def test_a_row_says_what_happens(name: str, columns: tuple[str, ...]):
    row = page.load()[name]
    for column in columns:
        if column not in row:  # left out to save time
            continue
        found = outcome(MODELS[name], column).get("error", "")
        assert found.partition(":")[0] == row[column].get("error", "").partition(":")[0], (column, found)


def test_the_page_is_that_of_the_file():
    rows = page.load()
    assert list(rows) == list(MODELS)
    assert page.render(rows) in page.PAGE.read_text()


def test_the_page_lists_small_steps():
    def row(smallest: float, modular: float, adamw: float) -> page.Row:
        return {"typical": {"unreached": 0, "smallest": smallest}, "training": {"modular": modular, "adamw": adamw}}

    rows = {
        "tiny": row(2e-7, 0.5, 0.5),
        "slow": row(2e-6, 0.8, 0.5),
        "half": row(1e-6, 0.75, 0.5),
        "grows": row(1.0, math.inf, 0.9),
    }
    rows["no"] = {"typical": {"error": "E: why"}, "training": {"error": "E: why"}}
    assert page.tiny_targets(rows) == ["tiny (2e-07)"]
    assert page.trained_less(rows) == ["slow (0.8, 0.5)", "grows (inf, 0.9)"]
    assert page.small_steps({"half": rows["half"]})[1].endswith("as AdamW's: none.")


class Passing(nn.Module):
    """Runs `then` from its second call on: a row's first is the one in eager mode."""

    calls = 0

    def __init__(self, then):
        super().__init__()
        self.then = then

    def forward(self, x):
        Passing.calls += 1
        if Passing.calls > 1:
            self.then()
        return x


@pytest.mark.parametrize(
    ("then", "why"),
    [(lambda: os._exit(3), "the process ended with 3"), (lambda: time.sleep(600), "out of time")],
    ids=["ends", "takes long"],
)
def test_a_model_that_stops_its_process_is_a_row_all_the_same(then, why):
    from tests.models_zoo import runner

    row = runner.made(Model("x", WRITTEN, lambda: (Passing(then), (torch.ones(2),), {})), ["bound", "typical"], seconds=5)
    assert row["bound"]["error"] == f"Ended: {why}" and row["typical"]["error"] == f"NotReached: {why}"
    assert row["model"] == {"source": WRITTEN, "parameters": 0}


def test_what_eager_cannot_run_is_no_row():
    from tests.models_zoo import runner

    def build():
        raise ValueError("no such model")

    with pytest.raises(runner.NotRunError, match="x does not run in eager PyTorch: ValueError: no such model"):
        runner.made(Model("x", WRITTEN, build), ["bound"])
