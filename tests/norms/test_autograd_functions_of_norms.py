"""torch.autograd.Function of normed tensors in traces: gradients of what it returns are its backward's, those of norms its forward's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm import NormedTensor, RMSTensor, build_norm_map, normed
from thunder_norm.errors import NormMismatchError, UnsupportedOpError
from thunder_norm.transforms import NormTransform
import thunder

Function = torch.autograd.Function


class Scaled(Function):
    """With a backward that is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, g):
        x, scale = ctx.saved_tensors
        return g * scale * 3, (g * x).sum().view(1)


class Rounded(Function):
    """The straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx, g):
        return g


class Reversed(Function):
    """The gradient reversal layer of domain adaptation, which returns its argument."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x

    @staticmethod
    def backward(ctx, g):
        return -ctx.by * g, None


class Halves(Function):
    @staticmethod
    def forward(ctx, x):
        return x[..., :3] * 2, x[..., 3:].clone()

    @staticmethod
    def backward(ctx, g, h):
        return torch.cat([g * 5, h * 7], -1)


class Both(Function):
    """Returns a parameter beside a normed tensor, and what it makes of parameters alone."""

    @staticmethod
    def forward(ctx, x, scale, weight):
        return x, scale, (weight * 2).round() / 2

    @staticmethod
    def backward(ctx, g, h, k):
        return g * 5, h * 7, k * 3


class Noisy(Function):
    @staticmethod
    def forward(ctx, x):
        return x * (torch.rand(x.shape) < 0.5).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        return g


PROGRAMS = {
    "masked weight and parameter": lambda m, x: F.linear(x, Scaled.apply(m.fc.weight * m.mask, m.scale)),
    "frozen weight and parameter": lambda m, x: F.linear(x, Scaled.apply((m.fc.weight * m.mask).detach(), m.scale)),
    "rounded": lambda m, x: F.linear(Rounded.apply(x.tanh()), Rounded.apply(m.fc.weight * m.mask)),
    "returned as it is": lambda m, x: Reversed.apply(m.fc(x), 0.5) + m.fc(x),
    "parameters beside it": lambda m, x: (lambda x, s, w: F.linear(x * s, w[:, 1:] @ w[1:]))(
        *Both.apply(m.fc(x), m.scale, m.fc.weight)
    ),
    "two results": lambda m, x: torch.cat(Halves.apply(m.fc(x)), -1).tanh() * m.scale,
}


