"""Lipschitz margins: constants of pairs of classes against Jacobians, certificates against attacks."""

from __future__ import annotations

import copy
import math
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import LONG, seeded
from thunder_norm import LipschitzMargin, certified_radii
from thunder_norm.errors import NormMismatchError, UnsupportedOpError


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def classifiers():
    torch.manual_seed(seeded(1))
    return {
        "perceptron": (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (8,)),
        "residual": (nn.Sequential(nn.Linear(8, 6), Residual(6), nn.Linear(6, 4)), (8,)),
        "layer norm": (nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 4)), (8,)),
        "convolution": (
            nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 4)),
            (1, 4, 4),
        ),
    }


def largest_slopes(model, x):
    """|d (z_j - z_c) / dx|_2 at the inputs, [classes, classes]."""
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: model(v[None])[0]))(x).flatten(2)
    return (jacobians[:, :, None] - jacobians[:, None]).norm(dim=-1).amax(0)


@pytest.mark.parametrize("sensitivity", ["composed", "global"])
@pytest.mark.parametrize("name", list(classifiers()))
def test_no_slope_exceeds_the_constants(name, sensitivity):
    model, shape = classifiers()[name]
    model.double().eval()
    x = torch.randn(300, *shape, dtype=torch.float64)
    with torch.no_grad():
        found = LipschitzMargin(model, x, 0.0, sensitivity=sensitivity).constants()
    assert (found.diagonal() == 0).all()
    assert (largest_slopes(model, x) <= found * (1 + 1e-9)).all()


def test_the_constants_of_a_linear_classifier_are_those_of_pairs_of_its_rows():
    model = nn.Linear(8, 4).double()
    rows = model.weight
    margin = LipschitzMargin(model, torch.randn(3, 8, dtype=torch.float64), 0.1)
    torch.testing.assert_close(margin.constants(), torch.cdist(rows, rows), rtol=1e-6, atol=1e-9)
    weights = torch.randn(4, 4, dtype=torch.float64)
    (ours,) = torch.autograd.grad((margin.constants() * weights).sum(), rows)
    off = ~torch.eye(4, dtype=torch.bool)
    distances = (rows[:, None] - rows[None] + (~off)[..., None]).norm(dim=-1)
    (theirs,) = torch.autograd.grad((distances * weights)[off].sum(), rows)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_the_loss_is_the_cross_entropy_of_what_is_left():
    model = nn.Linear(8, 4).double()
    x, target = torch.randn(6, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1])
    margin = LipschitzMargin(model, x, 0.5)
    with torch.no_grad():
        # each other class moves x towards its own row, each by an attack of its own
        attacked = torch.stack(
            [
                torch.stack(
                    [
                        (x[i] + (0.5 * F.normalize(model.weight[j] - model.weight[c], dim=0) if j != c else 0))
                        @ (model.weight[j] - model.weight[c])
                        + model.bias[j]
                        - model.bias[c]
                        for j in range(4)
                    ]
                )
                for i, c in enumerate(target)
            ]
        )
        expected = F.cross_entropy(attacked, target)
    torch.testing.assert_close(margin(model(x), target).detach(), expected, rtol=1e-6, atol=1e-9)


def attacked(model, x, target, radii):
    """Inputs moved by gradient ascent, within these radii, to where another class is likeliest."""
    lengths = radii.clamp_max(1e3).reshape(-1, *[1] * (x.ndim - 1))
    moved = x.clone()
    for _ in range(40):
        moved.requires_grad_()
        z = model(moved)
        others = z.masked_fill(F.one_hot(target, 4).bool(), -math.inf).amax(-1)
        (gradient,) = torch.autograd.grad((others - z.gather(-1, target[:, None])[:, 0]).sum(), moved)
        step = (moved.detach() + lengths * gradient / gradient.flatten(1).norm(dim=1).clamp_min(1e-12).reshape(lengths.shape)) - x
        size = step.flatten(1).norm(dim=1).reshape(lengths.shape).clamp_min(1e-300)
        moved = x + step * (lengths * (1 - 1e-6) / size).clamp_max(1.0)
    return moved


