"""What a program puts into attributes, containers, classes and globals while its trace is acquired: written anew in each call.

Thunder's interpreter runs Python on the user's own objects: a dict that caches a tensor would hold a proxy from then on, and attributes
of the jitted module itself are forgotten.  Both are taken out of the user's objects and written by the epilogue, with the tensors of the
call at hand; a guard sees that the places hold what they held.  What has no tensor in it stays as Python did it, once.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch
from thunder.core import prims
from thunder.core.interpreter import PseudoInst
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from thunder_norm.model_state.reachable import Place, Reachable, is_same
from thunder_norm.subclass import trace
from thunder_norm.subclass.acquisition import Acquisition
from thunder_norm.subclass.boundary_operators import bindable, guard
from thunder_norm.subclass.escapes import escape
from thunder_norm.subclass.proxy import SubclassProxy

_NAME = "keep_for_the_program"
_PACKS = (prims.PrimIDs.PACK_ATTR, prims.PrimIDs.PACK_BUFFER, prims.PrimIDs.PACK_SETITEM)
_ABSENT = object()

_current: contextvars.ContextVar[SideEffects | None] = contextvars.ContextVar("thunder_norm_side_effects", default=None)


def is_side_effect(bsym: BoundSymbol) -> bool:
    """Whether an operation of an epilogue writes into the user's objects."""
    return bsym.sym.id in _PACKS or bsym.sym.name.startswith(_NAME)


@contextlib.contextmanager
def watched(fn: Callable, args: tuple, kwargs: dict) -> Iterator[None]:
    """Look after what the program can reach while its trace is acquired; if that fails, everything is what it was."""
    effects = SideEffects(fn, args, kwargs)
    token = _current.set(effects)
    try:
        yield
    except BaseException:
        effects.undo()
        raise
    finally:
        _current.reset(token)


def write(ctx: Any, epilogue: TraceCtx, acquisition: Acquisition | None) -> None:
    """Write what the program has kept into the epilogue, and take it out of the user's objects."""
    effects = _current.get()
    if effects is not None:
        effects.write(ctx, epilogue, acquisition)


class _Proxies(Reachable):
    """What stands for tensors in some values."""

    def __init__(self, roots: Any):
        self.found: list[Any] = []
        super().__init__(roots)

    def _enter(self, value: Any) -> Any:
        if isinstance(value, TensorProxy | FakeTensor):
            self.found.append(value)
            return ()
        return super()._enter(value)


class SideEffects:
    """The places that a program can reach, as they were before it was interpreted."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict):
        self.fn = fn
        self.before = Reachable((fn, args, kwargs))

    def undo(self) -> None:
        """Let all places hold what they held."""
        for place in self.before.places:
            place.restore()

    def write(self, ctx: Any, epilogue: TraceCtx, acquisition: Acquisition | None) -> None:
        """See `write`.

        Raises:
            EscapeError: what the program keeps holds a tensor where it cannot be put in anew, or nobody guards the trace.
        """
        if acquisition is not None:
            _keep_plain(epilogue, acquisition)
        for name, value in self._attributes_of_root(ctx):
            self._write(epilogue, acquisition, [value], f"attribute {name!r}", _setter(self.fn, name))
        for place in self.before.places:
            if place.is_changed:
                self._write_place(epilogue, acquisition, place)

    def _attributes_of_root(self, ctx: Any) -> Iterator[tuple[str, Any]]:
        """The attributes that the program sets on the jitted module, which Thunder forgets."""
        if not isinstance(self.fn, torch.nn.Module):
            return
        for modified, modifications in ctx._additional_outputs.items():
            origin = modified.provenance
            is_dict = origin.inst is PseudoInst.LOAD_ATTR and origin.inputs[1].value == "__dict__"
            if is_dict and origin.inputs[0].inst is PseudoInst.INPUT_FN:
                yield from {key.value: value.value for _, _, key, value in modifications}.items()

    def _write_place(self, epilogue: TraceCtx, acquisition: Acquisition | None, place: Place) -> None:
        held, now = place.held, place.read()
        if isinstance(held, dict):
            touched = [k for k in {**held, **now} if held.get(k, _ABSENT) is not now.get(k, _ABSENT)]
            values = [now.get(k, _ABSENT) for k in touched]
        else:
            touched, values = None, list(now)
        known = set(map(id, held.values() if isinstance(held, dict) else held))
        if not _Proxies([v for v in values if id(v) not in known]).found:
            return
        place.write(held)
        what = f"what {type(place.owner).__name__} {getattr(place.owner, '__name__', '')} holds"
        self._write(epilogue, acquisition, values, what, lambda new: place.write(_updated(place, touched, new)))
        check = (lambda: is_same(held, place.read())) if touched is None else (lambda: _is_untouched(place, touched))
        acquisition.side_effect_guards.append(guard("check_kept_values", check))

    def _write(
        self, epilogue: TraceCtx, acquisition: Acquisition | None, values: list, what: str, put: Callable[[list], None]
    ) -> None:
        """Have the epilogue call `put` with values in which tensors stand for proxies."""
        known = set(self.before.known)
        leaves = tree_leaves(values, is_leaf=lambda v: id(v) in known)
        proxies = list({v.name: v for v in leaves if isinstance(v, TensorProxy)}.values())
        missed = [v for v in _Proxies(values).found if not any(v is p for p in leaves)]
        if missed or (proxies and acquisition is None):
            self.undo()
            raise escape(what, "proxy", (missed or proxies)[0])
        index = {p.name: i for i, p in enumerate(proxies)}

        def keep(*tensors: torch.Tensor) -> None:
            kept = [t if acquisition is None else acquisition.kept(t) for t in tensors]

            def real(v: Any) -> Any:
                return kept[index[v.name]] if isinstance(v, TensorProxy) else v.value if isinstance(v, NumberProxy) else v

            put(tree_map(real, values, is_leaf=lambda v: id(v) in known))

        with tracectx(epilogue):
            epilogue.bound_symbols.append(bindable(_NAME, keep)(*proxies, output=None))


def _setter(module: torch.nn.Module, name: str) -> Callable[[list], None]:
    def put(values: list) -> None:
        vars(module)[name] = values[0]

    return put


def _is_untouched(place: Place, touched: list[Any]) -> bool:
    now = place.read()
    return all(now.get(k, _ABSENT) is place.held.get(k, _ABSENT) for k in touched)


def _updated(place: Place, touched: list[Any] | None, new: list[Any]) -> Any:
    if touched is None:
        return type(place.held)(new)
    now = place.read()
    for k, v in zip(touched, new, strict=True):
        if v is _ABSENT:
            now.pop(k, None)
        else:
            now[k] = v
    return now


def _keep_plain(epilogue: TraceCtx, acquisition: Acquisition) -> None:
    """Let Thunder's writes into attributes and buffers take what is kept of a wrapper."""
    found: list[BoundSymbol] = []
    for bsym in epilogue.bound_symbols:
        value = bsym.args[-1] if bsym.sym.id in _PACKS else None
        kept = acquisition.kept(value.fake) if isinstance(value, SubclassProxy) else None
        if kept is not None and kept is not value.fake:
            with tracectx(epilogue):
                plain = trace.proxy_like(kept)
                found.append(bindable(_NAME, acquisition.kept)(value, output=plain))
            bsym = bsym.from_bsym(args=(*bsym.args[:-1], plain))
        found.append(bsym)
    epilogue.bound_symbols[:] = found
