"""Programs by how they come to code of theirs, and by what that code reads: neither says to a trace that it has to be guarded."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from typing import Any

import torch

# what stands before, what is read, and how it changes
STATES = {
    "a global": ("G = 2.0", "G", "G = 5.0"),
    "a global that was not there": ("", "(Z if 'Z' in globals() else 1.0)", "Z = 5.0"),
    "an item": ("L = [2.0]", "L[0]", "L[0] = 5.0"),
    "a length": ("L = [2.0]", "len(L)", "L.append(1.0)"),
    "a key": ("D = {'k': 2.0}", "D.get('k', 1.0)", "D.pop('k', None)"),
    "an element": ("Q = {1}", "(2 in Q) * 1.0", "Q.add(2)"),
    "an attribute": ("class S: pass\ns = S(); s.v = 2.0", "s.v", "s.v = 5.0"),
    "an attribute of a class": ("class S: v = 2.0\ns = S()", "s.v", "S.v = 5.0"),
    "an attribute of the class of an object": ("class S: v = 2.0\ns = S()", "type(s).v", "S.v = 5.0"),
    "a function": ("def h(): return 2.0", "h()", "def h(): return 5.0"),
    "a default": ("def h(a=2.0): return a", "h()", "h.__defaults__ = (5.0,)"),
    "a default by name": ("def h(*, a=2.0): return a", "h()", "h.__kwdefaults__ = {'a': 5.0}"),
    "a method": ("class S:\n    def m(self): return 2.0\ns = S()", "s.m()", "S.m = lambda self: 5.0"),
    "a property over what the object has": (
        "class S: pass\ns = S(); s.v = 2.0", "s.v", "S.v = property(lambda self: 5.0)"
    ),
    "None": ("N = None", "(1.0 if N is None else N)", "N = 5.0"),
}  # fmt: skip

# what stands before, with R for what is read, and an expression that comes to it
WAYS = {
    "a call": ("def g(): return R", "g()"),
    "a method of what is made": ("class A:\n    def m(self): return R", "A().m()"),
    "a property": ("class A:\n    @property\n    def m(self): return R\na = A()", "a.m"),
    "a property of another class": ("class P(property): pass\nclass A:\n    @P\n    def m(self): return R\na = A()", "a.m"),
    "+": ("class A:\n    def __add__(self, o): return R + o\na = A()", "(a + 1)"),
    "| of one that has none": ("class A: pass\nclass B:\n    def __ror__(self, o): return R\na, b = A(), B()", "(a | b)"),
    "operator.add": ("import operator\nclass A:\n    def __add__(self, o): return R\na = A()", "operator.add(a, 1)"),
    "in": ("class A:\n    def __contains__(self, k): return [1] * (R > 3)\na = A()", "(1.0 + (1 in a))"),
    "in a list": ("class A:\n    def __eq__(self, o): return R > 3\nl = [A()]", "(1.0 + (1 in l))"),
    "equal lists": ("class A:\n    def __eq__(self, o): return R > 3\nl = [A()]", "(1.0 + (l == [1]))"),
    "a set of what is made": (
        "class A:\n    def __hash__(self): return 1\n    def __eq__(self, o): return R > 3", "len({A(), A()})"
    ),
    "a key": (
        "class A:\n    def __hash__(self): return 1\n    def __eq__(self, o): return R > 3\nt = {A(): 5.0}", "t.get(A(), 1.0)"
    ),
    "isinstance": (
        "class M(type):\n    def __instancecheck__(cls, o): return R > 3\nclass A(metaclass=M): pass", "(1.0 + isinstance(1, A))"
    ),
    "a property of a class": ("class M(type):\n    @property\n    def p(cls): return R\nclass A(metaclass=M): pass", "A.p"),
    "str.format": ("class A:\n    def __format__(self, s): return str(R)\na = A()", "float('{}'.format(a))"),
    "%": ("class A:\n    def __str__(self): return str(R)\na = A()", "float('%s' % a)"),
    "repr of a list": ("class A:\n    def __repr__(self): return str(R)\na = A()", "float(str([a])[1:-1])"),
    "join": ("class A:\n    def __iter__(self): yield str(R)\na = A()", "float(','.join(a))"),
    "json": ("import json\nclass A: pass\na = A()", "float(json.dumps(a, default=lambda o: R))"),
    "a class that is derived": (
        "class A:\n    def __init_subclass__(cls): cls.v = R\ndef g():\n    class C(A): pass\n    return C.v", "g()"
    ),
    "the body of a class": ("def g():\n    class C: v = R\n    return C.v", "g()"),
    "a name in a class": (
        "class N:\n    def __set_name__(self, o, n): self.v = R\ndef g():\n    class C: q = N()\n    return vars(C)['q'].v", "g()"
    ),
    "match": (
        "class A:\n    __match_args__ = ('p',)\n    @property\n    def p(self): return R\na = A()\n"
        "def g():\n    match a:\n        case A(v): return v", "g()"
    ),
    "the backward of a function": (
        "class F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, t): return t * 1\n"
        "    @staticmethod\n    def backward(ctx, g): return g * R", "F.apply(x.sum())"
    ),
    "a hook of a tensor": ("def g(t):\n    y = t.sum() * 1\n    y.register_hook(lambda q: q * R)\n    return y", "g(x)"),
    "__torch_function__": (
        "class T:\n    @classmethod\n    def __torch_function__(cls, f, t, a=(), k=None): return torch.ones(()) * R\nt = T()",
        "torch.add(t, 1)",
    ),
    "a generator": ("def g():\n    yield R", "sum(g())"),
    "a key to sort by": ("", "sorted([1.0, 4.0], key=lambda v: -v if R > 3 else v)[0]"),
}  # fmt: skip


def reaching(way: str, state: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]]:
    """A program, and what changes what it reads."""
    (before, read, changed), (code, expression) = STATES[state], WAYS[way]
    code, expression = (re.sub(r"\bR\b", lambda _: read, text) for text in (code, expression))
    change = "\n".join("    " + line for line in changed.splitlines())
    source = (
        f"import torch\n{before}\n{code}\ndef program(x):\n    return x * ({expression})\n"
        f"def change():\n    global G, N, Z, h\n{change}\n"
    )
    file = f"<{way}, {state}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "reached_code"}
    exec(compile(source, file, "exec"), names)
    return names["program"], names["change"]
