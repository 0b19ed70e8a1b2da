"""Every core ATen operation can be called from a ``__torch_dispatch__``, and means in the trace what it means in eager."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.op_coverage import Case, check, program, runs_in_eager
from tests.seeds import seeded
from tests.subclass.aten_calls import calls, core_overloads, edge_calls
from tests.subclasses import OpCounter
from thunder_norm.transforms import SubclassTransform
import thunder

pytestmark = pytest.mark.filterwarnings("ignore")

SHARDS = 10

# Without a tensor among the arguments, they reach a class only inside its own code (see `test_factories_inside_dispatch`).
FACTORIES = (
    "arange.start_step empty.memory_format empty_strided.default full.default rand.default randn.default randperm.default "
    "scalar_tensor.default"
).split()

# What they return is not known while the trace is acquired, or is a number that needs no operation.
NOT_TRACEABLE = ("_local_scalar_dense.default",)
NUMBERS = "sym_is_contiguous.default sym_numel.default sym_size.int sym_storage_offset.default sym_stride.int".split()


@functools.cache
def cases() -> tuple[Case, ...]:
    found = [case for several in calls().values() for case in several] + edge_calls()
    left_out = {f"aten.{name}" for name in NOT_TRACEABLE}
    return tuple(case for case in found if case.name not in left_out and runs_in_eager(case))


def test_every_core_operation_is_called():
    names = {case.name for case in cases()}
    expected = {str(f) for f in core_overloads()} - {f"aten.{name}" for name in (*FACTORIES, *NOT_TRACEABLE, *NUMBERS)}
    assert expected <= names and len(expected) > 170


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_core_operations_give_eagers_numbers(shard: int, grad: bool):
    several = list(cases()[shard::SHARDS])
    with torch.set_grad_enabled(grad):
        try:
            check(several)
        except Exception:
            for case in several:  # one by one, to say which
                check([case])
            raise


def gradients(several: list[Case]) -> tuple[list, list]:
    """Eager's gradients and ours, of the same outputs with the same cotangents."""
    found = []
    is_output: list[bool] = []
    for is_traced in (False, True):
        leaves = [t.a for case in several for t in case.tensors()]
        leaves = [t.requires_grad_(t.is_floating_point()) for t in leaves]
        function = program(several)
        torch.manual_seed(seeded(1))
        if is_traced:
            results = thunder.jit(function, transforms=[SubclassTransform()])(*(OpCounter(t) for t in leaves))
            results = [r.value if isinstance(r, OpCounter) else r for r in tree_leaves(results)]
        else:
            results = tree_leaves(function(*leaves))
            is_output = [isinstance(r, torch.Tensor) and r.requires_grad for r in results]
        outputs = [r for r, wanted in zip(results, is_output, strict=True) if wanted]
        torch.manual_seed(seeded(2))
        cotangents = [torch.randn_like(r) for r in outputs]
        inputs = [t for t in leaves if t.requires_grad]
        found.append(torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True))
    return found[0], found[1]


def is_differentiable(case: Case) -> bool:
    leaves = [t.a.requires_grad_(t.a.is_floating_point()) for t in case.tensors()]
    if any(t.dtype is torch.bfloat16 for t in leaves):  # intermediate results are rounded elsewhere
        return False
    try:
        outputs = [r for r in tree_leaves(program([case])(*leaves)) if isinstance(r, torch.Tensor) and r.requires_grad]
        torch.autograd.grad(outputs, [t for t in leaves if t.requires_grad], outputs, allow_unused=True)
    except Exception:  # noqa: BLE001 - torch has no derivative
        return False
    return bool(outputs)


@functools.cache
def differentiable() -> tuple[Case, ...]:
    found: dict[str, list[Case]] = {}
    for case in reversed(cases()):  # edge cases first
        known = found.setdefault(case.name, [])
        if len(known) < 3 and is_differentiable(case):
            known.append(case)
    return tuple(case for several in found.values() for case in several)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_core_operations_have_torchs_gradients(shard: int):
    several = list(differentiable()[shard::SHARDS])
    try:
        compare_gradients(several)
    except Exception:
        for case in several:
            compare_gradients([case])
        raise


def compare_gradients(several: list[Case]) -> None:
    expected, found = gradients(several)
    names = [case.name for case in several]
    assert len(found) == len(expected) > 0
    for got, want in zip(found, expected, strict=True):
        if got is None or want is None:  # one of them knows that it is zero
            assert not any(g.any() for g in (got, want) if g is not None), names
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m: f"{names}: {m}")


class MakesTensors(OpCounter):
    """Makes plain tensors inside its ``__torch_dispatch__``."""

    @staticmethod
    def __tensor_unflatten__(inner, ctx, outer_size, outer_stride):
        return MakesTensors(inner["value"], ctx)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        x = args[0].value
        made = torch.arange(0, 4, 1.0) + torch.full((4,), 2.0) + torch.randperm(4) + torch.rand(4) * torch.randn(4)
        strided = torch.empty_strided((4,), (1,)).fill_(1.0) + torch.empty(4).zero_() + torch.scalar_tensor(3.0)
        return MakesTensors(func(x, *args[1:], **(kwargs or {})) + made * strided * x.numel() * x.stride(0) * x.size(0))


def test_factories_inside_dispatch():
    x = MakesTensors(torch.randn(4))
    jf = thunder.jit(lambda x: x.sin(), transforms=[SubclassTransform()])
    for seed in range(2):
        torch.manual_seed(seeded(seed))
        expected = x.sin()
        torch.manual_seed(seeded(seed))
        torch.testing.assert_close(jf(x).value, expected.value)


def test_values_of_what_a_wrapper_holds_are_eagers():
    jf = thunder.jit(lambda x: x.item(), transforms=[SubclassTransform()])
    for value in (1.0, 2.5, 1.0):
        x = OpCounter(torch.full((1,), value))
        assert jf(x) == x.item() == value
