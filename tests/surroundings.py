"""What every test starts from: one thread, fixed seeds (tests/seeds.py shifts them), no gradients or modes left over."""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import traceback
import types
import zlib
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch
from torch._subclasses import fake_tensor

import thunder_norm  # noqa: F401 - Thunder cannot be imported before it
from tests import bare_python
from tests.seeds import SHIFT, named_seed, part, seeded, shift_operator_database
from thunder.transforms import autocast

# The tensors of the tests are small, and pytest-xdist already uses the cores.
torch.set_num_threads(int(os.environ.get("THUNDER_NORM_THREADS") or 1))
# Plain Thunder makes a thread for each exception that a program raises, and waits for it: 5 ms long.
sys.setswitchinterval(1e-4)

shift_operator_database()

# A seed for a device that is not there is kept until it is, with a stack trace: a third of the time of what seeds often.
for _device in (torch.cuda, torch.xpu, torch.mtia):
    if not _device.is_available():
        for _module in (_device, getattr(_device, "random", None)):  # which imports it by its name
            if hasattr(_module, "_lazy_call"):
                _module._lazy_call = lambda *args, **kwargs: None

# Thunder makes a mode for each operation that it infers the shape of, and each mode keeps the stack, which is deep under pytest.
fake_tensor.traceback = types.SimpleNamespace(**{**vars(traceback), "extract_stack": traceback.StackSummary})

# Traces are many objects that refer to each other and live for one test: looking for garbage less often saves minutes of the whole.
gc.freeze()
gc.set_threshold(100_000, 20, 50)
_TESTS_UNTIL_FREEZE = 200
_finished = itertools.count(1)

# Reproducible and untimed: the same examples on every run, and no failure because a machine is busy.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")


def _fix_seeds() -> None:
    torch.manual_seed(seeded(0))
    random.seed(seeded(0))
    np.random.seed(seeded(0))


def _process_state() -> dict[str, object]:
    """What torch keeps for the whole process, and a test changes for the tests after it."""
    return {
        "a process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "swapped parameters": torch.__future__.get_swap_module_params_on_conversion(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast in traces": autocast._autocast_enabled,
    }


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """Tests run in any order: each sees the same random numbers, and leaves the process as it found it."""
    _fix_seeds()
    before = _process_state()
    yield
    after = _process_state()
    assert after == before, "the test leaves behind what the tests after it see"


@pytest.fixture(scope="session")
def _bare_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with bare_python.served(tmp_path_factory.mktemp("bare")) as program:
        yield program


@pytest.fixture
def without_imports(_bare_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``sys.executable`` is a Python that has imported torch and Thunder, and nothing of ours (tests/bare_python.py)."""
    monkeypatch.setattr(sys, "executable", _bare_python)


@pytest.fixture(scope="module")
def net() -> torch.nn.Module:
    """The model of the tests of norm maps, shared by those that only read it."""
    from tests.norms.norm_map_models import Net

    torch.manual_seed(seeded(1))
    return Net()


@pytest.fixture(scope="module")
def norm_map(net: torch.nn.Module) -> object:
    """Its norm map, with a dynamic batch."""
    from thunder_norm import build_norm_map

    return build_norm_map(net, torch.empty(4, 6), dynamic_shapes={"x": {0: "batch"}})


def pytest_collectstart(collector: pytest.Collector) -> None:
    """So does each module while it is imported."""
    if isinstance(collector, pytest.Module):
        _fix_seeds()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def frozen_heap() -> None:
    """For programs that look for garbage themselves: at what they made, not at all that tests before them left."""
    _freeze()


def pytest_runtest_logfinish() -> None:
    """A full collection looks at what a few tests left, not at all that modules and caches keep for the process: seconds after a while."""
    if next(_finished) % _TESTS_UNTIL_FREEZE == 0:
        _freeze()


def pytest_collection_finish() -> None:
    """So for what was imported; torch's operator database looks for no unittest whose name is a seed: longer than the samples take."""
    _freeze()
    if "torch.testing._internal.common_utils" in sys.modules:
        from thunder_norm.audit.op_db import leave_unittest

        leave_unittest()


def _keep(config: pytest.Config, items: list[pytest.Item], chosen: list[bool]) -> None:
    config.hook.pytest_deselected(items=[item for item, kept in zip(items, chosen, strict=True) if not kept])
    items[:] = itertools.compress(items, chosen)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is no CUDA device; the seed that hypothesis has for a test is shifted.

    ``THUNDER_NORM_PART=1/3`` leaves every third test, chosen by name, the second third of them (tests/versions).  A run that names
    neither that nor files nor keywords has, of the cases of a test that has many, a part (tests/seeds.py).
    """
    if numbers := os.environ.get("THUNDER_NORM_PART"):
        number, parts = map(int, numbers.split("/"))
        _keep(config, items, [zlib.crc32(item.nodeid.encode()) % parts == number for item in items])
    elif config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword:
        cases: dict[str, list[str]] = {}
        for item in items:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)
        drawn = {name for names in cases.values() for name in part(names)}
        _keep(config, items, [item.nodeid in drawn or item.get_closest_marker("drawn") is not None for item in items])
    for item in items if SHIFT else ():
        if isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.function):
            hypothesis.seed(named_seed(item.nodeid.partition("[")[0]))(item.function)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
