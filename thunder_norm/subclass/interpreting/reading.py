"""Values that a program asks for: conditions, ``int(x)``, ``x.tolist()``, ``range(n.item())``, ``torch.equal(x, y)``.

The program is told what eager PyTorch would tell it for the inputs of the call at hand, and the prologue of its trace asks again
(`data_sizes`).  Of a number that is compared, what counts is the answer and not the number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.arguments import mapped, value_of
from thunder_norm.subclass.acquiring.data_sizes import UnknownValueError
from thunder_norm.subclass.acquiring.values import (
    INDEXING,
    MAKERS,
    NUMBERS_ALONE,
    SETTING,
    TEXTS,
    is_unknown,
    is_unknown_number,
    symbols_of,
)
from thunder_norm.tracing.lookasides import look_up
from thunder_norm.tracing.python.comparisons import COMPARISONS
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent
from thunder.core import dtypes
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, _interpret_call, do_raise, wrap
from thunder.core.proxies import TensorProxy


def _asked() -> dict[Any, Callable]:
    """Functions whose answers are numbers, and what gives them for tensors."""
    numbers = (bool, int, float, complex, operator.truth, operator.not_, operator.index)
    found: dict[Any, Callable] = {fn: fn for fn in numbers} | {fn: _of_numbers(fn) for fn in COMPARISONS.values()}
    found |= {fn: _of_numbers(pythons) for fn, pythons in NUMBERS_ALONE.items()}
    for fn in (torch.Tensor.item, torch.Tensor.tolist, torch.equal, torch.allclose, torch.is_nonzero):
        for name in (fn, getattr(torch.Tensor, fn.__name__), *symbols_of(fn)):
            found[name] = fn
    return found


def _of_numbers(fn: Callable) -> Callable:
    """A function of numbers, of tensors that hold them: Python compares more exactly than torch."""
    return lambda *values, **options: fn(*(v.item() if isinstance(v, torch.Tensor) else v for v in values), **options)


def _taking_numbers() -> dict[Any, Callable | None]:
    """Functions that take numbers, and what makes one of a tensor among their arguments."""
    found: dict[Any, Callable | None] = {
        fn: operator.index for fn in (range, list.__getitem__, tuple.__getitem__, *INDEXING, *SETTING)
    }
    for fn in (torch.arange, *MAKERS):
        found |= {name: torch.Tensor.item for name in (fn, *symbols_of(fn))}
    return found | dict.fromkeys((max, min, sorted)) | {all: bool}


_ASKED, _TAKING_NUMBERS = _asked(), _taking_numbers()


def asks_for_truth(fn: Callable, args: tuple[WrappedValue, ...]) -> bool:
    """Whether `fn` is ``.item()`` of a condition, for which Thunder has a number; nothing is computed with it."""
    is_item = look_up(_ASKED, fn) is torch.Tensor.item
    return is_item and len(args) > 0 and type(args[0].value) is TensorProxy and args[0].value.dtype is dtypes.bool8


def lookaside(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...], what: str) -> Callable | None:
    """What to call instead of `fn`, which needs the values of tensors or numbers among its arguments; None if that is refused.

    Args:
        acquisition: the one at hand.
        fn: what the program calls.
        args: what it is called with.
        what: what the values are needed for.
    """
    if not acquisition.may_replace() or not acquisition.sizes.are_known or acquisition.is_transformed:
        return None  # what refuses it says why
    asked = look_up(_ASKED, fn)
    if fn in TEXTS:
        return lambda *args, **kwargs: _answered(acquisition, what, lambda: _text(acquisition, fn, args, kwargs))
    if asked is not None:
        return lambda *args, **kwargs: _answered(acquisition, what, lambda: _said(acquisition, asked, args, kwargs))
    if fn not in _TAKING_NUMBERS:
        return None
    if _TAKING_NUMBERS[fn] is None and any(isinstance(v, TensorProxy) for v in _entries(args)):
        return None  # what they return is one of the tensors
    return lambda *args, **kwargs: _call_with_numbers(acquisition, fn, args, kwargs, what)


def _entries(args: tuple[WrappedValue, ...]) -> list[Any]:
    values = [value_of(a) for a in args]
    return [value_of(e) for v in values for e in (v if type(v) in (list, tuple) else (v,))]


def _said(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Any:
    """What `fn` says of values; other arguments are as they are."""
    options = {name: value_of(v) for name, v in kwargs.items()}
    given = [value_of(a) for a in args]
    places = [i for i, v in enumerate(given) if is_unknown(v)]

    def ask(*tensors: torch.Tensor) -> Any:
        filled = list(given)
        for place, t in zip(places, tensors, strict=True):
            filled[place] = t
        return fn(*filled, **options)

    return _ask(acquisition, ask, [given[i] for i in places])


def _text(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> str:
    """What `fn` writes of values.  A tensor that requires grad is written with the name of what made it, of which a trace knows nothing."""
    given = [a.value for a in args], {name: a.value for name, a in kwargs.items()}
    unknown: list[Any] = []
    mapped(given, lambda v: unknown.append(v) if is_unknown(v) else None)
    differentiated = [isinstance(v, TensorProxy) and acquisition.autograd.requires_grad(v) for v in unknown]

    def written(tensors: Iterable[torch.Tensor]) -> str:
        remaining = zip(unknown, tensors, strict=True)

        def known(v: Any) -> Any:
            if not is_unknown(v):
                return v
            held, t = next(remaining)
            return t if isinstance(held, TensorProxy) else t.item()

        args, kwargs = mapped(given, known)
        return fn(*args, **kwargs)

    def ask(*tensors: torch.Tensor) -> str:
        said = written(t.detach() for t in tensors)
        if any(differentiated):
            with_names = [t.detach().requires_grad_(d) for t, d in zip(tensors, differentiated, strict=True)]
            if written(with_names) != said:
                raise UnknownValueError("a tensor that requires grad is written with the name of what made it: write x.detach()")
        return said

    return _ask(acquisition, ask, unknown)


def _ask(acquisition: Acquisition, fn: Callable, values: list[Any]) -> Any:
    return acquisition.ask(fn, [acquisition.fake_of(v) if isinstance(v, TensorProxy) else v for v in values])


def _answered(acquisition: Acquisition, what: str, answer: Callable[[], Any]) -> Any:
    try:
        found = answer()
    except UnknownValueError as e:
        return do_raise(acquisition.refuse(data_dependent(what, why=str(e))))
    except Exception as e:  # noqa: BLE001 - what eager PyTorch raises: of a condition on several values, for instance
        return do_raise(e)
    return _wrapped(found)


def _wrapped(value: Any, *origins: WrappedValue) -> WrappedValue:
    return wrap(value, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[o.provenance for o in origins]))


def _call_with_numbers(
    acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue], what: str
) -> Any:
    """Call `fn` with numbers for what is unknown among its arguments."""
    of_tensor = _TAKING_NUMBERS[fn]
    is_index = fn in INDEXING or fn in SETTING  # to which tensors may belong, but not as ends of slices

    def known(v: Any, in_slice: bool = False) -> Any:
        v = v.value if isinstance(v, WrappedValue) else v
        if is_unknown_number(v):
            return _ask(acquisition, torch.Tensor.item, [v])
        if isinstance(v, TensorProxy) and of_tensor is not None and (in_slice or not is_index):
            return _ask(acquisition, of_tensor, [v])
        if isinstance(v, slice):
            return slice(*(known(end, in_slice=True) for end in (v.start, v.stop, v.step)))
        return type(v)(map(known, v)) if type(v) in (list, tuple) else v

    own = 1 if is_index or fn in (list.__getitem__, tuple.__getitem__) else 0
    end = 2 if fn in SETTING else len(args)  # what is written is what it is
    try:
        filled = [*args[:own], *(_wrapped(known(a), a) for a in args[own:end]), *args[end:]]
    except UnknownValueError as e:
        return do_raise(acquisition.refuse(data_dependent(what, why=str(e))))
    except Exception as e:  # noqa: BLE001 - a number that is no index, for instance
        return do_raise(e)
    return _interpret_call(fn, *filled, **kwargs)
