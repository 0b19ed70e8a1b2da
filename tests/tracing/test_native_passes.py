"""What the native passes find out of operations and containers is what Python and Thunder say of them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from thunder_norm.tracing import native
from thunder_norm.tracing.guarding.value_kinds import ValueKinds
from thunder_norm.tracing.native import bound_symbols, elementwise, flattening, passes, proxies, symbols
from thunder_norm.tracing.tags import has_any_tag
import thunder
import thunder.torch as ltorch
from thunder.common import CompileData
from thunder.core import devices, dtypes, interpreter, jit_ext, prims, pytree, utils
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.proxies import (
    AnyProxy,
    CollectionProxy,
    ComplexProxy,
    FloatProxy,
    IntegerProxy,
    NumberProxy,
    StringProxy,
    TensorProxy,
    variableify,
)
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol, has_tags
from thunder.core.trace import TraceCtx, tracectx


def _wraps(f):
    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        return f(*args, **kwargs)

    return wrapper


def _with_signature(f):
    f.__signature__ = inspect.Signature([inspect.Parameter("z", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
    return f


METAS = [
    lambda: None,
    lambda a: None,
    lambda a, b=2: None,
    lambda a, /, b=2: None,
    lambda a=1, /, b=2: None,
    lambda a, *, b=3: None,
    lambda a, *, b: None,
    lambda *args: None,
    lambda a, *args, b=3: None,
    lambda a, /, **kwargs: None,
    lambda a, b=2, **kwargs: None,
    lambda *args, **kwargs: None,
    lambda a, *args, b=3, **kwargs: None,
    _wraps(lambda a, b=5: None),
    _wraps(_wraps(lambda a, *, b: None)),
    _with_signature(lambda a: None),
    _wraps(_with_signature(lambda a: None)),
    functools.partial(lambda a, b, c=1: None, 3),
    functools.lru_cache(lambda a, b=1: None),
]


@pytest.mark.parametrize("meta", METAS)
def test_arguments_are_bound_as_python_binds_them(meta):
    symbol = SimpleNamespace(meta=meta)
    for count in range(4):
        for names in itertools.chain.from_iterable(itertools.combinations("abcz", n) for n in range(4)):
            args, kwargs = tuple(range(count)), {name: name * 2 for name in names}
            try:
                bound = inspect.signature(meta).bind(*args, **kwargs)
            except TypeError as e:
                with pytest.raises(TypeError) as found:
                    passes._normalize(symbol, *args, **kwargs)
                assert str(found.value) == str(e)
                continue
            bound.apply_defaults()
            assert passes._normalize(symbol, *args, **kwargs) == (bound.args, bound.kwargs)


def test_functions_of_one_definition_have_defaults_of_their_own():
    def made(default, by_name):
        def meta(a=default, *, b=by_name):
            return a, b

        return meta

    for default, by_name in ((1, 2), ([1], 2), (1, [2]), (1.0, 2), (True, 2)):
        args, kwargs = passes._normalize(SimpleNamespace(meta=made(default, by_name)))
        assert args[0] is default and kwargs["b"] is by_name
    meta = made(1, 2)
    assert passes._normalize(SimpleNamespace(meta=meta)) == ((1,), {"b": 2})
    meta.__defaults__, meta.__kwdefaults__ = (3,), {"b": 4}
    passes.forget_signatures()  # as each compilation does
    assert passes._normalize(SimpleNamespace(meta=meta)) == ((3,), {"b": 4})


@dataclass
class Pair:
    a: object
    b: object


Point = collections.namedtuple("Point", "x y")


@pytest.fixture
def trees():
    """What symbols are given, in a trace."""
    with tracectx(TraceCtx()):
        t = TensorProxy("t", shape=(2,), device=devices.cpu, dtype=dtypes.float32)
        n = NumberProxy("n", 3, python_type=int)
        numbers = [n, IntegerProxy("i", 2), FloatProxy("f", 2.0), ComplexProxy("c", 2j), 1, 2.0, True, 1j]
        kinds = [dtypes.float32, dtypes.bool8, dtypes.int64, torch.float32]
        leaves = [t, *numbers, "s", None, *kinds, torch.device("cpu"), devices.cpu]
        containers = [
            (),
            [],
            {},
            (dtypes.uint8, dtypes.complex64),
            (StringProxy("x", name="s"), [CollectionProxy([t], name="l"), float], (AnyProxy(object(), name="a"),)),
            (t, [n, {"b": 1, "a": t}]),
            Point(t, 2),
            slice(1, n),
            torch.Size([1, 2]),
            torch.contiguous_format,
        ]
        yield [*leaves, *containers, leaves, tuple(leaves)]


def is_one(a, b):
    return len(a) == len(b) and all(x is y or x == y for x, y in zip(a, b, strict=True))


def test_containers_are_flattened_as_thunder_flattens_them(trees):
    for tree in trees:
        for ours, theirs in (
            (flattening.flatten, pytree.tree_flatten),
            (flattening.flatten_with_dataclass, pytree.tree_flatten_with_dataclass),
        ):
            (found, spec), (expected, expected_spec) = ours(tree), theirs(tree)
            assert spec == expected_spec and is_one(found, expected), tree
    t = trees[0]
    assert flattening.flatten_with_dataclass([Pair(t, 2)])[0] == [t, 2]
    with pytest.raises(TypeError, match="not supported"):
        flattening.flatten({1, 2})


@dataclass
class Given:
    a: object
    b: object


def test_arguments_and_results_of_symbols_are_those_that_thunder_finds(trees):
    t = trees[0]
    for tree in (*trees, Given(t, 2), (t, Given(t, 3)), {"a": Given(t, t)}):
        for args, kwargs in (((tree,), {}), ((1, tree, t), {}), ((), {"a": tree}), ((t,), {"b": 1, "a": tree})):
            bsym = BoundSymbol(prims.add, args=args, kwargs=kwargs, output=tree)
            for name, find in bound_symbols._FIND.items():
                if name.startswith("flat_") and not name.endswith("_spec"):
                    # of another, which keeps nothing of what was found out of this one
                    expected = getattr(BoundSymbol(prims.add, args=args, kwargs=kwargs, output=tree), name)
                    assert is_one(find(bsym), expected), (name, args, kwargs)


def test_symbols_are_copied_as_thunder_copies_them(trees):
    t, original = trees[0], BoundSymbol.from_bsym
    bsym = prims.add.bind(t, t, output=t)
    for changes in ({}, {"args": [t, 2]}, {"output": (t, t)}, {"header": "# here"}, {"tags": {"tag"}}, {"kwargs": {"a": t}}):
        for found in (bsym, bsym.flat_args, bsym.flat_proxy_outs, bsym.rhs):
            assert found is not None  # which stays with the symbol
            ours, theirs = bound_symbols.from_bsym(bsym, **changes), original(bsym, **changes)
            assert ours.tags is not bsym.tags and type(ours.args) is tuple
            for name in (*(f.name for f in dataclasses.fields(BoundSymbol)), *bound_symbols._PROPERTIES):
                assert is_one([getattr(ours, name)], [getattr(theirs, name)]), (name, changes)


def test_kinds_of_values_are_those_of_isinstance():
    class Hidden:
        """Says of itself what it is told to."""

        def __init__(self, kind):
            self.kind = kind

        @property
        def __class__(self):
            return self.kind

    kinds = ((int, str), float, collections.abc.Sequence)
    found = ValueKinds(*kinds)
    for value in (1, True, "s", 2.0, [], (), {}, None, Hidden(int), Hidden(float), Hidden(object), object(), torch.Size([1])) * 2:
        expected = next((i for i, kind in enumerate(kinds) if isinstance(value, kind)), 3)
        assert found.of(value) == expected, value

    class Late:
        pass

    assert found.of(Late()) == 3
    collections.abc.Sequence.register(Late)
    found.forget()
    assert found.of(Late()) == 2


SHAPES = [(), (2, 3), [4], (0,), torch.Size([2]), (2, -1), (2.0,), 3, None]
KINDS = [
    dtypes.float32,
    dtypes.float32_,
    dtypes.int64,
    dtypes.bool8,
    dtypes.complex64,
    dtypes.uint8,
    dtypes.uint64,
    float,
    int,
    None,
]


def _told(function, *args, **kwargs):
    """What it returns, or the class and text of its error."""
    try:
        return function(*args, **kwargs)
    except Exception as e:  # noqa: BLE001 - whatever it is, it must be the same
        return type(e), str(e)


def _properties_of(found):
    names = "_name _shape _device _dtype _true_dtype _numel _ndim _requires_grad _grad _distparallel_type _thunder_fsdp_padding_size history".split()
    return [repr(getattr(found, n)) for n in names] + [found.tags] if isinstance(found, TensorProxy) else found


def test_properties_of_tensors_are_those_that_thunder_infers():
    with tracectx(TraceCtx()):
        likes = [None] + [
            TensorProxy(shape=shape, device=devices.cpu, dtype=dtype, requires_grad=True)
            for shape in ((), (2, 3))
            for dtype in (dtypes.float32, dtypes.int64)
        ]
        for like, shape, dtype in itertools.product(likes, SHAPES, KINDS):
            for device, requires_grad in ((devices.cpu, True), (None, None), (devices.cpu, False), ("cpu", 1)):
                given = like, shape, device, dtype, requires_grad
                assert _told(proxies._properties, *given) == _told(proxies._original_properties, *given), given


def test_other_proxies_of_tensors_are_those_that_thunder_makes():
    changes = [
        {},
        {"name": "b"},
        {"name": "b", "tags": {1}, "history": (1,)},
        {"name": "b", "shape": (5,)},
        {"name": "b", "shape": None},
    ]
    changes += [{"name": "b", "dtype": k} for k in KINDS] + [{"name": "b", "requires_grad": r} for r in (False, True, None)]
    for shape, dtype, change in itertools.product(((), (2,)), (dtypes.float32, dtypes.int64), changes):
        found = []
        for replace in (proxies._replace, proxies._original_replace):
            with tracectx(TraceCtx()):
                t = TensorProxy("a", shape=shape, device=devices.cpu, dtype=dtype, requires_grad=True)
                found.append(_properties_of(_told(replace, t, **change)))
        assert found[0] == found[1], change


def test_calls_of_symbols_write_what_thunders_write():
    def composite(meta):
        return Symbol("composite", meta, id="composite")

    x, y = (torch.ones(2, 3) for _ in range(2))
    programs = [
        lambda x, y: ltorch.add(x, y, alpha=2),
        lambda x, y: composite(lambda a, b: a)(x, y),
        lambda x, y: composite(lambda a, b: a)(x, x),
        lambda x, y: composite(lambda a, b: (prims.sin(a), b))(x, b=y),
        lambda x, y: composite(lambda a, b: {"b": a, "a": [b, prims.sin(b)]})(x, y),
        lambda x, y: composite(lambda a, b: None)((x, [y]), slice(0, 1)),
        lambda x, y: composite(lambda a, b=3: b)(x),
        lambda x, y: ltorch.softmax(x, -1) + ltorch.sum(y),
        lambda x, y: composite(lambda a: a)(x, y),
        lambda x, y: prims.sin(x, y),
        lambda x, y: Symbol("nothing", None, id="nothing")(x),
    ]
    num_written = 0
    for program, is_grad_enabled in itertools.product(programs, (True, False)):
        found = []
        for call in (symbols._call, symbols._original_call):
            compiled = CompileData(fn=program, disable_preprocessing=True)
            compiled.is_grad_enabled = is_grad_enabled
            with compile_data_and_stats(compiled, None), pytest.MonkeyPatch.context() as patched:
                patched.setattr(Symbol, "__call__", call)
                trace = _told(thunder.trace(), program, x, y)
            if isinstance(trace, TraceCtx):
                num_written += 1
                tags = [[p.tags for p in b.flat_proxy_outs] for b in trace.bound_symbols]
                trace = (
                    str(trace).partition("\n\n")[2],
                    tags,
                    [vars(b).keys() - bound_symbols._PROPERTIES for b in trace.bound_symbols],
                )
            found.append(trace)
        assert found[0] == found[1]
    assert num_written == 2 * 2 * 8  # the last three programs are none


# What an operation may be given; of each native answer the same is asked of Thunder's own.
_SHAPES = ((2, 3), (3,), (1, 3), ())
_KINDS = (
    dtypes.float32,
    dtypes.float64,
    dtypes.float16,
    dtypes.bfloat16,
    dtypes.complex64,
    dtypes.int64,
    dtypes.uint8,
    dtypes.bool8,
)
_QUESTIONS = {
    "maybe_convert_to_dtype": lambda ask, a, b: ask(a, b.dtype if isinstance(b, TensorProxy) else type(b)),
    "maybe_broadcast": lambda ask, a, b: ask(a, b),
    "elementwise_type_promotion": lambda ask, a, b: [
        ask(a, b, type_promotion_kind=kind) for kind in utils.ELEMENTWISE_TYPE_PROMOTION_KIND
    ],
    "check_same_dtype": lambda ask, a, b: ask(a, b),
    "check_same_shape": lambda ask, a, b: (ask(a, b), ask(a, b, treat_cpu_scalar_tensors_as_numbers=False)),
    "check_same_device": lambda ask, a, b: ask(a, b),
    "are_same_dtypes": lambda ask, a, b: (ask(a, b), ask(a, b, weak_and_strong_are_equivalent=False)),
    "to_strong_dtype": lambda ask, a, b: ask(b.dtype if isinstance(b, TensorProxy) else type(b)),
}


def _said(ask, question, *operands):
    """What is said, tensors by what is known of them; or which error is raised."""
    try:
        said = question(ask, *operands)
    except Exception as e:  # noqa: BLE001 - whatever it is, it must be the same
        return type(e), str(e)
    known = [
        (v.shape, v.dtype, v.device, any(v is o for o in operands)) if isinstance(v, TensorProxy) else v
        for v in pytree.tree_flatten((said,))[0]
    ]
    return known, str(pytree.tree_flatten((said,))[1])


@pytest.mark.parametrize("name", _QUESTIONS)
def test_operands_agree_where_thunder_says_so(name):
    replacement = next(r for r in (*elementwise.REPLACEMENTS, *proxies.REPLACEMENTS) if r.name == name)
    cpu, meta = devices.Device("cpu"), devices.Device("meta")
    with tracectx(TraceCtx()):
        tensors = [
            TensorProxy(shape=shape, device=device, dtype=kind, requires_grad=False)
            for shape, device, kind in (
                *((shape, cpu, kind) for shape in _SHAPES for kind in (dtypes.float32, dtypes.int64)),
                *(((2, 3), cpu, kind) for kind in _KINDS),
                ((2, 3), meta, dtypes.float32),
            )
        ]
        for a, b in itertools.product([*tensors, True, 2, 2.5, 1j], repeat=2):
            native, thunders = (_said(ask, _QUESTIONS[name], a, b) for ask in (replacement.native, replacement.original))
            assert native == thunders, (a, b)


def _composite(x, y):
    return ltorch.mul(ltorch.softmax(ltorch.add(x, y), 0), x)


def test_names_are_swapped_as_thunder_swaps_them_whatever_the_map_held_before():
    with tracectx(trace := TraceCtx()), compile_data_and_stats(CompileData(fn=None, disable_preprocessing=True), None):
        x, y, z = (TensorProxy(name, shape=(3,), device=devices.Device("cpu"), dtype=dtypes.float32) for name in "xyz")
        _composite(x, y)
        inner = [p for b in trace.bound_symbols for s in b.subsymbols for p in s.flat_proxy_outs]
        maps: dict = {}
        native, original = bound_symbols._from_bsym_swap_proxies, bound_symbols._original_swap
        for swapped in (x, y, z, *inner):
            maps.clear()  # as long as the one before, with another in it
            maps[variableify(swapped)] = z
            for bsym, flags in itertools.product(trace.bound_symbols, itertools.product((False, True), repeat=3)):
                assert str(native(bsym, maps, *flags)) == str(original(bsym, maps, *flags)), (swapped, flags)
    bound_symbols.forget_names()


def test_an_operation_has_the_tags_that_thunder_gathers():
    with tracectx(trace := TraceCtx()), compile_data_and_stats(CompileData(fn=None, disable_preprocessing=True), None):
        x = TensorProxy("x", shape=(3,), device=devices.Device("cpu"), dtype=dtypes.float32)
        _composite(x, x)
        ltorch.dropout(x, 0.5)
        ltorch.copy_(x, ltorch.add(x, 1))
        trace.bound_symbols[0].subsymbols[0].tags.add(BoundSymbolTag.BACKWARD)
        for bsym in trace.bound_symbols:
            for tags in map(set, itertools.combinations((*prims.OpTags, BoundSymbolTag.BACKWARD), 2)):
                assert has_any_tag(bsym, tags) is has_tags(bsym, tags)


@pytest.mark.parametrize("value", ["word", "", 2, 2.5, True, None, (), (1,), [1], {"a": 1}, len, int, 1j, torch.float32])
def test_a_constant_has_the_wrapper_that_thunder_makes(value):
    def described(wrapped):
        of_value = {name: v for name, v in vars(wrapped).items() if name not in ("nothing", "original_value", "provenance")}
        assert wrapped.original_value is wrapped.nothing
        return of_value, vars(wrapped.provenance)

    kinds = (torch.Tensor, int, float, str, type(None))
    options = {"with_provenance_tracking": True, "uncacheable_classes": kinds, "callbacks": jit_ext.general_jit_callbacks}
    compiling = interpreter.InterpreterCompileCtx(opcode_interpreter=None, fn_lookaside=None, **options)
    with (
        interpreter.interpretercompilectx(compiling),
        interpreter.interpreterruntimectx(interpreter.InterpreterRuntimeCtx(debug_log=None, record_history=False)),
        jit_ext.jit_ctx(SimpleNamespace(show_progress_if_verbose=lambda: None, _constraints=[])),
    ):
        thunders = described(interpreter.wrap_const(value))
    with (
        interpreter.interpretercompilectx(compiling),
        interpreter.interpreterruntimectx(interpreter.InterpreterRuntimeCtx(debug_log=None, record_history=False)),
        jit_ext.jit_ctx(SimpleNamespace(show_progress_if_verbose=lambda: None, _constraints=[])),
        native.interpreter(),
    ):
        assert described(interpreter.wrap_const(value)) == thunders
