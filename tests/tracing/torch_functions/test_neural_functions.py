"""Neural functions that Thunder lacks, or has fail, as in eager PyTorch, with gradients, of plain and of normed tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import crossed, seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

CALLS = {
    "function": lambda x: F.max_pool3d(x, 2),
    "of torch": lambda x: torch.max_pool3d(x, (2, 1, 2)),
    "padded": lambda x: F.max_pool3d(x, 3, None, 1),
    "without a batch": lambda x: F.max_pool3d(x[0], [2, 2, 2]),
    "with indices": lambda x: F.max_pool3d(x, 2, return_indices=True)[0],
    "rounded up": lambda x: F.max_pool3d(x, 3, ceil_mode=True),
    "module": lambda x: torch.nn.MaxPool3d(2)(x),
}


@pytest.mark.parametrize(("name", "transform"), crossed(CALLS, [SubclassTransform, NormTransform]))
def test_pooling_without_a_stride(name, transform):
    torch.manual_seed(seeded(0))
    x = torch.randn(2, 3, 4, 4, 4, requires_grad=True)
    jf, wanted = thunder.jit(CALLS[name], transforms=[transform()]), CALLS[name](x)
    found = jf(x)
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (found, wanted)))
    if transform is NormTransform:
        normed = jf(RMSTensor.of(x))
        assert torch.equal(normed.backing, wanted) and actual_norm(normed) <= normed.norm_size * (1 + 1e-6)


IN_PLACE = {
    "elu_": (F.elu_, (0.7,)),
    "leaky_relu_": (F.leaky_relu_, (0.2,)),
    "celu_": (F.celu_, (0.5,)),
    "selu_": (F.selu_, ()),
    "threshold_": (F.threshold_, (0.1, -0.2)),
    "hardtanh_": (F.hardtanh_, (-0.5, 0.7)),
}


@pytest.mark.parametrize(("name", "transform"), crossed(IN_PLACE, [SubclassTransform, NormTransform]))
def test_activations_in_place(name, transform):
    torch.manual_seed(seeded(0))
    function, options = IN_PLACE[name]
    x = torch.randn(3, 4, requires_grad=True)

    def f(x):
        y = x * 2
        function(y, *options)
        return y.sin() + function(x + 1, *options)

    jf, wanted = thunder.jit(f, transforms=[transform()]), f(x)
    found = jf(x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, wanted)))
    changed, expected = x.detach().clone(), x.detach().clone()
    thunder.jit(lambda x: function(x, *options), transforms=[transform()])(changed)
    function(expected, *options)
    torch.testing.assert_close(changed, expected)
