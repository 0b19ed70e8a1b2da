"""``y[mask] = f(x[mask])``: what a mask selects, held with all that it leaves out, where its size may not be a number of the trace.

What goes into entries one by one, and back to where they came from, needs no size: it is ``y = torch.where(mask, f(x), y)``.  So in the place
of ``x[mask]`` stands a tensor of the whole, and entrywise operations on it are operations on that.  Anything else a program does with
it is refused as ``x[mask]`` was before: its shape is a value.  Entries that are left out have derivatives of zero, whatever those of f
are there: each operand passes a ``torch.where`` of its own, whose gradient selects and does not multiply.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.subclass.acquiring import plain_values
from thunder_norm.subclass.acquiring.acquisition import ACQUISITION, Acquisition
from thunder_norm.subclass.acquiring.arguments import value_of
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.acquiring.fallback import fallback_executor, is_random
from thunder_norm.subclass.interpreting import whole, whole_reductions
from thunder_norm.subclass.interpreting.entrywise import (
    METADATA,
    SHARING_MEMORY,
    dtype_beside,
    is_division,
    is_entrywise,
    out_of_place,
)
from thunder_norm.subclass.interpreting.operations import torch_callable
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.provenances import wrapped_result
from thunder_norm.tracing.shared_memory.views import RETURNING_SELF
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent_on_mask
from thunder.core import dtypes
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    wrap_const,
)
from thunder.core.jit_ext import _jit_ctx, get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.update_aliases import _is_inplace_op


@dataclass
class _Selection:
    """What stands for ``x[mask]``: entries of `dense` where the mask is true; others mean nothing."""

    dense: WrappedValue
    mask: WrappedValue
    values: WrappedValue  # of the mask, when it selected
    version: str  # of the mask, when it selected
    scope: list  # of the trace, where it was
    position: int  # how many operations were in it
    at: str | None
    why: str  # its size is not known
    memory: list[_Selection] = field(default_factory=list)  # those that lie in one
    is_recorded: bool = False  # with gradients
    is_stale: bool = False  # another one in its memory was written into

    @property
    def num_own_dims(self) -> int:
        """How many dimensions an entry of the mask selects at once."""
        return self.dense.value.ndim - self.mask.value.ndim


def lookaside(fn: Callable, args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]) -> Callable | None:
    """What to call where a mask selects, or where what one has selected is used; None for all other calls.

    Args:
        fn: what the program calls.
        args: what it is called with.
        kwargs: its named arguments.
    """
    known = _known()
    names = _names(known, args, kwargs) if known else ()
    if names:
        return _use(known, known[names[0]], fn, args)
    if len(args) == 2 and _is_mask(args[0].value, args[1].value) and torch_callable(fn) is torch.Tensor.__getitem__:
        why = _why_unknown(args[1].value)
        return None if why is None else functools.partial(_select, why)
    return None


def are_in_use() -> bool:
    """Whether anything in the acquisition at hand is what a mask has selected."""
    return bool(getattr(_current(), _ATTRIBUTE, None))


def _known() -> dict[str, _Selection]:
    """The selections of the acquisition at hand, by the names of what stands for them."""
    ctx = _current()
    found = getattr(ctx, _ATTRIBUTE, None)
    if found is None:
        found = {}
        setattr(ctx, _ATTRIBUTE, found)
    return found


_ATTRIBUTE = "_thunder_norm_selections"
_current = _jit_ctx.get


def _names(known: Mapping[str, _Selection], args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]) -> list[str]:
    given = tree_leaves([value_of(a) for a in (*args, *kwargs.values())])
    return [p.name for p in given if isinstance(p, TensorProxy) and p.name in known]


def _is_mask(x: Any, key: Any) -> bool:
    if type(key) is not TensorProxy or not isinstance(x, TensorProxy) or key.dtype is not dtypes.bool8 or not key.ndim:
        return False
    return tuple(x.shape[: key.ndim]) == tuple(key.shape)


def _acquisition() -> Acquisition | None:
    """The state of an acquisition that interprets subclasses, which knows more of plain tensors than Thunder."""
    return getattr(get_jit_ctx(), ACQUISITION, None)


def _why_unknown(mask: TensorProxy) -> str | None:
    """Why the size of what a mask selects is not known; None where it is taken from the inputs of the call at hand."""
    acquisition = _acquisition()
    if acquisition is None or acquisition.num_levels or not acquisition.may_replace() or acquisition.is_transformed:
        return "the program is traced once for all values"
    return acquisition.sizes.why_unknown(acquisition.fake_of(mask))


# -- what is selected ---------------------------------------------------------------------------------------------------


class _Selected(TensorProxy):
    """Python compares natively, where Thunder's interpreter has nothing to say."""


