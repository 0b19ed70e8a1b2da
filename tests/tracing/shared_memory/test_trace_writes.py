"""What an operation of a trace writes into is what torch's version counters say it does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.seeds import seeded
from thunder_norm.tracing.shared_memory.writes import targets
from thunder_norm.transforms import SubclassTransform
import thunder

_WRITES: dict[str, Callable] = {
    "method": lambda x, y: x.mul_(y),
    "operator": lambda x, y: x.__iadd__(y),
    "copy_": lambda x, y: y.copy_(x),
    "item": lambda x, y: x.__setitem__(0, y[1]),
    "mask": lambda x, y: x.__setitem__(y > 0, 0.0),
    "view": lambda x, y: y[1:].neg_(),
    "function": lambda x, y: torch.nn.functional.relu(y, inplace=True),
    "both": lambda x, y: (x.zero_(), y.clamp_(min=0.0)),
    "beside an array": lambda x, y: x.mul_(torch.as_tensor(np.full(3, 2.0, np.float32))),
    "fill": lambda x, y: y.diagonal().fill_(1.0),
    "index": lambda x, y: x.index_add_(0, torch.tensor([0, 2]), y[:2]),
    "out of place": lambda x, y: x.mul(y).relu() + y.index_add(0, torch.tensor([0, 2]), x[:2]),
    "selected": lambda x, y: torch.where(x > 0, x, y).masked_fill(y > 0, 1.0),
}


@pytest.mark.parametrize("name", _WRITES)
def test_targets_are_the_tensors_whose_versions_change(name: str):
    torch.manual_seed(seeded(0))
    given = torch.randn(3, 3), torch.randn(3, 3)
    mine = tuple(t.clone() for t in given)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        _WRITES[name](x, y)
        return x + y

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    jf(*mine)
    versions = [t._version for t in given]
    f(*given)
    written = [t._version != version for t, version in zip(given, versions, strict=True)]

    trace = thunder.last_traces(jf)[0]
    inputs = [p.name for p in trace.args]
    found = {t.name for bsym in trace.bound_symbols for t in targets(bsym)}
    views = {o.name: b.flat_proxy_args[0].name for b in trace.bound_symbols for o in b.flat_proxy_outs if b.flat_proxy_args}
    roots = set()
    for target in found:
        while target not in inputs:
            target = views[target]
        roots.add(target)
    assert [p in roots for p in inputs] == written
