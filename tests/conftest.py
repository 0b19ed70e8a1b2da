"""What every test starts from: one thread, fixed seeds, no gradients or modes left over."""

from __future__ import annotations

import gc
import random

import hypothesis
import numpy as np
import pytest
import torch

# The tensors of the tests are small, and pytest-xdist already uses the cores.
torch.set_num_threads(1)

# Traces are many objects that refer to each other and live for one test: looking for garbage less often saves minutes of the whole.
gc.freeze()
gc.set_threshold(100_000, 20, 50)

# Reproducible and untimed: the same examples on every run, and no failure because a machine is busy.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Each test sees the same random numbers, alone or in any order."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is no CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
