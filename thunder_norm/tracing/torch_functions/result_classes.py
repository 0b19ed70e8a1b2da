"""Of which class eager mode's results are, where inputs are of classes derived from torch.Tensor that do not dispatch.

A trace has plain tensors.  Torch's functions give results the class of their arguments, and a program may ask for it: ``type(x * 2)``,
``isinstance(x * 2, Image)``, ``(x * 2).method()``.  What results are is tried on the meta device, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedSubclassError, with_details
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.snapshots import same_as
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.shared_memory import aliases
from thunder_norm.tracing.torch_functions.function_overrides import functions_of, of_class, on_meta, overrides_torch_function
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

_UNKNOWN = "_thunder_norm_results_of_unknown_class"  # of the context: the names of what functions under transforms return
_TRIED = "_thunder_norm_classes_of_results"  # of the context: what was found for an operation, by its identity, and the operation


def example_of(proxy: TensorProxy) -> torch.Tensor | None:
    """A tensor on the meta device as what a plain proxy stands for; None if that is a plain tensor.

    Raises:
        UnsupportedSubclassError: it cannot be known.
    """
    given = aliases.noted_of_classes()
    examples: dict[str, torch.Tensor | None] = {}
    if id(proxy.history) in given:
        examples[proxy.name] = of_class(given[id(proxy.history)], on_meta(proxy))
    for scope in get_jit_ctx().computation_trace.scopes if given else ():
        for bsym in scope:
            tensors = [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
            examples |= {p.name: of_class(x, on_meta(p)) for p in tensors if (x := given.get(id(p.history))) is not None}
            if any(p.name in examples for p in tensors):
                made = (p.name for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy))
                examples |= zip(made, _results(bsym, examples), strict=True)
    if proxy.name not in examples:
        return None
    for key, x in given.items():
        if overrides_torch_function(type(x)):  # which may hand on attributes
            guards.note_at(aliases.way_to(key), "own attribute", "__dict__", same_as(vars(x)))
    example = examples[proxy.name]
    if example is None:
        raise UnsupportedSubclassError(
            with_details(
                f"of which class a result of a {' and a '.join(sorted({type(x).__qualname__ for x in given.values()}))} is",
                at=location_of_user(),
                why="functions of torch's that may stand behind an operation of the trace give several answers, or none",
                instead="x.as_subclass(torch.Tensor) of what the function is given",
            )
        )
    return example if type(example) is not torch.Tensor else None


def note_unknown(results: Sequence[Any]) -> None:
    """Note what torch's own transforms of functions return: they take tensors of such classes apart."""
    if aliases.noted_of_classes():
        names = (p.name for p in results if isinstance(p, TensorProxy))
        vars(get_jit_ctx()).setdefault(_UNKNOWN, set()).update(names)


def _results(bsym: BoundSymbol, examples: dict[str, torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """What torch's functions behind an operation return; None where they do not agree."""
    made = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
    if not vars(get_jit_ctx()).get(_UNKNOWN, set()).isdisjoint(p.name for p in made):
        return [None] * len(made)
    tried = vars(get_jit_ctx()).setdefault(_TRIED, {})
    if id(bsym) in tried:
        return tried[id(bsym)][1]
    args, kwargs = on_meta((bsym.args, bsym.kwargs), {name: t for name, t in examples.items() if t is not None})
    several = []
    with _disable_current_modes(), torch.no_grad():
        for function in _called(bsym):
            try:
                found = function(*args, **({} if function.__name__.startswith("__") else kwargs))
            except Exception:  # noqa: BLE001, S112 - not what stands behind the operation
                continue
            tensors = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
            if [tuple(t.shape) for t in tensors] == [tuple(p.shape) for p in made]:
                several.append(tensors)
    answers = [ts[0] if len({_kind(t) for t in ts}) == 1 else None for ts in zip(*several, strict=True)] or [None] * len(made)
    used = [t for p in bsym.flat_proxy_args if (t := examples.get(getattr(p, "name", ""))) is not None]
    if None in answers and not any(overrides_torch_function(type(t)) for t in used):  # torch's own gives the class of an argument
        (most, *_) = sorted((type(t) for t in used), key=lambda cls: -len(cls.__mro__))
        answers = [torch.Tensor._make_subclass(most, on_meta(p)) for p in made]
    found = answers
    tried[id(bsym)] = bsym, found
    return found


def _called(bsym: BoundSymbol) -> list[Callable]:
    """What the program may have called: nothing in place, unless that is what the trace has."""
    if bsym.sym.is_prim and bsym.sym.name == "transpose":
        return [torch.permute]
    in_place = bsym.sym.name.endswith("_")
    return [f for f in functions_of(bsym) if _writes(f.__name__) == in_place]


def _writes(name: str) -> bool:
    """Whether a method is one in place: ``add_``, ``__iadd__``."""
    return hasattr(torch.Tensor, f"__{name[3:]}") if name.startswith("__i") else name.endswith("_") and not name.startswith("__")


def _kind(t: torch.Tensor) -> tuple[Any, ...]:
    return type(t), tuple(t.shape), repr(sorted(vars(t).items()))
