"""What functions in C ask of a program's own objects is asked in each call: indices, sizes, rounding, hashes, weak references."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import math
import operator
import typing
import weakref

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm.errors import AcquiredAnewWarning, DataDependentError, EscapeError
from thunder_norm.transforms import SubclassTransform
import thunder


class _Number:
    """Stands for a number wherever Python or torch asks it to."""

    def __init__(self, n):
        self.n = n

    def __index__(self):
        return self.n

    def __float__(self):
        return self.n / 2

    def __round__(self, digits=None):
        return self.n + (digits or 0)

    def __trunc__(self):
        return self.n

    __floor__ = __ceil__ = __abs__ = __int__ = __trunc__

    def __hash__(self):
        return self.n

    def __eq__(self, other):
        raise ValueError("incomparable")

    def __bytes__(self):
        return bytes([self.n])

    def __divmod__(self, other):
        return NotImplemented if isinstance(other, _Divisor) else (self.n // other, self.n % other)

    def __pow__(self, other, modulus=None):
        return self.n**other if modulus is None else self.n**other % modulus

    def __iter__(self):
        return iter([self.n, 3])

    def __call__(self, x):
        return x * self.n


class _Divisor:
    def __rdivmod__(self, other):
        return other.n, 2


_ASKED = {
    "an index": lambda x, n: x[n],
    "a slice": lambda x, n: x[n:],
    "an index of a list": lambda x, n: x[0] * [1.0, 2.0, 3.0, 4.0][n] * (5, 6, 7, 8)[n],
    "a slice of a list": lambda x, n: x[0] * len([1, 2, 3, 4][n:]),
    "a range": lambda x, n: sum((x * i for i in range(n)), x),
    "a shape": lambda x, n: x.reshape(n, -1),
    "a shape in a tuple": lambda x, n: torch.zeros((n, 2)) + x[0],
    "a written place": lambda x, n: operator.setitem(y := x.clone(), slice(None, n), 0.0) or y,
    "rounding": lambda x, n: x * round(n) + round(n, 2) + math.trunc(n) + math.floor(n) * math.ceil(n) + abs(n),
    "math": lambda x, n: x * math.sqrt(n) + math.gcd(n, 12) + math.fsum(n) + math.prod(n),
    "operators": lambda x, n: x * pow(n, 2) + pow(n, 2, 5) + divmod(n, 2)[1] + divmod(n, _Divisor())[0] + hash(n) + len(bytes(n)),
    "a text": lambda x, n: x * int("%d" % n) + int("%d%d" % (1, n)),  # noqa: UP031
    "a call": lambda x, n: n(x),
}


@pytest.mark.parametrize("asked", _ASKED)
def test_what_functions_in_c_ask_of_an_object_is_asked_in_each_call(asked):
    n, x = _Number(2), torch.arange(1.0, 5.0)
    jf = thunder.jit(lambda x, n: _ASKED[asked](x, n), transforms=[SubclassTransform()])
    for n.n in (2, 2, 1, 2):
        assert torch.equal(jf(x, n), _ASKED[asked](x, n))
    assert thunder.cache_misses(jf) == 2


class _Scale:
    by = 2.0


@pytest.mark.parametrize("kept", ["a reference", "a set"])
def test_what_a_weak_reference_leads_to_is_as_it_is_in_each_call(kept):
    scale, others = _Scale(), [_Scale()]
    reference, together = weakref.ref(others[0]), weakref.WeakSet([scale, *others])

    def f(x):
        if kept == "a set":
            return x * sum(s.by for s in together)
        found = reference()
        return -x if found is None else x * found.by

    x = torch.ones(2)
    with pytest.warns(AcquiredAnewWarning, match="weak reference"):
        jf = thunder.jit(f, transforms=[SubclassTransform()])
        assert torch.equal(jf(x), f(x))
    others[0].by = 5.0
    assert torch.equal(jf(x), f(x))
    others.clear()
    assert torch.equal(jf(x), f(x))


class _Doubling(type):
    by = 2

    def __getitem__(cls, n):
        return cls.by * n


class _Doubled(metaclass=_Doubling):
    def __class_getitem__(cls, n):
        return 100 * n


class _Named(enum.Enum):
    ONE = 1
    TWO = 2


def _subscripted(x):
    try:
        _Divisor[1]
    except TypeError as e:
        return x * _Doubled[3] + _Named["TWO"].value, str(list[int]), str(type[int]), str(e)


def test_a_metaclass_is_asked_first_what_a_subscript_of_a_class_is(monkeypatch):
    x = torch.arange(3.0)
    jf = thunder.jit(_subscripted, transforms=[SubclassTransform()])
    for by in (2, 2, 5):
        monkeypatch.setattr(_Doubling, "by", by)
        torch.testing.assert_close(jf(x)[0], _subscripted(x)[0])
        assert jf(x)[1:] == _subscripted(x)[1:]
    assert thunder.cache_misses(jf) == 2


@dataclasses.dataclass
class _Pair:
    first: torch.Tensor
    second: torch.Tensor


def _copied(x):
    copied = dataclasses.asdict(_Pair(x, x))
    copied["first"].add_(1)
    return copied["second"], x, copy.deepcopy([x * 2]), dataclasses.replace(_Pair(x, x), second=x + 1).second


def _copied_shallowly(x):
    y = x * 2
    copy.copy(y).add_(1)
    return y, copy.copy(x) + 1


_OF_TENSORS = {
    "shallow copies": _copied_shallowly,
    "a product": lambda x: math.prod([x[0], x[1]]) + math.prod(x, start=2),
    "copies": _copied,
}


@pytest.mark.parametrize("name", _OF_TENSORS)
def test_functions_of_the_standard_library_take_tensors(name):
    x, f = torch.arange(1.0, 4.0), _OF_TENSORS[name]
    jf = thunder.jit(lambda x: f(x), transforms=[SubclassTransform()])
    for given in (x, x + 1):
        torch.testing.assert_close(jf(given), f(given))


def test_copies_that_would_be_leaves_are_refused():
    x = torch.ones(2, requires_grad=True)
    for f in (lambda x: copy.copy(x), lambda x: copy.copy(x * 2)):
        with pytest.raises(EscapeError, match="a leaf of its own"):
            thunder.jit(f, transforms=[SubclassTransform()])(x)
    with pytest.raises(EscapeError, match="deepcopy of a parameter"):
        thunder.jit(copy.deepcopy, transforms=[SubclassTransform()])(torch.nn.Parameter(x))
    for call in (thunder.jit(lambda x: copy.deepcopy(x * 2), transforms=[SubclassTransform()]), lambda x: copy.deepcopy(x * 2)):
        with pytest.raises(RuntimeError, match="graph leaves"):
            call(x)


def test_a_tensor_under_several_names_is_copied_once():
    def program(o, x):
        copied = copy.deepcopy(o)
        copied.w.add_(1)
        return copied.both[1] * x

    jitted, x, w = thunder.jit(program, transforms=[SubclassTransform()]), torch.tensor([3.0, 4.0]), torch.ones(2)
    for step, both in enumerate((w, w.clone(), w, w + 1)):
        held = _Held(1.0, w)
        held.both = [1.0, both]
        torch.testing.assert_close(jitted(held, x), program(held, x))
        assert thunder.cache_misses(jitted) == min(step + 1, 2)
    for f in (lambda x: copy.deepcopy([x, x[0]]), lambda x: copy.deepcopy([y := x * 2, y[0]])):
        with pytest.raises(EscapeError, match="several tensors in one memory"):
            thunder.jit(f, transforms=[SubclassTransform()])(x)


@pytest.mark.parametrize("sign", ["<", "<=", ">", ">="])
def test_complex_numbers_have_no_order(sign):
    for source in (f"lambda z: z {sign} z", f"lambda z: z {sign} 1", f"lambda z: 1 {sign} z", f"lambda z: z.real {sign} 1j"):
        f = eval(source)  # noqa: S307 - of a sign
        for function in (f, thunder.jit(f, transforms=[SubclassTransform()])):
            with pytest.raises(NotImplementedError):
                function(torch.ones(2, dtype=torch.complex64))


_Rows = typing.NewType("_Rows", int)


class _Fields(typing.TypedDict):
    rows: int


class _Generic(typing.Generic[typing.TypeVar("T")]):
    def __init__(self, value):
        self.value = value


_ALIASES = {
    "list": lambda x: list[int]([1, 2])[1] * x,
    "dict": lambda x: dict[str, torch.Tensor](x=x)["x"] * 2,
    "generic": lambda x: (_Generic[int](x).__orig_class__ == _Generic[int]) * _Generic[int](x).value,
    "new type": lambda x: _Rows(3) * x,
    "typed dict": lambda x: _Fields(rows=3)["rows"] * x,
}


@pytest.mark.parametrize("name", _ALIASES)
def test_types_of_typing_are_called(name):
    x = torch.ones(2)
    torch.testing.assert_close(thunder.jit(_ALIASES[name], transforms=[SubclassTransform()])(x), _ALIASES[name](x))


_CONTAINING = {
    "a number": lambda x: x * 2 if 0.0 in x else x * 3,
    "not": lambda x: x * 2 if 7.0 not in x else x * 3,
    "of one entry": lambda x: x * 2 if 1.0 in x[0, 0] else x * 3,
    "a tensor": lambda x: x * 2 if x[1, 1] in x else x * 3,
    "operator": lambda x: x * 2 if operator.contains(x, 2) else x * 3,
}


@pytest.mark.parametrize("name", _CONTAINING)
@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor])
def test_what_is_in_a_tensor(name, cls):
    program = _CONTAINING[name]
    jf = thunder.jit(program, transforms=[SubclassTransform()])
    for t in (torch.tensor([[1.0, 0.0], [2.0, 3.0]]), torch.tensor([[5.0, 7.0], [6.0, 3.0]])):
        result = jf(t if cls is torch.Tensor else TwoTensor(t, t))
        torch.testing.assert_close(result if cls is torch.Tensor else result.a, program(t))
    with pytest.raises(RuntimeError, match="only supports Tensor or scalar"):
        thunder.jit(lambda x: x * ("a" in x), transforms=[SubclassTransform()])(t)


class _Held:
    def __init__(self, n, w):
        self.n, self.w, self.both = n, w, [n, w]


class _WithState(_Held):
    def __getstate__(self):
        return {"n": self.n * 2, "w": self.w, "both": self.both}

    def __setstate__(self, state):
        self.__dict__.update(state, n=state["n"] + 1)


class _InSlots:
    __slots__ = ("both", "n", "w")
    __init__ = _Held.__init__


class _PartlyInSlots(_InSlots):
    pass


_COPIES = {
    "a copy": lambda x, o: (x * copy.copy(o).n, copy.copy(o).w is o.w, copy.copy(o).both is o.both, copy.copy(o).w * x),
    "a deep copy": lambda x, o: (x * (c := copy.deepcopy(o)).n, c.w * x, c.both[0], c.both[1] + x),
    "a state": lambda x, o: x * (s[1] if isinstance(s := o.__reduce_ex__(4)[2], tuple) else s)["n"],
    "a written copy": lambda x, o: [setattr(c := copy.copy(o), "n", 7.0), c.both.append(1), (c.n * x, o.n * x, len(o.both))][2],
}


@pytest.mark.parametrize("kind", [_WithState, _PartlyInSlots])
@pytest.mark.parametrize("name", _COPIES)
def test_copies_have_what_the_object_of_the_call_has(name, kind):
    """Python's C code takes the attributes out of the object: they were those of the first call."""
    held, f = [kind(2.0, torch.tensor([1.0, 2.0])) for _ in range(2)], _COPIES[name]
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for step in range(2):
        x = torch.tensor([1.0, step])
        found, expected = jitted(x, held[0]), f(x, held[1])
        torch.testing.assert_close(found, expected)
        for o in held:
            o.n, o.w = 3.0, torch.tensor([3.0, 4.0])


