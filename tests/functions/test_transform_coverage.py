"""What the lists say of function transforms over torch's operator database still holds, for a sample of the operators."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.op_coverage import op_name, program
from tests.transform_coverage import Case, cases, listed
from tests.transform_trials import (
    BATCH,
    TRIALS,
    Trial,
    inputs,
    is_traced_right,
    one_by_one,
    samples_of,
    tensors_of,
    without_seeds,
)
from thunder_norm.transforms import vmap

OPS = {op_name(op): op for op in op_db}


def first_case(name: str) -> Case:
    return next(case for case in cases(OPS[name]) if is_traced_right(case))


def is_the_same_again(case: Case) -> bool:
    """Whether an operator draws no numbers: some have a first sample that does, and a second that does not."""
    with without_seeds():
        first, second = (tensors_of(program([case])(*inputs(case))) for _ in range(2))
    return all(torch.allclose(a, b, equal_nan=True) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard", range(4))
def test_many_operators_in_one_batched_program(shard: int):
    """Every eighth operator, a quarter of them at a time: one program is acquired faster than many."""
    several = [
        case for name in listed("vmap", "passed")[::8][shard::4] for case in cases(OPS[name])[:1] if is_the_same_again(case)
    ]
    function = program(several)
    args = tuple(samples_of(t, 0) for case in several for t in inputs(case))
    in_dims = (0,) * len(args)
    assert Trial(vmap(function, in_dims, randomness="different"), one_by_one(function, in_dims), args).check()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap_grad"])
def test_some_operators_one_by_one(transform: str):
    for name in listed(transform, "passed")[::60]:
        for trial in TRIALS[transform](first_case(name)):
            assert trial.check()


def test_a_batch_is_of_different_samples():
    batch = samples_of(torch.ones(2, 3), 1)
    assert batch.shape == (2, BATCH, 3)
    assert len(batch.unique()) == BATCH
