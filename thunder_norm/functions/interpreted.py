"""What Thunder's interpreter has in transformed functions: which of them it is in, and their values.

A wrapper subclass is a container of its inner tensors: under `SubclassTransform` the interpreter has a `SubclassProxy` for one.
Transforms work on its inner tensors: what goes in and out of a transformed function is opened, a pytree like any other, and closed
again where the user's program sees it.  Values of tensors that a function asks for while it is traced are refused.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import GetAttrKey, register_pytree_node, tree_flatten, tree_map

from thunder_norm.errors import TransformError, TransformTypeError, with_details
from thunder_norm.subclass.acquiring.values import is_unknown
from thunder_norm.subclass.classes.protocol import WrapperSpec, is_equal
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.recording.trace import UNFLATTEN, leaf_proxies, mark
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.activity import propagate
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent
from thunder_norm.tracing.translation import empty_for
from thunder_norm.wrapper_classes import undifferentiated
import thunder.torch as ltorch
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, do_raise, interpreter_needs_wrap, wrap
from thunder.core.jit_ext import JitCtx, _general_jit_lookaside_map, get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

# -- functions under transforms, one in the other, and what they cannot ask for -----------------------------------------


_STATE = "_thunder_norm_levels"


@dataclass
class Level:
    """A transformed function that is being interpreted.

    Attributes:
        name: of its transform.
        bsyms: what it has done so far.
        given: the names of its arguments, and what these are called outside.
        moved: the names of those that it differentiates, or that have a tangent or a batch dimension.
        is_reverse: whether torch's autograd follows these.
    """

    name: str
    bsyms: Sequence[BoundSymbol]
    given: dict[str, str]
    moved: frozenset[str]
    is_reverse: bool

    @property
    def wrapped(self) -> Set[str]:
        """The names of those that torch.func wraps: what differentiates backward wraps all of them."""
        return self.given.keys() if self.is_reverse else self.moved


@dataclass
class Levels:
    """Which transformed functions are being acquired, from the outermost on, and the proxies of those that are done."""

    opened: list[Level]
    closed: dict[str, str]  # proxies that mean something in one transformed function only, and its name
    kept: list[WrappedValue]  # what the interpreter knows of transformed functions made while it runs
    replaced: set[str]  # the proxies of parameters that others stood for

    @staticmethod
    def of(ctx: JitCtx) -> Levels:
        """The state of the acquisition at hand; it lives and dies with it."""
        found = getattr(ctx, _STATE, None)
        if found is None:
            found = Levels([], {}, [], set())
            setattr(ctx, _STATE, found)
        return found


def active_level() -> str | None:
    """The innermost transform whose function is being interpreted, if any."""
    try:
        ctx = get_jit_ctx()
    except LookupError:
        return None
    opened = Levels.of(ctx).opened
    return opened[-1].name if opened else None


def requires_grad(p: TensorProxy) -> bool | None:
    """What ``p.requires_grad`` is in a transformed function; None if no transform has to do with the tensor.

    As in torch.func, where the innermost transform that has wrapped a tensor, or one it was made from, answers: whether it differentiates
    it backward.
    """
    opened, found = Levels.of(get_jit_ctx()).opened, list[tuple[set[str], set[str]]]()
    for level in opened:
        handed_on = [(inside, outside) for inside, outside in level.given.items() if inside not in level.wrapped]
        for names in (of for both in found for of in both):
            names.update([inside for inside, outside in handed_on if outside in names])
        found.append((set(level.wrapped), set(level.moved if level.is_reverse else ())))
        for bsym in level.bsyms:
            for made, active in found:
                propagate(bsym, active)
                if not made.isdisjoint([q.name for q in bsym.flat_proxy_args]):
                    made.update(q.name for q in bsym.flat_proxy_outs)
    return next((p.name in active for made, active in reversed(found) if p.name in made), None)


_CONVERSIONS = {"__bool__": "a condition", "__int__": "int()", "__float__": "float()", "__complex__": "complex()"}
_BUILTINS = {float: "float()", int: "int()", complex: "complex()", format: "the text of a value"}


def _converting(builtin: Callable, what: str) -> Callable:
    """The builtin, which Python runs itself, unless it is called on a value of a transformed function."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return builtin(*args, **kwargs)

    opaque = interpreter_needs_wrap(call)

    def lookaside(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
        level = active_level()
        if level is None or not any(is_unknown(a.value) for a in args):
            return opaque(*args, **kwargs)
        return do_raise(data_dependent(what, level))

    return lookaside


def _refusing(original: Callable, what: str) -> Callable:
    def lookaside(*args: Any, **kwargs: Any) -> Any:
        level = active_level()
        if level is None:
            return original(*args, **kwargs)
        return do_raise(data_dependent(what, level))

    return lookaside


for _name, _what in _CONVERSIONS.items():  # Thunder's own do not know the user's line
    _method = getattr(TensorProxy, _name)
    lookasides.instead_of(_method)(_refusing(_general_jit_lookaside_map[_method], _what))
for _builtin, _what in _BUILTINS.items():
    if _builtin not in _general_jit_lookaside_map:
        lookasides.instead_of(_builtin)(_converting(_builtin, _what))


# -- wrappers -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Structure:
    """What a wrapper is beside its inner tensors."""

    spec: WrapperSpec
    shapes: tuple[tuple[int, ...], ...]  # of the inner tensors
    acquisition: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Structure):
            return False
        same = self.spec.cls is other.spec.cls and self.spec.names == other.spec.names
        return same and is_equal(self.spec.ctx, other.spec.ctx)

    def __hash__(self) -> int:
        return hash((self.spec.cls, self.spec.names))

    def __repr__(self) -> str:
        return self.spec.cls.__name__


