"""Every operation that has a rule, on torch's own sample inputs: real values are torch's, and within the claimed norm."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from thunder_norm import NormedTensor, RMSTensor
from thunder_norm.audit import norm
from thunder_norm.core.registry import registered_ops
from thunder_norm.errors import MissingNormRuleError, NormMismatchError, UnsupportedOpError
from thunder_norm.op_names import op_key

RANDOM = ("rand", "dropout", "empty", "bernoulli", "rrelu")
SAMPLES = 6


def has_rule(op) -> bool:
    if op.name.startswith("sparse"):
        return False
    return op.supports_dtype(torch.float64, "cpu") and (
        op.name.split(".")[-1] in registered_ops() or op_key(op.op) in registered_ops()
    )


OPS = [op for op in op_db if has_rule(op)]


def lifted(tree, dims):
    def lift(v):
        is_real = isinstance(v, torch.Tensor) and v.is_floating_point()
        return RMSTensor.of(v, dims if v.ndim else ()) if is_real else v

    return tree_map(lift, tree)


def test_there_are_many():
    assert len(OPS) > 180


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.name}.{op.variant_test_name}".strip("."))
def test_values_are_torchs_and_within_the_claim(op):
    samples = [s for s, _ in zip(op.sample_inputs("cpu", torch.float64), range(SAMPLES), strict=False)]
    for sample in samples:
        if "norm" in op.name and any(isinstance(v, torch.Tensor) and v.numel() == 0 for v in tree_leaves(sample.input)):
            continue  # a normalization of no channels has no largest scale
        for dims in ((-1,), (0,)):
            normed = lifted(sample.input, dims)
            if not any(isinstance(v, NormedTensor) for v in tree_leaves(normed)):
                continue
            try:
                out = op.op(normed, *sample.args, **sample.kwargs)
            except (MissingNormRuleError, NormMismatchError, UnsupportedOpError):
                continue
            compare(op, out, op.op(sample.input, *sample.args, **sample.kwargs))


def compare(op, out, expected):
    assert len(tree_leaves(out)) == len(tree_leaves(expected))
    for actual, real in zip(tree_leaves(out), tree_leaves(expected), strict=True):
        if not isinstance(actual, NormedTensor):
            continue
        if not any(name in op.name for name in RANDOM):
            torch.testing.assert_close(actual.backing, real, rtol=0, atol=0, equal_nan=True)
        if actual.numel() and torch.isfinite(actual.backing).all():
            size = norm(type(actual), actual.backing.double(), actual.elem_dims)
            assert size <= actual.norm_size * (1 + 1e-6) + 1e-12, (actual, size)