def _comparison(name: str) -> Callable[[TensorProxy, Any], Any]:
    return lambda self, other: _compared(name, self, other)


for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(_Selected, _name, _comparison(_name))


def _like(shape: Sequence[int], device: Any, dtype: Any, at: str | None, why: str) -> TensorProxy:
    return _Selected(shape=tuple(shape), device=device, dtype=dtype, requires_grad=False)


def _unknown(shape: Sequence[int], device: Any, dtype: Any, at: str | None, why: str) -> torch.Tensor:
    raise data_dependent_on_mask(at, why, "the rest of the program", None)


# What a program holds in the place of ``x[mask]``.  Nothing computes with it, so that no trace has it in the end.
_SELECTED = fallback_executor.register_operator("selected_by_mask", meta=_like, fn=_unknown)


def _select(why: str, x: WrappedValue, mask: WrappedValue) -> Any:
    values = _interpret_call(torch.clone, mask)
    dense = values if values is INTERPRETER_SIGNALS.EXCEPTION_RAISED else _interpret_call(whole.kept, x, values)
    if dense is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return dense
    scope = get_jit_ctx().computation_trace.peek_scope()
    return _hold(_Selection(dense, mask, values, _version(mask.value), scope, len(scope), location_of_user(), why))


def _hold(selection: _Selection) -> WrappedValue:
    own, mask = selection.dense.value, selection.mask.value
    standing = _SELECTED((mask.numel, *own.shape[mask.ndim :]), own.device, own.dtype, selection.at, selection.why)
    _known()[standing.name] = selection
    selection.memory.append(selection)
    selection.is_recorded = is_grad_enabled() and dtypes.is_inexact_dtype(own.dtype)
    return wrapped_result(standing, [selection.dense.provenance, selection.mask.provenance])


# -- what is done with it -----------------------------------------------------------------------------------------------


def _use(known: dict[str, _Selection], selection: _Selection, fn: Callable, args: Sequence[WrappedValue]) -> Callable | None:
    if fn is getattr:
        name = args[1].value
        is_known = name in _KNOWN or is_entrywise(name) or out_of_place(name)
        return None if is_known else _refusing(selection, f".{name}")
    torch_fn = torch_callable(fn)
    name = getattr(torch_fn, "__name__", "")
    if torch_fn is None and fn is not setattr:
        return _refusing(selection, str(fn)) if isinstance(fn, Symbol) else None  # Python, whose calls come here as well
    if name in METADATA:
        return None
    if fn is setattr:
        return _refusing(selection, f"setting its .{args[1].value}")
    if name == "__setitem__":
        return lambda *own, **named: _write(known, selection, own)
    if name in whole_reductions.NAMES:
        return lambda *own, **named: _reduce(known, selection, name, own, named)
    other = out_of_place(name)
    if other is not None:
        return lambda *own, **named: _change(known, selection, other, own, named)
    if is_entrywise(name) and not is_random(torch_fn):
        return lambda *own, **named: _compute(
            known, selection, name, lambda *operands, **options: _interpret_call(fn, *operands, **options), own, named
        )
    return _refusing(selection, name)


def _refusing(selection: _Selection, what: str) -> Callable:
    return lambda *args, **kwargs: _refused(selection, what)


def _refused(selection: _Selection, what: str) -> Any:
    return do_raise(data_dependent_on_mask(selection.at, selection.why, what, location_of_user()))


