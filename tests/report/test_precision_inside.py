"""What happens inside of what one rule knows as a whole, and roundings of masks: both arrive by finite bounds, which nothing exceeds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import thunder_norm
from tests.seeds import seeded
from thunder_norm import RMSTensor, norm_report
from thunder_norm.report.precision.formats import Format
from thunder_norm.transforms import NormTransform
import thunder

_BFLOAT16 = Format(torch.bfloat16)


def rms_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rms_norm_and_more(x):
    """The centred input is used in the normalization and beside it."""
    h = x - x.mean(-1, keepdim=True)
    return h / torch.sqrt(h.square().mean(-1, keepdim=True) + 1e-6) + 0.3 * h


def gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def swish(x):
    return x * torch.sigmoid(x)


def softmax(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def rotated(x):
    angles = torch.linspace(0, 3, x.shape[-1] // 2, dtype=x.dtype).repeat(2)
    a, b = x.chunk(2, -1)
    return (x * angles.cos()) + (torch.cat((-b, a), -1) * angles.sin())


def rewritten(x):
    """A result that is known as a function of x is written into afterwards."""
    y = x.pow(2).mean(-1, keepdim=True)
    y += 0.1
    return (2 * x) * torch.rsqrt(y)


FUNCTIONS = {
    "rms_norm": (rms_norm, ("pow", "mean", "add", "rsqrt", "mul")),
    "rms_norm_and_more": (rms_norm_and_more, ("sub", "square", "mean", "add", "sqrt", "div", "mul")),
    "gelu": (gelu, ("pow", "mul", "add", "tanh")),
    "swish": (swish, ("sigmoid", "mul")),
    "softmax": (softmax, ("sub", "exp", "sum", "div")),
    "rotated": (rotated, ("mul", "add")),
    "rewritten": (rewritten, ("pow", "mean", "add", "rsqrt", "mul")),
}


class Moved(TorchFunctionMode):
    """Adds a tensor of its own, of zeros, to each result of one operation."""

    def __init__(self, op):
        super().__init__()
        self.op, self.added = op, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        if func.__name__.strip("_").removeprefix("i") not in (self.op, f"r{self.op}", f"true_{self.op}", f"{self.op}_"):
            return y
        e = torch.zeros_like(y, requires_grad=True)
        self.added.append((e, _BFLOAT16.half_spacing(y)))
        return y + e


def worst(program, x, op, generator):
    """How far a row of the result moves in RMS, to first order, by roundings of one operation with the signs that move it most."""
    with Moved(op) as moved:
        y = program(x)
    largest, spaces = 0.0, [e for e, _ in moved.added]
    for row in range(len(y)):
        v = torch.randn(y[row].shape, generator=generator, dtype=y.dtype)
        for _ in range(4):
            v = v / v.norm()
            grads = torch.autograd.grad((y[row] * v).sum(), spaces, retain_graph=True, allow_unused=True)
            signs = [h * g.sign() for (_, h), g in zip(moved.added, grads, strict=True) if g is not None]
            reached = sum((g * s).sum().item() for g, s in zip((g for g in grads if g is not None), signs, strict=True))
            largest = max(largest, reached / math.sqrt(len(v)))
            v = _tangent(
                program,
                x,
                op,
                [torch.zeros_like(h) if g is None else h * g.sign() for (_, h), g in zip(moved.added, grads, strict=True)],
            )[row]
            if not v.norm() > 0:
                break
    return largest


def _tangent(program, x, op, moves):
    """The derivative of the result where results of the operation move so, by a small difference."""

    class By(Moved):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            before = len(self.added)
            y = super().__torch_function__(func, types, args, kwargs)
            return y + 1e-5 * moves[before] if len(self.added) > before else y

    with torch.no_grad(), By(op):
        moved = program(x)
    return (moved - program(x)) / 1e-5


def bound_of(program, x, precision):
    return norm_report(thunder.jit(program, transforms=[NormTransform()]), RMSTensor.of(x), precision=precision).precision.bound


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_signs_of_roundings_inside_exceed_their_bound(name):
    program, ops = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(seeded(4))
    x = torch.randn(3, 8, generator=generator, dtype=torch.float64) * 0.3
    for op in ops:
        found, bound = worst(program, x, op, generator), bound_of(program, x, {op: torch.bfloat16})
        assert 0 < found <= bound * (1 + 1e-9) < math.inf, op


class Causal(nn.Module):
    """Masked by the least number of float32, which is minus infinity in bfloat16."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(rms_norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-2, -1)
        hidden = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        scores = scores + torch.where(hidden, torch.finfo(torch.float32).min, 0.0).to(x.dtype)
        return F.softmax(scores.float(), dim=-1).to(v.dtype) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masks_that_become_infinite_arrive_by_nothing(dtype):
    x = torch.randn(2, 5, 8)
    report = norm_report(thunder.jit(Causal(), transforms=[NormTransform()]), RMSTensor.of(x), precision=dtype)
    (added,) = {r.rounding.added for r in report.rows if r.op == "add" and r.shape == (2, 5, 5)}
    assert added == math.inf
    assert report.precision.measured <= report.precision.bound < 100


