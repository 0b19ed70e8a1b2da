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


_FILLED: dict[str, Callable] = {
    "float16": lambda x: x * torch.full((3,), 0.1, dtype=torch.float16),
    "bfloat16, expanded": lambda x: x * torch.full((1,), 0.1, dtype=torch.bfloat16).expand(3),
    "float32": lambda x: x * torch.full((3,), 0.1),
    "a number as a tensor": lambda x: x * torch.tensor(0.1, dtype=torch.float16),
    "a sum that rounds": lambda x: (
        x * (torch.full((3,), 256.0, dtype=torch.bfloat16) + torch.full((3,), 1.0, dtype=torch.bfloat16))
    ),
    "a product that overflows": lambda x: x * (torch.full((3,), 1e30) * torch.full((3,), 1e30) / torch.full((3,), 1e35)),
    "uint8 of -1": lambda x: x + torch.full((3,), -1, dtype=torch.uint8),
    "uint8 of 300": lambda x: x + torch.full((3,), 300, dtype=torch.uint8),
    "float16 of 1e5": lambda x: x + torch.full((3,), 1e5, dtype=torch.float16),
    "minus zero and 0": lambda x: 1 / (x + 0),
    "0 and minus zero": lambda x: 1 / (0.0 + x),
    "minus zero and zeros": lambda x: 1 / (x + torch.zeros(3)),
    "minus zero and minus 0": lambda x: 1 / (x + -0.0),
    "minus zero less 0": lambda x: 1 / (x - 0.0),
    "minus zero less minus 0": lambda x: 1 / (x - -0.0),
}


@pytest.mark.parametrize("name", _FILLED)
def test_numbers_in_place_of_tensors_are_those_that_the_tensors_hold(name: str) -> None:
    """Rounded, wrapped or refused as the dtype has it, and 0 changes the sign of a zero as it does in torch."""
    f, x = _FILLED[name], torch.tensor([1.0, -0.0, 2.0], dtype=torch.float64)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "jvp": (lambda: T.jvp(f, (x,), (torch.ones_like(x),)), lambda: torch.func.jvp(f, (x,), (torch.ones_like(x),))),
        "vjp": (lambda: T.vjp(f, x)[0], lambda: f(x)),
        "vmap": (lambda: T.vmap(f)(x[None]), lambda: torch.func.vmap(f)(x[None])),
    }
    for ours, torchs in pairs.values():
        try:
            wanted = torchs()
        except RuntimeError as e:
            with pytest.raises(RuntimeError, match=str(e)):
                ours()
        else:
            torch.testing.assert_close(ours(), wanted, rtol=1e-14, atol=0, equal_nan=True)
