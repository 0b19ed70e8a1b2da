"""State that a program reads and moves on by itself: counters in variables, iterators; each call has eager PyTorch's."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import random
import sys
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import thunder_norm
from tests.seeds import crossed, seeded
from thunder_norm.errors import AcquiredAnewWarning, UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder


def in_a_closure() -> Callable:
    times = 0

    def f(x):
        nonlocal times
        times += 1
        return x * times

    return f


def in_a_global() -> Callable:
    scope = {"times": 0}
    exec("def f(x):\n    global times\n    times = times + 1\n    return x * times", scope)
    return scope["f"]


def of_words() -> Callable:
    name = "a"

    def f(x):
        nonlocal name
        name += "b"
        return x * len(name)

    return f


def iterates(iterator) -> Callable:
    def f(x):
        return x * next(iterator)

    return f


def sums(iterator) -> Callable:
    def f(x):
        return x * sum(itertools.islice(iterator, 2))

    return f


def taken_from_a_list() -> Callable:
    left = [3, 2]

    def f(x):
        while left:
            x = x * left.pop()
        return x

    return f


def taken_from_a_dict() -> Callable:
    """A registry whose entries are made when they are asked for first."""
    waiting, made = {"a": [("one", lambda: 2.0)], "b": [("two", lambda: 3.0)]}, {}

    def f(x):
        for key in ("a", "b", "c"):
            if key in waiting:
                for name, make in waiting[key]:
                    made[name] = make()
                del waiting[key]
        return x * made["two"]

    return f


def cleared() -> Callable:
    numbers = {"a": 5}

    def f(x):
        total = sum(numbers.values()) if numbers else 1
        numbers.clear()
        return x * total

    return f


def appended() -> Callable:
    history = []

    def f(x):
        history.append(2)
        return x * sum(history) * len(history)

    return f


def put_into(kept, put) -> Callable:
    def f(x):
        put(kept)
        return x * len(kept)

    return f


def counted() -> Callable:
    times = Counter()

    def f(x):
        times["calls"] += 1
        return x * times["calls"]

    return f


def emptied_with_a_default() -> Callable:
    times = Counter("aab")

    def f(x):
        x = x * (1 + sum(times.values()))
        times.clear()
        return x * (2 + times["a"])

    return f


def taken_from_a_class_derived_from_dict() -> Callable:
    class Backwards(OrderedDict):
        def __iter__(self):
            return reversed(list(super().__iter__()))

    left = Backwards(a=2.0, b=3.0)

    def f(x):
        x = x * len(left)
        left.clear()
        return x

    return f


def of_a_class() -> Callable:
    class Layer:
        times = 0

        def __call__(self, x):
            type(self).times += 1
            return x * self.times

    layer = Layer()
    return lambda x: layer(x)


def kept_after_the_first_call() -> Callable:
    kept = {}

    def f(x):
        if "size" not in kept:
            kept["size"] = x.shape[0]
            return x * 10
        return x * kept["size"]

    return f


MAKES = {
    "taken from a list": taken_from_a_list,
    "taken from a dict": taken_from_a_dict,
    "cleared": cleared,
    "appended": appended,
    "put into a set": lambda: put_into(set(), lambda kept: kept.add(len(kept))),
    "put into a queue": lambda: put_into(deque(maxlen=2), lambda kept: kept.append(1)),
    "put into a dict": lambda: put_into({}, lambda kept: kept.update({len(kept): 1})),
    "counted": counted,
    "emptied, with a default": emptied_with_a_default,
    "taken from a class derived from dict": taken_from_a_class_derived_from_dict,
    "a counter of a class": of_a_class,
    "kept after the first call": kept_after_the_first_call,
    "a counter in a closure": in_a_closure,
    "a counter in a global": in_a_global,
    "a word in a closure": of_words,
    "an iterator of a list": lambda: iterates(iter([2, 3, 4])),
    "a generator": lambda: iterates(n * n for n in range(2, 5)),
    "numbers without an end": lambda: iterates(itertools.count(1)),
    "a cycle": lambda: iterates(itertools.cycle([2, 3])),
    "pairs": lambda: iterates(map(sum, zip([1, 2, 3], [4, 5, 6], strict=True))),
    "a generator that another function asks": lambda: sums(n for n in range(9)),
}
WAYS = {
    "NormTransform": lambda f: thunder.jit(f, transforms=[NormTransform()]),
    "SubclassTransform": lambda f: thunder.jit(f, transforms=[SubclassTransform()]),
    "CheckpointTransform": lambda f: thunder.jit(f, transforms=[CheckpointTransform()]),
    "inductor": lambda f: thunder.jit(f, executors=[thunder_norm.executors.inductor]),
}


@pytest.mark.parametrize(("make", "way"), crossed(MAKES, WAYS))
def test_each_call_moves_on(make, way):
    eager, jitted = MAKES[make](), WAYS[way](MAKES[make]())
    x = torch.arange(3.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [jitted(x) for _ in range(3)]
    said = [w for w in caught if w.category is AcquiredAnewWarning and "anew in each call" in str(w.message)]
    assert said or thunder.cache_misses(jitted) == 2  # numbers alone: for the first, and for all
    for result in results:
        torch.testing.assert_close(result, eager(x))


@pytest.mark.parametrize(
    "change",
    [lambda a: a.__iadd__(1), lambda a: np.multiply(a, 2, out=a), lambda a: a[1:].fill(a[0] + 1)],
    ids=["all", "out=", "a view"],
)
def test_arrays_of_numpy_are_changed_in_each_call(change):
    def f(x, o):
        change(o.array)
        return x * o.array[-1] + torch.from_numpy(o.array)

    ours, theirs, x = SimpleNamespace(array=np.ones(3)), SimpleNamespace(array=np.ones(3)), torch.arange(3.0)
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AcquiredAnewWarning)
            torch.testing.assert_close(jitted(x, ours), f(x, theirs))
        assert (ours.array == theirs.array).all()


def test_what_changes_nothing_any_more_is_acquired_once_more():
    jitted, x = thunder.jit(kept_after_the_first_call(), transforms=[NormTransform()]), torch.arange(3.0)
    with pytest.warns(AcquiredAnewWarning):
        results = [jitted(x) for _ in range(4)]
    torch.testing.assert_close(results, [x * 10, x * 3, x * 3, x * 3])
    assert thunder.cache_misses(jitted) == 2


def test_what_is_put_there_anew_with_the_same_in_it_is_no_change():
    class Config:
        def __init__(self, size):
            self.size, self.scale, self.itself = size, [2.0, {"a": (1, lambda: size)}], self

    kept = {}

    def f(x):
        kept["config"] = Config(3)
        return x * kept["config"].scale[0]

    jitted, x = thunder.jit(f, transforms=[NormTransform()]), torch.arange(3.0)
    with pytest.warns(AcquiredAnewWarning):
        assert all(torch.equal(jitted(x), x * 2) for _ in range(4))
    assert thunder.cache_misses(jitted) == 2


@pytest.mark.parametrize("of", [lambda x: x.shape, lambda x: x.size(), lambda x: (x.shape, x.dtype), lambda x: x.max(0)[1:1]])
def test_sizes_that_are_kept_are_alike_in_each_call(of):
    kept = SimpleNamespace(last=None)

    def f(x):
        kept.last = of(x)
        return x * 2

    jitted, x = thunder.jit(f, transforms=[NormTransform()]), torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AcquiredAnewWarning)
        assert all(torch.equal(jitted(x), x * 2) for _ in range(4))
    assert thunder.cache_misses(jitted) <= 2 and kept.last == of(x)


def test_caches_of_installed_packages_are_filled_in_one_acquisition(monkeypatch):
    """As those of einops and einx: a global variable of theirs has another entry after the first call, and lacks one."""
    package = ModuleType("a_package_with_a_cache")
    package.__file__ = "/somewhere/site-packages/a_package_with_a_cache.py"
    monkeypatch.setitem(sys.modules, package.__name__, package)
    source = "waiting, made = {'a': 2.0}, {}\ndef scale(x):\n    if 'a' in waiting:\n        made['a'] = waiting.pop('a')\n    return x * made['a']"
    exec(source, vars(package))
    jitted, x = thunder.jit(lambda x: package.scale(x), transforms=[NormTransform()]), torch.arange(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AcquiredAnewWarning)
        assert all(torch.equal(jitted(x), x * 2) for _ in range(3))
    assert thunder.cache_misses(jitted) == 1


@pytest.mark.parametrize("take", [lambda kept: kept.pop(0), lambda kept: kept.pop()])
def test_a_tensor_that_is_taken_out_of_a_list_is_refused(take):
    kept = [torch.ones(3), torch.zeros(3)]
    with pytest.raises(UnsupportedOpError, match="taken out of a list"), pytest.warns(AcquiredAnewWarning):
        thunder.jit(lambda x: x + take(kept), transforms=[NormTransform()])(torch.ones(3))


def test_what_asks_an_iterator_for_nothing_is_acquired_once():
    given = iter([1, 2])
    jitted = thunder.jit(
        lambda x, o: x * 2 if isinstance(o, list) or callable(o) or hasattr(o, "k") else x * 3, transforms=[NormTransform()]
    )
    x = torch.ones(2)
    assert all(torch.equal(jitted(x, given), x * 3) for _ in range(3))
    assert thunder.cache_misses(jitted) == 1 and next(given) == 1


def test_what_a_program_makes_and_uses_up_is_acquired_once():
    jitted = thunder.jit(
        lambda x: functools.reduce(lambda a, b: a * b, (n for n in iter([2, 3])), x), transforms=[NormTransform()]
    )
    x = torch.ones(2)
    assert all(torch.equal(jitted(x), x * 6) for _ in range(3))
    assert thunder.cache_misses(jitted) == 1


def _writes_a_column(x):  # torch's own operation, with what lies in which memory: such a program is acquired twice
    norms, mean = torch.zeros(3, 2), torch.zeros(3, 2)
    torch.norm(x, 2, 1, False, out=norms[:, 1])
    torch.mean(x, 1, out=mean[:, 1])
    return norms + mean


_OF_PYTHON, _OF_NUMPY, _OLD = random.Random(seeded(1)), np.random.default_rng(seeded(1)), np.random.RandomState(seeded(1))
_COUNT: contextvars.ContextVar[int] = contextvars.ContextVar("_COUNT", default=0)


def _count():
    _COUNT.set(_COUNT.get() + 1)
    return _COUNT.get()


_DRAWS = {
    "Python": (random.random, lambda: random.seed(2)),
    "a generator of Python": (lambda: _OF_PYTHON.random(), lambda: _OF_PYTHON.seed(2)),
    "NumPy": (lambda: float(np.random.rand()), lambda: np.random.seed(2)),
    "a generator of NumPy": (
        lambda: float(_OF_NUMPY.random()),
        lambda: setattr(_OF_NUMPY.bit_generator, "state", np.random.PCG64(2).state),
    ),
    "a RandomState": (lambda: float(_OLD.rand()), lambda: _OLD.seed(2)),
    "a context variable": (_count, lambda: _COUNT.set(0)),
}


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.AcquiredAnewWarning")
@pytest.mark.parametrize("name", _DRAWS)
def test_what_is_acquired_twice_draws_once(name):
    draw, seed = _DRAWS[name]

    def f(x):
        first = draw()
        return _writes_a_column(x) * draw(), first

    x = torch.arange(12.0).reshape(3, 4)
    seed()
    expected = [(f(x), draw()) for _ in range(2)]
    seed()
    jitted = thunder.jit(f, transforms=[NormTransform()])
    torch.testing.assert_close([(jitted(x), draw()) for _ in range(2)], expected)


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.AcquiredAnewWarning")
def test_an_iterator_of_what_is_acquired_twice_is_refused():
    items = iter(range(9))
    with pytest.raises(UnsupportedOpError, match="an iterator that was there"):
        thunder.jit(lambda x: next(items) * _writes_a_column(x), transforms=[NormTransform()])(torch.ones(3, 4))


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.AcquiredAnewWarning")
@pytest.mark.parametrize("change", ["sort()", "reverse()", "pop(0)", "insert(0, 7)", "append(l.pop(0))"])
@pytest.mark.parametrize("use", ["list(l)", "l.copy()", "[*l]", "list(reversed(l))", "{v: v for v in l}"])
def test_numbers_of_a_list_are_returned_where_the_program_has_put_them(change, use):
    def made():
        names: dict = {}
        exec(f"l = [3, 1, 2, 5, 4, 6]\ndef program(x):\n    l.{change}\n    return {use}, x", names)
        return names["program"], names["l"]

    (program, left), (expected, expected_left) = made(), made()
    jitted, x = thunder.jit(program, transforms=[SubclassTransform()]), torch.ones(2)
    for _ in range(3):
        assert jitted(x)[0] == expected(x)[0]
        assert left == expected_left


_entries: list = []


class _Late:
    def close(self):
        _entries.append("late")


def test_what_a_failed_acquisition_has_left_is_what_it_was_in_the_next():
    """A function that is called in the middle finds variables that are others by then; they are not what they were before the call."""

    def f(x, d):
        global _entries
        _entries = []
        with contextlib.closing(_Late()):
            _entries.append(x.sum() * 2)
        d.update(a=2, e=13)

    jitted, x, given = thunder.jit(f, transforms=[NormTransform()]), torch.ones(2), {"a": 1, "b": 4}
    for n in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AcquiredAnewWarning)
            jitted(x + n, given)
        assert repr(_entries) == repr([(x + n).sum() * 2, "late"]) and given == {"a": 2, "b": 4, "e": 13}