def _compute(
    known: dict[str, _Selection],
    selection: _Selection,
    name: str,
    run: Callable,
    args: Sequence[WrappedValue],
    kwargs: Mapping[str, WrappedValue],
) -> Any:
    """An operation on each entry, of what one mask has selected and of what meets all entries alike."""
    given = [*args, *kwargs.values()]
    kinds = {known[n].dense.value.dtype for n in _names(known, args, kwargs)}
    operands = [_as_dense(known, selection, kinds, a) for a in given]
    is_written = "out" in kwargs or ("inplace" in kwargs and kwargs["inplace"].value)
    if is_written or any(v is None for v in operands):
        return _refused(selection, name)
    if INTERPRETER_SIGNALS.EXCEPTION_RAISED in operands:
        return INTERPRETER_SIGNALS.EXCEPTION_RAISED
    if is_division(name):
        operands = [_divisor(v, selection) for v in operands]
    result = run(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))
    if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return result
    if not _fits(result.value, selection):
        return _refused(selection, name)
    made, first = replace(selection, dense=result, memory=[]), known.get(getattr(args[0].value, "name", "")) if args else None
    if first is not None and first.dense.value.dtype == result.value.dtype and "copy" not in kwargs:
        if name in RETURNING_SELF:
            return args[0]
        made.memory = first.memory if name in SHARING_MEMORY else made.memory
    return _hold(made)


def _divisor(operand: WrappedValue, selection: _Selection) -> WrappedValue:
    value = operand.value
    is_of_integers = isinstance(value, TensorProxy) and dtypes.is_integer_dtype(value.dtype) and value.dtype is not dtypes.bool8
    return _interpret_call(whole.divisor, operand, selection.values) if is_of_integers else operand


def _compared(name: str, x: TensorProxy, other: Any) -> Any:
    known = {} if _jit_ctx.get(None) is None else _known()
    if x.name not in known:  # Thunder compares proxies of a trace that is done
        return getattr(TensorProxy, name)(x, other)
    result = _compute(known, known[x.name], name, _calling(name), [wrapped_result(v, []) for v in (x, other)], {})
    if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        raise get_interpreterruntimectx().curexc
    return result.value


def _calling(name: str) -> Callable:
    if not hasattr(torch.Tensor, name):
        fn = getattr(torch.nn.functional, name)
        return lambda *args, **kwargs: _interpret_call(fn, *args, **kwargs)
    return lambda x, *args, **kwargs: _interpret_call(
        lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs), x, *args, **kwargs
    )


def _fits(value: Any, selection: _Selection) -> bool:
    mask = selection.mask.value
    return (
        isinstance(value, TensorProxy)
        and tuple(value.shape[: mask.ndim]) == tuple(mask.shape)
        and value.ndim == selection.dense.value.ndim
    )


def _as_dense(known: Mapping[str, _Selection], selection: _Selection, kinds: set[Any], argument: WrappedValue) -> Any:
    """What an argument is where all entries are; None where that is not known.

    A tensor without dimensions would decide about the dtype if it had some: it gets one of `kinds`, those of what is selected.
    """
    value = argument.value
    if not isinstance(value, TensorProxy):
        return None if any(isinstance(v, TensorProxy) for v in tree_leaves(value_of(argument))) else argument
    own = known.get(value.name)
    if own is not None:
        is_alike = not own.is_stale and own.num_own_dims == selection.num_own_dims and _are_same(own, selection.mask.value)
        return own.dense if is_alike else None
    mask, num_own_dims = selection.mask.value, selection.num_own_dims
    is_of_length_1 = value.ndim == num_own_dims + 1 and value.shape[0] == 1  # over what is selected
    dtype = value.dtype if value.ndim else dtype_beside(value.dtype, kinds)
    if (value.ndim > num_own_dims and not is_of_length_1) or dtype is None:
        return None
    try:
        shape = torch.broadcast_shapes((*mask.shape, *(1,) * num_own_dims), value.shape[is_of_length_1:])
    except RuntimeError:
        return None
    options = (tuple(shape), dtypes.to_torch_dtype(dtype))
    return _interpret_call(whole.operand, argument, selection.values, *map(wrap_const, options))


