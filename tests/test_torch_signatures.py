"""Functions of torch have torch's arguments and defaults under our transforms, also where Thunder's operation has others."""

from __future__ import annotations

import inspect

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.torch import _torch_to_thunder_function_map

from thunder_norm.transforms import NormTransform, SubclassTransform, grad, jvp, vmap

_MODULE = torch.nn.NLLLoss(reduction="none")
_TARGETS = {"all": [0, 1, 0, 1], "some ignored": [0, -100, 1, -100]}
_CALLS = {
    "mean": lambda x, t: F.nll_loss(x, t),
    "sum": lambda x, t: F.nll_loss(x, t, reduction="sum"),
    "legacy": lambda x, t: F.nll_loss(x, t, None, False),
    "places": lambda x, t: F.nll_loss(x, t, torch.tensor([1.0, 3.0], dtype=torch.float64), None, 1, None, "mean"),
    "index": lambda x, t: F.nll_loss(x, t.clamp(min=0), ignore_index=0),
    "module": lambda x, t: _MODULE(x, t).sum(),
}


@pytest.mark.parametrize("target", _TARGETS)
@pytest.mark.parametrize("call", _CALLS)
def test_nll_loss_is_torchs(call, target):
    x, t = torch.randn(4, 2, dtype=torch.float64).log_softmax(-1), torch.tensor(_TARGETS[target])
    t = t.clamp(min=0) if call == "places" else t

    def loss(x):
        return _CALLS[call](x, t)

    wanted, slope = loss(x), torch.func.grad(loss)(x)
    torch.testing.assert_close(grad(loss)(x), slope)
    torch.testing.assert_close(jvp(loss, (x,), (slope,))[1], (slope * slope).sum())
    torch.testing.assert_close(vmap(grad(loss))(torch.stack([x, x * 2]))[1], torch.func.grad(loss)(x * 2))
    for transform in (SubclassTransform, NormTransform):
        leaf = x.detach().requires_grad_()
        found = thunder.jit(loss, transforms=[transform()])(leaf)
        torch.testing.assert_close(found, wanted)
        found.backward()
        torch.testing.assert_close(leaf.grad, slope)


def test_no_other_function_in_python_has_a_default_of_thunders():
    differing = set()
    for function, symbol in _torch_to_thunder_function_map.items():
        try:
            theirs = inspect.signature(function).parameters
            own = inspect.signature(inspect.unwrap(symbol.meta)).parameters
        except (TypeError, ValueError, AttributeError):  # in C, without a signature
            continue
        if str(getattr(function, "__module__", "")).startswith("torch.distributed"):
            continue
        required = inspect.Parameter.empty
        if any(
            n in theirs and required not in (p.default, theirs[n].default) and p.default != theirs[n].default
            for n, p in own.items()
        ):
            differing.add(function)
    assert differing == {F.nll_loss}
