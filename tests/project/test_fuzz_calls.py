"""The random programs of calls: what their generator covers, and that what differs from eager mode is found and shrunk."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from tests.fuzz import calls
from tests.fuzz.call_comparison import Seen, difference, seen
from tests.fuzz.call_parts import ARGUMENTS, BETWEEN, CALLS, KEEPING, STATEMENTS, SURROUNDINGS
from tests.fuzz.calls import HOW, Calls, Step, draw
from tests.fuzz.program import shrunk
from tests.seeds import named_seed, seeded

PLAIN, LEAF = ARGUMENTS[:2]


def action(name: str):
    return next(a for a in (*CALLS, *BETWEEN) if a.name == name)


def test_parts_are_python_and_are_drawn():
    for name, parts in (("action", (*CALLS, *BETWEEN)), ("argument", ARGUMENTS)):
        assert len({(p.name, str(p)) for p in parts}) > 50, name
    for step in (
        *(Step(a, PLAIN) for a in (*CALLS, *BETWEEN)),
        *(Step(action("call"), a) for a in ARGUMENTS),
        *(Step(action("call"), LEAF, (context,)) for context in SURROUNDINGS),
    ):
        compile(step.text(), "<step>", "exec")
    numbers = random.Random(named_seed("calls"))
    drawn = [draw(numbers) for _ in range(150)]
    assert {p.how for p in drawn} >= set(HOW) - {"inductor"}
    assert len({s for p in drawn for s in p.statements} - {*KEEPING}) > len(STATEMENTS) / 2
    steps = [s for p in drawn for s in p.steps]
    assert len({c for s in steps for c in s.surroundings}) > len(SURROUNDINGS) / 2
    assert len({s.argument for s in steps}) > len(ARGUMENTS) / 2
    assert len({s.action for s in steps}) > len(CALLS + BETWEEN) / 2
    for program in drawn:
        compile(program.source(), "<program>", "exec")


@pytest.mark.filterwarnings("ignore")
def test_programs_are_right_in_surroundings_threads_and_copies():
    steps = (
        Step(action("backward"), LEAF, ("torch.autocast('cpu', torch.bfloat16)",), is_inside=True),
        Step(action("m.eval()"), LEAF),
        Step(action("in threads, modes"), PLAIN, ()),
        Step(action("a copy by bytes"), PLAIN, ("torch.no_grad()",)),
        Step(action("call"), next(a for a in ARGUMENTS if a.name == "a wrong name")),
    )
    outcome = Calls(("x = self.lin(x).tanh()",), "Pair(x, [x.sum()])", steps, "SubclassTransform").run()
    assert outcome.kind == "right", outcome.detail


KEPT = []


def keeps(result):
    KEPT.append(result)
    return result


# of each what is done to a call by the module itself, what a program does that shows it, and where
FAULTS: dict[str, tuple[Callable, str, str]] = {
    "a number is drawn": (lambda f, a, k: (f(*a, **k), torch.rand(1))[0], "call", "modes.random"),
    "a mode is left": (lambda f, a, k: (f(*a, **k), torch.set_grad_enabled(False))[0], "call", "modes.grad"),
    "no gradient": (lambda f, a, k: f(*a, **k).detach(), "call", "requires_grad"),
    "another gradient": (lambda f, a, k: f(*a, **k) * 2 - f(*a, **k).detach(), "gradients", "results"),
    "a keyword is lost": (lambda f, a, k: f(*a), "call", "results"),
    "a result is kept": (lambda f, a, k: keeps(f(*a, **k)), "is it let go", "results"),
    "an input is written into": (lambda f, a, k: (f(*a, **k), a[0].detach().mul_(2))[0], "call", "state.x"),
    "called twice": (lambda f, a, k: (f(*a, **k), f(*a, **k))[1], "call", "state.m.count"),
    "an error": (lambda f, a, k: 1 / 0, "call", "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_shrunk(monkeypatch, name):
    fault, shown_by, says = FAULTS[name]
    faulty = {"J": lambda f: lambda *a, **k: fault(f, a, k), "K": lambda f: f, "G": torch.func.grad}
    monkeypatch.setattr(calls, "_of_thunder", lambda how: faulty)
    argument = next(a for a in ARGUMENTS if a.name == "another int")
    steps = (Step(action("gc.collect()"), PLAIN), Step(action(shown_by), argument, ("contextlib.nullcontext()",)))
    program = Calls(("x = self.lin(x) * k", "self.count += 1"), "x", steps, "NormTransform")
    outcome = program.run()
    KEPT.clear()
    assert outcome.kind in ("wrong", "error") and says in outcome.detail
    smallest = shrunk(program, outcome)
    KEPT.clear()
    assert len(smallest.steps) == 1 and not smallest.steps[0].surroundings and len(smallest.statements) <= 1


def test_tensors_are_compared_as_they_were():
    torch.manual_seed(seeded(0))
    t = torch.randn(3, dtype=torch.complex64).conj()
    before = seen([t, {"a": (1.0, None)}])
    assert not difference(before, seen([t.resolve_conj(), {"a": (1.0, None)}]), 1e-6)
    assert difference(before, seen([t.conj(), {"a": (1.0, None)}]), 1e-6)
    assert difference(before, seen([t, {"a": (2.0, None)}]), 1e-6)
    with torch.no_grad():
        assert isinstance(before[1], Seen) and "requires_grad" in difference(
            seen(t.detach().requires_grad_()), seen(t.detach()), 1e-6
        )
