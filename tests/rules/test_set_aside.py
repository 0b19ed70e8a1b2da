"""Exponentials and largest entries of what is in part set aside: bounds that no tensors exceed, in any spelling."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import LinfTensor, RMSTensor, norm_mode, norm_sensitivity, normed
from thunder_norm.audit import Ball, Case, search
from thunder_norm.modular import ModularNorm
from thunder_norm.rules._facts import Source
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
FEW = {"restarts": 6, "steps": 15, "seed": seeded()}
LOWER = torch.ones(4, 4, dtype=torch.bool).tril()
INF = float("inf")


def pairs(x):
    return x[:, :, None] - x[:, None, :]


def by_where(x, y):
    d = torch.where(LOWER, pairs(x), -INF) + y[:, None, :]
    return torch.exp(d - d.amax(-1, keepdim=True))


def by_other_side(x, y):
    d = y[:, None, :] + torch.where(~LOWER, -INF, pairs(x))
    return torch.exp(d - d.max(-1).values[..., None])


def with_larger(x, y):
    d = torch.where(LOWER, pairs(x), -INF) - y[:, None, :]
    m = torch.maximum(x, torch.max(d, dim=-1).values)
    return torch.exp(d - m[:, :, None])


def with_larger_in_place(x, y):
    d = pairs(x).masked_fill(~LOWER, -INF) + y[:, None, :]
    m = torch.maximum(d.amax(2), y).unsqueeze(2)
    return torch.exp(d - m)


def moved(x, y):
    d = (torch.where(LOWER, pairs(x), -INF) + y[:, None, :]).transpose(1, 2).unsqueeze(1)
    return torch.exp(d - d.amax(2, keepdim=True))


def less_than_the_larger(x, y):
    m = torch.maximum(x, y)
    return torch.exp(x - m) + torch.exp(y - m)


FORMS = (by_where, by_other_side, with_larger, with_larger_in_place, moved, less_than_the_larger)


def balls(n=3.0):
    return [Ball(name, LinfTensor, (2, 4), n, ()) for name in ("x", "y")]


@pytest.mark.parametrize("form", FORMS)
def test_exponentials_are_at_most_one_each(form):
    x, y = (LinfTensor(3.0, backing=torch.rand(2, 4, dtype=D) * 6 - 3, perturbation_size=1.0) for _ in range(2))
    out = form(x, y)
    largest = 2.0 if form is less_than_the_larger else 1.0
    assert out.norm_size.item() == pytest.approx(largest)
    assert out.perturbation_size.item() < 20
    with norm_mode("typical"):
        assert form(x, y).norm_size.item() <= largest + 1e-9


CASES = [Case(form.__name__, form, tuple(balls()), 0.0, FEW) for form in FORMS]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_no_tensors_exceed_them(case):
    found = search(case.call, case.balls, **FEW)
    assert found.is_sound, found


OTHERS = {
    "the least": lambda x, y: torch.exp(pairs(x) - pairs(x).amin(-1, keepdim=True)),
    "of another dimension": lambda x, y: (lambda d: torch.exp(d - d.amax(1)[:, :, None]))(pairs(x) + y[:, None, :]),
    "put in elsewhere": lambda x, y: (lambda d: torch.exp(d - d.amax(-1)[:, None]))(pairs(x) + y[:, None, :]),
    "the smaller": lambda x, y: torch.exp(x - torch.minimum(x, y)),
    "of another": lambda x, y: torch.exp(x - torch.maximum(y, x.flip(0))),
    "less than it": lambda x, y: (lambda d: torch.exp(d - (d.amax(-1) - 1)[..., None]))(pairs(x)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_be_exceeded_is_bounded_as_it_is(name):
    x, y = (LinfTensor(1.0, backing=torch.rand(2, 4, dtype=D)) for _ in range(2))
    assert OTHERS[name](x, y).norm_size > 2  # entries of 1 and -1 reach e
    found = search(OTHERS[name], balls(1.0), **FEW)
    assert found.is_sound, found


def test_a_row_that_is_set_aside_everywhere_has_no_largest_entry():
    mask = LOWER.clone()
    mask[0] = False
    x = LinfTensor(1.0, backing=torch.rand(2, 4, 4))
    d = torch.where(mask, x, -INF) + x
    assert d.amax(-1).norm_size == math.inf


class ParallelMLSTM(nn.Module):
    """The xLSTM's: gates relative to the largest so far, and a divisor that is the larger of two."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.gates = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        i, f = self.gates(x).unbind(-1)
        b = F.logsigmoid(f).cumsum(-1)
        d = torch.where(LOWER, pairs(b), -INF) + i[:, None, :]
        m = torch.maximum(b, torch.max(d, dim=-1).values)[:, :, None]
        s = q @ k.mT / math.sqrt(6) * torch.exp(d - m)
        n = torch.maximum(s.sum(-1, keepdim=True).abs(), torch.exp(-m))
        return s @ v / (n + 1e-6)


