"""On a CUDA device: torch's operators and models give what eager gives there, and norms are those of the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.models_zoo import MODELS, Built, built
from tests.models_zoo.case import TORCHVISION, WRITTEN, floating, tensors
from tests.models_zoo.columns import normed_outputs
from tests.seeds import seeded
from thunder_norm import executors, normed
from thunder_norm.errors import ThunderNormError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
PARTS = 16  # of the operators: a test takes one of them
LARGEST = 20_000  # entries of a sample

Transformed = Callable[[Callable], Callable]


def real(f: Callable) -> Callable:
    return thunder.jit(f, transforms=[NormTransform()])


def fused(f: Callable) -> Callable:
    return thunder.jit(f, transforms=[NormTransform()], executors=[executors.inductor])


def wrapped(f: Callable) -> Callable:
    """Every tensor of the arguments twice, in a TwoTensor, and the first of both of each result."""
    jitted = thunder.jit(f, transforms=[SubclassTransform()])

    def call(*args: Any, **kwargs: Any) -> Any:
        return tree_map(_first, jitted(*tree_map(_twice, args), **tree_map(_twice, kwargs)))

    return call


def _twice(v: Any) -> Any:
    return TwoTensor(v, v.clone()) if isinstance(v, torch.Tensor) else v


def _first(v: Any) -> Any:
    return v.a if isinstance(v, TwoTensor) else v


def _samples(op: Any, device: str) -> list[Any]:
    torch.manual_seed(seeded(0))
    dtype = torch.float32 if torch.float32 in op.supported_dtypes(device) else torch.int64
    found = []
    with torch.device(device):
        for sample in itertools.islice(op.sample_inputs(device, dtype), 4):
            given = [v for v in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(v, torch.Tensor)]
            if sum(v.numel() for v in given) <= LARGEST and all(v.layout is torch.strided for v in given):
                found.append(sample)
    return found


def _run(f: Callable, sample: Any) -> list[Any]:
    torch.manual_seed(seeded(1))
    with mock.patch.object(common_methods_invocations, "wrapper_set_seed", lambda f, *args, **kwargs: f(*args, **kwargs)):
        return tree_leaves(f(*tree_map(_copy, (sample.input, *sample.args)), **tree_map(_copy, sample.kwargs)))


def _copy(v: Any) -> Any:
    return v.detach().clone() if isinstance(v, torch.Tensor) else v


def _runs(f: Callable, sample: Any) -> list[Any] | None:
    """What eager gives, twice the same; None if it does not."""
    try:
        first, second = _run(f, sample), _run(f, sample)
        torch.testing.assert_close(first, second, equal_nan=True)
    except Exception:  # noqa: BLE001 - whatever goes wrong is eager's
        return None
    return first


def _differences(ops: Sequence[Any], transform: Transformed) -> dict[str, str]:
    """How transformed operators differ from eager, of those that do not on the CPU."""
    found = {}
    for op in ops:
        if op.name.startswith("jiterator"):  # torch's own compiler of strings, whose functions ask for tensors with data
            continue
        why = _difference(op, transform, DEVICE)
        if why is not None and _difference(op, transform, "cpu") is None:
            found[f"{op.name}.{op.variant_test_name}"] = why
    return found


def _difference(op: Any, transform: Transformed, device: str) -> str | None:
    """How a transformed operator differs from eager at one of its samples; our refusals are none."""
    for sample in _samples(op, device):
        expected = _runs(op.op, sample)
        if expected is None or "empty" in op.name:
            continue
        try:
            found = _run(transform(op.op), sample)
        except ThunderNormError:
            continue
        except Exception as e:  # noqa: BLE001 - an outcome
            return f"{type(e).__name__}: {e}".splitlines()[0]
        try:
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)
        except AssertionError as e:
            return str(e).replace("\n", " ")
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("transform", [real, wrapped])
def test_operators_are_those_of_eager(transform, part):
    assert _differences(op_db[part::PARTS], transform) == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_that_inductor_compiles_are_those_of_eager(part):
    """Two of them in a program, so that there is a region."""

    def tripled(v: Any) -> Any:
        return v * 1.5 * 2 if isinstance(v, torch.Tensor) and v.is_floating_point() else v

    def thirds(v: Any) -> Any:
        return v / 3 if isinstance(v, torch.Tensor) and v.is_floating_point() else v

    def transform(f: Callable) -> Callable:
        compiled = fused(lambda *args, **kwargs: tree_map(tripled, f(*args, **kwargs)))
        return lambda *args, **kwargs: tree_map(thirds, compiled(*args, **kwargs))

    assert _differences(op_db[part :: 8 * PARTS], transform) == {}


# -- models -------------------------------------------------------------------------------------------------------------


def _on_device(b: Built) -> Built:
    args, kwargs = tree_map(lambda v: v.to(DEVICE) if isinstance(v, torch.Tensor) else v, (b.args, b.kwargs))
    return Built(b.module.to(DEVICE), args, kwargs)


def _gradients(result: Any, module: torch.nn.Module) -> list[torch.Tensor | None]:
    loss = sum(t.float().square().mean() for t in floating(result) if t.requires_grad)
    parameters = [p for p in module.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, parameters, allow_unused=True)) if isinstance(loss, torch.Tensor) else []


def _assert_close(found: list, expected: list) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        if x is None or y is None:
            assert (x is None or not x.any()) and (y is None or not y.any())
            continue
        scale = max(1.0, y.double().abs().max().item() if y.numel() else 0.0)
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.source in (WRITTEN, TORCHVISION)])
def test_models_are_those_of_eager_and_their_norms_those_of_the_cpu(name):
    model = MODELS[name]
    try:
        b = _on_device(built(model))
        expected = b()
        gradients = _gradients(expected, b.module)
    except Exception as e:  # noqa: BLE001 - tensors made on the CPU, in the model
        pytest.skip(f"eager: {e}")
    for transform in (real, fused):
        found = b(transform(b.module))
        _assert_close(tensors(found), tensors(expected))
        _assert_close(_gradients(found, b.module), gradients)
    with torch.no_grad():
        on_cpu = built(model)
        sizes = [y.norm_size.item() for y in normed_outputs(on_cpu(normed(real(on_cpu.module))))]
        result = b(normed(real(b.module)))
    _assert_close(tensors(tree_map(lambda t: getattr(t, "backing", t), result)), tensors(expected))
    assert [y.norm_size.item() for y in normed_outputs(result)] == pytest.approx(sizes, rel=1e-2)
