"""Drawn again: what draws numbers, with the state that they are drawn from, and once more from that state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode

from thunder_norm.errors import MissingTransformRuleError, with_details
from thunder_norm.functions.programs import flat_proxies
from thunder_norm.trees import flat_tensors
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy


def meta_noting(meta: Callable, args: tuple, kwargs: dict) -> tuple[TensorProxy, Any]:
    """The proxies of what `run_noting` returns."""
    return state_proxy(flat_proxies((args, kwargs))[0].device), meta(*args, **kwargs)


def run_noting(run: Callable, args: tuple, kwargs: dict) -> tuple[torch.Tensor, Any]:
    """The state of the generator, and the results."""
    tensors = flat_tensors((args, kwargs))
    _refuse_batches(tensors)
    return state_of(tensors[0].device), run(*args, **kwargs)


def meta_again(meta: Callable, state: TensorProxy, *args: Any, **kwargs: Any) -> Any:
    """The proxies of what `run_again` returns."""
    return meta(*args, **kwargs)


def run_again(run: Callable, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The results with the numbers that are drawn from a state; what is drawn later is not disturbed."""
    tensors = flat_tensors((args, kwargs))
    _refuse_batches([state, *tensors])
    device = tensors[0].device
    state = state.clone()  # torch reads from where the memory begins, of a view of several states
    while torch._C._functorch.is_functorch_wrapped_tensor(state):  # by a transform that is under way
        state = torch._C._functorch.get_unwrapped(state)
    with drawing_from(state, device):
        return run(*args, **kwargs)


def state_of(device: torch.device) -> torch.Tensor:
    """The state of the generator that a device draws from."""
    if _is_simulated(device):
        return torch.empty(_SIZE, dtype=torch.uint8)
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def state_proxy(device: devices.Device) -> TensorProxy:
    """The proxy of what `state_of` returns."""
    size = len(state_of(devices.to_torch_device(device)))
    return TensorProxy(shape=(size,), device=devices.cpu, dtype=dtypes.uint8)


@contextlib.contextmanager
def drawing_from(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Inside, a device draws from a state; what is drawn later is not disturbed."""
    if _is_simulated(device):
        yield
        return
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device.index or 0] if is_cuda else [], device_type="cuda"):
        torch.cuda.set_rng_state(state, device) if is_cuda else torch.set_rng_state(state)
        yield


def _is_simulated(device: torch.device) -> bool:
    return device.type == "meta" or detect_fake_mode() is not None


_SIZE = len(torch.get_rng_state())


def _refuse_batches(tensors: Sequence[torch.Tensor]) -> None:
    """A batch has no state of each sample."""
    if any(map(torch._C._functorch.is_batchedtensor, tensors)):
        raise MissingTransformRuleError(
            with_details(
                "the gradient of an operation that draws numbers, in a batch of vmap",
                why="torch has its numbers from one state, and each sample would need its own",
                instead="a loop over the samples, or an operation with a rule (dropout, rrelu, gumbel_softmax)",
            )
        )
