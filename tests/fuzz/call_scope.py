"""What the programs of the subject `calls` are written with: the classes of what they are given, modes, and ways to ask for gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Pair(NamedTuple):
    """A named tuple that a program is given."""

    u: Any
    v: Any


@dataclasses.dataclass
class Data:
    """A dataclass that a program is given."""

    u: Any
    v: Any


class Several(tuple):
    """A tuple of a class of its own."""


class Marked(torch.Tensor):
    """A tensor of a class of its own, without storage or dispatch of its own."""


class Interrupting:
    """A hook that raises an exception in its first call."""

    def __init__(self, error: BaseException):
        self.error: BaseException | None = error

    def __call__(self, *_: Any) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class Counting(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Tripling(TorchFunctionMode):
    """A mode in which ``torch.tanh`` has three times its value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func in (torch.tanh, torch.Tensor.tanh) else result


class Dispatched(TorchDispatchMode):
    """A mode below autograd that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Quadrupling(TorchDispatchMode):
    """A mode below autograd in which tanh has four times its value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 4 if func is torch.ops.aten.tanh.default else result


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    """Another default device inside."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Only deterministic algorithms inside."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def given(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as they are written in a call."""
    return args, kwargs


def total(results: Any) -> torch.Tensor:
    """A number in which each result counts with another weight."""
    floating = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())]
    loss = torch.zeros((), dtype=torch.float64, device=floating[0].device if floating else "cpu")
    for n, t in enumerate(floating):
        loss = loss + (n + 1) * ((t.abs() if t.is_complex() else t).double() * 0.7).sin().sum()
    return loss


def gradients(results: Any, of: list[Any], **options: Any) -> list[torch.Tensor]:
    """Of the total, with respect to what requires grad; zeros where it does not depend on it."""
    wanted = [t for t in of if isinstance(t, torch.Tensor) and t.requires_grad]
    loss = total(results)
    if not wanted or not loss.requires_grad:
        return [torch.zeros_like(t) for t in wanted]
    found = torch.autograd.grad(loss, wanted, allow_unused=True, **options)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def backward(results: Any, **options: Any) -> None:
    """The backward of the total, where there is one."""
    loss = total(results)
    if loss.requires_grad:
        loss.backward(**options)


def in_threads(count: int, f: Callable[[int], Any]) -> list[Any]:
    """What `f` of each number returns, or which class of errors it raises, all at once."""
    results: list[Any] = [None] * count
    together = threading.Barrier(count)

    def work(n: int) -> None:
        together.wait()
        try:
            results[n] = f(n)
        except Exception as e:  # noqa: BLE001 - an outcome
            results[n] = e

    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def pickled(value: Any) -> Any:
    """A copy, by way of bytes."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - of its own
