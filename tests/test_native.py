"""Thunder's interpreter with our native helpers acquires what it acquires without them."""

import re
import traceback
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests import native_objects, native_programs
from tests.native_programs import PROGRAMS, an_error_of_the_program, closures
from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.errors import ThunderNormError
from thunder_norm.tracing import native
from thunder_norm.transforms import NormTransform, SubclassTransform, grad, vmap
import thunder

_FILES = {__file__, native_objects.__file__, native_programs.__file__}


def acquired(make_transforms, function, *args):
    """What a first call comes to: result, or error with the lines it was raised from; and all its texts."""
    jitted = thunder.jit(function, transforms=make_transforms())
    try:
        result = jitted(*args)
    except Exception as e:  # noqa: BLE001 - whatever it is, it must be the same
        lines = [f.line for f in traceback.extract_tb(e.__traceback__) if f.filename in _FILES]
        return type(e), re.sub("0x[0-9a-f]+", "", str(e).splitlines()[0]), lines[-1], None
    return None, None, None, (result, texts(jitted))


def texts(jitted):
    """The first and last traces and prologues, without times and without what is numbered in a process: guards and fusions of ours."""
    traces = (thunder.last_prologue_traces(jitted), thunder.last_traces(jitted))
    written = "\n".join(str(t) for of_one in traces for t in (of_one[0], of_one[-1]))
    return re.sub(r"# Constructed by .*|(NormFusion|check_\w+?_|flatten_\w+?_)\d+(?=\()", r"\1", written).splitlines()


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
    return [r.owner[r.name] if isinstance(r.owner, dict) else vars(r.owner)[r.name] for r in native.REPLACEMENTS.all]


def test_thunders_functions_are_in_place_outside_of_acquisitions():
    originals = [r.original for r in native.REPLACEMENTS.all]
    assert entries() == originals
    met = []

    def watching(x):
        met.append(entries())
        return x + 1

    thunder.jit(watching)(torch.ones(2))
    assert entries() == originals
    with pytest.raises(RuntimeError, match="too large"):
        thunder.jit(an_error_of_the_program, transforms=[SubclassTransform()])(torch.ones(2))
    assert entries() == originals
    with native.interpreter():
        assert entries() == [r.native for r in native.REPLACEMENTS.all]
        with native.interpreter():
            pass
        assert entries() == [r.native for r in native.REPLACEMENTS.all]
    assert entries() == originals
    with native.switched_off(), native.interpreter():
        assert entries() == originals


def test_a_plain_compilation_is_left_to_thunder(monkeypatch):
    monkeypatch.setattr(native.REPLACEMENTS, "in_place", lambda: pytest.fail("the native helpers were put in place"))
    thunder.jit(closures)(torch.ones(2))
    with pytest.raises(BaseException, match="put in place"):
        thunder.jit(closures, transforms=[SubclassTransform()])(torch.ones(2))


def test_errors_of_ours_name_the_same_line():
    def branches(x):
        if x.sum() > 0:
            return x
        return -x

    ours, thunders = both(lambda: [SubclassTransform()], branches, torch.ones(2))
    assert issubclass(ours[0], ThunderNormError)
    assert ours == thunders
