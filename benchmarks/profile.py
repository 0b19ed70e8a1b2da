"""Profiles of models: time against torch's counter and against other profilers, and what each of them counts.

Weights are random and on the CPU for those who run the model, on the meta device for those who do not.  fvcore, ptflops and calflops
are timed where they are installed (``pip install -e ".[bench]"``).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import models, timing
from thunder_norm.transforms import profile
import thunder

PEER = "FlopCounterMode on meta"


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    rounds = max(3, options.rounds // 3)
    return [
        *_case(f"GPT-2, {options.gpt2_layers} layers, forward", models.gpt2(options.gpt2_layers), models.tokens(), rounds),
        *_case("ResNet-18, forward", resnet18(), torch.randn(2, 3, 224, 224), rounds),
    ]


def resnet18() -> nn.Module:
    """ResNet-18 from transformers: random weights."""
    from transformers import ResNetConfig, ResNetModel

    torch.manual_seed(0)
    return ResNetModel(ResNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")).eval()


class _Tensors(nn.Module):
    """A model of transformers as others expect it: tensors in, tensor out."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x, return_dict=False)[0]


def _case(case: str, model: nn.Module, x: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    real = _Tensors(model)
    candidates = {PEER: lambda: _torch_counter(real, x), **_ours(real, x), **_peers(real, x)}
    counted = {name: call() for name, call in candidates.items()}
    rows = timing.rows(case, timing.in_turns(candidates, rounds), PEER)
    for row in rows:
        row["flops"] = counted[row["candidate"]]
    return rows


def _ours(real: nn.Module, x: torch.Tensor) -> dict[str, Callable[[], int]]:
    jitted = thunder.jit(real)
    with torch.no_grad():
        thunder.compile_data(jitted).get_computation_and_inputs(x)  # acquired once
    return {
        "profile, eager program": lambda: profile(real, x, target="eager").flops,
        "profile, acquired trace": lambda: profile(jitted, x).flops,
    }


def _torch_counter(real: nn.Module, x: torch.Tensor) -> int:
    import copy

    on_meta = {id(t): t.to("meta") for t in (*real.parameters(), *real.buffers())}
    memo = {i: nn.Parameter(t, requires_grad=False) if t.is_floating_point() else t for i, t in on_meta.items()}
    model = copy.deepcopy(real, {**memo, **{id(b): on_meta[id(b)] for b in real.buffers()}})
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x.to("meta"))
    return counter.get_total_flops()


def peer_versions() -> dict[str, str]:
    """Which of the other profilers are installed."""
    return {name: importlib.metadata.version(name) for name in _PEERS if importlib.util.find_spec(name)}


def _peers(real: nn.Module, x: torch.Tensor) -> dict[str, Callable[[], int]]:
    return {name: (lambda call=_PEERS[name]: _quietly(call, real, x)) for name in peer_versions()}


def _quietly(call: Callable[[nn.Module, torch.Tensor], int], real: nn.Module, x: torch.Tensor) -> int:
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            return call(real, x)
    finally:
        logging.disable(logging.NOTSET)


def _fvcore(real: nn.Module, x: torch.Tensor) -> int:
    from fvcore.nn import FlopCountAnalysis  # pyright: ignore[reportMissingImports]

    return 2 * int(FlopCountAnalysis(real, x).unsupported_ops_warnings(False).uncalled_modules_warnings(False).total())


def _ptflops(real: nn.Module, x: torch.Tensor) -> int:
    from ptflops import get_model_complexity_info  # pyright: ignore[reportMissingImports]

    macs, _ = get_model_complexity_info(
        real,
        tuple(x.shape[1:]),
        input_constructor=lambda _: {"x": x},
        as_strings=False,
        print_per_layer_stat=False,
        backend="aten",
    )
    return 2 * int(macs)


def _calflops(real: nn.Module, x: torch.Tensor) -> int:
    from calflops import calculate_flops  # pyright: ignore[reportMissingImports]

    flops, _, _ = calculate_flops(real, kwargs={"x": x}, print_results=False, print_detailed=False, output_as_string=False)
    return int(flops)


_PEERS: dict[str, Callable[[nn.Module, torch.Tensor], int]] = {"fvcore": _fvcore, "ptflops": _ptflops, "calflops": _calflops}


def counts(rows: list[dict[str, Any]]) -> str:
    """What each candidate counted, as text."""
    lines = []
    for row in rows:
        peer = next(r["flops"] for r in rows if r["case"] == row["case"] and r["candidate"] == PEER)
        lines.append(f"{row['case']:<28}  {row['candidate']:<26}  {row['flops']:>16,}  {row['flops'] / peer - 1:+.2%}")
    return "\n".join(lines)