def test_an_mlstm_has_targets_and_a_bound():
    """Refused before: how far its output moves was not finite."""
    torch.manual_seed(seeded(0))
    model, x = ParallelMLSTM(), torch.randn(2, 4, 6)
    assert min(ModularNorm(model, x, mode="typical").targets.values()) > 1e-3
    out = model(RMSTensor.of(x))
    assert actual_norm(out) <= out.norm_size * (1 + 1e-5) < math.inf


def _written_into(x, mask, value):
    x = x.clone()
    x[mask.expand(x.shape)] = value
    return x


LOWERED = {
    "masked_fill": lambda x, mask, v: x.masked_fill(mask, v),
    "masked_fill_": lambda x, mask, v: x.clone().masked_fill_(mask, v),
    "where": lambda x, mask, v: torch.where(mask, v, x),
    "where it is not": lambda x, mask, v: torch.where(mask.logical_not(), x, v),
    "an assignment": _written_into,
    "in other places": lambda x, mask, v: x.masked_fill(mask, v).transpose(0, 2).transpose(0, 2),
}
LARGEST = {
    "amax": (lambda x: x.amax(1), 1),
    "max": (lambda x: x.max(1)[0], 1),
    "logsumexp": (lambda x: x.logsumexp(1), 1),
    "amin": (lambda x: x.amin(1), -1),
    "min": (lambda x: x.min(1).values, -1),
}


@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.parametrize("name", LOWERED)
def test_the_largest_of_what_is_left_does_not_know_the_number_in_place_of_the_others(name, largest):
    """Masked max pooling: -1e9 was the norm of its result, and steps of what follows vanished."""
    f, (reduce, sign) = LOWERED[name], LARGEST[largest]
    generator = torch.Generator().manual_seed(seeded(0))
    mask = torch.tensor([[0, 0, 1], [1, 0, 1]]).bool()[:, :, None]
    draws = [
        *torch.randn(6, 2, 3, 4, dtype=torch.float64, generator=generator),
        *(s * torch.ones(2, 3, 4).double() for s in (1, -1)),
    ]
    for kind, dims in ((RMSTensor, (-1,)), (RMSTensor, (-2, -1)), (LinfTensor, ())):
        given = [t / kind.of(t, dims).norm_size for t in draws]
        for v in (-1e9, -0.3):
            for t in given:
                with norm_sensitivity("global"):
                    x = kind(1.0, backing=t, elem_dims=dims, perturbation_size=1.0)
                    y = reduce(f(x, mask, sign * v))
                assert actual_norm(y) <= y.norm_size * (1 + 1e-9)
                step = 1e-6 * given[0]
                moved = (reduce(f(t + step, mask, sign * v)) - reduce(f(t - step, mask, sign * v))) / 2e-6
                assert type(y).of(moved, y.elem_dims).norm_size <= y.perturbation_size * (1 + 1e-6)
            assert y.norm_size <= math.sqrt(12) + math.log(3)
    if name == "in other places":  # at the data what is set aside is not followed there
        return
    with norm_sensitivity("local"):
        y = reduce(f(RMSTensor.of(draws[0]), mask, sign * -1e9))
    assert actual_norm(y) <= y.norm_size * (1 + 1e-9) and y.norm_size <= 20


