"""What a program reads by keys, names and functions of C: items of dicts under classes and dtypes, computed names, buffers, getters."""

from __future__ import annotations

from .changing_parts import Part, attribute

LOOKUPS = (
    Part(
        "an item under a dtype",
        "x = x * self.a{n}[x.dtype]",
        ("m.a{n}[torch.float32] = 5", "m.a{n} = {torch.float32: -0.0}"),
        "self.a{n} = {torch.float32: 2}",
    ),
    Part("a function under a class", "x = self.a{n}[int](x)", ("m.a{n}[int] = torch.sin",), "self.a{n} = {int: torch.cos}"),
    Part("an item under None", "x = x * self.a{n}[None]", ("m.a{n}[None] = 5",), "self.a{n} = {None: 2}"),
    Part("an item under a tuple", "x = x * self.a{n}[1, 'k']", ("m.a{n}[1, 'k'] = 5",), "self.a{n} = {(1, 'k'): 2}"),
    Part("an item under a member", "x = x * self.a{n}[Color.RED]", ("m.a{n}[Color.RED] = 5",), "self.a{n} = {Color.RED: 2}"),
    Part(
        "a dict in a dict under a class",
        "x = x * self.a{n}[float]['k'][0]",
        ("m.a{n}[float]['k'][0] = 5", "m.a{n}[float] = dict(k=[7])"),
        "self.a{n} = {float: dict(k=[2])}",
    ),
    Part(
        "items under functions, in a loop",
        "for f, v in self.a{n}.items(): x = f(x) * v",
        ("m.a{n}[torch.sin] = 5", "m.a{n} = {torch.cos: 7}"),
        "self.a{n} = {torch.sin: 2}",
    ),
    Part(
        "an item under NumPy's dtype",
        "x = x.to(self.a{n}[np.dtype('float32')]).float()",
        ("m.a{n}[np.dtype('float32')] = torch.int32",),
        "self.a{n} = {np.dtype('float32'): torch.float16}",
    ),
    Part(
        "a number under a computed name",
        "x = x * getattr(self.o{n}, f'k{1}')",
        ("m.o{n}.k1 = 5", "m.o{n}.k1 = -0.0"),
        "self.o{n} = types.SimpleNamespace(k1=2)",
    ),
    Part(
        "a function under a computed name",
        "x = getattr(self.o{n}, f'k{1}')(x)",
        ("m.o{n}.k1 = torch.sin",),
        "self.o{n} = types.SimpleNamespace(k1=torch.cos)",
    ),
    Part(
        "tensors under computed names",
        "for i in range(2): x = x * getattr(self.o{n}, f'k{i}')",
        ("m.o{n}.k1 = torch.full((4,), 5.0)", "m.o{n}.k0 = torch.ones(3, 1)"),
        "self.o{n} = types.SimpleNamespace(k0=torch.ones(4), k1=torch.ones(4))",
    ),
    Part(
        "a tensor in a dataclass's copy",
        "x = x * dataclasses.replace(self.a{n}, u=2).v",
        ("m.a{n}.v = torch.full((4,), 5.0)", "m.a{n}.v = 3"),
        "self.a{n} = Pair(1, torch.ones(4))",
    ),
    Part(
        "what a getter gets",
        "x = x * self.a{n}(self.o{n})",
        ("m.o{n}.k = Pair(3, 5)", "m.a{n} = __import__('operator').attrgetter('k.v')", "m.o{n}.k.v = 7"),
        "self.a{n} = __import__('operator').attrgetter('k.u'); self.o{n} = types.SimpleNamespace(k=Pair(2, 4))",
    ),
    Part(
        "a getter of items",
        "x = x * self.a{n}({'k': 2, 'l': 3})",
        ("m.a{n} = __import__('operator').itemgetter('l')",),
        "self.a{n} = __import__('operator').itemgetter('k')",
    ),
    attribute(
        "a pattern", "x = x * 2 if self.a{n}.match('ab') else x", "__import__('re').compile('a')", "__import__('re').compile('b')"
    ),
    Part("bytes, in place", "x = x * self.a{n}[0]", ("m.a{n}[0] = 7", "m.a{n}[0] = 0"), "self.a{n} = bytearray(b'ab')"),
    Part("an array, in place", "x = x * self.a{n}[0]", ("m.a{n}[0] = 7",), "self.a{n} = __import__('array').array('i', [2, 3])"),
    Part(
        "a view of memory",
        "x = x * self.a{n}[0]",
        ("m.b{n}[0] = 7",),
        "self.b{n} = bytearray(b'ab'); self.a{n} = memoryview(self.b{n})",
    ),
    Part("an array of objects", "x = x * self.a{n}[0]", ("m.a{n}[0] = 7",), "self.a{n} = np.array([2, None], dtype=object)"),
    Part(
        "a view of a dict",
        "x = x * self.a{n}['k']",
        ("m.b{n}['k'] = 7",),
        "self.b{n} = dict(k=2); self.a{n} = types.MappingProxyType(self.b{n})",
    ),
    attribute(
        "a zero of a complex number", "x = x + torch.full((4,), self.a{n}).sqrt().imag", "complex(-1, 0.0)", "complex(-1, -0.0)"
    ),
    Part(
        "a cached property that is not there yet",
        "x = x * o.c if o is not None else x",
        ("o = Described(3)", "o.v = 9", "o.__dict__.pop('c')", "o = Described(4)"),
    ),
    Part(
        "a class attribute of what the program makes",
        "x = x * Made{n}.make().v * Made{n}().w",
        ("Made{n}.v = 5", "Made{n}.factor = 7"),
        before="class Made{n}:\n    v, factor = 2, 3\n    def __init__(self): self.w = self.factor\n    make = classmethod(lambda cls: cls())",
    ),
    Part(
        "which objects an abstract class takes for its own",
        "x = x * 2 if isinstance(self.a{n}, Abstract{n}) else x",
        ("Abstract{n}.register(Same)",),
        "self.a{n} = Same(3)",
        "import abc\nclass Abstract{n}(abc.ABC): pass",
    ),
    Part(
        "which objects a metaclass says are of its class",
        "x = x * 2 if isinstance(self.a{n}, (str, Asked{n})) else x",
        ("self_a = m.a{n}; self_a.v = -1",),
        "self.a{n} = Same(3)",
        "class Asks{n}(type):\n    def __instancecheck__(cls, o): return o.v > 0\nclass Asked{n}(metaclass=Asks{n}): pass",
    ),
    Part(
        "a buffer that is given",
        "x = x * 2 if isinstance(y, nn.Buffer) else x",
        ("y = torch.ones(2)", "y = nn.Buffer(torch.ones(2))", "y = torch.ones(2)"),
    ),
    Part(
        "numbers and words of an object",
        "x = x * (int(self.a{n}) + float(self.a{n}) + len(str(self.a{n})) + len(repr(self.b{n})))",
        ("m.a{n}.v = 11", "m.b{n}.v = -123", "Counted{n}.__int__ = lambda self: 9"),
        "self.a{n} = Counted{n}(3); self.b{n} = Counted{n}(4)",
        "class Counted{n}(Same):\n    def __index__(self): return self.v\n    def __int__(self): return self.v + 1\n    def __repr__(self): return 'v' * abs(self.v)",
    ),
    Part(
        "a layer that a dict has too",
        "x = self.l{n}(x) + self.a{n}['k'](x)",
        ("m.a{n}['k'] = nn.Tanh()", "m.l{n} = nn.Sigmoid()", "m.a{n}['k'] = m.l{n}"),
        "self.l{n} = nn.Linear(4, 4); self.a{n} = dict(k=self.l{n})",
    ),
    Part(
        "the module itself in a list",
        "x = self.a{n}[0].l{n}(x)",
        ("m.a{n} = [types.SimpleNamespace(l{n}=torch.sin)]", "m.a{n} = [m]; m.l{n} = nn.Sigmoid()"),
        "self.l{n} = nn.Tanh(); self.a{n} = [self]",
    ),
)
