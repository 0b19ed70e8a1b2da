"""``thunder.core.utils``: the dtypes of results."""

from __future__ import annotations

from typing import Any

from thunder_norm.tracing.hooks.participants import has_part
from thunder_norm.tracing.hooks.replaced import replaces
from thunder_norm.tracing.torch_functions import type_promotion
from thunder.core import dtypes, utils
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx

_original_promotion = utils._elementwise_type_promotion
_original_dtype = utils.to_dtype


@replaces(utils, "_elementwise_type_promotion", "a", "b", lines="elementwise_type_promotion: reduce(_elementwise_type_promotion")
def _promotion(a: Any, b: Any) -> Any:
    """The type of the result of two operands, which is worked out there: torch's wherever we have a part."""
    mended = type_promotion.mended_promotion(a, b)
    return _original_promotion(a, b) if mended is None or not has_part() else mended


@replaces(utils, "to_dtype", "x", "true_dtype", lines="elementwise_type_promotion: to_dtype(x, true_dtype=")
def _dtype(x: Any, /, *, true_dtype: bool = False) -> Any:
    """The dtype with which `x` takes part in a promotion: a weak one if it has no dimensions *now*.

    For Thunder a tensor that got dimensions still counts as one without.
    """
    found = _original_dtype(x, true_dtype=true_dtype)
    if not true_dtype or not isinstance(x, TensorProxy) or found.is_weak == (x.ndim == 0) or not has_part():
        return found
    if _is_made_inside(x):  # Thunder's floor_divide counts on `where(mask, -0.0, 0.0)` being weak
        return found
    return dtypes.to_strong_dtype(found) if x.ndim else dtypes.to_weak_dtype(found)


def _is_made_inside(x: TensorProxy) -> bool:
    """Whether the operation that is being written has made `x` on its way."""
    trace = get_tracectx()
    return len(trace.scopes) > 1 and any(out is x for bsym in trace.peek_scope() or () for out in bsym.flat_proxy_outs)
