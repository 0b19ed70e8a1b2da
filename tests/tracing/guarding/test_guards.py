"""A trace is not run again where what the program asked of its surroundings is other than it was."""

import array
import collections
import enum
import functools
import gc
import io
import logging
import random
import re
import warnings
import weakref
from types import SimpleNamespace
from typing import TypedDict

import numpy as np
import pytest
import torch
from torch import nn

from tests.seeds import crossed, seeded
from thunder_norm.errors import AcquiredAnewWarning, UnsupportedOpError
from thunder_norm.transforms import NormTransform, SubclassTransform, grad
import thunder

X = torch.tensor([1.0, 2.0])


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


class Options(TypedDict):
    """A class that raises an error where it is asked which objects are its own."""

    scale: float


# a function of a tensor and one argument, and the arguments of calls in order
ARGUMENTS = {
    "None and a tensor": (lambda x, m: x if m is None else x * m, [None, X, None, X * 2]),
    "None and a number": (lambda x, m: x if m is None else x * m, [None, 3.0, 2.0]),
    "None inside": (lambda x, m: x if m[0]["a"] is None else x * m[0]["a"], [[{"a": None}], [{"a": X}]]),
    "None and False": (lambda x, m: x * 2 if m is None else x, [None, False]),
    "an empty dict and None": (lambda x, m: x if m[0] is None else x * (2 if m[0] else 3), [[{}], [None], [{"a": 1}]]),
    "length of a list": (lambda x, m: x * len(m), [[1, 2], [1, 2, 3], [1]]),
    "length of a tuple": (lambda x, m: x * len(m), [(1, 2), (1, 2, 3), (1,)]),
    "list and tuple": (lambda x, m: x * (2 if isinstance(m, list) else 3), [[1], (1,)]),
    "dict or a class that does not say": (
        lambda x, m: x * (2 if isinstance(m, (dict, Options)) else 3),
        [{"scale": 1.0}, {"scale": 2.0}],
    ),
    "sum": (lambda x, m: x * sum(m), [[1, 2], [1, 5], [1]]),
    "max of nested": (lambda x, m: x * max(m)[1], [[(1, 2), (0, 9)], [(1, 3), (0, 9)], [(1, 3), (2, 9)]]),
    "max of three, by a key": (lambda x, m: x * max(m, -2, 1, key=abs), [3, -4, 3.0]),
    "max of words": (lambda x, m: x * len(max(m, "bc")), ["a", "def"]),
    "min or a default": (lambda x, m: x * min(m, default=4), [[], [3, 2], [3, 1]]),
    "min of what a generator makes": (lambda x, m: x * min(v + 1 for v in m), [[3, 2], [3, 1]]),
    "sorted": (lambda x, m: x * sorted(m)[0], [[3, 2], [3, 1]]),
    "equality": (lambda x, m: x * (2 if m == [1, 2] else 3), [[1, 2], [1, 3]]),
    "truth": (lambda x, m: x * (2 if m else 3), [[], [1], {}]),
    "in a list": (lambda x, m: x * (2 if 3 in m else 5), [[1], [1, 3], []]),
    "in a dict": (lambda x, m: x * (2 if "b" in m else 5), [{"a": 1}, {"a": 1, "b": 1}]),
    "get": (lambda x, m: x * m.get("b", 5), [{"a": 1}, {"a": 1, "b": 7}, {"b": 6}]),
    "keys": (lambda x, m: x * sum(len(k) for k in m), [{"a": 1}, {"a": 1, "bb": 1}]),
    "values": (lambda x, m: x * sum(v for v in m.values()), [{"a": 1}, {"a": 1, "bb": 1}]),
    "ordered keys": (lambda x, m: x * len(m), [collections.OrderedDict(a=1), collections.OrderedDict(a=1, b=2)]),
    "tensors": (lambda x, m: torch.stack([*m, x]).sum(0), [[X], [X, X * 2]]),
    "loop": (lambda x, m: sum([x * v for v in m], x), [[2.0], [2.0, 3.0], []]),
    "function": (lambda x, m: m(x), [torch.sin, torch.cos, lambda x: x * 3]),
    "dtype": (lambda x, m: x.to(m), [torch.float32, torch.float64]),
    "member of an enum": (lambda x, m: x * (2 if m is Color.RED else 3), [Color.RED, Color.BLUE]),
    "flags": (lambda x, m: x * m + torch.full((2,), m), [Access.READ, Access.WRITE, Access.READ | Access.WRITE, Access(0)]),
    "array": (lambda x, m: x * torch.tensor(m) + x.new_tensor(m), [array.array("d", [1, 2]), array.array("d", [3, 2])]),
    "bytes": (lambda x, m: x * torch.as_tensor(m), [bytearray(b"ab"), memoryview(array.array("i", [1, 2])), range(2)]),
    "class": (lambda x, m: x * m(3.5), [int, float, abs]),
    "attribute that is not there": (lambda x, m: x * getattr(m, "a", 5), [SimpleNamespace(), SimpleNamespace(a=2)]),
    "hasattr": (lambda x, m: x * (2 if hasattr(m, "a") else 3), [SimpleNamespace(), SimpleNamespace(a=2)]),
    "attribute of None": (lambda x, m: x if m.a is None else x * m.a, [SimpleNamespace(a=None), SimpleNamespace(a=X)]),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_calls_with_other_arguments(name):
    f, arguments = ARGUMENTS[name]
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for m in (*arguments, *arguments):
        torch.testing.assert_close(jitted(X, m), f(X, m))
    assert thunder.cache_misses(jitted) <= len(arguments)  # of the second round none


FACTORS, TABLE, MASK = [2.0, 3.0], {}, None


def _helper(x):
    return x * 2


def test_globals_that_change(monkeypatch):
    def f(x):
        for v in FACTORS:
            x = x * v
        return _helper(x if MASK is None else x * MASK) + ("k" in TABLE)

    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    names = f.__globals__
    changes = [
        lambda: None,
        lambda: monkeypatch.setitem(names, "FACTORS", [*FACTORS, 4.0]),
        lambda: FACTORS.__setitem__(0, 5.0),
        lambda: monkeypatch.setitem(TABLE, "k", 1),
        lambda: monkeypatch.setitem(names, "MASK", X),
        lambda: monkeypatch.setitem(names, "_helper", torch.sin),
    ]
    for change in changes:
        change()
        torch.testing.assert_close(jitted(X), f(X))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = None
        self.activation = torch.sin
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.options = SimpleNamespace(names=["a"], table={})

    def forward(self, x):
        x = self.layers(x if self.scale is None else x * self.scale)
        return self.activation(x) * len(self.options.names) + self.options.table.get("shift", 0.0)


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_a_module_that_changes(transform):
    model = Model()
    jitted = thunder.jit(model, transforms=[transform()])
    changes = [
        lambda: None,
        lambda: setattr(model, "scale", 3.0),
        lambda: setattr(model, "scale", X),
        lambda: setattr(model, "activation", torch.cos),
        lambda: model.options.names.append("b"),
        lambda: model.options.table.update(shift=2.0),
        lambda: model.layers.append(nn.Sigmoid()),
        lambda: model.layers[0].register_forward_hook(lambda module, args, out: out * 2),
    ]
    for n, change in enumerate(changes, 1):
        change()
        for _ in range(2):
            torch.testing.assert_close(jitted(X), model(X))
        assert thunder.cache_misses(jitted) <= n


def test_an_empty_dict_of_a_module_is_not_nothing():
    model = Model()
    jitted = thunder.jit(lambda x: x * (2 if model.options.table else 3), transforms=[SubclassTransform()])
    jitted(X)
    model.options.table = None
    jitted(X)
    assert thunder.cache_misses(jitted) == 2


class OfGlobals(nn.Module):
    @functools.cached_property
    def costly(self):
        self.computed = getattr(self, "computed", 0) + 1
        return torch.ones(2)

    def forward(self, x):
        return _helper(x if MASK is None else x * MASK)


def test_globals_of_a_module(monkeypatch):
    model = OfGlobals()
    jitted = thunder.jit(model, transforms=[SubclassTransform()])
    names = OfGlobals.forward.__globals__
    for change in (
        lambda: None,
        lambda: monkeypatch.setitem(names, "MASK", X),
        lambda: monkeypatch.setitem(names, "_helper", torch.sin),
    ):
        change()
        torch.testing.assert_close(jitted(X), model(X))
    assert not hasattr(model, "computed")


class Slotted:
    __slots__ = ("a",)


def test_slots():
    slotted = Slotted()
    slotted.a = None
    jitted = thunder.jit(lambda x: x if slotted.a is None else x * slotted.a, transforms=[SubclassTransform()])
    for a in (None, X, None):
        slotted.a = a
        torch.testing.assert_close(jitted(X), X if a is None else X * a)


class Cache:
    kept = None


def test_what_the_program_itself_keeps():
    cache = Cache()

    def f(x):
        cache.kept = x * 1 if cache.kept is None else cache.kept + x
        return cache.kept.sum()

    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    assert [jitted(X).item() for _ in range(4)] == [3, 6, 9, 12]
    assert thunder.cache_misses(jitted) == 2


def test_transformed_functions_are_guarded():
    def f(x, mask=None):
        return (x if mask is None else x * mask).sum()

    for mask in (None, X, None):
        torch.testing.assert_close(grad(f)(X, mask), torch.func.grad(f)(X, mask))


MAKES = {
    "a dict": (lambda t: {"a": t}, lambda c: c["a"]),
    "a list": (lambda t: [t], lambda c: c[0]),
    "a tuple": (lambda t: (t,), lambda c: c[0]),
    "a tensor": (lambda t: t, lambda c: c),
    "an object": (lambda t: SimpleNamespace(a=t), lambda c: c.a),
}


@pytest.mark.parametrize("make", MAKES)
def test_one_object_at_two_places(make):
    """Of two places that were one object only one is read: the next call may have two."""
    make, get = MAKES[make]
    known, other = make(X), make(X * 2)

    def closed_over(y):
        return get(y).sin() * get(known)

    def of_two(y, z):
        return get(y).sin() * get(z)

    for transform in (SubclassTransform, NormTransform):
        jitted, pair = (thunder.jit(f, transforms=[transform()]) for f in (closed_over, of_two))
        for y in (known, other, known):
            torch.testing.assert_close(jitted(y), closed_over(y))
        for y, z in ((known, known), (known, other), (other, known), (other, other)):
            torch.testing.assert_close(pair(y, z), of_two(y, z))


@pytest.mark.parametrize("make", ["a dict", "a list", "a tuple", "a tensor"])
def test_one_object_at_two_places_of_a_transformed_function(make):
    make, get = MAKES[make]
    known, other = make(X), make(X * 2)

    def loss(y):
        return (get(y).sin() * get(known)).sum()

    gradient = grad(loss)
    for y in (known, other, known):
        torch.testing.assert_close(get(gradient(y)), get(torch.func.grad(loss)(y)))


def test_what_a_transformed_function_closes_over_is_guarded():
    mask, several = None, [X]

    def loss(x):
        return ((x * x if mask is None else x * x * mask) * several[0] * len(several)).sum()

    gradient = grad(loss)
    torch.testing.assert_close(gradient(X), torch.func.grad(loss)(X))
    mask = X * 3
    torch.testing.assert_close(gradient(X), torch.func.grad(loss)(X))
    several.append(X)
    torch.testing.assert_close(gradient(X), torch.func.grad(loss)(X))
    mask = None
    torch.testing.assert_close(gradient(X), torch.func.grad(loss)(X))


def test_nothing_is_guarded_twice_or_for_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for _ in range(3):
        jitted(torch.randn(4, 2))
    assert thunder.cache_misses(jitted) == 1
    assert str(thunder.last_prologue_traces(jitted)[0]).count("check_surroundings") == 1


def test_a_plain_compilation_is_left_to_thunder():
    jitted = thunder.jit(lambda x, m: x if m is None else x * m)
    jitted(X, None)
    assert "check_surroundings" not in str(thunder.last_prologue_traces(jitted)[0])


DRAWS = [random.random, lambda: random.randint(0, 10**6), lambda: float(np.random.rand()), lambda: random.choice(range(10**6))]


@pytest.mark.parametrize(("draw", "transform"), crossed(DRAWS, [SubclassTransform, NormTransform]))
def test_random_numbers_of_python_are_drawn_in_each_call(transform, draw):
    def f(x):
        return x * draw()

    def three(g):
        random.seed(seeded(5))
        np.random.seed(seeded(5))
        return [g(torch.ones(2)) for _ in range(3)]

    jitted = thunder.jit(f, transforms=[transform()])
    with pytest.warns(AcquiredAnewWarning, match="acquired anew in each call") as warned:
        found = three(jitted)
    texts = [str(w.message) for w in warned if w.category is AcquiredAnewWarning]
    assert len(texts) == 3 and all(".py:" in text for text in texts)  # one for each acquisition, with its line
    torch.testing.assert_close(found, three(f))
    assert len(thunder.compile_stats(jitted).interpreter_cache) == 0  # nothing is kept that no call can use


def test_messages_are_logged_when_a_trace_is_acquired():
    """As what a program prints: the time that stands in a message is not the program's."""

    logger, written = logging.Logger("a program's"), io.StringIO()
    logger.addHandler(logging.StreamHandler(written))

    def f(x):
        logger.warning("of shape %s", tuple(x.shape))
        return x * 2

    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    with warnings.catch_warnings():
        warnings.simplefilter("error", AcquiredAnewWarning)
        torch.testing.assert_close([jitted(X), jitted(X)], [X * 2, X * 2])
    assert thunder.cache_misses(jitted) == 1
    assert written.getvalue() == f"of shape {tuple(X.shape)}\n"


def test_a_generator_that_the_program_makes_says_the_same_each_time():
    def f(x):
        return x * random.Random(seeded(3)).random()

    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    torch.testing.assert_close([jitted(X), jitted(X)], [f(X), f(X)])
    assert thunder.cache_misses(jitted) == 1


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.tied = self.layers[0]
        self.layers[2].bias = self.layers[0].bias
        self.layers[2].register_parameter("absent", None)

    def forward(self, kwargs):
        names = [[name for name, _ in members(**kwargs)] for members in (self.named_parameters, self.named_buffers)]
        return names, [p * 1 for p in self.parameters()], [b * 1 for b in self.layers.buffers()]


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"prefix": "layers"}, {"recurse": False}, {"remove_duplicate": False}, {"prefix": "q", "remove_duplicate": False}],
    ids=str,
)
def test_parameters_and_buffers_come_in_torchs_order(kwargs):
    model = Named()
    names, *tensors = thunder.jit(model, transforms=[SubclassTransform()])(kwargs)
    expected, *expected_tensors = model(kwargs)
    assert names == expected
    torch.testing.assert_close(tensors, expected_tensors, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_numbers_become_tensors_of_the_default_dtype(dtype):
    def f(x):
        made = (
            torch.tensor(1.5),
            torch.tensor(2),
            torch.tensor(True),
            torch.tensor([0.5]),
            torch.tensor(1.0, dtype=torch.float16),
        )
        return (*made, torch.as_tensor(0.5), x + torch.tensor(1.5))

    torch.set_default_dtype(dtype)
    try:
        found, expected = thunder.jit(f, transforms=[SubclassTransform()])(X), f(X)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected)
    assert [t.dtype for t in found] == [t.dtype for t in expected]


