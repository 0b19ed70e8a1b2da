"""What a program reads, and what may become of it between two calls: the parts that `changes` puts together.

A part is text: `before` at the top of the program, `init` in the module's ``__init__``, `body` in its ``forward``, where ``x`` is a tensor
of shape (3, 4) before and after it, and `changes`, each a statement that is run between two calls, where ``m`` is the module. ``{n}`` is
a number that no other part of the program has.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One thing that a program reads."""

    name: str
    body: str
    changes: tuple[str, ...]
    init: str = ""
    before: str = ""


# -- numbers, words and containers -----------------------------------------------------------------------------------------


def _attribute(name: str, body: str, *values: str) -> Part:
    """An attribute of the module, with each of its values."""
    return Part(name, body, tuple(f"m.a{{n}} = {v}" for v in values[1:]), f"self.a{{n}} = {values[0]}")


NUMBERS = (
    _attribute("a float", "x = x * self.a{n}", "2.0", "3.0", "2", "True", "float('inf')", "float('nan')", "-0.0", "0.0"),
    _attribute("the sign of zero", "x = x + math.copysign(1.0, self.a{n})", "0.0", "-0.0", "0", "False"),
    _attribute("a zero in a divisor", "x = x / self.a{n}", "0.0", "-0.0", "0", "1.0"),
    _attribute(
        "what kind of number", "x = x * (2 if self.a{n} is True else 3 if type(self.a{n}) is int else 5)", "1", "True", "1.0"
    ),
    _attribute("a number in a list", "x = x * (2 if isinstance(self.a{n}[0], bool) else 3)", "[1]", "[True]", "[1.0]"),
    _attribute(
        "a number in a dict",
        "x = x * (2 if isinstance(self.a{n}['k'], float) else 3)",
        "dict(k=1)",
        "dict(k=1.0)",
        "dict(k=True)",
    ),
    _attribute("an int as a size", "x = x.repeat(self.a{n}, 1)[:3]", "1", "2", "3"),
    _attribute("an int in arithmetic", "x = x * (self.a{n} // 2 + self.a{n} % 3)", "7", "8", "2**40", "-7"),
    _attribute("a comparison", "x = x if self.a{n} < 5 else -x", "3", "4", "5", "7.5"),
    _attribute("a complex", "x = x * abs(self.a{n})", "1 + 1j", "3 + 4j", "2"),
    _attribute("a fraction", "x = x * float(self.a{n})", "fractions.Fraction(1, 3)", "fractions.Fraction(2, 3)", "0.25"),
    _attribute("a numpy number", "x = x * float(self.a{n})", "np.float32(2)", "np.float32(3)", "np.float64(2)", "np.int64(4)"),
    _attribute(
        "a numpy array",
        "x = x + torch.from_numpy(self.a{n})",
        "np.ones(4, np.float32)",
        "np.full(4, 2, np.float32)",
        "np.ones(1, np.float32)",
    ),
    _attribute("None", "x = x if self.a{n} is None else x * self.a{n}", "None", "2.0", "False", "torch.full((4,), 3.0)", "None"),
    _attribute("a word", "x = getattr(torch, self.a{n})(x)", "'sin'", "'cos'", "'tanh'"),
    _attribute("a word compared", "x = x * 2 if self.a{n} == 'yes' else x", "'yes'", "'no'", "None", "b'yes'"),
    _attribute("a word's length", "x = x * len(self.a{n})", "'ab'", "'abc'", "''"),
    _attribute("formatted", "x = x * len(f'{self.a{n}}')", "5", "50", "5.25", "'a'"),
)

