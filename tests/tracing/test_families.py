"""Every family of models: those that are drawn run in small, and are not wrong; `python -m tests.families` runs all."""

from __future__ import annotations

import random

import pytest
import torch

from tests.families import families, family
from tests.models_zoo.case import TRANSFORMERS, built
from tests.models_zoo.outcomes import outcome
from tests.seeds import named_seed

pytest.importorskip("transformers.models.auto.modeling_auto", reason="needs transformers")
KNOWN = ("llama", "bert", "vit", "clip", "wav2vec2", "whisper", "t5", "jetmoe")
FEW_PARAMETERS = 2_000_000


def drawn() -> list[str]:
    return random.Random(named_seed("families")).sample(sorted(families(TRANSFORMERS)), 3)


@pytest.mark.parametrize("name", KNOWN)
def test_a_model_of_a_configuration_is_small_and_runs(name: str) -> None:
    b = built(family(TRANSFORMERS, name))
    assert sum(p.numel() for p in b.module.parameters()) < FEW_PARAMETERS
    with torch.no_grad():
        assert b() is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn())
def test_families_that_are_drawn_are_right_or_refused(name: str) -> None:
    model = family(TRANSFORMERS, name)
    try:
        built(model)
    except Exception as e:  # noqa: BLE001 - a library that is not there, a configuration that cannot be small
        pytest.skip(f"{name} has no small model: {type(e).__name__}")
    assert not outcome(model, "real").get("error", "").startswith("WrongResult")
