"""Which operations run in another precision under ``torch.autocast``, as torch's dispatcher has it.

Thunder knows matrix products, convolutions and attention.  The other operations that torch runs in low precision, and those that it runs
in float32 (losses, products, transforms of Fourier; on a GPU softmax, norms, exponentials and sums as well) are in the tables here.

Source: aten/src/ATen/autocast_mode.h (``AT_FORALL_LOWER_PRECISION_FP`` and its neighbours); tensors of float64 and of integers stay as
they are (``is_autocast_eligible``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    einsum tensordot inner chain_matmul multi_dot spmm matrix_power multi_head_attention_forward lstm rnn_tanh rnn_relu
    """.split()
)
_LOW_ON = {"cpu": _LOW, "cuda": _LOW | frozenset("addmv addr mv gru".split())}
_SCOPES = "_thunder_norm_scopes_of_program"  # of compile data: how many there were at the last call of the program's
_AS_SUMS = frozenset({"einsum", "tensordot"})  # on a GPU they are products, whatever they sum over
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
    if name != "pinv" and not any(name in t[device] for t in (_LOW_ON, _FULL_ON) for device in t):
        return None
    is_whole = len(get_tracectx().scopes) == getattr(get_compile_data(), _SCOPES)  # not a step of Thunder's for another operation

    def called(dtype: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        device = device_of((args, kwargs))
        if name in _LOW_ON[device] and ((device == "cuda" and name in _AS_SUMS) or _is_product(name, args, kwargs)):
            args, kwargs = _converted((args, kwargs), dtypes.to_dtype(dtype))
        elif name in _FULL_ON[device] and is_whole:
            args, kwargs = _converted((args, kwargs), dtypes.float32)
        result = sym(*args, **kwargs)
        return _converted(result, dtypes.to_dtype(dtype)) if _ends_in_product(name, args, kwargs) else result

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


def note_call() -> None:
    """Note that the program calls a function: what is written from there on, in scopes as deep, are operations of its own.

    In a region, or a function that is transformed, they are in another scope than that of the trace.
    """
    cd = get_compile_data()
    if cd is not None and not cd.autocast_stack.is_empty():
        setattr(cd, _SCOPES, len(get_tracectx().scopes))


@contextmanager
def acquiring() -> Iterator[None]:
    """Acquire a program under the autocast that is on where it is called, which is off for what torch runs meanwhile.

    Thunder adds it to what it has from earlier calls, which never goes; a program would be acquired under the autocast of another call, and
    under one that it left by an error.  Torch would say of operations that a trace has as a whole that their results are of another dtype.
    """
    end()
    setattr(get_compile_data(), _SCOPES, 1)
    with ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, _LOW_ON):
            get_compile_data().autocast_stack.push(device, torch.get_autocast_dtype(device), True)
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def end() -> None:
    """End an acquisition: derivatives have the dtypes of what they are of, under no autocast."""
    get_compile_data().autocast_stack = AutocastStack()


def _is_product(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether torch writes an operation as a matrix product.

    It does einsum if that sums over an index of two operands, tensordot if an index is left, inner of a matrix, powers of matrices from 2.
    """
    if name == "inner":
        dims = [a.ndim for a in (*args, *kwargs.values()) if isinstance(a, TensorProxy)]
        return max(dims) > 1 and min(dims) > 0
    if name == "matrix_power":
        return kwargs.get("n", args[1] if len(args) > 1 else 0) > 1
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


def _ends_in_product(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether torch inverts in the precision of the operand, and multiplies inverses as matrices."""
    exponent = kwargs.get("n", args[1] if name == "matrix_power" and len(args) > 1 else 0)
    return name == "pinv" or (name == "matrix_power" and exponent < -1)


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
