"""Results of a size that is a value: as in eager mode whatever the values are, and one trace for each size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from tests.op_coverage import compare
from tests.seeds import seeded
from tests.subclasses import ScaleTensor
from thunder_norm.errors import DataDependentError, UnsupportedOpError
from thunder_norm.subclass.sized import Sized
from thunder_norm.transforms import SubclassTransform
import thunder

aten = torch.ops.aten


def two(*values: float, dtype: torch.dtype = torch.float64) -> TwoTensor:
    """Both tensors select the same places, which the class asks for."""
    t = torch.tensor(values, dtype=dtype)
    return TwoTensor(t, t.clone())


def opened(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: (t.a, t.b) if type(t) is TwoTensor else t, tree)


def jit(f: Callable, **options: Any) -> Callable:
    return thunder.jit(f, transforms=[SubclassTransform(**options)])


PROGRAMS: dict[str, Callable] = {
    "nonzero": lambda x: x.nonzero(),
    "nonzero as_tuple": lambda x: x.nonzero(as_tuple=True),
    "argwhere": lambda x: torch.argwhere(x),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0) * 2,
    "mask": lambda x: x[x > 0].sin(),
    "mask of a mask": lambda x: (y := x[x > 0])[y > 2],
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "unique of a dimension": lambda x: torch.unique(x, dim=0),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long().abs()),
    "bincount": lambda x: torch.bincount(x.long().abs()),
    "size asked for": lambda x: x * x[x > 0].shape[0] if x[x > 0].shape[0] > 1 else -x,
    "after a write": lambda x: (y := x.clone()).mul_(-1)[y > 0],
    "for a view": lambda x: (y := x.clone())[y.view(-1).neg_() > 0],
}
SEVERAL = [two(1, 0, 3, 0), two(0, 2, 2, 5), two(3, 0, 0, -1), two(0, 0, 0, 0)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_sizes_are_eagers(name: str) -> None:
    f = PROGRAMS[name]
    jf = jit(f)
    for x in (*SEVERAL, *SEVERAL):
        compare(opened(jf(x)), opened(f(x)))
    assert thunder.cache_misses(jf) <= len(SEVERAL)


def test_one_trace_serves_other_values_of_one_size() -> None:
    jf = jit(lambda x: x[x > 0] * 2)
    for values in ((1, 0, 3), (0, 5, 7), (2, 2, -1)):
        x = two(*values)
        torch.testing.assert_close(jf(x).a, x.a[x.a > 0] * 2)
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 2)
    assert jf(two(1, 1, 1)).shape == (3,) and thunder.cache_misses(jf) == 2
