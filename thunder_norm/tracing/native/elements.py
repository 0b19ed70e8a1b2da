"""Elements of containers: of tuples, lists and dicts, of arguments and of a function's globals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thunder_norm.tracing.guarding import stored
from thunder_norm.tracing.python import misused
from thunder_norm.tracing.python.subscripts import WRITING, lack, subscript
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import (
    InterpreterStack,
    WrappedValue,
    check_and_append,
    populate_single_dict_item_wrapper,
    unwrap,
)

_handlers = thunders._default_opcode_handler_map
_EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED


def item(container: Any, key: Any) -> WrappedValue | None:
    """``container[key]``, or None where only Thunder's own way will do: another type, no such key."""
    if not isinstance(container, WrappedValue):
        return None
    value = container.value
    kind = type(value)
    if kind is tuple or kind is list:
        if type(key) is not int or not -len(value) <= key < len(value):
            return None
        container.track_items()
        current = value[key]
    elif kind is dict and (type(key) is str or type(key) is int):
        try:
            current = value[key]
            known = container.item_wrappers
            if not (isinstance(known, dict) and key in known and key in container.key_wrappers):
                populate_single_dict_item_wrapper(current, container, key)
        except Exception:  # noqa: BLE001 - no such key, or another key's __eq__ says so
            return None
    else:
        return None
    found = container.item_wrappers[key]
    return found if found.value is current or found.original_value is current else None


def items(container: Any) -> list[WrappedValue] | None:
    """All elements of a tuple or list, or None where only Thunder's own way will do."""
    if not isinstance(container, WrappedValue) or type(container.value) not in (tuple, list):
        return None
    container.track_items()
    for value, found in zip(container.value, container.item_wrappers, strict=True):
        if found.value is not value and found.original_value is not value:
            return None
    return list(container.item_wrappers)


def handed_on(value: WrappedValue) -> WrappedValue:
    """`value` as it is after Thunder's own way, on which it lies on the stack for a while: tuples there are looked into."""
    if isinstance(value.value, tuple):
        value.track_items()
    return value


