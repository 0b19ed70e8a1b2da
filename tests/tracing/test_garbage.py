"""Python's collector of cycles while a program is compiled: rarer, in the end as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from thunder_norm.tracing.garbage import THRESHOLDS, rarely_collected
from thunder_norm.transforms import NormTransform
import thunder


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    gc.enable()


def test_the_collector_waits_while_a_program_is_compiled_and_only_then():
    met = []

    def f(x):
        met.append(gc.get_threshold())
        return x * 2

    jf = thunder.jit(f, transforms=[NormTransform()])
    jf(torch.ones(3))
    jf(torch.ones(3))
    assert met == [THRESHOLDS, THRESHOLDS]  # what a program appends to has another item after each call: it is compiled for each
    assert gc.get_threshold() == (700, 10, 10)


def test_it_is_as_it_was_after_a_program_that_fails():
    def f(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        thunder.jit(f, transforms=[NormTransform()])(torch.ones(3))
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("given", [(0, 10, 10), (200_000, 60, 2000)])
def test_who_has_it_rarer_or_not_at_all_keeps_that(given):
    gc.set_threshold(*given)
    with rarely_collected():
        assert gc.get_threshold() == given
    assert gc.get_threshold() == given


def test_what_is_set_meanwhile_stays():
    with rarely_collected():
        gc.set_threshold(5000, 7, 7)
        gc.disable()
    assert gc.get_threshold() == (5000, 7, 7)
    assert not gc.isenabled()


def test_of_several_threads_the_last_sets_it_back():
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with rarely_collected():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with rarely_collected():
        pass
    assert gc.get_threshold() == THRESHOLDS
    leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


def test_one_threshold_alone_is_left_where_it_is_rarer():
    gc.set_threshold(700, 10, 5000)
    with rarely_collected():
        assert gc.get_threshold() == (*THRESHOLDS[:2], 5000)
    assert gc.get_threshold() == (700, 10, 5000)


def test_cycles_of_a_long_compilation_are_collected_meanwhile():
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    with rarely_collected():
        gc.collect()
        for _ in range(3 * THRESHOLDS[0]):
            Cycle()
        assert sum(type(x) is Cycle for x in gc.get_objects()) < 2 * THRESHOLDS[0]