class OpenWrapper:
    """The inner tensors of a wrapper."""

    def __init__(self, leaves: Sequence[Any], structure: _Structure):
        self.leaves = tuple(leaves)
        self.structure = structure

    @staticmethod
    def of(proxy: SubclassProxy) -> OpenWrapper:
        """A wrapper of the interpreted program, opened."""
        leaves = leaf_proxies(proxy.acquisition, proxy.fake)
        shapes = tuple(tuple(p.shape) for p in leaves)
        given = proxy.acquisition.wrappers.specs.get(id(proxy.fake))  # fakes never require grad here
        spec = dataclasses.replace(WrapperSpec.of(proxy.fake), requires_grad=given is not None and given.requires_grad)
        return OpenWrapper(leaves, _Structure(spec, shapes, proxy.acquisition))

    @property
    def class_name(self) -> str:
        """The wrapper's class."""
        return self.structure.spec.cls.__name__

    def close(self) -> SubclassProxy:
        """A wrapper around these inner tensors, for the interpreted program.

        Raises:
            TransformTypeError: something else than tensors has come in their place.
        """
        acquisition, spec = self.structure.acquisition, self.structure.spec
        if not all(isinstance(p, TensorProxy) for p in self.leaves):
            raise TransformTypeError(
                with_details(f"a {self.class_name} cannot be put together", got=", ".join(type(p).__name__ for p in self.leaves))
            )
        shape = self._shape()
        stride = spec.stride if shape == spec.shape else torch.empty(shape, device="meta").stride()
        spec = dataclasses.replace(spec, shape=shape, stride=stride, requires_grad=False)
        fakes = tuple(_fake_of(acquisition, p) for p in self.leaves)
        with torch.no_grad(), acquisition.fakes.mode:
            fake = spec.build(fakes)
        proxy = acquisition.register(SubclassProxy(fake, acquisition))
        acquisition.wrappers.leaves[id(fake)] = tuple(self.leaves)
        return proxy

    @property
    def requires_grad(self) -> bool:
        """Whether the wrapper itself does."""
        return self.structure.spec.requires_grad

    @property
    def undifferentiated(self) -> int | None:
        """The position among `leaves` of an inner tensor whose derivatives no wrapper of this class holds."""
        name = undifferentiated(self.structure.spec.cls)
        names = self.structure.spec.leaf_names()
        return names.index(name) if name in names else None

    def gradient(self, of_leaves: Sequence[TensorProxy | None]) -> OpenWrapper | None:
        """The gradient of the wrapper, if it requires one; zeros where an inner tensor has none."""
        if not self.requires_grad:
            return None
        filled = [ltorch.zeros_like(p) if g is None else g for g, p in zip(of_leaves, self.leaves, strict=True)]
        return OpenWrapper(filled, self.structure)

    def _shape(self) -> tuple[int, ...]:
        """The shape of the wrapper: it changes as that of an inner tensor which has the same."""
        spec = self.structure.spec
        for before, p in zip(self.structure.shapes, self.leaves, strict=True):
            if before == spec.shape:
                return tuple(p.shape)
        return spec.shape


