"""Classes of the structured programs, and what a program does with them: each in a module or in the function that uses it.

The text of a class is a template as in `python_statements`; a use is one as well, and has ``$C`` for the name of the class (others are names of the
text).
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD = """\
import abc, collections, contextlib, copy, dataclasses, enum, functools, itertools, math, operator, string, types, typing
import torch
G = 2
H = [1, 2]
class Own(Exception):
    def __init__(self, n, *rest):
        super().__init__(n, *rest)
        self.n = n
class Narrow(Own, LookupError):
    def __str__(self):
        return f"narrow {self.n}"
class Box:
    __match_args__ = ("n", "v")
    limit = 3
    def __init__(self, n, v):
        self.n, self.v, self.items = n, v, [n]
    def bump(self, by=1):
        self.n += by
        return self.n
r = []
def set_g(n):
    global G
    G = n + 1
class Ctx:
    def __init__(self, name, swallows=False):
        self.name, self.swallows = name, swallows
    def __enter__(self):
        r.append(("in", self.name))
        return self
    def __exit__(self, kind, e, tb):
        r.append(("out", self.name, kind and kind.__name__, e and e.args, tb is None))
        return self.swallows
class Closing:
    def close(self):
        r.append("closing")
@contextlib.contextmanager
def managed(n):
    r.append(("enter", n))
    try:
        yield n + 1
    except ValueError as e:
        r.append(("managed", e.args))
    finally:
        r.append(("leave", n))
@contextlib.contextmanager
def swallowing(kind):
    try:
        yield
    except kind as e:
        r.append(("swallowed", type(e).__name__))
def traced(tag):
    def of(f):
        @functools.wraps(f)
        def inner(*args, **kwargs):
            r.append((tag, args, sorted(kwargs)))
            return f(*args, **kwargs)
        return inner
    return of
def counted(f):
    @functools.wraps(f)
    def inner(*args):
        inner.calls += 1
        return f(*args)
    inner.calls = 0
    return inner
"""


@dataclass(frozen=True)
class Definition:
    """A class or function, and statements that use it."""

    text: str
    uses: tuple[str, ...]

    @property
    def name(self) -> str:
        """By which it is counted."""
        return "; ".join(line.strip("@:") for line in self.text.split("\n") if not line.startswith(" "))


def _of(text: str, *uses: str) -> Definition:
    return Definition(text.strip("\n"), uses)


DEFINITIONS = (
    _of(
        """
class $C:
    k = {i}
    made = 0
    def __init__(self, n=1, *, x=None):
        self.n, self.t = n, x
        $C.made += 1
    def __add__(self, v):
        if not isinstance(v, (int, $C)):
            return NotImplemented
        return $C(self.n + (v if isinstance(v, int) else v.n))
    def __radd__(self, v):
        r.append(("radd", v))
        return $C(self.n - v)
    def __eq__(self, v):
        return isinstance(v, $C) and self.n == v.n
    def __hash__(self):
        return hash(self.n)
    def __lt__(self, v):
        {F self.n}
        return self.n < v.n
    def __bool__(self):
        return self.n % 2 == 1
    def __len__(self):
        return 2
    def __call__(self, n, *args, **kwargs):
        {F n self.n}
        return (n, args, sorted(kwargs))
""",
        "r.append(($C({i}) + {i}).n)", "r.append(({i} + $C({i})).n)", "r.append($C({i}) == $C({i}))", "r.append([q.n for q in sorted([$C({i}), $C({i}), $C(2)])])", "r.append(1 if $C({i}) else 2)",
        "r.append(len({{$C({i}), $C({i})}}))", "r.append($C({i})({i}, *{l}, **{d}))", "try:\n    r.append($C({i}) + {s})\nexcept TypeError as $e:\n    r.append(str($e))", "r.append($C({i}) in [$C({i}), 3])", "r.append(sum([$C({i}), $C(1)], $C(0)).n)",
        "r.append(($C.made, $C.k))", "$C.k = {i}\nr.append($C().k)", "r.append(max($C({i}), $C({i})).n)", "$q = $C({i}, x={t})\nr.append($q)\nr.append($q.t)", "$q = {{$C(1): {v}}}\nr.append($q.get($C({i}), 'none'))", "$q = $C({i})\n$q += {i}\nr.append($q.n)",
        "r.append(not $C({i}))", "r.append($C({i}) != $C(1))", "r.append([$C(2), $C({i})].index($C(2)))", "r.append(list(map($C({i}), {l})))",
    ),
    _of(
        """
