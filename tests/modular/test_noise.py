"""Noise adaptation of ModularOptimizer against its formula, written out in numpy, and which parameters it is of."""

from __future__ import annotations

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from tests.modular.optimized import UNITS, backward, lmo, made, values
from tests.seeds import seeded
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm, ModularOptimizer, find_roles


@pytest.mark.parametrize(("momentum", "nesterov", "decay"), [(0.0, False, 0.8), (0.9, False, 0.95), (0.7, True, 0.8)])
def test_steps_are_those_of_the_formula(momentum, nesterov, decay):
    model, i = made()
    options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": 0.5, "noise_adaptation": decay}
    optimizer = ModularOptimizer(model, i, lr=0.2, method="svd", missing_grads="skip", **options)
    expected = {name: p.numpy() for name, p in values(model).items()}
    past: dict[str, list[np.ndarray]] = {name: [] for name in expected}
    least = 1.0
    for step in range(5):
        backward(model, i, step)
        if step == 1:
            model.norm.bias.grad = None  # others of its shape have averages over more steps from now on
        grads = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        for name, g in grads.items():
            past[name].append(g)
            ages = np.arange(len(past[name]))[::-1]
            # averages over all gradients so far, as sums of weights that make up 1
            weights = momentum**ages * (1 - momentum)
            if nesterov:
                weights = momentum * weights
                weights[-1] += 1 - momentum
            direction = np.tensordot(weights / weights.sum(), past[name], 1)
            factor: np.ndarray | float = 1.0
            if name in UNITS:
                axes = UNITS[name]
                of_squares = decay**ages
                square = np.tensordot(of_squares / of_squares.sum(), [(g**2).sum(axes, keepdims=True) for g in past[name]], 1)
                signal = (direction**2).sum(axes, keepdims=True)
                factor = np.minimum(1, np.sqrt(np.divide(signal, square, out=np.ones_like(signal), where=square > 0)))
                least = min(least, factor.min())
            size = 0.2 * optimizer.norm.targets[name]
            expected[name] = (1 - size * 0.5) * expected[name] - size * factor * lmo(name, direction)
        for name, p in values(model).items():
            np.testing.assert_allclose(p.numpy(), expected[name], rtol=0, atol=1e-10, err_msg=name)
    assert least < 0.9  # there was something to adapt to


class First(nn.Module):
    """Matrices and kernels that multiply inputs, in three ways, and others that multiply what they make."""

    def __init__(self):
        super().__init__()
        self.stem, self.hidden = nn.Conv1d(3, 6, 3, padding=1), nn.Conv1d(6, 6, 3, padding=1)
        self.scaled, self.cell = nn.Linear(3, 6), nn.GRUCell(3, 6)
        self.again = nn.Linear(3, 3)
        self.head = nn.Linear(6, 2)
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x):
        y = self.hidden(self.stem(x.mT)).mT + self.scaled((x - self.mean) / 2)
        h = y.new_zeros(len(x), 6)
        for at in range(2):
            h = self.cell(x[:, at], h)
        return self.head(y + h[:, None] + self.again(self.again(x)).mean(-1, keepdim=True))


def test_what_multiplies_the_inputs_is_known_and_adapts_as_a_whole():
    torch.manual_seed(seeded(0))
    model, x = First(), torch.randn(4, 5, 3)
    roles = find_roles(model, x)
    assert {row.name for row in roles if row.is_first} == {"stem.weight", "scaled.weight", "cell.weight_ih"}
    optimizer = ModularOptimizer(model, x, lr=0.1, noise_adaptation=0.9)
    model(x).square().sum().backward()
    optimizer.step()
    shapes = {
        n: tuple(s["square_average"].shape) for n, p in model.named_parameters() if "square_average" in (s := optimizer.state[p])
    }
    assert {n: shape for n, shape in shapes.items() if not n.endswith(("bias", "bias_ih", "bias_hh"))} == {
        "stem.weight": (1, 1, 1),
        "scaled.weight": (1, 1),
        "cell.weight_ih": (1, 1),
        "head.weight": (2, 1),
    }


class Ends(nn.Module):
    """A table that is the head as well, or a head whose outputs come second."""

    def __init__(self, is_tied: bool):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = None if is_tied else nn.Parameter(torch.randn(4, 7))

    def forward(self, i):
        x = self.table(i).relu()
        return x @ (self.table.weight.mT if self.head is None else self.head)