def test_where_nothing_is_left_the_number_is_the_norm():
    gone = torch.tensor([[1, 1, 1], [0, 0, 1]]).bool()[:, :, None]
    for mask, bound in ((gone, 1e9), (gone.roll(1, 1) & gone, 1e9), (gone & (torch.arange(3) > 0)[:, None], 10.0)):
        f = thunder.jit(lambda x, mask: x.masked_fill(mask, -1e9).amax(1), transforms=[NormTransform()])
        x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seeded(0)))
        for y in (normed(f)(RMSTensor.of(x), mask), RMSTensor.of(x).masked_fill(mask, -1e9).amax(1)):
            assert actual_norm(y) <= y.norm_size * (1 + 1e-6) and y.norm_size <= 2 * bound


class MaxPooled(nn.Module):
    """Tokens that are no padding, as sentence encoders take the largest of."""

    def __init__(self, value):
        super().__init__()
        self.embed, self.out, self.value = nn.Embedding(9, 8), nn.Linear(8, 2), value

    def forward(self, ids):
        x = self.embed(ids)
        return self.out(torch.where((ids == 0)[..., None], self.value, x).max(1)[0])


@pytest.mark.parametrize("value", [-1e9, torch.tensor(-1e9), torch.finfo(torch.float32).min])
def test_masked_max_pooling_has_targets(value):
    torch.manual_seed(seeded(0))
    ids = torch.tensor([[3, 1, 0], [2, 0, 0]])
    targets = {v: ModularNorm(MaxPooled(v), ids, mode="typical").targets for v in (value, -math.inf)}
    assert targets[value] == pytest.approx(targets[-math.inf]) and min(targets[value].values()) > 1e-3


@pytest.mark.parametrize("value", [-1e9, -0.2, -INF])
def test_a_loss_of_logits_beside_themselves_does_not_know_the_number_in_their_place(value):
    """SimCLR's: at the data and for all inputs."""
    own, labels = torch.eye(4, dtype=torch.bool), torch.arange(4).roll(2)

    def f(x):
        return F.cross_entropy(x.masked_fill(own, value), labels)

    generator = torch.Generator().manual_seed(seeded(0))
    worst = 2.0 - 4.0 * F.one_hot(labels, 4).double()
    for t in (*(2 * torch.randn(4, 4, 4, dtype=D, generator=generator)), worst):
        with norm_sensitivity("local"):
            y = f(RMSTensor.of(t))
        assert f(t) <= y.norm_size * (1 + 1e-9) and y.norm_size <= 30
        with norm_sensitivity("global"):
            y = f(LinfTensor(4.0, backing=t.clamp(-4, 4), perturbation_size=1.0))
        assert f(t.clamp(-4, 4)) <= y.norm_size * (1 + 1e-9) and y.norm_size <= 10
        moved = [(f(t.clamp(-4, 4) + s * 1e-6 * worst.sign()) - f(t.clamp(-4, 4))) / 1e-6 for s in (1, -1)]
        assert max(moved) <= y.perturbation_size * (1 + 1e-5)


def test_all_dimensions_of_one_entry_are_taken_out():
    x, mask = torch.arange(6.0).view(2, 1, 3), torch.tensor([[[False, True, True]], [[False, False, True]]])

    def program(x):
        return x.masked_fill(mask, -1e9).squeeze().amax(-1)

    for f in (program, thunder.jit(program, transforms=[NormTransform()])):
        found = f(RMSTensor.of(x))
        assert actual_norm(found) <= found.norm_size < 100
        torch.testing.assert_close(found.backing, program(x))


def slstm(f, i, larger):
    """Two steps of an sLSTM's decay, each sum written twice."""
    decay = m = torch.zeros_like(f)
    for _ in range(2):
        top = larger(F.logsigmoid(f) + m, i)
        decay = torch.exp(F.logsigmoid(f) + m - top)
        m = top
    return decay


