"""How programs on wrapper subclasses are compared with eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import ScaleTensor, assert_same, nested, two
from thunder_norm.transforms import SubclassTransform
import thunder


def jit(function: Callable, transform: type[SubclassTransform] = SubclassTransform, **options: Any) -> Callable:
    return thunder.jit(function, transforms=[transform()], **options)


def check(
    function: Callable, make: Callable[[], tuple], transform: type[SubclassTransform] = SubclassTransform, **kwargs: Any
) -> Any:
    """Compare two calls of the jitted function with eager, also in what they do to their arguments; returns the jitted function."""

    def inputs() -> tuple:
        torch.manual_seed(seeded(0))
        return make()

    expected_args = inputs()
    expected = function(*expected_args, **kwargs)
    jf = jit(function, transform)
    for _ in range(2):
        args = inputs()
        assert_same(jf(*args, **kwargs), expected)
        assert_same(args, expected_args)
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 1)
    return jf


def one() -> tuple:
    return (two(3, 4),)


def pair() -> tuple:
    return two(3, 4), two(3, 4)


def with_plain() -> tuple:
    return two(3, 4), torch.randn(3, 4)


OPERATIONS: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "two wrappers": (lambda x, y: x + y, pair),
    "alpha": (lambda x, y: torch.add(x, y, alpha=2), pair),
    "numbers": (lambda x: (x * 3, 2 + x, 1 - x, 1 / x, x / 2, x**2, x // 2, x % 2), one),
    "plain on the right": (lambda x, p: x * p, with_plain),
    "plain on the left": (lambda x, p: (p * x, p - x, p / x, p @ x.T), with_plain),
    "unary operators": (lambda x: (-x, +x, abs(x), ~(x > 0)), one),
    "comparisons": (lambda x, p: (x > 0, x <= p, p < x, x == x, x != p), with_plain),
    "method": (lambda x: x.relu().sum(-1, keepdim=True).exp(), one),
    "aten overload": (lambda x, y: torch.ops.aten.add.Tensor(x, y), pair),
    "aten packet": (lambda x, y: torch.ops.aten.mul(x, y), pair),
    "linear": (lambda x, w, b: F.linear(x, w, b), lambda: (two(3, 4), two(5, 4), two(5))),
    "linear with plain weight": (lambda x, w: F.linear(x, w), lambda: (two(3, 4), torch.randn(5, 4))),
    "linear with plain input": (lambda x, w: F.linear(x, w), lambda: (torch.randn(3, 4), two(5, 4))),
    "matmul": (lambda x, y: x @ y.t(), pair),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), pair),
    "addmm": (lambda x, y: torch.addmm(x[:, :3], x, y.T, beta=0.5, alpha=2.0), pair),
    "normalizations and activations": (lambda x: F.layer_norm(F.gelu(F.softmax(x, -1)), (4,)), one),
    "layer_norm with weight": (lambda x, w: F.layer_norm(x, (4,), w), lambda: (two(3, 4), torch.randn(4))),
    "convolution": (lambda x, w: F.conv1d(x, w, padding=1), lambda: (two(2, 3, 4), torch.randn(5, 3, 2))),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), lambda: (two(1, 3, 4),)),
    "cross entropy": (lambda x, t: F.cross_entropy(x, t), lambda: (two(3, 4), torch.tensor([0, 2, 1]))),
    "losses with a reduction": (lambda x, p: (F.mse_loss(x, p, reduction="sum"), F.l1_loss(x, p, reduction="none")), with_plain),
    "embedding": (lambda w, i: F.embedding(i, w), lambda: (two(5, 4), torch.tensor([[0, 4], [2, 2]]))),
    "pooling": (lambda x: F.max_pool1d(x[None], 2), one),
    "interpolate": (lambda x: F.interpolate(x[None], scale_factor=2.0), one),
    "dropout of nothing": (lambda x: F.dropout(F.dropout(x, 0.0), 0.5, training=False), one),
    "views": (lambda x: x.view(2, 6).t().T.reshape(-1)[1:5].unsqueeze(0).squeeze(0), one),
    "permute, flatten, expand": (lambda x: x.permute(1, 0).flatten().view(4, 1, 3).expand(4, 2, 3), one),
    "indexing": (lambda x: (x[0], x[..., 1], x[:, None, 1:3], x[torch.tensor([0, 2])], x[-1, -1]), one),
    "iteration": (lambda x: sum(row * 2 for row in x), one),
    "unpacking": (lambda x: (lambda a, b, c: a + b * c)(*x), one),
    "cat and stack": (lambda x, p: (torch.cat([x, p]), torch.stack((x, p, x), dim=1)), with_plain),
    "split and chunk": (lambda x: (torch.split(x, 2, dim=1), x.chunk(2, dim=1)[1], x.unbind(0)[2]), one),
    "structseq": (lambda x: (x.max(-1).values, x.max(dim=-1).indices, x.sort(-1)[0], x.topk(2).values), one),
    "cumulative": (lambda x: (x.cumsum(0), x.cumprod(1)), one),
    "reductions": (lambda x: (x.sum(), x.mean(0), x.amax(1), x.var(-1), x.norm(), x.prod(1), x.logsumexp(0)), one),
    "where": (lambda x, p: torch.where(p > x, x, p), with_plain),
    "masked_fill": (lambda x, p: x.masked_fill(p > 0, 2.0), with_plain),
    "scatter and gather": (
        lambda x, i: (x.gather(1, i), x.scatter(1, i, 1.0)),
        lambda: (two(3, 4), torch.tensor([[0], [1], [3]])),
    ),
    "casts": (lambda x: (x.to(torch.bfloat16).float(), x.double(), x.half().dtype), one),
    "cast to the dtype it has": (lambda x: x.to(torch.float32).contiguous() + 1, one),
    "factories like it": (lambda x: (torch.ones_like(x), torch.zeros_like(x) + x, torch.full_like(x, 2.0), x.new_ones(2)), one),
    "clone and detach": (lambda x: x.clone() + x.detach(), one),
    "unknown to Thunder": (lambda x: torch.special.bessel_j0(x), one),
    "linear algebra": (lambda x: (torch.linalg.svdvals(x), torch.linalg.inv(x[:3, :3])), one),
    "shared computation": (lambda x, y: (x @ y.T + (x @ y.T)) * (x @ y.T).sum(), pair),
    "nested": (lambda n: (n @ n + n, (n * 2).a, (n * 2).a.b), lambda: (nested(2, 2),)),
    "nested in another class": (
        lambda t: (t + 1, t.a, t.b.scale * 2),
        lambda: (TwoTensor(*(ScaleTensor(torch.randn(2, 2), torch.tensor(s)) for s in (2.0, 3.0))),),
    ),
    "checkpoint": (lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.sin() * 2, x, use_reentrant=False), one),
}