CONTAINERS = (
    _attribute("a list", "x = x * sum(self.a{n})", "[1, 2]", "[1, 3]", "[1, 2, 3]", "[]", "(1, 2)"),
    Part(
        "a list, in place",
        "x = x * sum(self.a{n})",
        ("m.a{n}.append(4)", "m.a{n}[0] = 7", "m.a{n}.pop()", "m.a{n}.insert(0, 2)"),
        "self.a{n} = [1, 2, 3]",
    ),
    Part("a list's order", "for v in self.a{n}: x = x * v + v", ("m.a{n}.reverse()", "m.a{n}.sort()"), "self.a{n} = [1, 3, 2]"),
    Part(
        "a dict, in place",
        "for k, v in self.a{n}.items(): x = x * v + len(k)",
        ("m.a{n}['k'] = 7", "m.a{n}['bb'] = 2", "m.a{n}.pop('k')", "m.a{n}['k'] = 5"),
        "self.a{n} = dict(k=1, l=2)",
    ),
    _attribute(
        "the order of a dict",
        "for k, v in self.a{n}.items(): x = x * v + v",
        "dict(a=1, b=2)",
        "dict(b=2, a=1)",
        "dict(a=2, b=1)",
    ),
    Part(
        "a default of get",
        "x = x * self.a{n}.get('k', 5)",
        ("m.a{n}['k'] = 3", "m.a{n}['k'] = 4", "m.a{n}.clear()"),
        "self.a{n} = {}",
    ),
    Part(
        "a dict's values in a dict",
        "x = x * self.a{n}['a']['b'][1]",
        ("m.a{n}['a']['b'][1] = 7", "m.a{n}['a'] = dict(b=[1, 9])", "m.a{n} = dict(a=dict(b=(1, 4)))"),
        "self.a{n} = dict(a=dict(b=[1, 2]))",
    ),
    _attribute("a set", "x = x * (2 if 3 in self.a{n} else 5)", "{1, 2}", "{1, 3}", "frozenset((1, 3))", "{1}"),
    Part(
        "a set, in place",
        "x = x * (2 if 3 in self.a{n} else 5) + len(self.a{n})",
        ("m.a{n}.add(3)", "m.a{n}.remove(3)", "m.a{n}.discard(1)"),
        "self.a{n} = {1, 2}",
    ),
    _attribute("a range", "for i in self.a{n}: x = x * (i + 1)", "range(2)", "range(3)", "range(1, 3)"),
    _attribute("a slice", "x = x[self.a{n}].sum(0) + x", "slice(0, 2)", "slice(1, 3)", "slice(None)", "slice(0, 3, 2)"),
    _attribute(
        "a size",
        "x = x.reshape(self.a{n}).reshape(3, 4) + len(self.a{n})",
        "torch.Size([12])",
        "torch.Size([2, 6])",
        "[6, 2]",
        "(3, 2, 2)",
    ),
    _attribute("a dtype", "x = x.to(self.a{n}).to(torch.float32)", "torch.float32", "torch.float16", "torch.int32"),
    _attribute("a named tuple", "x = x * self.a{n}.u + self.a{n}[1]", "Point(1, 2)", "Point(1, 3)", "Point(u=2, v=2)"),
    Part(
        "a dataclass",
        "x = x * self.a{n}.u + self.a{n}.v[0]",
        ("m.a{n}.u = 5", "m.a{n}.v[0] = 7", "m.a{n} = Pair(2, [2])"),
        "self.a{n} = Pair(1, [2])",
    ),
    Part(
        "a dataclass's fields",
        "x = x * sum(getattr(self.a{n}, f.name) for f in dataclasses.fields(self.a{n}))",
        ("m.a{n}.u = 5", "m.a{n} = Pair(2, 3)"),
        "self.a{n} = Pair(1, 2)",
    ),
    Part(
        "a namespace",
        "x = x * getattr(self.a{n}, 'k', 2)",
        ("m.a{n}.k = 3", "m.a{n}.k = 4", "del m.a{n}.k"),
        "self.a{n} = types.SimpleNamespace()",
    ),
    Part(
        "what vars says",
        "x = x * sum(vars(self.a{n}).values())",
        ("m.a{n}.k = 3", "m.a{n}.l = 4", "del m.a{n}.l"),
        "self.a{n} = types.SimpleNamespace(k=1)",
    ),
    _attribute("a member of an enum", "x = x * (2 if self.a{n} is Color.RED else 3)", "Color.RED", "Color.BLUE"),
    _attribute("a member's value", "x = x * self.a{n}.value", "Color.RED", "Color.BLUE"),
    _attribute("an object that is equal", "x = x * (2 if self.a{n} == Same(1) else 3)", "Same(1)", "Same(2)"),
    Part(
        "an object that compares",
        "x = x * (2 if self.a{n} == Same(1) else 3)",
        ("m.a{n}.v = 2", "m.a{n}.v = 1"),
        "self.a{n} = Same(1)",
    ),
    Part("an object's length", "x = x * len(self.a{n})", ("m.a{n}.v = 2", "m.a{n}.v = 4"), "self.a{n} = Same(3)"),
    Part("an object's truth", "x = x if self.a{n} else -x", ("m.a{n}.v = 0", "m.a{n}.v = 4"), "self.a{n} = Same(3)"),
    Part("an object's items", "x = x * self.a{n}[1]", ("m.a{n}.v = 2", "m.a{n}.v = 4"), "self.a{n} = Same(3)"),
    Part("an object in a loop", "for v in self.a{n}: x = x + v", ("m.a{n}.v = 2", "m.a{n}.v = 4"), "self.a{n} = Same(3)"),
    Part("an object as a context", "with self.a{n} as v: x = x * v", ("m.a{n}.v = 2", "m.a{n}.v = 4"), "self.a{n} = Same(3)"),
    Part("an object called", "x = self.a{n}(x)", ("m.a{n}.v = 2", "m.a{n}.v = 4", "m.a{n} = torch.sin"), "self.a{n} = Same(3)"),
    Part("a slot", "x = x * self.a{n}.k", ("m.a{n}.k = 2", "m.a{n} = Slotted(4)"), "self.a{n} = Slotted(3)"),
    Part(
        "a deque",
        "x = x * self.a{n}[0] + len(self.a{n})",
        ("m.a{n}.appendleft(2)", "m.a{n}.pop()"),
        "self.a{n} = collections.deque([1, 2])",
    ),
    Part(
        "a counter",
        "x = x * self.a{n}['a'] + self.a{n}['b']",
        ("m.a{n}['a'] += 1", "m.a{n}['b'] = 2"),
        "self.a{n} = collections.Counter('aa')",
    ),
    Part(
        "an ordered dict",
        "for k, v in self.a{n}.items(): x = x * v + v",
        ("m.a{n}.move_to_end('a')", "m.a{n}['c'] = 2"),
        "self.a{n} = collections.OrderedDict(a=1, b=2)",
    ),
    Part(
        "tensors in a list",
        "for t in self.a{n}: x = x + t",
        ("m.a{n}.append(torch.full((4,), 2.0))", "m.a{n}[0] = torch.zeros(1)", "m.a{n}.pop()", "m.a{n}[0].add_(1)"),
        "self.a{n} = [torch.ones(4), torch.ones(3, 1)]",
    ),
    Part(
        "tensors in a dict",
        "for k, t in self.a{n}.items(): x = x * len(k) + t",
        (
            "m.a{n}['bb'] = torch.full((4,), 2.0)",
            "m.a{n}['a'] = torch.zeros(1)",
            "m.a{n}.pop('a')",
            "m.a{n}['a'] = torch.ones(4).requires_grad_()",
        ),
        "self.a{n} = dict(a=torch.ones(4))",
    ),
    Part(
        "one list at two places",
        "self_b = self.b{n}; x = x * (2 if self_b is self.a{n} else 3)",
        ("m.b{n} = list(m.a{n})", "m.a{n} = m.b{n}"),
        "self.a{n} = [1, 2]; self.b{n} = self.a{n}",
    ),
)

