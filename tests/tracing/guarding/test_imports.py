"""Modules that a program imports where it runs: what it reads of them is looked at in each call, and what it changes stays changed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from thunder_norm.errors import AcquiredAnewWarning
from thunder_norm.transforms import SubclassTransform
import thunder

NAME = "settings_of_a_program"


def times(v, by=3):
    return v * by


class Scale:
    rate = 3

    def of(self, v):
        return v * self.rate


def _settings():
    found, inner = ModuleType(NAME), ModuleType(f"{NAME}.inner")
    vars(found).update(rate=2, table={"a": 2}, rates=[1, 2], config=SimpleNamespace(v=5), times=times, Scale=Scale, on=True)
    found.__path__, found.inner, inner.rate = [], inner, 4
    return found, inner


def attribute(x):
    import settings_of_a_program as s

    return x * s.rate


def name(x):
    from settings_of_a_program import rate

    return x * rate


def item(x):
    from settings_of_a_program import table

    return x * table["a"] * len(table)


def elements(x):
    from settings_of_a_program import rates

    return x * sum(rates)


def inside(x):
    from settings_of_a_program import config

    return x * config.v


def function(x):
    from settings_of_a_program import times

    return times(x)


def method(x):
    from settings_of_a_program import Scale

    return Scale().of(x)


def condition(x):
    from settings_of_a_program import on

    return x.sin() if on else x.cos()


def whether(x):
    import settings_of_a_program as s

    return x * getattr(s, "bias", 1)


def submodule(x):
    import settings_of_a_program.inner

    return x * settings_of_a_program.inner.rate


def another(s):
    sys.modules[NAME] = SimpleNamespace(rate=50)


READ = {
    attribute: lambda s: setattr(s, "rate", 9),
    name: another,
    item: lambda s: s.table.update(b=3),
    elements: lambda s: s.rates.append(4),
    inside: lambda s: setattr(s.config, "v", 9),
    function: lambda s: setattr(s, "times", lambda v: v * 30),
    method: lambda s: setattr(s, "Scale", type("Scale", (Scale,), {"rate": 8})),
    condition: lambda s: setattr(s, "on", False),
    whether: lambda s: setattr(s, "bias", 9),
    submodule: lambda s: setattr(s.inner, "rate", 9),
}


def _calls(f, monkeypatch, change=lambda s: None):
    settings, inner = _settings()
    monkeypatch.setitem(sys.modules, NAME, settings)
    monkeypatch.setitem(sys.modules, f"{NAME}.inner", inner)
    x, found = torch.ones(2), []
    for n in range(4):
        if n == 2:
            change(settings)
        found.append(f(x))
    return found


@pytest.mark.parametrize("program", READ)
def test_what_is_read_is_as_it_is_in_each_call(program, monkeypatch):
    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    torch.testing.assert_close(_calls(jitted, monkeypatch, READ[program]), _calls(program, monkeypatch, READ[program]))
    assert thunder.cache_misses(jitted) == 2


def counted(x):
    import settings_of_a_program as s

    s.rate += 1
    return x * s.rate


def appended(x):
    from settings_of_a_program import rates

    rates.append(1)
    return x * len(rates)


def kept(x):
    from settings_of_a_program import config

    config.v = config.v * 2
    return x * config.v


@pytest.mark.parametrize("program", [counted, appended, kept])
def test_what_is_changed_stays_changed(program, monkeypatch):
    with pytest.warns(AcquiredAnewWarning, match="changes what it imports"):
        found = _calls(thunder.jit(program, transforms=[SubclassTransform()]), monkeypatch)
    torch.testing.assert_close(found, _calls(program, monkeypatch))
