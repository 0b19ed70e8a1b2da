"""Calls that end in an exception: what the program has written before stays, as in eager mode.

What a program puts into objects is written by its epilogue, which is not reached where its acquisition or its computation raises.  By then
nothing has been written, or what was is put back here; so the program itself runs, in Python, and raises what it raises with all that it has
done until then.  Where that cannot be, an error says what is lost.
"""

from __future__ import annotations

import contextvars
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from thunder_norm.errors import RunByPythonWarning, ThunderNormError, UnsupportedOpError, with_details
from thunder_norm.random_states import remembered
from thunder_norm.tracing.calls import buffers
from thunder_norm.tracing.member_dicts import has_written
from thunder_norm.tracing.shared_memory.writes import targets, writes
from thunder_norm.tracing.tags import has_any_tag
from thunder_norm.tracing.torch_functions.known_values import REPLACED
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers, own_generators
from thunder_norm.user_code import user_line_of
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.jit_ext import JitCtx
from thunder.core.module import ThunderModule
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

KEEPS = "keep_for_the_program"  # what an epilogue's function is called that writes into objects
COPIES = "copy_into_inputs"
_WRITES_LATER = (KEEPS, COPIES, "set_data", "attach_hook")  # how functions of epilogues begin that write into what was there
PACKS = (prims.PrimIDs.PACK_ATTR, prims.PrimIDs.PACK_BUFFER, prims.PrimIDs.PACK_SETITEM)
_CHECK = ".check"  # how operations of a trace that is being acquired end that look at what a program asserts
_CHECKS = "thunder_norm_check"  # how they begin in the one that runs
# of compile data
_HAS_WRITTEN = "_thunder_norm_has_written"  # the program whose acquisition failed
_UNDO = "_thunder_norm_undo_of_call"  # what the acquisition for the call at hand has left in the user's objects
_MOST_BYTES = 2**22  # of inputs that are copied in each call, to be put back
_CONTAINERS = (list, tuple, dict, set)
_AS_THEY_ARE = (prims.PrimIDs.COPY_, prims.PrimIDs.UPDATE_ALIASES, prims.PrimIDs.RETURN)


class Raised(Exception):
    """A call has ended in `error`, before anything was written; `hindrance`: or it has written something that is not put back."""

    def __init__(self, error: Exception, hindrance: str | None = None):
        super().__init__(error)
        self.error, self.hindrance = error, hindrance


# -- while a trace is acquired ------------------------------------------------------------------------------------------------

_programs: contextvars.ContextVar[list[JitCtx] | None] = contextvars.ContextVar("thunder_norm_programs", default=None)


def follow(ctx: JitCtx) -> None:
    """The program that is being acquired."""
    if (programs := _programs.get()) is not None:
        programs.append(ctx)


def note_written() -> None:
    """The program whose acquisition fails has done something before, which may have been to raise another exception."""
    vars(get_compile_data())[_HAS_WRITTEN] = True


@contextmanager
def noted() -> Iterator[None]:
    """Note of an acquisition that ends in an exception whether the program has written, drawn or asserted something by then."""
    for name in (_HAS_WRITTEN, _UNDO):
        vars(get_compile_data()).pop(name, None)
    token = _programs.set(programs := [])
    try:
        yield
    except Exception:
        body = [b for ctx in programs for b in ctx.computation_trace.bound_symbols]
        replaced = any(getattr(ctx, REPLACED, ()) for ctx in programs)  # by what was written into it
        does = any(b.sym.name.endswith(_CHECK) or writes(b) or draws_numbers(b) for b in body)
        if replaced or does or any(map(has_written, programs)):
            note_written()
        raise
    finally:
        _programs.reset(token)


def raised_in_acquisition(cd: Any, error: Exception) -> Exception:
    """What a call raises whose acquisition has ended in `error`."""
    has_written = vars(cd).pop(_HAS_WRITTEN, False)
    return Raised(error) if not isinstance(error, ThunderNormError) and (has_written or _holds_traced(error)) else error