def _change(
    known: dict[str, _Selection],
    selection: _Selection,
    name: str,
    args: Sequence[WrappedValue],
    kwargs: Mapping[str, WrappedValue],
) -> Any:
    """An operation that writes into what was selected, which is a tensor of its own."""
    target = known.get(getattr(args[0].value, "name", ""))
    if target is None:
        return _refused(selection, f"writing it into another tensor by {name}_")
    if target.is_recorded and not is_grad_enabled():
        return _refused(selection, f"{name}_ under no_grad(), which leaves gradients as they were,")
    result = _compute(known, selection, name, _calling(name), args, kwargs)
    if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return result
    made = known[result.value.name]
    if made.dense.value.dtype != target.dense.value.dtype or made.dense.value.shape != target.dense.value.shape:
        return _refused(selection, f"{name}_ with another dtype or shape")
    target.dense = made.dense
    for other in target.memory:
        other.is_stale = other is not target
    return args[0]


def _reduce(
    known: Mapping[str, _Selection],
    selection: _Selection,
    name: str,
    args: Sequence[WrappedValue],
    kwargs: Mapping[str, WrappedValue],
) -> Any:
    """A sum, a mean or a loss over all that is selected, or an operation along each of its rows."""

    def dense_of(argument: WrappedValue) -> WrappedValue | None:
        own = known[argument.value.name]
        is_alike = own.num_own_dims == selection.num_own_dims or name in whole_reductions.OF_CLASSES
        is_of_mask = own is selection or _are_same(own, selection.mask.value)
        return own.dense if is_alike and is_of_mask and not own.is_stale else None

    found = whole_reductions.reduction_of(name, selection.num_own_dims, args, kwargs)
    operands = None if found is None else found.operands(known, dense_of)
    if found is None or operands is None:
        return _refused(selection, f"{name} with these arguments, or after a write into what shares its memory,")
    result = _interpret_call(found.program, selection.values, *operands[0], **operands[1])
    if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED or not found.is_along_rows:
        return result
    return _hold(replace(selection, dense=result, memory=[]))


def _write(known: dict[str, _Selection], selection: _Selection, args: Sequence[WrappedValue]) -> Any:
    """``x[mask] = value`` of what the same mask has selected."""
    x, key, value = (a.value for a in args)
    own = known.get(getattr(value, "name", ""))
    is_known = own is not None and getattr(x, "name", "") not in known and _is_mask(x, key) and _are_same(own, key)
    if not is_known or own.is_stale or own.dense.value.ndim != x.ndim:
        return _refused(selection, "writing it to other places")
    if own.dense.value.dtype != x.dtype:
        return do_raise(
            RuntimeError(f"Index put requires the source and destination dtypes match, got {x.dtype} and {value.dtype}")
        )
    return _interpret_call(whole.put, args[0], args[1], own.dense)


# -- which masks are the same -------------------------------------------------------------------------------------------


def _version(p: TensorProxy) -> str:
    """The name of what a tensor that the program holds is by now; operations are written of that."""
    acquisition = _acquisition()
    if acquisition is None:
        return p.name
    p = acquisition.by_now(p)
    fake = acquisition.fakes.known(p)
    newest = None if fake is None else acquisition.fakes.proxy_of(fake)
    return p.name if newest is None else newest.name


def _are_same(selection: _Selection, key: TensorProxy) -> bool:
    """Whether a mask holds what it held when it selected, or another one does."""
    mask, written = selection.mask.value, get_jit_ctx().computation_trace.peek_scope()
    if selection.scope is not written:
        return False
    if mask.name == key.name:
        since = written[selection.position :]
        if any(p.name == key.name for bsym in since for p in bsym.flat_proxy_outs):
            return False  # the object lies in other memory by now, or is another view of it
        changed = [p for bsym in since if _is_inplace_op(bsym) for p in bsym.flat_proxy_args]
        return _version(key) == selection.version and not any(getattr(p, "dtype", None) in _OF_BYTES for p in changed)
    return _version(mask) == mask.name and _version(key) == key.name and plain_values.are_made_alike(mask, key, written)


_KNOWN = METADATA | whole_reductions.NAMES | {"__setitem__"}
# A mask may be seen as these.
_OF_BYTES = (dtypes.bool8, dtypes.uint8, dtypes.int8)
