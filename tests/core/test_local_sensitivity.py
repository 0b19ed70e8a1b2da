"""Local sensitivities: never below the Jacobian's norm at the data, never above the global one, and far below it where they claim."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.seeds import seeded
from thunder_norm import L2Tensor, LinfTensor, RMSTensor, norm_mode, norm_report, norm_sensitivity, sensitivities
from thunder_norm.audit import lmo, norm
from thunder_norm.errors import NormMismatchError
from thunder_norm.norms.sensitivity import with_perturbation
from thunder_norm.transforms import NormTransform
import thunder

R, INF, L2 = RMSTensor, LinfTensor, L2Tensor
D = torch.float64


@pytest.fixture(autouse=True)
def kernels_with_forward_derivatives():
    with sdpa_kernel(SDPBackend.MATH):
        yield


def gaussian(*shape, root=2):
    """The same entries everywhere, spread like Gaussians: how tight a local claim is depends on the data."""
    places = torch.arange(1, math.prod(shape) + 1, dtype=D) * math.sqrt(root) % 1
    return torch.special.ndtri(places).reshape(shape)


def jacobian_norm(f, x, ball, out_kind, out_dims, steps=25):
    """Largest ``|J u|`` over the unit ball of x's norm, by power iteration with its linear maximisation oracle: a lower bound.

    It starts in the direction of each entry of a small x, of twelve random ones otherwise, and ends where it no longer grows.
    """
    best = 0.0
    _, pull_back = torch.func.vjp(f, x)
    generator = torch.Generator().manual_seed(seeded(0))
    starts = torch.eye(x.numel(), dtype=D) if x.numel() <= 24 else torch.randn(12, x.numel(), dtype=D, generator=generator)
    for u in starts.unflatten(-1, x.shape):
        last = 0.0
        for _ in range(steps):
            u = u / norm(*ball[:1], u, ball[1])
            _, moved = torch.func.jvp(f, (x,), (u,))
            moved = moved.detach().requires_grad_()
            size = norm(out_kind, moved, out_dims)
            best = max(best, size.item())
            if not size > last * (1 + 1e-6):
                break
            last = size.item()
            u = lmo(ball[0], pull_back(torch.autograd.grad(size, moved)[0])[0], ball[1])
    return best


def claimed(f, inputs, kinds, k, scope):
    """The sensitivity to argument k."""
    normed = [kind.of(x, dims) for x, (kind, dims) in zip(inputs, kinds, strict=True)]
    normed[k] = with_perturbation(normed[k])
    with norm_sensitivity(scope):
        y = f(*normed)
    return y, sensitivities(y, normed[k]).item()


LAST, BOTH, HEADS = (-1,), (-2, -1), (-3, -1)
ROWS, IMAGE = gaussian(3, 8), gaussian(2, 4, 3)
TOKENS = [gaussian(2, 2, 6, 4, root=root) for root in (2, 3, 5)]
MASK = torch.ones(6, 6, dtype=torch.bool).tril()


def attention(**options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


# name, function, its arguments, their norms, the least measured / claimed, the most claimed / global, for each argument
CASES = [
    ("rms_norm", lambda x: F.rms_norm(x, (8,), None, 1e-5), [ROWS], [(R, LAST)], [0.99], [0.01]),
    ("layer_norm", lambda x: F.layer_norm(x, (8,)), [ROWS], [(R, LAST)], [0.9], [0.01]),
    ("layer_norm, over all", lambda x: F.layer_norm(x, (8,)), [ROWS], [(R, BOTH)], [0.99], [0.01]),
    ("layer_norm, a gain", lambda x: F.layer_norm(x, (8,), torch.linspace(0.5, 2, 8, dtype=D)), [ROWS], [(R, LAST)], [0.5], [0.01]),
    ("layer_norm, small x", lambda x: F.layer_norm(x, (8,)), [ROWS * 1e-3], [(R, LAST)], [0.9], [1.0]),
    ("group_norm", lambda x: F.group_norm(x, 2), [IMAGE], [(R, BOTH)], [0.99], [0.01]),
    ("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), [gaussian(6, 3)], [(R, (-2,))], [0.9], [0.02]),
    ("normalize", lambda x: F.normalize(x, dim=-1), [ROWS], [(L2, LAST)], [0.9], [1e-9]),
    ("rms_norm, written out", lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5), [ROWS], [(R, LAST)], [0.99], [0.01]),
    ("gelu", F.gelu, [ROWS * 0.1], [(R, LAST)], [0.99], [0.95]),
    ("gelu, written out", lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), [ROWS * 0.1], [(R, LAST)], [0.99], [0.95]),
    ("sigmoid gate", lambda x: 3 * x * torch.sigmoid(1.702 * x), [ROWS * 0.1], [(R, LAST)], [0.99], [0.95]),
    ("tanh", torch.tanh, [ROWS + 3], [(INF, ())], [0.99], [1.0]),
    ("softmax of many", lambda x: F.softmax(x, -1), [gaussian(3, 64)], [(R, LAST)], [0.4], [0.7]),
    ("softmin with a winner", lambda x: F.softmin(x, -1), [-6 * torch.eye(3, dtype=D)], [(INF, ())], [0.99], [0.1]),
    ("softmin with a loser", lambda x: F.softmin(x, -1), [6 * torch.eye(3, dtype=D)], [(INF, ())], [0.9], [1.0]),
    ("softmax with a winner", lambda x: F.softmax(x, -1), [6 * torch.eye(3, dtype=D)], [(INF, ())], [0.99], [0.1]),
    ("attention", attention(), TOKENS, [(R, LAST)] * 3, [0.7, 0.65, 0.99], [0.5, 0.6, 1.0]),
    ("attention, causal", attention(is_causal=True), TOKENS, [(R, LAST)] * 3, [0.6, 0.6, 0.99], [0.5, 0.6, 1.0]),
    ("attention, masked", attention(attn_mask=MASK), TOKENS, [(R, LAST)] * 3, [0.6, 0.6, 0.99], [0.5, 0.6, 1.0]),
    ("attention, biased", attention(attn_mask=gaussian(6, 6, root=7)), TOKENS, [(R, LAST)] * 3, [0.6, 0.7, 0.99], [0.5, 0.6, 1.0]),
    ("attention, over heads", attention(), TOKENS, [(R, HEADS)] * 3, [0.6, 0.6, 0.7], [0.5, 0.6, 1.0]),
    ("attention, mixed", attention(), TOKENS, [(R, LAST), (INF, ()), (R, HEADS)], [0.5, 0.4, 0.7], [0.5, 0.6, 1.0]),
    # one feature has all of an output's length only by chance
    ("attention, entries", attention(), TOKENS, [(R, LAST), (R, BOTH), (INF, ())], [0.5, 0.3, 0.99], [0.5, 0.9, 1.0]),
]  # fmt: skip


@pytest.mark.parametrize("name, f, inputs, kinds, tight, gain", CASES, ids=[c[0] for c in CASES])
def test_a_local_sensitivity_is_the_jacobians_norm_or_above(name, f, inputs, kinds, tight, gain):
    for k, x in enumerate(inputs):
        y, local = claimed(f, inputs, kinds, k, "local")
        _, everywhere = claimed(f, inputs, kinds, k, "global")

        def of_one(t, k=k):
            return f(*inputs[:k], t, *inputs[k + 1 :])

        measured = jacobian_norm(of_one, x, kinds[k], type(y), y.elem_dims)
        assert measured <= local * (1 + 1e-6)
        assert measured >= local * tight[k], (measured, local)
        assert local <= everywhere * gain[k] * (1 + 1e-9), (local, everywhere)


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "GRU", "LSTM", "RNN"])
def test_flat_functions_have_slopes_in_single_precision(name):
    """Of what rounds to 1 or -1 there is a slope left."""
    if name in ("tanh", "sigmoid"):
        f = exact = getattr(torch, name)
    else:
        torch.manual_seed(seeded(0))
        layer = getattr(torch.nn, name)(2, 2, batch_first=True).requires_grad_(False)
        layer.bias_ih_l0 += 12.0
        f, exact = (lambda x: layer(x)[0]), (lambda x: copy.deepcopy(layer).double()(x)[0])
    x = torch.full((1, 1, 2), 11.0)
    with norm_sensitivity("local"):
        y = f(given := with_perturbation(R.of(x), 0.0))
    jacobian = torch.autograd.functional.jacobian(exact, x.double()).reshape(2, 2)
    assert 0 < torch.linalg.matrix_norm(jacobian, 2).item() <= sensitivities(y, given).item() * (1 + 1e-4)


@pytest.mark.parametrize("far", ["keys", "values"])
@pytest.mark.parametrize("offset", [1e3, 1e5])
def test_of_tokens_far_from_0_what_they_have_in_common_has_no_effect(far, offset):
    """In single precision their squares leave little of how far they are from each other, which is all that derivatives are of."""
    make = torch.Generator().manual_seed(seeded(0))
    q, k, v = (torch.randn(1, 4, 4, generator=make) for _ in range(3))
    if far == "keys":
        q, k = q * 1e-3, k / 64 + offset
    else:
        v = v / 64 + offset
    x = with_perturbation(RMSTensor.of(q))
    with norm_sensitivity("local"):
        bound = sensitivities(F.scaled_dot_product_attention(x, k, v), x).item()
    run = lambda t: F.scaled_dot_product_attention(t, k.double(), v.double())  # noqa: E731
    jacobian = torch.func.jacrev(run)(q.double())[0, :, :, 0]
    largest = max(torch.linalg.matrix_norm(jacobian[i, :, i], 2).item() for i in range(4))
    assert largest <= bound * (1 + 1e-6)
    assert bound <= 1.01 * largest * 4**0.125


@pytest.mark.parametrize("elem_dims", [(-1,), ()])
@pytest.mark.parametrize(("width", "of_values"), [(4, 1), (2, 8), (16, 2)])
def test_attentions_values_may_have_another_width(width, of_values, elem_dims):
    make = torch.Generator().manual_seed(seeded(1))
    q, k, v = (torch.randn(1, 1, 4, d, generator=make, dtype=D) for d in (width, width, of_values))
    given = [with_perturbation(RMSTensor.of(t, dims)) for t, dims in ((q, (-1,)), (k, (-1,)), (v, elem_dims))]
    with norm_sensitivity("local"):
        y = F.scaled_dot_product_attention(*given)
    jacobian = torch.func.jacrev(lambda t: F.scaled_dot_product_attention(t, k, v))(q)[0, 0, :, :, 0, 0]
    own = jacobian[torch.arange(4), :, torch.arange(4)]  # of each query to its own result
    longest = torch.linalg.matrix_norm(own, 2).max() / math.sqrt(of_values) if elem_dims else own.norm(dim=-1).max()
    found = longest.item() * math.sqrt(width)
    assert found <= sensitivities(y, given[0]).item() * (1 + 1e-9)
    assert found >= 0.2 * sensitivities(y, given[0]).item()


def test_values_are_the_same():
    for _, f, inputs, kinds, *_ in CASES:
        y, _ = claimed(f, inputs, kinds, 0, "local")
        z, _ = claimed(f, inputs, kinds, 0, "global")
        assert torch.equal(y.norm_size, z.norm_size)


@pytest.mark.parametrize("name", ["layer_norm", "attention, causal", "sigmoid gate", "rms_norm, written out", "softmax of many"])
def test_a_trace_agrees_with_eager(name):
    _, f, inputs, kinds, *_ = next(c for c in CASES if c[0] == name)
    x = [kind.of(t, dims) for t, (kind, dims) in zip(inputs, kinds, strict=True)]
    x[0] = with_perturbation(x[0])
    jf = thunder.jit(f, transforms=[NormTransform(sensitivity="local")])
    traced = sensitivities(jf(*x), x[0])
    with norm_sensitivity("local"):
        eager = sensitivities(f(*x), x[0])
    torch.testing.assert_close(traced, eager)
    # other data, same trace
    other = [kind.of(t * 0.5, dims) for t, (kind, dims) in zip(inputs, kinds, strict=True)]
    other[0] = with_perturbation(other[0])
    assert sensitivities(jf(*other), other[0]) != traced
    assert thunder.cache_misses(jf) == 1


def test_without_data_they_are_global():
    x = with_perturbation(RMSTensor(1.0, backing=torch.empty(3, 8, device="meta")))
    with norm_sensitivity("local"):
        assert sensitivities(F.layer_norm(x, (8,)), x).item() == pytest.approx(1e-5**-0.5)


def test_other_modes_have_their_own():
    x = with_perturbation(RMSTensor.of(ROWS))
    with norm_sensitivity("local"):
        with norm_mode("modula"):
            assert sensitivities(F.layer_norm(x, (8,)), x).item() == 1.0


def test_a_report_says_that_its_sensitivities_are_local():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    x = RMSTensor.of(torch.randn(3, 8))
    local = norm_report(thunder.jit(model, transforms=[NormTransform(sensitivity="local")]), x)
    everywhere = norm_report(thunder.jit(model, transforms=[NormTransform()]), x, sensitivity="global")
    assert "local: at the data" in str(local) and "local: at" not in str(everywhere)
    assert local.rows[0].sensitivity < everywhere.rows[0].sensitivity / 10


def test_an_unknown_choice_is_refused():
    with pytest.raises(NormMismatchError, match="global"):
        NormTransform(sensitivity="loca")
