"""Operations return what torch's return: classes, shapes, dtypes, and refuse what torch refuses; whatever Thunder's do."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm.errors import InnerDerivativeError, ThunderNormError, UnsupportedOpError
from thunder_norm.executors import inductor
from thunder_norm.transforms import (
    CheckpointTransform,
    NormTransform,
    ProfileTransform,
    SplitBiasTransform,
    SubclassTransform,
    grad,
    vmap,
)
import thunder

# each is a function of x, which is [3, 4] in float32
_OF_CLASSES = """
torch.Tensor([1.0, 2.0]) | torch.Tensor([[1, 2], [3, 4]]) | torch.Tensor(2, 3).fill_(1) | torch.Tensor(size=(2,)).zero_()
torch.Tensor(torch.Size([2])).zero_() | torch.Tensor(x.shape).zero_() | torch.Tensor(x.size()).zero_() | torch.Tensor() | torch.Tensor([[]])
torch.Tensor(x) * 2 | torch.Tensor([x[0, 0], 2]) | torch.FloatTensor([1, 2]) | torch.DoubleTensor([1, 2]) | torch.LongTensor([1, 2])
torch.LongTensor([1.5]) | torch.LongTensor(3, 2).zero_() | torch.LongTensor(x.long()) | torch.BoolTensor([True, False]) | torch.HalfTensor([1.5])
torch.ByteTensor([1, 255]) | torch.FloatTensor(3).zero_() + x[:, 0] | torch.BFloat16Tensor((1.5, 2)) | torch.Tensor(range(3))
torch.autograd.Variable(x) * 2 | torch.autograd.Variable(data=x + 1) | torch.autograd.Variable(torch.zeros(2), requires_grad=True) + 1
x.new(x.shape).zero_() | x.new(x.size()).fill_(2) | x.new(x.shape[:1]).zero_() | x.new(torch.Size([2])).zero_() | x.new(2, 3).zero_() | x.new((2, 3))
x.new([1.0, 2.5]) | x.long().new([1, 2]) | x.new() | x.new(x) * 2 | x.double().new(x.shape).zero_() | x.new(size=(2,)).zero_() | x.new(range(2))
"""
_OF_LISTS = """
torch.tensor([x[0, 0], 2]) | torch.tensor([x.double()[0, 0], 2.0]) | torch.tensor([[x[0, 0]], [x[0, :1]]]) | torch.tensor([x.half()[0, 0], 2.0])
torch.tensor([x.half()[0, 0], torch.tensor(2)]) | torch.tensor([torch.tensor(True), 1]) | torch.as_tensor([x.sum(), 1]) | torch.asarray((x.sum(), 1))
x.new_tensor([x[0, 0], 1]) | x.double().new_tensor([x[0, 0], 1]) | torch.tensor([x.sum(), 1], dtype=torch.float64) | torch.tensor(range(3))
torch.tensor([np.float64(1.0)]) | torch.tensor([np.float16(1.0), 2]) | torch.tensor([np.int32(3)]) | torch.tensor([x.shape, x.shape]) | torch.tensor(x.shape)
torch.tensor(np.float64(1.5)) | torch.as_tensor(np.int32(2)) | torch.tensor(data=np.float64(1.5)) | torch.asarray(obj=[x.sum(), 1]) | torch.tensor(np.bool_(True))
x.new_tensor(np.float64(1.5)) | x.long().new_tensor([np.float64(1.5)]) | torch.tensor(np.float64(1.5), dtype=torch.half)
x * torch.fft.fftfreq(4) | torch.fft.rfftfreq(5, d=x.shape[0]) | torch.fft.fftfreq(x.shape[1], dtype=torch.float64)
torch.tensor([1, 2.5, True]) | torch.tensor([]) | torch.tensor(np.arange(3)) | torch.scalar_tensor(2) | torch.as_tensor(2) | torch.asarray(2.5)
"""
_OF_NUMBERS = """
torch.add(2, 3) | torch.add(2, -1, alpha=2) | torch.add(2, 3.0) | torch.add(True, 1) | torch.sub(2, 3, alpha=2) | torch.mul(2, 3.5) | torch.mul(True, True)
torch.div(2, 3) | torch.div(7, 2, rounding_mode='floor') | torch.floor_divide(7, 2) | torch.pow(2, torch.tensor(3))
torch.bitwise_and(6, x.long()) | torch.xlogy(2, x.abs()) | torch.float_power(2, x) | torch.true_divide(1, 2)
x + True | True * x.long() | x.long() // True | True ** x.long() | (x > 0) * 2.5 | (x > 0) + True | x.clamp(False, True) | x[True] | x[..., False]
x.long() + np.bool_(True) | torch.full((2,), np.bool_(True)) | torch.where(x > 0, 1, np.bool_(True)) | x.long() // np.bool_(True)
torch.full((2,), True) | torch.full_like(x.long(), 2.5) | torch.where(x > 0, True, 0.5) | F.pad(x, (1, 1), value=True)
"""
_KNOWN = """
x.tensor_split(torch.tensor([1])) | x.tensor_split(torch.tensor([1, 2]), dim=1) | x.tensor_split(torch.tensor(2)) | torch.tensor_split(x, torch.tensor([1]), 1)
x.narrow(0, torch.tensor(1), 1) | x.view(torch.tensor(4), 3) | x.reshape((torch.tensor(4), -1)) | x.expand(torch.tensor(2), 3, 4) | x.repeat(torch.tensor(2), 1)
torch.zeros(torch.tensor(2), 3) | torch.ones(torch.tensor(2)) | torch.arange(torch.tensor(3)) | torch.arange(0, torch.tensor(3) + 1, 1) | x.new_zeros(torch.tensor(2))
x[range(2)] | x[:, range(2, -1, -1)] | x[range(0)] | x[range(2), range(2)] | x[torch.tensor([1, 0, 1], dtype=torch.uint8)] | x[:, (x > 0)[0].byte()]
x[torch.tensor(1):] | x[torch.tensor(0):torch.tensor(2), 1] | x[:, torch.tensor(True)] | x[torch.tensor(1)] | torch.eye(torch.tensor(2))
"""
_SIZES = """
x.shape | x.size() | x.shape[:1] | x.shape + (2,) | [x.shape, x * 2] | {'a': x.shape} | x.size(0) | x.size(dim=-1) | str(x.shape) | isinstance(x.shape, torch.Size)
x.new_zeros(size=x.size()) | F.layer_norm(x, normalized_shape=x.shape[1:]) | x.view(*x.shape[:-1], 2, 2) | x.shape.numel() | (x @ x.t()).shape | x[:0].shape
"""
_REFUSED = """
x - (x > 0) | torch.rsub(torch.tensor(1), x > 0) | (x > 0) - (x > 0) | True - x | x.sub(x > 0) | F.normalize(x > 0) | torch.remainder(7, 3) | torch.fmod(7, 3)
torch.ldexp(x, x > 0) | x.sum(0, keepdim=np.bool_(True)) | x.long().add_(np.bool_(True)) | x.long() & np.bool_(True) | x[np.bool_(True)]
True - x.long() | x.add(x, alpha=True) | torch.eq(2, x) | x.sum(dim=True) | torch.sub(x, True) | x.long()[0, 0] - False
F.one_hot(x.long(), 0) | F.one_hot(x.long() - 2, num_classes=0) | F.one_hot(x[:0].long(), 0) | F.glu(x * 1j) | (x * 1j).sign_()
x.char().masked_fill(x > 0, torch.tensor(300)) | x.half().masked_fill(x > 0, 1e6) | x.masked_fill(x > 0, torch.tensor(1e50, dtype=torch.float64))
x.half().masked_fill(x > 0, torch.tensor(70000)) | x.clone().masked_fill_(x > 0, 1j) | F.nll_loss(x, torch.tensor([0, 1, 2]), torch.ones(4).requires_grad_())
F.cross_entropy(x, torch.tensor([0, 1, 2]), torch.ones(4).requires_grad_() * 2) | F.multi_margin_loss(x, torch.tensor([0, 1, 2]), 1, 1.0, torch.ones(4).requires_grad_())
torch.LongTensor(x) | torch.Tensor(['a']) | torch.Tensor(2.5) | torch.tensor([x[0, :2]]) | torch.dot(x[0], x[0].double()) | torch.heaviside(x, x.double())
F.one_hot(x.long() - 2 * (x.cumsum(0) > 1)) | F.one_hot(x.long(), 1) | torch.bernoulli(x * 2) | torch.sign(x * 1j) | (x * 1j).sign() | x * float(torch.ones(2)) | x * bool(torch.ones(2))
"""


def _programs(table: str) -> list[str]:
    return [p.strip() for line in table.strip().splitlines() for p in line.split(" | ") if p.strip()]


def _function(text: str):
    import numpy as np

    return eval(f"lambda x: {text}", {"torch": torch, "F": F, "np": np})  # noqa: S307 - of this file


def _described(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.requires_grad, tuple(value.shape), value.detach().tolist()
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [_described(v) for v in value]
    return {k: _described(v) for k, v in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("text", _programs(_OF_CLASSES + _OF_LISTS + _OF_NUMBERS + _KNOWN + _SIZES))
def test_what_is_made_is_torchs(text):
    torch.manual_seed(seeded(0))
    x, f = torch.randint(-8, 8, (3, 4)) / 4, _function(text)
    for transform in (SubclassTransform, NormTransform):
        jitted = thunder.jit(f, transforms=[transform()])
        for given in (x, x + 1):
            assert _described(jitted(given)) == _described(f(given))


def test_another_name_without_history():
    def f(x):
        y, other = x * 2, torch.autograd.Variable(x * 3)
        other[0] = 1
        parts = torch.asarray(y, requires_grad=False), torch.asarray(obj=x, dtype=torch.half, requires_grad=False)
        return *parts, torch.asarray(x, copy=True, requires_grad=False), other, x * other

    x = torch.ones(3, requires_grad=True)
    assert _described(thunder.jit(f, transforms=[NormTransform()])(x)) == _described(f(x))
    with pytest.raises(InnerDerivativeError):  # in eager mode x requires none from then on
        thunder.jit(lambda x: torch.asarray(x, requires_grad=False), transforms=[NormTransform()])(x)


_WITH_FIELDS = (
    "x.max(1) | x.sort(0) | (x, [x.topk(2), 1]) | {'a': x.median(1), 'b': x} | x.aminmax() | torch.linalg.slogdet(x[:, :3])"
    " | (x > 0).max(1) | torch.max(x > 0, dim=0, keepdim=True)"
)


@pytest.mark.parametrize("text", _programs(_WITH_FIELDS))
def test_results_with_fields_are_returned(text):
    """Whoever takes part: Thunder prints them in a form that does not run."""
    torch.manual_seed(seeded(0))
    x, f = torch.randn(3, 4), _function(text)
    options = [{"transforms": [t()]} for t in (CheckpointTransform, SplitBiasTransform, ProfileTransform, SubclassTransform)]
    for given in options + [{"executors": [inductor, *thunder.get_default_executors()]}]:
        assert _described(thunder.jit(f, **given)(x)) == _described(f(x))


@pytest.mark.parametrize("text", _programs(_REFUSED))
def test_what_torch_refuses_is_refused(text):
    x, f = torch.ones(3, 4), _function(text)
    try:
        f(x)
    except Exception as e:  # noqa: BLE001 - whatever torch says
        wanted = type(e)
    else:
        pytest.skip("this version of torch computes it")
    with pytest.raises(wanted):
        thunder.jit(f, transforms=[NormTransform()])(x)


# each is a function of one sample and of two positions, or of the sample alone
_REFUSED_OF_SAMPLES = """
x.index_fill(0, i, 1.0) | x.index_fill(0, i[0], 1.0) | torch.arange(4.0).index_fill(0, i, 1.0) | x.half().index_fill(0, i.abs() % 4, 1e6)
x.char().index_fill(0, i.abs() % 4, torch.tensor(300)) | x.char().masked_fill(x > 0, torch.tensor(300)) | torch.bernoulli(x * 2) | x.mul(-1).bernoulli()
"""


@pytest.mark.parametrize("text", _programs(_REFUSED_OF_SAMPLES))
def test_what_torch_refuses_of_one_sample_is_refused_of_several(text):
    f = eval(f"lambda x, i: {text}", {"torch": torch})  # noqa: S307 - of this file
    x, positions = torch.ones(2, 4), torch.tensor([[9, 0], [-5, 0]])
    with pytest.raises((IndexError, RuntimeError)) as wanted:
        f(x[0], positions[0])
    with pytest.raises(wanted.type):
        vmap(f, randomness="different")(x, positions)


def test_index_fill_of_samples_takes_the_values_that_it_holds():
    x, positions = torch.ones(3, 4), torch.tensor([[0, -1], [1, 1], [-4, 2]])
    for dtype, value in itertools.product((torch.int8, torch.float16), (2.5, True, torch.tensor(3.5))):
        f = lambda x, i: x.index_fill(0, i, value)  # noqa: B023, E731 - called here
        given = x.to(dtype)
        wanted = torch.stack([f(t, i) for t, i in zip(given, positions, strict=True)])
        torch.testing.assert_close(vmap(f)(given, positions), wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_have_a_gradient_for_the_weights_of_classes_where_differences_are_one(reduction):
    """torch refuses it; under `grad` it is the derivative."""
    torch.manual_seed(seeded(0))
    x, weight = torch.randn(4, 3, 2, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 0.5
    labels = torch.tensor([[0, 1], [2, 0], [1, -100], [1, 2]])

    def f(w):
        smoothed = F.cross_entropy(x, labels, w, reduction=reduction, label_smoothing=0.1)
        return smoothed + F.nll_loss(x, labels, w, reduction=reduction).square()

    steps = 1e-6 * torch.eye(3, dtype=torch.float64)
    wanted = torch.stack([(f(weight + e) - f(weight - e)) / 2e-6 for e in steps])
    torch.testing.assert_close(grad(f)(weight), wanted, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(vmap(grad(f))(weight[None])[0], wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, n: x.narrow(0, n, 1),
        lambda x, n: torch.zeros(n),
        lambda x, n: x[n:],
        lambda x, n: torch.arange(x[:, 0].long().sum() + n),
    ],
    ids=["narrow", "zeros", "a slice", "arange"],
)
def test_sizes_by_inputs_are_those_of_the_call(f):
    jitted = thunder.jit(f, transforms=[NormTransform()])
    for n in (1, 2, 1):
        torch.testing.assert_close(jitted(torch.ones(3, 4), torch.tensor(n)), f(torch.ones(3, 4), torch.tensor(n)))


def test_sections_by_inputs_are_refused():
    with pytest.raises(ThunderNormError, match="value"):
        thunder.jit(lambda x, n: x.tensor_split(n[None]), transforms=[NormTransform()])(torch.ones(3, 4), torch.tensor(1))


@pytest.mark.parametrize("dim", [(), []], ids=str)
def test_a_sum_over_no_dimensions_is_of_all(dim):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    f = lambda x: (x.sum(dim) ** 2, torch.sum(x[:0], dim=dim, keepdim=True))  # noqa: E731
    found = thunder.jit(f, transforms=[NormTransform()])(x)
    torch.testing.assert_close(found, f(x))
    torch.testing.assert_close(torch.autograd.grad(found[0], x), torch.autograd.grad(f(x)[0], x))


def test_a_tensor_of_tensors_has_no_gradient():
    x = torch.randn(3, requires_grad=True)
    f = lambda x: torch.tensor([x[0], x[1]]) * x[:2]  # noqa: E731
    (wanted,), (found,) = (torch.autograd.grad(g(x).sum(), x) for g in (f, thunder.jit(f, transforms=[NormTransform()])))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(grad(lambda x: f(x).sum())(x.detach()), wanted)


def test_agreement_holds_inside_functions():
    x = torch.randn(5, 3)
    f = lambda x: (torch.add(2, 3) * x, torch.Tensor([1.0]) + x, torch.tensor([x[0], 2.0]))  # noqa: E731
    for found, wanted in zip(vmap(f)(x), (5 * x, x + 1, torch.stack([x[:, 0], torch.full((5,), 2.0)], 1)), strict=True):
        torch.testing.assert_close(found, wanted)


def test_programs_under_autocast_have_its_dtypes():
    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            a = x @ x.t()
            with torch.autocast("cpu", enabled=False):
                b = x @ x.t()
        return a, b, F.linear(x, x)

    x = torch.randn(3, 4)
    found = thunder.jit(f, transforms=[NormTransform()])(x)
    assert [t.dtype for t in found] == [t.dtype for t in f(x)]


_SELECTED = {
    "a row": lambda y, i: (y[i], y),
    "a part of a row": lambda y, i: (y[i, 1:], y),
    "a column": lambda y, i: (y[:, i], y),
    "an entry": lambda y, i: (y[i, 0], y),
    "a row of a row": lambda y, i: (y[i][i], y),
    "a copy": lambda y, i: (y[i[None]], y),
    "a constant": lambda y, i: (y[torch.tensor(1)], y),
    "a constant and a slice": lambda y, i: (y[torch.tensor(-1), 1:], y),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", _SELECTED)
def test_what_a_tensor_selects_is_written_into(name, requires_grad):
    def f(x, i):
        v, y = _SELECTED[name](x * 1, i)
        v.mul_(2)
        w = v + y.sum()
        y.add_(1)
        return y, v, w

    torch.manual_seed(seeded(0))
    x, i = torch.randn(3, 4, dtype=torch.float64, requires_grad=requires_grad), torch.tensor(1)
    wanted, found = f(x, i), thunder.jit(f, transforms=[NormTransform()])(x, i)
    torch.testing.assert_close(found, wanted)
    if requires_grad:
        slopes = [torch.autograd.grad(sum((t * t).sum() for t in r), x)[0] for r in (found, wanted)]
        torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("f", [lambda x: x.abs().to(torch.uint16).long(), lambda x: torch.zeros(3, dtype=torch.uint32).long()])
def test_dtypes_that_thunder_has_not_are_refused_with_the_line(f):
    with pytest.raises(UnsupportedOpError, match=r"of torch.uint(16|32)(.|\n)*test_torch_results.py"):
        thunder.jit(lambda x: f(x), transforms=[SubclassTransform()])(torch.ones(3))
    with pytest.raises(UnsupportedOpError, match="of torch.uint16"):
        thunder.jit(lambda x: x.long(), transforms=[SubclassTransform()])(torch.ones(3).to(torch.uint16))


def test_functions_in_c_that_take_torchs_tensors_alone_are_refused():
    with pytest.raises(UnsupportedOpError, match=r"to a function in C(.|\n)*test_torch_results.py"):
        thunder.jit(lambda x: torch._C._is_cow_tensor(x), transforms=[SubclassTransform()])(torch.ones(3, 3))


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
def test_what_a_function_does_without_gradients_has_none(transform: type) -> None:
    """Bounds of variances and lengths are written under ``torch.no_grad``, inside of torch's functions: gradients pass by."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.gaussian_nll_loss(x, 2 * x, x.abs(), eps=1.5) + F.cosine_similarity(
            x, x.exp(), 0, eps=x.detach().norm().item() + 9
        )

    x = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
    found, wanted = (torch.autograd.grad(g(x), x)[0] for g in (thunder.jit(f, transforms=[transform()]), f))
    torch.testing.assert_close(found, wanted)


def test_functions_of_operators_are_the_operators() -> None:
    def f(x: torch.Tensor, i: torch.Tensor) -> list:
        return [
            operator.mod(7, x),
            operator.mod(i, 2.5),
            operator.pos(x),
            operator.eq(None, x),
            operator.ne(x, "a"),
            operator.and_(i, 6),
        ]

    given = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([3, 1, 2])
    torch.testing.assert_close(thunder.jit(f, transforms=[NormTransform()])(*given), f(*given))
