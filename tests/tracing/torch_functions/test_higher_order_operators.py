"""Torch's operators that take functions: beside what torch computes for them in eager mode, or the loops that they stand for."""

import itertools

import pytest
import torch
from torch._higher_order_ops import associative_scan, while_loop
from torch._higher_order_ops import map as mapped
from torch._higher_order_ops import scan as scanned
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor
from thunder_norm.errors import DataDependentError
from thunder_norm.transforms import NormTransform, SubclassTransform, grad, vmap
import thunder

torch.manual_seed(seeded(0))
_W = torch.randn(4, 4)
_BIAS = torch.randn(3, 15)
_MASK = create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)


def _scan(step, carry, xs, dim=0, reverse=False):
    """The loop, returning what is carried and the stacked results."""
    rows = []
    for x in reversed(xs.unbind(dim)) if reverse else xs.unbind(dim):
        carry, row = step(carry, x)
        rows.append(row)
    return carry, torch.stack(rows[::-1] if reverse else rows)


def _step(carry, x):
    return (carry @ _W.t() * 0.1 + x).tanh(), carry * x


# the operator, and what it stands for
_LOOPS = {
    "cond of a number": (lambda x: torch.cond(x.shape[0] > 2, torch.sin, torch.cos, (x,)), torch.sin),
    "map": (lambda x: mapped(lambda row: row.sin() @ _W, x), lambda x: x.sin() @ _W),
    "map of a dict": (lambda x: mapped(lambda d, k: d["x"].sin() * k, {"x": x, "y": x}, 3 * x[0]), lambda x: x.sin() * 3 * x[0]),
    "scan": (lambda x: scanned(_step, x[0] * 1, x)[1], lambda x: _scan(_step, x[0], x)[1]),
    "scan's carry": (lambda x: scanned(_step, x[0] * 1, x)[0], lambda x: _scan(_step, x[0], x)[0]),
    "scan, reversed": (lambda x: scanned(_step, x[0] * 1, x, reverse=True)[1], lambda x: _scan(_step, x[0], x, reverse=True)[1]),
    "associative_scan": (lambda x: associative_scan(torch.mul, x, 0, combine_mode="generic"), lambda x: x.cumprod(0)),
    "while_loop": (
        lambda x: while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin() * 2), (torch.tensor(0), x))[1],
        lambda x: ((x.sin() * 2).sin() * 2).sin() * 2,
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"), [*crossed(_LOOPS, ["normed", "plain", "wrapper"]), *itertools.product(_LOOPS, ["grad", "vmap"])]
)
def test_loops(name, kind):
    operator, loop = _LOOPS[name]
    torch.manual_seed(seeded(1))
    x = torch.randn(3, 4)
    if kind == "grad":
        jf = thunder.jit(grad(lambda x: operator(x).sum()), transforms=[SubclassTransform()])
        torch.testing.assert_close(jf(x), torch.func.grad(lambda x: loop(x).sum())(x))
        return
    if kind == "vmap":
        rows = torch.stack([x, 2 * x])
        jf = thunder.jit(vmap(operator), transforms=[SubclassTransform()])
        torch.testing.assert_close(jf(rows), torch.stack([loop(x), loop(2 * x)]))
        return
    jf = thunder.jit(operator, transforms=[NormTransform() if kind == "normed" else SubclassTransform()])
    given = TwoTensor(x, x + 1) if kind == "wrapper" else x
    results = [f(given.clone().requires_grad_(kind != "wrapper")) for f in (jf, loop)]
    torch.testing.assert_close(*(r.b if kind == "wrapper" else r for r in results))


@pytest.mark.parametrize(
    "name", [name for name in _LOOPS if name != "associative_scan"]
)  # by vmap, under which norms are refused
def test_norms_are_those_of_the_loops(name):
    x = RMSTensor(1.0, backing=torch.randn(3, 4))
    norms = [thunder.jit(f, transforms=[NormTransform()])(x).norm_size for f in _LOOPS[name]]
    if name.startswith("map"):
        return torch.testing.assert_close(*(torch.as_tensor(n) for n in norms), rtol=0.5, atol=0)  # of rows, and of all at once
    torch.testing.assert_close(*norms)


def test_conditions_of_tensors():
    def program(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    for transform, of in ((NormTransform, lambda x: x), (SubclassTransform, lambda x: TwoTensor(x, x))):
        jf = thunder.jit(program, transforms=[transform()])
        for x in (torch.ones(3), -torch.ones(3)):
            result = jf(of(x))
            torch.testing.assert_close(
                result if result.__class__ is torch.Tensor else result.a, x.sin() if x.sum() > 0 else x.cos()
            )
    with pytest.raises(DataDependentError, match="condition"):
        thunder.jit(grad(lambda x: program(x).sum()), transforms=[SubclassTransform()])(torch.ones(3))


def _attention(q, k, v, score=lambda s, h, i, j: s, mask=lambda i, j: i == i, scale=0.5):
    """Written out in float64: weights are exp(score) over their sum where the mask says so, rows without any are 0."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    h, i, j = torch.arange(q.shape[1])[:, None, None], torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    weights = score(q @ k.transpose(-2, -1) * scale, h, i, j).exp() * mask(i, j)
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)) @ v


_ATTENTION = {
    "plain": (lambda q: flex_attention(q, q, q), lambda q: _attention(q, q, q)),
    "bias": (
        lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + _BIAS[h, i - j + 7]),
        lambda q: _attention(q, q, q, score=lambda s, h, i, j: s + _BIAS[h, i - j + 7]),
    ),
    "causal scores": (
        lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf"))),
        lambda q: _attention(q, q, q, mask=lambda i, j: i >= j),
    ),
    "block mask": (lambda q: flex_attention(q, q, q, block_mask=_MASK), lambda q: _attention(q, q, q, mask=lambda i, j: i >= j)),
    "grouped queries": (
        lambda q: flex_attention(q, q[:, :1], q[:, :1], scale=0.3, enable_gqa=True),
        lambda q: _attention(q, q[:, :1], q[:, :1], scale=0.3),
    ),
    "compiled": (lambda q: torch.compile(flex_attention)(q, q, q), lambda q: _attention(q, q, q)),
}


@pytest.mark.parametrize("name", list(_ATTENTION))
def test_flex_attention(name):
    flex, written = _ATTENTION[name]
    torch.manual_seed(seeded(2))
    q = torch.randn(2, 3, 8, 4)
    torch.testing.assert_close(thunder.jit(flex, transforms=[NormTransform()])(q), written(q).float())
    gradient = thunder.jit(grad(lambda q: flex(q).square().sum()), transforms=[SubclassTransform()])(q)
    moving = q.clone().requires_grad_()
    thunder.jit(flex, transforms=[NormTransform()])(moving).square().sum().backward()
    expected = torch.func.grad(lambda q: written(q).square().sum())(q.double()).float()
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(moving.grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["plain", "block mask", "grouped queries"])
def test_norms_of_flex_attention(name):
    """Weights of attention are averages, so that rows stay within the largest of the values."""
    q = torch.randn(2, 3, 8, 4)
    x = RMSTensor.of(q)
    torch.testing.assert_close(thunder.jit(_ATTENTION[name][0], transforms=[NormTransform()])(x).norm_size, x.norm_size)
