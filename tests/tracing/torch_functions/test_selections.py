"""``y[mask] = f(x[mask])`` where sizes may not be numbers of the trace: after writes, and in functions under transforms; against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm.errors import DataDependentError
from thunder_norm.transforms import CheckpointTransform, SubclassTransform, grad, jvp, vmap
import thunder


def _set(y, mask, values):
    y[mask] = values
    return y


def _start(x):
    """The program has written into a tensor, which the mask may be computed from."""
    y = x * 1
    y[0] = 0.25
    return y


def _snapshot(x):
    y = _start(x)
    mask = y > 0
    selected = y[mask]
    y.mul_(5)
    return _set(y, mask, selected)


def _in_place(x):
    y = _start(x)
    mask = y > 0
    selected = same = y[mask]
    selected += 1
    selected.mul_(x.sum())
    return _set(y, mask, same)


def _farthest_points(x):
    found, distance, farthest = [], torch.full((3,), 1e10, dtype=x.dtype), torch.zeros((), dtype=torch.long)
    for _ in range(3):
        found.append(x[farthest])
        away = ((x - found[-1]) ** 2).sum(-1)
        mask = away < distance
        distance[mask] = away[mask]
        farthest = distance.argmax()
    return torch.stack(found)


def _projected(x):
    """Of categorical distributions of returns, as C51 has it."""
    place = (x.sum(-1).tanh() + 1) * 2
    low, high = place.floor().long(), place.ceil().long()
    low[(high > 0) * (low == high)] -= 1
    high[(low < 4) * (low == high)] += 1
    out = torch.zeros(5, dtype=x.dtype)
    return out.index_add(0, low, high - place).index_add(0, high, place - low)


# functions of x [3, 4]
PROGRAMS = {
    "two masks of one value": lambda x: _set(_start(x), x.exp() > 1.1, (x.exp() * 2)[x.exp() > 1.1]),
    "both sides of an assignment": lambda x: _add_to(_start(x), lambda y: y > 0, x.cos()),
    "several selections": lambda x: _of_two(_start(x), x.cos(), x.sin()),
    "rows, a row for all and a number": lambda x: _rows(_start(x), x),
    "values at the time": _snapshot,
    "what is selected is written into": _in_place,
    "a view": lambda x: _set((y := _start(x)).view(-1), y.view(-1) > 0.5, y.view(-1)[y.view(-1) > 0.5] * 3) * 1,
    "modules and numbers": lambda x: _set(_start(x), x > 0, F.gelu(torch.where(x[x > 0] > 1, 2.0, x[x > 0]).clamp(max=1.5))),
    "numbers in tensors": lambda x: _set(_start(x), x > 0, x[x > 0] * torch.tensor(3) + torch.tensor([0.5]) + torch.tensor(2.0)),
    "sum and mean": lambda x: _start(x)[_start(x) > 0].mean() + (x[x < 0] ** 2).sum(),
    "functions that write": lambda x: _written(x, lambda t: F.elu_(t)),
    "means of rows": lambda x: x[x[:, 0] > -0.2].mean(0) + x[x > 0].logsumexp(0) + x[x[:, 0] > -0.2].sum(dim=0),
    "softmax of rows": lambda x: _set(
        _start(x), x[:, 0] > -0.2, x[x[:, 0] > -0.2].softmax(1) - x[x[:, 0] > -0.2].amax(-1, keepdim=True)
    ),
    "a contrast of rows": lambda x: (y := x[x[:, 0] > -0.2]).logsumexp(-1).mean() - y.mean(1).sum(),
    "farthest points": _farthest_points,
    "projected distributions": _projected,
}


LABELS, ROWS = torch.tensor([[1, 9, 3], [-1, 2, 0]]), torch.tensor([[True, False, True], [False, True, True]])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
# losses of x [2, 3, 4] and labels, of which those that are left out mean nothing
LOSSES = {
    "cross_entropy": lambda x, y, m: F.cross_entropy(x[m], y[m]),
    "cross_entropy, summed, smoothed": lambda x, y, m: F.cross_entropy(x[m], y[m], reduction="sum", label_smoothing=0.1),
    "cross_entropy, weighted": lambda x, y, m: F.cross_entropy(x[m], y[m], WEIGHT, ignore_index=2),
    "cross_entropy of probabilities": lambda x, y, m: F.cross_entropy(x[m], x[m].detach().softmax(-1)),
    "a module": lambda x, y, m: torch.nn.CrossEntropyLoss(ignore_index=3)(x[m], y[m]),
    "nll_loss": lambda x, y, m: F.nll_loss(F.log_softmax(x[m], dim=-1), y[m]),
    "mse_loss": lambda x, y, m: F.mse_loss(x[m], 2 * x[m].detach()),
    "l1_loss": lambda x, y, m: F.l1_loss(x[..., 0][m], y[m].to(x.dtype), reduction="sum"),
    "smooth_l1_loss": lambda x, y, m: F.smooth_l1_loss(x[..., 0][m], y[m].to(x.dtype), beta=0.5),
    "binary_cross_entropy_with_logits": lambda x, y, m: F.binary_cross_entropy_with_logits(x[m], (x > 0).to(x.dtype)[m]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_what_a_mask_selects(name):
    torch.manual_seed(seeded(1))
    xs, masks = torch.randn(2, 2, 3, 4, dtype=torch.float64), torch.stack([ROWS, ROWS & (LABELS != 1)])
    loss, leaf = LOSSES[name], xs.clone().requires_grad_()
    expected = torch.stack([loss(x, LABELS, m) for x, m in zip(leaf, masks, strict=True)])
    (gradients,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(vmap(lambda x, m: loss(x, LABELS, m))(xs, masks), expected.detach())
    torch.testing.assert_close(vmap(grad(lambda x, m: loss(x, LABELS, m)))(xs, masks), gradients)


def test_losses_that_need_a_size_are_refused():
    x = torch.zeros(2, 3, 4)
    for loss in (
        lambda x: F.mse_loss(x[ROWS], x[~ROWS]).sum(),
        lambda x: F.mse_loss(x[ROWS], x.sum()),
        lambda x: F.mse_loss(x[ROWS], x[..., 0][ROWS]),
        lambda x: F.cross_entropy(x[ROWS], LABELS[ROWS], reduction="none").max(),
        lambda x: x[ROWS].cumsum(0).sum(),
    ):
        with pytest.raises(DataDependentError, match="which .* depends on"):
            grad(loss)(x)


def _written(x, write):
    y = _start(x)
    mask = y > -0.5
    selected = y[mask]
    write(selected)
    return _set(y, mask, selected)


def _add_to(y, where, more):
    y[where(y)] += more[where(y)]
    return y


def _of_two(y, b, c):
    mask = y < 0.5
    y[mask] = b[mask] * 2 + c[mask]
    y[~mask] = 1 - y[~mask]
    return y


def _rows(y, x):
    mask = y[:, 1] > 0
    y[mask] = y[mask] * x[1] + x.sum()
    return y


def _given() -> torch.Tensor:
    torch.manual_seed(seeded(0))
    return torch.randn(3, 4, dtype=torch.float64)


def _loss(f):
    return lambda x: f(x).sin().sum()


def _gradient(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(_loss(f)(x), x)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_derivatives_are_eager_modes(name):
    f, x = PROGRAMS[name], _given()
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    torch.testing.assert_close(jitted(x), f(x))
    torch.testing.assert_close(_gradient(jitted, x), _gradient(f, x))
    several = torch.stack([x, -x])
    torch.testing.assert_close(vmap(f)(several), torch.stack(list(map(f, several))))


@pytest.mark.parametrize("name", ["several selections", "rows, a row for all and a number", "projected distributions"])
def test_functions_are_differentiated_as_in_eager_mode(name):
    f, x = PROGRAMS[name], _given()
    several = torch.stack([x, -x])
    torch.testing.assert_close(vmap(grad(_loss(f)))(several), torch.stack([_gradient(f, t) for t in several]))
    direction, step = torch.cos(x), 1e-6
    moved = (_loss(f)(x + step * direction) - _loss(f)(x - step * direction)) / (2 * step)
    torch.testing.assert_close(jvp(_loss(f), (x,), (direction,))[1], moved, rtol=1e-6, atol=1e-6)


def test_one_trace_serves_all_sizes():
    jitted = thunder.jit(_farthest_points, transforms=[CheckpointTransform(None)])
    for x in (_given(), -_given(), _given() * 0):
        assert torch.equal(jitted(x), _farthest_points(x))
    assert thunder.cache_misses(jitted) == 1


def _of_a_mask_that_changes(x, change):
    y = _start(x)
    mask = y > 0
    selected = y[mask]
    mask = change(mask)
    return selected.sum(), selected.mean(), mask * 1


CHANGES = {
    "written": lambda mask: mask.logical_not_(),
    "a row": lambda mask: (mask[0].fill_(False), mask)[1],
    "other memory": lambda mask: (setattr(mask, "data", mask.logical_not()), mask)[1],
}


@pytest.mark.parametrize("name", CHANGES)
def test_sums_are_of_what_the_mask_selected_and_not_of_what_it_would_by_then(name):
    jitted = thunder.jit(_of_a_mask_that_changes, transforms=[CheckpointTransform(None)])
    for x in (_given(), -_given()):
        torch.testing.assert_close(jitted(x, CHANGES[name]), _of_a_mask_that_changes(x, CHANGES[name]))


QUOTIENTS = {
    "of a number": lambda k: 12 // k,
    "of one another": lambda k: (k + 9) // k,
    "remainders": lambda k: torch.remainder(7 - k, k) + torch.fmod(k + 9, k),
    "rounded": lambda k: torch.div(13, k, rounding_mode="trunc"),
    "in place": lambda k: k.add_(20).floor_divide_(k - 20),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_integers_are_divided_by_those_that_are_selected_alone(name):
    def f(k):
        return _set(k * 1, k != 0, QUOTIENTS[name](k[k != 0]))

    k = torch.tensor([[3, 0, -2], [0, 5, 1]])
    assert torch.equal(vmap(f)(k), torch.stack(list(map(f, k))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_in_low_precision_neither_overflow_nor_miscount(dtype):
    def f(x):
        return x[x > 0].mean()

    x = torch.cat([torch.ones(70_001), -torch.ones(2)]).to(dtype) * 3
    assert vmap(f)(x[None]).item() == f(x).item() == 3


def test_a_write_is_into_what_a_conversion_returns_as_it_was():
    def f(x):
        return _written(x, lambda t: t.contiguous().to(t.dtype).mul_(3))

    x = _given()
    jitted = thunder.jit(f, transforms=[CheckpointTransform(None)])
    torch.testing.assert_close(jitted(x), f(x))
    torch.testing.assert_close(_gradient(jitted, x), _gradient(f, x))


def test_what_is_left_out_has_no_derivative_even_where_that_is_infinite():
    def f(x, power):
        y, mask = torch.zeros_like(x), x > 0
        y[mask] = x[mask] ** power + x[mask].sqrt()
        return y.sum()

    x, power = torch.tensor([4.0, 0.0, -1.0]), torch.tensor(1.5)
    torch.testing.assert_close(grad(f, argnums=(0, 1))(x, power), torch.func.grad(_written_out, argnums=(0, 1))(x, power))
    second = grad(lambda x: grad(f)(x, power).sum())(x)
    torch.testing.assert_close(second, torch.func.grad(lambda x: torch.func.grad(_written_out)(x, power).sum())(x))
    none = grad(f, argnums=(0, 1))(-x.abs(), power)
    assert not any(t.any() or t.isnan().any() for t in none)


def _written_out(x, power):
    return x[0] ** power + x[0].sqrt()


def _changed(x):
    mask = x > 0
    selected = x[mask]
    mask[0] = ~mask[0]
    return _set(x * 1, mask, selected)


REFUSED = {
    "another mask": lambda x: _set(x * 1, x > 0, x[x > 0.5]),
    "a mask that was written into": _changed,
    "a mask of what was written into": lambda x: _set(y := x * 1, (selected := y[y > 0], y.neg_())[1] > 0, selected),
    "one output of two": lambda x: _set(x * 1, torch.frexp(x)[0] > 0, x[torch.frexp(x)[1] > 0]),
    "its length": lambda x: x / len(x[x > 0]),
    "its shape": lambda x: x / x[x > 0].shape[0],
    "its size": lambda x: x * x[x > 0].size(0),
    "a tensor like it": lambda x: x * torch.ones_like(x[x > 0]).sum(),
    "an entry of it": lambda x: x * x[x > 0][0],
    "beside others": lambda x: torch.cat([x[x > 0], x[x < 0]]),
    "with a tensor of its length": lambda x: _set(x * 1, x > 0, x[x > 0] * x.flatten()),
    "a median": lambda x: x * x[x > 0].median(),
    "another name of it, written into": lambda x: _written(x, lambda t: t.detach().mul_(3)),
    "other memory": lambda x: _written(x, lambda t: setattr(t, "data", t * 2)),
    "a result's place": lambda x: _written(x, lambda t: torch.mul(t, 2, out=t)),
    "a write without gradients": lambda x: _written(x, torch.no_grad()(lambda t: t.mul_(2))),
    "returned": lambda x: x[x > 0],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_size_is_refused(name):
    with pytest.raises(DataDependentError, match=r"(?s)mask selects.*test_selections.py:\d+.*torch\.where"):
        vmap(REFUSED[name])(_given()[None])


def test_a_mask_that_lies_in_other_memory_is_another_one():
    def f(x):
        y = x * 1
        mask = y > 0
        selected = y[mask]
        mask.data = y < 0
        return _set(y, mask, selected)

    with pytest.raises(DataDependentError, match="other places"):
        thunder.jit(f, transforms=[CheckpointTransform(None)])(_given())
