"""Movement rules of composed sensitivities one by one: linear operations against their Jacobians, slopes against difference quotients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.rules.movement.test_composed import F64, matrices
from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.rules.movement import slopes

# -- every rule of movements against what happens ----------------------------------------------------------------------------


def written(x: torch.Tensor, write) -> torch.Tensor:
    y = 2 * x
    write(y)
    return y


LINEAR = {
    "view": lambda x: x.view(2, 3, 2, 2),
    "flatten": lambda x: x.flatten(0, 1),
    "transpose of features": lambda x: x.view(6, 2, 2).transpose(1, 2).reshape(6, 4),
    "slice": lambda x: x[..., 1::2],
    "one row": lambda x: x[:, 0],
    "index": lambda x: x[..., [2, 0, 0]],
    "chunk": lambda x: x.chunk(2, -1)[1],
    "split, added": lambda x: sum(x.split([1, 1, 2], -1)[:2]),
    "unbind": lambda x: x.unbind(1)[2],
    "cat": lambda x: torch.cat([x, 2 * x, torch.ones(2, 3, 1, dtype=F64)], -1),
    "stack": lambda x: torch.stack([x, -x], -1),
    "expand": lambda x: x[:, :1].expand(2, 5, 4),
    "pad by cat": lambda x: torch.cat([torch.zeros(2, 3, 2, dtype=F64), x], -1),
    "triu": lambda x: x[0].triu(),
    "matmul": lambda x: x @ _W,
    "from the left": lambda x: _L @ x,
    "addmm": lambda x: torch.addmm(torch.ones(2, dtype=F64), x.flatten(0, 1), _W),
    "mean over features": lambda x: x.mean(-1, keepdim=True) + x,
    "sum over features": lambda x: x.sum(-1),
    "mean over rows": lambda x: x.mean((0, 1)),
    "sum over rows": lambda x: x.sum(1),
    "row of factors": lambda x: x * _W[:, 0],
    "rows of factors": lambda x: x * _M,
    "quotient": lambda x: x / _M.exp(),
    "rsub": lambda x: 1 - x,
    "dtype": lambda x: x.float().double(),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "broadcast": lambda x: x + x[:, :1],
    "written from other entries": lambda x: written(x, lambda y: y.__setitem__((..., 0), y[..., 1] - x[..., 3])),
    "a number is written": lambda x: written(x, lambda y: y.__setitem__((..., slice(1, 3)), 5.0)),
    "added to a part in place": lambda x: written(x, lambda y: y[..., 2:].add_(y[..., :2]).mul_(3)),
    "copied": lambda x: written(x, lambda y: y[..., ::2].copy_(x[..., :2])),
    "plain entries are written": lambda x: written(x, lambda y: y.__setitem__((..., slice(0, 2)), _W[:2, 1])),
    "scattered": lambda x: x.select_scatter(3 * x[..., 1], -1, 0).slice_scatter(x[..., :1], -1, 3),
    "scattered on a diagonal": lambda x: x[0].diagonal_scatter(x[0, :, 3]),
    "in place": lambda x: (2 * x).mul_(3).add_(x),
    "dtype of another": lambda x: x.type_as(x.sum()) + x.type(torch.float64),
    "fewer bits": lambda x: x.half().double() + x.bfloat16().double(),
    "shape of another": lambda x: x.view_as(_M) + x.flatten().reshape_as(_M),
    "expanded as another": lambda x: x[:, :1].expand_as(2 * x),
    "tile": lambda x: x.tile(1, 1, 2).repeat_interleave(2, -1),
    "turned over": lambda x: x.rot90(2, (0, 2)).flatten(0, 1).fliplr().flipud(),
    "windows": lambda x: x.unfold(-1, 2, 1),
    "diagonal": lambda x: x.diag_embed() + x.unsqueeze(-1),
    "parts": lambda x: sum(x.tensor_split(2, -1)),
    "padded": lambda x: torch.constant_pad_nd(x, (2, 1), 3.0),
    "by labels": lambda x: torch.einsum("bnd,de->bne", x, _W),
    "summed by labels": lambda x: torch.einsum("b n d -> b n", x),
    "from the left by labels": lambda x: torch.einsum("de,...d->...e", _W, x),
    "clamped from one side": lambda x: x.clamp_min(-1e9).clamp_max(1e9),
}
_W, _M, _L = matrices(2, 4, seed=1)[0], matrices(4, 3, seed=2)[0].expand(2, 3, 4), matrices(3, 5, seed=3)[0]


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_operation_moves_no_further_than_claimed(name: str):
    f, x = LINEAR[name], torch.randn(2, 3, 4, dtype=F64, generator=torch.Generator().manual_seed(seeded()))
    leaf = with_perturbation(RMSTensor.of(x))
    with norm_sensitivity("composed"):
        y = f(leaf)
    claimed = sensitivities(y, leaf).item()
    jacobian = torch.func.jacrev(lambda v: f(v.view(2, 3, 4)).reshape(-1))(x.reshape(-1))
    # from rows of RMS 1 each (any signs of any direction) to the norm of y: ascent over the rows, which the map is linear in
    d = torch.randn(64, 6, 4, dtype=F64)
    for _ in range(30):
        d = (F.normalize(d, dim=-1) * 2).requires_grad_()
        moved = (d.reshape(64, -1) @ jacobian.T).reshape(64, *y.shape)
        size = (moved.square().mean(y.elem_dims).sqrt() if y.elem_dims else moved.abs()).reshape(64, -1).amax(1)
        (d,) = torch.autograd.grad(size.sum(), d)
        d = d + 1e-30
    found = size.max().item()
    assert found <= claimed * (1 + 1e-6)
    assert claimed <= found * (1.001 if name not in LOOSE else LOOSE[name])


# rows of factors differ from row to row, and so do the entries of a diagonal; a sum of what other rows give goes by their norms, RMS of one
# entry by the whole row's
LOOSE = {
    "rows of factors": 1.5,
    "quotient": 1.6,
    "from the left": 1.3,
    "view": 1.42,
    "transpose of features": 1.01,
    "scattered on a diagonal": 1.42,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_matrix_is_the_exact_one_whatever_the_dtype(dtype: torch.dtype):
    """Thirds are rounded down in some of these, and ATen tells sums their dtype: of one entry alone tensordot is one."""
    torch.manual_seed(seeded(0))
    x, one, w = torch.rand(2, 3, dtype=dtype), torch.rand(1, 1, dtype=dtype), torch.rand(1, 1, dtype=dtype)
    third = torch.full((3,), 1 / 3, dtype=F64)
    for f, given, matrix in (
        (lambda x: x.mean(-1), x, third),
        (lambda x: x.mean(-1, dtype=dtype), x, third),
        (lambda x: x.double().mean(-1, dtype=dtype), x, third),
        (lambda x: x.sum(-1, dtype=dtype), x, 3 * third),
        (lambda x: x.double().sum(dim=(-1,), dtype=dtype), x, 3 * third),
        (lambda x: torch.tensordot(x, w, 1), one, w.double()),
        (lambda x: torch.tensordot(x, w, 2), one, w.double()),
        (lambda x: torch.tensordot(w, x, 1), one, w.double()),
    ):
        leaf = with_perturbation(RMSTensor.of(given))
        with norm_sensitivity("composed"):
            claimed = sensitivities(f(leaf), leaf).item()
        exact = matrix.norm().item() * given.shape[-1] ** 0.5  # from RMS to one entry
        assert exact <= claimed * (1 + 1e-12) and claimed <= exact * (1 + 1e-9)


@pytest.mark.parametrize("op", slopes.functions(), ids=lambda op: op.__name__)
def test_slopes_are_between_the_numbers_claimed(op):
    """Difference quotients over a grid, and at the ends of what is claimed one that comes near."""
    low, high = slopes.of(op, {})
    x = torch.linspace(-200, 200, 400_001, dtype=F64)
    y = op(x, min=-1.0) if op is torch.clamp else op(x)
    quotients = (y[1:] - y[:-1]) / (x[1:] - x[:-1])
    assert low - 1e-9 <= quotients.min() and quotients.max() <= high + 1e-9
    assert quotients.min() < low + 0.01 and quotients.max() > high - 0.01


@pytest.mark.parametrize("arguments", [{"approximate": "tanh"}, {"approximate": "none"}])
def test_slopes_of_both_gelus(arguments):
    low, high = slopes.of(F.gelu, arguments)
    x = torch.linspace(-12, 12, 200_001, dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(F.gelu(x, **arguments).sum(), x)
    assert low <= slope.min() < low + 1e-6 and high - 1e-6 < slope.max() <= high


NEVER_ABOVE = {
    "softplus of what is small": lambda x: F.linear(F.softplus(0.1 * x), torch.eye(6, dtype=torch.float64)),
    "gelu": lambda x: F.gelu(0.2 * x) @ torch.ones(6, 2, dtype=torch.float64),
    "weighted mean": lambda x: (x.mean(-1, keepdim=True).softmax(-2) * x.tanh()).sum(-2),
    "gate": lambda x: torch.sigmoid(x) * x,
    "half precision": lambda x: x.half().double(),
    "softmax": lambda x: F.linear(x.softmax(-1), torch.eye(6, dtype=torch.float64)) + x,
}


@pytest.mark.parametrize("kind", [RMSTensor, LinfTensor])
@pytest.mark.parametrize("size", [0.0, 1.0])
@pytest.mark.parametrize("name", NEVER_ABOVE)
def test_composed_is_never_above_global(name: str, size: float, kind):
    torch.manual_seed(seeded(21))
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    found = []
    for sensitivity in ("global", "composed"):
        given = with_perturbation(kind.of(x, () if kind is LinfTensor else (-2, -1)), size)
        with norm_sensitivity(sensitivity):
            y = NEVER_ABOVE[name](given)
        found.append((y.elem_dims, sensitivities(y, given).item()))
    assert found[0][0] == found[1][0]
    assert found[1][1] <= found[0][1] * (1 + 1e-9)


_C = torch.randn(4, dtype=torch.complex128, generator=torch.Generator().manual_seed(seeded(2)))


@pytest.mark.parametrize("scope", ["composed", "within"])
def test_complex_results_go_by_their_norm_rules_and_bools_do_not_move(scope):
    """The two parts of an entry move together: a real slope for each of them would leave one out."""
    x = torch.randn(2, 3, 4, dtype=F64, generator=torch.Generator().manual_seed(seeded()))
    for f in (lambda t: t * _C, lambda t: t / _C, lambda t: t * (2 + 3j), lambda t: (t.to(torch.complex128) * _C).abs()):
        leaf = with_perturbation(RMSTensor(2.0, backing=x), 0.1)
        with norm_sensitivity(scope):
            claimed = sensitivities(f(leaf), leaf).item()
        moved = f(x + torch.eye(4, dtype=F64)[:, None, None]) - f(x)  # one entry of each row
        assert moved.abs().square().sum(-1).amax().sqrt().item() <= claimed * (1 + 1e-9)
    with norm_sensitivity(scope):
        assert not isinstance(with_perturbation(RMSTensor.of(x), 0.1).to(torch.bool), RMSTensor)
