"""What we change of Thunder: nothing by the import, what `hooks` lists by a use, and nothing that programs without us could notice."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

from thunder_norm.tracing import hooks
from thunder_norm.tracing.hooks.interpreter import _stack


def _asked(*processes: tuple[str, ...]) -> list[Any]:
    """What processes with these arguments say, which run beside each other."""
    commands = [[sys.executable, "-m", "tests.untouched", *arguments] for arguments in processes]
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    said = [p.communicate() for p in running]
    assert not any(p.returncode for p in running), [error for _, error in said]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.fixture(scope="module")
def states() -> list[dict[str, str]]:
    return _asked(("state", "import", "use"))[0]


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
    replaced = {f"{r.module.__name__} {r.name}" for r in hooks.REPLACED}
    changed = {name for name in _changes(imported, used) if name.rpartition(".")[0] not in replaced}  # a replaced class's own
    assert replaced <= changed
    tables = "thunder.core.transforms _grad_fn_map[", "thunder.core.transform_common NON_FUNCTIONAL_OPS has "
    others = {name for name in changed - replaced if not name.startswith(tables)}
    assert not others
    assert not {name for name in changed - replaced if name in imported}  # what was in the tables is what it was
    assert all("thunder_norm" in used[name] for name in changed - replaced if name.startswith(tables[0]))


def test_programs_without_us_are_what_they_are_without_us():
    untouched, used = _asked(("programs",), ("programs", "use"))
    assert len(untouched) >= 90
    assert {name: text for name, text in used.items() if text != untouched[name]} == {}


def test_a_program_that_is_being_traced_may_be_the_first_use():
    program = """
import torch
from thunder_norm.transforms import grad, vmap
import thunder
f = lambda x: grad(lambda y: (torch.lerp(y, y * y, 0.5) * torch.eye(2)).sum())(x)
x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
torch.testing.assert_close(thunder.jit(f)(x), torch.func.grad(lambda y: (torch.lerp(y, y * y, 0.5) * torch.eye(2)).sum())(x))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_where_a_plain_interpretation_was_called_from_is_what_pythons_stack_says():
    def called():  # in place of the interpreter's constructor
        return _stack()[2], inspect.stack()[2]

    def fn_():
        return called()

    given, expected = fn_()
    assert given == expected and given.positions == expected.positions and given.code_context == expected.code_context