@pytest.mark.parametrize("sensitivity", ["composed", "global"])
@pytest.mark.parametrize("name", list(classifiers()))
def test_attacks_within_the_radius_change_no_certified_label(name, sensitivity):
    model, shape = classifiers()[name]
    model.double().eval()
    x = torch.randn(64, *shape, dtype=torch.float64)
    target = model(x).argmax(-1)
    margin = LipschitzMargin(model, x, 0.05, sensitivity=sensitivity)
    radii = margin.radii(model(x), target)
    assert (radii >= 0).all()
    assert torch.equal(margin.certified(model(x), target), radii > 0.05)
    assert (margin.radii(model(x), (target + 1) % 4) <= 0).all()
    assert torch.equal(model(attacked(model, x, target, radii)).argmax(-1), target)


@pytest.mark.parametrize("name", list(classifiers()))
def test_attacks_within_certified_radii_change_no_label(name):
    model, shape = classifiers()[name]
    model.double().train()
    x = torch.randn(8 if LONG else 4, *shape, dtype=torch.float64)
    target = model.eval()(x).argmax(-1)
    radii = certified_radii(model, x, target)
    assert (radii > 0).all()
    assert torch.equal(model(attacked(model, x, target, radii)).argmax(-1), target)
    assert (certified_radii(model, x, (target + 1) % 4) == 0).all()
    everywhere = LipschitzMargin(model, x, 0.0).radii(model(x), target)
    assert (radii >= everywhere * (1 - 2e-3) - 1e-9).all()


def test_the_certified_radius_of_a_linear_classifier_is_the_distance_to_the_nearest_plane():
    model = nn.Linear(8, 4).double()
    x = torch.randn(6, 8, dtype=torch.float64)
    z = model(x).detach()
    target = z.argmax(-1)
    distances = (z.gather(1, target[:, None]) - z) / torch.cdist(model.weight, model.weight).detach()[target]
    expected = distances.masked_fill(F.one_hot(target, 4).bool(), math.inf).amin(-1)
    torch.testing.assert_close(certified_radii(model, x, target), expected, rtol=2e-3, atol=0.0)


def test_training_under_it_makes_labels_safe_further_away():
    torch.manual_seed(seeded(4))
    centers = torch.randn(4, 8) * 2
    target = torch.arange(200) % 4
    x = centers[target] + 0.3 * torch.randn(200, 8)
    safe = {}
    for radius in (0.0, 2.0):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        margin, optimizer = LipschitzMargin(model, x, radius), torch.optim.Adam(model.parameters(), lr=3e-2)
        for _ in range(40):
            optimizer.zero_grad()
            margin(model(x), target).backward()
            optimizer.step()
        safe[radius] = margin.radii(model(x), target).mean().item()
    assert safe[2.0] > 1.05 * safe[0.0]


def test_the_model_is_as_it_was():
    model, shape = classifiers()["convolution"]
    model.train()
    model[2].eval()
    x = torch.randn(5, *shape)
    flags, before, state = [m.training for m in model.modules()], copy.deepcopy(model.state_dict()), torch.get_rng_state()
    margin = LipschitzMargin(model, x, 0.1)
    margin.constants()
    assert list(margin.parameters()) == []
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m, x: LipschitzMargin(m, x, -1.0), "radius"),
        (lambda m, x: LipschitzMargin(m, x, math.nan), "radius"),
        (lambda m, x: LipschitzMargin(m, x, 0.1, sensitivity="local"), "all inputs"),
        (lambda m, x: LipschitzMargin(m, x[0], 0.1), "batch"),
        (lambda m, x: certified_radii(m, x[0], torch.tensor([0])), "batch"),
        (lambda m, x: LipschitzMargin(m, x.long(), 0.1), "floating"),
        (lambda m, x: LipschitzMargin(m, x, 0.1)(torch.randn(3, 7), torch.zeros(3, dtype=torch.long)), "4 classes"),
        (lambda m, x: LipschitzMargin(nn.Unflatten(-1, (2, 4)), x, 0.1).constants(), "logits"),
    ],
)
def test_mistakes_are_refused(make, words):
    with pytest.raises(NormMismatchError, match=words):
        make(nn.Linear(8, 4), torch.randn(3, 8))


