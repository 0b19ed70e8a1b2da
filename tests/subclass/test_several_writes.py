"""Operators that write into several arguments, or into those given as ``out=``: values, what becomes of each, and its place in autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import SubclassTransform
import thunder

aten = torch.ops.aten


def aminmax(x: Any, a: Any, b: Any) -> Any:
    torch.aminmax(x, dim=0, out=(a, b))
    return a * 1, b * 1, a, b


def sort_into_results(x: Any, a: Any, b: Any) -> Any:
    values, indices = x * 0, (x * 0).long()
    found = torch.sort(x, 0, out=(values, indices))
    return found[0] * 2, values, indices


def into_a_part(x: Any, a: Any, b: Any) -> Any:
    y = x * 1
    torch.mul(a, b, out=y[0])
    return y


def cast(x: Any, a: Any, b: Any) -> Any:
    y = (x * 0).double()
    return torch.exp(x, out=y), y


def under_no_grad(x: Any, a: Any, b: Any) -> Any:
    y = x * 2
    with torch.no_grad():
        torch.exp(x, out=y)
    return y * x, y


def batch_norm(x: Any, a: Any, b: Any) -> Any:
    return aten._native_batch_norm_legit.default(x, None, None, a, b, True, 0.1, 1e-5)[0], a, b


def batch_norm_with_update(x: Any, a: Any, b: Any) -> Any:
    mean, var = a * 1, b * 1
    weight = torch.ones_like(a)
    return aten._batch_norm_with_update.default(x, weight, weight, mean, var, 0.1, 1e-5)[0], mean, var


def rrelu(x: Any, a: Any, b: Any) -> Any:
    noise = torch.zeros_like(x)
    return aten.rrelu_with_noise.default(x, noise, 0.1, 0.3, True), noise


def returned_and_held(x: Any, a: Any, b: Any) -> Any:
    y = x * 1
    return aten.mul_.Tensor(y, 2), y


def lists(x: Any, a: Any, b: Any) -> Any:
    y, z = x[0] * 1, b * 1
    torch._foreach_mul_([y, z], [b, x[1]])
    return y, z


PROGRAMS = [
    aminmax,
    sort_into_results,
    into_a_part,
    cast,
    under_no_grad,
    batch_norm,
    batch_norm_with_update,
    rrelu,
    returned_and_held,
    lists,
]
WITH_OUT = [aminmax, sort_into_results, cast]
PLAIN, WRAPPED = "plain", "TwoTensor"


def seen(t: Any) -> tuple:
    return type(t), t.requires_grad, t.is_leaf, t.grad_fn is not None


def run(f: Callable, kind: str, requires_grad: bool) -> tuple[list, list]:
    torch.manual_seed(seeded(0))
    data = [torch.rand(3, 3), torch.rand(3), torch.rand(3)]
    x, a, b = [TwoTensor(t, t.clone()) if kind == WRAPPED else t for t in data]
    x.requires_grad_(requires_grad)
    torch.manual_seed(seeded(1))
    found = f(x, a, b)
    results = list(found) if isinstance(found, tuple) else [found]
    if requires_grad:
        loss = results[0].sum()
        loss.backward(torch.ones_like(loss))
    tensors = [*results, a, b] + ([] if x.grad is None else [x.grad])
    return [seen(t) for t in [*results, x, a, b]], [t.a if kind == WRAPPED else t.detach() for t in tensors]


@pytest.mark.parametrize("kind", [PLAIN, WRAPPED])
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_what_is_written_into_is_eagers(f: Callable, kind: str) -> None:
    jf = thunder.jit(f, transforms=[SubclassTransform()])
    found, expected = run(jf, kind, False), run(f, kind, False)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("kind", [PLAIN, WRAPPED])
@pytest.mark.parametrize("f", [f for f in PROGRAMS if f not in (*WITH_OUT, into_a_part, rrelu)], ids=lambda f: f.__name__)
def test_each_written_tensor_has_eagers_place_in_autograd(f: Callable, kind: str) -> None:
    jf = thunder.jit(f, transforms=[SubclassTransform()])
    found, expected = run(jf, kind, True), run(f, kind, True)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("kind", [PLAIN, WRAPPED])
@pytest.mark.parametrize("f", WITH_OUT, ids=lambda f: f.__name__)
def test_out_is_not_differentiated(f: Callable, kind: str) -> None:
    for program in (f, thunder.jit(f, transforms=[SubclassTransform()])):
        with pytest.raises(
            RuntimeError,
            match="arguments don't support automatic differentiation|depends on a tensor that requires grad|derivative for .* is not implemented",
        ):
            run(program, kind, True)


def test_out_is_not_resized() -> None:
    def f(x: Any, a: Any, b: Any) -> Any:
        return torch.exp(x, out=a * 1)

    for kind in (PLAIN, WRAPPED):
        with pytest.raises(UnsupportedOpError, match=r"of other shapes than \[\[3, 3\]\](.|\n)*test_several_writes.py"):
            run(thunder.jit(f, transforms=[SubclassTransform()]), kind, False)


_OF_ANOTHER_DTYPE: dict[str, tuple[Callable[..., Any], torch.dtype]] = {
    "casts": (lambda x, out: torch.add(x, 1, out=out), torch.float64),
    "does not cast to this": (lambda x, out: torch.add(x, 1, out=out), torch.int32),
    "casts nothing": (lambda x, out: torch.round(x, out=out), torch.float64),
    "is not said by fakes": (lambda x, out: torch.take(x, torch.arange(9).view(3, 3), out=out), torch.float64),
    "complex": (lambda x, out: torch.complex(x, x, out=out), torch.complex128),
    "products": (lambda x, out: torch.mm(x, x, out=out), torch.float64),
    "computes in it": (lambda x, out: torch.cumsum(x * 1e3, 0, out=out), torch.float16),
    "computes in it, in whole numbers": (lambda x, out: torch.cumprod(x * 3, 1, out=out), torch.int64),
    "sums in it": (lambda x, out: torch.sum(x.expand(3, 3, 3) * 1e3, 0, out=out), torch.float16),
    "averages in it": (lambda x, out: torch.mean(x.expand(3, 3, 3), (0,), out=out), torch.float64),
    "does not average in whole numbers": (lambda x, out: torch.mean(x.expand(3, 3, 3), (0,), out=out), torch.int64),
    "is told another": (lambda x, out: torch.cumsum(x, 0, dtype=torch.float64, out=out), torch.float32),
}


@pytest.mark.parametrize("kind", [PLAIN, WRAPPED])
@pytest.mark.parametrize("f, dtype", _OF_ANOTHER_DTYPE.values(), ids=_OF_ANOTHER_DTYPE)
def test_out_of_another_dtype_is_cast_to_as_torch_does(f: Callable, dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(seeded(0))
    wrapped = (lambda t: TwoTensor(t, t.clone())) if kind == WRAPPED else torch.clone
    x, outs = wrapped(torch.rand(3, 3)), [wrapped(torch.zeros(3, 3, dtype=dtype)) for _ in range(2)]
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    try:
        f(x, outs[0])
    except RuntimeError:
        with pytest.raises(RuntimeError):
            jitted(x, outs[1])
        return
    jitted(x, outs[1])
    torch.testing.assert_close(*map(_plain, outs))


def _plain(t: torch.Tensor) -> torch.Tensor:
    return t.a if isinstance(t, TwoTensor) else t
