"""Wrapper subclasses as people write them (`other_numbers`, `other_layouts`): what eager mode gives, context and inner tensors included, or an error of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclass import other_layouts as layouts
from tests.subclass import other_numbers as numbers
from thunder_norm import RMSTensor
from thunder_norm.errors import ThunderNormError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

randn = torch.randn
INDICES = torch.tensor([[0, 1], [2, 3], [1, 1], [0, 1], [2, 0]])
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "quantity": lambda: numbers.Quantity(randn(3, 4), {"m": 1}),
    "uncertain": lambda: numbers.Uncertain(randn(3, 4), randn(3, 4).abs()),
    "complex as two reals": lambda: numbers.Pairs(randn(3, 4), randn(3, 4)),
    "quantised in groups": lambda: layouts.GroupQuantized.quantize(randn(3, 4)),
    "values and indices": lambda: layouts.Scattered(randn(5), INDICES, (3, 4)),
    "logarithms": lambda: numbers.LogNumbers.of(randn(3, 4)),
    "factors": lambda: layouts.Factors(randn(3, 2), randn(4, 2)),
    "dual": lambda: numbers.Jet(randn(3, 4), randn(3, 4)),
    "dual without tangent": lambda: numbers.Jet(randn(3, 4)),
    "lazily transposed": lambda: layouts.Transposed(randn(4, 3), True),
    "named dimensions": lambda: layouts.Named(randn(3, 4), ("row", "col")),
    "counted": lambda: layouts.Counted(randn(3, 4), 0, ["a"]),
    "replacing": lambda: layouts.Replacing(randn(3, 4)),
    "quantity of uncertain": lambda: numbers.Quantity(numbers.Uncertain(randn(3, 4), randn(3, 4).abs()), {"s": 2}),
    "counted factors": lambda: layouts.Counted(layouts.Factors(randn(3, 2), randn(4, 2))),
    "dual of lazily transposed": lambda: numbers.Jet(
        layouts.Transposed(randn(4, 3), True), layouts.Transposed(randn(4, 3), True)
    ),
    "named and quantised": lambda: layouts.Named(layouts.GroupQuantized.quantize(randn(3, 4)), ("row", "col")),
}


def constructed(x, y, p):
    names, context = x.__tensor_flatten__()
    inner = {n: getattr(x, n) * 1 for n in names}
    z = type(x).__tensor_unflatten__(inner, context, x.shape, x.stride())
    return {"wrapper": z * 2, "inner": getattr(z, names[0]), "number": z.shape[0]}


def in_place(x, y, p):
    x.mul_(2)
    return x * 1


def in_place_on_what_it_made(x, y, p):
    z = x.clone()
    z.add_(y)
    z.mul_(3)
    return z, x


def copied(x, y, p):
    x.copy_(y)
    return x + 0


def views_written(x, y, p):
    z = x.clone()
    z[0].mul_(2)
    z[:, 1] = 0
    return z


def looped(x, y, p):
    for _ in range(3):
        x = x * 2 if isinstance(x, type(y)) else x
    return {"x": x, "others": [y, p], "number": 3}


PROGRAMS: dict[str, Callable] = {
    "elementwise": lambda x, y, p: (x * 2, x + y, x * y, x - y, -x),
    "beside plain tensors": lambda x, y, p: (x * p, p * x),
    "functions": lambda x, y, p: (x.abs(), (x * 0.0).exp(), x.clone()),
    "reductions": lambda x, y, p: (x.sum(), x.sum(0), x.mean(-1, keepdim=True)),
    "products": lambda x, y, p: (x @ p.t(), p.t() @ x, F.linear(p, y)),
    "views": lambda x, y, p: (x.t(), x[0], x[:, 1:3], x.view(-1), x.unsqueeze(0), x.t().t(), x.reshape(2, 6)),
    "joined": lambda x, y, p: (torch.cat([x, y]), torch.stack([x, y])),
    "constructed": constructed,
    "in place": in_place,
    "in place on what it made": in_place_on_what_it_made,
    "copied": copied,
    "views written": views_written,
    "looped": looped,
}


def flat(value: Any) -> list[Any]:
    """What a value consists of: classes, contexts and metadata, and the plain tensors inside."""
    if isinstance(value, dict):
        return [x for k, v in value.items() for x in (k, *flat(v))]
    if isinstance(value, list | tuple):
        return [x for v in value for x in flat(v)]
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        head = (type(value), tuple(names), repr(context), tuple(value.shape), value.dtype, value.requires_grad)
        return [head, *(x for n in names for x in flat(getattr(value, n)))]
    if isinstance(value, torch.Tensor):
        return [(tuple(value.shape), value.dtype, value.requires_grad), value.detach().clone()]
    return [value]


def same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        else:
            assert a == b


def inputs(kind: str, requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seeded(0))
    x, y, p = KINDS[kind](), KINDS[kind](), randn(3, 4)
    return (x.detach().requires_grad_(), y.detach().requires_grad_(), p.requires_grad_()) if requires_grad else (x, y, p)


def jit(f: Callable, transform: type = SubclassTransform) -> Callable:
    return thunder.jit(f, transforms=[transform()])


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_types_and_contexts_are_eager_s(kind, program):
    f = PROGRAMS[program]
    try:
        args = inputs(kind)
        expected = [flat(f(*args)), flat(args)]
    except Exception as e:  # noqa: BLE001 - whatever the class says
        pytest.skip(f"eager mode: {e}")
    jf = jit(f)
    for _ in range(2):
        args = inputs(kind)
        same(flat(jf(*args)), expected[0])
        same(flat(args), expected[1])
    assert thunder.cache_misses(jf) == 1


def first_of(result: Any) -> torch.Tensor:
    leaves = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else (result,)
    return next(t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad)


def gradients(f: Callable, kind: str, count: int) -> list[Any]:
    """Results, and gradients of the first `count` of them, in one backward."""
    args = inputs(kind, requires_grad=True)
    outs = f(*args)
    differentiated = outs[:count] if isinstance(outs, tuple) else (first_of(outs),)
    losses = [(out.abs() if out.dtype.is_complex else out * out).sum() for out in differentiated]
    torch.autograd.backward(losses, [torch.ones_like(loss) * (i + 1) for i, loss in enumerate(losses)])
    return [*flat(outs), *flat([a.grad for a in args])]


def gradients_agree(f: Callable, kind: str, count: int) -> bool:
    """False where eager mode has none."""
    try:
        expected = gradients(f, kind, count)
    except Exception:  # noqa: BLE001 - whatever a class says
        return False
    jf = jit(f)
    for _ in range(2):
        same(gradients(jf, kind, count), expected)
    return True


# All results in one backward, where each has a part in it: of several, those not asked for count as zeros, docs/subclasses.md.
DIFFERENTIATED = {"elementwise": 5, "beside plain tensors": 2, "views": 7, "looped": 1}


@pytest.mark.parametrize("program", DIFFERENTIATED)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_eager_s(kind, program):
    """What eager mode cannot add up of several results is looked at result by result."""
    count = DIFFERENTIATED[program]
    adds_in_place = kind == "dual without tangent"  # eager mode, what reaches x and y: of which this class makes a plain tensor
    if not adds_in_place and gradients_agree(lambda *args: _first(PROGRAMS[program](*args), count), kind, count):
        return
    one_by_one = [i for i in range(count) if not (adds_in_place and (program, i) == ("elementwise", 1))]
    if not [i for i in one_by_one if gradients_agree(lambda *args, i=i: _at(PROGRAMS[program](*args), i), kind, 1)]:
        pytest.skip("eager mode has none")


def _at(outs: Any, i: int) -> Any:
    return outs[i] if isinstance(outs, tuple) else outs


def _first(outs: Any, count: int) -> Any:
    return outs[:count] if isinstance(outs, tuple) else outs


@pytest.mark.parametrize("kind", ["quantity", "uncertain", "dual", "named dimensions", "counted", "lazily transposed"])
def test_second_derivatives_are_eager_s(kind):
    def run(f):
        x, y, _ = inputs(kind, requires_grad=True)
        loss = f(x, y).sum()
        (g,) = torch.autograd.grad(loss, x, torch.ones_like(loss), create_graph=True)
        again = (g * g).sum()
        return flat([g, *torch.autograd.grad(again, (x, y), torch.ones_like(again))])

    same(run(jit(lambda x, y: x * y * x)), run(lambda x, y: x * y * x))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_buffers_are_eager_s(kind):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            x, y, _ = inputs(kind)
            self.x = nn.Parameter(x, requires_grad=False)
            self.register_buffer("y", y)

        def forward(self, p):
            return {"product": self.x * 2, "sum": self.x.t(), "y": self.y, "p": p * 2}

    ours, eager = Module(), Module()
    jitted = jit(ours)
    for _ in range(2):
        same(flat(jitted(torch.ones(2))), flat(eager(torch.ones(2))))
    same(flat(dict(ours.state_dict())), flat(dict(eager.state_dict())))
    for m in (ours, eager):
        m.load_state_dict(m.state_dict())
    same(flat(jitted(torch.ones(2))), flat(eager(torch.ones(2))))


def test_another_context_is_traced_anew():
    jf = jit(lambda x, y: x * y)
    value = torch.ones(2)
    for unit in ({"m": 1}, {"s": 2}, {"m": 1}, {"m": -1}):
        args = numbers.Quantity(value, unit), numbers.Quantity(value, {"m": 1})
        same(flat(jf(*args)), flat(args[0] * args[1]))
    assert thunder.cache_misses(jf) == 3
    tangents = jit(lambda x: x.sin())
    for tangent in (None, value, None):
        x = numbers.Jet(value, tangent)
        same(flat(tangents(x)), flat(x.sin()))
    with pytest.raises(TypeError):
        jit(lambda x, y: x + y)(numbers.Quantity(value, {"m": 1}), numbers.Quantity(value, {"s": 1}))


def test_names_are_translated_by_torch_function():
    def f(x):
        return F.softmax(x, "col"), F.log_softmax(x, dim="row"), x.renamed(row="batch") * 2

    x = layouts.Named(randn(3, 4), ("row", "col"))
    same(flat(jit(f)(x)), flat(f(x)))


def test_beside_normed_tensors():
    normed, x = RMSTensor.of(torch.ones(3, 4)), numbers.Quantity(torch.ones(3, 4), {"m": 1})
    found = jit(lambda n, x: (n * 2, x * 3), NormTransform)(normed, x)
    torch.testing.assert_close(found[0].norm_size, (normed * 2).norm_size)
    same(flat(found[1]), flat(x * 3))


TRANSFORMED: dict[str, Callable] = {
    "grad": lambda x, y, p: torch.func.grad(lambda v: (v * p * v).sum())(x),
    "grad of a plain tensor": lambda x, y, p: torch.func.grad(lambda v: (v * x).sum())(p),
    "value": lambda x, y, p: torch.func.grad_and_value(lambda v: (v * y).sum())(x),
    "vjp": lambda x, y, p: torch.func.vjp(lambda v: v * p, x)[1](y),
    "jvp": lambda x, y, p: torch.func.jvp(lambda v: (v * v).sum(), (x,), (y,)),
    "twice": lambda x, y, p: torch.func.grad(lambda u: torch.func.grad(lambda v: (v * v * v).sum())(u).sum())(x),
    "vmap": lambda x, y, p: torch.func.vmap(lambda v: v * 2)(x),
}


@pytest.mark.parametrize("program", TRANSFORMED)
@pytest.mark.parametrize("kind", [*KINDS, "TwoTensor"])
def test_torchs_transforms_are_eager_s_or_refused(kind, program):
    f = TRANSFORMED[program]

    def made():
        torch.manual_seed(seeded(0))
        return (TwoTensor(randn(3, 4), randn(3, 4)), TwoTensor(randn(3, 4), randn(3, 4)), randn(3, 4))

    args = made() if kind == "TwoTensor" else inputs(kind)
    try:
        expected = flat(f(*args))
    except Exception as e:  # noqa: BLE001
        pytest.skip(f"eager mode: {e}")
    try:
        found = flat(jit(f)(*args))
    except ThunderNormError:
        return
    same(found, expected)


def test_which_of_torchs_transforms_are_run():
    two, x = TwoTensor(randn(3, 4), randn(3, 4)), numbers.Uncertain(randn(3, 4), torch.ones(3, 4))
    quantity, plain = numbers.Quantity(randn(3, 4), {"m": 1}), torch.ones(3, 4)
    programs = [("grad", two), ("twice", two), ("vmap", two), ("grad", x), ("grad", quantity), ("grad of a plain tensor", two)]
    for program, w in programs:
        f = TRANSFORMED[program]
        same(flat(jit(f)(w, w, plain)), flat(f(w, w, plain)))
