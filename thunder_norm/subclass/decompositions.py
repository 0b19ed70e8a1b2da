"""Operations that torch can write in simpler ones: mostly the kernels of its backward formulas.

Torch's own decompositions are run on fakes and what they call is logged, as for an operation of the user's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import NumberProxy, TensorProxy
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.subclass.record import Recorded

# Those whose decompositions give torch's numbers, and that Thunder has no symbol for.  Not among them: convolution_backward,
# embedding_dense_backward, attention and pooling, which are kernels to every executor.
_NAMES = (
    "threshold_backward tanh_backward sigmoid_backward gelu_backward silu_backward elu_backward hardtanh_backward mish_backward "
    "hardswish_backward hardsigmoid_backward leaky_relu_backward softplus_backward log_sigmoid_backward glu_backward logit_backward "
    "_prelu_kernel_backward _softmax_backward_data _log_softmax_backward_data native_layer_norm_backward "
    "native_group_norm_backward native_batch_norm_backward _fused_rms_norm_backward nll_loss_backward nll_loss2d_backward "
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward "
    "select_backward slice_backward diagonal_backward native_dropout_backward "
    "elu hardtanh native_layer_norm native_group_norm _native_batch_norm_legit_no_training _fused_rms_norm log_sigmoid_forward "
    "softshrink mish hardswish huber_loss smooth_l1_loss soft_margin_loss nll_loss_forward nll_loss2d_forward"
).split()


def decomposition_of(func: Callable) -> Callable | None:
    """Torch's decomposition of `func`, if it is one that we use."""
    is_listed = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten" and func.overloadpacket.__name__ in _NAMES
    return decomposition_table.get(func) if is_listed else None


def decompose(func: Callable, args: tuple, kwargs: dict) -> tuple[list[Recorded], list[torch.Tensor], dict[int, TensorProxy]]:
    """What `func` does to proxies, in simpler operations on fakes: the log, its results, and the proxies of its inputs by `id`.

    Raises:
        UnsupportedOpError: it mutates something on the way.
    """
    given: dict[int, TensorProxy] = {}

    def fake(value: Any) -> Any:
        if isinstance(value, TensorProxy):
            dtype, device = dtypes.to_torch_dtype(value.dtype), devices.to_torch_device(value.device)
            made = torch.empty(tuple(value.shape), dtype=dtype, device=device)
            given[id(made)] = value
            return made
        if isinstance(value, NumberProxy):
            return value.value
        if isinstance(value, dtypes.dtype):
            return dtypes.to_torch_dtype(value)
        return devices.to_torch_device(value) if isinstance(value, devices.Device) else value

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        fake_args, fake_kwargs = tree_map(fake, (args, kwargs))
        with _Log() as log:
            result = decomposition_table[func](*fake_args, **fake_kwargs)
    results = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
    return log.needed(results), results, given


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise UnsupportedOpError(f"{func} in a decomposition")
        result = func(*args, **kwargs)
        outputs = tuple(v for v in tree_flatten(result)[0] if isinstance(v, torch.Tensor))
        inputs = {id(v) for v in tree_flatten((args, kwargs))[0]}
        if not all(id(t) in inputs for t in outputs):
            self.recorded.append(Recorded(func, args, kwargs, outputs, result))
        return result

    def needed(self, results: list[torch.Tensor]) -> list[Recorded]:
        """What `results` depend on."""
        wanted = {id(t) for t in results}
        kept = []
        for recorded in reversed(self.recorded):
            if any(id(t) in wanted for t in recorded.outputs):
                kept.append(recorded)
                wanted.update(id(t) for t in tree_flatten((recorded.args, recorded.kwargs))[0] if isinstance(t, torch.Tensor))
        return kept[::-1]
