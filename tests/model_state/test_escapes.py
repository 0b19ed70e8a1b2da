"""Tensors without data are found wherever they would leave us, and named."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_norm import RMSTensor
from thunder_norm.errors import EscapeError
from thunder_norm.model_state.escapes import check_nothing_escapes, stand_in
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: object


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def proxy() -> TensorProxy:
    with tracectx(TraceCtx()):
        return TensorProxy("t", shape=(3,), device=devices.cpu, dtype=dtypes.float32)


def meta() -> torch.Tensor:
    return torch.empty(3, device="meta")


MAKERS = {"fake tensor": fake, "proxy": proxy, "meta tensor": meta}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    ("nest", "path"),
    [
        (lambda t: t, ""),
        (lambda t: [torch.ones(1), t], r"\[1\]"),
        (lambda t: {"a": (t,)}, r"\['a'\]\[0\]"),
        (lambda t: Pair(1, t), r"\.second"),
        (lambda t: Output(t), r"\.logits"),
    ],
)
def test_a_stand_in_is_named_wherever_it_is(kind, nest, path):
    with pytest.raises(EscapeError, match=f"^the result{path} would have been a {kind}"):
        check_nothing_escapes(nest(MAKERS[kind]()), "the result")


def test_a_stand_in_inside_a_wrapper_is_found():
    assert stand_in(RMSTensor(1.0, backing=meta())) == "meta tensor"
    assert stand_in(RMSTensor(1.0, backing=torch.ones(3))) is None


def test_values_and_what_came_in_may_leave():
    came_in = meta()
    check_nothing_escapes(
        [torch.ones(2), torch.nn.Parameter(torch.ones(2)), 1, "a", None, came_in], "x", allowed=lambda v: v is came_in
    )
