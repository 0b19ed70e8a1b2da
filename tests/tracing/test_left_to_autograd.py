"""Programs that are one layer of torch's: eager mode's history, numbers and errors, and a node of ours wherever there is more to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.seeds import seeded
from thunder_norm.transforms import NormTransform
import thunder

Results = tuple[torch.Tensor, ...]


class _Program(nn.Module):
    """One recurrent layer, and what `call` does with it."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, torch.Tensor], Any]):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor) -> Results:
        found = self.call(self.layer, x)
        return found if isinstance(found, tuple) else (found,)


def _without_gradient(layer: nn.Module, name: str) -> nn.Module:
    layer.get_parameter(name).requires_grad_(False)
    return layer


def _detached(layer: Any, x: torch.Tensor) -> torch.Tensor:
    weights = [w.detach() if i == 0 else w for i, w in enumerate(layer._flat_weights)]
    zeros = x.new_zeros(1, x.shape[1], 4)
    return torch._VF.gru(x, zeros, weights, True, 1, 0.0, True, False, False)[0]


def _halves(layer: Any, x: torch.Tensor) -> Results:
    out, state = layer(x)
    return out, state.detach()


# The layer, and what the program does with it: left to torch's autograd as a whole.
LEFT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: _Program(nn.LSTM(4, 4, 2), lambda m, x: m(x)[0]),
    "LSTM, all results": lambda: _Program(nn.LSTM(4, 4, bidirectional=True), lambda m, x: (lambda y: (y[0], *y[1]))(m(x))),
    "GRU, batch first": lambda: _Program(nn.GRU(4, 4, batch_first=True), lambda m, x: m(x)),
    "RNN, a weight without gradient": lambda: _Program(_without_gradient(nn.RNN(4, 4), "weight_ih_l0"), lambda m, x: m(x)),
    "GRU, the last state": lambda: _Program(nn.GRU(4, 4), lambda m, x: m(x)[1]),
}
# There is more to it.
WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "a part of the result": lambda: _Program(nn.GRU(4, 4), lambda m, x: m(x)[0][-1]),
    "a product": lambda: _Program(nn.GRU(4, 4), lambda m, x: m(x * 2)[0]),
    "two layers": lambda: _Program(nn.GRU(4, 4), lambda m, x: m(m(x)[0])[0]),
    "a detached weight": lambda: _Program(nn.GRU(4, 4), _detached),
    "a detached state": lambda: _Program(nn.GRU(4, 4), _halves),
    "the input as well": lambda: _Program(nn.GRU(4, 4), lambda m, x: (m(x)[0], x)),
}


def _is_ours(results: Results) -> bool:
    return type(results[0].grad_fn).__name__.startswith("_Program")


def _trained(model: Callable, parameters: list[nn.Parameter], x: torch.Tensor) -> list[torch.Tensor | None]:
    """Results, and the gradients of parameters and input."""
    x = x.clone().requires_grad_()
    for p in parameters:
        p.grad = None
    results = model(x)
    sum((i + 1) * t.square().sum() for i, t in enumerate(results) if t.requires_grad).backward()
    return [*(t.detach() for t in results), x.grad, *(p.grad for p in parameters)]


@pytest.mark.parametrize("name", [*LEFT, *WRAPPED])
def test_a_layer_by_itself_has_torchs_history(name: str):
    """From the third call on: what the program is ready for is known then."""
    torch.manual_seed(seeded(0))
    model, x = (LEFT | WRAPPED)[name](), torch.randn(3, 3, 4)
    jitted, parameters = thunder.jit(model, transforms=[NormTransform()]), list(model.parameters())
    expected = _trained(model, parameters, x)
    for _ in range(4):
        assert_close(_trained(jitted, parameters, x), expected, rtol=0, atol=1e-6)
    assert _is_ours(jitted(x.requires_grad_())) == (name in WRAPPED)


def _ready(model: nn.Module, x: torch.Tensor) -> Callable:
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for _ in range(4):
        results = jitted(x)
    assert not _is_ours(results)
    return jitted


def test_derivatives_of_second_order_and_a_graph_that_is_kept():
    torch.manual_seed(seeded(1))
    model, x = LEFT["GRU, batch first"](), torch.randn(3, 3, 4, requires_grad=True)
    jitted = _ready(model, x)

    def curvature(f: Callable) -> list[torch.Tensor]:
        y = f(x)[0].sin().sum()
        y.backward(retain_graph=True, inputs=[x])
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return [g, *torch.autograd.grad(g.square().sum(), [x, *model.parameters()], allow_unused=True)]

    assert_close(curvature(jitted), curvature(model))


def test_what_is_written_over_before_the_backward_is_eagers_error():
    model, x = LEFT["LSTM"](), torch.randn(3, 3, 4)
    result = _ready(model, x)(x)[0].sum()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_other_states_of_the_process_have_programs_of_their_own():
    torch.manual_seed(seeded(2))
    model, x = LEFT["GRU, batch first"](), torch.randn(3, 3, 4)
    jitted = _ready(model, x)
    with torch.no_grad():
        assert not jitted(x)[0].requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert jitted(x)[0].dtype == model(x)[0].dtype
    model.requires_grad_(False)
    assert not jitted(x)[0].requires_grad
    model.requires_grad_(True)
    assert_close(jitted(x), model(x))
    assert jitted(x)[0].requires_grad
