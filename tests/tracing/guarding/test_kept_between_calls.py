"""What programs keep from one call to the next and somebody changes in between: eager mode's results and state in each call."""

from __future__ import annotations

import contextvars
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from thunder_norm.errors import AcquiredAnewWarning, UnsupportedOpError
from thunder_norm.transforms import NormTransform
import thunder

# Each is given how to jit, and yields what eager mode has too.
Program = Callable[[Callable], Iterator]


def _x(scale: float = 1.0) -> torch.Tensor:
    return torch.arange(1.0, 7.0).view(2, 3) * scale


class _Module(torch.nn.Module):
    def __init__(self, step: Callable, **state: object):
        super().__init__()
        self.step = step
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self.step(self, *args)


def buffer_that_is_none_again(jit: Callable) -> Iterator:
    def step(self, x):
        self.seen = x.detach().mean(0) if self.seen is None else self.seen + 1
        return x * 2

    m = _Module(step)
    m.register_buffer("seen", None)
    jm = jit(m)
    for _ in range(2):
        yield jm(_x()), m.seen
    m.seen = None
    yield jm(_x(3.0)), m.seen
    m.seen = torch.zeros(3)
    yield jm(_x()), m.seen, dict(m.named_buffers())


def buffer_that_is_reset(jit: Callable) -> Iterator:
    def step(self, x):
        self.seen = self.seen * 0.5 + x.detach().mean(0)
        return x - self.seen

    m = _Module(step)
    m.register_buffer("seen", torch.zeros(3))
    jm = jit(m)
    for seen in (torch.zeros(3), torch.ones(3), torch.ones(2, 3)):
        for _ in range(2):
            yield jm(_x()), m.seen
        m.seen = seen


def members_that_are_none(jit: Callable) -> Iterator:
    def step(self, x):
        y = self.linear(x)
        return y if self.shift is None else y - self.shift

    m = _Module(step, linear=torch.nn.Linear(3, 3))
    torch.nn.init.ones_(m.linear.weight)
    m.register_buffer("shift", torch.ones(3))
    jm = jit(m)
    for shift, bias in ((None, None), (torch.ones(3), torch.ones(3)), (None, torch.ones(3)), (torch.ones(3), None)):
        m.shift, m.linear.bias = shift, None if bias is None else torch.nn.Parameter(bias)
        yield jm(_x()), m.shift


def order_of_dicts(jit: Callable) -> Iterator:
    def step(self, x):
        self.numbers.move_to_end(next(iter(self.numbers)))
        self.tensors.move_to_end("a")
        self.plain["a"] = self.plain.pop("a") * 2
        return x * self.plain["a"]

    state = {"numbers": OrderedDict(a=1, b=2, c=3), "tensors": OrderedDict(a=_x(), b=_x(2)), "plain": {"a": 1, "b": 2}}
    m = _Module(step, **state)
    jm = jit(m)
    for _ in range(3):
        yield jm(_x()), list(m.numbers), list(m.tensors.items()), list(m.plain.items())


def order_of_a_dict_of_the_call(jit: Callable) -> Iterator:
    def f(x, d):
        d.move_to_end("a")
        return x * 2

    jf = jit(f)
    for scale in (1.0, 2.0):
        d = OrderedDict(a=_x(scale), b=_x(), c=_x())
        yield jf(_x(), d), list(d.items())


def counts_in_order(jit: Callable) -> Iterator:
    def step(self, x, key):
        self.lists[key].append(x)
        self.counts.update([key, "z"])
        self.last[key] = x
        self.last.move_to_end(key, last=False)
        return sum(self.lists[key]) * self.counts[key]

    m = _Module(step, lists=defaultdict(list), counts=Counter(), last=OrderedDict())
    jm = jit(m)
    for key in "abab":
        yield jm(_x(), key), dict(m.lists), list(m.counts.items()), list(m.last)


def attributes_of_functions(jit: Callable) -> Iterator:
    def helper():
        pass

    def f(x):
        f.calls = getattr(f, "calls", 0) + 1
        helper.last = x * 2
        return x * f.calls + helper.last

    jf = jit(f)
    for scale in (1.0, 2.0, 3.0):
        yield jf(_x(scale)), f.calls, helper.last


def context_variables(jit: Callable) -> Iterator:
    depth = contextvars.ContextVar("depth", default=1.0)
    scale = contextvars.ContextVar("scale")
    scale.set(torch.ones(()))

    def f(x):
        depth.set(depth.get() + 1)
        token = scale.set(x.sum())
        try:
            return x * depth.get() * scale.get()
        finally:
            scale.reset(token)

    jf = jit(f)
    for _ in range(3):
        yield jf(_x()), depth.get(), scale.get()
    depth.set(10.0)
    yield jf(_x()), depth.get()


