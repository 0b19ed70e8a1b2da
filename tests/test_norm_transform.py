"""NormTransform: real and normed mode, policies for parameters, derivatives, errors; everything against eager mode."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten

from tests.seeds import seeded
from tests.sizes import assert_same_size
from thunder_norm import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSTensor,
    annotate,
    normed,
    normed_op,
    sensitivities,
    with_perturbation,
)
from thunder_norm.errors import (
    MissingNormRuleError,
    NormMapKeyError,
    NormMismatchError,
    ThunderNormError,
    UnsupportedOpError,
)
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.transforms import NormTransform


def jit(fn: Callable, **options: Any) -> Callable:
    """`fn` compiled with a NormTransform."""
    return thunder.jit(fn, transforms=[NormTransform(**options)])


class Net(nn.Module):
    """Two layers, in one module because tracing costs by the call; sizes that are no powers of 2, so that roundings show."""

    def __init__(self):
        super().__init__()
        first, second = nn.Linear(6, 10), nn.Linear(10, 3)
        self.w1, self.b1, self.w2, self.b2 = first.weight, first.bias, second.weight, second.bias

    def forward(self, x):
        return F.linear(F.relu(F.linear(x, self.w1, self.b1)), self.w2, self.b2)


def leaves_for(model: nn.Module, size: float = 1.5) -> dict[str, NormedTensor]:
    """A differentiable, movable norm for each parameter."""
    found = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        kind = RMSToRMSTensor if p.ndim == 2 else RMSTensor
        found[name] = with_perturbation(kind(size + i / 8, norm_size_requires_grad=True))
    return found


def assert_same_normed(a: Any, b: Any, *, same_values: bool = True) -> None:
    """Two results of one program: the same kinds, shapes, sizes and values."""
    flat_a, structure_a = tree_flatten(a)
    flat_b, structure_b = tree_flatten(b)
    assert structure_a == structure_b
    for x, y in zip(flat_a, flat_b, strict=True):
        assert type(x) is type(y)
        if isinstance(x, NormedTensor):
            assert x.elem_dims == y.elem_dims and x.shape == y.shape and x.dtype == y.dtype
            assert_same_size(x.norm_size, y.norm_size)
            assert (x.perturbation_size is None) == (y.perturbation_size is None)
            if x.perturbation_size is not None:
                assert_same_size(x.perturbation_size, y.perturbation_size)
            x, y = x.backing, y.backing
        if isinstance(x, torch.Tensor) and same_values:
            torch.testing.assert_close(x, y)


# -- eager and traced agree -----------------------------------------------------------------------------------------------


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


# -- real mode ------------------------------------------------------------------------------------------------------------


def symbol_names(jitted: Callable) -> list[list[str]]:
    """Names of the bound symbols of each different trace of the last compilation."""
    traces = list({id(t): t for t in thunder.last_traces(jitted)}.values())
    return [[b.sym.name for b in t.bound_symbols] for t in traces]


@pytest.mark.parametrize("with_grad", [True, False])
def test_real_mode_is_the_program_thunder_makes_without_us(model, with_grad):
    x = torch.randn(4, 6)
    jm, plain = jit(model), thunder.jit(model)
    with torch.set_grad_enabled(with_grad):
        y, want = jm(x), plain(x)
    assert type(y) is torch.Tensor and torch.equal(y, want)
    assert symbol_names(jm) == symbol_names(plain)
    if with_grad:
        backward = [[b.sym.name for b in t.bound_symbols] for t in thunder.last_backward_traces(jm)]
        assert backward == [[b.sym.name for b in t.bound_symbols] for t in thunder.last_backward_traces(plain)]
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


# -- normed() -------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Token ids in, logits out: nothing to wrap, and one weight under two names."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


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


# -- policies -------------------------------------------------------------------------------------------------------------


def test_given_norms_are_read_anew_in_each_call(model):
    sizes: dict[str, Any] = {"w1": 2.0, "b1": 0.0, "w2": torch.tensor(3.0), "b2": 0.25}
    jm = jit(model, parameters=sizes)
    x = RMSTensor(1.5, backing=torch.randn(2, 6))
    assert jm(x).norm_size.item() == 1.5 * 2 * 3 + 0.25
    sizes["w1"] = 4
    assert jm(x).norm_size.item() == 1.5 * 4 * 3 + 0.25
    sizes["w2"].fill_(0.5)
    assert jm(x).norm_size.item() == 1.5 * 4 * 0.5 + 0.25
    assert thunder.cache_misses(jm) == 1
    sizes["w1"] = RMSToRMSTensor(1.0)
    assert jm(x).norm_size.item() == 1.5 * 0.5 + 0.25
    sizes["w1"] = RMSToRMSTensor(2.0)
    assert jm(x).norm_size.item() == 1.5 * 2 * 0.5 + 0.25


def test_a_given_norm_of_another_kind_compiles_again(model):
    sizes: dict[str, Any] = {"w1": 1.0, "b1": 0.0, "w2": RMSToRMSTensor(2.0), "b2": 0.0}
    jm = jit(model, parameters=sizes)
    x = RMSTensor(1.0, backing=torch.randn(2, 6))
    assert jm(x).norm_size.item() == 2
    compiled = thunder.cache_misses(jm)
    sizes["w2"] = RMSTensor(2.0, elem_dims=(-2, -1))  # Frobenius: the operator norm is at most the input dimension times
    assert jm(x).norm_size.item() == pytest.approx(2 * 10)
    assert thunder.cache_misses(jm) == compiled + 1
    sizes["w2"] = with_perturbation(RMSToRMSTensor(2.0))
    y = jm(x)
    assert thunder.cache_misses(jm) == compiled + 2
    assert torch.autograd.grad(y.perturbation_size, sizes["w2"].perturbation_size)[0].item() == 1
    sizes["w2"] = RMSToRMSTensor(3.0)
    assert jm(x).norm_size.item() == 3
    assert thunder.cache_misses(jm) == compiled + 2


def test_a_given_norm_that_begins_to_require_grad_compiles_again(model):
    sizes = {name: 1.0 for name, _ in model.named_parameters()}
    jm = jit(model, parameters=sizes)
    x = RMSTensor(2.0, backing=torch.randn(2, 6))
    assert jm(x).norm_size.item() == 4
    size = sizes["w1"] = torch.tensor(1.0, requires_grad=True)
    assert torch.autograd.grad(jm(x).norm_size, size)[0].item() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_given_tensor_may_require_grad_where_no_gradients_are_recorded(dtype):
    jm = jit(nn.Linear(6, 3, bias=False), parameters={"weight": torch.tensor(3.0, dtype=dtype, requires_grad=True)})
    x = RMSTensor(2.0, backing=torch.randn(2, 6))
    for _ in range(2):
        with torch.no_grad():
            assert jm(x).norm_size.item() == 6
        assert jm(x).norm_size.item() == 6
    assert thunder.cache_misses(jm) == 2


def test_parameters_that_are_not_named_are_measured(model):
    jm = jit(model, parameters={"w1": 2.0})
    x = RMSTensor(1.0, backing=torch.randn(2, 6))
    with torch.no_grad():
        w = RMSToRMSTensor.of(model.w2).norm_size
        b0, b2 = (RMSTensor.of(b).norm_size for b in (model.b1, model.b2))
        assert jm(x).norm_size.item() == pytest.approx(((2 + b0) * w + b2).item(), rel=1e-6)


def test_unit_is_1_in_the_natural_norm_and_needs_no_weights(model):
    jm = jit(model, parameters="unit")
    y = jm(RMSTensor(5.0, backing=torch.randn(2, 6)))
    assert y.norm_size.item() == (5 * 1 + 1) * 1 + 1
    assert not any("matrix_norm" in str(b.sym.name) for b in thunder.last_traces(jm)[-1].bound_symbols)


def test_measured_sizes_are_differentiable_in_the_weights(model):
    x = RMSTensor(2.0, backing=torch.randn(2, 6))
    y = jit(model)(x)
    got = torch.autograd.grad(y.norm_size, list(model.parameters()))
    want = torch.autograd.grad(model(x).norm_size, list(model.parameters()))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    weight = model.w2
    formula = torch.autograd.grad(torch.linalg.matrix_norm(weight, 2) * math.sqrt(10 / 3), weight)[0]
    first = RMSToRMSTensor.of(model.w1).norm_size * 2 + RMSTensor.of(model.b1).norm_size
    torch.testing.assert_close(got[2], formula * first.float())


def test_weights_that_change_change_the_norm():
    model = Net()
    jm = jit(model)
    x = RMSTensor(1.0, backing=torch.randn(2, 6))
    before = jm(x).norm_size.item()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    with torch.no_grad():
        want = model(x).norm_size.item()
    assert jm(x).norm_size.item() == pytest.approx(want, rel=1e-6) != before
    assert thunder.cache_misses(jm) == 1


class WithBuffer(nn.Module):
    """A parameter and a buffer, both factors."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((6,), 3.0))
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x):
        return x * self.scale * self.gain


