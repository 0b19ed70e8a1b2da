"""What the environment says of the tests: how far to shift every seed, and whether to leave nothing out to save time.

One number shifts every seed: THUNDER_NORM_SEED, an integer, 0 if it is not set.

No test's verdict hangs on it; a run with another value draws other numbers everywhere, and the same ones each time.
"""

from __future__ import annotations

import os
import zlib

LONG = os.environ.get("THUNDER_NORM_LONG") == "1"
SHIFT = int(os.environ.get("THUNDER_NORM_SEED") or 0)
# numpy takes seeds of 32 bits
_RANGE = 2**32
# far larger than the seeds that tests use: the streams of two shifts have none in common
_STRIDE = 1_000_003


def seeded(seed: int = 0) -> int:
    """The seed to use where the test says `seed`: for torch, numpy, Python's random and the searches."""
    return (seed + _STRIDE * SHIFT) % _RANGE


def named_seed(name: str) -> int:
    """A seed of a test's own, by its name."""
    return seeded(zlib.crc32(name.encode()))


def shift_operator_database() -> None:
    """Torch's operator database seeds each of its samples with one number: shift that as well."""
    if SHIFT:  # the import takes seconds
        from torch.testing._internal import common_utils

        common_utils.SEED = seeded(1234)
