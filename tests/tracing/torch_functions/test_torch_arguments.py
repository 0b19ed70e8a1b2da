"""Arguments as torch reads them, on plain tensors and on normed ones, in eager mode's words: types of Python as dtypes, names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import NormedTensor, RMSTensor
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import (
    CheckpointTransform,
    NormTransform,
    ProfileTransform,
    SplitBiasTransform,
    SubclassTransform,
    grad,
)
import thunder

PROGRAMS = {
    "zeros": lambda x: x + torch.zeros(3, dtype=int),
    "ones": lambda x: torch.ones(3, dtype=bool) & (x > 0),
    "full": lambda x: x * torch.full((3,), 2, dtype=float),
    "eye": lambda x: torch.eye(3, dtype=int),
    "zeros_like": lambda x: torch.zeros_like(x, dtype=int),
    "arange": lambda x: torch.arange(3, dtype=float) + x,
    "tensor": lambda x: torch.tensor([1, 2, 3], dtype=float) + x,
    "new_zeros": lambda x: x.new_zeros(3, dtype=int),
    "empty": lambda x: torch.empty(3, dtype=int).zero_(),
    "sum": lambda x: x.sum(dtype=float),
    "cumsum": lambda x: x.cumsum(0, dtype=float),
    "to": lambda x: x.to(float),
    "to, by name": lambda x: x.to(dtype=float),
    "softmax": lambda x: torch.softmax(x, 0, dtype=float),
    "a default of the user's": lambda x, kind=float: x.to(kind),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_types_as_dtypes(name):
    torch.manual_seed(seeded(0))
    x = torch.randn(3)
    wanted = PROGRAMS[name](x)
    for given in (x, RMSTensor.of(x)):
        found = thunder.jit(PROGRAMS[name], transforms=[NormTransform()])(given)
        torch.testing.assert_close(found.backing if isinstance(found, NormedTensor) else found, wanted)


NAMED_TYPES = {
    "its own": lambda x: x.sin().type(x.type()),
    "of fewer bits": lambda x: x.type("torch.HalfTensor"),
    "by name": lambda x: x.type(dtype="torch.DoubleTensor"),
}


@pytest.mark.parametrize("name", NAMED_TYPES)
def test_types_of_tensors_by_their_names(name):
    torch.manual_seed(seeded(0))
    x, program = torch.randn(3), NAMED_TYPES[name]
    jf, wanted = thunder.jit(program, transforms=[NormTransform()]), program(x)
    torch.testing.assert_close(jf(x), wanted)
    for result in (jf(RMSTensor.of(x)), program(RMSTensor.of(x))):
        torch.testing.assert_close(result.backing, wanted)
        assert wanted.double().square().mean().sqrt() <= result.norm_size * (1 + 1e-6)


CONDITIONS = {
    "function": lambda x, m: torch.where(m, x, -x),
    "function, by name": lambda x, m: torch.where(input=x, condition=m, other=x * 2),
    "with a number": lambda x, m: torch.where(m, x, 0.5),
    "method": lambda x, m: x.where(m, x * 2),
    "method, by name": lambda x, m: x.where(condition=m, other=x * 2),
    "of the program": lambda x, m: torch.where((x > 0).byte() * 2, x, -x) + m,
}


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_of_bytes(name):
    torch.manual_seed(seeded(0))
    x, m = torch.randn(4), torch.tensor([0, 1, 2, 255], dtype=torch.uint8)
    for given in (x, RMSTensor.of(x)):
        found = thunder.jit(CONDITIONS[name], transforms=[NormTransform()])(given, m)
        torch.testing.assert_close(found.backing if isinstance(found, NormedTensor) else found, CONDITIONS[name](x, m))


def test_types_are_no_dtypes_elsewhere():
    def f(x):
        return x * (2 if isinstance(x.shape[0], int) and float("2") == 2 and int is not float else 3)

    assert thunder.jit(f, transforms=[NormTransform()])(torch.ones(3))[0] == 2


NAMED = {
    "linear": lambda x, w, b: F.linear(x, weight=w, bias=b),
    "linear, in another order": lambda x, w, b: F.linear(bias=b.exp(), weight=w, input=x),
    "mul": lambda x, w, b: torch.mul(x, other=2) * torch.add(input=x, other=x, alpha=2),
    "a method": lambda x, w, b: x.sub(other=1).mul(other=x),
    "matmul": lambda x, w, b: torch.matmul(input=x, other=w.mT),
    "softmax": lambda x, w, b: torch.softmax(input=x, dim=1) + F.gelu(input=x, approximate="tanh"),
    "where": lambda x, w, b: torch.where(condition=x > 0, input=x, other=-x),
    "pow": lambda x, w, b: torch.pow(input=x, exponent=2) / torch.sqrt(input=x.abs() + 1),
    "layer_norm": lambda x, w, b: F.layer_norm(input=x, normalized_shape=(4,), weight=w[0]),
    "conv1d": lambda x, w, b: F.conv1d(input=x[None], weight=w[:, :3, None], bias=b),
    "one bias for all outputs": lambda x, w, b: F.linear(input=x, weight=w, bias=b[:1]),
    "addmm": lambda x, w, b: torch.addmm(input=b, mat1=x, mat2=w.mT, beta=0.5),
    "shapes": lambda x, w, b: torch.transpose(input=torch.reshape(input=x, shape=(2, 6)), dim0=0, dim1=1),
    "several": lambda x, w, b: torch.topk(input=x, k=2)[0] * torch.chunk(input=x, chunks=2, dim=1)[0],
}


@pytest.mark.parametrize("make", [SplitBiasTransform, CheckpointTransform, ProfileTransform], ids=lambda t: t.__name__)
@pytest.mark.parametrize("name", NAMED)
def test_arguments_by_torchs_names(name, make):
    torch.manual_seed(seeded(0))
    given = [torch.randn(*shape, requires_grad=True) for shape in ((3, 4), (2, 4), (2,))]
    result, expected = thunder.jit(NAMED[name], transforms=[make()])(*given), NAMED[name](*given)
    torch.testing.assert_close(result, expected)
    gradients = [torch.autograd.grad(y.square().sum(), given, allow_unused=True) for y in (result, expected)]
    torch.testing.assert_close(*gradients)


def test_a_missing_argument_is_an_error():
    with pytest.raises(TypeError):
        thunder.jit(lambda x: torch.mul(input=x), transforms=[SplitBiasTransform()])(torch.ones(2))


def _into_another(x):
    out = torch.empty_like(x)
    returned = torch.add(x, 1, out=out)
    return out * 2, returned


@pytest.mark.parametrize("make", [SplitBiasTransform, CheckpointTransform, NormTransform], ids=lambda t: t.__name__)
def test_out(make):
    x = torch.randn(3, generator=torch.Generator().manual_seed(seeded(0)))
    torch.testing.assert_close(thunder.jit(_into_another, transforms=[make()])(x), _into_another(x))


@pytest.mark.parametrize("make", [SplitBiasTransform, NormTransform], ids=lambda t: t.__name__)
def test_out_of_the_older_norm(make):
    def f(x):
        by_position, column, whole = torch.empty(3), torch.zeros(3, 2), torch.empty(())
        torch.norm(x, 2, 1, False, by_position)
        torch.norm(x, p=1, dim=1, out=column[:, 1])
        torch.norm(x, "nuc", out=whole)
        return by_position, column, whole, x.norm(2, 1, False, torch.float64), torch.norm(x, 2, 1, False, None, torch.float64)

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seeded(0)))
    torch.testing.assert_close(thunder.jit(f, transforms=[make()])(x), f(x))


def test_out_of_another_dtype_is_refused():
    with pytest.raises(UnsupportedOpError, match="out= of another shape or dtype"):
        thunder.jit(lambda x: torch.add(x, 1, out=x.double()), transforms=[CheckpointTransform()])(torch.ones(2))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.linalg.matrix_sqrth(input=x @ x.mT + torch.eye(3)).sum(),  # functions that Thunder does not know
        lambda x: torch.linalg.polar(A=x + torch.eye(3) * 5)[0].sum(),
        lambda x: torch.conj_physical(input=x * 2).sum(),
    ]
    if hasattr(torch.linalg, "polar")
    else [lambda x: torch.conj_physical(input=x * 2).sum()],
)
def test_tensors_by_keyword_alone(f):
    x = torch.arange(9.0).view(3, 3).cos().requires_grad_()
    jf = thunder.jit(f, transforms=[SubclassTransform()])
    torch.testing.assert_close(jf(x), f(x))
    wanted = torch.func.grad(f)(x)
    torch.testing.assert_close(torch.autograd.grad(jf(x), x)[0], wanted)
    torch.testing.assert_close(grad(f)(x), wanted)


FILLED = {
    "zeros": lambda y: torch.zeros(3, 3, out=y),
    "full": lambda y: torch.full((3, 3), 2.0, out=y),
    "empty": lambda y: torch.empty(3, 3, out=y) * 2,
    "eye": lambda y: torch.eye(3, out=y, requires_grad=False),
    "arange": lambda y: torch.arange(3.0, out=y[0]) + y,
    "linspace": lambda y: torch.linspace(0, 1, 3, out=y[:, 0]) + y,
    "randn": lambda y: torch.randn(3, 3, out=y),
    "randint": lambda y: torch.randint(5, (3, 3), out=y),
    "init.eye_": lambda y: torch.nn.init.eye_(y),
}


# torch fills none that requires grad by these
@pytest.mark.parametrize(
    ("name", "has_history"), [(name, h) for name in FILLED for h in (False, True) if not (h and name in ("empty", "randn"))]
)
def test_a_given_tensor_is_filled_by_a_factory(name, has_history):
    found = []
    for transform in (None, SubclassTransform, NormTransform, CheckpointTransform):
        f = FILLED[name] if transform is None else thunder.jit(FILLED[name], transforms=[transform()])
        y = torch.full((3, 3), 0.5, requires_grad=has_history) * 1
        torch.manual_seed(seeded(0))
        result = f(y)
        found.append((result.detach(), y.detach().clone(), torch.tensor([result.requires_grad, y.requires_grad, result is y])))
    for others in found[1:]:
        torch.testing.assert_close(others, found[0])


@pytest.mark.parametrize(
    ("f", "error", "said"),
    [
        (lambda y: torch.zeros(3, dtype=torch.float64, out=y), RuntimeError, "does not match dtype of out parameter"),
        (lambda y: torch.zeros(4, out=y), UnsupportedOpError, "out= of another shape"),
    ],
)
def test_a_given_tensor_that_does_not_fit_is_refused(f, error, said):
    y = torch.ones(3)
    with pytest.raises(error, match=said):
        thunder.jit(f, transforms=[SubclassTransform()])(y)
    assert torch.equal(y, torch.ones(3))