@pytest.mark.parametrize(
    ("parameters", "size"), [("measured", 6.0), ("unit", 2.0), ({"gain": 5.0}, 10.0), ({"scale": 4.0}, 12.0), ({}, 6.0)]
)
def test_buffers_are_measured_unless_given(parameters, size):
    model = WithBuffer()
    x = LinfTensor(1.0, backing=torch.ones(2, 6))
    assert jit(model, parameters=parameters)(x).norm_size.item() == size
    assert run_eagerly(model, (x,), {}, policy=parameters, mode="bound")[0].norm_size.item() == size


class Derived(nn.Module):
    """A weight is changed before it is used."""

    def __init__(self, how: Callable, shape: tuple[int, ...]):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        self.how = how

    def forward(self, x):
        return F.linear(x, self.how(self.weight))


DERIVED = {
    "t": (lambda w: w.t(), (6, 10), (-1, -2), 1.0),
    "T": (lambda w: w.T, (6, 10), (-1, -2), 1.0),
    "mT": (lambda w: w.mT, (6, 10), (-1, -2), 1.0),
    "transpose": (lambda w: w.transpose(0, 1).contiguous(), (6, 10), (-1, -2), 1.0),
    "cast": (lambda w: w.t().to(torch.float64), (6, 10), (-1, -2), 1.0),
    "scaled": (lambda w: -2 * w.t(), (6, 10), (-1, -2), 2.0),
    "view": (lambda w: w.reshape(-1).view(10, 6), (10, 6), (-2, -1), None),
    "rows": (lambda w: w[2:7], (10, 6), (-2, -1), math.sqrt(10 / 5)),
    "chunk": (lambda w: w.chunk(2)[1], (10, 6), (-2, -1), math.sqrt(10 / 5)),
    "unbind": (lambda w: w.unbind(0)[1], (3, 10, 6), (-2, -1), 1.0),
    "sum": (lambda w: w + w / 2, (10, 6), (-2, -1), 1.5),
}


