"""Programs of plain Python: lists, dicts, callbacks, operators, classes and exceptions around a tensor."""

from __future__ import annotations

import bisect
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import heapq
import itertools
import sys
from collections.abc import Callable

import torch

PROGRAMS: dict[str, Callable] = {}


def program(f: Callable) -> Callable:
    PROGRAMS[f.__name__] = f
    return f


# -- dicts --------------------------------------------------------------------------------------------------------------------


@program
def views_of_an_empty_dict_are_false(x):
    d = {}
    return x * (2 if d.keys() else 3) + (5 if d.items() else 7) - (11 if d.values() else 13)


@program
def views_have_lengths_and_members(x):
    d = {"a": 1, "b": 2}
    inside = [1 in d.values(), 5 in d.values(), ("a", 1) in d.items(), ("a", 2) in d.items(), "b" in d.keys()]  # noqa: SIM118
    return x * len(d.keys()) + len(d.items()) * 10 + len(d.values()) * 100 + sum(2**i for i, v in enumerate(inside) if v)


@program
def views_are_compared_as_sets(x):
    a, b = {1: 2, 3: 4}, {3: 4, 1: 2}
    equal = [a.keys() == b.keys(), a.items() == b.items(), a.keys() == {1}, a.keys() <= {1, 3, 5}, a.keys().isdisjoint([7])]
    return x * sum(2**i for i, v in enumerate(equal) if v) + sum(a.keys() & {1, 9}) + len(a.keys() | {8}) + len(a.keys() - {1})


@program
def views_are_reversed(x):
    d = {"a": 1, "b": 2, "c": 3}
    return (
        x * list(reversed(d.values()))[0] + len(list(reversed(d.items()))[0][0]) + (list(reversed(d.keys())) == ["c", "b", "a"])
    )


@program
def views_hold_tensors(x):
    d = {"a": x, "b": 2 * x}
    return sum(d.values()) * len(d.values()) + list(reversed(d.items()))[0][1]


@program
def a_key_is_missing(x):
    d, c = collections.defaultdict(lambda: 4), collections.Counter("aab")
    d["z"] = 5
    return x * (2 if d.get("a") is None else 3) + c["a"] + c.get("z", 10) + c["q"] + d.get("z", 0) + len(d) + d["new"] + len(d)


@program
def items_are_taken_out(x):
    d = {"a": 1, "b": 2, "c": 3}
    k, v = d.popitem()
    o = collections.OrderedDict(a=1, b=2, c=3)
    first, _ = o.popitem(last=False)
    o.move_to_end("b")
    r = x * v + len(k) + len(d) + ord(first) + list(o.values())[0]
    d.clear()
    return r * 10 + len(d) + (1 if d else 2)


@program
def objects_are_copied(x):
    class Pair:
        def __init__(self):
            self.items, self.n = [1], 2

    a = Pair()
    b, c = copy.copy(a), copy.deepcopy(a)
    b.items.append(2)
    c.items.append(3)
    c.n = 5
    return x * len(a.items) + len(c.items) * 10 + a.n + sum(dict.fromkeys("abc", 7).values())


@program
def an_empty_dict_has_no_last_item(x):
    try:
        {}.popitem()
    except KeyError as e:
        return x * len(str(e))
    return x


@program
def the_most_common_are_counted(x):
    return x * collections.Counter([1, 1, 2]).most_common(1)[0][1] + collections.Counter("abracadabra").most_common(2)[1][1]


# -- lists --------------------------------------------------------------------------------------------------------------------


@program
def elements_are_found_within_bounds(x):
    v = [1, 2, 1, 2, 3]
    return x * v.index(2, 2) + v.index(1, -3) + (1, 2, 1).index(1, 1) * 10 + v.count(2) * 100 + (3, 3).count(3)


@program
def what_is_not_there_is_not_found(x):
    said = 0
    for call in (lambda: [1].index(2), lambda: [1, 2].index(1, 1), lambda: (1,).index(3), lambda: [1].remove(5)):
        try:
            call()
        except ValueError:
            said += 1
    return x * said


@program
def the_same_object_is_found_whatever_it_says_of_equality(x):
    class Never:
        def __eq__(self, other):
            return False

        __hash__ = object.__hash__

    n = Never()
    return x * ((n in [n]) + 2 * (Never() in [n]) + 4 * [1, n].index(n) + 8 * [n, n].count(n))


