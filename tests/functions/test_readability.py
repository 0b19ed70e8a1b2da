"""Transformed programs read as one would write them: no more operations than torch's own tracer records, the user's names and lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import thunder_norm.transforms as T
from tests.transform_oracles import assert_same, float64
import thunder
from thunder.core.prims import PrimIDs

X, W, B = float64(5, 5), float64(7, 5), float64(7)

FUNCTIONS: dict[str, Callable] = {
    "sin": torch.sin,
    "polynomial": lambda x: x**3 + 2 * x,
    "x^T x": lambda x: x.t() @ x,
    "trace, sin, scale": lambda x: x.diagonal().sum().sin() * x,
    "mlp": lambda x: F.linear(torch.tanh(F.linear(x, W, B)), W.T),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "rms map": lambda x: x / x.square().mean(-1, keepdim=True).sqrt(),
    "x / norm": lambda x: x / x.norm(),
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "mean": torch.mean,
    "amax": lambda x: x.amax(-1),
    "mse": lambda x: F.mse_loss(x, W[:5]),
    "attention": lambda x: torch.softmax(x @ x.T / 2.0, -1) @ x,
}


def _operations(jitted: Callable) -> list[str]:
    bookkeeping = (PrimIDs.RETURN, PrimIDs.UNPACK_TRIVIAL)
    return [b.sym.name for b in thunder.last_traces(jitted)[0].bound_symbols if b.sym.id not in bookkeeping]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_more_operations_than_torch_s_tracer(name: str) -> None:
    f = FUNCTIONS[name]

    def pulled(transforms: Any) -> Callable:
        def program(x: torch.Tensor, ct: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, pullback = transforms.vjp(f, x)
            return out, pullback(ct)[0]

        return program

    ct = torch.ones_like(f(X)) * 0.5
    theirs, ours = pulled(torch.func), thunder.jit(pulled(T))
    assert_same(ours(X, ct), theirs(X, ct))
    recorded = [n for n in make_fx(theirs)(X, ct).graph.nodes if n.op == "call_function"]
    assert len(_operations(ours)) <= len(recorded)


def _text(transformed: Any) -> str:
    return str(thunder.last_traces(transformed)[0])


def test_sin_is_forward_and_cosine_times_cotangent() -> None:
    def program(x: torch.Tensor, ct: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, pullback = T.vjp(torch.sin, x)
        return out, pullback(ct)[0]

    jitted = thunder.jit(program)
    jitted(X, X)
    assert _operations(jitted) == ["sin", "cos", "mul"]


def test_the_gradient_of_a_sum_of_sines_is_the_cosine() -> None:
    gradient = T.grad(lambda x: torch.sin(x).sum())
    gradient(X)
    assert [line for line in _text(gradient).splitlines() if "=" in line and "#" not in line.split("=")[0]][-1].split("  #")[
        0
    ].split("= ")[1] == "ltorch.cos(x)"


def loss(params: dict, batch: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(batch @ params["first"])
    prediction = hidden @ params["second"]
    return prediction.square().sum()


def test_names_and_lines_are_the_user_s() -> None:
    gradient = T.grad(loss)
    gradient({"first": X, "second": W.T}, X)
    text = _text(gradient)
    for name in ("params_first", "params_second", "batch", "hidden", "prediction"):
        assert f"  {name} = " in text or f"  # {name}: " in text
    # each line of the user's function but its last stands above the forward, and again above the backward
    assert text.count('hidden = torch.tanh(batch @ params["first"])') == 2
    assert text.count('prediction = hidden @ params["second"]') == 2
    assert "prims.mul(" not in "\n".join(line for line in text.splitlines() if not line.strip().startswith("#"))
    for nothing in ("zeros", "ones", "shallow_copy(hidden", "* 1.0", "convert_element_type"):
        assert nothing not in "\n".join(line for line in text.splitlines() if not line.strip().startswith("#"))


def test_nothing_is_computed_twice() -> None:
    f = T.grad(lambda x: T.grad(lambda x: (x.sin() * x.cos()).sum())(x).sum())
    f(X)
    names = [b.sym.name for b in thunder.last_traces(f)[0].bound_symbols]
    assert names.count("sin") <= 1 and names.count("cos") <= 1
