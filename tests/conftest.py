"""The processes that run tests have what every test starts from (tests/surroundings.py); one that hands them out imports nothing for it."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    hands_out = config.getoption("dist", "no") != "no" and not config.option.collectonly  # as pytest-xdist asks it
    if not hands_out:
        config.pluginmanager.import_plugin("tests.surroundings")