def containers_that_are_replaced(jit: Callable) -> Iterator:
    """Between calls; the program writes tensors into them, of one shape, so that nothing else tells them apart."""

    def step(self, x):
        self.last[0] = x * 2
        self.named["a"] = self.own
        self.named.update(b=x)
        self.slices[:] = [self.own]
        self.queue.append(x + 1)
        self.queue.popleft()
        return x * 3

    def fresh() -> dict:
        zero = torch.zeros(2, 3)
        return {"last": [zero], "named": {"a": zero, "b": zero}, "slices": [zero], "queue": deque([zero, zero])}

    m = _Module(step, own=_x(5), **fresh())
    jm = jit(m)
    for name, new in [*fresh().items(), ("own", _x(7))]:
        for scale in (1.0, 2.0):
            yield jm(_x(scale)), m.last, m.named, m.slices, list(m.queue)
        setattr(m, name, new)
    yield jm(_x()), m.last, m.named, m.slices, list(m.queue)


def last_results_that_begin_as_one(jit: Callable) -> Iterator:
    def step(self, x):
        self.last.append(x * 2)
        self.last.pop(0)
        self.queue.appendleft(x)
        self.ends["a"] = self.ends["b"]
        self.ends["b"] = x + 1
        return x * 3

    zero = torch.zeros(2, 3)
    m = _Module(step, last=[zero] * 3, queue=deque([zero] * 3, maxlen=3), ends={"a": zero, "b": zero})
    jm = jit(m)
    for scale in (1.0, 2.0, 3.0, 4.0, 5.0):
        yield jm(_x(scale)), m.last, list(m.queue), m.ends


def lists_in_closures_that_are_replaced(jit: Callable) -> Iterator:
    last = [torch.zeros(2, 3)]

    def f(x):
        last[0] = x * 2
        return x * 3

    jf = jit(f)
    for scale in (1.0, 2.0, 3.0):
        yield jf(_x(scale)), last
        last = [torch.zeros(2, 3)]


def held_by_what_is_returned(jit: Callable) -> Iterator:
    m = _Module(lambda self, x: (SimpleNamespace(held=self.held), defaultdict(list, held=self.held), x * 2), held=[_x()])
    jm = jit(m)
    for scale in (2.0, 3.0):
        yield jm(_x())
        m.held = [_x(scale)]
    yield jm(_x())


_PROGRAMS = (
    *(buffer_that_is_none_again, buffer_that_is_reset, members_that_are_none, order_of_dicts, order_of_a_dict_of_the_call),
    *(counts_in_order, attributes_of_functions, context_variables),
    *(
        containers_that_are_replaced,
        last_results_that_begin_as_one,
        lists_in_closures_that_are_replaced,
        held_by_what_is_returned,
    ),
)


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return type(value), [(k, _plain(v)) for k, v in value.items()]
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace, _plain(vars(value))
    return (type(value), [_plain(v) for v in value]) if isinstance(value, list | tuple | deque) else value


def _run(program: Program, jit: Callable) -> list:
    return [_plain(found) for found in program(jit)]


@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda p: p.__name__)
def test_each_call_is_eagers(program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AcquiredAnewWarning)
        found = _run(program, lambda f: thunder.jit(f, transforms=[NormTransform()]))
    assert found == _run(program, lambda f: f)


_HANDED_ON = {
    "returned": lambda self, t: t,
    "kept": lambda self, t: setattr(self, "last", t),
    "returned in a list": lambda self, t: {"t": [t]},
}


@pytest.mark.parametrize("use", _HANDED_ON)
def test_a_tensor_that_is_taken_out_and_handed_on(use: str) -> None:
    m = _Module(lambda self, x: (_HANDED_ON[use](self, self.held.pop(0)), x * 2), held=[_x(1.0), _x(2.0)], last=None)
    with pytest.raises(UnsupportedOpError, match="taken out of a list"):
        thunder.jit(m, transforms=[NormTransform()])(_x())
    assert [t[0, 0].item() for t in m.held] == [1, 2]


def test_a_tensor_in_a_context_variable() -> None:
    last = contextvars.ContextVar("last", default=None)

    def f(x):
        last.set(x * 2)
        return x

    with pytest.raises(UnsupportedOpError, match="context variable 'last'"):
        thunder.jit(f, transforms=[NormTransform()])(_x())
    assert last.get() is None


@pytest.mark.parametrize(
    ("make", "put"),
    [
        (list, lambda held, y: held.append(y)),
        (dict, lambda held, y: held.update(y=y)),
        (deque, lambda held, y: held.append(y)),
        (lambda: {"a": []}, lambda held, y: held["a"].append(y)),
        (lambda: [torch.ones(1)], lambda held, y: [held.clear(), held.append(y)]),
    ],
    ids=["list", "dict", "deque", "nested", "cleared"],
)
def test_a_container_that_is_reset_before_each_call_needs_one_trace(make: Callable, put: Callable) -> None:
    def step(self, x):
        y = x * 2
        put(self.held, y)
        return y

    m = _Module(step, held=make())
    jm = thunder.jit(m, transforms=[NormTransform()])
    for scale in range(4):
        m.held = make()
        y = jm(_x(float(scale)))
        held = m.held.get("y", m.held.get("a")) if isinstance(m.held, dict) else m.held
        assert (held if isinstance(held, torch.Tensor) else held[-1]) is y
        torch.testing.assert_close(y, _x(float(scale)) * 2)
    assert thunder.cache_misses(jm) == 1
