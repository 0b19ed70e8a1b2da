"""Calls of core ATen operations: those that torch's operator database makes, and edge cases it lacks."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.op_coverage import LARGEST, Case
from tests.seeds import seeded

SAMPLES = 6
PER_OVERLOAD = 5


@functools.cache
def core_overloads() -> tuple[torch._ops.OpOverload, ...]:
    """Torch's core opset, without the variants that write into a given tensor."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, qualified = name.partition("::")
        packet, _, overload = qualified.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default", None) if namespace == "aten" else None
        if func is not None and torch.Tag.core in func.tags and not func._schema.is_mutable:
            found[str(func)] = func
    return tuple(found.values())


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[torch._ops.OpOverload, dict[Any, Case]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
        if torch.Tag.core in func.tags and not func._schema.is_mutable and tensors and sum(t.numel() for t in tensors) <= LARGEST:
            # of calls that differ in sizes only, one is enough
            key = (*((v.dtype, v.ndim, v.numel() == 0) if isinstance(v, torch.Tensor) else str(v) for v in leaves), str(spec))
            known = self.found.setdefault(func, {})
            if key not in known and len(known) < 50:
                copies = tuple(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in leaves)
                known[key] = Case(str(func), func, copies, spec)
        return func(*args, **(kwargs or {}))


@functools.cache
def calls() -> dict[torch._ops.OpOverload, list[Case]]:
    """For each core overload, calls that the operator database makes with float32 and int64 samples, evenly chosen."""
    mode = _Calls()
    for op, dtype in itertools.product(op_db, (torch.float32, torch.int64)):
        if not op.supports_dtype(dtype, "cpu") or op.name.startswith("sparse"):
            continue
        torch.default_generator.manual_seed(seeded(0))  # torch.manual_seed is slow under pytest: it looks at the stack
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in itertools.islice(op.sample_inputs("cpu", dtype, set_seed=False), SAMPLES):
                try:
                    with mode:
                        op.op(sample.input, *sample.args, **sample.kwargs)
                except Exception:  # noqa: BLE001 - not every sample runs under a mode
                    continue
    return {func: _spread(list(found.values())) for func, found in mode.found.items()}


def _spread(several: list[Case]) -> list[Case]:
    step = max(1, len(several) / PER_OVERLOAD)
    return [several[int(i * step)] for i in range(min(PER_OVERLOAD, len(several)))]


def _f(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _i(*shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape)


aten = torch.ops.aten

Call = tuple[Any, ...]


def _edge_calls() -> list[Call]:
    """Overloads the database does not reach, and calls where a mapping by name could go wrong."""
    weight, image = _f(4, 2, 3, 3), _f(1, 2, 5, 5)
    return [*_not_in_the_database(weight, image), *_of_several_dtypes(), *_of_dims_and_indices(), *_with_options(weight, image)]


def _not_in_the_database(weight: torch.Tensor, image: torch.Tensor) -> list[Call]:
    mean, rstd = _f(2, 1), _f(2, 1).abs()
    return [
        (aten._adaptive_avg_pool2d_backward.default, _f(1, 2, 2, 2), image),
        (aten._embedding_bag.default, _f(5, 3), torch.tensor([0, 1, 4]), torch.tensor([0, 2])),
        (aten._native_batch_norm_legit.no_stats, image, _f(2), _f(2), True, 0.1, 1e-5),
        (aten._native_batch_norm_legit_no_training.default, image, _f(2), _f(2), _f(2), _f(2).abs(), 0.1, 1e-5),
        (aten.avg_pool2d_backward.default, _f(1, 2, 2, 2), image, [2, 2], [2, 2], [0, 0], False, True, None),
        *((f, _i(3), 3) for f in (aten.bitwise_and.Scalar, aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar)),
        (aten.col2im.default, _f(1, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
        (
            aten.convolution_backward.default,
            *(_f(1, 4, 3, 3), image, weight, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]),
        ),
        (aten.copy.default, _f(3, 4), _i(4)),
        (aten.div.Scalar_mode, _f(5), 2, {"rounding_mode": "floor"}),
        (aten.div.Scalar_mode, _i(5), -2, {"rounding_mode": "trunc"}),
        (aten.embedding_dense_backward.default, _f(3, 4), torch.tensor([0, 2, 2]), 5, 2, False),
        (aten.fmod.Scalar, _f(5), -0.7),
        (aten.gt.Scalar, _i(5), 0.5),
        (aten.native_dropout.default, _f(3, 4), 0.5, True),
        (aten.native_group_norm_backward.default, image, image, _f(1, 2), _f(1, 2).abs(), _f(2), 1, 2, 25, 2, [True, True, True]),
        (aten.native_layer_norm_backward.default, _f(2, 3), _f(2, 3), [3], mean, rstd, _f(3), _f(3), [True, True, True]),
        (aten.native_layer_norm_backward.default, _f(2, 3), _f(2, 3), [3], mean, rstd, None, None, [True, False, False]),
        (aten.pow.Scalar, 2, _f(4)),
        (aten.pow.Scalar, 2, _i(4).abs()),
        (aten.reflection_pad2d.default, image, [1, 2, 0, 1]),
        (aten.reflection_pad3d.default, _f(1, 2, 3, 3, 3), [1, 2, 0, 1, 1, 1]),
        (aten.replication_pad3d.default, _f(1, 2, 3, 3, 3), [1, 2, 0, 1, 1, 1]),
        (aten.scatter.value, _f(3, 4), 1, torch.tensor([[0], [1], [3]]), 2.0),
        (aten.upsample_bilinear2d.vec, image, [7, 7], False, None),
        (aten.upsample_nearest2d.vec, image, None, [2.0, 2.0]),
        (aten.adaptive_avg_pool1d.default, _f(1, 2, 8), [3]),
        (aten.avg_pool1d.default, _f(1, 2, 8), [3], [2], [1]),
        (aten.var.dim, _f(3, 4), [-1], True),
        (aten.var.correction, _f(3, 4), None, {"correction": 0, "keepdim": True}),
    ]


def _of_several_dtypes() -> list[Call]:
    """Dtype promotion."""
    return [
        (aten.add.Tensor, _i(3), _f(3)),
        (aten.add.Tensor, _i(3), 2.5),
        (aten.add.Tensor, _f(3).bfloat16(), _f()),
        (aten.add.Tensor, _i(3) > 0, _i(3) > 0),
        (aten.add.Tensor, _i(3), _i(3), {"alpha": 3}),
        (aten.sub.Tensor, _f(3), _i(1), {"alpha": 2}),
        (aten.rsub.Scalar, _i(3), 2.5, 2),
        (aten.rsub.Scalar, _f(3), 1),
        (aten.rsub.Tensor, _f(3), _i(3), {"alpha": 2}),
        (aten.mul.Scalar, _i(3), 1.5),
        (aten.mul.Tensor, _i(3) > 0, 2),
        (aten.div.Tensor, _i(3), 2),
        (aten.div.Tensor_mode, _i(5), 3, {"rounding_mode": "floor"}),
        (aten.div.Tensor_mode, _i(5), 3, {"rounding_mode": None}),
        (aten.pow.Tensor_Scalar, _i(3), 2),
        (aten.pow.Tensor_Scalar, _f(3).abs(), 0.5),
        (aten.remainder.Tensor, _i(5), torch.tensor(3)),
        (aten.remainder.Scalar, _f(5), -1.5),
        (aten.fmod.Tensor, _f(5), _f(5)),
        (aten.exp.default, _i(3)),
        (aten.sigmoid.default, _i(3)),
        (aten.where.self, _f(3) > 0, _i(3), _f(3)),
        (aten.clamp.default, _i(5), -1.5, None),
        (aten.clamp.default, _f(5), 1, -1),
        (aten.clamp.default, torch.tensor([-1.0, 0.0, 1.0, torch.nan]), -1, 1),
        (aten.clamp.default, _f(5), None, torch.nan),
        (aten.clamp.default, _f(5).double(), -0.1, 0.1),
        (aten.clamp.default, _f(5).bfloat16(), -0.1, 0.1),
        (aten.clamp.Tensor, _f(5), _f(5), _f(5)),
        (aten.minimum.default, _f(3), _i(3)),
        (aten.minimum.default, _f(3), _f(3) > 0),
        (aten.minimum.default, torch.tensor([0, 1, 200], dtype=torch.uint8), _f(3)),
        (aten.bitwise_not.default, _f(3) > 0),
        (aten.eq.Scalar, _i(3), 0.0),
        (aten.sum.dim_IntList, _i(3, 4) > 0, [0]),
        (aten.sum.dim_IntList, _i(3, 4), [-1], True, {"dtype": torch.float64}),
        (aten.mean.dim, _i(3, 4), [-1], False, {"dtype": torch.float32}),
        (aten.prod.dim_int, _i(3, 4), -1),
        (aten.cumsum.default, _i(3, 4) > 0, -1),
        (aten.argmax.default, _i(3, 4), None, True),
        (aten.argmax.default, torch.tensor([[1.0, 1.0], [torch.nan, 2.0]]), -1),
        (aten._to_copy.default, _f(3), {"dtype": torch.int32}),
    ]


def _of_dims_and_indices() -> list[Call]:
    """Negative and empty dims, nothing to do, nothing there."""
    return [
        (aten.sum.dim_IntList, _f(3, 4), []),
        (aten.sum.dim_IntList, _f(3, 4), None),
        (aten.mean.dim, _f(3, 4), []),
        (aten.amax.default, _f(3, 4), [-2, -1]),
        (aten.amin.default, _f(3, 4)),
        (aten.any.dim, _i(3, 4), -1),
        (aten.any.default, _f(0)),
        (aten.sum.default, _f(0)),
        (aten.max.dim, _f(3, 4), -2, True),
        (aten.cat.default, [_f(2, 3), _f(2, 1)], -1),
        (aten.cat.default, [_f(0), _f(2, 3)], 0),
        (aten.cat.default, [_i(2), _f(3)]),
        (aten.squeeze.dims, _f(1, 3, 1), [-1, 1]),
        (aten.squeeze.dim, _f(3, 1), 0),
        (aten.unsqueeze.default, _f(3), -1),
        (aten.select.int, _f(3, 4), -1, -2),
        (aten.slice.Tensor, _f(5, 2), 0, -3, 9223372036854775807),
        (aten.slice.Tensor, _f(5, 2), -1, 4, 2),
        (aten.slice.Tensor, _f(5), 0, 1, -1, 2),
        (aten.permute.default, _f(2, 3, 4), [-1, 0, 1]),
        (aten.permute.default, _f(), []),
        (aten.expand.default, _f(3, 1), [2, -1, 4]),
        (aten.repeat.default, _f(2), [2, 3]),
        (aten.view.default, _f(2, 3), [-1]),
        (aten.split_with_sizes.default, _f(5), [0, 2, 3], -1),
        (aten.index.Tensor, _f(3, 4), [None, torch.tensor([0, -1])]),
        (aten.index.Tensor, _f(3, 4), [torch.tensor([[0], [-1]]), torch.tensor([1, 2])]),
        (aten.index_put.default, _f(3, 4), [torch.tensor([0, 0])], _f(4), True),
        (aten.index_select.default, _f(3, 4), -1, torch.tensor([3, 0])),
        (aten.gather.default, _f(3, 4), -1, torch.tensor([[0], [3]])),
        (aten.scatter_add.default, _f(3), -1, torch.tensor([0, 0]), _f(2)),
    ]


def _with_options(weight: torch.Tensor, image: torch.Tensor) -> list[Call]:
    return [
        (aten.topk.default, _f(3, 4), 2, -1, False),
        (aten.sort.default, _i(6), 0, True),
        (aten._softmax.default, _f(3, 4).bfloat16(), -1, False),
        (aten._log_softmax.default, _f(3, 4), 0, False),
        (aten.embedding.default, _f(5, 3), torch.tensor([[0, 4]]), 4),
        (aten.embedding.default, _f(5, 3), torch.tensor([1]), 1, True),
        (aten.addmm.default, _f(3), _f(2, 4), _f(4, 3), {"beta": 0, "alpha": 2}),
        (aten.addmm.default, _i(2, 3), _i(2, 4), _i(4, 3)),
        (aten.bmm.default, _f(2, 3, 0), _f(2, 0, 4)),
        (aten.gelu.default, _f(5), {"approximate": "tanh"}),
        (aten.elu.default, _f(5), 0.5, 2.0, 3.0),
        (aten.leaky_relu.default, _f(5), -0.5),
        (aten.hardtanh.default, _f(5), -0.5, 0.25),
        (aten.rsqrt.default, _i(4).abs() + 1),
        (aten.full_like.default, _i(3), 2.5),
        (aten.full_like.default, _f(3), 2, {"dtype": torch.int64}),
        (aten.fill.Scalar, _i(3), 2.5),
        (aten.sign.default, torch.tensor([-0.0, torch.nan, 3.0])),
        (aten.round.default, torch.tensor([0.5, 1.5, -2.5])),
        (aten.trunc.default, _f(4) * 3),
        (aten.atan2.default, _i(4), _i(4)),
        (aten.logical_and.default, _f(4), _i(4)),
        (aten.logical_not.default, _i(4)),
        (aten.convolution.default, image, weight, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
        (aten.convolution.default, image, _f(2, 3, 3, 3), _f(3), [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
        (aten.max_pool2d_with_indices.default, image, [2, 2]),
        (aten.constant_pad_nd.default, _f(2, 3), [1, -1], 2.0),
    ]


@functools.cache
def edge_calls() -> list[Case]:
    """The calls above as cases."""
    torch.manual_seed(seeded(0))
    found = []
    for func, *args in _edge_calls():
        kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
        leaves, spec = tree_flatten((tuple(args), kwargs))
        found.append(Case(str(func), func, tuple(leaves), spec))
    return found