@pytest.mark.parametrize("name", DERIVED)
def test_tensors_made_from_parameters_alone_get_their_norm_from_them(name):
    how, shape, dims, factor = DERIVED[name]
    model = Derived(how, shape)
    x = RMSTensor(2.0, backing=torch.randn(3, 6, dtype=torch.float64))
    leaf = with_perturbation(RMSToRMSTensor(3.0, elem_dims=dims))
    with torch.no_grad():
        exact = RMSToRMSTensor.of(how(model.weight)).norm_size.item()
        for parameters, size in (("unit", 1.0), ({"weight": 3.0}, 3.0), ("measured", exact), ({}, exact)):
            y = jit(model, parameters=parameters)(x)
            want, _ = run_eagerly(model, (x,), {}, policy=parameters, mode="bound")
            assert_same_normed(y, want)
            expected = 2 * size * (1.0 if size == exact else factor or 1.0)
            if factor is not None or size == exact:
                assert y.norm_size.item() == pytest.approx(expected, rel=1e-12)
    y = jit(model, parameters={"weight": leaf})(x)
    moved = sensitivities(y, [leaf])[0].item()
    assert moved == pytest.approx(y.norm_size.item() / 3, rel=1e-12) and moved >= 2 * (factor or 1.0) * (1 - 1e-12)


