"""What is written into ``x.data`` changes what a backward computes with, as in eager mode: autograd does not notice it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.seeds import crossed, seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.executors import inductor
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

HOW = {
    "SubclassTransform": lambda f: thunder.jit(f, transforms=[SubclassTransform()]),
    "NormTransform": lambda f: thunder.jit(f, transforms=[NormTransform()]),
    "inductor": lambda f: thunder.jit(f, transforms=[NormTransform()], executors=[inductor]),
}


def _after(x, w):
    y = x @ w
    w.data.mul_(3)
    return y


def _by_its_name(x, w):
    y = x @ w.data
    with torch.no_grad():
        w.mul_(3)
    return y


def _twice(x, w):
    y = x @ w
    w.data.mul_(3)
    y = y @ w
    w.data[0].add_(1)
    return y


def _through_views(x, w):
    y = F.linear(x, w.view(-1).view(3, 3)[:2])
    w.data[0] = 1.0
    return y


def _into_a_view(x, w):
    y = x @ w.t()
    w[1:].data.mul_(2)
    return y + w


def _into_what_is_squared(x, w):
    y = x * x
    x.data.mul_(2)
    return y @ w


def _before(x, w):
    x.data.mul_(2)
    with torch.no_grad():
        w.mul_(2)
    return (x * x) @ w


def _before_and_after(x, w):
    with torch.no_grad():
        w.mul_(2)
    y = x @ w
    w.data.copy_(x.detach())
    return y


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "f",
    [
        _after,
        _by_its_name,
        _twice,
        _through_views,
        _into_a_view,
        _into_what_is_squared,
        _before,
        _before_and_after,
    ],
)
def test_a_backward_computes_with_what_was_written_behind_its_back(f, requires_grad, how):
    def run(g):
        torch.manual_seed(seeded(0))
        x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=requires_grad)
        y = g(x, w)
        return y, torch.autograd.grad(y.square().sum(), [x, w][: 1 + requires_grad], allow_unused=True), x, w

    torch.testing.assert_close(run(HOW[how](f)), run(f))


def _made_and_read(x, w):
    y = x * 2
    z = y.sin()
    y.data.mul_(3)
    return z


def _made_and_multiplied(x, w):
    y = w * 2
    z = x @ y
    y.data.mul_(3)
    return z


def _the_result(x, w):
    z = x.exp()
    z.data.mul_(3)
    return z


def _its_data_read(x, w):
    y = w * 2
    z = x @ y.data
    y.mul_(3)
    return z


def _softmax_of_a_sum(x, w):
    z = (x + w).softmax(-1)
    z.data.mul_(3)
    return z


def _argument_of_linear(x, w):
    y = x + 1
    z = F.linear(y, w) + F.linear(y.tanh(), w.detach().requires_grad_(False))
    y.data.mul_(3)
    return z


@pytest.mark.parametrize(
    "f", [_made_and_read, _made_and_multiplied, _the_result, _its_data_read, _softmax_of_a_sum, _argument_of_linear]
)
def test_writing_into_the_data_of_what_is_computed_is_refused_where_a_backward_may_need_it(f):
    """Eager mode's gradients are others than those of the program without the write."""
    torch.manual_seed(seeded(0))
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    with pytest.raises(UnsupportedOpError, match=r"on the .data of what the program has computed(.|\n)*\.(data\.)?mul_\(3\)"):
        thunder.jit(f, transforms=[NormTransform()])(x, w)
    with torch.no_grad():
        torch.testing.assert_close(thunder.jit(f, transforms=[NormTransform()])(x, w), f(x, w))


MADE = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w,
    "bmm": lambda x, w: torch.bmm(x[None], w[None]).squeeze(0),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "a view of linear's": lambda x, w: F.linear(x, w).unsqueeze(-1).squeeze(-1).view(3, 3),
    "conv1d": lambda x, w: F.conv1d(x[None], w[..., None]).squeeze(0),
    "conv2d": lambda x, w: F.conv2d(x[None, :, :, None], w[..., None, None]).squeeze(0).squeeze(-1),
    "mul": lambda x, w: x * w,
    "div": lambda x, w: x / (w.square() + 1),
    "add": lambda x, w: x + 2 * w,
    "sub": lambda x, w: x - w,
    "neg": lambda x, w: -(x * w),
    "cat": lambda x, w: torch.cat([x, w], 1)[:, 1:4],
    "stack": lambda x, w: torch.stack([x, w]).sum(0),
    "embedding": lambda x, w: F.embedding(torch.tensor([0, 2, 2]), w) + x,
    "layer_norm": lambda x, w: F.layer_norm(x, (3,), w[0]),
}
WRITES = {
    "masked_fill_": lambda y: y.data.masked_fill_(torch.eye(3).roll(1, 0).bool(), -float("inf")),
    "mul_": lambda y: y.data.mul_(3),
    "a part": lambda y: y.data[1:].fill_(0.5),
}


@pytest.mark.parametrize(("made", "write"), crossed(MADE, WRITES))
def test_data_of_what_is_computed_may_be_written_into_where_no_backward_needs_it(made, write):
    """The attention of Tacotron 2: ``alignment.data.masked_fill_(mask, -float("inf"))``, and a softmax."""

    def f(x, w):
        y = MADE[made](x, w)
        z = y + 1 if made != "add" else 1
        WRITES[write](y)
        return y.softmax(-1) * (torch.where(z == z, z, 0) if made != "add" else 1)

    def run(g):
        torch.manual_seed(seeded(0))
        x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
        y = g(x, w)
        return y, torch.autograd.grad((y * torch.arange(9.0).view(3, 3)).sum(), (x, w), allow_unused=True)

    torch.testing.assert_close(run(thunder.jit(f, transforms=[NormTransform()])), run(f))


@pytest.mark.parametrize("write", [lambda v, r: v.copy_(r.sum() * 0.5), lambda v, r: v.copy_(r), lambda v, r: v[1:].copy_(r[0])])
def test_copies_are_broadcast(write):
    def f(x, r):
        v = torch.eye(3) + 1
        write(v, r)
        return x @ v

    def run(g):
        torch.manual_seed(seeded(0))
        x, r = torch.randn(3, 3, requires_grad=True), torch.randn(3, requires_grad=True)
        y = g(x, r)
        return y, torch.autograd.grad(y.square().sum(), (x, r))

    torch.testing.assert_close(run(thunder.jit(f, transforms=[NormTransform()])), run(f))
