"""What a program writes into views and into inputs arrives as in eager mode, with its gradients, or is refused."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm.errors import ThunderNormError
from thunder_norm.transforms import (
    CheckpointTransform,
    NormTransform,
    ProfileTransform,
    SplitBiasTransform,
    SubclassTransform,
    grad,
    hessian,
    jvp,
    vmap,
)
import thunder

FORMS = ("plain", "leaf")


def _made(program, write):
    def f(x):
        u = x * 1.5 + 0.5
        v = program(u)
        write(v)
        return u, v, u.sum() * v.sum()

    return f


_VIEWS = {
    "windows apart": lambda t: t.unfold(1, 2, 2),
    "one window": lambda t: t.unfold(-1, 4, 1),
    "permuted": lambda t: t.permute(1, 0),
    "permuted by a tuple": lambda t: t.permute((1, 0)),
    "squeezed": lambda t: t[:, None].squeeze(),
    "a dimension squeezed": lambda t: t[None].squeeze(0),
    "split": lambda t: t.split(2, 1)[1],
    "chunk": lambda t: t.chunk(2, 1)[1],
    "row": lambda t: t.unbind()[2],
    "split by name": lambda t: torch.split(t, [1, 3], dim=1)[1],
    "diagonal": lambda t: t.diagonal(),
    "strided": lambda t: t.as_strided((2, 2), (4, 1)),
    "real": lambda t: torch.view_as_complex(t.view(3, 2, 2)).real,
}
# Of memory that a differentiated program does not know; of the last, eager mode refuses it too.
_NOT_DIFFERENTIATED = ("windows apart", "one window", "strided", "split", "split by name", "chunk", "row")
_WRITES = {
    "multiplied": lambda v: v.mul_(2),
    "assigned": lambda v: v.__setitem__(0, 3.0),
    "clamped": lambda v: v.clamp_(max=0.1),
}


def _run(f, form):
    torch.manual_seed(seeded(0))
    leaf = torch.randn(3, 4).requires_grad_(form == "leaf")
    results = f(leaf)
    grads = torch.autograd.grad(results[-1], leaf) if form == "leaf" else ()
    return results, grads


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("view", _VIEWS)
def test_what_is_written_into_a_view_arrives(view, form):
    for write in _WRITES.values():
        f = _made(_VIEWS[view], write)
        try:
            found = _run(thunder.jit(f, transforms=[NormTransform()]), form)
        except ThunderNormError:
            assert view in _NOT_DIFFERENTIATED and form == "leaf"
            continue
        torch.testing.assert_close(found, _run(f, form))


def test_windows_of_an_input_are_views_of_it():
    for transform in (NormTransform, SubclassTransform):
        x = torch.arange(12.0).view(3, 4)
        windows = thunder.jit(lambda x: x.unfold(1, 2, 1), transforms=[transform()])(x)
        x.add_(1)
        assert torch.equal(windows, x.unfold(1, 2, 1))
        thunder.jit(lambda x: x.unfold(0, 2, 2).mul_(2), transforms=[transform()])(x)
        assert torch.equal(x[:2], (torch.arange(8.0).view(2, 4) + 1) * 2)
    assert type(thunder.jit(lambda x: x.split(1), transforms=[NormTransform()])(x)) is tuple


@pytest.mark.parametrize("transform", [CheckpointTransform, SplitBiasTransform])
def test_what_is_written_into_windows_arrives_under_transforms_without_wrappers(transform):
    def into_windows(x):
        y = x * 1.5
        y.unfold(1, 2, 3).mul_(x.sum())
        y[1:].unfold(-2, 1, 2)[0, 1].add_(x[0, 0])
        return y.sin()

    def into_their_tensor(x):
        y = x.clone()
        windows = y.unfold(1, 3, 1)
        y[0].mul_(x[1])
        return windows.sin()

    torch.manual_seed(seeded(0))
    x = torch.randn(3, 5, requires_grad=True)
    for f in (into_windows, into_their_tensor):
        found, wanted = thunder.jit(f, transforms=[transform()])(x), f(x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, wanted)))
        torch.testing.assert_close(
            grad(lambda x, f=f: f(x).square().sum())(x.detach()), torch.autograd.grad(f(x).square().sum(), x)[0]
        )
    windows = thunder.jit(lambda x: x.unfold(1, 2, 1), transforms=[transform()])(x.detach())
    assert windows.data_ptr() == x.data_ptr()


def _scaled(x):
    y = x * x.cos()
    with torch.no_grad():
        y.mul_(2)
    return (y * x).sum()


def _a_row_scaled(x):
    y = x * x.cos()
    row = y[0]
    with torch.no_grad():
        row.mul_(2)
    return (y * x).sum()


def _assigned_and_clamped(x):
    y = x * x.cos()
    with torch.no_grad():
        y[0] = 3.0
        y.clamp_(max=0.5)
    return (y.sin() * x).sum()


def _through_a_view_from_there(x):
    y = x * x.cos()
    outer, other = y.unsqueeze(0), y.squeeze()
    with torch.no_grad():
        outer[0] *= 1.5
        y[1:].sub_(1)
    return (y.sin() + outer.cos() + other * x).sum()


@pytest.mark.parametrize("f", [_scaled, _a_row_scaled, _assigned_and_clamped, _through_a_view_from_there])
def test_what_is_written_without_autograd_into_a_result_keeps_its_history(f):
    """Gradients went nowhere: what was written had none."""
    torch.manual_seed(seeded(0))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(f(x), x)[0]
    for transform in (CheckpointTransform, SplitBiasTransform):
        torch.testing.assert_close(torch.autograd.grad(thunder.jit(f, transforms=[transform()])(x), x)[0], wanted)
    plain, both = x.detach(), torch.stack([x.detach(), x.detach() + 1])
    torch.testing.assert_close(grad(f)(plain), wanted)
    torch.testing.assert_close(vmap(grad(f))(both), torch.func.vmap(torch.func.grad(f))(both))
    torch.testing.assert_close(jvp(f, (plain,), (wanted,)), torch.func.jvp(f, (plain,), (wanted,)))
    torch.testing.assert_close(hessian(f)(plain), torch.func.hessian(f)(plain))


def test_windows_that_overlap_are_not_written_into_under_function_transforms():
    def f(x):
        y = x * 2
        y.unfold(0, 2, 1).mul_(3)
        return y.sum()

    for transformed in (grad(f), lambda x: jvp(f, (x,), (x,))):
        with pytest.raises(ThunderNormError, match="in-place(.|\n)*test_written_views.py"):
            transformed(torch.ones(3))


def _windows(x):
    x.unfold(1, 2, 1).add_(1)


def _expanded(x):
    torch.zeros(4).expand(3, 4)[0] = x[0]


def _expanded_and_viewed(x):
    x[:1].expand(3, 4).t().mul_(2)


def _conjugate(x):
    torch.view_as_complex(x.view(3, 2, 2)).conj().mul_(2j)


def _conjugate_of_written(x):
    c = torch.view_as_complex(x.view(3, 2, 2)) * 2
    conjugate = c.conj()
    c.mul_(2j)
    return conjugate * 1


@pytest.mark.parametrize("f", [_windows, _expanded, _expanded_and_viewed, _conjugate, _conjugate_of_written])
def test_what_a_trace_cannot_write_is_refused_and_nothing_is_written(f):
    torch.manual_seed(seeded(0))
    x = torch.randn(3, 4)
    before = x.clone()
    with pytest.raises(ThunderNormError, match="in-place(.|\n)*test_written_views.py"):
        thunder.jit(f, transforms=[NormTransform()])(x)
    assert torch.equal(x, before)


_THE_SAME = {
    "dropout of nothing": lambda x: torch.nn.functional.dropout(x, 0.0),
    "its own type": lambda x: x.type_as(x),
    "positive": lambda x: x.positive(),
    "its own dtype": lambda x: x.to(x.dtype),
    "a view": lambda x: x.view(-1),
}


@pytest.mark.parametrize("same", _THE_SAME)
def test_out_is_given_what_may_be_the_same_tensor(same):
    def f(x):
        y = x * 2
        v = _THE_SAME[same](y)
        torch.add(v, 1, out=v)
        return y

    torch.testing.assert_close(thunder.jit(f, transforms=[NormTransform()])(torch.ones(3)), f(torch.ones(3)))


_INTO_INPUTS = {
    "added": lambda y, x: y.add_(x),
    "copied": lambda y, x: y.copy_(x),
    "assigned": lambda y, x: y.__setitem__(slice(1, None), x[1:]),
    "into a view": lambda y, x: y[1:].mul_(x[1:]),
}


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("write", _INTO_INPUTS)
def test_an_input_has_a_history_where_it_is_written_with_one(write, detached):
    def f(y, x):
        _INTO_INPUTS[write](y, x.detach() if detached else x * 2)
        return y, (y * x).sum()

    found = []
    for run in (f, thunder.jit(f, transforms=[NormTransform()])):
        x, y = torch.linspace(0.5, 2, 4).requires_grad_(), torch.ones(4)
        returned, total = run(y, x)
        assert returned is y and y.requires_grad is not detached
        loss = total if detached else total + (y * y).sum()
        found.append((y.detach().clone(), torch.autograd.grad(loss, x)[0]))
        with torch.no_grad():
            y = torch.ones(4)
            run(y, x)
        assert not y.requires_grad
        found[-1] += (y,)
    torch.testing.assert_close(*found)


def _twice(y, x):
    y.add_(x)
    y.mul_(x)


def _parts(y, x):
    y[1:] *= x[1:]
    y[:2] *= x[:2]


_FOLLOWED = {
    "added": lambda y, x: y.add_(x),
    "assigned": lambda y, x: y.__setitem__(torch.tensor([1, 3]), x[:2] * x[2:]),
    "twice": _twice,
    "parts": _parts,
    "overwritten": lambda y, x: (y.mul_(x), y.zero_()),
    "behind autograd": lambda y, x: (y.mul_(x), y.detach().mul_(2)),
}


@pytest.mark.parametrize("write", _FOLLOWED)
def test_gradients_follow_what_is_written_into_an_input(write):
    def f(y, x):
        before = y[1:3]
        _FOLLOWED[write](y, x)
        return (y * x).sum() + (before.square() * x[1:3]).sum() + y[2:].prod()

    def run(f):
        torch.manual_seed(seeded(0))
        x, y = torch.randn(4).requires_grad_(), torch.randn(4)
        loss = f(y, x)
        return loss, y.detach(), torch.autograd.grad(loss, x)

    torch.testing.assert_close(run(thunder.jit(f, transforms=[NormTransform()])), run(f))


def test_what_the_backward_keeps_of_an_input_is_not_what_is_written_later():
    """Eager mode has an error in the backward."""

    def f(y, x, rows):
        loss = (x * y).sum() + (rows * y[:2]).sin().sum()
        y.add_(1)
        return loss

    torch.manual_seed(seeded(0))
    x, rows, y = torch.randn(4).requires_grad_(), torch.randn(3, 2).requires_grad_(), torch.randn(4)
    expected = torch.autograd.grad((x * y).sum() + (rows * y[:2]).sin().sum(), (x, rows))
    loss = thunder.jit(f, transforms=[NormTransform()])(y, x, rows)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, rows)), expected)


@pytest.mark.parametrize("norm", [torch.nn.functional.batch_norm, torch.nn.functional.instance_norm])
def test_running_statistics_have_no_history(norm):
    def f(x, mean, var):
        first = norm(x, mean, var, None, None, True)
        return (first * norm(x.sin(), mean, var, None, None, True)).sum() + (mean * x.mean((0, 2)) + var).sum()

    def run(f):
        torch.manual_seed(seeded(0))
        x, mean, var = torch.randn(3, 2, 4).requires_grad_(), torch.randn(2), torch.rand(2)
        loss = f(x, mean, var)
        return loss, mean, var, torch.autograd.grad(loss, x)

    torch.testing.assert_close(run(thunder.jit(f, transforms=[NormTransform()])), run(f), rtol=1e-4, atol=1e-5)


def test_running_statistics_that_the_program_made_have_no_history():
    def f(x):
        mean, var = torch.zeros(2), torch.ones(2)
        return torch.nn.functional.batch_norm(x, mean, var, training=True), mean, var

    torch.manual_seed(seeded(0))
    x = torch.randn(3, 2).requires_grad_()
    for found, expected in zip(thunder.jit(f, transforms=[NormTransform()])(x), f(x), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.requires_grad == expected.requires_grad


@pytest.mark.parametrize("by_whom", ["copied", "a number", "a tensor", "zeros"])
def test_what_is_overwritten_has_a_gradient_of_zero(by_whom: str):
    def f(x, value):
        y = x * 2
        if by_whom == "copied":
            y.copy_(value)
        elif by_whom == "a tensor":
            y.fill_(value.sum())
        elif by_whom == "a number":
            y.fill_(3)
        else:
            y.zero_()
        return y * value

    torch.manual_seed(seeded(0))
    x, value = (torch.randn(3).requires_grad_() for _ in range(2))
    expected = torch.autograd.grad(f(x, value).sum(), (x, value), allow_unused=True)
    found = torch.autograd.grad(thunder.jit(f, transforms=[NormTransform()])(x, value).sum(), (x, value), allow_unused=True)
    torch.testing.assert_close(found, expected)


def _truncated(x):
    h, total = x.detach() * 0, 0
    for step in range(3):
        h = (h + x).tanh()
        total = total + h.sum()
        if step == 1:
            assert h.requires_grad
            h.detach_()
            assert not h.requires_grad
    return total * h


def _detached_and_written(x):
    z = x * 2
    w = z * 3
    torch.detach_(z)
    z += x.sin()
    return z * x + w


def _detached_without_autograd(x):
    z = x * 2
    with torch.no_grad():
        z.detach_()
    return z[1:] * x[1:]


def _detached_twice(x):
    z = x * 2
    w = z.detach()
    w.detach_()
    with torch.no_grad():
        x.detach().detach_()
    return z * w + x


def _detached_again_after_a_write(x):
    z = (x * 2).detach()
    z *= x
    z.detach_()
    return z * x


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
@pytest.mark.parametrize(
    "f", [_truncated, _detached_and_written, _detached_without_autograd, _detached_twice, _detached_again_after_a_write]
)
def test_what_is_detached_in_place_has_no_gradient(f, transform):
    torch.manual_seed(seeded(0))
    x = torch.randn(4).requires_grad_()
    found, expected = (run(x) for run in (thunder.jit(f, transforms=[transform()]), f))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(r.sum(), x) for r in (found, expected)))


def test_an_input_that_is_detached_in_place_is_read_without_a_gradient():
    def f(y, x):
        y.detach_().add_(x)
        total = y.sum()
        y.detach_()
        return total * (y * x).sum(), y

    def run(f):
        torch.manual_seed(seeded(0))
        x, y = torch.randn(4).requires_grad_(), torch.randn(4)
        loss, returned = f(y, x)
        assert returned is y and not y.requires_grad
        return loss, y, torch.autograd.grad(loss, x)

    torch.testing.assert_close(run(thunder.jit(f, transforms=[NormTransform()])), run(f))


def _a_view_of_before(x):
    z = x * 2
    view = z[1:]
    z.detach_()
    return view * x[1:]


def _a_view(x):
    z = x * 2
    z[0].detach_()
    return z


def _an_input(x):
    return x.detach_() * 2


@pytest.mark.parametrize(
    ("f", "error", "says"),
    [
        (_a_view_of_before, ThunderNormError, "detached in place(.|\n)*test_written_views.py"),
        (_a_view, RuntimeError, "Can't detach views in-place"),
        (_an_input, ThunderNormError, "detach_(.|\n)*test_written_views.py"),
    ],
)
def test_a_tensor_that_cannot_be_detached_in_place_is_refused(f, error, says):
    x = torch.ones(4).requires_grad_()
    with pytest.raises(error, match=says):
        thunder.jit(f, transforms=[NormTransform()])(x)
    assert x.requires_grad


class _WritesIntoViews(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(seeded(0))
        self.layer = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x, *more):
        y = self.layer(x)
        y.view(-1)[::2].mul_(3)
        y.detach()[0].zero_()
        self.scale.data[1:].mul_(2)
        return (y, *(m * self.scale for m in more))


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
@pytest.mark.parametrize("beside_wrapper", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_that_require_grad_change_nothing_without_autograd(mode, beside_wrapper, transform):
    """What is written into a view of what the module computes of them is there; evaluation is not differentiated."""

    def run(program):
        with mode():
            torch.manual_seed(seeded(1))
            x, more = torch.randn(3, 4), torch.randn(3, 4)
            y, *results = program(x, *[TwoTensor(more, more * 2)] * beside_wrapper)
            return [y, *(r.a for r in results)]

    model, ours = _WritesIntoViews(), _WritesIntoViews()
    found, expected = run(thunder.jit(ours, transforms=[transform()])), run(model)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert not a.requires_grad
    torch.testing.assert_close(ours.state_dict(), model.state_dict())


@pytest.mark.parametrize("transform", [CheckpointTransform, ProfileTransform, SplitBiasTransform])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_transforms_that_do_not_interpret_wrappers_lose_no_write(mode, transform):
    f = _made(lambda u: u.view(-1), lambda v: v.mul_(2))
    with mode():
        torch.testing.assert_close(_run(thunder.jit(f, transforms=[transform()]), "plain"), _run(f, "plain"))
        if torch.is_grad_enabled():
            torch.testing.assert_close(_run(thunder.jit(f, transforms=[transform()]), "leaf"), _run(f, "leaf"))
