"""Thunder's interpreter with our native helpers acquires what it acquires without them."""

import collections
import dataclasses
import functools
import re
import traceback
from types import SimpleNamespace

import pytest
import thunder
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.errors import ThunderNormError
from thunder_norm.tracing import native
from thunder_norm.transforms import NormTransform, SubclassTransform, grad, vmap

PROGRAMS = []


def program(function):
    """A program of one tensor; compared under both interpreters, and with eager mode where Thunder can run it."""
    PROGRAMS.append(function)
    return function


GLOBAL = {"scale": 2.0, "names": ["a", "b"]}


@program
def closures(x):
    count = 0

    def add(by, *, twice=False):
        nonlocal count
        count += 2 * by if twice else by
        return count

    add(1)
    add(2, twice=True)
    return x * count + GLOBAL["scale"]


@program
def generators(x):
    def numbers(n):
        for i in range(n):
            got = yield i
            if got:
                yield got

    def outer():
        yield from numbers(2)
        yield from (i * i for i in (1, 2, 3))

    total = sum(i for i in outer())
    first = numbers(3)
    next(first)
    return x * total + first.send(7)


@program
def unpacking(x):
    a, *b, c = (1, 2, 3, 4)
    (d, e), f = [[5, 6], 7]
    g = {**{"p": 1, "q": 2}, "q": 3}
    return x * (a + sum(b) + c + d + e + f + g["p"] + g["q"])


@program
def too_many_to_unpack(x):
    try:
        a, _b = (1, 2, 3)
    except ValueError:
        a = 10
    try:
        a, _b = [1]
    except ValueError:
        return x + a
    return x


class Odd:
    """Asks of attributes what few do."""

    kinds = ("a", "b")
    __slots__ = ("__dict__", "slot")

    def __init__(self):
        self.slot = 3
        self.own = 4

    @property
    def fails(self):
        raise AttributeError("on purpose")

    @property
    def doubled(self):
        return 2 * self.own

    @classmethod
    def made(cls):
        return cls()

    @staticmethod
    def triple(n):
        return 3 * n

    def __getattr__(self, name):
        if name == "given":
            return 5
        raise AttributeError(name)

    def __bool__(self):
        return False

    def __len__(self):
        return 6

    def __contains__(self, key):
        return key == "k"

    def __getitem__(self, key):
        return key * 2

    def __add__(self, other):
        return NotImplemented

    def __radd__(self, other):
        return other + self.own

    def __call__(self, n, *more, scale=1):
        return (n + sum(more)) * scale


@program
def attributes(x):
    o = Odd.made()
    n = o.slot + o.own + o.doubled + o.triple(2) + o.given + len(o) + o[4] + o(1, 2, scale=3) + len(o.kinds)
    if hasattr(o, "fails") or hasattr(o, "nothing") or o or "j" in o:
        return x
    o.own = 8
    o.fresh = getattr(o, "nothing", 9)
    o.own += 1
    return (x * n + o) * o.fresh + ("k" in o)


class Descriptor:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, obj, cls=None):
        return self if obj is None else vars(obj)[self.name] * 2

    def __set__(self, obj, value):
        vars(obj)[self.name] = value


class NonData:
    def __get__(self, obj, cls=None):
        return 11


class Meta(type):
    @property
    def of_class(cls):
        return 13


class Described(metaclass=Meta):
    data = Descriptor()
    plain = NonData()
    shadowed = NonData()


@program
def descriptors(x):
    d = Described()
    vars(d)["_data"] = 3
    d.shadowed = 4
    return x * d.data + d.plain + d.shadowed + Described.of_class


class Upper(dict):
    def __getitem__(self, key):
        return super().__getitem__(key.lower())

    def __missing__(self, key):
        return 17


class Longer(list):
    def __len__(self):
        return super().__len__() + 1


@program
def subclassed_containers(x):
    ordered = collections.OrderedDict(a=1, b=2)
    counted = collections.defaultdict(int)
    counted["a"] += 2
    return x * ordered["b"] + counted["a"] + counted["b"]


@program
def subclassed_dict(x):
    return x * Upper(a=1)["A"]


