"""Deques that programs are given, keep and change: what is read of them afterwards is eager mode's, in later calls too."""

import copy
from collections import deque
from collections.abc import Callable
from queue import Queue
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


def _last_but_changed(change: Callable[[deque], Any]) -> Callable[[deque], Any]:
    def program(q: deque) -> Any:
        said = change(q)
        return q[0] * 2, q[-1] * 3, len(q), said

    return program


def _swapped(q: deque) -> Any:
    q[0], q[2] = q[2], q[0]


def _replaced(q: deque) -> Any:
    q[0] = q[1]


def _dropped(q: deque) -> Any:
    del q[0]


def _unpacked(q: deque) -> Any:
    x, y, z = q
    return x + y * z


_PROGRAMS: dict[str, Callable[[deque], Any]] = {
    "append": _last_but_changed(lambda q: q.append(q[0] + q[1])),
    "append what is made": _last_but_changed(lambda q: q.append(torch.ones(3))),
    "appendleft": _last_but_changed(lambda q: q.appendleft(q[1] * 2)),
    "extend": _last_but_changed(lambda q: q.extend([x * 2 for x in q])),
    "rotate": _last_but_changed(lambda q: q.rotate(1)),
    "reverse": _last_but_changed(lambda q: q.reverse()),
    "popleft": _last_but_changed(lambda q: q.popleft() * 5),
    "pop": _last_but_changed(lambda q: q.pop() * 5),
    "del": _last_but_changed(_dropped),
    "assigned": _last_but_changed(_replaced),
    "swapped": _last_but_changed(_swapped),
    "in place": _last_but_changed(lambda q: q[1].mul_(2)),
    "copied": lambda q: (copy.copy(q).popleft() * 2, q[0] * 3),
    "iterated over": lambda q: ([x * i for i, x in enumerate(q)], [x + y for x, y in zip(q, reversed(q), strict=True)]),
    "summed": lambda q: sum(q),
    "listed": lambda q: (torch.stack(list(q)), torch.cat(tuple(q))),
    "unpacked": _unpacked,
}


def _items(of_wrappers: bool) -> list[torch.Tensor]:
    return [TwoTensor(torch.rand(3), torch.rand(3)) if of_wrappers else torch.rand(3) for _ in range(3)]


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
@pytest.mark.parametrize("of_wrappers", [False, True], ids=["plain", "wrappers"])
@pytest.mark.parametrize("name", _PROGRAMS)
def test_items_stand_where_they_do_in_eager_mode(name: str, of_wrappers: bool, transform: type):
    program = _PROGRAMS[name]
    jitted = thunder.jit(lambda q: program(q), transforms=[transform()])
    for seed in range(3):
        torch.manual_seed(seeded(seed))
        items = _items(of_wrappers)
        want, got = (deque(copy.deepcopy(items), maxlen=4) for _ in range(2))
        assert_same(jitted(got), program(want))
        assert_same(list(got), list(want))
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 2)


class _Remembering(nn.Module):
    """A layer that adds its last outputs."""

    def __init__(self):
        super().__init__()
        self.last: deque = deque(maxlen=2)
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) + sum(h * 0.5 for h in self.last)
        self.last.append(y.detach())
        return y


def test_what_a_module_remembers():
    torch.manual_seed(seeded(0))
    module = _Remembering()
    jitted = thunder.jit(copy.deepcopy(module), transforms=[SubclassTransform()])
    for _ in range(5):
        x = torch.rand(2, 3)
        torch.testing.assert_close(jitted(x), module(x))
    torch.testing.assert_close(list(jitted.last), list(module.last))
    assert thunder.cache_hits(jitted) > 0


def test_tensors_that_stand_at_two_places():
    def program(q: deque, t: torch.Tensor) -> Any:
        y = q[0] * 2
        q.rotate(1)
        t.mul_(3)
        return y, q[0] + t, q[1] + 1

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for is_one in (True, False, True):
        torch.manual_seed(seeded(0))
        first, second, third = torch.rand(3, 2)
        calls = [copy.deepcopy((first, second, third)) for _ in range(2)]
        want, got = ((deque([a, b]), a if is_one else c) for a, b, c in calls)
        assert_same(list(jitted(*got)), list(program(*want)))
    assert thunder.cache_misses(jitted) == 2