def test_attributes_of_a_users_on_a_parameter():
    model = nn.Linear(2, 2)
    model.weight.mask, model.weight.factor = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 2.0

    def f(x):
        weight = model.weight * model.weight.mask * getattr(model.weight, "factor", 5.0)
        return x @ weight if hasattr(model.bias, "factor") else x @ weight + 1

    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for change in (
        "pass",
        "model.weight.factor = 3.0",
        "model.weight.mask = torch.ones(2, 2)",
        "del model.weight.factor",
        "model.bias.factor = 1",
    ):
        exec(change, {"model": model, "torch": torch})
        torch.testing.assert_close(jitted(X), f(X), msg=change)


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
@pytest.mark.parametrize(
    "f", [lambda x: x.view(-1) * 1, lambda x: x.view_as(torch.ones(2, 2, 3)) * 1, lambda x: x.view(size=(6, 2))]
)
def test_a_view_that_an_input_of_other_strides_has_not_is_torchs_error(f, transform):
    jf = thunder.jit(f, transforms=[transform()])
    rows, columns = torch.randn(2, 4, 3), torch.randn(3, 4).t()
    for x in (rows[0], columns, torch.randn(8, 3)[::2], rows[1], columns):
        try:
            expected = f(x)
        except RuntimeError as e:
            with pytest.raises(RuntimeError, match=re.escape(str(e)[:40])):
                jf(x)
        else:
            assert torch.equal(jf(x), expected)
    assert thunder.cache_hits(jf) >= 1


