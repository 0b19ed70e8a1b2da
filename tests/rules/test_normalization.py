"""Normalizations, fused and written out, and embeddings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import rules  # noqa: F401
from thunder_norm.audit import Ball, Case, check
from thunder_norm.core.context import norm_mode
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor
from thunder_norm.errors import NormMismatchError

R, INF = RMSTensor, LinfTensor
FEW = {"restarts": 6, "steps": 15, "seed": seeded()}
EPS = 1e-2
WHOLE = (-2, -1)


def x(*shape, n=1.0, dims=None, kind=R):
    return Ball("x", kind, shape, n, dims)


def gain(*shape, kind=INF):
    return Ball("gain", kind, shape, 0.7)


def bias(*shape, dims=None):
    return Ball("bias", R, shape, 0.3, dims)


def real(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(0)))


def layer_norm(x, g=None, b=None, dims=1):
    return F.layer_norm(x, x.shape[-dims:], g, b, EPS)


def rms_norm(x, g=None):
    return F.rms_norm(x, x.shape[-1:], g, EPS)


def group_norm(x, g=None, b=None):
    return F.group_norm(x, 2, g, b, EPS)


def batch_norm_train(x, g=None, b=None):
    return F.batch_norm(x, None, None, g, b, True, 0.1, EPS)


def batch_norm_eval(x, g=None, b=None, mean=None, var=None):
    mean = real(4) if mean is None else mean
    return F.batch_norm(x, mean, real(4).square() if var is None else var, g, b, False, 0.1, EPS)


def instance_norm(x, g=None, b=None):
    return F.instance_norm(x, None, None, g, b, True, 0.1, EPS)


FUSED = [
    Case("layer_norm", layer_norm, (x(3, 5), gain(5), bias(5))),
    Case("layer_norm, small x", layer_norm, (x(3, 5, n=0.03), gain(5), bias(5))),
    Case("layer_norm, mean over tokens", layer_norm, (x(3, 5, dims=WHOLE), gain(5), bias(5))),
    Case("layer_norm, largest entries", layer_norm, (x(3, 4, kind=INF), gain(4), bias(4))),
    Case("layer_norm over two dims", lambda x, g, b: layer_norm(x, g, b, 2), (x(2, 2, 4), gain(2, 4), bias(2, 4, dims=WHOLE))),
    Case("layer_norm of two", layer_norm, (x(3, 2), gain(2), bias(2))),
    Case("layer_norm of one", layer_norm, (x(3, 1),)),
    Case("rms_norm", rms_norm, (x(3, 5), gain(5))),
    Case("rms_norm, mean over tokens", rms_norm, (x(3, 5, dims=WHOLE), gain(5))),
    Case("rms_norm, gain in RMS", rms_norm, (x(3, 5), gain(5, kind=R)), 0.95),
    Case("group_norm", group_norm, (x(2, 4, 3, dims=WHOLE), gain(4), bias(4))),
    Case("group_norm, RMS over channels", group_norm, (x(2, 4, 3, dims=(-2,)), gain(4), bias(4))),
    Case("group_norm, largest entries", group_norm, (x(2, 4, 2, kind=INF), gain(4), bias(4)), 0.9),
    Case("batch_norm in training", batch_norm_train, (x(2, 4, 3, dims=(-3, -1)), gain(4), bias(4))),
    Case("batch_norm in training, RMS over channels", batch_norm_train, (x(2, 4, 3, dims=(-2,)), gain(4), bias(4)), 0.9),
    Case("batch_norm by statistics", batch_norm_eval, (x(2, 4, 3, dims=(-2,)), gain(4), bias(4)), 0.8),
    Case("batch_norm by statistics, largest entries", batch_norm_eval, (x(2, 4, 3, kind=INF), gain(4), bias(4)), 0.8),
    Case("instance_norm", instance_norm, (x(2, 4, 4, dims=(-1,)), gain(4), bias(4))),
    Case("instance_norm, RMS over channels", instance_norm, (x(2, 4, 4, dims=(-2,)), gain(4), bias(4)), 0.95),
    Case("normalize", lambda x: F.normalize(x, dim=-1, eps=0.5), (x(3, 4, kind=L2Tensor),)),
    Case("normalize, RMS", lambda x: F.normalize(x, dim=-1, eps=0.5), (x(3, 4),)),
    Case("normalize below eps", lambda x: F.normalize(x, dim=1, eps=0.5), (x(3, 4, 2, n=0.1, dims=WHOLE),)),
    Case("ATen's layer_norm", lambda x, g, b: torch.native_layer_norm(x, [5], g, b, EPS)[0], (x(3, 5), gain(5), bias(5))),
    Case(
        "ATen's group_norm", lambda x, g, b: torch.native_group_norm(x, g, b, 2, 4, 3, 2, EPS)[0], (x(2, 4, 3), gain(4), bias(4))
    ),
]


def llama(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def by_division(x):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def by_power(x):
    return (EPS + (x**2).mean(-1, keepdim=True)) ** -0.5 * x


def in_place(x):
    y = x * 2
    variance = torch.square(y).mean((-2, -1), keepdim=True)
    variance += EPS
    return variance.rsqrt() * y


WRITTEN_OUT = [
    Case(f"{call.__name__} over {dims}", call, (x(3, 4, n=0.7, dims=dims),))
    for call in (llama, by_division, by_power, in_place)
    for dims in ((-1,), (), (-2, -1), (-2,))
] + [
    Case("mean square", lambda x: x.pow(2).mean(-1, keepdim=True), (x(3, 4, n=0.7),)),
    Case("mean square, part of E", lambda x: x.pow(2).mean(-1, keepdim=True), (x(3, 4, n=0.7, dims=WHOLE),), 0.85),
]

INDICES = torch.tensor([[0, 1], [2, 1]])
BAG = {mode: (lambda w, mode=mode: F.embedding_bag(INDICES, w, mode=mode)) for mode in ("sum", "mean", "max")}


def embedding(w):
    return F.embedding(INDICES, w)


def table(kind=R, dims=(-1,)):
    return (Ball("table", kind, (4, 3), 1.5, dims),)


EMBEDDINGS = [
    Case("embedding", embedding, table()),
    Case("embedding, largest entries", embedding, table(INF, ())),
    Case("embedding, mean over rows", embedding, table(dims=WHOLE)),
    Case("embedding, l1 rows", embedding, table(L1Tensor)),
    Case("ATen's embedding", lambda w: torch.ops.aten.embedding(w, INDICES), table()),
    *(Case(f"embedding_bag {mode}", call, table()) for mode, call in BAG.items()),
    *(Case(f"embedding_bag {mode}, l1 rows", call, table(L1Tensor)) for mode, call in BAG.items()),
    *(Case(f"embedding_bag {mode}, mean over rows", call, table(dims=WHOLE), 0.7) for mode, call in BAG.items()),
    Case(
        "embedding_bag, weighted",
        lambda w, p: F.embedding_bag(INDICES, w, mode="sum", per_sample_weights=p),
        (*table(), Ball("weights", INF, (2, 2), 2.0)),
    ),
]

CASES = FUSED + WRITTEN_OUT + EMBEDDINGS


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    found = check(case.call, case.balls, tight=case.tight, **FEW)
    assert found.is_sound


@pytest.mark.parametrize("size", [0.0, 2.0])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_claims_are_differentiable(case, size):
    case.check_at(size, seeded())


def normed(n=0.7, shape=(3, 4), **options):
    t = real(*shape)
    return RMSTensor(n, backing=t * (n / t.abs().amax()), perturbation_size=1.0, **options)


@pytest.mark.parametrize("call", [llama, by_division, by_power], ids=lambda f: f.__name__)
def test_written_out_rms_norm_has_the_fused_bound(call):
    out, fused = call(normed()), rms_norm(normed())
    assert out.norm_size.item() == pytest.approx(fused.norm_size.item())
    assert out.perturbation_size.item() == pytest.approx(fused.perturbation_size.item())
    assert torch.allclose(out.backing, fused.backing)


def of_another(x):
    return (x + 0.5) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def of_a_changed_one(x):
    y = x * 1.0
    factor = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    y += 3
    return y * factor


def with_other_means(x):
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + EPS)


def by_its_mean(x):
    return x * torch.rsqrt(x.mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("call", [of_another, with_other_means], ids=lambda f: f.__name__)
def test_what_only_looks_like_an_rms_norm_is_sound(call):
    check(call, [Ball("x", R, (3, 4), 0.7)], tight=0, **FEW)


def test_in_place_change_breaks_the_chain():
    out = of_a_changed_one(normed())
    assert RMSTensor.of(out.backing).norm_size <= out.norm_size
    assert out.norm_size.item() == pytest.approx((0.7 + 3) / EPS**0.5)


def test_chain_that_is_not_known_is_refused():
    with pytest.raises(NormMismatchError):
        by_its_mean(normed())


@pytest.mark.parametrize("call", [layer_norm, rms_norm, llama], ids=lambda f: f.__name__)
def test_modula_mode_has_sensitivity_one(call):
    with norm_mode("modula"):
        out = call(normed())
    assert out.norm_size.item() == 1.0
    assert out.perturbation_size.item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "call, freedom", [(layer_norm, 15), (rms_norm, 16), (llama, 16)], ids=["layer_norm", "rms_norm", "llama"]
)
def test_typical_mode_agrees_with_random_tensors(call, freedom):
    n, count = 1.7, 100_000
    generator = torch.Generator().manual_seed(seeded(0))
    samples = (torch.randn(count, 16, dtype=torch.float64, generator=generator) * n).requires_grad_()
    direction = torch.randn(count, 16, dtype=torch.float64, generator=generator)
    out, tangent = torch.func.jvp(call, (samples,), (direction,))
    with norm_mode("typical"):
        claimed = call(RMSTensor(n, backing=samples.detach()[:2], perturbation_size=1.0))
    tolerance = 6 / count**0.5 + EPS / n**2
    assert out.square().mean().sqrt().item() == pytest.approx(claimed.norm_size.item(), rel=tolerance)
    assert tangent.square().mean().sqrt().item() == pytest.approx(claimed.perturbation_size.item(), rel=tolerance)


@pytest.mark.parametrize("entries", [2, 3])
def test_typical_mode_of_groups_that_hardly_vary(entries):
    """A batch of two images of one pixel: of two entries a sign is left, which moves as what jumps; of three one direction, by the logarithm of eps."""
    n, count = 1.7, 100_000
    generator = torch.Generator().manual_seed(seeded(0))
    samples = torch.randn(count, entries, dtype=torch.float64, generator=generator) * n
    direction = torch.randn(count, entries, dtype=torch.float64, generator=generator)
    call = lambda x: F.layer_norm(x, (entries,), eps=EPS)  # noqa: E731
    found = torch.func.jvp(call, (samples,), (direction,))[1].square().mean().sqrt().item()
    with norm_mode("typical"):
        claimed = call(RMSTensor(n, backing=samples[:2], perturbation_size=1.0)).perturbation_size.item()
    assert claimed == pytest.approx(1 / n, rel=EPS) if entries == 2 else 0.9 * found <= claimed <= 2 * found


REFUSED = [
    ("layer_norm with a negative eps", lambda: F.layer_norm(normed(), (4,), eps=-1.0)),
    ("normalize with a negative eps", lambda: F.normalize(normed(), eps=-1.0)),
    ("normalize by what is no norm", lambda: F.normalize(normed(), p=0.5)),
    ("batch_norm without statistics", lambda: F.batch_norm(normed(), None, torch.ones(4), training=False)),
    ("batch_norm without channels", lambda: F.batch_norm(normed(shape=(4,)), torch.zeros(4), torch.ones(4))),
    ("embedding that rescales", lambda: F.embedding(INDICES, normed(shape=(4, 3)), max_norm=1.0)),
    ("embedding_bag that rescales", lambda: F.embedding_bag(INDICES, normed(shape=(4, 3)), max_norm=1.0)),
]


@pytest.mark.parametrize("name, call", REFUSED, ids=[r[0] for r in REFUSED])
def test_what_has_no_bound_is_refused(name, call):
    with pytest.raises(NormMismatchError):
        call()
