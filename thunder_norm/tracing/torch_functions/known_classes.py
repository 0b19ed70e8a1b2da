"""Of which class each tensor of a program is, where that is derived from torch.Tensor and does not dispatch.

A trace has plain tensors.  Which of them a program takes for tensors of a class is known here by the names of their proxies; what is computed
with them is computed with plain ones, and what leaves the program is made of its class in the epilogue.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from thunder_norm.tracing.guarding.bindable import bindable, executor
from thunder_norm.tracing.shared_memory import aliases
from thunder_norm.tracing.shared_memory.freed_inputs import deleting_again
from thunder_norm.tracing.tags import OF_A_CLASS
from thunder_norm.tracing.translation import for_torch
from thunder_norm.wrapper_classes import gives_its_class
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx

_KNOWN = "_thunder_norm_classes_of_tensors"  # of an acquisition
_MET = "_thunder_norm_classes_are_met"  # of compile data


@dataclass
class _Known:
    """What is known in an acquisition.

    Attributes:
        classes: of what the program has computed, by name; of what it is given `aliases` knows it.
        restored: what the epilogue has made of its class, by name.
        leaves: the names of those at which the program has a history start.
        disabled: how many contexts the program is in that have classes say nothing.
    """

    classes: dict[str, type] = field(default_factory=dict)
    restored: dict[str, BoundSymbol] = field(default_factory=dict)
    leaves: set[str] = field(default_factory=set)
    disabled: int = 0


def _known() -> _Known:
    state = vars(get_jit_ctx())
    found = state.get(_KNOWN)
    if found is None:
        found = state[_KNOWN] = _Known()
    return found


def are_met() -> bool:
    """Whether the program has tensors of such classes."""
    if aliases.noted_of_classes():
        return True
    known = vars(get_jit_ctx()).get(_KNOWN)
    return known is not None and bool(known.classes)


def taken_met() -> bool:
    """Whether programs have had tensors of such classes since this was called last."""
    return vars(get_compile_data()).pop(_MET, False)


def class_of(proxy: TensorProxy) -> type:
    """The class that a plain proxy's tensor has in eager mode."""
    made = _known().classes.get(proxy.name)
    if made is not None:
        return made
    given = aliases.noted_of_classes().get(id(proxy.history))
    return torch.Tensor if given is None else type(given)


def class_of_wrapper(proxy: object) -> type | None:
    """The class of the wrapper, or object, that a proxy stands for; None of plain tensors, and of all else."""
    return proxy.class_of_wrapper if hasattr(type(proxy), "class_of_wrapper") else None  # type: ignore[attr-defined]


def note(proxy: TensorProxy, cls: type) -> None:
    """Note that what the program has computed is of a class."""
    _known().classes[proxy.name] = cls
    vars(get_compile_data())[_MET] = True


def note_leaf(proxy: TensorProxy) -> None:
    """Note that the program has a history start at what it has computed."""
    _known().leaves.add(proxy.name)


def asks(cls: type) -> bool:
    """Whether torch's functions ask a class of tensors what they are to do."""
    return cls is not torch.Tensor and cls.__torch_function__ is not torch._C._disabled_torch_function_impl


def asked_first(values: Iterable[Any]) -> type | None:
    """The class of the first tensor among values that torch's functions would ask; None if there is none, or classes are to say nothing."""
    if not are_met() or say_nothing():
        return None
    return next((cls for p in tree_leaves(list(values)) if type(p) is TensorProxy and asks(cls := class_of(p))), None)


def example(proxy: TensorProxy, cls: type) -> torch.Tensor:
    """A tensor of a class without numbers, of the dtype and device of a proxy."""
    like = torch.empty(0, dtype=for_torch(proxy.dtype), device=for_torch(proxy.device))
    if cls is torch.Tensor:
        return like
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor._make_subclass(cls, like)


def say_nothing() -> bool:
    """Whether the program has classes say nothing at the moment."""
    return _known().disabled > 0


@contextlib.contextmanager
def saying_nothing() -> Iterator[None]:
    """Have classes say nothing meanwhile."""
    enter()
    try:
        yield
    finally:
        leave()


def enter() -> None:
    """Have classes say nothing from here on."""
    _known().disabled += 1


def leave() -> None:
    """End what `enter` has begun."""
    _known().disabled -= 1


# -- what is given and what is returned -----------------------------------------------------------------------------------------


