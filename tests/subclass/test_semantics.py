"""What programs around wrapper subclasses ask of plain tensors is answered as torch answers it."""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from tests.seeds import seeded
from tests.subclasses import OneTensor, assert_same, two
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.subclass.classes.wrapper_scan import may_construct_wrappers
from thunder_norm.transforms import SubclassTransform
import thunder


class Holder(torch.Tensor):
    """A class whose `neg` does what a test asks for to the inner tensor."""

    value: torch.Tensor
    neg: Callable[[torch.Tensor], torch.Tensor]

    @staticmethod
    def __new__(cls, value: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, strides=value.stride(), dtype=value.dtype)

    def __init__(self, value: torch.Tensor):
        self.value = value

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __tensor_flatten__(self):
        return ["value"], None

    @staticmethod
    def __tensor_unflatten__(inner, ctx, outer_size, outer_stride):
        return Holder(inner["value"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Holder, lambda x: x.value, (args, kwargs or {}))
        return Holder(Holder.neg(args[0]) if func is torch.ops.aten.neg.default else func(*args, **kwargs))

    def is_transposed(self) -> bool:
        return self.value.stride(0) < self.value.stride(-1) and not self.value.is_contiguous()

    def flipped(self) -> torch.Tensor:
        return self.value + 1 if self.value.stride()[0] < self.value.stride()[1] else self.value - 1


def jit(function: Callable) -> Callable:
    return thunder.jit(function, transforms=[SubclassTransform()])


def change_base(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    flat = y.view(-1)
    y.add_(1)
    return flat * 3


def change_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    flat = y.view(-1)
    flat.mul_(flat).sub_(1)
    return y + 1


def count(x: torch.Tensor) -> torch.Tensor:
    n = int(torch.prod(torch.tensor(x.shape)))
    return x * n + torch.tensor([1.0, 2.0]).sum().item()


@pytest.mark.parametrize("body", [change_base, change_view, count], ids=operator.attrgetter("__name__"))
def test_a_dispatch_may_do(body: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Holder, "neg", staticmethod(body), raising=False)
    x = torch.randn(2, 3)
    assert_same(jit(lambda x: -x)(Holder(x)), -Holder(x))


def change_part(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.view(-1)[1:3].add_(1)
    return y


def ask_for_changed(x: torch.Tensor) -> torch.Tensor:
    n = torch.tensor([1.0, 2.0])
    n.add_(1)
    return x * n.sum().item()


def ask_for_data(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


@pytest.mark.parametrize("body", [ask_for_changed, ask_for_data])
def test_a_dispatch_may_ask_for_values(body: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Holder, "neg", staticmethod(body), raising=False)
    jf = jit(lambda x: -x)
    for value in (torch.randn(2, 3), torch.randn(2, 3)):
        assert_same(jf(Holder(value)), -Holder(value))


def test_a_dispatch_may_change_a_part_of_what_it_has_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Holder, "neg", staticmethod(change_part), raising=False)
    x = Holder(torch.randn(2, 3))
    assert_same(jit(lambda x: -x)(x), -x)


@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "columns"])
def test_methods_see_the_strides_of_inner_tensors(transpose: bool):
    value = torch.randn(3, 4).t() if transpose else torch.randn(3, 4)
    jf = jit(lambda x: (x.is_transposed(), x.flipped()))
    assert_same(jf(Holder(value)), (transpose, Holder(value).flipped()))


def test_dtype_and_device_of_plain_tensors_are_torch_s():
    def f(x):
        return x + 1 if x.dtype == torch.float32 and x.device == torch.device("cpu") else x - 1

    x = torch.ones(3)
    assert_same(jit(f)(x), x + 1)


def test_a_program_that_constructs_wrappers_is_told_that_it_is_compiled_but_not_by_dynamo():
    def f(x):
        y = x + 1 if torch.compiler.is_compiling() and not torch._dynamo.is_compiling() else x - 1
        return TwoTensor(y, y).a

    x = torch.ones(3)
    assert_same(jit(f)(x), x + 1)


def test_lists_given_to_operations_may_change_afterwards():
    def f(x):
        sizes = [2, 3]
        y = x.view(sizes)
        sizes[0] = 1
        return y * 2

    x = torch.randn(6)
    assert_same(jit(f)(x), f(x))


@torch.library.custom_op("thunder_norm_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_custom_operations_run():
    def f(x, p):
        return torch.ops.thunder_norm_tests.twice(x.a) + 1, torch.ops.thunder_norm_tests.twice.default(p)

    x, p = two(3), torch.ones(3)
    assert_same(jit(f)(x, p), f(x, p))


def test_modules_are_looked_for():
    def f(x):
        return x * 2 if importlib.util.find_spec("torch") is not None and importlib.util.find_spec("nothing") is None else x

    x = two(3)
    assert_same(jit(f)(x), f(x))


# -- code that may construct wrappers -----------------------------------------------------------------------------------


def constructs(a):
    return TwoTensor(a, a)


class Constructs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return constructs(a)

    @staticmethod
    def backward(ctx, g):
        return g


def applies(a):
    return Constructs.apply(a)


def calls_back(a):
    return calls_back(a) if a else applies


def plain(a):
    return torch.sin(a) if a is not operator else calls_nothing(a)


def calls_nothing(a):
    return plain(a)


def around(cls):
    return lambda a: [cls(b, b) for b in a]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (constructs, True),
        (Constructs, True),
        (applies, True),
        (calls_back, True),
        (around(TwoTensor), True),
        (around(torch.nn.Linear), False),
        (plain, False),
        (len, False),
        (torch.nn.functional.linear, False),
    ],
    ids=["itself", "function", "applies", "recursive", "closure", "other class", "plain", "builtin", "torch"],
)
def test_code_is_seen_to_construct_wrappers(fn: Callable, expected: bool):
    assert may_construct_wrappers(fn) is expected