def _holds_traced(value: Any, seen: set[int] | None = None) -> bool:
    """Whether an exception, or one it comes from, holds what stands for a tensor."""
    seen = set() if seen is None else seen
    if isinstance(value, Proxy):
        return True
    if not (isinstance(value, BaseException) or type(value) in _CONTAINERS) or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, BaseException):
        held: Iterable[Any] = (*value.args, *vars(value).values(), value.__cause__, value.__context__)
    else:
        held = value.values() if isinstance(value, dict) else value
    return any(_holds_traced(v, seen) for v in held)


def note_undo(cd: Any, undo: Callable[[], None]) -> None:
    """Note what undoes what an acquisition has left in the user's objects, where the call that it was made for raises."""
    vars(cd).setdefault(_UNDO, []).append(undo)


def taken_undo(cd: Any) -> Sequence[Callable[[], None]]:
    """What was noted for the call at hand."""
    return vars(cd).pop(_UNDO, ())


# -- a call of a trace --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Writes:
    """What a computation does before its epilogue, whose writes are lost where it raises.

    Attributes:
        inputs: the positions of those that it writes into.
        may_raise_later: whether it looks, after it has written into them, at what the program asserts.
        draws: whether it draws random numbers.
        generators: of the program, from which it draws.
        effect: an operation that does something else, or None.
    """

    inputs: tuple[int, ...]
    may_raise_later: bool
    draws: bool
    generators: tuple[torch.Generator, ...]
    effect: str | None


def keeps(epilogue: TraceCtx) -> bool:
    """Whether an epilogue writes into objects."""
    return any(b.sym.id in PACKS or b.sym.name.startswith(_WRITES_LATER) for b in epilogue.bound_symbols)


def watched(entry: Any, undo: Sequence[Callable[[], None]] = ()) -> Any:
    """A cache entry whose computation says where it raises, if its epilogue writes into objects, or its acquisition has.

    Args:
        entry: the cache entry.
        undo: what undoes what was done meanwhile, if it was acquired for the call at hand.
    """
    if not undo and not keeps(entry.epilogue_traces[-1]):
        return entry
    runs = entry.computation_traces[-1]
    if (found := _known_writes.get(runs)) is None:
        found = _known_writes[runs] = _writes_of(entry.computation_traces)
    return entry._replace(computation_fn=_Watched(entry.computation_fn, found, undo))


# By the trace that runs, as each call may ask.
_known_writes: weakref.WeakKeyDictionary[TraceCtx, _Writes] = weakref.WeakKeyDictionary()


def _writes_of(computations: Sequence[TraceCtx]) -> _Writes:
    """Of the forms of a computation, from the one that was acquired to the one that runs."""
    computation = computations[-1]
    body = computation.bound_symbols
    names, position = {}, {p.name: i for i, p in enumerate(computation.args)}
    for bsym in body:  # what is written goes by other names
        if bsym.sym.name == "update_aliases":
            given, made = ([p for p in ps if isinstance(p, TensorProxy)] for ps in (bsym.flat_args, bsym.flat_outs))
            names.update({new.name: names.get(old.name, old.name) for old, new in zip(given, made, strict=False)})
        elif (written := _targets(bsym)) and len(bsym.flat_proxy_outs) == 1:
            names[bsym.flat_proxy_outs[0].name] = names.get(written[0].name, written[0].name)
    written_at = {i: {names.get(t.name, t.name) for t in _targets(b)} for i, b in enumerate(body)}
    inputs = sorted({position[name] for found in written_at.values() for name in found if name in position})
    first = min((i for i, found in written_at.items() if not found.isdisjoint(position)), default=len(body))
    checks = [i for i, b in enumerate(body) if b.sym.name.startswith(_CHECKS)]
    effect = next((b.sym.name for b in body if _has_effect(b)), None)
    # what an executor draws with says nothing of it
    draws = any(draws_numbers(b) for trace in (computations[0], computation) for b in trace.bound_symbols)
    return _Writes(tuple(inputs), any(i > first for i in checks), draws, own_generators(body), effect)


def _targets(bsym: BoundSymbol) -> list[TensorProxy]:
    """What an operation of a program that runs writes into; an executor's copy consists of nothing."""
    return [bsym.args[1]] if bsym.sym.name == "copy_" else targets(bsym)