def test_items_with_tensors_inside():
    def program(q: deque) -> Any:
        state, reward, held = q[-1]
        q.append((state * 2, reward + 1, {"r": held["r"] + 1}))
        return q[0][0] * q[0][1], q[-1][2]["r"], [x[1] for x in q]

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for reward in (1, 2, 1):
        torch.manual_seed(seeded(0))
        items = [(torch.rand(2), reward + i, {"r": torch.rand(2)}) for i in range(3)]
        want, got = (deque(copy.deepcopy(items), maxlen=3) for _ in range(2))
        assert_same(list(jitted(got)), list(program(want)))
        assert_same(list(got), list(want))


_KEPT: deque = deque()


def _rotating(x: torch.Tensor) -> Any:
    _KEPT.rotate(1)
    return _KEPT[0] * 2 + x


def _moving_on(x: torch.Tensor) -> Any:
    _KEPT.append(_KEPT.popleft() * 1)
    return _KEPT[0] * 2 + x


def test_what_is_kept_between_calls():
    outcomes = []
    for call in (_moving_on, thunder.jit(_moving_on, transforms=[SubclassTransform()])):
        torch.manual_seed(seeded(0))
        _KEPT.clear()
        _KEPT.extend(torch.rand(3, 2))
        outcomes.append([[call(torch.ones(2)), *_KEPT] for _ in range(4)])
    assert_same(outcomes[1], outcomes[0])


def test_what_is_kept_and_only_moved_is_refused():
    torch.manual_seed(seeded(0))
    kept = list(torch.rand(3, 2))
    _KEPT.clear()
    _KEPT.extend(kept)
    with pytest.raises(UnsupportedOpError, match="is taken out of a list or dict that was there before the call"):
        thunder.jit(_rotating, transforms=[SubclassTransform()])(torch.ones(2))
    assert all(a is b for a, b in zip(_KEPT, kept, strict=True))


def test_a_queue_that_is_given():
    def program(q: Queue) -> Any:
        x = q.get()
        q.put(x * 2)
        return q.get() * 3, q.qsize()

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for seed in range(2):
        torch.manual_seed(seeded(seed))
        given: list[Queue] = [Queue(), Queue()]
        for x in torch.rand(2, 3):
            for q in given:
                q.put(x.clone())
        assert_same(jitted(given[0]), program(given[1]))
        assert_same(list(given[0].queue), list(given[1].queue))


_OF_VIEWS: dict[str, Callable[[Any], Any]] = {
    "subscripts": lambda m: m["a"] * 2,
    "values": lambda m: [x * 2 for x in m.values()],
    "items": lambda m: [(name, x * 2) for name, x in m.items()],
    "get": lambda m: m.get("a") * 2,
    "iterated over": lambda m: [m[name] * 2 for name in m],
    "put into a dict": lambda m: [x * 2 for x in {**m, **dict(m)}.values()],
    "keywords": lambda m: (lambda a, b: a * b)(**m),
    "copied": lambda m: m.copy()["b"] * 1,
    "joined": lambda m: (m | {"c": 1})["b"] * len(m),
    "written into": lambda m: (m["b"].mul_(2), m["a"] + 1),
}


def _view(**given: float) -> MappingProxyType:
    found = {name: torch.full((3,), value) for name, value in given.items()}
    found["b"] = TwoTensor(found["b"], found["b"] + 1)
    return MappingProxyType(found)


@pytest.mark.parametrize("name", _OF_VIEWS)
def test_what_is_in_a_view_of_a_dict_is_what_is_there_in_each_call(name: str):
    program = _OF_VIEWS[name]
    jitted = thunder.jit(lambda m: program(m), transforms=[SubclassTransform()])
    for given in ({"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 4.0}, {"b": 2.0, "a": 1.0}):
        got, want = _view(**given), _view(**given)
        assert_same((jitted(got), dict(got)), (program(want), dict(want)))


def test_a_view_that_is_global_is_read_in_each_call():
    held = {"a": torch.ones(3), "b": torch.zeros(3)}
    view = MappingProxyType(held)
    program = lambda x: [x * y for y in view.values()]  # noqa: E731 - what is jitted
    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for value in (1.0, 2.0):
        held["a"] = torch.full((3,), value)
        assert_same(jitted(torch.ones(3)), program(torch.ones(3)))
    held["c"] = torch.ones(3)
    assert_same(jitted(torch.ones(3)), program(torch.ones(3)))
