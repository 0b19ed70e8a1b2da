"""Memory budgets: kept by the profile's count and by the allocator's, for few FLOPs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests import measured
from tests.checkpointing.test_checkpoint import assert_same, gradients, rand
from tests.seeds import seeded
from thunder_norm.checkpointing.budget import _Segment, cheapest
from thunder_norm.errors import CheckpointError
from thunder_norm.transforms import CheckpointTransform, SubclassTransform, profile
import thunder


def stack(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for w in weights:
        x = x + F.gelu(x @ w).tanh() @ w.mT
    return x


def test_a_memory_budget_is_kept() -> None:
    x, weights = rand(64, 16), [rand(16, 32) / 4 for _ in range(3)]
    inputs = [x, *(w.requires_grad_() for w in weights)]
    plain = thunder.jit(stack, transforms=[SubclassTransform()])  # its operations, and nothing computed again
    before = profile(plain, *inputs, backward=True)
    budget = before.resident_bytes + (before.peak_bytes - before.resident_bytes) * 3 // 4
    transform = CheckpointTransform(memory_budget=budget)
    jf = thunder.jit(stack, transforms=[transform])
    assert_same(gradients(jf, *inputs), gradients(plain, *inputs))
    jf(*inputs)
    after, report = profile(jf, *inputs, backward=True), transform.report
    assert after.peak_bytes == report.peak_bytes <= budget < before.peak_bytes == report.plain_peak_bytes
    assert report.extra_flops == after.flops - before.flops and report.plain_flops == before.flops
    assert report.extra_flops < before.forward_flops  # no operation runs more than twice
    assert report.regions and all(str(first).startswith(__file__) for _, first, _ in report.regions)
    assert after.saved_bytes == report.saved_bytes < before.saved_bytes == report.plain_saved_bytes


def test_the_allocator_keeps_to_the_budget() -> None:
    x, weights = rand(64, 16), [rand(16, 32).requires_grad_() for _ in range(4)]
    before = profile(thunder.jit(stack), x, *weights, backward=True)
    budget = before.resident_bytes + (before.peak_bytes - before.resident_bytes) * 6 // 10
    transform = CheckpointTransform(memory_budget=budget)
    jf = thunder.jit(stack, transforms=[transform])

    def run() -> None:
        measured.backward(jf(x, *weights))

    run()
    for w in weights:
        w.grad = None
    own = measured.peak_bytes(run)
    assert own <= transform.report.peak_bytes - before.resident_bytes + 64 <= budget - before.resident_bytes + 64
    assert own > (before.peak_bytes - before.resident_bytes) // 3  # and it is the run that was measured


def test_parameters_are_parameters_under_any_name() -> None:
    """Thunder calls a tensor by the first variable of the program that it meets: a convolution's own code has "weight" for its."""

    class Convolution(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Conv1d(4, 4, 2)
            self.register_buffer("scale", torch.full((4, 1), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), torch.enable_grad():
                return (self.body(self.scale * x).tanh() * self.scale).square().sum()

    transform = CheckpointTransform(memory_budget=10**6)
    jm, x = thunder.jit(Convolution(), transforms=[transform]), rand(1, 4, 4).float()
    found = profile(jm, x, backward=True)
    assert (transform.report.saved_bytes, transform.report.peak_bytes) == (found.saved_bytes, found.peak_bytes)
    assert found.saved_parameter_bytes >= jm._model.body.weight.nbytes


def test_segments_that_mention_nothing_of_torch_but_dtypes() -> None:
    def widened(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = (x[:, None].to(torch.float32)[:, 0].double() @ w).tanh()
        return x

    x, w = rand(64, 16), rand(16, 16).requires_grad_()
    plain = thunder.jit(widened)
    before = profile(plain, x, w, backward=True)
    budget = before.resident_bytes + (before.peak_bytes - before.resident_bytes) * 9 // 10
    jf = thunder.jit(widened, transforms=[CheckpointTransform(memory_budget=budget)])
    assert_same(gradients(jf, x, w), gradients(plain, x, w))


def test_a_budget_that_is_enough_or_cannot_be_kept() -> None:
    x, w = rand(8, 4), rand(4, 4).requires_grad_()
    transform = CheckpointTransform(memory_budget=10**9)
    thunder.jit(stack, transforms=[transform])(x, w)
    assert not transform.report.regions and transform.report.extra_flops == 0
    with pytest.raises(CheckpointError, match="parameters, buffers and inputs"):
        thunder.jit(stack, transforms=[CheckpointTransform(memory_budget=400)])(x, w)


def test_the_cheapest_segments_by_all_choices() -> None:
    torch.manual_seed(seeded(0))
    for _ in range(20):
        items = [_Segment(i, i + 1, *torch.randint(1, 900, (2,)).tolist()) for i in range(8)]
        needed = int(torch.randint(1, sum(s.freed for s in items), ()))
        subsets = [[s for i, s in enumerate(items) if mask >> i & 1] for mask in range(256)]
        rounding = 9 * max(sum(s.freed for s in items) // 1000, 1)  # of eight items and the sum, to a thousandth of all
        best = [sum(s.flops for s in c) for c in subsets if sum(s.freed for s in c) >= needed + rounding]
        chosen = cheapest(items, needed)
        assert sum(s.freed for s in chosen) >= needed
        assert sum(s.flops for s in chosen) <= min(best, default=sum(s.flops for s in items))
