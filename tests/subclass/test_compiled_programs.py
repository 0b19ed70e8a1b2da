"""Programs on wrappers that `torch.compile(fullgraph=True)` runs: none is refused, and all are eager mode's.

`python -m tests.subclass.test_compiled_programs` says of each what torch.compile makes of it.  Those that write into inner tensors, or put a wrapper
into another, it answers otherwise than eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.seeds import seeded
from tests.subclass.compiled_programs import PROGRAMS, Program
from tests.subclasses import assert_same
from thunder_norm.transforms import SubclassTransform
import thunder


def _tensors(tree: Any) -> list[torch.Tensor]:
    found = []
    for v in tree_leaves(tree):
        found += [*v.parameters(), *v.buffers()] if isinstance(v, nn.Module) else [v] if isinstance(v, torch.Tensor) else []
    return found


def outcome(entry: Program, call: Callable) -> list[Any]:
    """What a call returns, what its arguments hold then, and gradients."""
    torch.manual_seed(seeded(0))
    args = entry.make()
    moving = [args[i].requires_grad_() for i in entry.moving]
    results = call(*args)
    histories = [(type(t).__name__, t.requires_grad, t.is_leaf) for t in _tensors(results)]
    gradients: Any = ()
    if moving:
        losses = [t * 1 for t in _tensors(results) if t.requires_grad]
        gradients = torch.autograd.grad(losses, moving, [torch.ones_like(t.detach()) for t in losses], allow_unused=True)
    keys = [list(a) for a in args if isinstance(a, dict)]
    shown = tree_map_only(torch.Tensor, lambda t: t.detach(), (results, gradients))
    return [*shown, histories, [t.detach() for t in _tensors(args)], keys]


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_gradients_and_what_is_written_are_eagers(name: str):
    entry = PROGRAMS[name]
    want, jitted = outcome(entry, entry.function), thunder.jit(entry.function, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(outcome(entry, jitted), want)
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)


def _of_torch_compile(entry: Program) -> str:
    torch._dynamo.reset()
    try:
        assert_same(
            outcome(entry, torch.compile(entry.function, fullgraph=True, backend="aot_eager")), outcome(entry, entry.function)
        )
    except AssertionError:
        return "another answer than eager mode's"
    except Exception as e:  # noqa: BLE001 - what becomes of it is what is asked
        return f"fails: {type(e).__name__}"
    return "yes"


if __name__ == "__main__":
    for _key, _entry in PROGRAMS.items():
        print(f"{_key}: {_of_torch_compile(_entry)}", flush=True)
