"""The second, third and fourth call of a jitted program, with one thing changed before them: what eager gives, each time."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

OFFSET = 1.0


class Scaled(nn.Linear):
    """A layer of another class than `nn.Linear`, with the same parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Model(nn.Module):
    """Layers, a buffer, attributes, a global, and what the process has as its default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.between = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4, track_running_stats=True))
        self.last = nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))
        self.scale: Any = 2
        self.mask: Any = None
        self.names = ["a"]

    def forward(self, x: torch.Tensor, *rest: torch.Tensor, factor: Any = 1) -> Any:
        y = self.last(self.between(self.first(x))) * self.scale + self.shift * factor + OFFSET
        y = y + torch.ones(4).sum() + len(self.names) + torch.get_default_dtype().itemsize
        if self.mask is not None:
            y = y * self.mask
        for r in rest:
            y = y + r
        return y if torch.is_grad_enabled() else (y, y.mean())


class World:
    """A model, what it is called with, and what surrounds the call."""

    def __init__(self, wrap: Callable[[torch.Tensor], torch.Tensor]):
        self.wrap = wrap
        self.model = Model().eval()
        self.x = torch.randn(3, 4)
        self.rest: tuple[torch.Tensor, ...] = ()
        self.options: dict[str, Any] = {}
        self.surroundings: Callable[[], Any] = contextlib.nullcontext
        self.requires_grad = False

    def arguments(self) -> tuple[torch.Tensor, ...]:
        x = self.x.detach().clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
        return (self.wrap(x), *self.rest)

    def run(self, call: Callable, model: nn.Module) -> dict[str, Any]:
        """Results, gradients, and the buffers afterwards."""
        for p in model.parameters():
            p.grad = None
        args = self.arguments()
        with self.surroundings():
            result = call(*args, **self.options)
        tensors = result if isinstance(result, tuple) else (result,)
        total = sum(t.sum() for t in plain(tensors))
        if total.requires_grad:
            total.backward()
        gradients = [*plain([p.grad for p in model.parameters()]), *plain([args[0].grad])]
        return {"results": plain(tensors), "gradients": gradients, "buffers": list(model.buffers())}


def plain(tensors: Any) -> list[Any]:
    return [t.a if isinstance(t, TwoTensor) else t for t in tensors]


# -- what is changed ----------------------------------------------------------------------------------------------------------


def replaced_module(w: World) -> None:
    w.model.first = nn.Linear(4, 4, dtype=w.x.dtype).train(w.model.training)


def replaced_class(w: World) -> None:
    w.model.last = (Scaled if type(w.model.last) is nn.Linear else nn.Linear)(4, 4, dtype=w.x.dtype).train(w.model.training)


def replaced_activation(w: World) -> None:
    w.model.between[0] = random.choice([nn.GELU(), nn.Tanh(), nn.ReLU(), nn.LeakyReLU(0.3)])


def replaced_parameter(w: World) -> None:
    w.model.first.weight = nn.Parameter(torch.randn(4, 4, dtype=w.x.dtype))


def replaced_data(w: World) -> None:
    w.model.first.weight.data = torch.randn(4, 4, dtype=w.x.dtype)


def replaced_buffer(w: World) -> None:
    w.model.shift = torch.randn(4, dtype=w.x.dtype)


def frozen(w: World) -> None:
    p = w.model.last.weight
    p.requires_grad_(not p.requires_grad)


def without_bias(w: World) -> None:
    w.model.first.bias = None if w.model.first.bias is not None else nn.Parameter(torch.randn(4, dtype=w.x.dtype))


def tied(w: World) -> None:
    w.model.last.weight = w.model.first.weight


def a_hook(w: World) -> None:
    if w.model.first._forward_hooks:
        w.model.first._forward_hooks.clear()
    else:
        w.model.first.register_forward_hook(lambda module, args, output: output * 3)


def own_forward(w: World) -> None:
    if "forward" in vars(w.model.between):
        del w.model.between.forward
    else:
        w.model.between.forward = lambda x: x.sin()


def other_dtype(w: World) -> None:
    dtype = torch.float64 if w.x.dtype == torch.float32 else torch.float32
    w.model.to(dtype)
    w.x, w.rest = w.x.to(dtype), tuple(r.to(dtype) for r in w.rest)


def other_shape(w: World) -> None:
    w.x = torch.randn(w.x.shape[0] % 4 + 2, 4, dtype=w.x.dtype)


def other_strides(w: World) -> None:
    w.x = torch.randn(4, w.x.shape[0], dtype=w.x.dtype).t()


def other_attribute(w: World) -> None:
    w.model.scale = random.choice([3, 2.5, True, torch.tensor(1.5, dtype=w.x.dtype)])


def other_mask(w: World) -> None:
    w.model.mask = None if w.model.mask is not None else (torch.rand(4) > 0.5)


def longer_list(w: World) -> None:
    w.model.names.append("b")


def other_global(w: World) -> None:
    global OFFSET
    OFFSET = random.choice([0.5, 2, 3.0])


def other_default(w: World) -> None:
    torch.set_default_dtype(torch.float64 if torch.get_default_dtype() == torch.float32 else torch.float32)


def other_option(w: World) -> None:
    w.options = random.choice([{}, {"factor": 2}, {"factor": 0.5}, {"factor": True}])


def more_arguments(w: World) -> None:
    w.rest = () if w.rest else (torch.randn(4, dtype=w.x.dtype), torch.randn(1, dtype=w.x.dtype))


def one_tensor_twice(w: World) -> None:
    t = torch.randn(4, dtype=w.x.dtype)
    w.rest = (t, t)


def needs_grad(w: World) -> None:
    w.requires_grad = not w.requires_grad


def other_surroundings(w: World) -> None:
    w.surroundings = random.choice([contextlib.nullcontext, torch.no_grad, torch.inference_mode])


def in_training(w: World) -> None:
    w.model.train(not w.model.training)


def conjugate_or_negative(w: World) -> None:
    w.rest = (torch._neg_view(torch.randn(4, dtype=w.x.dtype)),)


CHANGES = (
    replaced_module, replaced_class, replaced_activation, replaced_parameter, replaced_data, replaced_buffer, frozen, without_bias,
    tied, a_hook, own_forward, other_dtype, other_shape, other_strides, other_attribute, other_mask, longer_list, other_global,
    other_default, other_option, more_arguments, one_tensor_twice, needs_grad, other_surroundings, in_training,
    conjugate_or_negative,
)  # fmt: skip


@pytest.fixture(autouse=True)
def as_it_was():
    global OFFSET
    yield
    OFFSET = 1.0
    torch.set_default_dtype(torch.float32)


def two_tensor(x: torch.Tensor) -> torch.Tensor:
    return TwoTensor(x.detach(), x.detach() * 2).requires_grad_(x.requires_grad)


SUBJECTS = {
    "plain module": (NormTransform, lambda x: x, False),
    "plain function": (SubclassTransform, lambda x: x, True),
    "wrapper": (SubclassTransform, two_tensor, False),
}


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("subject", SUBJECTS)
def test_one_change_after_the_other(subject: str, part: int):
    """All of them in some order: three calls after each, of which the last is the short one."""
    rng = random.Random(seeded(17))
    changes = rng.sample(CHANGES, len(CHANGES))[part::2]
    transform, wrap, is_function = SUBJECTS[subject]
    random.seed(seeded(1))
    w = World(wrap)
    model = w.model
    jitted = thunder.jit((lambda *args, **kwargs: model(*args, **kwargs)) if is_function else model, transforms=[transform()])
    for n, change in enumerate([None, *changes]):
        if change is not None:
            change(w)
        for call in range(3):
            expected = w.run(own := copy.deepcopy(w.model), own)
            found = w.run(jitted, w.model)
            where = f"in call {call} after {', '.join(c.__name__ for c in changes[:n])}"
            for key, values in expected.items():
                torch.testing.assert_close(
                    found[key], values, rtol=1e-4, atol=1e-4, msg=lambda m, k=key, w=where: f"{k} {w}: {m}"
                )