@pytest.mark.parametrize("how", [lambda w: torch.linalg.qr(w)[1], torch.linalg.inv], ids=["qr", "inv"])
def test_a_tensor_made_from_a_given_norm_by_an_operation_without_a_rule_is_refused(how):
    """Its own norm would have nothing to do with the one given."""
    model = Derived(how, (6, 6))
    x = RMSTensor(1.0, backing=torch.randn(3, 6, dtype=torch.float64))
    exact = RMSToRMSTensor.of(how(model.weight.detach())).norm_size.item()
    for parameters in ("measured", {}):
        with torch.no_grad():
            assert jit(model, parameters=parameters)(x).norm_size.item() == pytest.approx(exact)
            assert run_eagerly(model, (x,), {}, policy=parameters, mode="bound")[0].norm_size.item() == pytest.approx(exact)
    for parameters in ("unit", {"weight": 1.0}):
        with pytest.raises(MissingNormRuleError, match="no norm rule for torch"):
            jit(model, parameters=parameters)(x)
        with pytest.raises(MissingNormRuleError, match="no norm rule for torch"):
            run_eagerly(model, (x,), {}, policy=parameters, mode="bound")


@pytest.mark.parametrize("how", [lambda w: w.clone().mul_(2), lambda w: F.relu(w.clone(), inplace=True)], ids=["mul_", "relu"])
def test_in_place_on_a_tensor_made_from_a_given_norm_is_refused(how):
    model = Derived(how, (6, 6))
    x = RMSTensor(1.0, backing=torch.randn(3, 6, dtype=torch.float64))
    with torch.no_grad():
        exact = RMSToRMSTensor.of(how(model.weight)).norm_size.item()
        assert jit(model)(x).norm_size.item() == pytest.approx(exact, rel=1e-12)
        assert run_eagerly(model, (x,), {}, policy="measured", mode="bound")[0].norm_size.item() == pytest.approx(
            exact, rel=1e-12
        )
    with pytest.raises(UnsupportedOpError, match="made from parameters"):
        jit(model, parameters="unit")(x)
    with pytest.raises(UnsupportedOpError, match="made from parameters"):
        run_eagerly(model, (x,), {}, policy="unit", mode="bound")


def test_one_parameter_used_twice_is_lifted_once(model):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return F.linear(F.linear(x, self.weight), self.weight)

    jm = jit(Twice())
    y = jm(RMSTensor(1.0, backing=torch.randn(2, 6)))
    assert sum("matrix_norm" in b.sym.name for b in thunder.last_traces(jm)[-1].bound_symbols) == 1
    w = RMSToRMSTensor.of(jm._model.weight).norm_size.item()
    assert y.norm_size.item() == pytest.approx(w * w, rel=1e-6)


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_a_tied_parameter_may_be_given_under_either_name(ids, name):
    leaf = with_perturbation(RMSTensor(2.0))
    model = Tied()
    y = normed(jit(model, parameters={name: leaf}))(ids)
    want, _ = run_eagerly(model, (ids,), {}, policy={name: leaf}, mode="bound")
    assert_same_normed(y, want)
    # logits: 6 entries of at most 2 * 2, moved by both uses
    assert y.norm_size.item() == 6 * 2 * 2
    assert torch.autograd.grad(y.perturbation_size, leaf.perturbation_size)[0].item() == 2 * 6 * 2


# -- annotations ----------------------------------------------------------------------------------------------------------


def test_an_annotation_overrides_the_natural_kind():
    torch.manual_seed(seeded(2))
    model = Net()
    x = RMSTensor(1.0, backing=torch.randn(2, 6))
    w = model.w2.detach()
    assert annotate(model, w2=RMSTensor) is model  # rows in RMS: the un-embedding rule
    with torch.no_grad():
        inner = RMSToRMSTensor.of(model.w1).norm_size + RMSTensor.of(model.b1).norm_size
        y = jit(model)(x)
        want, _ = run_eagerly(model, (x,), {}, policy="measured", mode="bound")
        assert_same_normed(y, want)
    assert type(y) is LinfTensor
    expected = 10 * inner * RMSTensor.of(w).norm_size + LinfTensor.of(model.b2.detach()).norm_size
    assert y.norm_size.item() == pytest.approx(expected.item(), rel=1e-6)


def test_an_annotation_may_state_elem_dims():
    model = nn.Linear(6, 4, bias=False)
    annotate(model, weight=RMSTensor, elem_dims={"weight": (0, 1)})
    x = RMSTensor(1.0, backing=torch.randn(2, 6))
    frobenius = RMSTensor.of(model.weight.detach(), (0, 1)).norm_size.item()
    with torch.no_grad():
        assert jit(model)(x).norm_size.item() == pytest.approx(6 * frobenius, rel=1e-6)
    assert jit(model, parameters="unit")(x).norm_size.item() == pytest.approx(6)


