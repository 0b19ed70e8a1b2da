"""Hooks of the backward of modules, and nodes of torch's graph, of plain tensors: against eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, ProfileTransform, SplitBiasTransform, SubclassTransform
import thunder

TRANSFORMS = [NormTransform, SubclassTransform, SplitBiasTransform, CheckpointTransform, ProfileTransform]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x) * scale, self.b(y).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(seeded())
        self.first, self.both, self.norm = nn.Linear(3, 3), Both(), nn.LayerNorm(3)
        self.batch_norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        a, b = self.both(h, h * 2, scale=3.0)
        return self.last(self.norm(a) + self.batch_norm(b))


def scaled(by: float) -> Callable:
    return lambda module, inputs, outputs: tuple(None if g is None else g * by for g in inputs)


def several_inputs_and_outputs(model: Net) -> None:
    model.both.register_full_backward_hook(scaled(0.5))


def where_no_input_requires_grad(model: Net) -> None:
    model.first.register_full_backward_hook(lambda module, inputs, outputs: None)
    model.register_full_backward_hook(lambda module, inputs, outputs: None)


def before_the_backward(model: Net) -> None:
    model.first.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))
    model.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 5,))


def several_hooks(model: Net) -> None:
    model.both.register_full_backward_hook(scaled(2.0))
    model.both.register_full_backward_hook(lambda module, inputs, outputs: tuple(g + outputs[0].sum() for g in inputs))
    model.norm.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0].clamp(-0.1, 0.1),))


def modules_in_modules(model: Net) -> None:
    model.both.register_full_backward_hook(scaled(2.0))
    model.both.a.register_full_backward_hook(scaled(3.0))


def beside_hooks_of_the_forward(model: Net) -> None:
    model.norm.register_forward_hook(lambda module, inputs, output: output * 2)
    model.norm.register_full_backward_hook(scaled(2.0))


def by_an_attribute(model: Net) -> None:
    model.norm.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * model.factor,))


def the_old_way(model: Net) -> None:
    model.norm.register_backward_hook(lambda module, inputs, outputs: None)


HOOKED = [
    several_inputs_and_outputs,
    where_no_input_requires_grad,
    before_the_backward,
    several_hooks,
    modules_in_modules,
    beside_hooks_of_the_forward,
    by_an_attribute,
    the_old_way,
]


def found(call: Callable, model: Net) -> list[torch.Tensor]:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seeded(1)))
    values = []
    for model.factor in (2.0, 2.0, 4.0):
        model.zero_grad()
        y = call(x)
        y.pow(2).sum().backward()
        values += [y.detach(), *(p.grad for p in model.parameters())]
    with torch.no_grad():
        values.append(call(x))
    return values


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: t.__name__)
@pytest.mark.parametrize("hooked", HOOKED, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_hooks_of_the_backward_of_modules_are_eager_mode_s(hooked, transform):
    results = []
    for jit in (lambda m: m, lambda m: thunder.jit(m, transforms=[transform()])):
        model = Net()
        hooked(model)
        results.append(found(jit(model), model))
    torch.testing.assert_close(results[1], results[0])


def test_hooks_of_all_modules():
    def hook(module, inputs, outputs):
        return scaled(1.5)(module, inputs, outputs) if isinstance(module, nn.LayerNorm) else None

    handle = nn.modules.module.register_module_full_backward_hook(hook)
    try:
        model, other = Net(), Net()
        torch.testing.assert_close(found(thunder.jit(other, transforms=[NormTransform()]), other), found(model, model))
    finally:
        handle.remove()


def test_a_hook_that_keeps_what_it_is_given_or_raises_is_refused():
    model, kept, x = Net(), [], torch.ones(5, 3)
    handle = model.norm.register_full_backward_hook(lambda module, inputs, outputs: kept.append(outputs[0]))
    jitted = thunder.jit(model, transforms=[NormTransform()])
    with pytest.raises(UnsupportedOpError, match="a hook changes a list"):
        jitted(x).sum().backward()
    assert not kept
    handle.remove()

    def raising(module, inputs, outputs):
        raise ValueError("no gradient is good enough")

    model.norm.register_full_backward_hook(raising)
    with pytest.raises(UnsupportedOpError, match="a hook raises ValueError: no gradient is good enough"):
        jitted(x).sum().backward()


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: t.__name__)
def test_programs_ask_for_nodes(transform):
    def program(x, w):
        y, z = x * w, x.detach() + 1
        n = (y.grad_fn is not None) + 10 * (z.grad_fn is not None) + 100 * (w.grad_fn is None) + 1000 * (x.grad_fn is None)
        return y * n + len(y.grad_fn.name()) if y.grad_fn is not None else y * n

    jitted = thunder.jit(program, transforms=[transform()])
    x = torch.randn(3, generator=torch.Generator().manual_seed(seeded()))
    leaf = torch.ones(3, requires_grad=True)
    for w in (leaf, torch.ones(3), leaf):
        torch.testing.assert_close(jitted(x, w), program(x, w))
    with pytest.raises(UnsupportedOpError, match=r"\.grad_fn of a plain tensor"):  # whose graph the program does not see
        jitted(x, leaf * 1)
    with torch.no_grad():
        torch.testing.assert_close(jitted(x, leaf), program(x, leaf))


def test_the_node_of_an_input_that_was_written_into():
    def program(x, w):
        x.mul_(w)
        return x * (1 if x.grad_fn is None else 2)

    x, w = torch.full((3,), 3.0), torch.ones(3, requires_grad=True)
    jitted = thunder.jit(program, transforms=[NormTransform()])
    with pytest.raises(UnsupportedOpError, match=r"\.grad_fn of a plain tensor"):  # where eager mode has one
        jitted(x, w)
    torch.testing.assert_close(jitted(x.clone(), w.detach()), program(x.clone(), w.detach()))
