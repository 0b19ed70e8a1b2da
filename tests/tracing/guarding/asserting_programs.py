"""Programs that assert something of values: pytest writes the assertions of a module of tests anew."""

from __future__ import annotations

import contextlib

import torch


def asserted(x):
    assert (x > -10).all()
    return x * 2


def asserted_with_message(x):
    assert (x > -10).all(), "too small"
    return x * 2


def asserted_not(x):
    assert not (x <= -10).any(), "too small"
    return x * 2


def asserted_both(x):
    assert x.ndim == 2 and (x > -10).all() and (x < 1e6).all(), "too small"
    return x * 2


def asserted_by_an_integer(x):
    assert (x > -10).sum() // x.numel(), "too small"
    return x * 2


def asserted_of_a_number(x):
    assert x.min().item() > -10, "too small"
    return x * 2


def raised(x):
    if (x <= -10).any():
        raise ValueError("too small")
    return x * 2


def raised_without_message(x):
    if not (x > -10).all():
        raise ValueError
    return x * 2


def raised_between(x):
    y = x * 2
    if x.ndim == 1:
        y = y + 1
    elif (x <= -10).any():
        raise RuntimeError("too small")
    else:
        y = y + 2
    return y


def by_torch(x):
    torch._assert((x > -10).all(), "too small")
    return x * 2


def by_torch_later(x):
    torch._assert_async((x > -10).all(), "too small")
    return x * 2


def finally_undone(x):
    try:
        with torch.no_grad():
            assert (x > -10).all(), "too small"
    finally:
        x = x * 2
    return x


def asserted_with_computed_message(x):
    assert (x > 0).all(), f"least entry {x.min()}"
    return x * 2


def caught(x):
    try:
        assert (x > 0).all()
    except AssertionError:
        return -x
    return x * 2


def caught_outside(x):
    with contextlib.suppress(RuntimeError):
        pass
    try:
        return raised(x)
    except ValueError:
        return -x


def one_of_two(x):
    assert (x > 0).all() or (x < 0).all()
    return x * 2


def several(x):
    assert x > 0
    return x * 2