class $A:
    def __init__(self, n, **kwargs):
        r.append(("A", n, sorted(kwargs)))
        self.n = n
        super().__init__(**kwargs)
    def m(self, n):
        {F n self.n}
        return n + 1
class $B($A):
    def __init__(self, n, **kwargs):
        super().__init__(n + 1, **kwargs)
        r.append("B")
    def m(self, n):
        {F n self.n}
        return super().m(n) * 2
class $D:
    def __init__(self, s='d'):
        self.s = s
        {F self.s}
    def m(self, n):
        return n - 1
class $C($B, $D):
    def m(self, n):
        try:
            return super().m(n)
        finally:
            {B}
            r.append([k.__name__[0] for k in type(self).__mro__])
    @classmethod
    def of(cls, n):
        return cls(n, s=str(n))
    @staticmethod
    def still(n):
        return n * 3
""",
        "r.append($C({i}, s={s}).m({i}))", "r.append($C.of({i}).m({i}))", "$q = $C.of({i})\nr.append(($q.n, $q.s, $q.still({i})))", "r.append($B.m($C({i}), {i}))", "r.append(super($B, $C({i})).m({i}))", "r.append(isinstance($C({i}), $D))", "r.append($A({i}).m({i}))",
        "$f = $C({i}).m\nr.append($f({i}))", "r.append(list(map($C({i}).m, {l}[:2])))", "try:\n    $C({i}, z=1)\nexcept TypeError as $e:\n    r.append(type($e).__name__)", "r.append([k.__name__[0] for k in $C.mro()])", "r.append($C({i}, s={s}))",
    ),
    _of(
        """
class $D:
    def __init__(self, default):
        self.default = default
    def __set_name__(self, owner, name):
        self.name = "_" + name
    def __get__(self, obj, kind=None):
        if obj is None:
            return self
        r.append(("get", self.name))
        return obj.__dict__.get(self.name, self.default)
    def __set__(self, obj, v):
        {F v}
        obj.__dict__[self.name] = v
    def __delete__(self, obj):
        obj.__dict__.pop(self.name)
class $C:
    a = $D({i})
    b = $D({s})
    def __init__(self, v):
        self.b = v
    @property
    def v(self):
        return self.a
    @v.setter
    def v(self, v):
        {F v}
        self.a = v
    @v.deleter
    def v(self):
        del self.a
    @functools.cached_property
    def once(self):
        {F}
        return self.b
""",
        "r.append($C({v}).b)", "$q = $C({i})\n$q.a = {v}\nr.append(($q.a, $q.v))", "$q = $C({i})\n$q.v = {v}\nr.append($q.v)\ndel $q.v\nr.append($q.a)", "$q = $C({t})\nr.append($q.once is $q.once)", "r.append($C.a.default)", "try:\n    del $C({i}).a\nexcept KeyError as $e:\n    r.append($e)",
        "$q = $C({i})\n$q.a = {i}\n$q.a += 1\nr.append(vars($q))", "r.append([$C(q).once for q in {l}])", "r.append($C({v}))", "r.append(getattr($C({i}), {s}, 'none'))",
    ),
    _of(
        """
class $C:
    def __init__(self, n):
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "log", [])
    def __getattr__(self, name):
        if name.startswith("_") or name == "gone":
            raise AttributeError(name)
        {F}
        return (name, self.n)
    def __setattr__(self, name, v):
        self.log.append(name)
        {F v}
        super().__setattr__(name, v)
    def __delattr__(self, name):
        self.log.append("del " + name)
        object.__delattr__(self, name)
    def __getitem__(self, n):
        if n >= 3:
            raise IndexError(n)
        return n * self.n
    def __contains__(self, n):
        {F n}
        return n == self.n
    def __setitem__(self, n, v):
        self.log.append((n, v))
    def __delitem__(self, n):
        self.log.append(n)
