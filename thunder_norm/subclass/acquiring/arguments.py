"""Functions of torch's and their arguments, as the interpreter has them: what is inside of lists, dicts and slices, and what is written into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_norm import op_names
from thunder.core.interpreter import WrappedValue


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """An argument with `leaf` called for all that it holds, in tuples (named ones too), lists, sizes, dicts and slices."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, leaf) for v in value))
    if type(value) in (list, tuple, torch.Size):
        return type(value)(mapped(v, leaf) for v in value)
    if isinstance(value, dict):
        return {k: mapped(v, leaf) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(v, leaf) for v in (value.start, value.stop, value.step)))
    return leaf(value)


def is_in_place(fn: Callable) -> bool:
    """Whether a function of torch's writes into its first argument, by its name."""
    name = getattr(fn, "__name__", "")
    is_augmented = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    return is_augmented or name == "__setitem__" or op_names.is_in_place(name)


def value_of(a: Any) -> Any:
    """What an argument wrapped by the interpreter is, lists and tuples of wrapped values included."""
    value = a.value if isinstance(a, WrappedValue) else a
    return [value_of(v) for v in value] if type(value) in (list, tuple) else value