def test_a_function_of_the_call_that_is_gone_has_no_defaults_to_compare():
    def program(x):
        def scaled(y, k=2):  # refers to itself: it lives until garbage is looked for
            return y * k if y.ndim < 5 else scaled(y[0])

        return scaled(x)

    x = torch.ones(3)
    jitted = thunder.jit(program, transforms=[NormTransform()])
    for _ in range(2):
        torch.testing.assert_close(jitted(x), 2 * x)
        gc.collect()
    assert thunder.cache_misses(jitted) == 1


def test_hooks_of_all_modules_are_seen_when_they_come_and_go():
    inner = nn.Linear(2, 2)
    f = thunder.jit(lambda x: inner(x), transforms=[NormTransform()])
    jitted = thunder.jit(inner, transforms=[NormTransform()])
    jitted(X)
    torch.testing.assert_close(f(X), inner(X))
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        torch.testing.assert_close(f(X), inner(X))
        with pytest.raises(UnsupportedOpError, match="a hook for all modules"):
            jitted(X)
    finally:
        hook.remove()
    torch.testing.assert_close(f(X), inner(X))
    torch.testing.assert_close(jitted(X), inner(X))


def is_options(m):
    try:
        return isinstance(m, int | Options)
    except TypeError:
        return False


def test_what_a_class_raises_that_does_not_say_which_objects_are_its_own_is_caught():
    jitted = thunder.jit(lambda x, m: x * (2 if is_options(m) else 3), transforms=[SubclassTransform()])
    for m in ({"scale": 1.0}, 5, {"scale": 1.0}):
        torch.testing.assert_close(jitted(X, m), X * (2 if is_options(m) else 3))


