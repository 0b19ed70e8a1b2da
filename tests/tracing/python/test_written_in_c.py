"""Attributes of what Python has in C, modules, exceptions and namespaces: set, put back and deleted as in eager mode."""

from __future__ import annotations

import contextlib
import io
import sys
import types

import pytest
import torch

from thunder_norm.transforms import NormTransform
import thunder

_module = types.ModuleType("of_a_program")
_module.held = 1  # type: ignore[attr-defined]


def a_module_is_put_back(x):
    held, _module.held = _module.held, 5
    meanwhile, _module.held = _module.held, held
    return x * 2, meanwhile, _module.held


def a_module_is_left_without(x):
    _module.made = 3
    made = _module.made
    del _module.made
    return x * made, hasattr(_module, "made")


def a_stream_is_redirected(x):
    written, before = io.StringIO(), sys.stdout
    with contextlib.redirect_stdout(written):
        print("a line")
    return x * 2, written.getvalue(), sys.stdout is before


def exceptions(x):
    e = ValueError("a")
    e.code, e.args, e.__cause__, e.__suppress_context__ = x * 2, (1, 2), KeyError("k"), False  # type: ignore[attr-defined]
    code = e.code  # type: ignore[attr-defined]
    del e.code  # type: ignore[attr-defined]
    return code, e.args, repr(e.__cause__), e.__suppress_context__, hasattr(e, "code")


def namespaces(x):
    made = types.SimpleNamespace(a=1, t=x)
    made.b = made.t * 2
    made.a += 1
    del made.t
    return made.b * made.a, sorted(vars(made))


def methods(x):
    method = torch.nn.Linear(1, 1).forward
    try:
        method.held = 3  # type: ignore[attr-defined]
    except AttributeError as e:
        return x * 2, str(e)


PROGRAMS = (a_module_is_put_back, a_module_is_left_without, a_stream_is_redirected, exceptions, namespaces, methods)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_they_are_left_as_in_eager_mode(f, monkeypatch):
    stream, x = io.StringIO(), torch.tensor([1.0, 2.0])
    monkeypatch.setattr(sys, "stdout", stream)
    jitted = thunder.jit(f, transforms=[NormTransform()])
    for given in (x, x + 1):
        (found, *others), (expected, *others_expected) = jitted(given), f(given)
        assert torch.equal(found, expected) and others == others_expected
        assert sys.stdout is stream and vars(_module)["held"] == 1 and "made" not in vars(_module)
    assert stream.getvalue() == ""