@program
def subclassed_list(x):
    return x * len(Longer([1, 2]))


@program
def mutated_lists(x):
    values = [1, 2]
    for v in values:
        if v < 4:
            values.append(v + 2)
    values[0] = values[-1]
    values += [5]
    del values[1]
    values.extend((6, 7))
    last = values.pop()
    return x * sum(values) + last + len(values)


@program
def mutated_dicts(x):
    d = {"a": 1}
    d["b"] = 2
    d.update({"c": 3}, e=4)
    d |= {"f": 5}
    del d["a"]
    got = d.pop("b") + d.get("zz", 6) + d.setdefault("y", 7)
    try:
        got += d["none"]
    except KeyError:
        got += 8
    for k, v in d.items():
        got += v * len(k)
    return x * got + ("c" in d) + ("q" not in d)


@program
def calls(x):
    def f(a, /, b, *rest, c=3, d, **others):
        return a + 2 * b + sum(rest) + c * d + sum(others.values())

    args, options = (1, 2, 3), {"d": 4, "e": 5}
    method = functools.partial(f, 1, d=2)
    return x * (f(*args, **options) + f(1, b=2, d=3) + method(5, z=6) + (lambda *a, k=1: len(a) + k)(*args))


@program
def twice_the_same_argument(x):
    def f(**options):
        return options

    return f(**{"a": 1}, **{"a": 2})


@program
def wrong_arguments(x):
    def f(a, b):
        return a

    return f(x)


@program
def exceptions(x):
    def risky(n):
        try:
            if n == 0:
                return 1 // n
            return [0, 1][n]
        except ZeroDivisionError as e:
            raise ValueError("no") from e
        finally:
            seen.append(n)

    seen = []
    total = 0
    for n in (0, 1, 5):
        try:
            total += risky(n)
        except (ValueError, IndexError):
            total += 10
        else:
            total += 100
    with torch.no_grad():
        total += len(seen)
    return x * total


@program
def an_error_of_the_program(x):
    def inner(n):
        if n > 0:
            raise RuntimeError(f"too large: {n}")

    return inner(3)


@program
def an_index_out_of_range(x):
    return x * (1, 2)[5]


@program
def a_key_that_is_not_there(x):
    return x * {"a": 1}["b"]


@program
def a_name_that_is_not_there(x):
    return x * no_such_name  # noqa: F821


@program
def an_attribute_that_is_not_there(x):
    return Odd().nowhere


@program
def operators_that_do_not_fit(x):
    return x * (3 + "a")


@program
def iteration(x):
    total = 0
    for i, (a, b) in enumerate(zip((1, 2, 3), [4, 5, 6], strict=True)):
        total += i * a * b
    for v in reversed([1, 2, 3]):
        total = total * 2 + v
    ended = iter([1, 2, 0, 3].pop, 0)
    total += sum(ended)
    it = iter((1, 2))
    next(it)
    while (v := next(it, None)) is not None:
        total += v
    else:
        total += 1
    return x * total + sum([i for i in range(3) if i % 2] + sorted({3, 1, 2}))


@program
def truths(x):
    found = [bool(v) for v in (0, 1, 0.0, "", "a", None, [], [0], (), {}, {"a": 1}, set(), x.shape)]
    none = not None
    return x * sum(found) + none + (not found) + (3 not in (1, 2)) + ("a" in "cat") + (2 in [1, 2]) + (1 in {1: 2})


