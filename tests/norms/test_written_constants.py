"""Constants that a program writes normed tensors into are normed from then on: values are eager PyTorch's, norms hold, or it is refused."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, build_norm_map, norm_report, normed
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.modular import ModularNorm
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.transforms import NormTransform
import thunder


def rows_one_by_one(y):
    out = torch.zeros(y.shape)
    for i in range(y.shape[0]):
        out[i] = y[i] * (i + 1)
    return out


def added_by_index(y):
    out = torch.zeros(3, y.shape[1])
    out.index_add_(0, torch.tensor([0, 1, 1, 2]), y)
    out += 1
    return out.relu() + out


def copied_into_an_empty_one(y):
    out = torch.empty(4, 8)
    out[:, :4] = y
    out[:, 4:] = -y
    return torch.cat([out, out * 2])


def a_part_of_it(y):
    out = torch.ones(4, 6)
    out[:, 1:5] = y
    out[:, 0].mul_(3.0)
    return out


def returned_by_a_method(y):
    return torch.zeros(4, 4).add_(y).mul_(2.0)


def spectrum(y):
    out = torch.zeros(4, 3, dtype=torch.cfloat)
    out[:, :2] = torch.fft.rfft(y)[:, :2]
    return torch.fft.irfft(out, n=4)


def inside_a_tuple(y):
    out = torch.full((4, 4), 0.5)
    out[0] = y[0]
    return out, [y, out]


def numbers_before(y):
    """Anderson's states, relative positions: some rows are numbers, and are read, before others are computed."""
    out = torch.empty(4, 4).fill_(0.5)
    out.mul_(0.5)[1].add_(2.0)
    out[0] = 3
    first = out[0] + y[0]
    out[1:3] = y[1:3]
    return out, first


PROGRAMS = [
    rows_one_by_one, added_by_index, copied_into_an_empty_one, a_part_of_it, returned_by_a_method, spectrum, inside_a_tuple,
    numbers_before,
]  # fmt: skip


