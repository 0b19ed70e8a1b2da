"""Derivatives through complex numbers, in PyTorch's convention: a gradient is the conjugate of the derivative."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import thunder_norm.transforms as T
from tests.seeds import crossed
from tests.transform_oracles import assert_same, float64
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


def _complex(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x.sin() + 0.5)


def _rotary(x: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(3.0, dtype=torch.float64)
    pairs = torch.view_as_complex(torch.stack([x, x.sin()], -1))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).pow(2)[..., 0].sum()


def _in_place(x: torch.Tensor) -> torch.Tensor:
    z = _complex(x).clone()
    z.mul_(2 - 1j)
    z.add_(x)
    return (z * z).imag.sum()


_ELEMENTARY = (
    "exp sin cos tan tanh sinh cosh sqrt rsqrt log log2 log10 log1p expm1 reciprocal asin acos atan asinh acosh atanh "
    "sigmoid square neg"
)


def _elementary(x: torch.Tensor) -> torch.Tensor:
    z = _complex(x) * 0.7 + 0.1
    results = torch.stack([getattr(z, name)() for name in _ELEMENTARY.split()])
    return results.real.sum() + results.imag.pow(2).sum()


# of real vectors of length 3, with complex numbers in between
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: (_complex(x) * _complex(x)).real.sum(),
    "quotient": lambda x: (_complex(x) / (2 + _complex(x.cos()))).imag.sum(),
    "power": lambda x: (_complex(x) ** 3).real.sum() + (_complex(x) ** 1.5).imag.sum(),
    "power of two tensors": lambda x: (_complex(x) ** _complex(x.cos())).real.sum(),
    "a number to a power": lambda x: (2.0 ** _complex(x)).imag.sum(),
    "elementary functions": _elementary,
    "modulus, angle, sign": lambda x: (_complex(x).abs() * _complex(x).angle()).sum() + _complex(x).sgn().imag.sum(),
    "conjugate": lambda x: (_complex(x).conj() * (1j * _complex(x.cos()))).real.sum(),
    "a real and a complex operand": lambda x: (x * _complex(x) + (1j * x) - x / _complex(x)).imag.sum(),
    "0-dim operand": lambda x: (_complex(x).sum() * _complex(x) / _complex(x).mean()).real.sum(),
    "matrix product": lambda x: (torch.outer(_complex(x), _complex(x)) @ _complex(x.cos())).imag.sum(),
    "batched matrix product": lambda x: torch.bmm(_complex(x)[None, :, None], _complex(x)[None, None]).imag.pow(2).sum(),
    "einsum": lambda x: torch.einsum("i,j,ij->", _complex(x), _complex(x), torch.outer(x, _complex(x))).real,
    "reductions": lambda x: _complex(x).prod().imag + _complex(x).mean().real + _complex(x).var() + _complex(x).std(),
    "logsumexp": lambda x: torch.logsumexp(_complex(x), 0).imag,
    "norm": lambda x: torch.linalg.vector_norm(_complex(x)) + torch.linalg.vector_norm(_complex(x), ord=3),
    "cumulative": lambda x: (_complex(x).cumsum(0).imag * x).sum() + (_complex(x).cumprod(0).imag * x).sum(),
    "fft": lambda x: torch.fft.ifft(torch.fft.fft(x) * torch.fft.fft(x.sin())).real.pow(2).sum(),
    "real fft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * (1 + 2j), n=3).pow(3).sum(),
    "rotary embedding": _rotary,
    "polar": lambda x: torch.polar(x.exp(), x.sin()).imag.sum(),
    "shapes": lambda x: (torch.stack([_complex(x), 1j * x]).mT.reshape(-1)[1:].flip(0) * (3 - 1j)).imag.pow(2).sum(),
    "choices": lambda x: torch.where(x > 0, _complex(x) * 1j, _complex(x).conj()).imag.pow(2).sum(),
    "indices": lambda x: (_complex(x)[torch.tensor([2, 0, 0])] * torch.tensor([1j, 2.0, 1 - 1j])).real.sum(),
    "concatenation": lambda x: torch.cat([_complex(x), x, 1j * x]).prod().real,
    "linear algebra": lambda x: torch.linalg.solve(torch.outer(_complex(x), x) + 3j * torch.eye(3), _complex(x)).real.sum(),
    "conversions": lambda x: (
        (x.to(torch.complex128) * 1j).imag.sum() + (_complex(x).to(torch.complex64).imag.pow(2)).sum().double()
    ),
    "layers": lambda x: torch.nn.functional.linear(_complex(x), torch.outer(_complex(x), x), _complex(x)).imag.pow(2).sum(),
    "in place": _in_place,
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_agree_with_torch(name: str) -> None:
    f, x, v = FUNCTIONS[name], float64(3), float64(3, seed=1)
    tolerance = 1e-5 if name == "conversions" else 1e-8
    expected = torch.func.grad(f)(x)
    assert_same(T.grad(f)(x), expected, rtol=tolerance, atol=tolerance)
    assert_same(T.jvp(f, (x,), (v,))[1], expected @ v, rtol=tolerance, atol=tolerance)  # torch.func.jvp of polar is wrong


@pytest.mark.parametrize(
    "name", ["product", "elementary functions", "fft", "matrix product", "linear algebra", "modulus, angle, sign"]
)
def test_second_derivatives_agree_with_torch(name: str) -> None:
    f, x = FUNCTIONS[name], float64(3)
    expected = torch.autograd.functional.hessian(f, x)
    for second in (T.hessian(f), T.jacrev(T.grad(f)), T.jacrev(T.jacfwd(f))):
        assert_same(second(x), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("name", "transform"), crossed(FUNCTIONS, [SubclassTransform, NormTransform]))
def test_backward_of_a_jitted_function(name: str, transform: type) -> None:
    f, x = FUNCTIONS[name], float64(3)
    tolerance = 1e-5 if name == "conversions" else 1e-8
    leaf = x.clone().requires_grad_()
    thunder.jit(f, transforms=[transform()])(leaf).backward()
    assert_same(leaf.grad, torch.func.grad(f)(x), rtol=tolerance, atol=tolerance)


def test_gradients_by_complex_arguments() -> None:
    z, w = torch.complex(float64(3), float64(3, seed=1)), torch.complex(float64(3, seed=2), float64(3, seed=3))

    def loss(z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (z * w.conj() + z**2 / w).abs().sum() + (z @ w).imag

    assert_same(T.grad(loss, argnums=(0, 1))(z, w), torch.func.grad(loss, argnums=(0, 1))(z, w))
    product = lambda z: z * w  # noqa: E731
    ours, theirs = T.vjp(product, z)[1](w), torch.func.vjp(product, z)[1](w)
    assert_same(ours, theirs)
    assert_same(T.jvp(loss, (z, w), (w, z))[1], torch.func.jvp(loss, (z, w), (w, z))[1])


def test_a_batch_of_gradients() -> None:
    f, x = FUNCTIONS["product"], float64(4, 3)
    assert_same(T.vmap(T.grad(f))(x), torch.func.vmap(torch.func.grad(f))(x))


@pytest.mark.parametrize("cast", [lambda c, x: c.type_as(x), lambda c, x: c.to(x)])
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_a_constant_cast_to_the_dtype_of_what_requires_grad_does_not_require_it(cast: Callable) -> None:
    c, x = torch.randn(3, dtype=torch.complex64), torch.randn(3, requires_grad=True)
    result, wanted = thunder.jit(cast, transforms=[SubclassTransform()])(c, x), cast(c, x)
    assert torch.equal(result, wanted) and not wanted.requires_grad and not result.requires_grad
