"""Of which class eager mode's tensor is that a program computes of tensors whose classes do not dispatch.

A trace has plain tensors.  Where the program asks, the operations that a tensor comes from are done on the meta device, on objects of
those classes: their ``__torch_function__`` says what comes out, and gives it attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedSubclassError, with_details
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.snapshots import same_as
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.shared_memory.aliases import given_as, noted_tensors
from thunder_norm.tracing.torch_functions.function_overrides import functions_of, is_plain_class, on_meta
from thunder_norm.trees import map_leaves
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import get_tracectx

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_KNOWN = "_thunder_norm_computed_objects"  # of an acquisition: by the name of the proxy


def object_of(proxy: TensorProxy) -> torch.Tensor | None:
    """What eager mode has for a tensor that the program computes, without data; None for a plain tensor.

    Raises:
        UnsupportedSubclassError: nobody knows what the class does with the operation that it comes from.
    """
    if not any(_is_of_class(x) for x in noted_tensors()):
        return None
    with _disable_current_modes(), torch.no_grad():
        found = _object(proxy)
    return found if _is_of_class(found) else None


def _is_of_class(x: torch.Tensor) -> bool:
    return type(x) not in _PLAIN and is_plain_class(type(x))


def _object(proxy: TensorProxy) -> torch.Tensor:
    known: dict[str, torch.Tensor] = vars(get_jit_ctx()).setdefault(_KNOWN, {})
    if proxy.name not in known:
        given = given_as(proxy)
        known[proxy.name] = _computed(proxy) if given is None else _given(proxy, given)
    return known[proxy.name]


def _given(proxy: TensorProxy, given: torch.Tensor) -> torch.Tensor:
    found = on_meta(proxy)
    if not _is_of_class(given):
        return found
    if proxy.history is not None:
        guards.note_at(proxy.history, "type", None, type(given))
        for name, value in vars(given).items():
            guards.note_at(proxy.history, "own attribute", name, same_as(value))
    found = found.as_subclass(type(given))
    found.__dict__.update(vars(given))
    return found


def _computed(proxy: TensorProxy) -> torch.Tensor:
    bsym = _maker(proxy)
    of_class = (
        [] if bsym is None else [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy) and _is_of_class(_object(p))]
    )
    if bsym is None or not of_class:
        return on_meta(proxy)
    args, kwargs = map_leaves(lambda v: _object(v) if isinstance(v, TensorProxy) else on_meta(v), (bsym.args, bsym.kwargs))
    place = next(i for i, p in enumerate(tree_leaves(bsym.output)) if isinstance(p, TensorProxy) and p.name == proxy.name)
    found = []
    for function in _called(bsym):
        try:
            found.append(tree_leaves(function(*args, **kwargs))[place])
        except Exception:  # noqa: BLE001 - not what stands behind the operation
            continue
    found = [x for x in found if isinstance(x, torch.Tensor) and tuple(x.shape) == tuple(proxy.shape)]
    if not found or any(type(x) is not type(found[0]) or vars(x) != vars(found[0]) for x in found):
        raise UnsupportedSubclassError(
            with_details(
                f"the class of what {bsym.sym.name} makes of a {type(_object(of_class[0])).__qualname__}",
                at=location_of_user(),
                why="its class does not dispatch, and what it does with the operation of a trace is not known",
                instead="x.as_subclass(torch.Tensor) of what the program is given, if it is not to ask",
            )
        )
    return found[0]


def _called(bsym: BoundSymbol) -> list[Callable]:
    """What the program may have called: nothing in place, unless that is what the trace has."""
    if bsym.sym.is_prim and bsym.sym.name == "transpose":
        return [torch.permute]
    in_place = bsym.sym.name.endswith("_")
    name = bsym.sym.name.removeprefix("torch_")
    return [f for f in functions_of(name) if _writes(f.__name__) == in_place]


def _writes(name: str) -> bool:
    """Whether a method is one in place: ``add_``, ``__iadd__``."""
    return hasattr(torch.Tensor, f"__{name[3:]}") if name.startswith("__i") else name.endswith("_") and not name.startswith("__")


def _maker(proxy: TensorProxy) -> BoundSymbol | None:
    for scope in reversed(get_tracectx().scopes):
        for bsym in reversed(scope):
            made: Any = bsym.flat_proxy_outs
            if any(p.name == proxy.name for p in made) and all(p.name != proxy.name for p in bsym.flat_proxy_args):
                return bsym
    return None
