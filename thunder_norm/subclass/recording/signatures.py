"""From the arguments of an aten overload to those of Thunder's symbol of the same name.

The two signatures often differ: ``aten.elu(self, alpha, scale, input_scale)`` is ``elu(a, alpha, inplace)`` in Thunder.  An
argument is passed on only to the parameter that means the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

# Arguments without meaning for the result, or that only say how torch computes it.
_WITHOUT_MEANING = frozenset(
    "layout pin_memory memory_format implicit non_blocking cudnn_enabled cudnn_enable sparse_grad path sparse".split()
)

# Operands: they mean the same in the same place, whatever they are called.
_OPERANDS = frozenset("self other exponent input".split())

_ALSO_CALLED = {
    "size": "shape",
    "train": "training",
    "split_size": "size_or_sections",
    "split_sizes": "size_or_sections",
    "sections": "indices_or_sections",
    "indices": "indices_or_sections",
    "dims": "dim",
}

_REDUCTIONS = ("none", "mean", "sum")


def arguments_for(symbol: Callable, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """How to call `symbol` so that it means ``func(*args, **kwargs)``; None if it cannot say the same."""
    parameters = _parameters(symbol)
    if parameters is None:
        return None
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):  # one that only hands on, to a namesake of torch's function
        return args, {k: v for k, v in kwargs.items() if k not in _WITHOUT_MEANING and v is not None}
    values: dict[str, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        if argument.name not in given or argument.name in _WITHOUT_MEANING:
            continue
        name, value = _translated(argument, position, given[argument.name], parameters)
        if name is not None and name not in values:
            values[name] = (value,) if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL else value
        elif not argument.has_default_value() or value != argument.default_value:
            return None
    missing = [n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and n not in values]
    if missing:
        return None
    bound = inspect.BoundArguments(
        inspect.Signature(list(parameters.values())), {n: values[n] for n in parameters if n in values}
    )
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _translated(argument: Any, position: int, value: Any, parameters: dict[str, inspect.Parameter]) -> tuple[str | None, Any]:
    """(parameter, value) that mean the same as `value` for the aten `argument`; None if there is no such parameter."""
    name = argument.name
    if name == "unbiased" and "correction" in parameters:
        return "correction", int(value)
    if name == "reduction" and name in parameters:
        return name, _REDUCTIONS[value]
    if name in parameters:
        return name, value
    also = _ALSO_CALLED.get(name)
    if also in parameters:
        return also, value
    in_its_place = list(parameters)[position] if position < len(parameters) else None
    if in_its_place is not None and (name in _OPERANDS or isinstance(argument.type, torch.TensorType)):
        return in_its_place, value
    return None, value


@functools.cache
def _parameters(symbol: Callable) -> dict[str, inspect.Parameter] | None:
    try:
        return dict(inspect.signature(getattr(symbol, "meta", symbol)).parameters)
    except (TypeError, ValueError):
        return None
