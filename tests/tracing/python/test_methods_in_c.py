"""Methods in C of objects whose class, or a class it derives from, a module in C makes when it is imported."""

from __future__ import annotations

import array
import io
import logging
import queue
import random

import pytest
import torch

from thunder_norm.tracing import native
from thunder_norm.transforms import NormTransform
import thunder


class _Numbers(array.array):
    def append(self, value):
        super().append(value * 2)


class _Queue(queue.SimpleQueue):
    pass


class _Random(random.Random):
    def seed(self, a=None, version=2):
        super().seed(7)


def streams(x):
    text, data = io.StringIO(), io.BytesIO()
    text.write("abc")
    text.seek(1)
    data.write(b"q")
    return x * 2, text.read(), data.getvalue(), text.closed, text.readable()


def classes_derived_from_them(x):
    numbers, waiting, drawn = _Numbers("i", [1]), _Queue(), _Random(3)
    numbers.append(3)
    numbers.extend([4])
    waiting.put(x * 3)
    return waiting.get(), list(numbers), drawn.random()


_written = io.StringIO()
_logger = logging.Logger("a program's")
_logger.addHandler(logging.StreamHandler(_written))


def messages(x):
    _logger.warning("of shape %s", tuple(x.shape))
    return x * 2, _written.getvalue().splitlines()[-1]


@pytest.mark.parametrize("f", [streams, classes_derived_from_them, messages], ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_native", [True, False])
def test_methods_are_called_as_in_eager_mode(f, is_native):
    x = torch.tensor([1.0, 2.0])
    jitted = thunder.jit(f, transforms=[NormTransform()])
    with native.interpreter() if is_native else native.switched_off():
        (found, *others), (expected, *others_expected) = jitted(x), f(x)
    assert torch.equal(found, expected) and others == others_expected
