"""Calls of core ATen operations: those that torch's operator database makes, and edge cases it lacks."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import torch
from op_coverage import LARGEST, Case
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

SAMPLES = 6
PER_OVERLOAD = 8


@functools.cache
def core_overloads() -> tuple[torch._ops.OpOverload, ...]:
    """Torch's core opset, without the variants that write into a given tensor."""
    found = {}
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for overload in packet.overloads():
                func = getattr(packet, overload)
                if torch.Tag.core in func.tags and not func._schema.is_mutable:
                    found[str(func)] = func
    return tuple(found.values())


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[torch._ops.OpOverload, dict[Any, Case]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
        if torch.Tag.core in func.tags and tensors and sum(t.numel() for t in tensors) <= LARGEST:
            # of calls that differ in sizes only, one is enough
            key = (*((v.dtype, v.ndim, v.numel() == 0) if isinstance(v, torch.Tensor) else str(v) for v in leaves), str(spec))
            known = self.found.setdefault(func, {})
            if key not in known and len(known) < PER_OVERLOAD * 8:
                copies = tuple(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in leaves)
                known[key] = Case(str(func), func, copies, spec)
        return func(*args, **(kwargs or {}))


@functools.cache
def calls() -> dict[torch._ops.OpOverload, list[Case]]:
    """For each core overload, calls that the operator database makes with float32 and int64 samples, evenly chosen."""
    mode = _Calls()
    for op, dtype in itertools.product(op_db, (torch.float32, torch.int64)):
        if not op.supports_dtype(dtype, "cpu") or op.name.startswith("sparse"):
            continue
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES):
                try:
                    with mode:
                        op.op(sample.input, *sample.args, **sample.kwargs)
                except Exception:  # noqa: BLE001 - not every sample runs under a mode
                    continue
    return {func: _spread(list(found.values())) for func, found in mode.found.items()}


def _spread(several: list[Case]) -> list[Case]:
    step = max(1, len(several) / PER_OVERLOAD)
    return [several[int(i * step)] for i in range(min(PER_OVERLOAD, len(several)))]
