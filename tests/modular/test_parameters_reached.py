"""A parameter is reached wherever its gradient is not zero, whatever argument of an operation it is: or the program is refused."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm.errors import ThunderNormError
from thunder_norm.modular import ModularNorm

_SIGNS = torch.tensor([[1.0, -1.0, 1.0, -1.0]]).repeat(3, 1)

# f(x, p), and p
_PROGRAMS = {
    "atan2": (lambda x, p: torch.atan2(x, p), (3, 4)),
    "ldexp": (lambda x, p: torch.ldexp(x, p), (3, 4)),
    "masked_fill": (lambda x, p: x.masked_fill(_SIGNS > 0, p), ()),
    "masked_fill_": (lambda x, p: (2 * x).masked_fill_(_SIGNS > 0, 2 * p), ()),
    "pow of it": (lambda x, p: torch.pow(p.abs() + 1, x), (3, 4)),
    "pow": (lambda x, p: torch.pow(x.abs() + 1, p), (3, 4)),
    "xlogy": (lambda x, p: torch.xlogy(x, p.abs()), (3, 4)),
    "lerp": (lambda x, p: x.lerp(x.sin(), p * 0.5), (4,)),
    "lerp by a number": (lambda x, p: torch.lerp(x, x.sin(), p), ()),
    "clamp": (lambda x, p: x.clamp(min=-p.abs(), max=p.abs()), (4,)),
    "minimum": (lambda x, p: torch.minimum(x, p), ()),
    "where": (lambda x, p: torch.where(_SIGNS > 0, x, p * x), (4,)),
    "attention": (lambda x, p: F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=p), (3, 3)),
    "grid_sample": (lambda x, p: F.grid_sample(x[None, None], p.tanh(), align_corners=False), (1, 2, 2, 2)),
    "soft labels": (lambda x, p: F.cross_entropy(x, p.softmax(-1)), (3, 4)),
    "binary labels": (lambda x, p: F.binary_cross_entropy_with_logits(x, p.sigmoid()), (3, 4)),
    "kl_div": (lambda x, p: F.kl_div(x.log_softmax(-1), p.softmax(-1), reduction="batchmean"), (3, 4)),
    "poisson_nll_loss": (lambda x, p: F.poisson_nll_loss(x, p.abs()), (3, 4)),
    "gaussian_nll_loss": (lambda x, p: F.gaussian_nll_loss(x, 0 * _SIGNS, p.exp()), (3, 4)),
    "division": (lambda x, p: x / p.exp(), (4,)),
    "gather": (lambda x, p: p.gather(0, (_SIGNS[:, :1] > 0).long()), (4, 4)),
    "addcdiv": (lambda x, p: torch.addcdiv(x, x, p.exp()), (4,)),
    "what nothing depends on": (lambda x, p: torch.where(p > 0, x, x), (4,)),
}


class _Model(torch.nn.Module):
    def __init__(self, f, shape):
        super().__init__()
        self.f, self.p = f, torch.nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.f(x, self.p)


@pytest.mark.parametrize("mode", ["bound", "typical"])
@pytest.mark.parametrize("name", _PROGRAMS)
def test_parameters_in_any_argument(name, mode):
    torch.manual_seed(seeded(0))
    model, x = _Model(*_PROGRAMS[name]), torch.randn(3, 4)
    result = model(x).square().sum()
    gradient = torch.autograd.grad(result, model.p)[0] if result.requires_grad else torch.zeros(())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which says that a target is 0
        try:
            target = ModularNorm(model, x, mode=mode).targets["p"]
        except ThunderNormError:
            return
    if gradient.abs().max() > 0:
        assert target > 0
    assert name != "what nothing depends on" or target == 0


@pytest.mark.parametrize("name", ["lerp", "lerp by a number", "masked_fill", "attention", "grid_sample", "ldexp", "clamp"])
def test_those_that_have_bounds_have_them(name):
    torch.manual_seed(seeded(0))
    assert ModularNorm(_Model(*_PROGRAMS[name]), torch.randn(3, 4)).targets["p"] > 0
