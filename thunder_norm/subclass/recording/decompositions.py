"""Operations that torch can write in simpler ones: mostly the kernels of its backward formulas.

Torch's own decompositions are run on fakes and what they call is logged, as for an operation of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.subclass.recording.record import Recorded, needed
from thunder_norm.tracing.translation import empty_for, for_torch
from thunder_norm.trees import flat_tensors
from thunder.core.proxies import TensorProxy

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
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = _Fakes()
        fake_args, fake_kwargs = tree_map(fakes.of, (args, kwargs))
        with _Log() as log:
            result = decomposition_table[func](*fake_args, **fake_kwargs)
    results = [*flat_tensors(result)]
    return needed(log.recorded, results), results, fakes.given


def differentiate(
    func: Callable, args: tuple, kwargs: dict, results: Sequence[TensorProxy], cotangents: Sequence[TensorProxy | None]
) -> tuple[list[Recorded], list[torch.Tensor | None], dict[int, TensorProxy]]:
    """Torch's formula for the gradients of `func`, as what it calls on fakes.

    `results` are all tensors that `func` returned, `cotangents` belong to them.  Returns the log, the gradient of each floating
    input (None where it is zero), and the proxies of its inputs by `id`.

    Raises:
        RuntimeError: torch has no derivative.
    """
    with torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = _Fakes()
        fake_args, fake_kwargs = tree_map(fakes.of, (args, kwargs))
        inputs = [t for t in flat_tensors((fake_args, fake_kwargs)) if t.is_floating_point() or t.is_complex()]
        for t in inputs:
            t.requires_grad_()
        fake_cotangents = [None if g is None else fakes.of(g) for g in cotangents]
        known: dict[int, torch.Tensor] = {}
        saved = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: known.get(_storage(t), t))
        with _Log() as log, saved:
            outputs = flat_tensors(func(*fake_args, **fake_kwargs))
            known.update({_storage(t): t for t in outputs})  # autograd keeps aliases of them
            fakes.given.update({id(t): p for t, p in zip(outputs, results, strict=True)})
            log.recorded.clear()  # the forward has computed them
            pairs = [(t, g) for t, g in zip(outputs, fake_cotangents, strict=True) if g is not None and t.requires_grad]
            if not pairs:
                return [], [None] * len(inputs), {}
            found = torch.autograd.grad([t for t, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
    return needed(log.recorded, flat_tensors(found)), list(found), fakes.given


class _Fakes:
    """Fake tensors in the place of proxies, and which proxy each is for."""

    def __init__(self) -> None:
        self.given: dict[int, TensorProxy] = {}
        self._kept: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, TensorProxy):
            made = empty_for(value)
            self.given[id(made)] = value
            self._kept.append(made)  # an id is one for as long as its owner lives
            return made
        return for_torch(value)


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise UnsupportedOpError(f"{func} in a decomposition")
        result = func(*args, **kwargs)
        outputs = flat_tensors(result)
        inputs = {id(v) for v in tree_flatten((args, kwargs))[0]}
        if not all(id(t) in inputs for t in outputs):
            self.recorded.append(Recorded(func, args, kwargs, outputs, result))
        return result
