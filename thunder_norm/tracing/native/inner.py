"""The small functions inside Thunder's functions, and classes of its own, that it has itself interpret: known by their code.

Each native one returns None, before it has done anything that shows, where only Thunder's own way will do.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType, MethodDescriptorType, MethodType, WrapperDescriptorType
from typing import Any

from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.native.elements import handed_on, item, items, note_attribute
from thunder_norm.tracing.native.flattening import flatten
from thunder.core import interpreter as thunders
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, do_raise, wrap, wrap_const
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.torch.experimental import dtensor_torch_and_prims
from thunder.torch.experimental.dtensor_proxy import DTensorProxy

_EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED
_VIEWS = (thunders.MappingKeysView, thunders.MappingValuesWrapper, thunders.MappingItemsWrapper)
_ITERATORS = (thunders.MappingValuesIterator, thunders.MappingItemsIterator)
_METHODS = (FunctionType, MethodDescriptorType, WrapperDescriptorType)
_nothing = object()


def native_of(fn: Callable) -> Callable | None:
    """What does the work of `fn`, if that is one of these: called with `fn` and its (wrapped) arguments."""
    found = _BY_CODE.get(id(fn.__code__)) if type(fn) is FunctionType else _make_cell if fn is CellType else None
    return found


# -- asking objects -----------------------------------------------------------------------------------------------------


def _has_method(value: Any, name: str) -> bool:
    """Whether a class says what ``value.name()`` is, and nothing else has a say."""
    kind = type(value)
    if isinstance(value, (type, super, Proxy)) or value.__class__ is not kind:
        return False
    if isinstance(kind.__getattribute__, FunctionType) or type(in_classes(kind.__mro__, name, None)) not in _METHODS:
        return False
    return name not in (getattr(value, "__dict__", None) or ())


def unbound(method: WrappedValue) -> tuple[WrappedValue, WrappedValue]:
    """The function of a method, and what it is called with first."""
    function = thunders.wrap_attribute(method.value.__func__, method, wrap_const("__func__"))
    return function, thunders.wrap_attribute(method.value.__self__, method, wrap_const("__self__"))


def _call_method(obj: WrappedValue, name: str, *args: WrappedValue) -> Any:
    """``obj.name(*args)`` as the interpreter does it."""
    method = thunders._interpret_call(getattr, obj, wrap_const(name))
    if method is _EXCEPTION_RAISED:
        return method
    if getattr(method.value, "__self__", _nothing) is obj.value:
        thunders.populate_attribute_wrapper(method, "__self__", obj)
    if type(method.value) is MethodType:
        function, owner = unbound(method)
        return _handed_on(thunders._interpret_call(function, owner, *args))
    return _handed_on(thunders._interpret_call(method, *args))


def _handed_on(result: Any) -> Any:
    return result if result is _EXCEPTION_RAISED else handed_on(result)


def _bool(fn: Any, x: WrappedValue) -> Any:
    if _has_method(x.value, "__bool__"):
        kind = thunders._type_lookaside(x)
        said = thunders._interpret_call(thunders._interpret_call(getattr, kind, wrap_const("__bool__"), wrap_const(_nothing)), x)
        if said is _EXCEPTION_RAISED or isinstance(said.value, bool | Proxy):
            return said
        return do_raise(TypeError(f"__bool__ should return bool, returned {type(said.value).__name__}"))
    if in_classes(type(x.value).__mro__, "__bool__", _nothing) is not _nothing or not _has_method(x.value, "__len__"):
        return None
    length = thunders._interpret_call(len, x)
    if length is _EXCEPTION_RAISED:
        return length
    if type(length.value) is not int:
        return thunders._interpret_call(lambda length: length != 0, length)
    return wrap(length.value != 0, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=[]))


def _len(fn: Any, obj: WrappedValue) -> Any:
    if not _has_method(obj.value, "__len__"):
        return None
    result = thunders._interpret_call(thunders._interpret_call(getattr, obj, wrap_const("__len__")))
    if result is _EXCEPTION_RAISED:
        return result
    if not isinstance(result.value, int):
        return do_raise(TypeError(f"'{type(result.value).__name__}' object cannot be interpreted as an integer"))
    if type(result.value) is int and result.value < 0:
        return do_raise(ValueError("__len__() should return >= 0"))
    return result


def _iter(fn: Any, obj: WrappedValue) -> Any:
    return _call_method(obj, "__iter__") if _has_method(obj.value, "__iter__") else None


def _next(fn: Any, iterator: WrappedValue) -> Any:
    return _call_method(iterator, "__next__") if _has_method(iterator.value, "__next__") else None


def _next_of_loop(fn: Any, iterator: WrappedValue) -> Any:
    return _handed_on(thunders._interpret_call(next, iterator))


def _next_key(iterator: WrappedValue) -> tuple[Any, Any]:
    """The dict of an iterator over its values or items, and the next key."""
    mapping, keys = (thunders._interpret_call(getattr, iterator, wrap_const(name)) for name in ("_mapping", "_key_iter"))
    return mapping, thunders._interpret_call(next, keys)


def _next_of_values(fn: Any, iterator: WrappedValue) -> Any:
    mapping, key = _next_key(iterator)
    return key if key is _EXCEPTION_RAISED else _handed_on(thunders._interpret_call(dict.__getitem__, mapping, key))


def _next_of_items(fn: Any, iterator: WrappedValue) -> Any:
    mapping, key = _next_key(iterator)
    if key is _EXCEPTION_RAISED:
        return key
    value = thunders._interpret_call(dict.__getitem__, mapping, handed_on(key))
    return value if value is _EXCEPTION_RAISED else handed_on(thunders.wrapped_build_tuple((key, handed_on(value))))


def _contains(fn: Any, container: WrappedValue, key: WrappedValue) -> Any:
    if not _has_method(container.value, "__contains__"):
        return None
    return thunders._interpret_call(thunders._interpret_call(getattr, container, wrap_const("__contains__")), key)


def _out_of_place(
    fn: Any, a: WrappedValue, b: WrappedValue, left: WrappedValue, right: WrappedValue, symbol: WrappedValue
) -> Any:
    if any(isinstance(x.value, Proxy) and type(x.value) is not TensorProxy for x in (a, b)):
        return None  # the type of what stands for a wrapper is not what stands for it
    for first, second, name in ((a, b, left), (b, a, right)):
        kind = thunders._type_lookaside(first)
        if hasattr(kind.value, name.value):
            method = thunders._interpret_call(getattr, kind, name)
            result = method if method is _EXCEPTION_RAISED else thunders._interpret_call(method, first, second)
            if result is _EXCEPTION_RAISED or result.value is not NotImplemented:
                return _handed_on(result)
    kinds = f"'{type(a.value)}' and '{type(b.value)}'"
    return do_raise(TypeError(f"unsupported operand type(s) for {symbol.value}: {kinds}"))


# -- views of mappings --------------------------------------------------------------------------------------------------


def _set(obj: WrappedValue, name: str, value: WrappedValue) -> None:
    """``obj.name = value`` of an object of Thunder's that has just been made."""
    setattr(obj.value, name, value.value)
    note_attribute(obj, wrap_const(name), value)


