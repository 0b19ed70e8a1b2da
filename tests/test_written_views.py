"""What a program writes into views and into inputs arrives as in eager mode, with its gradients, or is refused."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm.errors import ThunderNormError
from thunder_norm.transforms import NormTransform, SubclassTransform
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


_INTO_INPUTS = {
    "added": lambda y, x: y.add_(x),
    "copied": lambda y, x: y.copy_(x),
    "assigned": lambda y, x: y.__setitem__(slice(1, None), x[1:]),
    "into a view": lambda y, x: y[1:].mul_(x[1:]),
}


@pytest.mark.parametrize("write", _INTO_INPUTS)
def test_an_input_that_would_get_a_history_is_refused(write):
    def f(y, x, detached):
        _INTO_INPUTS[write](y, x.detach() if detached else x * 2)
        return y, (y * x).sum()

    jitted = thunder.jit(f, transforms=[NormTransform()])
    x, y = torch.ones(4).requires_grad_(), torch.ones(4)
    with pytest.raises(ThunderNormError, match="in-place(.|\n)*test_written_views.py"):
        jitted(y, x, False)
    assert torch.equal(y, torch.ones(4))
    expected = torch.ones(4)
    f(expected, x, True)
    jitted(y, x, True)
    assert torch.equal(y, expected)
    with torch.no_grad():
        jitted(y, x, False)
        f(expected, x, False)
    assert torch.equal(y, expected)
