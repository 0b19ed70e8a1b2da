"""Programs whose forward is right and whose backward cannot be traced: the backward says so when, and if, it is asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from thunder_norm.errors import ThunderNormError, UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.fallback import fallback_executor
from thunder_norm.subclass.backward.gradients import Segment, Source, Structure
from thunder_norm.subclass.recording.record import Recorded, Step
from thunder_norm.tracing.translation import proxy_like
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core.proxies import TensorProxy


def untraceable_backward(node: str, last: tuple[Any, str] | None, error: Exception) -> Exception:
    """The error for a backward that failed while it was traced; `last` is the operation that was given to a class last."""
    if isinstance(error, ThunderNormError):
        return error
    operation, cls = ("an operation", "class") if last is None else last
    return UnsupportedOpError(
        with_details(
            f"the backward needs {operation} on a {cls}, which failed",
            node=node,
            why=f"{type(error).__name__}: {error}",
            instead=f"let __torch_dispatch__ of {cls} do the operation, or call the function under torch.no_grad()",
        )
    )


_counter = itertools.count()


class Refuse(Step):
    """Stands for the whole backward: raises when it runs."""

    def __init__(self, error: Exception, gradients: Sequence[torch.Tensor]):
        self.error = error
        self.gradients = gradients

    def emit(self, *cotangents: TensorProxy) -> tuple[TensorProxy, ...]:
        error = self.error

        def run(*tensors: torch.Tensor) -> NoReturn:
            raise type(error)(*error.args)

        def meta(*proxies: TensorProxy) -> tuple[TensorProxy, ...]:
            return tuple(proxy_like(t) for t in self.gradients)

        refuse = fallback_executor.register_operator(f"refused_backward_{next(_counter)}", meta=meta, fn=run)
        return refuse(*cotangents)


def refused_backward(
    acquisition: Acquisition, sources: Sequence[torch.Tensor], structures: Sequence[Structure], error: Exception
) -> tuple[list[Source], list[Segment]]:
    """One operation that raises `error` in the place of the gradients of all inputs."""
    found = []
    for fake in sources:
        with torch.no_grad(), acquisition.fakes.mode:  # of a wrapper nothing is known but that there is a gradient
            gradient = torch.empty(() if is_wrapper(fake) else fake.shape, dtype=fake.dtype, device=fake.device)
        found.append(Source(fake, Structure.of(gradient, "an input")))
    gradients = tuple(t for s in found for t in s.gradient.carried)
    cotangents = tuple(t for s in structures for t in s.carried)
    recorded = Recorded(Refuse(error, gradients), cotangents, {}, gradients, gradients)
    return found, [Segment("refused", [recorded])]