class Net(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.linear, self.program = nn.Linear(4, 4), program

    def forward(self, x):
        return self.program(self.linear(x))


def flat(results):
    return [t for r in results for t in flat(r)] if isinstance(results, list | tuple) else [results]


@pytest.fixture
def x():
    torch.manual_seed(seeded(0))
    return torch.randn(4, 4)


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_are_eager_ones_and_norms_hold(program, x):
    model = Net(program)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    expected = flat(model(x))
    for got, want in zip(flat(jitted(x)), expected, strict=True):
        torch.testing.assert_close(got, want)
    for got, want in zip(flat(jitted(RMSTensor.of(x))), expected, strict=True):
        torch.testing.assert_close(got.backing, want)
        assert type(got).of(want, got.elem_dims).norm_size <= got.norm_size * (1 + 1e-6)


@pytest.mark.parametrize("program", PROGRAMS)
def test_eager_runs_and_norm_maps_see_the_same(program, x):
    model = Net(program)
    jitted = thunder.jit(model, transforms=[NormTransform(parameters="unit")])
    traced = flat(jitted(RMSTensor.of(x)))[0].norm_size.item()
    rows = list(norm_report(jitted, RMSTensor.of(x), sensitivity="global"))
    assert any(r.norm_size == pytest.approx(traced) for r in rows)
    mapped = flat(build_norm_map(model, x, parameters="unit")(RMSTensor.of(x)))[0]
    assert mapped.norm_size.item() == pytest.approx(traced)
    assert ModularNorm(model, x).unreached == ()


def least_so_far(y):
    """Distances to the farthest points of PointNet++: far away, then where another is nearer."""
    out = torch.ones(4, 4) * 1e3
    nearer = y < out
    out[nearer] = y[nearer]
    return out


def test_constants_that_were_computed_are_written_into(x):
    """Refused before in traces and norm maps: ``torch.ones(n) * c`` takes a tensor."""
    model = Net(least_so_far)
    found, expected = thunder.jit(model, transforms=[NormTransform()])(RMSTensor.of(x)), model(x)
    torch.testing.assert_close(found.backing, expected)
    assert RMSTensor.of(expected, found.elem_dims).norm_size <= found.norm_size * (1 + 1e-6)
    mapped = build_norm_map(model, x, parameters="unit")(RMSTensor(1.0))
    assert 1e3 * (1 - 1e-6) <= mapped.norm_size <= 2e3


@pytest.mark.parametrize("program", [rows_one_by_one, spectrum])
def test_on_meta(program, x):
    want = flat(build_norm_map(Net(program), x, parameters="unit")(RMSTensor(1.0)))[0]
    got = flat(build_norm_map(Net(program).to("meta"), x.to("meta"), parameters="unit")(RMSTensor(1.0)))[0]
    assert got.norm_size.item() == pytest.approx(want.norm_size.item())


def with_a_view(y):
    out = torch.zeros(4, 8)
    row = out[:1]
    out[:, :4] = y
    return row * y[0, 0]


def with_a_view_of_another_shape(y):
    out = torch.zeros(16)
    square = out.view(4, 4)
    square.copy_(y)
    return out * 2


def with_a_view_of_what_was_computed(y):
    out = torch.ones(4, 4) * 2.0
    turned = out.t()
    out[0] = y[0]
    return turned * 2


@pytest.mark.parametrize("program", [with_a_view, with_a_view_of_another_shape, with_a_view_of_what_was_computed])
def test_views_are_right_or_refused(program, x):
    model = Net(program)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    torch.testing.assert_close(jitted(x), model(x))
    runs = [
        lambda: jitted(RMSTensor.of(x)),
        lambda: run_eagerly(model, (RMSTensor.of(x),), {}, policy="measured", mode="bound")[0],
    ]
    if program is not with_a_view:  # traces know the views that indexing makes
        with pytest.raises(UnsupportedOpError, match="in-place"):
            runs.pop(0)()
    for run in runs:
        found = run()
        torch.testing.assert_close(found.backing, model(x))
        assert type(found).of(found.backing, found.elem_dims).norm_size <= found.norm_size * (1 + 1e-5)
    assert ModularNorm(model, x).unreached == ()


def test_a_tensor_from_outside_is_not_written(x):
    given = torch.zeros(4, 4)

    def program(y):
        given[0] = y[0]
        return given

    model = Net(program)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for run in (lambda: jitted(RMSTensor.of(x)), lambda: norm_report(jitted, RMSTensor.of(x)), lambda: ModularNorm(model, x)):
        with pytest.raises(UnsupportedOpError):
            run()
    assert given.count_nonzero() == 0


MADE_LIKE_AN_INPUT = {
    "new_zeros": lambda x: x.new_zeros(4),
    "new_full": lambda x: x.new_full((4,), 2.0),
    "zeros_like": lambda x: torch.zeros_like(x[:, 0]),
    "full_like": lambda x: torch.full_like(x[0], 0.5),
}


@pytest.mark.parametrize("name", MADE_LIKE_AN_INPUT)
def test_what_is_made_like_a_plain_input_is_a_constant(name, x):
    def forward(layer, x):
        total = MADE_LIKE_AN_INPUT[name](x)
        total -= layer(x).sum(dim=1)
        return total

    class Sums(nn.Linear):
        def forward(self, x):
            return forward(super().forward, x)

    model = Sums(4, 4)
    found = normed(thunder.jit(model, transforms=[NormTransform()]))(x)
    torch.testing.assert_close(found.backing, model(x))
    assert found.backing.abs().max() <= found.norm_size * (1 + 1e-6)


def test_movements_go_through(x):
    """The last row moves four times as far; together the rows are bounded by the sum of what each does."""
    f = thunder.jit(rows_one_by_one, transforms=[NormTransform()])
    y = f(LinfTensor(2.0, backing=x.clamp(-2, 2), perturbation_size=0.5))
    assert 0.5 * 4 <= y.perturbation_size.item() <= 0.5 * (1 + 2 + 3 + 4)


WRITES = {
    "row": lambda t, y, i, c: t.__setitem__(i, y[i] * c),
    "number": lambda t, y, i, c: t.__setitem__(i, c),
    "add_": lambda t, y, i, c: t.add_(y, alpha=c),
    "add a tensor": lambda t, y, i, c: t.__iadd__(y * c),
    "part of a row": lambda t, y, i, c: t[i].mul_(c),
    "fill_": lambda t, y, i, c: t.fill_(c),
    "index_add_": lambda t, y, i, c: t.index_add_(0, torch.tensor([i, 0]), y[:2]),
    "copy_": lambda t, y, i, c: t.copy_(y * c),
    "mask": lambda t, y, i, c: t.mul_(torch.tensor([1.0, 0.0, 1.0, 0.0])),
    "relu_": lambda t, y, i, c: t.relu_(),
}
MAKES = {
    "ones": lambda t, c: torch.ones(4, 4),
    "full": lambda t, c: torch.full((4, 4), c),
    "empty": lambda t, c: torch.empty(4, 4).fill_(c),
    "view": lambda t, c: t[:, :],
    "transposed": lambda t, c: t.t(),
    "clone": lambda t, c: t.clone(),
    "detach": lambda t, c: t.detach(),
    "sum": lambda t, c: t + c,
}


def random_program(seed):
    pick = random.Random(seeded(seed))
    steps = [(pick.choice([*WRITES, *WRITES, *MAKES]), pick.randrange(4), pick.random()) for _ in range(pick.randint(3, 9))]

    def program(y):
        tensors = [torch.zeros(4, 4)]
        for name, i, c in steps:
            t = tensors[i % len(tensors)]
            if name in MAKES:
                tensors.append(MAKES[name](t, c))
            else:
                WRITES[name](t, y, i, c)
        return [t + 0 * y for t in tensors]

    return program


@pytest.mark.parametrize("number", range(12))
def test_random_programs_are_right_or_refused(number, x):
    model = Net(random_program(number))
    try:
        expected = model(x)
    except RuntimeError:  # autograd refuses what changes in place here
        return
    given = RMSTensor.of(x)
    runs = (
        lambda: thunder.jit(model, transforms=[NormTransform()])(given),
        lambda: run_eagerly(model, (given,), {}, policy="measured", mode="bound")[0],
    )
    for run in runs:
        try:
            found = run()
        except UnsupportedOpError:
            continue
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got.backing, want)
            assert type(got).of(want, got.elem_dims).norm_size <= got.norm_size * (1 + 1e-5)


