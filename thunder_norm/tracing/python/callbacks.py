"""Functions of Python in C that call the program's: what they call is interpreted, as everything of the program is.

Thunder's interpreter calls them as they are, and they the program's function natively: what that reads is not guarded, the variables
that it assigns keep their values for the interpreter, and torch's functions get what stands for tensors.
"""

from __future__ import annotations

import bisect
import collections
import functools
import inspect
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, WrapperDescriptorType
from typing import Any

from thunder_norm.tracing import lookasides
from thunder_norm.tracing.containers import take_proxies
from thunder_norm.tracing.guarding import snapshots
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.python.comparisons import Compared
from thunder_norm.tracing.python.lists import is_plain
from thunder_norm.tracing.python.misused import late_error
from thunder.core import interpreter as thunders
from thunder.core.interpreter import WrappedValue, do_raise, interpreter_needs_wrap, wrap_const, wrapped_build_tuple

_MISSING = object()
# functions of C that take elements of lists: those that were there before the call have no proxy yet
_TAKE_ELEMENTS = dict.fromkeys(
    (
        *(itertools.chain, itertools.chain.from_iterable, itertools.islice, itertools.cycle, itertools.product),
        *(itertools.combinations, itertools.permutations, itertools.combinations_with_replacement, itertools.groupby),
        *(
            itertools.compress,
            itertools.pairwise,
            collections.deque,
            collections.deque.__init__,
            collections.deque.extend,
            math.prod,
        ),
    ),
    True,
)
_WORDS = (str, bytes, bytearray)  # which Python joins, and does not add


