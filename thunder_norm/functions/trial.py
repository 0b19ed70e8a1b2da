"""What a call of one of torch's functions returns, and what it does to its arguments, found by running it without data."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.tracing.fake_norms import PositiveDims
from thunder.core import devices, dtypes
from thunder.core.proxies import NumberProxy, TensorProxy

# They look at values, to check them or in ways that the shapes they return do not depend on: run on ones instead of without data.
_LOOKS_AT_VALUES = frozenset(
    {
        torch.quantile,
        torch.nanquantile,
        torch.Tensor.quantile,
        torch.Tensor.nanquantile,
        torch.cov,
        torch.corrcoef,
        torch.combinations,
        torch.istft,
        torch.Tensor.istft,
        torch.nn.functional.gaussian_nll_loss,
    }
)

# So does this one, in a way that its shapes do depend on: run on random numbers, of full rank, which it is to be given as well.
_NEEDS_FULL_RANK = frozenset({torch.linalg.lstsq})

_POSITION = "_thunder_norm_position"


class Trial(NamedTuple):
    """A call on tensors that stand for proxies.

    Attributes:
        result: what it returned, in tensors without data.
        changed: positions, among the tensors of the arguments, of those that it changed in place.
        views: results that share memory with an argument: positions of both.  Arguments that were changed are no results.
    """

    result: Any
    changed: tuple[int, ...]
    views: tuple[tuple[int, int], ...]

    @property
    def outs(self) -> list[torch.Tensor]:
        """The tensors of the result that are no arguments changed in place."""
        tensors = [t for t in tree_flatten(self.result)[0] if isinstance(t, torch.Tensor)]
        return [t for t in tensors if position_of(t) not in self.changed]


def position_of(t: torch.Tensor) -> int | None:
    """Which argument a tensor of a trial is."""
    return getattr(t, _POSITION, None)


def try_out(function: Callable, args: tuple, kwargs: dict) -> Trial:
    """Call a torch function with proxies in its arguments.

    Raises:
        DataDependentOutputException, DynamicOutputShapeException: it needs values.
        whatever torch raises for these arguments.
    """
    make = _values_for(function)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if make is torch.empty else contextlib.nullcontext()
    with mode, PositiveDims(), torch.no_grad(), _quiet():
        given, tensors = _samples((args, kwargs), make)
        before = [t._version for t in tensors]
        result = function(*given[0], **given[1])
    changed = tuple(i for i, t in enumerate(tensors) if t._version != before[i])
    trial = Trial(result, changed, ())
    views = []
    for i, out in enumerate(trial.outs):
        for k, t in enumerate(tensors):
            if k not in changed and out.untyped_storage()._cdata == t.untyped_storage()._cdata:
                views.append((i, k))
    return trial._replace(views=tuple(views))


def _values_for(function: Callable) -> Callable:
    """What makes the tensors that a function is tried on."""
    if function in _LOOKS_AT_VALUES:
        return torch.ones
    return _random if function in _NEEDS_FULL_RANK else torch.empty


def _random(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    generator = torch.Generator(options["device"]).manual_seed(0)  # the user's is not to move
    return torch.randn(shape, generator=generator, **options)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's report of a call that fails without data: the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _samples(tree: Any, make: Callable) -> tuple[Any, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []

    def sample(v: Any) -> Any:
        if not isinstance(v, TensorProxy):
            return for_torch(v)
        t = make(tuple(v.shape), dtype=dtypes.to_torch_dtype(v.dtype), device=devices.to_torch_device(v.device))
        setattr(t, _POSITION, len(tensors))
        tensors.append(t)
        return t

    return tree_map(sample, tree), tensors


def for_torch(v: Any) -> Any:
    """Torch's dtype, device or number for Thunder's, anything else as it is."""
    if isinstance(v, dtypes.dtype):
        return dtypes.to_torch_dtype(v)
    if isinstance(v, NumberProxy):
        return v.value
    return devices.to_torch_device(v) if isinstance(v, devices.Device) else v
