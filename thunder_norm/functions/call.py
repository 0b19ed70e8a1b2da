"""One call of a transformed function, as its `emit` sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder.core.interpreter import WrappedValue, _interpret_call, wrap_const
from thunder.core.proxies import TensorProxy
from torch.utils._pytree import TreeSpec

from thunder_norm.functions import acquisition
from thunder_norm.functions.acquisition import Program
from thunder_norm.functions.programs import flat_proxies


class Call:
    """One call of a transformed function, met by the interpreter."""

    def __init__(self, transformed: WrappedValue, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]):
        self._transformed = transformed
        self._args = args
        self._kwargs = kwargs
        self.name: str = transformed.value.name
        self.result_specs: list[TreeSpec] = transformed.value.result_specs
        self.skipped = transformed.value.num_own_arguments
        values, self.kwargs = acquisition.values_of(args, kwargs)
        self.own, self.args = values[: self.skipped], values[self.skipped :]

    def acquire(
        self, function: str = "function", args: Sequence[Any] | None = None, shapes: Callable[..., Any] | None = None
    ) -> Program:
        """The attribute `function` of the transformed function as a flat program, for this call's arguments or for `args`."""
        wrapped = _interpret_call(getattr, self._transformed, wrap_const(function))
        if args is not None:
            given = tuple(acquisition.wrapped(a, self._transformed) for a in args)
            return acquisition.acquire(wrapped, self.name, given, {}, shapes)
        return acquisition.acquire(wrapped, self.name, self._args[self.skipped :], self._kwargs, shapes)

    @property
    def tensors(self) -> tuple[TensorProxy, ...]:
        """The tensors among the arguments, in the order of the arguments of `acquire`'s program."""
        return flat_proxies((self.args, self.kwargs))
