"""Thunder's interpreter with our native helpers acquires what it acquires without them."""

import re
import traceback
from collections import OrderedDict, namedtuple
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.immutable_collections import immutable_list

from benchmarks.real_mode import renumbered
from tests.seeds import LONG, seeded
from tests.tracing import native_drawn, native_objects, native_programs
from tests.tracing.native_programs import PROGRAMS, an_error_of_the_program, closures
from thunder_norm import RMSTensor
from thunder_norm.errors import ThunderNormError
from thunder_norm.tracing import native
from thunder_norm.tracing.native import passes
from thunder_norm.transforms import NormTransform, SubclassTransform, grad, vmap
import thunder
from thunder.core import devices, dtypes
from thunder.core.proxies import NumberProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.trace import from_trace, tracectx

IS_NATIVE = version("lightning-thunder") == "0.2.6"  # the one that the helpers were written for; any other is left to itself
_FILES = {__file__, native_objects.__file__, native_programs.__file__}


def acquired(make_transforms, function, *args):
    """What a first call comes to: result, or error with the lines it was raised from; and all its texts."""
    jitted = thunder.jit(function, transforms=make_transforms())
    try:
        result = jitted(*args)
    except Exception as e:  # noqa: BLE001 - whatever it is, it must be the same
        lines = [f.line for f in traceback.extract_tb(e.__traceback__) if f.filename in _FILES or f.filename.startswith("<drawn")]
        return type(e), re.sub("0x[0-9a-f]+", "", str(e).splitlines()[0]), lines[-1], None
    return None, None, None, (result, texts(jitted))


def texts(jitted):
    """The first and last traces and prologues, without times and without what is numbered in a process: guards and fusions of ours.

    In the last ones tensors are numbered as they come.  They are written as a compilation writes what it runs.
    """
    traces = (thunder.last_prologue_traces(jitted), thunder.last_traces(jitted))
    with native.compiler():
        written = "\n".join(text for of_one in traces for text in (str(of_one[0]), renumbered(str(of_one[-1]))))
    return re.sub(
        r"# Constructed by .*|(NormFusion|check_\w+?_|flatten_\w+?_|tensor_of_number_)\d+(?=\()", r"\1", written
    ).splitlines()


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


def test_what_a_trace_is_run_with_is_gathered_the_same():
    """Literals, containers of them, dtypes, devices and what has no text: the names that its text has, and what they are."""

    def program(x):
        y = torch.cat([x, x.to(torch.float64)], dim=-1).reshape((3, 4))[:, None, 1:3]
        return F.interpolate(y, size=None, scale_factor=2.0, mode="nearest").sum((0, 1), keepdim=True), torch.ones(
            2, device="cpu"
        )

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    jitted(torch.ones(2, 3))
    for trace in (*thunder.last_traces(jitted), *thunder.last_prologue_traces(jitted)):
        expected = trace.python(), trace.python_ctx()
        with native.compiler():
            assert (trace.python(), trace.python_ctx()) == expected
            assert from_trace_with_copies(trace).python() == expected[0]


def from_trace_with_copies(trace):
    """Of symbols that nothing was found out of yet."""
    copied = from_trace(trace)
    copied.bound_symbols = [b.from_bsym(args=b.args, _import_ctx={}, _object_ctx={}) for b in trace.bound_symbols]
    copied.set_provenance(trace.get_provenance())
    return copied


Pair = namedtuple("Pair", "first second")


def containers_of(x, y):
    """Arguments of every sort that a symbol may have, with proxies in them and without."""
    number = NumberProxy("n", 2, python_type=int)
    return [
        (x, y, number),
        (x, (2, -1), [y, [x, None]], {"b": y, "a": (x, True)}),
        (slice(x, None, 2), Pair(x, 3), OrderedDict(b=x, a=y), {}),
        (x, torch.float32, dtypes.float32, dtypes.int64, devices.Device("cpu"), 1.5, 1j, "x", ...),
        (x, torch.Size([2, 3]), object, len, torch.Generator, immutable_list([y, 1])),
    ]


