"""GRUs and LSTMs with composed sensitivities: against an adversary on whole sequences, and the norm rules of the layers."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
import torch

from tests.rules.movement import composed_programs as programs
from tests.seeds import LONG, crossed, seeded
from thunder_norm import RMSTensor, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.core import vertices
from thunder_norm.rules.layers import _recurrent_vertices

F64 = torch.float64
STEPS, WIDTH, HIDDEN = 3, 2, 3
LAYERS = {
    "GRU": (torch.nn.GRU, {}),
    "GRU without biases": (torch.nn.GRU, {"bias": False}),
    "GRU of two layers": (torch.nn.GRU, {"num_layers": 2}),
    "GRU in both directions": (torch.nn.GRU, {"bidirectional": True}),
    "LSTM": (torch.nn.LSTM, {}),
    "LSTM of two layers, both directions": (torch.nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "LSTM with a projection": (torch.nn.LSTM, {"proj_size": 2}),
}


def model(name: str, scale: float, *, is_last: bool, seed: int = 0):
    """From [batch, steps * width] to [batch, features], with weights `scale` times torch's."""
    torch.manual_seed(seeded(seed))
    kind, options = LAYERS[name]
    layer = kind(WIDTH, HIDDEN, batch_first=True, **options).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(scale)
    layer.requires_grad_(False)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = layer(x.reshape(*x.shape[:-1], STEPS, WIDTH))[0]
        return out[..., -1, :] if is_last else out.flatten(-2)

    return run


def claimed(f, sensitivity: str) -> float:
    """From Euclidean length to Euclidean length."""
    x = with_perturbation(RMSTensor.of(torch.randn(2, STEPS * WIDTH, dtype=F64)))
    with norm_sensitivity(sensitivity):
        y = f(x)
    size = y.shape[-1] if y.elem_dims else 1
    assert y.elem_dims in ((-1,), (-2, -1))
    return sensitivities(y, x).item() * math.sqrt(size / (STEPS * WIDTH))


# With all states in one ellipsoid, and as of sequences that are too long for that.
WAYS = {"at once": _recurrent_vertices.LARGEST, "step by step": 0}


def in_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recurrent_vertices, "_MOST_AT_ONCE", WAYS[way])


@pytest.mark.parametrize(("name", "scale", "way"), crossed(LAYERS, [0.5, 1.5, 4.0], WAYS))
def test_no_adversary_is_steeper(name: str, scale: float, way: str, monkeypatch: pytest.MonkeyPatch):
    f = model(name, scale, is_last=True)
    found = programs.steepest(f, STEPS * WIDTH, 0, steps=60, starts=16)
    in_way(way, monkeypatch)
    assert found <= claimed(f, "composed") * (1 + 1e-9)


@pytest.mark.parametrize("name", ["GRU", "LSTM", "GRU of two layers"])
def test_it_is_far_below_the_rule_of_the_layer(name: str):
    f = model(name, 1.0, is_last=True)
    by_rule = claimed(f, "global")
    assert claimed(f, "composed") < by_rule / (20 if name == "GRU of two layers" else 3)


@pytest.mark.parametrize("name", ["GRU", "GRU in both directions", "LSTM"])
def test_all_states_are_in_one_ellipsoid(name: str, monkeypatch: pytest.MonkeyPatch):
    """Of all steps together no adversary is steeper either, and each is where its step has put it."""
    f = model(name, 1.0, is_last=False)
    found = programs.steepest(f, STEPS * WIDTH, 0, steps=60, starts=16)
    for way in WAYS:
        in_way(way, monkeypatch)
        assert found <= claimed(f, "composed") * (1 + 1e-9)
    if name != "GRU in both directions":
        first = model(name, 1.0, is_last=False)
        of_first = lambda x: first(x)[..., :HIDDEN]  # noqa: E731
        assert claimed(of_first, "composed") < claimed(f, "composed") / 1.5


