"""What we change of Thunder: nothing by the import, what `hooks` lists by a use, and nothing that programs without us could notice."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.forks import FORKS
from thunder_norm.tracing import hooks
from thunder_norm.tracing.hooks.interpreter import _stack
from thunder_norm.transforms import grad
import thunder
from thunder.core import jit_ext


@pytest.fixture(scope="module")
def told() -> list[Any]:
    """What processes say that have done nothing but import Thunder before: programs without us, states, and programs after a use."""
    done = subprocess.run([sys.executable, "-m", "tests.tracing.untouched"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "{"))]


@pytest.fixture(scope="module")
def states(told: list[Any]) -> list[dict[str, str]]:
    return told[1]


def _changes(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """What has changed in the modules that were there before, the counters apart that Thunder counts its programs with."""
    modules = before["modules"].split()
    differing = {name for name in {**before, **after} if before.get(name) != after.get(name) and name != "modules"}
    found = {name for name in differing if any(_is_of(name, module) for module in modules)}
    return {name for name in found if "__warningregistry__" not in name and not name.endswith(" _exec_ctr")}


def _is_of(name: str, module: str) -> bool:
    return name.startswith(f"{module} ")


def test_importing_changes_nothing(states):
    before, imported, _ = states
    assert not _changes(before, imported)


def test_a_use_changes_what_the_hooks_say(states):
    _, imported, used = states
    replaced = {r.place for r in hooks.REPLACED}
    changed = {name for name in _changes(imported, used) if name.rpartition(".")[0] not in replaced}  # a replaced class's own
    assert replaced <= changed
    tables = "thunder.core.transforms _grad_fn_map[", "thunder.core.transform_common NON_FUNCTIONAL_OPS has "
    others = {name for name in changed - replaced if not name.startswith(tables)}
    assert not others
    assert not {name for name in changed - replaced if name in imported}  # what was in the tables is what it was
    assert all("thunder_norm" in used[name] for name in changed - replaced if name.startswith(tables[0]))


def test_programs_without_us_are_what_they_are_without_us(told):
    untouched, _, used = told
    assert len(untouched) >= 60
    assert {name: text for name, text in used.items() if text != untouched[name]} == {}


def _first_use() -> None:
    """In a process that has imported us, and used nothing."""
    assert jit_ext.general_jit_lookaside.__module__ == jit_ext.__name__
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def f(y: torch.Tensor) -> torch.Tensor:
        return (torch.lerp(y, y * y, 0.5) * torch.eye(2)).sum()

    torch.testing.assert_close(thunder.jit(lambda x: grad(f)(x))(x), torch.func.grad(f)(x))
    assert jit_ext.general_jit_lookaside.__module__ != jit_ext.__name__


def test_a_program_that_is_being_traced_may_be_the_first_use():
    process = FORKS.Process(target=_first_use)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_where_a_plain_interpretation_was_called_from_is_what_pythons_stack_says():
    def called():  # in place of the interpreter's constructor
        return _stack()[2], inspect.stack()[2]

    def fn_():
        return called()

    given, expected = fn_()
    assert given == expected and given.positions == expected.positions and given.code_context == expected.code_context