@program
def numbers(x):
    a, b = 7, 2.5
    return x * (a + b - a * b / a // b % 3 + a**2 - -a + (a & 3 | 8 ^ 1) + (a << 1) + (a >> 1) + int(b)) + (a > b) + True


@program
def a_division_by_zero(x):
    return x * (1 / 0)


@program
def strings_and_slices(x):
    s = f"{3:>4}|{'a'!r}|{2.5:.2f}"
    t = [1, 2, 3, 4][1:-1] + list((5, 6, 7)[::2])
    return x * len(s) + sum(t) + x[..., -1:] + x[0]


@program
def matching(x):
    match {"kind": "pair", "values": (1, 2)}:
        case {"kind": "pair", "values": (a, b)}:
            return x * a + b
        case _:
            return x


@dataclasses.dataclass
class Point:
    a: int
    b: torch.Tensor
    c: int = 3


Pair = collections.namedtuple("Pair", "left right")


@program
def made_objects(x):
    p = Point(2, x)
    pair = Pair(p.b, right=p.c)
    s = SimpleNamespace(q=4, r=[pair])
    return s.r[0].left * p.a + pair.right + s.q + pair[1]


class Base:
    def value(self, n):
        return n + 1


class Derived(Base):
    def value(self, n):
        return super().value(n) * 2

    def __iter__(self):
        return iter((1, 2, self.value(3)))


@program
def inheritance(x):
    a, b, c = Derived()
    return x * (a + b + c) + sum(v for v in Derived()) + isinstance(Derived(), Base)


@program
def shadowed_builtins(x):
    len = lambda v: 42  # noqa: A001, E731
    return x * len([1])


@program
def shapes(x):
    rows, columns = x.shape
    y = x.reshape(columns, rows).T if rows < columns else x
    for _ in range(x.dim()):
        y = torch.stack([y, y]).sum(0)
    return y + x.size(0) + x.shape[-1] + (x.dtype == torch.float32) + len(x)


@program
def recursion(x):
    def f(n):
        return 1 if n < 2 else n * f(n - 1)

    return x * f(5)


@program
def returns_a_tree(x):
    return {"a": [x + 1, (x, 2)], "b": None, "c": Pair(x, 3)}


def acquired(make_transforms, function, *args):
    """What a first call comes to: result, or error with the lines it was raised from; and all its texts."""
    jitted = thunder.jit(function, transforms=make_transforms())
    try:
        result = jitted(*args)
    except Exception as e:  # noqa: BLE001 - whatever it is, it must be the same
        lines = [f.line for f in traceback.extract_tb(e.__traceback__) if f.filename == __file__]
        return type(e), re.sub("0x[0-9a-f]+", "", str(e).splitlines()[0]), lines[-1], None
    return None, None, None, (result, texts(jitted))


def texts(jitted):
    """The first and last traces and prologues, without times and without what is numbered in a process: guards and fusions of ours."""
    traces = (thunder.last_prologue_traces(jitted), thunder.last_traces(jitted))
    written = "\n".join(str(t) for of_one in traces for t in (of_one[0], of_one[-1]))
    return re.sub(r"# Constructed by .*|(NormFusion|check_\w+?_|flatten_\w+?_)\d+(?=\()", r"\1", written).splitlines()


def both(make_transforms, function, *args):
    with native.switched_off():
        plain = acquired(make_transforms, function, *args)
    return acquired(make_transforms, function, *args), plain


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_programs_are_acquired_the_same(function):
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seeded(0)))
    ours, thunders = both(lambda: [SubclassTransform()], function, x)
    assert ours[:3] == thunders[:3]
    if ours[3] is None:
        return
    (result, written), (plain_result, plain_written) = ours[3], thunders[3]
    assert written == plain_written
    torch.testing.assert_close(result, plain_result, rtol=0, atol=0)
    torch.testing.assert_close(result, function(x))


def ignores(x, t, *more, u=(), **options):
    return x * 2


def hands_on(x, t):
    return ignores(x, *[t, (3, 4)], **{"u": t, "v": (5, t)})


class Unequal:
    def __hash__(self):
        return hash("a")

    def __eq__(self, other):
        raise RuntimeError("not comparable")


def looks_up(x, d):
    try:
        return x * d["a"]
    except RuntimeError:
        return x


@pytest.mark.parametrize(
    "function, calls",
    [
        (ignores, [((1, 2),), ((1, 3),)]),
        (hands_on, [((1, 2),), ((1, 3),)]),
        (lambda x, t: x * t[0]["a"], [([{"a": 1}],), ([{"a": 2}],), ([{"a": 1}],)]),
        (looks_up, [({Unequal(): 1},)]),
    ],
    ids=["unused", "handed on", "nested", "unequal keys"],
)
def test_later_calls_are_guarded_the_same(function, calls):
    def run():
        jitted = thunder.jit(function, transforms=[SubclassTransform()])
        x = torch.ones(2)
        return [jitted(x, *args).tolist() for args in calls], thunder.cache_misses(jitted), texts(jitted)

    with native.switched_off():
        plain = run()
    assert run() == plain
    assert plain[0] == [function(torch.ones(2), *args).tolist() for args in calls]


