"""Numbers that are others from call to call: eager mode says what a call gives and leaves behind, and few traces serve all of them."""

import copy
import json
import math
import warnings
from types import SimpleNamespace

import pytest
import torch

import thunder_norm  # noqa: F401
from tests.seeds import seeded
from thunder_norm.errors import AcquiredAnewWarning
from thunder_norm.tracing import native
from thunder_norm.transforms import NormTransform, SubclassTransform

import thunder  # isort: skip


def counts(self, x, k):
    self.calls += 1
    return self.linear(x)


def counts_twice(self, x, k):
    self.calls += 1
    self.linear.calls = self.calls * 2
    self.calls = self.linear.calls - self.calls
    return self.linear(x), self.calls


def asks_each_third(self, x, k):
    self.calls += 1
    y = self.linear(x)
    return y * 2 if self.calls % 3 == 0 else y


def anneals(self, x, k):
    self.rate = max(0.5, self.rate * 0.9)
    return self.linear(x) / self.rate


def warms_up(self, x, k):
    self.calls += 1
    y = self.linear(x) * min(1.0, self.calls / 4)
    return -y if 2 * self.calls > 9 else 1 - y


def decays_by_functions(self, x, k):
    self.rate = math.exp(-self.rate) + abs(math.cos(self.rate)) - 0.9**self.config.step
    self.config.step = -(-self.config.step // 1) + int(self.rate > 0)
    return self.rate * self.linear(x) + float(self.config.step)


def keeps_what_it_is_given(self, x, k):
    self.config.step = k
    self.last = x.sum().item()
    return self.linear(x) * k


def compares_with_a_tensor(self, x, k):
    self.calls += 1
    y = self.linear(x)
    return torch.where(y > self.calls, y, y - self.calls)


def tells_kinds(self, x, k):
    self.calls += 1
    return self.linear(x) * (self.calls if isinstance(self.calls, int) else 0)


def counts_in_containers(self, x, k):
    self.stats["calls"] += 1
    self.stats["of"]["rate"] *= 0.9
    self.history[0] += self.stats["calls"]
    self.history[1] = self.stats.get("calls") / 2
    return self.linear(x) * self.stats["of"]["rate"] + self.history[0]


def moves_numbers_in_containers(self, x, k):
    self.history[0], self.history[1] = self.history[1], self.history[0] + 0.5
    self.stats["last"], self.stats["calls"] = self.stats["calls"], self.stats["calls"] + 1
    return self.linear(x) * self.history[0] + self.stats["last"]


def counts_in_variables(self, x, k):
    return self.linear(x) * self.count() + Times.called


class Times:
    called = 0


def _counter():
    times, rates = 0, [1.0]

    def count():
        nonlocal times
        times += 1
        rates[0] *= 0.5
        return times + rates[0]

    return count


def is_used_as_a_size(self, x, k):
    self.calls += 1
    return self.linear(x)[: self.calls].sum() + self.linear(x).roll(self.calls, 0)


def is_written(self, x, k):
    self.calls += 1
    self.text = f"call {self.calls}"
    return self.linear(x) * len(self.text)


def is_a_key(self, x, k):
    self.calls = (self.calls + 1) % 3
    return self.linear(x) * {0: 1.0, 1: 2.0, 2: 3.0}[self.calls] + (self.calls in (1, 2))


def is_hidden(self, x, k):
    self.calls += 1
    return self.linear(x) + sum([self.calls, 1]) + max((self.calls, k))


def catches_what_python_raises(self, x, k):
    self.calls += 1
    try:
        return self.linear(x) / (1 // (self.calls - 3)) if self.calls > 1 else self.linear(x) * math.log(self.calls - 1)
    except (ZeroDivisionError, ValueError) as e:
        self.text = str(e)
        return self.linear(x)


def is_summed_up(self, x, k):
    self.history[0] += 1
    return self.linear(x) * sum(self.history)


def is_written_out_beside_it(self, x, k):
    y = self.linear(x) * self.stats["calls"]
    self.text = json.dumps(self.stats)
    return y


def is_compared_in_what_holds_it(self, x, k):
    y = self.linear(x) + self.history[0] + self.count()
    return y * 2 if [self.history] in [[[1, 2.0]], [[3, 2.0]]] else y


ONE_FOR_ALL = [
    *(counts, counts_twice, anneals, warms_up, decays_by_functions, keeps_what_it_is_given, compares_with_a_tensor, tells_kinds),
    *(asks_each_third, counts_in_containers, moves_numbers_in_containers, counts_in_variables),
]
FOR_EACH = [is_used_as_a_size, is_written, is_a_key, is_hidden, is_summed_up]


class _Model(torch.nn.Module):
    def __init__(self, program):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.linear.calls = 3
        self.calls, self.rate, self.last, self.text = 0, 2.0, None, ""
        self.config = SimpleNamespace(step=1)
        self.stats, self.history, self.count = {"calls": 0, "of": {"rate": 1.0}}, [0, 2.0], _counter()
        self.program = program

    def forward(self, x, k=1):
        return self.program(self, x, k)


def _left(model):
    attributes = [model.calls, model.linear.calls, model.rate, model.last, model.text, model.config.step]
    return [
        *attributes,
        *model.history,
        *(v for v in model.stats.values() if not isinstance(v, dict)),
        *model.stats["of"].values(),
    ]


def _called(model, call, x, k):
    """What a call gives, its gradients, and what it leaves behind."""
    model.zero_grad()
    result = call(x, k)
    (result[0] if isinstance(result, tuple) else result).sum().backward()
    return result, [p.grad for p in model.parameters()], _left(model)


def _compare(program, transform, between=lambda model, i: None, calls=7):
    torch.manual_seed(seeded())
    eager = _Model(program)
    model = copy.deepcopy(eager)
    model.count = _counter()  # a copy of a function is the function
    jitted = thunder.jit(model, transforms=[transform()])
    for i in range(calls):
        x = torch.randn(3, 4)
        for m in (eager, model):
            between(m, i)
        expected, found = _called(eager, eager, x, 0.5 * i), _called(model, jitted, x, 0.5 * i)
        torch.testing.assert_close(found[:2], expected[:2], equal_nan=True)
        assert [type(v) for v in found[2]] == [type(v) for v in expected[2]]
        assert found[2] == [pytest.approx(v, rel=1e-6, nan_ok=True) if isinstance(v, int | float) else v for v in expected[2]]
    return thunder.cache_misses(jitted)


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
@pytest.mark.parametrize("program", ONE_FOR_ALL)
def test_one_trace_serves_all_numbers(program, transform):
    # one for the first numbers, one for all; another for each answer of a condition, and where another number begins to change
    more = {warms_up: 1, asks_each_third: 1, decays_by_functions: 2, moves_numbers_in_containers: 1}
    assert _compare(program, transform) <= 2 + more.get(program, 0)


@pytest.mark.parametrize("program", [counts_twice, compares_with_a_tensor, counts_in_containers])
def test_and_so_it_does_in_thunders_own_interpreter(program):
    """It spells out how arguments become lists and cells, which hands numbers on; so it is with Thunder's nightly build."""
    with native.switched_off():
        assert _compare(program, SubclassTransform, calls=4) <= 2


@pytest.mark.parametrize("program", FOR_EACH)
def test_what_is_used_for_what_it_is_has_a_trace_for_each_number(program):
    assert _compare(program, NormTransform) > 2


def test_what_python_raises_for_a_number_is_raised_in_its_call():
    _compare(catches_what_python_raises, NormTransform)


def test_numbers_that_others_set():
    def set_rate(model, i):
        model.rate = 1.0 + i
        model.linear.calls = -i

    def program(self, x, k):
        return self.linear(x) * self.rate + self.linear.calls

    assert _compare(program, NormTransform, set_rate) == 2


def test_numbers_that_others_set_where_functions_in_c_find_them():
    def set_numbers(model, i):
        model.stats["calls"] = model.history[0] = i // 2

    for program in (is_written_out_beside_it, is_compared_in_what_holds_it):
        assert _compare(program, NormTransform, set_numbers) >= 4  # one for each


def test_what_is_given_up_after_the_program_has_changed_nothing():
    def f(x, pair, seen):
        return x * {(pair, 2): 3}[pair, 2] * len(seen)

    def appending():
        seen = []
        return lambda x, pair: seen.append(None) or f(x, pair, seen)

    eager, jitted, x = appending(), thunder.jit(appending(), transforms=[SubclassTransform()]), torch.arange(3.0)
    for pair in ((1, 2), (1, 3), (1, 3), (2, 3)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AcquiredAnewWarning)
            torch.testing.assert_close(jitted(x, pair), eager(x, pair))


def test_numbers_of_a_class_that_others_set(monkeypatch):
    def set_times(model, i):
        monkeypatch.setattr(Times, "called", i)

    assert _compare(counts_in_variables, NormTransform, set_times) <= 3


@pytest.mark.parametrize(
    "values", [[1, 2, 2.5, 3, 4.0, True, 5], [0.0, -0.0, math.nan, math.inf, 1e300, -0.0, 3], [1, 2**70, 3, -(2**63), 5]]
)
def test_numbers_of_another_class_and_size(values):
    def set_calls(model, i):
        model.calls = values[i]

    def program(self, x, k):
        self.last = self.calls
        return self.linear(x) * (2.0**-70 * self.calls)

    _compare(program, SubclassTransform, set_calls, calls=len(values))


def test_what_is_only_written_is_not_looked_at():
    def program(self, x, k):
        y = self.linear(x)
        self.last = y.sum().item()
        return y

    def set_others(model, i):
        model.rate, model.calls, model.text = float(i), i, str(i)

    assert _compare(program, NormTransform, set_others) <= 3  # None at first, then a number; k is given


def test_many_numbers_used_for_what_they_are_are_said():
    jitted = thunder.jit(_Model(is_written), transforms=[NormTransform()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(19):
            jitted(torch.ones(1, 4))
    (said,) = [str(w.message) for w in caught if issubclass(w.category, AcquiredAnewWarning)]
    assert "(calls)" in said


class Held(torch.nn.Module):
    def forward(self, x):
        held = self.held
        if isinstance(held, dict):
            return x + held["rate"]
        return x * held[1] if isinstance(held, (tuple, list)) else x * len(held)


def test_a_number_was_where_another_container_is_now():
    model, x = Held(), torch.ones(2)
    jitted = thunder.jit(model, transforms=[SubclassTransform()])
    for held in ((1, 2), {"rate": 2}, (1, 3), [1, 4], {"rate": 5}, "four", [1, 2], {"rate": 7, "more": 1}, (1, 6)):
        model.held = held
        assert torch.equal(jitted(x), model(x)), held