""",
        "r.append($C({i}).other)", "r.append(hasattr($C({i}), 'gone'))", "$q = $C({i})\n$q.z = {v}\nr.append(($q.z, $q.log))\ndel $q.z\nr.append($q.z)", "r.append(list($C({i})))", "r.append({i} in $C({i}))", "$q = $C({i})\n$q[{i}] = {v}\ndel $q[{i}:2]\nr.append($q.log)",
        "for {=i} in $C({i}):\n    {L}", "r.append(getattr($C({i}), {s} or 'e', 0))", "$a, $b, *$c = $C({i})\nr.append(($a, $b, $c))", "$q = $C({i})\n$q.n += 1\nr.append($q.n)", "$q = $C({i})\n$q[0] += {i}\nr.append($q.log)", "r.append(sum($C({i})))", "r.append(dict(zip($C({i}), {l})))",
    ),
    _of(
        """
class $C:
    n = 1
    def __init__(self, v):
        self.v = v
    def __getattribute__(self, name):
        if name == "twice":
            return object.__getattribute__(self, "v") * 2
        {F}
        return super().__getattribute__(name)
    def m(self, n):
        return self.v + n
""",
        "r.append($C({i}).twice)", "r.append($C({t}).twice)", "r.append($C({i}).m({i}))", "r.append($C({i}).n)", "r.append(hasattr($C({i}), 'no'))",
    ),
    _of(
        """
class $C:
    __slots__ = ("a", "b")
    def __init__(self, a, b=0):
        self.a, self.b = a, b
    def __iter__(self):
        yield self.a
        {Y}
        yield self.b
    def __enter__(self):
        r.append("slot in")
        return self
    def __exit__(self, *e):
        {F}
        return e[0] is not None and issubclass(e[0], LookupError)
""",
        "r.append(list($C({i}, {s}))[:9])", "$a, *$b = $C({i}, {i})\nr.append(($a, $b))", "with $C({i}) as $q:\n    {B}\n    raise {e}", "try:\n    $C({i}).c = 1\nexcept AttributeError as $e:\n    r.append(str($e))", "$q = $C({i})\n$q.a, $q.b = {v}, $q.a\nr.append($q)", "$q = $C({i})\ndel $q.a\nr.append(hasattr($q, 'a'))",
        "r.append([*zip($C({i}), 'abc')])", "r.append(max($C({i}, {i})))",
    ),
    _of(
        """
@dataclasses.dataclass(order=True)
class $C:
    n: int
    s: str = "d"
    items: list = dataclasses.field(default_factory=lambda: [{i}], compare=False)
    k: int = dataclasses.field(default=0, kw_only=True, repr=False)
    total: int = dataclasses.field(init=False)
    def __post_init__(self):
        self.total = self.n + self.k
        {F self.n}
@dataclasses.dataclass(frozen=True, slots=True)
class $A:
    n: int
    v: object = None
    def more(self, n):
        return dataclasses.replace(self, n=self.n + n)
""",
        "r.append($C({i}, {s}))", "r.append(repr($C({i}, {s}, k={i})))", "r.append($C({i}) < $C({i}, 'z'))", "r.append(sorted([$C({i}), $C({i}, {s}), $C(1)]))", "r.append(dataclasses.asdict($C({i}, items={l})))", "r.append(dataclasses.replace($C({i}, k=2), n={i}))" , "r.append(dataclasses.astuple($A({i}, {s})))",
        "try:\n    $A(1).n = {i}\nexcept dataclasses.FrozenInstanceError as $e:\n    r.append(str($e))", "r.append($A({i}) == $A({i}))", "r.append(hash($A({i}, {s})) == hash($A({i}, {s})))", "r.append($A({i}, {t}).more({i}))", "r.append([f.name for f in dataclasses.fields($C)])", "$q = $C({i})\n$q.items.append({v})\nr.append(($q, $C(0).items))",
        "match $C({i}, {s}):\n    case $C(1, _):\n        {B}\n    case $C(n=$a, s=$b):\n        r.append(($a, $b))", "r.append({{$A({i}): {v}, $A(1): 2}})", "try:\n    $C()\nexcept TypeError as $e:\n    r.append(str($e).partition('(')[2])",
    ),
    _of(
        """
