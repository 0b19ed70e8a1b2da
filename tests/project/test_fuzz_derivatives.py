"""The random derivative programs: what their generator covers, that a wrong rule is found and shrunk, and a slice of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.fuzz.derivative_programs import Derivative, Step
from tests.fuzz.level_writing import Level
from tests.fuzz.nests import DIFFERENTIATES, KINDS
from tests.fuzz.operations import COMPLEX, LABELS, REAL, Operation
from tests.fuzz.oracles import DIFFERENCES, OTHER_ORDER, TORCH, Outermost
from tests.fuzz.program import shrunk
from tests.fuzz.runner import Job, run_job
from tests.fuzz.truth import Truth, difference, executed
from tests.fuzz.writing import Writer, tensor_text
from tests.seeds import SHIFT, seeded
from thunder_norm.functions.registry import jvp_rules, vjp_rules
from thunder_norm.transforms import register_jvp, register_vjp

SHAPES = ((3,), (2, 3), (3, 3), (2, 2), (2, 1, 3), (), (4,), (1, 3), (3, 2))
SLICE = 14


def test_there_are_many_operations():
    assert len(LABELS) > 300
    assert sum(len(o.spellings) for family in REAL + COMPLEX for o in family) > 1000


def fits(operation: Operation, spelling: str, dtype: str) -> bool:
    """Whether eager mode runs a spelling on a tensor of one of a few shapes."""
    pick = random.Random(seeded(0))
    for shape in SHAPES:
        try:
            x = executed([f"x0 = {tensor_text(shape, pick, dtype)}"], TORCH)["x0"]
            writer = Writer("x0", {"x0": x}, 1, {"x0"}, pick, "torch.float64")
            lines = writer.write(spelling, "t0")
            new = [f"{n} = {t}" for n, t in writer.new_args.items()]
            new += [line for n, t in writer.new_constants.items() for line in (t.splitlines() if "\n" in t else [f"{n} = {t}"])]
            if isinstance(executed([*new, *lines], TORCH | {"x0": x})["t0"], torch.Tensor):
                return True
        except Exception:  # noqa: BLE001, S112 - another shape may do
            continue
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype, families", [("torch.float64", REAL), ("torch.complex128", COMPLEX)])
def test_every_spelling_fits_some_tensor(dtype: str, families: tuple):
    assert [s for family in families for o in family for s in o.spellings if not fits(o, s, dtype)] == []


POINT = (("x0", "torch.tensor([0.5, -0.3, 1.1], dtype=torch.float64)"),)
WRITTEN = (Step("sin", "t0", ("t0 = torch.sin(x0)",), "x0"), Step("exp", "t1", ("t1 = t0.exp()",), "t0"))


def program(*levels: Level, steps: tuple[Step, ...] = WRITTEN) -> Derivative:
    return Derivative(POINT, (), steps, (steps[-1].target,), levels)


@pytest.mark.parametrize("kind", KINDS)
def test_each_transform_agrees_with_each_oracle_in_its_plainest_form(kind: str):
    data, lines = program(Level(kind)).written
    wanted = executed([*data, *lines], TORCH)["result"]
    for oracle in (OTHER_ORDER, DIFFERENCES, Outermost(TORCH)):
        if kind == "autograd" or (kind not in DIFFERENTIATES and oracle is not OTHER_ORDER):
            continue
        assert difference(executed([*data, *lines], oracle)["result"], wanted, 1e-5) is None
    assert Truth(data, lines, "torch.float64").verdict(wanted).kind == "right"


@pytest.mark.parametrize(
    "wrong", [lambda t: t * 1.001, lambda t: t[None], lambda t: t.float(), lambda t: (t,), lambda t: t.to("meta")]
)
def test_other_values_shapes_dtypes_structures_and_devices_are_wrong(wrong):
    data, lines = program(Level("grad")).written
    wanted = executed([*data, *lines], TORCH)["result"]
    assert Truth(data, lines, "torch.float64").verdict(wrong(wanted)).kind == "wrong"


@pytest.fixture
def wrong_sine() -> Iterator[None]:
    """Rules for the sine with the derivative of another function."""
    saved = {rules: rules.remove(torch.sin) for rules in (vjp_rules, jvp_rules)}
    register_vjp(torch.sin, override=True)(lambda x: (torch.sin(x), x), lambda x, ct: (ct * torch.cosh(x),))
    register_jvp(torch.sin, override=True)(lambda p, t: (torch.sin(p[0]), t[0] * torch.cosh(p[0])))
    yield
    for rules, rule in saved.items():
        rules.remove(torch.sin)
        if rule is not None:
            rules.add(torch.sin, rule)


def test_a_wrong_rule_is_found_and_shrunk_to_the_operation(wrong_sine: None):
    steps = (*WRITTEN, Step("mul", "t2", ("t2 = t1 * t0",), "t1"))
    large = program(Level("vjp", 3), Level("jit"), Level("jvp", 5), steps=steps)
    found = large.run()
    assert found.kind == "wrong"
    small = shrunk(large, found)
    assert [s.label for s in small.steps] == ["sin"] and len(small.levels) == 1
    assert executed([f"x = {small.args[0][1]}"], TORCH)["x"].numel() == 1


def test_the_source_can_be_pasted(capsys: pytest.CaptureFixture):
    exec(program(Level("vjp", 3), Level("custom_vjp"), Level("hessian")).source(), {"__name__": "pasted"})
    torchs, ours = capsys.readouterr().out.split("Ours", 1)
    assert torchs.removeprefix("Torch").strip() == ours.strip()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(SLICE))
def test_a_slice_of_the_programs(index: int):
    result = run_job(Job("derivatives", SHIFT, index), shrink=False)
    assert result.kind in ("right", "refused", "no oracle"), f"{result.detail}\n{result.source}"