def _fake_of(acquisition: Any, p: TensorProxy) -> torch.Tensor:
    known = acquisition.fakes.known(p)
    if known is None:
        with acquisition.fakes.mode:
            known = empty_for(p)
        acquisition.fakes.bind(known, p)
    return known


def opened(value: Any) -> Any:
    """A value of the interpreted program, wrappers opened."""
    return OpenWrapper.of(value) if isinstance(value, SubclassProxy) else value


def closed(tree: Any) -> Any:
    """The tree as the interpreted program sees it."""
    if not any(isinstance(v, OpenWrapper) for v in tree_flatten(tree, is_leaf=is_open)[0]):
        return tree
    return tree_map(lambda v: v.close() if isinstance(v, OpenWrapper) else v, tree, is_leaf=is_open)


def announce(tree: Any, bsyms: list) -> None:
    """Tell the trace of the wrappers in a result, whose inner tensors `bsyms` make."""
    for v in tree_flatten(tree)[0]:
        if isinstance(v, SubclassProxy) and not v.acquisition.num_levels:
            bsyms.append(mark(UNFLATTEN, *leaf_proxies(v.acquisition, v.fake), output=v))


def is_open(v: Any) -> bool:
    """Whether a value is a wrapper, opened: as ``is_leaf`` of a tree, for the values of the user's program."""
    return isinstance(v, OpenWrapper)


def proxies_of(v: Any) -> tuple[TensorProxy, ...]:
    """The tensors of one value of the user's program: none, one, or the inner ones of a wrapper."""
    return v.leaves if is_open(v) else (v,) if isinstance(v, TensorProxy) else ()


def opened_like(results: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """A cotangent for each tensor of the results, of those for each tensor or wrapper."""
    given = iter(cotangents)
    found: list[Any] = []
    for v in results:
        if is_open(v):
            ct = next(given)
            if ct is not None and not (is_open(ct) and len(ct.leaves) == len(v.leaves)):
                raise TransformError(
                    with_details(
                        f"the gradient that reached a {v.class_name} is none", got=f"a {getattr(ct, 'class_name', 'tensor')}"
                    )
                )
            found += [None] * len(v.leaves) if ct is None else ct.leaves
        elif isinstance(v, TensorProxy):
            found.append(next(given))
    return found


def _with_keys(wrapper: OpenWrapper) -> tuple[list, _Structure]:
    names = wrapper.structure.spec.leaf_names()
    return [(GetAttrKey(n), v) for n, v in zip(names, wrapper.leaves, strict=True)], wrapper.structure


register_pytree_node(
    OpenWrapper,
    lambda wrapper: (list(wrapper.leaves), wrapper.structure),
    OpenWrapper,
    serialized_type_name="thunder_norm.OpenWrapper",
    to_dumpable_context=str,
    from_dumpable_context=str,
    flatten_with_keys_fn=_with_keys,
)


# -- values of the interpreter -----------------------------------------------------------------------------------------


def values_of(args: Sequence[WrappedValue], kwargs: dict[str, WrappedValue]) -> tuple[tuple, dict]:
    """Arguments as the interpreter has them, as values: proxies in place of tensors, containers included."""
    return tuple(value_of(a) for a in args), {k: value_of(v) for k, v in kwargs.items()}


def value_of(w: WrappedValue, leaf: Callable[[Any], Any] = opened) -> Any:
    """A value with the proxies that Thunder has for its tensors, `leaf` of each; numbers on the way are guarded as Thunder does it."""
    value = w.value
    if isinstance(value, list | tuple):
        w.track_items()
        items = [value_of(i, leaf) for i in w.item_wrappers]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        w.track_items()
        new = copy.copy(value)
        for k, item in w.item_wrappers.items():
            new[k] = value_of(item, leaf)
        return new
    return leaf(value)


def as_it_is(value: Any) -> Any:
    """A value of the interpreted program, wrappers as they are: as `leaf` of `value_of`."""
    return value


def wrapped(value: Any, like: WrappedValue | None = None) -> WrappedValue:
    """A value that a transformed function makes, for the interpreter."""
    inputs = [] if like is None else [like.provenance]
    return wrap(closed(value), provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=inputs))
