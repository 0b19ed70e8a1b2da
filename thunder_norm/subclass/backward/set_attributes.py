"""Attributes that a program sets on wrappers, and deletes: the fakes have them while the trace is acquired, the objects of each call afterwards.

What is inside of a wrapper is another tensor from then on, which the trace is told.  The epilogue sets all of them on the very objects that
the program was given, and on those that it makes and hands out, which are put together without them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedOpError, UnsupportedSubclassError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.backward.recipes import holds_proxies
from thunder_norm.subclass.backward.users_attributes import DATA, contents, data_of, note_data, own_of
from thunder_norm.subclass.classes.jagged import is_jagged_class
from thunder_norm.subclass.classes.protocol import WrapperSpec, beside_parts, is_equal, outer_metadata
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.recording import trace
from thunder_norm.tracing.containers import take_proxies
from thunder_norm.tracing.torch_functions.tensor_attributes import those_set
from thunder_norm.trees import flat_tensors, map_tensors
from thunder_norm.wrapper_classes import flattened, is_wrapper
from thunder.core.interpreter import WrappedValue
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.trace import TraceCtx


class Held:
    """What a fake has for an object with tensors of the program in it, which only the program can read."""

    __slots__ = ("wrapped",)

    def __init__(self, wrapped: WrappedValue):
        self.wrapped = wrapped


class _Mark(enum.Enum):
    GONE = enum.auto()


_GONE = _Mark.GONE


def put(acquisition: Acquisition, proxy: SubclassProxy, name: str, *value: WrappedValue, is_users: bool = False) -> None:
    """Set an attribute of a wrapper's fake, or delete it if there is no value, and tell the trace what is inside by then.

    Args:
        acquisition: the one at hand.
        proxy: of the wrapper.
        name: of the attribute.
        value: at most one.
        is_users: it is one that somebody has set on an input, of which the fake may have nothing.

    Raises:
        AttributeError: Python's own.
    """
    fake = proxy.fake
    if value and isinstance(value[0].value, torch.Tensor):  # a list or a dict with some stays what the program writes into
        take_proxies(*value)
    new = _on_fake(acquisition, value[0]) if value else _GONE
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), acquisition.fakes.mode:
        held = _read(fake, name)
        if new is not _GONE or held is not _GONE or not is_users:
            _set(fake, name, new)
    acquisition.wrappers.attributes.setdefault(id(fake), {})[name] = (new, value[0] if value else None)
    acquisition.tape.tear()
    trace.rebind(acquisition)


def _read(x: torch.Tensor, name: str) -> Any:
    try:
        return object.__getattribute__(x, name)
    except AttributeError:
        return _GONE


def _set(x: torch.Tensor, name: str, value: Any) -> None:
    if value is _GONE:
        object.__delattr__(x, name)
    else:
        object.__setattr__(x, name, value)


def _on_fake(acquisition: Acquisition, value: WrappedValue) -> Any:
    held = value.value
    if isinstance(held, TensorProxy):
        return acquisition.fake_of(held)
    if isinstance(held, NumberProxy):
        return acquisition.to_fake(held)
    return Held(value) if holds_proxies(held) else held


# -- in each call -------------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """An attribute of a wrapper, or of one inside of it."""

    way: tuple[str, ...]
    name: str

    def put(self, x: Any, value: Any) -> None:
        for step in self.way:
            x = flattened(x)[0][step]
        with torch._C.DisableTorchFunctionSubclass():
            if value is not _GONE or _read(x, self.name) is not _GONE:
                _set(x, self.name, value)


def write(acquisition: Acquisition, epilogue: TraceCtx, done: set[int], value: Any, keep: Callable[..., None]) -> None:
    """Have the epilogue set the attributes of the wrappers that it hands out so far, in `value` too, and of those that were given.

    Those are meant that the program has set, and data that operations have left there.

    Args:
        acquisition: the one at hand.
        epilogue: is being written.
        done: the identities of the fakes that have theirs.
        value: a part of the result.
        keep: ``keep(epilogue, wrapped, values, what, put)`` writes an operation that calls ``put`` with what the values are in each call;
            `wrapped` are those of the interpreter's among them.
    """
    while acquisition.has_wrappers:
        used = [
            *acquisition.wrappers.inputs(),
            *tree_leaves(value),
            *(p for b in epilogue.bound_symbols for p in b.flat_proxy_args),
        ]
        due = next((p for p in used if isinstance(p, SubclassProxy) and id(p.fake) not in done), None)
        if due is None:
            return
        done.add(id(due.fake))
        is_given = id(due.fake) in acquisition.wrappers.specs
        found = list(_changed(acquisition, due.fake, None if is_given else _put_together(acquisition, due.fake), ()))
        if found:
            places, values, wrapped = zip(*found, strict=True)
            if is_given:
                _note_given(acquisition, due, places, values)
            values = [_with_proxies(acquisition, v) if w is None else v for v, w in zip(values, wrapped, strict=True)]
            what = f"attributes of a {type(due.fake).__name__}"
            keep(epilogue, [w for w in wrapped if w is not None], [due, *values], what, _putting(places))


def _note_given(acquisition: Acquisition, proxy: SubclassProxy, places: Sequence[_Place], values: Sequence[Any]) -> None:
    """Note what becomes of an input; what operations have left in it may depend on what was there, which nobody has read."""
    wrappers, key = acquisition.wrappers, id(proxy.fake)
    with torch.no_grad(), acquisition.fakes.mode:
        like_it = wrappers.specs[key].build(wrappers.given[key])
        for place, value in zip(places, values, strict=True):
            place.put(like_it, value)
    spec = WrapperSpec.of(like_it)
    wrappers.structures[key] = spec.contexts, spec.leaves(like_it)
    for place in places:
        before = _GONE if place.way else wrappers.before.get(key, {}).get(place.name, _GONE)
        if before is not _GONE and isinstance(before, DATA):
            note_data(proxy.history, place.name, before)


def _put_together(acquisition: Acquisition, fake: torch.Tensor) -> torch.Tensor:
    """What the epilogue makes of what is inside of a wrapper.

    Raises:
        UnsupportedOpError: that is of another shape, or what the program has set makes another tensor of it.
    """
    spec, names = WrapperSpec.of(fake), _names_set(acquisition, fake)
    try:
        with torch.no_grad(), acquisition.fakes.mode:
            made = spec.build(spec.leaves(fake))
            is_another = bool(names) and _metadata(made) != _metadata(fake)
            why = "its class puts another tensor together of what is inside then"
    except Exception as e:
        if not names:
            raise
        is_another, why, made = True, f"its class does not put it together of what is inside then: {type(e).__name__}: {e}", fake
    if is_another:
        raise UnsupportedOpError(
            with_details(
                f"a {spec.cls.__name__} that the program makes is returned or kept, and {', '.join(map(repr, names))} set to what "
                "makes another tensor of it",
                why=why,
                instead="make a new instance",
            )
        )
    if not is_jagged_class(spec.cls) and (shapes := [tuple(outer_metadata(x)[0]) for x in (fake, made)])[0] != shapes[1]:
        raise UnsupportedOpError(
            with_details(
                f"a {spec.cls.__name__} that is returned or kept has shape {shapes[0]}, and is put together with shape {shapes[1]}",
                why="an operation of torch changed the shape of what is inside in place, and not that of the wrapper "
                "(the product of a vector and a matrix does), or __tensor_unflatten__ leaves out the size that it is given",
                instead="give a matrix of one row in place of the vector, or have the class use outer_size",
            )
        )
    return made


def _names_set(acquisition: Acquisition, fake: torch.Tensor) -> list[str]:
    """The attributes that the program has set on a wrapper, and on those inside of it."""
    inside = [t for t in flattened(fake)[0].values() if is_wrapper(t)]
    return [*acquisition.wrappers.attributes.get(id(fake), ()), *(name for t in inside for name in _names_set(acquisition, t))]


def _metadata(x: torch.Tensor) -> list[Any]:
    """What torch knows of a wrapper, and of those inside of it."""
    inside = [t for t in flattened(x)[0].values() if is_wrapper(t)]
    return [(outer_metadata(x)[:2], x.dtype, x.device), *(m for t in inside for m in _metadata(t))]


def _putting(places: Sequence[_Place]) -> Callable[[list], None]:
    def put_all(given: list) -> None:
        for place, value in zip(places, given[1:], strict=True):
            place.put(given[0], value)

    return put_all


def _changed(
    acquisition: Acquisition, fake: torch.Tensor, made: torch.Tensor | None, way: tuple[str, ...]
) -> Iterator[tuple[_Place, Any, WrappedValue | None]]:
    """The attributes of a wrapper, and of those inside, with what they are at the end of the program.

    `made` is what it is put together as, if it was not given.
    """
    parts, others = flattened(fake)[0], {} if made is None else flattened(made)[0]
    are_set = acquisition.wrappers.attributes.get(id(fake), {})
    for name, (new, wrapped) in are_set.items():
        if name in others:
            continue
        now = _read(fake, name)
        is_as_set = now is new and wrapped is not None and not isinstance(now, torch.Tensor)
        yield _Place(way, name), wrapped.value if is_as_set else now, wrapped if is_as_set else None
    before = acquisition.wrappers.before.get(id(fake)) if made is None else data_of(made)
    now = data_of(fake) if made is not None or before is None else own_of(fake)
    for name in {**before, **now} if before is not None else ():
        value = now.get(name, _GONE)
        if value is _GONE and _read(fake, name) is not _GONE:  # an object, which operations have put there: of this call alone
            continue
        is_part = made is None and name in parts and isinstance(value, torch.Tensor)
        if (
            name not in are_set
            and (is_part or isinstance(value, (*DATA, _Mark)))
            and not _is_same(before.get(name, _GONE), value)
        ):
            yield _Place(way, name), value, None
    yield from ((_Place(way, name), value, None) for name, value in _beside(acquisition, fake, made) if name not in are_set)
    of_plain = those_set(get_jit_ctx()).values()
    for name, inner in parts.items():
        if isinstance(inner, torch.Tensor) and is_wrapper(inner):
            yield from _changed(acquisition, inner, others.get(name), (*way, name))
        for of_tensor in of_plain:
            if acquisition.fakes.known(of_tensor.proxy) is inner:
                yield from ((_Place((*way, name), key), v.value, v) for key, v in of_tensor.values.items() if v is not None)


def _beside(acquisition: Acquisition, fake: torch.Tensor, made: torch.Tensor | None) -> Iterator[tuple[str, Any]]:
    """The tensors, and containers and objects of data, that operations have left where the class of a wrapper does not flatten them."""
    then = acquisition.wrappers.before.get(id(fake)) if made is None else own_of(made)
    for name, value in beside_parts(fake).items() if then is not None else ():
        old, what = then.get(name, _GONE), contents(value)
        if value is old or isinstance(value, (*DATA, _Mark, Held)):
            continue
        if what is not None and what != contents(old):
            yield name, value
        is_made_too = made is not None and contents(old) is None  # a tensor, by the class itself
        if what is None and flat_tensors(value) and not is_made_too and _are_known(acquisition, value):
            yield name, value


def _are_known(acquisition: Acquisition, value: Any) -> bool:
    return all(_found(acquisition, t) is not None for t in flat_tensors(value))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and is_equal(one, other))


def _with_proxies(acquisition: Acquisition, value: Any) -> Any:
    return map_tensors(lambda t: _proxy_of(acquisition, t), value) if flat_tensors(value) else value


def _found(acquisition: Acquisition, fake: torch.Tensor) -> TensorProxy | None:
    return acquisition.wrappers.proxy_of(fake) if is_wrapper(fake) else acquisition.fakes.proxy_of(fake)


def _proxy_of(acquisition: Acquisition, fake: torch.Tensor) -> TensorProxy:
    found = _found(acquisition, fake)
    if found is None:
        raise UnsupportedSubclassError(f"an attribute is set to a {type(fake).__name__} that no traced operation produced")
    return found
