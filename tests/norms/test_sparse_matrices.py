"""Sparse matrices that a program is given or holds, as graph convolutions have them: beside the same ones, dense."""

import pytest
import torch

from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor, build_norm_map, norm_report
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder


class _Convolution(torch.nn.Module):
    def __init__(self, product):
        super().__init__()
        self.linear, self.product = torch.nn.Linear(3, 2), product

    def forward(self, x, adjacency):
        return torch.relu(self.product(adjacency, self.linear(x)))


class _Held(_Convolution):
    def __init__(self, product, adjacency):
        super().__init__(product)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x):
        return super().forward(x, self.adjacency)


_PRODUCTS = {
    "spmm": torch.spmm,
    "mm": torch.mm,
    "sparse.mm": torch.sparse.mm,
    "matmul": torch.matmul,
    "operator": lambda a, x: a @ x,
    "addmm": lambda a, x: torch.addmm(x, a, x),
    "to_dense": lambda a, x: a.to_dense() @ x,
}
_LAYOUTS = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr}


def _made(name, layout, is_held):
    torch.manual_seed(seeded(0))
    dense = (torch.rand(4, 4) > 0.5) * torch.rand(4, 4)
    found = []
    for adjacency in (_LAYOUTS[layout](dense), dense):
        product = torch.mm if name == "sparse.mm" and adjacency is dense else _PRODUCTS[name]
        torch.manual_seed(seeded(1))
        model = _Held(product, adjacency) if is_held else _Convolution(product)
        found.append((model, () if is_held else (adjacency,)))
    return torch.randn(4, 3), *found


_HELD = {"coo": [False, True], "csr": [True, False]}  # a product is given one of the two


@pytest.mark.parametrize(
    ("name", "layout", "is_held"),
    [(name, layout, held) for layout in _LAYOUTS for name, held in crossed(_PRODUCTS, _HELD[layout])],
)
def test_values_gradients_and_norms(name, layout, is_held):
    x, (model, args), (dense, dense_args) = _made(name, layout, is_held)
    results = [thunder.jit(model, transforms=[NormTransform()])(x, *args), dense(x, *dense_args)]
    torch.testing.assert_close(*results)
    gradients = [
        torch.autograd.grad(r.square().sum(), list(m.parameters())) for r, m in zip(results, (model, dense), strict=True)
    ]
    torch.testing.assert_close(*gradients)
    norms = [
        thunder.jit(m, transforms=[NormTransform()])(RMSTensor.of(x), *a).norm_size
        for m, a in ((model, args), (dense, dense_args))
    ]
    torch.testing.assert_close(*norms)


def test_products_of_what_a_program_makes_sparse():
    def f(x):
        return torch.sparse.mm(x.to_sparse(), x).square().sum()

    torch.manual_seed(seeded(2))
    x = torch.randn(3, 3)
    found = [
        torch.autograd.grad(g(y := x.clone().requires_grad_()), y) for g in (f, thunder.jit(f, transforms=[NormTransform()]))
    ]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_norm_maps_and_modular_norms(layout):
    x, (model, _), (dense, _) = _made("spmm", layout, is_held=True)
    sizes = [[float(r.norm_size) for r in norm_report(build_norm_map(m, x), x).rows] for m in (model, dense)]
    assert sizes[0] == pytest.approx(sizes[1])
    targets = [ModularNorm(m, x).targets for m in (model, dense)]
    assert targets[0] == pytest.approx(targets[1])
    _, (given, args), _ = _made("spmm", layout, is_held=False)
    assert ModularNorm(given, x, *args).targets == pytest.approx(targets[1])  # a matrix that is given is as one that is held
