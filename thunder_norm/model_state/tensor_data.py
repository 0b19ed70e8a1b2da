"""The data of tensors that a program writes into: copied before the first write, put back afterwards."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_norm.higher_order_operators import written_out
from thunder_norm.trees import flat_tensors
from thunder_norm.wrapper_classes import is_wrapper, is_wrapper_class

# written by normalizations in training, which their schemas do not say
_WRITTEN = frozenset({"running_mean", "running_var"})


class WriteLog(TorchDispatchMode):
    """Copies the memory of tensors before an operation inside writes into it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._made: set[int] = set()  # inside: what is in them is nobody else's

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(t is not FakeTensor and is_wrapper_class(t) for t in types):
            return NotImplemented  # the class comes first; what it does inside arrives here
        if (body := written_out(func)) is not None:
            with self:
                return body(*args, **kwargs)
        for t in _written(func, args, kwargs):
            if _has_data(t):
                self._before_write(t)
        result = func(*args, **kwargs)
        made = {t.untyped_storage()._cdata for t in flat_tensors(result) if _has_data(t)}
        if made:
            self._made |= made - {t.untyped_storage()._cdata for t in flat_tensors((args, kwargs)) if _has_data(t)}
        return result

    def _before_write(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        if storage._cdata in self._made:
            return
        if storage._cdata not in self._copies:
            self._copies[storage._cdata] = storage, storage.clone()
        if not t.is_inference():
            self._versions.append((t, t._version))

    def restore(self) -> None:
        """Put back what was there before the first writes."""
        for storage, copy in self._copies.values():
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)
        for t, version in reversed(self._versions):  # a graph that waits for its backward may have saved it
            torch._C._autograd._unsafe_set_version_counter((t,), (version,))


def _written(func: Any, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """The tensor arguments that an operation writes into; of an operator on functions all, as it is not known what these do."""
    if isinstance(func, HigherOrderOperator):
        yield from flat_tensors((args, kwargs))
        return
    for i, name in _written_arguments(func):
        yield from flat_tensors(args[i] if i < len(args) else kwargs.get(name))


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (i, a.name)
        for i, a in enumerate(func._schema.arguments)
        if a.name in _WRITTEN or (a.alias_info is not None and a.alias_info.is_write)
    )


def _has_data(t: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own that can be looked at."""
    if t.is_meta or isinstance(t, FakeTensor):
        return False
    is_plain = type(t) in _PLAIN or (not is_wrapper(t) and not is_lazy(t))
    return is_plain and t.layout is torch.strided


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Leaves:
    """What tensors are besides their data: where it lies, gradients, whether they require grad, hooks."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self._known = [(t, *_state(t)) for t in tensors if _has_data(t)]

    def restore(self) -> None:
        """Make them so again."""
        for t, alias, requires_grad, grad, hooks in self._known:
            if not _shows_the_same(t, alias):
                t.data = alias
            if t.is_leaf and t.requires_grad != requires_grad:
                t.requires_grad_(requires_grad)
            if t.is_leaf and t.grad is not grad:
                t.grad = grad
            now = t._backward_hooks
            if hooks is None and now is not None:
                t._backward_hooks = None
            elif hooks is not None and now is not None and list(now) != list(hooks):
                now.clear()
                now.update(hooks)


def _state(t: torch.Tensor) -> tuple[Any, ...]:
    hooks = t._backward_hooks
    return t.detach(), t.requires_grad, t.grad if t.is_leaf else None, None if hooks is None else dict(hooks)


def _shows_the_same(t: torch.Tensor, alias: torch.Tensor) -> bool:
    return (
        t.untyped_storage()._cdata == alias.untyped_storage()._cdata
        and (t.shape, t.stride(), t.dtype) == (alias.shape, alias.stride(), alias.dtype)
        and t.storage_offset() == alias.storage_offset()
    )
