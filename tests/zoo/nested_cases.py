"""Jagged nested tensors: sequences of several lengths in one tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nested import as_nested_tensor, nested_tensor_from_jagged

from .case import CONSTRUCTED, INPUT, RETURNED, SEVERAL, case


def jagged(*lengths: int, features: int = 4, requires_grad: bool = False) -> torch.Tensor:
    parts = [torch.randn(n, features) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=requires_grad)


def beside(x: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:
    """Other values at the offsets of `x`."""
    return nested_tensor_from_jagged(torch.randn_like(x.values()), x.offsets()).detach().requires_grad_(requires_grad)


def in_heads(x: torch.Tensor, heads: int = 2) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


@case("NestedTensor (jagged)", INPUT, RETURNED, backward=True)
def _():
    return lambda x: x.sin() * 2, (jagged(2, 3, requires_grad=True),)


@case("NestedTensor, several with the same offsets", INPUT, RETURNED, SEVERAL, backward=True)
def _():
    x = jagged(2, 3, requires_grad=True)
    return lambda x, y: (x * y + y).relu(), (x, beside(x, requires_grad=True))


@case("NestedTensor with a plain tensor for each sequence", INPUT, RETURNED, backward=True)
def _():
    return lambda x, p: x * p + 1, (jagged(2, 3), torch.randn(2, 1, 4, requires_grad=True))


@case("NestedTensor into an MLP", INPUT, RETURNED, backward=True)
def _():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    return model, (jagged(2, 3, requires_grad=True),)


@case("NestedTensor, norms over features", INPUT, RETURNED, backward=True)
def _():
    return lambda x: F.layer_norm(x, (4,)) + F.rms_norm(x, (4,)) * x.softmax(-1), (jagged(1, 4, requires_grad=True),)


@case("NestedTensor, softmax over the ragged dimension", INPUT, RETURNED, backward=True)
def _():
    return lambda x: x.softmax(1), (jagged(3, 1, 2, requires_grad=True),)


@case("NestedTensor, to_padded_tensor", INPUT, backward=True)
def _():
    return lambda x: (x * 2).to_padded_tensor(-1.0).sum(1), (jagged(2, 3, requires_grad=True),)


@case("NestedTensor, reductions", INPUT, RETURNED)
def _():
    return lambda x: (x.sum(1), x.mean(1), x.prod(1), x.amin(1), x.sum(-1), x.sum(), x.mean()), (jagged(2, 3),)


@case("NestedTensor, reductions with gradients", INPUT, RETURNED, backward=True)
def _():
    return lambda x: (x.amax(1) * x.amin(1) + x.sum()) * x.mean(), (jagged(2, 3, requires_grad=True),)


@case("NestedTensor, mean over features", INPUT, RETURNED, backward=True)
def _():
    return lambda x: x - x.mean(-1, keepdim=True), (jagged(2, 3, requires_grad=True),)


@case("NestedTensor, attention", INPUT, RETURNED)
def _():
    def f(x):
        q, k, v = (in_heads(x.narrow(-1, at, 4).contiguous()) for at in (0, 4, 8))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    return f, (jagged(2, 3, 1, features=12),)


@case("NestedTensor, attention to other lengths", INPUT, RETURNED, SEVERAL, backward=True)
def _():
    def f(x, y):
        return F.scaled_dot_product_attention(in_heads(x), in_heads(y), in_heads(y * 2), scale=0.3)

    return f, (jagged(2, 3, requires_grad=True), jagged(4, 1, requires_grad=True))


@case("NestedTensor, unbind", INPUT, backward=True)
def _():
    return lambda x: torch.cat([part.sin() * i for i, part in enumerate(x.unbind(), 1)]), (jagged(2, 3, requires_grad=True),)


@case("NestedTensor, indexed and narrowed", INPUT, RETURNED)
def _():
    return lambda x: (x[1] * 2, x.narrow(-1, 1, 2) * 2, x.chunk(2, 0)[0], *x.split(2, -1)), (jagged(2, 3),)


@case("NestedTensor, one sequence", INPUT, backward=True)
def _():
    return lambda x: x[1] * 2, (jagged(2, 3, requires_grad=True),)


@case("NestedTensor, views", INPUT, RETURNED, backward=True)
def _():
    def f(x):
        y = x.view(x.size(0), x.size(1), 2, 2)
        return torch.cat(
            [y.transpose(1, 2).sin().transpose(1, 2).flatten(2), x.unsqueeze(2).expand(-1, -1, 3, -1).flatten(2)], -1
        )

    return f, (jagged(2, 3, requires_grad=True),)


@case("NestedTensor, products", INPUT, RETURNED, backward=True)
def _():
    return lambda x, w: x.transpose(1, 2) @ (x @ w), (jagged(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True))


@case("NestedTensor, where and masked_fill", INPUT, RETURNED, backward=True)
def _():
    return lambda x: torch.where(x > 0, x, x * 2).masked_fill(x > 1, 0.0), (jagged(2, 3, requires_grad=True),)


@case("NestedTensor, in-place on an input", INPUT, RETURNED)
def _():
    return lambda x: x.mul_(2) + 1, (jagged(2, 3),)


@case("NestedTensor, the ragged length asked for", INPUT, RETURNED, SEVERAL)
def _():
    return lambda x, y: x * y if x.shape == y.shape else x.sum() * y, (jagged(2, 3), jagged(2, 3))


@case("NestedTensor with holes", INPUT, RETURNED, backward=True)
def _():
    values, offsets, lengths = torch.randn(6, 4), torch.tensor([0, 3, 6]), torch.tensor([2, 1])
    return lambda x: x.sin() * 2, (nested_tensor_from_jagged(values, offsets, lengths).detach().requires_grad_(),)


@case("NestedTensor with holes, filled and taken apart", INPUT, RETURNED)
def _():
    values, offsets, lengths = torch.randn(6, 4), torch.tensor([0, 3, 6]), torch.tensor([2, 1])
    return lambda x: (x.contiguous() * 2, *x.unbind()), (nested_tensor_from_jagged(values, offsets, lengths),)


@case("NestedTensor, embedding of indices", INPUT, RETURNED)
def _():
    indices = nested_tensor_from_jagged(torch.tensor([0, 2, 1, 4, 4]), torch.tensor([0, 2, 5]))
    return nn.Embedding(5, 3), (indices,)


@case("nested_tensor_from_jagged", CONSTRUCTED, RETURNED, backward=True)
def _():
    def f(values, offsets):
        return (nested_tensor_from_jagged(values, offsets).sin() * 2).softmax(-1)

    return f, (torch.randn(5, 4, requires_grad=True), torch.tensor([0, 2, 5]))


@case("nested_tensor_from_jagged of lengths", CONSTRUCTED)
def _():
    def f(values, lengths):
        return nested_tensor_from_jagged(values, lengths=lengths).amax(1)

    return f, (torch.randn(5, 4), torch.tensor([2, 3]))


@case("nested_tensor_from_jagged with the offsets of an input", INPUT, CONSTRUCTED, RETURNED, SEVERAL, backward=True)
def _():
    def f(x):
        return nested_tensor_from_jagged(x.values().exp(), x.offsets()) + x

    return f, (jagged(2, 3, requires_grad=True),)


@case("as_nested_tensor", CONSTRUCTED, RETURNED, backward=True)
def _():
    def f(a, b):
        return as_nested_tensor([a, b * 2], layout=torch.jagged).softmax(1)

    return f, (torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True))


@case("as_nested_tensor of the parts of another", INPUT, CONSTRUCTED, RETURNED, SEVERAL, backward=True)
def _():
    def f(x):
        return as_nested_tensor([part.cumsum(0) for part in x.unbind()], layout=torch.jagged)

    return f, (jagged(2, 3, requires_grad=True),)


@case("nested_tensor of numbers", CONSTRUCTED, RETURNED)
def _():
    return lambda a: torch.nested.nested_tensor([[1.0, 2.0], [3.0]], layout=torch.jagged) * a, (torch.tensor(2.0),)


@case("torch.nested.narrow", CONSTRUCTED, RETURNED)
def _():
    def f(x, start, length):
        return torch.nested.narrow(x, 1, start, length, layout=torch.jagged).exp()

    return f, (torch.randn(2, 5, 4), torch.tensor([0, 1]), torch.tensor([2, 3]))


@case("nested tensor of the strided layout", INPUT, forward_refusal="strided layout")
def _():
    return lambda x: x * 2, (torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)]),)


@case("torch.nested.masked_select", CONSTRUCTED, RETURNED)
def _():
    def f(x, mask):
        return torch.nested.masked_select(x, mask) * 2

    return f, (torch.randn(2, 3), torch.tensor([[True, False, True], [False, False, True]]))
