"""Objects of a user's own classes as inputs and outputs: made anew in each call, or written into the argument of the call."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from tests.seeds import seeded
from tests.within_norms import check_bounds
from thunder_norm import NormedTensor, RMSTensor, normed
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform
import thunder


def _jit(model):
    return thunder.jit(model, transforms=[NormTransform()])


@dataclasses.dataclass
class Entry:
    key: torch.Tensor
    value: torch.Tensor
    at: int


class Slotted:
    __slots__ = ("t", "unset")

    def __init__(self, t):
        self.t = t


class Named(OrderedDict):
    """A dict with an attribute."""


class Cache:
    def __init__(self, owner):
        self.keys, self.entries, self.length = [], [], 0
        self.owner, self.itself = owner, self
        self.by_length, self.recent, self.counts = {}, deque(maxlen=2), defaultdict(int)

    def add(self, k, v):
        self.keys.append(k)
        self.length += k.shape[0]
        self.by_length[self.length] = v
        self.recent.append(k)
        self.counts["adds"] += 1
        self.entries = [*self.entries, Entry(k, v, self.length)]
        self.last = self.entries[-1]
        self.slotted = Slotted(v)
        self.named = Named(k=k)
        self.named.note = ("v", v)


class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.v = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.settings = Slotted(None)

    def forward(self, x, cache=None):
        if cache is None:
            cache = Cache(self.settings)
        k, v = self.k(x), self.v(x).relu()
        cache.add(k, v)
        return torch.cat(cache.keys).sum(0), cache, [cache, cache.last]


def _plain(t):
    return t.backing if isinstance(t, NormedTensor) else t


def _assert_same_cache(found, expected, owner):
    assert type(found) is Cache and found.itself is found and found.owner is owner
    assert (found.length, list(found.by_length), found.counts) == (expected.length, list(expected.by_length), expected.counts)
    assert found.recent.maxlen == 2 and found.recent[-1] is found.keys[-1]
    assert found.last is found.entries[-1] and found.last.key is found.keys[-1]
    assert isinstance(found.slotted, Slotted) and not hasattr(found.slotted, "unset")
    assert type(found.named) is Named and found.named.note[1] is found.slotted.t
    pairs = [
        (found.keys, expected.keys),
        (found.by_length.values(), expected.by_length.values()),
        ([e.value for e in found.entries], [e.value for e in expected.entries]),
        (found.named.values(), expected.named.values()),
    ]
    for mine, theirs in pairs:
        torch.testing.assert_close([_plain(t) for t in mine], list(theirs))


@pytest.mark.parametrize("mode", ["real", "normed"])
def test_class_of_the_user(mode):
    torch.manual_seed(seeded(0))
    model = Step()
    jitted = _jit(model)
    call = normed(jitted) if mode == "normed" else jitted
    made = []
    for _ in range(2):  # the second time from Thunder's cache
        x = torch.randn(3, 4)
        total, cache, (again, last) = call(x)
        expected_total, expected, _ = model(x)
        for _ in range(3):
            assert again is cache and last is cache.last
            torch.testing.assert_close(_plain(total), expected_total)
            _assert_same_cache(cache, expected, model.settings)
            if mode == "normed":
                check_bounds([*cache.keys, *cache.by_length.values()])
            x = torch.randn(2, 4)
            total, same, (again, last) = call(x, cache)
            expected_total, expected, _ = model(x, expected)
            assert same is cache
        made.append(cache)
    assert made[0] is not made[1] and made[0].keys is not made[1].keys
    assert thunder.cache_misses(jitted) == 4


def _moved(ordered):
    ordered.move_to_end("out")
    return ordered


@dataclasses.dataclass
class Output(OrderedDict):
    """As the outputs of transformers: a dict and a dataclass."""

    value: torch.Tensor

    def __post_init__(self):
        self["value"] = self.value


RETURNED = {
    "ordered": lambda y: OrderedDict(out=y, aux=y * 2),
    "default": lambda y: defaultdict(list, a=[y], b=[y * 2]),
    "counter": lambda y: (y, Counter(a=3)),
    "deque": lambda y: deque([y, y + 1], maxlen=2),
    "set": lambda y: (y, {1, 2}),
    "ordered anew": lambda y: _moved(OrderedDict(out=y, aux=y * 2)),
    "empty": lambda y: [y, OrderedDict()],
    "user's dict": lambda y: UserDict(a=y),
    "derived": lambda y: Named(k=y),
    "ordered in ordered": lambda y: OrderedDict(b=OrderedDict(c=y), a=[y, 3, "x"], d=None),
    "in the items of a literal": lambda y: (y, {"a": OrderedDict(x=Entry(y, y * 2, 1)), "b": [deque([y])]}),
    "dataclass in ordered": lambda y: [OrderedDict(z=Output(y))],
    "ordered in dataclass": lambda y: Entry(OrderedDict(z=y), y, 2),
}


def _assert_same(found, expected):
    assert type(found) is type(expected) or isinstance(found, NormedTensor)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(_plain(found), expected)
    elif isinstance(expected, dict | UserDict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple | deque):
        for mine, theirs in zip(found, expected, strict=True):
            _assert_same(mine, theirs)
    elif dataclasses.is_dataclass(expected):
        _assert_same(vars(found), vars(expected))
    else:
        assert found == expected


@pytest.mark.parametrize("mode", ["real", "normed"])
@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
def test_container_of_any_class_as_result(returned, mode):
    torch.manual_seed(seeded(1))
    fc = torch.nn.Linear(4, 4)

    class Returning(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = fc

        def forward(self, x):
            return returned(self.fc(x))

    model = Returning()
    jitted = _jit(model)
    call = normed(jitted) if mode == "normed" else jitted
    for _ in range(2):  # the second time from Thunder's cache
        x = torch.randn(3, 4)
        _assert_same(call(x), model(x))
    assert thunder.cache_misses(jitted) == 1


@pytest.mark.parametrize("word", ['not "int"', "a'b\"c", "tab\tline\n", "\\", "'\"'\"", "\u2028{x}\0"])
def test_words_in_a_result_are_as_they_are(word):
    def program(x):
        return word, [(word, x * 2)], {word: word, "x": x}

    _, [(_, y)], _ = found = _jit(program)(torch.ones(2))
    assert torch.equal(y, torch.full((2,), 2.0))
    assert (found[0], found[1][0][0], list(found[2])) == (word, word, [word, "x"])
    assert found[2][word] == word


def test_one_container_at_two_places_of_a_result():
    def twice(x):
        held = OrderedDict(a=x + 1)
        return held, {"again": held}, Entry(held, held, 1)

    first, literal, entry = _jit(twice)(torch.ones(2))
    assert first is literal["again"] and entry.key is first and entry.value is first


def test_gradients_through_a_returned_object():
    model = Step()
    x = torch.randn(3, 4)
    _jit(model)(x)[1].last.value.sum().backward()
    found = model.v.weight.grad
    model.zero_grad()
    model(x)[1].last.value.sum().backward()
    torch.testing.assert_close(found, model.v.weight.grad)


def test_what_an_argument_holds_stays_the_arguments():
    class Pair:
        def __init__(self, x, other):
            self.x, self.other = x, other

    def pair(x, other):
        return Pair(x + 1, other)

    jitted = _jit(pair)
    for _ in range(2):
        other, x = Entry(torch.ones(2), torch.zeros(2), 1), torch.randn(2)
        found = jitted(x, other)
        assert found.other is other
        torch.testing.assert_close(found.x, x + 1)


def test_made_object_in_an_argument():
    class Holder:
        pass

    def fill(holder, x):
        holder.entry = Entry(x + 1, x * 2, 3)
        holder.entries = [holder.entry]
        return holder.entry, x.sin()

    jitted, kept = _jit(fill), []
    for x in (torch.randn(2), torch.randn(2)):
        holder = Holder()
        entry, _ = jitted(holder, x)
        assert holder.entry is entry and holder.entries[0] is entry
        torch.testing.assert_close(entry.key, x + 1)
        kept.append(entry)
    assert kept[0] is not kept[1]


def test_each_call_writes_into_its_own_argument():
    def fill(held, x):
        held["list"].append(x + 1)
        held["numbers"].append(x.shape[0])
        held["set"].add("seen")
        return x * 2

    jitted = _jit(fill)
    caches = [{"list": [], "numbers": [], "set": set()} for _ in range(3)]
    for cache in caches:
        x = torch.randn(2)
        jitted(cache, x)
        assert cache["numbers"] == [2] and cache["set"] == {"seen"} and len(cache["list"]) == 1
        torch.testing.assert_close(cache["list"][0], x + 1)
    assert thunder.cache_misses(jitted) == 1
    caches[0]["list"].clear()
    caches[0]["numbers"].clear()
    caches[0]["set"].clear()
    jitted(caches[1], torch.randn(2))
    assert caches[1]["numbers"] == [2, 2] and not caches[0]["list"]


def test_the_module_keeps_plain_tensors():
    class Remembers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.seen = torch.nn.Linear(4, 4), {}

        def forward(self, x):
            y = self.fc(x)
            self.seen["entry"] = Entry(y, y, 1)
            return y

    model, x = Remembers(), torch.randn(3, 4)
    out = normed(_jit(model))(x)
    entry = model.seen["entry"]
    assert type(entry.key) is torch.Tensor and entry.key is entry.value
    torch.testing.assert_close(entry.key, out.backing)


def test_what_cannot_be_made_anew_is_refused():
    class Locked:
        pass

    def make(x):
        held = Locked()
        held.x, held.event = x + 1, threading.Condition()
        return held

    with pytest.raises(UnsupportedOpError, match="cannot be made anew"):
        _jit(make)(torch.randn(2))


Two = namedtuple("Two", ["first", "second"])


@pytest.mark.parametrize("mode", ["real", "normed"])
def test_named_tuples_are_returned(mode):
    fc = torch.nn.Linear(4, 4)

    def program(x):
        y = fc(x)
        return Two(y, [Two(y.relu(), 3)])

    jitted = _jit(program)
    call = normed(jitted) if mode == "normed" else jitted
    for _ in range(2):
        x = torch.randn(2, 4)
        found, expected = call(x), program(x)
        assert type(found) is Two and type(found.second[0]) is Two and found.second[0].second == 3
        torch.testing.assert_close(_plain(found.first), expected.first)
        torch.testing.assert_close(_plain(found.second[0].first), expected.second[0].first)
    assert thunder.cache_misses(jitted) == 1


class Lines(list):
    pass


class Marks(set):
    pass


class Queue(deque):
    pass


def with_attributes(y):
    made, filled = Lines([y]), Lines()
    made.tag, filled.tag = y * 2, 3
    filled.append(y * 3)
    filled.tag = y * 4
    filled.extend([y])
    marks, queue = Marks([1]), Queue([y])
    marks.tag, queue.tag = y * 5, y * 6
    return made, {"filled": filled, "marks": marks, "queue": queue}, filled.tag + made.tag + marks.tag


@dataclasses.dataclass
class Answer(OrderedDict):
    """As those of transformers, with an attribute that is no field."""

    first: Any = None

    def __setattr__(self, name, value):
        super().__setitem__(name, value)
        super().__setattr__(name, value)


def with_one_more(y):
    answer = Answer(first=y)
    answer.more = [Entry(y * 2, y, 1)]
    return answer


@pytest.mark.parametrize("mode", ["real", "normed"])
def test_attributes_of_containers_that_are_returned(mode):
    torch.manual_seed(seeded(1))
    for f in (with_attributes, with_one_more):
        jitted = thunder.jit(f, transforms=[NormTransform()])
        for _ in range(2):
            x = torch.randn(3, 4)
            found, wanted = jitted(RMSTensor.of(x) if mode == "normed" else x), f(x)
            _assert_same(found, wanted)
            if f is with_attributes:
                tags, expected = ([c.tag for c in (r[0], *r[1].values())] for r in (found, wanted))
                _assert_same(tags, expected)
            else:
                _assert_same(vars(found), vars(wanted))


class _Tree:
    def __init__(self, held):
        super().__init__()  # nothing is held yet
        self.held = held


pytree.register_pytree_node(_Tree, lambda t: ([t.held], None), lambda leaves, _: _Tree(*leaves))


def test_an_object_of_a_class_that_is_registered_as_a_tree_is_made():
    def f(x):
        return _Tree(x * 2).held + 1

    x = torch.ones(2)
    assert torch.equal(thunder.jit(f, transforms=[NormTransform()])(x), f(x))