@pytest.mark.parametrize("index", range(5))
def test_proxies_in_arguments_are_replaced_the_same(index):
    """By Thunder's own function, whatever holds them."""
    trace = thunder.trace()(lambda x, y: x + y, torch.ones(2), torch.ones(2))
    with tracectx(trace):
        x, y = trace.args
        z, w = x.replace(name="z"), x.replace(name="w")
        args = containers_of(x, y)[index]
        bsym = trace.bound_symbols[-1].from_bsym(args=args, kwargs={"other": args, "of": x}, output=args, subsymbols=[])
        for swap_map in ({variableify(x): z}, {variableify(x): z, variableify(z): w}):
            with native.switched_off():
                expected = bsym.from_bsym_swap_proxies(swap_map)
            with native.compiler():
                found = bsym.from_bsym_swap_proxies(swap_map)
            for name in ("args", "kwargs", "output"):
                of_ours, of_thunder = (tree_flatten(getattr(b, name)) for b in (found, expected))
                assert of_ours[1] == of_thunder[1] and all(a is b for a, b in zip(of_ours[0], of_thunder[0], strict=True))
                assert list(map(str, getattr(found, name))) == list(map(str, getattr(expected, name)))  # keys in their order


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
    return [r.owner[r.name] if isinstance(r.owner, dict) else vars(r.owner).get(r.name) for r in native.REPLACEMENTS.all]


@pytest.mark.parametrize("seed", range(300 if LONG else 16))
def test_drawn_programs_do_what_they_do_in_python(seed):
    """Thunder's interpreter alone has other answers for some: it closes no generator, and takes what a ``__contains__`` returns."""
    program, x = native_drawn.drawn(seed), torch.ones(2, 3)
    try:
        expected, error = program(x), None
    except Exception as e:  # noqa: BLE001 - whatever it is, it must be the same
        expected, error = None, (type(e), str(e).splitlines()[0])
    found = acquired(lambda: [SubclassTransform()], program, x)
    assert found[:2] == (error or (None, None))
    assert error is not None or torch.equal(found[3][0], expected)


class Config:
    """As those of transformers: each attribute is asked for by Python code."""

    aliases = {"size": "width"}  # noqa: RUF012

    def __init__(self):
        self.width, self.names, self.table = 6, ["a", "b"], {"c": {"d": 2}}

    def __getattribute__(self, name):
        if name != "aliases" and name in super().__getattribute__("aliases"):
            name = super().__getattribute__("aliases")[name]
        return super().__getattribute__(name)


class Configured(nn.Module):
    """Holds containers beside its parameters, and modules in modules."""

    def __init__(self):
        super().__init__()
        self.config, self.plan, self.sizes = Config(), {"x": "y"}, [1, 2]
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Identity())

    def forward(self, x):
        y = self.inner(x)
        return y * self.config.size if y.shape[-1] == self.config.width else y


def test_containers_beside_parameters_are_guarded_the_same():
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(seeded(3)))
    torch.manual_seed(seeded(0))
    model = Configured()
    ours, thunders = both(lambda: [SubclassTransform()], model, x)
    assert ours[:3] == thunders[:3] == (None, None, None)
    assert ours[3][1] == thunders[3][1]
    torch.testing.assert_close(ours[3][0], model(x))


def test_thunders_functions_are_in_place_outside_of_acquisitions():
    untouched = [None if r.is_builtin else r.original for r in native.REPLACEMENTS.all]
    within = [r.native for r in native.REPLACEMENTS.all] if IS_NATIVE else untouched
    assert entries() == untouched
    met = []

    def watching(x):
        met.append(entries())
        return x + 1

    thunder.jit(watching)(torch.ones(2))
    assert entries() == untouched
    with pytest.raises(RuntimeError, match="too large"):
        thunder.jit(an_error_of_the_program, transforms=[SubclassTransform()])(torch.ones(2))
    assert entries() == untouched
    with native.interpreter():
        assert entries() == within
        with native.interpreter():
            pass
        assert entries() == within
    assert entries() == untouched
    with native.switched_off(), native.interpreter():
        assert entries() == untouched


@pytest.mark.skipif(not IS_NATIVE, reason="every compilation is left to Thunder")
def test_a_plain_compilation_is_left_to_thunder(monkeypatch):
    for replacements in (native.REPLACEMENTS, passes.REPLACEMENTS):
        monkeypatch.setattr(replacements, "in_place", lambda: pytest.fail("the native helpers were put in place"))
    thunder.jit(closures)(torch.ones(2))
    with pytest.raises(BaseException, match="put in place"):
        thunder.jit(closures, transforms=[SubclassTransform()])(torch.ones(2))


def test_errors_of_ours_name_the_same_line():
    def branches(x):
        if (x + torch.rand(2)).sum() > 0:
            return x
        return -x

    ours, thunders = both(lambda: [SubclassTransform()], branches, torch.ones(2))
    assert issubclass(ours[0], ThunderNormError)
    assert ours == thunders