def _make_view(fn: Any, view: WrappedValue, mapping: WrappedValue) -> Any:
    _set(view, "_mapping", mapping)
    return wrap_const(None)


def _make_iterator(fn: Any, iterator: WrappedValue, mapping: WrappedValue, *is_reversed: WrappedValue) -> Any:
    """What iterates over the values or the items of a mapping, by its keys."""
    if is_reversed:
        return None
    _set(iterator, "_mapping", mapping)
    is_of_values = fn.__code__ is thunders.MappingValuesIterator.__init__.__code__
    keys = thunders._interpret_call(iter, mapping) if is_of_values else _call_method(mapping, "__iter__")
    if keys is _EXCEPTION_RAISED:
        return keys
    _set(iterator, "_key_iter", keys)
    return wrap_const(None)


def _iter_of_values(fn: Any, view: WrappedValue) -> Any:
    mapping = thunders._interpret_call(getattr, view, wrap_const("_mapping"))
    return _handed_on(thunders._interpret_call(wrap_const(thunders.MappingValuesIterator), mapping))


def _iter_of_items(fn: Any, view: WrappedValue) -> Any:
    mapping = thunders._interpret_call(getattr, view, wrap_const("_mapping"))
    return _handed_on(thunders._interpret_call(wrap_const(thunders.MappingItemsIterator), mapping))


def _iter_of_keys(fn: Any, mapping: WrappedValue) -> Any:
    keys = _call_method(mapping, "keys")
    return keys if keys is _EXCEPTION_RAISED else _call_method(keys, "__iter__")


def _got(fn: Any, mapping: WrappedValue, key: WrappedValue) -> Any:
    """``mapping[key]`` of `dict.get`, which notes that it asks for the key."""
    if type(mapping.value) is dict and type(key.value) is str and key.value not in mapping.value:
        return do_raise(KeyError(key.value))
    return _element(fn, mapping, key)


# -- elements, cells, calls ---------------------------------------------------------------------------------------------


def _element(fn: Any, container: WrappedValue, key: WrappedValue) -> Any:
    found = item(container, key.value)
    return None if found is None else handed_on(found)


def _contents(fn: Any, cell: WrappedValue) -> Any:
    return _handed_on(thunders._interpret_call(getattr, cell, wrap_const("cell_contents")))


def _make_cell(fn: Any, *contents: WrappedValue) -> Any:
    """``CellType(x)``; its ``__init__`` is object's and does nothing."""
    return thunders._cell_new_provenance_tracking_lookaside(wrap_const(CellType), *contents) if len(contents) < 2 else None


