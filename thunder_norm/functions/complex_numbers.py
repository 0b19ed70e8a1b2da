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
from torch.utils._pytree import tree_map

from thunder_norm.functions.programs import has_complex, is_complex

# A copy: the lazy conjugate of torch.conj is a view that some kernels do not take.
conj_physical = ltorch._torch_to_thunder_function_map[torch.conj_physical]

complex_of = ltorch._torch_to_thunder_function_map[torch.complex]  # of a real and an imaginary part


def conjugate(value: Any) -> Any:
    """The conjugate of a complex tensor, anything else as it is."""
    return conj_physical(value) if is_complex(value) else value


_ORDERS = frozenset({prims.PrimIDs.AMAX, prims.PrimIDs.AMIN, prims.PrimIDs.MAXIMUM, prims.PrimIDs.MINIMUM})


def orders_complex(bsym: BoundSymbol) -> bool:
    """Whether an operation consists of parts that compare complex numbers, as Thunder's logsumexp does: nothing runs those."""
    if bsym.sym.id in _ORDERS:
        return any(map(is_complex, bsym.flat_proxy_args))
    return any(map(orders_complex, bsym.subsymbols))


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