def test_a_write_into_a_view_of_what_a_write_returned_is_not_lost(x):
    """Thunder took the two for tensors of different memories: the rows were not doubled where parameters require grad, silently."""

    def program(y):
        t = torch.ones(4, 4)
        t.mul_(0.5)[1].mul_(2.0)
        return t * y

    model = Net(program)
    found = thunder.jit(model, transforms=[NormTransform()])(RMSTensor.of(x))
    torch.testing.assert_close(found.backing, model(x))


class Cache:
    """What a program keeps a tensor in."""

    held = None


@pytest.mark.parametrize("write", ["index_copy_", "slice"])
def test_an_argument_keeps_what_was_written_into_a_constant(write, x):
    def f(x, cache):
        cache.held = torch.zeros(6, 4)
        if write == "slice":
            cache.held[:4] = x
        else:
            cache.held.index_copy_(0, torch.arange(4), x)
        cache.held.mul_(2)
        return x * 1

    cache, given = Cache(), RMSTensor.of(x)
    thunder.jit(f, transforms=[NormTransform()])(given, cache)
    torch.testing.assert_close(cache.held.backing, torch.cat([2 * x, torch.zeros(2, 4)]))
    assert type(cache.held).of(cache.held.backing, cache.held.elem_dims).norm_size <= cache.held.norm_size * (1 + 1e-5)


def test_an_empty_leaf_that_requires_grad_gets_zeros(x):
    def program(y):
        leaf = torch.empty(4, 4, requires_grad=True)
        assert leaf.is_leaf and leaf.requires_grad
        return y + leaf

    model = Net(program)
    found = run_eagerly(model, (RMSTensor.of(x),), {}, policy="measured", mode="bound")[0]
    torch.testing.assert_close(found.backing, model.linear(x))


class Gated(nn.Module):
    """Messages that are written into zeros and update a recurrent cell (GGNN), which asks how many dimensions they have."""

    def __init__(self):
        super().__init__()
        self.message, self.cell = nn.Linear(4, 4), nn.GRUCell(4, 4)

    def forward(self, x):
        for _ in range(2):
            sums = torch.zeros_like(x)
            sums.index_add_(0, torch.tensor([0, 1, 1, 2]), self.message(x))
            x = self.cell(sums, x) * (sums.dim() - 1) * float(sums.is_floating_point())
        return x


def test_what_was_written_into_is_asked_for_its_dimensions(x):
    """Refused before in traces: `dim on a tensor that was changed in place before`."""
    torch.manual_seed(seeded(0))
    model = Gated()
    found = normed(thunder.jit(model, transforms=[NormTransform()]))(x)
    torch.testing.assert_close(found.backing, model(x))
    assert type(found).of(found.backing, found.elem_dims).norm_size <= found.norm_size * (1 + 1e-5)