@pytest.mark.parametrize("broken", ["none", "gates", "state"])
def test_the_adversary_finds_steps_that_claim_too_little(broken: str, monkeypatch: pytest.MonkeyPatch):
    f = model("GRU", 1.5, is_last=True)
    slopes = _recurrent_vertices.gru_everywhere

    def less(by: float):
        return lambda *args: type(found := slopes(*args))(*((low / by, high / by) for low, high in found))

    if broken == "gates":
        monkeypatch.setattr(_recurrent_vertices, "gru_everywhere", less(20))
    elif broken == "state":
        monkeypatch.setattr(_recurrent_vertices, "_affine", lambda x, w, h, v: _affine(x, w * 0, h, v * 0))
        monkeypatch.setattr(_recurrent_vertices, "gru_everywhere", less(5))
    found = programs.steepest(f, STEPS * WIDTH, 0, steps=100, starts=16)
    assert (found > claimed(f, "composed")) == (broken != "none")


_affine = _recurrent_vertices._affine


def test_a_first_state_that_is_large_counts():
    torch.manual_seed(seeded(0))
    layer = torch.nn.LSTM(WIDTH, HIDDEN, batch_first=True).double().requires_grad_(False)
    states = torch.zeros(1, 1, HIDDEN, dtype=F64), torch.full((1, 1, HIDDEN), 30.0, dtype=F64)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, STEPS, WIDTH) if x.ndim == 2 else x
        given = tuple(s.expand(1, x.shape[0], HIDDEN).contiguous() for s in states)
        return layer(x, given)[1][1][0]

    found = programs.steepest(run, STEPS * WIDTH, 0, steps=60, starts=16)
    small = claimed(lambda x: layer(x.reshape(-1, STEPS, WIDTH))[1][1][0], "composed")
    assert found <= claimed(run, "composed") and claimed(run, "composed") > small


def test_the_bound_is_differentiable_in_the_weights():
    torch.manual_seed(seeded(0))
    layer = torch.nn.GRU(WIDTH, HIDDEN, batch_first=True).double()
    x = with_perturbation(RMSTensor.of(torch.randn(2, STEPS, WIDTH, dtype=F64), (-2, -1)))
    with norm_sensitivity("composed"):
        y = layer(x)[0][:, -1]
    found = sensitivities(y, x)
    gradients = torch.autograd.grad(found, [layer.weight_ih_l0, layer.weight_hh_l0])
    assert all(g.isfinite().all() and g.any() for g in gradients)
    with torch.no_grad():
        for p, g in zip((layer.weight_ih_l0, layer.weight_hh_l0), gradients, strict=True):
            p.sub_(0.02 * g / g.norm())
    with norm_sensitivity("composed"):
        y = layer(x)[0][:, -1]
    assert sensitivities(y, x).item() < found.item()


def near(f, point: torch.Tensor, radius: float, dims=(-2, -1)) -> float:
    """Of the states of a sequence [1, steps, width], from Euclidean length to Euclidean length."""
    norm, moved = RMSTensor.of(point, dims).norm_size, radius / math.sqrt(point.numel())
    x = with_perturbation(RMSTensor._wrap(point.clone(), norm + moved, None, dims), moved)
    with norm_sensitivity("within"):
        y = f(x)
    size = math.prod(y.shape[d] for d in y.elem_dims)
    return sensitivities(y, x).item() * math.sqrt(size / point.numel())


def layer(name: str, scale: float):
    """Sequences to the last state."""
    torch.manual_seed(seeded(0))
    kind, options = LAYERS[name]
    made = kind(WIDTH, HIDDEN, batch_first=True, **options).double()
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(scale)
    made.requires_grad_(False)
    return lambda x: made(x)[0][..., -1, :]


