"""Torch's operators on jagged nested tensors, as torch's own database of samples for them has them: with holes, permuted, broadcast."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain, islice

import pytest
import torch
from torch.nested._internal.nested_tensor import NestedTensor
from torch.testing._internal.opinfo.definitions.nested import njt_op_db
from torch.utils._pytree import tree_flatten, tree_leaves

from tests.op_coverage import Case, op_name, program, run
from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.transforms import SubclassTransform
import thunder

SHARDS = 36
OPERATORS = [op for op in njt_op_db if op.supports_njt and "empty" not in op.name]


@dataclass(frozen=True, eq=False)
class Jagged(Case):
    """A sample whose tensors, those of plain numbers too, may require grad."""

    requires_grad: bool = True

    def tensors(self) -> list[torch.Tensor]:
        """The sample's tensors on copies of their values, with the very offsets, so that they go together as before."""
        found = [_copied(v) for v in self.leaves if isinstance(v, torch.Tensor)]
        return [t.requires_grad_(self.requires_grad and (t.is_floating_point() or t.is_complex())) for t in found]


def _copied(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    if not isinstance(t, NestedTensor):
        return t.clone()
    names, context = t.__tensor_flatten__()
    inner = {name: getattr(t, name) for name in names} | {"_values": t._values.clone(memory_format=torch.preserve_format)}
    return NestedTensor.__tensor_unflatten__(inner, context, t.shape, t.stride())


def outcome(function, several: list[Jagged]) -> tuple:
    """What the operators return, and the gradients of all of it."""
    results, tensors = run(function, several)
    outputs = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor) and t.requires_grad]
    inputs = [t for t in tensors if t.requires_grad]
    if not outputs:
        return results, ()
    return results, torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs], allow_unused=True)


def runs_in_eager(case: Jagged) -> bool:
    """Whether eager mode runs the operator on the sample, returns a tensor, and does the same twice."""
    try:
        first, second = (outcome(program([case]), [case]) for _ in range(2))
        assert_same(first, second)
    except Exception:  # noqa: BLE001 - whatever goes wrong is eager's
        return False
    return any(isinstance(v, torch.Tensor) for v in tree_leaves(first[0]))


def drawn_sample(op) -> list[Jagged]:
    """A sample of an operator that eager mode runs, with gradients if it has them; none if it runs none."""
    torch.manual_seed(seeded(0))
    drawn = list(op.sample_inputs("cpu", torch.float32))
    random.Random(f"{op_name(op)} {seeded(0)}").shuffle(drawn)

    def case(sample, requires_grad: bool) -> Jagged:
        leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        return Jagged(op_name(op), op.op, tuple(leaves), spec, requires_grad)

    has_gradient = op.supports_autograd and op.name != "split_with_sizes"  # the process ends in eager mode's backward
    both = ([case(s, True), case(s, False)] if has_gradient else [case(s, False)] for s in drawn)
    return list(islice(filter(runs_in_eager, chain.from_iterable(both)), 1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_operators_and_their_gradients_are_eager_s(shard: int):
    several = [case for op in OPERATORS[shard::SHARDS] for case in drawn_sample(op)]
    assert len(several) > len(OPERATORS[shard::SHARDS]) // 3  # eager mode runs that many in each
    try:
        assert_same(outcome(jit(several), several), outcome(program(several), several))
    except Exception:  # noqa: BLE001 - one by one, to say which
        for case in several:
            assert_same(outcome(jit([case]), [case]), outcome(program([case]), [case]))
        raise


def jit(several: list[Jagged]):
    return thunder.jit(program(several), transforms=[SubclassTransform()])