@program
def a_tensor_is_found_by_being_the_same(x):
    y = x + 1
    return x * (2 if y in [y, x] else 3) + [y, x].index(y)


@program
def lists_are_changed_in_place(x):
    v = [3, 1, 2]
    same = v
    v.sort()
    v.remove(1)
    v.insert(0, 9)
    v.insert(-1, 7)
    v.insert(100, 5)
    v *= 2
    v.reverse()
    del v[0]
    r = sum(e * 10**i for i, e in enumerate(same))
    v.clear()
    return x * r + len(same)


@program
def lists_of_tensors_are_sorted_by_numbers(x):
    v = [(2, x * 2), (1, x), (2, x * 5)]
    v.sort(key=lambda t: t[0], reverse=True)
    return v[0][1] * 3 + v[1][1] * 7 + v[2][1]


@program
def classes_say_what_is_less(x):
    class Version:
        def __init__(self, n):
            self.n = n

        def __lt__(self, other):
            return self.n % 10 < other.n % 10

    v = [Version(n) for n in (13, 2, 23, 1, 12)]
    ordered = [e.n for e in sorted(v)] + [e.n for e in sorted(v, reverse=True)]
    return x * sum(e * (i + 1) for i, e in enumerate(ordered)) + min(v).n


@program
def what_cannot_be_sorted_is_an_error(x):
    try:
        [1, "a"].sort()
    except TypeError:
        return x * 2
    return x


@program
def heaps_and_ordered_lists_hold_tensors(x):
    heap = [(3, x), (1, 2 * x), (2, 5 * x)]
    heapq.heapify(heap)
    heapq.heappush(heap, (0, 7 * x))
    first, second = heapq.heappop(heap), heapq.heapreplace(heap, (9, x))
    v = [1, 5]
    bisect.insort(v, 3)
    return first[1] + second[1] * 10 + heap[-1][1] * 100 + heapq.nlargest(2, [4, 1, 6])[1] + heapq.nsmallest(1, [4, 1])[0] + v[1]


@program
def a_subclass_of_list_says_what_is_appended(x):
    class Doubling(list):
        def append(self, value):
            super().append(value * 2)

    v = Doubling([1])
    v.append(3)
    v.append(x)
    return v[2] * v[1] + v[0]


# -- callbacks ----------------------------------------------------------------------------------------------------------------


@program
def callbacks_assign_variables_of_the_function(x):
    n = 0

    def key(v):
        nonlocal n
        n += 1
        return -v

    s = sorted([1, 2, 3], key=key)
    largest, smallest = max([4, 5], key=key), min(6, 7, key=key)
    mapped, kept = list(map(key, [1, 2])), list(filter(key, [0, 1]))
    return x * n + s[0] + largest + smallest + sum(mapped) + len(kept)


@program
def callbacks_call_torch(x):
    parts = list(map(torch.relu, [x, -x])) + list(itertools.accumulate([x, x, x], torch.add))
    return (
        functools.reduce(torch.add, parts) + max([x, 2 * x], key=lambda t: t.ndim) + sum(itertools.starmap(torch.mul, [(x, x)]))
    )


@program
def callbacks_choose(x):
    small, rest = itertools.takewhile(lambda v: v < 3, [1, 2, 3, 1]), itertools.dropwhile(lambda v: v < 3, [1, 2, 3, 1])
    odd = itertools.filterfalse(lambda v: v % 2 == 0, range(6))
    return x * len(list(small)) + len(list(rest)) * 10 + len(list(odd)) * 100 + max([], default=7) + len(max("a", "bb", key=len))


@program
def an_empty_sequence_has_no_largest(x):
    try:
        max([], key=abs)
    except ValueError as e:
        return x * len(str(e))
    return x


# -- classes and operators ----------------------------------------------------------------------------------------------------


@program
def class_attributes_are_assigned_after_they_were_read(x):
    class Base:
        v = 1

    class Derived(Base):
        pass

    b, d = Base(), Derived()
    y = x * b.v * d.v * Derived.v
    Base.v = 5
    y = y + b.v + d.v * 10 + Derived.v * 100
    b.v = 7
    Base.v = 8
    return y * 2 + b.v + d.v