def _has_effect(bsym: BoundSymbol) -> bool:
    if bsym.sym.name.startswith((_CHECKS, "after_effects")) or bsym.sym.id in _AS_THEY_ARE or bsym.sym.module is None:
        return False
    return has_any_tag(bsym, {prims.OpTags.DONT_DCE}) and bool(bsym.flat_proxy_args) and not bsym.sym.is_prim


class _Watched:
    """A computation that notes what it starts from."""

    def __init__(self, computation: Callable, of: _Writes, undo: Sequence[Callable[[], None]]):
        self._computation, self._writes, self._undo = computation, of, undo
        self._copies = of.inputs if of.may_raise_later else ()

    def __call__(self, *inputs: Any) -> Any:
        own = self._writes
        written = [inputs[i] for i in own.inputs]
        versions = [t._version for t in written]
        set_back = [remembered(g) for g in (*_generators(), *own.generators)] if own.draws else []
        copies = [inputs[i].detach().clone() for i in self._copies] if _bytes(written) <= _MOST_BYTES else None
        try:
            return self._computation(*inputs)
        except ThunderNormError:
            raise
        except Exception as e:  # noqa: BLE001 - raised again by who called
            error = e
        changed = [i for i, (t, version) in enumerate(zip(written, versions, strict=True)) if t._version != version]
        if own.effect is not None:
            raise Raised(error, f"{own.effect} has run, which does more than return tensors")
        if changed and not copies:
            raise Raised(
                error, f"an input of {tuple(written[changed[0]].shape)} has been written into, which would be written twice"
            )
        with torch.no_grad():
            for i in changed:
                written[i].copy_(copies[i])  # pyright: ignore[reportOptionalSubscript]
        for put in (*set_back, *self._undo):
            put()
        raise Raised(error)


def _generators() -> Sequence[torch.Generator]:
    on_devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return torch.default_generator, *on_devices


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# -- by Python ----------------------------------------------------------------------------------------------------------------


def by_python(raised: Raised, cd: Any, jitted: Any, args: tuple, kwargs: dict) -> Any:
    """The call that has raised, by the program itself.

    Args:
        raised: what it ended in.
        cd: of the jitted function.
        jitted: what ``thunder.jit`` gave for it, if it is a module.
        args: of the call.
        kwargs: of the call.

    Raises:
        Exception: what the program raises.
        UnsupportedOpError: it cannot run again, and its state is not to be left as it was.
    """
    ours = [t for t in cd.transforms if hasattr(t, "hindrance_by_python")]
    if any(t.is_undone_where_it_raises(args, kwargs) for t in ours):
        raise raised.error
    hindrance = raised.hindrance
    if hindrance is None:
        hindrance = next(filter(None, (t.hindrance_by_python(cd.fn, args, kwargs) for t in ours)), None)
    if hindrance is None and isinstance(jitted, ThunderModule) and not _holds_its_own(jitted):
        hindrance = "a transform has put other tensors into the module"
    if hindrance is not None:
        _refuse(raised.error, hindrance)
    result = cd.fn(*args, **kwargs)
    warnings.warn(
        with_details(
            f"a call was run by Python: it ended in {type(raised.error).__name__} as a trace, and the program itself does not",
            at=user_line_of(raised.error),
            why=str(raised.error).splitlines()[0] if str(raised.error) else None,
        ),
        RunByPythonWarning,
        stacklevel=3,
    )
    return result


def _refuse(error: Exception, hindrance: str) -> NoReturn:
    raise UnsupportedOpError(
        with_details(
            f"a jitted function has raised {type(error).__name__} after it had put something into an object, which is lost",
            at=user_line_of(error),
            why=f"that is written when the trace has run, and the program cannot run again to write it: {hindrance}",
            instead="raise before anything is written, or return what says that there is an error, and raise outside",
        )
    ) from error


def _holds_its_own(jitted: ThunderModule) -> bool:
    """Whether a jitted module runs with the tensors that its module holds."""
    model = jitted._model
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    used = {**jitted._overrides_parameters, **jitted._overrides_buffers}
    return all(t is None or own.get(name) is t or buffers.is_of_program(jitted, name, t) for name, t in used.items())
