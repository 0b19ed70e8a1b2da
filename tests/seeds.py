"""What the environment says of the tests: how far to shift every seed, and whether to leave nothing out to save time.

One number shifts every seed: THUNDER_NORM_SEED, an integer, 0 if it is not set.

No test's verdict hangs on it; a run with another value draws other numbers everywhere, and the same ones each time.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import zlib
from collections.abc import Iterable
from typing import Any

LONG = os.environ.get("THUNDER_NORM_LONG") == "1"
# as many cases of a test are run in every run of the whole suite
FEW = 3
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


def crossed(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """All combinations where nothing is left out; else each value of each axis at least once, beside another one of the others each time."""
    several = [list(axis) for axis in axes]
    if LONG:
        return list(itertools.product(*several))
    return list(dict.fromkeys(tuple(axis[i % len(axis)] for axis in several) for i in range(max(map(len, several)))))


def part(cases: Iterable[str]) -> list[str]:
    """Of the names of many cases a sixth and FEW more, drawn by their names and the seed; few cases all, and where nothing is left out."""
    several = list(cases)
    if LONG or len(several) <= FEW:
        return several
    count = FEW + (len(several) - FEW + 5) // 6
    chosen = set(sorted(several, key=lambda name: hashlib.blake2b(f"{SHIFT} {name}".encode()).digest())[:count])
    return [name for name in several if name in chosen]


def shift_operator_database() -> None:
    """Torch's operator database seeds each of its samples with one number: shift that as well."""
    if SHIFT:  # the import takes seconds
        from torch.testing._internal import common_utils

        common_utils.SEED = seeded(1234)
