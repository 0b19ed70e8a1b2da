"""Views of what `einsum` makes, where torch has them: Thunder's own einsum has other strides, and none of its kernels makes these."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.subclass.recording import einsum_strides
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder
import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx


def convolved_by_location(x, kernel):
    return (torch.einsum("bildsk,biokl->bolsd", x, kernel) + 1).view(x.shape[0], kernel.shape[2], -1)


def activated(x, kernel):
    y = F.silu(torch.einsum("bildsk,biokl->bolsd", x, kernel))
    return y.view_as(torch.empty(2, 7, 24)) * 2


@pytest.mark.parametrize("f", [convolved_by_location, activated])
def test_views_of_einsum(f):
    torch.manual_seed(seeded(0))
    x, kernel = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3, 6, 1, 4, 5), (2, 3, 7, 5, 6)))
    expected = f(x, kernel)
    for transform in (NormTransform, SubclassTransform):
        jitted = thunder.jit(f, transforms=[transform()])
        torch.testing.assert_close(jitted(x, kernel), expected)
        leaves = [t.clone().requires_grad_() for t in (x, kernel)]
        for a, b in zip(*(torch.autograd.grad(g(*leaves).square().sum(), leaves) for g in (jitted, f)), strict=True):
            torch.testing.assert_close(a, b)
    found = thunder.jit(f, transforms=[NormTransform()])(RMSTensor.of(x, elem_dims=(-1,)), kernel)
    torch.testing.assert_close(found.backing, expected)
    assert type(found).of(expected, found.elem_dims).norm_size <= found.norm_size * (1 + 1e-5)


def test_what_is_made_of_einsum_is_known_however_the_trace_grows(monkeypatch):
    """Against a search through the trace, from each of its tensors, while operations are added and taken away."""
    torch.manual_seed(seeded(0))
    trace = TraceCtx()
    monkeypatch.setattr(einsum_strides, "get_jit_ctx", lambda: SimpleNamespace(computation_trace=trace))
    with tracectx(trace):
        made = [TensorProxy(shape=(2, 2), device=devices.cpu, dtype=dtypes.float32)]
        for which in torch.randint(0, 20, (200,)).tolist():
            a, b = (made[i] for i in torch.randint(0, len(made), (2,)).tolist())
            if which == 0:
                made.append(ltorch.einsum("ij,jk->ik", a, b))
            elif which == 1:
                del trace.bound_symbols[-3:]
            else:
                made.append(ltorch.add(a, b) if which % 2 else ltorch.sin(a))
            asked = made[-1]
            made_of, names = False, {asked.name}
            for bsym in reversed(trace.bound_symbols):
                if not names.isdisjoint(p.name for p in bsym.flat_proxy_outs):
                    made_of = made_of or "einsum" in str(bsym)
                    names |= {p.name for p in bsym.flat_proxy_args}
            assert einsum_strides.is_made_of_einsum(asked) is made_of
