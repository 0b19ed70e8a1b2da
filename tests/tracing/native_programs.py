"""Programs that Thunder's interpreter meets in all its parts: closures, classes, containers, exceptions, iteration."""

import collections
import dataclasses
import functools
from types import SimpleNamespace

import torch

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


@program
def calls(x):
    def f(a, /, b, *rest, c=3, d, **others):
        return a + 2 * b + sum(rest) + c * d + sum(others.values())

    args, options = (1, 2, 3), {"d": 4, "e": 5}
    method = functools.partial(f, 1, d=2)
    return x * (f(*args, **options) + f(1, b=2, d=3) + method(5, z=6) + (lambda *a, k=1: len(a) + k)(*args))


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
def views_of_mappings(x):
    scales = collections.OrderedDict(b=2.0, a=3.0)
    scales["c"] = 4.0
    for key in scales.keys():
        x = x * scales[key]
    for value in scales.values():
        x = x + value
    for key, value in {"d": 1.0, "e": 2.0}.items():
        x = x - value * scales.get(key, 0.5) + ({}.get(key) or 1)
    return x


@program
def operations_without_gradients(x):
    with torch.no_grad():
        y = torch.addmm(x[0], x, torch.ones(3, 3)).t()
        z = torch.addmm(x[0], x, torch.ones(3, 3)) + torch.addmm(x[:1, 0], x, torch.ones(3, 1))
    return (y @ z).sum() * x


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
