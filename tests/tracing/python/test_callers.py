"""Who called whom, which a program asks Python for: functions and lines are its own, as in eager mode."""

import collections
import inspect
import logging
import sys
import traceback
import types
import typing
import warnings

import pytest
import torch

from thunder_norm.errors import AcquiredAnewWarning
from thunder_norm.transforms import SubclassTransform, grad
import thunder

FACTOR = 2.0


def seen(frame):
    return frame.f_code.co_name, frame.f_lineno, frame.f_globals["__name__"], sorted(frame.f_locals)


def own_frame(x):
    frame = sys._getframe()
    return x + 1, seen(frame), isinstance(frame, types.FrameType)


def frame_of_caller(x):
    def helper(depth):
        return seen(sys._getframe(depth))

    return x + 1, helper(0), helper(1), [helper(depth) for depth in (0, 1)]


def current_frame(x):
    return x + 1, inspect.currentframe().f_code.co_name, inspect.getframeinfo(inspect.currentframe()).lineno


def in_generator(x):
    def drawn():
        yield sys._getframe().f_code.co_name
        yield sys._getframe(1).f_code.co_name

    return x + 1, list(drawn())


def variables(x):
    factor = 3.0  # noqa: F841 - read by its name
    held = sys._getframe().f_locals
    return held["x"] * held["factor"] * sys._getframe().f_globals["FACTOR"]


def under_grad(x):
    return grad(lambda y: (y * len(sys._getframe().f_code.co_name)).sum())(x)


def warned(x):
    def helper():
        warnings.warn("of the helper", stacklevel=1)
        warnings.warn("of its caller", DeprecationWarning, stacklevel=2)
        warnings.warn(FutureWarning("of nobody"), stacklevel=500)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        helper()
    return x + len(found), [(w.filename, w.lineno, w.category, str(w.message)) for w in found]


def made_classes(x):
    made = collections.namedtuple("made", "a b")
    return x + 1, made.__module__, typing.NamedTuple("Typed", [("a", int)]).__module__


def traced_back(x):
    def divides():
        return 1 / 0

    try:
        divides()
    except ZeroDivisionError as error:
        entries = [(s.name, s.lineno) for s in traceback.extract_tb(error.__traceback__)]
        return x + 1, entries, traceback.format_exc().splitlines()[-1], sys.exc_info()[2].tb_next.tb_frame.f_code.co_name


def too_deep(x):
    try:
        sys._getframe(100_000)
    except ValueError as error:
        return x + 1, str(error)


INSIDE = (own_frame, frame_of_caller, current_frame, in_generator, variables, under_grad, warned, made_classes, traced_back)


@pytest.mark.filterwarnings("error::thunder_norm.errors.AcquiredAnewWarning")
@pytest.mark.parametrize("f", INSIDE, ids=lambda f: f.__name__)
def test_frames_are_those_of_the_program(f):
    x = torch.arange(3.0)
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for _ in range(2):
        expected, *of_frames = [f(x)] if f in (variables, under_grad) else f(x)
        found, *known = [jitted(x)] if f in (variables, under_grad) else jitted(x)
        torch.testing.assert_close(found, expected)
        assert known == of_frames
    assert thunder.cache_misses(jitted) == 1


def test_a_global_read_by_a_frame_is_guarded(monkeypatch):
    jitted = thunder.jit(variables, transforms=[SubclassTransform()])
    jitted(torch.ones(2))
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5.0)
    assert jitted(torch.ones(2)).tolist() == [15.0, 15.0]


class Asking(torch.nn.Module):
    def forward(self, x):
        frame, names = sys._getframe(), []
        while frame is not None:
            names.append((frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back
        return x + 1, names


def whole_stack(x):
    return x + 1, [(i.function, i.lineno, i.code_context) for i in inspect.stack()]


def extracted_stack(x):
    return x + 1, [(s.name, s.lineno, s.line) for s in traceback.extract_stack()]


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.AcquiredAnewWarning")
@pytest.mark.parametrize(
    "program", [Asking(), whole_stack, extracted_stack, too_deep], ids=lambda f: getattr(f, "__name__", type(f).__name__)
)
def test_what_called_the_program_is_asked_in_each_call(program):
    jitted = thunder.jit(program, transforms=[SubclassTransform()])

    def called(function):
        return function(torch.ones(2))

    def called_elsewhere(function):
        return [function(torch.ones(2))][0]

    for caller in (called, called_elsewhere):
        (_, found), (_, expected) = [caller(function) for function in (jitted, program)]
        assert found == expected


def test_that_a_caller_is_asked_for_is_said():
    with pytest.warns(AcquiredAnewWarning, match="looks at what called it"):
        thunder.jit(lambda x: x * len(sys._getframe(1).f_code.co_name), transforms=[SubclassTransform()])(torch.ones(2))


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append((record.funcName, record.lineno, record.pathname))


def test_a_log_names_the_function_and_line():
    logger, records = logging.Logger("of the program"), Records()
    logger.addHandler(records)

    def helper(x):
        logger.warning("here")
        return x + 1

    thunder.jit(lambda x: helper(x), transforms=[SubclassTransform()])(torch.ones(2))
    helper(torch.ones(2))
    assert len(records.found) == 2 and len(set(records.found)) == 1


def test_what_is_no_warning_is_refused_as_by_python():
    def f(x):
        warnings.warn("text", 3, stacklevel=1)
        return x

    with pytest.raises(TypeError, match="category must be a Warning subclass"):
        thunder.jit(f, transforms=[SubclassTransform()])(torch.ones(2))