def test_a_given_kind_goes_before_an_annotation():
    model = nn.Linear(6, 4, bias=False)
    annotate(model, weight=RMSTensor)
    x = RMSTensor(1.0, backing=torch.randn(2, 6))
    y = jit(model, parameters={"weight": RMSToRMSTensor(2.0)})(x)
    assert type(y) is RMSTensor and y.norm_size.item() == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"wieght": RMSTensor}, NormMapKeyError, r"no parameter or buffer 'wieght' of its own; it has \['bias', 'weight'\]"),
        ({"weight": "rms"}, NormMismatchError, "must be a kind"),
        ({"weight": NormedTensor}, NormMismatchError, "must be a kind"),
        ({"weight": torch.Tensor}, NormMismatchError, "must be a kind"),
        ({"mass": -1.0}, NormMismatchError, "mass must be >= 0"),
        ({"mass": math.nan}, NormMismatchError, "mass must be >= 0"),
        ({"elem_dims": {"weight": (0,)}}, NormMapKeyError, "have no kind"),
    ],
)
def test_mistakes_in_an_annotation_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        annotate(nn.Linear(6, 4), **options)


# -- derivatives ----------------------------------------------------------------------------------------------------------


def grads_of(y: NormedTensor, wanted: list[torch.Tensor], **options: Any) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(y.norm_size, wanted, **options)


class Normalized(Net):
    """Values and sensitivities that are not affine in the norms."""

    def __init__(self):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(10)), nn.Parameter(torch.zeros(10))

    def forward(self, x):
        h = F.layer_norm(F.gelu(F.linear(x, self.w1, self.b1)), (10,), self.gain, self.shift)
        return F.linear(h, self.w2, self.b2)


@pytest.fixture(scope="module")
def differentiable() -> tuple:
    """(jitted model, leaves, input): one compilation for the tests of derivatives."""
    torch.manual_seed(seeded(3))
    net = Normalized()
    kinds = {"w1": RMSToRMSTensor, "b1": RMSTensor, "gain": LinfTensor, "shift": RMSTensor, "w2": RMSToRMSTensor, "b2": RMSTensor}
    leaves = {
        name: with_perturbation(kind(1.5 - i / 8, norm_size_requires_grad=True)) for i, (name, kind) in enumerate(kinds.items())
    }
    x = with_perturbation(RMSTensor(0.5, backing=torch.randn(4, 6) / 8, norm_size_requires_grad=True))
    return jit(net, parameters=leaves), net, leaves, x


def test_first_derivatives_are_those_of_eager_mode(differentiable):
    jm, net, leaves, x = differentiable
    wanted = [x.norm_size, *(leaf.norm_size for leaf in leaves.values())]
    got = grads_of(jm(x), wanted)
    want = grads_of(run_eagerly(net, (x,), {}, policy=leaves, mode="bound")[0], wanted)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=0)


def test_first_derivatives_are_finite_differences(differentiable):
    jm, _, leaves, x = differentiable
    wanted = [x.norm_size, *(leaf.norm_size for leaf in leaves.values())]
    for size, grad in zip(wanted, grads_of(jm(x), wanted), strict=True):
        values = []
        for h in (1e-6, -1e-6):
            with torch.no_grad():
                size += h
            values.append(jm(x).norm_size.item())
            with torch.no_grad():
                size -= h
        assert grad.item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-9)


def test_second_derivatives_are_those_of_eager_mode(differentiable):
    jm, net, leaves, x = differentiable
    wanted = [x.norm_size, *(leaf.norm_size for leaf in leaves.values())]

    def second(y: NormedTensor) -> list[torch.Tensor]:
        first = grads_of(y, wanted, create_graph=True)
        total = sum(g * (i + 1) for i, g in enumerate(first))
        return [first, torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)]

    got, want = second(jm(x)), second(run_eagerly(net, (x,), {}, policy=leaves, mode="bound")[0])
    for g, w in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-14)
    assert any(g != 0 for g in got[1])