class $C(typing.NamedTuple):
    a: int
    b: object = None
    def both(self, n=1):
        {F n}
        return (self.a, self.b, n)
$A = collections.namedtuple("$A", "p q", defaults=({i},))
""",
        "r.append($C({i}, {v}))", "r.append($C({i}, {v}).both({i}))", "$a, $b = $C({i}, {t})\nr.append(($b, $a))", "r.append($C({i})._replace(b={v}))", "r.append($C({i}, {s})._asdict())", "r.append($A({i}) + (1,))", "r.append($A({i}) == ({i}, {i}))", "r.append($C._make([{i}, {s}]).b)", "r.append($A(p={t}).p)", "r.append(sorted([$A({i}), $A({i}, 0)]))",
        "match $C({i}, {i}):\n    case (1, $b):\n        {B}\n    case $C(a=$a):\n        r.append($a)",
    ),
    _of(
        """
class $C(enum.Enum):
    RED = {i}
    BLUE = "blue"
    GREEN = 17
    @property
    def low(self):
        {F}
        return self.name.lower()
    @classmethod
    def first(cls):
        return next(iter(cls))
class $A(enum.Flag):
    R = enum.auto()
    W = enum.auto()
    RW = R | W
class $B(enum.IntEnum):
    ONE = 1
    TWO = 2
""",
        "r.append($C.RED)", "r.append([q.low for q in $C])", "r.append($C('blue') is $C.BLUE)", "r.append(($A.R | $A.W) is $A.RW)", "r.append($A.R in $A.RW)", "r.append($B.ONE + {i})", "r.append($C['GREEN'].value)", "try:\n    $C({i} + 100)\nexcept ValueError as $e:\n    r.append(type($e).__name__)", "r.append({{$C.RED: {v}, $C.BLUE: {i}}})", "r.append($C.first().name)",
        "match $C.RED:\n    case $C.BLUE:\n        r.append(1)\n    case $C.RED:\n        {B}", "r.append($B({i} % 2 + 1) < 2)", "r.append(~$A.R & $A.RW)", "r.append(sorted($B, reverse=True))", "r.append(str($B.TWO))", "r.append(f'{{$C.BLUE.name}}')", "r.append(isinstance($B.ONE, int))", "r.append(len($C))",
    ),
    _of(
        """
