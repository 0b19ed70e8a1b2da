"""Linear operations: those that move entries, and on complex numbers those that are linear over the reals only.

For the latter the transpose is with respect to ``Re(conj(a) b)``, the inner product of PyTorch's gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder_norm.errors import MissingTransformRuleError, with_details
from thunder_norm.functions.batching import sample_ndim, sample_shape, shifted, with_batch
from thunder_norm.functions.derivatives import complex_of, conj_physical, or_zeros, register_linear, summed_to
from thunder_norm.functions.programs import is_complex
from thunder_norm.functions.registry import VjpRule, batching_rules, jvp_rules, register_jvp, register_vjp, vjp_rules
from thunder_norm.tracing.shared_memory.histories import CURRENT, current
import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_map

# -- tangents ---------------------------------------------------------------------------------------------------------


for _symbol in (
    prims.broadcast_in_dim,
    prims.clone,
    prims.device_put,
    prims.flip,
    prims.reshape,
    prims.shallow_copy,
    prims.slice_prim,
    prims.squeeze,
    prims.stride_order,
    prims.sum,
    prims.transpose,
    prims.unfold,
    prims.view,
    ltorch.contiguous,
    ltorch.cumsum,
):
    register_linear(_symbol, 0)


@register_jvp(prims.cat)
def pushed_cat(primals, tangents):
    """The tangents side by side."""
    (tensors, dim), (moving, _) = primals, tangents
    return prims.cat(tensors, dim), prims.cat([or_zeros(t, x) for t, x in zip(moving, tensors, strict=True)], dim)


@register_jvp(prims.pad)
def pushed_pad(primals, tangents):
    """The tangent padded with zeros."""
    a, value, config = primals
    return prims.pad(a, value, config), prims.pad(tangents[0], type(value)(0), config)


@register_jvp(prims.copy_)
def copy_(primals, tangents, **kwargs):
    """The tangent of what is written."""
    return prims.copy_(*primals, **kwargs), tangents[0]


@register_jvp(prims.update_aliases)
def update_aliases(primals, tangents):
    """Each tensor keeps its tangent."""
    return prims.update_aliases(*primals), tuple(tree_map(lambda t: t, tangents[0]))


@register_jvp("thunder_norm.detach")  # of aten's
@register_jvp("torch.detach")
def detach(primals, tangents):
    """No tangent, as in torch."""
    return ltorch.detach(*primals), None


@register_jvp(CURRENT)
def pushed_current(primals, tangents):
    """Forward mode follows what is written without autograd, and that keeps its history as well."""
    (history, value), (of_history, of_value) = primals, tangents
    return current(history, value), current(or_zeros(of_history, history), or_zeros(of_value, value))


# -- cotangents -------------------------------------------------------------------------------------------------------


register_vjp(CURRENT)(lambda history, value: (current(history, value), None), lambda saved, g: (g, None))


def _unfold_backward(saved: tuple, g: TensorProxy) -> tuple:
    """Each entry of a window goes to where it came from, which several may have in common."""
    shape, dim, size, step = saved
    zeros = ltorch.zeros(shape, device=g.device, dtype=g.dtype)
    if size == 0:
        return zeros, None, None, None
    starts = ltorch.arange(0, g.shape[dim] * step, step, device=g.device)
    places = ltorch.add(ltorch.unsqueeze(starts, 1), ltorch.arange(size, device=g.device))
    entries = ltorch.reshape(ltorch.movedim(g, -1, dim + 1), (*g.shape[:dim], g.shape[dim] * size, *g.shape[dim + 1 : -1]))
    return ltorch.index_add(zeros, dim, ltorch.reshape(places, (g.shape[dim] * size,)), entries), None, None, None


register_vjp(prims.unfold)(
    lambda a, dim, size, step: (prims.unfold(a, dim, size, step), (tuple(a.shape), dim, size, step)), _unfold_backward
)


# -- batches ----------------------------------------------------------------------------------------------------------


def _rule(prim: Any) -> Any:
    def register(rule: Any) -> Any:
        batching_rules.add(prim, rule)
        return rule

    return register


@_rule(prims.broadcast_in_dim)
def broadcast_in_dim(axis_size: int, in_dims: tuple, a: TensorProxy, shape: Sequence[int], dims: Sequence[int]) -> Any:
    """The batch dimension stays the first."""
    return prims.broadcast_in_dim(a, (axis_size, *shape), (0, *(d + 1 for d in dims))), 0


@_rule(prims.reshape)
def reshape(axis_size: int, in_dims: tuple, a: TensorProxy, shape: Sequence[int]) -> Any:
    """Only the dimensions of one sample are reshaped."""
    return prims.reshape(a, (axis_size, *shape)), 0


@_rule(prims.view)
def view(axis_size: int, in_dims: tuple, a: TensorProxy, shape: Sequence[int]) -> Any:
    """A reshape: whether memory can be shared depends on the batch dimension too."""
    return prims.reshape(a, (axis_size, *shape)), 0


@_rule(prims.slice_prim)
def slice_prim(
    axis_size: int, in_dims: tuple, a: TensorProxy, start: Sequence[int], end: Sequence[int], strides: Sequence[int] | None = None
) -> Any:
    """All of the batch dimension."""
    strides = [1] * len(start) if strides is None else strides
    return prims.slice_prim(a, [0, *start], [axis_size, *end], [1, *strides]), 0


@_rule(prims.squeeze)
def squeeze(axis_size: int, in_dims: tuple, a: TensorProxy, dims: Sequence[int]) -> Any:
    """Not the batch dimension, even of size 1."""
    return prims.squeeze(a, tuple(d + 1 for d in dims)), 0


@_rule(prims.transpose)
def transpose(axis_size: int, in_dims: tuple, a: TensorProxy, permutation: Sequence[int]) -> Any:
    """The batch dimension stays the first."""
    return prims.transpose(a, (0, *(d + 1 for d in permutation))), 0


@_rule(prims.flip)
def flip(axis_size: int, in_dims: tuple, a: TensorProxy, dims: Sequence[int]) -> Any:
    """Samples stay in their order."""
    return prims.flip(a, tuple(shifted(d, a.ndim - 1) for d in dims)), 0


@_rule(prims.pad)
def pad(axis_size: int, in_dims: tuple, a: TensorProxy, value: Any, config: Sequence[tuple[int, int, int]]) -> Any:
    """No samples are added."""
    return prims.pad(a, value, [(0, 0, 0), *config]), 0


@_rule(prims.cat)
def cat(axis_size: int, in_dims: tuple, tensors: Sequence[TensorProxy], dim: int) -> Any:
    """What is the same for all samples is expanded first; torch lets empty vectors pass for anything."""
    samples = [(t, d) for t, d in zip(tensors, in_dims[0], strict=True)]
    if len({sample_ndim(t, d) for t, d in samples}) > 1:
        samples = [(t, d) for t, d in samples if sample_shape(t, d) != (0,)]
    given = [with_batch(axis_size, t, d) for t, d in samples]
    return prims.cat(given, shifted(dim, given[0].ndim - 1)), 0


@_rule(CURRENT)
def batched_current(axis_size: int, in_dims: tuple, history: TensorProxy, value: TensorProxy) -> Any:
    """Of each sample its own."""
    return current(*(with_batch(axis_size, t, d) for t, d in zip((history, value), in_dims, strict=True))), 0


@_rule(prims.unfold)
def unfold(axis_size: int, in_dims: tuple, a: TensorProxy, dim: int, size: int, step: int) -> Any:
    """Windows of each sample."""
    return prims.unfold(a, shifted(dim, a.ndim - 1), size, step), 0


@_rule(prims.stride_order)
def stride_order(axis_size: int, in_dims: tuple, a: TensorProxy, order: Sequence[int]) -> Any:
    """The batch dimension has the largest stride."""
    return prims.stride_order(a, (len(order), *order)), 0


@_rule("Tensor.to_sparse")
def to_sparse(axis_size: int, in_dims: tuple, *args: Any, **kwargs: Any) -> Any:
    """Torch has no sparse tensor with a batch dimension that it could batch further operations on."""
    raise MissingTransformRuleError(
        with_details("vmap has no rules for sparse tensors", instead="stay with dense tensors inside vmap")
    )


# -- over the reals -----------------------------------------------------------------------------------------------------


def _complex(a: TensorProxy, like: TensorProxy) -> TensorProxy:
    return prims.convert_element_type(a, like.dtype)


def _linear(operation, pulled) -> None:
    """Of one argument and linear over the reals: the tangent is the operation on the tangent; ``pulled(x, g)`` is its transpose."""
    jvp_rules.add(operation, lambda primals, tangents: (operation(*primals), operation(*tangents)))
    vjp_rules.add(operation, VjpRule(lambda input: (operation(input), input), pulled))


_linear(prims.real, lambda x, g: _complex(g, x) if is_complex(x) else g)
_linear(prims.imag, lambda x, g: ltorch.mul(_complex(g, x), complex(0, 1)))
_linear(conj_physical, lambda x, g: conj_physical(g) if is_complex(x) else g)


@register_jvp(complex_of)
def complex_(primals, tangents):
    """The tangents of the parts; zero where one does not move."""
    parts = (ltorch.zeros_like(x) if t is None else t for t, x in zip(tangents, primals, strict=True))
    return complex_of(*primals), complex_of(*parts)


vjp_rules.add(
    complex_of,
    VjpRule(
        lambda real, imag: (complex_of(real, imag), (real, imag)),
        lambda saved, g: (summed_to(prims.real(g), saved[0]), summed_to(prims.imag(g), saved[1])),
    ),
)


@register_jvp(prims.convert_element_type)
def convert_element_type(primals, tangents):
    """The tangent in the other dtype; of a real one made of complex numbers the real part."""
    return prims.convert_element_type(*primals), _converted(tangents[0], primals[1])


def _converted(t: TensorProxy, dtype: dtypes.dtype) -> TensorProxy:
    if is_complex(t) and not dtypes.is_complex_dtype(dtypes.to_dtype(dtype)):
        t = prims.real(t)
    return prims.convert_element_type(t, dtype)


vjp_rules.add(
    prims.convert_element_type,
    VjpRule(lambda x, dtype: (prims.convert_element_type(x, dtype), x), lambda x, g: (_converted(g, x.dtype), None)),
)