class _Inner(OneTensor):
    """Does to what is inside what is done to it, and keeps its own shape."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain, named = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        out = tree_map_only(torch.Tensor, cls, func(*plain, **named))
        return args[0] if func._schema.is_mutable else out


def test_a_result_that_would_come_out_with_another_shape_is_refused():
    program = lambda v, w: v @ w  # noqa: E731 - what is jitted
    v, w = torch.ones(4), _Inner(torch.ones(4, 4))
    assert (program(v, w).shape, program(v, w).inner.shape) == ((1, 4), (4,))
    with pytest.raises(UnsupportedOpError, match=r"has shape \(1, 4\), and is put together with shape \(4,\)"):
        thunder.jit(program, transforms=[SubclassTransform()])(v, w)
    jitted = thunder.jit(lambda v, w: (v @ w).inner * 2, transforms=[SubclassTransform()])
    assert_same(jitted(v, w), program(v, w).inner * 2)


class _Choosy(OneTensor):
    """Answers where its own class takes part alone, with plain tensors: these are no class that it is told of."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(t, cls) for t in types) or func is torch.ops.aten.cos.default:
            return NotImplemented
        plain, named = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        out = tree_map_only(torch.Tensor, cls, func(*plain, **named))
        return args[0] if func._schema.is_mutable else out


class _Closer(_Choosy):
    """Is asked first."""


def _sgd(w, p):
    y = w * 1
    y.add_(p)
    return torch.nn.functional.linear(p, y, p[0]).relu().sum() + (p - w).sum()


@pytest.mark.parametrize(
    "program",
    [lambda w, p: w * p, lambda w, p: p @ w, lambda w, p: torch.cat([p, w]), lambda w, p: torch.where(p > 0, w, p), _sgd],
)
@pytest.mark.parametrize("cls", [_Choosy, _Closer])
def test_a_class_is_told_of_the_classes_of_wrappers_alone(program: Callable, cls: type):
    def run(f: Callable):
        torch.manual_seed(seeded(0))
        w, p = cls(torch.randn(3, 3)).requires_grad_(), torch.randn(3, 3, requires_grad=True)
        y = f(w, p)
        y.backward(torch.ones_like(y.detach()))
        return y, w.grad, p.grad

    jitted = thunder.jit(lambda w, p: program(w, p), transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(run(jitted), run(program))


@pytest.mark.parametrize("program", [lambda w, p: w.cos(), lambda w, p: torch.addcmul(p, w.sin(), w.cos())])
def test_what_no_class_answers_is_said_in_torchs_words(program: Callable):
    given = _Choosy(torch.ones(3, 3)), torch.ones(3, 3)
    said = []
    for f in (program, thunder.jit(lambda w, p: program(w, p), transforms=[SubclassTransform()])):
        with pytest.raises(Exception) as e:
            f(*given)
        said.append((e.type, str(e.value)))
    assert said[0] == said[1]
