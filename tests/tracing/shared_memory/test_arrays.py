"""Tensors in the memory of NumPy's arrays: what NumPy changes between calls is read, and what the program writes arrives."""

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import SubclassTransform, grad
import thunder

_ANEW = "ignore:.*acquired anew"


class _Module(torch.nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.a, self.tables = a, {"b": [b]}

    def forward(self, x, c):
        return x * torch.from_numpy(self.a) + torch.as_tensor(self.tables["b"][0]).sum()


def _written(make, change):
    def f(x, c):
        t = make(c)
        change(t)
        return x * t

    return lambda a, b: f


def _row(a, b):
    def f(x, c):
        torch.from_numpy(b)[1].mul_(2)
        return x * torch.from_numpy(b).sum() + torch.from_numpy(c)

    return f


def _second(a, b):
    def f(x, c):
        t, u = torch.from_numpy(c), torch.as_tensor(c)
        t.add_(1)
        return x * u

    return f


_ONE_TRACE = {
    "read": lambda a, b: lambda x, c: x * torch.from_numpy(c),
    "from_numpy": _written(torch.from_numpy, lambda t: t.add_(1)),
    "from_dlpack": _written(torch.from_dlpack, lambda t: t.mul_(2)),
    "as_tensor": _written(torch.as_tensor, lambda t: t.add_(1)),
    "by name": _written(lambda c: torch.as_tensor(data=c), lambda t: t.add_(1)),
    "asarray": _written(torch.asarray, lambda t: t[1:3].fill_(7)),
    "another dtype": _written(lambda c: torch.as_tensor(c, dtype=torch.float32), lambda t: t.add_(1)),
    "a copy": _written(lambda c: torch.asarray(c, copy=True), lambda t: t.add_(1)),
    "tensor": _written(torch.tensor, lambda t: t.add_(1)),
    "tensor of another dtype": _written(lambda c: torch.tensor(c, dtype=torch.float32), lambda t: t.add_(1)),
    "a slice assigned": _written(torch.from_numpy, lambda t: t.__setitem__(slice(1, 3), 5.0)),
    "a part": _row,
    "two tensors": _second,
    "returned": lambda a, b: lambda x, c: (x * 1, torch.from_numpy(c).mul_(3)),
    "its shape asked for": lambda a, b: lambda x, c: x * torch.from_numpy(c) * c.shape[0] * len(x),
    "under grad": lambda a, b: lambda x, c: grad(lambda y: (y * torch.from_numpy(c)).sum())(x) * x,
}
_ANEW_EACH_CALL = {
    "NumPy reads it": lambda a, b: lambda x, c: x * torch.from_numpy(c) * float(c.sum()),
    "a condition": lambda a, b: lambda x, c: x * torch.from_numpy(c) if c[0] > 2 else x + torch.from_numpy(c),
    "printed": lambda a, b: lambda x, c: x * torch.from_numpy(c) * len(f"{c} {c[0]}"),
    "a part of an array": lambda a, b: lambda x, c: x[1:] * torch.from_numpy(c[1:]),
    "NumPy changes it before": lambda a, b: lambda x, c: x * torch.from_numpy(np.add(c, 1, out=c)),
    "of a module": _Module,
    "made inside": lambda a, b: (
        lambda x, c: torch.from_numpy(np.triu(np.ones((4, 4)), 1)).masked_fill_(x > 1, 5.0) @ x * torch.from_numpy(c)
    ),
}


def _calls(make, jit):
    a = np.arange(4.0)
    f = make(a, np.ones((2, 4), dtype="float32"))
    f = jit(f)
    found = []
    for i in range(3):
        x = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
        result = f(x, a)
        found.append(tree_map(lambda t: (t.dtype, t.tolist()), result))
        (result[0] if isinstance(result, tuple) else result).sum().backward()
        found += [a.tolist(), x.grad.tolist()]
        a[i] += 3
    return f, found


@pytest.mark.filterwarnings(_ANEW)
@pytest.mark.parametrize("name", [*_ONE_TRACE, *_ANEW_EACH_CALL])
def test_arrays_are_read_and_written_in_each_call(name):
    make = (_ONE_TRACE | _ANEW_EACH_CALL)[name]
    jitted, found = _calls(make, lambda f: thunder.jit(f, transforms=[SubclassTransform()]))
    assert found == _calls(make, lambda f: f)[1]
    assert name not in _ONE_TRACE or thunder.cache_misses(jitted) == 1


def test_large_arrays_are_inputs():
    array = np.arange(10000.0)
    jitted = thunder.jit(lambda x: x + torch.tensor(array) + torch.from_numpy(array), transforms=[SubclassTransform()])
    for _ in range(2):
        assert torch.equal(jitted(torch.ones(1)), 1 + 2 * torch.from_numpy(array))
        array[5000] = -1
    with pytest.raises(RuntimeError, match="size"):
        jitted(torch.ones(3))


def _numpy_looks_after(x, c):
    torch.from_numpy(c).mul_(2)
    return x * float(c.sum())


def _numpy_writes_after(x, c):
    t = torch.from_numpy(c) * 1
    c[0] = 5
    return x * t


def _made_inside_and_used(x, c):
    made = np.zeros(4)
    torch.from_numpy(made).add_(x)
    return x * torch.from_numpy(made * 2)


def _made_inside_and_changed(x, c):
    made = np.zeros(4)
    t = torch.from_numpy(made)
    made[0] = 5
    return x * t


def _part_written(x, c):
    torch.from_numpy(c[1:]).add_(1)
    return x * torch.from_numpy(c)


def _part_of_written(x, c):
    part, whole = torch.from_numpy(c[1:]), torch.from_numpy(c)
    whole.add_(1)
    return x[1:] * part


def _two_of_one_made(x, c):
    made = np.zeros(4)
    t, u = torch.from_numpy(made), torch.from_numpy(made)
    t.add_(1)
    return x * u


@pytest.mark.filterwarnings(_ANEW)
@pytest.mark.parametrize(
    "f",
    [
        _numpy_looks_after,
        _numpy_writes_after,
        _made_inside_and_used,
        _made_inside_and_changed,
        _part_written,
        _part_of_written,
        _two_of_one_made,
    ],
)
def test_what_numpy_would_have_to_see_is_refused(f):
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    with pytest.raises(UnsupportedOpError, match=r"(?s)array.*test_arrays\.py"):
        jitted(torch.ones(4, dtype=torch.float64), np.arange(4.0))
