"""The random networks whose bounds an adversary searches: some of them, and that a bound that is too small is found and shrunk."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import network_functions as more
from tests.fuzz.network_parts import IMAGES, ROWS, SEQUENCES, TOKENS
from tests.fuzz.networks import Network
from tests.fuzz.program import run, shrunk
from tests.fuzz.runner import Job, run_job
from tests.seeds import SHIFT
from thunder_norm.core import local

SLICE = 12


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(SLICE))
def test_a_slice_of_the_networks(index: int):
    result = run_job(Job("networks", SHIFT, index), shrink=False)
    assert result.kind in ("right", "refused", "no oracle"), f"{result.detail}\n{result.source}"


@pytest.mark.parametrize("parts", [(("residual", 368443), ("residual attention", 77708)), (("residual attention", 77708),)])
def test_weights_that_are_nothing_in_floating_point_may_grow(parts):
    """Scores are apart by 1e8 here, and move as far: the softmax of the data is one key's, that of others near it is not."""
    network = Network(parts, (2, 3, 4), "RMSTensor", (-2, -1), "plain", "within", 10000.0, 0.3, torch.float64, 146875)
    assert network.run().kind == "right"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (n, s)
        for of, s in (
            (ROWS | more.ROWS, (2, 3, 4)),
            (TOKENS | more.TOKENS | SEQUENCES | more.SEQUENCES, (2, 3, 4)),
            (IMAGES | more.IMAGES, (2, 4, 3, 3)),
        )
        for n in of
    ],
)
def test_parts_keep_the_shape_of_what_they_are_given(name, shape):
    network = Network(((name, 3),), shape, "RMSTensor", (-1,), "plain", "global", 1.0, 0.0, torch.float32, 0)
    assert network.model()(torch.randn(shape)).shape == shape


def test_a_bound_that_is_too_small_is_found_and_shrunk(monkeypatch):
    parts = (("linear", 1), ("normalization", 1), ("linear", 2))
    network = Network(parts, (1, 4), "RMSTensor", (-1,), "plain", "within", 1.0, 0.3, torch.float64, 0)
    assert run(network).kind == "right"
    monkeypatch.setattr(local, "_distance", lambda x: 0.0)  # as if nothing were away from the data
    found = run(network)
    assert found.kind == "wrong", found
    assert len(shrunk(network, found).parts) < len(parts)
