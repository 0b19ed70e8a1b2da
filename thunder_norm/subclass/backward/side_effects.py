"""What a program puts into attributes, containers, classes and globals while its trace is acquired: written anew in each call.

Thunder's interpreter runs Python on the user's own objects: a dict that caches a tensor would hold a proxy from then on, and attributes
of the jitted module itself are forgotten.  Both are taken out of the user's objects and written by the epilogue, with the tensors of the
call at hand; a guard sees that the places hold what they held.  What has no tensor in it stays as Python did it, and if another call
would do it again, its trace is for one call.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import ThunderNormError
from thunder_norm.model_state.escapes import escape
from thunder_norm.model_state.reachable import ATOMS, Place, Reachable, described, ways_to
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.backward import changed_attributes, set_attributes, users_attributes
from thunder_norm.subclass.backward.changed_attributes import Attribute
from thunder_norm.subclass.backward.kept_values import is_kept_plainly, keeping, mend_writes
from thunder_norm.subclass.backward.looks import Look, Looks, kind_of
from thunder_norm.subclass.backward.made_by_c import is_standing_in
from thunder_norm.subclass.backward.made_objects import MadeObjects, refusal
from thunder_norm.subclass.backward.recipes import NotMakeableError, Recipe, holds_proxies
from thunder_norm.tracing import own_changes
from thunder_norm.tracing.calls import raising
from thunder_norm.tracing.calls.raising import KEEPS, PACKS
from thunder_norm.tracing.guarding import guards, held_by_classes, overwritten, run_unseen
from thunder_norm.tracing.guarding.bindable import guard, guard_arguments
from thunder_norm.tracing.guarding.stored import same_keys
from thunder_norm.tracing.provenances import provenance_of, walked, walked_from
from thunder_norm.tracing.torch_functions import known_classes, tensor_attributes
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import PseudoInst, WrappedValue
from thunder.core.jit_ext import get_jit_ctx, should_register_for_prologue
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


class _Mark(enum.Enum):
    ABSENT = enum.auto()


_ABSENT = _Mark.ABSENT

_current: contextvars.ContextVar[SideEffects | None] = contextvars.ContextVar("thunder_norm_side_effects", default=None)


def is_side_effect(bsym: BoundSymbol) -> bool:
    """Whether an operation of an epilogue writes into the user's objects."""
    return bsym.sym.id in PACKS or bsym.sym.name.startswith(KEEPS)


@contextlib.contextmanager
def watched(fn: Callable, args: tuple, kwargs: dict) -> Iterator[None]:
    """Look after what the program can reach while its trace is acquired; if that fails, everything is what it was."""
    effects = SideEffects(fn, args, kwargs)
    token = _current.set(effects)
    try:
        with (
            guards.telling_called(effects.before.follow_called),
            held_by_classes.telling(effects.follow_held),
            run_unseen.telling(note_read),
        ):
            yield
        if effects.has_changed:
            raising.note_undo(get_compile_data(), effects.undo)
    except BaseException:
        if effects.has_changed:
            raising.note_written()
        effects.undo()
        raise
    finally:
        _current.reset(token)


def known_before() -> Container[int]:
    """The identities of what was there before the program whose trace is being acquired."""
    effects = _current.get()
    return set() if effects is None else effects.made.known


def note_read(*functions: Any, may_change: bool = False, by_identity: bool = False) -> None:
    """Have the trace serve calls in which functions that run as they are, uninterpreted, find what they find now.

    Args:
        functions: and classes, whose methods run.
        may_change: whether they themselves may change it meanwhile, and it makes no difference then: what a class counts in its dispatch.
        by_identity: whether tensors that they hold go into the trace as what they are, and others are not for it.
    """
    effects = _current.get()
    if effects is not None:
        effects.note_read(functions, may_change, by_identity)


def write(ctx: Any, epilogue: TraceCtx, acquisition: Acquisition | None, process: Callable[[], None]) -> None:
    """Write what the program has kept into the epilogue, and take it out of the user's objects; `process` is Thunder's part."""
    effects = _current.get()
    if effects is None:
        process()
        return
    effects.acquisition = acquisition
    if acquisition is not None:
        users_attributes.check_left_alone(acquisition, ctx)
    effects.write_attributes(epilogue, changed_attributes.deleted(ctx))
    taken = [*changed_attributes.taken(ctx)]
    effects.check_set(epilogue, ctx._additional_outputs.values())
    process()
    changed_attributes.forget_owners(ctx)
    effects.write(ctx, epilogue, taken)