@program
def the_right_operand_of_a_subclass_is_asked_first(x):
    class Own(int):
        def __radd__(self, other):
            return 100

        def __add__(self, other):
            return 50

        def __rsub__(self, other):
            return NotImplemented

    return x * (1 + Own(2)) + (Own(1) + 1) + (7 - Own(2)) + (3 * Own(2))


@program
def in_place_methods_come_before_reflected_ones(x):
    class Base:
        n = 3

        def __iadd__(self, other):
            return Base()

    class Own(Base):
        def __radd__(self, other):
            return 5

    class OwnList(list):
        def __radd__(self, other):
            return 7

    a, b = Base(), [1]
    a += Own()
    b += OwnList([2])
    return x * a.n + b + ([1] + OwnList())


@program
def dataclasses_are_made_in_programs(x):
    @dataclasses.dataclass
    class Pair:
        first: int
        second: int = 4

    match Pair(3):
        case Pair(a, b):
            return x * a + b
    return x


@program
def enumerations_are_looked_up(x):
    class Mode(enum.Enum):
        ADD = 1
        MUL = 2

    return x * Mode.MUL.value + (10 if Mode(1) is Mode.ADD else 0) + len(list(Mode))


# -- exceptions ---------------------------------------------------------------------------------------------------------------


@program
def exceptions_know_what_was_handled(x):
    try:
        try:
            raise ValueError(3)
        except ValueError:
            {}["a"]
    except KeyError as e:
        assert isinstance(e.__context__, ValueError)
        x = x * e.__context__.args[0]
    try:
        raise TypeError
    except TypeError as e:
        return x * (2 if e.__context__ is None else 5)


@program
def a_cause_is_no_context_alone(x):
    try:
        try:
            raise ValueError(1)
        except ValueError as v:
            raise KeyError(2) from v
    except KeyError as e:
        return x * (2 if e.__cause__ is e.__context__ else 3) * (5 if e.__suppress_context__ else 7)


@program
def contexts_that_go_round(x):
    first, second = ValueError(1), KeyError(2)
    first.__context__, second.__context__ = second, first
    try:
        try:
            raise first
        except ValueError:
            raise TypeError(3)  # noqa: B904
    except TypeError as e:
        return x * (2 if e.__context__ is first else 3)


@program
def a_block_suppresses_an_exception(x):
    with contextlib.suppress(KeyError):
        {}["a"]
        x = x * 100
    return x * 2


@program
def tensors_equal_no_none_and_no_string(x):
    asked = [x == None, x != None, None == x, x == "a", "a" != x, x == [1.0], (1, 2) == x, {} != x]  # noqa: E711
    return x * (2 if asked[0] else 3) + sum(2**i for i, a in enumerate(asked) if a is True)


class Color(enum.Enum):
    RED = 1


@program
def tensors_equal_no_object(x):
    asked = [x == object(), object() != x, Color.RED == x]
    return x * (2 if asked[0] else 3) + sum(2**i for i, a in enumerate(asked) if a is True)


class Joins:
    """What is joined to a sequence says itself what the result is."""

    def __radd__(self, other):
        return type(other).__name__, len(other)

    def __rmul__(self, other):
        return type(other).__name__


class JoinsNothing:
    def __radd__(self, other):
        return NotImplemented


class Sums(list):
    def __add__(self, other):
        return "a sum", 7


@program
def what_is_joined_to_a_sequence_is_asked_first(x):
    a = [1, 2]
    a += Joins()
    found = [a, [1, 2] + Joins(), (1,) + Joins(), "abc" + Joins(), [x] * Joins(), Sums([1]) + Joins(), [1] * 2 + [3]]
    assert found == [("list", 2), ("list", 2), ("tuple", 1), ("str", 3), "list", ("a sum", 7), [1, 1, 3]]
    try:
        found += [1] + JoinsNothing()
    except TypeError:
        return x * 2
    return x


@program
def a_class_that_a_program_makes(x):
    made = type("Made", (Sums,), {"times": 3, "twice": lambda self, v: v * 2})
    try:
        type("Made", (int, str), {})
    except TypeError:
        return made().twice(x) * made.times + (made() + 1)[1]
    return x