def taken_as_plain(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile an input is what torch says of it: its class is asked of its shape where the program asks."""
    return torch._C.DisableTorchFunctionSubclass() if gives_its_class(type(x)) else contextlib.nullcontext()


def mark(proxy: object, x: torch.Tensor) -> None:
    """Let it be seen that an input is of a class, and that it is to be computed with as a plain tensor."""
    if type(proxy) is TensorProxy and gives_its_class(type(x)):
        proxy.tags.add(OF_A_CLASS)
        vars(get_compile_data())[_MET] = True


_as_plain = executor.register_operator(
    "as_plain_tensor",
    meta=lambda x: TensorProxy(like=x),
    fn=lambda x: torch.Tensor.as_subclass(x, torch.Tensor),
)


def with_plain_inputs(trace: TraceCtx) -> TraceCtx:
    """A program that runs, which computes with plain tensors: torch would ask the classes of what it is given once more."""
    given = [p for p in trace.args if isinstance(p, TensorProxy) and OF_A_CLASS in p.tags]
    used = {p.name for b in trace.bound_symbols if _computes(b) for p in b.flat_proxy_args}
    given = [p for p in given if p.name in used]
    if not given or any(b.sym is _as_plain for b in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    with tracectx(new):
        made = [_as_plain.bind(p, output=TensorProxy(like=p)) for p in given]
    plain = {variableify(p): b.output for p, b in zip(given, made, strict=True)}
    rest = [b for b in trace.bound_symbols if b.sym.id is not prims.PrimIDs.DEL]
    first = next(i for i, b in enumerate(rest) if b.sym.id is not prims.PrimIDs.UNPACK_TRIVIAL)
    computed = [b.from_bsym_swap_proxies(plain, skip_output=True) if _computes(b) else b for b in rest[first:]]
    new.bound_symbols = [
        *rest[:first],
        *made,
        *_returning_given(computed, dict(zip((b.output.name for b in made), given, strict=True))),
    ]
    return deleting_again(new, trace)


def _returning_given(bsyms: list[BoundSymbol], given: dict[str, TensorProxy]) -> list[BoundSymbol]:
    """Have what was written into in place be returned as the object that it was given as: `given` has it by the name of the plain tensor."""
    for b in bsyms:
        pairs = zip(b.flat_proxy_args, b.flat_proxy_outs, strict=False) if b.sym.name == "update_aliases" else ()
        pairs = zip(b.args[1:2], b.flat_proxy_outs, strict=False) if b.sym.name in ("copy_", "torch_copy_") else pairs
        given |= {made.name: given[old.name] for old, made in pairs if getattr(old, "name", None) in given}
    *rest, returned = bsyms
    results, *saved = returned.args
    results = tree_map(lambda p: given.get(p.name, p) if isinstance(p, TensorProxy) else p, results)
    return [*rest, returned.from_bsym(args=(results, *saved))]


def _computes(bsym: BoundSymbol) -> bool:
    return bsym.sym.id not in (prims.PrimIDs.RETURN, prims.PrimIDs.DEL, prims.PrimIDs.UNPACK_TRIVIAL)


def returned(proxy: TensorProxy, epilogue: TraceCtx) -> TensorProxy:
    """What an epilogue hands out for what the program has computed: a tensor of its class."""
    known = _known()
    if proxy.name not in known.classes:
        return proxy
    if proxy.name not in known.restored:
        known.restored[proxy.name] = _restoring(proxy, known.classes[proxy.name], epilogue)
        epilogue.bound_symbols.append(known.restored[proxy.name])
    return known.restored[proxy.name].output


def handed_out(value: Any, epilogue: TraceCtx) -> Any:
    """A value that an epilogue hands out, in which tensors are of their classes, and in the objects that it makes for it."""
    if not _known().classes:
        return returned(value, epilogue) if type(value) is TensorProxy else value
    restore_kept(epilogue)
    return tree_map(lambda p: returned(p, epilogue) if type(p) is TensorProxy else p, value)


def restore_kept(epilogue: TraceCtx) -> None:
    """Have an epilogue put tensors of their classes where the program has put what it has computed."""
    known = _known()
    if not known.classes:
        return
    done = {id(b) for b in known.restored.values()}
    writing = [b for b in epilogue.bound_symbols if id(b) not in done]
    kept = {p.name: p for b in writing for p in b.flat_proxy_args if isinstance(p, TensorProxy) and p.name in known.classes}
    swaps = {variableify(p): returned(p, epilogue) for p in kept.values()}
    epilogue.bound_symbols[:] = [
        *known.restored.values(),
        *(b.from_bsym_swap_proxies(swaps, skip_output=True) for b in writing),
    ]


def _restoring(proxy: TensorProxy, cls: type, epilogue: TraceCtx) -> BoundSymbol:
    make = _leaf_of_class if proxy.name in _known().leaves else _of_class
    with tracectx(epilogue):
        return bindable(f"as_{cls.__name__}", functools.partial(make, cls))(proxy, output=TensorProxy(like=proxy))


def _of_class(cls: type, x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch.set_grad_enabled(x.requires_grad):  # an epilogue runs without gradients
        return x.as_subclass(cls)


def _leaf_of_class(cls: type, x: torch.Tensor) -> torch.Tensor:
    return torch.Tensor._make_subclass(cls, x, x.requires_grad)
