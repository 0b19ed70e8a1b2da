"""What a program puts into attributes, containers, classes and globals while its trace is acquired: written anew in each call.

Thunder's interpreter runs Python on the user's own objects: a dict that caches a tensor would hold a proxy from then on, and attributes
of the jitted module itself are forgotten.  Both are taken out of the user's objects and written by the epilogue, with the tensors of the
call at hand; a guard sees that the places hold what they held.  What has no tensor in it stays as Python did it, once.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from thunder_norm.model_state.escapes import escape
from thunder_norm.model_state.reachable import Place, Reachable
from thunder_norm.subclass import trace
from thunder_norm.subclass.acquisition import Acquisition
from thunder_norm.subclass.proxy import SubclassProxy
from thunder_norm.tracing.bindable import bindable, guard
from thunder.core import prims
from thunder.core.interpreter import PseudoInst
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

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
        _mend_writes(epilogue, acquisition)
        for name, value in self._attributes_of_root(ctx):
            self._write(epilogue, acquisition, [value], f"attribute {name!r}", _setter(self.fn, name))
            attributes = vars(self.fn)
            self._guard(acquisition, attributes.get(name), functools.partial(attributes.get, name))
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
        before = held if isinstance(held, dict) else dict(enumerate(held))
        after = now if isinstance(held, dict) else dict(enumerate(now))
        touched = [k for k in {**before, **after} if before.get(k, _ABSENT) is not after.get(k, _ABSENT)]
        position = {id(v): k for k, v in before.items()}
        # what was there stays what is there in the call at hand
        values = [_Same(position[id(v)]) if id(v) in position else v for v in (after.get(k, _ABSENT) for k in touched)]
        if not _Proxies(values).found:
            return
        place.write(held)
        is_map = isinstance(held, dict)

        def put(new: list) -> None:
            found = place.read() if is_map else dict(enumerate(place.read()))
            for k, v in zip(touched, [found[v.key] if isinstance(v, _Same) else v for v in new], strict=True):
                found.pop(k, None) if v is _ABSENT else found.update({k: v})
            place.write(found if is_map else type(held)(found.values()))

        def read() -> Any:
            current = place.read()
            return {k: current.get(k, _ABSENT) for k in touched} if is_map else current

        self._write(epilogue, acquisition, values, f"what {_described(place.owner)} holds", put)
        self._guard(acquisition, {k: held.get(k, _ABSENT) for k in touched} if is_map else held, read)

    def _guard(self, acquisition: Acquisition | None, held: Any, read: Callable[[], Any]) -> None:
        """The trace is for what the place held: for None, say, not for the tensor that the program puts there."""
        kind = _kind(held)
        if acquisition is not None:
            acquisition.side_effect_guards.append(guard("check_kept_values", lambda: _kind(read()) == kind))

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
        kept_of = [_keeping(acquisition, p) for p in proxies if acquisition is not None]

        def keep(*tensors: torch.Tensor) -> None:
            kept = [keep_one(t) for keep_one, t in zip(kept_of, tensors, strict=True)]

            def real(v: Any) -> Any:
                return kept[index[v.name]] if isinstance(v, TensorProxy) else v.value if isinstance(v, NumberProxy) else v

            put(tree_map(real, values, is_leaf=lambda v: id(v) in known))

        with tracectx(epilogue):
            epilogue.bound_symbols.append(bindable(_NAME, keep)(*proxies, output=None))


def _setter(module: torch.nn.Module, name: str) -> Callable[[list], None]:
    def put(values: list) -> None:
        vars(module)[name] = values[0]

    return put


@dataclass(frozen=True)
class _Same:
    """What is held at a place already, under a key or at a position."""

    key: Any


def _described(owner: Any) -> str:
    return f"{type(owner).__name__} {getattr(owner, '__qualname__', '')}".strip()


def _kind(value: Any) -> Any:
    """What a trace relies on about a value that is put in another's place: of tensors all but the data."""
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, dict):
        return type(value), tuple((k, _kind(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_kind, value))
    return (type(value), value) if isinstance(value, int | float | str | bool | None) else id(value)


def _mend_writes(epilogue: TraceCtx, acquisition: Acquisition | None) -> None:
    """Thunder's own writes: with what is kept of a wrapper, and buffers into the user's module unless a transform has put in its own.

    Thunder writes a buffer of the jitted module itself under the name ".running_mean", where nobody finds it.
    """
    found: list[BoundSymbol] = []
    for bsym in epilogue.bound_symbols:
        value = bsym.args[-1] if bsym.sym.id in _PACKS else None
        if acquisition is not None and isinstance(value, TensorProxy):
            keep = _keeping(acquisition, value)
            with tracectx(epilogue):
                plain = trace.proxy_like(acquisition.kept(acquisition.fake_of(value)))
                found.append(bindable(_NAME, keep)(value, output=plain))
            value = plain
        if bsym.sym.id is prims.PrimIDs.PACK_BUFFER:
            module, name, _ = bsym.args
            found.append(bindable(_NAME, _buffer_setter(name.removeprefix(".")))(module, value, output=None))
        else:
            found.append(bsym if value is None else bsym.from_bsym(args=(*bsym.args[:-1], value)))
    epilogue.bound_symbols[:] = found


def _keeping(acquisition: Acquisition, proxy: TensorProxy) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is kept of the tensor that a proxy stands for: without gradient if it has none in eager mode."""
    plain = acquisition.fakes.proxy_of(acquisition.kept(proxy.fake)) if isinstance(proxy, SubclassProxy) else proxy
    is_constant = plain is not None and not acquisition.autograd.requires_grad(plain)
    return lambda t: acquisition.kept(t).detach() if is_constant else acquisition.kept(t)


def _buffer_setter(name: str) -> Callable[[Any, Any], None]:
    path, _, own = name.rpartition(".")

    def put(module: Any, value: Any) -> None:
        buffers, used = module._model.get_submodule(path)._buffers, module._overrides_buffers.get(name)
        if used is buffers.get(own):  # no transform has put another in its place
            buffers[own] = value
        module.set_buffer(name, value)

    return put
