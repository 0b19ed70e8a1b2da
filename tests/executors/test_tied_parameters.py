"""Parameters with several names are one input where the executor is in use: values, gradients and changes are eager mode's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.executors.test_calls import OneByOne
from tests.seeds import seeded
from thunder_norm import RMSTensor, normed
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.executors import inductor
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


class Tied(nn.Module):
    """A table that is the head as well, and whose rows are a third layer's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(seeded(0))
        self.table, self.inside, self.head = nn.Embedding(6, 4), nn.Linear(4, 6), nn.Linear(4, 6, bias=False)
        self.inside.weight = self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.head(x + self.inside(x)[..., :4].tanh())


class Returning(Tied):
    def forward(self, ids):
        return super().forward(ids), self.head.weight


class Writing(Tied):
    """Under no_grad it writes into the table by one of its names, and reads it by another."""

    def forward(self, ids):
        with torch.no_grad():
            self.head.weight.mul_(1.5)
        return super().forward(ids)


class Held(Tied):
    """A list holds the parameter too."""

    def __init__(self):
        super().__init__()
        self.all = nn.ParameterList([self.table.weight])

    def forward(self, ids):
        return super().forward(ids) @ self.all[0]


IDS = torch.tensor([[0, 3, 5], [1, 1, 2]])
KINDS = {"tied": Tied, "returned": Returning, "held by a list": Held, "in double precision": lambda: Tied().double()}
WAYS = {"executor alone": [], "SubclassTransform": [SubclassTransform], "NormTransform": [NormTransform]}


@pytest.fixture(autouse=True)
def one_by_one():
    """Regions run operation by operation: which inputs they have is decided before."""
    with OneByOne():
        yield


def jit(model: nn.Module, transforms: list) -> Callable:
    return thunder.jit(model, transforms=[t() for t in transforms], executors=[inductor])


def inputs_of(jm: Callable) -> int:
    return len(thunder.last_traces(jm)[-1].args)


def outputs(found: object) -> list[torch.Tensor]:
    return list(found) if isinstance(found, tuple) else [found]  # type: ignore[list-item]


def check_calls(jm: Callable, model: nn.Module, eager: nn.Module) -> None:
    """A call and its backward are eager mode's."""
    for m in (model, eager):
        m.zero_grad()
    got, expected = outputs(jm(IDS)), outputs(eager(IDS))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    if expected[0].requires_grad:
        for found in (got, expected):
            sum(t.square().sum() for t in found).backward()
    for (name, p), (_, q) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_eager_s_and_there_is_one_input(kind: str, way: str):
    model = KINDS[kind]()
    eager = copy.deepcopy(model)
    jm = jit(model, WAYS[way])
    check_calls(jm, model, eager)
    check_calls(jm, model, eager)
    assert inputs_of(jm) == 3  # ids, the table, a bias


def untie(model: nn.Module) -> None:
    torch.manual_seed(seeded(1))
    model.head.weight = nn.Parameter(torch.randn(6, 4))


def tie_another(model: nn.Module) -> None:
    torch.manual_seed(seeded(1))
    model.table.weight = model.inside.weight = model.head.weight = nn.Parameter(torch.randn(6, 4))


def step(model: nn.Module) -> None:
    with torch.no_grad():
        model.table.weight.add_(1.0)


CHANGES = {
    "untied": untie,
    "another for all": tie_another,
    "written into": step,
    "loaded": lambda m: m.load_state_dict({k: torch.ones_like(v) for k, v in m.state_dict().items()}),
    "frozen": lambda m: m.requires_grad_(False),
    "in double precision": lambda m: m.double(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_calls_is_seen(change: str, way: str):
    model = Tied()
    eager = copy.deepcopy(model)
    jm = jit(model, WAYS[way])
    check_calls(jm, model, eager)
    for m in (model, eager):
        CHANGES[change](m)
    check_calls(jm, model, eager)
    if change == "untied":
        assert inputs_of(jm) == 4
        for m in (model, eager):
            m.head.weight = m.table.weight
        check_calls(jm, model, eager)


@pytest.mark.parametrize("way", WAYS)
def test_what_the_program_writes_into_is_seen_under_each_name(way: str):
    model = Writing().double()
    eager = copy.deepcopy(model)
    jm = jit(model, WAYS[way])
    for _ in range(2):
        check_calls(jm, model, eager)
        torch.testing.assert_close(model.table.weight, eager.table.weight)


def test_second_derivatives():
    def penalty(run: Callable, model: nn.Module) -> torch.Tensor:
        (g,) = torch.autograd.grad(run(IDS).square().sum(), model.table.weight, create_graph=True)
        return torch.autograd.grad(g.square().sum(), model.table.weight)[0]

    model = Tied().double()
    torch.testing.assert_close(penalty(jit(model, []), model), penalty(model, model))


def test_norms_are_those_without_the_executor():
    """In normed mode parameters are followed by their names."""
    model = Tied()
    found = [
        normed(thunder.jit(model, transforms=[NormTransform()], **options))(IDS) for options in ({}, {"executors": [inductor]})
    ]
    assert isinstance(found[0], RMSTensor)
    torch.testing.assert_close(found[0].norm_size, found[1].norm_size)
    torch.testing.assert_close(found[0].backing, found[1].backing)


@pytest.mark.parametrize("transform", [None, SubclassTransform, NormTransform])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_argument_given_twice_that_is_written_into_has_one_history(transform: type | None, is_first: bool):
    def f(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        before = a * x
        with torch.no_grad():
            (a if is_first else b).mul_(1.5)
        return (before + a * b).sum() + b.sin().sum()

    jf = thunder.jit(f, executors=[inductor]) if transform is None else thunder.jit(f, transforms=[transform()])
    x = torch.arange(3.0)
    for is_one in (True, False, True):
        found = []
        for run in (jf, f):
            a = torch.ones(3, requires_grad=True)
            b = a if is_one else torch.ones(3, requires_grad=True)
            run(a, b, x).backward()
            found.append([a.detach(), b.detach(), a.grad, b.grad])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_two_tensors_in_one_memory_have_two_histories(transform: type):
    """Of which a trace has one: what is written into one of them and read by the other is refused, but without gradients."""

    def f(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            a.mul_(1.5)
        return b * x

    a, x = torch.ones(3, requires_grad=True), torch.arange(3.0)
    jf = thunder.jit(f, transforms=[transform()])
    with pytest.raises(UnsupportedOpError, match="two histories"):
        jf(a, a.detach().requires_grad_(), x)
    assert torch.equal(a, torch.ones(3))
    torch.testing.assert_close(jf(a.detach(), a.detach(), x), 1.5 * x)


@pytest.mark.parametrize("way", ["frozen", "no_grad"])
def test_without_gradients_each_name_is_an_input(way: str):
    model = Tied().requires_grad_(way != "frozen")
    jm = jit(model, [])
    with torch.set_grad_enabled(way != "no_grad"):
        torch.testing.assert_close(jm(IDS), model(IDS))
    assert inputs_of(jm) == 5


def test_without_the_executor_each_name_is_an_input_as_in_thunder():
    model = Tied()
    jm = thunder.jit(model, transforms=[NormTransform()])
    jm(IDS)
    assert inputs_of(jm) == 5
