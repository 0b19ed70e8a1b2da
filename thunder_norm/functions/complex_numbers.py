"""Conjugates, and which gradient a real argument of a complex operation has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from torch.utils._pytree import tree_flatten, tree_map

# A copy: the lazy conjugate of torch.conj is a view that some kernels do not take.
conj_physical = ltorch._torch_to_thunder_function_map[torch.conj_physical]

complex_of = ltorch._torch_to_thunder_function_map[torch.complex]  # of a real and an imaginary part


def is_complex(value: Any) -> bool:
    """Whether a value is a complex tensor."""
    return isinstance(value, TensorProxy) and dtypes.is_complex_dtype(value.dtype)


def has_complex(tree: Any) -> bool:
    """Whether there is a complex tensor among the leaves of a tree."""
    return any(map(is_complex, tree_flatten(tree)[0]))


def conjugate(value: Any) -> Any:
    """The conjugate of a complex tensor, anything else as it is."""
    return conj_physical(value) if is_complex(value) else value


# What they compute of complex numbers is not defined (an order), not implemented in torch (convolution, pad), or a real mean.
_OF_REAL_NUMBERS = frozenset(
    getattr(prims.PrimIDs, name) for name in ("AMAX", "AMIN", "MAXIMUM", "MINIMUM", "CONVOLUTION", "PAD", "VAR_MEAN")
)


def has_parts_of_real_numbers(bsym: BoundSymbol) -> bool:
    """Whether an operation on complex numbers consists of parts that are for real ones, as Thunder's logsumexp does."""
    if bsym.sym.id in _OF_REAL_NUMBERS:
        return any(map(is_complex, bsym.flat_proxy_args))
    return any(map(has_parts_of_real_numbers, bsym.subsymbols))


def holomorphic(backward: Callable) -> Callable:
    """The backward of a vjp rule written for real numbers, for complex ones too, of a holomorphic operation.

    For real numbers the gradient is the derivative times the cotangent; for complex ones PyTorch's is the conjugate of the derivative
    times the cotangent, the same between two conjugations.
    """

    @functools.wraps(backward)
    def pulled(saved: Any, *cotangents: TensorProxy) -> Any:
        if not has_complex(cotangents):
            return backward(saved, *cotangents)
        return tree_map(conjugate, backward(saved, *map(conjugate, cotangents)))

    return pulled


def in_dtype_of(gradient: TensorProxy, target: TensorProxy) -> TensorProxy:
    """A gradient in the dtype of what it belongs to; of a real tensor that is the real part, as in PyTorch."""
    if is_complex(gradient) and not is_complex(target):
        gradient = prims.real(gradient)
    return gradient if gradient.dtype == target.dtype else ltorch.to(gradient, dtypes.to_torch_dtype(target.dtype))
