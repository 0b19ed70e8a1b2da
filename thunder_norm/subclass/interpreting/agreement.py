"""Whether Thunder's operation on plain tensors is torch's, as far as that shows without data: what it returns, and what it refuses.

Torch's function runs beside it on tensors without data.  Thunder's operation counts where both return the same classes, shapes, dtypes
and devices.  What torch refuses, Thunder may compute all the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from thunder_norm.errors import ThunderNormError
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.arguments import is_in_place, mapped
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.recording.record import in_autocast_region
from thunder_norm.tracing.torch_functions.data_dependence import READS_DATA
from thunder_norm.tracing.torch_functions.fake_norms import quiet
from thunder_norm.tracing.translation import for_torch
from thunder.core import devices, dtypes, prims
from thunder.core.interpreter import WrappedValue
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.torch import _torch_to_thunder_function_map

UNKNOWN = object()  # what torch returns needs data
_MAX_NUMEL = 1 << 16  # of tensors that are made to see whether torch refuses the operation with data as well
# What they refuse shows with data alone: bools, complex numbers, two dtypes.
_UNCHECKED_OF_BOOLS = frozenset("sub sub_ subtract subtract_ rsub __sub__ __rsub__ __isub__".split())
_UNCHECKED = frozenset("glu heaviside heaviside_ ldexp ldexp_ sign_".split())
# What they compute may not fit into the tensor that they write into, which tensors without data are not told.
_CASTS = frozenset("add_ sub_ mul_ div_ pow_ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ masked_fill_".split())
# They have no gradient for their weights, and refuse those that require grad.
_WEIGHTED = frozenset("binary_cross_entropy_with_logits cross_entropy multi_margin_loss nll_loss".split())
# What they return and how it lies in memory hangs on no device: tensors of the device "meta" tell it in C++, in a tenth of the time.  Not so
# convolutions and attention, for which each device has libraries that lay out their results.  Left out is what is looked at with data too.
_NAMES_OF_ANY_DEVICE = (
    *"addmm flatten reshape permute squeeze transpose unsqueeze __getitem__ expand view".split(),
    *"abs neg exp log sqrt rsqrt reciprocal sin cos tanh sigmoid erf relu square".split(),
    *"add mul true_divide __add__ __radd__ __mul__ __rmul__ __truediv__ __sub__ pow __pow__".split(),
    *"eq ne lt le gt ge where".split(),
    *"sum mean amax amin matmul __matmul__ mm bmm softmax log_softmax linear layer_norm gelu silu".split(),
)
_OF_ANY_DEVICE = frozenset(
    f
    for name in _NAMES_OF_ANY_DEVICE
    if name not in _UNCHECKED | _UNCHECKED_OF_BOOLS | _CASTS
    for owner in (torch, torch.Tensor, torch.nn.functional, torch._C._nn)
    if (f := getattr(owner, name, None)) is not None
)
# of tensors that are contiguous
_OF_ANY_DEVICE_IF_CONTIGUOUS = frozenset({torch.nn.functional.batch_norm})
# Without a history a CPU has a kernel for them whose results are contiguous; tensors without data never meet it.
_MAX_POOLS = frozenset({torch.max_pool1d, torch.nn.functional.max_pool1d})
_PLAIN = (bool, int, float, complex, str, dtypes.dtype, devices.Device, torch.dtype, torch.device, type(None))
_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException, ThunderNormError)


class HandedBack(NamedTuple):
    """What a function returns that returns one of its arguments: ``x.float()`` of a float, `dropout` that drops nothing."""

    position: int  # among the tensors given
    value: torch.Tensor


def of_torch(
    acquisition: Acquisition, torch_fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]
) -> tuple[Any, WrappedValue | None]:
    """What torch's function returns for tensors without data, the exception that it raises with data too, or `UNKNOWN`.

    Beside it the argument that it hands back as it is; None where it makes another tensor.
    Under autocast it is unknown: without data a function that calls others (`linalg.pinv`) may return another dtype than with it.
    """
    found = _of_torch(acquisition, torch_fn, args, kwargs)
    if type(found) is not HandedBack:
        return found, None
    given = [v for v in tree_leaves((_unwrapped(args), _unwrapped(kwargs))) if isinstance(v, TensorProxy)]
    same = given[found.position]
    return found.value, next((a for a in (*args, *kwargs.values()) if a.value is same), None)


def _of_torch(
    acquisition: Acquisition, torch_fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]
) -> Any:
    if in_autocast_region() or torch._C._is_any_autocast_enabled():
        return UNKNOWN
    call = _Call(torch_fn, _unwrapped(args), _unwrapped(kwargs), functools.partial(stride_of, acquisition))
    if getattr(torch_fn, "__name__", "") in _WEIGHTED and (error := call.error_of_autograd(acquisition)) is not None:
        return error
    key = call.key()
    found = key if key is None else acquisition.outcomes.get(key, key)
    if found is key:
        found = call.outcome(acquisition.fakes.mode)
    if key is not None:
        acquisition.outcomes[key] = found
    if torch_fn in _MAX_POOLS and isinstance(found, torch.Tensor) and found.device.type == "cpu":
        return found if has_history(acquisition, args[0].value) else found.contiguous()
    return found


def has_history(acquisition: Acquisition, p: Any) -> bool:
    """Whether gradients of a plain tensor are recorded."""
    return is_grad_enabled() and isinstance(p, TensorProxy) and acquisition.autograd.requires_grad(p)


def of_numbers(torch_fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> torch.Tensor | None:
    """The tensor without dimensions that torch's function returns for numbers alone; None where it is given tensors, or returns others."""
    given = _unwrapped(args), _unwrapped(kwargs)
    if not all(isinstance(v, bool | int | float | complex | str | None) for v in tree_leaves(given)):
        return None
    with _disable_current_modes():
        found = torch_fn(*given[0], **given[1])
    return found if isinstance(found, torch.Tensor) and found.ndim == 0 else None