def steepest_nearby(f, point: torch.Tensor, radius: float) -> float:
    """What ascents find of |J u| for u of unit length, within a Euclidean radius of a point."""
    e, d = (torch.randn(12, *point.shape[1:], dtype=F64, requires_grad=True) for _ in range(2))
    optimizer, found = torch.optim.Adam([e, d], lr=0.1), 0.0
    for _ in range(25):
        lengths = [t.flatten(1).norm(dim=1)[:, None, None] for t in (e, d)]
        z, unit = point + radius * e / lengths[0].clamp(min=1.0), 1e-5 * d / lengths[1]
        ratio = (f(z + unit) - f(z - unit)).norm(dim=-1) / 2e-5
        found = max(found, ratio.max().item())
        optimizer.zero_grad()
        (-ratio.log().sum()).backward()
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("name", "ball", "way"), crossed([n for n in LAYERS if "both" not in n], [(0.03, 1.5), (0.3, 4.0), (1.5, 1.5)], WAYS)
)
def test_no_point_nearby_is_steeper(name: str, ball: tuple[float, float], way: str, monkeypatch: pytest.MonkeyPatch):
    radius, scale = ball
    f = layer(name, scale)
    torch.manual_seed(seeded(3))
    point = torch.randn(1, STEPS, WIDTH, dtype=F64)
    found = steepest_nearby(f, point, radius)
    in_way(way, monkeypatch)
    both = (-2, -1), (-1,)
    for dims in both if LONG else both[list(LAYERS).index(name) // 2 % 2 :][:1]:
        assert found <= near(f, point, radius, dims) * (1 + 1e-6)


@pytest.mark.parametrize("name", ["GRU", "LSTM", "LSTM with a projection"])
@pytest.mark.parametrize("way", WAYS)
def test_inputs_that_move_for_two_reasons(name: str, way: str, monkeypatch: pytest.MonkeyPatch):
    """What steps have of other ones is another root: gates are where both of them take them."""
    of_steps = layer(name, 2.0)
    f = lambda x: of_steps(x + 2 * x.mean(1, keepdim=True))  # noqa: E731
    torch.manual_seed(seeded(3))
    point = torch.randn(1, STEPS, WIDTH, dtype=F64)
    in_way(way, monkeypatch)
    roots = Mock(wraps=_recurrent_vertices.sequence)
    monkeypatch.setattr(_recurrent_vertices, "sequence", roots)
    claims = near(f, point, 0.3, (-1,)), near(f, point, 0.0, (-1,))
    moved = [[v[0].root.size.item() > 0 for v in call.args[3]] for call in roots.call_args_list]
    assert [True, True] in moved
    # of rows that move one by one as far as all of them together may
    assert steepest_nearby(f, point, 0.3) <= claims[0] * (1 + 1e-6) and claims[1] < claims[0]


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.LSTM])
def test_long_sequences_are_not_far_above_short_ones(kind, monkeypatch: pytest.MonkeyPatch):
    """Weights that forget: what is far back adds nothing, however many steps there are, and the last state is known by itself."""
    monkeypatch.setattr(_recurrent_vertices, "_MOST_AT_ONCE", 0)
    torch.manual_seed(seeded(0))
    made = kind(2, 4, batch_first=True).double().requires_grad_(False)
    for p in made.parameters():
        p.mul_(0.1)
    short, long = (near(lambda x: made(x)[0][:, -1], torch.randn(1, steps, 2, dtype=F64), 0.1) for steps in (4, 16))
    assert long < 2 * short


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.LSTM])
def test_each_step_is_one_search(kind, monkeypatch: pytest.MonkeyPatch):
    """Not one for each gate besides, which what a step leaves together has already."""
    torch.manual_seed(seeded(0))
    made = kind(2, 3, batch_first=True).double().requires_grad_(False)
    searches = Mock(wraps=vertices.smallest)
    monkeypatch.setattr(vertices, "smallest", searches)
    counts = []
    for steps in (2, 3):
        near(lambda x: made(x)[0], torch.randn(1, steps, 2, dtype=F64), 0.1)
        counts.append(searches.call_count)
        searches.reset_mock()
    assert counts[1] - counts[0] == 1