@pytest.mark.parametrize("is_tied", [True, False])
def test_heads_adapt_by_outputs_wherever_these_are(is_tied):
    torch.manual_seed(seeded(0))
    model, i = Ends(is_tied), torch.arange(7)
    optimizer = ModularOptimizer(model, i, lr=0.1, noise_adaptation=0.9)
    model(i).square().sum().backward()
    optimizer.step()
    shapes = {name: tuple(optimizer.state[p]["square_average"].shape) for name, p in model.named_parameters()}
    assert shapes == {"table.weight": (7, 1)} | ({} if is_tied else {"head": (1, 7)})


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_where_gradients_agree_steps_are_whole_whatever_their_size(scale):
    steps = []
    for noise_adaptation in (None, 0.9):
        model, i = made(dtype=torch.float32)
        optimizer = ModularOptimizer(model, i, lr=0.1, momentum=0.9, nesterov=True, noise_adaptation=noise_adaptation)
        backward(model, i)
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= scale / p.grad.abs().max()
        before = values(model)
        for _ in range(3):
            optimizer.step()
        steps.append({name: p - before[name] for name, p in values(model).items()})
    for name, step in steps[1].items():
        torch.testing.assert_close(step, steps[0][name], msg=lambda m, name=name: f"{name}: {m}")
    assert all(step.isfinite().all() for step in steps[1].values())


def test_the_modular_norm_of_a_step_is_at_most_lr():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1, momentum=0.9, noise_adaptation=0.95, method="svd")
    for step in range(4):
        before = values(model)
        backward(model, i, step)
        optimizer.step()
        moved = {name: p - before[name] for name, p in values(model).items() if name != "fixed"}
        assert optimizer.norm(moved) <= 0.1 * (1 + 1e-9)
        shares = {name: (optimizer.norm({name: t}) / 0.1).item() for name, t in moved.items()}
        assert shares["one.weight"] == pytest.approx(1)
    assert min(shares["head.weight"], shares["table.weight"]) < 0.9


def test_complex_parameters_adapt_by_moduli():
    torch.manual_seed(seeded(0))

    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(4, dtype=torch.complex128))

        def forward(self, x):
            return torch.view_as_real(torch.complex(x, x) + self.bias).flatten(-2)

    model, x = Spectrum(), torch.randn(3, 4, dtype=torch.float64)
    optimizer = ModularOptimizer(model, x, lr=0.1, momentum=0.5, noise_adaptation=0.5)
    first, second = torch.randn(2, 4, dtype=torch.complex128)
    for g in (first, second):
        before = model.bias.detach().clone()
        model.bias.grad = g
        optimizer.step()
    direction = (first + 2 * second) / 3
    square = (first.abs().square().sum() + 2 * second.abs().square().sum()) / 3
    factor = direction.abs().square().sum().sqrt() / square.sqrt()
    step = (before - model.bias.detach()).abs().square().mean().sqrt()
    torch.testing.assert_close(step, 0.1 * optimizer.norm.targets["bias"] * factor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_state_is_saved_and_restored_bit_for_bit(dtype):
    model, i = made(dtype=dtype)
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    optimizer = ModularOptimizer(model, i, noise_adaptation=0.9, **options)

    def train(model: nn.Module, optimizer: ModularOptimizer, steps: range) -> None:
        for step in steps:
            backward(model, i, step)
            optimizer.step()

    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, _ = made(seed=1, dtype=dtype)
    resumed = ModularOptimizer(other, i, **options)  # that it adapts is an option of groups, which are loaded
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(model, optimizer, range(3, 6))
    for its_model, its_optimizer in (*copies, (other, resumed)):
        train(its_model, its_optimizer, range(3, 6))
        for name, p in values(model).items():
            assert torch.equal(p, values(its_model)[name]), name


def test_a_state_of_before_goes_on_with_whole_steps_first():
    """Momentum is there, and no averages: it counts as long, and the first square is the gradient's own."""
    model, i = made()
    options = {"lr": 0.1, "momentum": 0.9, "method": "svd"}
    old = ModularOptimizer(model, i, **options)
    for step in range(3):
        backward(model, i, step)
        old.step()
    state = old.state_dict()
    for group in state["param_groups"]:
        del group["noise_adaptation"]  # as it was saved
    optimizer = ModularOptimizer(model, i, noise_adaptation=0.9, **options)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["noise_adaptation"] == 0.9
    buffer = optimizer.state[model.head.bias]["momentum_buffer"].clone()
    backward(model, i, 3)
    g, before = model.head.bias.grad.clone(), model.head.bias.detach().clone()
    optimizer.step()
    d = 0.9 * buffer + 0.1 * g
    wanted = min(1.0, (d.norm() / g.norm()).item()) * 0.1 * optimizer.norm.targets["head.bias"]
    assert (before - model.head.bias.detach()).square().mean().sqrt().item() == pytest.approx(wanted)


def test_momentum_that_went_on_without_adaptation_counts_as_long():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1, momentum=0.9, noise_adaptation=0.0)
    for step, decay in enumerate((0.0, None, None, 0.0)):
        optimizer.param_groups[0]["noise_adaptation"] = decay
        buffer = optimizer.state[model.head.bias].get("momentum_buffer", torch.zeros(3)).clone()
        backward(model, i, step)
        g, before = model.head.bias.grad.clone(), model.head.bias.detach().clone()
        optimizer.step()
    d = 0.9 * buffer + 0.1 * g
    wanted = min(1.0, (d.norm() / g.norm()).item()) * 0.1 * optimizer.norm.targets["head.bias"]
    assert (before - model.head.bias.detach()).square().mean().sqrt().item() == pytest.approx(wanted)


