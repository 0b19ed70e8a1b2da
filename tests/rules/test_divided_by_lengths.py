"""What a program divides by its own length: parameters that are given one, and tensors that may be as short as numbers can be."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm import L1Tensor, L2Tensor, LinfTensor, RMSTensor
from thunder_norm.audit import Ball, Case, search
from thunder_norm.errors import NormMismatchError, VanishingTargetWarning
from thunder_norm.modular import ModularNorm

D = torch.float64
weight_norm = nn.utils.parametrizations.weight_norm


class Normalized(nn.Module):
    """A linear layer whose weight is made of v by a function."""

    def __init__(self, make, *shape):
        super().__init__()
        self.make, self.v = make, nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return F.linear(x, self.make(self.v))


def derivative(model: nn.Module, p: dict[str, torch.Tensor], x: torch.Tensor, u: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the output along u, from two points: torch has no forward derivative of `torch._weight_norm`."""
    h = 1e-6
    ahead, behind = (torch.func.functional_call(model, {k: p[k] + c * u[k] for k in p}, (x,)) for c in (h, -h))
    return (ahead - behind) / (2 * h)


PARAMETERS = {
    "weight_norm": (lambda: weight_norm(nn.Linear(6, 4)), (3, 6)),
    "weight_norm, dim None": (lambda: weight_norm(nn.Linear(6, 4), dim=None), (3, 6)),
    "weight_norm of columns": (lambda: weight_norm(nn.Linear(6, 4), dim=1), (3, 6)),
    "weight_norm, old": (lambda: nn.utils.weight_norm(nn.Linear(6, 4)), (3, 6)),
    "weight_norm of a convolution": (lambda: weight_norm(nn.Conv1d(4, 6, 3, padding=1), dim=2), (2, 4, 5)),
    "weight_norm of a transposed convolution": (lambda: weight_norm(nn.ConvTranspose1d(4, 6, 3), dim=1), (2, 4, 5)),
    "normalize": (lambda: Normalized(lambda v: F.normalize(v, dim=1), 4, 6), (3, 6)),
    "normalize of columns, no eps": (lambda: Normalized(lambda v: F.normalize(v, dim=0, eps=0.0), 4, 6), (3, 6)),
    "written out": (lambda: Normalized(lambda v: v / v.norm(dim=1, keepdim=True), 4, 6), (3, 6)),
    "written out, whole": (lambda: Normalized(lambda v: v / v.square().sum().sqrt(), 4, 6), (3, 6)),
    "two layers": (lambda: nn.Sequential(weight_norm(nn.Linear(6, 5)), nn.ReLU(), weight_norm(nn.Linear(5, 4))), (3, 6)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", PARAMETERS)
def test_an_update_of_modular_norm_1_of_what_is_divided_by_its_length_moves_the_output_by_at_most_1(name):
    make, shape = PARAMETERS[name]
    torch.manual_seed(seeded())
    model = make().to(D)
    norm = ModularNorm(model, torch.randn(shape, dtype=D))
    assert not norm.unreached and all(1e-3 < t < math.inf for t in norm.targets.values())
    ((of_input,), _) = norm.inputs
    for _ in range(20):
        norm.initialize_()
        p = {k: t.detach() for k, t in model.named_parameters()}
        x = torch.randn(shape, dtype=D)
        x = x / type(of_input).of(x, of_input.elem_dims).norm_size
        step = norm.dualize({k: torch.randn_like(t) for k, t in p.items()}, method="svd")
        assert norm(step).item() == pytest.approx(1)
        moved = derivative(model, p, x, step)
        assert 0 < type(norm.outputs).of(moved, norm.outputs.elem_dims).norm_size <= 1 + 1e-6


def test_the_bound_for_a_weight_of_given_length_is_attained():
    """Rows of v orthogonal to the input, moved along it."""
    model = weight_norm(nn.Linear(6, 4, bias=False)).to(D)
    norm = ModularNorm(model, torch.randn(3, 6, dtype=D))
    name = "parametrizations.weight.original1"
    v = torch.tensor([1.0, -1.0], dtype=D).repeat(4, 3)
    p = {"parametrizations.weight.original0": torch.ones(4, 1, dtype=D), name: v}
    x, u = torch.ones(3, 6, dtype=D), {"parametrizations.weight.original0": torch.zeros(4, 1, dtype=D), name: torch.ones_like(v)}
    moved = derivative(model, p, x, u)
    assert RMSTensor.of(moved).norm_size.item() == pytest.approx(norm.sensitivities[name])


def test_steps_make_what_is_divided_by_its_length_no_shorter():
    torch.manual_seed(seeded())
    model = weight_norm(nn.Linear(6, 4)).to(D)
    x, target = torch.randn(16, 6, dtype=D), torch.randn(16, 4, dtype=D)
    norm = ModularNorm(model, x)
    norm.initialize_()
    v = model.parametrizations.weight.original1
    for _ in range(10):
        before = v.detach().norm(dim=1)
        model.zero_grad()
        (model(x) - target).square().mean().backward()
        steps = norm.dualize({k: p.grad for k, p in model.named_parameters()}, target_norm=0.3)
        with torch.no_grad():
            for k, p in model.named_parameters():
                p -= steps[k]
        assert (v.detach().norm(dim=1) >= before * (1 - 1e-9)).all()


@pytest.mark.parametrize("name", ["written out", "written out, whole", "two layers"])
def test_sensitivities_do_not_depend_on_the_length_at_hand(name):
    """They were those at the values at hand: of a parameter that is long when the norm is derived, a hundredth."""
    make, shape = PARAMETERS[name]
    torch.manual_seed(seeded())
    model, x = make().to(D), torch.randn(shape, dtype=D)
    found = ModularNorm(model, x).sensitivities
    for p in model.parameters():
        p.data *= 100
    assert ModularNorm(model, x).sensitivities == pytest.approx(found)


OTHERS = {
    "its largest entry": lambda v: v / v.abs().max(),
    "the sums of its rows": lambda v: v / v.abs().sum(1, keepdim=True),
    "the length of a part": lambda v: v / v[:, :1].norm(),
    "its singular value": lambda v: v / torch.linalg.matrix_norm(v, 2),
    "the length of another": lambda v: v / (v + 1).norm(dim=1, keepdim=True),
    "an entry": lambda v: v / v.detach()[0, 0].abs(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_divided_by_another_number_than_its_length_is_refused(name):
    """The values at hand stood for all that it may be: steps of norm 1 moved the output by as much as one liked."""
    torch.manual_seed(seeded())
    with pytest.raises(NormMismatchError, match="lower bound"):
        ModularNorm(Normalized(OTHERS[name], 4, 6).to(D), torch.randn(3, 6, dtype=D))


def test_entries_of_one_modulus_do_not_tell_what_they_are_divided_by():
    model = Normalized(lambda v: v / v.abs().amax(1, keepdim=True), 4, 6)
    torch.nn.init.ones_(model.v)
    with pytest.raises(NormMismatchError, match="lower bound"):
        ModularNorm(model, torch.randn(3, 6))


LENGTHS = {
    "normalize": lambda x: F.normalize(x, dim=-1, eps=0.0),
    "over its norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "times an inverse": lambda x: x * x.square().sum(-1, keepdim=True).rsqrt(),
    "rms_norm": lambda x: F.rms_norm(x, (4,), eps=0.0),
    "cosine": lambda x: F.cosine_similarity(x, torch.ones(4, dtype=x.dtype), dim=-1, eps=0.0),
}
CENTRED = {
    "layer_norm": lambda x: F.layer_norm(x, (2,), eps=0.0),
    "standardized": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, unbiased=False),
}


@pytest.mark.parametrize("name", [*LENGTHS, *CENTRED])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_without_eps_the_slope_is_that_at_the_shortest_vector_of_the_dtype(name, dtype):
    """From one to its opposite the result moves by twice its length: no smaller constant holds between two tensors of the dtype."""
    call = (LENGTHS | CENTRED)[name]
    if name == "cosine":  # of which another direction counts
        pair, least = (torch.ones(1, 4, dtype=D), -torch.ones(1, 4, dtype=D)), 0.499
    elif name in LENGTHS:
        pair, least = (torch.eye(1, 4, dtype=D), -torch.eye(1, 4, dtype=D)), 0.999
    else:
        pair, least = (torch.tensor([[1.0, 0.0]], dtype=D), torch.tensor([[0.0, 1.0]], dtype=D)), 0.999
    x, other = (t * torch.finfo(dtype).tiny * torch.finfo(dtype).eps for t in pair)
    assert (x.to(dtype).double() == x).all() and x.any(), "they are numbers of the dtype"
    y = call(RMSTensor(1.0, backing=x.to(dtype), perturbation_size=1.0))
    kind = L2Tensor if isinstance(y, L2Tensor) else RMSTensor
    moved = kind.of(call(x) - call(other), y.elem_dims).norm_size / RMSTensor.of(x - other).norm_size
    assert least <= moved / y.perturbation_size <= 1 + 1e-6


def test_a_tensor_in_double_precision_has_a_finite_slope_too():
    for call in LENGTHS.values():
        y = call(RMSTensor(1.0, backing=torch.ones(2, 4, dtype=D), perturbation_size=1.0))
        assert 1e100 < y.perturbation_size < math.inf


def test_parts_of_what_has_a_length_may_be_as_short_as_one_likes():
    """A parameter of norm 1 over its rows says nothing about halves of rows."""
    torch.manual_seed(seeded())
    halves = Normalized(lambda v: F.normalize(v.unflatten(-1, (2, 3)), dim=-1, eps=1e-3).flatten(-2), 4, 6)
    rows = Normalized(lambda v: F.normalize(v, dim=-1, eps=1e-3), 4, 6)
    x = torch.randn(3, 6)
    assert ModularNorm(halves, x).sensitivities["v"] > 100 * ModularNorm(rows, x).sensitivities["v"]


def over(x: torch.Tensor, divisor: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return x / divisor(x)


# what no entry exceeds; the least number that keeps the divisor from 0 says nothing of the value
LARGER = {
    "sum of moduli": lambda x: over(x, lambda t: t.abs().sum(-1, keepdim=True) + 1e-2),
    "a multiple of it": lambda x: over(x, lambda t: 3 * t.abs().sum(-1, keepdim=True) + 1e-2),
    "clamped mean": lambda x: over(x, lambda t: t.abs().mean(-1, keepdim=True).clamp(min=1e-2)),
    "of all": lambda x: over(x, lambda t: 1e-2 + t.abs().mean()),
    "a dimension put in": lambda x: over(x, lambda t: t.abs().sum(0)[None] + 1e-2),
    "largest": lambda x: over(x, lambda t: t.abs().amax(-1, keepdim=True) + 1e-2),
    "largest, clamped": lambda x: over(x, lambda t: t.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-2)),
    "largest, a dimension put in": lambda x: over(x, lambda t: t.abs().amax(0).unsqueeze(0).clamp_min(1e-2)),
    "largest of all": lambda x: over(x, lambda t: t.abs().max() + 1e-2),
    "1-norm": lambda x: over(x, lambda t: t.norm(p=1, dim=-1, keepdim=True) + 1e-2),
    "1-norm, a dimension put in": lambda x: over(x, lambda t: torch.linalg.vector_norm(t, 1, 0)[None].clamp(min=1e-2)),
    "3-norm": lambda x: over(x, lambda t: torch.linalg.norm(t, 3.0, -1, True) + 1e-2),
    "largest of all, as a norm": lambda x: over(x, lambda t: t.norm(p=math.inf) + 1e-2),
    "gates": lambda x: over(x.relu(), lambda t: t.sum(-1, keepdim=True) + 1e-2),
    "squares": lambda x: over(x.square(), lambda t: t.amax(-1, keepdim=True) + 1e-2),
    "normalize, p = 1": lambda x: F.normalize(x, p=1.0, dim=-1, eps=1e-2),
    "normalize, p = 3": lambda x: F.normalize(x, p=3.0, dim=-1, eps=1e-2),
    "normalize, p = inf": lambda x: F.normalize(x, p=math.inf, dim=0, eps=1e-2),
}
BELOW = {
    "no modulus": lambda x: over(x, lambda t: t.sum(-1, keepdim=True).square() + 1e-2),
    "another": lambda x: over(x, lambda t: (t + 1).abs().amax(-1, keepdim=True) + 1e-2),
    "1-norm of another": lambda x: over(x, lambda t: (t + 1).norm(p=1, dim=-1, keepdim=True) + 1e-2),
    "a signed sum beside it": lambda x: over(x, lambda t: (t.norm(p=1, dim=-1, keepdim=True) - t.sum(-1, keepdim=True)).abs() + 1e-2),
    "in other places": lambda x: over(x, lambda t: t.abs().amax(-1)[None] + 1e-2),
    "less": lambda x: over(x, lambda t: (t.abs().amax(-1, keepdim=True) - 1).abs() + 1e-2),
    "smallest": lambda x: over(x, lambda t: t.abs().amin(-1, keepdim=True) + 1e-2),
    "changed since": lambda x: over(x.clone().mul_(3), lambda t: x.abs().amax(-1, keepdim=True) + 1e-2),
}  # fmt: skip


OF_RULE = [
    Case(f"over what no entry exceeds: {name}", LARGER[name], (Ball("x", RMSTensor, (2, 3), 1.5),), 0.0)
    for name in ("sum of moduli", "clamped mean", "largest", "largest of all")
]


@pytest.mark.parametrize("name", [*LARGER, *BELOW])
@pytest.mark.parametrize("kind, dims", [(RMSTensor, (-1,)), (LinfTensor, ()), (RMSTensor, (-2, -1))])
def test_what_is_divided_by_what_no_entry_exceeds(name, kind, dims):
    call = (LARGER | BELOW)[name]
    ball = Ball("x", kind, (3, 3), 1.5, elem_dims=dims)
    found = search(call, [ball], restarts=2, steps=8, seed=seeded())
    assert found.is_sound, found
    y = call(kind(1.5, backing=torch.zeros(3, 3, dtype=D), elem_dims=dims, perturbation_size=1.0))
    assert name in BELOW or y.norm_size <= 9, "the sum of nine moduli over their mean"


def test_what_is_divided_by_all_that_there_is_moves_as_far_as_is_claimed_next_to_0():
    """From 0 to where the sum is as large as what is added to it, one entry moves by half of what is claimed."""
    x = RMSTensor(1.0, backing=torch.zeros(1, 4, dtype=D), perturbation_size=1.0)
    y = LARGER["sum of moduli"](x)
    assert isinstance(y, L1Tensor) and y.norm_size.item() == pytest.approx(1.0)
    assert y.perturbation_size.item() == pytest.approx(4 / 1e-2), "the L1 norm of four entries of 1, over eps"


SUMS = {
    "a sum": lambda v: (lambda w: w / w.norm(dim=1, keepdim=True))(v + 0.5 * v.flip(0)),
    "a sum, its length detached": lambda v: (lambda w: w / w.norm(dim=1, keepdim=True).detach())(v + 0.5 * v.flip(0)),
    "a transposed one": lambda v: (v.T / v.T.norm(dim=-1, keepdim=True)).T,
}


@pytest.mark.parametrize("name", SUMS)
def test_what_is_made_of_parameters_is_as_long_as_its_dtype_can_tell_from_0(name):
    """The sum may be next to 0, as an activation may: the bound is that of rows that are, and no step of its target moves the output by more than 1."""
    torch.manual_seed(seeded())
    model, x = Normalized(SUMS[name], 4, 6).to(D), torch.randn(3, 6, dtype=D)
    with pytest.warns(VanishingTargetWarning):
        norm = ModularNorm(model, x)
    assert not norm.unreached and 0 < min(norm.targets.values()) < 1e-30
    near_0 = torch.full((4, 6), 1e-160, dtype=D)
    moved = SUMS[name](near_0 * torch.randn(4, 6, dtype=D)) - SUMS[name](near_0 * torch.randn(4, 6, dtype=D))
    assert moved.norm() > 0.1  # as far as the sphere allows, however small a step: no larger target would do