def test_sensitivities_are_those_of_eager_mode_and_differentiable(differentiable):
    jm, net, leaves, x = differentiable
    sizes = [x.norm_size, leaves["w1"].norm_size, leaves["w2"].norm_size]

    def all_of(y: NormedTensor) -> list[torch.Tensor]:
        found = sensitivities(y, {**leaves, "input": x})
        total = sum(found.values())
        return [*found.values(), *torch.autograd.grad(total, sizes, allow_unused=True, materialize_grads=True)]

    got = all_of(jm(x))
    want = all_of(run_eagerly(net, (x,), {}, policy=leaves, mode="bound")[0])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-14)
    assert all(g > 0 and torch.isfinite(g) for g in got[:7])


class Residual(nn.Module):
    """``y = W2 relu(W1 x) + x / 2 + W1 x``, by name and path."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x):
        h = self.first(x)
        return self.second(F.relu(h)) + x / 2 + h


def test_sensitivities_are_sums_over_paths():
    model = Residual()
    leaves = leaves_for(model)
    x = with_perturbation(RMSTensor(0.7, backing=torch.randn(2, 6) / 10, norm_size_requires_grad=True))
    y = jit(model, parameters=leaves)(x)
    n, n1, n2 = 0.7, 1.5, 1.625
    # edges of the graph, with the norm entering each: (from, to, Lipschitz constant)
    edges = [
        ("first", "h", n),
        ("x", "h", n1),
        ("h", "relu", 1.0),
        ("relu", "out2", n2),
        ("second", "out2", n1 * n),
        ("out2", "y", 1.0),
        ("x", "y", 0.5),
        ("h", "y", 1.0),
    ]

    def paths(node: str) -> float:
        return 1.0 if node == "y" else sum(c * paths(to) for source, to, c in edges if source == node)

    found = sensitivities(y, {**leaves, "x": x})
    for name, key in (("first", "first.weight"), ("second", "second.weight"), ("x", "x")):
        assert found[key].item() == pytest.approx(paths(name), rel=1e-12)
    assert y.norm_size.item() == pytest.approx(n2 * n1 * n + n / 2 + n1 * n)


def test_a_leaf_the_output_does_not_depend_on_has_sensitivity_0():
    jf = jit(lambda x, y: (x * 2, y * 0.0))
    x, y = (with_perturbation(RMSTensor.of(torch.ones(3))) for _ in range(2))
    a, b = jf(x, y)
    assert [s.item() for s in sensitivities(a, [x, y])] == [2, 0]
    assert [s.item() for s in sensitivities((a, b), (x, y))] == [2, 0]
    assert sensitivities(RMSTensor.of(torch.ones(3)), [x])[0].item() == 0


def test_outputs_of_one_norm_each_have_their_derivatives():
    """-x, |x| and x have the same norm, one scalar in the trace: no output may take the derivatives of the others away."""

    def f(x):
        y = x * 2
        return y, -y, y.abs(), y.norm_size, x

    x = with_perturbation(RMSTensor(1.0, backing=torch.ones(3), norm_size_requires_grad=True))
    outputs = jit(f)(x)
    sizes = [o.norm_size if isinstance(o, NormedTensor) else o for o in outputs]
    grads = [torch.autograd.grad(n, x.norm_size, retain_graph=True)[0].item() for n in sizes]
    assert grads == [2, 2, 2, 2, 1]
    assert torch.autograd.grad(sum(sizes), x.norm_size, retain_graph=True)[0].item() == 9
    assert [sensitivities(o, [x])[0].item() for o in outputs if isinstance(o, NormedTensor)] == [2, 2, 2, 1]
    (again,) = jit(lambda x: (x * 2,))(x)
    assert torch.equal(again.norm_size, sizes[0])


def test_mistakes_in_sensitivities_are_refused():
    x = with_perturbation(RMSTensor.of(torch.ones(3)))
    with pytest.raises(NormMismatchError, match="leaf 0 of sensitivities must be a NormedTensor, got Tensor"):
        sensitivities(x * 2, [torch.ones(3)])
    with pytest.raises(NormMismatchError, match="with_perturbation"):
        sensitivities(x * 2, [RMSTensor.of(torch.ones(3))])
    with pytest.raises(NormMismatchError, match="among the outputs"):
        sensitivities(torch.ones(3), [x])
    with pytest.raises(NormMismatchError, match="already"):
        with_perturbation(x)
    with pytest.raises(NormMismatchError, match="got Tensor"):
        with_perturbation(torch.ones(3))


def test_a_first_order_move_of_the_parameters_stays_within_the_sensitivities(model):
    """||f(W + D) - f(W)|| <= sum_k S_k ||D_k||, to first order in D."""
    x = RMSTensor.of(torch.randn(16, 6))
    with torch.no_grad():
        leaves = {n: with_perturbation((RMSToRMSTensor if p.ndim == 2 else RMSTensor).of(p)) for n, p in model.named_parameters()}
    leaves = {n: with_perturbation(type(v)(v.norm_size.item())) for n, v in leaves.items()}
    found = sensitivities(jit(model, parameters=leaves)(x), leaves)
    parameters = {n: p.detach().double() for n, p in model.named_parameters()}
    x64 = x.backing.double()
    before = torch.func.functional_call(model, parameters, (x64,))
    for name, leaf in leaves.items():
        for _ in range(10):
            direction = torch.randn_like(parameters[name])
            direction *= 1e-4 / type(leaf).of(direction).norm_size
            after = torch.func.functional_call(model, {**parameters, name: parameters[name] + direction}, (x64,))
            assert RMSTensor.of(after - before).norm_size <= 1e-4 * found[name] * (1 + 1e-3)


# -- programs -------------------------------------------------------------------------------------------------------------


@dataclass
class Outputs:
    """What a model returns."""

    logits: torch.Tensor
    hidden: Any


def test_normed_tensors_in_and_out_of_containers():
    def f(x, *, pair, by_name):
        a, b = pair
        return Outputs(a + b, {"sum": [x + by_name["z"], None], "same": x, "number": 3, "plain": by_name["t"] * 2})

    x, t = RMSTensor.of(torch.ones(3)), torch.ones(3)
    arguments = {"pair": (x, L2Tensor.of(t)), "by_name": {"z": LinfTensor.of(t), "t": t}}
    got, want = jit(f)(x, **arguments), f(x, **arguments)
    assert type(got) is Outputs
    assert_same_normed(got.logits, want.logits)
    assert_same_normed(got.hidden, want.hidden)


def test_dataclasses_as_arguments():
    def f(inputs):
        return inputs.logits + inputs.hidden

    x = RMSTensor.of(torch.ones(3))
    assert jit(f)(Outputs(x, 2.0)).norm_size.item() == 3


def test_a_program_may_look_at_what_it_is_given():
    def f(x):
        if isinstance(x, NormedTensor):
            assert type(x) is RMSTensor and x.elem_dims == (-1,) and x.shape == (3,)
            return x * 2
        return x * 3

    jf, t = jit(f), torch.ones(3)
    assert jf(RMSTensor.of(t)).norm_size.item() == 2
    assert torch.equal(jf(t), 3 * t)


def test_a_program_may_compute_with_norms():
    def f(x):
        return x * 2, x.norm_size * 3, x.backing + 1

    x = RMSTensor(2.0, backing=torch.ones(3), norm_size_requires_grad=True)
    y, size, backing = jit(f)(x)
    assert y.norm_size.item() == 4 and size.item() == 6 and torch.equal(backing, torch.full((3,), 2.0))
    assert torch.autograd.grad(size, x.norm_size)[0].item() == 3


def test_custom_operations_with_a_rule():
    @normed_op
    def mul_with_scaler(input: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return input * scale

    @mul_with_scaler.register_norm(allow_plain_tensors=True)
    def _(input: NormedTensor, scale: torch.Tensor) -> NormedTensor:
        return type(input)(input.norm_size * scale.abs(), elem_dims=input.elem_dims, sensitivity={"input": scale.abs()})

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(-3.0))

        def forward(self, x):
            return mul_with_scaler(F.relu(x), self.scale)

    model = Scaled()
    jm = jit(model)
    x = with_perturbation(RMSTensor(2.0, backing=torch.ones(4)))
    y = jm(x)
    assert_same_normed(y, model(x))
    assert y.norm_size.item() == 6
    assert torch.autograd.grad(y.norm_size, model.scale, retain_graph=True)[0].item() == -2
    assert sensitivities(y, [x])[0].item() == 3
    assert torch.equal(jm(torch.ones(4)), torch.full((4,), -3.0))


def test_in_place_on_an_intermediate():
    def f(x):
        y = x + 1
        y += x
        y.mul_(2)
        return F.relu(y, inplace=True)

    x = RMSTensor.of(torch.randn(3, 4))
    assert_same_normed(jit(f)(x), f(x))


@pytest.mark.parametrize("name", ["input", "alias", "alias of the input"])
def test_in_place_where_another_owner_would_not_notice_is_refused(name):
    def on_input(x):
        x += 1
        return x

    def on_alias(x):
        y = 2 * x
        z = y[:1]
        y += 1
        return z

    def on_alias_of_input(x):
        x.view(-1).mul_(2)
        return x

    program = {"input": on_input, "alias": on_alias, "alias of the input": on_alias_of_input}[name]
    x = RMSTensor.of(torch.ones(3, 4))
    with pytest.raises(UnsupportedOpError, match="in-place"):
        jit(program)(x)
    with pytest.raises(UnsupportedOpError, match="in-place"):
        program(x)


# -- errors ---------------------------------------------------------------------------------------------------------------


def sometimes(x, is_bad):
    """A program with a branch that has no rule."""
    if is_bad:
        x = torch.linalg.qr(x)[1]
    return x * 2


def test_a_missing_rule_is_reported_at_the_users_line_and_leaves_the_function_usable():
    jf, x, t = jit(sometimes), RMSTensor.of(torch.randn(3, 4)), torch.randn(3, 4)
    for _ in range(2):
        with pytest.raises(MissingNormRuleError) as e:
            jf(x, True)
        message = str(e.value)
        assert message.startswith("no norm rule for torch.linalg.qr\n")
        lines, first = inspect.getsourcelines(sometimes)
        line = next(i for i, text in enumerate(lines) if "linalg.qr" in text)
        assert f"{__file__}:{first + line}:  {lines[line].strip()}" in message
        assert "RMSTensor[3, 4] over dims (-1,)" in message and "to add one" in message
        assert_same_normed(jf(x, False), x * 2)
        assert torch.equal(jf(t, True), torch.linalg.qr(t)[1] * 2)
        assert torch.equal(jf(t, False), t * 2)


def test_a_rule_that_refuses_is_reported_at_the_users_line():
    def f(x):
        return torch.log(x)

    x = RMSTensor.of(torch.ones(3))
    with pytest.raises(ThunderNormError, match=rf"(?s)at +{__file__}:\d+:  return torch.log\(x\)"):
        jit(f)(x)
    with pytest.raises(ThunderNormError):
        f(x)


def test_names_the_module_does_not_have_are_refused_when_it_is_jitted():
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    with pytest.raises(NormMapKeyError) as e:
        jit(model, parameters={"0.wieght": 1.0, "0.bias": 1.0})
    assert "'0.wieght'" in str(e.value) and "did you mean" in str(e.value) and "'0.weight'" in str(e.value)
    assert isinstance(e.value, KeyError)


def test_sizes_that_are_no_sizes_are_refused(model):
    x = RMSTensor.of(torch.randn(2, 6))
    sizes: dict[str, Any] = {}
    jm = jit(model, parameters=sizes)
    bad = [-1.0, math.nan, torch.tensor(-1.0), torch.ones(2), torch.tensor(1), "1", None]
    for when in ("before a trace", "after it"):
        for size in bad:
            sizes["w1"] = size
            with pytest.raises(NormMismatchError, match="norm_size must be"):
                jm(x)
        sizes["w1"] = 1.0
        assert jm(x).norm_size > 0, when


def test_a_given_kind_that_does_not_fit_is_refused(model):
    x = RMSTensor.of(torch.randn(2, 6))
    with pytest.raises(ThunderNormError, match="parameter 'w1'.*5 is out of range"):
        jit(model, parameters={"w1": RMSToRMSTensor(1.0, elem_dims=(0, 5))})(x)


@pytest.mark.parametrize("options", [{"parameters": "ones"}, {"parameters": 1.0}, {"mode": "sound"}, {"parameters": None}])
def test_unknown_policies_and_modes_are_refused(options):
    with pytest.raises(NormMismatchError, match="must be"):
        NormTransform(**options)


def test_an_unfinalized_input_is_refused(model):
    jm = jit(model)
    with pytest.raises(NormMismatchError, match="unfinalized"):
        jm(RMSTensor(1.0))
    assert jm(RMSTensor(1.0, backing=torch.ones(2, 6))).shape == (2, 3)


# -- what users see -------------------------------------------------------------------------------------------------------


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
