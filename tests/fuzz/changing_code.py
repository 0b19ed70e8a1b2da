"""Globals, defaults, closures, classes and their methods that may be others in the next call."""

from __future__ import annotations

from .changing_parts import Part

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
        ("g{n}.__defaults__ = (3.0,)", "g{n}.__defaults__ = (-0.0,)"),
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
    Part(
        "a cached function",
        "x = x * g{n}(2)",
        ("g{n}.cache_clear()", "G{n} = 5"),
        before="G{n} = 3\n@functools.lru_cache\ndef g{n}(k): return k * G{n}",
    ),
    Part(
        "a decorated function",
        "x = g{n}(x)",
        ("G{n} = 5.0", "g{n}.__wrapped__.__defaults__ = (7.0,)"),
        before="G{n} = 3.0\n@torch.enable_grad()\ndef g{n}(x, k=2.0): return x * G{n} * k",
    ),
    Part(
        "a context variable",
        "x = x * V{n}.get()",
        ("V{n}.set(3)", "V{n}.set(4.0)"),
        before="import contextvars\nV{n} = contextvars.ContextVar('v', default=2)",
    ),
    Part(
        "what a thread has",
        "x = x * L{n}.k",
        ("L{n}.k = 3", "L{n}.k = 4.0"),
        before="import threading\nL{n} = threading.local()\nL{n}.k = 2",
    ),
    Part(
        "what is above",
        "x = self.l{n}(x)",
        ("Layer.forward = lambda self, x: x * 5", "Above{n}.forward = lambda self, x: x", "del Above{n}.forward"),
        "self.l{n} = Above{n}()",
        "class Above{n}(Layer):\n    def forward(self, x): return super().forward(x) + 1",
    ),
    Part(
        "a special method",
        "x = x * len(self.a{n}) + self.a{n}[0]",
        ("Same.__len__ = lambda self: 7", "Same.__getitem__ = lambda self, i: 9"),
        "self.a{n} = Same(3)",
    ),
)
