"""Contexts of torch around and inside a jitted program: autocast, gradient modes, inference mode, labels, hooks, random states."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.seeds import seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform, SplitBiasTransform, SubclassTransform
import thunder

TRANSFORMS = (NormTransform, SubclassTransform)
_LSTM = torch.nn.LSTM(4, 4)
LOW = torch.bfloat16
_OPERATIONS = {
    "addmm": lambda x: torch.addmm(x[0], x, x),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "a product in einsum": lambda x: torch.einsum("ab,cb->ac", x, x),
    "no product in einsum": lambda x: torch.einsum("ab,cb->abc", x, x),
    "tensordot": lambda x: (torch.tensordot(x, x, 1), torch.tensordot(x, x, dims=2), torch.tensordot(x, x, ([0], [1]))),
    "losses": lambda x: (F.mse_loss(x, x.to(LOW)), F.huber_loss(x.to(LOW), x), F.l1_loss(x.to(LOW), x.to(LOW))),
    "cross entropy": lambda x: F.cross_entropy(x @ x, torch.arange(4)),
    "prod": lambda x: (x @ x).prod(),
    "fft": lambda x: torch.fft.fft(x.to(LOW)).abs(),
    "linear": lambda x: F.linear(x, x, x[0]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "normalization": lambda x: F.layer_norm(x @ x, (4,)),
    "float64": lambda x: x.double() @ x.double(),
    "asked": lambda x: x * (2 if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is LOW else 3),
    "written": lambda x: x.clone().mul_(2) @ x,
    "mm": lambda x: (x.mm(x), torch.mm(x, mat2=x), torch.mv(x, x[0])),
    "inner": lambda x: (torch.inner(x[0], x[1]), torch.inner(x, x[0]), torch.inner(x, x[0, 0])),
    "powers": lambda x: tuple(torch.linalg.matrix_power(x + 3 * torch.eye(4), n) for n in (-2, -1, 1, 2)),
    "inverse": lambda x: (torch.linalg.pinv(x + 3 * torch.eye(4)), torch.linalg.inv((x + 3 * torch.eye(4)).to(LOW))),
    "checkpointed": lambda x: checkpoint(lambda y: (F.mse_loss(y @ y, y.to(LOW)), y @ y), x, use_reentrant=False),
    "recurrent": lambda x: _LSTM(x)[0],
}


def _x() -> torch.Tensor:
    torch.manual_seed(seeded(0))
    return torch.randn(4, 4)


def _in_autocast(f, x):
    with torch.autocast("cpu", dtype=LOW):
        return f(x)


def _assert_same(ours, expected):
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (ours, expected)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("operation", _OPERATIONS)
def test_autocast_gives_every_operation_torchs_precision(operation):
    f, x = _OPERATIONS[operation], _x()
    try:
        expected = _in_autocast(f, x)
    except RuntimeError as e:
        assert "could not create a primitive" in str(e), str(e)
        pytest.skip("oneDNN has no such kernel for this processor")
    jitted = thunder.jit(lambda x: _in_autocast(f, x), transforms=[NormTransform()])
    _assert_same(jitted(x), expected)
    assert not torch.is_autocast_enabled("cpu")
    _assert_same(_in_autocast(thunder.jit(f, transforms=[NormTransform()]), x), expected)
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_of_a_call_is_not_that_of_the_next():
    jitted = thunder.jit(lambda x: x @ x, transforms=[NormTransform()])
    x = _x()
    assert _in_autocast(jitted, x).dtype == LOW
    assert jitted(x[:2, :2]).dtype == torch.float32  # another shape: acquired after the one above
    assert jitted(x).dtype == torch.float32

    asking = thunder.jit(lambda x: x * (2 if torch.is_autocast_enabled("cpu") else 3), transforms=[NormTransform()])
    assert torch.equal(_in_autocast(asking, x), x * 2) and torch.equal(asking(x), x * 3)

    def fails(x):
        with torch.autocast("cpu", dtype=LOW):
            if x.shape[0] == 2:
                raise ValueError
            return x @ x

    jitted = thunder.jit(lambda x: (fails(x), x @ x), transforms=[NormTransform()])
    with pytest.raises(ValueError):
        jitted(x[:2, :2])
    assert [t.dtype for t in jitted(x)] == [LOW, torch.float32]


def test_a_written_program_under_autocast_leaves_the_process_without_it():
    def f(x):
        with torch.autocast("cpu", dtype=LOW):
            return x.clone().mul_(2) @ x

    leaf = _x().requires_grad_()
    thunder.jit(f, transforms=[NormTransform()])(leaf).sum().backward()
    assert not torch.is_autocast_enabled("cpu")


@torch.no_grad()
def _without(x):
    return x * 3


_MODES = {
    "no_grad in no_grad": (torch.no_grad, torch.no_grad),
    "enable_grad in no_grad": (torch.no_grad, torch.enable_grad),
    "no_grad in inference_mode": (torch.inference_mode, torch.no_grad),
    "inference_mode in enable_grad": (torch.enable_grad, torch.inference_mode),
    "inference_mode(False) in no_grad": (torch.no_grad, lambda: torch.inference_mode(False)),
    "set_grad_enabled in inference_mode": (torch.inference_mode, lambda: torch.set_grad_enabled(True)),
}


@pytest.mark.parametrize("modes", _MODES)
def test_gradient_modes_are_those_of_the_program(modes):
    outer, inner = _MODES[modes]

    def f(x, w):
        asked = [torch.is_grad_enabled()]
        with outer():
            with inner():
                a = x * 2
                asked += [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
            b = x * 3 + _without(x)
            asked += [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        return asked, (a.clone() + b.clone()) * w + x

    def run(g):
        leaves = [_x().requires_grad_(), (_x() + 1).requires_grad_()]
        asked, y = g(*leaves)
        return asked, y, torch.autograd.grad(y.square().sum(), leaves)

    jitted = thunder.jit(f, transforms=[NormTransform()])
    expected = run(f)
    for _ in range(2):
        found = run(jitted)
        assert found[0] == expected[0]
        torch.testing.assert_close(found[1:], expected[1:])
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


_LINEAR = torch.nn.Linear(4, 4)


def _mixed(x):
    a = x.sin()
    with torch.enable_grad():
        b, c, d = x.cos(), a * 2, a * x
        with torch.no_grad():
            e = b * x
    return a, b, c, d, e, b * x


def _written(x):
    y, z = x * 1, x * 2
    with torch.enable_grad():
        y.mul_(x)
        w = x * 3
    z.mul_(2)
    w.mul_(2)
    return y, z, w


def _asks(x):
    with torch.enable_grad():
        y = _LINEAR(x)
    return (y * 2 if y.requires_grad else y * 3), y


def _derives(x):
    with torch.enable_grad():
        y = x.sin()
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(x.cos().sum(), x)
    return g, h


def _begins(x):
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((z**3).sum(), z, create_graph=True)
    return g, x * 2


def _beside_its_input(x):
    with torch.enable_grad():
        return x, x * 2, x > 0, x.detach()


_REGIONS = (_mixed, _written, _asks, _derives, _begins, _beside_its_input)


@pytest.mark.parametrize("transform", (NormTransform, SplitBiasTransform))
@pytest.mark.parametrize("f", _REGIONS)
def test_a_region_with_gradients_has_them_in_a_call_without(f, transform):
    def run(g, mode):
        x = _x().requires_grad_()
        with mode():
            results = g(x)
        leaves = (x, _LINEAR.weight)
        derivatives = [
            torch.autograd.grad(r.square().sum(), leaves, retain_graph=True, allow_unused=True)
            for r in results
            if r.requires_grad
        ]
        return [r.requires_grad for r in results], [r.detach() for r in results], derivatives

    jitted = thunder.jit(f, transforms=[transform()])
    for mode in (torch.no_grad, torch.no_grad, torch.enable_grad, torch.no_grad):
        (required, *expected), (found, *values) = run(f, mode), run(jitted, mode)
        assert found == required
        for a, b in zip(tree_leaves(values), tree_leaves(expected), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)
    assert thunder.cache_misses(jitted) == 2


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_inference_mode_around_a_call_records_nothing_whatever_the_program_sets(transform):
    def f(x):
        with torch.enable_grad():
            y = x * 2
            return y, y.requires_grad, torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    jitted, x = thunder.jit(f, transforms=[transform()]), _x().requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            (y, *expected), (z, *found) = f(x), jitted(x)
        assert found == expected and z.requires_grad == y.requires_grad


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("is_enabled", (True, False))
def test_a_program_that_ends_in_another_grad_mode_is_refused(is_enabled, transform):
    def f(x):
        torch.set_grad_enabled(is_enabled)
        return x * 2

    jitted = thunder.jit(f, transforms=[transform()])
    with torch.set_grad_enabled(not is_enabled):
        with pytest.raises(UnsupportedOpError, match="ends with it"):
            jitted(_x())
        assert torch.is_grad_enabled() is not is_enabled
    with torch.set_grad_enabled(is_enabled):
        assert torch.equal(jitted(_x()), _x() * 2)


def test_labels_of_a_profile_do_not_matter():
    def f(x):
        with torch.autograd.profiler.record_function("a label"):
            y = x * 2
        with torch.profiler.record_function("another"), torch.autograd.graph.save_on_cpu():
            return y.sin()

    x = _x().requires_grad_()
    found = thunder.jit(f, transforms=[NormTransform()])(x)
    torch.testing.assert_close(found, f(x))
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(f(x).sum(), x))


def _seeds(x):
    torch.manual_seed(seeded(3))
    return x


def _forks(x):
    with torch.random.fork_rng(devices=[]):
        return x * torch.rand(4)


def _sets_dtype(x):
    torch.set_default_dtype(torch.float64)
    return x


def _sets_dtype_as_it_is(x):
    torch.set_default_dtype(torch.get_default_dtype())
    return x * torch.ones(4)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_default_dtype_may_be_set_to_what_it_is(transform):
    found = thunder.jit(_sets_dtype_as_it_is, transforms=[transform()])(torch.ones(4))
    assert torch.equal(found, torch.ones(4)) and found.dtype is torch.float32


def _packs(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return x.sin()


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("f", [_seeds, _forks, _sets_dtype, _packs])
def test_what_later_calls_would_not_do_is_refused_and_changes_nothing(f, transform):
    before = torch.get_default_dtype(), torch.get_rng_state()
    with pytest.raises(UnsupportedOpError, match="inside a jitted function(.|\n)*test_contexts.py"):
        thunder.jit(f, transforms=[transform()])(torch.ones(4))
    assert torch.get_default_dtype() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
