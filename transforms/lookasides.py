"""Implementations of one's own for calls that cannot be traced, or not well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_norm.errors import TransformError, TransformTypeError, with_details
from thunder_norm.tracing import hooks
from thunder.core.interpreter import _interpret_call


def register_lookaside(fn: Callable, replacement: Callable | None = None, *, override: bool = False) -> Callable:
    """Have traced programs call `replacement` wherever they call `fn`.

    For functions of libraries that a trace cannot follow (they leave Python, or ask for values), or that take long to follow.
    `replacement` takes the arguments of `fn` and is traced in its place; eager calls of `fn` stay as they are.  It holds for every
    ``thunder.jit`` of the process, with or without transforms, from its next trace on.  A helper of it that computes with numbers
    and strings only is best decorated with ``functools.cache``: Thunder then runs it as it is.

    Args:
        fn: a function or method, looked up by identity: ``from library import fn`` and ``library.fn`` are one.
        replacement: an implementation in torch operations; without it, `register_lookaside` is a decorator.  It must not call
            `fn` itself.
        override: replace a registered implementation (Thunder's own for torch functions are registered ones).

    Returns:
        `replacement`.

    Raises:
        TransformTypeError: one of the two is not callable, or `fn` cannot be looked up.
        TransformError: `fn` has an implementation already, or is its own replacement.

    >>> import numpy, torch
    >>> from thunder_norm.transforms import register_lookaside
    >>> import thunder
    >>> def half(x):
    ...     return torch.from_numpy(numpy.multiply(x.numpy(), 0.5))  # leaves torch: there are no values in a trace
    >>> @register_lookaside(half)
    ... def _(x):
    ...     return x * 0.5
    >>> thunder.jit(lambda x: half(x) + 1)(torch.ones(2))
    tensor([1.5000, 1.5000])
    """
    for role, given in (("fn", fn), ("replacement", replacement)):
        if not callable(given) and (role == "fn" or given is not None):
            raise TransformTypeError(f"register_lookaside takes two functions, {role} is of type {type(given).__name__}")
    if replacement is None:
        return lambda replacement: register_lookaside(fn, replacement, override=override)
    try:
        is_known = hooks.is_replaced_for_all(fn)
    except TypeError as e:
        raise TransformTypeError(f"register_lookaside looks functions up, {fn!r} is not hashable") from e
    if replacement is fn:
        raise TransformError(f"{_name(fn)} is registered as its own replacement")
    if is_known and not override:
        raise TransformError(
            with_details(
                f"{_name(fn)} has an implementation for traces already",
                instead="register_lookaside(..., override=True) replaces it",
            )
        )

    def lookaside(*args: Any, **kwargs: Any) -> Any:
        return _interpret_call(replacement, *args, **kwargs)

    hooks.register_for_all(fn, lookaside)
    return replacement


def _name(fn: Any) -> str:
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"
