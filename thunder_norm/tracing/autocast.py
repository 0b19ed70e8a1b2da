"""Which operations run in another precision under ``torch.autocast``, as torch's dispatcher has it.

Thunder knows matrix products, convolutions and attention.  The other operations that torch runs in low precision, and those that it runs
in float32 (losses, products, transforms of Fourier; on a GPU softmax, norms, exponentials and sums as well) are in the tables here.

Source: aten/src/ATen/autocast_mode.h (``AT_FORALL_LOWER_PRECISION_FP`` and its neighbours); tensors of float64 and of integers stay as
they are (``is_autocast_eligible``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from thunder_norm.tracing.lookasides import instead_of
import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, wrap
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import get_tracectx
from thunder.core.utils import AutocastStack

_LOW = frozenset(  # with what torch writes as matrix products
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc bmm mm vecdot baddbmm addmm addbmm linear matmul prelu
    einsum tensordot inner chain_matmul multi_dot
    """.split()
)
_LOW_ON = {"cpu": _LOW, "cuda": _LOW | frozenset("addmv addr mv".split())}
_LOSSES = """
    mse_loss cosine_embedding_loss nll_loss hinge_embedding_loss poisson_nll_loss smooth_l1_loss cross_entropy l1_loss huber_loss
    margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss kl_div multilabel_margin_loss binary_cross_entropy_with_logits
    cdist prod
""".split()
_FULL_ON = {
    "cpu": frozenset(
        [
            *_LOSSES,
            *"""
            binary_cross_entropy grid_sample polar quantile nanquantile stft trace view_as_complex ctc_loss avg_pool3d max_pool3d max_unpool2d
            max_unpool3d adaptive_avg_pool3d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d cholesky cholesky_inverse
            cholesky_solve inverse lu_solve orgqr ormqr pinverse geqrf qr svd triangular_solve fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2
            irfft2 rfftn irfftn hfft ihfft cond eig eigh eigvals eigvalsh householder_product inv lstsq matrix_rank solve svdvals tensorinv
            tensorsolve
            """.split(),
        ]
    ),
    "cuda": frozenset(
        [
            *_LOSSES,
            *"""
            acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm rms_norm group_norm norm
            cosine_similarity dist pdist renorm logsumexp interpolate softmax log_softmax cumprod cumsum vector_norm matrix_norm sum
            """.split(),
        ]
    ),
}


def rule_for(sym: Symbol) -> Callable | None:
    """What to call in place of a symbol where autocast is on, with the dtype of the autocast, and the arguments; None for most symbols."""
    name = sym.id.rpartition(".")[2] if isinstance(sym.id, str) and sym.id.startswith("torch.") else ""
    if not any(name in t[device] for t in (_LOW_ON, _FULL_ON) for device in t):
        return None
    is_whole = len(get_tracectx().scopes) == 1  # not a step of Thunder's for another operation

    def called(dtype: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        device = device_of((args, kwargs))
        if name in _LOW_ON[device] and (device == "cuda" or _is_product(name, args, kwargs)):
            args, kwargs = _converted((args, kwargs), dtypes.to_dtype(dtype))
        elif name in _FULL_ON[device] and is_whole:
            args, kwargs = _converted((args, kwargs), dtypes.float32)
        return sym(*args, **kwargs)

    return called


def device_of(given: Any) -> str:
    """The type of device whose autocast counts for operands."""
    on_cpu = any(isinstance(t, TensorProxy) and t.device.devicetype is devices.DeviceType.CPU for t in tree_leaves(given))
    return "cpu" if on_cpu else "cuda"


def dtype_for(given: Any) -> Any:
    """The dtype of the autocast that is on where operands are met; None where it is off."""
    return get_compile_data().autocast_stack.get_dtype_for_device_if_enabled(device_of(given))


def is_on_somewhere() -> bool:
    """Whether the program is under an autocast, of whichever device."""
    cd = get_compile_data()
    return cd is not None and not cd.autocast_stack.is_empty()


def begin() -> None:
    """Begin an acquisition with the autocast that is on where the program is called.

    Thunder adds it to what it has from earlier calls, which never goes; a program would be acquired under the autocast of another call, and
    under one that it left by an error.
    """
    end()
    for device in _LOW_ON:
        if torch.is_autocast_enabled(device):
            get_compile_data().autocast_stack.push(device, torch.get_autocast_dtype(device), True)


def end() -> None:
    """End an acquisition: derivatives have the dtypes of what they are of, under no autocast."""
    get_compile_data().autocast_stack = AutocastStack()


def _is_product(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether torch writes an operation as a matrix product: einsum if it sums over an index of two operands, tensordot if any is left."""
    if name == "tensordot":
        dims = kwargs.get("dims", args[2] if len(args) > 2 else 2)
        count = dims if isinstance(dims, int) else len(dims[0]) if isinstance(dims[0], Sequence) else len(dims)
        return not all(a.ndim == count for a in args[:2])
    equation = args[0] if name == "einsum" else None
    if not isinstance(equation, str):
        return True
    operands, _, result = equation.replace(" ", "").partition("->")
    once = {c for c in operands if operands.count(c) == 1}
    summed = set(operands) - (set(result) if "->" in equation else once)
    return any(c.isalpha() and sum(c in o for o in operands.split(",")) > 1 for c in summed)


def _converted(given: Any, dtype: dtypes.dtype) -> Any:
    def convert(x: Any) -> Any:
        is_eligible = (
            isinstance(x, TensorProxy) and dtypes.is_float_dtype(x.dtype) and dtypes.to_strong_dtype(x.dtype) != dtypes.float64
        )
        return ltorch.to(x, dtype) if is_eligible and dtypes.to_strong_dtype(x.dtype) != dtype else x

    return tree_map(convert, given)


def _answering(answer: Callable[[str], Any], fn: Callable, *devices_of_it: str) -> None:
    """Have the program's question about autocast answered from what it has entered itself."""

    @instead_of(fn)
    def _(*args: WrappedValue) -> Any:
        device = str(args[0].value) if args else devices_of_it[0]
        inputs = [a.provenance for a in args]
        return wrap(answer(device), provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=inputs))


def _is_on(device: str) -> bool:
    return get_compile_data().autocast_stack.get_dtype_for_device_if_enabled(device) is not None


def _dtype(device: str) -> torch.dtype:
    entered = [dtype for where, dtype, _ in get_compile_data().autocast_stack.stack if where == device]
    return dtypes.to_torch_dtype(entered[-1]) if entered else torch.get_autocast_dtype(device)


_answering(_is_on, torch.is_autocast_enabled, "cuda")
_answering(_is_on, torch.is_autocast_cpu_enabled, "cpu")
_answering(_dtype, torch.get_autocast_dtype)
_answering(_dtype, torch.get_autocast_cpu_dtype, "cpu")
_answering(_dtype, torch.get_autocast_gpu_dtype, "cuda")
