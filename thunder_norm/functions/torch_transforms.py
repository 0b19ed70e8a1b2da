"""``torch.func``'s transforms in a program that is being traced: ours, with torch's arguments and results.

Torch's work on tensors that are there; of a trace they know nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.functions.forward import jvp
from thunder_norm.functions.gradients import grad, value_and_grad, vjp
from thunder_norm.functions.jacobians import hessian, jacfwd, jacrev
from thunder_norm.functions.vmap import vmap
from thunder_norm.tracing import lookasides
from thunder.core.interpreter import WrappedValue, _interpret_call


def _instead_of(transform: Callable) -> Callable[[Callable], Callable]:
    """Have the interpreter go into the decorated function instead of torch's."""

    def enter(own: Callable) -> Callable:
        def lookaside(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
            return _interpret_call(own, *args, **kwargs)

        lookasides.instead_of(transform)(lookaside)
        return own

    return enter


@_instead_of(torch.vmap)
def _vmap(
    func: Callable, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error", *, chunk_size: int | None = None
) -> Callable:
    return vmap(func, in_dims, out_dims, randomness, chunk_size=chunk_size)


@_instead_of(torch.func.grad)
def _grad(func: Callable, argnums: Any = 0, has_aux: bool = False) -> Callable:
    return grad(func, argnums, has_aux)


@_instead_of(torch.func.grad_and_value)
def _grad_and_value(func: Callable, argnums: Any = 0, has_aux: bool = False) -> Callable:
    both = value_and_grad(func, argnums, has_aux)

    def turned(*args: Any, **kwargs: Any) -> tuple:
        value, gradient = both(*args, **kwargs)
        return gradient, value

    return turned


@_instead_of(torch.func.vjp)
def _vjp(func: Callable, *primals: Any, has_aux: bool = False) -> tuple:
    return vjp(func, *primals, has_aux=has_aux)


@_instead_of(torch.func.jvp)
def _jvp(func: Callable, primals: Any, tangents: Any, *, strict: bool = False, has_aux: bool = False) -> tuple:
    return jvp(func, primals, tangents, has_aux=has_aux)


@_instead_of(torch.func.linearize)
def _linearize(func: Callable, *primals: Any) -> tuple:
    return func(*primals), lambda *tangents: jvp(func, primals, tangents)[1]


@_instead_of(torch.func.jacrev)
def _jacrev(
    func: Callable,
    argnums: Any = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable:
    return jacrev(func, argnums, has_aux, chunk_size=chunk_size)


@_instead_of(torch.func.jacfwd)
def _jacfwd(func: Callable, argnums: Any = 0, has_aux: bool = False, *, randomness: str = "error") -> Callable:
    return jacfwd(func, argnums, has_aux, randomness=randomness)


@_instead_of(torch.func.hessian)
def _hessian(func: Callable, argnums: Any = 0) -> Callable:
    return hessian(func, argnums)