@pytest.mark.parametrize("name", [n for n in LAYERS if LONG or n != "LSTM of two layers, both directions"])
def test_at_radius_0_it_is_the_jacobian(name: str):
    f = layer(name, 1.5)
    torch.manual_seed(seeded(3))
    point = torch.randn(1, STEPS, WIDTH, dtype=F64)
    exact = torch.linalg.matrix_norm(torch.func.jacrev(lambda x: f(x[None])[0])(point[0]).flatten(1), 2).item()
    found = [near(f, point, 0.0, dims) for dims in ((-2, -1), (-1,))]
    if "both" in name:  # directions meet at the input alone, further back than what is kept together
        assert exact <= min(found) and found[0] <= 1.5 * exact
    else:
        assert found == pytest.approx([exact, exact], rel=1e-3)


def test_states_before_the_first_step_count_nearby():
    torch.manual_seed(seeded(4))
    lstm = torch.nn.LSTM(WIDTH, HIDDEN, batch_first=True).double().requires_grad_(False)
    states = torch.randn(1, 1, HIDDEN, dtype=F64), 3 * torch.randn(1, 1, HIDDEN, dtype=F64)
    point = torch.randn(1, STEPS, WIDTH, dtype=F64)

    def run(x: torch.Tensor) -> torch.Tensor:
        return lstm(x, states)[1][1][0]

    exact = torch.linalg.matrix_norm(torch.func.jacrev(lambda x: run(x[None])[0])(point[0]).flatten(1), 2).item()
    assert near(run, point, 0.0) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("radius", [0.1, 1.0])
def test_steps_of_a_batch_with_one_norm_are_known_in_the_norm_of_the_layer(radius: float):
    torch.manual_seed(seeded(0))
    rnn = torch.nn.RNN(1, 2, batch_first=True).double().requires_grad_(False)
    f = lambda x: rnn(x.median(-1, keepdim=True).values)[0]  # noqa: E731
    point, dims = torch.randn(3, 3, 4, dtype=F64), (-3, -2, -1)
    x = with_perturbation(RMSTensor._wrap(point.clone(), RMSTensor.of(point, dims).norm_size + radius, None, dims), radius)
    with norm_sensitivity("within"):
        y = f(x)
    assert y.elem_dims == (-1,)
    rows = torch.autograd.functional.jacobian(f, point).reshape(9, 2, 36)
    exact = torch.linalg.matrix_norm(rows, 2).max().item() * math.sqrt(36 / 2)
    assert exact <= sensitivities(y, x).item() * (1 + 1e-6)


@pytest.mark.parametrize("kind", [torch.nn.GRUCell, torch.nn.LSTMCell, torch.nn.RNNCell])
@pytest.mark.parametrize("dims", [(-1,), (-2, -1)])
def test_a_cell_at_the_data_is_no_steeper_than_near_it(kind, dims: tuple[int, ...]):
    """Of bounds on how far it moves that are all 0 there, the one that grows least counts, and that is no less than the Jacobian."""
    torch.manual_seed(seeded(3))
    cell = kind(4, 5).double().requires_grad_(False)
    x, h = torch.randn(3, 4, dtype=F64), torch.randn(3, 5, dtype=F64)

    def step(x: torch.Tensor) -> torch.Tensor:
        return cell(x, (h, h))[0] if kind is torch.nn.LSTMCell else cell(x, h)

    def within(radius: float) -> float:
        leaf = with_perturbation(RMSTensor(RMSTensor.of(x, dims).norm_size + radius, backing=x, elem_dims=dims), radius)
        with norm_sensitivity("within"):
            return sensitivities(step(leaf), leaf).item()

    jacobians = [torch.func.jacrev(step)(x)[i, :, i] for i in range(3)]  # a row moves with its own input
    steepest = max(torch.linalg.matrix_norm(j, 2).item() for j in jacobians) * math.sqrt(4 / 5)
    assert steepest * (1 - 1e-9) <= within(0.0) <= within(1e-3) * (1 + 1e-9)
