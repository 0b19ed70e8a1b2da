"""Taking elements by index, and writing them: linear in what is read and what is written."""

from __future__ import annotations

from thunder.core import prims

from thunder_norm.functions.jvp_rules._shared import register_linear

for _symbol in (prims.take, prims.take_along_axis, prims.gather, prims.embedding_backward):
    register_linear(_symbol, 0)

register_linear(prims.embedding, 1)

for _symbol in (
    prims.index_add,
    prims.index_copy,
    prims.index_put,
    prims.scatter,
    prims.scatter_add,
    prims.copy_with_setitem,
):
    register_linear(_symbol, 0, 2)