def _partial(fn: Any, partial: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    value = partial.value
    if type(value) is not functools.partial or value.keywords or not isinstance(value.func, (FunctionType, Symbol)):
        return None  # others, as isinstance, may ask who calls them
    function, first, keywords = (thunders._interpret_call(getattr, partial, wrap_const(n)) for n in ("func", "args", "keywords"))
    given = items(first)
    if given is None:
        return None
    keywords.track_items()
    return thunders._interpret_call(function, *map(handed_on, (*given, *args)), **{k: handed_on(v) for k, v in kwargs.items()})


def _dispatched(fn: Any, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """An operation that has a variant for distributed tensors: the other one, unless all its tensors are distributed."""
    given = flatten((tuple(a.value for a in args), {k: v.value for k, v in kwargs.items()}))[0]
    tensors = [t for t in given if isinstance(t, TensorProxy)]
    if tensors and all(isinstance(t, DTensorProxy) for t in tensors):
        return None
    function = dict(zip(fn.__code__.co_freevars, fn.__closure__, strict=True))["single_device_symbol"].cell_contents
    given_by_name = {k: handed_on(v) for k, v in kwargs.items()}
    with _in_frame(fn, _CALLS_OF_DISPATCH[-1 if tensors else 0]):
        return thunders._interpret_call(wrap_const(function), *map(handed_on, args), **given_by_name)


@contextmanager
def _in_frame(fn: Any, positions: dis.Positions) -> Iterator[None]:
    """Stand at a place in `fn` meanwhile: operations are recorded with it as their line."""
    runtime = thunders.get_interpreterruntimectx()
    names = wrap_const({})
    runtime._push_frame_stack(
        thunders.InterpreterFrame(
            code=fn.__code__,
            qualname=fn.__qualname__,
            module=fn.__module__,
            globals=fn.__globals__,
            names=names,
            positions=positions,
            _locals=names,
        )
    )
    try:
        yield
    finally:
        runtime._pop_frame_stack()


def _calls(function: Callable, name: str) -> list[dis.Positions]:
    """Where a function inside a function hands on its arguments, from top to bottom."""
    instructions = dis.get_instructions(_inside(function, name))
    places = [i.positions for i in instructions if i.opname == "CALL_FUNCTION_EX" and i.positions is not None]
    return sorted(places, key=lambda p: p.lineno or 0)


# -- which is which -----------------------------------------------------------------------------------------------------


def _codes(code: CodeType) -> list[CodeType]:
    """The code of all functions inside a function."""
    inside = [c for c in code.co_consts if isinstance(c, CodeType)]
    return [found for c in inside for found in (c, *_codes(c))]


def _inside(function: Callable, name: str, *names: str) -> CodeType:
    """The code of the function `name` inside a function of Thunder's that uses these names."""
    (found,) = (c for c in _codes(function.__code__) if c.co_name == name and set(names) <= set(c.co_names))
    return found


_CALLS_OF_DISPATCH = _calls(dtensor_torch_and_prims.dispatch_to_impl, "wrapper")


def _natives() -> dict[int, Callable]:
    inner = {
        _inside(thunders._bool_lookaside, "impl"): _bool,
        _inside(thunders._len_lookaside, "impl"): _len,
        _inside(thunders._iter_lookaside, "nosentinel_impl"): _iter,
        _inside(thunders._next_lookaside, "impl"): _next,
        _inside(thunders._tuple_new_provenance_tracking_lookaside, "<lambda>", "__next__"): _next,
        _inside(thunders._for_iter_handler, "_next_impl"): _next_of_loop,
        **{view.__init__.__code__: _make_view for view in _VIEWS},
        **{iterator.__init__.__code__: _make_iterator for iterator in _ITERATORS},
        thunders.MappingValuesWrapper.__iter__.__code__: _iter_of_values,
        thunders.MappingItemsWrapper.__iter__.__code__: _iter_of_items,
        _inside(thunders.MutMappingWrapperMethods.__iter__, "impl"): _iter_of_keys,
        _inside(thunders.MutMappingWrapperMethods.get, "<lambda>"): _got,
        thunders.MappingValuesIterator.__next__.__code__: _next_of_values,
        thunders.MappingItemsIterator.__next__.__code__: _next_of_items,
        _inside(thunders._contains_op_handler, "impl"): _contains,
        _inside(thunders._binary_op, "outofplace_impl"): _out_of_place,
        _inside(thunders._setup_frame_and_run_python_function, "<lambda>", "__getitem__"): _element,
        _inside(thunders.partial_call_lookaside, "partial_call_impl"): _partial,
        _inside(dtensor_torch_and_prims.dispatch_to_impl, "wrapper"): _dispatched,
    }
    of_super = [c for c in _codes(thunders._super_lookaside.__code__) if c.co_names == ("cell_contents",)]
    of_tuple = [c for c in _codes(thunders._tuple_new_provenance_tracking_lookaside.__code__) if c.co_varnames == ("seq", "i")]
    found = {**inner, **dict.fromkeys(of_super, _contents), **dict.fromkeys(of_tuple, _element)}
    return {id(code): native for code, native in found.items()}  # their functions keep them alive


_BY_CODE = _natives()
