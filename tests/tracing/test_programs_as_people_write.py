"""What programs do besides operations: values they keep in modules, autocast regions, torch functions with parameters alone; as eager PyTorch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import NormedTensor, RMSTensor, build_norm_map, norm_report, normed
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder


def jit(model):
    return thunder.jit(model, transforms=[NormTransform()])


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seeded(0)))


class Keeps(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.linear, self.value, self.last = nn.Linear(4, 4), value, None

    def forward(self, x):
        y = self.linear(x)
        self.last = self.value(y)
        return y if self.last is None else y + 1


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


KEPT = {
    "dtype": lambda y: y.dtype,
    "device": lambda y: y.device,
    "memory format": lambda y: torch.contiguous_format,
    "string": lambda y: "seen",
    "list": lambda y: [1, y.shape[0]],
    "dict": lambda y: {"rows": y.shape[0]},
    "set": lambda y: {1, 2},
    "slice": lambda y: slice(0, 2),
    "complex number": lambda y: 1j,
    "function": lambda y: torch.relu,
    "class": lambda y: nn.Linear,
    "nothing": lambda y: None,
}


@pytest.mark.parametrize("name", KEPT)
def test_modules_inside_keep_what_the_program_gives_them(name):
    """Routers of mixtures keep the dtype of their input, for instance."""
    x = random(3, 4)
    for make in (lambda inner: inner, Around):
        torch.manual_seed(seeded(1))
        inner = Keeps(KEPT[name])
        model = make(inner)
        expected, kept = model(x), inner.last
        inner.last = None
        jitted = jit(model)
        for _ in range(3):
            torch.testing.assert_close(jitted(x), expected)
            assert inner.last == kept and type(inner.last) is type(kept)
        assert thunder.cache_misses(jitted) <= 2  # what is kept is not what was there before the first call


class InAutocast(nn.Module):
    """A region with matrix products, one without, and one in which autocast is off again."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(seeded(1))
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.one(x)
            z = y @ self.two.weight.t()
            with torch.autocast("cpu", enabled=False):
                w = self.three(x)
        return y, z, w, F.linear(x, self.one.weight)


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_regions_of_normed_programs_compute_as_eager_ones(grad):
    x = random(3, 8)
    with torch.set_grad_enabled(grad):
        expected = InAutocast()(x)
        assert [t.dtype for t in expected] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
        for given in (x, RMSTensor.of(x)):
            jitted = normed(jit(InAutocast()))
            for _ in range(2):
                for got, want in zip(jitted(given), expected, strict=True):
                    assert got.dtype == want.dtype
                    torch.testing.assert_close(got.backing.float(), want.float(), rtol=0.02, atol=0.02)
                    assert actual_norm(got) <= got.norm_size * 1.02  # bfloat16 rounds
    torch.testing.assert_close(jitted(x)[2].backing, expected[2])


ATTENTIONS = {
    "sequence first": ({}, {}),
    "keys and values of other widths": ({"kdim": 4, "vdim": 6}, {}),
    "rows for keys and values": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "no bias, no weights": ({"bias": False}, {"need_weights": False}),
    "a causal mask": ({"batch_first": True}, {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True}),
    "a mask for each head": ({"batch_first": True}, {"attn_mask": torch.zeros(6, 5, 5)}),
    "padding": ({"batch_first": True}, {"key_padding_mask": torch.arange(5).expand(3, 5) > 3}),
}


class Attends(nn.Module):
    def __init__(self, options, arguments):
        super().__init__()
        torch.manual_seed(seeded(1))
        self.attention, self.arguments = nn.MultiheadAttention(8, 2, **options), arguments
        self.widths = self.attention.kdim, self.attention.vdim

    def forward(self, x):
        return self.attention(x, x[..., : self.widths[0]], x[..., : self.widths[1]], **self.arguments)[0]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_of_plain_inputs_has_norms(name):
    """Thunder has the function as one operation, and only parameters go with the plain inputs."""
    model, x = Attends(*ATTENTIONS[name]).eval(), random(3, 5, 8)
    with torch.no_grad():
        expected = model(x)
        for parameters in ("measured", "unit"):
            y = normed(thunder.jit(model, transforms=[NormTransform(parameters=parameters)]))(x)
            assert isinstance(y, NormedTensor)
            torch.testing.assert_close(y.backing, expected)
        y = normed(jit(model))(x)
        assert actual_norm(y) <= y.norm_size * (1 + 1e-5)
    row = norm_report(jit(model), x).rows[-1]
    assert row.actual <= row.norm_size * (1 + 1e-5)


class Rebuilds(nn.Module):
    """BigBird's encoder takes other attention for short sequences, from its first call with one on."""

    def __init__(self):
        super().__init__()
        self.part, self.is_built = nn.Sequential(nn.Linear(4, 4)), False

    def forward(self, x):
        if not self.is_built:
            before = self.part
            self.part = nn.Sequential(nn.ReLU())
            self.part.linear = before[0]
            self.is_built = True
        return self.part(x)


