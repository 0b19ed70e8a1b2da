"""``backward()`` of jitted programs, for the operators of torch's database: eager's gradients or an error, in silence neither none nor others.

Each run takes some of the operators, those of its seed.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.seeds import named_seed, seeded
from thunder_norm.transforms import SubclassTransform
import thunder

DRAW = {"nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout", "svd_lowrank", "pca_lowrank"}  # in another order
OPS = [op for op in op_db if op.supports_dtype(torch.float64, "cpu") and op.supports_autograd and op.name not in DRAW]
CHOSEN = random.Random(named_seed("jitted op_db")).sample(OPS, len(OPS) // 24)


def programs(op: Any) -> Iterator[tuple[Callable, list[torch.Tensor]]]:
    """An operator as a function of its tensors, wherever they are among its arguments."""
    samples = list(itertools.islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), 40))
    random.Random(named_seed(op.formatted_name)).shuffle(samples)
    for sample in samples[:3]:
        leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        places = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]

        def program(*tensors: torch.Tensor, leaves=leaves, spec=spec, places=places) -> tuple[torch.Tensor, ...]:
            given = list(leaves)
            for i, t in zip(places, tensors, strict=True):
                given[i] = t
            args, kwargs = tree_unflatten(given, spec)
            return tuple(v for v in tree_leaves(op.op(*args, **kwargs)) if isinstance(v, torch.Tensor))

        yield program, [leaves[i] for i in places]


def gradients(program: Callable, tensors: list[torch.Tensor]) -> tuple | None:
    """The gradients of all results together; None if there are none."""
    own = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    torch.manual_seed(seeded(0))
    results = [y for y in program(*own) if y.requires_grad]
    if not results:
        return None
    loss = sum((y.abs() if y.is_complex() else y).sin().sum() for y in results)
    wanted = [t for t in own if t.requires_grad]
    return torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("op", CHOSEN, ids=lambda op: op.formatted_name)
def test_gradients_of_a_jitted_operator_are_eagers(op: Any):
    warnings.simplefilter("ignore")
    for program, tensors in programs(op):
        try:
            expected = gradients(program, tensors)
        except Exception:  # noqa: BLE001, S112 - what eager has no gradient of
            continue
        if expected is None:
            continue
        try:
            found = gradients(thunder.jit(program, transforms=[SubclassTransform()]), tensors)
        except Exception:  # noqa: BLE001, S112 - said: Thunder does not know the operation, or not with these arguments
            continue
        if found is None:  # rounding: nothing moves
            assert not any(g.any() for g in expected)
        else:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8, equal_nan=True)


@pytest.mark.parametrize("op", CHOSEN, ids=lambda op: op.formatted_name)
def test_gradients_are_numbers_where_eagers_are(op: Any):
    """At entries so large that exponentials overflow, and at zeros: rounding may be all there is of a value, but not NaN."""
    warnings.simplefilter("ignore")
    for program, tensors in programs(op):
        for change in (lambda t: t * 1e3, torch.zeros_like):
            given = [change(t.detach()).requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in tensors]
            try:
                expected = gradients(program, given)
                found = expected and gradients(thunder.jit(program, transforms=[SubclassTransform()]), given)
            except Exception:  # noqa: BLE001, S112 - what eager has no gradient of, or what is said
                continue
            for g, e in zip(found or (), expected or (), strict=True):
                assert not (g.isfinite() != e.isfinite())[e.isfinite()].any(), (op.name, change)
