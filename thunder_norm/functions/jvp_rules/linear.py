"""Operations that move, copy, cast or add elements: the tangent is what they do to the tangents."""

from __future__ import annotations

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.pytree import tree_map

from thunder_norm.functions.jvp_rules._shared import or_zeros, register_linear
from thunder_norm.functions.registry import register_jvp

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
    prims.view,
    ltorch.contiguous,
    ltorch.cumsum,
):
    register_linear(_symbol, 0)


@register_jvp(prims.cat)
def cat(primals, tangents):
    """The tangents side by side."""
    (tensors, dim), (moving, _) = primals, tangents
    return prims.cat(tensors, dim), prims.cat([or_zeros(t, x) for t, x in zip(moving, tensors, strict=True)], dim)


@register_jvp(prims.pad)
def pad(primals, tangents):
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


@register_jvp("torch.detach")
def detach(primals, tangents):
    """No tangent, as in torch."""
    return ltorch.detach(*primals), None