@program
def refusals_that_a_program_tries(x):
    def stores(v):
        v[0] = 1

    def deletes(v):
        del v[0]

    def unpacks(v):
        first, *rest = v

    tried = [lambda v: v[0], lambda v: v[1:2], lambda v: v[:, 1], stores, deletes, unpacks, next, iter, len]
    tried += [lambda v: v(), lambda v: v < "a", lambda v: v in v, lambda v: {[]: v}, lambda v: {v, ()[:], *v}]
    refused = 0
    for attempt in tried:
        for value in (5, None, 1.5):
            try:
                attempt(value)
            except TypeError:
                refused += 1
    skip = 0
    for _ in range(2):
        try:
            skip = skip[:, -1:] + x  # WaveNets begin with a number
        except TypeError:
            skip = x
    return x * refused + skip


@program
def too_few_values_to_unpack(x):
    def generated():
        first, *rest = []
        yield first, rest

    said = []
    for values in ([], [1], (1, 2, 3), 5, range(4)):
        try:
            first, *_, last = values
            said.append(f"{first} {last}")
        except (ValueError, TypeError) as e:
            said.append(str(e))
    try:
        list(generated())
    except ValueError as e:
        said.append(str(e))
    return x * len("".join(said)) + len(said)


class Deleting:
    kept = 1.0

    @property
    def p(self):
        return self.kept

    @p.setter
    def p(self, value):
        self.kept = value * 2

    @p.deleter
    def p(self):
        self.kept = 0.5

    def __delattr__(self, name):
        object.__setattr__(self, "last", name) if name == "nothing" else object.__delattr__(self, name)


@program
def deleters_of_the_program_run(x):
    held = Deleting()
    held.p = 3.0
    before = held.p
    del held.p, held.nothing
    return x * before + held.p + len(held.last)


@program
def what_is_handled_is_known(x):
    def asked():
        return sys.exc_info()[0]

    try:
        1 // 0  # noqa: B018
    except ZeroDivisionError as e:
        found = asked() is type(e), sys.exc_info()[1] is e
    return x * sum(found) + (sys.exc_info() == (None, None, None))


@program
def errors_say_what_python_says(x):
    class Other:
        __slots__ = ()

    class Right:
        def __ror__(self, other):
            return 3

    attempts = [
        *(lambda: [][1], lambda: [].pop(), lambda: Other() + 1, lambda: 1 | Other(), lambda: Other().missing),
        *(lambda: Other.missing, lambda: isinstance(1, 2), lambda: isinstance(1)),
    ]
    said = []
    for attempt in attempts:
        try:
            attempt()
        except Exception as e:
            said.append(f"{type(e).__name__}: {e}")
    return x * len("".join(said)) + (Other() | Right())


@program
def lists_of_bools_are_masks(x):
    y = x * 1
    y[:, [True, False]] = 7.0
    return y[[False, True]].sum() + x[:, (True, False)].sum(0)


@program
def orders_ask_what_they_ask_in_eager_mode(x):
    asked = []

    class Ranked:
        def __init__(self, n):
            self.n = n

        def __lt__(self, other):
            asked.append((self.n, other.n))
            return self.n < other.n

    for count in (1, 2, 3, 7, 12):
        ranked = [Ranked(i * 5 % (count + 1)) for i in range(count)]
        for is_reversed in (False, True):
            asked += [r.n for r in sorted(ranked, reverse=is_reversed)]
        ranked.sort(key=lambda r: Ranked(-r.n))
        asked += [r.n for r in ranked]
    total = 0
    for i, pair in enumerate(asked):
        total += (i + 1) * (pair if isinstance(pair, int) else pair[0] * 3 - pair[1])
    return x * total


@program
def a_generator_stopped_inside_says_so(x):
    def stopping(n):
        yield n
        next(iter([]))

    def around():
        yield from stopping(2)

    said = []
    for attempt in (list, sorted, lambda g: dict(zip("ab", g, strict=False)), lambda g: [v for v in g], lambda g: sum(g)):
        for made in (stopping(1), around()):
            try:
                attempt(made)
            except RuntimeError as e:
                said.append(f"{e} {e.__cause__!r}")
    return x * sum(map(len, said)) + len(list(map(lambda v: next(iter([])), [1, 2])))
