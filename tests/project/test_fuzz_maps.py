"""The random maps: what they have in them, that planted faults are found and shrunk, and some of them."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.map_models import FORMS, RETURNED
from tests.fuzz.maps import CHECKS, MapProgram, draw
from tests.fuzz.module_nodes import Node
from tests.fuzz.modules import ModuleProgram
from tests.fuzz.program import run, shrunk
from tests.fuzz.runner import Job, run_job
from tests.seeds import SHIFT, named_seed
from thunder_norm.norms.maps.norm_map_program import Program
from thunder_norm.profiling.memory import Memory
from thunder_norm.report.rules import RuleName
from thunder_norm.transforms import biases, checkpointing

SLICE = 8
LINEAR, RELU = Node("nn.Linear", ("4", "4")), Node("nn.ReLU")


def program_of(check: str, layers: tuple[Node, ...]) -> MapProgram:
    """Called with a dict, in float32, so that there is something to shrink; of that seed a budget is what the program needs."""
    base = ModuleProgram(layers, ("torch.randn(2, 3, 4)",), "LinfTensor", True, "float32", 2)
    return MapProgram(base, "dict", "tuple", False, True, (check,))


def test_programs_have_everything_in_them() -> None:
    numbers = random.Random(named_seed("maps"))
    drawn = [draw(numbers) for _ in range(150)]
    assert {c for p in drawn for c in p.checks} == set(CHECKS)
    assert {p.given for p in drawn} == set(FORMS) and {p.returned for p in drawn} == set(RETURNED)
    assert {p.base.dtype for p in drawn} == {"float64", "float32", "bfloat16"}
    labels = {label for p in drawn for label in p.labels()}
    assert any(label.startswith("part: ") for label in labels) and any(label.startswith("nn.") for label in labels)
    assert any("(0," in text for p in drawn for text in p.base.inputs)


def lost_derivatives(monkeypatch) -> None:
    monkeypatch.setattr(Program, "_handed_on", [])


def more_memory(monkeypatch) -> None:
    monkeypatch.setattr(Memory, "_freed", lambda self, key: self._blocks.pop(key))


def another_rule(monkeypatch) -> None:
    monkeypatch.setattr(RuleName, "_alike", lambda self: [])


def parameters_as_inputs(monkeypatch) -> None:
    monkeypatch.setattr(checkpointing, "tensors_of_module", lambda prologue: {})


def lost_bias(monkeypatch) -> None:
    monkeypatch.setattr(biases, "_sum", lambda parts: parts.rest())


FAULTS = {
    "moved": (lost_derivatives, (RELU,)),
    "eager profile": (more_memory, (LINEAR, LINEAR)),
    "report": (another_rule, (RELU,)),
    "budget": (parameters_as_inputs, (LINEAR, LINEAR)),
    "split": (lost_bias, (LINEAR,)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check", FAULTS)
def test_planted_faults_are_found_and_shrunk(check: str, monkeypatch) -> None:
    plant, layers = FAULTS[check]
    program = program_of(check, layers)
    assert run(program).kind == "right"
    plant(monkeypatch)
    found = run(program)
    assert found.kind == "wrong", found.detail
    smallest = shrunk(program, found, most=25)
    assert smallest.given == "positions" and smallest.returned == "result" and not smallest.base.training
    assert "MapProgram" in smallest.source() and check in smallest.source()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(SLICE))
def test_a_slice_of_the_programs(index: int) -> None:
    result = run_job(Job("maps", SHIFT, index), shrink=False)
    assert result.kind in ("right", "refused", "no oracle"), f"{result.detail}\n{result.source}"
