"""Torch's operator database without the search that it does for a test case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def leave_unittest() -> dict[Any, Callable]:
    """From now on torch's operator database does not look for a `unittest.TestCase` whose name is a seed.

    It looks through all modules for the source of each frame on the stack, which takes far longer than the samples.  Returns what
    each of torch's modules looked with.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    before = {module: module.extract_test_fn for module in (common_utils, core)}
    for module in before:
        module.extract_test_fn = lambda: None
    return before


@contextlib.contextmanager
def outside_of_unittest() -> Iterator[None]:
    """`leave_unittest`, inside the block."""
    before = leave_unittest()
    try:
        yield
    finally:
        for module, looks in before.items():
            module.extract_test_fn = looks
