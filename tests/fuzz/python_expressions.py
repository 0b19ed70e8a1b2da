"""Expressions of the structured programs, by kind.

Kinds: ``i`` an int, ``t`` a tensor of two entries, ``s`` a string, ``l`` a list of ints, ``d`` a dict of ints by letters, ``b`` a truth value, ``v``
anything.  In a template ``{i}`` is another expression of that kind; braces of the text itself are doubled.
"""

from __future__ import annotations

# of which kind what a program calls so is
KIND_OF = {
    **dict.fromkeys(("n", "k", "m", "self.v", "self.n", "G", "cls.k"), "i"),
    **dict.fromkeys(("x", "y", "self.t"), "t"),
    **dict.fromkeys(("s", "self.s"), "s"),
    **dict.fromkeys(("l", "self.items", "H"), "l"),
    **dict.fromkeys(("d",), "d"),
    **dict.fromkeys(("v", "args", "kwargs", "o.v", "self"), "v"),
}
LITERALS = {
    "i": ("0", "1", "2", "3", "-1", "5"),
    "t": ("torch.ones(2)", "torch.tensor([1.0, -2.0])"),
    "s": ("'ab'", "'a,b'", "''", "'Aa b'"),
    "l": ("[1, 2]", "[3, 1, 2]", "[]", "[0, 1]"),
    "d": ("{{'a': 1}}", "{{'b': 2, 'a': 3}}", "{{}}"),
    "b": ("True", "False"),
}
EXPRESSIONS = {
    "i": (
        *("{i} + {i}", "{i} - {i}", "{i} * 2", "{i} % 3", "{i} // 2", "{i} % {i}", "-{i}", "abs({i})", "({i} & 3) << 1", "{i} ^ {i}"),
        *("len({l})", "sum({l})", "{l}[0]", "{l}[-1]", "max({l}, default=0)", "min({i}, {i})", "{l}.count({i})", "len({s})"),
        *("({i} if {b} else {i})", "{d}['a']", "{d}.get('b', {i})", "sum({d}.values())", "int({b})", "divmod({i}, 3)[1]"),
        *("functools.reduce(operator.sub, {l}, {i})", "next(iter({l}), 7)", "(lambda q: q + {i})({i})", "round({i} / 2)"),
        *("{s}.count('a')", "sum(q * q for q in {l})", "len({{q % 2 for q in {l}}})", "({i} or {i})", "({i} and {i})", "{l}.index({i})"),
        *("max({l} or [0], key=lambda q: (q % 2, q))", "sum(1 for p, q in itertools.product({l}, {l}) if p < q)", "len(set({l}) | {{1}})"),
        *("ord({s}[0])", "int('1' + str(abs({i})))", "{x}.shape[0]", "sum(p * q for p, q in zip({l}, {l}))", "operator.itemgetter(0)({l})"),
        *("bytes([1, 2])[1]", "collections.Counter({s})['a']", "~{i}", "(*{l}, 4)[0]", "min(map(abs, {l}), default=2)"),
    ),
    "t": (
        *("{t} + {i}", "{t} * {t}", "{t}.sin()", "{t} - {t}", "{t} @ torch.ones(2, 2)", "torch.cat([{t}[:1], {t}[1:]])", "{i} - {t}"),
        *("torch.stack([{t}, {t}]).sum(0)", "sum([{t}, {t}])", "({t} if {b} else {t})", "{t} * len({l})", "functools.reduce(operator.add, [{t}, {t}])"),
        *("{t} / (1 + {i} * {i})", "torch.where({t} > 0, {t}, {t})", "sum(({t} * q for q in {l}), {t})", "-{t}", "max([{t}], key=len)"),
    ),
    "s": (
        *("{s} + 'a'", "{s}[:3]", "{s}.upper()", "f'{{{I}}}'", "'%s-%d' % ({s}, {i})", "'{{}}/{{}}'.format({i}, {s})", "','.join(map(str, {l}))"),
        *("str({i})", "repr({l})", "{s}.replace('a', 'b')", "{s}[::-1]", "f'{{{I}:>3}}'", "f'{{{Q}!r:.6}}'", "{s}.title()", "({s} or 'e')"),
        *("''.join(sorted({s}))", "{s}.partition(',')[0]", "{s}.split(',')[-1]", "({s} * 2)[:9]", "'{{:03d}}'.format({i})", "{s}.strip('a')"),
        *("''.join(c for c in {s} if c != 'a')", "max({s}, default='z')", "str({d})", "{s}[:3].encode().hex()", "f'{{{I}:{{abs({I}) % 5}}d}}'"),
    ),
    "l": (
        *("[{i}, {i}]", "sorted({l})", "{l}[1:]", "{l} + [{i}]", "[q * 2 for q in {l} if q]", "list(range({i} % 4))", "{l}[::-1]"),
        *("list(map(lambda q: q + {i}, {l}))", "[p - q for p, q in zip({l}, {l}[1:])]", "list(filter(None, {l}))", "[*{l}, {i}]"),
        *("list(itertools.chain({l}, [{i}]))", "list(itertools.accumulate({l}))", "list(dict.fromkeys({l}))", "sorted(set({l}))"),
        *("list(reversed({l}))", "sorted({l}, key=lambda q: -q)", "[q for p in [{l}, [1]] for q in p]", "list({d}.values())"),
        *("[$w := {i}, $w + 1]", "[[p + q for p in {l}] for q in {l}][0]", "sorted({l}, key=lambda q: q % 2, reverse=True)", "({l} * 2)[:6]"),
        *("list(itertools.islice(itertools.cycle({l} or [1]), 3))", "[sum(g) for _, g in itertools.groupby({l})]", "list({l})", "{l}.copy()"),
        *("[i for i, q in enumerate({l}, 1) if q % 2]", "list(itertools.takewhile(lambda q: q < 3, {l}))", "[q for q in {l} if ($w := q % 2) or $w]"),
        *("list(itertools.starmap(operator.add, zip({l}, {l})))", "[*map(operator.neg, {l})]", "list(collections.deque({l}, maxlen=2))"),
    ),
    "d": (
        *("{{'a': {i}, 'b': {i}}}", "{{**{d}, 'c': {i}}}", "dict(zip('abc', {l}))", "{{p: q + 1 for p, q in {d}.items()}}", "dict({d})"),
        *("{d} | {{'a': {i}}}", "dict(sorted({d}.items(), key=lambda p: p[1]))", "dict(collections.Counter({s}))", "dict(a={i}, **{{'z': {i}}})"),
    ),
    "b": (
        *("{i} > {i}", "{i} == {i}", "not {b}", "({b} and {b})", "({b} or {b})", "{i} in {l}", "{s} == 'ab'", "'a' in {d}", "{l}"),
        *("{i} < {i} <= {i}", "all(q > 0 for q in {l})", "any({l})", "{s}.startswith('a')", "{l} == {l}", "{i} not in {l}", "{d}", "{s}"),
        *("isinstance({v}, int)", "{v} is None", "{l} < {l}", "{i} is not None", "set({l}) <= {{0, 1, 2}}", "{i} != {i} == {i}", "callable({v})"),
    ),
    "v": (
        *("{i}", "{t}", "{s}", "{l}", "{d}", "({i}, {t})", "None", "[{t}, {l}]", "{{'t': {t}, 'n': {i}}}", "({s}, {i})", "{i} / 2", "{b}"),
        *("($w := {i}, $w)", "tuple({l})", "set({l})", "frozenset({l})", "slice({i}, {i})", "type({i})", "{i} == 1", "isinstance({t}, torch.Tensor)"),
    ),
}  # fmt: skip
# what can be raised
ERRORS = (
    *("ValueError({i})", "ValueError({s}, {i})", "KeyError({s})", "Own({i}, {s})", "Own({i})", "IndexError", "ZeroDivisionError('no')", "TypeError()"),
    *("LookupError({t})", "RuntimeError({l})", "StopIteration({i})", "Narrow({i})", "NotImplementedError", "AttributeError({s})", "OSError(2, {s})"),
)  # fmt: skip
CAUGHT = (
    *(
        "ValueError",
        "KeyError",
        "LookupError",
        "Own",
        "Narrow",
        "Exception",
        "(ValueError, TypeError)",
        "(IndexError, Own)",
        "ArithmeticError",
    ),
    *("BaseException", "RuntimeError", "ZeroDivisionError", "StopIteration", "AttributeError"),
)
