"""Modules whose hooks write parameters before they run (pruning, weight and spectral norms of old), and hooks of the jitted module itself."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.testing._internal.two_tensor import TwoTensor

import thunder_norm  # noqa: F401 - before Thunder
from tests.seeds import seeded
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


def _old(function):
    """One of torch's former reparametrisations, without their warnings."""

    def apply(layer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return function(layer)

    apply.__name__ = function.__name__
    return apply


def pruned(layer):
    return prune.random_unstructured(layer, "weight", amount=0.5)


def pruned_twice(layer):
    return prune.l1_unstructured(prune.ln_structured(layer, "weight", amount=0.25, n=2, dim=0), "bias", amount=1)


def evaluated_spectral_norm(layer):
    return _old(nn.utils.spectral_norm)(layer).eval()


REWRITTEN = [pruned, pruned_twice, _old(nn.utils.weight_norm), evaluated_spectral_norm]


def _model(rewrite, is_root: bool) -> nn.Module:
    torch.manual_seed(seeded(0))
    layer = rewrite(nn.Linear(4, 4))
    return layer if is_root else nn.Sequential(layer, nn.ReLU())


def _train(program, model, make, steps: int = 3) -> list:
    optimizer, outputs = torch.optim.SGD(model.parameters(), lr=0.1), []
    torch.manual_seed(seeded(1))
    for _ in range(steps):
        y = program(make())
        y.square().sum().backward()
        for p in model.parameters():  # what the class says of the gradient of a plain parameter
            p.grad = p.grad.a if isinstance(p.grad, TwoTensor) else p.grad
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            outputs += [y.detach(), program(make())]
    return [t.a if isinstance(t, TwoTensor) else t for t in outputs]


def _plain() -> torch.Tensor:
    return torch.randn(3, 4)


def _two() -> TwoTensor:
    a = torch.randn(3, 4)
    return TwoTensor(a, a.clone())


@pytest.mark.parametrize(
    "rewrite, transform, make, is_root",
    [
        *((rewrite, SubclassTransform, make, True) for rewrite in REWRITTEN for make in (_plain, _two)),
        *((rewrite, NormTransform, _plain, True) for rewrite in REWRITTEN),
        (pruned, SubclassTransform, _two, False),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_training(rewrite, transform, make, is_root):
    """Results, with gradients and without, are eager mode's while an optimizer moves the parameters."""
    model = _model(rewrite, is_root)
    other = _model(rewrite, is_root)
    jitted = thunder.jit(model, transforms=[transform()])
    for found, expected in zip(_train(jitted, model, make), _train(other, other, make), strict=True):
        torch.testing.assert_close(found, expected)


def test_pruning_after_the_first_call():
    """Hooks that come and go are other programs."""
    layer = nn.Linear(4, 4)
    jitted = thunder.jit(layer, transforms=[SubclassTransform()])
    x = _plain()
    for change in (lambda: None, lambda: pruned(layer), lambda: prune.remove(layer, "weight")):
        change()
        torch.testing.assert_close(jitted(x), layer(x))


class _Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), 2.0

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("make", [_plain, _two], ids=lambda f: f.__name__)
def test_hooks_of_the_jitted_module(make):
    """Of the module that ``thunder.jit`` is given: what they hold is read, and guarded, where it stands."""

    class Scaled:
        factor = 2.0

        def __call__(self, module, args):
            return (args[0] * self.factor,)

    torch.manual_seed(seeded(0))
    model, hook = _Counted(), Scaled()
    model.register_forward_pre_hook(hook)
    model.register_forward_hook(lambda module, args, kwargs, output: output * module.factor, with_kwargs=True)
    jitted = thunder.jit(model, transforms=[SubclassTransform()])
    for factor in (2.0, 3.0):
        hook.factor = model.factor = factor
        x = make()
        found, expected = jitted(x), copy.copy(model)(x)
        for part in ("a", "b") if isinstance(x, TwoTensor) else ("data",):
            torch.testing.assert_close(getattr(found, part), getattr(expected, part))


def test_hooks_of_the_backward_of_the_jitted_module():
    """With wrappers, whose gradients they change."""
    torch.manual_seed(seeded(0))
    model = _Counted()
    model.register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 2 for g in inputs))
    gradients = []
    for program in (model, thunder.jit(model, transforms=[SubclassTransform()])):
        torch.manual_seed(seeded(1))
        x = _two().requires_grad_()
        program(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close((gradients[1].a, gradients[1].b), (gradients[0].a, gradients[0].b))


class _Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = nn.Parameter(torch.arange(3.0), requires_grad=False)

    def forward(self, x):
        self.kept *= -2.0
        torch.mul(self.kept, 0.5, out=self.kept)  # recorded, and so is the line before
        self.kept += 1
        return x * self.kept


def test_a_parameter_that_is_changed_in_place_stays_itself():
    eager, traced = _Kept(), _Kept()
    kept, jitted = traced.kept, thunder.jit(traced, transforms=[SubclassTransform()])
    for x in torch.eye(3):
        torch.testing.assert_close(jitted(x), eager(x))
        torch.testing.assert_close(traced.kept, eager.kept)
    assert traced.kept is kept
