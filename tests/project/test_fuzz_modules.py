"""The tester of random modules: what it draws, that what it prints can be pasted, and that it finds what is wrong."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import random
import re
import warnings

import pytest
import torch
from torch import nn

from tests.fuzz import modules
from tests.fuzz.module_leaves import leaf
from tests.fuzz.module_nodes import Node, Pick
from tests.fuzz.module_parts import LEFT_OUT, embedding, head, wrapper
from tests.fuzz.modules import CLASSES, ModuleProgram
from tests.fuzz.program import run, shrunk
from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, normed_op

SHAPES = ((2, 6), (2, 4, 6), (2, 4, 5, 5), (2, 2, 4, 4, 4))


@functools.cache
def inside(name: str) -> str:
    """The source of one of our classes, but for its bases."""
    return inspect.getsource(CLASSES[name]).partition("\n")[2] if name in CLASSES else ""


def names(node: Node) -> set[str]:
    """The classes of torch.nn in an expression, and in the classes that it mentions."""
    labels = ModuleProgram((node,), ()).labels()
    return {name for label in labels for name in re.findall(r"\bnn\.(\w+)", label + inside(label))}


def test_each_class_of_torch_nn_is_drawn_or_left_out_with_a_reason():
    classes = {name for name, thing in vars(nn).items() if isinstance(thing, type) and issubclass(thing, nn.Module)}
    pick, found = Pick(random.Random(seeded(0))), set()
    for _ in range(5000):
        shape = pick.choice(SHAPES)
        for node in (leaf(pick, shape), wrapper(pick, shape, 2), embedding(pick, 3), head(pick, shape)):
            found |= names(node)
    assert classes - found == set(LEFT_OUT) & classes


def drawn(index: int) -> ModuleProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return modules.draw(random.Random(f"modules {seeded(0)} {index}"))


def test_a_program_is_drawn_and_run_again_from_its_seed():
    assert [drawn(i) for i in range(10)] == [drawn(i) for i in range(10)]
    assert len({drawn(i).expression for i in range(30)}) > 25
    program = drawn(3)
    before, again = (program.call(program.build(), *program.arguments()) for _ in range(2))
    torch.testing.assert_close(before, again, rtol=0, atol=0)


def printed(source: str) -> str:
    default = torch.get_default_dtype()
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(source, "<pasted>", "exec"), {"__name__": "pasted"})
    finally:
        torch.set_default_dtype(default)
    return out.getvalue()


@pytest.mark.parametrize("index", range(12))
def test_what_is_printed_can_be_pasted(index: int):
    lines = printed(drawn(index).source()).splitlines()
    assert any(line.startswith("largest entries   [") for line in lines)
    assert any(line.startswith("bounds") for line in lines)


def test_smaller_programs_are_smaller():
    for i in range(10):
        program = drawn(i)
        for smaller in program.smaller():
            size, other = (len(p.expression) + 10 * (len(p.extra) + p.training) for p in (program, smaller))
            assert other < size or sum(1 for _ in nodes(smaller)) <= sum(1 for _ in nodes(program))


def nodes(program: ModuleProgram):
    return (node for layer in program.layers for node in layer.nodes())


# -- it finds what is wrong -------------------------------------------------------------------------------------------------------


def _double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def _claims(value: float, sensitivity: float):
    """An operation that doubles, and says something else of norms."""
    op = normed_op(lambda x: _double(x))

    @op.register_norm
    def rule(x: RMSTensor) -> RMSTensor:
        return RMSTensor(value * x.norm_size, elem_dims=x.elem_dims, sensitivity={"x": sensitivity})

    return op


class Wrong(nn.Module):
    """A module that is not what it says."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.how, self.calls = nn.Parameter(torch.eye(4)), how, 0

    def forward(self, x):
        y = x @ self.weight
        if self.how == "value":
            return TOO_SMALL(y)
        if self.how == "sensitivity":
            return TOO_STEADY(y)
        if self.how == "unreached":
            return x @ torch.from_numpy(self.weight.detach().numpy()) + 0 * y
        if self.how == "data" and not isinstance(y, torch.nn.Parameter) and hasattr(y, "norm_size"):
            return y * float(self.weight.abs().max())
        if self.how == "error" and hasattr(y, "norm_size"):
            raise AttributeError("norms are not for me")
        return y


TOO_SMALL, TOO_STEADY = _claims(0.1, 2.0), _claims(2.0, 0.5)


@pytest.mark.parametrize(
    "how, kind, says",
    [
        ("fine", "right", ""),
        ("value", "wrong", "has norm"),
        ("sensitivity", "wrong", "moves by"),
        ("unreached", "wrong", "unit bounds"),
        ("data", "wrong", "unit bounds"),
        ("error", "error", "norms are not for me"),
    ],
)
def test_a_module_that_is_wrong_is_found_and_shrunk(how: str, kind: str, says: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CLASSES, "Wrong", Wrong)
    monkeypatch.setitem(modules._NAMESPACE, "Wrong", Wrong)
    wrong = Node("Wrong", (f"{how!r}",))
    layers = (Node("nn.Sequential", (Node("nn.Linear", ("4", "4")), wrong)), Node("nn.Tanh"))
    program = ModuleProgram(layers, ("torch.randn(3, 4)",), kind="LinfTensor")
    found = run(program)
    assert (found.kind, says in found.detail) == (kind, True), found
    if kind != "right":
        assert shrunk(program, found).layers == (wrong,)


def test_the_norm_of_nan_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LinfTensor, "measure", classmethod(lambda cls, t, dims: t.nan_to_num(0, 0, 0).abs().amax()))
    program = ModuleProgram((Node("nn.ReLU"),), ("torch.randn(3, 4)",), kind="LinfTensor", extra=("nan",))
    assert run(program).kind == "wrong"