class Model(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.fc, self.out = nn.Linear(6, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.register_buffer("mask", (torch.rand(6, 6) > 0.3).float())
        self.program = program

    def forward(self, x):
        return self.out(self.program(self, x))


def gradients(out, m):
    found = torch.autograd.grad(out, list(m.parameters()), allow_unused=True, retain_graph=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(m.parameters(), found, strict=True)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_backings_are_the_backwards_and_norms_move_as_their_forward(name):
    torch.manual_seed(seeded(0))
    m = Model(PROGRAMS[name]).double()
    call, x = normed(thunder.jit(m, transforms=[NormTransform()])), torch.randn(5, 6, dtype=torch.float64)
    out = call(x)
    torch.testing.assert_close(out.backing, m(x))
    torch.testing.assert_close(gradients(out.backing.sin().sum(), m), gradients(m(x).sin().sum(), m))
    assert out.norm_size >= m(x).detach().square().mean(-1).sqrt().max() * (1 - 1e-9)
    (slope,) = torch.autograd.grad(out.norm_size, m.scale, allow_unused=True)
    sizes = []
    for step in (1e-4, -1e-4):
        with torch.no_grad():
            m.scale += step
            sizes.append(call(x).norm_size)
            m.scale -= step
    difference = (sizes[0] - sizes[1]) / 2e-4
    torch.testing.assert_close(torch.zeros_like(difference) if slope is None else slope.sum(), difference, rtol=1e-5, atol=1e-7)


def test_norms_of_parameters_that_a_function_returns_need_no_data():
    torch.manual_seed(seeded(0))
    m, x = Model(PROGRAMS["parameters beside it"]), RMSTensor.of(torch.randn(5, 6))
    torch.testing.assert_close(
        build_norm_map(m, x.backing)(x).norm_size, thunder.jit(m, transforms=[NormTransform()])(x).norm_size
    )


def test_gradients_through_a_function_that_draws_are_refused_and_its_values_are_not():
    torch.manual_seed(seeded(0))
    m = Model(lambda m, x: Noisy.apply(m.fc(x)))
    out = normed(thunder.jit(m, transforms=[NormTransform()]))(torch.randn(5, 6))
    assert out.norm_size >= out.backing.square().mean(-1).sqrt().max() * (1 - 1e-5)
    with pytest.raises(UnsupportedOpError, match="(?s)Noisy.*draws random numbers"):
        out.backing.sum().backward()


def test_operator_norms_beside_wrappers_that_torchs_autograd_follows():
    torch.manual_seed(seeded(0))
    m, two = nn.Linear(6, 4, bias=False), TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_()

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = m

        def forward(self, two, x):
            return two * 2, self.fc(x)

    doubled, out = thunder.jit(Beside(), transforms=[NormTransform()])(two, RMSTensor.of(torch.randn(5, 6)))
    doubled.sum().backward(retain_graph=True)
    out.norm_size.backward()
    assert torch.equal(two.grad.a, torch.full((3,), 2.0))
    weight = m.weight.detach().double().requires_grad_()
    want = torch.linalg.matrix_norm(weight, 2) * (6 / 4) ** 0.5
    (slope,) = torch.autograd.grad(want, weight)
    torch.testing.assert_close(m.weight.grad / m.weight.grad.norm(), (slope / slope.norm()).float())


class _OfModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        return module(x)

    @staticmethod
    def backward(ctx, g):
        return g, None


class _GivenItsModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return _OfModule.apply(x, self.inner)


@pytest.mark.parametrize("of", [RMSTensor.of, lambda x: TwoTensor(x, x)], ids=["normed", "another wrapper"])
def test_parameters_of_a_module_that_a_function_is_given_may_be_replaced(of):
    torch.manual_seed(seeded(0))
    model, x = _GivenItsModule(), torch.randn(3, 4)
    jm = thunder.jit(model, transforms=[NormTransform()])

    def result():
        y = jm(of(x))
        return y.backing if isinstance(y, NormedTensor) else y.a

    torch.testing.assert_close(result(), model(x))
    with torch.no_grad():
        model.inner.weight.mul_(2)
    torch.testing.assert_close(result(), model(x))
    model.inner.weight = torch.nn.Parameter(torch.randn(4, 4))
    torch.testing.assert_close(result(), model(x))


class _Product(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class _ByModule(Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.module.weight, None


class _OfParameters(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(seeded())
        self.inner, self.how = nn.Linear(3, 3, bias=False), how

    def forward(self, x):
        if self.how == "directly":
            return self.inner(x)
        return _ByModule.apply(x, self.inner) if self.how == "its module" else _Product.apply(x, self.inner.weight)


@pytest.mark.parametrize("how", ["its module", "its weight"])
def test_a_function_that_is_given_parameters_has_norms_beside_plain_tensors(how):
    """As the layer itself has, in all calls; and eager mode's gradients."""
    x = torch.ones(2, 3, requires_grad=True)
    m, direct = _OfParameters(how), _OfParameters("directly")
    jm, expected = (thunder.jit(f, transforms=[NormTransform()]) for f in (m, direct))
    for _ in range(2):
        out = normed(jm)(x)
        torch.testing.assert_close(out.norm_size.detach(), normed(expected)(x).norm_size.detach())
        torch.testing.assert_close(out.backing, m(x))
        with torch.no_grad():
            m.inner.weight.mul_(3)
            direct.inner.weight.mul_(3)
    assert thunder.cache_misses(jm) == 1
    tensors = [x] if how == "its module" else [x, m.inner.weight]
    found, wanted = (torch.autograd.grad(out.sum(), tensors) for out in (normed(jm)(x).backing, m(x)))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("given", ["unit", {"inner.weight": 7.0}], ids=["unit", "a size"])
@pytest.mark.parametrize("is_normed_input", [False, True])
def test_norms_that_are_given_for_parameters_hold_in_functions(given, is_normed_input):
    def norm(how):
        jm = thunder.jit(_OfParameters(how), transforms=[NormTransform(parameters=given)])
        x = torch.ones(2, 3)
        return (jm(RMSTensor.of(x)) if is_normed_input else normed(jm)(x)).norm_size.detach()

    torch.testing.assert_close(norm("its weight"), norm("directly"))
    with pytest.raises(NormMismatchError, match=r"inner\.weight, whose norm is given.*finds it by itself"):
        norm("its module")
