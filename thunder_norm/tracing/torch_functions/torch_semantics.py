"""Functions of torch whose operation in Thunder silently does something else, done as torch does them.

An entry of the table has torch's arguments and calls Thunder's operations such that the trace has torch's result: its values, and the
shape and dtype that the program may ask for.  Methods have entries of their own, since some of Thunder's take the tensor for another
argument than torch's.  Type promotion is mended where Thunder works it out, in `type_promotion`.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.activity import has_history
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import look_up
from thunder_norm.tracing.recording import print_without_module
from thunder_norm.tracing.shared_memory import einsum_views, replaced_memory, views_in_place
from thunder_norm.tracing.torch_functions import slices, tensor_methods, torch_losses, torch_neural, torch_scatters
from thunder_norm.tracing.torch_functions.fake_norms import over_positive
from thunder_norm.tracing.torch_functions.type_promotion import filling
import thunder.clang as clang
import thunder.torch as ltorch
from thunder.core import dtypes, prims, utils
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, interpreter_needs_wrap, wrap
from thunder.core.jit_ext import ensure_recursive_proxies, record_source_loc_in_symbol_header
from thunder.core.proxies import NumberProxy, TensorProxy, pyval
from thunder.core.symbol import Symbol

_AS_TORCH: dict[Callable, Callable] = {**torch_neural.ENTRIES, **torch_losses.ENTRIES, **torch_scatters.ENTRIES}


def lookaside(fn: Callable, args: Sequence[WrappedValue] = ()) -> Callable | None:
    """What to call instead of `fn`, a function of torch or the lookup of a method; None for most."""
    if fn is getattr:
        is_mended = len(args) >= 2 and type(args[0].value) is TensorProxy and args[1].value in _methods()
        return _torchs_method if is_mended else None
    if fn is torch.einsum:
        return einsum_views.lookaside(args)
    own = look_up(_AS_TORCH, fn)
    return None if own is None else _called(own)


@functools.cache
def _called(own: Callable) -> Callable:
    """`own` as Thunder calls its operations: on proxies, and with the line of the program."""
    return ensure_recursive_proxies(interpreter_needs_wrap(record_source_loc_in_symbol_header(own)))


@functools.cache
def _methods() -> frozenset[str]:
    own = frozenset(fn.__name__ for fn in _AS_TORCH if getattr(torch.Tensor, fn.__name__, None) is fn)
    return own | tensor_methods.names() | views_in_place.NAMES | replaced_memory.NAMES


def _torchs_method(obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """The method of torch's tensors, for which a table has an entry: Thunder's would be called without looking there, if it has one."""
    method = types.MethodType(getattr(torch.Tensor, name.value), obj.value)
    return wrap(method, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[obj.provenance, name.provenance]))


def _instead_of(*functions: Callable) -> Callable[[Callable], Callable]:
    """Enter the function into the table."""

    def enter(own: Callable) -> Callable:
        _AS_TORCH.update(dict.fromkeys(functions, own))
        return own

    return enter


@_instead_of(torch.tensor)
def _tensor(data: Any, **options: Any) -> Any:
    """Thunder's has float32 of a float whatever the default dtype, and complex64 of a complex."""
    if options.get("dtype") is None and isinstance(pyval(data) if isinstance(data, NumberProxy) else data, float | complex):
        default = torch.get_default_dtype()
        options["dtype"] = default if isinstance(data, float) else default.to_complex()
    return ltorch.tensor(data, **options)


@_instead_of(torch.sign, torch.Tensor.sign)
def _sign(input: Any) -> Any:
    """Thunder's of complex numbers is ``sgn``, where torch refuses them in these words."""
    if dtypes.is_complex_dtype(input.dtype):
        raise NotImplementedError("torch.sign is not intended to support complex numbers. Please use torch.sgn instead.")
    return ltorch.sign(input)


# -- other arguments --------------------------------------------------------------------------------------------------


@_instead_of(torch.Tensor.where)
def _where(self: Any, condition: Any, other: Any) -> Any:
    """Thunder takes the tensor for the condition."""
    return ltorch.where(condition, self, other)


