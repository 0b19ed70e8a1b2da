"""Values as JSON and back: numbers, dtypes, kinds of norms and nested structures, each by a name that is known here."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import SavedFileError, with_details
from thunder_norm.norms.saving.files import dtype_named

KINDS: dict[str, type[NormedTensor]] = {
    kind.__name__: kind for kind in (L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor)
}
_TYPES = {t.__name__: t for t in (bool, int, float, complex, str, bytes, type(None))}
_FORMATS = {str(f): f for f in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)}
_BUILT_IN = (list, tuple, dict, OrderedDict)

# What further types of values are: from a value to JSON, and back; None if it is not one of them.
Special = Callable[[Any], Any]


def encode(value: Any, special: Special = lambda _: None) -> Any:
    """A value as JSON.

    Raises:
        SavedFileError: a value that has no name here.
    """
    known = special(value)
    if known is not None:
        return known
    cls = type(value)
    if value is None or cls in (bool, int, str) or cls is float and math.isfinite(value):
        return value
    if cls is list:
        return [encode(v, special) for v in value]
    if cls in (tuple, torch.Size):
        return {"tuple" if cls is tuple else "size": [encode(v, special) for v in value]}
    if cls in (dict, OrderedDict):
        items = [[encode(k, special), encode(v, special)] for k, v in value.items()]
        return {"dict" if cls is dict else "ordered": items}
    found = _encoded_leaf(value)
    if found is not None:
        return found
    if cls in _pytree.SUPPORTED_NODES and not hasattr(value, "_fields") and cls.__module__ != "collections":
        node = _pytree.SUPPORTED_NODES[cls]
        children, context = node.flatten_fn(value)
        return {"node": _name(cls), "context": encode(context), "children": [encode(v, special) for v in children]}
    raise SavedFileError(f"a {cls.__module__}.{cls.__qualname__} cannot be saved: {_shortened(value)}")


def _encoded_leaf(value: Any) -> Any:
    if type(value) is float:
        return {"float": repr(value)}
    if type(value) is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if type(value) is slice:
        return {"slice": [encode(v) for v in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": 0}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.memory_format):
        return {"format": str(value)}
    if isinstance(value, type) and _kind_named(value.__name__) is value:
        return {"kind": value.__name__}
    if isinstance(value, type) and _TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    return None


def decode(data: Any, special: Special = lambda _: None) -> Any:
    """The value that `encode` made this JSON of; `special` gets each object and says what it is, or None.

    Raises:
        SavedFileError: a class of the result that is not known in this process.
        Exception: it is no such JSON.
    """
    if data is None or type(data) in (bool, int, float, str):
        return data
    if type(data) is list:
        return [decode(v, special) for v in data]
    known = special(data)
    if known is not None:
        return known
    if "node" in data:
        node = _node_named(data["node"])
        return node.unflatten_fn([decode(v, special) for v in data["children"]], decode(data["context"]))
    ((tag, content),) = data.items()
    if tag in ("tuple", "size"):
        return (tuple if tag == "tuple" else torch.Size)([decode(v, special) for v in content])
    if tag in ("dict", "ordered"):
        items = [(decode(k, special), decode(v, special)) for k, v in content]
        return dict(items) if tag == "dict" else OrderedDict(items)
    return _LEAVES[tag](content)


def _kind_named(name: str) -> type[NormedTensor] | None:
    """One of the library's kinds; those of grouped kernels are made when they are asked for."""
    prefix, _, groups = name.partition("_groups")
    is_grouped = prefix == RMSToRMSConvTensor.__name__ and groups.isdecimal()
    return RMSToRMSConvTensor.grouped(int(groups)) if is_grouped else KINDS.get(name)


def _known_kind(name: str) -> type[NormedTensor]:
    kind = _kind_named(name)
    if kind is None:
        raise SavedFileError(f"a kind of norm that is not known here: {name}")
    return kind


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "float": lambda v: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[v],
    "complex": lambda v: complex(decode(v[0]), decode(v[1])),
    "slice": lambda v: slice(*map(decode, v)),
    "ellipsis": lambda v: ...,
    "dtype": dtype_named,
    "device": torch.device,
    "format": _FORMATS.__getitem__,
    "kind": _known_kind,
    "type": _TYPES.__getitem__,
}


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _node_named(name: str) -> Any:
    """A class that torch's pytrees know in this process: nothing is imported because a file says so.

    Raises:
        SavedFileError: there is none of that name.
    """
    for cls, node in _pytree.SUPPORTED_NODES.items():
        if cls not in _BUILT_IN and cls.__module__ != "collections" and _name(cls) == name:
            return node
    raise SavedFileError(
        with_details(
            f"the file has a {name}, which is not known in this process",
            instead=f"import {re.split('[.]', name)[0]} before, or what defines the class",
        )
    )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
