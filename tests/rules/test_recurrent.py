"""LSTM, GRU and RNN layers: what they compute against torch, their norms against adversarial inputs."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from torch import nn

from tests.seeds import LONG, crossed, seeded
from tests.within_norms import actual_norm
from thunder_norm import LinfTensor, RMSTensor, RMSToRMSTensor, norm_mode, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.audit import Ball, Case
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.rules.layers.recurrent import _blocks, geometric, gru_layer, lstm_layer, rnn_relu_layer, rnn_tanh_layer
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
GATES = {lstm_layer: 4, gru_layer: 3, rnn_tanh_layer: 1, rnn_relu_layer: 1}


def balls(layer, size, steps, width=2, state=RMSTensor):
    """The input's part of the gates, the states, the weight and the bias."""
    gates = GATES[layer]
    states = [Ball("h", state, (1, width), size)] + [Ball("c", state, (1, width), size)] * (layer is lstm_layer)
    return (
        Ball("gates", RMSTensor, (steps, 1, gates * width), size),
        *states,
        Ball("weight", RMSToRMSTensor, (gates * width, width), size),
        Ball("bias", RMSTensor, (gates * width,), 0.5 * size),
    )


CASES = [
    Case(
        f"{layer.__name__} output {at}, {steps} steps, {state.__name__} {size}",
        lambda *tensors, layer=layer, at=at: layer(*tensors)[at],
        balls(layer, size, steps, state=state),
        0.0,
    )
    for layer in GATES
    for at in ((0, 2) if layer is lstm_layer else (0,))
    for steps, state, size in ((1, RMSTensor, 1.0), (3, LinfTensor, 0.3))
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds(case):
    case.check(seeded())


MODULES = {
    "LSTM": lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
    "LSTM, projected": lambda: nn.LSTM(3, 4, 2, proj_size=2),
    "LSTM, without biases": lambda: nn.LSTM(3, 4, bias=False),
    "GRU": lambda: nn.GRU(3, 4, 2, bidirectional=True),
    "RNN": lambda: nn.RNN(3, 4, bidirectional=True, batch_first=True),
    "RNN, relu": lambda: nn.RNN(3, 4, 2, nonlinearity="relu", bias=False),
}


@pytest.mark.parametrize("name", MODULES)
def test_values_are_torchs_and_within_their_norms(name):
    torch.manual_seed(seeded(0))
    module = MODULES[name]().to(D)
    x = torch.randn(5, 3, 3, dtype=D)
    expected, states = module(x)
    got, normed_states = module(RMSTensor.of(x))
    pairs = [(got, expected)]
    pairs += zip(normed_states, states, strict=True) if isinstance(states, tuple) else [(normed_states, states)]
    for normed, t in pairs:
        torch.testing.assert_close(normed.backing, t)
        assert actual_norm(normed) <= normed.norm_size * (1 + 1e-9)


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jitted"])
def test_dropout_between_layers_draws_what_torch_draws(is_jitted):
    torch.manual_seed(seeded(0))
    module, x = nn.GRU(3, 2, 2, bidirectional=True, batch_first=True, dropout=0.5), torch.randn(2, 3, 3)
    found = []
    for run, given in (
        (module, x),
        (thunder.jit(module, transforms=[NormTransform()]) if is_jitted else module, RMSTensor.of(x)),
    ):
        torch.manual_seed(seeded(1))
        found.append(run(given)[0])
    torch.testing.assert_close(found[1].backing, found[0])


# Nearby, layers above each other and projections take seconds, and tests/rules/movement/test_composed_gates.py has an adversary for each.
NEARBY = (
    MODULES
    if LONG
    else {
        "LSTM, both directions, without biases": lambda: nn.LSTM(3, 4, bidirectional=True, batch_first=True, bias=False),
        "GRU, both directions": lambda: nn.GRU(3, 4, bidirectional=True),
        "RNN": MODULES["RNN"],
        "RNN, relu": MODULES["RNN, relu"],
    }
)


@functools.cache
def claimed(name: str, sensitivity: str, dims: tuple[int, ...]) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A module, what it is given, and the claim for it."""
    torch.manual_seed(seeded(1))
    module = (NEARBY if sensitivity == "within" else MODULES)[name]().to(D)
    x = torch.randn(2 if sensitivity == "within" else 3, 2, 3, dtype=D)  # steps and samples, or the other way round
    normed = with_perturbation(RMSTensor.of(x, dims), 1e-3 if sensitivity == "within" else 1.0)
    with norm_sensitivity(sensitivity):
        return module, x, sensitivities(module(normed)[0], [normed])[0]


@pytest.mark.parametrize(
    ("name", "sensitivity"),
    [*itertools.product(MODULES, ("global", "local", "composed")), *((name, "within") for name in NEARBY)],
)
def test_sensitivity_bounds_the_jacobian(name, sensitivity):
    """Against the largest of many directions' derivatives."""
    module, x, claim = claimed(name, sensitivity, (-1,))
    for _ in range(10):
        direction = torch.randn_like(x)
        direction /= RMSTensor.of(direction).norm_size
        moved = torch.func.jvp(lambda t: module(t)[0], (x,), (direction,))[1]
        assert RMSTensor.of(moved).norm_size <= claim * (1 + 1e-9)


@pytest.mark.parametrize(("name", "dims"), crossed(MODULES, [(-1,), (-2, -1)]))
def test_composed_is_no_more_than_the_product(name, dims):
    assert claimed(name, "composed", dims)[2] <= claimed(name, "global", dims)[2] * (1 + 1e-3)


@pytest.mark.parametrize("shape", [(2, 3), (2, 2, 3)], ids=["no batch", "another batch"])
def test_states_of_another_batch_are_refused(shape):
    x, states, weights = (
        torch.zeros(shape, dtype=D),
        [torch.zeros(1, 6, 1, dtype=D)] * 2,
        [torch.zeros(4, n, dtype=D) for n in (3, 1)],
    )
    with pytest.raises(UnsupportedOpError, match="states of"):
        torch.lstm(RMSTensor.of(x), states, weights, False, 1, 0.0, False, False, False)


@pytest.mark.parametrize(("cell", "layer"), [(nn.LSTMCell, nn.LSTM), (nn.GRUCell, nn.GRU), (nn.RNNCell, nn.RNN)])
def test_a_cell_is_a_layer_of_one_step(cell, layer):
    torch.manual_seed(seeded(2))
    one, whole = cell(3, 4).to(D), layer(3, 4).to(D)
    whole.load_state_dict({f"{k}_l0": v for k, v in one.state_dict().items()})
    x = RMSTensor.of(torch.randn(2, 3, dtype=D))
    state = one(x)
    state = state[0] if isinstance(state, tuple) else state
    out = whole(x.unsqueeze(0))[0][0]
    torch.testing.assert_close(state.backing, out.backing)
    assert state.norm_size.item() == pytest.approx(out.norm_size.item())


@pytest.mark.parametrize("count", [0, 1, 2, 7, 16])
def test_geometric_sums(count):
    p = torch.tensor(1.25, dtype=D)
    power, total = geometric(p, count)
    assert power.item() == pytest.approx(1.25**count) and total.item() == pytest.approx(sum(1.25**j for j in range(count)))


@pytest.mark.parametrize("steps", [1, 2, 17, 18, 1000])
def test_blocks_are_all_steps_but_the_first(steps):
    assert [t for begin, end in _blocks(steps) for t in range(begin, end)] == list(range(1, steps))


# -- at the data ----------------------------------------------------------------------------------------------------------------


def steepest(f, t: torch.Tensor, kind: type, steps: int = 60) -> float:
    """How far f(t) moves, the largest of its rows in RMS, for moves of t of norm 1, at least: found by ascent to first order."""
    # one Jacobian, for all rows and steps: it is that of the layer itself, and a step is a product with it
    jacobian = torch.func.jacrev(f)(t).flatten(2)

    def unit(d: torch.Tensor) -> torch.Tensor:
        """The moves of norm 1 that go furthest along each of d: each row of length 1, or a matrix whose singular values are 1."""
        if kind is RMSToRMSTensor:
            u, _, v = torch.linalg.svd(d, full_matrices=False)
            return u @ v * (d.shape[-2] / d.shape[-1]) ** 0.5
        return d / d.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-300)

    best = 0.0
    d = unit(torch.randn(len(jacobian), *t.shape, dtype=t.dtype))
    for _ in range(steps):
        moved = jacobian @ d.flatten(1)[..., None]
        best = max(best, moved.square().mean(1).sqrt().max().item())
        d = unit((jacobian.mT @ moved).reshape(d.shape))
    return best


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("layer", GATES)
def test_local_sensitivities_are_those_of_the_gates(layer, has_bias, steps):
    torch.manual_seed(seeded(4))
    width, scale = 3, 1.5
    states = [torch.randn(1, width, dtype=D) for _ in range(1 + (layer is lstm_layer))]
    given = [scale * torch.randn(steps, 1, GATES[layer] * width, dtype=D), *states]
    given += [scale * torch.randn(GATES[layer] * width, width, dtype=D) / width**0.5]
    given += [torch.randn(GATES[layer] * width, dtype=D)] if has_bias else []
    is_projected = layer is lstm_layer and has_bias
    given += [torch.randn(width, width, dtype=D)] if is_projected else []
    count = len(given)
    matrices = {count - 1 - has_bias - is_projected} | ({count - 1} if is_projected else set())
    kinds = [RMSToRMSTensor if i in matrices else RMSTensor for i in range(count)]
    for moving in range(count):
        with norm_sensitivity("local"):
            outs = layer(*(
                with_perturbation(kind.of(t), float(i == moving)) for i, (kind, t) in enumerate(zip(kinds, given, strict=True))
            ))  # fmt: skip
        for at, out in enumerate(outs):
            f = lambda t, at=at, i=moving: layer(*given[:i], t, *given[i + 1 :])[at].reshape(-1, width)  # noqa: E731
            found = steepest(f, given[moving], kinds[moving])
            claimed = out.perturbation_size.item()
            assert found <= claimed * (1 + 1e-6)
            if steps == 1:
                assert claimed <= 10 * found + 1e-9


