"""What a model keeps in a call, it keeps in a jitted and in a normed call too: the same values, as plain tensors.

The oracle is the same model in eager mode, called as often.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor, normed
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import EscapeError
from thunder_norm.transforms import NormTransform, ProfileTransform
import thunder

GLOBAL: dict[str, Any] = {}
TABLE: torch.Tensor | None = None
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Model(nn.Module):
    shared: dict[str, Any] = {}

    def __init__(self):
        super().__init__()
        torch.manual_seed(seeded(5))
        self.linear, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
        self.table, self.cache, self.items, self.recent, self.by_name = None, {}, [], deque(maxlen=2), OrderedDict(a=1)
        self.count = 0
        self.register_buffer("running", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(0))
        self.inner.register_buffer("running", torch.ones(4))

    def forward(self, x):
        return self.linear(x) + self.keep(x)


class Attribute(Model):
    def keep(self, x):
        if self.table is None:
            self.table = x.sum(0)
        return self.table


class OfParameters(Model):
    def keep(self, x):
        if self.table is None:
            self.table = self.linear.bias * 2
        return self.table


class OfSubmodule(Model):
    def keep(self, x):
        self.inner[0].last = self.inner[0](x)
        return self.inner[0].last


class Counter(Model):
    def keep(self, x):
        self.count += 1
        return x


class Cache(Model):
    def keep(self, x):
        if "table" not in self.cache:
            self.cache["table"] = (x.new_ones(4), {"more": x * 2})
        return self.cache["table"][0]


class Appended(Model):
    def keep(self, x):
        self.items.append(x.mean())
        self.by_name["b"] = x * 3
        return x


class Shifted(Model):
    """The last two: one of those that were there stays."""

    def keep(self, x):
        self.items[:] = [*self.items[-1:], x + 1]
        return x


class Replaced(Model):
    def keep(self, x):
        self.items = [x, x * 2]
        return x


class Global(Model):
    def keep(self, x):
        global TABLE
        if TABLE is None:
            TABLE = x.sum(0)
        GLOBAL["last"] = x * 2
        Global.shared["last"] = x
        Global.latest = x + TABLE
        return TABLE


class Assigned(Model):
    def keep(self, x):
        self.running = 0.9 * self.running + 0.1 * x.mean(0)
        self.inner.running = self.inner.running + 1
        return x


class InPlace(Model):
    def keep(self, x):
        self.running.mul_(0.5).add_(1)
        self.steps += 1
        self.inner.running.copy_(self.running)
        return x


class Statistics(Model):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def keep(self, x):
        return self.norm(x)


class Detached(Model):
    def keep(self, x):
        with torch.no_grad():
            self.last = self.linear(x)
        return x


MODELS = (
    Attribute,
    OfParameters,
    OfSubmodule,
    Counter,
    Cache,
    Appended,
    Replaced,
    Global,
    Assigned,
    InPlace,
    Statistics,
    Detached,
)


@pytest.fixture(autouse=True)
def _as_imported():
    _reset()


def kept(model: Model) -> Any:
    """Everything that the models may keep."""

    def plain(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            assert not isinstance(v, NormedTensor | FakeTensor) and type(v) in (torch.Tensor, nn.Parameter), type(v)
            return v.detach().clone()
        if isinstance(v, nn.Module):
            return {k: plain(x) for k, x in vars(v).items()}
        if isinstance(v, dict):
            return {k: plain(x) for k, x in v.items()}
        if isinstance(v, list | tuple | deque):
            return [plain(x) for x in v]
        return v if isinstance(v, int | float | str) else None

    return plain(model), plain(GLOBAL), plain(TABLE), plain(Model.shared), plain(getattr(Global, "latest", None))


def in_eager_mode(cls: type, calls: int) -> tuple[list, Any]:
    model = cls()
    results = [model(X + i).detach() for i in range(calls)]
    found = kept(model)
    return results, found


RUNS = {
    "real": lambda model, x: model(x),
    "normed": lambda model, x: normed(model)(x).backing,
    "of a norm": lambda model, x: model(RMSTensor.of(x)).backing,
}


@pytest.mark.parametrize(
    ("cls", "run"),
    [*((c, "real") for c in MODELS), *crossed(MODELS, ["normed", "of a norm"])],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_jitted_call_keeps_what_a_plain_call_keeps(cls, run):
    results, want = in_eager_mode(cls, 3)
    _reset()
    model = cls()
    jm = thunder.jit(model, transforms=[NormTransform()])
    for i, result in enumerate(results):
        torch.testing.assert_close(RUNS[run](jm, X + i).detach(), result)
    torch.testing.assert_close(kept(model), want)
    assert type(model(X)) is torch.Tensor


# globals and classes are looked after in traces and analyses, not in eager calls
@pytest.mark.parametrize("cls", [c for c in MODELS if c is not Global], ids=lambda c: c.__name__)
def test_an_eager_call_on_a_norm_keeps_what_a_plain_call_keeps(cls):
    results, want = in_eager_mode(cls, 3)
    _reset()
    model = cls()
    for i, result in enumerate(results):
        torch.testing.assert_close(model(RMSTensor.of(X + i)).backing.detach(), result)
    torch.testing.assert_close(kept(model), want)
    assert type(model(X)) is torch.Tensor


def _by_closure(model: Model) -> Callable:
    return lambda x: model(x)


def _by_dict(model: Model) -> Callable:
    models = {"a": model}
    return lambda x: models["a"](x)


def _by_submodule(model: Model) -> Callable:
    whole = nn.Sequential(model, nn.Identity())
    return lambda x: whole(x)


REACHED: tuple[Callable[[Model], Callable], ...] = (_by_closure, _by_dict, _by_submodule, lambda model: model.forward)


@pytest.mark.parametrize("reached", REACHED)
@pytest.mark.parametrize("cls", [Assigned, InPlace, Statistics])
def test_a_jitted_function_keeps_what_the_models_that_it_reaches_keep(cls, reached):
    results, want = in_eager_mode(cls, 3)
    model = cls()
    jf = thunder.jit(reached(model), transforms=[NormTransform()])
    for i, result in enumerate(results):
        torch.testing.assert_close(jf(X + i).detach(), result)
    torch.testing.assert_close(kept(model), want)


def test_an_eager_call_that_fails_keeps_plain_tensors():
    class Fails(Appended):
        def forward(self, x):
            self.table = x
            self.keep(x + 1)
            raise ValueError("no")

    model = Fails()
    with pytest.raises(ValueError, match="no"):
        model(RMSTensor.of(X))
    kept(model)
    assert type(model.table) is torch.Tensor


def test_containers_that_were_empty_before_an_eager_call_keep_plain_tensors():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = [[], deque(), OrderedDict(), [(), []], OrderedDict()]
            self.kept[-1].last = None  # type: ignore[attr-defined]

        def forward(self, x):
            self.kept[0].append(x)
            self.kept[1].append(x + 1)
            self.kept[2]["x"] = self.kept[4].last = (x, [x])
            self.kept[3][1].append({"x": x})
            return x

    model = Kept()
    model(RMSTensor.of(X))
    one, two, three, four, five = model.kept
    found = [one[0], two[0], three["x"][0], three["x"][1][0], four[1][0]["x"], five.last[0]]
    assert {type(t) for t in found} == {torch.Tensor}


def test_norms_that_a_module_had_before_stay():
    model = Attribute()
    model.table = norm = RMSTensor.of(X.sum(0))
    model(RMSTensor.of(X))
    assert model.table is norm


def test_calls_inside_a_call_see_norms():
    """Only the outermost call ends the life of a norm."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = OfSubmodule()

        def forward(self, x):
            y = self.inner(x)
            assert isinstance(self.inner.inner[0].last, NormedTensor)
            return y + self.inner.inner[0].last

    model = Outer()
    assert isinstance(model(RMSTensor.of(X)), NormedTensor)
    assert type(model.inner.inner[0].last) is torch.Tensor