def _written_out(fn: Callable) -> Callable[[Callable], Callable]:
    """Register the generator that does what `fn` does."""

    def enter(generator: Callable) -> Callable:
        is_lazy = inspect.isgeneratorfunction(generator)

        def lookaside(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
            if _is_thunders():
                return interpreter_needs_wrap(fn)(*args, **kwargs)
            error = late_error(fn, args, kwargs) if is_lazy else None
            return thunders._interpret_call(generator, *args, **kwargs) if error is None else thunders.do_raise(error)

        instead_of(fn)(lookaside)
        return generator

    return enter


def _is_thunders() -> bool:
    """Whether a function of Thunder's own makes the call: its callbacks ask for proxies, which the program takes for tensors."""
    module = thunders.get_interpreterruntimectx().frame_stack[-1].module
    return isinstance(module, str) and module.partition(".")[0] == "thunder"


@_written_out(map)
def _map(function: Callable, iterable: Iterable[Any], /, *others: Iterable[Any]) -> Iterator[Any]:
    for args in zip(iterable, *others, strict=False):
        yield function(*args)


@_written_out(filter)
def _filter(function: Callable | None, iterable: Iterable[Any], /) -> Iterator[Any]:
    for value in iterable:
        if value if function is None else function(value):
            yield value


@_written_out(itertools.starmap)
def _starmap(function: Callable, iterable: Iterable[Any], /) -> Iterator[Any]:
    for args in iterable:
        yield function(*args)


@_written_out(itertools.takewhile)
def _takewhile(predicate: Callable, iterable: Iterable[Any], /) -> Iterator[Any]:
    for value in iterable:
        if not predicate(value):
            return
        yield value


@_written_out(itertools.dropwhile)
def _dropwhile(predicate: Callable, iterable: Iterable[Any], /) -> Iterator[Any]:
    is_dropping = True
    for value in iterable:
        is_dropping = is_dropping and predicate(value)
        if not is_dropping:
            yield value


@_written_out(itertools.filterfalse)
def _filterfalse(predicate: Callable | None, iterable: Iterable[Any], /) -> Iterator[Any]:
    for value in iterable:
        if not (value if predicate is None else predicate(value)):
            yield value


@_written_out(itertools.accumulate)
def _accumulate(iterable: Iterable[Any], func: Callable | None = None, *, initial: Any = None) -> Iterator[Any]:
    values = iter(iterable)
    if initial is None:
        try:
            total = next(values)
        except StopIteration:
            return
    else:
        total = initial
    yield total
    for value in values:
        total = total + value if func is None else func(total, value)
        yield total


@_written_out(itertools.groupby)
def _groupby(iterable: Iterable[Any], key: Callable | None = None) -> Iterator[tuple[Any, Iterator[Any]]]:
    """As Python's documentation has it."""
    values, is_over = iter(iterable), False
    try:
        value = next(values)
    except StopIteration:
        return
    found = value if key is None else key(value)

    def group(wanted: Any) -> Iterator[Any]:
        nonlocal value, found, is_over
        yield value
        for value in values:  # noqa: B007 - of the function around
            found = value if key is None else key(value)
            if not (found is wanted or found == wanted):
                return
            yield value
        is_over = True

    while not is_over:
        wanted = found
        rest = group(wanted)
        yield wanted, rest
        if found is wanted or found == wanted:
            for _ in rest:
                pass


def _bisected(bisect: Callable, is_left: bool) -> None:
    @_written_out(bisect)
    def bisected(a: Any, x: Any, lo: int = 0, hi: int | None = None, *, key: Callable | None = None) -> int:
        if lo < 0:
            raise ValueError("lo must be non-negative")
        hi = len(a) if hi is None else hi
        while lo < hi:
            middle = (lo + hi) // 2
            value = a[middle] if key is None else key(a[middle])
            if value < x if is_left else not x < value:
                lo = middle + 1
            else:
                hi = middle
        return lo


_bisected(bisect.bisect_left, True)
_bisected(bisect.bisect_right, False)  # ``bisect.bisect`` too, which is the same function


@instead_of(re.Pattern.sub)
def _sub(pattern: WrappedValue, repl: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    if not isinstance(repl.value, FunctionType | MethodType):
        return interpreter_needs_wrap(re.Pattern.sub)(pattern, repl, *args, **kwargs)
    return thunders._interpret_call(_substituted, pattern, repl, *args, **kwargs)


def _substituted(pattern: Any, repl: Callable, string: Any, count: int = 0) -> Any:
    parts, end = [], 0
    for number, found in enumerate(pattern.finditer(string), 1):
        parts += [string[end : found.start()], repl(found)]
        end = found.end()
        if number == count:
            break
    return string[:0].join([*parts, string[end:]])


@instead_of(eval)
def _eval(source: WrappedValue, /, globals: WrappedValue | None = None, locals: WrappedValue | None = None) -> Any:  # noqa: A002
    """Thunder loses track of what stands for the values in the dicts that `eval` is given, which it has for those of `exec`."""
    return _run(eval, source, globals, locals, None)


@instead_of(exec)
def _exec(
    source: WrappedValue,
    /,
    globals: WrappedValue | None = None,  # noqa: A002 - Python's names
    locals: WrappedValue | None = None,  # noqa: A002
    *,
    closure: WrappedValue | None = None,
) -> Any:
    return _run(exec, source, globals, locals, closure)


def _run(
    fn: Callable, source: WrappedValue, names: WrappedValue | None, own: WrappedValue | None, closure: WrappedValue | None
) -> Any:
    """Run text, which Thunder takes bytes for as they are shown, or code."""
    names, own = names or wrap_const(None), own or wrap_const(None)
    if not isinstance(names.value, dict | None):
        try:
            fn("0", names.value)
        except TypeError as e:  # Python's own
            return do_raise(e)
    text = source.value
    if not isinstance(text, CodeType):
        text = text if isinstance(text, str) else bytes(text).decode()
        source = wrap_const(text.lstrip(" \t") if fn is eval else text)
    return thunders.eval_exec_helper(source, names, own, closure=closure, mode=fn.__name__)


@_written_out(itertools.zip_longest)
def _zip_longest(*iterables: Iterable[Any], fillvalue: Any = None) -> Iterator[Any]:
    remaining = [iter(i) for i in iterables]
    while True:
        values, is_over = [], True
        for place, iterator in enumerate(remaining):
            value = _MISSING if iterator is None else next(iterator, _MISSING)
            if value is _MISSING:
                remaining[place] = None
                value = fillvalue
            else:
                is_over = False
            values.append(value)
        if is_over:
            return
        yield tuple(values)


@_written_out(itertools.tee)
def _tee(iterable: Iterable[Any], n: int = 2, /) -> tuple[Iterator[Any], ...]:
    if n < 0:
        raise ValueError("n must be >= 0")
    values, ahead = iter(iterable), [[] for _ in range(n)]

    def each(own: list[Any]) -> Iterator[Any]:
        while True:
            if not own:
                value = next(values, _MISSING)
                if value is _MISSING:
                    return
                for others in ahead:
                    others.append(value)
            yield own.pop(0)

    return tuple([each(own) for own in ahead])


def _is_of_numbers(iterable: WrappedValue) -> bool:
    return type(iterable.value) in (list, tuple) and all(map(is_plain, iterable.value))


def _sum(iterable: WrappedValue, *start: WrappedValue, **named: WrappedValue) -> Any:
    """Called for what is no list of numbers: C adds tensors that were there before the call, of which the trace knows nothing."""
    listed = thunders._interpret_call(lambda values: [*values], iterable)
    if listed is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return listed
    of_numbers = _is_of_numbers(listed) or any(type(s.value) in _WORDS for s in (*start, *named.values()))
    return (
        interpreter_needs_wrap(sum)(listed, *start, **named)
        if of_numbers
        else thunders._interpret_call(_total, listed, *start, **named)
    )


def _total(values: list[Any], start: Any = 0) -> Any:
    for value in values:
        start = start + value
    return start


@instead_of(functools.cmp_to_key)
def _cmp_to_key(mycmp: WrappedValue) -> Any:
    """What ``functools.cmp_to_key(f)`` makes is C, and takes nothing but its own objects."""
    return thunders._interpret_call(_key_of, mycmp)


def _key_of(compare: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda obj: Compared(compare, obj)


def _attributes(paths: tuple[tuple[str, ...], ...], value: Any) -> Any:
    found = []
    for path in paths:
        end = value
        for name in path:
            end = getattr(end, name)
        found.append(end)
    return found[0] if len(found) == 1 else tuple(found)


def _items(keys: tuple[Any, ...], value: Any) -> Any:
    found = [value[key] for key in keys]
    return found[0] if len(found) == 1 else tuple(found)


def _called(method: tuple[Any, ...], value: Any) -> Any:
    name, args, kwargs = method
    return getattr(value, name)(*args, **kwargs)


def _getter(fn: Any) -> tuple[Callable, tuple] | None:
    """What an object of ``operator`` does with its argument, and what it was made of."""
    if type(fn) is operator.attrgetter:
        return _attributes, tuple(tuple(path.split(".")) for path in fn.__reduce__()[1])
    if type(fn) is operator.itemgetter:
        return _items, fn.__reduce__()[1]
    if type(fn) is not operator.methodcaller:
        return None
    make, given = fn.__reduce__()[:2]
    named: dict[str, Any] = {}
    if isinstance(make, functools.partial):  # with keywords
        named, given = make.keywords, (*make.args, *given)
    name, *args = given
    return _called, (name, tuple(args), named)


def _is_call_of_getter(fn: Any) -> bool:
    """Whether it is what Thunder calls for a getter that was not made by the program."""
    return type(fn) is WrapperDescriptorType and fn.__name__ == "__call__" and fn.__objclass__ in snapshots.GETTERS


def _chosen(values: Iterable[Any], key: Callable | None, default: Any, is_largest: bool) -> Any:
    found, found_key = _MISSING, None
    for value in values:
        own = value if key is None else key(value)
        if found is _MISSING or (own > found_key if is_largest else own < found_key):
            found, found_key = value, own
    if found is not _MISSING:
        return found
    if default is _MISSING:
        return max(()) if is_largest else min(())  # Python's own error, whose words depend on its version
    return default


def lookaside(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of ``sum``, ``max`` and ``min``, where they ask the program for keys, elements or their order, and of getters."""
    getter, given = (_getter(args[0].value), args[1:]) if _is_call_of_getter(fn) and args else (_getter(fn), args)
    if getter is not None and len(given) == 1 and not kwargs and not _is_thunders():
        return lambda *given: thunders._interpret_call(getter[0], wrap_const(getter[1]), given[-1])
    if lookasides.look_up(_TAKE_ELEMENTS, fn) is not None and not _is_thunders():
        take_proxies(*args, **kwargs)
        return None
    if fn is sum and args and not _is_thunders():
        return None if _is_of_numbers(args[0]) else _sum
    if not lookasides.is_pythons(fn) or not args or _is_thunders():
        return None
    key = kwargs.get("key")
    given = list(args[0].value) if len(args) == 1 and type(args[0].value) in (list, tuple) else [a.value for a in args]
    if (key is None or key.value is None) and all(map(is_plain, given)):
        return None
    return functools.partial(_extreme, fn)


def _extreme(fn: Callable, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    unknown = kwargs.keys() - {"key", "default"}
    if unknown or len(args) > 1 and "default" in kwargs:
        return interpreter_needs_wrap(fn)(*args, **kwargs)  # Python's own error
    values = args[0] if len(args) == 1 else wrapped_build_tuple(args)
    key, default = kwargs.get("key", wrap_const(None)), kwargs.get("default", wrap_const(_MISSING))
    return thunders._interpret_call(_chosen, values, key, default, wrap_const(fn is max))
