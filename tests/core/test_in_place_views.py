"""In-place operations on views of normed tensors: what shares memory changes with them, in value and in norm, or it is refused."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from tests.seeds import named_seed, seeded
from tests.within_norms import actual_norm
from thunder_norm import LinfTensor, RMSTensor, norm_report, with_perturbation
from thunder_norm.core.views import Layout, part_of
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform
import thunder

pytestmark = pytest.mark.usefixtures("frozen_heap")  # a refusal looks for views in garbage

VIEWS = {
    "columns": lambda b: b[..., :2],
    "a row": lambda b: b[1],
    "steps": lambda b: b[:, ::2],
    "transposed": lambda b: b.transpose(0, 1)[1:],
    "of a view": lambda b: b[1:][:, 1],
    "a chunk": lambda b: b.chunk(2, -1)[1],
    "unbound": lambda b: b.unbind(0)[1],
    "unsqueezed": lambda b: b[:, None, 1:],
    "reshaped": lambda b: b.view(2, 2, 4)[:, 1],
    "whole": lambda b: b.view(16),
    "detached": lambda b: b.detach()[2:],
    "of data": lambda b: b.data[2:],
    "narrow": lambda b: b.narrow(0, 1, 2),
    "diagonal": lambda b: b.diagonal(),
    "diagonals of a batch": lambda b: b.view(4, 2, 2).diagonal(1, 1, 2),
    "a diagonal of a part": lambda b: b[1:, 1:].diagonal(),
    "expanded": lambda b: b[:1].expand(4, 4),
    "of a reshaped part": lambda b: b.view(16)[1:13].view(4, 3)[:, :2],
    "of a reshaped part of a transposed one": lambda b: b.mT[1:].mT.transpose(0, 1).reshape(12)[2:8].view(3, 2)[1:],
}
# Not what slices cut out of the tensor; in traces the views between are known, in eager runs only where they are alive.
NO_SLICES = ("expanded", "of a reshaped part", "of a reshaped part of a transposed one")
WRITES = {
    "mul_": lambda v, a: v.mul_(3.0),
    "copy_": lambda v, a: v.copy_(a.sum() * torch.ones_like(v)),
    "copy_ of a constant": lambda v, a: v.copy_(torch.full(v.shape, 5.0, dtype=torch.float64)),
    "zero_": lambda v, a: v.zero_(),
    "add_ itself": lambda v, a: v.add_(v),
    "relu_": lambda v, a: torch.relu_(v),
    "an entry": lambda v, a: v.__setitem__(0, 7.0),
    "clamp_": lambda v, a: v.clamp_(-0.1, 0.1),
    "sub_": lambda v, a: v.sub_(a.amax()),
}


def program(view, write, again):
    def f(x):
        base = x * 2
        beside, over = base[0], base[:, 1:3]
        v = VIEWS[view](base)
        WRITES[write](v, x)
        WRITES[again](over, x)
        WRITES[write](v, x)
        return base + 0, v * 1, beside - 0, over * 1

    return f


def check(got, expected):
    for y, w in zip(got, expected, strict=True):
        torch.testing.assert_close(y.backing, w)
        assert type(y).of(w, y.elem_dims).norm_size <= y.norm_size * (1 + 1e-9)


def assert_known_or_refused(view, write, again, runs, kinds):
    f = program(view, write, again)
    t = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(0)))
    try:
        expected = f(t)
    except RuntimeError:  # more than one entry of an expanded tensor is one in memory
        return
    for run in runs:
        for x in kinds(t):
            try:
                got = run(f)(x)
            except UnsupportedOpError:
                assert view in NO_SLICES
            else:
                check(got, expected)


def jitted(f):
    return thunder.jit(f, transforms=[NormTransform()])


@pytest.mark.parametrize("view", VIEWS)
def test_what_shares_memory_changes_too(view):
    pick = random.Random(named_seed(view))
    for write in WRITES:
        again = pick.choice(sorted(WRITES))
        kinds = lambda t: (RMSTensor.of(t), LinfTensor.of(t), RMSTensor.of(t, (0, 1)))  # noqa: E731
        assert_known_or_refused(view, write, again, [lambda f: f], kinds)


@pytest.mark.parametrize("view", VIEWS)
def test_what_shares_memory_changes_too_in_traces(view):
    pick = random.Random(named_seed(view) + 1)
    write, again = pick.choice(sorted(WRITES)), pick.choice(sorted(WRITES))
    assert_known_or_refused(view, write, again, [jitted], lambda t: [pick.choice((RMSTensor, LinfTensor)).of(t)])


@pytest.mark.parametrize("view", ["columns", "steps", "reshaped"])
def test_movements_go_through_what_was_written(view):
    """A finite difference of the whole after a part was multiplied."""
    t = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(1)))

    def f(x):
        base = x * 1
        VIEWS[view](base).mul_(5.0)
        return base * 1

    d = torch.tensor(1.0, dtype=torch.float64)
    for run in (f, jitted(f)):
        y = run(RMSTensor(RMSTensor.of(t).norm_size, backing=t, perturbation_size=d))
        moved = RMSTensor.of(f(torch.ones(4, 4, dtype=torch.float64)))  # linear, in x of norm 1
        assert moved.norm_size <= y.perturbation_size <= 6 * (1 + 1e-9)  # what stays, and 5 times what was


@pytest.mark.parametrize("run", [lambda f: f, jitted], ids=["eager", "traced"])
def test_an_assignment_leaves_the_norms_of_views_elsewhere(run):
    """Another row, column or block is what it was, to the number; what has an entry in common holds the new ones."""
    t = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(6)))

    def f(x):
        base = x * 1
        row, columns, block, met = base[1], base[:, :2], base[2:, 4:], base[:, 3:]
        base[2, 2:4] = 100.0
        return row * 1, columns * 1, block * 1, met * 1, base * 1

    with torch.no_grad():
        found, plain = run(f)(RMSTensor.of(t)), f(t)
    kept = RMSTensor.of(t)[1], RMSTensor.of(t)[:, :2], RMSTensor.of(t)[2:, 4:]
    for y, before in zip(found[:3], kept, strict=True):
        assert y.norm_size == before.norm_size
    for y, values in zip(found, plain, strict=True):
        assert torch.equal(y.backing, values)
        assert actual_norm(y) <= y.norm_size * (1 + 1e-9)


def test_what_was_given_from_outside_stays():
    x = with_perturbation(RMSTensor.of(torch.randn(4, 4)))
    with pytest.raises(UnsupportedOpError, match="outside"):
        x[:2].mul_(3.0)


def test_parts_are_where_the_views_are():
    """Random chains of views, against what indexing a tensor of its own places gives."""
    pick = random.Random(seeded(5))
    for _ in range(300):
        whole = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
        if pick.random() < 0.5:
            whole = whole.permute(pick.sample(range(4), 4))
        view = whole
        for _ in range(pick.randint(1, 4)):
            d = pick.randrange(view.ndim) if view.ndim else 0
            view = pick.choice(
                [
                    lambda v, d=d: v.select(d, pick.randrange(v.shape[d])) if v.ndim > 1 else v,
                    lambda v, d=d: v[(slice(None),) * d + (slice(pick.randrange(v.shape[d]), None, pick.randint(1, 2)),)],
                    lambda v, d=d: v.transpose(d, pick.randrange(v.ndim)),
                    lambda v, d=d: v.unsqueeze(d),
                ]
            )(view)
        if view.ndim == 4 and pick.random() < 0.5:
            whole, view = whole.contiguous(), whole.contiguous().diagonal(pick.randint(-1, 1), 2, 3)[pick.randrange(2) :]
        part = part_of(Layout.of(view), Layout.of(whole))
        assert part is not None
        assert torch.equal(part.taken_from(whole), view)
        value = torch.randint(1000, view.shape)
        written = part.put_into(whole, value, lambda t, items, v: (new := t.clone(), new.__setitem__(items, v))[0])
        assert torch.equal(part.taken_from(written), value)
        assert written.ne(whole).sum() <= view.numel()


def test_a_report_has_what_was_before_it_was_written_into():
    class Scaled(torch.nn.Module):
        def forward(self, x):
            y = x * 2
            y[:2].mul_(10.0)
            return y

    t = torch.randn(4, 4, generator=torch.Generator().manual_seed(seeded(2)))
    rows = list(norm_report(jitted(Scaled()), RMSTensor.of(t)))
    assert rows[0].actual == pytest.approx(RMSTensor.of(2 * t).norm_size.item())
    assert rows[-1].actual == pytest.approx(RMSTensor.of(Scaled()(t)).norm_size.item())


def test_what_is_written_may_move_where_the_tensor_did_not():
    def f(a, b):
        y = a * 2
        y += b
        return y

    t = torch.randn(2, 3, generator=torch.Generator().manual_seed(seeded(4)))
    for run in (f, jitted(f)):
        y = run(RMSTensor.of(t), RMSTensor(RMSTensor.of(t).norm_size, backing=t, perturbation_size=1.0))
        torch.testing.assert_close(y.backing, 3 * t)
        assert y.perturbation_size.item() == 1.0


def test_a_view_in_garbage_is_no_view():
    """One that nobody holds, but for a cycle."""
    gc.disable()
    try:
        y = RMSTensor.of(torch.ones(4, 6)) * 1
        cycle = [y.unfold(1, 3, 2)]
        cycle.append(cycle)
        with pytest.raises(UnsupportedOpError, match="shares"):
            y[0].mul_(3)
        del cycle
        y[0].mul_(3)
    finally:
        gc.enable()
    assert torch.equal(y.backing[:2, 0], torch.tensor([3.0, 1.0]))
