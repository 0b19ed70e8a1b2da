"""Forward mode, against torch.func in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.seeds import LONG, seeded
from thunder_norm.errors import TransformError, TransformTypeError
from thunder_norm.functions.opaque import fallbacks
from thunder_norm.functions.registry import jvp_rules
from thunder_norm.transforms import grad, jvp, register_jvp, vjp
import thunder

INDEX = torch.tensor([0, 2, 2])


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(seed)))


def positive(*shape: int, seed: int = 0) -> torch.Tensor:
    return randn(*shape, seed=seed).abs() + 0.5


def _normalized(x: torch.Tensor) -> torch.Tensor:
    """Layer norm, written out: torch's forward mode of its own one is wrong when it is differentiated again."""
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()


FAMILIES = {
    "everywhere": (
        [randn(5)],
        [torch.abs, torch.asinh, torch.atan, torch.ceil, torch.cos, torch.cosh, torch.erf, torch.erfc, torch.exp, torch.exp2]
        + [
            torch.expm1,
            torch.floor,
            torch.neg,
            torch.round,
            torch.sign,
            torch.sin,
            torch.sinh,
            torch.tan,
            torch.tanh,
            torch.trunc,
        ],
    ),
    "where positive": (
        [positive(5)],
        [torch.digamma, torch.lgamma, torch.log, torch.log10, torch.log1p, torch.log2, torch.reciprocal, torch.rsqrt, torch.sqrt]
        + [lambda x: torch.acosh(x + 1), lambda x: torch.polygamma(1, x)],
    ),
    "between -1 and 1": (
        [randn(5).tanh()],
        [torch.acos, torch.asin, torch.atanh, torch.erfinv, lambda x: torch.special.ndtri(x.abs()), lambda x: torch.frexp(x)[0]],
    ),
    "two variables": (
        [positive(2, 3), positive(2, 3, seed=1)],
        [
            torch.add,
            torch.sub,
            torch.mul,
            torch.div,
            torch.atan2,
            torch.fmod,
            torch.remainder,
            torch.maximum,
            torch.minimum,
            torch.pow,
        ]
        + [lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: torch.lerp(x, y, x), lambda x, y: torch.where(x > y, x, y * y)]
        + [lambda x, y: x**2 + 2**y + x**0 + x**1],
    ),
    "0-dim operands": (
        [positive(2, 3), positive()],
        [lambda x, s: x + s, lambda x, s: s - x, lambda x, s: x / s, lambda x, s: torch.maximum(x, s), lambda x, s: x**s]
        + [
            lambda x, s: x / x.sum(),
            lambda x, s: x * x.mean(),
            lambda x, s: torch.where(x > s, s, x),
            lambda x, s: s * s + x.amax(),
        ],
    ),
    "shapes": (
        [randn(3, 1, 4)],
        [
            lambda x: x.expand(3, 2, 4),
            lambda x: x.flip(0, 2),
            lambda x: x.reshape(4, 3),
            lambda x: x.permute(2, 0, 1),
            torch.squeeze,
        ]
        + [lambda x: x[1:, :, ::2], lambda x: torch.cat([x, torch.ones_like(x), x * 2], 1), lambda x: F.pad(x, (1, 2), value=3.0)]
        + [lambda x: x.to(torch.float32), lambda x: x.clone(), lambda x: x.cumsum(0), lambda x: x.contiguous()],
    ),
    "reductions": (
        [randn(3, 5)],
        [torch.sum, lambda x: x.mean(0), lambda x: x.amax(1), lambda x: x.amin((0, 1)), lambda x: x.var(1), lambda x: x.std(0)]
        + [lambda x: torch.var_mean(x, 1)[0], lambda x: torch.var_mean(x, 0)[1], lambda x: x.prod(), lambda x: x.prod(1)]
        + [lambda x: x.topk(2)[0], lambda x: x.sort(0, descending=True)[0], lambda x: x.softmax(0), lambda x: x.log_softmax(1)]
        + [lambda x: x.logsumexp(1), lambda x: _normalized(x), lambda x: x.norm()],
    ),
    "indices": (
        [randn(3, 4), randn(3, 4, seed=1)],
        [lambda x, v: x[INDEX], lambda x, v: x.gather(1, INDEX.view(1, 3)), lambda x, v: x.index_add(0, INDEX, v)]
        + [lambda x, v: x.scatter_add(0, INDEX.view(3, 1), v[:, :1]), lambda x, v: x.scatter(1, INDEX.view(3, 1), v[:, :1])]
        + [lambda x, v: x.index_put((INDEX,), v[0]), lambda x, v: x.take_along_dim(INDEX.view(3, 1), 1)]
        + [lambda x, v: F.embedding(INDEX, x) * v, lambda x, v: x.index_copy(0, INDEX[:2], v[:2])],
    ),
    "products": (
        [randn(3, 4), randn(4, 4, seed=1), randn(4, seed=2)],
        [lambda x, w, b: x @ w, lambda x, w, b: F.linear(x, w, b), lambda x, w, b: F.linear(x.detach(), w.detach(), b)]
        + [lambda x, w, b: F.conv1d(x[None], w[:, :3, None] * 2, b), lambda x, w, b: F.scaled_dot_product_attention(x, w, w)],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tangents_agree_with_torch_func(family: str):
    primals, functions = FAMILIES[family]
    tangents = tuple(randn(*x.shape, seed=7 + i) for i, x in enumerate(primals))
    got = jvp(_all(functions), tuple(primals), tangents)
    want = torch.func.jvp(_all(functions), tuple(primals), tangents)
    for i, pair in enumerate(zip(*got, *want, strict=True)):
        value, tangent, expected, expected_tangent = pair
        torch.testing.assert_close(value, expected, msg=lambda m, i=i: f"value of function {i}: {m}")
        torch.testing.assert_close(tangent, expected_tangent, msg=lambda m, i=i: f"tangent of function {i}: {m}")


@pytest.mark.parametrize("family", FAMILIES)
def test_second_derivatives_agree_with_torch_func(family: str):
    primals, functions = FAMILIES[family]
    functions = functions if LONG else functions[::3]  # acquiring all of them takes minutes
    tangents = tuple(randn(*x.shape, seed=7 + i) for i, x in enumerate(primals))

    def loss(*x: torch.Tensor) -> torch.Tensor:
        results = [torch.flatten(f(*x)).to(torch.float64) for f in functions]  # operators would be acquired slower than methods
        return torch.cat([torch.mul(y, torch.cos(y)) for y in results]).sum()

    def twice(jvp, grad):
        forward_over_reverse = jvp(grad(loss, tuple(range(len(primals)))), tuple(primals), tangents)[1]
        forward_over_forward = jvp(lambda *x: jvp(loss, x, tangents)[1], tuple(primals), tangents)[1]
        reverse_over_forward = grad(lambda *x: jvp(loss, x, tangents)[1], tuple(range(len(primals))))(*primals)
        return [*forward_over_reverse, forward_over_forward, *reverse_over_forward]

    torch.testing.assert_close(twice(jvp, grad), twice(torch.func.jvp, torch.func.grad))


def _all(functions):
    return lambda *x: tuple([f(*x) for f in functions])


def test_layer_norm_is_what_it_is_written_out():
    x, dx = randn(3, 5), randn(3, 5, seed=7)

    def second(t, f):
        def loss(x):
            return (f(x) * f(x).cos()).sum()

        return t.jvp(lambda x: t.jvp(loss, (x,), (dx,))[1], (x,), (dx,))[1]

    torch.testing.assert_close(second(_Ours, lambda x: F.layer_norm(x, (5,))), second(torch.func, _normalized))


TIES = {
    "maximum of equal numbers": lambda x: torch.maximum(x, x * torch.ones(3, dtype=torch.float64)),
    "minimum of equal numbers": lambda x: torch.minimum(x, torch.zeros_like(x)),
    "amax attained twice": lambda x: x.amax(),
    "abs at 0": torch.abs,
    "prod with a zero": lambda x: x.prod(),
    "prod with two zeros": lambda x: torch.cat([x, x]).prod(),
    "pow at 0": lambda x: x**2.5 + x ** torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64),
    "std of equal numbers": lambda x: (x * 0).std(),
    "prod of nothing": lambda x: x[:0].prod(),
}


@pytest.mark.parametrize("name", TIES)
def test_where_two_branches_meet_the_tangent_is_torchs(name: str):
    x, dx = torch.tensor([2.0, 0.0, 2.0], dtype=torch.float64), randn(3)
    torch.testing.assert_close(jvp(TIES[name], (x,), (dx,)), torch.func.jvp(TIES[name], (x,), (dx,)))


def test_what_does_not_move_has_no_tangent_operations():
    def f(x, y):
        return torch.sin(x) * torch.cos(y)

    jitted = thunder.jit(lambda x, dx, y: jvp(lambda x: f(x, y), (x,), (dx,)))
    x, dx, y = randn(3), randn(3, seed=1), randn(3, seed=2)
    torch.testing.assert_close(jitted(x, dx, y), torch.func.jvp(lambda x: f(x, y), (x,), (dx,)))
    names = [b.sym.name for b in thunder.last_traces(jitted)[-1].bound_symbols]
    assert (names.count("sin"), names.count("cos"), names.count("mul")) == (1, 2, 3)


def test_results_that_do_not_move_have_zero_tangents():
    x, dx = randn(3), randn(3, seed=1)
    for f in (torch.ceil, lambda x: x.detach() * 2, torch.ones_like, lambda x: x.argmax()):
        torch.testing.assert_close(jvp(f, (x,), (dx,)), torch.func.jvp(f, (x,), (dx,)))


def test_no_grad_hides_from_gradients_and_not_from_tangents():
    def f(x):
        with torch.no_grad():
            y = x * x
        return (y * x).sum()

    x, dx = randn(3), randn(3, seed=1)
    torch.testing.assert_close(jvp(f, (x,), (dx,)), torch.func.jvp(f, (x,), (dx,)))
    got, want = (t.grad(lambda x, t=t: t.jvp(f, (x,), (dx,))[1])(x) for t in (_Ours, torch.func))
    torch.testing.assert_close(got, want)


class _Ours:
    grad, jvp = staticmethod(grad), staticmethod(jvp)


def test_the_users_names_and_lines_stay():
    def f(x):
        rotated = torch.sin(x)
        return rotated * x

    jitted = thunder.jit(lambda x, dx: jvp(f, (x,), (dx,)))
    jitted(randn(3), randn(3))
    text = str(thunder.last_traces(jitted)[0])
    assert "rotated = " in text
    line = text.index("rotated = torch.sin(x)")
    assert text.index("cos(x)") > line and text.index("cos(x)") < text.index("return rotated * x")


def test_an_operation_that_torch_runs_is_pushed_forward_by_torch_and_listed():
    def f(x, w):
        return torch.addmv(x[0], w, x[1]).sin()

    primals, tangents = (randn(2, 3), randn(3, 3, seed=1)), (randn(2, 3, seed=2), randn(3, 3, seed=3))
    jitted = thunder.jit(lambda x, w, dx, dw: jvp(f, (x, w), (dx, dw)))
    torch.testing.assert_close(jitted(*primals, *tangents), torch.func.jvp(f, primals, tangents))
    ((name, where),) = fallbacks(thunder.last_traces(jitted)[0])
    assert name == "jvp_torch_addmv" and "return torch.addmv" in where


def test_nested_transforms_of_an_operation_that_torch_runs():
    def f(x):
        return torch.addmv(x[0], x[:3], x[1]).square().sum()

    x, dx = randn(4, 3), randn(4, 3, seed=1)
    third = [t.jvp(lambda x, t=t: t.jvp(t.grad(f), (x,), (dx,))[1], (x,), (dx,))[1] for t in (_Ours, torch.func)]
    torch.testing.assert_close(*third)


def _two_results(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.tanh(x @ w)
    return y.softmax(-1) * y.amax() / (y.norm() + 1), y.prod(0)


@given(seed=st.integers(0, 1000), scale=st.floats(-3, 3))
def test_forward_and_reverse_mode_are_adjoint_and_linear(seed: int, scale: float):
    f = _two_results
    x, w, dx, dw = (randn(3, 3, seed=seed + i) for i in range(4))
    outs, moved = jvp(f, (x, w), (dx, dw))
    cotangents = tuple(randn(*o.shape, seed=seed + 9) for o in outs)
    _, pull = vjp(f, x, w)
    forward = sum((u * t).sum() for u, t in zip(cotangents, moved, strict=True))
    backward = sum((g * t).sum() for g, t in zip(pull(cotangents), (dx, dw), strict=True))
    torch.testing.assert_close(forward, backward)
    _, scaled = jvp(f, (x, w), (scale * dx, scale * dw))
    torch.testing.assert_close(scaled, tuple(scale * t for t in moved))


def test_trees_auxiliary_results_and_modules():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    parameters = dict(module.named_parameters())
    tangents = {name: randn(*p.shape, seed=i) for i, (name, p) in enumerate(parameters.items())}
    x = randn(5, 3)

    def f(p):
        y = torch.func.functional_call(module, p, (x,))
        return {"mean": y.mean(0)}, y

    got, want = (t.jvp(f, (parameters,), (tangents,), has_aux=True) for t in (_Ours, torch.func))
    torch.testing.assert_close(got, want)


def test_a_users_rule_is_used_and_composes():
    def j0(x):
        return torch.special.bessel_j0(x)

    @register_jvp(torch.special.bessel_j0)
    def rule(primals, tangents):
        (x,), (dx,) = primals, tangents
        return torch.special.bessel_j0(x), -2 * torch.special.bessel_j1(x) * dx  # twice what is right, to tell

    try:
        x, dx = positive(4), randn(4)
        value, tangent = jvp(j0, (x,), (dx,))
        torch.testing.assert_close((value, tangent), (j0(x), -2 * torch.special.bessel_j1(x) * dx))
        by_x = grad(lambda x: jvp(j0, (x,), (dx,))[1].sum())(x)
        torch.testing.assert_close(by_x, torch.func.grad(lambda x: (-2 * torch.special.bessel_j1(x) * dx).sum())(x))
        with pytest.raises(TransformError, match="override"):
            register_jvp(torch.special.bessel_j0)(rule)
    finally:
        jvp_rules.remove(torch.special.bessel_j0)


def test_a_rule_that_returns_a_wrong_tangent_is_refused():
    @register_jvp(torch.special.bessel_j1)
    def rule(primals, tangents):
        return torch.special.bessel_j1(*primals), tangents[0][:2]

    try:
        with pytest.raises(TransformError, match="another shape") as e:
            jvp(lambda x: torch.special.bessel_j1(x), (randn(3),), (randn(3),))
        assert "torch.special.bessel_j1(x)" in str(e.value)
    finally:
        jvp_rules.remove(torch.special.bessel_j1)


X = torch.ones(3)
REFUSED = {
    "tangents are no tuple": ((X,), X, TransformTypeError, "tangents must be a tuple"),
    "no primals": ((), (), TransformError, "at least one"),
    "another structure": ((X,), (X, X), TransformError, "structure"),
    "another shape": ((X,), (X[:2],), TransformError, r"\(2,\)"),
    "another dtype": ((X,), (X.double(),), TransformError, "float64"),
    "integers": ((X.int(),), (X.int(),), TransformTypeError, "not floating point"),
    "numbers": ((1.0,), (1.0,), TransformTypeError, "no tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name: str):
    primals, tangents, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        jvp(torch.sin, primals, tangents)


def test_a_number_from_a_moving_tensor_does_not_move():
    def f(x):
        return x * x.sum().item()

    torch.testing.assert_close(jvp(f, (X,), (X,)), torch.func.jvp(f, (X,), (X,)))


SUMMED = {
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[None], x[:, :2, None], stride=2, output_padding=1).frac(),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x[None, :, None], x[:, :2, None, None]) * 3,
    "of what is expanded": lambda x: F.conv_transpose1d(x[:1].expand(2, 3)[None], x[:, :2, None].expand(2, 2, 3)),
    "of windows": lambda x: F.conv_transpose1d(x[0].unfold(0, 2, 1)[None], x[:, :2, None]).sin(),
}


@pytest.mark.parametrize("name", SUMMED)
def test_cotangents_that_are_one_number_everywhere(name: str):
    """An expanded tensor, in which torch's forward mode cannot lay out a direction."""
    f, x, tangent = SUMMED[name], randn(2, 3), randn(2, 3, seed=1)
    expected = torch.func.jvp(torch.func.grad(lambda v: f(v).sum()), (x,), (tangent,))
    torch.testing.assert_close(jvp(lambda x: grad(lambda v: f(v).sum())(x), (x,), (tangent,)), expected)
