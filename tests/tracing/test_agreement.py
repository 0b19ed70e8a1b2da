"""What torch's functions return, asked without data: against torch itself, with data."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.seeds import seeded
from thunder_norm.audit.op_db import outside_of_unittest
from thunder_norm.subclass.interpreting import agreement
import thunder
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx


def _asked(function: Any, args: tuple, kwargs: dict) -> Any:
    """What is found without a device for tensors like these."""
    strides: dict[str, tuple[int, ...]] = {}

    def proxy(t: torch.Tensor) -> TensorProxy:
        device, dtype = thunder.core.devices.to_device(t.device), thunder.core.dtypes.to_dtype(t.dtype)
        p = TensorProxy(shape=tuple(t.shape), device=device, dtype=dtype, requires_grad=False)
        strides[p.name] = t.stride()
        return p

    with tracectx(TraceCtx(None)):
        own_args, own_kwargs = tree_map_only(torch.Tensor, proxy, (args, kwargs))
        call = agreement._Call(function, own_args, own_kwargs, lambda p: strides[p.name])
        given = [v for v in tree_leaves((own_args, own_kwargs)) if isinstance(v, TensorProxy)]
        found = call._outcome_of_any_device(given, FakeTensorMode())
    return found.value if isinstance(found, agreement.HandedBack) else found


def _described(found: Any) -> list[tuple]:
    return [(t.shape, t.stride(), t.dtype, t.device) if isinstance(t, torch.Tensor) else (t,) for t in tree_leaves(found)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_hangs_on_no_device_is_what_torch_returns(dtype: torch.dtype):
    torch.manual_seed(seeded(0))
    tried = set()
    with outside_of_unittest():
        for info in op_db:
            name = info.name.rpartition(".")[2]
            functions = agreement._OF_ANY_DEVICE & {info.op, *(getattr(torch.Tensor, n, None) for n in (name, f"__{name}__"))}
            if not functions or not info.supports_dtype(dtype, "cpu"):
                continue
            for sample in itertools.islice(info.sample_inputs("cpu", dtype), 15):
                given = sample.input, *sample.args
                for args in (given, _laid_out_otherwise(given)):
                    for function in functions:
                        tried |= {function} if _is_as_torchs(function, args, sample.kwargs) else set()
    assert len(tried) >= (30 if dtype is torch.int64 else 60)


def _laid_out_otherwise(args: tuple) -> tuple:
    """The same tensors, each with its dimensions in memory in the order from the first to the last."""
    return tree_map_only(
        torch.Tensor, lambda t: t.mT.contiguous().mT if t.layout is torch.strided and t.ndim > 1 and t.numel() else t, args
    )


def _is_as_torchs(function: Any, args: tuple, kwargs: dict) -> bool:
    try:
        expected = function(*args, **kwargs)
    except Exception:  # noqa: BLE001 - a method that takes other arguments than the function
        return False
    found = _asked(function, args, kwargs)
    if found is agreement.UNKNOWN:
        return False
    assert _described(found) == _described(expected), (function, args, kwargs)
    return True


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "part"])
def test_batch_norms_lie_in_memory_as_torchs(layout: str, dtype: torch.dtype, training: bool):
    x = torch.randn(3, 4, 5, 6, dtype=dtype)
    x = {"contiguous": x, "channels last": x.contiguous(memory_format=torch.channels_last), "part": x[:, :, ::2]}[layout]
    mean, variance, weight = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype), torch.ones(4, dtype=dtype)
    for given in ((mean, variance), (mean, variance, weight, weight)):
        found = _asked(F.batch_norm, (x, *given), {"training": training})
        assert _described(found) == _described(F.batch_norm(x, *(t.clone() for t in given), training=training))


def test_what_is_refused_without_a_device_is_asked_with_one():
    x = torch.randn(2, 3)
    assert _asked(torch.reshape, (x, (5, 5)), {}) is agreement.UNKNOWN
    assert _asked(torch.Tensor.__getitem__, (x, x > 0), {}) is agreement.UNKNOWN  # its shape hangs on values
