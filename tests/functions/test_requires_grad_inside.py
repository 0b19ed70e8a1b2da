"""Histories that start in a program: ``y.requires_grad_()`` of what it made, ``torch.ones(3, requires_grad=True)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor, norm_report, normed
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


def made(x):
    y = torch.ones(4).requires_grad_()
    return x * 2, y * y, y.requires_grad, y.is_leaf, (y * 2).is_leaf, (x + y).requires_grad


def asked_for(x):
    y = torch.full((4,), 2.0, requires_grad=True)
    z = torch.zeros(4, requires_grad=True)
    return x * 2 + y, y.requires_grad, z


def leaf(x):
    y = torch.zeros(3)
    y.requires_grad_(True)
    return y, x.sin()


def from_a_plain_input(x):
    y = (x.a if isinstance(x, TwoTensor) else x).detach() * 2
    y.requires_grad_()
    with torch.no_grad():
        z = y * 3
    return y.sin(), z, (y.detach() * 2).requires_grad, y.requires_grad, y.is_leaf


def of_integers_no_more(x):
    y = torch.arange(4).float().requires_grad_()
    return (y > 1).float(), y.long(), y.exp() + x.detach()


def again(x):
    y = torch.ones(4).requires_grad_().requires_grad_()
    return (y + 1).requires_grad_() * x


def without_gradients_around(x):
    with torch.no_grad():
        y = (x * 2).sum() if not isinstance(x, TwoTensor) else torch.ones(())
    y.requires_grad_()
    return y.exp(), y.requires_grad


def set_as_an_attribute(x):
    y = (x.a if isinstance(x, TwoTensor) else x).detach() * 2
    y.requires_grad = True
    z = torch.ones(4)
    z.requires_grad = x.requires_grad
    return y.sin(), (z * 2).requires_grad, y.requires_grad, y.is_leaf


PROGRAMS = [made, asked_for, leaf, from_a_plain_input, of_integers_no_more, again, without_gradients_around, set_as_an_attribute]
INPUTS: dict[str, Callable] = {
    "plain": lambda: torch.randn(3, 4),
    "plain that requires grad": lambda: torch.randn(3, 4, requires_grad=True),
    "wrapper": lambda: TwoTensor(torch.randn(3, 4), torch.randn(3, 4)),
    "wrapper that requires grad": lambda: TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_(),
}


def told(program: Callable, make: Callable) -> list:
    """What results are and say, and the gradient of the input; they are gone backwards from twice where that is possible."""
    torch.manual_seed(seeded(0))
    x = make()
    results = [t for t in tree_leaves(program(x))]
    moving = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
    if moving:
        torch.autograd.backward(moving, [torch.ones_like(t.detach()) for t in moving])
    flags = [(t.requires_grad, t.is_leaf) if isinstance(t, torch.Tensor) else t for t in results]
    tensors = [getattr(t, "a", t).detach() for t in results if isinstance(t, torch.Tensor)]
    return [flags, tensors, None if x.grad is None else getattr(x.grad, "a", x.grad)]


@pytest.mark.parametrize(
    ("program", "name", "transform"),
    [
        (program, name, transform)
        for i, name in enumerate(INPUTS)
        for program, transform in crossed(PROGRAMS, [SubclassTransform, NormTransform][:: (-1) ** i])
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_results_have_the_histories_of_eager_mode(program: Callable, name: str, transform: type) -> None:
    jitted = thunder.jit(program, transforms=[transform()])
    expected = told(program, INPUTS[name])
    for _ in range(2):
        torch.testing.assert_close(told(jitted, INPUTS[name]), expected)


class Frozen(nn.Module):
    """Asks what its frozen embedding returns to require grad, as is done where activations are checkpointed."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4).requires_grad_(False)
        self.head = nn.Linear(4, 2).requires_grad_(not is_frozen)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).requires_grad_())


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("is_grad_enabled", [True, False])
def test_a_model_may_ask_its_frozen_embedding_to_require_grad(is_frozen: bool, is_grad_enabled: bool) -> None:
    torch.manual_seed(seeded(0))
    model, ids = Frozen(is_frozen), torch.tensor([0, 3])
    found = []
    for call in (thunder.jit(model, transforms=[SubclassTransform()]), model):
        model.zero_grad()
        with torch.set_grad_enabled(is_grad_enabled):
            result = call(ids)
        if result.requires_grad:
            result.sum().backward()
        found.append([result.requires_grad, result.is_leaf, result.detach(), [p.grad for p in model.parameters()]])
    torch.testing.assert_close(*found)


def returned_beside(x: torch.Tensor) -> Any:
    y = torch.ones(4).requires_grad_()
    return y, y * 2


def test_one_that_is_returned_beside_what_is_computed_from_it_is_refused() -> None:
    """Its gradients are not those that it would have."""
    with pytest.raises(UnsupportedOpError, match="is returned beside what is computed from it"):
        thunder.jit(returned_beside, transforms=[SubclassTransform()])(torch.randn(3, 4))


