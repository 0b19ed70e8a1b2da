"""Methods and attributes of tensors that Thunder's lack: traced programs have what eager ones have."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import NormedTensor, normed
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.tracing.torch_functions import tensor_methods
from thunder_norm.transforms import CheckpointTransform, NormTransform
import thunder

INDEX = torch.tensor([2, 0])
MASK = torch.tensor([[True, False, True], [False, False, True], [True, True, False]])
A, B, V = (torch.linspace(0.1, 0.9, 9).reshape(3, 3), torch.linspace(0.9, 0.2, 9).reshape(3, 3), torch.linspace(0.3, 0.7, 3))
WHOLE, OTHER = torch.arange(1, 10).reshape(3, 3), torch.arange(9, 0, -1).reshape(3, 3)
MATRICES = ("addbmm_", "addmm_", "addmv_", "addr_", "baddbmm_")
ARGUMENTS = {
    "addbmm_": (A.repeat(2, 1, 1), B.repeat(2, 1, 1)),
    "addmm_": (A, B),
    "addr_": (V, V),
    "cumprod_": (1,),
    "clamp_max_": (0.5,),
    "clamp_min_": (0.5,),
    "clip_": (0.2, 0.6),
    "fill_": (3,),
    "float_power_": (2,),
    "hardshrink": (0.3,),
    "broadcast_to": ((2, 3, 3),),
    "fill_diagonal_": (0.4,),
    "index_fill_": (0, INDEX, 2.5),
    "index_reduce_": (0, INDEX, A[:2], "prod"),
    "ldexp_": (OTHER,),
    "logit_": (0.1,),
    "masked_scatter_": (MASK, B),
    "mvlgamma_": (1,),
    "nan_to_num_": (),
    "put_": (INDEX, V[:2]),
    "renorm_": (2, 0, 0.7),
    "scatter_reduce_": (0, INDEX[None, :], V[None, :2], "sum"),
}
UNARY = (
    "absolute_ arccos_ arccosh_ arcsin_ arcsinh_ arctan_ arctanh_ conj_physical_ deg2rad_ fix_ frac_ i0_ negative_ rad2deg_ sgn_ "
    "sigmoid_ sinc_ zero_"
)
ARGUMENTS |= dict.fromkeys(UNARY.split(), ())
INTEGERS = ("bitwise_left_shift_", "bitwise_right_shift_", "gcd_", "lcm_")
OF_DOUBLES = ("float_power_",)  # its result is double, and torch casts to nothing less
BATCHES = {"baddbmm_": (A.repeat(2, 1, 1), B.repeat(2, 1, 1)), "addmv_": (A, V)}


def _jit(f):
    return thunder.jit(f, transforms=[NormTransform()])


def _given(name):
    """The tensor whose method is called, and the arguments."""
    if name in INTEGERS:
        return WHOLE, (OTHER % 4,)
    if name in BATCHES:
        return (V if name == "addmv_" else A.repeat(2, 1, 1)), BATCHES[name]
    return (1 + A if name == "arccosh_" else A.double() if name in OF_DOUBLES else A), ARGUMENTS.get(name, (B,))


@pytest.mark.parametrize("name", sorted(tensor_methods.names() - {"requires_grad_"}))
def test_methods_are_torchs(name):
    x, args = _given(name)

    def method(x):
        y = x * 1
        z = getattr(y, name)(*args)
        return y + 1, z

    torch.testing.assert_close(_jit(method)(x), method(x))
    function = getattr(torch, name, None)
    if function is not None:
        torch.testing.assert_close(_jit(lambda x: function(x * 1, *args))(x), function(x * 1, *args))


def test_views_and_arguments_change_with_what_is_changed():
    def program(x):
        y = x * 2
        row = y[0]
        row.sigmoid_()
        y.subtract_(x)
        x.negative_()
        return y, row, x.exp()

    x = torch.randn(3, 4)
    other = x.clone()
    torch.testing.assert_close(_jit(program)(x), program(other))
    torch.testing.assert_close(x, other)


def test_gradients_of_methods_in_place():
    def program(x):
        return ((x * 2).sigmoid_() * x).clip_(0.1, 0.6).subtract_(x).broadcast_to((2, 3, 4)).sum()

    torch.manual_seed(seeded(0))
    x = torch.randn(3, 4, requires_grad=True)
    found, expected = (torch.autograd.grad(f(x), x) for f in (_jit(program), program))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (lambda x: x.sum(0).multiply_(x), "doesn't match the broadcast shape"),
        (lambda x: x.int().multiply_(x), "can't be cast to"),
        (lambda x: x.int().sigmoid_(), "can't be cast to"),
    ],
)
def test_what_torch_refuses_is_refused(program, says):
    for f in (program, _jit(program)):
        with pytest.raises(RuntimeError, match=says):
            f(torch.randn(3, 4))


FACTS = "is_cpu is_cuda is_meta is_mps is_xpu is_sparse is_sparse_csr is_mkldnn is_quantized itemsize nbytes layout".split()


@pytest.mark.parametrize("name", FACTS)
def test_what_a_tensor_is(name):
    expected = [getattr(t, name) for t in (torch.ones(2, 3), torch.ones(3).half())]

    def program(x):
        found = [getattr(x, name), getattr(x.sum(0).half(), name)]
        return x + (1 if found == expected else 0)

    assert _jit(program)(torch.zeros(2, 3)).sum() == 6


def _restarted(x):
    y = x.detach().requires_grad_()
    return x.sin() + y * 2 + torch.zeros_like(x).requires_grad_(True) + torch.ones(3).requires_grad_(False)


def _imag_multiplied(z):
    z.imag *= -2
    return z


def _real_of_row(z):
    row = z[0]
    row.real = z[1].imag
    return z


def _by_setattr(z):
    setattr(z, "imag", torch.tensor(2.0))  # noqa: B010 - as programs do whose name is computed
    return z


def _with_number(z):
    z.real = 2.0
    return z


@pytest.mark.parametrize("program", [_imag_multiplied, _real_of_row, _by_setattr, _with_number])
def test_parts_of_complex_numbers_are_written(program):
    z = torch.complex(A, B)
    jf = thunder.jit(program, transforms=[NormTransform()])
    given, wanted = z.clone(), z.clone()
    torch.testing.assert_close(jf(given), program(wanted))
    torch.testing.assert_close(given, wanted)

    def of_made(x):
        return program(torch.complex(x * x, x)).abs().sum()

    found, want = A.clone().requires_grad_(), A.clone().requires_grad_()
    thunder.jit(of_made, transforms=[NormTransform()])(found).backward()
    of_made(want).backward()
    torch.testing.assert_close(found.grad, want.grad)


@pytest.mark.parametrize("mode", ["real", "normed"])
def test_requires_grad_of_what_the_program_makes(mode):
    x = torch.randn(2, 3)
    jitted = _jit(_restarted)
    found = (normed(jitted) if mode == "normed" else jitted)(x)
    torch.testing.assert_close(found.backing if isinstance(found, NormedTensor) else found, _restarted(x).detach())


def test_requires_grad_starts_no_gradient_of_its_own():
    x = torch.randn(2, 3, requires_grad=True)
    found, expected = (torch.autograd.grad(f(x).sum(), x) for f in (_jit(_restarted), _restarted))
    torch.testing.assert_close(found, expected)


def test_requires_grad_of_an_input_is_not_taken_back():
    def program(x, wanted):
        return x.requires_grad_(wanted) * 2

    for has in (True, False):
        x = torch.randn(3, requires_grad=has)
        torch.testing.assert_close(_jit(program)(x, has), 2 * x)
        if not has:  # as tests/subclass/test_flags_of_inputs.py has it in detail
            torch.testing.assert_close(_jit(program)(x, True), 2 * x)
            assert x.requires_grad
            continue
        with pytest.raises(UnsupportedOpError, match="of an input of the jitted function, for which it is True"):
            _jit(program)(x, not has)
    with pytest.raises(RuntimeError, match="leaf variables"):
        _jit(lambda x: (x * 2).requires_grad_(False))(torch.randn(3, requires_grad=True))


def _remainder_in_place(t):
    y = t * 3
    y %= 2
    return y


def _floor_in_place(t):
    y = t * 3
    y //= 2
    return y


def _bits_in_place(t):
    y = t * 3
    y &= 6
    y |= 1
    y ^= 2
    y <<= 2
    y >>= 1
    return y


_OPERATORS = {
    "remainder": (lambda t: t % 2, A),
    "remainder of a number": (lambda t: 3 % t, A),
    "of integers": (lambda t: (7 % t, t % 2), WHOLE),
    "positive": (lambda t: +t * 2, A),
    "broadcast_to sizes": (lambda t: t.broadcast_to(2, 3, 3) + t.sum().broadcast_to(()), A),
    "diagonal of a tall one": (lambda t: t.repeat(3, 1).fill_diagonal_(2, wrap=True), A),
    "diagonal of a wide one": (lambda t: t.repeat(1, 3).fill_diagonal_(2, wrap=True), A),
    "diagonal of a tall one, once": (lambda t: t.repeat(3, 1).fill_diagonal_(2), A),
    "diagonal of three dimensions": (lambda t: t.repeat(3, 1, 1).fill_diagonal_(2), A),
    "remainder in place": (_remainder_in_place, A),
    "floor in place": (_floor_in_place, WHOLE),
    "bits in place": (_bits_in_place, WHOLE),
}


@pytest.mark.parametrize("name", _OPERATORS)
@pytest.mark.parametrize("transform", [CheckpointTransform, NormTransform])
def test_operators_that_thunder_lacks(name, transform):
    f, t = _OPERATORS[name]
    torch.testing.assert_close(thunder.jit(f, transforms=[transform()])(t.clone()), f(t.clone()))