class Fn(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.forward = f


@pytest.mark.parametrize(
    "f",
    [
        lambda x: 10 * x * (x > 0).to(x.dtype),
        lambda x: x * (x > 0.05),
        lambda x: x.masked_fill(x > 0, 5.0),
        lambda x: x if x[0, 0] < 0 else x.flip(1),
        lambda x: torch.stack([x, x.flip(1)], 1)[torch.arange(1), (x[:, 0] > 0).long()],
        lambda x: x * 0.001 + F.one_hot(x.argmax(1), 2),
        lambda x: x + ((x > 0).double() - x).detach(),
    ],
)
@pytest.mark.parametrize(
    "certify", [lambda m, x, t: certified_radii(m, x, t), lambda m, x, t: LipschitzMargin(m, x, 0.1).radii(m(x), t)]
)
def test_models_that_decide_by_values_are_refused(f, certify):
    x = torch.tensor([[-0.1, 0.5]], dtype=torch.float64)
    with pytest.raises(NormMismatchError, match="decides by"):
        certify(Fn(f), x, torch.tensor([1]))


def test_indices_that_nobody_uses_do_no_harm():
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    head = nn.Linear(8, 3).double()
    assert (certified_radii(Fn(lambda x: head(x.max(1)[0])), x, head(x.max(1)[0]).argmax(1)) > 0).all()


def test_constants_that_depend_on_the_norm_say_nothing_further_away():
    model = Fn(lambda x: x * x * torch.tensor([1.0, 0.0]) + torch.tensor([0.0, 1.0]))
    x, target = torch.tensor([[0.1, 0.1]]), torch.tensor([1])
    margin = LipschitzMargin(model, x, 0.1)
    assert margin.radii(model(x), target).item() == pytest.approx(0.1)
    assert margin.certified(model(x), target).all()
    assert model(torch.tensor([[1.0 + 1e-3, 0.1]])).argmax() == 0
    assert certified_radii(model, x, target).item() <= 0.9


def test_what_a_model_counts_and_changes_is_as_it_was():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.k, self.head, self.seen = 0, nn.Linear(8, 3), []
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x):
            self.k += 1
            self.n += 1
            self.seen.append(1)
            return self.head(x * 2)

    model, x = Counts(), torch.randn(3, 8)
    before = x.clone()
    certified_radii(model, x, torch.tensor([0, 1, 2]))
    LipschitzMargin(model, x, 0.1).constants()
    assert torch.equal(x, before)
    assert (model.k, model.n.item(), model.seen) == (0, 0.0, [])
    with pytest.raises(UnsupportedOpError, match="in-place"):
        certified_radii(Fn(lambda x: model.head(x.sub_(0.5))), x, model.head(x - 0.5).argmax(1))  # else it is not asked
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (torch.tensor([0, 1]), "each of 3 inputs"),
        (torch.tensor([0.0, 1.0, 2.0]), "integers"),
        (torch.tensor([0, 1, 7]), "class 7"),
        (torch.tensor([0, 1, -100]), ">= 0"),
    ],
)
def test_targets_that_are_no_classes_are_refused(target, words):
    model, x = nn.Linear(8, 4), torch.randn(3, 8)
    for call in (lambda: certified_radii(model, x, target), lambda: LipschitzMargin(model, x, 0.1)(model(x), target)):
        with pytest.raises(NormMismatchError, match=words):
            call()


def test_what_is_no_plain_classifier_is_refused():
    x, target = torch.randn(3, 8), torch.tensor([0, 1, 0])
    for model in (lambda x: x, torch.compile(nn.Linear(8, 4)), Fn(lambda x: {"z": x}), nn.Linear(8, 1), Fn(lambda x: x.sum(1))):
        with pytest.raises(NormMismatchError, match="Lipschitz margins"):
            certified_radii(model, x, target)


class Noisy(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw, self.head = draw, nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x + self.draw(x))


GENERATOR = torch.Generator()
NUMPY = numpy.random.default_rng(seeded(0))
DRAWS = {
    "torch": torch.randn_like,
    "a generator": lambda x: torch.randn(x.shape, generator=GENERATOR),
    "Python": lambda x: random.random() * torch.ones(8),
    "numpy": lambda x: float(numpy.random.rand()) * torch.ones(8),
    "a generator of numpy": lambda x: float(NUMPY.random()) * torch.ones(8),
    "dropout in eval mode": lambda x: F.dropout(x, 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_model_that_draws_random_numbers_in_eval_mode_is_refused(name):
    torch.manual_seed(seeded(0))
    x = torch.randn(2, 8)
    model = Noisy(DRAWS[name])
    with pytest.raises(NormMismatchError, match="draws random numbers in eval mode"):
        certified_radii(model, x, model.head(x).argmax(-1))
    with pytest.raises(NormMismatchError, match="draws random numbers in eval mode|a normal distribution is unbounded"):
        LipschitzMargin(model, x, 0.1).constants()
    quiet = Noisy(lambda x: F.dropout(x, 0.5, training=False))
    assert (certified_radii(quiet, x, quiet.head(x).argmax(-1)) > 0).all()