def test_tracebacks_name_the_file_of_equal_code():
    source = "def boom(x):\n    y = x\n    raise ValueError('b')\n"
    for file in ("first.py", "second.py"):
        names = {}
        exec(compile(source, file, "exec"), names)
        with pytest.raises(ValueError) as e:
            thunder.jit(names["boom"], transforms=[SubclassTransform()])(torch.ones(2))
        assert file in [f.filename for f in traceback.extract_tb(e.value.__traceback__)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.GELU(), nn.Linear(6, 6))])
        self.table = nn.ModuleDict({"a": nn.Dropout(0.0), "b": nn.Identity()})
        self.register_buffer("seen", torch.zeros(()))
        self.config = SimpleNamespace(scale=0.5, which="a")
        self.layers[0].register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x, scale=None, **options):
        self.seen += 1
        y = self.norm(x)
        for layer in self.layers:
            y = layer(y)
        y = self.table[self.config.which](y)
        y = y * options.get("by", 2)
        return x + y * (self.config.scale if scale is None else scale)


@pytest.mark.parametrize("given", [torch.Tensor, RMSTensor])
def test_modules_are_acquired_the_same(given):
    def call():
        torch.manual_seed(seeded(0))
        model = Block().eval()
        x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(seeded(1)))
        return acquired(lambda: [NormTransform()], model, x if given is torch.Tensor else RMSTensor(1.0, backing=x))

    with native.switched_off():
        plain = call()
    ours = call()
    assert ours[:3] == plain[:3] == (None, None, None)
    assert ours[3][1] == plain[3][1]


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f)), lambda f: grad(lambda x: vmap(f)(x).sum())])
def test_transformed_functions_are_acquired_the_same(transform):
    def f(x):
        total = 0.0
        for i, row in enumerate([x, x.sin()]):
            total = total + (row * (i + 1)).pow(2).sum()
        return total

    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seeded(2)))

    def call():
        transformed = transform(f)
        return acquired(lambda: [SubclassTransform()], lambda x: transformed(x), x)

    with native.switched_off():
        plain = call()
    assert call()[3][1] == plain[3][1]


def entries():
    return [r.owner[r.name] if isinstance(r.owner, dict) else vars(r.owner)[r.name] for r in native.REPLACEMENTS.all]


def test_thunders_functions_are_in_place_outside_of_acquisitions():
    originals = [r.original for r in native.REPLACEMENTS.all]
    assert entries() == originals
    met = []

    def watching(x):
        met.append(entries())
        return x + 1

    thunder.jit(watching)(torch.ones(2))
    assert entries() == originals
    with pytest.raises(RuntimeError, match="too large"):
        thunder.jit(an_error_of_the_program, transforms=[SubclassTransform()])(torch.ones(2))
    assert entries() == originals
    with native.interpreter():
        assert entries() == [r.native for r in native.REPLACEMENTS.all]
        with native.interpreter():
            pass
        assert entries() == [r.native for r in native.REPLACEMENTS.all]
    assert entries() == originals
    with native.switched_off(), native.interpreter():
        assert entries() == originals


def test_a_plain_compilation_is_left_to_thunder(monkeypatch):
    monkeypatch.setattr(native.REPLACEMENTS, "in_place", lambda: pytest.fail("the native helpers were put in place"))
    thunder.jit(closures)(torch.ones(2))
    with pytest.raises(BaseException, match="put in place"):
        thunder.jit(closures, transforms=[SubclassTransform()])(torch.ones(2))


def test_errors_of_ours_name_the_same_line():
    def branches(x):
        if x.sum() > 0:
            return x
        return -x

    ours, thunders = both(lambda: [SubclassTransform()], branches, torch.ones(2))
    assert issubclass(ours[0], ThunderNormError)
    assert ours == thunders