def test_what_half_open_gates_forget_does_not_add_up_at_the_data():
    """Over 200 steps the bound for all data knows nothing of it; its logarithm is several times that of the one at the data."""
    torch.manual_seed(seeded(5))
    x = torch.randn(200, 2, 8, dtype=D)
    for module in (nn.LSTM(8, 16).to(D), nn.GRU(8, 16).to(D)):
        claims = {}
        for sensitivity in ("global", "local"):
            normed = with_perturbation(RMSTensor.of(x))
            with norm_sensitivity(sensitivity):
                claims[sensitivity] = sensitivities(module(normed)[1][0], normed).item()
        assert math.log(claims["global"]) > 3 * math.log(claims["local"]), claims


# -- mode typical ---------------------------------------------------------------------------------------------------------------


def rotations(generator: torch.Generator, count: int, width: int) -> torch.Tensor:
    """Orthogonal blocks, one above the other: an operator of norm 1 all of whose gains are 1."""
    return torch.cat([torch.linalg.qr(torch.randn(width, width, dtype=D, generator=generator))[0] for _ in range(count)])


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("size", [0.5, 2.0])
@pytest.mark.parametrize("layer", [lstm_layer, gru_layer, rnn_tanh_layer])
def test_typical_claims_are_those_of_gaussians(layer, size, steps):
    """The value within a third; how far random moves of the input go, or of the weight or the bias, the same at all steps, within a factor
    of the claim: moves of several steps are added up as if they had one direction."""
    g, width, draws = torch.Generator().manual_seed(seeded(3)), 64, 100

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=D, generator=g)

    states = [0.5 * random(draws, width) for _ in range(1 + (layer is lstm_layer))]
    given = [size * random(steps, draws, GATES[layer] * width), *states]
    given += [rotations(g, GATES[layer], width), 0.5 * random(GATES[layer] * width)]
    moves = {
        0: random(*given[0].shape),
        len(given) - 2: rotations(g, GATES[layer], width),
        len(given) - 1: random(*given[-1].shape),
    }

    def claimed(moving: int | None) -> RMSTensor:
        sizes = [size, *(0.5 for _ in states), 1.0, 0.5]
        kinds = [*(RMSTensor for _ in range(len(given) - 2)), RMSToRMSTensor, RMSTensor]
        with norm_mode("typical"):
            return layer(*(
                kind(n, backing=t, perturbation_size=None if moving is None else float(i == moving))
                for i, (kind, n, t) in enumerate(zip(kinds, sizes, given, strict=True))
            ))[1]  # fmt: skip

    assert claimed(None).norm_size.item() == pytest.approx(layer(*given)[1].square().mean().sqrt().item(), rel=1 / 3)
    for i, move in moves.items():
        ahead, behind = (layer(*(t + s * 1e-5 * move if j == i else t for j, t in enumerate(given)))[1] for s in (1, -1))
        gain = ((ahead - behind) / 2e-5).square().mean().sqrt().item()
        assert 0.7 * gain < claimed(i).perturbation_size.item() < 5 * gain