class _AsksItsClasses(type):
    """Classes that have lengths and members, which are not those of their instances."""

    def __len__(cls):
        return 0

    def __iter__(cls):
        return iter((7, 8))

    def __contains__(cls, value):
        return value == 3

    def __neg__(cls):
        return 5


class _Asked(metaclass=_AsksItsClasses):
    def __len__(self):
        return 4

    def __iter__(self):
        return iter((1,))

    def __contains__(self, value):
        return value == 1

    def __neg__(self):
        return 6

    def __invert__(self):
        return 9


class _Passing:
    """Hands on every attribute to another object."""

    def __init__(self, other):
        self.other = other

    def __getattr__(self, name):
        return getattr(self.other, name)


class _Flags(enum.IntFlag):
    READ = 4
    WRITE = 2


def _having(**attributes):
    made = _Passing(None)
    vars(made).update({f"__{name}__": lambda *_, said=said: said for name, said in attributes.items()})
    return made


@pytest.mark.parametrize(
    "ask",
    [
        *(lambda: 1 if torch.nn.Sequential else 0, lambda: not _Asked(), lambda: bool(_Asked), lambda: bool(_Passing([]))),
        *(lambda: len(_Asked), lambda: len(_Asked()), lambda: len(_Passing([1])), lambda: len(_having(len=2))),
        *(lambda: list(_Asked), lambda: [*_Asked()], lambda: sum(v for v in _Passing([1])), lambda: list(_having(iter=[]))),
        *(lambda: 3 in _Asked, lambda: 3 not in _Asked(), lambda: 1 in _Passing([1]), lambda: 1 not in _having(contains=True)),
        *(lambda: -_Asked, lambda: ~_Asked(), lambda: ~_Asked, lambda: -_Passing(1), lambda: -_having(neg=3)),
        *(lambda: len(_Flags), lambda: [f.value for f in _Flags], lambda: _Flags.READ in _Flags, lambda: 3 in _Passing),
        *(lambda: _Flags.READ in (_Flags.READ | _Flags.WRITE), lambda: _Flags.READ not in _Flags.WRITE, lambda: 3 in 5),
    ],
)
def test_special_methods_are_those_of_the_class(ask):
    def f(x):
        try:
            return x * 2, ask()
        except TypeError as e:
            return x * 3, str(e)

    x = torch.ones(2)
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for _ in range(2):
        expected, said = f(x)
        result, found = jitted(x)
        assert torch.equal(result, expected)
        assert found == said
    assert thunder.cache_misses(jitted) == 1