def test_wrappers_that_are_made_so_have_a_history() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x, requires_grad=True) * x

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    torch.testing.assert_close(told(jitted, INPUTS["wrapper"]), told(program, INPUTS["wrapper"]))


def test_integers_are_torch_s_error() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(4).requires_grad_()

    x = torch.randn(3, 4)
    for call in (program, thunder.jit(program, transforms=[SubclassTransform()])):
        with pytest.raises(RuntimeError, match="floating point dtype"):
            call(x)


class Asking(nn.Module):
    """What the feature encoders of wav2vec 2.0, HuBERT and WavLM do of waves in train mode, for checkpointed activations."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        h = waves[:, None]
        h.requires_grad = True
        return self.head(h)


def test_norms_of_what_is_asked_to_require_grad_are_those_of_the_tensor() -> None:
    torch.manual_seed(seeded(0))
    model, x = Asking(), torch.randn(3, 4)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    largest = torch.linalg.matrix_norm(model.head.weight, 2) * 2**0.5  # from RMS to RMS, of four entries to two
    for found in (jitted(RMSTensor.of(x)), normed(jitted)(x)):
        torch.testing.assert_close(found.backing, model(x))
        bound = RMSTensor.of(x).norm_size * largest + model.head.bias.square().mean().sqrt()
        torch.testing.assert_close(found.norm_size.float(), bound.float(), rtol=1e-4, atol=0)
    assert norm_report(jitted, x).rows[-1].tightness <= 1 + 1e-5
    assert ModularNorm(model, x).unreached == ()


def _asked(x):
    return x.requires_grad, x.is_leaf, (x * 2).requires_grad, x.detach().requires_grad, x[0].requires_grad


def into_what_it_made(x, y):
    z = x.clone()
    z.add_(y)
    return _asked(z)


def into_a_view(x, y):
    z = x.clone()
    v, w = z[0], z[1:]
    v.add_(y[0])
    return *_asked(z), v.requires_grad, w.requires_grad


def into_a_row_of_constants(x, y):
    z = torch.zeros(2, 2)
    z.t()[0].copy_(y)
    return *_asked(z), z.t().requires_grad


def into_an_input(x, y):
    x.add_(y)
    return _asked(x)


def without_history(x, y):
    z, d, w = x.clone(), x * 1, x * 2
    with torch.no_grad():
        z.mul_(y)
    z.detach().add_(y)
    d.data.add_(y.data)
    w.add_(y.detach())
    return *_asked(z), *_asked(d), *_asked(w)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("program", [into_what_it_made, into_a_view, into_a_row_of_constants, into_an_input, without_history])
def test_what_is_written_into_requires_grad_where_the_values_do(program: Callable, requires_grad: bool) -> None:
    given = [(torch.zeros(2), torch.ones(2, requires_grad=requires_grad)) for _ in range(2)]
    assert thunder.jit(program, transforms=[NormTransform()])(*given[0]) == program(*given[1])


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: (x * 2).fill_(3.0),
        lambda x: x.clone().zero_(),
        lambda x: (x * 2).copy_(torch.ones(2)),
        lambda x: (x * 3).copy_(torch.ones(2)) + x,
    ],
)
def test_what_is_overwritten_whole_has_a_gradient_of_zero(program: Callable, transform: type) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    found, expected = thunder.jit(program, transforms=[transform()])(x), program(x)
    assert found.requires_grad and torch.equal(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))


def _asked_of_a_view(x: torch.Tensor) -> tuple[Any, ...]:
    with torch.no_grad():
        view = x.view(-1)
    return x * 2, view.requires_grad


def _asked_of_what_is_computed_from_it(x: torch.Tensor) -> tuple[Any, ...]:
    made = x * 3
    with torch.no_grad():
        view = made[0]
    return x * 2, (view + 1).requires_grad


def _asked_of_what_is_no_view(x: torch.Tensor) -> tuple[Any, ...]:
    with torch.no_grad():
        made = (x * 3).view(-1)
        copied = x.view(-1) + 1
    detached = x.detach().view(-1)
    return x * 2, made.sin().requires_grad, copied.requires_grad, detached.requires_grad, copied.is_leaf


@pytest.mark.parametrize("program", [_asked_of_a_view, _asked_of_what_is_computed_from_it])
def test_whether_a_view_made_without_gradients_requires_grad_is_refused(program: Callable) -> None:
    """In eager mode it does, where its tensor does, and so does what is computed from it later."""
    x = torch.tensor([1.0, -2.0])
    assert program(x.requires_grad_())[1] is True
    with pytest.raises(UnsupportedOpError, match=r"made without gradients(.|\n)*at .*return x \* 2"):
        thunder.jit(program, transforms=[SubclassTransform()])(x)
    x = x.detach()
    assert thunder.jit(program, transforms=[SubclassTransform()])(x)[1] is program(x)[1]


def test_and_of_what_is_no_view_is_known() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    found = thunder.jit(_asked_of_what_is_no_view, transforms=[SubclassTransform()])(x)
    assert found[1:] == _asked_of_what_is_no_view(x)[1:]