@_instead_of(torch.Tensor.__setitem__, TensorProxy.__setitem__)
def _setitem(self: Any, key: Any, value: Any) -> None:
    """Thunder's gradient is for values of the tensor's dtype; where tensors are indices torch refuses others."""
    has_places = any(isinstance(k, TensorProxy) for k in (key if isinstance(key, tuple | list) else (key,)))
    is_other = isinstance(value, TensorProxy) and not has_places and value.dtype != self.dtype
    ltorch.setitem_(self, slices.within(self, key), ltorch.to(value, dtype=self.dtype) if is_other else value)


@_instead_of(torch.Tensor.__getitem__, TensorProxy.__getitem__)
def _getitem(self: Any, key: Any) -> Any:
    """Thunder knows no slice that begins before the first entry, and takes True for 1."""
    found = ltorch.getitem(self, slices.within(self, key))
    return ltorch.clone(found) if slices.has_bool(key) else found


@_instead_of(torch.max, torch.Tensor.max)
def _max(input: Any, *args: Any, **options: Any) -> Any:
    """Along a dimension Thunder's looks for the place of the largest of bools, which torch has no kernel for."""
    is_of_bools = isinstance(input, TensorProxy) and dtypes.is_boolean_dtype(input.dtype)
    found = ltorch.torch_max(ltorch.to(input, torch.uint8) if is_of_bools else input, *args, **options)
    if not is_of_bools:
        return found
    return (ltorch.to(found[0], torch.bool), found[1]) if isinstance(found, tuple) else ltorch.to(found, torch.bool)


@_instead_of(torch.Tensor.broadcast_to)
def _broadcast_to(self: Any, *size: Any) -> Any:
    """Thunder knows the function alone."""
    return ltorch.expand(self, tuple(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size))