class _Length:
    def __init__(self, value):
        self.value = value

    def __add__(self, other):
        return NotImplemented if isinstance(other, _Length) else _Length(self.value + other)

    def __radd__(self, other):
        return _Length(self.value * 100)


class _Longer(_Length):
    pass


@pytest.mark.parametrize(("left", "right"), [(_Length, _Length), (_Length, _Longer), (_Longer, _Length), (_Longer, _Longer)])
def test_of_two_objects_of_one_class_the_left_alone_is_asked(left, right):
    def f(x):
        a = left(x)
        try:
            a += right(x)
        except TypeError as e:
            return (a + 1).value, (1 + a).value, str(e)
        return (right(x) + a).value if left is right else a.value, a.value, ""

    x = torch.ones(2)
    found, expected = thunder.jit(f, transforms=[SubclassTransform()])(x), f(x)
    torch.testing.assert_close(found[:2], expected[:2])
    assert found[2] == expected[2]


def test_vars_of_what_has_no_dict_is_pythons_error():
    with pytest.raises(TypeError, match=r"vars\(\) argument must have __dict__ attribute"):
        thunder.jit(lambda x: (x, vars(1)), transforms=[SubclassTransform()])(torch.ones(2))


Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "written",
    [
        lambda x: str(KeyError(x)),
        lambda x: f"{KeyError([x * 2])}",
        lambda x: repr({"a": x}),
        lambda x: "%s" % {"a": [x]},  # noqa: UP031
        lambda x: "{}!".format({1: x}),  # noqa: UP032
        lambda x: str(collections.deque([x])),
        lambda x: repr(Pair(x, 2)),
    ],
)
def test_the_text_of_what_holds_a_tensor_is_not_that_of_what_stands_for_it(written):
    with pytest.raises(DataDependentError, match="the text of an object that holds it"):
        thunder.jit(lambda x: (x, written(x * 2)), transforms=[SubclassTransform()])(torch.ones(2))


def test_the_text_of_what_holds_none_is_written():
    def f(x):
        return x, str(KeyError([1])), repr({"a": x.shape}), "{}".format(Pair(1, "b")), f"{collections.deque([1], 2)}"

    x = torch.ones(2)
    assert thunder.jit(f, transforms=[SubclassTransform()])(x)[1:] == f(x)[1:]


def test_what_initializes_an_object_returns_nothing():
    class Returning:
        def __init__(self, value):
            return value

    def f(x):
        said = []
        for value in (3, [x], x, None):
            try:
                said.append(type(Returning(value)).__name__)
            except TypeError as e:
                said.append(str(e))
        return x, said

    x = torch.ones(2)
    assert thunder.jit(f, transforms=[SubclassTransform()])(x)[1] == f(x)[1]
