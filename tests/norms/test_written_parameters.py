"""Tensors made from parameters that a program writes into: its values are eager PyTorch's, and norms those of what it writes out of place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor, RMSToRMSTensor, build_norm_map, norm_report, normed
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder


class Net(nn.Module):
    def __init__(self, program):
        super().__init__()
        torch.manual_seed(seeded(0))
        self.w, self.b = nn.Parameter(torch.randn(6, 6) * 0.5), nn.Parameter(torch.randn(6) * 0.5)
        self.program = program

    def forward(self, x):
        return self.program(self, x)


def zeros_in_the_middle(m, x):
    b = m.b.clone()
    b[2:4].zero_()
    return F.linear(x, m.w, b)


def entries(m, x):
    w = m.w + 0
    w[4:] = 0
    w[..., 1:3] += 1
    w[torch.tensor([0, 1])] = 2.0
    return x @ w


def views_of_views(m, x):
    w = m.w * 2
    flat = w.view(-1)
    flat[3:9].mul_(0.5)
    w.t()[0].add_(1.0)
    return F.linear(x, w, m.b) + flat[:6]


def parts_that_overlap(m, x):
    w = m.w * 1
    top, rest = w[:3], w[2:]
    top.mul_(2)
    rest.mul_(3)
    return x @ w + x[:, :3] @ top + x[:, :4] @ rest


def another_name(m, x):
    w = m.w.clone()
    y = w.clamp_(-0.5, 0.5)
    y.mul_(2.0)
    return F.linear(x, w) + F.linear(x, y)


def a_flag(m, x):
    w = m.w.clone()
    F.relu(w, inplace=True)
    F.dropout(w, 0.5, False, True)
    return F.linear(x, w)


def used_before(m, x):
    w = m.w * 1
    before = x @ w + w[0]
    w.fill_(0.1)
    return before + x @ w


def kept_and_returned(m, x):
    m.kept = m.w * 1
    m.kept.mul_(3)
    return x @ m.kept, m.kept


def without_gradients(m, x):
    with torch.no_grad():
        w = m.w.clone()
        w[:, ::2].neg_()
    return x @ w


def a_constant_added(m, x):
    w = m.w.clone()
    w.add_(torch.eye(6))
    return F.linear(x, w)


def an_activation_written(m, x):
    w = m.w.clone()
    w[0] = x[0]
    w *= x.mean()
    return F.linear(x, w)


def the_logarithm_of_what_was_a_sigmoid(m, x):
    w = torch.sigmoid(m.w)
    w.mul_(30)
    return x @ torch.log(w + 1)


def written_into_zeros(m, x):
    out = torch.zeros(6, 6)
    out[0] = m.b
    out[1:] = m.w[1:]
    return x @ out


PROGRAMS = [
    zeros_in_the_middle, entries, views_of_views, parts_that_overlap, another_name, a_flag, used_before, kept_and_returned,
    without_gradients, a_constant_added, an_activation_written, the_logarithm_of_what_was_a_sigmoid, written_into_zeros,
]  # fmt: skip


def first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.fixture
def x():
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(seeded(1)))


def jit(model, parameters="measured"):
    return thunder.jit(model, transforms=[NormTransform(parameters=parameters)])


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_are_eager_ones_and_norms_hold(program, x):
    expected = first(Net(program)(x))
    torch.testing.assert_close(first(jit(Net(program))(x)), expected)
    for run in (jit(Net(program)), jit(Net(program), {"w": RMSToRMSTensor.of(Net(program).w.detach())})):
        jitted = normed(run)
        for _ in range(2):
            y = first(jitted(RMSTensor.of(x)))
            torch.testing.assert_close(y.backing, expected)
            assert actual_norm(y) <= y.norm_size * (1 + 1e-5)
    row = norm_report(jit(Net(program)), RMSTensor.of(x), sensitivity="global").rows[-1]
    assert row.actual <= row.norm_size * (1 + 1e-5)


@pytest.mark.parametrize("program", PROGRAMS)
def test_outputs_move_no_further_than_stated(program, x):
    """The weight moves by the radius that is given, in directions drawn at random."""
    model, radius = Net(program), 0.2
    weight = RMSToRMSTensor.of(model.w.detach())
    moves = RMSToRMSTensor(weight.norm_size.item() + radius, perturbation_size=radius)
    found = first(build_norm_map(model, x, parameters={"w": moves})(RMSTensor.of(x)))

    def output(w):
        return first(torch.func.functional_call(Net(program), {"w": w}, (x,))).detach()

    before = output(model.w)
    generator = torch.Generator().manual_seed(seeded(2))
    for _ in range(8):
        step = torch.randn(6, 6, generator=generator)
        step *= radius / RMSToRMSTensor.of(step).norm_size
        moved = (output(model.w.detach() + step) - before).square().mean(-1).sqrt().max()
        assert moved <= found.perturbation_size * (1 + 1e-5)
    assert before.square().mean(-1).sqrt().max() <= found.norm_size * (1 + 1e-5)


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_ways_see_the_same(program, x):
    """The trace, the norm map, also on meta where no values are needed, and the run of `ModularNorm` without one."""
    traced = first(normed(jit(Net(program), "unit"))(RMSTensor.of(x))).norm_size.item()
    mapped = first(build_norm_map(Net(program), x, parameters="unit")(RMSTensor.of(x))).norm_size.item()
    assert mapped == pytest.approx(traced)
    model = Net(program)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    norm = ModularNorm(model, x)
    assert "w" not in norm.unreached and norm.targets["w"] > 0
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


OUT_OF_PLACE = {
    "a parameter": (lambda m, x: m.w.div_(2.0), lambda m: m.w / 2.0),
    "data": (lambda m, x: m.w.data.clamp_(-0.3, 0.3), lambda m: m.w.clamp(-0.3, 0.3)),
    "a row of data": (lambda m, x: m.w.data[0].mul_(30.0), lambda m: torch.cat([m.w[:1] * 30.0, m.w[1:]])),
    "other data": (lambda m, x: setattr(m.w, "data", m.w.data * 30.0), lambda m: m.w * 30.0),
}


@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_without_a_trace_parameters_themselves_may_be_written(name, x):
    """The run leaves the parameter as it was, and knows what the program did to it."""
    write, instead = OUT_OF_PLACE[name]

    def program(m, x):
        with torch.no_grad():
            write(m, x)
        return F.linear(x, m.w)

    model, other = Net(program), Net(lambda m, x: F.linear(x, instead(m)))
    before = model.w.detach().clone()
    for mode in ("bound", "typical"):
        found, expected = (ModularNorm(m, x, mode=mode).targets["w"] for m in (model, other))
        assert 0 < found <= expected * (1 + 1e-6)
        assert name == "a row of data" or found == pytest.approx(expected)
    rows = [norm_report(jit(m), RMSTensor.of(x), sensitivity="global").rows[-1] for m in (model, other)]
    assert rows[0].actual == pytest.approx(rows[1].actual)
    assert rows[0].actual <= rows[0].norm_size * (1 + 1e-5)
    assert torch.equal(model.w, before)


REFUSED = {
    "a parameter": lambda m: m.w.div_(2.0),
    "a row of one": lambda m: m.w[0].zero_(),
    "what is looked at in another way": lambda m: (m.w + 0).unfold(1, 2, 1).add_(1.0),
    "another shape": lambda m: (m.w + 0).t_(),
    "noise": lambda m: (m.w + 0).normal_(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_followed_is_refused(name, x):
    def program(m, x):
        with torch.no_grad():
            REFUSED[name](m)
        return x @ m.w

    calls = [lambda: normed(jit(Net(program), "unit"))(RMSTensor.of(x))]
    if name not in ("a parameter", "a row of one"):  # which a norm map follows, as it leaves the parameter what it was
        calls.append(lambda: build_norm_map(Net(program), x, parameters="unit"))
    for run in calls:
        with pytest.raises(UnsupportedOpError, match="in-place"):
            run()(RMSTensor.of(x))


def masked_data(m, x):
    m.w.data *= MASK
    return F.linear(x, m.w)


def moving_average(m, x):
    with torch.no_grad():
        m.b.mul_(0.9).add_(m.w[0], alpha=0.1)
    return F.linear(x, m.w, m.b)


def clipped_row(m, x):
    before = F.linear(x, m.w)
    with torch.no_grad():
        m.w[1].clamp_(-0.1, 0.1)
    return before + F.linear(x, m.w)


def written_back(m, x):
    m.w.data.copy_(m.w.data.t() * 2)
    return F.linear(x, m.w)


MASK = torch.tril(torch.ones(6, 6))
# what the program computes by parameters as they are before and after
OF_PARAMETERS = {
    masked_data: lambda m, x: F.linear(x, m.w * MASK),
    moving_average: lambda m, x: F.linear(x, m.w, m.b * 0.9 + 0.1 * m.w[0]),
    clipped_row: lambda m, x: F.linear(x, m.w) + F.linear(x, torch.cat([m.w[:1], m.w[1:2].clamp(-0.1, 0.1), m.w[2:]])),
    written_back: lambda m, x: F.linear(x, m.w.t() * 2),
}


@pytest.mark.parametrize("program", OF_PARAMETERS)
def test_traces_write_parameters_themselves(program, x):
    """Each call of measured parameters writes them as eager mode does (a masked convolution, the average of a teacher), and measures them anew."""
    traced, eager = Net(program), Net(program)
    call = normed(jit(traced))
    for _ in range(2):
        with torch.no_grad():
            found = call(RMSTensor.of(x))
            expected = eager(RMSTensor.of(x))
        torch.testing.assert_close(found.backing, expected.backing)
        torch.testing.assert_close(found.norm_size, expected.norm_size)
        assert actual_norm(found) <= found.norm_size * (1 + 1e-5)
        for name, p in eager.named_parameters():
            torch.testing.assert_close(getattr(traced, name), p)


def test_a_row_written_after_the_whole_was_used_is_refused_in_norm_maps(x):
    with pytest.raises(UnsupportedOpError, match="in-place"):
        build_norm_map(Net(clipped_row), x, parameters="unit")(RMSTensor(1.0))


def _of_two_names(write: Callable, is_tied: bool) -> Net:
    def program(m, x):
        with torch.no_grad():
            write(m.w)
        return x @ m.other

    model = Net(program)
    model.other = model.w if is_tied else torch.nn.Parameter(model.w.data.view(6, 6))
    return model


WRITES = [lambda w: w.detach().mul_(10.0), lambda w: w.t().mul_(10.0), lambda w: w[:2].mul_(10.0)]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("parameters", ["unit", "measured"])
@pytest.mark.parametrize("write", WRITES)
def test_norm_maps_follow_a_write_into_what_another_parameter_has_too(write, parameters, is_tied, x):
    model = _of_two_names(write, is_tied)
    if parameters == "unit":
        model.w.data.div_(torch.linalg.matrix_norm(model.w.data, 2))
    before = model.w.detach().clone()
    found = build_norm_map(model, x, parameters=parameters)(RMSTensor.of(x)).norm_size
    assert torch.equal(model.w, before)
    assert found >= model(x).square().mean(-1).sqrt().max() * (1 - 1e-6)


@pytest.mark.parametrize("program", [p for p in OF_PARAMETERS if p is not clipped_row])
def test_norm_maps_of_written_parameters_leave_them(program, x):
    """The norm is at least that of all within unit norms that were tried, and no larger than what is said of the same out of place."""
    model = Net(program)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    found, other = (build_norm_map(Net(f), x, parameters="unit")(RMSTensor(1.0)) for f in (program, OF_PARAMETERS[program]))
    assert found.norm_size <= other.norm_size * (1 + 1e-5) or program is written_back
    compute = build_norm_map(model, x, parameters="unit")
    torch.testing.assert_close(compute(RMSTensor(1.0)).norm_size, compute(RMSTensor(1.0)).norm_size)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    generator = torch.Generator().manual_seed(seeded(3))
    for _ in range(20):
        tried = Net(program)
        with torch.no_grad():
            w = torch.randn(6, 6, generator=generator)
            tried.w.copy_(w / RMSToRMSTensor.of(w).norm_size)
            tried.b.copy_(F.normalize(torch.randn(6, generator=generator), dim=0) * 6**0.5)
            data = F.normalize(torch.randn(3, 6, generator=generator)) * 6**0.5
            assert tried(data).square().mean(-1).sqrt().max() <= found.norm_size * (1 + 1e-5)


def test_parameters_written_into_what_others_look_at_are_not_lost(x):
    """A target of 0 would say that no output depends on the parameter."""

    def program(m, x):
        out = torch.zeros(6, 6)
        row = out[0]
        out.copy_(m.w)
        return x @ out + row

    norm = ModularNorm(Net(program), x)
    assert "w" not in norm.unreached and norm.targets["w"] > 0
    same = ModularNorm(Net(lambda m, x: x @ m.w + m.w[0]), x)
    assert norm.targets["w"] <= same.targets["w"] * (1 + 1e-5)


class Tied(torch.nn.Module):
    """One tensor under two names: it is written by one of them, and read by the other."""

    def __init__(self, kind: str, write: Callable, is_read_before: bool):
        super().__init__()
        w = torch.zeros(4, 4)
        if kind == "buffer":
            self.register_buffer("w", w)
            self.register_buffer("other", w)
        else:
            self.w = torch.nn.Parameter(w)
            self.other = [self.w] if kind == "in a list" else self.w
        self.write, self.is_read_before = write, is_read_before

    def forward(self, x):
        other = self.other[0] if isinstance(self.other, list) else self.other
        read = self.w if self.is_read_before else None
        self.write(other)
        return x + (self.w if read is None else read)[0]


TIED_WRITES = {
    "added": lambda t: t.add_(10.0),
    "a view": lambda t: t[0].add_(10.0),
    "copied": lambda t: t.copy_(torch.full((4, 4), 10.0)),
}


@pytest.mark.parametrize("is_read_before", [False, True])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "in a list"])
@pytest.mark.parametrize("write", TIED_WRITES)
def test_what_is_written_by_one_name_is_read_by_another(write, kind, is_read_before):
    x = torch.ones(3, 4)
    with torch.no_grad():
        models = [Tied(kind, TIED_WRITES[write], is_read_before) for _ in range(3)]
        expected = models[0](x).square().mean().sqrt()
        found = [
            build_norm_map(models[1], RMSTensor.of(x))(RMSTensor.of(x)),
            thunder.jit(models[2], transforms=[NormTransform()])(RMSTensor.of(x)),
        ]
    assert [float(out.norm_size) for out in found] == pytest.approx([expected.item()] * 2)


def _assigned_twice(m):
    m.w *= 3.0
    m.w += 1


def _assigned_after_data(m):
    m.w.data.mul_(10.0)
    m.w *= 2.0


def _handed_back(m):
    m.w.mul_(2.0)
    assert m.w.add_(1.0) is m.w


@pytest.mark.parametrize("write", [_assigned_twice, _assigned_after_data, _handed_back])
def test_a_parameter_that_is_written_again_is_the_parameter(write):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            write(self)
            return x + self.w[0]

    x = torch.ones(3, 4)
    with torch.no_grad():
        expected = Written()(x).square().mean().sqrt().item()
        found = (
            build_norm_map(Written(), RMSTensor.of(x))(RMSTensor.of(x)),
            thunder.jit(Written(), transforms=[NormTransform()])(RMSTensor.of(x)),
        )
    assert [float(out.norm_size) for out in found] == pytest.approx([expected] * 2)
