"""What norms cost: norm maps (norms alone) and normed mode (norms beside the real tensors).

Peers in the same process: the same norms written by hand as a loop over 0-dim tensors, which is a lower bound on what torch's
own operations can do, the same rules in plain PyTorch, without Thunder, and torch's autograd alone: a function that takes the same
sizes, reads each of them and computes nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import models, timing
from thunder_norm import LinfTensor, NormedTensor, NormVector, RMSTensor, RMSToRMSTensor, build_norm_map, normed
from thunder_norm.transforms import NormTransform
import thunder

HAND, EAGER, MAP, MODE, REAL = "by hand in torch", "rules, plain PyTorch", "norm map", "normed mode", "thunder.jit, no norms"
ONE_VECTOR, VECTOR = "norm map, sizes from one vector", "norm map, NormVector"
AUTOGRAD, VECTOR_AUTOGRAD = "autograd alone", "autograd alone, one vector"


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    found = []
    for depth in options.depths:
        found += _stack(depth, options.rounds)
    return found + _gpt2(options.gpt2_layers, options.rounds)


def _cases(
    what: str, forwards: Mapping[str, Callable[[], torch.Tensor]], peer: str, operations: int, rounds: int
) -> list[dict[str, Any]]:
    """`forwards` give norm sizes: timed alone and with the backward pass."""
    forward = timing.in_turns(forwards, rounds)
    both = timing.in_turns({name: lambda f=f: f().backward() for name, f in forwards.items()}, rounds)
    return [
        *timing.rows(f"{what}: forward", forward, peer, operations=operations),
        *timing.rows(f"{what}: forward and backward", both, peer, operations=operations),
    ]


def _stack(depth: int, rounds: int) -> list[dict[str, Any]]:
    model, given = models.mlp(depth), given_norms(models.mlp(depth))
    x = torch.randn(16, 64)
    size = RMSTensor(2.0)
    layers = [(given[f"{2 * i}.weight"], given[f"{2 * i}.bias"]) for i in range(depth)]

    def by_hand() -> torch.Tensor:
        n = size.norm_size
        for weight, bias in layers:
            n = n * weight.norm_size + bias.norm_size
        return n

    vector = torch.full((len(given),), 1.01, dtype=torch.float64, requires_grad=True)

    def from_one_vector() -> torch.Tensor:
        return norm_map(size, normed_state_dict=dict(zip(given, vector.unbind(), strict=True))).norm_size

    norm_map = build_norm_map(model, x)
    maps = {
        HAND: by_hand,
        MAP: lambda: norm_map(size, normed_state_dict=given).norm_size,
        ONE_VECTOR: from_one_vector,
        VECTOR: _of_vector(norm_map, given, size),
    }
    check_equal(maps)
    maps |= {
        AUTOGRAD: lambda: _Nothing.apply(*(v.norm_size for v in given.values())),
        VECTOR_AUTOGRAD: lambda: _Nothing.apply(vector),
    }

    full = RMSTensor(2.0, backing=x)
    real_layers = [
        (_with_backing(w, model[2 * i].weight), _with_backing(b, model[2 * i].bias)) for i, (w, b) in enumerate(layers)
    ]
    jitted = thunder.jit(model, transforms=[NormTransform(parameters=given)])
    real = thunder.jit(model)
    modes = {
        EAGER: lambda: _eager(full, real_layers).norm_size,
        MODE: lambda: jitted(full).norm_size,
        REAL: lambda: real(x).sum(),
    }
    check_equal({HAND: by_hand, EAGER: modes[EAGER], MODE: modes[MODE]})
    operations = 2 * depth
    return [
        *_cases(f"norm map, depth {depth}", maps, HAND, operations, rounds),
        *_cases(f"normed mode, depth {depth}", modes, REAL, operations, max(3, rounds // 2)),
    ]


class _Nothing(torch.autograd.Function):
    """What torch itself does for a function of these tensors: they are read, and have gradients, which are 1."""

    @staticmethod
    def forward(ctx: Any, *sizes: torch.Tensor) -> torch.Tensor:
        ctx.values = [t.tolist() for t in sizes]
        return torch.ones((), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(ctx.values) > 1:
            return torch.ones(len(ctx.values), dtype=torch.float64).unbind()
        return (torch.ones(len(ctx.values[0]), dtype=torch.float64),)


def _of_vector(norm_map: Callable, given: Mapping[str, NormedTensor], *args: Any, **kwargs: Any) -> Callable[[], torch.Tensor]:
    """The call of a norm map with the sizes in one tensor."""
    alike = {name: type(v)(v.norm_size.item(), elem_dims=v.elem_dims) for name, v in given.items()}
    norms = NormVector(alike, requires_grad=True)

    def size() -> torch.Tensor:
        y = norm_map(*args, normed_state_dict=norms, **kwargs)
        return getattr(y, "logits", y).norm_size

    return size


def _with_backing(size: NormedTensor, backing: torch.Tensor) -> NormedTensor:
    return size.finalize(backing.detach())


def _eager(x: Any, layers: list[tuple[NormedTensor, NormedTensor]]) -> Any:
    for weight, bias in layers:
        x = F.relu(F.linear(x, weight, bias))
    return x


def check_equal(norms: Mapping[str, Callable[[], torch.Tensor]]) -> None:
    """The same norm is timed.

    Raises:
        AssertionError: two ways of computing it differ.
    """
    values = {name: f().item() for name, f in norms.items()}
    first = next(iter(values.values()))
    if any(abs(v - first) > 1e-9 * abs(first) for v in values.values()):
        raise AssertionError(f"different norms: {values}")


def _gpt2(layers: int, rounds: int) -> list[dict[str, Any]]:
    model, ids = models.gpt2(layers), models.tokens()
    given = given_norms(model)
    what = f"GPT-2, {layers} layers"

    norm_map = build_norm_map(model, input_ids=ids)
    started = time.perf_counter()
    norm_map(input_ids=ids, normed_state_dict=given)
    built = time.perf_counter() - started

    def map_size() -> torch.Tensor:
        return norm_map(input_ids=ids, normed_state_dict=given).logits.norm_size

    jitted = thunder.jit(model, transforms=[NormTransform(parameters=given)])
    run_normed, real = normed(jitted), thunder.jit(model)
    run_normed(ids)
    operations = count_operations(thunder.last_traces(jitted)[0])
    modes = {MODE: lambda: run_normed(ids).logits.norm_size}
    peer = MODE
    with contextlib.suppress(
        AssertionError
    ):  # Thunder's, of transformers 5: our own hooks are what follows that, not Thunder alone
        real(ids)
        modes[REAL], peer = lambda: real(ids).logits.sum(), REAL
    maps = {MAP: map_size, VECTOR: _of_vector(norm_map, given, input_ids=ids)}
    check_equal({**maps, MODE: modes[MODE]})
    return [
        *timing.rows(f"norm map, {what}: first call", timing.Measured({MAP: [built]}), MAP),
        *_cases(f"norm map, {what}", maps, MAP, operations, rounds),
        *_cases(f"normed mode, {what}", modes, peer, operations, max(3, rounds // 2)),
    ]


def count_operations(trace: Any) -> int:
    """Operations of the user's program that carry a norm: one composite each, beside those that measure parameters."""
    composites = [b.sym.name for b in trace.bound_symbols if type(b.sym.id).__name__ == "OperationId"]
    return sum(1 for name in composites if not name.endswith(".of"))


# -- norms of parameters ------------------------------------------------------------------------------------------------------


def given_norms(model: nn.Module) -> dict[str, NormedTensor]:
    """A norm that requires grad for each parameter, in the kind the rules for `models.mlp` and `models.gpt2` take it for."""
    return {name: _given(name, parameter) for name, parameter in model.named_parameters()}


def _given(name: str, parameter: torch.Tensor) -> NormedTensor:
    if "wte" in name or "wpe" in name or name.endswith("bias"):
        return RMSTensor(1.01, norm_size_requires_grad=True)
    if parameter.ndim == 1:
        return LinfTensor(1.01, norm_size_requires_grad=True)
    in_last = not name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))  # transformers' Conv1D is [in, out]
    return RMSToRMSTensor(1.01, elem_dims=(-2, -1) if in_last else (-1, -2), norm_size_requires_grad=True)