# -- code ------------------------------------------------------------------------------------------------------------------

CODE = (
    Part("a global", "x = x * G{n}", ("G{n} = 3.0", "G{n} = 4", "G{n} = torch.ones(4)"), before="G{n} = 2.0"),
    Part("a global list", "for v in G{n}: x = x + v", ("G{n}.append(2)", "G{n}[0] = 5", "G{n} = (1,)"), before="G{n} = [1]"),
    Part("a global function", "x = g{n}(x)", ("g{n} = torch.sin", "g{n} = lambda x: x * 5"), before="def g{n}(x): return x * 2"),
    Part(
        "a global of a helper",
        "x = g{n}(x)",
        ("G{n} = 3.0", "G{n} = -0.0"),
        before="G{n} = 2.0\ndef g{n}(x): return x * 2 * G{n}",
    ),
    Part("a global that comes", "x = x * globals().get('G{n}', 2)", ("G{n} = 3", "G{n} = 4", "del G{n}"), before=""),
    Part(
        "a default",
        "x = g{n}(x)",
        ("g{n}.__defaults__ = (3.0,)", "g{n}.__defaults__ = (torch.ones(4),)"),
        before="def g{n}(x, k=2.0): return x * k",
    ),
    Part(
        "a keyword's default",
        "x = g{n}(x)",
        ("g{n}.__kwdefaults__ = dict(k=3.0)", "g{n}.__kwdefaults__['k'] = 5.0"),
        before="def g{n}(x, *, k=2.0): return x * k",
    ),
    Part(
        "a default in place",
        "x = g{n}(x)",
        ("g{n}.__defaults__[0].append(3)", "g{n}.__defaults__[0][0] = 5"),
        before="def g{n}(x, k=[1]): return x * sum(k)",
    ),
    Part(
        "code",
        "x = g{n}(x)",
        ("g{n}.__code__ = (lambda x: x * 5).__code__", "g{n}.__code__ = (lambda x: -x).__code__"),
        before="def g{n}(x): return x * 2",
    ),
    Part(
        "an attribute of a function", "x = x * g{n}.k", ("g{n}.k = 3", "g{n}.k = 4.5"), before="def g{n}(x): return x\ng{n}.k = 2"
    ),
    Part(
        "a closure",
        "x = g{n}(x)",
        ("set{n}(3.0)", "set{n}(4)", "set{n}(torch.ones(4))"),
        before="def make{n}():\n    k = 2.0\n    def use(x): return x * k\n    def put(v):\n        nonlocal k\n        k = v\n    return use, put\ng{n}, set{n} = make{n}()",
    ),
    Part(
        "a closed list",
        "x = g{n}(x)",
        ("set{n}(3.0)", "set{n}(4)"),
        before="def make{n}():\n    k = [2.0]\n    return lambda x: x * sum(k), k.append\ng{n}, set{n} = make{n}()",
    ),
    Part(
        "a partial",
        "x = self.a{n}(x)",
        (
            "m.a{n} = functools.partial(torch.mul, other=3)",
            "m.a{n} = functools.partial(torch.add, other=3)",
            "m.a{n}.keywords['other'] = 5",
        ),
        "self.a{n} = functools.partial(torch.mul, other=2)",
    ),
    Part("a bound method", "x = self.a{n}(x)", ("m.a{n} = Same(4).times", "m.a{n}.__self__.v = 7"), "self.a{n} = Same(3).times"),
    Part(
        "an attribute of a class",
        "x = x * self.k{n}",
        ("type(m).k{n} = 3", "m.k{n} = 4", "type(m).k{n} = 5", "m.__dict__.pop('k{n}', None)"),
        before="Module.k{n} = 2",
    ),
    Part(
        "a method of a class",
        "x = self.f{n}(x)",
        ("type(m).f{n} = lambda self, x: x * 3", "m.f{n} = torch.sin", "m.__dict__.pop('f{n}', None)"),
        before="Module.f{n} = lambda self, x: x * 2",
    ),
    Part(
        "a property",
        "x = x * self.p{n}",
        ("m.k{n} = 3", "type(m).p{n} = property(lambda self: self.k{n} * 2)", "m.k{n} = 5"),
        "self.k{n} = 2",
        "Module.p{n} = property(lambda self: self.k{n} + 1)",
    ),
    Part(
        "a static method",
        "x = self.s{n}(x)",
        ("type(m).s{n} = staticmethod(torch.sin)", "type(m).s{n} = staticmethod(lambda x: x * 4)"),
        before="Module.s{n} = staticmethod(torch.cos)",
    ),
    Part(
        "a class method",
        "x = x * self.c{n}()",
        ("type(m).k{n} = 3", "type(m).c{n} = classmethod(lambda cls: 7)"),
        before="Module.k{n} = 2\nModule.c{n} = classmethod(lambda cls: cls.k{n})",
    ),
    Part(
        "__getattr__",
        "x = x * self.a{n}.anything",
        ("m.a{n}.v = 4", "m.a{n}.anything = 5", "m.a{n}.__dict__.pop('anything', None)"),
        "self.a{n} = Answers(3)",
    ),
    Part("__getattribute__", "x = x * self.a{n}.k", ("m.a{n}.k = 4", "m.a{n}.k = 5"), "self.a{n} = Doubles(3)"),
    Part("a descriptor", "x = x * self.a{n}.d", ("m.a{n}.v = 4", "m.a{n}.v = 5"), "self.a{n} = Described(3)"),
    Part(
        "a cached property",
        "x = x * self.a{n}.c",
        ("m.a{n}.__dict__['c'] = 4", "m.a{n}.__dict__.pop('c', None)"),
        "self.a{n} = Described(3); self.a{n}.c",
    ),
    Part(
        "the class of an object",
        "x = x * self.a{n}.named()",
        ("m.a{n}.__class__ = Doubled", "m.a{n}.__class__ = Same"),
        "self.a{n} = Same(3)",
    ),
    Part(
        "isinstance",
        "x = x * (2 if isinstance(self.a{n}, Doubled) else 3)",
        ("m.a{n} = Doubled(3)", "m.a{n} = Same(3)"),
        "self.a{n} = Same(3)",
    ),
    Part("a class in an attribute", "x = x * self.a{n}(2).named()", ("m.a{n} = Doubled", "m.a{n} = Same"), "self.a{n} = Same"),
    Part("an attribute of another module", "x = x * math.k{n}", ("math.k{n} = 3", "math.k{n} = 4"), before="math.k{n} = 2"),
    Part(
        "the environment",
        "x = x * len(os.environ.get('THUNDER_NORM_{n}', 'ab'))",
        ("os.environ['THUNDER_NORM_{n}'] = 'abc'", "os.environ.pop('THUNDER_NORM_{n}', None)"),
        before="",
    ),
    Part(
        "an exception",
        "try: x = x * self.a{n}['k']\n        except KeyError: x = -x",
        ("m.a{n}['k'] = 3", "m.a{n}.pop('k', None)"),
        "self.a{n} = {}",
    ),
    Part(
        "hasattr", "x = x * 2 if hasattr(self, 'h{n}') else x", ("m.h{n} = 3", "m.__dict__.pop('h{n}', None)", "type(m).h{n} = 1")
    ),
    Part(
        "a match",
        "match self.a{n}:\n            case (1, v): x = x * v\n            case {'k': v}: x = x + v\n            case _: x = -x",
        ("m.a{n} = (1, 3)", "m.a{n} = dict(k=2)", "m.a{n} = None"),
        "self.a{n} = (1, 2)",
    ),
    Part(
        "type of",
        "x = x * len(type(self.a{n}).__name__)",
        ("m.a{n} = Doubled(3)", "m.a{n} = 3", "m.a{n} = Same(3)"),
        "self.a{n} = Same(3)",
    ),
)