@_instead_of(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Sequence[Any], dim: int = 0, **options: Any) -> Any:
    """Thunder refuses ``torch.tensor([])`` beside tensors of other ranks, which torch leaves out, but for its dtype."""
    placed = [t for t in tensors if tuple(t.shape) != (0,)]
    if len(placed) in (0, len(tensors)):
        return ltorch.cat(tensors, dim if placed else 0, **options)
    _, dtype = utils.elementwise_type_promotion(*tensors, type_promotion_kind=utils.ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    return ltorch.to(ltorch.cat(placed, dim, **options), dtype=dtype)


def _operator(function: Callable, is_reflected: bool) -> Callable:
    return lambda a, b: function(b, a) if is_reflected else function(a, b)


# Thunder's tensors have these operators, which look for functions of names that it does not know.
for _name, _function, _is_reflected in (
    ("__mod__", ltorch.remainder, False),
    ("__rmod__", ltorch.remainder, True),
):
    _instead_of(getattr(torch.Tensor, _name), getattr(TensorProxy, _name))(_operator(_function, _is_reflected))
_instead_of(torch.Tensor.__pos__, TensorProxy.__pos__)(ltorch._torch_to_thunder_function_map[torch.positive])


def _written_operator(function: Callable) -> Callable:
    return lambda a, b: ltorch.copy_(a, function(a, b))


for _name, _function in (
    ("__imod__", ltorch.remainder),
    ("__ifloordiv__", ltorch.floor_divide),
    ("__iand__", ltorch.bitwise_and),
    ("__ior__", ltorch.bitwise_or),
    ("__ixor__", ltorch.bitwise_xor),
    ("__ilshift__", ltorch.bitwise_left_shift),
    ("__irshift__", ltorch.bitwise_right_shift),
):
    _instead_of(getattr(torch.Tensor, _name), getattr(TensorProxy, _name))(_written_operator(_function))


_instead_of(torch.Tensor.hardshrink)(ltorch.hardshrink)


@_instead_of(torch.Tensor.repeat)
def _repeat(self: Any, *repeats: Any) -> Any:
    """Thunder's may share memory with the tensor in a program that is differentiated: where nothing comes to lie between its entries.

    A clone keeps the order of dimensions in memory, what torch repeats has the usual one.
    """
    result = ltorch.repeat(self, *repeats)
    leading = result.ndim - self.ndim
    shares = all(n == 1 or new == n for n, new in zip(self.shape, result.shape[leading:], strict=True))
    return ltorch.contiguous(ltorch.clone(ltorch.expand(self, result.shape))) if shares else result


@_instead_of(torch.Tensor.tile)
def _tile(self: Any, *sizes: Any, dims: Any = None) -> Any:
    """Thunder's takes one tuple."""
    if dims is not None or (len(sizes) == 1 and isinstance(sizes[0], Sequence)):
        sizes = tuple(sizes[0] if dims is None else dims)
    return _repeat(self, (1,) * (self.ndim - len(sizes)) + sizes)


@_instead_of(torch.repeat_interleave, torch.Tensor.repeat_interleave)
def _repeat_interleave(input: Any, *args: Any, **kwargs: Any) -> Any:
    """The same: Thunder's is a view of the tensor where entries are repeated once, or there is one to be repeated."""
    result = ltorch.repeat_interleave(input, *args, **kwargs)
    repeats = args[0] if args else kwargs.get("repeats")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    length = input.numel() if dim is None else input.shape[dim]
    return ltorch.contiguous(ltorch.clone(result)) if 1 in (repeats, length) else result


@_instead_of(torch.atleast_2d)
def _atleast_2d(*tensors: Any) -> Any:
    return _of_each(ltorch.atleast_2d, tensors)


@_instead_of(torch.atleast_3d)
def _atleast_3d(*tensors: Any) -> Any:
    return _of_each(ltorch.atleast_3d, tensors)


@_instead_of(torch.split)
def _split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> tuple:
    """Thunder's returns a list."""
    return tuple(ltorch.split(tensor, split_size_or_sections, dim))


@_instead_of(torch.Tensor.split)
def _split_method(self: Any, split_size: Any, dim: int = 0) -> tuple:
    return _split(self, split_size, dim)


def _of_each(operation: Callable, tensors: tuple) -> Any:
    """Thunder's returns a list as it is; torch's returns a tuple of its tensors."""
    if len(tensors) == 1 and isinstance(tensors[0], TensorProxy):
        return operation(tensors[0])
    return tuple(operation(t) for t in (tensors[0] if len(tensors) == 1 else tensors))


# -- other shapes -----------------------------------------------------------------------------------------------------


@_instead_of(torch.lerp, torch.Tensor.lerp)
def _lerp(input: Any, end: Any, weight: Any) -> Any:
    """Thunder's has the shape of the first, which it does not broadcast if it has no dimension."""
    shape = torch.broadcast_shapes(*(t.shape for t in (input, end, weight) if isinstance(t, TensorProxy)))
    return ltorch.lerp(ltorch.expand(input, shape) if input.ndim == 0 and shape else input, end, weight)


for _norm in (torch.linalg.vector_norm, torch.linalg.norm):
    _instead_of(_norm)(over_positive(ltorch._torch_to_thunder_function_map[_norm]))


@_instead_of(torch.norm)
def _older_norm(
    input: TensorProxy, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Any:
    """Thunder runs torch.linalg.norm, of the same name, whose arguments have other names and whose default is another."""
    if out is not None:  # which Thunder does not write; what records torch's own operation does
        raise UnsupportedOpError(with_details("torch.norm(out=...)", at=location_of_user(), instead="out.copy_(torch.norm(...))"))
    return _norm_method(input, p, dim, keepdim, dtype)


@_instead_of(torch.Tensor.norm)
def _norm_method(input: TensorProxy, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    is_nuclear = p == "nuc"
    norm = over_positive(
        ltorch._torch_to_thunder_function_map[torch.linalg.matrix_norm if is_nuclear else torch.linalg.vector_norm]
    )
    if is_nuclear:
        return norm(input, p, range(input.ndim) if dim is None else dim, keepdim=keepdim, dtype=dtype)
    return norm(input, 2.0 if p is None or p == "fro" else p, dim, keepdim=keepdim, dtype=dtype)


@_instead_of(F.normalize)
def _normalize(input: TensorProxy, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """x / max(|x|, eps).  Thunder's takes a root of the sum of powers, whose gradient is NaN where that is 0.

    For p = 2 the maximum is taken under the root, where the square of eps is a number that the dtype has.
    """
    if out is not None or p in (0.0, math.inf, -math.inf):
        return ltorch.normalize(input, p, dim, eps, out)
    if p != 2.0 or eps < 1e-15:
        norm = over_positive(ltorch._torch_to_thunder_function_map[torch.linalg.vector_norm])(input, p, dim, keepdim=True)
        return ltorch.true_divide(input, ltorch.clamp(norm, min=eps))
    entries = ltorch.abs(input) if dtypes.is_complex_dtype(input.dtype) else input
    own = entries.dtype
    if dtypes.is_low_precision_dtype(own):
        entries = ltorch.to(entries, dtypes.float32)
    square = ltorch.sum(ltorch.mul(entries, entries), dim, keepdim=True)
    return ltorch.true_divide(input, ltorch.to(ltorch.sqrt(ltorch.clamp(square, min=eps * eps)), own))


@_instead_of(torch.arange)
def _arange(*args: Any, **kwargs: Any) -> Any:
    """Thunder's has no dimension where it has no entry."""
    found = ltorch.arange(*args, **kwargs)
    return found if found.ndim else ltorch.zeros((0,), device=found.device, dtype=found.dtype)


def _unfold(self: Any, dimension: int, size: int, step: int) -> Any:
    if self.ndim == 0:
        return ltorch.getitem(_unfold(ltorch.reshape(self, (1,)), dimension, size, step), 0)
    dim = utils.canonicalize_dim(self.ndim, dimension)
    length = self.shape[dim]
    utils.check(0 <= size <= length, lambda: f"maximum size for tensor at dimension {dim} is {length} but size is {size}")
    utils.check(step > 0, lambda: f"step is {step} but must be > 0")
    return prims.unfold(self, dim, size, step)


@_instead_of(torch.Tensor.view)
def _view(self: Any, *shape: Any, dtype: Any = None) -> Any:
    """The bits as another dtype, or as the same, have no gradient; Thunder's takes those of the gradient."""
    if dtype is None and len(shape) == 1 and isinstance(shape[0], torch.dtype | dtypes.dtype):
        (dtype,) = shape
    return ltorch.view(self, *shape) if dtype is None else ltorch.view(ltorch.detach(self), dtype)


@_instead_of(torch.Tensor.reshape_as)
def _reshape_as(a: TensorProxy, other: TensorProxy) -> TensorProxy:
    # Thunder has torch run it: the result would depend on `other`
    return ltorch.reshape(a, other.shape)


# Windows, a view: Thunder's symbol has the id of ``F.unfold``, which has the same name and is what runs, and no gradient.
unfold = Symbol(name="unfold", meta=_unfold, id="thunder_norm.unfold", _bind_postprocess=print_without_module)
ltorch._syms_returning_views.add(unfold)
_instead_of(torch.Tensor.unfold)(unfold)


# -- other derivatives ------------------------------------------------------------------------------------------------

# Thunder's clamp between numbers, whose derivative is torch's where it meets them (functions/rules/elementwise.py); Thunder has 0 there.
clamp = Symbol(name="clamp", meta=ltorch.clamp, id="thunder_norm.clamp", _bind_postprocess=print_without_module)


@_instead_of(torch.clamp, torch.Tensor.clamp)
def _clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    if isinstance(min, TensorProxy) or isinstance(max, TensorProxy):
        return ltorch._torch_to_thunder_function_map[torch.clip](input, min, max)  # run by torch, with its derivatives
    return clamp(input, min, max)


@_instead_of(torch.clamp_, torch.Tensor.clamp_)
def _clamp_in_place(input: Any, min: Any = None, max: Any = None) -> Any:
    return ltorch.copy_(input, _clamp(input, min, max))  # the symbol: Thunder looks for it where something is written


@_instead_of(torch.sum, torch.Tensor.sum)
def _sum(input: Any, *args: Any, **kwargs: Any) -> Any:
    """No dimensions are all of them; Thunder's fails in the gradient."""
    if args and isinstance(args[0], Sequence) and not args[0]:
        args = (None, *args[1:])
    if isinstance(kwargs.get("dim"), Sequence) and not kwargs["dim"]:
        kwargs["dim"] = None
    return ltorch.sum(input, *args, **kwargs)


# -- other dtypes -----------------------------------------------------------------------------------------------------


@_instead_of(torch.masked_fill, torch.Tensor.masked_fill)
def _masked_fill(self: Any, mask: Any, value: Any) -> Any:
    """Thunder's may have the dtype of the value, and fills what overflows."""
    fill = filling(value, self.dtype)
    return ltorch.where(mask, fill, self) if isinstance(value, TensorProxy) else ltorch.masked_fill(self, mask, fill)


def _of_deviations(args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a variance or deviation as Thunder takes them: it knows no ``unbiased`` and no correction of None."""
    given = dict(zip(("unbiased",) if args and isinstance(args[0], bool) else ("dim", "unbiased", "keepdim"), args, strict=False))
    given.update(kwargs)
    unbiased, correction = given.pop("unbiased", True), given.pop("correction", None)
    given["correction"] = int(unbiased) if correction is None else correction
    dim = given.pop("dim", given.pop("axis", None))
    return {**given, "dim": dim if isinstance(dim, int) or dim else None}  # no dimensions are all of them


@_instead_of(torch.var, torch.Tensor.var)
def _var(input: Any, *args: Any, **kwargs: Any) -> Any:
    return ltorch.var(input, **_of_deviations(args, kwargs))


@_instead_of(torch.std, torch.Tensor.std)
def _std(input: Any, *args: Any, **kwargs: Any) -> Any:
    return ltorch.std(input, **_of_deviations(args, kwargs))


@_instead_of(torch.var_mean)
def _var_mean(input: Any, *args: Any, **kwargs: Any) -> Any:
    """Thunder's has a real mean of complex numbers, whatever its dtype when it runs."""
    given = _of_deviations(args, kwargs)
    if not dtypes.is_complex_dtype(input.dtype):
        return ltorch.var_mean(input, **given)
    return ltorch.var(input, **given), ltorch.mean(input, given["dim"], given.get("keepdim", False))


@_instead_of(torch.baddbmm, torch.Tensor.baddbmm)
def _baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Thunder's multiplies the input by a beta of 0, where torch does not look at it: it may be empty memory.  Its gradient is zeros."""
    if beta == 0:
        product = ltorch.matmul(batch1, batch2)
        product = product if alpha == 1 else ltorch.mul(product, alpha)
        if not has_history(input):
            return product
        return ltorch.where(ltorch.ones(tuple(product.shape), dtype=torch.bool, device=product.device), product, input)
    return ltorch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)


@_instead_of(F.mse_loss)
def _mse_loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Thunder's has the dtype of the first; torch's broadcasts first, so that one without dimensions has a part in the dtype."""
    shape = torch.broadcast_shapes(input.shape, target.shape)
    expanded = [t if t.shape == shape else ltorch.expand(t, shape) for t in (input, target)]
    return ltorch.mse_loss(*_promoted(_Kind.DEFAULT, *expanded), *args, **kwargs)


@_instead_of(torch.copysign, torch.Tensor.copysign)
def _copysign(input: Any, other: Any) -> Any:
    """Thunder's has the dtype of the first."""
    return ltorch.copysign(*_promoted(_Kind.INT_TO_FLOAT, input, other))


@_instead_of(torch.addcmul, torch.Tensor.addcmul)
def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    """Of integers, torch's takes the number for an integer as well."""
    _, dtype = utils.elementwise_type_promotion(input, tensor1, tensor2, type_promotion_kind=_Kind.DEFAULT)
    return ltorch.addcmul(input, tensor1, tensor2, value=int(value) if dtypes.is_exact_dtype(dtype) else value)


_Kind = utils.ELEMENTWISE_TYPE_PROMOTION_KIND


def _promoted(kind: _Kind, *operands: Any) -> list[Any]:
    """The tensors among the operands in the dtype that the result is to have."""
    _, dtype = utils.elementwise_type_promotion(*operands, type_promotion_kind=kind)
    return [clang.maybe_convert_to_dtype(t, dtype) if isinstance(t, TensorProxy) else t for t in operands]
