"""Attributes that a program sets on plain tensors: the caller sees a user's own, what would be lost is refused; `.data` is the same memory."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor, norm_report
from thunder_norm.errors import NormMismatchError, UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, ProfileTransform, SubclassTransform
import thunder


class Module(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.w = nn.Parameter(torch.arange(16.0).view(4, 4))
        self.b = nn.Parameter(torch.ones(4))
        self.register_buffer("r", torch.full((4, 4), 2.0))
        self.program = program

    def forward(self, x):
        return self.program(self, x)


def doubles_in_place(m, x):
    m.w *= 2
    return x @ m.w


def is_assigned_itself(m, x):
    m.w = m.w
    return x @ m.w


def is_assigned_its_result(m, x):
    m.w = m.w.mul_(2).add_(1)
    return x @ m.w


def data_is_written(m, x):
    m.w.data.mul_(3.0)
    m.r.data[0] = 1.0
    return x @ m.w.data + m.r[0]


def data_is_added_to(m, x):
    m.w.data += 1
    m.w[0] += 1
    return x @ m.w


def data_of_data(m, x):
    return x.data @ m.w.data.t().data


def nothing_changes(m, x):
    m.w.grad = None
    x.requires_grad = x.requires_grad
    return x @ m.w


def of_what_it_made(m, x):
    y = x * 2
    y.tag = 3
    return y * y.tag


ALLOWED = [
    doubles_in_place, is_assigned_itself, is_assigned_its_result, data_is_written, data_is_added_to, data_of_data, nothing_changes, of_what_it_made
]  # fmt: skip


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("program", "transform"), crossed(ALLOWED, [NormTransform, SubclassTransform]))
def test_what_is_allowed_is_eager_s(program, transform, trains):
    ours, eager = Module(program).requires_grad_(trains), Module(program).requires_grad_(trains)
    jitted, x = thunder.jit(ours, transforms=[transform()]), torch.ones(2, 4)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(jitted(x), eager(x))
            torch.testing.assert_close(dict(ours.state_dict()), dict(eager.state_dict()))


def assigns(name, value):
    def program(m, x):
        setattr(m.w, name, value(m, x))
        return x @ m.w

    return program


def sets_of_input(m, x):
    x.tag = 3
    return x * x.tag


REFUSED = {
    "requires_grad": assigns("requires_grad", lambda m, x: not m.w.requires_grad),
    "tag": assigns("tag", lambda m, x: 3),
    "of an input": sets_of_input,
}
GIVEN = {"plain": torch.ones(2, 4), "normed": RMSTensor.of(torch.ones(2, 4))}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in REFUSED for k in GIVEN if (n, k) != ("of an input", "plain")])
def test_what_would_be_lost_is_refused(name, kind, gradients):
    model, given = Module(REFUSED[name]), GIVEN[kind]
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with contextlib.nullcontext() if gradients else torch.no_grad(), pytest.raises(UnsupportedOpError, match="is set") as error:
        thunder.jit(model, transforms=[NormTransform()])(given)
    assert __file__ in str(error.value)
    assert model.w.requires_grad and not hasattr(model.w, "tag")
    torch.testing.assert_close(dict(model.state_dict()), before)


def sets_and_deletes(x, others):
    y = x * 2
    before = hasattr(x, "tag"), getattr(x, "kept", 5)
    x.tag, y.tag, y.gone = 3, x + 1, 4
    x.tag += 1
    del y.gone
    others[0].mark = others
    y.mul_(2)
    if hasattr(x, "kept"):
        del x.kept
    return y * x.tag, y, before, hasattr(y, "gone"), hasattr(x, "kept"), y.tag * 2


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform, CheckpointTransform])
def test_users_attributes_are_set_and_deleted_for_the_caller(transform, requires_grad):
    def called(f, given):
        found = []
        for x in given:
            others = [torch.ones(2)]
            x.requires_grad_(requires_grad)
            scaled, y, *rest = f(x, others)
            gradient = torch.autograd.grad(scaled.sum(), x)[0] if requires_grad else None
            assert others[0].mark is others
            found.append((scaled, y, y.tag, dict(vars(y)).keys(), rest, x.tag, dict(vars(x)).keys(), gradient))
        return found

    def given():
        torch.manual_seed(seeded(0))
        again, kept = torch.randn(3), torch.randn(3)
        kept.kept = 7
        return again, kept, again, torch.randn(3)

    want = called(sets_and_deletes, given())
    for found, expected in zip(called(thunder.jit(sets_and_deletes, transforms=[transform()]), given()), want, strict=True):
        torch.testing.assert_close(found[:3], expected[:3])
        torch.testing.assert_close(found[4][-1], expected[4][-1])
        assert (found[3], found[4][:-1], found[5:7]) == (expected[3], expected[4][:-1], expected[5:7])
        torch.testing.assert_close(found[7], expected[7])


def writes_out(m, x):
    torch.mul(m.w, 2.0, out=m.w)
    return x @ m.w


def writes_out_by_a_view(m, x):
    torch.mul(m.w, 2.0, out=m.w.view(4, 4))
    return x @ m.w


@pytest.mark.parametrize("program", [writes_out, writes_out_by_a_view])
def test_an_output_that_is_given_is_a_parameter_that_has_a_norm(program):
    torch.manual_seed(seeded())
    model = Module(program)
    eager, x = copy.deepcopy(model), torch.randn(2, 4)
    jitted = thunder.jit(model, transforms=[NormTransform(parameters="measured")])
    with torch.no_grad():
        for _ in range(2):
            found, expected = jitted(RMSTensor.of(x)), eager(x)
            torch.testing.assert_close((found.backing, model.w), (expected, eager.w))
            assert found.norm_size * (1 + 1e-6) >= RMSTensor.of(expected).norm_size
        rows = norm_report(jitted, x).rows
        assert rows[-1].norm_size * (1 + 1e-6) >= RMSTensor.of(eager(x)).norm_size
        of_one = thunder.jit(Module(program), transforms=[NormTransform(parameters="unit")])
        with pytest.raises(UnsupportedOpError, match="shares its memory with a parameter"):
            of_one(RMSTensor.of(x))


def buffer_between_uses(m, x):
    y = x @ (m.w + m.r)
    m.r.mul_(30.0)
    return y @ (m.r * m.w)


def parameter_between_uses(m, x):
    y = x @ m.w
    m.w.add_(m.r.mean())
    return y @ m.w


def parameter_by_a_view_between_uses(m, x):
    v = m.w.t()
    y = x @ v
    m.w.mul_(10.0)
    return y @ v


def of_one_storage(m, x):
    y = x @ m.w
    m.q.mul_(10.0)
    return y @ m.w


@pytest.mark.parametrize(
    "program", [buffer_between_uses, parameter_between_uses, parameter_by_a_view_between_uses, of_one_storage]
)
def test_what_was_written_is_measured_again(program):
    def module():
        m = Module(program).requires_grad_(False)
        m.q = nn.Parameter(m.w.data.view(4, 4), requires_grad=False)
        return m

    x = torch.ones(2, 4)
    with torch.no_grad():
        expected = module()(x)
        result = thunder.jit(module(), transforms=[NormTransform()])(RMSTensor.of(x))
        torch.testing.assert_close(result.backing, expected)
        assert expected.square().mean(-1).sqrt().max() <= result.norm_size * (1 + 1e-5)
        report = norm_report(thunder.jit(module(), transforms=[NormTransform()]), RMSTensor.of(x))
        assert all(row.tightness is None or row.tightness <= 1 + 1e-5 for row in report.rows)


def adds_to_a_given_parameter(m, x):
    m.w.add_(m.r.mean())
    return x @ m.w


@pytest.mark.parametrize("parameters", ["unit", {"w": 3.0}])
def test_a_parameter_of_given_size_is_not_written(parameters):
    jitted = thunder.jit(Module(adds_to_a_given_parameter), transforms=[NormTransform(parameters=parameters)])
    with torch.no_grad(), pytest.raises((UnsupportedOpError, NormMismatchError)):
        jitted(RMSTensor.of(torch.ones(2, 4)))


def counts_shapes(m, x):
    return x / x.shape.numel() + x.shape[1:].numel() + x.size().numel() * m.w.shape[:0].numel()


@pytest.mark.parametrize("given", [torch.ones, lambda *shape: RMSTensor.of(torch.ones(*shape))], ids=["plain", "normed"])
def test_shapes_have_a_number_of_elements(given):
    jitted = thunder.jit(Module(counts_shapes), transforms=[NormTransform()])
    for shape in ((2, 4), (3, 4)):
        result = jitted(given(*shape))
        torch.testing.assert_close(getattr(result, "backing", result), counts_shapes(jitted, torch.ones(*shape)))


LEGACY = (torch.FloatTensor, torch.DoubleTensor, torch.BFloat16Tensor, torch.LongTensor, torch.BoolTensor, torch.cuda.FloatTensor)


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform, ProfileTransform])
def test_results_are_instances_of_torchs_classes_for_dtypes(transform):
    def f(x):
        made = (x, x * 1, x.double(), x.bfloat16(), x.long(), x > 0)
        several = (int, torch.FloatTensor), torch.DoubleTensor | None, torch.nn.Parameter
        return [isinstance(t, cls) for t in made for cls in (*LEGACY, *several)]

    torch.manual_seed(seeded(0))
    x = torch.randn(3)
    assert thunder.jit(f, transforms=[transform()])(x) == f(x)
