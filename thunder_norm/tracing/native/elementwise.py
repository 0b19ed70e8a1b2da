"""Operations entry by entry: which dtype, shape and device operands have together, where all have the same and nothing is to be done.

Each operation of Thunder's asks for these several times, on its way from torch's to a primitive and in the primitive, and so does each
that a derivative is made of.
"""

from __future__ import annotations

from typing import Any

from thunder_norm.tracing.native.proxies import strong_dtype
from thunder_norm.tracing.replacement import Replacement
from thunder_norm.tracing.torch_functions.type_promotion import mended_promotion
from thunder import clang
from thunder.core import dtypes, jit_ext, langctxs, utils
from thunder.core.proxies import TensorProxy

_original_convert = clang.maybe_convert_to_dtype
_original_broadcast = clang.maybe_broadcast
_original_promotion = utils.elementwise_type_promotion
_original_promotion_of_two = utils._elementwise_type_promotion
_original_same_dtype = utils.check_same_dtype
_original_same_shape = utils.check_same_shape
_original_same_device = utils.check_same_device
_NUMBERS = frozenset((int, float, bool))
# By id, as Thunder hashes a dtype by its names: the dtype, which stays alive with that, and whether it goes before numbers, as torch has it.
_decides: dict[int, tuple[dtypes.dtype, bool]] = {}
_promoted: dict[tuple[int, int], tuple[Any, Any]] = {}  # by dtype and kind of promotion, what is computed and what is given


def _convert(a: Any, dtype: Any, *, enforce_safe_casting: bool = False) -> Any:
    if type(a) is TensorProxy and isinstance(dtype, dtypes.dtype) and strong_dtype(a._dtype) is strong_dtype(dtype):
        return a
    return _original_convert(a, dtype, enforce_safe_casting=enforce_safe_casting)


def _broadcast(*args: Any, treat_cpu_scalar_tensors_as_numbers: bool = True) -> Any:
    if _is_of_one(args, "shape"):
        return args
    return _original_broadcast(*args, treat_cpu_scalar_tensors_as_numbers=treat_cpu_scalar_tensors_as_numbers)


def _is_of_one(args: tuple, name: str) -> bool:
    """Whether all are numbers, or tensors that have one and the same attribute."""
    found: Any = None
    for x in args:
        if type(x) is TensorProxy:
            own = getattr(x, name)
            if found is None:
                found = own
            elif own is not found and own != found:
                return False
        elif type(x) not in _NUMBERS:
            return False
    return True


def _common_dtype(args: tuple) -> dtypes.dtype | None:
    """The dtype of all tensors among some operands, if it is one that goes before all numbers, and they have dimensions; None otherwise."""
    found = None
    for x in args:
        if type(x) is not TensorProxy:
            if type(x) not in _NUMBERS:
                return None
        elif found is None:
            found = x._true_dtype
            if not x._ndim:
                return None
        elif x._true_dtype is not found or not x._ndim:
            return None
    if found is None:
        return None
    known = _decides.get(id(found))
    if known is None:
        known = _decides[id(found)] = found, _is_deciding(found)
    return found if known[1] else None


def _is_deciding(dtype: dtypes.dtype) -> bool:
    if dtype.is_weak or not dtypes.is_inexact_dtype(dtype):
        return False
    pairs = [pair for other in (*_NUMBERS, dtype) for pair in ((other, dtype), (dtype, other))]
    return all(mended_promotion(*pair) is None and _original_promotion_of_two(*pair) is dtype for pair in pairs)


def _promotion(*args: Any, type_promotion_kind: Any) -> Any:
    dtype = _common_dtype(args)
    if dtype is None:
        return _original_promotion(*args, type_promotion_kind=type_promotion_kind)
    found = _promoted.get((id(dtype), id(type_promotion_kind)))
    if found is None:
        found = _promoted[id(dtype), id(type_promotion_kind)] = _original_promotion(
            *args, type_promotion_kind=type_promotion_kind
        )
    return found


def _same_dtype(*args: Any) -> Any:
    """Of two tensors: numbers beside a tensor are of its kind, which is looked at there."""
    if len(args) == 2 and type(args[0]) is type(args[1]) is TensorProxy and (dtype := _common_dtype(args)) is not None:
        return None, dtype
    return _original_same_dtype(*args)


def _same_shape(*args: Any, treat_cpu_scalar_tensors_as_numbers: bool = True) -> None:
    if not _is_of_one(args, "shape"):
        _original_same_shape(*args, treat_cpu_scalar_tensors_as_numbers=treat_cpu_scalar_tensors_as_numbers)


def _same_device(*args: Any, treat_cpu_scalar_tensors_as_numbers: bool = True) -> None:
    if not _is_of_one(args, "_device"):
        _original_same_device(*args, treat_cpu_scalar_tensors_as_numbers=treat_cpu_scalar_tensors_as_numbers)


REPLACEMENTS = (
    Replacement(clang, "maybe_convert_to_dtype", _convert, "the same, of what has the dtype"),
    Replacement(clang, "maybe_broadcast", _broadcast, "the same, of what has one shape"),
    Replacement(
        jit_ext,
        "_clang_fn_set",
        {*jit_ext._clang_fn_set, _convert, _broadcast},
        "general_jit_lookaside: elif isinstance(fn, Symbol) or fn in _clang_fn_set, for programs that call these",
    ),
    Replacement(utils, "elementwise_type_promotion", _promotion, "the same, of one dtype"),
    Replacement(utils, "check_same_dtype", _same_dtype, "the same, of two tensors of one dtype"),
    Replacement(utils, "check_same_shape", _same_shape, "the same, of what has one shape"),
    Replacement(utils, "check_same_device", _same_device, "the same, of what is on one device"),
    Replacement(langctxs, "set_langctx", langctxs._langctx.set, "the same, which checks what it is given"),
    Replacement(langctxs, "reset_langctx", langctxs._langctx.reset, "the same, a function of Python"),
)