def _reset() -> None:
    global TABLE
    TABLE = None
    GLOBAL.clear()
    Model.shared.clear()
    if hasattr(Global, "latest"):
        del Global.latest


@pytest.mark.parametrize("run", RUNS)
def test_modes_may_alternate(run):
    """A cache filled in one mode is read in another."""
    model = Cache()
    jm = thunder.jit(model, transforms=[NormTransform()])
    want = [copy.deepcopy(model)(X + i).detach() for i in range(1)]
    for other in RUNS.values():
        torch.testing.assert_close(other(jm, X).detach(), want[0])
        torch.testing.assert_close(RUNS[run](jm, X).detach(), want[0])
    assert [type(t) for t in torch.utils._pytree.tree_leaves(model.cache)] == [torch.Tensor] * 2


@pytest.mark.parametrize("run", RUNS)
def test_a_call_that_raises_leaves_what_eager_mode_leaves_and_one_with_norms_nothing(run):
    class Fails(Appended):
        def forward(self, x):
            self.keep(x)
            self.table = x
            raise ValueError("no")

    model, other = Fails(), Fails()
    if run == "real":
        with pytest.raises(ValueError, match="no"):
            other(X)
    want = copy.deepcopy(kept(other))
    _reset()
    with pytest.raises(ValueError, match="no"):
        RUNS[run](thunder.jit(model, transforms=[NormTransform()]), X)
    torch.testing.assert_close(kept(model), want)


