"""Objects that one program has made and hands out, and what the epilogue makes of them in each call, by a `Recipe`.

What stands at several places, kept and returned, is one object in eager mode: what one operation of the epilogue makes is there in the others.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Container, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.backward import made_by_c
from thunder_norm.subclass.backward.recipes import (
    ATOMS,
    CONTAINERS,
    Call,
    NotMakeableError,
    OfEachCall,
    Recipe,
    attributes_of,
    holds_proxies,
    is_constant,
    is_made_by_class,
)
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.snapshots import is_place
from thunder.core.baseutils import ProxyInterface
from thunder.core.interpreter import WrappedValue
from thunder.core.jit_ext import should_register_for_prologue
from thunder.core.proxies import AnyProxy, Proxy
from thunder.core.trace import TraceCtx, tracectx


class MadeObjects:
    """The objects that one program has made and hands out: each is made by one operation of the epilogue, and known by its proxy.

    Args:
        known: identities of what was there before the trace.
        is_of_arguments: whether a value of these comes with the arguments: what code holds is the same in each call.
    """

    def __init__(self, known: Container[int], is_of_arguments: Callable[[Any], bool]):
        self.known = known
        self._is_of_arguments = is_of_arguments
        self._proxies: dict[int, tuple[Any, AnyProxy]] = {}  # the object is kept: an id stays its object's
        self._tables: dict[bool, AnyProxy] = {}  # what holds all that is made in a call, by whether it is without norms
        self._shared: set[int] = set()  # the identities of containers that stand at several places
        self._arguments: dict[int, WrappedValue] = {}

    def note_arguments(self, wrapped: WrappedValue) -> None:
        """Remember which values in a result come from arguments."""
        pending, seen = [wrapped], set()
        while pending:
            w = pending.pop()
            if not isinstance(w, WrappedValue) or id(w) in seen:
                continue
            seen.add(id(w))
            if should_register_for_prologue(w.provenance):
                self._arguments[id(w.value)] = w
                if w.original_value is not w.nothing:
                    self._arguments[id(w.original_value)] = w
            items = w.item_wrappers
            pending.extend(items.values() if isinstance(items, dict) else items or ())
            pending.extend(w.attribute_wrappers.values())

    def is_made(self, value: Any) -> bool:
        """Whether a value is an instance that the program has made."""
        if isinstance(value, (ProxyInterface, type, torch.Tensor, *ATOMS)) or id(value) in self.known:
            return False
        if isinstance(value, OfEachCall):
            return True
        if type(value) in CONTAINERS or isinstance(value, tuple):
            return False
        return is_made_by_class(value) or made_by_c.is_exception(value) or made_by_c.iterator_parts(value) is not None

    def is_handed_out(self, value: Any) -> bool:
        """Whether an operation of the epilogue makes the value: an object, or a container that Thunder's traces cannot write down."""
        if isinstance(value, tuple):
            is_other = type(value) is not tuple and type(value).__module__ != "torch.return_types"
            return is_other and id(value) not in self.known
        if isinstance(value, FunctionType):
            return id(value) not in self.known and holds_proxies(value)
        # of transformers: Thunder calls the class with its fields
        if isinstance(value, dict) and dataclasses.is_dataclass(value):
            return set(vars(value)) != {f.name for f in dataclasses.fields(value) if f.init}
        is_other = isinstance(value, dict | list | set | collections.deque) and type(value) not in (dict, list)
        return is_other or is_place(value) or self.is_made(value) or is_constant(value)

    def holds_shared(self, value: Any) -> bool:
        """Whether a list, dict or tuple that is returned, or one in it, stands at another place too: in eager mode it is one object."""
        seen, pending = dict[int, Any](), [value]
        while pending:
            v = pending.pop()
            is_container = type(v) in (list, dict, tuple)
            if id(v) in self.known or not (is_container or self.is_made(v)):
                continue
            if id(v) in seen:
                self._shared.add(id(v))
                continue
            seen[id(v)] = v
            pending += (v.values() if type(v) is dict else v) if is_container else attributes_of(v).values()
        return any(id(v) in self._shared for v in seen.values() if type(v) in (list, dict, tuple))

    def is_shared(self, value: Any) -> bool:
        """The same of a value alone."""
        return id(value) in self._shared

    def proxy_of(self, value: Any, epilogue: TraceCtx) -> AnyProxy:
        """The proxy of an object that the program has made, or that an argument holds.

        Raises:
            NotMakeableError: it cannot be made anew.
        """
        if id(value) not in self._proxies:
            recipe = Recipe(self.known, lambda v: None if v is value else self._outside(v))
            recipe.of(value)
            if isinstance(value, tuple | FunctionType) or type(value) in (list, dict) or is_place(value) or is_constant(value):
                recipe.objects.append(value)  # which no trace writes, or not as the one object that it is
            if not recipe.objects:  # it was there before
                raise NotMakeableError(value)
            self._write(recipe, epilogue)
        return self._proxies[id(value)][1]

    def outside(self, epilogue: TraceCtx) -> Callable[[Any], Proxy | None]:
        """For a `Recipe` of other values: what is made by an operation of its own."""
        return lambda v: self.proxy_of(v, epilogue) if self.is_made(v) else self._outside(v)

    def _outside(self, value: Any) -> Proxy | None:
        if id(value) in self._proxies:
            return self._proxies[id(value)][1]
        wrapped = self._arguments.get(id(value))
        if wrapped is not None:
            return wrapped.value if isinstance(wrapped.value, Proxy) else AnyProxy(value, history=wrapped.provenance)
        is_of_call = isinstance(value, torch.Tensor) or self._is_of_arguments(value)
        if id(value) in self.known and is_of_call and not isinstance(value, tuple):
            raise NotMakeableError(value)
        return None

    def _write(self, recipe: Recipe, epilogue: TraceCtx) -> None:
        """Write one operation that makes all instances of a recipe."""
        steps = [recipe.of(v) for v in recipe.objects]
        with tracectx(epilogue):
            outputs = tuple(AnyProxy(v) for v in recipe.objects)
        name = f"make_{type(recipe.objects[0]).__name__}"
        self.bind(epilogue, name, recipe, lambda call: tuple([step(call) for step in steps]), outputs)
        self._proxies.update((id(v), (v, p)) for v, p in zip(recipe.objects, outputs, strict=True))

    def bind(
        self,
        epilogue: TraceCtx,
        name: str,
        recipe: Recipe,
        run: Callable[[Call], Any],
        output: Any,
        as_kept: Mapping[str, Callable] = MappingProxyType({}),
        *,
        is_plain: bool = False,
    ) -> None:
        """Write an operation that runs with what a recipe takes; what one operation of a call has made is there in the others.

        Args:
            epilogue: where.
            name: of the operation.
            recipe: whose arguments it gets.
            run: what it does.
            output: proxies of what `run` returns.
            as_kept: by the names of arguments, what is kept of them.
            is_plain: whether that is without the norms that others have, who may not get the same objects.
        """
        names = list(recipe.arguments)

        def call(made: dict[int, Any], *given: Any) -> Any:
            values = dict(zip(names, given, strict=True))
            return run(Call(values | {n: keep(values[n]) for n, keep in as_kept.items()}, made))

        self._shared.update(recipe.makes)
        with tracectx(epilogue):
            if is_plain not in self._tables:
                table = self._tables[is_plain] = AnyProxy({})
                epilogue.bound_symbols.append(bindable("objects_of_call", dict)(output=table))
            inputs = (self._tables[is_plain], *recipe.arguments.values())
            epilogue.bound_symbols.append(bindable(name, call)(*inputs, output=output))


def refusal(value: Any, what: str) -> UnsupportedOpError:
    """The error for a value that cannot be handed out."""
    cls = type(value)
    described = value.described if isinstance(value, OfEachCall) else f"a {cls.__module__}.{cls.__qualname__}"
    return UnsupportedOpError(
        with_details(
            f"{what} holds {described}, which cannot be made anew in each call",
            why="a trace is used again, with other tensors",
            instead="return tensors, containers, or instances of classes written in Python that hold them",
        )
    )