class _Says(type):
    """A class that says itself which objects are its own, by what may change."""

    answers = {"all": True}

    def __instancecheck__(cls, asked):
        return cls.answers["all"]

    def __subclasscheck__(cls, asked):
        return cls.answers["all"]


class _Said(metaclass=_Says):
    pass


class _Kept:
    times = 2


def _of_a_weak_dict(kind):
    held, kept = kind(), _Kept()
    key, value = (kept, 2) if kind is weakref.WeakKeyDictionary else ("key", kept)
    held[key] = value

    def change():
        if kind is weakref.WeakKeyDictionary:
            held[kept] = 3
        else:
            kept.times = 3

    return lambda x: x * (value if (value := held[key]) is not kept else value.times), change


def _of_names():
    names = {"__name__": "of_a_user"}
    exec("def f(x): return x * len([1, 2]) + abs(-1)", names)  # noqa: S102 - a module of its own
    return names["f"], lambda: names.update(len=lambda _: 7)


def _of_an_object():
    kept = _Kept()
    return lambda x: x * len([name for name in dir(kept) if not name.startswith("_")]), lambda: setattr(kept, "more", 1)


CHANGES = {
    "a builtin that a global comes before": _of_names,
    "names of an object": _of_an_object,
    "a class of a constant": lambda: (lambda x: x if isinstance(3, _Said) else -x, lambda: _Says.answers.update(all=False)),
    "a class of a result": lambda: (lambda x: x if isinstance(x + 1, _Said) else -x, lambda: _Says.answers.update(all=False)),
    "a class of a class": lambda: (lambda x: x if issubclass(int, _Said) else -x, lambda: _Says.answers.update(all=False)),
    "weak keys": lambda: _of_a_weak_dict(weakref.WeakKeyDictionary),
    "weak values": lambda: _of_a_weak_dict(weakref.WeakValueDictionary),
}


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.AcquiredAnewWarning")
@pytest.mark.parametrize(("name", "transform"), crossed(CHANGES, [SubclassTransform, NormTransform]))
def test_what_changes_where_no_way_leads_to(name, transform, monkeypatch):
    monkeypatch.setattr(_Says, "answers", {"all": True})
    f, change = CHANGES[name]()
    jitted = thunder.jit(f, transforms=[transform()])
    before = f(X)
    assert torch.equal(jitted(X), before) and torch.equal(jitted(X), before)
    change()
    assert torch.equal(jitted(X), f(X)) and not torch.equal(f(X), before)


