"""What Thunder's interpreter calls instead of functions that know torch.compile, and take any compiler for it.

They belong to modules that a program may not have imported, and are known by their names.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from types import CellType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules import module as modules

from thunder_norm.tracing.lookasides import instead_of, instead_of_named, under_another_name
from thunder_norm.tracing.torch_functions import known_values
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    get_interpreterruntimectx,
    unwrap,
    wrap_const,
)
from thunder.core.proxies import TensorProxy


@instead_of_named("torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex")
def _indexing() -> Any:
    """Torch's mode lets ``x[i]`` with a tensor `i` be an operation inside ``torch.vmap``: in a trace it is one."""
    return _interpret_call(contextlib.nullcontext)


@instead_of_named("transformers.utils.output_capturing", "CompileableContextVar.set")
def _set_variable(variable: WrappedValue, value: WrappedValue) -> Any:
    """transformers 5 writes a global instead of a context variable where ``torch.compiler.is_compiling()``, and Thunder says it is."""
    return _interpret_call(lambda variable, value: variable.context_var.set(value), variable, value)


@instead_of_named("transformers.utils.import_utils", "is_torchdynamo_compiling")
def _is_compiling() -> Any:
    """Models of transformers compute something else where dynamo compiles: no mask where none is given (LongT5), another scan (Mamba).

    What models share asks whether it may look at values, or keep what it has computed, and may not.
    """
    frames = get_interpreterruntimectx().frame_stack
    is_of_model = bool(frames) and str(frames[-1].globals.value.get("__name__")).startswith("transformers.models.")
    return wrap_const(False) if is_of_model else _interpret_call(torch.compiler.is_compiling)


def _has_hooks_for_exceptions(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks_always_called or modules._global_forward_hooks_always_called)


@instead_of(torch.compiler.is_compiling)
def _is_compiling_torch() -> Any:
    """A call of a module leaves out the hooks that are called after an exception too, where torch compiles: here they are called."""
    frame = get_interpreterruntimectx().frame_stack[-1]
    if frame.code.co_name != "_call_impl" or frame.globals.value is not vars(modules):
        return wrap_const(True)
    module = frame.localsplus[0]
    module = _interpret_call(getattr, module, wrap_const("cell_contents")) if type(module.value) is CellType else module
    has_hooks = _interpret_call(_has_hooks_for_exceptions, module)
    return has_hooks if has_hooks is INTERPRETER_SIGNALS.EXCEPTION_RAISED else wrap_const(not has_hooks.value)


@instead_of_named("torch.optim.optimizer", "_get_value")
def _step_of_optimizer(step: WrappedValue) -> Any:
    """Optimizers calculate bias corrections with Python's numbers, and with tensors of float32 where torch compiles: here in float64."""
    is_tensor = isinstance(step.value, TensorProxy)
    return _interpret_call(lambda x: x.double() if x.is_floating_point() else x, step) if is_tensor else step


# -- masks of transformers ----------------------------------------------------------------------------------------------


def _without_padding(name: str) -> None:
    """Have a function of transformers' masks be told that there is no padding where the model itself made a mask of ones.

    In eager mode the values say so, and a mask that hides nothing is not made: Nystromformer's would not fit its scores.
    """

    @instead_of_named("transformers.masking_utils", name)
    def call(padding_mask: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        function = under_another_name(getattr(sys.modules["transformers.masking_utils"], name))
        values = known_values.value_of(padding_mask.value) if isinstance(padding_mask.value, TensorProxy) else None
        mask = padding_mask if values is None or not values.all() else wrap_const(None)
        return _interpret_call(function, mask, *args, **kwargs)


for _name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
    _without_padding(_name)


# -- overlapping windows of transformers ----------------------------------------------------------------------------------

_LOCAL_ATTENTION = (
    ("transformers.models.longformer.modeling_longformer", "LongformerSelfAttention"),
    ("transformers.models.led.modeling_led", "LEDEncoderSelfAttention"),
)


def _overlapping(x: torch.Tensor, window: int, step: int) -> torch.Tensor:
    """[batch, sequence, ...] as [batch, windows, window, ...]; the models make strides of strides, which a trace does not know."""
    return x.unfold(1, window, step).transpose(2, 3)


def _chunk(hidden_states: torch.Tensor, window_overlap: int, onnx_export: bool = False) -> torch.Tensor:
    windows = hidden_states.shape[1] // (window_overlap * 2)
    whole = hidden_states.reshape(hidden_states.shape[0], windows * window_overlap * 2, hidden_states.shape[2])
    return _overlapping(whole, window_overlap * 2, window_overlap)


def _weighted_values(self: Any, attn_probs: torch.Tensor, value: torch.Tensor, window_overlap: int) -> torch.Tensor:
    """``_sliding_chunks_matmul_attn_probs_value``: each token's average of the values in its window."""
    batch_size, seq_len, num_heads, head_dim = value.shape
    assert seq_len % (window_overlap * 2) == 0  # noqa: S101 - the models'
    assert attn_probs.shape == (batch_size, seq_len, num_heads, 2 * window_overlap + 1)  # noqa: S101
    chunks = batch_size * num_heads, seq_len // window_overlap, window_overlap
    probs = attn_probs.transpose(1, 2).reshape(*chunks, 2 * window_overlap + 1)
    value = value.transpose(1, 2).reshape(batch_size * num_heads, seq_len, head_dim)
    padded = F.pad(value, (0, 0, window_overlap, window_overlap), value=-1)
    windows = _overlapping(padded, 3 * window_overlap, window_overlap)
    context = torch.einsum("bcwd,bcdh->bcwh", self._pad_and_diagonalize(probs), windows)
    return context.reshape(batch_size, num_heads, seq_len, head_dim).transpose(1, 2)


for _module, _class in _LOCAL_ATTENTION:
    instead_of_named(_module, f"{_class}._chunk")(functools.partial(_interpret_call, _chunk))
    instead_of_named(_module, f"{_class}._sliding_chunks_matmul_attn_probs_value")(
        functools.partial(_interpret_call, _weighted_values)
    )


def _of_mesh(question: str, mesh: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """What the mesh of a DTensor is made of: torch looks at its tensor of ranks, which no input of the program has.

    Calls whose DTensors have another mesh are guarded as calls; any other mesh is looked into as the program does it.
    """
    if mesh.provenance.inst is not PseudoInst.LOOKASIDE:
        own = vars(type(mesh.value))[question]
        return _interpret_call(under_another_name(own.fget if isinstance(own, property) else own), mesh, *args, **kwargs)
    found = getattr(mesh.value, question)
    return wrap_const(found(*map(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()}) if callable(found) else found)


for _question in ("ndim", "shape", "size", "__getitem__"):
    instead_of_named("torch.distributed.device_mesh", f"DeviceMesh.{_question}")(functools.partial(_of_mesh, _question))