def test_modules_that_rebuild_themselves_have_done_so_after_a_call():
    x = random(3, 4)
    for wrapped in (lambda f: f, normed):
        eager, model = Rebuilds(), Rebuilds()
        model.load_state_dict(eager.state_dict())
        run = wrapped(jit(model))
        for _ in range(2):
            found, expected = run(x), eager(x)
            torch.testing.assert_close(found.backing if isinstance(found, NormedTensor) else found, expected)
            assert [n for n, _ in model.named_modules()] == [n for n, _ in eager.named_modules()] and model.is_built


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 1.0


@dataclasses.dataclass
class Known(Batch):
    pass


class OfBatch(nn.Linear):
    def forward(self, batch):
        return super().forward(batch.x) * batch.scale


def test_norm_maps_take_dataclasses_that_are_pytrees():
    torch.utils._pytree.register_dataclass(Known)
    model, linear, x = OfBatch(4, 4), nn.Linear(4, 4), random(3, 4)
    linear.load_state_dict(model.state_dict())
    found = build_norm_map(model, Known(x, 2.0))(Known(RMSTensor(1.0), 2.0))
    expected = build_norm_map(Around(linear), x)(RMSTensor(1.0))
    assert found.norm_size.item() == pytest.approx(expected.norm_size.item())


def test_norm_maps_refuse_objects_that_they_cannot_look_into():
    with pytest.raises(NormMismatchError, match="Batch"):
        build_norm_map(OfBatch(4, 4), Batch(random(3, 4), 2.0))(Batch(RMSTensor(1.0), 2.0))


# -- distributions --------------------------------------------------------------------------------------------------------


class Posterior(nn.Module):
    """A variational encoder's divergence from what `prior` gives for the mean."""

    def __init__(self, prior, deviation):
        super().__init__()
        self.encode, self.prior, self.deviation = nn.Linear(4, 6), prior, deviation

    def forward(self, x):
        mean, scale = self.encode(x).chunk(2, dim=-1)
        return D.kl_divergence(D.Normal(mean, self.deviation(scale)), self.prior(mean)).sum(-1)


class Policy(nn.Module):
    """How likely actions are where deviations are parameters, given by their logarithms."""

    def __init__(self):
        super().__init__()
        self.mean, self.log_std = nn.Linear(4, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        mean = self.mean(x).tanh()
        return D.Normal(mean, self.log_std.expand_as(mean).exp()).log_prob(x[:, :2]).sum(-1)


DENSITIES = {
    "numbers": lambda: Posterior(lambda mean: D.Normal(0.0, 1.0), lambda s: F.softplus(s) + 1e-3),
    "constants": lambda: Posterior(lambda m: D.Normal(torch.zeros_like(m), torch.ones_like(m)), lambda s: (0.5 * s).exp()),
    "policy": Policy,
}


@pytest.mark.parametrize("name", DENSITIES)
def test_densities_are_within_their_bounds_and_have_modular_norms(name):
    torch.manual_seed(seeded(0))
    model, x = DENSITIES[name](), torch.randn(3, 4)
    y = jit(model)(RMSTensor.of(x))
    torch.testing.assert_close(y.backing, model(x))
    assert actual_norm(y) <= y.norm_size * (1 + 1e-6) < math.inf
    norm = ModularNorm(model, x, mode="bound")
    assert all(0 < s < math.inf for s in norm.sensitivities.values()), norm.sensitivities


class AdaptsItself(nn.Module):
    """Gradient steps in the program, on a copy of its parameters, as meta-learning takes them."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x, y):
        def loss(parameters):
            return torch.nn.functional.mse_loss(torch.func.functional_call(self.inner, parameters, (x,)), y)

        parameters = dict(self.inner.named_parameters())
        for _ in range(2):
            gradients = torch.func.grad(loss)(parameters)
            parameters = {name: p - 0.1 * gradients[name] for name, p in parameters.items()}
        return loss(parameters)


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
@pytest.mark.parametrize("is_called_before", [False, True])
def test_functional_call_of_a_jitted_module(kind, is_called_before):
    torch.manual_seed(seeded(1))
    model, x = nn.Sequential(nn.Linear(3, 2)), random(4, 3)
    jm = jit(model)
    if is_called_before:
        jm(x)
    given = {name: kind(2 * p.detach()) for name, p in model.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(jm, given, (x,)), torch.func.functional_call(model, given, (x,)))
    torch.testing.assert_close(jm(x), model(x))


def test_a_report_of_gradient_steps_in_the_program_bounds_what_is_left_of_the_loss():
    torch.manual_seed(seeded(1))
    model, x, y = AdaptsItself(), random(5, 3), random(5, 1)
    torch.testing.assert_close(jit(model)(x, y), model(x, y))
    last = norm_report(jit(model), x, y).rows[-1]
    assert last.actual == pytest.approx(model(x, y).item(), rel=1e-5)
    assert last.actual <= last.norm_size * (1 + 1e-6) < 1e3 * last.actual