class Boxed(Model):
    """A tensor inside a new object."""

    def keep(self, x):
        class Other:
            pass

        other = Other()
        other.held = x * 2
        self.items.append(other)
        return x


def test_a_tensor_in_an_object_of_the_programs_own_is_made_anew():
    model = Boxed()
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for x in (X, X + 1, RMSTensor.of(X)):
        jitted(x)
    first, second, third = (other.held for other in model.items)
    torch.testing.assert_close([first, second, third], [X * 2, (X + 1) * 2, X * 2])
    assert type(third) is torch.Tensor


class Iterating(Model):
    def keep(self, x):
        self.items.append(iter((x * 2, x)))
        return x


def test_a_tensor_in_an_iterator_is_that_of_each_call():
    model, plain = Iterating(), Iterating()
    jm = thunder.jit(model, transforms=[NormTransform()])
    for i in range(3):
        torch.testing.assert_close(jm(X + i), plain(X + i))
    for ours, theirs in zip(model.items, plain.items, strict=True):
        torch.testing.assert_close(list(ours), list(theirs))


def test_without_an_interpretation_of_wrappers_nothing_guards_what_is_kept():
    model = Cache()
    with pytest.raises(EscapeError, match="would have been a proxy"):
        thunder.jit(model, transforms=[ProfileTransform()])(X)
    assert model.cache == {}


def test_what_is_kept_requires_grad_as_in_eager_mode():
    for cls, attribute in ((Assigned, "running"), (OfParameters, "table"), (Attribute, "table"), (Detached, "last")):
        model, plain = cls(), cls()
        plain(X)
        thunder.jit(model, transforms=[NormTransform()])(X)
        assert getattr(model, attribute).requires_grad == getattr(plain, attribute).requires_grad, cls


@pytest.mark.parametrize("cls", [Replaced, OfSubmodule, Cache, Assigned, Statistics], ids=lambda c: c.__name__)
def test_what_is_kept_in_each_call_is_no_reason_to_trace_again(cls):
    """Once for what was there at first, once for what the first call put there."""
    jm = thunder.jit(cls(), transforms=[NormTransform()])
    for i in range(5):
        jm(X + i)
    assert thunder.cache_misses(jm) <= 2
