"""A tensor subclass of one's own, compiled: int8 weights for a classifier of handwritten digits.

Trains a small network on scikit-learn's digits, replaces its weights by `Int8Tensor`, and fine-tunes the biases around them, all
through `thunder.jit` with `SubclassTransform`: nothing in the class knows of Thunder.

    python examples/int8_weights.py [--steps 200]
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from thunder_norm.transforms import SubclassTransform
import thunder

aten = torch.ops.aten


class Int8Tensor(torch.Tensor):
    """A matrix [out, in] (or its transpose) as int8 numbers and one float scale per output."""

    data_: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Int8Tensor:
        # the class is a tensor of scale's dtype to everybody outside, whatever is inside
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, strides=data.stride(), dtype=scale.dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor):
        self.data_, self.scale = data, scale

    @classmethod
    def quantize(cls, weight: torch.Tensor) -> Int8Tensor:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def dequantize(self) -> torch.Tensor:
        return self.data_.to(self.scale.dtype) * self.scale

    def __repr__(self) -> str:
        return f"Int8Tensor(shape={list(self.shape)})"

    # How to take an instance apart and put it together again: all that a compiler needs to know.

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: None, size: torch.Size, stride: tuple) -> Int8Tensor:
        return cls(inner["data_"], inner["scale"])

    # What operations do, on the level of aten.

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.t.default, aten.clone.default):
            return cls(func(args[0].data_), func(args[0].scale))
        if func is aten.mm.default and isinstance(args[1], cls):  # x W^T: scale the outputs instead of the weights
            x, w = args
            if w.scale.shape[0] == 1:
                return torch.mm(x, w.data_.to(x.dtype)) * w.scale
            return torch.mm(x * w.scale.t(), w.data_.to(x.dtype))  # the gradient of x
        if func is aten.addmm.default:
            bias, x, w = args
            return torch.mm(x, w) + bias
        raise NotImplementedError(f"Int8Tensor has no {func}")


def accuracy(model, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def train(model, parameters, images, labels, steps: int) -> None:
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of the optimizer, each time")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train_set, test_set = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    train(model, model.parameters(), *train_set, steps)
    print(f"float32 weights:         accuracy {accuracy(model, *test_set):.3f}")

    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(Int8Tensor.quantize(layer.weight.detach()), requires_grad=False)
    inner = [t for p in model.parameters() if type(p) is Int8Tensor for t in (p.data_, p.scale)]
    print(
        f"their bytes:             {sum(4 * p.numel() for p in model.parameters() if type(p) is Int8Tensor)} -> {sum(t.nbytes for t in inner)}"
    )
    print(f"int8 weights:            accuracy {accuracy(model, *test_set):.3f}")

    jitted = thunder.jit(model, transforms=[SubclassTransform()])
    biases = [p for p in model.parameters() if p.requires_grad]
    train(jitted, biases, *train_set, steps)
    print(f"after training biases:   accuracy {accuracy(jitted, *test_set):.3f}")

    difference = (jitted(test_set[0]) - model(test_set[0])).abs().max()
    print(f"against eager:           largest difference {difference:.1e}")
    operations = [b for b in thunder.last_traces(jitted)[0].bound_symbols if b.sym.name.startswith("Int8Tensor.")]
    print(f"\nThe last layer in the trace:\n\n{operations[-1]}")


if __name__ == "__main__":
    main()
