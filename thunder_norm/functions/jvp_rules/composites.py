"""Operations that Thunder can take apart, with a tangent that is simpler than what comes of it."""

from __future__ import annotations

import thunder.torch as ltorch
from thunder import clang

from thunder_norm.functions.registry import register_jvp


@register_jvp("torch.softmax")
def softmax(primals, tangents, *, dtype=None):
    """dy = y (dx - sum y dx)."""
    (x, dim), dx = primals, tangents[0]
    out = ltorch._softmax(x, dim, dtype=dtype)
    dx = ltorch.to(dx, out.dtype)
    return out, clang.mul(out, clang.sub(dx, ltorch.sum(clang.mul(out, dx), dim, True)))


@register_jvp("torch.log_softmax")
def log_softmax(primals, tangents, *, dtype=None):
    """dy = dx - sum exp(y) dx."""
    (x, dim), dx = primals, tangents[0]
    out = ltorch.log_softmax(x, dim, dtype=dtype)
    dx = ltorch.to(dx, out.dtype)
    return out, clang.sub(dx, ltorch.sum(clang.mul(clang.exp(out), dx), dim, True))


@register_jvp("torch.polygamma")
def polygamma(primals, tangents):
    """Its derivative is the next one; the parts it consists of are only right for positive arguments."""
    (n, x), dx = primals, tangents[1]
    return ltorch.polygamma(n, x), clang.mul(dx, ltorch.polygamma(n + 1, x))
