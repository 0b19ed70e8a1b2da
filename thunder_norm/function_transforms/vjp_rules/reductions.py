"""Products."""

from __future__ import annotations

from collections.abc import Sequence

from thunder import clang
from thunder.core import prims
from thunder.core.proxies import TensorProxy

from thunder_norm.function_transforms.jvp_rules._shared import factors, halves
from thunder_norm.function_transforms.registry import register_vjp


def _prod(x: TensorProxy, dims: Sequence[int]) -> tuple[TensorProxy, tuple]:
    return prims.prod(x, dims), (x, tuple(dims))


def _prod_backward(saved: tuple, g: TensorProxy) -> tuple:
    """The product of the other factors, in about log2(n) rounds: right where factors are 0, which (prod x) / x is not."""
    x, dims = saved
    if x.numel() == 0:
        return clang.full_like(x, 0), None
    rounds = []
    value = factors(x, dims)
    while value.shape[0] > 1:
        rounds.append(halves(value))
        a, b, last = rounds[-1]
        value = clang.mul(a, b)
        if last is not None:
            value = prims.cat([value, last], 0)
    gradient = clang.unsqueeze(g, 0)
    for a, b, last in reversed(rounds):
        n = a.shape[0]
        of_pairs = gradient if last is None else clang.slice_in_dim(gradient, 0, n)
        parts = [clang.mul(of_pairs, b), clang.mul(of_pairs, a)]
        if last is not None:
            parts.append(clang.slice_in_dim(gradient, n, n + 1))
        gradient = prims.cat(parts, 0)
    kept = tuple(d for d in range(x.ndim) if d not in dims)
    order = (*dims, *kept)
    spread = clang.reshape(gradient, tuple(x.shape[d] for d in order))
    return clang.transpose(spread, tuple(order.index(d) for d in range(x.ndim))), None


register_vjp(prims.prod)(_prod, _prod_backward)
