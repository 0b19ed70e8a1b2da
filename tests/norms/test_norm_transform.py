"""`NormTransform` in traces: real and normed mode, agreement with eager mode, and what users see."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten

from tests.norms.norm_models import Net, Tied, assert_same_normed, jit, leaves_for
from tests.seeds import seeded
from thunder_norm import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSTensor,
    normed,
    with_perturbation,
)
from thunder_norm.errors import (
    NormMismatchError,
)
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.transforms import NormTransform
import thunder

# -- eager and traced agree ------------------------------------------------------------------------------------------------


def attention(x):
    q, k, v = x.chunk(3, -1)
    scores = (q @ k.mT / math.sqrt(2)).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(scores, -1) @ v


def residual(x):
    y = F.layer_norm(x, (6,))
    x = x + 0.5 * F.gelu(y)
    return torch.cat([x, y], -1).mean(-1), x.reshape(5, 12), y.norm(dim=-1)


def gates(x):
    a, b = x[..., :3], x[..., 3:]
    return torch.where(a > b, F.silu(a) * b, torch.maximum(a, b).tanh()).clamp(-2, 1)


def images(x):
    y = F.conv2d(x.reshape(1, 2, 5, 6), torch.ones(3, 2, 3, 3) / 18, padding=1)
    return F.max_pool2d(F.relu(y), 2), F.adaptive_avg_pool2d(y, 1).flatten(1)


PROGRAMS = {"attention": attention, "residual": residual, "gates": gates, "images": images}


@pytest.mark.parametrize("name", PROGRAMS)
def test_eager_and_traced_agree_to_the_last_bit(name):
    program = PROGRAMS[name]
    x = with_perturbation(RMSTensor.of(torch.randn(2, 5, 6)))
    y, want = jit(program)(x), program(x)
    assert_same_normed(y, want)
    for a, b in zip(tree_flatten(y)[0], tree_flatten(want)[0], strict=True):
        (got,) = torch.autograd.grad(a.perturbation_size, x.perturbation_size, retain_graph=True)
        (expected,) = torch.autograd.grad(b.perturbation_size, x.perturbation_size, retain_graph=True)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


@pytest.fixture(scope="module")
def model() -> Net:
    """Shared by tests that only read it."""
    torch.manual_seed(seeded(1))
    return Net()


@pytest.mark.parametrize("mode", ["bound", "typical", "modula"])
@pytest.mark.parametrize("policy", ["unit", "measured", "given"])
def test_policies_and_modes_agree_with_eager(model, policy, mode):
    x = with_perturbation(RMSTensor.of(torch.randn(4, 6)))
    parameters = leaves_for(model) if policy == "given" else policy
    # with gradients LAPACK computes singular vectors too, and the last bit of the singular values is another
    with torch.set_grad_enabled(policy != "measured"):
        y = jit(model, parameters=parameters, mode=mode)(x)
        want, _ = run_eagerly(model, (x,), {}, policy=parameters, mode=mode)
    assert_same_normed(y, want)


def test_plain_eager_mode_measures_parameters_as_well(model):
    x = RMSTensor.of(torch.randn(4, 6))
    with torch.no_grad():
        assert_same_normed(jit(model)(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_of_the_data(dtype):
    model = Net().to(dtype)
    x = RMSTensor.of(torch.randn(4, 6, dtype=dtype))
    with torch.no_grad():
        y = jit(model)(x)
        assert_same_normed(y, model(x))
    assert y.dtype is dtype and y.norm_size.dtype is torch.float64
    assert RMSTensor.of(y.backing.double()).norm_size <= y.norm_size * (1 + 1e-2)


def test_sizes_bound_the_actual_values(model):
    jm = jit(model)
    for scale in (0.0, 1e-3, 1.0, 100.0):
        x = RMSTensor.of(scale * torch.randn(4, 6))
        y = jm(x)
        assert RMSTensor.of(y.backing).norm_size <= y.norm_size * (1 + 1e-5)
    assert thunder.cache_misses(jm) == 1


# -- real mode -------------------------------------------------------------------------------------------------------------


def symbol_names(jitted: Callable) -> list[list[str]]:
    """Names of the bound symbols of each different trace of the last compilation."""
    traces = list({id(t): t for t in thunder.last_traces(jitted)}.values())
    return [[b.sym.name for b in t.bound_symbols] for t in traces]


def test_real_mode_without_gradients_is_the_program_thunder_makes_without_us(model):
    x = torch.randn(4, 6)
    jm, plain = jit(model), thunder.jit(model)
    with torch.no_grad():
        y, want = jm(x), plain(x)
    assert type(y) is torch.Tensor and torch.equal(y, want)
    assert symbol_names(jm) == symbol_names(plain)


def test_real_mode_with_gradients_begins_as_thunders_and_gives_eagers_numbers(model):
    x = torch.randn(4, 6)
    jm, plain = jit(model), thunder.jit(model)
    y, want = jm(x), model(x)
    plain(x)
    assert type(y) is torch.Tensor and torch.equal(y, want)
    assert symbol_names(jm)[0] == symbol_names(plain)[0]
    got, expected = (torch.autograd.grad(r.sum(), list(model.parameters())) for r in (y, want))
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_real_and_normed_calls_take_turns_without_compiling_again(model):
    jm = jit(model)
    t = torch.randn(4, 6)
    x = RMSTensor.of(t)
    first = (jm(t), jm(x), normed(jm)(t))
    assert thunder.cache_misses(jm) == 3
    for _ in range(2):
        again = (jm(t), jm(x), normed(jm)(t))
        assert_same_normed(again, first)
    assert thunder.cache_misses(jm) == 3 and thunder.cache_hits(jm) == 6


def test_kinds_elem_dims_shapes_and_perturbations_are_guarded():
    jf = jit(lambda x: F.relu(x) * 2)
    t = torch.randn(4, 6)
    variants = [
        t,
        RMSTensor.of(t),
        RMSTensor.of(t, ()),
        LinfTensor.of(t),
        RMSTensor.of(t, (0,)),
        L2Tensor.of(t),
        with_perturbation(RMSTensor.of(t)),
        RMSTensor(1.0, backing=t, norm_size_requires_grad=True),
        RMSTensor.of(t[:2]),
        RMSTensor.of(t.double()),
    ]
    for i, x in enumerate(variants):
        assert_same_normed(jf(x), F.relu(x) * 2)
        assert thunder.cache_misses(jf) == i + 1
    for x in variants:
        assert_same_normed(jf(x), F.relu(x) * 2)
    assert thunder.cache_misses(jf) == len(variants)
    assert jf(RMSTensor(3.0, backing=t)).norm_size.item() == 6  # another size is no other program
    assert thunder.cache_misses(jf) == len(variants)


# -- normed() --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    """Some tokens."""
    return torch.tensor([[0, 1, 6], [2, 2, 5]])


def test_normed_runs_a_model_of_token_ids_in_normed_mode(ids):
    model = Tied()
    jm = jit(model)
    y, plain = normed(jm)(ids), jm(ids)
    assert isinstance(y, NormedTensor) and type(plain) is torch.Tensor
    torch.testing.assert_close(y.backing, plain)
    assert type(y).of(plain, y.elem_dims).norm_size <= y.norm_size * (1 + 1e-5)
    with torch.no_grad():
        assert_same_normed(normed(jm)(ids), run_eagerly(model, (ids,), {}, policy="measured", mode="bound")[0])


def test_normed_needs_a_norm_transform(model):
    for target in (model, thunder.jit(model), len):
        with pytest.raises(NormMismatchError, match=r"transforms=\[NormTransform\(\)\]"):
            normed(target)


def test_normed_passes_arguments_through(model):
    def f(x, *, scale):
        return x * scale

    jf = jit(f)
    x = RMSTensor.of(torch.ones(3))
    assert normed(jf)(x, scale=-2.0).norm_size.item() == 2
    assert normed(jit(model))(torch.ones(2, 6)).shape == (2, 3)


# -- what users see --------------------------------------------------------------------------------------------------------


def test_the_first_trace_reads_as_the_users_program():
    def f(x, w):
        y = F.linear(x, w)
        return F.relu(y)

    jf = jit(f)
    jf(RMSTensor.of(torch.randn(4, 6)), torch.randn(3, 6))
    text = str(thunder.last_traces(jf)[0])
    assert "def computation(x_backing, x_norm_size, w)" in text
    assert "RMSToRMSTensor.of(w)" in text
    assert "RMSTensor.linear(" in text and "RMSTensor.relu(" in text
    assert "y = F.linear(x, w)" in text  # the user's line, as a comment
    assert text.index("RMSToRMSTensor.of") < text.index("RMSTensor.linear(") < text.index("RMSTensor.relu(")
    names = [b.sym.name for b in thunder.last_traces(jf)[0].bound_symbols]
    assert names[-4:] == ["RMSToRMSTensor.of", "RMSTensor.linear", "RMSTensor.relu", "python_return"]


def test_the_computation_takes_and_returns_plain_tensors_only(model):
    jm = jit(model)
    jm(RMSTensor.of(torch.randn(4, 6)))
    for trace in thunder.last_traces(jm):
        assert not any("flatten" in b.sym.name for b in trace.bound_symbols)
        for p in trace.args:
            assert type(p).__name__ == "TensorProxy"


def test_norm_arithmetic_is_fused():
    def f(x):
        for _ in range(10):
            x = F.relu(x * 0.5) + 0.25
        return x

    jf = jit(f)
    x = RMSTensor.of(torch.randn(4, 6))
    assert_same_normed(jf(x), f(x))
    names = [b.sym.name for b in thunder.last_traces(jf)[-1].bound_symbols]
    assert sum(n.startswith("NormFusion") for n in names) <= 2
    assert len([n for n in names if n in ("mul", "add", "relu", "where", "gt")]) <= 40  # the data's own


def test_repr():
    assert repr(NormTransform(parameters="unit")) == "NormTransform(parameters='unit', mode='bound')"


def test_a_norm_is_computed_by_l1_l2_and_operators_alike():
    def f(x, y, w):
        return x * 2, y - y, F.linear(x, w)

    t = torch.randn(3, 4)
    for kind in (L1Tensor, L2Tensor, LinfTensor):
        arguments = (RMSTensor.of(t), kind.of(t), RMSToRMSTensor.of(torch.randn(5, 4)))
        assert_same_normed(jit(f)(*arguments), f(*arguments))


def test_dropout_draws_what_eager_mode_draws_where_parameters_require_grad():
    torch.manual_seed(seeded(0))
    linear, x = torch.nn.Linear(3, 3), torch.randn(2, 3)
    f = lambda x: F.dropout(linear(x), 0.5)  # noqa: E731
    jitted = thunder.jit(f, transforms=[NormTransform()])
    found = []
    for run in (lambda: f(x), lambda: jitted(RMSTensor.of(x)).backing):
        torch.manual_seed(seeded(1))
        out = run()
        found.append((out, torch.autograd.grad(out.square().sum(), linear.weight), torch.get_rng_state()))
    torch.testing.assert_close(*found)