def result(wrapped: WrappedValue, find: Callable[[WrappedValue], Any], epilogue: TraceCtx) -> Any:
    """What the epilogue returns for a value: for an object that the program has made one that is made anew.

    Raises:
        UnsupportedOpError: it cannot be.
    """
    effects = _current.get()
    found = _result(effects, wrapped, find, epilogue)
    if effects is not None:
        effects.give_attributes(epilogue, found)
    return found


def _result(effects: SideEffects | None, wrapped: WrappedValue, find: Callable[[WrappedValue], Any], epilogue: TraceCtx) -> Any:
    value = wrapped.value
    is_given = hasattr(wrapped, "anyproxy") or should_register_for_prologue(wrapped.provenance)
    if effects is not None and not is_given:
        holds_shared = effects.made.holds_shared(value)
        if type(value) is tuple and holds_shared and not effects.made.is_shared(value):
            items = zip(value, wrapped.item_wrappers, strict=True)
            return tuple([v if w is None else _result(effects, w, find, epilogue) for v, w in items])
        if holds_shared or effects.made.is_handed_out(value):
            effects.made.note_arguments(wrapped)
            return _made(effects, value, epilogue)
        if type(value) in (dict, list, tuple):  # Thunder knows nothing of the items of a dict that is written as ``{...}``
            return _with_made(effects, _found(wrapped, find), epilogue)
    return _found(wrapped, find)


def _found(wrapped: WrappedValue, find: Callable[[WrappedValue], Any]) -> Any:
    try:
        return find(wrapped)
    except NotImplementedError as e:
        if isinstance(e, ThunderNormError) or not str(e).startswith("unhandled"):
            raise
        raise refusal(wrapped.value, "the result") from e


def _made(effects: SideEffects, value: Any, epilogue: TraceCtx) -> Proxy:
    try:
        return effects.made.proxy_of(value, epilogue)
    except NotMakeableError as e:
        raise refusal(e.value, f"the {type(value).__qualname__} that is returned") from None


def _with_made(effects: SideEffects, value: Any, epilogue: TraceCtx) -> Any:
    """A result in whose dicts, lists and tuples there is, for what the program has made, what the epilogue makes anew."""
    if type(value) is dict:
        held = {k: _with_made(effects, v, epilogue) for k, v in value.items()}
        return held if all(map(_can_be_written, value)) else _made(effects, held, epilogue)
    if type(value) in (list, tuple):
        return type(value)(_with_made(effects, v, epilogue) for v in value)
    return _made(effects, value, epilogue) if effects.made.is_handed_out(value) else value


def _can_be_written(key: Any) -> bool:
    """Whether a trace can write down a key of a dict: of an enum's member or a class it writes what is no Python."""
    if type(key) in (tuple, frozenset):
        return all(map(_can_be_written, key))
    return key is None or type(key) in (str, bytes, bool, int) or type(key) is float and math.isfinite(key)


def reaches_wrapper() -> bool:
    """Whether the program that is being acquired may meet a wrapper that was there before, in a closure say."""
    effects = _current.get()
    return effects is not None and effects.reaches_wrapper


