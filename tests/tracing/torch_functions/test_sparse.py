"""Sparse tensors in programs on plain tensors: what asks how one is stored is refused where it is not known, and never answered for a dense one."""

import pytest
import torch

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform
import thunder

DENSE = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
ASKING = {
    "sparse_dim": lambda s: s.sparse_dim(),
    "dense_dim": lambda s: (s * 2).dense_dim(),
    "is_sparse": lambda s: (s * 2).is_sparse,
    "layout": lambda s: (s + s).layout,
    "is_coalesced": lambda s: s.is_coalesced(),
    "coalesce": lambda s: s.coalesce().values(),
    "number": lambda s: s._nnz(),
    "sum": lambda s: torch.sparse.sum(s, 0).to_dense(),
    "rows": lambda s: (s @ s).to_sparse_csr().crow_indices(),
    "mask": lambda s: torch.ones(3, 3).sparse_mask(s).to_dense(),
}
MADE = {
    "given": (lambda f: f, DENSE.to_sparse()),
    "made": (lambda f: lambda x: f((x * 2).to_sparse()), DENSE),
    "given in rows": (lambda f: f, DENSE.to_sparse_csr()),
}


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("made", MADE)
def test_how_a_sparse_tensor_is_stored_is_refused(name, made):
    of, given = MADE[made]
    with pytest.raises(UnsupportedOpError, match=r"of a sparse tensor(.|\n)*test_sparse.py"):
        thunder.jit(of(ASKING[name]), transforms=[NormTransform()])(given)


def test_of_dense_tensors_it_is_known():
    def f(s, x):
        y = torch.sparse.mm(s, x)
        facts = y.is_sparse, str(y.layout), x.sparse_dim(), str(s.to_dense().layout), s.is_sparse, str(s.layout)
        return y * 2, facts

    given = DENSE.to_sparse(), torch.ones(3, 2)
    found, expected = thunder.jit(f, transforms=[NormTransform()])(*given), f(*given)
    assert found[1] == expected[1]
    torch.testing.assert_close(found[0], expected[0])