TWICE = {
    "maximum": lambda f, i: slstm(f, i, torch.maximum),
    "max of two": lambda f, i: slstm(f, i, torch.max),
    "by other operations": lambda f, i: torch.exp(2 * f.tanh() - i / 3 - torch.maximum(2 * f.tanh() - i / 3, f)),
    "a dimension put in": lambda f, i: (f[..., None] - torch.maximum(f, i)[..., None]).exp(),
    "put in before": lambda f, i: (f.unsqueeze(-1) - torch.maximum(f.unsqueeze(-1), i.unsqueeze(-1))).exp(),
    "a step": lambda f, i: (f[:, 1] - torch.maximum(f, i)[:, 1]).exp(),
    "turned": lambda f, i: (f.transpose(0, 1) - torch.maximum(f, i).transpose(0, 1)).exp(),
    "in another shape and type": lambda f, i: (f.view(8).float() - torch.maximum(f, i).view(8).float()).exp(),
    "terms in another order": lambda f, i: (i * 0.5 + f - torch.maximum(f + i * 0.5, f)).exp(),
    "the smaller": lambda f, i: (torch.minimum(f, i) - i).exp(),
    "the larger taken from": lambda f, i: (-(torch.maximum(f, i) - f)).exp(),
    "less its positive part": lambda f, i: (f - f.relu()).exp(),
    "less what it is at least": lambda f, i: (f - f.clamp(min=0.1)).exp(),
    "largest of a row": lambda f, i: (f * i - (f * i).amax(-1, keepdim=True)).exp(),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("kind", [RMSTensor, LinfTensor])
@pytest.mark.parametrize("name", TWICE)
def test_what_is_computed_twice_is_one_tensor(name, kind, traced):
    call = thunder.jit(TWICE[name], transforms=[NormTransform()]) if traced else TWICE[name]
    y = call(*(kind(3.0, backing=torch.randn(2, 4, dtype=D)) for _ in range(2)))
    assert y.norm_size.item() == pytest.approx(1.0)
    found = search(TWICE[name], [Ball("f", kind, (2, 4), norm_size=3.0), Ball("i", kind, (2, 4), norm_size=3.0)], **FEW)
    assert found.is_sound and found.value > 0.99, found


OTHERWISE = {
    "written between": lambda a, b: ((s := a * 1.0) + b, s.neg_() + b),
    "written into": lambda a, b: ((a + b).neg_(), a + b),
    "a view is written into": lambda a, b: ((s := a + b), s[0].mul_(-2), a + b)[::2],
    "other numbers": lambda a, b: (torch.add(a, b, alpha=2), torch.add(a, b, alpha=3)),
    "a number and a truth": lambda a, b: (a * 1, a * True, a * 2)[1:],
    "other order": lambda a, b: (a - b, b - a),
    "in another place": lambda a, b: (a[:, None], a[None]),
    "an index and a truth": lambda a, b: ((a[None, 1] + b), (a[None, True][:, 0, 0] + b)),
    "written between views": lambda a, b: ((s := a * 1.0)[..., None] + b, s.neg_()[..., None] + b),
    "in another type": lambda a, b: (a + b, in_autocast(a, b)),
    "other claims": lambda a, b: (RMSTensor(9.0, backing=a.backing) + b, RMSTensor(8.0, backing=a.backing) + b),
}


def in_autocast(a, b):
    with torch.autocast("cpu", torch.bfloat16):
        return (a @ torch.eye(4)) + b


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_computed_otherwise_is_another(name):
    a, b = (RMSTensor(3.0, backing=torch.randn(4, 4, generator=torch.Generator().manual_seed(seeded(s)))) * 1.0 for s in (0, 1))
    first, second = OTHERWISE[name](a, b)
    assert not torch.equal(first.backing, second.backing) or name == "other claims"
    assert not Source.of(first).is_same(Source.of(second))
    y = torch.exp(first - torch.maximum(second, b))
    assert y.norm_size >= actual_norm(y)


BENEATH = {
    "less squares": lambda f, i: (f - i.square().sum(-1, keepdim=True) / 2 - f.amax(-1, keepdim=True).detach()).exp(),
    "squares before": lambda f, i: (-i.square() + f - 0.0 - f.amax((0, 1), keepdim=True)).exp(),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", BENEATH)
def test_what_is_beneath_the_largest_is_at_most_one(name, traced):
    """Random features of an attention (FAVOR+): attained by zeros."""
    call = thunder.jit(BENEATH[name], transforms=[NormTransform()]) if traced else BENEATH[name]
    for t in (torch.zeros(2, 4, dtype=D), torch.randn(2, 4, dtype=D)):
        y = call(*(LinfTensor(30.0, backing=t) for _ in range(2)))
        assert actual_norm(y) <= y.norm_size and y.norm_size.item() == pytest.approx(1.0)
    assert BENEATH[name](torch.zeros(2, 4), torch.zeros(2, 4)).eq(1).all()
    assert search(BENEATH[name], [Ball(n, LinfTensor, (2, 4), norm_size=3.0) for n in "fi"], **FEW).is_sound


NOT_BENEATH = {
    "less what may be negative": lambda f, i: (f - i - f.amax(-1, keepdim=True)).exp(),
    "and squares": lambda f, i: (f + i.square() - f.amax(-1, keepdim=True)).exp(),
    "less many times squares": lambda f, i: (torch.sub(f, i.square(), alpha=-2) - f.amax(-1, keepdim=True)).exp(),
    "written between": lambda f, i: (u := f * 1.0, m := u.amax(-1, keepdim=True), u.neg_(), (u - u.square() / 9 - m).exp())[-1],
    "squares less it": lambda f, i: (i.square() - f - f.amax(-1, keepdim=True)).exp(),
}


@pytest.mark.parametrize("name", NOT_BENEATH)
def test_what_may_be_larger_is_not_beneath(name):
    f, i = torch.tensor([[1.0, -3.0, 0.5]]), torch.tensor([[-2.0, -2.0, 2.0]])
    y = NOT_BENEATH[name](*(LinfTensor(3.0, backing=t) for t in (f, i)))
    assert 1 < actual_norm(y) <= y.norm_size


def test_results_are_let_go():
    a = RMSTensor.of(torch.randn(3)) * 1.0
    gone = weakref.ref((a + 1.0).backing)
    y = (a + 1.0) * 2.0
    assert gone() is None and y.shape == (3,)


def test_a_model_that_computes_its_gates_twice_has_targets():
    class Gates(nn.Module):
        def __init__(self):
            super().__init__()
            self.gates = nn.Linear(4, 8)

        def forward(self, x):
            return slstm(*self.gates(x).chunk(2, -1), torch.maximum)

    torch.manual_seed(seeded(0))
    norm = ModularNorm(Gates(), torch.randn(3, 4))
    assert not norm.unreached and min(norm.targets.values()) > 1e-3  # by its norm an exponential of such gates is 1e6


MASK = LOWER[[1, 3]][:, None, None]


def viewed_fill(x):
    return torch.softmax(x.unflatten(0, (2, -1)).masked_fill(~MASK, -INF).view(-1, x.shape[-1]), -1)


def viewed_sum(x):
    return torch.softmax((x.unflatten(0, (2, -1)) + torch.zeros(2, 1, 1, 4).masked_fill(~MASK, -INF)).view(-1, 4), -1)


@pytest.mark.parametrize("program", [viewed_fill, viewed_sum])
@pytest.mark.parametrize("sensitivity", ["global", "local"])
def test_views_of_what_a_mask_of_other_strides_set_aside(program, sensitivity):
    x = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(seeded()))
    with norm_sensitivity(sensitivity):
        found = program(RMSTensor.of(x))
    torch.testing.assert_close(found.backing, program(x))
    assert actual_norm(found) <= found.norm_size * (1 + 1e-5)
