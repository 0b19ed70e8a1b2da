"""Calls that analyse a model leave it, its surroundings and random generators bit for bit what they were."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections import OrderedDict, deque
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.seeds import seeded
from thunder_norm import RMSTensor, build_norm_map, norm_report
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import ThunderNormError
from thunder_norm.model_state.reachable import Reachable
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.norms.undisturbed import undisturbed
from thunder_norm.transforms import NormTransform, profile
import thunder

GLOBAL: dict[str, torch.Tensor] = {}
TABLE: torch.Tensor | None = None


@functools.lru_cache
def scaled(name: str, owner: Any) -> torch.Tensor:
    return owner.current * 2


class Helper:
    """An object that is no module."""

    __slots__ = ("table", "__dict__")

    def __init__(self):
        self.seen = []


class Module(nn.Module):
    """What the subclasses use; the names are those of the places in which they keep things."""

    shared: dict[str, torch.Tensor] = {}

    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
        self.table, self.cache, self.items, self.helper, self.inner = None, {}, [], Helper(), nn.Sequential(nn.Linear(4, 4))
        self.recent, self.names, self.by_name = deque(maxlen=2), set(), OrderedDict(a=1)
        self.register_buffer("running", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))
        self.plain = torch.zeros(4)
        self.calls = 0
        self.generator = torch.Generator().manual_seed(seeded(1))

    def forward(self, x):
        self.keep(x)
        return self.linear(x) + self.bias


class Attribute(Module):
    def keep(self, x):
        self.table = x * 2
        self.calls += 1
        self.inner[0].last = x + 1


class Parameters(Module):
    def keep(self, x):
        if self.table is None:
            self.table = self.bias * 2


class Containers(Module):
    def keep(self, x):
        self.cache["x"] = x * 1.5
        self.items.append({"deep": (x,)})
        self.recent.append(x)
        self.by_name["b"] = x
        del self.by_name["a"]
        self.names.add("kept")
        self.helper.seen.append(x)
        self.helper.other = x
        self.helper.table = x


class Buffers(Module):
    def keep(self, x):
        self.running = self.running + x.mean(0)
        self.count += 1
        self.plain.add_(1)


class Globals(Module):
    def keep(self, x):
        global TABLE
        TABLE = x * 2
        GLOBAL["x"] = x
        self.shared["x"] = x
        Globals.last = x


class Cached(Module):
    def keep(self, x):
        self.current = x
        scaled("x", self)


class Structure(Module):
    def keep(self, x):
        self.extra = nn.Linear(2, 2)
        self.register_buffer("late", torch.zeros(2))
        self.inner.eval()
        self.bias.requires_grad_(False)
        self.inner[0].weight.grad = torch.ones(4, 4)
        self.inner[0].register_forward_hook(lambda *args: None)


class Noise(Module):
    def keep(self, x):
        torch.rand(3)
        random.random()
        numpy.random.rand()
        torch.rand(3, generator=self.generator)


class InPlaceParameter(Module):
    def keep(self, x):
        with torch.no_grad():
            self.bias.clamp_(-0.1, 0.1)
            self.plain.data = torch.ones(5)


class Fails(Containers):
    def forward(self, x):
        self.keep(x)
        self.running.add_(1)
        return torch.detach_copy(x)


@pytest.fixture(autouse=True)
def _as_imported():
    """Executions of the modules keep things in globals, classes and caches."""
    global TABLE
    TABLE = None
    GLOBAL.clear()
    Module.shared.clear()
    scaled.cache_clear()
    if hasattr(Globals, "last"):
        del Globals.last


MODULES = [Attribute, Parameters, Containers, Buffers, Globals, Cached, Structure, Noise, InPlaceParameter, Fails]
X = torch.ones(3, 4)

ANALYSES = {
    "norm_report": lambda m: norm_report(thunder.jit(m, transforms=[NormTransform()]), RMSTensor.of(X)),
    "report of unit norms": lambda m: norm_report(thunder.jit(m, transforms=[NormTransform(parameters="unit")]), RMSTensor.of(X)),
    "ModularNorm": lambda m: ModularNorm(m, X),
    "ModularOptimizer": lambda m: ModularOptimizer(m, X, lr=0.1),
    "build_norm_map": lambda m: build_norm_map(m, X, parameters="unit")(RMSTensor(1.0)),
    "profile": lambda m: profile(m, X),
    "eager profile": lambda m: profile(m, X, target="eager", backward=True),
}


def contents(model: Module) -> tuple[Any, ...]:
    """Everything that the modules above may change."""

    def plain(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            assert not isinstance(v, NormedTensor | FakeTensor) and not v.is_meta
            return type(v), v.dtype, v.requires_grad, v.tolist(), v._version, None if v.grad is None else v.grad.tolist()
        if isinstance(v, dict):
            return [(k, plain(x)) for k, x in v.items()]
        if isinstance(v, nn.Module):
            return {k: plain(x) for k, x in vars(v).items()}
        if isinstance(v, Helper):
            return plain(vars(v)), plain(getattr(v, "table", None))
        if isinstance(v, list | tuple | deque):
            return [plain(x) for x in v]
        if isinstance(v, torch.Generator):
            return v.get_state().tolist()
        return v

    caches = scaled.cache_info().currsize
    statics = plain(GLOBAL), plain(TABLE), plain(Module.shared), hasattr(Globals, "last"), caches
    generators = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    return plain(model), statics, generators


@pytest.mark.parametrize("analysis", ANALYSES)
@pytest.mark.parametrize("cls", MODULES, ids=lambda c: c.__name__)
def test_an_analysis_leaves_a_model_as_it_was(cls, analysis):
    model = cls()
    objects = {k: id(v) for k, v in vars(model).items()}
    before = copy.deepcopy(contents(model))
    try:
        ANALYSES[analysis](model)
    except ThunderNormError:
        pass
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError) as e:  # what Thunder cannot trace
        assert analysis in ("build_norm_map", "profile") or cls is Fails, e
    assert contents(model) == before
    assert {k: id(v) for k, v in vars(model).items()} == objects
    plain = cls()
    plain.load_state_dict(model.state_dict())
    if cls is not Fails:
        torch.testing.assert_close(model(X), plain(X), rtol=0, atol=0)


def test_batch_norm_statistics_and_dropout_masks_are_those_of_a_model_never_analysed():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    state, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = torch.randn(16, 4)
    torch.set_rng_state(random_state)
    jm = thunder.jit(model, transforms=[NormTransform()])
    norm_report(jm, RMSTensor.of(x))
    ModularNorm(model, x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_renormalised_table_is_put_back():
    """`F.embedding(max_norm=...)` writes into the parameter itself, and the analyses run on its data."""
    model = nn.Embedding(5, 4, max_norm=0.1)
    before = model.weight.detach().clone()
    for analysis in ("norm_report", "ModularNorm"):
        with contextlib.suppress(ThunderNormError):  # a parameter that is written into may be refused
            ON_IDS[analysis](model)
        assert torch.equal(model.weight, before), analysis


ON_IDS = {
    "norm_report": lambda m: norm_report(thunder.jit(m, transforms=[NormTransform()]), torch.tensor([1, 2])),
    "ModularNorm": lambda m: ModularNorm(m, torch.tensor([1, 2])),
}


def test_a_graph_that_waits_for_its_backward_survives():
    """A buffer written and put back has the version that autograd saved it with."""
    model = Buffers()
    loss = (model.running * model.bias).sum()
    with undisturbed(model):
        model.running.add_(1)
    loss.backward()
    assert torch.equal(model.bias.grad, torch.zeros(4))


def test_inputs_are_left_alone():
    x, ids = torch.ones(3, 4), torch.tensor([5, 1])

    class Clamps(nn.Module):
        def forward(self, x, ids):
            return x * ids.clamp_(max=2).sum()

    norm_report(thunder.jit(Clamps(), transforms=[NormTransform()]), RMSTensor.of(x), ids)
    assert ids.tolist() == [5, 1]


def test_what_libraries_keep_is_not_followed():
    """Only the user's own code and objects: not torch's, not the standard library's."""
    owners = [p.owner for p in Reachable([Containers()]).places]
    assert not [o for o in owners if isinstance(o, type) and o.__module__.startswith("torch")]
    assert any(o is Containers for o in owners) and any(o is GLOBAL for o in [p.owner for p in Reachable([Globals()]).places])