def refused_integers(torch_fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Exception | None:
    """What torch's function raises of integers and bools, which Thunder's takes where torch's does not (``i.div_(2)``, ``b += 1``).

    Nobody asks how the tensors lie: of a function that is transformed that is not known.  Where torch looks at them it is not asked: integers
    that are made up may be lengths that fit nothing.
    """
    given = _unwrapped(args), _unwrapped(kwargs)
    if not any(isinstance(v, TensorProxy) and dtypes.is_exact_dtype(v.dtype) for v in tree_leaves(given)):
        return None
    call = _Call(torch_fn, *given, lambda _: None)
    if (key := call.key()) in _TAKEN:
        return None
    found = call.outcome(FakeTensorMode(allow_non_fake_inputs=True), may_make_up=False)
    if isinstance(found, Exception):
        return found
    if key is not None:
        if len(_TAKEN) == _MOST_TAKEN:
            _TAKEN.clear()
        _TAKEN.add(key)
    return None


_TAKEN: set[Any] = set()  # calls that torch does not refuse, by their keys
_MOST_TAKEN = 1 << 12


@dataclass(frozen=True)
class _Call:
    function: Callable
    args: tuple
    kwargs: dict
    stride_of: Callable[[TensorProxy], tuple[int, ...] | None]

    def key(self) -> Any:
        """What the outcome depends on; None where that cannot be compared."""
        described: list[Any] = []
        if not all([self._describe(v, described) for v in (*self.args, *self.kwargs.values())]):
            return None
        return self.function, len(self.args), tuple(self.kwargs), tuple(described), torch.get_default_dtype()

    def _describe(self, v: Any, described: list[Any]) -> bool:
        """Add what an argument is to a list; whether that says all of it."""
        kind = type(v)
        if isinstance(v, TensorProxy):
            described.append((v.shape, v.dtype, v.device, self.stride_of(v)))
        elif kind is tuple or kind is list:
            described.append((kind, len(v)))
            return all([self._describe(each, described) for each in v])
        elif isinstance(v, _PLAIN):
            described.append((kind, v, math.copysign(1, v) if isinstance(v, float) else None))
        else:
            return False
        return True

    def outcome(self, mode: FakeTensorMode, may_make_up: bool = True) -> Any:
        """What `of_torch` finds, or a `HandedBack` of it; `may_make_up`: values, for a function that reads some."""
        proxies = [v for v in tree_leaves((self.args, self.kwargs)) if isinstance(v, TensorProxy)]
        is_of_any = self.function in _OF_ANY_DEVICE or (
            self.function in _OF_ANY_DEVICE_IF_CONTIGUOUS and all(self._empty(p, "meta").is_contiguous() for p in proxies)
        )
        if is_of_any and (found := self._outcome_of_any_device(proxies, mode)) is not UNKNOWN:
            return found
        if getattr(self.function, "__name__", "") in _CASTS and (error := self._cast_error()) is not None:
            return error
        is_checked = not self._needs_data()
        try:
            with mode, quiet():
                found = self._run(self._empty)
        except _NEEDS_DATA:
            return UNKNOWN
        except Exception as e:  # noqa: BLE001 - what it is shows with data
            if not may_make_up and any(text in str(e) for text in READS_DATA):
                return UNKNOWN
            found, is_checked = UNKNOWN, False
        if is_checked or sum(math.prod(p.shape) for p in proxies) > _MAX_NUMEL:
            return found
        try:
            with _disable_current_modes(), torch.random.fork_rng(devices=[]):
                self._run(lambda p: self._empty(p).fill_(1))
        except Exception as e:  # noqa: BLE001 - the program's
            return e
        return found

    def _needs_data(self) -> bool:
        """Whether tensors without data may not show that torch refuses the call."""
        name = getattr(self.function, "__name__", "")
        if name not in _UNCHECKED_OF_BOOLS:
            return name in _UNCHECKED
        given = tree_leaves((self.args, self.kwargs))
        return any(isinstance(v, bool) or (isinstance(v, TensorProxy) and v.dtype is dtypes.bool8) for v in given)

    def _cast_error(self) -> Exception | None:
        """What the function raises of tensors of one entry each, with data."""
        try:
            with _disable_current_modes():
                self._run(lambda p: torch.ones((1,) * p.ndim, dtype=for_torch(p.dtype)))
        except _NEEDS_DATA:
            return None
        except Exception as e:  # noqa: BLE001 - the program's
            return e
        return None

    def error_of_autograd(self, acquisition: Acquisition) -> RuntimeError | None:
        """What the function raises of tensors that require grad as the program's do."""
        try:
            with acquisition.fakes.mode, quiet():
                self._run(lambda p: self._empty(p).requires_grad_(has_history(acquisition, p)), is_recorded=True)
        except RuntimeError as e:
            return e if "is not differentiable with respect to" in str(e) else None
        except Exception:  # noqa: BLE001 - of something else than gradients
            return None
        return None

    def _outcome_of_any_device(self, proxies: list[TensorProxy], mode: FakeTensorMode) -> Any:
        """What the function returns, found without a device; `UNKNOWN` if it raises, or has tensors of several."""
        if len({p.device for p in proxies}) != 1:
            return UNKNOWN
        try:
            with _disable_current_modes():
                found = self._run(lambda p: self._empty(p, "meta"))
        except Exception:  # noqa: BLE001 - what it is shows with a device
            return UNKNOWN
        device = for_torch(proxies[0].device)

        def made_of(t: torch.Tensor) -> torch.Tensor:
            with _disable_current_modes():
                alone = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
                return FakeTensor(mode, alone, device)

        value = _value(found)
        made = made_of(value) if type(value) is torch.Tensor else tree_map_only(torch.Tensor, made_of, value)
        return found._replace(value=made) if type(found) is HandedBack else made

    def _run(self, make: Callable[[TensorProxy], torch.Tensor], is_recorded: bool = False) -> Any:
        given: list[torch.Tensor] = []

        def noting(p: TensorProxy) -> torch.Tensor:
            given.append(make(p))
            return given[-1]

        args, kwargs = _for_torch(self.args, noting), {k: _for_torch(v, noting) for k, v in self.kwargs.items()}
        with torch.set_grad_enabled(is_recorded):
            found = self.function(*args, **kwargs)
        position = next((i for i, t in enumerate(given) if t is found), None)
        return found if position is None else HandedBack(position, found)

    def _empty(self, p: TensorProxy, device: str | None = None) -> torch.Tensor:
        shape, dtype, device = tuple(map(int, p.shape)), for_torch(p.dtype), device or for_torch(p.device)
        stride = self.stride_of(p)
        if stride is None or len(stride) != len(shape):  # a view of it since, in place
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _value(found: Any) -> Any:
    return found.value if type(found) is HandedBack else found


def agrees(found: Any, wanted: Any) -> bool:
    """Whether what Thunder's operation returns is of torch's classes, shapes, dtypes and devices; named tuples may be plain ones."""
    if wanted is UNKNOWN:
        return True
    found = _unwrapped(found)
    if isinstance(wanted, torch.Tensor):
        return (
            isinstance(found, TensorProxy)
            and tuple(found.shape) == tuple(wanted.shape)
            and dtypes.to_torch_dtype(found.dtype) is wanted.dtype
            and devices.to_torch_device(found.device) == wanted.device
        )
    if isinstance(wanted, tuple | list) and any(isinstance(v, torch.Tensor) for v in wanted):
        is_of_class = isinstance(found, list if isinstance(wanted, list) else tuple)
        return is_of_class and len(found) == len(wanted) and all(map(_is_no_tensor_or_agrees, found, wanted))
    return not isinstance(found, TensorProxy) and not (is_constant(wanted) and isinstance(found, NumberProxy))


def _is_no_tensor_or_agrees(found: Any, wanted: Any) -> bool:
    """Also where an operation leaves one of its results out: on fakes that is a tensor without entries, else None."""
    is_left_out = found is None and isinstance(wanted, torch.Tensor) and wanted.shape == (0,)
    return is_left_out or agrees(found, wanted)


def note_strides(acquisition: Acquisition, found: Any, wanted: Any, given: Any) -> None:
    """Remember how torch lays out what its function returns, which Thunder's operation agrees with: torch runs that in the end.

    Where nobody knows how what it is given lies, nobody knows it of what it returns.
    """
    if not all(_is_placed(acquisition, p) for p in tree_leaves(_unwrapped(given)) if isinstance(p, TensorProxy)):
        return
    for p, t in zip(tree_leaves(_unwrapped(found)), tree_leaves(wanted), strict=False):
        if isinstance(p, TensorProxy) and isinstance(t, torch.Tensor) and t.layout is torch.strided:
            acquisition.fakes.strides.setdefault(p.name, t.stride())


def _is_placed(acquisition: Acquisition, p: TensorProxy) -> bool:
    """Whether it is known how a tensor lies; those of at most one dimension that operations make lie in one way."""
    return stride_of(acquisition, p) is not None or p.history is None and p.ndim == 0


def stride_of(acquisition: Acquisition, proxy: TensorProxy) -> tuple[int, ...] | None:
    """The strides in eager mode of what a plain proxy stands for, None where they are not known.

    Of what never was a call in the program (``x > y``, ``x.T``, the rows of ``for row in x``) they are those of the operation in the trace.
    """
    fakes = acquisition.fakes
    known = fakes.stride_of(proxy)
    if known is not None or proxy.history is not None or proxy.name in fakes.unplaced:
        return known
    fakes.unplaced.add(proxy.name)
    trace = get_jit_ctx().computation_trace
    made_by = next((b for b in reversed(trace.bound_symbols) if any(p.name == proxy.name for p in b.flat_proxy_outs)), None)
    torch_fn = None if made_by is None else _torch_functions().get(made_by.sym)
    if made_by is None or torch_fn is None or is_in_place(torch_fn):
        return None
    found = _value(_Call(torch_fn, made_by.args, made_by.kwargs, functools.partial(stride_of, acquisition)).outcome(fakes.mode))
    if agrees(made_by.output, found):
        note_strides(acquisition, made_by.output, found, (made_by.args, made_by.kwargs))
    return fakes.strides.get(proxy.name)


@functools.cache
def _torch_functions() -> dict[Symbol, Callable]:
    """The functions of torch by Thunder's symbols for them."""
    found = {symbol: fn for fn, symbol in reversed(_torch_to_thunder_function_map.items()) if isinstance(symbol, Symbol)}
    return {prims.transpose: torch.permute, **found}  # what Thunder writes for ``x.T`` and ``x.mT``


def is_constant(wanted: Any) -> bool:
    """Whether torch's function returns a number that dtypes and shapes decide."""
    return type(wanted) in (bool, int)


def _unwrapped(value: Any) -> Any:
    """What a value of the interpreter is, with what lists, tuples, slices and dicts hold."""
    value = value.value if isinstance(value, WrappedValue) else value
    if type(value) in (list, tuple):
        return type(value)(map(_unwrapped, value))
    if type(value) is slice:
        return slice(*map(_unwrapped, (value.start, value.stop, value.step)))
    return {k: _unwrapped(v) for k, v in value.items()} if isinstance(value, dict) else value


def _for_torch(value: Any, make: Callable[[TensorProxy], torch.Tensor]) -> Any:
    """An argument as torch's function takes it, `make` giving its tensors."""

    def leaf(v: Any) -> Any:
        if isinstance(v, NumberProxy) and v.value is None:
            raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
        return make(v) if isinstance(v, TensorProxy) else for_torch(v)

    return mapped(value, leaf)