def test_groups_adapt_or_do_not():
    model, i = made()
    rest = [p for name, p in model.named_parameters() if p.requires_grad and name != "table.weight"]
    groups = [{"params": [model.table.weight], "noise_adaptation": 0.5}, {"params": rest}]
    optimizer = ModularOptimizer(model, i, lr=0.1, params=groups)
    backward(model, i)
    optimizer.step()
    assert [n for n, p in model.named_parameters() if "square_average" in optimizer.state.get(p, {})] == ["table.weight"]


@pytest.mark.parametrize("value", [1.0, -0.1, math.nan, "0.9", False])
def test_what_is_no_decay_is_refused(value):
    model, i = made()
    with pytest.raises(NormMismatchError, match="noise_adaptation must be None or a number >= 0 and < 1"):
        ModularOptimizer(model, i, lr=0.1, noise_adaptation=value)


def test_a_copy_of_a_norm_whose_roles_nobody_asked_for_is_refused():
    model, i = made()
    norm = copy.deepcopy(ModularNorm(model, i, mode="typical", light=0.1))
    with pytest.raises(NormMismatchError, match="ask for its roles before"):
        ModularOptimizer(norm, lr=0.1, noise_adaptation=0.9)


def test_rows_are_told_apart_whatever_their_sizes():
    """One row of zeros, one whose squares float32 does not have, and one whose squares overflow in it."""
    torch.manual_seed(seeded(0))
    sizes = torch.tensor([0.0, 1e-25, 1.0, 1e25])
    gradients = [torch.randn(4, 6, dtype=torch.float64) * sizes[:, None] for _ in range(3)]
    moved = []
    for dtype in (torch.float32, torch.float64):
        model = nn.Embedding(4, 6, dtype=dtype)
        optimizer = ModularOptimizer(model, torch.arange(4), lr=0.1, momentum=0.9, noise_adaptation=0.9)
        nn.init.zeros_(model.weight)
        for g in gradients:
            model.weight.grad = g.to(dtype)
            optimizer.step()
        moved.append(model.weight.detach())
    torch.testing.assert_close(moved[0], moved[1].float())
    assert moved[0][1].abs().sum() > 0 and moved[0][0].abs().sum() == 0


class WithEmpty(nn.Module):
    """Layers of no inputs and of no outputs beside one that has both: groups that a configuration leaves empty."""

    def __init__(self):
        super().__init__()
        self.main, self.no_inputs, self.no_outputs = nn.Linear(6, 4), nn.Linear(0, 4), nn.Linear(6, 0)

    def forward(self, x):
        return torch.cat([self.main(x) + self.no_inputs(x[:, :0]), self.no_outputs(x)], -1)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.filterwarnings("ignore:(?s).*unreached")
def test_empty_parameters_change_nothing_of_others_steps():
    torch.manual_seed(seeded(0))
    model, x = WithEmpty(), torch.randn(5, 6)
    roles = find_roles(model, x)
    assert (roles["main.weight"].role, roles["no_inputs.weight"].role) == (
        "head",
        "matrix",
    )  # the product of no inputs has no entries
    optimizer = ModularOptimizer(model, x, lr=0.3, method="svd", noise_adaptation=0.9, weight_decay=0.1, project=True)
    optimizer.norm.initialize_(torch.Generator().manual_seed(seeded(0)))
    before, size = model.main.weight.detach().clone(), 0.3 * optimizer.norm.targets["main.weight"]
    model(x).square().mean().backward()
    assert model.main.weight.grad is not None
    u, _, vh = torch.linalg.svd(model.main.weight.grad.double(), full_matrices=False)
    moved = (1 - 0.1 * size) * before - size * math.sqrt(4 / 6) * u @ vh
    u, s, vh = torch.linalg.svd(moved, full_matrices=False)
    expected = u * s.clamp(max=math.sqrt(4 / 6)) @ vh
    optimizer.step()
    torch.testing.assert_close(model.main.weight.double(), expected, atol=1e-6, rtol=1e-5)