def test_what_becomes_infinite_and_makes_a_difference_is_infinite():
    def returned(x):
        return x + torch.finfo(torch.float32).max

    def halved(x):
        return (x + torch.finfo(torch.float32).max) * 1e-38

    def all_masked(x):
        return torch.softmax(x + torch.finfo(torch.float32).min, -1)

    for program in (returned, halved, all_masked):
        assert bound_of(program, torch.randn(3, 4), torch.bfloat16) == math.inf


def test_infinity_that_is_not_a_number_later_is_typical_too():
    """A softmax of logits far apart has no derivative, and of two that are infinite it is NaN: predicted was no error at all."""
    x = torch.tensor([[1.0, 2.0, -3.0]])
    jm = thunder.jit(lambda x: torch.softmax(x * 1e5, -1), transforms=[NormTransform()])
    found = norm_report(jm, RMSTensor.of(x), precision=torch.float16).precision
    assert math.isnan(found.measured) and found.bound == found.typical == math.inf


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_output_is_sensitive_to_what_is_inside_of_what_one_rule_knows(name):
    """A report had 0 there: the whole moves with its input."""
    program, ops = FUNCTIONS[name]
    x = torch.randn(1, 8, generator=torch.Generator().manual_seed(seeded(4)), dtype=torch.float64)
    report = norm_report(thunder.jit(program, transforms=[NormTransform()]), RMSTensor.of(x))
    for op in ops:
        with Moved(op) as moved:
            (y,) = program(x)
        rows = [r for r in report.rows if r.op == op]
        for row, (e, _) in zip(rows, moved.added, strict=True):
            derivatives = (
                torch.autograd.grad(one, e, retain_graph=True, allow_unused=True, materialize_grads=True)[0] for one in y
            )
            jacobian = torch.stack([d[0] for d in derivatives])
            direction = torch.linalg.svd(jacobian)[2][0]
            moved, by = size_of(report.rows[-1], (jacobian @ direction)[None]), size_of(row, direction[None])
            assert 0 < moved <= by * row.sensitivity * (1 + 1e-9) < math.inf, op


def size_of(row, t):
    """In the norm of a row: of a softmax that is the sum of the absolute values."""
    return getattr(thunder_norm, row.kind).of(t, row.elem_dims).norm_size.item()


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4, 4)])
def test_roundings_of_running_statistics_arrive(shape):
    norm = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(3).double().eval()
    for t in (norm.running_mean, norm.bias):
        nn.init.normal_(t)
    nn.init.uniform_(norm.running_var, 0.1, 2.0)
    x = torch.randn(shape, dtype=torch.float64)
    report = norm_report(thunder.jit(norm, transforms=[NormTransform()]), RMSTensor.of(x), precision=torch.bfloat16)
    statistics = norm.running_mean, norm.running_var
    errors = [_BFLOAT16.half_spacing(t) for t in statistics]

    def moved(mean, var):
        return torch.nn.functional.batch_norm(x, mean, var, norm.weight, norm.bias, eps=norm.eps)

    with torch.no_grad():
        found = [torch.func.jvp(moved, statistics, t)[1].abs() for t in ((errors[0], 0 * errors[1]), (0 * errors[0], errors[1]))]
    (row,) = report.rows
    assert RMSTensor.of(sum(found), row.elem_dims).norm_size.item() <= row.rounding.arriving <= report.precision.bound < math.inf
    assert report.precision.measured <= report.precision.bound


def test_the_output_is_sensitive_to_what_comes_after_what_does_not_move():
    first, last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    report = norm_report(
        thunder.jit(lambda x: last(torch.sign(first(x)).tanh()), transforms=[NormTransform()]),
        RMSTensor.of(torch.ones(2, 4).double()),
    )
    sensitivities = {r.op: r.sensitivity for r in report.rows}
    assert sensitivities["tanh"] == pytest.approx(torch.linalg.matrix_norm(last.weight, 2).item(), rel=1e-6)
    assert report.rows[0].sensitivity == 0
    assert report.rows[-1].sensitivity == 1