class SideEffects:
    """The places that a program can reach, as they were before it was interpreted."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict):
        self.fn = fn
        self.arguments = (args, kwargs)
        self.before = Reachable((fn, args, kwargs))
        self.known = set(self.before.known)
        self.made = MadeObjects(self.known, self._is_of_argument)
        self.acquisition: Acquisition | None = None  # once the program has been acquired
        self._looks: list[Look] = []
        self._read: dict[tuple, tuple[Place, bool, bool]] = {}  # by whose they are: what code that is not interpreted may read
        self._noted: dict[tuple[int, bool, bool], Any] = {}  # of whose code that was noted
        self._with_attributes: set[int] = set()
        self._given_attributes: set[str] = set()  # whose are in the epilogue
        self._plain_attributes: dict[str, tensor_attributes.SetAttributes] = {}

    @functools.cached_property
    def reaches_wrapper(self) -> bool:
        """Whether a tensor among what the program can reach is a wrapper."""
        return any(map(is_wrapper, self.before.tensors))

    @functools.cached_property
    def _of_function(self) -> set[int]:
        """The identities of what can be reached from the jitted function itself."""
        return set(Reachable((self.fn,)).known)

    @functools.cached_property
    def _of_arguments(self) -> set[int]:
        return set(Reachable(self.arguments, follows_code=False).known)

    def follow_held(self, value: Any) -> None:
        """Look after what the program is about to change or to read, where nothing else has led to it; what is read, later calls are to find as it is."""
        was_known = id(value) in self.known
        self.before.follow_held(value)
        self.known.update(self.before.known)
        if not (was_known or isinstance(value, type)):
            self.note_read([value], may_change=False, by_identity=False)

    def note_read(self, functions: Iterable[Any], may_change: bool, by_identity: bool) -> None:
        """See `note_read`: what the program has made itself is what it makes of what is guarded."""
        before, new = self.before, [f for f in functions if (id(f), may_change, by_identity) not in self._noted]
        self._noted.update({(id(f), may_change, by_identity): f for f in new})  # kept: an id stays its object's
        surroundings = guards.surroundings()
        for place in Reachable(new).places:
            if surroundings is not None and isinstance(place.owner, FunctionType) and not place.is_of_others:
                surroundings.note_function(place.owner, ())
            is_global = isinstance(place.owner, type | FunctionType) and place.cell is None
            if isinstance(place.owner, type) and "<locals>" in place.owner.__qualname__ and id(place.owner) not in before.known:
                continue  # the program has made it, and may change it
            is_there = id(place.owner) in before.known or is_global or id(place.cell) in before.cells
            mentions_nothing = isinstance(place.owner, FunctionType) and place.cell is None and not place.held
            if is_there and not place.is_of_others and not mentions_nothing:
                names = tuple(place.held) if isinstance(place.held, dict) else ()
                self._read.setdefault((id(place.owner), id(place.cell), names, by_identity), (place, may_change, by_identity))

    def _guard_places(self, ctx: Any) -> None:
        """Have the prologue look at what was read, or overwritten; where the program has changed some of it since, the trace is for one call."""
        looks = self._looks
        for place, may_change, by_identity in self._read.values():
            is_code = isinstance(place.owner, type | FunctionType)
            is_of_call = self._is_of_argument(place.owner) and not is_code
            kind = functools.partial(kind_of, of=type if is_of_call else id, by_identity=by_identity)
            look, way = Look(place, kind, kind(place.held), may_change), self._ways.get(id(place.owner))
            if not look.holds() or (is_of_call and (place.at is None or way is None)):
                if not may_change:
                    guards.use_for_one_call()
            else:
                looks.append(replace(look, way=way) if is_of_call else look)
        if looks:
            guard_arguments(ctx, Looks(looks))

    @property
    def has_changed(self) -> bool:
        """Whether the program has left something else in some place."""
        return any(p.is_changed and not p.is_of_others for p in self.before.places)

    def undo(self) -> None:
        """Let all places hold what they held."""
        for place in reversed(self.before.places):  # what was looked at last may have been changed by then
            place.restore()

    @functools.cached_property
    def _computed(self) -> set[str]:
        return {p.name for b in get_jit_ctx().computation_trace.bound_symbols for p in b.flat_proxy_outs}

    def _is_known(self, p: TensorProxy, epilogue: TraceCtx) -> bool:
        """Whether the program gives a tensor to its epilogue: what a function under a transform computes is its own."""
        is_there = p.history is not None or p.name in self._computed
        return is_there or any(p.name == out.name for b in epilogue.bound_symbols for out in b.flat_proxy_outs)

    def check_set(self, epilogue: TraceCtx, settings: Iterable[Iterable[tuple]]) -> None:
        """Look at the attributes that Thunder has the epilogue set.

        Raises:
            EscapeError: one is what a function under a transform has computed.
        """
        for *_, name, value in (setting for of_object in settings for setting in of_object):
            if type(value.value) is TensorProxy and not self._is_known(value.value, epilogue):
                self.undo()
                raise escape(f"attribute {name.value!r} of an argument or module", "proxy", value.value)

    def write_attributes(self, epilogue: TraceCtx, changed: Iterable[Attribute]) -> None:
        """Have the epilogue change attributes of objects.

        Raises:
            EscapeError: the program puts a tensor where it cannot be put in anew.
        """
        for attribute in changed:
            values = [self.fn if attribute.owner is None else attribute.owner]
            if attribute.value is not None:
                self.made.note_arguments(attribute.value)
                values.append(attribute.value.value)
            what = f"attribute {attribute.name!r} of an argument or module"
            # modules that change places are others in the next call
            is_of_call = attribute.owner is not None or attribute.kind == "_modules"
            self._write(epilogue, self.acquisition, values, what, attribute.put, is_of_call)

    def write(self, ctx: Any, epilogue: TraceCtx, taken: Iterable[Attribute]) -> None:
        """See `write`.

        Raises:
            EscapeError: what the program keeps holds a tensor where it cannot be put in anew, or nobody guards the trace.
        """
        acquisition = self.acquisition
        mend_writes(epilogue, acquisition)
        self.write_attributes(epilogue, taken)
        for name, value in self._attributes_of_root(ctx):
            self._write(epilogue, acquisition, [value], f"attribute {name!r}", _setter(self.fn, name))
            attributes = vars(self.fn)
            if not isinstance(attributes.get(name), int | float | complex | str):  # guarded where the program reads it
                self._guard(acquisition, attributes.get(name), functools.partial(attributes.get, name))
        followed = set()
        for place in self.before.places:
            if not place.is_changed:
                self._keep_overwritten(place, overwritten.keys_of(place.owners))
            elif self._write_place(ctx, epilogue, acquisition, place):
                followed.add(id(place.owner))
        guards.keep_written(followed)
        self._guard_places(ctx)
        self._plain_attributes = tensor_attributes.those_set(ctx)
        for name, of_tensor in [*self._plain_attributes.items()]:
            if of_tensor.real is not None:
                self._give_to_plain(epilogue, name)
        self.give_attributes(epilogue, None)

    def give_attributes(self, epilogue: TraceCtx, value: Any) -> None:
        """Have the epilogue set what the program has set on tensors that it hands out, those in `value` too; see `set_attributes`."""
        held = tree_leaves(value) if self._plain_attributes else ()
        for p in [*held, *(p for b in epilogue.bound_symbols for p in b.flat_proxy_args if self._plain_attributes)]:
            if isinstance(p, TensorProxy) and p.name in self._plain_attributes and p.name not in self._given_attributes:
                self._give_to_plain(epilogue, p.name)
        if self.acquisition is not None:
            set_attributes.write(self.acquisition, epilogue, self._with_attributes, value, self._keep_attributes)

    def _give_to_plain(self, epilogue: TraceCtx, name: str) -> None:
        of_tensor = self._plain_attributes[name]
        self._given_attributes.add(name)
        places = list(of_tensor.values)

        def put(new: list) -> None:
            for place, value in zip(places, new[1:], strict=True):
                if value is _ABSENT:
                    tensor_attributes.take(new[0], place)
                else:
                    tensor_attributes.give(new[0], place, value)

        wrapped = [w for w in of_tensor.values.values() if w is not None]
        owner = known_classes.returned(of_tensor.owner, epilogue) if isinstance(of_tensor.owner, TensorProxy) else of_tensor.owner
        values = [owner, *(_ABSENT if w is None else w.value for w in of_tensor.values.values())]
        self._keep_attributes(epilogue, wrapped, values, "attributes of a tensor", put)
        self.give_attributes(epilogue, None)

    def _keep_attributes(self, epilogue: TraceCtx, wrapped: list, values: list, what: str, put: Callable[[list], None]) -> None:
        read = self.acquisition.wrappers.taken.values() if self.acquisition is not None else ()  # of given wrappers
        for v in (*wrapped, *read):
            self.made.note_arguments(v)
        self._write(epilogue, self.acquisition, values, what, put, True, owner=values[0])

    def _is_of_argument(self, owner: Any) -> bool:
        """Whether an object comes with the call: it is reached from the arguments, and not from the function."""
        return id(owner) in self._of_arguments and id(owner) not in self._of_function

    def _attributes_of_root(self, ctx: Any) -> Iterator[tuple[str, Any]]:
        """The attributes that the program sets on the jitted module, which Thunder forgets."""
        if not isinstance(self.fn, torch.nn.Module):
            return
        for modified, modifications in ctx._additional_outputs.items():
            origin = modified.provenance
            is_dict = origin.inst is PseudoInst.LOAD_ATTR and origin.inputs[1].value == "__dict__"
            if is_dict and origin.inputs[0].inst is PseudoInst.INPUT_FN:
                yield from {key.value: value.value for _, _, key, value in modifications}.items()

    def _write_place(self, ctx: Any, epilogue: TraceCtx, acquisition: Acquisition | None, place: Place) -> bool:
        """Have the epilogue change what a place holds, as the program has; whether it does so to what stands there in the call at hand."""
        held, now = place.held, place.read()
        is_map, is_of_argument = isinstance(held, dict), self._is_of_argument(place.owner) and place.at is not None
        before = held if is_map else dict(enumerate(held))
        after = now if is_map else dict(enumerate(now))
        rewritten = overwritten.keys_of(place.owners) or ()
        touched = [k for k in {**before, **after} if before.get(k, _ABSENT) is not after.get(k, _ABSENT) or k in rewritten]
        in_order = [*(k for k in before if k in after), *(k for k in after if k not in before)]
        is_reordered = is_map and not same_keys([*after], in_order)
        if is_reordered:
            touched = [*(k for k in before if k not in after), *after]
        objects = {k: v for k, v in before.items() if not isinstance(v, ATOMS)}
        position = {id(v): k for k, v in objects.items()}
        is_twice = len(position) < len(objects)  # which of two places a value comes from nobody knows, if they hold one object
        # what was there stays what is there in the call at hand
        values = [_Same(position[id(v)]) if id(v) in position else v for v in (after.get(k, _ABSENT) for k in touched)]
        if not is_of_argument and not holds_proxies(values):
            if not place.is_of_others:  # their caches: what they do is taken to be the same in each call
                changes = {k: (before.get(k, _ABSENT), after.get(k, _ABSENT)) for k in touched}
                own_changes.note(
                    place.named(touched[0]), changes | ({_ORDER: (tuple(before), tuple(after))} if is_reordered else {})
                )
                self._keep_overwritten(place, {*touched})
            return False
        place.write(held)

        def put_at(place: Place, new: list) -> None:
            found = place.read() if is_map else dict(enumerate(place.read()))
            for k, v in zip(touched, [found[v.key] if isinstance(v, _Same) else v for v in new], strict=True):
                if is_reordered or v is _ABSENT:
                    found.pop(k, None)
                if v is not _ABSENT:
                    found[k] = v
            place.write(found if is_map else type(held)(found.values()))

        def looked_at(place: Place) -> Any:
            current = place.read()
            found = {k: _but_numbers(current.get(k, _ABSENT)) for k in touched} if is_map else [*map(_but_numbers, current)]
            return [found, _first_places(current.values() if is_map else current)] if is_twice else found

        what = f"what {described(place.owner)} holds"
        if not is_of_argument:
            at, way = place.at, guards.way_to_written(place.owner) if acquisition is not None else None
            if way is None or at is None:
                self._write(epilogue, acquisition, values, what, lambda new: put_at(place, new))
                self._guard(acquisition, looked_at(place), lambda: looked_at(place))
                return False
            fn, kind = self.fn, type(place.owner)

            def looked_at_there() -> Any:
                owner = walked_from(fn, way)
                return looked_at(at(owner)) if type(owner) is kind else _ABSENT

            self._write(epilogue, acquisition, values, what, lambda new: put_at(at(walked_from(fn, way)), new))
            self._guard(acquisition, looked_at(place), looked_at_there)
            return True
        at, way = place.at, self._ways.get(id(place.owner))
        if at is None or way is None:
            self.undo()
            raise escape(what, "value", place.owner)
        owner, expected = AnyProxy(place.owner, history=provenance_of(way)), kind_of(looked_at(place), of=type)
        self._write(epilogue, acquisition, [owner, *values], what, lambda new: put_at(at(new[0]), new[1:]), True)
        guard_arguments(ctx, lambda *roots: kind_of(looked_at(at(walked(way, *roots))), of=type) == expected)
        return True

    def _keep_overwritten(self, place: Place, keys: set[Any] | None) -> None:
        """Let the trace serve calls alone that find in a place, under some keys or all, what the program has left there: it writes nothing."""
        if guards.is_of_one_call() or place.is_of_others or keys == set():
            return
        is_of_argument, way = self._is_of_argument(place.owner), self._ways.get(id(place.owner))
        if is_of_argument and (place.at is None or way is None):
            guards.use_for_one_call()
            return
        now = place.read()

        def under_keys(held: Any, now: Any = now) -> Any:  # which is kept: an id stays its object's
            if keys is None or isinstance(held, set):
                return found(held)
            entries = held if isinstance(held, dict) else dict(enumerate(held))
            return found({k: entries.get(k, _ABSENT) for k in keys})

        found = functools.partial(kind_of, of=type if is_of_argument else id, by_identity=not is_of_argument)
        self._looks.append(Look(place, under_keys, under_keys(now), False, way if is_of_argument else None))

    @functools.cached_property
    def _ways(self) -> dict[int, tuple[tuple[str, Any], ...]]:
        args, kwargs = self.arguments
        return ways_to({"args": args, "kwargs": kwargs})

    def _guard(self, acquisition: Acquisition | None, held: Any, read: Callable[[], Any]) -> None:
        """The trace is for what the place held: for None, say, not for the tensor that the program puts there."""
        kind = kind_of(held)

        def holds() -> bool:
            try:
                return kind_of(read()) == kind
            except (AttributeError, LookupError):  # the place is no more
                return False

        if acquisition is not None:
            acquisition.side_effect_guards.append(guard("check_kept_values", holds))

    def _write(
        self,
        epilogue: TraceCtx,
        acquisition: Acquisition | None,
        values: list,
        what: str,
        put: Callable[[list], None],
        is_of_argument: bool = False,
        owner: Proxy | None = None,
    ) -> None:
        """Have the epilogue call `put` with values in which tensors stand for proxies; `owner` is among them, and taken as it is."""
        outside = self.made.outside(epilogue) if is_of_argument else lambda v: None
        recipe = Recipe(self.made.known, outside, is_strict=False)
        try:
            make = recipe.of(values)
        except NotMakeableError as e:
            self.undo()
            raise (refusal(e.value, what) if is_standing_in(e.value) else escape(what, "proxy", e.value)) from None
        tensors = {name: p for name, p in recipe.arguments.items() if isinstance(p, TensorProxy)}
        lost = next((p for p in tensors.values() if not self._is_known(p, epilogue)), None)
        if lost is None and acquisition is None and owner is None:
            lost = next(iter(tensors.values()), None)
        if lost is not None:
            self.undo()
            raise escape(what, "proxy", lost)
        kept_of = {
            name: keeping(acquisition, p, is_of_argument)
            for name, p in tensors.items()
            if acquisition is not None and p is not owner
        }
        is_plain = not is_of_argument and any(is_kept_plainly(acquisition, p) for p in tensors.values())
        self.made.bind(epilogue, KEEPS, recipe, lambda call: put(make(call)), None, kept_of, is_plain=is_plain)


def _first_places(values: Iterable[Any]) -> list[int]:
    """For each value at which place the same object stands first."""
    first: dict[int, int] = {}
    return [first.setdefault(id(v), i) for i, v in enumerate(values)]


def _but_numbers(value: Any) -> Any:
    """A value of which another call must find another like it: a number is guarded where the program reads it."""
    return type(value) if isinstance(value, int | float | complex) else value


def _setter(module: torch.nn.Module, name: str) -> Callable[[list], None]:
    def put(values: list) -> None:
        vars(module)[name] = values[0]

    return put


@dataclass(frozen=True)
class _Same:
    """What is held at a place already, under a key or at a position."""

    key: Any


_ORDER = object()  # of the keys of a dict
