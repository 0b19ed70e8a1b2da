"""Frames of Python's get room in one piece: no call needs memory of the system's, whatever its depth."""

from __future__ import annotations

import resource
import sys
import traceback

import pytest

from thunder_norm.tracing.deep_calls import with_room

CALLS = 200


def _called() -> None:
    pass


def _faults_at(depth: int) -> int:
    """Pages that the system had to give while `CALLS` calls were made, that many frames deeper than here."""
    if depth > 0:
        return _faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        _called()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _most(depths: range) -> int:
    return max(map(_faults_at, depths))


def test_no_depth_has_calls_that_ask_the_system_for_memory():
    depths = range(400)  # several chunks of 16 KiB: at the end of each is a depth whose calls all need a new one
    if sys.version_info < (3, 12):  # later ones keep a chunk that is left
        assert _most(depths) >= CALLS
    assert with_room(_most, depths) < CALLS // 2


def test_a_call_is_as_without():
    def given(*args, **kwargs):
        return args, kwargs

    assert with_room(given, 1, function=2) == ((1,), {"function": 2})
    assert with_room(with_room, given, 3) == ((3,), {})


def test_errors_pass_and_can_be_looked_into():
    def fails():
        raise ValueError("no")

    for _ in range(20):  # each traceback keeps the frame
        with pytest.raises(ValueError, match="no") as found:
            with_room(fails)
        assert [f.name for f in traceback.extract_tb(found.tb)][-2:] == ["with_room", "fails"]
