"""Views of what `einsum` makes: Thunder takes it apart on its own, and the result has the strides of other dimensions than torch's has.

So ``torch.einsum(...).view(...)``, which torch has, raises when Thunder's trace runs.  There a reshape computes the same.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy


def is_made_of_einsum(proxy: Any) -> bool:
    """Whether a result of `einsum` is among what a tensor was made from, and its strides perhaps that one's."""
    names = {proxy.name} if isinstance(proxy, TensorProxy) else set()
    for bsym in reversed(get_jit_ctx().computation_trace.bound_symbols):
        if names.isdisjoint(p.name for p in bsym.flat_proxy_outs):
            continue
        if bsym.sym is ltorch.einsum or any(inner.sym is ltorch.einsum for inner in bsym.subsymbols):
            return True
        names |= {p.name for p in bsym.flat_proxy_args}
    return False
