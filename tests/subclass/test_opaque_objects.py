"""``SubclassTransform(opaque="run")``: objects that cannot be taken apart, on which torch runs the operations."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_subclass import DiagTensorBelow, WrapperTensorWithCustomSizes
from torch.testing._internal.logging_tensor import LoggingTensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.errors import DataDependentError, ThunderNormError, TransformError, UnsupportedOpError, UnsupportedSubclassError
from thunder_norm.transforms import SubclassTransform, grad
import thunder


def jit(f: Callable) -> Callable:
    return thunder.jit(f, transforms=[SubclassTransform(opaque="run")])


def made(seed: int = 0, requires_grad: bool = False) -> LoggingTensor:
    torch.manual_seed(seeded(seed))
    return LoggingTensor(torch.randn(3, 4), requires_grad=requires_grad)


def check(f: Callable, *makers: Callable[[], Any]) -> None:
    """The result, and what becomes of the arguments, are eager's, also from the cache with other values."""
    jf = jit(f)
    for seed in (0, 1):
        both = []
        for function in (f, jf):
            torch.manual_seed(seeded(seed))
            args = [make() for make in makers]
            both.append((function(*args), args))
        assert_same(both[1], both[0])
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 1)


def fresh() -> LoggingTensor:
    return LoggingTensor(torch.randn(3, 4))


class Tripled(torch.autograd.Function):
    """Its backward is not the derivative of its forward: it shows whose backward runs."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


def under_no_grad(x):
    with torch.no_grad():
        y = x * 2
    return y * x


@pytest.mark.parametrize(
    "f",
    [
        lambda x: sum([x, x]) + operator.add(x, 1),
        lambda x: (x > 0, x == x, -x, 2 - x, x[0], x[:, 1:], [*x]),
        lambda x: {"all": [x, x.sum()], "shape": x.size(0)},
        lambda x: x * 2 if isinstance(x, LoggingTensor) and type(x) is LoggingTensor and x.dtype is torch.float32 else x,
        lambda x: (x.elem + x, hasattr(x, "elem"), hasattr(x, "nothing"), getattr(x, "nothing", 3)),
        lambda x: F.layer_norm(x, (4,)).float().to(torch.float64),
        lambda x: (x * 1, x.add_(1), x * 2, x.mul_(x), x.sin()),
        lambda x: (F.dropout(x, 0.5), torch.rand_like(x), F.dropout(x, 0.5)),
        lambda x: (LoggingTensor(x.elem * 2) + 1).mul_(2),
    ],
)
def test_operations_are_eager_s(f):
    check(f, fresh)


def test_plain_tensors_take_part():
    check(lambda x, p: (p @ x.t(), x + p.exp(), torch.cat([x, x * p])), fresh, lambda: torch.randn(3, 4))


@pytest.mark.parametrize(
    "f", [lambda x: (x.sin() * x).sum(-1), lambda x: Tripled.apply(x) * x, under_no_grad, lambda x: x.elem.sum() * x.exp()]
)
def test_gradients_are_eager_s(f):
    found = []
    for function in (f, jit(f)):
        x = made(requires_grad=True)
        y = function(x)
        y.backward(torch.ones_like(y))
        found.append((y.detach(), x.grad))
    assert_same(found[1], found[0])


def test_the_trace_shows_one_call_for_each_operation():
    jf = jit(lambda x: x.sin() * 2)
    jf(made())
    program = str(thunder.last_traces(jf)[-1])
    assert program.count("LoggingTensor_sin") == 1 and program.count("LoggingTensor_mul") == 1


class Kept(logging.Handler):
    """What the class says of its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(str(record.msg))  # whose arguments a handler need not format


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    handler, logger = Kept(), logging.getLogger("LoggingTensor")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # pyright: ignore[reportAttributeAccessIssue] - of what is enabled
    return handler


def test_each_operation_is_run_once_and_in_order(kept: Kept):
    def f(x):
        x.cos()  # nobody uses it
        y = x.sin()
        x.cos()
        return y

    jf, x = jit(f), made()
    jf(x)
    said = []
    for function in (jf, f):
        kept.messages.clear()
        function(x)
        said.append(list(kept.messages))
    assert said[0] == said[1] and len(said[0]) == 3