class $A(abc.ABC):
    registry = {{}}
    def __init_subclass__(cls, tag=None, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.registry[tag or cls.__name__[0]] = cls.__name__[0]
        cls.tag = tag
    @abc.abstractmethod
    def m(self, n): ...
    @property
    @abc.abstractmethod
    def p(self): ...
    def run(self, n):
        {F n}
        return self.m(n) + self.p
class $C($A, tag="c"):
    def m(self, n):
        {F n}
        return n * 2
    @property
    def p(self):
        return {i}
""",
        "r.append($C().run({i}))", "try:\n    $A()\nexcept TypeError as $e:\n    r.append(type($e).__name__)", "r.append(($A.registry, $C.tag))", "r.append(isinstance($C(), $A))", "r.append([q for q in sorted($A.registry)])", "class $B($C, tag={s}):\n    p = {i}\nr.append(($B().run({i}), sorted($A.registry)))\n$A.registry.pop({s}, None)",
        "r.append(issubclass($C, $A))", "r.append(sorted($A.__abstractmethods__))",
    ),
    _of(
        """
class $M(type):
    def __new__(mcs, name, bases, space, **kwargs):
        space["added"] = len(bases)
        return super().__new__(mcs, name, bases, space)
    def __init__(cls, name, bases, space, extra=0):
        super().__init__(name, bases, space)
        cls.extra = extra
    def __call__(cls, *args):
        r.append(("make", cls.__name__[0], args))
        return super().__call__(*args)
    def __len__(cls):
        return 3 + cls.extra
    def __getitem__(cls, n):
        {F n}
        return (cls.__name__[0], n)
    def __iter__(cls):
        return iter([cls.extra])
    @property
    def double(cls):
        return cls.extra * 2
class $C(metaclass=$M, extra={i}):
    def __new__(cls, v):
        self = super().__new__(cls)
        self.v = v
        return self
    def __init__(self, v):
        self.n = v
        {F v}
    def __class_getitem__(cls, n):
        return n
""",
        "r.append($C({v}).v)", "r.append(len($C))", "r.append($C[{i}])", "r.append(list($C))", "r.append($C.double)", "r.append(($C.added, $C.extra))", "$C.extra = {i}\nr.append($C.double)", "class $B($C, extra=1):\n    pass\nr.append(($B({i}).n, len($B), $B.added))", "r.append(type($C).__name__[0])", "r.append(isinstance($C, $M))",
    ),
    _of(
        """
class $D(dict):
    def __missing__(self, k):
        {F}
        self[k] = len(self)
        return self[k]
    def __setitem__(self, k, v):
        r.append(("set", k))
        super().__setitem__(k, v)
    def get(self, k, default=None):
        return super().get(k, ("default", default))
class $L(list):
    name = "l"
    def append(self, v):
        super().append(v)
        {F v}
        super().append(len(self))
    def __getitem__(self, n):
        return super().__getitem__(n) if isinstance(n, slice) else super().__getitem__(n) * 2
    def __iter__(self):
        for v in super().__iter__():
            yield v
            {Y v}
class $N(int):
    def __add__(self, v):
        {F v}
        return $N(int(self) + v + 100)
    def __repr__(self):
        return f"N({{int(self)}})"
class $S(str):
    def upper(self):
        return "up " + super().upper()
    def __getitem__(self, n):
        return $S(super().__getitem__(n))
class $T(tuple):
    def __new__(cls, *args):
        self = super().__new__(cls, args)
        self.extra = len(args)
        return self
    def __contains__(self, v):
        {F v}
        return True
""",
        "$q = $D(a={i})\nr.append(($q['a'], $q['z'], $q.get('y'), len($q)))", "$q = $D()\n$q['k'] = {v}\n$q.update(e={i})\nr.append($q)", "$q = $L([{i}, {v}])\n$q.append({v})\nr.append($q)", "r.append(list($L({l}))[:12])", "$q = $L({l})\n$q += [1]\nr.append($q[0])", "r.append($N({i}) + {i})", "r.append(repr($N({i})))", "r.append({i} + $N({i}))", "r.append(sum([$N(1), $N({i})]))",
        "r.append($S({s}).upper())", "r.append($S({s})[0:1].upper())", "r.append({i} in $T(1, 2))", "r.append($T({v}, {i}).extra)", "r.append($T(*{l}))", "r.append(isinstance($L(), list))", "r.append($L({l}) == {l})", "for {=i} in $L([1, 2]):\n    {L}", "r.append({{**$D(a=1), 'b': {i}}})", "r.append(sorted($L({l}), reverse=True)[:3])", "r.append(f'{{$N({i})}}')", "r.append([*$T({t}, {i})])", "$q = $L({l})\n$q[0:1] = [{v}]\nr.append($q)\nr.append(len($q))",
        "r.append(','.join([$S({s}), 'z']))", "r.append($N({i}) * 2 == {i})", "r.append($D.fromkeys('ab', {v}))", "$q = copy.copy($L({l}))\nr.append((type($q) is $L, len($q)))",
    ),
    _of(
        """
@functools.singledispatch
def $f(v, n=0):
    {F v n}
    return ("any", n)
@$f.register
def _(v: int, n=0):
    {F v n}
    return ("int", v + n)
@$f.register(str)
@$f.register(list)
def _(v, n=1):
    return ("seq", len(v) + n)
@functools.total_ordering
class $C:
    def __init__(self, n):
        self.n = n
    def __eq__(self, v):
        return self.n == v.n
    def __lt__(self, v):
        {F self.n}
        return self.n < v.n
    @functools.singledispatchmethod
    def m(self, v):
        return "other"
    @m.register
    def _(self, v: int):
        return v + self.n
    half = functools.partialmethod(lambda self, a, b: (self.n, a, b), {i})
""",
        "r.append($f({i}))", "r.append($f({s}, n={i}))", "r.append($f({l}, {i}))", "r.append($f({d}))", "r.append($f({b}))", "r.append($f.dispatch(bool) is $f.dispatch(int))", "r.append($C({i}) >= $C({i}))", "r.append($C({i}) <= $C({i}))", "r.append([q.n for q in sorted([$C({i}), $C({i}), $C(1)], reverse=True)])", "r.append($C({i}).m({i}))", "r.append($C({i}).m({s}))", "r.append($C({i}).half({v}))",
    ),
    _of(
        """
class $I:
    def __init__(self, n, x=None):
        self.n, self.i = n, 0
    def __iter__(self):
        self.i = 0
        return self
    def __next__(self):
        if self.i >= self.n:
            raise StopIteration(self.i)
        self.i += 1
        {F self.i}
        return self.i
    def __reversed__(self):
        return iter([self.n, "rev"])
    def __length_hint__(self):
        return 2
    def __index__(self):
        return 1
""",
        "r.append(list($I({i} % 4)))", "for {=i} in $I({i} % 4):\n    {L}", "r.append(list(reversed($I({i}))))", "$q = iter($I(3))\nr.append((next($q), *$q))", "r.append([a * b for a in $I(2) for b in $I(3)])", "r.append({l}[$I({i})])", "r.append(dict(zip($I(2), $I({i}))))", "r.append(list(zip($I(2), {s})))", "r.append(sum($I({i} % 4), {i}))",
        "r.append({i} in $I(3))", "$a, $b = $I(2)\nr.append(($a, $b))", "def $g():\n    v = yield from $I({i} % 3)\n    yield ('value', v)\nr.append(list($g()))", "r.append(max($I(3), key=lambda q: -q))", "r.append(sorted($I(3), key=lambda q: q % 2))", "r.append(next($I(0), 'none'))", "r.append([*map(operator.add, $I(2), $I(2))])", "r.append(list(enumerate($I(2), {i})))", "r.append(range(5)[$I(1)])",
    ),
    _of(
        """
def $f(a, /, b, c={i}, *args, k={s}, **kwargs):
    {F}
    return (a, b, c, args, k, kwargs)
def $g(n, *, key=None):
    {F n}
    return $f(n, key, *[n] * 2, **({{'k': n}} if n else {{}}))
""",
        "r.append($f({i}, {v}))", "r.append($f({i}, *{l}))", "r.append($f({v}, b={v}, z={t}))", "r.append($f(1, 2, 3, 4, *{l}, k={v}, **{d}))", "try:\n    $f({i})\nexcept TypeError as $e:\n    r.append(str($e))", "try:\n    $f(a=1, b={i})\nexcept TypeError as $e:\n    r.append(str($e))", "try:\n    $g(1, 2)\nexcept TypeError as $e:\n    r.append(str($e))", "r.append($g({i}, key={v}))",
        "$h = functools.partial($f, {i}, k={v})\nr.append($h(2))\nr.append($h(b={i}))", "r.append(list(map(functools.partial($f, {i}), {l}[:2])))", "try:\n    $f(1, 2, b=3)\nexcept TypeError as $e:\n    r.append(str($e))", "r.append(($f.__defaults__, *$f.__kwdefaults__.items()))", "$f.tag = {i}\nr.append($f.tag)",
    ),
    _of(
        """
def $g(n, x):
    try:
        for k in range(n % 4):
            v = yield k, x
            r.append(("sent", v))
            {Y n x}
    except ValueError as e:
        r.append(("in", e.args))
        yield "caught"
    finally:
        r.append(("fin", n))
    return n
def $h(n, x):
    v = yield from $g(n, x)
    r.append(("of", v))
    {Y n}
    return v
""",
        "r.append(list($g({i}, {t}))[:9])", "for $q in $h({i}, {t}):\n    r.append($q)\n    {L}", "$q = $h(3, {t})\nr.append(next($q))\nr.append($q.send({v}))\nr.append($q.throw(ValueError({i})))\n{B}\n$q.close()", "$q = $g(3, {t})\nr.append(next($q))\n$q.close()\nr.append(list($q))", "$a, *$b = $h(2, {t})\nr.append(($a, $b))", "r.append(next($g({i}, {t}), 'none'))", "$q = $g(3, {t})\nnext($q)\ndel $q\nr.append('dropped')",
        "r.append(dict(zip({s}, $h(3, {t}))))", "r.append([q for q in $h({i}, {t}) if isinstance(q, tuple)][:5])", "try:\n    $q = $g(2, {t})\n    next($q)\n    $q.throw({e})\nexcept Exception as $e:\n    r.append(repr($e))", "r.append(list(itertools.islice($h(3, {t}), 2)))", "$q = $h(2, {t})\ntry:\n    for _ in range(9):\n        r.append(next($q))\nexcept StopIteration as $e:\n    r.append($e.value)", "r.append(list(zip($g(2, {t}), $g(3, {t}))))",
    ),
    _of(
        """
def $f(n, l):
    def go(q, *rest):
        nonlocal n
        n += q
        {F n}
        return n if q <= 0 else (n, go(q - 1, *rest, q))
    return go
def $w(n):
    state = {{'n': n}}
    def get():
        return state['n']
    def put(v):
        nonlocal n
        {F v}
        n = v
        state['n'] = v
        return n
    return get, put
def $m(f, *args):
    try:
        return f(*args)
    except Exception as e:
        r.append(("m", type(e).__name__))
        {F}
        return None
    finally:
        r.append("m done")
""",
        "r.append($f({i}, {l})({i} % 4))", "$q, $p = $w({i})\nr.append(($p({v}), $q()))", "$q, $p = $w({i})\n{B}\nr.append($q())", "r.append($m(lambda n: n // {i}, {i}))", "r.append($m(operator.getitem, {l}, {i}))", "r.append($m($f({i}, []), 2))", "r.append($m(int, {s}))", "r.append($m($m, $f, {i}, {l}) is None)", "$q = $f({i}, {l})\nr.append([$q(0), $q(1)])", "def $z(n):\n    {F n}\n    raise {e}\nr.append($m($z, {i}))",
    ),
)  # fmt: skip
# what a later call finds changed; `a` are the arguments
CHANGES = (
    "a['n'] += 1", "a['n'] = -a['n']", "a['n'] = True", "a['n'] = 2.0", "a['k'] += 1", "a['s'] = 'b,a'", "a['s'] += 'a'", "a['l'].append(4)", "a['l'].reverse()", "a['l'].clear()", "a['l'][0:1] = [7]", "a['l'] = tuple(a['l'])",
    "a['d']['b'] = 9", "a['d'].pop('a', None)", "a['d']['z'] = 4", "a['d'] = dict(reversed(a['d'].items()))", "a['x'] = a['x'] * 2", "a['y'] = a['x']", "a['x'] = a['x'].double()", "a['o'].n += 1", "a['o'].v = 3", "a['o'].items.append(2)",
    "a['o'].extra = 1", "a['o'].limit = 9", "Box.limit = 7", "Box.bump = lambda self, by=1: by", "G = 5", "H.append(3)", "H[:] = [5]", "a['o'] = Box(4, a['x'])", "a['o'].bump = lambda by=1: -by", "Ctx.__exit__ = lambda self, *e: True", "a['o'].v = a['o'].items", "a['n'] = None", "a['k'] = 'k'", "pass",
)  # fmt: skip