# -- modules ---------------------------------------------------------------------------------------------------------------

MODULES = (
    Part(
        "a parameter",
        "x = x * self.p{n}",
        (
            "m.p{n} = nn.Parameter(torch.full((4,), 3.0))",
            "m.p{n}.data = torch.full((4,), 4.0)",
            "m.p{n}.data = torch.full((1,), 5.0)",
            "m.p{n}.requires_grad_(False)",
            "m.p{n}.requires_grad_(True)",
            "m.p{n} = nn.Parameter(torch.ones(4, dtype=torch.float64))",
            "m.p{n} = None if 0 else nn.Parameter(torch.ones(3, 1))",
        ),
        "self.p{n} = nn.Parameter(torch.full((4,), 2.0))",
    ),
    Part(
        "a parameter that may be none",
        "x = x if self.p{n} is None else x * self.p{n}",
        ("m.p{n} = None", "m.p{n} = nn.Parameter(torch.full((4,), 3.0))"),
        "self.p{n} = nn.Parameter(torch.full((4,), 2.0))",
    ),
    Part(
        "a parameter's attribute",
        "x = x * getattr(self.p{n}, 'k', 2.0) * self.p{n}",
        ("m.p{n}.k = 3.0", "m.p{n}.k = 4.0", "del m.p{n}.k"),
        "self.p{n} = nn.Parameter(torch.full((4,), 2.0))",
    ),
    Part(
        "a parameter's gradient",
        "x = x if self.p{n}.grad is None else x * 2",
        ("m.p{n}.grad = torch.ones(4)", "m.p{n}.grad = None"),
        "self.p{n} = nn.Parameter(torch.full((4,), 2.0))",
    ),
    Part(
        "whether a parameter requires grad",
        "x = x * 2 if self.p{n}.requires_grad else x",
        ("m.p{n}.requires_grad_(False)", "m.p{n}.requires_grad_(True)"),
        "self.p{n} = nn.Parameter(torch.full((4,), 2.0))",
    ),
    Part(
        "a tied parameter",
        "x = x * self.p{n} + self.q{n}; x = x * (2 if self.p{n} is self.q{n} else 3)",
        ("m.q{n} = nn.Parameter(torch.ones(4))", "m.q{n} = m.p{n}"),
        "self.p{n} = nn.Parameter(torch.full((4,), 2.0)); self.q{n} = self.p{n}",
    ),
    Part(
        "a buffer",
        "x = x * self.b{n}",
        (
            "m.b{n} = torch.full((4,), 3.0)",
            "m.b{n}.mul_(2)",
            "m.b{n} = torch.ones(3, 1)",
            "m.b{n} = torch.ones(4, dtype=torch.int64)",
            "m.b{n} = torch.ones(4, requires_grad=True)",
        ),
        "self.register_buffer('b{n}', torch.full((4,), 2.0))",
    ),
    Part(
        "a buffer that may be none",
        "x = x if self.b{n} is None else x * self.b{n}",
        ("m.b{n} = torch.full((4,), 3.0)", "m.b{n} = None"),
        "self.register_buffer('b{n}', None)",
    ),
    Part(
        "a layer",
        "x = self.l{n}(x)",
        (
            "m.l{n} = nn.Linear(4, 4, bias=False)",
            "m.l{n} = nn.Tanh()",
            "m.l{n} = nn.Linear(4, 4)",
            "m.l{n}.double().float()",
            "m.l{n}.requires_grad_(False)",
            "m.l{n} = torch.sin if 0 else nn.ReLU()",
        ),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "a bias",
        "x = self.l{n}(x)",
        ("m.l{n}.bias = None", "m.l{n}.bias = nn.Parameter(torch.ones(4))", "m.l{n}.weight = nn.Parameter(torch.eye(4))"),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "a sequence",
        "x = self.s{n}(x)",
        (
            "m.s{n}.append(nn.Tanh())",
            "m.s{n}[0] = nn.Sigmoid()",
            "m.s{n}.insert(0, nn.ReLU())",
            "del m.s{n}[0]",
            "m.s{n}.register_forward_hook(lambda m, a, y: y * 2)",
        ),
        "self.s{n} = nn.Sequential(nn.Linear(4, 4), nn.Softplus())",
    ),
    Part(
        "a list of layers",
        "for l in self.s{n}: x = l(x)",
        (
            "m.s{n}.append(nn.Tanh())",
            "m.s{n}[0] = nn.Sigmoid()",
            "m.s{n} = nn.ModuleList(list(m.s{n})[::-1])",
            "m.s{n} = list(m.s{n}) if 0 else nn.ModuleList()",
        ),
        "self.s{n} = nn.ModuleList([nn.Tanh(), nn.Softplus()])",
    ),
    Part(
        "a dict of layers",
        "for k, l in self.s{n}.items(): x = l(x) * len(k)",
        ("m.s{n}['bb'] = nn.Tanh()", "m.s{n}['a'] = nn.Sigmoid()", "del m.s{n}['a']", "m.s{n}['a'] = nn.ReLU()"),
        "self.s{n} = nn.ModuleDict(dict(a=nn.Tanh()))",
    ),
    Part(
        "a list of parameters",
        "for p in self.s{n}: x = x * p",
        ("m.s{n}.append(nn.Parameter(torch.full((4,), 3.0)))", "m.s{n}[0] = nn.Parameter(torch.full((1,), 3.0))"),
        "self.s{n} = nn.ParameterList([torch.full((4,), 2.0)])",
    ),
    Part(
        "all parameters",
        "for k, p in self.l{n}.named_parameters(): x = x * p.sum() + len(k)",
        ("m.l{n}.register_parameter('extra', nn.Parameter(torch.full((4,), 3.0)))", "m.l{n}.bias = None"),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "all modules",
        "x = x * len(list(self.l{n}.modules()))",
        ("m.l{n}.add_module('a', nn.Tanh())", "m.l{n}.add_module('b', nn.Tanh())"),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "a dropped layer",
        "x = self.l{n}(x)",
        ("m.l{n} = nn.Identity()", "m.l{n} = nn.Dropout(0.0)", "m.l{n} = nn.Threshold(0.1, 20)"),
        "self.l{n} = nn.Tanh()",
    ),
    Part(
        "a layer's number",
        "x = self.l{n}(x)",
        ("m.l{n}.negative_slope = 0.5", "m.l{n}.negative_slope = -0.0", "m.l{n}.inplace = False", "m.l{n}.negative_slope = 2"),
        "self.l{n} = nn.LeakyReLU(0.1)",
    ),
    Part(
        "a normalization's eps",
        "x = self.l{n}(x)",
        ("m.l{n}.eps = 0.5", "m.l{n}.eps = 2.0", "m.l{n}.weight = None", "m.l{n}.bias = None", "m.l{n}.normalized_shape = (4,)"),
        "self.l{n} = nn.LayerNorm(4)",
    ),
    Part(
        "a batch norm",
        "x = self.l{n}(x)",
        ("m.l{n}.eps = 0.5", "m.l{n}.running_mean.add_(1)", "m.l{n}.running_var.mul_(3)", "m.l{n}.weight = None"),
        "self.l{n} = nn.BatchNorm1d(4).eval()",
    ),
    Part(
        "a class of a layer",
        "x = self.l{n}(x)",
        ("m.l{n}.__class__ = nn.Tanh", "m.l{n}.__class__ = nn.Sigmoid"),
        "self.l{n} = nn.Sigmoid()",
    ),
    Part(
        "forward of an instance",
        "x = self.l{n}(x)",
        ("m.l{n}.forward = torch.sin", "m.l{n}.forward = lambda x: x * 4", "m.l{n}.__dict__.pop('forward', None)"),
        "self.l{n} = nn.Sigmoid()",
    ),
    Part(
        "forward of a class",
        "x = self.l{n}(x)",
        ("Layer.forward = lambda self, x: x * 5", "Layer.forward = lambda self, x: x.sin()"),
        "self.l{n} = Layer()",
    ),
    Part(
        "a hook",
        "x = self.l{n}(x)",
        (
            "h{n} = m.l{n}.register_forward_hook(lambda m, a, y: y * 2)",
            "m.l{n}._forward_hooks.clear()",
            "m.l{n}.register_forward_pre_hook(lambda m, a: (a[0] * 3,))",
            "m.l{n}._forward_pre_hooks.clear()",
        ),
        "self.l{n} = nn.Sigmoid()",
    ),
    Part(
        "a hook of the module",
        "x = x",
        (
            "m.register_forward_hook(lambda m, a, y: y * 2)",
            "m._forward_hooks.clear()",
            "m.register_forward_pre_hook(lambda m, a: (a[0] * 3,))",
            "m._forward_pre_hooks.clear()",
        ),
    ),
    Part("training", "x = x * 2 if self.training else x", ("m.eval()", "m.train()")),
    Part(
        "training of a layer",
        "x = x * 2 if self.l{n}.training else x",
        ("m.l{n}.eval()", "m.l{n}.train()", "m.eval()"),
        "self.l{n} = nn.Sigmoid()",
    ),
    Part(
        "a parametrization",
        "x = self.l{n}(x)",
        (
            "nn.utils.parametrize.register_parametrization(m.l{n}, 'weight', Halved())",
            "nn.utils.parametrize.is_parametrized(m.l{n}) and nn.utils.parametrize.remove_parametrizations(m.l{n}, 'weight')",
        ),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "a state dict",
        "x = self.l{n}(x)",
        (
            "m.l{n}.load_state_dict(dict(weight=torch.ones(4, 4), bias=torch.ones(4)))",
            "m.l{n}.load_state_dict(dict(weight=torch.eye(4), bias=torch.ones(4)), assign=True)",
        ),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "strict state",
        "x = x * len(self.l{n}.state_dict())",
        ("m.l{n}.bias = None", "m.l{n}.register_buffer('c', torch.ones(2))"),
        "self.l{n} = nn.Linear(4, 4)",
    ),
)

