"""Programs drawn at random from what Thunder's interpreter does by interpreting itself: calls, generators, containers, attributes."""

import linecache
import random
from collections.abc import Callable

import torch

from tests.seeds import seeded

PARTS: list[Callable[[random.Random, int], str]] = []


def part(write: Callable[[random.Random, int], str]) -> Callable[[random.Random, int], str]:
    """Statements that change the number `n`; the number given is in their names."""
    PARTS.append(write)
    return write


def drawn(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A program of one tensor; some raise errors, which are to be the same too."""
    choose = random.Random(seeded(seed))
    parts = [write(choose, i) for i, write in enumerate(choose.sample(PARTS, k=4))]
    lines = ["import collections, functools", "def program(x):", "    n = 1"]
    for text in parts:
        guarded = choose.random() < 0.5
        lines += ["    try:"] * guarded
        lines += [("    " + "    " * guarded + line) for line in text.splitlines() if line.strip()]
        lines += ["    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as e:"] * guarded
        lines += ["        n += len(type(e).__name__)"] * guarded
    lines.append("    return x * n + (x if n % 2 else -x)")
    source, file = "\n".join(lines) + "\n", f"<drawn program {seed}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict = {}
    exec(compile(source, file, "exec"), names)
    return names["program"]


def _some(choose: random.Random, *options: str) -> str:
    """Some of the texts, one below the other, in an order of their own."""
    return "\n".join(choose.sample(options, k=choose.randint(1, len(options))))


def _indented(text: str, by: int = 4) -> str:
    return "\n".join(" " * by + line for line in text.splitlines())


@part
def closures(choose, i):
    default, given = choose.randint(0, 3), choose.randint(1, 4)
    call = choose.choice(
        [f"({given})", f"({given}, 2, 3, k=4)", "(*[1, 2], **{'c': 5})", "(b=2, a=1)", "()", f"({given}, a=1)", "(1, z=n)"]
    )
    return f"""
def f{i}(a, b={default}, *rest, c={given}, **more):
    def inner(v, by=c):
        nonlocal n
        n += 1
        return v * by + n
    return inner(a) + b + len(rest) + sum(more.values())
n += f{i}{call}
"""


@part
def generators(choose, i):
    use = choose.choice(
        [
            *(f"sum(g{i}(3))", f"next(g{i}(2))", f"max(v for v in g{i}(3))", f"len([v for v in g{i}(4) if v])"),
            *(f"any(v for v in g{i}(3))", f"sum(v for v, _ in zip(g{i}(3), [1]))", f"(1 in g{i}(3))"),
            *(f"next(map(lambda v: v + 1, g{i}(3)))", f"next(enumerate(g{i}(3)))[0]", f"next(w for w in [g{i}(2)]).send(None)"),
        ]
    )
    broken = choose.choice(["break", "continue", "raise ValueError('x')"])
    return f"""
def g{i}(k):
    try:
        for j in range(k):
            got = yield j
            if got:
                yield got * 2
    finally:
        steps.append(k)
steps = []
n += {use}
n += 10 * len(steps)
for v in g{i}(3):
    if v == 1:
        {broken}
    n += v
n += 100 * len(steps)
"""


@part
def subclassed_dicts(choose, i):
    base = choose.choice(["dict", "collections.OrderedDict"])
    methods = _some(
        choose,
        "def __getitem__(self, key):\n    return super().__getitem__(key) + 1",
        "def __missing__(self, key):\n    return 7",
        "def __len__(self):\n    return super().__len__() + 2",
        "def __contains__(self, key):\n    return key == 'z'",
        "def __bool__(self):\n    return False",
        "extra = 3",
    )
    uses = _some(choose, "n += d['a']", "n += len(d)", "n += bool(d)", "n += 'a' in d", "n += d['q']", "n += d.get('b', 5)")
    return f"class D{i}({base}):\n{_indented(methods)}\nd = D{i}(a=1, b=2)\n{uses}"


@part
def subclassed_lists(choose, i):
    methods = _some(
        choose,
        "def __len__(self):\n    return 9",
        "def __getitem__(self, key):\n    return super().__getitem__(key) * 2",
        "def __iter__(self):\n    return iter((4, 5))",
        "def __contains__(self, key):\n    return True",
    )
    uses = _some(choose, "n += len(s)", "n += s[0]", "n += sum(s)", "n += 8 in s", "for v in s:\n    n += v", "n += s[-1]")
    return f"class L{i}(list):\n{_indented(methods)}\ns = L{i}([1, 2, 3])\n{uses}"


@part
def changed_containers(choose, i):
    uses = _some(
        choose,
        "for v in items:\n    if len(items) < 6:\n        items.append(v + 1)",
        "for k in table:\n    n += table[k]",
        "table['c'] = 3",
        "for k in table:\n    table['new'] = 1\n    n += 1",
        "items[:2] = [7]",
        "n += items.pop() + table.pop('a', 4)",
        "del items[0]",
        "table |= {'x': n}",
        "n += len(items + [1]) + len({**table, 'y': 2})",
        "n += ordered['p'] if ordered else 0",
        "n += 3 in items",
        "n += bool(table) + bool([]) + (not ordered)",
    )
    return f"items, table, ordered = [1, 2, 3], {{'a': 1, 'b': 2}}, collections.OrderedDict(p=5)\n{uses}\nn += sum(items)"


@part
def attributes(choose, i):
    methods = _some(
        choose,
        "def __getattr__(self, name):\n    if name == 'made':\n        return 6\n    raise AttributeError(name)",
        "def __setattr__(self, name, value):\n    object.__setattr__(self, name, value + 1)",
        "@property\ndef computed(self):\n    return self.own * 2",
        "@property\ndef failing(self):\n    raise AttributeError('no')",
        "@property\ndef raising(self):\n    raise ValueError('no')",
        "shared = 4",
        "__len__ = lambda self: 2",
        "def __bool__(self):\n    return self.own > 2",
    )
    names = ("made", "own", "computed", "failing", "raising", "shared", "nothing")
    uses = _some(
        choose,
        *(f"n += hasattr(o, '{name}')" for name in choose.sample(names, k=3)),
        *(f"n += getattr(o, '{name}', 8)" for name in choose.sample(names, k=3)),
        "o.own = 5\nn += o.own",
        "o.own += 1",
        "n += bool(o)",
        "n += o.shared",
        "del o.own",
        "vars(o)['own'] = 11\nn += o.own",
    )
    init = "def __init__(self):\n    self.own = 3"
    return f"class A{i}:\n{_indented(init)}\n{_indented(methods)}\no = A{i}()\n{uses}"


@part
def descriptors(choose, i):
    methods = _some(
        choose,
        "def __get__(self, obj, cls=None):\n    return self if obj is None else 4",
        "def __set__(self, obj, value):\n    vars(obj)['_t'] = value",
        "def __delete__(self, obj):\n    vars(obj)['_t'] = 0",
        "def __set_name__(self, owner, name):\n    self.name = name",
    )
    uses = _some(
        choose, "o.t = 3", "n += isinstance(o.t, int)", "n += getattr(o, '_t', 2)", "del o.t", "n += hasattr(type(o).t, 'name')"
    )
    return f"class T{i}:\n{_indented(methods)}\nclass U{i}:\n    t = T{i}()\n    def __init__(self):\n        pass\no = U{i}()\n{uses}"


@part
def operators(choose, i):
    methods = _some(
        choose,
        "def __add__(self, other):\n    return NotImplemented",
        "def __radd__(self, other):\n    return 2",
        "def __mul__(self, other):\n    return other + 1",
        "def __rmul__(self, other):\n    return other",
        "def __iadd__(self, other):\n    return 5",
        "def __eq__(self, other):\n    return True",
        "def __contains__(self, key):\n    return [key]",
        "def __or__(self, other):\n    return other",
    )
    uses = _some(
        choose,
        "n = n + o",
        "n += int(o + 3)",
        "n += o * 2",
        "n += 3 * o",
        "n += o == 4",
        "n += 1 in o",
        "n += o in [1]",
        "n += o | 3",
    )
    return f"class O{i}:\n{_indented(methods)}\no = O{i}()\n{uses}"


@part
def partials(choose, i):
    made = choose.choice(
        [
            f"h{i}, 1",
            f"h{i}, 1, 2, c=3",
            f"h{i}, c=n",
            f"functools.partial(h{i}, 2), 3",
            "isinstance, x",
            "max, 4",
            "torch_like, x",
        ]
    )
    call = choose.choice(["()", "(5)", "(c=4)", "(5, c=6)", "(*[1, 2])", "(**{'z': 1})"])
    return f"""
def h{i}(a, b=2, *rest, c=1, **more):
    return a + b * c + len(rest) + len(more)
def torch_like(t, *rest, **more):
    return t.dim() + len(rest)
n += functools.partial({made}){call}
"""


@part
def inheritance(choose, i):
    call = choose.choice(["super().value(k)", f"super(C{i}, self).value(k)", "Base.value(self, k)", "super().missing"])
    return f"""
class Base:
    def value(self, k):
        return k + 1
    @classmethod
    def of(cls):
        return cls()
    @staticmethod
    def fixed():
        return 2
class C{i}(Base):
    def value(self, k):
        return {call} * 2
    def __iter__(self):
        self.left = 2
        return self
    def __next__(self):
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return self.left
c = C{i}.of()
n += c.value(n) + c.fixed() + sum(v for v in c) + len(list(c)) + isinstance(c, Base)
"""


@part
def exceptions(choose, i):
    raised = choose.choice(["1 // 0", "[][1]", "{}['k']", "raise KeyError('k') from ValueError('v')", "int('q')", "x.nothing"])
    caught = choose.choice(["ZeroDivisionError", "LookupError", "(KeyError, ValueError)", "Exception"])
    return f"""
try:
    try:
        {raised}
    except {caught} as error:
        n += len(error.args)
        raise
    else:
        n += 1
    finally:
        n += 10
except (KeyError, AttributeError):
    n += 100
"""