def note_attribute(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> None:
    """Remember that an attribute of `obj` was set to `value`, for the program's next look at it."""
    obj.attribute_wrappers[name.value] = value
    attributes = obj.attribute_wrappers.get("__dict__")
    if (
        attributes is not None and name.value in attributes.value
    ):  # where buffers and properties are not, which Thunder puts there
        attributes.item_wrappers[name.value] = value
        attributes.key_wrappers[name.value] = name


_original_args = thunders.wrap_args_from_list
_original_kwargs = thunders.wrap_kwargs_from_dict
_original_globals = thunders.globals_lookup
_original_store_subscr = _handlers["STORE_SUBSCR"]
_original_unpack = _handlers["UNPACK_SEQUENCE"]
_original_list_extend = _handlers["LIST_EXTEND"]
_original_dict_merge = _handlers["DICT_MERGE"]
_original_set_update = _handlers["SET_UPDATE"]


def _listed(given: Any) -> Any:
    return thunders._interpret_call(lambda iterable: [*iterable], given)


def _args(lst: Any) -> list[Any]:
    given = unwrap(lst)  # f(*generator), of which Thunder asks the length
    if not isinstance(given, list | tuple) or stored.has_own_methods(type(given)):
        lst = _listed(lst)
        if lst is _EXCEPTION_RAISED:
            raise thunders.get_interpreterruntimectx().curexc
    found = items(lst)
    return _original_args(lst) if found is None else list(map(handed_on, found))


def _kwargs(d: Any) -> dict[str, Any]:
    found = {k: item(d, k) for k in unwrap(d)}
    if any(v is None for v in found.values()):
        return _original_kwargs(d)
    return {k: handed_on(v) for k, v in found.items()}


def _globals(globals_dict: Any, name: Any) -> Any:
    key = unwrap(name)
    found = item(globals_dict, key)
    if found is None and key not in unwrap(globals_dict):
        found = item(item(globals_dict, "__builtins__"), key)
    return _original_globals(globals_dict, name) if found is None else found


def _subscr(inst: Any, /, stack: InterpreterStack, **state: Any) -> Any:
    found = item(stack.getitem_wrapped(-2), stack.getitem_wrapped(-1).value)
    if found is None:
        return subscript(inst, stack=stack, **state)
    stack.pop_wrapped()
    stack.pop_wrapped()
    return check_and_append(stack, found)


_SETITEM = {dict: dict.__setitem__, list: list.__setitem__}


def _store_subscr(inst: Any, /, stack: InterpreterStack, **state: Any) -> Any:
    setitem = _SETITEM.get(type(stack.getitem_wrapped(-2).value))
    if setitem is None:
        error = lack(stack.getitem_wrapped(-2), *WRITING)
        return _original_store_subscr(inst, stack=stack, **state) if error is None else thunders.do_raise(error)
    key, container, value = stack.pop_wrapped(), stack.pop_wrapped(), stack.pop_wrapped()
    return thunders.check_signal(thunders._interpret_call(setitem, container, key, value))


def _unpack_sequence(inst: Any, /, stack: InterpreterStack, **state: Any) -> Any:
    found = items(stack.getitem_wrapped(-1))
    if found is None or len(found) != inst.arg:  # too few or too many is an error, and Thunder's
        return _of_iterator(_original_unpack, inst, stack, state)
    stack.pop_wrapped()
    stack.extend(reversed(found))
    return None


def _of_iterator(unpack: Any, inst: Any, stack: InterpreterStack, state: dict[str, Any]) -> Any:
    """Unpack what is on the stack by an iterator of it, which Thunder asserts that there is."""
    iterated = thunders._interpret_call(iter, stack.getitem_wrapped(-1))
    if iterated is _EXCEPTION_RAISED:
        return iterated
    stack.pop_wrapped()
    stack.append(iterated)
    return unpack(inst, stack=stack, **state)


def _list_extend(inst: Any, /, stack: InterpreterStack, **state: Any) -> Any:
    if type(stack.getitem_wrapped(-inst.arg - 1).value) is not list:
        return _original_list_extend(inst, stack=stack, **state)
    added = stack.pop_wrapped()
    return thunders.check_signal(thunders._interpret_call(list.extend, stack.getitem_wrapped(-inst.arg), added))


def _is_written_in_python(mapping: Any) -> bool:
    """Whether it is a dict with methods of its own, or an object that has keys and items and is no mapping for Thunder."""
    return stored.has_own_methods(type(mapping)) or not isinstance(mapping, Mapping)


def _dict_merge(inst: Any, /, stack: InterpreterStack, **state: Any) -> Any:
    given = stack.getitem_wrapped(-1).value
    if not hasattr(given, "keys"):
        called = misused.called_shown(stack, inst.arg + 2)
        return thunders.do_raise(TypeError(f"{called} argument after ** must be a mapping, not {type(given).__name__}"))
    if _is_written_in_python(given):
        copied = thunders._interpret_call(dict, stack.getitem_wrapped(-1))
        if copied is _EXCEPTION_RAISED:
            return copied
        stack.pop_wrapped()
        stack.append(copied)
    added, merged = stack.getitem_wrapped(-1), stack.getitem_wrapped(-2)
    if again := merged.value.keys() & added.value:
        called = misused.called_shown(stack, inst.arg + 2)
        return thunders.do_raise(TypeError(f"{called} got multiple values for keyword argument {next(iter(again))!r}"))
    if type(added.value) is not dict or type(merged.value) is not dict:
        return _original_dict_merge(inst, stack=stack, **state)
    stack.pop_wrapped()
    return _put_in(merged, added)


def _put_in(merged: Any, added: Any) -> Any:
    """Items of a dict in another one, each as what it is read as."""
    merged.track_items()
    added.track_items()
    for key in list(added.value):
        value = item(added, key)
        if value is None:
            value = thunders._interpret_call(dict.__getitem__, added, added.key_wrappers[key])
            if value is _EXCEPTION_RAISED:
                return value
        done = thunders._interpret_call(dict.__setitem__, merged, added.key_wrappers[key], handed_on(value))
        if done is _EXCEPTION_RAISED:
            return done
    return None


def _dict_update(inst: Any, /, stack: InterpreterStack, **state: Any) -> Any:
    given = stack.getitem_wrapped(-1).value
    if not hasattr(given, "keys"):
        return thunders.do_raise(TypeError(f"{type(given).__name__!r} object is not a mapping"))
    added, merged = stack.pop_wrapped(), stack.getitem_wrapped(-inst.arg)
    if type(given) is dict and type(merged.value) is dict:
        return _put_in(merged, added)
    return thunders.check_signal(thunders._interpret_call(dict.update, merged, added))


def _set_update(inst: Any, /, stack: InterpreterStack, **state: Any) -> Any:
    # Thunder looks at its elements unseen: one by one, as a list of given tensors does not hold what stands for them
    listed = thunders._interpret_call(lambda iterable: [v for v in iterable], stack.getitem_wrapped(-1))  # noqa: C416
    if listed is _EXCEPTION_RAISED:
        return listed
    stack.pop_wrapped()
    stack.append(listed)
    return _original_set_update(inst, stack=stack, **state)


REPLACEMENTS = (
    Replacement(thunders, "wrap_args_from_list", _args, "`lambda seq, i: seq[i]` for each argument of f(*args)"),
    Replacement(thunders, "wrap_kwargs_from_dict", _kwargs, "`lambda d, k: d[k]` for each argument of f(**kwargs)"),
    Replacement(thunders, "globals_lookup", _globals, "`lambda d, k: d[k]` for each global name"),
    Replacement(_handlers, "BINARY_SUBSCR", _subscr, "getitem_impl in _binary_subscr_handler"),
    Replacement(_handlers, "STORE_SUBSCR", _store_subscr, "impl in _store_subscr_handler"),
    Replacement(_handlers, "UNPACK_SEQUENCE", _unpack_sequence, "iter and next, of a SequenceIter, in _unpack_sequence_handler"),
    Replacement(_handlers, "LIST_EXTEND", _list_extend, "`lambda l1, l2: l1.extend(l2)` in _list_extend_handler"),
    Replacement(_handlers, "DICT_MERGE", _dict_merge, "`lambda a, b: b.update(a)` and impl_other_keys of the mapping's update"),
    Replacement(_handlers, "DICT_UPDATE", _dict_update, "b.update(a) in _dict_update_handler"),
    Replacement(_handlers, "SET_UPDATE", _set_update, "s.update(tos) in _set_update_handler"),
)