# -- what is given, and around ----------------------------------------------------------------------------------------------

# Names of `call`: x, y (tensors), k (a number), o (an object), and names of modes.
CALLS = (
    Part("values", "", ("x = torch.randn(3, 4)", "x = x * 2")),
    Part("a dtype of the input", "", ("x = x.double()", "x = x.to(torch.float32)", "x = x.to(torch.float16)", "x = x.float()")),
    Part(
        "strides of the input",
        "x = x * (2 if x0.is_contiguous() else 3) + x0.stride(0)",
        ("x = x.t().contiguous().t()", "x = x.contiguous()", "x = torch.cat([x, x], 1)[:, ::2]"),
    ),
    Part("strides that decide a view", "x = x.reshape(12).view(3, 4)", ("x = x.t().contiguous().t()", "x = x.contiguous()")),
    Part(
        "requires_grad of the input",
        "x = x * 2 if x0.requires_grad else x",
        ("x = x.detach().requires_grad_()", "x = x.detach()"),
    ),
    Part(
        "a leaf",
        "x = x * 2 if x0.is_leaf else x",
        ("x = x.detach().requires_grad_()", "x = x.detach().requires_grad_() * 1", "x = x.detach()"),
    ),
    Part("rows of the input", "x = x * x.shape[0]", ("x = torch.randn(3, 4)", "x = torch.randn(3, 4)[:3]")),
    Part(
        "a second input",
        "x = x if y is None else x * y",
        (
            "y = torch.ones(4)",
            "y = torch.ones(3, 1)",
            "y = None",
            "y = 2.0",
            "y = torch.tensor(3.0)",
            "y = torch.ones(4, dtype=torch.int64)",
        ),
    ),
    Part(
        "rows of a second input",
        "x = x + y.sum() * y.shape[0] if isinstance(y, torch.Tensor) else x",
        ("y = torch.ones(4)", "y = torch.ones(5)", "y = torch.ones(1)", "y = torch.ones(0)"),
    ),
    Part("an input twice", "x = x * (2 if y is x0 else 3)", ("y = x", "y = x.clone()", "y = x")),
    Part(
        "an input's memory",
        "x = x + (y if isinstance(y, torch.Tensor) and y.dim() else 1.0)",
        ("y = x[0]", "y = x.clone()[0]", "y = x.view(3, 4)"),
    ),
    Part(
        "a number",
        "x = x * k",
        ("k = 3", "k = 3.0", "k = True", "k = -0.0", "k = float('nan')", "k = 0.0", "k = torch.tensor(2.0)"),
    ),
    Part("a number's sign", "x = x * math.copysign(1.0, k)", ("k = -0.0", "k = 0.0", "k = 0", "k = -1")),
    Part(
        "a number's class",
        "x = x * (2 if isinstance(k, bool) else 3 if isinstance(k, int) else 5)",
        ("k = 1", "k = True", "k = 1.0"),
    ),
    Part(
        "an object",
        "x = x if o is None else x * o['k']",
        ("o = dict(k=2.0)", "o = dict(k=torch.ones(4))", "o = collections.OrderedDict(k=3)", "o = None"),
    ),
    Part(
        "a list given",
        "for v in o if isinstance(o, (list, tuple)) else (): x = x * v",
        ("o = [1.0, 2.0]", "o = (1.0, 3.0)", "o = [torch.ones(4)]", "o = []"),
    ),
    Part(
        "a function given",
        "x = o(x) if callable(o) else x",
        ("o = torch.sin", "o = lambda x: x * 3", "o = None", "o = functools.partial(torch.mul, other=4)"),
    ),
    Part(
        "a named tuple given",
        "x = x * o.u if isinstance(o, Point) else x",
        ("o = Point(2, 3)", "o = Point(4, 3)", "o = Point(torch.ones(4), 1)"),
    ),
    Part(
        "grad mode",
        "x = x * 2 if torch.is_grad_enabled() else x",
        ("modes = [torch.no_grad]", "modes = []", "modes = [torch.enable_grad]"),
    ),
    Part(
        "inference mode",
        "x = x * 2 if torch.is_inference_mode_enabled() else x",
        ("modes = [torch.inference_mode]", "modes = []", "modes = [torch.no_grad]"),
    ),
    Part(
        "autocast",
        "x = (x @ torch.ones(4, 4)).float() * 1.001",
        (
            "modes = [lambda: torch.autocast('cpu', torch.bfloat16)]",
            "modes = []",
            "modes = [lambda: torch.autocast('cpu', torch.float16)]",
            "modes = [lambda: torch.autocast('cpu', enabled=False)]",
        ),
    ),
    Part(
        "whether autocast is on",
        "x = x * 2 if torch.is_autocast_enabled('cpu') else x",
        ("modes = [lambda: torch.autocast('cpu', torch.bfloat16)]", "modes = []"),
    ),
    Part(
        "the default dtype",
        "x = (x + torch.ones(4)) * (2 if torch.tensor(1.0).dtype == torch.float64 else 3)",
        (
            "torch.set_default_dtype(torch.float64)",
            "torch.set_default_dtype(torch.float32)",
            "torch.set_default_dtype(torch.bfloat16)",
        ),
    ),
    Part(
        "the default dtype, asked",
        "x = x * (2 if torch.get_default_dtype() == torch.float64 else 3)",
        ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
    ),
    Part(
        "deterministic algorithms, asked",
        "x = x * (2 if torch.are_deterministic_algorithms_enabled() else 3)",
        ("torch.use_deterministic_algorithms(True)", "torch.use_deterministic_algorithms(False)"),
    ),
    Part(
        "a flag of a backend",
        "x = x * (2 if torch.backends.mkldnn.deterministic else 3)",
        ("torch.backends.mkldnn.deterministic = True", "torch.backends.mkldnn.deterministic = False"),
    ),
    Part(
        "precision of products",
        "x = x * len(torch.get_float32_matmul_precision())",
        ("torch.set_float32_matmul_precision('medium')", "torch.set_float32_matmul_precision('highest')"),
    ),
    Part(
        "gradients that are off inside",
        "with torch.set_grad_enabled(self.g{n}): z = x * 2\n        x = x + z",
        ("m.g{n} = False", "m.g{n} = True"),
        "self.g{n} = True",
    ),
)

PARTS = NUMBERS + CONTAINERS + CODE + MODULES + CALLS