class _Child(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.__dict__["parent"] = weakref.proxy(parent)

    def forward(self, x):
        return self.parent.scaled(x * self.parent.weight)


class _Parent(nn.Module):
    times = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(X.clone())
        self.child = _Child(self)

    def scaled(self, x):
        return x * self.times

    def forward(self, x):
        return self.child(x)


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_what_is_behind_a_weak_proxy_is_read_and_guarded(transform):
    module = _Parent()
    jitted = thunder.jit(module, transforms=[transform()])

    def check():
        found, wanted = (torch.autograd.grad((y := f(X)).sum(), module.weight) + (y,) for f in (jitted, module))
        torch.testing.assert_close(found, wanted)

    check()
    with torch.no_grad():
        module.weight.add_(1)
    check()
    module.weight = nn.Parameter(3 * X)
    check()
    module.times = 5
    check()


class _AskingItself(nn.Module):
    def forward(self, x):
        return x * (3 if "late" in vars(self) else 2) + len(self.__dict__)


def test_attributes_that_a_module_asks_its_dict_for_are_guarded():
    module = _AskingItself()
    for owner, f in ((module, module), (module, nn.Sequential(module)), (module, lambda x: module(x))):
        vars(owner).pop("late", None)
        jitted = thunder.jit(f, transforms=[SubclassTransform()])
        assert torch.equal(jitted(X), f(X))
        owner.late = 1
        assert torch.equal(jitted(X), f(X)) and torch.equal(jitted(X), f(X))
        assert thunder.cache_misses(jitted) == 2
