"""``torch.func``'s transforms in programs in which torch's autograd follows wrappers: eager's values and gradients, to second order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_flatten

import thunder_norm.transforms as T
from tests.fuzz.wrapper_classes import Interval
from tests.fuzz.wrapper_formats import BlockQuantised, LowRank
from tests.fuzz.wrapper_runs import differences
from tests.seeds import seeded
from tests.transform_oracles import assert_same, float64
from thunder_norm.errors import TransformError
import thunder

LAYER = torch.nn.Linear(3, 3)


def _closure(x: Any) -> Any:
    y, plain = x * 2, torch.ones(3, dtype=torch.float64)
    return func.grad(lambda v: (v * y * plain).sum())(x)


def _default(x: Any) -> Any:
    def g(v: Any, s: Any = x.detach().sum()) -> Any:  # noqa: B008 - a default of the program
        return (v * s).sum()

    return func.grad(g)(x)


def _vjp(x: Any) -> Any:
    out, pullback, aux = func.vjp(lambda v, w: (v * w, v.sin()), x, x + 1, has_aux=True)
    return out, pullback(torch.ones_like(out)), pullback(out), aux


def _in_place(x: Any) -> Any:
    def g(v: Any) -> Any:
        w = v * 1
        w.add_(1)
        return (w * w).sum()

    return func.grad(g)(x)


def _without_gradients(x: Any) -> Any:
    with torch.no_grad():
        return func.grad(lambda v: (v * v).sum())(x)


class _Learning(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x - 0.1 * func.grad(self.loss)(x)

    def loss(self, v: Any) -> Any:
        return (v.sin() * 2).sum()


PROGRAMS: dict[str, Callable] = {
    "vmap": lambda x: func.vmap(lambda v: v.sin() * 2)(x),
    "vmap over one of two": lambda x: func.vmap(lambda v, w: v * w, in_dims=(0, None))(x, torch.ones(2, dtype=torch.float64)),
    "vmap to another dimension": lambda x: func.vmap(lambda v: torch.stack([v, v * 2]), out_dims=1)(x),
    "grad": lambda x: func.grad(lambda v: (v.sin() * v).sum())(x),
    "grad and value": lambda x: func.grad_and_value(lambda v: (v * v).sum())(x),
    "grad with aux": lambda x: func.grad(lambda v: ((v * v).sum(), v.sin()), has_aux=True)(x),
    "grad of grad": lambda x: func.grad(lambda v: (func.grad(lambda u: (u**3).sum())(v) * v).sum())(x),
    "vmap of grad": lambda x: func.vmap(func.grad(lambda v: (v**3).sum()))(x),
    "vjp": _vjp,
    "jvp": lambda x: func.jvp(lambda v: v.sin(), (x,), (x * 2,)),
    "jacrev": lambda x: func.jacrev(lambda v: v.sin())(x),
    "jacfwd": lambda x: func.jacfwd(lambda v: v.sin())(x),
    "a closure": _closure,
    "of a plain tensor": lambda x: func.grad(lambda v: (v * x.sin()).sum())(torch.ones(3, dtype=torch.float64)),
    "a default": _default,
    "in place": _in_place,
    "without gradients": _without_gradients,
    "a method": _Learning(),
}


def _flat(tree: Any) -> list[Any]:
    return [(t.a, t.b) if isinstance(t, TwoTensor) else t for t in tree_flatten(tree)[0]]


def _derivatives(f: Callable, x: Any) -> list[Any]:
    x = TwoTensor(x, x * 2).requires_grad_()
    result = f(x)
    leaves = [t for t in tree_flatten(result)[0] if t.requires_grad]
    first = torch.autograd.grad([t.square().sum() for t in leaves], x, create_graph=True) if leaves else ()
    again = [torch.autograd.grad(g.sin().sum(), x)[0] for g in first if g.requires_grad]
    return [len(leaves), *_flat(result), *_flat(first), *_flat(again)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_torchs_transforms_are_torchs(name: str) -> None:
    f = PROGRAMS[name]
    jitted = thunder.jit(f, transforms=[T.SubclassTransform()])
    for scale in (1, 2):
        found, wanted = _derivatives(jitted, float64(3) * scale), _derivatives(f, float64(3) * scale)
        assert found[0] == wanted[0] and len(found) == len(wanted)
        assert_same(found[1:], wanted[1:])


def _appending(x: Any) -> Any:
    seen = PLACE

    def g(v: Any) -> Any:
        seen.append(v)
        return (v * v).sum()

    return func.grad(g)(x)


PLACE: list = []


def test_what_a_function_changes_is_refused() -> None:
    with pytest.raises(TransformError, match=r"(?s)changes a list.*test_by_torch\.py"):
        thunder.jit(_appending, transforms=[T.SubclassTransform()])(TwoTensor(float64(3), float64(3)).requires_grad_())
    assert not PLACE


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_that_torch_would_take_for_constants_are_refused(requires_grad: bool) -> None:
    """Their gradients in eager mode are wrappers; the result had none."""
    x = TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_(requires_grad)
    jitted = thunder.jit(lambda x: func.vmap(lambda v: v * LAYER.weight[0, 0])(x), transforms=[T.SubclassTransform()])
    with pytest.raises(TransformError, match="wrappers that require grad"):
        jitted(x)
    with torch.no_grad():
        assert_same(jitted(x).a, x.a * LAYER.weight[0, 0])


class _OfItsModule(torch.nn.Module):
    def __init__(self, program: Callable, has_wrappers: bool):
        super().__init__()
        torch.manual_seed(seeded())
        self.inner, self.program = torch.nn.Linear(3, 3), program
        if has_wrappers:
            for name, p in list(self.inner.named_parameters()):
                setattr(self.inner, name, torch.nn.Parameter(TwoTensor(p.detach(), p.detach() * 2)))
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: Any) -> Any:
        return self.program(self, x)


OF_MODULES = {
    "grad": lambda m, x: func.grad(lambda t: (m.inner(t) * m.scale).pow(2).sum())(x),
    "vjp of a module": lambda m, x: func.vjp(m.inner, x)[1](x)[0],
    "jvp": lambda m, x: func.jvp(lambda t: m.inner(t).sin(), (x,), (x,))[1],
    "vmap": lambda m, x: func.vmap(lambda row: m.inner(row).tanh())(x),
    "vmap of grad": lambda m, x: func.vmap(func.grad(lambda row: m.inner(row).tanh().sum()))(x),
    "functional_call": lambda m, x: func.grad(lambda p: func.functional_call(m.inner, p, (x,)).pow(2).sum())(
        dict(m.inner.named_parameters())
    )["weight"],
    "some of its parameters": lambda m, x: func.grad(lambda w: func.functional_call(m.inner, {"weight": w}, (x,)).pow(2).sum())(
        m.inner.weight
    ),
    "per sample": lambda m, x: func.vmap(
        func.grad(lambda p, row: func.functional_call(m.inner, p, (row[None],)).pow(2).sum()), in_dims=(None, 0)
    )(dict(m.inner.named_parameters()), x)["weight"],
}


@pytest.mark.parametrize("kind", ["wrappers", "wrappers as inputs", "wrappers as parameters"])
@pytest.mark.parametrize("name", OF_MODULES)
def test_functions_of_modules_have_the_gradients_of_their_parameters(name: str, kind: str) -> None:
    """Those of ``vmap(grad(f))`` were lost, and said nothing; others were refused."""
    m = _OfItsModule(OF_MODULES[name], has_wrappers=kind != "wrappers as inputs")
    values = torch.arange(6.0).reshape(2, 3) / 5 - 0.4
    x = values if kind == "wrappers as parameters" else TwoTensor(values, values * 2).requires_grad_()
    jm = thunder.jit(m, transforms=[T.SubclassTransform()])
    sources = [m.inner.weight, m.inner.bias, *([x] if x.requires_grad else [])]

    def run(f: Callable) -> Any:
        y = f(x)
        return y.detach(), torch.autograd.grad(y.sum(), sources, allow_unused=True)

    for _ in range(2):
        torch.testing.assert_close(run(jm), run(m))
    assert thunder.cache_misses(jm) == 1


_CLASSES: dict[str, Callable[[], torch.Tensor]] = {
    "LowRank": lambda: LowRank(float64(3, 2), float64(3, 2)),
    "BlockQuantised": lambda: BlockQuantised.of(float64(4, 4)),
    "Interval": lambda: Interval(float64(3, 4), float64(3, 4) + 1),
}
_OF_CLASSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "vmap": lambda x: func.vmap(lambda row: row * 2)(x),
    "vmap beside the whole": lambda x: func.vmap(lambda row: row * x)(x),
    "grad": lambda x: func.grad(lambda t: (t * t).sum())(x),
    "jvp": lambda x: func.jvp(torch.sin, (x,), (x,))[1],
    "vjp": lambda x: func.vjp(torch.sin, x)[1](x)[0],
}


@pytest.mark.parametrize("of", _CLASSES)
@pytest.mark.parametrize("name", _OF_CLASSES)
def test_classes_that_are_no_sums_of_their_parts_are_transformed_as_a_whole(name: str, of: str) -> None:
    """`vmap` of a product of two matrices multiplied rows of one with rows of the other; the others were refused."""
    torch.manual_seed(seeded())
    x = _CLASSES[of]()
    jitted = thunder.jit(_OF_CLASSES[name], transforms=[T.SubclassTransform()])
    for _ in range(2):
        assert list(differences(jitted(x), _OF_CLASSES[name](x))) == []
    assert thunder.cache_misses(jitted) == 1


def test_mapping_over_parts_that_are_no_rows_of_the_whole_is_refused_beside_plain_tensors_with_gradients() -> None:
    x, y = _CLASSES["LowRank"](), float64(3).requires_grad_()
    jitted = thunder.jit(lambda x, y: func.vmap(lambda row: (row * 2).dense() * y)(x), transforms=[T.SubclassTransform()])
    with pytest.raises(TransformError):
        jitted(x, y)