def test_class_shape_strides_and_dtype_are_guarded():
    jf = jit(lambda x: x * 2)
    others = [
        torch.ones(3, 4),
        LoggingTensor(torch.ones(4, 3).t()),
        LoggingTensor(torch.ones(2)),
        LoggingTensor(torch.ones(3, 4, dtype=torch.float64)),
        WrapperTensorWithCustomSizes(torch.ones(3, 4)),
        TwoTensor(torch.ones(3, 4), torch.ones(3, 4)),
        LoggingTensor(torch.ones(3, 4), requires_grad=True),
    ]
    for i, x in enumerate([made(), *others]):
        assert_same(jf(x).detach(), (x * 2).detach())
        assert thunder.cache_misses(jf) == i + 1
    for x in (made(), *others):
        assert_same(jf(x).detach(), (x * 2).detach())
    assert thunder.cache_misses(jf) == len(others) + 1


def test_a_result_of_another_class_than_expected_is_an_error():
    d = DiagTensorBelow(torch.randn(4))
    jf = jit(operator.matmul)
    assert type(jf(d, torch.eye(4))) is DiagTensorBelow
    assert type(d @ torch.ones(4, 4)) is torch.Tensor
    with pytest.raises(DataDependentError, match="returned something else"):
        jf(d, torch.ones(4, 4))


def test_a_number_that_is_another_than_expected_is_an_error():
    class Counted(LoggingTensor):
        def positive(self) -> int:
            return int((self.elem > 0).sum())

    jf = jit(lambda x: x * x.positive())
    x = Counted(torch.tensor([1.0, -1.0]))
    assert_same(jf(x), x * 1)
    with pytest.raises(DataDependentError, match="returned something else"):
        jf(Counted(torch.tensor([1.0, 1.0])))


def aliased() -> tuple[LoggingTensor, torch.Tensor]:
    p = torch.ones(3, 4)
    return LoggingTensor(p), p


def in_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.t()


def set_attribute(x):
    x.name = "x"
    return x


@pytest.mark.parametrize(
    "f, make, match",
    [
        pytest.param(lambda x, p: (x.add_(1), p * 2), aliased, "shares memory", id="input"),
        pytest.param(lambda x, p: (x.elem * 2, x.add_(1)), aliased, "shares memory", id="element"),
        pytest.param(lambda x, p: (p.add_(1), x * 2), aliased, "changed in place", id="plain"),
        pytest.param(lambda x, p: (p.mul_(2), LoggingTensor(p) * 2), aliased, "changed in place", id="plain, made"),
        pytest.param(lambda x, p: torch.add(x, p, out=p), aliased, "out=", id="out"),
        pytest.param(lambda x, p: p.add_(x), aliased, "into a plain tensor", id="into plain"),
        pytest.param(lambda x, p: x * 2 if x.sum() > 0 else x, aliased, "value", id="condition"),
        pytest.param(lambda x, p: x * p.sum() * x.sum().item(), aliased, "value", id="item"),
        pytest.param(lambda x, p: set_attribute(x), aliased, "is set", id="attribute"),
        pytest.param(lambda x, p: in_autocast(x), aliased, "autocast", id="autocast"),
        pytest.param(lambda x, p: x + TwoTensor(p, p), aliased, "interpreted", id="wrapper"),
        pytest.param(lambda x, p: grad(lambda a: (x * a).elem.sum())(p), aliased, "transformed", id="transformed"),
        pytest.param(lambda x: (x * 2).add_(1), lambda: (made(requires_grad=True),), "differentiated", id="in-place"),
        pytest.param(lambda x: F.dropout(x, 0.5), lambda: (made(requires_grad=True),), "differentiated", id="random"),
    ],
)
def test_what_cannot_be_kept_right_is_refused(f, make, match):
    with pytest.raises(ThunderNormError, match=match):
        jit(f)(*make())


def test_autocast_around_the_call_is_refused():
    jf = jit(lambda x: x @ x.t())
    jf(made())
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UnsupportedOpError, match="autocast"):
        jf(made())


class NoCopies(LoggingTensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


def test_an_object_without_a_copy_is_refused():
    with pytest.raises(UnsupportedSubclassError, match="clone"):
        jit(lambda x: x * 2)(NoCopies(torch.ones(2)))


def test_refusal_is_the_default_and_says_what_to_do():
    for transform in (SubclassTransform(), SubclassTransform(opaque="error")):
        with pytest.raises(UnsupportedSubclassError, match='opaque="run"'):
            thunder.jit(lambda x: x * 2, transforms=[transform])(made())
    with pytest.raises(TransformError, match="'error', 'run'"):
        SubclassTransform(opaque="maybe")  # pyright: ignore[reportArgumentType]
